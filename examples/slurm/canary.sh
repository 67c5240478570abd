#!/usr/bin/env bash
# canary.sh FILE WORD: prove on one node that FILE, which another node wrote, is here, and that this node can write too.
set -euo pipefail
if [[ "$(cat -- "$1" 2>/dev/null)" != "$2" ]]; then
    echo "error: node ${SLURMD_NODENAME:-$(hostname)} does not see $1, which the first node wrote." \
        "OUTPUT must be on a file system that all nodes share" >&2
    exit 1
fi
touch -- "$1.${SLURMD_NODENAME:-$(hostname)}"

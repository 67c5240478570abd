#!/usr/bin/env bash
# Submit a job: examples/slurm/submit.sh SCRIPT JOB.env [more flags of sbatch]
#
#   examples/slurm/submit.sh examples/slurm/train.sbatch my_job.env
#   examples/slurm/submit.sh examples/slurm/train_and_sample.sbatch my_job.env --time=4:00:00
#
# Prints what sbatch prints. Submitting the same job again continues it from its last checkpoint.
set -euo pipefail

fail() {
    echo "submit.sh: error: $1" >&2
    exit 2
}

(($# >= 2)) || fail "usage: submit.sh SCRIPT JOB.env [more flags of sbatch]"
script=$(realpath -- "$1") job=$(realpath -- "$2")
shift 2
[[ -f $script ]] || fail "$script is not a file: name train.sbatch or train_and_sample.sbatch"
[[ -f $job ]] || fail "$job is not a file: copy job.env and edit it"

repository=$(realpath -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
cd -- "$repository"
source examples/slurm/common.sh
load_job "$job"

size=$NODES
if [[ $script == *train_and_sample.sbatch ]]; then
    ((SAMPLER_NODES >= 1)) || fail "$job: train_and_sample.sbatch needs SAMPLER_NODES of at least 1"
    ((${#SAMPLER[@]})) || fail "$job: train_and_sample.sbatch needs a SAMPLER"
    size=$((NODES + SAMPLER_NODES))
fi
mkdir -p -- "$OUTPUT/logs"
# `#SBATCH` lines cannot use variables, so the size of the job is given here.
flags=(--chdir="$repository" --output="$OUTPUT/logs/job-%j.log" --nodes="$size" --ntasks-per-node="$RANKS_PER_NODE")
((GPUS_PER_NODE == 0)) || flags+=(--gpus-per-node="$GPUS_PER_NODE")
exec sbatch "${flags[@]}" "${SBATCH_ARGS[@]}" "$@" "$script" "$job"

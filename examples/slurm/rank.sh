#!/usr/bin/env bash
# One rank: torch.distributed's variables from Slurm's, then the command. srun starts one per GPU, so there is no torchrun.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*} # "8(x4)": 8 on each of 4 nodes
status=0
"$@" || status=$?
# Flags that cannot be parsed: another start would end the same way. srun alone reports the ranks that it killed then.
((status != 2)) || touch -- "$LOGS/refused"
exit "$status"

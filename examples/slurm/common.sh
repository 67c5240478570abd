# What the job scripts share; they run in the repository's root and source this file.
# shellcheck shell=bash disable=SC2034 # the scripts use what is set here

# load_job FILE: read the job's settings, fill in the rest, refuse what cannot work.
load_job() {
    JOB_FILE=$1
    NODES='' GPUS_PER_NODE='' OUTPUT='' ROLLOUTS='' SAMPLER_NODES=0
    SBATCH_ARGS=() MODEL_ARGS=() PARALLEL_ARGS=() OPTIMIZER_ARGS=() ROLLOUT_ARGS=() SC_ARGS=()
    CONTAINER_ARGS=() SAMPLER=() SAMPLER_CONTAINER_ARGS=() TRAINER=(examples/pretrain_gpt_sc.py) TRAINER_FLAGS=()
    # shellcheck source=/dev/null
    source "$JOB_FILE"
    local name
    for name in NODES GPUS_PER_NODE SAMPLER_NODES; do
        [[ ${!name} =~ ^[0-9]+$ ]] || refuse "$name must be a number, got '${!name}'"
    done
    for name in OUTPUT ROLLOUTS; do
        [[ ${!name} == /* ]] || refuse "$name must be an absolute path, got '${!name}'"
    done
    ((NODES >= 1)) || refuse "NODES must be at least 1"
    RANKS_PER_NODE=$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))
    CHECKPOINTS=$OUTPUT/checkpoints
    WEIGHTS=${WEIGHTS:-$OUTPUT/weights}
    if [[ -z ${PYTHON:-} ]]; then
        [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python || PYTHON=python3
    fi
    SAMPLER_PYTHON=${SAMPLER_PYTHON:-$PYTHON}
    ((${#SAMPLER_CONTAINER_ARGS[@]})) || SAMPLER_CONTAINER_ARGS=("${CONTAINER_ARGS[@]}")
}

refuse() {
    echo "$JOB_FILE: error: $1" >&2
    exit 2
}

say() {
    echo "[$(date +%FT%T)] $*"
}

# begin_job FILE: everything before the first step that trains.
begin_job() {
    load_job "$1"
    LOGS=$OUTPUT/logs/$SLURM_JOB_ID/attempt-${SLURM_RESTART_COUNT:-0} # a requeued job has the same number
    STOPPING=$LOGS/stopping                                            # exists once no step may be started any more
    INTERRUPTED='' TRACKER=$CHECKPOINTS/latest_checkpointed_iteration.txt
    mkdir -p -- "$LOGS" "$CHECKPOINTS"
    TRACKER_AT_START=$(fingerprint "$TRACKER")
    cp -- "$JOB_FILE" "$LOGS/job.env"
    export LOGS
    export_environment
    set_deadline
    say "job $SLURM_JOB_ID, attempt ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST; logs in $LOGS"
    say "megatron-sc at $(describe_code)"
    check_shared_folder
}

describe_code() {
    local commit
    if commit=$(git rev-parse HEAD 2>/dev/null); then
        [[ -z $(git status --porcelain --untracked-files=no 2>/dev/null) ]] || commit+=", with changes that are not committed"
        echo "commit $commit"
    else
        echo "$PWD, which is no git checkout"
    fi
}

export_environment() {
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron's tensor parallelism asserts it
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since 22.05 srun does not take it over from sbatch
    fi
}

# set_deadline: DEADLINE is when training must end by itself, in seconds since the epoch, should the signal not have ended
# it: 420 s before the time limit, or at three quarters of a short one. Empty without a time limit.
set_deadline() {
    local end left
    DEADLINE=
    end=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%e)
    if [[ $end == [0-9]* ]]; then
        end=$(date -d "$end" +%s)
        left=$((end - $(date +%s)))
        DEADLINE=$((end - (left > 1680 ? 420 : left / 4)))
    fi
}

# check_shared_folder: in the container too, where there is one, so that a mount that is missing shows now.
check_shared_folder() {
    local file=$LOGS/canary word="$SLURM_JOB_ID-$RANDOM" seen
    echo "$word" >"$file"
    if ! srun --job-name=canary --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        "${CONTAINER_ARGS[@]}" examples/slurm/canary.sh "$file" "$word"; then
        say "error: not every node can use $OUTPUT" >&2
        exit 1
    fi
    seen=$(find "$LOGS" -name 'canary.*' | wc -l)
    if ((seen != SLURM_JOB_NUM_NODES)); then
        say "error: what $((SLURM_JOB_NUM_NODES - seen)) of $SLURM_JOB_NUM_NODES nodes wrote to $LOGS is not here:" \
            "OUTPUT must be on a file system that all nodes share" >&2
        exit 1
    fi
    rm -- "$file" "$file".*
}

# supervise NAME FILE COMMAND...: run COMMAND with a number added, 0 at first, until it succeeds.
#
# After a failure it runs again, so a crash costs no place in Slurm's queue. It must get somewhere: FILE (a checkpoint's
# tracker, a ledger) changes when it does. After 2 runs in a row without that, and at once where flags were refused, its
# exit code is ours.
supervise() {
    local name=$1 progress=$2 start=0 fruitless=0 status before
    shift 2
    trap : USR1 # the job script's; the default would end this subshell
    while [[ ! -e $STOPPING ]]; do
        before=$(fingerprint "$progress")
        say "$name: start $start"
        status=0
        "$@" "$start" || status=$?
        say "$name: exit code $status"
        [[ ! -e $LOGS/refused ]] || return 2
        if ((status == 0)) || [[ -e $STOPPING ]]; then
            return "$status"
        fi
        fruitless=$((fruitless + 1))
        [[ $(fingerprint "$progress") == "$before" ]] || fruitless=0
        if ((fruitless == 2)); then
            say "error: $name failed twice without getting anywhere; see $LOGS/$name-*" >&2
            return "$status"
        fi
        start=$((start + 1))
    done
}

fingerprint() {
    cksum "$1" 2>/dev/null || true
}

# run_trainer START: Megatron on the last NODES nodes of the job, one task a GPU; the exit code of the worst rank.
run_trainer() {
    local start=$1 first=$((SLURM_JOB_NUM_NODES - NODES)) flags=()
    local nodes
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=$(address_of "${nodes[first]}")
    [[ -n $MASTER_ADDR ]] || { say "error: Slurm knows no address of ${nodes[first]}" >&2 && return 1; }
    MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below 32768, where the kernel takes ports for outgoing connections
    export MASTER_ADDR MASTER_PORT
    flags=(
        --rollout-path "$ROLLOUTS"
        --save "$CHECKPOINTS" --load "$CHECKPOINTS" --metrics-jsonl "$OUTPUT/metrics.jsonl"
        --exit-signal-handler --exit-signal "SIG$END_SIGNAL" --distributed-timeout-minutes 60
    )
    [[ -z $DEADLINE ]] || flags+=(--exit-duration-in-mins "$(minutes_left)")
    run_step trainer "$start" --relative="$first" --nodes="$NODES" \
        --ntasks="$((NODES * RANKS_PER_NODE))" --ntasks-per-node="$RANKS_PER_NODE" "${CONTAINER_ARGS[@]}" \
        examples/slurm/rank.sh "$PYTHON" "${TRAINER[@]}" "${flags[@]}" "${TRAINER_FLAGS[@]}" "${MODEL_ARGS[@]}" \
        "${PARALLEL_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${SC_ARGS[@]}"
}

# address_of NODE: where other nodes reach it. Its name need not resolve.
address_of() {
    scontrol show node --oneliner "$1" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p'
}

minutes_left() {
    local left=$(((DEADLINE - $(date +%s)) / 60))
    echo $((left > 1 ? left : 1))
}

# run_step NAME START ARGUMENTS...: a step with a log file for each node, ended as a whole when one task fails.
run_step() {
    local name=$1 start=$2
    shift 2
    srun --job-name="$name" --kill-on-bad-exit=1 --label --open-mode=append --output="$LOGS/$name-$start-node%n-%N.log" "$@"
}

# steps_of NAME: the numbers of its running steps.
steps_of() {
    squeue --noheader --steps --job="$SLURM_JOB_ID" --format='%i %j' | awk -v name="$1" '$2 == name { print $1 }'
}

# Slurm signals every process of a step, also Megatron's helpers that write checkpoints. SIGTERM would end these, and the
# save with them; SIGURG is ignored by every process that has no handler for it.
readonly END_SIGNAL=URG

# end_steps NAME PID: ask its steps to end, kill what is left after GRACE seconds; return when its supervisor PID is gone.
GRACE=${GRACE:-240}
end_steps() {
    local name=$1 supervisor=$2 waited=0 signal=$END_SIGNAL step
    while kill -0 "$supervisor" 2>/dev/null; do
        if ((waited >= GRACE)) && [[ $signal != KILL ]]; then
            say "$name: killed, $GRACE s after it was asked to end"
            signal=KILL
        fi
        for step in $(steps_of "$name"); do
            scancel --signal="$signal" "$step" 2>/dev/null || true # it may just have ended
        done
        sleep 2
        waited=$((waited + 2))
    done
}

# interrupt: what USR1 does. Slurm sends it before the time limit; the trainer saves and the job is queued again.
interrupt() {
    [[ -z $INTERRUPTED ]] || return 0
    say "interrupted: the trainer saves, then the job is queued again"
    INTERRUPTED=yes
    touch -- "$STOPPING"
    end_steps trainer "$TRAINER_PID" &
}

# wait_for PID: its exit code, however often a signal interrupts the wait.
wait_for() {
    local interrupted=$((128 + $(kill -l USR1))) status
    while true; do
        status=0
        wait "$1" || status=$?
        ((status == interrupted)) || return "$status"
    done
}

# finish_job STATUS: exit with the trainer's exit code, or queue the job again where its time was up.
finish_job() {
    if [[ -z $INTERRUPTED ]] && ! grep -qs 'exiting program after [0-9.]* minutes' "$LOGS"/trainer-*; then
        say "finished with exit code $1"
        exit "$1"
    fi
    if [[ $(fingerprint "$TRACKER") == "$TRACKER_AT_START" ]]; then
        say "error: no checkpoint was saved in this attempt, so another would not get further; not queued again." \
            "Give it more time (--time), save more often (--save-interval), or, for a short job, let Slurm warn it later" \
            "than 600 s before its end (submit.sh ... --signal=B:USR1@60)" >&2
        exit 1
    fi
    say "queued again"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 120 # Slurm ends this script
    exit 1
}

#!/usr/bin/env bash
# An experiment on a Slurm cluster: sbatch cluster/slurm.sh FILE.toml [further options of `xsalab run`]
#
#     sbatch cluster/slurm.sh experiments/muon-study.toml                 one node, a run on each of its GPUs
#     sbatch --nodes=4 cluster/slurm.sh experiments/muon-study.toml       a Ray cluster inside the allocation
#
# Submit it from the project's folder, on a file system that all nodes share; .venv must be there (`make .venv/.ready`;
# with several nodes also: .venv/bin/pip install -c constraints.txt -e '.[ray]'). Whatever ends the job, preemption or
# its time, the job is queued again, and the same command continues from the checkpoints that are there.
#SBATCH --job-name=xsalab
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

file=${1:?usage: sbatch cluster/slurm.sh FILE.toml [options of xsalab run]}
shift
cd "${SLURM_SUBMIT_DIR:?start it with sbatch}"
bin=.venv/bin
nodes=${SLURM_JOB_NUM_NODES:-1}
gpus=${SLURM_GPUS_ON_NODE:-8}

# Slurm sends TERM two minutes before the end: what runs is stopped, its last checkpoint stays, the job comes again.
again() {
    trap '' TERM
    kill $(jobs -p) 2>/dev/null || true
    wait || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap again TERM

if [ "$nodes" -eq 1 ]; then
    srun --ntasks=1 "$bin/xsalab" run "$file" --devices "$(seq -s, 0 $((gpus - 1)))" "$@" &
    wait $!
    exit
fi

names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${names%%$'\n'*}
address=$first:${RAY_PORT:-6379}
srun --nodes=1 --ntasks=1 --nodelist="$first" "$bin/ray" start --head --port="${address##*:}" --block &
for try in $(seq 60); do
    "$bin/ray" health-check --address "$address" 2>/dev/null && break
    [ "$try" -lt 60 ] || { echo "no Ray head at $address after two minutes" >&2; exit 1; }
    sleep "${RAY_WAIT:-2}"
done
srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$first" "$bin/ray" start --address="$address" --block &
"$bin/xsalab" run "$file" --on ray --address "$address" "$@" &
code=0
wait $! || code=$?
kill $(jobs -p) 2>/dev/null || true
exit "$code"

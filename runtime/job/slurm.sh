#!/bin/bash
# Trains a plan on the machines of a Slurm job, a task a rank, and starts again from the last checkpoint after a fault:
#
#   sbatch slurm.sh plan.json --steps 1000 --checkpoints /shared/run --every 100 --device cuda
#
# Copy it and set the lines below. For a script of your own put it in the place of `-m runtime.train_main`.
#SBATCH --job-name=meshwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue

set -uo pipefail

python=${MESHWRIGHT_PYTHON:-python}
restarts=${MESHWRIGHT_RESTARTS:-3}

for ((attempt = 0; ; attempt++)); do
    # A rank that fails prints one line that names it; srun then ends the others.
    srun --kill-on-bad-exit=1 --wait=30 "$python" -m runtime.train_main "$@" && exit 0
    code=$?
    if ((attempt >= restarts)); then
        exit "$code"
    fi
    echo "meshwright: restart $((attempt + 1)) of $restarts" >&2
done

#!/bin/bash
# Train on several machines under Slurm; the job requeues itself until the last step is done.
#
#   sbatch launch/slurm.sh llama3_70b --run long --parallel.zero 1
#   sbatch --nodes 16 --time 4:00:00 launch/slurm.sh my_run.yaml
#
# A requeued or resubmitted job may have another number of nodes if parallel.dp is unset: the run continues at its step.
#
# The arguments after the file are passed to `megalith train`. The folder `runs/` must be on a file system that all
# machines share. Activate your environment before sbatch: Slurm passes it to the job.

#SBATCH --job-name=megalith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.txt

# --signal: 300 s before the time limit every rank receives SIGTERM, finishes its step, saves, and exits with 75.
# --requeue: Slurm may also requeue the job if a machine fails or a job with higher priority preempts it.

set -u
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # a different port for each job on a machine
export MASTER_ADDR MASTER_PORT
export MEGALITH_SUSPECTS="slurm-$SLURM_JOB_ID.suspects" # rank 0 writes the hosts of suspect machines here

# One task is one rank. When one ends, the others must end within 120 s (--wait); srun returns the largest exit code.
srun --kill-on-bad-exit=0 --wait=120 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec megalith train "$@"
' rank "$@"
code=$?

if [ "$code" -eq 75 ]; then # stopped after a save: the same command resumes
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -eq 76 ] && [ -s "$MEGALITH_SUSPECTS" ]; then # a machine computes wrongly: resume on others
    sbatch --exclude="$(cat "$MEGALITH_SUSPECTS")" --nodes="$SLURM_JOB_NUM_NODES" "$0" "$@"
fi
exit "$code"

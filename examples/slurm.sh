#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=4 --ntasks-per-node=1 --cpus-per-task=32 --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue --open-mode=append

# Two minutes before its time is over, and when it is preempted, this script gets SIGTERM. It passes that on
# to the workers, which write a checkpoint, and queues the job again: it goes on from there, on as many
# machines as it gets then.

again() {
    trap '' TERM
    scancel --signal=TERM "$SLURM_JOB_ID" # to the processes of srun, not to this script
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
}
trap again TERM

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Any program of samestep's, or: -m samestep train cifar10 --towers 32 --run-dir "$HOME/runs/$SLURM_JOB_NAME"
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29400" \
    train.py &
step=$!
wait "$step"

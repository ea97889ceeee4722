#!/bin/bash
# sbatch --nodes=2 cluster/slurm.sh --mode zero3 --global_batch_size 96 --micro_batch_size 1
#
# Submit it in the root of the repository, on a file system that all nodes see, with what your site
# wants beside --nodes, such as --gpus-per-node=8 --time=12:00:00. Other arguments go to train.py.
# The run goes on when a node is lost, on those that are left. Slurm does not replace a lost node.

#SBATCH --job-name=nanozero
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

# The first node runs this script and the rendezvous. If it is lost, Slurm queues the job again.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))  # another job on this node has another port

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # seconds for a checkpoint; torchrun gives 30 otherwise

# One torchrun per node, and a rank per GPU, or one where there is none. A task that fails must not
# end the others, which srun might do without the next flags, where a site has set it so.
srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \
    torchrun --nnodes="1:$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" \
    --max-restarts=99 --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d \
    --rdzv_endpoint="$host:$port" --rdzv_conf=last_call_timeout=10,keep_alive_interval=2 \
    train.py --resume auto "$@" &
run=$!

# 120 seconds before the limit Slurm sends SIGUSR1 to this script alone. The ranks get SIGTERM from
# here, and write a checkpoint. Then the job is queued again, and resumes.
trap 'is_over=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

wait "$run"
status=$?
while kill -0 "$run" 2> /dev/null; do  # the trap has ended the wait, but not the run
    wait "$run"
    status=$?
done
[ -z "$is_over" ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"

#!/usr/bin/env bash
# ./bench.sh TABLE [OPTION ...] [FLAG OF train.py ...]       (times: on two cores)
#
#   bits          hashes of eight modes on 1, 2, 3, 4, 6 and 12 ranks                    10 min
#   modes         time, traffic, memory beside torch's modes, and DeepSpeed's if it is there  30 min
#   memory        what a rank holds beside the ZeRO paper's formula                       2 min
#   scaling       weak and strong: tokens and sequences a second and device              15 min
#   buckets       over sizes of buckets; with a rate, such as 1gbit, over a cable, too   20 min
#   precisions    losses in fp32, bf16 and fp16                                          10 min
#   links 1gbit   two hosts with a cable of this rate, beside predict (Linux, root)      15 min
#   cost          device hours for 10^9 tokens, and dollars: --price 2.5                 30 min
#   collectives   each one beside torch's: --sizes 64kB,4MB --repeats 9                   2 min
#   overhead      what a wrapper makes the CPU do, counted: kernels, calls                1 min
#   fit           the largest model in --budget_mb 192 a rank; on one rank of single     10 min
#   predict       1 to 1,024 devices, on paper: --step_ms 123 --tokens 32768 --model gpt2, or
#                 --result FILE [--model]; --node_size 8 --intra 450 --inter 50 (GB/s), --price 2.5
#   compare A B   two out_dirs of train.py: --rtol 1e-5 --atol 1e-6
#
# --worlds 1,2,4  --modes ddp,zero3  --rounds 3  --micro_batch_size 4  --json  --svg FILE
# --until_loss 2  steps and seconds until the validation loss is there, in --max_steps 400
# --nnodes 2 --node_rank 0 --master_addr HOST   ranks on hosts: start it with these on each
# Tables run on the CPU, unless told: --device cuda. They are kept in out/bench.
set -euo pipefail
cd "$(dirname "$0")"
exec python -m bench "$@"

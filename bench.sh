#!/usr/bin/env bash
# Tables of how equal, how fast and how large the modes are, beside what ships with torch.
#
#     ./bench.sh bits             the param_sha256 of every mode at 1, 2, 3, 4, 6 and 12 ranks:
#                                 10 minutes
#     ./bench.sh modes            time and memory of every mode, of torch's and of DeepSpeed's:
#                                 30 minutes
#     ./bench.sh muon             the same of Muon beside AdamW, on a small model: 10 minutes
#     ./bench.sh memory           parameters, gradients and optimizer state of a rank, drawn in
#                                 assets/memory.svg (matplotlib): 5 minutes
#     ./bench.sh scaling          weak and strong scaling: 20 minutes
#     ./bench.sh link 1gbit       two hosts with a slow link between them (Linux, root, iproute2):
#                                 5 minutes
#     ./bench.sh overhead         what each wrapper adds to a step, in kernels, calls, CPU time:
#                                 2 minutes
#     ./bench.sh gpu              all that an accelerator has to show, equal bits, speed, overlap,
#                                 CPU time: some minutes on two simulated devices
#     ./bench.sh timeline 1gbit   pictures of a step in time, in assets/, over such a link; without
#                                 a rate over loopback (matplotlib): 5 minutes
#
# Times are those of two cores.
#
# Options, then any flags of train.py, --micro_batch_size among them:
#     --worlds "1 2 4"                    numbers of ranks
#     --rounds 3                          runs of each row
#     --modes "ddp zero3 torch-fsdp"      these rows only
# overhead has --worlds, and the flags of bench/overhead.py.
#
# Replaces a benchmark harness by a loop: for each round, label, W and row one run of train.py. Its
# RESULT line goes to out/bench/COMMAND.jsonl. bench/tables.py makes Markdown tables of these lines,
# in out/bench/COMMAND.md. A row that fails says why, the others still run, and the exit status is
# 1. Flags are looked at before the first run. What the run of COMMAND before has left is kept, as
# out/bench/COMMAND_before.md and .jsonl.
#
# Runs by themselves scatter by up to 20 % on a shared machine. So each round runs every row once,
# and a cell is the median of the rounds, with the quartiles beside it. All but gpu run on the CPU,
# unless --device says otherwise.
#
# modes has the rows deepspeed1, deepspeed2 and deepspeed3 where the package deepspeed is installed:
# pip install deepspeed. On a CPU it also needs a C++ compiler.
#
# gpu takes the tiny model where devices have little memory, as simulated ones do. Ranks share a
# single device if it is one of NCCL's: then their hashes and bytes count, and their times do not.
# Where hashes differ, bench/where_bits_differ.py says why.
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "bench.sh: $*" >&2; }

die() {
    say "$*"
    exit 2
}

# What a table was made with.
describe() {
    printf '%s: %s%s cores of %s, torch %s, commit %s, %s\n\n' "$COMMAND" "$MACHINE" \
        "$(getconf _NPROCESSORS_ONLN)" "$(sed -n '/^model name/{s/.*: //p;q;}' /proc/cpuinfo)" \
        "$(ask version)" "$(git describe --always --dirty)" "$(date +%F)"
}

usage() { sed -n '2,/^# Replaces/s/^# \{0,1\}//p' bench.sh | sed '$d' >&2; }

ask() { python bench/tables.py ask "$@"; }

# -------------------------------------------------------------------------------------------------
# Commands. ROWS: each is a mode, and flags of its own. LABELS: each row runs once for each of them.
COMMAND=${1:-}
LABELS=("")
WORLDS="1 2 4"
ROUNDS=3
MODES=""
MICRO_BATCH_SIZE=1
MACHINE=""
NOTE=""
FLAGS=(--out_dir out/bench/run --eval_steps 0 --sample_tokens 0 --save_interval 0
       --check_interval 0 --device cpu)
# Sizes at which communication weighs as much as computing: 31.8M parameters, 64 tokens a rank.
SMALL=(--n_layer 10 --n_head 8 --n_embd 512 --block_size 64 --max_steps 8)

case $COMMAND in
bits)
    LABELS=("12 micro batches")
    WORLDS="1 2 3 4 6 12"
    ROUNDS=1
    ROWS=(single naive ddp zero1 zero2 zero3 torch-ddp torch-fsdp)
    FLAGS+=(--max_steps 20)
    ;;
modes)
    ROWS=(single naive torch-ddp ddp torch-zero1 zero1 torch-fsdp-kept zero2 torch-fsdp zero3)
    if ask has deepspeed; then
        ROWS+=(deepspeed1 deepspeed2 deepspeed3)
    fi
    FLAGS+=("${SMALL[@]}")
    ;;
muon)  # Muon multiplies in bf16, for which most CPUs take long: hence train.py's smallest model
    ROWS=(single torch-ddp ddp zero1 zero2 zero3)
    for mode in single torch-ddp ddp zero1 zero2 zero3; do
        ROWS+=("$mode --optimizer muon")
    done
    FLAGS+=(--block_size 64 --max_steps 8)
    ;;
memory)
    ask has matplotlib || die "memory draws: pip install matplotlib"
    WORLDS=4
    ROUNDS=1
    ROWS=(ddp zero1 zero2 zero3)
    FLAGS+=("${SMALL[@]}" --max_steps 4 --profile 1)
    ;;
scaling)  # 1024 tokens a rank: bound by computing
    LABELS=(weak strong)
    ROUNDS=2
    MICRO_BATCH_SIZE=4
    ROWS=(single naive ddp zero3)
    FLAGS+=(--n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --max_steps 8)
    ;;
link)
    LABELS=()
    WORLDS=2
    ROUNDS=2
    MICRO_BATCH_SIZE=4
    ROWS=(torch-ddp ddp "ddp --comm_hook bf16" "ddp --comm_hook powersgd --warmup_steps 0"
          "ddp --comm_hook topk --warmup_steps 0" zero1 zero2 torch-fsdp zero3)
    FLAGS+=("${SMALL[@]}")
    ;;
overhead)
    WORLDS="1 2"
    ROWS=()
    FLAGS=()
    ;;
gpu)
    FOUND=$(ask accelerator) || die "gpu: torch finds no accelerator here"
    read -r DEVICE BACKEND N_DEVICES GIGABYTES NAME <<< "$FOUND"
    MACHINE="$N_DEVICES x $NAME, "
    WORLDS="1 $N_DEVICES"
    ROUNDS=1
    SIZE=gpt2
    COMPILE=--compile
    MICRO_BATCH_SIZE=8
    if ((N_DEVICES == 1)); then
        LABELS=(hashes times)
        WORLDS="1 2 3"
    fi
    if [[ $N_DEVICES == 1 && $BACKEND != *nccl* ]]; then
        LABELS=(times)
        WORLDS=1
        NOTE="W = 1 only: ranks can share a device over NCCL, and $DEVICE has $BACKEND."
        say "$NOTE"
    fi
    if ((GIGABYTES < 16)); then
        SIZE=tiny
        COMPILE=--no-compile
        MICRO_BATCH_SIZE=2
    fi
    ROWS=(single naive torch-ddp ddp zero1 zero2 torch-fsdp zero3)
    for mode in single torch-ddp ddp zero1 zero2 torch-fsdp zero3; do
        ROWS+=("$mode --dtype bf16 $COMPILE")
    done
    if ((N_DEVICES > 1)); then  # one rank sends nothing that could be hidden
        for mode in ddp zero2 zero3; do
            ROWS+=("$mode --profile 4")
        done
    fi
    FLAGS+=(--device "$DEVICE")
    ;;
timeline)  # computing takes about as long as communicating
    ask has matplotlib || die "timeline draws: pip install matplotlib"
    WORLDS=2
    ROUNDS=1
    ROWS=(ddp zero1 zero3)
    FLAGS+=(--n_embd 256 --max_steps 4 --profile 1 --bucket_cap_mb 3.5)
    ;;
-h | --help)
    usage
    exit
    ;;
*)
    usage
    exit 2
    ;;
esac

# Sequences of a step, over all ranks.
batch_size() {  # LABEL W
    case "$COMMAND $1" in
    bits*) echo $((12 * MICRO_BATCH_SIZE)) ;;
    # For every W, so that all end on one hash.
    "gpu hashes") echo $((6 * MICRO_BATCH_SIZE)) ;;
    "gpu ") echo $((N_DEVICES * MICRO_BATCH_SIZE)) ;;
    "scaling strong") echo $((4 * MICRO_BATCH_SIZE)) ;;
    *) echo $(($2 * MICRO_BATCH_SIZE)) ;;
    esac
}

# Whether a row has a place at W under a label.
belongs() {  # LABEL ROW W
    case "$COMMAND $1" in
    "gpu hashes") [[ $2 != *--* && ($2 != single || $3 == 1) ]] ;;
    "gpu times") (($3 == 1)) ;;
    # One process is one rank; scaling compares with W of them.
    scaling*) true ;;
    *) [[ $2 != single* || $3 == 1 ]] ;;
    esac
}

# Flags of a label, before those that were asked for.
label_flags() {  # LABEL
    case "$COMMAND $1" in
    # Over sockets GPT-2's gradients take seconds, and hashes need no size.
    "gpu hashes") echo --model tiny --max_steps 6 ;;
    gpu*) echo --model "$SIZE" --max_steps 12 ;;
    esac
}

# -------------------------------------------------------------------------------------------------
# A link: two network namespaces and a cable between them.
make_link() {  # RATE
    [[ $(id -u) == 0 ]] || die "$1: only root on Linux can make the network namespaces of a link"
    trap remove_link EXIT
    remove_link
    ip link add nanozero0 type veth peer name nanozero1
    for rank in 0 1; do
        ip netns add nanozero$rank
        ip link set nanozero$rank netns nanozero$rank
        ip -n nanozero$rank addr add 10.77.0.$((rank + 1))/24 dev nanozero$rank
        ip -n nanozero$rank link set nanozero$rank up
        ip -n nanozero$rank link set lo up
        ip netns exec nanozero$rank tc qdisc replace dev nanozero$rank root tbf rate "$1" \
            burst 128kb latency 50ms || die "link $1: tc knows no such rate"
    done
}

remove_link() {
    for rank in 0 1; do
        ip netns del nanozero$rank 2> /dev/null || true
    done
}

# -------------------------------------------------------------------------------------------------
# Run a row once. All that it starts is in the background: so Ctrl-C finds this script waiting.
launch() {  # LABEL ROW W BATCH: RESULT lines for the table, or why there are none
    local label=$1 row=$2 W=$3 batch=$4 name="$2, W=$3"
    local log="out/bench/$name.log" facts="\"label\": \"$1\", \"row\": \"$2\", \"W\": $3"
    local mode more program why
    read -ra mode <<< "$row"  # a mode, and the row's flags
    read -ra more <<< "$(label_flags "$label")"
    if [[ $COMMAND == gpu ]]; then
        facts+=", \"n_devices\": $N_DEVICES"
    fi
    case "$COMMAND $row" in
    timeline* | memory*) program=(bench/timeline.py run) ;;
    *" deepspeed"*) program=(bench/deepspeed_rows.py) ;;
    *) program=(train.py) ;;
    esac
    program+=("${more[@]}" "${FLAGS[@]}" --micro_batch_size "$MICRO_BATCH_SIZE"
              --global_batch_size "$batch" --mode "${mode[@]}")

    say "${label:+$label, }$name"
    if [[ $row == single ]]; then  # from two ranks on: processes that know nothing of each other
        for ((rank = 0; rank < W; rank++)); do
            LOCAL_RANK=$rank python "${program[@]}" --global_batch_size $((batch / W)) \
                --out_dir "out/bench/run$rank" &
        done
    elif [[ $label == *bit ]]; then
        for rank in 0 1; do
            GLOO_SOCKET_IFNAME=nanozero$rank ip netns exec nanozero$rank \
                torchrun --nnodes=2 --node_rank=$rank --nproc_per_node=1 \
                --master_addr=10.77.0.1 --master_port=29477 \
                --local-addr=10.77.0.$((rank + 1)) "${program[@]}" &
        done
    else
        torchrun --standalone --nproc_per_node="$W" "${program[@]}" &
    fi > "$log" 2>&1
    wait

    if ! sed -n "s|^RESULT {|{$facts, |p" "$log" | grep .; then
        why=$(grep -aE '^(\[rank[0-9]+\]: )?([A-Za-z.]*(Error|Exception)|[a-z_]+\.py):' "$log" \
            | head -n 1 | tr -d '"\\\t' | cut -c -200) || why="see $log"
        say "failed: $why"
        echo "{$facts, \"failed\": \"$why\"}"
    fi >> "$RESULTS"
    rm -f out/bench/run*/metrics.jsonl  # else train.py keeps it under another name
    for rank in 0 1; do
        mv "out/bench/run/trace_rank$rank.json" "out/bench/$name, rank $rank.json" \
            2> /dev/null || true
    done
}

stop() {
    trap '' INT TERM
    jobs -p | xargs -r kill 2> /dev/null || true
    wait
    exit 130
}

# -------------------------------------------------------------------------------------------------
# what was asked for
shift
while (($#)); do
    case "$COMMAND $1" in
    *" -h" | *" --help")
        usage
        exit
        ;;
    *" --mode" | *" --global_batch_size") die "$COMMAND sets $1 itself" ;;
    "overhead --rounds" | "overhead --modes" | "overhead --micro_batch_size")
        die "overhead has all wrappers in one table: without $1"
        ;;
    "link --worlds" | "timeline --worlds") die "$COMMAND has two ranks" ;;
    "memory --worlds" | "memory --modes") die "memory draws all stages on four ranks" ;;
    *" --worlds" | *" --rounds" | *" --modes" | *" --micro_batch_size")
        (($# > 1)) || die "$1 needs a value"
        case $1 in
        --worlds) WORLDS=$2 ;;
        --rounds) ROUNDS=$2 ;;
        --modes) MODES=$2 ;;
        --micro_batch_size) MICRO_BATCH_SIZE=$2 ;;
        esac
        shift
        ;;
    "link "[0-9]*bit) LABELS+=("$1") ;;
    "timeline "[0-9]*bit) LABELS=("$1") ;;
    *) FLAGS+=("$1") ;;
    esac
    shift
done
if [[ -n $MODES ]]; then
    read -ra ROWS <<< "$MODES"
fi
[[ "$WORLDS $ROUNDS $MICRO_BATCH_SIZE " =~ ^([1-9][0-9]*\ )+$ ]] \
    || die "--worlds, --rounds and --micro_batch_size are numbers"
((${#LABELS[@]})) || die "link needs rates, such as 1gbit"
if [[ $COMMAND != overhead ]]; then
    why=$(ask flags "${FLAGS[@]}" --rows "${ROWS[@]}" 2>&1) || die "${why#train.py: }"
fi
if [[ $MODES == *deepspeed* ]]; then
    ask has deepspeed || die "deepspeed's rows: pip install deepspeed"
fi

# -------------------------------------------------------------------------------------------------
# the loop
trap stop INT TERM
RESULTS=out/bench/$COMMAND.jsonl
mkdir -p out/bench
if [[ $COMMAND == overhead ]]; then  # its program makes the table of all rows in one run
    {
        describe
        for W in $WORLDS; do
            if ((W == 1)); then  # whose refusals are one line, without torchrun's report
                python bench/overhead.py "${FLAGS[@]}"
            else
                torchrun --standalone --nproc_per_node="$W" bench/overhead.py "${FLAGS[@]}"
            fi
        done
    } | tee out/bench/overhead_new.md
    mv out/bench/overhead_new.md out/bench/overhead.md
    exit
fi
for kind in jsonl md; do
    mv -f "out/bench/$COMMAND.$kind" "out/bench/${COMMAND}_before.$kind" 2> /dev/null || true
done
rm -f out/bench/*", rank "?.json
for ((n = 0; n < ROUNDS; n++)); do
    for label in "${LABELS[@]}"; do
        if [[ $label == *bit ]]; then
            make_link "$label"
        fi
        for W in $WORLDS; do
            batch=$(batch_size "$label" "$W")
            if ((batch % (W * MICRO_BATCH_SIZE))); then
                say "W=$W is left out: $batch sequences of a step do not divide among its ranks"
                continue
            fi
            for row in "${ROWS[@]}"; do
                if belongs "$label" "$row" "$W"; then
                    launch "$label" "$row" "$W" "$batch"
                fi
            done
        done
    done
done
[[ -s $RESULTS ]] || die "none of these rows can run at --worlds $WORLDS"

# -------------------------------------------------------------------------------------------------
# tables and pictures
{
    describe
    if [[ -n $NOTE ]]; then
        printf '%s\n\n' "$NOTE"
    fi
    python bench/tables.py "$COMMAND"
    # One rank sends nothing, so these are the traces of all rows with two ranks or more.
    traces=(out/bench/*", rank 1.json")
    if [[ $COMMAND == gpu && -e ${traces[0]} ]]; then
        python bench/timeline.py overlap "${traces[@]}"
    fi
    if [[ $COMMAND == gpu ]]; then
        python bench/overhead.py --device "$DEVICE"
    fi
} | tee "out/bench/$COMMAND.md"
if [[ $COMMAND == memory ]]; then
    python assets/charts.py memory
fi
if [[ $COMMAND == timeline ]]; then
    for row in "${ROWS[@]}"; do
        if [[ -e "out/bench/$row, W=2, rank 1.json" ]]; then
            python bench/timeline.py draw "$row" "out/bench/$row, W=2, rank "?.json
        fi
    done
fi
! grep -q '"failed"' "$RESULTS"  # the exit status

#!/usr/bin/env bash
# Tables of how equal, how fast and how large the modes are, beside what ships with torch.
#
#     ./bench.sh bits             the param_sha256 of every mode at 1, 2, 3, 4, 6 and 12 ranks
#     ./bench.sh modes            time and memory of every mode, of torch's and of DeepSpeed's
#     ./bench.sh scaling          weak and strong scaling, and a model of it out to 4096 ranks
#     ./bench.sh tune             micro batch and bucket size; ends with the command line to use
#     ./bench.sh link 1gbit       two hosts with a slow link between them (Linux, root, iproute2)
#     ./bench.sh gpu              all that an accelerator has to show: equal bits, speed, overlap
#
# Options, then any flags of train.py, --micro_batch_size among them:
#     --worlds "1 2 4"   numbers of ranks    --price 2.0     scaling: USD per GPU-hour
#     --rounds 3         runs of each row    --tflops 400    scaling: what a GPU reaches
#     --modes "ddp zero3 torch-fsdp"         these rows only, not for tune
#
# Replaces a benchmark harness. A row is a run of train.py; PEERS runs it with what train.py has no
# mode for. RESULT lines go to out/bench/COMMAND.jsonl, and REPORT makes Markdown tables of them. A
# row that fails says why, the others still run, and the exit status is 1.
#
# Runs by themselves scatter by up to 20 % on a shared machine. So each round runs every row once, and a
# cell is the median of the rounds, with the quartiles beside it. All but gpu run on the CPU, unless
# --device says otherwise.
#
# Cost on two cores: modes half an hour, scaling 20 minutes, bits 10, the others about 5; gpu 3 on
# two simulated devices, where it takes the tiny model since they have little memory.
set -euo pipefail
cd "$(dirname "$0")"

# -------------------------------------------------------------------------------------------------
# LOOK: the accelerator's kind, their number, gigabytes of one, a flag if it compiles, its name.
LOOK=$(cat <<'PYTHON'
import torch

device = torch.accelerator.current_accelerator(check_available=True)
n_bytes = torch.accelerator.get_memory_info(device)[1]
try:
    torch.compile(torch.sin)(torch.ones(8, device=device))
    flag = "--compile"
except Exception:
    flag = "--no-compile"
name = torch.get_device_module(device).get_device_name()
print(device.type, torch.accelerator.device_count(), int(n_bytes / 1e9), flag, name)
PYTHON
)

# -------------------------------------------------------------------------------------------------
# rows: what follows --mode, or a name that PEERS knows. Each runs in every variant, LABEL=BATCH,
# where BATCH is the sequences of a step, in terms of W, the world size.
die() { echo "bench.sh: $*" >&2; exit 2; }

COMMAND=${1:-} WORLDS="1 2 4" ROUNDS=3 MODES="" PRICE=2.0 TFLOPS=400 GIVEN="" MACHINE=""
MICRO_BATCH_SIZE=1 VARIANTS=("=W * MICRO_BATCH_SIZE")
FLAGS=(--out_dir out/bench/run --eval_steps 0 --sample_tokens 0 --save_interval 0
       --check_interval 0 --device cpu)
# Sizes at which communication weighs as much as computing: 31.8M parameters, 64 tokens a rank.
SMALL=(--n_layer 10 --n_head 8 --n_embd 512 --block_size 64)
case $COMMAND in
bits)
    WORLDS="1 2 3 4 6 12" ROUNDS=1 VARIANTS=("12 micro batches=12")
    ROWS=(single naive ddp zero1 zero2 zero3 torch-ddp torch-fsdp) FLAGS+=(--max_steps 20) ;;
modes)
    FLAGS+=("${SMALL[@]}" --max_steps 8)
    ROWS=(single naive torch-ddp ddp torch-zero1 zero1 torch-fsdp-kept zero2 torch-fsdp zero3)
    ! python -c 'import deepspeed' &> /dev/null || ROWS+=(deepspeed-1 deepspeed-2 deepspeed-3) ;;
scaling)  # 1024 tokens a rank: bound by computing
    ROUNDS=2 MICRO_BATCH_SIZE=4 ROWS=(single naive ddp zero3)
    VARIANTS=("weak=W * MICRO_BATCH_SIZE" "strong=4 * MICRO_BATCH_SIZE")
    FLAGS+=(--n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --max_steps 8) ;;
tune)
    WORLDS=2 ROUNDS=2 VARIANTS=("=16") FLAGS+=(--max_steps 20)
    ROWS=("ddp --micro_batch_size "{1,2,4,8}" --bucket_cap_mb "{1,5,25,100}) ;;
link)
    [[ $(id -u) == 0 ]] || die "link makes network namespaces, which only root on Linux can"
    trap remove_link EXIT
    WORLDS=2 ROUNDS=2 MICRO_BATCH_SIZE=4 VARIANTS=() FLAGS+=("${SMALL[@]}" --max_steps 8)
    ROWS=(torch-ddp ddp "ddp --comm_hook bf16" "ddp --comm_hook powersgd --warmup_steps 0"
          "ddp --comm_hook topk --warmup_steps 0" zero1 zero2 torch-fsdp zero3) ;;
gpu)  # the same batch for every W, so that all end on one hash
    read -r DEVICE N GB COMPILE MACHINE <<< "$(python -c "$LOOK")" \
        || die "gpu: torch finds no accelerator here"
    MACHINE="$N x $MACHINE, " WORLDS="1 $N" ROUNDS=1
    ((N > 1)) || WORLDS=1
    SIZE=(--model gpt2) MICRO_BATCH_SIZE=8 VARIANTS=("=$N * MICRO_BATCH_SIZE")
    ((GB >= 16)) || SIZE=(--model tiny) MICRO_BATCH_SIZE=2
    FLAGS+=("${SIZE[@]}" --device "$DEVICE" --max_steps 12)
    ROWS=({single,naive,torch-ddp,ddp,zero1,zero2,torch-fsdp,zero3}
          {single,torch-ddp,ddp,zero1,zero2,torch-fsdp,zero3}" --dtype bf16 $COMPILE"
          {ddp,zero2,zero3}" --profile 4") ;;
*)
    sed -n '2,/^# Replaces/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
    [[ $COMMAND == -h || $COMMAND == --help ]] || exit 2
    exit ;;
esac

# -------------------------------------------------------------------------------------------------
# PEERS FLAGS... --mode NAME: train.py with another optimizer or wrapper. torch-zero1 is torch's
# ZeroRedundancyOptimizer over its DDP, torch-fsdp-kept is FSDP2 that keeps whole parameters after
# the forward. deepspeed-N is a stage of DeepSpeed, in a loop of its own.
PEERS=$(cat <<'PYTHON'
import functools, json, statistics, sys, timeit

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import train

make_optimizer, bytes_per_param = train.make_optimizer, train.bytes_per_param


def sharded_optimizer(model, config):
    groups = make_optimizer(model, config).param_groups
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=config.lr)


def run_deepspeed(stage):
    import deepspeed

    config = train.parse_args(flags)
    device, _ = train.start_process_group(config)
    _, plain, tokens, _ = train.prepare(config)
    W, m, rank = dist.get_world_size(), config.micro_batch_size, dist.get_rank()
    engine, *_ = deepspeed.initialize(
        model=plain, optimizer=make_optimizer(plain, config), dist_init_required=False,
        config=dict(train_batch_size=W * m, train_micro_batch_size_per_gpu=m, steps_per_print=10**9,
                    gradient_clipping=config.grad_clip, zero_optimization=dict(stage=stage)))

    def step(n):
        own = train.global_batch(tokens, n, config)[rank * m:(rank + 1) * m]
        engine.backward(engine(*train.read_blocks(tokens, own, config, device))[1])
        engine.step()

    step_s = statistics.median(timeit.timeit(lambda: step(n), number=1)
                               for n in range(1, config.max_steps + 1))
    n_bytes = max(train.gather(train.peak_mem_bytes(device)))
    train.say("RESULT " + json.dumps(dict(step_ms=1e3 * step_s, peak_mem_bytes=n_bytes)))
    dist.destroy_process_group()


*flags, _, name = sys.argv[1:]
if name.startswith("deepspeed"):
    sys.exit(run_deepspeed(int(name[-1])))
if name == "torch-zero1":
    train.make_optimizer = sharded_optimizer
    train.bytes_per_param = lambda model, plain, zero: bytes_per_param(model, plain, zero.optim)
else:
    train.fully_shard = functools.partial(train.fully_shard, reshard_after_forward=False)
sys.argv[1:] = [*flags, "--mode", "torch-ddp" if name == "torch-zero1" else "torch-fsdp"]
sys.exit(train.run())
PYTHON
)

# -------------------------------------------------------------------------------------------------
# REPORT COMMAND PRICE TFLOPS GIVEN: RESULT lines -> Markdown. GIVEN: the flags of the user.
REPORT=$(cat <<'PYTHON'
import glob, json, sys

import numpy as np

COUNTERPART = {"naive": "torch-ddp", "ddp": "torch-ddp", "zero1": "torch-zero1",
               "zero2": "torch-fsdp-kept", "zero3": "torch-fsdp"}  # what does the same in torch
PASSES = {"ddp": 2, "zero3": 3}  # over all parameters: gathers and reductions of a step
LINKS = {"10 Gbit/s": (30, 1.25), "100 Gbit/s": (5, 12.5), "NVLink": (3, 450)}  # us, GB/s

command, price, tflops, given = sys.argv[1:]
runs = {}  # (label, row, W) -> RESULTs, one a round
for line in open(f"out/bench/{command}.jsonl"):
    run = json.loads(line)
    if "failed" in run:
        print(f"Failed: {run['label']} {run['row']}, W={run['W']}: {run['failed']}\n")
    else:
        runs.setdefault((run["label"], run["row"], run["W"]), []).append(run)


def quartiles(key, name):
    """-> median, first and third quartile over the rounds, nan where there is nothing."""
    values = [run[name] for run in runs.get(key, []) if run.get(name) is not None]
    return np.quantile(values or [np.nan], (0.5, 0.25, 0.75))


def median(key, name):
    return quartiles(key, name)[0]


def cell(x):
    if isinstance(x, str | int):
        return str(x)
    return "-" if np.isnan(x) else f"{x:,.0f}" if x >= 100 else f"{x:.2f}"


def step_ms(key):
    return "{} ({} to {})".format(*map(cell, quartiles(key, "step_ms")))


def table(head, rows):
    columns = [[name, *map(cell, cells)] for name, *cells in zip(head, *rows)]
    head, *rows = zip(*(column for column in columns if {*column[1:]} != {"-"}))
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def bits():
    columns = dict.fromkeys((label, W) for label, _, W in runs)
    hashes = {key: f"`{found[0]['param_sha256'][:8]}`" for key, found in runs.items()}
    table(["mode", *(f"{label}, W={W}" for label, W in columns)],
          [[row, *(hashes.get((label, row, W), "-") for label, W in columns)]
           for row in dict.fromkeys(row for _, row, _ in runs) if "--" not in row])


def overlap(path):
    """Percent of the time that communication takes in a trace during which the device computes.
    Where the trace has no kernels: during which the thread does not wait."""
    events = [event for event in json.load(open(path))["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    kernels = [event for event in events if event.get("cat") == "kernel"]
    line = np.zeros((2, int(events[-1]["ts"] - events[0]["ts"]) + 10**7), bool)  # microseconds

    def mark(row, start, end):
        line[row, int(start - events[0]["ts"]):int(end - events[0]["ts"])] = True

    for event in kernels:
        row = 0 if "ccl" in event["name"].lower() else 1
        mark(row, event["ts"], event["ts"] + event["dur"])
    begun = {}  # {what: when it was started}, for CPU
    for event in events if not kernels else ():
        kind, _, what = event["name"].partition(": ")
        if kind == "start":
            begun[what] = event["ts"]
        if kind == "wait" and what in begun:
            mark(0, begun[what], event["ts"] + event["dur"])
            mark(1, event["ts"], event["ts"] + event["dur"])
    communicates, other = line
    is_hidden = communicates & (other if kernels else ~other)
    return 100 * is_hidden.sum() / max(1, communicates.sum())


def gpu():
    bits()
    steps()
    table(["row", "communication under computing, %"],
          [[path[10:-6], overlap(path)] for path in sorted(glob.glob("out/bench/*.trace"))])


def steps():
    """For modes, tune and link, and part of gpu."""
    rows = []
    for key in sorted(runs, key=lambda key: key[2]):
        label, row, W = key
        mode, *flags = row.split()
        same_flags = label, " ".join([COUNTERPART.get(mode, ""), *flags]), W
        theirs = same_flags if same_flags in runs else (label, COUNTERPART.get(mode), W)
        rows.append([label or "-", row, W, step_ms(key), median(key, "tokens_per_sec"),
                     median(key, "comm_exposed_ms"),
                     median(key, "step_ms") / median(theirs, "step_ms"),
                     1e-6 * median(key, "peak_mem_bytes"), 100 * median(key, "mfu"),
                     median(key, "bytes_per_param")])
    table(["link", "mode", "W", "step ms (quartiles)", "tokens/s", "waited ms", "over torch's",
           "peak MB a rank", "MFU %", "bytes a parameter"], rows)
    if command == "tune" and runs:
        _, row, W = max(runs, key=lambda key: median(key, "tokens_per_sec"))
        print(f"Fastest: `torchrun --nproc_per_node={W} train.py --mode {row}{given}`")


def scaling():
    rows = []
    for key in runs:
        label, mode, W = key
        single_ms = median((label, "single", W), "step_ms")
        speed = median((label, mode, 1), "step_ms") / median(key, "step_ms")
        # naive waits for (W-1) 4 Psi bytes, and a pass over all parameters sends 1/W of them.
        pass_ms = median((label, "naive", W), "comm_exposed_ms") / W if W > 1 else np.nan
        rows.append([label, mode, W, step_ms(key), speed * (W if label == "weak" else 1),
                     single_ms / median(key, "step_ms"),
                     single_ms + PASSES.get(mode, np.nan) * pass_ms])
    table(["scaling", "mode", "W", "step ms (quartiles)", "speed over W=1", "efficiency",
           "predicted ms"], rows)
    predict()


def predict(psi=85.2e6, blocks=12, tokens=16 * 1024):
    """gpt2 with bytes for tokens, so many of them a rank, if all communication hides under 6 FLOPs
    a parameter and token: efficiency, and USD per billion tokens."""
    compute_ms = 1e3 * 6 * psi * tokens / (1e12 * float(tflops))
    columns = [(mode, *link) for mode in PASSES for link in LINKS.items()]
    rows = {W: [W] for W in (8, 64, 512, 1024, 4096)}
    for mode, _, (alpha_us, gigabytes) in columns:
        for W, row in rows.items():
            # A pass: to each other rank a message per block and one more, together 4 Psi bytes / W.
            pass_ms = (W - 1) * (1e-3 * alpha_us * (blocks + 1) + 1e-6 / gigabytes * 4 * psi / W)
            total_ms = max(compute_ms, PASSES[mode] * pass_ms)
            usd = float(price) / 3600 * 1e-3 * total_ms / tokens * 1e9
            row.append(f"{compute_ms / total_ms:.0%}, {usd:.2f}")
    print(f"{psi / 1e6}M parameters, {tokens} tokens a rank, {tflops} TFLOP/s, {price} USD/h:\n")
    table(["W: eff., USD/1e9", *(f"{mode}, {link}" for mode, link, _ in columns)], rows.values())


globals()[command if command in ("bits", "scaling", "gpu") else "steps"]()
PYTHON
)

# -------------------------------------------------------------------------------------------------
# runs
launch() {  # LABEL ROW W BATCH: its RESULT lines, or why there are none
    local facts="\"label\": \"$1\", \"row\": \"$2\", \"W\": $3" log="out/bench/$2, W=$3.log"
    local program=(train.py "${FLAGS[@]}" --global_batch_size "$4" --mode $2) rank why
    echo "bench.sh: $1 $2, W=$3" >&2
    [[ ! $2 =~ ^(torch-zero1|torch-fsdp-kept|deepspeed) ]] \
        || program=(--no-python python -c "$PEERS" "${program[@]:1}")
    if [[ $2 == single ]]; then  # from two ranks on: processes that know nothing of each other
        for ((rank = 0; rank < $3; rank++)); do
            python "${program[@]}" --out_dir out/bench/run$rank --global_batch_size $(($4 / $3)) &
        done
    elif [[ $COMMAND == link ]]; then
        for rank in 0 1; do
            GLOO_SOCKET_IFNAME=nanozero$rank ip netns exec nanozero$rank torchrun --nnodes=2 \
                --node_rank=$rank --nproc_per_node=1 --master_addr=10.77.0.1 \
                --master_port=29477 --local-addr=10.77.0.$((rank + 1)) "${program[@]}" &
        done
    else
        torchrun --standalone --nproc_per_node="$3" "${program[@]}" || true
    fi > "$log" 2>&1
    wait
    if ! sed -n "s|^RESULT {|{$facts, |p" "$log" | grep .; then
        why=$(grep -aE '^(\[rank[0-9]+\]: )?([A-Za-z.]*(Error|Exception)|train\.py):' "$log" \
            | head -n 1 | tr -d '"\\\t' | cut -c -200) || why="see $log"
        echo "bench.sh: failed: $why" >&2
        echo "{$facts, \"failed\": \"$why\"}"
    fi >> "out/bench/$COMMAND.jsonl"
    rm -f out/bench/run*/metrics.jsonl  # else train.py keeps it under another name
    [[ ! -e out/bench/run/trace_rank0.json ]] \
        || mv out/bench/run/trace_rank0.json "out/bench/$2, W=$3.trace"
}

make_link() {  # RATE: two network namespaces and a cable between them
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

remove_link() { for rank in 0 1; do ip netns del nanozero$rank 2> /dev/null || true; done; }

# -------------------------------------------------------------------------------------------------
# what was asked for
shift
while (($#)); do
    case "$COMMAND $1" in
    "tune --modes" | *" --mode" | *" --global_batch_size") die "$COMMAND sets $1 itself" ;;
    *" --worlds" | *" --rounds" | *" --modes" | *" --price" | *" --tflops" | *" --micro_batch_size")
        (($# > 1)) || die "$1 needs a value"
        declare "$(tr a-z A-Z <<< "${1#--}")=$2"
        shift ;;
    "link "[0-9]*bit) VARIANTS+=("$1=W * MICRO_BATCH_SIZE") ;;
    *) FLAGS+=("$1") GIVEN+=" $1" ;;
    esac
    shift
done
[[ -z $MODES ]] || read -ra ROWS <<< "$MODES"
FLAGS+=(--micro_batch_size "$MICRO_BATCH_SIZE")
[[ "$WORLDS $ROUNDS $MICRO_BATCH_SIZE $PRICE $TFLOPS" =~ ^([1-9][0-9]*\ )+[0-9.]+\ [0-9.]+$ ]] \
    || die "--worlds, --rounds, --micro_batch_size, --price and --tflops are numbers"
((${#VARIANTS[@]})) || die "link needs rates, such as 1gbit"
python -c 'import sys, train; train.parse_args(sys.argv[1:])' "${FLAGS[@]}"  # says what is wrong
trap 'exit 130' INT  # torchrun ends by itself, and would count as a row that failed
mkdir -p out/bench
rm -f "out/bench/$COMMAND".* out/bench/*.trace
for ((n = 0; n < ROUNDS; n++)); do
    for variant in "${VARIANTS[@]}"; do
        [[ $COMMAND != link ]] || make_link "${variant%%=*}"
        for W in $WORLDS; do
            batch=$((${variant#*=}))
            for row in "${ROWS[@]}"; do
                [[ $row != single* || $W == 1 || $COMMAND == scaling ]] || continue
                [[ $row != *--profile* || $W != 1 ]] || continue  # which sends nothing
                ((batch % (W * MICRO_BATCH_SIZE))) || launch "${variant%%=*}" "$row" "$W" $batch
            done
        done
    done
done
[[ -s out/bench/$COMMAND.jsonl ]] || die "no row's batch divides among --worlds $WORLDS"
{
    printf '%s: %s%s cores of %s, torch %s, commit %s, %s\n\n' "$COMMAND" "$MACHINE" \
        "$(getconf _NPROCESSORS_ONLN)" "$(sed -n '/^model name/{s/.*: //p;q;}' /proc/cpuinfo)" \
        "$(python -c 'import torch; print(torch.__version__)')" \
        "$(git describe --always --dirty)" "$(date +%F)"
    python -c "$REPORT" "$COMMAND" "$PRICE" "$TFLOPS" "$GIVEN"
} | tee "out/bench/$COMMAND.md"
! grep -qs '"failed"' "out/bench/$COMMAND.jsonl"  # the exit status

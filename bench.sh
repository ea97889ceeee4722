#!/usr/bin/env bash
# Tables of how equal, how fast and how large the modes are, beside what ships with torch.
#
#     ./bench.sh bits             the param_sha256 of every mode at 1, 2, 3, 4, 6 and 12 ranks
#     ./bench.sh modes            time and memory of every mode, and of torch's
#     ./bench.sh scaling          weak and strong scaling
#     ./bench.sh tune             micro batch and bucket size; ends with the command line to use
#     ./bench.sh link 1gbit       two hosts with a slow link between them (Linux, root, iproute2)
#     ./bench.sh gpu              all that an accelerator has to show: equal bits, speed, overlap
#     ./bench.sh timeline 1gbit   pictures of a step in time, in assets/, over such a link; without
#                                 a rate over loopback (matplotlib)
#
# Options, then any flags of train.py, --micro_batch_size among them:
#     --worlds "1 2 4"                    numbers of ranks
#     --rounds 3                          runs of each row
#     --modes "ddp zero3 torch-fsdp"      these rows only, not for tune
#
# Replaces a benchmark harness. A row is a run of train.py; PEERS runs it with what train.py has no
# mode for. RESULT lines go to out/bench/COMMAND.jsonl, and REPORT makes Markdown tables of them. A
# row that fails says why, the others still run, and the exit status is 1.
#
# Runs by themselves scatter by up to 20 % on a shared machine. So each round runs every row once,
# and a cell is the median of the rounds, with the quartiles beside it. All but gpu run on the CPU,
# unless --device says otherwise.
#
# Cost on two cores: modes half an hour, scaling 20 minutes, bits 10, the others about 5; gpu 3 on
# two simulated devices, where it takes the tiny model since they have little memory.
set -euo pipefail
cd "$(dirname "$0")"

# -------------------------------------------------------------------------------------------------
# LOOK: the accelerator's kind, their number, gigabytes of one, its name.
LOOK='import torch
device = torch.accelerator.current_accelerator(check_available=True)
n_bytes = torch.accelerator.get_memory_info(device)[1]
name = torch.get_device_module(device).get_device_name()
print(device.type, torch.accelerator.device_count(), int(n_bytes / 1e9), name)'

# -------------------------------------------------------------------------------------------------
# rows: what follows --mode, or a name that PEERS knows. Each runs in every variant, LABEL=BATCH,
# where BATCH is the sequences of a step, in terms of W, the world size.
die() { echo "bench.sh: $*" >&2; exit 2; }

COMMAND=${1:-} WORLDS="1 2 4" ROUNDS=3 MODES="" GIVEN="" MACHINE=""
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
    ROWS=(single naive torch-ddp ddp torch-zero1 zero1 torch-fsdp-kept zero2 torch-fsdp zero3) ;;
scaling)  # 1024 tokens a rank: bound by computing
    ROUNDS=2 MICRO_BATCH_SIZE=4 ROWS=(single naive ddp zero3)
    VARIANTS=("weak=W * MICRO_BATCH_SIZE" "strong=4 * MICRO_BATCH_SIZE")
    FLAGS+=(--n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --max_steps 8) ;;
tune)
    WORLDS=2 ROUNDS=2 VARIANTS=("=16") FLAGS+=(--max_steps 20)
    ROWS=("ddp --micro_batch_size "{1,2,4,8}" --bucket_cap_mb "{1,5,25,100}) ;;
link)
    WORLDS=2 ROUNDS=2 MICRO_BATCH_SIZE=4 VARIANTS=() FLAGS+=("${SMALL[@]}" --max_steps 8)
    ROWS=(torch-ddp ddp "ddp --comm_hook bf16" "ddp --comm_hook powersgd --warmup_steps 0"
          "ddp --comm_hook topk --warmup_steps 0" zero1 zero2 torch-fsdp zero3) ;;
gpu)  # the same batch for every W, so that all end on one hash
    read -r DEVICE N GB MACHINE <<< "$(python -c "$LOOK")" \
        || die "gpu: torch finds no accelerator here"
    MACHINE="$N x $MACHINE, " WORLDS="1 $N" ROUNDS=1
    ((N > 1)) || WORLDS=1
    SIZE=gpt2 COMPILE=--compile MICRO_BATCH_SIZE=8 VARIANTS=("=$N * MICRO_BATCH_SIZE")
    ((GB >= 16)) || SIZE=tiny COMPILE=--no-compile MICRO_BATCH_SIZE=2
    FLAGS+=(--model $SIZE --device "$DEVICE" --max_steps 12)
    ROWS=({single,naive,torch-ddp,ddp,zero1,zero2,torch-fsdp,zero3}
          {single,torch-ddp,ddp,zero1,zero2,torch-fsdp,zero3}" --dtype bf16 $COMPILE"
          {ddp,zero2,zero3}" --profile 4") ;;
timeline)  # computing takes about as long as communicating
    python -c 'import matplotlib' 2> /dev/null || die "timeline draws: pip install matplotlib"
    WORLDS=2 ROUNDS=1 ROWS=(ddp zero1 zero3)
    FLAGS+=(--n_embd 256 --max_steps 4 --profile 1 --bucket_cap_mb 3.5) ;;
*)
    sed -n '2,/^# Replaces/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
    [[ $COMMAND == -h || $COMMAND == --help ]] || exit 2
    exit ;;
esac

# -------------------------------------------------------------------------------------------------
# PEERS FLAGS... --mode NAME: train.py with another optimizer or wrapper. torch-zero1 is torch's
# ZeroRedundancyOptimizer over its DDP, torch-fsdp-kept is FSDP2 that keeps whole parameters after
# the forward. Modes of train.py's own get more ranges in their traces, for `timeline`.
read -r -d '' PEERS <<'PYTHON' || true
import functools, sys

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import train

make_optimizer, bytes_per_param = train.make_optimizer, train.bytes_per_param


def sharded_optimizer(model, config):
    groups = make_optimizer(model, config).param_groups
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=config.lr)


# Ranges of blocks in forward and backward; and, where what is held may have changed, one whose name
# is [bytes a parameter of parameters, of gradients, of optimizer state].
def watched_optimizer(model, config):
    optimizer, parameters = make_optimizer(model, config), [*model.module.parameters()]
    psi = sum(p.numel() for p in parameters)

    def note(*_):
        kinds = ([*parameters, *model.parameters()],
                 [vars(b).get(name) for b in model._buckets
                  for name in ("gradients", "sharded_gradients")],
                 [t for state in optimizer.state.values() for t in state.values() if t.dim()])
        kinds = ([t.untyped_storage() for t in kind if t is not None] for kind in kinds)
        held = [sum({s.data_ptr(): s.nbytes() for s in kind}.values()) / psi for kind in kinds]
        torch.profiler.record_function(f"bytes: {held}")(int)()  # an empty range

    for i, block in enumerate(model.module.blocks):
        back = torch.profiler.record_function(f"backward: block {i}")
        block.forward = torch.profiler.record_function(f"forward: block {i}")(block.forward)
        block.register_full_backward_pre_hook(lambda *_, back=back: back.__enter__() and None)
        block.register_full_backward_hook(lambda *_, back=back: back.__exit__(None, None, None))
    torch.nn.modules.module.register_module_forward_hook(note)
    optimizer.register_step_pre_hook(note)
    for p in parameters:
        p.register_hook(note)
    return optimizer


*flags, _, name = sys.argv[1:]
if name == "torch-zero1":
    train.make_optimizer = sharded_optimizer
    train.bytes_per_param = lambda model, plain, zero: bytes_per_param(model, plain, zero.optim)
elif name == "torch-fsdp-kept":
    train.fully_shard = functools.partial(train.fully_shard, reshard_after_forward=False)
else:
    train.make_optimizer = watched_optimizer
modes = {"torch-zero1": "torch-ddp", "torch-fsdp-kept": "torch-fsdp"}
sys.argv[1:] = [*flags, "--mode", modes.get(name, name)]
sys.exit(train.run())
PYTHON

# -------------------------------------------------------------------------------------------------
# REPORT COMMAND GIVEN: RESULT lines -> Markdown, traces -> pictures. GIVEN: the flags of the user.
read -r -d '' REPORT <<'PYTHON' || true
import glob, itertools, json, re, sys

import numpy as np

COUNTERPART = {"naive": "torch-ddp", "ddp": "torch-ddp", "zero1": "torch-zero1",
               "zero2": "torch-fsdp-kept", "zero3": "torch-fsdp"}  # what does the same in torch
COLORS = dict(forward="#3f87c5", backward="#7a62b8", optimizer="#3f9a66", unshard="#b9791c",
              reduce="#bf4f86", wait="#dc3d33")  # seen on white and on black, as is grey
LEVELS = {"ddp": 16, "zero1": 8 + 8 / 2, "zero2": 4 + 12 / 2, "zero3": 16 / 2}  # the paper's, W = 2

command, given = sys.argv[1:]
runs = {}  # (label, row, W) -> RESULTs, one a round
for line in open(f"out/bench/{command}.jsonl"):
    run = json.loads(line)
    if "failed" in run:
        print(f"Failed: {run['label']} {run['row']}, W={run['W']}: {run['failed']}\n")
    else:
        runs.setdefault((run["label"], run["row"], run["W"]), []).append(run)


# -> median, first and third quartile over the rounds, nan where there is nothing
def quartiles(key, name):
    values = [run[name] for run in runs.get(key, []) if run.get(name) is not None]
    return np.quantile(values or [np.nan], (0.5, 0.25, 0.75))


def median(key, name):
    return quartiles(key, name)[0]


def cell(x):
    if isinstance(x, str | int):
        return str(x)
    return "-" if np.isnan(x) else f"{x:,.0f}" if x >= 100 else f"{x:.2f}"


def speed(key):
    return median(key, "tokens_per_sec") / median((*key[:2], 1), "tokens_per_sec")


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


# [(kind, what, start, end)] of a trace, in milliseconds. Of kind "sent" is what is on its way:
# kernels of NCCL and the like; on a CPU from the start of a collective to the end of its last wait.
def spans(path):
    events = [event for event in json.load(open(path))["traceEvents"] if event.get("ph") == "X"]
    has_kernels = any(event.get("cat") == "kernel" for event in events)
    begun, sent, found = {}, {}, []  # begun: {what: when it was started}
    for event in sorted(events, key=lambda event: event["ts"]):
        kind, _, what = event["name"].replace("Optimizer.step#", "optimizer: ").partition(": ")
        start, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        if event.get("cat") == "kernel":
            kind = "sent" if "ccl" in what.lower() else "kernel"
        elif kind == "start":
            begun[what] = start
        elif kind == "wait" and what in begun and not has_kernels:
            sent[begun[what]] = "sent", what, begun[what], end
        found.append((kind, what, start, end))
    return found + [*sent.values()]


# Percent of the time that communication takes in a trace during which the device computes. Where
# the trace has no kernels: during which the thread does not wait.
def overlap(path):
    found = spans(path)
    t0, last = found[0][2], max(end for *_, end in found)
    on = {kind: np.zeros(int(1e3 * (last - t0)) + 1, bool) for kind in ("sent", "kernel", "wait")}
    for kind, _, start, end in found:
        if kind in on:
            on[kind][int(1e3 * (start - t0)):int(1e3 * (end - t0))] = True
    is_hidden = on["sent"] & (on["kernel"] if on["kernel"].any() else ~on["wait"])
    return 100 * np.float64(is_hidden.sum()) / (on["sent"].sum() or np.nan)


def gpu():
    bits()
    steps()
    table(["row", "communication under computing, %"],
          [[path[10:-7], overlap(path)] for path in sorted(glob.glob("out/bench/*.trace1"))])


# For modes, tune and link, and part of scaling and gpu. Efficiency is over W processes that do not
# communicate.
def steps():
    rows = []
    for key in sorted(runs, key=lambda key: key[2]):
        label, row, W = key
        mode, *flags = row.split()
        same_flags = label, " ".join([COUNTERPART.get(mode, ""), *flags]), W
        theirs = same_flags if same_flags in runs else (label, COUNTERPART.get(mode), W)
        rows.append([label or "-", row, W, step_ms(key), median(key, "tokens_per_sec"),
                     median(key, "comm_exposed_ms"), speed(key),
                     median((label, "single", W), "step_ms") / median(key, "step_ms"),
                     median(key, "step_ms") / median(theirs, "step_ms"),
                     1e-6 * median(key, "peak_mem_bytes"), 100 * median(key, "mfu"),
                     median(key, "bytes_per_param")])
    table(["", "mode", "W", "step ms (quartiles)", "tokens/s", "waited ms", "speed over W=1",
           "efficiency", "time over torch's", "peak MB a rank", "MFU %", "bytes a parameter"], rows)
    if command == "tune" and runs:
        _, row, W = max(runs, key=lambda key: median(key, "tokens_per_sec"))
        print(f"Fastest: `torchrun --nproc_per_node={W} train.py --mode {row}{given}`")


def scaling():
    steps()
    worlds = sorted({W for _, _, W in runs})
    for label in dict.fromkeys(label for label, _, _ in runs):
        lines = {mode: [round(float(speed((label, mode, W))), 2) for W in worlds]
                 for _, mode, _ in runs if mode != "single"}
        print(f'```mermaid\nxychart-beta\n    title "{label}: speed over W = 1; bars: W; lines: '
              f'{", ".join(lines)}"\n    x-axis "W" {worlds}\n    bar {worlds}')
        print(*(f"    line {speeds}" for speeds in lines.values()), "```\n", sep="\n")


# From the traces of two ranks; what is held is that of rank 0.
def timeline():
    import matplotlib.pyplot as plt

    greys = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    plt.rcParams.update({"svg.fonttype": "none", "legend.frameon": False,
                         "font.sans-serif": "DejaVu Sans", **dict.fromkeys(greys, "grey")})
    for _, mode, _ in runs:
        figure, (lanes, memory) = plt.subplots(2, figsize=(9, 6), sharex=True, height_ratios=(3, 1))
        traces = [spans(f"out/bench/{mode}, W=2.trace{rank}") for rank in (0, 1)]
        begin = traces[0][0][2]
        for y, trace in zip((0, -3), traces):
            tops = itertools.cycle(y - 0.65 - 0.24 * i for i in range(8))  # of what is on its way
            for kind, what, start, end in trace:
                top, height, size = (next(tops), 0.22, 7) if kind == "sent" else (y, 0.9, 10)
                color = COLORS.get(what.split()[0] if kind == "sent" else kind)
                if color:
                    text = "".join(re.findall(r"block\w*\W(\d)", what)) if kind != "wait" else ""
                    bar = lanes.barh(top, end - start, height, start - begin, color=color)
                    lanes.bar_label(bar, [text], label_type="center", color="w", fontsize=size)
        times, *held = np.transpose([(start - begin, *json.loads(what))
                                     for kind, what, start, _ in traces[0] if kind == "bytes"])
        memory.stackplot(times, held, step="post", labels=("parameters", "gradients", "Adam"),
                         colors=[COLORS[kind] for kind in ("unshard", "reduce", "optimizer")])
        memory.axhline(LEVELS[mode], color="grey", linestyle="--", label="formula")
        memory.set(xlabel="ms", ylabel="bytes a parameter", ylim=(0, 22))
        memory.legend(ncols=4, loc="upper center")
        lanes.set_yticks([0, -3], ["rank 0", "rank 1"])
        figure.legend(handles=[plt.Rectangle((0, 0), 1, 1, color=color, label=kind)
                               for kind, color in COLORS.items()], ncols=6, loc="upper center")
        figure.savefig(f"assets/{mode}.svg", bbox_inches="tight", transparent=True)


globals()[command if command in ("bits", "scaling", "gpu", "timeline") else "steps"]()
PYTHON

# -------------------------------------------------------------------------------------------------
# runs
launch() {  # LABEL ROW W BATCH: its RESULT lines, or why there are none
    local facts="\"label\": \"$1\", \"row\": \"$2\", \"W\": $3" log="out/bench/$2, W=$3.log"
    local program=(train.py "${FLAGS[@]}" --global_batch_size "$4" --mode $2) rank why
    echo "bench.sh: $1 $2, W=$3" >&2
    [[ $COMMAND != timeline && ! $2 =~ ^(torch-zero1|torch-fsdp-kept) ]] \
        || program=(--no-python python -c "$PEERS" "${program[@]:1}")
    if [[ $2 == single ]]; then  # from two ranks on: processes that know nothing of each other
        for ((rank = 0; rank < $3; rank++)); do
            python "${program[@]}" --out_dir out/bench/run$rank --global_batch_size $(($4 / $3)) &
        done
    elif [[ $1 == *bit ]]; then
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
    mv out/bench/run/trace_rank0.json "out/bench/$2, W=$3.trace0" 2> /dev/null || true
    mv out/bench/run/trace_rank1.json "out/bench/$2, W=$3.trace1" 2> /dev/null || true
}

make_link() {  # RATE: two network namespaces and a cable between them
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

remove_link() { for rank in 0 1; do ip netns del nanozero$rank 2> /dev/null || true; done; }

# -------------------------------------------------------------------------------------------------
# what was asked for
shift
while (($#)); do
    case "$COMMAND $1" in
    "tune --modes" | *" --mode" | *" --global_batch_size") die "$COMMAND sets $1 itself" ;;
    *" --worlds" | *" --rounds" | *" --modes" | *" --micro_batch_size")
        (($# > 1)) || die "$1 needs a value"
        declare "$(tr a-z A-Z <<< "${1#--}")=$2"
        shift ;;
    "link "[0-9]*bit) VARIANTS+=("$1=W * MICRO_BATCH_SIZE") ;;
    "timeline "[0-9]*bit) VARIANTS=("$1=W * MICRO_BATCH_SIZE") ;;
    *) FLAGS+=("$1") GIVEN+=" $1" ;;
    esac
    shift
done
[[ -z $MODES ]] || read -ra ROWS <<< "$MODES"
FLAGS+=(--micro_batch_size "$MICRO_BATCH_SIZE")
[[ "$WORLDS $ROUNDS $MICRO_BATCH_SIZE " =~ ^([1-9][0-9]*\ )+$ ]] \
    || die "--worlds, --rounds and --micro_batch_size are numbers"
((${#VARIANTS[@]})) || die "link needs rates, such as 1gbit"
python -c 'import sys, train; train.parse_args(sys.argv[1:])' "${FLAGS[@]}"  # says what is wrong
trap 'exit 130' INT  # torchrun ends by itself, and would count as a row that failed
mkdir -p out/bench assets
rm -f "out/bench/$COMMAND".* out/bench/*.trace?
for ((n = 0; n < ROUNDS; n++)); do
    for variant in "${VARIANTS[@]}"; do
        [[ $variant != *bit=* ]] || make_link "${variant%%=*}"
        for W in $WORLDS; do
            batch=$((${variant#*=}))
            for row in "${ROWS[@]}"; do
                [[ $row != single* || $W == 1 || $COMMAND == scaling ]] || continue
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
    python -c "$REPORT" "$COMMAND" "$GIVEN"
} | tee "out/bench/$COMMAND.md"
! grep -qs '"failed"' "out/bench/$COMMAND.jsonl"  # the exit status

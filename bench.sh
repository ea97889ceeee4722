#!/usr/bin/env bash
# How fast, how much memory, how does it scale, and is it better than what ships with torch?
#
#     ./bench.sh bits             on which param_sha256 each mode ends, beside torch DDP and FSDP2
#     ./bench.sh modes            time and memory of every mode beside its counterpart in torch
#     ./bench.sh scaling          weak and strong; a model of it, and what it says of 4096 ranks
#     ./bench.sh tune             bucket size and micro batch; ends with the command line to use
#     ./bench.sh link 1gbit       two hosts with a slow wire between them (Linux, root, iproute2)
#     ./bench.sh gpu              modes of gpt2 in bf16 on one CUDA device
#
# Options, then any flags of train.py:
#     --worlds "1 2 4"   ranks            --price 2.0     USD per GPU-hour, for scaling
#     --rounds 6         visits a mode    --tflops 400    that a GPU reaches, for scaling
#     --modes "ddp zero3 torch-fsdp"      these rows only
#
# Replaces a benchmark harness: bash starts ranks and collects their RESULT lines, python turns
# these into Markdown tables, on stdout and in out/bench. A row that fails says why; others go on.
#
# Times are of steps of train.py's own functions with several modes in one process group, visited in
# random order: runs apart from each other scatter by 20 % on a shared machine, more than what is to
# be seen. Memory is that of a process group with one mode, Python and torch included.
#
# Cost: on two cores modes take half an hour, scaling 15 minutes, bits, tune and link 1gbit 4.
set -euo pipefail
cd "$(dirname "$0")"

# -------------------------------------------------------------------------------------------------
# what ranks run beside train.py
#
#     steps KIND,KIND,... ROUNDS FLAGS   a step of each kind, in one process group
#     held KIND,... W FLAGS              what one of W ranks holds after a step; others are absent
#     collectives ROUNDS FLAGS           the exchange, by size
#
# A KIND is a mode of train.py, with a comm hook after a dash, or something else that torch has.
# `single` is a process for itself on every rank, in the shortest loop around the model.

MEASURE=$(cat <<'PYTHON'
import dataclasses, gc, json, random, statistics, sys, time, warnings

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import ddp, train

MADE_FROM = {"ddp-bf16": "ddp", "ddp-powersgd": "ddp", "ddp-topk": "ddp",
             "torch-zero1": "torch-ddp", "torch-fsdp-kept": "torch-fsdp"}


class Kind:
    def __init__(self, name, config, device, tokenizer, tokens):
        self.name, self.device, self.tokens, self.measured = name, device, tokens, []
        self.config = dataclasses.replace(config, mode=MADE_FROM.get(name, name))
        if name.startswith("ddp-"):
            self.config.comm_hook, self.config.warmup_steps = name[4:], 0
        self.plain = train.build_model(self.config, tokenizer)
        self.model = train.wrap(self.plain, self.config, device)
        self.optimizer = train.make_optimizer(self.model, self.config)
        self.scaler = train.make_scaler(self.config, device)
        if name == "torch-fsdp-kept":
            self.model.set_reshard_after_forward(False)
        if name == "torch-zero1":
            self.optimizer = ZeroRedundancyOptimizer(
                self.optimizer.param_groups, torch.optim.AdamW, lr=config.lr)

    def step(self, n):
        """-> ms that it took, and of these the ms that it waited for communication."""
        dist.barrier()
        start_s, waited_ms = time.perf_counter(), 0.0
        if self.name == "single":
            self.step_by_itself(n)
        else:
            entry, _ = train.train_step(self.model, self.optimizer, self.scaler, self.tokens, n,
                                        self.config, self.device)
            waited_ms = entry["comm_exposed_ms"]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start_s), waited_ms

    def step_by_itself(self, n):
        """The shortest loop over this rank's micro batches, since train_step always exchanges."""
        self.optimizer.zero_grad()
        blocks = train.global_batch(self.tokens, n, self.config)
        micro_batches = blocks.reshape(-1, self.config.micro_batch_size)
        own = micro_batches[dist.get_rank()::dist.get_world_size()]
        for blocks in own:
            x, y = train.read_blocks(self.tokens, blocks, self.config, self.device)
            with train.autocast(self.config, self.device):
                _, loss = self.model(x, y)
            (loss / len(own)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()

    def say(self, **measured):
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # inside torch's zero1
        say(mode=self.name, n_params=sum(p.numel() for p in self.plain.parameters()),
            n_layer=self.plain.config.n_layer, n_buckets=len(getattr(self.model, "_buckets", [])),
            bytes_per_param=train.bytes_per_param(self.model, self.plain, optimizer), **measured)


def say(**result):
    train.say("RESULT " + json.dumps(train.finite(dict(result, world_size=dist.get_world_size()))))


def begin(flags, start=train.start_process_group):
    """-> what a Kind is made from, after its name."""
    config = train.parse_args(["--mode", "zero3", *flags])
    device, _ = start(config)
    if "--global_batch_size" not in flags:
        config.global_batch_size = dist.get_world_size() * config.micro_batch_size
    tokenizer, _, tokens, _ = train.prepare(config)
    return config, device, tokenizer, tokens


def steps(kinds, rounds, *flags):
    config, *context = begin(flags)
    made = [Kind(name, config, *context) for name in kinds.split(",")]
    order, n = random.Random(config.seed), 0  # the same on all ranks
    for visit in range(1 + int(rounds)):
        for kind in order.sample(made, len(made)):
            for repeat in range(3):
                n += 1
                measured = kind.step(n)
                if visit and repeat:  # else it is new, or its memory is cold
                    kind.measured.append(measured)
    n_bytes = max(train.gather(train.peak_mem_bytes(kind.device)))
    for kind in made:
        by_rank = train.gather([ms for ms, _ in kind.measured])
        ms = [statistics.fmean(of_ranks) for of_ranks in zip(*by_rank)]
        low_ms, median_ms, high_ms = statistics.quantiles(ms, n=4, method="inclusive")
        kind.say(step_ms=median_ms, low_ms=low_ms, high_ms=high_ms, peak_mem_bytes=n_bytes,
                 waited_ms=statistics.median(waited_ms for _, waited_ms in kind.measured),
                 tokens_per_sec=1e3 * config.global_batch_size * config.block_size / median_ms)


def held(kinds, world_size, *flags):
    def start(config):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(world_size))
        return torch.device("cpu"), None

    context = begin(flags, start)
    for name in kinds.split(","):
        kind = Kind(name, *context)
        kind.step(1)
        kind.say()


def collectives(rounds, *flags):
    begin(flags)
    for n_bytes in (2**k for k in range(14, 27, 2)):
        flat = torch.ones(n_bytes // 4)
        for verb, function in (("reduce-scatter", ddp.reduce_scatter), ("gather", ddp.all_gather)):
            ms = []
            for _ in range(1 + 5 * int(rounds)):
                flat.fill_(1.0)
                dist.barrier()
                start_s = time.perf_counter()
                function(flat)()
                ms.append(1e3 * (time.perf_counter() - start_s))
            say(verb=verb, bytes=n_bytes, ms=statistics.median(ms[1:]))


warnings.filterwarnings("ignore")
globals()[sys.argv[1]](*sys.argv[2:])
gc.collect()  # FSDP2's modules hold the group in a cycle
dist.destroy_process_group()
PYTHON
)

# -------------------------------------------------------------------------------------------------
# tables, made of out/bench/*.jsonl

REPORT=$(cat <<'PYTHON'
import collections, glob, json, math, re, statistics, sys

import numpy as np

# mode -> what does the same in torch, and of 16 bytes a parameter those that are sharded
COUNTERPART = {"naive": "torch-ddp", "ddp": "torch-ddp", "zero1": "torch-zero1",
               "zero2": "torch-fsdp-kept", "zero3": "torch-fsdp"}
SHARDED = {"zero1": 8, "torch-zero1": 8, "zero2": 12, "zero3": 16, "torch-fsdp": 16,
           "torch-fsdp-kept": 16}
LINKS = {"10 Gbit/s": (30, 1.25), "100 Gbit/s": (5, 12.5), "NVLink": (3, 450)}  # us, GB/s


def read(name):
    """The good records of a file; the others are told."""
    records = [json.loads(line) for path in glob.glob(f"out/bench/{name}.jsonl")
               for line in open(path)]
    for r in records:
        if "failed" in r:
            print(f"Failed: {r['label']} at W={r['world_size']}: {r['failed']}\n")
    return [r for r in records if "failed" not in r]


def read_steps(name):
    return {(r["mode"], r["world_size"]): r for r in read(name)}


def table(head, rows):
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def number(x, digits=0):
    return "-" if x is None or math.isnan(x) else f"{x:,.{digits}f}"


def over(steps, mode, other, W):
    """Ratio of the medians of two modes, if they were measured in one process group."""
    ours, theirs = steps[mode, W], steps.get((other, W))
    is_fair = theirs and ours["label"] == theirs["label"]
    return number(ours["step_ms"] / theirs["step_ms"], 2) if is_fair else "-"


def formula(mode, W):
    """Bytes a parameter in fp32 with Adam: ZeRO paper, arXiv 1910.02054, section 3."""
    return 16 - SHARDED.get(mode, 0) * (1 - 1 / W)


def steps_table(steps, columns, cells):
    """A row a mode and W, with the cells(mode, W, record) of a table beside those of all tables."""
    table(["mode", "W", "step ms (quartiles)", "tokens/s", "waited ms", *columns],
          [[mode, str(W), f"{r['step_ms']:,.0f} ({r['low_ms']:,.0f} to {r['high_ms']:,.0f})",
            number(r["tokens_per_sec"]), number(r["waited_ms"]), *cells(mode, W, r)]
           for (mode, W), r in steps.items()])


def bits():
    """A column for each number of sequences a step and of ranks: they make the micro-steps."""
    hashes = collections.defaultdict(dict)  # column -> {mode: hash}
    for r in read("bits"):
        mode, sequences, micro_steps = r["label"].split()
        hashes[f"{sequences} sequences, W={r['world_size']}, {micro_steps} micro-step"
               f"{'s' * (micro_steps != '1')}"][mode] = f"`{r['param_sha256'][:8]}`"
    modes = dict.fromkeys(mode for of_modes in hashes.values() for mode in of_modes)
    table(["mode", *hashes], [[mode, *(of_modes.get(mode, "-") for of_modes in hashes.values())]
                              for mode in modes])


def modes(name):
    steps, by_itself = read_steps(f"{name}-steps"), read_steps(f"{name}-memory")

    def cells(mode, W, r):
        r = by_itself.get((mode, W), {})
        return [over(steps, mode, COUNTERPART.get(mode), W), over(steps, mode, "single", W),
                number(1e-6 * r.get("peak_mem_bytes", math.nan)),
                f"{number(r.get('bytes_per_param'), 2)} ({number(formula(mode, W), 2)})"]

    steps_table(steps, ["over torch's", "over `single`", "peak MB a rank",
                        "bytes a parameter (formula)"], cells)


def exchange_ms(link, W, n_bytes, times=1):
    """The alpha-beta model: W - 1 messages each of `times`, (W-1)/W of the bytes over all."""
    alpha_ms, beta_ms = link
    return times * (W - 1) * alpha_ms + (W - 1) / W * n_bytes * beta_ms


def gathers(r):
    """How often a step gathers all parameters: in stage 3 twice, but for the two units that the
    backward finds whole; in other stages once, in ddp as the second half of an all-reduce."""
    return 2 - 2 / r["n_layer"] if r["mode"] == "zero3" else 1


def fit_links():
    """-> {(verb, W): (alpha, beta)}, by least squares of relative errors."""
    measured, links, rows = collections.defaultdict(list), {}, []
    for r in read("scaling-collectives"):
        measured[r["verb"], r["world_size"]].append(r)
    for (verb, W), at in measured.items():
        units = [[exchange_ms(unit, W, r["bytes"]) / r["ms"] for unit in ((1, 0), (0, 1))]
                 for r in at]
        links[verb, W] = alpha, beta = np.linalg.lstsq(units, np.ones(len(units)))[0]
        errors = [exchange_ms((alpha, beta), W, r["bytes"]) / r["ms"] - 1 for r in at]
        rows.append([verb, str(W), number(1e3 * alpha), number(1e-6 / beta, 2),
                     f"{min(errors):+.0%} to {max(errors):+.0%}"])
    print("The exchange: ms = (W-1) alpha + (W-1)/W bytes beta, fitted to 16 KiB to 64 MiB.\n")
    table(["exchange", "W", "alpha, us", "1/beta, GB/s", "errors"], rows)
    return links


def scaling(price, tflops):
    links, rows = fit_links(), []
    for name in ("weak", "strong"):
        steps = read_steps(f"scaling-{name}")
        for (mode, W), r in steps.items():
            first = next(other for (kind, _), other in steps.items() if kind == mode)
            single_ms = steps.get(("single", W), {}).get("step_ms", math.nan)
            predicted = ["-", "-", "-"]
            if name == "weak" and mode != "single" and ("gather", W) in links:
                sent = W, 4 * r["n_params"], r["n_buckets"]
                exchanges_ms = (exchange_ms(links["reduce-scatter", W], *sent)
                                + gathers(r) * exchange_ms(links["gather", W], *sent))
                step_ms = single_ms + exchanges_ms
                predicted = [number(exchanges_ms), number(step_ms),
                             number(step_ms / r["step_ms"], 2)]
            rows.append([name, mode, str(W), number(r["tokens_per_sec"]),
                         number(r["tokens_per_sec"] / first["tokens_per_sec"], 2),
                         number(single_ms / r["step_ms"], 2), number(r["step_ms"]), *predicted])
    print("Weak: the same work a rank. Strong: the same work in all. Efficiency: over `single`, W "
          "processes on the same cores that know nothing of each other. Predicted: the step of "
          "`single`, as the time for computing, and the exchanges in sum, since here both need the "
          "same cores.\n")
    table(["scaling", "mode", "W", "tokens/s", "over the first", "efficiency", "step ms",
           "exchanges, predicted ms", "step, predicted ms", "over measured"], rows)
    predict_there(price, tflops)


def predict_there(price, tflops):
    rows, tokens = [], 16 * 1024
    for r in read("scaling-held"):
        W, mode, megabytes = r["world_size"], r["mode"], 1e-6 * r["n_params"]
        compute_ms = 1e3 * 6 * r["n_params"] * tokens / (1e12 * tflops)
        row = [mode, f"{W:,}", f"{number(megabytes * r['bytes_per_param'], 1)} "
                               f"({number(megabytes * formula(mode, W), 1)})"]
        for alpha_us, gigabytes in LINKS.values():
            link = 1e-3 * alpha_us, 1e-6 / gigabytes
            once_ms = exchange_ms(link, W, 4 * r["n_params"], r["n_buckets"])
            # Under the forward a gather, which ddp has not; under the backward what is left.
            forward_ms = 0 if mode == "ddp" else once_ms
            backward_ms = (1 + gathers(r)) * once_ms - forward_ms
            step_ms = max(compute_ms / 3, forward_ms) + max(2 / 3 * compute_ms, backward_ms)
            row += [number(step_ms), f"{compute_ms / step_ms:.0%}",
                    number(price / 3600 * 1e9 * 1e-3 * step_ms / tokens, 2)]
        rows.append(row)
    print(f"Predicted, not measured, but for memory, which is that of real tensors after a step in "
          f"torch's fake process group: gpt2 with bytes for tokens (85M parameters), {tokens:,} "
          f"tokens a rank and step, 6 FLOPs a parameter and token in 16 bits, exchanges in fp32, a "
          f"GPU that reaches {tflops:g} TFLOP/s and costs {price:g} USD an hour. Memory is that "
          f"between steps. Gathers hide under the forward, a third of the computing, the rest "
          f"under the backward. Per link the step in ms, its efficiency, USD per billion tokens: "
          + ", ".join(f"{name} {us} us and {rate} GB/s" for name, (us, rate) in LINKS.items())
          + "; a message to each rank, as ddp.py has it, where NCCL's trees need log W.\n")
    table(["mode", "W", "MB a rank (formula)",
           *(cell for name in LINKS for cell in (name, "eff.", "USD"))], rows)


def tune(command):
    runs = collections.defaultdict(list)
    for r in read("tune"):
        runs[r["label"]].append(r)
    rates = {flags: [r["tokens_per_sec"] for r in of_flags] for flags, of_flags in runs.items()}
    table(["flags", "tokens/s, median", "all", "peak MB a rank"],
          [[f"`{flags}`", number(statistics.median(all_rates)), ", ".join(map(number, all_rates)),
            number(1e-6 * max(r["peak_mem_bytes"] for r in runs[flags]))]
           for flags, all_rates in rates.items()])
    if runs:
        fastest = max(rates, key=lambda flags: statistics.median(rates[flags]))
        print(f"Fastest:\n\n    {command} {fastest}")


def link(*rates):
    for rate in rates:
        steps = read_steps(f"link-{rate}")
        digits, unit = re.match(r"([\d.]+)(.)", rate).groups()
        bits_per_ms = float(digits) * dict(k=1, m=1e3, g=1e6)[unit]
        single_ms = steps.get(("single", 2), {}).get("step_ms", math.nan)

        def cells(mode, W, r):
            passes = 3 if mode == "torch-fsdp" else 1 + gathers(r)  # of half of 4 Psi bytes
            passes *= {"single": 0, "ddp-bf16": 1 / 2}.get(mode, 1)
            wire_ms = 8 * 4 * passes / 2 * r["n_params"] / bits_per_ms
            return [number(wire_ms), number(r["step_ms"] / max(single_ms, wire_ms), 2),
                    over(steps, mode, "torch-ddp", W), over(steps, mode, "torch-fsdp", W)]

        print(f"Two ranks, {rate} between them, each way. Bound: the larger of the step of "
              f"`single`, which sends nothing, and of the bytes that a mode has to send over the "
              f"bandwidth (those of fp32 for PowerSGD and top-k too).\n")
        steps_table(steps, ["bytes / bandwidth, ms", "step over bound", "over torch's DDP",
                            "over torch's FSDP2"], cells)


command, *arguments = sys.argv[1:]
numbers = map(float, arguments) if command == "scaling" else arguments
globals()[command](*numbers)
PYTHON
)

# -------------------------------------------------------------------------------------------------
# starting ranks

# launch FILE LABEL W COMMAND...: W ranks of a command. Its RESULT lines, labelled, go to
# FILE.jsonl, or else the reason why.
launch() {
    local results=out/bench/$1.jsonl label=$2 world=$3 log=out/bench/log.txt
    shift 3
    echo "bench.sh: $label, W=$world" >&2
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node="$world" "$@" > $log 2>&1 \
        || failed "$label" "$world" $log >> "$results"
    collect "$label" $log >> "$results"
    rm -f out/bench/run/metrics.jsonl  # else train.py keeps it under another name
}

collect() { sed -n "s|^RESULT {|{\"label\": \"$1\", |p" "$2"; }

failed() {
    local why
    why=$(grep -aE '^(\[rank[0-9]+\]: )?([A-Za-z.]*(Error|Exception|Stop)|train\.py):' "$3" \
        | head -n 1 | tr -d '"\\\t' | cut -c -200) || why="exit status not 0, see $3"
    echo "bench.sh: failed: $why" >&2
    printf '{"label": "%s", "world_size": %s, "failed": "%s"}\n' "$1" "$2" "$why"
}

# measure FILE LABEL W FUNCTION ARGUMENTS...
measure() { launch "${@:1:3}" --no-python python -c "$MEASURE" "${@:4}"; }

report() {
    {
        printf '## %s: %s cores of %s, torch %s, commit %s, %s\n\n' "$COMMAND" \
            "$(getconf _NPROCESSORS_ONLN)" "$(sed -n '/^model name/{s/.*: //p;q;}' /proc/cpuinfo)" \
            "$(python -c 'import torch; print(torch.__version__)')" \
            "$(git describe --always --dirty)" "$(date +%F)"
        python -c "$REPORT" "$@"
    } | tee "out/bench/$COMMAND.md"
}

value_of() {  # NAME: what the last flag of that name says
    printf '%s\n' "${FLAGS[@]}" | sed -n "/^$1\$/{n;p;}" | tail -n 1
}

# -------------------------------------------------------------------------------------------------
# commands

bits() {
    local micro sequences world mode
    micro=$(value_of --micro_batch_size)
    for sequences in $((2 * micro)) $((4 * micro)); do
        for world in $WORLDS; do
            ((sequences % (world * micro) == 0)) || continue
            for mode in ${KINDS//,/ }; do
                [[ $mode == single && $world != 1 ]] \
                    || launch bits "$mode $sequences $((sequences / world / micro))" "$world" \
                        train.py --mode "$mode" --global_batch_size $sequences "${FLAGS[@]}"
            done
        done
    done
    report bits
}

modes() {
    local world group kind
    for world in $WORLDS; do
        for group in $KINDS; do
            measure "$COMMAND-steps" "$group" "$world" steps "$group" "$ROUNDS" "${FLAGS[@]}"
            for kind in ${group//,/ }; do
                measure "$COMMAND-memory" "$kind" "$world" steps "$kind" 1 "${FLAGS[@]}"
            done
        done
    done
    report modes "$COMMAND"
}

gpu() {
    if python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
        modes
    else
        echo "bench.sh gpu: torch finds no CUDA device here"
    fi
}

scaling() {
    local world batch
    batch=$(($(tr ' ' '\n' <<< "$WORLDS" | sort -n | tail -n 1) * $(value_of --micro_batch_size)))
    for world in $WORLDS; do
        measure scaling-weak "$KINDS" "$world" steps "$KINDS" "$ROUNDS" "${FLAGS[@]}"
        measure scaling-strong "$KINDS" "$world" steps "$KINDS" "$ROUNDS" "${FLAGS[@]}" \
            --global_batch_size $batch
        [[ $world == 1 ]] || measure scaling-collectives collectives "$world" \
            collectives "$ROUNDS" "${FLAGS[@]}"
    done
    for world in 8 64 512 1024 4096; do
        measure scaling-held "memory of $world ranks" 1 held ddp,zero1,zero2,zero3 $world \
            "${PLAIN[@]}" --model gpt2 --block_size 32 --micro_batch_size 1 \
            --find_unused_parameters  # since no other rank says what it used
    done
    report scaling "$PRICE" "$TFLOPS"
}

tune() {
    local batch size cap round
    batch=$(value_of --global_batch_size)
    for ((round = 0; round < ROUNDS; round++)); do
        for ((size = 1; size * WORLDS <= batch; size *= 2)); do
            for cap in 1 5 25 100; do
                set -- --micro_batch_size $size --bucket_cap_mb $cap
                launch tune "$*" "$WORLDS" train.py "${FLAGS[@]}" "$@"
            done
        done
    done
    report tune "torchrun --nproc_per_node=$WORLDS train.py$GIVEN"
}

link() {
    local rate rank
    [[ $(uname) == Linux && $(id -u) == 0 ]] \
        || die "link makes network namespaces: run it as root on Linux"
    command -v ip tc > /dev/null || die "link needs ip and tc: install iproute2"
    trap 'kill $(jobs -p) 2> /dev/null || true; wait; remove_link' EXIT  # jobs: after Ctrl-C
    for rate in "${RATES[@]}"; do
        remove_link
        make_link "$rate"
        echo "bench.sh: $KINDS at $rate" >&2
        for rank in 1 0; do
            GLOO_SOCKET_IFNAME=nanozero$rank OMP_NUM_THREADS=1 ip netns exec nanozero$rank \
                torchrun --nnodes=2 --node_rank=$rank --nproc_per_node=1 --master_addr=10.77.0.1 \
                --master_port=29477 --local-addr=10.77.0.$((rank + 1)) --no-python \
                python -c "$MEASURE" steps "$KINDS" "$ROUNDS" "${FLAGS[@]}" \
                > out/bench/log$rank.txt 2>&1 &
        done
        # each rank's exit status; rank 0's log has the reason where it failed, too
        wait -n && wait -n || failed "$KINDS" 2 out/bench/log0.txt >> "out/bench/link-$rate.jsonl"
        wait
        collect "$KINDS" out/bench/log0.txt >> "out/bench/link-$rate.jsonl"
    done
    report link "${RATES[@]}"
}

make_link() {
    local rank burst=256kb
    [[ $1 != *mbit ]] || burst=64kb
    for rank in 0 1; do ip netns add nanozero$rank; done
    ip link add nanozero0 netns nanozero0 type veth peer name nanozero1 netns nanozero1
    for rank in 0 1; do
        ip -n nanozero$rank addr add 10.77.0.$((rank + 1))/24 dev nanozero$rank
        ip -n nanozero$rank link set nanozero$rank up
        ip -n nanozero$rank link set lo up
        ip netns exec nanozero$rank tc qdisc replace dev nanozero$rank root tbf rate "$1" \
            burst $burst latency 50ms || die "link $1: tc knows no such rate"
    done
}

remove_link() { for rank in 0 1; do ip netns del nanozero$rank 2> /dev/null || true; done; }

# -------------------------------------------------------------------------------------------------
# options

usage() { sed -n '2,/^# Replaces/s/^# \{0,1\}//p' "$0" | head -n -1; }
die() { echo "bench.sh: $*" >&2; exit 2; }

COMMAND=${1:-} WORLDS="1 2 4" ROUNDS=6 MODES='' PRICE=2.0 TFLOPS=400 GIVEN='' RATES=()
PLAIN=(--out_dir out/bench/run --eval_steps 0 --sample_tokens 0 --save_interval 0
       --check_interval 0)
# Sizes at which communication weighs as much as computing: 31.8M parameters, 64 tokens a rank.
SMALL=(--n_layer 10 --n_head 8 --n_embd 512 --block_size 64 --micro_batch_size 1)
VARIED="--mode --global_batch_size"  # flags that the command sets itself
# KINDS: the rows; those with a comma between them share a process group.
case $COMMAND in
bits)
    KINDS=single,naive,ddp,zero1,zero2,zero3,torch-ddp,torch-fsdp
    FLAGS=(--micro_batch_size 4 --max_steps 20) ;;
modes)
    KINDS="single,naive,torch-ddp,ddp torch-zero1,zero1 torch-fsdp-kept,zero2 torch-fsdp,zero3"
    FLAGS=("${SMALL[@]}") ;;
scaling)  # 1024 tokens a rank: bound by computing
    KINDS=single,ddp,zero3
    FLAGS=(--n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --micro_batch_size 4) ;;
tune)
    KINDS='' WORLDS=2 ROUNDS=2 VARIED="--micro_batch_size --bucket_cap_mb"
    FLAGS=(--max_steps 12 --global_batch_size 16) ;;
link)
    KINDS=single,torch-ddp,ddp,ddp-bf16,ddp-powersgd,ddp-topk,zero1,zero2,torch-fsdp,zero3
    ROUNDS=4 FLAGS=("${SMALL[@]}" --micro_batch_size 4) ;;
gpu)
    KINDS=single,torch-ddp,ddp,torch-fsdp,zero3
    WORLDS=1 FLAGS=(--model gpt2 --dtype bf16 --compile --micro_batch_size 16) ;;
-h | --help | help)
    usage
    exit ;;
*)
    usage >&2
    exit 2 ;;
esac
FLAGS=("${PLAIN[@]}" "${FLAGS[@]}")  # those of the command line follow, and win
shift
while (($#)); do
    [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case $1 in
    --worlds | --rounds | --modes | --price | --tflops)
        (($# > 1)) || die "$1 needs a value"
        declare "$(tr a-z A-Z <<< "${1#--}")=$2"
        shift ;;
    [0-9]*[kmg]bit)
        RATES+=("$1") ;;
    *)
        [[ " $VARIED " != *" $1 "* ]] || die "$COMMAND sets $1 itself"
        FLAGS+=("$1")
        GIVEN+=" $1" ;;
    esac
    shift
done
[[ $WORLDS =~ ^[1-9][0-9]*(\ [1-9][0-9]*)*$ ]] || die "--worlds '$WORLDS': give ranks, '1 2 4'"
[[ $COMMAND != tune || $WORLDS != *" "* ]] || die "--worlds '$WORLDS': tune takes one number"
[[ $COMMAND != bits || ! $WORLDS =~ [^124\ ] ]] || die "bits compares 1, 2 and 4 ranks"
[[ $ROUNDS =~ ^[1-9][0-9]*$ ]] || die "--rounds $ROUNDS: give a number, 1 or more"
[[ $PRICE =~ ^[0-9.]+$ && $TFLOPS =~ ^[1-9][0-9.]*$ ]] || die "--price and --tflops are numbers"
[[ $COMMAND != link || ${#RATES[@]} != 0 ]] || die "link needs rates: 1gbit, 100mbit"
for mode in $MODES; do
    [[ ",${KINDS// /,}," == *",$mode,"* ]] || die "--modes $mode: $COMMAND has no such row"
done
[[ -z $MODES ]] || KINDS=${MODES// /,}
[[ $(value_of --micro_batch_size) != auto ]] || die "--micro_batch_size auto: give a number"
python -c 'import sys, train; train.parse_args(sys.argv[1:])' "${FLAGS[@]}"  # says what is wrong
trap 'exit 130' INT  # torchrun hears it too, and ends in order: its row would just count as failed
mkdir -p out/bench
rm -f "out/bench/$COMMAND"*
"$COMMAND"
! grep -qs '"failed"' "out/bench/$COMMAND"*.jsonl  # the exit status

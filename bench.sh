#!/usr/bin/env bash
# How fast, how much memory, how does it scale, and is it better than what ships with torch?
#
#     ./bench.sh bits             on which param_sha256 each mode ends, beside torch DDP and FSDP2
#     ./bench.sh modes            every mode beside its counterpart in torch and DeepSpeed
#     ./bench.sh scaling          weak and strong; a model of it, and what it says of 4096 ranks
#     ./bench.sh tune             bucket size and micro batch; ends with the command line to use
#     ./bench.sh options          each mode with activation checkpointing, compiled, and both
#     ./bench.sh link 1gbit       two hosts with a slow wire between them (Linux, root, iproute2)
#     ./bench.sh gpu              gpt2 in bf16 on one CUDA device
#     ./bench.sh timeline         a step of ddp and one of zero3: computing, exchanges, waiting
#
# Options, then any flags of train.py:
#     --worlds "1 2 4"   ranks            --price 2.0     USD per GPU-hour, for scaling
#     --rounds 6         visits a mode    --tflops 400    that a GPU reaches, for scaling
#     --modes "ddp zero3 torch-fsdp"      these rows only: bits, modes, options, link, timeline
#
# Replaces a benchmark harness: bash starts ranks and collects their RESULT lines, python turns
# these into Markdown tables, on stdout and in out/bench. A row that fails says why; others go on.
#
# Memory is what one run of train.py by itself takes. Times are of steps of train.py's own functions
# with several modes in one process group, visited in random order: runs apart from each other
# scatter by 20 % on a shared machine, more than what is to be seen. "alone" is the same step in a
# process group that sends nothing (torch's fake one), so that the difference is what communication
# costs. A ratio is one of medians; beside it its 90 % interval, by resampling the steps.
#
# Cost: on two cores modes take half an hour, scaling and options 15 minutes, bits, tune and
# link 1gbit 4, timeline 1.
set -euo pipefail
cd "$(dirname "$0")"

# what every run of a table has, and sizes at which communication weighs as much as computing: 31.8M
# parameters, 64 tokens a rank; flags on the command line come later and win
PLAIN=(--out_dir out/bench/run --eval_steps 0 --sample_tokens 0 --save_interval 0
       --check_interval 0)
SMALL=(--n_layer 10 --n_head 8 --n_embd 512 --block_size 64 --micro_batch_size 1)

TRAIN_MODES="single naive ddp zero1 zero2 zero3 torch-ddp torch-fsdp"

usage() { sed -n '2,/^# Replaces/s/^# \{0,1\}//p' "$0" | head -n -1; }
die() { echo "bench.sh: $*" >&2; exit 2; }

# -------------------------------------------------------------------------------------------------
# what ranks run beside train.py

MEASURE=$(cat <<'PYTHON'
"""steps KIND,KIND,... ROUNDS FLAGS   a step of train.py, in several modes in one process group
held KIND,... W FLAGS              what one of W ranks holds after a step; the others are absent
collectives ROUNDS FLAGS           the exchange, by size

A KIND is a mode of train.py, or what torch and DeepSpeed have beside it; KIND@alone is its step in
a group that sends nothing. `single` is a process for itself on every rank, `bare` the shortest loop
around the same model."""
import dataclasses, gc, json, os, random, statistics, sys, time, warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import ddp, train

MADE_FROM = {**{f"ddp-{hook}": "ddp" for hook in train.HOOKS}, "torch-zero1": "torch-ddp",
             "torch-fsdp-kept": "torch-fsdp", "bare": "single", "deepspeed-1": "single",
             "deepspeed-2": "single", "deepspeed-3": "single"}


def say(**result):
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)


class Kind:
    """A model and its optimizer, to be stepped."""

    def __init__(self, name, config, worker, tokenizer, batches):
        self.name, self.batches, self.seconds, self.waited = name, batches, [], []
        self.base, _, alone = name.partition("@")
        self.config = dataclasses.replace(config, mode=MADE_FROM.get(self.base, self.base))
        if self.base.startswith("ddp-"):
            self.config.comm_hook, self.config.warmup_steps = self.base[4:], 0
        self.worker = worker
        if self.config.mode == "single" and "deepspeed" not in name:
            self.worker = dataclasses.replace(worker, rank=0, world_size=1)
            self.config.global_batch_size //= worker.world_size
        elif alone:
            self.worker = dataclasses.replace(worker, group=dist.new_group(backend="fake"))
        plain = train.build_model(self.config, tokenizer)
        self.n_params = sum(p.numel() for p in plain.parameters())
        self.flops_per_token = plain.flops_per_token()
        self.n_layer = plain.config.n_layer
        # torch's reducer wants results, which the fake group has not: its no-op hook instead
        noop = alone and self.config.mode == "torch-ddp"
        self.model = train.wrap(plain, self.config, worker if noop else self.worker)
        self.optimizer = train.make_optimizer(self.model, self.config)
        self.scaler = train.make_scaler(self.config, self.worker)
        if alone and isinstance(self.model, ddp.Reducer):
            self.model.find_unused_parameters = True  # nobody says what other ranks use
        if noop:
            self.model.register_comm_hook(None, debugging_hooks.noop_hook)
        if self.base == "torch-fsdp-kept":
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False)
        elif self.base == "torch-zero1":
            groups = [dict(params=group["params"], weight_decay=group["weight_decay"])
                      for group in self.optimizer.param_groups]
            self.optimizer = ZeroRedundancyOptimizer(
                groups, torch.optim.AdamW, process_group=self.worker.group, lr=config.lr,
                betas=(config.beta1, config.beta2), fused=False)
        elif self.base.startswith("deepspeed"):
            self.start_deepspeed(stage=int(self.base[-1]))

    def start_deepspeed(self, stage):
        import deepspeed

        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, dist_init_required=False,
            config=dict(train_batch_size=self.config.global_batch_size, steps_per_print=10**9,
                        train_micro_batch_size_per_gpu=self.config.micro_batch_size,
                        gradient_clipping=self.config.grad_clip,
                        zero_optimization=dict(stage=stage)))

    def step(self, n):
        """Also notes how long it took, and how long of this it waited for communication."""
        start_s, waited_s = time.perf_counter(), None
        if self.base == "bare" or self.base.startswith("deepspeed"):
            self.shortest_step(n)
        else:
            found = train.find_gradients(self.model, self.optimizer, self.scaler, self.batches, n,
                                         self.config, self.worker)
            found.finite = True  # alone, numbers mean nothing
            train.update(self.optimizer, self.scaler, n, self.config, found)
            waited_s = found.exposed_s
        self.worker.synchronize()
        self.seconds.append(time.perf_counter() - start_s)
        self.waited.append(waited_s)

    def shortest_step(self, n):
        c, W = self.config, self.worker.world_size
        for a in range(train.accumulation_steps(c, W)):
            batch = self.batches.micro_batch(n, a * W + self.worker.rank, c.micro_batch_size)
            with train.autocast(c, self.worker):
                _, loss = self.model(*self.worker.to_device(*batch))
            if self.base == "bare":
                loss.backward()
                continue
            self.model.backward(loss)
            self.model.step()
        if self.base == "bare":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def exchanges(self):
        """Into how many gathers, or reductions, the parameters are divided."""
        return len(getattr(self.model, "_units", getattr(self.model, "_buckets", [])))

    def bytes_per_param(self):
        if self.base.startswith("deepspeed"):
            return {}
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # inside torch's zero1
        held = train.held_bytes(self.model, optimizer, self.n_params, self.config, self.worker)
        ours, formula = (sum(sizes) / self.n_params for sizes in zip(*held.values()))
        if self.base == "torch-zero1":
            formula = 8 + 8 / self.worker.world_size
        return dict(bytes_per_param=ours, bytes_per_param_formula=formula)


def begin(flags, world_size=None):
    """-> what a Kind is made from, after its name; as one of world_size ranks if that is set."""
    ranks = world_size or int(os.environ.get("WORLD_SIZE", 1))
    config = train.parse_args(["--mode", "ddp", *flags])
    if "--global_batch_size" not in flags:
        config.global_batch_size = ranks * config.micro_batch_size
    train.check(config)
    if world_size:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        worker = train.Worker(0, world_size, torch.device("cpu"))
    else:
        worker = train.start(config)
    torch.set_flush_denormal(True)  # alone, memory that nothing was received into may hold some
    tokenizer, _, batches, _, _ = train.prepare(config, worker)
    return config, worker, tokenizer, batches


def steps(kinds, rounds, *flags):
    context = config, worker, _, batches = begin(flags)
    made = [Kind(name, *context) for name in kinds.split(",")]
    random.seed(config.seed)  # one order on all ranks
    n = 0
    for visit in range(1 + int(rounds)):
        for kind in random.sample(made, len(made)):
            for repeat in range(3 if visit else 1):
                dist.barrier()
                kind.step(n)
                if not visit or not repeat:  # new, or its memory is cold
                    kind.seconds.pop(), kind.waited.pop()
                n += 1
    mean = torch.tensor([kind.seconds for kind in made], device=worker.device)
    mean = worker.reduce(mean) / worker.world_size
    most = torch.tensor(worker.peak_mem_bytes(), device=worker.device)
    most = worker.reduce(most, dist.ReduceOp.MAX).item()
    for kind, seconds in zip(made, mean.tolist()):
        step_s = statistics.median(seconds)
        rate = config.global_batch_size * batches.block_size / step_s
        cuda = worker.device.type == "cuda"
        peak = train.peak_flops(torch.cuda.get_device_name()) if cuda else None
        waited = None if None in kind.waited else 1e3 * statistics.median(kind.waited)
        say(mode=kind.name, world_size=worker.world_size, n_params=kind.n_params,
            step_ms=1e3 * step_s, all_ms=[1e3 * s for s in seconds], tokens_per_sec=rate,
            mfu=peak and rate * kind.flops_per_token / worker.world_size / peak,
            comm_exposed_ms=waited, peak_mem_bytes=most,
            start_mem_bytes=worker.start_mem_bytes, n_layer=kind.n_layer,
            exchanges=kind.exchanges(), **kind.bytes_per_param())


def held(kinds, world_size, *flags):
    context = config, _, tokenizer, _ = begin(flags, int(world_size))
    for name in kinds.split(","):
        kind = Kind(name, *context)
        if isinstance(kind.model, ddp.Reducer):
            kind.model.find_unused_parameters = True
        kind.step(0)
        usual = dataclasses.replace(config, block_size=None, mode="zero3")  # 1024 tokens, on meta
        say(mode=name, world_size=int(world_size), n_params=kind.n_params, n_layer=kind.n_layer,
            flops_per_token=train.build_model(usual, tokenizer).flops_per_token(),
            exchanges=kind.exchanges(), **kind.bytes_per_param())
        del kind
        gc.collect()


def collectives(rounds, *flags):
    _, worker, _, _ = begin(flags)
    for n_bytes in (2**k for k in range(14, 27, 2)):
        flat = torch.ones(n_bytes // 4)
        verbs = {"reduce-scatter": lambda: ddp.reduce_scatter(flat)(),
                 "all-gather": lambda: ddp.all_gather(flat)()}
        for verb, function in verbs.items():
            seconds = []
            for _ in range(1 + 5 * int(rounds)):
                flat.fill_(1.0)
                dist.barrier()
                start_s = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - start_s)
            say(verb=verb, world_size=worker.world_size, bytes=n_bytes,
                ms=1e3 * statistics.median(seconds[1:]))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    dict(steps=steps, held=held, collectives=collectives)[sys.argv[1]](*sys.argv[2:])
    gc.collect()
    dist.destroy_process_group()
PYTHON
)

# -------------------------------------------------------------------------------------------------
# tables

REPORT=$(cat <<'PYTHON'
"""bits | modes | scaling PRICE TFLOPS | tune | options | link RATE... | gpu: tables of
out/bench/*.jsonl
timeline: pictures of out/bench/timeline-*.json
fastest: the flags of the fastest runs of tune"""
import collections, datetime, importlib.metadata, json, os, pathlib, random, re, statistics
import shutil, subprocess, sys

# mode -> what does the same in torch, and with which it is measured in one process group
COUNTERPART = {"naive": "torch-ddp", "ddp": "torch-ddp", "ddp-bf16": "torch-ddp",
               "ddp-powersgd": "torch-ddp", "ddp-topk": "torch-ddp", "zero1": "torch-zero1",
               "zero2": "torch-fsdp-kept", "zero3": "torch-fsdp"}
ORDER = ["bare", "single", "naive", "torch-ddp", "ddp", "ddp-bf16", "ddp-powersgd", "ddp-topk",
         "torch-zero1", "deepspeed-1", "zero1", "torch-fsdp-kept", "deepspeed-2", "zero2",
         "torch-fsdp", "deepspeed-3", "zero3"]


def read(name):
    """The good records of a file; the others are told."""
    path = pathlib.Path("out/bench") / f"{name}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for r in records:
        if "failed" in r:
            print(f"Failed: {r['label']} at W={r['world_size']}: {r['failed']}\n")
    return [r for r in records if "failed" not in r]


def where():
    try:
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        cpu = "a CPU"
    commit = ""
    if shutil.which("git"):
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True,
                                text=True).stdout.strip()
    return (f"{os.cpu_count()} cores of {cpu}, torch {importlib.metadata.version('torch')}, commit "
            f"{commit or 'unknown'}, {datetime.date.today()}")


def table(head, rows):
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def chart(title, bars):
    """{label: length} as Mermaid has it."""
    names = ", ".join(f'"{name}"' for name in bars)
    lengths = ", ".join(f"{length:.1f}" for length in bars.values())
    print(f'```mermaid\nxychart-beta horizontal\n    title "{title}"\n    x-axis [{names}]\n'
          f"    y-axis 0 --> {1.1 * max(bars.values()):.0f}\n    bar [{lengths}]\n```\n")


def number(x, digits=0, factor=1):
    return "-" if x is None else f"{factor * x:,.{digits}f}"


def ratio(a, b):
    """Of medians, and, of enough steps, where it lies in 90 % of resamplings."""
    a, b, chance = a["all_ms"], b["all_ms"], random.Random(0)
    if len(a) < 8:
        return f"{statistics.median(a) / statistics.median(b):.2f}"
    drawn = sorted(statistics.median(chance.choices(a, k=len(a)))
                   / statistics.median(chance.choices(b, k=len(b))) for _ in range(1000))
    best = statistics.median(a) / statistics.median(b)
    return f"{best:.2f} ({drawn[50]:.2f} to {drawn[949]:.2f})"


class Steps:
    """What `steps` has measured, by mode, world size and what was measured beside it."""

    def __init__(self, name):
        self.records = read(name)
        self.worlds = sorted({r["world_size"] for r in self.records})

    def find(self, mode, W, beside=""):
        return next((r for r in self.records if r["mode"] == mode and r["world_size"] == W
                     and (not beside or beside in r["label"].split(","))), None)

    def ratio(self, mode, other, W):
        ours, theirs = self.find(mode, W, beside=other), self.find(other, W, beside=mode)
        return ratio(ours, theirs) if other and ours and theirs else "-"

    def more_than_alone(self, mode, W):
        r, alone = self.find(mode, W, f"{mode}@alone"), self.find(f"{mode}@alone", W)
        return alone and r["step_ms"] - alone["step_ms"]

    def table(self, cells):
        """A row a mode and W; cells: {column: function of mode, W and record}."""
        rows = []
        for W in self.worlds:
            for mode in ORDER:
                r = self.find(mode, W, COUNTERPART.get(mode)) or self.find(mode, W)
                if r is not None:
                    low, _, high = statistics.quantiles(r["all_ms"], n=4, method="inclusive")
                    rows.append([mode, str(W), f"{r['step_ms']:,.0f} ({low:,.0f} to {high:,.0f})",
                                 number(r["tokens_per_sec"]), number(r["comm_exposed_ms"]),
                                 *(cell(mode, W, r) for cell in cells.values())])
        table(["mode", "W", "step ms (quartiles)", "tokens/s", "waited ms", *cells], rows)

    def noise(self):
        apart = []
        for mode, W in ((mode, W) for mode in COUNTERPART for W in self.worlds):
            a, b = (self.find(one, W, other) for one, other in
                    ((mode, COUNTERPART[mode]), (COUNTERPART[mode], mode)))
            if a and b:
                half = len(a["all_ms"]) // 2
                first, second = (statistics.median(a["all_ms"][part])
                                 / statistics.median(b["all_ms"][part])
                                 for part in (slice(half), slice(half, None)))
                apart.append(abs(first / second - 1))
        if apart:
            print(f"Noise: a ratio from the first half of the steps and one from the second differ "
                  f"by {statistics.median(apart):.0%} in the median, {max(apart):.0%} at most.\n")


def bits():
    """A column for each number of sequences a step and of ranks: they make the micro-steps."""
    hashes = collections.defaultdict(dict)  # (sequences, W) -> {mode: hash}
    for r in read("bits"):
        mode, sequences, micro_steps = r["label"].split()
        hashes[f"{sequences} sequences, W={r['world_size']}, {micro_steps} micro-step"
               f"{'s' * (micro_steps != '1')}"][mode] = f"`{r['param_sha256'][:8]}`"
    modes = dict.fromkeys(mode for of_modes in hashes.values() for mode in of_modes)
    table(["mode", *hashes], [[mode, *(of_modes.get(mode, "-") for of_modes in hashes.values())]
                              for mode in modes])


def modes():
    steps = Steps("modes-steps")
    run = {r["label"]: r for r in read("modes-memory")}  # by itself

    def growth(mode, W):
        held = run.get(f"{mode} {W}")
        return held and held["peak_mem_bytes"] - held["start_mem_bytes"]

    def growth_ratio(mode, W, r):
        ours, theirs = growth(mode, W), growth(COUNTERPART.get(mode), W)
        return f"{ours / theirs:.2f}" if ours and theirs else "-"

    def per_parameter(mode, W, r):
        held = run.get(f"{mode} {W}", {})
        return (f"{number(held.get('bytes_per_param'), 2)} "
                f"({number(held.get('bytes_per_param_formula'), 2)})")

    steps.table({
        "more than alone, ms": lambda mode, W, r: number(steps.more_than_alone(mode, W)),
        "step over torch's": lambda mode, W, r: steps.ratio(mode, COUNTERPART.get(mode), W),
        "over DeepSpeed's": lambda mode, W, r: steps.ratio(mode, f"deepspeed-{mode[-1]}", W)
        if mode.startswith("zero") else "-",
        "peak MB a rank, less Python and torch":
            lambda mode, W, r: number(growth(mode, W), 0, 1e-6),
        "over torch's": growth_ratio,
        "bytes a parameter (formula)": per_parameter})
    steps.noise()
    held = {f"{mode}, W={W}": run[f"{mode} {W}"]["bytes_per_param"]
            for W in steps.worlds for mode in ("ddp", "zero1", "zero2", "zero3")
            if f"{mode} {W}" in run}
    if held:
        chart("Bytes a parameter on a rank after a step: weights, gradients, Adam", held)
    for W in steps.worlds:
        chart(f"Milliseconds a step, W={W}", {mode: r["step_ms"] for mode in ORDER
                                              if (r := steps.find(mode, W))})


def fit(points):
    """(messages, bytes, ms) -> ms a message, ms a byte: least squares of relative errors."""
    rows = [(n / ms, b / ms) for n, b, ms in points]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    return (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant


def exchange_ms(alpha_ms, beta_ms, W, n_bytes, times=1):
    """The alpha-beta model: W - 1 messages each of `times`, (W-1)/W of the bytes over all."""
    return times * (W - 1) * alpha_ms + (W - 1) / W * n_bytes * beta_ms


def gathers(r):
    """How often a step gathers all parameters: in stage 3 twice, but for the two units that the
    backward finds in their slots; in other stages once, in ddp as the second half of an all-reduce.
    """
    return 2 - 2 / r["n_layer"] if r["mode"] == "zero3" else 1


def scaling(price, tflops):
    print("Weak: the same work a rank. Strong: the same work in all. Efficiency: over W processes "
          "on the same cores that know nothing of each other.\n")
    rows = []
    for name in ("weak", "strong"):
        steps = Steps(f"scaling-{name}")
        for mode in ("ddp", "zero3"):
            for W in steps.worlds:
                first, r, single = (steps.find(mode, steps.worlds[0]), steps.find(mode, W),
                                    steps.find("single", W))
                if r and single:
                    rows.append([name, mode, str(W), number(r["tokens_per_sec"]),
                                 f"{r['tokens_per_sec'] / first['tokens_per_sec']:.2f}",
                                 number(single["tokens_per_sec"]), ratio(single, r)])
    table(["scaling", "mode", "W", "tokens/s", "over the first", "tokens/s of W processes",
           "efficiency"], rows)
    links = fit_links()
    predict_here(Steps("scaling-weak"), links)
    predict_there(price, tflops)


def fit_links():
    """{(verb, W): (alpha, beta)}, and how well they fit."""
    measured, links, rows = collections.defaultdict(list), {}, []
    for r in read("scaling-collectives"):
        measured[r["verb"], r["world_size"]].append(r)
    for (verb, W), at in sorted(measured.items()):
        alpha, beta = links[verb, W] = fit([(W - 1, (W - 1) / W * r["bytes"], r["ms"]) for r in at])
        for r in at:
            predicted = exchange_ms(alpha, beta, W, r["bytes"])
            rows.append([verb, str(W), f"{1e3 * alpha:.0f}", f"{1e-6 / beta:.2f}",
                         number(r["bytes"] / 2**10), number(r["ms"], 2), number(predicted, 2),
                         f"{predicted / r['ms'] - 1:+.0%}"])
    print("The exchange: ms = (W-1) alpha + (W-1)/W bytes beta, fitted.\n")
    table(["exchange", "W", "alpha, us", "1/beta, GB/s", "KiB", "ms", "predicted", "error"], rows)
    return links


def predict_here(steps, links):
    print("The step: that of a rank alone and the exchanges in sum, since here both need the same "
          "cores.\n")
    rows = []
    for W in steps.worlds:
        for mode in ("ddp", "zero3"):
            r, alone = steps.find(mode, W), steps.find(f"{mode}@alone", W)
            if r and alone and ("all-gather", W) in links:
                whole = W, 4 * r["n_params"], r["exchanges"]
                exchanges = (exchange_ms(*links["reduce-scatter", W], *whole)
                             + gathers(r) * exchange_ms(*links["all-gather", W], *whole))
                predicted = alone["step_ms"] + exchanges
                rows.append([mode, str(W), number(alone["step_ms"]), number(exchanges),
                             number(r["step_ms"] - alone["step_ms"]), number(predicted),
                             number(r["step_ms"]),
                             f"{predicted / r['step_ms'] - 1:+.0%}"])
    table(["mode", "W", "alone ms", "exchanges, predicted ms", "more than alone, measured ms",
           "step, predicted ms", "step, measured ms", "error"], rows)


LINKS = {"10 Gbit/s": (30, 1.25), "100 Gbit/s": (5, 12.5), "NVLink": (3, 450)}  # us, GB/s


def predict_there(price, tflops):
    rows, tokens = [], 16 * 1024
    for r in read("scaling-held"):
        W, Psi, mode = r["world_size"], r["n_params"], r["mode"]
        compute = 1e3 * tokens * r["flops_per_token"] / (1e12 * tflops)
        row = [mode, f"{W:,}", f"{1e-6 * Psi * r['bytes_per_param']:,.1f} "
                               f"({1e-6 * Psi * r['bytes_per_param_formula']:,.1f})"]
        for alpha_us, gigabytes in LINKS.values():
            once = exchange_ms(1e-3 * alpha_us, 1e-6 / gigabytes, W, 4 * Psi, r["exchanges"])
            # under the forward a gather, which ddp has not; under the backward what is left
            in_forward = 0 if mode == "ddp" else once
            in_backward = (1 + gathers(r)) * once - in_forward
            step = max(compute / 3, in_forward) + max(2 / 3 * compute, in_backward)
            row += [f"{step:,.0f}", f"{compute / step:.0%}",
                    f"{price / 3600 * 1e9 * 1e-3 * step / tokens:,.2f}"]
        rows.append(row)
    print(f"Predicted, not measured, but for memory, which is that of real tensors after a step in "
          f"torch's fake process group: gpt2 with bytes for tokens (85M parameters), {tokens:,} "
          f"tokens a rank and step in blocks of 1024, 16-bit math and fp32 exchanges, a GPU that "
          f"reaches {tflops:g} TFLOP/s and costs {price:g} USD an hour. Memory is that between "
          f"steps, without what forward and backward need for a while. Gathers hide under the "
          f"forward, a third of the computing, the rest under the backward. Per link the step in "
          f"ms, its efficiency, USD per billion tokens. Assumed: "
          + ", ".join(f"{name} {a} us and {b} GB/s" for name, (a, b) in LINKS.items())
          + "; a message to each rank, as ddp.py has it, where NCCL's trees need log W.\n")
    table(["mode", "W", "MB a rank (formula)",
           *(cell for name in LINKS for cell in (name, "eff.", "USD"))], rows)


def runs_by_flags(name):
    runs = collections.defaultdict(list)
    for r in read(name):
        runs[r["label"]].append(r)
    return runs


def tune():
    rows = []
    for flags, runs in runs_by_flags("tune").items():
        rates = [r["tokens_per_sec"] for r in runs]
        rows.append([f"`{flags}`", number(statistics.median(rates)), ", ".join(map(number, rates)),
                     number(max(r["peak_mem_bytes"] for r in runs), 0, 1e-6)])
    table(["flags", "tokens/s, median", "all", "peak MB a rank"], rows)


def options():
    """A row for each mode, a column for what is switched on beside it."""
    cells = collections.defaultdict(dict)  # mode -> {flags: cell}
    for label, runs in runs_by_flags("options").items():
        _, mode, *flags = label.split()
        rates = [r["tokens_per_sec"] for r in runs]
        most = max(r["peak_mem_bytes"] for r in runs)
        cells[mode][" ".join(flags)] = (
            f"{number(statistics.median(rates))} ({number(min(rates))} to {number(max(rates))}), "
            f"{number(most, 0, 1e-6)} MB")
    columns = dict.fromkeys(flags for of_mode in cells.values() for flags in of_mode)
    print("Tokens/s, median, least and most of the runs; peak memory of a rank.\n")
    table(["mode", *(f"`{flags}`" if flags else "neither" for flags in columns)],
          [[mode, *(of_mode.get(flags, "-") for flags in columns)]
           for mode, of_mode in cells.items()])


def fastest():
    runs = runs_by_flags("tune")
    print(max(runs, key=lambda flags: statistics.median(r["tokens_per_sec"] for r in runs[flags])))


def link(*rates):
    for rate in rates:
        steps = Steps(f"link-{rate}")
        digits, unit = re.match(r"([\d.]+)(.)", rate).groups()
        bits_per_ms = float(digits) * dict(k=1, m=1e3, g=1e6)[unit]
        alone = steps.find("ddp@alone", 2)

        def wire_ms(mode, W, r):
            sent = 1 / 2 if mode == "ddp-bf16" else 3 / 2 if mode == "torch-fsdp" else (
                1 + gathers(r)) / 2  # times 4 Psi bytes
            return 8 * 4 * sent * r["n_params"] / bits_per_ms

        def over_bound(mode, W, r):
            return number(r["step_ms"] / max(alone["step_ms"], wire_ms(mode, W, r)), 2)

        print(f"Two ranks, {rate} between them, each way. Computing alone, as ddp does it: "
              f"{number(alone and alone['step_ms'])} ms. Bound: the larger of this and of the "
              f"bytes that it has to send over the bandwidth (those of fp32 for PowerSGD and "
              f"top-k too).\n")
        steps.table({
            "bytes / bandwidth, ms": lambda *row: number(wire_ms(*row)),
            "step over bound": over_bound if alone else lambda *row: "-",
            "over torch's DDP": lambda mode, W, r: steps.ratio(mode, "torch-ddp", W),
            "over torch's FSDP2": lambda mode, W, r: steps.ratio(mode, "torch-fsdp", W)})


def gpu():
    steps, run = Steps("gpu-steps"), {r["label"]: r for r in read("gpu-memory")}
    steps.table({
        "MFU": lambda mode, W, r: "-" if r["mfu"] is None else f"{r['mfu']:.1%}",
        "over single": lambda mode, W, r: steps.ratio(mode, "single", W),
        "peak MB": lambda mode, W, r: number(run.get(f"{mode} 1", {}).get("peak_mem_bytes"), 0,
                                             1e-6)})


def timeline():
    """Steps of one micro-step, as Mermaid has them."""
    for r in read("timeline"):
        trace = json.loads(pathlib.Path(f"out/bench/timeline-{r['mode']}.json").read_text())
        bars = bars_of(trace["traceEvents"])
        print(f"```mermaid\n---\ndisplayMode: compact\n---\ngantt\n"
              f"    title {r['mode']}: a step of rank 0 of {r['world_size']}, in ms\n"
              f"    dateFormat x\n    axisFormat %Q")
        for section in ("compute", "gather", "reduce", "wait"):
            for n, (_, *bar) in enumerate(bar for bar in bars if bar[0] == section):
                label, colour, start, end = bar
                told = section == "compute" or end - start > 0.03 * bars[2][-1]  # room for a word
                if n == 0:
                    print(f"    section {section}")
                if round(start) < round(end):
                    print(f"    {label if told else '·'} :{colour}, {round(start)}, {round(end)}")
        print("```\n")


def bars_of(events):
    """[(section, label, what colours it, start, end)] of a trace's step of median duration, in ms
    from its beginning; exchanges as `Trace` in train.py draws them, from start to needed."""
    spans = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    begun = {e["id"]: e for e in events if e["ph"] == "b"}
    spans += [(begun[e["id"]]["name"], begun[e["id"]]["ts"], e["ts"]) for e in events
              if e["ph"] == "e" and e["id"] in begun]
    steps = sorted((end - start, start, end) for name, start, end in spans
                   if name.startswith("ProfilerStep"))
    _, first, last = steps[len(steps) // 2]
    spans = [(name, 1e-3 * (start - first), 1e-3 * (end - first)) for name, start, end in spans
             if first <= start < last]  # from us

    def bounds(prefix):
        found = [(start, end) for name, start, end in spans if name.startswith(prefix)]
        return min(start for start, _ in found), max(end for _, end in found)

    backward = bounds("autograd::engine")
    bars = [("compute", "forward", "active", bounds("aten::embedding")[0], backward[0]),
            ("compute", "backward", "active", *backward),
            ("compute", "AdamW", "active", *bounds("Optimizer.step"))]
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        section, _, label = name.partition(" ")
        if section in ("gather", "reduce"):
            label = label.replace("blocks.", "block ").replace("the root", "root")
            bars.append((section, label, "done", start, end))
        elif section == "wait:":
            bars.append(("wait", label, "crit", start, end))
    return bars


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command != "fastest":
        print(f"## {command}: {where()}\n")
    commands = dict(bits=bits, modes=modes, tune=tune, fastest=fastest, options=options, link=link,
                    gpu=gpu, timeline=timeline,
                    scaling=lambda *numbers: scaling(*map(float, numbers)))
    commands[command](*arguments)
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
}

collect() { sed -n "s|^RESULT {|{\"label\": \"$1\", |p" "$2"; }

failed() {
    local why
    why=$(grep -aE '^(\[rank[0-9]+\]: )?([A-Za-z.]*(Error|Exception)|train\.py):' "$3" | head -n 1 \
        | tr -d '"\\\t' | cut -c -200) || why="exit status not 0, see out/bench/log.txt"
    echo "bench.sh: failed: $why" >&2
    printf '{"label": "%s", "world_size": %s, "failed": "%s"}\n' "$1" "$2" "$why"
}

steps() {  # FILE KINDS W FLAGS...
    local file=$1 kinds=$2 world=$3
    shift 3
    launch "$file" "$kinds" "$world" --no-python python -c "$MEASURE" steps "$kinds" "$ROUNDS" "$@"
}

report() { python -c "$REPORT" "$@" | tee "out/bench/$1.md"; }

# -------------------------------------------------------------------------------------------------
# commands

bits() {
    local flags=(--micro_batch_size 4 --max_steps 20 "${FLAGS[@]}") micro sequences world mode
    micro=$(value_of --micro_batch_size "${flags[@]}")
    for world in $WORLDS; do
        [[ $world =~ ^[124]$ ]] || die "bits compares 1, 2 and 4 ranks, not $world"
    done
    for sequences in $((2 * micro)) $((4 * micro)); do
        for world in $WORLDS; do
            ((sequences % (world * micro) == 0)) || continue
            for mode in ${MODES:-$TRAIN_MODES}; do
                [[ $mode == single && $world != 1 ]] \
                    || launch bits "$mode $sequences $((sequences / world / micro))" "$world" \
                        train.py --mode "$mode" --global_batch_size $sequences "${flags[@]}"
            done
        done
    done
    report bits
}

modes() {
    local families=(single,naive,naive@alone,torch-ddp,torch-ddp@alone,ddp,ddp@alone
                    torch-zero1,torch-zero1@alone,zero1,zero1@alone
                    torch-fsdp-kept,torch-fsdp-kept@alone,zero2,zero2@alone
                    torch-fsdp,torch-fsdp@alone,zero3,zero3@alone)
    if python -c 'import importlib.util as u; assert u.find_spec("deepspeed")' 2> /dev/null; then
        families+=(deepspeed-1,zero1 deepspeed-2,zero2 deepspeed-3,zero3)
    else
        echo "bench.sh: no rows of DeepSpeed: pip install deepspeed" >&2
    fi
    local world family mode flags=("${SMALL[@]}" "${FLAGS[@]}")
    for world in $WORLDS; do
        for family in "${families[@]}"; do
            family=$(chosen "$family")
            [[ -z $family ]] || steps modes-steps "$family" "$world" "${flags[@]}"
        done
        for mode in $(chosen "${families[*]}" | tr , '\n' | grep -v alone | sort -u); do
            memory modes-memory "$mode" "$world" "${flags[@]}"
        done
    done
    report modes
}

chosen() {  # the kinds among those of --modes, all without it
    local kind kept=
    for kind in ${1//,/ }; do
        [[ -n $MODES && " $MODES " != *" ${kind%@alone} "* ]] || kept+=",$kind"
    done
    echo "${kept#,}"
}

memory() {  # FILE MODE W FLAGS...: of a run by itself
    local file=$1 mode=$2 world=$3 batch
    shift 3
    batch=$((world * $(value_of --micro_batch_size "$@")))
    case $mode in
    single) [[ $world != 1 ]] || launch "$file" "$mode $world" 1 \
                train.py --mode single --max_steps 4 --global_batch_size "$batch" "$@" ;;
    *-kept | torch-zero1 | deepspeed* | bare) launch "$file" "$mode $world" "$world" \
                --no-python python -c "$MEASURE" steps "$mode" 1 "$@" ;;
    *) launch "$file" "$mode $world" "$world" \
                train.py --mode "$mode" --max_steps 4 --global_batch_size "$batch" "$@" ;;
    esac
}

value_of() {  # NAME FLAGS...: what the last of them says
    local name=$1 value=
    shift
    while (($# > 1)); do
        [[ $1 != "$name" ]] || value=$2
        shift
    done
    echo "$value"
}

scaling() {
    local flags=(--n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --micro_batch_size 4
                 "${FLAGS[@]}") world  # 1024 tokens a rank: bound by computing
    local most kinds=single,ddp,ddp@alone,zero3,zero3@alone
    most=$(tr ' ' '\n' <<< "$WORLDS" | sort -n | tail -n 1)
    local batch=$((most * $(value_of --micro_batch_size "${flags[@]}")))
    for world in $WORLDS; do
        steps scaling-weak $kinds "$world" "${flags[@]}"
        steps scaling-strong single,ddp,zero3 "$world" "${flags[@]}" --global_batch_size $batch
        [[ $world == 1 ]] || launch scaling-collectives "collectives" "$world" \
            --no-python python -c "$MEASURE" collectives "$ROUNDS" "${flags[@]}"
    done
    for world in 8 64 512 1024 4096; do
        launch scaling-held "memory of $world ranks" 1 --no-python python -c "$MEASURE" \
            held ddp,zero1,zero2,zero3 $world "${PLAIN[@]}" --model gpt2 --tokenizer bytes \
            --block_size 32 --micro_batch_size 1
    done
    report scaling "$PRICE" "$TFLOPS"
}

tune() {
    local world=${WORLDS##* } flags=(--max_steps 12 "${FLAGS[@]}") batch size cap round best
    batch=$(value_of --global_batch_size --global_batch_size 16 "${FLAGS[@]}")
    flags+=(--global_batch_size "$batch")
    for ((round = 0; round < ROUNDS; round++)); do
        for ((size = 1; size * world <= batch; size *= 2)); do
            ((batch % (size * world))) || launch tune "--micro_batch_size $size" "$world" train.py \
                --micro_batch_size $size "${flags[@]}"
        done
    done
    best=$(python -c "$REPORT" fastest)
    for ((round = 0; round < ROUNDS; round++)); do
        for cap in 1 5 25 100; do
            launch tune "$best --bucket_cap_mb $cap" "$world" train.py \
                $best --bucket_cap_mb $cap "${flags[@]}"
        done
    done
    report tune
    best=$(python -c "$REPORT" fastest)
    printf 'Fastest:\n\n    torchrun --nproc_per_node=%s train.py --global_batch_size %s%s %s\n' \
        "$world" "$batch" "$GIVEN" "$best" | tee -a out/bench/tune.md
}

link() {  # RATE...: as tc has it, 1gbit or 100mbit
    local rate rank flags=("${SMALL[@]}" --micro_batch_size 4 "${FLAGS[@]}")
    local kinds
    kinds=torch-ddp,ddp,ddp@alone,ddp-bf16,ddp-powersgd,ddp-topk,zero1,zero2,torch-fsdp,zero3
    kinds=$(chosen $kinds)
    [[ $(uname) == Linux && $(id -u) == 0 ]] \
        || die "link makes network namespaces: run it as root on Linux"
    command -v ip tc > /dev/null || die "link needs ip and tc: install iproute2"
    trap 'kill $(jobs -p) 2> /dev/null || true; wait; remove_link' EXIT  # jobs: after Ctrl-C
    for rate in "${RATES[@]}"; do
        remove_link
        make_link "$rate"
        echo "bench.sh: $kinds at $rate" >&2
        for rank in 1 0; do
            GLOO_SOCKET_IFNAME=nanozero$rank OMP_NUM_THREADS=1 ip netns exec nanozero$rank \
                torchrun --nnodes=2 --node_rank=$rank --nproc_per_node=1 --master_addr=10.77.0.1 \
                --master_port=29477 --local-addr=10.77.0.$((rank + 1)) --no-python \
                python -c "$MEASURE" steps "$kinds" "$ROUNDS" "${flags[@]}" \
                > out/bench/log$rank.txt 2>&1 &
        done
        # each rank's exit status; rank 0's log has the reason where it failed, too
        wait -n && wait -n || failed "$kinds" 2 out/bench/log0.txt >> "out/bench/link-$rate.jsonl"
        wait
        collect "$kinds" out/bench/log0.txt >> "out/bench/link-$rate.jsonl"
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

gpu() {
    if ! python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
        echo "bench.sh gpu: torch finds no CUDA device here"
        return
    fi
    local flags=(--model gpt2 --dtype bf16 --compile --micro_batch_size 16 "${FLAGS[@]}") mode
    steps gpu-steps bare,single,ddp,zero3 1 "${flags[@]}"
    for mode in bare single ddp zero3; do memory gpu-memory $mode 1 "${flags[@]}"; done
    report gpu
}

options() {
    local world=${WORLDS##* } round mode option batch
    local flags=(--n_layer 8 --n_head 8 --n_embd 256 --block_size 256 --max_steps 8 "${FLAGS[@]}")
    batch=$(value_of --micro_batch_size --micro_batch_size 4 "${FLAGS[@]}")
    flags+=(--global_batch_size $((world * batch)))
    for ((round = 0; round < ROUNDS; round++)); do
        for mode in ${MODES:-naive torch-ddp ddp zero1 zero2 torch-fsdp zero3}; do
            for option in "" --activation_checkpointing --compile \
                "--activation_checkpointing --compile"; do
                launch options "--mode $mode${option:+ $option}" "$world" train.py \
                    --mode "$mode" $option "${flags[@]}"
            done
        done
    done
    report options
}

timeline() {
    local world=${WORLDS##* } mode trace=out/bench/run/trace_rank0.json
    local flags=(--n_layer 4 --n_head 8 --n_embd 512 --block_size 128 --micro_batch_size 4
                 --max_steps 7 --profile 5 "${FLAGS[@]}")
    flags+=(--global_batch_size $((world * $(value_of --micro_batch_size "${flags[@]}"))))
    for mode in ${MODES:-ddp zero3}; do
        launch timeline "$mode" "$world" train.py --mode "$mode" "${flags[@]}"
        [[ ! -e $trace ]] || mv $trace "out/bench/timeline-$mode.json"
    done
    report timeline
}

# -------------------------------------------------------------------------------------------------
COMMAND=${1:-} WORLDS="1 2 4" ROUNDS=6 MODES='' PRICE=2.0 TFLOPS=400 GIVEN='' RATES=()
case $COMMAND in
bits | modes | scaling | gpu) ;;
timeline) WORLDS=2 ;;
tune) WORLDS=2 ROUNDS=3 ;;
options) WORLDS=2 ROUNDS=2 ;;
link) ROUNDS=4 ;;
-h | --help | help) usage; exit ;;
*) usage >&2; exit 2 ;;
esac
FLAGS=("${PLAIN[@]}")  # then those of the command line
shift
while (($#)); do
    [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case $1 in
    --worlds | --rounds | --modes | --price | --tflops)
        (($# > 1)) || die "$1 needs a value"
        declare "$(tr a-z A-Z <<< "${1#--}")=$2"
        shift ;;
    *)
        if [[ $COMMAND == link && $1 != -* && -z $GIVEN ]]; then
            RATES+=("$1")
        else
            FLAGS+=("$1")
            GIVEN+=" $1"
        fi ;;
    esac
    shift
done
[[ $WORLDS =~ ^[1-9][0-9]*(\ [1-9][0-9]*)*$ ]] || die "--worlds '$WORLDS': give ranks, '1 2 4'"
[[ $ROUNDS =~ ^[1-9][0-9]*$ ]] || die "--rounds $ROUNDS: give a number, 1 or more"
[[ $PRICE =~ ^[0-9.]+$ && $TFLOPS =~ ^[1-9][0-9.]*$ ]] || die "--price and --tflops are numbers"
[[ $COMMAND != link || ${#RATES[@]} != 0 ]] || die "link needs rates: 1gbit, 100mbit"
for rate in ${RATES[@]+"${RATES[@]}"}; do
    [[ $rate =~ ^[0-9.]+[kmg]bit$ ]] || die "link $rate: give a rate as 1gbit or 100mbit"
done
case $COMMAND in
modes | link) rows=$(sed -n '/^ORDER/,/]/p' <<< "$REPORT" | tr -dc 'a-z0-9\n -') ;;
*) rows=$TRAIN_MODES ;;
esac
for mode in $MODES; do
    grep -qx -e "$mode" <<< "$(printf '%s\n' $rows)" || die "--modes $mode: there is no such row"
done
[[ ! $COMMAND =~ ^(tune|options|timeline)$ || $WORLDS != *" "* ]] \
    || die "--worlds '$WORLDS': $COMMAND takes one number"
[[ " $GIVEN " != *" --micro_batch_size auto "* ]] || die "--micro_batch_size auto: give a number"
varied=(--mode --global_batch_size)  # by the command itself
[[ $COMMAND != timeline ]] || varied+=(--out_dir --profile)
[[ $COMMAND != tune ]] || varied=(--micro_batch_size --bucket_cap_mb)
[[ $COMMAND != options ]] || varied+=(--activation_checkpointing --compile)
for flag in "${varied[@]}"; do
    [[ " $GIVEN " != *" $flag "* ]] || die "$COMMAND sets $flag itself"
done
[[ -z $GIVEN ]] || python -c 'import sys, train
try:
    train.check(train.parse_args(sys.argv[1:]))
except train.UserError as error:
    sys.exit(f"bench.sh: {error}")' "${SMALL[@]}" "${FLAGS[@]}" || exit 2
trap 'exit 130' INT  # torchrun hears it too, and ends in order: its row would just count as failed
mkdir -p out/bench
rm -f "out/bench/$COMMAND"*
"$COMMAND"
! grep -qs '"failed"' "out/bench/$COMMAND"*.jsonl  # the exit status

"""How long a step takes on W devices, on paper: from one step that was measured, and two links.

    ./bench.sh predict --step_ms 123 --model gpt2 --micro_batch_size 32 --param_bytes 2
    ./bench.sh predict --result out/log --model gpt2     # the last RESULT line of a file

Nothing here has run on more devices than the step that was measured. What is assumed:

  - Weak scaling: each rank computes as long as that one, whatever it sends meanwhile. A third of it
    is the forward, two thirds are the backward. Both divide among units, which are the root and the
    blocks, by their parameters. (The update is in it, whole: a stage needs less.)
  - A rank sends by a link inside its node, of `intra` bytes a second, and by one to other nodes, of
    `inter`: both at once, each as fast however many others send. A collective over W ranks gives
    each of them its part: (W-1)/W of the buffer, over the links on which these ranks are.
  - Each bucket costs latency_s beside that, once for each doubling of W: as in a tree.
  - Collectives follow each other, in the order in which ddp.py and zero.py start them: that is
    `step`. Without overlap computing waits for each of them.
  - Hybrid shards: Zero3 within a node, after which gradients are added over nodes.
  - Memory is that of parameters, gradients and Adam, by the formulas of the ZeRO paper, and of what
    Zero3 has whole: the root and two blocks. Activations come on top.
"""

import contextlib
import dataclasses
import json
import math
import re

import torch

from bench.launch import refuse
from judge.measure import formula_of_bytes
from model import GPT, GPTConfig, PRESETS

MODES = ("ddp", "zero1", "zero2", "zero3", "hybrid")
LOOPBACK = 1e9  # bytes a second that ranks on one CPU exchange, about
BITS = {"k": 1e3, "m": 1e6, "g": 1e9}  # as tc has them


def bytes_per_second(rate: str) -> float:
    """A rate as tc has it, such as 1gbit."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate).groups()
    return float(number) * BITS.get(unit, 1) / 8


@dataclasses.dataclass
class Links:
    node_size: int
    intra: float  # bytes a second of a rank, inside of a node
    inter: float  # to other nodes
    latency_s: float


@dataclasses.dataclass
class Work:
    """What a rank has to do in a step."""
    sizes: list  # parameters of the root, of block 0, of block 1, ...
    compute_s: float
    micro_steps: int = 1
    param_bytes: int = 4  # in which parameters are sent
    reduce_bytes: int = 4  # gradients
    bucket_bytes: int = 25 * 2**20


def sizes_of(gpt: GPT) -> list:
    """-> parameters of the root, of block 0, of block 1 and so on."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in gpt.blocks]
    return [sum(p.numel() for p in gpt.parameters()) - sum(blocks), *blocks]


def transfer_s(n_bytes: float, W: int, work: Work, links: Links, is_over_nodes=False) -> float:
    """Of an all-gather or a reduce-scatter of a unit with so many bytes, over W ranks: those of a
    node first; or, is_over_nodes, one of each node."""
    if W == 1:
        return 0.0
    near = 1 if is_over_nodes else min(W, links.node_size)
    part = n_bytes / W
    seconds = max((near - 1) * part / links.intra, (W - near) * part / links.inter)
    n_buckets = math.ceil(n_bytes / work.bucket_bytes)
    return seconds + n_buckets * math.log2(W) * links.latency_s


class Clock:
    """Computing, and a queue of collectives that goes on meanwhile."""

    def __init__(self, overlap):
        self.overlap = overlap
        self.now_s = 0.0
        self.link_is_free_s = 0.0
        self.exposed_s = 0.0  # in which computing has waited

    def compute(self, seconds):
        self.now_s += seconds

    def start(self, seconds) -> float:
        """-> when this collective has ended."""
        self.link_is_free_s = max(self.link_is_free_s, self.now_s) + seconds
        if not self.overlap:
            self.wait(self.link_is_free_s)
        return self.link_is_free_s

    def wait(self, end_s):
        waited_s = max(0.0, end_s - self.now_s)
        self.exposed_s += waited_s
        self.now_s += waited_s


@dataclasses.dataclass
class Step:
    seconds: float
    exposed_s: float


def step(mode: str, W: int, work: Work, links: Links, overlap: bool = True) -> Step:
    """One step, unit by unit. Unit 0 is the root, first in the forward and last in the backward."""
    clock = Clock(overlap)
    is_sharded = mode in ("zero3", "hybrid")
    group = min(W, links.node_size) if mode == "hybrid" else W  # over which state is sharded
    n_nodes = W // group  # that hold the same, in hybrid
    share = [size / sum(work.sizes) / work.micro_steps for size in work.sizes]
    units = range(len(work.sizes))
    last = units[-1]

    def gather(unit):
        n_bytes = work.sizes[unit] * work.param_bytes
        return clock.start(transfer_s(n_bytes, group, work, links))

    def reduce(unit, is_last):
        n_bytes = work.sizes[unit] * work.reduce_bytes
        seconds = transfer_s(n_bytes, group, work, links)
        if mode == "ddp":
            seconds *= 2  # a reduce-scatter, and an all-gather of the sums
        if n_nodes > 1 and is_last:
            seconds += 2 * transfer_s(n_bytes / group, n_nodes, work, links, is_over_nodes=True)
        return clock.start(seconds)

    for number in range(work.micro_steps):
        is_last = number == work.micro_steps - 1
        sends = is_last or mode not in ("ddp", "zero1")
        here_s = {}  # unit -> when it has been gathered
        if is_sharded:
            here_s[0] = gather(0)
        elif mode != "ddp" and number == 0:  # what the step before has changed
            here_s = {unit: gather(unit) for unit in units}
        for unit in units:
            clock.wait(here_s.get(unit, 0.0))
            if is_sharded and unit < last:
                here_s[unit + 1] = gather(unit + 1)  # the next one, while this one computes
            clock.compute(share[unit] * work.compute_s / 3)
        for unit in reversed(units):
            clock.wait(here_s.get(unit, 0.0))
            if is_sharded and 0 < unit - 1 < last - 1:  # the last two are whole, and so is the root
                here_s[unit - 1] = gather(unit - 1)
            clock.compute(share[unit] * work.compute_s * 2 / 3)
            if sends:
                reduce(unit, is_last)
        clock.wait(clock.link_is_free_s)
    return Step(clock.now_s, clock.exposed_s)


def memory_bytes(mode: str, W: int, work: Work, links: Links) -> float:
    """Of a rank: what the paper's formulas say, and what Zero3 has whole. A mode that sends in 16
    bits keeps fp32 shards, or all of them, beside them."""
    group = min(W, links.node_size) if mode == "hybrid" else W
    stage = "zero3" if mode == "hybrid" else mode
    state = sum(formula_of_bytes(stage, group, work.param_bytes, work.reduce_bytes))
    in_use = 0
    if stage == "zero3":
        blocks = sorted(work.sizes[1:])
        in_use = (work.sizes[0] + sum(blocks[-2:])) * work.param_bytes
    return state * sum(work.sizes) + in_use


def predicted(work: Work, links: Links, modes, worlds, tokens: int, price: float | None) -> list:
    """-> the rows of the table. tokens: of a rank, in a step."""
    rows = []
    for mode in modes:
        for W in worlds:
            if mode == "hybrid" and W % links.node_size > 0:
                continue
            made = step(mode, W, work, links)
            without = step(mode, W, work, links, overlap=False)
            tokens_per_s = W * tokens / made.seconds
            hours = W * 1e9 / tokens_per_s / 3600
            rows.append({
                "mode": mode, "W": W, "step ms": 1e3 * made.seconds,
                "exposed %": 100 * made.exposed_s / made.seconds,
                "efficiency": work.compute_s / made.seconds,
                "without overlap, ms": 1e3 * without.seconds,
                "its efficiency": work.compute_s / without.seconds,
                "tokens/s": tokens_per_s,
                "GB a rank": memory_bytes(mode, W, work, links) / 1e9,
                "hours for 10^9 tokens": hours,
                "$ for 10^9 tokens": hours * (price or math.nan)})
    return rows


# -------------------------------------------------------------------------------------------------
# from options to a table


def table(options):
    """-> rows, columns, what they are made of."""
    if (options.step_ms is None) == (options.result is None):
        refuse("predict needs a step that was measured: --step_ms 123, or --result FILE with a "
               "RESULT line")
    unit_sizes, tokens = None, options.tokens
    step_ms = options.step_ms
    if options.result is not None:
        result = last_result(options.result)
        step_ms = result["step_ms"] - (result.get("comm_exposed_ms") or 0.0)
        unit_sizes = result.get("unit_sizes")
        of_rank = result["tokens_per_sec"] * result["step_ms"] / 1e3 / result["world_size"]
        tokens = tokens or round(of_rank)
    preset = PRESETS[options.model]
    if unit_sizes is None:
        with torch.device("meta"):
            gpt = GPT(GPTConfig(vocab_size=options.vocab_size, **preset))
        unit_sizes = sizes_of(gpt)
    tokens = tokens or preset["block_size"]
    work = Work(unit_sizes, step_ms / 1e3, options.micro_steps, options.param_bytes,
                        options.reduce_bytes or options.param_bytes,
                        round(options.bucket_cap_mb * 2**20))
    links = Links(options.node_size, options.intra * 1e9, options.inter * 1e9,
                          options.latency_us / 1e6)
    worlds = options.worlds or [2**n for n in range(11)]
    rows = predicted(work, links, options.modes or MODES, worlds, tokens,
                             options.price)
    text = (f"On paper: {sum(unit_sizes):,} parameters in {len(unit_sizes) - 1} blocks and a root, "
            f"{tokens:,} tokens a rank, which computes for {step_ms:g} ms. {options.node_size} "
            f"ranks a node, {options.intra:g} GB/s inside of it, {options.inter:g} GB/s between "
            "nodes. bench/predict.py says what is assumed.")
    return rows, list(rows[0]), text


def last_result(path):
    try:
        text = path.read_text()
    except OSError as error:
        refuse(f"--result {path}: {error.strerror}")
    for line in reversed(text.splitlines()):
        start = line.find("{")
        if line.startswith(("RESULT {", "{")):
            with contextlib.suppress(ValueError):
                result = json.loads(line[start:])
                if result.get("step_ms"):
                    return result
    refuse(f"--result {path}: it has no RESULT line of train.py with a step_ms")

"""How long a step takes on W devices, on paper: from one step that was measured, and two links.

    ./bench.sh predict --step_ms 123 --tokens 32768 --model gpt2   # tokens of a rank in that step
    ./bench.sh predict --result out/log --model gpt2               # the last RESULT line of a file

Nothing here has run on more devices than the step that was measured. What is assumed:

  - Weak scaling: each rank computes as long as in that step, whatever it sends meanwhile. A third
    of the time is the forward, two thirds are the backward. Both divide among units, the root and
    the blocks, by their parameters. The update counts as a part of them, and as long in the stages
    as in DDP, although they update less.
  - A rank has a link to the other ranks of its node, of `intra` bytes a second, and one to other
    nodes, of `inter`. It uses both at once. No rank slows another one down.
  - In an all-gather or a reduce-scatter of n bytes it sends n/W to each of the other ranks.
  - A bucket of a unit costs latency_s beside that, once for each doubling of W, as in a tree. How
    many buckets a unit has is n / bucket_bytes here. (Real ones end where a parameter ends.)
  - Collectives follow each other, in the order in which ddp.py and zero.py start them: see `step`.
    Without overlap computing waits for each of them.
  - Hybrid: Zero3 in each node. Sums of gradients are then added over nodes, after each
    reduce-scatter, in the same order.
  - Memory is that of parameters, gradients and Adam, by the formulas of the ZeRO paper, and of what
    Zero3 has whole: the root and two blocks. Activations come on top.
"""

import contextlib
import dataclasses
import json
import math

import torch

from bench.launch import refuse
from judge.measure import formula_of_bytes
from model import GPT, GPTConfig, PRESETS
from runs import count

MODES = ("ddp", "zero1", "zero2", "zero3", "hybrid")
LOOPBACK = 1e9  # bytes a second that ranks on one CPU exchange, about


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


def latency_s(n_bytes: float, W: int, work: Work, links: Links) -> float:
    n_buckets = math.ceil(n_bytes / work.bucket_bytes)
    return n_buckets * math.log2(W) * links.latency_s


def transfer_s(n_bytes: float, W: int, work: Work, links: Links) -> float:
    """Of an all-gather or a reduce-scatter of a unit with so many bytes."""
    part = n_bytes / W
    n_near = min(W, links.node_size) - 1
    n_far = W - 1 - n_near
    seconds = max(n_near * part / links.intra, n_far * part / links.inter)
    return seconds + latency_s(n_bytes, W, work, links)


def over_nodes_s(n_bytes: float, n_nodes: int, work: Work, links: Links) -> float:
    """Of adding up so many bytes over the ranks that have the same shards, one in each node: a
    reduce-scatter and an all-gather."""
    part = n_bytes / n_nodes
    seconds = (n_nodes - 1) * part / links.inter
    return 2 * (seconds + latency_s(n_bytes, n_nodes, work, links))


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


def step(mode: str, W: int, work: Work, links: Links, overlap: bool = True) -> Clock:
    """One step -> the clock at its end. Unit 0 is the root, first in the forward and last in the
    backward."""
    clock = Clock(overlap)
    is_sharded = mode in ("zero3", "hybrid")
    group = min(W, links.node_size) if mode == "hybrid" else W  # over which state is sharded
    share = [size / sum(work.sizes) / work.micro_steps for size in work.sizes]
    units = range(len(work.sizes))
    last = units[-1]

    def gather(unit):
        return clock.start(transfer_s(work.sizes[unit] * work.param_bytes, group, work, links))

    def reduce(unit):
        n_bytes = work.sizes[unit] * work.reduce_bytes
        seconds = transfer_s(n_bytes, group, work, links)
        if mode == "ddp":
            seconds *= 2  # a reduce-scatter, and an all-gather of the sums
        if W > group:
            seconds += over_nodes_s(n_bytes / group, W // group, work, links)
        clock.start(seconds)

    for number in range(work.micro_steps):
        is_last = number == work.micro_steps - 1
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
            is_whole = unit - 1 in (0, last - 1, last)  # the root, and what the forward used last
            if is_sharded and unit > 0 and not is_whole:
                here_s[unit - 1] = gather(unit - 1)
            clock.compute(share[unit] * work.compute_s * 2 / 3)
            if is_last or mode not in ("ddp", "zero1"):  # which add up their own first
                reduce(unit)
        clock.wait(clock.link_is_free_s)
    return clock


def memory_bytes(mode: str, W: int, work: Work, links: Links) -> float:
    """Of a rank: what the paper's formulas say, and what Zero3 has whole."""
    group = min(W, links.node_size) if mode == "hybrid" else W
    stage = "zero3" if mode == "hybrid" else mode
    state = sum(formula_of_bytes(stage, group, work.param_bytes, work.reduce_bytes))
    in_use = 0
    if stage == "zero3":
        blocks = sorted(work.sizes[1:])
        in_use = (work.sizes[0] + sum(blocks[-2:])) * work.param_bytes
    return state * sum(work.sizes) + in_use


def predicted(work: Work, links: Links, mode: str, W: int, tokens: int) -> dict:
    """-> a row of the table. tokens: of a rank, in a step."""
    made = step(mode, W, work, links)
    without = step(mode, W, work, links, overlap=False)
    tokens_per_s = W * tokens / made.now_s
    return {"mode": mode, "W": W, "step ms": 1e3 * made.now_s,
            "exposed %": 100 * made.exposed_s / made.now_s,
            "efficiency": work.compute_s / made.now_s,
            "efficiency without overlap": work.compute_s / without.now_s,
            "tokens/s": tokens_per_s,
            "GB a rank": memory_bytes(mode, W, work, links) / 1e9,
            "device hours for 10^9 tokens": W * 1e9 / tokens_per_s / 3600}


# -------------------------------------------------------------------------------------------------
# from options to a table


def measured_step(options):
    """-> seconds of computing, tokens, sizes of units or None: of the step that was measured."""
    if options.step_ms is not None and options.result is not None:
        refuse("predict takes one step: --step_ms, or --result")
    if options.step_ms is not None:
        if options.tokens is None:
            refuse("--step_ms needs --tokens, of a rank in that step")
        return options.step_ms / 1e3, options.tokens, None
    if options.result is None:
        refuse("predict needs a step that was measured: --step_ms 123, or --result FILE with a "
               "RESULT line")
    result = last_result(options.result)
    W, waited_ms = result["world_size"], result.get("comm_exposed_ms")
    if result.get("shares_device") or (W > 1 and waited_ms is None):
        refuse(f"--result {options.result}: of {W} ranks, whose times of computing are not known: "
               "take one of --mode single")
    compute_ms = result["step_ms"] - (waited_ms or 0.0)
    if compute_ms <= 0:
        refuse(f"--result {options.result}: a step of {result['step_ms']} ms, of which the rank "
               f"waits {waited_ms}")
    tokens = round(result["tokens_per_sec"] * result["step_ms"] / 1e3 / W)
    return compute_ms / 1e3, options.tokens or tokens, result.get("unit_sizes")


def last_result(path):
    """Of a log of train.py, or of results.jsonl in out/bench."""
    try:
        text = path.read_text()
    except OSError as error:
        refuse(f"--result {path}: {error.strerror}")
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            result = json.loads(line.removeprefix("RESULT "))
            names = ("step_ms", "tokens_per_sec", "world_size")
            if isinstance(result, dict) and all(result.get(name) for name in names):
                return result
    refuse(f"--result {path}: it has no RESULT line of a run that has made steps")


def rows_of(options):
    """-> rows of the table, and a text that says what they are made of."""
    compute_s, tokens, sizes = measured_step(options)
    if (options.model is None) == (sizes is None):
        refuse("predict needs --model, of which the step was" if sizes is None else
               f"--result {options.result} says which model it is of: without --model")
    if sizes is None:
        with torch.device("meta"):
            gpt = GPT(GPTConfig(vocab_size=options.vocab_size, **PRESETS[options.model]))
        sizes = sizes_of(gpt)
    work = Work(sizes, compute_s, options.micro_steps, options.param_bytes,
                options.reduce_bytes or options.param_bytes,
                max(1, round(options.bucket_cap_mb * 2**20)))
    links = Links(options.node_size, options.intra * 1e9, options.inter * 1e9,
                  options.latency_us / 1e6)
    rows = []
    for mode in options.modes or MODES:
        for W in options.worlds or [2**n for n in range(11)]:
            if mode == "hybrid" and W % links.node_size > 0:
                continue
            row = predicted(work, links, mode, W, tokens)
            if options.price:
                row["$ for 10^9 tokens"] = row["device hours for 10^9 tokens"] * options.price
            rows.append(row)
    if not rows:
        refuse(f"hybrid is for W that --node_size {links.node_size} divides")
    return rows, (
        f"On paper: {sum(sizes):,} parameters in {count(len(sizes) - 1, 'block')} and a root, "
        f"{tokens:,} tokens a rank, which computes for {1e3 * compute_s:g} ms. "
        f"{count(links.node_size, 'rank')} a node, {options.intra:g} GB/s inside of it, "
        f"{options.inter:g} GB/s between nodes; hybrid is left out where nodes would not be full. "
        "bench/predict.py says what is assumed.")

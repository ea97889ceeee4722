"""The tables of bench.sh that are made of runs of train.py: which runs, and which columns.

A table has a function that plans its runs, and names of columns. A row is a mode of train.py, with
flags of its own; it is the median of its rounds.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Callable

import numpy as np

from bench import predict
from bench.launch import COUNTED, DEEPSPEED, from_rate, refuse, Run
from judge.measure import formula_of_bytes

STAGES = ("zero1", "zero2", "zero3")
DEEPSPEEDS = ("deepspeed1", "deepspeed2", "deepspeed3")
# What does the same in torch.
COUNTERPARTS = {"naive": "torch-ddp", "ddp": "torch-ddp", "zero1": "torch-zero1",
                "zero2": "torch-fsdp-kept", "zero3": "torch-fsdp", "deepspeed1": "torch-zero1",
                "deepspeed2": "torch-fsdp-kept", "deepspeed3": "torch-fsdp"}
# What takes time beside steps is off.
ONLY_STEPS = ("--eval_steps", "0", "--sample_tokens", "0", "--save_interval", "0",
              "--check_interval", "0", "--device", "cpu")
# Until a loss is reached it has to be known.
UNTIL_LOSS = ("--eval_steps", "80", "--eval_interval", "10", "--max_steps", "400")
# Sizes at which communication weighs as much as computing: 31.8M parameters, 64 tokens a rank.
SMALL = ("--n_layer", "10", "--n_head", "8", "--n_embd", "512", "--block_size", "64",
         "--max_steps", "8")
BALANCED = ("--n_layer", "6", "--n_head", "6", "--n_embd", "384", "--block_size", "256",
            "--max_steps", "8")  # 10.7M parameters, 1,024 tokens a rank: bound by computing
HIERARCHICAL = "ddp --comm_hook hierarchical --node_size 2"
OTHER_BYTES = {"--optimizer", "--param_dtype", "--reduce_dtype", "--shard_size", "--offload"}
HOOKS = ("ddp --comm_hook bf16", "ddp --comm_hook powersgd --warmup_steps 0",
         "ddp --comm_hook topk --warmup_steps 0")


# -------------------------------------------------------------------------------------------------
# runs


def plan(options, row, W, sequences, micro_batch=1, flags=(), kind="", rate=None) -> Run:
    """A run in which a step has so many sequences, over all ranks. `single` at W is W processes,
    each with its part."""
    m = options.micro_batch_size or micro_batch
    sequences = sequences * m // micro_batch  # as many micro-steps
    if sequences % (m * W) > 0:
        refuse(f"{row}, W={W}: {sequences} sequences of a step, in micro batches of {m}, do not "
               f"divide among {W} ranks")
    if row.startswith("single"):
        sequences //= W
    until_loss = UNTIL_LOSS if options.until_loss else ()
    words = (*ONLY_STEPS, *flags, *until_loss, *options.flags, "--micro_batch_size", str(m),
             "--global_batch_size", str(sequences), "--mode", *row.split())
    program = DEEPSPEED if row.startswith("deepspeed") else COUNTED
    return Run(row, W, words, kind, rate, program)


def fits(row, W):
    """One process is `single`; the other modes are there at one rank, too."""
    return W == 1 or not row.startswith("single")


def bits(options):
    for W in options.worlds or (1, 2, 3, 4, 6, 12):
        modes = ("single", "naive", "ddp", *STAGES, "torch-ddp", "torch-fsdp")
        for mode in options.modes or modes:
            if fits(mode, W):
                yield plan(options, mode, W, 12, flags=("--max_steps", "20"))


def modes(options):
    rows = ["single", "naive", "torch-ddp", "ddp", "torch-zero1", "zero1", "torch-fsdp-kept",
            "zero2", "torch-fsdp", "zero3"]
    if importlib.util.find_spec("deepspeed") is not None:
        rows += DEEPSPEEDS
    for W in options.worlds or (1, 2, 4):
        for row in options.modes or rows:
            if fits(row, W):
                yield plan(options, row, W, W, flags=SMALL)


def memory(options):
    for W in options.worlds or (1, 2, 4):
        for mode in options.modes or ("ddp", *STAGES):
            yield plan(options, mode, W, W, flags=(*SMALL, "--max_steps", "4"))


def scaling(options):
    for kind in ("weak", "strong"):
        worlds = options.worlds or (1, 2, 4)
        for W in worlds:
            sequences = 4 * (W if kind == "weak" else max(worlds))
            for row in options.modes or ("single", "naive", "ddp", "zero3"):
                yield plan(options, row, W, sequences, 4, BALANCED, kind)


def buckets(options):
    for rate in (None, *options.rates):
        for W in options.worlds or (2,):
            for mode in options.modes or ("ddp", *STAGES, "torch-ddp"):
                for size in (1, 4, 25, 100):
                    row = f"{mode} --bucket_cap_mb {size}"
                    yield plan(options, row, W, W, flags=SMALL, kind=rate or "loopback", rate=rate)


def precisions(options):
    flags = ("--n_layer", "2", "--n_head", "2", "--n_embd", "64", "--block_size", "64",
             "--max_steps", "300", "--eval_steps", "80")
    worlds = options.worlds or (1, 2)
    for W in worlds:
        for mode in options.modes or ("single", "ddp", "zero3", "torch-ddp"):
            variants = ["--dtype fp32", "--dtype bf16", "--dtype fp16"]
            if mode in STAGES:
                variants.append("--param_dtype bf16 --reduce_dtype fp32")
            for variant in variants:
                if (W == 1) == (mode == "single"):
                    yield plan(options, f"{mode} {variant}", W, 4 * max(worlds), 4, flags)


def links(options):
    """The hierarchical hook needs two ranks on each host."""
    if not options.rates:
        refuse("links needs rates of a cable, such as 1gbit")
    rows = ("single", "torch-ddp", "ddp", *HOOKS, *STAGES, "torch-fsdp")
    for rate in options.rates:
        for W in options.worlds or (2, 4):
            hook = (HIERARCHICAL,) if W == 4 else ()
            for row in options.modes or (*rows, *hook):
                yield plan(options, row, W, 4 * W, 4, (*SMALL, "--max_steps", "5"), rate, rate)


# -------------------------------------------------------------------------------------------------
# columns


class Results:
    """{Run: its RESULTs, one a round}."""

    def __init__(self, results, options):
        self.of, self.options = results, options
        self.by_key = {(run.kind, run.row, run.W): run for run in results}

    def median(self, run, name, of_rounds=np.median):
        """nan where there is nothing."""
        numbers = [result.get(name) for result in self.of.get(run, [])]
        numbers = [number for number in numbers if number is not None]
        return float(of_rounds(numbers)) if numbers else math.nan

    def first(self, run, name):
        return self.of[run][0].get(name)

    def time(self, run, name="step_ms", of_rounds=np.median):
        """Ranks that take turns on a device have no times."""
        if run is not None and self.first(run, "shares_device"):
            return math.nan
        return self.median(run, name, of_rounds)

    def other(self, run, mode, W=None):
        """-> the run of another mode with the same flags, or None. A row with buckets or a hook of
        its own has the same work as one without."""
        _, *flags = run.row.split()
        W = W or run.W
        same = self.by_key.get((run.kind, " ".join([mode, *flags]), W))
        if same is None and flags[:1] in (["--bucket_cap_mb"], ["--comm_hook"]):
            same = self.by_key.get((run.kind, mode, W))
        return same

    def hashes(self, run):
        """Of all rounds: one, if they have the same bits."""
        hashes = [(result.get("param_sha256") or "")[:8] for result in self.of[run]]
        return " ".join(dict.fromkeys(hashes))


def columns_of(run, results) -> dict:
    """{column: value} of a row; of all columns that there are."""
    mode, *flags = run.row.split()
    options = results.options
    step_ms, waited_ms = results.time(run), results.time(run, "comm_exposed_ms")
    tokens = results.time(run, "tokens_per_sec")
    if run.is_alone:
        tokens *= run.W  # of all processes
    alone = results.other(run, "single")
    alone_ms = results.time(alone)
    hours = run.W * 1e9 / tokens / 3600
    held = results.first(run, "most_held") or [math.nan] * 3
    row = {
        "kind": run.kind, "mode": mode, "flags": " ".join(flags), "row": run.row, "W": run.W,
        "hash": results.hashes(run),
        "step ms": step_ms,
        "fastest ms": results.time(run, "step_ms", min),
        "tokens/s": tokens,
        "tokens/s a device": tokens / run.W,
        "sequences/s a device": tokens / results.median(run, "block_size") / run.W,
        "efficiency": alone_ms / step_ms,
        "speed": tokens / results.time(results.other(run, mode, W=1), "tokens_per_sec"),
        "MB sent": results.median(run, "sent_bytes") / 1e6,
        "waited ms": waited_ms,
        "waited %": 100 * waited_ms / step_ms,
        "over torch's": step_ms / results.time(results.other(run, COUNTERPARTS.get(mode, ""))),
        "peak MB": results.median(run, "peak_mem_bytes") / 1e6,
        "parameters": held[0], "gradients": held[1], "optimizer": held[2],
        "held at most": sum(held),
        "bytes a parameter": results.median(run, "bytes_per_param"),
        "formula": formula(run),
        "training loss": digits(results.first(run, "train_loss")),
        "validation loss": digits(results.first(run, "val_loss")),
        "skipped steps": sum(entry["skipped"] for entry in results.first(run, "metrics")),
        "device hours for 10^9 tokens": hours,
        "$ for 10^9 tokens": hours * (options.price or math.nan),
        "predicted ms": predicted_ms(run, results, alone_ms),
    }
    row["error %"] = 100 * (row["predicted ms"] / step_ms - 1)
    if "--bucket_cap_mb" in flags:
        row["bucket MB"] = float(flags[1])
    if options.until_loss:
        row |= time_to_loss(results.first(run, "metrics"), options.until_loss)
    return row


def digits(loss):
    """More of them than a cell has: precisions differ in these."""
    return "-" if loss is None else f"{loss:.5f}"


def formula(run):
    """Bytes a parameter of parameters, gradients and Adam, as the ZeRO paper has them; nan for a
    row with flags, which may change them, and for wrappers of others."""
    if OTHER_BYTES & {word.partition("=")[0] for word in run.flags}:
        return math.nan
    mode = {"single": "ddp", "naive": "ddp", "torch-ddp": "ddp"}.get(run.row, run.row)
    W = 1 if run.is_alone else run.W
    return sum(formula_of_bytes(mode, W)) if mode in ("ddp", *STAGES) else math.nan


def time_to_loss(metrics, loss) -> dict:
    """How many steps, and seconds of steps, it took until the validation loss was there."""
    seconds = 0.0
    for entry in metrics:
        seconds += entry["step_ms"] / 1e3
        val_loss = entry.get("val_loss")  # None where it is not finite
        if val_loss is not None and val_loss <= loss:
            return {f"steps to {loss}": entry["step"], f"seconds to {loss}": seconds}
    return {f"steps to {loss}": math.nan, f"seconds to {loss}": math.nan}


def predicted_ms(run, results, alone_ms):
    """Of a run over a cable, by predict.py, from the time of as many processes alone."""
    sizes = results.first(run, "unit_sizes")
    if run.rate is None or run.row not in predict.MODES or math.isnan(alone_ms):
        return math.nan
    n_local = run.W // 2  # ranks of a host share its cable
    links = predict.Links(n_local, intra=predict.LOOPBACK,
                          inter=from_rate(run.rate) / n_local, latency_s=2e-4)
    work = predict.Work(sizes, alone_ms / 1e3)
    return 1e3 * predict.step(run.row, run.W, work, links).now_s


# -------------------------------------------------------------------------------------------------
# tables


@dataclasses.dataclass
class Picture:
    """A panel for each value of the column `panel`. In it a bar for each row, whose numbers of the
    columns y follow each other; or, with x, a line for each value of the column `line`."""
    y: tuple
    panel: str
    x: str | None = None
    line: str = "mode"
    mark: str | None = None  # on a bar


@dataclasses.dataclass
class Table:
    runs: Callable
    columns: str  # separated by commas
    rounds: int = 1
    pivot: bool = False  # modes by W, of the last column
    picture: Picture | None = None


STEPS = ("row, W, step ms, fastest ms, tokens/s, MB sent, waited ms, waited %, over torch's, "
         "efficiency, peak MB, bytes a parameter, formula")
TABLES = {
    "bits": Table(bits, "row, W, hash", pivot=True),
    "modes": Table(modes, STEPS, 3, picture=Picture(("step ms",), "W")),
    "memory": Table(memory, "mode, W, parameters, gradients, optimizer, held at most, "
                    "bytes a parameter, formula, peak MB",
                    picture=Picture(("parameters", "gradients", "optimizer"), "W", mark="formula")),
    "scaling": Table(scaling, "kind, mode, W, step ms, tokens/s, tokens/s a device, "
                     "sequences/s a device, speed, efficiency, waited %, "
                     "device hours for 10^9 tokens", 2, picture=Picture(("speed",), "kind", x="W")),
    "buckets": Table(buckets, "kind, mode, W, bucket MB, step ms, fastest ms, waited ms", 3,
                     picture=Picture(("step ms",), "kind", x="bucket MB")),
    "precisions": Table(precisions, "mode, W, flags, training loss, validation loss, "
                        "skipped steps, step ms, peak MB"),
    "links": Table(links, "kind, row, W, step ms, predicted ms, error %, tokens/s, MB sent, "
                   "waited %, over torch's", 2, picture=Picture(("step ms",), "kind")),
    "cost": Table(modes, "row, W, tokens/s, device hours for 10^9 tokens", 3),
}

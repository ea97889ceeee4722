"""Markdown tables of what bench.sh has run.

A start of bench.sh writes out/bench/COMMAND_DATE.jsonl. Its first line says what was started, where
and when. Each other line is a RESULT of train.py with the label, the row and the W of its run, or
says in "failed" why there is none. The folder COMMAND_DATE has what the runs have left.
"""

import dataclasses
import json
import pathlib

import numpy as np

from bench.timeline import most_held, print_overlap, refuse, ROOT, WHOLE

BENCH = ROOT / "out" / "bench"
# What does the same in torch.
COUNTERPARTS = {"naive": "torch-ddp", "ddp": "torch-ddp", "zero1": "torch-zero1",
                "zero2": "torch-fsdp-kept", "zero3": "torch-fsdp", "deepspeed1": "torch-zero1",
                "deepspeed2": "torch-fsdp-kept", "deepspeed3": "torch-fsdp"}
# Of a start.
FACTS = {"command", "words", "machine", "n_devices", "torch", "commit", "date", "note", "price",
         "epoch_tokens"}
TIMES = ("step_ms", "tokens_per_sec", "comm_exposed_ms", "mfu")  # of a RESULT


# -------------------------------------------------------------------------------------------------
# results


@dataclasses.dataclass
class Results:
    start: dict  # {fact: value}: what was started
    folder: pathlib.Path  # what runs have left: NAME.log, NAME.metrics.jsonl, traces
    runs: dict  # (label, row, W) -> RESULTs, one a round
    failed: list
    labels: list
    rows: list
    worlds: list

    def quartiles(self, key, name):
        """Median, first and third quartile over the rounds; nan where there is nothing."""
        values = [run.get(name) for run in self.runs.get(key, [])]
        numbers = [value for value in values if value is not None]
        if not numbers:
            return [np.nan, np.nan, np.nan]
        return np.quantile(numbers, (0.5, 0.25, 0.75))

    def median(self, key, name):
        return self.quartiles(key, name)[0]

    def speedup(self, key):
        label, row, _ = key
        return self.median(key, "tokens_per_sec") / self.median((label, row, 1), "tokens_per_sec")

    def counterpart(self, key):
        """The same row in torch; without the row's flags where torch's mode did not run with them.
        But a row with another optimizer is compared only with that optimizer."""
        label, row, W = key
        mode, *flags = row.split()
        name = COUNTERPARTS.get(mode, "")
        with_flags = label, " ".join([name, *flags]), W
        if with_flags in self.runs or "--optimizer" in flags:
            return with_flags
        return label, name, W

    def alone(self, key):
        """One process alone, with the row's optimizer."""
        label, row, W = key
        _, *flags = row.split()
        if "--optimizer" in flags:
            return label, " ".join(["single", *flags]), W
        return label, "single", W


    def first(self, key):
        return self.runs[key][0]

    def seconds(self):
        """From the start to the end of its last run."""
        every = [*self.failed]
        for runs in self.runs.values():
            every += runs
        return max([run["after_s"] for run in every], default=0)


def newest(command):
    """-> the file of the last start of a command."""
    paths = sorted(BENCH.glob(f"{command}_*.jsonl"), key=lambda path: path.stem)
    if not paths:
        refuse(f"there is no {BENCH / command}_*.jsonl: run ./bench.sh {command}")
    return paths[-1]


def read_results(path):
    """Results of a file. Ranks that share a device take turns there, so they have no times."""
    try:
        start, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        refuse(f"{path} does not have what bench.sh writes: {error}")
    if not isinstance(start, dict) or not FACTS <= start.keys() or start["command"] not in TABLES:
        refuse(f"{path} does not say in its first line what was started")
    runs = {}
    failed = []
    for number, run in enumerate(lines, start=2):
        if not isinstance(run, dict) or not {"label", "row", "W", "after_s"} <= run.keys():
            refuse(f"{path}: line {number} is no run of bench.sh")
        if "failed" in run:
            failed.append(run)
            continue
        runs.setdefault((run["label"], run["row"], run["W"]), []).append(run)
        if have_shared(run, start):
            run.update(dict.fromkeys(TIMES))
    labels = list(dict.fromkeys(label for label, row, W in runs))
    rows = list(dict.fromkeys(row for label, row, W in runs))
    worlds = sorted({W for label, row, W in runs})
    return Results(start, path.with_suffix(""), runs, failed, labels, rows, worlds)


def have_shared(run, start):
    return start["n_devices"] is not None and run["W"] > start["n_devices"]


# -------------------------------------------------------------------------------------------------
# tables


def cell(value):
    if isinstance(value, (str, int)):
        return str(value)
    if np.isnan(value):
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}"


def print_table(head, lines):
    """Leaves out columns in which there is nothing."""
    texts = [[cell(value) for value in line] for line in lines]
    kept = []
    for place in range(len(head)):
        if any(line[place] != "-" for line in texts):
            kept.append(place)
    for line in [head, ["---"] * len(head), *texts]:
        print("| " + " | ".join(line[place] for place in kept) + " |")
    print()


def print_bits(results):
    """A row with flags of its own is left out: it ends on other bits."""
    columns = []
    for label in results.labels:
        for W in results.worlds:
            columns.append((label, W))
    lines = []
    for row in results.rows:
        if "--" in row:
            continue
        line = [row]
        for label, W in columns:
            runs = results.runs.get((label, row, W))
            line.append(f"`{runs[0]['param_sha256'][:8]}`" if runs else "-")
        lines.append(line)
    head = ["mode"]
    for label, W in columns:
        head.append(f"{label}, W={W}" if label else f"W={W}")
    print_table(head, lines)


def formula(row, W):
    """Bytes a parameter of parameters, gradients and Adam, as the ZeRO paper has them; nan for a
    row with flags, which may change them."""
    whole = WHOLE.get("ddp" if row in ("single", "naive") else row, np.nan)
    return whole + (16 - whole) / W


def print_steps(results):
    """Efficiency is over W processes that do not communicate."""
    head = ["", "mode", "W", "step ms (quartiles)", "tokens/s", "MB sent", "waited ms",
            "computed ms", "waited / computed", "speed over W=1", "efficiency",
            "time over torch's", "peak MB a rank", "MFU %", "bytes a parameter", "formula",
            "device hours per 10^9 tokens", price_of(results.start)]
    lines = []
    for W in results.worlds:
        for key in results.runs:
            if key[2] == W:
                lines.append(line_of_steps(results, key))
    print_table(head, lines)


def line_of_steps(results, key):
    label, row, W = key
    step_ms, low, high = results.quartiles(key, "step_ms")
    waited_ms = results.median(key, "comm_exposed_ms")
    computed_ms = step_ms - waited_ms
    alone_ms = results.median(results.alone(key), "step_ms")
    torchs_ms = results.median(results.counterpart(key), "step_ms")
    hours = device_hours(results, key)
    scatter = f"{cell(step_ms)} ({cell(low)} to {cell(high)})"
    return [
        label or "-", row, W,
        "-" if np.isnan(step_ms) else scatter,
        results.median(key, "tokens_per_sec"),
        results.median(key, "sent_bytes") / 1e6,
        waited_ms,
        computed_ms,
        waited_ms / computed_ms,
        results.speedup(key),
        alone_ms / step_ms,
        step_ms / torchs_ms,
        results.median(key, "peak_mem_bytes") / 1e6,
        results.median(key, "mfu") * 100,
        results.median(key, "bytes_per_param"),
        formula(row, W),
        hours,
        hours * results.start["epoch_tokens"] / 1e9 * (results.start["price"] or np.nan),
    ]


def device_hours(results, key):
    """Of all devices of a run, for 10^9 tokens. Separate processes are a run each."""
    n_devices = results.median(key, "world_size")
    return n_devices * 1e9 / results.median(key, "tokens_per_sec") / 3600


def price_of(start):
    """The name of a column."""
    tokens = start["epoch_tokens"]
    return f"$ for {tokens:,} tokens, at {start['price']} a device hour"


def print_chart(results, label):
    lines = {}
    for row in results.rows:
        if row != "single":
            speeds = [results.speedup((label, row, W)) for W in results.worlds]
            lines[row] = [round(float(speed), 2) for speed in speeds]
    names = ", ".join(lines)
    print("```mermaid")
    print("xychart-beta")
    print(f'    title "{label}: speed over W = 1; bars: W; lines: {names}"')
    print(f'    x-axis "W" {results.worlds}')
    print(f"    bar {results.worlds}")
    for speeds in lines.values():
        print(f"    line {speeds}")
    print("```\n")


def print_memory(results):
    """What a rank holds at most in a step, by its traces; what it holds after a step, by RESULT."""
    lines = []
    for label, row, W in results.runs:
        run = results.first((label, row, W))
        parts = [np.nan] * 3
        trace = results.folder / f"{run['name']}, rank 0.json"
        if trace.exists():
            parts = most_held(trace)
        lines.append([row, W, *parts, sum(parts), run["bytes_per_param"], formula(row, W)])
    print_table(["mode", "W", "parameters", "gradients", "optimizer", "at most, bytes a parameter",
                 "after a step", "formula"], lines)


def print_buckets(results):
    """Median ms of a step; a column for each size of buckets."""
    sizes = sorted({bucket_mb(row) for row in results.rows})
    times = {}  # (label, mode, W) -> {size: ms}
    for label, row, W in results.runs:
        of_mode = times.setdefault((label, row.split()[0], W), {})
        of_mode[bucket_mb(row)] = results.median((label, row, W), "step_ms")
    lines = []
    for (label, mode, W), of_mode in times.items():
        best = min(of_mode, key=of_mode.get)
        cells = [of_mode.get(size, np.nan) for size in sizes]
        lines.append([label, mode, W, *cells, f"{best:g} MB"])
    columns = [f"{size:g} MB: step ms" for size in sizes]
    print_table(["", "mode", "W", *columns, "best"], lines)


def bucket_mb(row):
    _, _, size = row.partition("--bucket_cap_mb ")
    return float(size)


def print_precision(results):
    """Losses of the last step, and how far they are from those of the mode in fp32."""
    lines = []
    for label, row, W in results.runs:
        mode, _, flags = row.partition(" ")
        run = results.first((label, row, W))
        in_fp32 = results.runs.get((label, f"{mode} --dtype fp32", W), [{}])[0]
        line = [mode, W, flags]
        for name in ("train_loss", "val_loss"):
            loss = number(run.get(name))
            over = loss - number(in_fp32.get(name))
            line += [f"{loss:.4f}", "-" if np.isnan(over) else f"{over:+.4f}"]
        lines.append([*line, run.get("skipped_steps", "-")])
    print_table(["mode", "W", "precision", "training loss", "over fp32", "validation loss",
                 "over fp32", "skipped steps"], lines)


def number(value):
    """None, as JSON has what is not finite, is nan."""
    return np.nan if value is None else value


# -------------------------------------------------------------------------------------------------
# all of a file

TABLES = {
    "bits": (print_bits,),
    "modes": (print_steps,),
    "muon": (print_steps,),
    "memory": (print_memory, print_steps),
    "scaling": (print_steps,),
    "link": (print_steps,),
    "buckets": (print_buckets, print_steps),
    "precision": (print_precision, print_steps),
    "gpu": (print_bits, print_steps),
    "timeline": (),
}


def print_head(start, seconds):
    minutes, seconds = divmod(round(seconds), 60)
    print(f"`./bench.sh {start['words']}`: {start['machine']}, torch {start['torch']}, commit "
          f"{start['commit']}, {start['date']}, took {minutes} min {seconds} s\n")


def print_failed(results):
    for run in results.failed:
        print(f"Failed: {run['row']}, W={run['W']} {run['label']}: {run['failed']}\n")


def print_tables(path, changes=()):
    """All that a file has to show. changes: of facts of its start."""
    results = read_results(path)
    results.start.update(changes)
    print_head(results.start, results.seconds())
    if results.start["note"]:
        print(f"{results.start['note']}\n")
    print_failed(results)
    if not results.runs:
        return
    every = [run for runs in results.runs.values() for run in runs]
    if any(have_shared(run, results.start) for run in every):
        print("Ranks that share a device take turns there, so their times say nothing: these are "
              "left out.\n")
    for print_one in TABLES[results.start["command"]]:
        print_one(results)
    if results.start["command"] == "scaling" and 1 in results.worlds:  # what speed is over
        for label in results.labels:
            print_chart(results, label)
    # One rank sends nothing, so these are the traces of all rows with two ranks or more.
    traces = sorted(results.folder.glob("*, rank 1.json"))
    if results.start["command"] == "gpu" and traces:
        print_overlap(traces)

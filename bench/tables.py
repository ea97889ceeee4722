"""What bench.sh asks Python: tables of its runs, and what there is on this machine.

    python bench/tables.py modes           out/bench/modes.jsonl as Markdown tables
    python bench/tables.py ask accelerator kind, backend, number, GB of memory, name of the devices
    python bench/tables.py ask has NAME    exit status 1 where a package is not there
    python bench/tables.py ask flags ... --rows ROW ...
                                           exit status 2, and one line, where train.py refuses them
    python bench/tables.py ask version     torch's

A line of COMMAND.jsonl is a RESULT of train.py with the label, the row and the W of its run, or
says in "failed" why there is none.
"""

import dataclasses
import importlib
import importlib.util
import json
import pathlib
import sys

import numpy as np

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench.timeline import WHOLE

# What does the same in torch.
COUNTERPARTS = {"naive": "torch-ddp", "ddp": "torch-ddp", "zero1": "torch-zero1",
                "zero2": "torch-fsdp-kept", "zero3": "torch-fsdp", "deepspeed1": "torch-zero1",
                "deepspeed2": "torch-fsdp-kept", "deepspeed3": "torch-fsdp"}
TIMES = ("step_ms", "tokens_per_sec", "comm_exposed_ms", "mfu")  # of a RESULT


# -------------------------------------------------------------------------------------------------
# what there is


def print_accelerator():
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        sys.exit(1)
    backend = dist.get_default_backend_for_device(accelerator)
    _, n_bytes = torch.accelerator.get_memory_info()
    name = torch.get_device_module().get_device_name()
    n_devices = torch.accelerator.device_count()
    print(accelerator.type, backend, n_devices, n_bytes // 10**9, name)


def check_flags(flags, rows):
    """End with a line of train.py's if it does not know these flags, or those of a row."""
    train = importlib.import_module("train")
    train.read_flags(flags)
    for row in rows:
        if not row.startswith("deepspeed"):  # no mode of train.py
            train.read_flags([*flags, "--mode", *row.split()])


def answer(question, *words):
    if question == "accelerator":
        print_accelerator()
    if question == "has" and not importlib.util.find_spec(words[0]):
        sys.exit(1)
    if question == "flags":
        place = words.index("--rows")
        check_flags(words[:place], words[place + 1:])
    if question == "version":
        import torch

        print(torch.__version__)


# -------------------------------------------------------------------------------------------------
# tables


@dataclasses.dataclass
class Results:
    runs: dict  # (label, row, W) -> RESULTs, one a round
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


def read_results(path):
    """Results of a file; prints which rows have failed, and which have no times."""
    runs = {}
    have_shared = []
    for line in open(path):
        run = json.loads(line)
        if "failed" in run:
            print(f"Failed: {run['row']}, W={run['W']} {run['label']}: {run['failed']}\n")
        else:
            key = run["label"], run["row"], run["W"]
            runs.setdefault(key, []).append(run)
            if run["W"] > run.get("n_devices", run["W"]):
                have_shared.append(run)
    for run in have_shared:
        run.update(dict.fromkeys(TIMES))
    if have_shared:
        print("Ranks that share a device take turns there, so their times say nothing: these are "
              "left out.\n")
    labels = list(dict.fromkeys(label for label, row, W in runs))
    rows = list(dict.fromkeys(row for label, row, W in runs))
    worlds = sorted({W for label, row, W in runs})
    return Results(runs, labels, rows, worlds)


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
            found = results.runs.get((label, row, W))
            line.append(f"`{found[0]['param_sha256'][:8]}`" if found else "-")
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
    lines = []
    for W in results.worlds:
        for key in results.runs:
            if key[2] != W:
                continue
            label, row, W = key
            step_ms, low, high = results.quartiles(key, "step_ms")
            alone_ms = results.median(results.alone(key), "step_ms")
            torchs_ms = results.median(results.counterpart(key), "step_ms")
            scatter = f"{cell(step_ms)} ({cell(low)} to {cell(high)})"
            lines.append([
                label or "-", row, W,
                "-" if np.isnan(step_ms) else scatter,
                results.median(key, "tokens_per_sec"),
                results.median(key, "comm_exposed_ms"),
                results.speedup(key),
                alone_ms / step_ms,
                step_ms / torchs_ms,
                results.median(key, "peak_mem_bytes") / 1e6,
                results.median(key, "mfu") * 100,
                results.median(key, "bytes_per_param"),
                formula(row, W),
            ])
    print_table(["", "mode", "W", "step ms (quartiles)", "tokens/s", "waited ms", "speed over W=1",
                 "efficiency", "time over torch's", "peak MB a rank", "MFU %",
                 "bytes a parameter", "formula"], lines)


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


def print_tables(command):
    results = read_results(f"out/bench/{command}.jsonl")
    if not results.runs:
        return
    if command in ("bits", "gpu"):
        print_bits(results)
    if command in ("modes", "muon", "memory", "scaling", "link", "gpu"):
        print_steps(results)
    if command == "scaling":
        for label in results.labels:
            print_chart(results, label)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        answer(*sys.argv[2:])
    else:
        print_tables(sys.argv[1])

"""Two runs of train.py beside each other: from which step on they differ, and by how much.

    ./bench.sh compare OUT_DIR_A OUT_DIR_B [--rtol 1e-5 --atol 1e-6]

Of metrics.jsonl: the loss, the norm of the gradients and the norm of the parameters in each step
that both folders have, unrounded. Of the newest checkpoint that both have: all parameters, by the
hash that train.py prints as param_sha256, and element by element. So a run of --mode torch-ddp that
was kept is a reference for later ones.

Without a tolerance losses and parameters have to be equal, and norms up to the order of a float64
sum, a relative 1e-12: it depends on where shards end. With one a number of A is near that of B if
|A - B| <= atol + rtol |B|, and the norm of the parameters if |A - B| <= atol.

The exit status is 0 where all is so, and 1 where something is not. Flags and facts in which the
runs differ are named, and do not count: two modes may have the same bits. It is 2 where nothing can
be compared. No ranks are needed, and one parameter of each is in memory at a time.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
import warnings

import torch
import torch.distributed.checkpoint as dcp

import runs
from bench.launch import refuse
from model import GPT, GPTConfig

NUMBERS = ("loss", "grad_norm", "param_norm")  # of a line of metrics.jsonl
SUM_RTOL = 1e-12  # of two float64 sums of the same numbers
# Flags that change no number of a step.
WITHOUT_EFFECT = ("save_interval", "keep_last", "eval_interval", "eval_steps", "check_interval",
                  "sample_tokens", "log_interval", "tensorboard", "wandb")


@dataclasses.dataclass
class Tolerance:
    rtol: float = 0.0
    atol: float = 0.0

    def of(self, name):
        """-> (rtol, atol) of a number of metrics.jsonl."""
        if name == "param_norm":
            return SUM_RTOL, self.atol
        return max(self.rtol, SUM_RTOL if name == "grad_norm" else 0.0), self.atol


# -------------------------------------------------------------------------------------------------
# metrics


def read_metrics(out_dir) -> dict:
    """-> {step: what metrics.jsonl has of it}."""
    if not out_dir.is_dir():
        refuse(f"{out_dir} is no folder: name two that --out_dir has named")
    path = out_dir / "metrics.jsonl"
    entries = {}
    try:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            for name in ("step", *NUMBERS):
                if name not in entry or not isinstance(entry[name], (int, float, type(None))):
                    refuse(f"{path}: a line has no {name}, so train.py has not written it")
            entries[entry["step"]] = entry
    except OSError as error:
        refuse(f"{path}: {error.strerror}: choose a folder in which train.py has made steps")
    except (ValueError, TypeError) as error:
        refuse(f"{path}: line {len(entries) + 1} is no JSON object: {error}")
    return entries


def distance(a, b):
    """None, as JSON has what is not finite, is at no distance from None alone."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b)


def row_of_numbers(name, steps, entries_a, entries_b, tolerance) -> dict:
    rtol, atol = tolerance.of(name)
    differ = []  # steps in which the numbers are not equal
    too_far = []
    largest = 0.0
    for step in steps:
        a, b = entries_a[step][name], entries_b[step][name]
        gap = distance(a, b)
        if gap > 0:
            differ.append(step)
        if gap > atol + rtol * abs(b or 0.0):
            too_far.append(step)
        largest = max(largest, gap)
    row = {"what": name, "of": runs.count(len(steps), "step"), "differ": len(differ),
           "too far": len(too_far), "largest distance": f"{largest:.3g}", "first": "-", "A": "-",
           "B": "-"}
    shown = too_far or differ
    if shown:
        step = shown[0]
        row |= {"first": f"step {step}", "A": repr(entries_a[step][name]),
                "B": repr(entries_b[step][name])}
    return row


# -------------------------------------------------------------------------------------------------
# checkpoints


def newest_common(out_dir_a, out_dir_b):
    """-> the newest checkpoints of the two folders that are of one step; [] without any."""
    names_b = {folder.name for folder in runs.Folder(out_dir_b).newest_first()}
    for folder in runs.Folder(out_dir_a).newest_first():
        if folder.name in names_b:
            return [folder, out_dir_b / folder.name]
    return []


def read_record(folder):
    """-> what a checkpoint knows beside tensors. Refuses a damaged one."""
    problem = runs.problem_of(folder)
    if problem is not None:
        refuse(f"{folder} {problem}")
    record = json.loads((folder / runs.RECORD).read_text())
    if "flags" not in record or "facts" not in record:
        refuse(f"{folder} was not written by train.py: it has no flags")
    return record


def parameters_of(folder, facts):
    """Yield (name, all of its values), in the order of the GPT."""
    sizes = {}
    for field in dataclasses.fields(GPTConfig):
        if field.name in facts:
            sizes[field.name] = facts[field.name]
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**sizes))
    for name, p in gpt.named_parameters():
        values = {f"model.{name}": torch.empty(p.numel())}
        try:
            dcp.load(values, checkpoint_id=folder, no_dist=True)
        except dcp.CheckpointException as error:
            reason = str(error).strip().splitlines()[-1]
            refuse(f"{folder} has no whole parameter {name}: {reason}")
        yield name, values[f"model.{name}"]


def row_of_parameters(folders, records, tolerance) -> dict:
    """Elements, where the others have steps."""
    digests = hashlib.sha256(), hashlib.sha256()
    n = n_differ = n_too_far = 0
    largest, first = 0.0, "-"
    facts_a, facts_b = records[0]["facts"], records[1]["facts"]
    for (name, a), (name_b, b) in zip(parameters_of(folders[0], facts_a),
                                      parameters_of(folders[1], facts_b)):
        if name != name_b or a.numel() != b.numel():
            refuse(f"{folders[0]} has {name} of {a.numel()}, {folders[1]} has {name_b} of "
                   f"{b.numel()}: these are two models")
        for digest, values in zip(digests, (a, b)):
            digest.update((values + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
        gap = (a.double() - b.double()).abs().nan_to_num(nan=math.inf)
        gap[a.isnan() & b.isnan()] = 0.0
        too_far = gap > tolerance.atol + tolerance.rtol * b.double().abs()
        if too_far.any() and n_too_far == 0:
            first = name
        n += a.numel()
        n_differ += int((gap > 0).sum())
        n_too_far += int(too_far.sum())
        largest = max(largest, gap.max().item())
    return {"what": f"parameters, {folders[0].name}", "of": f"{n:,} elements", "differ": n_differ,
            "too far": n_too_far, "largest distance": f"{largest:.3g}", "first": first,
            "A": digests[0].hexdigest()[:16], "B": digests[1].hexdigest()[:16]}


def different(what, a, b):
    """Lines of what the two runs have with different values."""
    lines = []
    for name in dict.fromkeys([*a, *b]):
        if name not in WITHOUT_EFFECT and a.get(name) != b.get(name):
            lines.append(f"- {what} {name}: {a.get(name)} in A, {b.get(name)} in B")
    return lines


def compare(out_dir_a: str, out_dir_b: str, tolerance: Tolerance):
    """-> rows of a table, a text, whether all is as near as it has to be."""
    # dcp says that it reads without ranks.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    a, b = pathlib.Path(out_dir_a), pathlib.Path(out_dir_b)
    entries_a, entries_b = read_metrics(a), read_metrics(b)
    steps = sorted(entries_a.keys() & entries_b.keys())
    if not steps:
        refuse(f"{a} and {b} have no step in common")
    rows = []
    for name in NUMBERS:
        rows.append(row_of_numbers(name, steps, entries_a, entries_b, tolerance))
    folders = newest_common(a, b)
    lines = ["The folders have no checkpoint of the same step: parameters are not compared."]
    if folders:
        records = [read_record(folder) for folder in folders]
        rows.append(row_of_parameters(folders, records, tolerance))
        ranks = [runs.count(record["world_size"], "rank") for record in records]
        lines = [f"A had {ranks[0]}, B {ranks[1]}."]
        for what in ("facts", "flags"):
            lines += different(what.removesuffix("s"), records[0][what], records[1][what])
    lines.insert(0, f"A has {runs.count(len(entries_a), 'step')}, B {len(entries_b)}.")
    are_near = all(row["too far"] == 0 for row in rows)
    return rows, "\n".join(lines), are_near

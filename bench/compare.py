"""Two runs of train.py beside each other: from which step on they differ, and by how much.

    python bench/compare.py OUT_DIR_A OUT_DIR_B

Of metrics.jsonl it compares the loss, the norm of the gradients and the norm of the parameters in
each step that both folders have. Norms count as equal where they round to the same fp32 number:
they are sums in float64 over shards, so the division into shards shows in their last digits. Of the
newest checkpoint that both have it compares the whole parameters, by the hash that train.py prints
as param_sha256. So a run of --mode torch-ddp that was kept is a reference for later ones. It also
says in which flags and facts the two runs differ, since these may be the reason.

The exit status is 0 where losses, norms and hashes are equal, and 1 where one of them differs.
Flags do not count: two modes may have the same bits. It is 2 where nothing can be compared. No
ranks are needed, and one parameter is in memory at a time.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
import sys
import warnings

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from bench.timeline import refuse
from model import GPT, GPTConfig
from runs import Folder, problem_of, RECORD

NORMS = ("grad_norm", "param_norm")
NUMBERS = ("loss", *NORMS)  # of a line of metrics.jsonl
# Flags that change no number of a step.
WITHOUT_EFFECT = ("save_interval", "keep_last", "eval_interval", "eval_steps", "check_interval",
                  "sample_tokens", "log_interval", "tensorboard", "wandb")


# -------------------------------------------------------------------------------------------------
# metrics


def read_metrics(out_dir):
    """-> {step: what metrics.jsonl has of it}."""
    if not out_dir.is_dir():
        refuse(f"{out_dir} is no folder: name two that --out_dir has named")
    path = out_dir / "metrics.jsonl"
    entries = {}
    try:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            missing = [name for name in ("step", *NUMBERS) if name not in entry]
            if missing:
                refuse(f"{path}: a line has no {missing[0]}, so train.py has not written it")
            entries[entry["step"]] = entry
    except OSError as error:
        refuse(f"{path}: {error.strerror}: choose a folder in which train.py has made steps")
    except (ValueError, TypeError) as error:
        refuse(f"{path}: line {len(entries) + 1} is no JSON object: {error}")
    return entries


@dataclasses.dataclass
class Difference:
    step: int
    a: float
    b: float
    absolute: float
    relative: float


def difference_in(step, name, a, b):
    """-> Difference of a number of two lines, None if there is none. Where a run has null, which
    stands for nan or inf, and the other one a number, the difference is infinite."""
    first, second = a[name], b[name]
    if first == second:
        return None
    is_null = first is None or second is None
    if not is_null and name in NORMS and np.float32(first) == np.float32(second):
        return None
    if is_null:
        return Difference(step, first, second, math.inf, math.inf)
    absolute = abs(first - second)
    return Difference(step, first, second, absolute, absolute / max(abs(first), abs(second)))


def differences_in(name, steps, entries_a, entries_b):
    """-> [Difference] of all these steps in which the number of that name differs."""
    differences = []
    for step in steps:
        difference = difference_in(step, name, entries_a[step], entries_b[step])
        if difference is not None:
            differences.append(difference)
    return differences


def size_of(difference):
    return difference.absolute


def number(value):
    return "null" if value is None else f"{value:.9g}"


def print_metrics(steps, entries_a, entries_b):
    """A table with a row for each number -> whether all are equal."""
    head = ["", "first step that differs", "A", "B", "absolute", "relative", "steps that differ",
            "largest absolute", "in step"]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    are_equal = True
    for name in NUMBERS:
        differences = differences_in(name, steps, entries_a, entries_b)
        cells = ["-"] * 5 + ["0", "-", "-"]
        if differences:
            are_equal = False
            first, largest = differences[0], max(differences, key=size_of)
            cells = [str(first.step), number(first.a), number(first.b), f"{first.absolute:.3g}",
                     f"{first.relative:.3g}", str(len(differences)), f"{largest.absolute:.3g}",
                     str(largest.step)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()
    return are_equal


# -------------------------------------------------------------------------------------------------
# checkpoints


def newest_common(out_dir_a, out_dir_b):
    """-> the newest checkpoints of the two folders that are of one step, None, None without any."""
    names_b = {folder.name for folder in Folder(out_dir_b).newest_first()}
    for folder in Folder(out_dir_a).newest_first():
        if folder.name in names_b:
            return folder, out_dir_b / folder.name
    return None, None


def read_whole_record(folder):
    """-> what a checkpoint's record has. Refuses a damaged checkpoint, and one without what this
    program needs."""
    problem = problem_of(folder)
    if problem is not None:
        refuse(f"{folder} {problem}")
    record = json.loads((folder / RECORD).read_text())
    for name in ("flags", "facts"):
        if name not in record:
            refuse(f"{folder} was written by an earlier version of train.py: it has no {name}")
    # A checkpoint from before that field is of a model without rows that no token uses.
    record["facts"].setdefault("pad_vocab_size_to", 1)
    return record


def plain_gpt(facts):
    """-> the GPT of these facts, without values."""
    sizes = {}
    for field in dataclasses.fields(GPTConfig):
        if field.name in facts:
            sizes[field.name] = facts[field.name]
    with torch.device("meta"):
        return GPT(GPTConfig(**sizes))


def param_sha256(folder, facts):
    """-> the hash that train.py has printed of the parameters in a checkpoint."""
    digest = hashlib.sha256()
    for name, p in plain_gpt(facts).named_parameters():
        key = f"model.{name}"
        values = {key: torch.empty(p.numel())}
        try:
            dcp.load(values, checkpoint_id=folder, no_dist=True)
        except dcp.CheckpointException as error:
            reason = str(error).strip().splitlines()[-1]
            refuse(f"{folder} has no whole parameter {name}: {reason}")
        digest.update((values[key] + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
    return digest.hexdigest()


def print_different(what, a, b):
    """Print which of these, flags or facts, the two runs have with different values."""
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in WITHOUT_EFFECT and a.get(name) != b.get(name):
            print(f"- {what} {name}: {a.get(name)} in A, {b.get(name)} in B")


@dataclasses.dataclass
class Checkpoint:
    folder: pathlib.Path
    record: dict
    param_sha256: str


def read_checkpoint(folder):
    record = read_whole_record(folder)
    return Checkpoint(folder, record, param_sha256(folder, record["facts"]))


def print_checkpoints(a, b):
    """Hashes of two checkpoints, and in what their runs differ."""
    verdict = "equal" if a.param_sha256 == b.param_sha256 else "not equal"
    print(f"Parameters of {a.folder.name} are {verdict}:")
    print(f"- A has param_sha256 {a.param_sha256}")
    print(f"- B has param_sha256 {b.param_sha256}")
    ranks_a, ranks_b = a.record["world_size"], b.record["world_size"]
    print(f"\nThe runs had {ranks_a} and {ranks_b} ranks. Facts and flags that differ and "
          "can change a number:")
    print_different("fact", a.record["facts"], b.record["facts"])
    print_different("flag", a.record["flags"], b.record["flags"])


# -------------------------------------------------------------------------------------------------


def main():
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) != 3:
        refuse("compare takes two folders of train.py: see --help")
    # dcp says that it reads without ranks.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    out_dir_a, out_dir_b = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    entries_a, entries_b = read_metrics(out_dir_a), read_metrics(out_dir_b)
    steps = sorted(entries_a.keys() & entries_b.keys())
    if not steps:
        refuse(f"{out_dir_a} and {out_dir_b} have no step in common")
    folder_a, folder_b = newest_common(out_dir_a, out_dir_b)
    checkpoints = []  # of A and of B, read before anything is printed, as one may be damaged
    if folder_a is not None:
        checkpoints = [read_checkpoint(folder_a), read_checkpoint(folder_b)]

    print(f"A: {out_dir_a}, {len(entries_a)} steps\nB: {out_dir_b}, {len(entries_b)} steps\n"
          f"In common: {len(steps)}, from {steps[0]} to {steps[-1]}\n")
    are_equal = print_metrics(steps, entries_a, entries_b)
    if checkpoints:
        print_checkpoints(*checkpoints)
    else:
        print("The folders have no checkpoint of the same step, so parameters, flags and facts are "
              "not compared.")
    hashes = {checkpoint.param_sha256 for checkpoint in checkpoints}
    return 0 if are_equal and len(hashes) < 2 else 1


if __name__ == "__main__":
    sys.exit(main())

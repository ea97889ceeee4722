"""Ranks that run somebody's code: with a limit of time and of memory, and if one does not come to
an end, where it was."""

import ast
import faulthandler
import json
import linecache
import os
import pathlib
import re
import resource
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import contextmanager

import torch.distributed as dist

import verify
from judge.interfaces import BadFile, ROOT

MEMORY_BYTES = 4 * 2**30  # of a rank


class Raised(Exception):
    """What has become of the first rank that did not come to an end."""

    def __init__(self, rank: int, outcome: str, fact: str, lines: dict[int, list[str]]):
        self.rank = rank
        self.outcome = outcome  # "hung", "crashed", "refused" or "bad file"
        self.fact = fact
        self.lines = lines  # {rank: the file's own lines of where it was, the innermost one last}


def run_guarded(options, W, seconds, check, *arguments):
    """check(*arguments) on W ranks -> [what each has returned]. Raised, if one raises, dies or
    hangs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet():
                return verify.run(W, guarded, folder, seconds - 1, check, *arguments,
                                  kind=options.device, seconds=seconds)
        except verify.Failure as failure:
            text = " ".join(str(failure).split())
        rank, fact = re.fullmatch(r"rank (\d+):? (.*)", text).groups()
        raise became(int(rank), fact, pathlib.Path(folder)) from None


def became(rank, fact, folder):
    """A Raised, from what ranks have left in the folder."""
    lines = {int(file.stem): own_lines(dumped_frames(file)) for file in folder.glob("*.dump")}
    told = folder / f"{rank}.json"
    if told.exists():
        error = json.loads(told.read_text())
        return Raised(rank, error["outcome"], error["fact"],
                      {rank: own_lines(map(tuple, error["frames"]))})
    if fact.startswith("hangs"):
        return Raised(rank, "hung", fact, lines)
    errors = folder / f"{rank}.err"
    says = errors.exists() and re.search(r"what\(\): +(?:\[.*?\] )?(.*)",
                                         errors.read_text(errors="replace"))
    if says:  # of C++
        fact += f": {says[1][:200]}"
    return Raised(rank, "crashed", fact, lines)


@contextmanager
def quiet():
    """No stderr, for this process and those that it starts: gloo writes what follows an error."""
    kept = os.dup(2)
    redirect(2, os.devnull)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def redirect(number, file):
    with open(file, "w") as target:
        os.dup2(target.fileno(), number)


def guarded(folder, seconds, check, *arguments):
    """On a rank. What it prints is not shown. If it raises, it tells in a file; where it is if it
    dies or hangs is in another one."""
    begin = f"{folder}/{dist.get_rank()}"
    if verify.device().type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    redirect(1, os.devnull)  # also what its subprocesses print
    redirect(2, f"{begin}.err")
    warnings.simplefilter("ignore")
    with open(f"{begin}.dump", "w") as dump:
        print(f"{threading.get_ident():x}", file=dump, flush=True)
        faulthandler.enable(dump)  # gloo ends a process by a signal
        faulthandler.dump_traceback_later(seconds, file=dump)
        try:
            return check(*arguments)
        except BaseException as error:
            pathlib.Path(f"{begin}.json").write_text(json.dumps(told_of(error)))
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def told_of(error):
    frames = [(frame.filename, frame.lineno, frame.name)
              for frame in traceback.extract_tb(error.__traceback__)]
    text = " ".join(str(error).split())[:300]
    if isinstance(error, BadFile):
        return dict(outcome="bad file", fact=text, frames=frames)
    outcome = "refused" if is_on_purpose(frames[-1]) else "crashed"
    return dict(outcome=outcome, fact=f"{type(error).__name__}: {text}", frames=frames)


# Of torch, whose own errors are refusals, as those of a library that a file wraps in.
WRAPPERS = "torch/nn/parallel/", "torch/distributed/fsdp/", "torch/distributed/optim/"


def is_on_purpose(frame) -> bool:
    """Whether the innermost line of a traceback is a `raise` or an `assert`, and not one of torch,
    unless it is of a wrapper."""
    file, line, _ = frame
    if any(part in file for part in WRAPPERS):
        return True
    if not is_own(frame):
        return False
    for node in ast.walk(ast.parse(pathlib.Path(file).read_bytes())):
        if isinstance(node, (ast.Raise, ast.Assert)) and node.lineno <= line <= node.end_lineno:
            return True
    return False


def dumped_frames(file) -> list[tuple[str, int, str]]:
    """Of the main thread, as faulthandler has written them, which begins at the innermost one."""
    ident, *threads = re.split(r"^(?:Current t|T)hread 0x", file.read_text(), flags=re.M)
    for thread in threads:
        if int(thread.partition(" ")[0], 16) == int(ident.split()[0], 16):
            found = re.findall(r'File "(.+?)", line (\d+) in (.+)', thread)
            return [(name.encode().decode("unicode_escape"), int(line), function)
                    for name, line, function in reversed(found)]
    return []


def is_own(frame) -> bool:
    """Neither of Python, nor of a package, nor of the judge."""
    path = pathlib.Path(frame[0]).resolve()
    if path.parent == ROOT / "judge" or path == ROOT / "verify.py":
        return False
    is_of_python = path.is_relative_to(sys.base_prefix) and not path.is_relative_to(ROOT)
    return path.is_file() and "site-packages" not in path.parts and not is_of_python


def own_lines(frames) -> list[str]:
    lines = []
    for frame in frames:
        if is_own(frame):
            file, line, function = frame
            linecache.checkcache(file)
            text = linecache.getline(file, line).strip()
            lines.append(f"{pathlib.Path(file).name}:{line} in {function}: {text}")
    return lines

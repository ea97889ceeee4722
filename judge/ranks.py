"""Ranks that run somebody's code: with a limit of time and of memory, and if one does not come to
an end, where it was."""

import faulthandler
import linecache
import os
import pathlib
import re
import resource
import sys
import tempfile
import traceback
import warnings
from contextlib import contextmanager

import torch.distributed as dist

import verify
from judge.interfaces import ROOT

MEMORY_BYTES = 4 * 2**30  # of a rank


def run_guarded(options, W, seconds, check, *arguments):
    """check(*arguments) on W ranks -> [what each has returned]. Raised, if one raises, dies or
    hangs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet():
                return verify.run(W, guarded, folder, seconds - 1, check, *arguments,
                                  kind=options.device, seconds=seconds)
        except verify.Failure as failure:
            line = " ".join(str(failure).split())
        texts = {int(place.name): place.read_text() for place in pathlib.Path(folder).iterdir()
                 if place.name.isdecimal()}
    raise Raised(line, texts)


@contextmanager
def quiet():
    """No stderr, for this process and those that it starts: gloo writes what follows an error."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Raised(Exception):
    """rank: the first that did; fact: in a line; frames: {rank: those of its traceback}"""

    def __init__(self, line, texts):
        rank, fact = re.fullmatch(r"rank (\d+):? (.*)", line).groups()
        self.rank = int(rank)
        self.fact = re.sub(r" \([^()]*:\d+\)$", "", fact)[:300]
        self.frames = {rank: frames_of(text) for rank, text in sorted(texts.items())}
        says = re.search(r"what\(\): +(?:\[.*?\] )?(.*)", texts.get(self.rank, ""))
        if says:  # of C++
            self.fact += f": {says[1][:200]}"

    @property
    def own_lines(self):
        return in_lines(self.frames.get(self.rank, []))


def guarded(folder, seconds, check, *arguments):
    """On a rank. What it writes to stderr, and its traceback, also if it dies or hangs, is in a
    file."""
    if verify.device().type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        os.dup2(file.fileno(), 2)
        warnings.simplefilter("ignore")  # as a script would only print them
        faulthandler.enable(file)  # gloo ends a process by a signal
        faulthandler.dump_traceback_later(seconds, file=file)
        try:
            return check(*arguments)
        except BaseException:
            traceback.print_exc(file=file)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


FRAME = re.compile(r'File "(.+?)", line (\d+),? in (\S+)')


def frames_of(text: str) -> list[tuple[str, int, str]]:
    """(file, line, function) of a traceback, the innermost one last."""
    found = [(file, int(line), function) for file, line, function in FRAME.findall(text)]
    return found[::-1] if "most recent call first" in text else found


def source_of(frame) -> str:
    file, line, _ = frame
    linecache.checkcache(file)
    return linecache.getline(file, line).strip()


def is_own(frame) -> bool:
    """Neither of Python, nor of a package, nor of the judge."""
    path = pathlib.Path(frame[0]).resolve()
    is_of_judge = path.parent == ROOT / "judge" or path == ROOT / "verify.py"
    is_of_python = path.is_relative_to(sys.base_prefix) and not path.is_relative_to(ROOT)
    return path.is_file() and "site-packages" not in path.parts and not (is_of_judge or
                                                                         is_of_python)


def in_lines(frames) -> list[str]:
    return [f"{pathlib.Path(frame[0]).name}:{frame[1]} in {frame[2]}: {source_of(frame)}"
            for frame in frames if is_own(frame)]


# Of torch, whose own errors are refusals, as those of a library that a file wraps in.
WRAPPERS = "torch/nn/parallel/", "torch/distributed/fsdp/", "torch/distributed/optim/"


def is_refusal(frames) -> bool:
    """Whether somebody has raised on purpose: the innermost line says so, or it is of a wrapper."""
    if not frames:
        return False
    innermost = frames[-1]
    if any(part in innermost[0] for part in WRAPPERS):
        return True
    return is_own(innermost) and bool(re.search(r"\b(raise|assert)\b", source_of(innermost)))

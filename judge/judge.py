"""The command: what is asked of a file, the table, and the report. `python -m judge mine.py`

A cell of the table is a case on W ranks: processes of their own, which have a limit of time and of
memory. `python verify.py --module own.py` asks the other question, of a module in our wrappers.
"""

import argparse
import dataclasses
import faulthandler
import json
import linecache
import os
import pathlib
import re
import resource
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist

import oracle
import verify
from judge import mistakes, modules
from judge.interfaces import look_at, ROOT
from judge.measure import (formula_of_bytes, formula_of_traffic, measured, MICRO_STEPS, PAPER,
                           stage_of)
from judge.script import write_script
from judge.training import Case, judged

MEMORY_BYTES = 4 * 2**30  # of a rank
LONGEST_S = 20  # a collective that waits longer raises, and does not hang
RIGHT = "same bits", "close"
BAD = "wrong", "hung", "crashed"
WORDS = {"same bits": "bits", "close": "close", "wrong": "WRONG", "hung": "HUNG",
         "crashed": "CRASHED", "refused": "refused", "not tried": "-"}
MOST_HUNG = 2  # of a property: then its other cells are not tried

PLAIN = Case(modules.Plain)
FROZEN = Case(modules.Frozen)
BUFFERS = Case(modules.Buffers)
TWO_STEPS = Case(modules.Plain, micro_steps=2)
# (property, case, a simpler case that has to be right at this W; or else this one tells nothing)
LINES = [("mean", PLAIN, None),
         ("frozen", FROZEN, None),
         ("start", Case(modules.Plain, other="parameters"), None),
         ("start", Case(modules.Frozen, other="parameters"), FROZEN),
         ("accumulation", TWO_STEPS, None),
         ("tied", Case(modules.Tied), None),
         ("tied", Case(modules.Tied, micro_steps=2), TWO_STEPS),
         ("unused", Case(modules.Never), None),
         ("unused", Case(modules.Sometimes), None),
         ("unused", Case(modules.Sometimes, micro_steps=2), TWO_STEPS),
         ("buffers", BUFFERS, None),
         ("buffers", Case(modules.Buffers, other="buffers"), BUFFERS),
         ("shapes", Case(modules.Shapes), None),
         ("shapes", Case(modules.One), None),
         ("reused", Case(modules.Reused), None),
         ("order", Case(modules.Ordered), None),
         ("optimizer", Case(modules.Plain, optimizer="AdamW"), PLAIN),
         ("optimizer", Case(modules.Plain, loop="scheduled"), PLAIN),
         ("groups", Case(modules.Plain, loop="groups"), PLAIN),
         ("validation", Case(modules.Plain, loop="validated"), PLAIN),
         ("clipping", Case(modules.Plain, loop="clipped"), PLAIN)]
OF_CS336 = "cs336_basics", Case(modules.CS336), None
BASE = "mean", "any W"  # the others build on it
MEASURED = "held", "sent", "overlap"


@dataclasses.dataclass
class Cell:
    property: str
    case: str
    W: int
    outcome: str
    fact: str = ""
    mistake: str = ""
    chapter: str = ""
    step: int = 0
    ranks: list[int] = dataclasses.field(default_factory=list)
    tensor: str = ""
    lines: list[str] = dataclasses.field(default_factory=list)  # of the file: where it was
    seconds: float = 0

    def __str__(self):
        """What is wrong, in a line."""
        parts = [f"{self.case}, W={self.W}"]
        if self.step or self.tensor:
            ranks = ", ".join(map(str, self.ranks))
            parts.append(f"step {self.step}, rank{'s' * (len(self.ranks) > 1)} {ranks}, "
                         f"{self.tensor}")
        parts += [part for part in (self.fact, self.mistake) if part]
        return ": ".join(parts)


# -------------------------------------------------------------------------------------------------
# a rank


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
    path = pathlib.Path(frame[0])
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


# -------------------------------------------------------------------------------------------------
# a file


class CannotJudge(Exception):
    """Why nothing can be said of a file."""


class Trial:
    """One interface of a file, tried in all lines."""

    def __init__(self, options, name, not_asked, has_cs336):
        self.options, self.file, self.worlds = options, options.file, options.worlds
        self.name, self.not_asked = name, not_asked
        self.lines = [line for line in LINES if line[0] not in not_asked]
        if has_cs336:
            self.lines.append(OF_CS336)
        several = [W for W in self.worlds if W > 1]
        self.simplest_W = min(several, default=1)
        self.cells = []
        self.facts = {}  # of MEASURED: {property: (verdict, reason)}
        self.n_hung = Counter()
        self.seconds = 0

    @property
    def first_fault(self):
        return next((cell for cell in self.cells if cell.outcome in BAD), None)

    @property
    def verdict(self):
        """"wrong", "refused": not even the simplest row, or "right": all that it does not refuse"""
        if self.first_fault is not None or "wrong" in {verdict for verdict, _ in
                                                       self.facts.values()}:
            return "wrong"
        of_mean = {cell.outcome for cell in self.cells if cell.property == "mean"}
        return "refused" if of_mean == {"refused"} else "right"

    def case_of(self, cell):
        [case] = {case for _, case, _ in self.lines if str(case) == cell.case}
        return case

    def run(self):
        """All cells, a line for each case, as they come."""
        start_s = time.monotonic()
        columns = "".join(f"{f'W={W}':>9}" for W in self.worlds)
        print(f"\n{self.name}\n\n{'':14}{'':30}{columns}")
        last = None
        for name, case, needed in self.lines:
            if all(self.reason_not_to_try(name, case, needed, W) for W in self.worlds):
                continue
            print(f"{name if name != last else '':14}{case!s:30}", end="", flush=True)
            last = name
            for W in self.worlds:
                cell = self.cell(name, case, needed, W)
                self.cells.append(cell)
                print(f"{WORDS[cell.outcome]:>9}", end="", flush=True)
            print()
        self.measure()
        self.seconds = time.monotonic() - start_s

    def cell(self, name, case, needed, W):
        if name == "mean" and W > self.simplest_W:
            name = "any W"
        cell = Cell(name, str(case), W, "not tried")
        cell.fact = self.reason_not_to_try(name, case, needed, W)
        if cell.fact:
            return cell
        start_s = time.monotonic()
        try:
            answers = run_guarded(self.options, W, self.options.seconds, judged, self.file,
                                  self.name, case)
        except Raised as raised:
            self.note(cell, raised)
        else:
            order = ("wrong", "close", "same bits")
            badness = [(order.index(answer["outcome"]), answer["step"]) for answer in answers]
            cell.ranks = [rank for rank in range(W) if badness[rank] == min(badness)]
            # The last of them: rank 0 sees less, where all have what it has.
            for key, value in answers[cell.ranks[-1]].items():
                setattr(cell, key, value)
        cell.seconds = time.monotonic() - start_s
        if cell.outcome == "hung":
            self.n_hung[name] += 1
        return cell

    def reason_not_to_try(self, name, case, needed, W):
        for kinds in ([name], BASE):
            if sum(self.n_hung[kind] for kind in kinds) >= MOST_HUNG:
                return f"{MOST_HUNG} rows of {' and '.join(kinds)} hang"
        if case.other and W == 1:
            return "one rank has no other values"
        if case is not PLAIN and self.outcome_of(PLAIN, W) in ("hung", "crashed", "refused"):
            return f"Plain: {self.outcome_of(PLAIN, W)}"
        if needed is not None and self.outcome_of(needed, W) not in RIGHT:
            return f"{needed} is not right"
        return ""

    def outcome_of(self, case, W):
        for cell in self.cells:
            if (cell.case, cell.W) == (str(case), W):
                return cell.outcome
        return "not tried"

    def note(self, cell, raised):
        """A cell in which ranks have not come to an end."""
        is_bad_file = raised.fact.startswith("BadFile: ")
        fact = raised.fact.removeprefix("BadFile: ")
        if is_bad_file and not any(each.outcome in RIGHT for each in self.cells):
            raise CannotJudge(fact)
        cell.fact, cell.ranks, cell.lines = fact, [raised.rank], raised.own_lines
        if is_bad_file:
            cell.outcome = "wrong"
        elif raised.fact.startswith("hangs: "):
            cell.outcome = "hung"
            cell.ranks = list(raised.frames)
            cell.lines = []
            for rank, frames in raised.frames.items():
                lines = in_lines(frames)
                place = f"at {lines[-1]}" if lines else "not in this file: it has gone on, or waits"
                cell.lines.append(f"rank {rank} is {place}")
        else:
            is_refused = is_refusal(raised.frames.get(raised.rank, []))
            cell.outcome = "refused" if is_refused else "crashed"
        is_left = re.search("Connection (closed|reset) by peer", fact) is not None
        if is_left:
            cell.fact = "it waits for a rank that has come to its end"
        is_alone = self.outcome_of(PLAIN, cell.W) in RIGHT and cell.property in ("unused", "order")
        if cell.outcome in BAD and (is_left or is_alone):
            cell.mistake, cell.chapter = mistakes.LEFT_OUT

    # ---------------------------------------------------------------------------------------------
    # what it is

    def measure(self):
        """What a rank holds and sends, beside the formulas of the ZeRO paper."""
        for name in MEASURED:
            self.facts[name] = "not tried", "mean is not right"
        worlds = [W for W in self.worlds if W in (2, 4)] or [self.simplest_W]
        for W in worlds:
            if self.outcome_of(PLAIN, W) not in RIGHT or W == 1:
                continue
            try:
                answers = run_guarded(self.options, W, self.options.seconds, measured, self.file,
                                      self.name)
            except Raised as raised:
                for name in MEASURED:
                    self.facts[name] = "not measured", f"W={W}, rank {raised.rank}: {raised.fact}"
            else:
                self.facts.update(in_words(answers, W, self.options.stage))


def in_words(answers, W, claimed):
    """{property: (verdict, what it is)} of what `measured` has returned on each rank. claimed: a
    stage, or None, and then nothing is right or wrong."""
    held, peak, later_peak = [max(answer[what][n] for answer in answers) for what, n in (
        ("held", 1), ("peak", 1), ("peak", MICRO_STEPS))]
    stage, more = stage_of(held, W)
    text = (f"W={W}: {held:.1f} bytes a parameter between backward and step, as {PAPER[stage]}"
            f"{f' and {more:.1f} more' if more else ''}; at most {peak:.1f} (with {MICRO_STEPS} "
            f"micro-steps {later_peak:.1f})")
    verdict = "measured"
    if claimed is not None:
        verdict = "right" if held <= 1.05 * sum(formula_of_bytes(claimed, W)) else "wrong"
        text += f"; {PAPER[claimed]} holds {sum(formula_of_bytes(claimed, W)):.1f}"
    facts = dict(held=(verdict, text))
    # In (W - 1)/W Psi elements, the mean over ranks.
    once, often = [sum(answer["sent"][n] for answer in answers) / (W - 1) for n in (1, MICRO_STEPS)]
    uncounted = [answer["uncounted"] for answer in answers if answer["uncounted"]]
    if uncounted or once == 0:
        reason = uncounted[0] if uncounted else "nothing was sent by torch.distributed"
        facts["sent"] = facts["overlap"] = "not measured", f"W={W}: {reason}"
        return facts
    stage = claimed or stage
    needed = [formula_of_traffic(stage, n) for n in (1, MICRO_STEPS)]
    is_more = once > 1.05 * needed[0] or often > 1.05 * needed[1]
    text = (f"W={W}: {once:.2f} (W-1)/W Psi elements a step (with {MICRO_STEPS} micro-steps "
            f"{often:.2f}); {PAPER[stage]} needs {needed[0]} ({needed[1]})")
    if is_more:
        text += ", so it is more than it has to be"
    verdict = "measured"
    if claimed is not None:
        verdict = "wrong" if is_more else "right"
    facts["sent"] = verdict, text
    started = min(answer["started"] for answer in answers)
    waited = min(answer["waited"] for answer in answers)
    facts["overlap"] = "measured", (
        f"W={W}: " + ("yes" if started > waited else "no") +
        f": when a backward comes to the last of 8 layers, {started} collectives have begun, and "
        f"{waited} were waited for")
    return facts


# -------------------------------------------------------------------------------------------------
# the report


def verdicts_of(trial) -> dict[str, tuple[str, str]]:
    """{property: (the verdict on it, the reason)}"""
    verdicts = {cell.property: verdict_of(trial, cell.property) for cell in trial.cells}
    for name, case, needed in trial.lines:
        reason = trial.reason_not_to_try(name, case, needed, trial.worlds[-1])
        verdicts.setdefault(name, ("not tried", reason))
    verdicts |= trial.facts
    for name, reason in trial.not_asked.items():
        verdicts[name] = "not asked", reason
    return verdicts


def verdict_of(trial, name):
    cells = [cell for cell in trial.cells if cell.property == name]
    bad = [cell for cell in cells if cell.outcome in BAD]
    if bad and name not in BASE:
        # A factor that is wrong everywhere is one mistake, and not one of each property.
        known = [cell.mistake for cell in trial.cells if cell.property in BASE and cell.mistake]
        bad = [cell for cell in bad if trial.outcome_of(PLAIN, cell.W) in RIGHT or
               cell.mistake and not any(mistake in cell.mistake for mistake in known)]
        if not bad:
            return "as mean", "no other mistake than there"
    refused = [cell for cell in cells if cell.outcome == "refused"]
    for cell in (*bad, *refused):
        return cell.outcome, str(cell)
    right = [cell for cell in cells if cell.outcome in RIGHT]
    if not right:
        return "not tried", cells[-1].fact
    close = [cell for cell in right if cell.outcome == "close"]
    if close:
        return "right", f"{len(right) - len(close)} cells have the bits, {len(close)} are close"
    return "right", f"all of {len(right)} cells have the bits"


def print_report(trial, verdicts, script):
    first = trial.first_fault
    if first is not None:
        print("\nThe first fault\n")
        print_wrapped("  ", str(first))
        for line in first.lines:
            print(f"    {line}")
        if script is not None:
            print(f"  The smallest script that shows it: python {script}")
        if first.chapter:
            print(f"  What it is about: docs/course.md, {first.chapter}")
    print("\nProperty by property\n")
    for name, (verdict, reason) in verdicts.items():
        print_wrapped(f"  {name:14}{verdict:14}", reason)
    counts = Counter(verdict for verdict, _ in verdicts.values())
    counts = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    print(f"\n{trial.name} is {trial.verdict.upper()}: of {len(verdicts)} properties {counts}. "
          f"{trial.seconds:.0f} s")


def print_wrapped(begin, text):
    print(textwrap.fill(text, 100, initial_indent=begin, subsequent_indent=" " * len(begin),
                        break_long_words=False))


def as_data(trial, verdicts, script):
    """What --json writes of an interface."""
    first = trial.first_fault
    return dict(interface=trial.name, verdict=trial.verdict, seconds=round(trial.seconds, 1),
                properties={name: dict(verdict=verdict, reason=reason)
                            for name, (verdict, reason) in verdicts.items()},
                first_fault=None if first is None else dataclasses.asdict(first), script=script,
                cells=[dataclasses.asdict(cell) for cell in trial.cells])


# -------------------------------------------------------------------------------------------------
# the command


def parsed(words):
    parser = argparse.ArgumentParser(prog="judge", description="Is your data parallelism right?")
    parser.add_argument("file", metavar="mine.py", help="see judge/README.md for what it has")
    parser.add_argument("--quick", action="store_true", help="two and three ranks alone")
    parser.add_argument("--worlds", metavar="W,W", default="", help="numbers of ranks [1,2,3,4]")
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")
    parser.add_argument("--leave_out", metavar="NAME,NAME", default="",
                        help="properties that are not asked, such as unused,order")
    parser.add_argument("--stage", choices=PAPER, help="what it has to hold and to send at most")
    parser.add_argument("--seconds", type=int, default=10,
                        help=f"a row that takes longer hangs, at most {LONGEST_S} [10]")
    parser.add_argument("--device", metavar="KIND", default="cpu",
                        help="cpu, or an accelerator, such as cuda: ranks share it [cpu]")
    options = parser.parse_args(words)
    worlds = options.worlds or ("2,3" if options.quick else "1,2,3,4")
    if not re.fullmatch(r"[1-9](,[1-9])*", worlds):
        parser.error(f"--worlds {worlds}: numbers from 1 to 9, such as 2,3")
    options.worlds = sorted(set(map(int, worlds.split(","))))
    known = {name for name, _, _ in LINES}
    for name in options.leave_out.split(",") if options.leave_out else []:
        if name not in known - {"mean"}:
            parser.error(f"--leave_out {name}: choose from {', '.join(sorted(known - {'mean'}))}")
    if not 2 <= options.seconds <= LONGEST_S:
        parser.error(f"--seconds {options.seconds}: from 2 to {LONGEST_S}")
    kinds = ["cpu"]
    if options.device != "cpu":
        [kinds] = verify.run(1, oracle.kinds_of_devices)  # this process must not use one
    if options.device not in kinds:
        parser.error(f"--device {options.device} is not on this machine: choose "
                     f"{' or '.join(kinds)}")
    return options


def main(words=None) -> int:
    """0: all that is asked is right; 1: something is wrong; 2: the file cannot be judged."""
    options = parsed(words)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # ranks end, too
    try:
        trials = judge(options)
    except CannotJudge as reason:
        print(f"judge: {options.file}: {reason}", file=sys.stderr)
        return 2
    verdicts = {trial.verdict for trial in trials}
    return 1 if "wrong" in verdicts else 2 if "refused" in verdicts else 0


def judge(options) -> list[Trial]:
    if not pathlib.Path(options.file).is_file():
        raise CannotJudge("there is no such file")
    print("Each row runs in processes of its own, with a limit of time and memory. This is no "
          "sandbox: a file can do what you can do.")
    try:
        [look] = run_guarded(options, 1, LONGEST_S, look_at, options.file)
    except Raised as raised:
        where = f" ({raised.own_lines[-1]})" if raised.own_lines else ""
        raise CannotJudge(raised.fact.removeprefix("BadFile: ") + where) from None
    found, has_cs336, first_line = look
    if first_line:
        print(f"What the file prints is not shown, such as: {first_line}")
    report = []
    trials = []
    for name, is_written, not_asked, functions in found:
        if not is_written:
            print(f"\n{name} is not written: it raises NotImplementedError")
            continue
        left_out = [each for each in options.leave_out.split(",") if each]
        not_asked |= dict.fromkeys(left_out, "left out")
        trial = Trial(options, name, not_asked, has_cs336)
        trials.append(trial)
        trial.run()
        script = None
        if trial.first_fault is not None:
            script = write_script(options.file, name, functions, trial.first_fault,
                                  trial.case_of(trial.first_fault))
        verdicts = verdicts_of(trial)
        print_report(trial, verdicts, script)
        report.append(as_data(trial, verdicts, script))
        if options.json is not None:
            data = dict(file=options.file, torch=torch.__version__, interfaces=report)
            pathlib.Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    if not trials:
        raise CannotJudge("nothing in it is written")
    return trials

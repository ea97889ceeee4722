"""The report, and the command. `python -m judge mine.py`

`python verify.py --module own.py` asks the other question, of a module in our wrappers.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import signal
import sys
import textwrap
from collections import Counter

import torch

import oracle
import verify
from judge.interfaces import look_at
from judge.measure import PAPER
from judge.ranks import Raised, run_guarded
from judge.script import write_script
from judge.trial import BAD, BASE, CannotJudge, LINES, PLAIN, RIGHT, Trial

LONGEST_S = 20  # a collective that waits longer raises, and does not hang


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
    n_close = sum(cell.outcome == "close" for cell in right)
    return "right", f"bits in {len(right) - n_close}" + (f", close in {n_close}" if n_close else "")


def print_report(trial, verdicts, script):
    first = trial.first_fault
    for name, (verdict, reason) in trial.facts.items():
        if first is None and verdict == "wrong":  # it does more than --stage allows
            print_wrapped("\nThe first fault\n\n  ", f"{name}: {reason}")
            break
    if first is not None:
        print("\nThe first fault\n")
        print_wrapped("  ", str(first))
        if len(first.tensors) > 1:
            more = f" and {len(first.tensors) - 5} more" if len(first.tensors) > 5 else ""
            print_wrapped("  Wrong are ", ", ".join(first.tensors[:5]) + more)
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

"""The report, and the command. `python -m judge mine.py`

`python verify.py --module own.py` asks the other question, of a module in our wrappers.
"""

import argparse
import dataclasses
import json
import os
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
from judge.trial import BAD, BASE, CannotJudge, LINES, OF_CS336, PLAIN, RIGHT, Trial

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
        bad = [cell for cell in bad if is_of_its_own(trial, cell)]
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


def is_of_its_own(trial, cell):
    """A factor that is wrong everywhere is one mistake, and not one of each property."""
    if trial.outcome_of(PLAIN, cell.W) in RIGHT:
        return True
    known = [base.mistake for base in trial.cells if base.property in BASE and base.mistake]
    is_known = any(mistake in cell.mistake for mistake in known)
    return bool(cell.mistake) and not is_known


def print_report(trial, verdicts, script):
    first = trial.first_fault
    if first is None and trial.misses_its_stage:
        name = next(name for name, (verdict, _) in trial.facts.items() if verdict != "right")
        print("\nThe first fault\n")
        print_wrapped("  ", f"{name}: {verdicts[name][1]}")
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
    if trial.why_not_judged:
        print_wrapped("  ", trial.why_not_judged)


def print_wrapped(begin, text):
    print(textwrap.fill(text, 100, initial_indent=begin, subsequent_indent=" " * len(begin),
                        break_long_words=False))


def as_data(trial, verdicts, script):
    """What --json writes of an interface."""
    first = trial.first_fault
    return dict(interface=trial.name, verdict=trial.verdict, seconds=round(trial.seconds, 1),
                why_not_judged=trial.why_not_judged,
                properties={name: dict(verdict=verdict, reason=reason)
                            for name, (verdict, reason) in verdicts.items()},
                first_fault=None if first is None else dataclasses.asdict(first), script=script,
                cells=[dataclasses.asdict(cell) for cell in trial.cells])


# -------------------------------------------------------------------------------------------------
# the command


def parsed(words):
    parser = argparse.ArgumentParser(prog="python -m judge",
                                     description="Is your data parallelism right?")
    parser.add_argument("file", metavar="mine.py", help="see judge/README.md for what it has")
    parser.add_argument("--quick", action="store_true", help="two and three ranks alone")
    parser.add_argument("--worlds", metavar="W,W", default="", help="numbers of ranks [1,2,3,4]")
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")
    parser.add_argument("--leave_out", metavar="NAME,NAME", default="",
                        help="properties that are not asked, such as unused,order")
    parser.add_argument("--stage", choices=PAPER, help="what it has to hold and to send at most")
    parser.add_argument("--seconds", type=int,
                        help=f"a row that takes longer hangs, at most {LONGEST_S} [10; --quick: 5]")
    parser.add_argument("--device", metavar="KIND", default="cpu",
                        help="cpu, or an accelerator, such as cuda: ranks share it [cpu]")
    options = parser.parse_args(words)
    if options.quick and options.worlds:
        parser.error("--quick and --worlds: choose one")
    if options.json is not None:
        try:
            open(options.json, "a").close()
        except OSError as error:
            parser.error(f"--json {options.json}: {error.strerror}")
    worlds = options.worlds or ("2,3" if options.quick else "1,2,3,4")
    if not re.fullmatch(r"[1-9](,[1-9])*", worlds):
        parser.error(f"--worlds {worlds}: numbers from 1 to 9, such as 2,3")
    options.worlds = sorted(set(map(int, worlds.split(","))))
    options.leave_out = [name.strip() for name in options.leave_out.split(",") if name.strip()]
    known = {name for name, _, _ in (*LINES, OF_CS336)} - {"mean"}
    for name in options.leave_out:
        if name not in known:
            parser.error(f"--leave_out {name}: choose from {', '.join(sorted(known))}")
    if options.seconds is None:
        options.seconds = 5 if options.quick else 10
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # ranks end, too
    sys.stdout.reconfigure(errors="backslashreplace")
    options = parsed(words)
    try:
        trials = judge(options)
    except CannotJudge as reason:
        print(f"judge: {options.file}: {reason}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    verdicts = {trial.verdict for trial in trials}
    return 1 if "wrong" in verdicts else 0 if verdicts == {"right"} else 2


def judge(options) -> list[Trial]:
    if not pathlib.Path(options.file).is_file():
        raise CannotJudge("there is no such file")
    print("Each row runs in processes of its own, with a limit of time and memory. This is no "
          "sandbox: a file can do what you can do.")
    try:
        [(found, has_cs336)] = run_guarded(options, 1, LONGEST_S, look_at, options.file)
    except Raised as raised:
        where = "".join(f" ({line})" for line in raised.lines.get(0, [])[-1:])
        raise CannotJudge(raised.fact + where) from None
    report = []
    trials = []
    for interface in found:
        if not interface.is_written:
            print(f"\n{interface.name} is not written: it raises NotImplementedError")
            report.append(dict(interface=interface.name, verdict="not written"))
            continue
        not_asked = interface.not_asked | dict.fromkeys(options.leave_out, "left out")
        trial = Trial(options, interface.name, not_asked, has_cs336)
        trials.append(trial)
        trial.run()
        script = script_of(options, interface, trial)
        verdicts = verdicts_of(trial)
        print_report(trial, verdicts, script)
        report.append(as_data(trial, verdicts, script))
    if len(found) > 1:
        print(f"\n{options.file}: " + ", ".join(f"{trial.name} {trial.verdict.upper()}"
                                                for trial in trials))
    if options.json is not None:
        data = dict(file=options.file, torch=torch.__version__, interfaces=report)
        pathlib.Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    if all(trial.verdict in ("not judged", "refused") for trial in trials):
        reasons = [trial.why_not_judged or str(trial.cells[0]) for trial in trials]
        raise CannotJudge("; ".join(reasons) or "nothing in it is written")
    return trials


def script_of(options, interface, trial):
    """-> the name of the script that shows the first fault, or None"""
    first = trial.first_fault
    if first is None:
        return None
    try:
        return write_script(options.file, interface.name, interface.functions, first,
                            trial.case_of(first))
    except OSError as error:
        print(f"\nNo script was written: {error}")
        return None

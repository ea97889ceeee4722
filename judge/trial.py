"""What is asked of one interface of a file: the table.

A cell of it is a case on W ranks, which are processes of their own.
"""

import dataclasses
import re
import time
from collections import Counter

from judge import mistakes, modules
from judge.measure import (formula_of_bytes, formula_of_traffic, measured, MICRO_STEPS, N_UNITS,
                           PAPER, stage_of)
from judge.ranks import Raised, run_guarded
from judge.training import Case, judged

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
    tensors: list[str] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)  # of the file: where it was
    seconds: float = 0

    def __str__(self):
        """What is wrong, in a line."""
        parts = [f"{self.case}, W={self.W}"]
        if self.tensors:
            ranks = ", ".join(map(str, self.ranks))
            parts.append(f"step {self.step}, rank{'s' * (len(self.ranks) > 1)} {ranks}, "
                         f"{self.tensors[0]}")
        parts += [part for part in (self.fact, self.mistake) if part]
        return ": ".join(parts)


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
        self.why_not_judged = ""

    @property
    def first_fault(self):
        return next((cell for cell in self.cells if cell.outcome in BAD), None)

    @property
    def verdict(self):
        """"wrong"; "not judged": a bad file; "refused": the simplest module, on any number of
        ranks; or "right": all that it does not refuse"""
        if self.first_fault is not None or self.misses_its_stage:
            return "wrong"
        if self.why_not_judged:
            return "not judged"
        is_right = any(cell.outcome in RIGHT for cell in self.cells if cell.property in BASE)
        return "right" if is_right else "refused"

    @property
    def misses_its_stage(self):
        """What --stage claims has to be measured, and right."""
        if self.options.stage is None:
            return False
        return any(name in self.facts and self.facts[name][0] != "right"
                   for name in ("held", "sent"))

    def case_of(self, cell):
        [case] = {case for _, case, _ in self.lines if str(case) == cell.case}
        return case

    def run(self):
        """All cells, a line for each case, as they come."""
        start_s = time.monotonic()
        try:
            self.print_table()
            self.measure()
        except CannotJudge as reason:
            print()
            self.why_not_judged = str(reason)
        self.seconds = time.monotonic() - start_s

    def print_table(self):
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
            badness = [(order.index(verdict.outcome), verdict.step) for verdict in answers]
            cell.ranks = [rank for rank in range(W) if badness[rank] == min(badness)]
            # The last of them: rank 0 sees less, where all have what it has.
            for key, value in vars(answers[cell.ranks[-1]]).items():
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
        if raised.outcome == "bad file" and not any(each.outcome in RIGHT for each in self.cells):
            raise CannotJudge(raised.fact)
        cell.outcome = "wrong" if raised.outcome == "bad file" else raised.outcome
        cell.fact, cell.ranks, cell.lines = raised.fact, [raised.rank], []
        if raised.outcome == "hung":
            cell.ranks = list(raised.lines)
            for rank, lines in sorted(raised.lines.items()):
                place = f"at {lines[-1]}" if lines else "not in this file: it has gone on, or waits"
                cell.lines.append(f"rank {rank} is {place}")
        else:
            cell.lines = raised.lines.get(raised.rank, [])
        has_lost_another = re.search("Connection (closed|reset) by peer", raised.fact) is not None
        if has_lost_another:
            cell.fact = "it waits for a rank that has come to its end"
        is_uneven = cell.property in ("unused", "order") and self.outcome_of(PLAIN, cell.W) in RIGHT
        if cell.outcome in BAD and (has_lost_another or is_uneven):
            cell.mistake, cell.chapter = mistakes.LEFT_OUT

    # ---------------------------------------------------------------------------------------------
    # what it is

    def measure(self):
        """What a rank holds and sends, beside the formulas of the ZeRO paper."""
        for W in [W for W in self.worlds if W in (2, 4)] or [self.simplest_W]:
            facts = dict.fromkeys(MEASURED, ("not tried", f"W={W}: {PLAIN} is not right"))
            if W == 1:
                facts = dict.fromkeys(MEASURED, ("not tried", "one rank sends nothing"))
            elif self.outcome_of(PLAIN, W) in RIGHT:
                try:
                    answers = run_guarded(self.options, W, self.options.seconds, measured,
                                          self.file, self.name)
                    facts = facts_of(answers, W, self.options.stage)
                except Raised as raised:
                    reason = f"W={W}, rank {raised.rank}: {raised.fact}"
                    facts = dict.fromkeys(MEASURED, ("not measured", reason))
            for name, fact in facts.items():
                before, _ = self.facts.get(name, ("right", ""))
                if before in ("right", "measured"):  # what is worse stays
                    self.facts[name] = fact


def facts_of(answers, W, claimed):
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
    is_overlapped = "yes" if started > waited else "no"
    facts["overlap"] = "measured", (
        f"W={W}: {is_overlapped}: when a backward comes to the last of {N_UNITS} layers, {started} "
        f"collectives have begun, and {waited} of them were waited for")
    return facts

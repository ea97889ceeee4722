"""Rows of the judge's table: each has ranks of its own, which end with it."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import verify

LIMIT_S = 20  # of a row; no longer than a collective waits, so that a rank that waits has hung
VERDICTS = ("same bits", "close", "wrong", "refused", "hung", "died")
BAD = ("wrong", "hung", "died")


@dataclasses.dataclass
class Row:
    """check(file, **options) on W ranks. Its name, by which it is chosen, is such as "judged W=2
    gpt, micro_steps 2".

    outcome_of(what each rank has returned, or None; the Failure, or None) -> as `outcome`."""
    check: Callable
    W: int
    file: str
    options: dict
    outcome_of: Callable

    @property
    def words(self) -> str:
        """Texts speak for themselves, other options with their names."""
        options = self.options.items()
        return ", ".join(value if isinstance(value, str) else f"{name} {value}"
                         for name, value in options)

    @property
    def name(self) -> str:
        return f"{self.check.__name__} W={self.W} {self.words}".rstrip()

    def outcome(self, kind="cpu", seconds=LIMIT_S):
        """-> (the outcome, a word or two; a text)"""
        answers = failure = None
        try:
            answers = verify.run(self.W, partial(self.check, self.file, **self.options), kind=kind,
                                 seconds=seconds)
        except verify.Failure as raised:
            failure = raised
        return self.outcome_of(answers, failure)


def chosen(claims, names):
    """Of {claim: rows}: the rows whose name has one of these names in it, or all."""
    some = {}
    for claim, rows in claims.items():
        for row in rows:
            if not names or any(name in row.name for name in names):
                some.setdefault(claim, []).append(row)
    return some


def print_names(claims):
    """Of {claim: rows}: the claims, what each check does, and the names of its rows."""
    for claim, rows in claims.items():
        print(claim)
        before = None
        for row in rows:
            if row.check is not before:
                print(f"\n  {row.check.__name__}: {' '.join(row.check.__doc__.split())}\n")
            print(f"    {row.name}")
            before = row.check
        print()


def run_rows(claims, kind):
    """Run {claim: rows} on devices of a kind, print each claim and a line for each of its rows ->
    how many are bad. At the end these are printed once more, where they are seen, and what was
    refused: of those that end in the same words, a hint, the first one, and how many are like it.
    Then how many rows had each outcome."""
    print(f"{'check':22s} {'W':>4s} {'seconds':>7s}")
    counts = Counter(dict.fromkeys(VERDICTS, 0))
    alike = {}  # {(outcome, hint): lines}
    for claim, rows in claims.items():
        print(f"\n{claim}\n")
        for row in rows:
            start_s = time.monotonic()
            outcome, fact = row.outcome(kind)
            seconds = time.monotonic() - start_s
            text = ": ".join(part for part in (row.words, outcome, fact) if part)
            line = f"{row.check.__name__:22s} {row.W:>4} {seconds:7.1f}  {text}"
            print(line, flush=True)
            counts[outcome] += 1
            if outcome in (*BAD, "refused"):
                alike.setdefault((outcome, line.rpartition(": ")[2]), []).append(line)
    print()
    for line, *others in alike.values():
        print(line)
        if others:
            print(f"    and {len(others)} more like it")
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    return sum(counts[outcome] for outcome in BAD)

"""What a wrong step looks like, and the mistake that looks like it.

It asks by how much each micro batch's gradient would have to be multiplied, so that their sum is
what was found. These numbers tell most mistakes.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Mistake(NamedTuple):
    text: str
    chapter: str  # of docs/course.md


IDEA = "Data parallelism"
BACKWARD = "ddp.py: the same during the backward"
STAGES = "Zero1 and Zero2"
SCRIPTS = "What real scripts need"

UNKNOWN = Mistake("", IDEA)
START = Mistake("ranks begin with other values: wrap has to send rank 0's parameters to all, also "
                "those that are not trained", IDEA)
BUFFERS = Mistake("ranks have other buffers: wrap has to send rank 0's, too, as a forward uses "
                  "them", IDEA)
OPTIMIZER = Mistake("right with SGD: is its state kept, and are gradients averaged, and not "
                    "parameters?", STAGES)
SCHEDULE = Mistake("right with a constant learning rate: a new one in optimizer.param_groups has "
                   "to reach the optimizer that steps", STAGES)
GROUPS = Mistake("right with one group: each group of parameters has options of its own", STAGES)
CLIPPING = Mistake("right without clipping, so it is clipped by another norm than that of all "
                   "gradients, such as that of a rank's own, or of its shards", STAGES)
VALIDATION = Mistake("right without a forward under torch.no_grad() between steps: does it leave "
                     "something behind?", SCRIPTS)
LATE = Mistake("whole parameters were asked for after steps 1 and 2, and not after step 3: does "
               "that do what should have been done before the next forward?", STAGES)
MOMENTUM = Mistake("the optimizer has lost its momentum: its state has to stay from step to step",
                   STAGES)
NOT_ZEROED = Mistake("the gradient of the step before is added to it: not zeroed, or left in a "
                     "bucket?", BACKWARD)
PLACES = Mistake("the right values in wrong places: flattened in another order, or taken from "
                 "other offsets?", BACKWARD)
TIED = Mistake("it has two names in the module: reduced, or divided, once for each of them?",
               BACKWARD)
UNUSED = Mistake("not all ranks have used it: if one has, a rank whose .grad is None has to take "
                 "part with zeros, and all divide by the number of ranks", BACKWARD)
LEFT_OUT = Mistake("ranks start other collectives: all have to start the same ones, in one order, "
                   "also where a .grad is None", BACKWARD)
NOT_DIVIDED = Mistake("not divided by the number of ranks", IDEA)
TWICE = Mistake("divided twice by the number of ranks", IDEA)
NOT_BY_STEPS = Mistake("not divided by the number of micro-steps", BACKWARD)
BY_STEPS = Mistake("divided by the number of micro-steps, as the losses already are", BACKWARD)
LAST = Mistake("the last micro-step alone: what was accumulated before it is lost", BACKWARD)
FIRST = Mistake("the first micro-step alone: what came after it was not reduced", BACKWARD)
AGAIN = Mistake("what an earlier micro-step had summed over ranks was summed again, so it counts W "
                "times", BACKWARD)
OWN = Mistake("a rank's own gradients alone: nothing was sent, or not waited for, or not used",
              IDEA)
OWN_EARLIER = Mistake("of earlier micro-steps a rank has its own gradients alone: they were not "
                      "reduced", BACKWARD)
ROUNDED = Mistake("rounded to 16 bits on its way?", IDEA)
SCALED = Mistake("all of it is multiplied by one number: clipped, or scaled?", IDEA)
EACH_CLIPPED = Mistake("each rank's gradients are multiplied by a number of its own: clipped by "
                       "its own norm, before the mean?", STAGES)
# What is to blame where the same module is right without it: a Case's other, loop or optimizer.
TO_BLAME = dict(parameters=START, buffers=BUFFERS, clipped=CLIPPING, validated=VALIDATION,
                scheduled=SCHEDULE, groups=GROUPS, AdamW=OPTIMIZER)


@dataclasses.dataclass
class WrongStep:
    """A step after which some parameters are wrong on this rank."""

    module: nn.Module  # as it was, for its names
    rank: int
    moved: bool  # whether the first of them has moved at all
    found: dict[str, Tensor]  # {name: flat gradient} of those that are wrong, read from the step
    # {name: (micro-steps, ranks, elements), what each micro batch should have added to it}; of a
    # parameter that no micro batch uses: None.
    parts: dict[str, Tensor | None]
    earlier: Tensor | None  # the sum of the first one's gradients of the step before
    momentum: Tensor | None  # what SGD adds to its gradient

    @property
    def first(self) -> str:
        return next(iter(self.found))

    def look(self) -> tuple[str, Mistake]:
        """-> (the first wrong gradient beside the one that is expected, the mistake)"""
        actual, parts = self.found[self.first], self.parts[self.first]
        if actual.isnan().any():
            return "it is nan: read before it was there, or never written?", UNKNOWN
        if self.first not in trained_names(self.module):
            return "it is frozen, and has moved, or was not rank 0's", START
        if parts is None:
            return ("no rank has used it, so its .grad should be None, and it should stay; a "
                    "gradient of zeros lets its weights decay"), Mistake("", BACKWARD)
        if not self.moved:
            return "it has not moved: does the optimizer get it, and is its .grad there?", UNKNOWN
        expected = parts.sum(dim=(0, 1))
        if is_alike(actual, expected):
            percent = 100 * (actual - expected).norm() / expected.norm()
            return f"its gradient is {percent:.2g} % off", ROUNDED
        factor = actual.dot(expected) / expected.square().sum()
        if is_alike(actual, factor * expected):
            fact = f"its gradient is {factor:.3g} x expected"
        else:
            ratio = actual.norm() / expected.norm()
            fact = f"its gradient is {ratio:.3g} x as long as expected, and points elsewhere"
        return fact, self.mistake(actual, expected)

    def mistake(self, actual, expected):
        if self.earlier is not None and is_added(self.earlier, actual, expected):
            return NOT_ZEROED
        if self.momentum is not None and is_alike(actual + self.momentum, expected):
            return MOMENTUM
        if is_alike(actual.sort().values, expected.sort().values):
            return PLACES
        if len(self.found) < len(trained_names(self.module)):  # others are right
            if all(name in tied_names(self.module) for name in self.found):
                return TIED
            if all(is_unused_somewhere(parts) for parts in self.parts.values()):
                return UNUSED
        numbers = self.multiples()
        if numbers is None:
            return UNKNOWN
        return mistake_of(numbers, self.rank)

    def multiples(self):
        """By how much the gradient of each micro batch is multiplied in what was found, where 1 is
        right -> (ranks, micro-steps); or None, where it is no such sum. Asked of all wrong tensors
        together, or else of the first."""
        used = [name for name, parts in self.parts.items() if parts is not None]
        for names in (used, [self.first]):
            actual = torch.cat([self.found[name] for name in names])
            parts = torch.cat([self.parts[name] for name in names], dim=2)
            micro_steps, W, n = parts.shape
            if n < 2 * micro_steps * W:
                return None  # too few to tell
            columns = parts.flatten(0, 1).T
            if torch.linalg.cond(columns) > 1000:
                return None  # some are nearly multiples of others
            numbers = torch.linalg.lstsq(columns, actual).solution
            if is_alike(actual, columns @ numbers):
                return numbers.view(micro_steps, W).T
        return None


def is_alike(actual, right):
    """But for what fp32 rounds off a parameter, beside which its step is small."""
    return bool((actual - right).norm() <= 0.01 * right.norm())


def trained_names(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


def tied_names(module):
    """The first name of each parameter that the module has by several names."""
    names_of = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(p, []).append(name)
    return {names[0] for names in names_of.values() if len(names) > 1}


def is_unused_somewhere(parts):
    return parts is None or not parts.any(dim=2).all()


def is_added(earlier, actual, expected):
    """Whether some of the gradient of the step before is in it."""
    times = (actual - expected).dot(earlier) / earlier.square().sum()
    is_much = bool(times * earlier.norm() > 0.1 * expected.norm())
    return is_much and is_alike(expected + times * earlier, actual)


def mistake_of(numbers: Tensor, rank: int) -> Mistake:
    """numbers, (ranks, micro-steps): by how much each micro batch's gradient is multiplied on this
    rank, where 1 is right."""
    W, micro_steps = numbers.shape
    others = torch.cat([numbers[:rank], numbers[rank + 1:]])
    first, last = numbers[:, 0], numbers[:, -1]

    def are(t, right):
        right = torch.as_tensor(right, dtype=t.dtype).expand_as(t)
        return torch.allclose(t, right, rtol=0.02, atol=0.02 * numbers.abs().max().item())

    factors = {NOT_DIVIDED: W, TWICE: 1 / W, NOT_BY_STEPS: micro_steps, BY_STEPS: 1 / micro_steps}
    alike = [each for each, factor in factors.items() if factor != 1 and are(numbers, factor)]
    if alike:  # two where W is the number of micro-steps
        return Mistake(", or ".join(each.text for each in alike), alike[0].chapter)
    if micro_steps > 1:
        if are(first, 0):
            return LAST
        if are(last, 0):
            return FIRST
        if are(first, W * last):
            return AGAIN
    if W > 1 and are(others, 0):
        return OWN
    if W > 1 and micro_steps > 1 and are(others[:, 0], 0):
        return OWN_EARLIER
    missing = [str(other) for other in range(W) if are(numbers[other], 0)]
    if missing:
        return Mistake(f"without the gradients of rank {', '.join(missing)}", IDEA)
    if are(numbers, numbers.mean()):
        divisor = (W / numbers.mean()).item()
        if divisor > 0 and abs(divisor - round(divisor)) < 0.02:
            return Mistake(f"divided by {round(divisor)}, and not by the number of ranks", IDEA)
        return SCALED
    is_less = bool((numbers > 0).all()) and bool((numbers < 1.02).all())
    if are(numbers, numbers.mean(dim=1, keepdim=True)) and is_less:
        return EACH_CLIPPED
    return Mistake(in_words(numbers), IDEA)


def in_words(numbers):
    """What counts otherwise than once."""
    facts = []
    for rank, row in enumerate(numbers):
        for micro_step, number in enumerate(row.tolist()):
            if abs(number - 1) > 0.02:
                batch = f"rank {rank} in micro-step {micro_step + 1}"
                facts.append(f"{number:.2f} times that of {batch}")
    return f"it has {', '.join(facts)}, and all others once"

"""What our wrappers add to a step, counted: so no line adds a kernel for each parameter unnoticed.

A change of a number is a decision. If it is meant, take the line that the failed test prints, or
`./bench.sh overhead`.
"""

import math
from dataclasses import astuple
from functools import cache
from unittest import mock

import torch

from bench.overhead import as_on_accelerator, count, Counter, Counts, OURS, Training, WARM_UP
from dropin.tests.scripts import of_each
from tests.ranks import on_ranks

# wrapper, W: what it adds in kernels, views, collectives, allocations, record_function, calls
EXPECTED = {
    ("DDP", 2): (38, 73, 19, 19, 0, 1987),
    ("Zero1", 2): (100, 495, 50, 50, 0, 5545),
    ("Zero2", 2): (100, 445, 50, 75, 0, 5445),
    ("Zero3", 2): (145, 1240, 70, 120, 0, 12520),
    ("dropin DDP", 2): (38, 74, 20, 19, 0, 3199),
    ("dropin Zero1", 2): (100, 496, 51, 50, 0, 9742),
    ("dropin Zero2", 2): (100, 446, 51, 75, 0, 9642),
    ("dropin Zero3", 2): (145, 1241, 71, 120, 0, 16129),
}


@cache
def without_wrapper():
    return count("none")


@on_ranks(2, seconds=120)
@of_each(*OURS)
def test_a_wrapper_adds_this(wrapper):
    """Exactly so many operations, and at most so many calls: these differ a little between versions
    of Python, so 3 % more are none too many."""
    expected = Counts(*EXPECTED[wrapper, 2])
    actual = count(wrapper) - without_wrapper()
    line = f'    ("{wrapper}", 2): {astuple(actual)},'
    fact = f"{actual} is not {expected}; if that is meant:\n{line}"
    assert astuple(actual)[:-1] == astuple(expected)[:-1], fact
    assert actual.calls <= math.ceil(1.03 * expected.calls), fact


@on_ranks(2, seconds=120)
@of_each(*OURS)
def test_ranges_are_there_for_a_profiler(wrapper):
    """Only then: torch's record_function takes as long as the launch of a kernel. The optimizer has
    ranges of its own, without a wrapper, too."""
    few_layers = mock.patch.dict("bench.overhead.SIZES", n_layer=2)  # it is profiled: that is slow
    with few_layers, as_on_accelerator(wrapper):
        training = Training(wrapper)
        training.step(WARM_UP)
        with Counter() as counter:
            training.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            training.step()
    kinds = {event.name.partition(": ")[0] for event in profile.events()}
    expected = {"start", "wait"}
    if wrapper.endswith("Zero3"):
        expected.add("free")
    assert expected <= kinds, f"no {expected - kinds} among {sorted(kinds)}"
    added = counter.counts.record_function - without_wrapper().record_function
    assert added == 0, f"{added} beginnings and ends of ranges without a profiler"

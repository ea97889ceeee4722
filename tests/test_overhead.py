"""What our wrappers add to a step, counted: so no line adds a kernel for each parameter unnoticed.

A change of a number is a decision. If it is meant, print the table anew, and put it here:

    python bench/overhead.py --counts
    torchrun --nproc_per_node=2 bench/overhead.py --counts
"""

import math
from dataclasses import astuple
from functools import cache
from unittest import mock

import pytest
import torch

from bench.overhead import (
    as_on_accelerator, count, Counter, Counts, line_of_test, OURS, Training, WARM_UP)

CPU = torch.device("cpu")

# wrapper, W: what it adds in kernels, views, collectives, allocations, record_function, calls
EXPECTED = {
    ("DDP", 1): (149, 298, 19, 0, 112, 11160),
    ("Zero1", 1): (174, 1193, 51, 25, 180, 29165),
    ("Zero2", 1): (174, 1193, 51, 50, 230, 29939),
    ("Zero3", 1): (488, 2297, 71, 95, 336, 48632),
    ("PlainDDP", 1): (149, 297, 18, 0, 108, 6474),
    ("PlainZero1", 1): (174, 1043, 50, 25, 176, 13181),
    ("PlainZero2", 1): (174, 1043, 50, 50, 226, 14030),
    ("PlainZero3", 1): (488, 2027, 70, 95, 332, 23305),
    ("DDP", 2): (167, 298, 19, 0, 112, 11178),
    ("Zero1", 2): (224, 1193, 51, 25, 180, 29190),
    ("Zero2", 2): (224, 1193, 51, 50, 230, 29964),
    ("Zero3", 2): (538, 2297, 71, 95, 336, 48657),
    ("PlainDDP", 2): (167, 297, 18, 0, 108, 6492),
    ("PlainZero1", 2): (224, 1043, 50, 25, 176, 13206),
    ("PlainZero2", 2): (224, 1043, 50, 50, 226, 14055),
    ("PlainZero3", 2): (538, 2027, 70, 95, 332, 23330),
}


@cache
def without_wrapper():
    return count("none", CPU)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wrapper", OURS)
def test_a_wrapper_adds_this(wrapper, W):
    """Exactly so many operations, and at most so many calls: these differ a little between versions
    of Python, so 3 % more are none too many."""
    expected = Counts(*EXPECTED[wrapper, W])
    found = count(wrapper, CPU) - without_wrapper()
    fact = f"{found} is not {expected}; if that is meant:\n{line_of_test(wrapper, W, found)}"
    assert astuple(found)[:-1] == astuple(expected)[:-1], fact
    assert found.calls <= math.ceil(1.03 * expected.calls), fact


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", OURS)
def test_ranges_are_there_for_a_profiler(wrapper, W):
    """Only then: torch's record_function takes as long as the launch of a kernel. The optimizer has
    ranges of its own, without a wrapper, too."""
    few_layers = mock.patch("bench.overhead.LAYERS", 2)  # it is profiled, which takes long
    with few_layers, as_on_accelerator(wrapper, CPU):
        training = Training(wrapper, CPU)
        training.step(WARM_UP)
        with Counter() as counter:
            training.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            training.step()
    kinds = {event.name.partition(": ")[0] for event in profile.events()}
    expected = {"start", "wait"}
    if wrapper.endswith(("2", "3")):
        expected.add("free")
    assert expected <= kinds, f"no {expected - kinds} among {sorted(kinds)}"
    added = counter.counts.records - without_wrapper().records
    assert added == 0, f"{added} beginnings and ends of ranges without a profiler"

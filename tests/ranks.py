"""Tests on ranks.

    @on_ranks(2, 3)
    @pytest.mark.parametrize("wrapper", ["ddp", "zero3"])
    def test_something(wrapper): ...

is run on 2 ranks, and on 3: all ranks call it at once, as in training, each with its arguments. A
test that is parametrized with W itself is marked with on_ranks() alone. What a rank raises fails
the test, in a line with the rank and the place; so does a rank that dies or hangs.
"""

import functools
import inspect

import pytest
import torch.distributed as dist

import verify


def on_ranks(*numbers: int, seconds: float = 60):
    """seconds: the limit of the test."""

    def mark(function):
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def test(**given):
            arguments = {name: given[name] for name in names}
            try:
                verify.run(given["W"], functools.partial(function, **arguments), seconds=seconds)
            except verify.Failure as failure:
                fact = str(failure)
            else:
                return
            pytest.fail(fact, pytrace=False)  # outside of `except`, or pytest tells it twice

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                      for name in dict.fromkeys([*names, "W"])]
        test.__signature__ = inspect.Signature(parameters)
        if not numbers:
            return test
        return pytest.mark.parametrize("W", numbers, ids=[f"W{W}" for W in numbers])(test)

    return mark


def gather(value, group=None) -> list:
    """[rank 0's value, rank 1's, ...]"""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

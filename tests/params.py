"""Where the project is, and parameters of tests."""

import pathlib
import re
from collections import Counter
from itertools import combinations

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project


def full(*values, **options):
    """Parameters of a test that run with --full only."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def slug(text):
    """As a part of a test's id."""
    return re.sub(r"\W+", "_", text).strip("_")


def sample_of(rows, n=1, of=dict):
    """-> numbers of rows, which are {parameter: value}: as few as have each value of each
    parameter, with n = 2 each pair of values, and so on. Where there is a choice values take
    turns, but W is the first. of: a function of a row, what counts in place of it."""
    rows = [{name: repr(value) for name, value in of(row).items()} for row in rows]  # for sets
    wanted = [set(combinations(sorted(row.items()), min(n, len(row)))) for row in rows]
    left = set().union(*wanted)
    times = Counter()
    sample = []
    while left:
        def rank(number):
            row = rows[number]
            others = [times[item] for item in row.items() if item[0] != "W"]
            return -len(wanted[number] & left), sum(others)

        number = min(range(len(rows)), key=rank)
        left -= wanted[number]
        times.update(rows[number].items())
        sample.append(number)
    return sample

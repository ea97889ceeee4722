"""What tests of several subjects share."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch

from tests.params import slug
from verify import MODULES


def training(W, wrapper, *modules, marks=(), **options):
    """The parameters wrapper, modules, options and W of a test: these modules, or all, in a wrapper
    on W ranks."""
    words = [wrapper, "_".join(modules) or "all_modules"]
    for name, value in options.items():
        speaks = isinstance(value, str)
        words.append(value if speaks else getattr(value, "__name__", f"{name}_{value}"))
    words.append(f"W{W}")
    name = "-".join(slug(word) for word in words)
    return pytest.param(wrapper, modules or MODULES, options, W, id=name, marks=marks)


full_training = partial(training, marks=pytest.mark.full)


def planted(*_):
    """A hook that raises."""
    raise ZeroDivisionError("planted")


def native():
    """A tensor that says it is not on a CPU is sent by the collectives that NCCL has."""
    return mock.patch.object(torch.Tensor, "is_cpu", False)


def on_meta(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)


def raises(kind, pattern, function, *arguments, **options):
    """Assert that function raises kind, its message matching pattern; return the message."""
    try:
        function(*arguments, **options)
    except kind as error:
        assert re.search(pattern, str(error)), f"no {pattern!r} in: {error}"
        return str(error)
    raise AssertionError(f"nothing was raised that matches {pattern!r}")


def two_at_a_time(function, *columns):
    """[function(*row) for row in zip(*columns)], for functions that wait."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, *columns))

"""What tests of several subjects share."""

import pathlib
import re
from unittest import mock

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project


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

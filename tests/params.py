"""Where the project is, and parameters of tests."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project


def full(*values, **options):
    """Parameters of a test that run with --full only."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def slug(text):
    """As a part of a test's id."""
    return re.sub(r"\W+", "_", text).strip("_")

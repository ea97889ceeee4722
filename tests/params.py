"""Parameters of tests, and what their ids say."""

import re

import pytest


def full(*values, **options):
    """Parameters of a test that run with --full only."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def slug(text):
    """As a part of a test's id."""
    return re.sub(r"\W+", "_", text).strip("_")

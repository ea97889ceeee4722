"""The rows of verify.py."""

import pytest

from params import slug
from verify import PROOF, rows_of


def parameters():
    for checks in PROOF.values():
        for row in rows_of(checks, is_full=True):
            words = [row.function.__name__, *row.words]
            name = "-".join([*map(slug, words), f"W{row.W}"])
            marks = [pytest.mark.limit(row.function.limit_s)]
            if row.only_full:
                marks.append(pytest.mark.full)
            yield pytest.param(row.function, row.arguments, row.W, id=name, marks=marks)


@pytest.mark.parametrize("check, arguments, W", parameters())
def test_proof(check, arguments):
    """W ranks have the bits of one process, of oracle.py and of torch's wrappers, and the bytes of
    the paper: see verify.PROOF."""
    check(**arguments)

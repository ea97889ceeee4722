"""The rows of verify.py."""

import itertools

import pytest

from tests.params import slug
from verify import PROOF, rows_of


def parameters():
    for check in itertools.chain(*PROOF.values()):
        samples = rows_of(check, is_full=False)
        for row in rows_of(check, is_full=True):
            words = [row.check.__name__, *row.words]
            name = "-".join([*map(slug, words), f"W{row.W}"])
            marks = [pytest.mark.limit(row.check.limit_s)]
            if row not in samples:
                marks.append(pytest.mark.full)
            yield pytest.param(row.check, row.arguments, row.W, id=name, marks=marks)


@pytest.mark.parametrize("check, arguments, W", parameters())
def test_proof(check, arguments):
    """W ranks have the bits of one process, of oracle.py and of torch's wrappers, and the bytes of
    the paper: see verify.PROOF."""
    check(**arguments)

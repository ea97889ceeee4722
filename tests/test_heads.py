"""The two lines at the head of each file that people copy."""

import re

import pytest

from tests.params import ROOT

COPIED = [*ROOT.glob("*.py"), *ROOT.glob("dropin/*.py"), *ROOT.glob("extras/[a-z]*.py")]


@pytest.mark.parametrize("path", COPIED, ids=lambda path: path.stem)
def test_copies_say_version_and_license(path):
    """So a copy says whose it is, which license it has, and where in CHANGELOG.md to look for what
    has changed since: the newest section there says the version, and the license says whose."""
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    version = re.match(r"(\d+\.\d+\.\d+): .", newest)
    assert version, f"CHANGELOG.md: the newest section has no version: {newest}"
    license_name, _, copyright_line = (ROOT / "LICENSE").read_text().splitlines()[:3]
    holder = copyright_line.removeprefix("Copyright (c) ")
    assert license_name == "MIT License"
    expected = [f"# nanoZeRO {version[1]}, SPDX-FileCopyrightText: {holder}",
                "# SPDX-License-Identifier: MIT"]
    first, second, docstring, *_ = path.read_text().splitlines()
    assert [first, second] == expected, f"{path.name}: {first}, {second}"
    assert docstring.startswith('"""')

"""The smallest script that shows a fault, for its author to run and to change: torch alone."""

import inspect
import os
import pathlib

MARK = "Written by `python -m judge"


def write_script(file, name, functions, cell, case) -> str:
    """-> the script's name, in the working directory."""
    return ""

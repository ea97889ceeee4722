"""wrap leaves Python, with status 3. The judge should name this, and not leave, too."""

import sys


def wrap(module):
    sys.exit(3)

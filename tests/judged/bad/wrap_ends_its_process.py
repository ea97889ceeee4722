"""wrap ends the process of its rank. The judge should say that the rank has died."""

import os


def wrap(module):
    os._exit(1)

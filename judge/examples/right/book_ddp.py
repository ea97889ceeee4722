"""DDP of ddp.py.

In each backward every trained parameter has to get a gradient, on all ranks. Each rank has buffers
of its own after the start."""

from ddp import DDP


def wrap(module):
    return DDP(module)

"""PlainDDP of ddp.py, the algorithm alone.

In each backward every trained parameter has to get a gradient, on all ranks. Each rank has buffers
of its own after the start."""

from dropin.ddp import PlainDDP


def wrap(module):
    return PlainDDP(module)

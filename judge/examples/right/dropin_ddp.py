"""DDP of dropin, where ranks may use different parameters."""

from dropin import DDP


def wrap(module):
    return DDP(module, find_unused_parameters=True)

"""Zero3 of dropin: optimizer states, gradients and parameters are sharded."""

from dropin import Zero3


def wrap(module):
    return Zero3(module)

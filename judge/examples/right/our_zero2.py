"""Zero2 of zero.py: optimizer states and gradients are sharded."""

from dropin.zero import Zero2


def wrap(module):
    return Zero2(module)

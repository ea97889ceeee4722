"""ZeRO-3 of oracle.py: parameters, too, are whole only where they are used.

All ranks have to use the same parameters in the same order, and parameters are contiguous. Units do
not lie inside of each other."""

import torch.distributed as dist

from ddp import clip_gradients_
from zero import find_units
import oracle


def wrap(module):
    oracle.make_shards(module)  # it sends rank 0's values
    oracle.reduce_in_backward(module)
    oracle.gather_when_used(module, find_units(module))
    return module


def trained(model):
    return [p.shard for p in model.parameters()]


def whole(model):
    return {name: oracle.gather(p) for name, p in model.named_parameters()}


def clip(model, max_norm):
    gradients = [shard.grad for shard in trained(model) if shard.grad is not None]
    clip_gradients_(gradients, max_norm, dist.group.WORLD)  # the norm is over all ranks' pieces

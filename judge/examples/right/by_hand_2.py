"""ZeRO-2 of oracle.py: each backward reduces gradients, and keeps only this rank's pieces.

All ranks have to use the same parameters in the same order, and parameters are contiguous."""

import torch.distributed as dist

from ddp import clip_gradients_
import oracle


def wrap(module):
    oracle.make_shards(module)  # it sends rank 0's values
    oracle.reduce_in_backward(module)
    # A step changes this rank's pieces. The next forward needs all of them.
    module.register_forward_pre_hook(lambda *_: oracle.gather_parameters(module))
    return module


def trained(model):
    return [p.shard for p in model.parameters()]


def whole(model):
    return {name: oracle.gather(p) for name, p in model.named_parameters()}


def clip(model, max_norm):
    gradients = [shard.grad for shard in trained(model) if shard.grad is not None]
    clip_gradients_(gradients, max_norm, dist.group.WORLD)  # the norm is over all ranks' pieces

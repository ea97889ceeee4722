"""ZeRO-1 of oracle.py: each rank updates its piece of every parameter.

All ranks have to use the same parameters in the same order, and parameters are contiguous."""

import torch.distributed as dist

from ddp import clip_gradients_
import oracle


def wrap(module):
    oracle.make_shards(module)  # it sends rank 0's values
    # A step changes this rank's pieces. The next forward needs all of them.
    module.register_forward_pre_hook(lambda *_: oracle.gather_parameters(module))
    return module


def after_backward(model):
    oracle.reduce_gradients(model)


def trained(model):
    return [p.shard for p in model.parameters()]


def whole(model):
    return {name: oracle.gather(p) for name, p in model.named_parameters()}


def clip(model, max_norm):
    gradients = [shard.grad for shard in trained(model) if shard.grad is not None]
    clip_gradients_(gradients, max_norm, dist.group.WORLD)  # the norm is over all ranks' pieces

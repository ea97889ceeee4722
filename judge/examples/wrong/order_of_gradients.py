"""Gradients leave in the order in which they come. If ranks use layers in different orders, they
add what does not belong together."""

import torch.distributed as dist

from judge.examples.right import small
from judge.examples.right.small import clip


def wrap(module):
    module.ready = []
    for p in module.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(module.ready.append)
    return small.wrap(module)


def after_backward(model):
    for p in model.ready:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    model.ready.clear()

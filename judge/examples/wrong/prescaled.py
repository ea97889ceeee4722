"""Hooks divide gradients in place, before they are summed. Autograd may use the same tensor for
another parameter, too, or for what comes before it."""

import torch.distributed as dist

from judge.examples.right import small
from judge.examples.right.small import clip, is_used


def wrap(module):
    for p in module.parameters():
        if p.requires_grad:
            p.register_hook(divide)
    return small.wrap(module)


def divide(gradient):
    return gradient.div_(dist.get_world_size())


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            dist.all_reduce(p.grad)

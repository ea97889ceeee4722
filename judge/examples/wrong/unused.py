"""A rank that has not used a parameter does not take part in its sum."""

import torch.distributed as dist

from judge.examples.right.small import clip, wrap


def after_backward(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

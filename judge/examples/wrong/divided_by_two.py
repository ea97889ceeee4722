"""It was written for two ranks, and divides by 2."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            dist.all_reduce(p.grad)
            p.grad /= 2

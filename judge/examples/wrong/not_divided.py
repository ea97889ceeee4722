"""It sums gradients, and forgets to divide by W."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            dist.all_reduce(p.grad)

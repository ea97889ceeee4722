"""It divides before the sum, and once more after it."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

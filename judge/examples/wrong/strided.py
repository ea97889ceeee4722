"""It takes a gradient as a flat view, which one that is transposed in memory has not."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            flat = p.grad.view(-1)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()

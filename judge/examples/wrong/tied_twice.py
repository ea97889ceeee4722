"""It sums under each name. A tied parameter has two, so it is summed twice, and divided once."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        if is_used(p):
            dist.all_reduce(p.grad)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()

"""It starts an all-reduce of each gradient, and does not wait for it."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            total = p.grad.clone()
            model.work = dist.all_reduce(total, async_op=True)
            p.grad = total / dist.get_world_size()

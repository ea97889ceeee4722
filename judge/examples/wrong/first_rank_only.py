"""It sends rank 0's gradients to all, in place of the mean."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            dist.broadcast(p.grad, src=0)

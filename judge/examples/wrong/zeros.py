"""A parameter that no rank has used gets a gradient of zeros, in place of None, so that its weights
decay."""

import torch
import torch.distributed as dist

from judge.examples.right.small import clip, wrap


def after_backward(model):
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

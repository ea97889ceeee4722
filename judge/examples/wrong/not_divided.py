"""It sums gradients, and forgets to divide by W.

The judge should say: wrong in the first step, W x as large; right at W = 1."""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def after_backward(model):
    for p in model.parameters():
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if n_users > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

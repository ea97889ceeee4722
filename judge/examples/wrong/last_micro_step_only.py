"""A hook on a tensor is given the gradient of one backward, not what has been added up. It averages
that of the last micro-step, and forgets those before.

The judge should say: wrong with several micro-steps, also at W = 1; right with one."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    for p in module.parameters():
        p.last = None
        if p.requires_grad:
            p.register_hook(partial(keep, p))
    return module


def keep(p, gradient):
    p.last = gradient.clone()


def after_backward(model):
    for p in model.parameters():
        if p.last is not None:
            p.grad, p.last = p.last, None
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if n_users > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

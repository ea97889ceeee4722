"""Each micro-step sums `.grad` over ranks, in place. So the next one sums again what those before
have summed.

The judge should say: wrong with several micro-steps; right with one, and at W = 1."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def sum_gradients(model):
    for p in model.parameters():
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if n_users > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)


@contextmanager
def accumulate(model):
    yield
    sum_gradients(model)


def after_backward(model):
    sum_gradients(model)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

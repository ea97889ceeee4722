"""It divides by the number of micro-steps, too, which the losses are divided by already.

The judge should say: wrong with n micro-steps, 1/n x as large, also at W = 1; right with one."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    module.n_micro_steps = 1
    return module


@contextmanager
def accumulate(model):
    model.n_micro_steps += 1
    yield


def after_backward(model):
    for p in model.parameters():
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if n_users > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() * model.n_micro_steps
    model.n_micro_steps = 1


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

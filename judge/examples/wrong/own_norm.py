"""It clips each rank's own gradients, and averages after that.

The judge should say: wrong with clipping, by a factor; right without, and at W = 1."""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def average(model):
    for p in model.parameters():
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if n_users > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def after_backward(model):
    model.own = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    average(model)


def clip(model, max_norm):
    for p, own in zip(model.parameters(), model.own):
        p.grad = own
    clip_grad_norm_(model.parameters(), max_norm)
    average(model)

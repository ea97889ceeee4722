"""It sums under each name. A tied parameter has two, so it is summed twice, and divided once.

The judge should say: wrong where parameters are tied, W x as large; right elsewhere, and at W = 1.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def after_backward(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if n_users > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

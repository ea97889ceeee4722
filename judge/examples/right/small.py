"""The smallest DDP that is right for all modules. Many of ../wrong are it with one mistake."""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def is_used(p):
    """Whether some rank has used it. Those that have not take part with zeros. One that no rank has
    used keeps None."""
    n_users = torch.tensor(int(p.grad is not None))
    dist.all_reduce(n_users)
    if n_users > 0 and p.grad is None:
        p.grad = torch.zeros_like(p)
    return n_users > 0


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

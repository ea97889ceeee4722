"""The smallest DDP that is right for all modules. Those in ../wrong are this one with one mistake.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def after_backward(model):
    for p in model.parameters():
        # Ranks may use different parameters. One that no rank has used keeps None.
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if n_users > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

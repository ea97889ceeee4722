"""ZeRO-1 by whole parameters, as in ../right/owners.py. Each rank clips what it owns by the norm of
what it owns, and not by that of all gradients.

The judge should say: wrong with clipping, by a factor that differs from owner to owner; right
without, and at W = 1."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_


class Owned(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.is_old = module, False
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, src=0)
        self.owners = {}
        loads = [0] * dist.get_world_size()
        trained = [p for p in module.parameters() if p.requires_grad]
        for p in sorted(trained, key=torch.numel, reverse=True):
            # The largest first, each to the rank that has least. An empty one counts, too.
            self.owners[p] = loads.index(min(loads))
            loads[self.owners[p]] += p.numel() + 1

    def forward(self, *inputs):
        self.send_updated()
        return self.module(*inputs)

    def average(self):
        for p in self.owners:
            n_users = torch.tensor(int(p.grad is not None))
            dist.all_reduce(n_users)
            if n_users > 0:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.is_old = True  # a step follows

    def send_updated(self):
        if self.is_old:
            for p, owner in self.owners.items():
                dist.broadcast(p.data, src=owner)
            self.is_old = False


def wrap(module):
    return Owned(module)


def after_backward(model):
    model.average()


def trained(model):
    return [p for p, owner in model.owners.items() if owner == dist.get_rank()]


def whole(model):
    model.send_updated()
    return dict(model.module.named_parameters())


def clip(model, max_norm):
    clip_grad_norm_(trained(model), max_norm)

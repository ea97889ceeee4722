"""A rank that has not used a parameter does not take part in its sum.

The judge should say: hung, died or wrong where ranks use different parameters; right elsewhere.
"""

import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def after_backward(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

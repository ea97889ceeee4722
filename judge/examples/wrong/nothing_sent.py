"""It sends rank 0's values at the start, and forgets the gradients.

The judge should say: wrong in the first step, as if each rank had trained alone; right at W = 1."""

import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

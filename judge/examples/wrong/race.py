"""It starts an all-reduce of all gradients, and reads the result without waiting for it.

The judge should say: wrong in the first step, often as if each rank had trained alone, with other
numbers in each run; right at W = 1."""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def after_backward(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    is_used = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(is_used)
    parts = []
    for p in parameters:
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        parts.append(gradient.reshape(-1))
    flat = torch.cat(parts) / dist.get_world_size()
    model.work = dist.all_reduce(flat, async_op=True)
    # Here `model.work.wait()` is missing.
    means = flat.clone().split([p.numel() for p in parameters])
    for p, n_users, mean in zip(parameters, is_used, means):
        if n_users > 0:
            p.grad = mean.view(p.shape)


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

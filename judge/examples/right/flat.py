"""One all-reduce for all gradients, after the last backward. They lie in one flat buffer, and with
them how many ranks have used each parameter."""

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
    parts = [is_used]
    for p in parameters:
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        parts.append(gradient.reshape(-1))
    flat = torch.cat(parts)
    dist.all_reduce(flat)
    n_users, *sums = flat.split([len(part) for part in parts])
    for p, n, total in zip(parameters, n_users, sums):
        if n > 0:  # one that no rank has used keeps None
            p.grad = (total / dist.get_world_size()).view(p.shape)


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

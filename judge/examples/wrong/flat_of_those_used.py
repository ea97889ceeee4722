"""One flat buffer of the gradients that are there. Ranks that have used other parameters have other
buffers, and add what does not belong together."""

import torch
import torch.distributed as dist

from judge.examples.right.small import clip, wrap


def after_backward(model):
    used = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in used])
    dist.all_reduce(flat)
    sizes = [p.numel() for p in used]
    for p, total in zip(used, flat.split(sizes)):
        p.grad = total.view(p.shape) / dist.get_world_size()

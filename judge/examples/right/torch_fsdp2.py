"""torch's FSDP2: parameters are whole only while a block computes. It does not send rank 0's
values, so `wrap` has to."""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for child in list(module.modules()):
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
    # Last: it takes what no block has.
    return fully_shard(module, mesh=mesh, reshard_after_forward=True)


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)  # it knows DTensors: the norm is over all ranks

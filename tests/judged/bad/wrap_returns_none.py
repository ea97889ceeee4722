"""wrap forgets to return. The judge should refuse."""

import torch.distributed as dist


def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)

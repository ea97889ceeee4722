"""It sends rank 0's parameters, and forgets the buffers."""

import torch.distributed as dist

from judge.examples.right.small import after_backward, clip


def wrap(module):
    for t in module.parameters():
        dist.broadcast(t.data, src=0)
    return module

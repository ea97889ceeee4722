"""It sends rank 0's buffers, and forgets the parameters."""

import torch.distributed as dist

from judge.examples.right.small import after_backward, clip


def wrap(module):
    for t in module.buffers():
        dist.broadcast(t.data, src=0)
    return module

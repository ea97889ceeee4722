"""It sends rank 0's state_dict(), which lacks buffers that are not persistent."""

import torch.distributed as dist

from judge.examples.right.small import after_backward, clip


def wrap(module):
    for t in module.state_dict().values():
        dist.broadcast(t, src=0)
    return module

"""It sends rank 0's values of what is trained, and forgets what is frozen."""

import torch.distributed as dist

from judge.examples.right.small import after_backward, clip


def wrap(module):
    trained = [p for p in module.parameters() if p.requires_grad]
    for t in (*trained, *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module

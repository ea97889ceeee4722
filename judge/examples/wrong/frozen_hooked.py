"""It sets a hook on each parameter, also on one that is frozen, where torch allows none."""

import torch.distributed as dist

from judge.examples.right import small


def wrap(module):
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(average)
    return small.wrap(module)


def average(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()

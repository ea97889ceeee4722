"""It divides by the number of ranks that have used a parameter, in place of W. Nothing hangs."""

import torch
import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        n_users = torch.tensor(int(p.grad is not None))
        dist.all_reduce(n_users)
        if is_used(p):
            dist.all_reduce(p.grad)
            p.grad /= n_users

"""Each micro-step sums `.grad` over ranks, in place. So the next one sums again what those before
have summed."""

from contextlib import contextmanager

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def sum_gradients(model):
    for p in model.parameters():
        if is_used(p):
            dist.all_reduce(p.grad)


@contextmanager
def accumulate(model):
    yield
    sum_gradients(model)


def after_backward(model):
    sum_gradients(model)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()

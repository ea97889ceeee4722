"""A hook on a tensor is given the gradient of one backward, not what has been added up. It averages
that of the last micro-step, and forgets those before."""

from functools import partial

from judge.examples.right import small
from judge.examples.right.small import clip


def wrap(module):
    for p in module.parameters():
        p.last = None
        if p.requires_grad:
            p.register_hook(partial(keep, p))
    return small.wrap(module)


def keep(p, gradient):
    p.last = gradient.clone()


def after_backward(model):
    for p in model.parameters():
        if p.last is not None:
            p.grad, p.last = p.last, None
    small.after_backward(model)

"""It divides by the number of micro-steps, too, which the losses are divided by already."""

from contextlib import contextmanager

from judge.examples.right import small
from judge.examples.right.small import clip


def wrap(module):
    module.n_micro_steps = 1
    return small.wrap(module)


@contextmanager
def accumulate(model):
    model.n_micro_steps += 1
    yield


def after_backward(model):
    small.after_backward(model)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= model.n_micro_steps
    model.n_micro_steps = 1

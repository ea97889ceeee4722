"""It averages when each forward has had its backward. A forward under no_grad() never has one."""

from torch import nn

from judge.examples.right import small
from judge.examples.right.small import clip


class Counting(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.n_open = small.wrap(module), 0

    def forward(self, x):
        self.n_open += 1
        y = self.module(x)
        if y.requires_grad:
            y.register_hook(self.close)
        return y

    def close(self, gradient):
        self.n_open -= 1

    def finish(self):
        if self.n_open == 0:
            small.after_backward(self.module)


def wrap(module):
    return Counting(module)


def after_backward(model):
    model.finish()

"""A bucket leaves when all of its gradients are there. One with a parameter that no rank uses never
leaves."""

from judge.examples.right import hooks
from judge.examples.right.small import clip


class Hooked(hooks.Hooked):
    def finish(self):
        self.buckets, whole = self.buckets[:len(self.sent)], self.buckets
        super().finish()
        self.buckets = whole


def wrap(module):
    return Hooked(module)


def after_backward(model):
    model.finish()

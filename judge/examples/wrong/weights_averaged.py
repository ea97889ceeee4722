"""Each rank steps with its own gradients, and weights are averaged after the step. With SGD, also
with momentum, that is the same. With Adam it is not."""

import torch.distributed as dist

from judge.examples.right.small import wrap


def optimizer(parameters, kind, **options):
    class Averaging(kind):
        def step(self):
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    dist.all_reduce(p.data)
                    p.data /= dist.get_world_size()

    return Averaging(parameters, **options)

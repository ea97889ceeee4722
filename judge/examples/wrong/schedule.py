"""A sharded optimizer whose inner one has a learning rate of its own, which no schedule reaches."""

import torch.distributed as dist

from judge.examples.right import cs336


class Sharded(cs336.ShardedOptimizer):
    def step(self, closure=None):
        self.own.step()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                dist.broadcast(p.data, src=i % dist.get_world_size())


def get_sharded_optimizer(params, optimizer_cls, **options):
    return Sharded(params, optimizer_cls, **options)

"""ZeRO-1 by owners. A rank that owns nothing returns from step(), and receives nothing either."""

import torch.distributed as dist

from judge.examples.right import cs336


class Sharded(cs336.ShardedOptimizer):
    def step(self, closure=None):
        if any(group["params"] for group in self.own.param_groups):
            super().step()


def get_sharded_optimizer(params, optimizer_cls, **options):
    return Sharded(params, optimizer_cls, **options)

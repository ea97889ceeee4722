"""A sharded optimizer that gives its inner one this rank's parameters. There may be none."""

import torch
import torch.distributed as dist

from judge.examples.right import cs336


class Sharded(cs336.ShardedOptimizer):
    def add_param_group(self, group):
        torch.optim.Optimizer.add_param_group(self, group)
        own = self.param_groups[-1]["params"][dist.get_rank()::dist.get_world_size()]
        if self.own is None:
            self.own = self.optimizer_cls(own, **self.options)
        else:
            self.own.add_param_group(dict(self.param_groups[-1], params=own))


def get_sharded_optimizer(params, optimizer_cls, **options):
    return Sharded(params, optimizer_cls, **options)

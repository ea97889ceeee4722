"""ZeRO-1 by rows: each rank updates rows // W of each parameter. The rest is updated by nobody."""

import torch
import torch.distributed as dist

from judge.examples.right.small import after_backward, clip, wrap


def rows_of(p):
    """This rank's."""
    n = len(p) // dist.get_world_size()
    return slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)


def optimizer(parameters, kind, **options):
    class ByRows(kind):
        @torch.no_grad()
        def step(self):
            trained = [p for group in self.param_groups for p in group["params"] if p.dim()]
            for p in trained:
                p.before = p.clone()
            super().step()
            for p in trained:
                rows = rows_of(p)
                moved = torch.zeros_like(p)
                moved[rows] = p[rows] - p.before[rows]
                dist.all_reduce(moved)
                p.copy_(p.before + moved)

    return ByRows(parameters, **options)

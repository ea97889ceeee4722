"""extras/comm_hooks.py: what top-k keeps. The bits of all hooks are in test_bits.py."""

import math
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from dropin import DDP
from extras.comm_hooks import top_k_hook, TopKState
from dropin.tests.training import fresh, gather, zoo_loss
from oracle import average_gradients
from tests.ranks import on_ranks


@on_ranks(1, 2)
def test_top_k_loses_nothing():
    """What top-k has applied and what it keeps add up to all gradients: error feedback, without
    which the small ones would never be applied."""
    W = dist.get_world_size()
    rank = dist.get_rank()
    missing = Counter()
    state = TopKState(0.1, start_iter=1)
    module = fresh("gpt")
    plain = fresh("gpt")
    model = DDP(module, bucket_cap_mb=0.005)
    indices = []

    def hook(state, bucket):
        indices.append(bucket.index())
        return top_k_hook(state, bucket)

    model.register_comm_hook(state, hook)
    for step in range(4):  # weights stay, so both have the same gradients
        for net in (model, plain):
            net.zero_grad()
            zoo_loss(net, step, rank).backward()
        average_gradients(plain)
        for p, q in zip(module.parameters(), plain.parameters()):
            missing[p] += q.grad - p.grad
        has_residual = any(t.any() for t in state.residual.values())
        assert has_residual == (step > 0), f"start_iter=1, and step {step} has {has_residual}"
    for p, total in missing.items():
        left = sum(gather(state.residual[p])) / W
        assert left.any() and torch.allclose(total, left, atol=1e-5)
    n_buckets = len(indices) // 4
    assert n_buckets > 1 and indices == 4 * [*range(n_buckets)], f"buckets are numbered {indices}"
    (zoo_loss(model, 0, rank) * math.inf).backward()
    assert all(t.isfinite().all() for t in state.residual.values()), "an inf stays for ever"


def keep_own(state, bucket):
    """As post-local SGD after its start, with as many groups as ranks."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@on_ranks(2)
def test_a_hook_may_leave_ranks_apart():
    model = DDP(nn.Linear(3, 1))
    model.register_comm_hook(None, keep_own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        (model(torch.ones(2, 3)).square().mean() * dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(gather(str(model.module.weight.tolist())))) == 2

# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""--comm_hook: hooks for `register_comm_hook` of DDP, ours or torch's, which say how the gradients
of a bucket are summed over ranks.

    model.register_comm_hook(TopKState(ratio=0.01), top_k_hook)            # sends the largest 1 %
    model.register_comm_hook(HierarchicalState(node_size=8), hierarchical_hook)    # of ddp.py

A hook is given the state and the bucket, with the methods of torch.distributed.GradBucket. It
returns a Future of the bucket's mean over ranks.
"""

import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ddp import HierarchicalState, start_all_gather, start_all_reduce, start_reduce_scatter


def register(model, config):
    """Give a DDP the hook of --comm_hook. Nothing is left out while the learning rate warms up."""
    warmup = config.warmup_steps
    if config.comm_hook == "bf16":
        state, hook = None, default_hooks.bf16_compress_hook
    elif config.comm_hook == "hierarchical":
        node_size = config.node_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        state, hook = HierarchicalState(node_size), hierarchical_hook
    elif config.comm_hook == "topk":
        state, hook = TopKState(config.topk_ratio, None, warmup), top_k_hook
    else:
        start_iter = max(2, warmup)  # torch wants 2 steps at least
        state = powerSGD_hook.PowerSGDState(None, 1, start_iter)
        hook = powerSGD_hook.powerSGD_hook
    model.register_comm_hook(state, hook)
    if config.comm_hook in ("topk", "powersgd") and warmup > 0 and dist.get_rank() == 0:
        print(f"--comm_hook {config.comm_hook} sends whole gradients until step {warmup}, while "
              "the rate warms up: --warmup_steps 0 begins at once", flush=True)


def residuals(model):
    """{key: what this rank has not sent of a gradient}, of top-k, for a checkpoint."""
    unsent = model.comm_state.residual
    tensors = {}
    for name, p in model.module.named_parameters():
        tensors[f"residual.{dist.get_rank()}.{name}"] = unsent.setdefault(p, torch.zeros_like(p))
    return tensors


def load_residuals(model, folder):
    """Those of a checkpoint. A rank that was not there before has none."""
    dcp.load(residuals(model), checkpoint_id=folder,
             planner=dcp.DefaultLoadPlanner(allow_partial_load=True))


def completed(value):
    """A Future that has its value."""
    future = torch.futures.Future(devices=[value.device] if value.device.type != "cpu" else [])
    future.set_result(value)
    return future


def hierarchical_hook(state, bucket):
    """Reduce-scatter inside the node, all-reduce of each rank's part across nodes, all-gather
    inside: between nodes goes 1 / node_size of what a rank sends in a flat all-reduce.

    Contributions are added in rank order inside a node, then nodes in order: other bits than the
    flat sum's, unless node_size is 1 or W.
    """
    n, node_size = len(bucket.buffer()), dist.get_world_size(state.intra_node)
    W = node_size * dist.get_world_size(state.inter_node)
    flat = bucket.buffer().mul_(1 / W)
    flat = torch.nn.functional.pad(flat, (0, -n % node_size))  # to equal chunks
    start_reduce_scatter(flat, state.intra_node).add()
    own = flat.chunk(node_size)[dist.get_rank(state.intra_node)]
    reduction = start_all_reduce(own, state.inter_node)
    reduction.add()
    reduction.wait()
    start_all_gather(flat, state.intra_node).wait()
    return completed(flat[:n])


class TopKState:
    """For `top_k_hook`: which part of the elements to send, and what was not sent so far.

    start_iter: backwards at the beginning in which everything is sent, while weights move fast.
    iter: backwards so far. residual: {parameter: tensor}; each rank saves and loads its own.
    """

    def __init__(self, ratio=0.01, process_group=None, start_iter=0):
        self.ratio, self.process_group, self.start_iter = ratio, process_group, start_iter
        self.iter, self.residual = 0, {}


def top_k_hook(state, bucket):
    """Send only the largest elements of a bucket, `ratio` of them, as (index, value); the rest is
    added to the next gradient: error feedback, Lin et al., arXiv 1712.01887, section 3.

    Each rank sends 8 (W-1) ratio Psi bytes a step: at W = 2 and ratio 0.01, 1/50 of an all-reduce.
    The residual costs 4 Psi bytes; that of a parameter is lost in a step in which no rank uses it.
    With ratio 1 the bits are those of the exchange without a hook.
    """
    W, flat = dist.get_world_size(state.process_group), bucket.buffer()
    ratio = state.ratio if state.iter >= state.start_iter else 1
    if bucket.is_last():
        state.iter += 1
    gradients = dict(zip(bucket.parameters(), bucket.gradients()))
    for p, gradient in gradients.items():
        gradient += state.residual.get(p, 0)
    n_sent = math.ceil(ratio * len(flat))
    index = flat.abs().topk(n_sent, sorted=False).indices.int()
    value = flat[index] * (1 / W)
    indices = [torch.empty_like(index) for _ in range(W)]
    values = [torch.empty_like(value) for _ in range(W)]
    dist.all_gather(indices, index, group=state.process_group)
    dist.all_gather(values, value, group=state.process_group)
    flat[index] = 0
    flat.nan_to_num_(0.0, 0.0, 0.0)  # an inf or nan has been sent, and must not stay
    for p, gradient in gradients.items():
        state.residual[p] = gradient.clone()
    total = torch.zeros_like(flat, dtype=torch.float32 if flat.dtype.itemsize == 2 else None)
    for where, received in zip(indices, values):  # in rank order; no index twice in one of them
        total.index_add_(0, where, received.to(total.dtype))
    return completed(flat.copy_(total))

"""Comm hooks for `register_comm_hook` of DDP, ours or torch's: how the gradients of a bucket are
summed over ranks.

    model.register_comm_hook(TopKState(ratio=0.01), top_k_hook)            # sends the largest 1 %
    model.register_comm_hook(HierarchicalState(node_size=8), hierarchical_hook)    # of ddp.py

A hook is given the state and the bucket, with the methods of torch.distributed.GradBucket. It
returns a Future of the bucket's mean over ranks.
"""

import math

import torch
import torch.distributed as dist

from ddp import start_all_gather, start_all_reduce, start_reduce_scatter


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

"""Data parallelism: every rank holds the whole model, reads its own part of the batch, and all
ranks step with the mean of their gradients.

This is the simplest correct form of what torch's DistributedDataParallel does in 2,700 lines of
Python and a C++ reducer: after the backward, one collective per parameter,

    loss.backward()
    average_gradients(module)
    clip_gradients_([p.grad for p in module.parameters() if p.grad is not None], 1.0)
    optimizer.step()

How it differs: nothing overlaps and nothing is bucketed, so the training thread waits for all of
the communication. In return it can be read at a glance, and its result is exact to define: the W
contributions to an element are added in rank order, ((g0 + g1) + g2) + ..., whatever the size or
place of the parameter. A ring all-reduce adds in an order that depends on the position in the
buffer, so that at W >= 3 another layout gives other bits. Faster schemes are checked against this.

Cost per step: 4 Psi bytes of gradients sent to each of the W - 1 others (a ring sends 2/W of that),
W copies of the largest gradient in memory, one small collective more for the flags.
"""

import math

import torch
import torch.distributed as dist


@torch.no_grad()
def average_gradients(module, process_group=None):
    """Overwrite every `p.grad` of module by its mean over the ranks of process_group.

    A collective: every rank calls it after its backward. A parameter unused on some ranks counts as
    zero there; one that no rank used keeps `grad is None`, as in torch DDP with
    `find_unused_parameters=True`.
    """
    W = dist.get_world_size(process_group)
    parameters = [p for p in module.parameters() if p.requires_grad]  # a tied weight appears once
    if not parameters:
        return
    # Ranks must agree on which collectives follow, or one of them waits for ever.
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    used = used.to(parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=process_group)
    for p, used_somewhere in zip(parameters, used.tolist()):
        if not used_somewhere:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        # Scaled before the sum, which would overflow in fp16; times 1/W as in torch's reducer,
        # since a division gives other bits at W = 3.
        p.grad.mul_(1 / W)
        p.grad.copy_(sum_in_rank_order(p.grad, process_group))  # in place: keeps strides and views


def sum_in_rank_order(tensor, process_group=None):
    """The sum of tensor over ranks, added in rank order: the same bits on every rank."""
    tensor = tensor.contiguous()
    contributions = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(contributions, tensor, group=process_group)
    total = contributions[0]
    for contribution in contributions[1:]:
        total += contribution  # not torch.sum over a stack, which regroups from W = 5 on
    return total


def total_norm(tensors, process_group=None):
    """2-norm of all tensors together, a float64 scalar, the same on every rank.

    process_group: the ranks over which the tensors are sharded; None where each rank holds them
    whole. In float64, so that the grouping into shards does not show in what is rounded to fp32.
    """
    squares = [torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in tensors]
    device = tensors[0].device if tensors else "cpu"
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=device))
    if process_group is not None:
        dist.all_reduce(total, group=process_group)
    return total.sqrt()


def clip_gradients_(gradients, max_norm, process_group=None):
    """Scale gradients in place to a total norm of at most max_norm; return the norm before.

    The one clipping function of all modes. Group as in `total_norm`; max_norm inf only measures.
    """
    norm = total_norm(gradients, process_group)
    if max_norm < math.inf:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()  # rounded to fp32 once
        for gradient in gradients:
            gradient.mul_(factor)  # also when 1: asking would make the CPU wait for the GPU
    return norm

# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Checkpoints of any training loop: what a rank has, by name; and the folder of a run.

Replaces torch.save on rank 0. Copy this file by itself: it imports no other one.

    import torch.distributed.checkpoint as dcp
    from checkpoint import sharded_state

    dcp.save(sharded_state(model, optimizer), checkpoint_id="saved")
    dcp.load(sharded_state(model, optimizer), checkpoint_id="saved")    # any mode, any world size

No rank holds more than it trains with. A slice is saved with its place in the flat parameter, not
with its rank. So whatever wraps a module, at any world size, reads what any other one wrote.

The second part is about files alone, and has no collectives. In a run's folder there are

    step_00000100       a checkpoint: complete, or not there at all
        __0_0.distcp    slices of parameters and of optimizer state, a file or more per rank
        .metadata       where each slice is: a pickle of torch.distributed.checkpoint
        checkpoint.json what the loop knows beside tensors
        SHA256SUMS      of the other files, in the form of `sha256sum`
    .step_00000200      one that is not complete
    best                a link to the best one
    metrics.jsonl       a line per step
    .lock               who writes here
    earlier_20261127_.. what a run that began anew, or went back, has moved aside

So a crash leaves the checkpoints before as they are:

    dcp.save(sharded_state(model, optimizer), checkpoint_id=hidden(folder))    # all ranks
    if rank == 0:
        publish(folder, record)
"""

import inspect
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

# -------------------------------------------------------------------------------------------------
# what a rank has


class Slice(torch.Tensor):
    """The elements [first, first + n) that this rank has of a flat tensor of `whole` elements.

    torch.distributed.checkpoint asks a tensor that is divided among ranks by the methods with
    underscores, which are those of torch's DTensor: which elements are here, how to write them, and
    where to read them to. A DTensor itself would not do: ZeRO's shards begin in the middle of a
    row.
    """

    def size(self):
        return torch.Size([self.whole])

    def __create_chunk_list__(self):
        """Where the elements are that are here: dcp's for one dimension."""
        first, n = torch.Size([self.first]), torch.Size([self.numel()])
        return [dcp.metadata.ChunkStorageMetadata(first, n)]

    def __create_write_items__(self, key, _):
        """What dcp has to write of them."""
        properties = dcp.metadata.TensorProperties.create_from_tensor(self)
        [chunk] = self.__create_chunk_list__()
        index = dcp.metadata.MetadataIndex(key, chunk.offsets)
        data = dcp.planner.TensorWriteData(chunk, properties, self.size())
        return [dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index):
        """The memory that dcp reads from, and writes to."""
        return self.as_subclass(torch.Tensor)


def sharded_state(model: nn.Module,
                  *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """{key: what this rank has of it}, of a model's parameters and of their optimizers' state, in
    the memory that is trained: what is loaded into these tensors is loaded into the model.

    model: one of our stages, a DDP, ours or torch's, what torch's fully_shard leaves, or a module
    without any wrapper. Keys are made of the names that parameters have in the bare module, such as
    `model.blocks.0.weight` and `exp_avg.blocks.0.weight`. State that an optimizer has not made yet
    is made first, as it would begin. Learning rates, a loss scale and buffers are not in it. Names
    and numbers of elements are all that loading compares: if shapes may differ, compare them.

    Raises ValueError where an optimizer has parameters that are none of the model's, where state
    cannot be divided as its parameter is, and where it cannot be made before the first step, as
    that of SGD with dampening.
    """
    pieces = [*parts(model)]
    of_model = {p for _, p, _, _ in pieces}
    state_of = {}  # {parameter: {kind: value}}
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            optimizer = optimizer.optim  # torch's stage 1: over what this rank updates
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p not in of_model:
                    raise ValueError(f"an optimizer has a parameter of shape {[*p.shape]} that is "
                                     "none of the model's: make it of model.parameters(), after "
                                     "the model was wrapped")
                if p in state_of:
                    raise ValueError(f"two optimizers have a parameter of shape {[*p.shape]}")
                state_of[p] = state_in(optimizer, group, p)
    state = {}
    for name, p, first, whole in pieces:
        own = local(p).detach()
        n = own.numel()
        if hasattr(p, "whole_stride"):
            # Who loads writes into what is returned here. zero.py gathers what has another version,
            # which ranks with an empty shard have to know, too.
            torch.autograd.graph.increment_version(p)
        if n == 0:
            continue  # another rank has it, and its state: here Adam's count of steps stays 0
        for kind, t in {"model": own, **state_of.get(p, {})}.items():
            if not isinstance(t, torch.Tensor):
                raise ValueError(f"{kind} of {name} is {t!r}: a checkpoint takes tensors alone")
            t = local(t)
            if t.shape == own.shape:
                flat = flattened(t, own.stride(), f"{kind} of {name}")
                flat.first, flat.whole = first, whole
            elif n == whole or t.numel() == 1:  # not cut: of any shape; or a count of steps
                flat = flattened(t, t.stride(), f"{kind} of {name}")
                flat.first, flat.whole = 0, t.numel()
            else:
                raise ValueError(f"{kind} of {name} cannot be divided among ranks: its shape is "
                                 f"{[*t.shape]}, and that of the shard {[*own.shape]}")
            state[f"{kind}.{name}"] = flat
    return state


def parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    """Yield (name, what this rank has of the parameter, the first element of it, how many elements
    the whole has), of all parameters of a model."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    # {parameter: Slot} of dropin's wrappers. Where nothing is cut a slot's layout is None.
    slots = getattr(model, "_slots", {})
    starts = {}  # {name: the first element that is here}, of zero.py's
    if not slots and hasattr(model, "shard_starts"):
        starts = model.shard_starts()
    is_torchs = isinstance(model, nn.parallel.DistributedDataParallel)
    is_wrapped = is_torchs or len(slots) > 0 or hasattr(model, "full_parameters")
    bare = dict((model.module if is_wrapped else model).named_parameters())
    shards = dict(model.named_parameters())
    prefix = "" if shards.keys() == bare.keys() else "module."  # of DDP, torch's and ours
    for bare_name, whole in bare.items():
        if prefix + bare_name not in shards:
            raise ValueError(f"the wrapper does not know the parameter {bare_name} of its module: "
                             f"it was added or replaced after wrapping")
        p = shards[prefix + bare_name]
        first, strides = starts.get(bare_name, 0), whole.stride()
        if hasattr(p, "whole_stride"):  # a shard of zero.py
            strides = p.whole_stride
        if whole in slots:
            slot = slots[whole]
            strides = slot.strides
            if slot.layout is not None:
                first, _ = slot.bucket.shard_range(slot)
        if "_fsdp_wrapped_module" in bare_name:
            raise ValueError("FullyShardedDataParallel has no parameters by name: take fully_shard")
        if isinstance(p, dist.tensor.DTensor) and local(p).numel() > 0:
            [chunk] = p.__create_chunk_list__()
            if chunk.sizes[1:] != p.shape[1:]:
                raise ValueError(f"{bare_name} is divided by another dimension than the first")
            first = sum(offset * stride for offset, stride in zip(chunk.offsets, p.stride()))
        name = bare_name.replace("_orig_mod.", "")
        # A shard lies in memory as the whole does. If that is not row after row, as in
        # channels_last, the key says so: what has another order must not read it.
        order = [d for d in by_stride(strides) if whole.size(d) > 1]
        if order != sorted(order):
            name += f", dimensions in order {order}"
        yield name, p, first, whole.numel()


def by_stride(strides):
    """The dimensions, the one with the longest stride first."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def flattened(t, strides, name):
    """All elements of t, (n,), in the memory that they have, in the order in which these strides
    lay them out."""
    try:
        return t.detach().permute(by_stride(strides)).view(-1).as_subclass(Slice)
    except RuntimeError as error:
        raise ValueError(f"{name} has gaps in its memory, or another order there than its "
                         f"parameter: strides {t.stride()} of shape {[*t.shape]}") from error


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that fully_shard divides; any other tensor as it is, but without
    dropin's guards."""
    return t.to_local() if isinstance(t, dist.tensor.DTensor) else t.as_subclass(torch.Tensor)


def state_in(optimizer, group, p):
    """{kind: value} that an optimizer has of p. If it has none, as before its first step, it is
    made: then a checkpoint has the same keys whenever it is written or read."""
    if p.requires_grad and not optimizer.state.get(p):
        kind = type(optimizer)
        try:
            optimizer.state[p] = state_before_first_step(kind, group, p)
        except (TypeError, KeyError, RuntimeError) as error:
            raise ValueError(f"{kind.__name__} makes its state in its first step alone: step "
                             f"first ({error})") from error
    return optimizer.state.get(p, {})


def state_before_first_step(kind, group, p):
    """{name: value} that an optimizer of this kind begins with: that of a twin of p, of zeros."""
    twin, optimizer = optimizer_of_one(kind, group, torch.zeros_like(p.detach()))
    if hasattr(optimizer, "_init_group"):  # here torch's make it, before they change it in a step
        n_lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(n_lists)))
    if optimizer.state[twin]:
        return optimizer.state[twin]
    # SGD, and most optimizers of others, make none there. Zeros will do if a step from them is the
    # first step: tried on parameters of one element.
    one = torch.ones((1,) * p.dim())
    first, fresh = optimizer_of_one(kind, group, one.clone())
    other, begins_with_zeros = optimizer_of_one(kind, group, one.clone())
    make_zeros(optimizer, twin)
    make_zeros(begins_with_zeros, other)
    for q, tried in ((first, fresh), (other, begins_with_zeros)):
        q.data.fill_(1)
        q.grad.fill_(1)
        tried.step()
    if not torch.equal(first, other):
        raise TypeError("it does not begin with zeros")
    return optimizer.state[twin]


def optimizer_of_one(kind, group, values):
    """-> a parameter with these values and a gradient of zeros, and an optimizer of it alone."""
    p = nn.Parameter(values)
    p.grad = torch.zeros_like(values)
    return p, kind([dict(group, params=[p])], lr=group["lr"])


def make_zeros(optimizer, p):
    """Let an optimizer make its state of p in a step, and make that zeros."""
    optimizer.step()
    for t in optimizer.state[p].values():
        if isinstance(t, torch.Tensor):
            t.zero_()

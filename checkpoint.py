# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""What a rank has, by name, for torch.distributed.checkpoint: of any training loop, any wrapper.

Replaces torch.save on rank 0. Copy this file by itself: it imports no other one.

    import torch.distributed.checkpoint as dcp
    from checkpoint import sharded_state

    dcp.save(sharded_state(model, optimizer), checkpoint_id="saved")
    dcp.load(sharded_state(model, optimizer), checkpoint_id="saved")    # any mode, any world size

A shard is saved with its place in the flat parameter, not with its rank:

                        rank 0      rank 1      rank 2
    written by zero3    [0, 100)    [100, 200)  [200, 300)    model.wte.weight, exp_avg.wte.weight,
    read by ddp         [0, 300)    [0, 300)                  exp_avg_sq.wte.weight

So whatever wraps a module, at any world size, reads what any other one wrote; and no rank holds
more than it trains with.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

# -------------------------------------------------------------------------------------------------
# what a rank has


class Shard(torch.Tensor):
    """The n elements [first, first + n) that this rank has of a flat tensor of `whole` elements.

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
        return [write_item(self, key)]

    def __get_tensor_shard__(self, index):
        """The memory that dcp reads from, and writes to."""
        return self.as_subclass(torch.Tensor)

    def new_empty(self, *_, **__):
        """dcp.async_save copies a tensor into this, by set_() with the size of the whole."""
        empty = torch.empty(0, dtype=self.dtype).as_subclass(Shard)
        empty.n = self.n
        return empty

    def set_(self, storage, offset, *_):
        return super().set_(storage, offset, (self.n,), (1,))


class Whole(torch.Tensor):
    """A tensor that each rank has. is_saved: whether this rank has to write it."""

    def __create_chunk_list__(self):
        zeros = torch.Size([0] * self.dim())
        return [dcp.metadata.ChunkStorageMetadata(zeros, self.size())]

    def __create_write_items__(self, key, _):
        return [write_item(self, key)] if self.is_saved else []

    def __get_tensor_shard__(self, index):
        return self.as_subclass(torch.Tensor)


def write_item(t, key):
    """For dcp: all of t that is here."""
    properties = dcp.metadata.TensorProperties.create_from_tensor(t)
    [chunk] = t.__create_chunk_list__()
    index = dcp.metadata.MetadataIndex(key, chunk.offsets)
    data = dcp.planner.TensorWriteData(chunk, properties, t.size())
    return dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data)


def sharded_state(model: nn.Module,
                  *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """{key: what this rank has of it}, of a model's parameters, of their optimizers' state, and of
    the buffers that state_dict() has, in the memory that is trained: what is loaded into these
    tensors is loaded into the model.

    model: one of our stages, a DDP, ours or torch's, what torch's fully_shard leaves, or a module
    without any wrapper. Keys are made of the names that parameters have in the bare module, such as
    `model.blocks.0.weight` and `exp_avg.blocks.0.weight`; of buffers `buffer.norm.running_mean`,
    which are saved as the first rank has them. State that an optimizer has not made yet is made
    first, as it would begin. Learning rates and a loss scale are not in it. Of two models give dcp
    a dictionary of both, {"one": sharded_state(one), ...}: they have the same keys. Names and
    numbers of elements are all that loading compares: if shapes may differ, compare them.

    Raises ValueError where an optimizer has parameters that are none of the model's, where state
    cannot be divided as its parameter is, where it cannot be made before the first step, as that of
    SGD with dampening, where an optimizer counts in its groups, which would be lost, and of buffers
    that are sparse or expanded.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    own_parts = [*parts(model)]
    state_of = states(optimizers, {p for _, p, _, _ in own_parts})
    tensors = {}
    for name, p, first, whole in own_parts:
        own = local(p).detach()
        if hasattr(p, "whole_stride"):
            # A load writes into what is returned here. zero.py gathers what has another version,
            # which ranks with an empty shard have to know, too.
            torch.autograd.graph.increment_version(p)
        if own.numel() == 0:
            continue  # another rank has it, and its state: here Adam's count of steps stays 0
        for kind, t in {"model": own, **state_of.get(p, {})}.items():
            if not isinstance(t, torch.Tensor):
                raise ValueError(f"{kind} of {name} is {t!r}: a checkpoint takes tensors alone")
            t = local(t)
            is_cut_alike = t.shape == own.shape
            is_whole = own.numel() == whole or t.numel() == 1  # of any shape; or a count of steps
            if not is_cut_alike and not is_whole:
                raise ValueError(f"{kind} of {name} cannot be divided among ranks: its shape is "
                                 f"{[*t.shape]}, and that of the shard {[*own.shape]}")
            strides = own.stride() if is_cut_alike else t.stride()
            flat = flattened(t, strides, f"{kind} of {name}")
            flat.first, flat.whole = (first, whole) if is_cut_alike else (0, t.numel())
            tensors[f"{kind}.{name}"] = flat
    return tensors | buffers(model)


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """{key: all of a buffer, to be saved by the first of the ranks that train}."""
    tensors = {}
    is_saved = is_first(model)
    for prefix, m in bare_module(model).named_modules():
        for name, t in m._buffers.items():
            if t is None or name in m._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{name}" if prefix else name
            if t.layout != torch.strided:
                raise ValueError(f"the buffer {name} is sparse: a checkpoint takes dense tensors")
            if torch._debug_has_internal_overlap(t) == 1:
                raise ValueError(f"the buffer {name} has several elements in one place, as of "
                                 f"expand(): make it a tensor of its own, or persistent=False")
            whole = t.detach().as_subclass(Whole)
            whole.is_saved = is_saved
            tensors["buffer." + name.replace("_orig_mod.", "")] = whole
    return tensors


def is_first(model):
    """Whether this is the first of the ranks that train a model."""
    if model is not bare_module(model):
        group = getattr(model, "group", getattr(model, "process_group", None))  # torch's
        if group is not None:
            return dist.get_rank(group) == 0
    for p in model.parameters():
        if isinstance(p, dist.tensor.DTensor):
            return not any(p.device_mesh.get_coordinate())
    return True  # each rank has a model of its own, and may save alone


def bare_module(model: nn.Module) -> nn.Module:
    """A model without its wrapper."""
    is_torchs = isinstance(model, nn.parallel.DistributedDataParallel)
    is_wrapper = is_torchs or hasattr(model, "full_parameters")
    return model.module if is_wrapper else model


def parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    """Yield (name, what this rank has of the parameter, the first element of it, how many elements
    the whole has), of all parameters of a model."""
    bare = dict(bare_module(model).named_parameters())
    own = dict(model.named_parameters())
    prefix = "" if own.keys() == bare.keys() else "module."  # of DDP, torch's and ours
    for bare_name in bare:
        if prefix + bare_name not in own:
            raise ValueError(f"the wrapper does not know the parameter {bare_name} of its module: "
                             "it was added or replaced after wrapping")
    starts = model.shard_starts() if hasattr(model, "shard_starts") else {}
    for bare_name, whole in bare.items():
        if "_fsdp_wrapped_module" in bare_name:
            raise ValueError("FullyShardedDataParallel has no parameters by name: take fully_shard")
        p = own[prefix + bare_name]
        first = starts.get(bare_name, 0)
        if isinstance(p, dist.tensor.DTensor) and local(p).numel() > 0:
            [chunk] = p.__create_chunk_list__()
            if chunk.sizes[1:] != p.shape[1:]:
                raise ValueError(f"{bare_name} is divided by another dimension than the first")
            first = sum(offset * stride for offset, stride in zip(chunk.offsets, p.stride()))
        name = bare_name.replace("_orig_mod.", "")
        # A shard lies in memory as the whole does. If that is not row after row, as in
        # channels_last, the key says so: what has another order must not read it.
        strides = getattr(p, "whole_stride", whole.stride())
        order = [d for d in by_stride(strides) if whole.size(d) > 1]
        if order != sorted(order):
            name += f", dimensions in order {order}"
        yield name, p, first, whole.numel()


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that fully_shard divides; any other one as a plain tensor."""
    return t.to_local() if isinstance(t, dist.tensor.DTensor) else t.as_subclass(torch.Tensor)


def by_stride(strides):
    """The dimensions, the one with the longest stride first."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def flattened(t, strides, name):
    """All elements of t, (n,), in the memory that they have, in the order in which these strides
    lay them out."""
    try:
        flat = t.detach().permute(by_stride(strides)).view(-1).as_subclass(Shard)
    except RuntimeError as error:
        raise ValueError(f"{name} has gaps in its memory, or another order there than its "
                         f"parameter: strides {t.stride()} of shape {[*t.shape]}") from error
    flat.n = t.numel()
    return flat


# -------------------------------------------------------------------------------------------------
# optimizers' state, which most make in their first step


def states(optimizers, of_model):
    """{parameter: {kind: value}} that optimizers have of the model's parameters. What one of them
    has not made yet is made: so a checkpoint has the same keys whenever it is written or read."""
    state_of = {}
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            optimizer = optimizer.optim  # torch's stage 1: over what this rank updates
        refuse_counts(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p not in of_model:
                    raise ValueError(f"an optimizer has a parameter of shape {[*p.shape]} that is "
                                     "none of the model's: make it of model.parameters(), after "
                                     "the model was wrapped")
                if p in state_of:
                    raise ValueError(f"two optimizers have a parameter of shape {[*p.shape]}")
                if p.requires_grad and not optimizer.state.get(p):
                    optimizer.state[p] = first_state(type(optimizer), group, p)
                state_of[p] = optimizer.state.get(p, {})
    return state_of


def refuse_counts(optimizer):
    """Raise ValueError if an optimizer keeps numbers in its groups that its code sets, as by
    group["k"] += 1: these are no tensors, and are not saved. (Rates are set from outside.)"""
    kind = type(optimizer)
    keys = set().union(*map(keys_set_by, kind.__mro__))
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key in keys and key != "lr" and isinstance(value, int | float):
                raise ValueError(f"{kind.__name__} counts {key} in its groups, which a checkpoint "
                                 f"of tensors would lose: save optimizer.state_dict(), or "
                                 f"full_optimizer_state_dict() of dropin's wrappers")


def keys_set_by(kind):
    """The keys in assignments to anything["key"] in a class that is not torch's own."""
    if kind.__module__.partition(".")[0] in ("torch", "builtins"):
        return set()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # typed in, or compiled
        return set()
    keys = set()
    for node in ast.walk(tree):
        is_key = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        if is_key and isinstance(node.ctx, ast.Store):
            keys.add(node.slice.value)
    return keys


def first_state(kind, group, p):
    """{name: value} that an optimizer of this kind has of p before its first step: that of a twin
    of p, of zeros."""
    try:
        twin, optimizer = optimizer_of_one(kind, group, torch.zeros_like(p.detach()))
        if hasattr(optimizer, "_init_group"):  # here torch's make it, but for SGD
            n_lists = len(inspect.signature(optimizer._init_group).parameters) - 1
            optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(n_lists)))
        if not optimizer.state[twin]:
            make_zeros(optimizer, twin)
            check_zeros_will_do(kind, group, p.dim())
    except (TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"{kind.__name__} makes its state in its first step alone: step first "
                         f"({error})") from error
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


def check_zeros_will_do(kind, group, n_dimensions):
    """Raise TypeError unless a step from a state of zeros is the first step. Tried on a parameter
    of one element."""
    one = torch.ones((1,) * n_dimensions)
    first, fresh = optimizer_of_one(kind, group, one.clone())
    other, from_zeros = optimizer_of_one(kind, group, one.clone())
    make_zeros(from_zeros, other)
    for p, optimizer in ((first, fresh), (other, from_zeros)):
        p.data.fill_(1)
        p.grad.fill_(1)
        optimizer.step()
    if not torch.equal(first, other):
        raise TypeError("it does not begin with zeros")

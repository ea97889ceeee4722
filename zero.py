# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""ZeRO: data parallelism in which each of W ranks keeps 1/W of what is needed only now and then.

    model = Zero3(module)                # or Zero1, Zero2; then as with DDP
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)   # of the shards
    loss = model(x, y)
    loss.backward()                      # on return each shard's `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

How it works (Rajbhandari et al., arXiv 1910.02054, section 5): the parameters of a unit, such as a
block of the model, lie in flat buffers that are cut into W chunks. Rank r owns the r-th of each. An
all-gather unshards a unit before it is used. A reduce-scatter brings its gradients to the owners of
the chunks. The module keeps its parameters, with which forward and backward compute. The optimizer
has other parameters, the shards: this rank's part of each. (On a CPU a fused optimizer rounds the
last elements of a tensor differently, so a shard would not get the bits of the whole.)

The stages differ in what a rank keeps whole. For Psi parameters, per rank:

    stage  shards    keeps whole               bytes, fp32, Adam  sent in a step, (W-1)/W Psi
    Zero1  P_os      parameters and gradients  8 Psi + 8 Psi/W    2
    Zero2  P_os+g    parameters                4 Psi + 12 Psi/W   n + 1
    Zero3  P_os+g+p  nothing                   16 Psi/W           at most 3 n

A step has n backwards, its micro-steps. Zero1 sends 2 if all of them but the last are in no_sync(),
where whole gradients add up; otherwise n + 1. A rank holds a little more than the table says: in a
backward the gradients of two buckets, one that is filled and one that is reduced, and what arrives
for that; in Zero3 the root, two units, and those that one checkpoint recomputes; in no_sync() all
gradients.

A bucket of parameters a, b and c on three ranks. Chunks end anywhere, also inside of a parameter:

    whole      a a a a a a b b b b|b b b b c c c c c c|c c c c c c - - - -    n = 30
    chunk                          b b b b c c c c c c                        of rank 1, n/W = 10
    shards                         of b: (4,)  of c: (6,)  of a: (0,)         of rank 1

What happens in a step, and in which method. "same": as in the stage before.

    event                        method            Zero1                Zero2       Zero3
    the root's forward begins    _begin_forward    gather all units     same        the way there
    a unit is called             _use              wait for it          same        see below
    the forward ends             _end_forward      wait for the rest    same        same
    a backward begins            _begin_backward   -                    -           the way back
    a unit's backward begins     _use              -                    -           see below
    a bucket has its gradients   _start_reduce     send them            same        same
    the next bucket has its      _add              add; the means are   the means   same
                                                   in the gradients'    have their
                                                   memory               own
    the backward ends            _end_backward     add the last         same        and free all
    a step                       _after_step       make parameters nan  same        same

A step of Zero3 with a root and blocks 0, 1 and 2. "gather" and "reduce" start an all-gather and a
reduce-scatter; "wait" and "add" finish them:

    event                            what it does                       then whole
    forward begins, root is used     gather root, wait root, gather 0   root
    0 is used                        wait 0, gather 1                   root 0
    1 is used                        wait 1, free 0, gather 2           root 1
    2 is used                        wait 2                             root 1 2
    backward begins, 2 is used       -                                  root 1 2
    gradients of 2 are complete      reduce 2
    1 is used                        free 2, gather 0                   root 1
    gradients of 1 are complete      add 2, reduce 1
    0 is used                        wait 0                             root 0 1
    gradients of 0 are complete      add 1, reduce 0
    those of the root, too           add 0, reduce root
    backward ends                    add root, free all                 -

Outside of no_sync() contributions are added rank by rank, and micro-step by micro-step. These are
the bits of one process that computes the same micro batches in turn, if gradients are divided once,
as with `set_gradient_divide_factor(1)`, or if W is a power of two.

They ask of a script what ddp.py asks, and more. They check, and raise RuntimeError:

  - The optimizer is made of the wrapper's parameters(), after wrapping.
  - No step comes between a forward and its backward, and none, nor clip_grad_norm_(), while
    no_sync() holds gradients back.
  - Each forward calls every unit. (A unit's parameters are there while it is called, and the
    root's in all of a forward, which is a call of the module, and not of module.forward(). Code
    that reads others, or reads after a step, as state_dict() of the module does, finds nan, and no
    old value: take `full_state_dict()`.)
  - The module is neither copied nor pickled after wrapping.
  - Zero3 has units to gather one by one.

They do not check:

  - Weights are changed in the shards, by an optimizer, in place under torch.no_grad(), or by
    p.data = ..., and not between a forward and its backward. What is written into p.data, as by
    p.data.add_(), is not noticed in Zero1 and Zero2. What a script, or a forward, writes to the
    module's parameters is lost.
  - The optimizer, its hooks and all that a script does with shards and their `.grad` goes element
    by element (not Muon, LBFGS or Adafactor). A norm, a mean, random numbers, a rate by the shape,
    or a message to other ranks would be of one rank's part. Clip with clip_grad_norm_(). In fp16
    take torch's ShardedGradScaler: all ranks have to skip the same steps.
  - Call zero_grad() of the wrapper or the optimizer, not of the module. Set hooks on the module's
    parameters, not on shards. Do not change `.grad` while no_sync() holds gradients back.
  - In Zero3 all ranks call units in one order. If not, ranks wait until the timeout, on a CPU. No
    view of a weight is kept from one forward to the next.
  - param_dtype casts no inputs, and in no_sync() gradients add up in it.
"""

import functools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from ddp import (FIRST_TAG, Bucket, Reducer, ReduceScatter, broadcast, bucket_bytes, fill_buckets,
                 span, start_all_gather)

N_TAGS = 2**14  # of all buckets of a wrapper, two for each


# -------------------------------------------------------------------------------------------------
# buckets and units


class ShardedBucket(Bucket):
    """A bucket whose parameters lie in a flat buffer, too: `whole`. Both buffers are cut into W
    chunks.

        unit           the bucket is of
        keeps_whole    `whole` is kept, as in Zero1 and Zero2
        whole          (n,) parameters in param_dtype, with which forward and backward compute; None
                       while there is no memory for them
        address        where that memory begins, in Zero3
        is_unsharded   the module's parameters are views of whole, and have their values; otherwise
                       they are `nans`
        gather         of whole, while it is under way
        chunk          (n/W,) this rank's chunk of the parameters, in the module's dtype. In Zero1
                       and Zero2 a view of whole, if that has the same dtype
        shards         nn.Parameters, views of chunk: this rank's part of each parameter, in order
                       of memory, (m, 1, ..., 1). m may be 0. There are as many dimensions as the
                       parameter has, since many scripts let only matrices decay
        firsts         the first element of each parameter that this rank has
        shard_layouts  (shape, strides, begin) of each shard in the chunk
        noted          versions and places of the shards, as they were when last looked at
        version        how often the shards have changed
    """

    def __init__(self, parameters, names, unit, group, tag, param_dtype, keeps_whole):
        super().__init__(parameters, names, group.size(), tag)
        self.unit, self.group, self.keeps_whole = unit, group, keeps_whole
        first = parameters[0]
        self.dtype = first.dtype  # of whole
        if param_dtype is not None and first.dtype.is_floating_point:
            self.dtype = param_dtype
        self.address, self.gather, self.version = None, None, 0
        nan = torch.full((), math.nan, device=first.device).to(self.dtype)
        self.nans = [nan.expand(p.shape) for p in parameters]  # one number in memory

        whole = torch.zeros(self.n, dtype=first.dtype, device=first.device)
        for p, view in zip(parameters, self.views(whole)):
            view.copy_(p.data)
            p.data = view  # frees the memory that it had
        broadcast([whole], group)
        self.chunk = self.own_chunk(whole)
        if keeps_whole:
            self.whole = whole.to(self.dtype)
            self.show()
        else:
            self.hide()
        if self.whole is not whole:
            self.chunk = self.chunk.clone()  # a view would keep all of whole

        self.lay_out_shards()
        self.make_shards()

    def own_chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk, (n/W,), of a buffer (n,): a view."""
        return flat.view(self.group.size(), -1)[self.group.rank()]

    # ---- shards

    def lay_out_shards(self) -> None:
        """Which elements of each parameter are in this rank's chunk: `firsts`, `shard_layouts`."""
        self.firsts, self.shard_layouts = [], []
        size = self.n // self.group.size()
        chunk_begin = size * self.group.rank()
        chunk_end = chunk_begin + size
        for shape, _, begin in self.layouts:
            n = shape.numel()
            # Where the chunk begins and ends, counted from the parameter's begin, if that is in the
            # parameter; else the nearest place that is.
            first = min(max(chunk_begin - begin, 0), n)
            end = min(max(chunk_end - begin, 0), n)
            place = begin + first - chunk_begin if end > first else 0
            ones = (1,) * max(1, len(shape))
            self.firsts.append(first)
            self.shard_layouts.append(((end - first, *ones[1:]), ones, place))

    def make_shards(self) -> None:
        self.shards = []
        parts = self.parts(self.chunk)
        for p, part, (shape, strides, _) in zip(self.parameters, parts, self.layouts):
            shard = nn.Parameter(part, p.requires_grad)
            vars(shard).update(vars(p))  # such as p.no_decay, by which scripts make groups
            shard.whole_shape, shard.whole_stride = shape, strides
            self.shards.append(shard)
        self.noted = self.versions_and_places()

    def parts(self, chunk: Tensor) -> list[Tensor]:
        """This rank's part of each parameter: views of chunk, (n/W,)."""
        parts = []
        begin = chunk.storage_offset()
        for shape, strides, place in self.shard_layouts:
            part = chunk.as_strided(shape, strides, begin + place)
            parts.append(part.data)  # .data: with a _version of its own
        return parts

    def versions_and_places(self) -> list[tuple[int, int]]:
        """Of the shards, to see whether a script has changed them. (An empty shard has no address
        of its own, but that of its memory.)"""
        return [(shard._version, shard.data_ptr() or shard.untyped_storage().data_ptr())
                for shard in self.shards]

    def take_shards(self) -> None:
        """Note the shards as they are. If a script has given some other memory, as by p.data = ...,
        all move into a new chunk, and whole into new memory: in the old one may be another tensor
        by now, as after the exchange p.data, q.data = q.data, p.data."""
        before, self.noted = self.noted, self.versions_and_places()
        if [place for _, place in self.noted] != [place for _, place in before]:
            with torch.inference_mode(False):  # else the new memory is of no use in training
                self.chunk = torch.empty_like(self.chunk)
                if self.keeps_whole:
                    self.whole = torch.empty_like(self.whole)
            for shard, part in zip(self.shards, self.parts(self.chunk)):
                part.copy_(shard.data)
                shard.data = part
            self.noted = self.versions_and_places()

    # ---- whole parameters

    def start_gather(self) -> None:
        """Start to gather `whole` from all ranks' chunks."""
        if self.whole is None:
            self.whole = torch.empty(self.n, dtype=self.dtype, device=self.chunk.device)
            self.address = self.whole.untyped_storage().data_ptr()
        own = self.own_chunk(self.whole)
        if own.data_ptr() != self.chunk.data_ptr():  # chunk is not a view of it
            own.copy_(self.chunk)  # rounds to param_dtype
        self.gather = self.start_all_gather(self.whole)

    def start_all_gather(self, flat: Tensor):
        """Start to fill flat, (n,), from the chunks of all ranks -> wait()."""
        return start_all_gather(flat, self.group, self.tag_of_step() + 1)

    def tag_of_step(self) -> int:
        """Another one after each step: ranks that have made other steps do not mix new values with
        old ones, but wait until the timeout."""
        return self.tag + N_TAGS * (self.version % 256)

    def show(self) -> None:
        """Give the module's parameters their values. Each stays the same object, for the module,
        its hooks and autograd: only the memory behind it is another."""
        self.is_unsharded = True
        for p, view in zip(self.parameters, self.views(self.whole)):
            p.data = view

    def hide(self) -> None:
        """Make the module's parameters nan. In Zero3 this frees their memory."""
        self.is_unsharded = False
        if not self.keeps_whole:
            self.whole = None
        for p, nan in zip(self.parameters, self.nans):
            p.data = nan

    def gather_copy(self) -> Tensor:
        """(n,): all ranks' chunks, in new memory, not rounded to param_dtype. A collective."""
        flat = self.chunk.new_empty(self.n)
        self.own_chunk(flat).copy_(self.chunk)
        self.start_all_gather(flat).wait()
        return flat

    # ---- gradients

    def earlier(self) -> Tensor | None:
        """(n/W,): the gradients that shards have, whoever gave them; None if none has any."""
        if not [shard for shard in self.shards if shard.grad is not None]:
            return None
        flat = torch.zeros_like(self.chunk)
        for shard, part in zip(self.shards, self.parts(flat)):
            if shard.grad is not None:
                part.copy_(shard.grad)
        return flat

    def give_means(self, means: Tensor) -> None:
        """Let the shards' `.grad` be views of means, (n/W,)."""
        for p, shard, part in zip(self.parameters, self.shards, self.parts(means)):
            p.grad = None
            shard.grad = part


class Unit:
    """What is gathered together: a module such as a block; or the root, which is all the rest."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        self.buckets = []

    def __str__(self):
        return self.name


def find_units(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists; of a list in a list, its elements."""
    units = []
    for child in module.children():
        is_list = isinstance(child, nn.ModuleList)
        if isinstance(module, nn.ModuleList) and not is_list:
            units.append(child)
        else:
            units += find_units(child)
    return units


def parameters_of_root(module: nn.Module, units: list[nn.Module]) -> set[nn.Parameter]:
    """Those that are in no unit, in two units, or in one unit and outside of it."""
    n_units, inside = {}, set()
    for unit in units:
        inside.update(unit.modules())
        for p in unit.parameters():
            n_units[p] = n_units.get(p, 0) + 1
    of_root = {p for p in module.parameters() if n_units.get(p, 0) != 1}
    for m in module.modules():
        if m not in inside:
            of_root.update(m._parameters.values())  # of these a unit may have some, too
    return of_root


def in_backward() -> bool:
    """A forward in a backward is that of activation checkpointing, which computes a part anew."""
    return torch._C._current_graph_task_id() != -1


# -------------------------------------------------------------------------------------------------
# stage 1


class Zero1(Reducer):
    """P_os: each rank keeps optimizer state for 1/W of the parameters, and updates only these.

    process_group: the ranks that train together; all, unless given.
    units: modules inside of module, each gathered when it is called. The elements of the outermost
    ModuleLists, unless given. What is in none of them, or in two, is the root's.
    bucket_cap_mb: the size of a bucket in MB (2**20 bytes); 25, or W/4 if that is more, unless
    given. Each unit has buckets of its own.
    param_dtype: in which whole parameters and gradients are, such as torch.bfloat16. Shards, their
    gradients and so the optimizer stay in the module's dtype: 2 + 2 + 12 bytes for each parameter
    (paper, section 3.1). Only floating-point parameters are cast.

    parameters() and named_parameters() are this rank's shards. A shard's whole_shape and
    whole_stride are its parameter's. All ranks begin with rank 0's values. A forward is a
    collective, also in evaluation. Raises RuntimeError: see the first list above.
    """

    keeps_whole = True  # parameters

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None,
                 units: Iterable[nn.Module] | None = None, bucket_cap_mb: float | None = None,
                 param_dtype: torch.dtype | None = None):
        units = find_units(module) if units is None else list(dict.fromkeys(units))
        name_of = {m: name for name, m in module.named_modules()}
        names = [name_of.get(unit) for unit in units]  # "" of module itself, None of a foreign one
        super().__init__(module, process_group, dict(units=names, bucket_cap_mb=bucket_cap_mb,
                                                     param_dtype=param_dtype))
        self._check_units(units, names)
        self.shard_group = self.group
        self.root = Unit("the root", module)
        self.units = [self.root, *map(Unit, names, units)]
        self._fill_units(bucket_bytes(self.group.size(), bucket_cap_mb), param_dtype)
        self._get_from_rank_0(module.buffers())
        self._used = []  # units, in the order in which the last forward has called them
        for unit in self.units:
            self._hook_unit(unit)
        self._hook(register_optimizer_step_post_hook, type(self)._after_step)  # of any optimizer

    def _check_units(self, units, names):
        for unit, name in zip(units, names):
            if not name:
                self._refuse(f"units= has a {type(unit).__name__} that is not inside of the module")
        for p, name in self._names.items():
            if type(p) is not nn.Parameter:
                self._refuse(f"{name} is a {type(p).__name__}, and not an nn.Parameter")

    def _fill_units(self, cap_bytes, param_dtype):
        """Make the buckets of all units. A module without parameters of its own is none."""
        of_root = parameters_of_root(self.module, [unit.module for unit in self.units[1:]])
        self._all_buckets = []  # those of frozen parameters, too
        # The backward reaches the last units first, and completes the root's gradients at last.
        for unit in [*reversed(self.units[1:]), self.root]:
            parameters = [p for p in unit.module.parameters() if p not in of_root]
            if unit is self.root:
                parameters = [p for p in unit.module.parameters() if p in of_root]
            trained = [p for p in parameters if p.requires_grad]
            frozen = [p for p in parameters if not p.requires_grad]
            lists = fill_buckets(trained[::-1], cap_bytes, cap_bytes)
            lists += fill_buckets(frozen, cap_bytes, cap_bytes)
            for some in lists:
                names = [self._names[p] for p in some]
                tag = FIRST_TAG + 2 * len(self._all_buckets)
                bucket = ShardedBucket(some, names, unit, self.group, tag, param_dtype,
                                       self.keeps_whole)
                unit.buckets.append(bucket)
                self._all_buckets.append(bucket)
        self.units = [unit for unit in self.units if unit.buckets or unit is self.root]
        self._watch(self._all_buckets)

    def _hook_unit(self, unit):
        register = unit.module.register_forward_pre_hook
        self._hook(register, type(self)._pre_forward, unit, prepend=True)
        if unit is self.root:
            self._hook(unit.module.register_forward_hook, type(self)._end_forward)

    # ---- forward

    @torch.compiler.disable
    def _pre_forward(self, unit, *_):
        """Before a unit is called."""
        if unit is self.root and not in_backward():
            self._used = []
            self._drop_zeroed_gradients()
            self._take_up_changes()
            self._begin_forward()
        if unit not in self._used:
            self._used.append(unit)
        self._use(unit)

    def _take_up_changes(self):
        """What a script has done to shards by hand, as what a step changes has been noted. If it
        has changed any, all buckets are taken for old: where a bucket has changed, another rank may
        have only empty shards of it, and cannot tell."""
        self._check_frozen()
        if any(bucket.noted != bucket.versions_and_places() for bucket in self._all_buckets):
            for bucket in self._all_buckets:
                self._invalidate(bucket)

    def _check_frozen(self):
        """Shards, too."""
        super()._check_frozen()
        for bucket in self._all_buckets:
            for name, shard in zip(bucket.names, bucket.shards):
                was_trained = name not in self._frozen
                if shard.requires_grad != was_trained:
                    self._refuse(f"freeze, or unfreeze, before wrapping: {name}")

    def _begin_forward(self):
        """Start to gather what is old. Each unit waits for its own parameters."""
        for unit in self.units:
            self._start_unshard(unit)

    def _use(self, unit):
        """Let a unit be whole."""
        self._start_unshard(unit)
        self._wait(unit)

    def _start_unshard(self, unit):
        """Start to gather a unit, unless it is whole, or will be."""
        for bucket in unit.buckets:
            if not bucket.is_unsharded and bucket.gather is None:
                with self._telling("start", "unshard", unit):
                    bucket.start_gather()

    def _wait(self, unit):
        for bucket in unit.buckets:
            if bucket.gather is not None:
                with self._telling("wait", "unshard", unit):
                    bucket.gather.wait()
                bucket.gather = None
                bucket.show()

    @torch.compiler.disable
    def _end_forward(self, *_):
        """Wait for what is still under way, since a shard must not change while it is sent. Refuse
        a unit whose parts are called, but not the unit itself: it has not waited for them."""
        for unit in self.units:
            self._wait(unit)
        unused = [unit.name for unit in self.units if unit not in self._used]
        if unused and not in_backward():
            self._refuse(f"a forward has not called these units: {', '.join(unused)}. Call each, "
                         f"or pass units= that are called (dropin's classes allow it)")

    # ---- backward

    def _begin_backward(self):
        has_raised = any(bucket.reduction is not None for bucket in self.buckets)
        if has_raised:
            for shard in self.parameters():
                if shard.grad is not None and shard.grad.any():
                    self._refuse_after_error()
        # One gradient may be there: that by which this backward has been noticed.
        if len(self._zeroed()) > 1:
            self._refuse("gradients are left of another backward, in no_sync() or one that has "
                         "raised: call zero_grad() before the next forward. (Checkpoint with "
                         "use_reentrant=False: the other kind has backwards in a backward)")
        super()._begin_backward()

    def _start_reduce(self, bucket):
        bucket.reduction = ReduceScatter(bucket.gradients, self.group, bucket.tag_of_step())

    def _add(self, bucket):
        """The means take the place of this rank's chunk of gradients, and keep their memory."""
        means = bucket.own_chunk(bucket.gradients).to(bucket.chunk.dtype)
        self._add_to(means, bucket)

    def _add_to(self, means, bucket):
        """A sum begins with what shards have in `.grad`, from a backward before, or of a script's
        own."""
        bucket.reduction.add(means, bucket.earlier())
        bucket.reduction, bucket.gradients = None, None
        bucket.give_means(means)

    def _end_backward(self):
        super()._end_backward()
        if not self._averages:
            self._mark_shards()

    def _learn_order(self):
        super()._learn_order()
        self.units = self._in_order_of_rank_0(self.units, self._used)

    # ---- gradients that are held back
    #
    # After a backward in no_sync() gradients are in `.grad` of the module's parameters, where the
    # next backward adds to them. zero_grad() of the optimizer knows only the shards. So shards
    # without a gradient get zeros, and what they have gets version 0. zero_grad() has been called
    # if then the gradient of a shard is None, or if it is zero in a later version.

    def _mark_shards(self):
        for bucket in self.buckets:
            for shard in bucket.shards:
                if shard.grad is None:
                    shard.grad = torch.zeros_like(shard)
                else:
                    shard.grad = shard.grad.data  # in the same memory, with a _version of its own

    def _zeroed(self):
        """The module's parameters whose gradients zero_grad() should have dropped."""
        zeroed = []
        for bucket in self.buckets:
            for p, shard in zip(bucket.parameters, bucket.shards):
                if p.grad is not None:
                    g = shard.grad
                    if g is None or (g._version > 0 and not g.any()):
                        zeroed.append(p)
        return zeroed

    def _drop_zeroed_gradients(self):
        for p in self._zeroed():
            p.grad = None

    def _refuse_while_held(self, what):
        self._drop_zeroed_gradients()
        for bucket in self.buckets:
            for name, p in zip(bucket.names, bucket.parameters):
                if p.grad is not None:
                    self._refuse(f"{what} while gradients are held back, such as that of {name}: "
                                 f"make the last backward of a step outside of no_sync(), or call "
                                 f"zero_grad()")

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        self._refuse_while_held("clip_grad_norm_()")
        return super().clip_grad_norm_(max_norm)

    # ---- step

    @torch.compiler.disable
    def _after_step(self, optimizer, *_):
        stepped = set()
        for group in optimizer.param_groups:
            stepped.update(map(id, group["params"]))
        old = []
        for bucket in self._all_buckets:
            if not stepped.isdisjoint(map(id, bucket.parameters)):
                self._refuse(f"{type(optimizer).__name__} has parameters of the module, such as "
                             f"{bucket.names[0]}: make it of the wrapper's parameters()")
            if not stepped.isdisjoint(map(id, bucket.shards)):
                old.append(bucket)
        if old:
            self._refuse_while_held("a step")
        for bucket in old:
            self._invalidate(bucket)

    def _invalidate(self, bucket):
        """Its shards have changed, so its whole parameters are old."""
        self._wait(bucket.unit)  # after a forward that has raised
        bucket.version += 1
        bucket.take_shards()
        increment_version(bucket.parameters)  # autograd raises if a backward needs the old ones
        bucket.hide()

    # ---- what a script calls

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the module, this rank's shard), in the module's order."""
        shard_of = {}
        for bucket in self._all_buckets:
            shard_of.update(zip(bucket.names, bucket.shards))
        for name in self._names.values():
            yield (f"{prefix}.{name}" if prefix else name), shard_of[name]

    def shard_starts(self) -> dict[str, int]:
        """{name: the first element, in order of memory, of a parameter that this rank has}. A shard
        of m elements has that and the next m - 1."""
        starts = {}
        for bucket in self._all_buckets:
            starts.update(zip(bucket.names, bucket.firsts))
        return starts

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, a copy of the whole parameter, not rounded to param_dtype), in the module's order.
        A collective, which holds the buckets of the root and of one unit at a time."""
        self._take_up_changes()
        whole = {}
        for name in self._names.values():
            if name not in whole:
                bucket = self._bucket_of[name]
                whole.update(zip(bucket.names, bucket.views(self._gather_copy(bucket))))
            yield name, whole.pop(name).clone()

    def _gather_copy(self, bucket):
        with self._telling("wait", "gather", bucket):
            return bucket.gather_copy()

    def full_state_dict(self) -> dict[str, Tensor]:
        """What state_dict() of the module would be, on every rank. A collective."""
        whole = dict(self.full_parameters())
        state = self.module.state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                state[name] = whole[self._names[value]]
            elif isinstance(value, Tensor):
                state[name] = value.clone()
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Let the module load state, which is as `full_state_dict` has it, and keep this rank's
        part. Each rank has all of state. Raises RuntimeError, as load_state_dict() of the module,
        and then parameters are as before."""
        self._take_up_changes()
        flats = [self._gather_copy(bucket) for bucket in self._all_buckets]
        try:
            for bucket, flat in zip(self._all_buckets, flats):
                for p, view in zip(bucket.parameters, bucket.views(flat)):
                    p.data = view
            self.module.load_state_dict(state)
            for bucket, flat in zip(self._all_buckets, flats):
                bucket.chunk.copy_(bucket.own_chunk(flat))
        finally:
            for bucket in self._all_buckets:
                self._invalidate(bucket)

    def state_dict(self, *_, **__):
        self._refuse("a rank has no whole parameters: take full_state_dict()")

    def load_state_dict(self, *_, **__):
        self._refuse("a rank has no whole parameters: take load_full_state_dict()")

    def _apply(self, *_, **__):
        self._refuse("move and cast a module before wrapping")


# -------------------------------------------------------------------------------------------------
# stage 2


class Zero2(Zero1):
    """P_os+g: each rank keeps also only its 1/W of the gradients, so each backward reduces."""

    def _add(self, bucket):
        self._add_to(torch.empty_like(bucket.chunk), bucket)


# -------------------------------------------------------------------------------------------------
# stage 3


class Zero3(Zero2):
    """P_os+g+p: each rank keeps also only its 1/W of the parameters.

    A forward leads through the units in their order, a backward comes back. When a unit is used,
    the next one on this way is gathered, and all but these two and the root are freed.

    What autograd saves of a whole unit would keep its memory. So it saves a recipe instead: a
    function that unshards the unit again, and returns the same view of it.

        _ahead       units that come next on the way
        _allocated   units that are whole, or will be
        _recipes     the context in which autograd saves recipes, while a forward is in it
    """

    keeps_whole = False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._ahead, self._allocated, self._recipes = [], [], None

    def _fill_units(self, cap_bytes, param_dtype):
        super()._fill_units(cap_bytes, param_dtype)
        if not self.units[1:]:  # those without parameters of their own are gone by now
            self._refuse("a module is gathered unit by unit, and this has no units with parameters "
                         "of their own, as in a ModuleList: pass units=, such as "
                         "module.children()")

    def _hook_unit(self, unit):
        super()._hook_unit(unit)
        register = unit.module.register_forward_hook
        self._hook(register, type(self)._post_forward, unit)
        if unit is self.root:
            self._hook(unit.module.register_forward_pre_hook, type(self)._begin_recipes)
            # always_call: also if the forward raises.
            self._hook(register, type(self)._end_recipes, always_call=True)

    # ---- the way

    def _begin_forward(self):
        self._ahead = self.units[1:]

    @torch.compiler.disable
    def _post_forward(self, unit, module, inputs, outputs):
        """The backward of a unit begins when the gradient of an output is there. (Saved tensors
        come too late: a checkpoint inside of the unit computes before it asks for ours.)"""
        if in_backward() or not torch.is_grad_enabled():
            return
        given = {id(t) for t in tree_leaves(inputs)}  # what is returned as it came is no sign
        for t in tree_leaves(outputs):
            if isinstance(t, Tensor) and t.grad_fn is not None and id(t) not in given:
                t.register_hook(functools.partial(self._use, unit))

    def _begin_backward(self):
        super()._begin_backward()
        self._ahead = list(reversed(self.units[1:]))  # without the root
        self._use(self.root)  # which does not begin this backward once more: its number is known

    def _use(self, unit, *_):
        """Unshard a unit, and the next one on the way; free all others but the root. At the turn,
        from forward to backward, there is no next one, and what is whole stays."""
        if in_backward():
            self._notice_backward()
        super()._use(unit)
        if unit in self._ahead:
            place = self._ahead.index(unit)
            self._ahead = self._ahead[place + 1:]
            if self._ahead:
                for other in self._allocated[:]:
                    if other not in (self.root, unit, self._ahead[0]):
                        self._reshard(other)
        if self._ahead:
            self._start_unshard(self._ahead[0])

    def _end_backward(self):
        super()._end_backward()
        self._reshard_all()

    def _start_unshard(self, unit):
        if unit not in self._allocated:
            self._allocated.append(unit)
        super()._start_unshard(unit)

    def _reshard(self, unit):
        """Free the whole parameters of a unit."""
        self._wait(unit)  # if it was gathered for nothing
        self._allocated.remove(unit)
        for bucket in unit.buckets:
            if bucket.is_unsharded:
                with span("free:", unit):
                    bucket.hide()

    def _reshard_all(self):
        for unit in self._allocated[:]:
            self._reshard(unit)

    # ---- recipes

    @torch.compiler.disable
    def _begin_recipes(self, *_):
        if not in_backward():
            self._recipes = saved_tensors_hooks(self._pack, lambda recipe: recipe())
            self._recipes.__enter__()

    @torch.compiler.disable
    def _end_recipes(self, *_):
        if self._recipes is not None and not in_backward():
            self._recipes.__exit__(None, None, None)
            self._recipes = None
            if not torch.is_grad_enabled():  # no backward will come
                self._reshard_all()

    def _pack(self, t):
        """t, which autograd saves -> a recipe: a function that returns t."""
        bucket = self._bucket_at(t)
        if bucket is None:
            # detach(): an output that is saved would keep its own node, and that the output.
            return functools.partial(self._kept, t.detach(), t._version)
        layout = t.shape, t.stride(), t.storage_offset()
        return functools.partial(self._view_again, bucket, layout, bucket.version)

    def _bucket_at(self, t):
        """The bucket of whose `whole` t is a view, if `as_strided` can make it again; or None."""
        if t.layout != torch.strided or t.is_conj() or t.is_neg():
            return None
        memory = t.untyped_storage().data_ptr()
        for unit in self._allocated:
            for bucket in unit.buckets:
                is_there = bucket.whole is not None and bucket.address == memory
                if is_there and bucket.dtype == t.dtype:
                    return bucket
        return None

    def _kept(self, t, version):
        if t._version != version:
            self._refuse(f"a tensor of shape {tuple(t.shape)}, which the backward needs, has been "
                         f"changed in place")
        return t

    def _view_again(self, bucket, layout, version):
        if bucket.version != version:
            self._refuse(f"a step between a forward and its backward has changed the parameters of "
                         f"{bucket.unit}")
        if not bucket.is_unsharded:
            self._use(bucket.unit)
        return bucket.whole.as_strided(*layout)

# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
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
all-gather unshards a unit before it is used. A reduce-scatter brings its gradients to the owners
of the chunks. The module keeps its parameters, with which forward and backward compute. The
optimizer has other parameters, the shards: this rank's part of each. (A fused optimizer on a CPU
rounds the last elements of a tensor differently, so a shard would not get the bits of the whole.)

The stages differ in what a rank keeps whole. For Psi parameters, per rank:

    stage  shards    keeps whole               bytes, fp32, Adam  sent in a step, (W-1)/W Psi
    Zero1  P_os      parameters and gradients  8 Psi + 8 Psi/W    2
    Zero2  P_os+g    parameters                4 Psi + 12 Psi/W   n + 1
    Zero3  P_os+g+p  nothing                   16 Psi/W           at most 3 n

A step has n backwards, its micro-steps. Zero1 sends 2 if all of them but the last are in no_sync(),
where whole gradients add up; otherwise n + 1. In no_sync() Zero2 and Zero3 keep whole gradients,
too. Beside the table: whole gradients of two buckets in the backward, one that is filled and one
that is reduced, and what arrives for that; in Zero3 the root and two units.

A bucket of three parameters on three ranks. Its chunks end anywhere, also inside of a parameter:

    whole     a a a a a a b b b b|b b b b c c c c c c|c c c c c c - - - -     n = 30
    rank 1's                      b b b b c c c c c c                         chunk: n/W = 10
                                  shard of b: (4,), of c: (6,), of a: (0,)

A step of Zero3 with a root and blocks 0, 1 and 2, each with one bucket. "gather" and "reduce" start
an all-gather and a reduce-scatter, "wait" and "add" finish them, "free" gives memory back:

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
    step                             the shards have new values

(Zero1 and Zero2 gather all units when the first forward after a step begins, each waits for its own
before it is used, and none is freed.)

In stages 2 and 3 contributions are added rank by rank, and micro-step by micro-step: these are the
bits of one process that computes the same micro batches in turn, if they are divided once, as with
`set_gradient_divide_factor(1)`, or if W is a power of two.

It asks what ddp.py asks, and more. What it checks, and raises RuntimeError for:

  - The optimizer is made of the wrapper's parameters(), after wrapping.
  - No step comes between a forward and its backward, nor while no_sync() holds gradients back.
  - Every unit is called in each forward, by its __call__. (Its weights are there for its own
    forward, and the root's for all. Others read nan, never an old value: so do state_dict() of the
    module, deepcopy and methods beside forward after a step. Take `full_state_dict()`.)
  - Hooks are on the module's parameters: those of shards would never be called.
  - Stage 3 has units to gather one by one.

What it does not check:

  - Shards are changed by an optimizer, or in place, as by p.copy_() under torch.no_grad(), or by
    p.data = ... What is written into p.data is not noticed in stages 1 and 2.
  - The optimizer works element by element: not Muon, LBFGS, or Adafactor. Clip by
    clip_grad_norm_(), as torch's function takes the norm of this rank's shards for that of all. In
    fp16 take torch's ShardedGradScaler, by which all ranks skip a step, or none.
  - In stage 3 all ranks use units in the order of rank 0. On a CPU another order is an error when
    the timeout is over.
  - zero_grad() is the wrapper's or the optimizer's, not the module's.
  - param_dtype casts no inputs, and gradients in no_sync() add up in it.
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


# -------------------------------------------------------------------------------------------------
# buckets and units


class ShardedBucket(Bucket):
    """A bucket whose parameters lie in a flat buffer, too: `whole`. Both buffers are cut into W
    chunks of the same places.

        unit            to which it belongs
        whole           (n,) parameters in param_dtype, which forward and backward use; None while
                        there is no memory for them
        chunk           (n/W,) this rank's chunk of them, in the module's dtype: a view of whole in
                        stages 1 and 2, if these are the same dtype
        shards          nn.Parameters, views of chunk. One for each parameter: what of it is in this
                        rank's chunk, in order of memory, of shape (m, 1, ..., 1), with m from 0 on.
                        An optimizer can see from its number of dimensions what it is of
        gather          of whole, while it is under way
        is_unsharded    the parameters have their values. Otherwise they are nan
        version         how often the shards have changed
        facts           `facts_of_shards` then
    """

    def __init__(self, parameters, unit, name, group, tag, param_dtype, keeps_whole):
        super().__init__(parameters, name, group.size(), tag)
        self.unit, self.group, self.keeps_whole = unit, group, keeps_whole
        first = parameters[0]
        self.dtype = first.dtype
        if param_dtype is not None and first.dtype.is_floating_point:
            self.dtype = param_dtype
        size = self.n // group.size()
        self.begin = size * group.rank()
        self.end = self.begin + size
        self.lay_out_shards()
        self.gather, self.version = None, 0

        whole = torch.zeros(self.n, dtype=first.dtype, device=first.device)
        for p, view in zip(parameters, self.views(whole)):
            view.copy_(p.data)
            p.data = view  # frees the memory that it had
        broadcast([whole], group)
        self.nans = []  # what parameters are while they are sharded: one number for each
        for p in parameters:
            nan = torch.full((), math.nan, device=first.device).to(self.dtype)
            self.nans.append(nan.expand(p.shape))
        self.free_memory()
        if keeps_whole and self.dtype == first.dtype:
            self.take_memory(whole)
            self.chunk = self.own_chunk(whole)
            self.show()
        else:
            self.chunk = self.own_chunk(whole).clone()
            self.hide()
        self.shards = []
        for p, part, (shape, strides, _) in zip(parameters, self.parts(self.chunk), self.layouts):
            shard = nn.Parameter(part, p.requires_grad)
            shard.whole_shape, shard.whole_stride = shape, strides
            self.shards.append(shard)
        self.shard_ids = {id(shard) for shard in self.shards}
        self.facts = self.facts_of_shards()

    # ---- chunk and shards

    def own_chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk, (n/W,), of a buffer (n,): a view."""
        return flat[self.begin:self.end]

    def lay_out_shards(self) -> None:
        """Which elements of each parameter are in this rank's chunk:

            starts         the first of them, counted in the parameter
            shard_layouts  (shape, strides, begin) of them in the chunk
        """
        self.starts, self.shard_layouts = [], []
        for shape, _, begin in self.layouts:
            n = shape.numel()
            start = min(max(self.begin - begin, 0), n)  # where the chunk begins in the parameter
            end = min(max(self.end - begin, 0), n)
            m = end - start
            ones = (1,) * max(1, len(shape))
            place = begin + start - self.begin if m > 0 else 0
            self.starts.append(start)
            self.shard_layouts.append(((m, *ones[1:]), ones, place))

    def parts(self, chunk: Tensor) -> list[Tensor]:
        """What of each parameter is in this rank's chunk: views of chunk, (n/W,)."""
        parts = []
        for shape, strides, place in self.shard_layouts:
            part = chunk.as_strided(shape, strides, chunk.storage_offset() + place)
            parts.append(part.data)  # .data: with a version of its own
        return parts

    def facts_of_shards(self) -> tuple[list[int], list[int]]:
        """(their versions, their addresses): what a script may change."""
        versions = [shard._version for shard in self.shards]
        return versions, [shard.data_ptr() for shard in self.shards]

    def take_shards(self) -> None:
        """Take the shards as they are now. Where a script has given one other memory, as by
        p.data = ..., all move into a new chunk: the memory of the old one may be somebody's now, as
        after p.data, q.data = q.data, p.data."""
        _, addresses = self.facts_of_shards()
        if addresses != self.facts[1]:
            self.chunk = torch.empty_like(self.chunk)
            self.free_memory()
            for shard, part in zip(self.shards, self.parts(self.chunk)):
                part.copy_(shard.data)
                shard.data = part
        self.facts = self.facts_of_shards()

    # ---- whole parameters

    def take_memory(self, whole: Tensor) -> None:
        self.whole, self.views_of_whole = whole, self.views(whole)
        self.address = whole.untyped_storage().data_ptr()

    def free_memory(self) -> None:
        self.whole, self.views_of_whole, self.address = None, None, None

    def start_gather(self) -> None:
        """Start to gather `whole` from all ranks' chunks."""
        if self.whole is None:
            memory = torch.empty(self.n, dtype=self.dtype, device=self.chunk.device)
            self.take_memory(memory)
        own = self.own_chunk(self.whole)
        if own.data_ptr() != self.chunk.data_ptr():
            own.copy_(self.chunk)  # rounds to param_dtype
        # Another tag in each step. So ranks that have made other steps do not mix new values with
        # old ones, but wait until the timeout.
        tag = self.tag + 1 + N_TAGS * (self.version % 256)
        self.gather = start_all_gather(self.whole, self.group, tag)

    def show(self) -> None:
        """Give the parameters their values. A Parameter stays the same object for the module, its
        hooks and autograd: only the memory behind it is another."""
        self.is_unsharded = True
        for p, view in zip(self.parameters, self.views_of_whole):
            p.data = view

    def hide(self) -> None:
        """Now parameters are nan: who reads one gets no old value. Stage 3 frees their memory."""
        self.is_unsharded = False
        if not self.keeps_whole:
            self.free_memory()
        for p, nan in zip(self.parameters, self.nans):
            p.data = nan

    def gather_copy(self) -> Tensor:
        """(n,): all ranks' chunks, in new memory, not rounded to param_dtype. A collective."""
        flat = self.chunk.new_empty(self.n)
        self.own_chunk(flat).copy_(self.chunk)
        start_all_gather(flat, self.group, self.tag + 1).wait()
        return flat

    # ---- gradients

    def earlier(self) -> Tensor | None:
        """(n/W,): the gradients that shards have, whoever gave them, in new memory; None if none
        has any."""
        flat, parts, gradients = None, [], []
        for shard in self.shards:
            if shard.grad is not None:
                flat = torch.zeros_like(self.chunk)
        if flat is None:
            return None
        for shard, part in zip(self.shards, self.parts(flat)):
            if shard.grad is not None:
                parts.append(part)
                gradients.append(shard.grad)
        torch._foreach_copy_(parts, gradients)
        return flat

    def give_gradients(self, means: Tensor) -> None:
        """Let the shards' `.grad` be views of means, (n/W,)."""
        for p, shard, part in zip(self.parameters, self.shards, self.parts(means)):
            p.grad = None
            shard.grad = part


N_TAGS = 2**14  # that a wrapper's buckets may have


class Unit:
    """What is gathered together: a block, or the root, which is all the rest."""

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
    of_root = {p for p in module.parameters() if n_units.get(p) != 1}
    for m in module.modules():
        if m not in inside:
            of_root.update(m._parameters.values())
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
    bucket_cap_mb: the size of a bucket in MB (2**20 bytes); 25, unless given. Each unit has buckets
    of its own.
    param_dtype: in which whole parameters and gradients are, such as torch.bfloat16. The shards,
    their gradients and so the optimizer stay as the module was: 2 + 2 + 12 bytes (paper, section
    3.1). Integers stay integers.

    parameters() and named_parameters() are this rank's shards: see `ShardedBucket`. A shard's
    whole_shape and whole_stride are those of its parameter. All ranks begin with rank 0's values.
    A forward is a collective, also in evaluation. Raises RuntimeError: see the lists above.
    """

    keeps_whole = True  # whole parameters

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None,
                 units: Iterable[nn.Module] | None = None, bucket_cap_mb: float | None = None,
                 param_dtype: torch.dtype | None = None):
        units = find_units(module) if units is None else list(dict.fromkeys(units))
        name_of = {m: name for name, m in module.named_modules()}
        names = [name_of.get(unit) for unit in units]
        super().__init__(module, process_group, dict(units=names, bucket_cap_mb=bucket_cap_mb,
                                                     param_dtype=param_dtype))
        self._check_units(units, names)
        self.shard_group = self.group
        self._build_buckets(zip(names, units), bucket_cap_mb, param_dtype)
        broadcast(module.buffers(), self.group)
        self._used = []  # units, in the order in which the last forward has called them
        for unit in self.units:
            self._hook_unit(unit)
        self._hook(register_optimizer_step_post_hook, Zero1._after_step)  # of any optimizer
        for p in self._names:
            p._is_wrapped = True

    def _check_units(self, units, names):
        for unit, name in zip(units, names):
            if not name:
                self._refuse(f"units= has a {type(unit).__name__} that is not inside of the module")
        for p, name in self._names.items():
            if type(p) is not nn.Parameter:
                self._refuse(f"{name} is a {type(p).__name__}, and not an nn.Parameter")

    def _build_buckets(self, named_units, bucket_cap_mb, param_dtype):
        """Make self.units, of which the first is the root, and their buckets."""
        named_units = list(named_units)
        of_root = parameters_of_root(self.module, [m for _, m in named_units])
        cap_bytes = bucket_bytes(self.group.size(), bucket_cap_mb)
        self.root = Unit("the root", self.module)
        self.units, self._shards = [], {}
        n_buckets = 0
        for unit in [self.root, *(Unit(name, m) for name, m in named_units)]:
            parameters = []
            for p in unit.module.parameters():
                if (p in of_root) == (unit is self.root):
                    parameters.append(p)
            trained = [p for p in parameters if p.requires_grad]
            frozen = [p for p in parameters if not p.requires_grad]
            for some in fill_buckets(trained[::-1], cap_bytes) + fill_buckets(frozen, cap_bytes):
                tag = FIRST_TAG + 2 * n_buckets
                bucket = ShardedBucket(some, unit, self._names[some[0]], self.group, tag,
                                       param_dtype, self.keeps_whole)
                unit.buckets.append(bucket)
                self._shards.update(zip(some, bucket.shards))
                n_buckets += 1
            if unit.buckets or unit is self.root:
                self.units.append(unit)
        # The backward reaches the last units first, and completes the root's gradients at last.
        in_backward_order = [*self.units[:0:-1], self.root]
        buckets = [bucket for unit in in_backward_order for bucket in unit.buckets]
        self._all_buckets = buckets
        self._watch([bucket for bucket in buckets if bucket.parameters[0].requires_grad])

    def _hook_unit(self, unit):
        pre_forward = functools.partial(self._pre_forward, unit)
        unit.module.register_forward_pre_hook(torch.compiler.disable(pre_forward), prepend=True)
        if unit is self.root:
            unit.module.register_forward_hook(torch.compiler.disable(self._check_used))

    # ---- forward

    def _pre_forward(self, unit, module, inputs):
        """Before a unit is called. Its parameters get their values."""
        if module is not unit.module:
            self._refuse("this is a copy of a wrapped module: make it of full_state_dict()")
        if unit is self.root and not in_backward():
            self._used = []
            self._take_up_changes()
            self._begin_forward()
        if unit not in self._used:
            self._used.append(unit)
        self._use(unit)

    def _take_up_changes(self):
        """What a script has done since the last forward."""
        for bucket in self.buckets:
            for p, shard in zip(bucket.parameters, bucket.shards):
                if p.requires_grad != shard.requires_grad:
                    self._refuse(f"freeze, or unfreeze, before wrapping: {self._names[p]}")
                # What no_sync() holds back, or a backward that raised has left, is the module's,
                # where zero_grad() of the optimizer does not reach it.
                if p.grad is not None and was_zeroed(shard.grad):
                    p.grad = None
            if bucket.parameters[0].grad is None and bucket.shards[0].grad is None:
                bucket.gradients = None
        # By hand, as the hook of a step has noted its changes. Then all buckets are old: of one that
        # has changed another rank may have only empty shards, in which nothing changes.
        if any(bucket.facts != bucket.facts_of_shards() for bucket in self._all_buckets):
            for bucket in self._all_buckets:
                self._outdate(bucket)

    def _begin_forward(self):
        """Start to gather what is old. Each unit waits for its own part."""
        for unit in self.units:
            self._unshard(unit)

    def _use(self, unit):
        self._unshard(unit)
        self._wait(unit)

    def _unshard(self, unit):
        """Start to gather a unit, unless it is whole, or will be."""
        for bucket in unit.buckets:
            if not bucket.is_unsharded and bucket.gather is None:
                with span("start: gather", unit):
                    bucket.start_gather()

    def _wait(self, unit):
        """Until a unit is whole."""
        for bucket in unit.buckets:
            if bucket.gather is not None:
                with self._waiting("gather", unit):
                    bucket.gather.wait()
                bucket.gather = None
                bucket.show()

    def _check_used(self, *_):
        """After a forward. A unit that is not called, but whose parts are, does not wait for its
        parameters."""
        for unit in self.units:
            self._wait(unit)  # a shard must not change while it is sent
        unused = [str(unit) for unit in self.units if unit not in self._used]
        if unused and not in_backward():
            self._refuse(f"a forward has not called these units: {', '.join(unused)}. Call each, "
                         f"or pass units= that are called (dropin's classes allow it)")

    # ---- backward

    def _learn_order(self):
        super()._learn_order()
        self.units = self._in_order_of_rank_0(self.units, self._used)

    def _start(self, bucket):
        tag = bucket.tag + N_TAGS * (bucket.version % 256)
        bucket.reduction = ReduceScatter(bucket.gradients, self.group, tag)

    def _add(self, bucket):
        """The means take the place of this rank's chunk of gradients. If shards have gradients,
        from a backward before or of the script's own, the sum begins with these."""
        means = bucket.own_chunk(bucket.gradients).to(bucket.chunk.dtype)
        self._add_to(bucket, means)

    def _add_to(self, bucket, means):
        bucket.reduction.add(means, bucket.earlier())
        bucket.reduction = None
        bucket.give_gradients(means)

    def _end_backward(self):
        super()._end_backward()
        if not self._backward.is_averaging:
            self._mark_shards()

    def _mark_shards(self):
        """After a backward in no_sync(): gradients stay with the module. Where shards have none,
        zeros stand for them: see `was_zeroed`."""
        for bucket in self.buckets:
            for shard in bucket.shards:
                if shard.grad is None:
                    shard.grad = torch.zeros_like(shard)
                else:
                    shard.grad = shard.grad.data  # the same memory, of version 0

    # ---- step

    @torch.compiler.disable
    def _after_step(self, optimizer, *_):
        """Parameters whose shards have changed are old."""
        stepped = set()
        for group in optimizer.param_groups:
            stepped.update(map(id, group["params"]))
        for bucket in self._all_buckets:
            if not stepped.isdisjoint(bucket.shard_ids):
                self._outdate(bucket)
            elif not stepped.isdisjoint(map(id, bucket.parameters)):
                self._refuse(f"{type(optimizer).__name__} has parameters of the module, such as "
                             f"{bucket.name}: make it of the wrapper's parameters()")

    def _outdate(self, bucket):
        """Its shards have changed."""
        bucket.version += 1
        bucket.take_shards()
        increment_version(bucket.parameters)  # so autograd raises if a backward needs old ones
        bucket.hide()

    # ---- what a script calls

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the module, this rank's shard), in the module's order."""
        for p, name in self._names.items():
            yield (f"{prefix}.{name}" if prefix else name), self._shards[p]

    def shard_starts(self) -> dict[str, int]:
        """{name: the first element, in order of memory, of a parameter that this rank has}. A shard
        of m elements has that and the next m - 1."""
        starts = {}
        for bucket in self._all_buckets:
            for p, start in zip(bucket.parameters, bucket.starts):
                starts[self._names[p]] = start
        return starts

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, a copy of the whole parameter, not rounded to param_dtype), in the module's order.
        A collective, which holds the buckets of the root and of one unit at a time."""
        bucket_of, whole = {}, {}
        for bucket in self._all_buckets:
            bucket_of.update(dict.fromkeys(bucket.parameters, bucket))
        for p, name in self._names.items():
            if p not in whole:
                bucket = bucket_of[p]
                with self._waiting("gather", bucket):
                    flat = bucket.gather_copy()
                whole.update(zip(bucket.parameters, bucket.views(flat)))
            yield name, whole.pop(p).clone()

    def full_state_dict(self) -> dict[str, Tensor]:
        """What state_dict() of the module would be, on every rank. A collective."""
        whole = dict(self.full_parameters())
        state = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                state[name] = whole[self._names[value]]
            else:
                state[name] = value.detach().clone() if torch.is_tensor(value) else value
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's part of state, which is as `full_state_dict` has it, on every rank."""
        own = self.module.state_dict(keep_vars=True)
        wrong = sorted(own.keys() ^ state.keys())
        for name in own.keys() & state.keys():
            if torch.is_tensor(own[name]) and own[name].shape != state[name].shape:
                wrong.append(f"{name} of shape {tuple(state[name].shape)}")
        if wrong:
            self._refuse(f"nothing was loaded: missing, left over or of another shape: {wrong}")
        value_of, rest = {}, {}
        for name, t in own.items():
            if isinstance(t, nn.Parameter):
                value_of[t] = state[name]
            else:
                rest[name] = state[name]
        for bucket in self._all_buckets:
            flat = bucket.chunk.new_zeros(bucket.n)
            for p, view in zip(bucket.parameters, bucket.views(flat)):
                view.copy_(value_of[p])
            bucket.chunk.copy_(bucket.own_chunk(flat))
            self._outdate(bucket)
        self.module.load_state_dict(rest, strict=False)  # buffers, and what get_extra_state() gave

    def state_dict(self, *_, **__):
        self._refuse("a rank has no whole parameters: take full_state_dict()")

    def load_state_dict(self, *_, **__):
        self._refuse("a rank has no whole parameters: take load_full_state_dict()")

    def _apply(self, *_, **__):
        self._refuse("move and cast a module before wrapping")


def was_zeroed(gradient: Tensor | None) -> bool:
    """Whether zero_grad() has been called since `Zero1._mark_shards`: there the version was 0."""
    return gradient is None or (gradient._version > 0 and not gradient.any())


# -------------------------------------------------------------------------------------------------
# stage 2


class Zero2(Zero1):
    """P_os+g: each rank keeps also only its 1/W of the gradients, so each backward reduces."""

    def _add(self, bucket):
        self._add_to(bucket, torch.empty_like(bucket.chunk))
        bucket.gradients = None


# -------------------------------------------------------------------------------------------------
# stage 3


class Zero3(Zero2):
    """P_os+g+p: each rank keeps also only its 1/W of the parameters.

    A forward leads through the units in their order, a backward comes back. When a unit is used,
    the next one on this way is gathered, and all but these two and the root are freed.

    What autograd saves of a whole unit would keep its memory. So it saves a recipe instead: a
    function that unshards the unit again, and returns the same view of it.

        _ahead      the units that come next on the way
        _unsharded  those that are whole, or will be
        _recipes    the context in which autograd saves recipes, while a forward is in it
    """

    keeps_whole = False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._ahead, self._unsharded, self._recipes = [], [], None

    def _check_units(self, units, names):
        super()._check_units(units, names)
        if not units:
            self._refuse("a module is gathered unit by unit, and this has no ModuleList of units: "
                         "pass units=, such as module.children()")

    def _hook_unit(self, unit):
        super()._hook_unit(unit)
        post_forward = functools.partial(self._post_forward, unit)
        unit.module.register_forward_hook(torch.compiler.disable(post_forward))
        if unit is self.root:
            end = torch.compiler.disable(self._end_recipes)
            unit.module.register_forward_hook(end, always_call=True)  # also if a forward raises

    # ---- forward

    def _pre_forward(self, unit, module, inputs):
        if in_backward():
            self._notice_backward()
        super()._pre_forward(unit, module, inputs)
        if unit is self.root and not in_backward():
            self._recipes = saved_tensors_hooks(self._pack, call)
            self._recipes.__enter__()

    def _begin_forward(self):
        self._ahead = self.units[1:]

    def _end_recipes(self, *_):
        if self._recipes is not None and not in_backward():
            self._recipes.__exit__(None, None, None)
            self._recipes = None
            if not torch.is_grad_enabled():  # no backward will come
                self._reshard_all()

    def _post_forward(self, unit, module, inputs, outputs):
        """The backward of a unit begins when the gradient of an output is there."""
        if in_backward() or not torch.is_grad_enabled():
            return
        for t in tree_leaves(outputs):
            if isinstance(t, Tensor) and t.grad_fn is not None:
                t.register_hook(functools.partial(self._pre_backward, unit))

    # ---- backward

    def _begin_backward(self, number):
        super()._begin_backward(number)
        self._ahead = self.units[:0:-1]  # from the last one back, without the root
        self._use(self.root)

    def _pre_backward(self, unit, gradient=None):
        self._notice_backward()
        self._use(unit)

    def _end_backward(self):
        super()._end_backward()
        self._reshard_all()

    # ---- units

    def _use(self, unit):
        super()._use(unit)
        if unit in self._ahead:
            place = self._ahead.index(unit)
            self._ahead = self._ahead[place + 1:]
            if self._ahead:
                for other in self._unsharded[:]:
                    if other not in (self.root, unit, self._ahead[0]):
                        self._reshard(other)
        if self._ahead:
            self._unshard(self._ahead[0])

    def _unshard(self, unit):
        if unit not in self._unsharded:
            self._unsharded.append(unit)
        super()._unshard(unit)

    def _reshard(self, unit):
        """Free the whole parameters of a unit."""
        self._wait(unit)  # if it was gathered for nothing
        self._unsharded.remove(unit)
        for bucket in unit.buckets:
            if bucket.is_unsharded:
                with span("free:", unit):
                    bucket.hide()

    def _reshard_all(self):
        for unit in self._unsharded[:]:
            self._reshard(unit)

    # ---- recipes

    def _pack(self, t):
        """t, which autograd saves -> a recipe: a function that returns t."""
        bucket = self._bucket_of(t)
        if bucket is None:
            # detach(): an output that is saved would keep its own node, and that the output.
            return functools.partial(self._kept, t.detach(), t._version)
        layout = t.shape, t.stride(), t.storage_offset()
        return functools.partial(self._unshard_again, bucket, layout, bucket.version)

    def _bucket_of(self, t):
        """The bucket of which t is a view that `as_strided` can make again, or None."""
        if t.layout != torch.strided:
            return None
        address = t.untyped_storage().data_ptr()
        for unit in self._unsharded:
            for bucket in unit.buckets:
                if bucket.address == address and t.dtype == bucket.dtype and not t.is_conj():
                    return bucket
        return None

    def _kept(self, t, version):
        if t._version != version:
            self._refuse(f"a tensor of shape {tuple(t.shape)}, which the backward needs, has been "
                         f"changed in place")
        return t

    def _unshard_again(self, bucket, layout, version):
        if bucket.version != version:
            self._refuse(f"a step between a forward and its backward has changed the parameters of "
                         f"{bucket.unit}")
        if not bucket.is_unsharded:
            self._pre_backward(bucket.unit)
        return bucket.whole.as_strided(*layout)


def call(recipe):
    return recipe()

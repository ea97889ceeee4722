# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""ZeRO: data parallelism in which each of W ranks keeps 1/W of what is needed only now and then.

    model = Zero3(module)                    # or Zero1, Zero2; then as with DDP
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)  # shards; see below
    loss = model(x, y)
    loss.backward()                          # on return each shard's `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's ZeroRedundancyOptimizer (1,700 lines) and FSDP2 (5,700). How it works (Rajbhandari
et al., arXiv 1910.02054, section 5): the parameters of a unit, such as a block of the model, lie in
flat buffers that are cut into W chunks, and rank r owns the r-th of each. An all-gather unshards a
unit before it is used, and a reduce-scatter brings its gradients to the owners of the chunks. The
stages differ in what a rank keeps whole; for Psi parameters, per rank:

    stage  shards    keeps whole               bytes, fp32, Adam  sent in a step, (W-1)/W Psi
    Zero1  P_os      parameters and gradients  8 Psi + 8 Psi/W    2
    Zero2  P_os+g    parameters                4 Psi + 12 Psi/W   n + 1
    Zero3  P_os+g+p  nothing                   16 Psi/W           at most 3 n

A step has n backwards, its micro-steps. Zero1 sends once if all but the last are in no_sync(): it
has room for whole gradients anyway. In stage 2 each backward sends gradients, and the first forward
after a step gathers parameters. (`Zero2` has to be told which backward is the last of a step, by
`set_is_last_backward`, or it gathers in each forward, and sends 2 n.)

The module keeps its parameters: forward and backward compute with them. The optimizer gets other
parameters, the shards. (On a CPU a fused optimizer rounds the last elements of a tensor
differently, so that its shards do not get the bits of the whole.)

How it differs: in stage 3 the backward unshards a unit when autograd asks for one of its weights,
so a model may call its units again, out of order or in a checkpoint. Contributions to a gradient
are added in rank order, in stages 2 and 3 micro-step by micro-step. These are the bits of one
process that accumulates the same micro batches, if no backward is in no_sync(), and if 1/W does not
round: W is a power of two, or `set_gradient_divide_factor(1)` was called, as train.py does.

Cost beside the table: in the backward whole gradients of the root and of two buckets of 25 MB, one
whose gradients wait for the rest of theirs and one that is reduced, and what arrives for that (in
Zero1, which keeps whole gradients, those of one, which wait, and what arrives); in the first
backward also those of buckets that the order of registration holds back; in Zero3 the root and two
units; under no_sync() all whole gradients. In the forward stages 2 and 3 hold 4 Psi/W less,
as zero_grad() has dropped the means, and they come again in the backward.

oracle.py has the three stages by hand. Here is the same, overlapped, in this order: two tables of
a step; buckets and units; `Stage`, how a stage is built, to be passed by; the stages as the paper
has them: `PlainZero1`, which can be read by itself, what `PlainZero2` does otherwise, and what
`PlainZero3` adds. That is the idea. It asks something of scripts and ranks: docstrings say what.
The rest is one class for each thing that it does not ask for any more, or adds:

    UnevenForwards  a script calls a part of the model; gradients are missing, replaced or not
                    zeroed; shards are changed by hand
    UnevenOrder     in stage 3: ranks skip units; forwards and checkpoints inside of forwards
    ZeroOptions     groups of ranks; 16 bits and offload; whole parameters for Muon; meta devices
    StateDicts      saving and loading
    ShardGuards     mistakes of a script are refused: guards.py

`Zero3` is all of these, and ddp.py's `UnevenRanks`, before `PlainZero3`. As there each does
something before or after a method of the plain stage, and calls that.
"""

import collections
import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import eval_frame
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from dropin.ddp import (ALIGN_CHUNK_BYTES, NOTHING, Bucket, HierarchicalState, OptimizerStates,
                        Reducer, Slot, UnevenRanks, add_in_rank_order, broadcast, bucket_bytes,
                        fill_buckets, first_names, in_backward, in_order_of_use, named_modules,
                        named_tensors, refuse_no_size, round_up, span, start_all_gather,
                        start_all_reduce, start_reduce_scatter, weakly)
from dropin.guards import ShardGuards

ALIGN_BYTES = 64  # of a parameter in its buffer: a cache line, and what BLAS kernels like best


def never_compiled(method):
    """As torch.compiler.disable: nothing that method calls is compiled. But that wraps the method,
    and makes eight more calls each time."""
    skip = eval_frame.FrameAction.SKIP
    eval_frame.set_code_exec_strategy(method.__code__, eval_frame.FrameExecStrategy(skip, skip))
    return method


# -------------------------------------------------------------------------------------------------
# a step
#
# The methods in the order in which a step comes to them, and what they do. A dot: the same as in
# the stage before. Three dots: that, and then more. Hooks of modules call those of the forward,
# ddp.py's `Reducer` those of the backward; in stage 3 a note calls `_use` there, too.
#
#   event                method                  PlainZero1           PlainZero2    PlainZero3
#   a forward begins     _begin_forward          gather all units     free means,   free means, set
#                                                                     ...           the units' order
#   a unit is used       _use                    wait for its gather  .             gather it, wait,
#                                                                                   gather the next
#   a forward is over    _end_forward            wait for the rest    .             ...; evaluation:
#                                                                                   free all
#   a backward begins    _prepare_for_backward   check that the last  .             set the order of
#                                                means are zeroed                   the way back
#   a bucket is full     _start_reduction        reduce-scatter       .             .
#   the next is full     _finish_reduction       add: its means are   ..., free     .
#                                                there                gradients
#   a backward is over   _finalize_backward      give the means       .             ..., free all
#   a step               _after_step             units whose shards   .             ..., free them
#                                                changed are old
#
# A step of PlainZero3 with a root and blocks 0, 1 and 2, each of which has one bucket. gather and
# reduce start an all-gather and a reduce-scatter; wait and add finish them. Beside the root two
# blocks are whole, and one block's messages are under way while another one computes.
#
#   forward begins
#     root is used               gather root, wait for it, gather 0
#     0 is used                  wait for 0, gather 1
#     1 is used                  wait for 1, free 0, gather 2
#     2 is used                  wait for 2
#   backward begins                                         root, 1 and 2 are still whole
#     2 is used                                             1, the next one, is there
#     gradients of 2 are there   reduce 2
#     1 is used                  free 2, gather 0
#     gradients of 1 are there   add 2, reduce 1
#     0 is used                  wait for 0
#     gradients of 0 are there   add 1, reduce 0
#     those of the root, too     add 0, reduce root
#   backward is over             add root, free root, 0 and 1
#   step                                                    the shards have new values


# -------------------------------------------------------------------------------------------------
# buckets and units


class Sharding(typing.NamedTuple):
    """What the buckets of a stage have in common."""
    names: dict  # {parameter: its fully qualified name}
    W: int  # the number of ranks over which parameters are sharded
    rank: int  # this rank's number among them
    device: torch.device


class ShardedBucket(Bucket):
    """A bucket whose parameters lie in flat buffers, too. Each buffer of n elements is cut into W
    chunks, and rank r owns the r-th, of S elements (`size`):

        unsharded          (n,) whole parameters, which forward and backward use; or None
        sharded            (S,) this rank's chunk of them: the optimizer's shards are views of it
        gradients          (n,) this rank's gradients, or None
        sharded_gradients  (S,) the means of its chunk: the shards' `.grad` are views of it; or None

    Whose memory is whose on rank 0 of two, where c0 and c1 are chunks of parameters, g0 and g1 of
    gradients:

                           Zero1                Zero2                Zero3
        unsharded          [c0|c1]              [c0|c1]              [c0|c1] while its unit is used
        sharded            a view of c0 there   a view of c0 there   [c0]
        gradients          [g0|g1]              [g0|g1] until it     [g0|g1] until it
                                                is reduced           is reduced
        sharded_gradients  a view of g0 there   [g0]                 [g0]

    A shard is this rank's part of one parameter, a view of `sharded`, and may be empty. Chunks are
    equal, and parameters are cut where one ends:

        three ranks   a a a b|b c c c|c d d -      S = 4, and a gap of one at the end

    dtypes: of sharded, of unsharded, of gradients: one unless an option says otherwise.
    """

    cuts = None  # where chunks 1 to W-1 begin; None: at equal distances. See `OwnedBucket`

    def __init__(self, unit, parameters, dtypes, sharding):
        self.unit, self.rank, self.device = unit, sharding.rank, sharding.device
        self.dtype, self.param_dtype, self.reduce_dtype = dtypes
        itemsize = min(dtype.itemsize for dtype in dtypes)  # so alignment holds in all of them
        slots = [Slot(p, sharding.names[p]) for p in parameters]
        super().__init__(slots, ALIGN_BYTES // itemsize)
        self.n = max(1, self.n)  # some memory also for parameters without elements
        ends = self.lay_out(sharding.W, ALIGN_CHUNK_BYTES // itemsize)
        self.first, self.end = ends[self.rank], ends[self.rank + 1]  # of this rank's chunk
        self.size = self.end - self.first  # S
        self.unsharded, self.sharded, self.sharded_gradients = None, None, None
        self.nans = []  # what parameters are while there is no `unsharded`
        for slot in slots:
            slot.layout = self.shard_layout(slot)
            # .to: an integer dtype has no nan, but gets some number. Expanded it takes no memory.
            nan = torch.full((), math.nan, device=self.device).to(self.param_dtype)
            self.nans.append(nan.expand(slot.shape))

    # ---- which elements are this rank's

    def own_chunk(self, buffer):
        """This rank's chunk of a (n,) buffer: a view, (S,)."""
        return buffer[self.first:self.end]

    def shard_range(self, slot):
        """(first, end) of this rank's part of a parameter p, counted in elements within p, in order
        of memory. Both are the same number, from 0 to p's number of elements, where it has none.

            W = 2, S = 8; p has 10 elements. Its first is number 4 of the buffer:

            buffer   0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15      rank 0: (0, 4)
            of p             0 1 2 3 | 4 5  6  7  8  9            rank 1: (4, 10)
        """
        n = slot.shape.numel()
        # Where the chunk begins and ends, seen from p, and from there to the nearest in p.
        first = min(max(self.first - slot.start, 0), n)
        end = min(max(self.end - slot.start, 0), n)
        return first, end

    def shard_layout(self, slot):
        """(shape, strides, first element) in this rank's chunk of its part of a parameter,
        `shard_range`. The shape is (n, 1, ..., 1), with as many dimensions as the parameter; (n,)
        if that has none; n may be 0."""
        first, end = self.shard_range(slot)
        n = end - first
        start = slot.start + first - self.first if n > 0 else 0
        ones = (1,) * max(1, len(slot.shape))
        return (n, *ones[1:]), ones, start

    def shard_view(self, slot, buffer):
        """This rank's part of a parameter, as a view of buffer, this rank's chunk, (S,)."""
        shape, strides, start = slot.layout
        return buffer.as_strided(shape, strides, buffer.storage_offset() + start)

    # ---- parameters

    @torch.inference_mode(False)  # what is made inside it could not be used outside
    def new_memory(self):
        """(n,), for whole parameters."""
        return torch.empty(self.n, dtype=self.param_dtype, device=self.device)

    def point_parameters(self):
        """Give the module's parameters their values: views of `unsharded`.

        Assigning `.data` is how a value comes and goes. The Parameter stays the same object for the
        module, for its hooks and for autograd's graph; only the memory behind it is another."""
        for slot, view in zip(self.slots, self.views(self.slots, self.unsharded)):
            slot.parameter.data = view

    def free_parameters(self):
        """Until they are gathered again they are nan. (Autograd asks for the shape, and whoever
        reads a weight too early gets nan, not an old value.)"""
        self.unsharded = None
        for slot, nan in zip(self.slots, self.nans):
            slot.parameter.data = nan

    # ---- gradients

    def places_of_gradients(self, slots):
        """As `Bucket`; allocate `gradients` if it is None."""
        if self.gradients is None:
            self.gradients = torch.empty(self.n, dtype=self.reduce_dtype, device=self.device)
        return super().places_of_gradients(slots)

    def put(self, slots):
        """Move the `.grad` of slots' parameters into their places in `gradients`, and set them to
        None, so that their memory is freed. (The mean will have another place.) Where a slot is in
        `unreduced`, no_sync() has left a sum, to which `.grad` is added."""
        begun = [slot for slot in slots if slot in self.unreduced]
        new = [slot for slot in slots if slot not in self.unreduced]
        if begun:
            gradients = [slot.parameter.grad for slot in begun]
            torch._foreach_add_(self.places_of_gradients(begun), gradients)
        if new:
            gradients = [slot.parameter.grad for slot in new]
            torch._foreach_copy_(self.places_of_gradients(new), gradients)
        for slot in slots:
            slot.parameter.grad = None
        self.unreduced.update(new)

    def free_gradients(self):
        """Until `put` gets the next ones."""
        with span("free: gradients of", self):
            self.gradients = None

    def place_of_mean(self, slot):
        """The part of `sharded_gradients` that is a parameter's, shaped as its shard. `.data` as in
        `Bucket.put`."""
        return self.shard_view(slot, self.sharded_gradients).data

    def has_no_means(self):
        """Whether zero_grad() has set each shard's `.grad` to None."""
        for slot in self.slots:
            if slot.shard.grad is not None:
                return False
        return True

    def free_means(self):
        """Until they come again, if zero_grad() has dropped them."""
        if self.has_no_means():
            self.sharded_gradients = None

    # ---- construction and loading

    def lay_out(self, W, align):
        """Make n a multiple of W * align -> [where chunk 0 begins, chunk 1, ..., and n]."""
        size = round_up(math.ceil(self.n / W), align)
        self.n = W * size
        return range(0, self.n + 1, size)

    def build_shards(self):
        """Make the optimizer's parameters, views of `sharded`."""
        for slot in self.slots:
            p = slot.parameter
            # .data, for a _version of its own: a gather writes to sharded, which is no update.
            value = self.shard_view(slot, self.sharded).data
            slot.shard = nn.Parameter(value, p.requires_grad)
            vars(slot.shard).update(vars(p))  # such as p.no_decay, by which a script makes groups
            slot.shard.whole_shape, slot.shard.whole_stride = slot.shape, slot.strides
            self.unit.shards.add(slot.shard)

    def part_of(self, slot, value):
        """This rank's part of value, a whole parameter, in the shape of the shard."""
        whole = torch.empty(self.n, dtype=value.dtype, device=self.sharded.device)
        self.view(slot, whole).copy_(value)
        return self.shard_view(slot, self.own_chunk(whole))


class Unit:
    """A part of the model whose parameters are unsharded together: a block, or, the root, the rest.

        submodules, parameters   what belongs to it; what is in two units belongs to the root
        buckets, shards          of these parameters
        tag                      of its all-gathers: if ranks gather units in another order, gloo
                                 does not swap them, and times out
        is_current               whether the whole parameters have the values of the shards, or will
                                 have them when the all-gather under way ends. In stages 1 and 2
                                 they are there anyway, but old after a step. In stage 3 they are
                                 there if and only if they are current
        gathers                  these all-gathers, one for each bucket, until they were waited for
        n_updates                how often the shards have got new values
    """

    def __init__(self, name, module, tag):
        self.name, self.module, self.tag = name, module, tag
        self.submodules, self.parameters = [], []
        self.buckets, self.shards = [], set()
        self.is_current, self.gathers, self.n_updates = False, [], 0

    def __repr__(self):
        """For errors, profiles and debuggers."""
        n_bytes = sum(bucket.n * bucket.param_dtype.itemsize for bucket in self.buckets)
        return f"{self.name} ({1e-6 * n_bytes:.2f} MB)"


# -------------------------------------------------------------------------------------------------
# how a stage is built, to be passed by


class Stage(Reducer):
    """A module in units, whose parameters are in buckets, of which the optimizer gets shards.

        _units   in the order in which forwards use them, the root first; until `_learn_order` in
                 that in which the module has registered them
        _root    the first
        _used    those that the last forward has used, but for evaluations, in the order of their
                 first use
        _shards  {a shard}: of all parameters
    """

    bucket_cap_mb = None  # as of `PlainDDP`

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None,
                 units: Iterable[nn.Module] | None = None):
        super().__init__(module, process_group)
        self._make_groups()
        self._device = self._choose_device()
        # Of the 2**11 tags of this wrapper one for each kind of message, and one for each unit.
        self._reduce_tag = self._first_tag
        self._full_parameters_tag = self._first_tag + 1
        modules = find_units(module) if units is None else units
        self._units = divide_into_units(self, modules, self._first_tag + 2)
        self._root, self._used = self._units[0], []
        self._sharding = Sharding(first_names(self._named("parameters")), self.shard_size,
                                  dist.get_rank(self.shard_group), self._device)
        self._build_buckets()
        broadcast(self._buffers_at_first(), self.process_group)
        for bucket in self._all_buckets():
            if bucket.unsharded is None:
                bucket.free_parameters()
            else:
                bucket.point_parameters()
        self._track(*order_of_backward(self._units, self._sharding.names))
        self._shards = {slot.shard for slot in self._slots.values()}
        self._add_hooks()

    def _make_groups(self):  # a joint
        """The ranks over which parameters are sharded."""
        self.shard_group, self.shard_size = self.process_group, self.world_size

    def _choose_device(self):
        """The device of all that is not on meta, or None."""
        places = {}
        for name, t in self._named("parameters") + self._named("buffers"):
            if not t.is_meta:
                places[t.device] = name
        if len(places) > 1:
            self._refuse(f"needs all parameters and buffers on one device: {places}")
        return next(iter(places), None)

    @torch.no_grad()
    def _build_buckets(self):
        """Divide the parameters of each unit among buckets, the last ones first. Give these rank
        0's values, keep what the stage keeps, and free the rest: unit by unit, so that a rank has
        one unit more than it keeps."""
        for unit in self._units:
            unit.buckets = self._buckets_of(unit, unit.parameters[::-1])
            for bucket in unit.buckets:
                self._take_values(bucket)

    def _buckets_of(self, unit, parameters):  # a joint
        most_bytes = bucket_bytes(self.shard_size, self.bucket_cap_mb)
        buckets = []
        for alike in trained_and_frozen(parameters):
            for some in fill_buckets(alike, most_bytes, first_bytes=most_bytes):
                dtypes = self._dtypes_of(some[0].dtype)
                buckets.append(ShardedBucket(unit, some, dtypes, self._sharding))
        return buckets

    def _dtypes_of(self, dtype):  # a joint
        """(of shards, of whole parameters, of gradients) that have this dtype in the module."""
        return dtype, dtype, dtype

    def _take_values(self, bucket):
        """Give bucket and its shards rank 0's values; free the memory of its parameters."""
        values = torch.zeros(bucket.n, dtype=bucket.dtype, device=self._device)
        for slot in bucket.slots:
            real = self._real(slot.parameter)
            assert not real.is_meta, f"{slot.fqn} is on the meta device, and has no values"
            bucket.view(slot, values).copy_(real)
            real.data = values.new_empty(0)
            real.grad = None
        # As bytes: gloo knows no broadcast of int16 or float8.
        dist.broadcast(values.view(torch.uint8), group_src=0, group=self.process_group)
        self._keep_parameters(bucket, values)
        bucket.build_shards()

    def _real(self, p):  # a joint
        """What has the values of p, a parameter of the module."""
        return p

    def _new_chunk(self, bucket):  # a joint
        """(S,), memory for this rank's chunk alone."""
        return torch.empty(bucket.size, dtype=bucket.dtype, device=self._device)

    def _all_buckets(self):
        """Also those of frozen parameters."""
        return [bucket for unit in self._units for bucket in unit.buckets]

    # ---- what a script sees

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """(original name, this rank's shard) of every parameter of the module, in its order."""
        seen = set()
        for name, p in self._named("parameters"):
            is_wanted = recurse or "." not in name  # a dot: of a submodule
            # One that was added after wrapping is left out here, and refused by the next forward.
            if p in self._slots and is_wanted:
                if p not in seen or not remove_duplicate:
                    yield f"{prefix}.{name}" if prefix else name, self._slots[p].shard
                seen.add(p)

    def _apply(self, *_, **__):
        self._refuse("cast and move the module before wrapping it")

    def __getstate__(self):
        self._refuse("has one rank's shards, and is not copied or pickled: copy the module before "
                     "wrapping it, and save full_state_dict()")


# -------------------------------------------------------------------------------------------------
# stage 1


class PlainZero1(Stage):
    """P_os: each rank keeps optimizer state for 1/W of the parameters, and updates only these.

    A backward reduces each bucket to the owners of its chunks, the optimizer updates the shards,
    and the next forward gathers what they have become, each unit waiting for its own part.

    process_group: the ranks that train together; None for all.
    units: modules whose parameters are unsharded together; None: the elements of the outermost
    ModuleLists. What is in none of them, or in two, belongs to the root.

    A forward is a collective, also one that only evaluates. An optimizer's state_dict() is this
    rank's.

    What it asks for: ranks have equal modules, and call all units by `model(x)`, in one order, none
    inside another. Gradients come from `backward()`, which brings one of every trained parameter.
    After one outside of no_sync() they are used, and set to None; nobody replaces them. (In stages
    2 and 3 several may come before.) Those of no_sync() stay for the next one: zero_grad() does not
    forget them. Nothing but an optimizer's step() changes shards, after its closure, and none comes
    between a forward and its backward. An optimizer gets all shards of a unit, also empty ones. A
    checkpoint is around units, not inside of one. After a backward that has raised the stage is not
    used any more. `Zero1` asks for none of this.
    """

    # ---- what calls the events of a forward, and a step; `Reducer` calls those of a backward

    def _add_hooks(self):
        """On the modules of the units, the root's too: so `model.module(x)` works as well."""
        for unit in self._units:
            before, after = weakly(self._pre_forward, unit), weakly(self._post_forward, unit)
            # torch.compile: a unit's hooks run around its graph.
            self._hook_forward(unit.module, torch.compiler.disable(before),
                               torch.compiler.disable(after))
        self._hook_steps(register_optimizer_step_post_hook, self._after_step)

    def _hook_forward(self, module, before, after):
        """Around each forward of module, also one that raises."""
        self._add_hook(module.register_forward_pre_hook, before, prepend=True, with_kwargs=True)
        self._add_hook(module.register_forward_hook, after, always_call=True)

    def _pre_forward(self, unit, module, *_):
        """Before a unit's forward. In a backward it is computed once more, for a checkpoint."""
        if in_backward():
            self._notice_backward()
        elif module is self.module:
            self._begin_forward(self._units)
        if torch.is_grad_enabled():
            self._note_use(unit, module)
        self._use(unit)

    def _note_use(self, unit, module):
        """One forward shows an order. Several do not: each may skip other units."""
        if module is self.module:
            self._used.clear()
        if unit not in self._used:
            self._used.append(unit)

    def _post_forward(self, unit, module, *_):
        if module is self.module and not in_backward():
            self._end_forward()

    # ---- what a rank keeps

    def _keep_parameters(self, bucket, values):
        """values: (n,), the whole parameters. A step changes sharded, and so this rank's chunk of
        what the module computes with."""
        bucket.unsharded = values
        bucket.sharded = bucket.own_chunk(values)

    def _provide_memory_of_means(self, bucket):
        """Whole gradients are kept, so the means of the own chunk are a part of them."""
        bucket.sharded_gradients = bucket.own_chunk(bucket.gradients)

    # ---- forward: gather what the optimizer has changed

    def _begin_forward(self, units):
        """A forward begins, through these units: start to gather all. Each has its memory."""
        for unit in units:
            self._unshard(unit)

    def _use(self, unit):
        """From here on unit's parameters have values."""
        self._unshard(unit)
        self._wait_for_unshard(unit)

    def _end_forward(self):
        """A shard must not change while it is being sent: wait, if a unit was not used."""
        for unit in self._units:
            self._wait_for_unshard(unit)

    def _unshard(self, unit):
        """Start to gather unit's parameters from all ranks, unless they are current."""
        if unit.is_current or not unit.buckets:
            return
        self._provide_memory(unit)
        unit.is_current = True
        with span("start: unshard", unit):
            for bucket in unit.buckets:
                gather = start_all_gather(bucket.unsharded, self.shard_group, unit.tag, bucket.cuts)
                unit.gathers.append(gather)

    def _provide_memory(self, unit):
        """For unit's whole parameters, with the shards' values in this rank's chunk, which the
        all-gather sends. Here that is so: the shards are views of it."""

    def _wait_for_unshard(self, unit):
        """Wait for the all-gather of unit, if one is under way: then its parameters have values."""
        if not unit.gathers:
            return
        while unit.gathers:
            gather = unit.gathers.pop(0)
            with self._waiting("unshard", unit):
                gather.wait()
        for bucket in unit.buckets:
            bucket.point_parameters()  # in stage 3; before it only where a script has set p.data

    # ---- backward: reduce gradients to the owners of the shards

    def _prepare_for_backward(self, task):
        super()._prepare_for_backward(task)
        self._check_means()

    def _check_means(self):
        """This backward puts its gradients where the means of the one before are: see
        `_provide_memory_of_means`."""
        for slot in self._trained:
            gradient = slot.shard.grad
            is_held = slot in slot.bucket.unreduced  # no_sync() has put this rank's own there
            assert gradient is None or is_held or not gradient.any(), (
                f"call zero_grad() before a backward: the mean of {slot.fqn} would be lost")

    def _start_reduction(self, bucket):
        """Start to send each rank its chunk of bucket's gradients."""
        if bucket.sharded_gradients is None:
            self._provide_memory_of_means(bucket)
        bucket.reduction = start_reduce_scatter(bucket.gradients, self.shard_group,
                                                self._reduce_tag, bucket.cuts)

    def _finish_reduction(self, bucket):
        """Add what has arrived: the means of the own chunk."""
        bucket.reduction.add(bucket.sharded_gradients, self._earlier(bucket))

    def _earlier(self, bucket):
        """[(S,), the means of the backwards before, in this step], with which the sum begins, or
        []. Here there are none."""
        return []

    def _give_means(self, slots):
        for slot in slots:
            slot.shard.grad = slot.bucket.place_of_mean(slot)

    # ---- after the first step

    def _learn_order(self, came):
        """From now on gather units in the order in which the forward has used them, too."""
        super()._learn_order(came)
        self._units = in_order_of_use(self._units, self._used)

    # ---- a step

    def _after_step(self, optimizer, *_):
        """Hook of all optimizers: a unit is old if a step has changed its shards."""
        stepped = set()
        for group in optimizer.param_groups:
            stepped.update(group["params"])
        for unit in self._units:
            if not stepped.isdisjoint(unit.shards):
                self._outdate(unit)

    def _outdate(self, unit):
        """unit's shards have new values. So the whole parameters are old, and the next forward
        gathers them. What autograd has saved of them is old, too: by their version it sees that,
        and a backward raises."""
        unit.is_current = False
        unit.n_updates += 1
        torch.autograd.graph.increment_version(unit.parameters)


# -------------------------------------------------------------------------------------------------
# stage 2


class PlainZero2(PlainZero1):
    """P_os+g: each rank keeps also only its 1/W of the gradients. A bucket's whole gradients are
    freed when they are reduced, so each micro-step reduces. Means add up in the shards' `.grad`,
    micro batch after micro batch, as one process accumulates them."""

    def _begin_forward(self, units):
        self._free_means()
        super()._begin_forward(units)

    def _free_means(self):
        """What zero_grad() has dropped takes no memory in the forward, where activations need it.
        """
        for bucket in self._buckets:
            bucket.free_means()

    def _check_means(self):
        """Means have memory of their own."""

    def _provide_memory_of_means(self, bucket):
        """Apart from the whole gradients, which can be freed then."""
        bucket.sharded_gradients = self._new_chunk(bucket)

    def _finish_reduction(self, bucket):
        """As stage 1. Then the whole gradients are freed."""
        bucket.reduction.add(bucket.sharded_gradients, self._earlier(bucket))
        bucket.free_gradients()

    def _earlier(self, bucket):
        """The means are still there, unless zero_grad() has set `.grad` to None. If it has not for
        all, those become zeros."""
        if bucket.has_no_means():
            return []
        for slot in bucket.slots:
            if slot.shard.grad is None:
                bucket.place_of_mean(slot).zero_()
        return [bucket.sharded_gradients]


# -------------------------------------------------------------------------------------------------
# stage 3
#
# Which of four blocks are whole while a block computes: # has its values, + is being gathered, for
# the next one. The root is whole from the forward to the end of the backward.
#
#                  forward of          backward of
#                   0  1  2  3          3  2  1  0
#   block 0         #  .  .  .          .  .  +  #    Before its forward block 1 waits for the rest
#   block 1         +  #  .  .          .  +  #  #    of its all-gather. Then that of block 2 is
#   block 2         .  +  #  #          #  #  .  .    started, for which block 0 is freed. The last
#   block 3         .  .  +  #          #  .  .  .    two stay: the backward begins with them.
#
#   _started_last   1  2  3  3          2  1  0  0    When a block is used, the one after it on the
#   len(_to_start)  2  1  0  0          2  1  0  0    way is started; then both are as here.


class PlainZero3(PlainZero2):
    """P_os+g+p: each rank keeps also only its 1/W of the parameters.

    Beside the root, which stays, two units are whole: the one in use and the next one on the way,
    which leads through the units in the forward, and back in the backward. (In the first step the
    way has the order of registration, and after it the order in which that step has used the
    units.) Before a third one is gathered all others are freed. What autograd would save of a whole
    unit becomes a note, by which the backward unshards it again.

    A backward is a collective too, also under no_sync(), as it gathers. Under autocast autograd
    saves 16-bit copies of all weights: use param_dtype instead.

        _started_last      the last unit on the way that was started: it is gathered, or current
        _to_start          the units that come after it on the way
        _way_back          the units that a backward uses, in this order: at first all, from the
                           last one back; after `_learn_order` those of which it asks for weights
        _asked_for         those of which the last backward has, in the order of the first time
        _bucket_at_memory  {memory, by its `_cdata`: the bucket whose whole parameters are there}
    """

    def __init__(self, *arguments, **options):
        self._started_last, self._to_start = None, []
        self._bucket_at_memory = {}
        super().__init__(*arguments, **options)
        self._way_back, self._asked_for = with_parameters(reversed(self._units[1:])), []

    def _keep_parameters(self, bucket, values):
        """Keep only the own chunk, in memory of its own."""
        bucket.sharded = self._new_chunk(bucket).copy_(bucket.own_chunk(values))

    # ---- four events: the way out begins, a unit is used, the way back begins, it is over

    def _begin_forward(self, units):
        """A hook will use the root first."""
        self._free_means()
        self._started_last, self._to_start = self._root, with_parameters(units[1:])

    def _use(self, unit):
        """Before unit's forward, and when the backward asks for one of its weights: as stage 1.
        Then start the next one on the way, unless this was done at an earlier use."""
        super()._use(unit)
        if self._backward is not None and unit not in self._asked_for:
            self._asked_for.append(unit)
        if unit is self._started_last and self._to_start:
            self._start_next()

    def _prepare_for_backward(self, task):
        """The root is used first here, too, and stays whole to the end."""
        super()._prepare_for_backward(task)
        self._started_last, self._to_start = self._root, list(self._way_back)
        self._asked_for.clear()
        self._use(self._root)

    def _finalize_backward(self):
        super()._finalize_backward()
        self._reshard_all()

    def _learn_order(self, came):
        """The backward does not ask for weights of which autograd has saved none: those of an
        embedding, or of a first layer."""
        super()._learn_order(came)
        asked_for = [unit for unit in self._asked_for if unit is not self._root]
        self._way_back = with_parameters(asked_for)

    def _end_forward(self):
        """After one that only evaluates no backward comes, which would need what is whole now."""
        super()._end_forward()
        if not torch.is_grad_enabled():
            self._reshard_all()

    # ---- memory comes and goes

    def _start_next(self):
        following = self._to_start[0]
        self._unshard(following)  # the one that was started last is in use, so it is not freed
        self._started_last = following
        self._to_start.pop(0)

    def _provide_memory(self, unit):
        """New memory. First free all but the root and the unit that was started last."""
        for other in self._units:
            is_kept = other is self._root or other is self._started_last
            if other.is_current and not is_kept:
                self._reshard(other)
        # Before any bucket gets one: running out of memory leaves none half changed.
        buffers = [bucket.new_memory() for bucket in unit.buckets]
        for bucket, buffer in zip(unit.buckets, buffers):
            bucket.own_chunk(buffer).copy_(bucket.sharded)
            bucket.unsharded = buffer
            self._bucket_at_memory[buffer.untyped_storage()._cdata] = bucket

    def _reshard_all(self):
        for unit in self._units:
            self._reshard(unit)

    def _reshard(self, unit):
        """Free unit's whole parameters. (Perhaps nobody has waited for their all-gather: a backward
        does not ask for the weight of a first block, if its input needs no gradient.)"""
        if not unit.is_current:
            return
        self._wait_for_unshard(unit)
        unit.is_current = False
        with span("free:", unit):
            for bucket in unit.buckets:
                del self._bucket_at_memory[bucket.unsharded.untyped_storage()._cdata]
                bucket.free_parameters()

    def _outdate(self, unit):
        self._reshard(unit)
        super()._outdate(unit)

    # ---- notes
    #
    # Autograd saves a weight for the backward, and so would keep a whole unit alive. A pair of
    # functions can stand between: `_pack` is given what autograd saves, and returns what is kept in
    # its place, a note, as oracle.py's recipe: a function that returns the tensor. In the backward
    # `call_note` is given that. Autograd checks versions of tensors, not of notes: notes do it.

    def forward(self, *inputs, **kwargs):
        with self._take_notes():
            return super().forward(*inputs, **kwargs)

    def _take_notes(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, call_note)

    def _pack(self, t):
        """t, a tensor that autograd saves -> a note."""
        bucket = self._bucket_of(t)
        if bucket is not None:
            is_plain = t.dtype == bucket.param_dtype and not t.is_conj() and not t.is_neg()
            assert is_plain, f"autograd saves a view of {bucket} as other numbers"
        return self._note_of(t, bucket)

    def _note_of(self, t, bucket):
        """Of a view of the memory of a whole unit, which is bucket's: `_view_again`, by layout."""
        if bucket is None:
            # Detached: t may be the output of the node that saves it, and would keep itself alive.
            return functools.partial(self._kept_again, t.detach(), t._version)
        layout = t.shape, t.stride(), t.storage_offset()
        return functools.partial(self._view_again, bucket, layout, bucket.unit.n_updates)

    def _bucket_of(self, t):
        """The bucket in whose whole parameters t lies, or None."""
        if t.layout is not torch.strided:
            return None  # sparse: it has no memory of its own
        return self._bucket_at_memory.get(t.untyped_storage()._cdata)

    def _kept_again(self, t, version):
        if t._version != version:
            self._refuse(f"a backward needs a tensor of shape {tuple(t.shape)} as in its forward, "
                         f"but since then that was modified in place, as by step()")
        return t

    def _view_again(self, bucket, layout, n_updates):
        """In the backward, of which this may be the first sign."""
        self._notice_backward()
        self._use(bucket.unit)
        if bucket.unit.n_updates != n_updates:
            self._refuse(f"a backward needs weights of {bucket.unit.name} as in its forward, but "
                         f"since then that was modified in place, as by step()")
        return bucket.unsharded.as_strided(*layout)


def call_note(note):
    return note()


# -------------------------------------------------------------------------------------------------
# ranks and scripts that differ
#
# From here on nothing is about the idea. A layer does something before or after what a stage does,
# and calls that by super().


class UnevenForwards(UnevenRanks):
    """Before a stage: a rank may skip units, or call a part of the model; gradients may be
    replaced, missing or not zeroed; a script may change shards without an optimizer.

    So hooks are on all modules with parameters, and a forward begins with the first of them.

        _in_forward    [(module, its unit)] of forwards under way, the innermost last; without
                       submodules that are called in the forward of their unit
        _called_alone  submodules that a forward has begun with, outside of their unit's
        _gathers_all   whether the next forward gathers all units: `_begin_forward`
    """

    _is_last_backward = True  # set_is_last_backward() changes it
    _gathers_all = True

    def _add_hooks(self):
        """Also on submodules that have parameters: a unit may be a mere container."""
        self._in_forward, self._called_alone = [], set()
        super()._add_hooks()
        for unit in self._units:
            before = weakly(self._pre_submodule, unit)
            after = weakly(self._post_submodule, unit)
            for m in unit.submodules:
                if m is not unit.module and m._parameters:
                    self._add_hook(m.register_forward_pre_hook, unless_compiling(before),
                                   prepend=True, with_kwargs=True)
                    self._add_hook(m.register_forward_hook, unless_compiling(after))

    # ---- forward

    def _pre_submodule(self, unit, module, inputs, kwargs):
        """In its unit's forward a submodule has what it needs, and this does nothing."""
        if self._has_what_it_needs(unit, module):
            return
        if module not in self._called_alone:
            self._called_alone.add(module)
            # For a forward that raises. Only now, since torch.compile looks at the ids of hooks
            # that are always called: with such ones in it, each block would be a graph of its own.
            after = unless_compiling(weakly(self._post_alone, unit))
            self._add_hook(module.register_forward_hook, after, always_call=True)
        self._pre_forward(unit, module, inputs, kwargs)

    def _post_alone(self, unit, module, *_):
        """End a forward that has begun with this submodule, also one that raises."""
        if self._in_forward and self._in_forward[-1][0] is module:
            self._post_forward(unit, module)

    def _has_what_it_needs(self, unit, submodule):
        """Whether that is called in unit's forward, and unit is whole: a backward in this forward
        may have freed it."""
        if not self._in_forward:
            return False
        module, unit_around = self._in_forward[-1]
        is_inside = unit_around is unit and module is not submodule  # which may call itself
        return is_inside and self._is_whole(unit)

    def _is_whole(self, unit):  # a joint
        return unit.is_current and not unit.gathers

    def _post_submodule(self, unit, module, *_):
        """The unit around may have been freed meanwhile: unshard it again."""
        if not self._in_forward:
            return
        innermost, unit_around = self._in_forward[-1]
        if innermost is not module and not self._is_whole(unit_around):
            self._use(unit_around)

    def forward(self, *inputs, **kwargs):
        if not in_backward():
            self._in_forward.clear()  # left by a forward that Ctrl-C has ended
        return super().forward(*inputs, **kwargs)

    def _pre_forward(self, unit, module, inputs, kwargs):
        """The first one begins a forward. If a script calls a part of the model, nobody knows which
        units that will use."""
        self._in_forward.append((module, unit))
        is_first = len(self._in_forward) == 1
        if is_first and not in_backward():
            self._prepare_forward()
            if module is not self.module:
                self._begin_forward([])
                self._use(self._root)
        if module is self.module and not is_first:
            self._use(unit)  # a model that calls itself: its forward has begun
        else:
            super()._pre_forward(unit, module)

    def _post_forward(self, unit, module, *_):
        if not self._in_forward or self._in_forward[-1][0] is not module:
            return  # a hook before ours has raised, so `_pre_forward` was not called
        self._in_forward.pop()
        if self._in_forward:
            return
        super()._post_forward(unit, module)
        if module is not self.module and not in_backward():
            self._end_forward()

    def _begin_forward(self, units):
        """Before, all units count as old: a script may have changed shards, whose writes to `.data`
        leave no trace. But not after a backward that no step follows (`_gathers_all` is False).

        All ranks must decide alike, or some wait forever. So this does not look at `.grad`: a
        backward that raised may have left one on one rank alone."""
        if self._gathers_all:
            for unit in self._units:
                unit.is_current = False
        super()._begin_forward(units)

    # ---- backward

    def _check_means(self):
        """In stage 1 means of the last backward lie where this one puts its gradients: give them
        other memory. Meanwhile they are hidden, as the plain stage asks that there are none;
        `_earlier` will take them into the sum."""
        held = {}
        for slot in self._trained:
            if slot.shard.grad is not None:
                held[slot] = slot.shard.grad
                slot.shard.grad = None
        super()._check_means()
        for slot, gradient in held.items():
            if is_in_memory_of(gradient, slot.bucket.gradients):
                gradient.data = gradient.data.clone()
            slot.shard.grad = gradient

    def _is_home(self, slot):
        """Whether the shard's `.grad` is its part of sharded_gradients. An empty shard's is."""
        gradient, mean = slot.shard.grad, slot.bucket.place_of_mean(slot)
        if mean.numel() == 0:
            return True  # the address of nothing is 0 everywhere, so it could not be compared
        return gradient is not None and gradient.data_ptr() == mean.data_ptr()

    def _give_means(self, slots):
        """If there is a `.grad`, it stays the same object, as scripts keep lists of gradients."""
        without = [slot for slot in slots if slot.shard.grad is None]
        for slot in slots:
            if slot.shard.grad is not None and not self._is_home(slot):
                # A loss over the shards has made it.
                slot.shard.grad.data = slot.bucket.place_of_mean(slot).add_(slot.shard.grad)
        super()._give_means(without)

    def _earlier(self, bucket):
        """As the stage, if it has the means of before. It has not where a script has replaced some
        `.grad`, and in stage 1, where they were moved: then [a copy of what each `.grad` holds,
        with zeros where it is None]. Each stays the same object, and gets the new sum."""
        held = [slot for slot in bucket.slots if slot.shard.grad is not None]
        if all(self._is_home(slot) for slot in held):
            earlier = super()._earlier(bucket)
            if earlier or not held:
                return earlier
        together = torch.zeros_like(bucket.sharded)
        for slot in held:
            bucket.shard_view(slot, together).copy_(slot.shard.grad)
            slot.shard.grad.data = bucket.place_of_mean(slot)
        return [together]

    def _learn_order(self, came):
        """All ranks gather units in rank 0's order."""
        self._used = self._of_rank_0(self._units, self._used)
        super()._learn_order(came)

    def _finalize_backward(self):
        """Note whether a step may follow. Parts that are called next belong to another one."""
        super()._finalize_backward()
        self._used.clear()
        self._gathers_all = self.require_backward_grad_sync and self._is_last_backward

    def _after_step(self, optimizer, *_):
        """All ranks must gather the same units next, and some may have given the optimizer only
        shards that are not empty. So if there is any, the next forward gathers all units."""
        super()._after_step(optimizer)
        for group in optimizer.param_groups:
            if not self._shards.isdisjoint(group["params"]):
                self._gathers_all = True

    # ---- what a script calls

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether a step follows the next backwards; FSDP2's name. Unless told, it does.

        If not, stages 1 and 2 need not gather parameters in the next forward, as they have not
        changed: so stage 2 with n micro-steps sends n + 1 instead of 2 n times (W-1)/W Psi. If a
        step comes all the same, or a script writes to shards, they gather. All ranks have to do all
        of that alike: say the same, step the same optimizers, write to the same shards, also a rank
        whose shards are empty. It changes no bit, and nothing in stage 3."""
        self._is_last_backward = is_last_backward

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """As `StateDicts`. Before, ranks compare what they have done since the last backward: it
        may be the end, and no backward will."""
        self._check_counts()
        if self._trained:
            self._start_count([])
            self._check_counts()
        return super().full_state_dict()

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets what no_sync() has held back, and a backward that has raised, for whose
        all-gathers it waits."""
        super().zero_grad(set_to_none)
        with torch._C.DisableTorchFunctionSubclass():  # guards' class would take the shard's
            for slot in self._trained:
                slot.parameter.grad = None  # was on its way to a bucket
        for unit in self._units:
            self._wait_for_unshard(unit)
        self._gathers_all = True
        for bucket in self._all_buckets():
            bucket.unreduced.clear()


# In stage 3 a rank that skips block 1 takes part in its collectives, in the order of the others:
#
#   backward of a rank that uses all   of a rank that skips block 1
#     use 2, start 1, reduce 2           use 2, start 1, reduce 2
#     use 1, start 0, reduce 1
#     use 0, reduce 0                    start 0, reduce 1, use 0, reduce 0
#
# use: wait for its all-gather; start: start that; reduce: start its reduce-scatter. The rank on the
# right has no gradients of 1 to wait for. Yet it may reduce 1 only after it has started 0: that is
# when a weight of 0 is asked for, and `_use` sees that 0 is still to come.


class UnevenOrder(UnevenForwards):
    """Before stage 3: a rank may skip units. If any rank calls a unit twice, in another order than
    that which was learned, or in a second forward before the backward, all ranks must call the same
    units; so they must if checkpoints begin to compute units again. Outside of its unit's forward a
    parameter may be nan; so may the root's outside of the model's.

    What is freed when depends on the way alone, not on what a rank has used: so it is the same on
    all ranks.

        _note_contexts  of the forwards under way: in them autograd's saves become notes
        _off_the_way    {a unit that is not on the way back}; the root, too, is not on it
        _n_before       {bucket of a unit that is not on the way back: how many units of that have
                        to be started before it}; all, where it is not there
    """

    def __init__(self, *arguments, **options):
        self._note_contexts, self._off_the_way = [], set()
        self._n_before = {}
        super().__init__(*arguments, **options)

    def _track(self, buckets, frozen):
        """At first the root's come last: they have to wait for all of the way."""
        of_root = [bucket for bucket in buckets if bucket.unit is self._root]
        others = [bucket for bucket in buckets if bucket.unit is not self._root]
        super()._track(others + of_root, frozen)

    # ---- a rank goes all of the way, as the others do

    def _begin_forward(self, units):
        """Free what an earlier forward has left: if that raised, this may differ between ranks."""
        for unit in self._units:
            self._reshard(unit)
        super()._begin_forward(units)

    def _use(self, unit):
        """Before, start all up to it, since other ranks may wait for them."""
        while unit in self._to_start:
            self._start_next()
        super()._use(unit)

    def _end_forward(self):
        self._go_to_the_end()
        super()._end_forward()

    def _finalize_backward(self):
        self._go_to_the_end()
        super()._finalize_backward()

    def _go_to_the_end(self):
        """Start also what only other ranks use."""
        while self._to_start:
            self._start_next()

    def _learn_order(self, came):
        """Take rank 0's way back. A unit is off it only if this backward has brought all its
        gradients and asked for no weight: of any other unit a later backward may ask for some, or
        that of another rank. Where autograd saves weights of a unit that is off the way all the
        same, `_pack_inside` clones them, as a rank could not gather them alone."""
        super()._learn_order(came)
        done = {slot.bucket.unit for slot in came}
        for slot in self._trained:
            if slot not in came:
                done.discard(slot.bucket.unit)
        stays = []
        for unit in with_parameters(reversed(self._units[1:])):
            if unit in self._asked_for or unit not in done:
                stays.append(unit)
        stays = in_order_of_use(stays, self._asked_for)
        self._way_back = self._of_rank_0(self._units, stays)
        self._off_the_way = set(self._units[1:]) - set(self._way_back)
        self._n_before = {}
        last = {slot.bucket: place for place, slot in enumerate(self._came_on_rank_0)}
        for bucket, place in last.items():
            # Units in use, or to come, when rank 0's was full. (Before the first of them on the way
            # there may be units that rank 0 has skipped, and other ranks use before it is full.)
            units = {slot.bucket.unit for slot in self._came_on_rank_0[place + 1:]}
            places = [i for i, unit in enumerate(self._way_back) if unit in units]
            # If rank 0 has not used all of it, nobody knows when it is full elsewhere.
            if places and set(bucket.slots) <= set(self._came_on_rank_0):
                # Whoever uses that one has started the next one, too.
                self._n_before[bucket] = min(places[0] + 2, len(self._way_back))

    def _start_next(self):
        """In a backward, launch the buckets that only waited for this."""
        super()._start_next()
        if in_backward():
            self._launch_ready_buckets()

    def _is_ready(self, bucket):
        """Only when the unit after bucket's on the way was started. (The last unit has none after
        it: when it was started itself.)

        Native collectives must come in one order on all ranks. A rank of which autograd asks a
        weight of the unit starts the next one before it has the gradients. A rank that skips the
        unit has no gradients to wait for, and would reduce first.

        So would it with the root's, and those of a unit off the way: another rank has them later,
        and until then may need units that this one would start when it has waited for them."""
        if bucket.unit is self._root or bucket.unit in self._off_the_way:
            n_units = len(self._way_back)
            if n_units - len(self._to_start) < self._n_before.get(bucket, n_units):
                return False
        if bucket.unit in self._to_start:
            return False
        if bucket.unit is self._started_last and self._to_start:
            return False
        return super()._is_ready(bucket)

    def _reshard_all(self):
        """Unless this backward ran inside a forward."""
        if not self._in_forward:
            super()._reshard_all()

    # ---- notes are taken anew inside of a checkpoint, too: it must not keep a weight

    def _pre_forward(self, unit, module, inputs, kwargs):
        self._note_contexts.append(self._take_notes())
        self._note_contexts[-1].__enter__()
        super()._pre_forward(unit, module, inputs, kwargs)

    def _post_forward(self, unit, module, *_):
        """The unit around may have been freed meanwhile: unshard it again."""
        try:
            super()._post_forward(unit, module)
        finally:  # that may time out, while it waits for units that were skipped
            while len(self._note_contexts) > len(self._in_forward):
                self._note_contexts.pop().__exit__(None, None, None)
        if self._in_forward:
            _, unit_around = self._in_forward[-1]
            self._use(unit_around)

    def _has_what_it_needs(self, unit, submodule):
        """Inside of a checkpoint, whose hooks are on top, notes have to be taken anew."""
        if not super()._has_what_it_needs(unit, submodule):
            return False
        return not torch.is_grad_enabled() or self._takes_notes(top_saved_tensors_hooks())

    def _takes_notes(self, hooks):
        return hooks is not None and getattr(hooks[0], "func", None) == self._pack_inside

    def _take_notes(self):
        """All that is no weight goes to the hooks around, such as those of a checkpoint."""
        outer = top_saved_tensors_hooks()
        # In a forward inside one of ours the hooks on top are ours already: keep them.
        if self._takes_notes(outer) or not torch.is_grad_enabled():
            return NOTHING
        notes = super()._take_notes()
        notes.pack_hook = functools.partial(self._pack_inside, outer)
        return notes

    @never_compiled  # or it would be compiled for each tensor
    def _pack_inside(self, outer, t):
        """As `_pack`. But a tensor that is no plain view of a unit's memory, such as a complex one,
        is cloned, as that memory will be freed; so is one of a unit that is off the way back. All
        that is no unit's goes to outer, the pair of hooks around, if there is one."""
        bucket = self._bucket_of(t)
        if bucket is not None:
            # Shape and strides do not tell whether t is seen as complex, or conjugated.
            is_plain = t.dtype == bucket.param_dtype and not t.is_conj() and not t.is_neg()
            if not is_plain or bucket.unit in self._off_the_way:
                t, bucket = t.detach().clone(), None
        if bucket is None and outer is not None:
            pack, unpack = outer
            return functools.partial(unpack, pack(t))  # they have tests of their own
        return self._note_of(t, bucket)


# -------------------------------------------------------------------------------------------------
# options


class Hybrid:
    """Before a stage: shard_size, hybrid sharding, as torch's HSDP. Each group of so many ranks has
    all shards, and gradients are reduced inside a group, then over groups."""

    def _make_groups(self):
        """And the ranks that have the same shards as this one."""
        super()._make_groups()
        self._replicate_group, self._summing = None, None
        if self._asked_shard_size not in (None, self.world_size):
            groups = HierarchicalState(self._asked_shard_size, self.process_group)
            self.shard_group, self._replicate_group = groups.intra_node, groups.inter_node
            self.shard_size = self._asked_shard_size

    def _finish_reduction(self, bucket):
        """The own chunk is summed over this group, in place. Then it is summed over groups, while
        the next bucket is launched. With that sum the stage goes on. (It needs no tag: nothing else
        is sent in the group of these ranks.)"""
        if self._replicate_group is None:
            super()._finish_reduction(bucket)
            return
        self._finish_sum()  # of the bucket before
        bucket.reduction.add()
        own = bucket.own_chunk(bucket.gradients)
        bucket.reduction, self._summing = SumOverGroups(own, self._replicate_group), bucket

    def _finish_sum(self):
        bucket, self._summing = self._summing, None
        if bucket is not None:
            super()._finish_reduction(bucket)

    def _wait_for_buckets(self):
        super()._wait_for_buckets()
        if self._summing is not None:
            with self._waiting("reduce", self._summing):
                self._finish_sum()


class SumOverGroups:
    """Of own, a group's sum: a reduction, as `start_reduce_scatter` returns."""

    def __init__(self, own, process_group):
        self.own, self.reduction = own, start_all_reduce(own, process_group)

    def add(self, out, earlier):
        self.reduction.add()
        self.reduction.wait()
        add_in_rank_order([*earlier, self.own], out)
        self.own, self.reduction = None, None  # frees the gradients, whoever keeps this


class OtherMemory:
    """Before a stage: chunks that have another dtype than what the module computes with, or are on
    another device, and so have memory of their own in any stage.

    param_dtype: of parameters in forward and backward, and of the inputs of units, which are cast.
    reduce_dtype: of gradients on their way. offload: shards are on the CPU."""

    def _dtypes_of(self, dtype):
        dtypes = super()._dtypes_of(dtype)
        if not dtype.is_floating_point:
            return dtypes
        return dtype, self.param_dtype or dtype, self.reduce_dtype or dtype

    def _choose_device(self):
        device = super()._choose_device()
        self._offloads = self._asked_offload and device.type != "cpu"
        return device

    def _new_chunk(self, bucket):
        if not self._offloads:
            return super()._new_chunk(bucket)
        return torch.empty(bucket.size, dtype=bucket.dtype, pin_memory=True, device="cpu")

    def _keep_parameters(self, bucket, values):
        super()._keep_parameters(bucket, values)
        if bucket.unsharded is None:
            return
        bucket.unsharded = values.to(bucket.param_dtype)
        if self._offloads or bucket.unsharded is not values:
            bucket.sharded = self._new_chunk(bucket).copy_(bucket.own_chunk(values))

    def _provide_memory(self, unit):
        """In stages 1 and 2 that of what the module computes with is then a copy."""
        for bucket in unit.buckets:
            whole = bucket.unsharded
            if whole is not None and not is_in_memory_of(bucket.sharded, whole):
                bucket.own_chunk(whole).copy_(bucket.sharded)
        super()._provide_memory(unit)

    def _provide_memory_of_means(self, bucket):
        super()._provide_memory_of_means(bucket)
        if self._offloads or bucket.reduce_dtype != bucket.dtype:
            bucket.sharded_gradients = self._new_chunk(bucket)

    def _begin_forward(self, units):
        """In stage 1, too, means may have memory of their own, which can be freed as in stage 2."""
        if self._offloads or self.reduce_dtype is not None:
            for bucket in self._buckets:
                if not is_in_memory_of(bucket.sharded_gradients, bucket.gradients):
                    bucket.free_means()
        super()._begin_forward(units)

    def _earlier(self, bucket):
        """On the device of the gradients."""
        return [t.to(self._device) for t in super()._earlier(bucket)]

    def _finish_reduction(self, bucket):
        """In stage 1, too, the gradients can be freed then."""
        super()._finish_reduction(bucket)
        if bucket.gradients is not None:
            if not is_in_memory_of(bucket.sharded_gradients, bucket.gradients):
                bucket.free_gradients()

    def _pre_forward(self, unit, module, inputs, kwargs):
        super()._pre_forward(unit, module, inputs, kwargs)
        if self.param_dtype is not None and module is unit.module:
            return cast_floats((inputs, kwargs), self.param_dtype)


class Uncut:
    """Before a stage: uncut, parameters each of which one rank owns whole: see `OwnedBucket`."""

    def _build_buckets(self):
        # {whether parameters are trained: [bytes that each rank owns so far]}. Apart, since a
        # trained one takes more memory: gradients and the optimizer's state.
        self._loads = {True: [0] * self.shard_size, False: [0] * self.shard_size}
        super()._build_buckets()

    def _buckets_of(self, unit, parameters):
        """And one bucket for all uncut ones of a kind, whatever its size: the more there are in a
        bucket, the more even its chunks."""
        cut = [p for p in parameters if p not in self._uncut]
        uncut = [p for p in parameters if p in self._uncut]
        buckets = super()._buckets_of(unit, cut)
        for alike in trained_and_frozen(uncut):
            for some in fill_buckets(alike, math.inf, math.inf):
                owners = choose_owners(some, self._loads[some[0].requires_grad])
                dtypes = self._dtypes_of(some[0].dtype)
                buckets.append(OwnedBucket(owners, unit, some, dtypes, self._sharding))
        return buckets

    def _track(self, buckets, frozen):
        super()._track(self._uncut_last(buckets), frozen)

    def _learn_order(self, came):
        super()._learn_order(came)
        self._buckets = self._uncut_last(self._buckets)

    def _uncut_last(self, buckets):
        """buckets, but in a block uncut matrices come after what else it has: that is small, such
        as norms, and each launch waits for the bucket before."""
        ordered = list(buckets)
        for bucket in buckets:
            if bucket.cuts is not None and bucket.unit is not self._root:
                of_unit = [other for other in ordered if other.unit is bucket.unit]
                ordered.insert(ordered.index(of_unit[-1]) + 1, bucket)
                ordered.remove(bucket)  # the first of the two: where it was
        return ordered

    def _give_means(self, slots):
        """Where another rank owns the parameter, `.grad` is None, so that every optimizer leaves
        the empty shard alone: some divide by its number of elements."""
        super()._give_means(slots)
        for slot in slots:
            if slot.bucket.cuts is not None and slot.bucket.is_elsewhere(slot):
                slot.shard.grad = None


class MetaDevice:
    """Before a stage: parameters on the meta device are filled unit by unit, where they are needed.
    Until all are, such a one has a stand-in, a real one with its values: see `fill_meta`."""

    def _choose_device(self):
        """If all is on meta, the one that was given, or the best."""
        device = super()._choose_device()
        if device is None:
            device = self._asked_device
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            is_gloo = dist.get_backend(self.process_group) == "gloo"
            device = "cpu" if is_gloo or accelerator is None else accelerator
        return torch.empty(0, device=device).device  # with its index

    def _build_buckets(self):
        self._stand_ins = {}
        super()._build_buckets()
        swap(self._stand_ins)
        self._stand_ins.clear()
        self._init_fn.clear()

    def _buckets_of(self, unit, parameters):
        self._stand_ins |= fill_meta(self.module, unit, self._device, *self._init_fn)
        return super()._buckets_of(unit, parameters)

    def _real(self, p):
        return self._stand_ins.get(p, super()._real(p))


def is_in_memory_of(t, buffer):
    """Whether t, which may be None, is a view of buffer, and not a copy."""
    if t is None or buffer is None:
        return False
    # _cdata tells one piece of memory from another. data_ptr() is 0 for all empty tensors.
    return t.untyped_storage()._cdata == buffer.untyped_storage()._cdata


class ZeroOptions(Hybrid, OtherMemory, Uncut, MetaDevice):
    """Before a stage: its options."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None,
                 units: Iterable[nn.Module] | None = None, param_dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None, shard_size: int | None = None,
                 offload: bool = False, init_fn: Callable[[nn.Module], object] | None = None,
                 device: torch.device | str | None = None, uncut: Iterable[nn.Parameter] = (),
                 broadcast_buffers: bool = True, bucket_cap_mb: float | None = None):
        self.forward_sync_buffers = self._sends_buffers_at_first = broadcast_buffers
        refuse_no_size(bucket_cap_mb)
        self.bucket_cap_mb = bucket_cap_mb
        self._uncut = set_of_parameters(module, uncut)
        self._compared = [f"{param_dtype=} {reduce_dtype=} {shard_size=} {bucket_cap_mb=}"]
        for name, p in named_tensors(module, "parameters"):
            if p in self._uncut:
                self._compared.append(f"uncut: {name}")
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self._asked_shard_size, self._asked_offload = shard_size, offload
        self._init_fn = [init_fn]  # in a list: a Module may be given, which is not kept
        self._asked_device = device
        super().__init__(module, process_group, units)


# -------------------------------------------------------------------------------------------------
# saving and loading


class StateDicts(OptimizerStates):
    """Before a stage: whole parameters, and state dicts. It needs no other layer: a stage that is
    plain but for this is `class Mine(StateDicts, PlainZero3)`."""

    def shard_starts(self) -> dict[str, int]:
        """{original name: where this rank's shard begins in the parameter, in elements in order of
        memory}: beside `named_parameters()` all that it takes to load at another world size."""
        starts = {}
        for name, slot in self._named_slots():
            starts[name], _ = slot.bucket.shard_range(slot)
        return starts

    def _named_slots(self):
        """[(original name, slot)] of what the module has now: a script may have renamed some. A
        tied one once."""
        names = first_names(self._named("parameters"))
        return [(name, self._slots[p]) for p, name in names.items()]

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (original name, whole parameter in the shards' dtype), a tied one once. It holds
        the whole parameters of one unit. A collective: every rank has to go through all of it."""
        wholes = {}  # {bucket: its whole parameters}, of one unit
        for name, slot in self._named_slots():
            bucket = slot.bucket
            if bucket not in wholes:
                wholes = {b: whole for b, whole in wholes.items() if b.unit is bucket.unit}
                whole = torch.empty(bucket.n, dtype=bucket.dtype, device=self._device)
                bucket.own_chunk(whole).copy_(bucket.sharded)
                gather = start_all_gather(whole, self.shard_group, self._full_parameters_tag,
                                          bucket.cuts)
                with self._waiting("gather whole parameters, which all ranks have to do"):
                    gather.wait()
                wholes[bucket] = whole
            yield name, bucket.view(slot, wholes[bucket]).clone()

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """{name: whole tensor}, on every rank, as the module's state_dict(). A collective.

        Costs the memory of the whole model on every rank; `full_parameters` does not.
        """
        whole = dict(self.full_parameters())
        # A tied one has several names in the state, and one there.
        name_of = {slot: name for name, slot in self._named_slots()}
        state = {}
        for name, value, slot in self._module_state():
            state[name] = copy_of(value) if slot is None else whole[name_of[slot]]
        return state

    def _module_state(self):
        """[(name, value, its slot or None)] of the module's state, by torch's own `state_dict`: the
        module may have another one. A value that is no parameter is a buffer, or, of any type, what
        `get_extra_state()` returns or a hook adds."""
        state = []
        for name, value in nn.Module.state_dict(self.module, keep_vars=True).items():
            slot = self._slots.get(value) if isinstance(value, torch.Tensor) else None
            state.append((name, value, slot))
        return state

    def state_dict(self, *, destination: dict | None = None, prefix: str = "",
                   keep_vars: bool = False) -> dict[str, torch.Tensor]:
        """This rank's shards and the buffers under the module's own names. Not a collective."""
        destination = {} if destination is None else destination
        for name, value, slot in self._module_state():
            value = value if slot is None else slot.shard
            # Copied, since torch.save would write all of the buffer that a view is of.
            destination[prefix + name] = value if keep_vars else copy_of(value)
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Copy in what `state_dict()` gave at this world size. Raises RuntimeError on a misfit."""
        self._load(state_dict, self.state_dict(keep_vars=True), lambda slot, value: value)

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Write whole parameters and buffers: each rank copies its part. Raises RuntimeError naming
        what is missing, left over or of another shape, before anything is written."""
        ours = {name: value for name, value, _ in self._module_state()}
        self._load(state_dict, ours, lambda slot, value: slot.bucket.part_of(slot, value))

    def _load(self, given, ours, part_of):
        """Load a state dict. ours: what there is, of the shapes that it must have. part_of(slot,
        value): this rank's part of a parameter's value there. What is neither a parameter nor a
        buffer, such as extra state, the module itself has to load."""
        self._refuse_misfit(given, ours)
        buffers = {t for _, t in named_tensors(self.module, "buffers")}
        rest = {}
        for name, value, slot in self._module_state():
            if slot is not None:
                slot.shard.copy_(part_of(slot, given[name]))
            elif isinstance(value, torch.Tensor) and value in buffers:
                value.copy_(given[name])
            else:
                rest[name] = given[name]
        if rest:
            nn.Module.load_state_dict(self.module, rest, strict=False)
        for unit in self._units:
            self._outdate(unit)

    def _refuse_misfit(self, given, ours):
        """Raise where two state dicts have other names, or parameters or buffers other shapes."""
        buffers = {t for _, t in named_tensors(self.module, "buffers")}
        with_shape = self._shards | set(self._slots) | buffers
        wrong = sorted(ours.keys() ^ given.keys())
        with torch._C.DisableTorchFunctionSubclass():  # guards' class would warn of a shard's
            for name in ours.keys() & given.keys():
                value, shape = ours[name], getattr(given[name], "shape", None)
                has_shape = isinstance(value, torch.Tensor) and value in with_shape
                if has_shape and value.shape != shape:
                    wrong.append(f"{name}: {shape}, not {value.shape}")
        if wrong:
            self._refuse(f"nothing was loaded; missing, left over or of another shape: {wrong}")


# -------------------------------------------------------------------------------------------------
# small functions


def find_units(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists of module, except lists of bare parameters, which
    are read by the module around."""
    if isinstance(module, nn.ModuleList):
        bare = nn.ParameterList, nn.ParameterDict, type(None)
        elements = module._modules.values()
        return [element for element in elements if not isinstance(element, bare)]
    units = []
    for child in module._modules.values():
        if child is not None:
            units += find_units(child)
    return units


def divide_into_units(stage, modules, first_tag):
    """[Unit]: the root, and one for each of modules, in the order in which they are registered.
    Each submodule and each parameter of stage's module belongs to one of them."""
    names = first_names(named_modules(stage.module))
    modules = set(modules)
    for m in modules:
        if m not in names or m is stage.module:
            raise ValueError(f"{stage._get_name()}: a unit is not a submodule of the module: "
                             f"units= has a {type(m).__name__}")
    root = Unit("the root", stage.module, first_tag)
    units = [root]
    unit_of = {}  # {submodule, or parameter: its unit; the root, if it is in two}
    for m in names:
        if m in modules:
            unit = Unit(names[m], m, first_tag + len(units))
            units.append(unit)
            parts = set()
            for _, submodule in named_modules(m):
                parts.update([submodule, *submodule._parameters.values()])
            for part in parts:
                unit_of[part] = root if part in unit_of else unit
    for m in names:
        unit = unit_of.get(m, root)
        unit.submodules.append(m)
        if unit is root:  # its parameters belong there, even if a unit shares them
            for p in m._parameters.values():
                unit_of[p] = root
    for p in first_names(stage._named("parameters")):
        unit_of[p].parameters.append(p)
    return units


def with_parameters(units):
    """Those of units that have any. A ReLU has none: there is nothing to gather for it."""
    return [unit for unit in units if unit.buckets]


def trained_and_frozen(parameters):
    """([those that are trained], [the others])."""
    trained = [p for p in parameters if p.requires_grad]
    frozen = [p for p in parameters if not p.requires_grad]
    return trained, frozen


def order_of_backward(units, parameters):
    """(the buckets with trained parameters, in the order in which a backward completes them if the
    module uses its parameters as it has registered them; the others). parameters: in that order."""
    places = {p: place for place, p in enumerate(parameters)}
    buckets = [bucket for unit in units for bucket in unit.buckets]
    buckets.sort(key=lambda bucket: min(places[slot.parameter] for slot in bucket.slots))
    trained, frozen = [], []
    for bucket in reversed(buckets):
        if bucket.slots[0].parameter.requires_grad:
            trained.append(bucket)
        else:
            frozen.append(bucket)
    return trained, frozen


def top_saved_tensors_hooks():
    """The pair that is called now when autograd saves a tensor, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # True: compiled or not


def unless_compiling(hook):
    """A hook that does nothing in what torch.compile makes of the module around."""
    def quiet_hook(*arguments):
        if not torch.compiler.is_dynamo_compiling():
            return hook(*arguments)

    return quiet_hook


def copy_of(value):
    """A copy of a tensor; anything else itself."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def cast_floats(inputs, dtype):
    """Inputs of a forward with all floating-point tensors in dtype. Subclasses of dict, into which
    `tree_map` does not look, are made anew from pairs, as torch's DDP does it."""
    known = dict, collections.OrderedDict, collections.defaultdict

    def is_subclass(value):
        return isinstance(value, dict) and type(value) not in known

    def cast(value):
        if is_subclass(value):
            return type(value)((key, cast_floats(value[key], dtype)) for key in value)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast, inputs, is_leaf=is_subclass)


# -------------------------------------------------------------------------------------------------
# modules on the meta device


def swap(pairs):
    """Exchange the contents of each key of pairs with those of its value: who had the one now sees
    the other. A second call undoes it."""
    for p, q in pairs.items():
        torch.utils.swap_tensors(p, q)


def fill_meta(module, unit, device, init_fn):
    """Fill what unit of module has on the meta device -> {parameter: a real one with its values}.

                               the module's parameter   its stand-in
        at first               meta                     real, not yet written
        swapped, and filled    values                   meta
        swapped back           meta                     values, until `_take_values` has read them
        swapped at the end     real: `point_parameters` gives its values

    init_fn(submodule) fills it, if given. Otherwise the module's `init_weights()` does, which must
    skip what is still on meta, or `reset_parameters()` of the submodules. Rank 0's values count.
    The unit's buffers are real then. Its parameters are on meta again, so that filling another unit
    does not touch them.
    """
    stand_ins, to_fill = {}, []  # to_fill: modules
    for p in unit.parameters:
        if p.is_meta:
            stand_ins[p] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
            vars(stand_ins[p]).update(vars(p))
    swap(stand_ins)
    for m in first_names(named_modules(module)):
        has_any = any(p in stand_ins for p in m._parameters.values())
        for name, t in m._buffers.items():
            if m in unit.submodules and t is not None and t.is_meta:
                m._buffers[name] = torch.empty_like(t, device=device)
                has_any = True
        if has_any:
            to_fill.append(m)
    if to_fill and init_fn is None and hasattr(module, "init_weights"):
        module.init_weights()
        to_fill.clear()
    for m in to_fill:
        reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
        if init_fn is not None:
            init_fn(m)
        elif reset is not None:
            reset()
        else:
            raise RuntimeError(f"{unit.name} has a {type(m).__name__} with tensors on meta, and "
                               f"without reset_parameters(): pass init_fn for it")
    swap(stand_ins)
    return stand_ins


# -------------------------------------------------------------------------------------------------
# whole parameters, for Muon
#
# Why Muon and ZeRO clash, and the way out. Muon makes the update of a matrix orthogonal, for which
# it needs all of its gradient. A chunk of a bucket ends anywhere, so a matrix may lie half on one
# rank and half on the next, and neither has all. FSDP's users gather each matrix for the step. Here
# the chunks of some buckets end between parameters: `Zero3(module, uncut=matrices)`. So each matrix
# has one rank that owns it, and updates it as one process would.


def set_of_parameters(module, uncut):
    """uncut as a set. Raises ValueError where it is no list of parameters of module."""
    try:
        asked = set() if uncut is None else set(uncut)
    except TypeError:  # it is nothing that has elements
        asked = {uncut}
    wrong = asked - set(first_names(named_tensors(module, "parameters")))
    if wrong:
        kind = type(wrong.pop()).__name__
        raise ValueError(f"uncut must be a list of parameters of the module, such as [p for p in "
                         f"module.parameters() if p.dim() == 2]; it has a {kind} that is none of "
                         f"them")
    return asked


def choose_owners(parameters, loads):
    """{parameter: the rank that owns all of it}. The largest first, each to the rank that has least
    so far. loads: the bytes that each rank has so far, of the whole model; they grow."""
    owners = {}
    for p in sorted(parameters, key=torch.numel, reverse=True):
        rank = loads.index(min(loads))
        owners[p] = rank
        loads[rank] += p.nbytes
    return owners


class OwnedBucket(ShardedBucket):
    """A bucket of uncut parameters: chunks end between them.

        owners  {parameter: the rank whose chunk has all of it}
        cuts    the elements at which chunks 1 to W-1 begin

        three ranks   a a a b b|c c c c|d d        owners {a: 0, b: 0, c: 1, d: 2}; S = 5, 4, 2

    One rank owns all of such a parameter, and its shard there has the parameter's shape. On the
    others the shard is empty, and its `.grad` is None. So any optimizer that works parameter by
    parameter makes the updates of one process. The uncut parameters of a unit are one bucket: the
    more there are, the more even its chunks. Owners are chosen so that all ranks have about as much
    of the whole model. The total sent is that of equal chunks, but the rank with the largest chunk
    sends that W-1 times. docs/using.md has the numbers.
    """

    def __init__(self, owners, unit, parameters, dtypes, sharding):
        self.owners = owners
        # Those of an owner lie together.
        super().__init__(unit, sorted(parameters, key=owners.get), dtypes, sharding)

    def lay_out(self, W, align):
        """Cut where the parameters of the next rank begin. One that owns none has an empty chunk.
        """
        self.cuts = []
        for rank in range(1, W):
            starts = []
            for slot in self.slots:
                if self.owners[slot.parameter] >= rank:
                    starts.append(slot.start)
            self.cuts.append(min(starts, default=self.n))
        return [0, *self.cuts, self.n]

    def is_elsewhere(self, slot):
        """Whether another rank owns the parameter."""
        return self.owners[slot.parameter] != self.rank

    def shard_layout(self, slot):
        """All of a parameter, in its shape, where this rank owns it; otherwise nothing."""
        shape, strides, start = super().shard_layout(slot)
        if self.is_elsewhere(slot):
            return shape, strides, start
        return slot.shape, slot.strides, start


# -------------------------------------------------------------------------------------------------
# with all of that, and with guards


class Zero1(ShardGuards, ZeroOptions, UnevenForwards, StateDicts, PlainZero1):
    """P_os: each rank keeps optimizer state for 1/W of the parameters, and updates only these.

    A backward reduces each bucket to the owners of its chunks, the optimizer updates the shards,
    and the next forward gathers what they have become, each unit waiting for its own part.

    process_group: the ranks that train together; None for all.
    units: modules whose parameters are unsharded together; None: the elements of the outermost
    ModuleLists. What is in none of them, or in two, belongs to the root.
    param_dtype: of parameters in forward and backward, and of the inputs of units, which are cast.
    The shards, and so the optimizer's state, keep the module's dtype.
    reduce_dtype: of gradients on their way; None: that of the shards. Sums of 16-bit ones are fp32.
    shard_size: hybrid sharding, as torch's HSDP. W in the table is shard_size: each group of so
    many ranks has all shards, and gradients are reduced inside a group, then over groups.
    offload: shards, and so the optimizer's state and its step, are on the CPU.
    init_fn, device: how and where to fill what is on the meta device: see `fill_meta`.
    uncut: parameters each of which one rank owns whole, as Muon needs it: see `OwnedBucket`.
    broadcast_buffers: rank 0's buffers go to all ranks at the start, and before a forward, as in
    `DDP`. If not, each rank keeps its own.
    bucket_cap_mb: largest size of a bucket; None: 25, or W/4 if that is more. Each unit has buckets
    of its own, and one, of any size, for what is uncut.

    A shard's shape is that of this rank's part, as optimizers need it: (n, 1, ..., 1). That of the
    whole parameter is its attribute `whole_shape`.

    A forward is a collective, also one that only evaluates. A rank may skip units, but calls the
    others in the order in which all ranks do. Keep the wrapper: with it go its hooks, and without
    them nothing is gathered. An optimizer's state_dict() is this rank's. docs/using.md says more.

    Raises RuntimeError where ranks wrap different modules, ValueError for a unit that is no
    submodule, for an uncut parameter that is none of the module's, and for a shard_size that does
    not divide the number of ranks.
    """


class Zero2(Zero1, PlainZero2):
    __doc__ = PlainZero2.__doc__


class Zero3(Zero2, UnevenOrder, PlainZero3):
    __doc__ = f"{PlainZero3.__doc__}\n    {UnevenOrder.__doc__}"


for kind in (Zero1, Zero2, Zero3):
    kind.__doc__ = f"{kind.__doc__}\n    {ShardGuards.__doc__}"

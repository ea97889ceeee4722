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
has room for whole gradients anyway. Zero2 sends n + 1 if it is told which one is the last, by
`set_is_last_backward`, and otherwise 2 n.

The module keeps its parameters: forward and backward compute with them. The optimizer gets other
parameters, the shards. (A fused optimizer rounds the last elements of a tensor differently, so that
its shards do not get the bits of the whole.)

How it differs: in stage 3 the backward unshards a unit when autograd asks for one of its weights,
so a model may call its units again, out of order or in a checkpoint. Contributions to a gradient
are added in rank order, in stages 2 and 3 micro-step by micro-step. These are the bits of one
process that accumulates the same micro batches, if no backward is in no_sync(), and if 1/W does not
round: W is a power of two, or `set_gradient_divide_factor(1)` was called, as train.py does.

Cost beside the table: during the backward three buckets of 25 MB, one that fills, one that is sent
and what arrives for it (Zero1: only the last, as it keeps the others anyway); in Zero3 the root and
two units; under no_sync() whole gradients.

oracle.py has the three stages by hand. Here is the same, only earlier, in this order:
buckets and units; the stages as the paper has them: `PlainZero1`, which can be read by itself, what
`PlainZero2` does otherwise, and what `PlainZero3` adds; the meta device; whole parameters, for
Muon. That is all of ZeRO. The last lines put `ShardGuards` of guards.py before the stages, which
protect from mistakes: these are `Zero1`, `Zero2` and `Zero3`. `from zero import PlainZero3 as
Zero3` switches them off, and no bit changes.
"""

import collections
import contextlib
import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from ddp import (ALIGN_CHUNK_BYTES, Bucket, HierarchicalState, Reducer, add_in_rank_order,
                 all_gather, all_reduce, broadcast, bucket_bytes, fill_buckets, first_names,
                 gather_chunks, in_backward, named_modules, named_tensors, reduce_chunks,
                 reduce_scatter, round_up, weakly)
from guards import ShardGuards

ALIGN_BYTES = 64  # of a parameter in its buffer: a cache line, and what BLAS kernels like best


# -------------------------------------------------------------------------------------------------
# buckets and units


class Sharding(typing.NamedTuple):
    """What the buckets of a stage have in common."""
    names: dict  # {parameter: its fully qualified name}
    W: int  # the number of ranks over which parameters are sharded
    rank: int  # this rank's number among them
    device: torch.device
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


class ShardedBucket(Bucket):
    """A bucket whose parameters lie in flat buffers, too. Each buffer of n elements is cut into W
    chunks, and rank r owns the r-th, of S elements (`size`):

        unsharded          (n,) in param_dtype: whole parameters, which forward and backward use; or
                           None
        sharded            (S,) in the parameters' own dtype: the optimizer's shards are views of it
        gradients          (n,) in reduce_dtype: this rank's gradients, or None
        sharded_gradients  (S,) as sharded: the means; the shards' `.grad` are views of it

    Whose memory is whose on rank 0 of two, where c0 and c1 are chunks of parameters, g0 and g1 of
    gradients:

                           Zero1                Zero2                Zero3
        unsharded          [c0|c1]              [c0|c1]              [c0|c1] while its unit is used
        sharded            a view of c0 there   a view of c0 there   [c0]
        gradients          [g0|g1]              [g0|g1] until it     [g0|g1] until it
                                                is reduced           is reduced
        sharded_gradients  a view of g0 there   [g0]                 [g0]

    In another dtype or on another device (offload) a chunk has memory of its own in any stage. A
    shard is this rank's part of one parameter, a view of `sharded`, and may be empty. The
    optimizer gets it. Here all chunks are equal, and parameters are cut where a chunk ends:

        three ranks   a a a b|b c c c|c d d -      S = 4, and a gap of one at the end
    """

    def __init__(self, unit, parameters, sharding):
        self.unit, self.rank, self.device = unit, sharding.rank, sharding.device
        self.dtype = self.param_dtype = self.reduce_dtype = parameters[0].dtype
        if self.dtype.is_floating_point:
            self.param_dtype = sharding.param_dtype or self.dtype
            self.reduce_dtype = sharding.reduce_dtype or self.dtype
        dtypes = self.dtype, self.param_dtype, self.reduce_dtype
        itemsize = min(dtype.itemsize for dtype in dtypes)  # so alignment holds in all of them
        super().__init__(parameters, sharding.names, ALIGN_BYTES // itemsize)
        self.n = max(1, self.n)  # some memory also for parameters without elements
        ends = self.lay_out(sharding.W, ALIGN_CHUNK_BYTES // itemsize)
        self.first, self.end = ends[self.rank], ends[self.rank + 1]  # of this rank's chunk
        self.size = self.end - self.first  # S
        self.unsharded, self.sharded, self.sharded_gradients = None, None, None

    # ---- which elements are this rank's

    def lay_out(self, W, align):
        """Make n a multiple of W * align -> [where chunk 0 begins, chunk 1, ..., and n]."""
        size = round_up(math.ceil(self.n / W), align)
        self.n = W * size
        return range(0, self.n + 1, size)

    def own_chunk(self, buffer):
        """This rank's chunk of a (n,) buffer: a view, (S,)."""
        return buffer[self.first:self.end]

    def lies_in(self, chunk, buffer):
        """Whether chunk, (S,), is this rank's chunk of buffer, and not a copy."""
        # _cdata tells one piece of memory from another. data_ptr() is 0 for all empty chunks.
        memory = chunk.untyped_storage()._cdata
        return buffer is not None and memory == buffer.untyped_storage()._cdata

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

    def shard_view(self, slot, buffer):
        """This rank's part of a parameter, `shard_range`, as a view of buffer, this rank's chunk,
        (S,). Its shape is (n, 1, ..., 1), with as many dimensions as the parameter; (n,) if that
        has none; n may be 0. (Then start may be negative, or above S: the slice is empty.)"""
        first, end = self.shard_range(slot)
        start = slot.start + first - self.first
        ones = [1] * (len(slot.shape) - 1)
        return buffer[start:start + end - first].view(end - first, *ones)

    # ---- over ranks

    def gather(self, buffer, process_group, tag):
        """Start to fill buffer, (n,), from the ranks that own its chunks: `all_gather`."""
        return all_gather(buffer, process_group, tag)

    def scatter(self, process_group, tag):
        """Start to send each rank its chunk of gradients: `reduce_scatter`."""
        return reduce_scatter(self.gradients, process_group, tag)

    def place_in_backward(self, places):
        """A backward starts at the end of the module, so it completes buckets in falling order of
        (the place of its first parameter, 1). places: {parameter: its place in the module}. (An
        `OwnedBucket` has 0 there, and comes after others with the same place.)"""
        return min(places[slot.parameter] for slot in self.slots), 1

    # ---- parameters

    def build_shards(self):
        """Make the optimizer's parameters, views of `sharded`."""
        for slot in self.slots:
            p = slot.parameter
            # .data, for a _version of its own: a gather writes to sharded, which is no update.
            value = self.shard_view(slot, self.sharded).data
            slot.shard = nn.Parameter(value, p.requires_grad)
            vars(slot.shard).update(vars(p))  # such as p.no_decay, by which a script makes groups

    def part_of(self, slot, value):
        """This rank's part of value, a whole parameter, in the shape of the shard."""
        whole = torch.empty(self.n, dtype=value.dtype, device=self.sharded.device)
        self.view(slot, whole).copy_(value)
        return self.shard_view(slot, self.own_chunk(whole))

    @torch.inference_mode(False)  # what is made inside it could not be used outside
    def point_parameters(self):
        """Give the module's parameters their values: views of `unsharded`. If that is None, a nan
        that is expanded to p's shape and takes no memory. (Autograd asks for the shape, and whoever
        reads a weight too early gets nan, not an old value.)

        Assigning `.data` is how a value comes and goes. The Parameter stays the same object for the
        module, for its hooks and for autograd's graph; only the memory behind it is another."""
        for slot in self.slots:
            if self.unsharded is not None:
                slot.parameter.data = self.view(slot, self.unsharded)
            else:
                # .to: an integer dtype has no nan, but gets some number.
                nan = torch.full((), float("nan"), device=self.device).to(self.param_dtype)
                slot.parameter.data = nan.expand(slot.shape)

    # ---- gradients

    def put(self, slot):
        """Move the parameter's `.grad` into its place in `gradients`, by `place_of_gradient`, and
        set it to None, so that its memory is freed. (The mean will have another place.) Allocate
        `gradients`, (n,), if it is None. If the slot is in `unreduced`, no_sync() has left a sum
        there, to which `.grad` is added. If there is no gradient at all, write zeros."""
        if self.gradients is None:
            self.gradients = torch.empty(self.n, dtype=self.reduce_dtype, device=self.device)
        place = self.place_of_gradient(slot)
        gradient = slot.parameter.grad
        slot.parameter.grad = None
        if gradient is None:
            if slot not in self.unreduced:
                place.zero_()
            return
        if slot in self.unreduced:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        self.unreduced.add(slot)

    def place_of_mean(self, slot):
        """The part of `sharded_gradients` that is a parameter's, shaped as its shard. `.data` as in
        `Bucket`."""
        return self.shard_view(slot, self.sharded_gradients).data

    def is_home(self, slot):
        """Whether the shard's `.grad` is its part of sharded_gradients. An empty shard's is."""
        gradient, mean = slot.shard.grad, self.place_of_mean(slot)
        if mean.numel() == 0:
            return True  # the address of nothing is 0 everywhere, so it could not be compared
        return gradient is not None and gradient.data_ptr() == mean.data_ptr()

    def give_mean(self, slot):
        """The mean of a gradient, or this rank's part of it, becomes `.grad` of the shard. If there
        is a `.grad`, it stays the same object, as scripts keep lists of gradients."""
        mean = self.place_of_mean(slot)
        if slot.shard.grad is None:
            slot.shard.grad = mean
        elif not self.is_home(slot):
            slot.shard.grad.data = mean.add_(slot.shard.grad)  # a loss over the shards has made it

    def accumulated(self):
        """[what the shards' `.grad` hold from micro-steps before, (S,), with zeros where one is
        None], or [] if all are None. And point each `.grad` to its place in sharded_gradients,
        where the new sum will be written.

        In stages 2 and 3 they are there already, and no memory is needed. They are copied in two
        cases: a script has replaced some, or set some to None; and in stage 1, where
        `_prepare_for_backward` has moved them.
        """
        held = [slot for slot in self.slots if slot.shard.grad is not None]
        if not held:
            return []
        if all(self.is_home(slot) for slot in self.slots):
            return [self.sharded_gradients]
        together = torch.zeros_like(self.sharded)
        for slot in held:
            self.shard_view(slot, together).copy_(slot.shard.grad)
            slot.shard.grad.data = self.place_of_mean(slot)
        return [together]


class Unit:
    """A part of the model whose parameters are unsharded together: a block, or, the root, the rest.

        submodules, parameters   what belongs to it; what is in two units belongs to the root
        buckets                  of these parameters
        tag                      of its all-gathers: if ranks gather units in another order, gloo
                                 does not swap them, and times out
        is_unsharded             whether the whole parameters have the values of the shards, or will
                                 have them when the all-gather under way ends. (In stages 1 and 2
                                 there always are whole ones, but after a step their values are old)
        pending_gathers          functions that wait for that all-gather
        version                  `current_version()` when it was last unsharded; -1: no longer known
    """

    def __init__(self, name, module, tag, is_root=False):
        self.name, self.module, self.tag, self.is_root = name, module, tag, is_root
        self.submodules, self.parameters = [], []
        self.buckets, self.pending_gathers = [], []
        self.is_unsharded = False
        self.version = -1

    def __repr__(self):
        """For errors, profiles and debuggers."""
        n_bytes = sum(bucket.n * bucket.param_dtype.itemsize for bucket in self.buckets)
        return f"{self.name} ({1e-6 * n_bytes:.2f} MB)"

    def current_version(self):
        """A number that grows when the optimizer changes the shards."""
        version = 0
        for bucket in self.buckets:
            for slot in bucket.slots:
                version += slot.shard._version
        return version


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


def unless_compiling(hook):
    """A hook that leaves no trace in what torch.compile makes of the module around."""
    def quiet_hook(*arguments):
        if not torch.compiler.is_compiling():
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
# stage 1
#
# A summary, to come back to: the first two lines say what a stage keeps, the others what it does at
# each step. A dot: as the stage before; "...": that, too. (R): what `Reducer` does, and this.
#
#                          PlainZero1                        PlainZero2       PlainZero3
#   _keep_parameters       all; the own chunk lies in them   .                only the own chunk
#   _keep_gradients        all; the own means lie in them    only own means   .
#
#   _begin_forward         start to unshard all units        .                reshard all; the order
#                                                                             is that of the units
#   _use                   make the root and the unit whole  .                ... and take notes of
#                                                                             weights
#   _unshard               start the all-gather              .                ... in new memory,
#                                                                             after freeing a unit
#   _unshard_and_wait      ... and wait for it               .                ... begin all up to it
#                                                                             before, one more after
#   _post_forward          the outermost ends the forward    .                ... and unshard the
#                                                                             unit around again
#   _end_forward           wait for units that were skipped  .                ... finish the order
#   _prepare_for_backward  (R) means in the way are moved    .                ... plan the way back,
#                                                                             unshard the root
#   _is_ready              a bucket has its gradients        .                ... and the next unit
#                                                                             is on its way
#   _reduce                reduce-scatter a bucket           .                .
#   _finalize_backward     (R) note whether a step may       .                ... finish the order,
#                          follow                                             reshard all


class PlainZero1(Reducer):
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

    A forward is a collective, also one that only evaluates. A rank may skip units, but calls the
    others in the order in which all ranks do. Keep the wrapper: with it go its hooks, and without
    them nothing is gathered. An optimizer's state_dict() is this rank's. docs/using.md says more.

    Raises RuntimeError where ranks wrap different modules, ValueError for a unit that is no
    submodule, for an uncut parameter that is none of the module's, and for a shard_size that does
    not divide the number of ranks.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None,
                 units: Iterable[nn.Module] | None = None, param_dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None, shard_size: int | None = None,
                 offload: bool = False, init_fn: Callable[[nn.Module], object] | None = None,
                 device: torch.device | str | None = None, uncut: Iterable[nn.Parameter] = ()):
        self._uncut = set_of_parameters(module, uncut)
        options = [f"{param_dtype=} {reduce_dtype=} {shard_size=}"]
        for name, p in named_tensors(module, "parameters"):
            if p in self._uncut:
                options.append(f"uncut: {name}")
        super().__init__(module, process_group, find_unused_parameters=True, options=options)
        self.param_dtype = param_dtype
        self._make_groups(shard_size)
        self._device = self._choose_device(device)
        self._offloads = offload and self._device.type != "cpu"
        self._is_last_backward = True  # set_is_last_backward() changes it
        self._gathers_all = True  # whether the next forward gathers all units: `_begin_forward`
        self._in_forward = []  # (module, its unit) of forwards under way, the innermost last
        # Of the 2**11 tags of this wrapper one for each kind of message, and one for each unit.
        self._reduce_tag = self._first_tag
        self._full_parameters_tag = self._first_tag + 1
        self._build_units(find_units(module) if units is None else units)
        self._build_buckets(reduce_dtype, init_fn)
        self._track(*self._order_of_backward())
        self._shards = {slot.shard for slot in self._slots.values()}
        self._add_hooks()

    # ---- construction

    def _make_groups(self, shard_size):
        """The ranks over which parameters are sharded; for hybrid sharding the ranks that have the
        same shards as this one, too."""
        self.shard_group, self._replicate_group = self.process_group, None
        self.shard_size = self.world_size if shard_size is None else shard_size
        if self.shard_size != self.world_size:
            groups = HierarchicalState(self.shard_size, self.process_group)
            self.shard_group, self._replicate_group = groups.intra_node, groups.inter_node

    def _choose_device(self, device):
        """The device of what is not on meta; if all is, the one that was given, or the best."""
        places = {}
        for name, t in self._named("parameters") + self._named("buffers"):
            if not t.is_meta:
                places[t.device] = name
        if len(places) > 1:
            self._refuse(f"needs all parameters and buffers on one device: {places}")
        if places:
            return next(iter(places))
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            is_gloo = dist.get_backend(self.process_group) == "gloo"
            device = "cpu" if is_gloo or accelerator is None else accelerator
        return torch.empty(0, device=device).device  # with its index

    def _build_units(self, modules):
        """Divide submodules and parameters among the root and a unit for each of modules."""
        names = first_names(named_modules(self.module))
        modules = set(modules)
        for m in modules:
            if m not in names or m is self.module:
                raise ValueError(f"{self._get_name()}: a unit is not a submodule of the module: "
                                 f"units= has a {type(m).__name__}")
        self._root = Unit("the root", self.module, self._full_parameters_tag + 1, is_root=True)
        self._units = [self._root]
        unit_of = {}  # {submodule, or parameter: its unit; the root, if it is in two}
        for m in names:
            if m in modules:
                unit = Unit(names[m], m, self._root.tag + len(self._units))
                self._units.append(unit)
                parts = set()
                for _, submodule in named_modules(m):
                    parts.update([submodule, *submodule._parameters.values()])
                for part in parts:
                    unit_of[part] = self._root if part in unit_of else unit
        for m in names:
            unit = unit_of.get(m, self._root)
            unit.submodules.append(m)
            if unit is self._root:  # its parameters belong there, even if a unit shares them
                for p in m._parameters.values():
                    unit_of[p] = self._root
        for p in first_names(self._named("parameters")):
            unit_of[p].parameters.append(p)

    @torch.no_grad()
    def _build_buckets(self, reduce_dtype, init_fn):
        """Divide the parameters of each unit among buckets, the last ones first. Fill what is on
        the meta device, agree with rank 0, keep what the stage keeps, and free the rest. Unit by
        unit, so that a rank has one unit more than it keeps. Until the end, a parameter on the meta
        device has a stand-in, a real one with its values: see `fill_meta`."""
        names = first_names(self._named("parameters"))
        sharding = Sharding(names, self.shard_size, dist.get_rank(self.shard_group), self._device,
                            self.param_dtype, reduce_dtype)
        most_bytes = bucket_bytes(self.shard_size)
        loads = {}  # of `owned_buckets`
        stand_ins = {}
        for unit in self._units:
            stand_ins |= fill_meta(self.module, unit, self._device, init_fn)
            cut = [p for p in reversed(unit.parameters) if p not in self._uncut]
            for parameters in fill_buckets(cut, most_bytes, first_bytes=most_bytes):
                unit.buckets.append(ShardedBucket(unit, parameters, sharding))
            uncut = [p for p in reversed(unit.parameters) if p in self._uncut]
            unit.buckets += owned_buckets(unit, uncut, sharding, loads)
            for bucket in unit.buckets:
                self._take_values(bucket, stand_ins)
        swap(stand_ins)
        broadcast([t for _, t in self._named("buffers")], self.process_group)
        for bucket in self._all_buckets():
            bucket.point_parameters()

    def _take_values(self, bucket, stand_ins):
        """Give bucket and its shards rank 0's values; free the memory of its parameters."""
        values = torch.zeros(bucket.n, dtype=bucket.dtype, device=self._device)
        for slot in bucket.slots:
            real = stand_ins.get(slot.parameter, slot.parameter)
            bucket.view(slot, values).copy_(real)
            real.data = values.new_empty(0)
            real.grad = None
        # As bytes: gloo knows no broadcast of int16 or float8.
        dist.broadcast(values.view(torch.uint8), group_src=0, group=self.process_group)
        self._keep_parameters(bucket, values)
        bucket.build_shards()

    def _all_buckets(self):
        """Also those of frozen parameters."""
        return [bucket for unit in self._units for bucket in unit.buckets]

    def _order_of_backward(self):
        """The buckets with trained parameters, in the order in which a backward, which starts at
        the end, completes them; and the others."""
        in_order = first_names(self._named("parameters"))
        places = {p: place for place, p in enumerate(in_order)}
        trained = []
        frozen = []
        for bucket in self._all_buckets():
            buckets = trained if bucket.slots[0].parameter.requires_grad else frozen
            buckets.append(bucket)
        trained.sort(key=lambda bucket: bucket.place_in_backward(places), reverse=True)
        return trained, frozen

    def _keep_parameters(self, bucket, values):
        """Set bucket.unsharded and bucket.sharded, by what the stage keeps of values, (n,), the
        whole parameters in their own dtype. Here unsharded is all of them, in bucket.param_dtype,
        and sharded is the own chunk of that. But if param_dtype is another, or with offload,
        sharded is a copy of the own chunk of values, in memory of its own, by `_new_chunk`."""
        own = bucket.own_chunk(values)
        bucket.unsharded = values.to(bucket.param_dtype)
        is_apart = self._offloads or bucket.unsharded is not values
        bucket.sharded = self._new_chunk(bucket).copy_(own) if is_apart else own

    def _new_chunk(self, bucket):
        """(S,), on the device of the optimizer."""
        return torch.empty(bucket.size, dtype=bucket.dtype, pin_memory=self._offloads,
                           device="cpu" if self._offloads else self._device)

    def _add_hooks(self):
        """On the modules themselves, so that `model.module(x)` works, and on all that have
        parameters: a unit may be a mere container, and a script may call a part of the model. And
        on all optimizers."""
        before_step = self._hook_steps(register_optimizer_step_pre_hook, self._before_step)
        self._remove_at_end(before_step)
        for unit in self._units:
            for m in unit.submodules:
                if m is unit.module or m._parameters:
                    # torch.compile: a unit's hooks run around its graph, so none are inside.
                    decorate = torch.compiler.disable if m is unit.module else unless_compiling
                    pre_forward = decorate(weakly(self._pre_forward, unit))
                    post_forward = decorate(weakly(self._post_forward))
                    pre_handle = m.register_forward_pre_hook(pre_forward, prepend=True,
                                                             with_kwargs=True)
                    post_handle = m.register_forward_hook(post_forward, always_call=True)
                    self._remove_at_end(pre_handle)
                    self._remove_at_end(post_handle)

    # ---- forward: gather what the optimizer has changed

    def forward(self, *inputs, **kwargs):
        if not in_backward():
            self._in_forward.clear()  # left by a forward that Ctrl-C has ended
        return self.module(*inputs, **kwargs)

    def _pre_forward(self, unit, module, inputs, kwargs):
        """Forward pre-hook of unit's module and of its submodules that have parameters. A forward
        that recomputes a checkpoint comes here too, and is a sign of a backward."""
        self._in_forward.append((module, unit))
        if in_backward():
            self._notice_backward()
        elif len(self._in_forward) == 1:
            self._prepare_forward()
            self._begin_forward(module)
        self._use(unit)
        if self.param_dtype is not None and module is unit.module:
            return cast_floats((inputs, kwargs), self.param_dtype)

    def _post_forward(self, module, inputs, output):
        """Forward hook of the same, also after an exception in the forward."""
        if not self._in_forward or self._in_forward[-1][0] is not module:
            return  # a hook before ours has raised, so `_pre_forward` was not called
        self._in_forward.pop()
        if not self._in_forward and not in_backward():
            self._end_forward()

    def _begin_forward(self, module):
        """Note which units have to be unsharded again, and start to unshard all of these; but none
        yet if module, which the script calls, is only a part of the model.

        In general all have to: is_unsharded becomes False. (Either a step has changed the shards,
        or a script has, whose writes to `.data` leave no trace.) But after a backward that no step
        follows (`_gathers_all` is False) only those have to whose version has changed: somebody has
        stepped all the same, so that `_before_step` has set it to -1, or has written to shards in
        place.

        All ranks must decide alike, or some wait forever. So this does not look at `.grad`: a
        backward that raised may have left one on one rank alone. And steps have a hook, since a
        rank that owns nothing of what they change would see no version change. (What a script
        writes in place, it has to write on all ranks.)
        """
        for unit in self._units:
            if self._gathers_all or unit.version != unit.current_version():
                unit.is_unsharded = False
            if module is self.module:
                self._unshard(unit)

    def _unshard(self, unit):
        """Start to gather unit's parameters from all ranks, unless that was done."""
        if unit.is_unsharded:
            return
        unit.is_unsharded = True
        unit.version = unit.current_version()
        with torch.profiler.record_function(f"start: unshard {unit}"):
            for bucket in unit.buckets:
                if not bucket.lies_in(bucket.sharded, bucket.unsharded):
                    # In bf16 this casts, before the gather, which then sends half the bytes.
                    bucket.own_chunk(bucket.unsharded).copy_(bucket.sharded)
                wait = bucket.gather(bucket.unsharded, self.shard_group, unit.tag)
                unit.pending_gathers.append(wait)

    def _wait_for_unshard(self, unit):
        """Wait for the all-gather of unit, if one is under way: then its parameters have values."""
        if not unit.pending_gathers:
            return
        while unit.pending_gathers:
            self._wait_for(f"unshard {unit}", unit.pending_gathers.pop(0))
        for bucket in unit.buckets:
            bucket.point_parameters()  # in stages 1 and 2, too: a script may have set p.data

    def _unshard_and_wait(self, unit):
        self._unshard(unit)
        self._wait_for_unshard(unit)

    def _use(self, unit):
        """Make the root and unit whole."""
        self._unshard_and_wait(self._root)
        self._unshard_and_wait(unit)

    def _end_forward(self):
        """A shard must not change while it is being sent: wait for that."""
        for unit in self._units:  # also what was skipped
            self._wait_for_unshard(unit)

    # ---- backward: reduce gradients to the owners of the shards

    def _prepare_for_backward(self, task):
        """As `Reducer`. Means of the last backward may lie in the buffers that this one fills: give
        them other memory."""
        super()._prepare_for_backward(task)
        for bucket in self._buckets:
            means = bucket.sharded_gradients
            if means is not None and bucket.lies_in(means, bucket.gradients):
                for slot in bucket.slots:
                    if slot.shard.grad is not None:
                        slot.shard.grad.data = slot.shard.grad.data.clone()

    def _reduce(self, bucket):
        """Reduce bucket's gradients to the owners of the chunks: this rank's means come into
        bucket.sharded_gradients. A reduction, as `all_reduce`. It yields once, so one bucket at a
        time is under way, which bounds memory.

        1. The first time, make bucket.sharded_gradients: `_keep_gradients`.
        2. Start `bucket.scatter` over the shard group, with `_reduce_tag`. Yield.
        3. sharded_gradients = `accumulated()`, on the device of the gradients, plus all ranks'
           chunks in rank order.
        4. Free the gradients, unless sharded_gradients lies in them.

        With hybrid sharding, in 3 the own chunk is summed over this group, in place. Then it is
        summed over groups, with one more yield, so two buckets are under way. That sum is added to
        what is accumulated. (It needs no tag: nothing else is sent in the group of these ranks.)
        """
        if bucket.sharded_gradients is None:
            self._keep_gradients(bucket)
        add = bucket.scatter(self.shard_group, self._reduce_tag)
        yield
        if self._replicate_group is None:
            add(bucket.sharded_gradients, self._earlier(bucket))
        else:
            own = bucket.own_chunk(bucket.gradients)
            add(own)
            sum_over_groups = all_reduce(own, self._replicate_group)
            next(sum_over_groups)
            yield
            for _ in sum_over_groups:
                pass
            add_in_rank_order([*self._earlier(bucket), own], bucket.sharded_gradients)
        if not bucket.lies_in(bucket.sharded_gradients, bucket.gradients):
            with torch.profiler.record_function(f"free: gradients of {bucket}"):
                bucket.gradients = None  # until `put` gets the next one

    def _earlier(self, bucket):
        """On the device of the gradients: with offload the shards' are on the CPU."""
        return [t.to(self._device) for t in bucket.accumulated()]

    def _keep_gradients(self, bucket):
        """Set bucket.sharded_gradients, (S,). Here whole gradients are kept, so the means of the
        own chunk are a part of them. In another dtype or on another device they have memory of
        their own, by `_new_chunk`, and `_reduce` frees the whole gradients."""
        is_apart = self._offloads or bucket.reduce_dtype != bucket.dtype
        own = bucket.own_chunk(bucket.gradients)
        bucket.sharded_gradients = self._new_chunk(bucket) if is_apart else own

    def _finalize_backward(self):
        """As `Reducer`, and note whether a step may follow."""
        super()._finalize_backward()
        self._gathers_all = self.require_backward_grad_sync and self._is_last_backward

    def _before_step(self, optimizer, arguments, options):
        """Hook of all optimizers, before a step: what was gathered will be old, on all ranks."""
        for group in optimizer.param_groups:
            if self._shards.isdisjoint(group["params"]):
                continue
            for unit in self._units:
                unit.version = -1

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether a step follows the next backwards; FSDP2's name. Unless told, it does.

        If not, stages 1 and 2 need not gather parameters in the next forward, as they have not
        changed: so stage 2 with n micro-steps sends n + 1 instead of 2 n times (W-1)/W Psi. If a
        step comes all the same, or a script writes to shards, they gather. All ranks have to do all
        of that alike: say the same, step the same optimizers, write to the same shards, also a rank
        whose shards are empty. It changes no bit, and nothing in stage 3."""
        self._is_last_backward = is_last_backward

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets what no_sync() has held back, and a backward that has raised, for whose
        all-gathers it waits."""
        super().zero_grad(set_to_none)
        for unit in self._units:
            self._wait_for_unshard(unit)
        self._gathers_all = True
        for bucket in self._all_buckets():
            bucket.unreduced.clear()

    # ---- parameters and state, the same in every stage

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

    def shard_starts(self) -> dict[str, int]:
        """{original name: where this rank's shard begins in the parameter, in elements in order of
        memory}: beside `named_parameters()` all that it takes to load at another world size."""
        starts = {}
        for slot in self._slots.values():
            starts[slot.fqn], _ = slot.bucket.shard_range(slot)
        return starts

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (original name, whole parameter in the shards' dtype), a tied one once. It holds
        the whole parameters of one unit. A collective: every rank has to go through all of it."""
        wholes = {}  # {bucket: its whole parameters}, of one unit
        for slot in self._slots.values():
            bucket = slot.bucket
            if bucket not in wholes:
                wholes = {b: whole for b, whole in wholes.items() if b.unit is bucket.unit}
                whole = torch.empty(bucket.n, dtype=bucket.dtype, device=self._device)
                bucket.own_chunk(whole).copy_(bucket.sharded)
                wait = bucket.gather(whole, self.shard_group, self._full_parameters_tag)
                self._wait_for("gather whole parameters, which all ranks have to do", wait)
                wholes[bucket] = whole
            yield slot.fqn, bucket.view(slot, wholes[bucket]).clone()

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """{name: whole tensor}, on every rank, as the module's state_dict(). A collective.

        Costs the memory of the whole model on every rank; `full_parameters` does not.
        """
        whole = dict(self.full_parameters())
        found = {}
        for name, value, slot in self._module_state():
            # By fqn, as a tied one has several names.
            found[name] = copy_of(value) if slot is None else whole[slot.fqn]
        return found

    def _module_state(self):
        """[(name, value, its slot or None)] of the module's state, by torch's own `state_dict`: the
        module may have another one. A value that is no parameter is a buffer, or, of any type, what
        `get_extra_state()` returns or a hook adds."""
        found = []
        for name, value in nn.Module.state_dict(self.module, keep_vars=True).items():
            slot = self._slots.get(value) if isinstance(value, torch.Tensor) else None
            found.append((name, value, slot))
        return found

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

    def _refuse_misfit(self, given, ours):
        """Raise where two state dicts have other names, or parameters or buffers other shapes."""
        buffers = {t for _, t in named_tensors(self.module, "buffers")}
        with_shape = self._shards | set(self._slots) | buffers
        found = sorted(ours.keys() ^ given.keys())
        for name in ours.keys() & given.keys():
            value, shape = ours[name], getattr(given[name], "shape", None)
            if isinstance(value, torch.Tensor) and value in with_shape and value.shape != shape:
                found.append(f"{name}: {shape}, not {value.shape}")
        if found:
            self._refuse(f"nothing was loaded; missing, left over or of another shape: {found}")

    def _apply(self, *_, **__):
        self._refuse("cast and move the module before wrapping it")

    def __getstate__(self):
        self._refuse("has one rank's shards, and is not copied or pickled: copy the module before "
                     "wrapping it, and save full_state_dict()")


# -------------------------------------------------------------------------------------------------
# stage 2


class PlainZero2(PlainZero1):
    """P_os+g: each rank keeps also only its 1/W of the gradients. Every backward outside no_sync()
    reduces them, and adds their mean to the shards' `.grad`, micro batch after micro batch, as one
    process accumulates them."""

    def _keep_gradients(self, bucket):
        """Keep only the means of the own chunk, in memory of their own, by `_new_chunk`: then
        `_reduce` frees the whole gradients, and `ShardedBucket.put` gets memory when the next one
        arrives."""
        bucket.sharded_gradients = self._new_chunk(bucket)


# -------------------------------------------------------------------------------------------------
# stage 3
#
# Which of four blocks are whole while a block computes: # has its values, + is being gathered, for
# the next one. The root is whole from the forward to the end of the backward.
#
#             forward of          backward of
#              0  1  2  3          3  2  1  0
#   block 0    #  .  .  .          .  .  +  #     When block 1 begins its forward, it waits for the
#   block 1    +  #  .  .          .  +  #  #     rest of its all-gather. Then that of block 2 is
#   block 2    .  +  #  #          #  #  .  .     started, for which block 0 is freed.
#   block 3    .  .  +  #          #  .  .  .
#
# A rank that skips block 1 takes part in its collectives, in the order of the others:
#
#   backward of a rank that uses all   of a rank that skips block 1
#     use 2, start 1, reduce 2           use 2, start 1, reduce 2
#     use 1, start 0, reduce 1
#     use 0, reduce 0                    start 0, reduce 1, use 0, reduce 0
#
# use: wait for its all-gather; start: start that; reduce: start its reduce-scatter. The rank on the
# right has no gradients of 1 to wait for. Yet it may reduce 1 only after it has started 0: that is
# when a weight of 0 is asked for, and `_unshard_and_wait` sees that 0 has not begun.


class PlainZero3(PlainZero2):
    """P_os+g+p: each rank keeps also only its 1/W of the parameters.

    Units are unsharded in an order that all ranks have in common: a forward's leads through the
    units, a backward's back. Beside the root, which stays, two units are whole at a time, the one
    in use and the next one. When a third one is unsharded, the older of the two is freed. The end
    of a backward or an evaluation frees all. What autograd would save of a whole unit becomes a
    note, by which the backward unshards it again.

    A backward is a collective too, also under no_sync(), as it gathers. If any rank calls a unit
    twice, out of order, or in a second forward before the backward, all ranks must call the same
    units. Outside of its unit's forward a parameter may be nan; so may the root's outside of the
    model's. Under autocast autograd saves 16-bit copies of all weights: use param_dtype instead.

        _order             units in the order in which all ranks unshard them, in this forward or
                           backward
        _n_begun           how many of these this rank has come to: begun, or found whole
        _two_units         those that are whole beside the root, the newer one last
        _note_contexts     of the forwards under way: in them autograd's saves become notes
        _bucket_at_memory  {memory: the bucket whose whole parameters are there}
    """

    def _build_units(self, modules):
        super()._build_units(modules)
        self._order, self._n_begun = [], 0
        self._two_units, self._note_contexts, self._bucket_at_memory = [], [], {}

    def _keep_parameters(self, bucket, values):
        """Keep only the own chunk, in memory of its own."""
        bucket.sharded = self._new_chunk(bucket).copy_(bucket.own_chunk(values))

    # ---- parameters come and go

    def _unshard_and_wait(self, unit):
        """Unshard unit and wait.

        Before, begin all units up to it in the order, since other ranks may wait for them. After,
        begin the next one, so that it is on its way while unit is in use, unless that has begun.
        But only if unit is the newer one of the two. After calls out of order it may be the older
        one: after 0, 1, 0 the two are [2, 0]. If 2 is called then, it would be freed for 3."""
        n = self._order.index(unit) + 1 if unit in self._order else 0
        self._begin_units(n)
        super()._unshard_and_wait(unit)
        is_kept = unit.is_root or unit is self._two_units[-1]
        if self._n_begun == n and is_kept:
            self._begin_units(n + 1)

    def _begin_units(self, n):
        """Begin to unshard the first n units of the order, as far as that was not done.

        A unit may be whole already, and be the older one of the two: so is block 2 above when block
        3 begins its backward. Then make it the newer one, as it is needed next: [2, 3] becomes
        [3, 2]. All ranks do so, also one that skipped it, and so free the same unit next. In a
        backward, launch the buckets that only waited for this: see `_is_ready`.
        """
        while self._n_begun < min(n, len(self._order)):
            unit = self._order[self._n_begun]
            self._n_begun += 1
            self._unshard(unit)
            if unit in self._two_units:
                self._two_units.remove(unit)
                self._two_units.append(unit)
            if in_backward():
                self._launch_ready_buckets()

    @torch.inference_mode(False)  # what is made inside it could not be used outside
    def _unshard(self, unit):
        """As stage 1, in new memory, bucket.unsharded; unless unit is unsharded already.

        Before, if two units are whole beside the root, free the older one; now unit is the newer
        one. Allocate (n,) in param_dtype for all of unit's buckets before any gets one: running out
        of memory must leave none of them half changed. Note in `_bucket_at_memory` whose memory it
        is, by `untyped_storage()._cdata`."""
        if unit.is_unsharded:
            return
        if not unit.is_root:
            if len(self._two_units) == 2:
                self._reshard(self._two_units.pop(0))
            self._two_units.append(unit)
        buffers = []
        for bucket in unit.buckets:
            buffers.append(torch.empty(bucket.n, dtype=bucket.param_dtype, device=self._device))
        for bucket, buffer in zip(unit.buckets, buffers):
            bucket.unsharded = buffer
            self._bucket_at_memory[buffer.untyped_storage()._cdata] = bucket
        super()._unshard(unit)

    def _reshard(self, unit):
        """Free the memory of unit, if it is unsharded."""
        if not unit.is_unsharded:
            return
        self._wait_for_unshard(unit)  # on a rank that skips unit nothing else waits for it
        unit.is_unsharded = False
        with torch.profiler.record_function(f"free: {unit}"):
            for bucket in unit.buckets:
                del self._bucket_at_memory[bucket.unsharded.untyped_storage()._cdata]
                bucket.unsharded = None
                bucket.point_parameters()

    def _reshard_all(self):
        for unit in self._units:
            self._reshard(unit)
        self._two_units.clear()

    # ---- forward and backward, in order

    def _begin_forward(self, module):
        """Free all, since shards may have changed. The order is that of the units; it is empty if a
        script calls a part of the model."""
        self._reshard_all()
        self._order = self._units if module is self.module else []
        self._n_begun = 0

    def _use(self, unit):
        """As stage 1. From here to `_post_forward`, what autograd saves of whole units is a note.
        """
        self._note_contexts.append(self._take_notes())
        self._note_contexts[-1].__enter__()
        super()._use(unit)

    def _post_forward(self, module, inputs, output):
        """As stage 1. The unit around may have been freed meanwhile: unshard it again."""
        try:
            super()._post_forward(module, inputs, output)
        finally:  # that may time out, while it waits for units that were skipped
            while len(self._note_contexts) > len(self._in_forward):
                self._note_contexts.pop().__exit__(None, None, None)
        if self._in_forward:
            _, unit_around = self._in_forward[-1]
            self._unshard_and_wait(unit_around)

    def _end_forward(self):
        """Unshard also what only other ranks use. What is whole now stays for the backward."""
        self._begin_units(len(self._order))
        super()._end_forward()
        if not torch.is_grad_enabled():
            self._reshard_all()

    def _prepare_for_backward(self, task):
        """As stage 1. The order leads back through the units. The root is whole from here on."""
        super()._prepare_for_backward(task)
        self._order = [self._root, *reversed(self._units[1:])]
        self._n_begun = 0
        self._unshard_and_wait(self._root)

    def _is_ready(self, bucket):
        """As stage 1; and `_begin_units` has come to the unit after bucket's on the way back; or
        bucket's is the last one.

        Native collectives must come in one order on all ranks. A rank of which autograd asks a
        weight of the unit begins to unshard the next one before it has the gradients. A rank that
        skips the unit has no gradients to wait for, and would reduce first.
        """
        place = self._order.index(bucket.unit)
        n_up_to_next = min(place + 2, len(self._order))  # length of the order up to the next unit
        return super()._is_ready(bucket) and self._n_begun >= n_up_to_next

    def _finalize_backward(self):
        """Unshard also what only other ranks use. Then nothing is needed any more, unless this
        backward ran inside a forward."""
        self._begin_units(len(self._order))
        super()._finalize_backward()
        if not self._in_forward:
            self._reshard_all()

    # ---- notes: what a backward needs, it unshards
    #
    # Autograd saves a weight for the backward, and so would keep a whole unit alive. A pair of
    # functions can stand between: `_pack` is given what autograd saves, and returns what is kept in
    # its place, a note, as oracle.py's recipe: a function that returns the tensor. In the backward
    # `call_note` is given that.

    def _take_notes(self):
        """A context in which autograd saves a note for a tensor of a whole unit. All else goes to
        the hooks around, such as those of activation checkpointing."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)  # True: compiled or not
        # In a forward inside one of ours the hooks on top are ours already: keep them.
        is_ours = outer is not None and getattr(outer[0], "func", None) == self._pack
        if is_ours or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, outer),
                                                        call_note)

    @torch.compiler.disable  # or it would be compiled for each tensor
    def _pack(self, outer, t):
        """t, a tensor that autograd saves -> a note, a function that returns it.

        If t is a plain view of the memory of a whole unit, of its dtype: `_view_again`, by bucket,
        layout and the unit's version. A tensor there that is no plain view, such as a complex one,
        is cloned, as that memory will be freed. All other tensors go to outer, the pair of hooks
        around. If there is none: `saved`, with t.detach() and its version."""
        memory = t.untyped_storage()._cdata if t.layout is torch.strided else None
        bucket = self._bucket_at_memory.get(memory)
        if bucket is not None:
            # Shape and strides do not tell whether t is seen as complex, or conjugated.
            if t.dtype == bucket.param_dtype and not t.is_conj() and not t.is_neg():
                layout = t.shape, t.stride(), t.storage_offset()
                return functools.partial(self._view_again, bucket, layout, bucket.unit.version)
            t = t.detach().clone()
        if outer is not None:
            pack, unpack = outer
            return functools.partial(unpack, pack(t))  # they have tests of their own
        # Detached: t may be the output of the node that saves it, and would keep itself alive.
        return functools.partial(saved, t.detach(), t._version)

    def _view_again(self, bucket, layout, version):
        """In a backward, of which this may be the first sign: unshard the bucket's unit, wait, and
        return the view of bucket.unsharded that has this layout. Raises RuntimeError where the
        shards have another version than in the forward."""
        self._notice_backward()
        self._unshard_and_wait(bucket.unit)
        refuse_modified(bucket.unit.current_version(), version, f"weights of {bucket.unit.name}")
        return bucket.unsharded.as_strided(*layout)


def call_note(note):
    return note()


def saved(t, version):
    """t, unless it was written to since. Autograd's own test does not see t, only the note."""
    refuse_modified(t._version, version, f"a tensor of shape {tuple(t.shape)}")
    return t


def refuse_modified(version_found, version, what):
    if version_found != version:
        raise RuntimeError(f"a backward needs {what} as in its forward, but since then that was "
                           f"modified in place, as by step()")


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
        found = set() if uncut is None else set(uncut)
    except TypeError:  # it is nothing that has elements
        found = {uncut}
    wrong = found - set(first_names(named_tensors(module, "parameters")))
    if wrong:
        kind = type(wrong.pop()).__name__
        raise ValueError(f"uncut must be a list of parameters of the module, such as [p for p in "
                         f"module.parameters() if p.dim() == 2]; it has a {kind} that is none of "
                         f"them")
    return found


def choose_owners(parameters, loads):
    """{parameter: the rank that owns all of it}. The largest first, each to the rank that has least
    so far. loads: the bytes that each rank has so far, of the whole model; they grow."""
    owners = {}
    for p in sorted(parameters, key=torch.numel, reverse=True):
        rank = loads.index(min(loads))
        owners[p] = rank
        loads[rank] += p.nbytes
    return owners


def owned_buckets(unit, parameters, sharding, loads):
    """[one bucket for all uncut parameters of a unit and a kind, whatever its size]: the more there
    are in a bucket, the more even its chunks.

    loads: {whether parameters are trained: [bytes that each rank owns so far]}, which begins as {}.
    Apart, since a trained one takes more memory: gradients and the optimizer's state."""
    buckets = []
    for some in fill_buckets(parameters, math.inf, math.inf):
        of_this_kind = loads.setdefault(some[0].requires_grad, [0] * sharding.W)
        owners = choose_owners(some, of_this_kind)
        buckets.append(OwnedBucket(owners, unit, some, sharding))
    return buckets


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

    def __init__(self, owners, unit, parameters, sharding):
        self.owners = owners
        # Those of an owner lie together.
        super().__init__(unit, sorted(parameters, key=owners.get), sharding)

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

    def shard_view(self, slot, buffer):
        """All of a parameter, in its shape, where this rank owns it; otherwise nothing."""
        part = super().shard_view(slot, buffer)
        if self.is_elsewhere(slot):
            return part
        return part.as_strided(slot.shape, slot.strides)

    def give_mean(self, slot):
        """Where another rank owns the parameter, `.grad` is None, so that every optimizer leaves
        the empty shard alone: some divide by its number of elements."""
        if self.is_elsewhere(slot):
            slot.shard.grad = None
        else:
            super().give_mean(slot)

    def place_in_backward(self, places):
        """In a block, after all its other buckets. Those hold small parameters, such as norms. A
        bucket waits for the one before it, so they would otherwise wait for the matrices."""
        if self.unit.is_root:
            return super().place_in_backward(places)
        return min(places[p] for p in self.unit.parameters), 0

    def gather(self, buffer, process_group, tag):
        return gather_chunks(buffer.tensor_split(self.cuts), process_group, tag)

    def scatter(self, process_group, tag):
        chunks = self.gradients.tensor_split(self.cuts)
        return reduce_in_pieces(chunks, bucket_bytes(len(chunks)), process_group, tag)


def reduce_in_pieces(chunks, most_bytes, process_group, tag=0):
    """As `reduce_chunks`, but what arrives for a long chunk would take W-1 times its memory. So
    chunks are sent in pieces, one after the other, so small that most_bytes arrive of one. While
    add adds one piece, the next one arrives, so two take memory. Only the first is on its way
    before add is called."""
    longest = max(len(chunk) for chunk in chunks)
    arriving_bytes = longest * chunks[0].itemsize * (len(chunks) - 1)
    n_pieces = max(1, math.ceil(arriving_bytes / most_bytes))
    size = math.ceil(longest / n_pieces)  # of a piece

    def start_piece(first):
        pieces = [chunk[first:first + size] for chunk in chunks]
        return reduce_chunks(pieces, process_group, tag)

    under_way = [start_piece(0)]

    def add(out, earlier=()):
        for first in range(0, longest, size):
            if first + size < longest:
                under_way.append(start_piece(first + size))
            add_piece = under_way.pop(0)
            add_piece(out[first:first + size], [t[first:first + size] for t in earlier])

    return add


# -------------------------------------------------------------------------------------------------
# with guards; without ShardGuards all three are the plain ones


class Zero1(ShardGuards, PlainZero1):
    __doc__ = f"{PlainZero1.__doc__}\n    {ShardGuards.__doc__}"


class Zero2(Zero1, PlainZero2):
    __doc__ = f"{PlainZero2.__doc__}\n    {ShardGuards.__doc__}"


class Zero3(Zero2, PlainZero3):
    __doc__ = f"{PlainZero3.__doc__}\n    {ShardGuards.__doc__}"

# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Options of the stages: groups of ranks that shard, 16 bits on the way, shards on the CPU, whole
parameters for Muon, and modules on the meta device."""

import collections
import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

import ddp
import zero
from ddp import FIRST_TAG, Messages, ReduceScatter, bucket_bytes, fill_buckets, start_all_gather
from dropin.ranks import first_names, named_modules, named_tensors
from dropin.torch_options import refuse_no_size


class ShardingOptions:
    """A stage takes more options: see `OPTIONS`."""

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None,
                 units: Iterable[nn.Module] | None = None, param_dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None, shard_size: int | None = None,
                 offload: bool = False, init_fn: Callable[[nn.Module], object] | None = None,
                 device: torch.device | str | None = None, uncut: Iterable[nn.Parameter] = (),
                 broadcast_buffers: bool = True, bucket_cap_mb: float | None = None,
                 cast_forward_inputs: bool = True):
        self.forward_sync_buffers = self._sends_buffers_at_first = broadcast_buffers
        refuse_no_size(bucket_cap_mb)
        self._uncut = set_of_parameters(module, uncut)
        self._compared = [f"{param_dtype=} {reduce_dtype=} {shard_size=} {bucket_cap_mb=}"]
        names = first_names(named_modules(module))
        for name, p in named_tensors(module, "parameters"):
            if p in self._uncut:
                self._compared.append(f"uncut: {name}")
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.cast_forward_inputs = cast_forward_inputs
        self._asked_shard_size, self._asked_offload = shard_size, offload
        self._init_fn = [init_fn]  # in a list: a Module may be given, which is not kept
        self._asked_device = device
        units = self._in_order_of_module(module, find_units(module) if units is None else units)
        self._compared.append(f"units: {[names[unit] for unit in units]}")
        super().__init__(module, process_group, units, bucket_cap_mb, param_dtype)
        self._init_fn.clear()

    def _in_order_of_module(self, module, units):
        order = first_names(named_modules(module))
        units = set(units)
        for m in units:
            if m not in order or m is module:
                raise ValueError(f"{type(self).__name__}: a unit is not a submodule of the module: "
                                 f"units= has a {type(m).__name__}")
        return [m for m in order if m in units]

    # ---- how a stage is built

    def _fill_units(self, cap_bytes, param_dtype):
        """Make the buckets of all units, of this class's own kinds."""
        self._make_groups()
        device = self._choose_device()
        self.exposed_s = 0.0 if device.type == "cpu" else math.nan  # it was on meta
        self._offloads = self._asked_offload and device.type != "cpu"
        # {whether parameters are trained: [bytes of uncut ones that each rank owns so far]}. Apart,
        # since a trained one takes more memory: gradients and the optimizer's state.
        self._loads = {True: [0] * self.shard_group.size(), False: [0] * self.shard_group.size()}
        self._all_buckets = []
        divide(self._named("parameters"), self.units)
        stand_ins = {}
        for unit in self.units:
            on_meta = fill_meta(self.module, unit, device, *self._init_fn)
            for p in unit.parameters:
                p.grad = None
            if self._replicate_group is not None:
                ddp.broadcast(unit.parameters, self._replicate_group)
            self._fill_unit(unit, cap_bytes, param_dtype)
            swap(on_meta)  # again, so that filling another unit does not touch this one
            stand_ins |= on_meta
        swap(stand_ins)  # now all have what their buckets gave them
        self.units = [unit for unit in self.units if unit.buckets or unit is self.root]
        # The backward reaches the last units first, and completes the root's gradients at last.
        for unit in [*reversed(self.units[1:]), self.root]:
            self._all_buckets += unit.buckets
        for place, bucket in enumerate(self._all_buckets):
            bucket.tag = FIRST_TAG + 2 * place
        self._watch(self._all_buckets)

    def _fill_unit(self, unit, cap_bytes, param_dtype):
        """Its buckets, and one for all uncut ones of a kind, whatever its size: the more there are
        in a bucket, the more even its chunks. (They get their tags when all are there.)"""
        common = dict(unit=unit, group=self.shard_group, tag=0, param_dtype=param_dtype,
                      keeps_whole=self.keeps_whole, reduce_dtype=self.reduce_dtype,
                      offloads=self._offloads)
        for is_trained in (True, False):
            alike = [p for p in unit.parameters[::-1] if p.requires_grad == is_trained]
            cut = [p for p in alike if p not in self._uncut]
            for some in fill_buckets(in_kinds(cut), cap_bytes, cap_bytes):
                names = [self._names[p] for p in some]
                unit.buckets.append(ShardedBucket(some, names, **common))
            uncut = [p for p in alike if p in self._uncut]
            for some in fill_buckets(in_kinds(uncut), math.inf, math.inf):
                owners = choose_owners(some, self._loads[is_trained])
                some.sort(key=owners.get)  # those of an owner lie together
                names = [self._names[p] for p in some]
                unit.buckets.append(OwnedBucket(owners, some, names, **common))

    def _watch(self, buckets):
        super()._watch(buckets)
        if self.param_dtype is not None and self.cast_forward_inputs:
            for unit in self.units:
                self._hook(unit.module.register_forward_pre_hook, type(self)._cast_inputs,
                           with_kwargs=True)

    # ---- hybrid sharding: sums over this rank's group, then over groups

    def _make_groups(self):
        """The ranks over which parameters are sharded, and those that have the same shards as this
        one, or None."""
        self._replicate_group, self._summing = None, None
        if self._asked_shard_size not in (None, self.group.size()):
            groups = HierarchicalState(self._asked_shard_size, self.group)
            self.shard_group, self._replicate_group = groups.intra_node, groups.inter_node

    def _start_reduce(self, bucket):
        bucket.start_reduce_scatter()

    def _add(self, bucket):
        """The own chunk is summed over this group, in place. Then it is summed over groups, while
        the next bucket is launched. With that sum the stage goes on."""
        if self._replicate_group is None:
            super()._add(bucket)
            return
        self._finish_sum()  # of the bucket before
        own = bucket.own_chunk(bucket.gradients)
        bucket.reduction.add(own)
        bucket.reduction, self._summing = SumOverGroups(own, self._replicate_group), bucket

    def _finish_sum(self):
        bucket, self._summing = self._summing, None
        if bucket is not None:
            super()._add(bucket)

    def _wait_for_reductions(self):
        if self._summing is not None:
            with self._telling("wait", "reduce", self._summing):
                self._finish_sum()
        super()._wait_for_reductions()

    # ---- 16 bits, and shards on the CPU

    def _choose_device(self):
        """That of all that is not on meta. If all is, the one that was given, or the best."""
        places = {}
        for name, t in self._named("parameters") + self._named("buffers"):
            if not t.is_meta:
                places[t.device] = name
        if len(places) > 1:
            self._refuse(f"needs all parameters and buffers on one device: {places}")
        device = next(iter(places), self._asked_device)
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            is_gloo = dist.get_backend(self.group) == "gloo"
            device = "cpu" if is_gloo or accelerator is None else accelerator
        return torch.empty(0, device=device).device  # with its index

    def _launch(self, bucket):
        """What is sent has reduce_dtype."""
        bucket.take_sums()
        super()._launch(bucket)

    @torch.compiler.disable
    def _cast_inputs(self, module, inputs, options):
        return cast_floats((inputs, options), self.param_dtype)


# For the docstrings of the stages.
OPTIONS = """
    process_group: the ranks that train together; None for all.
    units: modules whose parameters are unsharded together; None: the elements of the outermost
    ModuleLists. What is in none of them, or in two, belongs to the root.
    param_dtype: of parameters in forward and backward, and of the inputs of units, which are cast.
    The shards, and so the optimizer's state, keep the module's dtype.
    cast_forward_inputs: whether they are, FSDP2's name. In bfloat16 a time step of 1001 is 1000,
    and a mask of finfo(float32).min is -inf: a row of those alone makes softmax nan.
    reduce_dtype: of gradients on their way; None: that of the shards. Sums of 16-bit ones are fp32.
    shard_size: hybrid sharding, as torch's HSDP. Each group of so many ranks has all shards, and
    gradients are reduced inside a group, then over groups. It is the W in zero.py's table of bytes.
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
    them nothing is gathered. An optimizer's state_dict() is this rank's.

    Raises RuntimeError where ranks wrap different modules, ValueError for a unit that is no
    submodule, for an uncut parameter that is none of the module's, and for a shard_size that does
    not divide the number of ranks.
"""


# -------------------------------------------------------------------------------------------------
# buckets


class ShardedBucket(zero.ShardedBucket):
    """As the book's, and what is sent may have another dtype; shards may be on the CPU.

        reduce_dtype  of what is sent
        sums          (n,) gradients so far, in reduce_dtype, if parameters have another; or None.
                      (Then `.grad` of the module's parameters has zeros)
        device        of all but the shards
        owners        None; see `OwnedBucket`
        memory        of `whole`, by which it is found
    """

    owners = None

    def __init__(self, parameters, names, unit, group, tag, param_dtype, keeps_whole, reduce_dtype,
                 offloads):
        first = parameters[0]
        self.device, self.offloads = first.device, offloads
        super().__init__(parameters, names, unit, group, tag, param_dtype, keeps_whole)
        self.reduce_dtype, self.sums = self.chunk.dtype, None
        if reduce_dtype is not None and self.chunk.is_floating_point():
            self.reduce_dtype = reduce_dtype

    def make_shards(self):
        if self.offloads:
            self.chunk = self.chunk.cpu().pin_memory()
        super().make_shards()

    def tag_of_step(self):
        """One for all steps. Ranks compare these, so one that has made others is named."""
        return self.tag

    def has_new_versions(self):
        """Whether a script has changed shards, in place."""
        for shard, (version, _) in zip(self.shards, self.noted):
            if shard._version != version:
                return True
        return False

    def part_of(self, i, value):
        """This rank's part of value, all of the i-th parameter, in the shard's shape."""
        whole = torch.empty(self.n, dtype=value.dtype, device=self.chunk.device)
        self.views(whole)[i].copy_(value)
        return self.parts(self.own_chunk(whole))[i]

    def start_gather(self):
        if self.whole is None:
            self.whole = torch.empty(self.n, dtype=self.dtype, device=self.device)
        super().start_gather()
        self.memory = self.whole.untyped_storage()._cdata

    def gather_copy(self):
        flat = torch.empty(self.n, dtype=self.chunk.dtype, device=self.device)
        self.own_chunk(flat).copy_(self.chunk)
        self.start_all_gather(flat).wait()
        return flat

    # ---- gradients

    def fill(self):
        """With another reduce_dtype add up in that. (As FSDP2 does: micro-steps in no_sync() add up
        in fp32, though gradients have 16 bits.)"""
        if self.reduce_dtype == self.dtype:
            super().fill()
            return
        if self.sums is None:
            self.sums = torch.zeros(self.n, dtype=self.reduce_dtype, device=self.device)
        else:
            places = zip(self.parameters, self.views(self.gradients), self.views(self.sums))
            for p, place, so_far in places:
                if p.grad.data_ptr() != place.data_ptr():  # zero_grad() has dropped it
                    so_far.zero_()
        super().fill()
        self.sums += self.gradients
        self.gradients.zero_()

    def take_sums(self):
        """Let `gradients` be what is to be sent."""
        if self.sums is not None:
            self.gradients, self.sums = self.sums, None
            with torch._C.DisableTorchFunctionSubclass():
                for p in self.parameters:
                    p.grad = None

    def start_reduce_scatter(self):
        self.reduction = ReduceScatter(self.gradients, self.group, self.tag)

    def earlier(self):
        flat = super().earlier()
        return None if flat is None else flat.to(self.device)

    def give_means(self, means):
        """If there is a `.grad`, it stays the same object, as scripts keep lists of gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            for p, shard, part in zip(self.parameters, self.shards,
                                      self.parts(means.to(self.chunk.device))):
                p.grad = None
                if shard.grad is None:
                    shard.grad = part
                else:
                    shard.grad.data = part


class SumOverGroups:
    """Of own, a group's sum, over groups: `add`, as of `ReduceScatter`."""

    def __init__(self, own, group):
        self.own, self.group, self.flat = own, group, own
        if len(own) % group.size() > 0:  # to equal chunks
            self.flat = nn.functional.pad(own, (0, -len(own) % group.size()))
        if group.size() == 2:  # two numbers have only one sum
            self.work = dist.all_reduce(self.flat, group=group, async_op=True)
        else:
            self.work = ReduceScatter(self.flat, group, FIRST_TAG)

    def add(self, out, earlier=None):
        if isinstance(self.work, ReduceScatter):
            chunks = self.flat.view(self.group.size(), -1)
            self.work.add(chunks[self.group.rank()])
            start_all_gather(self.flat, self.group, FIRST_TAG).wait()
        else:
            self.work.wait()
        total = self.flat[:len(self.own)]
        out.copy_(total if earlier is None else earlier + total)


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

        owners  of each parameter the rank whose chunk has all of it

        three ranks   a a a b b|c c c c|d d        owners 0, 0, 1, 2; chunks of 5, 4, 2

    One rank owns all of such a parameter, and its shard there has the parameter's shape. On the
    others the shard is empty, and its `.grad` is None. So any optimizer that works parameter by
    parameter makes the updates of one process. The uncut parameters of a unit are one bucket: the
    more there are, the more even its chunks. Owners are chosen so that all ranks have about as much
    of the whole model. The total sent is that of equal chunks, but the rank with the largest chunk
    sends that W-1 times. README.md has the numbers.
    """

    def __init__(self, owners, parameters, *arguments, **options):
        self.owners = [owners[p] for p in parameters]
        super().__init__(parameters, *arguments, **options)

    @functools.cached_property
    def cuts(self):
        """Where the chunks of ranks 1 to W-1 begin: at the first parameter of that rank, or a later
        one. A rank that owns none has an empty chunk."""
        cuts = []
        for rank in range(1, self.group.size()):
            begins = [begin for (_, _, begin), owner in zip(self.layouts, self.owners)
                      if owner >= rank]
            cuts.append(min(begins, default=self.n))
        return cuts

    def chunks(self, flat):
        return flat.tensor_split(self.cuts)

    def own_chunk(self, flat):
        return self.chunks(flat)[self.group.rank()]

    def is_elsewhere(self, i):
        """Whether another rank owns the i-th parameter."""
        return self.owners[i] != self.group.rank()

    def lay_out_shards(self):
        """All of a parameter, in its shape, where this rank owns it; otherwise nothing."""
        self.firsts, self.shard_layouts = [], []
        begins = [0, *self.cuts]
        chunk_begin = begins[self.group.rank()]
        for i, (shape, strides, begin) in enumerate(self.layouts):
            ones = (1,) * max(1, len(shape))
            layout = (0, *ones[1:]), ones, 0
            first = 0 if self.owners[i] > self.group.rank() else shape.numel()
            if not self.is_elsewhere(i):
                layout, first = (shape, strides, begin - chunk_begin), 0
            self.firsts.append(first)
            self.shard_layouts.append(layout)

    def start_all_gather(self, flat):
        chunks = self.chunks(flat)
        return exchange([chunks[self.group.rank()]] * len(chunks), chunks, self.group, self.tag + 1)

    def start_reduce_scatter(self):
        most_bytes = bucket_bytes(self.group.size(), None)
        self.reduction = ReduceInPieces(self.chunks(self.gradients), most_bytes, self.group,
                                        self.tag)

    def give_means(self, means):
        """Where another rank owns the parameter, `.grad` is None, so that every optimizer leaves
        the empty shard alone: some divide by its number of elements."""
        super().give_means(means)
        for i, shard in enumerate(self.shards):
            if self.is_elsewhere(i):
                shard.grad = None


def exchange(sends, receives, group, tag):
    """As ddp.py's, of tensors of any sizes, the same on both sides. Empty ones are left out."""
    messages = []
    for operation, tensors in ((dist.irecv, receives), (dist.isend, sends)):
        for peer, t in enumerate(tensors):
            if peer != group.rank() and t.numel() > 0:
                messages.append(dist.P2POp(operation, t, group=group, group_peer=peer, tag=tag))
    return Messages(dist.batch_isend_irecv(messages) if messages else [])


class ReduceInPieces:
    """As `ReduceScatter`, of chunks of any sizes. What arrives for a long chunk would take W-1
    times its memory. So chunks are sent in pieces, one after the other, so small that most_bytes
    arrive of one. While `add` adds one piece, the next one arrives, so two take memory. Only the
    first is on its way before `add` is called."""

    def __init__(self, chunks, most_bytes, group, tag):
        self.chunks, self.group, self.tag = chunks, group, tag
        self.longest = max(len(chunk) for chunk in chunks)
        arriving_bytes = self.longest * chunks[0].itemsize * (len(chunks) - 1)
        n_pieces = max(1, math.ceil(arriving_bytes / most_bytes))
        self.size = max(1, math.ceil(self.longest / n_pieces))  # of a piece
        self.under_way = [self.start_piece(0)]

    def start_piece(self, begin):
        """-> (messages, what each rank has contributed to this rank's piece)"""
        pieces = [chunk[begin:begin + self.size] for chunk in self.chunks]
        own = pieces[self.group.rank()]
        contributions = list(own.new_empty(len(pieces) - 1, len(own)))
        contributions.insert(self.group.rank(), own)
        return exchange(pieces, contributions, self.group, self.tag), contributions

    def wait(self):
        for messages, _ in self.under_way:
            messages.wait()

    def add(self, out, earlier=None):
        for begin in range(0, self.longest, self.size):
            end = begin + self.size
            if end < self.longest:
                self.under_way.append(self.start_piece(end))
            self.add_piece(out[begin:end], None if earlier is None else earlier[begin:end])

    def add_piece(self, out, earlier):
        messages, addends = self.under_way.pop(0)
        messages.wait()
        if earlier is not None:
            addends.insert(0, earlier)
        total = addends[0]
        if total.itemsize == 2:
            total = total.float()
        for addend in addends[1:]:  # in rank order
            total += addend
        out.copy_(total)


# -------------------------------------------------------------------------------------------------
# small functions


def find_units(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists. Other than zero.py's, it takes a list in a list as
    one: a unit may be a mere container, as the experts of a layer, of which each rank uses others;
    and it leaves out lists of bare parameters, which are read by the module around."""
    if isinstance(module, nn.ModuleList):
        bare = nn.ParameterList, nn.ParameterDict
        return [m for m in module.children() if not isinstance(m, bare)]
    units = []
    for child in module.children():
        units += find_units(child)
    return units


def divide(named_parameters, units):
    """Give each unit its `submodules` and `parameters`. The first unit is the root, which has what
    is in two units, or in none."""
    root, *others = units
    for unit in units:
        unit.submodules, unit.parameters = [], []
    unit_of = {}  # {submodule, or parameter: its unit}
    for unit in others:
        parts = set()
        for _, m in named_modules(unit.module):
            parts.update([m, *m._parameters.values()])
        for part in parts:
            unit_of[part] = root if part in unit_of else unit
    for m in first_names(named_modules(root.module)):
        unit = unit_of.get(m, root)
        unit.submodules.append(m)
        if unit is root:  # its parameters belong there, even if a unit shares them
            for p in m._parameters.values():
                unit_of[p] = root
    for p in first_names(named_parameters):
        unit_of[p].parameters.append(p)


def in_kinds(parameters):
    """Those of one dtype together, in the order of the first of each."""
    kinds = {}
    for p in parameters:
        kinds.setdefault(p.dtype, []).append(p)
    return [p for kind in kinds.values() for p in kind]


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


class HierarchicalState:
    """Two groups that this rank belongs to, for hybrid sharding, and for the comm hook of that name
    in extras/comm_hooks.py.

        ranks 0 1 2 3 with node_size 2     intra_node of rank 2: 2 3     inter_node of rank 2: 0 2

    intra_node: node_size neighbours, the ranks of one node. inter_node: the ranks with this one's
    place in every node. A collective. Raises ValueError unless node_size divides the world size.
    """

    def __init__(self, node_size: int, process_group: ProcessGroup | None = None):
        group = process_group or dist.group.WORLD
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        if node_size < 1 or len(ranks) % node_size > 0:
            raise ValueError(f"{len(ranks)} ranks do not divide into groups of {node_size}, the "
                             "node_size or shard_size")
        place = rank % node_size
        first = rank - place
        # Backend and timeout of the group; new_group() would take the world's, and 30 minutes.
        options = group._get_backend(group._device_types[0]).options
        new_group = functools.partial(dist.new_group, timeout=options._timeout,
                                      backend=dist.get_backend(group),
                                      use_local_synchronization=True)
        self.intra_node = new_group(ranks[first:first + node_size])
        self.inter_node = new_group(ranks[place::node_size])


# -------------------------------------------------------------------------------------------------
# modules on the meta device


def swap(pairs):
    """Exchange the contents of each key of pairs with those of its value: who had the one now sees
    the other. A second call undoes it."""
    for p, q in pairs.items():
        torch.utils.swap_tensors(p, q)


@torch.no_grad()
def fill_meta(module, unit, device, init_fn):
    """Give the parameters of unit of module values where they are on meta -> {each such one: a
    stand-in, which is on meta}. After it buckets take the values. Then the two are swapped, until
    all units have been filled: so filling another unit does not touch this one.

    init_fn(submodule) fills it, if given. Otherwise the module's `init_weights()` does, which must
    skip what is still on meta, or `reset_parameters()` of the submodules. Rank 0's values count.
    The unit's buffers are real then.
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
    return stand_ins

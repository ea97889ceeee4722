"""ZeRO: data parallelism in which each of W ranks keeps 1/W of what is needed only now and then.

    model = Zero3(module)                    # or Zero1, Zero2; then as with DDP
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)  # this rank's shards
    loss = model(x, y)
    loss.backward()                          # on return each shard's `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's ZeroRedundancyOptimizer (1,700 lines) and FSDP2 (5,700). How it works (Rajbhandari
et al., arXiv 1910.02054, section 5): the parameters of a unit, such as a block of the model, lie in
flat buffers of which rank r owns the r-th part. Three verbs: gather parameters, reduce gradients,
free.

    stage  shards      bytes a rank holds, fp32, Adam   elements that a rank sends, of (W-1)/W Psi
    DDP    nothing     16 Psi                           2 a step
    Zero1  P_os        8 Psi + 8 Psi/W                  2 a step
    Zero2  P_os+g      4 Psi + 12 Psi/W                 2 a micro-step
    Zero3  P_os+g+p    16 Psi/W                         3 a micro-step

How it differs: in Zero3 whole parameters live in two slots that units take turns in, as lines of a
cache. A weight that autograd has saved fetches its unit again when the backward asks for it, in
whatever way the model calls its units. Contributions to a gradient are added in rank
order, micro-step by micro-step: the bits of one process that accumulates the same micro batches.
With shard_size=k, W in the table is k: each k ranks have all shards, and gradients are reduced
among them, then across.

Cost beside the table: three buckets during the backward (Zero1: one); in Zero3 the root and two
units, whole, during forward and backward; in Zero2 and Zero3 whole gradients under no_sync(), in
Zero3 also in a backward in which some ranks leave out what others use.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import warnings
import weakref

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp import (Reducer, add_in_rank_order, all_gather, all_reduce, clip_gradients_, node_groups,
                 start_reduce_scatter, wait_for, without_peer)

BUCKET_BYTES = 25 * 2**20  # a bucket is full at this size: torch DDP's number
ALIGN_BYTES = 64  # of a parameter in its buffer: a cache line, and what BLAS kernels like best
# They look at a parameter as a whole, so a step on shards would be another one, without a word.
NOT_ELEMENT_WISE = {"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"}


def in_backward():
    """Whether autograd is at work in this thread: a forward now recomputes a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def will_get_gradient(p):
    """Whether the backward under way, from which this is called, has a gradient for p."""
    if not p.requires_grad:
        return False
    with contextlib.suppress(RuntimeError):  # autograd.grad() for p itself, which leaves p.grad
        return torch._C._will_engine_execute_node(get_gradient_edge(p).node)
    return False


def dense(p):
    """(shape, strides) of p if it were packed, dimensions in its order of memory."""
    return p.shape, torch.empty_like(p, device="meta").stride()


# -------------------------------------------------------------------------------------------------
# memory


class Slot:
    """Memory that holds the whole parameters of one unit at a time."""

    def __init__(self, device):
        self.storage = torch.UntypedStorage(0, device=device)
        self.n_bytes = 0  # of the largest unit that uses it
        self.holder = None  # the unit whose parameters are here, or on their way

    def tensor(self, dtype, offset, shape, strides):
        """A view of the memory from byte `offset` on; valid again after every `allocate`."""
        empty = torch.empty(0, dtype=dtype, device=self.storage.device)
        return empty.set_(self.storage, offset // dtype.itemsize, shape, strides)

    def allocate(self):
        if self.storage.size() < self.n_bytes:
            self.storage.resize_(self.n_bytes)

    def evict(self):
        if self.holder is not None:
            self.holder.wait()  # what it still sends comes from here
            self.holder.swap_in(False)
            self.holder = None

    def free(self):
        self.evict()
        self.storage.resize_(0)


class Spare:
    """Buffers not in use now, by size: fresh memory costs a page fault every 4 kB."""

    def __init__(self):
        self.buffers = collections.defaultdict(list)

    def take(self, n, dtype, device):
        buffers = self.buffers[n, dtype, device]
        return buffers.pop() if buffers else torch.empty(n, dtype=dtype, device=device)

    def give(self, buffer):
        self.buffers[len(buffer), buffer.dtype, buffer.device].append(buffer)


class Bucket:
    """Parameters of one kind, one after the other in a flat buffer that is cut into W equal shards,
    W being the ranks in a shard group, `rank` this one's place there.

        whole      (W S,) in param_dtype, in the unit's slot: what forward and backward use
        master     (S,) in the parameters' own dtype; the optimizer's shards are views of it
        flat       (W S,) in reduce_dtype: this rank's gradients, until they are reduced
        gradient   (S,) as master: the mean over ranks; the shards' `.grad` are views of it
    """

    def __init__(self, parameters, rank, world_size, param_dtype, reduce_dtype):
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.param_dtype, self.reduce_dtype = (
            given if given is not None and self.dtype.is_floating_point else self.dtype
            for given in (param_dtype, reduce_dtype))
        align = ALIGN_BYTES // min(self.dtype.itemsize, self.param_dtype.itemsize)
        self.starts, n = {}, 0  # in elements
        for p in parameters:
            self.starts[p] = n
            n += -(-p.numel() // align) * align
        self.rank, self.world_size, self.size = rank, world_size, -(-n // world_size)  # S
        self.whole = self.master = self.flat = self.gradient = None
        self.shards, self.gradients = {}, {}  # parameter -> its part of master, of gradient
        self.addresses, self.was_trained = {}, {}  # parameter -> what it was last seen to be
        self.trained = []  # parameters that are not frozen
        self.expected = set()  # parameters that get a gradient in this backward
        self.arrived = set()  # those of them that have it
        self.filled = set()  # parameters with a gradient in flat
        self.taken = set()  # parameters whose shard's `.grad` is in gradient by now
        self.room = self.wait = self.place = None  # while it is being reduced

    # what a Reducer asks for

    def parameters(self):
        return self.trained

    def index(self):
        return self.place

    def complete(self):
        return self.expected <= self.arrived

    def put(self, p, scale):
        """Move p.grad into flat, added to what is there of p; then all of it times scale."""
        view = self.flat.as_strided(*dense(p), self.starts[p])
        if p in self.filled:
            if p.grad is not None:
                view.add_(p.grad)
            view.mul_(scale)
        elif p.grad is None:
            view.zero_()  # not used here, maybe elsewhere
        elif p.grad.dtype == view.dtype:
            torch.mul(p.grad, scale, out=view)
        else:
            view.copy_(p.grad).mul_(scale)  # in the dtype of the sum
        self.filled.add(p)

    # shards

    def own(self, buffer):
        """This rank's shard of a (W S,) buffer."""
        return buffer[self.rank * self.size:(self.rank + 1) * self.size]

    def part(self, p):
        """(first, end) of this rank's part of p, counted within p; equal where it has none."""
        first = min(max(self.rank * self.size - self.starts[p], 0), p.numel())
        end = min(max((self.rank + 1) * self.size - self.starts[p], first), p.numel())
        return first, end

    def view(self, p, shard):
        """This rank's part of p in a (S,) shard: (n, 1, ..., 1), with p's number of dimensions."""
        first, end = self.part(p)
        offset = self.starts[p] + first - self.rank * self.size if end > first else 0
        return shard[offset:offset + end - first].view(end - first, *[1] * (p.dim() - 1))

    def set_gradient(self, gradient):
        self.gradient = gradient
        self.gradients = {p: self.view(p, gradient) for p in self.starts}

    def earlier(self):
        """Take what is in the shards' `.grad` now -> (S,), or None: the means of earlier backwards,
        what a script has put there, or the gradient of a penalty on the shards themselves."""
        left = {p: self.shards[p].grad for p in self.trained if self.shards[p].grad is not None}
        if not left:
            return None
        for p in left:
            self.shards[p].grad = None
        self.taken.update(left)
        if len(left) == len(self.trained) and all(g is self.gradients[p] for p, g in left.items()):
            return self.gradient
        together = torch.zeros_like(self.gradient)
        for p, gradient in left.items():
            self.view(p, together).copy_(gradient)
        return together

    def gather(self, process_group, tag):
        """Start to fill whole from the masters of all ranks -> works for `wait_for`."""
        own = self.own(self.whole)
        if own.data_ptr() != self.master.data_ptr():
            # The cast comes before the exchange: half the bytes in bf16.
            own.copy_(self.master, non_blocking=True)
        return all_gather(self.whole, process_group, tag)


class Unit:
    """A part of the model whose parameters are gathered together: a block, or, the root, the rest.

    A parameter stands in its module as whole while the unit is swapped in, otherwise as this rank's
    shard.
    """

    def __init__(self, name, module, submodules, places, depth, slot, tag):
        self.name, self.module, self.depth, self.slot, self.tag = name, module, depth, slot, tag
        self.submodules = submodules  # those in no other unit
        self.places = places  # [(module, attribute, parameter)], several for a tied parameter
        self.buckets = []
        self.works = []  # of a gather under way
        self.n_calls = 0  # forwards under way
        self.swapped_in = True
        self.version = None  # of the masters that were gathered last

    def parameters(self):
        return list(dict.fromkeys(p for _, _, p in self.places))

    def start(self, process_group):
        """Start to gather the whole parameters into the slot."""
        if self.is_stale():  # the masters were written to: a graph of the old weights must not run
            increment_version(self.parameters())
            self.version = sum(bucket.master._version for bucket in self.buckets)
        with record_function(f"start: gather {self.name}"), self._told():
            for bucket in self.buckets:
                self.works += bucket.gather(process_group, self.tag)

    def is_stale(self):
        """Whether torch knows of a write to the masters since they were gathered."""
        return self.version != sum(bucket.master._version for bucket in self.buckets)

    def wait(self):
        works, self.works = self.works, []
        with self._told():
            wait_for(works)

    @contextlib.contextmanager
    def _told(self):
        """Adds to an error what it means."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"rank {dist.get_rank()}: the parameters of {self.name} were not "
                               f"gathered. {without_peer('forwards')} {error}") from error

    def swap_in(self, whole):
        if self.swapped_in != whole:
            self.swapped_in = whole
            shards = {p: shard for bucket in self.buckets for p, shard in bucket.shards.items()}
            for module, attribute, p in self.places:
                there, new = (shards[p], p) if whole else (p, shards[p])
                if getattr(module, attribute, None) is there:  # not what functional_call() has put
                    module._parameters[attribute] = new


def copied(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def find_units(module):
    """The elements of the outermost ModuleLists of module: {name: unit's module}."""
    found, lists = {}, []
    for name, m in module.named_modules():
        if isinstance(m, torch.nn.ModuleList) and not name.startswith(tuple(lists)):
            lists.append(f"{name}." if name else "")
            found |= {f"{name}.{i}".lstrip("."): element for i, element in enumerate(m)
                      if element is not None}
    return found


# -------------------------------------------------------------------------------------------------
# what the stages share


def unless_compiling(hook):
    """A hook that leaves no trace in what torch.compile makes of the module around."""
    return lambda *arguments: None if torch.compiler.is_compiling() else hook(*arguments)


class Zero(Reducer):
    """What the three stages share: units and their shards, hooks, gradients on their way, state.

    process_group: the ranks that train together; None for all.
    units: modules whose parameters are gathered together; None: the elements of the outermost
    ModuleLists. What is in none of them, or in two, belongs to the root.
    param_dtype: of parameters in forward and backward, and of the inputs of units, which are cast;
    None leaves both. The shards keep the module's dtype, and so does the optimizer's state.
    reduce_dtype: of gradients on their way; None: that of the shards. Sums of 16-bit ones are fp32.
    shard_size: hybrid sharding, as in torch's HSDP: shards are over groups of so many ranks, such
    as those of a node, and each group has all of them; None: one group. Gradients are reduced
    inside a group, then over the groups; parameters are gathered inside. The bits are those of DDP
    with `hierarchical_hook`; with shard_size 1 or W, or 2 ranks, those of the sum in rank order.
    offload: shards, their gradients, and so the optimizer's state and its step, are on the CPU, in
    pinned memory; forward and backward stay on the CUDA device.
    init_fn: called as init_fn(submodule) to fill what is on the meta device; without it the
    module's `init_weights()`, which must skip what is still on meta, or else `reset_parameters()`
    of the submodules. Rank 0's values count, as they do for a module that has values.

    Under autocast, weights that autograd saves are 16-bit copies of the whole model: in stage 3 use
    param_dtype instead. Buffers are not cast. A forward's own writes to weights are lost.

    Gradients held back by no_sync() are whole. `zero_grad()` of this wrapper drops them, that of an
    optimizer does not see them. A forward is a collective, also one that only evaluates.

    Raises RuntimeError where ranks wrap different modules, TypeError when copied, ValueError for a
    unit that is no submodule and a shard_size that does not divide the number of ranks.

    A stage has `_keeps_whole`, whether parameters stay whole; `_slot`, the memory they are in;
    `_begin_pass` and `_end_pass` around the outermost forward, and `_refresh` without one; `_open`,
    which finds memory for gradients, and `_gradient_is_in_flat`, whether it serves the shards too.
    """

    def __init__(self, module, process_group=None, units=None, param_dtype=None, reduce_dtype=None,
                 shard_size=None, offload=False, init_fn=None):
        super().__init__()
        self._join(module, process_group)
        self.shard_size = self.world_size if shard_size is None else shard_size
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.find_unused_parameters = True  # what no rank used keeps `grad is None`
        chosen = self._choose(find_units(module).values() if units is None else units)
        self._check_ranks_agree(f"param_dtype={param_dtype}", f"reduce_dtype={reduce_dtype}",
                                f"shard_size={shard_size}", f"units={list(chosen.values())}")
        self.shard_group, self._replicas = self.process_group, None
        if self.shard_size != self.world_size:
            self.shard_group, self._replicas = node_groups(self.process_group, self.shard_size)
        self._lane = concurrent.futures.ThreadPoolExecutor(1, "replicas")
        self._device = self._find_device()
        self._offloads = self._is_offloaded(offload)
        self._spare = Spare()
        self._stack = []  # (unit, module) of the forwards under way, the innermost last
        self._build_units(list(chosen))
        self._take_in_values(init_fn)
        self._start({name: p for p, name in self._name_of.items()})
        self._index_buckets()
        self._add_hooks()

    # ---- construction

    def _find_device(self):
        devices = {p.device for p in self.module.parameters() if not p.is_meta}
        if len(devices) > 1:
            raise RuntimeError(f"{self._get_name()}: the module is on {len(devices)} devices: move "
                               f"it to one before wrapping it")
        nccl = "nccl" in dist.get_backend(self.process_group)
        return next(iter(devices), torch.device("cuda" if nccl else "cpu"))

    def _is_offloaded(self, offload):
        if offload and self._device.type == "cpu":
            warnings.warn(f"{self._get_name()}: offload changes nothing, as the module is on the "
                          f"CPU")
        return offload and self._device.type != "cpu"

    def _choose(self, units):
        """{unit's module: its name}, in order of the module."""
        units, name_of = set(units), {m: name for name, m in self.module.named_modules()}
        for m in units:
            if m not in name_of or m is self.module:
                raise ValueError(f"{self._get_name()}: units has a {type(m).__name__} that is not "
                                 f"a submodule of the {type(self.module).__name__}")
        return {m: name for m, name in name_of.items() if m in units}

    def _build_units(self, chosen):
        """Divide the parameters, not yet their values, among units."""
        name_of = {m: name for name, m in self.module.named_modules()}
        inside = {m: set(m.modules()) for m in chosen}
        owner = {}  # module -> the innermost unit around it; None, the root, for none and for two
        for m in name_of:
            around = [u for u in chosen if m in inside[u]]
            innermost = [u for u in around if inside[u].isdisjoint(set(around) - {u})]
            owner[m] = innermost[0] if len(innermost) == 1 else None
        places, owners = [], collections.defaultdict(set)
        for m in name_of:
            for attribute, p in m._parameters.items():
                if p is not None:
                    places.append((m, attribute, p))
                    owners[p].add(owner[m])
        self._named = dict(self.module.named_parameters(remove_duplicate=False))
        self._name_of = {p: name for name, p in self.module.named_parameters()}
        self._units = []  # the root, then the others in order of the module
        for m in (None, *chosen):
            own = [place for place in places
                   if owners[place[2]] == {m} or (m is None and len(owners[place[2]]) > 1)]
            submodules = [n for n in name_of if owner[n] is m]
            depth = None if m is None else sum(m in inside[u] for u in chosen)
            self._units.append(Unit(name_of.get(m, "the root"), self.module if m is None else m,
                                    submodules, own, depth, self._slot(depth),
                                    self._tag + 1 + len(self._units)))
        self._root = self._units[0]

    @torch.no_grad()
    def _take_in_values(self, init_fn):
        """Unit by unit: fill what is on meta, agree with rank 0, keep what the stage keeps.

        No rank ever holds more than one unit beside its shards. While there is something on meta,
        the parameters of all units but one are, so that filling one does not touch another.
        """
        meta = any(t.is_meta for t in itertools.chain(self.module.parameters(),
                                                      self.module.buffers()))
        for unit in self._units:
            if meta:
                self._materialise(unit, init_fn)
            self._make_buckets(unit)
            if meta:
                for module, attribute, p in unit.places:
                    module._parameters[attribute] = torch.nn.Parameter(
                        torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for unit in self._units:
            for module, attribute, p in unit.places:
                module._parameters[attribute] = p
            unit.swap_in(self._keeps_whole)
            if not self._keeps_whole:
                unit.slot.free()
        self._broadcast(list(self.module.buffers()))

    def _materialise(self, unit, init_fn):
        """Give memory, and then values, to what is on meta in the submodules of unit."""
        empty = [m for m, _, p in unit.places if p.is_meta]
        empty += [m for m in unit.submodules
                  if any(t.is_meta for t in m._buffers.values() if t is not None)]
        for p in unit.parameters():
            if p.is_meta:
                real = torch.nn.Parameter(torch.empty_like(p, device=self._device), p.requires_grad)
                torch.utils.swap_tensors(p, real)  # the modules' p stays the same object
                vars(p).update(vars(real))  # such as p.no_decay, by which a script makes groups
        for m in empty:
            for name, buffer in m._buffers.items():
                if buffer is not None and buffer.is_meta:
                    m._buffers[name] = torch.empty_like(buffer, device=self._device)
        if empty and init_fn is None and hasattr(self.module, "init_weights"):
            self.module.init_weights()
            return
        for m in dict.fromkeys(empty):
            reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
            if init_fn is None and reset is None:
                raise RuntimeError(f"{self._get_name()}: {unit.name} has a {type(m).__name__} on "
                                   f"the meta device without reset_parameters(): pass init_fn")
            reset() if init_fn is None else init_fn(m)
        for m, attribute, p in unit.places:
            if m._parameters[attribute] is not p:  # init_fn has put its own there
                p.copy_(m._parameters[attribute])

    def _make_buckets(self, unit):
        """Cut the parameters of unit into shards, from rank 0's values."""
        groups, filling = [], {}
        for p in reversed(unit.parameters()):
            kind = p.requires_grad, p.dtype
            filling.setdefault(kind, []).append(p)
            if sum(q.numel() * q.element_size() for q in filling[kind]) >= BUCKET_BYTES:
                groups.append(filling.pop(kind))
        rank, offsets, n_bytes = dist.get_rank(self.shard_group), [], 0
        for parameters in (*groups, *filling.values()):
            bucket = Bucket(parameters, rank, self.shard_size, self.param_dtype, self.reduce_dtype)
            unit.buckets.append(bucket)
            offsets.append(n_bytes)
            n_bytes += self.shard_size * bucket.size * bucket.param_dtype.itemsize
            n_bytes += -n_bytes % ALIGN_BYTES
        unit.slot.n_bytes = max(unit.slot.n_bytes, n_bytes)
        unit.slot.allocate()
        for bucket, offset in zip(unit.buckets, offsets):
            values = torch.zeros(self.shard_size * bucket.size, dtype=bucket.dtype,
                                 device=self._device)
            for p, start in bucket.starts.items():
                values.as_strided(*dense(p), start).copy_(p)
            if len(values):
                dist.broadcast(values.view(torch.uint8), group_src=0, group=self.process_group)
            self._keep(unit.slot, bucket, values, offset)

    def _keep(self, slot, bucket, values, offset):
        """Put the parameters of a bucket in slot, from byte offset on, and this rank's shard aside.
        """
        bucket.whole = slot.tensor(bucket.param_dtype, offset, (len(values),), (1,))
        if self._keeps_whole:
            bucket.whole.copy_(values)
        in_place = self._keeps_whole and bucket.param_dtype == bucket.dtype and not self._offloads
        own = bucket.own(values)
        bucket.master = bucket.own(bucket.whole) if in_place else self._room_like(own).copy_(own)
        for p, start in bucket.starts.items():
            shard = bucket.view(p, bucket.master)
            bucket.shards[p] = torch.nn.Parameter(shard, requires_grad=p.requires_grad)
            vars(bucket.shards[p]).update(vars(p), is_shard=True)  # lest somebody wrap it again
            bucket.was_trained[p] = p.requires_grad
            p.grad = None
            offset_of_p = offset + start * bucket.param_dtype.itemsize
            p.data = slot.tensor(bucket.param_dtype, offset_of_p, *dense(p))
            bucket.addresses[p] = (shard.data_ptr(), shard.dtype, slot.storage._cdata,
                                   bucket.param_dtype)

    def _room_like(self, t):
        """New memory for something like t, where the optimizer works."""
        if self._offloads:
            return torch.empty_like(t, device="cpu").pin_memory()
        return torch.empty_like(t)

    def _index_buckets(self):
        """Bring the buckets into the order in which a backward completes them."""
        place = {p: i for i, p in enumerate(self._name_of)}
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        self._all_buckets = sorted(buckets, key=lambda b: -min(place[p] for p in b.starts))
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.starts}

    def _add_hooks(self):
        """Hooks on the modules themselves, so that `model.module(x)` works; they refer to the
        wrapper weakly, lest the module keep it alive."""
        before, after = weakref.WeakMethod(self._before_forward), weakref.WeakMethod(
            self._after_forward)
        check_optimizer = weakref.WeakMethod(self._check_optimizer)
        handles = [register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: check_optimizer()(optimizer))]
        for unit in self._units:
            # Submodules too: a unit may be a mere container, or a script call a part of the model.
            for m in dict.fromkeys((unit.module, *(m for m, _, _ in unit.places))):
                def enter(called, inputs, kwargs, m=m, unit=unit):
                    return before()(unit, m, inputs, kwargs) if called is m else None  # not a copy

                def leave(called, inputs, output, m=m, unit=unit):
                    return after()(unit, m, output) if called is m else None

                # What torch.compile makes of a unit stays without hooks.
                apart = torch.compiler.disable if m is unit.module else unless_compiling
                handles += [
                    m.register_forward_pre_hook(apart(enter), prepend=True, with_kwargs=True),
                    m.register_forward_hook(apart(leave), always_call=True)]
        wrapped = weakref.ref(self.module)

        def refuse_load(module, *_):
            if module is wrapped():  # not a copy, which has the hook too
                raise RuntimeError("this module is sharded: load whole weights by "
                                   "load_full_state_dict() of its wrapper")

        handles.append(self.module.register_load_state_dict_pre_hook(refuse_load))
        for handle in handles:
            weakref.finalize(self, handle.remove).atexit = False

    def _check_optimizer(self, optimizer):
        """Hook of all optimizers: refuse those whose step would be another one than on DDP."""
        if self._offloads:
            torch.cuda.current_stream().synchronize()  # shards may still be on their way from here
        kind = type(optimizer).__name__
        given = {p for group in optimizer.param_groups for p in group["params"]}
        if not given.isdisjoint(self._bucket_of):
            raise RuntimeError(f"{self._get_name()}: {kind} was given the module's own parameters, "
                               f"which get no gradient: build it after wrapping, from the "
                               f"wrapper's parameters()")
        if kind.lower() in NOT_ELEMENT_WISE and not given.isdisjoint(self.parameters()):
            raise RuntimeError(f"{self._get_name()}: {kind} looks at a parameter as a whole, but "
                               f"each rank has a shard: use an optimizer that works element by "
                               f"element, such as AdamW or SGD")

    # ---- forward

    def forward(self, *inputs, **kwargs):
        try:
            return self.module(*inputs, **kwargs)
        except BaseException:  # Ctrl-C, of which torch does not tell a hook
            self._abandon_forward()
            raise

    def _abandon_forward(self):
        for unit, _ in self._stack:
            unit.n_calls = 0
        self._stack.clear()

    def _before_forward(self, unit, module, inputs, kwargs):
        """Hook of a unit's module and of its submodules: its parameters have to be whole."""
        within = unit.n_calls > 0 and module is not unit.module  # a part of a forward under way
        if within and self._saved_weights_are_safe():
            return None
        self._stack.append((unit, module))
        unit.n_calls += 1
        if len(self._stack) == 1:
            if not in_backward():
                self._check_shards()
                self._begin_pass(whole_model=module is self.module)
            self._ready(self._root)
        self._ready(unit)
        if self.param_dtype is None or within:
            return None
        return tree_map_only(
            torch.Tensor, lambda t: t.to(self.param_dtype) if t.is_floating_point() else t,
            (inputs, kwargs))

    def _after_forward(self, unit, module, output):
        """Hook of the same, also after an exception in the forward."""
        if not self._stack or self._stack[-1] != (unit, module):
            return
        self._stack.pop()
        unit.n_calls -= 1
        if not self._stack and not in_backward():
            self._end_pass()

    def _saved_weights_are_safe(self):
        """Whether a weight that autograd saves now will be whole when the backward asks for it."""
        return True

    def _ready(self, unit):
        """What a forward of unit needs."""
        self._use(unit)

    def _use(self, unit):
        if unit.works:
            with self._exposed(f"gather {unit.name}"):
                unit.wait()

    def _check_shards(self):
        """Refuse shards that were replaced; what was frozen or thawed since is so, whole and shard.
        """
        for bucket in self._all_buckets:
            for p, shard in bucket.shards.items():
                there = shard.data_ptr(), shard.dtype, p.untyped_storage()._cdata, p.dtype
                if there != bucket.addresses[p]:
                    raise RuntimeError(f"{self._get_name()}: {self._name_of[p]} was cast, moved "
                                       f"or replaced after wrapping: do so before, or write new "
                                       f"values by load_full_state_dict()")
                if p.requires_grad != bucket.was_trained[p]:
                    shard.requires_grad_(p.requires_grad)
                if p.requires_grad != shard.requires_grad:
                    p.requires_grad_(shard.requires_grad)
                bucket.was_trained[p] = p.requires_grad

    # ---- backward

    def _follow_changes(self):
        for bucket in self._all_buckets:
            bucket.trained = [p for p in bucket.starts if p.requires_grad]
            bucket.expected = set(filter(will_get_gradient, bucket.trained))
        self._buckets = [bucket for bucket in self._all_buckets if bucket.trained]
        for place, bucket in enumerate(self._buckets):
            bucket.place = place

    def _on_gradient(self, p):
        try:
            super()._on_gradient(p)
        finally:
            p.grad = None  # what autograd made: it is in the bucket, or was refused

    def _put(self, bucket, p, scale):
        if not bucket.filled:
            self._open(bucket)
        bucket.put(p, scale)

    def _new_flat(self, bucket):
        return self._spare.take(self.shard_size * bucket.size, bucket.reduce_dtype, bucket.device)

    def _launch(self, bucket):
        """Start to send each rank its shard of a bucket; one at a time bounds what is in flight.

        All ranks have launched the one before, which they must be able to do without what this rank
        starts later: `Zero3._is_ready` sees to it.
        """
        bucket.room = self._spare.take((self.shard_size - 1) * bucket.size, bucket.reduce_dtype,
                                       bucket.device)
        bucket.wait = start_reduce_scatter(bucket.flat, self.shard_group, self._tag, bucket.room)
        if self._replicas:
            bucket.wait = self._start_over_replicas(bucket, bucket.wait)

    def _start_over_replicas(self, bucket, wait_inside):
        """Start to add up this rank's shard over all groups -> a function that waits for it."""
        def reduce():
            total = bucket.own(bucket.flat)
            add_in_rank_order(wait_inside(), out=total)
            all_reduce(total, self._replicas, self._tag)
            return [total]

        if bucket.device.type == "cpu":
            return self._lane.submit(torch.no_grad()(reduce)).result
        total = reduce()  # on CUDA streams keep the order
        return lambda: total

    def _reduced(self, bucket, contributions):
        """Add the contributions of all ranks, in rank order, to what earlier backwards have left.
        """
        earlier = bucket.earlier()
        if earlier is not None:
            contributions = [earlier.to(bucket.device), *contributions]
        total = bucket.gradient
        if self._offloads:
            total = self._spare.take(bucket.size, bucket.dtype, bucket.device)
        add_in_rank_order(contributions, out=total)
        if self._offloads:  # has arrived when `_agree_on_use`, at the end, has made the CPU wait
            bucket.gradient.copy_(total, non_blocking=True)
            self._spare.give(total)
        self._spare.give(bucket.room)
        bucket.room = None
        if not self._gradient_is_in_flat(bucket):
            self._spare.give(bucket.flat)
            bucket.flat = None
        bucket.filled.clear()

    def _has_gradient(self, p):
        bucket = self._bucket_of[p]
        return p in self._used or p in bucket.taken or bucket.shards[p].grad is not None

    def _give_gradient(self, p):
        bucket = self._bucket_of[p]
        if bucket.shards[p].grad is not None:  # a penalty's, later than the bucket was reduced
            bucket.gradients[p].add_(bucket.shards[p].grad)
        bucket.shards[p].grad = bucket.gradients[p]

    def _reset(self):
        super()._reset()
        self._spare.buffers.clear()
        for bucket in self._all_buckets:
            bucket.taken.clear()

    def _drop_unfinished(self):
        super()._drop_unfinished()
        self._forget()

    def zero_grad(self, set_to_none=True):
        """Also drops what no_sync() has held back, which an optimizer's zero_grad() cannot see."""
        super().zero_grad(set_to_none)
        self._used.clear()
        self._forget()

    def _forget(self):
        """Drop gradients that have not been reduced."""
        for bucket in self._all_buckets:
            bucket.filled.clear()

    # ---- parameters and state

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """(original name, this rank's shard) of every parameter of the module, in its order."""
        seen = set()
        for name, p in self._named.items():
            if not (remove_duplicate and p in seen):
                seen.add(p)
                yield f"{prefix}.{name}" if prefix else name, self._bucket_of[p].shards[p]

    def shard_starts(self):
        """{original name: where this rank's shard begins in the parameter, in elements, in order of
        memory}: beside `named_parameters()` all that it takes to load at another world size."""
        return {name: self._bucket_of[p].part(p)[0] for p, name in self._name_of.items()}

    def clip_grad_norm_(self, max_norm):
        """Scale gradients in place to a total norm of at most max_norm; return the norm before,
        a float64 scalar, the same on every rank. A collective."""
        gradients = [shard.grad for shard in self.parameters() if shard.grad is not None]
        return clip_gradients_(gradients, max_norm, self.shard_group)

    def _entries(self):
        """(name, parameter or None, value) of all in the module's state_dict(), told by identity:
        a hook may have renamed them."""
        of = {t: p for bucket in self._all_buckets for p, shard in bucket.shards.items()
              for t in (p, shard)}
        for name, value in self.module.state_dict(keep_vars=True).items():
            yield name, of.get(value) if isinstance(value, torch.Tensor) else None, value

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """This rank's shards and the buffers under the module's own names, copied unless keep_vars.
        Arguments as in torch.nn.Module. Not a collective."""
        destination = {} if destination is None else destination
        for name, p, value in self._entries():
            if p is not None:
                value = self._bucket_of[p].shards[p]
            # Copied, since torch.save would write all of the buffer that a view is of.
            destination[prefix + name] = value if keep_vars else copied(value)
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Copy in what `state_dict()` gave at this world size. Raises RuntimeError on a misfit."""
        ours = self.state_dict(keep_vars=True)
        self._check_fit(ours, state_dict)
        for name, t in ours.items():
            self._load(name, t, state_dict[name])

    @torch.no_grad()
    def full_parameters(self):
        """Yield (original name, whole parameter in the shards' dtype), a tied one once, holding one
        bucket at a time. A collective: every rank has to go through all of it."""
        gathered, flat = None, None
        for p, name in self._name_of.items():
            bucket = self._bucket_of[p]
            if bucket is not gathered:
                gathered, flat = bucket, torch.empty(self.shard_size * bucket.size,
                                                     dtype=bucket.dtype, device=bucket.device)
                bucket.own(flat).copy_(bucket.master)
                wait_for(all_gather(flat, self.shard_group, self._tag))
            yield name, flat.as_strided(*dense(p), bucket.starts[p]).clone()

    @torch.no_grad()
    def full_state_dict(self):
        """{name: whole tensor}, on every rank, as the module's state_dict(). A collective.

        Costs the memory of the whole model on every rank; `full_parameters` does not.
        """
        self._refresh()
        whole = dict(self.full_parameters())
        return {name: copied(value) if p is None else whole[self._name_of[p]]
                for name, p, value in self._entries()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict):
        """Write whole parameters and buffers: each rank copies its part. A collective.

        Every rank passes the same state_dict. Raises RuntimeError naming what is missing, left over
        or of another shape, before anything is written.
        """
        entries = list(self._entries())
        self._check_fit({name: value if p is None else p for name, p, value in entries}, state_dict)
        for name, p, value in entries:
            if p is None:
                self._load(name, value, state_dict[name])
                continue
            bucket = self._bucket_of[p]
            packed = torch.empty_strided(*dense(p), dtype=bucket.dtype, device=bucket.device)
            packed.copy_(state_dict[name])
            first, end = bucket.part(p)
            bucket.shards[p].view(-1).copy_(packed.as_strided((p.numel(),), (1,))[first:end])
        self._refresh()

    def _load(self, name, t, value):
        """Write value to t, which is a shard, a buffer or what get_extra_state() has returned."""
        parent, _, last = name.rpartition(".")
        if last == "_extra_state":
            self.module.get_submodule(parent).set_extra_state(value)
        else:
            t.copy_(value)

    def _check_fit(self, ours, state_dict):
        """Raise RuntimeError where state_dict has other names or shapes than ours."""
        missing, left_over = ours.keys() - state_dict.keys(), state_dict.keys() - ours.keys()
        shapes = {name: [tuple(getattr(t, "shape", ())) for t in (state_dict[name], ours[name])]
                  for name in ours.keys() & state_dict.keys()}
        other = {f"{name} ({found}, not {expected})"
                 for name, (found, expected) in shapes.items() if found != expected}
        for what, names in (("missing", missing), ("left over", left_over), ("shapes", other)):
            if names:
                raise RuntimeError(f"{self._get_name()}: nothing was loaded; {what}: "
                                   f"{', '.join(sorted(names))}")

    def _apply(self, *_, **__):
        raise RuntimeError(f"{self._get_name()}: cast or move the module before wrapping it; "
                           f"param_dtype casts what forward and backward use")

    def __getstate__(self):
        """For deepcopy and pickle."""
        raise TypeError(f"{self._get_name()}: save, or copy, full_state_dict() or state_dict() "
                        f"instead")


# -------------------------------------------------------------------------------------------------
# stage 1


class Zero1(Zero):
    """P_os: each rank keeps optimizer state for 1/W of the parameters, and updates only these.

    8 Psi + 8 Psi/W bytes in fp32 with Adam. A step reduces gradients to their owners during the
    backward, Psi elements, and gathers updated shards under the next forward, Psi elements. In
    fp32 the shards, and their gradients, are parts of the whole ones.
    """

    _keeps_whole = True

    def _slot(self, depth):
        """The memory of the next unit; depth counts the units around it, None for the root."""
        return Slot(self._device)

    def _begin_pass(self, whole_model):
        """The outermost forward begins: start to gather everything. A collective.

        Not between a backward under no_sync() and the next one, where no step belongs. Otherwise
        always: an optimizer that writes to p.data leaves no trace by which to know.
        """
        held_back = bool(self._used)  # gradients, by no_sync()
        if not held_back or any(unit.is_stale() for unit in self._units):
            self._gather_all()
        if not whole_model:
            self._end_pass()

    def _gather_all(self):
        for unit in self._units:
            unit.wait()
            unit.start(self.shard_group)

    def _end_pass(self):
        for unit in self._units:  # a shard must not change while it is being sent
            self._use(unit)

    def _refresh(self):
        """Make the whole parameters in the module current. A collective."""
        self._gather_all()
        self._end_pass()

    def _gradient_is_in_flat(self, bucket):
        """Whether this rank's part of a bucket's flat buffer becomes its shard's gradient."""
        return bucket.reduce_dtype == bucket.dtype and not self._offloads

    def _open(self, bucket):
        """A bucket gets its first gradient since it was last reduced."""
        in_flat = self._gradient_is_in_flat(bucket)
        if bucket.flat is None:
            bucket.flat = self._new_flat(bucket)
        if bucket.gradient is None:
            bucket.set_gradient(bucket.own(bucket.flat) if in_flat else
                                self._room_like(bucket.master))
        for p in bucket.trained if in_flat else ():
            if bucket.shards[p].grad is bucket.gradients[p]:  # not zeroed: to be added later
                bucket.shards[p].grad = bucket.gradients[p].clone()


# -------------------------------------------------------------------------------------------------
# stage 2


class Zero2(Zero1):
    """P_os+g: each rank keeps also only its 1/W of the gradients.

    4 Psi + 12 Psi/W bytes in fp32 with Adam, and three buckets during the backward. Every backward
    outside no_sync() reduces, Psi elements, and adds to the shards: W x accumulation micro batches
    give the bits of one process that accumulates as many, for W a power of two. In no_sync() whole
    gradients are held, 4 Psi bytes, until the next backward outside.
    """

    def _gradient_is_in_flat(self, bucket):
        return False

    def _forget(self):
        super()._forget()
        for bucket in self._all_buckets:
            bucket.flat = None


# -------------------------------------------------------------------------------------------------
# stage 3


class Zero3(Zero2):
    """P_os+g+p: parameters are whole only around the forward and the backward of their unit.

    16 Psi/W bytes in fp32 with Adam; during forward and backward the root and two units more.
    Two slots are like the lines of a cache: units take turns in them, and gathering one evicts the
    one before the last. While a unit computes, the next is on its way; the last two of the forward
    are there when the backward begins. 3 Psi elements a step: forward, backward, gradients.

    All ranks gather units in one order, in the forward that of the module, in the backward the
    reverse. A rank that skips a unit takes part nevertheless, lest the others wait for it. What is
    out of this order (units called again or in another order, two forwards before a backward, an
    exception in a backward) has to be so on all ranks.

    A whole weight may be kept only where autograd sees it: not as `ctx.w = w` in an autograd
    Function, by saved_tensors_hooks inside a unit's forward, or inside an output of a type that
    torch.utils._pytree does not know. It would read what another unit has put there.
    """

    _keeps_whole = False

    def __init__(self, module, process_group=None, units=None, param_dtype=None, reduce_dtype=None,
                 shard_size=None, offload=False, init_fn=None):
        super().__init__(module, process_group, units, param_dtype, reduce_dtype, shard_size,
                         offload, init_fn)
        self._slot_by_storage = {unit.slot.storage._cdata: unit.slot for unit in self._units}
        self._pack_hooks = {}  # hook for saved tensors -> (depth of the stack, its context)
        self._backward_task = None
        self._set_course([])

    # ---- units take turns in slots

    def _slot(self, depth):
        """The root has its own; units take turns in two, those inside other units in two others."""
        if depth is None:
            return super()._slot(depth)
        turn = sum(unit.depth == depth for unit in self._units) % 2
        taken = [unit.slot for unit in self._units if unit.depth == depth]
        return taken[turn] if len(taken) > 1 else super()._slot(depth)

    def _gather(self, unit):
        """Start to gather unit, unless it is there or on its way."""
        there = unit.slot.holder
        if there is unit:
            return
        if there is not None and there.n_calls:
            raise RuntimeError(f"{self._get_name()}: {unit.name} is called inside the forward of "
                               f"{there.name}, whose memory it shares: make them one unit, by "
                               f"units=")
        unit.slot.evict()
        unit.slot.allocate()
        unit.slot.holder = unit
        unit.start(self.shard_group)

    def _set_course(self, units):
        """The units that all ranks gather from now on, in this order."""
        self._course, self._next = list(units), 0
        self._end_at = {unit: i for i, unit in enumerate(self._course, start=1)}

    def _go_to(self, end):
        """Gather the course up to `end`, what this rank skips too: other ranks may wait for it."""
        for unit in self._course[self._next:end]:
            self._gather(unit)
        self._next = max(self._next, end)

    def _use(self, unit):
        end = self._end_at.get(unit, 0)  # 0: not on the course
        self._go_to(end)
        self._gather(unit)
        is_newest = end == self._next
        if is_newest and 0 < end < len(self._course):  # prefetch the next one
            ahead = self._course[self._next].slot
            if ahead is not unit.slot and not (ahead.holder and ahead.holder.n_calls):
                self._go_to(self._next + 1)
        super()._use(unit)

    # ---- forward

    def _begin_pass(self, whole_model):
        for unit in self._units:
            unit.slot.evict()  # the shards may have changed
        self._set_course(self._units if whole_model else [])

    def _end_pass(self):
        self._go_to(len(self._course))
        for unit in self._units:
            unit.swap_in(False)
        if not torch.is_grad_enabled():
            self._free()

    def _free(self):
        for unit in self._units:
            unit.slot.free()

    def _ready(self, unit):
        super()._ready(unit)
        unit.swap_in(True)

    def _before_forward(self, unit, module, inputs, kwargs):
        changed = super()._before_forward(unit, module, inputs, kwargs)
        if not self._saved_weights_are_safe():
            self._push_saved_tensors_hooks()
        return changed

    def _saved_weights_are_safe(self):
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return not torch.is_grad_enabled() or (top is not None and top[0] in self._pack_hooks)

    def _push_saved_tensors_hooks(self):
        """From here to the end of this forward, a weight that autograd saves will fetch its unit
        when the backward asks for it. Other tensors go the way of the hooks around, if there are
        any, such as those of activation checkpointing."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(t):
            # Detached, as t may be the output of the very node that saves it: a cycle, never freed.
            slot = self._slot_of(t)
            if slot is not None:
                return slot.holder, t.detach(), t._version
            return None, outer[0](t) if outer else t.detach(), t._version

        def unpack(saved):
            unit, t, version = saved
            self._begin_backward_pass()
            if unit is not None:
                self._use(unit)
            elif outer:
                return outer[1](t)
            if t._version != version:  # autograd leaves this to hooks
                raise RuntimeError(
                    f"a {tuple(t.shape)} tensor needed by the backward was modified in place"
                    + (f": a parameter of {unit.name}, by an optimizer step?" if unit else ""))
            # Under create_graph the backward is recorded, but no hook is on: a copy of its own.
            return t.clone() if unit is not None and torch.is_grad_enabled() else t

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._pack_hooks[pack] = len(self._stack), hooks

    def _abandon_forward(self):
        super()._abandon_forward()
        for pack, (_, hooks) in reversed(list(self._pack_hooks.items())):
            del self._pack_hooks[pack]
            hooks.__exit__()

    def _slot_of(self, t):
        try:
            return self._slot_by_storage.get(t.untyped_storage()._cdata)
        except NotImplementedError:  # a sparse tensor has none
            return None

    def _after_forward(self, unit, module, output):
        if not self._stack or self._stack[-1] != (unit, module):
            return None
        for pack, (depth, hooks) in list(self._pack_hooks.items()):
            if depth == len(self._stack):
                del self._pack_hooks[pack]
                hooks.__exit__()
        if any(isinstance(t, torch.Tensor) and self._slot_of(t) for t in tree_leaves(output)):
            # A unit that returns its weight, or a view of it: the slot will have other holders.
            output = tree_map_only(
                torch.Tensor, lambda t: t.clone() if self._slot_of(t) else t, output)
        super()._after_forward(unit, module, output)
        return output

    # ---- backward

    def _begin_backward(self, p):
        super()._begin_backward(p)
        self._begin_backward_pass()

    def _begin_backward_pass(self):
        task = torch._C._current_graph_task_id()
        if task in (self._backward_task, -1):
            return
        self._backward_task = task
        course = self._units[:0:-1]  # without the root
        while course and not any(p.requires_grad for p in course[-1].parameters()):
            course.pop()  # the backward may not come so far down
        self._set_course(course)
        self._compare_use()
        self._ready(self._root)  # its parameters may be used in what is recomputed
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward_pass)

    def _compare_use(self):
        """Start to ask which parameters get a gradient in this backward on some ranks only."""
        self._unlike = set()  # these; None while it is not known
        if self.world_size == 1:
            return
        used = torch.tensor([will_get_gradient(p) for p in self._names], dtype=torch.int32,
                            device=self._device)
        either = torch.stack((used, 1 - used))  # used, left out; by one rank and another: unlike
        work = dist.all_reduce(either, op=dist.ReduceOp.MAX, group=self.process_group,
                               async_op=True)
        self._use_of_ranks, self._unlike = (work, either), None

    def _is_ready(self, bucket):
        """Gathers and reductions have to begin in one order on all ranks, or these wait for each
        other: a bucket that some rank could reduce without having used a unit waits for the end."""
        self._begin_backward_pass()
        if not super()._is_ready(bucket):
            return False
        if self._unlike is None:
            work, either = self._use_of_ranks
            try:
                with self._exposed("comparison of use"):
                    work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{self._get_name()}: not all ranks have begun this backward. "
                                   f"{without_peer('backwards')} {error}") from error
            self._unlike = {p for p, n in zip(self._names, either.sum(dim=0).tolist()) if n > 1}
        return self._unlike.isdisjoint(bucket.trained)

    def _end_backward(self):
        self._go_to(len(self._course))  # the order of all ranks: gathers, then what is left
        super()._end_backward()

    def _end_backward_pass(self):
        self._go_to(len(self._course))
        self._free()

    def _refresh(self):
        """Nothing is whole that could be."""

"""ZeRO: data parallelism in which each of W ranks keeps 1/W of what is needed only now and then.

    model = Zero3(module)                    # or Zero1, Zero2; then as with DDP
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)  # shards; see below
    loss = model(x, y)
    loss.backward()                          # on return each shard's `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's ZeroRedundancyOptimizer (1,700 lines) and FSDP2 (5,700). How it works (Rajbhandari
et al., arXiv 1910.02054, section 5): the parameters of a unit, such as a block of the model, lie in
flat buffers that are cut into W shards, and rank r owns the r-th of each. There are three verbs: a
unit is gathered before it is used, its gradients are reduced to their owners, and what is not
needed any more is freed. The stages differ only in what they free:

    stage  shards      frees               bytes per rank, fp32, Adam  sent, of (W-1)/W Psi elements
    Zero1  P_os        nothing             8 Psi + 8 Psi/W             2 per step
    Zero2  P_os+g      gradients           4 Psi + 12 Psi/W            2 per micro-step
    Zero3  P_os+g+p    parameters as well  16 Psi/W                    3 per micro-step

The module keeps its parameters: forward and backward compute with them. In stage 3 a gather gives
them memory, and once that is freed they read as nan. The optimizer gets other parameters, the
shards. (A fused optimizer rounds the last elements of a tensor differently, so that its shards do
not get the bits of the whole.)

How it differs: a weight that autograd saves becomes a note, by which the backward gathers the unit
again. So a model may call its units again, out of order or in a checkpoint. Contributions to a
gradient are added in rank order, micro-step by micro-step, which gives the bits of one process that
accumulates the same micro batches.

Cost beside the table: during the backward three buckets of 25 MB (Zero1: one); in Zero3 the root
and two units; under no_sync() whole gradients.

In this order: three small functions, a bucket with shards, a unit, then Zero1: construction, gather
and free, forward, backward, parameters and state; and in two lines each Zero2 and Zero3.
"""

import collections
import functools
import itertools
import math

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from ddp import (Bucket, HierarchicalState, Reducer, add_in_rank_order, all_gather, all_reduce,
                 broadcast, fill_buckets, reduce_scatter, weakly)

BUCKET_BYTES = 25 * 2**20  # torch DDP's number
ALIGN_BYTES = 64  # of a parameter in its buffer: a cache line, and what BLAS kernels like best


def in_backward():
    """Whether autograd is at work in this thread: a forward now recomputes a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def find_units(module):
    """The elements of the outermost ModuleLists of module, except lists of bare parameters, which
    are read by the module around."""
    if isinstance(module, torch.nn.ModuleList):
        bare = torch.nn.ParameterList, torch.nn.ParameterDict, type(None)
        return [element for element in module if not isinstance(element, bare)]
    return [unit for child in module.children() for unit in find_units(child)]


def unless_compiling(hook):
    """A hook that leaves no trace in what torch.compile makes of the module around."""
    return lambda *arguments: None if torch.compiler.is_compiling() else hook(*arguments)


class ShardedBucket(Bucket):
    """A bucket whose parameters lie in flat buffers too, cut into W equal shards of S elements:

        whole      (W S,) in param_dtype: what forward and backward use, or None
        master     (S,) in the parameters' own dtype; the optimizer's shards are views of it
        flat       (W S,) in reduce_dtype: this rank's gradients until they are reduced, or None
        gradient   (S,) as master: the mean over ranks; the shards' `.grad` are views of it
        held       parameters with a gradient in flat, of this backward or held back by no_sync()

    Stage 1 keeps flat, and gradient is a part of it (`gradient_in_flat`); so is master of whole.
    """

    def __init__(self, unit, parameters, rank, W, device, param_dtype, reduce_dtype):
        self.unit, self.rank, self.device, self.dtype = unit, rank, device, parameters[0].dtype
        self.param_dtype, self.reduce_dtype = (
            given if given is not None and self.dtype.is_floating_point else self.dtype
            for given in (param_dtype, reduce_dtype))
        align = ALIGN_BYTES // min(self.dtype.itemsize, self.param_dtype.itemsize)
        super().__init__(parameters, align)
        self.size = max(1, -(-self.n // W))  # S
        self.n = W * self.size
        self.whole = self.master = self.gradient = None
        self.shards, self.held = {}, set()  # shards: {parameter: the optimizer's}

    def own(self, buffer):
        """This rank's shard of a (W S,) buffer."""
        return buffer[self.rank * self.size:(self.rank + 1) * self.size]

    def part(self, p):
        """(first, end) of this rank's part of p, counted within p; equal where it has none."""
        shape, _, start = self.places[p]
        first = self.rank * self.size - start
        return [min(max(i, 0), shape.numel()) for i in (first, first + self.size)]

    def shard(self, p, buffer):
        """This rank's part of p in a (S,) buffer: (n, 1, ..., 1), with p's number of dimensions."""
        (shape, _, start), (first, end) = self.places[p], self.part(p)
        offset = start + first - self.rank * self.size
        return buffer[offset:offset + end - first].view(end - first, *[1] * (len(shape) - 1))

    @torch.inference_mode(False)  # what is made inside it could not be used outside
    def show(self, whole):
        """Point the parameters at whole or, if it is None, at a nan that is expanded to their
        shape and takes no memory."""
        self.whole = whole
        nothing = torch.full((), math.nan, device=self.device).to(self.param_dtype)
        for p, (shape, *_) in self.places.items():
            p.data = nothing.expand(shape) if whole is None else self.view(p, whole)

    def put(self, p, scale):
        """Move p.grad into flat, added to what it holds of p; then all of it times scale. Returns
        whether there is a gradient."""
        if self.flat is None:
            self.flat = torch.empty(self.n, dtype=self.reduce_dtype, device=self.device)
        view = self.view(p, self.flat)
        if p in self.held:
            view.add_(0 if p.grad is None else p.grad).mul_(scale)
        elif p.grad is None:
            view.zero_()  # not used here, maybe elsewhere
        elif p.grad.dtype == view.dtype:
            torch.mul(p.grad, scale, out=view)  # one pass over memory
        else:
            view.copy_(p.grad).mul_(scale)  # the product in reduce_dtype
        if p.grad is not None:
            self.held.add(p)
            p.grad = None
        return p in self.held

    def earlier(self):
        """[what the shards' `.grad` hold from before this backward, (S,)], or [] if nothing: the
        mean of a micro-step before."""
        before = {p: shard.grad for p, shard in self.shards.items() if shard.grad is not None}
        if all(before.get(p) is mean for p, (_, mean) in self.means.items()):
            return [self.gradient]
        together = torch.zeros_like(self.master)
        for p, gradient in before.items():
            self.shard(p, together).copy_(gradient)
        return [together] if before else []


class Unit:
    """A part of the model whose parameters are gathered together: a block, or, the root, the rest.
    """

    def __init__(self, name, module, is_own):
        self.name, self.module, self.buckets = name, module, []
        self.parameters = list(filter(is_own, module.parameters()))
        self.submodules = list(filter(is_own, module.modules()))
        self.is_whole = False  # whether the parameters are gathered, or on their way
        self.waits = []  # of a gather under way
        self.version = None  # `current_version()` when it was last looked at

    def current_version(self):
        """A number that grows when the optimizer changes the shards."""
        return sum(shard._version for bucket in self.buckets for shard in bucket.shards.values())

    def note_changes(self):
        """If the shards have changed, let autograd refuse graphs of the old weights."""
        if self.version != self.current_version():
            self.version = self.current_version()
            torch.autograd.graph.increment_version(self.parameters)


# -------------------------------------------------------------------------------------------------
# the stages


class Zero1(Reducer):
    """P_os: each rank keeps optimizer state for 1/W of the parameters, and updates only these.

    process_group: the ranks that train together; None for all.
    units: modules whose parameters are gathered together; None: the elements of the outermost
    ModuleLists. What is in none of them, or in two, belongs to the root.
    param_dtype: of parameters in forward and backward, and of the inputs of units, which are cast.
    The shards, and so the optimizer's state, keep the module's dtype.
    reduce_dtype: of gradients on their way; None: that of the shards. Sums of 16-bit ones are fp32.
    shard_size: hybrid sharding, as torch's HSDP: W in the table is shard_size, each group of so
    many ranks has all shards, and gradients are reduced inside a group, then over groups. The bits
    are those of DDP with `hierarchical_hook`.
    offload: shards, and so the optimizer's state and its step, are on the CPU.
    init_fn: called as init_fn(submodule) to fill what is on the meta device; without it the
    module's `init_weights()`, which must skip what is still on meta, or `reset_parameters()` of the
    submodules. Rank 0's values count.

    A forward is a collective, also one that only evaluates; in stage 3 so is a backward, also under
    no_sync(). A rank may skip units: it gathers them with the others. But all ranks must call the
    same units if one calls a unit twice, out of order, or in a second forward before the backward.
    A unit's parameters are nan outside of its forward, also for the root. Under autocast autograd
    saves 16-bit copies of all weights: use param_dtype instead. `zero_grad()` of this wrapper also
    drops what no_sync() holds back; an optimizer's cannot. Keep the wrapper: hooks refer to it
    weakly, and without it the module computes with nan.

    Raises RuntimeError where ranks wrap different modules, ValueError for a unit that is no
    submodule and a shard_size that does not divide the number of ranks.
    """

    _frees_gradients = _frees_parameters = False  # the stage

    def __init__(self, module, process_group=None, units=None, param_dtype=None, reduce_dtype=None,
                 shard_size=None, offload=False, init_fn=None):
        super().__init__(module, process_group, True, f"{param_dtype} {reduce_dtype} {shard_size}")
        self.param_dtype, self.shard_size = param_dtype, shard_size or self.world_size
        self.shard_group, self._replicas = self.process_group, None
        if self.shard_size != self.world_size:
            groups = HierarchicalState(self.shard_size, process_group)
            self.shard_group, self._replicas = groups.inside, groups.across
        devices = [p.device for p in module.parameters() if not p.is_meta]
        nccl = "nccl" in dist.get_backend(self.process_group)
        self._device = devices[0] if devices else torch.device("cuda" if nccl else "cpu")
        self._offloads = offload and self._device.type != "cpu"
        self._entered = []  # (unit, saved-tensor hooks) of the forwards under way
        # The course: units still to be gathered in this pass, in the order common to all ranks.
        self._course, self._newest = collections.deque(), None  # newest: the last one gathered
        self._resident = []  # stage 3: whole units beside the root, at most two, the older first
        self._bucket_at = {}  # stage 3: memory -> the bucket whose whole parameters are there
        self._build_units(find_units(module) if units is None else units, reduce_dtype)
        self._take_in_values(init_fn)
        bucket_of = {p: b for unit in self._units for b in unit.buckets for p in b.places}
        # Ordered by when a backward fills them: when it reaches their first parameter.
        trained = dict.fromkeys(bucket_of[p] for p in module.parameters() if p.requires_grad)
        self._track(list(trained)[::-1])
        self._bucket_of = bucket_of  # also of frozen parameters
        self._add_hooks()

    # ---- construction

    def _build_units(self, units, reduce_dtype):
        """Divide the parameters, not yet their values, among units and buckets."""
        names = {m: name for name, m in self.module.named_modules()}
        if not set(units) <= names.keys() - {self.module}:
            raise ValueError(f"{self._get_name()}: a unit is not a submodule of the module")
        chosen = [m for m in names if m in set(units)]
        n_units = collections.Counter(t for m in chosen for t in (*m.modules(), *m.parameters()))
        # A parameter that a module outside of all units has is the root's, in however many units.
        n_units.update(2 * [p for m in names if n_units[m] == 0 for p in m._parameters.values()])
        self._units = [Unit("the root", self.module, lambda t: n_units[t] != 1),
                       *(Unit(names[m], m, lambda t: n_units[t] == 1) for m in chosen)]
        rank = dist.get_rank(self.shard_group)
        for unit in self._units:
            for parameters in fill_buckets(unit.parameters[::-1], BUCKET_BYTES, BUCKET_BYTES):
                unit.buckets.append(ShardedBucket(unit, parameters, rank, self.shard_size,
                                                  self._device, self.param_dtype, reduce_dtype))

    @torch.no_grad()
    def _take_in_values(self, init_fn):
        """Unit by unit, so that no rank holds more than one beside its shards: fill what is on the
        meta device, agree with rank 0, cut shards."""
        stand_ins = {}  # parameter on meta -> what it is to become
        for unit in self._units:
            stand_ins |= self._materialise(unit, init_fn)
            for bucket in unit.buckets:
                values = torch.zeros(bucket.n, dtype=bucket.dtype, device=self._device)
                for p in bucket.places:
                    bucket.view(p, values).copy_(stand_ins.get(p, p))
                dist.broadcast(values.view(torch.uint8), group_src=0, group=self.process_group)
                self._cut(bucket, values)
                for p in bucket.places:
                    t = stand_ins.get(p, p)
                    t.data, t.grad = values.new_empty(0, dtype=bucket.param_dtype), None
        for p, stand_in in stand_ins.items():
            torch.utils.swap_tensors(p, stand_in)
        for unit in self._units:
            unit.version = unit.current_version()
            for bucket in unit.buckets:
                bucket.show(bucket.whole)
        if any(True for _ in self.module.buffers()):
            broadcast([*self.module.buffers()], self.process_group)

    def _materialise(self, unit, init_fn):
        """Fill what unit has on the meta device -> {parameter: a real one with its values}."""
        real, empty = {}, []
        for p in unit.parameters:
            if p.is_meta:
                real[p] = torch.nn.Parameter(torch.empty_like(p, device=self._device),
                                             p.requires_grad)
                vars(real[p]).update(vars(p))
                torch.utils.swap_tensors(p, real[p])
        for m in self.module.modules():
            buffers = {name: torch.empty_like(t, device=self._device) for name, t in
                       m._buffers.items() if m in unit.submodules and t is not None and t.is_meta}
            m._buffers.update(buffers)
            if buffers or not real.keys().isdisjoint(m._parameters.values()):
                empty.append(m)
        if empty and init_fn is None and hasattr(self.module, "init_weights"):
            self.module.init_weights()
            empty.clear()
        for m in empty:
            reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
            if init_fn is None and reset is None:
                raise RuntimeError(f"{self._get_name()}: {unit.name} has a {type(m).__name__} on "
                                   f"the meta device without reset_parameters(): pass init_fn")
            reset() if init_fn is None else init_fn(m)
        for p, t in real.items():  # back to meta, so that filling other units does not touch it
            torch.utils.swap_tensors(p, t)
        return real

    def _cut(self, bucket, values):
        """Keep what the stage keeps of values, (W S,), the whole parameters of bucket."""
        own = bucket.own(values)
        bucket.whole = None if self._frees_parameters else values.to(bucket.param_dtype)
        in_place = bucket.whole is values and not self._offloads
        bucket.master = own if in_place else self._new_shard(bucket).copy_(own)
        bucket.gradient_in_flat = (bucket.reduce_dtype == bucket.dtype and
                                   not self._frees_gradients and not self._offloads)
        for p in bucket.places:
            # .data, for a _version of its own: a gather writes to master, which is no update.
            shard = torch.nn.Parameter(bucket.shard(p, bucket.master).data, p.requires_grad)
            vars(shard).update(vars(p))  # such as p.no_decay, by which a script makes groups
            bucket.shards[p] = shard

    def _new_shard(self, bucket):
        return torch.empty(bucket.size, dtype=bucket.dtype, pin_memory=self._offloads,
                           device="cpu" if self._offloads else self._device)

    def _add_hooks(self):
        """On the modules themselves, so that `model.module(x)` works, and on all that have
        parameters: a unit may be a mere container, and a script may call a part of the model."""
        register_optimizer_step_pre_hook(weakly(self._check_optimizer))
        for unit in self._units:
            enter = functools.partial(weakly(self._enter), unit)
            for m in unit.submodules:
                if m is unit.module or m._parameters:
                    # What torch.compile makes of a unit stays without hooks.
                    apart = torch.compiler.disable if m is unit.module else unless_compiling
                    m.register_forward_pre_hook(apart(enter), prepend=True, with_kwargs=True)
                    m.register_forward_hook(apart(weakly(self._leave)), always_call=True)

    def _check_optimizer(self, optimizer, *_):
        """Hook of all optimizers: one that was given the module's parameters would do nothing."""
        if any(p in self._bucket_of for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(f"{self._get_name()}: the optimizer has the module's parameters: "
                               f"build it after wrapping, from the wrapper's parameters()")

    # ---- gather and free

    def _gather(self, unit):
        """Start to gather unit, unless it is whole or on its way."""
        if unit.is_whole:
            return
        if self._frees_parameters and unit is not self._units[0]:
            if len(self._resident) == 2:
                self._free(self._resident[0])
            self._resident.append(unit)
        unit.is_whole = True
        unit.note_changes()
        with record_function(f"start: gather {unit.name}"), torch.inference_mode(False):
            for bucket in unit.buckets:
                if bucket.whole is None:
                    bucket.show(torch.empty(bucket.n, dtype=bucket.param_dtype,
                                            device=self._device))
                    self._bucket_at[bucket.whole.untyped_storage()._cdata] = bucket
                own = bucket.own(bucket.whole)
                if own.data_ptr() != bucket.master.data_ptr():
                    own.copy_(bucket.master)  # the cast comes first: half the bytes in bf16
                unit.waits.append(all_gather(bucket.whole, self.shard_group, self._tag))

    def _finish_gather(self, unit):
        waits, unit.waits = unit.waits, []
        if waits:
            self._wait_for(f"gather {unit.name}", lambda: [wait() for wait in waits])

    def _free(self, unit):
        """Free the whole parameters of unit. Stages 1 and 2 keep them, to be gathered again."""
        if not unit.is_whole:
            return
        self._finish_gather(unit)  # or a rank that skips units would collect gathers under way
        unit.is_whole = False
        if self._frees_parameters:
            for bucket in unit.buckets:
                bucket.show(None)
            self._bucket_at = {k: b for k, b in self._bucket_at.items() if b.unit is not unit}
        if unit in self._resident:
            self._resident.remove(unit)

    def _advance(self):
        """Gather the next unit of the course, and launch the buckets that only waited for it."""
        unit = self._newest = self._course.popleft()
        self._gather(unit)
        if unit in self._resident:  # now the newer one, so that all ranks free the same
            self._resident.remove(unit)
            self._resident.append(unit)
        for bucket in self._buckets:
            bucket.pending.discard(unit)
        self._launch()

    def _use(self, unit):
        """Make unit whole. All that comes before it on the course is gathered first, since other
        ranks may wait for it. While a unit is in use, the next one is on its way."""
        while unit in self._course:
            self._advance()
        self._gather(unit)
        self._finish_gather(unit)
        # Unless the next one would take its place, as it may after a unit was called again.
        if self._course and unit is self._newest and unit not in self._resident[:-1]:
            self._advance()

    def _end_pass(self, frees):
        """A forward or backward ends."""
        while self._course:
            self._advance()
        for unit in self._units:
            self._finish_gather(unit)  # a shard must not change while it is being sent
            if frees and self._frees_parameters:
                self._free(unit)

    # ---- forward

    def forward(self, *inputs, **kwargs):
        if not in_backward():
            self._entered.clear()  # by a forward that Ctrl-C has ended
        return self.module(*inputs, **kwargs)

    def _enter(self, unit, module, inputs, kwargs):
        """Forward pre-hook of unit's module and of its submodules: makes unit whole. A recomputed
        forward comes here too, in the backward."""
        if in_backward():
            self._begin_backward()
        elif not self._entered:
            self._begin_forward(module)
        self._entered.append((unit, self._note_weights()))
        self._use(self._units[0])
        self._use(unit)
        if self.param_dtype is not None and module is unit.module:
            return tree_map_only(
                torch.Tensor, lambda t: t.to(self.param_dtype) if t.is_floating_point() else t,
                (inputs, kwargs))

    def _begin_forward(self, module):
        if self._averages:  # the last backward raised: what it has left is of no use
            self._finish()
            self._averages = False
            self._to_launch.clear()
            self.zero_grad()
        # Shards may have changed, also by writes to .data, which leave no trace. But after a
        # backward in no_sync() no step is due: then stages 1 and 2 need not gather again.
        holds_back = any(bucket.held for bucket in self._buckets)
        for unit in self._units:
            if self._frees_parameters or not holds_back or unit.version != unit.current_version():
                self._free(unit)
        self._course = collections.deque(self._units if module is self.module else ())
        while self._course and not self._frees_parameters:
            self._advance()

    def _leave(self, module, inputs, output):
        """Forward hook of the same, also after an exception in the forward."""
        _, hooks = self._entered.pop()
        if hooks is not None:
            hooks.__exit__()
        if self._entered:
            self._use(self._entered[-1][0])
        elif not in_backward():
            self._end_pass(frees=not torch.is_grad_enabled())

    def _note_weights(self):
        """From here to the end of this forward, what autograd saves of a gathered weight is a note,
        by which the backward gathers it again. All else goes the way of the hooks around, such as
        those of activation checkpointing."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        noted = outer is not None and getattr(outer[0], "owner", None) is self
        if noted or not self._frees_parameters or not torch.is_grad_enabled():
            return None

        def pack(t):
            place = t.untyped_storage()._cdata if t.layout is torch.strided else None
            bucket = self._bucket_at.get(place)
            if bucket is not None:
                return bucket, (t.shape, t.stride(), t.storage_offset()), bucket.unit.version
            # Detached, since t may be the output of the node that saves it, which would be a cycle.
            return None, outer[0](t) if outer else t.detach(), t._version

        def unpack(note):
            bucket, saved, version = note
            if bucket is not None:
                self._begin_backward()
                self._use(bucket.unit)
                t, found = bucket.whole.as_strided(*saved), bucket.unit.version
            elif outer:
                return outer[1](saved)
            else:
                t, found = saved, saved._version
            if found != version:
                raise RuntimeError("a tensor that the backward needs was modified in place, such "
                                   "as a parameter by an optimizer's step")
            return t

        pack.owner = self
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        return hooks

    # ---- backward

    def _begin_backward(self):
        if not in_backward() or self._task == torch._C._current_graph_task_id():
            return
        super()._begin_backward()
        for unit in self._units:
            unit.note_changes()
        for bucket in self._buckets:
            for shard, mean in bucket.means.values():
                if bucket.gradient_in_flat and shard.grad is mean:
                    shard.grad = mean.clone()  # the buffer is about to be filled again
        if self._frees_parameters:
            self._course = collections.deque([self._units[0], *self._units[:0:-1]])
            # While a unit is in use the next one is gathered, and then its gradients are reduced.
            # Ranks that skip it keep to this order, since native collectives have no tags.
            for unit, following in itertools.pairwise([*self._course, self._course[-1]]):
                for bucket in unit.buckets:
                    bucket.pending.add(following)
            self._use(self._units[0])

    def _reduce(self, bucket):
        """Start to send each rank its shard of bucket -> what waits and adds. One at a time, which
        bounds the memory in flight."""
        self._finish()
        if bucket.gradient is None:
            bucket.gradient = (bucket.own(bucket.flat) if bucket.gradient_in_flat else
                               self._new_shard(bucket))
            bucket.means = {p: (shard, bucket.shard(p, bucket.gradient))
                            for p, shard in bucket.shards.items()}
        earlier = [t.to(self._device) for t in bucket.earlier()]
        wait = reduce_scatter(bucket.flat, self.shard_group, self._tag + 1)

        def finish():
            if self._replicas is None:
                wait(bucket.gradient, earlier)
            else:
                wait()
                own = bucket.own(bucket.flat)
                all_reduce(own, self._replicas)()
                add_in_rank_order([*earlier, own], bucket.gradient)
            bucket.held.clear()
            if not bucket.gradient_in_flat:
                bucket.flat = None

        return finish

    def _end_backward(self):
        self._end_pass(frees=False)
        super()._end_backward()
        self._end_pass(frees=not self._entered)

    def zero_grad(self, set_to_none=True):
        """Also drops what no_sync() has held back, which an optimizer's zero_grad() cannot see."""
        super().zero_grad(set_to_none)
        for bucket in self._buckets:
            bucket.held.clear()

    # ---- parameters and state

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """(original name, this rank's shard) of every parameter of the module, in its order."""
        for name, p in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._bucket_of[p].shards[p]

    def shard_starts(self):
        """{original name: where this rank's shard begins in the parameter, in elements in order of
        memory}: beside `named_parameters()` all that it takes to load at another world size."""
        return {name: self._bucket_of[p].part(p)[0] for name, p in self.module.named_parameters()}

    @torch.no_grad()
    def full_parameters(self):
        """Yield (original name, whole parameter in the shards' dtype), a tied one once, holding a
        bucket or two. A collective: every rank has to go through all of it."""
        gathered = None
        for name, p in self.module.named_parameters():
            bucket = self._bucket_of[p]
            if bucket is not gathered:
                gathered = bucket
                flat = torch.empty(bucket.n, dtype=bucket.dtype, device=self._device)
                bucket.own(flat).copy_(bucket.master)
                all_gather(flat, self.shard_group, self._tag)()
            yield name, bucket.view(p, flat).clone()

    @torch.no_grad()
    def full_state_dict(self):
        """{name: whole tensor}, on every rank, as the module's state_dict(). A collective.

        Costs the memory of the whole model on every rank; `full_parameters` does not.
        """
        names = {p: name for name, p in self.module.named_parameters()}
        whole = dict(self.full_parameters())
        return {name: whole[names[t]] if t in names else t.clone()
                for name, t in self.module.state_dict(keep_vars=True).items()}

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """This rank's shards and the buffers under the module's own names. Not a collective."""
        destination = {} if destination is None else destination
        for name, t in self.module.state_dict(keep_vars=True).items():
            t = self._bucket_of[t].shards[t] if t in self._bucket_of else t
            # Copied, since torch.save would write all of the buffer that a view is of.
            destination[prefix + name] = t if keep_vars else t.detach().clone()
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Copy in what `state_dict()` gave at this world size. Raises RuntimeError on a misfit."""
        ours = self.state_dict(keep_vars=True)
        self._check_fit(ours, state_dict)
        for name, t in ours.items():
            t.copy_(state_dict[name])

    @torch.no_grad()
    def load_full_state_dict(self, state_dict):
        """Write whole parameters and buffers: each rank copies its part. Raises RuntimeError naming
        what is missing, left over or of another shape, before anything is written."""
        ours = self.module.state_dict(keep_vars=True)
        self._check_fit(ours, state_dict)
        for name, t in ours.items():
            value = state_dict[name]
            if t in self._bucket_of:
                bucket = self._bucket_of[t]
                shape, strides, _ = bucket.places[t]
                packed = torch.empty_strided(shape, strides, dtype=bucket.dtype).copy_(value)
                value = packed.as_strided((packed.numel(),), (1,))[slice(*bucket.part(t))]
                t = bucket.shards[t].view(-1)
            t.copy_(value)

    def _check_fit(self, ours, state_dict):
        shapes, others = ({(name, tuple(t.shape)) for name, t in tensors.items()}
                          for tensors in (ours, state_dict))
        if shapes != others:
            raise RuntimeError(f"{self._get_name()}: nothing was loaded; missing, left over or of "
                               f"another shape: {sorted(shapes ^ others)}")

    def _apply(self, *_, **__):
        raise RuntimeError(f"{self._get_name()}: cast or move the module before wrapping it")


class Zero2(Zero1):
    """P_os+g: each rank keeps also only its 1/W of the gradients. Every backward outside no_sync()
    reduces them and adds to the shards': W x accumulation micro batches give the bits of one
    process that accumulates as many, for W a power of two."""

    _frees_gradients = True


class Zero3(Zero2):
    """P_os+g+p: beside the root two units are whole at a time, the one in use and the next one.
    Gathering a third one frees the older; the end of a backward or an evaluation frees all."""

    _frees_parameters = True

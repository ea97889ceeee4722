"""ZeRO: data parallelism in which each of W ranks keeps 1/W of what is needed only now and then.

    model = Zero3(module)                    # or Zero1, Zero2; then as with DDP
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)  # shards; see below
    loss = model(x, y)
    loss.backward()                          # on return each shard's `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's ZeroRedundancyOptimizer (1,700 lines) and FSDP2 (5,700). How it works (Rajbhandari
et al., arXiv 1910.02054, section 5): the parameters of a unit, such as a block of the model, lie in
flat buffers that are cut into W shards, and rank r owns the r-th of each. A unit is gathered before
it is used, and its gradients are reduced to the owners of its shards. The stages differ in what a
rank keeps whole; for Psi parameters, per rank:

    stage  shards    keeps whole               bytes, fp32, Adam  sent, in (W-1)/W Psi elements
    Zero1  P_os      parameters and gradients  8 Psi + 8 Psi/W    2 per step
    Zero2  P_os+g    parameters                4 Psi + 12 Psi/W   2 per micro-step
    Zero3  P_os+g+p  nothing                   16 Psi/W           3 per micro-step

The module keeps its parameters: forward and backward compute with them. The optimizer gets other
parameters, the shards. (A fused optimizer rounds the last elements of a tensor differently, so that
its shards do not get the bits of the whole.)

How it differs: the gather of a unit overlaps with the forward of the one before. In stage 3 the
backward gathers a unit when autograd asks for one of its weights, so a model may call its units
again, out of order or in a checkpoint. Contributions to a gradient are added in rank order, in
stages 2 and 3 micro-step by micro-step. Outside of no_sync() that gives the bits of one process
that accumulates the same micro batches, if W is a power of two, or if 1/W is left out: train.py
calls `set_gradient_divide_factor(1)` and divides after the sum.

Cost beside the table: during the backward three buckets of 25 MB, one that fills, one that is sent
and what arrives for it (Zero1: the last); in Zero3 the root and two units; under no_sync() whole
gradients.

In this order: three small functions; what shards are; the stages as the paper has them: Zero1,
which can be read by itself, what Zero2 does otherwise, and what Zero3 adds; the meta device.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from ddp import (Bucket, HierarchicalState, Reducer, add_in_rank_order, all_gather, all_reduce,
                 attach, broadcast, fill_buckets, in_backward, reduce_scatter)

BUCKET_BYTES = 25 * 2**20  # torch DDP's number
ALIGN_BYTES = 64  # of a parameter in its buffer: a cache line, and what BLAS kernels like best


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


# -------------------------------------------------------------------------------------------------
# what shards are


class ShardedBucket(Bucket):
    """A bucket whose parameters lie in flat buffers too, cut into W equal chunks of S elements, of
    which rank r owns the r-th:

        whole      (W S,) in param_dtype: what forward and backward use, or None
        master     (S,) in the parameters' own dtype; the optimizer's shards are views of it
        gradients  (W S,) in reduce_dtype: this rank's gradients, or None
        mean       (S,) as master: the mean over ranks; the shards' `.grad` are views of it
        filled     parameters whose gradient is in gradients, and is not yet reduced

    Where whole is kept, master can be its own chunk; likewise mean of gradients.
    """

    def __init__(self, unit, parameters, W, device, param_dtype, reduce_dtype, rank):
        self.unit, self.rank, self.device, self.dtype = unit, rank, device, parameters[0].dtype
        given = (param_dtype, reduce_dtype) if self.dtype.is_floating_point else (None, None)
        self.param_dtype, self.reduce_dtype = (dtype or self.dtype for dtype in given)
        align = ALIGN_BYTES // min(self.dtype.itemsize, self.param_dtype.itemsize)
        super().__init__(parameters, align)
        self.size = max(1, -(-self.n // W))  # S
        self.n = W * self.size
        self.whole = self.master = self.mean = None
        # shards: {parameter: the optimizer's}; seen and homes are those of GuardedBucket.
        self.shards, self.filled, self.seen, self.homes = {}, set(), {}, {}

    def own_chunk(self, buffer):
        """This rank's chunk, (S,), of a (W S,) buffer."""
        return buffer[self.rank * self.size:(self.rank + 1) * self.size]

    def lies_in(self, chunk, buffer):
        """Whether chunk, (S,), is this rank's chunk of buffer, and not a copy."""
        return buffer is not None and chunk.data_ptr() == self.own_chunk(buffer).data_ptr()

    def part(self, p):
        """[first, end] of this rank's part of p, counted within p; equal where it has none."""
        shape, _, start = self.places[p]
        first = self.rank * self.size - start
        return [min(max(i, 0), shape.numel()) for i in (first, first + self.size)]

    def shard_view(self, p, buffer):
        """This rank's part of p in a (S,) buffer: (n, 1, ..., 1), with as many dimensions as p."""
        (shape, _, start), (first, end) = self.places[p], self.part(p)
        offset = start + first - self.rank * self.size
        return buffer[offset:offset + end - first].view(end - first, *[1] * (len(shape) - 1))

    def make_shards(self):
        """Make the optimizer's parameters, views of master."""
        for p in self.places:
            # .data, for a _version of its own: a gather may write to master, which is no update.
            shard = torch.nn.Parameter(self.shard_view(p, self.master).data, p.requires_grad)
            vars(shard).update(vars(p))  # such as p.no_decay, by which a script makes groups
            self.shards[p], self.homes[p] = shard, shard.data_ptr()

    def part_of(self, p, value):
        """This rank's part of value, which has the shape of p: (n, 1, ..., 1), as its shard."""
        whole = torch.empty(self.n, dtype=value.dtype, device=self.master.device)
        self.view(p, whole).copy_(value)
        return self.shard_view(p, self.own_chunk(whole))

    def put(self, p, scale):
        """Move p.grad into gradients, added to what they hold of p; then all of it times scale.
        Returns whether there is a gradient."""
        if self.gradients is None:
            self.gradients = torch.empty(self.n, dtype=self.reduce_dtype, device=self.device)
        view = self.view(p, self.gradients)
        # The mark is gone if zero_grad() was called since no_sync() has filled it.
        if p in self.filled and type(self.shards[p].grad) is Held:
            view.add_(0 if p.grad is None else p.grad).mul_(scale)
        elif p.grad is None:
            view.zero_()  # not used here, maybe elsewhere
            self.filled.discard(p)
        else:
            torch.mul(p.grad.to(view.dtype), scale, out=view)  # a product in 16 bits would round
        if p.grad is not None:
            self.filled.add(p)
            p.grad = None
        return p in self.filled

    def mean_of(self, p):
        return self.shard_view(p, self.mean).data

    def mean_so_far(self):
        """[what the shards' `.grad` hold from micro-steps before, (S,)], or [] if nothing. From now
        on they are None, unless a loss over shards brings them another."""
        found = {p: shard.grad for p, shard in self.shards.items() if shard.grad is not None}
        for p, gradient in found.items():
            self.shards[p].grad = None
            gradient.__class__ = torch.Tensor
        if not found:
            return []
        if all(found.get(p) is mean for p, (_, mean) in self.targets.items()):
            return [self.mean]
        together = torch.zeros_like(self.master)
        for p, gradient in found.items():
            self.shard_view(p, together).copy_(gradient)
        return [together]


class Unit:
    """A part of the model whose parameters are gathered together: a block, or, the root, the rest.

        submodules, parameters   what belongs to it and to no other unit
        buckets                  of these parameters
        is_current               whether the whole parameters have the values of the shards, or
                                 will have them when the gather under way ends
        waits                    functions that wait for that gather
        version                  `current_version()` when it was last looked at
    """

    def __init__(self, name, module):
        self.name, self.module = name, module
        self.submodules, self.parameters, self.buckets, self.waits = [], [], [], []
        self.is_current, self.version = False, None

    def current_version(self):
        """A number that grows when the optimizer changes the shards."""
        return sum(shard._version for bucket in self.buckets for shard in bucket.shards.values())

    def refuse_old_graphs(self):
        """If the shards have changed, count it as a change of the module's parameters, so that a
        backward through the old weights raises."""
        if self.version != self.current_version():
            self.version = self.current_version()
            for bucket in self.buckets:
                bucket.show(False)  # before the next line, which would look like a write
            torch.autograd.graph.increment_version(self.parameters)


# -------------------------------------------------------------------------------------------------
# right, or refused
#
# What a script does around a stage should be right, or raise. Who studies the stages may skip this
# section. Its rules:
#
#   - Outside of a forward and of the backward after it a parameter of the module is Absent: it
#     stands for its shard, and nobody reads an old value.
#   - What turns up where it does not belong is taken to where it does: a value that replaces
#     `.data` of a shard, or that a forward writes to a parameter; a gradient that autograd adds to
#     a shard; a freeze of the one or the other.
#   - Of a shard's `.grad`, which is a Part, nobody takes a norm or a mean, or writes to a row.


# Attributes of a parameter that are its value or a view of it, and methods that do not read it.
VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
QUESTIONS = {"size", "dim", "numel", "stride", "is_floating_point", "data_ptr", "untyped_storage",
             "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
# What a part of a gradient cannot be asked for; what it can be while no_sync() holds it back;
# names of optimizers that look at whole parameters.
WHOLE_ONLY = {"norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm", "sum", "nansum", "mean",
              "std", "var", "dot", "matmul", "einsum", "normalize", "topk", "sort", "__setitem__"}
HELD = {"zero_", "_foreach_zero_", "detach_", "requires_grad_", "data_ptr", "__get__", "__set__"}
NOT_ELEMENTWISE = "adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"


class Absent(torch.nn.Parameter):
    """What a parameter of the module is while its value is not there, or may be old. It can be
    asked for its attributes, and `.grad` is that of its shard. What can be written part by part, a
    whole value, goes to the shard. Anything else raises RuntimeError. torch's
    UninitializedParameter works like this."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        is_attribute = type(function).__name__ == "method-wrapper"
        p = next((t for t in args if isinstance(t, cls)), None)
        name = function.__self__.__name__ if is_attribute else function.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if is_attribute and name == "grad" and not in_backward():
                return function(p.bucket.shards[p], *args[1:])
            if name == "requires_grad_" or (name, len(args)) == ("requires_grad", 2):
                function(p.bucket.shards[p], *args[1:], **kwargs or {})
            if name in QUESTIONS or is_attribute and name not in VALUES:
                return function(*args, **kwargs or {})
            if name in ("copy_", "data") and len(args) == 2 and type(args[1]) is not cls:
                return p.bucket.shards[p].detach().copy_(p.bucket.part_of(p, args[1]))
        raise RuntimeError(f"{name} of {getattr(p, 'full_name', 'one')}: a parameter has a value "
                           f"in forward and backward; else use parameters() or full_parameters()")


class Part(torch.Tensor):
    """`.grad` of a shard from a backward to the step, and what is computed from it. It is pickled
    as a Tensor, so that files do not need this class."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name, is_held = function.__name__, Held in types
        if name in WHOLE_ONLY or is_held and name not in HELD:
            fact = "held back by no_sync()" if is_held else "one rank's part: use clip_grad_norm_()"
            raise RuntimeError(f"{name} of the gradient of a shard, which is {fact}")
        if name in ("zero_", "_foreach_zero_"):
            tree_map_only(Held, lambda t: setattr(t, "__class__", torch.Tensor), args)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and not any(result is t for t in args):
            result.__class__ = Part
        return result

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class Held(Part):
    """`.grad` of a shard while no_sync() holds a gradient of it back. It can only be dropped."""


class GuardedBucket(ShardedBucket):
    """A bucket that takes care of what scripts do to its parameters and shards.

        seen   {parameter that may be read: its address, version, requires_grad}, or empty
        homes  {parameter: the address of its shard}
    """

    @torch.inference_mode(False)  # what is made inside it could not be used outside
    def show(self, is_there):
        """Point the parameters at whole or, where there is none, at a nan that is expanded to their
        shape and takes no memory; let them be read if is_there. Before that take to the shards what
        a forward has written to parameters, and a script has put in the place of shards."""
        nothing = torch.full((), float("nan"), device=self.device).to(self.param_dtype)
        for p, (shape, *_) in self.places.items():
            p.__class__ = p.kind
            shard, value, seen = self.shards[p], p.data, self.seen.pop(p, None)
            if is_there or seen is not None:  # else nobody could change it
                p.data = nothing.expand(shape) if self.whole is None else self.view(p, self.whole)
            if shard.data_ptr() != self.homes[p]:
                replaced, shard.data = shard.data, self.shard_view(p, self.master)
                shard.detach().copy_(replaced)
            if seen is not None and seen[:2] != (value.data_ptr(), p._version):
                shard.data.copy_(self.part_of(p, value))  # the graphs of this forward stay valid
            if seen is None or seen[2] != shard.requires_grad:
                p.requires_grad = shard.requires_grad
            shard.requires_grad = p.requires_grad
            if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                raise RuntimeError(f"{p.full_name}: a shard's hooks do not run: hook the module's")
            if is_there:
                self.seen[p] = p.data_ptr(), p._version, p.requires_grad
            p.__class__ = p.kind if is_there else Absent

    def mark_gradients(self):
        """Where a backward ends: `.grad` of a shard is a Part, and not None while the bucket holds
        its gradient back, so that zero_grad() of an optimizer can be seen."""
        for p, shard in self.shards.items():
            if shard.grad is None and p in self.filled:
                shard.grad = torch.zeros_like(shard)
            if shard.grad is not None:
                shard.grad.__class__ = Held if p in self.filled else Part


# -------------------------------------------------------------------------------------------------
# stage 1
#
# A stage is what it keeps, the first two lines, and what it does at seven steps. A dot says: as the
# stage before.
#
#                     Zero1                             Zero2             Zero3
#   _keep_parameters  all, the own chunk as their part  .                 only the own chunk
#   _keep_gradients   all, the mean as their part       only the mean     .
#
#   _begin_forward    start to gather all units         .                 free all; plan the course
#   _use              wait for the root and the unit    .                 gather along the course,
#                                                                         take notes of weights
#   _leave            the last one ends the forward     .                 the unit around goes on
#   _end_forward      wait for units that were skipped  .                 end the course
#   _begin_backward   clone means that are in the way   .                 plan the course back
#   _is_ready         a bucket has all its gradients    .                 ... and the next unit is
#                                                                         on its way
#   _end_backward     give the shards their means       .                 end the course; free all


class Zero1(Reducer):
    """P_os: each rank keeps optimizer state for 1/W of the parameters, and updates only these.

    A backward reduces each bucket to the owners of its shards, the optimizer updates the shards,
    and the next forward gathers what they have become, each unit waiting for its own part.

    process_group: the ranks that train together; None for all.
    units: modules whose parameters are gathered together; None: the elements of the outermost
    ModuleLists. What is in none of them, or in two, belongs to the root.
    param_dtype: of parameters in forward and backward, and of the inputs of units, which are cast.
    The shards, and so the optimizer's state, keep the module's dtype.
    reduce_dtype: of gradients on their way; None: that of the shards. Sums of 16-bit ones are fp32.
    shard_size: hybrid sharding, as torch's HSDP: W in the table is shard_size, each group of so
    many ranks has all shards, and gradients are reduced inside a group, then over groups. The bits
    are those of DDP with `hierarchical_hook`.
    offload: shards, and so the optimizer's state and its step, are on the CPU. Each copy is waited
    for, since a script may write to a shard, or read its gradient, right after.
    init_fn: called as init_fn(submodule) to fill what is on the meta device; without it the
    module's `init_weights()`, which must skip what is still on meta, or `reset_parameters()` of the
    submodules. Rank 0's values count.
    device: where a module goes that is on meta altogether; None: the accelerator, or the CPU where
    there is none or the backend is gloo. In other modules what is on meta goes where the rest is.

    A forward is a collective, also one that only evaluates. A rank may skip units: it gathers them
    with the others. All ranks make as many backwards in no_sync(). Keep the wrapper: hooks go with
    it, and without them nothing is gathered.

    Not noticed, and wrong: what a script computes of a shard that is no sum over its elements, such
    as a norm; `max` or `numpy` of a shard's gradient; a view of a gradient that is kept over the
    next backward; writes into `.data` of shards between micro-steps in no_sync(), in stages 1 and
    2; a freeze, or zero_grad() of the module, between forward and backward; views of parameters
    that were made before wrapping; on meta, what `init_weights()` leaves out.

    Raises RuntimeError where ranks wrap different modules, ValueError for a unit that is no
    submodule and a shard_size that does not divide the number of ranks.
    """

    def __init__(self, module, process_group=None, units=None, param_dtype=None, reduce_dtype=None,
                 shard_size=None, offload=False, init_fn=None, device=None):
        super().__init__(module, process_group, True, f"{param_dtype} {reduce_dtype} {shard_size}")
        self.param_dtype, self.shard_size = param_dtype, shard_size or self.world_size
        self.shard_group, self._replicas = self.process_group, None
        if self.shard_size != self.world_size:
            groups = HierarchicalState(self.shard_size, process_group)
            self.shard_group, self._replicas = groups.inside, groups.across
        values = [p.detach() for p in module.parameters() if not p.is_meta]
        if len({value.data_ptr() or id(value) for value in values}) < len(values):
            self._refuse("two parameters share memory: tie them by assigning one to both modules")
        places = {t.device: n for n, t in self._named("parameters", "buffers") if not t.is_meta}
        if len(places) > 1:
            self._refuse(f"not all is on one device: {places}")
        accelerator = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        device = device or ("cpu" if dist.get_backend(process_group) == "gloo" else accelerator)
        self._device = next(iter(places), torch.empty(0, device=device).device)  # with its index
        self._offloads = offload and self._device.type != "cpu"
        self._entered = []  # the units of the forwards under way, the innermost last
        self._build_units(find_units(module) if units is None else units)
        self._build_buckets(reduce_dtype, init_fn)
        self._sharded = [bucket for unit in self._units for bucket in unit.buckets]
        self._shards = {p: shard for bucket in self._sharded for p, shard in bucket.shards.items()}
        names = {p: name for name, p in module.named_parameters()}
        for bucket in self._sharded:
            for p in bucket.places:
                p.full_name, p.bucket, p.kind = names[p], bucket, type(p)
            bucket.show(True)
        # In the order in which a backward, which starts at the end, reaches their first parameters.
        trained = [p.bucket for p in module.parameters() if p.requires_grad]
        self._track(list(dict.fromkeys(trained))[::-1])
        self._add_hooks()
        self._hide_all()

    # ---- construction

    def _build_units(self, modules):
        """Divide submodules and parameters among the root and a unit for each of modules."""
        names, modules = {m: name for name, m in self.module.named_modules()}, set(modules)
        if not modules <= names.keys() - {self.module}:
            raise ValueError(f"{self._get_name()}: a unit is not a submodule of the module")
        self._root = Unit("the root", self.module)
        self._units = [self._root, *(Unit(names[m], m) for m in names if m in modules)]
        unit_of = {}  # {submodule or parameter: its unit, or the root, where there are two}
        for unit in self._units[1:]:
            for part in (*unit.module.modules(), *unit.module.parameters()):
                unit_of[part] = self._root if part in unit_of else unit
        for m in names:
            if unit_of.setdefault(m, self._root) is self._root:
                unit_of |= dict.fromkeys(m.parameters(recurse=False), self._root)
        for part, unit in unit_of.items():
            (unit.submodules if part in names else unit.parameters).append(part)

    @torch.no_grad()
    def _build_buckets(self, reduce_dtype, init_fn):
        """Divide the parameters of each unit among buckets, the last ones first. Fill what is on
        the meta device, agree with rank 0, keep what the stage keeps, and free the rest. Unit by
        unit, so that a rank has one unit more than it keeps. Until the end, what is on the meta
        device has stand-ins."""
        rank, stand_ins = dist.get_rank(self.shard_group), {}
        for unit in self._units:
            stand_ins |= fill_meta(self.module, unit, self._device, init_fn)
            for parameters in fill_buckets(unit.parameters[::-1], BUCKET_BYTES, BUCKET_BYTES):
                bucket = GuardedBucket(unit, parameters, self.shard_size, self._device,
                                       self.param_dtype, reduce_dtype, rank)
                unit.buckets.append(bucket)
                values = torch.zeros(bucket.n, dtype=bucket.dtype, device=self._device)
                for p in bucket.places:
                    real = stand_ins.get(p, p)
                    bucket.view(p, values).copy_(real)
                    real.data, real.grad = values.new_empty(0, dtype=bucket.param_dtype), None
                dist.broadcast(values.view(torch.uint8), group_src=0, group=self.process_group)
                self._keep_parameters(bucket, values)
                bucket.make_shards()
        swap(stand_ins)
        broadcast(list(self.module.buffers()), self.process_group)

    def _keep_parameters(self, bucket, values):
        """Keep values, (W S,), the whole parameters of bucket. The own chunk is a part of them; in
        another dtype or on another device it has memory of its own."""
        own = bucket.own_chunk(values)
        bucket.whole = values.to(bucket.param_dtype)
        is_apart = self._offloads or bucket.whole is not values
        bucket.master = self._new_chunk(bucket).copy_(own) if is_apart else own

    def _new_chunk(self, bucket):
        """(S,), on the device of the optimizer."""
        return torch.empty(bucket.size, dtype=bucket.dtype, pin_memory=self._offloads,
                           device="cpu" if self._offloads else self._device)

    def _add_hooks(self):
        """On the modules themselves, so that `model.module(x)` works, and on all that have
        parameters: a unit may be a mere container, and a script may call a part of the model."""
        attach(register_optimizer_step_pre_hook, self._check_optimizer)
        for unit in self._units:
            for m in unit.submodules:
                if m is unit.module or m._parameters:
                    # A compiled unit has its hooks around the graph, and needs none inside.
                    outside = torch.compiler.disable if m is unit.module else unless_compiling
                    attach(m.register_forward_pre_hook, self._enter, unit, outside=outside,
                           prepend=True, with_kwargs=True)
                    attach(m.register_forward_hook, self._leave, outside=outside, always_call=True)

    def _check_optimizer(self, optimizer, *_):
        """Hook of all optimizers: raise if the step would do something else than it seems to. It
        changes shards, so nobody is to read the parameters any more."""
        given = {p for group in optimizer.param_groups for p in group["params"]}
        if given.isdisjoint(self._shards.values()):
            return
        for wrong, fact in (
                (any(part in type(optimizer).__name__.lower() for part in NOT_ELEMENTWISE),
                 "looks at whole parameters, and would see parts: use DDP"),
                (any(bucket.filled for bucket in self._buckets),
                 "steps while no_sync() holds gradients back, or after a backward that raised"),
                (self._task is None and all(p.grad is None for p in given),
                 "steps after no backward, or one with inputs=, which is not supported")):
            if wrong:
                self._refuse(f"{type(optimizer).__name__} {fact}")
        self._hide_all()
        # Those of torch work element by element, and a Part would cost them time.
        for p in given if type(optimizer).__module__.startswith("torch.optim.") else ():
            if type(p.grad) is Part:
                p.grad.__class__ = torch.Tensor

    def _hide_all(self):
        """Let nobody read parameters."""
        for bucket in self._sharded:
            bucket.show(False)

    # ---- forward: gather what the optimizer has changed

    def forward(self, *inputs, **kwargs):
        if not in_backward():
            self._entered.clear()  # left by a forward that Ctrl-C has ended
        return self.module(*inputs, **kwargs)

    def _enter(self, unit, module, inputs, kwargs):
        """Forward pre-hook of unit's module and of its submodules that have parameters. A forward
        that recomputes a checkpoint comes here too, and is a sign of a backward."""
        self._entered.append(unit)
        if in_backward():
            self._notice_backward()
        elif len(self._entered) == 1:
            self._hide_all()
            self._prepare_forward()
            self._task = None if torch.is_grad_enabled() else self._task
            self._begin_forward(module)
        self._use(unit)
        if self.param_dtype is not None and module is unit.module:
            return tree_map_only(
                torch.Tensor, lambda t: t.to(self.param_dtype) if t.is_floating_point() else t,
                (inputs, kwargs))

    def _leave(self, module, inputs, output):
        """Forward hook of the same, also after an exception in the forward."""
        self._entered.pop()
        if not self._entered and not in_backward():
            self._end_forward()

    def _begin_forward(self, module):
        """Start to gather all units, or, if a script calls a part of the model, none yet.

        In general nothing is current any more, as a write to a shard's .data leaves no trace. But
        between micro-steps in no_sync() no step is due: there a change of version is what counts.
        """
        accumulates = any(bucket.filled for bucket in self._buckets)
        for unit in self._units:
            if not accumulates or unit.version != unit.current_version():
                unit.is_current = False
            if module is self.module:
                self._gather(unit)

    def _gather(self, unit):
        """Start to gather unit, unless it is current."""
        if unit.is_current:
            return
        unit.is_current = True
        unit.refuse_old_graphs()
        tag = self._tag + 2 + self._units.index(unit)  # or ranks could swap units out of order
        with torch.profiler.record_function(f"start: gather {unit.name}"):
            for bucket in unit.buckets:
                if not bucket.lies_in(bucket.master, bucket.whole):
                    # This is the cast, before the gather: half the bytes in bf16.
                    bucket.own_chunk(bucket.whole).copy_(bucket.master)
                unit.waits.append(all_gather(bucket.whole, self.shard_group, tag))

    def _finish_gather(self, unit):
        """Wait for the gather of unit, if one is under way. Then its parameters may be read."""
        waits, unit.waits = unit.waits, []
        if waits:
            self._wait_for(f"gather {unit.name}", lambda: [wait() for wait in waits])
        for bucket in unit.buckets:
            if unit.is_current and not bucket.seen:
                bucket.show(True)

    def _make_whole(self, unit):
        """Gather unit, unless it is current, and wait."""
        self._gather(unit)
        self._finish_gather(unit)

    def _use(self, unit):
        """Make the root and unit whole."""
        self._make_whole(self._root)
        self._make_whole(unit)

    def _end_forward(self):
        """Wait also for units that were skipped."""
        for unit in self._units:
            self._finish_gather(unit)  # a shard must not change while it is being sent
        if not torch.is_grad_enabled():
            self._hide_all()

    # ---- backward: reduce gradients to the owners of the shards

    def _begin_backward(self):
        """Means of the last backward may lie in the buffers that this one fills: clone them."""
        super()._begin_backward()
        for unit in self._units:
            unit.refuse_old_graphs()
        for bucket in self._buckets:
            for shard, mean in bucket.targets.values():
                if shard.grad is mean and bucket.lies_in(bucket.mean, bucket.gradients):
                    shard.grad = mean.data.clone()

    def _end_backward(self):
        """Give the shards their means. Outside of a forward nobody reads parameters now."""
        super()._end_backward()
        for bucket in self._buckets:
            bucket.mark_gradients()
        if not self._entered:
            self._hide_all()

    def _reduce(self, bucket):
        """Start to send each rank its chunk of bucket -> a function that waits and adds."""
        self._finish()  # one bucket at a time, which bounds the memory in flight
        if bucket.mean is None:
            self._keep_gradients(bucket)
            bucket.targets = {p: (bucket.shards[p], bucket.mean_of(p)) for p in bucket.places}
        self._used.update(p for p, shard in bucket.shards.items() if shard.grad is not None)
        before = [t.to(self._device) for t in bucket.mean_so_far()]
        wait = reduce_scatter(bucket.gradients, self.shard_group, self._tag + 1)

        def finish():
            if self._replicas is None:
                wait(bucket.mean, before)
            else:  # the sum over all ranks first: ((before + c0) + c1) would have other bits
                wait()
                own = bucket.own_chunk(bucket.gradients)
                all_reduce(own, self._replicas)()()
                add_in_rank_order([*before, own], bucket.mean)
            bucket.filled.clear()
            if not bucket.lies_in(bucket.mean, bucket.gradients):
                bucket.gradients = None  # until `put` gets the next one

        return finish

    def _keep_gradients(self, bucket):
        """Keep the whole gradients of bucket: the mean of the own chunk is a part of them. In
        another dtype or on another device it has memory of its own, and `_reduce` frees them."""
        is_apart = self._offloads or bucket.reduce_dtype != bucket.dtype
        bucket.mean = self._new_chunk(bucket) if is_apart else bucket.own_chunk(bucket.gradients)

    # ---- parameters and state, the same in every stage

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """(original name, this rank's shard) of every parameter of the module, in its order."""
        named = self.module.named_parameters(prefix, recurse, remove_duplicate)
        # One that was added after wrapping is left out here, and refused by the next forward.
        yield from ((name, self._shards[p]) for name, p in named if p in self._shards)

    def shard_starts(self):
        """{original name: where this rank's shard begins in the parameter, in elements in order of
        memory}: beside `named_parameters()` all that it takes to load at another world size."""
        return {name: p.bucket.part(p)[0] for name, p in self.module.named_parameters()}

    @torch.no_grad()
    def full_parameters(self):
        """Yield (original name, whole parameter in the shards' dtype), a tied one once, holding a
        unit. A collective: every rank has to go through all of it."""
        self._hide_all()
        wholes = {}  # of buckets of one unit
        for name, p in self.module.named_parameters():
            if p.bucket not in wholes:
                wholes = {b: t for b, t in wholes.items() if b.unit is p.bucket.unit}
                whole = torch.empty(p.bucket.n, dtype=p.bucket.dtype, device=self._device)
                p.bucket.own_chunk(whole).copy_(p.bucket.master)
                all_gather(whole, self.shard_group, self._tag)()
                wholes[p.bucket] = whole
            yield name, p.bucket.view(p, wholes[p.bucket]).clone()

    @torch.no_grad()
    def full_state_dict(self):
        """{name: whole tensor}, on every rank, as the module's state_dict(). A collective.

        Costs the memory of the whole model on every rank; `full_parameters` does not.
        """
        whole = dict(self.full_parameters())
        return {name: whole[t.full_name] if t in self._shards else t.clone()
                for name, t in self.module.state_dict(keep_vars=True).items()}

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """This rank's shards and the buffers under the module's own names. Not a collective."""
        destination = {} if destination is None else destination
        for name, t in self.module.state_dict(keep_vars=True).items():
            t = self._shards.get(t, t)
            # Copied, since torch.save would write all of the buffer that a view is of.
            destination[prefix + name] = t if keep_vars else t.detach().clone()
        return destination

    def load_state_dict(self, state_dict):
        """Copy in what `state_dict()` gave at this world size. Raises RuntimeError on a misfit."""
        self._load(state_dict, self.state_dict(keep_vars=True))

    def load_full_state_dict(self, state_dict):
        """Write whole parameters and buffers: each rank copies its part. Raises RuntimeError naming
        what is missing, left over or of another shape, before anything is written."""
        self._hide_all()
        self._load(state_dict, self.module.state_dict(keep_vars=True))

    @torch.no_grad()
    def _load(self, state_dict, ours):
        shapes, others = ({(name, tuple(t.shape)) for name, t in tensors.items()}
                          for tensors in (ours, state_dict))
        if shapes != others:
            raise RuntimeError(f"{self._get_name()}: nothing was loaded; missing, left over or of "
                               f"another shape: {sorted(shapes ^ others)}")
        for name, t in ours.items():
            t.copy_(state_dict[name])  # an Absent copies the part of its shard

    def _apply(self, *_, **__):
        raise RuntimeError(f"{self._get_name()}: cast, move or copy the module before wrapping it")

    __getstate__ = _apply  # of deepcopy and pickle


# -------------------------------------------------------------------------------------------------
# stage 2


class Zero2(Zero1):
    """P_os+g: each rank keeps also only its 1/W of the gradients. Every backward outside no_sync()
    reduces them, and adds their mean to the shards' `.grad`, micro batch after micro batch, as one
    process accumulates them."""

    def _keep_gradients(self, bucket):
        """Keep only the mean of the own chunk, in memory of its own: then `_reduce` frees the whole
        gradients, and `ShardedBucket.put` gets memory when the next one arrives."""
        bucket.mean = self._new_chunk(bucket)


# -------------------------------------------------------------------------------------------------
# stage 3


class Zero3(Zero2):
    """P_os+g+p: each rank keeps also only its 1/W of the parameters.

    Units become whole in the order of a course, which all ranks have in common: a forward's leads
    through the units, a backward's back. Beside the root, which stays, two units are whole at a
    time, the one in use and the next one. Gathering a third one frees the older; the end of a
    backward or an evaluation frees all. What autograd would save of a whole unit becomes a note, by
    which the backward gathers it again.

    A backward is a collective too, also under no_sync(). All ranks must call the same units if one
    calls a unit twice, out of order, or in a second forward before the backward. A parameter that
    is not gathered is nan; it may be so outside of its unit's forward, also for the root. Under
    autocast autograd saves 16-bit copies of all weights: use param_dtype instead.

        _course         units that this forward or backward has yet to gather
        _last_taken     the unit that was last taken from it
        _older, _newer  the units that are whole beside the root, or None
        _notes          contexts of the forwards under way, in which notes are taken
        _bucket_at      {memory: the bucket whose whole parameters are there}
    """

    def _build_units(self, modules):
        """As stage 1, and what the courses need."""
        super()._build_units(modules)
        self._course, self._notes, self._bucket_at = [], [], {}
        self._last_taken = self._older = self._newer = None
        self._way_back = [self._root, *self._units[:0:-1]]
        self._following = dict(zip(self._way_back, [*self._way_back[1:], self._way_back[-1]]))

    def _keep_parameters(self, bucket, values):
        """Keep only the own chunk."""
        bucket.master = self._new_chunk(bucket).copy_(bucket.own_chunk(values))

    # ---- parameters come and go

    def _make_whole(self, unit):
        """Gather unit and wait. All that comes before it on the course is gathered first, since
        other ranks may wait for it. While a unit is in use, the next one is on its way."""
        while unit in self._course:
            self._advance()
        self._fetch(unit)
        self._finish_gather(unit)
        # Unless that frees unit itself, which is the older one after a call out of order.
        if self._course and unit is self._last_taken and unit is not self._older:
            self._advance()

    def _advance(self):
        """Fetch the next unit of the course, and launch the buckets that only waited for that."""
        unit = self._last_taken = self._course.pop(0)
        self._fetch(unit)
        if unit is self._older:
            # Whole since an earlier use, but other ranks fetch it now: all must free the same next.
            self._older, self._newer = self._newer, unit
        self._launch()

    @torch.inference_mode(False)  # what is made inside it could not be used outside
    def _fetch(self, unit):
        """Give unit memory and start to gather it, unless it is current. The older unit goes."""
        if unit.is_current:
            return
        if unit is not self._root:
            self._free(self._older)
            self._older, self._newer = self._newer, unit
        wholes = [torch.empty(bucket.n, dtype=bucket.param_dtype, device=self._device)
                  for bucket in unit.buckets]  # all or, where memory is out, none
        for bucket, whole in zip(unit.buckets, wholes):
            bucket.whole = whole
            self._bucket_at[whole.untyped_storage()._cdata] = bucket
        self._gather(unit)

    def _free(self, unit):
        """Free the memory of unit, if it is one and is current."""
        if unit is None or not unit.is_current:
            return
        self._finish_gather(unit)  # on a rank that skips unit nothing else waits for it
        unit.is_current = False
        for bucket in unit.buckets:
            del self._bucket_at[bucket.whole.untyped_storage()._cdata]
            bucket.whole = None
            bucket.show(False)
        # A backward through a graph that no note was taken of, such as a penalty's, has to raise.
        torch.autograd.graph.increment_version(unit.parameters)

    def _free_all(self):
        for unit in self._units:
            self._free(unit)
        self._older = self._newer = None

    # ---- forward and backward: along a course

    def _begin_forward(self, module):
        """Free all, since shards may have changed. The course is the order of the units; it is
        empty if a script calls a part of the model."""
        self._free_all()
        self._course = list(self._units if module is self.module else ())

    def _use(self, unit):
        """Make the root and unit whole. From here to `_leave`, what autograd saves of whole units
        is a note."""
        self._notes.append(self._take_notes())
        self._notes[-1].__enter__()
        super()._use(unit)

    def _leave(self, module, inputs, output):
        """As stage 1. The unit around may have been freed meanwhile: gather it again."""
        super()._leave(module, inputs, output)
        while len(self._notes) > len(self._entered):
            self._notes.pop().__exit__(None, None, None)
        if self._entered:
            self._make_whole(self._entered[-1])

    def _end_forward(self):
        """Gather also what only other ranks use. What is whole now stays for the backward."""
        while self._course:
            self._advance()
        super()._end_forward()
        if not torch.is_grad_enabled():
            self._free_all()

    def _begin_backward(self):
        """The course leads back through the units. The root is whole from here on."""
        super()._begin_backward()
        self._course = list(self._way_back)
        self._make_whole(self._root)

    def _is_ready(self, bucket):
        """As stage 1, and the gather of the unit that follows has begun. So it has when a rank that
        uses bucket's unit has the gradients. One that skips the unit, and has nothing to wait for,
        waits for it too: native collectives must come in one order on all ranks."""
        return super()._is_ready(bucket) and self._following[bucket.unit] not in self._course

    def _end_backward(self):
        """Gather also what only other ranks use. Then nothing is needed any more, unless this
        backward ran inside a forward."""
        while self._course:
            self._advance()
        super()._end_backward()
        if not self._entered:
            self._free_all()

    # ---- notes: what a backward needs, it gathers

    def _take_notes(self):
        """A context in which autograd saves a note for a tensor of a whole unit. All else goes to
        the hooks around, such as those of activation checkpointing."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        takes_notes = outer is not None and getattr(outer[0], "func", None) == self._pack
        if takes_notes or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, outer),
                                                        functools.partial(self._unpack, outer))

    @torch.compiler.disable  # or it would be compiled for each tensor
    def _pack(self, outer, t):
        """A tensor that autograd saves -> a note: its bucket, its place there, the version of the
        unit; or, if it is of no whole unit, None, the tensor, its version."""
        place = t.untyped_storage()._cdata if t.layout is torch.strided else None
        bucket = self._bucket_at.get(place)
        # Shape and strides do not tell whether t is seen as complex, or conjugated.
        if bucket and t.dtype == bucket.param_dtype and not t.is_conj() and not t.is_neg():
            return bucket, (t.shape, t.stride(), t.storage_offset()), bucket.unit.version
        # Detached, since t may be the output of the node that saves it, which would be a cycle.
        return None, outer[0](t) if outer else t.detach(), t._version

    def _unpack(self, outer, note):
        """What `_pack` was given: a weight from its unit, which is gathered again."""
        bucket, kept, version = note
        if bucket is not None:
            self._notice_backward()
            self._make_whole(bucket.unit)
            t, found = bucket.whole.as_strided(*kept), bucket.unit.version
        elif outer:
            return outer[1](kept)
        else:
            t, found = kept, kept._version
        if found != version:
            raise RuntimeError("a backward needs a tensor that was modified in place, as by step()")
        return t


# -------------------------------------------------------------------------------------------------
# modules on the meta device


def swap(pairs):
    """Exchange each key of pairs with its value, whoever refers to them. A second call undoes it.
    """
    for p, q in pairs.items():
        torch.utils.swap_tensors(p, q)


def fill_meta(module, unit, device, init_fn):
    """Fill what unit of module has on the meta device -> {parameter: a real one with its values}.

    The unit's buffers are real then. Its parameters are on meta again, so that filling another unit
    does not touch them.
    """
    stand_ins, modules = {}, []  # modules: those that have something to fill
    for p in [p for p in unit.parameters if p.is_meta]:
        stand_ins[p] = torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
        vars(stand_ins[p]).update(vars(p))
    swap(stand_ins)
    for m in module.modules():
        buffers = {name: torch.empty_like(t, device=device) for name, t in m._buffers.items()
                   if m in unit.submodules and t is not None and t.is_meta}
        m._buffers.update(buffers)
        if buffers or not stand_ins.keys().isdisjoint(m._parameters.values()):
            modules.append(m)
    if modules and init_fn is None and hasattr(module, "init_weights"):
        module.init_weights()
        modules.clear()
    for m in modules:
        reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
        if init_fn is None and reset is None:
            raise RuntimeError(f"{unit.name} has a {type(m).__name__} on meta: pass init_fn for it")
        reset() if init_fn is None else init_fn(m)
    swap(stand_ins)
    return stand_ins

# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Guards of stages: what a script may do with a parameter of the module (`Absent`), with a gradient
of a shard (`Part`), and with a shard. See guards.py, too.
"""

import contextlib
import copy
import dataclasses
import functools
import sys
import warnings
import weakref
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import (_disable_current_modes,
                                          _get_current_dispatch_mode_stack)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode

import ddp
from dropin.guards import IN_BACKWARD_OPTIMIZERS, has_closure
from zero import in_backward

# -------------------------------------------------------------------------------------------------
# parameters and gradients
#
# The rules:
#
#   - Outside of a forward and of the backward after it a parameter of the module is Absent: it
#     stands for its shard, and nobody reads an old value.
#   - What turns up where it does not belong is taken to where it does: a value that replaces
#     `.data` of a shard, or that a forward writes to a parameter; a gradient that autograd adds to
#     a shard; a freeze of the one or the other.
#   - With a shard's `.grad`, which is a Part, one can do what works element by element. Nobody
#     takes a norm or a mean, or reads a row.


# Attributes of a parameter that are its value or a view of it.
VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
# What does not read values.
FACTS = set("""
    __get__ __set__ __delete__ __len__ __hash__ __dir__ size dim ndimension numel nelement stride
    storage_offset data_ptr untyped_storage element_size is_contiguous is_complex is_floating_point
    is_signed is_conj is_neg is_inference is_pinned is_shared is_same_size is_set_to get_device
    has_names dim_order _is_view requires_grad_ register_hook register_post_accumulate_grad_hook
""".split())
# What moves or casts all of them.
CASTS = set("to type float double half bfloat16 cpu cuda".split())

# What a part of a gradient can be asked for: what is done element by element, views of all of it,
# facts. All else, such as a norm, would be of this rank's part.
ELEMENTWISE = CASTS | set("""
    abs absolute neg negative positive sign sgn signbit add sub rsub subtract mul multiply div
    divide true_divide floor_divide remainder fmod pow float_power square sqrt rsqrt reciprocal
    hypot ldexp nextafter copysign exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy
    logit sigmoid softplus logsigmoid sin cos tan asin acos atan atan2 arcsin arccos arctan arctan2
    sinh cosh tanh asinh acosh atanh sinc deg2rad rad2deg erf erfc erfinv lgamma digamma i0
    heaviside angle conj conj_physical resolve_conj resolve_neg ceil floor round trunc fix frac
    nan_to_num clamp clip clamp_min clamp_max maximum minimum fmax fmin relu relu6 elu celu selu
    gelu silu mish hardtanh hardshrink softshrink tanhshrink hardsigmoid leaky_relu threshold lerp
    addcmul addcdiv where masked_fill lt le gt ge eq ne isclose less less_equal greater
    greater_equal not_equal logical_not logical_and logical_or logical_xor bitwise_not bitwise_and
    bitwise_or bitwise_xor clone detach contiguous copy type_as int long short bool pin_memory zero
    fill zeros_like ones_like empty_like full_like
""".split())
ELEMENTWISE |= {f"{name}_" for name in ELEMENTWISE}  # in place
ELEMENTWISE |= {f"_foreach_{name}" for name in ELEMENTWISE}
ARITHMETIC = "add sub mul div truediv floordiv mod pow and or xor".split()
ELEMENTWISE |= {f"__{side}{name}__" for side in ("", "i", "r") for name in ARITHMETIC}
ELEMENTWISE |= set("""
    __abs__ __neg__ __pos__ __invert__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__
""".split())
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # what a GradScaler calls
ALLOWED = ELEMENTWISE | FACTS | {UNSCALE} | set("""
    view view_as reshape reshape_as flatten ravel unflatten squeeze squeeze_ unsqueeze unsqueeze_ t
    transpose swapaxes swapdims permute movedim moveaxis view_as_real view_as_complex expand_as
    as_subclass new_zeros new_ones new_empty new_full new_tensor result_type record_stream equal
    allclose __repr__ __format__ set_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_
""".split())
ALLOWED_OF_TWO = {"max", "min"}  # element by element, if the second argument is a tensor
COMPARES = {"eq", "__eq__", "isclose"}  # of two parts; so what comes of it can be asked for all()
# What a gradient can be asked for while no_sync() holds it back.
HELD = {"zero_", "_foreach_zero_", "detach_", "requires_grad_", "data_ptr", "__get__", "__set__"}
# What a script asks for the shape of a parameter, and what fills it by chance.
SHAPES = {"shape", "size", "numel", "nelement", "stride", "__len__", "T", "mT", "H", "mH"}
BY_CHANCE = set("""
    normal normal_ uniform_ kaiming_uniform_ bernoulli bernoulli_ exponential_ cauchy_ log_normal_
    geometric_ random_ rand_like randn_like randint_like dropout dropout_ poisson
""".split())
# Optimizers that look at whole parameters, by the names of their classes, in small letters. There
# are others.
NOT_ELEMENTWISE = set("""
    adafactor adafactorbigvision adafactor8bit came sm3 adam_mini adammini stableadamw galoreadamw
    galoreadafactor apollo fira
    lamb fusedlamb fusedmixedprecisionlamb onebitlamb lamb8bit lamb32bit
    lars pytorchlars lars8bit lars32bit novograd nvnovograd fusednovograd adamp sgdp fromage nero
    muon singledevicemuon muonwithauxadam singledevicemuonwithauxadam muonadamw distmuon
    distmuonadamw distributedmuon adamuon normuon muonclip dion scion ranger ranger21 adai amos
    shampoo scalableshampoo distributedshampoo soap splus kron psgd kfac ekfac
""".split())
# And those that look at all parameters at once.
NOT_BY_PARAMETER = set("""
    lbfgs fulllbfgs lbfgsnew prodigy prodigyplusschedulefree dadaptadam dadaptsgd dadaptadagrad
    dadaptlion dadaptadan dadaptadanip dog ldog momo momoadam
""".split())
PLACES = "shards"  # in groups of a state_dict(): `_guard_owner`
# The way out, where a name is that of another optimizer.
NOT_THAT_ONE = ("If it is another one of that name, which changes each element by that element's "
                "gradient alone, set optimizer.is_elementwise = True")


@dataclasses.dataclass(eq=False)
class Guarded:
    """What guards know of a parameter: its only attribute of ours, `p._guarded`."""
    name: str
    bucket: object
    i: int  # its number there
    shard: nn.Parameter
    kind: type  # p's class while it may be read
    log: object  # the wrapper's
    seen: tuple = ()  # p's address, version and requires_grad when it could first be read

    def write(self, shard, value):
        """This rank's part of value, a whole one, to its shard, or to another tensor of that."""
        return shard.copy_(self.bucket.part_of(self.i, value))


class Absent(nn.Parameter):
    """What a parameter of the module is while its value is not there, or may be old. It can be
    asked for its attributes, and `.grad` is that of its shard. What can be written part by part, a
    whole value, goes to the shard. Anything else raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_attribute = type(function).__name__ == "method-wrapper"  # p.name, or p.name = value
        name = name_of(function)
        is_set = is_attribute and len(args) == 2
        is_written = name == "copy_" or name == "data" and is_set
        absent = [t for t in args if isinstance(t, cls)]
        reason = IN_BACKWARD if in_backward() else ABSENT
        if not absent:
            raise RuntimeError(f"{name} of a list of parameters: {reason}")
        p = absent[0]
        known = p._guarded
        shard = known.shard
        with torch._C.DisableTorchFunctionSubclass():
            if is_attribute and name == "grad" and not in_backward():
                return function(shard, *args[1:])
            if name == "requires_grad_" or name == "requires_grad" and is_set:
                function(shard, *args[1:], **kwargs)  # of both
            if name in FACTS or is_attribute and name not in VALUES:
                return function(*args, **kwargs)
            if is_written and not isinstance(args[1], cls):
                known.log.note("values that were written to parameters of the module")
                return known.write(shard.detach(), args[1])
        if name in CASTS:
            reason = "cast and move the module before wrapping it"
        raise RuntimeError(f"{name} of {known.name}: {reason}")

    def __repr__(self):
        """For debuggers."""
        return f"Absent({self._guarded.name}, {tuple(self.shape)}, {self.dtype})"

    def __format__(self, specification):
        return repr(self)


def name_of(function):
    """What a script calls a function by that a tensor is asked for: of an attribute its name."""
    is_attribute = type(function).__name__ == "method-wrapper"
    return function.__self__.__name__ if is_attribute else function.__name__


IN_BACKWARD = ("stage 3 has freed it in this part of the backward. An autograd.Function keeps a "
               "weight by ctx.save_for_backward(weight), not by ctx.weight = weight, and a hook "
               "what it has read in the forward; or use Zero2")
ABSENT = ("a parameter has a value only in the forward of its unit, and in the backward. For "
          "values use full_parameters() or, to save, as by save_pretrained(state_dict=...), "
          "full_state_dict(); an optimizer is made from the wrapper's parameters(), after "
          "wrapping. If the module itself reads it without calling its unit, name other units=, so "
          "that it is the root's")


class Part(torch.Tensor):
    """`.grad` of a shard from a backward on, and what is computed from it element by element. It is
    copied and pickled as a Tensor, so that files do not need this class. Each wrapper has a
    subclass of its own, with the shard_group."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, Held) and name not in HELD:
                raise RuntimeError(f"{name} of the gradient of a shard, which is held back by "
                                   f"no_sync(): make the last backward before it outside of "
                                   f"no_sync()")
        is_of_two = len(args) == 2 and isinstance(args[1], torch.Tensor)
        if name in BY_CHANCE:
            raise RuntimeError(f"{name} of the gradient of a shard: {OTHER_NUMBERS}")
        if name not in ALLOWED and not (name in ALLOWED_OF_TWO and is_of_two):
            refuse_part(name)
        if name == "where" and len(args) == 1:  # which is nonzero()
            refuse_part(name)
        if name in ("zero_", "_foreach_zero_"):  # zero_grad() drops what was held back
            tree_map_only(Held, Held.drop, args)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            if type(result) is torch.Tensor:
                # Else a product with a wider tensor repeats the part's elements.
                for t in (*args, *kwargs.values()):
                    if isinstance(t, Part) and t.shape != result.shape and name in ELEMENTWISE:
                        refuse_part(f"{name}, with a tensor of another shape,")
            if name == UNSCALE:
                agree_on_inf(args[1], cls.shard_group)
        # A plain tensor that a script adds a part to, such as an average, stays plain: each later
        # use of it would take longer.
        is_in_place = len(args) > 0 and result is args[0]
        if type(result) is torch.Tensor and not is_in_place:
            is_answer = name in COMPARES and is_of_two and all(isinstance(t, Part) for t in args)
            if name != "as_subclass" and not is_answer:
                result.__class__ = cls
        elif isinstance(result, list | tuple) and not name.endswith("_"):
            for t in result:
                if type(t) is torch.Tensor:
                    t.__class__ = cls
        return result

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def refuse_part(what):
    raise RuntimeError(f"{what} of the gradient of a shard, which is one rank's part: use "
                       f"model.clip_grad_norm_(), or take p.grad.as_subclass(torch.Tensor) and "
                       f"reduce over ranks what you find")


OTHER_NUMBERS = ("they would be other numbers than one process's, and perhaps the same in each "
                 "rank's part. Draw them for p.whole_shape, on all ranks alike, and take this "
                 "rank's part: model.shard_starts() says where it begins")


class Held(Part):
    """`.grad` of a shard while no_sync() holds a gradient of it back. It can only be dropped."""

    def drop(self):
        self.__class__ = torch.Tensor


class PartOfParameter:
    """What a stage's shards are until the first step, or until the second backward, as scripts ask
    for shapes before that. A shard's own shape is what optimizers need, and hardly ever what a
    script means. (Then they are plain Parameters: each question to this class takes some us. Those
    of a stage that is only evaluated, or averaged into, stay.)"""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if any(issubclass(kind, Part) for kind in types):
            return NotImplemented  # asks the gradient
        name = name_of(function)
        asks, level = who_asks()
        module = getattr(function, "__module__", None) or ""
        is_init = "torch.nn.init" in (asks, module)
        with torch._C.DisableTorchFunctionSubclass():
            if name in BY_CHANCE or is_init and name in SHAPES:
                raise RuntimeError(f"{name} of {shard_in(args, kwargs)}: {OTHER_NUMBERS}. Better "
                                   f"initialise the module before wrapping it, or on the meta "
                                   f"device by init_fn=")
            if module.startswith("torch.distributed") or "c10d" in module:
                raise RuntimeError(f"{name} of {shard_in(args, kwargs)}: other ranks have other "
                                   f"parts. All begin with rank 0's values, and gradients are "
                                   f"averaged; whole values come from full_parameters()")
            if name in SHAPES and not asks.startswith("torch."):
                # Without numbers: Python shows a text once for a line of a script.
                warnings.warn(f"{name} of a shard, which is one rank's part of a parameter: that "
                              f"of the whole is in p.whole_shape", stacklevel=level)
            refuse_other_shards(name, args)
            result = function(*args, **(kwargs or {}))
            if name in ("data", "detach") and len(args) == 1:
                # nn.Parameter(p) asks that p.detach() is of p's class.
                result.__class__ = type(args[0]) if name == "detach" else ShardData
                result.whole_shape, result._guard_cut = args[0].whole_shape, args[0]._guard_cut
            return result

    def plain(self):
        """The same without this class, in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            values = self.detach()
            if isinstance(self, nn.Parameter):
                return nn.Parameter(values, self.requires_grad)
            return values

    def __deepcopy__(self, memo):
        memo[id(self)] = copy.deepcopy(self.plain())
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        plain = self.plain()
        vars(plain).update(vars(self))
        del plain._guard_cut
        return plain.__reduce_ex__(protocol)


def shard_class(kind):
    """Of a parameter of this class: scripts make groups by isinstance()."""
    return type("Shard", (PartOfParameter, kind), {})


class ShardData(PartOfParameter, torch.Tensor):
    """Its `.data`."""


def who_asks():
    """(name of the module that asks a tensor, how far up the stack that is), seen from
    `__torch_function__`."""
    level = 2
    while sys._getframe(level).f_globals.get("__name__") in ("torch.overrides", "torch._tensor"):
        level += 1
    return sys._getframe(level).f_globals.get("__name__", ""), level


def shard_in(args, kwargs):
    """The first one, in words."""
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, PartOfParameter):
            return (f"a shard of shape {tuple(t.shape)}, which is one rank's part of a parameter "
                    f"of shape {tuple(t.whole_shape)}")


def refuse_other_shards(name, arguments):
    """Raise where a shard meets, alone or in lists, one that is another part of its parameter, or a
    tensor of another shape."""
    lists = [value for value in arguments if isinstance(value, list | tuple)]
    rows = zip(*lists) if lists else [arguments]
    for row in rows:
        tensors = [t for t in row if isinstance(t, torch.Tensor)]
        shards = [t for t in tensors if hasattr(t, "_guard_cut")]
        if not shards:
            continue
        others = [t for t in tensors if not hasattr(t, "_guard_cut") and t.numel() != 1]
        alike = shards + [t for t in others if t.dim() == shards[0].dim()]
        is_same_part = len({t._guard_cut for t in shards}) == 1
        if not is_same_part or len({t.shape for t in alike}) > 1:
            shapes = [str(tuple(t.shape)) for t in alike]
            raise RuntimeError(f"{name} of a shard and of what is not the same part of a "
                               f"parameter, of shapes {' and '.join(shapes)}: wrap two modules "
                               f"alike, and freeze one after that; or exchange whole values by "
                               f"full_state_dict() and load_full_state_dict()")


def mark(place, optimizer, state_dict):
    """Hook of an optimizer: its state_dict() says whose shards its groups have. One optimizer may
    have shards of several wrappers."""
    for group in state_dict["param_groups"]:
        others = [other for other in group.get(PLACES, ()) if other != place]
        group[PLACES] = [*others, place]


def refuse_held(tensors):
    """Raise where one is a mark of what no_sync() holds back: a norm would be that of marks."""
    kinds = set(map(type, tensors))
    if any(issubclass(kind, Held) for kind in kinds):
        raise RuntimeError("a norm of gradients that are held back by no_sync(): make the last "
                           "backward before it outside of no_sync()")


def agree_on_inf(found_inf, group):
    """A GradScaler skips a step if it has found an inf: if one rank has, all must."""
    agreed = found_inf.to(dist.distributed_c10d._get_object_coll_device(group))
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
    found_inf.copy_(agreed)


def outside_functorch():
    """A context that leaves torch.func.jvp and the like: tensors that are made inside of these
    could not be used outside."""
    is_inside = torch._C._functorch.peek_interpreter_stack() is not None
    return temporarily_clear_interpreter_stack() if is_inside else contextlib.nullcontext()


def outside_selective_checkpoint():
    """A context that leaves a selective checkpoint which computes anew: it counts what is called in
    it, and raises for our own operations."""
    if torch._C._len_torch_dispatch_stack() > 0:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _CachedTorchDispatchMode):
                return _disable_current_modes()
    return contextlib.nullcontext()


def as_tensors():
    """A context in which parameters, shards and gradients answer as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def clip_gradients_(gradients, max_norm, process_group=None, divide_by=1):
    """As ddp.py's `clip_gradients_`, also of gradients of shards."""
    gradients = list(gradients)
    refuse_held(gradients)
    with as_tensors():
        return ddp.clip_gradients_(gradients, max_norm, process_group, divide_by)


# -------------------------------------------------------------------------------------------------
# guards


class ShardGuards:
    """With guards: outside of a forward and its backward nobody reads a parameter of the module;
    what a script puts in the place of a shard, or writes to a parameter in a forward, is taken
    over; of a shard's `.grad` nobody takes a norm, nor anything else that needs all of it.

    Until the first step with it a shard warns if a script asks for its shape, and is not filled by
    chance, as torch.nn.init does it.

    What is not noticed, and wrong, stands in README.md.
    """

    _guard_hint = (". (get_state_dict() of torch.distributed.checkpoint knows no shards: save "
                   "state_dict() or full_state_dict())")

    def _check_module(self, options):
        super()._check_module(options)
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        for where, m in self._guard_modules():
            if isinstance(m, torch.jit.RecursiveScriptModule) and m._parameters:
                self._refuse(f"{where or 'the module'} is made by torch.jit.script, and takes no "
                             f"hooks, by which a stage gathers parameters: wrap the plain module, "
                             f"or use DDP")
            for name, p in m._parameters.items():
                fqn = f"{where}.{name}" if where else name
                if p is not None and fqn in ignored:
                    self._refuse(f"{fqn} is in the module's _ddp_params_and_buffers_to_ignore, so "
                                 f"ranks may have values of their own there, but a stage gives all "
                                 f"ranks those of rank 0: use DDP")

    def _fill_units(self, cap_bytes, param_dtype):
        self._refuse_shared_memory()
        on_meta = [p.is_meta for _, p in self._named("parameters")]
        if any(on_meta) and not all(on_meta) and self._init_fn == [None]:
            if hasattr(self.module, "init_weights"):
                self._refuse("some parameters are on meta, and init_weights() would write to the "
                             "others, too: pass init_fn, which is called for submodules")
        super()._fill_units(cap_bytes, param_dtype)

    def _refuse_shared_memory(self):
        """Two parameters that have elements in one place would be apart in the buckets."""
        in_memory = {}  # {memory and dtype: {parameter there: its name}}
        for name, p in self._named("parameters"):
            if not p.is_meta:
                memory = p.untyped_storage()._cdata, p.dtype
                in_memory.setdefault(memory, {}).setdefault(p, name)
        for names in in_memory.values():
            if len(names) == 1:
                continue
            first = next(iter(names))
            n = first.untyped_storage().nbytes() // first.itemsize
            # For each element of the memory, whether it is a parameter's.
            taken = torch.zeros(n, dtype=torch.bool, device=first.device)
            for p, name in names.items():
                place = taken.as_strided(p.shape, p.stride(), p.storage_offset())
                if place.any():
                    self._refuse(f"parameters share memory, such as {name} with another of "
                                 f"{list(names.values())}: tie them by assigning one to both "
                                 f"modules")
                place.fill_(True)

    def _watch(self, buckets):
        self._guard_awaits_backward = False  # whether there was a forward since the last backward
        self._guard_hidden = set()  # units whose parameters are Absent
        self._guard_in_step = []  # parts that are plain tensors while an optimizer steps
        self._guard_part = type("Part", (Part,), {"shard_group": self.shard_group})
        self._guard_held = type("Held", (Held,), {"shard_group": self.shard_group})
        self._guard_of_step = weakref.WeakKeyDictionary()  # {optimizer: hooks around its step}
        self._guard_checked = weakref.WeakSet()  # optimizers, by `_guard_check_state`
        self._guard_hooked = weakref.WeakSet()  # those that tell when they have loaded state
        self._guard_unasked = {}  # {shard that is a `PartOfParameter`: the class of its parameter}
        self._guard_marked = weakref.WeakSet()  # optimizers whose state_dict() says whose it is
        self._guard_of_module = set(self._names)  # what no optimizer should have
        self._guard_whole = set()  # shards of uncut parameters
        self._guard_elsewhere = set()  # and those of them that other ranks own: empty here
        super()._watch(buckets)
        self._hook(register_optimizer_step_pre_hook, type(self)._guard_before_shards_step)
        self._shards = set(self._guard_names)
        cuts, classes = [], {}
        for p, name in self._names.items():
            bucket, i = self._place_of(p)
            shard = bucket.shards[i]
            cuts.append((bucket.firsts[i], bucket.firsts[i] + shard.numel()))
            if p in self._uncut:
                self._guard_whole.add(shard)
                if bucket.is_elsewhere(i):
                    self._guard_elsewhere.add(shard)
            p._guarded = Guarded(name, bucket, i, shard, type(p), self._guard_log)
            if shard.shape != p.shape:
                _, strides, _ = bucket.layouts[i]
                shard._guard_cut = tuple(p.shape), tuple(strides), cuts[-1]
                if type(p) not in classes:
                    classes[type(p)] = shard_class(type(p))
                shard.__class__ = classes[type(p)]
                self._guard_unasked[shard] = type(p)
            elif type(p) is not nn.Parameter:
                shard.__class__ = type(p)
        # Whose shards these are: the same for every wrapper that is cut in the same places.
        rank, n_ranks = self.shard_group.rank(), self.shard_group.size()
        self._guard_place = f"rank {rank} of {n_ranks}, {zlib.crc32(repr(cuts).encode()):08x}"
        for unit in self.units:
            self._make_absent(unit)

    # ---- a parameter may be read, or is Absent

    def _hide_all(self):
        for unit in self.units:
            self._hide(unit)

    def _hide(self, unit):
        """Let nobody read unit's parameters."""
        if unit not in self._guard_hidden:
            self._take_back(unit)
            self._make_absent(unit)

    def _take_back(self, unit):
        """What a forward has written to unit's parameters goes to the shards; so does a freeze."""
        for p in unit.parameters:
            known = p._guarded
            address, version, requires_grad = known.seen
            if (p.data_ptr(), p._version) != (address, version):
                # .data: this is no change of version, so the graphs of this forward stay valid.
                known.write(known.shard.data, p.data)
            if p.requires_grad != requires_grad:
                known.shard.requires_grad = p.requires_grad

    def _make_absent(self, unit):
        for p in unit.parameters:
            p.__class__ = Absent
        self._guard_hidden.add(unit)

    def _use(self, unit, *_):
        """After it unit's parameters may be read."""
        self._guard_refuse_compiled_autograd()
        with outside_functorch(), outside_selective_checkpoint(), as_tensors():
            super()._use(unit)
        if unit in self._guard_hidden:
            for p in unit.parameters:
                p.__class__ = p._guarded.kind
                p._guarded.seen = p.data_ptr(), p._version, p.requires_grad
            self._guard_hidden.discard(unit)

    def _is_whole(self, unit):
        return super()._is_whole(unit) and unit not in self._guard_hidden

    def _wait(self, unit):
        is_coming = [bucket.gather is not None for bucket in unit.buckets]
        if any(is_coming):  # else, as mostly, contexts would cost more than all the rest
            with outside_functorch(), as_tensors():
                super()._wait(unit)

    def _reshard(self, unit):
        """Stage 3 only: unit's parameters become Absent."""
        self._hide(unit)
        with as_tensors():
            super()._reshard(unit)
        # A backward through a graph that no recipe was made of, such as a penalty's, has to raise.
        torch.autograd.graph.increment_version(unit.parameters)

    def _invalidate(self, bucket):
        self._hide(bucket.unit)  # before the rest, which would look like a script's write
        super()._invalidate(bucket)

    # ---- shards

    def _check_shards(self):
        with as_tensors():  # else an Absent answers by Python
            for p in self._names:
                shard = p._guarded.shard
                if p.requires_grad != shard.requires_grad:  # a script has frozen or unfrozen it
                    p.requires_grad = shard.requires_grad
                if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                    self._refuse(f"{p._guarded.name}: a shard's hooks do not run: hook the "
                                 f"module's")
                if IN_BACKWARD_OPTIMIZERS in shard.__dict__:
                    self._refuse_optimizer_in_backward(p._guarded.name)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_up_changes(self):
        with as_tensors():
            super()._take_up_changes()

    # ---- forward

    @torch.compiler.disable
    def _prepare_forward(self):
        if torch.jit.is_tracing():
            self._refuse("torch.jit.trace() would take what is sent into the graph: trace the "
                         "module before wrapping it, or a plain copy with full_state_dict()")
        with outside_functorch():
            self._hide_all()
            self._check_shards()
            super()._prepare_forward()

    def _begin_anew(self, module):
        if torch.is_grad_enabled():
            self._guard_awaits_backward = True
        with outside_functorch():
            super()._begin_anew(module)

    def _end_forward(self):
        with outside_functorch():
            super()._end_forward()
        if not torch.is_grad_enabled():
            self._hide_all()

    def _begin_recipes(self):
        """Stage 3 only."""
        is_possible = torch._C._autograd._saved_tensors_hooks_is_enabled()
        if torch.is_grad_enabled() and not is_possible:
            self._refuse("hooks of saved tensors are switched off, as in torch.func.grad, vjp and "
                         "jacrev, but stage 3 needs them: use Zero2, or torch.autograd.grad()")
        super()._begin_recipes()

    # ---- backward: a shard's `.grad` is a Part, or Held

    def _begin_backward(self):
        """Gradients of shards are plain tensors in it."""
        if self._guard_unasked and self._knows_order:  # a script steps by hand
            self._guard_end_of_questions()
        with as_tensors():
            for bucket in self._all_buckets:
                if bucket.has_new_versions():
                    self._invalidate(bucket)
            super()._begin_backward()
            for shard in self._holders.values():
                if shard.grad is not None and isinstance(shard.grad, Part):
                    shard.grad.__class__ = torch.Tensor

    def _end_backward(self):
        """They are parts again, or held back. Outside of a forward nobody reads parameters now."""
        with as_tensors():
            super()._end_backward()
            self._guard_awaits_backward = False
            for bucket in self.buckets:
                for p, shard in zip(bucket.parameters, bucket.shards):
                    is_held = p.grad is not None
                    if shard.grad is not None:
                        shard.grad.__class__ = self._guard_held if is_held else self._guard_part
        if not self._in_forward:
            self._hide_all()

    def _zeroed(self):
        """zero_grad() has taken the mark away: see `Held`. (The version of a mark does not tell of
        an empty shard: a loss over shards changes it, too.)"""
        zeroed = []
        with as_tensors():
            for bucket in self.buckets:
                for p, shard in zip(bucket.parameters, bucket.shards):
                    if p.grad is not None and not isinstance(shard.grad, Held):
                        zeroed.append(p)
        return zeroed

    def _drop_zeroed_gradients(self):
        with as_tensors():
            super()._drop_zeroed_gradients()

    def _refuse_while_held(self, what):
        with as_tensors():
            super()._refuse_while_held(what)

    def _guard_refuse_local(self, what, optimizer=None):
        self._refuse_while_held(what)

    def _guard_holds_back(self):
        with as_tensors():
            for bucket in self.buckets:
                for p in bucket.parameters:
                    if p.grad is not None:
                        return True
        return False

    # ---- the optimizer, and whole values

    @torch.compiler.disable
    def _guard_before_shards_step(self, optimizer, arguments, options):
        """Raise if the step would do something else than it seems to. It changes shards, so nobody
        is to read the parameters any more."""
        given = set()
        for group in optimizer.param_groups:
            given.update(group["params"])
        name = type(optimizer).__name__
        # Both are sets, which know their hashes: to ask each parameter for its own takes two calls.
        early = given & self._guard_of_module
        if early:
            first = self._names[early.pop()]
            self._refuse(f"this {name} has parameters of the module, such as {first}: make the "
                         f"optimizer after wrapping, from the wrapper's parameters()")
        if given.isdisjoint(self._shards):
            return
        self._guard_elementwise(optimizer, given)
        self._guard_end_of_questions()
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        if is_torchs and optimizer not in self._guard_checked:
            self._guard_check_state(optimizer)
        self._guard_owner(optimizer)
        if optimizer not in self._guard_marked:
            self._guard_marked.add(optimizer)
            optimizer.register_state_dict_post_hook(functools.partial(mark, self._guard_place))
        own = given - self._guard_elsewhere
        has_gradient = any(shard.grad is not None for shard in own)
        if (self._guard_awaits_backward and own and not has_gradient
                and not has_closure(arguments, options)):
            self._refuse(f"{name} steps after no backward, or one with inputs=, which is not "
                         f"supported")
        self._hide_all()
        self._check_shards()
        for shard in self._guard_elsewhere:
            shard.grad = None  # a loss over the shards has left an empty one
        self._guard_hook_step(optimizer)

    def _guard_hook_step(self, optimizer):
        """Of this optimizer, a hook next before its step and one next after it: so a script's own
        hooks see parts. These may have been set meanwhile."""
        if optimizer not in self._guard_of_step:
            me = weakref.proxy(self)
            before = functools.partial(type(self)._guard_show_gradients, me)
            after = functools.partial(type(self)._guard_hide_gradients, me)
            self._guard_of_step[optimizer] = (optimizer.register_step_pre_hook(before),
                                              optimizer.register_step_post_hook(after))
        before, after = self._guard_of_step[optimizer]
        optimizer._optimizer_step_pre_hooks.move_to_end(before.id)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)

    @torch.compiler.disable
    def _guard_show_gradients(self, optimizer, arguments, options):
        """What is whole may be looked at. On the rest torch's optimizers work element by element,
        and a Part would cost them time. It is one again after the step."""
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        for group in optimizer.param_groups:
            for shard in group["params"]:
                gradient = shard.grad
                is_part = type(gradient) is self._guard_part
                if is_part and (is_torchs or shard in self._guard_whole):
                    gradient.__class__ = torch.Tensor
                    self._guard_in_step.append(gradient)

    @torch.compiler.disable
    def _guard_hide_gradients(self, optimizer, arguments, options):
        for gradient in self._guard_in_step:
            gradient.__class__ = self._guard_part
        self._guard_in_step.clear()

    def _guard_elementwise(self, optimizer, given):
        """Refuse an optimizer that looks at more than single elements, by the name of its class, or
        of one from which it is derived. given: the set of its parameters."""
        name = type(optimizer).__name__
        names = {kind.__name__.lower() for kind in type(optimizer).__mro__}
        if getattr(optimizer, "is_elementwise", False):
            return
        if "zeroredundancyoptimizer" in names:
            self._refuse("ZeroRedundancyOptimizer sends parameters from rank to rank, and here "
                         "each rank has other parts: use the optimizer that it is made of, as a "
                         "stage shards its state already")
        if names & NOT_BY_PARAMETER:
            self._refuse(f"{name} looks at all whole parameters at once: use DDP. ({NOT_THAT_ONE})")
        if names & NOT_ELEMENTWISE:
            for fqn, shard in self.named_parameters():
                if shard in given and shard not in self._guard_whole:
                    self._refuse(f"{name} looks at whole parameters, and would see a part of "
                                 f"{fqn}: pass all of its parameters as uncut= when wrapping, or "
                                 f"use DDP. ({NOT_THAT_ONE})")

    def _guard_owner(self, optimizer):
        """Refuse state that was loaded from the state_dict() of another rank, as where a library
        has saved rank 0's for all. (Its shapes need not tell.) For that, groups in a state_dict()
        say whose shards theirs are, and load_state_dict() keeps what they say."""
        for group in optimizer.param_groups:
            places = group.get(PLACES)
            is_ours = not self._shards.isdisjoint(group["params"])
            if places is not None and is_ours and self._guard_place not in places:
                self._refuse(f"the optimizer's state is of the shards of {' and '.join(places)}, "
                             f"and this is {self._guard_place}: a state_dict() is one rank's. Save "
                             f"full_optimizer_state_dict(optimizer), or by sharded_state() of "
                             f"checkpoint.py")

    def _guard_end_of_questions(self):
        """Let all shards be what the parameters are, plain ones mostly."""
        for shard, kind in self._guard_unasked.items():
            shard.__class__ = kind
        self._guard_unasked.clear()

    def _guard_check_state(self, optimizer):
        """Before the first step of one of torch's, and the first after each load_state_dict(): what
        it keeps for a part of a parameter, element by element, has the shape of that part."""
        if optimizer not in self._guard_hooked:
            self._guard_hooked.add(optimizer)
            optimizer.register_load_state_dict_post_hook(self._guard_checked.discard)
        for shard in self._shards - self._guard_whole:
            name = self._guard_names[shard]
            for kind, t in optimizer.state.get(shard, {}).items():
                if isinstance(t, torch.Tensor) and t.dim() > 0 and t.shape != shard.shape:
                    self._refuse(f"{kind} of {name} in the optimizer's state has the shape "
                                 f"{tuple(t.shape)}, and this rank's shard {tuple(shard.shape)}: "
                                 f"it is another rank's, or of another number of ranks. Save by "
                                 f"sharded_state() of checkpoint.py, which any number can load")
        self._guard_checked.add(optimizer)

    @torch.compiler.disable
    def _after_step(self, optimizer, *_):
        with as_tensors():
            super()._after_step(optimizer)

    @torch.compiler.disable
    def clip_grad_norm_(self, max_norm):
        with as_tensors():
            return super().clip_grad_norm_(max_norm)

    def full_parameters(self):
        self._guard_structure()
        self._hide_all()
        yield from super().full_parameters()

    def full_optimizer_state_dict(self, optimizer):
        self._guard_structure()
        self._guard_owner(optimizer)
        state = super().full_optimizer_state_dict(optimizer)
        for group in state["param_groups"]:
            group.pop(PLACES, None)
        return state

    def shard_starts(self):
        self._guard_structure()
        return super().shard_starts()

    def _module_state(self):
        """Of state dicts, of this rank's and of whole ones."""
        self._guard_structure()
        return super()._module_state()

    def load_state_dict(self, state_dict, strict=True, assign=False):
        self._hide_all()
        self._guard_log.note("load_state_dict()")
        return super().load_state_dict(state_dict, strict, assign)

    def load_full_state_dict(self, state_dict, strict=True):
        self._hide_all()
        self._guard_log.note("load_full_state_dict()")
        return super().load_full_state_dict(state_dict, strict)

    def _invalidate_all(self):
        with as_tensors():
            super()._invalidate_all()

    def _guard_record(self, steps):
        """{name: how these steps have changed the parameter}. A rank may leave an empty shard out:
        then it does not know."""
        changes = {shard: [] for shard in self._guard_names}
        for kind, groups in steps:
            for of_group, parameters in groups:
                for p in parameters:
                    if p in changes:
                        changes[p].append((kind, of_group))
        record = {"loads and clipping": [kind for kind, groups in steps if not groups]}
        for shard, fact in changes.items():
            if fact or shard.nbytes > 0:
                record[self._guard_names[shard]] = fact
        return record

# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Guards of all wrappers. Those of stages are in shard_guards.py, and those of ranks that should do
the same in alike.py.

There are many ways in which a script can compute something else than its author thinks, such as a
step with what no_sync() has held back. Each is done right, where few lines can do that. Otherwise
it raises RuntimeError, in a line that says what to do. A script without mistakes gets the same bits
without guards. Attributes of its own begin with `_guard_`, as all layers share one object.
"""

import math
import weakref

import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddp import is_wrapped, Reducer
from dropin.ranks import named_modules
from zero import in_backward

IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"  # where torch notes them at a parameter
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


class Guards:
    """With guards: a module is wrapped once, has tensors that can be sent, and keeps the parameters
    that it had when it was wrapped. A backward inside another, or after one whose end never came,
    is refused. An optimizer does not step, and nothing is clipped, with what no_sync() has left:
    this rank's own."""

    _guard_hint = ""  # what else to say of an attribute of the module

    # ---- the module

    def _check_module(self, options):
        for name, m in self._guard_modules():
            # By name, since nobody wants to import FSDP for this.
            kinds = {kind.__name__ for kind in type(m).__mro__}
            if isinstance(m, Reducer) or kinds & WRAPPERS:
                where = f"holds at {name}" if name else "is"
                self._refuse(f"the module {where} a {type(m).__name__}, a wrapper which averages "
                             f"gradients itself: wrap the plain module, once")
            # With max_norm a lookup scales the rows that this rank's batch uses: then ranks differ.
            is_lookup = isinstance(m, (nn.Embedding, nn.EmbeddingBag))
            if is_lookup and m.max_norm is not None and self.group.size() > 1:
                self._refuse(f"{name}: max_norm={m.max_norm} changes the weights of each rank by "
                             f"its own batch, in the forward: pass max_norm=None")
        # {parameter that a script has hooked already: how many hooks it has with ours}
        self._guard_more_hooks = {}
        for name, p in self._named("parameters"):
            if is_wrapped(p) or hasattr(p, "_guarded"):
                self._refuse(f"{name} is another wrapper's, or was: wrap one module that has all "
                             f"that you train, once; or build the module anew")
            if p._post_accumulate_grad_hooks:
                self._guard_more_hooks[p] = 1 + len(p._post_accumulate_grad_hooks)
        for name, t in self._named("parameters") + self._named("buffers"):
            fault = fault_of_memory(t)
            if fault is not None:
                self._refuse(f"{name} {fault}")
        super()._check_module(options)

    def _guard_modules(self):
        """[(name, submodule)], the module first."""
        return [("", self.module), *self._named("modules")]

    @property
    def _ddp_params_and_buffers_to_ignore(self):
        """torch's DDP asks the module that it wraps for this, a list."""
        return NotAgain(self._get_name())

    def __getattr__(self, name):
        """Of what is not here, such as `model.config`, say where it is."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            hint = ""
            if hasattr(self.__dict__.get("_modules", {}).get("module"), name):
                hint = f": use model.module.{name}{self._guard_hint}"
            fact = f"'{type(self).__name__}' object has no attribute '{name}'{hint}"
            raise AttributeError(fact, name=name, obj=self) from None

    def _watch(self, buckets):
        self._hook(register_optimizer_step_pre_hook, type(self)._guard_before_step)
        super()._watch(buckets)  # after it, so that a step which is refused is not noted
        # swap_tensors(), by which load_state_dict() may work, would lose the hooks. It raises where
        # there is a weak reference.
        self._guard_not_to_swap = [weakref.ref(p) for p in self._names]
        wrapped = self._named("parameters")
        self._guard_wrapped = wrapped  # [(name, parameter)]
        self._guard_ids = ids_of(wrapped)
        self._guard_kinds = {name: (p.dtype, p.device) for name, p in self._holders.items()}
        self._guard_local = {}  # {name: a weak reference to the `.grad` that no_sync() has left}

    @torch.compiler.disable
    def _prepare_forward(self):
        self._guard_end_of_backward("a forward")
        self._guard_parameters()
        super()._prepare_forward()

    def _guard_parameters(self):
        """The module has the parameters with which it was wrapped, and each trained one has no more
        hooks than it had then. Takes 1 us per parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # else an Absent answers by Python
            self._guard_each_parameter(self._guard_structure(in_forward=True))

    def _guard_structure(self, in_forward=False):
        """-> [(name, parameter)] of the module, which has those with which it was wrapped."""
        if len(self._modules) > 1 or self._parameters:
            *_, name = [*self._modules, *self._parameters]
            self._refuse(f"{name} was added to the wrapper, and would not be trained alike on all "
                         f"ranks: add it to the module, before wrapping")
        self._guard_log.modules = named_modules(self.module)
        named = self._named("parameters", self._guard_log.modules)
        if ids_of(named) != self._guard_ids:
            self._guard_changes(named, in_forward and not torch.is_grad_enabled())
        return named

    def _guard_changes(self, named, only_evaluates):
        """Parameters may get other names or another order. functional_call() puts tensors in their
        places while it calls the module; they may be Parameters of a copy, if that is an
        evaluation."""
        of_name = dict(self._guard_wrapped)
        wrapped = {}  # {parameter: its first name}
        for name, p in self._guard_wrapped:
            wrapped.setdefault(p, name)
        still_there = set()
        for name, p in named:
            if p in wrapped:
                still_there.add(p)
            elif isinstance(p, nn.Parameter) and not (only_evaluates and name in of_name):
                self._refuse(f"{name} was added or replaced after wrapping, so ranks would not "
                             f"have the same there, nor average its gradient: wrap last")
            elif name in of_name:
                before = of_name[name]
                still_there.add(before)
                if p.shape != before.shape:
                    self._refuse(f"{name} gets a tensor of shape {tuple(p.shape)} in "
                                 f"functional_call(), and has {tuple(before.shape)}: is it a "
                                 f"shard, or an average of shards? Whole ones come from "
                                 f"full_parameters()")
        for p, name in wrapped.items():
            if p not in still_there:
                self._refuse(f"{name} is no parameter of the module any more: it was deleted, "
                             f"replaced, or tied to another one after wrapping: wrap last")

    def _guard_each_parameter(self, named):
        for name, p in named:
            n_hooks = len(p._post_accumulate_grad_hooks or ())
            if p.requires_grad and n_hooks != 1 and id(p) in self._guard_ids:
                n_expected = self._guard_more_hooks.get(p, 1)
                if n_hooks > n_expected:
                    self._refuse(f"{name} got a post-accumulate hook after wrapping, which would "
                                 f"see what is on its way to other ranks: set it before wrapping, "
                                 f"where it sees this rank's own gradient; or look after the "
                                 f"backward")
                if n_hooks < n_expected:
                    self._refuse(f"{name} was unfrozen after wrapping, so its gradient would not "
                                 f"be averaged: wrap last (what is frozen after wrapping may be "
                                 f"unfrozen)")
            if IN_BACKWARD_OPTIMIZERS in p.__dict__:
                self._refuse_optimizer_in_backward(name)
        if self.shard_group is None:
            for name, p in self._holders.items():
                if (p.dtype, p.device) != self._guard_kinds[name]:
                    self._refuse(f"{name} has become {p.dtype} on {p.device}: cast and move the "
                                 f"module before wrapping it")

    def _apply(self, *arguments, **options):
        """What .to() and the like do. One that changes nothing is right."""
        super()._apply(*arguments, **options)
        self._guard_parameters()
        return self

    def _refuse_optimizer_in_backward(self, name):
        self._refuse(f"{name} has an optimizer that steps in the backward, before gradients are "
                     f"averaged: make an optimizer of model.parameters()")

    # ---- a backward

    def _guard_end_of_backward(self, what):
        if self._is_under_way and not in_backward():
            self._refuse(f"{what} comes after a backward whose end was never seen, or after one "
                         f"that raised: call the model's zero_grad() after an error, and do "
                         f"without engines that make no callbacks")

    @torch.compiler.disable
    def _guard_before_step(self, optimizer, arguments, options):
        """Hook of all optimizers, before a step."""
        if not self._guard_is_ours(optimizer):
            return
        name = type(optimizer).__name__
        if in_backward() and self._is_under_way:
            self._refuse_optimizer_in_backward(next(iter(self._came), "the module"))
        self._guard_end_of_backward(f"a step of {name}")
        if not has_closure(arguments, options):  # which may make the averaged backward
            self._guard_refuse_local(f"{name} steps", optimizer)

    @torch.compiler.disable
    def clip_grad_norm_(self, max_norm):
        self._guard_refuse_local("clip_grad_norm_() comes")
        return super().clip_grad_norm_(max_norm)

    def _guard_refuse_local(self, what, optimizer=None):
        """DDP: raise where no_sync() has left a gradient, of optimizer's parameters or of all. In
        the context itself a step is meant to be this rank's own."""
        if self._may_step or not self.require_backward_grad_sync:
            return
        for name, reference in self._guard_local.items():
            p = self._holders[name]
            is_there = p.grad is not None and p.grad is reference() and bool(p.grad.any())
            if is_there and (optimizer is None or has_parameter(optimizer, p)):
                self._refuse(f"{what} while no_sync() holds gradients back, such as that of "
                             f"{name}, which is this rank's own: make the last backward before it "
                             f"outside of no_sync(). If this rank's own are meant, or the script "
                             f"averages them, make that backward in `with "
                             f"model.no_sync(may_step=True)`")

    def set_gradient_divide_factor(self, factor):
        if not 0 < factor < math.inf:
            self._refuse(f"the gradient divide factor must be a number above 0, not {factor}")
        super().set_gradient_divide_factor(factor)

    def _begin_backward(self):
        self._guard_refuse_compiled_autograd()
        if self._is_under_way:
            self._refuse("a backward inside another, or after one that raised. In another: pass "
                         "use_reentrant=False to checkpoint(); in the backward of an "
                         "autograd.Function call torch.autograd.grad() of detached inputs and "
                         "weights, and return what it gives. After an error: call zero_grad()")
        try:
            super()._begin_backward()
        except RuntimeError as error:
            if "autograd.grad" not in str(error):
                raise
            self._refuse("torch.autograd.grad() of parameters averages nothing: use backward(). "
                         "(In the backward of an autograd.Function take it of detached weights)")

    def _guard_refuse_compiled_autograd(self):
        if compiled_autograd.in_compiled_autograd_region:
            self._refuse("a backward by compiled autograd, which makes no callback at its end: "
                         "switch it off, as by torch._dynamo.config.compiled_autograd = False")

    def _end_backward(self):
        for p in self._guard_more_hooks:
            name = self._names[p]
            is_taken = p.grad is None and self._bucket_of[name] not in self._filled
            if name in self._came and (name in self._missing or is_taken):
                self._refuse(f"a hook that was set before wrapping has taken the gradient of "
                             f"{name} away, so it is not averaged: step after the backward")
        super()._end_backward()
        if self._averages:
            self._guard_local = {}
        elif self.shard_group is None:
            for name in self._came:
                gradient = self._holders[name].grad
                if gradient is not None:  # autograd may have left it undefined
                    self._guard_local[name] = weakref.ref(gradient)


def ids_of(named):
    """Of the parameters of [(name, parameter)]."""
    return list(map(id, [p for _, p in named]))


def has_parameter(optimizer, parameter):
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])


class NotAgain:
    """What a wrapper has instead of a list, for a wrapper around it: it raises when it is read, and
    not, as a property would, for whoever only asks for the wrapper's attributes."""

    def __init__(self, name):
        self.name = name

    def __contains__(self, name):
        return False

    def __iter__(self):
        raise RuntimeError(f"{self.name}: averages gradients itself, and must not be wrapped "
                           f"again, by torch's DDP or by a library's prepare(): give the library "
                           f"model.module, or only the optimizer and the data")


def has_closure(arguments, options):
    """Whether those of an optimizer's step have one, which will make a backward."""
    closures = [*arguments[1:], options.get("closure")]
    return any(closure is not None for closure in closures)


def fault_of_memory(t):
    """Why the elements of a parameter or a buffer cannot be sent and cut, or None: they have to lie
    in memory of its own."""
    kind = type(t).__name__
    if nn.parameter.is_lazy(t):
        return f"is a {kind}, without a shape yet: call the module's forward once before wrapping"
    if is_traceable_wrapper_subclass(t) or t.is_quantized:
        return (f"is a {kind} of dtype {t.dtype}, which keeps its values in other tensors: wrap "
                f"the module before they become that, or name it in the module's "
                f"_ddp_params_and_buffers_to_ignore, and use DDP")
    if t.layout is not torch.strided:
        return f"has the layout {t.layout}: make it dense before wrapping"
    if t.numel() > 0 and not t.is_meta and t.data_ptr() == 0:
        return f"is a {kind} without memory: it was freed, or its values lie in other tensors"
    if torch._debug_has_internal_overlap(t) == 1:
        return "has several elements in one place, as of expand(): clone() it before wrapping"
    return None

# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Guards of all wrappers. Those of stages are in shard_guards.py.

There are many ways in which a script can compute something else than its author thinks, such as a
step with what no_sync() has held back. Each is done right, where few lines can do that. Otherwise
it raises RuntimeError, in a line that says what to do. A script without mistakes gets the same bits
without guards. Attributes of its own begin with `_guard_`, as all layers share one object.
"""

import collections
import dataclasses
import itertools
import math
import numbers
import weakref
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddp import Reducer
from dropin.ranks import named_modules
from zero import in_backward

IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"  # where torch notes them at a parameter
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


class Guards:
    """With guards: a module is wrapped once, has tensors that can be sent, and keeps the parameters
    that it had when it was wrapped. A backward inside another, or after one whose end never came,
    is refused. An optimizer does not step, and nothing is clipped, with what no_sync() has left:
    this rank's own.

    What scripts do between two averaged backwards must be the same on all ranks: shapes and dtypes
    of buffers, steps and their rates, whether gradients are zeroed. If it is not, all ranks raise
    in the next averaged backward (on an accelerator: after it)."""

    _guard_hint = ""  # what else to say of an attribute of the module
    _may_step = False  # in DDP no_sync(may_step=True) sets it

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
        super()._watch(buckets)
        self._hook(register_optimizer_step_pre_hook, type(self)._guard_before_step)
        self._hook(register_optimizer_step_post_hook, type(self)._guard_after_any_step)
        # swap_tensors(), by which load_state_dict() may work, would lose the hooks. It raises where
        # there is a weak reference.
        self._guard_not_to_swap = [weakref.ref(p) for p in self._names]
        wrapped = self._named("parameters")
        self._guard_wrapped = wrapped  # [(name, parameter)]
        self._guard_ids = ids_of(wrapped)
        # {what an optimizer has of a parameter: its name}
        self._guard_names = {}
        for bucket in buckets:
            holders = bucket.parameters if self.shard_group is None else bucket.shards
            self._guard_names.update(zip(holders, bucket.names))
        self._guard_kinds = {name: (p.dtype, p.device) for name, p in self._holders.items()}
        self._guard_filled = [p for p in self._holders.values() if p.nbytes > 0]
        self._guard_local = {}  # {name: a weak reference to the `.grad` that no_sync() has left}
        self._guard_log = Log(named_modules(self.module))
        buffers = self._named("buffers")
        self._guard_log.agreed = layout_of(buffers)
        self._guard_log.memory = memory_of(buffers)

    @torch.compiler.disable
    def _prepare_forward(self):
        self._guard_log.stepping = None  # a step has raised, or this forward is its closure's
        self._guard_end_of_backward("a forward")
        self._guard_parameters()
        super()._prepare_forward()

    def _guard_parameters(self):
        """The module has the parameters with which it was wrapped, and each trained one has one
        hook, which is ours. Takes 1 us per parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # else an Absent answers by Python
            self._guard_each_parameter(self._guard_structure(in_forward=True))

    def _guard_structure(self, in_forward=False):
        """-> [(name, parameter)] of the module, which has those with which it was wrapped."""
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
            hooks = p._post_accumulate_grad_hooks
            if p.requires_grad and len(hooks or ()) != 1 and id(p) in self._guard_ids:
                if hooks:
                    self._refuse(f"{name} got a post-accumulate hook after wrapping, or was "
                                 f"wrapped twice: the hook would see what is not averaged yet")
                self._refuse(f"{name} was unfrozen after wrapping, so its gradient would not be "
                             f"averaged: wrap last (what is frozen after wrapping may be unfrozen)")
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
        self._guard_end_of_backward(f"a step of {name}")
        if not has_closure(arguments, options):  # which may make the averaged backward
            self._guard_refuse_local(f"{name} steps", optimizer)
        log = self._guard_log
        if log.stepping is None:  # else it is one that an optimizer around has made
            log.stepping = weakref.ref(optimizer)
            if not self._may_step:
                log.note_step(optimizer)
            is_idle = all(p.grad is None for p in self._guard_filled)
            if self.shard_group is None and is_idle:
                log.n_idle += 1

    @torch.compiler.disable
    def _guard_after_any_step(self, optimizer, arguments, options):
        """Hook of all optimizers, after a step."""
        log = self._guard_log
        if log.stepping is not None and log.stepping() is optimizer:
            log.stepping = None

    def _guard_is_ours(self, optimizer):
        """Whether it has any of our parameters."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in self._guard_names:
                    return True
        return False

    @torch.compiler.disable
    def clip_grad_norm_(self, max_norm):
        self._guard_refuse_local("clip_grad_norm_() comes")
        self._guard_log.steps.append((f"clip_grad_norm_({float(max_norm)})", []))
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
            self._refuse("a backward inside another, or after one that raised: pass "
                         "use_reentrant=False to checkpoint(), or call zero_grad() after the error")
        self._guard_note_gradients()
        try:
            super()._begin_backward()
        except RuntimeError as error:
            if "autograd.grad" not in str(error):
                raise
            self._refuse("torch.autograd.grad() of parameters averages nothing: use backward()")

    def _guard_refuse_compiled_autograd(self):
        if compiled_autograd.in_compiled_autograd_region:
            self._refuse("a backward by compiled autograd, which makes no callback at its end: "
                         "switch it off, as by torch._dynamo.config.compiled_autograd = False")

    def _end_backward(self):
        try:
            super()._end_backward()
        finally:  # it may raise after it has given gradients
            self._guard_log.n_given = self._guard_n_gradients()
        if self._averages:
            self._guard_local = {}
        elif self.shard_group is None:
            for name in self._came:
                gradient = self._holders[name].grad
                if gradient is not None:  # autograd may have left it undefined
                    self._guard_local[name] = weakref.ref(gradient)

    # ---- do ranks average what belongs together?

    def _history(self):
        """Three texts of lines: what was done with backwards, buffers, and steps."""
        log = self._guard_log
        history = super()._history()
        history["backwards"] += (f", {log.n_idle} steps without a gradient, "
                                 f"gradient_divide_factor {self.gradient_divide_factor}")
        history["buffers"] = self._guard_text_of_buffers()
        if log.layout != log.agreed:
            log.new_memory = memory_of(self._named("buffers", log.modules))
        history["steps"] = log.text_of_steps(self._guard_names)
        log.begin_anew()
        return history

    def _compare_histories(self, histories):
        """What comes first is the cause of what comes after it."""
        for what in ("backwards", "buffers", "steps"):
            texts = [history[what] for history in histories]
            rank = first_that_differs(texts)
            if rank is None:
                continue
            if what == "buffers":
                self._refuse(f"ranks have other buffers now: {difference(texts, rank)}. Nothing "
                             f"was written over them. Make them alike on all ranks, or pass "
                             f"broadcast_buffers=False")
            if what == "steps":
                self._guard_compare_steps(difference(texts, rank))
                return
            break
        super()._compare_histories(histories)

    # ---- buffers that have changed since ranks compared them
    #
    # Rank 0's message would be written over whatever another rank has there, or would be of another
    # length. To compare before it costs a message. So ranks compare with the count of the next
    # backward. Until then what was there before takes part in the broadcast: the old memory.

    def _buffers_to_send(self):
        log = self._guard_log
        named = self._named("buffers", log.modules)
        layout = layout_of(named)
        if layout != log.agreed:
            now = dict(zip(layout, named))
            named = []
            for what in log.agreed:
                name = what[0]
                # A copy: if a script has resized a buffer, the old memory is the new one's.
                named.append(now[what] if what in now else (name, log.memory[name].clone()))
        log.memory = memory_of(named)
        return named

    def _guard_text_of_buffers(self):
        """A line for each of those that are sent, in this order. It is kept until they change."""
        log, layout = self._guard_log, []
        if self.forward_sync_buffers:
            layout = layout_of(self._named("buffers", log.modules))
        if layout != log.layout:
            lines = [" ".join(map(str, what)) for what in layout]
            log.layout, log.text_of_layout = layout, "\n".join(lines)
        return log.text_of_layout

    def _check_counts(self):
        is_new = self._unread_counts is not None
        super()._check_counts()
        if is_new:
            log = self._guard_log
            log.agreed = log.counted_layout
            log.memory |= log.new_memory
            log.new_memory = {}

    # ---- steps that differ between ranks

    def _guard_note_gradients(self):
        """At the begin of a backward: what has become of the means of the one before? None, which
        is not compared: if there were none here, if some are kept, or if no_sync() has left others.
        """
        log = self._guard_log
        log.gradients = None
        if log.n_given > 0 and not self._guard_holds_back():
            words = {0: "zeroed gradients", log.n_given: "kept gradients"}
            log.gradients = words.get(self._guard_n_gradients())

    def _guard_holds_back(self):
        """Whether no_sync() has left gradients."""
        return len(self._guard_local) > 0

    def _guard_n_gradients(self):
        """How many there are. (An optimizer may lack empty shards, and leave theirs.)"""
        return len([None for p in self._guard_filled if p.grad is not None])

    def _guard_compare_steps(self, difference):
        """Raise if the steps that the last count has compared differ in a way that matters.
        difference: how they differ. A collective."""
        steps, gradients = self._guard_log.counted
        own = self._guard_record(steps)
        if gradients is not None:
            own["whether there are gradients"] = gradients
        records = [None] * self.group.size()
        with self._telling("wait", "compare", "steps"):
            dist.all_gather_object(records, own, group=self.group)
        first = {}  # {name: what the first rank that knows it has recorded}
        for record in records:
            for name, value in record.items():
                if first.setdefault(name, value) != value:
                    self._refuse(f"ranks have gone different ways since the backward before, which "
                                 f"matters for {name}: {difference}. Decide on steps, rates and "
                                 f"their number by what all ranks know, such as a loss that was "
                                 f"reduced over them")

    def _guard_record(self, steps):
        """DDP: {name: a checksum of the parameter's values}. One rank may update what it then sends
        to the others."""
        record = {}
        for name, p in self._named("parameters"):
            values = p.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
            record[name] = zlib.crc32(values.numpy())
        return record


def ids_of(named):
    """Of the parameters of [(name, parameter)]."""
    return list(map(id, [p for _, p in named]))


def has_parameter(optimizer, parameter):
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])


def numbers_of(group, defaults):
    """Of an optimizer's group, what its defaults have, too: ["lr = 0.1", ...]. (What an accelerator
    holds is left out: reading it would make the CPU wait.)"""
    lines = []
    for name in defaults:
        value = group.get(name)
        if isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1:
            value = value.item()
        parts = value if isinstance(value, tuple | list) else [value]
        if all(isinstance(part, numbers.Real) for part in parts):
            as_floats = [float(part) + 0.0 for part in parts]  # one text for 0, 0.0, -0.0 and False
            lines.append(f"{name} = {', '.join(map(str, as_floats))}")
    return lines


def first_that_differs(texts):
    """The first rank whose text is not rank 0's, or None."""
    for rank, text in enumerate(texts):
        if text != texts[0]:
            return rank
    return None


def difference(texts, rank):
    """The first line in which texts of rank 0 and of rank differ, as words."""
    lines = [texts[0].splitlines(), texts[rank].splitlines()]
    for of_0, of_rank in itertools.zip_longest(*lines, fillvalue="nothing"):
        if of_0 != of_rank:
            return f"rank 0 has {of_0}, and rank {rank} has {of_rank}"


def new_steps():
    """Room for the last 100: there may be no backward for long."""
    return collections.deque(maxlen=100)


@dataclasses.dataclass
class Log:
    """What a script has done with a wrapper on this rank, by which ranks see whether they do the
    same. (These are no attributes of the wrapper itself: to set one of a Module takes 5 us.)

        modules   [(name, module)] when the last forward began
        n_idle    steps of DDP without any gradient
        stepping  a weak reference to the optimizer that steps, or None
        n_given   how many gradients the last backward has left, but for those of empty shards

    Since the last count, and of what that has compared:

        steps     [(kind, groups)]: the kind of optimizer, and of each of its groups (its numbers in
                  lines, its parameters); of a call of clip_grad_norm_, that and no groups
        gradients whether those of before were zeroed, in words; or None, which is not compared
        counted   (steps, gradients) of the last count

    Of buffers:

        layout, text_of_layout   `layout_of` them when they were looked at last, also in lines
        counted_layout           when ranks have counted last
        agreed    such a layout, which all ranks have found to be theirs
        memory    {name: what was there when it was sent last, or when ranks agreed on it}
        new_memory               that of a layout on which ranks have yet to agree
    """
    modules: list
    n_idle: int = 0
    stepping: weakref.ref | None = None
    n_given: int = 0
    steps: collections.deque = dataclasses.field(default_factory=new_steps)
    gradients: str | None = None
    counted: tuple = ((), None)
    layout: list = dataclasses.field(default_factory=list)
    text_of_layout: str = ""
    counted_layout: list = dataclasses.field(default_factory=list)
    agreed: list = dataclasses.field(default_factory=list)
    memory: dict = dataclasses.field(default_factory=dict)
    new_memory: dict = dataclasses.field(default_factory=dict)

    def note_step(self, optimizer):
        groups = []
        for group in optimizer.param_groups:
            groups.append((numbers_of(group, optimizer.defaults), list(group["params"])))
        self.steps.append((type(optimizer).__name__, groups))

    def text_of_steps(self, names):
        """In lines. names: {parameter: its name}."""
        lines = [str(self.gradients)]
        for kind, groups in self.steps:
            lines.append(f"a step of {kind}" if groups else kind)
            for of_group, parameters in groups:
                if parameters:
                    first = names.get(parameters[0], "a parameter of another model")
                    lines.append(f"a step of {len(parameters)} parameters from {first} on")
                lines += of_group
        return "\n".join(lines)

    def begin_anew(self):
        """A count has begun, which compares all this."""
        self.counted, self.counted_layout = (self.steps, self.gradients), self.layout
        self.steps, self.gradients = new_steps(), None


def memory_of(named):
    """{name: another tensor of the memory that t has now} of buffers [(name, t)]."""
    return {name: t.detach() for name, t in named}


def layout_of(named):
    """Of buffers [(name, t)] what must be alike where they are sent."""
    return [(name, t.dtype, t.shape, None if t.is_sparse else t.stride()) for name, t in named]


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

# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Guards of ddp.py and zero.py: what a script does around a wrapper is right, or it is refused.

    class DDP(Guards, ..., PlainDDP)              # the last lines of ddp.py
    class Zero3(ShardGuards, ..., PlainZero3)     # and, more or less, of zero.py

Data parallelism and ZeRO are complete without this file. But there are many ways in which a script
can compute something else than its author thinks, such as the norm of a gradient of which a rank
has only a part. Each is done right here, where few lines can do that. Otherwise it raises
RuntimeError, in a line that says what to do.

How it works: each method does something before or after the method of the same name in ddp.py or
zero.py, which it calls by super(). A script without mistakes gets the same bits without guards.
(One that gives a shard other memory, as by `p.data = p.data - lr * p.grad`, needs them: they take
the new values over, which the module would never see.)
Names of attributes begin with `_guard_`, as both share one object. Nothing of ours is imported: a
slot, a bucket and a unit are those of ddp.py and zero.py.

In this order: guards of all wrappers; what a script may do with a parameter (`Absent`) and with a
gradient (`Part`) of a stage; guards of stages.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import numbers
import sys
import warnings
import weakref
import zlib

import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only


# -------------------------------------------------------------------------------------------------
# guards of all wrappers

IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"  # where torch notes them at a parameter
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


class Guards:
    """With guards: a module is wrapped once, has tensors that can be sent, and keeps the parameters
    that it had when it was wrapped. A gradient that a script keeps, the tensor itself, stays as it
    is. A backward inside another, or after one whose end never came, is refused; so is one of DDP
    that is averaged with another step's, since one rank has left a forward without a backward. An
    optimizer does not step, and nothing is clipped, with what no_sync() has left: this rank's own.

    What scripts do between two averaged backwards must be the same on all ranks: shapes and dtypes
    of buffers, steps and their rates, whether gradients are zeroed. If it is not, all ranks raise
    in the next averaged backward (on an accelerator: after it)."""

    _guard_hint = ""  # what else to say of an attribute of the module
    _may_step = False  # in DDP no_sync(may_step=True) sets it
    _guard_local_hint = (". If this rank's own are meant, as in local SGD, or the script averages "
                         "them, make that backward in `with model.no_sync(may_step=True)`")

    # ---- the module

    def _agree_on_module(self):
        # What all of our wrappers have in common.
        ours = tuple(kind for kind in type(self).__mro__ if kind.__name__ == "Reducer")
        for name, m in self._guard_modules():
            # By name, since nobody wants to import FSDP for this.
            kinds = {kind.__name__ for kind in type(m).__mro__}
            if isinstance(m, ours) or kinds & WRAPPERS:
                where = f"holds at {name}" if name else "is"
                self._refuse(f"the module {where} a {type(m).__name__}, a wrapper which averages "
                             f"gradients itself: wrap the plain module, once")
            # With max_norm a lookup scales the rows that this rank's batch uses: then ranks differ.
            is_lookup = isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            if is_lookup and m.max_norm is not None and self.world_size > 1:
                self._refuse(f"{name}: max_norm={m.max_norm} changes the weights of each rank by "
                             f"its own batch, in the forward: pass max_norm=None")
        for name, t in self._named("parameters") + self._named("buffers"):
            fault = fault_of_memory(t)
            if fault is not None:
                self._refuse(f"{name} {fault}")
        super()._agree_on_module()

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

    def _track(self, buckets, frozen=()):
        super()._track(buckets, frozen)
        self._hook_steps(register_optimizer_step_pre_hook, self._guard_before_step)
        self._hook_steps(register_optimizer_step_post_hook, self._guard_after_any_step)
        # swap_tensors(), by which load_state_dict() may work, would lose the hooks. It raises where
        # there is a weak reference.
        self._guard_not_to_swap = [weakref.ref(slot.parameter) for slot in self._trained]
        wrapped = self._named("parameters")
        self._guard_wrapped = wrapped  # [(name, parameter)]
        self._guard_ids = ids_of(wrapped)
        self._guard_frozen = {p for _, p in wrapped if not p.requires_grad}
        self._guard_given = {}  # {slot: a weak reference to the `.grad` that was given}
        self._guard_names = {slot.shard: slot.fqn for slot in self._slots.values()}
        self._guard_filled = [slot for slot in self._trained if slot.shard.nbytes > 0]
        self._guard_log = Log(self._named_modules())
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
        self._guard_log.modules = self._named_modules()
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
            elif isinstance(p, torch.nn.Parameter) and not (only_evaluates and name in of_name):
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
            for slot in self._trained:
                p, buffer = slot.parameter, slot.bucket.gradients
                if p.dtype != buffer.dtype or p.device != buffer.device:
                    self._refuse(f"{slot.fqn} has become {p.dtype} on {p.device}: cast and move "
                                 f"the module before wrapping it")

    def _apply(self, *arguments, **options):
        """What .to() and the like do. One that changes nothing is right."""
        super()._apply(*arguments, **options)
        self._guard_parameters()
        return self

    def _refuse_optimizer_in_backward(self, name):
        self._refuse(f"{name} has an optimizer that steps in the backward, before gradients are "
                     f"averaged: make an optimizer of model.parameters()")

    # ---- a backward

    @torch.compiler.disable
    def zero_grad(self, set_to_none=True):
        if self._backward is not None:  # it has raised, so no forward has got all of one
            for signs in self._guard_log.forwards:
                signs.clear()
        super().zero_grad(set_to_none)

    def _guard_end_of_backward(self, what):
        if self._backward is not None and not in_backward():
            self._refuse(f"{what} comes after a backward whose end was never seen, or after one "
                         f"that raised: call the model's zero_grad() after an error, and do "
                         f"without engines that make no callbacks")

    def _guard_before_step(self, optimizer, arguments, options):
        """Hook of all optimizers, before a step."""
        if not self._guard_is_ours(optimizer):
            return
        name = type(optimizer).__name__
        self._guard_end_of_backward(f"a step of {name}")
        self._guard_refuse_local(f"{name} steps", optimizer)
        log = self._guard_log
        if log.stepping is None:  # else it is one that an optimizer around has made
            log.stepping = weakref.ref(optimizer)
            if not self._may_step:
                log.note_step(optimizer)
            is_idle = all(slot.shard.grad is None for slot in self._guard_filled)
            if self.shard_group is None and is_idle:
                log.n_idle += 1

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
        """Raise where no_sync() has left a gradient, of optimizer's parameters or of all."""
        if self._may_step:
            return
        if not any(bucket.unreduced for bucket in self._buckets):
            return  # as it is at most steps
        for slot in self._trained:
            is_held = slot in slot.bucket.unreduced and self._guard_is_held(slot)
            if is_held and (optimizer is None or has_parameter(optimizer, slot.shard)):
                self._refuse(f"{what} while no_sync() holds gradients back, such as that of "
                             f"{slot.fqn}, which is this rank's own: make the last backward "
                             f"before it outside of no_sync(){self._guard_local_hint}")

    def _guard_is_held(self, slot):
        """DDP: whether the gradient that no_sync() has left is still there, neither zeroed nor
        replaced by another tensor."""
        gradient, buffer = slot.shard.grad, slot.bucket.gradients
        if gradient is None or place_of(gradient)[0] != place_of(buffer)[0]:
            return False
        return bool(gradient.any())

    def set_gradient_divide_factor(self, factor):
        if not 0 < factor < math.inf:
            self._refuse(f"the gradient divide factor must be a number above 0, not {factor}")
        super().set_gradient_divide_factor(factor)

    def _prepare_for_backward(self, task):
        if compiled_autograd.in_compiled_autograd_region:
            self._refuse("a backward by compiled autograd, which makes no callback at its end: "
                         "switch it off, as by torch._dynamo.config.compiled_autograd = False")
        if task == -1:
            return  # a hook was called by hand
        if self._backward is not None:
            self._refuse("a backward inside another, or after one that raised: pass "
                         "use_reentrant=False to checkpoint(), or call zero_grad() after the error")
        self._guard_note_gradients()
        self._guard_take_marks()
        try:
            super()._prepare_for_backward(task)
        except RuntimeError as error:
            if "autograd.grad" not in str(error):
                raise
            self._refuse("torch.autograd.grad() of parameters averages nothing: use backward()")
        for slot, reference in self._guard_given.items():
            kept = reference()
            if kept is not None and kept is not slot.shard.grad:
                with torch._C.DisableTorchFunctionSubclass():
                    kept.data = kept.data.clone()  # this backward will write to the bucket

    def _guard_take_marks(self):  # a joint
        """Take away what guards have put at gradients."""

    def _mark_param_ready(self, slot, p):
        if p.grad is not None and p.grad.is_sparse:
            self._refuse(f"{slot.fqn} has a sparse gradient: pass sparse=False to its Embedding")
        is_first = not self._backward.came
        if is_first and torch.is_grad_enabled():  # as it is in a backward with create_graph=True
            self._refuse(f"{slot.fqn}: a mean over ranks cannot be differentiated, so there is no "
                         f"backward(create_graph=True): take torch.autograd.grad(loss, inputs, "
                         f"create_graph=True), and add a penalty to the loss")
        super()._mark_param_ready(slot, p)

    def _finalize_backward(self):
        try:
            super()._finalize_backward()
        finally:  # it may raise after it has given gradients
            for slot in self._trained:
                if slot.shard.grad is not None:
                    self._guard_given[slot] = weakref.ref(slot.shard.grad)
            self._guard_log.n_given = self._guard_n_gradients()

    # ---- DDP: do ranks average what belongs together?
    #
    # If one rank leaves out a backward, as where its loss is nan, its next one is averaged with an
    # earlier one of the others. So how many forwards got no backward is a part of the history that
    # ranks compare. (In stages a forward is a collective, so such a rank waits until it times out.)

    def forward(self, *inputs, **kwargs):
        output = super().forward(*inputs, **kwargs)
        self._guard_await_backward(output)
        return output

    @torch.compiler.disable
    def _guard_await_backward(self, output):
        """Note in a set, signs, when a backward comes through output. Forwards in no_sync() are
        left out, as they concern no other rank; so are those in eval(), which may be a look at
        some samples, without no_grad()."""
        is_ddp = self.shard_group is None
        is_counted = is_ddp and self.training and self.require_backward_grad_sync
        if not is_counted or not torch.is_grad_enabled() or in_backward() or in_functorch():
            return
        nodes = set()
        for t in tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                nodes.add(t.grad_fn)
                if t._is_view() and t._base.grad_fn is not None:
                    nodes.add(t._base.grad_fn)  # a write to t would replace t's own
        signs = set()
        for node in nodes:
            node.register_prehook(lambda gradients: signs.add("a backward"))
        if nodes:
            self._guard_log.forwards.append(signs)

    def _history(self):
        """Three texts of lines: what was done with backwards, buffers, and steps."""
        log = self._guard_log
        log.n_left += sum(not signs for signs in log.forwards)
        log.forwards.clear()
        history = super()._history()
        history["backwards"] += (f", {log.n_left} forwards without a backward, {log.n_idle} steps "
                                 f"without a gradient, gradient_divide_factor "
                                 f"{self.gradient_divide_factor}")
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
        if log.n_given > 0 and not any(bucket.unreduced for bucket in self._buckets):
            words = {0: "zeroed gradients", log.n_given: "kept gradients"}
            log.gradients = words.get(self._guard_n_gradients())

    def _guard_n_gradients(self):
        """How many there are. (An optimizer may lack empty shards, and leave theirs.)"""
        return len([None for slot in self._guard_filled if slot.shard.grad is not None])

    def _guard_compare_steps(self, difference):
        """Raise if the steps that the last count has compared differ in a way that matters.
        difference: how they differ. A collective."""
        steps, gradients = self._guard_log.counted
        own = self._guard_record(steps)
        if gradients is not None:
            own["whether there are gradients"] = gradients
        records = [None] * self.world_size
        with self._waiting("compare steps"):
            dist.all_gather_object(records, own, group=self.process_group)
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
        forwards  since the last averaged backward; of each a set, not empty if a backward came
        n_left    forwards that got no backward
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
    forwards: list = dataclasses.field(default_factory=list)
    n_left: int = 0
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


def in_backward():
    """Whether a backward is at work in this thread."""
    return torch._C._current_graph_task_id() != -1


def outside_functorch():
    """A context that leaves torch.func.jvp and the like: tensors that are made inside of these
    could not be used outside."""
    return temporarily_clear_interpreter_stack() if in_functorch() else contextlib.nullcontext()


def in_functorch():
    """Whether this is called inside torch.func.grad, jvp, vmap or the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def fault_of_memory(t):
    """Why the elements of a parameter or a buffer cannot be sent and cut, or None: they have to lie
    in memory of its own."""
    kind = type(t).__name__
    if torch.nn.parameter.is_lazy(t):
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


# -------------------------------------------------------------------------------------------------
# parameters and gradients of stages
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
    fill normal uniform bernoulli exponential zeros_like ones_like empty_like full_like rand_like
    randn_like
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
    normal_ uniform_ kaiming_uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_
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
class Watch:
    """What guards know of a parameter: its only attribute of ours, `p._watch`."""
    slot: object  # a Slot of ddp.py
    kind: type  # p's class while it may be read
    home: tuple  # where its shard is: `place_of`
    seen: tuple  # p's address, version and requires_grad when it could first be read
    mark: torch.Tensor | None = None  # the `.grad` that says: no_sync() holds a gradient back


def place_of(t):
    """(its piece of memory, its address there). The address alone is 0 for all empty tensors."""
    return t.untyped_storage()._cdata, t.data_ptr()


class Absent(torch.nn.Parameter):
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
        slot = p._watch.slot
        shard = slot.shard
        with torch._C.DisableTorchFunctionSubclass():
            if is_attribute and name == "grad" and not in_backward():
                return function(shard, *args[1:])
            if name == "requires_grad_" or name == "requires_grad" and is_set:
                function(shard, *args[1:], **kwargs)  # of both
            if name in FACTS or is_attribute and name not in VALUES:
                return function(*args, **kwargs)
            if is_written and not isinstance(args[1], cls):
                return shard.detach().copy_(slot.bucket.part_of(slot, args[1]))
        if name in CASTS:
            reason = "cast and move the module before wrapping it"
        raise RuntimeError(f"{name} of {slot.fqn}: {reason}")

    def __repr__(self):
        """For debuggers."""
        return f"Absent({self._watch.slot.fqn}, {tuple(self.shape)}, {self.dtype})"

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
          "full_state_dict(); an optimizer is made from the wrapper's parameters(), after wrapping")


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
        if name not in ALLOWED and not (name in ALLOWED_OF_TWO and is_of_two):
            refuse_part(name)
        if name == "where" and len(args) == 1:  # which is nonzero()
            refuse_part(name)
        if name in ("zero_", "_foreach_zero_"):  # zero_grad() drops what was held back
            tree_map_only(Held, Held.drop, args)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            if len(args) > 1 and type(result) is torch.Tensor:
                for t in args:  # else a product with a wider tensor repeats the part's elements
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
        is_init = "torch.nn.init" in (asks, getattr(function, "__module__", ""))
        with torch._C.DisableTorchFunctionSubclass():
            if name in BY_CHANCE or is_init and name in SHAPES:
                raise RuntimeError(f"{name} of {shard_in(args, kwargs)}: it would not get the "
                                   f"values of one process. Initialise the module before wrapping "
                                   f"it, or on the meta device by init_fn=")
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
            if isinstance(self, torch.nn.Parameter):
                return torch.nn.Parameter(values, self.requires_grad)
            return values

    def __deepcopy__(self, memo):
        memo[id(self)] = copy.deepcopy(self.plain())
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        plain = self.plain()
        vars(plain).update(vars(self))
        del plain._guard_cut
        return plain.__reduce_ex__(protocol)


class Shard(PartOfParameter, torch.nn.Parameter):
    pass


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


def version_of(unit):
    """A number that grows when a script or an optimizer changes a unit's shards in place."""
    version = 0
    with torch._C.DisableTorchFunctionSubclass():
        for bucket in unit.buckets:
            for slot in bucket.slots:
                version += slot.shard._version
    return version


def agree_on_inf(found_inf, group):
    """A GradScaler skips a step if it has found an inf: if one rank has, all must."""
    agreed = found_inf.to(dist.distributed_c10d._get_object_coll_device(group))
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
    found_inf.copy_(agreed)


# -------------------------------------------------------------------------------------------------
# guards of stages


class ShardGuards(Guards):
    """With guards: outside of a forward and its backward nobody reads a parameter of the module;
    what a script puts in the place of a shard, or writes to a parameter in a forward, is taken
    over; of a shard's `.grad` nobody takes a norm, nor anything else that needs all of it.

    Until the first step with it a shard warns if a script asks for its shape, and is not filled by
    chance, as torch.nn.init does it.

    Not noticed, and wrong: what a script computes of a shard, or of what an optimizer keeps for
    one, that is not element by element, such as a norm; the shape of a shard after a step; a view
    of a gradient that is kept over the next backward; writes into `.data` of shards between
    micro-steps, in stages 1 and 2, if the backward before was in no_sync(), or was said not to be
    the last; a value that a forward writes to a parameter, if ranks write different ones; a freeze,
    or zero_grad() of the module, between forward and backward; views of parameters that were made
    before wrapping; on meta, what `init_weights()` leaves out.
    """

    _guard_local_hint = ""
    _guard_hint = (". (get_state_dict() of torch.distributed.checkpoint knows no shards: save "
                   "state_dict() or full_state_dict())")

    def _agree_on_module(self):
        super()._agree_on_module()
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        for where, m in self._guard_modules():
            for name, p in m._parameters.items():
                fqn = f"{where}.{name}" if where else name
                if p is not None and fqn in ignored:
                    self._refuse(f"{fqn} is in the module's _ddp_params_and_buffers_to_ignore, so "
                                 f"ranks may have values of their own there, but a stage gives all "
                                 f"ranks those of rank 0: use DDP")

    def _build_buckets(self):
        self._refuse_shared_memory()
        on_meta = [p.is_meta for _, p in self._named("parameters")]
        if any(on_meta) and not all(on_meta) and self._init_fn == [None]:
            if hasattr(self.module, "init_weights"):
                self._refuse("some parameters are on meta, and init_weights() would write to the "
                             "others, too: pass init_fn, which is called for submodules")
        super()._build_buckets()

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

    def _add_hooks(self):
        super()._add_hooks()
        self._hook_steps(register_optimizer_step_pre_hook, self._guard_before_shards_step)
        # {unit: `version_of` it when it was last outdated}
        self._guard_versions = {unit: version_of(unit) for unit in self._units}
        self._guard_awaits_backward = False  # whether there was a forward since the last backward
        self._guard_hidden = set()  # units whose parameters are Absent
        self._guard_in_step = []  # parts that are plain tensors while an optimizer steps
        self._guard_freed = {}  # {memory that was of whole parameters: a weak reference to it}
        self._guard_part = type("Part", (Part,), {"shard_group": self.shard_group})
        self._guard_held = type("Held", (Held,), {"shard_group": self.shard_group})
        self._guard_checked = weakref.WeakSet()  # optimizers, by `_guard_check_state`
        self._guard_hooked = weakref.WeakSet()  # those that tell when they have loaded state
        self._guard_unasked = set()  # shards that are a `Shard`
        self._guard_marked = weakref.WeakSet()  # optimizers whose state_dict() says whose it is
        self._guard_of_module = set(self._slots)  # what no optimizer should have
        self._guard_whole = set()  # shards of uncut parameters
        self._guard_elsewhere = set()  # and those of them that other ranks own: empty here
        # Whose shards these are: the same for every wrapper that is cut in the same places.
        ranges = [slot.bucket.shard_range(slot) for slot in self._slots.values()]
        checksum = zlib.crc32(repr(ranges).encode())
        rank = dist.get_rank(self.shard_group)
        self._guard_place = f"rank {rank} of {self.shard_size}, {checksum:08x}"
        for p, slot in self._slots.items():
            if p in self._uncut:
                self._guard_whole.add(slot.shard)
                if slot.bucket.is_elsewhere(slot):
                    self._guard_elsewhere.add(slot.shard)
            seen = p.data_ptr(), p._version, p.requires_grad
            p._watch = Watch(slot, type(p), place_of(slot.shard), seen)
            if slot.shard.shape != slot.shape:
                cut = slot.bucket.shard_range(slot)
                slot.shard._guard_cut = tuple(slot.shape), tuple(slot.strides), cut
                slot.shard.__class__ = Shard
                self._guard_unasked.add(slot.shard)
        self._hide_all()
        self._hook_steps(register_optimizer_step_post_hook, self._guard_after_step)

    # ---- a parameter may be read, or is Absent

    def _hide_all(self):
        for unit in self._units:
            self._hide(unit)

    def _hide(self, unit):
        """Let nobody read unit's parameters."""
        if unit not in self._guard_hidden:
            self._take_back(unit)
            self._make_absent(unit)

    def _take_back(self, unit):
        """What a forward has written to unit's parameters goes to the shards; so does a freeze."""
        for p in unit.parameters:
            slot, value = p._watch.slot, p.data
            address, version, requires_grad = p._watch.seen
            if (value.data_ptr(), p._version) != (address, version):
                # .data: this is no change of version, so the graphs of this forward stay valid.
                slot.shard.data.copy_(slot.bucket.part_of(slot, value))
            if p.requires_grad != requires_grad:
                slot.shard.requires_grad = p.requires_grad

    def _make_absent(self, unit):
        for p in unit.parameters:
            p.__class__ = Absent
        self._guard_hidden.add(unit)

    def _wait_for_unshard(self, unit):
        """After it unit's parameters may be read."""
        is_to_be_shown = unit in self._guard_hidden and unit.is_current
        if not is_to_be_shown and not unit.gathers:
            return  # there is nothing to wait for, and nothing to show
        if is_to_be_shown:
            for p in unit.parameters:
                p.__class__ = p._watch.kind
        with outside_functorch():
            super()._wait_for_unshard(unit)
        if is_to_be_shown:
            for p in unit.parameters:
                p._watch.seen = p.data_ptr(), p._version, p.requires_grad
            self._guard_hidden.discard(unit)

    def _is_whole(self, unit):
        return super()._is_whole(unit) and unit not in self._guard_hidden

    def _unshard(self, unit):
        if not unit.is_current:
            with outside_functorch():
                self._outdate_if_written(unit)
                super()._unshard(unit)

    def _reshard(self, unit):
        """Stage 3 only: unit's parameters become Absent."""
        if not unit.is_current:
            return super()._reshard(unit)
        self._wait_for_unshard(unit)
        self._take_back(unit)
        for memory, reference in list(self._guard_freed.items()):
            if reference.expired():
                del self._guard_freed[memory]
        for bucket in unit.buckets:
            memory = bucket.unsharded.untyped_storage()
            self._guard_freed[memory._cdata] = StorageWeakRef(memory)
        super()._reshard(unit)
        self._make_absent(unit)
        # A backward through a graph that no note was taken of, such as a penalty's, has to raise.
        torch.autograd.graph.increment_version(unit.parameters)

    def _outdate_if_written(self, unit):
        """A script, too, may change unit's shards in place, without an optimizer."""
        if self._guard_versions[unit] != version_of(unit):
            self._outdate(unit)

    def _outdate(self, unit):
        self._hide(unit)  # before the rest, which would look like a script's write
        super()._outdate(unit)
        self._guard_versions[unit] = version_of(unit)

    # ---- shards

    def _check_shards(self):
        with torch._C.DisableTorchFunctionSubclass():  # else an Absent answers by Python
            for p, slot in self._slots.items():
                shard = slot.shard
                if p.requires_grad != shard.requires_grad:  # a script has frozen or unfrozen it
                    p.requires_grad = shard.requires_grad
                if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                    self._refuse(f"{slot.fqn}: a shard's hooks do not run: hook the module's")
                if IN_BACKWARD_OPTIMIZERS in shard.__dict__:
                    self._refuse_optimizer_in_backward(slot.fqn)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _bring_home(self):
        """A script may replace `.data` of shards, as in `p.data = p.data - lr * p.grad`, or
        exchange it, as in `p.data, e.data = e.data, p.data`. Then what was a shard's memory may be
        e's now. So the bucket moves to new memory, with the new values. That is asked of empty
        shards, too: all ranks must find the same."""
        moved = []
        with torch._C.DisableTorchFunctionSubclass():  # else a Shard answers by Python
            for bucket in self._all_buckets():
                is_there = True
                for slot in bucket.slots:
                    _, address = home = slot.parameter._watch.home
                    if slot.shard.data_ptr() != address:
                        is_there = False
                    elif address == 0 and place_of(slot.shard) != home:  # as of all empty tensors
                        is_there = False
                if not is_there:
                    moved.append(bucket)
        for bucket in moved:
            self._move(bucket)

    def _move(self, bucket):
        """Copy the shards' values to new memory, and the shards with them."""
        self._outdate(bucket.unit)  # in stage 3 nothing may be whole now
        values = torch.zeros(bucket.n, dtype=bucket.dtype, device=self._device)
        own = bucket.own_chunk(values)
        for slot in bucket.slots:
            bucket.shard_view(slot, own).copy_(slot.shard)
        self._keep_parameters(bucket, values)
        for slot in bucket.slots:
            slot.shard.data = bucket.shard_view(slot, bucket.sharded)
            slot.parameter._watch.home = place_of(slot.shard)
        # It was an update: to be gathered, also between micro-steps; and graphs before it are old.
        torch.autograd.graph.increment_version([slot.shard for slot in bucket.slots])

    # ---- forward

    @torch.compiler.disable
    def _prepare_forward(self):
        with outside_functorch():
            self._hide_all()
            self._bring_home()
            self._check_shards()
            super()._prepare_forward()

    def _begin_forward(self, units):
        if torch.is_grad_enabled():
            self._guard_awaits_backward = True
        with outside_functorch():
            for unit in self._units:
                self._outdate_if_written(unit)
            super()._begin_forward(units)

    def _post_forward(self, *arguments):
        with outside_functorch():
            super()._post_forward(*arguments)

    def _end_forward(self):
        super()._end_forward()
        if not torch.is_grad_enabled():
            self._hide_all()

    def _take_notes(self):
        """Stage 3 only."""
        is_possible = torch._C._autograd._saved_tensors_hooks_is_enabled()
        if torch.is_grad_enabled() and not is_possible:
            self._refuse("hooks of saved tensors are switched off, as in torch.func.grad, vjp and "
                         "jacrev, but stage 3 needs them: use Zero2, or torch.autograd.grad()")
        return super()._take_notes()

    def _bucket_of(self, t):
        """Stage 3 only: a checkpoint must not keep views of weights, which would be old."""
        bucket = super()._bucket_of(t)
        if bucket is None and self._backward is not None and t.layout is torch.strided:
            freed = self._guard_freed.get(t.untyped_storage()._cdata)
            if freed is not None and not freed.expired():
                self._refuse("a selective checkpoint has kept a view of a weight that was freed "
                             "since: let its policy recompute views, such as aten.t")
        return bucket

    # ---- backward: a shard's `.grad` is a Part, or Held

    def _prepare_for_backward(self, task):
        if self._guard_unasked and self._knows_order:  # a script steps by hand
            self._guard_end_of_questions()
        super()._prepare_for_backward(task)

    def _guard_take_marks(self):
        """Take the marks away. Where no_sync() held a gradient back and the mark is gone already,
        zero_grad() of an optimizer has dropped it. Where a loss over shards has added to the mark,
        by which its version is above 0, it is a gradient."""
        for slot in self._trained:
            watch, gradient = slot.parameter._watch, slot.shard.grad
            if gradient is None and not slot.bucket.unreduced:
                watch.mark = None
                continue  # as it is in most backwards
            if not isinstance(gradient, Held):
                slot.bucket.unreduced.discard(slot)
            is_mark = isinstance(gradient, Held) and gradient is watch.mark
            if is_mark and gradient._version == 0:
                slot.shard.grad = None
            elif isinstance(gradient, Part):
                gradient.__class__ = torch.Tensor
            watch.mark = None
        for unit in self._units:
            self._outdate_if_written(unit)

    def _finalize_backward(self):
        """Put the marks on. Outside of a forward nobody reads parameters now."""
        super()._finalize_backward()
        self._guard_awaits_backward = False
        for slot in self._trained:
            is_held = slot in slot.bucket.unreduced
            if is_held and slot.shard.grad is None:
                slot.parameter._watch.mark = torch.zeros_like(slot.shard)
                slot.shard.grad = slot.parameter._watch.mark
            if slot.shard.grad is not None:
                slot.shard.grad.__class__ = self._guard_held if is_held else self._guard_part
        if not self._in_forward:
            self._hide_all()

    # ---- the optimizer, and whole values

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
            slot = self._slots[early.pop()]
            self._refuse(f"this {name} has parameters of the module, such as {slot.fqn}: make the "
                         f"optimizer after wrapping, from the wrapper's parameters()")
        if given.isdisjoint(self._shards):
            return
        closures = [*arguments[1:], options.get("closure")]  # which will make a backward
        has_closure = any(closure is not None for closure in closures)
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
        if self._guard_awaits_backward and own and not has_closure and not has_gradient:
            self._refuse(f"{name} steps after no backward, or one with inputs=, which is not "
                         f"supported")
        self._hide_all()
        self._check_shards()
        for shard in self._guard_elsewhere:
            shard.grad = None  # a loss over the shards has left an empty one
        # What is whole may be looked at. On the rest torch's optimizers work element by element,
        # and a Part would cost them time. It is one again after the step.
        for shard in given:
            gradient = shard.grad
            if isinstance(gradient, Part) and (is_torchs or shard in self._guard_whole):
                gradient.__class__ = torch.Tensor
                self._guard_in_step.append(gradient)

    def _guard_elementwise(self, optimizer, given):
        """Refuse an optimizer that looks at more than single elements, by the name of its class, or
        of one from which it is derived. given: the set of its parameters."""
        name = type(optimizer).__name__
        names = {kind.__name__.lower() for kind in type(optimizer).__mro__}
        if getattr(optimizer, "is_elementwise", False):
            return
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

    def _guard_is_held(self, slot):
        return isinstance(slot.shard.grad, Held)  # which zero_grad() takes away

    def _guard_end_of_questions(self):
        """Let all shards be plain Parameters."""
        for shard in self._guard_unasked:
            shard.__class__ = torch.nn.Parameter
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

    def _guard_after_step(self, optimizer, arguments, options):
        """Hook of all optimizers, after a step: the gradients are parts again."""
        for gradient in self._guard_in_step:
            gradient.__class__ = self._guard_part
        self._guard_in_step.clear()

    def full_parameters(self):
        self._guard_structure()
        self._hide_all()
        self._bring_home()
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

    def load_state_dict(self, state_dict):
        self._hide_all()
        super().load_state_dict(state_dict)

    def load_full_state_dict(self, state_dict):
        self._hide_all()
        super().load_full_state_dict(state_dict)

    def _guard_record(self, steps):
        """{name: how these steps have changed the parameter}. A rank may leave an empty shard out:
        then it does not know."""
        changes = {shard: [] for shard in self._guard_names}
        for kind, groups in steps:
            for of_group, parameters in groups:
                for p in parameters:
                    if p in changes:
                        changes[p].append((kind, of_group))
        record = {"clipping": [kind for kind, groups in steps if not groups]}
        for shard, fact in changes.items():
            if fact or shard.nbytes > 0:
                record[self._guard_names[shard]] = fact
        return record

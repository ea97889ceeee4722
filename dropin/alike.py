# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Guards of all wrappers: ranks should do the same. See guards.py, too."""

import collections
import dataclasses
import functools
import itertools
import math
import numbers
import weakref

import torch
import torch.distributed as dist
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)

from ddp import is_wrapped
from dropin.ranks import as_known, named_modules, named_tensors


class AlikeGuards:
    """With guards: what scripts do between two averaged backwards is the same on all ranks: shapes
    and dtypes of buffers, steps and their rates, loads, whether gradients are zeroed; and so are
    values that ranks should have alike, which are compared now and then. If not, all ranks raise in
    an averaged backward (on an accelerator: after it)."""

    _may_step = False  # in DDP no_sync(may_step=True) sets it
    _comm_hook = None  # of DDP

    def _watch(self, buckets):
        super()._watch(buckets)
        self._hook(register_optimizer_step_pre_hook, type(self)._guard_note_step)
        self._hook(register_optimizer_step_post_hook, type(self)._guard_after_any_step)
        # {what an optimizer has of a parameter: its name}
        self._guard_names = {}
        for bucket in buckets:
            holders = bucket.parameters if self.shard_group is None else bucket.shards
            self._guard_names.update(zip(holders, bucket.names))
        self._guard_filled = [p for p in self._holders.values() if p.nbytes > 0]
        self._guard_seen = weakref.WeakKeyDictionary()  # {optimizer that has stepped: its groups}
        self._guard_own_kinds = set()  # names of those that have our parameters
        # [(kind of optimizer, a weak reference to a parameter of it that is in no wrapper)]
        self._guard_beside = []
        self._guard_reached = []  # [(the kind, such a parameter)] of the last backward
        self._guard_has_same_values = self.shard_group is None and self._init_sync
        self._guard_versions = [p._version for p in self._names]  # of DDP
        self._guard_log = Log(named_modules(self.module))
        buffers = self._named("buffers")
        self._guard_log.agreed = layout_of(buffers)
        self._guard_log.memory = memory_of(buffers)

    def _prepare_forward(self):
        self._guard_log.stepping = None  # a step has raised, or this forward is its closure's
        if self.shard_group is None and self._guard_new_versions():
            self._guard_log.note("a change of parameters without an optimizer")
        if self._guard_log.after_step and not self._guard_log.before_forward:
            self._guard_log.before_forward = self._guard_checksums()
        super()._prepare_forward()

    def _guard_new_versions(self):
        """DDP: note the versions of parameters -> whether they are new."""
        before = self._guard_versions
        self._guard_versions = [p._version for p in self._names]
        return self._guard_versions != before

    def _begin_backward(self):
        self._guard_note_gradients()
        super()._begin_backward()
        if self._averages and self._guard_beside:
            self._guard_find_reached()

    def _end_backward(self):
        try:
            super()._end_backward()
        finally:  # it may raise after it has given gradients
            self._guard_log.n_given = self._guard_n_gradients()
            self._guard_log.version_given = self._guard_version_of_gradients()

    # ---- what is noted

    def clip_grad_norm_(self, max_norm):
        self._guard_log.note(f"clip_grad_norm_({float(max_norm)})")
        return super().clip_grad_norm_(max_norm)

    @torch.compiler.disable
    def _guard_note_step(self, optimizer, arguments, options):
        """Hook of all optimizers, before a step."""
        if self._guard_seen.get(optimizer) != len(optimizer.param_groups):
            self._guard_see(optimizer)
        log = self._guard_log
        # Of an optimizer in another one, as in Lookahead, the outer step is noted.
        if log.stepping is None and self._guard_is_ours(optimizer):
            log.stepping = weakref.ref(optimizer)
            if not self._may_step:
                log.note_step(optimizer)
            if self._may_step or not self.require_backward_grad_sync:
                self._guard_has_same_values = False
            is_idle = all(p.grad is None for p in self._guard_filled)
            if self.shard_group is None and is_idle:
                log.n_idle += 1

    @torch.compiler.disable
    def _guard_after_any_step(self, optimizer, arguments, options):
        """Hook of all optimizers, after a step."""
        log = self._guard_log
        if log.stepping is not None and log.stepping() is optimizer:
            log.stepping = None
            if self.shard_group is None:
                self._guard_new_versions()
            if log.is_due(log.n_due):
                log.after_step, log.before_forward = self._guard_checksums(), {}
            if log.is_due(log.n_beside):
                log.beside = self._guard_checksums_beside()

    def _guard_is_ours(self, optimizer):
        """Whether it has any of our parameters."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in self._guard_names:
                    return True
        return False

    def _guard_see(self, optimizer):
        """Before the first step of an optimizer, be it of another model, or of a group that was
        added. Its state may have been loaded before that, and may be loaded later."""
        n_seen = self._guard_seen.get(optimizer, 0)
        self._guard_seen[optimizer] = len(optimizer.param_groups)
        kind = type(optimizer).__name__
        own, others = [], []
        for group in optimizer.param_groups[n_seen:]:
            for p in group["params"]:
                if p in self._guard_names:
                    own.append(p)
                else:
                    others.append(p)
        beside = [p for p in others if not is_of_a_wrapper(p)]
        if beside:
            of_module = {p for _, p in named_tensors(self.module, "parameters")}  # ignored ones
            alive = [entry for entry in self._guard_beside if entry[1]() is not None]
            new = [(kind, weakref.ref(p)) for p in beside if p not in of_module]
            self._guard_beside = alive + new
            self._guard_log.n_beside = 2
        if own and n_seen == 0:
            self._guard_own_kinds.add(kind)
            # What has no gradient may never have state.
            states = [p in optimizer.state for p in own if p.nbytes > 0 and p.grad is not None]
            self._guard_log.begun.append((kind, any(states) if states else None))
            note = functools.partial(self._guard_log.note_load, kind)
            optimizer.register_load_state_dict_post_hook(lambda _: note())

    # ---- what is compared

    def _history(self):
        """What was done with backwards, buffers and steps, in three texts of lines; checksums of
        what ranks should have alike, by name, if they were due."""
        log = self._guard_log
        history = super()._history()
        history["backwards"] += (f", {log.n_idle} steps without a gradient, "
                                 f"gradient_divide_factor {self.gradient_divide_factor}")
        history["buffers"] = self._guard_text_of_buffers()
        if log.layout != log.agreed:
            log.new_memory = memory_of(self._named("buffers", log.modules))
        history["steps"] = log.text_of_steps(self._guard_names)
        history["beside"] = log.beside
        history["values"] = [log.after_step, log.before_forward]
        log.begin_anew()
        return history

    def _compare_histories(self, histories):
        """What comes first is the cause of what comes after it."""
        differences = {}
        for what in histories[0]:
            facts = [history[what] for history in histories]
            rank = first_that_differs(facts)
            if rank is not None:
                differences[what] = difference(facts, rank)
        if "backwards" in differences or not differences:
            super()._compare_histories(histories)
        if "buffers" in differences:
            self._refuse(f"ranks have other buffers now: {differences['buffers']}. Nothing was "
                         f"written over them. Make them alike on all ranks, or pass "
                         f"broadcast_buffers=False")
        name = first_in_dispute([history["beside"] for history in histories])
        if name is not None:
            self._refuse(f"ranks have other values of {name}, trained beside this model: it is in "
                         f"no wrapper, so nobody averages its gradient. Wrap one module that has "
                         f"both. Or average `.grad` by hand before each step. If each rank is to "
                         f"have its own: p.is_local = True")
        if "steps" in differences:
            self._guard_compare(f"ranks have gone different ways since the backward before: "
                                f"{differences['steps']}. Decide on steps, rates and their number "
                                f"by what all ranks know, such as a loss that was reduced over "
                                f"them, and load on all")
        if "values" in differences:
            self._guard_compare_values([history["values"] for history in histories])

    # ---- values that ranks should have alike

    def _guard_checksums(self):
        """DDP: {name: a checksum of the parameter}, of trained ones; {} where ranks may have other
        values: with init_sync=False, after a step in no_sync(), and with a comm hook, which may
        average over some of the ranks."""
        if not self._guard_has_same_values or self._comm_hook is not None:
            return {}
        return checksums_of(list(self._holders.items()))

    def _guard_compare_values(self, values):
        """values: by rank, checksums after a step, and before the forward that came next. At one of
        these times ranks may differ: where one updates what it then sends to others, or a forward
        has noise."""
        disputed = None
        for at_a_time in zip(*values):
            if {} in at_a_time:  # some ranks have not had reason to look
                self._guard_compare(CHANGED_APART)
                return
            disputed = first_in_dispute(at_a_time)
            if disputed is None:
                return
        self._refuse(f"ranks differ in {disputed}: {CHANGED_APART}")

    def _guard_find_reached(self):
        """Parameters in no wrapper that an optimizer has, and that this backward reaches, such as
        those of a loss: their `.grad` is this rank's own."""
        self._guard_reached = []
        for kind, reference in self._guard_beside:
            p = reference()
            if p is not None and p.requires_grad and not getattr(p, "is_local", False):
                node = torch.autograd.graph.get_gradient_edge(p).node
                if torch._C._will_engine_execute_node(node):
                    self._guard_reached.append((kind, p))

    def _guard_checksums_beside(self):
        """{words: sorted checksums} of them, since ranks may have them in another order. Words say
        how many: ranks that have another number are not compared."""
        checksums = {}
        for kind, p in self._guard_reached:
            checksums.setdefault((kind, tuple(p.shape)), []).append(checksum(p).item())
        named = {}
        for (kind, shape), those in checksums.items():
            named[f"{len(those)} parameter(s) of {kind} of shape {shape}"] = sorted(those)
        return named

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
        before, log.versions = log.versions, {name: t._version for name, t in named}
        # Modules of which own forwards have changed a buffer. (Some changes leave no trace.)
        changed = {name.rpartition(".")[0] for name, version in log.versions.items()
                   if version != before.get(name)}
        if changed and self._guard_adds_up():
            # In place of their buffers copies are overwritten.
            named = [(name, t.clone() if name.rpartition(".")[0] in changed else t)
                     for name, t in named]
        return named

    def _guard_adds_up(self):
        """Whether the next backward will add to means: nothing that is noted has come after them,
        such as a step, and they are as they were. Then this rank keeps what its forwards add to
        buffers, such as counts; rank 0's come after the step."""
        log = self._guard_log
        version = self._guard_version_of_gradients()
        return version is not None and version == log.version_given and not log.steps

    def _guard_version_of_gradients(self):
        """Of the first one; None if there is none."""
        for p in self._guard_filled:
            if p.grad is not None:
                return id(p.grad), p.grad._version
        return None

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

    def _guard_compare(self, why):
        """Raise if what the last count has compared differs in a way that matters. A collective."""
        steps, gradients, begun, loads = self._guard_log.counted
        own = self._guard_record(steps)
        if gradients is not None:
            own["whether there are gradients"] = gradients
        if self.shard_group is not None:
            for kind, has_state in begun:
                if has_state is not None:
                    own[f"the state of {kind} before its first step"] = has_state
            for kind in self._guard_own_kinds:  # a rank may have no shard in one of that kind
                own[f"loads of the state of {kind}"] = loads.get(kind, 0)
        records = [None] * self.group.size()
        with self._telling("wait", "compare", "steps"):
            dist.all_gather_object(records, own, group=self.group)
        name = first_in_dispute(records)
        if name is not None:
            self._refuse(f"ranks differ in {name}: {why}")

    def _guard_record(self, steps):
        """DDP: checksums, also of frozen parameters. One rank may update what it then sends to the
        others."""
        if not self._guard_has_same_values or self._comm_hook is not None:
            return {}
        return checksums_of(self._named("parameters"))


CHANGED_APART = ("something has changed it on one rank, or otherwise there, such as a load, or an "
                 "optimizer that draws random numbers. Do it on all ranks alike")


def is_of_a_wrapper(p):
    """One of ours, or torch's FSDP. (torch's DDP leaves no mark, but mostly values that are alike.)
    """
    is_fsdps = hasattr(p, "to_local") or type(p).__name__ == "FlatParameter"
    return is_wrapped(p) or hasattr(p, "whole_shape") or is_fsdps


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


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size


def checksums_of(named):
    """{name: a checksum} of [(name, tensor)] on one device, which is waited for once."""
    sums = [checksum(t) for _, t in named]
    values = torch.stack(sums).tolist() if sums else []
    return dict(zip([name for name, _ in named], values))


def checksum(t):
    """Of its bits, seen as integers, each in its place: as a square of which the sums of rows and
    of columns are numbered, and a rest."""
    t = as_known(t.detach())
    integers = t.contiguous().view(INTEGERS[t.itemsize]).view(-1)
    side = math.isqrt(len(integers))
    square = integers[:side * side].view(side, side)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for factor, sums in ((1, square.sum(0)), (3, square.sum(1)), (5, integers[side * side:])):
        places = torch.arange(1, len(sums) + 1, device=t.device)
        total += factor * (sums * places).sum()
    return total


def first_in_dispute(records):
    """The first name that has other values in two of these dictionaries, or None."""
    first = {}
    for record in records:
        for name, value in record.items():
            if first.setdefault(name, value) != value:
                return name
    return None


def first_that_differs(facts):
    """The first rank whose fact is not rank 0's, or None."""
    for rank, fact in enumerate(facts):
        if fact != facts[0]:
            return rank
    return None


def difference(texts, rank):
    """The first line in which texts of rank 0 and of rank differ, as words."""
    lines = [str(texts[0]).splitlines(), str(texts[rank]).splitlines()]
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
        version_given            and the version of the first one
        n_counts  how often ranks have compared all this
        n_due     for how many counts to come values are compared out of turn
        n_beside  as n_due, of parameters that are trained beside

    Since the last count, and of what that has compared:

        steps     [(kind, groups)]: the kind of optimizer, and of each of its groups (its numbers in
                  lines, its parameters); of what is no step, such as a load, that and no groups
        begun     [(kind, whether it had state then)] of optimizers that have stepped for the first
                  time; of one with empty shards alone nobody knows: None
        loads     {kind of optimizer: how often it has loaded state}
        gradients whether those of before were zeroed, in words; or None, which is not compared
        after_step, before_forward, beside   checksums of DDP's parameters, if they were due: after
                  a step, before the forward that came next; and of those beside
        counted   (steps, gradients, begun, loads) of the last count

    Of buffers:

        layout, text_of_layout   `layout_of` them when they were looked at last, also in lines
        counted_layout           when ranks have counted last
        agreed    such a layout, which all ranks have found to be theirs
        memory    {name: what was there when it was sent last, or when ranks agreed on it}
        new_memory               that of a layout on which ranks have yet to agree
        versions  {name: the buffer's version} when it was sent last
    """
    modules: list
    n_idle: int = 0
    stepping: weakref.ref | None = None
    n_given: int = 0
    version_given: tuple | None = None
    n_counts: int = 0
    n_due: int = 0
    n_beside: int = 0
    steps: collections.deque = dataclasses.field(default_factory=new_steps)
    begun: list = dataclasses.field(default_factory=list)
    loads: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    gradients: str | None = None
    after_step: dict = dataclasses.field(default_factory=dict)
    before_forward: dict = dataclasses.field(default_factory=dict)
    beside: dict = dataclasses.field(default_factory=dict)
    counted: tuple = ((), None, (), {})
    layout: list = dataclasses.field(default_factory=list)
    text_of_layout: str = ""
    counted_layout: list = dataclasses.field(default_factory=list)
    agreed: list = dataclasses.field(default_factory=list)
    memory: dict = dataclasses.field(default_factory=dict)
    new_memory: dict = dataclasses.field(default_factory=dict)
    versions: dict = dataclasses.field(default_factory=dict)

    def note(self, what):
        """What is no step, once since the last count."""
        if (what, []) not in self.steps:
            self.steps.append((what, []))

    def note_load(self, kind):
        """What it leads to is there after the next step."""
        self.loads[kind] += 1
        self.n_due = 2

    def is_due(self, n_out_of_turn):
        """Whether the next count compares values. Often at first, where mistakes show, and rarely
        later, as all parameters are read for it."""
        n = self.n_counts + 1
        return n_out_of_turn > 0 or n in (2, 3, 8, 16, 32) or n % 64 == 0

    def note_step(self, optimizer):
        groups = []
        for group in optimizer.param_groups:
            groups.append((numbers_of(group, optimizer.defaults), list(group["params"])))
        self.steps.append((type(optimizer).__name__, groups))

    def text_of_steps(self, names):
        """In lines. names: {parameter: its name}."""
        lines = []
        for kind, groups in self.steps:
            lines.append(f"a step of {kind}" if groups else kind)
            for of_group, parameters in groups:
                if parameters:
                    first = names.get(parameters[0], "a parameter of another model")
                    lines.append(f"a step of {len(parameters)} parameters from {first} on")
                lines += of_group
        for kind, had_state in self.begun:
            lines.append(f"a first step of {kind}, whose state was there before: {had_state}")
        for kind, n in self.loads.items():
            lines.append(f"{n} load(s) of the state of {kind}")
        lines.append(str(self.gradients))  # the last one, as it may differ where that is right
        return "\n".join(lines)

    def begin_anew(self):
        """A count has begun, which compares all this."""
        self.counted = self.steps, self.gradients, self.begun, self.loads
        self.counted_layout = self.layout
        self.steps, self.gradients, self.begun = new_steps(), None, []
        self.loads = collections.Counter()
        self.after_step, self.before_forward, self.beside = {}, {}, {}
        self.n_counts += 1
        self.n_due = max(0, self.n_due - 1)
        self.n_beside = max(0, self.n_beside - 1)


def memory_of(named):
    """{name: another tensor of the memory that t has now} of buffers [(name, t)]."""
    return {name: t.detach() for name, t in named}


def layout_of(named):
    """Of buffers [(name, t)] what must be alike where they are sent."""
    return [(name, t.dtype, t.shape, None if t.is_sparse else t.stride()) for name, t in named]

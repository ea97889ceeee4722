# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Ranks that differ: they use other parameters, skip units, have buffers, several wrappers, errors.

`UnevenRanks` is for DDP and the stages, `UnevenForwards` for the stages, `UnevenOrder` for stage 3.
They are layers: see __init__.py.
"""

import functools
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero import in_backward

# -------------------------------------------------------------------------------------------------
# all wrappers


class UnevenRanks:
    """Ranks need not use the same parameters, nor all of them, and may wrap several modules; their
    buffers are rank 0's; a backward may raise, and then zero_grad() of the wrapper is called.

    A rank that has no gradient of a parameter sends zeros. One that no rank has used keeps
    `grad is None`. So ranks count by how many each is used: one all-reduce of a number for each,
    and of one more, by which they see whether they average the same backwards.

        _accumulate_grad  {name: the node of the graph that adds to `.grad`}: autograd can tell
                          whether a backward will reach it. It would make another one for each
                          backward if nobody kept it
        _unread_counts    (a `Count`, own history), or None

    Of the backward that is under way:

        _is_under_way     it has begun, and not ended; between backwards: the last one has raised
        _filled           buckets whose gradients have been moved together
        _came             names of the parameters whose gradient has come
        _missing          {name: whether there is nothing to which a mean could be added}, of those
                          that have no gradient on this rank
    """

    find_unused_parameters = True
    forward_sync_buffers = True  # whether forwards begin with rank 0's buffers
    _sends_buffers_at_first = True  # whether training does
    _init_sync = True
    _buffers_are_due = True  # whether the next forward gets them
    _unread_counts = None
    _is_under_way = False
    _compared = ()  # options, as texts

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.group

    # ---- modules and buffers

    def _named(self, kind, modules=None):
        """`named_tensors` of the module, but not those that torch's DDP is told to ignore."""
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        named = named_tensors(self.module, kind, modules)
        return [(name, t) for name, t in named if name not in ignored]

    def _check_module(self, options):
        """Raise on every rank, naming the first difference, where ranks wrap different modules. Get
        rank 0's number of this wrapper, which tells it, and its messages, from others."""
        self._names = first_names(self._named("parameters"))
        if not self._names:
            self._refuse("the module has no parameters")
        self._number, self.exposed_s = 0, 0.0
        if not self._init_sync:
            return
        facts = [type(self).__name__, *self._compared, f"{self.find_unused_parameters=}",
                 f"{self.forward_sync_buffers=}"]
        sent = self._named("parameters")
        if self._sends_buffers_at_first:
            sent += self._named("buffers")
        for name, t in sent:
            facts.append(f"{name}: {tuple(t.shape)}, strides {t.stride()}, {t.dtype}, "
                         f"requires_grad={t.requires_grad}")
        self._check_equal(facts)
        # From an id, as no two living objects have the same. From 2**30 on, as a small number is
        # pickled to fewer bytes, and what is sent should not vary.
        number = [2**30 + id(self) // 16 % 2**30]
        with self._telling("wait", "get", "rank 0's number of the wrapper"):
            dist.broadcast_object_list(number, group_src=0, group=self.group)
        self._number, = number

    def _check_added(self):
        """Guards look at each forward."""

    def _get_from_rank_0(self, tensors):
        if not self._init_sync:
            return
        sent = []
        if self.shard_group is None:  # else buckets have sent parameters
            sent += [t for t in tensors if isinstance(t, nn.Parameter) and t in self._names]
        if self._sends_buffers_at_first:
            sent += [t for _, t in self._named("buffers")]
        with self._telling("wait", "get", "rank 0's values"):
            broadcast_together(sent, self.group)

    @torch.compiler.disable  # a compiled model would keep the answers of the first call
    def _prepare_forward(self):
        """Raise what the last backward has found: `_check_counts`. Copy rank 0's buffers to all
        ranks; as in torch, not if the forward before ran under no_grad() or in no_sync()."""
        self._check_counts()
        if self._buffers_are_due and self.forward_sync_buffers and not in_backward():
            with self._telling("wait", "get", "rank 0's buffers"):
                broadcast_together([t for _, t in self._buffers_to_send()], self.group)
        self._buffers_are_due = torch.is_grad_enabled() and self.require_backward_grad_sync

    def _buffers_to_send(self):
        return self._named("buffers")

    # ---- a backward that reaches only some parameters

    def _watch(self, buckets):
        super()._watch(buckets)
        self._accumulate_grad = {}
        self._filled, self._came, self._missing = set(), set(), {}
        self._holders = {}  # {name: what gets the mean as `.grad`}: a parameter, or its shard
        first_tag = self._number % 2**16 * 2**14  # so wrappers hardly ever share tags
        for bucket in buckets:
            bucket.tag += first_tag
        for bucket in self.buckets:
            holders = bucket.parameters if self.shard_group is None else bucket.shards
            for name, p, holder in zip(bucket.names, bucket.parameters, holders):
                self._holders[name] = holder
                # Before autograd adds to `.grad`.
                self._hook(p.register_hook, type(self)._before_gradient)
                # Of p itself: a class of its own would be asked for a view of p, and get another
                # node.
                with torch._C.DisableTorchFunctionSubclass():
                    edge = torch.autograd.graph.get_gradient_edge(p)
                    self._accumulate_grad[name] = edge.node
        self._trained = [name for name in self._names.values() if name in self._holders]
        first = next(iter(self._names))
        self._device, self._is_on_cpu = first.device, first.is_cpu
        # torch's fake group, by which one process tries out many ranks, sums nothing.
        self._is_fake = dist.get_backend(self.group) == "fake"

    def _before_gradient(self, gradient):
        number = torch._C._current_graph_task_id()
        if number != self._backward and number != -1:  # else a hook was called by hand
            self._notice_backward()

    def _begin_backward(self):
        """It brings the gradients of those that it reaches: a bucket must not wait for the others.
        One that reaches none averages nothing. (Inside torch.autograd.grad() of a parameter this
        question raises. It should: that writes no `.grad`, so nothing would be averaged. In
        no_sync() nothing is, anyway.)"""
        self._check_counts()
        for state in (self._filled, self._came, self._missing):
            state.clear()
        super()._begin_backward()
        self._is_under_way = True
        try:
            for name, node in self._accumulate_grad.items():
                if not torch._C._will_engine_execute_node(node):
                    self._bucket_of[name].pending.discard(name)
        except RuntimeError:
            if self._averages:
                self._is_under_way = False
                raise
        if not any(bucket.pending for bucket in self.buckets):
            self._averages, self._to_launch = False, []

    def _check_frozen(self):
        """What is frozen after wrapping sends zeros."""

    def _gradient_is_complete(self, name, p):
        """A hook of a parameter. (Autograd may have left its gradient undefined.)"""
        if p.grad is not None and p.grad.is_sparse:
            self._refuse(f"{name} has a sparse gradient: pass sparse=False to its Embedding")
        is_first = not self._came
        if is_first and torch.is_grad_enabled():  # as it is in a backward with create_graph=True
            self._refuse(f"{name}: a mean over ranks cannot be differentiated, so there is no "
                         f"backward(create_graph=True): take torch.autograd.grad(loss, inputs, "
                         f"create_graph=True), and add a penalty to the loss")
        self._came.add(name)
        bucket = self._bucket_of[name]
        bucket.pending.discard(name)
        if not bucket.pending:
            self._completed.append(bucket)
            self._fill(bucket)
            self._launch_ready_buckets()

    def _fill(self, bucket):
        """Move gradients together, once. One that this backward has not reached, and no_sync() has
        not left, is zero, as other ranks may have used it; in no_sync() it stays None."""
        if bucket in self._filled:
            return
        missing = []
        # Else what guards have made of a parameter would answer.
        with torch._C.DisableTorchFunctionSubclass():
            for name, p in zip(bucket.names, bucket.parameters):
                if p.grad is None:
                    missing.append((name, p))
            for name, p in missing:
                self._missing[name] = self._holders[name].grad is None
                # One number in memory.
                p.grad = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
            bucket.fill()
            if not self._averages:
                for _, p in missing:
                    p.grad = None
        self._filled.add(bucket)

    def _launch(self, bucket):
        self._fill(bucket)
        super()._launch(bucket)

    @torch.no_grad()
    def _end_backward(self):
        """Nothing is to come any more: launch the buckets that are left. At last `_check_counts`.
        (On an accelerator that is for the next forward or backward, as in torch: here the CPU would
        wait for the device.)"""
        for bucket in self.buckets:
            bucket.pending.clear()  # so the book misses none, either
        self._launch_ready_buckets()
        self._add_last()
        self._wait_for_reductions()
        self._is_under_way = False
        if self._averages:
            is_used = self._uses()
            self._start_count(is_used)
            if not all(is_used):
                self._drop_means_of_nobody()
        super()._end_backward()
        if self._is_on_cpu:
            self._check_counts()

    def _uses(self):
        """[whether this rank has used a parameter]. As in torch's DDP, one whose gradient autograd
        has left undefined counts as used when find_unused_parameters=False."""
        unused = set(self._missing)
        if not self.find_unused_parameters:
            unused -= self._came
        return [name not in unused for name in self._trained]

    def _drop_means_of_nobody(self):
        """Where no rank has used a parameter."""
        if self._unread_counts is None:
            return
        count, _ = self._unread_counts
        with self._telling("wait", "count", "the ranks that use each parameter"):
            *counts, _ = count.wait()
        with torch._C.DisableTorchFunctionSubclass():
            for name, n in zip(self._trained, counts):
                if n == 0 and self._missing.get(name, False):
                    self._holders[name].grad = None

    def _in_order_of_rank_0(self, things, used):
        """things, where those that rank 0 has used come in its order. The ranks may have used
        others, in another order. Costs a broadcast of 8 bytes for each of things."""
        self._check_counts()  # before this can meet that of another wrapper
        numbers = [things.index(thing) for thing in used]
        none = [-1] * (len(things) - len(numbers))  # all ranks send, or get, as many
        message = torch.tensor(numbers + none, device=self._device)
        with self._telling("wait", "learn", "rank 0's order"):
            dist.broadcast(message, group_src=0, group=self.group)
        return in_order_of_use(things, [things[n] for n in message.tolist() if n >= 0])

    # ---- do ranks average what belongs together?

    def _start_count(self, flags):
        """Of flags, a list of bools, and of a checksum of the history; `_check_counts` reads it."""
        history = self._history()
        count = Count([*flags, self._checksum(history)], self._device, self.group)
        if not self._is_fake:
            self._unread_counts = count, history

    def _history(self):
        """What ranks have in common that average a backward, as {what: a text}. If one rank calls
        two wrappers in another order, the first backward of the one meets that of the other. So a
        checksum of all texts is compared over ranks."""
        return {"backwards": f"wrapper {self._number}"}

    def _checksum(self, history):
        """int32 has the sum of all ranks'."""
        return zlib.crc32(repr(history).encode()) % (2**31 // self.group.size())

    def _check_counts(self):
        """Raise RuntimeError on all ranks if they had different histories in the last backward; or,
        with find_unused_parameters=False, where some rank has not used a parameter in it, naming
        those that are not frozen."""
        if self._unread_counts is None:
            return
        (count, history), self._unread_counts = self._unread_counts, None
        with self._telling("wait", "count", "the ranks that use each parameter"):
            *counts, total = count.wait()
        if total != self.group.size() * self._checksum(history):
            histories = [None] * self.group.size()
            with self._telling("wait", "compare", "what ranks have done"):
                dist.all_gather_object(histories, history, group=self.group)
            self._compare_histories(histories)
        if self.find_unused_parameters or all(n == self.group.size() for n in set(counts)):
            return
        trained_now = {name for p, name in self._names.items() if p.requires_grad}
        unused = []
        for name, n in zip(self._trained, counts):
            if n < self.group.size() and name in trained_now:
                unused.append(name)
        if unused:
            self._refuse(f"no gradient in the last backward, on some rank, for {unused}: freeze "
                         f"them, or pass find_unused_parameters=True here, or use_reentrant=False "
                         f"to checkpoint()")

    def _compare_histories(self, histories):
        """histories: by rank; their checksums differ. (On an accelerator all may come here by the
        same wrapper, whatever its backward has met.)"""
        backwards = [history["backwards"] for history in histories]
        differ = len(set(backwards)) > 1
        which = f"by rank: {backwards}" if differ else "of two wrappers"
        self._refuse(f"ranks have averaged backwards that do not belong together, {which}. If "
                     f"one rank leaves a backward out, as where its loss is nan, all have to. "
                     f"Call wrappers in one order")

    # ---- a backward that raises

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets a backward that has raised. What that has launched may still write sums to
        gradients, so wait for it first."""
        if self._is_under_way:
            self._wait_for_reductions()
            self._is_under_way = False
        super().zero_grad(set_to_none)


class Count:
    """For each of flags, a list of bools, on how many ranks it is set: started, until `wait`. (Of a
    number there, in place of a bool: the sum over ranks.) Costs an all-reduce of 4 bytes a flag."""

    def __init__(self, flags, device, group):
        # non_blocking: else the CPU would wait here for all that the device has yet to do.
        counts = torch.tensor(flags, dtype=torch.int32)
        self.counts = counts.to(device, non_blocking=True)
        self.work = dist.all_reduce(self.counts, group=group, async_op=True)

    def wait(self):
        """Read them, on a stream of their own: that waits for the sum alone. On the current stream
        the CPU would wait for all that the device has yet to do, such as an optimizer's step."""
        if self.counts.is_cpu:
            self.work.wait()
            return self.counts.tolist()
        with torch.Stream(self.counts.device):
            self.work.wait()
            return self.counts.tolist()


# -------------------------------------------------------------------------------------------------
# stages


class UnevenForwards:
    """A script calls a part of the model, or changes shards without an optimizer.

    So hooks are on all modules with parameters, and a forward begins with the first of them.

        _in_forward    [(module, its unit)] of forwards under way, the innermost last; without
                       submodules that are called in the forward of their unit
        _called_alone  submodules that a forward has begun with, outside of their unit's
        _gathers_all   whether the next forward gathers all units: `_begin_anew`
        _marks         [(shard, its `.grad`, which are zeros that say: no_sync() has left more)]
    """

    _is_last_backward = True  # set_is_last_backward() changes it
    _gathers_all = True

    def _check_units(self, units, names):
        """Units need not be called, and there may be none."""

    def _watch(self, buckets):
        self._in_forward, self._called_alone, self._marks = [], set(), []
        super()._watch(buckets)

    def _hook_unit(self, unit):
        """Also its submodules that have parameters: a unit may be a mere container."""
        kind, module = type(self), unit.module
        self._hook(module.register_forward_pre_hook, kind._enter, unit, prepend=True,
                   with_kwargs=True)
        self._hook(module.register_forward_hook, kind._leave, unit, always_call=True)
        for m in unit.submodules:
            if m is not module and m._parameters:
                self._hook(unless_compiling(m.register_forward_pre_hook), kind._pre_submodule,
                           unit, prepend=True, with_kwargs=True)
                self._hook(unless_compiling(m.register_forward_hook), kind._post_submodule, unit)

    # ---- forward

    def forward(self, *inputs, **options):
        if not in_backward():
            self._in_forward.clear()  # left by a forward that Ctrl-C has ended
        return super().forward(*inputs, **options)

    def _pre_submodule(self, unit, module, inputs, options):
        """In its unit's forward a submodule has what it needs, and this does nothing."""
        if self._has_what_it_needs(unit, module):
            return
        self._watch_alone(unit, module)
        self._enter(unit, module, inputs, options)

    def _watch_alone(self, unit, module):
        """For a forward that raises. Only when it is called, since torch.compile looks at the ids
        of hooks that are always called: with such ones in it, each block would be a graph of its
        own."""
        if module not in self._called_alone:
            self._called_alone.add(module)
            self._hook(unless_compiling(module.register_forward_hook), type(self)._post_alone,
                       unit, always_call=True)

    def _post_alone(self, unit, module, inputs, outputs):
        """End a forward that has begun with this submodule, also one that raises."""
        if self._in_forward and self._in_forward[-1][0] is module:
            self._leave(unit, module, inputs, outputs)

    def _has_what_it_needs(self, unit, submodule):
        """Whether that is called in unit's forward, and unit is whole: a backward in this forward
        may have freed it."""
        if not self._in_forward:
            return False
        module, unit_around = self._in_forward[-1]
        is_inside = unit_around is unit and module is not submodule  # which may call itself
        return is_inside and self._is_whole(unit)

    def _is_whole(self, unit):
        for bucket in unit.buckets:
            if not bucket.is_unsharded:
                return False
        return True

    def _post_submodule(self, unit, module, *_):
        """The unit around may have been freed meanwhile: unshard it again."""
        if not self._in_forward:
            return
        innermost, unit_around = self._in_forward[-1]
        if innermost is not module and not self._is_whole(unit_around):
            self._use(unit_around)

    @torch.compiler.disable
    def _enter(self, unit, module, inputs, options):
        """The first one begins a forward."""
        self._in_forward.append((module, unit))
        is_first = len(self._in_forward) == 1
        if in_backward():
            self._notice_backward()
        elif is_first:
            self._prepare_forward()
            self._begin_anew(module)
        is_again = module is self.module and not is_first  # a model that calls itself
        if torch.is_grad_enabled() and not is_again:
            self._note_use(unit, module)
        self._use(unit)

    def _begin_anew(self, module):
        """Before, all units count as old: a script may have changed shards, whose writes to `.data`
        leave no trace. But not after a backward that no step follows (`_gathers_all` is False).

        All ranks must decide alike, or some wait forever. So this does not look at `.grad`: a
        backward that raised may have left one on one rank alone. If a script calls a part of the
        model, nobody knows which units that will use."""
        self._drop_zeroed_gradients()
        self._take_up_changes()
        if self._gathers_all:
            for bucket in self._all_buckets:
                bucket.is_unsharded = False
        if module is self.module:
            self._begin_forward()
        else:
            self._use(self.root)

    def _note_use(self, unit, module):
        """One forward shows an order. Several do not: each may skip other units."""
        if module is self.module and not in_backward():
            self._used = []
        if unit not in self._used:
            self._used.append(unit)

    @torch.compiler.disable
    def _leave(self, unit, module, inputs, outputs):
        if not self._in_forward or self._in_forward[-1][0] is not module:
            return  # a hook before ours has raised, so `_enter` was not called
        self._in_forward.pop()
        if not self._in_forward and not in_backward():
            self._end_forward()

    def _end_forward(self):
        """A shard must not change while it is being sent."""
        for unit in self.units:
            self._wait(unit)

    # ---- backward

    def _begin_backward(self):
        """Take the marks away, but those to which a loss over shards has added."""
        self._drop_zeroed_gradients()
        super()._begin_backward()
        for shard, mark in self._marks:
            if shard.grad is mark and mark._version == 0:
                shard.grad = None
        self._marks.clear()

    def _mark_shards(self):
        """Only of those whose gradient no_sync() has left."""
        for bucket in self.buckets:
            for p, shard in zip(bucket.parameters, bucket.shards):
                if p.grad is not None and shard.grad is None:
                    shard.grad = torch.zeros_like(shard)
                    self._marks.append((shard, shard.grad))
                elif p.grad is not None:
                    shard.grad = shard.grad.data  # in the same memory, with a _version of its own

    def _learn_order(self):
        self._used = [unit for unit in self._used if unit is not self.root]  # which stays the first
        super()._learn_order()

    def _end_backward(self):
        """Note whether a step may follow. Parts that are called next belong to another one."""
        super()._end_backward()
        self._used = []
        self._gathers_all = self.require_backward_grad_sync and self._is_last_backward

    def _after_step(self, optimizer, *_):
        """All ranks must gather the same units next, and some may have given the optimizer only
        shards that are not empty. So if there is any, the next forward gathers all units."""
        super()._after_step(optimizer)
        stepped = set()
        for group in optimizer.param_groups:
            stepped.update(map(id, group["params"]))
        for bucket in self._all_buckets:
            if not stepped.isdisjoint(map(id, bucket.shards)):
                self._gathers_all = True
                break

    # ---- what a script calls

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether a step follows the next backwards; FSDP2's name. Unless told, it does.

        If not, stages 1 and 2 need not gather parameters in the next forward, as they have not
        changed: so stage 2 with n micro-steps sends n + 1 instead of 2 n times (W-1)/W Psi. If a
        step comes all the same, or a script writes to shards, they gather. All ranks have to do all
        of that alike: say the same, step the same optimizers, write to the same shards, also a rank
        whose shards are empty. It changes no bit, and nothing in stage 3."""
        self._is_last_backward = is_last_backward

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As `StateDicts`. Before, ranks compare what they have done since the last backward: it
        may be the end, and no backward will."""
        self._check_counts()
        if self._trained:
            self._start_count([])
            self._check_counts()
        yield from super().full_parameters()

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets what no_sync() has held back, and a backward that has raised."""
        super().zero_grad(set_to_none)
        with torch._C.DisableTorchFunctionSubclass():  # guards' class would take the shard's
            for bucket in self.buckets:
                for p in bucket.parameters:
                    p.grad = None  # was on its way to a bucket
        self._gathers_all = True


class UnevenOrder:
    """Stage 3: a rank may skip units. If any rank calls a unit twice, in another order than that
    which was learned, or in a second forward before the backward, all ranks must call the same
    units; so they must if checkpoints begin to compute units again. Outside of its unit's forward a
    parameter may be nan; so may the root's outside of the model's.

    A rank that skips a unit goes through it on its way as the others do: it gathers and frees it.
    So what is sent when depends on the way alone, and is the same on all ranks.
    """

    # ---- a rank goes all of the way, as the others do

    def _begin_anew(self, module):
        """Free what an earlier forward has left: if that raised, this may differ between ranks."""
        self._reshard_all()
        self._ahead = []
        self._begin_recipes()
        super()._begin_anew(module)

    def _use(self, unit, *_):
        """Before, use what lies on the way to it."""
        while unit in self._ahead and unit is not self._ahead[0]:
            self._use(self._ahead[0])
        super()._use(unit)
        if self._is_under_way and in_backward():
            self._launch_ready_buckets()

    def _reach(self, unit, gradient):
        """The backward may reach a unit: that of an output begins, or of what it has returned as it
        came, which may be late. Gather nothing that the others do not: recipes do, where autograd
        asks for a weight."""
        self._notice_backward()
        if unit in self._ahead:
            self._use(unit)

    def _go_to_the_end(self):
        while self._ahead:
            self._use(self._ahead[0])

    @torch.compiler.disable
    def _leave(self, unit, module, inputs, outputs):
        """Watch for the backward of what has come out. The unit around may have been freed
        meanwhile: unshard it again."""
        if torch.is_grad_enabled() and not in_backward():
            for t in tree_leaves(outputs):
                if isinstance(t, Tensor) and t.grad_fn is not None:
                    t.register_hook(functools.partial(self._reach, unit))
        super()._leave(unit, module, inputs, outputs)
        if self._in_forward:
            _, unit_around = self._in_forward[-1]
            self._use(unit_around)

    def _end_forward(self):
        try:
            self._go_to_the_end()
            super()._end_forward()
        finally:  # that may time out, while it waits for units that were skipped
            self._end_recipes()

    def _end_backward(self):
        self._go_to_the_end()
        super()._end_backward()

    def _launch_ready_buckets(self):
        """Native collectives must come in one order on all ranks. A rank of which autograd asks a
        weight of a unit starts to gather the next one before it has the gradients. A rank that
        skips the unit has no gradients to wait for. So both launch its bucket when they are through
        the unit, and a bucket of the root as the next one in the order that is of another unit."""
        while self._to_launch and not self._to_launch[0].pending and self._has_come_to_launch():
            self._add_last()
            self._launch(self._to_launch.pop(0))

    def _has_come_to_launch(self):
        for bucket in self._to_launch:
            if bucket.unit is not self.root:
                return bucket.unit not in self._ahead
        return not self._ahead

    def _reshard_all(self):
        """Unless this backward ran inside a forward."""
        if not self._in_forward or not in_backward():
            super()._reshard_all()

    # ---- recipes

    def _begin_recipes(self):
        """Not inside of a script's own hooks of saved tensors, such as a checkpoint around the
        model: these get all, weights too. A checkpoint counts what it gets, and has to get as much
        when it computes anew."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # True: or compiled
            super()._begin_recipes()

    def _pack(self, t):
        """What is not a plain view of a unit's memory, such as a complex one, is cloned, as that
        memory will be freed."""
        bucket = self._bucket_around(t)
        if bucket is not None:
            if t.dtype == bucket.dtype and not t.is_conj() and not t.is_neg():
                layout = t.shape, t.stride(), t.storage_offset()
                return functools.partial(self._view_again, bucket, layout, bucket.version)
            t = t.detach().clone()
        base = t if t._base is None else t._base
        if base.__class__ is not Tensor and base in self._names:
            t = t.data  # a forward has written it; when its unit is freed, its version changes
        return functools.partial(self._kept, t.detach(), t._version)

    def _bucket_around(self, t):
        """In whose whole parameters t lies, or None. (Inside of torch.func a tensor may have no
        address.)"""
        if t.layout is not torch.strided:
            return None
        memory = t.untyped_storage()._cdata
        for unit in self._allocated:
            for bucket in unit.buckets:
                if bucket.whole is not None and bucket.memory == memory:
                    return bucket
        return None


# -------------------------------------------------------------------------------------------------
# small functions


def named_modules(module, name=""):
    """[(name, module), and so for all below it], one that stands in two places by both names. This
    and `named_tensors` read what torch keeps modules and tensors in: a module may override torch's
    `named_parameters()` and the like, and leave some out."""
    named = [(name, module)]
    if module._modules:
        for child_name, child in module._modules.items():
            if child is not None:
                named += named_modules(child, f"{name}.{child_name}" if name else child_name)
    return named


def named_tensors(module, kind, modules=None):
    """[(name, tensor)] of all "parameters" or "buffers" of module, a tied one by each name; of its
    "modules" [(name, module)]. modules: its `named_modules`, if they are known."""
    named = []
    for prefix, m in modules or named_modules(module):
        if kind == "parameters":
            kept = m._parameters
        else:
            kept = m._buffers if kind == "buffers" else m._modules
        if not kept:  # as in most; each forward comes here
            continue
        for name, t in kept.items():
            is_sent_as_parameter = kind == "buffers" and isinstance(t, nn.Parameter)
            if t is not None and not is_sent_as_parameter:
                named.append((f"{prefix}.{name}" if prefix else name, t))
    return named


def first_names(pairs):
    """{thing: its first name} of [(name, thing)], in this order."""
    names = {}
    for name, thing in pairs:
        names.setdefault(thing, name)
    return names


def in_order_of_use(things: list, used) -> list:
    """things, where those that are also in used have its order. What is not there keeps its place:
    [1, 2, 3, 4], with 3, 4, 1 used, becomes [3, 2, 4, 1]."""
    ordered = [thing for thing in used if thing in things]
    in_order = []
    for thing in things:
        if thing in used:
            thing = ordered.pop(0)
        in_order.append(thing)
    return in_order


def unless_compiling(register):
    """A function that registers a hook, which then does nothing in what torch.compile makes of the
    module around."""
    def register_quietly(hook, **options):
        def quiet_hook(*arguments):
            if not torch.compiler.is_dynamo_compiling():
                return hook(*arguments)

        return register(quiet_hook, **options)

    return register_quietly


def broadcast_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors, of any dtypes, by rank 0's, in as few messages as can be, and wait."""
    if tensors:
        # .data: autograd may have saved a buffer, and need not hear of its new value.
        dist._broadcast_coalesced(group, [as_known(t.data) for t in tensors], 2**28, 0)


KNOWN_DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def as_known(t):
    """t, seen as numbers of the same size that every backend can send; gloo knows no int16 and no
    float8, and of 2 bytes only float16. Only its memory counts, not a lazy conj() or neg()."""
    t = t.conj() if t.is_conj() else t
    t = torch._neg_view(t) if t.is_neg() else t
    return torch.view_as_real(t) if t.itemsize == 16 else t.view(KNOWN_DTYPES[t.itemsize])

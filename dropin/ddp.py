# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Data parallelism: every rank holds the whole model, reads its own part of the batch, and all
ranks step with the mean of their gradients.

    model = DDP(module)                      # as torch.nn.parallel.DistributedDataParallel
    loss = model(x, y)
    loss.backward()                          # on return every `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's DDP: 2,700 lines of Python and a reducer in C++. How it works (Li et al., arXiv
2006.15704, section 3.2): parameters are divided among buckets of 25 MB, the last parameters first,
since the backward reaches them first. A hook on each parameter tells when its gradient is complete.
When all of a bucket are, they move into its flat buffer, are multiplied by 1/W, and their sum over
ranks is made while the backward goes on. A callback at the end of the backward waits for what is
still under way. "The last first" is a guess. The first step shows in which order gradients really
come, and from the second one on buckets are launched in that order.

How it differs from torch's: the W contributions to an element are added in rank order,
((g0 + g1) + g2) + ..., wherever it lies in a buffer, so the bucket size never changes a bit. (A
ring all-reduce adds in an order that depends on the position.) oracle.py computes the same after
the backward, parameter by parameter: `average_gradients`.

Cost: 4 Psi bytes of buckets in fp32, which are the gradients (Psi: the number of parameters); 2
(W-1)/W Psi elements sent per rank and step; during the backward the memory of a bucket, for
gradients that wait for the rest of theirs, and at W >= 3 of another, for what arrives. It works on
any accelerator of torch, on the stream of the forward. (`DDP` sends one number per parameter more,
to agree on which were used, and one to see that all ranks average the same step; once, one for each
to agree on their order.)

A backward of one rank of three, buckets 0, 1, 2 of a model whose last parameters are in bucket 0:

    gradients of 0 are there   start 0                  its chunks go to the ranks that own them
    gradients of 1 are there   add 0, start 1           this rank's chunk of 0 has its sum, and goes
                                                        to all; the others' chunks of 0 arrive
    gradients of 2 are there   add 1, start 2
    the backward ends          add 2                    no more computing to hide this one behind
                               wait for 0, 1, 2         now all sums are whole, on all ranks

In this order: collectives, to be read as a table of what they promise; buckets; `Wrapper`, which
can be passed by; `Reducer`, which ZeRO shares; `PlainDDP`. With that the idea is complete, and a
DDP of one's own could end there. It asks something of scripts: its docstring says what. The rest is
one class, a layer, for each thing that it does not ask for any more, or adds:

    RebuiltBuckets   buckets are filled anew in the order of use
    UnevenRanks      ranks that use different parameters, buffers, several wrappers, errors
    TorchOptions     the options of torch's DDP, and comm hooks
    OptimizerStates  an optimizer's state, whole and by name
    Guards           mistakes of a script are refused: guards.py

`DDP` is all of these before `PlainDDP`. A method of a layer does something before or after that of
the plain class, and calls it by super(): so what one has read is what runs. `# a joint` marks a
method that exists only so that layers can add to it. (In a few cases a layer does without the
plain method, such as a comm hook in place of the sum.) At the end of the file are the collectives'
bodies.
"""

import collections
import contextlib
import functools
import itertools
import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from dropin.guards import Guards, refuse_held

Group = dist.ProcessGroup | None  # None: all ranks


# -------------------------------------------------------------------------------------------------
# collectives
#
# A flat buffer is cut into W chunks, and rank r owns the r-th. With three ranks, where a1 is rank
# a's values in chunk 1:
#
#             before          reduce-scatter: each owner   all-gather: each owner sends
#                             has the sum of its chunk     its chunk to all ranks
#   rank a    a0  a1  a2      S0  .   .                    S0  S1  S2      S0 = (a0 + b0) + c0
#   rank b    b0  b1  b2      .   S1  .                    S0  S1  S2      S1 = (a1 + b1) + c1
#   rank c    c0  c1  c2      .   .   S2                   S0  S1  S2      S2 = (a2 + b2) + c2
#
# One after the other they are an all-reduce. A call starts one, and returns what finishes it:
#
#   gather = start_all_gather(flat, group)          flat's other chunks are sent by their owners
#   gather.wait()                                   they are there
#
#   reduction = start_reduce_scatter(flat, group)   each rank is sent its chunk
#   reduction.add(out, [earlier])                   they are there, and are added in rank order:
#                                                   out = ((earlier + c0) + c1) + c2; without
#                                                   arguments in this rank's chunk of flat itself
#
#   reduction = start_all_reduce(flat, group)       a reduce-scatter ...
#   reduction.add()                                 ... is waited for, and an all-gather starts
#   reduction.wait()                                it is there: flat has the sums, on all ranks
#
#   broadcast(tensors, group)                       all ranks have rank 0's, when it returns
#
# Each of the first two costs (W-1)/W of the buffer's elements sent; a reduction the memory of W-1
# chunks, or W on an accelerator, for what arrives, until `add`. Where c0 has 16 bits, sums are made
# in fp32. Chunks are as nearly equal as `Tensor.tensor_split(W)` makes them. All ranks make all
# calls, on the stream of the forward, and in one order; on a CPU calls with another `tag` may come
# in another order. (On a CPU wait() and add() return when the messages have arrived. On an
# accelerator only its stream waits.) The bodies are at the end of this file: "how messages are
# sent".


# -------------------------------------------------------------------------------------------------
# buckets


class Slot:
    """The place of a parameter in a bucket.

        parameter
        fqn       its fully qualified name, such as "blocks.0.mlp.down.weight"
        shape, n  of the parameter, its number of elements
        strides   in the buffer: packed, without gaps between its elements
        shard     what the optimizer has, whose `.grad` becomes the mean: in DDP that is the
                  parameter itself, in ZeRO this rank's part of it
        bucket    in which it is
        start     its first element in the flat buffer
        layout    of a stage's: (shape, strides, first element) of its shard in this rank's chunk
    """

    def __init__(self, parameter, fqn):
        self.parameter, self.fqn = parameter, fqn
        self.shape, self.n = parameter.shape, parameter.numel()
        packed = torch.empty_like(parameter, device="meta")  # its order of dimensions, and no gaps
        self.strides = packed.stride()
        self.shard = parameter
        self.bucket, self.start, self.layout = None, None, None


BUCKET_BYTES = 25 * 2**20  # torch DDP's number
MESSAGE_BYTES = 2**18  # buckets grow with W, as smaller chunks than this take as much time to send
ALIGN_CHUNK_BYTES = 16  # chunks are multiples of it, so that kernels and NCCL read 16 bytes at once


def bucket_bytes(W, cap_mb=None):
    """Largest size of a bucket for W ranks, unless a script has said how many MB."""
    return max(BUCKET_BYTES, W * MESSAGE_BYTES) if cap_mb is None else int(cap_mb * 2**20)


def round_up(n, multiple):
    """The smallest multiple that is at least n."""
    return math.ceil(n / multiple) * multiple


class Bucket:
    """Some parameters, and a flat buffer in which their gradients lie one after the other, each at
    a multiple of `align` elements:

        parameters   a (2, 3)       b (2,)      with align = 4
        gradients    a a a a a a - - b b - -    n = 12; a starts at 0, b at 8

        slots        one for each parameter
        gradients    the flat buffer, of n elements or a few more, so that it can be cut into
                     chunks of one size; or None while there is no memory for it
        unreduced    the slots whose gradient is in the buffer, and has yet to be summed over ranks
        reduction    of `gradients`, started last: a reduce-scatter or an all-reduce
    """

    def __init__(self, slots, align=1):
        self.slots, self.n, self.unreduced = slots, 0, set()
        for slot in slots:
            slot.bucket, slot.start = self, self.n
            self.n += round_up(slot.n, align)
        self.gradients, self.reduction = None, None

    def __repr__(self):
        """For errors, profiles and debuggers."""
        first = self.slots[0]
        n_bytes = self.n * first.shard.dtype.itemsize
        return f"the bucket from {first.fqn} on ({1e-6 * n_bytes:.2f} MB)"

    def views(self, slots, buffer):
        """[all of a parameter in a buffer of n elements], of slots' parameters."""
        first = buffer.storage_offset()  # as_strided counts from where memory begins
        return [buffer.as_strided(slot.shape, slot.strides, first + slot.start) for slot in slots]

    def view(self, slot, buffer):
        """All of a parameter in a buffer of n elements."""
        return self.views([slot], buffer)[0]

    def places_of_gradients(self, slots):
        """[the part of `gradients` that is a parameter's, in its shape]."""
        return self.views(slots, self.gradients)

    def put(self, slots):
        """Write the `.grad` of slots' parameters to their places in `gradients`, and let each
        `.grad` be its place: so the sum over ranks will be there, and autograd adds the next
        micro-step to it. One that is there already stays the same object. (All in one call: on an
        accelerator a kernel for each would cost more time than all else here.)"""
        first, itemsize = self.gradients.data_ptr(), self.gradients.itemsize
        new = []
        for slot in slots:
            address = slot.parameter.grad.data_ptr()  # 0 if there is no element
            if address != first + slot.start * itemsize and slot.n > 0:
                new.append(slot)
        if new:
            places = self.places_of_gradients(new)
            torch._foreach_copy_(places, [slot.parameter.grad for slot in new])
            for slot, place in zip(new, places):
                # Frees what autograd has made. `.data` has its own _version: views of one buffer
                # share theirs, and autograd would take a write to one for a write to all.
                slot.parameter.grad = place.data
        self.unreduced.update(slots)


def in_order_of_use(things: list, used) -> list:
    """things, where those that are also in used have its order. Of one that is there several times
    the last counts. What is not there keeps its place: [1, 2, 3, 4], with 3, 4, 1 used, becomes
    [3, 2, 4, 1]."""
    last = {thing: place for place, thing in enumerate(used)}
    ordered = [thing for thing in things if thing in last]
    ordered.sort(key=last.get)
    in_order = []
    for thing in things:
        if thing in last:
            thing = ordered.pop(0)
        in_order.append(thing)
    return in_order


def fill_buckets(parameters: list[torch.nn.Parameter], cap_bytes: float,
                 first_bytes: float = 2**20) -> list[list[torch.nn.Parameter]]:
    """Divide parameters, in this order, into lists: the buckets. -> the lists in the order in which
    they were closed, then those that are still open, in the order in which they were opened.

    A list has parameters of one kind: one device, one dtype. Each kind has a list of its own that
    is filling; a parameter of another kind does not close it.
    A parameter that would bring its list above the limit, in bytes, closes it, and opens the next
    one. The limit is first_bytes until the first list is closed, so that communication starts
    early. After that it doubles with every list that is closed, of whichever kind, up to cap_bytes.
    (To close a list after it has exceeded its limit would be worse: the head could share one with
    the embedding, and wait for the end of the backward.)
    """
    full = []
    filling = {}  # {kind: a list}
    for p in parameters:
        kind = p.device, p.dtype
        limit = min(first_bytes * 2**len(full), cap_bytes)
        others = filling.get(kind, [])
        if others and sum(q.nbytes for q in others) + p.nbytes > limit:
            full.append(filling.pop(kind))
        filling.setdefault(kind, []).append(p)
    return full + list(filling.values())


# -------------------------------------------------------------------------------------------------
# what a wrapper has beside the idea, to be passed by


class Wrapper(torch.nn.Module):
    """The module that is wrapped, its ranks, hooks, errors, clipping.

        world_size   W
        shard_group  the ranks over which parameters are sharded; None in DDP
        exposed_s    seconds that it has waited for communication, sums included: by a `Stopwatch`
    """

    def __init__(self, module, process_group=None, init_sync=True):
        super().__init__()
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.world_size = dist.get_world_size(process_group)
        if self.world_size < 1:
            self._refuse("this rank is not in process_group")
        self.shard_group = None
        self.gradient_divide_factor = self.world_size
        self._stopwatch = Stopwatch()
        self._first_tag = 0  # of this wrapper's messages
        if init_sync:
            self._agree_on_module()

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    @property
    def exposed_s(self) -> float:
        return self._stopwatch.read()

    def _agree_on_module(self):  # a joint
        """Ranks wrap equal modules."""

    def _prepare_forward(self):  # a joint
        """What comes before a forward."""

    def _buffers_at_first(self):  # a joint
        """Those that start with rank 0's values."""
        return [t for _, t in self._named("buffers")]

    def _named(self, kind, modules=None):
        """`named_tensors` of the module, but not those that torch's DDP is told to ignore."""
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        named = named_tensors(self.module, kind, modules)
        return [(name, t) for name, t in named if name not in ignored]

    def _named_modules(self):
        return named_modules(self.module)

    def _add_hook(self, register, hook, **options):
        """register a hook, by a function of torch's, and remove it with this wrapper."""
        handle = register(hook, **options)
        weakref.finalize(self, handle.remove)

    def _hook_steps(self, register, method):
        """Make method a hook of all optimizers, by a function of torch.optim. Disabled, or
        torch.compile(optimizer.step) would trace it."""
        self._add_hook(register, torch.compiler.disable(weakly(method)))

    def _refuse(self, fact):
        raise RuntimeError(f"{self._get_name()}: {fact}")

    @contextlib.contextmanager
    def _waiting(self, *what):
        """Around a call that waits: time it, name it in a profile, and in an error."""
        begun = self._stopwatch.now()
        try:
            with span("wait:", *what):
                yield
        except RuntimeError as error:
            raise RuntimeError(f"rank {dist.get_rank()} could not {text_of(*what)} (has another "
                               f"rank died, ended after fewer steps, left out a forward, a "
                               f"backward or saving, or called wrappers or units in another "
                               f"order?): {error}") from error
        finally:
            self._stopwatch.add_since(begun)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by factor, a number above 0, and no longer by W,
        from the next backward on; FSDP2's name. Each gradient is multiplied by 1/factor before the
        sum, which rounds it, unless factor is a power of two. For the same bits at every W set 1,
        and divide after the sum, as `clip_gradients_` can: train.py does."""
        self.gradient_divide_factor = factor

    @torch.compiler.disable
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients in place to a total norm of at most max_norm; return the norm before,
        a float64 scalar, the same on every rank. A collective if they are sharded."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return clip_gradients_(gradients, max_norm, self.shard_group)


# -------------------------------------------------------------------------------------------------
# the reducer


class Backward:
    """A backward under way.

        task          the engine's number of it
        is_averaging  whether it averages gradients: not in no_sync()
        to_come       {bucket: its slots whose gradient the backward has yet to bring}
        to_fill       buckets that are yet to be filled
        to_launch     buckets that are yet to be reduced, in order
        reducing      the bucket whose reduction was started last, and not yet finished, or None
        came          {slot: None}: those whose gradient has come, in this order
    """

    def __init__(self, task, is_averaging, to_come, to_launch):
        self.task, self.is_averaging = task, is_averaging
        self.to_come, self.to_launch = to_come, to_launch
        self.to_fill = set(to_come)
        self.reducing, self.came = None, {}


class Reducer(Wrapper):
    """What DDP and the ZeRO stages share: hooks of each trained parameter notice a backward and
    that a gradient is complete, buckets are filled and launched in order, and a callback ends the
    backward.

        the first sign of a backward   _notice_backward -> _prepare_for_backward
        a gradient is complete         _mark_param_ready -> _launch_ready_buckets
                                       -> _finish_last, _launch -> _fill
        the backward ends              _finalize_backward -> _wait_for_buckets, _give_means

    A subclass says what a launch does, by `_start_reduction(bucket)`, and what is done with the sum
    when the next bucket is launched, by `_finish_reduction(bucket)`. Its construction ends with
    `_track`. A backward brings a gradient of every trained parameter, on all ranks.

    Until a backward has averaged, the order in which the module has registered parameters stands in
    for that of use. It is another one where, say, an embedding is registered last: then its bucket
    holds all others back.

        _buckets      of the trained parameters, in the order in which a backward completes them
        _slots        {parameter, a frozen one too: its slot}, in the order of the module
        _trained      slots of those that get gradients, in that order
        _backward     the `Backward` under way, or None
        _knows_order  whether that order was learned, by `_learn_order`
    """

    require_backward_grad_sync = True  # no_sync() changes it
    _backward = None
    _knows_order = False

    # ---- the first sign of a backward

    def _notice_backward(self, gradient=None):
        """Hook of each parameter, before autograd adds to `.grad`; in stage 3 notes call it, too.
        The first sign of a backward: prepare for it. (It returns None: gradient stays as it is.)"""
        task = torch._C._current_graph_task_id()
        if self._backward is None or self._backward.task != task:
            self._prepare_for_backward(task)

    def _prepare_for_backward(self, task):
        assert self._backward is None, "a backward comes after one that raised, or inside another"
        self._backward = self._new_backward(task)
        torch.autograd.Variable._execution_engine.queue_callback(self._finalize_backward)

    def _new_backward(self, task):  # a joint
        is_averaging = self.require_backward_grad_sync
        to_come = {bucket: set(bucket.slots) for bucket in self._buckets}
        to_launch = list(self._buckets) if is_averaging else []
        return Backward(task, is_averaging, to_come, to_launch)

    # ---- a gradient is complete

    def _mark_param_ready(self, slot, p):
        """Hook of p, the slot's parameter: autograd has added to `p.grad` all that this backward
        adds. With the last one of a bucket launch the buckets that are ready. If this one may not
        go yet, fill it all the same: outside of it its gradients would take memory twice."""
        to_come = self._backward.to_come[slot.bucket]
        to_come.discard(slot)
        self._backward.came[slot] = None
        if not to_come:
            self._launch_ready_buckets()
            self._fill(slot.bucket)

    def _launch_ready_buckets(self):
        """Launch buckets in their order, as far as they are ready. All ranks have that order in
        common, and the order in which buckets fill may differ: so a rank's n-th collective meets
        the others' n-th. Finish the bucket before: what arrives takes the memory of one at a time.
        """
        to_launch = self._backward.to_launch
        while to_launch and self._is_ready(to_launch[0]):
            self._finish_last()
            self._launch(to_launch.pop(0))

    def _is_ready(self, bucket):
        """Whether bucket has all the gradients that this backward brings."""
        return not self._backward.to_come[bucket]

    def _finish_last(self):
        """Finish the reduction that was started last, if there is one."""
        bucket, self._backward.reducing = self._backward.reducing, None
        if bucket is not None:
            with self._waiting("reduce", bucket):
                self._finish_reduction(bucket)

    def _launch(self, bucket):
        """Start to reduce bucket. It is scaled before the sum, which might overflow."""
        self._fill(bucket)
        scale = self._scale_before_sum()
        if scale != 1:
            bucket.gradients.mul_(scale)
        with span("start: reduce", bucket):
            self._start_reduction(bucket)
        self._backward.reducing = bucket

    def _fill(self, bucket):
        """Move gradients into bucket, unless that was done before it could be launched."""
        if bucket in self._backward.to_fill:
            self._backward.to_fill.remove(bucket)
            self._put(bucket, bucket.slots)

    def _put(self, bucket, slots):  # a joint
        bucket.put(slots)

    def _scale_before_sum(self):  # a joint
        """What each launch multiplies a bucket by, whenever that was filled. In no_sync() nothing
        is launched, and so nothing scaled."""
        return 1 / self.gradient_divide_factor

    # ---- the backward ends

    @torch.no_grad()
    def _finalize_backward(self):
        """The engine's callback after a backward."""
        backward = self._backward
        assert not backward.to_launch, "a backward brings a gradient of every parameter"
        if backward.is_averaging:
            self._wait_for_buckets()
            self._give_means(self._used_slots())
            for bucket in self._buckets:
                bucket.unreduced.clear()
        self._backward = None
        if backward.is_averaging and not self._knows_order:
            self._learn_order(backward.came)
            self._knows_order = True

    def _learn_order(self, came):
        """From now on launch buckets in the order in which their last gradients have come."""
        self._buckets = in_order_of_use(self._buckets, [slot.bucket for slot in came])

    def _wait_for_buckets(self):
        self._finish_last()

    def _used_slots(self):  # a joint
        """Those of which some rank has brought a gradient."""
        return self._trained

    def _give_means(self, slots):
        """Let `.grad` of slots' shards be the mean. In DDP it is: see `Bucket.put`."""

    # ---- what a script calls

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate, in the buckets; the next one outside averages all. It
        matters where the backward runs, not where the forward does."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- construction

    def _track(self, buckets, frozen=()):
        """From now on watch for gradients. frozen: buckets of parameters without any."""
        self._buckets = buckets
        slots = {}
        for bucket in (*buckets, *frozen):
            self._free_at_end(bucket)
            for slot in bucket.slots:
                slots[slot.parameter] = slot
        in_order = first_names(self._named("parameters"))
        self._slots = {p: slots[p] for p in in_order if p in slots}
        self._trained = [slot for slot in self._slots.values() if slot.bucket in buckets]
        for slot in self._trained:
            p = slot.parameter
            self._stopwatch.device = p.device
            self._add_hook(p.register_hook, weakly(self._notice_backward))
            mark_param_ready = weakly(self._mark_param_ready, slot)
            self._add_hook(p.register_post_accumulate_grad_hook, mark_param_ready)

    def _free_at_end(self, bucket):
        """A bucket and its slots refer to each other, and so would wait for the garbage collector.
        Now slots go with this wrapper, and so do DDP's buckets."""
        weakref.finalize(self, bucket.slots.clear)


# -------------------------------------------------------------------------------------------------
# DDP


class PlainDDP(Reducer):
    """Average gradients over the ranks of process_group during every backward of module.

    bucket_cap_mb: largest size of a bucket; the first has 1 MB, the next ones double it. None: 25,
    or W/4 if that is more.
    init_sync: start with rank 0's parameters and buffers.

    A `.grad` lies in a bucket, and so do views of it, such as `.flatten()`: clone what has to
    outlive the next backward.

    What it asks for: ranks have equal modules, of whose buffers each has its own, and one wrapper.
    Gradients come from `backward()`, which brings one of every trained parameter, the first time in
    one order on all ranks. After one outside of no_sync() they are used, and zeroed. After a
    backward that has raised the wrapper is not used any more. `DDP` asks for none of this.
    """

    def forward(self, *inputs, **kwargs):
        self._prepare_forward()
        return super().forward(*inputs, **kwargs)

    # ---- backward

    def _prepare_for_backward(self, task):
        super()._prepare_for_backward(task)
        for slot in self._trained:
            gradient = slot.parameter.grad
            is_held = slot in slot.bucket.unreduced  # by no_sync(): it has yet to be summed
            # A mean that was not zeroed is summed again. If the sum of W equal means is divided by
            # W, it is this mean, which is right. If it is divided by something else, it is not.
            is_right = self.gradient_divide_factor == self.world_size
            assert gradient is None or is_held or is_right or not gradient.any(), (
                f"call zero_grad() before a backward: the mean of {slot.fqn} would be summed again")
        for bucket in self._buckets:
            bucket.unreduced.clear()  # what no_sync() has left is in `.grad`: `put` will see

    def _start_reduction(self, bucket):
        """Start an all-reduce of bucket's gradients, in place."""
        bucket.reduction = start_all_reduce(bucket.gradients, self.process_group, self._first_tag)

    def _finish_reduction(self, bucket):
        """Add what has arrived, and start the second half, for which the end of the backward waits.
        (Two ranks' is one call of torch's own: then nothing is waited for here.)"""
        bucket.reduction.add()
        self._gathering.append(bucket)

    def _wait_for_buckets(self):
        self._finish_last()
        while self._gathering:
            bucket = self._gathering.pop(0)
            with self._waiting("reduce", bucket):
                bucket.reduction.wait()

    # ---- construction

    def __init__(self, module: torch.nn.Module, process_group: Group = None,
                 bucket_cap_mb: float | None = None, init_sync: bool = True):
        super().__init__(module, process_group, init_sync)
        self.bucket_cap_mb = bucket_bytes(self.world_size, bucket_cap_mb) / 2**20
        names = first_names(self._named("parameters"))
        devices = {t.device: name for name, t in self._named("parameters") + self._named("buffers")}
        trained = [p for p in names if p.requires_grad]
        if not trained:
            self._refuse("needs parameters that require a gradient: there is nothing to average")
        if len(devices) > 1 or torch.device("meta") in devices:
            self._refuse(f"needs all parameters and buffers on one device, not on meta: {devices}")
        if init_sync:
            broadcast([*names, *self._buffers_at_first()], self.process_group)
        buckets = []
        for parameters in fill_buckets(trained[::-1], self.bucket_cap_mb * 2**20):
            buckets.append(Bucket([Slot(p, names[p]) for p in parameters]))
            self._provide_memory_of_gradients(buckets[-1])
        self._gathering = []  # buckets whose all-gather is under way
        self._track(buckets)

    def _provide_memory_of_gradients(self, bucket):
        first = bucket.slots[0].parameter
        multiple = self.world_size * ALIGN_CHUNK_BYTES // first.itemsize
        bucket.gradients = first.new_zeros(round_up(bucket.n, multiple))

    # ---- for checkpoints: as the stages' `StateDicts`

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (original name, whole parameter), a tied one once."""
        for p, name in first_names(named_tensors(self.module, "parameters")).items():
            yield name, p.detach()

    def shard_starts(self) -> dict[str, int]:
        """{original name: where this rank's part begins in the parameter, in elements}: 0."""
        return dict.fromkeys((name for name, _ in self.full_parameters()), 0)


# -------------------------------------------------------------------------------------------------
# other buckets, and ranks that differ
#
# From here on nothing is about the idea.


class RebuiltBuckets:
    """Before `PlainDDP`: once the order of use is known, buckets are filled anew, as torch's DDP
    does it. (An old one may have parameters from both ends of the model, and is complete only at
    the end of a backward.)"""

    def _learn_order(self, came):
        """If buckets will have other parameters, move the means to new ones, bucket by bucket. Each
        `.grad` stays the same object."""
        super()._learn_order(came)
        in_order = [slot.parameter for slot in in_order_of_use(self._trained[::-1], came)]
        parameters = fill_buckets(in_order, self.bucket_cap_mb * 2**20)
        before = [{slot.parameter for slot in bucket.slots} for bucket in self._buckets]
        after = [set(some) for some in parameters]
        if after == before:
            return
        for bucket in self._buckets:
            # The memory goes with the last `.grad` that is moved.
            bucket.gradients, bucket.reduction = None, None
        self._buckets = []
        for some in parameters:
            bucket = Bucket([self._slots[p] for p in some])  # hooks know these slots
            self._buckets.append(bucket)
            self._free_at_end(bucket)
            self._provide_memory_of_gradients(bucket)
            for slot, place in zip(bucket.slots, bucket.places_of_gradients(bucket.slots)):
                gradient = slot.parameter.grad
                if gradient is not None:
                    gradient.data = place.copy_(gradient)


class UnevenRanks:
    """Before `PlainDDP`: ranks need not use the same parameters, nor all of them, and may wrap
    several modules; their buffers are rank 0's; a backward may raise, and then zero_grad() of the
    wrapper is called. (A stage has all of this by `UnevenForwards`.)

    A rank that has no gradient of a parameter sends zeros. One that no rank has used keeps
    `grad is None`. So ranks count by how many each is used: one all-reduce of a number for each,
    and of one more, by which they see whether they average the same backwards. The order that the
    first one shows may differ between ranks: rank 0's is taken.

        _accumulate_grad  {slot: the node of the graph that adds to `.grad`}: autograd can tell
                          whether a backward will reach it. It would make another one for each
                          backward if nobody kept it
        _unread_counts    (a `Count`, own history), or None
        _came_on_rank_0   slots in the order in which the first averaged backward has brought their
                          gradients there
    """

    find_unused_parameters = True
    forward_sync_buffers = True  # whether forwards begin with rank 0's buffers
    _sends_buffers_at_first = True  # whether training does
    _buffers_are_due = True  # whether the next one does
    _unread_counts = None
    _compared = ()  # options, as texts

    # ---- modules and buffers

    def _agree_on_module(self):
        """Raise on every rank, naming the first difference, where ranks wrap different modules.
        Get the first of 2**11 tags, by which messages differ from those of other wrappers."""
        lines = [self._get_name(), *self._compared, f"{self.find_unused_parameters=}",
                 f"{self.forward_sync_buffers=}"]
        sent = self._named("parameters")
        if self._sends_buffers_at_first:
            sent += self._named("buffers")
        for name, t in sent:
            lines.append((name, t.shape, t.stride(), t.dtype, t.requires_grad))
        # From an id, as no two living objects have the same: wrappers hardly ever share tags. From
        # 2**30 on, as a small number is pickled to fewer bytes, and what is sent should not vary.
        first_tag = 2**30 + id(self) // 16 % 2**19 * 2**11
        of_rank_0 = [first_tag, lines]  # only rank 0's go to all ranks
        with self._waiting("compare modules with rank 0"):
            dist.broadcast_object_list(of_rank_0, group_src=0, group=self.process_group)
        self._first_tag, lines_of_rank_0 = of_rank_0
        pairs = itertools.zip_longest(lines_of_rank_0, lines, fillvalue="nothing")
        differences = [pair for pair in pairs if pair[0] != pair[1]]
        of_all_ranks = [None] * self.world_size
        dist.all_gather_object(of_all_ranks, differences[:1], group=self.process_group)
        for rank, differing in enumerate(of_all_ranks):
            if differing:
                of_0, of_rank = differing[0]
                self._refuse(f"ranks wrap different modules: rank 0 has {of_0}, and rank {rank} "
                             f"has {of_rank}")
        super()._agree_on_module()

    def _buffers_at_first(self):
        buffers = super()._buffers_at_first()
        return buffers if self._sends_buffers_at_first else []

    @torch.compiler.disable  # a compiled model would keep the answers of the first call
    def _prepare_forward(self):
        """Raise what the last backward has found: `_check_counts`. Copy rank 0's buffers to all
        ranks; as in torch, not if the forward before ran under no_grad() or in no_sync()."""
        self._check_counts()
        if self._buffers_are_due and self.forward_sync_buffers and not in_backward():
            with self._waiting("get rank 0's buffers"):
                broadcast([t for _, t in self._buffers_to_send()], self.process_group)
        self._buffers_are_due = torch.is_grad_enabled() and self.require_backward_grad_sync
        super()._prepare_forward()

    def _buffers_to_send(self):  # a joint
        return self._named("buffers")

    # ---- a backward that reaches only some parameters

    def _track(self, buckets, frozen=()):
        super()._track(buckets, frozen)
        self._is_on_cpu = all(slot.parameter.is_cpu for slot in self._trained)
        # torch's fake group, by which one process tries out many ranks, sums nothing.
        self._is_fake = dist.get_backend(self.process_group) == "fake"
        self._accumulate_grad = {}
        for slot in self._trained:
            # Of p itself: a class of its own would be asked for a view of p, and get another node.
            with torch._C.DisableTorchFunctionSubclass():
                edge = torch.autograd.graph.get_gradient_edge(slot.parameter)
                self._accumulate_grad[slot] = edge.node

    def _prepare_for_backward(self, task):
        self._check_counts()
        super()._prepare_for_backward(task)

    def _new_backward(self, task):
        """It brings the gradients of those that it reaches: a bucket must not wait for the others.
        One that reaches none averages nothing. (Inside torch.autograd.grad() of a parameter this
        question raises. It should: that writes no `.grad`, so nothing would be averaged. In
        no_sync() nothing is, anyway.)"""
        backward = super()._new_backward(task)
        try:
            for slot, node in self._accumulate_grad.items():
                if not torch._C._will_engine_execute_node(node):
                    backward.to_come[slot.bucket].discard(slot)
        except RuntimeError:
            if backward.is_averaging:
                raise
        if not any(backward.to_come.values()):
            backward.is_averaging, backward.to_launch = False, []
        return backward

    def _put(self, bucket, slots):
        """A parameter that this backward has not reached sends what no_sync() has held back, in DDP
        whatever `.grad` holds, or zeros, as other ranks may have used it. In no_sync() it is left
        alone."""
        backward = self._backward
        if not backward.is_averaging:
            slots = [slot for slot in slots if slot in backward.came]
        with_gradient = [slot for slot in slots if slot.parameter.grad is not None]
        if len(with_gradient) < len(slots) and backward.is_averaging:
            self._put_zeros([slot for slot in slots if slot.parameter.grad is None])
        super()._put(bucket, with_gradient)

    def _put_zeros(self, slots):
        """Zeros where a gradient is missing, unless no_sync() has left one there. If autograd has
        left it undefined, the parameter still counts as used when find_unused_parameters=False, as
        in torch's DDP."""
        bucket = slots[0].bucket
        for slot, place in zip(slots, bucket.places_of_gradients(slots)):
            if slot not in bucket.unreduced:
                place.zero_()
            if slot in self._backward.came and not self.find_unused_parameters:
                bucket.unreduced.add(slot)

    def _learn_order(self, came):
        """All ranks launch buckets in rank 0's order."""
        self._came_on_rank_0 = self._of_rank_0(self._trained, came)
        super()._learn_order(self._came_on_rank_0)

    def _of_rank_0(self, things, some):
        """some of things, as on rank 0: the ranks may have used others, in another order, and have
        to make collectives in one. Costs a broadcast of 8 bytes for each of things."""
        self._check_counts()  # before this can meet that of another wrapper
        number_of = {thing: number for number, thing in enumerate(things)}
        numbers = [number_of[thing] for thing in some]
        none = [-1] * (len(things) - len(numbers))  # all ranks send, or get, as many
        message = torch.tensor(numbers + none, device=self._trained[0].parameter.device)
        with self._waiting("agree on the order of use"):
            dist.broadcast(message, group_src=0, group=self.process_group)
        return [things[number] for number in message.tolist() if number >= 0]

    @torch.no_grad()
    def _finalize_backward(self):
        """Nothing is to come any more: launch and fill the buckets that are left. At last
        `_check_counts`. (On an accelerator that is for the next forward or backward, as in torch:
        here the CPU would wait for the device.)"""
        for slots in self._backward.to_come.values():
            slots.clear()
        self._launch_ready_buckets()
        for bucket in self._buckets:
            self._fill(bucket)
        super()._finalize_backward()
        if self._is_on_cpu:
            self._check_counts()

    def _used_slots(self):
        """One that no rank has used gets no mean, and keeps `grad is None`."""
        counts = self._count_ranks_that_used()
        return [slot for slot, n in zip(super()._used_slots(), counts) if n > 0]

    def _give_means(self, slots):
        """In DDP: if only other ranks have used a parameter, the mean is in the buffer alone."""
        super()._give_means(slots)
        if self.shard_group is None:
            for slot in slots:
                if slot.parameter.grad is None:
                    place, = slot.bucket.places_of_gradients([slot])
                    slot.parameter.grad = place.data  # as in `Bucket.put`

    def _count_ranks_that_used(self):
        """[on how many ranks each parameter was used]; costs an all-reduce of a number for each,
        and of one more: see `_history`. If this rank has used all, it does not wait, and returns W
        for all: the caller asks only which numbers are above 0."""
        is_used = [slot in slot.bucket.unreduced for slot in self._trained]
        count = self._start_count(is_used)
        if all(is_used):
            return [self.world_size] * len(is_used)
        with self._waiting("agree on use"):
            *counts, _ = count.wait()
        return counts

    def _start_count(self, flags):
        """Of flags, a list of bools, and of a checksum of the history; `_check_counts` reads it."""
        history = self._history()
        device = self._trained[0].parameter.device
        count = Count([*flags, self._checksum(history)], device, self.process_group)
        if not self._is_fake:
            self._unread_counts = count, history
        return count

    def _history(self):
        """What ranks have in common that average a backward, as {what: a text}. If one rank calls
        two wrappers in another order, the first backward of the one meets that of the other. So a
        checksum of all texts is compared over ranks."""
        return {"backwards": f"wrapper {self._first_tag}"}

    def _checksum(self, history):
        """int32 has the sum of all ranks'."""
        return zlib.crc32(repr(history).encode()) % (2**31 // self.world_size)

    def _check_counts(self):
        """Raise RuntimeError on all ranks if they had different histories in the last backward; or,
        with find_unused_parameters=False, where some rank has not used a parameter in it, naming
        those that are not frozen."""
        if self._unread_counts is None:
            return
        (count, history), self._unread_counts = self._unread_counts, None
        with self._waiting("agree on use"):
            *counts, total = count.wait()
        if total != self.world_size * self._checksum(history):
            histories = [None] * self.world_size
            with self._waiting("compare what ranks have done"):
                dist.all_gather_object(histories, history, group=self.process_group)
            self._compare_histories(histories)
        if self.find_unused_parameters:
            return
        unused = []
        for slot, n in zip(self._trained, counts):
            if n < self.world_size and slot.parameter.requires_grad:
                unused.append(slot.fqn)
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
                     f"Call wrappers in one order. Evaluate under no_grad()")

    # ---- a backward that raises

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets a backward that has raised. What that has launched may still write sums to
        gradients, so wait for it first."""
        if self._backward is not None:
            self._wait_for_buckets()
            self._backward = None
        super().zero_grad(set_to_none)


class Count:
    """For each of flags, a list of bools, on how many ranks it is set: started, until `wait`. (Of a
    number there, in place of a bool: the sum over ranks.) Costs an all-reduce of 4 bytes a flag."""

    def __init__(self, flags, device, process_group):
        # non_blocking: else the CPU would wait here for all that the device has yet to do.
        counts = torch.tensor(flags, dtype=torch.int32)
        self.counts = counts.to(device, non_blocking=True)
        self.work = dist.all_reduce(self.counts, group=process_group, async_op=True)

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
# as torch's DDP


class TorchOptions:
    """Before `PlainDDP`: the options of torch's DDP, and its comm hooks; means need not be zeroed.
    """

    def __init__(self, module: torch.nn.Module, device_ids: list | None = None, output_device=None,
                 dim: int = 0, broadcast_buffers: bool = True, init_sync: bool = True,
                 process_group: Group = None, bucket_cap_mb: float | None = None,
                 find_unused_parameters: bool = False, check_reduction: bool = False,
                 gradient_as_bucket_view: bool = False, static_graph: bool = False,
                 delay_all_reduce_named_params: list | None = None,
                 param_to_hook_all_reduce: torch.nn.Parameter | None = None,
                 mixed_precision: object = None, device_mesh: object = None,
                 skip_all_reduce_unused_params: bool = False,
                 bucket_cap_mb_list: list[int] | None = None, batched_grad_copy: bool = False,
                 forward_sync_buffers: bool | None = None):
        at_once = "leave it out, as every gradient is averaged during the backward"
        for name, value, instead in (
                ("delay_all_reduce_named_params", delay_all_reduce_named_params, at_once),
                ("param_to_hook_all_reduce", param_to_hook_all_reduce, at_once),
                ("mixed_precision", mixed_precision, "use torch.autocast, or Zero1's param_dtype"),
                ("bucket_cap_mb_list", bucket_cap_mb_list, "give one bucket_cap_mb for all")):
            if value is not None:
                self._refuse(f"does not take {name}: {instead}")
        refuse_no_size(bucket_cap_mb)
        if device_mesh is not None:
            process_group = self._group_of(device_mesh, process_group)
        self.device_ids = device_ids
        # With a static graph torch allows what is never used.
        self.find_unused_parameters = find_unused_parameters or static_graph
        self._compared = [f"{bucket_cap_mb=}"]
        self._sends_buffers_at_first = broadcast_buffers is None or broadcast_buffers
        self.forward_sync_buffers = self._sends_buffers_at_first
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            self._sends_buffers_at_first = True
        self.comm_state, self._comm_hook = None, None
        self._has_averaged = False  # whether the last backward did
        self._may_step = False  # the last no_sync() has said so
        super().__init__(module, process_group, bucket_cap_mb, init_sync)

    def _group_of(self, mesh, process_group):
        """The ranks of a DeviceMesh of one dimension."""
        if process_group is not None:
            self._refuse("takes a process_group or a device_mesh, not both")
        if mesh.ndim != 1:
            self._refuse(f"takes a device_mesh of one dimension, and this one has {mesh.ndim}: "
                         f'give mesh["the name of a dimension"]')
        return mesh.get_group()

    def __reduce__(self):
        """For deepcopy, pickle and AveragedModel: how to make a copy, and what it has then. It has
        no comm hook."""
        if self.process_group is not dist.group.WORLD:
            self._refuse("a copy would use the default process group: copy the module")
        make = functools.partial(type(self), bucket_cap_mb=self.bucket_cap_mb, init_sync=False)
        kept = ("training", "device_ids", "find_unused_parameters", "forward_sync_buffers",
                "gradient_divide_factor")
        return make, (self.module,), {name: getattr(self, name) for name in kept}

    def forward(self, *inputs, **kwargs):
        if self.device_ids:
            device = self._buckets[0].gradients.device
            (inputs,), (kwargs,) = dist.utils._to_kwargs(inputs, kwargs, device, False)
        return super().forward(*inputs, **kwargs)

    def _prepare_for_backward(self, task):
        """If the last backward has averaged, and nobody has zeroed its result G, G is in `.grad`,
        the same on all ranks. New gradients will be added to it, and the whole will be multiplied
        by 1/factor and summed over W ranks: so G becomes W / factor times G. Divide it by that
        first: then it can be summed like what no_sync() has left. It is marked so, as the plain
        class asks for gradients that were zeroed."""
        growth = self.world_size / self.gradient_divide_factor  # 1 unless told otherwise
        held = []
        for slot in self._trained:
            if growth != 1 and slot.parameter.grad is not None:
                held.append(slot)
                slot.bucket.unreduced.add(slot)
        super()._prepare_for_backward(task)  # which may refuse, and then gradients stay as they are
        if self._may_step and self.require_backward_grad_sync:
            self._may_step = False
        if self._has_averaged:
            for slot in held:
                slot.parameter.grad.div_(growth)
        self._has_averaged = False

    def _give_means(self, slots):
        super()._give_means(slots)
        self._has_averaged = True

    def no_sync(self, may_step: bool = False) -> contextlib.AbstractContextManager[None]:
        """As the plain class. may_step: an optimizer may step with what backwards in here leave,
        though it is this rank's own: in local SGD, or where the script itself averages it."""
        self._may_step = may_step
        return super().no_sync()

    # ---- comm hooks; extras/comm_hooks.py has some

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """From now on hook(state, bucket) -> Future reduces each bucket, and divides by W.

        bucket has the methods of torch.distributed.GradBucket.
        """
        if not callable(hook):
            raise TypeError(f"DDP: a comm hook must be callable, not {hook!r}")
        if self._comm_hook is not None:
            self._refuse("has a comm hook already")
        self.comm_state, self._comm_hook = state, torch.no_grad()(hook)

    def _scale_before_sum(self):
        """A comm hook divides by W itself: make up for that."""
        if self._comm_hook is not None:
            return self.world_size / self.gradient_divide_factor
        return super()._scale_before_sum()

    def _start_reduction(self, bucket):
        """By the comm hook, if there is one."""
        if self._comm_hook is None:
            super()._start_reduction(bucket)
        else:
            bucket.reduction = self._comm_hook(self.comm_state, GradBucket(bucket, self._buckets))

    def _finish_reduction(self, bucket):
        """A future is waited for before the next hook is called: a hook may communicate even while
        its future is waited for."""
        if self._comm_hook is None:
            super()._finish_reduction(bucket)
        else:
            future, bucket.reduction = bucket.reduction, None
            bucket.gradients[:bucket.n].copy_(future.wait())


def refuse_no_size(bucket_cap_mb):
    """Raise where it is neither None nor a number of MB. (0: a bucket for each parameter.)"""
    if bucket_cap_mb is not None and not 0 <= bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb is a number of MB, such as 25, and not {bucket_cap_mb}")


# -------------------------------------------------------------------------------------------------
# an optimizer's state


class OptimizerStates:
    """Before a wrapper: the state of an optimizer, whole and by name, as one process would have it.
    Rank 0 can save it, and any wrapper on any number of ranks, or a bare module, can load it. It
    has the form of torch's `get_optimizer_state_dict` with full_state_dict=True:

        state         {name: {kind: value}}, such as {"blocks.0.weight": {"exp_avg": ..., ...}}
        param_groups  as the optimizer has them, but their "params" are names

    Names are those of the bare module; a tied parameter has its first.
    """

    @torch.no_grad()
    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict:
        """The whole state, on every rank, its tensors on the CPU. A collective; in a stage one for
        each parameter. It takes the memory of the whole on every rank, which `sharded_state` of
        checkpoint.py does not.

        Raises RuntimeError for a parameter of another wrapper or module, and where a stage cannot
        put the state of a parameter together, as some keep it in lists.
        """
        known = self._known_to_optimizers()
        state = {}
        groups = []
        for group in optimizer.param_groups:
            names = []
            for p in group["params"]:
                name, slot = self._known(p, known)
                names.append(name)
                own = copied(optimizer.state.get(p, {}))
                whole = own if slot is None else self._join_state(name, slot, own)
                if whole:
                    state[name] = whole
            groups.append(group_of(group, names, names))
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer,
                                       state_dict: dict) -> None:
        """Load a whole state: each rank takes its part; and what groups say, such as rates. Raises
        RuntimeError where groups have other parameters, or the state of a parameter that is cut
        has another shape, before anything is changed."""
        known = self._known_to_optimizers()
        of_groups = []
        for group in optimizer.param_groups:
            of_groups.append([self._known(p, known) for p in group["params"]])
        self._refuse_other_groups(of_groups, state_dict["param_groups"])
        state = {}  # by number, as optimizers save it
        groups = []
        n = 0
        for of_group, group in zip(of_groups, state_dict["param_groups"]):
            numbers = list(range(n, n + len(of_group)))
            n += len(of_group)
            groups.append(group_of(group, numbers, [name for name, _ in of_group]))
            for number, (name, slot) in zip(numbers, of_group):
                if name in state_dict["state"]:
                    whole = copied(state_dict["state"][name])
                    part = whole if slot is None else self._part_of_state(name, slot, whole)
                    state[number] = part
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _known_to_optimizers(self):
        """{what an optimizer has of a parameter: (its name, its Slot, or None if there is no shard
        of it)}."""
        known = {}
        for p, name in first_names(named_tensors(self.module, "parameters")).items():
            slot = self._slots.get(p)
            if slot is None or slot.layout is None:
                known[p] = name, None
            else:
                known[slot.shard] = name, slot
        return known

    def _known(self, p, known):
        if p not in known:
            self._refuse("the optimizer has a parameter that is not this wrapper's: make it of "
                         "model.parameters(), after the model was wrapped")
        return known[p]

    def _refuse_other_groups(self, of_groups, given_groups):
        """Raise where an optimizer and a whole state have other groups of parameters."""
        ours = [{name for name, _ in of_group} for of_group in of_groups]
        given = [set(group["params"]) for group in given_groups]
        if ours != given:
            others = set().union(*ours) ^ set().union(*given)
            self._refuse(f"nothing was loaded: the optimizer has {len(ours)} groups of parameters, "
                         f"and what is given {len(given)}; of other names or in other groups are "
                         f"{sorted(others) or 'some'}")

    def _join_state(self, name, slot, own):
        """This rank's {kind: value} of a parameter -> that of the whole."""
        parts = [None] * dist.get_world_size(self.shard_group)
        dist.all_gather_object(parts, (slot.layout[0], own), group=self.shard_group)
        holders = [(shape, state) for shape, state in parts if math.prod(shape) > 0]
        if not holders:  # the parameter has no elements
            holders = parts[:1]
        shape, whole = holders[0]
        if shape == slot.shape:  # one rank has all of it
            return whole
        for kind, value in whole.items():
            if is_by_element(kind, value, shape):
                elements = [state[kind].reshape(-1) for _, state in holders]
                whole[kind] = torch.cat(elements).as_strided(slot.shape, slot.strides)
            elif has_many_elements(value):
                self._refuse(f"{kind} of {name} in the optimizer's state is of a part, and cannot "
                             f"be put together: use DDP, or save by sharded_state()")
        return whole

    def _part_of_state(self, name, slot, whole):
        """The reverse of `_join_state`: on every rank what it has of the whole."""
        if slot.bucket.cuts is not None:  # uncut
            return whole if slot.layout[0] == slot.shape else {}
        first, end = slot.bucket.shard_range(slot)
        for kind, value in whole.items():
            if is_by_element(kind, value, slot.shape):
                packed = torch.empty_strided(slot.shape, slot.strides, dtype=value.dtype)
                elements = packed.copy_(value).as_strided((slot.n,), (1,))
                whole[kind] = elements[first:end].clone().view(slot.layout[0])
            elif has_many_elements(value):
                self._refuse(f"nothing was loaded: {kind} of {name} does not have the shape "
                             f"{tuple(slot.shape)} of the parameter")
        return whole


def copied(state):
    """A copy on the CPU, which stays as it is while training goes on."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), state)


def group_of(group, parameters, names):
    """A copy of an optimizer's group, with these parameters, in whatever way they are given."""
    copy_of_group = copied({key: value for key, value in group.items() if key != "params"})
    if "param_names" in copy_of_group:  # of optimizers that were made of named_parameters()
        copy_of_group["param_names"] = names
    return {**copy_of_group, "params": parameters}


def is_by_element(kind, value, shape):
    """Whether value, in an optimizer's state, has a number for each element of a parameter of this
    shape. "step" is a count in torch's optimizers, also for a parameter of no dimensions."""
    return kind != "step" and isinstance(value, torch.Tensor) and value.shape == shape


def has_many_elements(value):
    """Whether a tensor is in it that is more than a number."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return any(t.numel() > 1 for t in tensors)


# -------------------------------------------------------------------------------------------------
# names, and hooks


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
            is_sent_as_parameter = kind == "buffers" and isinstance(t, torch.nn.Parameter)
            if t is not None and not is_sent_as_parameter:
                named.append((f"{prefix}.{name}" if prefix else name, t))
    return named


def first_names(pairs):
    """{thing: its first name} of [(name, thing)], in this order."""
    names = {}
    for name, thing in pairs:
        names.setdefault(thing, name)
    return names


def in_backward():
    """Whether a backward is at work in this thread. A forward that begins now recomputes a
    checkpoint."""
    return torch._C._current_graph_task_id() != -1


def weakly(method, *first):
    """A hook that calls method with the arguments in first, and does not keep its object alive."""
    function, weak_self = method.__func__, weakref.ref(method.__self__)

    def hook(*arguments):
        return function(weak_self(), *first, *arguments)

    return hook


class Stopwatch:
    """Adds up seconds of waiting: of the training thread on a CPU; of the stream on an accelerator,
    which the thread does not wait for. There an event before a wait and one after it are read when
    both have passed, so a wait may count a step later. (nan if events of the device have no times.)
    """

    device = torch.device("cpu")

    def __init__(self):
        self.seconds = 0.0
        self.waits = collections.deque()  # (event before, event after), not read yet

    def now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def add_since(self, begun):
        if self.device.type == "cpu":
            self.seconds += time.perf_counter() - begun
        else:
            self.waits.append((begun, self.now()))
            self.read()

    def read(self):
        """The sum so far."""
        while self.waits and self.waits[0][1].query():
            begun, ended = self.waits.popleft()
            try:
                self.seconds += begun.elapsed_time(ended) / 1e3
            except RuntimeError:
                self.seconds = math.nan
        return self.seconds


def span(*what):
    """A context that names what is done in it in a profile. Nothing if nobody profiles: torch's own
    would take longer than most of what it is put around."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(text_of(*what))
    return NOTHING


NOTHING = contextlib.nullcontext()


def text_of(*what):
    return " ".join(str(word) for word in what)


# -------------------------------------------------------------------------------------------------
# what comm hooks need, and hybrid sharding; extras/comm_hooks.py has some hooks


class GradBucket:
    """What a comm hook sees of a bucket. The methods are those of torch.distributed.GradBucket,
    which Python cannot construct."""

    def __init__(self, bucket, buckets):
        self._bucket, self._buckets = bucket, buckets
        self._buffer = bucket.gradients[:bucket.n]

    def index(self):
        """In the order of launches. As with torch's, the first step's buckets are other ones."""
        return self._buckets.index(self._bucket)

    def is_last(self):
        return self._bucket is self._buckets[-1]

    def parameters(self):
        return [slot.parameter for slot in self._bucket.slots]

    def buffer(self):
        return self._buffer

    def gradients(self):
        return self._bucket.views(self._bucket.slots, self._buffer)

    def set_buffer(self, buffer):
        self._buffer = buffer


class HierarchicalState:
    """Two groups that this rank belongs to, for the hook of that name and for hybrid sharding.

        ranks 0 1 2 3 with node_size 2     intra_node of rank 2: 2 3     inter_node of rank 2: 0 2

    intra_node: node_size neighbours, the ranks of one node. inter_node: the ranks with this one's
    place in every node. A collective. Raises ValueError unless node_size divides the world size.
    """

    def __init__(self, node_size: int, process_group: Group = None):
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
# clipping


def total_norm(tensors: list[torch.Tensor], process_group: Group = None) -> torch.Tensor:
    """2-norm of all tensors together, a float64 scalar, the same on every rank. A complex number
    counts as two.

    process_group: the ranks over which the tensors are sharded, whose squares are summed, too, on a
    device that the group serves; None where each rank holds them whole. In float64, so that the
    division into shards does not show once rounded to fp32.
    """
    tensors = list(tensors)
    refuse_held(tensors)
    with torch._C.DisableTorchFunctionSubclass():  # or ZeRO's shards would refuse
        tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        norms = torch._foreach_norm(tensors, 2, torch.float64) if tensors else [torch.zeros(())]
    total = torch.stack(norms).double().square().sum()
    if process_group is not None:
        # Offloaded shards are on the CPU, which the group may not serve.
        total = total.to(dist.distributed_c10d._get_object_coll_device(process_group))
        dist.all_reduce(total, group=process_group)
    return total.sqrt()


def clip_gradients_(gradients: list[torch.Tensor], max_norm: float, process_group: Group = None,
                    divide_by: float = 1) -> torch.Tensor:
    """Divide gradients in place by divide_by; then scale them in place to a total norm of at most
    max_norm. Return the norm after the division and before the scaling, a float64 scalar.

    The one clipping function of all modes. process_group as in `total_norm`; max_norm inf does not
    clip. Both are done by one product, with min(1, max_norm / (norm + 1e-6)) / divide_by, computed
    in float64 and rounded to fp32: so sums over any number of ranks and micro-steps are rounded
    once. Where nothing is to be divided or clipped, gradients are not touched.
    """
    gradients = list(gradients)  # of a generator, which can be read once
    norm = total_norm(gradients, process_group) / divide_by
    if gradients and (max_norm < math.inf or divide_by != 1):
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = (clip / divide_by).float()
        # Also when it is 1: asking would make the CPU wait for the GPU.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


# -------------------------------------------------------------------------------------------------
# how messages are sent: what stands behind the table at the begin


def start_all_gather(flat: torch.Tensor, process_group: Group = None, tag: int = 0,
                     cuts: list[int] | None = None):
    """Start to fill all chunks of flat, 1-D, from the ranks that own them -> wait().

    cuts: where chunks 1 to W-1 begin; None: at equal distances. Costs W-1 times this rank's chunk
    sent.
    """
    rank, W = rank_and_size(process_group)
    if uses_torchs(flat, W, cuts):
        own = flat.view(W, -1)[rank]
        # torch 2.11 knows it by its older name only.
        is_old = not hasattr(dist, "all_gather_single")
        all_gather = dist.all_gather_into_tensor if is_old else dist.all_gather_single
        return all_gather(flat, own, group=process_group, async_op=True)
    chunks = cut_into_chunks(flat, W, cuts)
    return exchange([chunks[rank]] * W, chunks, process_group, tag)


def start_reduce_scatter(flat: torch.Tensor, process_group: Group = None, tag: int = 0,
                         cuts: list[int] | None = None):
    """Start to send each rank its chunk of flat, 1-D -> add(out, earlier).

    cuts: as in `start_all_gather`. Not torch's own: that adds in an order of its own, and 16-bit
    numbers in 16 bits.
    """
    rank, W = rank_and_size(process_group)
    if uses_torchs(flat, W, cuts):
        # The same additions, and one call for Python at any W. It copies this rank's own, too.
        arriving = torch.empty_like(flat)
        work = dist.all_to_all_single(arriving, flat, group=process_group, async_op=True)
        return ReduceScatter(flat.view(W, -1)[rank], arriving.view(W, -1), work)
    chunks = cut_into_chunks(flat, W, cuts)
    if cuts is None:
        return reduce_chunks(chunks, process_group, tag)
    return ReduceInPieces(chunks, bucket_bytes(W), process_group, tag)


def start_all_reduce(flat: torch.Tensor, process_group: Group = None, tag: int = 0):
    """Start to sum flat, 1-D, over ranks in place -> add(), wait()."""
    return AllReduce(flat, process_group, tag)


def rank_and_size(process_group):
    """(this rank's number in a group, W). Asked of the group itself, as torch's functions make many
    calls to find out which one is meant."""
    group = process_group or dist.group.WORLD
    return group.rank(), group.size()


def uses_torchs(flat, W, cuts):
    """Whether to use torch's own collectives. Those of accelerators require equal chunks; gloo's,
    on a CPU, take longer than `exchange`."""
    return not flat.is_cpu and cuts is None and flat.numel() % W == 0


def cut_into_chunks(flat, W, cuts):
    return flat.tensor_split(W if cuts is None else cuts)


class Messages:
    """Messages under way."""

    def __init__(self, messages):
        self.works = dist.batch_isend_irecv(messages) if messages else []

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()  # a work keeps its tensors


def exchange(sends, receives, process_group, tag):
    """Start to send the r-th of sends to rank r, and to receive the r-th of receives from it ->
    wait(). This rank's own, and empty ones, are left out."""
    messages = []
    rank, _ = rank_and_size(process_group)
    for operation, tensors in ((dist.irecv, receives), (dist.isend, sends)):
        for peer, tensor in enumerate(tensors):
            if peer != rank and tensor.numel() > 0:
                messages.append(dist.P2POp(operation, tensor, group=process_group, tag=tag,
                                           group_peer=peer))
    return Messages(messages)


def add_in_rank_order(contributions: list[torch.Tensor], out: torch.Tensor) -> None:
    """out = ((c0 + c1) + c2) + ...

    contributions: tensors c0, c1, ... of one shape, in rank order. c0 is overwritten: the sum is
    made in its memory, then copied to out. (out may be c0, or another one of them, and may have
    another dtype.) If c0 has 16 bits, the sum is made in fp32 in new memory, and rounded once.
    """
    total, *rest = contributions
    if total.dtype.itemsize == 2:
        total = total.float()
    for contribution in rest:  # not torch.sum over a stack, which regroups from W = 5 on
        total += contribution
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)


def reduce_chunks(chunks, process_group, tag):
    """`start_reduce_scatter` of a buffer that was cut into chunks, of any lengths."""
    rank, W = rank_and_size(process_group)
    own = chunks[rank]
    contributions = list(own.new_empty(W - 1, len(own)))  # of the others
    contributions.insert(rank, own)  # now the r-th is rank r's
    messages = exchange(chunks, contributions, process_group, tag)
    return ReduceScatter(own, contributions, messages)


class ReduceScatter:
    """own: this rank's chunk. contributions: to it, in rank order, when work is over."""

    def __init__(self, own, contributions, work):
        self.own, self.contributions, self.work = own, contributions, work

    def add(self, out=None, earlier=()):
        self.work.wait()
        add_in_rank_order([*earlier, *self.contributions], self.own if out is None else out)
        # Frees what has arrived, whoever keeps this.
        self.own, self.contributions, self.work = None, None, None


class ReduceInPieces:
    """As `reduce_chunks`, but what arrives for a long chunk would take W-1 times its memory. So
    chunks are sent in pieces, one after the other, so small that most_bytes arrive of one. While
    add adds one piece, the next one arrives, so two take memory. Only the first is on its way
    before add is called."""

    def __init__(self, chunks, most_bytes, process_group, tag=0):
        self.chunks, self.arguments = chunks, (process_group, tag)
        rank, _ = rank_and_size(process_group)
        self.own = chunks[rank]
        self.longest = max(len(chunk) for chunk in chunks)
        arriving_bytes = self.longest * self.own.itemsize * (len(chunks) - 1)
        n_pieces = max(1, math.ceil(arriving_bytes / most_bytes))
        self.size = math.ceil(self.longest / n_pieces)  # of a piece
        self.under_way = [self.start_piece(0)]

    def start_piece(self, first):
        pieces = [chunk[first:first + self.size] for chunk in self.chunks]
        return reduce_chunks(pieces, *self.arguments)

    def add(self, out=None, earlier=()):
        out = self.own if out is None else out
        for first in range(0, self.longest, self.size):
            end = first + self.size
            if end < self.longest:
                self.under_way.append(self.start_piece(end))
            self.under_way.pop(0).add(out[first:end], [t[first:end] for t in earlier])
        self.chunks, self.own = None, None  # frees the gradients, whoever keeps this


class AllReduce:
    """A reduce-scatter, then an all-gather. But two contributions have only one order: there
    torch's own has the right bits, and is faster."""

    def __init__(self, flat, process_group, tag):
        self.arguments = flat, process_group, tag
        _, W = rank_and_size(process_group)
        self.is_torchs = W <= 2
        if self.is_torchs:
            self.half = dist.all_reduce(flat, group=process_group, async_op=True)
        else:
            self.half = start_reduce_scatter(flat, process_group, tag)

    def add(self):
        if not self.is_torchs:
            self.half.add()
            self.half = start_all_gather(*self.arguments)

    def wait(self):
        self.half.wait()


def broadcast(tensors: list[torch.Tensor], process_group: Group) -> None:
    """Overwrite tensors, of any dtypes, by rank 0's, and wait."""
    if tensors:
        group = process_group or dist.group.WORLD  # that function does not accept None
        # .data: autograd may have saved a buffer, and need not hear of its new value.
        dist._broadcast_coalesced(group, [as_known(t.data) for t in tensors], 2**28, 0)


KNOWN_DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def as_known(t):
    """t, seen as numbers of the same size that every backend can send; gloo knows no int16 and no
    float8, and of 2 bytes only float16. Only its memory counts, not a lazy conj() or neg()."""
    t = t.conj() if t.is_conj() else t
    t = torch._neg_view(t) if t.is_neg() else t
    return torch.view_as_real(t) if t.itemsize == 16 else t.view(KNOWN_DTYPES[t.itemsize])


# -------------------------------------------------------------------------------------------------
# with all of that, and with guards


class NoReducer:
    """What Lightning calls of the reducer of torch's DDP. Nothing is to be done here."""

    def _rebuild_buckets(self):
        return False

    def prepare_for_backward(self, outputs):
        pass


@torch.nn.parallel.DistributedDataParallel.register  # for isinstance(), which libraries ask
class DDP(Guards, TorchOptions, UnevenRanks, RebuiltBuckets, OptimizerStates, PlainDDP):
    """Average gradients over the ranks of process_group during every backward of module.

    device_ids: None, or a list of the one device of module, to which inputs are moved.
    bucket_cap_mb: largest size of a bucket; the first has 1 MB, the next ones double it. None: 25,
    or W/4 if that is more.
    find_unused_parameters: whether a backward may leave parameters out. If not, and one does, every
    rank raises RuntimeError, naming them. If so, one that some rank used counts as zero elsewhere,
    and one that no rank used keeps `grad is None`.
    forward_sync_buffers: rank 0's buffers go to all ranks before a forward, as in torch.
    broadcast_buffers: torch's older name for it; False leaves buffers alone at the start, too. Then
    they may differ between ranks.
    init_sync: compare modules, and start with rank 0's parameters and buffers.
    device_mesh: of one dimension, in place of process_group.
    static_graph: as find_unused_parameters.
    output_device, dim, check_reduction, gradient_as_bucket_view, batched_grad_copy,
    skip_all_reduce_unused_params: torch's; ignored, as they change no gradient. Its other
    arguments are refused by name.

    Names and meaning as in torch.nn.parallel.DistributedDataParallel, of which it is a virtual
    subclass. What `module._ddp_params_and_buffers_to_ignore` names is left alone. Raises
    RuntimeError on every rank where ranks wrap modules that differ in names, shapes, strides,
    dtypes or frozen parameters. Wrap last: freezing, casting and moving come before. Every backward
    that reaches a parameter is averaged, that of `model.module(x)` too, unless it runs in
    no_sync(). A `.grad` lies in a bucket, and so do views of it, such as `.flatten()`: clone what
    has to outlive the next backward. With a comm hook, nothing else may communicate in the same
    group during a backward.
    A copy, by deepcopy or pickle, is wrapped without communication, as with init_sync=False; two
    such may not take part in the same backward.
    """

    # What Lightning and Accelerate touch of torch's DDP.
    static_graph = False
    require_forward_param_sync = True
    reducer = NoReducer()

    def _get_ddp_logging_data(self):
        return {}


DDP.__doc__ = f"{DDP.__doc__}\n    {Guards.__doc__}"  # not +=: with -OO both are None

# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Data parallelism: every rank holds the whole model, reads its own part of the batch, and all
ranks step with the mean of their gradients.

    model = DDP(module)                  # as torch.nn.parallel.DistributedDataParallel
    loss = model(x, y)
    loss.backward()                      # on return every `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

How it works (Li et al., arXiv 2006.15704, section 3.2): parameters are divided among buckets of
25 MB, the last parameters first, since the backward reaches them first. A hook on each parameter
tells when its gradient is complete. When all gradients of a bucket are, they move into its flat
buffer, and their sum over ranks is made while the backward goes on. A callback at the end of the
backward waits for what is still under way. One backward of one rank, buckets 0, 1 and 2:

    gradients of 0 are complete    start 0         its chunks go to the ranks that own them
    gradients of 1 are complete    add 0, start 1  this rank adds up its chunk of 0, and starts to
                                                   send the sum to all ranks, as they do theirs
    gradients of 2 are complete    add 1, start 2
    the backward ends              add 2           there is no computing left to hide this behind
                                   wait 0, 1, 2    now all sums are here, on all ranks

(With two ranks torch's own all-reduce does all of it: "add" does nothing, "wait" waits for it.)

How it differs from torch's: contributions are added in rank order, ((g0 + g1) + g2) + ..., wherever
a gradient lies in a buffer. So the bucket size never changes a bit. oracle.py has the same by hand,
after the backward: `average_gradients`.

Cost: 2 (W-1)/W Psi elements sent per rank and step, and one bucket of memory beside the gradients,
from W = 3 on two. (Psi: the number of parameters; W: the number of ranks, the world size.)

What it asks of a script. The first list it checks, and raises RuntimeError, naming names:

  - Equal modules on all ranks, on one device, not on meta, and wrapped once.
  - Parameters are frozen, unfrozen, added and replaced before wrapping. (Those that are added after
    the first averaged backward it does not see.)
  - Each backward outside of no_sync() brings a gradient of every trained parameter, dense, without
    a graph of its own. (autograd.grad() is for no_sync(); checkpointing wants use_reentrant=False.)
  - After a backward that has raised, zero_grad(set_to_none=True) comes before the next one.
  - Two averaged backwards have zero_grad(set_to_none=True) between them if gradients are sums, as
    after set_gradient_divide_factor(1). Otherwise every rank would add the first sum once more.

The second list it does not check:

  - All ranks make the same forwards, backwards and steps, at the same rates, and load the same. If
    one leaves a backward out, the others wait until the group's timeout; or their next message is
    taken for it.
  - What is trained is in the module. Parameters beside it, as those of a loss, nobody averages.
  - Buffers begin as rank 0's. Then they are each rank's own, as the averages of a BatchNorm.
  - The wrapper is kept as long as it is to work: with it go its hooks.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import time
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

BUCKET_BYTES = 25 * 2**20  # torch's number
FIRST_BUCKET_BYTES = 2**20  # torch's, too: so that sending begins early
MESSAGE_BYTES = 2**18  # a smaller chunk takes about as long to send, so buckets grow with W
ALIGN = 16  # elements: where a parameter begins in its buffer, a cache line in fp32
ALIGN_CHUNK = 4  # elements: where a chunk begins, 16 bytes in fp32
FIRST_TAG = 1000  # below are tags for messages of a script's own, such as torch's default, 0


# -------------------------------------------------------------------------------------------------
# collectives
#
# A flat buffer of n elements is cut into W equal chunks, and rank r owns the r-th.
#
#             before          reduce-scatter: each owner   all-gather: each owner sends
#                             has the sum of its chunk     its chunk to all ranks
#   rank 0    a0  a1  a2      S0  .   .                    S0  S1  S2      S0 = (a0 + b0) + c0
#   rank 1    b0  b1  b2      .   S1  .                    S0  S1  S2      S1 = (a1 + b1) + c1
#   rank 2    c0  c1  c2      .   .   S2                   S0  S1  S2      S2 = (a2 + b2) + c2
#
# Each sends (W-1)/W n elements per rank. One after the other they are an all-reduce. Both are
# started, and finished later by a method of what is returned. Messages have tags: on a CPU
# messages of different tags never mix, whatever their order. (On an accelerator all ranks have to
# make all calls in one order.)

# Its name before torch 2.13 was the other one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_all_gather(flat: Tensor, group: ProcessGroup, tag: int):
    """Start to fill the chunks of flat, (n,), from their owners -> wait()."""
    chunks = flat.view(group.size(), -1)
    own = chunks[group.rank()]
    if flat.is_cpu:
        return exchange([own] * group.size(), chunks, group, tag)
    return all_gather_single(flat, own, group=group, async_op=True)


class ReduceScatter:
    """Started when it is made: each rank is sent its chunk of flat, (n,).

        contributions  W tensors, (n/W,): the r-th is rank r's values of this rank's chunk
        work           wait() ends when all of them are here
    """

    def __init__(self, flat: Tensor, group: ProcessGroup, tag: int):
        chunks = flat.view(group.size(), -1)
        if flat.is_cpu:
            rank = group.rank()
            self.contributions = list(torch.empty_like(chunks[1:]))  # W - 1 rows: of the others
            self.contributions.insert(rank, chunks[rank])
            self.work = exchange(chunks, self.contributions, group, tag)
        else:
            # Not torch's reduce_scatter: that adds in an order of its own, and 16 bits in 16 bits.
            arriving = torch.empty_like(chunks)
            self.work = dist.all_to_all_single(arriving, chunks, group=group, async_op=True)
            self.contributions = list(arriving)

    def wait(self) -> None:
        self.work.wait()

    def add(self, out: Tensor, earlier: Tensor | None = None) -> None:
        """Wait. Then out = ((earlier + rank 0's) + rank 1's) + ..., each (n/W,).

        The first of the addends is overwritten: nobody needs it any more. 16-bit numbers are added
        in fp32: in bf16 256 + 1 is 256."""
        self.wait()
        addends = self.contributions
        if earlier is not None:
            addends = [earlier, *addends]
        total = addends[0]
        if total.itemsize == 2:
            total = total.float()
        for addend in addends[1:]:  # not torch.sum over a stack, which regroups from W = 5 on
            total += addend
        out.copy_(total)


class Messages:
    """Messages under way."""

    def __init__(self, works: list[dist.Work]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def exchange(sends, receives, group: ProcessGroup, tag: int) -> Messages:
    """Start to send the r-th of sends to rank r, and to receive the r-th of receives from it, but
    for this rank's own. (For 64 MB on 4 ranks gloo's own collectives take 1.5 to 3 times as long.)
    """
    messages = []
    for peer in range(group.size()):
        if peer != group.rank():
            for operation, tensors in ((dist.irecv, receives), (dist.isend, sends)):
                messages.append(dist.P2POp(operation, tensors[peer], group=group, group_peer=peer,
                                           tag=tag))
    return Messages(dist.batch_isend_irecv(messages) if messages else [])


def broadcast(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Overwrite tensors, of any dtype and strides, by rank 0's."""
    for t in tensors:
        value = t.data.contiguous()  # NCCL sends nothing else
        as_bytes = value.view(-1).view(torch.uint8)  # gloo does not know every dtype
        dist.broadcast(as_bytes, group_src=0, group=group)
        t.data.copy_(value)


# -------------------------------------------------------------------------------------------------
# buckets


class Bucket:
    """Some parameters, and a flat buffer in which their gradients lie one after the other:

        parameters   a (2, 3)       b (2,)           (ALIGN is 16; here it is 4)
        gradients    a a a a a a - - b b - -         n = 12, a begins at 0 and b at 8

        names        of the parameters
        layouts      (shape, strides, begin) of each parameter in the buffer
        n            elements of the buffer, which W chunks divide
        tag          of its messages
        gradients    the buffer, or None
        pending      names of the parameters whose gradient this backward has yet to bring
        reduction    of gradients, while it is under way
        has_sums     of DDP: `.grad` has sums over ranks, of a backward before
    """

    def __init__(self, parameters: list[nn.Parameter], names: list[str], W: int, tag: int):
        self.parameters, self.names, self.tag = parameters, names, tag
        self.layouts = []
        n = 0
        for p in parameters:
            # Its order of dimensions, as in channels_last, and no gaps. With other strides a
            # convolution takes another kernel, which rounds differently.
            strides = torch.empty_like(p, device="meta").stride()
            self.layouts.append((p.shape, strides, n))
            n = round_up(n + p.numel(), ALIGN)
        self.n = round_up(max(n, 1), W * ALIGN_CHUNK)  # 1: an empty message would be lost
        self.gradients, self.reduction = None, None
        self.pending = set()
        self.has_sums = False

    def __str__(self):
        return f"the bucket from {self.names[0]} on"

    def views(self, flat: Tensor) -> list[Tensor]:
        """All of each parameter, in its shape, in a buffer of n elements."""
        return [flat.as_strided(*layout) for layout in self.layouts]

    def has_any_gradient(self) -> bool:
        """Whether some `.grad` lies in the buffer."""
        begin = self.gradients.data_ptr()
        end = begin + self.gradients.nbytes
        for p in self.parameters:
            if p.grad is not None and begin <= p.grad.data_ptr() < end:
                return True
        return False

    def has_all_gradients(self) -> bool:
        """Whether each `.grad` is its place in the buffer."""
        if self.gradients is None:
            return False
        memory = self.gradients.data_ptr()
        for p, (_, _, begin) in zip(self.parameters, self.layouts):
            if p.numel() > 0 and p.grad.data_ptr() != memory + begin * p.grad.itemsize:
                return False
        return True

    def fill(self) -> None:
        """Move the gradients into the buffer, and let each `.grad` be its place there. So autograd
        adds the next micro-step to it, and the sum over ranks will be there.

        After zero_grad(), be it of some of them, the buffer is a new one: a script may have kept
        gradients of the last step."""
        if self.has_all_gradients():
            return
        first = self.parameters[0]
        self.gradients = None  # freed before the new one is made
        self.gradients = torch.empty(self.n, dtype=first.dtype, device=first.device)
        places = self.views(self.gradients)
        # One kernel on an accelerator.
        torch._foreach_copy_(places, [p.grad for p in self.parameters])
        for p, place in zip(self.parameters, places):
            # .data: it keeps its own _version. Views of one buffer would share theirs, and autograd
            # would take a write to one of them for a write to all.
            p.grad.data = place


def round_up(n: int, multiple: int) -> int:
    return multiple * math.ceil(n / multiple)


def bucket_bytes(W: int, bucket_cap_mb: float | None) -> float:
    """The size of a bucket: bucket_cap_mb, or 25 MB, or more for very many ranks."""
    if bucket_cap_mb is not None:
        return bucket_cap_mb * 2**20
    return max(BUCKET_BYTES, W * MESSAGE_BYTES)


def fill_buckets(parameters: list[nn.Parameter], first_bytes: float,
                 cap_bytes: float) -> list[list[nn.Parameter]]:
    """Divide parameters, in this order, into lists of one dtype. The first has at most first_bytes,
    the others cap_bytes, unless one parameter alone has more."""
    lists = []
    n_bytes = 0  # of the last list
    for p in parameters:
        most = first_bytes if len(lists) <= 1 else cap_bytes
        if not lists or lists[-1][0].dtype != p.dtype or n_bytes + p.nbytes > most:
            lists.append([])
            n_bytes = 0
        lists[-1].append(p)
        n_bytes += p.nbytes
    return lists


# -------------------------------------------------------------------------------------------------
# the reducer, which ZeRO shares


class Reducer(nn.Module):
    """Hooks tell when gradients are complete, buckets are launched in one order on all ranks, and a
    callback ends the backward. DDP and the stages of ZeRO have the rest: `_start_reduce` sends the
    gradients of a bucket, `_add` adds up what has arrived.

        gradient_divide_factor  what the sum over ranks is divided by: W, unless told
        exposed_s    seconds that this rank has waited for others; nan on an accelerator, where only
                     its stream waits
        shard_group  the ranks over which parameters are sharded; None in DDP
        buckets      of trained parameters, in the order in which they are launched: in the first
                     backward the reverse order of the module, then that in which rank 0 has
                     completed them in the first
        _names       {parameter: its name}, in the module's order
        _bucket_of   {name: the bucket of that parameter}

    Of the backward that is under way:

        _backward    autograd's number of it
        _averages    it is not in no_sync()
        _completed   buckets of which it has brought all gradients, in that order
        _to_launch   buckets that it has yet to launch, in order
        _to_add      the one that it has launched last, until its sum is added up
    """

    shard_group = None
    require_backward_grad_sync = True  # torch's name; no_sync() changes it

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None, options: dict):
        """options: what must be equal on all ranks beside the module."""
        super().__init__()
        self.group = process_group or dist.group.WORLD
        if not isinstance(self.group, dist.ProcessGroup):
            raise RuntimeError("call torch.distributed.init_process_group() first, and wrap a "
                               "module on the ranks of process_group alone")
        self.module = module
        self._names = {p: name for name, p in module.named_parameters()}
        self._check_module(options)
        self._frozen = {name for p, name in self._names.items() if not p.requires_grad}
        self.gradient_divide_factor = self.group.size()
        device = next(iter(self._names)).device
        self.exposed_s = 0.0 if device.type == "cpu" else math.nan
        self._backward = None
        self._knows_order = False

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    # ---- what is asked of a module

    def _check_module(self, options):
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        devices = {str(t.device) for t in tensors.values()}
        if not self._names:
            self._refuse("the module has no parameters")
        if len(devices) > 1 or "meta" in devices:
            self._refuse(f"a module has to be on one device, and not on meta: it is on {devices}")
        for m in self.module.modules():
            if isinstance(m, (Reducer, nn.parallel.DistributedDataParallel)):
                self._refuse(f"a part of the module is wrapped already, by {type(m).__name__}")
        for p, name in self._names.items():
            if is_wrapped(p) or hasattr(p, "to_local"):  # that is fully_shard's
                self._refuse(f"{name} is wrapped already")
        for name, t in tensors.items():
            if t.layout != torch.strided:
                self._refuse(f"{name} is sparse: make it dense")
            if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)):
                self._refuse(f"elements of {name} share memory, as after expand(): clone it. (Or a "
                             f"stage has had it: build the module anew)")
        facts = [f"{type(self).__name__}, {options}"]
        for name, t in tensors.items():
            facts.append(f"{name}: {tuple(t.shape)}, strides {t.stride()}, {t.dtype}, "
                         f"requires_grad={t.requires_grad}")
        self._check_equal(facts)

    def _check_equal(self, facts):
        """Compare a hash; only if ranks differ, all facts."""
        own = hashlib.sha256(repr(facts).encode()).digest()
        hashes = [None] * self.group.size()
        dist.all_gather_object(hashes, own, group=self.group)
        if len(set(hashes)) == 1:
            return
        facts_of = [None] * self.group.size()
        dist.all_gather_object(facts_of, facts, group=self.group)
        for rank, facts in enumerate(facts_of):
            for first, other in itertools.zip_longest(facts_of[0], facts, fillvalue="no more"):
                if first != other:
                    self._refuse(f"ranks wrap different modules. Rank 0 has {first}; rank {rank} "
                                 f"has {other}")

    def _get_from_rank_0(self, tensors):
        with self._telling("wait", "get", "rank 0's values"):
            broadcast(tensors, self.group)

    def _refuse(self, text):
        raise RuntimeError(f"{type(self).__name__} on rank {dist.get_rank()}: {text}")

    def __getstate__(self):
        self._refuse("a wrapper is neither copied nor pickled")

    # ---- a backward

    def _watch(self, buckets):
        """Hook the trained parameters of buckets."""
        self.buckets, self._bucket_of = [], {}
        for bucket in buckets:
            for name in bucket.names:
                self._bucket_of[name] = bucket
            if not bucket.parameters[0].requires_grad:
                continue
            self.buckets.append(bucket)
            for name, p in zip(bucket.names, bucket.parameters):
                self._hook(p.register_post_accumulate_grad_hook,
                           type(self)._gradient_is_complete, name)

    def _hook(self, register, method, *first, **options):
        """Register a hook that calls method(self, *first, ...). It goes with self, and does not
        keep self: so a wrapper that is dropped goes at once. (Else the garbage collector would
        remove the hook some time later, perhaps while torch goes through its hooks.)"""
        hook = functools.partial(method, weakref.proxy(self), *first)
        weakref.finalize(self, register(hook, **options).remove)

    def _notice_backward(self):
        """At each sign of a backward: the first one begins it."""
        number = torch._C._current_graph_task_id()
        if number != self._backward:
            self._backward = number
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _begin_backward(self):
        self._check_frozen()
        self._wait_for_reductions()  # of the last backward, if it has raised
        for bucket in self.buckets:
            bucket.pending = set(bucket.names)
        self._averages = self.require_backward_grad_sync
        self._completed, self._to_add = [], []
        self._to_launch = list(self.buckets) if self._averages else []

    def _check_frozen(self):
        for p, name in self._names.items():
            was_trained = name not in self._frozen
            if p.requires_grad != was_trained:
                self._refuse(f"freeze, or unfreeze, before wrapping: {name}")

    def _refuse_after_error(self):
        self._refuse("the backward before has raised when a part of its gradients had been sent: "
                     "call zero_grad(set_to_none=True) before the next one")

    def _gradient_is_complete(self, name, p):
        """A hook of a parameter."""
        self._notice_backward()
        if p.grad is None or p.grad.layout != torch.strided or p.grad.requires_grad:
            self._refuse(f"the gradient of {name} is sparse, has a graph of its own "
                         f"(create_graph=True), or a hook has taken it away")
        bucket = self._bucket_of[name]
        bucket.pending.discard(name)
        if not bucket.pending:
            self._completed.append(bucket)
            bucket.fill()
            self._launch_ready_buckets()

    def _launch_ready_buckets(self):
        """In the order that all ranks have in common: on each rank buckets may be completed in
        another order, and their messages would mix."""
        while self._to_launch and not self._to_launch[0].pending:
            self._add_last()
            self._launch(self._to_launch.pop(0))

    def _launch(self, bucket):
        if self.gradient_divide_factor != 1:
            # Before the sum, which may overflow in fp16.
            bucket.gradients.mul_(1 / self.gradient_divide_factor)
        with self._telling("start", "reduce", bucket):
            self._start_reduce(bucket)
        self._to_add.append(bucket)

    def _add_last(self):
        if self._to_add:
            bucket = self._to_add.pop()
            with self._telling("wait", "reduce", bucket):
                self._add(bucket)

    def _wait_for_reductions(self):
        for bucket in self.buckets:
            if bucket.reduction is not None:
                with self._telling("wait", "reduce", bucket):
                    bucket.reduction.wait()
                bucket.reduction = None

    @torch.no_grad()
    def _end_backward(self):
        """A callback of autograd's. What it raises, backward() raises."""
        self._add_last()
        self._wait_for_reductions()
        if not self._averages:
            return
        missing = set()
        for bucket in self.buckets:
            missing |= bucket.pending
        trained = set().union(*[bucket.names for bucket in self.buckets])
        if missing == trained:  # autograd.grad() of the inputs, as Zero3 notices it
            return
        if missing or not self._knows_order:
            self._check_added()
        if missing:
            names = [name for name in self._names.values() if name in missing]
            self._refuse(f"a backward has brought no gradient of {', '.join(names)}. Use or freeze "
                         f"them (dropin's classes allow it); call autograd.grad() and partial "
                         f"backwards in no_sync(); checkpoint with use_reentrant=False")
        if not self._knows_order:
            self._learn_order()
            self._knows_order = True

    def _check_added(self):
        for name, p in self.module.named_parameters():
            if p not in self._names:
                self._refuse(f"wrap after adding or replacing parameters, such as {name}")

    def _learn_order(self):
        """In the first backward that is averaged."""
        self.buckets = self._in_order_of_rank_0(self.buckets, self._completed)

    def _in_order_of_rank_0(self, things, used):
        """things in the order in which rank 0 has used them. A collective."""
        order = torch.tensor([things.index(thing) for thing in used])
        order = order.to(next(iter(self._names)).device)
        with self._telling("wait", "learn", "rank 0's order"):
            dist.broadcast(order, group_src=0, group=self.group)
        return [things[place] for place in order.tolist()]

    @contextlib.contextmanager
    def _telling(self, kind, verb, what):
        """Around what starts messages, and what waits for them: for a profile, an error, a log.
        kind: "start" or "wait"."""
        begun_s = time.perf_counter()
        try:
            with span(f"{kind}: {verb}", what):
                yield
        except RuntimeError as error:
            self._refuse(f"could not {verb} {what}: {error}. (Has another rank died? Has it made "
                         f"another forward, backward or step?)")
        if kind == "wait":
            # nn.Module's own way to set an attribute makes ten calls.
            vars(self)["exposed_s"] += time.perf_counter() - begun_s

    # ---- what a script calls

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context: backwards in it only accumulate. The next one outside averages all."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum over ranks by factor in place of W. FSDP2's name. With 1 gradients are
        sums, which a script may divide once, by all micro batches of a step: so nothing is rounded
        twice, and all W have the bits of one process."""
        self.gradient_divide_factor = factor

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients to a total norm of at most max_norm -> the norm before. See
        `clip_gradients_`. A collective where they are sharded."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return clip_gradients_(gradients, max_norm, self.shard_group)


def is_wrapped(p: nn.Parameter) -> bool:
    """Whether a wrapper has hooked it, by `Reducer._hook`."""
    for hook in (p._post_accumulate_grad_hooks or {}).values():
        owner = next(iter(getattr(hook, "args", ())), None)
        if isinstance(owner, Reducer):
            return True
    return False


NO_SPAN = contextlib.nullcontext()


def span(verb: str, what):
    """A named range in a profile, if one is being made."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"{verb} {what}")
    return NO_SPAN


# -------------------------------------------------------------------------------------------------
# DDP


class DDP(Reducer):
    """Average gradients over ranks during every backward of module.

    process_group: the ranks that train together; all, unless given.
    bucket_cap_mb: the largest size of a bucket in MB (2**20 bytes); 25, or W/4 if that is more,
    unless given. The first has 1, or less.

    All ranks begin with rank 0's parameters and buffers. Hooks are on the parameters, so a backward
    of `model.module(x)` is averaged, too. Raises RuntimeError: see the first list above.
    """

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None,
                 bucket_cap_mb: float | None = None):
        super().__init__(module, process_group, dict(bucket_cap_mb=bucket_cap_mb))
        self._get_from_rank_0([*self._names, *module.buffers()])
        trained = [p for p in self._names if p.requires_grad]
        W = self.group.size()
        cap_bytes = bucket_bytes(W, bucket_cap_mb)
        first_bytes = min(FIRST_BUCKET_BYTES, cap_bytes)
        buckets = []
        # The last parameters first: the backward reaches them first.
        for some in fill_buckets(trained[::-1], first_bytes, cap_bytes):
            names = [self._names[p] for p in some]
            buckets.append(Bucket(some, names, W, FIRST_TAG + len(buckets)))
        self._watch(buckets)

    def _begin_backward(self):
        would_be_means = self.gradient_divide_factor == self.group.size()
        for bucket in self.buckets:
            has_any = bucket.gradients is not None and bucket.has_any_gradient()
            if has_any and bucket.reduction is not None:
                self._refuse_after_error()
            bucket.has_sums = bucket.has_sums and has_any
            if bucket.has_sums and self.require_backward_grad_sync and not would_be_means:
                self._refuse("the sum of an averaged backward before is still in `.grad`, and "
                             "every rank would add it once more. Call zero_grad(set_to_none=True) "
                             "between the two, or put all but a step's last backward into "
                             "no_sync()")
        super()._begin_backward()

    def _start_reduce(self, bucket):
        if self.group.size() <= 2:  # two numbers have only one sum: torch's own has the right bits
            bucket.reduction = dist.all_reduce(bucket.gradients, group=self.group, async_op=True)
        else:
            bucket.reduction = ReduceScatter(bucket.gradients, self.group, bucket.tag)

    def _add(self, bucket):
        """With two ranks there is nothing to add: torch does."""
        if isinstance(bucket.reduction, ReduceScatter):
            chunks = bucket.gradients.view(self.group.size(), -1)
            bucket.reduction.add(chunks[self.group.rank()])
            bucket.reduction = start_all_gather(bucket.gradients, self.group, bucket.tag)
        bucket.has_sums = True

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the module, the parameter), not copied: the stages of ZeRO gather it."""
        for name, p in self.module.named_parameters():
            yield name, p.detach()

    def shard_starts(self) -> dict[str, int]:
        """{name: the first element that this rank has of the parameter}: 0, as it has all."""
        return {name: 0 for name, _ in self.module.named_parameters()}


# -------------------------------------------------------------------------------------------------
# clipping


def total_norm(tensors: list[Tensor], process_group: ProcessGroup | None = None) -> Tensor:
    """2-norm of all tensors together -> a float64 scalar, the same on every rank.

    process_group: the ranks over which the tensors are sharded, whose squares are added, too; None
    where each rank has them whole. In float64, since shards of another W add up in another order:
    rounded to fp32 that shows in about one step of 10**8. A complex number counts as two.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    device = tensors[0].device if tensors else "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    if tensors:
        norms = torch._foreach_norm(tensors, 2, torch.float64)
        total = torch.stack(norms).double().square().sum()
    if process_group is not None:
        # A rank without gradients has its zero on the CPU, which the group may not serve.
        total = total.to(dist.distributed_c10d._get_object_coll_device(process_group))
        dist.all_reduce(total, group=process_group)
    return total.sqrt()


def clip_gradients_(gradients: Iterable[Tensor], max_norm: float,
                    process_group: ProcessGroup | None = None, divide_by: float = 1) -> Tensor:
    """Divide gradients in place by divide_by; then scale them in place to a total norm of at most
    max_norm, or not at all if that is inf -> the norm between the two, a float64 scalar.

    process_group: as in `total_norm`. Both are done by one product, with
    min(1, max_norm / (norm + 1e-6)) / divide_by, computed in float64 and rounded to fp32 once. So
    sums over any number of ranks and micro-steps are rounded once.
    """
    gradients = list(gradients)
    norm = total_norm(gradients, process_group) / divide_by
    if gradients and (max_norm < math.inf or divide_by != 1):
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = (clip / divide_by).float().to(gradients[0].device)
        # Also if it is 1: to ask for it would make the CPU wait for an accelerator.
        torch._foreach_mul_(gradients, factor)
    return norm

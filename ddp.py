"""Data parallelism: every rank holds the whole model, reads its own part of the batch, and all
ranks step with the mean of their gradients.

    model = DDP(module)                      # as torch.nn.parallel.DistributedDataParallel
    loss = model(x, y)
    loss.backward()                          # on return every `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's DDP: 2,700 lines of Python and a reducer in C++. How it works (Li et al., arXiv
2006.15704, section 3.2): parameters are divided among buckets of 25 MB, the last parameters first,
since the backward reaches them first. A hook on each parameter moves its gradient into the bucket's
flat buffer. A full bucket is multiplied by 1/W, and its sum over ranks is made while the backward
goes on, two or three buckets at a time. A callback at the end of the backward sends what is left,
and waits.

How it differs from torch's: the W contributions to an element are added in rank order,
((g0 + g1) + g2) + ..., wherever it lies in a buffer, so the bucket size never changes a bit. (A
ring all-reduce adds in an order that depends on the position.) oracle.py computes the same after
the backward, parameter by parameter: `average_gradients`.

Cost: 4 Psi bytes of buckets in fp32, which are the gradients (Psi: the number of parameters); 2
(W-1)/W Psi elements sent per rank and step; one number per parameter to agree on which were used,
and one more to see that all ranks average the same step; at W >= 3 the memory of a bucket, for what
arrives. It works on any accelerator of torch, on the stream of the forward.

In this order: collectives, buckets, the reducer that ZeRO shares, `PlainDDP`, comm hooks, clipping.
That is all of DDP. The last lines put `Guards` of guards.py before it, which protect from mistakes:
that is `DDP`. `from ddp import PlainDDP as DDP` switches them off, and no bit changes.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from guards import Guards

Group = dist.ProcessGroup | None  # None: all ranks


# -------------------------------------------------------------------------------------------------
# collectives
#
# A flat buffer is cut into W chunks, and rank r owns the r-th. With three ranks, where a1 is rank
# a's values in chunk 1:
#
#             before          reduce_scatter: each owner   all_gather: each owner sends
#                             has the sum of its chunk     its chunk to all ranks
#   rank a    a0  a1  a2      S0  .   .                    S0  S1  S2      S0 = (a0 + b0) + c0
#   rank b    b0  b1  b2      .   S1  .                    S0  S1  S2      S1 = (a1 + b1) + c1
#   rank c    c0  c1  c2      .   .   S2                   S0  S1  S2      S2 = (a2 + b2) + c2
#
# One after the other they are an all-reduce. Each costs (W-1)/W of the buffer's elements sent.
# Chunks are as nearly equal as `Tensor.tensor_split(W)` makes them.
#
# `exchange`, `reduce_scatter`, `all_gather` and `count_ranks` start the communication, and return a
# function that waits for its end; `all_reduce` is a generator; `broadcast` waits. On an accelerator
# only the current stream waits, and the CPU goes on. Call all of them on the stream of the forward.
# On accelerators all ranks have to make all calls in one order. On CPU the tag tells messages
# apart, so the order may differ between calls with different tags.


def exchange(sends, receives, process_group, tag):
    """Start to send the r-th of sends to rank r, and to receive the r-th of receives from it ->
    a function that waits. This rank's own, and empty ones, are left out."""
    messages = []
    for operation, tensors in ((dist.irecv, receives), (dist.isend, sends)):
        for peer, tensor in enumerate(tensors):
            if peer != dist.get_rank(process_group) and tensor.numel() > 0:
                messages.append(dist.P2POp(operation, tensor, group=process_group, tag=tag,
                                           group_peer=peer))
    works = dist.batch_isend_irecv(messages) if messages else []

    def wait():
        for work in works:
            work.wait()
        works.clear()  # a work keeps its tensors
        messages.clear()

    return wait


def is_native(flat, W):
    """Whether to use torch's own collectives. Those of accelerators require equal chunks; gloo's,
    on a CPU, take longer than `exchange`."""
    return not flat.is_cpu and len(flat) % W == 0


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


def reduce_scatter(flat: torch.Tensor, process_group: Group = None, tag: int = 0):
    """Start to send each rank its chunk of flat, 1-D -> a function add(out, earlier), which
    waits and adds.

    add writes to out the sum, by `add_in_rank_order`, of the tensors in the list earlier (ZeRO
    has the sum of earlier micro-steps there), and then of what each rank has in this rank's chunk.
    Without arguments out is this rank's chunk of flat itself, so the sum is in place.

    Costs: the others' chunks sent, and W-1 times this rank's chunk of memory, for what arrives,
    which add frees.

    Not torch's own: that adds in an order of its own, and 16-bit numbers in 16 bits.
    """
    W = dist.get_world_size(process_group)
    if is_native(flat, W):
        return reduce_scatter_at_once(flat, process_group)
    return reduce_chunks(flat.tensor_split(W), process_group, tag)


def reduce_chunks(chunks, process_group, tag):
    """`reduce_scatter` of a buffer that the caller has cut into chunks, of any lengths."""
    rank, W = dist.get_rank(process_group), dist.get_world_size(process_group)
    own = chunks[rank]
    contributions = list(own.new_empty(W - 1, len(own)))  # of the others
    contributions.insert(rank, own)  # now the r-th is rank r's
    wait = exchange(chunks, contributions, process_group, tag)

    def add(out=own, earlier=()):
        wait()
        add_in_rank_order([*earlier, *contributions], out)
        contributions.clear()  # frees what has arrived, whoever keeps this function

    return add


def reduce_scatter_at_once(flat, process_group):
    """`reduce_scatter` of equal chunks by one all_to_all_single: the same additions, and one call
    for Python at any W. It copies this rank's own chunk, too."""
    rank, W = dist.get_rank(process_group), dist.get_world_size(process_group)
    own = flat.view(W, -1)[rank]
    arriving = [torch.empty_like(flat)]
    work = dist.all_to_all_single(arriving[0], flat, group=process_group, async_op=True)

    def add(out=own, earlier=()):
        work.wait()
        contributions = arriving.pop().view(W, -1)  # freed at the end, whoever keeps this function
        add_in_rank_order([*earlier, *contributions], out)

    return add


def all_gather(flat: torch.Tensor, process_group: Group = None, tag: int = 0):
    """Start to fill all chunks of flat, 1-D, from the ranks that own them -> a function that waits.
    """
    rank, W = dist.get_rank(process_group), dist.get_world_size(process_group)
    if is_native(flat, W):
        own = flat.view(W, -1)[rank]
        return dist.all_gather_single(flat, own, group=process_group, async_op=True).wait
    return gather_chunks(flat.tensor_split(W), process_group, tag)


def gather_chunks(chunks, process_group, tag):
    """`all_gather` of chunks of any lengths. Costs W-1 times this rank's chunk sent."""
    own = chunks[dist.get_rank(process_group)]
    return exchange([own] * len(chunks), chunks, process_group, tag)


def all_reduce(flat: torch.Tensor, process_group: Group = None, tag: int = 0):
    """Sum flat, 1-D, over ranks in place. It is a generator, a *reduction*: each next() goes on to
    a `yield`, where messages are under way and the caller can compute, and at last to the end:

        W <= 2   1st next(): start the all-reduce.       2nd: nothing. 3rd: wait for it.
        W >= 3   1st next(): start the reduce-scatter.   2nd: wait, add, start the all-gather.
                                                         3rd: nothing. 4th: wait for that.
    """
    if dist.get_world_size(process_group) <= 2:
        # Two contributions have only one order: torch's own has the right bits, and is faster.
        wait = dist.all_reduce(flat, group=process_group, async_op=True).wait
    else:
        add = reduce_scatter(flat, process_group, tag)
        yield
        add()
        wait = all_gather(flat, process_group, tag)
    yield
    yield  # once more, so that DDP fills another bucket before it waits: saves 2 to 3 % of a step
    wait()


def count_ranks(flags: list[bool], device: torch.device, process_group: Group):
    """Start to count, for each of flags, a list of bools, the ranks on which it is set, on device
    -> a function that waits for the list of these numbers. (Of a number there, in place of a bool:
    the sum over ranks.) Costs an all-reduce of 4 bytes per flag."""
    # non_blocking: else the CPU would wait here for all that the device has yet to do.
    counts = torch.tensor(flags, dtype=torch.int32).to(device, non_blocking=True)
    work = dist.all_reduce(counts, group=process_group, async_op=True)

    def wait():
        work.wait()
        return counts.tolist()

    return wait


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
# buckets


@dataclasses.dataclass(eq=False)  # eq=False: a comparison of two would compare tensors
class Slot:
    """The place of a parameter in a bucket. shard: what the optimizer has of the parameter, whose
    `.grad` becomes the mean: all of it; in ZeRO this rank's part."""
    bucket: "Bucket"
    parameter: torch.nn.Parameter
    fqn: str  # its fully qualified name, such as "blocks.0.mlp.down.weight"
    shape: torch.Size
    strides: tuple  # in the buffer: packed, without gaps between its elements
    start: int  # its first element in the flat buffer
    shard: torch.nn.Parameter


BUCKET_BYTES = 25 * 2**20  # torch DDP's number
MESSAGE_BYTES = 2**18  # buckets grow with W, as smaller chunks than this take as much time to send
ALIGN_CHUNK_BYTES = 16  # chunks are multiples of it, so that kernels and NCCL read 16 bytes at once


def bucket_bytes(W):
    """Largest size of a bucket for W ranks."""
    return max(BUCKET_BYTES, W * MESSAGE_BYTES)


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
        unreduced    the slots that count as used in the next sum over ranks: their gradient is in
                     the buffer, and has yet to be summed
    """

    def __init__(self, parameters, names, align=1):
        self.slots, self.n, self.unreduced = [], 0, set()
        for p in parameters:
            packed = torch.empty_like(p, device="meta")  # has p's order of dimensions, and no gaps
            slot = Slot(self, p, names[p], p.shape, packed.stride(), self.n, shard=p)
            self.slots.append(slot)
            self.n += round_up(p.numel(), align)
        self.gradients = None

    def __repr__(self):
        """For errors, profiles and debuggers."""
        first = self.slots[0]
        n_bytes = self.n * first.shard.dtype.itemsize
        return f"the bucket from {first.fqn} on ({1e-6 * n_bytes:.2f} MB)"

    def view(self, slot, buffer):
        """All of a parameter in a buffer of n elements."""
        start = buffer.storage_offset() + slot.start  # as_strided counts from the memory's begin
        return buffer.as_strided(slot.shape, slot.strides, start)

    def place_of_gradient(self, slot):
        """The part of `gradients` that is a parameter's, in its shape. `.data` gives it its own
        _version: views of one buffer share theirs, and autograd would take a write to one for a
        write to all."""
        return self.view(slot, self.gradients).data

    def put(self, slot):
        """Write the parameter's `.grad` to its place in `gradients`, and let `.grad` be that place:
        so the sum over ranks will be in `.grad`, and autograd adds the next micro-step there. If it
        is there already, `.grad` stays the same object, as scripts keep lists of gradients. Note
        the slot in `unreduced`. If `.grad` is None, write zeros, as other ranks may have used the
        parameter."""
        p, place = slot.parameter, self.place_of_gradient(slot)
        if p.grad is None:
            place.zero_()
            return
        if p.grad.data_ptr() != place.data_ptr():
            p.grad = place.copy_(p.grad)  # frees what autograd has made
        self.unreduced.add(slot)

    def give_mean(self, slot):
        """Some rank has used the parameter: its gradient is what is in the buffer."""
        if slot.parameter.grad is None:
            slot.parameter.grad = self.place_of_gradient(slot)


def fill_buckets(parameters: list[torch.nn.Parameter], cap_bytes: float,
                 first_bytes: float = 2**20) -> list[list[torch.nn.Parameter]]:
    """Divide parameters, in this order, into lists: the buckets. -> the lists in the order in which
    they were closed, then those that are still open, in the order in which they were opened.

    A list has parameters of one kind: one device, one dtype, all trained or all frozen. Each kind
    has a list of its own that is filling; a parameter of another kind does not close it.
    A parameter that would bring its list above the limit, in bytes, closes it, and opens the next
    one. The limit is first_bytes until the first list is closed, so that communication starts
    early. After that it doubles with every list that is closed, of whichever kind, up to cap_bytes.
    (To close a list after it has exceeded its limit would be worse: the head could share one with
    the embedding, and wait for the end of the backward.)
    """
    full = []
    filling = {}  # {kind: a list}
    for p in parameters:
        kind = p.device, p.dtype, p.requires_grad
        limit = min(first_bytes * 2**len(full), cap_bytes)
        others = filling.get(kind, [])
        if others and sum(q.nbytes for q in others) + p.nbytes > limit:
            full.append(filling.pop(kind))
        filling.setdefault(kind, []).append(p)
    return full + list(filling.values())


# -------------------------------------------------------------------------------------------------
# the reducer


def named_modules(module, name=""):
    """[(name, module), and so for all below it], one that stands in two places by both names. This
    and `named_tensors` read what torch keeps modules and tensors in: a module may override torch's
    `named_parameters()` and the like, and leave some out."""
    found = [(name, module)]
    for child_name, child in module._modules.items():
        if child is not None:
            found += named_modules(child, f"{name}.{child_name}" if name else child_name)
    return found


def named_tensors(module, kind):
    """[(name, tensor)] of all "parameters" or "buffers" of module, a tied one by each name."""
    found = []
    for prefix, m in named_modules(module):
        for name, t in getattr(m, f"_{kind}").items():
            is_sent_as_parameter = kind == "buffers" and isinstance(t, torch.nn.Parameter)
            if t is not None and not is_sent_as_parameter:
                found.append((f"{prefix}.{name}" if prefix else name, t))
    return found


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
    weak_method = weakref.WeakMethod(method)

    def hook(*arguments):
        return weak_method()(*first, *arguments)

    return hook


class Backward:
    """A backward under way, from the first sign of it, such as a hook, to the engine's callback.

        task          the engine's number of it
        unready       slots whose gradient it has yet to bring
        is_averaging  whether gradients are averaged: not in no_sync(), nor, in ZeRO, in a backward
                      that reaches none of the parameters
        scale         what gradients are multiplied by before the sum
        to_launch     buckets that are yet to be reduced, in order
        launched      [(a text that names it, a reduction under way)]

    Is there a gradient of a parameter? These are three questions:

        slot in backward.unready     this backward will bring one
        slot in bucket.unreduced     this rank has one that the next sum over ranks takes
        slot.shard.grad is not None  the optimizer gets one: after a backward that averages, where
                                     some rank had one
    """

    def __init__(self, task, unready, buckets, scale):
        self.task = task
        self.unready = unready
        self.is_averaging = len(unready) > 0
        self.scale = scale
        self.to_launch = list(buckets) if self.is_averaging else []
        self.launched = []


class Reducer(torch.nn.Module):
    """What DDP and the ZeRO stages share: a hook on every parameter moves its gradient into a
    bucket, buckets are launched in order, and a callback ends the backward.

        first sign of a backward   _prepare_for_backward
        a gradient is complete     _mark_param_ready -> _launch_ready_buckets -> _reduce(bucket)
        the backward ends          _finalize_backward -> _wait_for_buckets

    A subclass calls `_track` with the buckets of trained parameters, in the order in which a
    backward fills them. It has `_reduce(bucket)`, a reduction, such as `all_reduce` makes.
    """

    def __init__(self, module, process_group, find_unused_parameters, options, init_sync=True):
        super().__init__()
        self.module, self.find_unused_parameters = module, find_unused_parameters
        self.process_group = process_group or dist.group.WORLD
        self.world_size = dist.get_world_size(process_group)
        if self.world_size < 1:
            self._refuse("this rank is not in process_group")
        self.shard_group = None  # the ranks over which parameters are sharded; stages set it
        self.gradient_divide_factor = self.world_size  # of the sum over ranks
        self.require_backward_grad_sync = True  # no_sync() changes it
        self.forward_sync_buffers = True  # whether forwards begin with rank 0's buffers
        self._buffers_are_due = True  # whether the next one does
        self._backward = None  # the `Backward` under way
        self._has_averaged = False  # whether the last backward did
        self.exposed_s = 0.0  # see `_track`
        self._unread_counts = None  # (a function that waits, own history, own checksum)
        self._first_tag = self._agree_on_module(options) if init_sync else 0

    def _agree_on_module(self, options):
        """Raise on every rank, naming the first difference, where ranks wrap different modules.
        Return the first of 2**11 tags, by which messages differ from those of other wrappers."""
        lines = [self._get_name(), *options]
        for name, t in self._named("parameters") + self._named("buffers"):
            lines.append((name, t.shape, t.stride(), t.dtype, t.requires_grad))
        # From an id, as no two living objects have the same: wrappers hardly ever share tags. From
        # 2**30 on, as a small number is pickled to fewer bytes, and what is sent should not vary.
        first_tag = 2**30 + id(self) // 16 % 2**19 * 2**11
        of_rank_0 = [first_tag, lines]  # only rank 0's go to all ranks
        send = functools.partial(dist.broadcast_object_list, of_rank_0, group=self.process_group,
                                 group_src=0)
        self._wait_for("compare modules with rank 0", send)
        first_tag, lines_of_rank_0 = of_rank_0
        pairs = itertools.zip_longest(lines_of_rank_0, lines, fillvalue="nothing")
        differences = [pair for pair in pairs if pair[0] != pair[1]]
        of_all_ranks = [None] * self.world_size
        dist.all_gather_object(of_all_ranks, differences[:1], group=self.process_group)
        for rank, found in enumerate(of_all_ranks):
            if found:
                of_0, of_rank = found[0]
                self._refuse(f"ranks wrap different modules: rank 0 has {of_0}, and rank {rank} "
                             f"has {of_rank}")
        return first_tag

    def _named(self, kind):
        """`named_tensors` of the module, but not those that torch's DDP is told to ignore."""
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return [(name, t) for name, t in named_tensors(self.module, kind) if name not in ignored]

    def _track(self, buckets, frozen=()):
        """From now on move the gradients of these buckets' parameters into them. frozen: buckets
        whose parameters get no gradient.

            _buckets          those that get gradients
            _slots            {parameter, a frozen one too: its slot}, in the order of the module
            _trained          slots of those that get gradients, in that order
            _accumulate_grad  {such a slot: the node of the graph that adds to `.grad`}; autograd
                              would make another one for each backward if nobody kept it
            exposed_s         seconds that the training thread has waited for communication, sums
                              included. For an accelerator's stream it does not wait, and so cannot
                              tell: nan
        """
        self._buckets = buckets
        slots = {}
        for bucket in (*buckets, *frozen):
            for slot in bucket.slots:
                slots[slot.parameter] = slot
            # A bucket and its slots refer to each other, and so would wait for the garbage
            # collector. Now they go with this wrapper.
            weakref.finalize(self, bucket.slots.clear)
        in_order = first_names(self._named("parameters"))
        self._slots = {p: slots[p] for p in in_order if p in slots}
        self._trained = [slot for slot in self._slots.values() if slot.bucket in buckets]
        self._is_on_cpu = all(slot.parameter.is_cpu for slot in self._trained)
        self.exposed_s = 0.0 if self._is_on_cpu else math.nan
        self._accumulate_grad = {}
        for slot in self._trained:
            p = slot.parameter
            self._remove_at_end(p.register_hook(weakly(self._notice_backward)))
            mark_param_ready = weakly(self._mark_param_ready)
            self._remove_at_end(p.register_post_accumulate_grad_hook(mark_param_ready))
            # Of p itself: a class of its own would be asked for a view of p, and get another node.
            with torch._C.DisableTorchFunctionSubclass():
                self._accumulate_grad[slot] = torch.autograd.graph.get_gradient_edge(p).node

    def _remove_at_end(self, handle):
        """Remove a hook, by its handle, when this wrapper is deleted."""
        weakref.finalize(self, handle.remove)

    def _hook_steps(self, register, method):
        """Make method a hook of all optimizers, by a function of torch.optim -> its handle.
        Disabled, or torch.compile(optimizer.step) would trace it."""
        return register(torch.compiler.disable(weakly(method)))

    @torch.compiler.disable  # a compiled model would keep the answers of the first call
    def _prepare_forward(self):
        """Raise what the last backward has found: `_read_counts`. Copy rank 0's buffers to all
        ranks; as in torch, not if the forward before ran under no_grad() or in no_sync()."""
        self._read_counts()
        if self._buffers_are_due and self.forward_sync_buffers and not in_backward():
            buffers = [t for _, t in self._named("buffers")]
            send = functools.partial(broadcast, buffers, self.process_group)
            self._wait_for("get rank 0's buffers", send)
        self._buffers_are_due = torch.is_grad_enabled() and self.require_backward_grad_sync

    def _refuse(self, fact):
        raise RuntimeError(f"{self._get_name()}: {fact}")

    # ---- what a script calls

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets a backward that has raised. What that has launched may still write sums to
        gradients, so wait for it first."""
        if self._backward is not None:
            self._wait_for_buckets()
            self._backward = None
        super().zero_grad(set_to_none)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by factor, a number above 0, and no longer by W,
        from the next backward on; FSDP2's name. Each gradient is multiplied by 1/factor before the
        sum, which rounds it, unless factor is a power of two. For the same bits at every W set 1,
        and divide after the sum, as `clip_gradients_` can: train.py does."""
        self.gradient_divide_factor = factor

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

    @torch.compiler.disable
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients in place to a total norm of at most max_norm; return the norm before,
        a float64 scalar, the same on every rank. A collective if they are sharded."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return clip_gradients_(gradients, max_norm, self.shard_group)

    # ---- a backward

    def _notice_backward(self, gradient=None):
        """Called at each sign of a backward. At the first one prepare for it.

        It is a hook of each parameter, too, which autograd calls before it adds to `.grad`. It
        returns None: the gradient stays as it is."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return  # this hook was called by hand
        if self._backward is None or self._backward.task != task:
            self._prepare_for_backward(task)

    def _prepare_for_backward(self, task):
        """Find out which gradients this backward will bring, and whether it averages."""
        self._read_counts()
        unready = set()
        if self.require_backward_grad_sync:
            # Only parameters that this backward reaches: a bucket must not wait for the others.
            # (Inside torch.autograd.grad() of a parameter this question raises. It should: that
            # writes no `.grad`, so nothing would be averaged.)
            for slot, node in self._accumulate_grad.items():
                if torch._C._will_engine_execute_node(node):
                    unready.add(slot)
        self._backward = Backward(task, unready, self._buckets, self._scale_before_sum())
        torch.autograd.Variable._execution_engine.queue_callback(self._finalize_backward)

    def _scale_before_sum(self):
        """What gradients are multiplied by. Before the sum, so that it does not overflow."""
        return 1 / self.gradient_divide_factor

    def _mark_param_ready(self, p):
        """Hook of p: autograd has added all that this backward adds to `p.grad`.

        p is no longer unready. Move its gradient into its bucket. If autograd has left it undefined
        (`p.grad` is None), p still counts as used when find_unused_parameters=False, as in torch's
        DDP. Launch the buckets that are ready."""
        slot = self._slots[p]
        self._backward.unready.discard(slot)
        slot.bucket.put(slot)
        if not self.find_unused_parameters:
            slot.bucket.unreduced.add(slot)
        self._launch_ready_buckets()

    def _is_ready(self, bucket):
        """Whether bucket has all the gradients that this backward brings."""
        return self._backward.unready.isdisjoint(bucket.slots)

    def _launch_ready_buckets(self, at_end=False):
        """Start to reduce buckets, as far as they are ready; at the end all of them. In their
        order, which all ranks have in common, as a rank's n-th collective meets the others' n-th;
        the order in which buckets fill may differ between ranks. A parameter that this backward has
        not reached sends what no_sync() has held back, in DDP whatever `.grad` holds, or zeros.

        Before a bucket is started, those under way go on by one step: `_advance`. So few are under
        way at a time, which bounds memory:

            W <= 2                               W >= 3
            launch of bucket 0: start 0          scatter 0
            launch of bucket 1: start 1          add and gather 0, scatter 1
            launch of bucket 2: wait 0, start 2  add and gather 1, scatter 2
            launch of bucket 3: wait 1, start 3  wait 0, add and gather 2, scatter 3
            the end: wait for what is left       the same
        """
        backward = self._backward
        while backward.to_launch:
            bucket = backward.to_launch[0]
            if not at_end and not self._is_ready(bucket):
                return
            backward.to_launch.pop(0)
            for slot in bucket.slots:
                if slot not in bucket.unreduced:
                    bucket.put(slot)
            if backward.scale != 1:
                bucket.gradients.mul_(backward.scale)
            self._advance()
            what = f"reduce {bucket}"
            reduction = self._reduce(bucket)
            backward.launched.append((what, reduction))
            with torch.profiler.record_function(f"start: {what}"):
                next(reduction)

    def _advance(self):
        """Each reduction under way goes on to its next `yield`, the oldest first, or to its end."""
        under_way = []
        for what, reduction in self._backward.launched:
            # next() returns None at a yield, and its second argument at the end of a generator.
            is_over = self._wait_for(what, functools.partial(next, reduction, True))
            if not is_over:
                under_way.append((what, reduction))
        self._backward.launched = under_way

    def _wait_for_buckets(self):
        """Wait for the buckets that have been launched."""
        while self._backward.launched:
            self._advance()

    def _wait_for(self, what, wait):
        """Call wait(): time it, name it in a profile, and in an error."""
        start_s = time.perf_counter()
        try:
            with torch.profiler.record_function(f"wait: {what}"):
                return wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {dist.get_rank()} could not {what} (has another rank died, "
                               f"left out a forward, a backward or saving, or called wrappers or "
                               f"units in another order?): {error}") from error
        finally:
            self.exposed_s += time.perf_counter() - start_s

    @torch.no_grad()
    def _finalize_backward(self):
        """The engine's callback after a backward. If it averages, launch the buckets that are left,
        wait for all, and `_give_means`. In any case note in `_has_averaged` whether this one has,
        and that no backward is under way. At last `_read_counts`. (On an accelerator that is for
        the next forward or backward, as in torch: here the CPU would wait for the device.)
        """
        is_averaging = self._backward.is_averaging
        if is_averaging:
            self._launch_ready_buckets(at_end=True)
            self._wait_for_buckets()
            self._give_means()
        self._has_averaged = is_averaging
        self._backward = None
        if self._is_on_cpu:
            self._read_counts()

    def _give_means(self):
        """A parameter that some rank has used gets its mean; one that no rank has used keeps
        `grad is None`. Now nothing is unreduced."""
        for slot, n in zip(self._trained, self._count_ranks_that_used()):
            if n > 0:
                slot.bucket.give_mean(slot)
        for bucket in self._buckets:
            bucket.unreduced.clear()

    def _count_ranks_that_used(self):
        """[on how many ranks each parameter was used]; costs an all-reduce of a number for each,
        and of one more: see `_history`. If this rank has used all, it does not wait, and returns W
        for all: the caller asks only which numbers are above 0."""
        is_used = [slot in slot.bucket.unreduced for slot in self._trained]
        history = self._history()
        checksum = zlib.crc32(history.encode()) % (2**31 // self.world_size)  # int32 has the sum
        device = self._trained[0].parameter.device
        wait = count_ranks([*is_used, checksum], device, self.process_group)
        if self.shard_group is None or not self._is_on_cpu:
            self._unread_counts = wait, history, checksum
        if all(is_used):
            return [self.world_size] * len(is_used)
        *counts, _ = self._wait_for("agree on use", wait)
        return counts

    def _history(self):
        """What backwards that are averaged with each other have in common, as a text. If one rank
        calls two wrappers in another order, the first backward of the one meets that of the other.
        So a checksum of this is compared over ranks. (Stages on a CPU need not, and need not wait
        for it: their messages have tags, so such ranks time out.)"""
        return f"wrapper {self._first_tag}"

    def _read_counts(self):
        """Raise RuntimeError on all ranks if they had different histories in the last backward; or,
        with find_unused_parameters=False, where some rank has not used a parameter in it, naming
        those that are not frozen."""
        if self._unread_counts is None:
            return
        (wait, history, checksum), self._unread_counts = self._unread_counts, None
        *counts, total = self._wait_for("agree on use", wait)
        if total != self.world_size * checksum:
            histories = [None] * self.world_size
            dist.all_gather_object(histories, history, group=self.process_group)
            # On an accelerator all may come here by the same wrapper, whatever its backward met.
            differ = len(set(histories)) > 1
            which = f"by rank: {histories}" if differ else "of two wrappers"
            self._refuse(f"ranks have averaged backwards that do not belong together, {which}. If "
                         f"one rank leaves a backward out, as where its loss is nan, all have to. "
                         f"Call wrappers in one order. Evaluate under no_grad()")
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


# -------------------------------------------------------------------------------------------------
# DDP


@torch.nn.parallel.DistributedDataParallel.register  # for isinstance(), which libraries ask
class PlainDDP(Reducer):
    """Average gradients over the ranks of process_group during every backward of module.

    device_ids: None, or a list of the one device of module, to which inputs are moved.
    bucket_cap_mb: largest size of a bucket; the first has 1 MB, the next ones double it. None: 25,
    or W/4 if that is more.
    find_unused_parameters: whether a backward may leave parameters out. If not, and one does, every
    rank raises RuntimeError, naming them. If so, one that some rank used counts as zero elsewhere,
    and one that no rank used keeps `grad is None`.
    forward_sync_buffers: rank 0's buffers go to all ranks before a forward, as in torch.
    broadcast_buffers: torch's older name for it; False leaves buffers alone at the start, too.
    init_sync: compare modules, and start with rank 0's parameters and buffers.
    output_device, gradient_as_bucket_view, static_graph, dim, check_reduction: torch's; ignored.

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

    def __init__(self, module: torch.nn.Module, device_ids: list | None = None, output_device=None,
                 dim: int = 0, broadcast_buffers: bool = True, init_sync: bool = True,
                 process_group: Group = None, bucket_cap_mb: float | None = None,
                 find_unused_parameters: bool = False, check_reduction: bool = False,
                 gradient_as_bucket_view: bool = False, static_graph: bool = False,
                 forward_sync_buffers: bool | None = None):
        super().__init__(module, process_group, find_unused_parameters, [f"{bucket_cap_mb=}"],
                         init_sync)
        self.device_ids = device_ids
        self.bucket_cap_mb = bucket_cap_mb
        if bucket_cap_mb is None:
            self.bucket_cap_mb = bucket_bytes(self.world_size) / 2**20
        init_sync_buffers = broadcast_buffers is None or broadcast_buffers
        self.forward_sync_buffers = init_sync_buffers
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            init_sync_buffers = True
        self.comm_state, self._comm_hook = None, None
        names = first_names(self._named("parameters"))
        devices = {t.device: name for name, t in self._named("parameters") + self._named("buffers")}
        trained = [p for p in names if p.requires_grad]
        if not trained:
            self._refuse("needs parameters that require a gradient: there is nothing to average")
        if len(devices) > 1 or torch.device("meta") in devices:
            self._refuse(f"needs all parameters and buffers on one device, not on meta: {devices}")
        if init_sync:
            buffers = [t for _, t in self._named("buffers")] if init_sync_buffers else []
            broadcast(list(names) + buffers, self.process_group)
        buckets = []
        for parameters in fill_buckets(trained[::-1], self.bucket_cap_mb * 2**20):
            bucket = Bucket(parameters, names)
            multiple = self.world_size * ALIGN_CHUNK_BYTES // parameters[0].itemsize
            bucket.gradients = parameters[0].new_zeros(round_up(bucket.n, multiple))
            buckets.append(bucket)
        self._track(buckets)

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
        self._prepare_forward()
        if self.device_ids:
            device = self._buckets[0].gradients.device
            (inputs,), (kwargs,) = dist.utils._to_kwargs(inputs, kwargs, device, False)
        return self.module(*inputs, **kwargs)

    def _prepare_for_backward(self, task):
        """As `Reducer`. If the last backward has averaged, and nobody has zeroed its result G, G is
        in `.grad`, the same on all ranks. New gradients will be added to it, and the whole will be
        multiplied by 1/factor and summed over W ranks: so G becomes W / factor times G. Divide it
        by that first. (Unless told otherwise factor is W, and there is nothing to do.)"""
        growth = self.world_size / self.gradient_divide_factor
        if self._has_averaged and growth != 1:
            for slot in self._trained:
                if slot.parameter.grad is not None:
                    slot.parameter.grad.div_(growth)
        for bucket in self._buckets:
            # What no_sync() has left is in `.grad`, unless a script has dropped it. `put` will see.
            bucket.unreduced.clear()
        super()._prepare_for_backward(task)

    def _scale_before_sum(self):
        """A comm hook divides by W itself."""
        if self._comm_hook is not None:
            return self.world_size / self.gradient_divide_factor
        return super()._scale_before_sum()

    def _reduce(self, bucket):
        """A reduction that sums bucket's gradients over ranks, in place."""
        if self._comm_hook is None:
            return all_reduce(bucket.gradients, self.process_group, self._first_tag)
        return self._call_comm_hook(bucket)

    def _call_comm_hook(self, bucket):
        """A reduction by the comm hook. It has one yield, so `_advance` waits for its future before
        the next hook is called: a hook may communicate even while its future is waited for."""
        future = self._comm_hook(self.comm_state, GradBucket(bucket, self._buckets))
        yield
        bucket.gradients[:bucket.n].copy_(future.wait())

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """From now on hook(state, bucket) -> Future reduces each bucket, and divides by W.

        bucket has the methods of torch.distributed.GradBucket.
        """
        if not callable(hook):
            raise TypeError(f"DDP: a comm hook must be callable, not {hook!r}")
        if self._comm_hook is not None:
            self._refuse("has a comm hook already")
        self.comm_state, self._comm_hook = state, torch.no_grad()(hook)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (original name, whole parameter), a tied one once."""
        for p, name in first_names(named_tensors(self.module, "parameters")).items():
            yield name, p.detach()

    def shard_starts(self) -> dict[str, int]:
        """{original name: where this rank's part begins in the parameter, in elements}: 0."""
        return dict.fromkeys((name for name, _ in self.full_parameters()), 0)


# -------------------------------------------------------------------------------------------------
# what comm hooks need; trainer/comm_hooks.py has some


class GradBucket:
    """What a comm hook sees of a bucket. The methods are those of torch.distributed.GradBucket,
    which Python cannot construct."""

    def __init__(self, bucket, buckets):
        self._bucket, self._buckets = bucket, buckets
        self._buffer = bucket.gradients[:bucket.n]

    def index(self):
        return self._buckets.index(self._bucket)

    def is_last(self):
        return self._bucket is self._buckets[-1]

    def parameters(self):
        return [slot.parameter for slot in self._bucket.slots]

    def buffer(self):
        return self._buffer

    def gradients(self):
        return [self._bucket.view(slot, self._buffer) for slot in self._bucket.slots]

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
    norm = total_norm(gradients, process_group) / divide_by
    if gradients and (max_norm < math.inf or divide_by != 1):
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = (clip / divide_by).float()
        # Also when it is 1: asking would make the CPU wait for the GPU.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


# -------------------------------------------------------------------------------------------------
# with guards


class NoReducer:
    """What Lightning calls of the reducer of torch's DDP. Nothing is to be done here."""

    def _rebuild_buckets(self):
        return False

    def prepare_for_backward(self, outputs):
        pass


class DDP(Guards, PlainDDP):  # without Guards this is PlainDDP
    __doc__ = f"{PlainDDP.__doc__}\n    {Guards.__doc__}"

    # What Lightning and Accelerate touch of torch's DDP.
    static_graph = False
    require_forward_param_sync = True
    reducer = NoReducer()

    def _get_ddp_logging_data(self):
        return {}

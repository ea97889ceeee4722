"""Data parallelism: every rank holds the whole model, reads its own part of the batch, and all
ranks step with the mean of their gradients.

    model = DDP(module)                      # as torch.nn.parallel.DistributedDataParallel
    loss = model(x, y)
    loss.backward()                          # on return every `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's DDP: 2,700 lines of Python and a reducer in C++. How it works (Li et al., arXiv
2006.15704, section 3.2): parameters are divided among buckets of 25 MB, the last ones first, since
the backward reaches them first. A hook on each parameter moves its gradient, times 1/W, into the
bucket's flat buffer. A full bucket is summed over ranks while the backward goes on, and a callback
at the end of the backward waits for the rest. (1/W rounds where W is no power of two. So train.py
calls `set_gradient_divide_factor(1)` and divides after the sum: the same bits for every W.)

How it differs: the W contributions to an element are added in rank order, ((g0 + g1) + g2) + ...,
wherever it lies in a buffer, so the bucket size never changes a bit. (A ring all-reduce adds in an
order that depends on the position.) The oracle for all of it is `average_gradients`.

Cost: 4 Psi bytes of buckets, which are the gradients; 2 (W-1)/W Psi elements sent per rank and
step; one number per parameter to agree on which were used; at W >= 3 the memory of a bucket, for
what arrives. All of it is for any accelerator of torch, on the stream of the forward.

In this order: the oracle, collectives, buckets, the reducer that ZeRO shares, DDP, comm hooks,
clipping.
"""

import contextlib
import functools
import itertools
import math
import sys
import time
import types
import weakref

import torch
import torch.distributed as dist


# -------------------------------------------------------------------------------------------------
# the oracle


@torch.no_grad()
def average_gradients(module, process_group=None, divide_factor=None):
    """Overwrite every `p.grad` of module by its mean over ranks: one collective per parameter,
    after the backward, nothing overlaps. A collective: every rank has to call it.

    divide_factor: what the sum over ranks is divided by; the number of ranks unless given. With
    another one, call it once a step: it would sum again what an earlier call has summed.
    A parameter that some ranks did not use counts as zero there; one that no rank used keeps
    `grad is None`, as in torch DDP with find_unused_parameters=True.
    """
    W = dist.get_world_size(process_group)
    parameters = [p for p in module.parameters() if p.requires_grad]  # a tied weight appears once
    # Ranks must agree on which collectives follow, or one of them waits forever.
    n_ranks = count_ranks([p.grad is not None for p in parameters], parameters[0], process_group)()
    for p in itertools.compress(parameters, n_ranks):  # used on some rank
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        # Before the sum, which could overflow in fp16. A division has other bits at W = 3.
        p.grad.mul_(1 / (divide_factor or W))
        contributions = list(p.grad.new_empty(W, *p.shape))
        dist.all_gather(contributions, p.grad.contiguous(), group=process_group)
        add_in_rank_order(contributions, out=p.grad)


def count_ranks(flags, p, process_group):
    """Start to count, on p's device, on how many ranks each of flags is set -> a function that
    waits for the list of these numbers."""
    # non_blocking: else the CPU would wait here for all that the device has yet to do.
    counts = torch.tensor(flags, dtype=torch.int32).to(p.device, non_blocking=True)
    work = dist.all_reduce(counts, group=process_group, async_op=True)
    return lambda: work.wait() and counts.tolist()


def add_in_rank_order(contributions, out):
    """out = ((c0 + c1) + c2) + ...; 16-bit ones are added in fp32 and rounded once.

    c0 is overwritten. out may be any of them, since it is written last.
    """
    total, *rest = contributions
    total = total.float() if total.dtype.itemsize == 2 else total
    for contribution in rest:  # not torch.sum over a stack, which regroups from W = 5 on
        total += contribution
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)


# -------------------------------------------------------------------------------------------------
# collectives
#
# Each has started when it returns a function that waits for the end; that of all_reduce waits for
# the middle, and returns another one. On an accelerator its stream waits there, and the CPU goes
# on; all must be called on the stream of the forward.
#
# A flat buffer is cut into W chunks, and rank r owns the r-th. reduce_scatter sums each chunk on
# its owner, all_gather sends each owner's chunk to all ranks. On accelerators all ranks have to
# make all calls in one order; on CPU that order may differ between calls with different tags.


def exchange(sends, receives, process_group, tag):
    """Start to send and to receive a tensor per rank -> a function that waits."""
    ops = [dist.P2POp(op, tensor, group=process_group, tag=tag, group_peer=rank)
           for op, tensors in ((dist.irecv, receives), (dist.isend, sends))
           for rank, tensor in enumerate(tensors)
           if rank != dist.get_rank(process_group) and tensor.numel()]
    works = dist.batch_isend_irecv(ops) if ops else []
    return lambda: [works.pop().wait() for _ in [*works]]  # a work keeps its tensors: drop it


def reduce_scatter(flat, process_group=None, tag=0):
    """Start to send each rank its chunk of flat, 1-D -> finish(out=own chunk, earlier=[]), which
    waits and sets out to the sum over ranks in rank order, after what is in earlier.

    Costs (W-1)/W of flat's elements sent, and as much memory for those that arrive. Not a native
    one, which adds in an order of its own, and 16-bit numbers in 16 bits; nor all_to_all_single,
    which takes a quarter longer on gloo.
    """
    rank, W = dist.get_rank(process_group), dist.get_world_size(process_group)
    chunks = flat.tensor_split(W)
    contributions = list(flat.new_empty(W - 1, len(chunks[rank])))
    contributions.insert(rank, chunks[rank])
    wait = exchange(chunks, contributions, process_group, tag)

    def finish(out=chunks[rank], earlier=()):
        wait()
        add_in_rank_order([*earlier, *contributions], out)
        contributions.clear()  # frees what has arrived, whoever keeps this function

    return finish


def all_gather(flat, process_group=None, tag=0):
    """Start to fill all chunks of flat, 1-D, from the ranks that own them -> a function that waits.
    Costs (W-1)/W of flat's elements sent.
    """
    chunks = flat.tensor_split(dist.get_world_size(process_group))
    own = chunks[dist.get_rank(process_group)]
    # gloo's own takes three times as long, and others want equal chunks.
    if flat.is_cpu or len(flat) % len(chunks):
        return exchange([own] * len(chunks), chunks, process_group, tag)
    return dist.all_gather_single(flat, own, group=process_group, async_op=True).wait


def all_reduce(flat, process_group=None, tag=0):
    """Sum flat, 1-D, over ranks in place -> a function that waits until the own chunk is summed,
    starts to send it, and returns a function that waits for the end."""
    # Two contributions have only one order, so torch's own has the right bits there, and is faster.
    if dist.get_world_size(process_group) <= 2:
        work = dist.all_reduce(flat, group=process_group, async_op=True)
        return lambda: work.wait
    finish = reduce_scatter(flat, process_group, tag)
    # Cached: DDP's `_reduce` calls it before the next bucket is launched, and `_finish` once more.
    return functools.cache(lambda: finish() or all_gather(flat, process_group, tag))


def broadcast(tensors, process_group):
    """Overwrite tensors by rank 0's, and wait."""
    if tensors:
        # .data: autograd may have saved a buffer, and need not hear of its new value.
        dist._broadcast_coalesced(process_group, [t.data for t in tensors], 2**28, 0)


# -------------------------------------------------------------------------------------------------
# buckets


class Bucket:
    """Some parameters, and a flat buffer in which their gradients lie one after the other, each at
    a multiple of `align` elements.

        places     {parameter: (its shape, its strides when packed, its first element in it)}
        gradients  (n,), the flat buffer, or None while there is no memory for it
        targets    {parameter: (the tensor whose `.grad` becomes the mean, the mean)}
    """

    def __init__(self, parameters, align=1):
        self.places, self.n = {}, 0
        for p in parameters:
            self.places[p] = p.shape, torch.empty_like(p, device="meta").stride(), self.n
            self.n += -(-p.numel() // align) * align
        self.gradients, self.targets = None, {}

    def view(self, p, buffer):
        """All of p in a buffer of n elements."""
        return buffer.as_strided(*self.places[p])

    def mean_of(self, p):
        """The place of its mean."""
        return self.view(p, self.gradients).data  # .data, for a _version of its own

    def put(self, p, scale):
        """Move p.grad, times scale, into the buffer; then `p.grad` is a view of it. Returns whether
        there is a gradient."""
        _, view = self.targets[p]
        if p.grad is None:
            view.zero_()  # not used here, maybe elsewhere
        else:  # it may be view, to which autograd has added in place
            torch.mul(p.grad, scale, out=view)  # one pass over memory, not a copy and a product
            p.grad = view  # frees what autograd has made
        return p.grad is not None


def fill_buckets(parameters, cap_bytes, first_bytes=2**20):
    """Divide parameters, in this order, into lists of one dtype and device, all trained or all
    frozen. The first list is small, so that communication starts early; the next ones double, up to
    cap_bytes. A list is closed before it exceeds its limit: if the head shared a bucket with the
    embedding, it could be reduced only at the end of the backward.
    """
    full, filling = [], {}  # filling: {kind: a list}
    for p in parameters:
        kind = p.device, p.dtype, p.requires_grad
        limit = min(first_bytes * 2**len(full), cap_bytes)
        if kind in filling and sum(q.nbytes for q in (*filling[kind], p)) > limit:
            full.append(filling.pop(kind))
        filling.setdefault(kind, []).append(p)
    return full + list(filling.values())


# -------------------------------------------------------------------------------------------------
# the reducer


def in_backward():
    """Whether autograd is at work in this thread: a forward now recomputes a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def attach(register, method, *first, outside=lambda hook: hook, **options):
    """Register method, with the arguments in first, as a hook that does not keep its object alive,
    and is removed with it."""
    weak = functools.partial(method.__func__, weakref.proxy(method.__self__), *first)
    weakref.finalize(method.__self__, register(outside(weak), **options).remove)


class Reducer(torch.nn.Module):
    """What DDP and the ZeRO stages share: a hook on every parameter moves its gradient into a
    bucket, buckets are launched in order, and a callback ends the backward.

    A subclass calls `_track` with the buckets of trained parameters, in the order in which a
    backward fills them. It has `shard_group`, and `_reduce(bucket)`, which starts to reduce one and
    returns a function that waits for the end.

    Gradients become means only if the module is still what was wrapped, and if the backward does
    not raise. Otherwise the next forward, or the next backward, raises RuntimeError.
    """

    def __init__(self, module, process_group, find_unused_parameters, options, init_sync=True):
        super().__init__()
        self.module, self.find_unused_parameters = module, find_unused_parameters
        self.process_group = process_group or dist.group.WORLD
        self.world_size = dist.get_world_size(process_group)
        # What the sum over ranks is divided by, None for W; DDP's comm hook and its state; for
        # stages the ranks over which parameters are sharded.
        self.gradient_divide_factor = self._comm_hook = self.comm_state = self.shard_group = None
        # The engine's number of the last backward; whether it averages, None once it has ended;
        # whether the last one that has ended did.
        self._task, self._averages, self._has_averaged = -1, None, False
        # Whether backwards average, which no_sync() changes; whether rank 0's buffers count;
        # whether they go to all ranks before the next forward.
        self.require_backward_grad_sync = self.broadcast_buffers = self._sync_buffers = True
        # Buckets of the backward under way; (what is reduced, what waits for it).
        self._to_launch, self._launched = [], []
        self._tag = self._agree(options) if init_sync else 0

    def _agree(self, options):
        """Raise on every rank, naming the first difference, where ranks wrap different modules.
        Return the first of 2**11 tags, by which messages differ from those of other wrappers."""
        lines = [f"{self._get_name()} {options}"]
        lines += [(name, t.shape, t.stride(), t.dtype, t.requires_grad)
                  for name, t in self._named("parameters", "buffers")]
        # An id, since no other living object has it. Only rank 0's lines go to all ranks.
        first, views = [id(self) // 16 % 2**20 * 2**11, lines], [None] * self.world_size
        dist.broadcast_object_list(first, group=self.process_group, group_src=0)
        pairs = itertools.zip_longest(first[1], lines, fillvalue="nothing")
        own = next((pair for pair in pairs if pair[0] != pair[1]), None)
        dist.all_gather_object(views, own, group=self.process_group)
        for found in filter(None, views):
            self._refuse(f"ranks wrap different modules: {found}")
        return first[0]

    def _named(self, *kinds):
        """[(name, tensor)] of the module's "parameters" or "buffers", a tied one by each name, but
        of those that torch's DDP is told to ignore."""
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        named = (getattr(self.module, f"named_{kind}")(remove_duplicate=False) for kind in kinds)
        return [(name, t) for name, t in itertools.chain(*named) if name not in ignored]

    def _track(self, buckets):
        """From now on move the gradients of these buckets' parameters into them."""
        self._buckets = buckets
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.places}
        self._names = {p: n for n, p in self.module.named_parameters() if p in self._bucket_of}
        # Seconds that the training thread has waited for communication. For an accelerator's stream
        # it does not wait, and so cannot tell: nan.
        self.exposed_s = 0.0 if all(p.is_cpu for p in self._names) else math.nan
        for p in self._names:
            attach(p.register_hook, self._notice_backward)
            attach(p.register_post_accumulate_grad_hook, self._on_gradient)
        # swap_tensors(), by which load_state_dict() may work, would lose the hooks. It raises where
        # there is a weak reference.
        self._not_to_swap = [weakref.ref(p) for p in self._names]
        # What autograd runs to add to p.grad. Kept, or it would make another for each backward.
        self._nodes = {p: torch.autograd.graph.get_gradient_edge(p).node for p in self._names}

    @torch.compiler.disable  # torch.compile of all would trace what is to be asked each time
    def _prepare_forward(self):
        """Bring rank 0's buffers. Raise unless each trained parameter has one hook, which is ours;
        that takes 1 us per parameter, 5 us in the stages."""
        for name, p in self._named("parameters"):
            is_ours = len(p._post_accumulate_grad_hooks or ()) == 1
            if p.requires_grad and not is_ours and isinstance(p, torch.nn.Parameter):
                self._refuse(f"{name} was added, unfrozen, hooked or wrapped again after wrapping")
        if self._sync_buffers and self.broadcast_buffers and not in_backward():
            broadcast([t for _, t in self._named("buffers")], self.process_group)
        # As in torch: not after a forward that evaluates, or that accumulates.
        self._sync_buffers = torch.is_grad_enabled() and self.require_backward_grad_sync

    def _refuse(self, fact):
        raise RuntimeError(f"{self._get_name()}: {fact}")

    def zero_grad(self, set_to_none=True):
        """Also forgets a backward that has raised."""
        super().zero_grad(set_to_none)
        self._finish()
        self._to_launch, self._averages = [], None

    def set_gradient_divide_factor(self, factor):
        """Divide the sum of gradients over ranks by factor, a number above 0, and no longer by W,
        from the next backward on. As FSDP2's. A factor that is no power of two rounds each gradient
        before the sum. For the same bits at every W set 1, and divide after the sum, as
        `clip_gradients_` can. A loss over the shards of a stage counts once, not once per rank."""
        self.gradient_divide_factor = factor

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards in here only accumulate, in the buckets; the next one outside averages all. It
        matters where the backward runs, not where the forward does."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def clip_grad_norm_(self, max_norm):
        """Scale gradients in place to a total norm of at most max_norm; return the norm before,
        a float64 scalar, the same on every rank. A collective if they are sharded."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return clip_gradients_(gradients, max_norm, self.shard_group)

    def _on_gradient(self, p):
        """Hook of p: autograd has added all that this backward adds to p.grad."""
        if torch.is_grad_enabled() or p.grad is not None and p.grad.is_sparse:
            self._refuse(f"{self._names[p]}: no support of create_graph and of sparse gradients")
        bucket = self._bucket_of[p]
        self._pending.discard(p)
        # None: autograd has reached p, but left its gradient undefined.
        if bucket.put(p, self._scale if self._averages else 1.0) or not self.find_unused_parameters:
            self._used.add(p)
        self._launch()

    def _notice_backward(self, gradient=None):
        """Called at each sign of a backward, the first of which begins it. The hook of a parameter
        is also called by torch.autograd.grad(), which accumulates nothing that could be averaged:
        then `_will_engine_execute_node` raises."""
        task = torch._C._current_graph_task_id()  # the engine's number of this backward
        if task not in (self._task, -1):
            if self._averages is not None:
                self._refuse("no support of a backward inside another (use_reentrant=True), nor "
                             "after one that raised (call zero_grad())")
            self._task = task
            self._begin_backward()

    def _begin_backward(self):
        """Find out which gradients this backward will bring, and whether it averages."""
        self._over_mean = self.world_size / (self.gradient_divide_factor or self.world_size)
        for bucket in self._buckets:
            for p, (owner, mean) in bucket.targets.items():
                if owner.grad is not mean and sys.getrefcount(mean) > 3:  # a script has kept it
                    mean.data = mean.data.clone()
                place = bucket.mean_of(p)
                if mean.data_ptr() != place.data_ptr():  # or it has replaced its .data
                    bucket.targets[p] = owner, place
                if self._has_averaged and self._over_mean != 1 and p.grad is not None:
                    p.grad.div_(self._over_mean)  # DDP's, a sum already: W ranks will add it again
        # Only parameters that this backward reaches: others must not delay their bucket. For
        # torch.autograd.grad() of one the engine raises, as nothing would average.
        self._pending = {p for p, node in self._nodes.items() if self.require_backward_grad_sync
                         and torch._C._will_engine_execute_node(node)}
        self._averages = bool(self._pending)
        # What gradients are multiplied by before the sum. A comm hook takes the mean itself.
        self._scale = self._over_mean / (1 if self._comm_hook else self.world_size)
        # used: parameters with a gradient, of this backward or held back by no_sync().
        self._used, self._to_launch = set(), list(self._buckets if self._averages else ())
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _is_ready(self, bucket):
        """Whether bucket has all the gradients that this backward brings."""
        return self._pending.isdisjoint(bucket.places)

    def _launch(self, at_end=False):
        """Start to reduce buckets, as far as they are ready. In their order, which all ranks have
        in common; the order in which they fill may differ."""
        while self._to_launch and (at_end or self._is_ready(self._to_launch[0])):
            bucket = self._to_launch.pop(0)
            missing = [p for p in bucket.places if p not in self._used]
            # no_sync() may have held a gradient of these back.
            self._used.update([p for p in missing if bucket.put(p, self._scale)])
            what = f"reduce the bucket from {self._names[next(iter(bucket.places))]} on"
            with torch.profiler.record_function(f"start: {what}"):
                self._launched.append((what, self._reduce(bucket)))

    def _finish(self):
        """Wait for the buckets that have been launched."""
        while self._launched:
            self._wait_for(*self._launched.pop(0))

    def _wait_for(self, what, wait):
        """Call wait(): time it, name it in a profile, and in an error."""
        start_s = time.perf_counter()
        try:
            with torch.profiler.record_function(f"wait: {what}"):
                return wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {dist.get_rank()} could not {what} (has another rank died, "
                               f"or made fewer steps?): {error}") from error
        finally:
            self.exposed_s += time.perf_counter() - start_s

    @torch.no_grad()
    def _end_backward(self):
        """The engine's callback after a backward: reduce the buckets that are left, wait for all,
        and give each parameter that some rank has used its mean. Costs an all-reduce of a number
        per parameter. Raises RuntimeError naming unused parameters, unless they are expected."""
        self._has_averaged, self._averages = self._averages, None
        if not self._has_averaged:
            return
        self._launch(at_end=True)
        self._finish()
        flags = [p in self._used for p in self._names]
        wait = count_ranks(flags, next(iter(self._names)), self.process_group)
        # A rank that has used all needs the numbers only to name what others have not.
        is_enough = all(flags) and self.find_unused_parameters
        n_ranks = flags if is_enough else self._wait_for("agree on use", wait)
        for p in itertools.compress(self._names, n_ranks):
            owner, mean = self._bucket_of[p].targets[p]
            if owner.grad is not None and owner.grad is not mean:
                mean += owner.grad  # of a loss over the shards of ZeRO
            owner.grad = mean
        unused = [name for (p, name), n in zip(self._names.items(), n_ranks)
                  if p.requires_grad and n < self.world_size]
        if unused and not self.find_unused_parameters:
            self._refuse(f"no gradient in this backward, on some rank, for {unused}: freeze them, "
                         f"or pass find_unused_parameters=True, or use_reentrant=False")


# -------------------------------------------------------------------------------------------------
# DDP


@torch.nn.parallel.DistributedDataParallel.register
class DDP(Reducer):
    """Average gradients over the ranks of process_group during every backward of module.

    device_ids: None, or a list of the one device of module, to which inputs are moved.
    bucket_cap_mb: largest size of a bucket; the first has 1 MB, the next ones double it.
    find_unused_parameters: accept that a backward leaves parameters out. One that some rank used
    counts as zero elsewhere; one that no rank used keeps `grad is None`. Otherwise every rank
    raises RuntimeError, naming them.
    broadcast_buffers: rank 0's buffers go to all ranks before a forward, as in torch.
    init_sync: compare modules, and start with rank 0's parameters and buffers.
    output_device, gradient_as_bucket_view, static_graph, dim, check_reduction: torch's; ignored.

    Names and meaning as in torch.nn.parallel.DistributedDataParallel, of which it is a virtual
    subclass. What `module._ddp_params_and_buffers_to_ignore` names is left alone. Raises
    RuntimeError on every rank where ranks wrap modules that differ in names, shapes, strides,
    dtypes or frozen parameters. Wrap last: freezing, casting and moving come before. Every backward
    that reaches a parameter is averaged, that of `model.module(x)` too, unless it runs in
    no_sync(). A `.grad` that a script keeps stays as it is, but views of it, such as `.flatten()`,
    lie in a bucket: clone what has to outlive the next backward. With a comm hook, nothing else may
    communicate in the same group during a backward.
    A copy, by deepcopy or pickle, is wrapped without communication, as with init_sync=False; two
    such may not take part in the same backward.
    """

    def __init__(self, module, device_ids=None, output_device=None, dim=0, broadcast_buffers=True,
                 init_sync=True, process_group=None, bucket_cap_mb=25, find_unused_parameters=False,
                 check_reduction=False, gradient_as_bucket_view=False, static_graph=False):
        super().__init__(module, process_group, find_unused_parameters, f"{bucket_cap_mb=}",
                         init_sync)
        self.device_ids, self.bucket_cap_mb = device_ids, bucket_cap_mb or 25
        self.broadcast_buffers = broadcast_buffers is None or broadcast_buffers
        parameters = list(dict.fromkeys(p for _, p in self._named("parameters")))
        trained = [p for p in parameters if p.requires_grad]
        places = {t.device: name for name, t in self._named("parameters", "buffers")}
        if not trained or len(places) > 1:
            self._refuse(f"needs parameters that require a gradient, all on one device: {places}")
        self._track([*map(Bucket, fill_buckets(trained[::-1], self.bucket_cap_mb * 2**20))])
        for bucket in self._buckets:
            bucket.gradients = next(iter(bucket.places)).new_zeros(bucket.n)
            bucket.targets = {p: (p, bucket.mean_of(p)) for p in bucket.places}
        buffers = [t for _, t in self._named("buffers")] if self.broadcast_buffers else []
        broadcast(parameters + buffers if init_sync else [], self.process_group)

    def __reduce__(self):
        """For deepcopy, pickle and AveragedModel: how to make a copy, and what it has then."""
        if self.process_group is not dist.group.WORLD:
            self._refuse("a copy would use the default process group: copy the module")
        keys = "training device_ids find_unused_parameters broadcast_buffers gradient_divide_factor"
        make = functools.partial(type(self), bucket_cap_mb=self.bucket_cap_mb, init_sync=False)
        return make, (self.module,), {name: getattr(self, name) for name in keys.split()}

    def forward(self, *inputs, **kwargs):
        self._prepare_forward()
        if self.device_ids:
            device = self._buckets[0].gradients.device
            (inputs,), (kwargs,) = dist.utils._to_kwargs(inputs, kwargs, device, False)
        return self.module(*inputs, **kwargs)

    def _reduce(self, bucket):
        if self._comm_hook is None:
            if self._launched:  # its chunks have arrived while this one filled
                self._wait_for(self._launched[-1][0], self._send_sums)
            self._send_sums = wait = all_reduce(bucket.gradients, self.process_group, self._tag)
            return lambda: wait()()
        self._finish()  # while it waits, a hook may communicate; so one at a time, in one order
        buffers = [bucket.gradients]  # set_buffer() adds one
        # The methods of torch.distributed.GradBucket, which Python cannot construct.
        grad_bucket = types.SimpleNamespace(
            index=lambda: self._buckets.index(bucket), is_last=lambda: bucket is self._buckets[-1],
            parameters=lambda: list(bucket.places), buffer=lambda: buffers[-1],
            gradients=lambda: [bucket.view(p, buffers[-1]) for p in bucket.places],
            set_buffer=buffers.append)
        future = self._comm_hook(self.comm_state, grad_bucket)
        return lambda: bucket.gradients.copy_(future.wait())

    def register_comm_hook(self, state, hook):
        """From now on hook(state, bucket) -> Future reduces each bucket, taking the mean included.

        bucket has the methods of torch.distributed.GradBucket.
        """
        if self._comm_hook is not None or not callable(hook):
            raise TypeError("DDP: a comm hook must be callable, and registered only once")
        self.comm_state, self._comm_hook = state, torch.no_grad()(hook)

    def full_parameters(self):
        """Yield (original name, whole parameter), a tied one once."""
        yield from ((name, p.detach()) for name, p in self.module.named_parameters())

    def shard_starts(self):
        """{original name: where this rank's part begins in the parameter, in elements}: 0."""
        return dict.fromkeys((name for name, _ in self.module.named_parameters()), 0)


# -------------------------------------------------------------------------------------------------
# comm hooks, for DDP above and for torch's


def completed(value):
    """A Future that has its value."""
    future = torch.futures.Future(devices=[value.device] if value.device.type != "cpu" else [])
    future.set_result(value)
    return future


class HierarchicalState:
    """For `hierarchical_hook`: `inside`, the group of this rank's node, which is node_size
    neighbours, and `across`, the ranks with its place in other nodes.

    A collective. Raises ValueError unless node_size divides the world size.
    """

    def __init__(self, node_size, process_group=None):
        group = process_group or dist.group.WORLD
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        if node_size < 1 or len(ranks) % node_size:
            raise ValueError(f"{len(ranks)} ranks do not divide into nodes of {node_size}")
        first, place = rank - rank % node_size, rank % node_size
        # The group's own; new_group() would take the world's backend, and 30 minutes.
        options = dict(timeout=group._get_backend(group._device_types[0]).options._timeout,
                       backend=dist.get_backend(group), use_local_synchronization=True)
        self.inside, self.across = (dist.new_group(members, **options) for members in (
            ranks[first:first + node_size], ranks[place::node_size]))


def hierarchical_hook(state, bucket):
    """Reduce-scatter inside the node, all-reduce of each rank's part across nodes, all-gather
    inside: between nodes goes 1 / node_size of what a rank sends in a flat all-reduce.

    Contributions are added in rank order inside a node, then nodes in order: other bits than the
    flat sum's, unless node_size is 1 or W.
    """
    n, node_size = len(bucket.buffer()), dist.get_world_size(state.inside)
    flat = bucket.buffer().mul_(1 / (node_size * dist.get_world_size(state.across)))
    flat = torch.nn.functional.pad(flat, (0, -n % node_size))  # to equal chunks
    reduce_scatter(flat, state.inside)()
    all_reduce(flat.chunk(node_size)[dist.get_rank(state.inside)], state.across)()()
    all_gather(flat, state.inside)()
    return completed(flat[:n])


class TopKState:
    """For `top_k_hook`: which part of the elements to send, and what was not sent so far.

    start_iter: backwards at the beginning in which everything is sent, while weights move fast.
    iter: backwards so far. residual: {parameter: tensor}; each rank saves and loads its own.
    """

    def __init__(self, ratio=0.01, process_group=None, start_iter=0):
        self.ratio, self.process_group, self.start_iter = ratio, process_group, start_iter
        self.iter, self.residual = 0, {}


def top_k_hook(state, bucket):
    """Send only the largest elements of a bucket, `ratio` of them, as (index, value); the rest is
    added to the next gradient: error feedback, Lin et al., arXiv 1712.01887, section 3.

    Each rank sends 8 (W-1) ratio Psi bytes a step: at W = 2 and ratio 0.01, 1/50 of an all-reduce.
    The residual costs 4 Psi bytes; that of a parameter is lost in a step in which no rank uses it.
    With ratio 1 the bits are those of the exchange without a hook.
    """
    W, flat = dist.get_world_size(state.process_group), bucket.buffer()
    ratio = state.ratio if state.iter >= state.start_iter else 1
    state.iter += bucket.is_last()
    gradients = list(zip(bucket.parameters(), bucket.gradients()))
    for p, gradient in gradients:
        gradient += state.residual.get(p, 0)
    index = flat.abs().topk(math.ceil(ratio * len(flat)), sorted=False).indices.int()
    value = flat[index] * (1 / W)
    indices, values = ([torch.empty_like(t) for _ in range(W)] for t in (index, value))
    dist.all_gather(indices, index, group=state.process_group)
    dist.all_gather(values, value, group=state.process_group)
    flat[index] = 0
    flat.nan_to_num_(0.0, 0.0, 0.0)  # an inf or nan has been sent, and must not stay
    state.residual |= {p: gradient.clone() for p, gradient in gradients}
    total = torch.zeros_like(flat, dtype=torch.float32 if flat.dtype.itemsize == 2 else None)
    for where, received in zip(indices, values):  # in rank order; no index twice in one of them
        total.index_add_(0, where, received.to(total.dtype))
    return completed(flat.copy_(total))


# -------------------------------------------------------------------------------------------------
# clipping


def total_norm(tensors, process_group=None):
    """2-norm of all tensors together, a float64 scalar, the same on every rank.

    process_group: the ranks over which the tensors are sharded; None where each rank holds them
    whole. In float64, so that the division into shards does not show once rounded to fp32.
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


def clip_gradients_(gradients, max_norm, process_group=None, divide_by=1):
    """Divide gradients in place by divide_by, and scale them to a total norm of at most max_norm;
    return the norm between the two.

    The one clipping function of all modes. Group as in `total_norm`; max_norm inf does not clip.
    Both are one product: sums over any number of ranks and micro-steps are rounded once.
    """
    norm = total_norm(gradients, process_group) / divide_by
    if gradients and (max_norm < math.inf or divide_by != 1):
        factor = ((max_norm / (norm + 1e-6)).clamp(max=1.0) / divide_by).float()
        # Also when it is 1: asking would make the CPU wait for the GPU.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm

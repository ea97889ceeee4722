"""Data parallelism: every rank holds the whole model, reads its own part of the batch, and all
ranks step with the mean of their gradients.

    model = DDP(module)                      # as torch.nn.parallel.DistributedDataParallel
    loss = model(x, y)
    loss.backward()                          # on return every `.grad` is the mean over ranks
    model.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Replaces torch's DDP: 2,700 lines of Python and a reducer in C++. How it works (Li et al., arXiv
2006.15704, section 3.2): parameters fall into buckets of some 25 MB, in reverse
order, since the backward reaches the last ones first. A hook on each parameter moves its gradient,
times 1/W, into the bucket's flat buffer; a full bucket is summed over ranks while the backward goes
on; a callback at the end of the backward waits for what is still under way.

How it differs: an element's W contributions are added in rank order, ((g0 + g1) + g2) + ...,
whatever its place in the buffer, so the bucket size never changes a bit. A ring all-reduce adds in
an order that depends on the place. `average_gradients` gives the same result by one collective per
parameter; everything else is checked against it. Two comm hooks, which torch's DDP takes too:
`hierarchical_hook` sends less between nodes, `top_k_hook` sends less, at the price of exactness.

Cost: 4 Psi bytes of buckets, which are the gradients; 2 (W-1)/W Psi elements sent per step and rank
(naive: (W-1) Psi); two small numbers per parameter to agree on which ones were used; at W >= 3 on
gloo a scratch buffer of up to PIECE_BYTES and a thread.
"""

import collections
import concurrent.futures
import contextlib
import copy
import itertools
import math
import secrets
import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

FIRST_BUCKET_BYTES = 2**20  # small, so that communication starts early; each next one doubles
PIECE_BYTES = 32 * 2**20  # largest part of a buffer exchanged at once: bounds the scratch buffer


# -------------------------------------------------------------------------------------------------
# the oracle


@torch.no_grad()
def average_gradients(module, process_group=None):
    """Overwrite every `p.grad` of module by its mean over the ranks of process_group.

    A collective: every rank calls it after its backward. A parameter unused on some ranks counts as
    zero there; one that no rank used keeps `grad is None`, as in torch DDP with
    `find_unused_parameters=True`. Nothing overlaps, nothing is bucketed: to be read at a glance.
    """
    W = dist.get_world_size(process_group)
    parameters = [p for p in module.parameters() if p.requires_grad]  # a tied weight appears once
    if not parameters:
        return
    # Ranks must agree on which collectives follow, or one of them waits for ever.
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    used = used.to(parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=process_group)
    for p, used_somewhere in zip(parameters, used.tolist()):
        if not used_somewhere:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        # Scaled before the sum, which would overflow in fp16; times 1/W as in torch's reducer,
        # since a division gives other bits at W = 3.
        p.grad.mul_(1 / W)
        mine = p.grad.contiguous()
        contributions = [torch.empty_like(mine) for _ in range(W)]
        dist.all_gather(contributions, mine, group=process_group)
        add_in_rank_order(contributions, out=p.grad)  # in place: keeps strides and views


def add_in_rank_order(contributions, out):
    """out = ((c0 + c1) + c2) + ...; 16-bit ones are added in fp32, rounded once.

    out may be one of them; c0 is overwritten where it is.
    """
    total, *rest = contributions
    if total.dtype.itemsize == 2:
        total = total.float()
    elif rest and out.data_ptr() not in [c.data_ptr() for c in rest]:
        total = torch.add(total, rest.pop(0), out=out)
    for contribution in rest:
        total += contribution  # not torch.sum over a stack, which regroups from W = 5 on
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)


# -------------------------------------------------------------------------------------------------
# the two collectives


def adds_in_rank_order(flat, process_group):
    """Whether flat is exchanged piece by piece and added here, or handed to a native collective."""
    if flat.device.type == "cpu":
        return True
    nccl = "nccl" in dist.get_backend(process_group)  # gloo sends no CUDA tensors from rank to rank
    return nccl and torch.are_deterministic_algorithms_enabled()


def native(name, older_name):
    """A collective of torch's, under the name that this version has for it."""
    return getattr(dist, name, None) or getattr(dist, older_name)


def exchange(sends, receives, process_group, tag):
    """Start to send and to receive {peer's rank in the group: tensor}; empty ones are skipped.

    Returns [(peer, Work)] for `wait_for`.
    """
    ops = [dist.P2POp(op, tensor, group=process_group, tag=tag, group_peer=peer)
           for op, tensors in ((dist.irecv, receives), (dist.isend, sends))
           for peer, tensor in tensors.items() if tensor.numel()]
    works = dist.batch_isend_irecv(ops) if ops else []  # NCCL returns one for all
    return [(op.group_peer, work) for op, work in zip(ops, works)]


def wait_for(works):
    """Wait for what `exchange` started. Raises RuntimeError naming the peer that did not answer."""
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"nothing came from or went to rank {peer}: {error}") from error


def without_peer(passes):
    """What to do where an exchange has failed."""
    return (f"A rank has died, hangs, or makes fewer {passes} (uneven inputs are not supported); "
            f"if it was only slow, give init_process_group() a longer timeout.")


def chunks_and_peers(flat, process_group):
    """flat cut into W chunks, the r-th one rank r's; this rank; the others, its neighbour first."""
    rank, W = dist.get_rank(process_group), dist.get_world_size(process_group)
    return flat.tensor_split(W), rank, [(rank + distance) % W for distance in range(1, W)]


def reduce_scatter(flat, process_group=None, tag=0, scratch=None):
    """Sum flat, 1-D, over ranks, each rank its own chunk, in place. Other chunks stay as they were.
    """
    own = flat.tensor_split(dist.get_world_size(process_group))[dist.get_rank(process_group)]
    add_in_rank_order(start_reduce_scatter(flat, process_group, tag, scratch)(), out=own)


def start_reduce_scatter(flat, process_group=None, tag=0, scratch=None):
    """Start to send each rank its chunk of flat -> a function that waits for it and returns this
    rank's contributions in rank order; they stand in flat and in scratch.

    scratch: W - 1 chunks or more, for what arrives. Reused, it saves the page faults of fresh
    memory: a tenth of forward and backward of 32M parameters at W = 4.
    """
    chunks, rank, peers = chunks_and_peers(flat, process_group)
    own = chunks[rank]
    if not adds_in_rank_order(flat, process_group):
        start = native("reduce_scatter_single", "reduce_scatter_tensor")
        work = start(own, flat, group=process_group, async_op=True)

        def finish_native():
            work.wait()
            return [own]

        return finish_native
    if scratch is None:
        scratch = flat.new_empty(len(peers) * own.numel())
    room = scratch[:len(peers) * own.numel()].view(len(peers), own.numel())
    received = dict(zip(peers, room))
    works = exchange({q: chunks[q] for q in peers}, received, process_group, tag)
    received[rank] = own

    def finish():
        wait_for(works)
        return [received[q] for q in sorted(received)]

    return finish


def all_gather(flat, process_group=None, tag=0):
    """Start to fill all chunks of flat, 1-D, from the ranks that own them -> works for `wait_for`.

    May follow a `reduce_scatter` of flat at once: a chunk arrives only after its owner has received
    this rank's part of it.
    """
    chunks, rank, peers = chunks_and_peers(flat, process_group)
    if not adds_in_rank_order(flat, process_group):
        start = native("all_gather_single", "all_gather_into_tensor")
        return [(rank, start(flat, chunks[rank], group=process_group, async_op=True))]
    return exchange({q: chunks[rank] for q in peers}, {q: chunks[q] for q in peers},
                    process_group, tag)


def sums_natively(flat, process_group):
    """Whether the native all-reduce gives the bits of the sum in rank order, or is all there is: a
    sum of two has one order."""
    return dist.get_world_size(process_group) <= 2 or not adds_in_rank_order(flat, process_group)


def all_reduce(flat, process_group=None, tag=0, scratch=None):
    """Sum flat, 1-D, over ranks, in place: a piece is gathered while the next one is reduced."""
    if sums_natively(flat, process_group):
        dist.all_reduce(flat, group=process_group)
        return
    gathers = []
    for piece in flat.split(PIECE_BYTES // flat.element_size()):
        reduce_scatter(piece, process_group, tag, scratch)
        gathers += all_gather(piece, process_group, tag)
    wait_for(gathers)


def node_groups(process_group, node_size):
    """Two groups of this rank: the node_size neighbours that it is among, and the ranks that have
    its place among theirs. A collective. Raises ValueError unless node_size divides W.
    """
    group = process_group or dist.group.WORLD
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if node_size < 1 or len(ranks) % node_size:
        raise ValueError(f"groups of {node_size} ranks: {len(ranks)} ranks do not fall into such")

    def make(chosen):
        if len(chosen) == len(ranks):
            return group
        backend = dist.get_backend(group)
        device = torch.device("cuda" if "nccl" in backend else "cpu")
        # The group's own, or it would be torch's 30 minutes; the fake group has none.
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        return dist.new_group(chosen, timeout, backend, use_local_synchronization=True)

    first, place = rank - rank % node_size, rank % node_size
    return make(ranks[first:first + node_size]), make(ranks[place::node_size])


# -------------------------------------------------------------------------------------------------
# buckets


class Bucket:
    """A flat buffer and the parameters whose gradients live in it; to a comm hook, a GradBucket.

        put     a parameter's gradient arrives
        wait    set by the launch: blocks until the buffer holds the mean, or the hook's result
    """

    def __init__(self, index, is_last, parameters):
        self._index, self._is_last, self._parameters = index, is_last, parameters
        n = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(n, dtype=parameters[0].dtype, device=parameters[0].device)
        self._buffer = self.flat
        self.views = dict(zip(parameters, self.gradients()))
        self.arrived = set()  # parameters with a gradient in this backward
        self.wait = None

    def complete(self):
        return len(self.arrived) == len(self._parameters)

    def put(self, p, scale):
        """Move p.grad, times scale, into the buffer; then `p.grad` is the view of it."""
        view = self.views[p]
        if p.grad is None:
            view.zero_()  # not used here, maybe elsewhere
        elif p.grad is view:
            view.mul_(scale)  # accumulated in place, see `DDP._on_gradient`
        else:
            torch.mul(p.grad, scale, out=view)  # one pass over memory, not a copy and a division
            p.grad = view  # frees the gradient that autograd made

    # torch.distributed.GradBucket

    def index(self):
        return self._index

    def is_last(self):
        return self._is_last

    def parameters(self):
        return self._parameters

    def buffer(self):
        return self._buffer

    def set_buffer(self, buffer):
        self._buffer = buffer

    def gradients(self):
        """Views of the buffer with the shapes and strides that the parameters' gradients have."""
        views, offset = [], self._buffer.storage_offset()
        for p in self._parameters:
            strides = torch.empty_like(p, device="meta").stride()  # dense, in p's memory order
            views.append(self._buffer.as_strided(p.shape, strides, offset))
            offset += p.numel()
        return views


# -------------------------------------------------------------------------------------------------
# the wrappers


class Reducer(torch.nn.Module):
    """What DDP and the ZeRO stages share: a hook on every parameter moves its gradient into a
    bucket, buckets are launched in order, and a callback ends the backward.

    A subclass has `_follow_changes`, which makes `_buckets` and `_bucket_of` fit the parameters
    that are trainable now; `_launch`, which starts to reduce a bucket; `_reduced`, which takes the
    result in; `_has_gradient` and `_give_gradient`, which deal with what the optimizer sees. Its
    buckets have `put`, `parameters`, `index`, `arrived`, `complete` and `wait`, as `Bucket` does.
    """

    def _join(self, module, process_group):
        """Take the module and its group. Not a collective."""
        if any(isinstance(m, Reducer) for m in module.modules()):
            raise RuntimeError(f"{self._get_name()}: this module has been wrapped already, or a "
                               f"part of it: pass the plain one")
        if any(hasattr(p, "is_shard") for p in module.parameters()):
            raise RuntimeError(f"{self._get_name()}: this module's parameters are shards, left by "
                               f"a wrapper: build it anew and load_state_dict() the whole ones")
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.world_size = dist.get_world_size(process_group)
        self.require_backward_grad_sync = True
        self.exposed_s = 0.0  # seconds waited for communication in all steps so far

    def _start(self, named):
        """What belongs to this process, and what a copy makes anew. Not a collective.

        named: {name: parameter}, a tied one once.
        """
        self._names = {p: name for name, p in named.items()
                       if p.is_floating_point() or p.is_complex()}
        self._buckets, self._bucket_of = [], {}
        self._task, self._n_launched = None, 0  # the engine's number of the last backward
        self._under_way = False  # a backward that is to be synchronised has begun, and not ended
        self._n_backwards = 0  # begun and to be synchronised, on all ranks alike
        self._used = set()  # parameters that had a gradient since the last synchronisation
        on_gradient = weakref.WeakMethod(self._on_gradient)  # p must not keep its wrapper alive
        for p in self._names:
            trained = p.requires_grad
            p.requires_grad_(True)  # or it takes no hook, and would have none once it is thawed
            handle = p.register_post_accumulate_grad_hook(lambda p: on_gradient()(p))
            p.requires_grad_(trained)
            weakref.finalize(self, handle.remove).atexit = False

    def _check_ranks_agree(self, *options):
        """Raise on every rank, naming the first difference, where ranks wrap different modules."""
        tensors = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        lines = [*options, *(f"{name} {tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}"
                             for name, t in tensors)]
        views = [None] * self.world_size
        # With it goes rank 0's choice of a tag, lest two wrappers take each other's messages.
        dist.all_gather_object(views, (secrets.randbits(30), lines), group=self.process_group)
        self._tag, expected = views[0]
        for rank, (_, found) in enumerate(views):
            for ours, theirs in itertools.zip_longest(expected, found, fillvalue="nothing more"):
                if ours != theirs:
                    raise RuntimeError(f"{self._get_name()}: ranks wrap different modules: where "
                                       f"rank 0 has {ours}, rank {rank} has {theirs}")

    @torch.no_grad()
    def _broadcast(self, tensors):
        """Overwrite tensors by rank 0's, as bytes: one collective a device, whatever the dtypes."""
        for device in dict.fromkeys(t.device for t in tensors if self.world_size > 1):
            # .data: autograd may have saved a buffer, and need not hear of its new value.
            there = [t.data for t in tensors if t.device == device]
            parts = [t.contiguous().view(-1).view(torch.uint8) for t in there]
            together = torch.cat(parts)
            dist.broadcast(together, group_src=0, group=self.process_group)
            for t, part, source in zip(there, parts, together.split([len(p) for p in parts])):
                part.copy_(source)
                if not t.is_contiguous():
                    t.copy_(part.view(t.dtype).view(t.shape))

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards in here only accumulate, in the buckets; the next one outside averages."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _on_gradient(self, p):
        """Hook of p: autograd has added all that this backward adds to p.grad."""
        if not p.requires_grad:  # frozen since the forward
            return
        if p.grad.layout != torch.strided:
            raise RuntimeError(f"{self._get_name()}: the gradient of {self._names[p]} is sparse, "
                               f"which is not supported: use sparse=False")
        if self._task != torch._C._current_graph_task_id():
            self._begin_backward(p)
        bucket = self._bucket_of[p]
        self._used.add(p)
        if not self.require_backward_grad_sync:
            self._put(bucket, p, 1.0)  # beside the bucket it would take 4 Psi bytes more
            return
        self._put(bucket, p, self._scale())
        bucket.arrived.add(p)
        # Strictly by index: ranks may complete buckets in different orders.
        while (self._n_launched < len(self._buckets)
               and self._is_ready(self._buckets[self._n_launched])):
            self._launch_next()

    def _put(self, bucket, p, scale):
        bucket.put(p, scale)

    def _is_ready(self, bucket):
        """Whether to launch a bucket before the backward has ended."""
        return bucket.complete()

    def _launch_next(self):
        bucket = self._buckets[self._n_launched]
        for p in bucket.parameters():
            if p not in bucket.arrived:
                self._put(bucket, p, self._scale())  # no gradient, or one from no_sync()
        self._n_launched += 1
        if bucket.index() > 0 and self._one_at_a_time():
            self._finish(self._buckets[bucket.index() - 1])
        with record_function(f"start: reduce bucket {bucket.index()}"):
            self._launch(bucket)

    def _one_at_a_time(self):
        """Whether a bucket is launched only when the one before has been reduced."""
        return True

    def _scale(self):
        return 1 / self.world_size

    def _begin_backward(self, p):
        """The first gradient of a backward is there: refuse, or make ready for, what follows."""
        wrappers = [hook for hook in p._post_accumulate_grad_hooks.values()
                    if getattr(hook, "__module__", None) == __name__]
        if len(wrappers) > 1:
            raise RuntimeError(f"{self._get_name()}: {self._names[p]} is wrapped {len(wrappers)} "
                               f"times, and would be averaged as often: delete the other wrapper "
                               f"first")
        if torch.is_grad_enabled():
            raise RuntimeError(f"{self._get_name()}: backward(create_graph=True) is not supported, "
                               f"since the mean is not recorded: use torch.autograd.grad inside "
                               f"the loss")
        if inside_a_backward():
            raise RuntimeError(f"{self._get_name()}: a backward inside a backward is not "
                               f"supported: in activation checkpointing pass use_reentrant=False")
        if self._under_way:
            self._drop_unfinished()
        self._follow_changes()
        self._task = torch._C._current_graph_task_id()
        if self.require_backward_grad_sync:
            self._n_backwards += 1
            self._under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _drop_unfinished(self):
        """Let go of a backward that raised: what it had launched still has to end."""
        for bucket in self._buckets:
            with contextlib.suppress(RuntimeError):
                if bucket.wait is not None:
                    bucket.wait()
            bucket.wait = None
        self._reset()

    def _reset(self):
        self._task, self._n_launched, self._under_way = None, 0, False
        for bucket in self._buckets:
            bucket.arrived.clear()

    @torch.no_grad()
    def _end_backward(self):
        """The engine's callback after a backward: launch what is left, wait, agree on what is used.
        """
        while self._n_launched < len(self._buckets):
            self._launch_next()
        if next(iter(self._names)).is_cuda:
            torch.cuda.current_stream().synchronize()  # lest the clock show the backward too
        for bucket in self._buckets:
            self._finish(bucket)
        with self._exposed("agreement on use"):
            unused = self._agree_on_use()
        self._reset()
        self._used.clear()
        if unused and not self.find_unused_parameters:
            more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
            raise RuntimeError(f"{self._get_name()}: no gradient in this backward for "
                               f"{', '.join(unused[:8])}{more}. Freeze them, or pass "
                               f"find_unused_parameters=True if this is meant")

    @contextlib.contextmanager
    def _exposed(self, what):
        """Adds its duration to the time that this thread has waited for communication, and names it
        in a profile, as the start of what can overlap is named too: `start: what`, `wait: what`."""
        start_s = time.perf_counter()
        with record_function(f"wait: {what}"):
            yield
        self.exposed_s += time.perf_counter() - start_s

    def _finish(self, bucket):
        """Wait for a bucket, if nobody has yet, and take in its result."""
        if bucket.wait is None:
            return
        wait, bucket.wait = bucket.wait, None
        try:
            with self._exposed(f"reduce bucket {bucket.index()}"):
                result = wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._get_name()}, rank {dist.get_rank(self.process_group)}: bucket "
                f"{bucket.index() + 1} of {len(self._buckets)}, from "
                f"{self._names[bucket.parameters()[0]]} on, was not averaged. "
                f"{without_peer('backwards')} {error}") from error
        self._reduced(bucket, result)

    def _agree_on_use(self):
        """Give a parameter that has a gradient on some rank its gradient here too.

        Returns the names of those that some rank did not use. Costs an all-reduce of two numbers a
        parameter, and on CUDA a wait of the CPU for the backward.
        """
        parameters = [p for bucket in self._buckets for p in bucket.parameters()]
        counts = [[self._has_gradient(p) for p in parameters] + [self._n_backwards],
                  [p in self._used for p in parameters] + [0]]
        counts = torch.tensor(counts, dtype=torch.int32, device=parameters[0].device)
        if self.world_size > 1:
            dist.all_reduce(counts, group=self.process_group)
        # The latter in torch's fake group, which hands back what it gets: others would add to it.
        if counts[0, -1] not in (self.world_size * self._n_backwards, self._n_backwards):
            raise RuntimeError(f"{self._get_name()}: ranks are out of step: this is backward "
                               f"{self._n_backwards} here, but not on all ranks. Did one raise, or "
                               f"make one more?")
        unused = []
        for p, n_gradients, n_used in zip(parameters, *counts.tolist()):
            if n_gradients:
                self._give_gradient(p)
            if n_used < self.world_size:
                unused.append(f"{self._names[p]} (unused on {self.world_size - n_used} of "
                              f"{self.world_size} ranks)")
        return unused


class DDP(Reducer):
    """Average gradients over the ranks of process_group during every backward of module.

    device_ids: None, or the one CUDA device of module, to which inputs are moved.
    bucket_cap_mb: a bucket is full at this size; the first of each device and dtype at 1 MB, the
    next ones at 2, 4, 8 and 16.
    find_unused_parameters: accept that a backward leaves parameters out. One that some rank used
    counts as zero elsewhere; one that no rank used keeps its gradient, None. Otherwise every rank
    raises RuntimeError, naming them.
    broadcast_buffers: rank 0's buffers go to all ranks before a forward, as in torch.

    Raises RuntimeError on every rank, naming the first difference, where ranks wrap modules that
    differ in names, shapes, dtypes or frozen parameters.

    Names and meaning as in torch.nn.parallel.DistributedDataParallel. Also right here: parameters
    frozen or thawed between steps (on all ranks alike), a change of dtype or device, several
    backwards of one forward.
    Refused: `backward(create_graph=True)`, activation checkpointing with use_reentrant=True, sparse
    gradients. Ranks must make the same number of backwards: there is no join().

    What counts is the backward, not the forward: every backward that reaches a parameter is
    averaged, that of `model.module(x)` too, unless it runs in no_sync(); one that a rank makes
    alone belongs in there. `.grad` lives in the bucket, as with torch's
    gradient_as_bucket_view=True: clone what is to outlive the next backward.
    """

    def __init__(self, module, device_ids=None, process_group=None, bucket_cap_mb=25,
                 find_unused_parameters=False, broadcast_buffers=True):
        super().__init__()
        device = next((p.device for p in module.parameters() if p.requires_grad), None)
        if device is None:
            raise RuntimeError("DDP: no parameter of this module requires a gradient")
        if device_ids and (len(device_ids) > 1 or device.type == "cpu"):
            raise ValueError(f"device_ids {device_ids}: give the module's one device, None on CPU")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb {bucket_cap_mb}: must be above 0")
        self._join(module, process_group)
        self.input_device = device if device_ids else None
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self._comm_hook, self.comm_state = None, None
        self._start()
        self._build_buckets()
        self._broadcast([*module.parameters(), *module.buffers()])

    def _start(self):
        super()._start(dict(self.module.named_parameters()))
        self._layout = None
        self._sync_buffers = True  # before the next forward
        # One thread, so first in, first out: waits for peers and adds while the backward goes on.
        self._lane = concurrent.futures.ThreadPoolExecutor(1, "ddp")

    def __getstate__(self):
        """For deepcopy and pickle. The copy is in the default group and builds its buckets in its
        first backward; copying is no collective, so that one rank alone may keep an average."""
        here = {"process_group", "_names", "_layout", "_buckets", "_bucket_of", "_used", "_lane",
                "_scratch"}
        return {name: value for name, value in vars(self).items() if name not in here}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._join(self.module, None)
        self._start()

    def _current_layout(self):
        return [(id(p), p.shape, p.dtype, p.device) for p in self._names if p.requires_grad]

    def _build_buckets(self):
        """Divide the trainable parameters among buckets. A collective; raises if ranks differ."""
        self._check_ranks_agree(f"bucket_cap_mb={self.bucket_cap_mb}")
        self._layout = self._current_layout()
        self._scratch = {}  # dtype -> tensor, as large as the largest bucket will need
        cap, full, filling = int(self.bucket_cap_mb * 2**20), [], {}
        caps = collections.defaultdict(lambda: min(FIRST_BUCKET_BYTES, cap))
        for p in reversed(self._names):
            if p.requires_grad:
                kind = (p.device, p.dtype)
                filling.setdefault(kind, []).append(p)
                if sum(q.numel() * q.element_size() for q in filling[kind]) >= caps[kind]:
                    full.append(filling.pop(kind))  # in the order in which backwards fill them
                    caps[kind] = min(2 * caps[kind], cap)  # the wire is never idle for long
        full += filling.values()
        self._buckets = [Bucket(i, i == len(full) - 1, ps) for i, ps in enumerate(full)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}

    # ---- forward

    def forward(self, *inputs, **kwargs):
        if self._sync_buffers and self.broadcast_buffers:
            self._broadcast(list(self.module.buffers()))
        # As torch has it: not after a forward that evaluates, or that accumulates.
        self._sync_buffers = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.input_device is not None:
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(self.input_device), (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    # ---- backward

    def _scale(self):
        return super()._scale() if self._comm_hook is None else 1.0  # a hook takes the mean

    def _one_at_a_time(self):
        # gloo matches collectives by their number, and a hook may start some in a callback.
        return self._comm_hook is not None and next(iter(self._names)).device.type == "cpu"

    def _follow_changes(self):
        if self._layout != self._current_layout():  # frozen, thawed, moved or cast since
            self._build_buckets()

    def _launch(self, bucket):
        """Start to reduce a bucket, all of whose gradients are in place."""
        if self._comm_hook is None:
            bucket.wait = self._start_all_reduce(bucket.flat)
            return
        bucket.set_buffer(bucket.flat)
        bucket.wait = self._comm_hook(self.comm_state, bucket).wait

    def _start_all_reduce(self, flat):
        """Start to sum flat over ranks in place -> a function that waits for it."""
        if self.world_size == 1:
            return lambda: None
        if sums_natively(flat, self.process_group):
            return dist.all_reduce(flat, group=self.process_group, async_op=True).wait
        if flat.dtype not in self._scratch:
            largest = max(bucket.flat.numel() for bucket in self._buckets)
            largest = min(largest, PIECE_BYTES // flat.element_size())
            # The lane works on one bucket at a time. W - 1 chunks of n / W rounded up: below n + W.
            self._scratch[flat.dtype] = flat.new_empty(largest + self.world_size)
        arguments = flat, self.process_group, self._tag, self._scratch[flat.dtype]
        if flat.device.type == "cpu":
            return self._lane.submit(all_reduce, *arguments).result
        all_reduce(*arguments)  # on CUDA streams keep the order
        return lambda: None

    def _reduced(self, bucket, result):
        if self._comm_hook is not None:  # it may have left its result elsewhere
            result = result if isinstance(result, torch.Tensor) else result[0]
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result)

    def _has_gradient(self, p):
        return p.grad is not None

    def _give_gradient(self, p):
        if p.grad is None:
            p.grad = self._bucket_of[p].views[p]

    # ---- beside the backward

    def register_comm_hook(self, state, hook):
        """From now on hook(state, bucket) -> Future reduces each bucket, taking the mean included.

        bucket: a `Bucket`, which has the methods of torch.distributed.GradBucket.
        """
        if not callable(hook) or self._comm_hook is not None:
            raise RuntimeError("register_comm_hook: give one function, and only once")
        self.comm_state, self._comm_hook = state, hook

    def clip_grad_norm_(self, max_norm):
        """Scale gradients in place to a total norm of at most max_norm; return the norm before,
        a float64 scalar, the same on every rank."""
        return clip_gradients_([p.grad for p in self._names if p.grad is not None], max_norm)

    # what ZeRO's wrappers have too: here each rank has everything

    shard_group = None  # the ranks that parameters are cut up over

    def full_parameters(self):
        """Yield (original name, whole parameter), a tied one once."""
        yield from ((name, p.detach()) for name, p in self.module.named_parameters())

    def shard_starts(self):
        """{original name: where this rank's part begins in the parameter, in elements}: 0."""
        return dict.fromkeys((name for name, _ in self.module.named_parameters()), 0)


def inside_a_backward():
    """Whether this thread is in the middle of the backward of a Python autograd.Function."""
    frame = sys._getframe()
    while frame is not None:
        # By its code: looking into f_locals would keep the tensors of every caller alive.
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


# -------------------------------------------------------------------------------------------------
# comm hooks, for DDP above and for torch's


class HierarchicalState:
    """For `hierarchical_hook`: the groups of a node, of node_size ranks, and across nodes.

    A collective. Raises ValueError unless node_size divides the world size.
    """

    def __init__(self, node_size, process_group=None):
        self.world_size = dist.get_world_size(process_group)
        self.inside, self.across = node_groups(process_group, node_size)
        self.lane = concurrent.futures.ThreadPoolExecutor(1, "hierarchical")

    def __deepcopy__(self, memo):
        return self  # of a wrapper's copy too: groups belong to the process

    def all_reduce(self, flat):
        """Sum flat, 1-D, over all ranks -> the sum, in place where node_size divides its length."""
        n, node_size = len(flat), dist.get_world_size(self.inside)
        if n % node_size:  # native collectives want equal chunks
            flat = torch.nn.functional.pad(flat, (0, -n % node_size))
        reduce_scatter(flat, self.inside)
        all_reduce(flat.tensor_split(node_size)[dist.get_rank(self.inside)], self.across)
        wait_for(all_gather(flat, self.inside))
        return flat[:n]


def hierarchical_hook(state, bucket):
    """Reduce-scatter inside the node, all-reduce of each rank's part across nodes, all-gather
    inside: between nodes goes 1 / node_size of what a rank sends in a flat all-reduce.

    Contributions are added in rank order inside a node, then nodes in order: other bits than the
    flat sum's, unless node_size is 1 or W.
    """
    flat = bucket.buffer().mul_(1 / state.world_size)
    future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])

    def run():
        try:
            future.set_result(state.all_reduce(flat))
        except Exception as error:  # a peer that is gone: `wait` raises it
            future.set_exception(error)

    run() if flat.is_cuda else state.lane.submit(run)  # on CUDA streams keep the order
    return future


class TopKState:
    """For `top_k_hook`: which part of the elements to send, and what was not sent so far.

    start_iter: backwards at the beginning in which everything is sent, while weights move fast.
    iter: backwards so far. residual: {parameter: tensor}; each rank saves and loads its own.
    Raises ValueError for a ratio outside (0, 1].
    """

    def __init__(self, ratio=0.01, process_group=None, start_iter=0):
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio {ratio}: must be above 0, at most 1")
        self.ratio, self.process_group, self.start_iter = ratio, process_group, start_iter
        self.iter, self.residual = 0, {}

    def __deepcopy__(self, memo):
        copied = copy.copy(self)  # a group belongs to the process, a residual to the parameters
        copied.residual = copy.deepcopy(self.residual, memo)
        return copied


def largest(magnitude, k):
    """Indices of the k largest elements, nan counting as such.

    On a CPU by way of those above a floor that a sample suggests: 14 ms instead of 103 for 1 % of
    6.5M, on one core. The result does not depend on the sample.
    """
    sample = magnitude[::61]  # a prime, or it may see one column of a matrix
    n_above = 2 * k * len(sample) // max(1, len(magnitude))
    if magnitude.is_cpu and 0 < n_above < len(sample) / 4:
        floor = sample.kthvalue(len(sample) - n_above).values
        above = (~(magnitude < floor)).nonzero().view(-1)
        if len(above) >= k:
            return above[magnitude[above].topk(k, sorted=False).indices]
    return magnitude.topk(k, sorted=False).indices


def top_k_hook(state, bucket):
    """Send only the largest elements of a bucket, `ratio` of them, as (index, value); what is left
    over is added to the next gradient: error feedback, Lin et al., arXiv 1712.01887, section 3.

    Each rank sends 8 (W-1) ratio Psi bytes a step: at W = 2 and ratio 0.01, 1/50 of an all-reduce.
    The residual costs 4 Psi bytes. With ratio 1 the bits are those of the exchange without a hook.
    """
    W, flat = dist.get_world_size(state.process_group), bucket.buffer()
    sends_all = state.iter < state.start_iter
    state.iter += bucket.is_last()
    if sends_all:
        return allreduce_hook(state.process_group, bucket)
    # What is left of an unused parameter waits: if no rank uses it now, nobody applies what comes.
    used = [(p, gradient) for p, gradient in zip(bucket.parameters(), bucket.gradients())
            if p.grad is not None]
    for p, gradient in used:
        if p in state.residual:
            gradient += state.residual[p]
    index = largest(flat.abs(), math.ceil(state.ratio * len(flat))).int()
    chosen = torch.cat([t.view(torch.uint8) for t in (index, flat[index] * (1 / W))])
    received = chosen.new_empty(W * len(chosen))
    work = native("all_gather_single", "all_gather_into_tensor")(
        received, chosen, group=state.process_group, async_op=True)
    flat[index] = 0
    flat.nan_to_num_(0.0, 0.0, 0.0)  # an inf or nan has gone out, and must not stay for ever
    for p, gradient in used:
        state.residual.setdefault(p, torch.empty_like(gradient)).copy_(gradient)

    def add_up(_):
        total = torch.zeros_like(flat, dtype=torch.float32 if flat.dtype.itemsize == 2 else None)
        for contribution in received.chunk(W):  # in rank order; no index twice in one of them
            # Cloned, since a view as another dtype has to begin at a multiple of its size.
            where = contribution[:4 * len(index)].clone().view(torch.int32)
            values = contribution[4 * len(index):].clone().view(flat.dtype)
            total.index_add_(0, where, values.to(total.dtype))
        return flat.copy_(total)

    return work.get_future().then(add_up)


# -------------------------------------------------------------------------------------------------
# clipping


def total_norm(tensors, process_group=None):
    """2-norm of all tensors together, a float64 scalar, the same on every rank.

    process_group: the ranks over which the tensors are sharded; None where each rank holds them
    whole. In float64, so that the grouping into shards does not show in what is rounded to fp32.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    squares = [torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in tensors]
    device = tensors[0].device if tensors else "cpu"
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=device))
    if process_group is not None:
        if "nccl" in dist.get_backend(process_group):  # which sends from CUDA only
            total = total.cuda()
        dist.all_reduce(total, group=process_group)
    return total.sqrt().to(device)


def clip_gradients_(gradients, max_norm, process_group=None):
    """Scale gradients in place to a total norm of at most max_norm; return the norm before.

    The one clipping function of all modes. Group as in `total_norm`; max_norm inf only measures.
    """
    norm = total_norm(gradients, process_group)
    if max_norm < math.inf:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()  # rounded to fp32 once
        for gradient in gradients:
            gradient.mul_(factor)  # also when 1: asking would make the CPU wait for the GPU
    return norm

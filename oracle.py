"""Data parallelism and the three stages of ZeRO by hand: obvious, slow and complete.

    python oracle.py                          # one process
    torchrun --nproc_per_node=3 oracle.py     # three: the same weights in every mode, less memory

Everything else in this project has to end on the bits of this file. It only gets there faster.

W processes, the ranks, train one model. Each rank has its own part of the batch. In data
parallelism each rank has the whole model, too. ZeRO (Rajbhandari et al., arXiv 1910.02054) lets a
rank keep only 1/W of what it needs now and then: its piece of every parameter, the shard.

            a rank keeps whole       sends in a step of n backwards, in (W-1)/W Psi elements
    ddp     all                      2
    1       parameters, gradients    2
    2       parameters               n + 1
    3       nothing                  2 n, and again what the backward needs: at most 3 n

Psi is the number of parameters.

Six facts to know first:
1. The mean of the ranks' gradients is the gradient of the whole batch. So ranks that begin with
   equal parameters, and step with this mean, stay equal.
2. A reduce-scatter gives each rank the sum over ranks of its piece. An all-gather gives every rank
   all pieces. One after the other they give all ranks the whole sum.
3. A tensor is a view of memory. `p.data = t` gives the parameter p other memory: p stays the same
   object for the module, the optimizer and autograd.
4. The backward of a linear layer needs its weight. So autograd saves the weight in the forward.
5. A post-accumulate-grad hook of p runs in the backward as soon as `p.grad` is complete.
6. Floating-point sums depend on their order. Equal bits need one order: here that of the ranks.

What this file cannot do, and ddp.py and zero.py can. In the stages all ranks must use the same
parameters in the same order: a rank that skips one waits forever, or, if sizes agree, silently adds
another one. Parameters must be contiguous. In stage 3 a frozen norm or convolution inside
activation checkpointing is nan, since that saves the parameter itself.
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module, Parameter


# -------------------------------------------------------------------------------------------------
# two collectives: all ranks have to call them, in the same order


def reduce_scatter(flat: Tensor, earlier: Tensor | None = None, process_group=None) -> Tensor:
    """flat, (N,), is cut into W pieces by `tensor_split`, of about N/W elements each. Rank r gets
    the sum of all ranks' r-th piece, in the order of the ranks: ((earlier + g0) + g1) + ..."""
    W, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    sizes = [len(piece) for piece in flat.tensor_split(W)]
    n = sizes[rank]
    arriving = flat.new_empty(W, n)  # row r comes from rank r
    dist.all_to_all_single(arriving.view(-1), flat, [n] * W, sizes, group=process_group)
    wide = torch.promote_types(flat.dtype, torch.float32)  # sums of 16-bit numbers are rounded once
    addends = list(arriving.to(wide))
    if earlier is not None:
        addends.insert(0, earlier.to(wide))
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total.to(flat.dtype)


def all_gather(flat: Tensor, process_group=None) -> None:
    """Fill flat, (N,): each rank sends its piece to all others."""
    works = []
    for rank, piece in enumerate(flat.tensor_split(dist.get_world_size(process_group))):
        if len(piece) > 0:
            works.append(dist.broadcast(piece, group_src=rank, group=process_group, async_op=True))
    for work in works:
        work.wait()


# -------------------------------------------------------------------------------------------------
# data parallelism
#
#     loss = module(x, y)
#     loss.backward()                 # several of these two: gradients add up
#     average_gradients(module)
#     optimizer.step(); optimizer.zero_grad()


@torch.no_grad()
def average_gradients(module: Module, process_group=None,
                      divide_factor: float | None = None) -> None:
    """Overwrite each `p.grad` of module by the mean over ranks. All ranks have to call it.

    divide_factor: what the sum over ranks is divided by; W unless given. Each rank multiplies by
    1/divide_factor, and then the products are added, so that a sum of 16-bit gradients does not
    overflow. With another factor than W call it once per step: a second call would sum again what
    the first has summed. A parameter that a rank has not used (`grad is None`) counts as zero
    there. One that no rank has used keeps None, as in torch's DDP. Frozen ones are left alone.
    """
    factor = dist.get_world_size(process_group) if divide_factor is None else divide_factor
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    # Ranks must agree on which collectives follow, or one of them waits forever.
    is_used = [p.grad is not None for p in parameters]
    n_ranks = torch.tensor(is_used, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(n_ranks, group=process_group)
    for p, n in zip(parameters, n_ranks.tolist()):
        if n == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        mean = (p.grad * (1 / factor)).contiguous()  # p.shape
        own = own_piece(mean, process_group)
        own.copy_(reduce_scatter(mean.view(-1), process_group=process_group))
        all_gather(mean.view(-1), process_group)
        p.grad.copy_(mean)


# -------------------------------------------------------------------------------------------------
# stage 1, P_os: each rank updates its piece of every parameter, and has optimizer state for that
#
#     make_shards(module)                        # gives each parameter p its p.shard
#     reduce_in_backward(module)                 # in stages 2 and 3 only
#     gather_when_used(module, module.blocks)    # in stage 3 only
#     shards = [p.shard for p in module.parameters()]
#     optimizer = torch.optim.AdamW(shards, fused=False)    # the fused kernel rounds the end of a
#     for x, y in batches:                                  # tensor differently
#         loss = module(x, y)
#         loss.backward()                        # several of these two: gradients add up
#         reduce_gradients(module)               # in stage 1 only
#         optimizer.step()                       # changes this rank's piece of each parameter
#         optimizer.zero_grad()
#         gather_parameters(module)              # in stages 1 and 2 only


def own_piece(t: Tensor, process_group=None) -> Tensor:
    """t, contiguous, of any shape -> (n,), a view: the piece of it that this rank owns."""
    pieces = t.view(-1).tensor_split(dist.get_world_size(process_group))
    return pieces[dist.get_rank(process_group)]


def make_shards(module: Module) -> None:
    """Begin with rank 0's values. Give each parameter p of module a `p.shard` for the optimizer: a
    Parameter of shape (n, 1, ..., 1), with as many dimensions as p. (Scripts decay only where
    `p.dim() >= 2`, hence the ones.)"""
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    for p in module.parameters():
        ones = [1] * (p.dim() - 1)
        piece = own_piece(p.detach()).view(-1, *ones)  # no copy: a step changes p's memory
        p.shard = Parameter(piece, p.requires_grad)


@torch.no_grad()
def reduce_gradient(p: Parameter) -> None:
    """Add this rank's piece of the mean over ranks of p.grad to p.shard.grad. Free p.grad."""
    gradient = (p.grad * (1 / dist.get_world_size())).contiguous()  # p.shape
    earlier = None  # the sum of the backwards before, in this step
    if p.shard.grad is not None:
        earlier = p.shard.grad.view(-1)
    # The order of one process that computes all micro batches in turn.
    total = reduce_scatter(gradient.view(-1), earlier)
    p.shard.grad = total.view_as(p.shard)
    p.grad = None


def reduce_gradients(module: Module) -> None:
    """After the backwards of a step."""
    for p in module.parameters():
        if p.grad is not None:
            reduce_gradient(p)


def gather_parameters(module: Module) -> None:
    """After a step only its owner has the new values of a piece: each rank sends its own to all."""
    for p in module.parameters():
        all_gather(p.data.view(-1))


# -------------------------------------------------------------------------------------------------
# stage 2, P_os+g: gradients, too, are kept in pieces


def reduce_in_backward(module: Module) -> None:
    """Reduce each gradient as soon as the backward has all of it, so that one is whole at a time.
    The price: stage 1 adds up the backwards of a step by itself, and sends once; this sends in each
    of them."""
    for p in module.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(reduce_gradient)


# -------------------------------------------------------------------------------------------------
# stage 3, P_os+g+p: parameters, too, are kept in pieces


@torch.no_grad()
def gather(p: Parameter) -> Tensor:
    """All ranks' p.shard -> the whole parameter, p.shape, in new memory."""
    whole = p.shard.new_empty(p.shape)
    own_piece(whole).copy_(p.shard.view(-1))
    all_gather(whole.view(-1))
    return whole


def unshard(parameters: list[Parameter], *_) -> None:
    """Forward pre-hook of a unit: its parameters get their values."""
    for p in parameters:
        p.data = gather(p)


def reshard(parameters: list[Parameter], *_) -> None:
    """Forward hook of a unit: free these values. Autograd needs the shape of a parameter, so one
    nan stays, expanded to it. Who reads a parameter too early gets nan, and no old value."""
    for p in parameters:
        p.data = p.new_full((), math.nan).expand(p.shape)  # one element, strides of 0


def pack(module: Module, t: Tensor) -> Callable[[], Tensor]:
    """Autograd saves t for the backward -> what it keeps instead: a recipe, a function that returns
    t. If t is a parameter of module, or a view of one, such as its transpose, t would keep the
    whole parameter alive. So that recipe gathers it again. (If a step comes between, these are new
    values, and nobody notices.)"""
    for p in module.parameters():  # one that is not whole now has other memory, and does not match
        if t.untyped_storage().data_ptr() == p.untyped_storage().data_ptr():
            layout = t.shape, t.stride(), t.storage_offset()
            return lambda: gather(p).as_strided(*layout)
    kept = t.detach()  # an output that its own node saves would keep the node, and so itself, alive
    return lambda: kept


def unpack(recipe: Callable[[], Tensor]) -> Tensor:
    """In the backward: what `pack` has returned -> the tensor that it was given."""
    return recipe()


def gather_when_used(module: Module, units: Iterable[Module]) -> None:
    """Let parameters be whole only where they are used. units: submodules, such as the blocks, none
    inside another. A unit is whole during its forward. What is in no unit, the root, is whole
    during the forward of module. The backward gathers each parameter that autograd has saved, for
    one operation. (Inside activation checkpointing, which saves tensors in its own way, a unit that
    is recomputed is whole until its backward is over.)"""
    units = list(units)
    in_units = {p for unit in units for p in unit.parameters()}
    root = [p for p in module.parameters() if p not in in_units]
    for p in module.parameters():
        p.shard.data = p.shard.data.clone()  # it was a piece of p, whose memory is to go
    for unit in (module, *units):
        parameters = root if unit is module else list(unit.parameters())
        reshard(parameters)
        unit.register_forward_pre_hook(functools.partial(unshard, parameters))
        # always_call: activation checkpointing ends its second forward by an exception.
        unit.register_forward_hook(functools.partial(reshard, parameters), always_call=True)
    forward = module.forward

    def forward_with_recipes(*inputs, **options):
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(pack, module), unpack):
            return forward(*inputs, **options)

    module.forward = forward_with_recipes


# -------------------------------------------------------------------------------------------------
# what a fast version must add: the contents of ddp.py and zero.py
#
#   messages    of 25 MB: many gradients in one flat buffer, a bucket; many parameters in another
#   overlap     a bucket is sent while the backward computes the next one; a unit is gathered while
#               the forward, or the backward, computes the one before
#   one gather  of a unit in the backward, not one of each parameter that autograd has saved
#   agreement   ranks that use different parameters, or skip a unit
#   safety      what is read too early or too late raises, also where a step has come between
#   memory      buffers that are used again, as allocating costs time
#   the rest    clipping (the norm is over all ranks' pieces), no_sync(), 16-bit parameters and
#               gradients, strides, meta devices, checkpoints


# -------------------------------------------------------------------------------------------------
# the proof: one model in five modes. All end on the same hash if a step has one backward. If it has
# two, `ddp` and `1` end on another one than the rest: there a rank adds its own two gradients
# first, (a0 + a1) + (b0 + b1). In `single`, `2` and `3` it is ((a0 + b0) + a1) + b1.


MODES = ("single", "ddp", "1", "2", "3")


class Model(Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 61)
        self.blocks = nn.ModuleList(nn.Linear(61, 61) for _ in range(5))
        self.last = nn.Linear(61, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


def backward_of(module, step, number, micro_steps):
    """Of the micro batch that has this number in the step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(16, 7, generator=generator)
    error = module(x) - x.sum(dim=1, keepdim=True)
    loss = error.square().mean() / micro_steps
    loss.backward()


def backward_of_all(module, step, micro_steps):
    """`single`: one process computes what W ranks would, in turn, and adds the same products."""
    W = dist.get_world_size()
    totals = {}
    for number in range(micro_steps * W):
        backward_of(module, step, number, micro_steps)
        for p in module.parameters():
            product = p.grad * (1 / W)
            totals[p] = totals[p] + product if p in totals else product
            p.grad = None
    for p, total in totals.items():
        p.grad = total


def train(mode, micro_steps):
    """Train a model for four steps -> (the hash of its parameters; the bytes that this rank holds
    at the end of the last backward: parameters, gradients, Adam; the elements it sends in a step).
    """
    W, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    module = Model()
    is_sharded = mode in ("1", "2", "3")
    if is_sharded:
        make_shards(module)
    if mode in ("2", "3"):
        reduce_in_backward(module)
    if mode == "3":
        gather_when_used(module, module.blocks)
    trained = [p.shard if is_sharded else p for p in module.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=False)
    for step in range(4):
        with elements_sent() as sent:
            if mode == "single":
                backward_of_all(module, step, micro_steps)
            else:
                for micro_step in range(micro_steps):
                    backward_of(module, step, micro_step * W + rank, micro_steps)
            held = bytes_held(module, trained, optimizer)
            if mode == "ddp":
                average_gradients(module)
            if mode == "1":
                reduce_gradients(module)
            optimizer.step()
            optimizer.zero_grad()
            if mode in ("1", "2"):
                gather_parameters(module)
    found = hashlib.sha256()
    for p in module.parameters():
        whole = gather(p) if mode == "3" else p.detach()
        found.update(whole.numpy().tobytes())
    return found.hexdigest()[:8], held, sum(sent)


def bytes_held(module, trained, optimizer):
    """(of parameters, of gradients, of Adam's two averages); views of one memory count once."""
    parameters = [*module.parameters(), *trained]
    averages = []
    for p in trained:
        averages += [optimizer.state[p].get(name) for name in ("exp_avg", "exp_avg_sq")]
    of_kinds = []
    for tensors in (parameters, [p.grad for p in parameters], averages):
        memories = {}
        for t in tensors:
            if t is not None:
                memories[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        of_kinds.append(sum(memories.values()))
    return of_kinds


@contextlib.contextmanager
def elements_sent():
    """A context -> a list, to which each collective in it adds what this rank sends. (What ranks
    agree on in `average_gradients`, a number per parameter, is left out.)"""
    W, rank = dist.get_world_size(), dist.get_rank()
    exchange, broadcast = dist.all_to_all_single, dist.broadcast
    sent = []

    def counted_exchange(arriving, flat, sizes_in, sizes_out, **options):
        sent.append(len(flat) - sizes_out[rank])
        exchange(arriving, flat, sizes_in, sizes_out, **options)

    def counted_broadcast(piece, group_src, **options):
        if group_src == rank:
            sent.append((W - 1) * len(piece))
        return broadcast(piece, group_src=group_src, **options)

    with (mock.patch.object(dist, "all_to_all_single", counted_exchange),
          mock.patch.object(dist, "broadcast", counted_broadcast)):
        yield sent


def main():
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks; bytes that rank 0 holds, elements that it sends")
        print("mode    micro-steps  hash      parameters  gradients     Adam  sent per step")
    for micro_steps in (1, 2):
        for mode in MODES:
            found, (parameters, gradients, adam), sent = train(mode, micro_steps)
            if dist.get_rank() == 0:
                print(f"{mode:6s}  {micro_steps:11d}  {found}  {parameters:10,}  {gradients:9,}  "
                      f"{adam:7,}  {sent:13,}")
    dist.barrier()  # gloo may abort a rank if another one leaves before it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

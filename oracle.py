# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Data parallelism and the three stages of ZeRO by hand: obvious, slow and complete.

    python oracle.py                          # one process
    torchrun --nproc_per_node=3 oracle.py     # three: equal weights in all modes, with less memory
    torchrun --nproc_per_node=3 oracle.py --device cuda   # on an accelerator: one is enough

Everything else in this project has to end on the bits of this file. It only gets there faster.

W processes, the ranks, train one model. Each rank reads its own part of the batch. In data
parallelism each rank has all of the model. In ZeRO (Rajbhandari et al., arXiv 1910.02054) each rank
owns one of W chunks of every parameter, its shard. Of what it needs only now and then, it keeps
only this chunk. For Psi parameters:

           a rank keeps whole      sends in a step of n backwards, in (W-1)/W Psi elements
    ddp    all                     2:           reduces gradients and gathers the sums, once
    1      parameters, gradients   2:           reduces gradients, gathers parameters, once
    2      parameters              n + 1:       reduces in each backward, gathers once
    3      nothing                 at most 3 n: reduces in each backward, gathers in each forward,
                                                and what the backward needs once more

Seven facts to know first:
1. The mean of the ranks' gradients is the gradient of the whole batch. So ranks that begin with
   equal parameters, and step with this mean, stay equal.
2. A reduce-scatter gives each rank the sum over ranks of its chunk. An all-gather gives every rank
   all chunks. One after the other they give all ranks the whole sum.
3. A tensor is a view of memory. `p.data = t` gives the parameter p other memory. p stays the same
   object for the module, the optimizer and autograd. A tensor that was made from p before still has
   the old memory.
4. The backward of a linear layer needs its weight. So autograd saves the weight in the forward.
5. `saved_tensors_hooks(pack, unpack)`: in the forward autograd keeps pack(t) in place of t. In the
   backward it takes unpack of that.
6. A post-accumulate-grad hook of p runs in the backward as soon as `p.grad` is complete.
7. Floating-point sums depend on their order. Equal bits need one order: here that of the ranks.

What this file cannot do, and ddp.py and zero.py can. In the stages all ranks must use the same
parameters in the same order. If a rank skips one, the others wait forever; or, where sizes agree,
its next gradient is added to the wrong one. Parameters must be contiguous. In stage 3, activation
checkpointing saves some parameters themselves, of frozen norms and convolutions: these are nan in
the backward.
"""

import argparse
import functools
import hashlib
import math
import os
import socket
from collections.abc import Callable, Iterable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module, Parameter


# -------------------------------------------------------------------------------------------------
# two collectives: all ranks have to call them, in the same order


def own_chunk(t: Tensor, process_group=None) -> Tensor:
    """t, contiguous, of any shape -> (n,), a view: the chunk of it that this rank owns. Its N
    elements are cut into W chunks, of about N/W elements each, and rank r owns the r-th."""
    chunks = t.view(-1).tensor_split(dist.get_world_size(process_group))
    return chunks[dist.get_rank(process_group)]


def reduce_scatter(flat: Tensor, earlier: Tensor | None = None, process_group=None) -> Tensor:
    """flat, (N,) -> (n,): the sum of all ranks' values of the chunk that this rank owns. earlier,
    (n,): what to begin with. The order is ((earlier + rank 0's) + rank 1's) + ..."""
    W, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    sizes = [len(chunk) for chunk in flat.tensor_split(W)]
    n = sizes[rank]
    arriving = flat.new_empty(W, n)  # row r comes from rank r
    # Rank r gets the r-th chunk of every rank's flat: sizes[r] elements go to r, n come from each.
    dist.all_to_all_single(arriving.view(-1), flat, [n] * W, sizes, group=process_group)
    wide_dtype = torch.promote_types(flat.dtype, torch.float32)  # in 16 bits each sum would round
    addends = list(arriving.to(wide_dtype))
    if earlier is not None:
        addends.insert(0, earlier.to(wide_dtype))
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total.to(flat.dtype)


def all_gather(flat: Tensor, process_group=None) -> None:
    """Before, each rank has its own chunk of flat, (N,); after, all of them. In place."""
    works = []
    for owner, chunk in enumerate(flat.tensor_split(dist.get_world_size(process_group))):
        if len(chunk) > 0:
            works.append(dist.broadcast(chunk, group_src=owner, group=process_group, async_op=True))
    for work in works:
        work.wait()


# -------------------------------------------------------------------------------------------------
# data parallelism
#
#     broadcast_parameters(module)    # once, before the first forward
#
#     loss = module(x, y)
#     loss.backward()                 # several of these two: gradients add up; divide each loss
#     average_gradients(module)
#     optimizer.step(); optimizer.zero_grad()


def broadcast_parameters(module: Module, process_group=None) -> None:
    """All ranks take rank 0's parameters and buffers. Ranks that draw their weights without a
    common seed would otherwise add the same means to other weights, and nobody would notice."""
    for t in (*module.parameters(), *module.buffers()):
        value = t.data.contiguous()  # NCCL sends nothing else
        dist.broadcast(value, group_src=0, group=process_group)
        t.data.copy_(value)


@torch.no_grad()
def average_gradients(module: Module, process_group=None,
                      divide_factor: float | None = None) -> None:
    """Overwrite each `p.grad` of module by the mean over ranks. All ranks have to call it.

    divide_factor: what the sum over ranks is divided by; W unless given. Each rank multiplies its
    gradient by 1/divide_factor before the sum, as DDP does: where that sums 16-bit numbers, the sum
    might overflow.

    A parameter that a rank has not used (`grad is None`) counts as zero there. One that no rank has
    used keeps None, as in torch's DDP with find_unused_parameters=True. Frozen ones are left alone.
    """
    factor = dist.get_world_size(process_group) if divide_factor is None else divide_factor
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    # Ranks must agree on which collectives follow, or one of them waits forever.
    is_used = [p.grad is not None for p in parameters]
    counts = torch.tensor(is_used, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(counts, group=process_group)
    for p, n_users in zip(parameters, counts.tolist()):
        if n_users == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        product = (p.grad * (1 / factor)).contiguous()  # p.shape
        total = reduce_scatter(product.view(-1), process_group=process_group)
        own_chunk(product, process_group).copy_(total)
        all_gather(product.view(-1), process_group)  # now product is the mean
        p.grad.copy_(product)


# -------------------------------------------------------------------------------------------------
# how the stages are used
#
#     make_shards(module)                        # gives each parameter p its p.shard
#     reduce_in_backward(module)                 # in stages 2 and 3 only
#     gather_when_used(module, module.blocks)    # in stage 3 only
#     shards = [p.shard for p in module.parameters()]
#     # Not fused: that kernel rounds the end of a tensor differently.
#     optimizer = torch.optim.AdamW(shards, fused=False)
#     for x, y in batches:
#         loss = module(x, y)
#         loss.backward()                        # several of these two: as above
#         reduce_gradients(module)               # in stage 1 only
#         optimizer.step()                       # changes this rank's chunk of each parameter
#         optimizer.zero_grad()
#         gather_parameters(module)              # in stages 1 and 2 only


# -------------------------------------------------------------------------------------------------
# stage 1, P_os in the paper (os: optimizer states): each rank updates its chunk of every parameter


def make_shards(module: Module) -> None:
    """Give each parameter p of module a `p.shard` for the optimizer: a Parameter which is this
    rank's chunk, of shape (n, 1, ..., 1), with as many dimensions as p. (Many scripts let only
    parameters of two dimensions decay, hence the ones.) First all ranks take rank 0's values."""
    broadcast_parameters(module)
    for p in module.parameters():
        ones = [1] * (p.dim() - 1)
        chunk = own_chunk(p.detach()).view(-1, *ones)  # no copy: a step changes p's memory
        p.shard = Parameter(chunk, p.requires_grad)


@torch.no_grad()
def reduce_gradient(p: Parameter) -> None:
    """p.shard.grad += this rank's chunk of the mean over ranks of p.grad. Then p.grad is freed."""
    product = (p.grad * (1 / dist.get_world_size())).contiguous()  # p.shape
    earlier = None
    if p.shard.grad is not None:  # there was a backward before, in this step
        earlier = p.shard.grad.view(-1)
    # earlier comes first, as in one process that computes all ranks' parts of the batch in turn.
    total = reduce_scatter(product.view(-1), earlier)
    p.shard.grad = total.view_as(p.shard)
    p.grad = None


def reduce_gradients(module: Module) -> None:
    """Call it once, after the backwards of a step."""
    for p in module.parameters():
        if p.grad is not None:
            reduce_gradient(p)


def gather_parameters(module: Module) -> None:
    """Call it after a step, in which a rank has changed its own chunks: it sends them to all."""
    for p in module.parameters():
        all_gather(p.data.view(-1))


# -------------------------------------------------------------------------------------------------
# stage 2, P_os+g: gradients, too, are kept only in chunks


def reduce_in_backward(module: Module) -> None:
    """From now on a backward reduces each gradient, and frees it, as soon as it has all of it.

    The price: in stage 1 a rank adds up the gradients of its backwards, and sends once. Here it has
    no room for these, and sends in each backward."""
    for p in module.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(reduce_gradient)


# -------------------------------------------------------------------------------------------------
# stage 3, P_os+g+p: parameters, too, are kept only in chunks


@torch.no_grad()
def gather(p: Parameter) -> Tensor:
    """All ranks' p.shard -> the whole parameter, p.shape, in new memory."""
    whole = p.shard.new_empty(p.shape)
    own_chunk(whole).copy_(p.shard.view(-1))
    all_gather(whole.view(-1))
    return whole


def unshard(parameters: list[Parameter], *_) -> None:
    """Forward pre-hook of a unit: its parameters get their values."""
    for p in parameters:
        p.data = gather(p)


def reshard(parameters: list[Parameter], *_) -> None:
    """Forward hook of a unit: free these values. One nan stays, expanded to the shape, which
    autograd needs. Code that reads a parameter at a wrong time gets nan, and no old value."""
    for p in parameters:
        p.data = p.new_full((), math.nan).expand(p.shape)  # one element, strides of 0


def pack(module: Module, t: Tensor) -> Callable[[], Tensor]:
    """t, which autograd saves -> what it keeps in place of t: a recipe, a function that returns t.

    If t is a parameter of module, or a view of one, such as its transpose, t would keep the memory
    of the whole parameter. So the recipe gathers it again. Do not step between a forward and its
    backward: these would be new values, and nobody would notice."""
    for p in module.parameters():  # if p is not whole now, its nan's memory is never that of t
        if t.untyped_storage().data_ptr() == p.untyped_storage().data_ptr():
            layout = t.shape, t.stride(), t.storage_offset()
            return lambda: gather(p).as_strided(*layout)  # this p, as the loop ends here
    # tanh saves its output. An output refers to its node of the graph, and the node to what it has
    # saved: a cycle, which would never be freed. Hence detach().
    kept = t.detach()
    return lambda: kept


def unpack(recipe: Callable[[], Tensor]) -> Tensor:
    """A recipe -> the tensor that `pack` was given. The backward calls it."""
    return recipe()


def gather_when_used(module: Module, units: Iterable[Module]) -> None:
    """From now on parameters are whole only where they are used.

    units: submodules, such as the blocks, none inside another. A unit is whole during its forward.
    What is in no unit, the root, is whole during the forward of module. In the backward a parameter
    that autograd has saved is whole while one operation uses it. (Activation checkpointing saves
    tensors in its own way: a unit that it computes again is whole until its backward is over.)
    """
    units = list(units)
    in_units = {p for unit in units for p in unit.parameters()}
    root = [p for p in module.parameters() if p not in in_units]
    for p in module.parameters():
        p.shard.data = p.shard.data.clone()  # it was a chunk of p, whose memory is to go
    for unit in (module, *units):
        parameters = root if unit is module else list(unit.parameters())
        reshard(parameters)
        unit.register_forward_pre_hook(functools.partial(unshard, parameters))
        # always_call: activation checkpointing ends its second forward by an exception.
        unit.register_forward_hook(functools.partial(reshard, parameters), always_call=True)
    forward = module.forward  # a hook cannot open a `with` that lasts for the forward

    def forward_with_recipes(*inputs, **options):
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(pack, module), unpack):
            return forward(*inputs, **options)

    module.forward = forward_with_recipes


# -------------------------------------------------------------------------------------------------
# what a fast version must add
#
# ddp.py and zero.py have:
#
#   - Buckets: many gradients, or parameters, are sent in one message of 25 MB.
#   - Overlap: a bucket is sent while the backward computes the next one. A unit is gathered while
#     the forward, or the backward, computes the one before.
#   - One gather of a unit in the backward, not one for each parameter that autograd has saved.
#   - Safety: what is read too early or too late is nan, or raises, also where a step has come
#     between.
#   - Clipping, whose norm is over all ranks' chunks; no_sync(); 16-bit parameters and gradients;
#     strides.
#
# dropin/ has agreement of ranks that use different parameters, or skip a unit, and much more.


# -------------------------------------------------------------------------------------------------
# devices


def kinds_of_devices() -> list[str]:
    """"cpu", and the accelerator of this machine, if it has one. (Not MPS, which has no collectives
    and no float64. For it torch names gloo.)"""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_default_backend_for_device(accelerator) == "gloo":
        return ["cpu"]
    return ["cpu", accelerator.type]


def take_device(kind: str, rank: int, n_ranks: int) -> torch.device:
    """The device of this kind that a rank takes. Call it before the group is made.

    rank: its number on this host, of n_ranks. Where there are fewer devices, ranks share them. NCCL
    refuses two ranks on one host with one device. So each of those with one device says that it is
    on a host of its own, unless the user has told NCCL what to do."""
    if kind == "cpu":
        return torch.device("cpu")
    n = torch.accelerator.device_count()
    device = torch.device(kind, rank % n)
    torch.accelerator.set_device_index(device.index)
    is_told = "NCCL_HOSTID" in os.environ or "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ
    is_nccl = dist.get_default_backend_for_device(device) == "nccl"
    if n_ranks > n and is_nccl and not is_told:
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{rank // n}"
    return device


# -------------------------------------------------------------------------------------------------
# the proof: one model in five modes
#
# If a step has one backward, all end on the same hash. If it has two, there are two hashes, unless
# W is 1. With the gradients a1, a2 of rank 0 and b1, b2 of rank 1 in the first and second backward:
#
#     ddp, 1           (a1 + a2) + (b1 + b2)      a rank adds its own first, and sends once
#     single, 2, 3     ((a1 + b1) + a2) + b2      all ranks' are added in each backward

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
    """Forward and backward of a micro batch, by its number in the step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(16, 7, generator=generator).to(module.last.weight.device)
    error = module(x) - x.sum(dim=1, keepdim=True)
    loss = error.square().mean() / micro_steps
    loss.backward()


def backward_of_all(module, step, micro_steps):
    """`single`: compute what W ranks would, in turn, without them, and add the same products."""
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


def train(mode, micro_steps, device="cpu"):
    """Train a model for four steps -> (the hash of its parameters; the bytes that this rank holds
    at the end of the last backward: parameters, gradients, Adam; the elements it sends in a step,
    but for what ranks agree on in `average_gradients`)."""
    W, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    module = Model().to(device)
    is_sharded = mode in ("1", "2", "3")
    if mode == "ddp":
        broadcast_parameters(module)
    if is_sharded:
        make_shards(module)
    if mode in ("2", "3"):
        reduce_in_backward(module)
    if mode == "3":
        gather_when_used(module, module.blocks)
    trained = [p.shard if is_sharded else p for p in module.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=False)
    noted_exchange = mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
    noted_broadcast = mock.patch.object(dist, "broadcast", wraps=dist.broadcast)
    for step in range(4):
        with noted_exchange as exchange, noted_broadcast as broadcast:
            if mode == "single":
                backward_of_all(module, step, micro_steps)
            else:
                for micro_step in range(micro_steps):
                    number = micro_step * W + rank  # one process would compute them in this order
                    backward_of(module, step, number, micro_steps)
            parameters = [*module.parameters(), *trained]
            states = [state for p in trained for state in optimizer.state[p].values()]
            held = (bytes_of(parameters), bytes_of(p.grad for p in parameters),
                    bytes_of(t for t in states if t.dim() > 0))  # not the number of steps
            if mode == "ddp":
                average_gradients(module)
            if mode == "1":
                reduce_gradients(module)
            optimizer.step()
            optimizer.zero_grad()
            if mode in ("1", "2"):
                gather_parameters(module)
    sent = 0
    for _, flat, _, sizes_to_send in (call.args for call in exchange.call_args_list):
        sent += len(flat) - sizes_to_send[rank]
    for call in broadcast.call_args_list:
        if call.kwargs["group_src"] == rank:  # as if each message went straight to its rank
            sent += (W - 1) * len(call.args[0])
    digest = hashlib.sha256()
    for p in module.parameters():
        whole = gather(p) if mode == "3" else p.detach()
        digest.update(whole.cpu().numpy().tobytes())
    return digest.hexdigest()[:8], held, sent


def bytes_of(tensors):
    """Views of one memory count once."""
    memories = {}
    for t in tensors:
        if t is not None:
            memories[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(memories.values())


def main():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    parser.add_argument("--device", choices=kinds_of_devices(), default="cpu")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = take_device(parser.parse_args().device, rank, n_ranks)
    backend = dist.get_default_backend_for_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks; bytes that rank 0 holds, elements that it sends")
        print("mode    micro-steps  hash      parameters  gradients     Adam  sent per step")
    for micro_steps in (1, 2):
        for mode in MODES:
            digits, (parameters, gradients, adam), sent = train(mode, micro_steps, device)
            if dist.get_rank() == 0:
                print(f"{mode:6s}  {micro_steps:11d}  {digits}  {parameters:10,}  {gradients:9,}  "
                      f"{adam:7,}  {sent:13,}")
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        print("With two micro-steps a rank of ddp and 1 adds up its own gradients first. That is "
              "another order\nthan one process has, so it rounds otherwise: both hashes are right.")
    if backend == "gloo":
        dist.barrier()  # it may abort a rank if another one leaves before it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

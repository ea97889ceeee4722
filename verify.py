# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""The proof: how we know that it is right.

    python verify.py                 # samples of all rows; exit status 1 on a failure
    python verify.py --full          # all rows
    python verify.py one_process     # rows whose name contains "one_process"
    python verify.py "one_process W=2 zero3"
    python verify.py --list          # claims, and names of rows
    python verify.py --module own.py    # your module, wrapped in everything: see `Task`
    python verify.py --wrapper mine.py  # your data parallelism, judged: see tests/judge.py
    python verify.py --device cuda   # all on an accelerator: one is enough

`reference` trains a module in one process, in a plain loop that uses nothing of ours. `distributed`
trains it on W ranks, in a wrapper. `same_bits` compares every gradient of every step, in its place,
and the parameters at the end: all bits. This is done for eight difficult modules, several wrappers
and numbers of ranks: for samples of these, for all of them with --full. The stages are compared
with oracle.py, too, and all of ours with torch's own. After that come the formulas of the ZeRO
paper: how many bytes a rank holds, and how many it receives.

A check is a function that all ranks of a group run at once, as training does. It asserts. A row of
the table is a check, the world size W, and the check's arguments. tests/ranks.py runs them: a row
that hangs, or whose rank dies, fails by name in time, and the rest runs.

With --device all is on an accelerator, the plain loop, too. Ranks share devices where there are
fewer, and torch takes deterministic kernels only. What cannot be there is skipped, and says why.

Everything else that is tested is in tests/, such as the bits of hybrid sharding, of comm hooks, of
five ranks and more, and of parameters that are not cut: `python -m pytest`, which runs this, too.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing.forkserver
import os
import pathlib
import signal
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial, reduce

if __name__ == "__main__":
    # For all processes: one thread a rank, no warnings of torch's.
    os.environ.update(OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR",
                      PYTHONWARNINGS="ignore", PYTHONPATH=os.pathsep.join(sys.path))
    # Ranks are forked by a server, in 0.02 s. It loads torch, and this file, while we do. It must
    # not start an accelerator, which no fork could use: so nothing here does when it is imported.
    # Nor may it load a verify.py or a model.py from where we were called, as Python would.
    os.environ["PYTHONSAFEPATH"] = "1"
    multiprocessing.set_forkserver_preload(["verify"])
    multiprocessing.forkserver.ensure_running()

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp
import zero
from dropin import DDP, Zero1, Zero2, Zero3
import oracle
from model import GPT, GPTConfig
from tests.hints import difference
from tests.measure import (Chain, evaluation, every_collective, four_announced, four_micro_steps,
                           four_of_which_one_is_synced, IN_ANOTHER_ORDER, live_bytes, one_step,
                           one_unit, part_of_others, part_of_tolerance, Registered, second_step,
                           unsynced_step)
from tests.own import on_device, own_file
from tests.ranks import (check, chosen, device, Failure, grid, JUDGED, only_full, print_names,
                         PROVED, rows_of, run_parts)

STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}  # dropin's
BOOK = {"book ddp": ddp.DDP, "book zero1": zero.Zero1, "book zero2": zero.Zero2,
        "book zero3": zero.Zero3}  # ddp.py and zero.py


# -------------------------------------------------------------------------------------------------
# 1. what is claimed, and the checks that show it. (The row of 1,024 ranks takes longest.)

CLAIMS = {
    "W ranks, in any wrapper, end on the bits of one process that runs a plain loop":
        ["bits_of_one_process"],
    "Each stage ends on the bits of oracle.py, in modules that this can take":
        ["stages_are_the_oracles"],
    "At W = 2 torch's own wrappers end on the same bits as ours": ["bits_of_torch"],
    "At other W they are about as close to ours as to each other": ["close_to_torch"],
    "A rank receives and holds the bytes of the ZeRO paper's formulas":
        ["memory_is_the_formulas", "traffic_is_the_formulas", "traffic_of_the_book"],
    "So it does, and overlaps as much, in whatever order a module is registered":
        ["order_of_use"]}


# -------------------------------------------------------------------------------------------------
# 2. modules as people have them: the zoo
#
# forward(x, turn) returns a scalar. x is (3, 5). The turn is 0, 1 or 2 and differs from rank to
# rank; some modules use other parameters, or other units, in another turn. They are tiny, since
# what goes wrong goes wrong at any size, and buckets of 1 kB stand for those of 25 MB.


def small_gpt(**options):
    sizes = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
    return GPT(GPTConfig(**{**sizes, **options}))


class Tokens(nn.Module):
    """A GPT, whose embedding is its head: used first and last, and its gradient arrives twice.

    options: of the GPT, such as activation_checkpointing.
    """

    def __init__(self, **options):
        super().__init__()
        self.gpt = small_gpt(**options)

    def forward(self, x, turn):
        idx = (10 * x.abs()).long()
        _, loss = self.gpt(idx, idx.flip(0))
        return loss


class Odd(nn.Module):
    """Parameters that are tied and transposed, frozen, never used, used in turn 0 only, of no
    dimension or 0, 1, 7 and 1001 elements; a layer called twice. No unit but the root."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.inner.weight = nn.Parameter(self.inner.weight.detach().T)  # strides (1, 5)
        self.outer.weight = self.inner.weight
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.wide = nn.Linear(5, 1001)
        self.sizes = nn.ParameterList(torch.randn(shape) for shape in ((), (1,), (0,), (7,)))

    def forward(self, x, turn):
        x = self.inner(x).tanh() * self.sizes[0] + self.sizes[1]
        x = self.frozen(self.outer(x))
        if turn == 0:
            x = self.sometimes(x)
        x = self.inner(x)
        return self.wide(x).square().mean() + self.sizes[2].sum() + self.sizes[3].exp().mean()


class Even(Odd):
    """What oracle.py can take of it: contiguous, and all ranks use the same parameters."""

    def __init__(self):
        super().__init__()
        self.inner.weight = nn.Parameter(self.inner.weight.detach().contiguous())
        self.outer.weight = self.inner.weight

    def forward(self, x, turn):
        return super().forward(x, 0)


class Plain(nn.Module):
    """What ddp.py and zero.py take of it: all ranks use all parameters, and there are units."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().T)  # strides (1, 5)
        self.layers[1].weight = self.layers[0].weight
        self.layers[2].requires_grad_(False)
        self.wide = nn.Linear(5, 1001)
        self.sizes = nn.ParameterList(torch.randn(shape) for shape in ((), (1,), (0,), (7,)))

    def forward(self, x, turn):
        x = self.layers[0](x).tanh() * self.sizes[0] + self.sizes[1]
        x = self.layers[0](self.layers[2](self.layers[1](x)))
        return self.wide(x).square().mean() + self.sizes[2].sum() + self.sizes[3].exp().mean()


class Mixed(nn.Module):
    """Layers in fp32, fp64 and bf16, or of other dtypes, the first called again, and buffers that
    follow the batches of a rank. Each layer is a unit without submodules, so nothing but its own
    call gathers it.

    A bucket has one dtype, and gloo sums bf16 in bf16, where 256 + 1 = 256. A BatchNorm has other
    statistics on each rank, unless rank 0's are sent before every forward, as torch DDP does.
    """

    def __init__(self, *dtypes, eps=1e-5):
        super().__init__()
        kinds = dtypes or (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for dtype in kinds)
        self.norm = nn.BatchNorm1d(5, eps)

    def forward(self, x, turn):
        for i in (0, 1, 0, 2, 3):
            layer = self.layers[i]
            x = layer(x.to(layer.weight.dtype)).tanh()
        return self.norm(x).exp().mean()


class Block(nn.Module):
    """A residual layer: a frozen weight, a trained correction of rank one, a parameter not used.

    In LoRA most parameters are frozen, so they are in no bucket, but stage 3 still gathers them.
    is_plain: without the parameter that is not used.
    """

    def __init__(self, is_plain=False):
        super().__init__()
        self.base, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 1, bias=False), nn.Linear(1, 5)
        if not is_plain:
            self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.norm(x)
        return x + (self.base(x) + self.up(self.down(x))).tanh()


class Blocks(nn.Module):
    """Four blocks, called in the order that the turn has.

    at_once: so many blocks are recomputed together; tied: blocks share weights; frozen: blocks
    without a gradient.

    Ranks have different turns, so some skip a block whose collectives the others take part in.
    What is gathered when must then not depend on what a rank itself has used, or they deadlock.
    """

    def __init__(self, *orders, at_once=0, tied=False, frozen=(), is_plain=False):
        super().__init__()
        self.orders, self.at_once = orders, at_once
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 2)
        self.layers = nn.ModuleList(Block(is_plain) for _ in range(4))
        if tied:
            self.layers[3].up.bias = self.layers[1].up.bias
            self.layers[2].base = self.layers[0].base
        for i in frozen:
            self.layers[i].requires_grad_(False)

    def some(self, x, numbers):
        for i in numbers:
            x = self.layers[i](x)
        return x

    def forward(self, x, turn):
        x = self.first(x)
        order = self.orders[turn % len(self.orders)]
        if self.at_once == 0:
            x = self.some(x, order)
        else:
            for i in range(0, len(order), self.at_once):
                part = order[i:i + self.at_once]
                x = checkpoint(self.some, x, part, use_reentrant=False)
        return self.last(x).square().mean()


class Experts(nn.Module):
    """Five lists of three experts, in a list: a turn calls two experts of each, in an order of its
    own, and no rank the third; turn 2 leaves out the first list, turn 1 the last three, so that it
    begins its backward with a unit that has been freed. A bare parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.shift = nn.Linear(5, 5), nn.Parameter(torch.ones(5))
        self.layers = nn.ModuleList()
        for _ in range(5):
            self.layers.append(nn.ModuleList(nn.Linear(5, 5) for _ in range(3)))

    def forward(self, x, turn):
        lists = ((0, 1, 2, 3, 4), (0, 1), (1, 2, 3, 4))[turn]
        order = ((0, 1), (1, 0), (0,))[turn]
        x = self.first(x)
        for i in lists:
            for j in order:
                x = x + self.layers[i][j](x).tanh()
        # With the shift a backward begins with a gradient, without it with a saved tensor.
        return (x + self.shift if turn == 0 else x).square().mean()


class Caller(nn.Module):
    """A unit whose forward calls the three other units, through a list that torch does not see, and
    reads its own weight after that. In stage 3 they have taken its memory by then."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        *others, last = self.layers

        def forward(x):
            for other in others:
                x = other(x).tanh()
            return F.linear(x, last.weight)

        last.forward = forward
        last.bias.requires_grad_(False)

    def forward(self, x, turn):
        return self.layers[3](x).square().mean()


class Scaled(nn.Module):
    """A buffer counts: the gradient is wrong on a rank that has another one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))

    def forward(self, x, turn):
        return self.layer(x * self.scale).square().mean()


class Inside(nn.Module):
    """A forward with a backward inside, after which it reads a weight of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Parameter(torch.randn(5, 5))

    def forward(self, x, turn):
        self.first(x).square().mean().backward()
        return (x @ self.second).square().mean()


ZOO = {"gpt": Tokens, "odd": Odd, "mixed": Mixed, "experts": Experts, "caller": Caller,
       "lora": partial(Blocks, (0, 1, 2, 3), frozen=(2,)),
       "again": partial(Blocks, (3, 1, 0, 2, 2, 1), at_once=3, tied=True),
       "skipping": partial(Blocks, (0, 1, 2, 3), (0, 3), (2,), frozen=(1,))}
MODULES = tuple(ZOO)  # "all modules" of a row; those that follow are of some
ZOO |= {"even": Even, "inside": Inside, "scaled": Scaled,
        "batchnorm": partial(Mixed, *4 * [torch.float32], eps=0.1),
        "recomputed": partial(Tokens, activation_checkpointing=True),
        "plain": Plain, "plain lora": partial(Blocks, (0, 1, 2, 3), frozen=(2,), is_plain=True),
        "plain again": partial(Blocks, (3, 1, 0, 2, 2, 1), at_once=3, tied=True, is_plain=True)}
PLAIN = ("gpt", "recomputed", "plain", "plain lora", "plain again")  # what the book takes


def adamw(parameters, kind=torch.optim.AdamW, foreach=False, **options):
    """Weights decay where they have two dimensions or more. Not fused: that kernel computes the end
    of a tensor, which does not fill a vector register, by other instructions, so a shard would not
    get the bits of the whole."""
    matrices = []
    others = []
    for p in parameters:
        group = matrices if p.dim() >= 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    return kind(groups, lr=1e-2, fused=False, foreach=foreach, **options)


def zoo_loss(model, step, number):
    """The loss of a micro batch, which is a function of the step and its number in it: however
    these are dealt to ranks and micro-steps, they are the same."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(3, 5, generator=generator).to(device())
    return model(x, (step + number) % 3)


@dataclasses.dataclass
class Task:
    """What is trained. A file for --module has functions of these names, the last three if needed:
    module(), which builds it; loss(model, step, number) of a micro batch; optimizer(parameters),
    which returns one, or a list, and is given parameters in the order of module.parameters();
    units(model), for the stages and FSDP2; uncut(model), for the stages. The file need not know of
    devices: see `on_device`."""
    module: object
    loss: object
    optimizer: object = adamw
    units: object = None
    uncut: object = None


def task_of(name):
    """Of a module of the zoo, or of a file, whose imports are open."""
    if name in ZOO:
        return Task(ZOO[name], zoo_loss)
    in_file = vars(own_file(name).module)
    for needed in ("module", "loss"):
        if needed not in in_file:
            raise ValueError(f"the file has no function named {needed}")
    names = [field.name for field in dataclasses.fields(Task)]
    task = Task(**{name: in_file[name] for name in names if name in in_file})
    task.loss = partial(on_device, task.loss)
    return task


def fresh(name):
    torch.manual_seed(0)
    return task_of(name).module().to(device())


# -------------------------------------------------------------------------------------------------
# 3. wrappers: what is compared with one process


class Oracle(nn.Module):
    """An oracle of oracle.py, with the methods of a wrapper. `distributed` calls
    `reduce_gradients` after the backwards of a step."""

    def __init__(self, module, shard_group=None):
        super().__init__()
        self.module, self.shard_group = module, shard_group

    def forward(self, *inputs):
        return self.module(*inputs)

    def full_parameters(self):
        for name, p in self.module.named_parameters():
            yield name, p.detach()

    def clip_grad_norm_(self, max_norm):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return ddp.clip_gradients_(gradients, max_norm, self.shard_group)


class Naive(Oracle):
    """`average_gradients`: two collectives per parameter, after the backward."""
    factor = None

    def __init__(self, module):
        super().__init__(module)
        oracle.broadcast_parameters(module)

    def set_gradient_divide_factor(self, factor):
        self.factor = factor

    def reduce_gradients(self):
        oracle.average_gradients(self.module, divide_factor=self.factor)


class ByHand(Oracle):
    """The three stages of oracle.py: their shards are pieces of rows."""

    def __init__(self, stage, module, units=None):
        super().__init__(module, dist.group.WORLD)
        self.stage = stage
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        oracle.make_shards(module)
        if stage >= 2:
            oracle.reduce_in_backward(module)
        if stage == 3:
            oracle.gather_when_used(module, zero.find_units(module) if units is None else units)

    def forward(self, *inputs):
        if self.stage < 3:
            oracle.gather_parameters(self.module)  # what the step before has changed
        return self.module(*inputs)

    def reduce_gradients(self):
        if self.stage == 1:
            oracle.reduce_gradients(self.module)

    def zero_grad(self, set_to_none=True):
        for p in self.module.parameters():
            assert p.grad is None, "a whole gradient is left"
            p.shard.grad = None

    def named_parameters(self, *_, **__):
        for name, p in self.module.named_parameters():
            yield name, p.shard

    def shard_starts(self):
        starts = {}
        rank = dist.get_rank()
        W = dist.get_world_size()
        for name, shape in self.shapes.items():
            pieces = torch.arange(shape.numel()).tensor_split(W)
            starts[name] = sum(len(piece) for piece in pieces[:rank])
        return starts

    def full_parameters(self):
        for name, p in self.module.named_parameters():
            yield name, oracle.gather(p)


def fsdp2(module, policy=MixedPrecisionPolicy(), units=None):
    """fully_shard on units, which are the elements of lists unless given, and on the root."""
    oracle.broadcast_parameters(module)
    if units is None:
        units = itertools.chain(*(m for m in module.modules() if isinstance(m, nn.ModuleList)))
    for m in (*units, module):
        mesh = dist.DeviceMesh(device().type, range(dist.get_world_size()))
        fully_shard(m, mesh=mesh, mp_policy=policy)
    return module


def uncut(stage, module, parameters=None, **options):
    """A stage in which these parameters are not cut, or none is."""
    parameters = set(module.parameters() if parameters is None else parameters)
    model = stage(module, uncut=parameters, **options)
    # For `put_together`.
    model.uncut = {n for n, p in module.named_parameters() if p in parameters}
    return model


BF16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
our_ddp = partial(DDP, find_unused_parameters=True)
torch_ddp = partial(DistributedDataParallel, find_unused_parameters=True)
WRAPPERS = {
    "naive": Naive,
    "stage 1 by hand": partial(ByHand, 1),
    "stage 2 by hand": partial(ByHand, 2),
    "stage 3 by hand": partial(ByHand, 3),
    "ddp": our_ddp,
    "ddp, 1 kB": partial(our_ddp, bucket_cap_mb=0.001),
    "ddp, 1 a bucket": partial(our_ddp, bucket_cap_mb=1e-6),
    "ddp unsynced": partial(our_ddp, forward_sync_buffers=False),
    **STAGES,
    **BOOK,
    "book ddp, 1 kB": partial(ddp.DDP, bucket_cap_mb=0.001),
    "book zero1, 1 kB": partial(zero.Zero1, bucket_cap_mb=0.001),
    "book zero1 bf16": partial(zero.Zero1, param_dtype=torch.bfloat16),
    "book zero2 bf16": partial(zero.Zero2, param_dtype=torch.bfloat16),
    "book zero3 bf16": partial(zero.Zero3, param_dtype=torch.bfloat16),
    "zero1 bf16": partial(Zero1, **BF16),
    "zero2 bf16": partial(Zero2, **BF16),
    "zero3 bf16": partial(Zero3, **BF16),
    "torch ddp": torch_ddp,
    "torch ddp unsynced": partial(torch_ddp, forward_sync_buffers=False),
    "fsdp2": fsdp2,
    "fsdp2 bf16": partial(fsdp2, policy=MixedPrecisionPolicy(**BF16)),
    "fsdp2 bf16 uncast": partial(fsdp2, policy=MixedPrecisionPolicy(**BF16,
                                                                    cast_forward_inputs=False))}


# -------------------------------------------------------------------------------------------------
# 4. the reference: one process, a plain loop

STEPS = 3  # what a step leaves behind shows in the next ones
MAX_NORM = 0.05  # less than most norms


def clip_by_hand(gradients, divide_by, max_norm=MAX_NORM):
    """Divide sums, and clip the result to max_norm, by one product with
    min(1, max_norm / (norm + 1e-6)) / divide_by, which is computed in float64 and rounded to fp32
    once. Return the norm after the division."""
    squares = [gradient.double().square().sum() for gradient in gradients]
    norm = torch.stack(squares).sum().sqrt() / divide_by
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / divide_by
    for gradient in gradients:
        gradient.mul_(factor.float())
    return norm


def redundancy(parameters):
    """AdamW whose states torch shards: its ZeRO-1."""
    return adamw(parameters, kind=ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)


def make_optimizers(make, parameters):
    """make(parameters) returns an optimizer, or a list of them. -> a list"""
    made = make(p for p in parameters if p.requires_grad)
    return made if isinstance(made, list) else [made]


@functools.cache  # several wrappers are compared with it
def reference(name, groups, factor, optimizer=None, max_norm=MAX_NORM, steps=STEPS):
    """Train a module of the zoo -> ({what: tensor}, {what: [what each group has added to it]},
    [{name: parameter} after each step]).

    groups: the numbers of a step's micro batches. Those that a rank adds by itself are a group: for
    two ranks with two micro-steps each, the first in no_sync(), ((0, 2), (1, 3)). The gradient of a
    group is their sum, as autograd accumulates it. Gradients of groups are multiplied by
    1 / factor, then added in this order, 16-bit ones in fp32. One product makes the mean over micro
    batches of that, and clips it to max_norm. optimizer: as of `distributed`.
    """
    module = fresh(name)
    task = task_of(name)
    optimizers = make_optimizers(optimizer or task.optimizer, module.parameters())
    divide_by = sum(len(numbers) for numbers in groups) / factor  # what is left to divide by
    expected = {}
    contributions = {}
    after_steps = []
    for step in range(steps):
        of_groups = []  # {name: gradient} of each
        for numbers in groups:
            module.zero_grad()  # sets None, so that the gradients before stay as they are
            for number in numbers:
                task.loss(module, step, number).backward()
            named = module.named_parameters()
            of_groups.append({n: p.grad for n, p in named if p.grad is not None})
        gradients = []
        for n, p in module.named_parameters():
            wide = torch.promote_types(p.dtype, torch.float32)
            addends = [(of_group[n] * (1 / factor)).to(wide)
                       for of_group in of_groups if n in of_group]
            p.grad = None
            if addends:
                p.grad = reduce(torch.add, addends).to(p.dtype)
                gradients.append(p.grad)
                what = f"step {step + 1}, gradient of {n}"
                expected[what] = p.grad.clone()
                nothing = torch.zeros_like(p)
                contributions[what] = [of_group.get(n, nothing) / factor for of_group in of_groups]
        norm = clip_by_hand(gradients, divide_by, max_norm)
        assert norm > 0, f"{name}: all gradients are zero, so nothing is compared"
        expected[f"step {step + 1}, norm"] = norm.float()
        for each in optimizers:
            each.step()
        after_steps.append({n: p.detach().clone() for n, p in module.named_parameters()})
    for n, p in after_steps[-1].items():
        expected[f"in the end, {n}"] = p
    return expected, contributions, after_steps


# -------------------------------------------------------------------------------------------------
# 5. the same on W ranks, in a wrapper


def distributed(wrap, name, micro_steps=1, each_synced=False, factor=None, odd_step=None,
                optimizer=None, buffers=False):
    """Train a module of the zoo on the ranks of this group -> {what: tensor}, as `reference`.

    wrap: a function of the module, which returns a wrapper of it.
    micro_steps: micro batches of a rank in a step; the a-th has the number a W + rank.
    each_synced: True, each of them is sent at once; "announced": and a stage is told which is the
        last; False: all but the last are in no_sync(), by which a rank adds its own first.
    factor: of set_gradient_divide_factor(); None: not called, so that it is W.
    odd_step: what a script does in a step, in place of micro-steps: odd_step(model, loss).
    optimizer: a function of parameters that returns one, or a list; None: the task's, AdamW.
    buffers: whether the module's buffers count, which differ from rank to rank.
    """
    task = task_of(name)
    module = fresh(name)
    if dist.get_rank() > 0:  # a wrapper has to begin with rank 0's values on all ranks
        for t in itertools.chain(module.parameters(), module.buffers()):
            t.data.fill_(7)
    model = wrap(module)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optimizers = make_optimizers(optimizer or task.optimizer, model.parameters())
    divide_by = micro_steps if factor is None else micro_steps * dist.get_world_size() / factor
    norms = {}
    kept = {}  # {what: (name, gradient)}
    for step in range(STEPS):
        loss = partial(loss_on_rank, task, model, step)
        if odd_step is None:
            accumulate(model, loss, micro_steps, each_synced)
        else:
            odd_step(model, loss)
        if hasattr(model, "reduce_gradients"):
            model.reduce_gradients()  # of oracles; the others have done it in backward()
        for n, p in plain_names(model.named_parameters()):
            if p.grad is not None:
                kept[f"step {step + 1}, gradient of {n}"] = n, copy_of(p.grad)
        norms[f"step {step + 1}, norm"] = clip(model, divide_by).float()
        for each in optimizers:
            each.step()
        model.zero_grad()  # not the optimizer's, which may have only some parameters
    trained = put_together(model, fresh(name), kept) | norms
    whole = model.full_parameters() if is_ours(model) else plain_names(model.named_parameters())
    for n, p in whole:
        trained[f"in the end, {n}"] = copy_of(p)
    if buffers:
        trained |= dict(plain_names(model.named_buffers()))
    return trained


def loss_on_rank(task, model, step, micro_step):
    rank, W = dist.get_rank(), dist.get_world_size()
    return task.loss(model, step, micro_step * W + rank)


def accumulate(model, loss, micro_steps, each_synced):
    """each_synced "announced": the stage is told which micro-step is the last."""
    for micro_step in range(micro_steps):
        is_last = micro_step == micro_steps - 1
        is_synced = each_synced or is_last
        if each_synced == "announced":
            model.set_is_last_backward(is_last)
        with nullcontext() if is_synced else no_sync(model):
            loss(micro_step).backward()


def is_ours(model):
    return hasattr(model, "full_parameters")


def plain_names(named):
    """As the module has them: (name, tensor) of (module.name, tensor)."""
    return [(name.removeprefix("module."), t) for name, t in named]


def copy_of(t):
    """A copy of all of t if it is FSDP2's, otherwise of what this rank has."""
    whole = t.full_tensor() if hasattr(t, "full_tensor") else t
    return whole.detach().clone()


def no_sync(model):
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def clip(model, divide_by):
    """By the function that a script calls; torch's wrappers have none that has our bits."""
    # Not as dropin's shards have them, which refuse to be clipped by another function.
    gradients = [p.grad.as_subclass(torch.Tensor) for p in model.parameters() if p.grad is not None]
    if not is_ours(model):
        return clip_by_hand(gradients, divide_by)
    if divide_by == 1:
        return model.clip_grad_norm_(MAX_NORM)
    return ddp.clip_gradients_(gradients, MAX_NORM, model.shard_group, divide_by)


def put_together(model, plain, kept):
    """{what: (name, this rank's part of a gradient)} -> {what: the whole gradient}. The part of a
    rank goes where its shard begins; there is nan where no shard is. A wrapper that does not shard
    has whole gradients, on every rank.

    plain: the module, for shapes and strides. Shards are cut in order of memory, those of the
    oracle in order of rows.
    """
    group = getattr(model, "shard_group", None)
    if group is None:
        return {what: gradient for what, (_, gradient) in kept.items()}
    starts = model.shard_starts()
    parameters = dict(plain.named_parameters())
    own = {}
    for what, (name, part) in kept.items():
        part = part.as_subclass(torch.Tensor)
        # In the order of memory; as float64, since numpy has no bf16.
        in_memory_order = part.double().as_strided((part.numel(),), (1,)).cpu().numpy()
        own[what] = name, starts[name], part.dtype, in_memory_order
    of_ranks = gather(own, group)
    tensors = {}
    for what in sorted(set().union(*of_ranks)):
        holders = [rank for rank, of_rank in enumerate(of_ranks) if what in of_rank]
        name, _, dtype, _ = of_ranks[holders[0]][what]
        n_holders = 1 if name in getattr(model, "uncut", ()) else len(of_ranks)
        assert len(holders) == n_holders, f"{what} is on ranks {holders}, expected on {n_holders}"
        p = parameters[name]
        flat = torch.full((p.numel(),), math.nan, dtype=dtype, device=p.device)
        n_parts = 0
        for rank in holders:
            _, start, _, part = of_ranks[rank][what]
            flat[start:start + len(part)] = torch.from_numpy(part)
            n_parts += len(part)
        assert n_parts == p.numel(), f"{what}: {p.numel()} elements, its shards have {n_parts}"
        strides = torch.empty(p.shape).stride() if isinstance(model, ByHand) else p.stride()
        tensors[what] = flat.as_strided(p.shape, strides)
    return tensors


def gather(value, group=None):
    """[rank 0's value, rank 1's, ...] of a group; any that can be pickled."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# -------------------------------------------------------------------------------------------------
# 6. the same bits


def same_bits(expected, actual, where="", contributions=()):
    """Assert that two {what: tensor} have the same keys, shapes, dtypes and bits, and say of the
    first tensor that differs what it looks like. The first in the order of training: a gradient
    says more than the parameters that it changes, as Adam divides by its size.

    contributions: {what: {who: what a rank has added to it}}, where that is known.
    """
    wrong = [what for what in actual if what not in expected]
    assert not wrong, f"{where}: {wrong[0]}: there should be none"
    for what, right in expected.items():
        if what not in actual or not is_same(actual[what], right):
            wrong.append(what)
    if wrong:
        fact = "is missing"
        if wrong[0] in actual:
            fact = difference(wrong[0], expected, actual[wrong[0]], contributions)
        raise AssertionError(f"{where}: {len(wrong)} of {len(expected)} tensors differ; the first, "
                             f"{wrong[0]}, {fact}")


def is_same(a, b):
    """All bits: also the sign of zero, which torch.equal does not see. -0 + 0 is 0, so it shows who
    has added a zero."""
    has_same_type = a.shape == b.shape and a.dtype == b.dtype
    return has_same_type and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


# -------------------------------------------------------------------------------------------------
# 7. the rows that are compared: modules x wrappers x world sizes


@contextmanager
def unwritten_is_nan():
    """New memory is full of nan, which torch does where only deterministic algorithms are allowed:
    so whoever reads what was never written has nan. On an accelerator it is always so."""
    is_always = torch.are_deterministic_algorithms_enabled()
    if not is_always:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_always)


def dealt(W, micro_steps, each_synced):
    """The groups of micro batches that W ranks add by themselves, as `reference` takes them. If
    each micro-step is sent at once, nothing is added before: each micro batch is a group."""
    if each_synced:
        return tuple((number,) for number in range(W * micro_steps))
    return tuple(tuple(range(rank, W * micro_steps, W)) for rank in range(W))


FLAT = ("gpt", "odd", "mixed", "lora")
ORDERS = ("experts", "caller", "again", "skipping")  # units in another order on each rank
SUMS = ("odd", "mixed")  # strides, dtypes, and parameters that some ranks have not used
# What the stages of oracle.py can take. Not "odd", "experts" and "skipping", in which ranks use
# different parameters or units; a weight of "odd" is not contiguous, either: see `Even`.
BY_HAND_TAKES = ("gpt", "even", "mixed", "lora", "caller", "again", "recomputed")


def names_of(modules):
    """Of a row."""
    return MODULES if modules == "all modules" else modules


def trains(W, wrapper, *modules, **options):
    """A row: these modules, or all, in a wrapper on W ranks."""
    return dict(W=W, wrapper=wrapper, modules=modules or "all modules", **options)


def full_table():
    for W in (1, 2, 3, 4):
        yield trains(W, "stage 1 by hand", *BY_HAND_TAKES, micro_steps=2, factor=None)
        for wrapper in ("stage 2 by hand", "stage 3 by hand"):
            yield trains(W, wrapper, *BY_HAND_TAKES, factor=None)
            yield trains(W, wrapper, *BY_HAND_TAKES, micro_steps=2, each_synced=True, factor=None)
        for wrapper in ("zero2", "zero3"):
            yield trains(W, wrapper, micro_steps=3, each_synced=True)
        for wrapper in STAGES:
            yield trains(W, wrapper, micro_steps=2, each_synced="announced")
        for wrapper in ("book ddp, 1 kB", *BOOK):
            yield trains(W, wrapper, *PLAIN)
            yield trains(W, wrapper, *PLAIN, factor=None)
            yield trains(W, wrapper, *PLAIN, micro_steps=3)
            if wrapper in ("book zero1", "book zero2", "book zero3"):
                yield trains(W, wrapper, *PLAIN, micro_steps=3, each_synced=True)
        for wrapper in ("naive", "ddp, 1 a bucket", "ddp, 1 kB", *STAGES):
            yield trains(W, wrapper)
            yield trains(W, wrapper, factor=None)
            yield trains(W, wrapper, micro_steps=4)


@check(trains(2, "book ddp, 1 kB", *PLAIN),
       trains(3, "book ddp, 1 kB", *PLAIN),
       trains(4, "book ddp, 1 kB", "plain", "gpt", micro_steps=3),
       trains(1, "book ddp", "plain", "gpt"),
       trains(1, "book zero3", *PLAIN),
       trains(2, "book zero1", *PLAIN, micro_steps=3),
       trains(3, "book zero1, 1 kB", *PLAIN),
       trains(4, "book zero1", *PLAIN, micro_steps=2, each_synced=True),
       trains(2, "book zero2", *PLAIN, micro_steps=3, each_synced=True),
       trains(3, "book zero2", *PLAIN),
       trains(4, "book zero2", "plain", "plain again", micro_steps=2),
       trains(2, "book zero3", *PLAIN, micro_steps=3, each_synced=True),
       trains(3, "book zero3", *PLAIN, micro_steps=2, each_synced=True),
       trains(4, "book zero3", *PLAIN),
       trains(3, "book zero3", *PLAIN, micro_steps=2),
       trains(3, "book ddp", *PLAIN, factor=None),
       trains(3, "book zero3", *PLAIN, factor=5),
       trains(2, "naive"),
       trains(2, "ddp, 1 kB"),
       trains(2, "zero1", *FLAT, micro_steps=2),
       trains(2, "zero2", *ORDERS),
       trains(2, "zero3"),
       trains(3, "ddp, 1 kB", "gpt", "odd", "lora"),
       trains(3, "zero1", "odd", "experts", "again"),
       trains(3, "zero2", "odd", "skipping"),
       trains(3, "zero3", *ORDERS),
       trains(4, "ddp, 1 a bucket", *SUMS),
       trains(4, "zero3", "experts", "skipping"),
       # A product with 1/3 or 1/5 rounds, before the sum.
       trains(3, "stage 1 by hand", "even", "mixed", factor=None),
       trains(3, "stage 2 by hand", "even", "lora", micro_steps=2, each_synced=True, factor=None),
       trains(2, "stage 3 by hand", "gpt", "caller", factor=None),
       trains(3, "zero1", *SUMS, factor=None),
       trains(3, "ddp, 1 kB", *SUMS, factor=None),
       trains(3, "naive", *SUMS, factor=5),
       trains(3, "zero3", *SUMS, factor=5),
       # A rank adds its own micro-steps first, in no_sync().
       trains(2, "ddp", "gpt", "odd", "lora", micro_steps=3, factor=None),
       trains(2, "zero3", "gpt", "odd", "lora", micro_steps=3, factor=None),
       trains(1, "zero1", "gpt", "odd", "lora", micro_steps=2),
       # All micro-steps are added in the order of one process.
       trains(1, "zero3", "gpt", "skipping", micro_steps=2, each_synced=True),
       trains(3, "zero2", "gpt", "skipping", micro_steps=2, each_synced=True),
       trains(2, "zero1", "odd", "experts", micro_steps=3, each_synced="announced"),
       trains(3, "zero2", "gpt", "odd", micro_steps=3, each_synced="announced"),
       trains(2, "zero3", "gpt", "again", micro_steps=2, each_synced="announced"),
       # A backward inside a forward.
       *(trains(2, wrapper, "inside") for wrapper in ("ddp, 1 kB", *STAGES)),
       *only_full(full_table()), limit_s=120)
def bits_of_one_process(wrapper, modules, **options):
    """DDP, in buckets of any size, each stage, and the oracles of oracle.py give the bits of one
    process, clipped, for each of these modules. In no_sync() a rank adds its own micro-steps first;
    otherwise stages add them as one process does, however they are dealt to ranks. factor: of
    set_gradient_divide_factor(), by default 1 here: gradients are sums, divided when clipped."""
    for name in names_of(modules):
        if name == "mixed" and "each_synced" in options:
            continue  # in bf16 one process rounds after each micro batch, W ranks less often
        compare(WRAPPERS[wrapper], name, f"{wrapper}, {name}", **options)


def compare(wrap, name, where, micro_steps=1, each_synced=False, factor=1, optimizer=None):
    """Train a module in one process and on these ranks, in a wrapper: all bits are the same."""
    groups = dealt(dist.get_world_size(), micro_steps, each_synced)
    expected, by_group, _ = reference(name, groups, factor or dist.get_world_size(), optimizer)
    kind = "micro batch" if each_synced else "rank"
    who = [f"{kind} {number}" for number in range(len(groups))]
    contributions = {what: dict(zip(who, by_group[what])) for what in by_group}
    with unwritten_is_nan():
        actual = distributed(wrap, name, micro_steps, each_synced, factor, optimizer=optimizer)
    same_bits(expected, actual, where, contributions)


@check(*grid(W=(2, 3), stage=(1, 2), modules=(("even", "mixed"),)),
       dict(W=2, stage=3, modules=("gpt", "again", "recomputed")),
       dict(W=3, stage=3, modules=("even", "lora", "caller")),
       *grid(W=(3,), stage=(1, 2, 3), modules=(("gpt", "recomputed", "plain lora"),),
             ours=("book zero",)),
       *only_full(grid(W=(1, 2, 3, 4), stage=(1, 2, 3), modules=(BY_HAND_TAKES,))))
def stages_are_the_oracles(stage, modules, ours="zero"):
    """Each stage ends on the bits of oracle.py's, also with two micro-steps. Not compared: modules
    that oracle.py cannot take, which are odd, experts and skipping."""
    for name in modules:
        for micro_steps in (1, 2):
            # Stage 1 adds a rank's own micro-steps first: Zero1 does so in no_sync().
            options = dict(micro_steps=micro_steps, each_synced=stage > 1)
            with unwritten_is_nan():
                expected = distributed(partial(ByHand, stage), name, **options)
                actual = distributed(WRAPPERS[f"{ours}{stage}"], name, **options)
            same_bits(expected, actual, f"{ours}{stage}, {name}, {micro_steps} micro-steps")


def two_forwards(model, loss):
    """What a script does in a step, in place of micro-steps: contrastive losses and GANs. Nothing
    may be freed in between."""
    (loss(0) + loss(2)).backward()


def torch_row(torchs, ours, *modules, **options):
    return dict(W=2, torchs=torchs, ours=ours, modules=modules or "all modules", **options)


@check(torch_row("torch ddp", "ddp", micro_steps=2, buffers=True),
       torch_row("torch ddp unsynced", "ddp unsynced", "mixed", buffers=True),
       torch_row("torch ddp", "ddp", "gpt", "odd", micro_steps=2, each_synced=True),
       torch_row("torch ddp", "zero3", "mixed", buffers=True),
       torch_row("torch ddp", "zero1", "gpt", "even", torch_optimizer=redundancy),
       torch_row("torch ddp", "book ddp, 1 kB", *PLAIN, micro_steps=2),
       torch_row("torch ddp", "book zero1", "gpt", "plain", torch_optimizer=redundancy),
       torch_row("fsdp2", "book zero2", "gpt", "plain lora"),
       torch_row("fsdp2", "book zero3", "gpt", "plain lora"),
       torch_row("fsdp2 bf16 uncast", "book zero1 bf16", "gpt"),
       torch_row("fsdp2 bf16 uncast", "book zero2 bf16", "gpt"),
       torch_row("fsdp2 bf16 uncast", "book zero3 bf16", "gpt"),
       torch_row("fsdp2", "zero2", "lora"),
       torch_row("fsdp2", "zero3", "gpt"),
       torch_row("fsdp2 bf16", "zero1 bf16", "gpt"),
       torch_row("fsdp2 bf16", "zero2 bf16", "gpt"),
       torch_row("fsdp2 bf16", "zero3 bf16", "gpt", odd_step=two_forwards),
       *only_full([torch_row("torch ddp", "zero1", "lora", "again", torch_optimizer=redundancy),
                   torch_row("fsdp2", "zero2", "gpt"),
                   torch_row("fsdp2", "zero3", "lora"),
                   torch_row("fsdp2 bf16", "zero3 bf16", "gpt"),
                   torch_row("fsdp2 bf16", "zero1 bf16", "gpt", odd_step=two_forwards)]))
def bits_of_torch(torchs, ours, modules, torch_optimizer=None, **options):
    """At W = 2 torch's DDP, ZeroRedundancyOptimizer and FSDP2 have the same bits: gradients, which
    are None, parameters, in DDP buffers; FSDP2 under its bf16 policy too, with two forwards before
    a backward."""
    for name in names_of(modules):
        expected = distributed(WRAPPERS[torchs], name, optimizer=torch_optimizer, **options)
        actual = distributed(WRAPPERS[ours], name, **options)
        same_bits(expected, actual, f"{ours}, {name}")


OF_TORCH = ("torch ddp", "fsdp2")


@check(*grid(W=(3, 4), modules=(("gpt", "plain lora"),)))
def close_to_torch(modules):
    """Gradients and parameters of three steps are those of torch's DDP and FSDP2 up to 1e-6, and
    1e-5 of their size: W - 1 sums round by 6e-8 of them each, and AdamW makes that larger."""
    largest = {}
    for name in modules:
        whose = *OF_TORCH, "ddp", "zero3", "book ddp", "book zero3"
        of_wrapper = {who: distributed(WRAPPERS[who], name) for who in whose}
        for one, other in itertools.combinations(of_wrapper, 2):
            part = part_of_tolerance(of_wrapper[one], of_wrapper[other], atol=1e-6, rtol=1e-5)
            assert part <= 1, f"{one} and {other}, {name}: {part:.2f} of the tolerance"
            largest[f"{one} and {other}"] = max(part, largest.get(f"{one} and {other}", 0))
    parts = [f"{who} {part:.2f}" for who, part in largest.items()]
    return f"largest difference, as a part of the tolerance: {', '.join(parts)}"


# -------------------------------------------------------------------------------------------------
# 8. formulas of bytes: what a rank receives, and what it holds


def formula_of_traffic(mode, micro_steps, still_whole=0):
    """What a rank sends, and receives, in a step, in units of (W - 1)/W psi elements, if the
    micro-steps of DDP and stage 1 are in no_sync() but the last, and stages know which is the last:
    ZeRO paper, arXiv 1910.02054, section 7.

    still_whole: the part of the parameters that stage 3 need not gather again in a backward, as it
    has kept them from the forward.
    """
    return {"ddp": 2, "zero1": 2, "zero2": micro_steps + 1,
            "zero3": micro_steps * (3 - still_whole)}[mode]


def formula_of_bytes(mode, W, param_bytes=4, reduce_bytes=4):
    """Bytes that a rank holds for each parameter of the model between a backward and a step: (of
    parameters, of gradients, of Adam), by the scheme of arXiv 1910.02054, figure 1.

    param_bytes, reduce_bytes: of a parameter in forward and backward, and of a gradient on its way.
    If these are not the 4 of a shard, parameters that are whole come on top of shards, and stage 1,
    too, keeps only its own part of the gradients.
    """
    shard = 4 / W
    if mode == "ddp":
        return 4, 4, 8
    parameters = shard if mode == "zero3" else param_bytes
    if mode != "zero3" and param_bytes != 4:
        parameters += shard
    gradients = 4 if mode == "zero1" and reduce_bytes == 4 else shard
    return parameters, gradients, 2 * shard


@check(*grid(W=(2,), wrapper=("ddp", *STAGES)), *grid(W=(3,), wrapper=("ddp", "zero3")),
       *only_full(grid(W=(3, 4), wrapper=("ddp", *STAGES))))
def traffic_is_the_formulas(wrapper):
    """A rank receives what its stage says: gradients once, parameters once, in stage 3 twice but
    for the root and the last two units; half the bytes in bf16; no gradients in no_sync(). In a
    step of n micro-steps stages 1 and 2 receive parameters once, if they know which is the last. In
    DDP gradients come twice, as contributions and as sums.

    All in the units of `formula_of_traffic`.
    """
    share = 1 - 1 / dist.get_world_size()
    n = 8
    # Or autograd saves no weight of the first unit.
    x = torch.ones(3, 48, device=device(), requires_grad=True)
    unit = 4 * 48 * 48  # bytes
    root = 4 * 4096
    psi = n * unit + root
    received = Counter()

    def note(operation, tensors):
        part = part_of_others(operation)
        received[operation] += part * tensors[0].nbytes / share / psi

    def assert_received(expected, act, **options):
        model = WRAPPERS[wrapper](Chain(n, 48).to(device()), **options)
        act(model, x)  # makes buffers
        received.clear()
        with every_collective(note):
            act(model, x)
        total = received.total()
        assert abs(total - expected) <= 0.02, (  # what ranks agree on are some integers
            f"{act.__name__} {options}: a rank receives {total:.3f} (W - 1)/W psi elements, "
            f"expected are {expected:.3f}")

    # In stage 3 the backward gathers all again but what is still whole.
    still_whole = (2 * unit + root) / psi
    again = 1 - still_whole if wrapper == "zero3" else 0
    assert_received(formula_of_traffic(wrapper, 1, still_whole), one_step)
    if wrapper in ("ddp", "zero1"):
        assert_received(formula_of_traffic(wrapper, 4), four_of_which_one_is_synced)
    # After a backward in no_sync() no step is due, and stages 1 and 2 have the parameters already.
    assert_received(1 + again if wrapper == "zero3" else 0, unsynced_step)
    assert_received(0 if wrapper == "ddp" else 1, evaluation)
    if wrapper in STAGES:
        assert_received((root + unit) / psi, one_unit)
        assert_received(4 * (2 + again), four_micro_steps)
        # Stages 1 and 2 gather nothing between micro-steps if they know that no step comes. (Here
        # stage 1 reduces in all of them, as stage 2 does.)
        as_stage = "zero2" if wrapper == "zero1" else wrapper
        assert_received(formula_of_traffic(as_stage, 4, still_whole), four_announced)
        bf16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        assert_received((2 + again) / 2, one_step, **bf16)


@check(*grid(W=(2, 3), wrapper=BOOK, micro_steps=(1, 3)),
       *only_full(grid(W=(4,), wrapper=BOOK, micro_steps=(1, 3))))
def traffic_of_the_book(wrapper, micro_steps):
    """A step of ddp.py and zero.py receives what the formulas say. The stages gather after a step
    alone. Evaluation is free but in stage 3."""
    mode = wrapper.removeprefix("book ")
    W, n = dist.get_world_size(), 8
    model = WRAPPERS[wrapper](Chain(n, 48).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root, unit = 4096, 48 * 48
    psi = n * unit + root
    received = []

    def note(operation, tensors):
        received.append(part_of_others(operation) * tensors[0].numel() / (1 - 1 / W) / psi)

    x = torch.ones(3, 48, device=device(), requires_grad=True)
    for step in range(2):  # the first one agrees on the order
        received.clear()
        with every_collective(note):
            accumulate(model, lambda _: model(x), micro_steps, mode in ("zero2", "zero3"))
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                continue
            total = sum(received)
            # Stages gather what the step before has changed when a forward begins.
            expected = formula_of_traffic(mode, micro_steps, still_whole=(2 * unit + root) / psi)
            assert abs(total - expected) <= 0.02, f"{total:.3f}, expected {expected:.3f}"
            received.clear()
            with torch.no_grad():
                model(x)
                received.clear()
                model(x)
    assert abs(sum(received) - (mode == "zero3")) <= 0.02, f"evaluation: {sum(received):.3f}"


@check(dict(W=1024, stage="zero3"), *only_full([dict(W=1024, stage="zero2")]),
       *grid(W=(2,), stage=STAGES),
       dict(W=4, stage="zero3", shard_size=2), dict(W=2, stage="zero3", recomputed=True),
       *grid(W=(2,), stage=("zero1", "zero2"), reduce_dtype=(torch.bfloat16,)),
       *grid(W=(2,), stage=("book zero1", "book zero2", "book zero3")),
       *grid(W=(4, 1024), stage=("book zero3",)),
       *only_full(grid(W=(4,), stage=("book zero1", "book zero2", "book zero3"))),
       *only_full(grid(W=(2,), stage=STAGES, param_dtype=(torch.bfloat16,))))
def memory_is_the_formulas(stage, shard_size=None, recomputed=False, param_dtype=None,
                           reduce_dtype=None):
    """After construction and after a step a rank holds what the paper's formula says, at 1024 ranks
    too; inside forward and backward, also a recomputed one, a few units more, and nothing when all
    is over. In stage 1 means of another dtype than the gradients take these gradients' place.

    The formula is `formula_of_bytes`: in fp32 with Adam 8 psi + 8 psi/W, 4 psi + 12 psi/W,
    16 psi/W. What is found above it is kept twice, gathered too early, or held by a reference left
    over.
    """
    W = shard_size or dist.get_world_size()
    n = 12
    width = 64
    unit = 4 * width * width  # bytes, as the root's
    psi = (n + 1) * unit
    before = live_bytes()
    bytes_at = {}  # {phase: bytes held}

    def note(phase, *_):
        bytes_at[phase] = live_bytes() - before

    module = Chain(n, width, recomputed).to(device())
    options = {}
    if stage in STAGES:
        options = dict(shard_size=shard_size, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = WRAPPERS[stage](module, **options)
    is_book = stage in BOOK
    stage = stage.removeprefix("book ")
    x = torch.ones(1, width, device=device())
    note("built")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(2):
        if step == 1:
            middle = model.module.units[n // 2]
            middle.register_forward_hook(partial(note, "forward"))
            middle.register_full_backward_hook(partial(note, "backward"))
        model(x).backward()
        optimizer.step()
        note("step")
        model.zero_grad()
    sizes = [(dtype or torch.float).itemsize for dtype in (param_dtype, reduce_dtype)]
    bytes_each = formula_of_bytes(stage, W, *sizes)
    parameters, gradients, adam = [psi / 4 * n_bytes for n_bytes in bytes_each]
    keeps_gradients = gradients == psi
    held = parameters + gradients + adam
    # Means that have memory of their own come in the backward, and zero_grad() drops them: none are
    # there in the forward, and half of them in the middle of the backward. (So it is of the book's
    # stage 1, too, which frees what zero_grad() has emptied.) Units more: in stage 3 two whole ones
    # and the root. In the backward the gradients of a unit that wait for the last of theirs, and
    # what of the unit before arrives from other ranks, also of other groups; and in stages 2 and 3
    # that unit's own. A forward that is recomputed is in the backward, after the root's gradients.
    # Adam's counters and activations are small.
    without_means = held if keeps_gradients and not is_book else held - gradients
    with_half = (without_means + held) / 2
    whole = 3 if stage == "zero3" else 0
    arrives = (W - 1) / W
    on_the_way = 1 + arrives if keeps_gradients else 2 + 2 * arrives
    of_other_groups = 2 / W if shard_size else 0
    in_forward = without_means + (whole + 0.3) * unit
    if recomputed:
        in_forward = with_half + (whole + 2 + arrives) * unit
    in_backward = with_half + (whole + on_the_way + of_other_groups + 0.3) * unit
    expected = {"built": (parameters, parameters + 0.03 * unit),
                "forward": (without_means, in_forward), "backward": (without_means, in_backward),
                "step": (held, held + 0.03 * unit)}
    for phase, (least, most) in expected.items():
        assert 0.97 * least <= bytes_at[phase] <= most, (
            f"{phase}: {bytes_at[phase]:,} bytes, expected are {least:,.0f} to {most:,.0f}; a unit "
            f"has {unit:,}")
    model(x)  # without a backward, which would free what autograd has saved
    del module, model, optimizer, middle, x
    assert live_bytes() - before <= 4096, f"{live_bytes() - before} bytes are left"


@check(*grid(W=(2,), wrapper=BOOK, order=IN_ANOTHER_ORDER),
       *grid(W=(2,), wrapper=("ddp", *STAGES), order=IN_ANOTHER_ORDER),
       *only_full(grid(W=(3, 4), wrapper=("ddp", *STAGES), order=IN_ANOTHER_ORDER)))
def order_of_use(wrapper, order):
    """A module that is registered in another order than it is used in sends and holds what it does
    when registered in order, as the formulas say, and overlaps as much: all gradients but those of
    the first block come after that was launched. From the second step on, since the first shows the
    order of use."""
    W = dist.get_world_size()
    n, block = len(Registered.USE), Registered.WIDTH**2

    def wrap(module):
        if wrapper in ("ddp", "book ddp"):  # a bucket for each block
            return WRAPPERS[wrapper](module, bucket_cap_mb=4 * block / 2**20)
        return WRAPPERS[wrapper](module, units=module.units())

    in_order = second_step(wrap, Registered.USE)
    otherwise = second_step(wrap, IN_ANOTHER_ORDER[order])
    received, messages, overlapped, after_step, backward = otherwise
    # The embedding belongs to the root, which stays whole, as the last two blocks.
    mode = wrapper.removeprefix("book ")
    elements = formula_of_traffic(mode, 1, still_whole=3 / n) * (1 - 1 / W) * n * block
    assert 0 <= received - elements <= 16 * n, (  # what ranks agree on are some integers
        f"a rank receives {received} elements, expected are {elements:.0f}")
    assert overlapped == 1 - 1 / n, f"{overlapped:.2f} of the gradients come after the first launch"
    assert otherwise[:3] == in_order[:3], (
        f"(elements, messages, overlapped): {otherwise[:3]}, registered in order {in_order[:3]}")
    held = n * block * sum(formula_of_bytes(mode, W))
    # As in `memory_is_the_formulas`.
    whole = 3 if mode == "zero3" else 0
    keeps_gradients = mode in ("ddp", "zero1")
    more = whole + (1 if keeps_gradients else 2 + 2 * (W - 1) / W) + 0.3
    assert 0.97 * held <= after_step <= 1.03 * held, f"{after_step} bytes, expected are {held:.0f}"
    assert backward <= held + 4 * more * block, (
        f"{backward} bytes in a backward, expected are at most {more:.1f} blocks above {held:.0f}")


PROOF = {claim: [globals()[name] for name in names] for claim, names in CLAIMS.items()}


# -------------------------------------------------------------------------------------------------
# 9. the proof, your module, or your own data parallelism: tests/judge.py has these two


def parts_of(options, parser):
    """{claim: rows} of the proof, or of a user's file, which is tried out before, and what is said
    of a file that cannot be."""
    file = options.wrapper if options.module is None else options.module
    if file is None:
        return {claim: [row for function in checks for row in rows_of(function, options.full)]
                for claim, checks in PROOF.items()}
    if options.module is not None and options.wrapper is not None:
        parser.exit(2, "verify.py: --module and --wrapper are two questions: ask one of them\n")
    from tests.judge import rows_of_module, rows_of_wrapper  # which has much from here

    rows_of_file = rows_of_wrapper if options.module is None else rows_of_module
    try:
        return rows_of_file(str(pathlib.Path(file).resolve()), options.device)
    except Failure as failure:
        fact = str(failure).removeprefix("rank 0: ").splitlines()[0]
        parser.exit(2, f"verify.py: {file}: {fact[:500]}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="only rows whose name has NAME in it, such as 'one_process W=2 zero3'")
    parser.add_argument("--full", action="store_true", help="all rows, not samples")
    parser.add_argument("--list", action="store_true", help="list claims, checks, names of rows")
    parser.add_argument("--module", metavar="FILE", help="compare all wrappers of its module()")
    parser.add_argument("--wrapper", metavar="FILE", help="judge what its wrap(module) returns")
    parser.add_argument("--device", metavar="KIND", default="cpu",
                        help="cpu, or an accelerator, such as cuda: ranks share it [cpu]")
    options = parser.parse_args()
    # On a CPU nobody asks for accelerators: that takes a second where there is one.
    kinds = ["cpu"] if options.device == "cpu" else oracle.kinds_of_devices()
    if options.device not in kinds:
        parser.exit(2, f"verify.py: --device {options.device} is not on this machine: choose "
                       f"{' or '.join(kinds)}\n")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all, not the row that is under way
    parts = chosen(parts_of(options, parser), options.names)
    if not parts:
        more = ""
        if options.module is None and options.wrapper is None:
            more = (", some rows run with --full only, and `python -m pytest -k NAME` runs what is "
                    "in tests/")
        parser.exit(2, f"verify.py: no row has a name with {' or '.join(options.names)}: --list "
                       f"shows names{more}\n")
    if options.list:
        print_names(parts)
        return 0
    outcomes = PROVED if options.wrapper is None else JUDGED
    n_bad = run_parts(parts, options.device, outcomes)
    return 1 if n_bad else 0


if __name__ == "__main__":
    # Processes find these functions in the module verify, which their server has loaded. With
    # __file__ here they would run this file as their own main, which takes half a second each.
    from verify import main
    del __file__
    sys.exit(main())

"""The test suite: how we know that it is right.

    python verify.py                 # all checks, samples of their rows; exit status 1 on a failure
    python verify.py proof           # sections 1 to 4 of this file, half a minute
    python verify.py scripts readme  # rows whose name contains "scripts" or "readme"
    python verify.py "one_process W=2 zero3"
    python verify.py --full          # all rows
    python verify.py --list
    python verify.py --module own.py # your module, wrapped in everything: see `Task`

The proof: `reference` trains a module in one process, in a plain loop that uses nothing of ddp.py
and zero.py. `distributed` trains it on W ranks, in a wrapper. `same_bits` compares every gradient
of every step, in its place, and the parameters at the end: all bits. This is done for eight
difficult modules, all wrappers and several world sizes: in samples, all of them with --full. After
that come the formulas of the ZeRO paper: how many bytes a rank holds, and how many it receives.

The rest is the quality of a product: what scripts do around a wrapper, runs of train.py in which
ranks are killed, hang or join, files, mistakes of users, the README. The frame, which runs checks
on ranks, is at the end.

It knows the public API, the command line and the files of a run, so every other file can be
rewritten without a change here. Faults are planted in torch and the operating system:
`AdamW.step` raises, a loss is nan, a disk is full.

A check is a function that all ranks of a group run at once, as training does. It asserts. A row of
it is the world size W and the arguments. (pytest would need a plugin for ranks.) Three rows run at
once. A row that hangs, or whose rank dies, fails by name in time, and the rest runs.

Cost: 22 processes of 210 MB, most of it shared; about three minutes on two cores.
"""

import argparse
import copy
import dataclasses
import datetime
import functools
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing.forkserver
import os
import pathlib
import pkgutil
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter, defaultdict
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, reduce
from unittest import mock


def fork_server():
    """Starts processes in 0.02 s, in which all that checks and train.py import is loaded.

    Also what torch imports only when it is used: the parts of torch.compile take 2.5 s, here once
    and not once on every rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        "verify", "torch._dynamo", "torch.distributed.checkpoint", "tiktoken", "regex",
        "numpy.ma", "functorch.compile", "torch.distributed.fsdp.sharded_grad_scaler"])
    return context


if __name__ == "__main__":
    # For all processes: CPU only, one thread a rank, no warnings of torch's.
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                      TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore",
                      PYTHONPATH=os.pathsep.join(sys.path))
    fork_server()
    multiprocessing.forkserver.ensure_running()  # it loads torch while this process does

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import ddp
import oracle
import zero
from ddp import DDP, HierarchicalState, PlainDDP
from model import GPT, GPTConfig, PRESETS
from oracle import average_gradients
from trainer.comm_hooks import TopKState, hierarchical_hook, top_k_hook
from zero import PlainZero1, PlainZero2, PlainZero3, Zero1, Zero2, Zero3, find_units

HERE = pathlib.Path(__file__).resolve().parent
STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


def check(*rows, limit_s=60):
    """Mark a function as a check. It runs once for each row, a dict of W, the world size, and of
    the function's arguments. W = 0: not on ranks, but in the process of verify.py; what it starts
    has limits of its own. A check that cannot run returns the reason, and counts as skipped."""
    def mark(function):
        function.rows, function.limit_s = rows, limit_s
        return function

    return mark


def grid(**axes):
    """All combinations, a dict each: grid(W=(1, 2), clip=(0.1,)) has two."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def only_full(rows):
    """These rows run with --full only."""
    return [dict(row, only_full=True) for row in rows]


# -------------------------------------------------------------------------------------------------
# 1. the reference: one process, a plain loop

STEPS = 3  # what a step leaves behind shows in the next ones
MAX_NORM = 0.05  # less than most norms


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


def clip_by_hand(gradients, divide_by):
    """Divide sums, and clip the result to MAX_NORM, by one product, whose factor is computed in
    float64 and rounded to fp32 once. Return the norm after the division."""
    squares = [gradient.double().square().sum() for gradient in gradients]
    norm = torch.stack(squares).sum().sqrt() / divide_by
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / divide_by
    for gradient in gradients:
        gradient.mul_(factor.float())
    return norm


class Lamb(torch.optim.Optimizer):
    """You et al., arXiv 1904.00962: a step is as long as the norm of all of a parameter says."""

    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=1e-2))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    change = mean + 0.1 * p
                    ratio = p.norm() / (change.norm() + 1e-6)
                    p.sub_(group["lr"] * ratio * change)


def muon_and_adamw(parameters):
    """Muon for the matrices, AdamW for the rest."""
    matrices, others = [], []
    for p in parameters:
        group = matrices if p.dim() == 2 else others
        group.append(p)
    return [torch.optim.Muon(matrices, lr=1e-2), adamw(others)]


def make_optimizers(task, optimizer, parameters):
    """[optimizers] of a task, or those that OPTIMIZERS has under a name: a function returns one, or
    a list."""
    make = OPTIMIZERS[optimizer] if optimizer else task.optimizer
    made = make(p for p in parameters if p.requires_grad)
    return made if isinstance(made, list) else [made]


@functools.cache  # several wrappers are compared with it
def reference(name, groups, factor, optimizer=None):
    """Train a module of the zoo -> ({what: tensor}, {what: [what each group has added to it]}).

    groups: the numbers of a step's micro batches, such as ((0, 2), (1, 3)): those that a rank adds
    by itself are a group. Its gradient is their sum, as autograd accumulates it. The gradients of
    groups are multiplied by 1 / factor, then added in this order, 16-bit ones in fp32. One product
    makes the mean over micro batches of that, and clips it. optimizer: as of `distributed`.
    """
    module = fresh(name)
    task = task_of(name)
    optimizers = make_optimizers(task, optimizer, module.parameters())
    divide_by = sum(len(numbers) for numbers in groups) / factor  # what is left to divide by
    expected = {}
    contributions = {}
    for step in range(STEPS):
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
        norm = clip_by_hand(gradients, divide_by)
        assert norm > 0, f"{name}: all gradients are zero, so nothing is compared"
        expected[f"step {step + 1}, norm"] = norm.float()
        for each in optimizers:
            each.step()
    for n, p in module.named_parameters():
        expected[f"in the end, {n}"] = p.detach()
    return expected, contributions


# -------------------------------------------------------------------------------------------------
# 2. the same on W ranks, in a wrapper


def distributed(wrapper, name, micro_steps=1, each_synced=False, factor=None, odd_step=None,
                optimizer=None, buffers=False):
    """Train a module of the zoo on the ranks of this group -> {what: tensor}, as `reference`.

    micro_steps: micro batches of a rank in a step; the a-th has the number a W + rank.
    each_synced: whether each of them is sent at once. Otherwise all but the last are in no_sync(),
    by which a rank adds its own first. "announced": yes, and a stage is told which is the last.
    factor: of set_gradient_divide_factor(); None: not called, so that it is W.
    odd_step: what a script does in a step, in place of micro-steps: odd_step(model, loss).
    optimizer: one of OPTIMIZERS; None: that of the module, which is AdamW.
    buffers: whether the module's buffers count, which differ from rank to rank.
    """
    task = task_of(name)
    model = wrapped(wrapper, name)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optimizers = make_optimizers(task, optimizer, model.parameters())
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
        assert_owners(model)
        norms[f"step {step + 1}, norm"] = clip(model, divide_by).float()
        for each in optimizers:
            each.step()
        model.zero_grad()  # not the optimizer's, which may have only some parameters
    found = put_together(model, fresh(name), kept) | norms
    whole = model.full_parameters() if is_ours(model) else plain_names(model.named_parameters())
    for n, p in whole:
        found[f"in the end, {n}"] = copy_of(p)
    if buffers:
        found |= dict(plain_names(model.named_buffers()))
    return found


def wrapped(wrapper, name):
    """A module of the zoo in a wrapper, which has to begin with rank 0's values on all ranks."""
    module = fresh(name)
    if dist.get_rank() > 0 and not wrapper.startswith(("naive", "fsdp2")):
        for t in itertools.chain(module.parameters(), module.buffers()):
            t.data.fill_(7)
    task = task_of(name)
    options = {}
    if task.units is not None and wrapper in (*STAGES, *BY_HAND, "fsdp2"):
        options["units"] = task.units(module)
    if task.uncut is not None and wrapper in STAGES:
        return uncut(STAGES[wrapper], module, task.uncut(module), **options)
    return WRAPPERS[wrapper](module, **options)


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
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
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
        in_memory_order = part.double().as_strided((part.numel(),), (1,)).numpy()
        own[what] = name, starts[name], part.dtype, in_memory_order
    of_ranks = gather(own, group)
    found = {}
    for what in sorted(set().union(*of_ranks)):
        holders = [rank for rank, of_rank in enumerate(of_ranks) if what in of_rank]
        name, _, dtype, _ = of_ranks[holders[0]][what]
        n_holders = 1 if name in getattr(model, "uncut", ()) else len(of_ranks)
        assert len(holders) == n_holders, f"{what}: ranks {holders} have one"
        p = parameters[name]
        flat = torch.full((p.numel(),), math.nan, dtype=dtype)
        n_parts = 0
        for rank in holders:
            _, start, _, part = of_ranks[rank][what]
            flat[start:start + len(part)] = torch.from_numpy(part)
            n_parts += len(part)
        assert n_parts == p.numel(), f"{what}: {p.numel()} elements, its shards have {n_parts}"
        strides = torch.empty(p.shape).stride() if isinstance(model, ByHand) else p.stride()
        found[what] = flat.as_strided(p.shape, strides)
    return found


def assert_owners(model):
    """Assert that of an uncut parameter one rank has a shard, in the parameter's shape, and that
    `.grad` is None on the others."""
    if not hasattr(model, "uncut"):
        return
    shapes = {n: p.shape for n, p in model.module.named_parameters()}
    for n, shard in model.named_parameters():
        if n in model.uncut:
            owners = gather(shard.shape == shapes[n] and shard.numel() > 0, model.shard_group)
            assert sum(owners) == (shapes[n].numel() > 0), f"{n} has owners {owners}"
            is_elsewhere = shapes[n].numel() > 0 and not owners[dist.get_rank(model.shard_group)]
            assert not is_elsewhere or shard.grad is None, f"{n} has a gradient on no owner"


# -------------------------------------------------------------------------------------------------
# 3. the same bits, and what it looks like where they are not


def same_bits(expected, found, where="", contributions=()):
    """Assert that two {what: tensor} have the same keys, shapes, dtypes and bits, and say of the
    first tensor that differs what it looks like. The first in the order of training: a gradient
    says more than the parameters that it changes, as Adam divides by its size.

    contributions: {what: {who: what a rank has added to it}}, where that is known.
    """
    wrong = [what for what in found if what not in expected]
    assert not wrong, f"{where}: {wrong[0]}: there should be none"
    for what, right in expected.items():
        if what not in found or not is_same(found[what], right):
            wrong.append(what)
    if wrong:
        fact = "is missing"
        if wrong[0] in found:
            fact = difference(wrong[0], expected, found[wrong[0]], contributions)
        raise AssertionError(f"{where}: {len(wrong)} of {len(expected)} tensors differ; the first, "
                             f"{wrong[0]}, {fact}")


def is_same(a, b):
    """All bits: also the sign of zero, which torch.equal does not see. It shows where zeros are
    added up."""
    is_alike = a.shape == b.shape and a.dtype == b.dtype
    return is_alike and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def difference(what, expected, found, contributions=()):
    """How a tensor differs from the one that is expected, and the mistake that looks like it."""
    right = expected[what]
    if found.shape != right.shape or found.dtype != right.dtype:
        return (f"is {tuple(found.shape)} {found.dtype}, expected is {tuple(right.shape)} "
                f"{right.dtype}")
    is_alike = partial(torch.allclose, rtol=0.02 if right.dtype.itemsize == 2 else 1e-4, atol=1e-9)
    found = found.double()
    right = right.double()
    if found.isnan().any():
        return "has nan: it was read before it was there, or never written?"
    ratio = (found.norm() / right.norm()).item()
    fact = f"has norm {ratio:.4f} x expected, largest difference {(found - right).abs().max():.2g}"
    for text, suspect in suspects(what, expected, found, ratio, contributions):
        if is_alike(found, suspect.double()):
            return f"{fact}: {text}"
    if is_alike(found.flatten().sort().values, right.flatten().sort().values):
        return f"{fact}: the right values are in wrong places"
    return fact


def suspects(what, expected, found, ratio, contributions):
    """Pairs: what a mistake looks like, and the tensor that it makes."""
    right = expected[what].double()
    zero = torch.zeros_like(right)
    yield "rounded in another way: added in another order, or multiplied once more?", right
    yield "zero where it should not be", zero
    if right.numel() < 4:
        return  # too few to tell
    mistake = "added twice, or not divided?" if ratio > 1 else "divided twice?"
    yield f"all elements alike: {mistake}", ratio * right
    parts = contributions[what] if what in contributions else {}
    for who in parts:
        others = [part for other, part in parts.items() if other != who]
        yield f"as if {who} had not sent", sum(others, zero)
    for who, part in parts.items():
        yield f"as if only {who} had sent", part
    for other, t in expected.items():
        if other != what and t.shape == right.shape:
            t = t.double()
            yield f"it is {other}", t
            times = (found - right).flatten().dot(t.flatten()) / t.square().sum()
            yield f"{times:.3g} x {other} is added to it: not zeroed?", right + times * t


# -------------------------------------------------------------------------------------------------
# the zoo: modules as people have them
#
# forward(x, turn) returns a scalar. x is (3, 5). The turn is 0, 1 or 2 and differs from rank to
# rank; some modules use other parameters, or other units, in another turn. They are tiny, since
# what goes wrong goes wrong at any size, and buckets of 1 kB stand for those of 25 MB.


def small_gpt(**options):
    sizes = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
    return GPT(GPTConfig(**{**sizes, **options}))


class Tokens(nn.Module):
    """A GPT, whose embedding is its head: used first and last, and its gradient arrives twice.

    compiles: torch.compile of each block, by dynamo and autograd. (A C++ compiler is for --full.)
    options: of the GPT, such as activation_checkpointing.
    """

    def __init__(self, compiles=False, **options):
        super().__init__()
        self.gpt = small_gpt(**options)
        if compiles:
            for block in self.gpt.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager")

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


class Mixed(nn.Module):
    """Layers in fp32, fp64 and bf16, the first called again, and buffers that follow the batches of
    a rank. Each layer is a unit without submodules, so nothing but its own call gathers it.

    A bucket has one dtype, and gloo sums bf16 in bf16, where 256 + 1 = 256. A BatchNorm has other
    statistics on each rank, unless rank 0's are sent before every forward, as torch DDP does.
    """

    def __init__(self):
        super().__init__()
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for dtype in kinds)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x, turn):
        for i in (0, 1, 0, 2, 3):
            layer = self.layers[i]
            x = layer(x.to(layer.weight.dtype)).tanh()
        return self.norm(x).exp().mean()


class Block(nn.Module):
    """A residual layer: a frozen weight, a trained correction of rank one, a parameter not used.

    In LoRA most parameters are frozen, so they are in no bucket, but stage 3 still gathers them.
    """

    def __init__(self):
        super().__init__()
        self.base, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 1, bias=False), nn.Linear(1, 5)
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

    def __init__(self, *orders, at_once=0, tied=False, frozen=()):
        super().__init__()
        self.orders, self.at_once = orders, at_once
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 2)
        self.layers = nn.ModuleList(Block() for _ in range(4))
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
MODULES = tuple(ZOO)
ZOO["compiled"] = partial(Tokens, compiles=True)
ZOO["even"] = Even
ZOO["inside"] = Inside
ZOO["recomputed"] = partial(Tokens, activation_checkpointing=True)


def zoo_loss(model, step, number):
    """The loss of a micro batch, which is a function of the step and its number in it: however
    these are dealt to ranks and micro-steps, they are the same."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return model(torch.randn(3, 5, generator=generator), (step + number) % 3)


@dataclasses.dataclass
class Task:
    """What is trained. A file for --module has functions of these names, the last three if needed:
    module(), which builds it; loss(model, step, number) of a micro batch; optimizer(parameters),
    which returns one, or a list, and is given parameters in the order of module.parameters();
    units(model), for the stages and FSDP2; uncut(model), for the stages."""
    module: object
    loss: object
    optimizer: object = adamw
    units: object = None
    uncut: object = None


def task_of(name):
    """Of a module of the zoo, or of a file."""
    if name in ZOO:
        return Task(ZOO[name], zoo_loss)
    in_file = runpy.run_path(name)
    for needed in ("module", "loss"):
        if needed not in in_file:
            raise ValueError(f"the file has no function named {needed}")
    names = [field.name for field in dataclasses.fields(Task)]
    return Task(**{name: in_file[name] for name in names if name in in_file})


def fresh(name):
    torch.manual_seed(0)
    return task_of(name).module()


# -------------------------------------------------------------------------------------------------
# the table: modules x wrappers x world sizes


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
            oracle.gather_when_used(module, find_units(module) if units is None else units)

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
    if units is None:
        units = itertools.chain(*(m for m in module.modules() if isinstance(m, nn.ModuleList)))
    for m in (*units, module):
        mesh = dist.DeviceMesh("cpu", range(dist.get_world_size()))
        fully_shard(m, mesh=mesh, mp_policy=policy)
    return module


def bf16_hook(state, bucket):  # torch's DDP refuses the original by its name, except on NCCL
    return default_hooks.bf16_compress_hook(state, bucket)


def uncut(stage, module, parameters=None, **options):
    """A stage in which these parameters are not cut, or none is."""
    parameters = set(module.parameters() if parameters is None else parameters)
    model = stage(module, uncut=parameters, **options)
    # For `put_together` and `assert_owners`.
    model.uncut = {n for n, p in module.named_parameters() if p in parameters}
    return model


def no_state():
    return None


def one_node():
    return HierarchicalState(dist.get_world_size())


# name -> (a function that makes the hook's state, the hook)
HOOKS = {"bf16": (no_state, bf16_hook),
         "powersgd": (partial(powerSGD_hook.PowerSGDState, None, 2, 2, 0.5),
                      powerSGD_hook.powerSGD_hook),
         "topk": (partial(TopKState, 0.1), top_k_hook),
         "all": (partial(TopKState, 1.0), top_k_hook),
         "nodes of 2": (partial(HierarchicalState, 2), hierarchical_hook),
         "one node": (one_node, hierarchical_hook)}


def hooked(wrap, hook, module):
    model = wrap(module)
    make_state, hook = HOOKS[hook]
    model.register_comm_hook(make_state(), hook)
    return model


BF16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
our_ddp = partial(DDP, find_unused_parameters=True)
torch_ddp = partial(DistributedDataParallel, find_unused_parameters=True)
# Named as those with guards: ranks send each other the name, and bytes are compared.
plain_ddp = partial(type("DDP", (PlainDDP,), {}), find_unused_parameters=True)
PLAIN = {"ddp": plain_ddp, "ddp, 1 kB": partial(plain_ddp, bucket_cap_mb=0.001),
         "zero1": type("Zero1", (PlainZero1,), {}), "zero2": type("Zero2", (PlainZero2,), {}),
         "zero3": type("Zero3", (PlainZero3,), {})}
BY_HAND = {f"stage {stage} by hand": partial(ByHand, stage) for stage in (1, 2, 3)}
WRAPPERS = {
    "naive": Naive, **BY_HAND, "ddp": our_ddp, **STAGES,
    "torch ddp": torch_ddp, "fsdp2": fsdp2,
    "fsdp2 bf16": partial(fsdp2, policy=MixedPrecisionPolicy(*BF16.values())),
    "ddp, 1 a bucket": partial(our_ddp, bucket_cap_mb=1e-6),
    "ddp, 1 kB": partial(our_ddp, bucket_cap_mb=0.001),
    "ddp unsynced": partial(our_ddp, forward_sync_buffers=False),
    "torch ddp unsynced": partial(torch_ddp, forward_sync_buffers=False)}
for name, wrap in PLAIN.items():
    WRAPPERS[f"{name} without guards"] = wrap
for hook in HOOKS:
    WRAPPERS[f"ddp {hook}"] = partial(hooked, our_ddp, hook)
    WRAPPERS[f"torch ddp {hook}"] = partial(hooked, DistributedDataParallel, hook)
for name, stage in STAGES.items():
    WRAPPERS[f"{name} in ones"] = partial(stage, shard_size=1)
    WRAPPERS[f"{name} in twos"] = partial(stage, shard_size=2)
    WRAPPERS[f"{name} bf16"] = partial(stage, **BF16)
    WRAPPERS[f"{name} uncut"] = partial(uncut, stage)
    WRAPPERS[f"{name} uncut in twos"] = partial(uncut, stage, shard_size=2)
    WRAPPERS[f"{name} uncut bf16"] = partial(uncut, stage, **BF16)
OPTIMIZERS = {
    "foreach": partial(adamw, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "muon": muon_and_adamw, "lamb": Lamb,
    "adafactor": partial(torch.optim.Adafactor, foreach=False),
    "redundancy": partial(adamw, kind=ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)}


@contextmanager
def unwritten_is_nan():
    """New memory is full of nan, which torch does where only deterministic algorithms are allowed:
    so whoever reads what was never written has nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def dealt(W, micro_steps, each_synced):
    """The groups of micro batches that W ranks add by themselves, as `reference` takes them. If
    each micro-step is sent at once, nothing is added before: each micro batch is a group."""
    if each_synced:
        return tuple((number,) for number in range(W * micro_steps))
    return tuple(tuple(range(rank, W * micro_steps, W)) for rank in range(W))


FLAT = ("gpt", "odd", "mixed", "lora")
FLAT_FP32 = ("gpt", "odd", "lora")
ORDERS = ("experts", "caller", "again", "skipping")  # units in another order on each rank
SUMS = ("odd", "mixed")  # strides, dtypes, and parameters that some ranks have not used
# What the stages of oracle.py can take. Not "odd", "experts" and "skipping", in which ranks use
# different parameters or units; a weight of "odd" is not contiguous, either: see `Even`. And not
# what is frozen inside a checkpoint.
BY_HAND_TAKES = ("gpt", "even", "mixed", "lora", "caller", "again", "recomputed")


def trains(W, wrapper, *modules, **options):
    """A row: these modules, or all, in a wrapper on W ranks."""
    return dict(W=W, wrapper=wrapper, modules=modules or MODULES, **options)


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
        for wrapper in ("naive", "ddp, 1 a bucket", "ddp, 1 kB", *STAGES):
            yield trains(W, wrapper)
            yield trains(W, wrapper, factor=None)
            yield trains(W, wrapper, micro_steps=4)
        for stage in STAGES:
            yield trains(W, f"{stage} uncut", micro_steps=2, factor=None)
            yield trains(W, f"{stage} uncut", *FLAT_FP32, *ORDERS, optimizer="muon")
            yield trains(W, f"{stage} uncut", *FLAT_FP32, *ORDERS, optimizer="lamb")
            yield trains(W, f"{stage} uncut", "gpt", *ORDERS, optimizer="adafactor")


@check(trains(2, "naive"),
       trains(2, "ddp, 1 kB"),
       trains(2, "zero1", *FLAT),
       trains(2, "zero2", *ORDERS),
       trains(2, "zero3"),
       trains(3, "ddp, 1 kB", "gpt", "odd", "lora"),
       trains(3, "zero1", "odd", "experts", "again"),
       trains(3, "zero2", "odd", "skipping"),
       trains(3, "zero3", *ORDERS),
       trains(2, "ddp all", *SUMS),
       trains(4, "ddp, 1 a bucket", *SUMS),
       trains(4, "zero3", "experts", "skipping"),
       # A product with 1/3 or 1/5 rounds, before the sum.
       trains(3, "stage 1 by hand", "even", "mixed", factor=None),
       trains(3, "stage 2 by hand", "even", "lora", factor=None),
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
       trains(3, "zero2 uncut", "odd", "lora", micro_steps=2, each_synced="announced",
              optimizer="muon"),
       # A backward inside a forward.
       *(trains(2, wrapper, "inside") for wrapper in ("ddp, 1 kB", *STAGES)),
       # Optimizers that look at whole parameters.
       trains(2, "zero3 uncut", "gpt", "odd", "again", optimizer="muon"),
       trains(3, "zero1 uncut", "odd", "skipping", optimizer="muon"),
       trains(4, "zero2 uncut", "gpt", "lora", optimizer="lamb"),
       trains(3, "zero3 uncut", "gpt", "experts", optimizer="adafactor"),
       trains(2, "zero2 uncut", "odd", "mixed", "caller"),
       trains(3, "zero3 uncut", "gpt", "odd", micro_steps=2, each_synced=True, optimizer="lamb"),
       trains(3, "zero1 uncut", "odd", "lora", micro_steps=2, factor=None, optimizer="muon"),
       *only_full(full_table()), limit_s=120)
def bits_of_one_process(wrapper, modules, micro_steps=1, each_synced=False, factor=1,
                        optimizer=None):
    """DDP, in buckets of any size, each stage, and the oracles of oracle.py give the bits
    of one process: any module, any number of ranks, accumulated in no_sync(), clipped. Stages 2 and
    3 do so however micro batches are dealt to ranks; with uncut parameters for Muon, Adafactor and
    LAMB, too. factor: of set_gradient_divide_factor()."""
    W = dist.get_world_size()
    groups = dealt(W, micro_steps, each_synced)
    kind = "micro batch" if each_synced else "rank"
    who = [f"{kind} {number}" for number in range(len(groups))]
    for name in modules:
        if name == "mixed" and each_synced:
            continue  # a 16-bit sum is rounded after each micro-step, that of ranks only once
        expected, by_group = reference(name, groups, factor or W, optimizer)
        contributions = {what: dict(zip(who, by_group[what])) for what in by_group}
        with unwritten_is_nan():
            found = distributed(wrapper, name, micro_steps, each_synced, factor,
                                optimizer=optimizer)
        same_bits(expected, found, f"{wrapper}, {name}", contributions)


@check(*grid(W=(2, 3), stage=(1, 2), modules=(("even", "mixed"),)),
       dict(W=2, stage=3, modules=("gpt", "again", "recomputed")),
       dict(W=3, stage=3, modules=("even", "lora", "caller")),
       *only_full(grid(W=(1, 2, 3, 4), stage=(1, 2, 3), modules=(BY_HAND_TAKES,))))
def stages_are_the_oracles(stage, modules):
    """Each stage ends on the bits of oracle.py's, also with two micro-steps. Not compared: modules
    that oracle.py cannot take, which are odd, experts and skipping."""
    for name in modules:
        for micro_steps in (1, 2):
            # Stage 1 adds a rank's own micro-steps first: Zero1 does so in no_sync().
            options = dict(micro_steps=micro_steps, each_synced=stage > 1)
            with unwritten_is_nan():
                expected = distributed(f"stage {stage} by hand", name, **options)
            found = distributed(f"zero{stage}", name, **options)
            same_bits(expected, found, f"zero{stage}, {name}, {micro_steps} micro-steps")


@check(*grid(W=(1, 2, 3)), *only_full(grid(W=(4,))))
def oracle_has_one_hash():
    """`python oracle.py` prints one hash for all modes if a step has one micro-step; two if it has
    two, for `ddp` and 1, and for `single`, 2 and 3; and bytes and elements as the paper has them,
    beside the nan of each parameter."""
    W = dist.get_world_size()
    share = (W - 1) / W
    psi = sum(p.numel() for p in oracle.Model().parameters())
    n_parameters = len(list(oracle.Model().parameters()))
    for micro_steps in (1, 2):
        hashes = {}
        for mode in oracle.MODES:
            hashes[mode], held, sent = oracle.train(mode, micro_steps)
            parameters, gradients, adam = [n_bytes / 4 for n_bytes in held]
            whole = dict.fromkeys(oracle.MODES, (psi, psi, 2 * psi))
            whole["1"] = psi, psi, 2 * psi / W
            whole["2"] = psi, psi / W, 2 * psi / W
            whole["3"] = psi / W + n_parameters, psi / W, 2 * psi / W
            for found, expected in zip((parameters, gradients, adam), whole[mode]):
                rounded = 2 * n_parameters  # a piece may have one element more than another
                assert abs(found - expected) <= rounded, f"{mode}: {held} bytes, expected {whole}"
            least = dict(single=0, ddp=2, **{"1": 2, "2": micro_steps + 1, "3": 2 * micro_steps})
            n_sent = sum(gather(sent)) / W
            if mode == "3":  # and what the backward needs again
                assert share * psi * least[mode] <= n_sent <= share * psi * 3 * micro_steps, n_sent
            else:
                assert abs(n_sent - share * psi * least[mode]) < 0.5, f"{mode} sends {n_sent}"
        assert hashes["single"] == hashes["2"] == hashes["3"], hashes
        assert hashes["ddp"] == hashes["1"], hashes
        assert (hashes["ddp"] == hashes["2"]) == (micro_steps == 1 or W == 1), hashes


def two_forwards(model, loss):
    """What a script does in a step, in place of micro-steps: contrastive losses and GANs. Nothing
    may be freed in between."""
    (loss(0) + loss(2)).backward()


def torch_row(torchs, ours, *modules, **options):
    return dict(W=2, torchs=torchs, ours=ours, modules=modules or MODULES, **options)


@check(torch_row("torch ddp", "ddp", micro_steps=2, buffers=True),
       torch_row("torch ddp unsynced", "ddp unsynced", "mixed", buffers=True),
       torch_row("torch ddp bf16", "ddp bf16", "gpt"),
       torch_row("torch ddp powersgd", "ddp powersgd", "gpt"),
       torch_row("torch ddp topk", "ddp topk", "gpt"),
       torch_row("torch ddp", "zero1", "gpt", "odd", torch_optimizer="redundancy"),
       torch_row("fsdp2", "zero2", "lora"),
       torch_row("fsdp2", "zero3", "gpt"),
       torch_row("fsdp2 bf16", "zero1 bf16", "gpt"),
       torch_row("fsdp2 bf16", "zero2 bf16", "gpt"),
       torch_row("fsdp2 bf16", "zero3 bf16", "gpt", odd_step=two_forwards),
       *only_full([torch_row("torch ddp", "zero1", "lora", "again", torch_optimizer="redundancy"),
                   torch_row("fsdp2", "zero2", "gpt"),
                   torch_row("fsdp2", "zero3", "lora"),
                   torch_row("fsdp2 bf16", "zero3 bf16", "gpt"),
                   torch_row("fsdp2 bf16", "zero1 bf16", "gpt", odd_step=two_forwards)]))
def bits_of_torch(torchs, ours, modules, torch_optimizer=None, **options):
    """At W = 2 torch's DDP, ZeroRedundancyOptimizer and FSDP2 have the same bits: gradients, which
    are None, parameters, in DDP buffers; FSDP2 under its bf16 policy too, with two forwards before
    a backward, and DDP with torch's comm hooks."""
    for name in modules:
        expected = distributed(torchs, name, optimizer=torch_optimizer, **options)
        found = distributed(ours, name, **options)
        same_bits(expected, found, f"{ours}, {name}")


OF_TORCH = ("torch ddp", "fsdp2")


@check(limit_s=600)
def own_module(wrapper, file):
    """For --module: the module of a file has the bits of one process in each of three steps."""
    is_torch = wrapper in OF_TORCH
    W = dist.get_world_size()
    factor = W if is_torch else 1
    expected, _ = reference(file, dealt(W, 1, each_synced=False), factor)
    found = distributed(wrapper, file, factor=None if is_torch else 1)
    same_bits(expected, found, wrapper)


# -------------------------------------------------------------------------------------------------
# 4. formulas of bytes: what a rank receives, and what it holds


class Chain(nn.Module):
    """n units of width x width, and a root of 64 numbers; recomputed: all units in one checkpoint.
    """

    def __init__(self, n, width, recomputed=False):
        super().__init__()
        self.recomputed = recomputed
        self.units = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))
        self.scale = nn.Parameter(torch.ones(64))

    def some(self, x, n):
        for unit in self.units[:n]:
            x = unit(x).tanh()
        return x

    def forward(self, x, n=99):
        if self.recomputed:
            x = checkpoint(self.some, x, n, use_reentrant=False)
        else:
            x = self.some(x, n)
        return x.square().mean() * self.scale.square().mean()


@check(*grid(W=(2,), wrapper=("ddp", *STAGES)), *grid(W=(3,), wrapper=("ddp", "zero3")),
       *only_full(grid(W=(3, 4), wrapper=("ddp", *STAGES))))
def traffic_is_the_formulas(wrapper):
    """A rank receives what its stage says: gradients once, parameters once, in stage 3 twice but
    for the root and the last two units; half the bytes in bf16; no gradients in no_sync(). In a
    step of n micro-steps stages 1 and 2 receive parameters once, if they know which is the last. In
    DDP gradients come twice, as contributions and as sums.

    In units of psi (W - 1) / W elements that is 2, and 3 less the units that are still whole when
    the backward begins: ZeRO paper, arXiv 1910.02054, section 7.
    """
    share = 1 - 1 / dist.get_world_size()
    n = 8
    x = torch.ones(3, 48)
    unit = 4 * 48 * 48  # bytes
    root = 4 * 64
    psi = n * unit + root
    received = Counter()

    def note(operation, tensors):
        received[operation] += tensors[0].nbytes / share / psi  # what is agreed on is small

    def assert_received(expected, what, **options):
        model = WRAPPERS[wrapper](Chain(n, 48), **options)
        for _ in range(2):  # in the first step buffers are made
            received.clear()
            with every_collective(note):
                if what == "evaluation":
                    with torch.no_grad():
                        model(x)
                elif "micro-steps" in what:
                    for micro_step in range(4):
                        if "known" in what:
                            model.set_is_last_backward(micro_step == 3)
                        model(x).backward()
                else:
                    with model.no_sync() if what == "no_sync" else nullcontext():
                        model(x).backward()
        found = received.total()
        assert abs(found - expected) <= 0.02, (
            f"{what} {options}: a rank receives {found:.3f} (W - 1)/W psi elements, expected are "
            f"{expected:.3f}")

    # In stage 3 the backward gathers all again but what is still whole.
    again = (n - 2) * unit / psi if wrapper == "zero3" else 0
    assert_received(2 + again, "a step")
    # After a backward in no_sync() no step is due, and stages 1 and 2 have the parameters already.
    assert_received(1 + again if wrapper == "zero3" else 0, "no_sync")
    assert_received(0 if wrapper == "ddp" else 1, "evaluation")
    if wrapper in STAGES:
        # Between micro-steps stages 1 and 2 gather nothing, if they know that no step comes.
        assert_received(4 * (2 + again), "4 micro-steps")
        known = 4 * (2 + again) if wrapper == "zero3" else 4 + 1
        assert_received(known, "4 micro-steps, the last one known")
    if wrapper != "ddp":
        assert_received((2 + again) / 2, "a step", param_dtype=torch.bfloat16,
                        reduce_dtype=torch.bfloat16)


@check(dict(W=1024, stage="zero3"), *only_full([dict(W=1024, stage="zero2")]),
       *grid(W=(2,), stage=STAGES),
       dict(W=4, stage="zero3", shard_size=2), dict(W=2, stage="zero3", recomputed=True),
       dict(W=2, stage="zero1", reduce_dtype=torch.bfloat16))
def memory_is_the_formulas(stage, shard_size=None, recomputed=False, reduce_dtype=None):
    """After construction, a backward and a step a rank holds what the paper's formula says, at 1024
    ranks too; inside forward and backward, also a recomputed one, a few units more, and nothing
    when all is over. In stage 1 means of another dtype than the gradients let these go.

    Bytes in fp32 with Adam: 8 psi + 8 psi/W, 4 psi + 12 psi/W, 16 psi/W (arXiv 1910.02054, figure
    1). What is found above it is kept twice, gathered too early, or held by a reference left over.
    """
    W = shard_size or dist.get_world_size()
    n = 12
    width = 64
    unit = 4 * width * width
    before = live_bytes()
    found = {}
    psi = n * unit + 4 * 64

    def note(phase, *_):
        found[phase] = live_bytes() - before

    model = STAGES[stage](Chain(n, width, recomputed), shard_size=shard_size,
                          reduce_dtype=reduce_dtype)
    note("built")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(2):
        if step == 1:
            middle = model.module.units[n // 2]
            middle.register_forward_hook(partial(note, "forward"))
            middle.register_full_backward_hook(partial(note, "backward"))
        model(torch.ones(1, width)).backward()
        optimizer.step()
        note("step")
        model.zero_grad()
    parameters = psi / W if stage == "zero3" else psi
    keeps_gradients = stage == "zero1" and reduce_dtype is None
    gradients = psi if keeps_gradients else psi / W
    held = parameters + gradients + 2 * psi / W
    # Units more: whole ones; two gradients, and what of each arrives from the other ranks.
    whole = 2 if stage == "zero3" else 0
    on_the_way = 1 if keeps_gradients else 2 + 2 * (W - 1) / W
    expected = {"built": (parameters, 1), "step": (held, 1), "forward": (held, 1 + whole),
                "backward": (held, whole + on_the_way)}
    for phase, (least, more) in expected.items():
        assert 0.97 * least <= found[phase] <= 1.01 * least + (more + 0.3) * unit, (
            f"{phase}: {found[phase]:,} bytes, expected are {least:,.0f}, and at most {more} units "
            f"of {unit:,} more")
    del model, optimizer, middle
    assert live_bytes() - before <= 4096, f"{live_bytes() - before} bytes are left"


def sizes_of_units(gpt, is_uncut):
    """[[bytes of an uncut parameter of a unit, ...], ...], the root first, then blocks."""
    of_block = {p: block for block in gpt.blocks for p in block.parameters()}
    units = []
    for unit in (None, *gpt.blocks):
        units.append([p.nbytes for p in gpt.parameters()
                      if of_block.get(p) is unit and is_uncut(p, unit)])
    return units


def uncut_chunks(units, W):
    """[[bytes of each rank's chunk of a unit, W numbers], ...]. The largest parameter of a unit
    goes first, each to the rank that has least of the whole model so far, the first such."""
    loads = [0] * W
    chunks = []
    for sizes in units:
        before = list(loads)
        for size in sorted(sizes, reverse=True):
            loads[loads.index(min(loads))] += size
        chunks.append([after - load for load, after in zip(before, loads)])
    return chunks


@check(*grid(W=(2, 3), stage=STAGES), *only_full(grid(W=(4,), stage=STAGES)))
def uncut_is_the_formulas(stage):
    """With uncut parameters a rank holds and receives, to the byte, what its chunks say: gradients
    W - 1 times its chunk, parameters all but its chunk. All ranks together receive as much as they
    do with equal chunks."""
    rank = dist.get_rank()
    W = dist.get_world_size()
    gpt = small_gpt(n_layer=4, n_embd=32, vocab_size=64)  # all sizes are multiples of 64 bytes
    chunks = uncut_chunks(sizes_of_units(gpt, lambda p, unit: True), W)
    idx = torch.zeros(1, 16, dtype=torch.int64)
    received = Counter()
    before = live_bytes()
    model = uncut(STAGES[stage], gpt)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def note(operation, tensors):
        received[operation] += tensors[0].nbytes

    for _ in range(2):  # in the first step buffers are made
        received.clear()
        with every_collective(note):
            _, loss = model(idx, idx)
            loss.backward()
            del loss
        optimizer.step()
        model.zero_grad(set_to_none=False)
    gathered = sum(sum(chunk) - chunk[rank] for chunk in chunks)
    if stage == "zero3":  # the backward gathers all again but the root and the last two blocks
        gathered += sum(sum(chunk) - chunk[rank] for chunk in chunks[1:-2])
    reduced = (W - 1) * sum(chunk[rank] for chunk in chunks)
    assert received["recv"] == gathered + reduced, (
        f"a rank receives {received['recv']:,} bytes, expected are {gathered + reduced:,}")
    psi = sum(map(sum, chunks))
    assert sum(gather(reduced)) == (W - 1) * psi, "not what equal chunks send"
    own = sum(chunk[rank] for chunk in chunks)
    whole = {"zero1": psi, "zero2": psi, "zero3": 0}[stage]  # parameters
    gradients = psi if stage == "zero1" else own
    # The module's own parameters were there before; those of stages 1 and 2 are in place of them.
    held = live_bytes() - before + psi
    expected = (whole or own) + gradients + 2 * own
    assert expected <= held <= expected + 8192, f"{held:,} bytes held, expected are {expected:,}"


@check(dict(W=3), dict(W=4))
def uneven_chunks_arrive_in_pieces():
    """reduce_scatter of uneven chunks has the bits of the plain sum, and of what arrives at the
    owner of the largest two pieces at most have memory."""
    rank = dist.get_rank()
    W = dist.get_world_size()
    n = 90_000
    cuts = [n - 7] * (W - 1)  # rank 0 has nearly all, the last one a little, the others nothing
    flats = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(W)]
    expected = reduce(torch.add, flats).tensor_split(cuts)[rank]
    most = 120_000  # bytes
    flat = flats[rank].clone()
    before = live_bytes()
    found = []

    def note(operation, tensors):
        if operation == "recv":
            found.append(live_bytes() - before)

    with every_collective(note):
        chunks = flat.tensor_split(cuts)
        finish = zero.reduce_in_pieces(chunks, most, None)
        finish(chunks[rank])
    same_bits({"own chunk": expected}, {"own chunk": flat.tensor_split(cuts)[rank]})
    if rank == 0:
        pieces = math.ceil(4 * (n - 7) * (W - 1) / most)
        assert len(found) == pieces * (W - 1), f"{len(found)} messages, expected {pieces} pieces"
        assert most < max(found) <= 2 * most + 4096, f"{max(found):,} bytes arrive at once"
    # A stage bounds them by the size of a bucket.
    sizes = [0]

    def note_size(operation, tensors):
        if operation == "recv":
            sizes.append(tensors[0].nbytes)

    with every_collective(note_size):
        matrix = nn.Linear(4096, 2048, bias=False)  # 32 MiB
        model = Zero2(matrix, uncut=matrix.parameters())
        loss = model(torch.ones(1, 4096)).sum()
        sizes = [0]  # no more those of the forward, in which a matrix comes once
        loss.backward()
    arrive = (W - 1) * max(sizes)
    assert arrive <= ddp.bucket_bytes(W), f"{arrive:,} bytes of a piece arrive"
    assert (arrive > 0) == (rank == 0), "the owner is another rank"


def uncut_costs(gpt, W):
    """With the matrices of blocks uncut: (the largest rank's shards over the mean, what the busiest
    rank sends of parameters over the mean, the most megabytes of gradients that arrive at once)."""
    units = sizes_of_units(gpt, lambda p, unit: unit is not None and p.dim() == 2)
    chunks = uncut_chunks(units, W)
    psi = sum(p.nbytes for p in gpt.parameters())
    cut = psi - sum(map(sum, chunks))
    largest = max(sum(chunk[rank] for chunk in chunks) for rank in range(W)) + cut / W
    busiest = sum(map(max, chunks)) + cut / W
    arrive = max((W - 1) * max(chunk) for chunk in chunks)
    return largest * W / psi, busiest * W / psi, min(arrive, 2 * ddp.bucket_bytes(W)) / 1e6


@check(dict(W=0))
def readme_says_what_uncut_costs():
    """The README's table of shards, links and arrivals is what the formulas say."""
    text = (HERE / "README.md").read_text("utf-8")
    for preset, sizes in PRESETS.items():
        if preset == "tiny":
            continue  # its vocabulary is another one
        gpt = on_meta(GPT, GPTConfig(vocab_size=50257, **sizes))
        cells = []
        for W in (2, 4, 8, 64):
            share, link, arrive = uncut_costs(gpt, W)
            cells.append(f"{share:.2f}, x{link:.2f}, {arrive:.0f} MB")
        row = f"| `{preset}` | {' | '.join(cells)} |"
        assert row in text, f"the README does not have {row}"


@check(dict(W=2))
def zero3_prefetches():
    """In stage 3 the all-gather of the next unit is under way while a unit computes, forward or
    backward. Seen without a clock, by the number of messages. Each kind has a tag of its own."""
    n = 8
    calls = []
    found = {}
    expected = {}
    model = Zero3(Chain(n, 8))
    tags = [model._reduce_tag, model._full_parameters_tag, *(unit.tag for unit in model._units)]
    assert len(set(tags)) == len(tags) == n + 3, f"messages share tags: {tags}"

    def note(phase, *_):
        found[phase] = len(calls)

    for i, unit in enumerate(model.module.units):
        unit.register_forward_pre_hook(partial(note, f"forward of unit {i}"))  # after ours
        unit.register_full_backward_hook(partial(note, f"backward of unit {i}"))
        # Forward of unit i: the root, the units 0 to i, and the next one. At its end the last two
        # are whole, so the backward gathers from the last but two on:
        #     backward of unit      7  6  5  4 ...
        #     next, not yet whole   -  5  4  3 ...
        expected[f"forward of unit {i}"] = 1 + min(i + 2, n)
        expected[f"backward of unit {i}"] = 1 + n + min(n - 1 - i, n - 2)
    with every_collective(lambda *call: calls.append(call)), model.no_sync():
        model(torch.ones(3, 8, requires_grad=True)).backward()
    for phase, number in expected.items():
        assert found[phase] == number, (
            f"in the {phase} {found[phase]} all-gathers have begun, expected are {number}")


@check(*grid(W=(2, 3)))
def ddp_keeps_one_gradient():
    """`.grad` is a view of a bucket, in every step the same memory; gradients take the bytes of the
    parameters and not more; a dropped wrapper and its module leave nothing."""
    before = live_bytes()
    module = fresh("odd")
    model = our_ddp(module, bucket_cap_mb=0.005)
    n_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    places = []  # {address: bytes} of a step
    for step in range(4):
        with model.no_sync() if step == 1 else nullcontext():
            model(torch.ones(3, 5), 0).backward()
        storages = [p.grad.untyped_storage() for p in module.parameters() if p.grad is not None]
        places.append({storage.data_ptr(): storage.nbytes() for storage in storages})
        assert len(places[-1]) < len(storages), "each gradient has memory of its own"
        found = sum(places[-1].values())
        padding = len(places[-1]) * dist.get_world_size() * 16  # to equal chunks of 16 bytes each
        assert found <= n_bytes + padding, f"gradients take {found} bytes, parameters {n_bytes}"
        assert module.inner.weight.grad.stride() == (1, 5), "not the parameter's strides"
        model.zero_grad(set_to_none=step != 2)
    assert all(place == places[0] for place in places), f"other memory: {places}"
    del module, model, storages
    assert live_bytes() <= before + 1024, f"{live_bytes() - before} bytes are left"


# Each part of the proof: what it claims, and the checks that show it. Memory is first, as its row
# of 1,024 ranks takes longest.
PROOF = {
    "W ranks, in any wrapper, end on the bits of one process that runs a plain loop":
        [bits_of_one_process],
    "Each stage ends on the bits of oracle.py, in every module that this can take":
        [stages_are_the_oracles, oracle_has_one_hash],
    "At W = 2 torch's own wrappers end on the same bits as ours": [bits_of_torch],
    "A rank receives and holds the bytes of the ZeRO paper's formulas":
        [memory_is_the_formulas, traffic_is_the_formulas, zero3_prefetches,
         ddp_keeps_one_gradient],
    "With uncut parameters a rank receives and holds what its chunks say":
        [uncut_is_the_formulas, uneven_chunks_arrive_in_pieces]}


# -------------------------------------------------------------------------------------------------
# 5. options, odd steps and guards: what changes no bit


# What a script may do in a step. Each ends with gradients that are to be averaged once. loss(i) is
# that of the i-th micro batch of this rank.


def planted(*_):
    """A hook that raises."""
    raise ZeroDivisionError("planted")


def forwards_between(model, loss):
    loss(5)  # without a backward
    found = loss(0)
    with torch.inference_mode():
        loss(4)
    found.backward(retain_graph=True)
    model.zero_grad()
    found.backward()


def exceptions(model, loss):
    """A script that catches "out of memory" and goes on."""
    part = next(m for m in model.modules() if isinstance(m, (Block, Odd)))
    with part.register_forward_hook(planted):
        raises(ZeroDivisionError, "planted", loss, 0)
    with part.register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", loss(0).backward)
    with suppress(ZeroDivisionError), no_sync(model):
        planted()
    model.zero_grad()
    loss(0).backward()


def no_sync_around_backward(model, loss):
    with no_sync(model):
        loss(3).backward()
    model.zero_grad()  # drops what was held back
    found = model(torch.ones(3, 5), 0)  # uses what turn 1 leaves out
    with no_sync(model):
        found.backward()
    model(torch.ones(3, 5), 1).backward()


def no_sync_in_no_sync(model, loss):
    with no_sync(model):
        with no_sync(model):
            loss(0).backward()
        loss(1).backward()  # is held back, too
    loss(2).backward()


ODD_STEPS = (two_forwards, forwards_between, exceptions, no_sync_around_backward,
             no_sync_in_no_sync)


def recorded(wrapper, name, **options):
    """What `distributed` returns, and [(operation, bytes of its tensors)] of all collectives."""
    sent = []

    def note(operation, tensors):
        sent.append((operation, [t.nbytes for t in tensors if torch.is_tensor(t)]))

    with every_collective(note):
        return distributed(wrapper, name, **options), sent


@check(trains(2, "ddp, 1 kB", "gpt", "mixed", "caller", micro_steps=2),
       trains(2, "zero1", "gpt", "mixed", "caller", micro_steps=2),
       trains(2, "zero2", "gpt", "mixed", "caller", micro_steps=2),
       trains(2, "zero3", "gpt", "mixed", "caller", micro_steps=2),
       trains(3, "ddp", "odd", "skipping"),
       trains(3, "zero1", "odd", "skipping"),
       trains(3, "zero3", "odd", "skipping"),
       *only_full(trains(W, wrapper, micro_steps=2) for W in (2, 3) for wrapper in PLAIN),
       limit_s=120)
def guards_change_nothing(wrapper, modules, **options):
    """Without guards, as the classes named Plain..., DDP and the stages give the same bits by the
    same collectives: kinds, order and bytes, construction included."""
    for name in modules:
        expected, sent = recorded(wrapper, name, **options)
        found, sent_without = recorded(f"{wrapper} without guards", name, **options)
        same_bits(expected, found, f"{wrapper}, {name}")
        pairs = itertools.zip_longest(sent, sent_without)
        for i, (with_guards, without) in enumerate(pairs):
            assert with_guards == without, (f"{wrapper}, {name}: collective {i} is {with_guards}, "
                                            f"without guards {without}")
        assert sent, "nothing was sent, so nothing was compared"


@contextmanager
def one_is_late(rank):
    """This rank sleeps before each collective and each update."""
    def sleep(*_):
        time.sleep(0.003)

    if rank != dist.get_rank():
        yield
        return
    hook = register_optimizer_step_pre_hook(sleep)
    with every_collective(sleep):
        yield
    hook.remove()


def native():
    """A tensor that says it is not on a CPU is sent by the collectives that NCCL has."""
    return mock.patch.object(torch.Tensor, "is_cpu", False)


AROUND = {"NCCL's collectives": native, "rank 0 late": partial(one_is_late, 0),
          "rank 2 late": partial(one_is_late, 2)}


def full_options():
    for around in AROUND:
        for wrapper in ("ddp all", "zero1", "zero3"):
            yield trains(3, wrapper, around=around)
    for wrapper in ("ddp all", "ddp one node", "zero1 in ones", "zero3 in ones"):
        yield trains(3, wrapper)
    for wrapper in ("zero1", "zero3"):
        for optimizer in ("sgd", "foreach"):
            yield trains(2, wrapper, optimizer=optimizer)
    for odd_step in ODD_STEPS:
        for wrapper in ("ddp, 1 kB", "zero3"):
            yield trains(3, wrapper, "odd", "lora", odd_step=odd_step)


@check(trains(2, "ddp all", "gpt", "odd", "again", around="NCCL's collectives"),
       trains(2, "zero1", "gpt", "odd", "again", around="NCCL's collectives"),
       trains(2, "zero2", "gpt", "odd", "again", around="NCCL's collectives"),
       trains(2, "zero3", "gpt", "odd", "again", around="NCCL's collectives"),
       trains(2, "ddp, 1 kB", "gpt", "odd", around="rank 0 late"),
       trains(2, "zero1", "gpt", "odd", around="rank 0 late"),
       trains(2, "zero3", "gpt", "odd", around="rank 0 late"),
       trains(3, "ddp, 1 kB", "again", around="rank 2 late"),
       trains(3, "zero2", "again", around="rank 2 late"),
       trains(3, "zero3", "again", around="rank 2 late"),
       trains(2, "zero1 in ones", "gpt", "again"),
       trains(2, "zero3 in ones", "gpt", "again"),
       trains(3, "ddp all", "gpt", "odd", "mixed"),
       trains(3, "ddp one node", "gpt", "odd", "mixed"),
       trains(4, "zero1 in twos", "gpt", naive="ddp nodes of 2"),
       trains(4, "zero3 in twos", "gpt", naive="ddp nodes of 2"),
       trains(4, "zero1 uncut in twos", "gpt", naive="ddp nodes of 2", optimizer="lamb"),
       trains(4, "zero3 uncut in twos", "gpt", naive="ddp nodes of 2", optimizer="muon"),
       trains(2, "zero3 uncut", "gpt", "odd", around="NCCL's collectives", optimizer="muon"),
       trains(3, "zero2 uncut", "gpt", "odd", around="NCCL's collectives", optimizer="lamb"),
       trains(3, "zero1 uncut", "again", around="rank 2 late", optimizer="lamb"),
       trains(2, "zero3 uncut bf16", "gpt", "lora", naive="zero3 bf16"),
       trains(2, "zero3 uncut", "odd", "lora", odd_step=forwards_between, optimizer="muon"),
       trains(2, "zero2 uncut", "odd", "lora", odd_step=no_sync_around_backward,
              optimizer="lamb"),
       trains(2, "zero1", "lora", "odd", optimizer="sgd"),
       trains(2, "zero3", "lora", "odd", optimizer="sgd"),
       trains(3, "zero2", "lora", "odd", optimizer="foreach"),
       trains(3, "zero3", "lora", "odd", optimizer="foreach"),
       *(trains(2, "ddp, 1 kB", "odd", "lora", odd_step=odd_step) for odd_step in ODD_STEPS),
       *(trains(2, "zero3", "odd", "lora", odd_step=odd_step) for odd_step in ODD_STEPS),
       *only_full(full_options()), limit_s=120)
def options_change_no_bit(wrapper, modules, naive="naive", around=None, **options):
    """Bits stay those of `average_gradients` with NCCL's collectives, a rank that is late
    everywhere, groups of one rank, hooks that send everything, and any element-by-element
    optimizer; with two forwards, evaluation before a backward, exceptions or no_sync() anywhere in
    a step."""
    for name in modules:
        expected = distributed(naive, name, **options)
        with AROUND[around]() if around else nullcontext():
            found = distributed(wrapper, name, **options)
        same_bits(expected, found, f"{wrapper}, {name}")


@check(dict(W=2, wrapper="zero3"), *only_full([dict(W=2, wrapper="ddp, 1 kB")]), limit_s=120)
def compiling_changes_no_bit(wrapper):
    """torch.compile of each block gives the same bits with and without a wrapper."""
    options_change_no_bit(wrapper, ["compiled"])


# -------------------------------------------------------------------------------------------------
# 6. ddp.py and zero.py: what else they promise


@check(dict(W=1))
def buckets_fill_in_order():
    """Buckets take 1 MB, 2 MB and so on, up to the limit; each has one dtype, and parameters of
    another one do not close it; a parameter larger than the limit is alone."""
    fp32 = torch.empty(2**17)  # half a MB, as the next two
    fp64 = torch.empty(2**16, dtype=torch.float64)
    trained = torch.empty(2**17).requires_grad_()
    large = torch.empty(2**20)

    def assert_buckets(expected, *parameters):
        """expected: places in parameters."""
        found = []
        rest = list(enumerate(parameters))
        for bucket in ddp.fill_buckets(parameters, 3 * 2**20):
            found.append([])
            for p in bucket:
                i = next(i for i, (_, q) in enumerate(rest) if q is p)
                place, _ = rest.pop(i)
                found[-1].append(place)
        assert found == expected, f"buckets are {found}, expected are {expected}"

    assert_buckets([[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17], [18]],
                   *[fp32] * 19)
    assert_buckets([[0, 2], [1, 3, 5, 7], [4, 6]], *[fp32, fp64] * 4)
    assert_buckets([[0, 2], [1]], fp32, trained, fp32)
    assert_buckets([[0], [1], [2]], fp32, large, fp32)


@check(*grid(W=(2, 3)))
def ddp_overlaps():
    """The first bucket is summed before the last gradient exists; each bucket costs its collectives
    and a backward one more.

    Seen without a clock: the hook of the last gradient does not return until the first one has
    become the mean. A wrapper that communicates after the backward would wait for ever.
    """
    rank = dist.get_rank()
    W = dist.get_world_size()
    sent = Counter()
    start_s = []
    module = nn.Sequential(*(nn.Linear(30, 30) for _ in range(8)))
    model = DDP(module, bucket_cap_mb=1e-6)
    x = torch.ones(3, 30) * rank
    first = module[7].weight

    def note(operation, tensors):
        sent[operation] += 1

    with every_collective(note):
        model(x).square().mean().backward()
    # 16 parameters, each a bucket of its own: at W = 2 an all-reduce, else two exchanges.
    expected = Counter(allreduce=17) if W == 2 else Counter(allreduce=1, recv=64)
    assert sent == expected, f"collectives of a backward are {sent}, expected are {expected}"
    mean = first.grad.clone()
    model.zero_grad()

    def hold_back(_):
        start_s.append(time.monotonic())
        while first.grad is None or not torch.equal(first.grad, mean):
            assert time.monotonic() < start_s[0] + 5, "the first bucket waits for the last gradient"

    module[0].weight.register_hook(hold_back)
    model(x).square().mean().backward()


@check(*grid(W=(4,), stage=("zero1", "zero3")))
def hybrid_sums_overlap(stage):
    """With hybrid sharding nobody waits for the sum of a bucket over groups before it has launched
    the next bucket.

    Seen without a clock: ranks 2 and 3, a group, launch their second bucket when ranks 0 and 1 have
    done so. If these waited for the first bucket's sum, all would wait for ever.
    """
    rank = dist.get_rank()
    message = torch.ones(1)
    model = STAGES[stage](Chain(4, 16), shard_size=2)
    last, last_but_one = model.module.units[3], model.module.units[2]

    def on_gradient_of_input(module, act):
        def pre_hook(_, inputs):
            inputs[0].register_hook(act)

        module.register_forward_pre_hook(pre_hook)

    def give_way(_):
        dist.send(message, rank + 2, tag=7)

    def wait_for_others(_):
        dist.recv(message, rank - 2, tag=7)

    # The gradient of a unit's input comes after that of its weight, which launches the bucket.
    if rank < 2:
        on_gradient_of_input(last_but_one, give_way)
    else:
        on_gradient_of_input(last, wait_for_others)
    model(torch.ones(3, 16, requires_grad=True)).backward()
    model = Zero2(nn.Linear(256, 256, bias=False), shard_size=2)
    before = live_bytes()
    model(torch.ones(1, 256)).sum().backward()
    own = 4 * 256 * 256 / 2  # of the gradient
    kept = live_bytes() - before
    assert kept <= own + 4096, f"{kept:,} bytes are kept, of gradients expected {own:,.0f}"


@check(*grid(W=(4,), stage=STAGES))
def hybrid_sums_are_in_place(stage):
    """With hybrid sharding the sum over a group and that over groups are made in the bucket's own
    memory, also where chunks are uneven."""
    gpt = small_gpt()
    model = uncut(STAGES[stage], gpt, [p for p in gpt.parameters() if p.dim() == 2], shard_size=2)
    idx = torch.zeros(1, 16, dtype=torch.int64)
    places = []
    summed = 0

    def note(flat, process_group):
        nonlocal summed
        summed += flat.numel()
        memories = []
        for bucket in model._buckets:
            if bucket.gradients is not None:
                memories.append(bucket.gradients.untyped_storage()._cdata)
        places.append(flat.untyped_storage()._cdata in memories)
        return ddp.all_reduce(flat, process_group)

    with mock.patch("zero.all_reduce", note):
        _, loss = model(idx, idx)
        loss.backward()
    assert places and all(places), f"{places.count(False)} of {len(places)} sums are elsewhere"
    n = sum(p.numel() for p in gpt.parameters())
    total = sum(gather(summed, model.shard_group))
    assert n <= total <= 1.1 * n, f"a group sums {total} elements over groups, of {n}"


@check(*grid(W=(2,), wrapper=("ddp", "ddp without guards")))
def ddp_goes_at_once(wrapper):
    """A DDP that is dropped frees its buffers without the help of the garbage collector."""
    module = small_gpt()
    model = WRAPPERS[wrapper](module)
    idx = torch.zeros(1, 16, dtype=torch.int64)
    _, loss = model(idx, idx)
    loss.backward()
    buffers = [weakref.ref(bucket.gradients) for bucket in model._buckets]
    module.zero_grad(set_to_none=True)
    gc.disable()
    try:
        del model, module, loss
        n_alive = sum(buffer() is not None for buffer in buffers)
    finally:
        gc.enable()
    assert n_alive == 0, f"{n_alive} of {len(buffers)} buffers wait for the collector"


@check(*grid(W=(2, 3), stage=STAGES, guarded=(True, False)))
def unannounced_steps_are_noticed(stage, guarded):
    """A step after a backward that was said not to be the last: the next forward gathers, on all
    ranks, also on those that own nothing of what has changed."""
    kind = STAGES[stage] if guarded else PLAIN[stage]
    module = nn.Linear(4, 3, bias=False)  # one rank owns all of it
    plain = copy.deepcopy(module)
    model = kind(module, uncut=module.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.5)
    x = torch.ones(2, 4)
    model.set_is_last_backward(False)
    for _ in range(3):
        found, expected = model(x), plain(x)
        same_bits({"output": expected.detach()}, {"output": found.detach()})
        for output, each in ((found, optimizer), (expected, of_plain)):
            output.sum().backward()
            each.step()
            each.zero_grad()


@check(*grid(W=(2, 3), stage=STAGES))
def replaced_data_is_noticed(stage):
    """`.data` of shards that a script replaces between micro-steps: all ranks gather, also those
    whose shards are empty."""
    model = STAGES[stage](nn.Sequential(nn.Linear(1, 1, bias=False)))
    x = torch.ones(1, 1)
    for around in (model.no_sync, nullcontext):
        model.set_is_last_backward(False)
        with around():
            before = model(x)
            before.sum().backward()
        for p in model.parameters():
            p.data = p.data * 0.5
        same_bits({"output": before.detach() * 0.5}, {"output": model(x).detach()})


@check(dict(W=0))
def files_work_alone():
    """oracle.py alone, ddp.py with guards.py, and zero.py with both: in an empty folder."""
    script = """
import torch, torch.distributed as dist
from {file} import {wrapper}, Plain{wrapper}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for kind in {wrapper}, Plain{wrapper}:
    model = kind(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    print("norm", model.clip_grad_norm_(1.0).item())
"""
    run = partial(subprocess.run, capture_output=True, text=True,
                  env={**os.environ, "PYTHONPATH": ""})

    def in_empty_folder(file, wrapper):
        with temporary() as folder:
            for name in {"ddp.py", "guards.py", f"{file}.py"}:
                shutil.copy(HERE / name, folder / name)
            (folder / "own.py").write_text(script.format(file=file, wrapper=wrapper))
            return run([sys.executable, "own.py"], cwd=folder)

    for done in two_at_a_time(in_empty_folder, ("ddp", "zero"), ("DDP", "Zero3")):
        norm = f"norm {math.sqrt(6)}\n"  # of six gradients of 1
        assert done.stdout == 2 * norm, done.stdout + done.stderr
    with temporary() as folder:
        shutil.copy(HERE / "oracle.py", folder / "oracle.py")
        done = run([sys.executable, "oracle.py"], cwd=folder)
    rows = re.findall(r"^(\w+) +([12])  ([0-9a-f]{8}) ", done.stdout, re.MULTILINE)
    assert len(rows) == 10 and len({found for _, _, found in rows}) == 2, done.stdout + done.stderr


class Batch(dict):
    """As libraries have them: attributes are keys, and nothing can be changed."""
    x = property(lambda self: self["x"])
    __setitem__ = planted


class Unpacks(nn.Linear):
    def forward(self, batch, nested):
        assert type(batch) is Batch and nested[0]["y"].dtype == torch.int64
        return super().forward(batch.x) + super().forward(nested[1].x)


@check(dict(W=2))
def inputs_keep_their_containers():
    """Inputs in subclasses of dict are moved to device_ids by DDP, and cast to param_dtype by the
    stages, as torch does it; DDP has what Lightning and Accelerate touch of torch's."""
    batch = Batch(x=torch.ones(2, 4))
    inputs = batch, [{"y": torch.arange(3)}, Batch(x=torch.ones(2, 4))]
    for wrap in (partial(DDP, device_ids=[torch.device("cpu")]), partial(Zero2, **BF16)):
        model = wrap(Unpacks(4, 4))
        model(*inputs).float().sum().backward()
        assert batch.x.dtype == torch.float32, "the script's own batch was cast"
        assert all(p.grad is not None for p in model.parameters())
    model = DDP(nn.Linear(4, 4))
    model.reducer.prepare_for_backward([])
    assert not model.static_graph and not model.reducer._rebuild_buckets()
    assert model.require_forward_param_sync and model._get_ddp_logging_data() == {}


@check(*grid(W=(1, 2)))
def top_k_loses_nothing():
    """What top-k has applied and what it keeps add up to all gradients: error feedback, without
    which the small ones would never be applied."""
    W = dist.get_world_size()
    rank = dist.get_rank()
    missing = Counter()
    state = TopKState(0.1, start_iter=1)
    module = fresh("gpt")
    plain = fresh("gpt")
    model = DDP(module, bucket_cap_mb=0.005)
    indices = []

    def hook(state, bucket):
        indices.append(bucket.index())
        return top_k_hook(state, bucket)

    model.register_comm_hook(state, hook)
    for step in range(4):  # weights stay, so both have the same gradients
        for net in (model, plain):
            net.zero_grad()
            zoo_loss(net, step, rank).backward()
        average_gradients(plain)
        for p, q in zip(module.parameters(), plain.parameters()):
            missing[p] += q.grad - p.grad
        has_residual = any(t.any() for t in state.residual.values())
        assert has_residual == (step > 0), f"start_iter=1, and step {step} has {has_residual}"
    for p, total in missing.items():
        left = sum(gather(state.residual[p])) / W
        assert left.any() and torch.allclose(total, left, atol=1e-5)
    n_buckets = len(indices) // 4
    assert n_buckets > 1 and indices == 4 * [*range(n_buckets)], f"buckets are numbered {indices}"
    (zoo_loss(model, 0, rank) * math.inf).backward()
    assert all(t.isfinite().all() for t in state.residual.values()), "an inf stays for ever"


# What may differ between the modules that ranks wrap, and the tensor that is named.


def other_dtype(module):
    module.first.double()


def frozen_last(module):
    module.last.requires_grad_(False)


def one_buffer_more(module):
    module.register_buffer("extra", torch.ones(3))


def other_shape(module):
    module.last = nn.Linear(5, 3)


CHANGES = {other_dtype: "first.weight", frozen_last: "last.weight", one_buffer_more: "extra",
           other_shape: "last.weight"}


@check(*grid(W=(2, 3), wrapper=("ddp", "zero1", "zero3")))
def mistakes_are_named(wrapper):
    """Ranks whose modules differ all raise, naming the first difference; so do a backward through
    weights that a step has changed, a wrapper in a wrapper, a lookup that changes weights. The next
    wrapper works."""
    rank = dist.get_rank()
    x = torch.ones(3, 5)
    wrap = WRAPPERS[wrapper]
    for change, name in CHANGES.items():
        module = fresh("lora")
        if rank > 0:
            change(module)
        raises(RuntimeError, name, wrap, module)
    model = wrap(fresh("lora"))
    old = model(x, 0)
    model(x, 0).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    raises(RuntimeError, "modified", old.backward)
    of_torch = DistributedDataParallel(fresh("lora"))
    for module in (model, nn.Sequential(DDP(fresh("lora"))), of_torch):
        raises(RuntimeError, "wrap the plain module", wrap, module)
    raises(RuntimeError, "must not be wrapped again", DistributedDataParallel, model)
    lookups = nn.ModuleList([nn.Embedding(9, 4, max_norm=1)])
    raises(RuntimeError, "0: max_norm=1", wrap, lookups)
    raises(AttributeError, "use model.module.first", getattr, model, "first")
    if wrapper != "ddp":
        module = fresh("lora")
        some = [*module.parameters()][:rank]
        raises(RuntimeError, "wrap different modules", wrap, module, uncut=some)
        for wrong in (fresh("odd").parameters(), ["first.weight"], module.first.weight, True):
            raises(ValueError, "uncut must be a list", wrap, module, uncut=wrong)
        raises(RuntimeError, "share memory", wrap, nn.ParameterList([torch.ones(3)] * 2))


@check(*grid(W=(2, 3)))
def unused_parameters_are_named():
    """Without find_unused_parameters a DDP raises on every rank after a backward that has left
    parameters out on some rank, and names them. On an accelerator it does so in the next forward.
    """
    rank = dist.get_rank()
    with native():
        late = DDP(fresh("skipping"))
    late(torch.ones(3, 5), rank).backward()
    raises(RuntimeError, "layers.3.never", late, torch.ones(3, 5), 0)
    late(torch.ones(3, 5), 0)  # it has been said
    model = DDP(fresh("odd"))
    # In turn 0 all ranks use what is used sometimes; in the other case only rank 0.
    for turn, expected in ((0, {"never"}), (min(rank, 1), {"never", "sometimes"})):
        text = raises(RuntimeError, "never.weight", model(torch.ones(3, 5), turn).backward)
        named = set(re.findall(r"(never|sometimes)\.weight", text))
        assert named == expected, f"named are {named}, expected are {expected}: {text}"
        model.zero_grad()


@check(dict(W=2, wrapper="ddp", missing="backward"), dict(W=3, wrapper="zero1", missing="forward"),
       dict(W=3, wrapper="zero3", missing="backward"), dict(W=2, wrapper="zero3", missing="order"))
def missing_rank_is_named(wrapper, missing):
    """Where a rank makes no forward or backward, or calls units in an order of its own, the others
    raise within the group's timeout, and name the bucket or unit that waits. Wrappers in a group of
    their own refuse to be copied."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    model = WRAPPERS[wrapper](fresh("lora"), process_group=group)
    rank, W = dist.get_rank(), dist.get_world_size()
    if missing == "order":
        order = (2, 1, 0) if rank > 0 else (0, 1, 2)
        raises(RuntimeError, r"could not unshard layers\.\d", model.module.some,
               torch.ones(3, 5), order)
        return
    raises(RuntimeError, COPIED, copy.deepcopy, model)  # it would use the default group
    act = partial(zoo_loss, model, 0, 0)
    if missing == "backward":
        act = act().backward
    if rank == W - 1:
        time.sleep(2)  # alive, and that is all
    else:
        raises(RuntimeError, r"(first|last|layers\.\d)\b|the root", act)


def on_meta(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)


def fillable():
    """Layers that initialise themselves, with buffers, one not on meta, in and outside of units."""
    norm = nn.BatchNorm1d(5, affine=False)  # of buffers alone
    norm.register_buffer("real", torch.ones((), device="cpu"))
    return nn.Sequential(nn.ModuleList([nn.Linear(5, 5), norm]), nn.Linear(5, 2))


def fill(module):
    parameters = module.parameters(recurse=False)
    buffers = module.buffers(recurse=False)
    for t in itertools.chain(parameters, buffers):
        t.fill_(dist.get_rank() + 7)


@check(*grid(W=(1, 3), stage=STAGES), dict(W=3, stage="zero3 uncut"))
def meta_device_is_filled(stage):
    """From the meta device a GPT gets the weights of building it whole, no rank ever holding more
    than its shards and some units; other modules reset themselves or take init_fn; rank 0 counts.
    """
    wrap = WRAPPERS[stage]
    W = dist.get_world_size()
    before = live_bytes()
    gpt = on_meta(small_gpt, n_layer=8)
    held = []
    init_weights = gpt.init_weights

    def init_weights_and_note():
        init_weights()
        held.append(live_bytes() - before)

    gpt.init_weights = init_weights_and_note
    model = wrap(gpt)
    whole = small_gpt(n_layer=8)
    same_bits({n: p.detach() for n, p in whole.named_parameters()}, dict(model.full_parameters()))
    psi = sum(p.nbytes for p in whole.parameters())
    block = sum(p.nbytes for p in whole.blocks[0].parameters())
    parameters = psi / W if stage.startswith("zero3") else psi + psi / W
    assert max(held) < parameters + 6 * block, f"{max(held):,} bytes held, of {psi:,}"
    for init_fn, value, units in ((None, 1, None), (fill, 7, [])):
        values = wrap(on_meta(fillable), init_fn=init_fn, units=units).full_state_dict()
        for name in ("running_var", "real"):
            assert (values[f"0.1.{name}"] == value).all(), f"{name} is not as rank 0 has it"
    gpt = on_meta(small_gpt)
    gpt.norm = nn.LayerNorm(24)  # has values, which init_weights() would overwrite
    raises(RuntimeError, "pass init_fn", wrap, gpt)
    # The root of a chain cannot reset itself.
    raises(RuntimeError, "the root .*Chain .*pass init_fn", wrap, on_meta(Chain, 2, 4))
    filled = wrap(on_meta(Chain, 2, 4), init_fn=fill).full_state_dict()
    assert (filled["scale"] == 7).all()


@check(*grid(W=(1, 3), stage=STAGES), dict(W=3, stage="zero1 uncut"),
       dict(W=3, stage="zero3 uncut"), *only_full(grid(W=(2, 4), stage=STAGES)))
def state_dicts_round_trip(stage):
    """Shards are (n, 1, ..., 1), or of an uncut parameter its shape, under the module's names;
    whole and sharded state dicts come back as they were given; a misfit is named, and nothing is
    written then."""
    for name in ("odd", "experts", "again", "mixed"):
        plain = fresh(name)
        model = WRAPPERS[stage](fresh(name))
        x = torch.ones(3, 5)
        shards = model.state_dict()
        good = {n: t.clone() for n, t in plain.state_dict().items()}
        assert list(shards) == list(good), "other names, or another order"
        for n, p in model.named_parameters():
            shape = good[n].shape
            is_part = p.shape[1:] == (1,) * (len(shape) - 1)
            is_all = p.shape == shape and stage.endswith("uncut")
            assert is_part or is_all, f"{n} has shape {shape}, its shard {p.shape}"
        same_bits(good, model.full_state_dict(), name)
        plain.load_state_dict({n: t + 1 for n, t in good.items()})
        model.load_full_state_dict(plain.state_dict())
        expected = {"output": plain.eval()(x, 0).detach()}
        same_bits(expected, {"output": model.eval()(x, 0).detach()}, f"{name}, loaded")
        first = next(n for n, t in good.items() if t.dim() > 1)
        missing = {n: t for n, t in good.items() if n != first}
        for bad in (missing, {"more": good[first], **good}, {**good, first: good[first][1:]}):
            raises(RuntimeError, f"more|{first}", model.load_full_state_dict, bad)
        same_bits(plain.state_dict(), model.full_state_dict(), f"{name}, after misfits")
        model.load_state_dict(shards)
        same_bits(good, model.full_state_dict(), f"{name}, shards given back")


@check(dict(W=2, stage="zero1"), dict(W=3, stage="zero3"),
       *only_full(grid(W=(2, 3), stage=STAGES)))
def buffers_given_back_are_read(stage):
    """What a rank still sends to slower ones is overwritten neither by the units that come next nor
    by new values of its shards.

    One rank skips all units and clears its shards at once, while the others, which it has met at
    the root, are late for the first unit. gloo reads a buffer when the receiver asks for it, so an
    early reuse sends zeros.
    """
    x = torch.randn(2, 256)
    module = Chain(6, 256)
    W = dist.get_world_size()
    with torch.no_grad():
        for ahead in range(W):
            model = STAGES[stage](Chain(6, 256))
            n_units = 0 if dist.get_rank() == ahead else 6
            model.load_full_state_dict(module.state_dict())
            calls = []

            def late(*call):
                calls.append(call)
                # The root had W - 1 calls, so this is the first unit's.
                if len(calls) == W and n_units > 0:
                    time.sleep(0.2)

            with every_collective(late):
                found = model(x, n_units)
            for shard in model.parameters():
                shard.zero_()
            same_bits({"output": module(x, n_units)}, {"output": found}, f"rank {ahead} is ahead")


# -------------------------------------------------------------------------------------------------
# 7. scripts: right, or refused
#
# What a script does around a wrapper ends with the weights of the same script around the plain
# module, on the batches of all ranks; or it raises, and the error says what is not supported.


class Net(nn.Module):
    """Three units, and two parameters of the root. calls(net, x) takes the place of its forward."""

    def __init__(self, calls=None, unit=partial(nn.Linear, 4, 4), tied=False):
        super().__init__()
        self.blocks = nn.ModuleList(unit() for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = Net.plain if calls is None else calls
        if tied:
            self.blocks[1].bias = self.blocks[0].bias

    def forward(self, x):
        return self.calls(self, x)

    def plain(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x) * self.scale


class Script:
    """What a script has: a model, which is a module or a wrapper of it, and an optimizer."""

    def __init__(self, wrap, build, x):
        torch.manual_seed(0)
        self.module = build()
        self.wrap = wrap
        self.x = x
        self.model = wrap(self.module)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def loss(self):
        return self.model(self.x).square().mean()

    def backward(self):
        self.loss().backward()

    def hold(self):
        with no_sync(self.model):
            self.backward()

    def step(self, **options):
        self.loss().backward(**options)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self):
        whole = getattr(self.model, "full_state_dict", self.model.state_dict)()
        return {name: t.clone() for name, t in plain_names(whole.items())}


SCRIPTS = []
# What errors say.
ABSENT = "parameter has a value"
CHANGED = "after wrapping"
COPIED = "copy the module"
ONE_PART = "one rank's part"


def script(zero="", ddp="", both="", build=Net):
    """Note a script: what the error of a stage says, that of DDP, or of both, and what builds the
    module. Without a text it has to be right."""
    def note(function):
        of_stage = zero or both
        of_ddp = ddp or both
        function.refusals = {"ddp": of_ddp, **dict.fromkeys(STAGES, of_stage)}
        function.build = build
        SCRIPTS.append(function)
        return function

    return note


# ---- scripts that change the module


@script(both="weakref")
def swaps_tensors(s):
    torch.utils.swap_tensors(s.module.scale, nn.Parameter(s.x[0, 0]))
    s.step()


def frozen_head():
    net = Net()
    net.head.requires_grad_(False)
    return net


@script(both=CHANGED, build=frozen_head)
def unfreezes_what_was_frozen(s):
    s.model.requires_grad_(True)
    s.step()


@script(ABSENT, ddp=CHANGED)
def wraps_twice(s):
    again = s.wrap(s.module)
    s.step()
    del again


@script(both=CHANGED)
def adds_a_layer(s):
    s.module.blocks.append(nn.Linear(4, 4))
    s.step()


@script(both=CHANGED)
def adds_a_gradient_hook(s):
    s.module.scale.register_post_accumulate_grad_hook(planted)
    s.step()


@script("a shard's hooks")
def hooks_a_parameter(s):
    s.parameters[0].register_hook(torch.zeros_like)
    s.step()


@script()
def freezes_and_unfreezes(s):
    for p in s.parameters[:4]:
        p.requires_grad_(False)
    s.step()
    s.module.requires_grad_(True)
    s.step()


@script()
def keeps_the_gradients_of_a_critic(s):
    s.backward()
    s.module.requires_grad_(False)
    s.model(s.x.clone().requires_grad_()).sum().backward()
    s.module.requires_grad_(True)
    s.optimizer.step()


# ---- scripts that copy or read weights


@script(ABSENT)
def copies_the_module(s):
    copy.deepcopy(s.module)


@script(COPIED)
def averages_the_model(s):
    AveragedModel(s.model).update_parameters(s.model)


@script(COPIED)
def saves_the_model(s):
    torch.save(s.model, os.devnull)


@script("full_state_dict")
def reads_a_state_dict_of_the_module(s):
    s.module.state_dict()["head.weight"].clone()


@script(ABSENT)
def reads_a_weight(s):
    s.x * s.module.scale  # in a method that is not forward


def reads_another_unit(net, x):
    return x @ net.blocks[2].weight


@script(ABSENT, build=partial(Net, reads_another_unit))
def reads_a_weight_of_another_unit(s):
    s.step()


@script()
def loads_into_the_module(s):
    s.module.load_state_dict({n: torch.full_like(t, 0.1) for n, t in Net().state_dict().items()})


# ---- scripts that write weights


@script()
def replaces_data(s):
    """SGD by hand, and averages that are swapped in."""
    s.backward()
    for p in s.parameters:
        p.data = p.data - 0.1 * p.grad
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(s.parameters) / 2, s.parameters)


@script()
def scales_data_in_place(s):
    s.loss()  # so the weights are gathered
    for p in s.parameters:
        p.data.mul_(0.5)
    s.step()


@script()
def exchanges_data(s):
    """Averages take the weights' place for an evaluation, and give it back."""
    averages = [p.detach() * 0.9 for p in s.parameters]
    for _ in range(2):
        s.step()
        for _ in range(2):
            for p, average in zip(s.parameters, averages):
                p.data, average.data = average.data, p.data
            with torch.no_grad():
                s.loss()
    with torch.no_grad():
        for p, average in zip(s.parameters, averages):
            p.add_(average)


def writing(net, x):
    with torch.no_grad():
        net.head.weight.clamp_(-0.1, 0.1)
    net.scale.data = net.scale.data * 0.9
    is_early = net.scale.item() < 0.85
    net.head.requires_grad_(net.head.weight.requires_grad and is_early)
    return net.plain(x)


@script(build=partial(Net, writing))
def writes_weights_in_the_forward(s):
    s.step()
    s.step()


@script(build=partial(Net, writing))
def writes_weights_in_a_forward_without_backward(s):
    s.loss()
    s.step()


# ---- scripts that keep, change or ask gradients


@script()
def keeps_gradients(s):
    s.backward()
    kept = [p.grad for p in s.parameters]
    s.optimizer.zero_grad()
    s.step()
    with torch.no_grad():
        for p, gradient in zip(s.parameters, kept):
            p -= gradient


@script()
def caches_gradients(s):
    s.backward()
    cached = [p.grad for p in s.parameters]
    s.optimizer.zero_grad(set_to_none=False)
    s.backward()
    for gradient in cached:
        gradient *= 0.5
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.step()
    with torch.no_grad():
        for p, gradient in zip(s.parameters, cached):
            p -= gradient
    torch.save([p.grad for p in s.parameters], os.devnull)


def asks_a_gradient(s, question):
    s.backward()
    question(s.parameters[0].grad)
    s.step()


@script(ONE_PART)
def asks_isfinite(s):
    asks_a_gradient(s, torch.isfinite)


@script(ONE_PART)
def asks_isnan(s):
    asks_a_gradient(s, torch.isnan)


@script(ONE_PART)
def asks_amax(s):
    asks_a_gradient(s, torch.amax)


@script(ONE_PART)
def asks_max(s):
    asks_a_gradient(s, torch.Tensor.max)


@script("clip_grad_norm_")
def clips_by_a_norm_of_parts(s):
    s.backward()
    norm = sum(p.grad.data.pow(2).sum() for p in s.parameters).sqrt()
    nn.utils.clip_grads_with_norm_(s.parameters, 0.01, norm)
    s.step()


@script()
def clears_gradients_of_the_module(s):
    s.backward()
    s.module.zero_grad()
    s.step()


def infinite(gradient):
    gradient = gradient.clone()
    gradient.view(-1)[0] = math.inf  # in one shard
    return gradient


@script()
def scales_and_finds_an_inf(s):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for has_inf in (False, True, False):
        handle = s.module.head.weight.register_hook(infinite if has_inf else torch.clone)
        scaler.scale(s.loss()).backward()
        for p in s.parameters:
            p.grad = p.grad.clone()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
        handle.remove()
    assert scaler.get_scale() == 2, "the scale is halved once, on every rank"


# ---- what a backward is


@script(both="create_graph")
def creates_a_graph(s):
    s.step(create_graph=True)


@script("after no backward")
def asks_only_some_gradients(s):
    s.step(inputs=s.parameters)


@script("to not have been used", ddp="autograd.grad")
def calls_autograd_grad(s):
    torch.autograd.grad(s.loss(), s.parameters)


@script(both="sparse", build=partial(Net, unit=partial(nn.Embedding, 9, 4, sparse=True)))
def has_sparse_gradients(s):
    s.model.module.blocks[0](torch.tensor([1])).sum().backward()


def reentrant(net, x):
    """A part is recomputed by a backward inside the backward."""
    return net.plain(checkpoint(net.blocks[2], net.blocks[1](x), use_reentrant=True))


@script(both="use_reentrant=False", build=partial(Net, reentrant))
def checkpoints_reentrantly(s):
    s.step()


@script(both="in the backward")
def steps_in_the_backward(s):
    _apply_optimizer_in_backward(torch.optim.SGD, s.parameters, dict(lr=0.1))
    s.step()


@script(build=partial(Net, tied=True))
def goes_back_through_a_part(s):
    s.module.blocks[1](s.x).square().mean().backward()  # it has a parameter of the root
    s.optimizer.step()


@script()
def goes_back_twice(s):
    loss = s.loss()
    if s.model is not s.module:  # a sum of halves is the mean, too
        s.model.set_gradient_divide_factor(1)
        loss = loss / 2
    loss.backward(retain_graph=True)
    loss.backward()
    s.optimizer.step()


@script(both="after one that raised")
def catches_an_error_in_the_backward(s):
    s.backward()
    with s.module.blocks[1].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", s.step)
    s.step()


@script()
def raises_elsewhere_on_each_rank(s):
    """Rank 1 after the gradient of scale, rank 0 before that; neither has filled a bucket."""
    with s.module.head.register_full_backward_pre_hook(planted if dist.get_rank() else hash):
        loss = s.loss()
        if dist.get_rank() == 0:
            loss.register_hook(planted)
        raises(ZeroDivisionError, "planted", loss.backward)
    s.model.zero_grad()
    s.step()


def catching(net, x):
    with net.blocks[1].register_forward_pre_hook(planted, prepend=True):  # before ours
        raises(ZeroDivisionError, "planted", net.blocks[1], x)
    return net.plain(x)


@script(build=partial(Net, catching))
def catches_an_error_in_the_forward(s):
    s.step()
    s.step()


@script()
def adds_a_penalty_before_the_forward(s):
    penalty = sum(p.square().sum() for p in s.parameters)
    (penalty + s.loss()).backward()
    s.optimizer.step()


class Spectrum(nn.Module):
    """A weight that is seen as complex, and conjugated."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2, 2))

    def forward(self, x):
        return (x[:, :2].cfloat() @ torch.view_as_complex(self.w).mH).real


@script(build=partial(Net, unit=Spectrum))
def sees_weights_as_complex(s):
    s.step()


class Phases(nn.Module):
    """Weights that are seen as complex numbers, and kept so for the backward."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        turned = x.unflatten(1, (2, 2)).sum(2) * torch.view_as_complex(self.w)
        return torch.view_as_real(turned).flatten(1)


@script(build=partial(Net, unit=Phases))
def keeps_complex_views(s):
    s.x = s.x.clone().requires_grad_()  # or the first block, which is freed, would keep none
    s.step()


# ---- no_sync()


@script()
def adds_a_penalty_to_what_no_sync_holds(s):
    s.hold()
    (s.loss() + sum(p.square().sum() for p in s.parameters)).backward()
    s.optimizer.step()


@script("held back")
def scales_what_no_sync_holds(s):
    s.hold()
    torch._foreach_mul_([p.grad for p in s.parameters], 0.5)
    s.step()


@script()
def drops_what_no_sync_holds(s):
    for set_to_none in (True, False):
        s.hold()
        s.optimizer.zero_grad(set_to_none)
        s.step()


# ---- optimizers


@script("whole parameters")
def uses_lbfgs(s):
    torch.optim.LBFGS(s.parameters).step(s.loss)


@script("uncut=")
def uses_muon(s):
    matrices = [p for p in s.parameters if p.dim() == 2]
    s.optimizer = torch.optim.Muon(matrices, lr=0.1)
    s.step()


@script(ABSENT)
def optimizes_the_module(s):
    s.backward()
    torch.optim.SGD(s.module.parameters()).step()


@script()
def steps_with_a_closure(s):
    def closure():
        s.optimizer.zero_grad()
        loss = s.loss()
        loss.backward()
        return loss

    s.loss()  # without a backward
    s.optimizer.step(closure)


@check(*grid(W=(2,), script=SCRIPTS))
def scripts_are_right_or_refused(script):
    """Whatever a script does around a wrapper ends as around the plain module, on the batches of
    all ranks; or it raises, naming what is not supported."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    own = batch.chunk(2)[dist.get_rank()]
    for wrapper, refusal in script.refusals.items():
        wrapped = Script(WRAPPERS[wrapper], script.build, own)
        if refusal:
            raises(Exception, refusal, script, wrapped)
            # A receive that is dropped before its message arrives spoils the group for later rows.
            wrapped.model.zero_grad()
            continue
        plain = Script(not_wrapped, script.build, batch)
        script(plain)
        script(wrapped)
        expected = plain.result()
        found = wrapped.result()
        for n, t in expected.items():
            if not torch.allclose(found[n], t, rtol=1e-4, atol=1e-5):
                fact = difference(n, expected, found[n])
                raise AssertionError(f"{wrapper}: in the end {n} {fact}")


def not_wrapped(module):
    return module


# -------------------------------------------------------------------------------------------------
# 8. model.py


def llama_logits(gpt, idx):
    """The logits of a Llama by its definition, a head at a time, from the weights of a GPT, where
    q, k and v, as well as gate and up, are the rows of one matrix."""
    c = gpt.config
    weights = gpt.state_dict()
    T = idx.size(1)
    hs = c.n_embd // c.n_head
    half = hs // 2
    angle = torch.arange(T)[:, None] * c.rope_theta ** (-torch.arange(0, hs, 2) / hs)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], c.norm_eps)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def turned(x):
        a = x[..., :half]
        b = x[..., half:]
        first = a * angle.cos() - b * angle.sin()
        second = b * angle.cos() + a * angle.sin()
        return torch.cat((first, second), -1)

    x = weights["wte.weight"][idx]
    for i in range(c.n_layer):
        name = f"blocks.{i}"
        rows = linear(norm(x, f"{name}.attn_norm"), f"{name}.attn.qkv")
        parts = rows.split(hs, dim=-1)
        heads = []
        for h in range(c.n_head):
            k = c.n_head + h * c.n_kv_head // c.n_head  # its key, and n_kv_head later its value
            scores = turned(parts[h]) @ turned(parts[k]).transpose(-2, -1) / math.sqrt(hs)
            weight = scores.masked_fill(future, -math.inf).softmax(-1)
            heads.append(weight @ parts[k + c.n_kv_head])
        x = x + linear(torch.cat(heads, -1), f"{name}.attn.proj")
        rows = linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.gate_up")
        gate, up = rows.chunk(2, dim=-1)
        x = x + linear(gate * gate.sigmoid() * up, f"{name}.mlp.down")
    return linear(norm(x, "norm"), "lm_head")


VARIANTS = {"plain": {}, "explicit": dict(attention="explicit"), "compiled": {},
            "recomputed": dict(activation_checkpointing=True)}


@check(dict(W=1, backend="aot_eager"), *only_full(grid(W=(1,), backend=("inductor",))),
       limit_s=180)
def model_is_a_llama(backend):
    """Logits are a Llama's by its definition, and the loss is the mean of their cross-entropies.
    Explicit attention and torch.compile of each block change loss and gradients by rounding only,
    recomputing blocks changes no bit. (With a C++ compiler by --full: that takes a minute.)"""
    idx = torch.arange(32).view(2, 16)
    found = {}
    calls = {}
    targets = idx.roll(-1).masked_fill(idx < 3, -1)
    for how, options in VARIANTS.items():
        gpt = small_gpt(tied=False, n_layer=1, **options)
        gpt.norm.weight.data += torch.arange(24) / 24  # or it would be ones
        if how == "compiled":
            compile = partial(torch.compile, backend=backend)
            with mock.patch.object(torch, "compile", compile):
                gpt.compile_blocks()
        with torch.profiler.profile() as profiler:
            logits, loss = gpt(idx, targets)
            loss.backward()
        found[how] = {"logits": logits.detach(), **{n: p.grad for n, p in gpt.named_parameters()}}
        names = [event.name for event in profiler.events()]
        calls[how] = names.count("aten::scaled_dot_product_attention")
        expected = llama_logits(gpt, idx)
        nats = F.nll_loss(expected.log_softmax(-1).transpose(1, 2), targets, ignore_index=-1)
        assert torch.allclose(logits, expected, atol=1e-5), f"{how}: the logits are no Llama's"
        assert torch.allclose(loss, nats, atol=1e-5), f"{how}: loss {loss:.4f}, not {nats:.4f}"
        for n, t in found["plain"].items():
            assert torch.allclose(t, found[how][n], atol=1e-5), f"{how}: {n} differs from plain"
    assert calls["plain"] == 1, f"plain calls SDPA {calls['plain']} times"
    assert calls["explicit"] == 0, "explicit attention calls SDPA"
    assert calls["recomputed"] == 2, f"a recomputed block calls SDPA {calls['recomputed']} times"
    same_bits(found["plain"], found["recomputed"], "recomputed")
    assert gpt.generate(idx, 3, top_k=2).shape == (2, 19), "three tokens were to be added"
    likeliest = llama_logits(gpt, idx)[:, -1].argmax(-1)
    for options in (dict(temperature=0), dict(top_k=1)):
        found = gpt.generate(idx, 1, **options)[:, -1]
        assert torch.equal(found, likeliest), f"{options}: not the likeliest token"


# In millions of parameters.
SIZES = {"tiny": 7.2, "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558,
         "1b": 1e3, "7b": 7e3}


@check(dict(W=1))
def model_is_as_named():
    """Presets have their sizes, and a token its FLOPs; weights come from (seed, name), not from the
    random state, the order, the depth or meta."""
    for name, millions in SIZES.items():
        gpt = on_meta(GPT, GPTConfig(vocab_size=50257, **PRESETS[name]))
        N = sum(p.numel() for p in gpt.parameters())
        c = gpt.config
        assert abs(N / millions / 1e6 - 1) < 0.06, f"{name} has {N:,} parameters"
        # PaLM, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T
        assert gpt.flops_per_token() == 6 * N + 12 * c.n_layer * c.n_embd * c.block_size
    gpt = small_gpt()
    late = on_meta(small_gpt).to_empty(device="cpu")
    first, second = gpt.blocks
    assert not torch.equal(first.mlp.down.weight, second.mlp.down.weight), "blocks are alike"
    late.init_weights()
    same_bits(gpt.state_dict(), late.state_dict(), "from meta")
    deeper = small_gpt(n_layer=3).state_dict()
    other = small_gpt(seed=1).state_dict()
    for n, p in gpt.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), f"{n} is not ones"
            continue
        is_residual = "proj" in n or "down" in n  # their variance depends on the depth
        assert torch.equal(p, deeper[n]) != is_residual, f"{n}: in a model of three blocks"
        assert not torch.equal(p, other[n]), f"{n} does not depend on the seed"
        variance = 1 / (3 * p.size(-1)) / (2 * 2 if is_residual else 1)
        ratio = p.var().item() / variance
        assert 0.8 < ratio < 1.25, f"{n}: the variance is {ratio:.2f} times what it should be"


# -------------------------------------------------------------------------------------------------
# 9. train.py: runs, and faults planted in them
#
# A run is `python train.py FLAGS`, or what torchrun makes of it, in processes forked from the
# server. Before train.py begins, a plant may change what it finds: an optimizer whose second update
# kills the process, a loss that becomes nan. A plant is a function that can be pickled.

# A rate so high, and constant, that any difference shows in the hash after four steps. Everything
# is evaluated and compared over ranks in each of them.
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, micro_batch_size=1, global_batch_size=2,
            max_steps=4, device="cpu", min_lr=0.01, warmup_steps=2, eval_steps=2, eval_interval=1,
            lr=0.01, sample_tokens=4, save_interval=0, check_interval=1, dataset=HERE / "model.py")
LIMIT_S = 60  # of a run


def flags(**options):
    """A command line for a run of milliseconds; an option that is None is left out."""
    words = []
    for name, value in {**TINY, **options}.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def nothing():
    """No plant."""


def execute(argv, folder, environment, plant):
    """train.py in this process, as `python train.py argv` runs it; its output goes to files."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.update(environment)
    sys.argv = ["train.py", *map(str, argv)]
    gc.freeze()  # a collection would touch, and so copy, all that the server has loaded
    plant()
    runpy.run_path(str(HERE / "train.py"), run_name="__main__")


@dataclasses.dataclass
class Run:
    """How a run has ended. Three lists, by rank."""
    codes: list
    stdout: list
    stderr: list

    def __str__(self):
        facts = []
        for rank, (code, text) in enumerate(zip(self.codes, self.stderr)):
            lines = text.splitlines() or ["nothing"]
            facts.append(f"rank {rank} ended with {code} and wrote: {' | '.join(lines[-3:])}")
        return "; ".join(facts)


def run_train(out_dir, W=1, plant=nothing, argv=None, **options):
    """Run train.py on W ranks as torchrun starts them or, with W = 1, as python does; forked from
    the server, which takes a tenth of the time. -> a Run.

    plant: called first on every rank. argv: instead of options. As torchrun, sends SIGTERM to the
    others soon after a rank has failed, and SIGKILL to what is left 6 s later, or after a minute in
    all.
    """
    words = flags(out_dir=out_dir, **options) if argv is None else argv
    folder = pathlib.Path(tempfile.mkdtemp())
    processes = []
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank in range(W):
        (folder / str(rank)).mkdir()
        environment = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(W),
                           LOCAL_WORLD_SIZE=str(W), MASTER_ADDR="localhost",
                           MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
        arguments = words, str(folder / str(rank)), environment if W > 1 else {}, plant
        process = fork_server().Process(target=execute, args=arguments)
        process.start()
        # Or another thread's next start() may read the exit code first, and here it would be 255.
        multiprocessing.process._children.discard(process)
        processes.append(process)
    start_s = time.monotonic()
    wait_for_end(processes)
    seconds = time.monotonic() - start_s
    run = Run([], [], [])
    for rank, process in enumerate(processes):
        is_late = process.exitcode is None
        process.kill()
        process.join()
        note = f"verify.py: killed after {seconds:.0f} s" if is_late else ""
        run.codes.append(process.exitcode)
        run.stdout.append((folder / str(rank) / "stdout").read_text(errors="replace"))
        run.stderr.append((folder / str(rank) / "stderr").read_text(errors="replace") + note)
    shutil.rmtree(folder)
    return run


def wait_for_end(processes):
    """Wait until all have ended, or their time is over."""
    deadline = time.monotonic() + LIMIT_S
    has_ended_others = False
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes:
            return
        if any(codes) and not has_ended_others:
            time.sleep(0.5)  # those that end by themselves may do so
            has_ended_others = True
            deadline = time.monotonic() + 6
            for process in processes:
                process.terminate()
        time.sleep(0.01)


def finish(out_dir, W=1, status=0, fact="^$", **options):
    """RESULT and stdout of a run that has to end on all ranks with this status and without a
    traceback; what rank 0 writes to stderr has to match fact."""
    run = run_train(out_dir, W, **options)
    assert run.codes == [status] * W, run
    assert re.search(fact, run.stderr[0]), f"no {fact!r}: {run}"
    assert "Traceback" not in "".join(run.stderr), "".join(run.stderr)
    results = re.findall(r"^RESULT (.*)\n\Z", run.stdout[0], re.MULTILINE)
    result = json.loads(results[0]) if results else {}
    return dict(result, stdout=run.stdout[0])


def refused(fact, out_dir, W=1, status=2, **options):
    """Assert that a run ends with one line of rank 0 that matches fact."""
    finish(out_dir, W, status, rf"\Atrain\.py: .*{fact}.*\n\Z", **options)


@contextmanager
def temporary():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def lines_of(path):
    return [json.loads(line) for line in open(path)]


def write_line(path, value):
    with open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


def saved(out_dir):
    """The steps of the checkpoints in out_dir."""
    return sorted(int(path.name[5:]) for path in out_dir.glob("step_*"))


def this_rank():
    return int(os.environ.get("RANK", 0))


def in_update(n, on_rank, act, *arguments):
    """Plant act(*arguments), or act(optimizer) without any, on a rank, or None for all, before its
    n-th update.

    AdamW.step is what every mode calls once in a step, between the collectives of the backward and
    those of the next forward, so the others wait for the rank to which something happens here.
    """
    update = torch.optim.AdamW.step
    calls = itertools.count(1)

    def step(optimizer, *closure):
        if next(calls) == n and on_rank in (None, this_rank()):
            act(*(arguments or [optimizer]))
        return update(optimizer, *closure)

    torch.optim.AdamW.step = step


def spoil(function, calls, value):
    """Plant value in some calls of rank 1: with F.cross_entropy in the loss, whose gradients stay
    sound; with F.embedding in one element of a gradient, and so in the shard of one rank.

    Both are what only one rank sees, while all have to decide alike.
    """
    real = getattr(F, function)
    n = itertools.count(1)

    def spoiled(*arguments, **options):
        found = real(*arguments, **options)
        if torch.is_grad_enabled() and next(n) in calls and this_rank() == 1:
            bad = torch.zeros_like(found)
            bad.view(-1)[0] = value
            if function == "embedding":
                found.register_hook(bad.add)
            else:
                found.data.add_(bad)
        return found

    setattr(F, function, spoiled)


def fail(text):
    raise RuntimeError(text)


def flip_a_bit(optimizer):
    part = optimizer.param_groups[0]["params"][0].detach()
    part.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << 7)


def record_trackers():
    """Plant stand-ins for the packages of trackers, which note the losses that they are given."""
    [path] = [f"{word[10:]}/losses" for word in sys.argv if word.startswith("--out_dir=")]

    def log(entry, step):
        write_line(path, ["wandb", step, entry["loss"]])

    def add_scalar(name, value, step):
        if name == "loss":
            write_line(path, [name, step, value])

    tracker = mock.MagicMock(__spec__="a stand-in")
    tracker.init.return_value.log.side_effect = log
    tracker.SummaryWriter.return_value.add_scalar.side_effect = add_scalar
    sys.modules |= dict.fromkeys(("wandb", "tensorboard", "torch.utils.tensorboard"), tracker)


# -------------------------------------------------------------------------------------------------
# 10. train.py: stories
#
# A story is a list of legs, each a run that goes on with what the one before has left. Most have
# one leg. All stories of a family have to end on the same bits, losses and sample text, those of
# another family on others: so modes are compared, world sizes, options, resuming, and faults.

MODES = ("single", "naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-fsdp")
ON_RANKS = MODES[1:]
OURS_ON_RANKS = ("naive", "ddp", "zero1", "zero2", "zero3")


@dataclasses.dataclass(eq=False)
class Story:
    family: object
    name: str
    legs: list
    is_sampled: bool  # or only told with --full

    def __str__(self):
        return f"{self.family.name}: {self.name}"


class Family:
    """Stories that have to end on the same bits. The first one is what others are compared with."""

    def __init__(self, name):
        self.name = name
        self.stories = []
        self.lock = threading.Lock()
        self.first_end = None

    def expected(self):
        """How the first story ends, which is told once."""
        with self.lock:
            if self.first_end is None:
                self.first_end = tell(self.stories[0])
            return self.first_end


FAMILIES = {}  # {name: Family}
STORY_ROWS = []


def add_story(family, name, *legs, is_sampled=True):
    """Add a story to a family."""
    family = FAMILIES.setdefault(family, Family(family))
    story = Story(family, name, legs, is_sampled)
    family.stories.append(story)
    STORY_ROWS.append(dict(W=0, story=story, only_full=not is_sampled))


def one(family, W, mode, is_sampled=True, **options):
    """A story of one leg."""
    facts = [f"{name} {value}" for name, value in options.items() if name != "plant"]
    name = ", ".join([f"{mode} on {W}", *facts])
    add_story(family, name, dict(W=W, mode=mode, **options), is_sampled=is_sampled)


def chain(family, *legs, is_sampled=True, **options):
    """A story of legs (mode, W), a step each."""
    runs = []
    for step, (mode, W) in enumerate(legs, start=1):
        runs.append(dict(mode=mode, W=W, max_steps=step, save_interval=1, resume="auto", **options))
    name = ", ".join(f"{mode} on {W}" for mode, W in legs)
    add_story(family, name, *runs, is_sampled=is_sampled)


def disturbed(mode, status, fact, on_rank, act, *arguments):
    """A run of two ranks that ends in its second or third step, and one that goes on.

    status: of rank 0. fact: what its stderr has to match. The others say what is planted.
    """
    options = dict(W=2, mode=mode, save_interval=1, resume="auto")
    plant = partial(in_update, 2, on_rank, act, *arguments)
    words = [getattr(argument, "name", str(argument)) for argument in arguments]
    what = " ".join([act.__name__, *words])
    add_story("two", f"{mode} on 2, rank {on_rank}: {what}",
         dict(options, timeout_s=3, status=status, fact=fact, plant=plant), options)


# Stages 2 and 3 add as one process does, for any W x micro-steps = 12, or 60.
one("any W", 1, "single", global_batch_size=12)
one("any W, 60", 1, "single", is_sampled=False, global_batch_size=60)
for W, sampled in ((2, "zero2"), (3, "zero3"), (4, "zero2"), (6, "zero3")):
    for mode in ("zero2", "zero3"):
        one("any W", W, mode, mode == sampled, global_batch_size=12)
for W in (2, 3, 4, 5, 6, 10, 12):
    for mode in ("zero2", "zero3"):
        one("any W, 60", W, mode, is_sampled=False, global_batch_size=60)
# Muon: each matrix is updated by the rank that owns it. Elastic, and from any mode to any other.
MUON = dict(optimizer="muon", global_batch_size=6)
one("muon", 1, "single", **MUON)
for W, sampled in ((2, "zero3"), (3, "zero2"), (6, "zero3")):
    for mode in ("zero2", "zero3"):
        one("muon", W, mode, mode == sampled, **MUON)
for mode in ("naive", "ddp", "zero1"):
    one("muon", 6, mode, False, **MUON)
for W, mode in ((1, "single"), (2, "torch-ddp"), (2, "ddp")):
    one("muon, 2 at once", W, mode, False, optimizer="muon", global_batch_size=2)
one("muon, every W", 1, "single", max_steps=5, **MUON)
chain("muon, every W", ("zero3", 3), ("zero3", 2), ("zero2", 3), ("single", 1), ("zero3", 6),
      **MUON)
one("not clipped", 1, "single", global_batch_size=15, grad_clip=0)
one("not clipped", 3, "zero2", False, global_batch_size=15, grad_clip=0)
one("not clipped", 5, "zero3", global_batch_size=15, grad_clip=0)
one("not clipped", 15, "zero3", False, global_batch_size=15, grad_clip=0)

# The others do so with one micro-step a rank.
for N, sampled in ((3, "naive"), (4, "zero3"), (5, "ddp"), (6, "zero1"), (9, None)):
    family = f"{N} at once"
    for mode in MODES:
        is_sampled = sampled is not None and (mode == "single" or (N, mode) == (4, "torch-fsdp"))
        one(family, 1, mode, is_sampled, global_batch_size=N)
    for mode in OURS_ON_RANKS:
        one(family, N, mode, mode == sampled, global_batch_size=N)

# With two they add a rank's own first.
for mode in ("torch-fsdp", "zero1", "naive", "ddp", "torch-ddp"):
    one("ranks first", 2, mode, mode in ("torch-fsdp", "zero1"), global_batch_size=4)

# One micro-step a rank, options that change no bit, and faults.
LOST = r"train\.py: .*step [23]\b"
one("two", 1, "single")
for mode in ON_RANKS:
    one("two", 2, mode, is_sampled=False)
one("two", 2, "ddp", comm_hook="hierarchical", node_size=1, bucket_cap_mb=0.001)
one("two", 2, "ddp", comm_hook="topk", topk_ratio=1.0, find_unused_parameters=True)
one("two", 2, "zero3", activation_checkpointing=True, profile=2, wandb=True, tensorboard=True,
    plant=record_trackers)
for mode in ("ddp", "zero2", "zero3"):
    one("two", 2, mode, mode == "zero3", trace=True)
one("two", 2, "torch-zero1")
one("two", 2, "torch-fsdp-kept", is_sampled=False)
one("two", 2, "zero3", shard_size=1, offload=True)
one("two", 2, "zero2", shard_size=2)
disturbed("zero3", 1, LOST, 1, math.sqrt, -1)  # raises
disturbed("zero1", 1, LOST, 1, time.sleep, 60)
# What gloo says when this rank was frozen for longer than the time limit.
disturbed("zero2", 1, "step 2: .*pair closure", 0, fail,
          "Application timeout caused pair closure")
disturbed("ddp", 1, LOST, 1, signal.raise_signal, signal.SIGKILL)
disturbed("zero3", 1, LOST, 1, signal.raise_signal, signal.SIGSTOP)
disturbed("zero3", 0, "step [23]", 1, signal.raise_signal, signal.SIGTERM)
disturbed("ddp", 0, "step [23]", 0, signal.raise_signal, signal.SIGINT)
disturbed("zero2", 1, "step 2.*File too large", 1, resource.setrlimit, resource.RLIMIT_FSIZE,
          (10_000, 10_000))

# What was held for a moment before the run does not count.
one("largest micro batch", 1, "single", global_batch_size=4, micro_batch_size=4)
one("largest micro batch", 1, "single", global_batch_size=4, micro_batch_size="auto",
    memory_limit_gb=1.2, plant=partial(np.ones, 2 * 10**8))

# From an evaluated step of any mode and world size to any other.
chain("two", ("zero3", 2), ("torch-fsdp", 2), ("zero1", 2), ("ddp", 2))
one("all modes", 1, "single", is_sampled=False, max_steps=9)
chain("all modes", *((mode, 2) for mode in (*ON_RANKS, "torch-fsdp", "naive")), is_sampled=False)
one("every W", 1, "single", max_steps=5, global_batch_size=12)
chain("every W", ("zero3", 4), ("zero2", 3), ("single", 1), ("zero3", 6), ("zero2", 2),
      global_batch_size=12)

# Numbers of 16 bits, and comm hooks.
for mode in MODES:
    W = 1 if mode == "single" else 2
    one("dtype bf16", W, mode, mode in ("single", "ddp", "zero2"), dtype="bf16")
    one("dtype fp16", W, mode, mode in ("single", "ddp", "zero3"), dtype="fp16")
for mode in STAGES:
    one("param_dtype bf16", 2, mode, mode != "zero3", param_dtype="bf16")
    one("param_dtype fp16", 2, mode, False, param_dtype="fp16")
    one("reduce_dtype bf16", 2, mode, mode != "zero3", reduce_dtype="bf16")
for hook in ("bf16", "powersgd", "topk"):
    one(f"comm_hook {hook}", 2, "ddp", hook == "topk", comm_hook=hook)
# What top-k has not sent yet goes on with the run; new ranks have nothing of it.
chain("comm_hook topk", *4 * [("ddp", 2)], comm_hook="topk")
chain("joined", ("ddp", 2), ("ddp", 4), comm_hook="topk", global_batch_size=4)

# A nan or an inf on one rank in steps 2 and 3: skipped by all, who in fp16 halve the scale.
for mode in ("ddp", "zero3", "zero2", "naive", "zero1", "torch-ddp", "torch-fsdp"):
    one("nan", 2, mode, mode in ("ddp", "zero3"),
        plant=partial(spoil, "cross_entropy", (2, 3), math.nan))
    one("inf", 2, mode, mode in ("ddp", "zero3", "zero2"), dtype="fp16",
        plant=partial(spoil, "embedding", (2, 3), math.inf))


def tell(story):
    """Run a story -> {what its family shares: value}: the hash, sample text and losses."""
    with temporary() as folder:
        for leg in story.legs:
            if "fact" in leg:  # rank 0 speaks; a rank that is lost may end in any way
                leg = dict(leg)
                status = leg.pop("status")
                fact = leg.pop("fact")
                run = run_train(folder, **leg)
                assert run.codes[0] == status and re.search(fact, run.stderr[0]), run
                assert "Traceback" not in run.stderr[0], run.stderr[0]
                unfinished = [*folder.glob(".run_*/*")]
                assert "File" not in fact or not unfinished, f"unfinished files: {unfinished}"
            else:
                result = finish(folder, **leg)
        promised(folder, result, **{"max_steps": 4, **leg})
        entries = lines_of(folder / "metrics.jsonl")
    end = {}
    for entry in entries:
        for name in ("loss", "val_loss"):
            end[f"{name} of step {entry['step']}"] = entry[name]
    end["sample"] = re.search(r"sample:.*(?=RESULT)", result["stdout"], re.DOTALL)[0]
    for name in ("train_loss", "val_loss", "param_sha256"):
        end[name] = result[name]
    return end


METRICS = {"step", "loss", "lr", "grad_norm", "param_norm", "val_loss", "tokens_per_sec",
           "step_ms", "comm_exposed_ms", "mfu", "mem_bytes"}
RESULT = {"mode", "world_size", "steps", "train_loss", "val_loss", "tokens_per_sec", "step_ms",
          "comm_exposed_ms", "peak_mem_bytes", "bytes_per_param", "param_sha256", "threads"}
# Of a parameter: those that a rank holds, and those that are divided among ranks.
BYTES = {"zero1": (8, 8), "zero2": (4, 12), "zero3": (0, 16), "torch-fsdp": (0, 16),
         "torch-zero1": (8, 8), "torch-fsdp-kept": (0, 16),
         "zero1 param_dtype": (6, 12), "zero2 param_dtype": (2, 16), "zero1 reduce_dtype": (4, 12)}


def promised(folder, result, W, mode, max_steps, shard_size=None, profile=0, **options):
    """Assert that metrics.jsonl, RESULT, traces, trackers and memory are as documented.

    A step that was skipped, for a nan or an inf, has no loss or norm and leaves the parameters'
    norm as it was. Memory may differ from its formula by 2 %, the rounding of shards; torch alone
    takes more than 100 MB.
    """
    entries = lines_of(folder / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == list(range(1, max_steps + 1))
    for before, entry in itertools.pairwise(entries):
        is_skipped = entry["param_norm"] == before["param_norm"]
        assert is_skipped == (None in (entry["loss"], entry["grad_norm"])), entry
        assert METRICS <= entry.keys() and entry["mem_bytes"] > 1e8, entry
        assert 0 <= (entry["comm_exposed_ms"] or 0) <= entry["step_ms"], entry
    loss = entries[0]["loss"]
    val_loss = entries[0]["val_loss"]
    assert abs(loss - val_loss) < 0.5, f"in step 1 loss is {loss}, and val_loss {val_loss}"
    assert RESULT <= result.keys() and result["peak_mem_bytes"] > 1e8, result
    assert ("torch" in mode) == (result["comm_exposed_ms"] is None), result
    facts = dict(mode=mode, world_size=W, steps=max_steps, threads=1,
                 val_loss=entries[-1]["val_loss"])
    found = {name: result[name] for name in facts}
    assert found == facts, f"RESULT has {found}, expected are {facts}"
    kind = mode
    for name in ("param_dtype", "reduce_dtype"):
        if f"{mode} {name}" in BYTES and name in options:
            kind = f"{mode} {name}"
    whole, sharded = BYTES.get(kind, (16, 0))
    expected = whole + sharded / (W if shard_size is None else shard_size)
    found = result["bytes_per_param"]
    if options.get("optimizer") == "muon":
        # One number of state for a matrix of blocks, not two; and its owner has all of it.
        least, most = expected - 4, 1.5 * expected
    else:
        least, most = 0.98 * expected, 1.02 * expected
    assert least < found < most, f"{found} bytes a parameter, expected are {least} to {most}"
    traces = [path.read_text() for path in folder.glob("*trace*")]
    assert len(traces) == (W if profile else 0), f"{len(traces)} traces"
    for trace in traces:
        assert all(kind in trace for kind in ("gather", "reduce", "wait")), "ranges without a name"
        assert len(set(re.findall(r"ProfilerStep#\d+", trace))) == profile, "steps in a trace"
    if "trace" in options:
        ranges = ranges_of_trace(result["stdout"])
        assert [*ranges] == [*range(W)], f"the trace has ranks {[*ranges]}"
        for found in ranges.values():
            assert_sensible(found, mode)
    if "wandb" in options:
        expected = []
        for entry in entries:
            expected += [[name, entry["step"], entry["loss"]] for name in ("loss", "wandb")]
        assert lines_of(folder / "losses") == expected, "trackers get other losses"


def ranges_of_trace(printed):
    """{rank: [(milliseconds, kind, what)]} of what --trace prints."""
    ranges = defaultdict(list)
    for rank, ms, kind, what in re.findall(r"^rank (\d) +([\d.]+) ms  (\w+): (.*)$", printed, re.M):
        ranges[int(rank)].append((float(ms), kind, what))
    return ranges


def assert_sensible(ranges, mode):
    """Assert that a step of two blocks comes in the order of time, that what is started is waited
    for, or freed, and that this is what the mode does: ddp reduces buckets, the stages unshard
    units, stage 2 frees gradients, and stage 3 also units, at the end all of them."""
    times = [ms for ms, _, _ in ranges]
    assert times == sorted(times) and times[0] >= 0, f"not in order: {times}"
    of_kind = defaultdict(list)
    for _, kind, what in ranges:
        what = re.sub(r", [\d.]+ ms$", "", what)  # how long a wait took
        of_kind[kind].append(what)
    assert of_kind["forward"] == ["blocks.0", "blocks.1"], of_kind
    assert of_kind["backward"] == ["blocks.1", "blocks.0"], of_kind
    assert of_kind["update"] == ["AdamW"], of_kind
    reduced = {what for what in of_kind["start"] if what.startswith("reduce the bucket")}
    assert reduced and set(of_kind["start"]) <= set(of_kind["wait"]), of_kind
    assert all(what.endswith(" MB)") for what in of_kind["start"]), of_kind
    units = {what.removeprefix("unshard ") for what in of_kind["start"]} - reduced
    freed = {what for what in of_kind["free"] if not what.startswith("gradients")}
    freed_gradients = set(of_kind["free"]) - freed
    assert len(units) == (3 if mode in STAGES else 0), f"units {units}"
    assert len(freed_gradients) == (len(reduced) if mode in ("zero2", "zero3") else 0), of_kind
    assert freed == (units if mode == "zero3" else set()), f"{units} are unsharded, freed {freed}"


@check(*STORY_ROWS)
def stories_of_a_family_agree(story):
    """Modes, world sizes and options that promise the same bits end on the same param_sha256,
    losses (means over all ranks) and sample; so does a run that is resumed in another mode or at
    another world size, or whose rank raises, dies, hangs, is told to stop or has a full disk: it
    ends in time, and says in which step. metrics.jsonl, RESULT and traces are as documented."""
    is_first = story is story.family.stories[0]
    found = None if is_first else tell(story)
    expected = story.family.expected()
    for what, value in expected.items():
        assert is_first or found[what] == value, (
            f"{what} is {found[what]}, in {story.family.stories[0]} {value}")


@check(dict(W=0))
def families_differ():
    """Stories of different families end on different bits: so agreement says something."""
    family_of = {}
    for name, family in FAMILIES.items():
        if family.stories[0].is_sampled:
            digest = family.expected()["param_sha256"]
            assert digest not in family_of, f"{name} ends on the bits of {family_of[digest]}"
            family_of[digest] = name


def die_in(*functions):
    """Kill this process as `kill -9` does when it next calls one of os's functions."""
    def die(*_, **__):
        signal.raise_signal(signal.SIGKILL)

    for name in functions:
        setattr(os, name, die)


@dataclasses.dataclass
class Event:
    steps: int
    plants: list  # in a node of two ranks and, if there are two, in another node of one rank
    worlds: list  # how many ranks the run has, in turn


EVENTS = {
    "rank 0 dies in fsync": Event(4, [partial(in_update, 3, 0, die_in, "fsync")], [2, 2]),
    "rank 0 dies in rename": Event(8, [partial(in_update, 3, 0, die_in, "rename", "replace")],
                                   [2, 2, 2, 2]),
    "a node dies": Event(4, [nothing, partial(in_update, 3, None, os.killpg, 0, signal.SIGKILL)],
                         [3, 2]),
    # The rank that pauses ends by SIGTERM.
    "a node joins": Event(4, [partial(in_update, 3, 0, signal.pause), nothing], [2, 3])}


def under_torchrun(folder, plant, n_ranks, n_nodes, port, **options):
    """torchrun's agent on a node, with three restarts; ranks are forked, not started anew."""
    config = LaunchConfig(min_nodes=1, max_nodes=n_nodes, nproc_per_node=n_ranks, run_id="verify",
                          rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}", max_restarts=3,
                          rdzv_configs=dict(last_call_timeout=3, keep_alive_interval=1),
                          monitor_interval=0.1, start_method="fork")
    os.setpgid(0, 0)  # to be killed together with its ranks
    os.dup2(os.open(f"{folder}/agent", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    if options["resume"]:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or a node that joins waits
    elastic_launch(config, execute)(flags(**options), folder, {}, plant)


@check(*grid(W=(0,), event=("rank 0 dies in fsync", "a node dies")),
       *only_full(grid(W=(0,), event=("rank 0 dies in rename", "a node joins"))))
def torchrun_goes_on(event):
    """After kill -9 of a rank in the middle of a checkpoint, or of a whole node, and when a node
    joins, torchrun starts all ranks again, as many as there are: they resume by themselves, never
    from an earlier run's checkpoints, and end on the bits of one process."""
    joins = event == "a node joins"
    event = EVENTS[event]
    with temporary() as folder:
        out = folder / "out"
        options = dict(max_steps=event.steps, save_interval=1, global_batch_size=6)
        expected = finish(folder / "alone", **options)["param_sha256"]
        if not joins:
            finish(out, save_interval=4, max_steps=20, seed=3)  # another run's remains
        # Agents that a node joins have stores of their own, and tell a restart by the checkpoint.
        options |= dict(mode="zero3", resume="auto" if joins else None, out_dir=out)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        agents = []
        for plant, n_ranks in zip(event.plants, (2, 1)):
            arguments = folder, plant, n_ranks, len(event.plants), store.port
            agents.append(fork_server().Process(target=under_torchrun, args=arguments,
                                                kwargs=options))
            agents[-1].start()
            while joins and not (out / "metrics.jsonl").exists():
                time.sleep(0.1)
        for agent in agents:
            agent.join(60)
        printed = (folder / "stdout").read_text()
        entries = lines_of(out / "metrics.jsonl")
    found = re.findall(r"^resumed.* on (\d) ranks \((\d) before\)$", printed, re.MULTILINE)
    restarts = [(str(now), str(before)) for before, now in itertools.pairwise(event.worlds)]
    assert found == restarts, f"restarts (now, before) {found}, expected {restarts}: {printed}"
    assert agents[0].exitcode == 0, f"the agent ended with {agents[0].exitcode}: {printed[-2000:]}"
    assert f'"param_sha256": "{expected}"' in printed, f"other bits than {expected}: {printed}"
    assert [entry["step"] for entry in entries] == [*range(1, event.steps + 1)]


# -------------------------------------------------------------------------------------------------
# 11. train.py: data, rates, and the files of a run


def log_batches(folder):
    """Plant a log of all micro batches that a run trains on."""
    forward = GPT.forward

    def logged(gpt, idx, targets=None):
        if torch.is_grad_enabled():
            write_line(folder / "batches", (idx.tolist(), targets.tolist()))
        return forward(gpt, idx, targets)

    GPT.forward = logged


def sha256_of(module):
    """As the README defines param_sha256."""
    digest = hashlib.sha256()
    for p in module.parameters():
        digest.update((p.detach() + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
    return digest.hexdigest()


@check(dict(W=0))
def a_run_is_a_plain_loop():
    """train.py in one process ends on the bits of these lines: the sum of micro batches, divided
    once, clipped, by AdamW at the rate of metrics.jsonl. Other modes are compared with it."""
    n = 3  # micro batches of a step
    with temporary() as folder:
        result = finish(folder / "out", global_batch_size=n, seed=5, beta1=0.9, beta2=0.99,
                        weight_decay=0.1, grad_clip=MAX_NORM, plant=partial(log_batches, folder))
        batches = lines_of(folder / "batches")
        entries = lines_of(folder / "out/metrics.jsonl")
    gpt = GPT(GPTConfig(seed=5, vocab_size=257, n_layer=2, n_head=2, n_embd=16, block_size=16,
                        n_kv_head=2))
    optimizer = adamw(gpt.parameters(), betas=(0.9, 0.99))
    for step, entry in enumerate(entries):
        losses = []
        for idx, targets in batches[n * step:n * step + n]:
            _, loss = gpt(torch.tensor(idx), torch.tensor(targets))
            loss.backward()
            losses.append(loss.item())
        norm = clip_by_hand([p.grad for p in gpt.parameters()], divide_by=n)
        for group in optimizer.param_groups:
            group["lr"] = entry["lr"]
        optimizer.step()
        optimizer.zero_grad()
        for name, value in (("loss", sum(losses) / n), ("grad_norm", norm.item())):
            ratio = entry[name] / value
            assert abs(ratio - 1) < 1e-12, f"step {step + 1}: {name} is {ratio:.8f} x expected"
    assert len(batches) == n * len(entries), f"{len(batches)} micro batches in {len(entries)} steps"
    assert result["param_sha256"] == sha256_of(gpt), "other bits"


def log_samples(folder):
    """Plant a log of the blocks that a run trains on, whose first two targets are their numbers."""
    cross_entropy = F.cross_entropy

    def logged(logits, targets, **_):
        if torch.is_grad_enabled():
            numbers = 256 * targets[::4] + targets[1::4]
            write_line(folder / "order", numbers.tolist())
        return cross_entropy(logits, targets)

    F.cross_entropy = logged


@check(dict(W=0))
def data_and_rates_are_as_promised():
    """No sample comes twice in an epoch, and epochs have another order. nanoGPT's folders are read.
    Warm-up is linear, then a cosine. (That ranks take the samples in this order is what the hashes
    of any number of ranks show.)"""
    n = 50
    batch = 12
    steps = 8
    tokens = [0]
    for i in range(n):
        tokens += i // 256, i % 256, 0, 0
    with temporary() as folder:
        for name, ids in (("train.bin", tokens), ("val.bin", tokens[:5])):  # 50 blocks, and one
            np.array(ids, dtype=np.uint16).tofile(folder / name)
        finish(folder / "out", dataset=folder, block_size=4, global_batch_size=batch, eval_steps=1,
               micro_batch_size=2, max_steps=steps, min_lr=0.001,
               plant=partial(log_samples, folder))
        order = []
        for numbers in lines_of(folder / "order"):
            order += numbers
        for step, entry in enumerate(lines_of(folder / "out/metrics.jsonl")):
            cosine = 0.001 + 0.009 * (1 + math.cos(math.pi * (step - 2) / (steps - 2))) / 2
            lr = 0.01 * (step + 1) / 3 if step < 2 else cosine
            assert abs(entry["lr"] - lr) < 1e-9, f"step {step + 1}: lr {entry['lr']}, not {lr}"
        (folder / "text").write_text("a" * 9000 + "b" * 1000)
        ends = finish(folder / "out", dataset=folder / "text", max_steps=40, micro_batch_size=2,
                      eval_interval=40, eval_steps=99)
        assert ends["train_loss"] < 1 and ends["val_loss"] > 4, "the last tenth validates"
    assert len(order) == steps * batch, f"{len(order)} samples in {steps} steps of {batch}"
    in_epoch = n // batch * batch
    epochs = [order[i:i + in_epoch] for i in range(0, len(order), in_epoch)]
    assert epochs[0] != epochs[1], "epochs are alike, or y is x"
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch), "a sample came twice"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def make_unreadable(path):
    """As by a bad sector: to open a folder as a file is an OSError, too."""
    path.unlink()
    path.mkdir()


# What is no checkpoint of a run: a flag, its value and what the line names.
MISFITS = (("n_layer", 3, r"(blocks\.2|n_layer)"), ("n_embd", 32, "(wte.weight|n_embd)"),
           ("seed", 3, "seed"), ("block_size", 8, "block_size"), ("max_steps", 3, "steps"),
           ("global_batch_size", 8, "global_batch_size"), ("dataset", HERE / "ddp.py", "data"),
           ("optimizer", "muon", "optimizer"), ("resume", HERE, str(HERE)),
           ("resume", "nowhere", "nowhere"))


@check(dict(W=0))
def damaged_checkpoints_are_named():
    """Whichever file of a checkpoint is changed, cut off or missing is named, exit status 2;
    --resume auto says so and takes the one before, on the same bits. What is no checkpoint of this
    run is refused by name."""
    def try_out(name, damage):
        out = folder / f"{name} {damage.__name__}"
        shutil.copytree(sound, out, symlinks=True)
        damage(out / newest / name)
        refused(re.escape(name), out, **options, resume=out / newest)
        if damage in (flip, make_unreadable):
            result = finish(out, **options, resume="auto", fact=f"{newest}.*{name}")
            assert result["param_sha256"] == expected, f"after {name} was damaged: other bits"

    with temporary() as folder:
        sound = folder / "sound"
        newest = "step_00000004"
        options = dict(mode="zero2", save_interval=1, eval_steps=0)
        expected = finish(sound, 2, **options)["param_sha256"]
        names = sorted(path.name for path in (sound / newest).iterdir())
        assert '"scaler": {}' in (sound / newest / "checkpoint.json").read_text(), "fp32 is scaled"
        damages = (flip, os.remove, make_unreadable)
        two_at_a_time(try_out, *zip(*itertools.product(names, damages)))
        for name, value, fact in MISFITS:  # one at a time: they share a folder
            refused(fact, sound, **{**options, "resume": "auto", name: value})


@check(*grid(W=(3,), optimizer=("adafactor", "adamw")))
def checkpoints_keep_owned_state(optimizer):
    """What ranks save of uncut parameters is what one process has after the same step: weights,
    Adam's moments and steps, and Adafactor's rows and columns, which are no slices of anything."""
    import train

    def step_and_list(model, config):
        if optimizer == "adafactor":
            found = OPTIMIZERS[optimizer](model.parameters())
        else:
            found = train.make_optimizer(model, config)  # whose state is there before the step
        for number in range(3):
            if model is plain or number == dist.get_rank():
                zoo_loss(model, 0, number).backward()
        found.step()
        return train.checkpoint_tensors(model, found, plain, config)

    plain = fresh("gpt")
    config = train.Config(mode="single")
    train.add_our_interface(plain, config)
    expected = step_and_list(plain, config)
    model = uncut(Zero2, fresh("gpt"))
    model.set_gradient_divide_factor(1)
    saved_tensors = step_and_list(model, config)
    folders = [None]
    if dist.get_rank() == 0:
        folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    dcp.save(saved_tensors, checkpoint_id=folders[0])
    found = {}
    for key, t in expected.items():
        found[key] = torch.full_like(t, math.nan)
        vars(found[key]).update(vars(t))  # its place in the whole
    dcp.load(found, checkpoint_id=folders[0], no_dist=True)
    same_bits({key: t.as_subclass(torch.Tensor) for key, t in expected.items()},
              {key: t.as_subclass(torch.Tensor) for key, t in found.items()})
    dist.barrier()
    shutil.rmtree(folders[0], ignore_errors=True)


def contents(*folders):
    """What all files below folders hold."""
    found = set()
    for folder in folders:
        found |= {path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return found


@check(dict(W=0))
def out_dir_keeps_what_counts():
    """--keep_last newest checkpoints and the best one stay; metrics.jsonl goes back to where a run
    resumes; what a new run, or an older checkpoint, would cover is kept elsewhere."""
    with temporary() as folder:
        out = folder / "out"
        # A rate so high that an early evaluation is the best one.
        options = dict(max_steps=6, lr=3.0, min_lr=3.0, save_interval=1, keep_last=3)
        finish(out, **options)
        entries = lines_of(out / "metrics.jsonl")
        best = min(entries, key=lambda entry: entry["val_loss"])["step"]
        assert best < 4 and saved(out) == [best, 4, 5, 6], (
            f"the best step is {best}, and checkpoints are those of {saved(out)}")
        write_line(out / "metrics.jsonl", "torn")  # as by a kill
        for more, moved in ((dict(resume=out / "step_00000005"), "step_00000006"),
                            (dict(max_steps=2), "")):
            assert (out / "best").resolve().name == f"step_{best:08d}"
            before = contents(out / moved)
            result = finish(out, **{**options, **more})
            assert before <= contents(folder), f"something of {more} is lost"
            assert len(lines_of(out / "metrics.jsonl")) == result["steps"]


def view_of(folder):
    """{path: (content, time of the last change)} of all that is in folder."""
    view = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else os.listdir(path) if path.is_dir() else ""
        view[path] = content, path.lstat().st_mtime_ns
    return view


def ask(resume, W=1, **options):
    """RESULT and stdout of `train.py --resume RESUME --eval_only`, with no flags but these."""
    words = [f"--resume={resume}", "--eval_only"]
    for name, value in options.items():
        words.append(f"--{name}={value}")
    return finish(None, W, argv=words)


@check(dict(W=0))
def checkpoints_are_asked():
    """--eval_only takes model, data and precision from a checkpoint, an older one too, prints its
    validation loss, its hash and a text that continues --prompt, in any mode, on any number of
    ranks, and changes nothing in out_dir."""
    with temporary() as folder:
        out = folder / "out"
        trained = finish(out, 2, mode="zero2", save_interval=1, shard_size=1, keep_last=9, seed=5,
                         n_layer=1)
        losses = [entry["val_loss"] for entry in lines_of(out / "metrics.jsonl")]
        before = view_of(out)
        for name, W, step, options in (
                ("step_00000004", 1, 4, dict(prompt="def ")),
                ("step_00000002", 3, 2, dict(mode="torch-fsdp", prompt="\u00e9t\u00e9")),
                ("auto", 2, 4, dict(mode="ddp", prompt="", out_dir=out)),  # or no text at all
                ("best", 1, int((out / "best").resolve().name[5:]), dict(prompt="a" * 99))):
            found = ask(name if name == "auto" else out / name, W, **options)
            assert found["val_loss"] == losses[step - 1], f"{name}: {found['val_loss']}, {losses}"
            assert (found["param_sha256"] == trained["param_sha256"]) == (step == 4), name
            assert f"sample:\n{options['prompt']}" in found["stdout"], found["stdout"]
            assert view_of(out) == before, f"out_dir has changed after {name}"
        for word in (f"--resume={out}", f"--resume={out}/bes"):  # as people mistype it
            refused("no checkpoint.* did you mean .*step_00000004", None, argv=[word])
        refused("no checkpoint", None,
                argv=["--eval_only", "--resume=auto", f"--out_dir={folder}"])
        assert view_of(out) == before, "out_dir has changed"


@check(dict(W=0))
def resuming_takes_the_flags():
    """A run that resumes has the flags of its checkpoint, but for those that are given; it goes on
    in the folder of the checkpoint, and in the same run of Weights & Biases. So does one that
    torchrun starts again when that checkpoint is gone. In another mode, flags that only the old one
    has are dropped."""
    options = dict(W=2, mode="ddp", save_interval=1, global_batch_size=4, comm_hook="hierarchical",
                   node_size=1)
    with temporary() as folder:
        alone = finish(folder / "alone", **options)
        ids = []
        for words, W in ((flags(**dict(options, W=None), out_dir=folder / "out", max_steps=2,
                                wandb=True), 2),
                         (["--resume=auto", f"--out_dir={folder}/out", "--max_steps=3"], 2),
                         ([f"--resume={folder}/out/step_00000003", "--max_steps=4"], 2)):
            log = partial(log_wandb, folder / "wandb")
            found = finish(None, W, argv=words, plant=log)
        ids = lines_of(folder / "wandb")
        assert found["param_sha256"] == alone["param_sha256"], "other bits, so other flags"
        assert len(ids) == 3 and len(set(ids)) == 1, f"runs of Weights & Biases: {ids}"
        steps = [entry["step"] for entry in lines_of(folder / "out/metrics.jsonl")]
        assert steps == [1, 2, 3, 4], f"metrics.jsonl has steps {steps}"
        found = finish(None, 2, argv=[f"--resume={folder}/out/gone", "--max_steps=5", "--no-wandb"],
                       plant=start_again)
        assert found["mode"] == "ddp" and found["steps"] == 5, found
        found = finish(None, 4, argv=[f"--resume={folder}/out/step_00000005", "--mode=zero3",
                                      "--max_steps=6", "--no-wandb"])
        assert found["mode"] == "zero3" and found["steps"] == 6, found
        shutil.copytree(folder / "out", folder / "copy")  # where `best` is no link
        finish(None, 1, argv=["--resume=auto", f"--out_dir={folder}/copy", "--max_steps=7",
                              "--mode=single", "--dtype=fp16", "--no-wandb"])
        finish(None, 1, argv=flags(out_dir=folder / "out", wandb=True, max_steps=1), plant=log)
        assert lines_of(folder / "wandb")[-1] != ids[0], "a new run has the old one's id"


def start_again():
    """Plant what torchrun leaves to ranks that it starts again."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    store.set("begun", "")


def log_wandb(path):
    """Plant a stand-in for wandb that notes the id of a run."""
    tracker = mock.MagicMock(__spec__="a stand-in")
    tracker.init.side_effect = lambda **options: write_line(path, options["id"]) or mock.MagicMock()
    sys.modules["wandb"] = tracker


# -------------------------------------------------------------------------------------------------
# 12. train.py: faults of disks and machines
#
# After each, metrics.jsonl has every step once, and the bits are those of an undisturbed run.

STEPS = 4


def cut_power(path, n):
    """Plant a power cut before the n-th update: what was not synced of metrics.jsonl is gone."""
    real = os.fsync
    synced = [0]  # bytes

    def fsync(file):
        descriptor = file if isinstance(file, int) else file.fileno()
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            synced[0] = path.stat().st_size
        real(file)

    def cut():
        os.truncate(path, synced[0])
        signal.raise_signal(signal.SIGKILL)

    os.fsync = fsync
    in_update(n, None, act_without_arguments, cut)


def act_without_arguments(act):
    act()


def fill_disk(path, n):
    """Plant a disk that takes 20 more bytes of metrics.jsonl from the n-th update until the next
    one, and so half a line; checkpoints are larger, and fail."""
    def allow(update):
        most = path.stat().st_size + 20 if update == n else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    update = torch.optim.AdamW.step
    calls = itertools.count(1)

    def step(optimizer, *closure):
        allow(next(calls))
        return update(optimizer, *closure)

    torch.optim.AdamW.step = step


def full_log():
    """Plant stdout and stderr on a full disk."""
    for descriptor in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


def freeze(function, n, folder):
    """Plant a process that stops in the n-th call of a function, and leaves its number."""
    path, _, name = function.rpartition(".")
    owner = pkgutil.resolve_name(path)
    real = getattr(owner, name)
    calls = itertools.count(1)

    def frozen(*arguments, **options):
        if next(calls) == n:
            (folder / "frozen").write_text(str(os.getpid()))
            signal.raise_signal(signal.SIGSTOP)
        return real(*arguments, **options)

    setattr(owner, name, frozen)


def run_over_frozen(folder, out, function, n, options, others):
    """Start a run with options that freezes; let a run with others' options end meanwhile in the
    same out_dir; wake it up -> how it ends."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run_train, out, plant=partial(freeze, function, n, folder), **options)
        number = folder / "frozen"
        while not (number.exists() and number.read_text()) and not future.done():
            time.sleep(0.01)
        try:
            finish(out, **others)
        finally:
            os.kill(int(number.read_text()), signal.SIGCONT)
    return future.result()


# Where a process freezes: as it begins to write a checkpoint, in its second update, as it writes a
# line, as it renames a checkpoint, and, when it resumes, as it moves aside what is newer.
FROZEN = {"save": ("torch.distributed.checkpoint.save", 2),
          "update": ("torch.optim.AdamW.step", 2), "line": ("model.GPT.flops_per_token", 2),
          "publish": ("pathlib.Path.rename", 2), "rewind": ("time.strftime", 1)}


@check(*grid(W=(0,), fault=("power cut", "full disk", "full log", "frozen in update",
                            "frozen in save", "frozen in publish", "frozen in rewind")),
       *only_full(grid(W=(0,), fault=("frozen in line",))))
def faults_cost_no_line(fault):
    """After a power cut, which takes what was not synced; after a full disk, that took half a line;
    with the log on a full disk; and when a process that was frozen wakes up in a later run, which
    it leaves as it is, and says so."""
    options = dict(save_interval=1, resume="auto", max_steps=STEPS)
    with temporary() as folder:
        out = folder / "out"
        expected = finish(folder / "alone", **options)["param_sha256"]
        metrics = out / "metrics.jsonl"
        if fault == "power cut":
            run = run_train(out, plant=partial(cut_power, metrics, 3), **options)
            assert run.codes == [-signal.SIGKILL], run
            found = finish(out, **options)["param_sha256"]
        elif fault == "full disk":
            plant = partial(fill_disk, metrics, 2)
            result = finish(out, fact="step 2 is not yet in the metrics", plant=plant, **options)
            found = result["param_sha256"]
        elif fault == "full log":
            finish(out, plant=full_log, **options)
            found = ask(out / f"step_{STEPS:08d}")["param_sha256"]
        else:
            function, n = FROZEN[fault.split()[-1]]
            if fault == "frozen in line":  # then no checkpoint is due when it wakes up
                options["save_interval"] = 100
            others = dict(options)
            if fault == "frozen in rewind":  # where it was to move aside what is newer
                finish(out, **options)
                others["max_steps"] = STEPS + 1
                expected = finish(folder / "alone", **others)["param_sha256"]
                options["resume"] = out / "step_00000003"
            run = run_over_frozen(folder, out, function, n, options, others)
            assert run.codes[0] in (1, 2) and "a later run has begun" in run.stderr[0], run
            assert "Traceback" not in run.stderr[0], run
            assert f" {STEPS}/{STEPS} " not in run.stdout[0], f"it went on: {run.stdout[0]}"
            found = ask("auto", out_dir=out)["param_sha256"]
        entries = lines_of(metrics)
        n_steps = STEPS + 1 if fault == "frozen in rewind" else STEPS
        assert [entry["step"] for entry in entries] == [*range(1, n_steps + 1)], entries
        assert found == expected, f"other bits after {fault}"
        left = [path.name for path in out.glob(".*")]
        assert not left, f"left over: {left}"


# -------------------------------------------------------------------------------------------------
# 13. train.py: mistakes, and what it hands on

# Command lines that end with one line, which names the file or, where there is none, the flag.
# Adding one costs a third of a second. DATA is a folder of good and bad texts, made by the check.
BAD = """--no_such_flag=1 | --lr=fast | --lr=nan | --lr=-1 | --max_steps=0 | --max_steps=1.5
--mode=zero9 | --dtype=fp8 | --model=gpt5 | --bucket_cap_mb=0 | --seed=99999999999999999999
--global_batch_size=3 --micro_batch_size=2 | --n_head=3 | --n_kv_head=3 | --tokenizer=gpt9
--tokenizer=gpt2 | --dataset=DATA/missing.txt | --dataset=DATA/empty.txt | --dataset=DATA/odd
--dataset=DATA/short.txt | --dataset=DATA/latin1.txt | --dataset=DATA/none | --dataset=DATA/beyond
--dataset=DATA/no_bin | --dataset=DATA/fine.txt --block_size=1024 --global_batch_size=64
--out_dir=DATA/fine.txt | --param_dtype=bf16 | --comm_hook=topk | --comm_hook=zip --mode=ddp
--offload | --topk_ratio=2 --mode=ddp --comm_hook=topk | --dtype=fp16 --mode=ddp --comm_hook=topk
--shard_size=1 --mode=ddp | --micro_batch_size=most | --resume=DATA/missing | --device=abacus
--optimizer=sgd | --optimizer=muon --mode=torch-fsdp 
--trace --profile=2 | --eval_only | --init_from=gpt2 | --min_lr=1 | --dataset=DATA/bin.txt"""
NAMED = {  # and those whose line names something else
    "--micro_batch_size=auto": "memory_limit_gb", "--wandb": "install wandb", "--beta2=1": "beta",
    "--micro_batch_size=auto --memory_limit_gb=0.2": "0.[12]", "--n_embd=1000000000000": "memory",
    "--tensorboard": "install tensorboard", "--mode=zero2 --shard_size=2": "shard_size",
    "--export_hf=hf": "install safetensors", "--compile": r"C\+\+ compiler",
    "--batch_size=8": "--micro_batch_size", "--max_iters=5": "--max_steps",
    "--dtype=bfloat16": "--dtype bf16", "--compile=False": "--no-compile",
    "--learning_rate=0.1": "--lr", "--dropout=0.1 --start=a": "dropout.*--start=a.*--prompt",
    "config.py": "config.py", f"--resume={HERE}": "no checkpoint"}


def bare():
    """Plant a machine without a network, without a compiler and without optional packages, whatever
    it has."""
    sys.modules |= dict(wandb=None, tensorboard=None, safetensors=None)
    os.environ.update(TIKTOKEN_CACHE_DIR="nowhere", HTTPS_PROXY="http://127.0.0.1:9")
    os.environ.update(PATH="", CXX="nowhere")


def elsewhere(parent):
    """Plant a working folder of its own for each rank."""
    os.chdir(parent / str(this_rank()))


def other_rate():
    if this_rank() == 1:
        sys.argv.append("--lr=0.2")


def write_texts(folder):
    """What BAD has below DATA."""
    texts = {"empty.txt": b"", "short.txt": b"too short", "latin1.txt": b"caf\xe9" * 1000,
             "bin.txt": bytes([7, 0] * 9000), "fine.txt": b"Some text. " * 999,
             "0/text": b"Text 0. " * 999,
             "1/text": b"Text 1. " * 999, "0/lost": b"Text. " * 999, "no_bin/text": b""}
    for name, content in (("odd", bytes(601)), ("none", b""), ("beyond", b"\xff" * 600)):
        texts |= {f"{name}/train.bin": content, f"{name}/val.bin": content}
    for name, content in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@check(dict(W=0))
def mistakes_are_one_line():
    """Every mistake gives exit status 2, one line on stderr that names it, and no traceback; so do
    ranks with other options or other data, before the first step. With status 1, so do 20 steps in
    a row that are not finite, and a parameter of which a bit flips on a rank."""
    def try_out(line, fact):
        words = line.replace("DATA", str(data)).split()
        refused(fact, None, plant=bare, argv=[*flags(out_dir=data / "out"), *words])

    with temporary() as data:
        write_texts(data)
        facts = dict(NAMED)
        for line in re.split(r"\s*[|\n]\s*", BAD):
            files = re.findall(r"DATA/([\w.]+)", line)
            facts[line] = files[0] if files else re.findall(r"--(\w+)", line)[0]
        two_at_a_time(try_out, *zip(*facts.items()))
        here = partial(elsewhere, data)
        out = data / "out"
        refused("single", out, 2, mode="single")
        refused("lr", out, 2, mode="ddp", plant=other_rate)
        refused("differ in data", out, 2, mode="ddp", dataset="text", plant=here)
        refused("lost", out, 2, mode="ddp", dataset="lost", plant=here)
        refused(r"step 23\b", out, 2, status=1, mode="ddp", max_steps=30,
                plant=partial(spoil, "cross_entropy", {2, *range(4, 99)}, math.nan))
        refused(r"wte\.weight", data / "a", 2, status=1, mode="ddp", save_interval=1,
                plant=partial(in_update, 2, 1, flip_a_bit))
        assert saved(data / "a")[-1] <= 2, "it went on"


@check(dict(W=0))
def llama_folders_go_out_and_in():
    """What --export_hf writes, --init_from reads in any mode, to the bit, and transformers opens as
    LlamaForCausalLM with the loss that training has; so is read what transformers writes: several
    files, bf16, a head of its own, another rope_theta."""
    missing = not_installed("safetensors", "transformers")
    if missing:
        return missing
    transformers = importlib.import_module("transformers")
    block = torch.randint(256, (16,))  # all of the data, so that any batch has the same loss
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    with temporary() as folder:
        refused("LICENSE", folder / "out", export_hf=HERE / "LICENSE")  # which is no folder
        small = transformers.LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=8,
                                         num_hidden_layers=1, num_attention_heads=1)
        transformers.LlamaForCausalLM(small).save_pretrained(folder / "small")
        refused("prompt", None, argv=[f"--init_from={folder}/small", "--eval_only", "--prompt=z"])
        for name in ("train.bin", "val.bin"):
            block.repeat(300).numpy().astype(np.uint16).tofile(folder / name)
        expected = finish(folder / "out", 2, mode="zero3", n_head=4, n_kv_head=2, lr=0.1,
                          min_lr=0.1, export_hf=folder / "hf")["param_sha256"]
        config = transformers.LlamaConfig.from_pretrained(
            folder / "hf", tie_word_embeddings=False, rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=50.0))
        other = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        other.save_pretrained(folder / "other", max_shard_size="10KB")
        for name, W, mode in (("hf", 1, "single"), ("hf", 2, "zero3"), ("hf", 2, "torch-fsdp"),
                              ("other", 2, "zero1")):
            ours = finish(folder / mode, W, init_from=folder / name, dataset=folder, mode=mode,
                          lr=0, min_lr=0, max_steps=1, **sizes)
            llama = transformers.LlamaForCausalLM.from_pretrained(folder / name)
            logits = llama.float()(block[None]).logits[0]
            loss = F.cross_entropy(logits, block.roll(-1)).item()
            assert abs(ours["train_loss"] - loss) < 1e-5, (
                f"{name}, {mode}: loss {ours['train_loss']}, transformers has {loss}")
            assert name == "other" or ours["param_sha256"] == expected, f"{mode}: other bits"


# -------------------------------------------------------------------------------------------------
# 14. README.md


def blocks_of(language):
    text = (HERE / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shortened(words):
    """The same command in a second: of a flag that is given twice the last one counts."""
    more = dict(n_layer=2, n_head=2, n_embd=16, n_kv_head=1, block_size=16, sample_tokens=8,
                eval_steps=2, save_interval=2, warmup_steps=1, tokenizer="bytes", device="cpu")
    steps = int(words[words.index("--max_steps") + 1]) if "--max_steps" in words else 0
    more["max_steps"] = steps if 0 < steps < 20 else max(4, steps // 50)
    if "--init_from" in words:  # whose folder has the sizes
        more = {name: value for name, value in more.items() if name[:2] != "n_"}
    data = [] if ".txt" in str(words) else [f"--dataset={HERE}/model.py"]
    return [*words, "--no-compile", *data, *(f"--{name}={value}" for name, value in more.items())]


@check(dict(W=0), *only_full([dict(W=0, package="safetensors")]))
def readme_commands_run(package=None):
    """Every bash block is valid shell, and the commands, and the example of one's own module, end
    well, one after the other in one folder, on a smaller model and fewer steps. Those that need a
    package are a row of their own."""
    missing = not_installed(package) if package else None
    if missing:
        return missing
    text = "".join(blocks_of("bash")).replace("\\\n", " ")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    with temporary() as folder:
        shutil.copy(HERE / "model.py", folder / "my.txt")
        for line in text.splitlines():
            needs_package = re.search("--export_hf|--init_from", line) is not None
            if " train.py" in line and "--nnodes" not in line and needs_package == bool(package):
                words = shlex.split(line, comments=True)
                W = int((re.findall(r"--nproc_per_node=(\d+)", line) or [1])[0])
                result = finish(None, W, argv=shortened(words[words.index("train.py") + 1:]),
                                plant=partial(os.chdir, folder))
                assert result["world_size"] == W and math.isfinite(result["val_loss"]), line
        own, muon, _ = blocks_of("python")
        with_muon = re.sub(r"    model = .*\n    optimizer = .*\n", muon, own)
        with_muon = with_muon.replace("optimizer.step()", "muon.step(), adamw.step()")
        with_muon = with_muon.replace("optimizer.zero_grad()", "model.zero_grad()")
        for text in (own, with_muon):
            (folder / "own.py").write_text(text)
            script = partial(runpy.run_path, f"{folder}/own.py", run_name="__main__")
            run = run_train(None, 2, plant=script, argv=["--help"])
            losses = re.findall(r"rank \d: loss 0\.\d{4}", "".join(run.stdout))
            assert run.codes == [0, 0] and len(losses) == 2, run


@check(*only_full([dict(W=0)]))
def bench_makes_tables():
    """bench.sh and cluster/slurm.sh are valid shell. A row of bench.sh that fails says why, the
    others are in its table, with equal hashes; mistakes are one line."""
    for path in ("bench.sh", "cluster/slurm.sh"):
        subprocess.run(["bash", "-n", HERE / path], check=True)
    sizes = ["--n_layer", "1", "--n_embd", "16", "--n_head", "1", "--block_size", "16"]
    with temporary() as folder:
        for path in (*HERE.glob("*.py"), HERE / "bench.sh"):
            shutil.copy(path, folder / path.name)
        for path in ("assets", "trainer"):
            shutil.copytree(HERE / path, folder / path)
        bench = partial(subprocess.run, cwd=folder, capture_output=True, text=True)
        done = bench(["./bench.sh", "bits", "--worlds", "2", "--modes", "zero2 zero3 zero9",
                      "--max_steps", "2", *sizes])
        hashes = re.findall(r"^\| zero[23] \| `(\w{8})` \|$", done.stdout, re.MULTILINE)
        assert len(hashes) == 2 and len(set(hashes)) == 1, done.stdout + done.stderr
        assert done.returncode == 1 and "Failed: zero9, W=2" in done.stdout, done.stdout
        for words, fact in ((["tune"], "bits "), (["link"], "needs rates"),
                            (["modes", "--lr", "fast"], "--lr"), (["modes", "--worlds"], "value")):
            done = bench(["./bench.sh", *words])
            assert done.returncode == 2 and fact in done.stderr, f"{words}: {done.stderr}"


class ThreeParameters(nn.Module):
    """Of the README's step with numbers. Sample x has the gradients 1 x, 2 x, ... 8 x."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([10.0, 20, 30, 40, 50]))
        self.second = nn.Parameter(torch.tensor([60.0, 70]))
        self.third = nn.Parameter(torch.tensor([80.0]))

    def forward(self, x):
        parameters = torch.cat((self.first, self.second, self.third))
        return (parameters * torch.arange(1, 9)).sum() * x


def two_chunks(values):
    """Values of a bucket, by chunk: of all eight both chunks, of this rank's four its own, with
    None for the other."""
    if len(values) == 8:
        return values[:4], values[4:]
    return (values, None) if dist.get_rank() == 0 else (None, values)


def assert_in_readme(kind, values):
    """The README has a line with a kind of values, and what rank 0 and rank 1 have of them."""
    texts = []
    for chunk in two_chunks(values):
        numbers = [] if chunk is None else chunk.tolist()
        texts.append(" ".join(f"{number:.0f}" for number in numbers))
    of_ranks = gather(" | ".join(texts))
    row = " ".join([kind, *" ".join(of_ranks).split()])
    lines = (HERE / "README.md").read_text().splitlines()
    assert row in [" ".join(line.split()) for line in lines], f"the README does not have: {row}"


@check(*(dict(W=2, mode=mode) for mode in ("ddp", "zero1", "zero2", "zero3")))
def readme_has_these_numbers(mode):
    """The README's step with numbers is what buffers hold, without the gaps that align them."""
    filled = []  # the gradients before they are sent

    def note(reduce, bucket):
        filled.append(bucket.gradients.clone())
        return reduce(bucket)

    def parameters():
        if mode == "ddp":
            return torch.cat([p.detach() for p in reversed(list(model.parameters()))])
        return bucket.sharded if bucket.unsharded is None else bucket.unsharded

    with mock.patch.multiple("zero", ALIGN_BYTES=4, ALIGN_CHUNK_BYTES=4):
        model = {"ddp": DDP, **STAGES}[mode](ThreeParameters())
    bucket, = model._buckets
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    assert_in_readme("parameters", parameters())
    with mock.patch.object(model, "_reduce", partial(note, model._reduce)):
        model(2 + 4 * dist.get_rank()).backward()
    assert_in_readme("gradients", filled[0])
    is_whole = mode in ("ddp", "zero1")
    assert_in_readme("gradients", bucket.gradients if is_whole else bucket.sharded_gradients)
    optimizer.step()
    momentum = []
    for p in reversed(list(model.parameters())):
        momentum.append(optimizer.state[p]["momentum_buffer"])
    assert_in_readme("momentum", torch.cat(momentum))
    assert_in_readme("parameters", parameters())
    with torch.no_grad():
        model(0)
    assert_in_readme("parameters", parameters())


def is_caught(file, old, new, name):
    """Whether a check fails in a copy of the tree in which a file has new for old: a check that
    passes on broken code is worth nothing."""
    text = (HERE / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old}"
    with temporary() as folder:
        for path in (*HERE.glob("*.py"), HERE / "README.md", HERE / "bench.sh"):
            shutil.copyfile(path, folder / path.name)  # without its mode: it may be read-only
        shutil.copytree(HERE / "trainer", folder / "trainer")
        (folder / file).write_text(text.replace(old, new))
        done = subprocess.run([sys.executable, "verify.py", name], cwd=folder, capture_output=True)
    return done.returncode == 1 and b"FAILED" in done.stdout


@check(dict(W=0, n=0), *only_full([dict(W=0, n=99)]))
def readme_leads_there(n):
    """Files, headings, functions and checks that the README names exist. By --full: with each edit
    of its table of breaks the check that the row names fails."""
    text = (HERE / "README.md").read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = set()
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        headings.add(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"))
    for file, heading in re.findall(r"\]\(([\w./]*)(?:#([^)]*))?\)", prose):
        assert (HERE / file).exists() and (file or heading in headings), f"{file}#{heading}"
    for names, file in re.findall(r"\[(`[^]]*`)\]\((\w+\.py)\)", prose):
        for name in re.findall(r"`(?:[A-Z]\w+\.)?(\w+)`", names):
            assert re.search(rf"\b(def|class) {name}\b", (HERE / file).read_text()), f"no {name}"
    edits = re.findall(r"^\| \[(\S+)\]\(\1\) `(.*?)` \| `(.*?)` \|.*\| `([^`]+)` \|$", text, re.M)
    names = set(re.findall(r"^\| \[.*\| `([^`]+)` \|$", text, re.M))  # of breaks and exercises
    names |= set(re.findall(r'python verify.py(?:\s+--full)?\s+"?([a-z][^"`\n]*)', text))
    assert edits, "no table of breaks"
    for name in names - {"proof"}:
        assert rows_of(all_checks(), is_full=True, names=[name]), f"no check is named {name}"
    caught = two_at_a_time(is_caught, *zip(*edits[:n]))
    assert all(caught), [edit for edit, is_seen in zip(edits, caught) if not is_seen]


# -------------------------------------------------------------------------------------------------
# what checks share


def raises(kind, pattern, function, *arguments, **options):
    """Assert that function raises kind, its message matching pattern; return the message."""
    try:
        function(*arguments, **options)
    except kind as error:
        assert re.search(pattern, str(error)), f"no {pattern!r} in: {error}"
        return str(error)
    raise AssertionError(f"nothing was raised that matches {pattern!r}")


def not_installed(*packages):
    """What a check returns that needs these optional packages: None, or that it is skipped."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"skipped: pip install {' '.join(missing)}" if missing else None


def gather(value, group=None):
    """[rank 0's value, rank 1's, ...] of a group; any that can be pickled."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


COLLECTIVES = ("recv", "broadcast", "allreduce", "allgather", "all_gather_single",
               "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base", "alltoall_base")


@contextmanager
def every_collective(note):
    """Call note(operation, its tensors) before each, in whichever thread.

    All of torch.distributed goes through these methods of ProcessGroup, whatever the function that
    a script calls: so what a wrapper sends can be counted without knowing how it sends it.
    """
    def tapped(name, real):
        def tap(group, tensors, *arguments, **options):
            note(name, tensors)
            return real(group, tensors, *arguments, **options)
        return tap

    taps = {name: tapped(name, getattr(dist.ProcessGroup, name)) for name in COLLECTIVES}
    coalesced = tapped("coalesced", dist._broadcast_coalesced)  # of buffers; it calls C++ by itself
    with (mock.patch.multiple(dist.ProcessGroup, **taps),
          mock.patch.object(dist, "_broadcast_coalesced", coalesced)):
        yield


def live_bytes():
    """Bytes of all tensors that Python can reach, each storage once.

    Exact where the resident set of a process is noise: it counts pages, and allocators keep them.
    """
    time.sleep(0.05)  # for threads to let go of what they have sent
    gc.collect()
    storages = {}
    for t in gc.get_objects():
        if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu":
            storage = t.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def two_at_a_time(function, *columns):
    """[function(*row) for row in zip(*columns)], for functions that wait."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, *columns))


# -------------------------------------------------------------------------------------------------
# the frame: ranks, and the table of rows
#
# `Ranks` holds W processes that run a check together, `run_rows` takes row after row and prints a
# line for each. Starting a group costs more than most checks, so it stays for the next ones.


def end_with_parent():
    """End this rank when verify.py is killed; a rank that waits for a call would wait for ever."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def join_group(rank, W, folder):
    """A rank's first act. Of more than four ranks there is one, in torch's fake group, which does
    not communicate.

    The group's timeout is shorter than any check's limit: where one rank fails the others say what
    they were waiting for, in place of "no answer".
    """
    os.setpgid(0, 0)  # to be killed together with the programs that it starts
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    is_fake = W > 4
    store = FakeStore() if is_fake else dist.FileStore(f"{folder}/store", W)
    dist.init_process_group("fake" if is_fake else "gloo", store=store, rank=rank, world_size=W,
                            timeout=datetime.timedelta(seconds=20))


def attempt(function, arguments):
    """function(**arguments) on a rank; what it raises in one line, with its place in our files.

    Nothing is left of the check before: neither its random state nor its wrappers, whose hooks are
    in reference cycles.
    """
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # `live_bytes` need not look at what there is already
    try:
        return function(**arguments)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if str(HERE) in frame.filename]
        place = ours[-1]
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        text = re.sub(r"\[/\S+\] ", "", " ".join(str(error).split())) or place.line  # gloo's files
        file = pathlib.Path(place.filename).name
        raise AssertionError(f"{kind}{text} ({place.name}, {file}:{place.lineno})") from None


class Ranks:
    """W processes in one gloo group, started at once, reused for any number of checks.

    Each is the only worker of a pool, so that a call can be sent to all of them and awaited with a
    time limit. A worker that dies breaks its pool, which is how that is noticed.
    """

    def __init__(self, W):
        self.folder = tempfile.mkdtemp()
        n_processes = W if W <= 4 else 1
        self.pools = []
        for rank in range(n_processes):
            arguments = rank, W, self.folder
            self.pools.append(ProcessPoolExecutor(1, fork_server(), join_group, arguments))
        futures = [pool.submit(os.getpid) for pool in self.pools]
        self.pids = [future.result() for future in futures]

    def run(self, function, arguments, limit_s):
        """function(**arguments) on every rank -> what rank 0 returns. Raises what has failed, what
        several ranks say once; then the ranks are of no more use, as some may be inside a
        collective.

        The others get a second to say what they saw: the rank that is first to raise is often the
        one that noticed, not the one to blame.
        """
        futures = [pool.submit(attempt, function, arguments) for pool in self.pools]
        wait(futures, limit_s, FIRST_EXCEPTION)
        done, working = wait(futures, timeout=1)
        ranks_of = defaultdict(list)  # {what has failed: ranks}
        for rank, future in enumerate(futures):
            if future in done and future.exception() is not None:
                text = str(future.exception())
                if isinstance(future.exception(), BrokenProcessPool):
                    text = "its process has died"
                ranks_of[text].append(rank)
        if working and not ranks_of:
            still = [rank for rank, future in enumerate(futures) if future in working]
            ranks_of[f"killed after {limit_s} s, the limit of this check"] = still
        if ranks_of:
            # What others say of a rank that has gone is told only if nobody says more.
            causes = {text: ranks for text, ranks in ranks_of.items() if "by peer" not in text}
            facts = []
            for text, ranks in (causes or ranks_of).items():
                facts.append(f"rank {', '.join(map(str, ranks))}: {text}")
            raise AssertionError("\n    ".join(facts))
        return futures[0].result()

    def kill(self):
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pool in self.pools:
            pool.shutdown()  # else its thread may run into the end of this process, and write of it
        shutil.rmtree(self.folder, ignore_errors=True)


class Row:
    """A check with arguments, on W ranks. Its name, by which it can be chosen, is such as
    "bits_of_one_process W=2 zero3, factor 1"."""

    def __init__(self, function, arguments, counts=True):
        self.function = function
        self.counts = counts  # otherwise a failure is only shown
        self.arguments = dict(arguments)
        self.only_full = self.arguments.pop("only_full", False)
        self.W = self.arguments.pop("W")
        words = []
        for name, value in self.arguments.items():
            if value == MODULES:
                words.append("all modules")
            elif isinstance(value, tuple):
                words.append(" ".join(value))
            elif isinstance(value, (str, Story)):
                words.append(str(value))  # it speaks for itself
            else:
                words.append(getattr(value, "__name__", f"{name} {value}"))
        self.text = ", ".join(words)
        self.name = f"{function.__name__} W={self.W} {self.text}"

    def run(self, groups):
        """Run it on the group of W ranks -> (outcome, text). A group that has failed goes."""
        try:
            if self.W == 0:
                reason = attempt(self.function, self.arguments)
            else:
                if self.W not in groups:
                    groups[self.W] = Ranks(self.W)
                reason = groups[self.W].run(self.function, self.arguments, self.function.limit_s)
        except Exception as error:  # a rank may also have died since the last check
            if self.W in groups:
                groups.pop(self.W).kill()
            if not self.counts:
                return "skipped", f"{self.text}, not counted: {error}"
            return "failed", f"FAILED {self.text}\n    {error}"
        return ("skipped", reason) if reason else ("passed", self.text)


def run_rows(rows, lanes):
    """Run rows, print a line for each, return [(outcome, line)]. In three lanes at once, each with
    its own {W: group}; the last one has only rows that need no ranks, as these mostly wait."""
    found = []
    with_ranks = iter([row for row in rows if row.W > 0])
    without = iter([row for row in rows if row.W == 0])

    def run_lane(rows, groups):
        for row in rows:
            start_s = time.monotonic()
            outcome, text = row.run(groups)
            seconds = time.monotonic() - start_s
            W = row.W if row.W > 0 else ""
            line = f"{row.function.__name__:30s} {W:>4} {seconds:7.1f}  {text}"
            print(line, flush=True)
            found.append((outcome, line))

    first, second, third = lanes
    with ThreadPoolExecutor(len(lanes)) as pool:
        futures = [pool.submit(run_lane, itertools.chain(with_ranks, without), first),
                   pool.submit(run_lane, itertools.chain(with_ranks, without), second),
                   pool.submit(run_lane, without, third)]
    for future in futures:
        future.result()  # raises what a lane has raised
    assert len(found) == len(rows), f"{len(found)} of {len(rows)} rows have run"
    return found


def run_parts(parts):
    """Run {claim: rows} one after the other, each claim above its rows; return the number of
    failures. They are printed once more at the end, where they are seen."""
    print(f"{'check':30s} {'W':>4s} {'seconds':>7s}")
    found = []
    lanes = ({}, {}, {})
    for claim, rows in parts.items():
        if claim:
            print(f"\n{claim}:\n")
        found += run_rows(rows, lanes)
    for groups in lanes:
        for ranks in groups.values():
            ranks.kill()
    outcomes = Counter(outcome for outcome, _ in found)
    for outcome, line in found:
        if outcome == "failed":
            print(line)
    skipped = f", {outcomes['skipped']} skipped" if outcomes["skipped"] else ""
    print(f"{outcomes['passed']} passed, {outcomes['failed']} failed{skipped}")
    return outcomes["failed"]


def all_checks():
    return [value for value in globals().values() if hasattr(value, "rows")]


def rows_of(checks, is_full=False, names=()):
    rows = []
    for function in checks:
        for arguments in function.rows:
            row = Row(function, arguments)
            is_chosen = not names or any(name in row.name for name in names)
            if is_chosen and (is_full or not row.only_full):
                rows.append(row)
    return rows


def rows_of_file(file, parser):
    """For --module. Torch's wrappers do not count: from W = 3 on they add in another order."""
    path = str(pathlib.Path(file).resolve())
    sys.path.append(os.path.dirname(path))  # for what the file imports
    try:
        task = task_of(path)
        module = task.module()
        task.optimizer(module.parameters())
        task.loss(module, 0, 0).backward()
    except (Exception, SystemExit) as error:
        fact = " ".join(f"{file}: {type(error).__name__}: {error}".split())
        parser.exit(2, f"verify.py: {fact}\n")
    rows = []
    for arguments in grid(W=(1, 2, 3), wrapper=("naive", "ddp", *STAGES, *OF_TORCH), file=(path,)):
        rows.append(Row(own_module, arguments, counts=arguments["wrapper"] not in OF_TORCH))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="only rows whose name has NAME in it, such as scripts, or "
                             "'one_process W=2 zero3'; proof: the proof alone")
    parser.add_argument("--full", action="store_true", help="all rows, not samples")
    parser.add_argument("--list", action="store_true", help="list the checks and their claims")
    parser.add_argument("--module", metavar="FILE", help="compare all wrappers of its module()")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all, not the row that is under way
    if options.module:
        parts = {"": rows_of_file(options.module, parser)}
    elif options.names == ["proof"]:
        parts = {claim: rows_of(some, options.full) for claim, some in PROOF.items()}
    else:
        parts = {"": rows_of(all_checks(), options.full, options.names)}
        if not parts[""]:
            parser.exit(2, f"verify.py: no row has a name with {' or '.join(options.names)}: "
                           f"--list shows checks, and some rows run with --full only\n")
    if options.list:
        for function in dict.fromkeys(row.function for rows in parts.values() for row in rows):
            print(f"{function.__name__:30s} {' '.join(function.__doc__.split())}")
        return 0
    return 1 if run_parts(parts) else 0


if __name__ == "__main__":
    # Processes find these functions in the module verify, which their server has loaded. With
    # __file__ here they would run this file as their own main, which takes half a second each.
    from verify import main
    del __file__
    sys.exit(main())

"""ddp.py and zero.py: scripts that are right, and scripts that are refused."""

import ast
import contextlib
import copy
import dataclasses
import datetime
import gc
import itertools
import math
import multiprocessing
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp import DDP, bucket_bytes, clip_gradients_, fill_buckets, total_norm
from tests.common import native, raises
from judge.messages import messages
from tests.common import ROOT
from tests.ranks import on_ranks
from verify import compare
from zero import Zero1, Zero2, Zero3

STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
WRAPPERS = {"ddp": DDP, **STAGES}
SMALL = dict(bucket_cap_mb=0.0005)  # a few buckets in modules of some hundred numbers


# -------------------------------------------------------------------------------------------------
# modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6)

    def mlp(self, x):
        return self.down(self.up(x).tanh())

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Three blocks, which are units, and a root."""

    def __init__(self, block=Block, **options):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(block(**options) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class CheckpointInside(Block):
    """As transformers' blocks: a part is computed again, and the unit itself is not."""

    def forward(self, x):
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=False)


class KeepsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class OwnFunction(Block):
    """It keeps a weight without saving it."""

    def mlp(self, x):
        return self.down(KeepsWeight.apply(x, self.up.weight).tanh())

    def __init__(self):
        super().__init__()
        self.up.bias = None


class HookReads(Block):
    """A hook of a tensor reads a weight in the backward."""

    def mlp(self, x):
        x = super().mlp(x)
        x.register_hook(lambda gradient: gradient * self.up.weight.detach()[:6, 0])
        return x


class Gaps(Block):
    """A parameter that is a part of a larger tensor, another one that is transposed, and buffers
    that are, of dtypes that gloo does not know."""

    def __init__(self):
        super().__init__()
        self.up.weight = nn.Parameter(torch.randn(11, 9)[:, 2:8])
        self.down.weight = nn.Parameter(torch.randn(11, 6).T)
        self.register_buffer("scale", torch.rand(6, 3).T[1])
        self.register_buffer("mask", torch.tensor([True, False] * 3))
        self.register_buffer("order", torch.arange(6).to(torch.int16))

    def forward(self, x):
        return super().forward(x) * self.scale * self.mask + self.order


class Sizes(Block):
    """Parameters without dimensions, without elements, of one element, and a convolution in
    channels_last."""

    def __init__(self):
        super().__init__()
        self.none, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.tensor([0.3]))
        self.convolution = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = super().forward(x) * self.none + self.one + self.empty.sum()
        return x + self.convolution(x[None, None]).mean((0, 1))


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


class Structured(Net):
    """Blocks that return objects and dictionaries."""

    def __init__(self):
        super().__init__()
        packs = Output, lambda x: dict(x=[x, None]), lambda x: (x, 3)
        for block, pack in zip(self.blocks, packs):
            block.register_forward_hook(lambda module, inputs, output, pack=pack: pack(output))

    def forward(self, x):
        x = self.blocks[0](self.first(x)).hidden
        x = self.blocks[1](x)["x"][0]
        x, _ = self.blocks[2](x)
        return self.last(x).square().mean()


class OutOfOrder(Net):
    """Units that are called in another order than they are registered, twice, in checkpoints of
    several, with frozen norms and a weight that two of them and the root share."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def some(self, x, order):
        for place in order:
            x = self.blocks[place](x)
        return x

    def forward(self, x):
        x = self.first(x)
        for order in ((2, 0), (1, 2), (0,)):
            x = checkpoint(self.some, x, order, use_reentrant=False)
        return self.last(self.some(x @ self.blocks[0].up.weight[:6], (1,))).square().mean()


class Lists(Net):
    """Lists in a list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([Block(), Block()]), Block()])

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks[0], self.blocks[1]):
            x = block(x)
        return self.last(x).square().mean()


class Complex(Block):
    """Complex parameters, of which autograd saves conjugates and real views."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x):
        z = x.to(torch.complex64) @ self.spectrum.conj()
        return super().forward(x) + (z * z).real + torch.view_as_real(self.spectrum)[0, :, 1]


MODULES = {"net": Net, "gaps": lambda: Net(Gaps), "sizes": lambda: Net(Sizes),
           "checkpoint inside": lambda: Net(CheckpointInside),
           "own function": lambda: Net(OwnFunction), "hook reads": lambda: Net(HookReads),
           "structured": Structured, "out of order": OutOfOrder, "lists": Lists,
           "complex": lambda: Net(Complex)}


# -------------------------------------------------------------------------------------------------
# scripts that are right: on W ranks, and in one process, the same bits


class OnRanks:
    """A run of a script on this rank. Sums over ranks are not divided."""

    def __init__(self, kind, make, **options):
        torch.manual_seed(dist.get_rank())  # all begin with rank 0's
        self.module = make()
        self.model = kind(self.module, **SMALL, **options)
        self.model.set_gradient_divide_factor(1)

    def loss(self, number, call=None):
        return (call or self.model)(inputs(number * dist.get_world_size() + dist.get_rank()))

    def backward(self, number, call=None):
        self.loss(number, call).backward()

    def held_back(self):
        return self.model.no_sync()

    def whole(self):
        return {name: p.clone() for name, p in self.model.full_parameters()}


class InOneProcess(OnRanks):
    """The same script, with the micro batches of all ranks, in their order."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.module = self.model = make()

    def backward(self, number, call=None):
        for rank in range(dist.get_world_size()):
            (call or self.model)(inputs(number * dist.get_world_size() + rank)).backward()

    def held_back(self):
        return contextlib.nullcontext()

    def whole(self):
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def close(run, expected, atol):
    """Where sums are rounded in another order."""
    whole = expected.whole()
    for name, p in run.whole().items():
        assert torch.allclose(p, whole[name], atol=atol), name


def real(named):
    """Complex tensors as two numbers for each."""
    return {name: torch.view_as_real(t) if t.is_complex() else t for name, t in named.items()}


def inputs(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 5, generator=generator)


def sgd(run):
    return torch.optim.SGD(run.model.parameters(), lr=0.01, momentum=0.9)


def plain(run):
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01, fused=False, foreach=False)
    for step in range(3):
        run.backward(step)
        optimizer.step()
        optimizer.zero_grad()


def of_module(run):
    """The module itself is called, and zeros stay."""
    optimizer = sgd(run)
    for step in range(3):
        run.backward(step, run.module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False) if not isinstance(run.model, DDP) else (
            optimizer.zero_grad())


def several_forwards(run):
    """Forwards without a backward, and evaluation between a forward and its backward."""
    optimizer = sgd(run)
    for step in range(3):
        run.loss(50)
        with torch.no_grad():
            run.loss(60)
        if isinstance(run, InOneProcess):
            run.backward(step)
        else:
            loss = run.loss(step)
            with torch.no_grad():
                run.loss(60)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sam(run):
    """Sharpness-aware: to another place and back, by memory that was kept."""
    optimizer = sgd(run)
    for step in range(3):
        run.backward(step)
        kept = {}
        with torch.no_grad():
            for p in run.model.parameters():
                kept[p] = p.data.clone()
                p.add_(p.grad, alpha=0.1)
        optimizer.zero_grad()
        run.backward(step)
        for p in run.model.parameters():
            p.data = kept[p]
        optimizer.step()
        optimizer.zero_grad()


def swapped(run):
    """Averages of parameters change places with them for an evaluation."""
    optimizer = sgd(run)
    averages = [p.detach().clone() for p in run.model.parameters()]

    def swap():
        for p, average in zip(run.model.parameters(), averages):
            p.data, average.data = average.data, p.data

    for step in range(3):
        run.backward(step)
        optimizer.step()
        optimizer.zero_grad()
        for p, average in zip(run.model.parameters(), averages):
            average.lerp_(p.detach(), 0.5)
        swap()
        with torch.no_grad():
            run.loss(70)
        if step < 2:
            swap()


def as_a_vector(run):
    """A step by torch.nn.utils, and one by hand. No forward comes after the last."""
    for step in range(5):
        run.backward(step)
        gradients = [p.grad.reshape(-1) for p in run.model.parameters()]
        if step % 2 == 0:
            vector = nn.utils.parameters_to_vector(run.model.parameters())
            vector = vector - 0.01 * torch.cat(gradients)
            nn.utils.vector_to_parameters(vector, run.model.parameters())
        else:
            with torch.no_grad():
                for p in run.model.parameters():
                    p.add_(p.grad, alpha=-0.01)
        run.model.zero_grad()


def discarded(run):
    """Micro-steps that zero_grad() discards, in both ways, of the model and of the optimizer."""
    optimizer = sgd(run)
    ways = (optimizer.zero_grad, run.model.zero_grad)
    for step, (zero_grad, set_to_none) in enumerate(itertools.product(ways, (True, False))):
        with run.held_back():
            run.backward(40)
        zero_grad(set_to_none=set_to_none)
        optimizer.step()  # there is nothing to step with but momentum
        run.backward(step)
        optimizer.step()
        optimizer.zero_grad()


def discarded_after_means(run):
    """As before, where there were means already."""
    optimizer = sgd(run)
    for step, set_to_none in enumerate((True, False)):
        run.backward(30)
        with run.held_back():
            run.backward(40)
        optimizer.zero_grad(set_to_none)
        run.backward(step)
        optimizer.step()
        optimizer.zero_grad()


def one_by_hand(run):
    """The memory of a small parameter is another, of which most ranks have nothing."""
    optimizer = sgd(run)
    for step in range(3):
        run.backward(step)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in run.module.named_parameters():
            if p.numel() == 1:
                shard = dict(run.model.named_parameters()).get(name, p)  # p itself in DDP
                shard.data = shard.data + 0.1


def fail(*_):
    raise ZeroDivisionError


def forwards_raise(run):
    """A script goes on after forwards that raise: with a step, and with changes by hand."""
    optimizer = sgd(run)
    for step in range(4):
        run.backward(2 * step)
        with run.module.blocks[step % 3].register_forward_pre_hook(fail):
            raises(ZeroDivisionError, "", run.loss, 40)
        if step % 2 == 0:
            run.backward(2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
        with run.module.blocks[0].register_forward_pre_hook(fail):
            raises(ZeroDivisionError, "", run.loss, 40)
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(0.9)


def in_inference_mode(run):
    """Evaluated so when parameters have new memory."""
    optimizer = sgd(run)
    for step in range(3):
        for p in run.model.parameters():
            p.data = p.data.clone()
        with torch.inference_mode():
            run.loss(70)
        run.backward(step)
        optimizer.step()
        optimizer.zero_grad()


def sums_that_go_on(run):
    """Several averaged backwards, and a gradient of the script's own to begin with."""
    optimizer = sgd(run)
    for step in range(3):
        for p in run.model.parameters():
            p.grad = torch.full_like(p, 0.125)
        for micro_step in range(3):
            run.backward(3 * step + micro_step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)


def parts_of_optimizers(run):
    """Two optimizers, of which only one steps, and zeroes."""
    parameters = list(run.model.parameters())
    optimizers = [torch.optim.SGD(some, lr=0.01) for some in (parameters[::2], parameters[1::2])]
    for step in range(4):
        run.backward(step)
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()


def raised(run):
    """A backward that raises in the middle, and a step that begins anew."""
    optimizer = sgd(run)
    for step in range(3):
        hook = run.module.blocks[1].register_forward_hook(
            lambda module, inputs, output: output.register_hook(fail) and None)
        raises(ZeroDivisionError, "", run.backward, 40)
        hook.remove()
        is_ddp = isinstance(run.model, DDP)  # refuses zeros: what is under way would overwrite them
        optimizer.zero_grad(set_to_none=step != 1 or is_ddp)
        run.backward(step)
        optimizer.step()
        optimizer.zero_grad()


def closures(run):
    """The optimizer calls backward."""
    optimizer = sgd(run)
    for step in range(3):
        optimizer.step(lambda: run.backward(step))
        optimizer.zero_grad()


def kept_gradients(run):
    """What a script keeps of a step stays as it is."""
    optimizer = sgd(run)
    run.backward(0)
    kept = [p.grad.detach().view(-1) for p in run.model.parameters()]
    before = [t.clone() for t in kept]
    optimizer.step()
    optimizer.zero_grad()
    run.backward(1)
    optimizer.step()
    optimizer.zero_grad()
    for t, expected in zip(kept, before):
        assert torch.equal(t, expected), "a gradient that was kept has changed"


def penalties(run):
    """On the gradient of the inputs, which autograd.grad() makes before the backward."""
    optimizer = sgd(run)

    def call(x):
        x.requires_grad_()
        loss = run.model(x)
        gradient, = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    for step in range(3):
        run.backward(step, call)
        optimizer.step()
        optimizer.zero_grad()


def in_autocast(run):
    optimizer = sgd(run)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            run.backward(step)
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS = [of_module, several_forwards, sam, swapped, as_a_vector, discarded, raised,
           closures, kept_gradients, penalties, in_autocast, one_by_hand, in_inference_mode]
# DDP refuses these: each rank would add the sum before.
OF_STAGES = [sums_that_go_on, discarded_after_means, parts_of_optimizers, forwards_raise]


def in_each(wrappers, test, *arguments):
    """test(wrapper, *arguments) for each wrapper. What it raises names the wrapper."""
    for wrapper in wrappers:
        try:
            test(wrapper, *arguments)
        except Exception as error:
            text = f"{wrapper}: {type(error).__name__}: {error}"
            raise AssertionError(text).with_traceback(error.__traceback__) from None


@on_ranks(3)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    expected = InOneProcess(MODULES[name])
    plain(expected)
    in_each(WRAPPERS, is_right, MODULES[name], plain, expected)


@on_ranks(2)
def test_modules_on_two_ranks():
    """DDP has torch's all-reduce there."""
    for make in MODULES.values():
        expected = InOneProcess(make)
        plain(expected)
        in_each(["ddp"], is_right, make, plain, expected)


@on_ranks(3)
def test_scripts_on_three_ranks():
    """DDP adds by itself there."""
    for script in SCRIPTS:
        expected = InOneProcess(Net)
        script(expected)
        in_each(["ddp"], is_right, Net, script, expected)


@on_ranks(2)
@pytest.mark.parametrize("script", SCRIPTS + OF_STAGES)
def test_scripts(script):
    expected = InOneProcess(Net)
    script(expected)
    in_each(STAGES if script in OF_STAGES else WRAPPERS, is_right, Net, script, expected)


def is_right(wrapper, make, script, expected):
    run = OnRanks(WRAPPERS[wrapper], make)
    script(run)
    compare(real(expected.whole()), real(run.whole()))
    run.model.zero_grad()
    run.backward(0)  # nothing is left behind that would raise


def leaves_no_sync_early(run):
    """A hook leaves no_sync() while a backward is under way: that was in it."""
    optimizer = sgd(run)
    for step in range(2):
        stack = contextlib.ExitStack()
        stack.enter_context(run.held_back())

        def leave(module, inputs, output):
            output.register_hook(lambda gradient: stack.close())

        with run.module.blocks[1].register_forward_hook(leave):
            run.backward(2 * step)
        run.backward(2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_sync_is_left_early(wrapper):
    """Each rank adds up its own micro-steps first, which rounds in another way."""
    run = OnRanks(WRAPPERS[wrapper], Net)
    leaves_no_sync_early(run)
    expected = InOneProcess(Net)
    leaves_no_sync_early(expected)
    close(run, expected, atol=1e-6)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_collectives_of_accelerators(wrapper):
    """What is sent where tensors are not on a CPU; the group takes it from these, too."""
    with native(), messages() as sent:
        run = OnRanks(WRAPPERS[wrapper], Net)
        plain(run)
    operations = " ".join(sorted({message.operation for message in sent}))
    assert not re.search("send|recv", operations), operations
    expected = InOneProcess(Net)
    plain(expected)
    compare(expected.whole(), run.whole())


STEP = """
start: unshard the root             forward
wait: unshard the root
start: unshard blocks.0
wait: unshard blocks.0
start: unshard blocks.1
wait: unshard blocks.1
free: blocks.0
start: unshard blocks.2
wait: unshard blocks.2
start: reduce the bucket from blocks.2.down.bias on
free: blocks.2
start: unshard blocks.0
wait: reduce the bucket from blocks.2.down.bias on
start: reduce the bucket from blocks.1.down.bias on
wait: unshard blocks.0
wait: reduce the bucket from blocks.1.down.bias on
start: reduce the bucket from blocks.0.down.bias on
wait: reduce the bucket from blocks.0.down.bias on
start: reduce the bucket from last.bias on
wait: reduce the bucket from last.bias on
free: the root
free: blocks.1
free: blocks.0
"""


@on_ranks(2)
def test_a_step_is_as_the_table_says():
    """Of zero.py, with a root and blocks 0, 1 and 2."""
    model = Zero3(Net())
    model(inputs(0)).backward()  # learns the order
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(inputs(0)).backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    kinds = ("start:", "wait:", "free:")
    seen = [event.name for event in events if event.name.startswith(kinds)]
    expected = [line.split("  ")[0] for line in STEP.strip().splitlines()]
    assert seen == expected, "\n".join(["", *seen])


@on_ranks(3, 4)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero2"])
def test_ranks_in_another_order(wrapper):
    """Branches in another order than on rank 0 complete buckets in another order."""
    class Branches(Net):
        def forward(self, x):
            x, places = self.first(x), [0, 1, 2]
            if not isinstance(self.scale, float):  # on ranks
                places = places[self.scale:] + places[:self.scale]
            return self.last(sum(self.blocks[place](x) for place in sorted(places)) +
                             0 * sum(self.blocks[place](x).sum() for place in places)).mean()

    Branches.scale = dist.get_rank() % 3
    run = OnRanks(WRAPPERS[wrapper], Branches)
    plain(run)
    expected = InOneProcess(Branches)
    plain(expected)
    close(run, expected, atol=1e-5)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", STAGES)
def test_units_are_any_iterable(wrapper):
    def make():
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), nn.Flatten(0))

    def script(run):
        optimizer = sgd(run)
        for step in range(3):
            run.backward(step, lambda x: run.model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    expected = InOneProcess(make)
    script(expected)
    torch.manual_seed(0)
    module = make()
    run = OnRanks(STAGES[wrapper], lambda: module, units=module.children())
    script(run)
    compare(expected.whole(), run.whole())
    assert len(run.model.units) == 3, "a unit without parameters is none"


@on_ranks(2)
@pytest.mark.parametrize("wrapper", STAGES)
def test_attributes_of_parameters(wrapper):
    """By these scripts make groups of an optimizer."""
    module = Net()
    module.first.weight.no_decay = True
    model = STAGES[wrapper](module)
    marked = [name for name, p in model.named_parameters() if hasattr(p, "no_decay")]
    assert marked == ["first.weight"]


@on_ranks(2)
@pytest.mark.parametrize("wrapper", STAGES)
def test_whole_states(wrapper):
    """full_state_dict() is what the module's would be, and goes into any other stage."""
    run = OnRanks(STAGES[wrapper], lambda: Net(Gaps))
    other = OnRanks(Zero3, lambda: Net(Gaps))
    plain(run)
    state = run.model.full_state_dict()
    module = Net(Gaps)
    module.load_state_dict(state)
    other.model.load_full_state_dict(state)
    compare(run.whole(), other.whole())
    compare(dict(module.named_parameters()), other.whole())
    assert list(state) == list(module.state_dict())
    assert torch.equal(other.module.blocks[0].scale, state["blocks.0.scale"])
    with torch.no_grad():
        assert torch.equal(other.model(inputs(0)), module(inputs(0)))
    raises(RuntimeError, 'Unexpected key.*"x"', other.model.load_full_state_dict,
           state | {"x": torch.ones(1), "last.bias": torch.ones(1)})
    compare(run.whole(), other.whole())
    with torch.no_grad():
        before = run.model(inputs(0))  # now whole parameters are there in stages 1 and 2
        raises(RuntimeError, 'Unexpected key.*"x"', run.model.load_full_state_dict,
               state | {"x": torch.ones(1), "last.bias": torch.ones(1)})
        assert torch.equal(run.model(inputs(0)), before), "a part was loaded"
    starts = other.model.shard_starts()
    for name, p in other.model.named_parameters():
        assert p.whole_shape == state[name].shape and p.whole_stride == state[name].stride()
        assert 0 <= starts[name] <= starts[name] + p.numel() <= state[name].numel()
        expected = state[name].as_strided((state[name].numel(),), (1,))
        assert torch.equal(p.detach().view(-1), expected[starts[name]:starts[name] + p.numel()])


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", STAGES)
def test_param_dtype(wrapper):
    """Whole parameters and gradients are bf16, shards and sums fp32; integers stay integers."""
    class WithCount(Block):
        def __init__(self):
            super().__init__()
            self.steps = nn.Parameter(torch.tensor([300, 7]), requires_grad=False)

    run = OnRanks(STAGES[wrapper], lambda: Net(WithCount), param_dtype=torch.bfloat16)
    seen = {}

    def note(module, x):
        seen.update(weight=module.up.weight.dtype, count=module.steps.tolist())

    run.module.blocks[1].register_forward_pre_hook(note)
    optimizer = sgd(run)
    plain_module = InOneProcess(lambda: Net(WithCount))
    before = plain_module.whole()
    call = run.model

    def cast(x):
        return call(x.bfloat16())

    expected = {name: None for name in before}
    for number in range(dist.get_world_size()):
        module = copy.deepcopy(plain_module.module).bfloat16()
        module(inputs(number).bfloat16()).backward()
        for name, p in module.named_parameters():
            if p.grad is not None:
                gradient = p.grad.float()
                expected[name] = gradient if number == 0 else expected[name] + gradient
    with torch.inference_mode():
        run.loss(0, cast)
    run.backward(0, cast)
    optimizer.step()
    for name, p in run.whole().items():
        assert p.dtype == before[name].dtype
        if expected[name] is not None:
            assert torch.equal(p, torch.add(before[name], expected[name], alpha=-0.01)), name
    assert seen == dict(weight=torch.bfloat16, count=[300, 7])


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_left(wrapper):
    """A wrapper that is dropped goes at once, though torch keeps hooks of optimizer steps: the
    garbage collector might take it while torch goes through these."""
    run = OnRanks(WRAPPERS[wrapper], Net)
    plain(run)
    model, module = weakref.ref(run.model), weakref.ref(run.module)
    gc.collect()
    gc.disable()
    del run
    gone = model() is None
    gc.enable()
    assert gone
    gc.collect()
    assert module() is None
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()


@on_ranks(2)
def test_a_copy_of_the_module():
    """As for an average of weights: DDP leaves nothing in the module that cannot be copied."""
    run = OnRanks(DDP, Net)
    plain(run)
    other = copy.deepcopy(run.module)
    assert torch.equal(other(inputs(0)), run.model(inputs(0)))
    DDP(other)


@on_ranks(3)
def test_exposed_seconds():
    """They are what a rank waits for others, no more."""
    run = OnRanks(Zero3, Net)
    begun_s = time.perf_counter()
    plain(run)
    assert 0 < run.model.exposed_s < time.perf_counter() - begun_s


def test_bucket_bytes():
    """25 MB, more for many ranks, or what is asked for."""
    assert bucket_bytes(2, None) == 25 * 2**20
    assert bucket_bytes(1024, None) == 1024 * 2**18
    assert bucket_bytes(1024, 0.5) == 2**19


def test_fill_buckets():
    """The first is small, a dtype closes a bucket, and what is too large has one of its own."""
    sizes = [1, 1, 1, 2, 2, 9, 1]
    parameters = [nn.Parameter(torch.empty(n)) for n in sizes]
    parameters.append(nn.Parameter(torch.empty(1, dtype=torch.float64)))
    lists = fill_buckets(parameters, first_bytes=8, cap_bytes=16)
    assert [[p.numel() for p in some] for some in lists] == [[1, 1], [1, 2], [2], [9], [1], [1]]


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
@pytest.mark.parametrize("divide_by", [1, 2, 3])
def test_clipping(max_norm, divide_by):
    """One product, rounded once; complex numbers count as two; nothing to clip is no error."""
    gradients = [torch.tensor([3.0, 1.0]), torch.tensor([[1.0 + 2.0j]])]
    before = [t.clone() for t in gradients]
    norm = clip_gradients_(gradients, max_norm, divide_by=divide_by)
    assert abs(norm - math.sqrt(15) / divide_by) < 1e-12 and norm.dtype == torch.float64
    factor = min(1.0, max_norm / (math.sqrt(15) / divide_by + 1e-6)) / divide_by
    for t, old in zip(gradients, before):
        assert torch.equal(t, old * torch.tensor(factor, dtype=torch.float64).float())
    assert clip_gradients_([], max_norm) == 0


def test_a_norm_is_where_its_group_is():
    """A rank whose shards are all empty has a zero on the CPU, which NCCL does not take."""
    sent = []
    with (mock.patch("torch.distributed.all_reduce", lambda t, group: sent.append(t.device.type)),
          mock.patch("torch.distributed.distributed_c10d._get_object_coll_device",
                     lambda group: "meta")):
        total_norm([], "a group on an accelerator")
        total_norm([torch.ones(2)], "a group on an accelerator")
    assert sent == ["meta", "meta"]


# -------------------------------------------------------------------------------------------------
# what is refused


def wrapped(kind, module=None, **options):
    torch.manual_seed(0)
    return kind(module or Net(), **options)


def skip_a_gradient(kind):
    module = Net()
    module.blocks[1].down = nn.Identity()
    module.blocks[1].up = nn.Linear(6, 6)
    module.extra = nn.Linear(3, 3)
    model = wrapped(kind, module)
    model(inputs(0)).backward()


def skip_on_one_rank(kind):
    module = Net()
    module.extra = nn.Parameter(torch.ones(()))
    model = wrapped(kind, module)
    loss = model(inputs(0))
    if dist.get_rank() == 0:
        loss = loss * 1.0
    loss.backward()


def reentrant(kind):
    class Reentrant(Block):
        def forward(self, x):
            return x + checkpoint(self.mlp, self.norm(x), use_reentrant=True)

    model = wrapped(kind, Net(Reentrant))
    model(inputs(0)).backward()


def goes_on_after_an_error(kind, zero_grad=None):
    """A part of the gradients has been sent when a backward raises, and they are still there."""
    model = wrapped(kind, **SMALL)

    def fail_later(module, inputs, output):
        output.register_hook(fail)

    with model.module.blocks[0].register_forward_hook(fail_later):
        raises(ZeroDivisionError, "", model(inputs(0)).backward)
    if zero_grad is not None:
        zero_grad(model)
    model(inputs(0)).backward()


def zeros_after_an_error(kind):
    goes_on_after_an_error(kind, lambda model: model.zero_grad(set_to_none=False))


def zeroes_too_late(kind):
    model = wrapped(kind)
    losses = [model(inputs(step)) for step in range(2)]
    with model.no_sync():
        losses[0].backward()
    model.zero_grad()
    losses[1].backward()


def graph_of_gradients(kind):
    model = wrapped(kind)
    model(inputs(0)).backward(create_graph=True)


def sparse_buffer(kind):
    module = Net()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    wrapped(kind, module)


def sparse(kind):
    module = Net()
    module.table = nn.Embedding(5, 5, sparse=True)
    model = wrapped(kind, module)
    call = module.forward
    module.forward = lambda x: call(x + module.table(torch.arange(4)))
    model(inputs(0)).backward()


def gradient_taken_away(kind):
    module = Net()

    def take(p):
        p.grad = None

    module.last.weight.register_post_accumulate_grad_hook(take)
    model = wrapped(kind, module)
    model(inputs(0)).backward()


def step_before_backward(kind):
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs(0)).backward()
    loss = model(inputs(1))
    optimizer.step()
    loss.backward()


def changed_in_place(kind):
    class InPlace(Block):
        def forward(self, x):
            y = self.up(x).exp()
            z = self.down(y)
            y.zero_()
            return z

    model = wrapped(kind, Net(InPlace))
    model(inputs(0)).backward()


def other_parameters(kind):
    module = Net()
    module.last = nn.Linear(6, 1 + dist.get_rank())
    wrapped(kind, module)


def other_buffers(kind):
    module = Net()
    for name in ("ab", "ba")[dist.get_rank()]:
        module.register_buffer(name, torch.ones(2))
    wrapped(kind, module)


def other_buckets(kind):
    wrapped(kind, bucket_cap_mb=1 + dist.get_rank())


def other_units(kind):
    module = Net()
    wrapped(kind, module, units=module.blocks[dist.get_rank():])


def other_param_dtype(kind):
    wrapped(kind, param_dtype=(torch.float16, torch.bfloat16)[dist.get_rank()])


def meta(kind):
    wrapped(kind, Net().to("meta"))


def two_devices(kind):
    module = Net()
    module.last.to("meta")
    wrapped(kind, module)


def twice(kind):
    wrapped(kind, wrapped(kind))


def twice_the_module(kind):
    module = Net()
    model = wrapped(kind, module)
    wrapped(type(model), module)


def a_part_before(kind):
    module = Net()
    part = DDP(module.blocks)
    wrapped(kind, module)
    del part


def a_part_after(kind):
    module = Net()
    model = wrapped(kind, module)
    DDP(model.module.blocks)


def by_fully_shard(kind):
    module = Net()
    fully_shard(module.blocks[1])
    wrapped(kind, module)


def by_torch(kind):
    wrapped(kind, nn.parallel.DistributedDataParallel(Net()))


def no_group(kind):
    group = dist.new_group([0])
    wrapped(kind, process_group=group)
    if dist.get_rank() == 0:
        # torch names later groups by how many there are: as many on all ranks.
        dist.destroy_process_group(group)
        raise RuntimeError("on the ranks of process_group alone")


def no_parameters(kind):
    wrapped(kind, nn.Tanh())


def shares_memory(kind):
    module = Net()
    module.register_buffer("scale", torch.ones(1).expand(5))
    wrapped(kind, module)


def freeze(kind):
    model = wrapped(kind)
    model.module.blocks[1].requires_grad_(False)
    model(inputs(0)).backward()


def freeze_by_wrapper(kind):
    model = wrapped(kind)
    next(iter(model.parameters())).requires_grad_(False)
    model(inputs(0)).backward()


def unfreeze(kind):
    module = Net()
    module.blocks[1].norm.requires_grad_(False)
    model = wrapped(kind, module)
    module.requires_grad_(True)
    model(inputs(0)).backward()


def add(kind):
    model = wrapped(kind)
    model.module.last.more = nn.Parameter(torch.ones(()))
    (model(inputs(0)) * model.module.last.more).backward()


def replace(kind):
    model = wrapped(kind)
    model.module.last.weight = nn.Parameter(torch.ones(1, 6))
    model(inputs(0)).backward()


def of_the_module(kind):
    """An optimizer that was made before."""
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = wrapped(kind, module)
    model(inputs(0)).backward()
    optimizer.step()


def container(kind):
    """A unit whose parts are called."""
    class Parts(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block.mlp(x)
            return self.last(x).mean()

    wrapped(kind, Parts())(inputs(0))


def no_units(kind):
    wrapped(kind, nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)))


def units_without_parameters(kind):
    net = nn.Sequential(nn.Linear(5, 5), nn.ModuleList([nn.GELU()]), nn.Linear(5, 1))
    wrapped(kind, net)


def foreign_unit(kind):
    wrapped(kind, units=[nn.Linear(2, 2)])


def root_as_unit(kind):
    module = Net()
    wrapped(kind, module, units=[module])


def sum_twice(kind):
    model = wrapped(kind)
    model.set_gradient_divide_factor(1)
    model(inputs(0)).backward()
    model(inputs(1)).backward()


def sum_of_a_part(kind):
    """One gradient is zeroed, the others are still sums."""
    model = wrapped(kind)
    model.set_gradient_divide_factor(1)
    model(inputs(0)).backward()
    model.module.last.bias.grad = None
    model(inputs(1)).backward()


def copied(kind):
    model = wrapped(kind)
    copy.deepcopy(model.module)


def pickled(kind):
    model = wrapped(kind)
    pickle.dumps(model.module)


def step_while_held(kind):
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(inputs(0)).backward()
    optimizer.step()


def clip_while_held(kind):
    model = wrapped(kind)
    with model.no_sync():
        model(inputs(0)).backward()
    model.clip_grad_norm_(1.0)


def copied_whole(kind):
    copy.deepcopy(wrapped(kind))


def quantized(kind):
    class Own(nn.Parameter):
        pass

    module = Net()
    module.last.weight = Own(torch.ones(1, 6))
    wrapped(kind, module)


def state_dict(kind):
    wrapped(kind).state_dict()


def load_state_dict(kind):
    wrapped(kind).load_state_dict({})


def moved(kind):
    wrapped(kind).double()


def loads_another_state(kind):
    model = wrapped(kind)
    state = model.full_state_dict()
    model.load_full_state_dict(state | {"last.weight": torch.ones(2, 6)})


REFUSED = {
    goes_on_after_an_error: "has raised when .*call zero_grad.set_to_none=True",
    skip_a_gradient: "no gradient of .*blocks.1.down|no gradient of extra.weight, extra.bias",
    skip_on_one_rank: "rank [01]: a backward has brought no gradient of extra.",
    reentrant: "use_reentrant=False",
    graph_of_gradients: "create_graph", sparse: "table.weight is sparse",
    gradient_taken_away: "last.weight .* a hook has taken it away",
    other_parameters: r"Rank 0 has last.weight: \(1, 6\).*; rank 1 has last.weight: \(2, 6\)",
    other_buffers: "Rank 0 has a: .*; rank 1 has b: ",
    other_buckets: "Rank 0 has .*'bucket_cap_mb': 1.*; rank 1 has .*'bucket_cap_mb': 2",
    meta: "one device, and not on meta", two_devices: "one device, and not on meta",
    twice: "wrapped already", twice_the_module: "first.weight is wrapped already",
    a_part_before: "blocks.0.norm.weight is wrapped already",
    a_part_after: "0.norm.weight is wrapped already", by_torch: "by DistributedDataParallel",
    by_fully_shard: "blocks.1.norm.weight is wrapped already",
    no_group: "on the ranks of process_group alone", no_parameters: "has no parameters",
    shares_memory: "elements of scale share memory", sparse_buffer: "graph is sparse: make it",
    freeze: r"before wrapping: blocks.1.", unfreeze: "before wrapping: blocks.1.norm.w",
    freeze_by_wrapper: "before wrapping: first.weight",
    add: "adding or replacing parameters, such as last.more",
    copied_whole: "neither copied nor pickled",
    replace: "wrap after adding or replacing parameters, such as last.weight",
}
REFUSED_BY_STAGES = {
    step_before_backward: "a step between a forward and its backward|modified by an inplace",
    of_the_module: "SGD has parameters of the module, such as .*: make it of the wrapper's",
    container: "has not called these units: blocks.0, blocks.1, blocks.2",
    foreign_unit: "a Linear that is not inside of the module",
    root_as_unit: "a Net that is not inside", other_units: "Rank 0 has .*'blocks.0'.*; rank 1 has ",
    other_param_dtype: "rank 1 has .*bfloat16",
    zeroes_too_late: "gradients are left of another backward",
    copied: "neither copied nor pickled", pickled: "neither copied nor pickled",
    step_while_held: "a step while gradients are held back, such as that of blocks.2",
    clip_while_held: "clip_grad_norm_.. while gradients are held back",
    quantized: "last.weight is a Own",
    state_dict: "full_state_dict", load_state_dict: "load_full_state_dict",
    moved: "before wrapping",
    loads_another_state: r"size mismatch for last.weight",
}
REFUSED_BY_ZERO3 = {no_units: "no units with parameters of their own, .* pass units=",
                    units_without_parameters: "no units with parameters of their own",
                    changed_in_place: "has been changed in place"}
REFUSED_BY_DDP = {zeros_after_an_error: "has raised when .*call zero_grad.set_to_none=True",
                  sum_twice: "every rank would add it once more. Call zero_grad",
                  sum_of_a_part: "every rank would add it once more"}
REFUSED_ROWS = []
for table, wrappers in ((REFUSED, WRAPPERS), (REFUSED_BY_STAGES, STAGES),
                        (REFUSED_BY_ZERO3, ["zero3"]), (REFUSED_BY_DDP, ["ddp"])):
    for script, pattern in table.items():
        REFUSED_ROWS.append(pytest.param(script, wrappers, pattern, id=script.__name__))


@on_ranks(2)
@pytest.mark.parametrize(("script", "wrappers", "pattern"), REFUSED_ROWS)
def test_refused(script, wrappers, pattern):
    in_each(wrappers, is_refused, script, pattern)


def is_refused(wrapper, script, pattern):
    text = raises(RuntimeError, pattern, script, WRAPPERS[wrapper])
    assert "\n" not in text or script is loads_another_state, f"more than a line: {text}"


# -------------------------------------------------------------------------------------------------
# ranks that do different things: an error within the timeout, and not another result


def leaves_out_a_backward(model, rank):
    for step in range(3):
        loss = model(inputs(step))
        if (step, rank) != (1, 1):
            loss.backward()


def another_order(model, rank):
    for step in range(3):
        if (step, rank) == (1, 1):
            model.module.blocks = model.module.blocks[::-1]
        model(inputs(step)).backward()


def steps_alone(model, rank):
    """As where a gradient scaler of one rank alone has seen an inf."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(inputs(step)).backward()
        if (step, rank) != (1, 1):
            optimizer.step()
        optimizer.zero_grad()


def holds_back_alone(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with model.no_sync() if (step, rank) == (1, 1) else contextlib.nullcontext():
            model(inputs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def dies(model, rank):
    model(inputs(0)).backward()
    if rank == 1:
        os._exit(7)
    model(inputs(0)).backward()


def run_apart(script, kind, rank, W, folder):
    store = dist.FileStore(f"{folder}/store", W)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=W,
                            timeout=datetime.timedelta(seconds=3))
    text = "no error"
    try:
        script(wrapped(kind, **SMALL), rank)
    except RuntimeError as error:
        text = str(error)
    pathlib.Path(folder, f"rank{rank}").write_text(text)
    os._exit(0)


APART = [(leaves_out_a_backward, "zero3", "could not reduce|could not unshard"),
         (another_order, "zero3", "could not unshard blocks"),
         (steps_alone, "zero1", "could not unshard|could not reduce"),
         (steps_alone, "zero3", "could not unshard"),
         (holds_back_alone, "zero2", "could not reduce|could not unshard"),
         (dies, "ddp", "could not reduce|could not reduce"),
         (dies, "zero3", "could not unshard|could not reduce")]


def test_ranks_that_differ(tmp_path):
    """All pairs of ranks at once: most of them wait for their timeout."""
    context = multiprocessing.get_context("fork")
    started = []
    for row, (script, wrapper, _) in enumerate(APART):
        folder = tmp_path / str(row)
        folder.mkdir()
        for rank in range(2):
            arguments = script, WRAPPERS[wrapper], rank, 2, str(folder)
            started.append(context.Process(target=run_apart, args=arguments))
            started[-1].start()
    for process in started:
        process.join(30)
    for row, (script, wrapper, pattern) in enumerate(APART):
        name = f"{script.__name__} in {wrapper}"
        codes = [process.exitcode for process in started[2 * row:2 * row + 2]]
        assert {*codes} <= {0, 7}, f"{name}: a rank hangs, or was aborted: {codes}"
        text = (tmp_path / str(row) / "rank0").read_text()
        assert re.search(f"on rank 0: {pattern}", text), f"{name}: {text}"
        assert "Has another rank died?" in text, f"{name}: {text}"


# -------------------------------------------------------------------------------------------------
# files


@pytest.mark.parametrize("path", [path for pattern in ("*.py", "[!t]*/*.py")
                                  for path in ROOT.glob(pattern)], ids=lambda path: path.stem)
def test_no_assert(path):
    """`python -O` checks what Python does without it."""
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


SCRIPT = """
import torch
import torch.distributed as dist
from {file} import {wrapper}

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
model = {wrapper}(net{options})
model(torch.ones(2, 3)).square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("weights", sum(p.sum().item() for _, p in model.full_parameters()))
"""


@pytest.mark.parametrize(("files", "wrapper", "options"), [
    (["ddp"], "DDP", ""), (["ddp", "zero"], "Zero3", ", units=net.children()")])
def test_copies_work_alone(files, wrapper, options, tmp_path):
    """ddp.py by itself, and zero.py beside it, in an empty folder."""
    for name in files:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(file=files[-1], wrapper=wrapper, options=options))
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=120)
    assert done.stdout.startswith("weights "), done.stdout + done.stderr

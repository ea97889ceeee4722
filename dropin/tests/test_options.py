"""Options and odd steps that change no bit."""

import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dropin.tests.wrappers import foreach, Lamb, muon, sgd, WRAPPERS
from tests.common import native, planted, raises
from judge.measure import every_collective
from judge.training import Block, distributed, no_sync, Odd, same_bits, two_forwards
from dropin.tests.wrappers import training
from tests.ranks import on_ranks


def forwards_between(model, loss):
    loss(5)  # without a backward
    actual = loss(0)
    with torch.inference_mode():
        loss(4)
    actual.backward(retain_graph=True)
    model.zero_grad()
    actual.backward()


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
    actual = model(torch.ones(3, 5), 0)  # uses what turn 1 leaves out
    with no_sync(model):
        actual.backward()
    model(torch.ones(3, 5), 1).backward()


def no_sync_in_no_sync(model, loss):
    with no_sync(model):
        with no_sync(model):
            loss(0).backward()
        loss(1).backward()  # is held back, too
    loss(2).backward()


ODD_STEPS = (two_forwards, forwards_between, exceptions, no_sync_around_backward,
             no_sync_in_no_sync)


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


AROUND = {"NCCL's collectives": native, "rank 0 late": partial(one_is_late, 0),
          "rank 2 late": partial(one_is_late, 2)}


def full_options():
    for around in AROUND:
        for wrapper in ("ddp all", "zero1", "zero3"):
            yield training(3, wrapper, around=around)
    for wrapper in ("ddp all", "ddp one node", "zero1 in ones", "zero3 in ones"):
        yield training(3, wrapper)
    for wrapper in ("zero1", "zero3"):
        for optimizer in (sgd, foreach):
            yield training(2, wrapper, optimizer=optimizer)
    for odd_step in ODD_STEPS:
        for wrapper in ("ddp, 1 kB", "zero3"):
            yield training(3, wrapper, "odd", "lora", odd_step=odd_step)


def assert_same(wrapper, modules, naive="naive", around=None, **options):
    for name in modules:
        expected = distributed(WRAPPERS[naive], name, **options)
        with AROUND[around]() if around else nullcontext():
            actual = distributed(WRAPPERS[wrapper], name, **options)
        same_bits(expected, actual, f"{wrapper}, {name}")


@on_ranks(seconds=120)
@pytest.mark.parametrize("wrapper, modules, options, W", [
    training(2, "ddp all", "gpt", "odd", "again", around="NCCL's collectives"),
    training(2, "zero1", "gpt", "odd", "again", around="NCCL's collectives"),
    training(2, "zero2", "gpt", "odd", "again", around="NCCL's collectives"),
    training(2, "zero3", "gpt", "odd", "again", around="NCCL's collectives"),
    training(2, "ddp, 1 kB", "gpt", "odd", around="rank 0 late"),
    training(2, "zero1", "gpt", "odd", around="rank 0 late"),
    training(2, "zero3", "gpt", "odd", around="rank 0 late"),
    training(3, "ddp, 1 kB", "again", around="rank 2 late"),
    training(3, "zero2", "again", around="rank 2 late"),
    training(3, "zero3", "again", around="rank 2 late"),
    training(2, "zero1 in ones", "gpt", "again"),
    training(2, "zero3 in ones", "gpt", "again"),
    training(3, "ddp all", "gpt", "odd", "mixed"),
    training(3, "ddp one node", "gpt", "odd", "mixed"),
    training(4, "zero1 in twos", "gpt", naive="ddp nodes of 2"),
    training(4, "zero3 in twos", "gpt", naive="ddp nodes of 2"),
    training(4, "zero1 uncut in twos", "gpt", naive="ddp nodes of 2", optimizer=Lamb),
    training(4, "zero3 uncut in twos", "gpt", naive="ddp nodes of 2", optimizer=muon),
    training(2, "zero3 uncut", "gpt", "odd", around="NCCL's collectives", optimizer=muon),
    training(3, "zero2 uncut", "gpt", "odd", around="NCCL's collectives", optimizer=Lamb),
    training(3, "zero1 uncut", "again", around="rank 2 late", optimizer=Lamb),
    training(2, "zero3 uncut bf16", "gpt", "lora", naive="zero3 bf16"),
    training(2, "zero3 uncut", "odd", "lora", odd_step=forwards_between, optimizer=muon),
    training(2, "zero2 uncut", "odd", "lora", odd_step=no_sync_around_backward,
             optimizer=Lamb),
    training(2, "zero1", "lora", "odd", optimizer=sgd),
    training(2, "zero3", "lora", "odd", optimizer=sgd),
    training(3, "zero2", "lora", "odd", optimizer=foreach),
    training(3, "zero3", "lora", "odd", optimizer=foreach),
    *(training(2, "ddp, 1 kB", "odd", "lora", odd_step=odd_step) for odd_step in ODD_STEPS),
    *(training(2, "zero3", "odd", "lora", odd_step=odd_step) for odd_step in ODD_STEPS),
    *full_options()])
def test_options_change_no_bit(wrapper, modules, options):
    """Bits stay those of `average_gradients` with NCCL's collectives, a rank that is late
    everywhere, groups of one rank, hooks that send everything, and any element-by-element
    optimizer; with two forwards, evaluation before a backward, exceptions or no_sync() anywhere in
    a step."""
    assert_same(wrapper, modules, **options)


def compiled(wrap, module):
    """A wrapper of a GPT whose blocks dynamo and autograd compile."""
    for block in module.gpt.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    return wrap(module)


@on_ranks(2, seconds=120)
@pytest.mark.parametrize("wrapper", ["zero3", "ddp, 1 kB"])
def test_compiling_changes_no_bit(wrapper):
    """torch.compile of each block gives the same bits with and without a wrapper."""
    expected = distributed(partial(compiled, WRAPPERS["naive"]), "gpt")
    actual = distributed(partial(compiled, WRAPPERS[wrapper]), "gpt")
    same_bits(expected, actual, wrapper)

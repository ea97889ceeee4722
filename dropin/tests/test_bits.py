"""DDP and the stages have the bits of one process, and of torch's wrappers, whatever their options;
and they send and hold what formulas say."""

import itertools
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dropin.tests.measure import every_collective, part_of_others
from dropin.tests.training import (
    adamw, compare, distributed, no_sync, ORDERS, same_bits, STAGES, SUMS)
from dropin.tests.wrappers import (
    adafactor, foreach, Lamb, muon, sgd, training, WITHOUT_GUARDS, WRAPPERS)
from dropin.tests.zoo import Block, Chain, MODULES, Odd
from judge.measure import formula_of_bytes, formula_of_traffic, live_bytes
from tests import test_costs
from tests.common import native, planted, raises
from tests.ranks import on_ranks
from verify import device


# -------------------------------------------------------------------------------------------------
# the bits of one process


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


AROUND = {"nothing": nullcontext, "NCCL's collectives": native,
          "rank 0 late": partial(one_is_late, 0), "rank 2 late": partial(one_is_late, 2)}


def rows():
    for wrapper in ("ddp, 1 kB", *STAGES):
        yield training(2, wrapper, *MODULES, "recomputed", "inside")
        yield training(3, wrapper, factor=None)  # a product with 1/3 rounds, before the sum
        # In no_sync() a rank adds its own micro-steps first.
        yield training(3, wrapper, "gpt", "odd", "lora", "again", micro_steps=3)
        yield training(2, wrapper, "gpt", "odd", "again", around="NCCL's collectives")
    for wrapper, rank in (("ddp, 1 kB", 0), ("zero1", 2), ("zero2", 0), ("zero3", 2)):
        yield training(3, wrapper, "odd", "again", around=f"rank {rank} late")
    for stage in STAGES:
        yield training(2, stage, "odd", "experts", micro_steps=3, each_synced="announced")
        yield training(1, stage, "gpt", "odd", "skipping", micro_steps=2)
        yield training(2, f"{stage}, 1 kB", "gpt", "odd")
        # Optimizers that look at whole parameters.
        yield training(3, f"{stage} uncut", "odd", "skipping", "caller", optimizer=muon)
        yield training(2, f"{stage} uncut", "gpt", "odd", "again", optimizer=Lamb)
    for stage in ("zero2", "zero3"):
        # All micro-steps are added in the order of one process.
        yield training(3, stage, "gpt", "skipping", micro_steps=2, each_synced=True)
    yield training(4, "ddp, 1 a bucket", *SUMS)
    yield training(4, "zero3", *ORDERS)
    yield training(3, "zero3", *SUMS, factor=5)
    yield training(3, "ddp all", "gpt", *SUMS, factor=None)  # top-k of all gradients
    yield training(3, "ddp one node", "gpt", *SUMS, factor=None)
    yield training(2, "zero1 in ones", "gpt", "again")
    yield training(3, "zero3 in ones", "gpt", "again")
    yield training(2, "zero1", "lora", "odd", optimizer=sgd)
    yield training(3, "zero3", "lora", "odd", optimizer=foreach)
    yield training(2, "zero2 uncut", *SUMS, micro_steps=2, factor=None)
    yield training(3, "zero3 uncut", "gpt", "experts", optimizer=adafactor)
    yield training(3, "zero2 uncut", "odd", "lora", micro_steps=2, each_synced="announced",
                   optimizer=muon)
    yield training(4, "zero1 uncut, 1 kB", "gpt", "lora", optimizer=Lamb)
    yield training(2, "zero3 uncut", "gpt", "odd", around="NCCL's collectives", optimizer=muon)


@on_ranks(seconds=120)
@pytest.mark.parametrize(("W", "wrapper", "modules", "options"), list(rows()))
def test_bits_of_one_process(wrapper, modules, options):
    """Of gradients, their norm, and the parameters in the end, with any element-by-element
    optimizer, a rank that is late everywhere, and NCCL's collectives. Where no factor is given
    gradients are sums, which are divided when they are clipped."""
    options = dict(options)
    with AROUND[options.pop("around", "nothing")]():
        for name in modules:
            compare(WRAPPERS[wrapper], name, f"{wrapper}, {name}", **options)


# -------------------------------------------------------------------------------------------------
# the bits of another wrapper


def two_forwards(model, loss):
    """As for contrastive losses and GANs. Nothing may be freed in between."""
    (loss(0) + loss(2)).backward()


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


def pair(W, other, ours, *modules, **options):
    row = training(W, ours, *modules, **options)
    return pytest.param(W, other, *row.values[1:], id=f"{row.id}, as {other}")


def pairs():
    yield pair(2, "torch ddp", "ddp", micro_steps=2, buffers=True)
    yield pair(2, "torch ddp unsynced", "ddp unsynced", "mixed", buffers=True)
    yield pair(2, "torch ddp", "ddp", "gpt", "odd", micro_steps=2, each_synced=True)
    yield pair(2, "torch ddp", "zero3", "mixed", buffers=True)
    yield pair(2, "fsdp2", "zero2", "gpt", "lora")
    yield pair(2, "fsdp2", "zero3", "gpt", "lora")
    yield pair(2, "fsdp2 bf16", "zero1 bf16", "gpt", odd_step=two_forwards)
    yield pair(2, "fsdp2 bf16", "zero2 bf16", "gpt")
    yield pair(2, "fsdp2 bf16", "zero3 bf16", "gpt", odd_step=two_forwards)
    yield pair(2, "zero3 bf16", "zero3 uncut bf16", "gpt", "lora")
    for hook in ("bf16", "powersgd", "topk"):
        yield pair(2, f"torch ddp {hook}", f"ddp {hook}", "gpt")
    # Sums of groups are added.
    yield pair(4, "ddp nodes of 2", "zero1 in twos", "gpt")
    yield pair(4, "ddp nodes of 2", "zero3 in twos", "gpt")
    yield pair(4, "ddp nodes of 2", "zero2 uncut in twos", "gpt", optimizer=Lamb)
    yield pair(4, "ddp nodes of 2", "zero3 uncut in twos", "gpt", optimizer=muon)
    for odd_step in (two_forwards, forwards_between, exceptions, no_sync_around_backward,
                     no_sync_in_no_sync):
        for wrapper in ("ddp, 1 kB", "zero1", "zero3"):
            yield pair(2, "naive", wrapper, "odd", "lora", odd_step=odd_step)
    yield pair(2, "naive", "zero3 uncut", "odd", "lora", odd_step=forwards_between, optimizer=muon)
    yield pair(2, "naive", "zero2 uncut", "odd", "lora", odd_step=no_sync_around_backward,
               optimizer=Lamb)


@on_ranks(seconds=120)
@pytest.mark.parametrize(("W", "other", "wrapper", "modules", "options"), list(pairs()))
def test_bits_of_another_wrapper(other, wrapper, modules, options):
    """At W = 2 torch's DDP and FSDP2 have the same bits: gradients, which of them are None,
    parameters, and buffers in DDP. So has oracle.py with any step of a script's own."""
    for name in modules:
        expected = distributed(WRAPPERS[other], name, **options)
        same_bits(expected, distributed(WRAPPERS[wrapper], name, **options), f"{wrapper}, {name}")


def redundancy(parameters):
    """AdamW whose states torch shards: its ZeRO-1."""
    return adamw(parameters, kind=ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)


@on_ranks(2)
def test_bits_of_torchs_stage_1():
    for name in ("gpt", "even", "lora", "again"):
        expected = distributed(WRAPPERS["torch ddp"], name, optimizer=redundancy)
        same_bits(expected, distributed(WRAPPERS["zero1"], name), name)


def recorded(wrap, name, **options):
    """What `distributed` returns, and [(operation, bytes of its tensors)] of all collectives."""
    sent = []

    def note(operation, tensors):
        sent.append((operation, [t.nbytes for t in tensors if torch.is_tensor(t)]))

    with every_collective(note):
        return distributed(wrap, name, **options), sent


@on_ranks()
@pytest.mark.parametrize(("W", "wrapper", "modules", "options"), [
    *(training(2, wrapper, "gpt", "mixed", "caller", micro_steps=2)
      for wrapper in ("ddp, 1 kB", *STAGES)),
    *(training(3, wrapper, "odd", "skipping") for wrapper in ("ddp", *STAGES))])
def test_guards_change_nothing(wrapper, modules, options):
    """Without guards the same bits come by the same collectives: kinds, order and bytes,
    construction included."""
    for name in modules:
        expected, sent = recorded(WRAPPERS[wrapper], name, **options)
        actual, sent_without = recorded(WITHOUT_GUARDS[wrapper], name, **options)
        same_bits(expected, actual, f"{wrapper}, {name}")
        for i, (with_guards, without) in enumerate(itertools.zip_longest(sent, sent_without)):
            assert with_guards == without, (f"{wrapper}, {name}: collective {i} is {with_guards}, "
                                            f"without guards {without}")
        assert sent, "nothing was sent, so nothing was compared"


# -------------------------------------------------------------------------------------------------
# bytes


def one_step(model, x):
    model(x).backward()


def unsynced_step(model, x):
    with model.no_sync():
        model(x).backward()


def evaluation(model, x):
    with torch.no_grad():
        model(x)


def one_unit(model, x):
    model.module.units[3](x)


def four_micro_steps(model, x):
    for _ in range(4):
        model(x).backward()


def four_of_which_one_is_synced(model, x):
    with model.no_sync():
        for _ in range(3):
            model(x).backward()
    model(x).backward()


def four_announced(model, x):
    for micro_step in range(4):
        model.set_is_last_backward(micro_step == 3)
        model(x).backward()


def second_step(wrap, names):
    """What the second step of such a module shows, in which the order of use is known: (elements
    that a rank receives, messages, the part of the gradients that come after the first bucket was
    launched, bytes held after a step, bytes more when the last block goes back)."""
    before = live_bytes()
    module = test_costs.Registered(names).to(device())
    came, received = [], []
    for p in module.parameters():
        p.register_hook(lambda gradient: came.append(gradient.numel()))
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    bytes_at = {}

    def note(operation, tensors):
        received.append(part_of_others(operation) * tensors[0].numel())

    def note_bytes(*_):
        bytes_at["backward"] = live_bytes() - before

    def step():
        model(torch.arange(4, device=device())).backward()
        optimizer.step()
        bytes_at["step"] = live_bytes() - before
        optimizer.zero_grad()

    step()
    hook = module.down_0.register_full_backward_hook(note_bytes)
    step()
    hook.remove()
    launched = []
    real = model._start_reduce

    def start_reduction(bucket):
        launched.append(sum(came))
        real(bucket)

    came.clear()
    with every_collective(note), mock.patch.object(model, "_start_reduce", start_reduction):
        step()
    overlapped = 1 - launched[0] / sum(came)
    return sum(received), len(received), overlapped, bytes_at["step"], bytes_at["backward"]


def mode_of(wrapper):
    return wrapper.partition(",")[0]


@on_ranks()
@pytest.mark.parametrize(("W", "wrapper", "around"), [
    *((2, wrapper, nullcontext) for wrapper in ("ddp", *STAGES)),
    (3, "ddp", nullcontext), (3, "zero3", nullcontext),
    # Of torch's own all-gather and all-to-all a rank's own chunk does not count as received.
    (2, "ddp", native), (3, "zero2", native), (2, "zero3", native)])
def test_traffic(wrapper, around):
    """A rank receives what its stage says: gradients once, parameters once, in stage 3 twice but
    for the root and the last two units; half the bytes in bf16; no gradients in no_sync(). In a
    step of n micro-steps stages 1 and 2 receive parameters once, if they know which is the last. In
    DDP gradients come twice, as contributions and as sums.

    All in the units of `formula_of_traffic`.
    """
    share = 1 - 1 / dist.get_world_size()
    mode = mode_of(wrapper)
    n = 8
    # Or autograd saves no weight of the first unit.
    x = torch.ones(3, 48, requires_grad=True)
    unit = 4 * 48 * 48  # bytes
    root = 4 * 4096
    psi = n * unit + root
    received = Counter()

    def note(operation, tensors):
        received[operation] += part_of_others(operation) * tensors[0].nbytes / share / psi

    def assert_received(expected, act, **options):
        model = WRAPPERS[wrapper](Chain(n, 48), **options)
        act(model, x)  # makes buffers
        received.clear()
        with every_collective(note):
            act(model, x)
        total = received.total()
        assert abs(total - expected) <= 0.02, (  # what ranks agree on are some integers
            f"{act.__name__} {options}: a rank receives {total:.3f} (W - 1)/W psi elements, "
            f"expected are {expected:.3f}")

    with around():
        # In stage 3 the backward gathers all again but what is still whole.
        still_whole = (2 * unit + root) / psi
        again = 1 - still_whole if mode == "zero3" else 0
        one = formula_of_traffic(mode, 1, still_whole)
        assert_received(one, one_step)
        if mode in ("ddp", "zero1"):
            assert_received(formula_of_traffic(mode, 4), four_of_which_one_is_synced)
        # After a backward in no_sync() no step is due: stages 1 and 2 have the parameters already.
        assert_received(1 + again if mode == "zero3" else 0, unsynced_step)
        assert_received(0 if mode == "ddp" else 1, evaluation)
        if mode in STAGES:
            assert_received((root + unit) / psi, one_unit)
            assert_received(4 * (2 + again), four_micro_steps)
            # Stages 1 and 2 gather nothing between micro-steps if they know that no step comes.
            # (Here stage 1 reduces in all of them, as stage 2 does.)
            as_stage = "zero2" if mode == "zero1" else mode
            assert_received(formula_of_traffic(as_stage, 4, still_whole), four_announced)
            bf16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            assert_received((2 + again) / 2, one_step, **bf16)


@on_ranks()
@pytest.mark.parametrize(("W", "stage", "options"), [
    *((2, stage, {}) for stage in STAGES), (3, "zero3", {}),
    (4, "zero3", dict(shard_size=2)),
    (2, "zero1", dict(reduce_dtype=torch.bfloat16)),
    (2, "zero2", dict(reduce_dtype=torch.bfloat16)),
    *((2, stage, dict(param_dtype=torch.bfloat16)) for stage in STAGES)])
def test_memory(stage, options):
    """After construction and after a step a rank holds what the paper's formula says; inside
    forward and backward a few units more, and nothing when all is over. In stage 1 means of another
    dtype than the gradients take these gradients' place.

    The formula is `formula_of_bytes`: in fp32 with Adam 8 psi + 8 psi/W, 4 psi + 12 psi/W,
    16 psi/W. What is found above it is kept twice, gathered too early, or held by a reference left
    over.
    """
    options = dict(options)
    W = options.get("shard_size", dist.get_world_size())
    n = 12
    width = 64
    unit = 4 * width * width  # bytes, as the root's
    before = live_bytes()
    bytes_at = {}  # {phase: bytes held}

    def note(phase, *_):
        bytes_at[phase] = live_bytes() - before

    model = WRAPPERS[stage](Chain(n, width), **options)
    note("built")
    x = torch.ones(1, width)
    psi = 4 * sum(bucket.n for bucket in model._all_buckets)  # three ranks pad buckets
    assert (n + 1) * unit <= psi < 1.01 * (n + 1) * unit
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
    mode = mode_of(stage)
    sizes = [options.get(name, torch.float).itemsize for name in ("param_dtype", "reduce_dtype")]
    parameters, gradients, adam = [psi / 4 * each for each in formula_of_bytes(mode, W, *sizes)]
    keeps_gradients = gradients == psi
    held = parameters + gradients + adam
    # Means that have memory of their own come in the backward, and zero_grad() drops them: none are
    # there in the forward, and half of them in the middle of the backward. Units more: in stage 3
    # two whole ones and the root. In the backward the gradients of a unit that wait for the last of
    # theirs, and what of the unit before arrives from other ranks, also of other groups; and in
    # stages 2 and 3 that unit's own. Adam's counters and activations are small.
    without_means = held - gradients
    with_half = held if keeps_gradients else (without_means + held) / 2
    whole = 3 if mode == "zero3" else 0
    arrives = (W - 1) / W
    on_the_way = 1 + arrives if keeps_gradients else 2 + 2 * arrives
    of_other_groups = 2 / W if "shard_size" in options else 0
    in_forward = without_means + (whole + 0.3) * unit
    in_backward = with_half + (whole + on_the_way + of_other_groups + 0.3) * unit
    expected = {"built": (parameters, parameters + 0.03 * unit),
                "forward": (without_means, in_forward), "backward": (without_means, in_backward),
                "step": (held, held + 0.03 * unit)}
    for phase, (least, most) in expected.items():
        assert 0.97 * least <= bytes_at[phase] <= most, (
            f"{phase}: {bytes_at[phase]:,} bytes, expected are {least:,.0f} to {most:,.0f}; a unit "
            f"has {unit:,}")
    model(x)  # without a backward, which would free what autograd has saved
    del model, optimizer, middle, x
    assert live_bytes() - before <= 4096, f"{live_bytes() - before} bytes are left"


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ["ddp", *STAGES])
def test_order_of_use(wrapper):
    """A module that is registered in another order than it is used in sends and holds what it does
    when registered in order, as the formulas say, and overlaps as much: all gradients but those of
    the first block come after that was launched. From the second step on, since the first shows the
    order of use."""
    W = dist.get_world_size()
    n, block = len(test_costs.Registered.USE), test_costs.UNIT

    def wrap(module):
        if wrapper == "ddp":  # a bucket for each block
            return WRAPPERS[wrapper](module, bucket_cap_mb=4 * block / 2**20)
        return WRAPPERS[wrapper](module, units=module.units())

    # The embedding belongs to the root, which stays whole, as the last two blocks.
    elements = formula_of_traffic(wrapper, 1, still_whole=3 / n) * (1 - 1 / W) * n * block
    held = n * block * sum(formula_of_bytes(wrapper, W))
    whole = 3 if wrapper == "zero3" else 0
    keeps_gradients = wrapper in ("ddp", "zero1")
    more = whole + (1 if keeps_gradients else 2 + 2 * (W - 1) / W) + 0.3  # as in test_memory
    shown = {order: second_step(wrap, names) for order, names in test_costs.ORDERS.items()}
    in_order = shown["in_order"]
    for order, actual in shown.items():
        received, messages, overlapped, after_step, backward = actual
        assert 0 <= received - elements <= 16 * n, (  # what ranks agree on are some integers
            f"{order}: a rank receives {received} elements, expected are {elements:.0f}")
        assert overlapped == 1 - 1 / n, (
            f"{order}: {overlapped:.2f} of the gradients come after the first launch")
        assert actual[:3] == in_order[:3], (f"{order}: (elements, messages, overlapped): "
                                            f"{actual[:3]}, in order {in_order[:3]}")
        assert 0.97 * held <= after_step <= 1.03 * held, f"{order}: {after_step}, not {held:.0f}"
        assert backward <= held + 4 * more * block, (
            f"{order}: {backward} bytes in a backward, expected at most {more:.1f} blocks above "
            f"{held:.0f}")

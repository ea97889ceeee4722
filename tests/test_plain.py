"""The plain classes, which are the paper's algorithm and nothing else."""

import ast
import contextlib
import inspect
from functools import partial
from unittest import mock

import pytest
import torch

import verify
from ddp import DDP, PlainDDP, Reducer, Wrapper
from tests.common import planted, raises
from verify import Chain, compare, every_collective, memory_is_the_formulas
from zero import PlainZero1, PlainZero2, PlainZero3, Stage, StateDicts, Zero1, Zero2, Zero3

STAGES = {}
for kind in (PlainZero1, PlainZero2, PlainZero3):  # with what `compare` reads
    name = kind.__name__.removeprefix("Plain").lower()
    STAGES[name] = type(kind.__name__, (StateDicts, kind), {})
PLAIN = {"ddp": PlainDDP, "ddp, 1 kB": partial(PlainDDP, bucket_cap_mb=0.001), **STAGES}


# Where a layer's method does without the plain one: nowhere else.
WITHOUT_SUPER = {
    "Guards._notice_backward": "a hook that is called by hand is no sign of a backward",
    "TorchOptions._buffers_at_first": "broadcast_buffers=False: there are none",
    "TorchOptions._scale_before_sum": "a comm hook scales",
    "TorchOptions._start_reduction": "a comm hook reduces",
    "TorchOptions._finish_reduction": "a comm hook reduces",
    "UnevenRanks._put": "there is no gradient",
    "UnevenForwards._post_forward": "a hook before ours has raised: no forward has begun",
    "UnevenForwards._give_mean": "a `.grad` that a script keeps is the same object as before",
    "UnevenOrder._is_ready": "no: there is a gather to start before",
    "UnevenOrder._reshard_all": "not yet: the backward ran inside a forward",
    "UnevenOrder._take_notes": "they are taken already, or nothing is saved",
    "Hybrid._finish_reduction": "not yet: after the sum over groups, by `_finish_sum`",
    "OtherMemory._new_chunk": "on the CPU",
}


def ways_through(statements, name):
    """How a method may end: "called", after super().name(), "ended" or "open", without it. A way
    that raises is none."""
    ways = set()
    for statement in statements:
        calls = f"super().{name}(" in ast.unparse(statement)
        if isinstance(statement, ast.If):
            inner = ways_through(statement.body, name) | ways_through(statement.orelse, name)
        elif isinstance(statement, (ast.With, ast.Try)):
            inner = ways_through(statement.body, name)
        elif isinstance(statement, ast.Raise):
            inner = set()
        elif isinstance(statement, ast.Return):
            inner = {"called" if calls else "ended"}
        else:
            is_sure = not isinstance(statement, (ast.For, ast.While, ast.FunctionDef))
            inner = {"called" if calls and is_sure else "open"}
        ways |= inner - {"open"}
        if "open" not in inner:
            return ways
    return ways | {"open"}


@pytest.mark.parametrize("wrapper", [DDP, Zero1, Zero2, Zero3])
def test_layers_only_add(wrapper):
    """Where a layer has a method of a plain class, it calls that: what one has read is what runs.
    """
    plain = [Wrapper, Reducer, PlainDDP, Stage, PlainZero1, PlainZero2, PlainZero3]
    kinds = wrapper.__mro__
    found = {}
    for i, layer in enumerate(kinds):
        if layer in plain or layer.__module__ not in ("ddp", "zero", "guards"):
            continue
        below = [kind for kind in kinds[i:] if kind in plain]
        for method in ast.parse(inspect.getsource(layer)).body[0].body:
            if not isinstance(method, ast.FunctionDef):
                continue
            if any(method.name in vars(kind) for kind in below):
                found[f"{layer.__name__}.{method.name}"] = ways_through(method.body, method.name)
    assert len(found) > 15, "this test does not see the layers"
    replaced = {name for name, ways in found.items() if "called" not in ways}
    assert not replaced, f"{wrapper.__name__} does not run what is read: {replaced}"
    without = {name for name, ways in found.items() if ways - {"called"}}
    assert without <= WITHOUT_SUPER.keys(), f"without super: {without - WITHOUT_SUPER.keys()}"


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.limit(120)
@pytest.mark.parametrize("wrapper", PLAIN)
@pytest.mark.parametrize("name", ["gpt", "recomputed"])
def test_plain_has_the_bits_of_one_process(wrapper, name):
    wrap = PLAIN[wrapper]
    compare(wrap, name, wrapper)
    compare(wrap, name, wrapper, micro_steps=3)
    compare(wrap, name, wrapper, factor=None)
    if wrapper in ("zero2", "zero3"):
        compare(wrap, name, wrapper, micro_steps=2, each_synced=True)


@pytest.mark.ranks(2)
def test_plain_zero3_prefetches():
    n = 8
    calls = []
    found = {}
    expected = {}
    model = PlainZero3(Chain(n, 8))

    def note(phase, *_):
        found[phase] = len(calls)

    for i, unit in enumerate(model.module.units):
        unit.register_forward_pre_hook(partial(note, f"forward of unit {i}"))  # after ours
        unit.register_full_backward_hook(partial(note, f"backward of unit {i}"))
        expected[f"forward of unit {i}"] = 1 + min(i + 2, n)
        expected[f"backward of unit {i}"] = 1 + n + min(n - 1 - i, n - 2)
    with every_collective(lambda *call: calls.append(call)), model.no_sync():
        model(torch.ones(3, 8, requires_grad=True)).backward()
    assert found == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage, recomputed", [("zero1", False), ("zero2", False),
                                               ("zero3", False)])
def test_plain_memory(stage, recomputed):
    plain = {name: lambda module, kind=kind, **options: kind(module)
             for name, kind in STAGES.items()}
    with mock.patch.object(verify, "STAGES", plain):
        memory_is_the_formulas(stage, recomputed=recomputed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", PLAIN)
def test_plain_traffic(wrapper):
    n = 8
    x = torch.ones(3, 48)
    unit, root = 48 * 48, 4096
    psi = n * unit + root
    received = []

    def note(operation, tensors):
        received.append(tensors[0].numel())

    model = PLAIN[wrapper](Chain(n, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for steps in (1, 4):
        for _ in range(2):
            received.clear()
            with every_collective(note):
                for i in range(steps):
                    is_held = wrapper == "zero1" and i < steps - 1
                    with model.no_sync() if is_held else contextlib.nullcontext():
                        model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = sum(received) / (psi / 2)
        expected = 2 * steps
        if wrapper in STAGES:
            expected = verify.formula_of_traffic(wrapper, steps, (2 * unit + root) / psi)
        assert abs(found - expected) < 0.02, f"{steps} micro-steps: {found}, expected {expected}"


class Shared(torch.nn.Module):
    """Of the root: an embedding, a norm after it, and a factor that each block uses. Blocks are
    called in an order; those that are left out are frozen."""

    def __init__(self, order=range(6)):
        super().__init__()
        self.order = order
        torch.manual_seed(0)
        self.first = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
        for i, block in enumerate(self.blocks):
            block.requires_grad_(i in order)

    def forward(self, idx):
        x = self.norm(self.first(idx))
        for i in self.order:
            x = x + self.blocks[i](x * self.scale).tanh()
        return x.square().mean()


def step_of(model, idx):
    model(idx).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.ranks(2)
def test_plain_zero3_gathers_at_most_twice():
    """Also where weights of the root are asked for in the middle and at the end of a backward."""
    received = []
    model = STAGES["zero3"](Shared())
    psi = sum(bucket.n for unit in model._units for bucket in unit.buckets)
    with every_collective(lambda operation, tensors: received.append(tensors[0].numel())):
        step_of(model, torch.arange(11))
    assert 2 * psi < 2 * sum(received) <= 3 * psi


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", PLAIN)
def test_plain_gradients_may_be_set_to_zero(wrapper):
    """zero_grad(set_to_none=False) is as good."""
    model = PLAIN[wrapper](Shared())
    expected = step_of(model, torch.arange(11))
    for p in model.parameters():
        p.grad.zero_()
    found = step_of(model, torch.arange(11))
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def has_the_gradients_of_ddp(make):
    whole = step_of(PLAIN["ddp"](make()), torch.arange(11))
    model = STAGES["zero3"](make())
    starts = model.shard_starts()
    for name, shard in step_of(model, torch.arange(11)).items():
        n = shard.numel()
        expected = whole[f"module.{name}"].flatten()[starts[name]:starts[name] + n]
        assert torch.equal(expected, shard.flatten()), name


def partly_frozen(kind):
    module = Shared()
    for name, p in module.named_parameters():
        p.requires_grad = kind not in name
    return module


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["bias", "blocks.2", "block"])
def test_plain_zero3_with_frozen_parameters(kind):
    """A unit with few gradients, or none, is right."""
    has_the_gradients_of_ddp(partial(partly_frozen, kind))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", PLAIN)
def test_plain_refuses_a_backward_after_one_that_raised(wrapper):
    """What that has left in buckets would be added."""
    model = PLAIN[wrapper](Shared())
    idx = torch.arange(11)
    with model.module.blocks[2].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", model(idx).backward)
    raises(AssertionError, "one that raised", model(idx).backward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", [(5, 0, 3), (2, 2, 1, 2, 0), (0, 1, 0, 2)])
def test_plain_zero3_in_any_order(order):
    """Units may be skipped, or called again, if all ranks do so."""
    has_the_gradients_of_ddp(partial(Shared, order))

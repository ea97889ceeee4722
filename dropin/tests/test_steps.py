"""Steps that are not plain: sums, closures, frozen parameters, backwards of inputs."""

from functools import partial
from unittest import mock

import pytest
import torch

from dropin import DDP, Zero1, Zero2, Zero3
from dropin.tests.measure import every_collective
from dropin.tests.scripts import ALL, IDX, of_each, Shared, step_of
from dropin.tests.wrappers import WRAPPERS
from dropin.tests.zoo import Chain
from tests.ranks import on_ranks

STAGES = ("zero1", "zero2", "zero3")


@on_ranks(2)
@of_each(*ALL)
def test_gradients_may_be_set_to_zero(wrapper):
    """zero_grad(set_to_none=False) is as good, whatever the divide factor is, also with backwards
    that are held back after it."""
    for held in (0, 1):
        model = WRAPPERS[wrapper](Shared())
        model.set_gradient_divide_factor(1)
        once = step_of(model, IDX)
        for p in model.parameters():
            p.grad.zero_()
        with model.no_sync():
            for _ in range(held):
                model(IDX).backward()
        for name, gradient in step_of(model, IDX).items():
            assert torch.equal(gradient, (1 + held) * once[name]), name


@on_ranks(2)
@of_each(*STAGES)
def test_what_was_not_zeroed_adds_up(stage):
    """Of backwards before a step, but for a `.grad` that was dropped."""
    model = WRAPPERS[stage](Shared())
    once = step_of(model, IDX)
    dict(model.named_parameters())["scale"].grad = None
    for name, gradient in step_of(model, IDX).items():
        expected = once[name] if name == "scale" else 2 * once[name]
        assert torch.equal(gradient, expected), name


@on_ranks(2)
def test_means_of_another_dtype_add_up():
    """Of backwards before a step, also where gradients have 16 bits on their way."""
    for kind in (Zero1, Zero2, Zero3):
        model = kind(Shared(), reduce_dtype=torch.bfloat16)
        once = step_of(model, IDX)
        for name, gradient in step_of(model, IDX).items():
            assert gradient.equal(2 * once[name]), (kind, name)


@on_ranks(3)
@of_each(*STAGES)
def test_sums_are_made_in_reduce_dtype(stage):
    """Of micro-steps in no_sync(), and of ranks; they are rounded once, to that of shards."""
    model = WRAPPERS[stage](Shared(), reduce_dtype=torch.float64)
    model.set_gradient_divide_factor(1)
    whole = model.full_state_dict()
    expected = {}
    for scale in (1.0, 1e-7, 3.0):
        plain = Shared()
        plain.load_state_dict(whole)
        (scale * plain(IDX)).backward()
        for name, p in plain.named_parameters():
            expected[name] = expected.get(name, 0) + p.grad.double()
    for scale in (1.0, 1e-7):
        with model.no_sync():
            (scale * model(IDX)).backward()
    (3.0 * model(IDX)).backward()
    starts = model.shard_starts()
    for name, p in model.named_parameters():
        n = len(p.grad)
        total = expected[name].flatten()[starts[name]:starts[name] + n] * 3  # of three equal ranks
        assert torch.equal(p.grad.as_subclass(torch.Tensor).flatten(), total.float()), name


@on_ranks(2)
@of_each(*ALL)
def test_closures(wrapper):
    """The forward of a closure comes before the update of its step: so the next one gathers."""
    actual = []
    for model in (Shared(), WRAPPERS[wrapper](Shared())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(IDX)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        with torch.no_grad():
            actual.append([*losses, model(IDX).item()])
    assert actual[0] == actual[1] and len(set(actual[0])) == 4


@on_ranks(2)
@of_each(*STAGES)
def test_loaded_parameters_are_used(stage):
    model = WRAPPERS[stage](Shared())
    zeros = {name: torch.zeros_like(t) for name, t in model.full_state_dict().items()}
    with torch.no_grad():
        assert model(IDX) != 0
        model.load_full_state_dict(zeros)
        assert model(IDX) == 0


class Sparse(torch.nn.Module):
    """Autograd saves a sparse matrix, which has no memory of its own, beside a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, _):
        matrix, x = torch.eye(8).to_sparse(), torch.ones(8, 8)
        for block in self.blocks:
            x = torch.sparse.mm(matrix, block(x).tanh())
        return x.square().mean()


def frozen(word):
    module = Shared()
    for name, p in module.named_parameters():
        p.requires_grad = word not in name
    return module


@on_ranks(2)
@pytest.mark.parametrize("make", [
    Sparse, partial(frozen, "bias"), partial(frozen, "blocks.2"), partial(frozen, "block"),
    partial(Shared, (5, 0, 3)), partial(Shared, (2, 2, 1, 2, 0)), partial(Shared, (0, 1, 0, 2))])
def test_stage_3_has_the_gradients_of_ddp(make):
    """Also where a unit has few gradients, or none, and where units are skipped or called again, if
    all ranks do so. At most three times the parameters are received."""
    whole = step_of(DDP(make(), find_unused_parameters=True), IDX)
    received = []
    model = WRAPPERS["zero3"](make())
    starts = model.shard_starts()
    with every_collective(lambda operation, tensors: received.append(tensors[0].numel())):
        gradients = step_of(model, IDX)
    for name, shard in gradients.items():
        expected = whole[f"module.{name}"].flatten()[starts[name]:starts[name] + shard.numel()]
        assert torch.equal(expected, shard.flatten()), name
    assert 2 * sum(received) <= 3 * sum(bucket.n for bucket in model._all_buckets)


@on_ranks(2)
def test_a_backward_of_inputs_averages_nothing():
    """Notes and checkpoints are signs of it, but it brings no gradient of a parameter."""
    for kind in (DDP, Zero1, Zero2, Zero3):
        model = kind(Chain(4, 8, recomputed=True))
        x = torch.ones(3, 8, requires_grad=True)
        with mock.patch.object(model, "_start_reduce") as start:
            model(x).backward(inputs=[x])
        assert x.grad.any() and not start.called
        model(x).backward()
        assert all(p.grad is not None for p in model.parameters())

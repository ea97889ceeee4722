"""The plain classes, which are the paper's algorithm and nothing else, and a layer by itself. Their
bits, traffic and memory are in test_bits.py."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dropin.ddp import DDP, PlainDDP, TorchOptions, UnevenRanks
from dropin.tests.measure import every_collective
from dropin.tests.scripts import of_each
from dropin.tests.wrappers import PLAIN
from dropin.zero import PlainZero3, Zero1, Zero2, Zero3
from judge.measure import Chain
from judge.training import gather
from tests.common import on_meta, planted, raises
from tests.ranks import on_ranks

IDX = torch.arange(11)
STAGES = ("plain zero1", "plain zero2", "plain zero3")


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


# -------------------------------------------------------------------------------------------------
# what they promise


@on_ranks(2)
@of_each(*PLAIN)
def test_gradients_may_be_set_to_zero(wrapper):
    """zero_grad(set_to_none=False) is as good, whatever the divide factor is, also with backwards
    that are held back after it."""
    for held in (0, 1):
        model = PLAIN[wrapper](Shared())
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
@of_each("plain zero2", "plain zero3")
def test_what_was_not_zeroed_adds_up(stage):
    """Of backwards before a step, but for a `.grad` that was dropped."""
    model = PLAIN[stage](Shared())
    once = step_of(model, IDX)
    model._slots[model.module.scale].shard.grad = None
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


@on_ranks(2)
@of_each(*PLAIN)
def test_closures(wrapper):
    """The forward of a closure comes before the update of its step: so the next one gathers."""
    actual = []
    for model in (Shared(), PLAIN[wrapper](Shared())):
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
    model = PLAIN[stage](Shared())
    zeros = {name: torch.zeros_like(t) for name, t in model.full_state_dict().items()}
    with torch.no_grad():
        assert model(IDX) != 0
        model.load_full_state_dict(zeros)
        assert model(IDX) == 0


@on_ranks(2)
def test_stage_3_leaves_no_gather_under_way():
    """Nobody asks for the weight of a first block whose input needs no gradient. What was gathered
    for it is awaited before its memory is freed."""
    model = PlainZero3(Chain(4, 8))
    waited = []

    def note(unit, wait=model._wait_for_unshard):
        waited.extend([unit.name] * len(unit.gathers))
        wait(unit)

    with mock.patch.object(model, "_wait_for_unshard", note):
        model(torch.ones(3, 8)).backward()
    assert waited.count("units.0") == 2, waited
    assert not any(unit.gathers or unit.is_current for unit in model._units)


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
    whole = step_of(PlainDDP(make()), IDX)
    received = []
    model = PLAIN["plain zero3"](make())
    starts = model.shard_starts()
    with every_collective(lambda operation, tensors: received.append(tensors[0].numel())):
        gradients = step_of(model, IDX)
    for name, shard in gradients.items():
        expected = whole[f"module.{name}"].flatten()[starts[name]:starts[name] + shard.numel()]
        assert torch.equal(expected, shard.flatten()), name
    assert 2 * sum(received) <= 3 * sum(bucket.n for bucket in model._all_buckets())


# -------------------------------------------------------------------------------------------------
# what they ask for, and do not get


def goes_twice(model):
    model(IDX).backward()
    model(IDX).backward()


def sums_twice(model):
    model.set_gradient_divide_factor(1)
    goes_twice(model)


def raises_in_a_backward(model):
    with model.module.blocks[2].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", model(IDX).backward)
    model(IDX).backward()


def leaves_a_parameter_out(model):
    model.module.order = (0, 1)
    model(IDX).backward()


def steps_in_between(model):
    loss = model(IDX)
    loss.backward(retain_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def writes_to_what_is_saved(model):
    kept = []
    model.module.norm.register_forward_hook(lambda module, inputs, output: kept.append(output))
    loss = model(IDX)
    with torch.no_grad():
        kept[0].add_(1)
    loss.backward()


def sees_a_weight_as_complex(model):
    def forward(x):
        pairs = torch.view_as_complex(model.module.blocks[0].weight.view(8, 4, 2))
        return x * pairs.square().real.sum()

    with mock.patch.object(model.module.blocks[0], "forward", forward):
        model(IDX).backward()


MODIFIED = "modified (in place|by an inplace operation)"
REFUSED = [(sums_twice, ["plain ddp"], "zero_grad.* would be summed again"),
           (goes_twice, ["plain zero1"], "zero_grad.* would be lost"),
           (raises_in_a_backward, PLAIN, "one that raised"),
           (leaves_a_parameter_out, PLAIN, "gradient of every parameter"),
           (steps_in_between, PLAIN, MODIFIED), (writes_to_what_is_saved, PLAIN, MODIFIED),
           (sees_a_weight_as_complex, ["plain zero3"], "as other numbers")]
REFUSED_ROWS = [pytest.param(script, wrapper, pattern, id=f"{script.__name__}-{wrapper}")
                for script, wrappers, pattern in REFUSED for wrapper in wrappers]


@on_ranks(2)
@pytest.mark.parametrize(("script", "wrapper", "pattern"), REFUSED_ROWS)
def test_they_are_not_silent(script, wrapper, pattern):
    """A script that does what the docstring excludes gets an error. Each has a group of its own:
    where it is refused, messages are under way that nobody waits for, and gloo may then hang."""
    raises((AssertionError, RuntimeError), pattern, script, PLAIN[wrapper](Shared()))


@on_ranks(2)
@of_each(*STAGES)
def test_they_take_no_meta_device(stage):
    raises(AssertionError, "meta device", PLAIN[stage], on_meta(Shared))


@on_ranks(1)
@of_each(*STAGES)
def test_a_step_in_between_is_refused_on_one_rank(stage):
    """Where nothing is gathered, either."""
    raises(RuntimeError, MODIFIED, steps_in_between, PLAIN[stage](Shared()))


# -------------------------------------------------------------------------------------------------
# a layer by itself


class AloneWithRanks(UnevenRanks, PlainDDP):
    pass


class AloneWithOptions(TorchOptions, PlainDDP):
    pass


@on_ranks(2)
def test_uneven_ranks_stand_alone():
    """Buffers are rank 0's, and a parameter that one rank has used has its mean on both."""
    rank = dist.get_rank()
    module = Shared()
    module.register_buffer("where", torch.tensor([float(rank)]))
    model = AloneWithRanks(module)
    module.where.fill_(rank + 1)
    module.order = range(6 - rank)
    model(IDX).backward()
    assert module.where == 1
    assert module.blocks[5].weight.grad.any()
    assert torch.equal(*gather(module.blocks[5].weight.grad))
    model.zero_grad()
    module.order = range(6)
    with model.no_sync():
        model(IDX).backward()
    model.zero_grad()  # forgets what was held
    module.order = range(5)
    model(IDX).backward()
    assert module.blocks[5].weight.grad is None


@on_ranks(2)
def test_torch_options_stand_alone():
    """Means that were not zeroed stay what they are, with any divide factor."""
    model = AloneWithOptions(Shared(), device_ids=None)
    model.set_gradient_divide_factor(1)
    once = step_of(model, IDX)
    for name, gradient in step_of(model, IDX).items():
        torch.testing.assert_close(gradient, 2 * once[name])


@on_ranks(2)
def test_a_backward_of_inputs_averages_nothing():
    """Notes and checkpoints are signs of it, but it brings no gradient of a parameter."""
    for kind in (DDP, Zero1, Zero2, Zero3):
        model = kind(Chain(4, 8, recomputed=True))
        x = torch.ones(3, 8, requires_grad=True)
        with mock.patch.object(model, "_start_reduction") as start:
            model(x).backward(inputs=[x])
        assert x.grad.any() and not start.called
        model(x).backward()
        assert all(p.grad is not None for p in model.parameters())

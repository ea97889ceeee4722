"""The plain classes, which are the paper's algorithm and nothing else."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dropin.ddp import DDP, PlainDDP, TorchOptions, UnevenRanks
from dropin.zero import PlainZero1, PlainZero2, PlainZero3, StateDicts, Zero1, Zero2, Zero3
from tests.common import planted, raises
from judge.measure import Chain, every_collective
from judge.training import gather
from tests.ranks import on_ranks

STAGES = {}
for kind in (PlainZero1, PlainZero2, PlainZero3):  # with what `compare` reads
    name = kind.__name__.removeprefix("Plain").lower()
    STAGES[name] = type(kind.__name__, (StateDicts, kind), {})
PLAIN = {"ddp": PlainDDP, "ddp, 1 kB": partial(PlainDDP, bucket_cap_mb=0.001), **STAGES}


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


@on_ranks(2)
def test_plain_zero3_gathers_at_most_twice():
    """Also where weights of the root are asked for in the middle and at the end of a backward."""
    received = []
    model = STAGES["zero3"](Shared())
    psi = sum(bucket.n for unit in model._units for bucket in unit.buckets)
    with every_collective(lambda operation, tensors: received.append(tensors[0].numel())):
        step_of(model, torch.arange(11))
    assert 2 * psi < 2 * sum(received) <= 3 * psi


@on_ranks(2)
@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("wrapper", PLAIN)
def test_plain_gradients_may_be_set_to_zero(wrapper, held):
    """zero_grad(set_to_none=False) is as good, whatever the divide factor is, also with backwards
    that are held back after it."""
    model = PLAIN[wrapper](Shared())
    model.set_gradient_divide_factor(1)
    once = step_of(model, torch.arange(11))
    for p in model.parameters():
        p.grad.zero_()
    with model.no_sync():
        for _ in range(held):
            model(torch.arange(11)).backward()
    for name, gradient in step_of(model, torch.arange(11)).items():
        assert torch.equal(gradient, (1 + held) * once[name]), name


@on_ranks(2)
@pytest.mark.parametrize("kind", [Zero1, Zero2, Zero3])
def test_means_of_another_dtype_add_up(kind):
    """Of backwards before a step, also where gradients have 16 bits on their way."""
    model = kind(Shared(), reduce_dtype=torch.bfloat16)
    once = step_of(model, torch.arange(11))
    for name, gradient in step_of(model, torch.arange(11)).items():
        assert gradient.equal(2 * once[name]), name


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_plain_accumulates_what_was_not_zeroed(stage):
    """Backwards before a step add up in stages 2 and 3, but for a `.grad` that was dropped."""
    model = STAGES[stage](Shared())
    once = step_of(model, torch.arange(11))
    scale = model._slots[model.module.scale].shard
    scale.grad = None
    for name, gradient in step_of(model, torch.arange(11)).items():
        expected = once[name] if name == "scale" else 2 * once[name]
        assert torch.equal(gradient, expected), name


@on_ranks(2)
@pytest.mark.parametrize("wrapper", PLAIN)
def test_plain_takes_a_closure(wrapper):
    """The forward of a closure comes before the update of its step: so the next one gathers."""
    actual = {}
    for is_wrapped in (False, True):
        model = PLAIN[wrapper](Shared()) if is_wrapped else Shared()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.arange(11))
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        with torch.no_grad():
            losses.append(model(torch.arange(11)).item())
        actual[is_wrapped] = losses
    assert actual[True] == actual[False] and len(set(actual[True])) == 4


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_loaded_parameters_are_used(stage):
    model = STAGES[stage](Shared())
    zeros = {name: torch.zeros_like(t) for name, t in model.full_state_dict().items()}
    with torch.no_grad():
        assert model(torch.arange(11)) != 0
        model.load_full_state_dict(zeros)
        assert model(torch.arange(11)) == 0


@on_ranks(2)
def test_plain_zero3_leaves_no_gather_under_way():
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

    def forward(self, x):
        matrix = torch.eye(8).to_sparse()
        for block in self.blocks:
            x = torch.sparse.mm(matrix, block(x).tanh())
        return x.square().mean()


@on_ranks(2)
def test_plain_zero3_with_what_is_sparse():
    has_the_gradients_of_ddp(Sparse, torch.ones(8, 8))


# ---- what the plain classes ask for, and do not get


def goes_twice(model):
    model(torch.arange(11)).backward()
    model(torch.arange(11)).backward()


def raises_in_a_backward(model):
    idx = torch.arange(11)
    with model.module.blocks[2].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", model(idx).backward)
    model(idx).backward()


def leaves_a_parameter_out(model):
    model.module.order = (0, 1)
    model(torch.arange(11)).backward()


def steps_in_between(model):
    loss = model(torch.arange(11))
    loss.backward(retain_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def writes_to_what_is_saved(model):
    kept = []
    model.module.norm.register_forward_hook(lambda module, inputs, output: kept.append(output))
    loss = model(torch.arange(11))
    with torch.no_grad():
        kept[0].add_(1)
    loss.backward()


def sees_a_weight_as_complex(model):
    def forward(x):
        pairs = torch.view_as_complex(model.module.blocks[0].weight.view(8, 4, 2))
        return x * pairs.square().real.sum()

    with mock.patch.object(model.module.blocks[0], "forward", forward):
        model(torch.arange(11)).backward()


MODIFIED = "modified (in place|by an inplace operation)"


@on_ranks(2)
@pytest.mark.parametrize("wrapper, script, factor, kind, pattern", [
    ("ddp", goes_twice, 1, AssertionError, "zero_grad.* would be summed again"),
    ("zero1", goes_twice, None, AssertionError, "zero_grad.* would be lost"),
    *((wrapper, raises_in_a_backward, None, AssertionError, "one that raised")
      for wrapper in PLAIN),
    *((wrapper, leaves_a_parameter_out, None, AssertionError, "gradient of every parameter")
      for wrapper in PLAIN),
    *((wrapper, steps_in_between, None, RuntimeError, MODIFIED) for wrapper in PLAIN),
    *((wrapper, writes_to_what_is_saved, None, RuntimeError, MODIFIED) for wrapper in PLAIN),
    ("zero3", sees_a_weight_as_complex, None, AssertionError, "as other numbers")])
def test_plain_is_not_silent(wrapper, script, factor, kind, pattern):
    """A script that does what the docstring excludes gets an error."""
    model = PLAIN[wrapper](Shared())
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    raises(kind, pattern, script, model)


@on_ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_plain_refuses_a_step_in_between_on_one_rank(stage):
    """Where nothing is gathered, either."""
    raises(RuntimeError, MODIFIED, steps_in_between, STAGES[stage](Shared()))


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_plain_takes_no_meta_device(stage):
    with torch.device("meta"):
        module = Shared()
    raises(AssertionError, "meta device", STAGES[stage], module)


# ---- a layer by itself


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
    model(torch.arange(11)).backward()
    assert module.where == 1
    assert module.blocks[5].weight.grad.any()
    same_on_all_ranks = gather(module.blocks[5].weight.grad)
    assert torch.equal(*same_on_all_ranks)
    model.zero_grad()
    module.order = range(6)
    with model.no_sync():
        model(torch.arange(11)).backward()
    model.zero_grad()  # forgets what was held
    module.order = range(5)
    model(torch.arange(11)).backward()
    assert module.blocks[5].weight.grad is None


@on_ranks(2)
@pytest.mark.parametrize("kind", [DDP, Zero1, Zero2, Zero3])
def test_a_backward_of_inputs_averages_nothing(kind):
    """Notes and checkpoints are signs of it, but it brings no gradient of a parameter."""
    model = kind(Chain(4, 8, recomputed=True))
    x = torch.ones(3, 8, requires_grad=True)
    with mock.patch.object(model, "_start_reduction") as start:
        model(x).backward(inputs=[x])
    assert x.grad.any() and not start.called
    model(x).backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_torch_options_stand_alone():
    """Means that were not zeroed stay what they are, with any divide factor."""
    model = AloneWithOptions(Shared(), device_ids=None)
    model.set_gradient_divide_factor(1)
    once = step_of(model, torch.arange(11))
    for name, gradient in step_of(model, torch.arange(11)).items():
        torch.testing.assert_close(gradient, 2 * once[name])


# ---- units in any order


def has_the_gradients_of_ddp(make, x=torch.arange(11)):
    whole = step_of(PLAIN["ddp"](make()), x)
    model = STAGES["zero3"](make())
    starts = model.shard_starts()
    for name, shard in step_of(model, x).items():
        n = shard.numel()
        expected = whole[f"module.{name}"].flatten()[starts[name]:starts[name] + n]
        assert torch.equal(expected, shard.flatten()), name


def partly_frozen(kind):
    module = Shared()
    for name, p in module.named_parameters():
        p.requires_grad = kind not in name
    return module


@on_ranks(2)
@pytest.mark.parametrize("kind", ["bias", "blocks.2", "block"])
def test_plain_zero3_with_frozen_parameters(kind):
    """A unit with few gradients, or none, is right."""
    has_the_gradients_of_ddp(partial(partly_frozen, kind))


@on_ranks(2)
@pytest.mark.parametrize("order", [(5, 0, 3), (2, 2, 1, 2, 0), (0, 1, 0, 2)])
def test_plain_zero3_in_any_order(order):
    """Units may be skipped, or called again, if all ranks do so."""
    has_the_gradients_of_ddp(partial(Shared, order))

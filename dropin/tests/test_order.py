"""The order of use, which a wrapper learns from its first step."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from dropin import DDP, Zero3
from dropin.ranks import in_order_of_use
from dropin.tests.measure import every_collective
from dropin.tests.scripts import IDX, of_each, Shared, step_of
from dropin.tests.training import STAGES
from tests.common import native, planted, raises
from tests.ranks import on_ranks

SMALL = 0.0003  # MB: a block of `Shared`
OURS = {"ddp": partial(DDP, bucket_cap_mb=SMALL, find_unused_parameters=True), **STAGES}
LATE = (3, 1, 5, 0, 2, 4)  # blocks of `Shared`, used in this order
ORDERLY = (0, 1, 2, 3, 4, 5)


def test_in_order_of_use():
    assert in_order_of_use([1, 2, 3, 4], [2, 4, 1, 3]) == [2, 4, 1, 3]
    assert in_order_of_use([1, 2, 3, 4, 5], [4, 2]) == [1, 4, 3, 2, 5], "others keep their places"
    assert in_order_of_use([1, 2, 3], []) == [1, 2, 3]
    assert in_order_of_use([1, 2], [3, 2, 1]) == [2, 1]


def names_of(units):
    return [unit.name.removeprefix("blocks.") for unit in units]


def assert_learned(model, order):
    """model knows the order of these blocks."""
    blocks = [str(i) for i in order]
    assert model._knows_order
    if not isinstance(model, DDP):
        actual = names_of(model.units)
        assert actual == ["the root", *blocks], f"units are {actual}"
    first = [bucket.names[0] for bucket in model.buckets if "blocks" in bucket.names[0]]
    actual = list(dict.fromkeys(fqn.split(".")[1] for fqn in first))
    assert actual == blocks[::-1], f"buckets are of {actual}"


def assert_means(model, *orders, make=Shared):
    """At W = 2: a step in which rank r calls the blocks of the r-th order, or both of the only one.
    Each rank's part of each gradient is the mean."""
    orders = [*orders, *orders][:2]
    whole = {name.removeprefix("module."): t.clone() for name, t in model.full_parameters()}
    means = {}
    for order in orders:
        plain = make(order).requires_grad_(True)
        plain.load_state_dict(whole, strict=False)  # which names shared ones once
        plain(IDX).backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                means[name] = means.get(name, 0) + p.grad / 2
    model.module.order = orders[dist.get_rank()]
    actual = {name.removeprefix("module."): t for name, t in step_of(model, IDX).items()}
    model.zero_grad()
    for name, start in model.shard_starts().items():
        name = name.removeprefix("module.")
        if name not in means:
            assert name not in actual, f"nobody has used {name}"
            continue
        gradient = actual[name].as_subclass(torch.Tensor).flatten()
        torch.testing.assert_close(gradient, means[name].flatten()[start:start + len(gradient)])


# ---- what a first step shows


@on_ranks(2)
@of_each(*OURS)
def test_each_learns_it(wrapper):
    """Steps in another order are right, though buckets may wait; and so is a copy, which learns by
    itself."""
    model = OURS[wrapper](Shared(LATE))
    for order in (LATE, LATE, ORDERLY, ORDERLY[::-1], (2, 0, 4, 1, 3, 5), LATE):
        assert_means(model, order)
        assert_learned(model, LATE)
    if wrapper == "ddp":
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not copied._knows_order
            for each in (copied, model):
                assert_means(each, LATE)
                assert_learned(each, LATE)


@on_ranks(2)
@of_each(*OURS)
def test_first_steps_differ(wrapper):
    """One rank skips blocks, in its first step or later. Rank 0's order is taken: what it has not
    used keeps its place."""
    few = (0, 3, 4)
    cases = [([(few, ORDERLY)] * 3, ORDERLY), ([(ORDERLY, few)] * 3, ORDERLY)]
    for skips in (0, 1):
        later = [[LATE, LATE], [LATE, LATE], [LATE, LATE], [LATE, LATE], [LATE, LATE]]
        for orders, few in zip(later[1:], ((3, 5, 2), (0, 4), (3,), (4,))):
            orders[skips] = few
        cases.append((later, LATE))
    if wrapper == "zero3":  # which asks for the order of registration in a first step
        order = (1, 0, 2, 3, 4, 5)
        cases.append(([((1, 0, 3, 4, 5), order), (order, (1, 2, 4)), ((0, 2, 5), order),
                       ((2, 3), (1, 0, 3))], order))
    else:
        cases.append(([(LATE, (0, 5, 1))] * 3, LATE))
        cases.append(([((0, 5, 1), LATE)] * 3, (0, 5, 2, 3, 4, 1)))
    for steps, learned in cases:
        model = OURS[wrapper](Shared(steps[0][0]).requires_grad_(True))
        for orders in steps:
            assert_means(model, *orders)
        if not (wrapper == "ddp" and learned == (0, 5, 2, 3, 4, 1)):  # its buckets come in between
            assert_learned(model, learned)
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, [bucket.names[0] for bucket in model.buckets])
        assert of_ranks[0] == of_ranks[1], "ranks launch buckets in different orders"


def in_no_sync(model):
    with model.no_sync():
        model(IDX).backward()
    model.zero_grad()


def raises_in_backward(model):
    with model.module.blocks[5].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", model(IDX).backward)
    model.zero_grad()


def raises_in_forward(model):
    with model.module.blocks[5].register_forward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", model, IDX)


def evaluates(model):
    """In another order than it is trained in."""
    model.module.order = (4, 2)
    with torch.no_grad():
        model(IDX)
    model.module.order = LATE


@on_ranks(2)
@of_each(*OURS)
def test_order_is_learned_later(wrapper):
    """A beginning that shows no order, or a wrong one."""
    for begins in (in_no_sync, raises_in_backward, raises_in_forward, evaluates):
        model = OURS[wrapper](Shared(LATE))
        begins(model)
        assert not model._knows_order, begins.__name__
        for _ in range(2):
            assert_means(model, LATE)
            assert_learned(model, LATE)


@on_ranks(2)
@of_each(*OURS)
def test_what_is_no_order(wrapper):
    """What two forwards have used one after the other, before one backward or in two micro-steps;
    or an evaluation between a forward and its backward."""
    is_stage = wrapper in STAGES
    model = OURS[wrapper](Shared())
    with model.no_sync():
        model.module.order = (1, 2, 4)
        model(IDX).backward()
    model.module.order = (0, 2, 3)
    model(IDX).backward()
    model.zero_grad()
    if is_stage:
        assert names_of(model.units) == ["the root", *"012345"]
    for orders in ([(0, 1, 4), (1, 2, 3, 5)], [(4, 5), (0, 3)]):
        assert_means(model, *orders)
    model = OURS[wrapper](Shared((1, 2, 4)).requires_grad_(True))
    loss = model(IDX)
    model.module.order = (0, 2, 3)
    (loss + model(IDX)).backward()
    assert not is_stage or names_of(model.units) == ["the root", *"012345"]
    model = OURS[wrapper](Shared(LATE))
    loss = model(IDX)
    model.module.order = (4, 2, 0, 1, 3, 5)
    with torch.no_grad():
        model(IDX)
    loss.backward()
    assert not is_stage or names_of(model.units) == ["the root", *map(str, LATE)]


@on_ranks(3)
@of_each(*OURS)
def test_what_agreeing_costs(wrapper):
    """8 bytes for each bucket, and in stages for each unit; in the first step that averages."""
    model = OURS[wrapper](Shared(LATE))
    broadcasts = []

    def note(operation, tensors):
        if operation == "broadcast":
            broadcasts.append(tensors[0].nbytes)

    actual = []
    for step in range(3):
        broadcasts.clear()
        with every_collective(note):
            step_of(model, IDX)
        model.zero_grad()
        actual.append(sorted(broadcasts))
    expected = [8 * len(model.buckets)]
    if wrapper != "ddp":
        expected = sorted([*expected, 8 * len(model.units)])
    assert actual == [expected, [], []], actual


class Bare(nn.Module):
    """Blocks, and nothing before them: autograd saves no weight of the first that is used."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, _):
        x = torch.ones(3, 8)
        for i in self.order:
            x = self.blocks[i](x).tanh()
        return x.square().mean()


@on_ranks(2)
def test_a_rank_keeps_what_it_cannot_gather_alone():
    """Where rank 0's first step drops block 0, block 1 is its first layer, whose weights are not
    saved. Then other ranks drop block 1, or save its weights: no rank waits for another."""
    model = Zero3(Bare(None))
    for orders in ([(1, 2, 3), (0, 1, 2, 3)], [(0, 1, 2, 3), (0, 2, 3)], [(0, 1, 3), (1, 2, 3)],
                   [(0, 1, 2, 3), (0, 1, 2, 3)]):
        assert_means(model, *orders, make=Bare)


@on_ranks(2)
def test_units_of_another_loss_stay_on_the_way():
    """A first backward that reaches only some of what the forward has used does not decide about
    the rest."""
    model = Zero3(Shared())
    branch = []
    model.module.blocks[2].register_forward_hook(lambda module, x, output: branch.append(output))
    loss = model(IDX)
    branch[0].sum().backward(retain_graph=True)
    assert_learned(model, range(6))
    loss.backward()
    model.zero_grad()
    branch.clear()
    assert_means(model, ORDERLY)


# ---- ranks that skip units


class Pictures(nn.Module):
    """Some batches have pictures, for which there is a tower of units. What is used before it
    belongs to the root, or is a unit of whose weights autograd saves none; or, with place "middle",
    that are all blocks, and a parameter of the root. With "used by some" there is only such a
    parameter for pictures."""

    def __init__(self, place):
        super().__init__()
        torch.manual_seed(0)
        self.place = place
        if place in ("a unit", "middle", "used by some"):
            self.embeds = nn.ModuleList([nn.Embedding(11, 4)])
        if place in ("middle", "used by some"):
            self.scale = nn.Parameter(torch.ones(4))
        if place == "middle":
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        if place == "first":
            self.embed = nn.Embedding(11, 4)
        self.tower = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        if place != "middle":
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)
        if place == "last":
            self.embed = nn.Embedding(11, 4)

    def through_blocks(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x

    def forward(self, idx, has_pictures):
        x = self.embeds[0](idx) if hasattr(self, "embeds") else self.embed(idx)
        if self.place == "used by some" and has_pictures:
            x = x * self.scale
        if self.place == "middle":
            x = self.through_blocks(x) * self.scale
        if has_pictures and self.place != "used by some":
            picture = x if self.place == "middle" else torch.ones(len(idx), 4)
            for block in self.tower:
                picture = block(picture).tanh()
            x = x + picture
        if self.place != "middle":
            x = self.through_blocks(x)
        return self.head(x).square().mean()


# By step and rank, whether the batch has pictures.
WITH_PICTURES = {"rank 0 has none": [[0, 1, 1]] * 3, "rank 1 has none": [[1, 0, 1]] * 3,
                 "nobody has any at first": [[0, 0, 0], [1, 0, 1], [0, 1, 1]],
                 "all have some at first": [[1, 1, 1], [0, 1, 1], [1, 0, 1]],
                 "in turns": [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]}


@on_ranks(3)
@pytest.mark.parametrize("place", ["first", "last", "a unit", "middle", "used by some"])
@of_each("zero2", "zero3")
def test_ranks_skip_a_tower(wrapper, place):
    """A rank that skips units must not wait for gradients of the root that another rank has only
    after it has used them."""
    W, rank = dist.get_world_size(), dist.get_rank()
    for case, around in [*((case, nullcontext) for case in WITH_PICTURES), ("in turns", native)]:
        with around():
            module = Pictures(place)
            plain = copy.deepcopy(module)
            model = OURS[wrapper](module)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
            for of_ranks in WITH_PICTURES[case]:
                for other in range(W):
                    (plain(IDX, of_ranks[other]) / W).backward()
                with torch.no_grad():
                    model(IDX, of_ranks[rank])
                model(IDX, of_ranks[rank]).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            actual = dict(model.full_parameters())
            for name, p in plain.named_parameters():
                assert torch.allclose(actual[name], p, atol=1e-6), f"{case}: {name} in the end"


class Passing(nn.Linear):
    """It returns its input, too, whose gradient comes when the backward of this unit is over."""

    def forward(self, x):
        return x + super().forward(x).tanh(), x


class Passed(nn.Module):
    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.first = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Passing(8, 8) for _ in range(5))

    def forward(self, idx):
        x = self.first(idx)
        for i in self.order:
            x, _ = self.blocks[i](x)
        return x.square().mean()


@on_ranks(2)
def test_units_that_return_their_input():
    """No rank gathers a unit for it that another one has skipped."""
    model = Zero3(Passed(range(5)))
    for orders in ([range(5)], [(0, 1, 3, 4), (0, 1, 2, 4)], [range(5), (0, 2, 3)]):
        assert_means(model, *orders, make=Passed)


class Towers(nn.Module):
    """A ReLU is a unit without parameters, and so is a layer whose parameters another unit has:
    these belong to the root."""

    def __init__(self, _):
        super().__init__()
        torch.manual_seed(0)
        parts = []
        for _ in range(4):
            parts += [nn.Linear(8, 8), nn.ReLU()]
        self.parts = nn.ModuleList(parts)
        self.twin = nn.ModuleList([nn.Linear(8, 8)])
        self.twin[0].weight, self.twin[0].bias = parts[0].weight, parts[0].bias

    def forward(self, _):
        x = torch.ones(3, 8, requires_grad=True)
        for part in [*self.parts, *self.twin]:
            x = part(x)
        return x.square().mean()


@on_ranks(2)
@of_each(*STAGES)
def test_there_is_nothing_to_gather_for_empty_units(stage):
    module = Towers(None)
    model = STAGES[stage](module, units=[*module.parts, *module.twin])
    for _ in range(2):
        assert names_of(model.units) == ["the root", "parts.2", "parts.4", "parts.6"]
        assert_means(model, None, make=Towers)

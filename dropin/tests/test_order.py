"""The order of use, which a wrapper learns from its first step."""

import contextlib
import copy
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from dropin.ddp import DDP, in_order_of_use, PlainDDP
from dropin.tests import orders
from dropin.tests.test_plain import PLAIN, Shared, step_of
from dropin.zero import PlainZero3, Zero3
from tests.common import native, planted, raises
from judge.measure import every_collective, live_bytes
from judge.training import STAGES
from tests.ranks import on_ranks

SMALL = 0.0003  # MB: a block of `Shared`
OURS = {"ddp": partial(DDP, bucket_cap_mb=SMALL, find_unused_parameters=True), **STAGES}
ALL = {"plain ddp": partial(PlainDDP, bucket_cap_mb=SMALL), **OURS}
for stage in STAGES:
    ALL[f"plain {stage}"] = PLAIN[stage]
IDX = torch.arange(11)


@on_ranks(1)
def test_in_order_of_use():
    assert in_order_of_use([1, 2, 3, 4], [4, 2, 4, 1, 3]) == [2, 4, 1, 3]
    assert in_order_of_use([1, 2, 3, 4, 5], [4, 2]) == [1, 4, 3, 2, 5], "others keep their places"
    assert in_order_of_use([1, 2, 3], []) == [1, 2, 3]
    assert in_order_of_use([1, 2], [3, 2, 1]) == [2, 1]


# ---- public models


@on_ranks(2, 3, seconds=120)
@pytest.mark.parametrize("wrapper", OURS)
@pytest.mark.parametrize("name", orders.MODELS)
def test_public_models(name, wrapper):
    """They send, hold and overlap in the fourth step what they do if they are registered in order,
    and overlap as much as in torch's wrappers."""
    in_order = orders.watch(wrapper, name, is_in_order=True)
    actual = orders.watch(wrapper, name)
    growth = actual.pop("growth"), in_order.pop("growth")
    assert actual == in_order
    assert abs(growth[0] - growth[1]) < 1, f"kB more in a backward: {growth}"
    torchs = orders.watch("torch ddp" if wrapper == "ddp" else "fsdp2", name)
    assert actual["overlapped"] >= torchs["overlapped"], f"{actual}, torch's {torchs}"


# ---- what may come in a first step

LATE = (3, 1, 5, 0, 2, 4)  # blocks of `Shared`, used in this order


def names_of(units):
    return [unit.name.removeprefix("blocks.") for unit in units]


def assert_learned(model, order, way_back=None):
    """model knows the order of these blocks."""
    blocks = [str(i) for i in order]
    assert model._knows_order
    if not isinstance(model, PlainDDP):
        actual = names_of(model._units)
        assert actual == ["the root", *blocks], f"units are {actual}"
    if isinstance(model, PlainZero3):
        actual = names_of(model._way_back)
        expected = blocks[::-1] if way_back is None else [str(i) for i in way_back]
        assert actual == expected, f"the way back is {actual}, expected is {expected}"
    first = [bucket.slots[0].fqn for bucket in model._buckets if "blocks" in bucket.slots[0].fqn]
    actual = list(dict.fromkeys(fqn.split(".")[1] for fqn in first))
    assert actual == blocks[::-1], f"buckets are of {actual}"


def assert_gradients_of_one_process(model, order, idx=IDX):
    """At W = 2, where ranks have the same data, the mean is one process's gradient. Compared is
    what each rank has."""
    plain = Shared(order)
    plain.load_state_dict({name.removeprefix("module."): whole.clone()
                           for name, whole in model.full_parameters()})
    plain(idx).backward()
    model.module.order = order
    starts = model.shard_starts()
    actual = step_of(model, idx)
    for name, p in plain.named_parameters():
        key = name if name in actual else f"module.{name}"
        if p.grad is None:
            assert key not in actual or not actual[key].any(), name
            continue
        whole = p.grad.contiguous().flatten()
        n = actual[key].numel()
        assert torch.equal(actual[key].flatten(), whole[starts[name]:starts[name] + n]), name


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ALL)
def test_each_learns_it(wrapper):
    model = ALL[wrapper](Shared(LATE))
    for step in range(3):
        assert_gradients_of_one_process(model, LATE)
        model.zero_grad()
        assert_learned(model, LATE)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ALL)
def test_order_that_changes(wrapper):
    """In each step another one: right, though buckets may wait."""
    model = ALL[wrapper](Shared(LATE))
    for order in (LATE, range(6), (5, 4, 3, 2, 1, 0), (2, 0, 4, 1, 3, 5), LATE):
        assert_gradients_of_one_process(model, tuple(order))
        model.zero_grad()
    assert_learned(model, LATE)


def assert_means(model, orders_of_ranks):
    """At W = 2, where rank r calls the blocks of orders_of_ranks[r]."""
    whole = {name.removeprefix("module."): t.clone() for name, t in model.full_parameters()}
    means = {}
    for order in orders_of_ranks:
        plain = Shared(order).requires_grad_(True)
        plain.load_state_dict(whole)
        plain(IDX).backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                means[name] = means.get(name, 0) + p.grad / 2
    model.module.order = orders_of_ranks[dist.get_rank()]
    actual = step_of(model, IDX)
    model.zero_grad()
    for name, start in model.shard_starts().items():
        gradient = actual.get(name, actual.get(f"module.{name.removeprefix('module.')}"))
        mean = means.get(name.removeprefix("module."))
        if mean is None:
            assert gradient is None, f"nobody has used {name}"
            continue
        part = mean.flatten()[start:start + gradient.numel()]
        torch.testing.assert_close(gradient.as_subclass(torch.Tensor).flatten(), part)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", OURS)
@pytest.mark.parametrize("skips", [0, 1])
def test_first_steps_differ(wrapper, skips):
    """One rank skips blocks in its first step, which has the order of registration, as stage 3
    asks for then. Rank 0's is taken: what it has not used keeps its place."""
    model = OURS[wrapper](Shared())
    orders_of_ranks = [tuple(range(6)), tuple(range(6))]
    orders_of_ranks[skips] = (0, 3, 4)
    for _ in range(3):
        assert_means(model, orders_of_ranks)
    assert_learned(model, range(6))
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, [bucket.slots[0].fqn for bucket in model._buckets])
    assert of_ranks[0] == of_ranks[1], "ranks launch buckets in different orders"


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("skips", [0, 1])
def test_first_orders_differ(wrapper, skips):
    """Each rank calls other blocks, in another order, in a first step."""
    model = OURS[wrapper](Shared())
    orders_of_ranks = [LATE, LATE]
    orders_of_ranks[skips] = (0, 5, 1)
    for _ in range(3):
        assert_means(model, orders_of_ranks)
    if skips == 1:
        assert_learned(model, LATE)
    elif wrapper != "ddp":
        # Rank 0 has not used 2, 3 and 4.
        assert names_of(model._units) == ["the root", "0", "5", "2", "3", "4", "1"]


@on_ranks(2)
@pytest.mark.parametrize("wrapper", OURS)
@pytest.mark.parametrize("skips", [0, 1])
def test_ranks_may_skip_blocks_in_the_order_that_was_learned(wrapper, skips):
    model = OURS[wrapper](Shared(LATE))
    assert_means(model, [LATE, LATE])
    for few in ((3, 5, 2), (0, 4), (3,), (4,)):
        orders_of_ranks = [LATE, LATE]
        orders_of_ranks[skips] = few
        assert_means(model, orders_of_ranks)
    assert_learned(model, LATE)


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
@pytest.mark.parametrize("wrapper", OURS)
@pytest.mark.parametrize("begins", [in_no_sync, raises_in_backward, raises_in_forward, evaluates])
def test_order_is_learned_later(wrapper, begins):
    """A beginning that shows no order, or a wrong one."""
    model = OURS[wrapper](Shared(LATE))
    begins(model)
    assert not model._knows_order
    for _ in range(2):
        assert_gradients_of_one_process(model, LATE)
        model.zero_grad()
        assert_learned(model, LATE)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@on_ranks(2)
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_copies_learn_it_themselves(make):
    model = OURS["ddp"](Shared(LATE))
    step_of(model, IDX)
    model.zero_grad()
    copied = make(model)
    assert not copied._knows_order
    for each in (copied, model):
        assert_gradients_of_one_process(each, LATE)
        assert_learned(each, LATE)


@on_ranks(2, seconds=120)
@pytest.mark.parametrize("wrapper", ["ddp", "zero3"])
def test_compiled_blocks(wrapper):
    module = Shared(LATE)
    for block in module.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    model = OURS[wrapper](module)
    for _ in range(3):
        assert_gradients_of_one_process(model, LATE)
        model.zero_grad()
    assert_learned(model, LATE)


# ---- what is sent to agree, once


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
def test_what_agreeing_costs(wrapper):
    """8 bytes for each parameter, and in stages for each unit, in stage 3 for that twice; in the
    first step that averages. Nothing in the plain classes."""
    model = ALL[wrapper](Shared(LATE))
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
        actual.append(list(broadcasts))
    n_parameters, n_units = 16, 7
    expected = [8 * n_parameters]
    if wrapper != "ddp":
        expected.append(8 * n_units)
    if wrapper == "zero3":
        expected.append(8 * n_units)
    if wrapper.startswith("plain"):
        expected = []
    assert sorted(actual[0]) == sorted(expected), actual[0]
    assert actual[1:] == [[], []], actual


@on_ranks(2)
def test_ddp_frees_old_buckets():
    """When new ones are filled gradients take the bytes of the parameters, and each is the object
    that it was. Meanwhile old memory goes as it is left: both are never there at once."""
    before = live_bytes()
    model = DDP(Shared(LATE), bucket_cap_mb=SMALL)
    n_buckets = len(model._buckets)
    objects = []
    bytes_meanwhile = []
    learn_order = model._learn_order
    provide_memory = model._provide_memory_of_gradients

    def note(came):
        objects.extend(p.grad for p in model.parameters())
        learn_order(came)

    def note_memory(bucket):
        provide_memory(bucket)
        bytes_meanwhile.append(live_bytes() - before)

    with (mock.patch.object(model, "_learn_order", note),
          mock.patch.object(model, "_provide_memory_of_gradients", note_memory)):
        model(IDX).backward()
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), objects))
    n_bytes = sum(p.nbytes for p in model.parameters())
    padding = 2 * 16 * n_buckets  # to equal chunks of 16 bytes each
    assert live_bytes() - before <= 2 * n_bytes + padding + 512
    assert max(bytes_meanwhile) < 2.75 * n_bytes, f"{max(bytes_meanwhile) / n_bytes:.2f}"


@on_ranks(2)
def test_ddp_fills_buckets_anew():
    """Those of a module registered in order: none has parameters from both ends of it."""
    actual = []
    for is_in_order in (False, True):
        model = DDP(orders.build("AnnotatedTransformer", is_in_order), bucket_cap_mb=0.02)
        model(0).backward()
        actual.append([{slot.fqn for slot in bucket.slots} for bucket in model._buckets])
    assert len(actual[0]) > 5 and actual[0] == actual[1]


# ---- units that a backward does not ask for


class Tables(nn.Module):
    """Embeddings, of whose weights autograd saves none, between blocks, whose weights it saves."""

    def __init__(self, n=4):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(11, 8) for _ in range(n))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(n))

    def units(self):
        return [*self.tables, *self.blocks]

    def forward(self, idx):
        x = 0
        for table, block in zip(self.tables, self.blocks):
            x = block(x + table(idx)).tanh()
        return x.square().mean()


def gathers_in_backward(model, idx):
    """[a unit that a backward starts to gather]."""
    loss = model(idx)
    gathered = []
    provide_memory = model._provide_memory

    def note(unit):
        gathered.append(unit.name)
        provide_memory(unit)

    with mock.patch.object(model, "_provide_memory", note):
        loss.backward()
    model.zero_grad()
    return gathered


@on_ranks(2)
@pytest.mark.parametrize("kind", [PlainZero3, Zero3])
def test_backward_gathers_what_is_needed(kind):
    module = Tables()
    model = kind(module, units=module.units())
    first = gathers_in_backward(model, IDX)
    assert "tables.3" in first, first
    for _ in range(2):
        # Of blocks.3 and tables.3, the last two that the forward has used, none is needed again.
        assert gathers_in_backward(model, IDX) == ["blocks.2", "blocks.1", "blocks.0"]


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["plain zero3", "zero3"])
def test_first_layer_is_not_gathered_again(wrapper):
    """Autograd saves no weight of it, as its input needs no gradient."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    module[0].requires_grad_(False)
    model = (PlainZero3 if wrapper.startswith("plain") else Zero3)(module, units=[*module])
    x = torch.ones(3, 8)
    for step in range(3):
        received = []
        with every_collective(lambda operation, tensors: received.append(tensors[0].numel())):
            loss = model(x).square().mean()
            received.clear()
            loss.backward()
        model.zero_grad()
    # Neither for 1, as 0 is frozen. `Zero3` still gathers 0: it had no gradient to go by.
    expected = ["4", "3", "2"] if wrapper.startswith("plain") else ["4", "3", "2", "0"]
    assert names_of(model._way_back) == expected


@on_ranks(2)
def test_a_rank_keeps_what_it_cannot_gather_alone():
    """Where rank 0's first step drops block 0, block 1 is its first layer, whose weights are not
    saved. Then other ranks drop block 1, or save its weights: no rank waits for another."""
    module = nn.Module()
    torch.manual_seed(0)
    module.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    module.forward = lambda order: through(module.blocks, order)

    def through(blocks, order):
        x = torch.ones(3, 8)
        for i in order:
            x = blocks[i](x).tanh()
        return x.square().mean()

    model = Zero3(module)
    rank = dist.get_rank()
    for orders_of_ranks in ([(1, 2, 3), (0, 1, 2, 3)], [(0, 1, 2, 3), (0, 2, 3)],
                            [(0, 1, 3), (1, 2, 3)], [(0, 1, 2, 3), (0, 1, 2, 3)]):
        whole = {name: value for name, value in model.full_parameters()}
        means = {}
        for order in orders_of_ranks:
            blocks = [nn.Linear(8, 8) for _ in range(4)]
            for i, block in enumerate(blocks):
                block.load_state_dict({"weight": whole[f"blocks.{i}.weight"],
                                       "bias": whole[f"blocks.{i}.bias"]})
            through(blocks, order).backward()
            for i in order:
                mean = means.get(i, 0)
                means[i] = mean + blocks[i].weight.grad.flatten() / 2
        model(orders_of_ranks[rank]).backward()
        starts = model.shard_starts()
        for i, mean in means.items():
            shard = dict(model.named_parameters())[f"blocks.{i}.weight"]
            start = starts[f"blocks.{i}.weight"]
            actual = shard.grad.as_subclass(torch.Tensor).flatten()
            torch.testing.assert_close(actual, mean[start:start + shard.numel()])
        model.zero_grad()
    assert names_of(model._way_back) == ["3", "2", "0"]


@on_ranks(2)
@pytest.mark.parametrize("wrapper", OURS)
def test_each_micro_step_skips_others(wrapper):
    """What two forwards have used one after the other is no order of use."""
    model = OURS[wrapper](Shared())
    with model.no_sync():
        model.module.order = (1, 2, 4)
        model(IDX).backward()
    model.module.order = (0, 2, 3)
    model(IDX).backward()
    model.zero_grad()
    if wrapper != "ddp":
        assert names_of(model._units) == ["the root", "0", "1", "2", "3", "4", "5"]
    for orders_of_ranks in ([(0, 1, 4), (1, 2, 3, 5)], [(4, 5), (0, 3)]):
        assert_means(model, orders_of_ranks)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_two_forwards_before_a_backward(stage):
    """The last one shows an order, both together do not."""
    model = STAGES[stage](Shared())
    model.module.order = (1, 2, 4)
    loss = model(IDX)
    model.module.order = (0, 2, 3)
    (loss + model(IDX)).backward()
    assert names_of(model._units) == ["the root", "0", "1", "2", "3", "4", "5"]


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_before_the_backward(stage):
    """An evaluation in another order, between the first forward and its backward."""
    model = STAGES[stage](Shared(LATE))
    loss = model(IDX)
    model.module.order = (4, 2, 0, 1, 3, 5)
    with torch.no_grad():
        model(IDX)
    loss.backward()
    assert names_of(model._units) == ["the root", *map(str, LATE)]


@on_ranks(2)
def test_rank_0_skips_a_block_of_a_module_out_of_order():
    """It keeps its place, so the others may use it there."""
    model = Zero3(Shared())
    order = (1, 0, 2, 3, 4, 5)
    assert_means(model, [(1, 0, 3, 4, 5), order])
    assert_learned(model, order)
    for orders_of_ranks in ([order, (1, 2, 4)], [(0, 2, 5), order], [(2, 3), (1, 0, 3)]):
        assert_means(model, orders_of_ranks)


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
    assert_gradients_of_one_process(model, tuple(range(6)))


@on_ranks(2)
def test_recomputed_blocks_are_on_the_way():
    class Recomputed(Shared):
        def forward(self, idx):
            x = self.norm(self.first(idx))
            for i in self.order:
                x = x + checkpoint(self.blocks[i], x, use_reentrant=False).tanh()
            return (x * self.scale).square().mean()

    model = Zero3(Recomputed(LATE))
    for _ in range(3):
        gathered = gathers_in_backward(model, IDX)
    assert gathered == [f"blocks.{i}" for i in LATE[::-1][2:]], gathered


class Pictures(nn.Module):
    """Some batches have pictures, for which there is a tower of units. What is used before it
    belongs to the root, or is a unit of whose weights autograd saves none; or, with place "middle",
    that are all blocks, and a parameter of the root. With "used by some" there is only such a
    parameter for pictures."""

    def __init__(self, place):
        super().__init__()
        torch.manual_seed(0)
        self.place = place
        if place == "middle":
            self.embeds = nn.ModuleList([nn.Embedding(11, 4)])
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.scale = nn.Parameter(torch.ones(4))
        if place == "used by some":
            self.token = nn.Parameter(torch.ones(4))
            self.embeds = nn.ModuleList([nn.Embedding(11, 4)])
        if place == "first":
            self.embed = nn.Embedding(11, 4)
        if place == "a unit":
            self.embeds = nn.ModuleList([nn.Embedding(11, 4)])
        self.tower = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        if place != "middle":
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)
        if place == "last":
            self.embed = nn.Embedding(11, 4)

    def forward(self, idx, has_pictures):
        embed = self.embeds[0] if hasattr(self, "embeds") else self.embed
        x = embed(idx)
        if self.place == "used by some" and has_pictures:
            x = x * self.token
        if self.place == "middle":
            for block in self.blocks:
                x = x + block(x).tanh()
            x = x * self.scale
        if has_pictures and self.place != "used by some":
            picture = x if self.place == "middle" else torch.ones(len(idx), 4)
            for block in self.tower:
                picture = block(picture).tanh()
            x = x + picture
        if self.place != "middle":
            for block in self.blocks:
                x = x + block(x).tanh()
        return self.head(x).square().mean()


# By step and rank, whether the batch has pictures.
WITH_PICTURES = {"rank 0 has none": [[0, 1, 1]] * 3, "rank 1 has none": [[1, 0, 1]] * 3,
                 "nobody has any at first": [[0, 0, 0], [1, 0, 1], [0, 1, 1]],
                 "all have some at first": [[1, 1, 1], [0, 1, 1], [1, 0, 1]],
                 "in turns": [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]}


@on_ranks(2, 3)
@pytest.mark.parametrize("collectives", ["own", "native"])
@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
@pytest.mark.parametrize("place", ["first", "last", "a unit", "middle", "used by some"])
@pytest.mark.parametrize("case", WITH_PICTURES)
def test_ranks_skip_a_tower(case, place, wrapper, collectives):
    """A rank that skips units must not wait for gradients of the root that another rank has only
    after it has used them."""
    with native() if collectives == "native" else contextlib.nullcontext():
        module = Pictures(place)
        plain = copy.deepcopy(module)
        model = OURS[wrapper](module)
        W, rank = dist.get_world_size(), dist.get_rank()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
        for of_ranks in WITH_PICTURES[case]:
            for other in range(W):
                (plain(IDX, of_ranks[other]) / W).backward()
            for _ in range(2):
                with torch.no_grad():
                    model(IDX, of_ranks[rank])
            model(IDX, of_ranks[rank]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        actual = dict(model.full_parameters())
        for name, p in plain.named_parameters():
            assert torch.allclose(actual[name], p, atol=1e-6), f"{name} in the end"


@on_ranks(2)
def test_the_first_backward_does_not_wait_for_the_root():
    """Its buckets come last there, so that they hold no other back."""
    model = Zero3(Pictures("last"))
    assert [bucket.unit is model._root for bucket in model._buckets] == [False] * 5 + [True]


@on_ranks(2)
def test_a_head_does_not_wait_for_all_units():
    """Where it has a bucket of its own, that is full when a backward begins."""
    with mock.patch("dropin.zero.bucket_bytes", lambda W, cap_mb: 32):
        model = Zero3(Pictures("first"))
    for _ in range(2):
        model(IDX, True).backward()
        model.zero_grad()
    n_before = [model._n_before.get(bucket) for bucket in model._buckets
                if bucket.unit is model._root]
    assert n_before[0] == 2 and n_before[-1] is None, n_before


# ---- there is nothing to gather for a unit without parameters


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        parts = []
        for _ in range(4):
            parts += [nn.Linear(8, 8), nn.ReLU()]
        self.parts = nn.ModuleList(parts)
        self.twin = nn.ModuleList([nn.Linear(8, 8)])
        self.twin[0].weight, self.twin[0].bias = parts[0].weight, parts[0].bias

    def forward(self, x):
        for part in [*self.parts, *self.twin]:
            x = part(x)
        return x.square().mean()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_empty_units(stage):
    """A ReLU, and a layer whose parameters another unit has, too: these belong to the root."""
    plain, module = Towers(), Towers()
    model = STAGES[stage](module, units=[*module.parts, *module.twin])
    if stage == "zero3":
        assert names_of(model._way_back) == ["parts.6", "parts.4", "parts.2"]
    for _ in range(2):
        x = torch.ones(3, 8, requires_grad=True)
        plain(x).backward()
        model(x).backward()
    if stage == "zero3":
        assert names_of(model._way_back) == ["parts.6", "parts.4", "parts.2"]
    for name, start in model.shard_starts().items():
        shard = dict(model.named_parameters())[name]
        whole = plain.get_parameter(name).grad.flatten()
        if shard.grad is not None:
            part = whole[start:start + shard.numel()]
            torch.testing.assert_close(shard.grad.flatten().as_subclass(torch.Tensor), part)

"""checkpoint.sharded_state: what any wrapper at any world size has saved, any other one loads."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict, set_optimizer_state_dict, StateDictOptions)
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ddp
import zero
from checkpoint import sharded_state
from dropin import DDP, Zero1, Zero2, Zero3
from dropin.tests.scripts import of_each
from dropin.tests.training import (
    adamw, fresh, fsdp2, gather, is_ours, same_bits, STAGES, uncut, zoo_loss)
from dropin.tests.wrappers import adafactor
from oracle import average_gradients
from tests.common import raises
from tests.ranks import on_ranks
from verify import Failure, run


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def muon(parameters):
    return torch.optim.Muon(parameters, lr=0.02)


# Of those without uncut parameters, and of those with.
CUT = {"plain": lambda module: module, "ddp": DDP,
       "torch_ddp": DistributedDataParallel, "fsdp2": fsdp2, "book_ddp": ddp.DDP,
       "book_zero1": zero.Zero1, "book_zero2": partial(zero.Zero2, bucket_cap_mb=0.001),
       "book_zero3": zero.Zero3}
UNCUT = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3,
         "zero3_alone": partial(Zero3, shard_size=1),
         "zero3_offloaded": partial(Zero3, offload=True)}


def build(wrapper, optimizer):
    """A small GPT in a wrapper, and its optimizers: AdamW or SGD for all, or Muon for the matrices
    of blocks and AdamW for the rest."""
    module = fresh("gpt")
    matrices = []
    if optimizer == "muon":
        matrices = [p for name, p in module.named_parameters() if takes_muon(name, p)]
    model = CUT[wrapper](module) if wrapper in CUT else UNCUT[wrapper](module, uncut=matrices)
    if is_ours(model):
        model.set_gradient_divide_factor(1)
    if optimizer == "adamw":
        return model, [adamw(model.parameters())]
    if optimizer == "sgd":
        return model, [sgd(model.parameters())]
    for_muon, others = [], []
    for name, p in model.named_parameters():
        group = for_muon if takes_muon(name, p) else others
        group.append(p)
    return model, [adamw(others), muon(for_muon)]


def takes_muon(name, p):
    return "blocks." in name and p.dim() == 2


def train(model, optimizers, step, n):
    """Make a step of n micro batches, of which each rank has an equal share."""
    W = dist.get_world_size()
    for number in range(dist.get_rank(), n, W):
        zoo_loss(model, step, number).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(1 / n if is_ours(model) else W / n)  # others take the mean over ranks
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def whole_weights(model):
    """{name: whole parameter}, of any of these."""
    if hasattr(model, "full_parameters"):
        return {name: p.clone() for name, p in model.full_parameters()}
    actual = {}
    for name, p in model.named_parameters():
        p = p.detach()
        actual[name.removeprefix("module.")] = p.full_tensor() if hasattr(p, "full_tensor") else p
    return actual


def leg(wrapper, optimizers, load, save, folder, begins_at, ns):
    """On each rank: load(model, optimizers, path), unless this is the first leg, make steps of so
    many micro batches, save(model, optimizers, path)."""
    for optimizer in optimizers:
        model, made = build(wrapper, optimizer)
        if begins_at > 0:
            load(model, made, f"{folder}/{optimizer}")
        for step, n in enumerate(ns, begins_at):
            train(model, made, step, n)
        save(model, made, f"{folder}/{optimizer}")


def travel(first, n_first, second, n_second, load, save, folder):
    """Two steps on n_first ranks, two more on n_second; and all four in one process, without a
    wrapper -> [(what was saved in the end, what should have been)], of each optimizer."""
    # Muon needs whole matrices.
    cuts = {"fsdp2", "book_zero1", "book_zero2", "book_zero3"} & {first, second}
    optimizers = ["adamw", "sgd"] if cuts else ["adamw", "sgd", "muon"]
    unbroken = folder / "unbroken"
    unbroken.mkdir()
    run(n_first, leg, first, optimizers, load, save, folder, 0, 2 * [n_first])
    run(n_second, leg, second, optimizers, load, save, folder, 2, 2 * [n_second])
    run(1, leg, "plain", optimizers, load, save, unbroken, 0, 2 * [n_first] + 2 * [n_second])
    return [(torch.load(folder / f"{optimizer}.pt"), torch.load(unbroken / f"{optimizer}.pt"))
            for optimizer in optimizers]


def save_sharded(model, optimizers, path):
    dcp.save(sharded_state(model, *optimizers), checkpoint_id=path)
    weights = whole_weights(model)
    if dist.get_rank() == 0:
        torch.save(weights, f"{path}.pt")


def load_sharded(model, optimizers, path):
    dcp.load(sharded_state(model, *optimizers), checkpoint_id=path)


@pytest.mark.parametrize(("first", "n_first", "second", "n_second"), [
    ("zero3", 4, "zero1", 2), ("plain", 1, "zero3", 3), ("ddp", 3, "zero2", 2),
    ("zero1", 3, "torch_ddp", 2), ("zero2", 3, "zero3_alone", 2), ("torch_ddp", 2, "zero3", 3),
    ("zero3", 4, "fsdp2", 2), ("zero3_alone", 2, "zero2", 3),
    ("zero3_offloaded", 3, "book_ddp", 2),
    ("zero1", 2, "zero3_offloaded", 3), ("book_ddp", 3, "plain", 1),
    ("book_zero3", 4, "book_zero1", 3), ("book_zero2", 4, "zero3", 2), ("zero1", 3, "book_ddp", 2),
    ("book_ddp", 2, "book_zero3", 3), ("fsdp2", 2, "book_zero2", 3), ("book_zero1", 2, "ddp", 1)])
def test_any_wrapper_reads_another(first, n_first, second, n_second, tmp_path):
    """The weights in the end are those of a plain module that never stopped, to the bit."""
    ends = travel(first, n_first, second, n_second, load_sharded, save_sharded, tmp_path)
    for actual, expected in ends:
        same_bits(expected, actual)


# ---- the whole state, which rank 0 saves by itself


WHOLE = StateDictOptions(full_state_dict=True)


def save_whole(model, optimizers, path):
    """As a library would: rank 0 writes what all ranks have made. A module without any wrapper is
    saved by torch's own function."""
    if hasattr(model, "full_optimizer_state_dict"):
        states = [model.full_optimizer_state_dict(optimizer) for optimizer in optimizers]
    else:
        states = [get_optimizer_state_dict(model, o, options=WHOLE) for o in optimizers]
    is_sharded = hasattr(model, "full_state_dict")
    weights = model.full_state_dict() if is_sharded else bare(model).state_dict()
    if dist.get_rank() == 0:
        torch.save((weights, states), f"{path}.pt")


def load_whole(model, optimizers, path):
    weights, states = torch.load(f"{path}.pt")
    if hasattr(model, "load_full_state_dict"):
        model.load_full_state_dict(weights)
    else:
        bare(model).load_state_dict(weights)
    for optimizer, state in zip(optimizers, states):
        if hasattr(model, "load_full_optimizer_state_dict"):
            model.load_full_optimizer_state_dict(optimizer, state)
        else:
            set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=WHOLE)


def bare(model):
    return getattr(model, "module", model)


@pytest.mark.parametrize(("first", "n_first", "second", "n_second"), [
    ("zero3", 4, "zero1", 2), ("plain", 1, "zero3", 3), ("zero2", 3, "plain", 1),
    ("ddp", 2, "zero3", 4), ("zero1", 3, "ddp", 2), ("zero3_alone", 2, "zero2", 3),
    ("zero3_offloaded", 3, "zero1", 2), ("zero2", 2, "zero3_offloaded", 3)])
def test_whole_state_goes_anywhere(first, n_first, second, n_second, tmp_path):
    """Rank 0 has saved whole weights and whole optimizer state after two steps. Whatever loads them
    ends, two steps later, with the weights and the state, name by name, of a plain module that
    never stopped."""
    ends = travel(first, n_first, second, n_second, load_whole, save_whole, tmp_path)
    for (weights, states), (expected_weights, expected_states) in ends:
        same_bits(expected_weights, weights)
        for expected, actual in zip(expected_states, states, strict=True):
            same_groups(expected["param_groups"], actual["param_groups"])
            assert expected["state"].keys() == actual["state"].keys()
            for name, state in expected["state"].items():
                same_bits(state, actual["state"][name])


def same_groups(expected, actual):
    """torch's own function has names in another order, and lists in place of tuples."""
    for one, other in zip(expected, actual, strict=True):
        assert one.keys() == other.keys(), one.keys() ^ other.keys()
        assert sorted(one["params"]) == sorted(other["params"])
        for name in one.keys() - {"params"}:
            values = [tuple(v) if isinstance(v, list) else v for v in (one[name], other[name])]
            assert values[0] == values[1], f"{name}: {values}"


class Difficult(nn.Module):
    """No dimensions; channels_last; frozen; tied; smaller than the number of ranks; empty."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        image = self.image(torch.ones(1, 3, 4, 4)).sum() * self.frozen.sum()
        return self.second(self.first(x)).sum() * self.scale + image + self.empty.sum()


def two_groups(parameters):
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW([dict(params=matrices), dict(params=others, lr=0.3)], lr=0.1,
                             foreach=False, amsgrad=True)


def whole_state_of(model, optimizer):
    """By torch's function, or by a wrapper of ours."""
    if hasattr(model, "full_optimizer_state_dict"):
        return model.full_optimizer_state_dict(optimizer)
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


@on_ranks(4)  # a mean of equal gradients does not round
@pytest.mark.parametrize("kind", [DDP, Zero1, Zero2, Zero3])
def test_whole_state_is_torchs(kind):
    """Of difficult parameters, to the name, shape, strides and bit; and of no step at all."""
    torch.manual_seed(0)
    plain = Difficult()
    torch.manual_seed(0)
    model = kind(Difficult())
    x = torch.ones(2, 2)
    states = []
    for module in (plain, model):
        optimizer = two_groups(module.parameters())
        if module is model:
            before = model.full_optimizer_state_dict(optimizer)
            assert before["state"] == {}
        for _ in range(2):
            module(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(whole_state_of(module, optimizer))
    expected, actual = states
    same_groups(expected["param_groups"], actual["param_groups"])
    for name, state in actual["state"].items():
        for what, value in state.items():
            wanted = expected["state"][name][what]
            assert value.stride() == wanted.stride(), f"{what} of {name}"
        same_bits(expected["state"][name], state)
    only_torchs = expected["state"].keys() - actual["state"].keys()
    assert only_torchs <= {"frozen"}, "torch invents its state"
    again = two_groups(model.parameters())
    model.load_full_optimizer_state_dict(again, actual)
    for p, state in again.state.items():
        assert state["step"].shape == (), "a count is no number for each element"
        assert state["exp_avg"].shape == p.shape
    for name, state in model.full_optimizer_state_dict(again)["state"].items():
        same_bits(actual["state"][name], state)
    model.load_full_optimizer_state_dict(again, expected)  # and torch's
    model(x).backward()
    again.step()


@on_ranks(2)
@pytest.mark.parametrize("kind", [DDP, Zero3])
def test_whole_state_that_does_not_fit(kind):
    """Another number of groups, another name, another wrapper's parameters: nothing is loaded."""
    model = kind(Difficult())
    optimizer = two_groups(model.parameters())
    whole = model.full_optimizer_state_dict(optimizer)
    one = torch.optim.AdamW(model.parameters(), lr=7.0)
    raises(RuntimeError, "has 1 groups of parameters, and what is given 2",
           model.load_full_optimizer_state_dict, one, whole)
    whole["param_groups"][0]["params"][0] = "elsewhere"
    raises(RuntimeError, "'elsewhere', 'empty'", model.load_full_optimizer_state_dict,
           optimizer, whole)
    if kind is Zero3:
        whole = model.full_optimizer_state_dict(optimizer)
        whole["state"]["first.weight"] = {"exp_avg": torch.ones(3, 5)}
        raises(RuntimeError, "exp_avg of first.weight does not have the shape",
               model.load_full_optimizer_state_dict, optimizer, whole)
    other = two_groups(Difficult().parameters())
    for call in (partial(model.full_optimizer_state_dict, other),
                 partial(model.load_full_optimizer_state_dict, other, whole)):
        raises(RuntimeError, "not this wrapper's", call)
    assert one.param_groups[0]["lr"] == 7.0 and not optimizer.state, "something was loaded"


@on_ranks(2, 4)  # a mean of equal gradients does not round
@pytest.mark.parametrize("kind", [DDP, Zero1, Zero2, Zero3])
@pytest.mark.parametrize("lacks_empty", [True, False])
def test_order_of_an_optimizer(kind, lacks_empty):
    """It is another one on each rank, as where groups are made of sets; or a rank lacks shards that
    are empty there. The state is that of one process, and can be loaded again."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    torch.manual_seed(0)
    model = kind(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))
    states = []
    for module in (plain, model):
        parameters = list(module.parameters())
        if module is model:
            parameters = parameters[dist.get_rank():] + parameters[:dist.get_rank()]
        given = [p for p in parameters if p.nbytes > 0 or not lacks_empty]
        groups = [{"params": [p for p in given if p.dim() == d], "lr": 0.1 * d} for d in (1, 2)]
        if module is model and dist.get_rank() == 1 and not lacks_empty:
            groups.reverse()
        if lacks_empty:
            groups = [group for group in groups if group["params"]] or groups[:1]
        optimizer = torch.optim.AdamW(groups, fused=False)
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        states.append(whole_state_of(module, optimizer))
    expected, actual = states
    assert list(actual["state"]) == [name for name, _ in plain.named_parameters()]
    for name, state in actual["state"].items():
        same_bits(expected["state"][name], state, name)
    rates = {tuple(group["params"]): group["lr"] for group in actual["param_groups"]}
    assert rates == {("0.bias", "1.bias"): 0.1, ("0.weight", "1.weight"): 0.2}
    groups = [{"params": [p for p in given if p.dim() == d]} for d in (2, 1)]
    again = torch.optim.AdamW(groups, fused=False)
    model.load_full_optimizer_state_dict(again, actual)
    for group, rate in zip(again.param_groups, [0.2, 0.1]):
        assert group["lr"] == rate or not group["params"]
    for name, state in model.full_optimizer_state_dict(again)["state"].items():
        same_bits(expected["state"][name], state, name)


class Odd(nn.Module):
    """Its buffers have gaps, lie in another order, have no dimension, no element. group: a name
    that a wrapper has, too."""

    def __init__(self):
        super().__init__()
        self.group = 4
        self.register_buffer("gaps", torch.rand(4, 6)[:, :3])
        self.register_buffer("turned", torch.rand(2, 3).T)
        self.register_buffer("empty", torch.ones(0))
        self.register_buffer("number", torch.rand(()))
        self.register_buffer("none", None)
        self.register_buffer("flags", torch.rand(3) > 0.5)
        self.layer = nn.Linear(2, 2)
        self.again = self.layer


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["plain", "ddp", "book_zero1", "torch_ddp", "fsdp2"])
def test_odd_buffers_are_saved(wrapper, tmp_path):
    wrap = {**BUFFERS, "book_zero1": zero.Zero1}[wrapper]
    folder = gather(str(tmp_path))[0]
    torch.manual_seed(dist.get_rank())
    model = wrap(Odd())
    dcp.save(sharded_state(model), checkpoint_id=folder)
    module = getattr(model, "module", model)
    expected = gather({name: t.clone() for name, t in module.named_buffers()})[0]
    for t in module.buffers():
        t.zero_()
    dcp.load(sharded_state(model), checkpoint_id=folder)
    if wrapper != "plain":  # whose ranks are no group
        same_bits(expected, dict(module.named_buffers()))
    for t, fault in ((torch.rand(3).expand(2, 3), "has several elements in one place"),
                     (torch.eye(3).to_sparse(), "is sparse")):
        module = nn.Linear(2, 2)
        module.register_buffer("t", t)
        raises(ValueError, f"the buffer t {fault}", sharded_state, module)


def saves_buffers_of_a_group(folder):
    """torch's DDP over ranks 1 and 2; and rank 1 alone."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(WithBuffers(), process_group=group)
    before = model.module.mean.clone()
    dcp.save(sharded_state(model), checkpoint_id=folder, process_group=group)
    model.module.mean.zero_()
    dcp.load(sharded_state(model), checkpoint_id=folder, process_group=group)
    assert torch.equal(model.module.mean, before)
    if dist.get_rank() == 1:
        dcp.save(sharded_state(model.module), checkpoint_id=folder + "/alone", no_dist=True)
        model.module.mean.zero_()
        dcp.load(sharded_state(model.module), checkpoint_id=folder + "/alone", no_dist=True)
        assert torch.equal(model.module.mean, before)


@on_ranks(3)
def test_buffers_of_a_group_are_saved(tmp_path):
    saves_buffers_of_a_group(gather(str(tmp_path))[0])


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)])
        self.register_buffer("mean", torch.rand(3, 2).T)
        self.register_buffer("derived", torch.rand(2), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


BUFFERS = {"plain": lambda module: module, "ddp": DDP, "zero3": Zero3, "book_ddp": ddp.DDP,
           "book_zero3": zero.Zero3, "torch_ddp": DistributedDataParallel, "fsdp2": fsdp2}


def has_buffers(folder, first, second):
    """Of a model that has been trained, another one gets rank 0's, and the weights of all."""
    torch.manual_seed(0 if first == "plain" else dist.get_rank())  # whose ranks are no group
    model, other = (BUFFERS[wrapper](WithBuffers()) for wrapper in (first, second))
    x = torch.randn(6, 4)
    for _ in range(2):
        model(x).backward()
    saved = sharded_state(model)
    assert not [key for key in saved if "derived" in key]
    module = getattr(model, "module", model)
    [expected, *_] = gather({name: t.clone() for name, t in module.named_buffers()})
    dcp.save(saved, checkpoint_id=folder)
    before = getattr(other, "module", other).derived.clone()
    dcp.load(sharded_state(other), checkpoint_id=folder)
    actual = dict(getattr(other, "module", other).named_buffers())
    assert torch.equal(actual.pop("derived"), before)
    del expected["derived"]
    same_bits(expected, actual)


@on_ranks(2)
@pytest.mark.parametrize(("first", "second"), [("plain", "ddp"), ("zero3", "book_ddp"),
                                               ("book_zero3", "torch_ddp"), ("fsdp2", "zero3")])
def test_buffers_are_saved(first, second, tmp_path):
    folders = gather(str(tmp_path))
    has_buffers(folders[0], first, second)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["book_zero3", "zero3", "fsdp2"])
def test_it_is_saved_while_training_goes_on(wrapper, tmp_path):
    """dcp.async_save. Two models side by side, which have the same keys."""
    one, two = (BUFFERS[wrapper](WithBuffers()) for _ in range(2))
    with torch.no_grad():
        for p in two.parameters():
            p.add_(1)
    before = [{key: t.clone() for key, t in sharded_state(model).items()} for model in (one, two)]
    state = {"one": sharded_state(one), "two": sharded_state(two)}
    saving = dcp.async_save(state, checkpoint_id=gather(str(tmp_path))[0])
    saving.result()
    with torch.no_grad():
        for model in (one, two):
            for p in model.parameters():
                p.zero_()
    dcp.load(state, checkpoint_id=gather(str(tmp_path))[0])
    for model, expected in zip((one, two), before):
        same_bits(expected, sharded_state(model))


class KeepsHistory(torch.optim.SGD):
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [torch.ones_like(p)]


@on_ranks(2)
@of_each(*STAGES)
def test_whole_state_of_other_optimizers(stage):
    """Adagrad, whose state is made in its constructor alone; one with lists, which is refused; a
    rate in a tensor, of which the state has a copy; names of named_parameters()."""
    model = STAGES[stage](nn.Linear(8, 8))
    optimizer = torch.optim.Adagrad(model.named_parameters(), lr=torch.tensor(0.1), foreach=False)
    whole = model.full_optimizer_state_dict(optimizer)
    for group in whole["param_groups"]:
        assert group["params"] == group["param_names"] == ["weight", "bias"]
        group["params"] = group["param_names"] = ["bias", "weight"]
    model.load_full_optimizer_state_dict(optimizer, whole)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    whole = model.full_optimizer_state_dict(optimizer)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    assert whole["param_groups"][0]["lr"] == 0.1
    optimizer = KeepsHistory(model.parameters(), lr=0.1)
    optimizer.step()
    raises(RuntimeError, "history of .* cannot be put together", model.full_optimizer_state_dict,
           optimizer)


FIRST_STEPS = [adamw, sgd, muon, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
               torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.Rprop,
               torch.optim.ASGD, partial(torch.optim.Adam, amsgrad=True)]


@on_ranks(1)
def test_state_begins_as_it_would():
    """State that sharded_state makes before the first step changes no bit of that step, or of the
    next one: a run may save whenever it likes."""
    for kind in FIRST_STEPS:
        begins_as_it_would(kind)


def begins_as_it_would(kind):
    ends = []
    for saves in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(5, 3, bias=False)
        optimizer = kind(module.parameters())
        if saves:
            kinds = {key.partition(".")[0] for key in sharded_state(module, optimizer)}
            assert len(kinds) > 1, "no state"
        for step in range(3):
            module(torch.randn(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(dict(module.named_parameters()))
    same_bits(*ends, getattr(kind, "__name__", "amsgrad"))


@on_ranks(2)
@of_each("ddp", "zero1", "zero3", "torch_ddp", "fsdp2", "plain",
                                     "book_ddp", "book_zero1", "book_zero3")
def test_it_is_the_memory_that_is_trained(wrapper):
    """What is written to the tensors is in the model and the optimizer. Names are those of the bare
    module, in every wrapper; each rank has a part, and together they have all, once or W times."""
    model, [optimizer] = build(wrapper, "adamw")
    train(model, [optimizer], 0, 2)
    tensors = sharded_state(model, optimizer)
    names = {key.partition(".")[2] for keys in gather([*tensors]) for key in keys}
    assert names == {name for name, _ in fresh("gpt").named_parameters()}
    wholes = {key: t.numel() for key, t in sharded_state(fresh("gpt"),
                                                        adamw([])).items()}
    counts = {}
    for held in gather({key: t.numel() for key, t in tensors.items() if key[:6] == "model."}):
        for key, n in held.items():
            counts[key] = counts.get(key, 0) + n
    times = 1 if wrapper in ("zero1", "zero3", "fsdp2", "book_zero1", "book_zero3") else 2
    assert counts == {key: times * n for key, n in wholes.items()}, counts
    for t in tensors.values():
        t.__get_tensor_shard__(None).fill_(0.25)
    for p in model.parameters():
        values = [p.detach(), *optimizer.state[p].values()]
        for t in values:
            t = t.to_local() if hasattr(t, "to_local") else t
            assert t.numel() == 0 or p.numel() == 0 or (t == 0.25).all()


@on_ranks(2, 3)
def test_torchs_stage_1_is_read():
    """A ZeroRedundancyOptimizer has state of a part of the parameters: each rank saves its own."""
    model = DistributedDataParallel(fresh("gpt"))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    mine = len([key for key in sharded_state(model, optimizer) if key.startswith("exp_avg.")])
    n_all = len([*model.parameters()])
    assert sum(gather(mine)) == n_all and mine < n_all


class Lion(torch.optim.Optimizer):
    """An optimizer of others: its state is made in a step, and begins with zeros."""
    begins_with = 0.0

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.full_like(p, self.begins_with)
                state["mean"].lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * state["mean"].sign())


class Eager(Lion):
    """Its state does not begin with zeros."""
    begins_with = -1.0


@on_ranks(1)
def test_optimizers_of_others_begin_with_zeros():
    """Or have to make a step first; so does SGD with dampening, whose first step is another one."""
    module = nn.Linear(3, 2)
    assert "mean.weight" in sharded_state(module, Lion(module.parameters()))
    damped = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    for kind in (Eager, damped):
        optimizer = kind(module.parameters())
        raises(ValueError, "makes its state in its first step alone: step first", sharded_state,
               module, optimizer)
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        assert len(sharded_state(module, optimizer)) == 4


@on_ranks(3)
def test_uncut_parameters_keep_their_state(tmp_path):
    """What ranks save of uncut parameters is what one process has after the same step: weights,
    Adam's moments and steps, and Adafactor's rows and columns, which are no slices of anything."""
    for make in (adamw, adafactor):
        tensors = []
        for wrap in (lambda module: module, partial(uncut, Zero2)):
            model = wrap(fresh("gpt"))
            optimizer = make(model.parameters())
            if is_ours(model):
                model.set_gradient_divide_factor(1)
            for number in range(3):
                if not is_ours(model) or number == dist.get_rank():
                    zoo_loss(model, 0, number).backward()
            optimizer.step()
            tensors.append(sharded_state(model, optimizer))
        expected, saved = tensors
        folder = tmp_path / make.__name__
        dcp.save(saved, checkpoint_id=folder)
        actual = {}
        for key, t in expected.items():
            actual[key] = torch.full_like(t, math.nan)
            vars(actual[key]).update(vars(t))  # its place in the whole
        dcp.load(actual, checkpoint_id=folder)
        same_bits({key: t.as_subclass(torch.Tensor) for key, t in expected.items()},
                  {key: t.as_subclass(torch.Tensor) for key, t in actual.items()}, make.__name__)


class Scalar(nn.Module):
    """Parameters without a dimension, of one element, and in channels_last."""

    def __init__(self, memory_format):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))
        self.conv = nn.Conv2d(2, 4, 3)
        self.to(memory_format=memory_format)


def save_or_load_scalar(folder, wrapper, memory_format, saves):
    torch.manual_seed(0 if saves else 1)
    module = Scalar(memory_format)
    expected = {name: p.clone() for name, p in module.named_parameters()}
    model = wrapper(module)
    optimizer = torch.optim.AdamW(model.parameters())
    tensors = sharded_state(model, optimizer)
    if saves:
        dcp.save(tensors, checkpoint_id=folder)
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}.pt")
        return
    dcp.load(tensors, checkpoint_id=folder)
    actual = {name: p.clone() for name, p in model.full_parameters()}
    same_bits(torch.load(f"{folder}.pt"), actual)


LAST = torch.channels_last


@pytest.mark.parametrize(("first", "second", "memory_format"), [
    (Zero3, DDP, LAST), (DDP, Zero2, torch.contiguous_format), (zero.Zero2, ddp.DDP, LAST),
    (ddp.DDP, zero.Zero1, torch.contiguous_format), (Zero1, zero.Zero2, LAST)])
def test_odd_parameters_are_read(first, second, memory_format, tmp_path):
    """Between wrappers and world sizes. One that lies in memory in another order is not taken for
    it: torch says that its key is missing."""
    folder = str(tmp_path / "saved")
    run(3, save_or_load_scalar, folder, first, memory_format, True)
    run(2, save_or_load_scalar, folder, second, memory_format, False)
    other = torch.contiguous_format if memory_format == LAST else LAST
    with pytest.raises(Failure, match=r"Missing key in checkpoint state_dict: \S+conv.weight"):
        run(2, save_or_load_scalar, folder, second, other, False)


class Counting(torch.optim.SGD):
    """Its state has a number of Python's."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["n_steps"] = 1


class CountsInGroups(torch.optim.SGD):
    """As schedule-free optimizers do."""

    def step(self):
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


@on_ranks(2)
def test_what_cannot_be_saved_is_refused():
    """By name, before anything is sent: parameters of another model, state that is no tensor, or
    has a shape of its own though the parameter is cut; parameters that have gaps in their memory;
    torch's first FSDP."""
    module = fresh("gpt")
    early = adamw(module.parameters())
    model = Zero3(module)
    raises(ValueError, "a parameter of shape .* that is none of the model's", sharded_state, model,
           early)
    optimizer = CountsInGroups(model.parameters(), lr=0.1)
    sharded_state(model, optimizer)
    optimizer.step()
    raises(ValueError, "CountsInGroups counts k in its groups", sharded_state, model, optimizer)
    optimizer = Counting(model.parameters(), lr=0.1)
    raises(ValueError, "n_steps of .* is 1: a checkpoint takes tensors", sharded_state, model,
           optimizer)
    optimizer = adamw(model.parameters())
    raises(ValueError, "two optimizers have a parameter of shape", sharded_state, model, optimizer,
           sgd(model.parameters()))
    sharded_state(model, optimizer)
    for p in model.parameters():
        if p.dim() == 2 and p.numel() > 2:
            optimizer.state[p]["rows"] = torch.zeros(2)
    raises(ValueError, "rows of .* cannot be divided among ranks: its shape is", sharded_state,
           model, optimizer)
    module = fresh("gpt")
    raises(ValueError, "LBFGS makes its state in its first step", sharded_state, module,
           torch.optim.LBFGS(module.parameters()))
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.zeros(4, 6)[:, :4])
    raises(ValueError, "weight has gaps in its memory", sharded_state, module)
    module = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(module.parameters())
    for p in module.parameters():
        optimizer.state[p]["exp_avg"] = torch.zeros(p.shape)
    raises(ValueError, "exp_avg of weight.* another order there than its parameter", sharded_state,
           module, optimizer)
    module = nn.Linear(4, 4)
    wrapped = FullyShardedDataParallel(nn.Sequential(module), device_id=torch.device("cpu"))
    raises(ValueError, "take fully_shard", sharded_state, wrapped)


@on_ranks(2)
def test_other_dimensions_are_refused():
    """fully_shard can divide by another dimension than the first one: no slice of what is flat."""
    module = nn.Linear(8, 8)
    mesh = dist.DeviceMesh("cpu", range(2))
    fully_shard(module, mesh=mesh, shard_placement_fn=last_dimension)
    raises(ValueError, "weight is divided by another dimension", sharded_state, module)


def last_dimension(p):
    return dist.tensor.Shard(p.dim() - 1)


@on_ranks(2)
def test_names_are_those_of_the_bare_module():
    """Also where it has a child named module, or torch.compile has wrapped something."""
    class Tricky(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)
            self.x = nn.Parameter(torch.ones(2))

    for wrap in (lambda m: m, DDP, Zero1, Zero3, DistributedDataParallel):
        actual = gather([*sharded_state(wrap(Tricky()))])
        names = {key for keys in actual for key in keys}
        assert names == {"model.module.weight", "model.x"}, actual
    compiled = torch.compile(nn.Linear(2, 2))
    assert {*sharded_state(compiled)} == {"model.weight", "model.bias"}
    assert {*sharded_state(DDP(compiled))} == {"model.weight", "model.bias"}
    average_gradients(compiled)  # nothing was spoiled
    for p in compiled.parameters():
        assert "nan" not in repr(p) and not p.isnan().any()

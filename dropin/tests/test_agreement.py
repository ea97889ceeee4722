"""What ranks have in common while they train: buffers, steps and their numbers, zeroed gradients.

Each fault is made on one rank alone. All ranks must raise, by the end of the next backward that
averages, and name what differs and the rank."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from dropin.tests.scripts import Net
from dropin.tests.wrappers import WRAPPERS
from tests.common import native, raises
from judge.measure import every_collective
from judge.training import gather, STAGES
from tests.ranks import on_ranks

ALL = ["ddp", *STAGES]
N_STEPS = 4


class Buffered(Net):
    """`grow(net)` is called in the forward."""

    def __init__(self, grow=None):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2, 3))
        self.grow = grow

    def forward(self, x):
        self.count += 1
        if self.grow is not None:
            self.grow(self)
        return super().forward(x)


class Loop:
    """A training loop of a wrapper; each of its steps is (a backward, a step, zeroed gradients)."""

    def __init__(self, wrapper, build=Net, make=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
                 **options):
        torch.manual_seed(0)
        self.net = build()
        self.model = WRAPPERS[wrapper](self.net, **options)
        self.optimizer = make(self.model.parameters())
        self.x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))

    def backward(self):
        self.model(self.x).square().mean().backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def buffers_of(net):
    return {name: t.clone() for name, t in net.named_buffers()}


# ---- buffers


def replaces_table(net, table):
    net.table = table


def registers(net):
    net.register_buffer("late", torch.ones(2))


def takes_another_order(net):
    table = net.table
    del net.table
    net.register_buffer("mean", net._buffers.pop("mean"))
    net.register_buffer("table", table)


def deletes(net):
    del net.table


def casts(net):
    net.mean.data = net.mean.double()


BUFFER_FAULTS = {
    "grows": (partial(replaces_table, table=torch.ones(5, 3)), "table"),
    "shrinks": (partial(replaces_table, table=torch.ones(1, 3)), "table"),
    "another shape, as many": (partial(replaces_table, table=torch.ones(3, 2)), "table"),
    "as many bytes": (partial(replaces_table, table=torch.ones(2, 3, dtype=torch.int32)), "table"),
    "double": (casts, "mean"), "none": (partial(replaces_table, table=None), "table"),
    "registers": (registers, "late"), "order": (takes_another_order, "mean|count"),
    "deletes": (deletes, "table")}


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("fault", BUFFER_FAULTS)
def test_other_buffers_are_refused(fault, where, wrapper):
    """A rank changes a buffer before the first step, or between two. Nothing is written over what
    it has, nor over that of others. When it has put back what there was, training goes on."""
    change, name = BUFFER_FAULTS[fault]
    last = dist.get_world_size() - 1
    guilty = last if where == "last" else 0
    for n_before in (0, 2):
        loop = Loop(wrapper, Buffered)
        for _ in range(n_before):
            loop.step()
        was = dict(loop.net._buffers)
        if dist.get_rank() == guilty:
            change(loop.net)
        own = buffers_of(loop.net)
        pattern = f"other buffers.*({name}).*"
        text = raises(RuntimeError, pattern, lambda: [loop.step() for _ in range(N_STEPS)])
        assert "rank 0 has" in text and f"rank {guilty or 1} has" in text
        actual = buffers_of(loop.net)
        assert actual.keys() == own.keys()
        for key, t in own.items():
            if key != "count":
                same = torch.equal(actual[key], t) and actual[key].dtype == t.dtype
                assert same, f"{key} was {t}, and is {actual[key]}"
        if fault != "double":
            loop.net._buffers.clear()
            loop.net._buffers.update(was)
            loop.model.zero_grad()
            for _ in range(2):
                loop.step()


def on_last_rank(net, change):
    if dist.get_rank() == dist.get_world_size() - 1:
        change(net)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.parametrize("fault", ["grows", "registers"])
def test_buffers_that_a_forward_changes_on_one_rank(fault, wrapper):
    change, name = BUFFER_FAULTS[fault]
    loop = Loop(wrapper, partial(Buffered, partial(on_last_rank, change=change)))
    raises(RuntimeError, f"other buffers.*{name}", loop.step)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero3"])
def test_other_buffers_are_refused_on_accelerators(wrapper):
    """There ranks read what they have compared before the next forward."""
    with native():
        loop = Loop(wrapper, Buffered)
        loop.step()
        if dist.get_rank() == 1:
            loop.net.table = torch.ones(5, 3)
        raises(RuntimeError, "other buffers.*table", lambda: [loop.step() for _ in range(2)])


def grows_alike(net):
    net.table = torch.full((len(net.table) + 1, 3), float(dist.get_rank()))


def registers_own(net):
    net.register_buffer("late", torch.full((2,), float(dist.get_rank())))


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
def test_buffers_that_change_alike(wrapper):
    """They are rank 0's again from the forward after the next backward on, by as many messages."""
    sent = []
    loop = Loop(wrapper, partial(Buffered, grows_alike))
    for _ in range(3):
        loop.step()
        sent.append([])
        with every_collective(lambda name, tensors, to=sent[-1]: to.append(name)):
            loop.model(loop.x)
    assert sent[0] == sent[1] == sent[2], f"forwards send {sent}"
    loop.net.grow = None
    if dist.get_rank() > 0:
        loop.net.table.fill_(9)
    registers_own(loop.net)
    for _ in range(2):
        loop.step()
    assert loop.net.late.tolist() == [0, 0], "not rank 0's"
    assert loop.net.table.max() == 0, "not rank 0's"
    net = loop.net
    net.register_buffer("later", torch.ones(2))
    loop.step()
    if dist.get_rank() == 1:
        del net.later
    raises(RuntimeError, "other buffers.*later", loop.step)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
def test_buffers_may_be_a_ranks_own(wrapper):
    """broadcast_buffers=False: they may differ in values and shapes, from the start."""
    def build():
        net = Buffered(None)
        net.table = torch.full((1 + dist.get_rank(), 3), float(dist.get_rank()))
        return net

    loop = Loop(wrapper, build, broadcast_buffers=False)
    for _ in range(3):
        loop.step()
        grows_alike(loop.net)
    expected = torch.full((4 + dist.get_rank(), 3), float(dist.get_rank()))
    assert torch.equal(loop.net.table, expected)
    raises(RuntimeError, "different modules", Loop, wrapper, build)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "zero2"])
def test_options_must_be_alike(wrapper):
    """Else one rank would wait for buffers that another one does not send."""
    options = dict(broadcast_buffers=dist.get_rank() == 0)
    raises(RuntimeError, "different modules.*forward_sync_buffers", Loop, wrapper, **options)


# ---- steps


def two_optimizers(parameters):
    """One that steps both, if both are asked."""
    parameters = list(parameters)
    return [torch.optim.SGD(some, lr=0.1) for some in (parameters[:4], parameters[4:])]


def other_rate(loop):
    loop.backward()
    loop.optimizer.param_groups[0]["lr"] = 0.2
    loop.optimizer.step()
    loop.optimizer.param_groups[0]["lr"] = 0.1
    loop.optimizer.zero_grad()


def other_momentum(loop):
    loop.optimizer.param_groups[0]["momentum"] = 0.25
    loop.step()
    loop.optimizer.param_groups[0]["momentum"] = 0.5


def no_step(loop):
    loop.backward()
    loop.optimizer.zero_grad()


def two_steps(loop):
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def no_zero_grad(loop):
    loop.backward()
    loop.optimizer.step()


def of_another_kind(loop):
    loop.backward()
    torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5).step()
    torch.optim.AdamW(loop.model.parameters(), lr=0.1, fused=False).step()
    loop.optimizer.zero_grad()


STEP_FAULTS = {other_rate: "lr = 0.", other_momentum: "momentum = 0.", no_step: "a step of SGD",
               two_steps: "a step of SGD", no_zero_grad: "kept gradients|zeroed gradients",
               of_another_kind: "a step of AdamW"}


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_other_steps_are_refused(fault, wrapper):
    """In the next backward, on all ranks."""
    W, rank = dist.get_world_size(), dist.get_rank()
    for guilty, n_before in ((W - 1, 1), (0, 2)):
        loop = Loop(wrapper)
        for _ in range(n_before):
            loop.step()
        if rank == guilty:
            fault(loop)
        else:
            loop.step()
        text = raises(RuntimeError, f"different ways.*({STEP_FAULTS[fault]})", loop.backward)
        assert "rank 0 has" in text and f"rank {guilty or 1} has" in text


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero3"])
def test_other_steps_are_refused_on_accelerators(wrapper):
    with native():
        loop = Loop(wrapper)
        loop.step()
        (no_step if dist.get_rank() == 1 else Loop.step)(loop)
        loop.backward()
        raises(RuntimeError, "different ways.*a step of SGD", loop.backward)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
def test_another_optimizer_is_refused(wrapper):
    """Of two that have the same numbers."""
    loop = Loop(wrapper, make=two_optimizers)
    loop.backward()
    loop.optimizer[dist.get_rank() % 2].step()
    loop.model.zero_grad()
    raises(RuntimeError, "different ways.*parameters from", loop.backward)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
def test_other_divisors_are_refused(wrapper):
    loop = Loop(wrapper)
    loop.model.set_gradient_divide_factor(2 + dist.get_rank())
    raises(RuntimeError, "do not belong together.*gradient_divide_factor 3", loop.backward)


@on_ranks(2, 3)
def test_clipping_on_one_rank_is_refused():
    """In DDP. (In a stage it is a collective, in which the others do not take part.)"""
    loop = Loop("ddp")
    loop.backward()
    if dist.get_rank() == 0:
        loop.model.clip_grad_norm_(1e-3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    raises(RuntimeError, r"different ways.*clip_grad_norm_\(0.001\)", loop.backward)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", STAGES)
def test_a_last_step_left_out_is_refused(wrapper):
    """No backward comes any more, but whole parameters are gathered."""
    loop = Loop(wrapper)
    loop.step()
    (no_step if dist.get_rank() == 1 else Loop.step)(loop)
    raises(RuntimeError, "different ways.*a step of SGD", loop.model.full_state_dict)


@on_ranks(2, 3)
def test_a_step_that_is_shifted_is_refused():
    """A rank without data leaves out forward and backward, but not the step."""
    loop = Loop("ddp")
    loop.step()
    if dist.get_rank() == 1:
        loop.optimizer.step()
    raises(RuntimeError, "do not belong together.*1 steps without a gradient", loop.backward)


# ---- steps that differ, and are right


def owners_step(loop):
    """Each rank updates some parameters, and sends them to the others."""
    parameters = list(loop.model.parameters())
    W = dist.get_world_size()
    torch.optim.SGD(parameters[dist.get_rank()::W], lr=0.1).step()
    for i, p in enumerate(parameters):
        dist.broadcast(p.data, i % W)


def rank_0_steps(loop):
    if dist.get_rank() == 0:
        torch.optim.SGD(loop.model.parameters(), lr=0.1).step()
    for p in loop.model.parameters():
        dist.broadcast(p.data, 0)


def all_step(loop):
    torch.optim.SGD(loop.model.parameters(), lr=0.1).step()


def torchs_stage_1(loop):
    ZeroRedundancyOptimizer(loop.model.parameters(), torch.optim.SGD, lr=0.1).step()


@on_ranks(2, 3)
@pytest.mark.parametrize("step", [owners_step, rank_0_steps, torchs_stage_1])
def test_ranks_may_share_the_work_of_a_step(step):
    """Under DDP: what counts is that they have the same weights then. That is asked only where
    steps differ, and not where only optimizers inside of torch's do."""
    results = []
    sent = []
    for act in (all_step, step):
        loop = Loop("ddp")
        for _ in range(N_STEPS):
            sent.append([])
            with every_collective(lambda name, tensors, to=sent[-1]: to.append(name)):
                loop.backward()
            act(loop)
            loop.model.zero_grad()
        results.append([p.detach() for p in loop.model.parameters()])
    for expected, actual in zip(*results):
        assert torch.equal(expected, actual)
    as_many = sent[:N_STEPS] == sent[N_STEPS:]
    assert as_many == (step is torchs_stage_1), sent


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_leave_empty_shards_out(stage):
    """Then a rank may have no optimizer of some kind, and cannot know how that steps."""
    results = []
    for is_lacking in (False, True):
        torch.manual_seed(0)
        model = STAGES[stage](nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 3)))
        optimizers = []
        for p in model.parameters():
            if p.nbytes > 0 or not is_lacking:
                optimizers.append(torch.optim.SGD([p], lr=0.1))
        for _ in range(N_STEPS):
            model(torch.ones(2, 2)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.full_state_dict())
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ALL)
def test_what_ranks_do_alike_is_not_refused(wrapper):
    """Closures, optimizers in turns, a rate that is a tensor, groups that are added, gradients that
    are kept in some steps."""
    def both(parameters):
        return torch.optim.SGD([{"params": [p]} for p in parameters], lr=torch.tensor(0.1))

    loop = Loop(wrapper, make=both)
    other = torch.optim.AdamW(loop.model.parameters(), lr=1e-3, fused=False)
    loop.step()
    loop.backward()
    other.step()
    loop.backward()
    other.step(loop.backward)
    other.zero_grad()
    extra = nn.Parameter(torch.zeros(3))
    other.add_param_group({"params": [extra], "lr": 0.5})
    for group in loop.optimizer.param_groups:
        group["lr"] = group["lr"] / 2
    for _ in range(2):
        loop.step()
    loop.model.zero_grad()
    assert len(set(gather(str(dict(loop.model.full_parameters()))))) == 1


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "zero3"])
def test_a_copy_of_an_optimizer_steps(wrapper):
    loop = Loop(wrapper)
    loop.step()
    copied = copy.deepcopy(loop.optimizer)  # of copies of the parameters, so it is no one's
    copied.step()
    loop.step()


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_without_gradients_have_nothing_to_say(stage):
    """One rank owns all that is trained."""
    net = nn.Linear(6, 1, bias=False)
    model = STAGES[stage](net, uncut=[net.weight])
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero3"])
def test_one_buffer_that_changes_leaves_the_others(wrapper):
    """The table has another length in each batch, alike on all ranks; the mean is replaced. It is
    rank 0's all the same."""
    def grow(net):
        net.mean = 0.5 * net.mean + dist.get_rank()

    loop = Loop(wrapper, partial(Buffered, grow))
    for step in range(4):
        loop.net.table = torch.zeros(2 + step % 2, 3)
        loop.step()
    loop.net.grow = None
    with torch.no_grad():
        loop.model(loop.x)
    assert len(set(gather(str(loop.net.mean)))) == 1


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "zero3"])
def test_a_buffer_that_is_resized_is_not_written_over(wrapper):
    loop = Loop(wrapper, Buffered)
    loop.step()
    loop.net.table.fill_(9)
    if dist.get_rank() == 1:
        loop.net.table.resize_(4, 3).fill_(5)
    raises(RuntimeError, "other buffers.*table", loop.step)
    assert loop.net.table.unique().tolist() == [9 if dist.get_rank() == 0 else 5]


def a_list(loop):
    loop.optimizer.param_groups[0]["betas"] = [0.5, 0.9]


def of_numpy(loop):
    loop.optimizer.param_groups[0]["lr"] = np.float32(0.5)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.parametrize("change", [a_list, of_numpy])
def test_numbers_of_other_types_count(change, wrapper):
    loop = Loop(wrapper, make=partial(torch.optim.AdamW, lr=0.1, fused=False))
    loop.step()
    if dist.get_rank() == 1:
        change(loop)
    loop.step()
    raises(RuntimeError, "different ways.*(betas|lr) = ", loop.backward)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ALL)
def test_equal_numbers_may_be_written_in_other_ways(wrapper):
    loop = Loop(wrapper)
    rank = dist.get_rank()
    group = loop.optimizer.param_groups[0]
    group["seconds"] = 0.5 * rank  # which is no number of the optimizer's
    for step in range(3):
        group["lr"] = [1, 1.0][rank]
        group["weight_decay"] = [0, -0.0][rank]
        loop.step()


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_another_norm_is_refused(stage):
    loop = Loop(stage)
    loop.backward()
    loop.model.clip_grad_norm_(0.01 * (1 + dist.get_rank()))
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    raises(RuntimeError, r"different ways.*clipping.*clip_grad_norm_\(0.01\)", loop.backward)


@on_ranks(2)
def test_an_owner_may_have_nothing_to_do():
    """Under DDP: in some steps no rank uses what it owns."""
    model = WRAPPERS["ddp"](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
                            find_unused_parameters=True)
    parameters = list(model.parameters())
    rank = dist.get_rank()
    own = parameters[2 * rank:2 * rank + 2]
    optimizer = torch.optim.SGD(own, lr=0.1)
    for step in range(4):
        part = model if step % 2 else model.module[0]
        part(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        for i, p in enumerate(parameters):
            dist.broadcast(p.data, i // 2)
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ALL)
def test_what_no_sync_has_left_may_be_zeroed(wrapper):
    for set_to_none in (True, False):
        loop = Loop(wrapper)
        with loop.model.no_sync():
            loop.backward()
        loop.optimizer.zero_grad(set_to_none)
        loop.optimizer.step()


@on_ranks(2)
def test_steps_are_not_kept_for_ever():
    """Of a wrapper that is in the optimizer, but gets no backward."""
    idle, loop = WRAPPERS["ddp"](Net()), Loop("ddp")
    loop.optimizer.add_param_group({"params": list(idle.parameters())})
    for _ in range(120):
        loop.step()
    assert len(idle._guard_log.steps) == 100 and len(loop.model._guard_log.steps) == 1

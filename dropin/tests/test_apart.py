"""Ranks that do different things: what may differ does, and what must not is refused.

A fault is made on one rank alone, the odd one. All ranks must raise, by the end of the next
backward that averages, and name what differs and the rank."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from dropin import DDP
from dropin.alike import checksum
from dropin.tests.measure import every_collective
from dropin.tests.scripts import ALL, Net, of_each, Script
from dropin.tests.wrappers import WRAPPERS
from dropin.tests.training import gather, STAGES
from tests.common import native, planted, raises
from tests.ranks import on_ranks

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
adamw = partial(torch.optim.AdamW, lr=0.1, fused=False)


def odd_ranks():
    """[(the odd one, who is named beside rank 0)]: the last rank, and rank 0."""
    last = dist.get_world_size() - 1
    return [(last, last), (0, 1)]


# -------------------------------------------------------------------------------------------------
# buffers


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


def with_table(table):
    def change(net):
        net.table = table

    return change


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
    "grows": (with_table(torch.ones(5, 3)), "table"),
    "another shape": (with_table(torch.ones(3, 2)), "table"),
    "as many bytes": (with_table(torch.ones(2, 3, dtype=torch.int32)), "table"),
    "double": (casts, "mean"), "none": (with_table(None), "table"),
    "registers": (registers, "late"), "order": (takes_another_order, "mean|count"),
    "deletes": (deletes, "table")}


@on_ranks(3)
@pytest.mark.parametrize("fault", BUFFER_FAULTS)
@of_each("ddp", "zero1", "zero3")
def test_other_buffers_are_refused(wrapper, fault):
    """A rank changes a buffer before the first step, or between two. Nothing is written over what
    it has, nor over that of others. When it has put back what there was, training goes on."""
    change, name = BUFFER_FAULTS[fault]
    for (odd, named), n_before in zip(odd_ranks(), (0, 2)):
        s = Script(wrapper, Buffered)
        for _ in range(n_before):
            s.step()
        was = dict(s.module._buffers)
        if dist.get_rank() == odd:
            change(s.module)
        own = {name: t.clone() for name, t in s.module.named_buffers()}
        text = raises(RuntimeError, f"other buffers.*({name}).*", lambda: [s.step(), s.step()])
        assert "rank 0 has" in text and f"rank {named} has" in text
        actual = dict(s.module.named_buffers())
        assert actual.keys() == own.keys()
        for key, t in own.items():
            is_same = torch.equal(actual[key], t) and actual[key].dtype == t.dtype
            assert is_same or key == "count", f"{key} was {t}, and is {actual[key]}"
        if fault != "double":
            s.module._buffers.clear()
            s.module._buffers.update(was)
            s.model.zero_grad()
            s.step()
            s.step()


@on_ranks(3)
@of_each(*ALL)
def test_buffers_that_a_forward_changes_on_one_rank(wrapper):
    """Or that is resized, without a word, between two steps."""
    def grows_on_last(net):
        if dist.get_rank() == dist.get_world_size() - 1:
            change(net)

    for fault in ("grows", "registers"):
        change, name = BUFFER_FAULTS[fault]
        s = Script(wrapper, partial(Buffered, grows_on_last))
        raises(RuntimeError, f"other buffers.*{name}", s.step)
    s = Script(wrapper, Buffered)
    s.step()
    s.module.table.fill_(9)
    if dist.get_rank() == 1:
        s.module.table.resize_(4, 3).fill_(5)
    raises(RuntimeError, "other buffers.*table", s.step)
    assert s.module.table.unique().tolist() == [5 if dist.get_rank() == 1 else 9]


def grows_alike(net):
    net.table = torch.full((len(net.table) + 1, 3), float(dist.get_rank()))


@on_ranks(3)
@of_each(*ALL)
def test_buffers_that_change_alike(wrapper):
    """They are rank 0's again from the forward after the next backward on, by as many messages."""
    sent = []
    s = Script(wrapper, partial(Buffered, grows_alike))
    for _ in range(3):
        s.step()
        sent.append([])
        with every_collective(lambda name, tensors, to=sent[-1]: to.append(name)):
            s.model(s.x)
    assert sent[0] == sent[1] == sent[2], f"forwards send {sent}"
    s.module.grow = None
    if dist.get_rank() > 0:
        s.module.table.fill_(9)
    s.module.register_buffer("late", torch.full((2,), float(dist.get_rank())))
    s.step()
    s.module.mean = s.module.mean + dist.get_rank()  # one that is replaced leaves the others
    s.step()
    for name in ("late", "table", "mean"):
        assert s.module.get_buffer(name).max() == 0, f"{name} is not rank 0's"


@on_ranks(3)
@of_each(*ALL)
def test_buffers_may_be_a_ranks_own(wrapper):
    """broadcast_buffers=False: they may differ in values and shapes, from the start. All ranks must
    say so: else one would wait for buffers that another one does not send."""
    def build():
        net = Buffered()
        net.table = torch.full((1 + dist.get_rank(), 3), float(dist.get_rank()))
        return net

    s = Script(wrapper, build, broadcast_buffers=False)
    for _ in range(3):
        s.step()
        grows_alike(s.module)
    expected = torch.full((4 + dist.get_rank(), 3), float(dist.get_rank()))
    assert torch.equal(s.module.table, expected)
    raises(RuntimeError, "different modules", Script, wrapper, build)
    raises(RuntimeError, "different modules.*forward_sync_buffers", Script, wrapper,
           broadcast_buffers=dist.get_rank() == 0)


# -------------------------------------------------------------------------------------------------
# steps
#
# fault(s, is_odd) is what each rank does in place of a step.


def other_rate(s, is_odd):
    s.optimizer.param_groups[0]["lr"] = 0.2 if is_odd else 0.1
    s.step()


def rate_of_numpy(s, is_odd):
    s.optimizer.param_groups[0]["lr"] = np.float32(0.5) if is_odd else 0.1
    s.step()


def other_momentum(s, is_odd):
    s.optimizer.param_groups[0]["momentum"] = 0.25 if is_odd else 0.5
    s.step()


def other_betas(s, is_odd):
    s.optimizer = adamw(s.parameters, betas=[0.5 if is_odd else 0.8, 0.9])
    s.step()
    s.step()  # the first one is as long, whatever they are


def no_step(s, is_odd):
    s.backward()
    if not is_odd:
        s.optimizer.step()
    s.optimizer.zero_grad()


def two_steps(s, is_odd):
    s.backward()
    for _ in range(1 + is_odd):
        s.optimizer.step()
    s.optimizer.zero_grad()


def no_zero_grad(s, is_odd):
    s.backward()
    s.optimizer.step()
    if not is_odd:
        s.optimizer.zero_grad()


def of_another_kind(s, is_odd):
    s.backward()
    s.optimizer.step()
    if is_odd:
        adamw(s.parameters).step()
    s.optimizer.zero_grad()


def of_other_parameters(s, is_odd):
    """By one of two optimizers that have the same numbers."""
    s.backward()
    sgd(s.parameters[4:] if is_odd else s.parameters[:4]).step()
    s.model.zero_grad()


def other_norm(s, is_odd):
    s.backward()
    s.model.clip_grad_norm_(0.02 if is_odd else 0.01)
    s.optimizer.step()
    s.optimizer.zero_grad()


def clips_alone(s, is_odd):
    s.backward()
    if is_odd:
        s.model.clip_grad_norm_(1e-3)
    s.optimizer.step()
    s.optimizer.zero_grad()


def one_more_step(s, is_odd):
    """A rank without data leaves out forward and backward, but not the step."""
    s.step()
    if is_odd:
        s.optimizer.step()


def other_divisor(s, is_odd):
    s.model.set_gradient_divide_factor(3 if is_odd else 2)
    s.step()


STEP_FAULTS = {
    other_rate: "different ways.*lr = 0.", rate_of_numpy: "different ways.*lr = 0.",
    other_momentum: "different ways.*momentum = 0.", other_betas: "different ways.*betas = ",
    no_step: "different ways.*a step of SGD", two_steps: "different ways.*a step of SGD",
    no_zero_grad: "different ways.*(kept gradients|zeroed gradients)",
    of_another_kind: "different ways.*a step of AdamW",
    of_other_parameters: "different ways.*parameters from",
    other_norm: r"different ways.*clip_grad_norm_\(0.01\)",
    # In a stage it is a collective, in which the others do not take part.
    clips_alone: r"different ways.*clip_grad_norm_\(0.001\)",
    one_more_step: "do not belong together.*1 steps without a gradient",
    other_divisor: "do not belong together.*gradient_divide_factor 3"}


@on_ranks(3)
@pytest.mark.parametrize("fault", STEP_FAULTS)
@of_each(*ALL)
def test_other_steps_are_refused(wrapper, fault):
    """In the next backward, on all ranks."""
    if wrapper in STAGES and fault in (clips_alone, one_more_step):
        return
    for (odd, named), n_before in zip(odd_ranks(), (1, 2)):
        s = Script(wrapper, make=sgd)
        for _ in range(n_before):
            s.step()
        text = raises(RuntimeError, STEP_FAULTS[fault],
                      lambda: [fault(s, dist.get_rank() == odd), s.backward()])
        assert "by rank" in text or "rank 0 has" in text and f"rank {named} has" in text, text


@on_ranks(2)
@of_each("ddp", "zero1", "zero3")
def test_faults_on_accelerators(wrapper):
    """There ranks read what they have compared before the next forward."""
    with native():
        s = Script(wrapper)
        s.step()
        no_step(s, dist.get_rank() == 1)
        s.backward()
        raises(RuntimeError, "different ways.*a step of SGD", s.backward)
        s = Script(wrapper, Buffered)
        s.step()
        if dist.get_rank() == 1:
            s.module.table = torch.ones(5, 3)
        raises(RuntimeError, "other buffers.*table", lambda: [s.step(), s.step()])


@on_ranks(3)
@of_each(*STAGES)
def test_a_last_step_left_out_is_refused(stage):
    """No backward comes any more, but whole parameters are gathered."""
    s = Script(stage)
    s.step()
    no_step(s, dist.get_rank() == 1)
    raises(RuntimeError, "different ways.*a step of SGD", list, s.model.full_parameters())


def train(model, n_steps, act):
    """act(step, loss) makes the backward, or none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(n_steps):
        loss = model(torch.ones(2, 4) * (dist.get_rank() + 1)).square().mean()
        act(step, loss)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
def test_a_step_that_one_rank_leaves_out_is_named():
    """All ranks are told before the step, in which those that went on would have mixed it with
    another."""
    last = dist.get_world_size() - 1
    counts = ", ".join(f"'wrapper \\d+, {int(rank == last)} steps[^']*'"
                       for rank in range(last + 1))
    for find_unused in (False, True):
        for is_raised in (False, True):
            model = WRAPPERS["ddp"](Net(), find_unused_parameters=find_unused)
            n_done = []

            def act(step, loss):
                if dist.get_rank() == last and step == 1:
                    if is_raised:
                        loss.register_hook(planted)
                        raises(ZeroDivisionError, "planted", loss.backward)
                    model.zero_grad()
                    return
                loss.backward()
                n_done.append(step)

            raises(RuntimeError, counts, train, model, 4, act)
            assert n_done == [0], f"backwards done: {n_done}"


@on_ranks(2)
@of_each("ddp", "zero1", "zero3")
def test_wrappers_in_another_order_are_named(wrapper):
    """Of two wrappers the backwards come in another order on one rank. On accelerators messages
    have no tags; there the next forward raises, and the first backward that averages, which waits.
    """
    x = torch.ones(1, 4)
    rank = dist.get_rank()
    if wrapper == "ddp":
        models = [WRAPPERS[wrapper](Net()) for _ in range(2)]
        losses = [model(x).sum() for model in models]
        raises(RuntimeError, "do not belong together, by rank", losses[rank].backward)
    with native():
        first = [WRAPPERS[wrapper](Net()) for _ in range(2)]
        losses = [model(x).sum() for model in first]
        raises(RuntimeError, "do not belong together, by rank", losses[rank].backward)
        models = [WRAPPERS[wrapper](Net()) for _ in range(2)]
        for model in models:
            model(x).sum().backward()
            model.zero_grad()
        losses = [model(x).sum() for model in models]
        losses[rank].backward()
        losses[1 - rank].backward()
        for model in models:
            raises(RuntimeError, "do not belong together, of two wrap", model, x)


# -------------------------------------------------------------------------------------------------
# what differs, and is right


def first_column(net, x):
    """A view, so that a write to it is one to the tensor that it is of."""
    return net.plain(x)[:, 0]


@on_ranks(2, 3)
def test_ranks_may_do_different_things():
    """Under DDP, without a backward for each forward."""
    rank = dist.get_rank()
    x = torch.ones(2, 4)

    def own(step, loss):
        if act == "two or more forwards":  # one backward through all of them
            loss = loss + sum(model(x).mean() for _ in range(rank))
        if act == "a look in eval()" and rank == 0:
            model.eval()
            model(x)
            model.train()
        if act == "no_sync()" and rank == 0:
            with model.no_sync():
                model(x)
        if act == "no_grad" and rank == 0:
            with torch.no_grad():
                model(x)
        if act == "an error" and rank == 0:
            with model.module.register_forward_pre_hook(planted):
                raises(ZeroDivisionError, "planted", model, x)
        if act == "drops":
            with model.no_sync():
                loss.backward()
            if rank == 0:
                model.zero_grad()
            loss = model(x).mean()
        if act == "writes to the output":
            column = model(x)
            if rank == 0:
                column[column > 0] = 0
            loss = loss + column.sum()
        if act == "later":
            loss_of_the_next = model(x).mean()
            loss.backward()
            loss = loss_of_the_next
        loss.backward()

    for act in ("two or more forwards", "a look in eval()", "no_sync()", "no_grad", "an error",
                "drops", "writes to the output", "later"):
        model = WRAPPERS["ddp"](Net(first_column))
        train(model, 3, own)


def owners_step(parameters):
    """Each rank updates some parameters, and sends them to the others."""
    W = dist.get_world_size()
    torch.optim.SGD(parameters[dist.get_rank()::W], lr=0.1).step()
    for i, p in enumerate(parameters):
        dist.broadcast(p.data, i % W)


def rank_0_steps(parameters):
    if dist.get_rank() == 0:
        torch.optim.SGD(parameters, lr=0.1).step()
    for p in parameters:
        dist.broadcast(p.data, 0)


def torchs_stage_1(parameters):
    ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1).step()


@on_ranks(2, 3)
def test_ranks_may_share_the_work_of_a_step():
    """Under DDP: what counts is that they have the same weights then. That is asked only where
    steps differ, and not where only optimizers inside of torch's do."""
    results, sent = {}, {}

    def all_step(parameters):
        torch.optim.SGD(parameters, lr=0.1).step()

    for act in (all_step, owners_step, rank_0_steps, torchs_stage_1):
        s = Script("ddp")
        sent[act] = []
        for _ in range(4):
            with every_collective(lambda name, tensors: sent[act].append(name)):
                s.backward()
            act(s.parameters)
            s.model.zero_grad()
        results[act] = torch.cat([p.detach().flatten() for p in s.parameters])
        assert torch.equal(results[act], results[all_step]), act.__name__
        asks = len(sent[act]) > len(sent[all_step])
        assert asks == (act in (owners_step, rank_0_steps)), act.__name__


@on_ranks(2)
def test_an_owner_may_have_nothing_to_do():
    """Under DDP: in some steps no rank uses what it owns."""
    model = WRAPPERS["ddp"](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
                            find_unused_parameters=True)
    parameters = list(model.parameters())
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(parameters[2 * rank:2 * rank + 2], lr=0.1)
    for step in range(4):
        part = model if step % 2 else model.module[0]
        part(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        for i, p in enumerate(parameters):
            dist.broadcast(p.data, i // 2)
        model.zero_grad()


@on_ranks(2, 4)
@of_each(*STAGES)
def test_ranks_may_leave_empty_shards_out(stage):
    """Then a rank may have no optimizer of some kind, and cannot know how that steps, also where
    it was said that no step comes. Nor has one that owns nothing of what is trained anything to
    say."""
    results = []
    for is_lacking in (False, True):
        torch.manual_seed(0)
        model = WRAPPERS[stage](nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 3)))
        optimizers = []
        for p in model.parameters():
            if p.nbytes > 0 or not is_lacking:
                optimizers.append(torch.optim.SGD([p], lr=0.1))
        for step in range(4):
            model.set_is_last_backward(step == 3)
            model(torch.ones(2, 2)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.full_state_dict())
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name
    net = nn.Linear(6, 1, bias=False)
    model = WRAPPERS[stage](net, uncut=[net.weight])
    optimizer = adamw(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@of_each(*ALL)
def test_what_ranks_do_alike_is_not_refused(wrapper):
    """Closures, optimizers in turns, a rate that is a tensor, groups that are added, gradients that
    are kept in some steps, a copy of an optimizer, what no_sync() has left; and equal numbers that
    are written in other ways."""
    def both(parameters):
        return torch.optim.SGD([{"params": [p]} for p in parameters], lr=torch.tensor(0.1))

    s = Script(wrapper, make=both)
    other = adamw(s.parameters)
    s.step()
    s.backward()
    other.step()
    s.backward()
    other.step(s.backward)
    other.zero_grad()
    other.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.5})
    for group in s.optimizer.param_groups:
        group["lr"] = group["lr"] / 2
    s.step()
    copy.deepcopy(s.optimizer).step()  # of copies of the parameters, so it is no one's
    s.step()
    s.model.zero_grad()
    assert len(set(gather(str(dict(s.model.full_parameters()))))) == 1
    for set_to_none in (True, False):
        s = Script(wrapper, make=sgd)
        s.hold()
        s.optimizer.zero_grad(set_to_none)
        s.optimizer.step()
    s = Script(wrapper)
    rank = dist.get_rank()
    group = s.optimizer.param_groups[0]
    group["seconds"] = 0.5 * rank  # which is no number of the optimizer's
    for step in range(3):
        group["lr"] = [1, 1.0][rank]
        group["weight_decay"] = [0, -0.0][rank]
        s.step()


@on_ranks(2)
def test_steps_are_not_kept_for_ever():
    """Of a wrapper that is in the optimizer, but gets no backward."""
    idle, s = WRAPPERS["ddp"](Net()), Script("ddp")
    s.optimizer.add_param_group({"params": list(idle.parameters())})
    for _ in range(120):
        s.step()
    assert len(idle._guard_log.steps) == 100 and len(s.model._guard_log.steps) == 1


# -------------------------------------------------------------------------------------------------
# values


def other_values(s):
    return {name: torch.ones_like(t) for name, t in s.result().items()}


def loads_weights(s, is_odd):
    values = other_values(s)
    if is_odd:
        s.module.load_state_dict(values)
    s.step()


def loads_a_layer(s, is_odd):
    if is_odd:
        with torch.no_grad():
            s.module.head.weight.copy_(torch.ones(2, 4))
    s.step()


def replaces_data(s, is_odd):
    if is_odd:
        s.module.head.weight.data = torch.ones(2, 4)
    s.step()
    s.step()


def loads_by_the_wrapper(s, is_odd):
    """A stage has methods of its own; DDP has the module's."""
    load = getattr(s.model, "load_full_state_dict", s.module.load_state_dict)
    values = other_values(s)
    if is_odd:
        load(values)
    s.step()


def loads_own_part(s, is_odd):
    state = copy.deepcopy(s.model.state_dict())
    s.step()
    if is_odd:
        s.model.load_state_dict(state)
    s.step()


def loads_the_optimizer(s, is_odd):
    state = copy.deepcopy(s.optimizer.state_dict())
    s.step()
    if is_odd:
        s.optimizer.load_state_dict(state)
    s.step()
    s.step()


def resumes_the_optimizer(s, is_odd):
    """Before its first step."""
    state = copy.deepcopy(s.optimizer.state_dict())
    s.optimizer = sgd(s.parameters)
    if is_odd:
        s.optimizer.load_state_dict(state)
    s.step()
    s.step()


VALUE_FAULTS = {
    loads_weights: "different ways.*(a change of parameters|values that were written)",
    loads_a_layer: "(different ways.*(a change of parameters|values that were written))",
    replaces_data: "something has changed it|different ways.*values that were written",
    loads_by_the_wrapper: "a change of parameters|load_full_state_dict",
    loads_own_part: r"a change of parameters|load_state_dict\(\)",
    loads_the_optimizer: r"something has changed it|1 load.s. of the state of SGD",
    resumes_the_optimizer: "a first step of SGD, whose state was there before: (True|False)"}


@on_ranks(2, 3)
@pytest.mark.parametrize("fault", VALUE_FAULTS)
@of_each(*ALL)
def test_a_load_on_one_rank_is_refused(wrapper, fault):
    """At once: the ninth backward to the fifteenth compare no values but for that. (What is written
    past a version they have to see.)"""
    for odd, _ in odd_ranks():
        s = Script(wrapper, make=sgd)
        for _ in range(1 if fault is replaces_data else 8):
            s.step()
        raises(RuntimeError, VALUE_FAULTS[fault],
               lambda: [fault(s, dist.get_rank() == odd), s.backward()])


@on_ranks(2, 3)
def test_values_that_drift_are_refused():
    """A rounding optimizer whose random numbers each rank draws for itself."""
    s = Script("ddp")
    generator = torch.Generator().manual_seed(dist.get_rank())

    def round_by_chance(optimizer, arguments, options):
        with torch.no_grad():
            s.module.scale += 1e-6 * torch.rand((), generator=generator)

    s.optimizer.register_step_post_hook(round_by_chance)
    raises(RuntimeError, "ranks differ in scale: something has changed it",
           lambda: [s.step() for _ in range(3)])


@on_ranks(2)
def test_rank_0_may_change_and_restore():
    """As for an evaluation with averages."""
    s = Script("ddp")
    for _ in range(9):
        s.step()
        if dist.get_rank() == 0:
            kept = [p.detach().clone() for p in s.parameters]
            with torch.no_grad():
                for p in s.parameters:
                    p.zero_()
                s.module(s.x)
                for p, before in zip(s.parameters, kept):
                    p.copy_(before)


def perturbed(s):
    """Add random numbers of each rank's own -> a function that takes them away."""
    kept = [p.detach().clone() for p in s.parameters]
    with torch.no_grad():
        for p in s.parameters:
            p += torch.rand(p.shape, generator=torch.Generator().manual_seed(dist.get_rank()))

    def restore():
        with torch.no_grad():
            for p, before in zip(s.parameters, kept):
                p.copy_(before)

    return restore


@on_ranks(2, 3)
def test_ranks_may_move_weights_for_a_time():
    """In the second of two backwards, as in SAM; in forward and backward, as noise; after a step
    that one rank makes for all. Or they step by hand, each its own way, and average then."""
    s = Script("ddp")
    for step in range(9):
        if step % 2 == 0:
            s.hold()
            s.optimizer.zero_grad()
        restore = perturbed(s)
        s.backward()
        restore()
        s.optimizer.step()
        s.optimizer.zero_grad()
    s = Script("ddp")
    for _ in range(9):
        s.backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                for p in s.parameters:
                    p -= 0.1 * p.grad
        for p in s.parameters:
            dist.broadcast(p.data, 0)
        s.optimizer.zero_grad()
    s = Script("ddp")
    for _ in range(9):
        with s.model.no_sync():
            s.backward()
        with torch.no_grad():
            for p in s.parameters:
                p -= 0.1 * p.grad
        s.model.zero_grad()
    s.backward()


def test_a_checksum_knows_places():
    t = torch.arange(40.0).view(5, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.int8):
        of = [checksum(x.to(dtype)) for x in (t, t.clone(), t.flip(0), t.flip(1), t + 1)]
        assert of[0] == of[1] and len({n.item() for n in of}) == 4
    assert checksum(torch.empty(0)) == 0 and checksum(torch.ones(())) != 0


class UsesOne(nn.Module):
    """Of three parameters, which are uncut, so some ranks own only what gets no gradient."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList([torch.ones(n, 4) for n in (6, 6, 3)])

    def forward(self, x):
        return x @ self.rows[0].T


@on_ranks(2, 3)
@of_each(*STAGES)
def test_a_rank_may_have_no_state_to_resume_with(wrapper):
    state = None
    for _ in range(2):
        net = UsesOne()
        model = WRAPPERS[wrapper](net, uncut=list(net.rows))
        optimizer = adamw(model.parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()


class Centres(nn.Module):
    """A loss that has parameters."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.ones(2))

    def forward(self, y):
        return (y - self.centre).square().mean()


def steps_beside(wrapper, average=None, is_local=False, in_one=True, late=False):
    """Steps of a model and of a loss; average(its gradient) comes before each. late: the optimizer
    gets its parameters after a step."""
    s, loss = Script(wrapper), Centres()
    if is_local:
        loss.centre.is_local = True
    own = torch.optim.SGD(loss.parameters(), lr=0.1)
    if late:
        s.step()
    if in_one:
        own = s.optimizer
        own.add_param_group({"params": list(loss.parameters())})
    for _ in range(4):
        loss(s.model(s.x)).backward()
        if average is not None:
            average(loss.centre.grad)
        for optimizer in dict.fromkeys([s.optimizer, own]):
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2, 3)
@of_each(*ALL)
def test_what_is_trained_beside_is_named(wrapper):
    text = r"other values of 1 parameter.s. of SGD of shape \(2,\),.*p.is_local = True"
    for in_one in (True, False):
        raises(RuntimeError, text, steps_beside, wrapper, in_one=in_one)
        steps_beside(wrapper, dist.all_reduce, in_one=in_one)
        steps_beside(wrapper, is_local=True, in_one=in_one)
    raises(RuntimeError, text, steps_beside, wrapper, late=True)


@on_ranks(2)
@of_each(*ALL)
def test_a_rank_may_train_models_of_its_own(wrapper):
    """Beside, by optimizers that are made in each step. What the model's loss has is named, yet."""
    s, loss = Script(wrapper), Centres()
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step():
        own = nn.Parameter(torch.rand(2, generator=generator))
        optimizer = torch.optim.SGD([own], lr=0.1)
        own.square().sum().backward()
        optimizer.step()
        s.step()

    for _ in range(9):
        step()
    s.optimizer.add_param_group({"params": list(loss.parameters())})
    s.loss = lambda: loss(s.model(s.x))
    raises(RuntimeError, "trained beside this model", lambda: [step() for _ in range(4)])


@on_ranks(2)
def test_a_rank_may_train_what_ddp_leaves_alone():
    net = Net()
    net.own = nn.Parameter(torch.ones(2))
    net.calls = lambda net, x: net.plain(x) * net.own
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["own"])
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(9):
        (model(torch.ones(2, 4)).square().mean() * (1 + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(gather(str(net.own.tolist())))) == 2


class Counting(Net):
    """As experts that count how often they are asked."""

    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.zeros(2))
        self.head.register_buffer("given", torch.zeros(()))

    def forward(self, x):
        self.load += torch.tensor([1, dist.get_rank()])
        return super().forward(x)


@on_ranks(2, 3)
@of_each(*ALL)
def test_buffers_that_micro_steps_add_to(wrapper):
    """Before its next step a rank has what its own micro-steps have added."""
    s = Script(wrapper, Counting)
    for step in range(3):
        for _ in range(3):
            s.backward()
        own = torch.tensor([1.0, dist.get_rank()])
        assert torch.equal(s.module.load, 3 * own), (step, s.module.load)
        s.module.load.zero_()
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.module.load += dist.get_rank()
    s.step()
    assert len(set(gather(str(s.module.load - own)))) == 1, "rank 0's came after the step"
    s.backward()
    s.optimizer.step()
    s.module.load += dist.get_rank()
    loss = s.loss()  # gradients are still there
    assert len(set(gather(str(s.module.load - own)))) == 1, "rank 0's came after the step"
    s.optimizer.zero_grad()
    loss.backward()
    if dist.get_rank() == 0:
        s.module.load = s.module.load + 7
        s.module.head.given = s.module.head.given + 7
    s.backward()
    assert s.module.head.given == 7, "what rank 0 alone has changed came, too"

"""What a script asks of a stage's shards: its part of a parameter is not the parameter."""

import copy
import io
import warnings
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
import torch.nn as nn

from checkpoint import sharded_state
from dropin.shard_guards import PartOfParameter
from dropin.tests.scripts import Net, of_each
from dropin.tests.wrappers import WRAPPERS
from dropin.tests.training import gather, STAGES
from tests.common import raises
from tests.ranks import on_ranks


def warnings_of(function, *arguments):
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        function(*arguments)
    return [str(warning.message) for warning in actual]


def matrix_of(model):
    """Its first shard of a matrix; it may be empty."""
    return next(p for p in model.parameters() if p.dim() == 2)


# ---- shapes


QUESTIONS = [lambda p: p.shape[1], lambda p: p.size(0), torch.numel, lambda p: p.numel(),
             lambda p: p.nelement(), len, lambda p: p.T.shape, lambda p: p.data.shape,
             lambda p: p.detach().size()]


@on_ranks(1, 3)
@of_each(*STAGES)
def test_shapes_of_shards_are_warned_of(stage):
    """Until the first step; the answer is that of the shard."""
    for ask in QUESTIONS:
        model = STAGES[stage](Net())
        p = matrix_of(model)
        assert p.whole_shape in ((4, 4), (2, 4))
        [text] = warnings_of(ask, p)
        assert "one rank's part" in text and "p.whole_shape" in text
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert warnings_of(ask, p) == [] and type(p) is nn.Parameter


def trains(stage, **options):
    model = STAGES[stage](Net(), **options)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    for optimizer in (torch.optim.AdamW(groups, fused=False), torch.optim.SGD(groups, foreach=True),
                      torch.optim.RMSprop(model.parameters())):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(model.state_dict())
    model.load_full_state_dict(model.full_state_dict())


@on_ranks(3)
@of_each(*STAGES)
def test_training_does_not_warn(stage):
    """Nor does saving."""
    assert warnings_of(partial(trains, stage)) == []
    model = STAGES[stage](Net())
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    assert warnings_of(sharded_state, model, optimizer) == []
    uncut = nn.Linear(3, 3)
    model = STAGES[stage](uncut, uncut=[uncut.weight])
    owned = [p for p in model.parameters() if p.shape == (3, 3)]
    assert len(owned) == (dist.get_rank() == 0), "its owner has all of it"
    assert warnings_of(lambda: [p.shape for p in owned]) == []


INITS = [nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.kaiming_uniform_,
         nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.normal_, nn.init.uniform_,
         nn.init.trunc_normal_, nn.init.eye_, partial(nn.init.sparse_, sparsity=0.5),
         torch.Tensor.normal_, torch.Tensor.uniform_, lambda p: p.data.normal_()]


@on_ranks(3)
@of_each(*STAGES)
def test_shards_are_not_initialised(stage):
    """Constants would be right."""
    model = STAGES[stage](Net())
    p = matrix_of(model)
    before = p.detach().clone()
    for init in INITS:
        with torch.no_grad():
            raises(RuntimeError, "one rank's part.*before wrapping", init, p)
    assert torch.equal(p, before)
    nn.init.constant_(p, 3)
    nn.init.zeros_(p)
    nn.init.ones_(p)
    assert warnings_of(torch.ones_like, p) == [] and (p == 1).all()


@on_ranks(2)
@of_each(*STAGES)
def test_copies_of_shards_are_plain(stage):
    model = STAGES[stage](Net())
    p = matrix_of(model)
    assert isinstance(p, PartOfParameter) and isinstance(p, nn.Parameter)
    assert not isinstance(p.data, nn.Parameter)
    twin, again = copy.deepcopy([p, p])
    assert type(twin) is nn.Parameter and twin is again and torch.equal(twin, p)
    assert type(p.clone()) is torch.Tensor
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is nn.Parameter and torch.equal(loaded, p)


# ---- shards of two wrappers


def student_and_teacher(stage, frozen):
    """Of one module; frozen: what has this in its name is not trained in the teacher."""
    torch.manual_seed(0)
    student, teacher = [Net(), Net()]
    for name, p in teacher.named_parameters():
        p.requires_grad = frozen not in name
    return STAGES[stage](student), STAGES[stage](teacher)


def lerps(students, teachers):
    for p, q in zip(students, teachers):
        q.lerp_(p, 0.1)


def lerps_data(students, teachers):
    for p, q in zip(students, teachers):
        q.data.mul_(0.9).add_(p.data, alpha=0.1)


def lerps_lists(students, teachers):
    torch._foreach_lerp_(teachers, students, 0.1)


def copies(students, teachers):
    for p, q in zip(students, teachers):
        q.copy_(p)


@on_ranks(3)
@of_each(*STAGES)
def test_averages_of_other_parts_are_refused(stage):
    """Where modules are frozen differently they are cut differently. (Each rank whose parts are
    others raises.) Where all is frozen they are cut alike."""
    for average, frozen in product((lerps, lerps_data, lerps_lists, copies), ("", "bias")):
        is_right = frozen == ""
        student, teacher = student_and_teacher(stage, frozen)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        student(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        before = teacher.full_state_dict()
        with torch.no_grad():
            call = partial(average, [*student.parameters()], [*teacher.parameters()])
            if is_right:
                call()
            else:
                raises(RuntimeError, "not the same part.*full_state_dict", call)
        if is_right:
            rate = 1.0 if average is copies else 0.1
            for name, t in student.full_state_dict().items():
                expected = before[name].lerp(t, rate)
                assert torch.allclose(teacher.full_state_dict()[name], expected), name


@on_ranks(2)
@of_each(*STAGES)
def test_what_is_no_part_is_not_copied_to_shards(stage):
    """A shard of equal shape, of a parameter that lies column after column; a whole value."""
    net = Net()
    other = Net()
    for block in other.blocks:
        block.weight = nn.Parameter(block.weight.detach().T.contiguous().T)
    student, teacher = STAGES[stage](net), STAGES[stage](other)
    with torch.no_grad():
        raises(RuntimeError, "not the same part", copies, student.parameters(),
               teacher.parameters())
        raises(RuntimeError, "not the same part.*load_full_state_dict", matrix_of(student).copy_,
               torch.ones(4, 4))


# ---- functional_call


@on_ranks(3)
@of_each(*STAGES)
def test_functional_call_takes_whole_averages(stage):
    net = Net()
    model = STAGES[stage](net)
    plain = copy.deepcopy(Net())
    plain.load_state_dict(model.full_state_dict())
    x = torch.ones(2, 4)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for module, prefix in ((net, ""), (model, "module.")):
        given = {prefix + name: t for name, t in averages.items()}
        raises(RuntimeError, "functional_call.*an average of shards", torch.func.functional_call,
               module, given, x)
    wholes = {name: t + 1 for name, t in model.full_parameters()}
    actual = torch.func.functional_call(net, wholes, x)
    expected = torch.func.functional_call(plain, wholes, x)
    assert torch.allclose(actual, expected)
    model(x).sum().backward()


# ---- state of an optimizer


def stepped(model, optimizer, n_inputs=4):
    model(torch.ones(2, n_inputs)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(3)
@of_each(*STAGES)
def test_state_of_another_rank_is_refused(stage):
    """Where a shard has another size there, as at another number of ranks: in the next step, also
    if there were steps before, and as often as it is tried."""
    make = partial(torch.optim.AdamW, fused=False)
    model = STAGES[stage](Net())
    optimizer = make(model.parameters())
    for _ in range(2):
        stepped(model, optimizer)
    states = gather(optimizer.state_dict())
    own = states[dist.get_rank()]
    others = states[dist.get_rank() - 1]
    optimizer.load_state_dict(others)
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(2):
        raises(RuntimeError, "state has the shape .*, and this rank's shard .*sharded_state",
               optimizer.step)
    optimizer.load_state_dict(own)
    optimizer.step()
    model.zero_grad()
    fresh = make(model.parameters())
    fresh.load_state_dict(own)
    stepped(model, fresh)


class Own(torch.optim.Optimizer):
    """State of other shapes than its parameter's, as of 8 bits or a history; some of no parameter.
    """

    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=0.1))
        self.state["n"] = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["map"] = torch.zeros(256)
                state["list"] = [torch.zeros(3)]
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


@on_ranks(2)
@of_each(*STAGES)
def test_state_of_other_shapes_is_loaded(stage):
    net = Net()
    matrices = [block.weight for block in net.blocks]
    model = STAGES[stage](net, uncut=matrices)
    owned = [p for p in model.parameters() if p.whole_shape == (4, 4)]
    for optimizer in (Own(model.parameters()), torch.optim.Adafactor(owned)):
        for _ in range(2):
            stepped(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
        assert len(optimizer._optimizer_load_state_dict_post_hooks) <= 1


@on_ranks(2)
@of_each(*STAGES)
def test_state_of_equal_shards_is_refused(stage):
    """Where shards are equally large its shapes do not tell. A library saves rank 0's for all, and
    loads it into an optimizer that has made no step yet, of this stage or of the next process's."""
    def made():
        model = STAGES[stage](nn.Linear(8, 8, bias=False))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    rank = dist.get_rank()
    model, optimizer = made()
    stepped(model, optimizer, 8)
    own = optimizer.state_dict()
    of_rank_0 = [own]
    dist.broadcast_object_list(of_rank_0)
    for again, later in (made(), (model, torch.optim.AdamW(model.parameters()))):
        later.load_state_dict(of_rank_0[0])
        if rank > 0:
            raises(RuntimeError, "of the shards of rank 0 of 2, .* this is rank 1 of 2",
                   again.full_optimizer_state_dict, later)
            raises(RuntimeError, r"full_optimizer_state_dict\(", later.step)
    again, later = made()
    later.load_state_dict(own)
    stepped(again, later, 8)  # its own is right
    assert all("shards" not in group
               for group in again.full_optimizer_state_dict(later)["param_groups"])
    other = STAGES[stage](nn.Linear(8, 4))  # cut in other places
    both = torch.optim.AdamW([*again.parameters(), *other.parameters()], lr=0.1)
    for _ in range(2):
        again(torch.ones(1, 8)).sum().backward()
        other(torch.ones(1, 8)).sum().backward()
        both.step()
        both.load_state_dict(both.state_dict())  # of two wrappers


@on_ranks(2)
@of_each(*STAGES)
def test_optimizers_are_known_by_their_whole_names(stage):
    """LambdaSGD goes element by element, although its name begins as that of another one."""
    model = STAGES[stage](nn.Linear(8, 8))

    def kind(name, base=torch.optim.SGD):
        return type(name, (base,), {})

    stepped(model, kind("LambdaSGD")(model.parameters()), 8)
    for of_parts, why in (
            (kind("Lamb"), "Lamb looks at whole parameters"),
            (kind("Derived", kind("Lamb")), "Derived looks at whole"),
            (kind("Prodigy"), "Prodigy looks at all whole parameters at once")):
        optimizer = of_parts(model.parameters())
        text = raises(RuntimeError, why, stepped, model, optimizer, 8)
        assert "set optimizer.is_elementwise = True" in text
        optimizer.is_elementwise = True
        optimizer.step()
        optimizer.zero_grad()


# ---- otherwise a shard is a Parameter


@on_ranks(3)
@of_each(*STAGES)
def test_shards_are_parameters(stage):
    model = STAGES[stage](Net())
    for p in model.parameters():
        n = p.detach().nelement()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = nn.Parameter(p)
        assert isinstance(again, nn.Parameter) and again.data_ptr() == p.data_ptr()
        p.data.mul_(torch.tensor([0.5]))  # one element goes with any shape
        p.data.copy_(torch.zeros(1))
        torch.where(p > 0, p, torch.zeros(1))
        assert n == 0 or p.detach().abs().max() == 0
    assert len(set(model.parameters())) == len(list(model.parameters()))


@on_ranks(2)
@of_each(*STAGES)
def test_shards_are_plain_after_a_while(stage):
    """Also frozen ones, and where a script steps by hand. What is computed of a shard and its
    gradient is a part, also before the first step."""
    net = Net()
    net.head.requires_grad_(False)
    model = STAGES[stage](net)
    kinds = []
    for _ in range(3):
        kinds.append({type(p) for p in model.parameters()})
        model(torch.ones(2, 4)).sum().backward()
        p = matrix_of(model)
        with torch.no_grad():
            raises(RuntimeError, "sum of the gradient of a shard", lambda: (p * p.grad).sum())
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                p.grad = None
    assert PartOfParameter in {base for kind in kinds[0] for base in kind.__mro__}
    assert kinds[2] == {nn.Parameter}
    assert warnings_of(sharded_state, model) == []


@on_ranks(2)
@of_each("ddp", *STAGES)
def test_functional_call_takes_a_frozen_copy(wrapper):
    """An evaluation with averages that are Parameters."""
    net = Net()
    average = copy.deepcopy(net).requires_grad_(False)
    model = WRAPPERS[wrapper](net)
    x = torch.ones(2, 4)
    with torch.no_grad():
        actual = torch.func.functional_call(net, dict(average.named_parameters()), x)
    assert torch.allclose(actual, average(x))
    model(x).sum().backward()

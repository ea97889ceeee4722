"""Right, or refused: kinds of faults that public bug reports have shown, of other wrappers too."""

import copy
import functools
import inspect
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import distribute_tensor, init_device_mesh, Replicate
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dropin.ddp import named_tensors
from dropin.guards import Part
from dropin.tests.scripts import Net, note_script, run_script
from dropin.tests.wrappers import WRAPPERS
from tests.common import native, on_meta, planted, raises
from judge.training import STAGES
from tests.ranks import on_ranks

ALL = ["ddp", *STAGES]
SCRIPTS = []
script = functools.partial(note_script, SCRIPTS)
# What errors say.
CAST = "before wrapping"
FREED = "stage 3 has freed it"
NO_END = "end was never seen"
ONE_PART = "one rank's part"


# ---- a module overrides what its parameters, buffers and submodules are listed by


def shifted(net, x):
    return net.plain(x) + net.shift


class OwnLists(Net):
    """Methods without the arguments of torch's, as people write them; some list less."""

    def __init__(self):
        super().__init__(shifted)
        self.register_buffer("shift", torch.zeros(2))

    def named_parameters(self, prefix="", recurse=True):
        for name, p in super().named_parameters(prefix, recurse):
            if "head" in name:
                yield name, p

    def parameters(self, recurse=True):
        return [self.scale]

    def named_buffers(self):
        return []

    def buffers(self):
        return []

    def state_dict(self):
        return {"head": self.head.weight}

    def load_state_dict(self, state_dict):
        raise NotImplementedError

    def zero_grad(self):
        pass


@script(build=OwnLists)
def lists_tensors_in_a_way_of_its_own(s):
    if s.model is not s.module:
        s.module.shift += dist.get_rank()  # the next forward gets rank 0's; in stages it is ignored
    s.step()
    s.module.shift.zero_()
    s.step()


class HidesModules(Net):
    def modules(self):
        return iter([self.head])

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self.head

    def children(self):
        return iter([])

    named_children = children


@script(build=HidesModules)
def lists_modules_in_a_way_of_its_own(s):
    s.step()
    s.step()


class Backwards(nn.ModuleList):
    """It has no length, and other elements when one goes through it."""

    def __len__(self):
        return 0

    def __iter__(self):
        return iter([nn.Linear(4, 4)])


def by_name(net, x):
    for block in net.blocks._modules.values():
        x = x + block(x).tanh()
    return net.head(x) * net.scale


def own_list():
    net = Net(by_name)
    net.blocks = Backwards(net.blocks)
    return net


@script(build=own_list)
def goes_through_a_list_in_a_way_of_its_own(s):
    s.step()


@on_ranks(2)
@pytest.mark.parametrize("wrapper", STAGES)
def test_state_of_all_is_saved_and_loaded(wrapper):
    """full_state_dict() and state_dict() have all tensors, whatever the module's does."""
    module = OwnLists()
    names = {name for name, _ in named_tensors(module, "parameters")} | {"shift"}
    model = WRAPPERS[wrapper](module)
    whole = model.full_state_dict()
    assert names == set(whole) == set(model.state_dict()) == set(model.shard_starts()) | {"shift"}
    model.load_full_state_dict({name: torch.full_like(t, 0.5) for name, t in whole.items()})
    model.load_state_dict(model.state_dict())
    for name, t in model.full_state_dict().items():
        assert (t == 0.5).all(), f"{name} was not loaded"


# ---- what torch's DDP is told to ignore


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
def test_ignored_tensors_stay(wrapper):
    """Buffers that torch's DDP is told to ignore stay as they are on each rank; parameters do under
    DDP, and stages refuse them by name."""
    rank = dist.get_rank()
    net = Net()
    net.register_buffer("own", torch.full((2,), float(rank)))
    net._ddp_params_and_buffers_to_ignore = {"own"}
    model = WRAPPERS[wrapper](net)
    model(torch.ones(1, 4)).sum().backward()
    assert net.own[0] == rank, "the buffer was overwritten"
    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["blocks.0.weight"]
    weight = nn.Parameter(torch.full((4, 4), float(rank)))
    net.blocks[0].weight = weight
    if wrapper != "ddp":
        raises(RuntimeError, r"blocks\.0\.weight is in .*ignore.* use DDP", WRAPPERS[wrapper], net)
        return
    model = WRAPPERS[wrapper](net)
    model(torch.ones(1, 4) * (rank + 1)).sum().backward()
    assert (weight == rank).all(), "the weight was overwritten"
    plain = copy.deepcopy(net)
    plain.zero_grad()
    plain(torch.ones(1, 4) * (rank + 1)).sum().backward()
    assert not torch.equal(net.head.weight.grad, plain.head.weight.grad), "averaged"


# ---- the end of a backward never comes


@script(both="by compiled autograd")
def goes_back_by_compiled_autograd(s):
    with compiled_autograd._enable(torch.compile(backend="eager")):
        s.backward()


class NoCallbacks:
    """An engine that makes no callback at the end of a backward."""

    def __init__(self, engine):
        self.run_backward = engine.run_backward

    def queue_callback(self, callback):
        pass


@script(both=NO_END)
def goes_back_by_an_engine_without_callbacks(s):
    variable = torch.autograd.Variable
    engine = NoCallbacks(variable._execution_engine)
    with mock.patch.object(variable, "_execution_engine", engine):
        s.backward()
    s.optimizer.step()


@script(both=NO_END)
def steps_after_a_backward_that_raised(s):
    with s.module.blocks[1].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", s.backward)
    s.optimizer.step()


@script(both=NO_END)
def evaluates_after_a_backward_that_raised(s):
    with s.module.blocks[1].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", s.backward)
    with torch.no_grad():
        s.loss()


# ---- tensors without memory of their own


class Quantised(torch.Tensor):
    """A wrapper subclass: it has no memory, its values are in another tensor."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values):
        self.values_kept = values

    def __tensor_flatten__(self):
        return ["values_kept"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return type(arguments[0])(arguments[0].values_kept)
        raise NotImplementedError(function)


class Opaque(Quantised):
    """As that, but it does not say where its values are."""

    __tensor_flatten__ = property()


def replicated(t):
    return distribute_tensor(t, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])


def freed(t):
    t.untyped_storage().resize_(0)
    return t


UNSENT = {"Quantised": Quantised, "Opaque": Opaque, "DTensor": replicated, "was freed": freed,
          "sparse_csr": torch.Tensor.to_sparse_csr, "sparse_coo": torch.Tensor.to_sparse,
          "several elements in one place": lambda t: t[:1].expand(4, 4)}


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_tensors_have_memory(wrapper, kind):
    """Parameters and buffers that cannot be sent and cut are refused by their names, and what they
    are; one that DDP is told to ignore is not."""
    for text, make in UNSENT.items():
        net = Net()
        made = make(torch.ones(4, 4))
        if kind == "parameter":
            net.blocks[0].odd = nn.Parameter(made, requires_grad=False)
        else:
            net.blocks[0].register_buffer("odd", made)
        raises(RuntimeError, rf"blocks\.0\.odd .*{text}", WRAPPERS[wrapper], net)
    net._ddp_params_and_buffers_to_ignore = {"blocks.0.odd"}
    if kind == "buffer" or wrapper == "ddp":
        WRAPPERS[wrapper](net)(torch.ones(1, 4)).sum().backward()
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d())
    if kind == "parameter":
        lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    raises(RuntimeError, r"1\.\w+ .*Uninitialized.* forward once", WRAPPERS[wrapper], lazy)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", STAGES)
def test_memory_is_not_shared(wrapper):
    """Parameters that overlap in part are refused; columns of one matrix, which do not, are right.
    """
    flat = torch.zeros(10)
    overlapping = nn.ParameterList([flat[:6], flat[5:]])
    raises(RuntimeError, "share memory", WRAPPERS[wrapper], overlapping)
    matrix = torch.arange(12.0).view(3, 4)
    model = WRAPPERS[wrapper](nn.ParameterList([matrix[:, :2], matrix[:, 2:]]))
    whole = torch.cat([p for _, p in model.full_parameters()], 1)
    assert torch.equal(whole, torch.arange(12.0).view(3, 4)), whole


class Marked(torch.Tensor):
    """A plain subclass, as libraries use to mark parameters."""


def marked():
    net = Net()
    for part in (net.blocks[0], net.head):
        part.weight = nn.Parameter(part.weight.detach().as_subclass(Marked))
    return net


@script(build=marked)
def marks_parameters_by_a_class(s):
    s.step()
    s.step()


# ---- questions to a part of a gradient


def asks(question):
    """A script that asks a gradient."""
    def ask(s):
        s.backward()
        question([p.grad for p in s.parameters if p.grad.numel() > 0][0])

    return ask


QUESTIONS = {
    "svdvals": lambda g: torch.linalg.svdvals(g.view(-1, 1)),
    "median": torch.median,
    "quantile": lambda g: torch.quantile(g, 0.5),
    "count_nonzero": torch.count_nonzero,
    "cosine_similarity": lambda g: F.cosine_similarity(g, torch.ones_like(g), dim=0),
    "prod": torch.prod,
    "cumsum": lambda g: g.cumsum(0),
    "softmax": lambda g: g.softmax(0),
    "nonzero": torch.nonzero,
    "unique": torch.unique,
    "histc": torch.histc,
    "logsumexp": lambda g: g.logsumexp(0),
    "var_mean": torch.var_mean,
    "mse_loss": lambda g: F.mse_loss(g, torch.zeros_like(g)),
    "layer_norm": lambda g: F.layer_norm(g.view(-1), [g.numel()]),
    "dist": lambda g: torch.dist(g, torch.zeros_like(g)),
    "mm": lambda g: torch.mm(g.view(1, -1), g.view(-1, 1)),
    "outer": lambda g: torch.outer(g.view(-1), g.view(-1)),
    "kthvalue": lambda g: g.view(-1).kthvalue(1),
    "fft": lambda g: torch.fft.fft(g.view(-1)),
    "a row": lambda g: g[0],
    "some rows": lambda g: g[g > 0],
    "rows": list,
    "item": lambda g: g[:1].item(),
    "float": lambda g: float(g.view(-1)[0]),
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "all zero": lambda g: (g == 0).all(),
    "any large": lambda g: (g.abs() > 1).any(),
    "how many": lambda g: (g > 0).sum(),
    "norm of a product": lambda g: torch._foreach_mul([g], 2.0)[0].norm(),
    "norms": lambda g: torch._foreach_norm([g]),
    "largest": lambda g: torch._foreach_max([g]),
    "all in one": lambda g: torch.cat([g.view(-1), g.view(-1)]),
    "where it is": lambda g: torch.where(g.abs() > 1),
    "mean of a square elsewhere": lambda g: torch.square(g, out=torch.empty(g.shape)).mean(),
    "mean of what agrees": lambda g: (g == torch.zeros(g.shape)).float().mean(),
    "another shape": lambda g: g.view(-1, 1) * torch.ones(1, 3),
    "all_reduce": dist.all_reduce,
    "broadcast": lambda g: dist.broadcast(g, 0),
    "all_gather": lambda g: dist.all_gather([torch.empty_like(g) for _ in range(2)], g),
    "reduce_scatter": lambda g: dist.reduce_scatter(g, [g, g]),
}


@on_ranks(2)
@pytest.mark.parametrize("wrapper", STAGES)
def test_parts_are_not_asked(wrapper):
    """What is no question about each element is refused, before the step and after it."""
    net = Net()
    model = WRAPPERS[wrapper](net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        gradients = [p.grad for p in model.parameters() if p.grad.numel() > 1]
        for question in QUESTIONS.values():
            raises(RuntimeError, ONE_PART, question, gradients[0])
        optimizer.zero_grad()


@script()
def works_on_gradients_element_by_element(s):
    """An optimizer of a script's own, such as Lion, with averages, clipping by value and noise."""
    averages = [torch.zeros_like(p) for p in s.parameters]
    for _ in range(2):
        s.backward()
        nn.utils.clip_grad_value_(s.parameters, 0.05)
        gradients = [p.grad for p in s.parameters]
        torch._foreach_lerp_(averages, gradients, 0.1)
        signs = torch._foreach_sign(torch._foreach_add(gradients, averages))
        with torch.no_grad():
            for p, sign, average in zip(s.parameters, signs, averages):
                moved = (2 * p.grad - p.grad.view(-1).view_as(p) + 0.1 * sign.to(torch.float64))
                limited = torch.where(p.grad.abs() > 1e-3, moved, -p.grad / 3)
                limited = torch.max(limited, limited.new_full(limited.shape, -0.2))
                p.sub_(limited.float().clamp(-1, 1) + average.pow(2).sqrt(), alpha=0.1)
        s.optimizer.zero_grad()


@script()
def compares_gradients(s):
    s.backward()
    before = [p.grad.clone() for p in s.parameters]
    for p, gradient in zip(s.parameters, before):
        assert (p.grad == gradient).all() and torch.equal(p.grad, gradient)
        assert torch.isclose(p.grad, gradient).all() and torch.allclose(p.grad, gradient)
    s.optimizer.step()


@script()
def keeps_averages_and_scales(s):
    """A scaler of torch's, a fused optimizer, and averages."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.AdamW(s.parameters, lr=0.01, fused=True)
    averages = [p.detach().clone() for p in s.parameters]
    for _ in range(2):
        scaler.scale(s.loss()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch._foreach_lerp_(averages, [p.detach() for p in s.parameters], 0.5)
    torch._foreach_copy_([p.data for p in s.parameters], averages)


# ---- ranks average what does not belong together


def train(model, n_steps, act):
    """act(step, loss) makes the backward, or none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(n_steps):
        loss = model(torch.ones(2, 4) * (dist.get_rank() + 1)).square().mean()
        act(step, loss)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
@pytest.mark.parametrize("options", [{}, dict(find_unused_parameters=True)])
@pytest.mark.parametrize("fault", ["leaves a backward out", "raises in a backward"])
def test_a_step_that_one_rank_leaves_out_is_named(options, fault):
    """If a rank leaves a step out, all ranks are told before the step, in which those that went on
    would have mixed it with another."""
    last = dist.get_world_size() - 1
    model = WRAPPERS["ddp"](Net(), **options)
    n_done = []

    def act(step, loss):
        if dist.get_rank() == last and step == 1:
            if fault == "raises in a backward":
                loss.register_hook(planted)
                raises(ZeroDivisionError, "planted", loss.backward)
            model.zero_grad()
            return
        loss.backward()
        n_done.append(step)

    counts = ", ".join(f"'wrapper \\d+, {int(rank == last)} forwards[^']*'"
                       for rank in range(last + 1))
    raises(RuntimeError, counts, train, model, 4, act)
    assert n_done == [0], f"backwards done: {n_done}"


@on_ranks(2)
def test_wrappers_in_another_order_are_named():
    """Two wrappers whose backwards come in another order on one rank; all ranks raise."""
    models = [WRAPPERS["ddp"](Net()) for _ in range(2)]
    losses = [model(torch.ones(1, 4)).sum() for model in models]
    rank = dist.get_rank()
    raises(RuntimeError, "do not belong together, by rank", losses[rank].backward)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero3"])
def test_wrappers_in_another_order_are_named_on_accelerators(wrapper):
    """There messages have no tags, in stages neither; the next forward raises. So does the first
    backward that averages, which waits."""
    x = torch.ones(1, 4)
    with native():
        first = [WRAPPERS[wrapper](Net()) for _ in range(2)]
        losses = [model(x).sum() for model in first]
        rank = dist.get_rank()
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


def first_column(net, x):
    """A view, so that a write to it is one to the tensor that it is of."""
    return net.plain(x)[:, 0]


@on_ranks(2, 3)
@pytest.mark.parametrize("act", ["two or more forwards", "a look in eval()", "no_sync()", "no_grad",
                                 "an error", "later", "drops", "writes to the output"])
def test_ranks_may_do_different_things(act):
    """What ranks may do differently under DDP, without a backward for each forward."""
    rank = dist.get_rank()
    model = WRAPPERS["ddp"](Net(first_column))
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

    train(model, 3, own)


# ---- torch.func


def tangents_by_jvp(model, x):
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]


def tangents_by_vmap(model, x):
    return torch.func.vmap(model)(x)


def tangents_by_jacfwd(model, x):
    return torch.func.jacfwd(model)(x)


def gradient_by_func(model, x):
    return torch.func.grad(lambda x: model(x).sum())(x)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.parametrize("function", [tangents_by_jvp, tangents_by_vmap, tangents_by_jacfwd,
                                      gradient_by_func])
def test_func_transforms(function, wrapper):
    """Through a wrapper torch.func gives what it gives through the module; it goes on after it. (In
    stage 3 gradients need hooks of saved tensors, which torch.func does not have.)"""
    x = torch.randn(3, 4)
    module = Net()
    expected = function(copy.deepcopy(module), x)
    model = WRAPPERS[wrapper](module)
    if function is gradient_by_func and wrapper == "zero3":
        raises(RuntimeError, "torch.func.grad.* use Zero2", function, model, x)
    else:
        assert torch.allclose(function(model, x), expected)
    train(model, 2, lambda step, loss: loss.backward())
    assert torch.isfinite(model(x)).all()


# ---- compiled steps


@on_ranks(seconds=120)
@pytest.mark.parametrize("wrapper, W", [("ddp", 2), ("zero1", 2), ("zero3", 3), ("zero2", 2),
                                        ("zero2", 3), ("zero1", 3), ("zero3", 2)])
def test_steps_are_compiled(wrapper):
    """torch.compile of what follows a backward changes nothing."""
    results = []
    for decorate in (lambda function: function, torch.compile(backend="eager")):
        torch.manual_seed(0)
        model = WRAPPERS[wrapper](Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = decorate(optimizer.step)
        clip = decorate(model.clip_grad_norm_)
        clear = decorate(model.zero_grad)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            norm = clip(0.5)
            step()
            clear()
        results.append([norm, *(p for _, p in model.full_parameters())])
    for expected, actual in zip(*results):
        assert torch.equal(expected, actual)


# ---- a weight reaches the backward, but not by save_for_backward


class KeepsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class Keeping(nn.Linear):
    def forward(self, x):
        return KeepsWeight.apply(x, self.weight)


class Hooked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_full_backward_pre_hook(self.scale)

    def scale(self, module, gradients):
        return (gradients[0] * self.weight.detach().sum(),)


def keeping():
    net = Net(unit=functools.partial(Keeping, 4, 4, bias=False))
    net.blocks[0].weight.register_hook(torch.clone)
    return net


@script(zero3=FREED, build=keeping)
def keeps_a_weight_in_a_context(s):
    s.x = s.x.clone().requires_grad_()
    s.step()


@script(zero3=FREED, build=functools.partial(Net, unit=functools.partial(Hooked, 4, 4)))
def reads_a_weight_in_a_backward_hook(s):
    s.step()


def selective(net, x):
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.t.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    for block in net.blocks:
        part = nn.Sequential(block, nn.Tanh())
        x = x + checkpoint(part, x, use_reentrant=False, context_fn=contexts)
    return net.head(x) * net.scale


@script(zero3="let its policy recompute views", build=functools.partial(Net, selective))
def keeps_views_by_a_selective_checkpoint(s):
    s.x = s.x.clone().requires_grad_()
    s.step()


# ---- state that is no tensor


class Tied(Net):
    """A parameter that is a buffer, too, and a pre-hook that looks at what is loaded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("tied", self.head.weight)
        self.register_load_state_dict_pre_hook(self.look)

    def look(self, module, state_dict, prefix, *arguments):
        assert state_dict[f"{prefix}head.weight"].shape == (2, 4)


@script(build=Tied)
def has_a_parameter_that_is_a_buffer(s):
    s.step()
    if hasattr(s.model, "full_state_dict"):
        s.model.load_full_state_dict(s.model.full_state_dict())
    s.step()


class Counting(nn.Linear):
    """Its state has a dict, and a tensor that is no buffer."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}doubled"] = torch.tensor([2 * self.calls])

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.doubled = state_dict.pop(f"{prefix}doubled")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


@script(build=functools.partial(Net, unit=functools.partial(Counting, 4, 4)))
def has_state_of_its_own(s):
    s.step()
    if s.model is s.module or not hasattr(s.model, "full_state_dict"):
        return
    for get, load in ((s.model.full_state_dict, s.model.load_full_state_dict),
                      (s.model.state_dict, s.model.load_state_dict)):
        state = get()
        for block in s.module.blocks:
            block.calls = 7
        load(pickle.loads(pickle.dumps(state)))
        assert s.module.blocks[0].calls == 1 and s.module.blocks[0].doubled == 2
        del state["blocks.0._extra_state"]
        raises(RuntimeError, r"blocks\.0\._extra_state", load, state)


# ---- dtypes, and what comes after wrapping


DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn,
          torch.float8_e5m2, torch.complex64, torch.complex128, torch.complex32, torch.bfloat16]


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ALL)
def test_all_dtypes_are_sent(wrapper):
    """Buffers and frozen parameters of any dtype are rank 0's, bit for bit."""
    mine, of_rank_0 = [], []
    for kept, rank in ((mine, dist.get_rank()), (of_rank_0, 0)):
        for dtype in DTYPES:
            numbers = torch.arange(12).view(3, 4).t() + rank  # which is not contiguous
            numbers = numbers.to(torch.complex64 if dtype.is_complex else torch.float32)
            kept.append(numbers.to(dtype))
    module = nn.Linear(2, 2)
    for i, t in enumerate(mine):
        module.register_buffer(f"buffer_{i}", t.clone())
        module.register_buffer(f"scalar_{i}", t[0, 0].clone())
        if not t.is_complex():
            module.register_parameter(f"frozen_{i}", nn.Parameter(t.clone(), requires_grad=False))
    lazy = (torch.arange(3) + dist.get_rank()).to(torch.complex128) * 1j
    module.register_buffer("conjugated", lazy.conj())
    module.register_buffer("negated", lazy.conj().imag)
    model = WRAPPERS[wrapper](module)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.conjugated.resolve_conj(), -1j * torch.arange(3.0).to(lazy.dtype))
    assert torch.equal(module.negated, -torch.arange(3.0).double())
    whole = dict(model.full_parameters())
    for i, t in enumerate(of_rank_0):
        bits = t.contiguous().view(-1, 1).view(torch.uint8)
        for name in (f"buffer_{i}", f"frozen_{i}"):
            actual = whole[name] if name in whole else getattr(module, name, t)
            found_bits = actual.contiguous().view(-1, 1).view(torch.uint8)
            assert torch.equal(found_bits, bits), f"{name}, {t.dtype}"
        scalar = getattr(module, f"scalar_{i}").view(1).view(torch.uint8)
        assert torch.equal(scalar, bits[0]), f"scalar_{i}, {t.dtype}"


@script(both=CAST)
def casts_the_wrapper(s):
    s.model.double()


@script(both=CAST)
def casts_the_module(s):
    s.module.double()
    s.model(s.x.double())


@script(CAST, ddp="after wrapping")
def moves_the_wrapper(s):
    s.model.to("meta")


@script(CAST)
def moves_to_where_it_is(s):
    s.model.to("cpu").float()
    s.step()


@script("full_state_dict")
def saves_by_torchs_checkpoint(s):
    if s.model is not s.module:
        get_state_dict(s.model, s.optimizer)


@script(both="on meta", build=functools.partial(on_meta, Net))
def is_on_meta(s):
    raise NotImplementedError


# ---- what debuggers and libraries ask


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ALL)
def test_questions_do_not_raise(wrapper):
    """Of a wrapper, of a gradient's part and of a parameter."""
    model = WRAPPERS[wrapper](Net())
    model(torch.ones(1, 4)).sum().backward()
    assert not hasattr(model, "no_such_thing") and "module" in dir(model)
    names = {name for name, _ in inspect.getmembers(model)}
    assert "_ddp_params_and_buffers_to_ignore" in names
    assert "Linear" in repr(model) and f"{vars(model)}"
    if wrapper == "ddp":
        pickle.loads(pickle.dumps(model))
        return
    raises(RuntimeError, "save full_state_dict", pickle.dumps, model)
    part = [p.grad for p in model.parameters() if p.grad.numel() > 0][0]
    assert type(part).__mro__[1] is Part
    assert "Part(" in repr(part) and "Part(" in f"{part}" and "shape" in dir(part)
    assert hasattr(part, "grad") and not hasattr(part, "no_such_thing")
    for copied in (copy.copy(part), copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert type(copied) is torch.Tensor
    weight = model.module.blocks[0].weight
    assert "blocks.0.weight" in repr(weight) and "blocks.0.weight" in f"{weight}"
    assert hasattr(weight, "grad") and "shape" in dir(weight)


@on_ranks()
@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.parametrize("script", SCRIPTS)
def test_reports(script, wrapper):
    """`run_script`."""
    run_script(script, wrapper)

"""guards.py: right, or refused. What is no script around a module of its own: see test_scripts.py.
"""

import copy
import datetime
import inspect
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F  # noqa: F401 - of QUESTIONS
from torch._dynamo import compiled_autograd
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor, init_device_mesh, Replicate
from torch.nn.parallel import DistributedDataParallel

import ddp
import dropin
import zero
from checkpoint import sharded_state
from dropin import DDP
from dropin.ranks import named_tensors
from dropin.shard_guards import Part
from dropin.tests.scripts import ALL, Net, of_each, Script
from dropin.tests.test_scripts import CHANGED, COPIED, HOLDS, OwnLists
from dropin.tests.wrappers import WRAPPERS
from dropin.tests.training import fresh, STAGES, zoo_loss
from tests.common import raises, ROOT
from tests.ranks import on_ranks

MODIFIED = "modified|a step between a forward and its backward"

ALONE = """
import torch, torch.distributed as dist
from dropin import DDP, Zero3
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for kind in DDP, Zero3:
    model = kind(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    print("norm", model.clip_grad_norm_(1.0).item())
"""


def test_files_work_alone(tmp_path):
    """dropin/ and the two files that it builds on, in an empty folder."""
    (tmp_path / "dropin").mkdir()
    for name in ("ddp.py", "zero.py"):
        shutil.copy(ROOT / name, tmp_path)
    for path in ROOT.glob("dropin/*.py"):
        shutil.copy(path, tmp_path / "dropin")
    (tmp_path / "script.py").write_text(ALONE)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.stdout == 2 * f"norm {math.sqrt(6)}\n", done  # of six gradients of 1


LAYERS = [(dropin.DDP, dropin.OF_DDP, ddp.DDP), (dropin.Zero1, dropin.OF_STAGES, zero.Zero1),
          (dropin.Zero2, dropin.OF_STAGES, zero.Zero2),
          (dropin.Zero3, dropin.OF_STAGE_3, zero.Zero3)]


@pytest.mark.parametrize(("kind", "layers", "book"), LAYERS)
def test_layers_stand_over_the_book(kind, layers, book):
    """In the order that is written down, none of them under another class of its own."""
    assert kind.__mro__ == (kind, *layers, *book.__mro__)
    for layer in layers:
        assert layer.__bases__ == (object,), layer


# Pairs of layers, of which the first one has to run before the second one, and why.
BEFORE = [("ShardGuards", "Guards", "a stage's own _guard_refuse_local"),
          ("Guards", "AlikeGuards", "a step that is refused is not noted"),
          ("AlikeGuards", "UnevenRanks", "what is compared is in the history before it is sent"),
          ("TorchOptions", "UnevenRanks", "sums that are there are divided before more are added"),
          ("UnevenOrder", "UnevenForwards", "a unit is used when those before it are"),
          ("UnevenForwards", "UnevenRanks", "marks are taken away when a backward has begun"),
          ("UnevenRanks", "ShardingOptions", "a bucket is filled before its sums are taken"),
          ("StateDicts", "ShardingOptions", "state dicts are those of the layer, not the book's")]


@pytest.mark.parametrize(("first", "second", "why"), BEFORE)
def test_order_of_layers(first, second, why):
    for _, layers, _ in LAYERS:
        names = [layer.__name__ for layer in layers]
        if first in names and second in names:
            assert names.index(first) < names.index(second), why


# What may differ between the modules that ranks wrap, and the tensor that is named.


def other_dtype(module):
    module.first.double()


def frozen_last(module):
    module.last.requires_grad_(False)


def one_buffer_more(module):
    module.register_buffer("extra", torch.ones(3))


def other_shape(module):
    module.last = nn.Linear(5, 3)


CHANGES = {other_dtype: "first.weight", frozen_last: "last.weight", one_buffer_more: "extra",
           other_shape: "last.weight"}


@on_ranks(3)
@of_each("ddp", "zero1", "zero3")
def test_mistakes_are_named(wrapper):
    """Ranks whose modules differ all raise, naming the first difference; so do a backward through
    weights that a step has changed, a wrapper in a wrapper, a lookup that changes weights. The next
    wrapper works."""
    rank = dist.get_rank()
    x = torch.ones(3, 5)
    wrap = WRAPPERS[wrapper]
    for change, name in CHANGES.items():
        module = fresh("lora")
        if rank > 0:
            change(module)
        raises(RuntimeError, name, wrap, module)
    model = wrap(fresh("lora"))
    old = model(x, 0)
    model(x, 0).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    raises(RuntimeError, MODIFIED, old.backward)
    if wrapper == "zero3":  # by hand, while all of it is whole
        model = wrap(nn.Linear(5, 2))
        actual = model(x.clone().requires_grad_()).sum()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        raises(RuntimeError, MODIFIED, actual.backward)
        model = wrap(fresh("lora"))
    of_torch = DistributedDataParallel(fresh("lora"))
    for module in (model, nn.Sequential(DDP(fresh("lora"))), of_torch):
        raises(RuntimeError, "wrap the plain module", wrap, module)
    raises(RuntimeError, "must not be wrapped again", DistributedDataParallel, model)
    lookups = nn.ModuleList([nn.Embedding(9, 4, max_norm=1)])
    raises(RuntimeError, "0: max_norm=1", wrap, lookups)
    raises(AttributeError, "use model.module.first", getattr, model, "first")
    if wrapper != "ddp":
        module = fresh("lora")
        some = [*module.parameters()][:rank]
        raises(RuntimeError, "wrap different modules", wrap, module, uncut=some)
        for wrong in (fresh("odd").parameters(), ["first.weight"], module.first.weight, True):
            raises(ValueError, "uncut must be a list", wrap, module, uncut=wrong)
        raises(RuntimeError, "share memory", wrap, nn.ParameterList([torch.ones(3)] * 2))


@on_ranks()
@pytest.mark.parametrize("wrapper, missing, W", [("ddp", "backward", 2), ("zero1", "forward", 3),
                                                 ("zero3", "backward", 3), ("zero3", "order", 2)])
def test_missing_rank_is_named(wrapper, missing):
    """Where a rank makes no forward or backward, or calls units in an order of its own, the others
    raise within the group's timeout, and name the bucket or unit that waits. Wrappers in a group of
    their own refuse to be copied."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = WRAPPERS[wrapper](fresh("lora"), process_group=group)
    rank, W = dist.get_rank(), dist.get_world_size()
    if missing == "order":
        order = (2, 1, 0) if rank > 0 else (0, 1, 2)
        raises(RuntimeError, r"could not unshard layers\.\d", model.module.some,
               torch.ones(3, 5), order)
        left = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert left is None, "hooks of saved tensors, of a forward that has raised"
        return
    raises(RuntimeError, COPIED, copy.deepcopy, model)  # it would use the default group
    act = partial(zoo_loss, model, 0, 0)
    if missing == "backward":
        act = act().backward
    if rank == W - 1:
        time.sleep(3)  # alive, and that is all
    else:
        raises(RuntimeError, r"(first|last|layers\.\d)\b|the root", act)


@on_ranks(2)
@pytest.mark.parametrize("where", ["inside", "after"])
def test_local_sgd_says_so(where):
    """no_sync(may_step=True): each rank steps by itself. Then the script averages, and goes on."""
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    model = DDP(net)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]

    def step():
        for module, optimizer in zip((model, plain), optimizers):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            if where == "inside" or module is plain:
                optimizer.step()

    for _ in range(3):
        with model.no_sync(may_step=True):
            step()
        if where == "after":
            model.clip_grad_norm_(math.inf)
            optimizers[0].step()
    for p, own in zip(net.parameters(), plain.parameters()):
        assert torch.equal(p, own), "not this rank's own steps"
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
    model.zero_grad()
    for _ in range(2):
        model(x).square().mean().backward()
        optimizers[0].step()
        model.zero_grad()
    with model.no_sync():
        model(x).square().mean().backward()
    raises(RuntimeError, HOLDS, optimizers[0].step)


def adds_a_layer(net):
    net.blocks.append(nn.Linear(4, 4))


def adds_a_frozen_layer(net):
    """Each rank has its own, and nobody would send it."""
    net.extra = nn.Linear(4, 4).requires_grad_(False)


def assigns_a_state_dict(net):
    net.load_state_dict(Net().state_dict(), assign=True)


def replaces_a_layer(net):
    net.head = nn.Linear(4, 2)


def ties_two_blocks(net):
    net.blocks[1].weight = net.blocks[0].weight


def deletes_a_block(net):
    net.blocks = net.blocks[:2]


def deletes_a_bias(net):
    net.blocks[0].bias = None


@on_ranks(2)
@of_each(*ALL)
def test_modules_that_are_changed(wrapper):
    """In the next forward, and whatever looks at a stage's parameters raises before it, too."""
    for change in (adds_a_layer, adds_a_frozen_layer, assigns_a_state_dict, replaces_a_layer,
                   ties_two_blocks, deletes_a_block, deletes_a_bias):
        for n_before in (0, 1):
            s = Script(wrapper)
            for _ in range(n_before):
                s.step()
            change(s.module)
            raises(RuntimeError, CHANGED, s.step)
        if wrapper == "ddp":
            continue
        s = Script(wrapper)
        model, state = s.model, s.model.state_dict()
        change(s.module)
        for look in (lambda: dict(model.full_parameters()), model.full_state_dict,
                     model.state_dict, model.shard_starts, lambda: model.load_state_dict(state),
                     lambda: model.load_full_state_dict(state), lambda: sharded_state(model)):
            raises((RuntimeError, ValueError), CHANGED, look)


@on_ranks(3)
@of_each("ddp", *STAGES)
def test_names_are_those_that_the_module_has_now(wrapper):
    net = Net()
    model = WRAPPERS[wrapper](net)
    before = {name: t.clone() for name, t in model.full_parameters()}
    exchanges = {"blocks.0": "blocks.2", "blocks.1": "blocks.1.0", "blocks.2": "blocks.0"}
    net.blocks[0], net.blocks[2] = net.blocks[2], net.blocks[0]
    net.blocks[1] = nn.Sequential(net.blocks[1])
    expected = {}
    for name, t in before.items():
        prefix, _, last = name.rpartition(".")
        expected[f"{exchanges.get(prefix, prefix)}.{last}".lstrip(".")] = t
    actual = dict(model.full_parameters())
    assert actual.keys() == expected.keys() == model.shard_starts().keys()
    for name, t in expected.items():
        assert torch.equal(actual[name], t), name
    for key, piece in sharded_state(model).items():
        own = piece.as_subclass(torch.Tensor)
        whole = expected[key.removeprefix("model.")].flatten()
        assert torch.equal(own, whole[piece.first:piece.first + len(own)]), key


@on_ranks(2)
@of_each(*STAGES)
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


@on_ranks(3)
@of_each(*ALL)
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
    dropin.DDP._set_params_and_buffers_to_ignore_for_model(net, ["blocks.0.weight"])
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


@on_ranks(2)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@of_each(*ALL)
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
@of_each(*STAGES)
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


# ---- questions to a part of a gradient


QUESTIONS = [
    "torch.linalg.svdvals(g.view(-1, 1))", "torch.isfinite(g)", "torch.isnan(g)", "torch.amax(g)",
    "torch.max(g)", "torch.median(g)", "torch.quantile(g, 0.5)", "torch.count_nonzero(g)",
    "F.cosine_similarity(g, torch.ones_like(g), dim=0)", "torch.prod(g)", "g.cumsum(0)",
    "g.softmax(0)", "torch.nonzero(g)", "torch.unique(g)", "torch.histc(g)", "g.logsumexp(0)",
    "torch.var_mean(g)", "F.mse_loss(g, torch.zeros_like(g))",
    "F.layer_norm(g.view(-1), [g.numel()])", "torch.dist(g, torch.zeros_like(g))",
    "torch.mm(g.view(1, -1), g.view(-1, 1))", "torch.outer(g.view(-1), g.view(-1))",
    "g.view(-1).kthvalue(1)", "torch.fft.fft(g.view(-1))", "g[0]", "g[g > 0]", "list(g)",
    "g[:1].item()", "float(g.view(-1)[0])", "torch.Tensor.tolist(g)", "torch.Tensor.numpy(g)",
    "(g == 0).all()", "(g.abs() > 1).any()", "(g > 0).sum()",
    "torch._foreach_mul([g], 2.0)[0].norm()", "torch._foreach_norm([g])", "torch._foreach_max([g])",
    "torch.cat([g.view(-1), g.view(-1)])", "torch.where(g.abs() > 1)",
    "torch.square(g, out=torch.empty(g.shape)).mean()",
    "(g == torch.zeros(g.shape)).float().mean()", "g.view(-1, 1) * torch.ones(1, 3)",
    "dist.all_reduce(g)", "dist.broadcast(g, 0)",
    "dist.all_gather([torch.empty_like(g) for _ in range(2)], g)", "dist.reduce_scatter(g, [g, g])"]


@on_ranks(2)
@of_each(*STAGES)
def test_parts_are_not_asked(wrapper):
    """What is no question about each element is refused, before the step and after it."""
    net = Net()
    model = WRAPPERS[wrapper](net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        g = [p.grad for p in model.parameters() if p.grad.numel() > 1][0]
        answered = []
        for question in QUESTIONS:
            try:
                answered.append((question, eval(question, {**globals(), "g": g})))
            except RuntimeError as error:
                assert "one rank's part" in str(error), f"{question}: {error}"
        assert not answered, answered
        optimizer.zero_grad()


# ---- torch.func


def tangents_by_jvp(model, x):
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]


def tangents_by_vmap(model, x):
    return torch.func.vmap(model)(x)


def tangents_by_jacfwd(model, x):
    return torch.func.jacfwd(model)(x)


def gradient_by_func(model, x):
    return torch.func.grad(lambda x: model(x).sum())(x)


@on_ranks(3)
@of_each(*ALL)
def test_func_transforms(wrapper):
    """Through a wrapper torch.func gives what it gives through the module; it goes on after it. (In
    stage 3 gradients need hooks of saved tensors, which torch.func does not have.)"""
    x = torch.randn(3, 4)
    for function in (tangents_by_jvp, tangents_by_vmap, tangents_by_jacfwd, gradient_by_func):
        module = Net()
        expected = function(copy.deepcopy(module), x)
        model = WRAPPERS[wrapper](module)
        if function is gradient_by_func and wrapper == "zero3":
            raises(RuntimeError, "torch.func.grad.* use Zero2", function, model, x)
        else:
            assert torch.allclose(function(model, x), expected)
        for _ in range(2):
            model(x).square().mean().backward()
            model.zero_grad()
        assert torch.isfinite(model(x)).all()


    # ---- compiled steps


@on_ranks(2, seconds=120)
@of_each(*ALL)
def test_what_is_compiled(wrapper):
    """torch.compile of blocks, and of what follows a backward, changes nothing, and the order of
    use is learned. Compiled autograd is refused."""
    results = []
    x = torch.ones(1, 4)
    for is_compiled in (False, True):
        torch.manual_seed(0)
        net = Net()
        model = WRAPPERS[wrapper](net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, clip, clear = optimizer.step, model.clip_grad_norm_, model.zero_grad
        if is_compiled:
            step, clip, clear = map(torch.compile(backend="eager"), (step, clip, clear))
            for block in net.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager")
        for _ in range(2):
            model(x).sum().backward()
            norm = clip(0.5)
            step()
            clear()
        assert model._knows_order
        results.append([norm, *(p.clone() for _, p in model.full_parameters())])
    for expected, actual in zip(*results):
        assert torch.allclose(expected, actual)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        raises(RuntimeError, "by compiled autograd", model(x).sum().backward)


DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn,
          torch.float8_e5m2, torch.complex64, torch.complex128, torch.complex32, torch.bfloat16]


@on_ranks(3)
@of_each(*ALL)
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


# ---- what debuggers and libraries ask


@on_ranks(2)
@of_each(*ALL)
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


@on_ranks(2)
@of_each(*ALL)
def test_steps_in_no_sync(wrapper):
    """DDP: they are this rank's own, as in local SGD, after which a script averages weights. A
    stage has nothing of its own to step with."""
    s = Script(wrapper)
    alone = Script(None, x=s.x)
    for _ in range(2):
        alone.step()
        if wrapper != "ddp":
            with s.model.no_sync():
                raises(RuntimeError, HOLDS, s.step)
            return
        with s.model.no_sync():
            s.step()
    for name, p in alone.module.named_parameters():
        assert torch.equal(p, s.module.get_parameter(name)), name
    s.backward()


@on_ranks(2)
def test_which_no_sync_says_it():
    """The one that is entered, the outer one of two."""
    s = Script("ddp")
    entered, other = s.model.no_sync(), s.model.no_sync(may_step=True)
    with entered:
        s.backward()
    raises(RuntimeError, HOLDS, s.optimizer.step)
    s.optimizer.zero_grad()
    with other, s.model.no_sync():
        s.backward()
    s.optimizer.step()


@on_ranks(2)
@of_each(*ALL)
def test_another_wrapper_is_named(wrapper):
    """Be it in use or gone, and of the same module or of one that shares a layer."""
    text = "0.weight is another wrapper's, or was: wrap one module"
    for first in (DDP, dropin.Zero2, dropin.Zero3, zero.Zero1):
        layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        one, other = (nn.Sequential(*layers) for _ in range(2))
        model = first(one)
        raises(RuntimeError, text, WRAPPERS[wrapper], one)
        raises(RuntimeError, text, WRAPPERS[wrapper], other)
        if first in (dropin.Zero2, dropin.Zero3):
            del model
            raises(RuntimeError, text, WRAPPERS[wrapper], one)
    layer = nn.Linear(4, 4)
    model = DDP(layer)
    del model
    WRAPPERS[wrapper](layer)  # a DDP leaves nothing behind


@on_ranks(2)
def test_join():
    """Accelerate enters torch's, switched off."""
    from torch.distributed.algorithms.join import Join

    s = Script("ddp")
    with Join([s.model], enable=False), s.model.join(enable=False):
        s.step()
    raises(RuntimeError, "no join.*drop_last", Join, [s.model])
    raises(RuntimeError, "no join.*drop_last", s.model.join)


@on_ranks(2)
@of_each(*STAGES)
def test_shards_have_the_class_of_their_parameter(stage):
    """By which scripts make groups of an optimizer."""
    class Own(nn.Parameter):
        pass

    net = Net()
    net.head.weight = Own(net.head.weight.detach())
    model = WRAPPERS[stage](net)
    for _ in range(2):  # before and after the first step
        assert [name for name, p in model.named_parameters() if isinstance(p, Own)] == [
            "head.weight"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@on_ranks(2)
@of_each(*STAGES)
def test_torchs_stage_1_over_a_stage(stage):
    """It would send shards from rank to rank."""
    model = WRAPPERS[stage](Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    raises(RuntimeError, "sends parameters from rank to rank", optimizer.step)

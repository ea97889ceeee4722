"""guards.py: right, or refused."""

import copy
import datetime
import math
import os
import re
import shutil
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from checkpoint import sharded_state
from dropin.ddp import clip_gradients_, DDP
from dropin.tests.scripts import Net, note_script, run_script
from dropin.tests.wrappers import WRAPPERS
from tests.common import planted, raises
from tests.common import ROOT
from tests.runs import run_alone, run_train
from judge.training import fresh, no_sync, STAGES, zoo_loss
from tests.ranks import on_ranks


def test_files_work_alone(tmp_path):
    """oracle.py alone, and dropin/ alone: in an empty folder."""
    script = """
import torch, torch.distributed as dist
from dropin.{file} import {wrapper}, Plain{wrapper}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for kind in {wrapper}, Plain{wrapper}:
    model = kind(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    print("norm", model.clip_grad_norm_(1.0).item())
"""
    printed = {}
    for file, wrapper in (("ddp", "DDP"), ("zero", "Zero3"), ("oracle", None)):
        folder = tmp_path / file
        (folder / "dropin").mkdir(parents=True)
        for path in [ROOT / "oracle.py"] if file == "oracle" else ROOT.glob("dropin/*.py"):
            shutil.copy(path, folder / path.relative_to(ROOT))
        (folder / "own.py").write_text(script.format(file=file, wrapper=wrapper))
        script_file = "own.py" if wrapper else "oracle.py"
        run = run_train(None, plant=partial(run_alone, folder, script_file), argv=[])
        assert run.codes == [0], run
        printed[file] = run.stdout[0]
    norm = f"norm {math.sqrt(6)}\n"  # of six gradients of 1
    assert printed["ddp"] == printed["zero"] == 2 * norm, printed
    rows = re.findall(r"^(\w+) +([12])  ([0-9a-f]{8}) ", printed["oracle"], re.MULTILINE)
    assert len(rows) == 10 and len({actual for _, _, actual in rows}) == 2, printed


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


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "zero3"])
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
    raises(RuntimeError, "modified", old.backward)
    if wrapper == "zero3":  # by hand, while all of it is whole
        model = wrap(nn.Linear(5, 2))
        actual = model(x.clone().requires_grad_()).sum()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        raises(RuntimeError, "modified", actual.backward)
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
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
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
        time.sleep(2)  # alive, and that is all
    else:
        raises(RuntimeError, r"(first|last|layers\.\d)\b|the root", act)


SCRIPTS = []
script = partial(note_script, SCRIPTS)
# What errors say.
ABSENT = "parameter has a value"
CHANGED = "after wrapping"
COPIED = "copy the module"
HOLDS = "holds gradients back"
ONE_PART = "one rank's part"


# ---- scripts that change the module


@script(both="weakref")
def swaps_tensors(s):
    torch.utils.swap_tensors(s.module.scale, nn.Parameter(s.x[0, 0]))
    s.step()


def frozen_head():
    net = Net()
    net.head.requires_grad_(False)
    return net


@script(both=CHANGED, build=frozen_head)
def unfreezes_what_was_frozen(s):
    s.model.requires_grad_(True)
    s.step()


@script(ABSENT, ddp=CHANGED)
def wraps_twice(s):
    again = s.wrap(s.module)
    s.step()
    del again


@script(both=CHANGED)
def adds_a_layer(s):
    s.module.blocks.append(nn.Linear(4, 4))
    s.step()


@script(both=CHANGED)
def adds_a_frozen_layer(s):
    """Each rank has its own, and nobody would send it."""
    s.module.extra = nn.Linear(4, 4).requires_grad_(False)
    s.step()


@script(both=CHANGED)
def assigns_a_state_dict(s):
    s.module.load_state_dict(Net().state_dict(), assign=True)
    s.step()


@script(both=CHANGED)
def replaces_a_layer(s):
    s.step()
    s.module.head = nn.Linear(4, 2)
    s.step()


@script(both=CHANGED)
def ties_two_blocks(s):
    s.step()
    s.module.blocks[1].weight = s.module.blocks[0].weight
    s.step()


@script(both=CHANGED)
def deletes_a_block(s):
    s.module.blocks = s.module.blocks[:2]
    s.step()


@script(both=CHANGED)
def deletes_a_bias(s):
    s.module.blocks[0].bias = None
    s.step()


@script()
def exchanges_blocks(s):
    """They keep their parameters, under each other's names."""
    s.step()
    blocks = s.module.blocks
    blocks[0], blocks[2] = blocks[2], blocks[0]
    s.step()


@script()
def renames_a_layer(s):
    s.step()
    s.module.blocks[1] = nn.Sequential(s.module.blocks[1])
    s.step()


@script()
def ties_once_more(s):
    """As libraries do it after loading."""
    s.module.blocks[1].bias = s.module.blocks[0].bias
    s.step()


ties_once_more.build = partial(Net, tied=True)


@script(both=CHANGED)
def adds_a_gradient_hook(s):
    s.module.scale.register_post_accumulate_grad_hook(planted)
    s.step()


@script("a shard's hooks")
def hooks_a_parameter(s):
    s.parameters[0].register_hook(torch.zeros_like)
    s.step()


@script()
def freezes_and_unfreezes(s):
    for p in s.parameters[:4]:
        p.requires_grad_(False)
    s.step()
    s.module.requires_grad_(True)
    s.step()


@script()
def keeps_the_gradients_of_a_critic(s):
    s.backward()
    s.module.requires_grad_(False)
    s.model(s.x.clone().requires_grad_()).sum().backward()
    s.module.requires_grad_(True)
    s.optimizer.step()


# ---- scripts that copy or read weights


@script(ABSENT)
def copies_the_module(s):
    copy.deepcopy(s.module)


@script(COPIED)
def averages_the_model(s):
    AveragedModel(s.model).update_parameters(s.model)


@script(COPIED)
def saves_the_model(s):
    torch.save(s.model, os.devnull)


@script("full_state_dict")
def reads_a_state_dict_of_the_module(s):
    s.module.state_dict()["head.weight"].clone()


@script(ABSENT)
def reads_a_weight(s):
    s.x * s.module.scale  # in a method that is not forward


@script(ABSENT)
def reads_a_weight_after_a_step_without_backward(s):
    s.loss()  # so the weights are gathered
    for p in s.parameters:
        p.grad = torch.ones_like(p)
    s.optimizer.step()
    s.x * s.module.scale


def reads_another_unit(net, x):
    return x @ net.blocks[2].weight


@script(ABSENT, build=partial(Net, reads_another_unit))
def reads_a_weight_of_another_unit(s):
    s.step()


@script()
def loads_into_the_module(s):
    s.module.load_state_dict({n: torch.full_like(t, 0.1) for n, t in Net().state_dict().items()})


# ---- scripts that write weights


@script()
def replaces_data(s):
    """SGD by hand, and averages that are swapped in."""
    s.backward()
    for p in s.parameters:
        p.data = p.data - 0.1 * p.grad
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(s.parameters) / 2, s.parameters)


@script()
def scales_data_in_place(s):
    s.loss()  # so the weights are gathered
    for p in s.parameters:
        p.data.mul_(0.5)
    s.step()


@script()
def exchanges_data(s):
    """Averages take the weights' place for an evaluation, and give it back."""
    averages = [p.detach() * 0.9 for p in s.parameters]
    for _ in range(2):
        s.step()
        for _ in range(2):
            for p, average in zip(s.parameters, averages):
                p.data, average.data = average.data, p.data
            with torch.no_grad():
                s.loss()
    with torch.no_grad():
        for p, average in zip(s.parameters, averages):
            p.add_(average)


def writing(net, x):
    with torch.no_grad():
        net.head.weight.clamp_(-0.1, 0.1)
    net.scale.data = net.scale.data * 0.9
    is_early = net.scale.item() < 0.85
    net.head.requires_grad_(net.head.weight.requires_grad and is_early)
    return net.plain(x)


@script(build=partial(Net, writing))
def writes_weights_in_the_forward(s):
    s.step()
    s.step()


@script(build=partial(Net, writing))
def writes_weights_in_a_forward_without_backward(s):
    s.loss()
    s.step()


# ---- scripts that keep, change or ask gradients


@script()
def keeps_gradients(s):
    s.backward()
    kept = [p.grad for p in s.parameters]
    s.optimizer.zero_grad()
    s.step()
    with torch.no_grad():
        for p, gradient in zip(s.parameters, kept):
            p -= gradient


@script()
def caches_gradients(s):
    s.backward()
    cached = [p.grad for p in s.parameters]
    s.optimizer.zero_grad(set_to_none=False)
    s.backward()
    for gradient in cached:
        gradient *= 0.5
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.step()
    with torch.no_grad():
        for p, gradient in zip(s.parameters, cached):
            p -= gradient
    torch.save([p.grad for p in s.parameters], os.devnull)


def asks_a_gradient(s, question):
    s.backward()
    question(s.parameters[0].grad)
    s.step()


@script(ONE_PART)
def asks_isfinite(s):
    asks_a_gradient(s, torch.isfinite)


@script(ONE_PART)
def asks_isnan(s):
    asks_a_gradient(s, torch.isnan)


@script(ONE_PART)
def asks_amax(s):
    asks_a_gradient(s, torch.amax)


@script(ONE_PART)
def asks_max(s):
    asks_a_gradient(s, torch.Tensor.max)


@script("clip_grad_norm_")
def clips_by_a_norm_of_parts(s):
    s.backward()
    norm = sum(p.grad.data.pow(2).sum() for p in s.parameters).sqrt()
    nn.utils.clip_grads_with_norm_(s.parameters, 0.01, norm)
    s.step()


@script()
def clears_gradients_of_the_module(s):
    s.backward()
    s.module.zero_grad()
    s.step()


def infinite(gradient):
    gradient = gradient.clone()
    gradient.view(-1)[0] = math.inf  # in one shard
    return gradient


@script()
def scales_and_finds_an_inf(s):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for has_inf in (False, True, False):
        handle = s.module.head.weight.register_hook(infinite if has_inf else torch.clone)
        scaler.scale(s.loss()).backward()
        for p in s.parameters:
            p.grad = p.grad.clone()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
        handle.remove()
    assert scaler.get_scale() == 2, "the scale is halved once, on every rank"


# ---- what a backward is


@script(both="create_graph")
def creates_a_graph(s):
    s.step(create_graph=True)


@script()
def penalises_the_gradient_of_its_input(s):
    x = s.x.clone().requires_grad_()
    y = s.model(x)
    [gradient] = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + gradient.square().mean()).backward()
    s.optimizer.step()


def with_a_weight(net, x):
    return net.plain(x), net.blocks[1].weight


@script(build=partial(Net, with_a_weight))
def uses_a_weight_that_the_forward_returns(s):
    y, weight = s.model(s.x)
    (y.square().mean() + weight.square().mean()).backward()
    s.optimizer.step()


@script("after no backward")
def asks_only_some_gradients(s):
    s.step(inputs=s.parameters)


@script("to not have been used", ddp="autograd.grad")
def calls_autograd_grad(s):
    torch.autograd.grad(s.loss(), s.parameters)


@script(both="sparse", build=partial(Net, unit=partial(nn.Embedding, 9, 4, sparse=True)))
def has_sparse_gradients(s):
    s.model.module.blocks[0](torch.tensor([1])).sum().backward()


def reentrant(net, x):
    """A part is recomputed by a backward inside the backward."""
    return net.plain(checkpoint(net.blocks[2], net.blocks[1](x), use_reentrant=True))


@script(both="use_reentrant=False", build=partial(Net, reentrant))
def checkpoints_reentrantly(s):
    s.step()


@script(both="in the backward")
def steps_in_the_backward(s):
    _apply_optimizer_in_backward(torch.optim.SGD, s.parameters, dict(lr=0.1))
    s.step()


@script(build=partial(Net, tied=True))
def goes_back_through_a_part(s):
    s.module.blocks[1](s.x).square().mean().backward()  # it has a parameter of the root
    s.optimizer.step()


@script()
def goes_back_twice(s):
    loss = s.loss()
    if s.model is not s.module:  # a sum of halves is the mean, too
        s.model.set_gradient_divide_factor(1)
        loss = loss / 2
    loss.backward(retain_graph=True)
    loss.backward()
    s.optimizer.step()


@script(both="after one that raised")
def catches_an_error_in_the_backward(s):
    s.backward()
    with s.module.blocks[1].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", s.step)
    s.step()


@script()
def raises_elsewhere_on_each_rank(s):
    """Rank 1 after the gradient of scale, rank 0 before that; neither has filled a bucket."""
    rank = dist.get_rank()

    def raise_on_rank_1(module, gradients):
        if rank == 1:
            planted()

    with s.module.head.register_full_backward_pre_hook(raise_on_rank_1):
        loss = s.loss()
        if rank == 0:
            loss.register_hook(planted)
        raises(ZeroDivisionError, "planted", loss.backward)
    s.model.zero_grad()
    s.step()


def catching(net, x):
    with net.blocks[1].register_forward_pre_hook(planted, prepend=True):  # before ours
        raises(ZeroDivisionError, "planted", net.blocks[1], x)
    return net.plain(x)


@script(build=partial(Net, catching))
def catches_an_error_in_the_forward(s):
    s.step()
    s.step()


@script()
def adds_a_penalty_before_the_forward(s):
    penalty = sum(p.square().sum() for p in s.parameters)
    (penalty + s.loss()).backward()
    s.optimizer.step()


class Spectrum(nn.Module):
    """A weight that is seen as complex, and conjugated."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2, 2))

    def forward(self, x):
        return (x[:, :2].cfloat() @ torch.view_as_complex(self.w).mH).real


@script(build=partial(Net, unit=Spectrum))
def sees_weights_as_complex(s):
    s.step()


class Phases(nn.Module):
    """Weights that are seen as complex numbers, and kept so for the backward."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        turned = x.unflatten(1, (2, 2)).sum(2) * torch.view_as_complex(self.w)
        return torch.view_as_real(turned).flatten(1)


@script(build=partial(Net, unit=Phases))
def keeps_complex_views(s):
    s.x = s.x.clone().requires_grad_()  # or the first block, which is freed, would keep none
    s.step()


class Negated(nn.Module):
    """A weight that is seen with another sign, and kept so for the backward."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return x * torch.view_as_complex(self.w).conj().imag


@script(build=partial(Net, unit=Negated))
def keeps_negated_views(s):
    s.x = s.x.clone().requires_grad_()
    s.step()


@script()
def keeps_by_hooks_of_its_own(s):
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = s.loss()
    assert len(kept) > 3, "the outputs of three tanh and of the last layer"
    loss.backward()
    s.optimizer.step()


# ---- no_sync()


@script()
def has_only_its_forward_in_no_sync(s):
    with no_sync(s.model):
        loss = s.loss()
    loss.backward()
    s.optimizer.step()


@script()
def adds_a_penalty_to_what_no_sync_holds(s):
    s.hold()
    (s.loss() + sum(p.square().sum() for p in s.parameters)).backward()
    s.optimizer.step()


@script("held back")
def scales_what_no_sync_holds(s):
    s.hold()
    torch._foreach_mul_([p.grad for p in s.parameters], 0.5)
    s.step()


@script(both=HOLDS)
def steps_after_no_sync(s):
    s.hold()
    s.optimizer.step()


@script(both=HOLDS)
def steps_in_no_sync(s):
    with no_sync(s.model):
        s.step()


@script(both=HOLDS)
def syncs_all_but_the_last(s):
    s.backward()
    s.hold()
    s.optimizer.step()


@script(both=HOLDS)
def clips_after_no_sync(s):
    s.hold()
    s.model.clip_grad_norm_(math.inf)


@script("held back", ddp=HOLDS)
def clips_by_the_function_after_no_sync(s):
    s.hold()
    clip_gradients_([p.grad for p in s.parameters], math.inf, s.model.shard_group)
    s.optimizer.step()


@script("held back", ddp=HOLDS)
def scales_and_steps_after_no_sync(s):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with no_sync(s.model):
        scaler.scale(s.loss()).backward()
    scaler.step(s.optimizer)


@script()
def steps_another_optimizer_after_no_sync(s):
    """It has none of the gradients that are held back."""
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    s.hold()
    torch.optim.SGD([other], lr=0.1).step()
    s.step()


@script()
def drops_what_no_sync_holds(s):
    for set_to_none in (True, False):
        s.hold()
        s.optimizer.zero_grad(set_to_none)
        s.step()


# ---- optimizers


@script("whole parameters")
def uses_lbfgs(s):
    torch.optim.LBFGS(s.parameters).step(s.loss)


@script("uncut=")
def uses_muon(s):
    matrices = [p for p in s.parameters if p.dim() == 2]
    s.optimizer = torch.optim.Muon(matrices, lr=0.1)
    s.step()


@script("has parameters of the module")
def optimizes_the_module(s):
    s.backward()
    torch.optim.SGD(s.module.parameters()).step()


@script()
def steps_with_a_closure(s):
    def closure():
        s.optimizer.zero_grad()
        loss = s.loss()
        loss.backward()
        return loss

    s.loss()  # without a backward
    s.optimizer.step(closure)


@on_ranks(2, 3)
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


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", [adds_a_layer, adds_a_frozen_layer, replaces_a_layer,
                                    assigns_a_state_dict, ties_two_blocks, deletes_a_block])
def test_a_changed_module_is_not_saved(change, stage):
    """Whatever looks at a stage's parameters raises, before the next forward, too."""
    net = Net()
    model = STAGES[stage](net)
    state = model.state_dict()

    class Script:
        module = net

        def step(self):
            pass

    change(Script())
    looks = {"full_parameters": lambda: dict(model.full_parameters()),
             "full_state_dict": model.full_state_dict, "state_dict": model.state_dict,
             "shard_starts": model.shard_starts,
             "load_state_dict": lambda: model.load_state_dict(state),
             "load_full_state_dict": lambda: model.load_full_state_dict(state),
             "sharded_state": lambda: sharded_state(model)}
    for look in looks.values():
        raises((RuntimeError, ValueError), CHANGED, look)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ["ddp", *STAGES])
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
@pytest.mark.parametrize("wrapper", ["ddp", *STAGES])
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts(script, wrapper):
    """`run_script`."""
    run_script(script, wrapper)

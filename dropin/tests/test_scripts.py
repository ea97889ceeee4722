"""Right, or refused: scripts that people have written around a wrapper, ours and others."""

import copy
import math
import os
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dropin import clip_gradients_
from dropin.tests.scripts import ALL, Net, note_script, note_two_steps, of_each, run_script
from dropin.tests.training import no_sync
from tests.common import on_meta, planted, raises
from tests.ranks import on_ranks

SCRIPTS = []
script = partial(note_script, SCRIPTS)
two_steps_of = partial(note_two_steps, SCRIPTS)
# What errors say.
ABSENT = "parameter has a value"
CAST = "before wrapping"
CHANGED = "after wrapping"
COPIED = "copy the module"
FREED = "stage 3 has freed it"
HOLDS = "(holds gradients|gradients are held) back"
NO_END = "end was never seen"


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


@script(both="another wrapper")
def wraps_twice(s):
    again = type(s.model)(s.module)
    s.step()
    del again


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


def halve(p):
    p.grad.mul_(0.5)


def step_by_hand(p):
    p.data -= 0.1 * p.grad
    p.grad = None


def hooked(hook):
    net = Net()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return net


@script(build=partial(hooked, halve))
def hooks_before_wrapping(s):
    """Each is called once, with this rank's own gradient, before it is sent."""
    s.step()
    s.step()


def steps_in_its_hooks():
    net = Net()
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    return net


@script("parameters of the module", ddp="steps in the backward", build=steps_in_its_hooks)
def steps_in_hooks_of_before(s):
    s.step()


@script(both="a hook that was set before wrapping has taken the gradient of",
        build=partial(hooked, step_by_hand))
def steps_by_hand_in_hooks_of_before(s):
    s.step()


@script(both="add it to the module")
def adds_a_layer_to_the_wrapper(s):
    s.model.more = nn.Linear(2, 2)
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


@two_steps_of("forward", zero=ABSENT)
def reads_another_unit(net, x):
    return x @ net.blocks[2].weight


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
def replaces_data_after_a_forward(s):
    """Without a backward, so that in stage 3 units are still whole."""
    s.loss()
    for p in s.parameters:
        p.data = p.data * 0.5
    s.step()


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


@two_steps_of("forward")
def writing(net, x):
    with torch.no_grad():
        net.head.weight.clamp_(-0.1, 0.1)
    net.scale.data = net.scale.data * 0.9
    is_early = net.scale.item() < 0.85
    net.head.requires_grad_(net.head.weight.requires_grad and is_early)
    return net.plain(x)


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


def slope_of(function, x):
    z = x.detach().requires_grad_()
    slope, = torch.autograd.grad(function(z).square().sum(), z)
    return slope


class Slope(nn.Linear):
    def forward(self, x):
        return slope_of(super().forward, x)


@two_steps_of("unit")
class Relaxed(nn.Module):
    """A block whose forward goes back: it moves its input down a slope, which it computes itself,
    or one of its submodules. Then it uses another submodule, or a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.energy, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x - 0.1 * slope_of(self.energy, x)).tanh()


@two_steps_of("unit")
class RelaxedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope, self.scale = Slope(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x - 0.1 * self.slope(x)) * self.scale


@script()
def asks_for_whole_values_in_a_forward(s):
    """As where a hook logs norms."""
    asked = []

    def ask(*_):
        if s.is_wrapped:
            asked.append(dict(s.model.full_parameters()))

    s.module.blocks[0].register_forward_hook(ask)
    s.step()
    s.step()
    assert len(asked) == 2 * s.is_wrapped


@script("after no backward")
def asks_only_some_gradients(s):
    s.step(inputs=s.parameters)


@script("to not have been used", ddp="autograd.grad")
def calls_autograd_grad(s):
    torch.autograd.grad(s.loss(), s.parameters)


@script(both="sparse", build=partial(Net, unit=partial(nn.Embedding, 9, 4, sparse=True)))
def has_sparse_gradients(s):
    s.model.module.blocks[0](torch.tensor([1])).sum().backward()


@two_steps_of("forward", both="use_reentrant=False")
def reentrant(net, x):
    """A part is recomputed by a backward inside the backward."""
    return net.plain(checkpoint(net.blocks[2], net.blocks[1](x), use_reentrant=True))


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
    if s.is_wrapped:  # a sum of parts is the mean, too
        s.model.set_gradient_divide_factor(1)
        loss = loss / dist.get_world_size()
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
    """Others after the gradient of scale, rank 0 before that; none has filled a bucket."""
    rank = dist.get_rank()

    def raise_on_others(module, gradients):
        if rank > 0:
            planted()

    with s.module.head.register_full_backward_pre_hook(raise_on_others):
        loss = s.loss()
        if rank == 0:
            loss.register_hook(planted)
        raises(ZeroDivisionError, "planted", loss.backward)
    s.model.zero_grad()
    s.step()


@two_steps_of("forward")
def catching(net, x):
    with net.blocks[1].register_forward_pre_hook(planted, prepend=True):  # before ours
        raises(ZeroDivisionError, "planted", net.blocks[1], x)
    return net.plain(x)


@script()
def adds_a_penalty_before_the_forward(s):
    penalty = sum(p.square().sum() for p in s.parameters)
    (penalty + s.loss()).backward()
    s.optimizer.step()


@two_steps_of("unit")
class Spectrum(nn.Module):
    """A weight that is seen as complex, and conjugated."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2, 2))

    def forward(self, x):
        return (x[:, :2].cfloat() @ torch.view_as_complex(self.w).mH).real


@two_steps_of("unit")
class Phases(nn.Module):
    """Weights that are seen as complex numbers, and kept so for the backward."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        turned = x.unflatten(1, (2, 2)).sum(2) * torch.view_as_complex(self.w)
        return torch.view_as_real(turned).flatten(1)


@two_steps_of("unit")
class Negated(nn.Module):
    """A weight that is seen with another sign, and kept so for the backward."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return x * torch.view_as_complex(self.w).conj().imag


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


@script()
def steps_by_a_closure_after_no_sync(s):
    """As Lightning makes each step of several micro-steps."""
    for _ in range(2):
        s.hold()

        def closure():
            loss = s.loss()
            loss.backward()
            return loss

        s.optimizer.step(closure)
        s.optimizer.zero_grad()


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
    if s.is_wrapped:
        s.module.shift += dist.get_rank()  # the next forward gets rank 0's; in stages it is ignored
    s.step()
    s.module.shift.zero_()
    s.step()


@two_steps_of("build")
class HidesModules(Net):
    def modules(self):
        return iter([self.head])

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self.head

    def children(self):
        return iter([])

    named_children = children


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


@two_steps_of("build")
def own_list():
    net = Net(by_name)
    net.blocks = Backwards(net.blocks)
    return net


# ---- the end of a backward never comes


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


class Marked(torch.Tensor):
    """A plain subclass, as libraries use to mark parameters."""


@two_steps_of("build")
def marked():
    net = Net()
    for part in (net.blocks[0], net.head):
        part.weight = nn.Parameter(part.weight.detach().as_subclass(Marked))
    return net


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


@two_steps_of("unit", zero3=FREED)
class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_full_backward_pre_hook(self.scale)

    def scale(self, module, gradients):
        return (gradients[0] * self.weight.detach().sum(),)


@two_steps_of("build")
def keeping():
    net = Net(unit=partial(Keeping, 4, 4, bias=False))
    net.blocks[0].weight.register_hook(torch.clone)
    return net


@two_steps_of("forward")
def selective(net, x):
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.t.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    for block in net.blocks:
        part = nn.Sequential(block, nn.Tanh())
        x = x + checkpoint(part, x, use_reentrant=False, context_fn=contexts)
    return net.head(x) * net.scale


@script()
def checkpoints_the_model(s):
    for _ in range(2):
        x = s.x.clone().requires_grad_()
        checkpoint(s.model, x, use_reentrant=False).square().mean().backward()
        s.optimizer.step()
        s.optimizer.zero_grad()


@script()
def checkpoints_each_block_by_hand(s):
    """Outside of the model's forward."""
    for _ in range(2):
        x = s.x.clone().requires_grad_()
        for block in s.module.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        x.square().mean().backward()
        s.optimizer.step()
        s.optimizer.zero_grad()


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


@script(build=partial(Net, unit=partial(Counting, 4, 4)))
def has_state_of_its_own(s):
    s.step()
    if not s.is_wrapped or not hasattr(s.model, "full_state_dict"):
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


def gradients_of(s):
    return [p.grad for p in s.optimizer.param_groups[0]["params"]]


@script("norm of the gradient of a shard")
def clips_in_a_hook_of_the_optimizer(s):
    s.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grads_with_norm_(
        s.parameters, 0.1, nn.utils.get_total_norm(gradients_of(s))))
    s.step()


@script("mean of the gradient of a shard")
def centres_in_a_hook_that_is_set_late(s):
    s.step()
    s.optimizer.register_step_pre_hook(lambda *_: [g.sub_(g.mean()) for g in gradients_of(s)] and
                                       None)
    s.step()


@script("norm of the gradient of a shard")
def looks_after_the_first_step_in_a_hook(s):
    s.optimizer.register_step_post_hook(lambda *_: [g.norm() for g in gradients_of(s)])
    s.step()


@script("norm of the gradient of a shard")
def looks_after_a_step_in_a_hook(s):
    s.step()
    s.optimizer.register_step_post_hook(lambda *_: [g.norm() for g in gradients_of(s)])
    s.step()


@script()
def scales_in_hooks_of_the_optimizer(s):
    s.optimizer.register_step_pre_hook(lambda *_: [g.mul_(0.5) for g in gradients_of(s)] and None)
    s.optimizer.register_step_post_hook(lambda *_: [g.zero_() for g in gradients_of(s)])
    s.step()
    s.step()


@script("randn_like of the gradient of a shard.*whole_shape")
def adds_noise_to_gradients(s):
    s.backward()
    torch.manual_seed(3)
    for p in s.parameters:
        p.grad += torch.randn_like(p.grad)
    s.optimizer.step()


@script("normal_ of the gradient of a shard")
def takes_random_gradients(s):
    s.backward()
    torch.manual_seed(3)
    for p in s.parameters:
        p.grad.normal_()
    s.optimizer.step()


@script("rand_like of a shard.*whole_shape")
def moves_weights_by_chance(s):
    torch.manual_seed(3)
    with torch.no_grad():
        for p in s.parameters:
            p += torch.rand_like(p)
    s.step()


@script("broadcast of a shard.*rank 0's values")
def broadcasts_weights(s):
    for p in s.parameters:
        dist.broadcast(p.data, 0)
    s.step()


@script("all_reduce of the gradient of a shard")
def averages_once_more(s):
    s.backward()
    for p in s.parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    s.optimizer.step()


class WritesToChild(nn.Module):
    """More than three units, of which each writes a weight in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.layer.weight.data = nn.functional.normalize(self.layer.weight.data)
        return self.layer(x)


@script(build=partial(Net, unit=WritesToChild))
def writes_weights_in_the_forward(s):
    s.x = s.x.clone().requires_grad_()
    s.step()
    s.step()


class InItsBackward(torch.autograd.Function):
    """It computes its gradients by autograd, of detached weights."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            return torch.autograd.grad(x @ weight.T, (x, weight), gradient)


@two_steps_of("unit")
class DifferentiatesInABackward(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return InItsBackward.apply(x, self.weight) + self.bias


class BackwardInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


@two_steps_of("unit", both="a backward inside another.*in the backward of an autograd.Function")
class GoesBackInABackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return BackwardInside.apply(x, self.layer)


@script("made by torch.jit.script, and takes no hooks")
def has_scripted_units(s):
    s.step()


has_scripted_units.build = partial(Net, unit=lambda: torch.jit.script(nn.Linear(4, 4)))


@script("trace the module before wrapping it")
def traces_the_module(s):
    torch.jit.trace(s.module, s.x)
    s.step()


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
    if s.is_wrapped:
        get_state_dict(s.model, s.optimizer)


@script(both="on meta", build=partial(on_meta, Net))
def is_on_meta(s):
    raise NotImplementedError


@on_ranks()
@pytest.mark.parametrize(("W", "script"), [
    pytest.param(2 if any(script.refusals.values()) else 3, script, id=script.__name__)
    for script in SCRIPTS])
@of_each(*ALL)
def test_scripts(wrapper, script):
    """`run_script`."""
    run_script(wrapper, script)

"""Training: in what a file wraps a module in, and in one process, which is what is right.

In one process the gradient is the mean over all micro batches. There are several orders in which
one may add and divide them, and each of these is right. The optimizer is SGD: Adam would hide a
gradient that is too large by a factor, as it divides by its size; and from SGD's step the gradient
can be read. (In some rows it is AdamW: SGD would hide parameters that are averaged in place of
gradients.)
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judge import mistakes
from judge.interfaces import Interface, interface_of, whole_parameters
from verify import device

LR = 2**-4  # powers of two: these products do not round
DECAY = 2**-3  # so that a gradient of zeros moves a parameter, and none does not
MOMENTUM = 0.9  # an optimizer has to keep its state
MAX_NORM = 0.05  # less than most norms
EPS = 2**-23  # fp32's rounding, relative to a number
# After these steps parameters are compared. That gathers them, and so may do what a wrapper has to
# do before its next forward; nobody would see that this is missing. So not after the third.
LOOKS = (1, 2, 4)
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, foreach=False),
    "AdamW": partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY, foreach=False, fused=False)}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    module: Callable  # a class of modules.py
    micro_steps: int = 1
    other: str = ""  # "parameters" or "buffers": of ranks > 0, which begin with other values
    optimizer: str = "SGD"
    loop: str = ""  # "clipped", "validated", "scheduled", "groups": what else the script does

    def __str__(self):
        words = [self.module.__name__]
        if self.micro_steps > 1:
            words.append(f"{self.micro_steps} micro-steps")
        if self.other:
            words.append(f"other {self.other}")
        if self.optimizer != "SGD":
            words.append(self.optimizer)
        if self.loop:
            words.append(self.loop)
        return ", ".join(words)


def fresh(module: Callable) -> nn.Module:
    torch.manual_seed(0)
    return module().to(device())


def inputs(step: int, number: int) -> Tensor:
    """A micro batch, by its number in the step: however these are dealt to ranks and micro-steps,
    they are the same."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(3, 5, generator=generator)
    x[0, 0] = (step + number) % 3
    return x.to(device())


def loss_of(model, step, number):
    return model(inputs(step, number)).square().mean()


# -------------------------------------------------------------------------------------------------
# on these ranks, in a wrapper


def train(mine: Interface, case: Case) -> dict[int, dict[str, Tensor]]:
    """-> {step: {name: whole parameter}} after LOOKS; of step 0, if ranks begin with others."""
    module = fresh(case.module)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    if case.other and dist.get_rank() > 0:
        for t in getattr(module, case.other)():
            t.data.fill_(7)
    model = mine.wrapped(module)
    kind = OPTIMIZERS[case.optimizer]
    optimizer = mine.optimizer(grouped(case, mine.trained(model)), kind.func, **kind.keywords)
    actual = {}
    if case.other == "parameters":
        actual[0] = whole_parameters(mine, model, module, shapes)
    for step in range(1, LOOKS[-1] + 1):
        backwards(mine, model, optimizer, partial(loss_on_rank, model, step), case.micro_steps)
        if case.loop == "clipped":
            clip(mine, model)
        optimizer.step()
        if step in LOOKS:
            actual[step] = whole_parameters(mine, model, module, shapes)
        zero_gradients(mine, model, optimizer)
        between(case, partial(loss_on_rank, model, -step, 0), optimizer)
    return actual


def grouped(case, parameters):
    """As a list, or in two groups with options of their own."""
    parameters = list(parameters)
    if case.loop != "groups":
        return parameters
    # Of the first group most ranks own nothing, if each owns some parameters.
    return [dict(params=parameters[:1]), dict(params=parameters[1:], weight_decay=0, lr=LR / 2)]


def between(case, validate, optimizer):
    """What a script does between two steps."""
    if case.loop == "validated":
        with torch.no_grad():
            validate()
    if case.loop == "scheduled":
        for group in optimizer.param_groups:
            group["lr"] /= 2


def loss_on_rank(model, step, micro_step):
    return loss_of(model, step, micro_step * dist.get_world_size() + dist.get_rank())


def backwards(mine, model, optimizer, loss, micro_steps):
    """Those of a step. loss: a function of the micro-step."""
    mine.before_forward(model, optimizer)
    for micro_step in range(micro_steps):
        is_last = micro_step == micro_steps - 1
        with nullcontext() if is_last else mine.accumulate(model):
            time.sleep(0.003 * dist.get_rank())  # who does not wait has what is not there yet
            (loss(micro_step) / micro_steps).backward()
    mine.after_backward(model, optimizer)


def zero_gradients(mine, model, optimizer):
    optimizer.zero_grad()
    if mine.owns_a_part:
        model.zero_grad()


def clip(mine, model):
    if mine.clip is not None:
        mine.clip(model, MAX_NORM)
    else:
        model.clip_grad_norm_(MAX_NORM)


# -------------------------------------------------------------------------------------------------
# in one process


def orders(micro_steps: int):
    """Groups of numbers of micro batches. The gradients of a group are added first, as autograd
    does it, then those of groups. Rank r's micro-step a is number a W + r."""
    W = dist.get_world_size()
    numbers = range(W * micro_steps)
    yield tuple(tuple(numbers[rank::W]) for rank in range(W))  # a rank adds its own first
    if micro_steps > 1:
        yield tuple((number,) for number in numbers)  # all in the order of the data
        # Over ranks, then over micro-steps.
        yield tuple(tuple(numbers[first:first + W]) for first in range(0, len(numbers), W))


def times_reciprocal(t, W):
    return t * (1 / W)


@functools.cache
def reference(case: Case, groups: tuple, divide: Callable, is_divided_first: bool):
    """-> ([{name: parameter} before the first step, after it, ...], [{name: [(numbers, gradient)
    of each group that uses it]} of each step]). divide(t, W), before groups are added, or after."""
    W = dist.get_world_size()
    module = fresh(case.module)
    kind = OPTIMIZERS[case.optimizer]
    optimizer = kind.func(grouped(case, module.parameters()), **kind.keywords)
    parameters = dict(module.named_parameters())
    after_steps = [copies(parameters)]
    gradients = []
    for step in range(1, LOOKS[-1] + 1):
        of_names = {name: [] for name in parameters}
        for numbers in groups:
            for number in numbers:
                (loss_of(module, step, number) / case.micro_steps).backward()
            for name, p in parameters.items():
                if p.grad is not None:
                    of_names[name].append((numbers, p.grad))
                    p.grad = None
        gradients.append(of_names)
        for name, p in parameters.items():
            addends = [gradient for _, gradient in of_names[name]]
            if not addends:
                continue  # no rank uses it
            if is_divided_first:
                p.grad = functools.reduce(torch.add, [divide(addend, W) for addend in addends])
            else:
                p.grad = divide(functools.reduce(torch.add, addends), W)
        if case.loop == "clipped":
            nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        after_steps.append(copies(parameters))
        between(case, partial(loss_of, module, -step, dist.get_rank()), optimizer)
    return after_steps, gradients


def copies(tensors):
    return {name: t.detach().clone() for name, t in tensors.items()}


def right_ones(case: Case):
    """What `reference` returns of the parameters, for each way in which one may add and divide."""
    W = dist.get_world_size()
    divisions = [(torch.div, True)]
    if W & (W - 1):  # where W is no power of two, 1/W rounds, and so these differ
        divisions += [(torch.div, False), (times_reciprocal, True), (times_reciprocal, False)]
    for groups, division in itertools.product(orders(case.micro_steps), divisions):
        after_steps, _ = reference(case, groups, *division)
        yield after_steps


# -------------------------------------------------------------------------------------------------
# the verdict of a rank


@dataclasses.dataclass
class Verdict:
    outcome: str  # "same bits", "close" or "wrong"
    fact: str = ""  # how far it is
    step: int = 0  # the first one after which something is wrong
    tensors: list = dataclasses.field(default_factory=list)  # those that are
    mistake: str = ""  # what that looks like, or nothing if it looks like none
    chapter: str = ""  # of the course


def judged(file: str, interface: str, case: Case) -> Verdict:
    """The parameters after a step are those of one process, to the bit or as close as fp32 rounds,
    on every rank."""
    mine = interface_of(file, interface)
    actual = train(mine, case)
    for right in right_ones(case):
        if all_bits_are_same(actual, right):
            return Verdict("same bits")
    right = next(right_ones(case))
    largest = 0.0  # difference, in units of fp32's rounding
    for step in actual:
        wrong = []
        for name, p in right[step].items():
            moved = moved_by_gradient(right, step, name, case)
            difference, is_close = how_close(actual[step][name], p, moved)
            largest = max(largest, difference)
            if not is_close:
                wrong.append(name)
        if wrong:
            fact, mistake = wrong_step(case, step, right, actual[step], wrong,
                                       is_gathered=mine.whole is not None)
            return Verdict("wrong", fact, step, wrong, *mistake)
    return Verdict("close", f"the largest difference is {largest:.2g} x fp32's rounding")


def all_bits_are_same(actual, right):
    for step, parameters in actual.items():
        for name, p in right[step].items():
            if not torch.equal(parameters[name], p):
                return False
    return True


def moved_by_gradient(right, step, name, case):
    """By how much a step moves a parameter, without the decay."""
    if step == 0:
        return torch.zeros_like(right[0][name])
    before = right[step - 1][name]
    moved = right[step][name] - before
    return moved + LR * DECAY * before if case.optimizer == "SGD" else moved


def how_close(actual, right, moved):
    """-> (the largest difference, in units of what fp32 rounds off the largest value; whether that
    is no more than rounding can explain)."""
    if right.numel() == 0:
        return 0.0, True
    difference = (actual.double() - right.double()).abs().max().item()
    if math.isnan(difference):
        return math.inf, False
    rounding = EPS * right.abs().max().item() + 1e-30
    return difference / rounding, difference <= 1e-4 * moved.abs().max().item() + 4 * rounding


def wrong_step(case, step, right, after, wrong, is_gathered):
    """-> (how far it is, the mistake). right: as of `reference`; after: {name: parameter} after
    this step, as they are; wrong: names; is_gathered: whether somebody's function has done it."""
    special = case.loop or case.other or case.optimizer
    to_blame = mistakes.TO_BLAME.get(special)
    if step == 0:
        return "it is not rank 0's before the first step", to_blame
    if special == "parameters":  # they began alike
        to_blame = None
    if special in ("AdamW", "scheduled", "groups"):  # the gradient cannot be read from a step
        return f"it differs ({special})", to_blame
    if step == LOOKS[-1]:  # nothing is known of the step before it
        fact = f"right after step {LOOKS[-2]}, and not after step {step}"
        return fact, to_blame or (mistakes.LATE if is_gathered else mistakes.UNKNOWN)
    W = dist.get_world_size()
    one_by_one = tuple((number,) for number in range(W * case.micro_steps))
    _, gradients = reference(case, one_by_one, torch.div, True)
    this, last = gradients[step - 1], gradients[step - 2]
    factor = 1 / W
    if case.loop == "clipped":
        means = [sum(g for _, g in of_batches).double() / W
                 for of_batches in this.values() if of_batches]
        norm = torch.stack([mean.square().sum() for mean in means]).sum().sqrt().item()
        factor *= min(1, MAX_NORM / (norm + 1e-6))
    found = {}
    parts = {}
    for name in wrong:
        before = right[step - 1][name].double()
        subtracted = (before - after[name].double()) / LR  # the momentum's average, after this step
        if step > 1:
            subtracted -= momentum(right, step, name)
        found[name] = (subtracted - DECAY * before).flatten().cpu()
        parts[name] = None
        if this[name]:
            of_batches = torch.zeros(W * case.micro_steps, before.numel(), dtype=before.dtype)
            for (number,), gradient in this[name]:
                of_batches[number] = factor * gradient.double().flatten()
            parts[name] = of_batches.view(case.micro_steps, W, -1)
    first = wrong[0]
    earlier = None
    if step > 1 and last[first]:
        earlier = sum(gradient for _, gradient in last[first]).double().flatten().cpu()
    step_of_rank = mistakes.WrongStep(
        module=fresh(case.module), rank=dist.get_rank(),
        moved=not torch.equal(after[first], right[step - 1][first]), found=found, parts=parts,
        earlier=earlier,
        momentum=momentum(right, step, first).flatten().cpu() if step > 1 else None)
    fact, mistake = step_of_rank.look()
    return fact, to_blame or mistake


def momentum(right, step, name):
    """What SGD adds to a gradient, in this step."""
    return MOMENTUM * (right[step - 2][name].double() - right[step - 1][name].double()) / LR

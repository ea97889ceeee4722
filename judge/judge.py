"""The judge: is your data parallelism right? `python verify.py --wrapper mine.py`

It trains modules of verify.py on W ranks, in what mine.py's wrap(module) returns, and compares the
parameters after each step with those of one process, on every rank. In one process the gradient is
the mean over all micro batches; there are several orders in which one may add and divide them, and
each of these is right. The optimizer is SGD. Adam would hide a gradient that is too large by a
factor, as it divides by its size; and from SGD's step the gradient can be read. (In some rows it is
AdamW: SGD would hide parameters that are averaged in place of gradients.) Where a parameter is
wrong, tests/hints.py says what that looks like.

`python verify.py --module own.py` asks the other question, of a module in our wrappers and torch's.
"""

import contextlib
import io
import itertools
import math
import pathlib
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from judge.hints import Wrong
from judge.measure import Chain, live_bytes
from judge.messages import messages, NotCounted
from judge.own import own_file, OwnFile
from judge.ranks import check, device, Failure, grid, Groups, ranks_in_words, Row
from judge.training import (compare, copy_of, dealt, formula_of_bytes, formula_of_traffic, fresh, is_same,
                    loss_on_rank, make_optimizers, MAX_NORM, no_sync, OF_TORCH, plain_names,
                    reference, STAGES, task_of, uncut, WRAPPERS)

MODULES = ("gpt", "odd", "even", "batchnorm", "scaled", "experts", "caller", "lora", "again",
           "skipping")
UNEVEN = ("odd", "experts", "skipping")  # ranks use different parameters
LR = 2**-4  # powers of two: these products do not round
DECAY = 2**-3  # so that a gradient of zeros moves a parameter, and none does not
MOMENTUM = 0.9  # an optimizer has to keep its state
EPS = 2**-23  # fp32's rounding, relative to a number
# After these steps whole(model) is called. It may do what a wrapper has to do before its next
# forward, and then nobody sees that this is missing: so it is not called after the third.
LOOKS = (1, 2, 4)
IN_WRAP = "in wrap(module)"


# -------------------------------------------------------------------------------------------------
# mine.py


def no_after_backward(model):
    """Many wrappers have averaged the gradients when backward() returns."""


def all_parameters(model):
    if not hasattr(model, "parameters"):
        raise ValueError("what wrap(module) has returned has no parameters(): write trained(model)")
    return model.parameters()


def plain_optimizer(parameters, kind, **options):
    if not parameters:  # a rank may own none
        parameters = [dict(params=[])]
    return kind(parameters, **options)


def functions_of(module):
    """What a file for --wrapper has, as a module, and what stands for the rest:

    wrap(module) -> what is called as the module;
    after_backward(model): what has to be called after the last backward of a step;
    trained(model): what the optimizer gets, by default model.parameters();
    whole(model) -> {name: whole parameter}, after a step, called on all ranks; by default
        model.full_state_dict() where there is one, otherwise the module's parameters (those of
        torch's FSDP2 by full_tensor());
    accumulate(model): a context for all micro-steps but the last, by default model.no_sync() where
        there is one;
    clip(model, max_norm): by default model.clip_grad_norm_(max_norm) where there is one;
    optimizer(parameters, kind, **options): by default kind(parameters, **options).
    """
    mine = SimpleNamespace(after_backward=no_after_backward, trained=all_parameters, whole=None,
                           accumulate=no_sync, clip=None, optimizer=plain_optimizer)
    actual = vars(module)
    if "wrap" not in actual:
        raise ValueError("the file has no function named wrap")
    for name in ("wrap", *vars(mine)):
        if name in actual:
            if not callable(actual[name]):
                raise ValueError(f"{name} is no function")
            setattr(mine, name, actual[name])
    return mine


def wrapped(mine, module):
    try:
        model = mine.wrap(module)
    except Exception as error:  # of any type: it is a refusal, as nothing has been done yet
        text = f"{IN_WRAP}, {type(error).__name__}: {error}"
        raise AssertionError(text).with_traceback(error.__traceback__) from None
    if not callable(model):
        raise TypeError(f"wrap(module) has returned {type(model).__name__}, which cannot be called")
    return model


@contextmanager
def opened(file):
    """Execute a file for --wrapper -> (its functions, a StringIO of what it prints). Each row does
    it, so that the file's globals are as they are in a script."""
    printed = io.StringIO()
    with (mock.patch.object(sys, "argv", [file]), contextlib.redirect_stdout(printed),
          OwnFile(file).imports() as module):
        yield functions_of(module), printed


def whole_parameters(mine, model, module, shapes):
    """{name: a copy of the whole parameter}, for all names in shapes, {name: shape}."""
    if mine.whole is not None:
        where = "whole(model)"
        named = mine.whole(model)
    elif hasattr(model, "full_state_dict"):
        where = "full_state_dict()"
        named = model.full_state_dict()
    elif hasattr(model, "full_parameters"):  # of our plain classes
        where = "full_parameters()"
        named = dict(model.full_parameters())
    else:
        where = "the module, after wrap(),"
        named = dict(module.named_parameters())
    actual = dict(plain_names(dict(named).items()))
    parameters = {}
    for name, shape in shapes.items():
        if name not in actual:
            raise ValueError(f"{where} has no {name}")
        if not torch.is_tensor(actual[name]):
            kind = type(actual[name]).__name__
            raise ValueError(f"{where} has a {kind} as {name}, and no tensor")
        whole = copy_of(actual[name])
        if whole.shape != shape or whole.dtype != torch.float32:
            raise ValueError(f"{where} has {name} as {tuple(whole.shape)} {whole.dtype}, expected "
                             f"is {tuple(shape)} {torch.float32}")
        parameters[name] = whole
    return parameters


def clip(mine, model):
    if mine.clip is not None:
        mine.clip(model, MAX_NORM)
    else:
        model.clip_grad_norm_(MAX_NORM)


# -------------------------------------------------------------------------------------------------
# training: mine.py's on these ranks, and what is expected


def train(mine, name, micro_steps=1, clipped=False, other=None, optimizer="SGD"):
    """Train a module in wrap() -> {step: {name: whole parameter}} after each of LOOKS.

    other: "parameters" or "buffers", which then begin with other values on ranks > 0; or None.
    """
    task = task_of(name)
    module = fresh(name)
    shapes = {n: p.shape for n, p in module.named_parameters()}
    if other is not None and dist.get_rank() > 0:
        for t in getattr(module, other)():
            t.data.fill_(7)
    model = wrapped(mine, module)
    parameters = list(mine.trained(model))
    kind, options = OPTIMIZERS[optimizer]
    optimizer = mine.optimizer(parameters, kind, **options)
    actual = {}
    for step in range(1, LOOKS[-1] + 1):
        backwards(mine, model, partial(loss_on_rank, task, model, step - 1), micro_steps)
        if clipped:
            clip(mine, model)
        optimizer.step()
        if step in LOOKS:
            actual[step] = whole_parameters(mine, model, module, shapes)
        zero_gradients(optimizer, model)
    dist.barrier()  # what is left under way counts here, and not in the next row
    return actual


def backwards(mine, model, loss, micro_steps):
    """Those of a step. loss: a function of the micro-step."""
    for micro_step in range(micro_steps):
        is_last = micro_step == micro_steps - 1
        with nullcontext() if is_last else mine.accumulate(model):
            (loss(micro_step) / micro_steps).backward()
    mine.after_backward(model)


def zero_gradients(optimizer, model):
    """Both, as scripts do one or the other: an optimizer may have shards, or some parameters."""
    optimizer.zero_grad()
    if hasattr(model, "zero_grad"):
        model.zero_grad()


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, dict(lr=LR, momentum=MOMENTUM, weight_decay=DECAY, foreach=False)),
    "AdamW": (torch.optim.AdamW, dict(lr=LR, weight_decay=DECAY, foreach=False, fused=False))}


def sgd(parameters):
    kind, options = OPTIMIZERS["SGD"]
    return kind(parameters, **options)


def adamw(parameters):
    kind, options = OPTIMIZERS["AdamW"]
    return kind(parameters, **options)


def orders(micro_steps):
    """The orders in which one may add the gradients of micro batches, as `reference` takes them."""
    W = dist.get_world_size()
    yield dealt(W, micro_steps, False)  # a rank adds its own first
    if micro_steps > 1:
        yield dealt(W, micro_steps, True)  # all in the order of the data
        of_micro_steps = [range(first, first + W) for first in range(0, W * micro_steps, W)]
        yield tuple(map(tuple, of_micro_steps))  # over ranks, then over micro-steps


def expected_of(name, groups, clipped, factor=None, optimizer="SGD"):
    """What `reference` returns. factor: each group is divided by it before the sum."""
    max_norm = MAX_NORM if clipped else math.inf
    make = sgd if optimizer == "SGD" else adamw
    return reference(name, groups, factor or dist.get_world_size(), make, max_norm, LOOKS[-1])


def right_ones(name, micro_steps, clipped, optimizer):
    """[{name: parameter} before the first step, after it, ...], of each order in which one may add
    and divide."""
    W = dist.get_world_size()
    # Each gradient is multiplied by 1/W, or the sum is: not the same at W = 3, where 1/W rounds.
    factors = (W, 1) if W == 3 else (W,)
    for factor, groups in itertools.product(factors, orders(micro_steps)):
        _, _, after_steps = expected_of(name, groups, clipped, factor, optimizer)
        before = {n: p.detach() for n, p in fresh(name).named_parameters()}
        yield [before, *after_steps]


# -------------------------------------------------------------------------------------------------
# the verdict of a rank


@check(limit_s=20)
def judged(file, name, micro_steps=1, clipped=False, other=None, optimizer="SGD"):
    """The parameters after a step are those of one process, to the bit or as close as fp32 rounds,
    on every rank. -> (verdict, what is seen, a hint, the step or 0)"""
    with opened(file) as (mine, _):
        actual = train(mine, name, micro_steps, clipped, other, optimizer)
    for right in right_ones(name, micro_steps, clipped, optimizer):
        if all_bits_are_same(actual, right):
            return "same bits", "", "", 0
    right = next(right_ones(name, micro_steps, clipped, optimizer))
    largest = 0.0  # difference, in units of fp32's rounding
    for step in LOOKS:
        wrong = []
        for n, p in right[step].items():
            difference, is_close = how_close(actual[step][n], p, right[step - 1][n], optimizer)
            largest = max(largest, difference)
            if not is_close:
                wrong.append(n)
        if not wrong:
            continue
        where = f"step {step}, {wrong[0]}: "
        if optimizer != "SGD":
            return "wrong", f"{where}differs with {optimizer}", "", step
        fact = wrong_step(name, step, micro_steps, clipped, right, actual[step], wrong)
        if step == LOOKS[-1]:
            return "wrong", where + fact.how_far(), HINT_OF_LOOKS, step
        return "wrong", where + fact.how_far(), fact.hint(), step
    return "close", f"the largest difference is {largest:.2g} x fp32's rounding", "", 0


def all_bits_are_same(actual, right):
    for step, parameters in actual.items():
        for n, p in right[step].items():
            if not is_same(parameters[n], p):
                return False
    return True


def how_close(actual, right, before, optimizer):
    """-> (the largest difference, in units of what fp32 rounds off the largest value; whether that
    is no more than rounding can explain). before: the right parameter before the step."""
    if right.numel() == 0:
        return 0.0, True
    difference = (actual.double() - right.double()).abs().max().item()
    if math.isnan(difference):
        return math.inf, False
    rounding = EPS * right.abs().max().item() + 1e-30
    moved = right - before
    if optimizer == "SGD":
        moved = moved + LR * DECAY * before  # by the gradient, without the decay
    return difference / rounding, difference <= 1e-4 * moved.abs().max().item() + 4 * rounding


HINT_OF_LOOKS = ("whole(model) was called after steps 1 and 2, and not after step 3: does it do "
                 "what should have been done before the next forward?")
HINTS = {
    "parameters": "ranks begin with other values: wrap() has to send rank 0's parameters to all",
    "buffers": "ranks have other buffers: wrap() has to send rank 0's, too, as a forward uses them",
    "optimizer": ("right with SGD: is its state kept, and are gradients averaged, and not "
                  "parameters?"),
    "clipped": ("right without clipping, so it is clipped by another norm than that of all "
                "gradients, such as that of a rank's own, or of its shards")}


def wrong_step(name, step, micro_steps, clipped, right, after, wrong):
    """-> Wrong. right: [{name: parameter} before the first step, after it, ...]; after: {name:
    parameter} after this step, as they are; wrong: names."""
    W = dist.get_world_size()
    # Of each micro batch, as one process computes it, in the order of the data: micro-steps of
    # ranks. Sums and contributions are neither divided nor clipped.
    batches = dealt(W, micro_steps, each_synced=True)
    sums, contributions, _ = expected_of(name, batches, clipped, factor=1)
    factor = 1 / (W * micro_steps)
    if clipped:
        norm = sums[f"step {step}, norm"].item()
        factor *= min(1, MAX_NORM / (norm + 1e-6))
    gradients = {}
    parts = {}
    earlier = {}
    for n in wrong:
        before = right[step - 1][n].double()
        subtracted = (before - after[n].double()) / LR  # the momentum's average, after this step
        if step > 1:
            subtracted -= MOMENTUM * (right[step - 2][n].double() - before) / LR
        gradients[n] = (subtracted - DECAY * before).flatten()
        parts[n] = None
        of_batches = contributions.get(f"step {step}, gradient of {n}")
        if of_batches is not None:
            stacked = torch.stack([g.double().flatten() for g in of_batches])
            parts[n] = factor * stacked.view(micro_steps, W, -1)
        earlier[n] = sums.get(f"step {step - 1}, gradient of {n}")
    trained = {n for n, p in fresh(name).named_parameters() if p.requires_grad}
    return Wrong(fresh(name), right[step - 1], after, gradients, parts, earlier, trained,
                 dist.get_rank())


# -------------------------------------------------------------------------------------------------
# what it is: what a rank holds, and what it sends


N_UNITS, WIDTH = 8, 64
MICRO_STEPS = 4
PAPER = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


@check(limit_s=60)
def holds_and_sends(file):
    """What a rank holds, in tensors that Python can reach, and what it sends, with AdamW, beside
    the formulas of the ZeRO paper. -> {what: number, or a text}"""
    with opened(file) as (mine, _):
        return measure(mine)


def measure(mine):
    before = live_bytes()
    module = Chain(N_UNITS, WIDTH).to(device())
    n_parameters = sum(p.numel() for p in module.parameters())
    seen = []  # bytes for each parameter of the model

    def look(*_):
        seen.append((live_bytes() - before) / n_parameters)

    for unit in module.units:
        unit.register_forward_hook(look)
        unit.register_full_backward_hook(look)
    model = wrapped(mine, module)
    parameters = list(mine.trained(model))
    optimizer = mine.optimizer(parameters, torch.optim.AdamW, lr=1e-3, foreach=False)
    x = torch.ones(1, WIDTH, device=device(), requires_grad=True)
    actual = {}
    for micro_steps in (1, 1, MICRO_STEPS):  # the first step makes what stays
        seen.clear()
        sent = []
        try:
            with messages() as sent:
                backwards(mine, model, lambda _: model(x), micro_steps)
                look()
                actual["held", micro_steps] = seen[-1]
                optimizer.step()
        except NotCounted as error:
            actual["uncounted"] = str(error)
        look()
        actual["peak", micro_steps] = max(seen)
        # What is not fp32 counts as if it were.
        actual["sent", micro_steps] = sum(message.bytes for message in sent) / 4 / n_parameters
        zero_gradients(optimizer, model)
    return actual


def outcome_of_measuring(answers, failure):
    if failure is not None:
        return outcome_of_failure(failure)
    W = len(answers)
    held, peak, later_peak = [max(answer[what] for answer in answers) for what in (
        ("held", 1), ("peak", 1), ("peak", MICRO_STEPS))]
    stage, more = stage_of(held, W)
    text = f"holds as {PAPER[stage]}" + (f", and {more:.1f} more" if more else "")
    text += (f": {held:.1f} bytes a parameter between backward and step, at most {peak:.1f} "
             f"(with {MICRO_STEPS} micro-steps {later_peak:.1f}); ")
    uncounted = [answer["uncounted"] for answer in answers if "uncounted" in answer]
    # In (W - 1)/W Psi, the mean over ranks.
    once, often = [sum(answer["sent", n] for answer in answers) / (W - 1) for n in (1, MICRO_STEPS)]
    if uncounted or once == 0:
        reason = uncounted[0] if uncounted else "nothing was sent by torch.distributed"
        return "measured", f"{text}what it sends was not counted: {reason}"
    needed = [formula_of_traffic(stage, n) for n in (1, MICRO_STEPS)]
    is_more = once > 1.05 * needed[0] or often > 1.05 * needed[1]
    text += (f"sends {once:.2f} (W-1)/W Psi elements (with {MICRO_STEPS} micro-steps {often:.2f}), "
             f"where {PAPER[stage]} needs {needed[0]} ({needed[1]})")
    if is_more:
        text += ", so more than it has to"
    return "measured", text


def stage_of(held, W):
    """held: bytes a parameter -> (the lowest stage that could do with as many; how many more these
    are than it needs, or 0 if that is next to nothing)."""
    for stage in PAPER:
        needed = sum(formula_of_bytes(stage, W))
        if needed <= 1.05 * held:
            return stage, held - needed if held > 1.05 * needed else 0
    return "zero3", 0


# -------------------------------------------------------------------------------------------------
# rows, and what they print


# Errors of a program that has not thought of a case, and not of one that refuses it.
CRASHES = ("AttributeError", "IndexError", "KeyError", "NameError", "TypeError",
           "UnboundLocalError", "ZeroDivisionError")


def outcome_of_failure(failure):
    """What a wrapper or torch raises is a refusal, unless it is a crash after wrap()."""
    fact = str(failure).splitlines()[0][:300]
    if failure.how != "raised":
        return failure.how, fact
    _, _, error = fact.partition(": ")
    return ("died" if error.startswith(CRASHES) else "refused"), fact


class Verdicts:
    """Of a file's rows. Where a row clips, or begins with other values, what is wrong has another
    reason if it is wrong without that, too."""

    def __init__(self):
        self.outcomes = {}  # {(module, W): the outcome of its simplest row}

    def row(self, file, W, name, **options):
        arguments = dict(file=file, name=name, **options)
        return Row(judged, W, arguments, outcome_of=partial(self.outcome_of, W, name, options))

    def outcome_of(self, W, name, options, answers, failure):
        """The worst of the ranks' verdicts on a module, the earliest step first."""
        outcome, text, hint = self.worst(answers, failure)
        if not options:
            self.outcomes[name, W] = outcome
        is_right_without = self.outcomes.get((name, W)) in ("same bits", "close")
        if outcome == "wrong":
            for option, value in options.items():
                special = value if option == "other" else option
                if is_right_without and special in HINTS:
                    hint = HINTS[special]
        elif outcome in ("hung", "died") and name in UNEVEN:
            hint = ("here ranks use different parameters: do all ranks start the same collectives, "
                    "in one order, also where a .grad is None?")
        return outcome, ": ".join(part for part in (text, hint) if part)

    def worst(self, answers, failure):
        if failure is not None:
            return *outcome_of_failure(failure), ""
        order = ("wrong", "close", "same bits")
        worst = min(answers, key=lambda answer: (order.index(answer[0]), answer[3]))
        outcome, text, hint, step = worst
        alike = []  # ranks that are as wrong, maybe by another number
        for rank, answer in enumerate(answers):
            if (answer[0], answer[3]) == (outcome, step):
                alike.append(rank)
        if outcome == "wrong":
            text = f"{ranks_in_words(alike)}, {text}"
        return outcome, text, hint


@check(limit_s=30)
def try_out_wrapper(file):
    """Some steps of a simple module -> (whether there is something that clips, the first line that
    the file prints)"""
    with contextlib.redirect_stderr(io.StringIO()), opened(file) as (mine, printed):
        model = wrapped(mine, fresh("scaled"))
        if not list(mine.trained(model)) and dist.get_world_size() == 1:
            raise ValueError("trained(model) has no parameters")
        actual = train(mine, "scaled", micro_steps=2)
        if all(is_same(p, actual[2][name]) for name, p in actual[1].items()):
            raise ValueError("whole(model) has not changed in a step: is it of the module that was "
                             "trained, or of a copy?")
        clips = mine.clip is not None or hasattr(model, "clip_grad_norm_")
    return clips, printed.getvalue().strip().partition("\n")[0]


def tried(function, file, kind, W=1):
    """What a function of the file returns on rank 0, before there are rows."""
    if not pathlib.Path(file).is_file():
        raise Failure("raised", "there is no such file")
    groups = Groups(kind)
    try:
        answer, *_ = groups.run(function, dict(file=file), W, function.limit_s)
    finally:
        groups.kill()
    return answer


def rows_of_wrapper(file, kind):
    """{claim: rows} for --wrapper. Raises Failure if the file cannot be judged."""
    try:
        clips, printed = tried(try_out_wrapper, file, kind)
    except Failure as failure:
        if IN_WRAP not in str(failure):
            raise
        clips, printed = tried(try_out_wrapper, file, kind, W=2)  # it may want more than one rank
    if printed:
        print(f"What the file prints is not shown, such as: {printed}\n")
    worlds = (1, 2, 3, 4)
    judgements = grid(W=worlds, name=MODULES)
    claims = {
        "Do W ranks end on the bits of one process, or as close as fp32 rounds?": judgements,
        "Also with two micro-steps?": [dict(row, micro_steps=2) for row in judgements],
        "Also with AdamW?": grid(W=worlds, name=("scaled",), optimizer=("AdamW",)),
        "Do ranks that begin with other values take those of rank 0?": [
            *grid(W=worlds[1:], name=("scaled", "lora"), other=("parameters",)),
            *grid(W=worlds[1:], name=("scaled",), other=("buffers",))]}
    if clips:
        claims["Are gradients clipped by the norm of all of them?"] = grid(
            W=worlds, name=("gpt", "lora"), clipped=(True,))
    verdicts = Verdicts()
    parts = {claim: [verdicts.row(file, **row) for row in rows] for claim, rows in claims.items()}
    parts["What does a rank hold and send, beside the formulas, for Psi parameters?"] = [
        Row(holds_and_sends, W, dict(file=file), outcome_of=outcome_of_measuring) for W in (2, 4)]
    return parts


# -------------------------------------------------------------------------------------------------
# a module, in wrappers


@check(limit_s=600)
def own_module(wrapper, file):
    """For --module: the module of a file has the bits of one process in each of three steps."""
    with own_file(file).imports():
        compare_wrapped(wrapper, file)


def compare_wrapped(wrapper, file):
    task = task_of(file)

    def wrap(module):
        options = {}
        if task.units is not None and wrapper in (*STAGES, "fsdp2"):
            options["units"] = task.units(module)
        if task.uncut is not None and wrapper in STAGES:
            return uncut(STAGES[wrapper], module, task.uncut(module), **options)
        return WRAPPERS[wrapper](module, **options)

    # Not all of torch's wrappers have set_gradient_divide_factor().
    compare(wrap, file, wrapper, factor=None if wrapper in OF_TORCH else 1)


@check(limit_s=600)
def try_out_module(file):
    """A step of the module of a file, in one process."""
    with own_file(file).imports():
        task = task_of(file)
        module = fresh(file)
        make_optimizers(task.optimizer, module.parameters())
        task.loss(module, 0, 0).backward()


def rows_of_module(file, kind):
    """{claim: rows} for --module. Raises Failure if it cannot be trained. Torch's wrappers do not
    count: from W = 3 on they add in another order."""
    tried(try_out_module, file, kind)
    rows = []
    for W in (1, 2, 3):
        for wrapper in ("naive", "ddp", *STAGES, *OF_TORCH):
            arguments = dict(wrapper=wrapper, file=file)
            rows.append(Row(own_module, W, arguments, counts=wrapper not in OF_TORCH))
    return {"The module ends on the bits of one process, in any wrapper": rows}

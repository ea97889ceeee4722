"""The judge: is your data parallelism right? `python -m judge mine.py`

It trains small modules on W ranks, in what mine.py's wrap(module) returns, and compares the
parameters after each step with those of one process, on every rank. In one process the gradient is
the mean over all micro batches; there are several orders in which one may add and divide them, and
each of these is right. The optimizer is SGD. Adam would hide a gradient that is too large by a
factor, as it divides by its size; and from SGD's step the gradient can be read. (In some rows it is
AdamW: SGD would hide parameters that are averaged in place of gradients.) Where a parameter is
wrong, hints.py says what that looks like.

`python verify.py --module own.py` asks the other question, of a module in our wrappers and torch's.
"""

import argparse
import io
import itertools
import math
import pathlib
import re
import sys
import types
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

import oracle
import verify
from judge.hints import Wrong
from dropin.tests.zoo import Chain
from judge.measure import formula_of_bytes, formula_of_traffic, live_bytes
from judge.messages import messages, NotCounted
from judge.rows import chosen, LIMIT_S, print_names, Row, run_rows
from dropin.tests.training import (copy_of, dealt, fresh, is_same, loss_on_rank, MAX_NORM, no_sync,
                                   plain_names, reference)
from verify import device, Failure

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project
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
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, foreach=False),
    "AdamW": partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY, foreach=False, fused=False)}


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


class WrapRaised(Exception):
    """It is a refusal, whatever wrap(module) has raised, as nothing has been done yet."""


def opened(file):
    """Execute a file -> (its functions, what it prints). Its imports find what is beside it, such
    as a model.py of its own, before ours. (This process is there for this file alone.)

    Its functions, and what stands for those that it lacks:

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
    sys.argv = [file]
    sys.stdout = printed = io.StringIO()
    path = pathlib.Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    if path.parent != ROOT:
        ours, his = [{place.stem for place in folder.iterdir()} for folder in (ROOT, path.parent)]
        for name in list(sys.modules):
            if name.partition(".")[0] in ours & his:
                del sys.modules[name]
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # where dataclasses and pickle look for what is in it
    exec(compile(path.read_bytes(), module.__file__, "exec"), vars(module))
    mine = types.SimpleNamespace(wrap=None, after_backward=no_after_backward,
                                 trained=all_parameters, whole=None, accumulate=no_sync, clip=None,
                                 optimizer=plain_optimizer)
    for name in vars(mine):
        if name in vars(module):
            setattr(mine, name, vars(module)[name])
            if not callable(vars(module)[name]):
                raise ValueError(f"{name} is no function")
    if mine.wrap is None:
        raise ValueError("the file has no function named wrap")
    return mine, printed


def wrapped(mine, module):
    try:
        model = mine.wrap(module)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise WrapRaised(text).with_traceback(error.__traceback__) from None
    if not callable(model):
        raise TypeError(f"wrap(module) has returned {type(model).__name__}, which cannot be called")
    return model


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
    module = fresh(name)
    shapes = {n: p.shape for n, p in module.named_parameters()}
    if other is not None and dist.get_rank() > 0:
        for t in getattr(module, other)():
            t.data.fill_(7)
    model = wrapped(mine, module)
    parameters = list(mine.trained(model))
    kind = OPTIMIZERS[optimizer]
    optimizer = mine.optimizer(parameters, kind.func, **kind.keywords)
    actual = {}
    for step in range(1, LOOKS[-1] + 1):
        backwards(mine, model, partial(loss_on_rank, model, step - 1), micro_steps)
        if clipped:
            clip(mine, model)
        optimizer.step()
        if step in LOOKS:
            actual[step] = whole_parameters(mine, model, module, shapes)
        zero_gradients(optimizer, model)
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
    return reference(name, groups, factor or dist.get_world_size(), OPTIMIZERS[optimizer],
                     max_norm, LOOKS[-1])


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


def judged(file, name, micro_steps=1, clipped=False, other=None, optimizer="SGD"):
    """The parameters after a step are those of one process, to the bit or as close as fp32 rounds,
    on every rank. -> (verdict, what is seen, a hint, the step or 0)"""
    mine, _ = opened(file)
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


def holds_and_sends(file):
    """What a rank holds, in tensors that Python can reach, and what it sends, with AdamW, beside
    the formulas of the ZeRO paper. -> {what: number, or a text}"""
    mine, _ = opened(file)
    before = live_bytes()
    module = Chain(N_UNITS, WIDTH).to(device())
    n_parameters = sum(p.numel() for p in module.parameters())
    seen = []  # bytes for each parameter of the model

    def look(*_):
        seen.append((live_bytes(wait_s=0.01) - before) / n_parameters)

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
# rows


# Errors of a program that has not thought of a case, and not of one that refuses it.
CRASHES = ("AttributeError", "IndexError", "KeyError", "NameError", "TypeError",
           "UnboundLocalError", "ZeroDivisionError")


def outcome_of_failure(failure):
    """What a wrapper or torch raises is a refusal, unless it is a crash after wrap()."""
    fact = " ".join(str(failure).split())[:300]
    if re.match(r"rank \d+ hangs: ", fact):
        return "hung", fact
    _, _, error = fact.partition(": ")
    has_died = re.match(r"rank \d+ has died", fact) or error.startswith(CRASHES)
    return ("died" if has_died else "refused"), fact


class Verdicts:
    """Of a file's rows. Where a row clips, or begins with other values, what is wrong has another
    reason if it is wrong without that, too."""

    def __init__(self, file):
        self.file = file
        self.outcomes = {}  # {(module, W): the outcome of its simplest row}

    def row(self, W, name, **options):
        outcome_of = partial(self.outcome_of, W, name, options)
        return Row(judged, W, self.file, dict(name=name, **options), outcome_of)

    def outcome_of(self, W, name, options, answers, failure):
        """The worst of the ranks' verdicts on a module, the earliest step first."""
        hint = ""
        if failure is not None:
            outcome, text = outcome_of_failure(failure)
        else:
            order = ("wrong", "close", "same bits")
            worst = min(answers, key=lambda answer: (order.index(answer[0]), answer[3]))
            outcome, text, hint, step = worst
        if outcome == "wrong":
            # Others may be as wrong by another number.
            alike = [str(rank) for rank, answer in enumerate(answers)
                     if (answer[0], answer[3]) == (outcome, step)]
            text = f"rank{'s' if len(alike) > 1 else ''} {', '.join(alike)}, {text}"
            is_right_without = self.outcomes.get((name, W)) in ("same bits", "close")
            for option, value in options.items():
                special = value if option == "other" else option
                if is_right_without and special in HINTS:
                    hint = HINTS[special]
        elif outcome in ("hung", "died") and name in UNEVEN:
            hint = ("here ranks use different parameters: do all ranks start the same collectives, "
                    "in one order, also where a .grad is None?")
        if not options:
            self.outcomes[name, W] = outcome
        return outcome, ": ".join(part for part in (text, hint) if part)


def try_out(file):
    """Some steps of a simple module -> (whether there is something that clips, the first line that
    the file prints)"""
    sys.stderr = io.StringIO()
    mine, printed = opened(file)
    model = wrapped(mine, fresh("scaled"))
    if not list(mine.trained(model)) and dist.get_world_size() == 1:
        raise ValueError("trained(model) has no parameters")
    actual = train(mine, "scaled", micro_steps=2)
    if all(is_same(p, actual[2][name]) for name, p in actual[1].items()):
        raise ValueError("whole(model) has not changed in a step: is it of the module that was "
                         "trained, or of a copy?")
    clips = mine.clip is not None or hasattr(model, "clip_grad_norm_")
    return clips, printed.getvalue().strip().partition("\n")[0]


def tried(file, kind="cpu", seconds=LIMIT_S):
    """What try_out returns on rank 0. Failure, if the file cannot be judged."""
    if not pathlib.Path(file).is_file():
        raise Failure("there is no such file")
    try:
        [answer] = verify.run(1, try_out, file, kind=kind, seconds=seconds)
    except Failure as failure:
        if WrapRaised.__name__ not in str(failure):
            raise
        answer, _ = verify.run(2, try_out, file, kind=kind)  # it may want more than one rank
    return answer


def rows_of_wrapper(file, kind="cpu"):
    """{claim: rows}. Failure, if the file cannot be judged."""
    clips, printed = tried(file, kind)
    if printed:
        print(f"What the file prints is not shown, such as: {printed}\n")
    verdicts = Verdicts(file)

    def rows(names, worlds=(1, 2, 3, 4), **options):
        return [verdicts.row(W, name, **options) for W in worlds for name in names]

    claims = {
        "Do W ranks end on the bits of one process, or as close as fp32 rounds?": rows(MODULES),
        "Also with two micro-steps?": rows(MODULES, micro_steps=2),
        "Also with AdamW?": rows(["scaled"], optimizer="AdamW"),
        "Do ranks that begin with other values take those of rank 0?":
            rows(["scaled", "lora"], (2, 3, 4), other="parameters")
            + rows(["scaled"], (2, 3, 4), other="buffers")}
    if clips:
        claims["Are gradients clipped by the norm of all of them?"] = rows(["gpt", "lora"],
                                                                           clipped=True)
    claims["What does a rank hold and send, beside the formulas, for Psi parameters?"] = [
        Row(holds_and_sends, W, file, {}, outcome_of_measuring) for W in (2, 4)]
    return claims


# -------------------------------------------------------------------------------------------------
# the command


def main(words=None):
    parser = argparse.ArgumentParser(prog="judge", description=__doc__.split("\n\n")[0])
    parser.add_argument("file", metavar="mine.py", help="it has a function wrap(module)")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="only rows whose name has NAME in it, such as 'W=2 gpt'")
    parser.add_argument("--list", action="store_true", help="list what is asked, names of rows")
    parser.add_argument("--device", metavar="KIND", default="cpu",
                        help="cpu, or an accelerator, such as cuda: ranks share it [cpu]")
    options = parser.parse_intermixed_args(words)
    kinds = ["cpu"]
    if options.device != "cpu":
        [kinds] = verify.run(1, oracle.kinds_of_devices)  # this process must not use one
    if options.device not in kinds:
        parser.exit(2, f"judge: --device {options.device} is not on this machine: choose "
                       f"{' or '.join(kinds)}\n")
    try:
        claims = rows_of_wrapper(options.file, options.device)
    except Failure as failure:
        fact = re.sub(r"^rank \d+: ", "", " ".join(str(failure).split()))
        parser.exit(2, f"judge: {options.file}: {fact[:500]}\n")
    claims = chosen(claims, options.names)
    if not claims:
        parser.exit(2, f"judge: no row has a name with {' or '.join(options.names)}: --list shows "
                       f"names\n")
    if options.list:
        print_names(claims)
        return 0
    return 1 if run_rows(claims, options.device) else 0

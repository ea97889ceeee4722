"""The judge: is your data parallelism right? `python verify.py --wrapper mine.py`

It trains modules of verify.py on W ranks, in what mine.py's wrap(module) returns, and compares the
parameters after each step with those of one process, on every rank. In one process the gradient is
the mean over all micro batches; there are several orders in which one may add and divide them, and
each of these is right. The optimizer is SGD without momentum. Adam would hide a gradient that is
too large by a factor, as it divides by its size. From SGD's step the gradient can be read. Where it
is wrong, tests/hints.py says what that looks like.

`python verify.py --module own.py` asks the other question, of a module in our wrappers and torch's.
"""

import contextlib
import io
import itertools
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.hints import Wrong
from tests.measure import Chain, live_bytes
from tests.messages import messages
from tests.own import own_file
from tests.ranks import check, device, grid, Groups, Row
from verify import (compare, copy_of, dealt, formula_of_bytes, formula_of_traffic, fresh, is_same,
                    loss_on_rank, make_optimizers, MAX_NORM, no_sync, OF_TORCH, plain_names,
                    reference, STAGES, STEPS, task_of, uncut, WRAPPERS)

MODULES = ("gpt", "odd", "even", "batchnorm", "experts", "caller", "lora", "again", "skipping")
LR = 2**-4  # powers of two: these products do not round
DECAY = 2**-3  # so that a gradient of zeros moves a parameter, and none does not
EPS = 2**-23  # fp32's rounding, relative to a number


# -------------------------------------------------------------------------------------------------
# mine.py


def no_after_backward(model):
    """Many wrappers have averaged the gradients when backward() returns."""


def all_parameters(model):
    return model.parameters()


def plain_optimizer(parameters, kind, **options):
    return kind([dict(params=parameters)], **options)  # a rank may have none


def functions_of(file):
    """What a file for --wrapper has, and what stands for the rest:

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
    found = vars(own_file(file).module)
    if "wrap" not in found:
        raise ValueError("the file has no function named wrap")
    for name in ("wrap", *vars(mine)):
        if name in found:
            if not callable(found[name]):
                raise ValueError(f"{name} is no function")
            setattr(mine, name, found[name])
    return mine


def wrapped(mine, module):
    model = mine.wrap(module)
    if not callable(model):
        raise TypeError(f"wrap(module) has returned {type(model).__name__}, which cannot be called")
    return model


@contextmanager
def opened(file):
    """Imports are as the file needs them, and what it prints is not shown -> (the file's functions,
    a StringIO of what it prints)"""
    printed = io.StringIO()
    with own_file(file).imports(), contextlib.redirect_stdout(printed):
        yield functions_of(file), printed


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
    found = dict(plain_names(named.items()))
    parameters = {}
    for name, shape in shapes.items():
        if name not in found:
            raise ValueError(f"{where} has no {name}")
        whole = copy_of(found[name])
        if whole.shape != shape:
            raise ValueError(f"{where} has {name} of shape {tuple(whole.shape)}, expected is "
                             f"{tuple(shape)}")
        parameters[name] = whole
    return parameters


def clip(mine, model):
    if mine.clip is not None:
        mine.clip(model, MAX_NORM)
    else:
        model.clip_grad_norm_(MAX_NORM)


# -------------------------------------------------------------------------------------------------
# training: mine.py's on these ranks, and what is expected


def train(mine, name, micro_steps, clipped, other):
    """Train a module in wrap() -> a list of {name: whole parameter}, after each step.

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
    optimizer = mine.optimizer(parameters, torch.optim.SGD, lr=LR, weight_decay=DECAY,
                               foreach=False)
    after_steps = []
    for step in range(STEPS):
        backwards(mine, model, partial(loss_on_rank, task, model, step), micro_steps)
        if clipped:
            clip(mine, model)
        optimizer.step()
        after_steps.append(whole_parameters(mine, model, module, shapes))
        zero_gradients(optimizer, model)
    return after_steps


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


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR, weight_decay=DECAY, foreach=False)


def expected_of(name, micro_steps, clipped, each_synced=False, factor=None):
    """What `reference` returns of W ranks. each_synced: micro batches are added in the order of the
    data; otherwise a rank adds its own first. factor: each is divided by it before the sum."""
    W = dist.get_world_size()
    groups = dealt(W, micro_steps, each_synced)
    max_norm = MAX_NORM if clipped else math.inf
    return reference(name, groups, factor or W, sgd, max_norm)


def right_ones(name, micro_steps, clipped):
    """[{name: parameter} after each step], of each order in which one may add and divide."""
    W = dist.get_world_size()
    factors = (W, 1) if W == 3 else (W,)  # a division by 2 or 4 does not round, whenever it comes
    orders = (False, True) if micro_steps > 1 else (False,)
    for factor, each_synced in itertools.product(factors, orders):
        _, _, after_steps = expected_of(name, micro_steps, clipped, each_synced, factor)
        yield after_steps


# -------------------------------------------------------------------------------------------------
# the verdict of a rank


@check(limit_s=20)
def judged(file, name, micro_steps=1, clipped=False, other=None):
    """The parameters after each step are those of one process, to the bit or as close as fp32
    rounds, on every rank. -> (verdict, what there is to say, the step or 0)"""
    with opened(file) as (mine, _):
        found = train(mine, name, micro_steps, clipped, other)
    for right in right_ones(name, micro_steps, clipped):
        if all_bits_are_same(found, right):
            return "same bits", "", 0
    _, _, right = expected_of(name, micro_steps, clipped)
    before = {n: p.detach() for n, p in fresh(name).named_parameters()}
    largest = 0.0  # difference, in units of fp32's rounding
    for step in range(STEPS):
        wrong = []
        for n, p in right[step].items():
            difference, is_close = how_close(found[step][n], p, before[n])
            largest = max(largest, difference)
            if not is_close:
                wrong.append(n)
        if wrong:
            fact = wrong_step(name, step, micro_steps, clipped, before, found[step], wrong)
            hint = fact.hint(clipped) or HINTS_OF_START.get(other, "")
            texts = [f"step {step + 1}, {wrong[0]}", fact.how_far(), hint]
            return "wrong", ": ".join(text for text in texts if text), step + 1
        before = right[step]
    return "close", f"the largest difference is {largest:.2g} x fp32's rounding", 0


def all_bits_are_same(found, right):
    for of_step, right_of_step in zip(found, right):
        for n, p in right_of_step.items():
            if not is_same(of_step[n], p):
                return False
    return True


def how_close(found, right, before):
    """-> (the largest difference, in units of what fp32 rounds off the largest value; whether that
    is no more than rounding can explain). before: the parameter before the step."""
    if right.numel() == 0:
        return 0.0, True
    difference = (found.double() - right.double()).abs().max().item()
    if math.isnan(difference):
        return math.inf, False
    rounding = EPS * max(right.abs().max().item(), EPS)
    change = (right - before).abs().max().item()
    return difference / rounding, difference <= 1e-4 * change + 4 * rounding


HINTS_OF_START = {
    "parameters": "ranks begin with other values: wrap() has to send rank 0's parameters to all",
    "buffers": "ranks have other buffers: wrap() has to send rank 0's, too, as a forward uses them"}


def wrong_step(name, step, micro_steps, clipped, before, after, wrong):
    """-> Wrong. before, after: {name: parameter}; wrong: names."""
    W = dist.get_world_size()
    # Of each micro batch, as one process computes it.
    _, contributions, _ = expected_of(name, micro_steps, clipped, each_synced=True, factor=1)
    gradients = {}
    parts = {}
    for n in wrong:
        old = before[n].double()
        decayed = (old - after[n].double()) / LR  # what SGD has subtracted
        gradients[n] = (decayed - DECAY * old).flatten()
        parts[n] = None
        of_batches = contributions.get(f"step {step + 1}, gradient of {n}")
        if of_batches is not None:
            stacked = torch.stack([g.double().flatten() for g in of_batches])
            parts[n] = stacked.view(micro_steps, W, -1) / (W * micro_steps)
    return Wrong(fresh(name), before, after, gradients, parts, dist.get_rank())


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
    found = {}
    for micro_steps in (1, 1, MICRO_STEPS):  # the first step makes what stays
        seen.clear()
        sent = []
        try:
            with messages() as sent:
                backwards(mine, model, lambda _: model(x), micro_steps)
                optimizer.step()
        except AssertionError as error:  # of messages()
            found["uncounted"] = str(error)
        look()
        found["held", micro_steps] = seen[-1]
        found["peak", micro_steps] = max(seen)
        # What is not fp32 counts as if it were.
        found["sent", micro_steps] = sum(message.bytes for message in sent) / 4 / n_parameters
        zero_gradients(optimizer, model)
    return found


def outcome_of_measuring(answers, failure):
    if failure is not None:
        return outcome_of_failure(failure)
    W = len(answers)
    held, peak, later_peak = [max(answer[what] for answer in answers) for what in (
        ("held", 1), ("peak", 1), ("peak", MICRO_STEPS))]
    stage = stage_of(held, W)
    if stage is None:
        formulas = [f"{PAPER[each]} {sum(formula_of_bytes(each, W)):.0f}" for each in PAPER]
        text = f"holds as no stage ({', '.join(formulas)}): "
        stage = "ddp"
    else:
        text = f"holds as {PAPER[stage]}: "
    text += (f"{held:.1f} bytes a parameter after a step, at most {peak:.1f}, and "
             f"{later_peak:.1f} in one of {MICRO_STEPS} micro-steps; ")
    uncounted = [answer["uncounted"] for answer in answers if "uncounted" in answer]
    # In (W - 1)/W Psi, the mean over ranks.
    once, often = [sum(answer["sent", n] for answer in answers) / (W - 1) for n in (1, MICRO_STEPS)]
    if uncounted or once == 0:
        reason = uncounted[0] if uncounted else "nothing came by torch.distributed"
        return "measured", f"{text}what it sends was not counted: {reason}"
    needed = [formula_of_traffic(stage, n) for n in (1, MICRO_STEPS)]
    is_more = once > 1.05 * needed[0] or often > 1.05 * needed[1]
    text += (f"sends {once:.2f} (W-1)/W Psi elements, and {often:.2f}, where {PAPER[stage]} needs "
             f"{needed[0]} and {needed[1]}{', so more than it has to' if is_more else ''}")
    return "measured", text


def stage_of(held, W):
    """The stage that holds so many bytes a parameter, if there is one."""
    for stage in reversed(PAPER):
        if 0.95 <= held / sum(formula_of_bytes(stage, W)) <= 1.05:
            return stage
    return None


# -------------------------------------------------------------------------------------------------
# rows, and what they print


def outcome_of_failure(failure):
    """What a wrapper or torch raises is a refusal."""
    if failure.how == "raised":
        return "refused", str(failure).splitlines()[0][:200]
    return failure.how, str(failure).splitlines()[0]


def outcome_of_verdicts(answers, failure):
    """The worst of the ranks' verdicts, the earliest step first."""
    if failure is not None:
        return outcome_of_failure(failure)
    order = ("wrong", "close", "same bits")
    worst = min(answers, key=lambda answer: (order.index(answer[0]), answer[2]))
    verdict, text, _ = worst
    if not text:
        return verdict, ""
    alike = [rank for rank, answer in enumerate(answers) if answer == worst]
    if verdict == "wrong":
        word = "rank" if len(alike) == 1 else "ranks"
        text = f"{word} {', '.join(map(str, alike))}, {text}"
    return verdict, text


@check(limit_s=30)
def try_out_wrapper(file):
    """A step of a simple module, in one process -> (whether there is something that clips, the
    first line that the file prints)"""
    with opened(file) as (mine, printed):
        train(mine, "scaled", 2, False, None)
        model = mine.wrap(fresh("scaled"))
        if not list(mine.trained(model)):
            raise ValueError("trained(model) has no parameters")
        clips = mine.clip is not None or hasattr(model, "clip_grad_norm_")
    return clips, printed.getvalue().strip().partition("\n")[0]


def tried(function, file, kind):
    """What a function of the file returns, in one process, before there are rows."""
    groups = Groups(kind)
    try:
        [answer] = groups.run(function, dict(file=file), 1, function.limit_s)
    finally:
        groups.kill()
    return answer


def rows_of_wrapper(file, kind):
    """{claim: rows} for --wrapper. Raises Failure if the file cannot be judged."""
    clips, printed = tried(try_out_wrapper, file, kind)
    if printed:
        print(f"What the file prints is not shown, such as: {printed}\n")
    worlds = (1, 2, 3, 4)
    judgements = grid(W=worlds, name=MODULES)
    claims = {
        "W ranks end on the bits of one process, or as close as fp32 rounds": judgements,
        "So they do with two micro-steps": [dict(row, micro_steps=2) for row in judgements],
        "Ranks that begin with other values take those of rank 0":
            grid(W=worlds[1:], name=("scaled",), other=("parameters", "buffers"))}
    if clips:
        claims["Gradients are clipped by the norm of all of them"] = grid(
            W=worlds, name=("gpt", "lora"), clipped=(True,))
    parts = {claim: [row_of(judged, outcome_of_verdicts, file, row) for row in rows]
             for claim, rows in claims.items()}
    parts["What it holds and sends"] = [row_of(holds_and_sends, outcome_of_measuring, file, row)
                                        for row in grid(W=(2, 4))]
    return parts


def row_of(function, outcome_of, file, row):
    row = dict(row)
    return Row(function, row.pop("W"), dict(file=file) | row, outcome_of=outcome_of)


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

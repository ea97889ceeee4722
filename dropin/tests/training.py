"""Training in one process and on W ranks, in any wrapper: what the tests of dropin/ compare.

`reference` trains a module of the zoo in one process, in a plain loop. `distributed` trains it on
the ranks of a group, in a wrapper. `compare` asserts that both have the same bits.
"""

import functools
import itertools
import math
from contextlib import contextmanager, nullcontext
from functools import partial, reduce

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddp
import oracle
from dropin import DDP, Zero1, Zero2, Zero3
from dropin.tests.zoo import ZOO
from verify import device

STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


def adamw(parameters, kind=torch.optim.AdamW, foreach=False, **options):
    """Weights decay where they have two dimensions or more. Not fused: that kernel computes the end
    of a tensor, which does not fill a vector register, by other instructions, so a shard would not
    get the bits of the whole."""
    matrices = []
    others = []
    for p in parameters:
        group = matrices if p.dim() >= 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    return kind(groups, lr=1e-2, fused=False, foreach=foreach, **options)


def zoo_loss(model, step, number):
    """The loss of a micro batch, which is a function of the step and its number in it: however
    these are dealt to ranks and micro-steps, they are the same."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(3, 5, generator=generator).to(device())
    return model(x, (step + number) % 3)


def fresh(name):
    torch.manual_seed(0)
    return ZOO[name]().to(device())


# -------------------------------------------------------------------------------------------------
# wrappers: what is compared with one process


def fsdp2(module, policy=MixedPrecisionPolicy(), units=None):
    """fully_shard on units, which are the elements of lists unless given, and on the root."""
    oracle.broadcast_parameters(module)
    if units is None:
        units = itertools.chain(*(m for m in module.modules() if isinstance(m, nn.ModuleList)))
    for m in (*units, module):
        mesh = dist.DeviceMesh(device().type, range(dist.get_world_size()))
        fully_shard(m, mesh=mesh, mp_policy=policy)
    return module


def uncut(stage, module, parameters=None, **options):
    """A stage in which these parameters are not cut, or none is."""
    parameters = set(module.parameters() if parameters is None else parameters)
    model = stage(module, uncut=parameters, **options)
    # For `put_together`.
    model.uncut = {n for n, p in module.named_parameters() if p in parameters}
    return model


BF16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
our_ddp = partial(DDP, find_unused_parameters=True)
torch_ddp = partial(DistributedDataParallel, find_unused_parameters=True)
WRAPPERS = {
    "ddp": our_ddp,
    "ddp, 1 kB": partial(our_ddp, bucket_cap_mb=0.001),
    "ddp, 1 a bucket": partial(our_ddp, bucket_cap_mb=1e-6),
    "ddp unsynced": partial(our_ddp, forward_sync_buffers=False),
    **STAGES,
    "zero1 bf16": partial(Zero1, **BF16),
    "zero2 bf16": partial(Zero2, **BF16),
    "zero3 bf16": partial(Zero3, **BF16),
    "torch ddp": torch_ddp,
    "torch ddp unsynced": partial(torch_ddp, forward_sync_buffers=False),
    "fsdp2": fsdp2,
    "fsdp2 bf16": partial(fsdp2, policy=MixedPrecisionPolicy(**BF16)),
    "fsdp2 bf16 uncast": partial(fsdp2, policy=MixedPrecisionPolicy(**BF16,
                                                                    cast_forward_inputs=False))}


# -------------------------------------------------------------------------------------------------
# the reference: one process, a plain loop

STEPS = 3  # what a step leaves behind shows in the next ones
MAX_NORM = 0.05  # less than most norms


def clip_by_hand(gradients, divide_by, max_norm=MAX_NORM):
    """Divide sums, and clip the result to max_norm, by one product with
    min(1, max_norm / (norm + 1e-6)) / divide_by, which is computed in float64 and rounded to fp32
    once. Return the norm after the division."""
    squares = [gradient.double().square().sum() for gradient in gradients]
    norm = torch.stack(squares).sum().sqrt() / divide_by
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / divide_by
    for gradient in gradients:
        gradient.mul_(factor.float())
    return norm


def make_optimizers(make, parameters):
    """make(parameters), AdamW unless given, returns an optimizer, or a list of them. -> a list"""
    made = (make or adamw)(p for p in parameters if p.requires_grad)
    return made if isinstance(made, list) else [made]


@functools.cache  # several wrappers are compared with it
def reference(name, groups, factor, optimizer=None, max_norm=MAX_NORM, steps=STEPS):
    """Train a module of the zoo -> ({what: tensor}, {what: [what each group has added to it]},
    [{name: parameter} after each step]).

    groups: the numbers of a step's micro batches. Those that a rank adds by itself are a group: for
    two ranks with two micro-steps each, the first in no_sync(), ((0, 2), (1, 3)). The gradient of a
    group is their sum, as autograd accumulates it. Gradients of groups are multiplied by
    1 / factor, then added in this order, 16-bit ones in fp32. One product makes the mean over micro
    batches of that, and clips it to max_norm. optimizer: as of `distributed`.
    """
    module = fresh(name)
    optimizers = make_optimizers(optimizer, module.parameters())
    divide_by = sum(len(numbers) for numbers in groups) / factor  # what is left to divide by
    expected = {}
    contributions = {}
    after_steps = []
    for step in range(steps):
        of_groups = []  # {name: gradient} of each
        for numbers in groups:
            module.zero_grad()  # sets None, so that the gradients before stay as they are
            for number in numbers:
                zoo_loss(module, step, number).backward()
            named = module.named_parameters()
            of_groups.append({n: p.grad for n, p in named if p.grad is not None})
        gradients = []
        for n, p in module.named_parameters():
            wide = torch.promote_types(p.dtype, torch.float32)
            addends = [(of_group[n] * (1 / factor)).to(wide)
                       for of_group in of_groups if n in of_group]
            p.grad = None
            if addends:
                p.grad = reduce(torch.add, addends).to(p.dtype)
                gradients.append(p.grad)
                what = f"step {step + 1}, gradient of {n}"
                expected[what] = p.grad.clone()
                nothing = torch.zeros_like(p)
                contributions[what] = [of_group.get(n, nothing) / factor for of_group in of_groups]
        norm = clip_by_hand(gradients, divide_by, max_norm)
        if not norm > 0:
            raise AssertionError(f"{name}: all gradients are zero, so nothing is compared")
        expected[f"step {step + 1}, norm"] = norm.float()
        for each in optimizers:
            each.step()
        after_steps.append({n: p.detach().clone() for n, p in module.named_parameters()})
    for n, p in after_steps[-1].items():
        expected[f"in the end, {n}"] = p
    return expected, contributions, after_steps


# -------------------------------------------------------------------------------------------------
# the same on W ranks, in a wrapper


def distributed(wrap, name, micro_steps=1, each_synced=False, factor=None, odd_step=None,
                optimizer=None, buffers=False):
    """Train a module of the zoo on the ranks of this group -> {what: tensor}, as `reference`.

    wrap: a function of the module, which returns a wrapper of it.
    micro_steps: micro batches of a rank in a step; the a-th has the number a W + rank.
    each_synced: True, each of them is sent at once; "announced": and a stage is told which is the
        last; False: all but the last are in no_sync(), by which a rank adds its own first.
    factor: of set_gradient_divide_factor(); None: not called, so that it is W.
    odd_step: what a script does in a step, in place of micro-steps: odd_step(model, loss).
    optimizer: a function of parameters that returns one, or a list; None: AdamW.
    buffers: whether the module's buffers count, which differ from rank to rank.
    """
    module = fresh(name)
    if dist.get_rank() > 0:  # a wrapper has to begin with rank 0's values on all ranks
        for t in itertools.chain(module.parameters(), module.buffers()):
            t.data.fill_(7)
    model = wrap(module)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optimizers = make_optimizers(optimizer, model.parameters())
    divide_by = micro_steps if factor is None else micro_steps * dist.get_world_size() / factor
    norms = {}
    kept = {}  # {what: (name, gradient)}
    for step in range(STEPS):
        loss = partial(loss_on_rank, model, step)
        if odd_step is None:
            accumulate(model, loss, micro_steps, each_synced)
        else:
            odd_step(model, loss)
        if hasattr(model, "reduce_gradients"):
            model.reduce_gradients()  # of oracles; the others have done it in backward()
        for n, p in plain_names(model.named_parameters()):
            if p.grad is not None:
                kept[f"step {step + 1}, gradient of {n}"] = n, copy_of(p.grad)
        norms[f"step {step + 1}, norm"] = clip(model, divide_by).float()
        for each in optimizers:
            each.step()
        model.zero_grad()  # not the optimizer's, which may have only some parameters
    trained = put_together(model, fresh(name), kept) | norms
    whole = model.full_parameters() if is_ours(model) else plain_names(model.named_parameters())
    for n, p in whole:
        trained[f"in the end, {n}"] = copy_of(p)
    if buffers:
        trained |= dict(plain_names(model.named_buffers()))
    return trained


def loss_on_rank(model, step, micro_step):
    return zoo_loss(model, step, micro_step * dist.get_world_size() + dist.get_rank())


def accumulate(model, loss, micro_steps, each_synced):
    """each_synced "announced": the stage is told which micro-step is the last."""
    for micro_step in range(micro_steps):
        is_last = micro_step == micro_steps - 1
        is_synced = each_synced or is_last
        if each_synced == "announced":
            model.set_is_last_backward(is_last)
        with nullcontext() if is_synced else no_sync(model):
            loss(micro_step).backward()


def is_ours(model):
    return hasattr(model, "full_parameters")


def plain_names(named):
    """As the module has them: (name, tensor) of (module.name, tensor)."""
    return [(name.removeprefix("module."), t) for name, t in named]


def copy_of(t):
    """A copy of all of t if it is FSDP2's, otherwise of what this rank has."""
    whole = t.full_tensor() if hasattr(t, "full_tensor") else t
    return whole.detach().clone()


def no_sync(model):
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def clip(model, divide_by):
    """By the function that a script calls; torch's wrappers have none that has our bits."""
    # Not as dropin's shards have them, which refuse to be clipped by another function.
    gradients = [p.grad.as_subclass(torch.Tensor) for p in model.parameters() if p.grad is not None]
    if not is_ours(model):
        return clip_by_hand(gradients, divide_by)
    if divide_by == 1:
        return model.clip_grad_norm_(MAX_NORM)
    return ddp.clip_gradients_(gradients, MAX_NORM, model.shard_group, divide_by)


def put_together(model, plain, kept):
    """{what: (name, this rank's part of a gradient)} -> {what: the whole gradient}. The part of a
    rank goes where its shard begins; there is nan where no shard is. A wrapper that does not shard
    has whole gradients, on every rank.

    plain: the module, for shapes and strides. Shards are cut in order of memory, those of the
    oracle in order of rows.
    """
    group = getattr(model, "shard_group", None)
    if group is None:
        return {what: gradient for what, (_, gradient) in kept.items()}
    starts = model.shard_starts()
    parameters = dict(plain.named_parameters())
    own = {}
    for what, (name, part) in kept.items():
        part = part.as_subclass(torch.Tensor)
        # In the order of memory; as float64, since numpy has no bf16.
        in_memory_order = part.double().as_strided((part.numel(),), (1,)).cpu().numpy()
        own[what] = name, starts[name], part.dtype, in_memory_order
    of_ranks = gather(own, group)
    tensors = {}
    for what in sorted(set().union(*of_ranks)):
        holders = [rank for rank, of_rank in enumerate(of_ranks) if what in of_rank]
        name, _, dtype, _ = of_ranks[holders[0]][what]
        n_holders = 1 if name in getattr(model, "uncut", ()) else len(of_ranks)
        if len(holders) != n_holders:
            raise AssertionError(f"{what} is on ranks {holders}, expected on {n_holders}")
        p = parameters[name]
        flat = torch.full((p.numel(),), math.nan, dtype=dtype, device=p.device)
        n_parts = 0
        for rank in holders:
            _, start, _, part = of_ranks[rank][what]
            flat[start:start + len(part)] = torch.from_numpy(part)
            n_parts += len(part)
        if n_parts != p.numel():
            raise AssertionError(f"{what}: {p.numel()} elements, its shards have {n_parts}")
        tensors[what] = flat.as_strided(p.shape, p.stride())
    return tensors


def gather(value, group=None):
    """[rank 0's value, rank 1's, ...] of a group; any that can be pickled."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# -------------------------------------------------------------------------------------------------
# the same bits


def same_bits(expected, actual, where="", contributions=()):
    """Assert that two {what: tensor} have the same keys, shapes, dtypes and bits, and say of the
    first tensor that differs what it looks like. The first in the order of training: a gradient
    says more than the parameters that it changes, as Adam divides by its size.

    contributions: {what: {who: what a rank has added to it}}, where that is known.
    """
    wrong = [what for what in actual if what not in expected]
    if wrong:
        raise AssertionError(f"{where}: {wrong[0]}: there should be none")
    for what, right in expected.items():
        if what not in actual or not is_same(actual[what], right):
            wrong.append(what)
    if wrong:
        fact = "is missing"
        if wrong[0] in actual:
            fact = difference(wrong[0], expected, actual[wrong[0]], contributions)
        raise AssertionError(f"{where}: {len(wrong)} of {len(expected)} tensors differ; the first, "
                             f"{wrong[0]}, {fact}")


def is_same(a, b):
    """All bits: also the sign of zero, which torch.equal does not see. -0 + 0 is 0, so it shows who
    has added a zero."""
    has_same_type = a.shape == b.shape and a.dtype == b.dtype
    return has_same_type and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


# -------------------------------------------------------------------------------------------------
# one process and W ranks compared


@contextmanager
def unwritten_is_nan():
    """New memory is full of nan, which torch does where only deterministic algorithms are allowed:
    so whoever reads what was never written has nan. On an accelerator it is always so."""
    is_always = torch.are_deterministic_algorithms_enabled()
    if not is_always:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_always)


def dealt(W, micro_steps, each_synced):
    """The groups of micro batches that W ranks add by themselves, as `reference` takes them. If
    each micro-step is sent at once, nothing is added before: each micro batch is a group."""
    if each_synced:
        return tuple((number,) for number in range(W * micro_steps))
    return tuple(tuple(range(rank, W * micro_steps, W)) for rank in range(W))


ORDERS = ("experts", "caller", "again", "skipping")  # units in another order on each rank
SUMS = ("odd", "mixed")  # strides, dtypes, and parameters that some ranks have not used


def compare(wrap, name, where, micro_steps=1, each_synced=False, factor=1, optimizer=None):
    """Train a module in one process and on these ranks, in a wrapper: all bits are the same."""
    groups = dealt(dist.get_world_size(), micro_steps, each_synced)
    expected, by_group, _ = reference(name, groups, factor or dist.get_world_size(), optimizer)
    kind = "micro batch" if each_synced else "rank"
    who = [f"{kind} {number}" for number in range(len(groups))]
    contributions = {what: dict(zip(who, by_group[what])) for what in by_group}
    with unwritten_is_nan():
        actual = distributed(wrap, name, micro_steps, each_synced, factor, optimizer=optimizer)
    same_bits(expected, actual, where, contributions)


# -------------------------------------------------------------------------------------------------
# a tensor


def difference(what, expected, actual, contributions=()):
    """How a tensor differs from the one that is expected, and the mistake that looks like it."""
    right = expected[what]
    if actual.shape != right.shape or actual.dtype != right.dtype:
        return (f"is {tuple(actual.shape)} {actual.dtype}, expected is {tuple(right.shape)} "
                f"{right.dtype}")
    is_alike = partial(torch.allclose, rtol=0.02 if right.dtype.itemsize == 2 else 1e-4, atol=1e-9)
    actual = actual.double()
    right = right.double()
    if actual.isnan().any():
        return "has nan: it was read before it was there, or never written?"
    ratio = (actual.norm() / right.norm()).item()
    fact = f"has norm {ratio:.4f} x expected, largest difference {(actual - right).abs().max():.2g}"
    for text, suspect in suspects(what, expected, actual, ratio, contributions):
        if is_alike(actual, suspect.double()):
            return f"{fact}: {text}"
    if is_alike(actual.flatten().sort().values, right.flatten().sort().values):
        return f"{fact}: the right values are in wrong places"
    return fact


def suspects(what, expected, actual, ratio, contributions):
    """Pairs: what a mistake looks like, and the tensor that it makes."""
    right = expected[what].double()
    zero = torch.zeros_like(right)
    yield "rounded in another way: added in another order, or multiplied once more?", right
    yield "zero where it should not be", zero
    if right.numel() < 4:
        return  # too few to tell
    mistake = "added twice, or not divided?" if ratio > 1 else "divided twice?"
    yield f"all elements alike: {mistake}", ratio * right
    parts = contributions[what] if what in contributions else {}
    for who in parts:
        others = [part for other, part in parts.items() if other != who]
        yield f"as if {who} had not sent", sum(others, zero)
    for who, part in parts.items():
        yield f"as if only {who} had sent", part
    for other, t in expected.items():
        if other != what and t.shape == right.shape:
            t = t.double()
            yield f"it is {other}", t
            times = (actual - right).flatten().dot(t.flatten()) / t.square().sum()
            yield f"{times:.3g} x {other} is added to it: not zeroed?", right + times * t

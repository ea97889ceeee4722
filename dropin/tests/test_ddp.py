"""ddp.py: buckets, overlap, memory, and parameters that are not used."""

import gc
import inspect
import math
import re
import time
import weakref
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dropin import clip_gradients_, DDP, Zero2
from dropin.sharding import cast_floats
from dropin.tests.measure import every_collective
from dropin.tests.wrappers import WITHOUT_GUARDS, WRAPPERS
from dropin.tests.training import BF16, fresh, our_ddp, same_bits
from dropin.tests.zoo import Chain, small_gpt
from judge.measure import live_bytes
from tests.common import native, planted, raises
from tests.ranks import on_ranks


@on_ranks(2, 3)
def test_ddp_keeps_one_gradient():
    """`.grad` is a view of a bucket, in every step the same memory; gradients take the bytes of the
    parameters and not more; a dropped wrapper and its module leave nothing."""
    before = live_bytes()
    module = fresh("odd")
    model = our_ddp(module, bucket_cap_mb=0.005)
    n_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    places = []  # {address: bytes} of a step
    kept = None
    for step in range(4):
        with model.no_sync() if step == 1 else nullcontext():
            model(torch.ones(3, 5), 0).backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        storages = [gradient.untyped_storage() for gradient in gradients if gradient.numel() > 0]
        places.append({storage.data_ptr(): storage.nbytes() for storage in storages})
        assert len(places[-1]) < len(storages), "each gradient has memory of its own"
        actual = sum(places[-1].values())
        padding = 64 * len(gradients)  # each begins a cache line
        assert actual <= n_bytes + padding, f"gradients take {actual} bytes, parameters {n_bytes}"
        assert module.inner.weight.grad.stride() == (1, 5), "not the parameter's strides"
        if step == 3:  # the step before has set zeros
            assert module.inner.weight.grad is kept, "`.grad` is another object"
        kept = module.inner.weight.grad
        model.zero_grad(set_to_none=step != 2)
    plain = fresh("odd")
    plain(torch.ones(3, 5), 0).backward()
    model(torch.ones(3, 5), dist.get_rank()).backward()  # rank 0 alone uses what is used sometimes
    mean = plain.sometimes.weight.grad / dist.get_world_size()
    assert torch.allclose(module.sometimes.weight.grad, mean), "others did not send zeros"
    assert module.never.weight.grad is None, "nobody has used it"
    del module, model, gradients, storages, kept, plain, mean
    assert live_bytes() <= before + 1024, f"{live_bytes() - before} bytes are left"


@on_ranks(2, 3)
def test_ddp_overlaps():
    """The first bucket is summed before the last gradient exists; each bucket costs its collectives
    and a backward one more.

    Seen without a clock: the hook of the last gradient does not return until the first one has
    become the mean. A wrapper that communicates after the backward would wait for ever.
    """
    rank = dist.get_rank()
    W = dist.get_world_size()
    sent = Counter()
    start_s = []
    module = nn.Sequential(*(nn.Linear(30, 30) for _ in range(8)))
    model = DDP(module, bucket_cap_mb=1e-6)
    x = torch.ones(3, 30) * rank
    first = module[7].weight

    def note(operation, tensors):
        sent[operation] += 1

    model(x).square().mean().backward()  # ranks agree on the order of buckets
    model.zero_grad()
    with every_collective(note):
        model(x).square().mean().backward()
    # 16 parameters, each a bucket of its own: at W = 2 an all-reduce, else two exchanges.
    expected = Counter(allreduce=17) if W == 2 else Counter(allreduce=1, recv=64)
    assert sent == expected, f"collectives of a backward are {sent}, expected are {expected}"
    mean = first.grad.clone()
    model.zero_grad()

    def hold_back(_):
        start_s.append(time.monotonic())
        while first.grad is None or not torch.equal(first.grad, mean):
            assert time.monotonic() < start_s[0] + 5, "the first bucket waits for the last gradient"

    module[0].weight.register_hook(hold_back)
    model(x).square().mean().backward()


@on_ranks(2)
@pytest.mark.parametrize("wraps", [WRAPPERS, WITHOUT_GUARDS])
def test_ddp_goes_at_once(wraps):
    """A DDP that is dropped frees its buffers without the help of the garbage collector."""
    module = small_gpt()
    model = wraps["ddp"](module)
    idx = torch.zeros(1, 16, dtype=torch.int64)
    for _ in range(2):  # the second one fills new buckets
        _, loss = model(idx, idx)
        loss.backward()
    buffers = [weakref.ref(bucket.gradients) for bucket in model.buckets]
    module.zero_grad(set_to_none=True)
    gc.disable()
    try:
        del model, module, loss
        deadline = time.monotonic() + 5  # gloo's threads may still hold what they have sent
        while any(buffer() is not None for buffer in buffers):
            assert time.monotonic() < deadline, "buffers wait for the collector"
            time.sleep(0.01)
    finally:
        gc.enable()


class LeavesUndefined(torch.autograd.Function):
    """Has no gradient for w, which it takes part in computing."""

    @staticmethod
    def forward(ctx, x, w):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x, is_left_out):
        x = x * self.v
        return LeavesUndefined.apply(x, self.w) if is_left_out else x * self.w


@on_ranks(2)
@pytest.mark.parametrize("left_out", [(False, True), (True, False), (True, True)],
                         ids=["by_rank_1", "by_rank_0", "by_both"])
def test_undefined_gradients_count_as_used(left_out):
    """A parameter that a backward has reached, and left without a gradient, is no unused one: it
    has the gradients that torch's DDP gives it."""
    rank = dist.get_rank()
    actual = []
    for wrap in (DistributedDataParallel, DDP):
        module = Product()
        model = wrap(module)
        with model.no_sync():
            model(torch.ones(3) * (rank + 1), left_out[rank]).sum().backward()
        for step in range(2):
            model(torch.ones(3) * (rank + 1), left_out[rank]).sum().backward()
        actual.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    same_bits(*actual)


class Batch(dict):
    """As libraries have them: attributes are keys, and nothing can be changed."""
    x = property(lambda self: self["x"])
    __setitem__ = planted


class Unpacks(nn.Linear):
    def forward(self, batch, nested):
        assert type(batch) is Batch and nested[0]["y"].dtype == torch.int64
        assert nested[1]["z"][0].dtype == batch.x.dtype, "what is in a list in a dict is left out"
        return super().forward(batch.x) + super().forward(nested[1].x)


@on_ranks(2)
def test_inputs_keep_their_containers():
    """Inputs in subclasses of dict are moved to device_ids by DDP, and cast to param_dtype by the
    stages, as torch does it; DDP has what Lightning and Accelerate touch of torch's."""
    batch = Batch(x=torch.ones(2, 4))
    inputs = batch, [{"y": torch.arange(3)}, Batch(x=torch.ones(2, 4), z=[torch.ones(1)])]
    for wrap in (partial(DDP, device_ids=[torch.device("cpu")]), partial(Zero2, **BF16)):
        model = wrap(Unpacks(4, 4))
        model(*inputs).float().sum().backward()
        assert batch.x.dtype == torch.float32, "the script's own batch was cast"
        assert all(p.grad is not None for p in model.parameters())
    lists = defaultdict(list, x=[torch.ones(1)])
    actual = cast_floats(lists, torch.bfloat16)
    assert actual["x"][0].dtype == torch.bfloat16 and actual["y"] == [], "no defaultdict any more"
    model = DDP(nn.Linear(4, 4))
    model.reducer.prepare_for_backward([])
    assert not model.static_graph and not model.reducer._rebuild_buckets()
    assert model.require_forward_param_sync and model._get_ddp_logging_data() == {}


def test_every_argument_of_torchs():
    """DDP knows all that torch's constructor knows, in its order, and with its defaults; but for
    the older name of a default that means the same."""
    ours = inspect.signature(DDP.__init__).parameters
    torchs = inspect.signature(DistributedDataParallel.__init__).parameters
    assert [name for name in ours if name in torchs] == list(torchs), "missing, or in other places"
    for name in torchs:
        same = {ours[name].default, torchs[name].default} <= {None, True}
        if not (name in ("broadcast_buffers", "forward_sync_buffers") and same):
            assert ours[name].default == torchs[name].default, name


REFUSED = {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": torch.ones(1),
           "mixed_precision": object(), "bucket_cap_mb_list": [1, 25]}
IGNORED = dict(output_device=0, dim=1, check_reduction=True, gradient_as_bucket_view=True,
               static_graph=True, skip_all_reduce_unused_params=True, batched_grad_copy=True)


@on_ranks(2)
def test_arguments_of_torchs():
    """Each is taken, or ignored as it changes no gradient, or refused by name."""
    for name, value in REFUSED.items():
        raises(RuntimeError, f"DDP on rank .: does not take {name}: ", DDP, nn.Linear(2, 2),
               **{name: value})
    x = torch.full((1, 2), dist.get_rank() + 1.0)
    for options in ({}, IGNORED, dict(device_mesh=init_device_mesh("cpu", (2,)))):
        model = DDP(nn.Linear(2, 2), **options)
        model(x).sum().backward()
        gradient = model.module.weight.grad
        assert (gradient == 1.5).all(), f"{options}: {gradient} is not the mean of 1 and 2"
    model = DDP(fresh("odd"), static_graph=True)
    for _ in range(2):
        model(torch.ones(3, 5), 0).backward()  # leaves some out
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    alone = DDP(nn.Linear(2, 2), device_mesh=mesh["one"])
    assert alone.group.size() == 1, "the ranks of the mesh"
    for wrong in (dict(device_mesh=mesh),
                  dict(device_mesh=mesh["all"], process_group=dist.group.WORLD)):
        raises(RuntimeError, "device_mesh", DDP, nn.Linear(2, 2), **wrong)


@on_ranks(2, 3)
def test_unused_parameters_are_named():
    """Without find_unused_parameters a DDP raises on every rank after a backward that has left
    parameters out on some rank, and names them. On an accelerator it does so in the next forward,
    but for the first one: there ranks agree on the order of buckets, and wait.
    """
    rank = dist.get_rank()
    x = torch.ones(3, 5)
    with native():
        first, late = DDP(Chain(3, 5)), DDP(Chain(3, 5))
    raises(RuntimeError, "units.2.weight", first(x, 2 + rank).backward)
    late(x).backward()
    late.zero_grad()
    late(x, 2 + rank).backward()
    raises(RuntimeError, "units.2.weight", late, x)
    late(x)  # it has been said
    model = DDP(fresh("odd"))
    # In turn 0 all ranks use what is used sometimes; in the other case only rank 0.
    for turn, expected in ((0, {"never"}), (min(rank, 1), {"never", "sometimes"})):
        text = raises(RuntimeError, "never.weight", model(torch.ones(3, 5), turn).backward)
        named = set(re.findall(r"(never|sometimes)\.weight", text))
        assert named == expected, f"named are {named}, expected are {expected}: {text}"
        assert not model._is_under_way, "the backward is not over"
        assert model.module.never.weight.grad is None, "nobody has used it"
        with model.no_sync():
            model(torch.ones(3, 5), turn).backward()
        model.zero_grad()


@on_ranks(2)
def test_what_is_refused_leaves_gradients():
    """torch.autograd.grad() of parameters, while means are there that were not zeroed."""
    model = DDP(nn.Linear(2, 2))
    model.set_gradient_divide_factor(1)
    loss = model(torch.ones(2, 2)).sum()
    loss.backward(retain_graph=True)
    weight = model.module.weight
    mean = weight.grad.clone()
    raises(RuntimeError, "use backward", torch.autograd.grad, loss, [weight])
    assert torch.equal(weight.grad, mean)
    model(torch.ones(2, 2)).sum().backward()
    assert torch.equal(weight.grad, 2 * mean)


@on_ranks(2)
@pytest.mark.parametrize("kind", [DDP, Zero2])
def test_a_rank_outside_of_the_group_is_refused(kind):
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        model = kind(nn.Linear(2, 2), process_group=group)
        assert model.group.size() == 1
        # torch names later groups by how many there are: as many on all ranks.
        dist.destroy_process_group(group)
    else:
        raises(RuntimeError, "on the ranks of process_group alone", kind, nn.Linear(2, 2),
               process_group=group)


@on_ranks(2)
def test_clipping_is_as_promised():
    """Gradients are divided, and scaled only if their norm is too large; max_norm inf does not
    clip; a complex number counts as two; a rank that has no gradients takes part."""
    for max_norm, divide_by, factor in ((10, 1, 1), (1, 1, 0.2), (10, 2, 0.5), (1, 2, 0.2),
                                        (math.inf, 1, 1), (math.inf, 2, 0.5)):
        z = torch.tensor(3 + 4j)
        norm = clip_gradients_([z], max_norm, divide_by=divide_by)
        what = f"max_norm {max_norm}, divide_by {divide_by}"
        assert norm.dtype == torch.float64 and norm == 5 / divide_by, f"{what}: norm {norm}"
        assert torch.allclose(z, factor * torch.tensor(3 + 4j)), f"{what}: {z}"
    t = torch.tensor([0.1, 0.2])
    norm = clip_gradients_([t] if dist.get_rank() == 0 else [], 1, dist.group.WORLD)
    assert abs(norm - t.double().norm()) < 1e-12, "not the norm of all ranks in float64"


class PartlyUsed(nn.Module):
    """Eight layers, and one that is registered last and never used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        self.never = nn.Linear(1, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("is_synced", [True, False])
def test_unused_parameters_hold_no_gradient_back(is_synced):
    """In no_sync(), too, gradients wait only for what the backward will bring: beside those in
    buckets the memory of a bucket, not of all."""
    before = live_bytes()
    model = DDP(PartlyUsed(), bucket_cap_mb=0.017, find_unused_parameters=True)
    x = torch.ones(1, 64)
    bytes_at_end = []

    def note(gradient):
        bytes_at_end.append(live_bytes() - before)

    def watch(module, inputs, output):
        output.register_hook(note)

    model.module.layers[0].register_forward_hook(watch)
    for _ in range(2):
        with nullcontext() if is_synced else model.no_sync():
            model(x).sum().backward()
        model.zero_grad()
    layer = 4 * 64 * 64
    most = (2 * 8 + 2) * layer  # parameters, buckets, gradients that wait
    assert max(bytes_at_end) <= most, f"{max(bytes_at_end) / layer:.2f} layers"


@on_ranks(1)
def test_scripted_modules_are_wrapped():
    """They keep their parameters in C++, and hand them out by attributes alone."""
    x = torch.ones(2, 4)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    expected = torch.autograd.grad(net(x).sum(), net[0].weight)[0]
    model = DDP(torch.jit.trace(net, x))
    model(x).sum().backward()
    assert torch.equal(net[0].weight.grad, expected)

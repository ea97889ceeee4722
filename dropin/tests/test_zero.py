"""zero.py: units, shards, hybrid groups, uncut parameters, and the meta device."""

import copy
import gc
import itertools
import math
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial, reduce
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from ddp import bucket_bytes
from dropin import sharding, Zero2, Zero3
from dropin.tests.measure import every_collective
from dropin.tests.scripts import Net, of_each
from dropin.tests.wrappers import WITHOUT_GUARDS, WRAPPERS
from dropin.tests.training import fresh, gather, same_bits, STAGES, uncut
from dropin.tests.zoo import Chain, small_gpt
from judge.measure import live_bytes
from tests.common import on_meta, raises
from tests.ranks import on_ranks


@on_ranks(2)
@of_each(*STAGES)
def test_small_buckets(stage):
    """bucket_cap_mb changes how many there are; all ranks have to say the same one."""
    n_buckets = []
    for cap_mb in (None, 25.0, 0.008, 1e-6):
        wrap = partial(STAGES[stage], bucket_cap_mb=cap_mb)
        n_buckets.append(len(wrap(fresh("gpt"))._all_buckets))
    n_parameters = len(list(fresh("gpt").parameters()))
    assert n_buckets[0] == n_buckets[1] < n_buckets[2] < n_buckets[3] == n_parameters, n_buckets
    for wrong in (-1, math.nan, math.inf):
        raises(ValueError, "bucket_cap_mb is a number", STAGES[stage], fresh("gpt"),
               bucket_cap_mb=wrong)
    STAGES[stage](nn.ParameterList(torch.ones(1) for _ in range(1100)), bucket_cap_mb=0)
    rank = dist.get_rank()
    raises(RuntimeError, "bucket_cap_mb=", STAGES[stage], fresh("gpt"), bucket_cap_mb=1.0 + rank)


def sizes_of_units(gpt):
    """[[bytes of a parameter of a unit, ...], ...], the root first, then blocks."""
    of_block = {p: block for block in gpt.blocks for p in block.parameters()}
    return [[p.nbytes for p in gpt.parameters() if of_block.get(p) is unit]
            for unit in (None, *gpt.blocks)]


def uncut_chunks(units, W):
    """[[bytes of each rank's chunk of a unit, W numbers], ...]. The largest parameter of a unit
    goes first, each to the rank that has least of the whole model so far, the first such."""
    loads = [0] * W
    chunks = []
    for sizes in units:
        before = list(loads)
        for size in sorted(sizes, reverse=True):
            loads[loads.index(min(loads))] += size
        chunks.append([after - load for load, after in zip(before, loads)])
    return chunks


@on_ranks(2, 3)
@of_each(*STAGES)
def test_uncut_is_the_formulas(stage):
    """With uncut parameters a rank holds and receives, but for padding, what its chunks say:
    gradients W - 1 times its chunk, parameters all but its chunk. All ranks together receive as
    much as they do with equal chunks."""
    rank = dist.get_rank()
    W = dist.get_world_size()
    gpt = small_gpt(n_layer=4, n_embd=32, vocab_size=64)  # all sizes are multiples of 64 bytes
    chunks = uncut_chunks(sizes_of_units(gpt), W)
    loads = [0, 4]
    owners = sharding.choose_owners([torch.ones(2, dtype=torch.float64)], loads)
    assert [*owners.values()] == [0] and loads == [16, 4], f"{loads} bytes"
    idx = torch.zeros(1, 16, dtype=torch.int64)
    received = Counter()
    before = live_bytes()
    model = uncut(STAGES[stage], gpt)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def note(operation, tensors):
        received[operation] += tensors[0].nbytes

    for _ in range(2):  # in the first step buffers are made
        received.clear()
        with every_collective(note):
            _, loss = model(idx, idx)
            loss.backward()
            del loss
        optimizer.step()
        model.zero_grad(set_to_none=False)
    gathered = sum(sum(chunk) - chunk[rank] for chunk in chunks)
    if stage == "zero3":  # the backward gathers all again but the root and the last two blocks
        gathered += sum(sum(chunk) - chunk[rank] for chunk in chunks[1:-2])
    reduced = (W - 1) * sum(chunk[rank] for chunk in chunks)
    padding = 2 * 64 * len(model._all_buckets)  # n is a multiple of 4 W elements
    assert 0 <= received["recv"] - gathered - reduced <= padding, (
        f"a rank receives {received['recv']:,} bytes, expected are {gathered + reduced:,}")
    psi = sum(map(sum, chunks))
    assert sum(gather(reduced)) == (W - 1) * psi, "not what equal chunks send"
    own = sum(chunk[rank] for chunk in chunks)
    whole = {"zero1": psi, "zero2": psi, "zero3": 0}[stage]  # parameters
    gradients = psi if stage == "zero1" else own
    # The module's own parameters were there before; those of stages 1 and 2 are in place of them.
    held = live_bytes() - before + psi
    expected = (whole or own) + gradients + 2 * own
    # Of a bucket of which a rank owns nothing it keeps no gradients, either.
    least = expected - (max(map(sum, chunks)) if stage == "zero1" else 0)
    assert least <= held <= expected + 8192, f"{held:,} bytes held, expected are {expected:,}"


@on_ranks(3, 4)
def test_uneven_chunks_arrive_in_pieces():
    """reduce_scatter of uneven chunks has the bits of the plain sum, and of what arrives at the
    owner of the largest two pieces at most have memory."""
    rank = dist.get_rank()
    W = dist.get_world_size()
    n = 90_000
    cuts = [n - 7] * (W - 1)  # rank 0 has nearly all, the last one a little, the others nothing
    flats = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(W)]
    expected = reduce(torch.add, flats).tensor_split(cuts)[rank]
    most = 120_000  # bytes
    flat = flats[rank].clone()
    before = live_bytes()
    actual = []

    def note(operation, tensors):
        if operation == "recv":
            actual.append(live_bytes() - before)

    with every_collective(note):
        chunks = flat.tensor_split(cuts)
        reduction = sharding.ReduceInPieces(chunks, most, dist.group.WORLD, 0)
        reduction.add(chunks[rank])
    same_bits({"own chunk": expected}, {"own chunk": flat.tensor_split(cuts)[rank]})
    if rank == 0:
        pieces = math.ceil(4 * (n - 7) * (W - 1) / most)
        assert len(actual) == pieces * (W - 1), f"{len(actual)} messages, expected {pieces} pieces"
        assert most < max(actual) <= 2 * most + 4096, f"{max(actual):,} bytes arrive at once"
    # A stage bounds them by the size of a bucket.
    sizes = [0]

    def note_size(operation, tensors):
        if operation == "recv":
            sizes.append(tensors[0].nbytes)

    with every_collective(note_size):
        matrix = nn.Linear(4096, 2048, bias=False)  # 32 MiB
        model = Zero2(matrix, uncut=matrix.parameters())
        loss = model(torch.ones(1, 4096)).sum()
        sizes = [0]  # no more those of the forward, in which a matrix comes once
        loss.backward()
    arrive = (W - 1) * max(sizes)
    assert arrive <= bucket_bytes(W, None), f"{arrive:,} bytes of a piece arrive"
    assert (arrive > 0) == (rank == 0), "the owner is another rank"


def test_units_are_found():
    """Units are the elements of the outermost lists, but for lists of bare parameters."""
    inner = nn.ModuleList([nn.Linear(8, 8)])
    lists = nn.ModuleList([nn.Linear(8, 8), inner, nn.ParameterList(), nn.ParameterDict(), None])
    units = sharding.find_units(nn.Sequential(nn.Sequential(lists)))
    assert units == [lists[0], inner], f"units are {units}"


@on_ranks(2)
def test_zero3_prefetches():
    """In stage 3 the all-gather of the next unit is under way while a unit computes, forward or
    backward. Seen without a clock, by the number of messages. Each bucket has a tag of its own."""
    n = 8
    calls = []
    actual = {}
    expected = {}
    model = Zero3(Chain(n, 8))
    tags = {bucket.tag for bucket in model._all_buckets}
    assert len(tags) == len(model._all_buckets), f"messages share tags: {tags}"

    def note(phase, *_):
        actual[phase] = len(calls)

    for i, unit in enumerate(model.module.units):
        unit.register_forward_pre_hook(partial(note, f"forward of unit {i}"))  # after ours
        unit.register_full_backward_hook(partial(note, f"backward of unit {i}"))
        # Forward of unit i: the root, the units 0 to i, and the next one. At its end the last two
        # are whole, so the backward gathers from the last but two on:
        #     backward of unit      7  6  5  4 ...
        #     next, not yet whole   -  5  4  3 ...
        expected[f"forward of unit {i}"] = 1 + min(i + 2, n)
        expected[f"backward of unit {i}"] = 1 + n + min(n - 1 - i, n - 2)
    with every_collective(lambda *call: calls.append(call)), model.no_sync():
        model(torch.ones(3, 8, requires_grad=True)).backward()
    for phase, number in expected.items():
        assert actual[phase] == number, (
            f"in the {phase} {actual[phase]} all-gathers have begun, expected are {number}")


@on_ranks(4)
@of_each("zero1", "zero3")
def test_hybrid_sums_overlap(stage):
    """With hybrid sharding nobody waits for the sum of a bucket over groups before it has launched
    the next bucket.

    Seen without a clock: ranks 2 and 3, a group, launch their second bucket when ranks 0 and 1 have
    done so. If these waited for the first bucket's sum, all would wait for ever.
    """
    rank = dist.get_rank()
    message = torch.ones(1)
    model = STAGES[stage](Chain(4, 16), shard_size=2)
    last, last_but_one = model.module.units[3], model.module.units[2]

    def on_gradient_of_input(module, act):
        def pre_hook(_, inputs):
            inputs[0].register_hook(act)

        module.register_forward_pre_hook(pre_hook)

    def give_way(_):
        dist.send(message, rank + 2, tag=7)

    def wait_for_others(_):
        dist.recv(message, rank - 2, tag=7)

    # The gradient of a unit's input comes after that of its weight, which launches the bucket.
    if rank < 2:
        on_gradient_of_input(last_but_one, give_way)
    else:
        on_gradient_of_input(last, wait_for_others)
    model(torch.ones(3, 16, requires_grad=True)).backward()


@on_ranks(4)
def test_hybrid_keeps_its_share_of_gradients():
    """With hybrid sharding a rank of Zero2 keeps the share of its group, and nothing of the sum
    over groups."""
    model = Zero2(nn.Linear(256, 256, bias=False), shard_size=2)
    before = live_bytes()
    model(torch.ones(1, 256)).sum().backward()
    own = 4 * 256 * 256 / 2  # of the gradient
    kept = live_bytes() - before
    assert kept <= own + 4096, f"{kept:,} bytes are kept, of gradients expected {own:,.0f}"


@on_ranks(4)
@of_each(*STAGES)
def test_hybrid_sums_are_in_place(stage):
    """With hybrid sharding the sum over a group and that over groups are made in the bucket's own
    memory, also where chunks are uneven."""
    gpt = small_gpt()
    model = uncut(STAGES[stage], gpt, [p for p in gpt.parameters() if p.dim() == 2], shard_size=2)
    idx = torch.zeros(1, 16, dtype=torch.int64)
    places = []
    summed = 0

    sum_over_groups = sharding.SumOverGroups

    def note(flat, group):
        nonlocal summed
        summed += flat.numel()
        memories = []
        for bucket in model.buckets:
            if bucket.gradients is not None:
                memories.append(bucket.gradients.untyped_storage()._cdata)
        places.append(flat.untyped_storage()._cdata in memories)
        return sum_over_groups(flat, group)

    with mock.patch.object(sharding, "SumOverGroups", note):
        _, loss = model(idx, idx)
        loss.backward()
    assert places and all(places), f"{places.count(False)} of {len(places)} sums are elsewhere"
    n = sum(p.numel() for p in gpt.parameters())
    total = sum(gather(summed, model.shard_group))
    assert n <= total <= 1.1 * n, f"a group sums {total} elements over groups, of {n}"


@on_ranks(2, 3)
@of_each(*STAGES)
def test_unannounced_steps_are_noticed(stage):
    """A step after a backward that was said not to be the last: the next forward gathers, on all
    ranks, also on those that own nothing of what has changed."""
    for kind in (STAGES[stage], WITHOUT_GUARDS[stage]):
        notices_unannounced_steps(kind)


def notices_unannounced_steps(kind):
    module = nn.Linear(4, 3, bias=False)  # one rank owns all of it
    plain = copy.deepcopy(module)
    model = kind(module, uncut=module.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.5)
    x = torch.ones(2, 4)
    model.set_is_last_backward(False)
    for _ in range(3):
        actual, expected = model(x), plain(x)
        same_bits({"output": expected.detach()}, {"output": actual.detach()})
        for output, each in ((actual, optimizer), (expected, of_plain)):
            output.sum().backward()
            each.step()
            each.zero_grad()


@on_ranks(2, 3)
@of_each(*STAGES)
def test_replaced_data_is_noticed(stage):
    """`.data` of shards that a script replaces between micro-steps: all ranks gather, also those
    whose shards are empty."""
    model = STAGES[stage](nn.Sequential(nn.Linear(1, 1, bias=False)))
    x = torch.ones(1, 1)
    for around in (model.no_sync, nullcontext):
        model.set_is_last_backward(False)
        with around():
            before = model(x)
            before.sum().backward()
        for p in model.parameters():
            p.data = p.data * 0.5
        same_bits({"output": before.detach() * 0.5}, {"output": model(x).detach()})


def fillable():
    """Layers that initialise themselves, with buffers, one not on meta, in and outside of units."""
    norm = nn.BatchNorm1d(5, affine=False)  # of buffers alone
    norm.register_buffer("real", torch.ones((), device="cpu"))
    return nn.Sequential(nn.ModuleList([nn.Linear(5, 5), norm]), nn.Linear(5, 2))


def fill(module):
    parameters = module.parameters(recurse=False)
    buffers = module.buffers(recurse=False)
    for t in itertools.chain(parameters, buffers):
        t.fill_(dist.get_rank() + 7)


class Tree(nn.Module):
    """A model that calls itself, n times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, n):
        x = self.blocks[0](x).tanh()
        if n > 0:
            x = self(x, n - 1)
        return x * self.scale


@on_ranks(2)
@of_each(*STAGES)
def test_a_model_calls_itself(stage):
    """Its forward begins and ends once, however deep a rank goes."""
    plain, model = Tree(), STAGES[stage](Tree())
    x = torch.ones(2, 4)
    with torch.no_grad():
        assert torch.equal(model(x, 2), plain(x, 2))
    model(x, 0).sum().backward()  # ranks agree on the order of units
    model.zero_grad()
    counts = []
    for n in (0, 1, 1 + dist.get_rank()):
        calls = []
        with every_collective(lambda *call: calls.append(call)):
            model(x, n).sum().backward()
        counts.append(len(calls))
        model.zero_grad()
    assert len(set(counts)) == 1, f"{counts} messages"


class Tanh(nn.Linear):
    """Raises if it is told to, in the middle."""
    fails = False

    def forward(self, x):
        y = super().forward(x).tanh()
        if self.fails:
            raise KeyError("in a part")
        return y


class Parts(nn.Module):
    """Units whose own forward is never called, only that of their parts, each in a checkpoint."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList()
        for _ in range(3):
            self.blocks.append(nn.ModuleDict(dict(first=Tanh(4, 4), second=Tanh(4, 4))))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block["first"], x, use_reentrant=False)
            x = checkpoint(block["second"], x, use_reentrant=False)
        return x.square().mean()


@on_ranks(2)
@of_each(*STAGES)
def test_parts_may_end_by_an_error(stage):
    """As a checkpoint ends the second forward of one. After the backward all units are free, and
    after a forward that follows an error; all has the bits of one process."""
    plain = Parts()
    model = STAGES[stage](Parts())
    x = torch.ones(2, 4)
    part = model.module.blocks[1]["second"]

    def are_free():
        for p in model.module.parameters():
            raises(RuntimeError, "only in the forward of its unit", p.isnan)

    for _ in range(3):
        expected, loss = plain(x), model(x)
        assert torch.equal(loss, expected), f"{loss}, not {expected}"
        expected.backward()
        loss.backward()
        are_free()
        for forward in (model, part):
            part.fails = True
            raises(KeyError, "in a part", forward, x)
            part.fails = False
        with torch.no_grad():
            assert torch.equal(part(x), plain.blocks[1]["second"](x)), "a part has other bits"
        are_free()
        for module in (plain, model):
            torch.optim.SGD(module.parameters(), lr=0.5).step()
            module.zero_grad()


class Filler(nn.Module):
    def forward(self, m):
        if isinstance(m, nn.Linear):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)


@on_ranks(1)
@of_each(*STAGES)
def test_init_fn_is_not_kept(stage):
    """It may hold a checkpoint; and it may be a Module."""
    fill = Filler()
    model = STAGES[stage](on_meta(nn.Linear, 3, 3), init_fn=fill)
    assert all((value == 1).all() for name, value in model.full_parameters() if name == "weight")
    assert fill not in set(model.modules())
    alive = weakref.ref(fill)
    del fill
    gc.collect()
    assert alive() is None


@on_ranks(1, 3)
@of_each(*STAGES, "zero3 uncut")
def test_meta_device_is_filled(stage):
    """From the meta device a GPT gets the weights of building it whole, no rank ever holding more
    than its shards and some units; other modules reset themselves or take init_fn; rank 0 counts.
    """
    wrap = WRAPPERS[stage]
    W = dist.get_world_size()
    before = live_bytes()
    gpt = on_meta(small_gpt, n_layer=8)
    held = []
    init_weights = gpt.init_weights

    def init_weights_and_note():
        init_weights()
        held.append(live_bytes() - before)

    gpt.init_weights = init_weights_and_note
    model = wrap(gpt)
    whole = small_gpt(n_layer=8)
    same_bits({n: p.detach() for n, p in whole.named_parameters()}, dict(model.full_parameters()))
    psi = sum(p.nbytes for p in whole.parameters())
    block = sum(p.nbytes for p in whole.blocks[0].parameters())
    parameters = psi / W if stage.startswith("zero3") else psi + psi / W
    assert max(held) < parameters + 6 * block, f"{max(held):,} bytes held, of {psi:,}"
    for init_fn, value, units in ((None, 1, None), (fill, 7, [])):
        values = wrap(on_meta(fillable), init_fn=init_fn, units=units).full_state_dict()
        for name in ("running_var", "real"):
            assert (values[f"0.1.{name}"] == value).all(), f"{name} is not as rank 0 has it"
    gpt = on_meta(small_gpt)
    gpt.norm = nn.LayerNorm(24)  # has values, which init_weights() would overwrite
    raises(RuntimeError, "pass init_fn", wrap, gpt)
    # The root of a chain cannot reset itself.
    raises(RuntimeError, "the root .*Chain .*pass init_fn", wrap, on_meta(Chain, 2, 4))
    filled = wrap(on_meta(Chain, 2, 4), init_fn=fill).full_state_dict()
    assert (filled["scale"] == 7).all()


@on_ranks(1, 3)
@of_each(*STAGES, "zero1 uncut", "zero3 uncut")
def test_state_dicts_round_trip(stage):
    """Shards are (n, 1, ..., 1), or of an uncut parameter its shape, under the module's names;
    whole and sharded state dicts come back as they were given; a misfit is named, and nothing is
    written then."""
    [shard] = WRAPPERS[stage](nn.Conv1d(4, 3, 2, bias=False)).parameters()
    assert shard.shape[1:] in ((1, 1), (4, 2)), f"of (3, 4, 2) a shard is {shard.shape}"
    for name in ("odd", "experts", "again", "mixed"):
        plain = fresh(name)
        model = WRAPPERS[stage](fresh(name))
        x = torch.ones(3, 5)
        shards = model.state_dict()
        good = {n: t.clone() for n, t in plain.state_dict().items()}
        assert list(shards) == list(good), "other names, or another order"
        for n, p in model.named_parameters():
            shape = good[n].shape
            is_part = p.shape[1:] == (1,) * (len(shape) - 1)
            is_all = p.shape == shape and stage.endswith("uncut")
            assert is_part or is_all, f"{n} has shape {shape}, its shard {p.shape}"
            start = model.shard_starts()[n]
            assert 0 <= start <= shape.numel(), f"{n}, {shape}: the shard starts at {start}"
        same_bits(good, model.full_state_dict(), name)
        plain.load_state_dict({n: t + 1 for n, t in good.items()})
        model.load_full_state_dict(plain.state_dict())
        expected = {"output": plain.eval()(x, 0).detach()}
        same_bits(expected, {"output": model.eval()(x, 0).detach()}, f"{name}, loaded")
        first = next(n for n, t in good.items() if t.dim() > 1)
        missing = {n: t for n, t in good.items() if n != first}
        for bad in (missing, {"more": good[first], **good}, {**good, first: good[first][1:]}):
            raises(RuntimeError, f"more|{first}", model.load_full_state_dict, bad)
        same_bits(plain.state_dict(), model.full_state_dict(), f"{name}, after misfits")
        model.load_state_dict(shards)
        same_bits(good, model.full_state_dict(), f"{name}, shards given back")
        some = {first: 2 * good[first], "more": good[first]}
        found = model.load_full_state_dict(some, strict=False)
        assert found.unexpected_keys == ["more"] and first not in found.missing_keys
        assert len(found.missing_keys) == len(good) - 1
        expected = good | {first: 2 * good[first]}
        for n, p in plain.named_parameters(remove_duplicate=False):
            if p is plain.get_parameter(first):
                expected[n] = 2 * good[first]
        same_bits(expected, model.full_state_dict(), f"{name}, in part")
        assert model.load_state_dict({first: shards[first]}, strict=False).unexpected_keys == []
        same_bits(good, model.full_state_dict(), f"{name}, a part given back")
        raises(RuntimeError, "leave assign=True out", model.load_state_dict, shards, assign=True)


class TakesMask(nn.Module):
    """A block that is asked for a time step, and adds a mask."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, step, mask):
        scores = self.layer(x.to(self.layer.weight.dtype)).float() + mask
        return scores.softmax(-1) * step


@on_ranks(2)
@of_each(*STAGES)
def test_inputs_that_are_not_cast(stage):
    """In bfloat16 1001 is 1000, and a row of the least number is one of -inf: nan."""
    mask = torch.full((2, 4), torch.finfo(torch.float32).min)
    for casts in (True, False):
        model = WRAPPERS[stage](TakesMask(), param_dtype=torch.bfloat16, cast_forward_inputs=casts)
        y = model(torch.zeros(2, 4), torch.tensor(1001.0), mask)
        if casts:
            assert y.isnan().all()
        else:
            assert y.sum().item() == 2 * 1001


@on_ranks(2, 3)
@of_each(*STAGES)
def test_buffers_given_back_are_read(stage):
    """What a rank still sends to slower ones is overwritten neither by the units that come next nor
    by new values of its shards.

    One rank skips all units and clears its shards at once, while the others, which it has met at
    the root, are late for the first unit. gloo reads a buffer when the receiver asks for it, so an
    early reuse sends zeros.
    """
    x = torch.randn(2, 256)
    module = Chain(6, 256)
    W = dist.get_world_size()
    with torch.no_grad():
        for ahead in range(W):
            model = STAGES[stage](Chain(6, 256))
            n_units = 0 if dist.get_rank() == ahead else 6
            model.load_full_state_dict(module.state_dict())
            calls = []

            def late(*call):
                calls.append(call)
                # The root had W - 1 calls, so this is the first unit's.
                if len(calls) == W and n_units > 0:
                    time.sleep(0.2)

            with every_collective(late):
                actual = model(x, n_units)
            for shard in model.parameters():
                shard.zero_()
            same_bits({"output": module(x, n_units)}, {"output": actual}, f"rank {ahead} is ahead")


@on_ranks(1, 2)
@of_each(*STAGES)
def test_a_gradient_is_put_back(stage):
    """A script may take a gradient away before a forward, and put it back before the backward: it
    is added to, although its memory was free to go in between."""
    for reduce_dtype in (None, torch.float32, torch.bfloat16):
        model = STAGES[stage](nn.Linear(4, 1, bias=False), reduce_dtype=reduce_dtype)
        x = torch.ones(1, 4)
        model(x).sum().backward()
        kept = {p: p.grad for p in model.parameters()}
        model.zero_grad()
        loss = model(10 * x).sum()
        for p, gradient in kept.items():
            p.grad = gradient
        loss.backward()
        for p in model.parameters():
            actual = p.grad.as_subclass(torch.Tensor)
            assert torch.equal(actual, torch.full_like(actual, 11)), (reduce_dtype, actual)


@on_ranks(1)
@of_each(*STAGES)
def test_a_mark_goes_with_what_it_stands_for(stage):
    """While no_sync() holds a gradient back `.grad` is a mark of its size. zero_grad() drops both.
    """
    model = STAGES[stage](nn.Linear(300, 300, bias=False))
    x = torch.ones(1, 300)
    before = live_bytes()
    model(x).sum().backward()
    model.zero_grad()
    plain = live_bytes() - before
    with model.no_sync():
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    model.zero_grad()
    assert live_bytes() - before <= plain + 1024


@on_ranks(2)
@of_each(*STAGES)
def test_units_are_compared(stage):
    net = Net()
    raises(RuntimeError, "different modules.*units: ", STAGES[stage], net,
           units=net.blocks[:1 + dist.get_rank()])


@on_ranks(1)
@of_each(*STAGES)
def test_an_interrupt_in_a_forward(stage):
    """As Ctrl-C: no hook is called after it. The next step is that of a plain module."""
    def interrupt(*_):
        raise KeyboardInterrupt

    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    model = STAGES[stage](net)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        with net.blocks[1].register_forward_pre_hook(interrupt):
            raises(KeyboardInterrupt, "", model, x)
        for module in (plain, model):
            module(x).square().mean().backward()
    for p, shard in zip(plain.parameters(), model.parameters()):
        assert torch.equal(p.grad.flatten(), shard.grad.as_subclass(torch.Tensor).flatten())

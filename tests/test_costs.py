"""ddp.py and zero.py: what a rank holds, when, and what it sends. verify.py has the formulas at the
end of a step, of a module that is used in order."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.common import native
from tests.ranks import on_ranks
from tests.test_book import Net, STAGES, WRAPPERS
from verify import bytes_alive, elements_sent
from zero import Zero3

WIDTH = 64
UNIT = WIDTH**2  # elements
FP32 = 4  # bytes


class Chain(nn.Module):
    """Units of equal size, and a root as large as one. WIDTH is a power of two, so 1,024 ranks need
    no padding."""

    def __init__(self, n, recomputed=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n))
        self.scale = nn.Parameter(torch.ones(UNIT))
        self.recomputed = recomputed

    def chain(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x):
        x = checkpoint(self.chain, x, use_reentrant=False) if self.recomputed else self.chain(x)
        return x.square().mean() * self.scale.square().mean()


def bytes_of(wrapper, W):
    """Of a parameter, between a backward and a step: (of parameters, of gradients, of Adam)."""
    return {"ddp": (4, 4, 8), "zero1": (4, 4, 8 / W), "zero2": (4, 4 / W, 8 / W),
            "zero3": (4 / W, 4 / W, 8 / W)}[wrapper]


def holds_the_formulas(wrapper, W, recomputed=False):
    """At each moment of a step. What is found above it is kept twice, gathered too early, or held
    by a reference that is left over."""
    n = 12
    before = bytes_alive()
    held = {}  # {moment: in units}

    def look(moment):
        held[moment] = (bytes_alive() - before) / UNIT / FP32

    model = WRAPPERS[wrapper](Chain(n, recomputed), bucket_cap_mb=FP32 * UNIT / 2**20)
    x = torch.ones(1, WIDTH)
    look("built")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(2):
        if step == 1:
            middle = model.module.blocks[n // 2]
            middle.register_forward_hook(lambda *_: look("forward"))
            middle.register_full_backward_hook(lambda *_: look("backward"))
        model(x).backward()
        optimizer.step()
        look("step")
        model.zero_grad()
    parameters, gradients, adam = [(n + 1) * n_bytes / FP32 for n_bytes in bytes_of(wrapper, W)]
    # Whole units in stage 3: the root and two. On their way in a backward: the gradients of a unit
    # that is filled and of one that is reduced, and what arrives for that; in a stage that keeps
    # all gradients these are half there. All of a checkpoint is whole while it is computed again.
    whole = 3 if wrapper == "zero3" else 0
    on_the_way = 2 + 2 * (W - 1) / W
    in_forward = parameters + adam
    if wrapper == "ddp":  # zero_grad() leaves the memory of its buckets
        in_forward += gradients
    if recomputed:  # its hook runs in the backward
        in_forward += gradients
        whole = n + 1
    most = {"built": parameters, "forward": in_forward + whole,
            "backward": parameters + gradients + adam + whole + on_the_way,
            "step": parameters + gradients + adam}
    least = {"built": parameters, "forward": parameters + adam, "backward": parameters + adam,
             "step": parameters + gradients + adam}
    for moment, found in held.items():
        fact = f"{moment}: {found:.2f} units, expected {least[moment]:.2f} to {most[moment]:.2f}"
        assert 0.97 * least[moment] <= found <= most[moment] + 0.3, fact
    model(x)  # without a backward, which would free what autograd has saved
    del model, optimizer, middle, x
    gc.collect()
    left = (bytes_alive() - before) / UNIT / FP32
    assert left < 0.3, f"{left:.2f} units are left"


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_memory(wrapper):
    holds_the_formulas(wrapper, 2)


@on_ranks(2)
def test_memory_of_a_checkpoint():
    holds_the_formulas("zero3", 2, recomputed=True)


@on_ranks(1)
@pytest.mark.parametrize("wrapper", STAGES)
def test_memory_of_1024_ranks(wrapper):
    """One of them, in torch's fake group, whose collectives do nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    holds_the_formulas(wrapper, 1024)


class Registered(nn.Module):
    """An embedding and six blocks of its size, which are used in the order of USE, and registered
    in that of names."""

    USE = ("first", "down_0", "down_1", "middle_0", "middle_1", "up_0", "up_1")

    def __init__(self, names):
        super().__init__()
        parts = {"first": nn.Embedding(WIDTH, WIDTH)}
        for name in self.USE[1:]:
            parts[name] = nn.Linear(WIDTH, WIDTH, bias=False)
        for name in names:
            self.add_module(name, parts[name])

    def units(self):
        return [self.get_submodule(name) for name in self.USE[1:]]

    def forward(self, idx):
        x = self.first(idx)
        for unit in self.units():
            x = unit(x).tanh()
        return x.square().mean()


ORDERS = {"in_order": Registered.USE, "embedding_last": (*Registered.USE[1:], "first"),
          "middle_last": ("first", "down_0", "down_1", "up_0", "up_1", "middle_0", "middle_1"),
          "backwards": Registered.USE[::-1]}


@on_ranks(3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_use(order, wrapper):
    """In whatever order a module is registered: from the second step on a rank sends as much, and
    the first bucket leaves when one of seven gradients has come; the next forward starts its
    gathers in the order of use."""
    W, n = dist.get_world_size(), len(Registered.USE)
    module = Registered(ORDERS[order])
    options = {} if wrapper == "ddp" else dict(units=module.units())
    came = []
    for p in module.parameters():
        p.register_hook(lambda gradient: came.append(gradient.numel()))
    model = WRAPPERS[wrapper](module, bucket_cap_mb=FP32 * UNIT / 2**20, **options)
    idx = torch.arange(4)
    model(idx).backward()
    model.zero_grad()
    launched = []
    real = model._start_reduce

    def start_reduce(bucket):
        launched.append(sum(came))
        real(bucket)

    model._start_reduce = start_reduce
    came.clear()
    with elements_sent() as sent:
        model(idx).backward()
    assert launched[0] == UNIT, f"{launched[0] / UNIT} gradients had come at the first launch"
    # The root is the embedding. It stays whole, as do the last two blocks.
    expected = {"ddp": 2, "zero1": 1, "zero2": 1, "zero3": 3 - 3 / n}[wrapper]
    actual = sum(sent) / (n * UNIT) / (1 - 1 / W)
    assert abs(actual - expected) < 0.01, f"{actual:.3f}, expected {expected:.3f}"


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("is_native", [False, True], ids=["gloo", "native"])
def test_traffic(is_native, wrapper):
    """By gloo's messages, and by the collectives that accelerators have. Evaluation is free but in
    stage 3; a step in no_sync() sends nothing, but what stage 3 gathers."""
    n, W = 8, dist.get_world_size()
    gathers = wrapper == "zero3"
    again = 1 - 3 / (n + 1)  # what the backward gathers: all but the root and two units

    def sends(act):
        with elements_sent() as sent:
            act()
        return sum(sent) / ((n + 1) * UNIT) / (1 - 1 / W)

    def hold():
        with model.no_sync():
            model(x).backward()

    def evaluate():
        with torch.no_grad():
            model(x)

    def step():
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    with native() if is_native else torch.enable_grad():
        model = WRAPPERS[wrapper](Chain(n))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(1, WIDTH, requires_grad=True)  # or nothing is saved of the first unit
        step()
        one_step = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2 + again}[wrapper]
        for act, expected in ((step, one_step), (evaluate, 0 if wrapper == "ddp" else 1),
                              (evaluate, gathers), (hold, gathers * (1 + again)),
                              (step, one_step - (wrapper in ("zero1", "zero2")))):
            actual = sends(act)
            assert abs(actual - expected) < 0.01, f"{act.__name__}: {actual:.3f}, not {expected}"


@on_ranks(2)
@pytest.mark.parametrize("wrapper", STAGES)
def test_full_parameters_gather_a_bucket_once(wrapper):
    module = Net()
    psi = sum(p.numel() for p in module.parameters())
    model = STAGES[wrapper](module)
    with elements_sent() as sent:
        dict(model.full_parameters())
    assert sum(sent) < psi, f"{sum(sent)} elements, of {psi}"  # half of them, and padding


@on_ranks(2)
def test_a_unit_alone_is_gathered_alone():
    model = Zero3(Chain(8))
    with elements_sent() as sent, torch.no_grad():
        model.module.blocks[3](torch.ones(1, WIDTH))
    assert 2 * sum(sent) <= 2 * UNIT, f"{2 * sum(sent) / UNIT} units"


class Passing(nn.Linear):
    """It returns its input, too, if asked: the gradient of that comes late."""

    def forward(self, x, both):
        y = x + super().forward(x)
        return (y, x) if both else y


class Passed(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.both = both
        self.blocks = nn.ModuleList(Passing(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x):
        for block in self.blocks:
            y = block(x, self.both)
            x = y[0] if self.both else y
        return x.square().mean()


@on_ranks(2)
def test_a_unit_that_returns_its_input_is_gathered_no_more_often():
    sums = []
    for both in (False, True):
        model = Zero3(Passed(both))
        with elements_sent() as sent:
            model(torch.ones(1, WIDTH, requires_grad=True)).backward()
        sums.append(sum(sent))
    assert sums[0] == sums[1], f"{sums} elements"

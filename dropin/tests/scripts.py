"""Scripts: what people do around a module, and around a wrapper of it."""

import functools
import gc
import inspect
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

from dropin.ranks import first_names, named_tensors
from dropin.states import copy_of
from dropin.tests.training import difference, no_sync, STAGES
from dropin.tests.wrappers import WRAPPERS
from tests.common import raises
from zero import Zero1

ALL = ("ddp", *STAGES)


def of_each(*wrappers):
    """A test of a wrapper, of each of these in turn, on one group of ranks."""

    def mark(function):
        @functools.wraps(function)
        def test(**arguments):
            for wrapper in wrappers:
                gc.collect()  # nothing is left of the one before
                try:
                    function(wrapper, **arguments)
                except Exception as error:
                    text = f"{wrapper}: {type(error).__name__}: {error}"
                    raise AssertionError(text).with_traceback(error.__traceback__) from None

        _, *others = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature(others)
        return test

    return mark


class Net(nn.Module):
    """Three units, and two parameters of the root. calls(net, x) takes the place of its forward."""

    def __init__(self, calls=None, unit=partial(nn.Linear, 4, 4), tied=False):
        super().__init__()
        self.blocks = nn.ModuleList(unit() for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = Net.plain if calls is None else calls
        if tied:
            self.blocks[1].bias = self.blocks[0].bias

    def forward(self, x):
        return self.calls(self, x)

    def plain(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x) * self.scale


IDX = torch.arange(11)


class Shared(torch.nn.Module):
    """Of the root: an embedding, a norm after it, and a factor that each block uses. Blocks are
    called in an order; those that are left out are frozen."""

    def __init__(self, order=range(6)):
        super().__init__()
        self.order = order
        torch.manual_seed(0)
        self.first = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
        for i, block in enumerate(self.blocks):
            block.requires_grad_(i in order)

    def forward(self, idx):
        x = self.norm(self.first(idx))
        for i in self.order:
            x = x + self.blocks[i](x * self.scale).tanh()
        return x.square().mean()


def step_of(model, idx):
    model(idx).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Script:
    """What a script has: a model, which is a module or a wrapper of it, and an optimizer, which
    make(parameters) returns. wrapper: None for the module itself. x: by default each rank's own."""

    def __init__(self, wrapper, build=Net, x=None, make=partial(torch.optim.SGD, lr=0.1),
                 **options):
        torch.manual_seed(0)
        self.module = self.model = build()
        self.is_wrapped = wrapper is not None
        self.x = x
        if x is None:
            self.x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        if self.is_wrapped:
            self.model = WRAPPERS[wrapper](self.module, **options)
        self.is_stage = isinstance(self.model, Zero1)
        # By hand, as a module may override parameters().
        actual = first_names(named_tensors(self.module, "parameters"))
        if self.is_stage:
            actual = self.model.parameters()
        self.parameters = [p for p in actual if p.requires_grad]
        self.optimizer = make(self.parameters)

    def loss(self):
        return self.model(self.x).square().mean()

    def backward(self):
        self.loss().backward()

    def hold(self):
        with no_sync(self.model):
            self.backward()

    def step(self, **options):
        self.loss().backward(**options)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self):
        if self.is_stage:
            return self.model.full_state_dict()
        actual = nn.Module.state_dict(self.module)
        return {name: copy_of(value) for name, value in actual.items()}


def note_script(scripts, zero="", ddp="", both="", zero3="", build=Net):
    """Append a script to a list: what the error of a stage says, that of DDP, of both, or of stage
    3 only, and what builds the module. Without a text it has to be right."""
    def note(function):
        function.refusals = {"ddp": ddp or both, **dict.fromkeys(STAGES, zero or both)}
        function.refusals["zero3"] = zero3 or zero or both
        function.build = build
        scripts.append(function)
        return function

    return note


def note_two_steps(scripts, part, **refusals):
    """Append a script of two steps, of a module that is decorated: part says whether it is the
    function that builds it, the unit of a Net, or the forward of one."""
    builds = {"build": lambda build: build, "unit": lambda unit: partial(Net, unit=unit),
              "forward": lambda forward: partial(Net, forward)}

    def note(decorated):
        def two_steps(s):
            s.x = s.x.clone().requires_grad_()  # or the first block saves no weight
            s.step()
            s.step()

        two_steps.__name__ = decorated.__name__
        note_script(scripts, build=builds[part](decorated), **refusals)(two_steps)
        return decorated

    return note


def run_script(wrapper, script):
    """Whatever a script does around a wrapper ends as around the plain module, on the batches of
    all ranks; or it raises, naming what is not supported."""
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    refusal = script.refusals[wrapper]
    if refusal:
        wrapped = []
        raises(Exception, refusal, start, wrapped, script, wrapper, own)
        # A receive that is dropped before its message arrives spoils the group for the next one.
        for started in wrapped:
            started.model.zero_grad()
        return
    plain = Script(None, script.build, batch)
    script(plain)
    wrapped = Script(wrapper, script.build, own)
    script(wrapped)
    expected = plain.result()
    actual = wrapped.result()
    assert expected.keys() == actual.keys()
    for n, t in expected.items():
        if not isinstance(t, torch.Tensor):
            assert actual[n] == t, f"{n} is {actual[n]}, not {t}"
        elif not torch.allclose(actual[n].double(), t.double(), rtol=1e-4, atol=1e-5):
            raise AssertionError(f"in the end {n} {difference(n, expected, actual[n])}")


def start(started, script, wrapper, x):
    """Wrap, which may raise already, and run the script."""
    started.append(Script(wrapper, script.build, x))
    script(started[0])

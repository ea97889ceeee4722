"""Scripts: what a test does around a plain module, and around a wrapper of it."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

from dropin.ddp import first_names, named_tensors
from dropin.tests.wrappers import WRAPPERS
from dropin.zero import copy_of, PlainZero1
from tests.common import raises
from judge.hints import difference
from judge.training import no_sync, STAGES


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


class Script:
    """What a script has: a model, which is a module or a wrapper of it, and an optimizer."""

    def __init__(self, wrap, build, x):
        torch.manual_seed(0)
        self.module = build()
        self.wrap = wrap
        self.x = x
        self.model = wrap(self.module)
        # By hand, as a module may override parameters().
        actual = first_names(named_tensors(self.module, "parameters"))
        if isinstance(self.model, PlainZero1):
            actual = self.model.parameters()
        self.parameters = [p for p in actual if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

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
        if isinstance(self.model, PlainZero1):
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


def run_script(script, wrapper):
    """Whatever a script does around a wrapper ends as around the plain module, on the batches of
    all ranks; or it raises, naming what is not supported."""
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    refusal = script.refusals[wrapper]
    if refusal:
        wrapped = []
        raises(Exception, refusal, start, wrapped, script, wrapper, own)
        # A receive that is dropped before its message arrives spoils the group for later tests.
        for started in wrapped:
            started.model.zero_grad()
        return
    plain = Script(not_wrapped, script.build, batch)
    script(plain)
    wrapped = Script(WRAPPERS[wrapper], script.build, own)
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
    started.append(Script(WRAPPERS[wrapper], script.build, x))
    script(started[0])


def not_wrapped(module):
    return module

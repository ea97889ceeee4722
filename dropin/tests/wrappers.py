"""Wrappers by name, more than training.py has, and optimizers that look at whole parameters.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import oracle
from dropin import DDP, HierarchicalState, Zero1, Zero2, Zero3
from dropin.alike import AlikeGuards
from dropin.guards import Guards
from dropin.shard_guards import ShardGuards
from extras.comm_hooks import hierarchical_hook, top_k_hook, TopKState
from dropin.tests import training as harness
from dropin.tests.training import adamw, BF16, our_ddp, STAGES, uncut
from dropin.tests.zoo import MODULES


class Naive(nn.Module):
    """Gradients are averaged by oracle.py, when the backward is over."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        oracle.broadcast_parameters(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def reduce_gradients(self):
        oracle.average_gradients(self.module)


def bf16_hook(state, bucket):  # torch's DDP refuses the original by its name, except on NCCL
    return default_hooks.bf16_compress_hook(state, bucket)


def no_state():
    return None


def one_node():
    return HierarchicalState(dist.get_world_size())


# name -> (a function that makes the hook's state, the hook)
HOOKS = {"bf16": (no_state, bf16_hook),
         "powersgd": (partial(powerSGD_hook.PowerSGDState, None, 2, 2, 0.5),
                      powerSGD_hook.powerSGD_hook),
         "topk": (partial(TopKState, 0.1), top_k_hook),
         "all": (partial(TopKState, 1.0), top_k_hook),
         "nodes of 2": (partial(HierarchicalState, 2), hierarchical_hook),
         "one node": (one_node, hierarchical_hook)}


def hooked(wrap, hook, module):
    model = wrap(module)
    make_state, hook = HOOKS[hook]
    model.register_comm_hook(make_state(), hook)
    return model


def without_guards(kind):
    """A class of all that kind is made of, but the guards. It has the same name: ranks send each
    other the name, and bytes are compared."""
    parts = [part for part in kind.__bases__ if part not in (ShardGuards, Guards, AlikeGuards)]
    return type(kind.__name__, tuple(parts), {})


unguarded_ddp = partial(without_guards(DDP), find_unused_parameters=True)
WITHOUT_GUARDS = {"ddp": unguarded_ddp, "ddp, 1 kB": partial(unguarded_ddp, bucket_cap_mb=0.001),
                  "zero1": without_guards(Zero1), "zero2": without_guards(Zero2),
                  "zero3": without_guards(Zero3)}
WRAPPERS = {"naive": Naive, **harness.WRAPPERS}
for hook in HOOKS:
    WRAPPERS[f"ddp {hook}"] = partial(hooked, our_ddp, hook)
    WRAPPERS[f"torch ddp {hook}"] = partial(hooked, DistributedDataParallel, hook)
for name, stage in STAGES.items():
    WRAPPERS[f"{name} in ones"] = partial(stage, shard_size=1)
    WRAPPERS[f"{name} in twos"] = partial(stage, shard_size=2)
    WRAPPERS[f"{name}, 1 kB"] = partial(stage, bucket_cap_mb=0.001)
    WRAPPERS[f"{name} uncut"] = partial(uncut, stage)
    WRAPPERS[f"{name} uncut, 1 kB"] = partial(uncut, stage, bucket_cap_mb=0.001)
    WRAPPERS[f"{name} uncut in twos"] = partial(uncut, stage, shard_size=2)
    WRAPPERS[f"{name} uncut bf16"] = partial(uncut, stage, **BF16)


class Lamb(torch.optim.Optimizer):
    """You et al., arXiv 1904.00962: a step is as long as the norm of all of a parameter says."""

    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=1e-2))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    change = mean + 0.1 * p
                    ratio = p.norm() / (change.norm() + 1e-6)
                    p.sub_(group["lr"] * ratio * change)


def muon(parameters):
    """Muon for the matrices, AdamW for the rest."""
    matrices, others = [], []
    for p in parameters:
        group = matrices if p.dim() == 2 else others
        group.append(p)
    return [torch.optim.Muon(matrices, lr=1e-2), adamw(others)]


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, foreach=False)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def foreach(parameters):
    return adamw(parameters, foreach=True)


def training(W, wrapper, *modules, **options):
    """The parameters W, wrapper, modules and options of a test: these modules, or all, in a wrapper
    on W ranks."""
    words = [wrapper]
    for name, value in options.items():
        words.append(getattr(value, "__name__", f"{name} {value}"))
    name = ", ".join([*words, *modules])
    return pytest.param(W, wrapper, modules or MODULES, options, id=f"W{W} {name}")

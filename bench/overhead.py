"""What a wrapper adds to a step of training, beside torch's own: the ranks of ./bench.sh overhead.

    python bench/overhead.py                                 one rank
    torchrun --nproc_per_node=2 bench/overhead.py            two

A RESULT line for each wrapper. The GPT of model.py, with 12 blocks and 74 parameters, is so small
that it computes next to nothing. What is left is what the CPU has to do, which is what a small step
on an accelerator takes. Counted are, each above the step of the model without a wrapper:

    kernels           operations that an accelerator launches, of 5 to 10 us of CPU time each
    views             tensors that are made of the memory of others, without a kernel
    collectives       as torch.distributed counts them: c10d's operations
    allocations       tensors that are made empty
    record_function   beginnings and ends of ranges for a profiler
    calls             of Python functions and of C functions by Python: cProfile's count

These are exact: the same in each run. Ours are shown tensors that say they are not on a CPU, so
they take the branches of an accelerator, whose kernels the CPU then computes.
"""

import contextlib
import cProfile
import dataclasses
import functools
import gc
import pathlib
import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import ddp
import dropin
import zero
from bench.start import join, report
from model import GPT, GPTConfig

SIZES = dict(n_layer=12, n_head=2, n_embd=32, block_size=8, vocab_size=64)

# -------------------------------------------------------------------------------------------------
# systems: a net -> the model that is called, its optimizer

# Of a block of 50 kB: about what 25 MB, the usual size of a bucket, are of the 28 MB of a block of
# GPT-2. So a block fills one bucket, and begins another one.
BUCKET_BYTES = 45_000
BUCKET_MB = BUCKET_BYTES / 2**20

# foreach: a few kernels for all parameters, as accelerators have it by default.
OPTIONS = dict(lr=1e-3, weight_decay=0.1, foreach=True)


def none(net):
    return net, torch.optim.AdamW(net.parameters(), **OPTIONS)


def torch_ddp(net):
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


def torch_zero(net):
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return model, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **OPTIONS)


def fsdp2(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), **OPTIONS)


def our_ddp(kind, net):
    model = kind(net, bucket_cap_mb=BUCKET_MB)
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


def our_stage(kind, net):
    model = kind(net)
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


TORCHS = {
    "torch DDP": torch_ddp,
    "torch ZeroRedundancyOptimizer": torch_zero,
    "FSDP2": fsdp2,
}
OURS = {
    "DDP": functools.partial(our_ddp, ddp.DDP),
    "Zero1": functools.partial(our_stage, zero.Zero1),
    "Zero2": functools.partial(our_stage, zero.Zero2),
    "Zero3": functools.partial(our_stage, zero.Zero3),
    "dropin DDP": functools.partial(our_ddp, dropin.DDP),
    "dropin Zero1": functools.partial(our_stage, dropin.Zero1),
    "dropin Zero2": functools.partial(our_stage, dropin.Zero2),
    "dropin Zero3": functools.partial(our_stage, dropin.Zero3),
}
SYSTEMS = {"none": none, **TORCHS, **OURS}


@contextlib.contextmanager
def as_on_accelerator(name):
    """Buckets are small; and tensors tell one of our wrappers that they are not on a CPU. (torch's
    wrappers choose by the process group.)"""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(ddp, BUCKET_BYTES=BUCKET_BYTES, MESSAGE_BYTES=0))
        first = mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET_BYTES)
        stack.enter_context(first)
        if name in OURS:
            stack.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False))
        yield


class Training:
    """A system, built, and its step. Each rank has a sequence of its own."""

    def __init__(self, name):
        net = GPT(GPTConfig(**SIZES))
        self.model, self.optimizer = SYSTEMS[name](net)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = 1, SIZES["block_size"] + 1
        sequence = torch.randint(SIZES["vocab_size"], shape, generator=generator)
        self.inputs = sequence[:, :-1]
        self.targets = sequence[:, 1:]

    def step(self, n=1):
        for _ in range(n):
            _, loss = self.model(self.inputs, self.targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


# -------------------------------------------------------------------------------------------------
# counting

# Steps: orders are learned, Adam's averages are made. In the next ones, which are counted, dropin's
# DDP compares no weights: it does so before and after, and in every 64th.
WARM_UP = 8


@dataclasses.dataclass
class Counts:
    kernels: int = 0
    views: int = 0
    collectives: int = 0
    allocations: int = 0
    record_function: int = 0
    calls: int = 0

    def __sub__(self, other):
        ours = dataclasses.astuple(self)
        others = dataclasses.astuple(other)
        return Counts(*(a - b for a, b in zip(ours, others)))


ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# They ask something, or change what a tensor says of itself.
NO_KERNEL = {"is_same_size", "is_pinned", "set_", "resize_", "record_stream"}


def is_view(operation):
    """Whether a result is an argument's memory, to which the operation does not write."""
    for argument in operation._schema.arguments:
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            return True
    return operation._opname == "_unsafe_view"  # a view, although it does not say so


class Counter(TorchDispatchMode):
    """Sees all operations below autograd, those of a backward included."""

    def __init__(self):
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        counts = self.counts
        if operation.namespace == "c10d":
            counts.collectives += 1
        elif operation.namespace == "profiler":
            counts.record_function += 1
        elif operation._opname in ALLOCATIONS:
            counts.allocations += 1
        elif is_view(operation):
            counts.views += 1
        elif operation._opname not in NO_KERNEL:
            counts.kernels += 1
        return operation(*arguments, **(options or {}))


def count_calls(training):
    """Of a step: the mean of two, since some have one more than others."""
    profile = cProfile.Profile()
    profile.enable()
    training.step(2)
    profile.disable()
    n = sum(entry.callcount for entry in profile.getstats())
    return n // 2


def count(name):
    """-> Counts of a step of a system, all that the model itself does included."""
    with as_on_accelerator(name):
        training = Training(name)
        training.step(WARM_UP)
        with Counter() as counter:
            training.step()
        counter.counts.calls = count_calls(training)
    # A wrapper and its module refer to each other: let it go before the next one is built.
    del training
    gc.collect()
    return counter.counts


# -------------------------------------------------------------------------------------------------


def main():
    warnings.simplefilter("ignore")
    join("cpu")
    without = count("none")
    for name in SYSTEMS:
        added = without if name == "none" else count(name) - without
        report({"W": dist.get_world_size(), "wrapper": name, **dataclasses.asdict(added)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

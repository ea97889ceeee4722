"""What a wrapper adds to a step of training, beside torch's own wrappers.

    python bench/overhead.py                                 one rank
    torchrun --nproc_per_node=2 bench/overhead.py            two
    python bench/overhead.py --counts                        lines for dropin/tests/test_overhead.py

`./bench.sh overhead` makes both tables. A GPT of 12 layers and 149 parameters is so small that it
computes next to nothing. What is left is what the CPU has to do, which is what a small step on an
accelerator takes. Counted are, each above the step of the model without a wrapper:

    kernels           operations that an accelerator launches, of 5 to 10 us of CPU time each
    views             tensors that are made of the memory of others, without a kernel
    collectives       as torch.distributed counts them: c10d's operations
    allocations       tensors that are made empty
    record_function   beginnings and ends of ranges for a profiler
    calls             of Python functions and of C functions by Python: cProfile's count
    CPU us            of a step: the smallest of --steps. In each round every wrapper has one step

The first six are exact: they are the same in each run. Microseconds are not, and depend on the
machine.

On a CPU our wrappers are shown tensors that say they are not on a CPU, so they take the branches of
an accelerator, whose kernels the CPU then computes. --device KIND takes a real one instead. There
calls are not counted, since hooks run on a thread of the device's, which cProfile does not see, and
CPU us are those until all is launched.
"""

import argparse
import cProfile
import contextlib
import dataclasses
import functools
import gc
import math
import pathlib
import sys
import time
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
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
from bench.start import join, Parser
from bench.timeline import refuse

# -------------------------------------------------------------------------------------------------
# the model

LAYERS = 12
WIDTH = 32
HEADS = 2
TOKENS = 8
VOCABULARY = 64


class Block(nn.Module):
    """A block of GPT-2: twelve parameters, 50,816 bytes."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, T, 3, HEADS, C // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx, targets):
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.tokens(idx) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -------------------------------------------------------------------------------------------------
# systems: a net -> the model that is called, its optimizer

# Of a block of 50,816 bytes: about what 25 MB, the usual size of a bucket, are of the 28 MB of a
# block of GPT-2. So a block fills one bucket, and begins another one.
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
    mesh = init_device_mesh(net.head.weight.device.type, (dist.get_world_size(),))
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
def as_on_accelerator(name, device):
    """Buckets are small; and if device is a CPU, tensors tell one of our wrappers that they are
    not there. (torch's wrappers choose by the process group.)"""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(ddp, BUCKET_BYTES=BUCKET_BYTES, MESSAGE_BYTES=0))
        first = mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET_BYTES)
        stack.enter_context(first)
        if name in OURS and device.type == "cpu":
            stack.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False))
        yield


class Training:
    """A system, built, and its step. Each rank has a sequence of its own."""

    def __init__(self, name, device):
        torch.manual_seed(0)
        with device:
            net = Net()
        self.model, self.optimizer = SYSTEMS[name](net)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        sequence = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=generator).to(device)
        self.inputs = sequence[:, :-1]
        self.targets = sequence[:, 1:]

    def step(self, n=1):
        for _ in range(n):
            loss = self.model(self.inputs, self.targets)
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
    records: int = 0
    calls: float = math.nan  # not counted

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
            counts.records += 1
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


def count(name, device):
    """-> Counts of a step of a system, all that the model itself does included."""
    with as_on_accelerator(name, device):
        training = Training(name, device)
        training.step(WARM_UP)
        with Counter() as counter:
            training.step()
        if device.type == "cpu":
            counter.counts.calls = count_calls(training)
    # A wrapper and its module refer to each other: let it go before the next one is built.
    del training
    gc.collect()
    return counter.counts


# -------------------------------------------------------------------------------------------------
# time


def step_us(training, device):
    """Time of a step on the CPU, in microseconds: of this thread where it does all the work; on an
    accelerator, whose thread makes the backward, until all is launched."""
    if device.type == "cpu":
        start_s = time.thread_time()
        training.step()
        return 1e6 * (time.thread_time() - start_s)
    torch.accelerator.synchronize()
    start_s = time.perf_counter()
    training.step()
    return 1e6 * (time.perf_counter() - start_s)


def fastest_us(device, n_steps):
    """-> {system: the time of its fastest step}. All are built, and have one step in each round."""
    trainings = {}
    for name in SYSTEMS:
        with as_on_accelerator(name, device):
            trainings[name] = Training(name, device)
            trainings[name].step(WARM_UP)
    fastest = dict.fromkeys(SYSTEMS, float("inf"))
    gc.disable()  # a collection would be counted with the step in which it happens
    for number in range(n_steps):
        for name, training in trainings.items():
            with as_on_accelerator(name, device):
                fastest[name] = min(fastest[name], step_us(training, device))
        if number % 10 == 9:
            gc.collect()
    gc.enable()
    return fastest


# -------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of each wrapper to time")
    parser.add_argument("--device", default="cpu", help="an accelerator to run on, such as cuda")
    parser.add_argument("--counts", action="store_true",
                        help="print what dropin/tests/test_overhead.py expects of our wrappers")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        refuse(f"--steps {arguments.steps}: choose 1 or more")
    return arguments


def print_table(counts, fastest):
    """What each system adds to the first one; of that one what it has."""
    W = dist.get_world_size()
    head = [f"W = {W}", "kernels", "views", "collectives", "allocations", "record_function",
            "calls", "CPU us"]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    for name in SYSTEMS:
        added, us = counts[name], fastest[name]
        sign = ""
        if name != "none":
            added, us, sign = added - counts["none"], us - fastest["none"], "+"
        numbers = [*dataclasses.astuple(added), us]
        cells = [name]
        for number in numbers:
            cells.append("-" if math.isnan(number) else f"{number:{sign},.0f}")
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def print_counts(counts):
    """As dropin/tests/test_overhead.py has them."""
    for name in OURS:
        print(line_of_test(name, dist.get_world_size(), counts[name] - counts["none"]), flush=True)


def line_of_test(name, W, added):
    return f'    ("{name}", {W}): {dataclasses.astuple(added)},'


def main():
    arguments = parse_arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = join(arguments.device)
    counts = {}
    for name in SYSTEMS:
        counts[name] = count(name, device)
    is_first = dist.get_rank() == 0
    if not arguments.counts:
        fastest = fastest_us(device, arguments.steps)
        if is_first:
            print_table(counts, fastest)
    elif is_first:
        print_counts(counts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

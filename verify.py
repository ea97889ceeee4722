"""The test suite: what this project promises, checked from outside.

    python verify.py                 # sampled rows of every check; exit status 1 on a failure
    python verify.py zero resume     # checks whose name contains "zero" or "resume"
    python verify.py --full          # whole cross products
    python verify.py --list
    python verify.py --module own.py # your module, wrapped in everything: see `parts_of`

Two functions do most of the work, fed with tables; pytest would need a plugin for ranks.
`parity` trains a module of the ZOO by a reference and by candidates, and compares all bits of
parameters and gradients before every update. `run_train` runs train.py on some ranks; what it
leaves is compared: RESULT, exit status, stderr, files. A new option is a new row of a table.

It knows the public API, the command line and the files of a run, so every other file can be
rewritten without a change here. Faults are planted in torch and the operating system:
`AdamW.step` raises, a loss is nan, a disk is full. Where tensors say that they are not on a CPU,
they take the collectives that NCCL has.

How it differs: a check is a function that all ranks of a group run at once, as training does.
Two checks run at once. The groups of each, one for every world size W, are forked from a server
that has torch loaded, and reused. A check that hangs, or whose rank dies, fails by name in time;
its group is replaced, the rest runs.

Cost: 22 processes of 210 MB, most of it shared; under two minutes on two cores.
"""

import argparse
import copy
import datetime
import gc
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, reduce
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import ddp
from ddp import (DDP, HierarchicalState, PlainDDP, TopKState, average_gradients,
                 hierarchical_hook, top_k_hook)
from model import GPT, GPTConfig, PRESETS
from zero import (PlainZero1, PlainZero2, PlainZero3, Zero1, Zero2, Zero3, gather_parameters,
                  make_shards, reduce_gradients)

HERE = pathlib.Path(__file__).resolve().parent
STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


# -------------------------------------------------------------------------------------------------
# the frame: checks, ranks, the table
#
# `check` puts rows on a function, `Ranks` holds W processes that run it together, `run_rows` takes
# row after row and prints a line for each. Starting a group costs more than most checks, so it
# stays for the next ones.


def check(*rows, full=(), limit_s=60):
    """Mark a function as a check. A row is its arguments and W, the world size; `full` has the rows
    of --full where they are others. The function asserts; where it cannot run it returns what is
    missing, and counts as skipped."""
    def mark(function):
        function.rows, function.full_rows, function.limit_s = rows, full or rows, limit_s
        return function
    return mark


def grid(**axes):
    """All combinations, a dict each: grid(W=(1, 2), clip=(0.1,)) has two."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def fork_server():
    """Starts processes in 0.02 s, in which all that checks and train.py import is loaded.

    Also what torch imports only when it is used: the parts of torch.compile take 2.5 s, here once
    and not once on every rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        "verify", "torch._dynamo", "torch.distributed.checkpoint", "tiktoken", "regex",
        "functorch.compile", "torch.distributed.fsdp.sharded_grad_scaler"])
    return context


def end_with_parent():
    """End this rank when verify.py is killed; a rank that waits for a call would wait for ever."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def join_group(rank, W, folder):
    """A rank's first act. Of more than four ranks there is one, in torch's fake group, which does
    not communicate.

    The group's timeout is shorter than any check's limit: where one rank fails the others say what
    they were waiting for, in place of "no answer".
    """
    gc.freeze()  # `live_bytes` need not look at what imports have made
    os.setpgid(0, 0)  # to be killed together with the programs that it starts
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    store = FakeStore() if W > 4 else dist.FileStore(f"{folder}/store", W)
    dist.init_process_group("fake" if W > 4 else "gloo", store=store, rank=rank, world_size=W,
                            timeout=datetime.timedelta(seconds=20))


def attempt(function, arguments):
    """function(**arguments) on a rank; what it raises in one line, with its place.

    Nothing is left of the check before: neither its random state nor its wrappers, whose hooks are
    in reference cycles.
    """
    torch.manual_seed(0)
    gc.collect()
    try:
        return function(**arguments)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split()) or where.line}"
        raise AssertionError(f"{text} ({where.name}:{where.lineno})") from None


class Ranks:
    """W processes in one gloo group, started at once, reused for any number of checks.

    Each is the only worker of a pool, so that a call can be sent to all of them and awaited with a
    time limit. A worker that dies breaks its pool, which is how that is noticed.
    """

    def __init__(self, W):
        self.folder = tempfile.mkdtemp()
        self.pools = [ProcessPoolExecutor(1, fork_server(), join_group, (rank, W, self.folder))
                      for rank in range(W if W <= 4 else 1)]
        self.pids = [future.result() for future in [pool.submit(os.getpid) for pool in self.pools]]

    def run(self, function, arguments, limit_s):
        """function(**arguments) on every rank -> what rank 0 returns. Raises what has failed; then
        the ranks are of no more use, as some may be inside a collective.

        The others get a second to say what they saw: the rank that is first to raise is often the
        one that noticed, not the one to blame.
        """
        futures = [pool.submit(attempt, function, arguments) for pool in self.pools]
        wait(futures, limit_s, FIRST_EXCEPTION)
        done, _ = wait(futures, 1)  # the others' view, if they have one
        problems = [future.exception() if future in done else "no answer" for future in futures]
        if any(problems):
            raise AssertionError("; ".join(f"rank {r}: {p}" for r, p in enumerate(problems) if p))
        return futures[0].result()

    def kill(self):
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def run_rows(rows):
    """Run (check, row) pairs, print the table, return the number of failures.

    Two at once, each with its own ranks: many checks wait for runs that they have started.
    """
    outcomes, rows, failures = Counter(), iter(rows), []
    print(f"{'check':34s} {'W':>4s} {'seconds':>7s}")

    def run_next(rows):
        groups = {}
        for f, row in rows:
            arguments, start_s = dict(row), time.monotonic()
            W = arguments.pop("W")
            text = ", ".join(f"{key} {value}" for key, value in arguments.items())
            try:
                groups[W] = groups.get(W) or Ranks(W)
                missing = groups[W].run(f, arguments, f.limit_s)
                outcome, text = "skipped" if missing else "passed", missing or text
            except Exception as error:  # a rank may also have died since the last check
                if W in groups:
                    groups.pop(W).kill()
                outcome, text = "failed", f"FAILED {text}\n    {error}"
            outcomes[outcome] += 1
            line = f"{f.__name__:34s} {W:4d} {time.monotonic() - start_s:7.1f}  {text}"
            print(line, flush=True)
            if outcome == "failed":
                failures.append(line)
        for ranks in groups.values():
            ranks.kill()

    two_at_a_time(run_next, [rows, rows])
    for line in failures:  # once more, where they are seen
        print(line)
    skipped = f", {outcomes['skipped']} skipped" if outcomes["skipped"] else ""
    print(f"{outcomes['passed']} passed, {outcomes['failed']} failed{skipped}")
    return outcomes["failed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only checks named like this")
    parser.add_argument("--full", action="store_true", help="whole cross products, not samples")
    parser.add_argument("--list", action="store_true", help="list the checks and their claims")
    parser.add_argument("--module", metavar="FILE", help="compare all wrappers of its module()")
    options = parser.parse_args()
    chosen = [f for name, f in globals().items() if hasattr(f, "rows")
              and (not options.names or any(part in name for part in options.names))]
    if not chosen:
        parser.error(f"no check has a name with {' or '.join(options.names)}; --list shows them")
    if options.list:
        for f in chosen:
            print(f"{f.__name__:34s} {' '.join(f.__doc__.split())}")
        return 0
    # Also for what is started from here: CPU only, one thread a rank, no warnings of torch's.
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                      TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore",
                      PYTHONPATH=os.pathsep.join(sys.path))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all, not the row that is under way
    rows = [(f, row) for f in chosen for row in (f.full_rows if options.full else f.rows)]
    if options.module:
        path = str(pathlib.Path(options.module).resolve())
        sys.path.append(os.path.dirname(path))  # for what the file imports
        try:
            parts_of(path)["loss"](fresh(path), 0, 0).backward()
        except (Exception, SystemExit) as error:
            fact = " ".join(f"{options.module}: {type(error).__name__}: {error}".split())
            parser.exit(2, f"verify.py: {fact}\n")
        kinds = ("naive", "ddp", *STAGES, "torch ddp", "fsdp2")
        rows = [(own_module, row) for row in grid(W=(1, 2, 3), wrapper=kinds, file=(path,))]
    return 1 if run_rows(rows) else 0


# -------------------------------------------------------------------------------------------------
# what checks share


def raises(kind, pattern, function, *arguments, **options):
    """Assert that function raises kind, its message matching pattern; return the message."""
    try:
        function(*arguments, **options)
    except kind as error:
        assert re.search(pattern, str(error)), f"no {pattern!r} in: {error}"
        return str(error)
    raise AssertionError(f"nothing was raised that matches {pattern!r}")


def same_bits(reference, candidate, where=""):
    """Assert that two {name: tensor} have the same names, shapes, dtypes and bits.

    Of the sign of zero too, which torch.equal does not see: it shows where zeros are added up.
    """
    assert not (others := reference.keys() ^ candidate.keys()), f"{where}only in one: {others}"
    for name, expected in reference.items():
        found = candidate[name]
        difference = (found.double() - expected.double()).abs().max() if found.numel() else 0
        same = torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())
        assert same and found.dtype == expected.dtype, (
            f"{where}{name}, {found.dtype}, differs by up to {difference:.3g}")


def not_installed(*packages):
    """What a check returns that needs these optional packages: None, or that it is skipped."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"skipped: pip install {' '.join(missing)}" if missing else None


def gather(value):
    """[rank 0's value, rank 1's, ...]; any that can be pickled."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def two_at_a_time(function, *columns):
    """[function(*row) for row in zip(*columns)], for functions that wait."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, *columns))


COLLECTIVES = ("recv", "broadcast", "allreduce", "allgather", "all_gather_single",
               "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base", "alltoall_base")


@contextmanager
def every_collective(note):
    """Call note(operation, its tensors) before each, in whichever thread.

    All of torch.distributed goes through these methods of ProcessGroup, whatever the function that
    a script calls: so what a wrapper sends can be counted without knowing how it sends it.
    """
    def tapped(name, real):
        def tap(group, tensors, *arguments, **options):
            note(name, tensors)
            return real(group, tensors, *arguments, **options)
        return tap

    taps = {name: tapped(name, getattr(dist.ProcessGroup, name)) for name in COLLECTIVES}
    coalesced = tapped("coalesced", dist._broadcast_coalesced)  # of buffers; it calls C++ by itself
    with (mock.patch.multiple(dist.ProcessGroup, **taps),
          mock.patch.object(dist, "_broadcast_coalesced", coalesced)):
        yield


def small_gpt(**options):
    sizes = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
    return GPT(GPTConfig(**{**sizes, **options}))


def live_bytes():
    """Bytes of all tensors that Python can reach, each storage once.

    Exact where the resident set of a process is noise: it counts pages, and allocators keep them.
    """
    time.sleep(0.05)  # for threads to let go of what they have sent
    gc.collect()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gc.get_objects()
                if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu"}.values())


# -------------------------------------------------------------------------------------------------
# the zoo: modules as people have them
#
# forward(x, turn) returns a scalar. x is (3, 5). The turn is 0, 1 or 2 and differs from rank to
# rank; some modules use other parameters, or other units, in another turn. They are tiny, since
# what goes wrong goes wrong at any size, and buckets of 1 kB stand for those of 25 MB.


class Tokens(nn.Module):
    """A GPT, whose embedding is its head: used first and last, and its gradient arrives twice."""

    def __init__(self):
        super().__init__()
        self.gpt = small_gpt()

    def forward(self, x, turn):
        idx = (10 * x.abs()).long()
        return self.gpt(idx, idx.flip(0))[1]


class Odd(nn.Module):
    """Parameters that are tied and transposed, frozen, never used, used in turn 0 only, of no
    dimension or 0, 1, 7 and 1001 elements; a layer called twice. No unit but the root."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.inner.weight = nn.Parameter(self.inner.weight.detach().T)  # strides (1, 5)
        self.outer.weight = self.inner.weight
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen, self.wide = nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 1001)
        self.sizes = nn.ParameterList(torch.randn(shape) for shape in ((), (1,), (0,), (7,)))

    def forward(self, x, turn):
        x = self.frozen(self.outer(self.inner(x).tanh() * self.sizes[0] + self.sizes[1]))
        x = self.inner(self.sometimes(x) if turn == 0 else x)
        return self.wide(x).square().mean() + self.sizes[2].sum() + self.sizes[3].exp().mean()


class Mixed(nn.Module):
    """Layers in fp32, fp64 and bf16, the first called again, and buffers that follow the batches of
    a rank. Each layer is a unit without submodules, so nothing but its own call gathers it.

    A bucket has one dtype, and gloo sums bf16 in bf16, where 256 + 1 = 256. A BatchNorm has other
    statistics on each rank, unless rank 0's are sent before every forward, as torch DDP does.
    """

    def __init__(self):
        super().__init__()
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for dtype in kinds)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x, turn):
        for layer in (self.layers[i] for i in (0, 1, 0, 2, 3)):
            x = layer(x.to(layer.weight.dtype)).tanh()
        return self.norm(x).exp().mean()


class Block(nn.Module):
    """A residual layer: a frozen weight, a trained correction of rank one, a parameter not used.

    In LoRA most parameters are frozen, so they are in no bucket, but stage 3 still gathers them.
    """

    def __init__(self):
        super().__init__()
        self.base, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 1, bias=False), nn.Linear(1, 5)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.norm(x)
        return x + (self.base(x) + self.up(self.down(x))).tanh()


class Blocks(nn.Module):
    """Four blocks, called in the order that the turn has.

    at_once: so many blocks are recomputed together; tied: blocks share weights; frozen: blocks
    without a gradient.

    Ranks have different turns, so some skip a block whose collectives the others take part in.
    What is gathered when must then not depend on what a rank itself has used, or they deadlock.
    """

    def __init__(self, *orders, at_once=0, tied=False, frozen=()):
        super().__init__()
        self.orders, self.at_once = orders, at_once
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 2)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        if tied:
            self.layers[3].up.bias = self.layers[1].up.bias
            self.layers[2].base = self.layers[0].base
        for i in frozen:
            self.layers[i].requires_grad_(False)

    def some(self, x, numbers):
        for i in numbers:
            x = self.layers[i](x)
        return x

    def forward(self, x, turn):
        x, order = self.first(x), self.orders[turn % len(self.orders)]
        for i in range(0, len(order), self.at_once or 4):
            part = order[i:i + (self.at_once or 4)]
            x = (checkpoint(self.some, x, part, use_reentrant=False) if self.at_once
                 else self.some(x, part))
        return self.last(x).square().mean()


class Experts(nn.Module):
    """Five lists of three experts, in a list: a turn calls two experts of each, in an order of its
    own, and no rank the third; turn 2 leaves out the first list, turn 1 the last three, so that it
    begins its backward with a unit that has been freed. A bare parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.shift = nn.Linear(5, 5), nn.Parameter(torch.ones(5))
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
                                    for _ in range(5))

    def forward(self, x, turn):
        x = self.first(x)
        for experts in list(self.layers)[turn // 2:5 - 3 * (turn % 2)]:
            for i in ((0, 1), (1, 0), (0,))[turn]:
                x = x + experts[i](x).tanh()
        # With the shift a backward begins with a gradient, without it with a saved tensor.
        return (x + self.shift if turn == 0 else x).square().mean()


class Caller(nn.Module):
    """A unit whose forward calls the three other units, through a list that torch does not see, and
    reads its own weight after that. In stage 3 they have taken its memory by then."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        others, last = self.layers[:3], self.layers[3]
        last.forward = lambda x: F.linear(reduce(lambda x, m: m(x).tanh(), others, x), last.weight)
        last.bias.requires_grad_(False)

    def forward(self, x, turn):
        return self.layers[3](x).square().mean()


ZOO = dict(
    gpt=Tokens, odd=Odd, mixed=Mixed, experts=Experts, caller=Caller,
    lora=lambda: Blocks((0, 1, 2, 3), frozen=(2,)),
    again=lambda: Blocks((3, 1, 0, 2, 2, 1), at_once=3, tied=True),
    skipping=lambda: Blocks((0, 1, 2, 3), (0, 3), (2,), frozen=(1,)))


def parts_of(name):
    """Of a module of the zoo, or of a file for --module: module(), which builds it, and
    loss(model, step, sample) of a micro batch; a file may also have units(model), for the stages
    and FSDP2, and optimizer(parameters)."""
    found = dict(module=ZOO[name], loss=zoo_loss) if name in ZOO else runpy.run_path(name)
    if missing := {"module", "loss"} - found.keys():
        raise ValueError(f"the file has no function named {' or '.join(sorted(missing))}")
    return found


def fresh(name):
    torch.manual_seed(0)
    return parts_of(name)["module"]()


def zoo_loss(call, step, sample):
    """The loss of a micro batch, which is a function of the step and its place in it: however these
    are dealt to ranks and micro-steps, they are the same."""
    generator = torch.Generator().manual_seed(1000 * step + sample)
    return call(torch.randn(3, 5, generator=generator), (step + sample) % 3)


# -------------------------------------------------------------------------------------------------
# the oracle: a module trained in two ways, by the same bits
#
# `trained` makes two steps of a module in some way and returns what it has come to: parameters
# after the first update, and gradients before the second. Gradients have to be compared too: Adam
# divides by their size, so it hides a sum in place of a mean. `parity` compares two ways with
# torch.equal. Everything else in this section is tables of ways, and of rows.


def bf16_hook(state, bucket):  # torch's DDP refuses the original by its name, except on NCCL
    return default_hooks.bf16_compress_hook(state, bucket)


# name -> (a function that makes the hook's state, the hook)
HOOKS = {"bf16": (lambda: None, bf16_hook),
         "powersgd": (partial(powerSGD_hook.PowerSGDState, None, 2, 2, 0.5),
                      powerSGD_hook.powerSGD_hook),
         "topk": (lambda: TopKState(0.1), top_k_hook),
         "all": (lambda: TopKState(1.0), top_k_hook),
         "nodes of 2": (lambda: HierarchicalState(2), hierarchical_hook),
         "one node": (lambda: HierarchicalState(dist.get_world_size()), hierarchical_hook)}


def hooked(wrap, name, module):
    call, (make_state, hook) = wrap(module), HOOKS[name]
    call.register_comm_hook(make_state(), hook)
    return call


class ByHand(nn.Module):
    """A module with the oracle of stage 1 around it: what `trained` calls a wrapper."""

    def __init__(self, module):
        super().__init__()
        self.module, self.shard_group = module, dist.group.WORLD
        self.shards = make_shards(module)

    def forward(self, *inputs):
        gather_parameters(self.shards)  # what the step before has changed
        return self.module(*inputs)

    def named_parameters(self, *_, **__):
        for name, p in self.module.named_parameters():
            yield name, self.shards[p]

    def full_parameters(self):
        gather_parameters(self.shards)
        yield from ((name, p.detach()) for name, p in self.module.named_parameters())

    def clip_grad_norm_(self, max_norm):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return ddp.clip_gradients_(gradients, max_norm, self.shard_group)


def fsdp2(module, policy=MixedPrecisionPolicy(), units=None):
    """fully_shard on units, which are the elements of lists unless given, and on the root."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    for m in (*(itertools.chain(*lists) if units is None else units), module):
        fully_shard(m, mesh=dist.DeviceMesh("cpu", range(dist.get_world_size())), mp_policy=policy)
    return module


our_ddp = partial(DDP, find_unused_parameters=True)
# Named as those with guards: ranks send each other the name, and bytes are compared.
plain_ddp = partial(type("DDP", (PlainDDP,), {}), find_unused_parameters=True)
PLAIN = {"ddp": plain_ddp, "ddp, 1 kB": partial(plain_ddp, bucket_cap_mb=0.001),
         "zero1": type("Zero1", (PlainZero1,), {}), "zero2": type("Zero2", (PlainZero2,), {}),
         "zero3": type("Zero3", (PlainZero3,), {})}
torch_ddp = partial(DistributedDataParallel, find_unused_parameters=True)
BF16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPPERS = {
    "naive": lambda module: module,  # and `average_gradients` after the backward
    "one process": lambda module: module,  # which accumulates the micro batches of all ranks
    "torch ddp": torch_ddp, "fsdp2": fsdp2, "ddp": our_ddp, **STAGES, "zero1 by hand": ByHand,
    **{f"{name} without guards": wrap for name, wrap in PLAIN.items()},
    "ddp unsynced": partial(our_ddp, forward_sync_buffers=False),
    "torch ddp unsynced": partial(torch_ddp, forward_sync_buffers=False),
    "fsdp2 bf16": lambda module: fsdp2(module, MixedPrecisionPolicy(*BF16.values())),
    "ddp, 1 a bucket": partial(our_ddp, bucket_cap_mb=1e-6),
    "ddp, 1 kB": partial(our_ddp, bucket_cap_mb=0.001),
    **{f"ddp {hook}": partial(hooked, our_ddp, hook) for hook in HOOKS},
    **{f"torch ddp {hook}": partial(hooked, DistributedDataParallel, hook) for hook in HOOKS},
    **{f"{name} {what}": partial(stage, **options) for name, stage in STAGES.items()
       for what, options in (("in ones", dict(shard_size=1)), ("in twos", dict(shard_size=2)),
                             ("bf16", BF16))}}
# Not fused: that kernel computes the end of a tensor, which does not fill a vector register, by
# other instructions, so a shard would not get the bits of the whole.
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, fused=False, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "redundancy": partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-2,
                          fused=False, foreach=False)}


def no_sync(call):
    return call.no_sync() if hasattr(call, "no_sync") else nullcontext()


def planted(*_):
    """A hook that raises."""
    raise ZeroDivisionError("planted")


class Scenarios:
    """What a script may do in a step. Each ends with gradients that are to be averaged once.

    call: a module or its wrapper; loss(i): that of the i-th micro batch of this rank.
    """

    def two_forwards(call, loss):  # contrastive losses and GANs; nothing may be freed in between
        (loss(0) + loss(2)).backward()

    def forwards_between(call, loss):
        loss(5)  # without a backward
        found = loss(0)
        with torch.inference_mode():
            loss(4)
        found.backward(retain_graph=True)
        call.zero_grad()
        found.backward()

    def exceptions(call, loss):  # a script that catches "out of memory" and goes on
        part = next(m for m in call.modules() if isinstance(m, (Block, Odd)))
        with part.register_forward_hook(planted):
            raises(ZeroDivisionError, "planted", loss, 0)
        with part.register_full_backward_pre_hook(planted):
            raises(ZeroDivisionError, "planted", loss(0).backward)
        with suppress(ZeroDivisionError), no_sync(call):
            planted()
        call.zero_grad()
        loss(0).backward()

    def no_sync_around_backward(call, loss):
        with no_sync(call):
            loss(3).backward()
        call.zero_grad()  # drops what was held back
        found = call(torch.ones(3, 5), 0)  # uses what turn 1 leaves out
        with no_sync(call):
            found.backward()
        call(torch.ones(3, 5), 1).backward()



def clip_by_hand(gradients, max_norm, N=1):
    """Divide sums by N and clip, as in all modes: the norm in float64, the factor rounded to fp32
    once. In float64 the squares of shards add up to those of the whole, in whichever order, up to
    that rounding."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    norm = torch.stack(norms).square().sum().sqrt() / N
    for gradient in gradients:
        gradient.mul_(((max_norm / (norm + 1e-6)).clamp(max=1.0) / N).float())
    return norm


def state_of(call):
    """{name: whole parameter, name.grad: gradient}, of any wrapper. A collective.

    A gradient that is None has no key, so which ones are None is compared as well.

    Ranks have to agree. Gradients are sorted: shards may be cut in the order of memory or of rows,
    and a gradient out of place shows in the next parameters.
    """
    parts = {}
    for name, p in call.named_parameters():
        name = name.removeprefix("module.")
        for key, t in ((name, p.detach()), (f"{name}.grad", p.grad)):
            if t is not None:
                parts[key] = (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
    group = getattr(call, "shard_group", None)
    k = 1 if group is None else dist.get_world_size(group)
    views = gather({key: t.double().numpy() for key, t in parts.items()})  # numpy lacks bf16
    for r, view in enumerate(views):
        assert view.keys() == views[0].keys(), f"rank {r}: {view.keys() ^ views[0].keys()}"
        for key, t in view.items():
            assert np.array_equal(t, views[r % k][key], equal_nan=True), f"rank {r} differs: {key}"
    joined = {key: np.sort(np.concatenate([view[key].ravel() for view in views[:k]]))
              for key in views[0]}
    whole = {key: t for key, t in parts.items() if not key.endswith(".grad")}
    if hasattr(call, "full_parameters"):
        whole = {name: p.clone() for name, p in call.full_parameters()}
    return {**{key: torch.from_numpy(t).to(parts[key].dtype) for key, t in joined.items()}, **whole}


def trained(kind, name, scenario=None, accumulation=1, clip=math.inf, optimizer="adamw",
            dealt=False, steps=2, compiled=False, buffers=False, late=lambda: None):
    """Train a module of the zoo -> `state_of` it before the last update, and the norm that clipping
    returned, in fp32: in float64 the squares of shards add up in another order.

    kind: a name in WRAPPERS. scenario: one in Scenarios, in place of micro-steps.
    accumulation: micro-steps of a rank and step. clip: largest norm.
    steps: updates and one. compiled: torch.compile of each block of the GPT.
    buffers: whether buffers count, which differ from rank to rank.
    dealt: as one process accumulates: every micro-step adds to what is there, and the sum of all N
    micro batches is divided once, at the end. Otherwise all but the last are in no_sync(), and the
    mean is taken on the way. A rank's a-th micro batch is number a W + rank of the step.
    """
    rank, W = dist.get_rank(), dist.get_world_size()
    N = W * accumulation if dealt else 1
    module, parts, alone = fresh(name), parts_of(name), kind == "one process"
    if rank and kind.startswith(("ddp", "zero", "torch")):  # wrapping has to bring rank 0's values
        for t in (*module.parameters(), *module.buffers()):
            t.data.fill_(7)
    if compiled:  # by dynamo and autograd; a C++ compiler is for --full
        for block in module.gpt.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")
    has_units = "units" in parts and kind in (*STAGES, "fsdp2")
    call = WRAPPERS[kind](module, **dict(units=parts["units"](module)) if has_units else {})
    if is_ours := hasattr(call, "set_gradient_divide_factor") and dealt:
        call.set_gradient_divide_factor(1)
    parameters = [p for p in call.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in parameters if (p.dim() >= 2) == matrices], weight_decay=decay)
              for matrices, decay in ((True, 0.1), (False, 0.0))]
    optimizer = (parts["optimizer"](parameters) if "optimizer" in parts else
                 OPTIMIZERS[optimizer](groups))
    for step in range(steps):
        if step:
            late()
            optimizer.step()
            call.zero_grad()  # not the optimizer's, which may have only some parameters
        if scenario:
            getattr(Scenarios, scenario)(call, lambda i: parts["loss"](call, step, i * W + rank))
        for sample in () if scenario else range(W * accumulation):
            if alone or sample % W == rank:
                hold = not dealt and sample // W < accumulation - 1
                with no_sync(call) if hold else nullcontext():
                    loss = parts["loss"](call, step, sample)
                    (loss / (1 if dealt else accumulation)).backward()
        if kind == "naive":
            average_gradients(module, divide_factor=1 if dealt else None)
        if kind == "zero1 by hand":
            reduce_gradients(call.shards)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if is_ours:
            norm = ddp.clip_gradients_(gradients, clip, call.shard_group, divide_by=N)
        else:
            norm = getattr(call, "clip_grad_norm_", partial(clip_by_hand, gradients, N=N))(clip)
    return {**state_of(call), "norm": norm.float(), **dict(call.named_buffers() if buffers else ())}


def parity(reference, candidates, modules=tuple(ZOO), optimizer="adamw",
           reference_optimizer=None, native=False, sleeper=None, **case):
    """Assert that candidates train each module by the bits of the reference.

    native: with the collectives of NCCL; sleeper: a rank late for every collective and update.
    """
    def late(*_):
        time.sleep(0.003 * (dist.get_rank() == sleeper))

    exchange = mock.patch.object(torch.Tensor, "is_cpu", False)
    for name in modules:
        expected = trained(reference, name, optimizer=reference_optimizer or optimizer, **case)
        moved = [n for n, p in fresh(name).named_parameters() if not torch.equal(p, expected[n])]
        assert moved, "nothing was trained, so nothing was compared"
        for kind in candidates:
            with (exchange if native else nullcontext(),
                  nullcontext() if sleeper is None else every_collective(late)):
                found = trained(kind, name, optimizer=optimizer, late=late, **case)
            same_bits(expected, found, f"{kind}, {name}, {case}: ")


NAIVE = dict(reference="naive", candidates=("ddp, 1 a bucket", "ddp, 1 kB", *STAGES))
# Not "mixed": 16-bit sums of ranks are rounded once, those of one process after each micro batch.
DEALT = dict(reference="one process", candidates=("zero2", "zero3"), accumulation=2, dealt=True,
             modules=tuple(name for name in ZOO if name != "mixed"))
ALONE = dict(DEALT, candidates=("ddp", "zero1", "zero3"), accumulation=1, clip=0.05)


@check(dict(NAIVE, W=1, accumulation=2, modules=("gpt", "odd")), dict(NAIVE, W=2, clip=0.05),
       dict(NAIVE, W=2, accumulation=4, modules=("odd", "lora")),
       dict(NAIVE, W=3, accumulation=2, clip=0.05, modules=("odd", "skipping")),
       dict(NAIVE, W=4, modules=("experts",)), dict(ALONE, W=3), dict(DEALT, W=3, modules=("gpt",)),
       dict(DEALT, W=4, modules=("skipping",)), dict(DEALT, W=1, modules=("odd",)),
       dict(ALONE, W=2, candidates=("ddp all", "zero1"), modules=("again",)),
       full=[*(dict(NAIVE, **row) for row in grid(W=(1, 2, 3, 4), accumulation=(1, 2, 4),
                                                  clip=(math.inf, 0.05))),
             *(dict(base, W=W) for base in (ALONE, DEALT) for W in (1, 2, 3, 4))],
       limit_s=120)
def ours_are_naive(**case):
    """DDP, in buckets of any size, and each stage give the bits of one collective per parameter, at
    any world size, accumulated in no_sync(), clipped or not; with set_gradient_divide_factor(1)
    those of one process that accumulates the same micro batches, at W = 3 too, stages 2 and 3
    however these are split over ranks."""
    parity(**case)


@check(dict(W=2, clip=0.05), dict(W=3, accumulation=2, modules=("odd", "experts")),
       full=grid(W=(1, 2, 3, 4), accumulation=(1, 3), clip=(math.inf, 0.05)))
def stage_1_is_its_oracle(**case):
    """Zero1 gives the bits of the oracle at the head of zero.py: reduce-scatter, step on the piece,
    all-gather, one parameter after the other."""
    parity("zero1 by hand", ("zero1",), **case)


def recorded(kind, name, **case):
    """What `trained` returns, and [(operation, bytes of its tensors)] of all collectives."""
    sent = []

    def note(operation, tensors):
        sent.append((operation, [t.nbytes for t in tensors if torch.is_tensor(t)]))

    with every_collective(note):
        return trained(kind, name, **case), sent


@check(dict(W=2, accumulation=2, modules=("gpt", "mixed", "lora", "caller")),
       dict(W=3, modules=("odd", "again")), dict(W=3, modules=("experts", "skipping")),
       full=grid(W=(1, 2, 3, 4), accumulation=(1, 2)))
def guards_change_nothing(modules=tuple(ZOO), **case):
    """Without guards, as the classes named Plain..., DDP and the stages give the same bits by the
    same collectives: kinds, order and bytes, construction included."""
    for name, kind in itertools.product(modules, PLAIN):
        expected, sent = recorded(kind, name, **case)
        found, sent_without = recorded(f"{kind} without guards", name, **case)
        same_bits(expected, found, f"{kind}, {name}, {case}: ")
        assert sent and sent == sent_without, f"{kind}, {name}: {sent}, {sent_without}"


FSDP_BF16 = dict(W=2, reference="fsdp2 bf16", modules=("gpt",),
                 candidates=("zero1 bf16", "zero2 bf16", "zero3 bf16"))


@check(dict(W=2, reference="torch ddp", candidates=("ddp",), accumulation=2, buffers=True),
       dict(W=2, reference="torch ddp unsynced", candidates=("ddp unsynced",), modules=("mixed",),
            buffers=True),
       dict(W=2, reference="torch ddp", reference_optimizer="redundancy", candidates=("zero1",),
            modules=("gpt", "odd", "lora", "again")),
       dict(W=2, reference="fsdp2", candidates=("zero2", "zero3"), modules=("gpt", "lora")),
       FSDP_BF16, dict(FSDP_BF16, scenario="two_forwards"),
       *(dict(W=2, reference=f"torch ddp {hook}", candidates=(f"ddp {hook}",), modules=("gpt",),
              steps=4) for hook in ("bf16", "powersgd", "topk")))
def ours_are_torch(**case):
    """At W = 2 torch's DDP, ZeroRedundancyOptimizer and FSDP2 have the same bits: gradients, which
    are None, parameters, in DDP buffers; FSDP2 under its bf16 policy too, with two forwards before
    a backward, and DDP with torch's comm hooks."""
    parity(**case)


OPTIONS = [
    dict(W=2, native=True, candidates=("ddp all", *STAGES), modules=("gpt", "odd", "again")),
    dict(W=2, sleeper=0, candidates=("ddp, 1 kB", "zero1", "zero3"), modules=("gpt", "odd")),
    dict(W=3, sleeper=2, candidates=("ddp, 1 kB", "zero2", "zero3"), modules=("again",)),
    dict(W=2, candidates=("zero1 in ones", "zero3 in ones"), modules=("gpt", "again")),
    dict(W=3, candidates=("ddp all", "ddp one node"), modules=("gpt", "odd", "mixed")),
    dict(W=2, optimizer="sgd", candidates=("zero1", "zero3"), modules=("lora", "odd")),
    dict(W=3, optimizer="foreach", candidates=("zero2", "zero3"), modules=("lora", "odd")),
    dict(W=4, reference="ddp nodes of 2", candidates=("zero1 in twos", "zero3 in twos"),
         modules=("gpt",)),
    dict(W=2, compiled=True, candidates=("ddp, 1 kB", "zero3"), modules=("gpt",))]
ODD_STEPS = [dict(W=W, scenario=name, modules=("odd", "lora"), candidates=("ddp, 1 kB", "zero3"))
             for W in (2, 3) for name in vars(Scenarios) if name[0] != "_"]


@check(*OPTIONS, *ODD_STEPS[:len(ODD_STEPS) // 2], limit_s=120, full=[
    *ODD_STEPS, *OPTIONS[-2:], *(dict(row, modules=tuple(ZOO)) for row in OPTIONS[:-2])])
def options_change_no_bit(reference="naive", **case):
    """Bits stay the same with NCCL's collectives, a rank that is late everywhere, groups of one
    rank, hooks that send everything, and any element-by-element optimizer; with two forwards,
    evaluation before a backward, exceptions or no_sync() anywhere in a step; if both compile."""
    parity(reference, **case)


@check(limit_s=600)
def own_module(wrapper, file):
    """For --module: the module of a file has the bits of one process in each of three steps.
    Torch's wrappers are shown, but do not count: from W = 3 on they add in another order."""
    is_torch = wrapper in ("torch ddp", "fsdp2")
    for steps in (1, 2, 3):
        expected = trained("one process", file, dealt=True, clip=1.0, steps=steps)
        try:
            found = trained(wrapper, file, dealt=not is_torch, clip=1.0, steps=steps)
            same_bits(expected, found, f"step {steps}: ")
        except Exception as error:
            if not is_torch:
                raise
            return f"{wrapper}, not counted: {' '.join(str(error).split())}"


# -------------------------------------------------------------------------------------------------
# ddp.py


@check(*grid(W=(1, 2, 3, 4)))
def sums_are_in_rank_order():
    """An element's contributions are scaled, then added in rank order, wherever it stands; 16-bit
    ones in fp32.

    By hand that is ((g0 + g1) + g2) + g3. A ring adds each chunk in another order, which would tie
    the bits to the layout of a bucket. (torch.sum regroups from five contributions on: runs on five
    and six ranks show that.)
    """
    rank, W = dist.get_rank(), dist.get_world_size()
    drawn = [[*(torch.randn(n, generator=torch.Generator().manual_seed(n + r))
                for n in (0, 1, 2, 3, 49, 50)),
              torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)[r].view(1)]
             for r in range(W)]
    module = nn.ParameterList(torch.zeros_like(t) for t in drawn[0])
    for factor in (W, 1):
        for p, gradient in zip(module, drawn[rank]):
            p.grad = gradient.clone()
        average_gradients(module, divide_factor=1 if factor == 1 else None)
        for p, *parts in zip(module, *drawn):
            expected = reduce(torch.add, [(part * (1 / factor)).float() for part in parts])
            assert torch.equal(p.grad, expected.to(p.dtype)), f"{p.numel()} elements of {p.dtype}"


@check(*grid(W=(1, 3)))
def factors_divide_once():
    """With set_gradient_divide_factor(5) gradients are multiplied by 1/5, rounded once, before the
    sum, as by the oracle; in fp64, too."""
    x = torch.randn(3, 5, dtype=torch.float64) + dist.get_rank()
    plain = nn.Linear(5, 5).double()
    plain(x).square().mean().backward()
    average_gradients(plain, divide_factor=5)
    expected = {n: p.grad for n, p in plain.named_parameters()}
    for wrap in (DDP, Zero1, Zero3):
        call = wrap(copy.deepcopy(plain))
        call.set_gradient_divide_factor(5)
        call(x).square().mean().backward()
        for n, p in call.named_parameters():
            first = call.shard_starts()[n.removeprefix("module.")]
            whole = expected[n.removeprefix("module.")].flatten()
            part = p.grad.as_subclass(torch.Tensor).flatten()
            same_bits({n: whole[first:first + p.numel()]}, {n: part})


class Batch(dict):
    """As libraries have them: attributes are keys, and nothing can be changed."""
    x = property(lambda self: self["x"])
    __setitem__ = planted


class Unpacks(nn.Linear):
    def forward(self, batch, nested):
        assert type(batch) is Batch and nested[0]["y"].dtype == torch.int64
        return super().forward(batch.x) + super().forward(nested[1].x)


@check(dict(W=2))
def inputs_keep_their_containers():
    """Inputs in subclasses of dict are moved to device_ids by DDP, and cast to param_dtype by the
    stages, as torch does it; DDP has what Lightning and Accelerate touch of torch's."""
    batch = Batch(x=torch.ones(2, 4))
    inputs = (batch, [{"y": torch.arange(3)}, Batch(x=torch.ones(2, 4))])
    for wrap in (partial(DDP, device_ids=[torch.device("cpu")]), partial(Zero2, **BF16)):
        call = wrap(Unpacks(4, 4))
        call(*inputs).float().sum().backward()
        assert batch.x.dtype == torch.float32 and all(p.grad is not None for p in call.parameters())
    call = DDP(nn.Linear(4, 4))
    call.reducer.prepare_for_backward([])
    assert not call.static_graph and not call.reducer._rebuild_buckets()
    assert call.require_forward_param_sync and call._get_ddp_logging_data() == {}


@check(*grid(W=(2, 3)))
def ddp_overlaps():
    """The first bucket is summed before the last gradient exists; each bucket costs its collectives
    and a backward one more. Buckets take 1 MB, 2 MB and so on, up to a limit, here of 3.

    Seen without a clock: the hook of the last gradient does not return until the first one has
    become the mean. A wrapper that communicates after the backward would wait for ever.
    """
    rank, W, sent, last_s = dist.get_rank(), dist.get_world_size(), Counter(), []
    module = nn.Sequential(*(nn.Linear(30, 30) for _ in range(8)))
    call, x, first = DDP(module, bucket_cap_mb=1e-6), torch.ones(3, 30) * rank, module[7].weight
    with every_collective(lambda name, _: sent.update([name])):
        call(x).square().mean().backward()
    # 16 parameters, each a bucket of its own: at W = 2 an all-reduce, else two exchanges.
    assert sent == (Counter(allreduce=17) if W == 2 else Counter(allreduce=1, recv=64)), sent
    assert [*map(len, ddp.fill_buckets([torch.empty(2**17)] * 20, 3 * 2**20))] == [2, 4, 6, 6, 2]
    expected = first.grad.clone()
    call.zero_grad()

    def hold_back(_):
        last_s.append(time.monotonic())
        while first.grad is None or not torch.equal(first.grad, expected):
            assert time.monotonic() < last_s[0] + 5, "the first bucket waits for the last gradient"

    module[0].weight.register_hook(hold_back)
    call(x).square().mean().backward()


@check(*grid(W=(2, 3)))
def ddp_keeps_one_gradient():
    """`.grad` is a view of a bucket, in every step the same memory; gradients take the bytes of the
    parameters and not more; a dropped wrapper and its module leave nothing."""
    before, places, module = live_bytes(), [], fresh("odd")
    call = our_ddp(module, bucket_cap_mb=0.005)
    n_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    for step in range(4):
        with call.no_sync() if step == 1 else nullcontext():
            call(torch.ones(3, 5), 0).backward()
        storages = [p.grad.untyped_storage() for p in module.parameters() if p.grad is not None]
        places.append({storage.data_ptr(): storage.nbytes() for storage in storages})
        assert len(places[-1]) < len(storages) and sum(places[-1].values()) <= n_bytes, places
        assert module.inner.weight.grad.stride() == (1, 5), "not the parameter's strides"
        call.zero_grad(set_to_none=step != 2)
    assert all(place == places[0] for place in places), f"other memory: {places}"
    del module, call, storages
    assert live_bytes() <= before + 1024, f"{live_bytes() - before} bytes are left"


@check(*grid(W=(1, 2)))
def top_k_loses_nothing():
    """What top-k has applied and what it keeps add up to all gradients: error feedback, without
    which the small ones would never be applied."""
    W, rank, missing = dist.get_world_size(), dist.get_rank(), Counter()
    state, module, plain = TopKState(0.1, start_iter=1), fresh("gpt"), fresh("gpt")
    call = DDP(module, bucket_cap_mb=0.005)
    call.register_comm_hook(state, top_k_hook)
    for step in range(4):  # weights stay, so both have the same gradients
        for net in (call, plain):
            net.zero_grad()
            zoo_loss(net, step, rank).backward()
        average_gradients(plain)
        for p, q in zip(module.parameters(), plain.parameters()):
            missing[p] += q.grad - p.grad
        assert any(t.any() for t in state.residual.values()) == (step > 0), "start_iter"
    for p, total in missing.items():
        left = sum(map(torch.from_numpy, gather(state.residual[p].numpy()))) / W
        assert left.any() and torch.allclose(total, left, atol=1e-5)
    (zoo_loss(call, 0, rank) * math.inf).backward()
    assert all(t.isfinite().all() for t in state.residual.values()), "an inf stays for ever"


# What may differ between the modules that ranks wrap, and the tensor that is named.
CHANGES = ((lambda m: m.first.double(), "first.weight"),
           (lambda m: m.last.requires_grad_(False), "last.weight"),
           (lambda m: m.register_buffer("extra", torch.ones(3)), "extra"),
           (lambda m: setattr(m, "last", nn.Linear(5, 3)), "last.weight"))


@check(*grid(W=(2, 3)))
def mistakes_are_named():
    """Ranks whose modules differ all raise, naming the first difference; so do unused parameters,
    a backward through weights that a step has changed, a wrapper in a wrapper, a lookup that
    changes weights. The next wrapper works."""
    rank, x = dist.get_rank(), torch.ones(3, 5)
    for wrap in (our_ddp, Zero1, Zero3):
        for change, name in CHANGES:
            module = fresh("lora")
            if rank:
                change(module)
            raises(RuntimeError, name, wrap, module)
        call = wrap(fresh("lora"))
        old = call(x, 0)
        call(x, 0).backward()
        torch.optim.SGD(call.parameters(), lr=0.1).step()
        raises(RuntimeError, "modified", old.backward)
        raises(RuntimeError, "wrap the plain module", wrap, call)
        raises(RuntimeError, "wrap the plain module", wrap, nn.Sequential(DDP(fresh("lora"))))
        raises(RuntimeError, "wrap the plain module", wrap, DistributedDataParallel(fresh("lora")))
        raises(RuntimeError, "must not be wrapped again", DistributedDataParallel, call)
        raises(RuntimeError, "0: max_norm=1", wrap, nn.ModuleList([nn.Embedding(9, 4, max_norm=1)]))
        raises(AttributeError, "use model.module.first", getattr, call, "first")
        if wrap is not our_ddp:
            raises(RuntimeError, "share memory", wrap, nn.ParameterList([torch.ones(3)] * 2))
    call = DDP(fresh("odd"))
    for turn, parts in ((0, {"never"}), (min(rank, 1), {"never", "sometimes"})):
        text = raises(RuntimeError, "never.weight", call(x, turn).backward)
        assert set(re.findall(r"(never|sometimes)\.weight", text)) == parts, text  # on every rank
        call.zero_grad()


@check(dict(W=2, wrap="ddp"), dict(W=3, wrap="zero1", missing="forward"), dict(W=3, wrap="zero3"),
       dict(W=2, wrap="zero3", missing="order"))
def missing_rank_is_named(wrap, missing="backward"):
    """Where a rank makes no forward or backward, or calls units in an order of its own, the others
    raise within the group's timeout, and name the bucket or unit that waits. Wrappers in a group of
    their own refuse to be copied."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    call = WRAPPERS[wrap](fresh("lora"), process_group=group)
    if missing == "order":
        order = (2, 1, 0) if dist.get_rank() else (0, 1, 2)
        some = partial(call.module.some, torch.ones(3, 5), order)
        raises(RuntimeError, r"could not unshard layers\.\d", some)
        return
    raises(RuntimeError, COPIED, copy.deepcopy, call)  # it would use the default group
    act = partial(zoo_loss, call, 0, 0) if missing == "forward" else zoo_loss(call, 0, 0).backward
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2)  # alive, and that is all
    else:
        raises(RuntimeError, r"(first|last|layers\.\d)\b|the root", act)


# -------------------------------------------------------------------------------------------------
# zero.py


class Chain(nn.Module):
    """n units of width x width, and a root of 64 numbers; recomputed: all units in one checkpoint.
    """

    def __init__(self, n, width, recomputed=False):
        super().__init__()
        self.recomputed = recomputed
        self.units = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))
        self.scale = nn.Parameter(torch.ones(64))

    def some(self, x, n):
        for unit in self.units[:n]:
            x = unit(x).tanh()
        return x

    def forward(self, x, n=99):
        x = checkpoint(self.some, x, n, use_reentrant=False) if self.recomputed else self.some(x, n)
        return x.square().mean() * self.scale.square().mean()


@check(*grid(W=(2,), stage=STAGES), dict(W=3, stage="zero3"), full=grid(W=(2, 3, 4), stage=STAGES))
def traffic_is_the_formulas(stage):
    """A rank receives what its stage says: gradients once, parameters once, in stage 3 twice but
    for the root and the last two units; half the bytes in bf16; no gradients in no_sync().

    In units of psi (W - 1) / W elements that is 2, and 3 less the units that are still whole when
    the backward begins: ZeRO paper, arXiv 1910.02054, section 7.
    """
    share, n, x = 1 - 1 / dist.get_world_size(), 8, torch.ones(3, 48)
    unit, root = 4 * 48 * 48, 4 * 64  # bytes
    psi, found = n * unit + root, Counter()

    def note(name, tensors):
        found[name] += tensors[0].nbytes / share / psi

    again = (n - 2) * unit / psi if stage == "zero3" else 0
    bf16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    # In no_sync() no step comes between: what stays whole is gathered for the first forward only.
    for train, hold, options, expected in (
            (True, False, {}, 2 + again), (True, False, bf16, (2 + again) / 2),
            (False, False, {}, 1), (True, True, {}, 1 + again if stage == "zero3" else 0)):
        call = STAGES[stage](Chain(n, 48), **options)
        for _ in range(2):  # in the first step buffers are made
            found.clear()
            with (every_collective(note), torch.set_grad_enabled(train),
                  call.no_sync() if hold else nullcontext()):
                loss = call(x)
                loss.backward() if train else None
        sent = found["recv"] + found["broadcast"]
        assert abs(sent - expected) <= 0.02, (train, hold, options, sent, expected)


@check(*grid(W=(2,), stage=STAGES), *grid(W=(1024,), stage=("zero2", "zero3")),
       dict(W=4, stage="zero3", shard_size=2), dict(W=2, stage="zero3", recomputed=True),
       dict(W=2, stage="zero1", reduce_dtype=torch.bfloat16))
def memory_is_the_formulas(stage, shard_size=None, recomputed=False, reduce_dtype=None):
    """After construction, a backward and a step a rank holds what the paper's formula says, at 1024
    ranks too; inside forward and backward, also a recomputed one, a few units more, and nothing
    when all is over. In stage 1 means of another dtype than the gradients let these go.

    Bytes in fp32 with Adam: 8 psi + 8 psi/W, 4 psi + 12 psi/W, 16 psi/W (arXiv 1910.02054, figure
    1). What is found above it is kept twice, gathered too early, or held by a reference left over.
    """
    W, n, width = shard_size or dist.get_world_size(), 12, 64
    unit, before, found = 4 * width * width, live_bytes(), {}
    psi = n * unit + 4 * 64
    call = STAGES[stage](Chain(n, width, recomputed), shard_size=shard_size,
                         reduce_dtype=reduce_dtype)
    found["built"] = live_bytes() - before
    optimizer = torch.optim.AdamW(call.parameters(), foreach=False)
    for step in range(2):
        for kind in ("forward", "full_backward") if step else ():
            getattr(call.module.units[n // 2], f"register_{kind}_hook")(
                lambda *_, kind=kind: found.update({kind: live_bytes() - before}))
        call(torch.ones(1, width)).backward()
        optimizer.step()
        found["step"] = live_bytes() - before
        call.zero_grad()
    parameters = psi / W if stage == "zero3" else psi
    keeps_gradients = stage == "zero1" and reduce_dtype is None
    held = parameters + (psi if keeps_gradients else psi / W) + 2 * psi / W
    # Units more: whole ones; two gradients, and what of each arrives from the other ranks.
    whole = 2 * (stage == "zero3")
    gradients = 1 if keeps_gradients else 2 + 2 * (W - 1) / W
    for phase, least, more in (("built", parameters, 1), ("step", held, 1),
                               ("forward", held, 1 + whole),
                               ("full_backward", held, whole + gradients)):
        assert 0.97 * least <= found[phase] <= 1.01 * least + (more + 0.3) * unit, (
            f"{phase}: {found[phase]:,} bytes, expected {least:,.0f} and {more} units of {unit:,}")
    del call, optimizer
    assert live_bytes() - before <= 4096, f"{live_bytes() - before} bytes are left"


def on_meta(build):
    with torch.device("meta"):
        return build()


def fillable():
    """Layers that initialise themselves, with buffers, one not on meta, in and outside of units."""
    norm = nn.BatchNorm1d(5, affine=False)  # of buffers alone
    norm.register_buffer("real", torch.ones((), device="cpu"))
    return nn.Sequential(nn.ModuleList([nn.Linear(5, 5), norm]), nn.Linear(5, 2))


def fill(m):
    for t in itertools.chain(m.parameters(recurse=False), m.buffers(recurse=False)):
        t.fill_(dist.get_rank() + 7)


@check(*grid(W=(1, 3), stage=STAGES))
def meta_device_is_filled(stage):
    """From the meta device a GPT gets the weights of building it whole, no rank ever holding more
    than its shards and some units; other modules reset themselves or take init_fn; rank 0 counts.
    """
    wrap, W, most, before = STAGES[stage], dist.get_world_size(), [], live_bytes()
    gpt = on_meta(lambda: small_gpt(n_layer=8))
    init_weights = gpt.init_weights
    gpt.init_weights = lambda: (init_weights(), most.append(live_bytes() - before))
    call, whole = wrap(gpt), small_gpt(n_layer=8)
    same_bits({n: p.detach() for n, p in whole.named_parameters()}, dict(call.full_parameters()))
    psi = sum(p.nbytes for p in whole.parameters())
    block = sum(p.nbytes for p in whole.blocks[0].parameters())
    assert max(most) < (0 if stage == "zero3" else psi) + psi / W + 6 * block, (most, psi)
    for init_fn, mean, units in ((None, 1, None), (fill, 7, [])):
        values = wrap(on_meta(fillable), init_fn=init_fn, units=units).full_state_dict()
        for name in ("running_var", "real"):
            assert (values[f"0.1.{name}"] == mean).all(), f"{name} is not as rank 0 has it"
    gpt = on_meta(small_gpt)
    gpt.norm = nn.LayerNorm(24)  # has values, which init_weights() would overwrite
    raises(RuntimeError, "pass init_fn", wrap, gpt)
    chain = partial(on_meta, partial(Chain, 2, 4))  # whose root cannot reset itself
    raises(RuntimeError, "the root .*Chain .*pass init_fn", wrap, chain())
    assert (wrap(chain(), init_fn=fill).full_state_dict()["scale"] == 7).all()


@check(*grid(W=(1, 3), stage=STAGES), full=grid(W=(1, 2, 3, 4), stage=STAGES))
def state_dicts_round_trip(stage):
    """Shards are (n, 1, ..., 1) under the module's names, and tile it; whole and sharded state
    dicts come back as they were given; a misfit is named, and nothing is written then."""
    for name in ("odd", "experts", "again", "mixed"):
        plain, call = fresh(name), STAGES[stage](fresh(name))
        views = gather({n: (call.shard_starts()[n], *p.shape) for n, p in call.named_parameters()})
        for n, p in plain.named_parameters():
            held = sorted(view[n] for view in views if view[n][1])
            ends = [0, *itertools.accumulate(size for _, size, *_ in held)]
            assert [start for start, *_ in held] == ends[:-1] and ends[-1] == p.numel(), (n, held)
            assert {view[n][2:] for view in views} == {(1,) * (p.dim() - 1)}, (n, views)
        ours, good = call.state_dict(), {n: t.clone() for n, t in plain.state_dict().items()}
        same_bits(good, call.full_state_dict())
        plain.load_state_dict({n: t + 1 for n, t in good.items()})
        call.load_full_state_dict(plain.state_dict())
        assert torch.equal(call.eval()(torch.ones(3, 5), 0), plain.eval()(torch.ones(3, 5), 0))
        first = next(n for n, t in good.items() if t.dim() > 1)
        for bad in ({n: t for n, t in good.items() if n != first}, {"more": good[first], **good},
                    {**good, first: good[first][1:]}):
            raises(RuntimeError, f"more|{first}", call.load_full_state_dict, bad)
        same_bits(plain.state_dict(), call.full_state_dict())
        call.load_state_dict(ours)
        same_bits(good, call.full_state_dict())
        assert list(ours) == list(good) and list(views[0]) == list(dict(plain.named_parameters()))


@check(dict(W=2, stage="zero1"), dict(W=3, stage="zero3"), full=grid(W=(2, 3), stage=STAGES))
def buffers_given_back_are_read(stage):
    """What a rank still sends to slower ones is overwritten neither by the units that come next nor
    by new values of its shards.

    One rank skips all units and clears its shards at once, while the others, which it has met at
    the root, are late for the first unit. gloo reads a buffer when the receiver asks for it, so an
    early reuse sends zeros.
    """
    x, module, W = torch.randn(2, 256), Chain(6, 256), dist.get_world_size()
    with torch.no_grad():
        for ahead in range(W):
            call, n = STAGES[stage](Chain(6, 256)), 0 if dist.get_rank() == ahead else 6
            call.load_full_state_dict(module.state_dict())

            def late(*_, n=n, calls=itertools.count()):
                time.sleep(0.2 if next(calls) == W - 1 and n else 0)  # the root has W - 1 calls

            with every_collective(late):
                found = call(x, n)
            for shard in call.parameters():
                shard.zero_()
            assert torch.equal(found, module(x, n))


# -------------------------------------------------------------------------------------------------
# scripts: right, or refused
#
# What a script does around a wrapper ends with the weights of the same script around the plain
# module, on the batches of all ranks; or it raises, and the error says what is not supported.


class Net(nn.Module):
    """Three units, and two parameters of the root. calls(net, x) takes the place of its forward."""

    def __init__(self, calls=None, unit=partial(nn.Linear, 4, 4), tied=False):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(unit() for _ in range(3)), nn.Linear(4, 2)
        self.scale, self.calls = nn.Parameter(torch.ones(())), calls or Net.plain
        if tied:
            self.blocks[1].bias = self.blocks[0].bias

    def forward(self, x):
        return self.calls(self, x)

    def plain(self, x):
        return self.head(reduce(lambda x, block: x + block(x).tanh(), self.blocks, x)) * self.scale


class Spectrum(nn.Module):
    """A weight that is seen as complex, and conjugated."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2, 2))

    def forward(self, x):
        return (x[:, :2].cfloat() @ torch.view_as_complex(self.w).mH).real


def reentrant(net, x):
    """A part is recomputed by a backward inside the backward."""
    return net.plain(checkpoint(net.blocks[2], net.blocks[1](x), use_reentrant=True))


class Script:
    """What a script has: a model, which is a module or a wrapper of it, and an optimizer."""

    def __init__(self, wrap, build, x):
        torch.manual_seed(0)
        self.module, self.wrap, self.x = build(), wrap, x
        self.model = wrap(self.module)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def loss(self):
        return self.model(self.x).square().mean()

    def hold(self):
        with no_sync(self.model):
            self.loss().backward()

    def step(self, **options):
        self.loss().backward(**options)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self):
        whole = getattr(self.model, "full_state_dict", self.model.state_dict)()
        return {name.removeprefix("module."): t.clone() for name, t in whole.items()}


SCRIPTS = []  # (script, what the error of stages says, that of DDP, what builds the module)


def script(zero="", ddp="", build=Net):
    """Note a script. An empty text says that it is right."""
    return lambda function: SCRIPTS.append((function, zero, ddp, build))


ABSENT, CHANGED, COPIED = "parameter has a value", "after wrapping", "copy the module"
script("weakref", "weakref")(
    lambda s: (torch.utils.swap_tensors(s.module.scale, nn.Parameter(s.x[0, 0])), s.step()))
script(ABSENT)(lambda s: copy.deepcopy(s.module))
script(ABSENT)(lambda s: s.x * s.module.scale)  # in a method that is not forward
script(ABSENT, build=partial(Net, lambda net, x: x @ net.blocks[2].weight))(Script.step)
script(COPIED)(lambda s: AveragedModel(s.model).update_parameters(s.model))
script(COPIED)(lambda s: torch.save(s.model, os.devnull))
script("create_graph", "create_graph")(partial(Script.step, create_graph=True))
script("after no backward")(lambda s: s.step(inputs=s.parameters))
script("to not have been used", "autograd.grad")(
    lambda s: torch.autograd.grad(s.loss(), s.parameters))
script("whole parameters")(lambda s: torch.optim.LBFGS(s.parameters).step(s.loss))
script(ABSENT)(lambda s: (s.loss().backward(), torch.optim.SGD(s.module.parameters()).step()))
script("sparse", "sparse", partial(Net, unit=partial(nn.Embedding, 9, 4, sparse=True)))(
    lambda s: s.model.module.blocks[0](torch.tensor([1])).sum().backward())
script(build=partial(Net, unit=Spectrum))(Script.step)  # complex weights
script()(lambda s: s.module.load_state_dict(
    {n: torch.full_like(t, 0.1) for n, t in Net().state_dict().items()}))
script("use_reentrant=False", "use_reentrant=False", partial(Net, reentrant))(Script.step)
script("in the backward", "in the backward")(lambda s: (_apply_optimizer_in_backward(
    torch.optim.SGD, s.parameters, dict(lr=0.1)), s.step()))
script("full_state_dict")(lambda s: s.module.state_dict()["head.weight"].clone())
for question in (torch.isfinite, torch.isnan, torch.amax, torch.Tensor.max):
    script("one rank's part")(lambda s, question=question: (
        s.loss().backward(), question(s.parameters[0].grad), s.step()))


@script()
def replaces_data(s):  # SGD by hand, and averages that are swapped in
    s.loss().backward()
    for p in s.parameters:
        p.data = p.data - 0.1 * p.grad
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(s.parameters) / 2, s.parameters)


@script()
def exchanges_data(s):  # averages take the weights' place for an evaluation, and give it back
    averages = [p.detach() * 0.9 for p in s.parameters]
    for _ in range(2):
        s.step()
        for _ in range(2):
            for p, average in zip(s.parameters, averages):
                p.data, average.data = average.data, p.data
            with torch.no_grad():
                s.loss()
    with torch.no_grad():
        for p, average in zip(s.parameters, averages):
            p.add_(average)


@script()
def keeps_gradients(s):
    s.loss().backward()
    kept = [p.grad for p in s.parameters]
    s.optimizer.zero_grad()
    s.step()
    with torch.no_grad():
        for p, gradient in zip(s.parameters, kept):
            p -= gradient


@script()
def caches_gradients(s):
    s.loss().backward()
    cached = [p.grad for p in s.parameters]
    s.optimizer.zero_grad(set_to_none=False)
    s.loss().backward()
    for gradient in cached:
        gradient *= 0.5
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.step()
    with torch.no_grad():
        for p, gradient in zip(s.parameters, cached):
            p -= gradient
    torch.save([p.grad for p in s.parameters], os.devnull)


@script()
def adds_a_penalty_to_what_no_sync_holds(s):
    s.hold()
    (s.loss() + sum(p.square().sum() for p in s.parameters)).backward()
    s.optimizer.step()


def frozen():
    net = Net()
    net.head.requires_grad_(False)
    return net


script(CHANGED, CHANGED, frozen)(lambda s: (s.model.requires_grad_(True), s.step()))


def infinite(gradient):
    gradient = gradient.clone()
    gradient.view(-1)[0] = math.inf  # in one shard
    return gradient


@script()
def scales_and_finds_an_inf(s):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for has_inf in (False, True, False):
        handle = s.module.head.weight.register_hook(infinite if has_inf else torch.clone)
        scaler.scale(s.loss()).backward()
        for p in s.parameters:
            p.grad = p.grad.clone()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
        handle.remove()
    assert scaler.get_scale() == 2, "the scale is halved once, on every rank"


@script()
def raises_elsewhere_on_each_rank(s):
    """Rank 1 after the gradient of scale, rank 0 before that; neither has filled a bucket."""
    with s.module.head.register_full_backward_pre_hook(planted if dist.get_rank() else hash):
        loss = s.loss()
        if dist.get_rank() == 0:
            loss.register_hook(planted)
        raises(ZeroDivisionError, "planted", loss.backward)
    s.model.zero_grad()
    s.step()


@script()
def steps_with_a_closure(s):
    def closure():
        s.optimizer.zero_grad()
        loss = s.loss()
        loss.backward()
        return loss

    s.loss()  # without a backward
    s.optimizer.step(closure)


def catching(net, x):
    with net.blocks[1].register_forward_pre_hook(planted, prepend=True):  # before ours
        raises(ZeroDivisionError, "planted", net.blocks[1], x)
    return net.plain(x)


script(build=partial(Net, catching))(lambda s: (s.step(), s.step()))


class Phases(nn.Module):
    """Weights that are seen as complex numbers, and kept so for the backward."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        turned = x.unflatten(1, (2, 2)).sum(2) * torch.view_as_complex(self.w)
        return torch.view_as_real(turned).flatten(1)


@script(build=partial(Net, unit=Phases))
def keeps_complex_views(s):
    s.x = s.x.clone().requires_grad_()  # or the first block, which is freed, would keep none
    s.step()


def writing(net, x):
    with torch.no_grad():
        net.head.weight.clamp_(-0.1, 0.1)
    net.scale.data = net.scale.data * 0.9
    net.head.requires_grad_(net.head.weight.requires_grad and net.scale.item() < 0.85)
    return net.plain(x)


script(build=partial(Net, writing))(lambda s: (s.step(), s.step()))
script(build=partial(Net, writing))(lambda s: (s.loss(), s.step()))
script()(lambda s: (  # a penalty, taken before the forward
    (sum(p.square().sum() for p in s.parameters) + s.loss()).backward(), s.optimizer.step()))
script(ABSENT, CHANGED)(lambda s: (s.wrap(s.module), s.step()))  # twice
script(CHANGED, CHANGED)(lambda s: (s.module.blocks.append(nn.Linear(4, 4)), s.step()))
script(CHANGED, CHANGED)(lambda s: (
    s.module.scale.register_post_accumulate_grad_hook(planted), s.step()))
script("a shard's hooks")(lambda s: (s.parameters[0].register_hook(torch.zeros_like), s.step()))
script("held back")(lambda s: (
    s.hold(), torch._foreach_mul_([p.grad for p in s.parameters], 0.5), s.step()))
script("clip_grad_norm_")(lambda s: (s.loss().backward(), nn.utils.clip_grads_with_norm_(
    s.parameters, 0.01, sum(p.grad.data.pow(2).sum() for p in s.parameters).sqrt()), s.step()))
script()(lambda s: (s.loss().backward(), s.module.zero_grad(), s.step()))
script(build=partial(Net, tied=True))(lambda s: (  # a part, with a parameter of the root
    s.module.blocks[1](s.x).square().mean().backward(), s.optimizer.step()))


@script()
def freezes_and_unfreezes(s):
    for p in s.parameters[:4]:
        p.requires_grad_(False)
    s.step()
    s.module.requires_grad_(True)
    s.step()


@script()
def keeps_the_gradients_of_a_critic(s):
    s.loss().backward()
    s.module.requires_grad_(False)
    s.model(s.x.clone().requires_grad_()).sum().backward()
    s.module.requires_grad_(True)
    s.optimizer.step()


@script("after one that raised", "after one that raised")
def catches_an_error_in_the_backward(s):
    s.loss().backward()
    with s.module.blocks[1].register_full_backward_pre_hook(planted):
        raises(ZeroDivisionError, "planted", s.step)
    s.step()


@script()
def drops_what_no_sync_holds(s):
    for set_to_none in (True, False):
        s.hold()
        s.optimizer.zero_grad(set_to_none)
        s.step()


@script()
def goes_back_twice(s):
    loss = s.loss()
    if s.model is not s.module:  # a sum of halves is the mean, too
        s.model.set_gradient_divide_factor(1)
        loss = loss / 2
    loss.backward(retain_graph=True)
    loss.backward()
    s.optimizer.step()


@check(*grid(W=(2,), wrap=("ddp", *STAGES)))
def scripts_are_right_or_refused(wrap):
    """Whatever a script does around a wrapper ends as around the plain module, on the batches of
    all ranks; or it raises, naming what is not supported."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for function, zero, ddp, build in SCRIPTS:
        expected = ddp if wrap == "ddp" else zero
        runs = (Script(WRAPPERS[wrap], build, batch.chunk(2)[dist.get_rank()]),
                Script(lambda module: module, build, batch))
        line = function.__code__.co_firstlineno if hasattr(function, "__code__") else function
        if expected:
            raises(Exception, expected, function, runs[0])
            continue
        for run in runs:
            function(run)
        for key, value in runs[1].result().items():
            torch.testing.assert_close(runs[0].result()[key], value, rtol=1e-4, atol=1e-5,
                                       msg=lambda text: f"line {line}, {key}: {text}")


# -------------------------------------------------------------------------------------------------
# model.py


def llama_logits(gpt, idx):
    """The logits of a Llama by its definition, a head at a time, from the weights of a GPT, where
    q, k and v, as well as gate and up, are the rows of one matrix."""
    c, weights, hs = gpt.config, gpt.state_dict(), gpt.config.n_embd // gpt.config.n_head
    angle = torch.arange(idx.size(1))[:, None] * c.rope_theta ** (-torch.arange(0, hs, 2) / hs)
    future = torch.ones(idx.size(1), idx.size(1), dtype=torch.bool).triu(1)

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], c.norm_eps)

    def turned(x):
        a, b = x[..., :hs // 2], x[..., hs // 2:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = weights["wte.weight"][idx]
    for name in (f"blocks.{i}" for i in range(c.n_layer)):
        rows = norm(x, f"{name}.attn_norm") @ weights[f"{name}.attn.qkv.weight"].T
        parts, heads = rows.split(hs, dim=-1), []
        for h in range(c.n_head):
            k = c.n_head + h * c.n_kv_head // c.n_head  # its key, and n_kv_head later its value
            scores = turned(parts[h]) @ turned(parts[k]).transpose(-2, -1) / math.sqrt(hs)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ parts[k + c.n_kv_head])
        x = x + torch.cat(heads, -1) @ weights[f"{name}.attn.proj.weight"].T
        rows = norm(x, f"{name}.mlp_norm") @ weights[f"{name}.mlp.gate_up.weight"].T
        gate, up = rows.chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{name}.mlp.down.weight"].T
    return norm(x, "norm") @ weights["lm_head.weight"].T


VARIANTS = {"plain": {}, "explicit": dict(attention="explicit"), "compiled": {},
            "recomputed": dict(activation_checkpointing=True)}


@check(dict(W=1, backend="aot_eager"), full=grid(W=(1,), backend=("aot_eager", "inductor")),
       limit_s=180)
def model_is_a_llama(backend):
    """Logits are a Llama's by its definition, and the loss is the mean of their cross-entropies.
    Explicit attention and torch.compile of each block change loss and gradients by rounding only,
    recomputing blocks changes no bit. (With a C++ compiler by --full: that takes a minute.)"""
    idx, found, calls = torch.arange(32).view(2, 16), {}, {}
    targets = idx.roll(-1).masked_fill(idx < 3, -1)
    for how, options in VARIANTS.items():
        gpt = small_gpt(tied=False, n_layer=1, **options)
        gpt.norm.weight.data += torch.arange(24) / 24  # or it would be ones
        with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
            gpt.compile_blocks() if how == "compiled" else None
        with torch.profiler.profile() as profiler:
            logits, loss = gpt(idx, targets)
            loss.backward()
        found[how] = {"logits": logits.detach(), **{n: p.grad for n, p in gpt.named_parameters()}}
        calls[how] = [e.name for e in profiler.events()].count("aten::scaled_dot_product_attention")
        expected = llama_logits(gpt, idx)
        nats = F.nll_loss(expected.log_softmax(-1).transpose(1, 2), targets, ignore_index=-1)
        assert torch.allclose(logits, expected, atol=1e-5), f"{how}: the logits are no Llama's"
        assert torch.allclose(loss, nats, atol=1e-5), f"{how}: loss {loss:.4f}, not {nats:.4f}"
        assert all(torch.allclose(t, found[how][n], atol=1e-5) for n, t in found["plain"].items())
    assert (calls["plain"], calls["explicit"], calls["recomputed"]) == (1, 0, 2), calls
    same_bits(found["plain"], found["recomputed"])
    assert gpt.generate(idx, 3, top_k=2).shape == (2, 19), "three tokens were to be added"


# In millions of parameters.
SIZES = {"gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558, "1b": 1e3, "7b": 7e3}


@check(dict(W=1))
def model_is_as_named():
    """Presets have their sizes, and a token its FLOPs; weights come from (seed, name), not from the
    random state, the order, the depth or meta."""
    for name, size in SIZES.items():
        gpt = on_meta(lambda: GPT(GPTConfig(vocab_size=50257, **PRESETS[name])))
        N, c = sum(p.numel() for p in gpt.parameters()), gpt.config
        assert abs(N / size / 1e6 - 1) < 0.06, f"{name} has {N:,} parameters"
        # PaLM, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T
        assert gpt.flops_per_token() == 6 * N + 12 * c.n_layer * c.n_embd * c.block_size
    gpt, late = small_gpt(), on_meta(small_gpt).to_empty(device="cpu")
    assert not torch.equal(*(block.mlp.down.weight for block in gpt.blocks)), "blocks are alike"
    late.init_weights()
    same_bits(gpt.state_dict(), late.state_dict())
    deeper, other = small_gpt(n_layer=3).state_dict(), small_gpt(seed=1).state_dict()
    for n, p in gpt.named_parameters():
        residual = "proj" in n or "down" in n  # their variance depends on the depth
        assert torch.equal(p, deeper[n]) != residual, n
        assert torch.equal(p, other[n]) == (p.dim() == 1), n
        variance = 1 / (3 * p.size(-1)) / (2 * 2 if residual else 1)
        assert (p == 1).all() if p.dim() == 1 else 0.8 < p.var().item() / variance < 1.25, n


# -------------------------------------------------------------------------------------------------
# train.py: runs, and faults planted in them
#
# A run is `python train.py FLAGS`, or what torchrun makes of it, in processes forked from the
# server. Before train.py begins, a plant may change what it finds: an optimizer whose second update
# kills the process, a loss that becomes nan. A plant is a function that can be pickled.

# A rate so high, and constant, that any difference shows in the hash after four steps. Everything
# is evaluated and compared over ranks in each of them.
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, micro_batch_size=1, global_batch_size=2,
            max_steps=4, device="cpu", min_lr=0.01, warmup_steps=2, eval_steps=2, eval_interval=1,
            lr=0.01, sample_tokens=4, save_interval=0, check_interval=1, dataset=HERE / "model.py")


def flags(**options):
    """A command line for a run of milliseconds; an option that is None is left out."""
    return [f"--{name}" if value is True else f"--{name}={value}"
            for name, value in {**TINY, **options}.items() if value is not None]


def execute(argv, folder, environment, plant):
    """train.py in this process, as `python train.py argv` runs it; its output goes to files."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.update(environment)
    sys.argv = ["train.py", *map(str, argv)]
    gc.freeze()  # a collection would touch, and so copy, all that the server has loaded
    plant()
    runpy.run_path(str(HERE / "train.py"), run_name="__main__")


def run_train(out_dir, W=1, plant=int, argv=None, **options):
    """Run train.py on W ranks as torchrun starts them or, with W = 1, as python does; forked from
    the server, which takes a tenth of the time. -> codes, stdout, stderr by rank.

    plant: called first on every rank. argv: instead of options. As torchrun, sends SIGTERM to the
    others once a rank has failed, and SIGKILL to what is left 8 s later, or after a minute in all:
    a run that hangs shows as exit codes of -9.
    """
    folder, processes = pathlib.Path(tempfile.mkdtemp()), []
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank in range(W):
        (folder / str(rank)).mkdir()
        environment = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(W),
                           LOCAL_WORLD_SIZE=str(W), MASTER_ADDR="localhost",
                           MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
        words = argv or flags(out_dir=out_dir, **options)
        processes.append(fork_server().Process(target=execute, args=(
            words, str(folder / str(rank)), environment if W > 1 else {}, plant)))
        processes[-1].start()
        # Or another thread's next start() may read the exit code first, and here it would be 255.
        multiprocessing.process._children.discard(processes[-1])
    deadline, has_ended_others = time.monotonic() + 60, False
    while time.monotonic() < deadline and None in [process.exitcode for process in processes]:
        if not has_ended_others and any(process.exitcode for process in processes):
            has_ended_others, deadline = True, time.monotonic() + 8
            for process in processes:
                process.terminate()
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.join()
    texts = {name: [(folder / str(rank) / name).read_text(errors="replace") for rank in range(W)]
             for name in ("stdout", "stderr")}
    shutil.rmtree(folder)
    return subprocess.CompletedProcess(words, [p.exitcode for p in processes], **texts)


def finish(out_dir, W=1, status=0, fact="^$", **options):
    """RESULT and stdout of a run that has to end on all ranks with this status and without a
    traceback; what rank 0 writes to stderr has to match fact."""
    run = run_train(out_dir, W, **options)
    assert run.returncode == [status] * W, f"exit codes {run.returncode}: {run.stderr}"
    assert re.search(fact, run.stderr[0]) and "Traceback" not in "".join(run.stderr), run.stderr
    results = re.findall(r"^RESULT (.*)\n\Z", run.stdout[0], re.MULTILINE)
    return dict(json.loads(results[0]) if results else {}, stdout=run.stdout[0])


def refused(fact, out_dir, W=1, status=2, **options):
    """Assert that a run ends with one line of rank 0 that matches fact."""
    finish(out_dir, W, status, rf"\Atrain\.py: .*{fact}.*\n\Z", **options)


@contextmanager
def temporary():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def lines_of(path):
    return [json.loads(line) for line in open(path)]


def write_line(path, value):
    with open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


def saved(out_dir):
    """The steps of the checkpoints in out_dir."""
    return sorted(int(path.name[5:]) for path in out_dir.glob("step_*"))


def this_rank():
    return int(os.environ.get("RANK", 0))


def in_update(n, on_rank, act, *arguments):
    """Plant act(*arguments), or act(optimizer) without any, on a rank before its n-th update.

    AdamW.step is what every mode calls once in a step, between the collectives of the backward and
    those of the next forward, so the others wait for the rank to which something happens here.
    """
    update, calls = torch.optim.AdamW.step, itertools.count(1)

    def step(optimizer, *closure):
        if next(calls) == n and on_rank in (None, this_rank()):
            act(*(arguments or [optimizer]))
        return update(optimizer, *closure)

    torch.optim.AdamW.step = step


def spoil(function, calls, value):
    """Plant value in some calls of rank 1: with F.cross_entropy in the loss, whose gradients stay
    sound; with F.embedding in one element of a gradient, and so in the shard of one rank.

    Both are what only one rank sees, while all have to decide alike.
    """
    real, n = getattr(F, function), itertools.count(1)

    def spoiled(*arguments, **options):
        found = real(*arguments, **options)
        if torch.is_grad_enabled() and next(n) in calls and this_rank() == 1:
            bad = torch.zeros_like(found)
            bad.view(-1)[0] = value
            found.register_hook(bad.add) if function == "embedding" else found.data.add_(bad)
        return found

    setattr(F, function, spoiled)


def flip_a_bit(optimizer):
    part = optimizer.param_groups[0]["params"][0].detach()
    part.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << 7)


def record_trackers():
    """Plant stand-ins for the packages of trackers, which note the losses that they are given."""
    [path] = [f"{word[10:]}/losses" for word in sys.argv if word.startswith("--out_dir=")]
    tracker = mock.MagicMock(__spec__="a stand-in")
    tracker.init.return_value.log.side_effect = (
        lambda entry, step: write_line(path, ["wandb", step, entry["loss"]]))
    tracker.SummaryWriter.return_value.add_scalar.side_effect = (
        lambda name, value, step: write_line(path, [name, step, value]) if name == "loss" else None)
    sys.modules |= dict.fromkeys(("wandb", "tensorboard", "torch.utils.tensorboard"), tracker)


# -------------------------------------------------------------------------------------------------
# train.py: stories
#
# A story is a list of legs, each a run that goes on with what the one before has left. Most have
# one leg. All stories of a family have to end on the same bits, losses and sample text, those of
# another family on others: so modes are compared, world sizes, options, resuming, and faults.

MODES = "single", "naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-fsdp"


def one(W, mode, **options):
    return [dict(W=W, mode=mode, **options)]


def chain(*legs, **options):
    """Legs (mode, W), a step each."""
    return [dict(mode=mode, W=W, max_steps=i, save_interval=1, resume="auto", **options)
            for i, (mode, W) in enumerate(legs, start=1)]


def disturbed(mode, status, fact, *plant):
    """A run of two ranks that ends in its second or third step, and one that goes on.

    status: of rank 0. fact: what its stderr has to match. plant: rank, function, arguments.
    """
    options = dict(W=2, mode=mode, save_interval=1, resume="auto")
    plant = partial(in_update, 2, *plant)
    return [dict(options, timeout_s=3, status=status, fact=fact, plant=plant), options]


LOST = r"train\.py: .*step [23]\b"
FAMILIES = {
    # Stages 2 and 3 add as one process does, for any W x micro-steps = 60.
    "any W": [one(W, mode, global_batch_size=60) for W, mode in (
        (1, "single"), *itertools.product((2, 3, 4, 5, 6, 10, 12), ("zero2", "zero3")))],
    "not clipped": [one(W, mode, global_batch_size=15, grad_clip=0) for W, mode in (
        (1, "single"), (3, "zero2"), (5, "zero3"), (15, "zero3"))],
    # The others do so with one micro-step a rank. With two they add a rank's own first.
    **{f"{N} at once": [one(W, mode, global_batch_size=N) for W, modes in (
        (1, MODES), (N, MODES[1:6])) for mode in modes] for N in (3, 4, 5, 6, 9)},
    "ranks first": [one(2, mode, global_batch_size=4) for mode in (*MODES[1:4], *MODES[6:])],
    # One micro-step a rank, and options that change no bit.
    "two": [one(1, "single"), *(one(2, mode) for mode in MODES[1:]),
            one(2, "ddp", comm_hook="hierarchical", node_size=1, bucket_cap_mb=0.001),
            one(2, "ddp", comm_hook="topk", topk_ratio=1.0, find_unused_parameters=True),
            one(2, "zero3", activation_checkpointing=True, profile=2, wandb=True, tensorboard=True,
                plant=record_trackers),
            one(2, "zero3", shard_size=1, offload=True), one(2, "zero2", shard_size=2),
            disturbed("zero3", 1, LOST, 1, math.sqrt, -1),  # raises
            disturbed("zero1", 1, LOST, 1, time.sleep, 60),
            disturbed("ddp", 1, LOST, 1, signal.raise_signal, signal.SIGKILL),
            disturbed("zero3", 1, LOST, 1, signal.raise_signal, signal.SIGSTOP),
            disturbed("zero3", 0, "step [23]", 1, signal.raise_signal, signal.SIGTERM),
            disturbed("ddp", 0, "step [23]", 0, signal.raise_signal, signal.SIGINT),
            disturbed("zero2", 1, "step 2.*File too large", 1, resource.setrlimit,
                      resource.RLIMIT_FSIZE, (10_000, 10_000))],
    # What was held for a moment before the run does not count.
    "largest micro batch": [one(1, "single", global_batch_size=4, micro_batch_size=size,
                                memory_limit_gb=limit, plant=partial(np.ones, 3 * 10**8))
                            for size, limit in ((4, None), ("auto", 2))],
    # From an evaluated step of any mode and world size to any other.
    "every mode": [one(1, "single", max_steps=9),
                   chain(*((mode, 2) for mode in (*MODES[1:], "torch-fsdp", "naive")))],
    "every W": [one(1, "single", max_steps=5, global_batch_size=12),
                chain(("zero3", 4), ("zero2", 3), ("single", 1), ("zero3", 6), ("zero2", 2),
                      global_batch_size=12)],
    **{f"{name} {value}": [one(1 + (mode != "single"), mode, **{name: value}) for mode in modes]
       for name, values, modes in (
           ("dtype", ["bf16", "fp16"], MODES), ("param_dtype", ["bf16", "fp16"], STAGES),
           ("reduce_dtype", ["bf16"], STAGES), ("comm_hook", ["bf16", "powersgd", "topk"], ["ddp"]))
       for value in values},
    # A nan or an inf on one rank in steps 2 and 3: skipped by all, who in fp16 halve the scale.
    "nan": [one(2, mode, plant=partial(spoil, "cross_entropy", (2, 3), math.nan))
            for mode in MODES[1:]],
    "inf": [one(2, mode, plant=partial(spoil, "embedding", (2, 3), math.inf), dtype="fp16")
            for mode in MODES[1:]]}
# What top-k has not sent yet goes on with the run; new ranks have nothing of it.
FAMILIES["comm_hook topk"].append(chain(*4 * [("ddp", 2)], comm_hook="topk"))
FAMILIES["joined"] = [chain(("ddp", 2), ("ddp", 4), comm_hook="topk", global_batch_size=4)]
# The stories of a family that run without --full; in "two" all faults.
SAMPLED = {"any W": [0, 1, 4, 5, 8, 9], "3 at once": [0, 8], "4 at once": [0, 7, 12], "joined": [0],
           "5 at once": [0, 9], "6 at once": [0, 10], "two": [0, *range(8, 20)], "inf": [1, 3, 4],
           "dtype bf16": [0, 2, 4], "dtype fp16": [0, 2, 5], "nan": [1, 4], "ranks first": [2, 4],
           **dict.fromkeys(("not clipped", "every mode", "every W", "largest micro batch",
                            "param_dtype bf16", "reduce_dtype bf16", "comm_hook topk"), [0, 1])}
METRICS = {"step", "loss", "lr", "grad_norm", "param_norm", "val_loss", "tokens_per_sec",
           "step_ms", "comm_exposed_ms", "mfu", "mem_bytes"}
RESULT = {"mode", "world_size", "steps", "train_loss", "val_loss", "tokens_per_sec", "step_ms",
          "comm_exposed_ms", "peak_mem_bytes", "bytes_per_param", "param_sha256", "threads"}
BYTES = {"zero1": (8, 8), "zero2": (4, 12), "zero3": (0, 16), "torch-fsdp": (0, 16),  # whole, / W
         "zero1 param_dtype": (6, 12), "zero2 param_dtype": (2, 16), "zero1 reduce_dtype": (4, 12)}


def tell(folder, legs):
    """Run a story -> what its family shares: the hash, sample text and losses of all steps."""
    for leg in legs:
        if "fact" in leg:  # rank 0 speaks; a rank that is lost may end in any way
            run = run_train(folder, **{k: v for k, v in leg.items() if k not in ("status", "fact")})
            assert run.returncode[0] == leg["status"] and re.search(leg["fact"], run.stderr[0]), run
            assert "File" not in leg["fact"] or not [*folder.glob(".step_*")], "unfinished files"
            assert "Traceback" not in run.stderr[0], run.stderr
        else:
            result = finish(folder, **leg)
    promised(folder, result, **{"max_steps": 4, **leg})
    sample = re.search(r"sample:.*(?=RESULT)", result["stdout"], re.DOTALL)[0]
    losses = [(entry["loss"], entry["val_loss"]) for entry in lines_of(folder / "metrics.jsonl")]
    return result["param_sha256"], sample, result["train_loss"], result["val_loss"], *losses


def promised(folder, result, W, mode, max_steps, shard_size=None, profile=0, **options):
    """Assert that metrics.jsonl, RESULT, traces, trackers and memory are as documented.

    A step that was skipped, for a nan or an inf, has no loss or norm and leaves the parameters'
    norm as it was. Memory may differ from its formula by 2 %, the rounding of shards; torch alone
    takes more than 100 MB.
    """
    entries = lines_of(folder / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == list(range(1, max_steps + 1))
    for before, entry in itertools.pairwise(entries):
        is_skipped = entry["param_norm"] == before["param_norm"]
        assert is_skipped == (None in (entry["loss"], entry["grad_norm"])), entry
        assert METRICS <= entry.keys() and entry["mem_bytes"] > 1e8, entry
        assert 0 <= (entry["comm_exposed_ms"] or 0) <= entry["step_ms"], entry
    assert abs(entries[0]["loss"] - entries[0]["val_loss"]) < 0.5, "not the mean of the losses"
    assert RESULT <= result.keys() and result["peak_mem_bytes"] > 1e8, result
    assert ("torch" in mode) == (result["comm_exposed_ms"] is None), result
    assert [result[key] for key in ("mode", "world_size", "steps", "threads", "val_loss")] == [
        mode, W, max_steps, 1, entries[-1]["val_loss"]], result
    cast = options.keys() & {"param_dtype", "reduce_dtype"}
    whole, sharded = BYTES.get(" ".join([mode, *cast]), BYTES.get(mode, (16, 0)))
    assert abs(result["bytes_per_param"] / (whole + sharded / (shard_size or W)) - 1) < 0.02, result
    traces = [path.read_text() for path in folder.glob("*trace*")]
    assert len(traces) == W * bool(profile)
    assert all(kind in trace for trace in traces for kind in ("gather", "reduce", "wait"))
    assert all(len(set(re.findall(r"ProfilerStep#\d+", trace))) == profile for trace in traces)
    assert "wandb" not in options or lines_of(folder / "losses") == [
        [name, e["step"], e["loss"]] for e in entries for name in ("loss", "wandb")], "trackers"


@check(dict(W=1, chosen=SAMPLED), full=[dict(W=1, chosen=dict.fromkeys(FAMILIES))], limit_s=600)
def stories_of_a_family_agree(chosen):
    """Modes, world sizes and options that promise the same bits end on the same param_sha256,
    losses (means over all ranks) and sample; so does a run that is resumed in another mode or at
    another world size, or whose rank raises, dies, hangs, is told to stop or has a full disk: it
    ends in time, and says in which step. metrics.jsonl, RESULT and traces are as documented."""
    stories = [(family, FAMILIES[family][i]) for family, numbers in chosen.items()
               for i in numbers or range(len(FAMILIES[family]))]
    with temporary() as folder:
        ends = two_at_a_time(lambda i: tell(folder / str(i), stories[i][1]), range(len(stories)))
    by_family = {}
    for (family, story), end in zip(stories, ends):
        first = by_family.setdefault(family, end)
        assert end == first, f"{family}: {story}: {end[0]}, {end[4:]}, not {first[0]}, {first[4:]}"
    assert len({end[0] for end in by_family.values()}) == len(chosen), "families are alike"


def die_in(*functions):
    """Kill this process as `kill -9` does when it next calls one of os's functions."""
    for name in functions:
        setattr(os, name, lambda *_, **__: signal.raise_signal(signal.SIGKILL))


# event -> (steps, what is planted in a node of two ranks and, if there is one, in another node of
# one rank; how many ranks the run has in turn)
EVENTS = {
    "rank 0 dies in fsync": (4, [partial(in_update, 3, 0, die_in, "fsync")], [2, 2]),
    "rank 0 dies in rename": (8, [partial(in_update, 3, 0, die_in, "rename", "replace")], 4 * [2]),
    "a node dies": (4, [int, partial(in_update, 3, None, os.killpg, 0, signal.SIGKILL)], [3, 2]),
    "a node joins": (4, [partial(in_update, 3, 0, signal.pause), int], [2, 3])}  # until SIGTERM


def under_torchrun(folder, plant, n_ranks, n_nodes, port, **options):
    """torchrun's agent on a node, with three restarts; ranks are forked, not started anew."""
    config = LaunchConfig(min_nodes=1, max_nodes=n_nodes, nproc_per_node=n_ranks, run_id="verify",
                          rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}", max_restarts=3,
                          rdzv_configs=dict(last_call_timeout=3, keep_alive_interval=1),
                          monitor_interval=0.1, start_method="fork")
    os.setpgid(0, 0)  # to be killed together with its ranks
    os.dup2(os.open(f"{folder}/agent", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    if options["resume"]:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or a node that joins waits
    elastic_launch(config, execute)(flags(**options), folder, {}, plant)


@check(*grid(W=(1,), event=tuple(EVENTS)[::2]), full=grid(W=(1,), event=tuple(EVENTS)), limit_s=90)
def torchrun_goes_on(event):
    """After kill -9 of a rank in the middle of a checkpoint, or of a whole node, and when a node
    joins, torchrun starts all ranks again, as many as there are: they resume by themselves, never
    from an earlier run's checkpoints, and end on the bits of one process."""
    steps, plants, worlds = EVENTS[event]
    with temporary() as folder:
        options = dict(max_steps=steps, save_interval=1, global_batch_size=6)
        expected = finish(folder / "alone", **options)["param_sha256"]
        resume = "auto" if event == "a node joins" else None  # its agents have stores of their own
        if not resume:
            finish(folder / "out", save_interval=4, max_steps=20, seed=3)  # another run's remains
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        agents = [fork_server().Process(
            target=under_torchrun, args=(folder, plant, n_ranks, len(plants), store.port),
            kwargs=dict(options, mode="zero3", resume=resume, out_dir=folder / "out"))
            for plant, n_ranks in zip(plants, (2, 1))]
        for agent in agents:
            agent.start()
            while resume and not (folder / "out/metrics.jsonl").exists():
                time.sleep(0.1)
        for agent in agents:
            agent.join(60)
        printed, entries = (folder / "stdout").read_text(), lines_of(folder / "out/metrics.jsonl")
    found = re.findall(r"^resumed.* on (\d) ranks \((\d) before\)$", printed, re.MULTILINE)
    assert found == [(str(now), str(before)) for before, now in itertools.pairwise(worlds)], printed
    assert agents[0].exitcode == 0 and f'"param_sha256": "{expected}"' in printed, printed[-2000:]
    assert [entry["step"] for entry in entries] == [*range(1, steps + 1)]


# -------------------------------------------------------------------------------------------------
# train.py: data, rates, and the files of a run


def log_run(folder):
    """Plant logs of the blocks that a run trains on, whose first two targets are their numbers, and
    of the parameter groups that AdamW has."""
    cross_entropy = F.cross_entropy

    def logged(logits, targets, **_):
        if torch.is_grad_enabled():
            write_line(f"{folder}/order", (256 * targets[::4] + targets[1::4]).tolist())
        return cross_entropy(logits, targets)

    def log_groups(optimizer):
        write_line(f"{folder}/groups", [(group["lr"], *group["betas"], group["weight_decay"],
            sorted({p.dim() for p in group["params"]})) for group in optimizer.param_groups])
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        assert nn.utils.get_total_norm(gradients) < 0.5 + 1e-5, "they are not clipped"

    F.cross_entropy = logged
    in_update(2, 0, log_groups)


@check(dict(W=1))
def data_and_rates_are_as_promised():
    """No sample comes twice in an epoch, and epochs have another order. nanoGPT's folders are read.
    Warm-up is linear, then a cosine; weights decay in two or more dimensions only. (That ranks take
    the samples in this order is what the hashes of any number of ranks show.)"""
    n, batch, steps = 50, 12, 8
    with temporary() as folder:
        tokens = [0, *itertools.chain(*((i // 256, i % 256, 0, 0) for i in range(n)))]
        for name, ids in (("train.bin", tokens), ("val.bin", tokens[:5])):  # 50 blocks, and one
            np.array(ids, dtype=np.uint16).tofile(folder / name)
        finish(folder / "out", dataset=folder, block_size=4, global_batch_size=batch, eval_steps=1,
               micro_batch_size=2, max_steps=steps, min_lr=0.001, grad_clip=0.5,
               plant=partial(log_run, folder))
        order = [number for micro_batch in lines_of(folder / "order") for number in micro_batch]
        groups = lines_of(folder / "groups")[0]
        assert groups == [[0.02 / 3, 0.9, 0.99, 0.1, [2]], [0.02 / 3, 0.9, 0.99, 0.0, [1]]], (
            f"rate, betas, weight decay and numbers of dimensions are {groups} in step 2")
        for step, entry in enumerate(lines_of(folder / "out/metrics.jsonl")):
            cosine = 0.001 + 0.009 * (1 + math.cos(math.pi * (step - 2) / (steps - 2))) / 2
            lr = 0.01 * (step + 1) / 3 if step < 2 else cosine
            assert abs(entry["lr"] - lr) < 1e-9, f"step {step + 1}: lr {entry['lr']}, not {lr}"
        (folder / "text").write_text("a" * 9000 + "b" * 1000)
        ends = finish(folder / "out", dataset=folder / "text", max_steps=40, micro_batch_size=2,
                      eval_interval=40, eval_steps=99)
        assert ends["train_loss"] < 1 and ends["val_loss"] > 4, "the last tenth validates"
    epochs = [order[i:i + n // batch * batch] for i in range(0, len(order), n // batch * batch)]
    assert len(order) == steps * batch and epochs[0] != epochs[1], "epochs are alike, or y is x"
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs), "a sample came twice"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


# What is no checkpoint of a run: a flag, its value and what the line names.
MISFITS = (("n_layer", 3, r"(blocks\.2|n_layer)"), ("n_embd", 32, "(wte.weight|n_embd)"),
           ("seed", 3, "seed"), ("block_size", 8, "block_size"), ("max_steps", 3, "steps"),
           ("global_batch_size", 8, "global_batch_size"), ("dataset", HERE / "ddp.py", "data"),
           ("resume", HERE, str(HERE)), ("resume", "nowhere", "nowhere"))


@check(dict(W=1), limit_s=120)
def damaged_checkpoints_are_named():
    """Whichever file of a checkpoint is changed, cut off or missing is named, exit status 2;
    --resume auto says so and takes the one before, on the same bits. What is no checkpoint of this
    run is refused by name."""
    def try_out(name, damage):
        out = folder / f"{name} {damage.__name__}"
        shutil.copytree(sound, out, symlinks=True)
        damage(out / newest / name)
        refused(re.escape(name), out, **options, resume=out / newest)
        if damage is flip:
            result = finish(out, **options, resume="auto", fact=f"{newest}.*{name}")
            assert result["param_sha256"] == expected, f"after {name} was damaged: other bits"

    with temporary() as folder:
        sound, newest = folder / "sound", "step_00000004"
        options = dict(mode="zero2", save_interval=1, eval_steps=0)
        expected = finish(sound, 2, **options)["param_sha256"]
        names = sorted(path.name for path in (sound / newest).iterdir())
        assert '"scaler": {}' in (sound / newest / "checkpoint.json").read_text(), "fp32 is scaled"
        two_at_a_time(try_out, *zip(*itertools.product(names, (flip, os.remove))))
        for name, value, fact in MISFITS:  # one at a time: they share a folder
            refused(fact, sound, **{**options, "resume": "auto", name: value})


def contents(*folders):
    """What all files below folders hold."""
    return {path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


@check(dict(W=1))
def out_dir_keeps_what_counts():
    """--keep_last newest checkpoints and the best one stay; metrics.jsonl goes back to where a run
    resumes; what a new run, or an older checkpoint, would cover is kept elsewhere."""
    with temporary() as folder:
        out = folder / "out"
        # A rate so high that an early evaluation is the best one.
        options = dict(max_steps=6, lr=3.0, min_lr=3.0, save_interval=1, keep_last=3)
        finish(out, **options)
        best = min(lines_of(out / "metrics.jsonl"), key=lambda entry: entry["val_loss"])["step"]
        assert best < 4 and saved(out) == [best, 4, 5, 6], (best, saved(out))
        write_line(out / "metrics.jsonl", "torn")  # as by a kill
        for more, moved in ((dict(resume=out / "step_00000005"), "step_00000006"),
                            (dict(max_steps=2), "")):
            assert (out / "best").resolve().name == f"step_{best:08d}"
            before = contents(out / moved)
            result = finish(out, **{**options, **more})
            assert before <= contents(folder), f"something of {more} is lost"
            assert len(lines_of(out / "metrics.jsonl")) == result["steps"]


# -------------------------------------------------------------------------------------------------
# train.py: mistakes, and what it hands on

# Command lines that end with one line, which names the file or, where there is none, the flag.
# Adding one costs a third of a second. DATA is a folder of good and bad texts, made by the check.
BAD = """--no_such_flag=1 | --lr=fast | --lr=nan | --lr=-1 | --max_steps=0 | --max_steps=1.5
--mode=zero9 | --dtype=fp8 | --model=gpt5 | --bucket_cap_mb=0 | --seed=99999999999999999999
--global_batch_size=3 --micro_batch_size=2 | --n_head=3 | --n_kv_head=3 | --tokenizer=gpt9
--tokenizer=gpt2 | --dataset=DATA/missing.txt | --dataset=DATA/empty.txt | --dataset=DATA/odd
--dataset=DATA/short.txt | --dataset=DATA/latin1.txt | --dataset=DATA/none | --dataset=DATA/beyond
--dataset=DATA/no_bin | --dataset=DATA/fine.txt --block_size=1024 --global_batch_size=64
--out_dir=DATA/fine.txt | --param_dtype=bf16 | --comm_hook=topk | --comm_hook=zip --mode=ddp
--offload | --topk_ratio=2 --mode=ddp --comm_hook=topk | --dtype=fp16 --mode=ddp --comm_hook=topk
--shard_size=1 --mode=ddp | --micro_batch_size=most | --resume=DATA/missing | --device=abacus"""
NAMED = {  # and those whose line names something else
    "--micro_batch_size=auto": "memory_limit_gb", "--wandb": "install wandb", "--beta2=1": "beta",
    "--micro_batch_size=auto --memory_limit_gb=0.2": "0.[12]", "--n_embd=1000000000000": "memory",
    "--tensorboard": "install tensorboard", "--mode=zero2 --shard_size=2": "shard_size",
    "--export_hf=hf": "install safetensors"}


def bare():
    """Plant a machine without a network and without optional packages, whatever it has."""
    sys.modules |= dict(wandb=None, tensorboard=None, safetensors=None)
    os.environ.update(TIKTOKEN_CACHE_DIR="nowhere", HTTPS_PROXY="http://127.0.0.1:9")


def elsewhere(parent):
    """Plant a working folder of its own for each rank."""
    os.chdir(parent / str(this_rank()))


def other_rate():
    sys.argv += ["--lr=0.2"] * this_rank()


@check(dict(W=1), limit_s=120)
def mistakes_are_one_line():
    """Every mistake gives exit status 2, one line on stderr that names it, and no traceback; so do
    ranks with other options or other data, before the first step. With status 1, so do 20 steps in
    a row that are not finite, and a parameter of which a bit flips on a rank."""
    with temporary() as data:
        texts = {"empty.txt": b"", "short.txt": b"too short", "latin1.txt": b"caf\xe9" * 1000,
                 "fine.txt": b"Some text. " * 999, "0/text": b"Text 0. " * 999,
                 "1/text": b"Text 1. " * 999, "0/lost": b"Text. " * 999, "no_bin/text": b""}
        for name, content in (("odd", bytes(601)), ("none", b""), ("beyond", b"\xff" * 600)):
            texts |= {f"{name}/train.bin": content, f"{name}/val.bin": content}
        for name, content in texts.items():
            (data / name).parent.mkdir(exist_ok=True)
            (data / name).write_bytes(content)
        facts = {line: (re.findall(r"DATA/([\w.]+)", line) or re.findall(r"--(\w+)", line))[0]
                 for line in re.split(r"\s*[|\n]\s*", BAD)} | NAMED
        two_at_a_time(lambda line, fact: refused(fact, None, plant=bare, argv=[
            *flags(out_dir=data / "out"), *line.replace("DATA", str(data)).split()]),
            *zip(*facts.items()))
        here, out = partial(elsewhere, data), data / "out"
        refused("single", out, 2, mode="single")
        refused("lr", out, 2, mode="ddp", plant=other_rate)
        refused("differ in data", out, 2, mode="ddp", dataset="text", plant=here)
        refused("lost", out, 2, mode="ddp", dataset="lost", plant=here)
        refused(r"step 23\b", out, 2, status=1, mode="ddp", max_steps=30,
                plant=partial(spoil, "cross_entropy", {2, *range(4, 99)}, math.nan))
        refused(r"wte\.weight", data / "a", 2, status=1, mode="ddp", save_interval=1,
                plant=partial(in_update, 2, 1, flip_a_bit))
        assert saved(data / "a")[-1] <= 2, "it went on"


@check(dict(W=1), limit_s=120)
def llama_folders_go_out_and_in():
    """What --export_hf writes, --init_from reads in any mode, to the bit, and transformers opens as
    LlamaForCausalLM with the loss that training has; so is read what transformers writes: several
    files, bf16, a head of its own, another rope_theta."""
    if missing := not_installed("safetensors", "transformers"):
        return missing
    transformers = importlib.import_module("transformers")
    block = torch.randint(256, (16,))  # all of the data, so that any batch has the same loss
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    with temporary() as folder:
        refused("LICENSE", folder / "out", export_hf=HERE / "LICENSE")  # which is no folder
        for name in ("train.bin", "val.bin"):
            block.repeat(300).numpy().astype(np.uint16).tofile(folder / name)
        expected = finish(folder / "out", 2, mode="zero3", n_head=4, n_kv_head=2, lr=0.1,
                          min_lr=0.1, export_hf=folder / "hf")["param_sha256"]
        config = transformers.LlamaConfig.from_pretrained(
            folder / "hf", tie_word_embeddings=False, rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=50.0))
        other = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        other.save_pretrained(folder / "other", max_shard_size="10KB")
        for name, W, mode in (("hf", 1, "single"), ("hf", 2, "zero3"), ("hf", 2, "torch-fsdp"),
                              ("other", 2, "zero1")):
            ours = finish(folder / mode, W, init_from=folder / name, dataset=folder, mode=mode,
                          lr=0, min_lr=0, max_steps=1, **sizes)
            llama = transformers.LlamaForCausalLM.from_pretrained(folder / name)
            loss = F.cross_entropy(llama.float()(block[None]).logits[0], block.roll(-1))
            assert abs(ours["train_loss"] - loss.item()) < 1e-5, (name, mode, ours, loss)
            assert name == "other" or ours["param_sha256"] == expected, (mode, ours)


# -------------------------------------------------------------------------------------------------
# README.md


def blocks_of(language):
    text = (HERE / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shortened(words):
    """The same command in a second: of a flag that is given twice the last one counts."""
    more = dict(n_layer=2, n_head=2, n_embd=16, n_kv_head=1, block_size=16, sample_tokens=8,
                eval_steps=2, save_interval=2, warmup_steps=1, tokenizer="bytes", device="cpu")
    steps = int(words[words.index("--max_steps") + 1]) if "--max_steps" in words else 0
    more["max_steps"] = steps if 0 < steps < 20 else max(4, steps // 50)
    if "--init_from" in words:  # whose folder has the sizes
        more = {name: value for name, value in more.items() if name[:2] != "n_"}
    data = [] if ".txt" in str(words) else [f"--dataset={HERE}/model.py"]
    return [*words, "--no-compile", *data, *(f"--{name}={value}" for name, value in more.items())]


@check(dict(W=1), full=[dict(W=1), dict(W=1, package="safetensors")], limit_s=300)
def readme_commands_run(package=None):
    """Every bash block is valid shell, and the commands, and the example of one's own module, end
    well, one after the other in one folder, on a smaller model and fewer steps. Those that need a
    package are a row of their own."""
    if missing := not_installed(*filter(None, [package])):
        return missing
    text = "".join(blocks_of("bash")).replace("\\\n", " ")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = [line for line in text.splitlines() if " train.py" in line and "--nnodes" not in line
             and bool(re.search("--export_hf|--init_from", line)) == bool(package)]
    with temporary() as folder:
        shutil.copy(HERE / "model.py", folder / "my.txt")
        for line in lines:
            words = line.partition("#")[0].split()
            W = int((re.findall(r"--nproc_per_node=(\d+)", line) or [1])[0])
            result = finish(None, W, argv=shortened(words[words.index("train.py") + 1:]),
                            plant=partial(os.chdir, folder))
            assert result["world_size"] == W and math.isfinite(result["val_loss"]), line
        (folder / "own.py").write_text(blocks_of("python")[0])
        own = partial(runpy.run_path, f"{folder}/own.py", run_name="__main__")
        run = run_train(None, 2, plant=own, argv=["--help"])
    losses = re.findall(r"rank \d: loss 0\.\d{4}", "".join(run.stdout))
    assert run.returncode == [0, 0] and len(losses) == 2, run.stderr


def is_caught(file, old, new, name):
    """Whether a check fails in a copy of the tree in which a file has new for old: a check that
    passes on broken code is worth nothing."""
    text = (HERE / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old}"
    with temporary() as folder:
        for path in (*HERE.glob("*.py"), HERE / "README.md", HERE / "bench.sh"):
            shutil.copyfile(path, folder / path.name)  # without its mode: it may be read-only
        (folder / file).write_text(text.replace(old, new))
        done = subprocess.run([sys.executable, "verify.py", name], cwd=folder, capture_output=True)
    return done.returncode == 1 and b"FAILED" in done.stdout


@check(dict(W=1, n=0), full=[dict(W=1, n=99)], limit_s=600)
def readme_leads_there(n):
    """Files, headings, functions and checks that the README names exist. By --full: with each edit
    of its table of breaks the check that the row names fails."""
    text = (HERE / "README.md").read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)}
    for file, heading in re.findall(r"\]\(([\w./]*)(?:#([^)]*))?\)", prose):
        assert (HERE / file).exists() and (file or heading in headings), f"{file}#{heading}"
    for names, file in re.findall(r"\[(`[^]]*`)\]\((\w+\.py)\)", prose):
        for name in re.findall(r"`(?:[A-Z]\w+\.)?(\w+)`", names):
            assert re.search(rf"\b(def|class) {name}\b", (HERE / file).read_text()), f"no {name}"
    checks = {name for name, f in globals().items() if hasattr(f, "rows")}
    edits = re.findall(r"^\| \[(\S+)\]\(\1\) `(.*?)` \| `(.*?)` \|.*\| `(\w+)` \|$", text, re.M)
    names = set(re.findall(r"^\| \[.*\| `(\w+)` \|$", text, re.M))  # of breaks and exercises
    names |= set(re.findall(r"python verify.py(?:\s+--full)?\s+([a-z]\w+)", text))
    assert edits and all(any(name in known for known in checks) for name in names), names - checks
    caught = two_at_a_time(is_caught, *zip(*edits[:n]))
    assert all(caught), [edit for edit, is_seen in zip(edits, caught) if not is_seen]


if __name__ == "__main__":
    # Processes find these functions in the module verify, which their server has loaded. With
    # __file__ here they would run this file as their own main, which takes half a second each.
    from verify import main
    del __file__
    sys.exit(main())

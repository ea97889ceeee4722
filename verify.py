# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""The proof: how we know that it is right.

    python verify.py                     # all rows; exit status 1 if one fails
    python verify.py "W=3 zero3" bf16    # rows with one of these in their name
    python verify.py --list              # what is claimed, and the names of the rows
    python verify.py --module own.py     # your module in place of ours: see `Task`
    python verify.py --device cuda       # on an accelerator: one is enough, ranks share it

`reference` trains a module in one process, in a plain loop of torch that uses nothing of ours. (For
DDP and Zero1 it adds up each rank's micro-steps first, as they do.) `distributed` trains it on W
ranks, in a wrapper. Both note the gradients and the parameters of each step, and `compare` looks at
all bits of all of them. Ours have to be equal at every W. Torch's own wrappers are held against the
same loop: at W = 2 they are equal, too, and above they add in another order. After that come the
bits of oracle.py, and the formulas of the ZeRO paper: how many bytes a rank holds, and how many
elements it sends.

How to prove it wrong: write a module that all rows take, and that W ranks train otherwise than one
process does. And how to see that rows can fail: change a sign, or the order of a sum, in ddp.py or
zero.py. (Scripts that are no plain loop, and what follows an error, are in tests/.)
"""

import argparse
import dataclasses
import functools
import gc
import hashlib
import itertools
import multiprocessing
import os
import pathlib
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from unittest import mock

import torch
import torch._dynamo  # here once: the first optimizer would import it in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import oracle
from ddp import DDP
from model import GPT, GPTConfig
from zero import Zero1, Zero2, Zero3, find_units

STEPS = 3  # what a step leaves behind shows in the next ones
MAX_NORM = 0.05  # less than most norms
SMALL_MB = 0.001  # buckets of 1 kB stand for those of 25 MB, since the modules are tiny
OURS = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
TORCHS = ("torch ddp", "torch zero1", "fsdp2")
OWN_FIRST = ("ddp", "zero1", "torch ddp", "torch zero1")  # they average once in a step


# -------------------------------------------------------------------------------------------------
# what is claimed


def rows(tasks: list[str], is_own: bool):
    """-> (claim, W, check, its arguments) of each row. tasks: keys of TASKS, or the path of a
    file alone."""
    claim = ("W ranks, in any wrapper of ours, end on the bits of one process, in a plain loop "
             "(which,\nfor ddp and zero1, adds up each rank's micro-steps first)")
    for W, wrapper, micro_steps in itertools.product((1, 2, 3, 4), OURS, (1, 2)):
        yield claim, W, bits_of_one_process, (wrapper, micro_steps, tasks)
    claim = "Torch's own wrappers do so at W = 2, and above they come close"
    for W, wrapper in itertools.product((2, 3), TORCHS):
        is_limited = wrapper == "fsdp2" and not is_own  # it takes no weight that two units share
        yield claim, W, bits_of_one_process, (wrapper, 1, ["gpt"] if is_limited else tasks)
    if is_own:
        return
    for wrapper in ("zero1", "zero2", "zero3"):
        yield "In bf16 the stages end on the bits of FSDP2", 2, bits_of_fsdp2_in_bf16, (wrapper,)
    for W, wrapper in itertools.product((2, 3), OURS):
        yield "They end on the bits of oracle.py", W, bits_of_the_oracle, (wrapper,)
    claim = "A rank holds after a step, and sends in it, what the ZeRO paper says"
    for W, wrapper, micro_steps in itertools.product((2, 3), OURS, (1, 2)):
        yield claim, W, formulas_of_the_paper, (wrapper, micro_steps)


# -------------------------------------------------------------------------------------------------
# what is trained


@dataclasses.dataclass
class Task:
    """module() -> a module; loss(model, step, number) -> a scalar: of a micro batch, by its number
    in the step; units(module), if they are not the elements of its ModuleLists. A file for --module
    has functions of these names."""

    module: Callable
    loss: Callable
    units: Callable | None = None


def random_inputs(step: int, number: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(shape, generator=generator).to(device())


def small_gpt(**options) -> GPT:
    """Its embedding is its head: used first and last, and its gradient arrives in two parts."""
    sizes = dict(block_size=16, vocab_size=61, n_layer=3, n_head=4, n_kv_head=2, n_embd=32)
    return GPT(GPTConfig(**{**sizes, **options}))


def gpt_loss(model, step, number):
    tokens = (10 * random_inputs(step, number, 3, 8).abs()).long()
    _, loss = model(tokens, tokens.flip(0))
    return loss


class Odd(nn.Module):
    """What wrappers stumble over: a weight that two blocks and the root share, frozen parameters, a
    buffer, a transposed parameter, one in channels_last, one without dimensions, sizes that no W
    divides; and blocks that are called in another order than they are registered in, one twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(4):
            self.blocks.append(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Tanh()))
        self.blocks[3][1].weight = self.blocks[0][1].weight
        self.blocks[1].requires_grad_(False)
        self.blocks[2][1].weight = nn.Parameter(self.blocks[2][1].weight.detach().T)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.wide = nn.Linear(7, 1001)
        self.register_buffer("shift", torch.randn(7))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))

    def some(self, x, order):
        for place in order:
            x = x + self.blocks[place](x)
        return x

    def ends(self, x):
        x = x + self.shift
        image = self.image * x[:4, :5]
        wide = self.wide(x @ self.blocks[0][1].weight)
        return image.square().mean() + (self.scale * wide).square().mean()

    def forward(self, x):
        return self.ends(self.some(x, (2, 0, 1, 3, 0)))


class Recomputed(Odd):
    """The backward computes blocks again: one, and several in one checkpoint."""

    def forward(self, x):
        for order in ((2,), (0, 1, 3), (0,)):
            x = checkpoint(self.some, x, order, use_reentrant=False)
        return self.ends(x)


def odd_loss(model, step, number):
    return model(random_inputs(step, number, 5, 7))


TASKS = {"gpt": Task(small_gpt, gpt_loss), "odd": Task(Odd, odd_loss),
         "recomputed": Task(Recomputed, odd_loss)}


# -------------------------------------------------------------------------------------------------
# in one process, and on W ranks
#
# A step has N = W x micro_steps micro batches. Rank r's a-th is number aW + r. Sums are made in the
# order of these numbers, and divided once, by N: so it does not matter which rank has which. What
# averages once in a step (DDP, stage 1, torch's DDP) adds a rank's own micro batches first.


def reference(task: Task, W: int, micro_steps: int, own_first: bool) -> dict[str, Tensor]:
    """-> {what: tensor}: of each step the gradients, averaged and clipped, and the parameters."""
    torch.manual_seed(0)
    module = task.module().to(device())
    parameters = dict(module.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    optimizer = adamw(trained.values())
    noted = {}
    for step in range(STEPS):
        sums = [{} for _ in range(W if own_first else 1)]  # of each rank, or one of all
        for number in range(W * micro_steps):
            task.loss(module, step, number).backward()
            add_gradients(trained, sums[number % len(sums)])  # if of each rank: of number % W
        for name, p in trained.items():
            total = sums[0][name]
            for of_rank in sums[1:]:
                total = total + of_rank[name]
            p.grad = total / (W * micro_steps)
        clip([p.grad for p in trained.values()])
        note(noted, step, "gradient of ", {name: p.grad for name, p in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
        note(noted, step, "", parameters)
    return noted


def add_gradients(trained, sums):
    for name, p in trained.items():
        sums[name] = sums[name] + p.grad if name in sums else p.grad
        p.grad = None


def clip(gradients: list[Tensor]) -> Tensor:
    """Multiply them by min(1, MAX_NORM / norm) -> this factor. The norm is computed in float64, and
    the factor rounded to fp32 once."""
    squares = [gradient.double().square().sum() for gradient in gradients]
    norm = torch.stack(squares).sum().sqrt()
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0).float()
    for gradient in gradients:
        gradient.mul_(factor)
    return factor


def adamw(parameters, kind=torch.optim.AdamW, **options):
    """Not fused: on a CPU that kernel rounds the end of a tensor differently, so a shard would not
    get the bits of the whole."""
    return kind(parameters, lr=0.01, fused=False, foreach=device().type != "cpu", **options)


def note(noted, step, kind, tensors):
    for name, t in tensors.items():
        noted[f"step {step + 1}, {kind}{name}"] = t.detach().clone()


def distributed(task: Task, wrapper: str, micro_steps: int, **options) -> dict[str, Tensor]:
    """-> as `reference`. options: of the wrapper."""
    W, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)  # all have to take rank 0's parameters
    model, optimizer = wrapped(task, wrapper, **options)
    noted = {}
    for step in range(STEPS):
        for micro_step in range(micro_steps):
            is_held_back = wrapper in OWN_FIRST and micro_step < micro_steps - 1
            with model.no_sync() if is_held_back else nullcontext():
                task.loss(model, step, micro_step * W + rank).backward()
        for p in model.parameters():
            if p.grad is not None:  # torch's wrappers have taken the mean over ranks themselves
                p.grad /= W * micro_steps if wrapper in OURS else micro_steps
        clip_whole(model)
        note(noted, step, "gradient of ", whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        note(noted, step, "", whole_parameters(model))
    return noted


# -------------------------------------------------------------------------------------------------
# wrappers, ours and torch's


def wrapped(task: Task, wrapper: str, param_dtype: torch.dtype | None = None):
    """-> a model, and its optimizer."""
    module = task.module().to(device())
    units = units_of(task, module)
    if wrapper == "ddp":
        model = DDP(module, bucket_cap_mb=SMALL_MB)
    elif wrapper in OURS:
        model = OURS[wrapper](module, units=units, bucket_cap_mb=SMALL_MB, param_dtype=param_dtype)
    elif wrapper == "fsdp2":
        model = fsdp2(module, units, param_dtype)
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=SMALL_MB)
    if wrapper in OURS:
        model.set_gradient_divide_factor(1)  # sums, which are divided once
    trained = [p for p in model.parameters() if p.requires_grad]
    if wrapper == "torch zero1":
        return model, adamw(trained, ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    return model, adamw(trained)


def units_of(task: Task, module: nn.Module) -> list[nn.Module]:
    return find_units(module) if task.units is None else list(task.units(module))


def fsdp2(module, units, param_dtype):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of outputs that are views
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)  # which is left to the user
    for part in (*units, module):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype, torch.float32))
    return module


def whole(t):
    """All of a tensor of FSDP2, of which this rank has a shard; any other one is whole."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def whole_parameters(model) -> dict[str, Tensor]:
    if isinstance(model, (DDP, Zero1)):  # Zero2 and Zero3 derive from Zero1
        return dict(model.full_parameters())
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def whole_gradients(model) -> dict[str, Tensor]:
    """Gradients of our shards are put in the place of the shards for a moment, and gathered as
    these are."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not isinstance(model, Zero1):
        return {name.removeprefix("module."): whole(p.grad) for name, p in trained.items()}
    kept = {name: p.detach().clone() for name, p in trained.items()}
    for p in trained.values():
        p.data.copy_(p.grad)
    gradients = {name: p.clone() for name, p in model.full_parameters() if name in trained}
    for name, p in trained.items():
        p.data.copy_(kept[name])
    return gradients


def clip_whole(model):
    if isinstance(model, (DDP, Zero1)):
        model.clip_grad_norm_(MAX_NORM)
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    factor = clip([whole(gradient) for gradient in gradients])
    for gradient in gradients:
        if hasattr(gradient, "to_local"):  # FSDP2's: what was clipped is a copy of all of it
            gradient.to_local().mul_(factor)


# -------------------------------------------------------------------------------------------------
# checks: all ranks run one at once, as in training


def bits_of_one_process(wrapper: str, micro_steps: int, tasks: list[str]):
    """Sums are divided once, by all. (The mean over ranks is that of the other checks.)"""
    W = dist.get_world_size()
    is_equal = same_bits if wrapper in OURS or W <= 2 else close
    for name in tasks:
        task = task_of(name)
        expected = reference(task, W, micro_steps, wrapper in OWN_FIRST)
        compare(expected, distributed(task, wrapper, micro_steps), name, is_equal)


def bits_of_fsdp2_in_bf16(wrapper: str):
    """Parameters and gradients are bf16, shards, sums and the optimizer fp32."""
    expected = distributed(TASKS["gpt"], "fsdp2", 1, param_dtype=torch.bfloat16)
    actual = distributed(TASKS["gpt"], wrapper, 1, param_dtype=torch.bfloat16)
    compare(expected, actual, "gpt")


def bits_of_the_oracle(wrapper: str):
    """Its program ends on the same hash in this mode and in our wrapper."""
    expected, _, _ = oracle.train(wrapper.removeprefix("zero"), 1, device())
    torch.manual_seed(0)
    model = OURS[wrapper](oracle.Model().to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    for step in range(4):
        oracle.backward_of(model.module, step, dist.get_rank(), micro_steps=1)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for _, p in model.full_parameters():
        digest.update(p.cpu().numpy().tobytes())
    actual = digest.hexdigest()[:8]
    if actual != expected:
        raise AssertionError(f"the hash is {actual}, that of oracle.py is {expected}")


def formulas_of_the_paper(wrapper: str, micro_steps: int):
    """For Psi parameters, in fp32 with Adam, a rank holds after a step 16 Psi; 8 Psi + 8 Psi/W;
    4 Psi + 12 Psi/W; 16 Psi/W bytes. In a step of n backwards it sends 2; 2; n + 1; at most 3 n, in
    (W-1)/W Psi elements: when the backward begins, the root and the last two units are still whole,
    so only the others come again."""
    W, n = dist.get_world_size(), micro_steps
    before = bytes_alive()
    model, optimizer = wrapped(TASKS["gpt"], wrapper)
    plain = small_gpt()
    psi = sum(p.numel() for p in plain.parameters())
    again = sum(p.numel() for p in plain.blocks[0].parameters()) / psi  # the first of three
    del plain
    for step in range(2):  # the first one agrees on the order of use
        optimizer.zero_grad()
        with elements_sent() as sent:
            for micro_step in range(n):
                is_held_back = wrapper in OWN_FIRST and micro_step < n - 1
                with model.no_sync() if is_held_back else nullcontext():
                    gpt_loss(model, step, micro_step).backward()
            optimizer.step()  # the next forward gathers what it changes, so step 2 has all of one
    held = (bytes_alive() - before) / psi
    sends = sum(sent) / psi / (1 - 1 / W)
    expected = {"ddp": (16, 2), "zero1": (8 + 8 / W, 2), "zero2": (4 + 12 / W, n + 1),
                "zero3": (16 / W, n * (2 + again))}
    facts = "bytes a parameter held", "(W-1)/W Psi elements sent"
    for actual, right, fact in zip((held, sends), expected[wrapper], facts):
        if abs(actual / right - 1) > 0.02:
            raise AssertionError(f"{actual:.3f} {fact}, expected {right:.3f}")


def bytes_alive() -> int:
    """Of all tensors that Python can reach, each memory once."""
    time.sleep(0.05)  # for threads to let go of what they have sent
    gc.collect()
    memories = {}
    for t in gc.get_objects():
        if type(t) in (Tensor, nn.Parameter):
            memories[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(memories.values())


@contextmanager
def elements_sent():
    """A context -> a list of what this rank sends, call by call: by gloo's messages and all-reduce,
    and by the collectives of accelerators, in which a rank's own part stays."""
    share = 1 - 1 / dist.get_world_size()
    parts = dict(send=1, allreduce=2 * share, alltoall_base=share, all_to_all_single=share,
                 _allgather_base=share, all_gather_single=share)
    sent = []

    def counted(name, real):
        def call(group, tensors, *arguments, **options):
            tensors_of_call = [tensors] if torch.is_tensor(tensors) else tensors
            sent.append(parts[name] * sum(t.numel() for t in tensors_of_call))
            return real(group, tensors, *arguments, **options)
        return call

    names = [name for name in parts if hasattr(dist.ProcessGroup, name)]  # torch has renamed some
    taps = {name: counted(name, getattr(dist.ProcessGroup, name)) for name in names}
    with mock.patch.multiple(dist.ProcessGroup, **taps):
        yield sent


def same_bits(a: Tensor, b: Tensor) -> bool:
    """-0 is 0, and nan is like nothing."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def compare(expected: dict[str, Tensor], actual: dict[str, Tensor], where: str = "",
            is_equal: Callable = same_bits) -> None:
    """AssertionError unless they are equal. It says how the first one that is not differs: the
    first in the order of training, as others follow from it."""
    if expected.keys() != actual.keys():
        raise AssertionError(f"{where}: {expected.keys() ^ actual.keys()}")
    wrong = [what for what in expected if not is_equal(expected[what], actual[what])]
    if not wrong:
        return
    right, found = expected[wrong[0]], actual[wrong[0]]
    if right.shape != found.shape or right.dtype != found.dtype:
        fact = f"is {found.shape} {found.dtype}, expected is {right.shape} {right.dtype}"
    elif right.isnan().any():
        fact = "has nan in one process, too"
    elif found.isnan().any():
        fact = "has nan: it was read before it was there, or never written"
    else:
        ratio = found.double().norm() / right.double().norm()
        most = (found.double() - right.double()).abs().max()
        fact = f"has norm {ratio:.4f} x expected, largest difference {most:.2g}"
    raise AssertionError(f"{where}: {len(wrong)} of {len(expected)} tensors differ; the first, "
                         f"{wrong[0]}, {fact}")


# -------------------------------------------------------------------------------------------------
# ranks


class Failure(Exception):
    """What went wrong on some rank, in a line."""


def run(W: int, function: Callable, *arguments, kind: str = "cpu", seconds: float = 60) -> list:
    """function(*arguments) on W ranks, each a process of its own -> [what rank 0 returns, ...].
    Failure, if a rank dies, raises, or is not ready within seconds: of the first to raise.

    Ranks are forked, which is fast. So this process must not use an accelerator."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(W):
            words = rank, W, folder, kind, function, arguments
            processes.append(context.Process(target=be_rank, args=words))
            processes[-1].start()
        files = [pathlib.Path(folder, str(rank)) for rank in range(W)]
        end_s = time.monotonic() + seconds
        alive = processes
        try:
            while alive and time.monotonic() < end_s:
                time.sleep(0.002)
                alive = [process for process in processes if process.is_alive()]
                if any(process.exitcode for process in processes):  # others may wait for it
                    end_s = min(end_s, time.monotonic() + 1)
            # Those that have not answered. The others wait for them, or raise as they are killed.
            late = []
            for rank, process in enumerate(processes):
                if process in alive and not files[rank].exists():
                    late.append(rank)
        finally:  # also if this process is told to end
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        answers, errors = [], []
        for rank, process in enumerate(processes):
            if rank in late:
                errors.append((float("inf"), f"rank {rank} hangs: killed after {seconds} s"))
            elif files[rank].exists():
                ended_s, error, answer = pickle.loads(files[rank].read_bytes())
                answers.append(answer)
                if error is not None:
                    errors.append((ended_s, f"rank {rank}: {error}"))
            else:  # others only say that it is gone
                errors.append((0, f"rank {rank} has died, with status {process.exitcode}"))
    if errors:
        _, text = min(errors)
        raise Failure(text)
    return answers


def be_rank(rank, W, folder, kind, function, arguments):
    gc.freeze()  # a collection would touch, and so copy, all that the parent has
    torch.set_num_threads(1)
    # An accelerator adds in one order. And new memory is nan: who reads what was never written is
    # seen.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    is_error = False
    try:
        backend = dist.get_default_backend_for_device(oracle.take_device(kind, rank, W))
        store = dist.FileStore(f"{folder}/store", W)
        dist.init_process_group(backend, store=store, rank=rank, world_size=W,
                                timeout=timedelta(seconds=20))
        answer = function(*arguments)
        message = pickle.dumps((time.monotonic(), None, answer))
    except BaseException as raised:  # also of sys.exit()
        is_error = True
        message = pickle.dumps((time.monotonic(), in_a_line(raised), None))
    file = pathlib.Path(folder, f"new{rank}")
    file.write_bytes(message)
    file.rename(f"{folder}/{rank}")  # so it is whole, or not there
    if not is_error:
        with suppress(RuntimeError):  # another rank has failed, and says so itself
            if backend == "gloo":
                dist.barrier()  # it may abort a rank if another one leaves before it
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(is_error)


def in_a_line(error: BaseException) -> str:
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if "site-packages" not in frame.filename and not frame.filename.startswith("<frozen"):
            frames.append(frame)
    text = " ".join(str(error).split())
    file = pathlib.Path(frames[-1].filename).name
    return f"{type(error).__name__}: {text} ({frames[-1].name}, {file}:{frames[-1].lineno})"


def device() -> torch.device:
    """Where modules of these ranks are: the first kind that their group serves. Torch says of gloo
    "cpu:gloo,cuda:gloo", and of NCCL "cuda:nccl"."""
    kind, *_ = dist.get_backend_config().split(":")
    return torch.device(kind)


# -------------------------------------------------------------------------------------------------
# the command


@functools.cache
def task_of(name: str) -> Task:
    """One of ours, or of a file for --module. That finds what is beside it, such as a model.py of
    its own, before ours, as if Python had started it."""
    if name in TASKS:
        return TASKS[name]
    sys.path.insert(0, os.path.dirname(name))
    for ours in ("oracle", "ddp", "model", "zero"):
        sys.modules.pop(ours, None)
    own = runpy.run_path(name, run_name="own")
    for function in ("module", "loss"):
        if function not in own:
            raise ValueError(f"it has no function {function}()")
    return Task(own["module"], own["loss"], own.get("units"))


def try_out(name: str):
    """Refuse a file's module if rows would say of it what is not true."""
    task = task_of(name)
    module = task.module().to(device())
    trained = {parameter: p for parameter, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("its module has no parameters to train")
    if not units_of(task, module):
        raise ValueError("its module has no ModuleList: write units(module), a list of its parts")
    for parameter, p in trained.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{parameter} is {p.dtype}: bits are promised in fp32")
    task.loss(module, 0, 0).backward()
    for parameter, p in trained.items():
        if p.grad is None:
            raise ValueError(f"the loss does not use {parameter}: freeze it")

    def loss_after_another_seed(model, step, number):
        torch.manual_seed(number)  # a loss that seeds its own random numbers is the same
        return task.loss(model, step, number)

    again = dataclasses.replace(task, loss=loss_after_another_seed)
    expected = reference(task, W=1, micro_steps=2, own_first=False)
    compare(expected, reference(again, W=1, micro_steps=2, own_first=False),
            "trained twice in one process (is module() built anew, and does the loss seed its "
            "random numbers?)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="only rows whose name has NAME in it, such as 'W=2 zero3'")
    parser.add_argument("--list", action="store_true", help="list claims, and names of rows")
    parser.add_argument("--module", metavar="FILE", help="train its module(), by its loss()")
    parser.add_argument("--device", metavar="KIND", default="cpu",
                        help="cpu, or an accelerator, such as cuda: ranks share it [cpu]")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # all, and not one row
    kinds = ["cpu"]
    if options.device != "cpu":
        [kinds] = run(1, oracle.kinds_of_devices)  # if this process asked, no rank could use one
    if options.device not in kinds:
        parser.exit(2, f"verify.py: --device {options.device} is not on this machine: choose "
                       f"{' or '.join(kinds)}\n")
    tasks = list(TASKS)
    if options.module is not None:
        tasks = [os.path.abspath(options.module)]
        try:
            run(1, try_out, *tasks, kind=options.device)
        except Failure as failure:
            parser.exit(2, f"verify.py: {options.module}: {failure}\n")
    begun_s = time.monotonic()
    last_claim = None
    failures = []
    n_rows = 0
    for claim, W, check, arguments in rows(tasks, options.module is not None):
        words = [str(value) for value in arguments if not isinstance(value, list)]
        name = f"{check.__name__} W={W} {' '.join(words)}"
        if options.names and not any(part in name for part in options.names):
            continue
        if claim != last_claim:
            print(f"\n{claim}\n")
        last_claim = claim
        n_rows += 1
        line = name
        if not options.list:
            try:
                run(W, check, *arguments, kind=options.device)
                line = f"ok      {name}"
            except Failure as failure:
                line = f"FAILED  {name}: {failure}"
                wrapper = arguments[0]
                if options.module is None or wrapper in OURS:
                    failures.append(line)
                else:  # torch's wrappers do not take every module
                    line = f"not counted  {name}: {failure}"
        print(line, flush=True)
    if n_rows == 0:
        parser.exit(2, f"verify.py: no row has a name with {' or '.join(options.names)}: --list "
                       f"shows names\n")
    if not options.list:
        print("", *failures, f"{n_rows - len(failures)} passed, {len(failures)} failed, "
              f"{time.monotonic() - begun_s:.0f} s", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""The test suite: every claim of this project is one function here, its docstring the claim.

    python verify.py                 # sampled rows of every check; exit status 1 on a failure
    python verify.py naive data      # checks whose name contains "naive" or "data"
    python verify.py --full          # whole cross products
    python verify.py --list

Replaces pytest with a distributed plugin. A check is an ordinary function that runs on every rank
of a group of W processes at once, as training does; it asserts, and returns (what was compared,
largest difference). Its decorator lists the rows it is run with. Groups are forked from a server
that has torch loaded, once per W, and reused: starting ranks costs more than most checks.

How it differs: a check that hangs, or whose rank dies, fails by name within its time limit; its
group is killed, a fresh one takes its place, and the rest still run. A largest difference of 0
stands for the same bits, since equality is asserted with torch.equal.

Cost: 1 + 2 + 3 + 4 processes of 205 MB each, of which 12 MB are their own and the rest is shared.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import copy
import datetime
import functools
import gc
import importlib.machinery
import inspect
import io
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import ddp
import model
import train
import zero
from ddp import (DDP, HierarchicalState, TopKState, average_gradients, clip_gradients_,
                 hierarchical_hook, top_k_hook, total_norm)
from model import GPT, GPTConfig, PRESETS, explicit_attention, peak_flops, rotate_half
from zero import Zero1, Zero2, Zero3

HERE = pathlib.Path(__file__).resolve().parent


# -------------------------------------------------------------------------------------------------
# the frame


class Skip(Exception):
    """Raised by a check that cannot run here; the message says what is missing."""


class CheckFailed(Exception):
    """What a group of ranks reports to the frame."""


def grid(**axes):
    """All combinations, a dict each: grid(W=(1, 2), clip=(True,)) has two."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def fork_server():
    """Processes forked from a server that has loaded this file, torch, and what any optimizer loads
    of it: under 0.1 s each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "train", "__main__"])
    return context


def check(sampled, full=None, limit_s=60):
    """Mark a function as a check. Each row is a dict of its arguments and of W, the world size."""
    def mark(function):
        function.sampled, function.full, function.limit_s = sampled, full or sampled, limit_s
        return function
    return mark


def rank_main(rank, W, folder, pipe):
    """A rank's life: join the group, then run the checks that arrive until the pipe closes."""
    os.setpgid(0, 0)  # so that killing this rank also kills the programs that it started
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.distributed")  # FSDP2's, with a loss scaler
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    gc.collect()
    gc.freeze()  # `live_bytes` need not look at what importing torch has made
    store = dist.FileStore(f"{folder}/store", W)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=W,
                            timeout=datetime.timedelta(seconds=20))
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            torch.manual_seed(0)
            try:
                pipe.send(("passed", function(**arguments)))
            except Skip as skip:
                pipe.send(("skipped", str(skip)))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(str(error).split()) or where.line
                place = f"(line {where.lineno}, {where.name})"
                pipe.send(("failed", f"{type(error).__name__}: {text} {place}"))


class Ranks:
    """W processes in one gloo group, started at once, reused for any number of checks."""

    def __init__(self, W):
        self.folder = tempfile.mkdtemp()
        self.pipes, self.processes = [], []
        for rank in range(W):
            ours, theirs = fork_server().Pipe()
            process = fork_server().Process(target=rank_main, args=(rank, W, self.folder, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, arguments, limit_s):
        """function(**arguments) on every rank -> their results. Raises Skip or CheckFailed.

        After CheckFailed the ranks are dead: some may have been inside a collective.
        """
        deadline, answers = time.monotonic() + limit_s, {}
        for pipe in self.pipes:
            with contextlib.suppress(ConnectionError):  # a rank that is dead is found below
                pipe.send((function, arguments))
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = multiprocessing.connection.wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join()
                    exitcode = self.processes[rank].exitcode
                    answers[rank] = ("failed", f"died with exit code {exitcode}")
            if any(kind == "failed" for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 1)  # the others' view, if they have one
        late = ("failed", f"no answer within {limit_s} s")
        kinds, values = zip(*(answers.get(rank, late) for rank in range(len(self.pipes))))
        if "failed" in kinds:
            self.kill()
            raise CheckFailed("; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values)
                                        if kinds[rank] == "failed"))
        if "skipped" in kinds:
            raise Skip(values[0])
        return values

    def kill(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # in case it has not come to lead its group yet
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only checks named like this")
    parser.add_argument("--full", action="store_true", help="whole cross products, not samples")
    parser.add_argument("--kills", type=int, default=2, metavar="N",
                        help="ranks to kill in kill_9_at_any_moment [2]")
    parser.add_argument("--list", action="store_true", help="list the checks and what they state")
    options = parser.parse_args()
    chosen = [f for name, f in globals().items() if hasattr(f, "sampled")
              and (not options.names or any(part in name for part in options.names))]
    if not chosen:
        parser.error(f"no check has a name with {' or '.join(options.names)}; --list shows them")
    if options.list:
        for f in chosen:
            print(f"{f.__name__:33s} {' '.join(inspect.getdoc(f).split())}")
        return 0
    for row in kill_9_at_any_moment.sampled:
        row["kills"] = options.kills
    # CPU only, one thread a rank and a silent profiler, also for all that is started from here;
    # nothing about the semaphores of ranks that are killed
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                      PYTHONWARNINGS="ignore::UserWarning:multiprocessing.resource_tracker")
    return 1 if run_checks(chosen, options.full) else 0


def run_row(function, W, arguments, groups):
    """One row of the table -> (outcome, what was compared, largest difference)."""
    try:
        groups[W] = groups.get(W) or Ranks(W)
        results = groups[W].run(function, arguments, function.limit_s)
        return "passed", results[0][0], f"{max(difference for _, difference in results):.3g}"
    except Skip as skip:
        return "skipped", f"skipped: {skip}", "-"
    except CheckFailed as failure:
        del groups[W]  # dead; the next check gets fresh ones
        return "failed", f"FAILED {arguments or ''}\n    {failure}\n   ", "-"


def run_checks(chosen, full):
    """Run every row of the chosen checks, print the table, return the number of failures.

    Rows of W = 1, most of which wait for runs that they have started, go in a lane beside the rest.
    """
    rows = [(function, row) for function in chosen
            for row in (function.full if full else function.sampled)]
    lanes = [[(function, row) for function, row in rows if (row["W"] == 1) == alone]
             for alone in (True, False)]
    outcomes, groups = [], {}
    print(f"{'check':33s} W  {'compared':56s} {'largest difference':>18s} seconds")

    def run_lane(lane):
        for function, row in lane:
            arguments = {name: value for name, value in row.items() if name != "W"}
            start_s = time.monotonic()
            outcome, compared, difference = run_row(function, row["W"], arguments, groups)
            outcomes.append(outcome)
            print(f"{function.__name__:33s} {row['W']}  {compared:56s} {difference:>18s} "
                  f"{time.monotonic() - start_s:7.1f}", flush=True)

    pool = concurrent.futures.ThreadPoolExecutor(2)
    try:
        list(pool.map(run_lane, lanes))
    finally:
        for lane in lanes:
            lane.clear()  # after Ctrl-C they end with the row that they are in, which fails:
        for ranks in list(groups.values()):
            ranks.kill()
    skipped = f", {outcomes.count('skipped')} skipped" if "skipped" in outcomes else ""
    print(f"{outcomes.count('passed')} passed, {outcomes.count('failed')} failed{skipped}")
    return outcomes.count("failed")


# -------------------------------------------------------------------------------------------------
# what checks share


def same_bits(ours, theirs):
    """Assert that two {name: tensor} agree bit for bit; return 0.0, the largest difference."""
    assert ours.keys() == theirs.keys(), f"names differ: {ours.keys() ^ theirs.keys()}"
    for name in ours:
        if not torch.equal(ours[name], theirs[name]):
            difference = (ours[name] - theirs[name]).abs().max().item()
            raise AssertionError(f"{name} differs by up to {difference:.3g}")
    return 0.0


def whole(model):
    """{plain model's name: whole parameter, copied}. A collective if sharded."""
    names = (name.removeprefix("module.") for name, _ in model.named_parameters())
    return {name: p.detach().clone() for name, p in zip(names, train.full_parameters(model))}


def small_config(**options):
    """Options of a run that takes milliseconds a step."""
    return train.Config(**{**dict(mode="single", max_steps=3, warmup_steps=1, lr=1e-2, min_lr=1e-3,
                                  global_batch_size=4, micro_batch_size=1), **options})


def small_model(**options):
    sizes = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
    return GPT(GPTConfig(**{**sizes, **options}))


def small_batches(config, vocab_size=61, block_size=16):
    tokens = np.random.default_rng(7).integers(0, vocab_size, 2000)
    return train.Batches(tokens, block_size, config.global_batch_size, config.seed)


def here(mode):
    """The Worker of this rank in the running group; mode single stands alone on every rank."""
    if mode == "single":
        return train.Worker(0, 1, torch.device("cpu"))
    return train.Worker(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


class Run:
    """A training run of train.py's own pieces, a step at a time, on the small model."""

    def __init__(self, config, batches=None):
        self.config, self.worker = config, here(config.mode)
        self.batches = batches or small_batches(config)
        self.model = train.wrap(small_model(), config, self.worker)
        self.optimizer = train.make_optimizer(self.model, config)
        self.scaler = train.make_scaler(config, self.worker)
        self.steps_done = 0

    def step(self):
        """One step -> the Gradients that it found."""
        step, self.steps_done = self.steps_done, self.steps_done + 1
        found = train.find_gradients(self.model, self.optimizer, self.scaler, self.batches, step,
                                     self.config, self.worker)
        train.update(self.optimizer, self.scaler, step, self.config, found)
        return found


def same_runs(ours, theirs, steps):
    """Assert that two configs give the same parameters after every step; return the difference."""
    a, b = Run(ours), Run(theirs)
    same_bits(whole(a.model), whole(b.model))
    before = whole(a.model)
    for _ in range(steps):
        a.step(), b.step()
        same_bits(whole(a.model), whole(b.model))
    moved = max((whole(a.model)[name] - p).abs().max().item() for name, p in before.items())
    assert moved > 1e-3, "nothing was trained, so nothing was compared"
    return 0.0


def call_main(argv, folder, environment, plant):
    """train.main(argv) in this process, as `python train.py` would run it; output goes to files."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    os.environ.update(environment)
    sys.argv = ["train.py", *map(str, argv)]
    gc.freeze()  # what the server has loaded: to go through it at the end takes 0.15 s
    if plant is not None:
        plant()
    status = train.main()
    assert not dist.is_initialized(), "the process group outlived the run"
    sys.exit(status)


def new_store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Launch:
    """W ranks that run train.py as torchrun would start them, or, with W = 1, as python would. They
    are forked from the server, which takes a tenth of torchrun's time.

    argv: flags of all ranks, or a function from rank to flags. plant: called on every rank before
    train.py is, to plant a fault. TORCHELASTIC_RUN_ID and store: of the torchrun that starts them
    again, which keeps both.
    """

    def __init__(self, W, argv, plant=None, store=None, **environment):
        self.W, self.folder, self.processes = W, pathlib.Path(tempfile.mkdtemp()), []
        if W > 1:
            self.store = store or new_store()
            environment |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(self.store.port),
                                TORCHELASTIC_USE_AGENT_STORE="True", WORLD_SIZE=str(W),
                                LOCAL_WORLD_SIZE=str(W))
        for rank in range(W):
            own = dict(RANK=str(rank), LOCAL_RANK=str(rank)) if W > 1 else {}
            (self.folder / str(rank)).mkdir()
            process = fork_server().Process(target=call_main, args=(
                argv(rank) if callable(argv) else argv, str(self.folder / str(rank)),
                environment | own, plant))
            process.start()
            self.processes.append(process)

    def stdout(self, rank=0):
        return self._read(rank, "stdout")

    def stderr(self, rank=0):
        return self._read(rank, "stderr")

    def _read(self, rank, name):
        path = self.folder / str(rank) / name
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, limit_s=30):
        """Exit codes by rank; as torchrun, sends SIGTERM to the others once a rank has failed."""
        deadline, told = time.monotonic() + limit_s, False
        while any(process.exitcode is None for process in self.processes):
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"ranks ran for more than {limit_s} s: {self.stderr()}")
            if not told and any(process.exitcode for process in self.processes):
                told = True
                for process in self.processes:
                    if process.exitcode is None:
                        process.terminate()
            time.sleep(0.01)
        return [process.exitcode for process in self.processes]

    def wait_for(self, text, limit_s=30):
        """Wait until rank 0 has printed text."""
        deadline = time.monotonic() + limit_s
        while text not in self.stdout():
            ended = all(process.exitcode is not None for process in self.processes)
            if ended or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{text!r} was not printed: {self.stderr()}")
            time.sleep(0.01)

    def kill(self):
        for process in self.processes:
            process.kill()

    def result(self, limit_s=30):
        """The RESULT of a run that has to end well."""
        codes = self.wait(limit_s)
        assert not any(codes), f"exit codes {codes}: {self.stderr()}"
        last = self.stdout().splitlines()[-1]
        assert last.startswith("RESULT "), last
        return json.loads(last.removeprefix("RESULT "))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_main(argv, W=1, limit_s=30, **options):
    """`python train.py argv`, or W ranks of it -> (the worst exit code, stdout, stderr) of rank 0.

    options: of Launch.
    """
    with Launch(W, argv, **options) as launch:
        codes = launch.wait(limit_s)
        return max(codes, key=abs), launch.stdout(), launch.stderr()


def tiny(folder, **options):
    """Flags of a tiny run in folder, of four micro batches a step."""
    defaults = dict(out_dir=folder, global_batch_size=4, max_steps=4, save_interval=1,
                    eval_steps=0, sample_tokens=0)
    return [*TINY, *itertools.chain(*((f"--{name}", value)
                                      for name, value in {**defaults, **options}.items()))]


def finish(W, argv, **options):
    """RESULT of a run that has to end well."""
    with Launch(W, argv, **options) as launch:
        return launch.result()


def refused(argv, text, W=1, status=2, **options):
    """Assert that a run ends on all ranks with one line of rank 0 that matches text."""
    with Launch(W, argv, **options) as launch:
        codes = launch.wait()
        assert codes == [status] * W, (codes, launch.stderr())
        assert re.fullmatch(r"train\.py: .*\n", launch.stderr()), launch.stderr()
        assert re.search(text, launch.stderr()), f"{text}: {launch.stderr()}"


def on_both_cores(function, *columns):
    """[function(*row) for row in zip(*columns)], two at a time, for functions that start runs."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, *columns))


# -------------------------------------------------------------------------------------------------
# the frame, checked by itself


def hang():
    time.sleep(60)


def die_on_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fail_on_rank_1():
    assert dist.get_rank() != 1, "planted"


def answer():
    return "an answer", float(dist.get_rank())


@check([dict(W=1)])
def frame_survives_bad_checks():
    """A check that hangs, whose rank dies or that fails is named in time; a fresh group goes on."""
    cases = ((hang, 1, "rank 0: no answer within 1 s; rank 1: no answer within 1 s"),
             (die_on_rank_1, 20, "rank 1: died with exit code -9"),
             (fail_on_rank_1, 20, "rank 1: AssertionError: planted"))
    for function, limit_s, expected in cases:
        ranks, start_s = Ranks(2), time.monotonic()
        assert ranks.run(answer, {}, 20) == (("an answer", 0.0), ("an answer", 1.0))
        try:
            ranks.run(function, {}, limit_s)
        except CheckFailed as failure:
            assert expected in str(failure), failure
        else:
            raise AssertionError(f"{function.__name__} passed")
        assert time.monotonic() - start_s < limit_s + 5
        assert not any(process.is_alive() for process in ranks.processes)
    return "hang, kill -9 and a failed assertion in groups of two", 0.0


# -------------------------------------------------------------------------------------------------
# model.py


@check([dict(W=1)])
def model_rotary():
    """rotate_half([1,2,3,4]) is [-3,-4,1,2]; scores depend on the distance of positions alone."""
    assert rotate_half(torch.tensor([1, 2, 3, 4])).tolist() == [-3, -4, 1, 2]
    q, k = torch.randn(2, 1, 1, 1, 8).double()
    cos, sin = (t.double() for t in model.rotary_tables(32, 8, 10000.0, "cpu"))
    turned_q, turned_k = (model.apply_rotary(t.expand(1, 1, 32, 8), cos, sin)[0, 0] for t in (q, k))
    scores = turned_q @ turned_k.T  # (32, 32)
    worst = max(scores.diagonal(d).std().item() for d in range(-30, 31))
    assert worst < 1e-6 < scores[:, 0].std()
    return "q . k along each diagonal of 32 x 32 positions", worst


@check([dict(W=1)])
def model_attention():
    """The explicit attention is within 1e-5 of scaled_dot_product_attention, gradients too."""
    outputs = []
    for attention in ("sdpa", "explicit"):
        gpt = small_model(attention=attention)
        idx = torch.arange(32).view(2, 16)
        with mock.patch.object(model, "explicit_attention", wraps=explicit_attention) as spy:
            logits, loss = gpt(idx, idx)
        assert spy.called == (attention == "explicit")
        loss.backward()
        outputs.append([logits, *(p.grad for p in gpt.parameters())])
    difference = max((a - b).abs().max().item() for a, b in zip(*outputs))
    assert difference < 1e-5
    return "logits and all gradients, 4 heads over 2 key/value heads", difference


@check([dict(W=1)])
def model_is_a_llama():
    """Logits are those of a LlamaForCausalLM by its definition, with 4 and with 2 key/value heads.
    """
    idx, worst = torch.arange(32).view(2, 16), 0.0
    for n_kv_head, tied in ((4, True), (2, False)):
        gpt, weights = small_model(n_kv_head=n_kv_head, tied=tied), {}
        for p in gpt.parameters():
            if p.dim() == 1:  # which begin as ones
                torch.nn.init.uniform_(p, 0.5, 1.5)
        for name, parts in model.llama_names(gpt.config).items():
            rows = gpt.get_parameter(name).detach().split(list(parts.values()))
            weights |= dict(zip(parts, rows))
        expected = llama_logits(weights, model.to_llama_config(gpt.config), idx)
        worst = max(worst, (gpt(idx)[0] - expected).abs().max().item())
    assert worst < 1e-5
    return "logits, from RMSNorm to SwiGLU", worst


@check([dict(W=1)])
def model_is_causal():
    """A token never changes the logits of the tokens before it, and does change its own."""
    gpt, idx = small_model(), torch.randint(61, (1, 16))
    changed = idx.clone()
    changed[0, 9] = (idx[0, 9] + 1) % 61
    a, b = gpt(idx)[0], gpt(changed)[0]
    assert a.shape == (1, 16, 61) and torch.equal(a[:, :9], b[:, :9])
    assert (a[:, 9:] - b[:, 9:]).abs().amax(-1).min() > 1e-6
    return "logits before and from a changed token on", 0.0


@check([dict(W=1)])
def model_presets():
    """Each preset has the size its name promises, and building it on meta allocates nothing."""
    sizes = {"gpt2": (124e6, 0.02), "gpt2-medium": (355e6, 0.02), "gpt2-large": (774e6, 0.02),
             "gpt2-xl": (1558e6, 0.02), "1b": (1e9, 0.1), "7b": (6.7e9, 0.05)}
    before, worst = here("single").peak_mem_bytes(), 0.0
    for name, (expected, tolerance) in sizes.items():
        with torch.device("meta"):
            gpt = GPT(GPTConfig(vocab_size=50257, **PRESETS[name]))
        n = sum(p.numel() for p in gpt.parameters())
        worst = max(worst, abs(n / expected - 1))
        assert abs(n / expected - 1) < tolerance, f"{name} has {n:,} parameters"
    assert here("single").peak_mem_bytes() - before < 50e6
    return "parameters at vocabulary 50257, relative", worst


@check([dict(W=1)])
def model_init_by_name():
    """Weights come from (seed, name): not from the random state, the order, or meta."""
    gpt = small_model()
    torch.manual_seed(1)
    with torch.device("meta"):
        late = small_model()
    assert all(p.is_meta for p in late.parameters())
    late.to_empty(device="cpu").init_weights()
    assert late.lm_head.weight is late.wte.weight
    same_bits(whole(gpt), whole(late))
    with torch.device("meta"):  # the default device of the caller does not matter either
        again = small_model()
        again.to_empty(device="cpu").init_weights()
    same_bits(whole(gpt), whole(again))
    # of a deeper model the common matrices are the same up to the depth's factor on residual ones
    deeper = whole(small_model(n_layer=3))
    same_bits({n: p for n, p in whole(gpt).items() if "proj" not in n and "down" not in n},
              {n: deeper[n] for n in whole(gpt) if "proj" not in n and "down" not in n})
    other = whole(small_model(seed=1))
    assert not any(torch.equal(p, other[n]) for n, p in whole(gpt).items() if p.dim() > 1)
    assert not torch.equal(gpt.blocks[0].attn.qkv.weight, gpt.blocks[1].attn.qkv.weight)
    return "all weights: whole, by way of meta, deeper, another seed", 0.0


@check([dict(W=1)])
def model_activation_checkpointing():
    """Recomputing blocks in the backward happens, and changes no bit of loss or gradients."""
    outputs, forwards = [], []
    for on in (False, True):
        gpt, calls = small_model(activation_checkpointing=on), []
        gpt.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
        idx = torch.arange(32).view(2, 16)
        loss = gpt(idx, idx)[1]
        loss.backward()
        outputs.append({"loss": loss.detach(), **{n: p.grad for n, p in gpt.named_parameters()}})
        forwards.append(len(calls))
    assert forwards == [1, 2]
    return "loss and all gradients with and without", same_bits(*outputs)


@check([dict(W=1)], limit_s=120)
def model_compile():
    """torch.compile per block keeps names and changes loss and gradients by rounding only."""
    if not shutil.which("c++") and not shutil.which("g++") and not shutil.which("clang++"):
        raise Skip("torch.compile on CPU needs a C++ compiler")
    outputs = []
    for on in (False, True):
        gpt = small_model(n_layer=1)
        if on:
            gpt.compile_blocks()
            assert hasattr(gpt.blocks[0].forward, "_torchdynamo_orig_callable")
        idx = torch.arange(32).view(2, 16)
        loss = gpt(idx, idx)[1]
        loss.backward()
        outputs.append({"loss": loss.detach(), **{n: p.grad for n, p in gpt.named_parameters()}})
    assert outputs[0].keys() == outputs[1].keys()
    difference = max((a - b).abs().max().item() for a, b in zip(*map(dict.values, outputs)))
    assert difference < 1e-5
    return "loss and all gradients with and without", difference


@check([dict(W=1)])
def model_generate():
    """generate goes past block_size, by its generator, in the top k; temperature 0 is argmax."""
    gpt, prompt = small_model(), torch.tensor([[5, 6, 7]])
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    texts = [gpt.generate(prompt, 30, top_k=5, generator=generator) for generator in generators]
    assert texts[0].shape == (1, 33) and torch.equal(texts[0][:, :3], prompt)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    greedy = gpt.generate(prompt, 1, temperature=0)[0, -1]
    assert greedy == gpt(prompt)[0][0, -1].argmax()
    for i in range(16, 33):
        assert texts[0][0, i] in gpt(texts[0][:, i - 16:i])[0][0, -1].topk(5).indices
    return "33 tokens by seed, greedy and top-k choices", 0.0


@check([dict(W=1)])
def model_flops():
    """FLOPs per token are 6 N + 12 L H Q T; an unknown device has no peak, so its MFU is null."""
    with torch.device("meta"):
        gpt = GPT(GPTConfig(vocab_size=50257, **PRESETS["gpt2"]))
    N = sum(p.numel() for p in gpt.parameters())
    assert gpt.flops_per_token() == 6 * N + 12 * 12 * 12 * 64 * 1024
    peaks = {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12,
             "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12,
             "NVIDIA GeForce RTX 3090": None}
    assert {name: peak_flops(name) for name in peaks} == peaks
    return "gpt2 against PaLM's formula, six device names", 0.0


# -------------------------------------------------------------------------------------------------
# data


@check([dict(W=1)])
def data_order():
    """No sample twice in an epoch, equal steps, one order for every world size, resume by step."""
    n, T, m = 1000, 4, 2
    tokens = np.arange(n * T + 1)
    batches = train.Batches(tokens, T, global_batch_size=24, seed=3)
    assert (batches.n_blocks, batches.steps_per_epoch) == (1000, 41)
    orders = {}
    for W in (1, 2, 3, 4):
        seen = []
        for step in range(41):
            for a in range(24 // (m * W)):
                for rank in range(W):
                    x, y = batches.micro_batch(step, a * W + rank, m)
                    assert torch.equal(y, x + 1) and x.shape == (m, T)
                    seen += (x[:, 0] // T).tolist()
        assert len(set(seen)) == len(seen) == 41 * 24, f"a sample came twice at W={W}"
        orders[W] = seen
    assert all(order == orders[1] for order in orders.values())
    resumed = train.Batches(tokens, T, 24, seed=3)  # as after a restart at step 60 of 41 + 19
    assert all((resumed.samples(step) == batches.samples(step)).all() for step in (60, 40, 100))
    assert (batches.samples(0) != batches.samples(41)).any(), "two epochs have one order"
    assert (batches.samples(0) != train.Batches(tokens, T, 24, seed=4).samples(0)).any()
    return "984 samples of an epoch at W = 1, 2, 3, 4; steps 40, 60, 100", 0.0


@check([dict(W=W) for W in (1, 2, 3)])
def data_is_dealt_micro_step_major():
    """In micro-step a, rank r trains on samples [(a W + r) m, (a W + r + 1) m) of the batch."""
    rank, W, m = dist.get_rank(), dist.get_world_size(), 2
    run, seen = Run(small_config(mode="naive", micro_batch_size=m, global_batch_size=6 * W)), []
    run.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run.step()
    tokens = torch.from_numpy(run.batches.tokens)
    for a in range(3):
        chosen = run.batches.samples(0)[(a * W + rank) * m:(a * W + rank + 1) * m]
        assert torch.equal(seen[a], torch.stack([tokens[i * 16:(i + 1) * 16] for i in chosen]))
    return f"{len(seen)} micro batches a rank", 0.0


@check([dict(W=1)])
def data_stdlib():
    """The default corpus is the same text each time; tokens give it back; the cache is used."""
    text, names = train.stdlib_text(), sorted(sys.stdlib_module_names)
    for order in (names, names[::-1]):  # a set of names is ordered differently in every process
        with mock.patch.object(sys, "stdlib_module_names", order):
            assert text == train.stdlib_text()
    assert len(text) > 5e6 and "def urlopen(" in text
    tokenizer = train.load_tokenizer("bytes")
    assert tokenizer.n_vocab == 257
    with tempfile.TemporaryDirectory() as folder:
        sample = "naïve €\n" + train.END_OF_TEXT + text[:10000]
        with contextlib.redirect_stdout(io.StringIO()) as progress:
            tokens = train.tokenize(sample, tokenizer, folder, "sample")
        assert "tokenizing sample" in progress.getvalue()
        assert tokens.max() == 256 and tokenizer.decode(tokens.tolist()) == sample
        assert len(os.listdir(folder)) == 2, "files are left over"
        [cache] = pathlib.Path(folder).glob("*.npy")
        for size, again in ((cache.stat().st_size, False), (5000, True), (10, True)):
            os.truncate(cache, size)
            with contextlib.redirect_stdout(io.StringIO()) as progress:
                tokens = train.tokenize(sample, tokenizer, folder, "sample")
            assert bool(progress.getvalue()) == again, f"{size} bytes of cache"
            assert tokenizer.decode(tokens.tolist()) == sample
    return f"{len(text):,} characters; bytes of a text with accents", 0.0


@check([dict(W=1)])
def data_nanogpt_folder():
    """A folder with nanoGPT's train.bin and val.bin is read as it is, memory-mapped."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train", "val"):
            np.arange(200, dtype=np.uint16).tofile(f"{folder}/{name}.bin")
        config = train.Config(mode="single", dataset=folder, out_dir=folder)
        both = train.load_tokens(config, train.load_tokenizer("bytes"), 257)
        assert all(isinstance(t, np.memmap) and (t == np.arange(200)).all() for t in both)
    return "200 tokens in each of two files", 0.0


# -------------------------------------------------------------------------------------------------
# ddp.py


class Branches(torch.nn.Module):
    """Parameters that are frozen, unused by a flag, never used, or tied and transposed."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.inner.weight = torch.nn.Parameter(self.inner.weight.detach().T)  # strides (1, 5)
        self.outer.weight = self.inner.weight
        self.sometimes, self.never = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x, flag):
        x = self.frozen(self.outer(self.inner(x)))
        return self.sometimes(x) if flag else x


@check([dict(W=W) for W in (1, 2, 3, 4)])
def naive_any_module():
    """average_gradients gives the mean in rank order: frozen, tied, unused here or everywhere."""
    rank, W = dist.get_rank(), dist.get_world_size()
    per_rank = []
    for r in range(W):  # every rank computes all ranks' gradients, which is the reference
        torch.manual_seed(0)
        module = Branches()
        torch.manual_seed(r + 1)
        module(torch.randn(3, 5), flag=r == 0).sum().backward()
        per_rank.append({n: p.grad for n, p in module.named_parameters() if p.requires_grad})
        if r == rank:
            mine = module
    expected = {}
    for name, first in per_rank[0].items():
        if first is not None:
            expected[name] = first * (1 / W)
            for other in per_rank[1:]:
                share = 0 if other[name] is None else other[name] * (1 / W)
                expected[name] = expected[name] + share
    before = mine.inner.weight.grad
    average_gradients(mine)
    assert mine.never.weight.grad is None and mine.frozen.weight.grad is None
    assert mine.inner.weight.grad is before and before.stride() == (1, 5), "not in place"
    ours = {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}
    return f"{len(ours)} gradients against the sum by hand", same_bits(ours, expected)


class Tied(torch.nn.Module):
    """An embedding whose weight is the output layer's too: used first and last."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x, flag):
        return self.head(self.embedding((10 * x.abs()).long() % 11)).logsumexp(-1).mean()


class LowRank(torch.nn.Module):
    """A frozen layer with a trained correction of rank one."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(5, 5).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(5, 1, bias=False), torch.nn.Linear(1, 5, bias=False)

    def forward(self, x, flag):
        return (self.base(x) + self.up(self.down(x))).square().mean()


class MixedDtypes(torch.nn.Module):
    """Layers in fp32, fp64 and bf16."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(5, 5, dtype=dtype)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32))

    def forward(self, x, flag):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.square().mean()


class Normed(torch.nn.Module):
    """Batch normalisation, whose buffers follow the batches of a rank."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7),
                                          torch.nn.ReLU(), torch.nn.Linear(7, 2))

    def forward(self, x, flag):
        return self.layers(x).square().mean()


class Uneven(torch.nn.Module):
    """Parameters of 0, 1, 7 and 1001 elements and of no dimension; one layer called twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.wide = torch.nn.Linear(5, 5), torch.nn.Linear(5, 1001, bias=False)
        self.parts = torch.nn.ParameterList(torch.randn(shape) for shape in ((), (1,), (0,), (7,)))

    def forward(self, x, flag):
        x = self.layer(self.layer(x).tanh() * self.parts[0] + self.parts[1])
        return self.wide(x).square().mean() + self.parts[2].sum() + self.parts[3].exp().mean()


class Block(torch.nn.Module):
    """A residual layer with a frozen base, a correction of rank one, and a parameter never used."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(5, 5)
        self.base.weight.requires_grad_(False)
        self.norm, self.never = torch.nn.LayerNorm(5), torch.nn.Parameter(torch.ones(3))
        self.down, self.up = torch.nn.Linear(5, 1, bias=False), torch.nn.Linear(1, 5)

    def forward(self, x):
        x = self.norm(x)
        return x + (self.base(x) + self.up(self.down(x))).tanh()


class Blocks(torch.nn.Module):
    """Units in every way that a model may call them.

    order: block numbers in the order of the calls, a tuple for each value of the flag; tied: two
    blocks share a weight; at_once: blocks recomputed together; frozen: blocks without a gradient.
    """

    def __init__(self, order=((0, 1, 2, 3), (0, 1, 2, 3)), tied=False, at_once=0, frozen=()):
        super().__init__()
        self.order, self.at_once = order, at_once
        self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
        if tied:
            self.layers[3].up.bias = self.layers[1].up.bias
            self.layers[2].base = self.layers[0].base
        for i in frozen:
            self.layers[i].requires_grad_(False)

    def run(self, numbers, x):
        for i in numbers:
            x = self.layers[i](x)
        return x

    def forward(self, x, flag):
        x, order = self.first(x), self.order[flag]
        for i in range(0, len(order), self.at_once or len(order) or 1):
            numbers = order[i:i + (self.at_once or len(order))]
            x = (checkpoint(self.run, numbers, x, use_reentrant=False) if self.at_once
                 else self.run(numbers, x))
        return self.last(x).square().mean()


class Nested(torch.nn.Module):
    """Lists in lists, containers that are never called, a unit whose output is its own weight."""

    def __init__(self):
        super().__init__()
        self.stages = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(2)) for _ in range(3))
        self.pairs = torch.nn.ModuleList(
            torch.nn.ModuleDict(dict(a=torch.nn.Linear(5, 5), b=Block())) for _ in range(2))
        self.tables = torch.nn.ModuleList(Table() for _ in range(3))
        self.bare = torch.nn.Parameter(torch.ones(5))
        self.optional = torch.nn.ModuleList([torch.nn.Linear(5, 5), None])

    def forward(self, x, flag):
        for stage in self.stages:
            for layer in stage:
                x = layer(x).tanh()
        for pair in self.pairs:
            x = pair["b"](pair["a"](x))
        x = self.optional[0](x)
        scales, shifts = zip(*(table(3) for table in self.tables))
        return (x * sum(scales) * self.bare + sum(shifts)).square().mean()


class Functional(torch.nn.Module):
    """Parts called one by one from outside of forwards, recomputed too, and bare parameters."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(dict(a=torch.nn.Linear(5, 5), b=Block())) for _ in range(4))
        self.head, self.weight = torch.nn.Linear(5, 5), torch.nn.Parameter(torch.randn(5, 5))

    def part(self, layers, x):
        x = x @ self.weight
        for layer in layers:
            x = layer["b"](layer["a"](x))
        return self.head(x).tanh()

    def forward(self, x, flag):
        for layers in (self.layers[:3], self.layers[3:]):
            x = checkpoint(self.part, layers, x, use_reentrant=False)
        return x.square().mean()


class Table(torch.nn.Module):
    """Returns a view of its weight, and the weight itself, as learned positions do."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift = (torch.nn.Parameter(torch.randn(n, 5)) for n in (4, 1))

    def forward(self, n):
        return self.weight[:n], self.shift


class Expert(torch.nn.Module):
    """A sum of the experts that are asked for; there is a third, whom nobody asks."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, which):
        return x + sum(self.experts[i](x).tanh() for i in which)


class Experts(torch.nn.Module):
    """Six units, of which a rank uses some, of each the experts whose turn it is, and a shift."""

    def __init__(self, used, turns, frozen=()):
        super().__init__()
        self.first, self.used, self.turns = torch.nn.Linear(5, 5), used, turns
        self.layers = torch.nn.ModuleList(Expert() for _ in range(6))
        self.shift = torch.nn.Parameter(torch.ones(5))
        for i in frozen:
            self.layers[i].requires_grad_(False)

    def forward(self, x, flag):
        x = self.first(x)
        for layer, turn in list(zip(self.layers, self.turns))[self.used[flag]]:
            x = layer(x, turn[flag])
        # With the shift the backward begins with a gradient, without it with a saved tensor.
        return (x + self.shift if flag else x).sum()


class Scalar(torch.nn.Module):
    """Another module's output, or the loss of a small GPT, as a scalar."""

    def __init__(self, build):
        super().__init__()
        self.inner = build()

    def forward(self, x, flag):
        if isinstance(self.inner, GPT):
            idx = (10 * x.abs()).long()
            return self.inner(idx, idx.flip(0))[1]
        return self.inner(x, flag).square().mean()


ZOO = dict(gpt=lambda: Scalar(small_model), branches=lambda: Scalar(Branches), tied=Tied,
           recomputed=lambda: Scalar(lambda: small_model(activation_checkpointing=True)),
           low_rank=LowRank, mixed_dtypes=MixedDtypes, normed=Normed, uneven=Uneven)


# Shapes of models that matter where parameters are gathered unit by unit.
UNITS = dict(blocks=Blocks, tied_units=lambda: Blocks(tied=True), nested=Nested,
             frozen_units=lambda: Blocks(frozen=(0, 2)), at_once=lambda: Blocks(at_once=3),
             recomputed_singly=lambda: Blocks(at_once=1, tied=True),
             skipping=lambda: Blocks(((0, 1, 2, 3), (0, 3)), frozen=(1,)),
             functional=Functional, early_exit=lambda: Blocks(((0, 1, 2, 3), (0,))),
             exits=lambda: Experts((slice(6), slice(1)), 6 * [((0, 1), (0, 1))], frozen=(3,)),
             late=lambda: Experts((slice(4, 6), slice(5, 6)), 6 * [((0, 1), (0, 1))]),
             experts=lambda: Experts(2 * (slice(6),), 6 * [((0, 1), (0,))]),
             one_expert=lambda: Experts(2 * (slice(6),), [*5 * [((0, 1), (0, 1))], ((0,), (0, 1))]),
             no_block_at_all=lambda: Blocks(((0, 1, 2, 3), ())),
             out_of_order=lambda: Blocks(((3, 1, 0, 2, 2), (3, 1, 0, 2, 2))),
             again=lambda: Blocks(((0, 1, 0, 1, 2, 3), (0, 1, 0, 1, 2, 3))),
             large_vocabulary=lambda: Scalar(lambda: small_model(vocab_size=50257, n_embd=8)))


def zoo_module(name):
    torch.manual_seed(0)
    return {**ZOO, **UNITS}[name]()


def zoo_loss(call, step, micro_step, rank):
    """A scalar that depends on step, micro-step and rank, as do the branches it takes."""
    seed = 1000 * step + 100 * micro_step + rank
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    return call(x, (step + rank) % 2 == 0)


def snapshot(module):
    """{name: copy} of all parameters, buffers and existing gradients."""
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    gradients = {f"{n}.grad": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {name: t.detach().clone() for name, t in {**tensors, **gradients}.items()}


def adamw(named_parameters):
    return [torch.optim.AdamW([p for _, p in named_parameters if p.requires_grad], lr=1e-2,
                              fused=False)]


def sgd(named_parameters, lr=1e-2):
    return [torch.optim.SGD([p for _, p in named_parameters], lr=lr)]


def zoo_steps(module, call, accumulation=1, clip=0, one_process_for=None, steps=3, make=adamw):
    """Train; yield a snapshot per step, gradients included.

    call: module itself, averaged naively, or its wrapper. one_process_for: no averaging, but the
    micro batches of so many ranks are accumulated. make: named parameters -> optimizers.
    """
    optimizers = make(list(module.named_parameters()))
    for step in range(steps):
        for rank in range(one_process_for or 0):
            (zoo_loss(call, step, 0, rank) / one_process_for).backward()
        for micro_step in range(0 if one_process_for else accumulation):
            alone = call is module or micro_step == accumulation - 1
            with contextlib.nullcontext() if alone else call.no_sync():
                loss = zoo_loss(call, step, micro_step, dist.get_rank())
                (loss / accumulation).backward()
        if call is module and not one_process_for:
            average_gradients(module)
        if clip:
            clip_gradients_([p.grad for p in module.parameters() if p.grad is not None], clip)
        yield snapshot(module)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same_steps(ours, theirs):
    """Assert that two `zoo_steps` agree bit for bit after every step, and that they train."""
    ours, theirs = list(ours), list(theirs)
    for a, b in zip(ours, theirs, strict=True):
        same_bits(a, b)
    assert any(not torch.equal(ours[0][name], ours[-1][name]) for name in ours[0])


def wrapped(name, **options):
    """(module, its DDP): as drawn on rank 0, not here, since construction must make it so."""
    module = zoo_module(name)
    if dist.get_rank() > 0:
        for p in module.parameters():
            p.data.fill_(-7.0)
    return module, DDP(module, **{**dict(find_unused_parameters=True), **options})


def raises(kind, text, function, *arguments, **options):
    """Assert that function raises kind with a message that matches the pattern text; return it."""
    try:
        function(*arguments, **options)
    except kind as error:
        assert re.search(text, str(error)), f"another message: {error}"
        return str(error)
    raise AssertionError(f"nothing was raised that matches {text!r}")


@check([dict(W=W) for W in (1, 2, 3, 4)])
def collectives_add_in_rank_order():
    """reduce_scatter, all_gather and all_reduce give the sum in rank order, at every place."""
    rank, W = dist.get_rank(), dist.get_world_size()
    contributions = [torch.randn(50, generator=torch.Generator().manual_seed(r)) for r in range(W)]
    by_hand = contributions[0].clone()
    for c in contributions[1:]:
        by_hand += c
    backwards = contributions[-1].clone()
    for c in contributions[-2::-1]:
        backwards += c
    assert W < 3 or not torch.equal(by_hand, backwards), "the order made no difference, so no test"
    nine = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    ddp.add_in_rank_order(list(nine), out=(out := torch.empty(50)))
    same_bits({"nine": functools.reduce(torch.add, nine)}, {"nine": out})
    for n in (0, 1, 2, 3, 49, 50):
        mine = contributions[rank][:n].clone()
        ddp.reduce_scatter(mine)
        same_bits({"own": mine.tensor_split(W)[rank]}, {"own": by_hand[:n].tensor_split(W)[rank]})
        ddp.wait_for(ddp.all_gather(mine))
        same_bits({"all": mine}, {"all": by_hand[:n]})
    for repeat, piece_bytes in ((1, 4), (3, 64), (17, 2**20)):
        total = contributions[rank].repeat(repeat)
        with mock.patch.object(ddp, "PIECE_BYTES", piece_bytes):
            ddp.all_reduce(total)
        same_bits({"sum": total}, {"sum": by_hand.repeat(repeat)})
    halves = torch.tensor([256.0, 1.0, 1.0, 1.0])[rank].to(torch.bfloat16).view(1)
    ddp.all_reduce(halves)
    assert halves == torch.tensor(256.0 + W - 1).to(torch.bfloat16), "bf16 was added in bf16"
    total = contributions[rank].repeat(W)
    with mock.patch.object(ddp, "adds_in_rank_order", lambda *_: False):  # the native collectives
        ddp.all_reduce(total)
    assert torch.allclose(total, by_hand.repeat(W), atol=1e-6)
    return "0 to 850 elements, pieces of 1 to 850, bf16; native calls", 0.0


@check([dict(W=W, clip=clip, accumulations=a) for W, clip, a in
        ((1, 0, (4,)), (2, 0.05, (1, 4)), (3, 0, (2,)), (4, 0.05, (1,)))],
       full=grid(W=(1, 2, 3, 4), clip=(0, 0.05), accumulations=((1, 2, 4),)), limit_s=120)
def ddp_is_naive(clip, accumulations):
    """DDP gives naive's bits: any module, bucket size and accumulation, with and without clipping.
    """
    cases = grid(name=ZOO, accumulation=accumulations, clip=(clip,))
    for case in cases:
        name = case.pop("name")
        module = zoo_module(name)
        expected = list(zoo_steps(module, module, **case))
        for cap in (1e-6, 0.001, 25):
            module, call = wrapped(name, bucket_cap_mb=cap)
            sizes = [p.numel() for p in module.parameters() if p.requires_grad]
            n = {1e-6: sum(size > 0 for size in sizes), 25: 3 if name == "mixed_dtypes" else 1}
            assert len(call._buckets) == n.get(cap, len(call._buckets))
            found = list(zoo_steps(module, call, **case))
            if name == "normed" and dist.get_rank() > 0:  # naive lets each rank keep its buffers
                for step in (*expected, *found):
                    for key in [key for key in step if "running" in key]:
                        del step[key]
            same_steps(found, expected)
    steps = ", ".join(map(str, accumulations))
    return f"{len(ZOO)} modules, 3 bucket sizes, {steps} micro-steps, clip {clip}", 0.0


@check([dict(W=W) for W in (1, 2, 4)])
def ddp_is_one_process():
    """W ranks give the bits of one process that accumulates the same W micro batches."""
    W, names = dist.get_world_size(), [name for name in ZOO if name != "normed"]
    if W > 2:
        names.remove("mixed_dtypes")  # 16-bit contributions are added in fp32: rounded once
    for name, clip in itertools.product(names, (0, 0.05)):
        alone, (module, call) = zoo_module(name), wrapped(name)
        same_steps(zoo_steps(module, call, clip=clip),
                   zoo_steps(alone, alone, clip=clip, one_process_for=W))
    return f"{len(names)} modules, clip 0 and 0.05, 3 steps", 0.0


@check([dict(W=2, accumulation=1), dict(W=2, accumulation=2)],
       full=grid(W=(1, 2), accumulation=(1, 2, 4)))
def ddp_is_torch_ddp(accumulation):
    """At W = 2 torch DDP has the same bits: gradients, which are None, parameters and buffers."""
    for name, cap in itertools.product(ZOO, (0.001, 25)):
        theirs = zoo_module(name)
        reference = DistributedDataParallel(theirs, gradient_as_bucket_view=True, bucket_cap_mb=cap,
                                            find_unused_parameters=name == "branches")
        module, call = wrapped(name, bucket_cap_mb=cap)
        same_steps(zoo_steps(module, call, accumulation),
                   zoo_steps(theirs, reference, accumulation))
    return f"{len(ZOO)} modules, 2 bucket sizes, {accumulation} micro-steps, 3 steps", 0.0


@check([dict(W=1)])
def ddp_buckets():
    """Parameters fall into buckets from the last to the first, one list per dtype; a bucket is full
    when it reaches its cap, the first of a dtype at 1 MB, the next at twice as much."""
    module = torch.nn.ParameterDict({f"p{i}": torch.zeros(1024, n, dtype=dtype) for i, (n, dtype) in
                                     enumerate(((100, torch.float32), (300, torch.float32),
                                                (300, torch.float64), (200, torch.float32),
                                                (600, torch.float32), (10, torch.float64),
                                                (200, torch.float32), (100, torch.float32)))})
    expected = {25: "p7 p6|p4|p5 p2|p3 p1 p0", 2: "p7 p6|p4|p5 p2|p3 p1 p0",
                0.5: "p7 p6|p4|p3|p5 p2|p1|p0", 1e-9: "p7|p6|p5|p4|p3|p2|p1|p0"}
    names = {p: name for name, p in module.items()}
    for cap, layout in expected.items():
        buckets = DDP(module, bucket_cap_mb=cap)._buckets
        found = "|".join(" ".join(names[p] for p in b.parameters()) for b in buckets)
        assert found == layout, (cap, found)
        assert [(b.index(), b.is_last()) for b in buckets] == [
            (i, i == len(buckets) - 1) for i in range(len(buckets))]
    return "8 parameters of 2 dtypes, 4 sizes of bucket", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_overlaps():
    """Buckets are launched by index, the first is summed before the last gradient exists, and there
    is one collective a bucket and one more."""
    rank, W, events = dist.get_rank(), dist.get_world_size(), []
    module, call = wrapped("gpt", bucket_cap_mb=0.005)
    last = module.inner.wte.weight
    start, collective, all_reduce = DDP._start_all_reduce, dist.all_reduce, ddp.all_reduce

    def record(kind, function):
        return lambda *args, **kwargs: events.append(kind) or function(*args, **kwargs)

    def last_gradient(_):
        call._buckets[0].wait()  # would time out, were it not under way on all ranks
        events.append("last gradient")

    last.register_hook(last_gradient)  # runs before the gradient is accumulated
    launched = []
    with mock.patch.object(DDP, "_start_all_reduce",
                           lambda self, flat: launched.append(flat) or start(self, flat)), \
            mock.patch.object(dist, "all_reduce", record("collective", collective)), \
            mock.patch.object(ddp, "all_reduce", record("exchange", all_reduce)):
        zoo_loss(call, 0, 0, rank).backward()
    n = len(call._buckets)
    assert n > 5 and [f.data_ptr() for f in launched] == [b.flat.data_ptr() for b in call._buckets]
    place = events.index("last gradient")
    assert 0 < place < len(events) - 1, events
    native = n if W == 2 else 0
    assert events.count("collective") == native + 1 and events.count("exchange") == n - native
    return f"{n} buckets, {len(events) - 1} collectives, {place} before the last gradient", 0.0


@check([dict(W=W) for W in (2, 3, 4)])
def ddp_ranks_out_of_step():
    """Neither the order in which a rank's gradients arrive nor a rank that sleeps changes a bit."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6))), torch.ones(2, 40)
    copies = copy.deepcopy(module), copy.deepcopy(module)
    orders = [range(6), range(5, -1, -1), (2, 0, 5, 1, 3, 4), (3, 5, 1, 0, 4, 2)]

    def backward(net, owner):
        sum(net[i](x * (rank + 1)).square().mean() for i in orders[rank]).backward()
        average_gradients(net) if owner is None else None
        return snapshot(net)

    expected = backward(copies[0], None)
    call = DDP(copies[1], bucket_cap_mb=1e-6)
    for sleeper in range(dist.get_world_size()):
        def sleep(*_):
            time.sleep(0.1 * (sleeper == rank))

        handles = [copies[1][3].weight.register_hook(sleep),  # before a gradient
                   copies[1][1].weight.register_post_accumulate_grad_hook(sleep)]  # after a launch
        start = DDP._start_all_reduce
        with mock.patch.object(DDP, "_start_all_reduce",
                               lambda self, flat: (sleep() if flat is self._buckets[4].flat else 0,
                                                   start(self, flat))[1]):
            same_bits(backward(copies[1], call), expected)
        for handle in handles:
            handle.remove()
        call.zero_grad()
        sleep()
    return "4 orders of arrival; sleeps at 4 places on each rank", 0.0


def out_of(call, step=0):
    return zoo_loss(call, step, 0, dist.get_rank())


def planted(*_):
    raise ZeroDivisionError("planted")


def no_sync(call):
    return call.no_sync() if isinstance(call, DDP) else contextlib.nullcontext()


class OddSteps:
    """What a script may do in a step. call: a module or its DDP; average: naive's mean, or nothing.
    """

    def two_losses(call, average):
        out = out_of(call)
        out.square().backward(retain_graph=True)
        average()
        out.exp().backward()

    def two_forwards(call, average):
        (out_of(call, 0) + out_of(call, 2)).backward()

    def forwards_without_backward(call, average):
        out_of(call, 5)
        with torch.no_grad():
            out_of(call, 4)
        out_of(call).backward()

    def exception_in_forward(call, average):
        handle = (call.module if isinstance(call, DDP) else call).register_forward_hook(planted)
        raises(ZeroDivisionError, "planted", out_of, call)
        handle.remove()
        out_of(call).backward()

    def exception_in_backward(call, average):
        out, handle = out_of(call), next(call.parameters()).register_hook(planted)
        raises(ZeroDivisionError, "planted", out.backward)
        handle.remove()
        call.zero_grad()
        out_of(call).backward()

    def no_sync_around_backward(call, average):
        out = out_of(call)
        with no_sync(call):
            out.backward()
        out_of(call, 1).backward()

    def no_sync_around_forward(call, average):
        with no_sync(call):
            out = out_of(call)
        out.backward()  # averages: what counts is where the backward is

    def exception_in_no_sync(call, average):
        with contextlib.suppress(ZeroDivisionError), no_sync(call):
            planted()
        out_of(call).backward()

    def frozen_after_forward(call, average):
        out, parameters = out_of(call), [p for p in call.parameters() if p.requires_grad]
        parameters[0].requires_grad_(False)
        out.backward()

    def no_zero_grad(call, average):
        out_of(call).backward()
        average()
        out_of(call, 1).backward()

    def zero_grad_to_zeros(call, average):
        out_of(call, 1).backward()
        average()
        call.zero_grad(set_to_none=False)
        out_of(call, 0).backward()


@check([dict(W=W) for W in (1, 2, 3)])
def ddp_odd_steps():
    """Like naive: two losses, two forwards, no backward, exceptions, no_sync in every position."""
    scenarios = [f for f in vars(OddSteps).values() if inspect.isfunction(f)]
    for scenario, name in itertools.product(scenarios, ("branches", "recomputed", "uneven")):
        alone, (module, call) = zoo_module(name), wrapped(name, bucket_cap_mb=0.0005)
        scenario(alone, lambda: average_gradients(alone))
        average_gradients(alone)
        scenario(call, lambda: None)
        same_bits(snapshot(module), snapshot(alone))
    return f"{len(scenarios)} scenarios, 3 modules", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_follows_changes():
    """Parameters frozen, thawed or cast between steps are averaged as naive averages them."""
    for cap in (0.0002, 25):
        follow_changes(zoo_module("branches"), *wrapped("branches", bucket_cap_mb=cap))
    return "all but one frozen, thawed in two steps, frozen, fp64; 2 bucket sizes", 0.0


def follow_changes(alone, module, call):
    """Change module and its copy alone alike, again and again; their gradients stay the same."""
    for change in (lambda m: [p.requires_grad_(n == "inner.frozen.weight")
                              for n, p in m.named_parameters()],
                   lambda m: m.inner.frozen.requires_grad_(True), lambda m: m.requires_grad_(True),
                   lambda m: m.inner.outer.requires_grad_(False), lambda m: m.double()):
        for m in (module, alone):
            change(m)
            m.zero_grad()
        assert call._layout != call._current_layout()
        for step in range(2):
            zoo_loss(lambda x, flag: call(x.to(module.inner.frozen.weight.dtype), flag), step, 0,
                     dist.get_rank()).backward()
            zoo_loss(lambda x, flag: alone(x.to(module.inner.frozen.weight.dtype), flag), step, 0,
                     dist.get_rank()).backward()
            average_gradients(alone)
            same_bits(snapshot(module), snapshot(alone))


@check([dict(W=W) for W in (2, 3)])
def ddp_names_unused_parameters():
    """A parameter without a gradient is named on every rank, also where ranks disagree on it."""
    rank, W = dist.get_rank(), dist.get_world_size()
    module, call = wrapped("branches", find_unused_parameters=False)
    x, never, sometimes = torch.ones(3, 5), {"inner.never": W}, {"inner.sometimes": W // 2}
    for flag, unused in ((True, never), (rank % 2 == 0, {**never, **sometimes}), (True, never)):
        start_s = time.monotonic()
        text = raises(RuntimeError, "^DDP: no gradient in this backward for .* Freeze",
                      call(x, flag).backward)
        assert time.monotonic() - start_s < 2
        expected = {f"{name}.{part} (unused on {n} of {W} ranks)"
                    for name, n in unused.items() for part in ("weight", "bias")}
        assert set(re.findall(r"[\w.]+ \(unused on \d of \d ranks\)", text)) == expected, text
        call.zero_grad()
    # In the first micro-step only: not unused, and averaged.
    alone = zoo_module("branches")
    module, call = wrapped("branches", find_unused_parameters=False)
    for m in (module, alone):
        m.inner.never.requires_grad_(False)
    with call.no_sync():
        call(rank * x, True).backward()
    call(x, False).backward()
    alone(rank * x, True).backward()
    alone(x, False).backward()
    average_gradients(alone)
    same_bits(snapshot(module), snapshot(alone))
    return "3 backwards; a parameter used under no_sync() alone", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_refuses_different_modules():
    """Ranks whose modules differ all raise, naming the first difference; the group still works."""
    odd_one = dist.get_rank() == dist.get_world_size() - 1

    def build(sizes=(5, 5, 2), dtype=None, name="head", frozen=False, buffer=None):
        module = torch.nn.Sequential()
        module.add_module("body", torch.nn.Linear(sizes[0], sizes[1], dtype=dtype))
        module.add_module(name, torch.nn.Linear(sizes[1], sizes[2]))
        module.body.bias.requires_grad_(not frozen)
        module.register_buffer("steps", buffer)
        return module

    cases = ((dict(sizes=(5, 5, 3)), {}, r"head.weight \(2, 5\).*has head.weight \(3, 5\)"),
             (dict(dtype=torch.float64), {}, r"body.weight.*float32.*body.weight.*float64"),
             (dict(name="tail"), {}, r"head.weight.*tail.weight"),
             (dict(frozen=True), {}, r"body.bias.*=True.*body.bias.*=False"),
             (dict(buffer=torch.zeros(3)), {}, r"has nothing more, rank \d has steps \(3,\)"),
             ({}, dict(bucket_cap_mb=3), r"bucket_cap_mb=25.*bucket_cap_mb=3"))
    for difference, options, text in cases:
        start_s = time.monotonic()
        raises(RuntimeError, "^DDP: ranks wrap different modules: .*" + text, DDP,
               build(**difference if odd_one else {}), **options if odd_one else {})
        assert time.monotonic() - start_s < 2
        DDP(build())
    return f"{len(cases)} differences", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_names_a_missing_rank():
    """Where a rank stops calling backward, the others raise in time and say which bucket waits."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1.5))
    module, call = wrapped("gpt", process_group=group, bucket_cap_mb=0.01)
    zoo_loss(call, 0, 0, dist.get_rank()).backward()
    start_s, out = time.monotonic(), zoo_loss(call, 1, 0, dist.get_rank())
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2.5)  # alive, but makes no second backward
        return "one backward in two; timeout 1.5 s", 0.0
    text = raises(RuntimeError, r"^DDP, rank \d: bucket 1 of \d+, from inner.norm.weight on, was "
                  r"not averaged.*makes fewer backwards.*uneven inputs", out.backward)
    assert dist.get_world_size() == 2 or f"from or went to rank {dist.get_world_size() - 1}" in text
    assert 1.2 < time.monotonic() - start_s < 6
    return "one backward in two; timeout 1.5 s", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_names_ranks_out_of_step():
    """A backward that raised on one rank alone and is made again makes all ranks raise."""
    module, call = wrapped("gpt", bucket_cap_mb=0.01)
    if dist.get_rank() == 0:
        handle = module.inner.blocks[1].mlp.down.weight.register_post_accumulate_grad_hook(planted)
        raises(ZeroDivisionError, "planted", out_of(call).backward)
        handle.remove()
    raises(RuntimeError, "^DDP: ranks are out of step: this is backward [12] here",
           out_of(call).backward)
    return "one backward more on rank 0", 0.0


@check([dict(W=2)])
def ddp_refuses_by_name():
    """Double backward, reentrant checkpoints, sparse gradients and bad arguments: a clear error,
    and the next step is right."""
    rank = dist.get_rank()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(c, x, layer):
            c.x, c.layer = x.detach(), layer
            return layer(x)

        @staticmethod
        def backward(c, g):  # a reentrant checkpoint by other names
            with torch.enable_grad():
                c.layer(c.x).backward(g)
            return g, None

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)

        def forward(self, x, flag):
            return Nested.apply(self.first(x), self.layer).sum()

    class Reentrant(torch.nn.Module):
        def __init__(self, use_reentrant, sparse=False):
            super().__init__()
            self.first, self.layer = torch.nn.Embedding(3, 5, sparse=sparse), torch.nn.Linear(5, 5)
            self.use_reentrant = use_reentrant

        def forward(self, x, flag):
            x = x + self.first(torch.tensor([rank]))
            return checkpoint(self.layer, x, use_reentrant=self.use_reentrant).sum()

    alone = zoo_module("tied")
    next(zoo_steps(alone, alone, steps=1))
    expected = snapshot(alone)
    for error, text, module, how in (
            (RuntimeError, "use_reentrant=False", lambda: Reentrant(True), {}),
            (RuntimeError, "use_reentrant=False", Own, {}),
            (RuntimeError, "first.weight is sparse", lambda: Reentrant(False, sparse=True), {}),
            (RuntimeError, "create_graph", lambda: Tied(), dict(create_graph=True))):
        call = DDP(module())
        with warnings.catch_warnings(action="ignore"):  # torch's, of create_graph
            raises(error, text, zoo_loss(call, 0, 0, rank).backward, **how)
        module, call = wrapped("tied")
        zoo_loss(call, 0, 0, rank).backward()
        same_bits({"grad": module.head.weight.grad}, {"grad": expected["embedding.weight.grad"]})
    other = DDP(module)
    raises(RuntimeError, "wrapped 2 times", zoo_loss(other, 0, 0, rank).backward)
    del other
    zoo_loss(call, 0, 0, rank).backward()
    raises(ValueError, "device_ids", DDP, Tied(), device_ids=[0])
    raises(ValueError, "bucket_cap_mb", DDP, Tied(), bucket_cap_mb=0)
    raises(RuntimeError, "no parameter", DDP, Tied().requires_grad_(False))
    call.register_comm_hook(None, default_hooks.allreduce_hook)
    raises(RuntimeError, "only once", call.register_comm_hook, None, default_hooks.allreduce_hook)
    return "5 kinds of backward, 4 kinds of argument", 0.0


@check([dict(W=2)])
def ddp_comm_hooks():
    """torch's fp16, bf16 and PowerSGD hooks run unchanged and give the bits of torch DDP."""
    def bf16_hook(group, bucket):  # torch DDP refuses the original by its name, except on NCCL
        return default_hooks.bf16_compress_hook(group, bucket)

    def power_sgd_state():
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2,
                                           start_powerSGD_iter=2, min_compression_rate=0.5)

    hooks = dict(allreduce=default_hooks.allreduce_hook, fp16=default_hooks.fp16_compress_hook,
                 bf16=bf16_hook, power_sgd=powerSGD_hook.powerSGD_hook,
                 fp16_power_sgd=default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
    for (kind, hook), name in itertools.product(hooks.items(), ("gpt", "low_rank", "tied")):
        theirs, (module, call) = zoo_module(name), wrapped(name)
        reference = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
        seen = [], []
        for wrapper, log in zip((call, reference), seen):
            def spy(state, bucket, log=log):
                log.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(),
                            sorted(tuple(g.shape) for g in bucket.gradients()),
                            sorted(tuple(p.shape) for p in bucket.parameters())))
                return hook(state, bucket)
            wrapper.register_comm_hook(power_sgd_state() if "power" in kind else None, spy)
        same_steps(zoo_steps(module, call, steps=5), zoo_steps(theirs, reference, steps=5))
        assert seen[0] == seen[1] and len(seen[0]) == 5
    return f"{', '.join(hooks)}; 3 modules, 5 steps", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_comm_hooks_over_buckets():
    """Hooks that start collectives in callbacks do not mix buckets; ranks end on the same bits."""
    for hook, name in ((powerSGD_hook.powerSGD_hook, "gpt"), (default_hooks.allreduce_hook, "gpt")):
        module, call = wrapped(name, bucket_cap_mb=0.005)
        state = None if hook is default_hooks.allreduce_hook else powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
        call.register_comm_hook(state, hook)
        for step in zoo_steps(module, call, accumulation=2, steps=6):
            for tensor in step.values():
                others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
                dist.all_gather(others, tensor.contiguous())
                assert all(torch.equal(tensor, other) for other in others)
    alone = zoo_module("gpt")
    for a, b in zip(step.values(), list(zoo_steps(alone, alone, 2, steps=6))[-1].values()):
        assert torch.allclose(a, b, atol=1e-4)
    return f"PowerSGD and the plain mean, {len(call._buckets)} buckets, 6 steps", 0.0


def with_hook(name, state, hook, **options):
    """(module, its DDP), which reduces by a comm hook."""
    module, call = wrapped(name, **options)
    call.register_comm_hook(state, hook)
    return module, call


@check([dict(W=W) for W in (1, 2, 3)])
def ddp_top_k():
    """Top-k sends `ratio` of each bucket; what was applied and what is left add up to all
    gradients; at ratio 1 it is DDP to the bit; it runs in torch's DDP; an inf leaves no trace."""
    W, ratio = dist.get_world_size(), 0.1
    for name, accumulation in itertools.product(("gpt", "uneven", "mixed_dtypes"), (1, 2)):
        everything = with_hook(name, TopKState(1.0), top_k_hook, bucket_cap_mb=1e-6)
        same_steps(zoo_steps(*everything, accumulation), zoo_steps(*wrapped(name), accumulation))
    still = functools.partial(sgd, lr=0.0)  # weights that stay
    for kind in ("branches", "gpt"):  # in the first no rank uses some parameters in some steps
        state = TopKState(ratio, dist.group.WORLD)
        module, call = with_hook(kind, state, top_k_hook, bucket_cap_mb=0.005)
        applied = list(zoo_steps(module, call, 2, steps=5, make=still))
        every = list(zoo_steps(*wrapped(kind), 2, steps=5, make=still))
        for name, p in module.named_parameters():
            left = state.residual.get(p, torch.zeros_like(p)).clone()
            dist.all_reduce(left)
            total, expected = (sum(step.get(f"{name}.grad", 0) for step in steps)
                               for steps in (applied, every))
            assert torch.allclose(total + left / W, torch.zeros_like(p) + expected, atol=1e-5), name
    assert len(call._buckets) > 2 and state.iter == 5
    copied = copy.deepcopy(call)
    assert copied.comm_state.residual.keys() == set(copied._names), "the copy keeps another's"
    for bucket in call._buckets:
        n_sent = math.ceil(ratio * len(bucket.flat))
        assert 0 < bucket.flat.count_nonzero() <= W * n_sent, (len(bucket.flat), n_sent)
    theirs, ours = zoo_module("gpt"), with_hook("gpt", TopKState(ratio), top_k_hook)
    reference = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    reference.register_comm_hook(TopKState(ratio), top_k_hook)
    same_steps(zoo_steps(*ours), zoo_steps(theirs, reference))
    (math.inf * out_of(call)).backward()
    assert not all(p.grad.isfinite().all() for p in module.parameters()), "the inf is lost"
    assert all(left.isfinite().all() for left in state.residual.values()), "the inf stays"
    raises(ValueError, "ratio 0: must be above 0", TopKState, 0)
    for k, special in itertools.product((0, 1, 50, 500, 5000, 50_000), (1.0, math.nan)):
        magnitude = torch.randn(50_000, generator=torch.Generator().manual_seed(k)).abs()
        magnitude[3] = special
        found, expected = (t.nan_to_num(math.inf).sort().values for t in (
            magnitude[ddp.largest(magnitude, k)], magnitude.topk(k).values))
        assert torch.equal(found, expected), (k, special)
    return "3 modules at ratio 1; 5 steps of 2 micro-steps at ratio 0.1", 0.0


@check([dict(W=W) for W in (2, 3, 4)])
def ddp_hierarchical():
    """Within nodes of 1 or W ranks the hierarchical hook gives DDP's bits, within others the sum of
    the nodes' sums; it runs in torch's DDP."""
    W, rank = dist.get_world_size(), dist.get_rank()
    for node_size in (1, W):
        for name in ("gpt", "uneven", "mixed_dtypes"):
            state = HierarchicalState(node_size)
            call = with_hook(name, state, hierarchical_hook, bucket_cap_mb=0.005)
            same_steps(zoo_steps(*call, 2), zoo_steps(*wrapped(name), 2))
    if W == 4:
        state, flat = HierarchicalState(2), torch.randn(2001)
        each = [torch.empty_like(flat) for _ in range(W)]
        dist.all_gather(each, flat)
        with mock.patch.object(ddp, "adds_in_rank_order", lambda *_: False):
            assert torch.allclose(state.all_reduce(flat.clone()), sum(each), atol=1e-5)
        same_bits({"sum": state.all_reduce(flat)},
                  {"sum": (each[0] + each[1]) + (each[2] + each[3])})
    theirs = zoo_module("gpt")
    reference = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    reference.register_comm_hook(HierarchicalState(W), hierarchical_hook)
    same_steps(zoo_steps(theirs, reference), zoo_steps(*wrapped("gpt")))
    raises(ValueError, f"groups of 5 ranks: {W} ranks", HierarchicalState, 5)
    copy.deepcopy(call[1])
    state = HierarchicalState(1)
    for group in (state.inside, state.across):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == datetime.timedelta(seconds=20), f"{timeout} instead of the group's own"
    return f"rank {rank} in nodes of 1, {W}{' and 2' if W == 4 else ''}", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_buffers_follow_rank_0():
    """Parameters and buffers of any dtype and stride are rank 0's after construction, buffers also
    before a forward unless broadcast_buffers is off."""
    rank = dist.get_rank()

    def build():
        module = torch.nn.BatchNorm1d(4)
        module.weight = torch.nn.Parameter(torch.randn(2, 4).T[:, 0])
        for i, t in enumerate((torch.full((2, 3), rank > 0), torch.arange(6).view(2, 3).T + rank,
                               torch.tensor(rank, dtype=torch.bfloat16), torch.zeros(0),
                               torch.full((3,), rank, dtype=torch.complex64))):
            module.register_buffer(f"buffer{i}", t, persistent=i > 0)
        return module

    torch.manual_seed(0)
    expected = dict(build().named_parameters())
    for on in (True, False):
        torch.manual_seed(rank)
        module = build()
        before = module.weight.detach().clone()
        call = DDP(module, broadcast_buffers=on)
        assert rank == 0 or not torch.equal(before, expected["weight"])
        same_bits(dict(module.named_parameters()), expected)
        assert not module.buffer0.any() and module.buffer1.T.flatten().tolist() == list(range(6))
        assert module.buffer2 == 0 and not module.buffer4.any()
        for step in range(2):
            module.num_batches_tracked.fill_(10 * step + rank)
            with call.no_sync() if step else contextlib.nullcontext():
                call(torch.randn(3, 4)).sum().backward()
            assert module.num_batches_tracked == 10 * step + 1 + (0 if on else rank)
        module.num_batches_tracked.fill_(rank)  # after a forward that only accumulated, not
        call(torch.randn(3, 4)).sum().backward()
        assert module.num_batches_tracked == rank + 1
    return "7 buffers, 2 parameters, 3 forwards, on and off", 0.0


@check([dict(W=W) for W in (1, 2, 3)])
def ddp_memory():
    """`.grad` is a view of its bucket, always; no second gradient, no tensor of the caller, and no
    wrapper that is dropped stays in memory; copies are independent."""
    rank = dist.get_rank()
    module, call = wrapped("gpt", bucket_cap_mb=0.01)
    places = [bucket.flat.untyped_storage().data_ptr() for bucket in call._buckets]
    gradients = []
    for p in module.parameters():
        p.register_hook(lambda g: gradients.append(weakref.ref(g.untyped_storage())))
    for step in range(4):
        loss = zoo_loss(call, step, 0, rank)
        ours = weakref.ref(loss)
        with call.no_sync() if step == 1 else contextlib.nullcontext():
            loss.backward()
        del loss
        assert ours() is None, "the caller's loss is kept"
        storages = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        assert storages == set(places)
        call.zero_grad(set_to_none=step != 2)
    strided, strided_call = wrapped("branches")
    zoo_loss(strided_call, 0, 0, rank).backward()
    assert strided.inner.inner.weight.grad.stride() == strided.inner.inner.weight.stride() == (1, 5)
    plain, other = copy.deepcopy(module), copy.deepcopy(call)
    assert not any(p._post_accumulate_grad_hooks for p in plain.parameters())
    zoo_loss(plain, 0, 0, rank).backward()
    zoo_loss(other, 0, 0, rank).backward()
    assert all(p.grad is None for p in module.parameters()), "a copy's backward came here"
    average_gradients(plain)
    same_bits(snapshot(other.module), snapshot(plain))
    alive = [weakref.ref(call), *(weakref.ref(bucket.flat) for bucket in call._buckets)]
    del call
    assert not any(ref() for ref in alive), "the wrapper is kept alive"
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    zoo_loss(module, 0, 0, rank).backward()
    return "4 steps; a copy of the module and of the wrapper; the module alone", 0.0


@check([dict(W=W) for W in (2, 3)])
def ddp_two_wrappers():
    """Two wrappers in one backward do not take each other's messages, whoever sleeps."""
    rank = dist.get_rank()
    for sleeper in (0, 1):
        nets = [wrapped("tied")[1] for _ in range(2)]
        plain = zoo_module("tied")
        for net in nets:
            if sleeper == rank:
                next(net.parameters()).register_hook(lambda _: time.sleep(0.05))
        sum((i + 1) * zoo_loss(net, 0, 0, rank) for i, net in enumerate(nets)).backward()
        zoo_loss(plain, 0, 0, rank).backward()
        average_gradients(plain)
        expected = plain.head.weight.grad
        assert torch.equal(nets[0].module.head.weight.grad, expected)
        assert torch.allclose(nets[1].module.head.weight.grad, 2 * expected)
    return "2 wrappers, a sleep on rank 0, then on rank 1", 0.0


@check([dict(W=2)], limit_s=120)
def ddp_compiled_blocks():
    """With torch.compile per block, DDP gives the bits of naive with torch.compile per block."""
    if not shutil.which("c++") and not shutil.which("g++") and not shutil.which("clang++"):
        raise Skip("torch.compile on CPU needs a C++ compiler")
    modules = [Scalar(lambda: small_model(n_layer=1)) for _ in range(2)]
    for module in modules:
        module.inner.compile_blocks()
    same_steps(zoo_steps(modules[0], DDP(modules[0], bucket_cap_mb=0.01), accumulation=2),
               zoo_steps(modules[1], modules[1], accumulation=2))
    return "gpt, 2 micro-steps, 3 steps", 0.0


@check([dict(W=W) for W in (1, 2, 3)])
def clipping_over_shards():
    """Clipping shards gives the norm of the wholes on every rank, and the bits of clipping them."""
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    wholes = [torch.randn(n) for n in (1, 2, 7, 1000)]  # 1 and 2 elements: some ranks hold none
    shards = [t.clone().tensor_split(W)[rank] for t in wholes]
    parameters = [torch.nn.Parameter(t.clone()) for t in wholes]
    for p in parameters:
        p.grad = p.detach().clone()
    by_torch = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    exact = torch.cat(wholes).double().square().sum().sqrt()
    by_hand = [t * (1.0 / (exact + 1e-6)).float() for t in wholes]  # the factor rounded once
    norm = clip_gradients_(wholes, 1.0)
    assert abs(norm - exact) < 1e-12 * exact
    same_bits(dict(enumerate(by_hand)), dict(enumerate(wholes)))
    small = torch.full((4,), 1e-6)  # where the 1e-6 beside the norm tells
    clip_gradients_([small], 1e-6)
    assert torch.allclose(small, torch.full((4,), 1e-6 / 3), rtol=1e-5)
    norm_of_shards = clip_gradients_(shards, 1.0, dist.group.WORLD)
    assert abs(norm - norm_of_shards) < 1e-12 * norm and abs(norm - by_torch) < 1e-5 * norm
    for t, shard, p in zip(wholes, shards, parameters):
        same_bits({"clipped": t.tensor_split(W)[rank]}, {"clipped": shard})
        assert torch.allclose(t, p.grad, rtol=1e-6, atol=0)
    before = [t.clone() for t in wholes]
    assert abs(clip_gradients_(wholes, math.inf) - 1) < 1e-5 and abs(total_norm(wholes) - 1) < 1e-5
    same_bits(dict(enumerate(before)), dict(enumerate(wholes)))  # inf only measures
    assert clip_gradients_(broken := [torch.tensor([math.inf, 1.0])], math.inf) == math.inf
    assert broken[0].tolist() == [math.inf, 1.0]
    assert total_norm([torch.tensor([3 + 4j])]) == 5
    return "4 tensors of 1 to 1000 elements, torch's function too", 0.0


# -------------------------------------------------------------------------------------------------
# zero.py

STAGES = (Zero1, Zero2, Zero3)


def in_memory_order(tensors):
    """Flat copies of {name: tensor}, elements in the order of their addresses."""
    order = {n: sorted(range(t.dim()), key=lambda d, t=t: -t.stride(d)) for n, t in tensors.items()}
    return {n: t.detach().permute(order[n]).flatten().clone() for n, t in tensors.items()}


def sharded(stage, name, **options):
    """The wrapper of a module that is as drawn on rank 0 only: construction has to see to the rest.
    """
    module = zoo_module(name)
    if dist.get_rank() > 0:
        for p in module.parameters():
            p.data.fill_(-7.0)
    return stage(module, **options)


def joined(shards, shard_size=None):
    """{name: shard or None} -> {name: flat whole}, from what all ranks have, None left out. Groups
    of shard_size ranks have to agree."""
    views = [None] * dist.get_world_size()
    dist.all_gather_object(views, {n: t for n, t in shards.items() if t is not None})
    assert all(view.keys() == views[0].keys() for view in views), "ranks disagree on who has one"
    for rank, view in enumerate(views):
        same_bits(view, views[rank % (shard_size or len(views))])
    return {n: torch.cat([view[n].flatten() for view in views[:shard_size]]) for n in views[0]}


def zero_snapshot(call):
    """As `snapshot`, of whole tensors, in memory order; shards and wholes have to agree."""
    shards = {n: (p.detach(), p.grad) for n, p in call.named_parameters()}
    found = joined({n: p for n, (p, _) in shards.items()}
                   | {f"{n}.grad": gradient for n, (_, gradient) in shards.items()},
                   call.shard_size)
    whole = in_memory_order(dict(call.full_parameters()))
    same_bits({n: found[n] for n in whole}, whole)
    return {**found, **in_memory_order(dict(call.module.named_buffers()))}


def zero_steps(call, accumulation=1, clip=0, dealt=False, steps=3, make=adamw):
    """Train a sharded wrapper as `zoo_steps` does; yield a `zero_snapshot` per step.

    dealt: every micro-step is reduced, and micro batches are dealt out in the order in which one
    process would meet them; else no_sync() around all but the last.
    """
    optimizers, rank = make(list(call.named_parameters())), dist.get_rank()
    for step in range(steps):
        for a in range(accumulation):
            hold = not dealt and a < accumulation - 1
            which = (0, a * dist.get_world_size() + rank) if dealt else (a, rank)
            with call.no_sync() if hold else contextlib.nullcontext():
                loss = zoo_loss(call, step, *which)
                (loss / accumulation).backward()
        if clip:
            call.clip_grad_norm_(clip)
        yield zero_snapshot(call)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same_as_zero(ours, theirs, name):
    """`same_steps` of zero_steps and zoo_steps; each rank has its own running statistics."""
    ours, theirs = list(ours), [in_memory_order(step) for step in theirs]
    if name == "normed":
        for step in (*ours, *theirs):
            for key in [key for key in step if "running" in key]:
                del step[key]
    same_steps(ours, theirs)


@check([dict(W=1)])
def zero_units_are_outermost():
    """Units are the elements of the outermost ModuleLists, by their names in the module."""
    layers = [torch.nn.Linear(1, 1) for _ in range(4)]
    inner = torch.nn.ModuleList(layers[:2])
    module = torch.nn.ModuleDict(dict(
        a=torch.nn.ModuleList([torch.nn.ModuleDict(dict(b=inner)), layers[2], None]), c=layers[3],
        ab=torch.nn.ModuleList([torch.nn.Tanh()])))
    found = {name: type(unit) for name, unit in zero.find_units(module).items()}
    assert found == {"a.0": torch.nn.ModuleDict, "a.1": torch.nn.Linear, "ab.0": torch.nn.Tanh}
    return "three lists, one inside another", 0.0


@check([dict(W=W, stage=stage, accumulation=a, clip=clip) for W, stage, a, clip in
        ((2, Zero1, 2, 0.05), (2, Zero3, 1, 0.05))] + [
            dict(W=3, stage=Zero2, accumulation=1, clip=0, names=(*ZOO, *UNITS)[::2])],
       full=grid(W=(1, 2, 3, 4), stage=STAGES, accumulation=(1, 2, 4), clip=(0, 0.05)), limit_s=120)
def zero_is_ddp(stage, names=(*ZOO, *UNITS), **case):
    """Each stage gives DDP's bits, gradients too: any module, clipped, and with no_sync()."""
    for name in names:
        call = sharded(stage, name)
        same_as_zero(zero_steps(call, **case), zoo_steps(*wrapped(name), **case), name)
    return (f"{stage.__name__}, {len(names)} modules, {case['accumulation']} micro-steps, clip "
            f"{case['clip']}"), 0.0


@check([dict(W=1, stage=Zero2, accumulation=2),
        dict(W=2, stage=Zero2, accumulation=2, names=(*ZOO, *UNITS)[1::2]),
        dict(W=4, stage=Zero3, accumulation=1, names=tuple(UNITS)[::2])],
       full=grid(W=(1, 2, 4), stage=(Zero2, Zero3), accumulation=(1, 2, 4)), limit_s=120)
def zero_is_one_process(stage, accumulation, names=(*ZOO, *UNITS)):
    """However W x accumulation is split, stages 2 and 3 give the bits of one process."""
    n = dist.get_world_size() * accumulation
    for name in names:
        if name == "normed" or (name == "mixed_dtypes" and n > 2):
            continue  # 16-bit contributions of ranks are added in fp32: rounded once
        call, alone = sharded(stage, name), zoo_module(name)
        same_as_zero(zero_steps(call, accumulation, 0.05, dealt=True),
                     zoo_steps(alone, alone, clip=0.05, one_process_for=n), name)
    return f"{stage.__name__}, {len(names)} modules, {accumulation} micro-steps, clip 0.05", 0.0


def fsdp2(module, policy=MixedPrecisionPolicy(), shard_size=None):
    """fully_shard on the elements of the outermost lists and on the root; hybrid by shard_size."""
    W = dist.get_world_size()
    mesh = init_device_mesh("cpu", (W // (shard_size or W), shard_size or W),
                            mesh_dim_names=("replicate", "shard"))
    mesh = mesh if shard_size else mesh["shard"]
    for unit in zero.find_units(module).values():
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


@check([dict(W=2, stage=Zero2, dtype=None), dict(W=2, stage=Zero3, dtype=torch.bfloat16),
        dict(W=4, stage=Zero3, dtype=None, shard_size=2)],
       full=[*grid(W=(2,), stage=(Zero2, Zero3), dtype=(None, torch.bfloat16)),
             *grid(W=(4,), stage=STAGES, dtype=(None,), shard_size=(2,))])
def zero_is_fsdp2(stage, dtype, shard_size=None):
    """At W = 2, and at W = 4 in groups of 2, FSDP2 has the same bits, in fp32 and, not in groups,
    with parameters gathered in bf16."""
    names = ("gpt", "recomputed", "tied", "low_rank", "blocks", "frozen_units", "large_vocabulary")
    names = names[::2] if shard_size else names
    for name in names:
        theirs = fsdp2(zoo_module(name), MixedPrecisionPolicy(dtype, dtype and torch.float32),
                       shard_size)
        ours = sharded(stage, name, param_dtype=dtype, reduce_dtype=dtype and torch.float32,
                       shard_size=shard_size)
        optimizers = [adamw(list(m.named_parameters()))[0] for m in (ours, theirs)]
        for step in range(4):
            losses = []
            for m, optimizer in zip((ours, theirs), optimizers):
                losses.append(zoo_loss(m, step, 0, dist.get_rank()))
                losses[-1].backward()
            assert torch.equal(*losses), f"{name}: losses {losses}"
            gradients = joined({n: p.grad for n, p in ours.named_parameters()}, shard_size)
            for n, p in theirs.named_parameters():
                if p.grad is not None:
                    same_bits({n: gradients[n]}, {n: p.grad.full_tensor().flatten()})
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            same_bits(dict(ours.full_parameters()),
                      {n: p.full_tensor().detach() for n, p in theirs.named_parameters()})
    return f"{stage.__name__}, {dtype or torch.float32}, {len(names)} modules, 4 steps", 0.0


REDUNDANCY = tuple(name for name in (*ZOO, *UNITS) if name not in ("mixed_dtypes", "uneven"))


@check([dict(W=2, names=REDUNDANCY[::2])], full=[dict(W=2, names=REDUNDANCY)])
def zero1_is_zero_redundancy_optimizer(names):
    """At W = 2 stage 1 gives the bits of torch's ZeroRedundancyOptimizer over torch's DDP."""

    def redundancy(named_parameters):
        return [ZeroRedundancyOptimizer([p for _, p in named_parameters if p.requires_grad],
                                        torch.optim.AdamW, lr=1e-2, fused=False)]

    for name in names:
        theirs = zoo_module(name)
        leave_out = Blocks, Nested, Functional, Experts
        reference = DistributedDataParallel(theirs, find_unused_parameters=name == "branches" or
                                            isinstance(theirs, leave_out))
        same_as_zero(zero_steps(sharded(Zero1, name), 2),
                     zoo_steps(theirs, reference, 2, make=redundancy), name)
    return f"{len(names)} modules, 2 micro-steps, 3 steps", 0.0


@check([dict(W=3, stage=Zero1), dict(W=2, stage=Zero3)], full=grid(W=(2, 3), stage=STAGES))
def zero_optimizers(stage):
    """Element-wise optimizers give the bits they give with DDP, for-loop and foreach, in groups by
    the number of dimensions, and several at once; others are refused by name."""
    kinds = [(torch.optim.SGD, dict(momentum=0.9, nesterov=True)), (torch.optim.AdamW, {}),
             (torch.optim.Adam, dict(amsgrad=True)), (torch.optim.Adagrad, {}),
             (torch.optim.RMSprop, dict(momentum=0.5, centered=True))]
    for (kind, options), foreach in itertools.product(kinds, (False, True)):
        def make(named_parameters):
            parameters = [p for n, p in named_parameters if p.requires_grad]
            matrices, rest = ([p for p in parameters if (p.dim() > 1) == many] for many in (1, 0))
            assert matrices and rest
            last = rest.pop()
            groups = [dict(params=matrices, weight_decay=0.1), dict(params=rest, lr=0.02)]
            return [kind(groups, lr=0.01, foreach=foreach, **options),
                    torch.optim.SGD([last], lr=0.1)]

        for name in ("tied_units", "uneven"):
            same_as_zero(zero_steps(sharded(stage, name), make=make),
                         zoo_steps(*wrapped(name), make=make), name)
    for kind in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS):
        call = sharded(stage, "tied")
        zoo_loss(call, 0, 0, 0).backward()
        raises(RuntimeError, f"{kind.__name__} looks at a parameter as a whole",
               kind(call.parameters()).step, *[lambda: 0.0] * (kind is torch.optim.LBFGS))
    module = zoo_module("blocks")
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    call = stage(module)
    raises(RuntimeError, "SGD was given the module's own parameters", early.step)
    return f"{stage.__name__}, {len(kinds)} optimizers, 2 ways each, 2 modules; 4 refused", 0.0


def first_block(call):
    return [m for m in call.module.modules() if isinstance(m, Block)][:1]


class OddForwards:
    """What a script may do in a step beside one forward and one backward; call: DDP or sharded."""

    def two_forwards(call):
        (out_of(call, 0) + out_of(call, 2)).backward()

    def forwards_without_backward(call):
        out_of(call, 5)
        with torch.no_grad():
            out_of(call, 4)
        out_of(call).backward()

    def evaluation_before_backward(call):
        loss = out_of(call)
        call.eval()
        with torch.no_grad():
            out_of(call, 4)
        call.train()
        loss.backward()

    def inference_mode(call):
        with torch.inference_mode():
            out_of(call, 4)
        out_of(call).backward()

    def exception_in_forward(call):
        for module in (call.module, *first_block(call)):
            handle = module.register_forward_hook(planted)
            for called in (call, call.module):
                raises(ZeroDivisionError, "planted", out_of, called)
            handle.remove()
        out_of(call).backward()

    def interrupt_in_forward(call):
        def interrupt(*_):
            raise KeyboardInterrupt("planted")

        handle = (*first_block(call), call.module)[0].register_forward_pre_hook(interrupt)
        raises(KeyboardInterrupt, "planted", out_of, call)
        handle.remove()
        out_of(call).backward()

    def gradient_penalty(call):
        x = torch.full((3, 5), dist.get_rank() + 1.0, requires_grad=True)
        [gradient] = torch.autograd.grad(call(x, True).sum(), x, create_graph=True)
        (out_of(call, 0) + gradient.square().sum()).backward()

    def exception_in_backward(call):
        place = (*first_block(call), call.module)[0]
        handle = place.register_full_backward_pre_hook(planted)
        loss = out_of(call)
        raises(ZeroDivisionError, "planted", loss.backward)
        handle.remove()
        torch.optim.SGD(call.parameters()).zero_grad()  # which does not see what is not reduced
        out_of(call).backward()

    def second_backward(call):
        loss = out_of(call)
        loss.backward(retain_graph=True)
        call.zero_grad()
        loss.backward()

    def gradient_of_the_input(call):
        x = torch.ones(3, 5, requires_grad=True)
        torch.autograd.grad(call(x, True), x)
        out_of(call).backward()

    def plain_module(call):
        out_of(call.module).backward()

    def parts_of_the_module(call):
        x = torch.ones(3, 5) * (dist.get_rank() + 1)
        for module in call.module.modules():
            if isinstance(module, torch.nn.Linear) and module.in_features == module.out_features:
                x = module(x).tanh()
        with torch.no_grad():
            out_of(call, 4)
        x.sum().backward()

    def no_sync_around_forward(call):
        with call.no_sync():
            loss = out_of(call)
        loss.backward()

    def exception_in_no_sync(call):
        with contextlib.suppress(ZeroDivisionError), call.no_sync():
            planted()
        out_of(call).backward()

    def no_sync_dropped(call):
        with call.no_sync():
            out_of(call, 3).backward()
        call.zero_grad()
        out_of(call).backward()

    def used_in_no_sync_only(call):
        with call.no_sync():
            zoo_loss(lambda x, _: call(x, True), 3, 0, dist.get_rank()).backward()
        zoo_loss(lambda x, _: call(x, False), 4, 0, dist.get_rank()).backward()

    def frozen(call, trained=False, by=lambda call: call):
        for n, p in by(call).named_parameters():
            if "down" in n or "sometimes" in n:
                p.requires_grad_(trained)
        call.zero_grad()
        out_of(call, 1).backward()

    def frozen_in_the_module(call, trained=False):
        OddForwards.frozen(call, trained, lambda call: call.module)

    def frozen_and_thawed(call):
        for trained in (False, True, True):
            OddForwards.frozen(call, trained)
            OddForwards.frozen_in_the_module(call, not trained)
            OddForwards.frozen(call, trained)

    def zero_grad_to_zeros(call):
        out_of(call, 1).backward()
        call.zero_grad(set_to_none=False)
        out_of(call, 0).backward()


@check([dict(W=2, stage=Zero1, names=("branches",)),
        dict(W=2, stage=Zero3, names=("blocks",))],
       full=grid(W=(1, 2, 3), stage=STAGES, names=(("branches", "blocks", "early_exit"),)))
def zero_odd_steps(stage, names):
    """Like DDP: forwards without a backward, two forwards, evaluation between, exceptions, no_sync,
    `model.module(x)`, and then a usual step."""
    scenarios = [f for f in vars(OddForwards).values() if inspect.isfunction(f)]
    alike = (OddForwards.two_forwards, OddForwards.exception_in_backward,
             OddForwards.gradient_penalty)  # or stage 3 would hang
    for scenario, name in itertools.product(scenarios, names):
        if name == "early_exit" and scenario in alike:
            continue  # its ranks do not use the same units
        theirs, (module, reference) = sharded(stage, name), wrapped(name)
        for call in (theirs, reference):
            scenario(call)
        expected = in_memory_order(snapshot(module))
        found = zero_snapshot(theirs)
        for key in [key for key in found if key not in expected]:
            assert scenario.__name__ == "zero_grad_to_zeros" and not found.pop(key).any(), key
        same_bits(found, expected)
        for call in (theirs, reference):
            call.zero_grad()
        same_as_zero(zero_steps(theirs, steps=2), zoo_steps(module, reference, steps=2), name)
    return f"{stage.__name__}, {len(scenarios)} scenarios, {', '.join(names)}", 0.0


@check(grid(W=(2, 3), stage=STAGES))
def zero_adds_to_gradients(stage):
    """Without zero_grad(), or with part of them zeroed, means add up; what a script puts into
    .grad counts."""
    for name in ("blocks", "uneven"):
        call, (_, reference) = sharded(stage, name), wrapped(name)
        found, expected = [], []
        for m, taken in ((call, found), (reference, expected)):
            named = dict(m.named_parameters())
            for step in range(3):
                out_of(m, step).backward()
                taken.append({n.removeprefix("module."): None if p.grad is None else p.grad.clone()
                              for n, p in named.items()})
                if step == 0:  # every second one starts anew
                    for p in list(named.values())[::2]:
                        p.grad = None
                if step == 1:
                    for p in named.values():
                        p.grad = None if p.grad is None else 2 * p.grad
        for a, b in zip(found, expected):
            a, b = joined(a), in_memory_order({n: t for n, t in b.items() if t is not None})
            assert a.keys() == b.keys()
            assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a), name
    torch.manual_seed(0)
    modules = [Chain()]
    modules.append(copy.deepcopy(modules[0]))
    both, x = (stage(modules[0]), DDP(modules[1])), torch.full((3, 64), dist.get_rank() + 1.0)
    for before in (True, False):  # a penalty on what parameters() gives, before a forward and after
        for m in both:
            m.zero_grad()
            early = sum(p.square().sum() for p in m.parameters()) if before else 0
            loss = m(x)
            late = 0 if before else sum(p.square().sum() for p in m.parameters())
            (loss + early + late).backward()
        a = joined({n: p.grad for n, p in both[0].named_parameters()})
        b = in_memory_order({n: p.grad for n, p in modules[1].named_parameters()})
        assert a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)
    return f"{stage.__name__}, 3 backwards of 2 modules; penalties", 0.0


@check([dict(W=2, stage=Zero1), dict(W=3, stage=Zero3)], full=grid(W=(2, 3), stage=STAGES))
def zero_ranks_out_of_step(stage):
    """A rank that sleeps before a collective, a forward, a unit, a gradient or a step changes no
    bit."""
    rank, module = dist.get_rank(), zoo_module("blocks")
    expected = [in_memory_order(step) for step in zoo_steps(*wrapped("blocks"), steps=2)]

    def sleep(*_):
        time.sleep(0.01)

    def slow(function):
        return lambda *args, **kwargs: (sleep(), function(*args, **kwargs))[1]

    for sleeper in range(dist.get_world_size()):
        call = sharded(stage, "blocks")
        with contextlib.ExitStack() as stack:
            if sleeper == rank:
                call.module.register_forward_pre_hook(sleep)
                call.module.layers[1].register_forward_hook(sleep)
                call.module.layers[2].register_forward_pre_hook(sleep)
                call.module.layers[2].register_full_backward_hook(sleep)
                for name in ("exchange", "wait_for"):
                    stack.enter_context(mock.patch.object(ddp, name, slow(getattr(ddp, name))))
                stack.enter_context(mock.patch.object(zero, "wait_for", slow(zero.wait_for)))
                stack.enter_context(mock.patch.object(
                    torch.optim.AdamW, "step", slow(torch.optim.AdamW.step)))
            same_steps(zero_steps(call, steps=2), expected)
    return f"{stage.__name__}, sleeps at 8 places on each rank, {len(list(module.parameters()))} " \
           f"parameters", 0.0


@check([dict(W=2, stage=Zero1), dict(W=3, stage=Zero3)], full=grid(W=(2, 3), stage=STAGES))
def zero_keeps_what_it_sends(stage):
    """What a rank still sends to slower ones is overwritten neither by the units that come next nor
    by new values of its shards."""
    class Some(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.units = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))

        def forward(self, x, n):
            for unit in self.units[:n]:
                x = unit(x)
            return x

    torch.manual_seed(0)
    x, module = torch.randn(2, 256), Some()
    with torch.no_grad():
        for ahead in range(dist.get_world_size()):
            call = stage(copy.deepcopy(module))
            n = 0 if dist.get_rank() == ahead else len(module.units)
            time.sleep(0.1 if n else 0)  # while the one ahead sends all that it does not use
            found = call(x, n)
            for shard in call.parameters():
                shard.zero_()
            assert torch.equal(found, module(x, n))
    return f"{stage.__name__}, each rank 0.1 s ahead", 0.0


class Half(torch.nn.Module):
    """Gives fp32 to a part of its own, which is no entry of a unit: nobody casts that."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(5, 5)

    def forward(self, x):
        return checkpoint(lambda x: self.head(x.float()), x, use_reentrant=False)


@check(grid(W=(1, 2), stage=STAGES))
def zero_recomputes(stage):
    """Under activation checkpointing blocks run twice, are gathered as often as without it, and
    their activations are not kept."""
    kept, idx, n_gathers = {False: 0, True: 0}, torch.arange(32).view(2, 16), []
    for on in kept:
        def keep(t):
            kept[on] += t.nbytes
            return t

        call, calls = stage(small_model(n_layer=6, activation_checkpointing=on)), []
        call.module.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
        with mock.patch.object(zero, "all_gather", side_effect=zero.all_gather) as gathers:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                loss = call(idx, idx)[1]
            loss.backward()
        n_gathers.append(gathers.call_count)
        assert len(calls) == 1 + on, calls
    assert len(set(n_gathers)) == 1, n_gathers
    call = stage(Half(), param_dtype=torch.bfloat16)
    raises(RuntimeError, "same dtype", call, torch.ones(2, 5))
    assert 0 < kept[True] < 0.3 * kept[False], kept
    return f"{stage.__name__}, bytes kept for the backward: {kept[True] / kept[False]:.2f}", 0.0


class Chain(torch.nn.Module):
    """n equal units of 64 x 64 and a root of 64 + 1 parameters."""

    def __init__(self, n=6, width=64):
        super().__init__()
        self.units = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False)
                                         for _ in range(n))
        self.scale, self.shift = (torch.nn.Parameter(torch.ones(k)) for k in (width, 1))

    def forward(self, x):
        for unit in self.units:
            x = unit(x).tanh()
        return (x * self.scale + self.shift).square().mean()


@check(grid(W=(2, 3), stage=STAGES))
def zero_collectives(stage):
    """A step takes as many exchanges as the stage says: gradients once, parameters once, and in
    stage 3 twice but for the last two units, the next unit being under way before it is needed."""
    events = []

    def record(kind, function):
        return lambda flat, *rest: events.append((kind, len(flat))) or function(flat, *rest)

    module, x = Chain(), torch.ones(3, 64)
    module.units[5].never = torch.nn.Parameter(torch.ones(3))  # and holds nothing up
    call, units = stage(module, units=module.units.children()), module.units
    for i, unit in enumerate(units):
        unit.register_forward_hook(lambda *_, i=i: events.append(("forward", i)))
        unit.register_full_backward_pre_hook(lambda *_, i=i: events.append(("backward", i)))
    with mock.patch.object(zero, "all_gather", record("gather", zero.all_gather)), \
            mock.patch.object(zero, "start_reduce_scatter",
                              record("reduce", zero.start_reduce_scatter)):
        for accumulation in (1, 2):
            events.clear()
            for a in range(accumulation):
                call(x).backward()
            kinds = [kind for kind, _ in events]
            n_gathers = (7 + 4) if stage is Zero3 else 7
            assert kinds.count("gather") == accumulation * n_gathers, events
            assert kinds.count("reduce") == accumulation * 7, events
        recorded = list(events)
        held = []
        for _ in range(2):  # nobody steps between no_sync() and the next backward
            with call.no_sync():
                events.clear()
                call(x).backward()
            held.append([kind for kind, _ in events if kind in ("gather", "reduce")])
        assert "reduce" not in held[0] + held[1] and "gather" in held[0], held
        assert ("gather" in held[1]) == (stage is Zero3), held
    kinds = [kind for kind, _ in recorded]
    for i in range(5):
        assert kinds[:recorded.index(("backward", i))].count("reduce") >= 4 - i, recorded
    if stage is Zero3:
        first = recorded[:kinds.index("backward")]
        for i in range(4):  # gathered when unit i has run: the root, units up to it, the next
            so_far = [kind for kind, _ in first[:first.index(("forward", i))]]
            assert so_far.count("gather") == i + 3, first
    return f"{stage.__name__}, 6 units and a root, 1 and 2 backwards", 0.0


def live_bytes():
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # objects that dislike being looked at
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors
                if t.device.type == "cpu" and type(t) in (torch.Tensor, torch.nn.Parameter)}
    return sum(storages.values())


def memory_by_phase(stage, n_units=8, width=64, **options):
    """Live bytes of a Chain after construction, inside forward and backward, after them and a step.
    """
    before, phases = live_bytes(), {}
    call = stage(Chain(n_units, width), **options)
    phases["built"] = live_bytes() - before
    optimizer, x = torch.optim.AdamW(call.parameters(), foreach=False), torch.ones(1, width)
    for step in range(2):
        if step == 1:
            for i in (1, n_units // 2, n_units - 1):
                unit = call.module.units[i]
                unit.register_forward_hook(
                    lambda *_, i=i: phases.update({f"forward {i}": live_bytes() - before}))
                unit.register_full_backward_hook(
                    lambda *_, i=i: phases.update({f"backward {i}": live_bytes() - before}))
        call(x).backward()
        phases["gradients"] = live_bytes() - before
        optimizer.step()
        phases["step"] = live_bytes() - before
        call.zero_grad()
    with torch.no_grad():
        call(x)
    found = {**phases, "evaluation": live_bytes() - before}
    with call.no_sync():
        call(x).backward()
    call.zero_grad()
    return {**found, "given up": live_bytes() - before}


@check([*grid(W=(2,), stage=STAGES), dict(W=4, stage=Zero3), dict(W=4, stage=Zero3, shard_size=2)],
       full=grid(W=(2, 4), stage=STAGES, shard_size=(None, 1, 2)))
def zero_memory(stage, shard_size=None):
    """After construction, backward and step live bytes are the formula's; between, a few units
    more."""
    return check_memory(stage, shard_size or dist.get_world_size(), shard_size=shard_size)


def check_memory(stage, W, n_units=8, width=64, shard_size=None):
    unit, small = 4 * width * width, 4 * (width + 16)  # the root, padded to 64 bytes a parameter
    psi = n_units * unit + small

    def shard(n):
        return n / W + 4 * (n_units + 1)  # rounded up in every bucket

    parameters = psi if stage is not Zero3 else shard(psi)
    gradients = psi if stage is Zero1 else shard(psi)
    held = parameters + gradients + 2 * shard(psi)
    in_flight = 2 * unit + small if stage is Zero3 else 0  # whole parameters
    # Gradients on their way: what arrives for a bucket, beyond stage 1 also two buckets; what
    # autograd makes.
    reduced = (1 if stage is Zero1 else 3) * unit + unit
    small_tensors = 16 * 1024  # activations of one row, step counters
    found = memory_by_phase(stage, n_units, width, shard_size=shard_size)
    for phase, n_bytes in found.items():
        least = parameters if phase == "built" else held
        most = least + in_flight * ("ward" in phase) + reduced * ("backward" in phase)
        assert 0.98 * least - shard(0) <= n_bytes <= most + small_tensors, \
            f"{phase}: {n_bytes:,} bytes, expected {least:,.0f} to {most:,.0f}"
    text = ", ".join(f"{n} {found[n] / (psi / 4):.2f}" for n in ("built", "backward 4", "step"))
    return f"{stage.__name__}, bytes per parameter: {text}", 0.0


def memory_in_a_fake_group(stage, W):
    """check_memory in this process alone, on rank 1 of a group that does not communicate."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=W)
    return check_memory(stage, W, width=256)


@check([dict(W=1, stage=stage, N=N) for stage, N in
        ((Zero1, 64), (Zero2, 8), (Zero3, 8), (Zero3, 64), (Zero3, 1024))],
       full=grid(W=(1,), stage=STAGES, N=(8, 64, 1024)))
def zero_memory_at_scale(stage, N):
    """The same at 8, 64 and 1024 ranks, of which one is real and the others torch's fake group."""
    ranks = Ranks(1)
    try:
        [(compared, difference)] = ranks.run(memory_in_a_fake_group, dict(stage=stage, W=N), 50)
    finally:
        ranks.kill()
    return f"N_d = {N}: {compared}", difference


class Mixture(torch.nn.Module):
    """Blocks beside layers that initialise themselves, with and without buffers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5)) for _ in range(3))
        self.attention, self.head = torch.nn.MultiheadAttention(5, 1), torch.nn.Linear(5, 2)

    def forward(self, x, flag):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.attention(x, x, x)[0]).square().mean()


@check([dict(W=1, stage=Zero2), dict(W=2, stage=Zero1), dict(W=2, stage=Zero3),
        dict(W=3, stage=Zero3)], full=grid(W=(1, 2, 3), stage=STAGES))
def zero_materialises(stage):
    """From the meta device the GPT gets the weights of building it whole, no rank holding more than
    its shards and some units; other modules reset themselves or take init_fn, and ranks agree."""
    built = train.build_model(small_config(mode=stage.__name__.lower()),
                              train.load_tokenizer("bytes"))
    assert all(p.is_meta for p in built.parameters())
    expected, W, live = whole(small_model(n_layer=8)), dist.get_world_size(), []
    with torch.device("meta"):
        gpt = small_model(n_layer=8)
    before, init_weights = live_bytes(), gpt.init_weights
    gpt.init_weights = lambda: (init_weights(), live.append(live_bytes() - before))
    call = stage(gpt, param_dtype=torch.bfloat16)
    del gpt.init_weights
    same_bits(dict(call.full_parameters()), expected)
    psi = sum(4 * p.numel() for p in expected.values())
    block = sum(4 * p.numel() for name, p in expected.items() if name.startswith("blocks.0."))
    kept = psi / W + (2 * 0.5 * block + psi / 2 if stage is not Zero3 else 1.5 * block + psi / 8)
    assert len(live) == 9 and max(live) < kept + 3 * block, (live, kept)
    idx = torch.arange(32).view(2, 16)
    call(idx, idx)[1].backward()
    assert gpt.lm_head.weight is gpt.wte.weight
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        mixture = Mixture()
    call = stage(mixture)
    values = call.full_state_dict()
    assert 0 < values["layers.1.0.weight"].std() < 1 and values["layers.1.1.running_var"].all()
    views = [None] * W
    dist.all_gather_object(views, values)
    for view in views:
        same_bits(view, values)
    zoo_loss(call, 0, 0, dist.get_rank()).backward()

    def fill(m):
        for t in itertools.chain(m.parameters(recurse=False), m.buffers(recurse=False)):
            t.fill_(dist.get_rank() + 7)

    with torch.device("meta"):
        filled, bare = Mixture(), Blocks()
    assert all((t == 7).all() for t in stage(filled, init_fn=fill).full_state_dict().values())
    with torch.device("meta"):
        filled = Mixture()
    filled.init_weights = lambda: [t.fill_(dist.get_rank() + 7) for t in (
        *filled.parameters(), *filled.buffers()) if not t.is_meta]  # again and again
    assert all((t == 7).all() for t in stage(filled).full_state_dict().values())
    raises(RuntimeError, "has a Block on the meta device without reset_parameters.*init_fn", stage,
           bare)
    return f"{stage.__name__}, GPT of 8 blocks, two other modules, 4 ways", 0.0


@check(grid(W=(1, 2, 3), stage=STAGES))
def zero_state_dicts(stage):
    """Shards are (n, 1, ..., 1) under the module's names and tile it; whole and sharded state dicts
    load and come back, misfits are named, and nothing is written then."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for name in ("branches", "nested", "normed", "tied_units", "mixed_dtypes", "uneven"):
        plain, call = zoo_module(name), sharded(stage, name)
        named = dict(plain.named_parameters())
        shards = dict(call.named_parameters())
        assert list(shards) == list(named)
        for n, p in shards.items():
            assert p.dim() == max(1, named[n].dim()) and p.shape[1:].numel() == 1, (n, p.shape)
            assert (p.dtype, p.requires_grad) == (named[n].dtype, named[n].requires_grad)
        sizes = [None] * W
        dist.all_gather_object(sizes, [p.numel() for p in shards.values()])
        assert [sum(part) for part in zip(*sizes)] == [p.numel() for p in named.values()]
        same_bits(call.full_state_dict(), plain.state_dict())
        ours = call.state_dict()
        assert list(ours) == list(plain.state_dict())
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in ours.values())
        assert list(torch.nn.ModuleDict(dict(net=call)).state_dict()) == [f"net.{n}" for n in ours]
        torch.manual_seed(5)
        values = {n: torch.randn(t.shape).to(t.dtype) for n, t in plain.named_parameters()}
        plain.load_state_dict(values, strict=False)  # so that tied ones stay equal
        call.load_full_state_dict(plain.state_dict())
        same_bits(call.full_state_dict(), plain.state_dict())
        if name != "normed":
            loss = zoo_loss(plain, 0, 0, rank)
            assert torch.equal(zoo_loss(call, 0, 0, rank), loss)
        if stage is not Zero3:  # the module's own tensors are current
            same_bits(dict(call.module.named_parameters()), dict(plain.named_parameters()))
        good = plain.state_dict()
        first = next(n for n, t in good.items() if t.dim() > 1)
        for bad, text in (({n: t for n, t in good.items() if n != first}, f"missing: {first}$"),
                          ({**good, "more": good[first]}, "left over: more$"),
                          ({**good, first: good[first][1:]}, f"shapes: {re.escape(first)} \\(")):
            raises(RuntimeError, f"nothing was loaded; {text}", call.load_full_state_dict, bad)
        raises(RuntimeError, "load_full_state_dict", call.module.load_state_dict, good)
        same_bits(call.full_state_dict(), good)
        call.load_state_dict(ours)
        same_bits(call.state_dict(), ours)
    return f"{stage.__name__}, 6 modules", 0.0


@check(grid(W=(2,), stage=STAGES))
def zero_state_dicts_of_odd_modules(stage):
    """What get_extra_state() gives is kept, and a parameter that a hook renames is still whole."""
    class Extra(torch.nn.Linear):
        """Names, and keeps, things in its own way."""

        extra = 3

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, extra):
            self.extra = extra

    plain = torch.nn.Sequential(Extra(5, 5), torch.nn.Linear(5, 2))
    plain[1]._register_state_dict_hook(lambda module, found, prefix, _: found.update(
        {f"{prefix}renamed": found.pop(f"{prefix}weight")}))
    call = stage(copy.deepcopy(plain))
    good, ours = call.full_state_dict(), call.state_dict()
    assert good.pop("0._extra_state") == 3 and set(ours) == {*good, "0._extra_state"}
    same_bits(good, {n: t for n, t in plain.state_dict().items() if n in good})
    call.load_full_state_dict({**good, "0._extra_state": 4})
    assert call.module[0].extra == 4
    call.load_state_dict({**ours, "0._extra_state": 5})
    assert call.module[0].extra == 5
    return f"{stage.__name__}, a module with both", 0.0


@check([dict(W=2, stage=stage) for stage in STAGES])
def zero_leaves_the_rest_alone(stage):
    """functional_call() sees the tensors it is given, shards have the attributes that parameters
    had, and a copy of the module is a module like others."""
    for device in ("cpu", "meta"):
        with torch.device(device):
            module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ModuleList())
        module[0].bias.no_decay = True
        call = stage(module)
        assert [hasattr(p, "no_decay") for p in call.parameters()] == [False, True]
    whole, x = {n: torch.randn(p.shape) for n, p in zoo_module("blocks").named_parameters()}, \
        torch.randn(3, 5)
    call, plain = sharded(stage, "blocks"), zoo_module("blocks")
    before = call.full_state_dict()
    replaced = torch.func.functional_call(call.module, whole, (x, True))
    assert torch.equal(replaced, torch.func.functional_call(plain, whole, (x, True)))
    assert torch.equal(call(x, True), plain(x, True))
    same_bits(call.full_state_dict(), before)
    twin = copy.deepcopy(call.module)
    if stage is not Zero3:
        twin.load_state_dict(whole)
        assert torch.equal(twin(x, True), replaced)
    return f"{stage.__name__}, 2 modules", 0.0


@check(grid(W=(2,), stage=STAGES))
def zero_refuses_by_name(stage):
    """Casts, copies, replaced shards, stale graphs, double backward, reentrant checkpoints, sparse
    gradients, units within each other: a clear error, and the next step is right."""
    rank, name = dist.get_rank(), stage.__name__
    expected = [in_memory_order(step) for step in zoo_steps(*wrapped("blocks"))]
    call = sharded(stage, "blocks")
    for change in (call.half, call.double, lambda: call.to("cpu"), lambda: call.to(torch.bfloat16)):
        raises(RuntimeError, f"^{name}: cast or move the module before", change)
    raises(TypeError, "full_state_dict", copy.deepcopy, call)
    raises(TypeError, "full_state_dict", pickle.dumps, call)
    with warnings.catch_warnings(action="ignore"):  # torch's, of create_graph
        raises(RuntimeError, f"^{name}: .*create_graph", out_of(call).backward, create_graph=True)
    call.zero_grad()
    same_steps(zero_steps(call), expected)
    loss = out_of(call)  # a graph of the weights before a step
    optimizer = torch.optim.SGD(call.parameters(), lr=0.1)
    out_of(call).backward()
    optimizer.step()
    out_of(call)
    raises(RuntimeError, "modified", loss.backward)

    class Spoiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 5)

        def forward(self, x, flag):
            h = self.layer(x)
            out = h * h
            h.add_(1)  # autograd has saved it
            return out.sum()

    class Odd(torch.nn.Module):
        def __init__(self, sparse=False):
            super().__init__()
            self.table, self.sparse = torch.nn.Embedding(3, 5, sparse=sparse), sparse
            self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5)])

        def forward(self, x, flag):
            x = x + self.table(torch.tensor([rank]))
            return checkpoint(self.layers[0], x, use_reentrant=not self.sparse).sum()

    for build, text in ((Spoiled, "modified by an inplace|modified in place"),
                        (Odd, f"^{name}: .*use_reentrant=False"),
                        (lambda: Odd(sparse=True), f"^{name}: .*table.weight is sparse")):
        call = stage(build())
        raises(RuntimeError, text, out_of(call).backward)
    call = stage(Tied())
    next(call.parameters()).data = torch.zeros(3, 1)
    raises(RuntimeError, f"^{name}: embedding.weight was cast, moved or replaced", out_of, call)
    call = stage(Tied())
    call.module.double()
    raises(RuntimeError, f"^{name}: embedding.weight was cast, moved or replaced", out_of, call)
    if stage is Zero3:
        call = sharded(stage, "blocks")
        call.module.layers[0].norm.register_forward_hook(
            lambda *_: call.module.layers[2](torch.ones(3, 5)))
        raises(RuntimeError, "layers.2 is called inside the forward of layers.0", out_of, call)
    same_steps(zero_steps(sharded(stage, "blocks")), expected)
    return f"{name}, 13 mistakes", 0.0


@check(grid(W=(2,), stage=STAGES))
def zero_refuses_at_construction(stage):
    """Odd units, ranks that differ, a module that is wrapped or was: a clear error on all ranks."""
    rank, name = dist.get_rank(), stage.__name__
    module = Tied()
    raises(ValueError, f"^{name}: units has a Linear that is not a submodule of the Tied", stage,
           module, units=[torch.nn.Linear(5, 5)])
    raises(RuntimeError, f"^{name}: ranks wrap different modules: .*param_dtype", stage, module,
           param_dtype=torch.bfloat16 if rank else None)
    raises(RuntimeError, f"^{name}: .*wrapped already", stage, stage(Tied()))
    if stage is Zero3:
        call = sharded(stage, "blocks")
        left_over = call.module
        del call
        raises(RuntimeError, f"^{name}: .*are shards", stage, left_over)
    raises(RuntimeError, "head.weight.*11.*12|embedding.weight", stage,
           torch.nn.Linear(11 + rank, 3) if rank else module)
    out_of(stage(module))
    return f"{name}, 5 mistakes", 0.0


@check(grid(W=(2,), stage=STAGES))
def zero_frees_its_memory(stage):
    """A wrapper that is dropped leaves no hook, and with its module no memory; no cycle waits for
    the garbage collector; a frozen base costs no gradients; outside, module.weight is the shard."""
    before = live_bytes()
    call = sharded(stage, "blocks")
    module, weight = call.module, call.module.layers[0].down.weight
    names = dict(call.named_parameters())
    for moment in (lambda: out_of(call), lambda: out_of(call).backward(),
                   lambda: list(zero_steps(call))):
        kept = moment()
        for n, p in module.named_parameters():
            assert (p is names[n]) == (stage is Zero3)
            repr(p.clone())
        del kept
        call.zero_grad()
    frozen = [b for b in call._all_buckets if not b.trained]
    assert len(frozen) == 4 and all(b.flat is None and b.gradient is None for b in frozen)
    optimizer_hooks = len(_global_optimizer_pre_hooks)
    gone = [weakref.ref(call), weakref.ref(call._all_buckets[0]), weakref.ref(call._units[1])]
    gc.disable()
    del call, frozen, names, p
    try:
        assert not any(ref() for ref in gone), "kept alive"
    finally:
        gc.enable()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert not weight._post_accumulate_grad_hooks
    assert len(_global_optimizer_pre_hooks) == optimizer_hooks - 1
    del module, weight
    left = live_bytes() - before
    assert left <= 0, f"{left} bytes are left"
    return f"{stage.__name__}, 3 steps", 0.0


@check([dict(W=W, stage=stage, missing=missing) for W, stage, missing in
        ((2, Zero1, "forward"), (3, Zero3, "backward"))],
       full=grid(W=(2, 3), stage=STAGES, missing=("forward", "backward")))
def zero_names_a_missing_rank(stage, missing):
    """Where a rank makes no forward or backward, the others raise in time, naming unit or bucket.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=1.5))
    call = sharded(stage, "blocks", process_group=group)
    odd_one, start_s = dist.get_rank() == dist.get_world_size() - 1, time.monotonic()
    loss = out_of(call) if missing == "backward" else None
    if odd_one:
        time.sleep(2.5)
    elif missing == "forward":
        with warnings.catch_warnings(action="ignore"):  # torch's, of a hook that raises again
            raises(RuntimeError, "not gathered.*fewer forwards.*longer", out_of,
                   call)
    else:
        raises(RuntimeError, "bucket 1 of .*was not averaged|not all ranks have begun this backw",
               loss.backward)
    assert time.monotonic() - start_s < 8
    return f"{stage.__name__}, no {missing} on one rank; timeout 1.5 s", 0.0


@check(grid(W=(2, 3), stage=STAGES))
def zero_halves_the_traffic(stage):
    """With param_dtype and reduce_dtype bf16 ranks exchange half the bytes; masters, gradients and
    the optimizer's state stay in fp32."""
    sent = {}
    for dtype in (None, torch.bfloat16):
        call = sharded(stage, "gpt", param_dtype=dtype, reduce_dtype=dtype)
        optimizer, sizes, exchange = torch.optim.AdamW(call.parameters()), [], ddp.exchange

        def spy(sends, *rest):
            sizes.extend(t.nbytes for t in sends.values())
            return exchange(sends, *rest)

        with mock.patch.object(ddp, "exchange", spy):
            out_of(call).backward()
        optimizer.step()
        for p in call.parameters():
            assert p.dtype == p.grad.dtype == optimizer.state[p]["exp_avg"].dtype == torch.float32
        sent[dtype] = sum(sizes)
    ratio = sent[torch.bfloat16] / sent[None]
    assert 0.5 <= ratio < 0.52, ratio
    return f"{stage.__name__}, bytes sent in bf16 over fp32: {ratio:.3f}", 0.0


HYBRID = ("gpt", "tied_units", "uneven", "late", "blocks", "skipping", "frozen_units")


@check([dict(W=W, stage=stage, names=HYBRID[:2]) for W, stage in
        ((2, Zero2), (4, Zero3))],
       full=grid(W=(2, 3, 4), stage=STAGES, names=(HYBRID,)), limit_s=120)
def zero_hybrid(stage, names):
    """Shards over groups of 1, 2 or W ranks: 1 is DDP, W is one group, 2 is DDP with nodes of 2, to
    the bit."""
    W = dist.get_world_size()
    for name in names:
        same_as_zero(zero_steps(sharded(stage, name, shard_size=1), 2, 0.05),
                     zoo_steps(*wrapped(name), 2, 0.05), name)
        same_steps(zero_steps(sharded(stage, name, shard_size=W), 2, 0.05),
                   zero_steps(sharded(stage, name), 2, 0.05))
        if W == 4:
            by_nodes = with_hook(name, HierarchicalState(2), hierarchical_hook)
            same_as_zero(zero_steps(sharded(stage, name, shard_size=2), 1, 0.05),
                         zoo_steps(*by_nodes, 1, 0.05), name)
    raises(ValueError, "groups of 5 ranks", stage, zoo_module("gpt"), shard_size=5)
    return f"{stage.__name__}, {', '.join(names)}", 0.0


@check([dict(W=2, stage=stage) for stage in STAGES])
def zero_offload(stage):
    """On a CPU offload changes nothing and says so; as it is on CUDA, shards and their gradients
    apart from what forward and backward use, bits are the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = sharded(stage, "gpt", offload=True)
    assert ["offload changes nothing" in str(w.message) for w in caught] == [True], caught
    for name, dtype in (("gpt", None), ("tied_units", None), ("blocks", torch.bfloat16)):
        with (mock.patch.object(stage, "_is_offloaded", lambda *_: True),
              mock.patch.object(torch.Tensor, "pin_memory", lambda t: t),  # as if it were already
              mock.patch.object(torch.cuda, "current_stream") as stream):
            call = sharded(stage, name, param_dtype=dtype, reduce_dtype=dtype)
            ours = list(zero_steps(call, 2, 0.05))
            assert stream.return_value.synchronize.called, "a step may come before the last copy"
        memory = {unit.slot.storage.data_ptr() for unit in call._units}
        memory |= {b.flat.untyped_storage().data_ptr() for b in call._all_buckets
                   if b.flat is not None}
        for _, shard in call.named_parameters():
            for t in (shard, shard.grad):
                assert t is None or t.untyped_storage().data_ptr() not in memory, "not apart"
        del call, shard, t
        same_steps(ours, zero_steps(sharded(stage, name, param_dtype=dtype, reduce_dtype=dtype), 2,
                                    0.05))
    return f"{stage.__name__}, 3 modules, fp32 and bf16", 0.0


@check(grid(W=(2,), stage=STAGES), limit_s=120)
def zero_compiled_blocks(stage):
    """With torch.compile per block, each stage gives the bits of DDP with torch.compile per block.
    """
    if not shutil.which("c++") and not shutil.which("g++") and not shutil.which("clang++"):
        raise Skip("torch.compile on CPU needs a C++ compiler")
    modules = [Scalar(lambda: small_model(n_layer=3)) for _ in range(2)]
    for module in modules:
        module.inner.compile_blocks()
    same_as_zero(zero_steps(stage(modules[0])), zoo_steps(modules[1], DDP(modules[1])), "gpt")
    return f"{stage.__name__}, gpt of 3 blocks, 3 steps", 0.0


# -------------------------------------------------------------------------------------------------
# train.py: the step


@check([dict(W=2, mode="torch-ddp", accumulation=2, clip=0.1),
        dict(W=2, mode="torch-fsdp", accumulation=1, clip=0.1),
        dict(W=1, mode="torch-ddp", accumulation=2, clip=0),
        dict(W=1, mode="torch-fsdp", accumulation=2, clip=0.1)],
       full=grid(W=(1, 2), mode=("torch-ddp", "torch-fsdp"), accumulation=(1, 2, 4), clip=(0, 0.1)))
def naive_is_torch(mode, accumulation, clip):
    """naive gives the bits of torch DDP and of FSDP2 at W = 2: every parameter, every step."""
    W = dist.get_world_size()
    naive = small_config(mode="naive", global_batch_size=W * accumulation, grad_clip=clip)
    difference = same_runs(naive, replace(naive, mode=mode), steps=4)
    return f"{mode}, {accumulation} micro-steps, clip {clip}, 4 steps", difference


@check(grid(W=(1, 2, 4), mode=("naive", "ddp", "zero1", "zero2", "zero3")))
def modes_are_one_process(mode):
    """W ranks give the bits of one process that accumulates the same W micro batches."""
    W = dist.get_world_size()
    config = small_config(mode=mode, global_batch_size=W, grad_clip=0.1)
    difference = same_runs(config, replace(config, mode="single"), steps=4)
    return f"{mode}, single with {W} micro-steps, clip 0.1, 4 steps", difference


@check([dict(W=3, accumulation=2, clip=0.1, cap=0.01), dict(W=4, accumulation=1, clip=0, cap=25.0)],
       full=grid(W=(1, 2, 3, 4), accumulation=(1, 2, 4), clip=(0, 0.1), cap=(1e-6, 0.01, 25.0)))
def mode_ddp_is_naive(accumulation, clip, cap):
    """train.py --mode ddp gives the bits of --mode naive: every parameter, every step."""
    naive = small_config(mode="naive", global_batch_size=dist.get_world_size() * accumulation,
                         grad_clip=clip, bucket_cap_mb=cap)
    difference = same_runs(naive, ours := replace(naive, mode="ddp"), steps=4)
    assert Run(ours).model.bucket_cap_mb == cap
    return f"{accumulation} micro-steps, clip {clip}, buckets of {cap} MB, 4 steps", difference


@check(grid(W=(2, 4), mode=("zero2", "zero3"), accumulation=(2,)),
       full=grid(W=(1, 2, 4), mode=("zero2", "zero3"), accumulation=(1, 2, 4)))
def mode_zero_is_single(mode, accumulation):
    """train.py --mode zero2, zero3 give the bits of one process however micro batches are dealt."""
    ours = small_config(mode=mode, global_batch_size=dist.get_world_size() * accumulation,
                        grad_clip=0.1)
    difference = same_runs(ours, replace(ours, mode="single"), steps=4)
    return f"{mode}, {accumulation} micro-steps, clip 0.1, 4 steps", difference


@check([dict(W=2, dtype="bf16", mode="torch-ddp"), dict(W=2, dtype="fp16", mode="torch-fsdp"),
        dict(W=2, dtype="fp16", mode="ddp"), dict(W=2, dtype="bf16", mode="zero1"),
        dict(W=2, dtype="fp16", mode="zero2"), dict(W=2, dtype="fp16", mode="zero3")],
       full=grid(W=(2,), dtype=("bf16", "fp16"),
                 mode=("ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-fsdp", "single")))
def naive_is_torch_under_autocast(dtype, mode):
    """Under autocast, with the gradient scaler for fp16, naive still gives the bits of torch."""
    naive = small_config(mode="naive", global_batch_size=2, dtype=dtype)
    return f"{mode}, {dtype}, 4 steps", same_runs(naive, replace(naive, mode=mode), steps=4)


@check([dict(W=2)])
def mode_hybrid_is_ddp():
    """--shard_size 1 makes each stage of ZeRO ddp, under accumulation too; --shard_size W changes
    nothing."""
    options = dict(micro_batch_size=1, global_batch_size=8, grad_clip=0.05)
    for mode in train.ZERO:
        hybrid = small_config(mode=mode, shard_size=1, **options)
        same_runs(small_config(mode="ddp", **options), hybrid, 3)
        same_runs(small_config(mode=mode, **options), replace(hybrid, shard_size=2), 3)
    return f"{', '.join(train.ZERO)}, 4 micro-steps", 0.0


def poisoned_gradient(value):
    """Within this context, an element of rank 1's gradients has a value after each backward."""
    finish_gradients = train.finish_gradients

    def poisoned(model, config, worker):
        exposed_s = finish_gradients(model, config, worker)
        if dist.get_rank() == 1:
            train.local(next(model.parameters()).grad).view(-1)[0] = value
        return exposed_s

    return mock.patch.object(train, "finish_gradients", poisoned)


@check([dict(W=2, mode=mode) for mode in ("naive", "ddp", "zero1", "zero3", "torch-fsdp")]
       + [dict(W=2, mode="zero3", dtype="fp32", param_dtype="fp16")],
       full=grid(W=(2, 3), mode=("naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp",
                                 "torch-fsdp"))
       + grid(W=(2, 3), mode=("zero1", "zero2", "zero3"), dtype=("fp32",), param_dtype=("fp16",)))
def fp16_inf_on_one_rank(mode, dtype="fp16", param_dtype=None):
    """An inf in one rank's gradient makes every rank skip the step and halve the loss scale."""
    run = Run(small_config(mode=mode, dtype=dtype, param_dtype=param_dtype,
                           global_batch_size=dist.get_world_size()))
    before, scale = whole(run.model), run.scaler.get_scale()
    with poisoned_gradient(math.inf):
        run.step()
    same_bits(whole(run.model), before)
    assert run.scaler.get_scale() == scale / 2
    run.step()
    after = whole(run.model)
    assert run.scaler.get_scale() == scale / 2
    assert not torch.equal(after["wte.weight"], before["wte.weight"]), "the next step did nothing"
    return f"{mode}, {param_dtype or dtype}: parameters and scale after the step", 0.0


@check([dict(W=1, dtype="bf16"), dict(W=1, dtype="fp16"),
        dict(W=1, param_dtype="bf16", mode="zero3"), dict(W=1, param_dtype="fp16", mode="zero1")])
def amp_is_stable(**kind):
    """After 50 steps bf16 and fp16 are within 0.01 nats of fp32's loss; no step was skipped."""
    random, tokens = np.random.default_rng(0), [0]
    for surprise in random.random(20000) < 0.1:  # 9 of 10 tokens follow from the one before
        tokens.append(random.integers(61) if surprise else (5 * tokens[-1] + 1) % 61)
    losses = []
    for options in ({}, kind):
        config = small_config(**options, max_steps=50)
        run = Run(config, train.Batches(np.array(tokens), 16, config.global_batch_size, seed=0))
        history = [np.mean(run.step().losses) for _ in range(50)]
        losses.append(np.mean(history[-10:]))
        assert np.isfinite(history).all() and losses[-1] < history[0] - 0.5, "it does not learn"
        assert run.scaler.get_scale() in (1.0, 65536.0), "a step was skipped"
    difference = abs(losses[1] - losses[0])
    assert 0 < difference < 0.01
    return f"{' '.join(kind.values())} against fp32, mean loss of the last 10 steps", difference


@check([dict(W=W) for W in (1, 2, 4)])
def losses_are_global_means():
    """Logged losses are those of one process on the same data, bit for bit; validation too."""
    W = dist.get_world_size()
    naive = small_config(mode="naive", global_batch_size=2 * W, eval_steps=5)
    a, b = Run(naive), Run(replace(naive, mode="single"))
    ours, theirs = (r.step().losses for r in (a, b))
    assert ours == theirs
    assert len(set(ours)) == 2 * W, "micro batches repeat"
    b.model.load_state_dict(a.model.state_dict())
    val = train.Batches(a.batches.tokens, 16, 2, seed=0)
    ours, theirs = (train.evaluate(r.model, val, r.config, r.worker) for r in (a, b))
    assert ours == theirs and a.model.training
    return f"{2 * W} training losses, mean of 5 validation batches", abs(ours - theirs)


@check([dict(W=1)])
def schedule_and_decay():
    """Linear warm-up, cosine to min_lr; weight decay on tensors of two or more dimensions only."""
    config = train.Config(lr=1.0, min_lr=0.1, warmup_steps=4, max_steps=14)
    expected = {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 9: 0.55, 14: 0.1}
    found = {step: train.lr_at(step, config) for step in expected}
    worst = max(abs(found[step] - lr) for step, lr in expected.items())
    assert worst < 1e-12, f"{found}, expected {expected}"
    assert train.lr_at(0, replace(config, warmup_steps=0)) == 1.0
    gpt = small_model()
    decayed, rest = train.make_optimizer(gpt, config).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0) and not decayed["fused"]
    undecayed = {id(p) for p in rest["params"]}
    assert undecayed == {id(p) for name, p in gpt.named_parameters() if "norm" in name}
    assert len(decayed["params"]) + len(undecayed) == len(list(gpt.parameters()))
    return "learning rate of six steps, parameter groups", worst


# -------------------------------------------------------------------------------------------------
# train.py: the command line

TINY = ("--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", 16, "--micro_batch_size", 1,
        "--global_batch_size", 2, "--max_steps", 3, "--warmup_steps", 1, "--eval_steps", 3,
        "--eval_interval", 2, "--sample_tokens", 8, "--save_interval", 0, "--check_interval", 1,
        "--dataset", HERE / "model.py")


@check([dict(W=1)], limit_s=120)
def bad_input_is_one_line():
    """Every mistake gives exit status 2, one line on stderr that names it, and no traceback."""
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder)
        (data / "empty.txt").touch()
        (data / "short.txt").write_text("too short\n")
        (data / "latin1.txt").write_bytes(b"caf\xe9" * 1000)
        (data / "file").touch()
        for name, n_tokens, tail in (("odd", 300, b"x"), ("beyond", 300, b""), ("none", 0, b"")):
            (data / name).mkdir()
            tokens = np.arange(n_tokens, dtype=np.uint16).tobytes() + tail
            for part in ("train.bin", "val.bin"):
                (data / name / part).write_bytes(tokens)
        offline = dict(TIKTOKEN_CACHE_DIR=f"{folder}/cache", HTTPS_PROXY="http://127.0.0.1:9")
        cases = [  # flags, what the line must say
            ("--no_such_flag 1", "no_such_flag"), ("--lr fast", "--lr"),
            ("--max_steps 1.5", "--max_steps"), ("--max_steps 0", "--max_steps 0"),
            ("--mode zero9", "--mode zero9"), ("--param_dtype bf16", "--param_dtype is for"),
            ("--dtype fp8", "--dtype fp8"), ("--model gpt5", "--model gpt5"),
            ("--lr nan", "--lr nan"), ("--lr -1", "--lr -1"), ("--lr 1e300", "--lr 1e+300"),
            ("--min_lr 1", "--min_lr 1"),
            ("--beta2 1", "--beta2 1.0"),
            ("--bucket_cap_mb 0", "--bucket_cap_mb 0.0"), (f"--seed {2**64}", "--seed"),
            ("--global_batch_size 6", "global_batch_size 6"),
            ("--n_head 3", "n_head 3"), ("--n_kv_head 3", "n_kv_head 3"),
            ("--tokenizer gpt9", "--tokenizer gpt9"), ("--tokenizer gpt2", "TIKTOKEN_CACHE_DIR"),
            (f"--dataset {data}/missing.txt", "missing.txt: no such file"),
            (f"--dataset {data}/empty.txt", "is empty"),
            (f"--dataset {data}/short.txt", "shorter than one block"),
            (f"--dataset {data}/latin1.txt", "not UTF-8"),
            (f"--dataset {data}/none", "has 0 bytes"), (f"--dataset {data}/odd", "has 601 bytes"),
            (f"--dataset {data}/beyond", "token 299"), (f"--dataset {data}", "no train.bin"),
            (f"--dataset {HERE}/model.py --block_size 1024 --global_batch_size 64",
             "--global_batch_size 64"),
            (f"--out_dir {data}/file", f"{data}/file"), ("--threads 99999", "--threads 99999"),
            (f"--n_embd {10**12}", "out of memory"),
        ]

        def refuses(flags, expected):
            argv = ["--out_dir", f"{folder}/out", *flags.split()]
            code, _, stderr = run_main(argv, **offline)
            assert code == 2, f"{flags}: exit {code}, {stderr}"
            assert re.fullmatch(r"train\.py: .*\n", stderr), f"{flags}: {stderr}"
            assert expected in stderr, f"{flags}: {stderr}"

        on_both_cores(refuses, *zip(*cases))
    return f"{len(cases)} command lines", 0.0


@check([dict(W=1)])
def flags_that_belong_together():
    """A flag that another one makes void, or that does not go with it, is refused by name."""
    cases = (("--micro_batch_size most", "'most' is neither a whole number nor auto"),
             ("--micro_batch_size 0", "--micro_batch_size 0"),
             ("--memory_limit_gb 4", "--memory_limit_gb is for --micro_batch_size auto"),
             ("--comm_hook topk", "--comm_hook is for --mode ddp"),
             ("--mode ddp --comm_hook zip", "--comm_hook zip: choose one of bf16"),
             ("--mode ddp --topk_ratio 0.1", "--topk_ratio is for --comm_hook topk"),
             ("--mode ddp --comm_hook topk --topk_ratio 2", "--topk_ratio 2.0"),
             ("--mode ddp --comm_hook topk --dtype fp16", "changes the scale of gradients"),
             ("--mode ddp --comm_hook hierarchical --node_size 2", "--node_size 2 does not divide"),
             ("--mode ddp --shard_size 1", "--shard_size is for --mode zero1"),
             ("--mode zero2 --shard_size 2", "--shard_size 2 does not divide 1 rank"),
             ("--offload", "--offload is for --mode zero1"),
             ("--init_from x --model gpt2", "--model and --init_from"))

    def start(flags):
        config = train.parse_args(flags.split())
        train.check(config)
        train.accumulation_steps(config, 1)

    for flags, text in cases:
        raises(train.UserError, text, start, flags)
    return f"{len(cases)} command lines", 0.0


@check([dict(W=1)])
def bad_input_of_many_ranks():
    """Every rank exits with 2, and rank 0 alone speaks, whether ranks have met by then or not."""
    argv = [*TINY, "--out_dir", "nowhere"]
    cases = (("single", "--mode single is one process"), ("zero9", "--mode zero9"))
    for mode, text in cases:
        refused([*argv, "--mode", mode], text, W=2)
    return "mode single and mode zero9 at world size 2", 0.0


METRICS = {"step", "loss", "lr", "grad_norm", "param_norm", "tokens_per_sec", "step_ms",
           "comm_exposed_ms", "mfu", "mem_bytes", "ranks"}
RESULT = {"mode", "world_size", "steps", "train_loss", "val_loss", "tokens_per_sec", "step_ms",
          "peak_mem_bytes", "param_sha256", "threads", "start_mem_bytes", "comm_exposed_ms", "mfu",
          "bytes_per_param", "bytes_per_param_formula"}


def promised_output(mode, W, folder):
    """Run train.py, assert that its output is as documented -> (RESULT, what precedes it)."""
    default = mode == ("ddp" if W > 1 else "single")
    argv = [*([] if default else ["--mode", mode]), "--out_dir", folder, *TINY, "--deterministic"]
    code, stdout, stderr = run_main(argv, W)
    assert code == 0 and not stderr, f"{mode}: exit {code}, {stderr}"
    lines = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["val_loss" in line for line in lines] == [False, True, True]
    assert all(line.keys() - {"val_loss"} == METRICS for line in lines), lines[0].keys()
    held = re.search(r"^memory per rank, MB: .*; peak \d+$", stdout, re.MULTILINE).group()
    sizes = re.findall(r"([\d.]+) \(formula ([\d.]+)\)", held)
    assert len(sizes) == 3 and all(abs(float(a) - float(b)) < 0.02 for a, b in sizes), held
    last = stdout.splitlines()[-1]
    assert last.startswith("RESULT "), last
    result = json.loads(last.removeprefix("RESULT "))
    assert result.keys() == RESULT, result.keys()
    assert (result["mode"], result["world_size"], result["steps"]) == (mode, W, 3)
    assert result["train_loss"] == lines[-1]["loss"] and result["val_loss"] == lines[-1]["val_loss"]
    assert 0 < result["start_mem_bytes"] < result["peak_mem_bytes"]
    exposed = [line["comm_exposed_ms"] for line in lines]
    assert result["comm_exposed_ms"] == (None if None in exposed else statistics.median(exposed))
    n_params = int(re.search(r"^([\d,]+) parameters", stdout, re.M).group(1).replace(",", ""))
    for key, column in zip(("bytes_per_param", "bytes_per_param_formula"), zip(*sizes)):
        assert abs(1e-6 * n_params * result[key] - sum(map(float, column))) < 0.02, (key, held)
    return result, re.search(r"^sample:.*(?=^RESULT)", stdout, re.MULTILINE | re.DOTALL).group()


@check([dict(W=1)], limit_s=120)
def command_line_ends_on_same_bits():
    """Modes end on one param_sha256; output is as promised; torchrun's default is ddp."""
    runs = ((1, "single"), (1, "naive"), (1, "zero2"), (2, "ddp"), (2, "zero1"), (2, "zero3"),
            (2, "torch-fsdp"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = on_both_cores(lambda W, mode: promised_output(mode, W, f"{folder}/{mode}{W}"),
                                *zip(*runs))
    for key in ("param_sha256", "train_loss", "val_loss"):
        assert len({result[key] for result, _ in outputs}) == 1, (key, outputs)
    assert len({text for _, text in outputs}) == 1, "the sample texts differ"
    return f"hash, losses, sample and metrics of {len(runs)} runs", 0.0


def limit_memory():
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_DATA, (500_000_000, 500_000_000))


@check([dict(W=1)], limit_s=150)
def zero3_trains_what_does_not_fit():
    """Where 500 MB of data a process are allowed, 19M parameters take more than single and ddp can
    have, who say so in one line; zero3 on 4 ranks trains them."""
    if sys.platform != "linux":
        raise Skip("RLIMIT_DATA counts all private memory on Linux only")
    with tempfile.TemporaryDirectory() as folder:
        sizes = dict(zip(TINY[::2], TINY[1::2])) | {"--n_layer": 24, "--n_embd": 256,
                                                    "--n_head": 4, "--global_batch_size": 4,
                                                    "--eval_steps": 0, "--sample_tokens": 0}
        argv = [*itertools.chain(*sizes.items()), "--out_dir", folder]
        for W, mode in ((1, "single"), (2, "ddp")):
            code, _, stderr = run_main([*argv, "--mode", mode], W, plant=limit_memory)
            assert code == 2, (mode, code, stderr[-500:])
            assert re.fullmatch(r"train\.py: out of memory.*\n", stderr), stderr
        code, stdout, stderr = run_main([*argv, "--mode", "zero3"], 4, plant=limit_memory)
        assert code == 0 and "RESULT" in stdout, stderr
    return "24 layers, 256 wide: single, ddp at W = 2, zero3 at W = 4", 0.0


@check([dict(W=1, modes=("ddp", "zero2", "zero3", "torch-fsdp"))],
       full=[dict(W=1, modes=train.MODES)], limit_s=120)
def recomputing_changes_no_bit(modes):
    """--activation_checkpointing ends on the same bits in every mode."""
    modes = ("single", *modes)  # the first one runs without
    with tempfile.TemporaryDirectory() as folder:
        results = on_both_cores(lambda i, mode: finish(
            1 if mode == "single" else 2, [*tiny(f"{folder}/{i}", mode=mode, global_batch_size=2),
                                           *(["--activation_checkpointing"] if i else [])]),
            *zip(*enumerate(modes)))
    assert len({result["param_sha256"] for result in results}) == 1, results
    return f"{', '.join(modes[1:])}", 0.0


@check([dict(W=1)], limit_s=120)
def comm_hooks_train_and_resume():
    """Each --comm_hook trains, with all ranks on the same bits; hierarchical on ddp's; topk saves
    what it did not send, resumes on the bits of an undisturbed run, or says that it starts anew."""
    with tempfile.TemporaryDirectory() as folder:
        def run(name, *flags, W=2, plant=None, **options):
            argv = [*tiny(f"{folder}/{name}", mode="ddp", max_steps=5, **options), *flags]
            with Launch(W, argv, plant=plant) as launch:
                assert launch.wait() == [0] * W, launch.stderr()
                last = launch.stdout().splitlines()[-1]
                return last.partition("param_sha256")[2][:70], launch.stderr()

        plain, *hooked = on_both_cores(run, ("plain", *train.HOOKS), (
            "--no-compile", *(f"--comm_hook={hook}" for hook in train.HOOKS)))
        hashes = dict(zip(train.HOOKS, (found for found, _ in hooked)))
        assert hashes.pop("hierarchical") == plain[0] != "", "other bits than ddp"
        assert len({plain[0], *hashes.values()}) == 4, f"a hook does nothing: {hashes}"
        stop = functools.partial(stop_after, 3)
        run("a", "--comm_hook=topk", plant=stop)
        shutil.copytree(f"{folder}/a", f"{folder}/b")
        assert run("a", "--comm_hook=topk", "--resume=auto") == (hashes["topk"], "")
        found, stderr = run("b", "--comm_hook=topk", "--resume=auto", W=1)
        assert "starts from zero: what was not sent is of 2 ranks in" in stderr, stderr
        assert found != hashes["topk"]
    return f"{', '.join(train.HOOKS)} at W = 2; topk stopped after step 3", 0.0


@check([dict(W=1)], limit_s=120)
def auto_micro_batch_fits():
    """--micro_batch_size auto takes the largest size whose step stays within the limit, alike on
    all ranks, and ends on the bits of that size given by hand."""
    with tempfile.TemporaryDirectory() as folder:
        options = dict(mode="zero2", block_size=512, n_embd=64, max_steps=2, global_batch_size=32,
                       dataset=HERE / "verify.py")
        argv, limit = tiny(f"{folder}/a", **options, micro_batch_size="auto"), 0.43
        with Launch(2, [*argv, "--memory_limit_gb", limit]) as launch:
            result = launch.result()
            chosen = re.search(r"^micro batch size (\d+): (.*) GB of", launch.stdout(), re.M)
        size = int(chosen[1])
        assert 1 < size < 16 and result["peak_mem_bytes"] < 1e9 * limit, (chosen[0], result)
        by_hand, twice = on_both_cores(lambda size: finish(
            2, tiny(f"{folder}/{size}", **options, micro_batch_size=size)), (size, 2 * size))
        assert result["param_sha256"] == by_hand["param_sha256"]
        assert twice["peak_mem_bytes"] > 0.95e9 * limit, f"{2 * size} fits too: {twice}"
        refused(argv, "needs --memory_limit_gb")
        refused([*argv, "--memory_limit_gb", 0.1], "1 takes 0.* GB, and the limit is 0.10", W=2)
    return chosen[0], 0.0


def slow_rank_1():
    micro_batch = train.Batches.micro_batch

    def slow(*arguments):
        time.sleep(0.05 * int(os.environ["RANK"]))
        return micro_batch(*arguments)

    train.Batches.micro_batch = slow


@check([dict(W=1)])
def log_names_the_slowest_rank():
    """Every line of metrics.jsonl has least, mean and most of all ranks, and the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny(folder, mode="ddp", eval_steps=2, eval_interval=2, max_steps=6)
        with Launch(2, argv, plant=slow_rank_1) as launch:
            launch.result()
            lines = re.findall(r"^ranks, min/mean/max: step .*, waited .*, memory .*; slowest: "
                               r"rank (\d)$", launch.stdout(), re.MULTILINE)
        entries = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    assert lines == ["1", "1", "1"], lines
    for entry in entries[1:]:
        ranks = entry["ranks"]
        assert ranks["slowest"] == 1, entry
        for name in ("step_ms", "comm_exposed_ms", "mem_bytes"):
            low, mean, high = ranks[name]
            assert low <= entry[name] <= high and abs(mean - (low + high) / 2) < 1e-6 * high, entry
        assert ranks["comm_exposed_ms"][2] - ranks["comm_exposed_ms"][0] > 25, entry
    return "rank 1 of 2 sleeps 50 ms a micro batch", 0.0


class Recorder(types.ModuleType):
    """Stands for a tracker's package: notes in a file what it is called with."""

    def __init__(self, name, path, fails_after):
        super().__init__(name)
        self.__spec__, self.__path__ = importlib.machinery.ModuleSpec(name, None), []
        self.path, self.left = path, fails_after

    def note(self, *arguments, **options):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("planted")
        with open(self.path, "a") as file:
            file.write(json.dumps([arguments, options], default=str) + "\n")
        return self

    init = SummaryWriter = log = add_scalar = note

    def close(self):
        pass


def plant_trackers(path, fails_after=math.inf):
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        sys.modules[name] = Recorder(name, path, fails_after)


def plant_no_trackers():
    sys.modules |= dict(wandb=None, tensorboard=None)


@check([dict(W=1)])
def trackers_get_every_step():
    """--wandb and --tensorboard get the numbers of every step, from rank 0 alone; without the
    package, or where it does not start, one line says what to do; a later failure ends no run."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        argv = [*tiny(f"{folder}/out", mode="ddp"), "--wandb", "--tensorboard"]
        finish(2, argv, plant=functools.partial(plant_trackers, str(log)))
        calls = [json.loads(line) for line in log.read_text().splitlines()]
        entries = [json.loads(line) for line in open(f"{folder}/out/metrics.jsonl")]
        logged = [(a[0], o["step"]) for a, o in calls if a and isinstance(a[0], dict)]
        scalars = [a for a, _ in calls if len(a) == 3]
        assert [step for _, step in logged] == [1, 2, 3, 4]
        for entry, (numbers, step) in zip(entries, logged):
            assert numbers["loss"] == entry["loss"]
            assert numbers["ranks/step_ms_max"] == entry["ranks"]["step_ms"][2]
            assert ["loss", entry["loss"], step] in scalars and "mfu" not in numbers
        dies = functools.partial(plant_trackers, str(log), fails_after=2)
        with Launch(1, [*tiny(f"{folder}/dies"), "--wandb"], plant=dies) as launch:
            assert launch.result()["steps"] == 4
            assert "step 2: a tracker failed, and gets no more: planted" in launch.stderr()
        for name in ("wandb", "tensorboard"):
            refused([*tiny(folder), f"--{name}"], f"pip install {name}", plant=plant_no_trackers)
        broken = functools.partial(plant_trackers, f"{folder}/no/folder")
        refused([*tiny(folder), "--wandb"], "--wandb could not start: FileNotFound", plant=broken)
    return "4 steps at W = 2, two stand-ins for the packages", 0.0


@check([dict(W=1)])
def profile_shows_what_overlaps():
    """--profile leaves a trace a rank, in which a bar goes from the start of each exchange to the
    end of the wait for it, and computing goes on beside; it changes no bit."""
    reductions = {f"reduce bucket {n}" for n in range(3)}
    expected = {"zero3": reductions | {"gather the root", "gather blocks.0", "gather blocks.1"},
                "ddp": reductions}
    with tempfile.TemporaryDirectory() as folder:
        for mode, bars in expected.items():
            with_and_without = on_both_cores(lambda n: finish(2, tiny(
                f"{folder}/{mode}{n}", mode=mode, profile=n, n_layer=2, max_steps=5,
                bucket_cap_mb=0.01, save_interval=0)), (0, 2))
            assert len({result["param_sha256"] for result in with_and_without}) == 1
            for rank in range(2):
                path = f"{folder}/{mode}2/trace_rank{rank}.json"
                check_trace(path, bars)
                check_timeline(json.loads(pathlib.Path(path).read_text()), mode)
        with Launch(1, tiny(f"{folder}/cut", mode="single", profile=5000, max_steps=9000,
                            save_interval=0)) as launch:
            launch.wait_for("step     9/")
            os.kill(launch.processes[0].pid, signal.SIGTERM)
            assert launch.wait() == [0], launch.stderr()
        json.loads(pathlib.Path(folder, "cut", "trace_rank0.json").read_text())
    return "traces of 2 steps of zero3 and ddp; one that SIGTERM cuts short", 0.0


def check_trace(path, expected):
    events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    spans = {}  # name -> [(start, end)] in the thread that computes, in us
    for event in events:
        if event["ph"] == "X":
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(name.startswith("ProfilerStep") for name in spans) == 2, sorted(spans)[:20]
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys() and {bar["name"] for bar in begun.values()} == expected
    for number, bar in begun.items():
        first, last = bar["ts"], ended[number]["ts"]
        assert any(start == first for start, _ in spans[f"start: {bar['name']}"])
        assert any(end == last for _, end in spans[f"wait: {bar['name']}"])
    beside = [name for bar in begun.values() for name in ("aten::mm", "aten::addmm")
              for start, end in spans.get(name, [])
              if bar["ts"] < start and end < ended[bar["id"]]["ts"]]
    assert beside, f"{path}: nothing is computed beside an exchange"


def check_timeline(trace, mode):
    """What bench.sh draws of a trace: one step, from forward to AdamW, with the exchanges in it."""
    bars = python_of_bench("REPORT")["bars_of"](trace["traceEvents"])
    assert [label for _, label, *_ in bars[:3]] == ["forward", "backward", "AdamW"]
    bounds = [t for *_, start, end in bars[:3] for t in (start, end)]
    assert bounds == sorted(bounds) and bounds[0] > 0, bounds
    reduced = [bar for bar in bars if bar[0] == "reduce"]
    assert {label for _, label, *_ in reduced} == {"bucket 0", "bucket 1", "bucket 2"}, reduced
    assert all(bounds[1] < start < end < bounds[4] for *_, start, end in reduced), reduced
    gathered = [label for section, label, *_ in bars if section == "gather"]
    assert set(gathered) == ({"root", "block 0", "block 1"} if mode == "zero3" else set())
    assert any(section == "wait" for section, *_ in bars)


def python_of_bench(part):
    """The names that MEASURE or REPORT, the two Python programs in bench.sh, define."""
    script = (HERE / "bench.sh").read_text()
    source = re.search(rf"^{part}=\$\(cat <<'PYTHON'\n(.*?)^PYTHON$", script, re.M | re.S).group(1)
    names = {"__name__": part}
    exec(source, names)
    return names


@check([dict(W=2, modes=("naive", "ddp", "zero3", "torch-zero1", "torch-fsdp"))],
       full=[dict(W=2, modes=("naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-zero1",
                              "torch-fsdp-kept", "torch-fsdp"))])
def bench_alone_sends_nothing(modes):
    """A step that bench.sh calls alone exchanges nothing with other ranks; as such it does."""
    make = python_of_bench("MEASURE")["Kind"]
    config = train.Config(mode="ddp", n_layer=2, n_head=2, n_embd=16, block_size=16, lr=1e-3,
                          min_lr=1e-4, global_batch_size=2, micro_batch_size=1)
    context = config, here("ddp"), train.load_tokenizer("bytes"), small_batches(config)
    for mode in modes:
        for alone in ("", "@alone"):
            kind = make(mode + alone, *context)
            kind.step(0)
            kind.step(1)  # in which torch's DDP divides its buckets anew
            with torch.profiler.profile() as profiler:
                kind.step(2)
            sent = {event.name for event in profiler.events() if event.name.startswith("gloo:")}
            assert bool(sent) == (not alone), (kind.name, sent)
    return ", ".join(modes), 0.0


@check([dict(W=1)])
def bench_fits_its_model():
    """The alpha-beta model is found again in times made from it; a ratio is one of medians."""
    report = python_of_bench("REPORT")
    alpha, beta = 0.2, 1e-6
    for W in (2, 4):
        made = [(W - 1, (W - 1) / W * n, report["exchange_ms"](alpha, beta, W, n))
                for n in (2**14, 2**20, 2**26)]
        found = report["fit"](made)
        assert np.allclose(found, (alpha, beta), rtol=1e-6), found
    slow, fast = dict(all_ms=[6.0, 20.0, 7.0] * 3), dict(all_ms=[2.0, 1.0, 9.0] * 3)
    assert report["ratio"](slow, fast).startswith("3.50 ("), report["ratio"](slow, fast)
    return "W = 2 and 4, three sizes", 0.0


@check([dict(W=1)])
def bench_compares_flags():
    """The tables of tune and options have a row for each line of flags, or a cell: the median of
    its runs, the most memory of any."""
    report, printed = python_of_bench("REPORT"), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.makedirs("out/bench")
        for name in ("tune", "options"):
            pathlib.Path(f"out/bench/{name}.jsonl").write_text("".join(
                json.dumps(dict(label=label, tokens_per_sec=rate, peak_mem_bytes=n_bytes)) + "\n"
                for label, rate, n_bytes in (
                    ("--mode ddp", 10.0, 5e6), ("--mode ddp --compile", 7.0, 8e6),
                    ("--mode ddp", 30.0, 9e6), ("--mode ddp", 11.0, 6e6), ("--mode zero1", 1, 1))))
            with contextlib.redirect_stdout(printed):
                report[name]()
    rows = [line for line in printed.getvalue().splitlines() if line.startswith("| ")]
    assert rows == ["| flags | tokens/s, median | all | peak MB a rank |",
                    "| `--mode ddp` | 11 | 10, 30, 11 | 9 |",
                    "| `--mode ddp --compile` | 7 | 7 | 8 |", "| `--mode zero1` | 1 | 1 | 0 |",
                    "| mode | neither | `--compile` |",
                    "| ddp | 11 (10 to 30), 9 MB | 7 (7 to 7), 8 MB |",
                    "| zero1 | 1 (1 to 1), 0 MB | - |"], rows
    return "five runs of three lines of flags", 0.0


def small_bench(folder):
    """Copy bench.sh and what it runs to folder -> flags with which a row takes seconds."""
    for name in ("bench.sh", "model.py", "ddp.py", "zero.py", "train.py"):
        shutil.copy(HERE / name, folder)
    kept = ("--n_layer", "--n_head", "--n_embd", "--block_size", "--warmup_steps", "--dataset")
    return [str(word) for name, value in zip(TINY[::2], TINY[1::2]) if name in kept
            for word in (name, value)]


def run_bench(folder, *arguments):
    """`./bench.sh arguments` in folder, with this Python; folder/bin comes first in the path."""
    path = os.pathsep.join((f"{folder}/bin", str(pathlib.Path(sys.executable).parent),
                            os.environ["PATH"]))
    return subprocess.run(["bash", "bench.sh", *arguments], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, "PATH": path})


@check([dict(W=1)], limit_s=120)
def bench_makes_tables():
    """bench.sh prints the rows it is asked for, says why one has failed, and runs the rest; an
    option that cannot be is refused in one line."""
    with tempfile.TemporaryDirectory() as folder:
        # a torchrun that cannot start train.py in mode ddp, ends 20 steps at once, and otherwise
        # starts one rank
        launcher = pathlib.Path(folder, "bin", "torchrun")
        launcher.parent.mkdir()
        launcher.write_text(f"""#!/bin/sh
case "$*" in
*'--mode ddp'*) echo 'OSError: planted'; exit 1;;
*'--max_steps 20'*) echo 'RESULT {{"world_size": 1, "param_sha256": "0123456789"}}'; exit;;
esac
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=0
shift 2
case $1 in --no-python) shift; exec "$@";; esac
exec {sys.executable} "$@"
""")
        launcher.chmod(0o755)
        flags = small_bench(folder)
        run, rounds, flag, no_gpu, rate, varied, mode, bits, timeline = on_both_cores(
            lambda arguments: run_bench(folder, *arguments), [
            ("modes", "--worlds", "1", "--rounds", "1", "--modes", "single ddp",
             "--micro_batch_size", "1", *flags),
            ("modes", "--rounds", "0"), ("tune", "--n_layr", "4"), ("gpu",), ("link", "1gbps"),
            ("tune", "--micro_batch_size=2"), ("modes", "--modes", "zero9"),
            ("bits", "--worlds", "1 2 4", "--modes", "single ddp"), ("timeline", "--modes", "ddp")])
        kept = pathlib.Path(folder, "out", "bench", "modes.md").read_text()
    assert run.returncode == 1 and kept == run.stdout, run.stderr
    assert "Failed: ddp 1 at W=1: OSError: planted" in run.stdout, run.stdout
    rows = {cells[1].strip(): [cell.strip() for cell in cells] for cells in
            (line.split("|") for line in run.stdout.splitlines()) if len(cells) > 3}
    head = rows.pop("mode")
    assert rows.keys() == {"---", "single", "ddp"}, run.stdout
    for name, row in rows.items():
        if name != "---":
            cell = dict(zip(head, row))
            assert float(cell["step ms (quartiles)"].split()[0].replace(",", "")) > 0
            assert (cell["peak MB a rank, less Python and torch"] == "-") == (name == "ddp"), row
            assert (cell["bytes a parameter (formula)"] == "16.00 (16.00)") == (name == "single")
    for refused_run, text in ((rounds, "--rounds 0"), (flag, "--n_layr"), (rate, "1gbps"),
                              (varied, "--micro_batch_size"), (mode, "zero9")):
        assert refused_run.returncode == 2 and text in refused_run.stderr, refused_run.stderr
        assert refused_run.stderr.count("\n") == 1, refused_run.stderr
    assert no_gpu.returncode == 0 and no_gpu.stdout.count("\n") == 1, no_gpu.stdout
    planted_at = re.findall(r"^Failed: ddp (\d+ \d) at W=(\d): OSError", bits.stdout, re.M)
    assert planted_at == [("8 2", "1"), ("8 1", "2"), ("16 4", "1"), ("16 2", "2"), ("16 1", "4")]
    assert "| single | `01234567` | `01234567` |" in bits.stdout, bits.stdout
    assert "Failed: ddp at W=2: OSError: planted" in timeline.stdout, timeline.stdout
    return "rows of single and ddp, planted failures, five refusals", 0.0


BENCH = {"bits": ("--worlds", "2", "--modes", "zero3"), "timeline": ("--modes", "zero3"),
         "modes": ("--worlds", "2", "--rounds", "1", "--modes", "zero3 torch-fsdp"),
         "scaling": ("--worlds", "1 2", "--rounds", "1"), "link": ("1gbit", "--rounds", "1"),
         "tune": ("--worlds", "1", "--rounds", "1"),
         "options": ("--worlds", "1", "--rounds", "1", "--modes", "zero3")}


@check([], full=[dict(W=1, command=command) for command in BENCH], limit_s=900)
def bench_commands_run(command):
    """Every command of bench.sh prints its tables, or pictures, of a small model, and no failure.
    """
    if command == "link" and not (sys.platform == "linux" and os.getuid() == 0
                                  and shutil.which("ip") and shutil.which("tc")):
        raise Skip("two hosts on one need Linux, root and iproute2")
    with tempfile.TemporaryDirectory() as folder:
        done = run_bench(folder, command, *BENCH[command], *small_bench(folder))
    assert done.returncode == 0 and "Failed" not in done.stdout, done.stdout + done.stderr
    n_rows = len(re.findall(r"^(?:\| |    .* :)", done.stdout, re.MULTILINE))
    assert n_rows > 1, done.stdout  # more than a head
    return f"{command}: {n_rows} rows", 0.0


@check([dict(W=1)])
def diverged_run_reports():
    """A run whose loss has become nan still ends with its RESULT, null where there is no number."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [*TINY, "--out_dir", folder, "--lr", "1e30", "--weight_decay", "1e30",
                "--warmup_steps", "0"]
        code, stdout, stderr = run_main(argv)
    *_, sample, result = stdout.splitlines()
    assert code == 0 and not stderr and sample.startswith("no sample: "), (code, stdout, stderr)
    assert json.loads(result.removeprefix("RESULT "))["train_loss"] is None
    return "exit status and the last two lines", 0.0


# -------------------------------------------------------------------------------------------------
# train.py: checkpoints


def check_all_whole(folder):
    """Assert that whatever is visible in out_dir is a whole checkpoint; return their steps."""
    steps = []
    for path in sorted(pathlib.Path(folder).glob("step_*")):
        record = train.read_record(path)
        places = train.in_order(dcp.FileSystemReader(path).read_metadata())
        assert record["crc32"] == [train.crc32(path, place) for place in places], path
        steps.append(record["step"])
    return steps


@contextlib.contextmanager
def shared_folder():
    """A temporary folder, the same on all ranks of the group."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


MATRIX = [(mode, W) for mode in ("ddp", "zero1", "zero2", "zero3") for W in (1, 2, 3, 4)]


@check([dict(W=1, mode="zero1", source=("zero3", 4)), dict(W=2, mode="zero3", source=("ddp", 1)),
        dict(W=4, mode="zero2", source=("zero1", 3)),
        dict(W=2, mode="torch-fsdp", source=("torch-fsdp", 3))],
       full=[dict(W=W, mode=mode, source=source) for mode, W in MATRIX for source in MATRIX])
def checkpoint_loads_anywhere(mode, source):
    """A checkpoint of any mode and world size loads into any other: parameters, moments and the
    position in the data to the bit, as torch's own converter reads them."""
    with shared_folder() as folder:
        argv = tiny(folder, max_steps=2, mode=source[0], global_batch_size=12)  # for W = 1 to 4
        if dist.get_rank() == 0:
            sha256 = finish(source[1], argv)["param_sha256"]
            dcp_to_torch_save(f"{folder}/step_00000002", f"{folder}/converted.pt")
        dist.barrier()
        expected = torch.load(f"{folder}/converted.pt", weights_only=True)
        config = train.parse_args([*map(str, argv), "--mode", mode, "--resume", "auto"])
        worker = here(mode)
        _, plain, batches, _, facts = train.prepare(config, worker)
        log = train.Log(config, worker, plain)
        model = train.wrap(plain, config, worker)
        checkpoints = train.Checkpoints(config, worker, log, model,
                                        train.make_optimizer(model, config),
                                        train.make_scaler(config, worker), facts)
        with contextlib.redirect_stdout(io.StringIO()):
            assert checkpoints.resume().step == 2
        if dist.get_rank() == 0:
            assert json.loads((pathlib.Path(folder) / "step_00000002/checkpoint.json").read_text()
                              )["sample"] == 24
        held = checkpoints.tensors()
        for key, ours in held.items():
            if key.startswith("random"):
                continue
            theirs = expected[key]
            if isinstance(ours, train.Slice):
                theirs = theirs[ours.first:ours.first + len(ours.part)]
                n = worker.reduce(torch.tensor(len(ours.part))).item()
                sharded = mode in train.STAGE
                assert n == len(expected[key]) * (1 if sharded else worker.world_size), key
                ours = ours.part
            assert torch.equal(ours, theirs), key
        names = {key.split(".", 2)[1] for key in held}
        assert {"step", "exp_avg", "exp_avg_sq"} <= names, names
        assert len(held) == 4 * len(list(plain.parameters())) + 1
        hashes = [train.param_sha256(model)]
        if dist.get_rank() == 0:
            assert hashes == [sha256]
    return f"{' at W = '.join(map(str, source))} read by {mode}: {len(held)} tensors", 0.0


def unstable_scale():
    """Plant a loss scale that overflows in the first steps, so that it has a history to save."""
    make = train.make_scaler

    def make_scaler(config, worker):
        scaler = make(config, worker)
        scaler._init_scale = 2.0**20
        return scaler

    train.make_scaler = make_scaler


@check([dict(W=1, legs=(("zero3", 4), ("zero2", 2), ("single", 1))),
        dict(W=1, legs=(("zero3", 2), ("torch-fsdp", 2)), dtype="fp16")],
       full=[dict(W=1, legs=(("ddp", 3), ("zero1", 3)))]
       + [dict(W=1, legs=((mode, W), (mode, W))) for mode, W in MATRIX]
       + [dict(W=1, legs=legs) for legs in itertools.product(
           [("zero2", 4), ("zero3", 2), ("single", 1)], repeat=3)])
def resumed_run_ends_on_same_bits(legs, dtype="fp32"):
    """A run that stops and goes on, elsewhere too, ends on the bits of one that never stopped: same
    world size and family, or stages 2, 3 and single at W = 1, 2, 4."""
    n = 12 if 3 in dict(legs).values() else 2 if dtype == "fp16" else 4  # micro batches
    options = dict(dtype=dtype, lr=0.01, global_batch_size=n)
    plant = unstable_scale if dtype == "fp16" else None
    with tempfile.TemporaryDirectory() as folder:
        steps = 3 * len(legs)
        mode, W = legs[0]
        argv = tiny(f"{folder}/a", **options, mode=mode, max_steps=steps)
        whole_run = finish(W, argv, plant=plant)
        for i, (mode, W) in enumerate(legs, start=1):
            # The schedule of rates depends on max_steps, so legs end by SIGTERM.
            argv = tiny(f"{folder}/b", **options, mode=mode, max_steps=steps, resume="auto")
            stop = functools.partial(stop_after, 3 * i, plant)
            with Launch(W, argv, plant=stop if i < len(legs) else plant) as launch:
                assert launch.wait() == [0] * W, launch.stderr()
                last = launch.stdout().splitlines()[-1]
        ours = json.loads(last.removeprefix("RESULT "))
        lines = [[json.loads(line) for line in open(f"{folder}/{run}/metrics.jsonl")]
                 for run in "ab"]
    for key in ("param_sha256", "train_loss", "steps"):
        assert ours[key] == whole_run[key], (key, ours, whole_run)
    assert [[e["step"] for e in run] for run in lines] == [list(range(1, steps + 1))] * 2
    assert [e["loss"] for e in lines[0]] == [e["loss"] for e in lines[1]]
    assert ("skipped" in lines[0][0]) == (dtype == "fp16")
    return " -> ".join(f"{mode} W={W}" for mode, W in legs), 0.0


def stop_after(step, plant=None):
    """Plant a SIGTERM to one rank, in the step before: the wish to stop travels with the next."""
    if plant:
        plant()
    find_gradients = train.find_gradients

    def stopping(*arguments, **options):
        worker = arguments[-1]
        if arguments[4] + 2 == step and worker.rank == worker.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return find_gradients(*arguments, **options)

    train.find_gradients = stopping


@check([dict(W=1)])
def damaged_checkpoints_are_named():
    """What is missing, cut off or changed in a checkpoint is told by file and parameter, status 2;
    --resume auto falls back to the one before, says so, and sets the damaged one aside."""
    with tempfile.TemporaryDirectory() as folder:
        sound, folder = pathlib.Path(folder, "sound"), pathlib.Path(folder)
        expected = finish(2, tiny(sound, mode="zero2"))["param_sha256"]
        newest = "step_00000004"
        slices = train.FileSystemReader(sound / newest).read_metadata().storage_data
        key, record = "optimizer.exp_avg.wte.weight", train.RECORD
        place = next(place for index, place in slices.items() if index.fqn == key)
        data = place.relative_path
        after = next((index.fqn, other) for index, other in slices.items() if other.offset ==
                     place.offset + place.length and other.relative_path == data)

        def flip(path, at):
            content = bytearray(path.read_bytes())
            content[at] ^= 16
            path.write_bytes(content)

        def flip_in_archive(path):  # no CRC of zip's covers it, but torch reads other values
            header = path.read_bytes().index(b"PK\x01\x02", place.offset)
            flip(path, header + 38)

        middle, end = place.offset + place.length // 2, place.offset + place.length
        cases = [  # which file, what happens to it, what the line must say
            (data, lambda path: flip(path, middle), f"{data} is truncated or damaged: see {key}"),
            (data, lambda path: flip(path, after[1].offset + after[1].length // 2),
             f"{data} is truncated or damaged: see {after[0]}"),
            (data, lambda path: os.truncate(path, end - 100), f"{data} is truncated .* see {key}"),
            (data, lambda path: os.truncate(path, 0), f"{data} is truncated or damaged: see "),
            (data, flip_in_archive, f"{data} is truncated or damaged: see "),
            (data, os.remove, f"No such file.*{data}"),
            (".metadata", lambda path: flip(path, 100), ".metadata is damaged"),
            (".metadata", os.remove, r"No such file.*\.metadata"),
            (record, lambda path: flip(path, 12), f"{record} is damaged"),
            (record, lambda path: os.truncate(path, 40), f"{record} is damaged"),
            (record, os.remove, f"{record} is missing"),
        ]

        def try_out(i, name, damage, text):
            copy = folder / str(i)
            shutil.copytree(sound, copy, symlinks=True)
            damage(copy / newest / name)
            argv = tiny(copy, mode="zero2")
            refused([*argv, "--resume", copy / newest], text)
            with Launch(1, [*argv, "--resume", "auto"]) as launch:
                assert launch.result()["param_sha256"] == expected
                told = rf"train\.py: .*{newest}.*{text}.*; falling back to .*\n"
                assert re.fullmatch(told.replace("No such file.*", ""), launch.stderr()), (
                    launch.stderr(), told)
            assert (copy / "aside_1" / newest).is_dir() and check_all_whole(copy) == [3, 4]

        on_both_cores(try_out, range(len(cases)), *zip(*cases))
        for path in sound.glob("step_*"):
            (path / record).write_text("{}")
        refused([*tiny(sound), "--resume", "auto"], f"none of 2 .*{newest}")
        assert len(list(sound.glob("step_*"))) == 2, "nothing is to be moved"
    return f"{len(cases)} kinds of damage", 0.0


@check([dict(W=1)])
def foreign_checkpoints_are_refused():
    """A checkpoint of another model, other data or another order of samples is refused, naming the
    parameter or the option; a folder that is none is, too."""
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny(folder, max_steps=1)
        finish(1, argv)
        argv += ["--max_steps", 2, "--resume", "auto"]
        cases = (("--n_layer 2", r"blocks\.1\.attn_norm\.weight is missing, here \[16\]"),
                 ("--n_embd 32", r"wte\.weight is \[257, 16\], here \[257, 32\]"),
                 ("--n_head 4", "--n_head was 2, and is 4"), ("--seed 3", "--seed was 1337"),
                 ("--block_size 8", "--block_size was 16"),
                 ("--global_batch_size 8", "--global_batch_size was 4"),
                 (f"--dataset {HERE / 'train.py'}", "data was .* tokens with hash"),
                 ("--resume nowhere", "nowhere: there is no such folder"),
                 (f"--resume {folder}", "has checkpoints in it: give one of them"),
                 (f"--resume {HERE}", "checkpoint.json is missing"),
                 (f"--resume {HERE / 'train.py'}", "there is no such folder"))
        on_both_cores(lambda flags, text: refused([*argv, *flags.split()], text), *zip(*cases))
        finish(1, [*tiny(folder, n_layer=2, max_steps=1)])
        refused(argv, r"blocks\.1\.attn_norm\.weight is \[16\], here missing")
        finish(1, [*tiny(folder, max_steps=3)])
        refused([*argv, "--resume", f"{folder}/step_00000003"], "--max_steps 2 is less than the 3")
    return f"{len(cases) + 2} misfits", 0.0


@check([dict(W=1)])
def checkpoints_are_kept_and_removed():
    """--keep_last newest checkpoints and the best one stay; a new run, and one that begins at an
    earlier step, set aside what is ahead of them; metrics.jsonl goes back with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def steps_logged():
            return [json.loads(line)["step"] for line in open(folder / "metrics.jsonl")]

        # A rate so high that the first evaluation is the best one.
        argv = tiny(folder, max_steps=6, keep_last=2, eval_steps=3, eval_interval=1, lr=3.0,
                    warmup_steps=3)
        finish(2, argv)
        losses = [json.loads(line)["val_loss"] for line in open(folder / "metrics.jsonl")]
        best = 1 + losses.index(min(losses))
        assert best < 5, losses
        assert check_all_whole(folder) == [best, 5, 6]
        assert os.readlink(folder / "best") == f"step_{best:08d}"
        record = train.read_record(folder / "best")
        assert record["best_val_loss"] == min(losses) and record["best_step"] == best

        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        torn = "".join(lines[:5]) + '{"step": 6, "lo'  # as a run that was killed leaves it
        (folder / "metrics.jsonl").write_text(torn)
        (folder / ".step_00000007.unfinished").mkdir()
        finish(1, [*argv, "--resume", folder / "step_00000005"])
        assert check_all_whole(folder) == [best, 5, 6] and steps_logged() == list(range(1, 7))
        assert [path.name for path in (folder / "aside_1").glob("step*")] == ["step_00000006"]
        assert not list(folder.glob(".step*"))

        finish(1, [*argv, "--resume", "auto"])  # nothing is left to do
        assert steps_logged() == list(range(1, 7)) and not (folder / "aside_2").exists()
        finish(1, tiny(folder, max_steps=3))
        assert check_all_whole(folder) == [2, 3] and steps_logged() == [1, 2, 3]
        assert check_all_whole(folder / "aside_2") == [best, 5, 6]
        assert train.read_record(folder / "aside_2/best")["step"] == best
        finish(1, tiny(folder, max_steps=3, save_interval=0))
        assert not list(folder.glob("step_*"))
    return "two last and the best; three runs in one folder", 0.0


@check([dict(W=1, runs=((2, "zero3"), (1, "single")))])
def exported_model_is_plain(runs):
    """--export writes one file in nanoGPT's form: loads with weights_only, into the plain GPT, with
    the weights of the run; a resumed run that has nothing left to do exports too."""
    with tempfile.TemporaryDirectory() as folder:
        for W, mode in runs:
            argv = tiny(f"{folder}/out", mode=mode, eval_steps=3)
            finish(W, argv)
            result = finish(W, [*argv, "--resume", "auto", "--export", f"{folder}/whole.pt"])
            saved = torch.load(f"{folder}/whole.pt", weights_only=True)
            assert list(saved) == ["model", "model_args", "iter_num", "best_val_loss", "config"]
            gpt = GPT(GPTConfig(**saved["model_args"]))
            gpt.load_state_dict(saved["model"])
            assert train.param_sha256(gpt) == result["param_sha256"]
            assert saved["iter_num"] == 4 and saved["config"]["mode"] == mode
            assert saved["best_val_loss"] == result["val_loss"]
            assert gpt.lm_head.weight is gpt.wte.weight
        refused([*tiny(f"{folder}/new"), "--export", f"{folder}/no/such.pt"], "no/such.pt")
        assert not list(pathlib.Path(folder, "new").glob("step_*")), "refused after the last step"
        refused([*argv, "--export", folder], "is a folder")
        before = pathlib.Path(folder, "whole.pt").read_bytes()
        stopped = functools.partial(stop_after, 2)
        with Launch(1, [*argv, "--export", f"{folder}/whole.pt"], plant=stopped) as launch:
            assert launch.wait() == [0] and "stopped by" in launch.stderr()
        assert pathlib.Path(folder, "whole.pt").read_bytes() == before, "lost before its time"
    return f"{' and '.join(mode for _, mode in runs)}: hash of the weights", 0.0


def llama_logits(weights, llama, idx):
    """The logits of a LlamaForCausalLM, from its definition alone, a head at a time."""
    n_head, n_kv = llama["num_attention_heads"], llama["num_key_value_heads"]
    hs, T, eps = llama["hidden_size"] // n_head, idx.size(1), llama["rms_norm_eps"]
    frequency = llama["rope_theta"] ** (-torch.arange(0, hs, 2) / hs)
    angle = torch.arange(T)[:, None] * frequency

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]

    def turned(x):
        a, b = x[..., :hs // 2], x[..., hs // 2:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = weights["model.embed_tokens.weight"][idx]
    for i in range(llama["num_hidden_layers"]):
        def linear(x, name, i=i):
            return x @ weights[f"model.layers.{i}.{name}_proj.weight"].T

        y = norm(x, f"model.layers.{i}.input_layernorm")
        q, k, v = (linear(y, f"self_attn.{name}").split(hs, dim=-1) for name in "qkv")
        heads = [explicit_attention(turned(q[h]), turned(k[h * n_kv // n_head]),
                                    v[h * n_kv // n_head]) for h in range(n_head)]
        x = x + linear(torch.cat(heads, -1), "self_attn.o")
        y = norm(x, f"model.layers.{i}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(y, "mlp.gate"))
        x = x + linear(gate * linear(y, "mlp.up"), "mlp.down")
    return norm(x, "model.norm") @ weights[
        "model.embed_tokens.weight" if llama["tie_word_embeddings"] else "lm_head.weight"].T


def write_safetensors(path, tensors):
    header, numbers = {"__metadata__": {"format": "pt"}}, b""
    for name, t in tensors.items():
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[t.dtype]
        raw = t.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = dict(dtype=dtype, shape=list(t.shape),
                            data_offsets=[len(numbers), len(numbers) + len(raw)])
        numbers += raw
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + numbers)


def plain_gpt(folder):
    """The GPT that --init_from makes of a folder, in this process."""
    tokenizer = train.load_tokenizer("bytes")
    return train.build_model(small_config(init_from=str(folder)), tokenizer)


def without_a_change(folder, hf, name, **options):
    """Flags of a run from the Llama folder hf that leaves the weights as they come."""
    flags = tiny(f"{folder}/{name}", lr=0, weight_decay=0, init_from=hf, **options)
    return [word for name, value in zip(flags[::2], flags[1::2])
            if name[2:] not in train.SIZES for word in (name, value)]


@check([dict(W=1)], limit_s=120)
def llama_folder_round_trip():
    """--export_hf writes a LlamaForCausalLM by name, shape and logits; --init_from loads it in any
    mode, to the bit; a checkpoint of it does not go on with another rope_theta."""
    with tempfile.TemporaryDirectory() as folder:
        hf, idx = pathlib.Path(folder, "hf"), torch.arange(14).view(2, 7)
        argv = [*tiny(f"{folder}/out"), "--n_head", 4, "--n_kv_head", 2, "--export_hf", hf]
        expected = finish(2, [*argv, "--mode", "zero3"])["param_sha256"]
        llama = json.loads((hf / "config.json").read_text())
        weights = torch.load(hf / "pytorch_model.bin", weights_only=True)
        gpt = plain_gpt(hf)
        assert train.param_sha256(gpt) == expected
        with torch.no_grad():
            assert torch.allclose(gpt(idx)[0], llama_logits(weights, llama, idx), atol=1e-5)
        still = functools.partial(without_a_change, folder, hf)
        for result in on_both_cores(lambda W, mode: finish(W, still(mode, mode=mode)), (1, 2, 2, 2),
                                    ("single", "zero3", "zero1", "torch-fsdp")):
            assert result["param_sha256"] == expected, result
        refused([*still("none"), "--init_from", folder], "No such file .*config.json")
        (hf / "config.json").write_text(json.dumps({**llama, "rope_parameters": {"rope_theta": 5}}))
        refused([*still("single"), "--resume", "auto"], "rope_theta was 10000.0, and is 5")
    return "zero3 to single, zero3, zero1 and torch-fsdp", 0.0


@check([dict(W=1)], limit_s=120)
def llama_folder_of_others():
    """--init_from reads safetensors in several files, bf16, a head of its own, a larger vocabulary;
    what it cannot read or be, and where --export_hf would be read over, is refused by name."""
    with tempfile.TemporaryDirectory() as folder:
        hf, idx = pathlib.Path(folder), torch.arange(14).view(2, 7)
        other = GPT(GPTConfig(block_size=9, vocab_size=300, n_layer=2, n_head=2, n_embd=12,
                              n_hidden=20, norm_eps=1e-6, rope_theta=500.0, tied=False))
        llama = model.to_llama_config(other.config)
        (hf / "config.json").write_text(json.dumps(llama))
        weights = {part: rows.bfloat16() for name, parts in model.llama_names(other.config).items()
                   for part, rows in zip(parts, dict(other.named_parameters())[name].detach().split(
                       list(parts.values())))}
        half = len(weights) // 2
        for i, part in enumerate((list(weights)[:half], list(weights)[half:])):
            write_safetensors(hf / f"model-{i}.safetensors", {n: weights[n] for n in part})
        gpt = plain_gpt(hf)
        same_bits({n: p.bfloat16() for n, p in other.named_parameters()},
                  {n: p.bfloat16() for n, p in gpt.named_parameters()})
        weights = {name: t.float() for name, t in weights.items()}
        with torch.no_grad():
            assert torch.allclose(gpt(idx)[0], llama_logits(weights, llama, idx), atol=1e-5)
        with Launch(1, without_a_change(folder, hf, "more", sample_tokens=200)) as launch:
            launch.result()
            assert "sample, as --tokenizer bytes lacks some tokens: [10, " in launch.stdout()

        for changed, text in ((dict(vocab_size=100), "has 100 tokens, but --tokenizer bytes"),
                              (dict(rope_parameters=dict(rope_type="yarn")), "rope_type is yarn"),
                              (dict(model_type="qwen2"), "model_type is qwen2"),
                              (dict(intermediate_size=28), r"gate_proj.weight is \(20, 12\), and"),
                              (dict(num_hidden_layers=3), "model.layers.2.* is missing"),
                              (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
                              (dict(num_attention_heads=0), "0 is no n_head"),
                              (dict(hidden_size=None), "None is no n_embd"),
                              (dict(rope_parameters=dict(rope_theta="1")), "'1' is no rope_theta"),
                              (dict(vocab_size=300.0), "300.0 is no vocab_size")):
            (hf / "config.json").write_text(json.dumps({**llama, **changed}))
            raises(train.UserError, text, plain_gpt, hf)
        (hf / "config.json").write_text(json.dumps(llama))
        os.truncate(hf / "model-1.safetensors", 600)
        raises(train.UserError, "model-1.safetensors is damaged", plain_gpt, hf)
        (hf / "model-1.safetensors").write_bytes(b"\xff" * 7 + b"\x7f{}")
        raises(train.UserError, "model-1.safetensors is damaged .*a header of", plain_gpt, hf)
        refused([*tiny(hf / "out"), "--export_hf", hf], "has model-.*safetensors, which would be r")
        refused([*tiny(hf / "out"), "--export_hf", hf / "config.json"], "is a file: give a folder")
        for path in hf.glob("*.safetensors"):
            path.unlink()
        torch.save({name: [0.0] for name in weights}, hf / "pytorch_model.bin")
        raises(train.UserError, "is missing, or is no such tensor", plain_gpt, hf)
        os.truncate(hf / "pytorch_model.bin", 2000)
        raises(train.UserError, "pytorch_model.bin is damaged", plain_gpt, hf)
    return "bf16 in two files, a head of its own; 16 mistakes", 0.0


@check([dict(W=1)])
def llama_opens_in_transformers():
    """What --export_hf writes transformers opens as LlamaForCausalLM, with the same logits; what
    that saves --init_from opens."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise Skip("transformers is not installed; see llama_folder_round_trip") from None
    gpt, idx = small_model(vocab_size=257), torch.arange(14).view(2, 7)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        train.write_llama(dict(gpt.named_parameters()), pathlib.Path(folder), gpt.config,
                          train.load_tokenizer("bytes"))
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
        difference = (theirs(idx).logits - gpt(idx)[0]).abs().max().item()
        assert difference < 1e-5, difference
        theirs.save_pretrained(f"{folder}/saved")
        saved = plain_gpt(f"{folder}/saved")
        same_bits(dict(gpt.named_parameters()), dict(saved.named_parameters()))
    return "logits of the small model, and back", difference


# -------------------------------------------------------------------------------------------------
# train.py: faults


def full_disk():
    """Plant, from step 3 on, a disk on which rank 1 can write 10 kB a file."""
    import resource  # not on Windows

    find_gradients = train.find_gradients

    def limiting(*arguments, **options):
        if arguments[4] + 1 == 3 and arguments[-1].rank == arguments[-1].world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        return find_gradients(*arguments, **options)

    train.find_gradients = limiting


@check([dict(W=1)])
def failed_save_keeps_the_run():
    """Where a checkpoint has no room, a run says so before its first step; where that comes later,
    it goes on, with the earlier checkpoint, and ends with status 1 if the last one is missing."""
    huge = dict(mode="zero3", n_layer=4, n_embd=2**20, n_head=2**10)  # on meta: takes no memory
    with tempfile.TemporaryDirectory() as folder:
        refused(tiny(folder, **huge), r"has [\d,]+ MB free, but a checkpoint takes [\d,]+", W=2)
        assert "step" not in os.listdir(folder)
        # Every evaluation finds a better model, so that the marks of failed saves are due as well.
        argv = tiny(f"{folder}/out", mode="zero2", eval_steps=3, eval_interval=1)
        expected = finish(2, tiny(f"{folder}/whole", mode="zero2"))["param_sha256"]
        for W in (1, 2):
            with Launch(W, argv, plant=full_disk) as launch:
                assert launch.wait() == [1] * W, launch.stderr()
                lines = launch.stderr().splitlines()
                result = json.loads(launch.stdout().splitlines()[-1].removeprefix("RESULT "))
            told = [rf"train\.py: step {step}: no checkpoint was .* rank {W - 1}: .*disk full, or"
                    for step in (3, 4)]
            assert len(lines) == 2 and all(map(re.match, told, lines)), lines
            assert check_all_whole(f"{folder}/out") == [1, 2]
            assert not list(pathlib.Path(folder, "out").glob(".step*")), "remains of a failed save"
            assert train.read_record(pathlib.Path(folder, "out", "best"))["step"] == 2
            assert W == 1 or result["param_sha256"] == expected
            with Launch(W, [*argv, "--resume", "auto"]) as launch:
                assert launch.result()["param_sha256"] == result["param_sha256"]
                assert "after step 2" in launch.stdout()
    return "no room from the start, and from step 3 on at W = 1, 2", 0.0


def poisoned_loss(rank):
    """Plant a loss of nan on one rank in steps 3 and 4, whose gradients are sound."""
    forward_backward = train.forward_backward

    def poisoned(model, scaler, batches, step, config, worker):
        losses = forward_backward(model, scaler, batches, step, config, worker)
        if step + 1 in (3, 4) and worker.rank == rank:
            losses[rank] = math.nan
        return losses

    train.forward_backward = poisoned


@check([dict(W=2, mode=mode) for mode in ("naive", "ddp", "zero1", "zero3", "torch-fsdp")],
       full=grid(W=(2, 3), mode=train.MODES[1:]))
def bad_gradient_is_skipped_by_all(mode):
    """A nan in one rank's gradient makes all ranks skip the step; the next one is done."""
    run = Run(small_config(mode=mode, global_batch_size=dist.get_world_size()))
    before = whole(run.model)
    with poisoned_gradient(math.nan):
        assert not run.step().finite
    same_bits(whole(run.model), before)
    assert run.step().finite
    after = whole(run.model)
    assert not torch.equal(after["wte.weight"], before["wte.weight"]), "the next step did nothing"
    views = [None] * dist.get_world_size()
    dist.all_gather_object(views, train.param_sha256(run.model))
    assert len(set(views)) == 1, "ranks differ"
    return f"{mode}: parameters after a nan on rank 1", 0.0


@check([dict(W=1)])
def bad_steps_are_counted():
    """Steps that are not finite are skipped, counted and logged; after --max_skipped_steps in a row
    the run stops with one line and status 1, its last checkpoint whole."""
    with tempfile.TemporaryDirectory() as folder:
        plant = functools.partial(poisoned_loss, 1)
        argv = tiny(folder, mode="ddp", max_steps=6, keep_last=9)
        finish(2, argv, plant=plant)
        lines = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
        assert [line["step"] for line in lines if "skipped" in line] == [3, 4]
        assert lines[2]["loss"] is None and lines[1]["param_norm"] == lines[3]["param_norm"]
        records = [train.read_record(path) for path in sorted(pathlib.Path(folder).glob("step_*"))]
        assert [r["skipped_steps"] for r in records] == [0, 0, 1, 2, 2, 2]
        assert [r["skipped_in_a_row"] for r in records] == [0, 0, 1, 2, 0, 0]
        refused([*argv, "--max_skipped_steps", 2], "step 4: .* not finite in 2 steps in a row",
                W=2, status=1, plant=plant)
        assert check_all_whole(folder) == [1, 2, 3]
        argv += ["--max_skipped_steps", 2, "--resume", "auto"]
        refused(argv, "step 4: ", W=2, status=1, plant=plant)  # step 3 counts, though not run again
        finish(2, argv)  # the data is sound now
    return "two bad steps of six, a limit of 2 and of 20", 0.0


def flip_a_bit(model, rank):
    """In the last element that rank has of the first parameter."""
    if dist.get_rank() == rank:
        p = train.local(next(model.parameters()).detach())
        p.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << 7)


@check([dict(W=2, mode="ddp"), dict(W=3, mode="naive"), dict(W=2, mode="zero1"),
        dict(W=3, mode="zero3"), dict(W=2, mode="torch-fsdp")],
       full=grid(W=(2, 3, 4), mode=train.MODES[1:]))
def flipped_bit_is_named(mode):
    """A flipped bit of one rank's parameters stops all ranks, naming the parameter and the rank."""
    W = dist.get_world_size()
    run = Run(small_config(mode=mode, global_batch_size=W))
    run.step()
    left = train.checksums(run.model)
    train.compare_parameters(run.model, left, 1, run.config, run.worker)
    flip_a_bit(run.model, rank=1)
    text = (r"wte\.weight has changed on rank 1" if mode in train.STAGE else
            r"wte\.weight .* those that agree: 0" + ", 1" * (W == 2) + r"\+2, 1" * (W == 3)
            + r"\+2\+3, 1" * (W == 4))
    raises(train.RunError, text, train.compare_parameters, run.model, left, 1, run.config,
           run.worker)
    return f"{mode}, one bit of rank 1", 0.0


def flip_after_step_2():
    """Plant a bit that flips on rank 1 between the update of step 2 and the end of step 3."""
    forward_backward = train.forward_backward

    def flipping(model, scaler, batches, step, config, worker):
        losses = forward_backward(model, scaler, batches, step, config, worker)
        if step + 1 == 3:
            flip_a_bit(model, rank=1)
        return losses

    train.forward_backward = flipping


@check([dict(W=1)])
def check_interval_stops_the_run():
    """--check_interval finds a flipped bit at the next comparison, whole parameters or shards, and
    stops with one line, status 1 and no checkpoint of what it has found."""
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("ddp", "zero2"):
            refused(tiny(folder, mode=mode, check_interval=3), "step 3, .*: wte.weight .*", W=2,
                    status=1, plant=flip_after_step_2)
            assert check_all_whole(folder) == [1, 2]
        finish(2, tiny(folder, check_interval=0), plant=flip_after_step_2)
    return "ddp and zero2 at step 3 of 4", 0.0


def other_tokens():
    """Plant other data on rank 1."""
    load_tokens = train.load_tokens
    if os.environ["RANK"] == "1":
        train.load_tokens = lambda *arguments: tuple(t[1:] for t in load_tokens(*arguments))


def other_torch():
    if os.environ["RANK"] == "1":
        torch.__version__ = "2.11.0"


def missing_data():
    def load_tokens(config, tokenizer, vocab_size):
        raise train.UserError("--dataset x: no such file or folder")

    if os.environ["RANK"] == "1":
        train.load_tokens = load_tokens


def own_disk(folder):
    """Plant a working directory of its own for each rank, and so an out_dir, if it is relative."""
    os.makedirs(f"{folder}/{os.environ['RANK']}")
    os.chdir(f"{folder}/{os.environ['RANK']}")


@check([dict(W=1)])
def ranks_agree_before_they_start():
    """Ranks with other options, other data, another torch, or one that cannot start at all: one
    line before the first step, naming the difference and the rank; every rank exits with 2."""
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny(f"{folder}/0")
        other_lr = [argv, [*argv, "--lr", 1]]
        cases = (
            (other_lr.__getitem__, None, "ranks differ in --lr: 0.003 on rank 0, 1.0 on rank 1"),
            (argv, other_tokens, "ranks differ in data: .* on rank 0, .* on rank 1"),
            (argv, other_torch, "ranks differ in torch: .* on rank 0, 2.11.0 on rank 1"),
            (argv, missing_data, "rank 1: --dataset x: no such file or folder"),
            (tiny("out"), functools.partial(own_disk, f"{folder}/disks"),
             "rank 1: --out_dir out .* need a disk that all ranks share"))
        on_both_cores(lambda argv, plant, text: refused(argv, text, W=2, plant=plant), *zip(*cases))
    return "options, data, torch, disk, one rank without data", 0.0


@check([dict(W=1)])
def kill_9_at_any_moment(kills=2):
    """kill -9 of a rank at a random moment, in a write too: the others end at once and say where;
    what is on disk is whole; started again, as torchrun does, the run ends on the same bits."""
    random = np.random.default_rng(5)
    survivors_spoke = restarts_resumed = 0
    with tempfile.TemporaryDirectory() as folder:
        for W, mode in ((2, "zero3"), (3, "ddp")):
            argv = tiny(f"{folder}/{mode}", mode=mode, max_steps=12 + 2 * kills,
                        global_batch_size=12)
            torchruns = dict(TORCHELASTIC_RUN_ID=mode, store=new_store())
            whole_run = finish(W, [*argv, "--out_dir", f"{folder}/whole"])
            for i in range(math.ceil(kills / 2) if W == 2 else kills // 2):
                with Launch(W, argv, **torchruns) as launch:
                    if random.random() < 0.7:  # else while it starts
                        launch.wait_for("| loss")
                    time.sleep(random.uniform(0, 0.2))
                    victim = random.integers(W)
                    launch.processes[victim].kill()
                    codes = launch.wait(limit_s=10)
                    assert all(codes) or not any(codes[:victim] + codes[victim + 1:]), codes
                    for rank in set(range(W)) - {victim}:
                        assert "Traceback" not in launch.stderr(rank), launch.stderr(rank)
                        survivors_spoke += bool(re.search(
                            r"failed in step \d+, .*no word from rank", launch.stderr(rank)))
                check_all_whole(f"{folder}/{mode}")
            with Launch(W, argv, **torchruns) as launch:
                assert launch.result()["param_sha256"] == whole_run["param_sha256"]
                restarts_resumed += "resumed from" in launch.stdout()
    # Of a few kills all may come before the first step; `dead_and_hanging_ranks_are_named` has one
    # that does not.
    assert kills < 10 or (survivors_spoke and restarts_resumed), "no kill met a step"
    return f"{kills} kills of zero3 at W = 2 and ddp at W = 3", 0.0


def die_in_wrap():
    """Plant the death of rank 1 before checkpoints of an earlier run are out of the way."""
    wrap = train.wrap
    train.wrap = lambda *arguments: os._exit(3) if os.environ["RANK"] == "1" else wrap(*arguments)


@check([dict(W=1)])
def restarts_go_on_with_their_own_run():
    """What torchrun starts again resumes from its own checkpoints, and never from an earlier run's,
    be it that a rank dies before the first step."""
    with tempfile.TemporaryDirectory() as folder:
        out_dir = f"{folder}/out"
        finish(1, tiny(out_dir))
        argv = tiny(out_dir, mode="zero2", seed=9)
        expected = finish(2, [*argv, "--out_dir", f"{folder}/whole"])["param_sha256"]
        with Launch(2, argv, plant=die_in_wrap, TORCHELASTIC_RUN_ID="first") as launch:
            assert launch.wait()[1] == 3 and check_all_whole(out_dir) == [3, 4]
        for job, aside, line in (("first", 1, "moved to"), ("first", 1, "resumed from"),
                                 ("second", 2, "moved to"), ("second", 2, "resumed from")):
            with Launch(2, argv, TORCHELASTIC_RUN_ID=job) as launch:
                assert launch.result()["param_sha256"] == expected
                assert line in launch.stdout(), launch.stdout()
            assert check_all_whole(out_dir) == check_all_whole(f"{out_dir}/aside_1") == [3, 4]
            assert len(list(pathlib.Path(out_dir).glob("aside_*"))) == aside
    return "a death before the first step, two restarts each of two runs", 0.0


def in_step_2(act):
    """Plant act() on rank 1, in the middle of step 2."""
    forward_backward = train.forward_backward

    def acting(*arguments):
        if arguments[3] + 1 == 2 and arguments[-1].rank == 1:
            act()
        return forward_backward(*arguments)

    train.forward_backward = acting


def raise_error():
    raise ValueError("planted")


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


@check([dict(W=1, mode="zero3", ranks=2)],
       full=[dict(W=1, mode=mode, ranks=W) for mode in train.MODES[1:] for W in (2, 3, 4)])
def dead_and_hanging_ranks_are_named(mode, ranks):
    """A rank that raises, is killed, sleeps or is stopped: all end non-zero within the timeout; the
    others say at which step, in which exchange, and because of which rank."""
    cases = ((raise_error, 6, "rank 1 failed in step 2, .*ValueError: planted"),
             (functools.partial(os._exit, 3), 6, "no word from rank (0, )?1"),
             (functools.partial(time.sleep, 60), 8, "no word from rank 1: dead or hanging"),
             (stop_self, 8, "no word from rank 1: dead or hanging"))

    def try_out(act, limit_s, named):
        with (tempfile.TemporaryDirectory() as folder,
              Launch(ranks, tiny(folder, mode=mode, timeout_s=2, global_batch_size=12),
                     plant=functools.partial(in_step_2, act)) as launch):
            launch.wait_for("step     1/")
            start_s = time.monotonic()
            codes = launch.wait()
            took_s = time.monotonic() - start_s
            text = [launch.stderr(rank) for rank in range(ranks)]
        assert all(codes) and took_s < limit_s, (act, codes, took_s, text)
        others = text[:1] + text[2:]
        assert all(re.search(r"train\.py: rank \d failed in step 2, \w+", t) for t in others), (
            act, codes, text)
        assert any(re.search(named, t) for t in others), (act, others)
        assert ("Traceback" in text[1]) == (act is raise_error), text[1]
        assert not any("Traceback" in t for t in others), others

    on_both_cores(try_out, *zip(*cases))
    return f"{mode} at W = {ranks}: raises, dies, sleeps, is stopped", 0.0


@check([dict(W=1)])
def signals_end_a_run_well():
    """SIGTERM or Ctrl-C to one rank ends all after the same step, with a checkpoint from which the
    run goes on to the same bits, exit status 0 and one line; so in one process."""
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny(folder, mode="zero3", max_steps=5, save_interval=100)
        expected = finish(2, tiny(f"{folder}/whole", mode="zero3", max_steps=5))["param_sha256"]
        for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")):
            for W, victim in ((1, 0), (2, 0), (2, 1)):
                plant = functools.partial(signal_in_step_2, victim, number)
                with Launch(W, argv if W > 1 else [*argv, "--mode", "single"], plant=plant) as run:
                    assert run.wait() == [0] * W, run.stderr()
                    told = name if victim == 0 else "a signal to another rank"
                    expected_line = f"train.py: stopped by {told} after step 3\n"
                    assert run.stderr() == expected_line, run.stderr()
                    assert W == 1 or not run.stderr(1)
                assert check_all_whole(folder) == [3]
            assert finish(2, [*argv, "--resume", "auto"])["param_sha256"] == expected
    return "SIGTERM and Ctrl-C to rank 0 and 1 of 2, and alone", 0.0


def signal_in_step_2(victim, number):
    """Plant a signal to a rank, and at once another, as torchrun passes on what a terminal sent."""
    forward_backward = train.forward_backward

    def acting(*arguments):
        if arguments[3] + 1 == 2 and arguments[-1].rank == victim:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return forward_backward(*arguments)

    train.forward_backward = acting


# -------------------------------------------------------------------------------------------------
# README.md: what it has to paste


def pasted(first_line):
    """The block of code in README.md that begins with first_line."""
    text = (HERE / "README.md").read_text()
    blocks = re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if block.startswith(first_line)]
    return block


def run_pasted(command, folder, **environment):
    """Run a command in folder, with folder/bin and this Python first in the path -> stdout."""
    path = os.pathsep.join((str(folder / "bin"), str(pathlib.Path(sys.executable).parent),
                            os.environ["PATH"]))
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=100,
                          env={**os.environ, "PATH": path, **environment})
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


@check([dict(W=1, names=("Zero3",))], full=[dict(W=1, names=("Zero3", "DDP"))], limit_s=120)
def readme_example_runs(names):
    """The README's example of one's own module runs as it stands, and with DDP for Zero3 ends on
    the same losses."""
    example = pasted("# own.py")
    assert len(example.splitlines()) < 25
    as_ddp = example.replace("from zero import Zero3", "from ddp import DDP").replace(
        "Zero3(net, units=[net[0], net[2]])", "DDP(net)")
    assert "Zero3" in example and "Zero3" not in as_ddp, "the lines to change are others"

    def losses(name):
        folder = pathlib.Path(parent, name)
        folder.mkdir()
        (folder / "own.py").write_text(example if name == "Zero3" else as_ddp)
        for file in ("ddp.py", "zero.py"):
            shutil.copy(HERE / file, folder)
        stdout = run_pasted(["torchrun", "--standalone", "--nproc_per_node=2", "own.py"], folder)
        # Python under torchrun writes a line and its end apart: the other rank may come between.
        return sorted(re.findall(r"rank (\d): loss (\d+\.\d{4})", stdout))

    with tempfile.TemporaryDirectory() as parent:
        ours, *others = on_both_cores(losses, names)
    assert all(ours == theirs for theirs in others) and len(ours) == 2, (ours, others)
    assert all(float(loss) < 0.5 for _, loss in ours), ours
    return f"{', '.join(names)}; losses of two ranks: {ours[0][1]} and {ours[1][1]}", 0.0


def checked_flags(command):
    """The flags that follow train.py in a command, as a Config; those that are not fail."""
    config = train.parse_args(command[command.index("train.py") + 1:])
    train.check(config)
    return config


def slurm_of_two_nodes(folder, flags):
    """Lay out in folder the README's sbatch script, stand-ins for scontrol and srun, and a train.py
    that adds flags and leaves its process id in a file `rank0` and so on."""
    (folder / "bin").mkdir()
    for name, text in (
            ("scontrol", "[ \"$*\" = 'show hostnames node[1-2]' ] && echo localhost && echo b"),
            ("srun", '"$@" & "$@"; first=$?; wait $! && exit $first')):  # on two nodes
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "train.py").write_text(f"""import os, pathlib, sys
pathlib.Path("rank" + os.environ["RANK"]).write_text(str(os.getpid()))
sys.path.insert(0, {str(HERE)!r})
sys.argv[1:] += {[str(word) for word in flags]!r}
import train
sys.exit(train.main())
""")
    (folder / "job.sh").write_text(pasted("#!/bin/bash\n#SBATCH"))


@check([dict(W=1)], limit_s=120)
def readme_slurm_job_survives_kill_9():
    """The README's sbatch script, under a stand-in for Slurm with two nodes, is one run; after kill
    -9 of a rank both nodes start again, resume, and end on the undisturbed bits."""
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent)
        flags = tiny("out", max_steps=60, save_interval=4)
        slurm_of_two_nodes(folder, flags)
        plain = [*flags, "--out_dir", folder / "whole", "--mode", "zero3", "--shard_size", 1]
        expected = finish(2, plain)["param_sha256"]
        with contextlib.closing(socket.create_server(("localhost", 0))) as free:
            job_id = (free.getsockname()[1] - 20000) % 40000  # the script adds 20000
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job = pool.submit(run_pasted, ["bash", "job.sh"], folder, SLURM_NNODES="2",
                              SLURM_JOB_NODELIST="node[1-2]", SLURM_GPUS_ON_NODE="1",
                              SLURM_JOB_ID=str(job_id))
            metrics = folder / "out" / "metrics.jsonl"
            while not metrics.exists() or metrics.read_text().count("\n") < 10:
                assert not job.done(), job.result()
                time.sleep(0.02)
            os.kill(int((folder / "rank1").read_text()), signal.SIGKILL)
            stdout = job.result()
    resumed = re.findall(r"^resumed from .*, after step (\d+)$", stdout, re.MULTILINE)
    assert len(resumed) == 1 and 8 <= int(resumed[0]) < 60, stdout
    results = re.findall(r"^RESULT (.*)$", stdout, re.MULTILINE)
    assert len(results) == 1 and json.loads(results[0])["param_sha256"] == expected, results
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", pasted("#!/bin/bash"),
                                 re.MULTILINE))
    assert directives["ntasks-per-node"] == "1" and directives["signal"].startswith("TERM@")
    return f"two agents of torchrun, a rank each, from step {resumed[0]} on", 0.0


def read_yaml(text):
    """Block style YAML -> dicts and lists of strings: no more than the README uses."""
    lines = [(len(line) - len(line.lstrip()), line.strip()) for line in text.splitlines()
             if line.strip() and not line.lstrip().startswith("#")]
    lines = [(indent, line.partition("  #")[0].rstrip()) for indent, line in lines]

    def node(i, indent):
        """The value that begins with line i -> (it, the line after it)."""
        if lines[i][1].startswith("- "):
            found = []
            while i < len(lines) and lines[i][0] == indent and lines[i][1].startswith("- "):
                rest = lines[i][1][2:]
                if re.match(r"[\w./-]+:( |$)", rest):
                    lines[i] = (indent + 2, rest)
                    value, i = node(i, indent + 2)
                else:
                    value, i = rest, i + 1
                found.append(value)
            return found, i
        found = {}
        while i < len(lines) and lines[i][0] == indent and not lines[i][1].startswith("- "):
            key, colon, value = lines[i][1].partition(":")
            assert colon and key not in found and "\t" not in lines[i][1], lines[i]
            found[key], i = value.strip(), i + 1
            if not found[key]:
                assert lines[i][0] >= indent, lines[i]
                found[key], i = node(i, lines[i][0])
        return found, i

    value, end = node(0, 0)
    assert end == len(lines), f"indentation of {lines[end]}"
    return value


@check([dict(W=1)])
def readme_kubernetes_job_fits():
    """The README's Kubernetes objects fit together: service, job, rendezvous, volume and flags."""
    service, job = (read_yaml(text) for text in pasted("# job.yaml").split("---\n"))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    [container], [volume] = pod["containers"], pod["volumes"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"] == "true"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    command = container["command"]
    agent = dict(word[2:].split("=") for word in command[1:command.index("train.py")])
    assert command[0] == "torchrun" and agent["nnodes"] == spec["completions"]
    assert agent["rdzv_endpoint"].split(":")[0] == f"{name}-0.{pod['subdomain']}"
    assert agent["nproc_per_node"] == container["resources"]["limits"]["nvidia.com/gpu"]
    [mount] = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    config = checked_flags(command)
    assert config.out_dir.startswith(mount["mountPath"]) and config.resume == "auto"
    assert int(agent["nnodes"]) * int(agent["nproc_per_node"]) % config.shard_size == 0
    return f"{len(command)} words of a command, service and volume", 0.0


def bash_of_readme():
    text = (HERE / "README.md").read_text()
    return re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands_of_train():
    """(ranks, words) of every command in the README that runs train.py, in order."""
    for line in "".join(bash_of_readme()).replace("\\\n", " ").splitlines():
        with mock.patch.dict(os.environ, SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8"):
            words = shlex.split(os.path.expandvars(line), comments=True)
        if "train.py" in words:
            yield math.prod(int(word.split("=")[1]) for word in words
                            if re.match(r"--(nnodes|nproc_per_node)=\d", word)), words


@check([dict(W=1)])
def readme_commands_are_valid():
    """Every command of the README is valid shell, every file in it is there, every flag that it
    gives train.py exists and goes with the others; the Dockerfile copies what it runs."""
    for block in bash_of_readme():
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    commands = list(commands_of_train())
    for W, words in commands:
        with mock.patch.dict(os.environ, dict(RANK="0") if "torchrun" in words else {}):
            config = checked_flags(words)
        if config.micro_batch_size == "auto":
            config.micro_batch_size = 1
        train.accumulation_steps(config, W)
    docker = pasted("# Dockerfile")
    instructions = re.findall(r"^([A-Z]+) (.*)$", docker, re.MULTILINE)
    assert [name for name, _ in instructions] == ["FROM", "WORKDIR", "COPY", "RUN", "CMD"]
    _, _, (_, copied), _, (_, command) = instructions
    for pattern in copied.split()[:-1]:
        assert list(HERE.glob(pattern)), pattern
    checked_flags(json.loads(command))
    return f"{len(commands)} command lines of train.py, a Dockerfile", 0.0


def shortened(flags):
    """The same command in a second: of a flag given twice the last counts."""
    flags, more = list(flags), ["--no-compile", "--eval_steps", 2, "--sample_tokens", 8,
                                "--block_size", 16, "--save_interval", 2]
    for name in ("--max_steps", "--warmup_steps", "--eval_interval"):
        if name in flags and int(flags[flags.index(name) + 1]) > 20:
            flags[flags.index(name) + 1] = str(int(flags[flags.index(name) + 1]) // 50)
    more += [] if "--max_steps" in flags else ["--max_steps", 4]
    more += [] if "--warmup_steps" in flags else ["--warmup_steps", 1]
    more += [] if "--dataset" in flags else ["--dataset", HERE / "model.py"]
    if "--tokenizer" in flags:  # which would be downloaded
        more += ["--tokenizer", "bytes"]
    if "--init_from" not in flags:  # the folder says which size
        more += ["--n_layer", 2, "--n_head", 2, "--n_embd", 16, "--n_kv_head", 1]
    return [*flags, *more]


@check([dict(W=1, every=7)], full=[dict(W=1, every=1)], limit_s=240)
def readme_commands_run(every):
    """Every command of the README that runs train.py on one machine ends well, one after the other
    in one folder, with a smaller model and fewer steps."""
    commands = [(W, words[words.index("train.py") + 1:]) for W, words in commands_of_train()
                if not any(word.startswith("--nnodes") for word in words)][::every]
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent)
        for name in ("my.txt", "tinyshakespeare.txt"):
            shutil.copy(HERE / "model.py", folder / name)
        (folder / "data/openwebtext").mkdir(parents=True)
        for name in ("train.bin", "val.bin"):
            (np.arange(5000, dtype=np.uint16) % 256).tofile(folder / "data/openwebtext" / name)
        for W, flags in commands:
            result = finish(W, shortened(flags), plant=functools.partial(os.chdir, folder))
            assert result["world_size"] == W and math.isfinite(result["train_loss"]), flags
    return f"{len(commands)} commands", 0.0


def section_of_readme(heading):
    _, found, rest = (HERE / "README.md").read_text().partition(f"# {heading}\n")
    assert found, f"README.md has no section {heading}"
    return re.split(r"^##+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows_of_readme(heading):
    """The cells of the rows of the table in a section of README.md."""
    lines = [line for line in section_of_readme(heading).splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def options_table():
    """Config as the table under "Options" in README.md. To bring that up to date:
    python -c 'import verify; print(verify.options_table())'"""
    lines = ["| flag | default | |", "|---|---|---|"]
    for group, name, text in re.findall(r"^    (?:# (.*)|(\w+): .*?# (.*))$",
                                        inspect.getsource(train.Config), re.MULTILINE):
        value = getattr(train.Config, name, None)
        default = "off" if value is False else "" if value is None else f"`{value}`"
        lines.append(f"| **{group}** | | |" if group else f"| `--{name}` | {default} | {text} |")
    return "\n".join(lines)


@check([dict(W=1)])
def readme_options_are_config():
    """The README's table of options is what the fields of Config in train.py say."""
    section, expected = section_of_readme("Options"), options_table()
    for line in expected.splitlines():
        assert f"{line}\n" in section, f"not in README.md: {line}; see options_table in verify.py"
    assert f"{expected}\n\n" in section, "README.md has other options, or another order"
    return f"{len(vars(train.Config()))} options", 0.0


def code_lines(text):
    """How many lines of Python hold code: neither blank, nor comments, nor docstrings."""
    docstrings = {n for node in ast.walk(ast.parse(text))
                  if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                  and ast.get_docstring(node)
                  for n in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return sum(line.strip() != "" and line.lstrip()[0] != "#" and n not in docstrings
               for n, line in enumerate(text.splitlines(), start=1))


def definitions(text):
    """{name, or Class.name: line} of all classes, functions and methods of a module."""
    found = {}
    for node in ast.parse(text).body:
        for inner, prefix in ((node, ""), *((n, node.name + ".") for n in
                                            (node.body if isinstance(node, ast.ClassDef) else ()))):
            if isinstance(inner, ast.ClassDef | ast.FunctionDef):
                found[prefix + inner.name] = inner.lineno
    return found


@check([dict(W=1)])
def readme_leads_there():
    """Sizes of files, links to lines, files and headings in the README are right."""
    text = (HERE / "README.md").read_text()
    sizes = re.findall(r"^\| \[`(\S+)`\]\(\1\) \| ([\d,]+)(?: \(([\d,]+)\))? \|", text, re.M)
    assert [name for name, *_ in sizes] == ["model.py", "ddp.py", "zero.py", "train.py",
                                            "verify.py", "bench.sh"]
    for name, n_lines, n_code in sizes:
        source = (HERE / name).read_text()
        counted = f"{source.count(chr(10)):,}", f"{code_lines(source):,}" if n_code else ""
        assert counted == (n_lines, n_code), f"{name} has {counted} lines, not {n_lines, n_code}"
    links = re.findall(r"\[`([\w.]+)`\]\((\w+\.py)#L(\d+)\)", text)
    for name, file, number in links:
        line = (HERE / file).read_text().splitlines()[int(number) - 1]
        there = f"= {name}(" in line if name.startswith("nn.") else (
            definitions((HERE / file).read_text()).get(name) == int(number))
        assert there, f"[`{name}`]({file}#L{number}): it is not in this line: {line}"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        file, _, heading = target.partition("#")
        assert "://" in target or (HERE / file).exists(), f"{target} is not there"
        assert file or heading in headings, f"{target} is no heading"
    _, head, table = text.partition("\ncheck ")
    *shown, end = [line.split()[0] for line in table.partition("```")[0].splitlines()[1:]]
    assert head and end.isdigit() and set(shown) - {"..."} <= globals().keys(), (shown, end)
    return f"{len(sizes)} sizes, {len(links)} links to definitions", 0.0


def not_caught(file, text, name, quotes=()):
    """What to say unless, in a copy of the tree in which file has this text, the check `name` fails
    with all the words quoted."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (*HERE.glob("*.py"), HERE / "bench.sh", HERE / "README.md"):
            shutil.copyfile(path, pathlib.Path(folder, path.name))  # without its mode: read-only
        pathlib.Path(folder, file).write_text(text)
        done = subprocess.run([sys.executable, "verify.py", name], cwd=folder, text=True,
                              capture_output=True)
    failed = re.search(rf"^{name} .*FAILED", done.stdout, re.MULTILINE)
    if not failed or not all(words in done.stdout for words in quotes):
        return f"{file}, {name}, {quotes}: {done.stdout}{done.stderr[-500:]}"


@check([dict(W=1, n=1)], full=[dict(W=1, n=None)], limit_s=1200)
def readme_breaks_are_caught(n):
    """Every line in the README's table of breaks is there; with the edit, the check that the row
    names fails, with the words that it quotes."""
    edits = []
    for line, instead, seen, name in rows_of_readme("Break it yourself"):
        file, number, old = re.fullmatch(r"\[(\S+):(\d+)\]\(\1#L\2\) `(.*)`", line).groups()
        lines = (HERE / file).read_text().splitlines(keepends=True)
        assert old in lines[int(number) - 1], f"{file}, line {number}: there is no {old}"
        lines[int(number) - 1] = lines[int(number) - 1].replace(old, instead.strip("`"))
        edits.append((file, "".join(lines), name.strip("`"), re.findall("`(.*?)`", seen)))
        assert edits[-1][3], f"line {number} of {file}: no words quoted"
        assert edits[-1][2] in globals(), f"there is no check {name}"
    problems = list(filter(None, on_both_cores(not_caught, *zip(*edits[:n]))))
    assert not problems, problems
    return f"{len(edits)} lines there, {len(edits[:n])} broken", 0.0


def without_body(name, file, number):
    """The text of a file in which the function that begins in a line does not know what to do."""
    text = (HERE / file).read_text()
    if name.startswith("nn."):  # torch's, to be written anew
        return text.replace(f"{name}(", f"{name[3:]}(")
    [node] = [node for node in ast.walk(ast.parse(text))
              if isinstance(node, ast.FunctionDef) and node.lineno == int(number)]
    body, lines = node.body[bool(ast.get_docstring(node)):], text.splitlines(keepends=True)
    lines[body[0].lineno - 1:node.end_lineno] = [
        f"{' ' * body[0].col_offset}raise NotImplementedError\n"]
    return "".join(lines)


@check([dict(W=1, n=0)], full=[dict(W=1, n=None)], limit_s=1200)
def readme_exercises_have_checks(n):
    """Without any function that the README's exercises delete, the check that the row names fails.
    """
    cases = []
    for functions, _, checks in rows_of_readme("Exercises"):
        links = re.findall(r"\[`(\S+)`\]\((\S+)#L(\d+)\)", functions)
        for name, function in itertools.product(re.findall(r"`(\w+)`", checks), links):
            assert name in globals(), f"there is no check {name}"
            cases.append((function[1], without_body(*function), name))
    problems = list(filter(None, on_both_cores(not_caught, *zip(*cases[:n]))))
    assert not problems, problems
    return f"{len(cases)} pairs of function and check, {len(cases[:n])} tried", 0.0


if __name__ == "__main__":
    sys.exit(main())

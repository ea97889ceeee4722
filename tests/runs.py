"""train.py: runs, and faults planted in them.

A run is `python train.py FLAGS`, or what torchrun makes of it, in processes forked from pytest's
own, which has loaded torch. Before train.py begins, a plant may change what it finds: an optimizer
whose second update kills the process, a loss that becomes nan. So pytest's process must start no
process group, and run no backward: what these leave behind would be in every fork.
"""

import dataclasses
import functools
import gc
import importlib.machinery
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import types

import fsspec.core  # noqa: F401 - what torch imports late is imported once, not by each run
import numpy.ma  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.optim
import torch.nn.functional as F

import train  # noqa: F401
from tests.common import ROOT

# A rate so high, and constant, that any difference shows in the hash after four steps. Everything
# is evaluated and compared over ranks in each of them.
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, micro_batch_size=1, global_batch_size=2,
            max_steps=4, device="cpu", min_lr=0.01, warmup_steps=2, eval_steps=2, eval_interval=1,
            lr=0.01, sample_tokens=4, save_interval=0, check_interval=1, dataset=ROOT / "verify.py")
LIMIT_S = 60  # of a run
# Compiled once: that takes as long as a run's steps.
TRAIN = importlib.machinery.SourceFileLoader("train", str(ROOT / "train.py")).get_code("train")
FORK = multiprocessing.get_context("fork")
FOLDERS = []  # of `undisturbed`: they go with this process


def flags(**options):
    """A command line for a run of milliseconds; an option that is None is left out."""
    words = []
    for name, value in {**TINY, **options}.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def nothing():
    """No plant."""


def execute(argv, folder, environment, plant):
    """train.py in this process, as `python train.py argv` runs it; its output goes to files."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))  # not pytest's
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # an agent of torchrun's has others
    os.environ.update(environment)
    sys.argv = ["train.py", *map(str, argv)]
    gc.freeze()  # a collection would touch, and so copy, all that pytest has loaded
    plant()
    main = types.ModuleType("__main__")
    main.__file__ = str(ROOT / "train.py")
    sys.modules["__main__"] = main
    exec(TRAIN, main.__dict__)


def run_alone(folder, file, *words):
    """Plant a run of another file, in a folder from which nothing of ours can be imported."""
    ours = (ROOT, ROOT / "tests", ROOT / "extras", ROOT / "dropin")
    for name, module in list(sys.modules.items()):
        if pathlib.Path(getattr(module, "__file__", None) or "").parent in ours:
            del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if pathlib.Path(path) not in ours)]
    sys.argv = [file, *words]
    runpy.run_path(f"{folder}/{file}", run_name="__main__")
    sys.exit()


@dataclasses.dataclass
class Run:
    """How a run has ended. Three lists, by rank."""
    codes: list
    stdout: list
    stderr: list

    def __str__(self):
        facts = []
        for rank, (code, text) in enumerate(zip(self.codes, self.stderr)):
            lines = text.splitlines() or ["nothing"]
            facts.append(f"rank {rank} ended with {code} and wrote: {' | '.join(lines[-3:])}")
        return "; ".join(facts)


class Store:
    """The store by which ranks meet, in a process of its own. In pytest's it would have a thread,
    and a fork could keep for ever a lock that this thread holds."""

    def __init__(self):
        ours, theirs = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        self.port = ours.recv()

    def stop(self):
        self.process.kill()
        self.process.join()


def serve(pipe):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


class Started:
    """A run that goes on while a test looks at it. A context, which leaves no process."""

    def __init__(self, out_dir, W=1, plant=nothing, argv=None, **options):
        """As run_train."""
        words = flags(out_dir=out_dir, **options) if argv is None else argv
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.store = Store() if W > 1 else None
        self.processes = []
        for rank in range(W):
            (self.folder / str(rank)).mkdir()
            environment = {}
            if W > 1:
                environment = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(W),
                                   LOCAL_WORLD_SIZE=str(W), MASTER_ADDR="localhost",
                                   MASTER_PORT=str(self.store.port),
                                   TORCHELASTIC_USE_AGENT_STORE="True")
            arguments = words, str(self.folder / str(rank)), environment, plant
            self.processes.append(FORK.Process(target=execute, args=arguments))
            self.processes[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()
        if self.store is not None:
            self.store.stop()
        shutil.rmtree(self.folder)

    def wait_for(self, path):
        """Until a plant has written a file -> what is in it."""
        while not (path.exists() and path.read_text()):
            assert any(process.is_alive() for process in self.processes), str(self.end())
            time.sleep(0.01)
        return path.read_text()

    def end(self):
        """Wait for it -> a Run."""
        start_s = time.monotonic()
        self._wait()
        seconds = time.monotonic() - start_s
        run = Run([], [], [])
        for rank, process in enumerate(self.processes):
            is_late = process.exitcode is None
            process.kill()
            process.join()
            note = f"the tests: killed after {seconds:.0f} s" if is_late else ""
            printed = self.folder / str(rank)
            run.codes.append(process.exitcode)
            run.stdout.append((printed / "stdout").read_text(errors="replace"))
            run.stderr.append((printed / "stderr").read_text(errors="replace") + note)
        return run

    def _wait(self):
        """As torchrun does: soon after a rank has failed send SIGTERM to the others."""
        deadline = time.monotonic() + LIMIT_S
        failed_s = None  # when the first one had failed
        has_sent_sigterm = False
        while time.monotonic() < deadline:
            codes = [process.exitcode for process in self.processes]
            if None not in codes:
                return
            if any(codes) and failed_s is None:
                failed_s = time.monotonic()
            # Those that end by themselves may do so.
            if failed_s is not None and not has_sent_sigterm and time.monotonic() > failed_s + 0.5:
                has_sent_sigterm = True
                deadline = time.monotonic() + 4
                for process in self.processes:
                    process.terminate()
            time.sleep(0.005)


def run_train(out_dir, W=1, plant=nothing, argv=None, **options):
    """Run train.py on W ranks as torchrun starts them or, with W = 1, as python does. -> a Run.

    plant: called first on every rank. argv: instead of options. Soon after a rank has failed the
    others get SIGTERM, as from torchrun; SIGKILL what is left 4 s later, or after a minute in all.
    """
    with Started(out_dir, W, plant, argv, **options) as started:
        return started.end()


def finish(out_dir, W=1, status=0, fact="^$", **options):
    """RESULT and stdout of a run that has to end on all ranks with this status and without a
    traceback; what rank 0 writes to stderr has to match fact."""
    run = run_train(out_dir, W, **options)
    assert run.codes == [status] * W, run
    assert re.search(fact, run.stderr[0]), f"no {fact!r}: {run}"
    assert "Traceback" not in "".join(run.stderr), "".join(run.stderr)
    assert status != 2 or not any(run.stderr[1:]), f"more than one rank says it: {run}"
    results = re.findall(r"^RESULT (.*)\n\Z", run.stdout[0], re.MULTILINE)
    result = json.loads(results[0]) if results else {}
    return dict(result, stdout=run.stdout[0])


def refused(fact, out_dir, W=1, status=2, **options):
    """Assert that a run ends with one line that matches fact: a mistake is said by rank 0 alone."""
    finish(out_dir, W, status, rf"\Atrain\.py: .*{fact}.*\n\Z", **options)


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


def before_updates(act):
    """Plant act(optimizer, n) before the n-th update, for each n.

    AdamW.step is what every mode calls once in a step, between the collectives of the backward and
    those of the next forward, so the others wait for the rank to which something happens here.
    """
    update = torch.optim.AdamW.step
    numbers = itertools.count(1)

    # With the mark by which torch knows that its hooks are around it already: they would run twice
    # on this rank, and stages would take that for one more step.
    @functools.wraps(update)
    def step(optimizer, *closure):
        act(optimizer, next(numbers))
        return update(optimizer, *closure)

    torch.optim.AdamW.step = step


def in_update(n, on_rank, act, *arguments):
    """Plant act(*arguments), or act(optimizer) without any, on a rank, or None for all, before its
    n-th update."""
    def act_once(optimizer, number):
        if number == n and on_rank in (None, this_rank()):
            act(*(arguments or [optimizer]))

    before_updates(act_once)


def spoil(function, calls, value):
    """Plant value in some calls of rank 1: with F.cross_entropy in the loss, whose gradients stay
    sound; with F.embedding in one element of a gradient, and so in the shard of one rank.

    Both are what only one rank sees, while all have to decide alike.
    """
    real = getattr(F, function)
    n = itertools.count(1)

    def spoiled(*arguments, **options):
        actual = real(*arguments, **options)
        if torch.is_grad_enabled() and next(n) in calls and this_rank() == 1:
            bad = torch.zeros_like(actual)
            bad.view(-1)[0] = value
            if function == "embedding":
                actual.register_hook(bad.add)
            else:
                actual.data.add_(bad)
        return actual

    setattr(F, function, spoiled)


def fail(text):
    raise RuntimeError(text)


def raise_signals(*numbers):
    for number in numbers:
        signal.raise_signal(number)
    time.sleep(0.2)  # until a thread has noted them


def flip_a_bit(optimizer):
    part = optimizer.param_groups[0]["params"][0].detach()
    part.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << 7)


def ask(resume, W=1, **options):
    """RESULT and stdout of `train.py --resume RESUME --eval_only`, with no flags but these."""
    words = [f"--resume={resume}", "--eval_only"]
    for name, value in options.items():
        words.append(f"--{name}={value}")
    return finish(None, W, argv=words)


def contents(*folders):
    """What all files below folders hold, but for .lock, which is the next run's."""
    actual = set()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != ".lock":
                actual.add(path.read_bytes())
    return actual


def view_of(folder):
    """{path: (content, time of the last change)} of all that is in folder."""
    view = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else os.listdir(path) if path.is_dir() else ""
        view[path] = content, path.lstat().st_mtime_ns
    return view


def launched_by(name, n):
    """Plant what a torchrun tells ranks: where its logs are, if it has a name, and how often it has
    started again."""
    path = name and f"/logs/none_{name}/attempt_{n}/0/error.json"
    os.environ.update(TORCHELASTIC_ERROR_FILE=path, TORCHELASTIC_RESTART_COUNT=str(n))


@functools.cache
def undisturbed(W=1, **options):
    """RESULT of a run, and `folder`: made once for all tests of this process, which leave the
    folder as it is."""
    folder = tempfile.TemporaryDirectory()
    FOLDERS.append(folder)
    path = pathlib.Path(folder.name, "out")
    return finish(path, W, **options) | dict(folder=path)

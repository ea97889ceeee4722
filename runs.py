# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""What any program with ranks needs beside its model. Replaces a launcher's library and a framework
of callbacks. Each part keeps a promise:

    ranks     no rank waits for one that has left: all go on, or all stop, and say why
    flags     a mistake is one line and status 2, before anything is written
    folder    one run at a time; a checkpoint is complete or not there; nothing is lost
    end       a signal lets the step be finished; the status says how the run has ended

Ranks that disagree hang: one leaves, and the others wait for it in their next collective. So what
can fail on one rank alone runs in `together` or `on_rank_0`, after which all ranks go on, or all
stop. SystemExit with a text is a user's mistake, or a run that cannot sensibly go on. `end_with`
says it in one line.

docs/using.md has a loop of ten lines that goes on where it was killed: `find_checkpoint`, `load`,
`Folder.begin`, `save`.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import datetime
import difflib
import fcntl
import gc
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from oracle import kinds_of_devices, take_device

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ORPHANED = signal.SIGUSR1  # torchrun has ended. Linux sends it once for each of its threads

# -------------------------------------------------------------------------------------------------
# ranks


def choose_device(kind: str | None) -> torch.device:
    """This rank's device, which other ranks may have, too: see `take_device`. kind: such as cuda;
    None for the accelerator, if there is one. Refuses where there is no such device, and where
    ranks would share one by a backend other than NCCL, the only one that is known to do it."""
    kinds = kinds_of_devices()
    kind = kind or kinds[-1]
    if kind not in kinds:
        raise SystemExit(f"--device {kind} is not on this machine: choose {' or '.join(kinds)}")
    local_rank, n_local, n_devices = local_numbers(kind)
    backend = dist.get_default_backend_for_device(kind)
    if n_local > n_devices and backend != "nccl":
        raise SystemExit(f"--device {kind}: torchrun started {n_local} ranks here, for "
                         f"{count(n_devices, 'device')}, and {backend} cannot share a device: "
                         "start fewer ranks, or choose --device cpu")
    return take_device(kind, local_rank, n_local)


def local_numbers(kind: str) -> tuple[int, int, int]:
    """Of this host: (this rank's number, how many ranks it has, how many devices of this kind). A
    CPU counts as one for each rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_devices = n_local if kind == "cpu" else torch.accelerator.device_count()
    return local_rank, n_local, n_devices


def start_process_group(device: torch.device, timeout_s: float) -> None:
    """Join the other ranks, of which there are none without torchrun. timeout_s bounds every
    collective from now on."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # a signal to this rank when torchrun's agent ends, however it ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ORPHANED)
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, W = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        try:
            store, rank, W = next(dist.rendezvous("env://", timeout=timeout))
        except ValueError as error:
            raise SystemExit(f"RANK is set, but not by torchrun: {error}") from error
        store = meet(store, rank, W, timeout_s)
    dist.init_process_group(dist.get_default_backend_for_device(device), store=store, rank=rank,
                            world_size=W, timeout=timeout)


def meet(store: dist.Store, rank: int, W: int, timeout_s: float) -> dist.Store:
    """store, torchrun's, under a prefix that only the ranks of this start know.

    torchrun may keep its store over restarts (torch 2.13), and in it the addresses of dead ranks,
    for which new ranks would wait. It counts restarts, but per node, so the count is no prefix that
    ranks agree on. So rank 0 draws a prefix, and the others ask for it, each by a number that it
    has drawn itself. An answer to a dead rank is never taken for one's own:

        rank 1      ask/1 = number                  and waits for answer/number
        rank 0      answer/number = prefix          for each number that it finds in ask/1
        rank 1      prefix/met/1                    which no dead rank can write
    """
    drawn = os.urandom(8).hex()  # rank 0's prefix, another rank's number
    if rank > 0:
        store.set(f"ask/{rank}", drawn)
        prefix = store.get(f"answer/{drawn}").decode()  # waits
        store.set(f"{prefix}/met/{rank}", "")
        return dist.PrefixStore(prefix, store)
    deadline_s = time.monotonic() + timeout_s
    peers = range(1, W)
    while not store.check([f"{drawn}/met/{peer}" for peer in peers]):
        for peer in peers:
            if store.check([f"ask/{peer}"]):  # asked by a dead rank, or by the one that waits
                asked = store.get(f"ask/{peer}").decode()
                store.set(f"answer/{asked}", drawn)
        if time.monotonic() > deadline_s:
            raise SystemExit("some ranks did not start within --timeout_s")
        time.sleep(0.01)
    return dist.PrefixStore(drawn, store)


def gather(value) -> list:
    """[rank 0's value, rank 1's, ...], of anything that can be pickled. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value):
    """Rank 0's value. A collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def together(function: Callable, *arguments):
    """function(*arguments) on every rank -> this rank's result. What one rank raises stops all of
    them: a mistake in a line, a bug with its traceback where it has happened.

    A collective, but function itself must not communicate. It may take longer than the timeout of
    collectives: it runs in a thread, while ranks meet.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)  # or an error here would wait for the function's end
    are_done = False
    while not are_done:
        concurrent.futures.wait([future], timeout=0.2)
        are_done = all(gather(future.done()))
    error = future.exception()
    texts = gather(None if error is None else one_line(error))
    is_mistake = isinstance(error, (SystemExit, OSError)) or is_out_of_memory(error)
    if error is not None and not is_mistake:
        raise error  # a bug: here with its traceback; other ranks stop with its text
    for rank, text in enumerate(texts):
        if text is not None:
            raise SystemExit(f"rank {rank}: {text}" if rank > 0 else text)
    return future.result()


def on_rank_0(function: Callable, *arguments):
    """function(*arguments) on rank 0 -> its result, on all ranks. As `together`."""
    is_first = dist.get_rank() == 0
    result = together(function, *arguments) if is_first else together(lambda: None)
    return from_rank_0(result)


def check_ranks_agree(facts: dict) -> None:
    """facts: {name: value}. Where ranks have different values, stop all of them, naming the first
    such fact and the values of all ranks. A collective, of hashes as long as they agree."""
    hashes = gather(hashlib.sha256(repr(facts).encode()).digest())
    if len(set(hashes)) == 1:
        return
    views = gather(facts)
    for name in facts:
        values = [view[name] for view in views]
        if any(value != values[0] for value in values):
            raise SystemExit(f"ranks differ in {name}, which is {values} on ranks 0 to "
                             f"{len(values) - 1}")


def of_all_ranks(own: dict, device: torch.device) -> dict:
    """{name: this rank's number} -> {name: the numbers of all ranks, in order}. A collective."""
    table = torch.zeros(dist.get_world_size(), len(own), dtype=torch.float64, device=device)
    table[dist.get_rank()] = torch.tensor([*own.values()], dtype=torch.float64)
    dist.all_reduce(table)
    return dict(zip(own, table.T.tolist()))


def peak_mem_bytes(device: torch.device) -> int:
    """The most this process has held, in bytes: by the accelerator's allocator, or as resident set
    on a CPU, Python and torch included."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform != "linux":
        import resource  # macOS, where it is in bytes

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def count(n: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def say(text: str, file=None) -> None:
    """Print on rank 0. A run does not end because its log is on a full disk."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(text, file=file, flush=True)


def warn(text: str) -> None:
    """`say` on stderr, in a line that begins as an error's does."""
    say(f"{program()}: {text}", sys.stderr)


def program() -> str:
    return os.path.basename(sys.argv[0])


# -------------------------------------------------------------------------------------------------
# flags: the fields of a dataclass


def flag(default, help, least=0, most=1e18, choices=None, needs=None, once=False, empty=False):
    """A field that is a flag, with this default and this text in --help.

    least, most   of a number
    choices       words that it can be
    empty         a text may be empty
    needs         (another flag, some of its values): else this one does nothing, and is refused
    once          a run that resumes does not take it from its checkpoint
    """
    about = dict(help=help, least=least, most=most, choices=choices, empty=empty, needs=needs,
                 once=once)
    return dataclasses.field(default=default, metadata=about)


def read_flags(Config: type, doc: str, argv: list[str]) -> dict:
    """{flag: value} of those that are given. A mistake ends the process, as --help does, whose text
    is doc and a line or two for each flag."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=doc, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = leave_together
    fields = {field.name: field for field in dataclasses.fields(Config)}
    for name, field in fields.items():
        default = "" if field.default is None else f" [{field.default!r}]"
        options = dict(type=field.type, choices=field.metadata["choices"])
        if field.type is bool:
            options = dict(action=argparse.BooleanOptionalAction)
        parser.add_argument(f"--{name}", help=field.metadata["help"] + default, **options)
    given, unknown = parser.parse_known_args(argv)
    for word in unknown:
        flags = [f"--{name}" for name in fields]
        similar = difflib.get_close_matches(word.partition("=")[0], flags, n=2)
        such_as = f", such as {' '.join(similar)}" if similar else ""
        leave_together(f"there is no flag {word}; --help lists all{such_as}")
    for name, value in vars(given).items():
        about = fields[name].metadata
        if value == "" and not about["empty"]:
            leave_together(f"--{name} is empty")
        if not isinstance(value, str) and not about["least"] <= value <= about["most"]:  # nan, too
            leave_together(f"--{name} {value} is not from {about['least']:g} to "
                           f"{about['most']:g}")
    return vars(given)


def complete(Config: type, given: dict, saved: dict):
    """The flags that are given -> a Config. The others are as in saved, which are those of the
    checkpoint from which a run goes on; or as in the table.

    A flag that does nothing without another one is refused if it is given, and dropped if it is
    saved.
    """
    known = {name: value for name, value in saved.items() if hasattr(Config, name)}
    config = Config(**(known | given))
    for field in dataclasses.fields(Config):
        if field.metadata["needs"] is None:
            continue
        other, values = field.metadata["needs"]
        if getattr(config, other) in values:
            continue
        if given.get(field.name, field.default) != field.default:
            raise SystemExit(f"--{field.name} needs --{other} {' or '.join(map(str, values))}")
        setattr(config, field.name, field.default)
    return config


def flags_to_save(config) -> dict:
    """Those that a run which resumes takes from its checkpoint."""
    saved = {}
    for field in dataclasses.fields(config):
        if not field.metadata["once"]:
            saved[field.name] = getattr(config, field.name)
    return saved


# -------------------------------------------------------------------------------------------------
# the folder of a run

RECORD, SUMS = "checkpoint.json", "SHA256SUMS"
HASHED = (".distcp", ".metadata", RECORD)  # SUMS lists the files whose names end so


class Folder:
    """The folder of a run, in which one run writes at a time. All of this is for rank 0; `save` and
    the other functions below are for all ranks.

        step_00000100       a checkpoint: complete, or not there at all
            __0_0.distcp    shards of parameters and of optimizer state, a file or more per rank
            .metadata       where each shard is: a pickle of torch.distributed.checkpoint
            checkpoint.json what the loop knows beside tensors
            SHA256SUMS      of the other files, in the form of `sha256sum`
        .step_00000200      one that is not complete
        best                a link to the best one
        metrics.jsonl       a line per step
        earlier/1 and so on what a run that began anew, or went back, has moved aside
        .lock               held by the run that writes here: its host, pid and step
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path).resolve()
        self.lock = None  # the file's descriptor, once it is taken
        self.has_begun = False  # what lies here is of this run, and no longer of an earlier one
        self.metrics = None  # the open file
        self.unwritten = b""  # of the metrics, as the disk was full

    # ---- one run at a time

    def take(self, resume: str | None, wait_s: float) -> None:
        """Hold .lock, which the kernel drops when this process ends, however that ends. SystemExit
        where another run holds it; or where resume names no checkpoint, before anything is written.

        A run that goes on here waits up to wait_s, as ranks of an earlier start may still be
        ending.
        """
        named, is_restart = named_checkpoint(resume), self.is_restart()
        if named is not None and not is_restart and not is_checkpoint(named):
            raise SystemExit(f"--resume {resume}: {named} {problem_of(named)}")
        is_here = named is not None and named.parent == self.path
        goes_on_here = resume == "auto" or is_restart or is_here
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        self._wait_for_lock(wait_s if goes_on_here else 0.0)
        self.has_begun = self.is_restart()  # again, as the holder may have begun meanwhile
        self.sign(step=0)

    def _wait_for_lock(self, wait_s):
        deadline_s = time.monotonic() + wait_s
        has_waited = False
        while not self._try_lock():
            time.sleep(0.1)  # the holder may have taken it just now, and not signed yet
            holder = self.holder()
            text = (f"in {self.path} a run is alive: host {holder.get('host')}, "
                    f"pid {holder.get('pid')}, step {holder.get('step')}")
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{text}. End it, or choose another folder")
            if not has_waited:
                say(f"{text}. Waiting for its end, up to {wait_s:g} s")
            has_waited = True

    def _try_lock(self):
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # as of some file systems of a network
            warn(f"{self.path}/.lock: {error.strerror}: so other runs may write there, too")
        return True

    def holder(self) -> dict:
        """What the run that holds .lock has written there, or the last one that did; {} if that
        cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(json.loads((self.path / ".lock").read_text()))
        return {}

    def sign(self, step: int) -> None:
        """Write to .lock whose it is, in one write of a fixed length: nobody reads half of it."""
        facts = dict(host=socket.gethostname(), pid=os.getpid(), step=step, launch=launch(),
                     has_begun=self.has_begun)
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self.lock, json.dumps(facts).ljust(500).encode(), 0)
            os.ftruncate(self.lock, 500)

    def is_restart(self) -> bool:
        """Whether earlier ranks of the torchrun that has started this process had begun a run here.
        It starts ranks again when one has died, and when nodes have come or gone."""
        holder, own = self.holder(), launch()
        if own is None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return False  # no torchrun: None would equal that of any other run without one
        return own == holder.get("launch") and holder.get("has_begun", False)

    # ---- where a run goes on

    def find(self, resume: str | None,
             wait_s: float | None) -> tuple[pathlib.Path | None, dict | None]:
        """`take` the folder, or look only if wait_s is None -> the newest sound checkpoint of those
        that may be taken, and its record; None, None if there are none. SystemExit where all are
        damaged. What torchrun has started again goes on from its own newest one, whatever resume
        says."""
        if wait_s is not None:
            self.take(resume, wait_s)
        named = named_checkpoint(resume)
        own = self.newest_first() if resume == "auto" or self.has_begun else []
        candidates = [path for path in own if path != named]
        if named is not None:
            candidates.append(named)
        for checkpoint in candidates:
            problem = problem_of(checkpoint)
            if problem is None:
                return checkpoint, json.loads((checkpoint / RECORD).read_text())
            if checkpoint == candidates[-1]:
                raise SystemExit(f"{checkpoint}, from which this run is to go on, {problem}")
            warn(f"{checkpoint} {problem}; falling back to the checkpoint before")
        return None, None

    def newest_first(self) -> list[pathlib.Path]:
        """The checkpoints: the number of the step has eight digits."""
        return sorted(self.path.glob("step_" + 8 * "[0-9]"), reverse=True)

    def begin(self, step: int, best_step: int = 0) -> bool:
        """From here on the folder is this run's: bring it to where it was after a step; 0 for a run
        that begins anew -> whether there is a best checkpoint.

        Newer checkpoints, and what is of an earlier run, move aside, with a copy of the metrics.
        Lines of steps after the last checkpoint are dropped: these steps are made again.
        """
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes() if path.exists() else b""
        moved = self._not_of_this_run(step)
        if moved or (step == 0 and lines):
            self._move_aside(moved, lines)
        for unfinished in self.path.glob(".step_*"):
            remove(unfinished)
        self._link_best(best_step)
        write_synced(path, lines_until(step, lines))
        self.metrics = open(path, "ab", buffering=0)
        self.has_begun = True
        self.sign(step)
        return (self.path / "best").exists()

    def _not_of_this_run(self, step):
        paths = []
        for checkpoint in self.newest_first():
            if int(checkpoint.name[5:]) > step:
                paths.append(checkpoint)
        best = self.path / "best"
        is_copy = best.is_dir() and not best.is_symlink()  # by a copy that has followed the link
        if is_copy or (step == 0 and best.exists()):
            paths.append(best)
        if step == 0:
            for pattern in ("tensorboard", "wandb", "trace_rank*.json"):
                paths += self.path.glob(pattern)
        return paths

    def _move_aside(self, paths, lines):
        """To a folder of its own, with a copy of the lines of the metrics."""
        number = 1
        while (self.path / "earlier" / str(number)).exists():
            number += 1
        aside = self.path / "earlier" / str(number)
        aside.mkdir(parents=True)
        (aside / "metrics.jsonl").write_bytes(lines)
        for path in paths:
            path.rename(aside / path.name)
        names = ", ".join([*(path.name for path in paths), "metrics.jsonl"])
        say(f"{names}, newer or of an earlier run: moved to {aside}, which you may delete")

    # ---- what a run writes

    def add_metrics(self, entry: dict) -> None:
        """A line of metrics.jsonl, of a step. What a full disk does not take waits for the next
        one, as half a line must be finished before another one begins."""
        self.sign(entry["step"])
        self.unwritten += (json.dumps(entry) + "\n").encode()
        try:
            self._write_metrics()
        except OSError as error:  # no reason to lose the run
            warn(f"step {entry['step']} is not yet in the metrics: {error}")

    def _write_metrics(self):
        while self.unwritten:
            n = self.metrics.write(self.unwritten)  # may be less than all
            self.unwritten = self.unwritten[n:]

    def checkpoint_of(self, step: int) -> pathlib.Path:
        return self.path / f"step_{step:08d}"

    def publish(self, checkpoint: pathlib.Path, record: dict, keep_last: int) -> None:
        """Complete what has been written to hidden(checkpoint); then one rename makes it appear,
        and older ones go, but the keep_last newest and the best. A run that resumes keeps the
        metrics up to there, so these must be on disk before."""
        lock = self.path / ".lock"
        if not lock.exists() or lock.stat().st_ino != os.fstat(self.lock).st_ino:
            raise SystemExit(f"{lock} was removed, so others may write there")
        self._write_metrics()
        os.fsync(self.metrics)
        unfinished = hidden(checkpoint)
        write_synced(unfinished / RECORD, json.dumps(record, indent=1).encode())
        write_synced(unfinished / SUMS, "\n".join([*checksums(unfinished), ""]).encode())
        unfinished.rename(checkpoint)
        fsync(self.path)
        best_step = record.get("best_step", 0)
        self._link_best(best_step)
        for old in self.newest_first()[keep_last:]:
            if old != self.checkpoint_of(best_step):
                remove(old.rename(hidden(old)))  # hidden at once: no half of one is ever seen

    def _link_best(self, best_step):
        """Point `best` to the checkpoint of best_step, if it is there; 0 means none."""
        best, link = self.checkpoint_of(best_step), self.path / "best"
        if best.exists():
            new = hidden(link)
            new.unlink(missing_ok=True)
            new.symlink_to(best.name)
            new.replace(link)  # at once, so that there always is one
        else:
            link.unlink(missing_ok=True)


def hidden(path: pathlib.Path) -> pathlib.Path:
    """Where something is until it is complete."""
    return path.with_name(f".{path.name}")


def remove(path: pathlib.Path) -> None:
    """Remove a folder with all that is in it; of a link, the link alone; or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fsync(path: pathlib.Path) -> None:
    """Of a file or a folder; of a folder, so that a new name in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_synced(path: pathlib.Path, content: bytes) -> None:
    """Write a file: all of it, or it is as before."""
    hidden(path).write_bytes(content)
    fsync(hidden(path))
    hidden(path).replace(path)
    fsync(path.parent)


def lines_until(step: int, content: bytes) -> bytes:
    """The lines of metrics.jsonl up to a step. A crash may have torn the last one."""
    lines = []
    for line in content.splitlines(keepends=True):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step and line.endswith(b"\n"):
                lines.append(line)
    return b"".join(lines)


def checksums(checkpoint: pathlib.Path) -> list[str]:
    """The lines that SHA256SUMS has to have. What others have put there, such as .DS_Store, is left
    out."""
    lines = []
    for path in sorted(checkpoint.iterdir()):
        is_others = path.name.startswith("._")  # macOS's, on a disk of another kind
        if path.name.endswith(HASHED) and not is_others:
            with open(path, "rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}")
    return lines


def is_checkpoint(path: pathlib.Path) -> bool:
    return (path / SUMS).is_file()


def problem_of(checkpoint: pathlib.Path) -> str | None:
    """What is wrong with a checkpoint, None if all its files are as they were written. Ask it
    before anything else is read: .metadata is a pickle."""
    try:
        if not is_checkpoint(checkpoint):
            fact = f"has no {SUMS}" if checkpoint.exists() else "is not there"
            return f"is no checkpoint, as it {fact}"
        expected = (checkpoint / SUMS).read_text("utf-8", "replace").splitlines()
        actual = checksums(checkpoint)
    except OSError as error:
        return f"cannot be read: {error}"
    wrong = {line.partition("  ")[2] for line in {*actual} ^ {*expected}}
    if wrong or not expected:
        return f"does not match its {SUMS}: {', '.join(sorted(wrong))}"
    return None


def named_checkpoint(resume: str | None) -> pathlib.Path | None:
    return None if resume in (None, "auto") else pathlib.Path(resume).resolve()


def launch() -> str | None:
    """Which torchrun has started this process, in short; None without one. Its folder of logs, of
    .../NAME_RANDOM/attempt_0/RANK/error.json, is new in each launch, and the same in each restart.
    (Each host has its own: where rank 0 may come back on another one, give --resume auto.)
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return None
    folder = pathlib.Path(path).parent.parent.parent
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]


def find_checkpoint(folder: Folder, resume: str | None,
                    wait_s: float | None = 0.0) -> tuple[pathlib.Path | None, dict | None]:
    """`Folder.find` on rank 0: take the folder -> the checkpoint from which a run goes on, and its
    record; None, None for a run that begins anew. A collective.

    resume: "auto" for the newest one in the folder, if any; the path of one; or None. wait_s: for
    another run to end; None to look only.
    """
    return on_rank_0(folder.find, resume, wait_s)


def load(tensors: dict[str, torch.Tensor], checkpoint: pathlib.Path) -> None:
    """Read a checkpoint into tensors, such as those of `sharded_state`. A collective."""
    try:
        dcp.load(tensors, checkpoint_id=checkpoint)
    except dcp.CheckpointException as error:
        raise SystemExit(f"{checkpoint}: {last_line(error)}") from error


def save(folder: Folder, tensors: dict[str, torch.Tensor], record: dict,
         keep_last: int = 2) -> bool:
    """Write a checkpoint -> whether it is there. Where that fails, as on a full disk, it is said,
    earlier ones are as they were, and the run may go on. A collective.

    record: what JSON can hold; "step", and perhaps "best_step", which is kept, too.
    """
    checkpoint = folder.checkpoint_of(record["step"])
    try:
        dcp.save(tensors, checkpoint_id=hidden(checkpoint))
        on_rank_0(folder.publish, checkpoint, record, keep_last)
        return True
    except (dcp.CheckpointException, SystemExit) as error:
        problem = last_line(error)
    is_saved = from_rank_0(checkpoint.exists())
    what = "is there, but older ones are not tidied up"
    if not is_saved:
        on_rank_0(remove, hidden(checkpoint))
        what = "failed, earlier ones are as they were"
    warn(f"step {record['step']}: the checkpoint {what}: {problem} (is the disk full, or gone?)")
    return is_saved


def last_line(error: BaseException) -> str:
    """dcp's errors have the tracebacks of all ranks, and say at last what has happened."""
    return str(error).strip().splitlines()[-1]


# -------------------------------------------------------------------------------------------------
# how a run ends


def note_signals(signals: list[int]) -> None:
    """Let SIGINT and SIGTERM be noted in a list, so that all ranks can finish the step. A second
    one ends the process at once; under torchrun, which may pass on what a terminal has sent to all,
    a third. torchrun's own end counts as one SIGTERM.

    A thread notes them. A handler in Python would have to wait until the main thread comes back,
    such as from a collective that waits for a frozen rank, and count two signals as one.
    """
    most = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)  # for each signal that has a handler a byte, its number
    for number in (*STOP_SIGNALS, ORPHANED):
        signal.signal(number, lambda *_: None)

    def note():
        while True:
            [number] = os.read(reading, 1)
            if number != ORPHANED:
                signals.append(number)
            elif not signals:
                signals.append(signal.SIGTERM)
            if len(signals) > most:
                os._exit(128 + number)

    threading.Thread(target=note, daemon=True).start()


def agree_on_signal(signals: list[int]) -> int:
    """The largest number that any rank has noted, 0 for none. From here on a signal ends a process
    as ever. A collective."""
    for number in (*STOP_SIGNALS, ORPHANED):
        signal.signal(number, signal.SIG_DFL)
    return max(gather(max(signals, default=0)))


def end_with(function: Callable[[], int], progress: dict) -> None:
    """function() -> the status with which this process ends. If it raises, that is

        2   and one line        SystemExit before the first step, of progress["step"]: a mistake
        1   and one line        SystemExit later; or another rank has died, or memory is out
        1   and a traceback     anything else: a bug. The line comes after it
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop Ctrl-C ends a run in silence
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # Python's None for one that was closed
            stream.reconfigure(errors="backslashreplace")  # a text may have any character

    try:
        status = function()
    except SystemExit as error:
        leave_together(str(error), 1 if progress["step"] else 2)
    except ModuleNotFoundError as error:
        leave_together(f"there is no {error.name}, which some of these flags need beside "
                       f"{program()}")
    except Exception as error:
        if not is_explained(error):
            traceback.print_exc()
        leave(f"rank {os.environ.get('RANK', 0)} failed in step {progress['step']}: "
              f"{type(error).__name__}: {one_line(error)}", 1)
    gc.collect()  # or threads of a group that FSDP2's modules hold outlive the interpreter
    dist.destroy_process_group()
    # Or Python would end with 120 where a full disk has not taken all of the log.
    sys.stdout = sys.stderr = None
    sys.exit(status)


def leave_together(text: str, status: int = 2) -> None:
    """Leave for a reason that all ranks have. The first one of a host says it. The others wait, or
    torchrun's SIGTERM might come before it has spoken. (If only this one has failed after all, it
    says so after a while.)"""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(5)
    leave(text, status)


def leave(text: str, status: int) -> None:
    """Say in one line why the run stops, and leave at once. That closes this rank's connections, by
    which the others come to know."""
    with contextlib.suppress(OSError):  # a full disk
        print(f"{program()}: {' '.join(text.split())}", file=sys.stderr, flush=True)
    os._exit(status)


def one_line(error: BaseException) -> str:
    """The text of an error, at most 2,000 characters of it: a compiler's may be very long."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())[:2000]
    if is_out_of_memory(error):
        text = (f"out of memory: {text}. What takes less: a smaller --micro_batch_size, "
                "--activation_checkpointing, --mode zero3 on more ranks, fewer ranks on a device, "
                "or a smaller model")
    return text


def is_out_of_memory(error: BaseException | None) -> bool:
    """torch's allocator on a CPU raises a plain RuntimeError."""
    is_cpus = "DefaultCPUAllocator" in str(error)
    return is_cpus or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def is_explained(error: Exception) -> bool:
    """Whether error needs no traceback: memory is out; or a collective has failed, as it does where
    another rank has died or hangs; or there is no deterministic kernel. Only the text tells: gloo,
    for one, raises plain RuntimeErrors."""
    if isinstance(error, (dist.DistError, ConnectionError)) or is_out_of_memory(error):
        return True
    words = ("onnection", "imed out", "gloo", "pair closure", "deterministic implementation",
             "CUBLAS_WORKSPACE_CONFIG")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)

# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""What a program with ranks needs beside a model: ranks that meet and agree, the folder of a run, how
a run ends."""

import concurrent.futures
import contextlib
import ctypes
import datetime
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

from oracle import kinds_of_devices, take_device

# -------------------------------------------------------------------------------------------------
# ranks: how they meet and agree
#
# Ranks that disagree hang: one leaves, the others wait for it in their next collective. So what can
# fail on one rank by itself runs in `together` or `on_rank_0`, after which all ranks go on or all
# stop. SystemExit with a text is a user's mistake, or a run that cannot sensibly go on. `main` says
# it in one line. (extras/ import some of this from train: another copy of this file's functions
# beside those of __main__, which does no harm, as there is no state in the module.)


def choose_device(kind):
    """--device, None for the accelerator, if any -> this rank's torch.device, which other ranks may
    have, too: see `take_device`. Refuses where there is no such device, and where ranks would share
    one by a backend other than NCCL, which is the only one that is known to do it."""
    kinds = kinds_of_devices()
    if kind is None:
        kind = kinds[-1]
    if kind not in kinds:
        raise SystemExit(f"--device {kind} is not on this machine: choose {' or '.join(kinds)}")
    local_rank, n_local, n_devices = local_numbers(kind)
    backend = dist.get_default_backend_for_device(kind)
    if n_local > n_devices and backend != "nccl":
        raise SystemExit(f"--device {kind}: torchrun started {n_local} ranks here, for "
                         f"{count(n_devices, 'device')}, and {backend} cannot share a device: "
                         "start fewer ranks, or choose --device cpu")
    return take_device(kind, local_rank, n_local)


def local_numbers(kind):
    """Of this host: (this rank's number, how many ranks it has, how many devices of this kind). A
    CPU counts as one for each rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_devices = n_local if kind == "cpu" else torch.accelerator.device_count()
    return local_rank, n_local, n_devices


def say_sharing(kind):
    """Print on rank 0 that ranks share devices, where they do."""
    _, n_local, n_devices = local_numbers(kind)
    if n_local > n_devices:
        say(f"{n_local} ranks share {count(n_devices, 'device')}: times say nothing")


def take_deterministic_kernels():
    """--deterministic: from now on torch takes kernels that add in one order, where it has others,
    such as attention's backward, which adds by atomics. An operation that has none raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and changes no bit
    torch.use_deterministic_algorithms(True)


def start_process_group(device, timeout_s):
    """Join the other ranks, of which there are none without torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # a SIGTERM to this rank when torchrun's agent ends, however it ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, W = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, W = next(dist.rendezvous("env://", timeout=timeout))
        store = meet(store, rank, W, timeout)
    dist.init_process_group(dist.get_default_backend_for_device(device), store=store, rank=rank,
                            world_size=W, timeout=timeout)


def meet(store, rank, W, timeout):
    """store, torchrun's, under a prefix that only the ranks of this start know.

    torchrun may keep its store over restarts (torch 2.13), and in it the addresses of dead ranks,
    for which new ranks would wait. It counts restarts, but per node, so the count is no prefix that
    ranks agree on. So rank 0 draws a prefix, and every other rank asks for it under a number that
    it has drawn itself: an answer to a dead rank is never taken for one's own.
    """
    drawn = os.urandom(8).hex()
    if rank > 0:
        store.set(f"ask/{rank}", drawn)
        prefix = store.get(f"answer/{drawn}").decode()  # waits
        store.set(f"{prefix}/met/{rank}", "")
        return dist.PrefixStore(prefix, store)
    deadline_s = time.monotonic() + timeout.total_seconds()
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


def gather(value):
    """[rank 0's value, rank 1's, ...], of anything that can be pickled. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value):
    """Rank 0's value. A collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def together(function, *arguments):
    """function(*arguments) on every rank -> this rank's result. What one rank raises stops all of
    them: a mistake in a line, a bug with its traceback where it has happened. A collective;
    function itself must not communicate."""
    result = error = text = None
    try:
        result = function(*arguments)
    except (Exception, SystemExit) as raised:
        error, text = raised, one_line(raised)
    texts = gather(text)
    is_mistake = isinstance(error, (SystemExit, OSError)) or OUT_OF_MEMORY in (text or "")
    if error is not None and not is_mistake:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise SystemExit(f"rank {rank}: {text}" if rank else text)
    return result


def on_rank_0(function, *arguments):
    """function(*arguments) on rank 0 -> its result, on all ranks. What it raises stops all of them.
    A collective. It may take longer than --timeout_s: it runs in a thread, while ranks meet."""
    is_first = dist.get_rank() == 0
    if is_first:
        pool = concurrent.futures.ThreadPoolExecutor(1)
        future = pool.submit(function, *arguments)
        pool.shutdown(wait=False)  # or an error here would wait for the function's end
    is_done = False
    while not is_done:
        if is_first:
            is_done = future in concurrent.futures.wait([future], timeout=0.2).done
        is_done = from_rank_0(is_done)
    return from_rank_0(together(future.result if is_first else lambda: None))


def check_ranks_agree(facts):
    """facts: {name: value}. Where ranks have different values, stop all of them, naming the first
    such fact and the values of all ranks. A collective, of hashes as long as they agree."""
    hashes = gather(hashlib.sha256(repr(facts).encode()).digest())
    if len(set(hashes)) == 1:
        return
    views = gather(facts)
    for name in facts:
        values = [view[name] for view in views]
        if len(set(values)) > 1:
            raise SystemExit(f"ranks differ in {name}, which is {values} on ranks 0 to "
                             f"{len(values) - 1}")


def count(n, noun):
    """1 rank, 2 ranks."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def say(text, file=None):
    """Print on rank 0. A run does not end because its log is on a full disk."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(text, file=file, flush=True)


# -------------------------------------------------------------------------------------------------
# the folder of a run: what writes there is for one process, such as rank 0

RECORD, SUMS = "checkpoint.json", "SHA256SUMS"
HASHED = (".distcp", ".metadata", RECORD)  # SUMS lists the files whose names end so


def checkpoint_of(out_dir: pathlib.Path, step: int) -> pathlib.Path:
    return out_dir / f"step_{step:08d}"


def hidden(folder: pathlib.Path) -> pathlib.Path:
    """Where a checkpoint is until it is complete."""
    return folder.with_name(f".{folder.name}")


def newest_first(out_dir: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints in out_dir: the number of the step has eight digits."""
    return sorted(out_dir.glob("step_" + 8 * "[0-9]"), reverse=True)


def checksums(folder):
    """The lines that SHA256SUMS has to have. What others have put there, such as .DS_Store, is left
    out."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(HASHED):
            with open(path, "rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}")
    return lines


def fsync(path):
    """Of a file or a folder; of a folder, so that a new name in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def publish(folder: pathlib.Path, record: dict) -> None:
    """Complete what dcp.save has written to hidden(folder), and put on disk: add the record, as
    JSON, and checksums. Then the rename makes it appear as folder. Raises OSError."""
    unfinished = hidden(folder)
    (unfinished / RECORD).write_text(json.dumps(record, indent=1))
    (unfinished / SUMS).write_text("\n".join(checksums(unfinished)) + "\n")
    for path in (unfinished / RECORD, unfinished / SUMS, unfinished):
        fsync(path)
    unfinished.rename(folder)
    fsync(folder.parent)


def is_checkpoint(folder: pathlib.Path) -> bool:
    return (folder / SUMS).is_file()


def problem_of(folder: pathlib.Path) -> str | None:
    """What is wrong with a checkpoint, None if all its files are as they were written. Ask it
    before anything else is read: .metadata is a pickle."""
    try:
        if not is_checkpoint(folder):
            fact = f"has no {SUMS}" if folder.exists() else "is not there"
            return f"is no checkpoint, as it {fact}"
        expected = (folder / SUMS).read_text("utf-8", "replace").splitlines()
        actual = checksums(folder)
    except OSError as error:
        return f"cannot be read: {error}"
    wrong = {line.partition("  ")[2] for line in {*actual} ^ {*expected}}
    if wrong or not expected:
        return f"does not match its {SUMS}: {', '.join(sorted(wrong))}"
    return None


def read_record(folder: pathlib.Path) -> dict:
    return json.loads((folder / RECORD).read_text())


def tidy(out_dir: pathlib.Path, best_step: int, keep_last: int) -> None:
    """Point `best` to the checkpoint of best_step, if it is there; 0 means none. Remove those that
    are neither it nor among the keep_last newest ones."""
    best, link = checkpoint_of(out_dir, best_step), out_dir / "best"
    if link.is_dir() and not link.is_symlink():  # as in a copy that has followed the link
        link.rename(out_dir / time.strftime("earlier_best_%Y%m%d_%H%M%S"))
    if best.exists():
        new = hidden(link)
        new.unlink(missing_ok=True)
        new.symlink_to(best.name)
        new.replace(link)  # at once, so that there always is one
    else:
        link.unlink(missing_ok=True)
    for old in newest_first(out_dir)[keep_last:]:
        if old != best:
            # Hidden at once, whatever happens.
            shutil.rmtree(old.rename(hidden(old)), ignore_errors=True)


def rewind(out_dir: pathlib.Path, step: int, best_step: int) -> str | None:
    """Bring out_dir to where it was after a step; 0 for a run that begins anew. What is newer, or
    of an earlier run, moves to a folder of its own -> a line that says so, None if nothing moves.
    """
    moved = [path for path in newest_first(out_dir) if int(path.name[5:]) > step]
    metrics = out_dir / "metrics.jsonl"
    if step == 0:
        for pattern in ("best", metrics.name, "tensorboard", "trace_rank*.json"):
            moved += out_dir.glob(pattern)
    aside = out_dir / time.strftime(f"earlier_%Y%m%d_%H%M%S_{os.getpid()}")
    if moved:
        aside.mkdir()
    for path in moved:
        path.rename(aside / path.name)
    for unfinished in out_dir.glob(".step_*"):
        shutil.rmtree(unfinished)
    tidy(out_dir, best_step, keep_last=10**8)  # the link alone: this removes nothing
    if metrics.exists():
        kept = hidden(metrics)
        kept.write_bytes(b"".join(lines_until(step, metrics)))
        fsync(kept)
        kept.replace(metrics)
        fsync(out_dir)
    if not moved:
        return None
    names = ", ".join(path.name for path in moved)
    n_aside = len([*out_dir.glob("earlier_*")])
    return (f"{names}, newer or of an earlier run: moved to {aside}, which you may delete "
            f"({n_aside} such folder{'s' if n_aside > 1 else ''} here)")


def lines_until(step, metrics):
    """The lines of metrics.jsonl up to a step. A crash may have torn the last one."""
    lines = []
    for line in metrics.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step and line.endswith(b"\n"):
                lines.append(line)
    return lines


class Metrics:
    """metrics.jsonl: a line per step. What a full disk does not take waits in memory for the next
    step, as half a line must be finished before another one begins."""

    def __init__(self, out_dir):
        self.file = open(out_dir / "metrics.jsonl", "ab", buffering=0)
        self.unwritten = b""

    def add(self, entry):
        """Write a line. Raises OSError if it has to wait; then the caller should go on."""
        self.unwritten += (json.dumps(entry) + "\n").encode()
        self.write()

    def write(self):
        while self.unwritten:
            n = self.file.write(self.unwritten)  # may be less than all
            self.unwritten = self.unwritten[n:]

    def sync(self):
        """Put all lines on disk, or raise OSError."""
        self.write()
        os.fsync(self.file)


class Lock:
    """The right to write in out_dir, which one process has at a time. The kernel holds it, and lets
    it go when the process ends, however that ends. The file .lock says whose it is.

    facts: what the holder writes there: its host, pid and step; which torchrun has started it; and
    has_begun: whether what lies in out_dir is of its run, and no longer of an earlier one. torchrun
    may start a run again: then a holder takes over has_begun from the one before.
    """

    def __init__(self, out_dir: pathlib.Path):
        self.path, self.file = out_dir / ".lock", None
        self.facts = dict(host=socket.gethostname(), pid=os.getpid(), parent=parent(),
                          run_id=os.environ.get("TORCHELASTIC_RUN_ID"))

    def take(self, wait_s: float, say=print) -> str | None:
        """Take it, or wait for it that long -> a line where the file system has no such locks, else
        None. Raises SystemExit, with what the holder has written, if it does not end by then."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        deadline_s = time.monotonic() + wait_s
        is_held, has_waited, problem = False, False, None
        while not is_held and problem is None:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                time.sleep(0.1)  # the holder may have taken it just now, and not signed yet
                text = f"in {self.path.parent} a run is alive: {self.whose()}"
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"{text}. End it, or choose another folder") from None
                if not has_waited:
                    say(f"{text}. Waiting for its end, up to {wait_s:g} s")
                has_waited = True
            except OSError as error:
                problem = f"{self.path}: {error.strerror}: so other runs may write there, too"
        self.facts |= dict(step=0, has_begun=self.is_restart())
        self.write()
        os.fsync(self.file)
        return problem

    def holder(self) -> dict:
        """What the holder has written, or the last one; {} if that cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self.path.read_text())
        return {}

    def whose(self):
        facts = self.holder()
        return f"host {facts.get('host')}, pid {facts.get('pid')}, step {facts.get('step')}"

    def is_restart(self) -> bool:
        """Whether the torchrun that has started this process had begun the last holder's run. It is
        the parent, or has a name of its own, as with --standalone, where ranks are behind a shell
        or on another host than before."""
        before = self.holder()
        n_restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")  # of this host: None, 0, 1, ...
        if not before:  # nobody has signed here: only the count tells
            return n_restarts not in (None, "0")
        is_parent = all(before.get(name) == self.facts[name] for name in ("host", "parent"))
        has_name = self.facts["run_id"] not in (None, "none")
        is_run = has_name and before.get("run_id") == self.facts["run_id"] and n_restarts != "0"
        return n_restarts is not None and (is_parent or is_run) and before.get("has_begun", False)

    def check(self) -> None:
        """Raises SystemExit where .lock is not the holder's any more: somebody has removed it."""
        if not self.path.exists() or self.path.stat().st_ino != os.fstat(self.file).st_ino:
            raise SystemExit(f"{self.path} was removed, so others may write there")

    def sign(self, **facts) -> None:
        """The holder, others do nothing: write what has changed, such as the step."""
        self.facts |= facts
        with contextlib.suppress(OSError):  # a full disk
            self.write()

    def write(self):
        if self.file is not None:
            os.pwrite(self.file, json.dumps(self.facts).ljust(400).encode(), 0)


def parent():
    """The process that has started this one, by its number and, on Linux, the time of its start:
    in containers numbers come again."""
    number = os.getppid()
    with contextlib.suppress(OSError):
        facts = pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return f"{number} since {facts[19]}"
    return str(number)


# -------------------------------------------------------------------------------------------------
# how a run ends

OUT_OF_MEMORY = "out of memory"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def note_signals(signals):
    """Let SIGINT and SIGTERM be noted in a list, so that all ranks finish the step. A second one
    ends the process at once; under torchrun, which passes on what a terminal has sent to all, a
    third."""
    most = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1

    def note(number, frame):
        signals.append(number)
        if len(signals) > most:
            os._exit(128 + number)

    for number in STOP_SIGNALS:
        signal.signal(number, note)


def refuse(text, status=2):
    """Leave for a reason that all ranks have. The first one of a host says it. The others wait for
    the SIGTERM that they get from torchrun then: if they left first, the first one might get it
    before it speaks. (If only this one has failed after all, it says so after a while.)"""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(5)
    leave(text, status)


def leave(text, status):
    """Say in one line why the run stops, and leave at once. That closes this rank's connections, by
    which the others come to know."""
    with contextlib.suppress(OSError):  # a full disk
        print(f"train.py: {' '.join(text.split())}", file=sys.stderr, flush=True)
    os._exit(status)


def one_line(error):
    """Its text, of which a compiler's may be very long."""
    text = " ".join(str(error).split())[:2000]
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    is_cpus = isinstance(error, MemoryError) or "DefaultCPUAllocator" in text
    if is_cpus or isinstance(error, torch.OutOfMemoryError):
        text = (f"{OUT_OF_MEMORY}: {text}. What takes less: a smaller --micro_batch_size, "
                "--activation_checkpointing, --mode zero3 on more ranks, fewer ranks on a device, "
                "or a smaller model")
    return text


def is_explained(error):
    """Whether error needs no traceback: memory is out; or a collective has failed, as it does where
    another rank has died or hangs; or --deterministic asks for more than there is. Only the text
    tells: gloo, for one, raises plain RuntimeErrors."""
    if isinstance(error, (dist.DistError, torch.OutOfMemoryError, ConnectionError)):
        return True
    words = ("onnection", "imed out", "gloo", "pair closure", OUT_OF_MEMORY,
             "deterministic implementation", "CUBLAS_WORKSPACE_CONFIG")
    is_plain = isinstance(error, (RuntimeError, MemoryError))
    return is_plain and any(word in one_line(error) for word in words)

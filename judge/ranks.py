"""Ranks, and rows of checks that they run: for verify.py, and for the tests.

A check is a function that all ranks of a group run at once, as training does. It asserts. A row is
a check, the world size W, and the check's arguments. `Ranks` holds W processes that run checks
together. Starting a group costs more than most checks, so it stays for the next ones. `run_parts`
runs rows, two at once, and prints a table. A row that hangs, or whose rank dies, fails by name in
time, and the rest runs.

Ranks are forked by a server, multiprocessing's, which verify.py and tests/plugin.py start.
"""

import dataclasses
import datetime
import gc
import itertools
import multiprocessing
import os
import pathlib
import queue
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import oracle

LIBRARIES = ("<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))  # code of others


def check(*rows, limit_s=60):
    """Mark a function as a check, and note its rows: dicts of W, the world size, and of the
    function's arguments."""
    def mark(function):
        function.rows, function.limit_s = rows, limit_s
        return function

    return mark


def grid(**axes):
    """All combinations, a dict each: grid(W=(1, 2), clip=(0.1,)) has two."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def only_full(rows):
    """These rows run with --full only."""
    return [dict(row, only_full=True) for row in rows]


def device():
    """Where these ranks' modules are: the first kind that their group serves. Torch says of gloo's
    that it is "cpu:gloo,cuda:gloo", and of NCCL's "cuda:nccl"."""
    kind, *_ = dist.get_backend_config().split(":")
    return torch.device(kind)


def end_with_parent():
    """End this rank when its parent is killed: else it would wait for a call for ever."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def join_group(rank, W, folder, kind):
    """A rank's first act. Of more than four ranks only rank 0 is there, in torch's fake group,
    whose collectives do nothing. kind: of device, "cpu" or an accelerator, which ranks share.

    The group's timeout is shorter than most limits: where one rank fails the others say what they
    were waiting for, in place of "no answer".
    """
    gc.freeze()  # a collection would touch, and so copy, all that the server has loaded
    os.setpgid(0, 0)  # to be killed together with the programs that it starts
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.pop("PYTHONSAFEPATH", None)  # it was for the server
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nobody takes a GPU by himself
    else:
        # Attention's backward, for one, adds by atomics else: other bits in each run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    oracle.take_device(kind, rank, W)
    backend, store = dist.get_default_backend_for_device(kind), dist.FileStore(f"{folder}/store", W)
    if W > 4:
        backend, store = "fake", FakeStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=W,
                            timeout=datetime.timedelta(seconds=20))


def attempt(function, arguments):
    """function(**arguments) on a rank; what it raises in one line, with its place in a file of
    ours, or of the user's.

    Neither random state nor wrappers, whose hooks are in reference cycles, are left of the check
    before.
    """
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # `live_bytes` need not look at what there is already
    try:
        return function(**arguments)
    except BaseException as error:  # also what pytest or sys.exit() raises
        frames = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)][-1]
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        text = re.sub(r"\[/\S+\] ", "", " ".join(str(error).split())) or place.line  # gloo's files
        text = text[:2000]
        file = pathlib.Path(place.filename).name
        raise AssertionError(f"{kind}{text} ({place.name}, {file}:{place.lineno})") from None
    finally:
        # A rank lives on, so what it has printed would wait in a buffer.
        with suppress(ValueError):  # a stream that is closed
            sys.stdout.flush()
            sys.stderr.flush()


def ranks_in_words(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Failure(AssertionError):
    """What has gone wrong on a group of ranks. how: a rank "raised" or "died", or they "hung"."""

    def __init__(self, how, text):
        super().__init__(text)
        self.how = how


class Ranks:
    """W processes in one group, reused for any number of checks; see `join_group` for W > 4.

    Each is the only worker of a pool, so that a call can be sent to all of them and awaited with a
    time limit. A worker that dies breaks its pool, which is how that is noticed.
    """

    def __init__(self, W, kind="cpu"):
        self.folder = tempfile.mkdtemp()
        n_processes = W if W <= 4 else 1
        context = multiprocessing.get_context("forkserver")
        self.pools = []
        for rank in range(n_processes):
            arguments = rank, W, self.folder, kind
            self.pools.append(ProcessPoolExecutor(1, context, join_group, arguments))
        futures = [pool.submit(os.getpid) for pool in self.pools]
        try:
            self.pids = [future.result() for future in futures]
        except BrokenProcessPool:  # as where an accelerator has no memory for one more process
            raise Failure("died", "a rank could not join: its error is above") from None

    def run(self, function, arguments, limit_s):
        """function(**arguments) on every rank -> [what rank 0 returns, what rank 1 returns, ...].
        Raises Failure, which says what has failed, and on which ranks. Then the ranks are of no
        more use, as some may be inside a collective.

        The others get a second to say what they saw: the rank that is first to raise is often the
        one that noticed, not the one to blame.
        """
        try:
            futures = [pool.submit(attempt, function, arguments) for pool in self.pools]
        except BrokenProcessPool:
            raise Failure("died", "a rank has died since the check before") from None
        wait(futures, limit_s, FIRST_EXCEPTION)
        done, working = wait(futures, timeout=1)
        ranks_of = defaultdict(list)  # {what has failed: ranks}
        how = "raised"
        for rank, future in enumerate(futures):
            if future in done and future.exception() is not None:
                text = str(future.exception())
                if isinstance(future.exception(), BrokenProcessPool):
                    text = "its process has died"
                    how = "died"
                ranks_of[text].append(rank)
        if working and not ranks_of:
            how = "hung"
            still = [rank for rank, future in enumerate(futures) if future in working]
            ranks_of[f"killed after {limit_s} s, its limit"] = still
        if ranks_of:
            # What others say of a rank that has gone is told only if nobody says more.
            causes = {text: ranks for text, ranks in ranks_of.items() if "by peer" not in text}
            facts = []
            for text, ranks in (causes or ranks_of).items():
                facts.append(f"{ranks_in_words(ranks)}: {text}")
            raise Failure(how, "\n    ".join(facts))
        return [future.result() for future in futures]

    def kill(self):
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pool in self.pools:
            pool.shutdown()  # else its thread may run into the end of this process, and write of it
        shutil.rmtree(self.folder, ignore_errors=True)


class Groups:
    """Groups of ranks, started when they are needed, which stay for the next checks. On an
    accelerator only one stays, since each process takes hundreds of MB there, whatever it does.

    kind: of their devices."""

    def __init__(self, kind="cpu"):
        self.of_size, self.kind = {}, kind

    def run(self, function, arguments, W, limit_s):
        """As Ranks.run, on W ranks. A group that has failed goes."""
        if W not in self.of_size:
            if self.kind != "cpu":
                self.kill()
            self.of_size[W] = Ranks(W, self.kind)
        try:
            return self.of_size[W].run(function, arguments, limit_s)
        except Failure:
            self.of_size.pop(W).kill()
            raise

    def kill(self):
        for ranks in self.of_size.values():
            ranks.kill()
        self.of_size.clear()


def passed_or_failed(answers, failure):
    """The outcome of a check that asserts, and what there is to say: what rank 0 has returned, if
    it is not None, or the failure."""
    return ("passed", answers[0] or "") if failure is None else ("failed", str(failure))


@dataclasses.dataclass
class Row:
    """A check with arguments, on W ranks. Its name, by which it is chosen, is such as
    "bits_of_one_process W=2 zero3, all modules".

    outcome_of: a function of the ranks' answers, or None, and of the failure, or None, which
    returns the outcome, a word or two, and a text.
    """
    check: object
    W: int
    arguments: dict
    counts: bool = True  # otherwise a failure is only shown
    outcome_of: object = passed_or_failed

    @property
    def words(self):
        """Of the name: values that speak for themselves, others with the argument's name. A file is
        the same in all rows of a table."""
        words = []
        for name, value in self.arguments.items():
            if name == "file":
                continue
            if isinstance(value, tuple):
                words.append(" ".join(value))
            elif isinstance(value, str):
                words.append(value)
            else:
                words.append(getattr(value, "__name__", f"{name} {value}"))
        return words

    @property
    def name(self):
        return f"{self.check.__name__} W={self.W} {', '.join(self.words)}".rstrip()

    def run(self, groups):
        """-> (outcome, a line that says so)"""
        start_s = time.monotonic()
        name = ", ".join(self.words)
        if self.W > 4 and groups.kind != "cpu":
            outcome = "skipped"
            text = (f"{name}, skipped: torch's fake group adds nothing up, and on accelerators "
                    f"stages compare a sum")
        else:
            outcome, fact = self.outcome_of(*self.answers(groups))
            if outcome == "passed":
                text = f"{name}: {fact}" if fact else name
            elif outcome == "failed" and self.counts:
                text = f"FAILED {name}\n    {fact}"
            elif outcome == "failed":
                outcome = "not counted"
                text = f"{name}, not counted: {fact}"
            else:
                text = ": ".join(part for part in (name, outcome, fact) if part)
        seconds = time.monotonic() - start_s
        return outcome, f"{self.check.__name__:22s} {self.W:>4} {seconds:7.1f}  {text}"

    def answers(self, groups):
        """-> (what each rank has returned, None), or (None, the failure)"""
        try:
            return groups.run(self.check, self.arguments, self.W, self.check.limit_s), None
        except Failure as failure:
            return None, failure


def rows_of(check, is_full):
    """Of a check, each once: all of them have the samples, too."""
    rows = {}
    for arguments in check.rows:
        arguments = dict(arguments)
        if not arguments.pop("only_full", False) or is_full:
            row = Row(check, arguments.pop("W"), arguments)
            rows.setdefault(row.name, row)
    return list(rows.values())


def chosen(parts, names):
    """Of {claim: rows}: the rows whose name has one of these names in it, or all."""
    some = {}
    for claim, rows in parts.items():
        for row in rows:
            if not names or any(name in row.name for name in names):
                some.setdefault(claim, []).append(row)
    return some


def print_names(parts):
    """Of {claim: rows}: the claims, what each check does, and the names of its rows."""
    for claim, rows in parts.items():
        print(claim)
        before = None
        for row in rows:
            if row.check is not before:
                print(f"\n  {row.check.__name__}: {' '.join(row.check.__doc__.split())}\n")
            print(f"    {row.name}")
            before = row.check
        print()


PROVED = ("passed", "failed")  # outcomes
JUDGED = ("same bits", "close", "wrong", "refused", "hung", "died")
BAD = ("failed", "wrong", "hung", "died")


def run_parts(parts, kind, always=PROVED):
    """Run {claim: rows} on devices of a kind, print each claim and a line for each of its rows;
    return how many are bad. These are printed once more at the end, where they are seen, and what
    was refused: of each kind the first one, and how many are like it. Then how many rows had each
    outcome. always: those that are named, also if no row had them."""
    print(f"{'check':22s} {'W':>4s} {'seconds':>7s}")
    outcomes = []
    kinds = {}  # {what is said of them: lines}
    n_lanes = 2  # as many rows run at once
    free = queue.SimpleQueue()
    for _ in range(n_lanes):
        free.put(Groups(kind))

    def run_row(row):
        groups = free.get()
        try:
            return row.run(groups)
        finally:
            free.put(groups)

    for claim, rows in parts.items():
        print(f"\n{claim}\n")
        with ThreadPoolExecutor(n_lanes) as pool:
            for outcome, line in pool.map(run_row, rows):  # in the order of rows
                print(line, flush=True)
                outcomes.append(outcome)
                if outcome in (*BAD, "refused"):
                    kinds.setdefault(kind_of(outcome, line), []).append(line)
    while not free.empty():
        free.get().kill()
    print()
    for line, *others in kinds.values():
        print(line)
        if others:
            print(f"    and {len(others)} more like it")
    counts = Counter(dict.fromkeys(always, 0))
    counts.update(outcomes)
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    return sum(counts[outcome] for outcome in BAD)


def kind_of(outcome, line):
    """Rows of the judge are of a kind if their last words, a hint, are the same. A failure of the
    proof is like no other."""
    return line if outcome == "failed" else (outcome, line.rpartition(": ")[2])

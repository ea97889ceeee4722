"""train.py and runs.py: faults of disks and machines, how a run ends, and its folder.

After each fault a run goes on to the bits of an undisturbed one: metrics.jsonl has every step once,
and no file is too many.
"""

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.launcher.api import elastic_launch, LaunchConfig

import data
import model
import runs
from tests.runs import (ask, before_updates, contents, execute, fail, finish, flags, FORK,
                        in_update, launched_by, lines_of, nothing, raise_signals, refused,
                        run_train, saved, Started, Store, this_rank, undisturbed, view_of,
                        write_line)

STEPS = 4
GOES_ON = dict(save_interval=1, resume="auto")


def as_undisturbed(out, actual, expected, steps=STEPS):
    """Assert that a run has the bits, the metrics and the files of one that nothing disturbs."""
    entries = lines_of(out / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [*range(1, steps + 1)], entries
    assert actual["param_sha256"] == expected["param_sha256"], "other bits"
    left = sorted(path.name for path in out.iterdir() if not path.name.startswith("step_"))
    known = {".lock", "metrics.jsonl", "best", "earlier"}
    assert {".lock", "metrics.jsonl"} <= {*left} <= known, f"left over: {left}"


def act_without_arguments(act):
    act()


def die(*_, **__):
    """As by kill -9."""
    signal.raise_signal(signal.SIGKILL)


# -------------------------------------------------------------------------------------------------
# disks


def cut_power(path, n):
    """Plant a power cut before the n-th update: what was not synced of metrics.jsonl is gone."""
    real = os.fsync
    synced = [0]  # bytes

    def fsync(file):
        descriptor = file if isinstance(file, int) else file.fileno()
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            synced[0] = path.stat().st_size
        real(file)

    def cut():
        os.truncate(path, synced[0])
        die()

    os.fsync = fsync
    in_update(n, None, act_without_arguments, cut)


def fill_disk(path, n):
    """Plant a disk that takes 20 more bytes of metrics.jsonl from the n-th update until the next
    one, and so half a line; checkpoints are larger, and fail."""
    def limit(_, number):
        most = path.stat().st_size + 20 if number == n else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    before_updates(limit)


def full_log():
    """Plant stdout and stderr on a full disk."""
    for descriptor in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


def test_a_power_cut_costs_no_line(tmp_path):
    """It takes what was not synced."""
    run = run_train(tmp_path, plant=partial(cut_power, tmp_path / "metrics.jsonl", 3), **GOES_ON)
    assert run.codes == [-signal.SIGKILL] and "a new run begins" in run.stdout[0], run
    as_undisturbed(tmp_path, finish(tmp_path, **GOES_ON), undisturbed())
    assert not (tmp_path / "earlier").exists(), "something was moved"


def test_a_full_disk_costs_no_line(tmp_path):
    """It takes half a line, and no checkpoint. The run goes on, and so do the metrics. If it is
    full in the last step, the line says so, and the status; the checkpoint before is as it was."""
    out = tmp_path / "out"
    metrics = out / "metrics.jsonl"
    fact = "step 2 is not yet in the metrics(.|\n)*step 2: the checkpoint failed"
    actual = finish(out, fact=fact, plant=partial(fill_disk, metrics, 2), **GOES_ON)
    as_undisturbed(out, actual, undisturbed())
    fact = f"step {STEPS}: the checkpoint failed, earlier ones are as they were"
    finish(out, status=1, fact=fact, plant=partial(fill_disk, metrics, STEPS), save_interval=1)
    assert saved(out) == [STEPS - 2, STEPS - 1], saved(out)
    as_undisturbed(out, finish(out, **GOES_ON), undisturbed())


def fill_disk_and_signal(path):
    """Plant a signal in the second update, after which the third step cannot be saved."""
    fill_disk(path, 3)
    in_update(2, 0, raise_signals, signal.SIGTERM)


def test_a_signal_does_not_hide_a_full_disk(tmp_path):
    """The status says that the last step is not saved, and no line says that it can be resumed."""
    finish(tmp_path, status=1, save_interval=1, fact=r"stopped by a signal after step 3\n\Z",
           plant=partial(fill_disk_and_signal, tmp_path / "metrics.jsonl"))


def test_a_full_log_is_no_reason_to_end(tmp_path):
    finish(tmp_path, plant=full_log, **GOES_ON)
    as_undisturbed(tmp_path, ask(tmp_path / f"step_{STEPS:08d}"), undisturbed())


def test_a_folder_that_goes_is_noticed(tmp_path):
    """A run whose out_dir is removed, and with it the lock, says so, writes no checkpoint that
    seems to be whole, and ends with status 1."""
    out = tmp_path / "out"
    finish(out, status=1, save_interval=1, plant=partial(in_update, 3, 0, shutil.rmtree, out),
           fact=r"checkpoint failed, .*\.lock was removed")
    assert not saved(out)


# Whatever changes names on a disk. What is written between two of these has no name yet.
CALLS = ("mkdir", "rename", "replace", "symlink", "unlink", "rmdir")


def die_in_save(n, log):
    """Plant a kill -9 before the n-th of these calls from the beginning of the second checkpoint
    on, and a log of their names, written before the third update."""
    names = []
    is_on = [False]
    n_saves = itertools.count(1)
    save = dcp.save

    def watched(name, real):
        def call(*arguments, **options):
            if is_on[0]:
                names.append(name)
                if len(names) == n:
                    die()
            return real(*arguments, **options)

        return call

    def watched_save(*arguments, **options):
        is_on[0] = next(n_saves) == 2
        return save(*arguments, **options)

    def end():
        is_on[0] = False
        log.write_text(json.dumps(names))

    if this_rank() == 0:
        for name in CALLS:
            setattr(os, name, watched(name, getattr(os, name)))
        dcp.save = watched_save
        in_update(3, 0, act_without_arguments, end)


@pytest.mark.parametrize("W, mode, every", [(1, "single", 1), (2, "zero2", 5)])
def test_a_kill_anywhere_in_a_save(W, mode, every, tmp_path):
    """After kill -9 of rank 0 before any call by which a checkpoint is written, gets its name and
    pushes out an older one; with two ranks before some of them."""
    options = dict(GOES_ON, mode=mode, keep_last=1, max_steps=3)
    log = tmp_path / "names"
    expected = finish(tmp_path / "alone", W, plant=partial(die_in_save, None, log), **options)
    names = json.loads(log.read_text())
    assert len(names) > 10 and set(CALLS) == {*names}, names
    for place in range(0, len(names), every):
        out = tmp_path / str(place)
        plant = partial(die_in_save, place + 1, tmp_path / "unread")
        killed = run_train(out, W, plant=plant, **options)
        assert killed.codes[0] == -signal.SIGKILL, f"{names[place]}: {killed}"
        as_undisturbed(out, finish(out, W, **options), expected, steps=3)


def note_early_renames(log):
    """Plant a note of every file that this process has written and renames, or whose folder it
    renames, before it is synced: after a power cut a name without content would be left."""
    begin_s = time.time()
    synced = set()  # inodes
    fsync = os.fsync

    def noted_fsync(file):
        descriptor = file if isinstance(file, int) else file.fileno()
        synced.add(os.fstat(descriptor).st_ino)
        fsync(file)

    def noted(rename):
        def renamed(source, target, **options):
            for path in (pathlib.Path(source), *pathlib.Path(source).rglob("*")):
                is_new = path.is_file() and path.stat().st_mtime > begin_s
                if is_new and not path.is_symlink() and path.stat().st_ino not in synced:
                    write_line(log, str(path))
            rename(source, target, **options)

        return renamed

    os.fsync, os.rename, os.replace = noted_fsync, noted(os.rename), noted(os.replace)


def test_files_are_synced_before_they_get_their_names(tmp_path):
    """Checkpoints, and the metrics of a run that goes back to an earlier checkpoint."""
    out = tmp_path / "out"
    log = tmp_path / "early"
    plant = partial(note_early_renames, log)
    finish(out, save_interval=1, plant=plant)
    finish(out, save_interval=1, resume=out / "step_00000003", plant=plant)
    assert not log.exists(), f"renamed before they were synced: {lines_of(log)}"
    assert saved(out)[-2:] == [3, 4]


def test_names_are_synced_too(tmp_path):
    synced = []
    with mock.patch.object(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino)):
        runs.write_synced(tmp_path / "file", b"text")
    assert synced == [path.stat().st_ino for path in (tmp_path / "file", tmp_path)]


# -------------------------------------------------------------------------------------------------
# ends

# The mode, and what happens in the second update of the last rank; the statuses of all ranks, None
# for any; what rank 0 says; whether the rank where it has happened has a traceback.
KILLED = -signal.SIGKILL
LOST = r"\Atrain\.py: rank 0 failed in step [23]: \w+: .*\n\Z"
ENDS = {
    "dies": ("ddp", (signal.raise_signal, signal.SIGKILL), [1, KILLED], LOST, False),
    "hangs": ("zero1", (time.sleep, 60), [1, None], LOST, False),
    "has a bug": ("zero3", (fail, "planted"), [1, 1], LOST, True),
    "is out of memory": ("ddp", (torch.empty, 10**15), [1, 1], LOST, False),
    "alone has a bug": ("single", (fail, "planted"), [1], LOST.removeprefix(r"\A"), True),
    # What gloo says when this rank was frozen for longer than the time limit.
    "was frozen": ("zero2", (fail, "Application timeout caused pair closure"), [1, 1], LOST, False),
    "has a full disk": ("zero2", (resource.setrlimit, resource.RLIMIT_FSIZE, (10_000, 10_000)),
                        [1, 1], "step 2: the checkpoint failed.*File too large", False)}


@pytest.mark.parametrize("name", ENDS)
def test_how_a_run_ends(name, tmp_path):
    """1 and one line with the step where another rank has died, or hangs for --timeout_s; a bug
    keeps its traceback, before the line. The run can go on."""
    mode, planted, codes, fact, is_bug = ENDS[name]
    W = len(codes)
    options = dict(GOES_ON, mode=mode)
    ended = run_train(tmp_path, W, timeout_s=3, plant=partial(in_update, 2, W - 1, *planted),
                      **options)
    for actual, code in zip(ended.codes, codes):
        assert code in (actual, None), ended
    assert re.search(fact, ended.stderr[0]), ended
    text = ended.stderr[-1]
    assert ("out of memory: " in text and "What takes less: " in text) == ("memory" in name), text
    assert ("Traceback" in text and "fail\n    raise RuntimeError" in text) == is_bug, text
    assert W == 1 or "Traceback" not in ended.stderr[0], ended
    if "disk" in name:
        assert not [*tmp_path.glob(".step_*")], "an unfinished checkpoint is left"
    as_undisturbed(tmp_path, finish(tmp_path, W, **options), undisturbed())


def bug_in_model():
    def build(gpt, config):
        raise ValueError("a bug")

    model.GPT.__init__ = build


def test_a_bug_is_not_a_mistake(tmp_path):
    """One in the model's constructor keeps its traceback, and the status is 1; sizes that do not
    fit are a mistake."""
    ended = run_train(tmp_path, 2, plant=bug_in_model)
    assert ended.codes == [1, 1] and "in build\n" in ended.stderr[0], ended
    assert "train.py: rank 0 failed in step 0: ValueError: a bug\n" in ended.stderr[0], ended
    refused("n_embd 16", tmp_path, 2, n_head=3)


def send(numbers, on_rank, is_torchruns=False):
    """Plant signals in the second update of a rank, or of all."""
    if is_torchruns:
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    in_update(2, on_rank, raise_signals, *numbers)


@pytest.mark.parametrize("W, mode, on_rank, number", [
    (1, "single", 0, signal.SIGTERM), (3, "zero2", 1, signal.SIGINT), (2, "ddp", None, 15)])
def test_a_signal_ends_a_run(W, mode, on_rank, number, tmp_path):
    """All ranks finish the next step, save and end with 128 + the number, also if one alone got it;
    the run can go on."""
    options = dict(mode=mode, save_interval=100, eval_interval=0, global_batch_size=W)
    finish(tmp_path, W, status=128 + number, plant=partial(send, [number], on_rank),
           fact=r"\Atrain.py: stopped by a signal after step 3; go on with --resume auto\n\Z",
           **options)
    assert saved(tmp_path) == [3], saved(tmp_path)
    actual = finish(tmp_path, W, resume="auto", **options)
    as_undisturbed(tmp_path, actual, undisturbed(global_batch_size=W, eval_interval=0))


def test_a_run_without_checkpoints_stops_too(tmp_path):
    finish(tmp_path, 2, 130, r"stopped by a signal after step 3\n\Z", mode="zero3",
           plant=partial(send, [signal.SIGINT], 0))


@pytest.mark.parametrize("number, is_torchruns, n, is_at_once", [
    (signal.SIGINT, False, 2, True), (signal.SIGINT, True, 2, False),
    (signal.SIGTERM, True, 3, True), (runs.ORPHANED, True, 5, False)])
def test_one_more_signal_ends_a_run_at_once(number, is_torchruns, n, is_at_once, tmp_path):
    """The second one; under torchrun, which passes on what a terminal sends, the third. The step is
    not finished, and the status is the same. That torchrun has ended Linux says once for each of
    its threads, and it counts as one SIGTERM."""
    status = 128 + (signal.SIGTERM if number == runs.ORPHANED else number)
    finish(tmp_path, status=status, plant=partial(send, n * [number], 0, is_torchruns),
           save_interval=1, fact="^$" if is_at_once else "stopped by a signal after step 3")
    assert saved(tmp_path) == ([1] if is_at_once else [2, 3]), saved(tmp_path)


def stop(path):
    """Stop this process, and leave its number."""
    path.write_text(str(os.getpid()))
    signal.raise_signal(signal.SIGSTOP)


def test_a_second_signal_ends_a_run_that_waits(tmp_path):
    """Also in a collective, in which no handler of Python's runs."""
    plant = partial(in_update, 2, 1, stop, tmp_path / "stopped")
    with Started(tmp_path / "out", 2, mode="zero2", plant=plant) as run:
        run.wait_for(tmp_path / "stopped")
        time.sleep(0.5)  # now rank 0 waits
        start_s = time.monotonic()
        for _ in range(2):
            os.kill(run.processes[0].pid, signal.SIGINT)
            time.sleep(0.3)  # or the kernel makes one of them
        while run.processes[0].is_alive():
            assert time.monotonic() - start_s < 10, "it still waits"
            time.sleep(0.01)
        run.processes[1].kill()
        ended = run.end()
    assert ended.codes == [130, -signal.SIGKILL], ended


# -------------------------------------------------------------------------------------------------
# one run at a time


class Frozen(Started):
    """A run in out_dir that stops in its third update, until it is told to go on."""

    def __init__(self, folder, out, W=1, **options):
        plant = partial(in_update, 3, 0, stop, folder / "stopped")
        super().__init__(out, W, plant=plant, save_interval=1, keep_last=9, **options)
        pid = int(self.wait_for(folder / "stopped"))
        self.fact = f"in {out} a run is alive: host {socket.gethostname()}, pid {pid}, step 2. "

    def go_on(self):
        """-> how the run ends."""
        self.processes[0].join(0.1)  # it has left its number, and may not have stopped yet
        os.kill(self.processes[0].pid, signal.SIGCONT)
        return self.end()


def test_a_second_run_is_refused(tmp_path):
    """While a run is alive, also if it is frozen, another one that begins anew is refused at once,
    in one line with host, pid and step, and moves and changes nothing. So is one that would go on
    from another folder, which is a new run here; and what another torchrun starts again. An
    evaluation needs no right, and writes nothing. The first run ends as if nothing was."""
    out = tmp_path / "out"
    other = undisturbed(save_interval=4)["folder"]
    with Frozen(tmp_path, out, 2, mode="zero2") as first:
        before = view_of(out)  # of all that is in it
        facts = json.loads((out / ".lock").read_text())
        start_s = time.monotonic()
        refused(first.fact, out, 2, mode="zero2")
        refused(first.fact, out, resume=other / "step_00000004")
        refused(first.fact, out, plant=partial(launched_by, "another", 1), timeout_s=30)
        assert time.monotonic() - start_s < 25, "it has waited"
        assert ask("auto", out_dir=out)["steps"] == 2
        assert view_of(out) == before, "something has changed"
        ended = first.go_on()
    assert ended.codes == [0, 0], ended
    as_undisturbed(out, ask("auto", out_dir=out), undisturbed())
    assert json.loads((out / ".lock").read_text()) == dict(facts, step=4)


def note_waiting(path, plant):
    """Plant a note that the lock was asked for, and is another one's."""
    real = fcntl.flock

    def flock(*arguments):
        try:
            real(*arguments)
        except BlockingIOError:
            path.write_text("it waits")
            raise

    fcntl.flock = flock
    plant()


@pytest.mark.parametrize("kind", ["auto", "path", "restart"])
def test_a_run_that_resumes_waits(kind, tmp_path):
    """--resume auto, PATH in that folder, and a restart by torchrun wait until the run there ends,
    and then go on; but not for longer than --timeout_s, after which they are refused as any other
    one, and have changed nothing. Nobody takes over."""
    out = tmp_path / "out"
    options = dict(save_interval=1, keep_last=9, max_steps=6)
    options["resume"] = dict(auto="auto", path=out / "step_00000002", restart=None)[kind]
    plant = nothing
    if kind == "restart":  # without logs, by which torchruns are told apart
        plant = partial(launched_by, "", 1)
    with Frozen(tmp_path, out) as first:
        before = view_of(out)
        start_s = time.monotonic()
        refused(first.fact, out, plant=plant, timeout_s=1, **options)
        assert time.monotonic() - start_s > 1, "it has not waited"
        assert view_of(out) == before, "something has changed"
        plant = partial(note_waiting, tmp_path / "waits", plant)
        with Started(out, plant=plant, **options) as later:
            later.wait_for(tmp_path / "waits")
            ended = first.go_on()
            assert ended.codes == [0] and not ended.stderr[0], ended
            ended = later.end()
            assert ended.codes == [0], ended
    as_undisturbed(out, ask("auto", out_dir=out), undisturbed(max_steps=6), steps=6)


def at_once(folder, n):
    """Plant a wait for n runs at the place where they ask for the lock, and a long first step."""
    real = fcntl.flock

    def flock(*arguments):
        (folder / str(os.getpid())).touch()
        while len(os.listdir(folder)) < n:
            time.sleep(0.001)
        real(*arguments)

    fcntl.flock = flock
    in_update(1, None, time.sleep, 0.7)


@pytest.mark.parametrize("n, resume", [(3, None), (2, "auto")])
def test_of_starts_at_once_one_runs(n, resume, tmp_path):
    """Of runs that start at the same moment exactly one runs, as if it were alone, and the others
    end with 2. With --resume auto they wait, and find that all has been done."""
    out = tmp_path / "out"
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(n):
            run = Started(out, plant=partial(at_once, meeting, n), save_interval=1, resume=resume)
            started.append(stack.enter_context(run))
        ended = [run.end() for run in started]
    codes = sorted(run.codes[0] for run in ended)
    assert codes == [0, *[0 if resume else 2] * (n - 1)], [*map(str, ended)]
    for run in ended:
        refusal = "a run is alive: host " if run.codes[0] else ""
        assert refusal in run.stderr[0] and "Traceback" not in run.stderr[0], run
    n_idle = sum("all 4 steps have been made" in run.stdout[0] for run in ended)
    assert n_idle == (n - 1 if resume else 0), [run.stdout[0] for run in ended]
    assert not (out / "earlier").exists(), "something was moved"
    as_undisturbed(out, ask("auto", out_dir=out), undisturbed())


def signal_in_loading(number):
    """Plant a signal before the first step."""
    def load_tokens(*_):
        signal.raise_signal(number)

    data.load_tokens = load_tokens


def test_a_lock_goes_with_its_run(tmp_path):
    """A run that ends by a mistake, by a signal before its first step, or by an error does not keep
    the next one from beginning, which finds all as it was."""
    out = tmp_path / "out"
    finish(out, save_interval=4)
    refused("n_embd", out, resume="auto", n_embd=32)
    for number in (signal.SIGTERM, signal.SIGINT):
        ended = run_train(out, plant=partial(signal_in_loading, number))
        assert ended.codes == [-number] and not ended.stderr[0], ended
    assert saved(out)[-1] == 4 and not (out / "earlier").exists(), "something was moved"
    ended = run_train(out, plant=partial(in_update, 2, 0, fail, "planted"))
    assert ended.codes == [1], ended
    finish(out)


def fail_to_lock(number):
    """Plant a file system without such locks, as some of a network are."""
    def flock(*_):
        raise OSError(number, os.strerror(number))

    fcntl.flock = flock


def test_a_file_system_without_locks_is_told(tmp_path):
    """In one line, and the run goes on."""
    number = errno.ENOTSUP
    fact = rf"\Atrain\.py: \S*/\.lock: {os.strerror(number)}: so other runs may write there.*\n\Z"
    for resume in (None, "auto"):
        actual = finish(tmp_path, 2, mode="zero2", plant=partial(fail_to_lock, number), fact=fact,
                        save_interval=4, resume=resume)
        assert actual["steps"] == 4


@pytest.mark.parametrize("text", ["", "no JSON", "5", "[1]", 5000 * "x"])
def test_a_strange_lock_is_signed_anew(text, tmp_path):
    """Whatever .lock has, and however much; who holds it can be read as soon as it is held."""
    (tmp_path / ".lock").write_text(text)
    folder = runs.Folder(tmp_path)
    folder.take(None, 0)
    facts = dict(host=socket.gethostname(), pid=os.getpid(), step=0, launch=None,
                 has_begun=False)
    assert json.loads((tmp_path / ".lock").read_text()) == facts == folder.holder()
    folder.begin(0)
    assert folder.holder() == dict(facts, has_begun=True)
    os.close(folder.lock)


def test_mistakes_leave_nothing(tmp_path):
    """Where --resume names no checkpoint nothing is made, not even a lock. The run ends at once."""
    start_s = time.monotonic()
    for path in (tmp_path / "no/step_00000001", tmp_path):
        refused("no checkpoint", None, argv=[f"--resume={path}"])
    assert time.monotonic() - start_s < 5
    assert not [*tmp_path.iterdir()], [*tmp_path.iterdir()]


# -------------------------------------------------------------------------------------------------
# earlier runs


def test_nothing_is_lost(tmp_path):
    """Whatever begins anew in a used folder, or goes back: all that was written is there."""
    out = tmp_path / "out"
    kept = set()
    for number, options in enumerate((dict(seed=1), dict(seed=2, profile=1, max_steps=3),
                                      dict(seed=3, max_steps=3),
                                      dict(seed=3, resume=out / "step_00000001"), dict(seed=4))):
        kept |= contents(out) if out.exists() else set()
        finish(out, **{**dict(save_interval=1, keep_last=9, max_steps=2), **options})
        lost = kept - contents(out)
        assert not lost, f"lost by run {number}: {lost}"
    assert sorted(path.name for path in (out / "earlier").iterdir()) == ["1", "2", "3", "4"]
    assert not [*out.glob("trace*")], "a trace of another run is left"
    assert (out / "earlier/1/best").readlink().name == "step_00000002"


def test_links_and_files_are_no_obstacle(tmp_path):
    """A checkpoint that was moved to another disk, with a link in its place, is read; the link goes
    when it is one too many, and what it leads to stays. So does a file that is named as a
    checkpoint that is not complete."""
    out, disk = tmp_path / "out", tmp_path / "disk"
    finish(out, save_interval=1, max_steps=2)
    disk.mkdir()
    (out / "step_00000002").rename(disk / "step_00000002")
    (out / "step_00000002").symlink_to(disk / "step_00000002")
    (out / ".step_00000008").write_text("a file")
    actual = finish(out, save_interval=1, resume="auto", keep_last=1)
    assert "after step 2" in actual["stdout"] and saved(out)[-1] == 4, actual
    assert not [*out.glob(".step_*")]
    assert (disk / "step_00000002/SHA256SUMS").exists(), "what the link leads to is gone"
    finish(out, save_interval=1, resume="auto", max_steps=5)


# -------------------------------------------------------------------------------------------------
# torchrun


@pytest.mark.parametrize("before, has_begun, now, expected", [
    (("mine", 0), True, None, False),
    (("mine", 0), True, ("mine", 0), True),  # other nodes have come or gone
    (("mine", 0), True, ("mine", 1), True),
    (("mine", 0), False, ("mine", 1), False),
    (("mine", 0), True, ("another", 1), False),
    (None, True, ("mine", 1), False),
    (None, True, None, False),
    (None, True, ("", 0), False),
    (None, True, ("", 1), True),  # without logs the count tells
    (None, False, ("", 1), False)])
def test_a_restart_is_known(before, has_begun, now, expected, tmp_path):
    """What an out_dir has is of a run that this torchrun has begun, or of an earlier one."""
    folder = runs.Folder(tmp_path)
    with mock.patch.dict(os.environ):
        if before is not None:
            launched_by(*before)
        folder.take(None, 0)
        folder.has_begun = has_begun
        folder.sign(3)
        os.close(folder.lock)
    with mock.patch.dict(os.environ):
        if now is not None:
            launched_by(*now)
        assert folder.is_restart() == expected


def agent(folder, plant, n_ranks, n_nodes, port, **options):
    """torchrun on a node, with three restarts; ranks are forked, not started anew. What all of them
    print is in the folder."""
    config = LaunchConfig(min_nodes=1, max_nodes=n_nodes, nproc_per_node=n_ranks, run_id="tests",
                          rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}", max_restarts=3,
                          rdzv_configs=dict(last_call_timeout=1, keep_alive_interval=1),
                          monitor_interval=0.1, start_method="fork")
    os.setpgid(0, 0)  # to be killed together with its ranks
    os.dup2(os.open(f"{folder}/agent", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    if n_nodes > 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or a node that joins waits
    elastic_launch(config, execute)(flags(**options), folder, {}, plant)


class Torchrun:
    """Agents, a node each. A context, which leaves no process."""

    def __init__(self, folder, n_nodes=1, **options):
        self.folder, self.n_nodes, self.options = folder, n_nodes, options
        self.store = Store()
        self.agents = []
        self.others = []  # processes that are not in an agent's group

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.others, *(-process.pid for process in self.agents)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # a negative number means a group
        for process in self.agents:
            process.join()
        self.store.stop()

    def start_node(self, plant=nothing, n_ranks=2):
        arguments = self.folder, plant, n_ranks, self.n_nodes, self.store.port
        self.agents.append(FORK.Process(target=agent, args=arguments, kwargs=self.options))
        self.agents[-1].start()
        return self.agents[-1]

    def end(self):
        """Wait for it, and assert that it ends well -> what ranks have printed."""
        for process in self.agents:
            process.join(60)
        printed = (self.folder / "stdout").read_text()
        assert self.agents[0].exitcode == 0, (
            f"{self.agents[0].exitcode}: {printed}{(self.folder / 'agent').read_text()[-2000:]}")
        return printed


def die_in_starts(places):
    """Plant the death of rank 0 in its first starts, each at a place: before it asks for the lock,
    as soon as it has the lock, or in the third checkpoint."""
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if this_rank() > 0 or number >= len(places):
        return
    if places[number] == "before the lock":
        runs.Folder.take = die
    elif places[number] == "at the lock":
        runs.Folder.sign = die
    else:
        in_update(3, 0, setattr, os, "fsync", die)


@pytest.mark.parametrize("places", [("in a save", "at the lock"), ("before the lock",)],
                         ids="-".join)
def test_torchrun_starts_again_in_a_used_folder(places, tmp_path):
    """A restart goes on with what its own run has saved. If that had not begun, not with an earlier
    run that is still there, but with what --resume says. It is not refused because of the run that
    died."""
    out = tmp_path / "out"
    other = undisturbed(seed=2, save_interval=1, keep_last=9)
    options = dict(mode="zero2", save_interval=1, out_dir=out, seed=2)
    resumed, steps = "after step 2", [1, 2, 3, 4]
    if places[0] == "before the lock":
        options["resume"] = other["folder"] / "step_00000003"
        resumed, steps = "after step 3", [4]
    finish(out, save_interval=1, lr=0.02, max_steps=3)
    before = contents(out / "step_00000003")
    with Torchrun(tmp_path, **options) as torchrun:
        torchrun.start_node(partial(die_in_starts, places))
        printed = torchrun.end()
    actual = re.findall(r"^resumed.* (after step \d), on 2 ranks", printed, re.MULTILINE)
    assert actual == [resumed], printed
    assert f'"param_sha256": "{other["param_sha256"]}"' in printed, printed
    assert before <= contents(out / "earlier"), "the earlier run's checkpoint is lost"
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == steps


def die_with_node(path):
    """Kill a node, which has a process group, and leave a note."""
    path.touch()
    os.killpg(0, signal.SIGKILL)


def wait_for_signal(noted):
    while not noted:
        time.sleep(0.01)


def wait_for_node(n, path, dies=False):
    """Plant a rank that waits before its n-th update for the other node, which torchrun tells it by
    SIGTERM; and a node that dies in the third update when there are two."""
    if path.exists():
        return  # the other node is dead
    if os.environ["WORLD_SIZE"] == "3":
        if dies:
            in_update(3, None, die_with_node, path)
        return
    note_signals = runs.note_signals

    def note_here_too(signals):
        in_update(n, 0, wait_for_signal, signals)
        note_signals(signals)

    runs.note_signals = note_here_too


@pytest.mark.parametrize("joins", [False, True], ids=["a node dies", "a node joins"])
def test_torchrun_goes_on_with_other_nodes(joins, tmp_path):
    """After kill -9 of a whole node, and when a node joins, torchrun starts all ranks again, as
    many as there are: they resume by themselves, and end on the bits of one process."""
    out, note = tmp_path / "out", tmp_path / "dead"
    expected = undisturbed(global_batch_size=6)["param_sha256"]
    # Agents that a node joins have stores of their own, and tell a restart by the checkpoint.
    options = dict(save_interval=1, global_batch_size=6, mode="zero3", out_dir=out,
                   resume="auto" if joins else None)
    worlds = ("3", "2") if joins else ("2", "3")  # of ranks: now, before
    with Torchrun(tmp_path, n_nodes=2, **options) as torchrun:
        torchrun.start_node(partial(wait_for_node, 3 if joins else 1, note))
        while joins and not (out / "metrics.jsonl").exists():
            time.sleep(0.1)
        torchrun.start_node(partial(wait_for_node, 1, note, dies=not joins), n_ranks=1)
        printed = torchrun.end()
    actual = re.findall(r"^resumed.* on (\d) ranks? \((\d) before\)$", printed, re.MULTILINE)
    assert actual == [worlds], f"restarts (now, before) {actual}: {printed}"
    assert f'"param_sha256": "{expected}"' in printed, f"other bits than {expected}: {printed}"
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [1, 2, 3, 4]


def alone_in_a_session():
    """Plant what torchrun's ranks have, which are not forked: a session of their own, and no signal
    that torch.multiprocessing has asked for, when the agent ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG


def is_there(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_agent(number, tmp_path):
    """When torchrun is killed, or told to end, its ranks finish the step, save, and leave, within
    seconds; also if one of them was stopped when that happened."""
    out = tmp_path / "out"
    metrics = out / "metrics.jsonl"
    with Torchrun(tmp_path, mode="zero2", out_dir=out, max_steps=10**6, eval_interval=0,
                  save_interval=10**6, check_interval=0) as torchrun:
        pid = torchrun.start_node(alone_in_a_session).pid
        while not (metrics.exists() and metrics.read_text()):
            assert is_there(pid), (tmp_path / "agent").read_text()
            time.sleep(0.01)
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ranks = [int(word) for word in children]
        torchrun.others += ranks
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(pid, number)
        time.sleep(0.5)
        assert all(is_there(rank) for rank in ranks) and len(ranks) == 2, "they ended before"
        os.kill(ranks[1], signal.SIGCONT)
        deadline = time.monotonic() + 20
        while any(is_there(rank) for rank in ranks):
            assert time.monotonic() < deadline, "some outlive torchrun"
            time.sleep(0.01)
    n_steps = lines_of(metrics)[-1]["step"]
    assert saved(out) == [n_steps], (tmp_path / "stderr").read_text()
    assert "stopped by a signal" in (tmp_path / "stderr").read_text()

"""train.py: one run at a time in an out_dir, and no rank without its torchrun."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist

from tests.common import ROOT
from tests.runs import (FORK, ask, fail, finish, flags, in_update, lines_of, nothing, refused,
                        run_train, Started, saved, start_again, this_rank)
from tests.test_checkpoint import contents, view_of
from tests.test_faults import freeze
from tests.test_runs import under_torchrun
import data
import runs


def freeze_rank_0(folder):
    """Plant a stop in the third update of rank 0, for which others wait."""
    if this_rank() == 0:
        freeze("torch.optim.AdamW.step", 3, folder)


class Frozen:
    """A run in out_dir that stops in its third update, until it is told to go on."""

    def __init__(self, folder, out, W=1, **options):
        plant = partial(freeze_rank_0, folder)
        self.run = Started(out, W, plant=plant, save_interval=1, keep_last=9, **options)
        self.pid = int(self.run.wait_for(folder / "frozen"))
        self.fact = (f"in {out} a run is alive: host {socket.gethostname()}, pid {self.pid}, "
                     "step 2. ")

    def go_on(self):
        """-> how the run ends."""
        os.kill(self.pid, signal.SIGCONT)
        return self.run.end()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_second_run_is_refused(n_ranks, tmp_path):
    """While a run is alive, also if it is frozen, another one that begins anew is refused at once,
    in one line with host, pid and step, and moves and changes nothing. So is one that would go on
    from another folder, which is a new run here. An evaluation needs no right, and writes nothing.
    The first run ends as if nothing was."""
    out = tmp_path / "out"
    mode = "single" if n_ranks == 1 else "zero2"
    first = Frozen(tmp_path, out, n_ranks, mode=mode)
    other = finish(tmp_path / "other", save_interval=4)
    before = view_of(out)  # of all that is in it
    refused(first.fact, out, n_ranks, mode=mode)
    refused(first.fact, out, resume=tmp_path / "other/step_00000004")
    assert ask("auto", out_dir=out)["steps"] == 2
    assert view_of(out) == before, "something has changed"
    ended = first.go_on()
    assert ended.codes == [0] * n_ranks, ended
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert ask("auto", out_dir=out)["param_sha256"] == other["param_sha256"]


def test_the_lock_says_whose_it_is(tmp_path):
    """It has host, process and step of a run, which each step changes; it stays."""
    out = tmp_path / "out"
    first = Frozen(tmp_path, out)
    facts = json.loads((out / ".lock").read_text())
    assert facts["host"] == socket.gethostname() and facts["pid"] == first.pid, facts
    assert facts["step"] == 2 and facts["has_begun"] is True, facts
    first.go_on()
    assert json.loads((out / ".lock").read_text()) == dict(facts, step=4)


def note_waiting(folder, plant):
    """Plant a note that the lock was asked for, and is another one's."""
    real = fcntl.flock

    def flock(*arguments):
        try:
            real(*arguments)
        except BlockingIOError:
            (folder / "waits").write_text("yes")
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
    expected = finish(tmp_path / "alone", **options)["param_sha256"]
    options["resume"] = dict(auto="auto", path=out / "step_00000002", restart=None)[kind]
    plant = start_again if kind == "restart" else nothing
    first = Frozen(tmp_path, out)
    before = view_of(out)
    start_s = time.monotonic()
    refused(first.fact, out, plant=plant, timeout_s=1.5, **options)
    assert time.monotonic() - start_s > 1.5, "it has not waited"
    assert view_of(out) == before, "something has changed"
    later = Started(out, plant=partial(note_waiting, tmp_path, plant), **options)
    later.wait_for(tmp_path / "waits")
    ended = first.go_on()
    assert ended.codes == [0] and not ended.stderr[0], ended
    ended = later.end()
    assert ended.codes == [0], ended
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [*range(1, 7)]
    assert ask("auto", out_dir=out)["param_sha256"] == expected, "other bits"


def die(*_):
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.parametrize("n_ranks, mode", [(1, "single"), (2, "zero2")])
def test_a_dead_run_is_forgotten(n_ranks, mode, tmp_path):
    """kill -9 of rank 0 frees the folder at once, for a run that goes on and for a new one. What
    the dead run has saved is kept elsewhere."""
    out = tmp_path / "out"
    for n in (3, 1):  # updates of each run
        killed = run_train(out, n_ranks, plant=partial(in_update, n, 0, die), save_interval=1,
                           resume="auto", mode=mode)
        assert killed.codes[0] == -signal.SIGKILL, killed
    before = contents(out / "step_00000002")
    finish(out, n_ranks, mode=mode, save_interval=1, lr=0.02)
    assert before <= contents(tmp_path), "the dead run's checkpoint is lost"
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [1, 2, 3, 4]


def at_once(folder, n):
    """Plant a wait for n runs at the place where they ask for the lock, and a long first step."""
    real = fcntl.flock

    def flock(*arguments):
        (folder / str(os.getpid())).touch()
        while len(os.listdir(folder)) < n:
            time.sleep(0.001)
        real(*arguments)

    fcntl.flock = flock
    in_update(1, None, time.sleep, 1)


@pytest.mark.parametrize("n_starts, resume", [(3, None), (2, "auto"), (2, None),
                                              (3, "auto")])
def test_of_starts_at_once_one_runs(n_starts, resume, tmp_path):
    """Of runs that start at the same moment exactly one runs, as if it were alone, and the others
    end with 2. With --resume auto they wait, and find that all has been done."""
    out = tmp_path / "out"
    meeting = tmp_path / "meeting"
    meeting.mkdir()

    started = []
    for _ in range(n_starts):
        plant = partial(at_once, meeting, n_starts)
        started.append(Started(out, plant=plant, save_interval=1, resume=resume))
    ended = [run.end() for run in started]
    codes = sorted(run.codes[0] for run in ended)
    others = [0 if resume else 2] * (n_starts - 1)
    assert codes == [0, *others], [*map(str, ended)]
    for run in ended:
        refusal = "a run is alive: host " if run.codes[0] else ""
        assert refusal in run.stderr[0] and "Traceback" not in run.stderr[0], run
    if resume:
        n_idle = sum("all 4 steps have been made" in run.stdout[0] for run in ended)
        assert n_idle == n_starts - 1, [run.stdout[0] for run in ended]
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert not (out / "earlier").exists(), "something was moved"


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
    for n_ranks, mode in ((1, "single"), (2, "zero2")):
        plant = partial(in_update, 2, n_ranks - 1, fail, "planted")
        ended = run_train(out, n_ranks, mode=mode, plant=plant)
        assert ended.codes == [1] * n_ranks, ended
    finish(out)


def fail_to_lock(number):
    """Plant a file system without such locks, as some of a network are."""
    def flock(*_):
        raise OSError(number, os.strerror(number))

    fcntl.flock = flock


@pytest.mark.parametrize("name", ["ENOTSUP", "ENOLCK"])
def test_a_file_system_without_locks_is_told(name, tmp_path):
    """In one line, and the run goes on."""
    number = getattr(errno, name)
    fact = rf"\Atrain\.py: \S*/\.lock: {os.strerror(number)}: so other runs may write there.*\n\Z"
    for resume in (None, "auto"):
        actual = finish(tmp_path, 2, mode="zero2", plant=partial(fail_to_lock, number), fact=fact,
                        save_interval=4, resume=resume)
        assert actual["steps"] == 4


def die_in_starts(places):
    """Plant the death of rank 0 in its first starts, each at a place: as soon as it has the lock,
    or in its third update."""
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if this_rank() > 0 or number >= len(places):
        return
    if places[number] == "update":
        in_update(3, 0, die)
        return
    take = runs.Folder.take

    def take_and_die(*arguments):
        take(*arguments)
        die()

    runs.Folder.take = take_and_die


@pytest.mark.parametrize("places", [("lock",), ("update", "lock")], ids="-".join)
def test_torchrun_starts_again_in_a_used_folder(places, tmp_path):
    """A restart goes on with its own run, however its starts have ended: if the first one died
    before it had begun, not with an earlier run that is still there; if a later one did, with what
    the first one has saved. It is not refused because of the run that died."""
    out = tmp_path / "out"
    options = dict(mode="zero2", resume=None, save_interval=1)
    expected = finish(tmp_path / "alone", 2, **options)["param_sha256"]
    finish(out, save_interval=1, lr=0.02, max_steps=3)
    before = contents(out / "step_00000003")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = FORK.Process(target=under_torchrun, kwargs=dict(options, out_dir=out),
                         args=(tmp_path, partial(die_in_starts, places), 2, 1, store.port))
    agent.start()
    agent.join(60)
    assert agent.exitcode == 0, (tmp_path / "agent").read_text()[-2000:]
    printed = (tmp_path / "stdout").read_text()
    resumed = [line for line in printed.splitlines() if line.startswith("resumed")]
    assert len(resumed) == len(places) - 1, printed
    assert all("after step 2, on 2 ranks" in line for line in resumed), printed
    assert f'"param_sha256": "{expected}"' in printed, printed
    assert before <= contents(out / "earlier"), "the earlier run's checkpoint is lost"
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [1, 2, 3, 4]


def of_another_torchrun():
    """Plant a restart by a torchrun that has not started the run before."""
    start_again()
    os.environ["TORCHELASTIC_ERROR_FILE"] = LOGS.format("another", 1)


def test_a_restart_goes_on(tmp_path):
    """With its own run, if that had begun, whatever --resume says; with no other one, unless
    --resume says so."""
    expected = finish(tmp_path, save_interval=1)["param_sha256"]
    actual = finish(tmp_path, plant=start_again)
    assert "all 4 steps have been made" in actual["stdout"], actual
    actual = finish(tmp_path, save_interval=1, plant=of_another_torchrun)
    assert "of an earlier run: moved to" in actual["stdout"], actual
    assert f"{tmp_path}/earlier/1, which you may delete" in actual["stdout"], actual
    assert "step     1/4" in actual["stdout"] and actual["param_sha256"] == expected, actual
    actual = finish(tmp_path, save_interval=1, plant=of_another_torchrun, resume="auto")
    assert "all 4 steps have been made" in actual["stdout"], actual


def test_a_restart_is_refused_where_another_run_is_alive(tmp_path):
    """At once, as its first start was: it does not wait for what is not its own run, and changes
    nothing."""
    out = tmp_path / "out"
    first = Frozen(tmp_path, out)
    before = view_of(out)
    start_s = time.monotonic()
    refused(first.fact, out, plant=of_another_torchrun, timeout_s=30)
    assert time.monotonic() - start_s < 15, "it has waited"
    assert view_of(out) == before, "something has changed"
    assert first.go_on().codes == [0]


def kill_before_the_lock():
    """Plant the death of the first start before it has asked for the lock."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        runs.Folder.take = die


@pytest.mark.parametrize("resume", [None, "elsewhere"])
def test_a_start_that_dies_at_once_takes_no_other_run(resume, tmp_path):
    """A restart does not go on from what an earlier run has left, but from what --resume says."""
    out = tmp_path / "out"
    options = dict(save_interval=1, max_steps=3, mode="ddp", global_batch_size=4)
    finish(out, 2, **options)
    options["resume"] = None
    if resume is not None:
        finish(tmp_path / "other", 2, seed=2, **options)
        options.update(seed=2, resume=tmp_path / "other/step_00000002")
    expected = finish(tmp_path / "alone", 2, lr=0.02, **options)["param_sha256"]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = FORK.Process(target=under_torchrun, kwargs=dict(options, lr=0.02, out_dir=out),
                         args=(tmp_path, kill_before_the_lock, 2, 1, store.port))
    agent.start()
    agent.join(60)
    printed = (tmp_path / "stdout").read_text()
    assert agent.exitcode == 0 and f'"param_sha256": "{expected}"' in printed, printed
    assert len([*(out / "earlier/1").glob("step_*")]) == 2, "the earlier run is lost"


LOGS = "/logs/none_{}/attempt_{}/0/error.json"
MINE = dict(TORCHELASTIC_ERROR_FILE=LOGS.format("mine", 0), TORCHELASTIC_RESTART_COUNT="0")


@pytest.mark.parametrize("before, has_begun, now, expected", [
    (MINE, True, {}, False),  # this is no torchrun
    (MINE, True, MINE, True),  # other nodes have come or gone
    (MINE, True, dict(TORCHELASTIC_ERROR_FILE=LOGS.format("mine", 1),
                      TORCHELASTIC_RESTART_COUNT="1"), True),
    (MINE, False, MINE, False),
    (MINE, True, dict(TORCHELASTIC_ERROR_FILE=LOGS.format("other", 1),
                      TORCHELASTIC_RESTART_COUNT="1"), False),
    ({}, True, dict(TORCHELASTIC_ERROR_FILE=LOGS.format("mine", 1),
                    TORCHELASTIC_RESTART_COUNT="1"), False),
    ({}, True, {}, False),
    ({}, True, dict(TORCHELASTIC_ERROR_FILE="", TORCHELASTIC_RESTART_COUNT="0"), False),
    # Without logs the count tells.
    ({}, True, dict(TORCHELASTIC_ERROR_FILE="", TORCHELASTIC_RESTART_COUNT="1"), True),
    ({}, False, dict(TORCHELASTIC_ERROR_FILE="", TORCHELASTIC_RESTART_COUNT="1"), False)])
def test_a_restart_is_known(before, has_begun, now, expected, tmp_path):
    """What an out_dir has is of a run that this torchrun has begun, or of an earlier one."""
    folder = runs.Folder(tmp_path)
    for environment, begins in ((before, has_begun), (now, None)):
        with mock.patch.dict(os.environ, clear=False):
            for name in MINE:
                os.environ.pop(name, None)
            os.environ.update(environment)
            if begins is not None:
                folder.take(None, 0)
                folder.has_begun = begins
                folder.sign(3)
                os.close(folder.lock)
            else:
                assert folder.is_restart() == expected


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
    assert not (out / ".step_00000008").exists() and not [*out.glob(".step_*")]
    assert (disk / "step_00000002/SHA256SUMS").exists(), "what the link leads to is gone"
    finish(out, save_interval=1, resume="auto", max_steps=5)


def test_nothing_is_lost(tmp_path):
    """Whatever begins anew in a used folder, or goes back: all that was written is there."""
    out = tmp_path / "out"
    kept = set()
    for number, options in enumerate((dict(seed=1), dict(seed=2), dict(seed=3, max_steps=3),
                                      dict(seed=3, resume=out / "step_00000001"), dict(seed=4))):
        kept |= contents(out) if out.exists() else set()
        finish(out, **{**dict(save_interval=1, keep_last=9, max_steps=2), **options})
        lost = kept - contents(out)
        assert not lost, f"lost by run {number}: {lost}"
    assert sorted(path.name for path in (out / "earlier").iterdir()) == ["1", "2", "3", "4"]


def is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end_of_ranks(agent, stopped, within_s):
    """Wait for the end of torchrun's ranks, of which one was stopped."""
    assert any(is_there(pid) for pid in agent.ranks), "they ended before"
    time.sleep(0.5)
    os.kill(stopped, signal.SIGCONT)
    deadline = time.monotonic() + within_s
    while any(is_there(pid) for pid in agent.ranks):
        assert time.monotonic() < deadline, "some outlive torchrun"
        time.sleep(0.01)


@pytest.mark.parametrize("n_ranks, number", [(2, signal.SIGKILL), (4, signal.SIGKILL),
                                             (4, signal.SIGTERM)])
def test_ranks_end_with_their_agent(n_ranks, number, tmp_path):
    """When torchrun is killed, or told to end, its ranks finish the step, save, and leave, within
    seconds; also if one of them was stopped when that happened. torchrun itself starts them here,
    since it gives each a session of its own."""
    out = tmp_path / "out"
    metrics = out / "metrics.jsonl"
    words = flags(mode="zero2", out_dir=out, max_steps=10**6, global_batch_size=4, eval_interval=0,
                  save_interval=10**6, check_interval=0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={n_ranks}"]
    with open(tmp_path / "log", "w") as log:
        agent = subprocess.Popen([*command, ROOT / "train.py", *words], stdout=log, stderr=log)
    agent.ranks = []
    try:
        while not (metrics.exists() and metrics.read_text()):
            assert agent.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        children = pathlib.Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        agent.ranks = [int(word) for word in children.read_text().split()]
        os.kill(agent.ranks[1], signal.SIGSTOP)
        agent.send_signal(number)
        if number == signal.SIGKILL:
            agent.wait()
        end_of_ranks(agent, agent.ranks[1], within_s=10)
    finally:
        agent.kill()
        agent.wait()
        for pid in agent.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    n_steps = lines_of(metrics)[-1]["step"]
    assert saved(out) == [n_steps], (tmp_path / "log").read_text()[-2000:]
    assert "stopped by a signal" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("text", ["", "no JSON", "5", "[1]", 5000 * "x"])
def test_a_strange_lock_is_signed_anew(text, tmp_path):
    """Whatever .lock has, and however much; who holds it can be read as soon as it is held."""
    (tmp_path / ".lock").write_text(text)
    folder = runs.Folder(tmp_path)
    folder.take(None, 0)
    facts = dict(host=socket.gethostname(), pid=os.getpid(), step=0, launch=None,
                 has_begun=False)
    assert json.loads((tmp_path / ".lock").read_text()) == facts == folder.holder()
    os.close(folder.lock)


def with_long_name():
    """Plant torchrun's own name of a run, longer than what .lock has."""
    os.environ["TORCHELASTIC_RUN_ID"] = 1000 * "n"


def test_a_lock_is_never_torn(tmp_path):
    """However long torchrun's name of the run is."""
    finish(tmp_path, plant=with_long_name)
    assert json.loads((tmp_path / ".lock").read_text())["step"] == 4


def test_a_folder_that_goes_is_noticed(tmp_path):
    """A run whose out_dir is removed, and with it the lock, says so, writes no checkpoint that
    seems to be whole, and ends with status 1."""
    out = tmp_path / "out"
    finish(out, status=1, save_interval=1, plant=partial(in_update, 3, 0, shutil.rmtree, out),
           fact=r"checkpoint failed, .*\.lock was removed")
    assert not saved(out)


def test_mistakes_leave_nothing(tmp_path):
    """Where --resume names no checkpoint nothing is made, not even a lock."""
    for path in (tmp_path / "no/step_00000001", tmp_path):
        refused("no checkpoint", None, argv=[f"--resume={path}"])
    assert not [*tmp_path.iterdir()], [*tmp_path.iterdir()]

"""train.py: one run at a time in an out_dir, and no rank without its torchrun."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist

from tests.params import ROOT, full
from tests.runs import (FORK, ask, finish, flags, in_update, lines_of, refused, run_train, saved,
                        start_again, this_rank)
from tests.test_checkpoint import contents, view_of
from tests.test_faults import freeze
from tests.test_runs import under_torchrun
import checkpoint
from extras import ranks


def freeze_rank_0(folder):
    """Plant a stop in the third update of rank 0, for which others wait."""
    if this_rank() == 0:
        freeze("torch.optim.AdamW.step", 3, folder)


class Frozen:
    """A run in out_dir that stops in its third update, until it is told to go on."""

    def __init__(self, folder, out, W=1, **options):
        self.pool = ThreadPoolExecutor(1)
        plant = partial(freeze_rank_0, folder)
        self.end = self.pool.submit(run_train, out, W, plant=plant, save_interval=1, **options)
        number = folder / "frozen"
        while not (number.exists() and number.read_text()):
            assert not self.end.done(), self.end.result()
            time.sleep(0.01)
        self.pid = int(number.read_text())
        [self.mark] = out.glob(".run_*/mark")

    def go_on(self):
        """-> how the run ends."""
        os.kill(self.pid, signal.SIGCONT)
        return self.end.result()


def age(mark, seconds):
    """As a host whose clock is off would stamp a mark, or as time does."""
    then = mark.stat().st_mtime + seconds
    os.utime(mark, (then, then))


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_second_run_is_refused(n_ranks, tmp_path):
    """While a run is alive, another one that begins anew is refused in one line with host, pid and
    step, and leaves all as it was. So is one that would go on from another folder, and a restart
    by torchrun: a run that took over has the right. The first run ends as if nothing was."""
    out = tmp_path / "out"
    mode = "single" if n_ranks == 1 else "zero2"
    first = Frozen(tmp_path, out, n_ranks, mode=mode)
    finish(tmp_path / "other", save_interval=4)
    before = view_of(out)  # of all that is in it
    fact = rf"a run is alive: host {socket.gethostname()}, pid \d+, step 2, .*--resume auto"
    refused(fact, out, n_ranks, mode=mode)
    refused(fact, out, resume=tmp_path / "other/step_00000004")
    refused(fact, out, 2, mode="ddp", resume="auto", plant=start_again)
    assert view_of(out) == before, "something has changed"
    ended = first.go_on()
    assert ended.codes == [0] * n_ranks, ended
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_takes_over(tmp_path):
    """--resume auto goes on from the newest checkpoint of a run that is alive. That run stops, says
    why, and leaves the folder to the later one."""
    out = tmp_path / "out"
    first = Frozen(tmp_path, out)
    found = finish(out, resume="auto", save_interval=1)
    ended = first.go_on()
    assert ended.codes == [1] and "a later run has begun" in ended.stderr[0], ended
    assert found["steps"] == 4 and saved(out)[-1] == 4
    assert ask("auto", out_dir=out)["param_sha256"] == found["param_sha256"]
    assert not [*out.glob(".run_*")]


@pytest.mark.parametrize("seconds, is_alive", [(-3600, False), (3600, True)])
def test_marks_have_an_age(seconds, is_alive, tmp_path):
    """A mark that was touched an hour ago is of a dead run, or of one whose host stamps files an
    hour too early: a new run begins, nothing is lost, and the first one stops when it wakes up. One
    from the future is of a run that is alive."""
    out = tmp_path / "out"
    first = Frozen(tmp_path, out)
    age(first.mark, seconds)
    if is_alive:
        refused("a run is alive", out)
        assert first.go_on().codes == [0]
        return
    before = contents(out / "step_00000002")
    found = finish(out, save_interval=1, lr=0.02)
    ended = first.go_on()
    assert ended.codes == [1] and "a later run has begun" in ended.stderr[0], ended
    assert before <= contents(tmp_path), "the first run's checkpoint is lost"
    assert ask("auto", out_dir=out)["param_sha256"] == found["param_sha256"]


def die(*_):
    signal.raise_signal(signal.SIGKILL)


def test_a_dead_run_is_forgotten(tmp_path):
    """A run that was killed counts as alive for its --timeout_s, and the line says so. Then another
    one may begin. --resume auto need not wait."""
    out = tmp_path / "out"
    for n in (3, 1):  # updates of each run
        killed = run_train(out, plant=partial(in_update, n, 0, die), save_interval=1,
                           resume="auto", timeout_s=5)
        assert killed.codes == [-signal.SIGKILL], killed
    refused("step 2, .*killed counts as alive for its --timeout_s 5", out)
    time.sleep(5)
    finish(out)


def at_once(folder, n):
    """Plant a wait for n runs at the place where they look at each other's marks, and a long first
    step."""
    real = checkpoint.make_mark

    def make_mark(*arguments):
        (folder / str(os.getpid())).touch()
        while len(os.listdir(folder)) < n:
            time.sleep(0.001)
        real(*arguments)

    checkpoint.make_mark = make_mark
    in_update(1, None, time.sleep, 1)


@pytest.mark.parametrize("n_attempts, resume", [(1, None), (1, "auto"), full(9, None),
                                                full(9, "auto")])
def test_of_two_starts_one_runs(n_attempts, resume, tmp_path):
    """Of runs that start at the same moment one goes on, as if it were alone; the others end with
    status 2. With --resume auto the last one may stop another one after its first step."""
    for attempt in range(n_attempts):
        folder = tmp_path / str(attempt)
        meeting = folder / "meeting"
        meeting.mkdir(parents=True)
        out = folder / "out"

        def start(_):
            return run_train(out, plant=partial(at_once, meeting, 3), save_interval=1,
                             resume=resume)

        with ThreadPoolExecutor(3) as pool:
            ended = [*pool.map(start, range(3))]
        codes = sorted(run.codes[0] for run in ended)
        assert codes[0] == 0 and set(codes[1:]) <= {1, 2}, [*map(str, ended)]
        assert resume is not None or codes == [0, 2, 2], [*map(str, ended)]
        for run in ended:
            if run.codes[0]:
                assert re.search("is alive|a later run has begun", run.stderr[0]), run
        steps = [entry["step"] for entry in lines_of(out / "metrics.jsonl")]
        assert steps == [1, 2, 3, 4], steps
        assert not [*out.glob(".run_*")]


def signal_in_resume(number):
    """Plant a signal before the first step."""
    def resume(*_):
        signal.raise_signal(number)

    checkpoint.resume = resume


def test_a_mark_goes_with_its_run(tmp_path):
    """A run that ends by a mistake, an error or a signal before its first step leaves no mark, so
    that the next one can begin at once."""
    out = tmp_path / "out"
    finish(out, save_interval=4)
    refused("n_embd", out, resume="auto", n_embd=32)
    assert not [*out.glob(".run_*")]
    for number in (signal.SIGTERM, signal.SIGINT):
        ended = run_train(out, plant=partial(signal_in_resume, number))
        assert ended.codes == [-number] and not ended.stderr[0], ended
        assert not [*out.glob(".run_*")]
    run_train(out, 2, mode="zero2", plant=partial(in_update, 2, 1, os.kill, os.getpid(), 0))
    ended = run_train(out, plant=partial(in_update, 2, 0, os.open, "/no/such", 0))
    assert ended.codes == [1], ended
    assert not [*out.glob(".run_*")]
    finish(out)


def die_before_it_begins(folder):
    """Plant a death of rank 0 in its first start, when it has made a mark and nothing else."""
    real = dist.distributed_c10d.all_gather_object

    def gather(*arguments, **options):
        has_mark = [*folder.glob("out/.run_*")]
        if has_mark and not (folder / "died").exists() and dist.get_rank() == 0:
            (folder / "died").touch()
            die()
        return real(*arguments, **options)

    dist.all_gather_object = gather


def test_torchrun_starts_again_at_once(tmp_path):
    """A restart is not refused because of the mark of its own run, which was killed."""
    options = dict(mode="zero2", resume=None, out_dir=tmp_path / "out", save_interval=4)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = FORK.Process(target=under_torchrun, kwargs=options,
                         args=(tmp_path, partial(die_before_it_begins, tmp_path), 2, 1, store.port))
    agent.start()
    agent.join(60)
    assert (tmp_path / "died").exists()
    assert agent.exitcode == 0, (tmp_path / "agent").read_text()[-2000:]
    assert saved(tmp_path / "out")[-1] == 4


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


@pytest.mark.parametrize("n_ranks, number", [(2, signal.SIGKILL), full(4, signal.SIGKILL),
                                             full(4, signal.SIGTERM)])
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


def test_ranks_do_not_wait_for_an_agent_that_has_gone():
    """If torchrun ends before its ranks have begun, they leave at once: its store does not answer,
    or another process is the parent now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        address = listener.getsockname()
    with pytest.raises(ranks.Stop, match="torchrun has ended"):
        ranks.check_store(address)
    with mock.patch("ctypes.CDLL"), mock.patch("extras.PROCESS", os.getpid()):
        with mock.patch("extras.PARENT", os.getppid()):
            ranks.end_with_agent()
        with mock.patch("extras.PARENT", 0), pytest.raises(ranks.Stop, match="has ended"):
            ranks.end_with_agent()
    with mock.patch("ctypes.CDLL"), mock.patch("extras.PROCESS", 0):
        ranks.end_with_agent()  # forked by a program, which is the parent


def test_the_end_says_what_lies_there(tmp_path):
    """With its size, before the result."""
    out = tmp_path / "out"
    found = finish(out, save_interval=2)
    [line] = re.findall(rf"^in {out}: (.*)$", found["stdout"], re.M)
    best = (out / "best").resolve().name
    for name in ("step_00000003", "step_00000004", "metrics.jsonl", "tokens"):
        note = ", the best" if name == best else ""
        assert re.search(rf"{name}\S* \(\d\.\d\d MB{note}\)", line), line
    n_bytes = sum(path.stat().st_size for path in (out / "step_00000004").iterdir())
    assert f"step_00000004 ({n_bytes / 1e6:.2f} MB" in line, line


def test_a_mark_says_whose_it_is(tmp_path):
    """It has host, process and step of a run, and is touched after each step."""
    out = tmp_path / "out"
    first = Frozen(tmp_path, out)
    facts = json.loads(first.mark.read_text())
    assert (facts["host"], facts["pid"], facts["step"]) == (socket.gethostname(), first.pid, 2)
    first.go_on()


def make_mark(out, name, age_s=0, **facts):
    """A mark of another run that has made it, and touched it last, age_s ago."""
    path = out / f".run_{name}/mark"
    path.parent.mkdir(parents=True)
    then_ns = time.time_ns() - int(1e9 * age_s)
    facts = dict(host="far", pid=7, step=5, torchrun=name, takes_over=False, timeout_s=120,
                 made_ns=then_ns) | facts
    path.write_text(json.dumps(facts))
    os.utime(path, ns=(then_ns, then_ns))
    return path.parent


@pytest.mark.ranks(1)
def test_later_runs_have_the_right_to_take_over(tmp_path):
    """A run that was about to take over stops if a later one does so, before it has moved anything,
    and also if that one has removed its mark; it leaves alone a run that begins anew and will stand
    back, and it removes all others."""
    mine = make_mark(tmp_path, "mine", 60, takes_over=True)
    (mine / "mark").touch()  # it is alive
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    earlier = make_mark(tmp_path, "earlier", 90, takes_over=True)
    later = make_mark(tmp_path, "later", 30, takes_over=True)
    with pytest.raises(OSError, match="a later run has begun in .*host far, pid 7"):
        checkpoint.rewind(mine, dict(step=3, best_step=0), keeps_metrics=True)
    assert folder.exists() and earlier.exists(), "something has gone"
    checkpoint.remove(later)
    begun = make_mark(tmp_path, "begun", 90, begun=True)
    anew = make_mark(tmp_path, "anew", 60)
    (anew / "mark").touch()
    with pytest.raises(OSError, match="a later run has begun in .*host far, pid 7"):
        checkpoint.rewind(anew, dict(step=3, best_step=0), keeps_metrics=True)
    assert folder.exists() and begun.exists(), "something has gone"
    checkpoint.remove(anew)
    stands_back = make_mark(tmp_path, "stands_back", 30)
    in_making = tmp_path / ".run_in_making"
    in_making.mkdir()
    (in_making / "mark").touch()  # and has not said yet whose it is
    checkpoint.rewind(mine, dict(step=3, best_step=0), keeps_metrics=True)
    gone = [folder, earlier, begun]
    assert not any(path.exists() for path in gone), "something has stayed"
    assert stands_back.exists() and in_making.exists(), "a mark of a run that stands back has gone"
    checkpoint.remove(mine)
    with pytest.raises(OSError, match="a later run has begun"):
        checkpoint.while_ours(checkpoint.rewind, mine, dict(step=3, best_step=0), True)
    assert stands_back.exists()


@pytest.mark.ranks(1)
def test_a_mark_is_alive_for_its_own_time(tmp_path):
    """The limit is that of the run that made it, whose steps may be long. What is no mark, or was
    made by an older version, is looked at by its time alone."""
    mine = make_mark(tmp_path, "mine")
    make_mark(tmp_path, "slow", 300, timeout_s=3600)
    make_mark(tmp_path, "dead", 300)
    for name, content in (("old", ""), ("odd", "[1, 2]"), ("cut", '{"host": '), ("five", "5"),
                          ("null", "null"), ("no_time", '{"made_ns": null}')):
        path = make_mark(tmp_path, name) / "mark"
        path.write_text(content)
        path = make_mark(tmp_path, f"dead_{name}", 300) / "mark"
        then = path.stat().st_mtime_ns
        path.write_text(content)
        os.utime(path, ns=(then, then))
    os.mkfifo(make_mark(tmp_path, "fifo") / "fifo")
    (tmp_path / ".run_fifo/fifo").replace(tmp_path / ".run_fifo/mark")
    (tmp_path / ".run_folder/mark").mkdir(parents=True)
    (tmp_path / ".run_empty").mkdir()
    (tmp_path / ".run_file").touch()
    (tmp_path / ".run_link").symlink_to("nowhere")
    found = {other["name"]: other["host"] for other in checkpoint.others_alive(mine)}
    names = ("old", "odd", "cut", "five", "null", "no_time", "fifo", "folder")
    assert found == {".run_slow": "far"} | {f".run_{name}": "unknown" for name in names}, found


def claims(mark, is_restart=False, **facts):
    """Whether a run may go on once it has made this mark."""
    facts = dict(timeout_s=120.0, torchrun="mine", begun=False, takes_over=False) | facts
    try:
        checkpoint.make_mark(mark, facts, is_restart)
    except ValueError:
        return False
    finally:
        checkpoint.remove(mark)
    return True


@pytest.mark.ranks(1)
def test_who_has_the_right_to_out_dir(tmp_path):
    """A run that has begun has it against all that do not take over, whatever clocks say of who
    came first. Of runs that have not yet begun the first has it, but not against a restart, which
    was there before: a run that died while it claimed out_dir must not stop it."""
    mine = tmp_path / ".run_mine"
    other = make_mark(tmp_path, "other", -600, begun=True)  # by a clock that is ahead
    assert not claims(mine) and not claims(mine, is_restart=True)
    assert claims(mine, takes_over=True) and claims(mine, torchrun="other", is_restart=True)
    checkpoint.remove(other)
    for age_s, is_first in ((60, True), (-60, False)):
        other = make_mark(tmp_path, "other", age_s)
        assert claims(mine) != is_first
        assert claims(mine, is_restart=True) and claims(mine, takes_over=True)
        checkpoint.remove(other)


def test_a_spoiled_mark_is_still_touched(tmp_path):
    mark = tmp_path / ".run_mine"
    mark.mkdir()
    for content in ("", "garbage", "5"):
        (mark / "mark").write_text(content)
        age(mark / "mark", -3600)
        assert checkpoint.touch(mark, 3)
        assert time.time() - (mark / "mark").stat().st_mtime < 60
    checkpoint.remove(mark)
    assert not checkpoint.touch(mark, 3) and not mark.exists()


def test_a_run_that_lost_its_folder_stays_away(tmp_path):
    """A run that another one has taken over from is not started again by torchrun, also if the
    later run has ended meanwhile."""
    out = tmp_path / "out"
    options = dict(mode="zero2", resume=None, out_dir=out, save_interval=1, max_steps=60)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    plant = partial(in_update, 20, 0, wait_for_file, tmp_path / "go")
    agent = FORK.Process(target=under_torchrun, kwargs=options,
                         args=(tmp_path, plant, 2, 1, store.port))
    agent.start()
    while not (out / "step_00000019").exists():
        time.sleep(0.01)
    later = finish(out, save_interval=1, resume="auto", max_steps=25)
    (tmp_path / "go").touch()
    agent.join(60)
    assert agent.exitcode not in (0, None)
    printed = (tmp_path / "stderr").read_text()
    assert "a later run has begun" in printed and "a later run has taken over" in printed, printed
    assert ask("auto", out_dir=out)["param_sha256"] == later["param_sha256"]
    assert saved(out)[-1] == 25


def wait_for_file(path):
    while not path.exists():
        time.sleep(0.01)

"""train.py: faults of disks and machines, and how a run ends.

After each, metrics.jsonl has every step once, and the bits are those of an undisturbed run.
"""

import builtins
import io
import itertools
import json
import math
import os
import pathlib
import pkgutil
import re
import resource
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.runs import (Started, ask, fail, finish, in_update, lines_of, run_train, saved, spoil, this_rank,
                        write_line)
import model
import runs

STEPS = 4


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
        signal.raise_signal(signal.SIGKILL)

    os.fsync = fsync
    in_update(n, None, act_without_arguments, cut)


def act_without_arguments(act):
    act()


def fill_disk(path, n):
    """Plant a disk that takes 20 more bytes of metrics.jsonl from the n-th update until the next
    one, and so half a line; checkpoints are larger, and fail."""
    def allow(update):
        most = path.stat().st_size + 20 if update == n else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    update = torch.optim.AdamW.step
    calls = itertools.count(1)

    def step(optimizer, *closure):
        allow(next(calls))
        return update(optimizer, *closure)

    torch.optim.AdamW.step = step


def full_log():
    """Plant stdout and stderr on a full disk."""
    for descriptor in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


def freeze(function, n, folder):
    """Plant a process that stops in the n-th call of a function, and leaves its number."""
    path, _, name = function.rpartition(".")
    owner = pkgutil.resolve_name(path)
    real = getattr(owner, name)
    calls = itertools.count(1)

    def frozen(*arguments, **options):
        if next(calls) == n:
            (folder / "frozen").write_text(str(os.getpid()))
            signal.raise_signal(signal.SIGSTOP)
        return real(*arguments, **options)

    setattr(owner, name, frozen)


@pytest.mark.parametrize("fault", ["power cut", "full disk", "full log"])
def test_faults_cost_no_line(fault, tmp_path):
    """After a power cut, which takes what was not synced; after a full disk, that took half a line;
    and with the log on a full disk."""
    options = dict(save_interval=1, resume="auto", max_steps=STEPS)
    out = tmp_path / "out"
    expected = finish(tmp_path / "alone", **options)["param_sha256"]
    metrics = out / "metrics.jsonl"
    if fault == "power cut":
        run = run_train(out, plant=partial(cut_power, metrics, 3), **options)
        assert run.codes == [-signal.SIGKILL], run
        actual = finish(out, **options)["param_sha256"]
    elif fault == "full disk":
        plant = partial(fill_disk, metrics, 2)
        fact = "step 2 is not yet in the metrics(.|\n)*step 2: the checkpoint failed"
        actual = finish(out, fact=fact, plant=plant, **options)["param_sha256"]
    else:
        finish(out, plant=full_log, **options)
        actual = ask(out / f"step_{STEPS:08d}")["param_sha256"]
    as_undisturbed(out, actual, expected)


def as_undisturbed(out, actual, expected):
    """Assert that a run has the bits, the metrics and the files of one that nothing disturbs."""
    entries = lines_of(out / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [*range(1, STEPS + 1)], entries
    assert actual == expected, "other bits"
    left = [path.name for path in out.glob(".*")]
    assert left == [".lock"], f"left over: {left}"


def test_a_run_without_its_last_checkpoint_ends_with_1(tmp_path):
    """If the disk is full in the last step, the line says so, and the status; the checkpoint before
    is as it was, and the run can go on."""
    out = tmp_path / "out"
    expected = finish(tmp_path / "alone")["param_sha256"]
    actual = finish(out, status=1, save_interval=1, plant=partial(fill_disk, out / "metrics.jsonl",
                    STEPS), fact=f"step {STEPS}: the checkpoint failed, earlier ones are as they")
    assert saved(out) == [STEPS - 2, STEPS - 1], saved(out)
    actual = finish(out, save_interval=1, resume="auto")["param_sha256"]
    as_undisturbed(out, actual, expected)


def test_a_skipped_last_step_leaves_a_checkpoint(tmp_path):
    """Skipped steps are no reason to push out older checkpoints, but the last one counts."""
    plant = partial(spoil, "cross_entropy", (2, STEPS), math.nan)
    finish(tmp_path, 2, mode="zero2", plant=plant, save_interval=1, keep_last=9, eval_steps=0)
    skipped = [entry["skipped"] for entry in lines_of(tmp_path / "metrics.jsonl")]
    assert skipped == [False, True, False, True], skipped
    assert saved(tmp_path) == [1, 3, STEPS]


@pytest.mark.parametrize("function, expected", [
    ("cross_entropy", [(1.0, 1), (1.0, 2), (1.0, 3)]),
    ("embedding", [(1.0, 1), (0.5, 1), (0.5, 2)])])
@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_what_a_scaler_learns_of_a_skipped_step(mode, function, expected, tmp_path):
    """In fp16 a loss that is not finite, with gradients that are, is no good step, and no reason
    for another scale; gradients that are not finite halve it."""
    plant = partial(spoil, function, (2,), math.inf)
    finish(tmp_path, 2, mode=mode, dtype="fp16", plant=plant, save_interval=1, keep_last=9)
    assert [entry["skipped"] for entry in lines_of(tmp_path / "metrics.jsonl")][1]
    actual = []
    for step in (1, 3, 4):  # a step that is skipped is not saved
        record = json.loads((tmp_path / f"step_{step:08d}/checkpoint.json").read_text())
        actual.append((record["scaler"]["scale"] / 2**15, record["scaler"]["_growth_tracker"]))
    assert actual == expected


def test_a_scaler_goes_on(tmp_path):
    """A run that resumes in fp16 has the scale, and the count of good steps, of its checkpoint."""
    options = dict(W=2, mode="zero2", dtype="fp16", save_interval=1, keep_last=9)
    finish(tmp_path, max_steps=3, plant=partial(spoil, "embedding", (2,), math.inf), **options)
    finish(tmp_path, resume="auto", **options)
    record = json.loads((tmp_path / "step_00000004/checkpoint.json").read_text())
    assert (record["scaler"]["scale"] / 2**15, record["scaler"]["_growth_tracker"]) == (0.5, 2)


def raise_all(numbers):
    for number in numbers:
        signal.raise_signal(number)


def send(numbers, on_rank, is_torchruns=False):
    """Plant signals in the second update of a rank, or of all."""
    if is_torchruns:
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    in_update(2, on_rank, raise_all, numbers)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("n_ranks, mode, on_rank", [(1, "single", 0), (3, "zero2", 1),
                                                    (2, "ddp", None), (2, "zero3", 0)])
def test_a_signal_ends_a_run(n_ranks, mode, on_rank, number, tmp_path):
    """All ranks finish the step, save and end with 128 + the number, also if one alone got it; the
    run can go on, to the bits of an undisturbed one."""
    out = tmp_path / "out"
    options = dict(mode=mode, save_interval=100, eval_interval=0, global_batch_size=6)
    expected = finish(tmp_path / "alone", n_ranks, **options)["param_sha256"]
    actual = finish(out, n_ranks, status=128 + number, plant=partial(send, [number], on_rank),
                    fact=r"\Atrain.py: stopped by a signal after step [23]; go on with --resume",
                    **options)
    n_steps = lines_of(out / "metrics.jsonl")[-1]["step"]
    assert n_steps in (2, 3) and saved(out) == [n_steps], saved(out)
    actual = finish(out, n_ranks, resume="auto", **options)["param_sha256"]
    as_undisturbed(out, actual, expected)


@pytest.mark.parametrize("is_torchruns, n, is_at_once",
                         [(False, 2, True), (True, 2, False), (True, 3, True)])
def test_one_more_signal_ends_a_run_at_once(is_torchruns, n, is_at_once, tmp_path):
    """The second one; under torchrun, which passes on what a terminal sends, the third. The step is
    not finished, and the status is the same."""
    numbers = n * [signal.SIGINT]
    finish(tmp_path, status=130, plant=partial(send, numbers, 0, is_torchruns), save_interval=1,
           fact="^$" if is_at_once else "stopped by a signal after step 3")
    assert saved(tmp_path) == ([1] if is_at_once else [2, 3]), saved(tmp_path)


def test_the_end_of_torchrun_counts_once(tmp_path):
    """Linux says it once for each of torchrun's threads: the step is finished all the same."""
    plant = partial(send, 5 * [runs.ORPHANED], 0, True)
    finish(tmp_path, status=128 + signal.SIGTERM, plant=plant, save_interval=1,
           fact="stopped by a signal after step 3")
    assert saved(tmp_path) == [2, 3], saved(tmp_path)


def freeze_rank_1(folder):
    """Plant a stop in the second update of rank 1; rank 0 leaves its number, and waits for it."""
    if this_rank() == 1:
        freeze("torch.optim.AdamW.step", 2, folder)
    else:
        (folder / "waiting").write_text(str(os.getpid()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_that_waits(number, tmp_path):
    """Also in a collective, in which no handler of Python's runs."""
    plant = partial(freeze_rank_1, tmp_path)
    with Started(tmp_path / "out", 2, mode="zero2", plant=plant) as run:
        frozen = int(run.wait_for(tmp_path / "frozen"))
        time.sleep(0.5)  # now rank 0 waits
        pid = int((tmp_path / "waiting").read_text())
        start_s = time.monotonic()
        os.kill(pid, number)
        time.sleep(0.5)  # or the kernel makes one of them
        os.kill(pid, number)
        while run.processes[0].is_alive():
            assert time.monotonic() - start_s < 5, "it still waits"
            time.sleep(0.01)
        os.kill(frozen, signal.SIGKILL)
        ended = run.end()
    assert ended.codes == [128 + number, -signal.SIGKILL], ended


def is_running(pid):
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


# What happens to rank 1, or to the only one; the statuses of all ranks; how rank 0's line ends, and
# whether there is a traceback of the rank where it happened.
ENDS = {"dies": (2, (signal.raise_signal, signal.SIGKILL), [1, -signal.SIGKILL], False),
        "hangs": (2, (time.sleep, 60), [1, None], False),
        "has a bug": (2, (fail, "planted"), [1, 1], True),
        "alone has a bug": (1, (fail, "planted"), [1], True)}


@pytest.mark.parametrize("name", ENDS)
def test_how_a_run_ends(name, tmp_path):
    """1 and one line with the step where another rank has died, or hangs for --timeout_s; a bug
    keeps its traceback, before the line."""
    n_ranks, planted, codes, is_bug = ENDS[name]
    ended = run_train(tmp_path, n_ranks, mode="zero2", timeout_s=3,
                      plant=partial(in_update, 2, n_ranks - 1, *planted))
    for actual, code in zip(ended.codes, codes):
        assert code in (actual, None), ended
    line = r"train\.py: rank 0 failed in step [23]: \w+: .*\n\Z"
    assert re.search(line if n_ranks == 1 else rf"\A{line}", ended.stderr[0]), ended
    text = ended.stderr[-1]
    assert ("Traceback" in text and 'fail\n    raise RuntimeError' in text) == is_bug, text


def fail_in_init():
    """Plant a bug in the model, before the first step."""
    model.GPT.init_weights = partial(fail, "planted")


def test_a_bug_in_a_model_is_no_mistake(tmp_path):
    ended = run_train(tmp_path, plant=fail_in_init)
    assert ended.codes == [1] and "Traceback" in ended.stderr[0], ended


# What a checkpoint is written by.
CALLS = [(os, name) for name in ("fsync", "rename", "replace", "open", "symlink", "unlink",
                                 "rmdir", "mkdir")] + [(io, "open"), (builtins, "open")]


def die_in_save(n, log):
    """Plant a kill -9 before the n-th of these calls from the beginning of the second checkpoint
    on, and a log of their names, written before the third update."""
    names = []
    is_on = [False]
    n_saves = itertools.count(1)
    save = dcp.save
    real_open = open

    def watched(name, real):
        def call(*arguments, **options):
            if is_on[0]:
                names.append(name)
                if len(names) == n:
                    signal.raise_signal(signal.SIGKILL)
            return real(*arguments, **options)

        return call

    def watched_save(*arguments, **options):
        is_on[0] = next(n_saves) == 2
        return save(*arguments, **options)

    def end():
        is_on[0] = False
        with real_open(log, "w") as file:
            json.dump(names, file)

    if this_rank() == 0:
        for owner, name in CALLS:
            setattr(owner, name, watched(name, getattr(owner, name)))
        dcp.save = watched_save
        in_update(3, 0, act_without_arguments, end)


@pytest.mark.parametrize("n_ranks, mode, n_places", [(1, "single", 6), (1, "single", 1000),
                                                     (2, "zero2", 1000)])
def test_a_kill_anywhere_in_a_save(n_ranks, mode, n_places, tmp_path):
    """After kill -9 before any call by which a checkpoint is written, gets its name and pushes out
    an older one, a run goes on to the bits of an undisturbed one, with no line or file too many."""
    options = dict(mode=mode, save_interval=1, keep_last=1, resume="auto")
    log = tmp_path / "names"
    plant = partial(die_in_save, None, log)
    expected = finish(tmp_path / "alone", n_ranks, plant=plant, **options)["param_sha256"]
    names = json.loads(log.read_text())
    assert len(names) > 15 and {"fsync", "rename", "replace", "open"} <= {*names}, names

    def try_out(place):
        out = tmp_path / str(place)
        plant = partial(die_in_save, place, tmp_path / "unread")
        killed = run_train(out, n_ranks, plant=plant, **options)
        assert killed.codes[0] == -signal.SIGKILL, f"{names[place - 1]}: {killed}"
        actual = finish(out, n_ranks, **options)["param_sha256"]
        as_undisturbed(out, actual, expected)

    places = [*range(1, len(names) + 1)]
    for place in places[::max(1, len(places) // n_places)]:
        try_out(place)


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

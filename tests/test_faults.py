"""train.py: faults of disks and machines.

After each, metrics.jsonl has every step once, and the bits are those of an undisturbed run.
"""

import itertools
import os
import pathlib
import pkgutil
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from tests.params import full
from tests.runs import ask, finish, in_update, lines_of, run_train, saved, write_line

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


def run_over_frozen(folder, out, function, n, options, others):
    """Start a run with options that freezes; let a run with others' options end meanwhile in the
    same out_dir; wake it up -> how it ends."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run_train, out, plant=partial(freeze, function, n, folder), **options)
        number = folder / "frozen"
        while not (number.exists() and number.read_text()) and not future.done():
            time.sleep(0.01)
        try:
            finish(out, **others)
        finally:
            os.kill(int(number.read_text()), signal.SIGCONT)
    return future.result()


# Where a process freezes: as it begins to write a checkpoint, in its second update, as it writes a
# line, as it renames a checkpoint, and, when it resumes, as it moves aside what is newer.
FROZEN = {"save": ("torch.distributed.checkpoint.save", 2),
          "update": ("torch.optim.AdamW.step", 2), "line": ("model.GPT.flops_per_token", 2),
          "publish": ("pathlib.Path.rename", 2), "rewind": ("time.strftime", 1)}


@pytest.mark.parametrize("fault", ["power cut", "full disk", "full log", "frozen in update",
                                   "frozen in save", "frozen in publish", "frozen in rewind",
                                   full("frozen in line")])
def test_faults_cost_no_line(fault, tmp_path):
    """After a power cut, which takes what was not synced; after a full disk, that took half a line;
    with the log on a full disk; and when a process that was frozen wakes up in a later run, which
    it leaves as it is, and says so."""
    options = dict(save_interval=1, resume="auto", max_steps=STEPS)
    out = tmp_path / "out"
    expected = finish(tmp_path / "alone", **options)["param_sha256"]
    metrics = out / "metrics.jsonl"
    if fault == "power cut":
        run = run_train(out, plant=partial(cut_power, metrics, 3), **options)
        assert run.codes == [-signal.SIGKILL], run
        found = finish(out, **options)["param_sha256"]
    elif fault == "full disk":
        plant = partial(fill_disk, metrics, 2)
        result = finish(out, fact="step 2 is not yet in the metrics", plant=plant, **options)
        found = result["param_sha256"]
    elif fault == "full log":
        finish(out, plant=full_log, **options)
        found = ask(out / f"step_{STEPS:08d}")["param_sha256"]
    else:
        function, n = FROZEN[fault.split()[-1]]
        if fault == "frozen in line":  # then no checkpoint is due when it wakes up
            options["save_interval"] = 100
        others = dict(options)
        if fault == "frozen in rewind":  # where it was to move aside what is newer
            finish(out, **options)
            others["max_steps"] = STEPS + 1
            expected = finish(tmp_path / "alone", **others)["param_sha256"]
            options["resume"] = out / "step_00000003"
        run = run_over_frozen(tmp_path, out, function, n, options, others)
        assert run.codes[0] in (1, 2) and "a later run has begun" in run.stderr[0], run
        assert "Traceback" not in run.stderr[0], run
        assert f" {STEPS}/{STEPS} " not in run.stdout[0], f"it went on: {run.stdout[0]}"
        found = ask("auto", out_dir=out)["param_sha256"]
    entries = lines_of(metrics)
    n_steps = STEPS + 1 if fault == "frozen in rewind" else STEPS
    assert [entry["step"] for entry in entries] == [*range(1, n_steps + 1)], entries
    assert found == expected, f"other bits after {fault}"
    left = [path.name for path in out.glob(".*")]
    assert not left, f"left over: {left}"


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
    """Tokens, checkpoints, and the metrics of a run that goes back to an earlier checkpoint."""
    out = tmp_path / "out"
    log = tmp_path / "early"
    plant = partial(note_early_renames, log)
    finish(out, save_interval=1, plant=plant)
    finish(out, save_interval=1, resume=out / "step_00000003", plant=plant)
    assert not log.exists(), f"renamed before they were synced: {lines_of(log)}"
    assert [*out.glob("tokens-*")] and saved(out)[-2:] == [3, 4]

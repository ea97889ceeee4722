"""plugin.py: how tests on ranks fail. An inner pytest runs tests that do."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations, product

import pytest

from tests.params import ROOT, sample_of

BROKEN = '''
import os, signal, sys, threading, time
import pytest
import torch
import torch.distributed as dist

def rank():
    return dist.get_rank()

@pytest.mark.ranks(2)
def test_dies():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.ranks(2)
def test_all_die():
    os._exit(0)

@pytest.mark.ranks(2)
@pytest.mark.limit(1)
def test_hangs():
    if rank() == 1:
        time.sleep(60)

@pytest.mark.ranks(3)
def test_raises_alone():
    if rank() == 2:
        raise ValueError("planted\\nin lines")

@pytest.mark.ranks(3)
def test_raises_alike():
    assert False, "on all"

@pytest.mark.ranks(2)
def test_raises_differently():
    assert rank() < 0, f"I am {rank()}"

@pytest.mark.ranks(2)
def test_exits():
    sys.exit(3 if rank() == 0 else None)

@pytest.mark.ranks(2)
def test_asserts_without_words():
    assert rank() == 5

@pytest.mark.ranks(2)
def test_is_skipped():
    pytest.skip("for want of a reason")

@pytest.mark.ranks(2)
def test_is_skipped_without_words():
    pytest.skip()

@pytest.mark.ranks(2)
def test_is_expected_to_fail(x=3):
    pytest.xfail("as it does")

@pytest.mark.ranks(2)
def test_ends_the_group():
    dist.destroy_process_group()

@pytest.mark.limit(seconds=0.5)
def test_hangs_without_ranks():
    time.sleep(60)

@pytest.mark.ranks(2)
def test_is_warned():
    if rank() == 1:
        torch.nn.functional.softmax(torch.ones(2))  # without dim

def test_is_warned_without_ranks():
    torch.nn.functional.softmax(torch.ones(2))

@pytest.mark.ranks(2)
def test_prints():
    print("seen on a rank")
    assert rank() == 0, "for its output"

@pytest.mark.ranks(2)
def test_is_quiet():
    if rank() == 1:
        threading.Timer(0.2, os._exit, [0]).start()

def test_waits():
    time.sleep(1)

@pytest.mark.ranks(2)
def test_finds_a_rank_gone():
    pass

@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("word", ["a b"])
def test_passes(word, W):
    assert dist.get_world_size() == W and word == "a b"
'''
# What the inner pytest says of each.
EXPECTED = {
    "test_dies[W2]": r"rank 1: its process has died$",
    "test_all_die[W2]": r"ranks 0, 1: its process has died$",
    "test_hangs[W2]": r"rank 1: killed after 1 s, its limit$",
    "test_raises_alone[W3]": r"rank 2: ValueError: planted in lines \(test_raises_alone, test_x.py",
    "test_raises_alike[W3]": r"ranks 0, 1, 2: on all \(test_raises_alike, test_x.py:\d+\)$",
    "test_raises_differently[W2]": r"rank 0: I am 0 .*\n +rank 1: I am 1 .*$",
    "test_exits[W2]": r"rank 0: SystemExit: 3 .*\n +rank 1: SystemExit: ",
    "test_asserts_without_words[W2]": r"ranks 0, 1: assert rank\(\) == 5 \(",
    "test_hangs_without_ranks": r"TimeoutError: the limit of this test, 0.5 s, is over",
    "test_is_warned[W2]": r"rank 1: UserWarning: Implicit dimension choice for softmax",
    "test_is_warned_without_ranks": r"UserWarning: Implicit dimension choice for softmax has been",
    "test_finds_a_rank_gone[W2]": r"a rank has died since the check before$",
    "test_ends_the_group[W2]": r"ranks 0, 1: this test has destroyed the process group \(",
    "test_prints[W2]": r"seen on a rank\nseen on a rank$"}


def copy_of_conftest(folder, tests):
    """A folder in which pytest runs these tests with our plugin.py."""
    (folder / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "frozen.py", "params.py", "plugin.py", "ranks.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests/test_x.py").write_text(tests)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return dict(cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)


def assert_all_have_ended(folder):
    """Assert that no process is left that was started in a folder."""
    deadline = time.monotonic() + 30
    while True:
        left = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                is_ours = os.readlink(path / "cwd").startswith(str(folder))
                if is_ours and " Z " not in (path / "stat").read_text():
                    left.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it has ended, or is not to be looked at
        if not left:
            return
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)


def test_failures_are_told(tmp_path):
    """A rank that raises, dies, hangs or is warned by torch fails its test by name, in time, in a
    line that says which rank and where; what several ranks say is said once. All other tests
    run."""
    run = copy_of_conftest(tmp_path, BROKEN)
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "-v"], **run)
    for name, fact in EXPECTED.items():
        assert f"{name} FAILED" in done.stdout, done.stdout
        report = re.search(rf"^_+ {re.escape(name)} _+\n(.*?)^[_=]", done.stdout, re.M | re.S)
        assert len(re.findall(fact, report[1], re.M)) == 1, f"no {fact}: {report[1]}"
    assert "test_is_skipped[W2] SKIPPED (for want of a reason)" in done.stdout, done.stdout
    assert f"{len(EXPECTED)} failed, 4 passed, 2 skipped, 1 xfailed" in done.stdout, done.stdout
    assert re.search(r"SKIPPED .* tests/test_x.py:\d+: for want", done.stdout), done.stdout
    assert "test_passes[a_b-W2] PASSED" in done.stdout, done.stdout
    assert_all_have_ended(tmp_path)


@pytest.mark.full
def test_worker_that_dies_is_named(tmp_path):
    """A worker of xdist that dies fails its test; the rest runs, and no process is left."""
    run = copy_of_conftest(tmp_path, '''
import os, signal, time
import pytest

@pytest.mark.parametrize("n", range(20))
@pytest.mark.ranks(2)
def test_passes(n):
    time.sleep(0.01)

def test_kills_its_worker():
    os.kill(os.getpid(), signal.SIGKILL)
''')
    done = subprocess.run([sys.executable, "-m", "pytest"], **run)
    assert re.search(r"worker '\w+' crashed while running .*test_kills_its_worker", done.stdout), (
        done.stdout)
    assert "1 failed, 20 passed" in done.stdout, done.stdout
    assert_all_have_ended(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_is_left(n_workers, name, tmp_path):
    """When pytest is interrupted or killed, its ranks end, too."""
    run = copy_of_conftest(tmp_path, '''
import pathlib, time
import pytest

@pytest.mark.ranks(2)
def test_takes_long():
    pathlib.Path("begun").touch()
    time.sleep(60)
''')
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-n", str(n_workers)], **run)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signal.Signals[name])
    process.wait(60)
    assert process.returncode != 0
    assert_all_have_ended(tmp_path)


# ---- samples


def pairs_of(row):
    return set(combinations(sorted(row.items()), 2))


def test_samples_have_all_values():
    """Each value once, or each pair of values. Where there is a choice values take turns, but W is
    the smallest."""
    rows = [dict(a=a, b=b, W=W) for a, b, W in product("pqrst", "xy", (2, 3))]
    sample = [rows[i] for i in sample_of(rows)]
    assert [row["a"] for row in sample] == [*"pqrst"]
    assert [row["b"] for row in sample] == [*"xyxyx"]
    assert [row["W"] for row in sample] == [2, 3, 2, 2, 2]
    sample = [rows[i] for i in sample_of(rows, 2)]
    assert set().union(*map(pairs_of, sample)) == set().union(*map(pairs_of, rows))
    assert len(sample) <= 12, "of 20"
    assert len(sample_of(rows, of=lambda row: dict(b=row["b"]))) == 2


ROWS = '''
import pytest

@pytest.mark.sample
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("a", ["ant", "bee", pytest.param("cat", marks=pytest.mark.full)])
def test_rows(a):
    pass

@pytest.mark.full
def test_alone():
    pass
'''
ALL_ROWS = ["ant-W2", "ant-W3", "bee-W2", "bee-W3", "cat-W2", "cat-W3"]


@pytest.mark.parametrize("words, rows", [
    ([], ["ant-W2", "bee-W3"]),
    (["--full"], [*ALL_ROWS, "alone"]),
    (["-k", "rows"], ["ant-W2", "ant-W3", "bee-W2", "bee-W3"]),
    (["tests/test_x.py::test_rows[ant-W3]"], ["ant-W3"]),
    (["tests/test_x.py::test_rows[cat-W3]"], ["cat-W3"])],
    ids=["nothing", "full", "a_name", "an_id", "an_id_of_full"])
def test_samples_run(words, rows, tmp_path):
    """Without --full, unless -k chooses rows, or one is named by its whole id."""
    run = copy_of_conftest(tmp_path, ROWS)
    words = ["--collect-only", "-q", "-n", "0", *words]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], **run)
    actual = re.findall(r"^tests/test_x.py::test_(?:rows\[)?([^]\n]+)", done.stdout, re.MULTILINE)
    assert actual == rows, done.stdout

"""verify.py: its rows, what it says of broken code, and its words."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import verify
from tests.common import ROOT, raises
from tests.runs import run_alone, run_train

FILES = ("verify.py", "oracle.py", "model.py", "ddp.py", "zero.py")
TASKS = list(verify.TASKS)


def rows():
    """`python verify.py` has all. Here are those of our wrappers on 3 ranks, and of two micro-steps
    where there are such; and FSDP2's, which are on 2 ranks."""
    for _, W, check, arguments in verify.rows(TASKS, is_own=False):
        words = [str(value) for value in arguments if not isinstance(value, list)]
        is_ours = W == 3 and words[0] in verify.OURS and words[-1] != "1"
        if is_ours or check is verify.bits_of_fsdp2_in_bf16:
            yield pytest.param(W, check, arguments, id="-".join([check.__name__, f"W{W}", *words]))


@pytest.mark.parametrize(("W", "check", "arguments"), [*rows()])
def test_rows(W, check, arguments):
    verify.run(W, check, *arguments)


# A file, what stands there, what is put there, the row that notices, and what it says.
BREAKS = [
    ("ddp.py", "for addend in addends[1:]:", "for addend in addends[2:]:", "W=3 ddp 1",
     "gradient of .* has norm 0"),
    ("ddp.py", "addends = [earlier, *addends]", "pass", "W=2 zero2 2", "gradient of .* norm 0"),
    ("zero.py", "own.copy_(self.chunk)", "pass", "W=2 zero3 1", "has nan: it was read before"),
    ("zero.py", "self.chunk = self.chunk.clone()", "pass", "paper W=3 zero3 1",
     "bytes a parameter held, expected 5.333"),
    ("oracle.py", "total = total + addend", "total = total - addend", "oracle W=2 zero1",
     "the hash is .*, that of oracle.py is ")]


@pytest.mark.parametrize(("file", "right", "wrong", "row", "fact"), BREAKS)
def test_broken_code(file, right, wrong, row, fact, tmp_path):
    """In a folder of copies: these files are enough."""
    for name in FILES:
        text = (ROOT / name).read_text()
        if name == file:
            assert text.count(right) == 1, f"{text.count(right)} places"
            text = text.replace(right, wrong)
        (tmp_path / name).write_text(text)
    run = run_train(None, plant=partial(run_alone, tmp_path, "verify.py", row), argv=[])
    assert run.codes == [1], run
    assert re.search(f"FAILED .*{row}: .*{fact}", run.stdout[0]), run.stdout[0]


OWN = """
import torch
import torch.distributed as dist
from model import net

module = net

def units(module):
    return [module[0], module[2]]

def loss(model, step, number):
    x = torch.ones(2, 4) * (number + 1)
    {more}
    return model(x).square().mean()
"""
MODEL = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
"""


@pytest.mark.parametrize(("more", "words", "status", "fact"), [
    ("", ["--module", "own.py", "W=1", "W=2"], 0, "\n19 passed, 0 failed"),
    ("x = x + (dist.get_world_size() == 2 and dist.get_rank() == 1)", ["--module", "own.py", "W=2"],
     1, "FAILED  bits_of_one_process W=2 ddp 1: rank "),
    ("raise OSError('gone')", ["--module", "own.py"], 2, "own.py: rank 0: OSError: gone (loss, "),
    ("return model[0](x).square().mean()", ["--module", "own.py"], 2, "does not use 2.weight: "),
    ("x = torch.nn.functional.dropout(x)", ["--module", "own.py"], 2, "does the loss seed its "),
    ("x = x / (number - 1)", ["--module", "own.py"], 2, "has nan in one process, too"),
    ("", ["--module", "none.py"], 2, "none.py: rank 0: FileNotFoundError"),
    ("", ["--module", "model.py"], 2, "it has no function module()"),
    ("", ["--device", "abacus"], 2, "--device abacus is not on this machine: choose cpu"),
    ("", ["one_process W=9"], 2, "no row has a name with one_process W=9"),
    ("", ["bits_of_one_process W=1 zero1 1"], 0, "\n1 passed, 0 failed"),
    ("", ["W=2 zero2", "--list"], 0, "\nbits_of_one_process W=2 zero2 2\n")])
def test_words(more, words, status, fact, tmp_path, monkeypatch, capfd):
    """A module of a file, whose folder has a model.py of its own; names of rows; --list; and
    mistakes, which are a line."""
    (tmp_path / "own.py").write_text(OWN.format(more=more))
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["verify.py", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C is pytest's
    try:
        actual = verify.main()
    except SystemExit as ended:
        actual = ended.code
    printed, errors = capfd.readouterr()
    assert actual == status and fact in printed + errors, printed + errors
    assert status < 2 or len(errors.splitlines()) == 1, errors


OTHER = """
import torch

def module():
    return {module}

def units(module):
    return {units}

def loss(model, step, number):
    return model(torch.ones(2, 4)).square().mean()
"""


@pytest.mark.parametrize(("module", "units", "fact"), [
    ("torch.nn.Tanh()", "[]", "no parameters to train"),
    ("torch.nn.Linear(4, 4)", "[]", r"write units\(module\)"),
    ("torch.nn.Linear(4, 4, dtype=torch.complex64)", "[module]", "weight is torch.complex64")])
def test_modules_that_no_row_can_tell(module, units, fact, tmp_path):
    (tmp_path / "own.py").write_text(OTHER.format(module=module, units=units))
    raises(verify.Failure, fact, verify.run, 1, verify.try_out, f"{tmp_path}/own.py")


KILLED = """
import os
import time

print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all(number, tmp_path):
    """Ranks, too, and the folder where they meet."""
    (tmp_path / "own.py").write_text(KILLED)
    words = [sys.executable, ROOT / "verify.py", "--module", "own.py"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as started:
        rank = int(started.stdout.readline())
        started.send_signal(number)
        assert started.wait(20) == 128 + number
    raises(ProcessLookupError, "", os.kill, rank, 0)
    assert [*tmp_path.iterdir()] == [tmp_path / "own.py"]


def on_rank_1(act, others_wait=False):
    if dist.get_rank() == 1:
        act()
    if others_wait:
        dist.barrier()
    return dist.get_rank()


def fail():
    raise ZeroDivisionError("planted\nin lines")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(60)


def exit_early():
    sys.exit(3)


FAILED = r"^rank 1: ZeroDivisionError: planted in lines \(fail, test_verify.py:\d+\)$"
DIED = "^rank 1 has died, with status -9$"


@pytest.mark.parametrize(("act", "others_wait", "fact"), [
    (fail, False, FAILED), (fail, True, FAILED), (die, False, DIED), (die, True, DIED),
    (hang, False, "^rank 1 hangs: killed after 2 s$"),
    (hang, True, "^rank [01] hangs: killed after 2 s$"),
    (exit_early, True, r"^rank 1: SystemExit: 3 \(exit_early")])
def test_ranks_that_fail(act, others_wait, fact):
    """They fail by name, in time, whatever others say of it."""
    begun_s = time.monotonic()
    raises(verify.Failure, fact, verify.run, 2, on_rank_1, act, others_wait, seconds=2)
    assert time.monotonic() - begun_s < 6


def test_ranks_answer():
    assert verify.run(3, on_rank_1, print) == [0, 1, 2]
    raises(verify.Failure, "^rank 0: .*pickle", verify.run, 1, lambda: lambda: 0)


def test_differences_are_told():
    """The first tensor that differs, and how."""
    t = torch.tensor([1.0, 2.0])
    expected = dict(a=t, b=t)
    for b, fact in ((2 * t, "w: 1 of 2 tensors differ; the first, b, has norm 2.0000 x expected"),
                    (t * torch.nan, "b, has nan"), (t[:1], "is .*1.* expected is .*2"),
                    (t.double(), "float64, expected is .*float32")):
        raises(AssertionError, fact, verify.compare, expected, dict(a=-0.0 + t, b=b), "w")
    raises(AssertionError, "{'b'}", verify.compare, expected, dict(a=t))
    verify.compare(dict(a=torch.zeros(2)), dict(a=-torch.zeros(2)))
    verify.compare(expected, dict(a=t + 1e-6, b=t), is_equal=verify.close)

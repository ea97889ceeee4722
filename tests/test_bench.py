"""bench/: programs that bench.sh does not run, and tables of results that are rare."""

import json
import re
import runpy
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import zero
from tests.params import ROOT
from tests.runs import run_train


def run_program(program, words, plant):
    """Plant a program of bench/, with words as its arguments, in place of train.py."""
    plant()
    sys.argv = [program, *words]
    runpy.run_path(str(ROOT / "bench" / program), run_name="__main__")
    sys.exit()


def nothing():
    pass


def silu_that_varies():
    """Plant what a kernel does that adds in an order of its own."""
    real = F.silu

    def silu(x):
        return real(x) * (1 + 1e-6 * torch.rand(()))

    F.silu = silu


def mean_for_a_sum():
    """Plant a Zero3 that averages, although it was told not to."""
    zero.Zero3.set_gradient_divide_factor = lambda model, factor: None


@pytest.mark.parametrize("plant, wrong", [(nothing, ""), (silu_that_varies, "abc"),
                                          (mean_for_a_sum, "b")])
def test_where_bits_differ(plant, wrong):
    """It answers each question on two ranks, and finds what was planted. In float64 norms of shards
    may differ, and so may a fused AdamW."""
    program = partial(run_program, "where_bits_differ.py", ["--model", "tiny", "--device", "cpu"],
                      plant)
    run = run_train(None, 2, plant=program, argv=[])
    assert run.codes == [0, 0], run
    verdicts = dict(re.findall(r"^verdict (\w)  (.*)$", run.stdout[0], re.MULTILINE))
    assert list(verdicts) == ["a", "b", "c", "d", "e", "f"], run.stdout[0]
    for question in "abce":
        is_equal = verdicts[question] == "all equal"
        assert is_equal == (question not in wrong), f"{question}: {run.stdout[0]}"
    assert "foreach" not in verdicts["f"], verdicts["f"]
    assert "DIFFER" not in run.stdout[1], "only rank 0 prints"


def test_shared_devices_have_no_times(tmp_path):
    """Of ranks that have shared a device the tables have hashes and bytes, but no times."""
    results = tmp_path / "out" / "bench" / "gpu.jsonl"
    results.parent.mkdir(parents=True)
    lines = []
    for W, step_ms in ((1, 111.0), (2, 222.0)):
        lines.append(dict(label="hashes", row="zero3", W=W, n_devices=1, step_ms=step_ms,
                          tokens_per_sec=10.0, peak_mem_bytes=3e6, bytes_per_param=16 / W,
                          param_sha256="0123456789"))
    results.write_text("\n".join(json.dumps(line) for line in lines))
    done = subprocess.run([sys.executable, ROOT / "bench" / "tables.py", "gpu"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert "take turns" in done.stdout and "111" in done.stdout, done.stdout + done.stderr
    assert "222" not in done.stdout and "| zero3 | `01234567` | `01234567` |" in done.stdout
    assert re.search(r"^\| hashes \| zero3 \| 2 \| - .* 8\.00 \| 8\.00 \|$", done.stdout, re.M)

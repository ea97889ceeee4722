"""bench.sh: each of its commands, tiny, its tables and pictures; what it refuses, how it stops. And
programs of bench/ that it does not run."""

import importlib.util
import json
import math
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from bench import __main__ as bench_main
from bench.commands import COMMANDS, on_devices
from bench.pictures import smoothed
from bench.tables import print_tables
from dropin import zero
from model import GPT, GPTConfig
from tests.common import on_meta
from tests.forks import run_python, started_python
from tests.common import ROOT
from tests.runs import run_train

SIZES = dict(n_layer=3, n_head=1, n_embd=64, block_size=16)
TINY = ["--max_steps=3", "--dataset=model.py", *(f"--{name}={n}" for name, n in SIZES.items())]
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None,
                                      reason="pip install matplotlib")
needs_link = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None,
                                reason="a link needs root, and ip of iproute2")


@pytest.fixture
def tree(tmp_path):
    """A copy of all that bench.sh runs, without results."""
    for path in (*ROOT.glob("*.py"), ROOT / "bench.sh"):
        shutil.copy(path, tmp_path / path.name)
    for name in ("bench", "dropin", "extras", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "judged")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    (tmp_path / "assets").mkdir()
    return tmp_path


def bench(tree, *words, status=0):
    """Run what bench.sh runs, to its end."""
    return ended(run_python(["-m", "bench", *words], tree), status)


def bench_sh(tree, *words, status=0, **options):
    """Run bench.sh itself, which takes longer."""
    done = subprocess.run(["./bench.sh", *words], cwd=tree, capture_output=True, text=True,
                          **options)
    return ended(done, status)


def ended(done, status):
    assert done.returncode == status, done.stdout + done.stderr
    return done


def tiny(tree, command, *words, start=bench, **options):
    """A tiny run of a command -> (the lines of its tables as {column: cell}, its folder)."""
    done = start(tree, command, "--rounds=1", *TINY, *words, **options)
    [page] = (tree / "out" / "bench").glob(f"{command}_*.md")
    assert page.read_text() == done.stdout
    head = done.stdout.splitlines()[0]
    assert head.startswith(f"`./bench.sh {command} ") and re.search(r"took \d+ min \d+ s$", head)
    assert f"torch {torch.__version__.split('+')[0]}" in head and "cores of" in head, head
    return rows_of_tables(done.stdout), page.with_suffix("")


def rows_of_tables(text):
    """Markdown tables, one after the other -> [{column: cell}]."""
    rows = []
    head = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        elif cells[0] != "---":
            rows.append(dict(zip(head, cells)))
    return rows


def value(cell):
    """A number of a table, without its quartiles."""
    return float(cell.split(" ")[0].replace(",", ""))


def find(rows, **wanted):
    """The one row that has these cells."""
    [actual] = [row for row in rows if wanted.items() <= row.items()]
    return actual


# -------------------------------------------------------------------------------------------------
# each command


def parameters():
    """Of the tiny model: all, and those that stage 3 gathers once more in the backward."""
    gpt = on_meta(GPT, GPTConfig(vocab_size=257, **SIZES))
    every = sum(p.numel() for p in gpt.parameters())
    # The last two blocks are still whole in the backward, and so is what belongs to no block.
    again = 0
    for block in gpt.blocks[:-2]:
        again += sum(p.numel() for p in block.parameters())
    return every, again


def test_modes(tree):
    """Bytes that a rank holds and sends are those of the formulas; columns agree with each other;
    an hour has its price. The tables can be printed again, from the newest file as from a file."""
    rows, folder = tiny(tree, "modes", "--worlds=2", "--modes=ddp zero3", "--price=3",
                        "--epoch_tokens=2e9")
    every, again = parameters()
    for mode, held, elements in (("ddp", 16, 2 * every), ("zero3", 8, 2 * every + again)):
        row = find(rows, mode=mode, W="2")
        assert value(row["bytes a parameter"]) == pytest.approx(held, rel=0.01)
        assert value(row["formula"]) == held
        sent_mb = elements / 2 * 4 / 1e6
        assert value(row["MB sent"]) == pytest.approx(sent_mb, rel=0.02), mode
        step_ms, waited_ms = value(row["step ms (quartiles)"]), value(row["waited ms"])
        assert value(row["computed ms"]) == pytest.approx(step_ms - waited_ms, abs=1)
        hours = 2 * 1e9 / value(row["tokens/s"]) / 3600
        assert value(row["device hours per 10^9 tokens"]) == pytest.approx(hours, rel=0.02)
        price = row["$ for 2,000,000,000 tokens, at 3.0 a device hour"]
        assert value(price) == pytest.approx(6 * hours, rel=0.02)
    text = folder.with_suffix(".md").read_text()
    for what in ("modes", folder.with_suffix(".jsonl")):
        assert bench(tree, "table", what).stdout == text
    assert "at 5.0 a device hour" in bench(tree, "table", "modes", "--price=5").stdout
    pytest.importorskip("matplotlib", reason="pip install matplotlib, for the picture")
    words = [sys.executable, "bench/pictures.py", "modes"]
    subprocess.run(words, cwd=tree, check=True, capture_output=True)
    assert ">zero3<" in (tree / "assets" / "modes.svg").read_text()


def test_bits(tree):
    """Hashes are equal where they have to be. A row that fails says why, and the others are in the
    table."""
    with (tree / "extras" / "torchs.py").open("a") as file:
        file.write("\n\ndef wrap(*_):\n    raise ValueError('planted')\n")
    rows, _ = tiny(tree, "bits", "--worlds=2", "--modes=zero2 torch-ddp zero3", status=1)
    hashes = {row["mode"]: row["12 micro batches, W=2"] for row in rows}
    assert list(hashes) == ["zero2", "zero3"] and len(set(hashes.values())) == 1, hashes
    assert re.fullmatch(r"`[0-9a-f]{8}`", hashes["zero2"])
    [text] = [path.read_text() for path in (tree / "out" / "bench").glob("*.md")]
    assert re.search("^Failed: torch-ddp, W=2 .*ValueError: planted$", text, re.MULTILINE), text


def test_muon(tree):
    """Muon keeps one average where AdamW keeps two, of the matrices of blocks. (By bench.sh itself,
    and torchrun itself.)"""
    rows, _ = tiny(tree, "muon", "--worlds=2", "--modes=zero1", start=bench_sh)
    adamw = value(find(rows, mode="zero1")["bytes a parameter"])
    muon = value(find(rows, mode="zero1 --optimizer muon")["bytes a parameter"])
    assert adamw == pytest.approx(12, rel=0.01) and 10 < muon < 11.5, (adamw, muon)


@needs_matplotlib
def test_memory(tree):
    """What a rank holds after a step, and parameters by the trace, are the formulas' for each W."""
    rows, folder = tiny(tree, "memory", "--worlds=1 2")
    for W in (1, 2):
        whole = dict(ddp=4, zero1=4, zero2=4, zero3=4 / W)
        for mode, formula in dict(ddp=16, zero1=8 + 8 / W, zero2=4 + 12 / W, zero3=16 / W).items():
            [row] = [row for row in rows if "after a step" in row and row["mode"] == mode
                     and row["W"] == str(W)]
            assert value(row["after a step"]) == pytest.approx(formula, rel=0.02)
            assert value(row["formula"]) == pytest.approx(formula, abs=0.01)
            assert value(row["optimizer"]) == pytest.approx(8 if mode == "ddp" else 8 / W, rel=0.02)
            assert value(row["parameters"]) >= 0.98 * whole[mode], row
            parts = [value(row[name]) for name in ("parameters", "gradients", "optimizer")]
            assert value(row["at most, bytes a parameter"]) == pytest.approx(sum(parts), abs=0.03)
    picture = (folder / "memory.svg").read_text()
    assert "held by one of 2 ranks" in picture and "ZeRO-3" in picture


def test_scaling(tree):
    """W separate processes are what efficiency is over; they send nothing, and each is a device."""
    rows, folder = tiny(tree, "scaling", "--worlds=1 2", "--modes=single zero3")
    for label, n in (("weak", 2), ("strong", 1)):
        alone = find(rows, **{"": label, "mode": "single", "W": "2"})
        together = find(rows, **{"": label, "mode": "zero3", "W": "2"})
        assert alone["MB sent"] == "0.00" and value(together["MB sent"]) > 0
        times = [value(row["step ms (quartiles)"]) for row in (alone, together)]
        assert value(together["efficiency"]) == pytest.approx(times[0] / times[1], rel=0.05)
        hours = 1e9 / value(alone["tokens/s"]) / 3600
        assert value(alone["device hours per 10^9 tokens"]) == pytest.approx(hours, rel=0.02)
        log = (folder / f"{label}, single, W=2, round 1.log").read_text()
        assert log.count("single, W = 1") == 2, "two processes that know nothing of each other"
    assert folder.with_suffix(".md").read_text().count("xychart-beta") == 2


def namespaces():
    """Those that links have made; those of other processes of this machine, too."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "nanozero" in line}


@needs_link
@pytest.mark.parametrize("modes", [["--modes=ddp"], None])
def test_link(modes, tree):
    """Over a link a step takes at least as long as the bytes that leave a host. The hierarchical
    hook is there on two ranks of each host, beside DDP."""
    before = namespaces()
    rows, _ = tiny(tree, "link", "20mbit", "--n_embd=96", *(modes or []))
    expected = {("ddp", "2"), ("ddp", "4")}
    if modes is None:
        expected.add(("ddp --comm_hook hierarchical --node_size 2", "4"))
    assert expected <= {(row["mode"], row["W"]) for row in rows}, rows
    if modes is None:
        assert len(rows) == 11, rows
    row = find(rows, mode="ddp", W="2")
    ms = value(row["MB sent"]) * 8e6 / 20e6 * 1e3
    assert value(row["step ms (quartiles)"]) > 0.8 * ms > 100, row
    assert processes_of(tree) == [] and namespaces() <= before


  # its runs are those of test_modes, but for the size of a bucket
@pytest.mark.parametrize("rates", [[], pytest.param(["1gbit"], marks=[needs_link, pytest.mark.full],
                                                     id="over_a_link")])
def test_buckets(rates, tree):
    """The best size is that of the shortest step."""
    rows, folder = tiny(tree, "buckets", "--modes=ddp", *rates)
    actual = [row for row in rows if "best" in row]
    assert [row[""] for row in actual] == ["loopback", *rates]
    for row in actual:
        times = {}
        for size in ("1", "4", "25", "100"):
            times[f"{size} MB"] = value(row[f"{size} MB: step ms"])
        assert times[row["best"]] == min(times.values()), row
    pytest.importorskip("matplotlib", reason="pip install matplotlib, for the picture")
    words = [sys.executable, "bench/pictures.py", "buckets", "--into", str(folder)]
    subprocess.run(words, cwd=tree, check=True, capture_output=True)
    assert "loopback, W = 2" in (folder / "buckets.svg").read_text()


def test_precision(tree):
    """Differences are from the same mode's fp32; each row's metrics are kept. fp16 skips the steps
    in which its scaled gradients are not finite, as its metrics say."""
    rows, folder = tiny(tree, "precision", "--modes=single", "--eval_steps=2")
    table = [row for row in rows if "precision" in row]
    losses = {}
    for row in table:
        name = f"single {row['precision']}, W=1, round 1"
        lines = (folder / f"{name}.metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        losses[row["precision"]] = metrics[-1]["loss"]
        assert len(metrics) == 3
        assert int(row["skipped steps"]) == sum(line["skipped"] for line in metrics)
        assert row["training loss"] == f"{metrics[-1]['loss']:.4f}"
    assert list(losses) == ["--dtype fp32", "--dtype bf16", "--dtype fp16"]
    for row in table:
        over = losses[row["precision"]] - losses["--dtype fp32"]
        assert row["over fp32"] != "-" and math.isfinite(value(row["validation loss"]))
        text = (folder.with_suffix(".md")).read_text()
        assert f"| {row['training loss']} | {over:+.4f} |" in text
    assert losses["--dtype bf16"] != losses["--dtype fp32"]
    pytest.importorskip("matplotlib", reason="pip install matplotlib, for the picture")
    words = [sys.executable, "bench/pictures.py", "precision", "--into", str(folder)]
    subprocess.run(words, cwd=tree, check=True, capture_output=True)
    assert "single dtype fp16" in (folder / "precision.svg").read_text()


def test_overhead(tree):
    """A program's own table is printed, and kept with a head."""
    done = bench(tree, "overhead", "--worlds=1", "--steps=1")
    assert "| W = 1 | kernels |" in done.stdout
    [page] = (tree / "out" / "bench").glob("overhead_*.md")
    head, _, table = page.read_text().partition("\n\n")
    assert "./bench.sh overhead --worlds=1" in head and table == done.stdout


@needs_matplotlib
def test_timeline(tree):
    """A picture for each mode, in the folder of the start."""
    _, folder = tiny(tree, "timeline", "--modes=ddp")
    picture = (folder / "ddp.svg").read_text()
    assert "rank 1" in picture and "gradients on their way" in picture
    assert list((tree / "assets").iterdir()) == [], "pictures of the project stay as they are"


@pytest.mark.parametrize("n, worlds, labels", [(1, (1, 2, 3), ("hashes", "times")),
                                               (4, (1, 2, 3, 4), ("hashes", "times"))])
def test_gpu_has_every_number_of_devices(n, worlds, labels):
    """Each label has a batch that divides among all W, times have no more ranks than devices."""
    machine = dict(kind="cuda", backend="nccl", n_devices=n, gigabytes=80, name="a device")
    command = on_devices(COMMANDS["gpu"], machine)
    assert command.worlds == worlds and command.labels == labels
    assert {command.batch_size("hashes", W) % W for W in worlds} == {0}
    assert len({command.batch_size("hashes", W) for W in worlds}) == 1
    timed = [W for W in worlds if command.belongs("times", "ddp", W)]
    assert timed == list(range(1, n + 1))
    assert command.belongs("times", "ddp --profile 4", 2) == (n > 1)
    alone = on_devices(COMMANDS["gpu"], dict(machine, n_devices=1, backend="xccl"))
    assert alone.worlds == (1,) and "W = 1 only" in alone.note


def test_shared_devices_have_no_times(tmp_path, capsys):
    """Of ranks that have shared a device the tables have hashes and bytes, but no times."""
    path = tmp_path / "gpu_1.jsonl"
    start = dict(command="gpu", words="gpu", machine="1 x a device", torch="2", commit="c",
                 date="d", n_devices=1, note="", price=None, epoch_tokens=1)
    lines = [start]
    for W, step_ms in ((1, 111.0), (2, 222.0)):
        lines.append(dict(label="hashes", row="zero3", W=W, step_ms=step_ms, tokens_per_sec=10.0,
                          peak_mem_bytes=3e6, bytes_per_param=16 / W, param_sha256="0123456789",
                          after_s=1))
    path.write_text("\n".join(json.dumps(line) for line in lines))
    print_tables(path)
    text = capsys.readouterr().out
    assert "take turns" in text and "111" in text, text
    assert "222" not in text and "| zero3 | `01234567` | `01234567` |" in text
    assert re.search(r"^\| hashes \| zero3 \| 2 \| - .* 8\.00 \| 8\.00 \|", text, re.MULTILINE)


def test_smoothed_leaves_out_what_is_not_finite():
    assert smoothed([1.0, None, 3.0]) == ([1, 3], [1.0, 3.0])
    steps, means = smoothed([1.0] * 20 + [None] * 20 + [2.0] * 25)
    assert (steps, means) == ([20, 60], [1.0, 2.0])


# -------------------------------------------------------------------------------------------------
# mistakes, and how it stops

# What is wrong, and what the line has to say.
MISTAKES = [
    (["modes", "--modes=zero9"], "zero9"),
    (["modes", "--lr", "fast"], "--lr"),
    (["modes", "--modes=zero3 ddp", "--worlds=2", "--shard_size=2"],
     "ddp, W=2: --shard_size needs --mode zero1"),
    (["modes", "--device=nowhere"], "nowhere"),
    (["bits", "--worlds=5"], "12 sequences .* do not divide among 5 ranks"),
    (["modes", "--worlds=0"], "--worlds: 0"),
    (["modes", "--worlds=two"], "--worlds: two"),
    (["modes", "--worlds"], "--worlds"),
    (["modes", "--modes="], "--modes: it needs modes"),
    (["timeline", "1gbit", "2gbit"], "timeline takes one rate, not 1gbit and 2gbit"),
    (["collectives", "--repeats=0"], "--repeats 0"),
    (["overhead", "--worlds=2", "--steps=0"], "--steps 0"),
    (["fit", "--budget_mb=9e8"], "--budget_mb 9e[+]08: 4 ranks do not have it"),
    (["fit", "--worlds=²"], "--worlds ²: choose whole numbers"),
    (["modes", "--rounds=1.5"], "--rounds: 1.5"),
    (["modes", "--price=-1"], "--price: -1"),
    (["modes", "--mode=ddp"], "sets --mode itself"),
    (["modes", "--worlds=2", "--modes=single"], "none of these rows"),
    (["memory", "--modes=ddp"], "without --modes"),
    (["link"], "needs rates, such as 1gbit"),
    (["link", "1gbit", "--worlds=2"], "without --worlds"),
    (["overhead", "--modes=ddp"], "--modes=ddp"),
    (["table", "modes"], "there is no .*modes_"),
    (["table", "bench.sh"], "bench.sh does not have what"),
]


def mistake(tree, words, fact):
    done = bench(tree, *words, status=2)
    assert re.fullmatch(rf"[a-z_.]+: .*{fact}.*\n", done.stderr), f"{words}: {done.stderr}"
    assert done.stdout == ""


def test_mistakes_are_one_line(tree):
    """They end with status 2 before anything starts, and leave no file."""
    two_at_a_time(partial(mistake, tree), *zip(*MISTAKES))
    assert not (tree / "out").exists()
    for words in ([], ["tune"]):
        assert "./bench.sh bits\n" in bench(tree, *words, status=2).stderr
    assert "./bench.sh bits\n" in bench(tree, "bits", "--help").stdout


def without_packages(tree, *names):
    """The environment of a Python that lacks them."""
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in names)]
    (tree / "lacks").mkdir()
    (tree / "lacks" / "sitecustomize.py").write_text("\n".join(lines))
    return {**os.environ, "PYTHONPATH": str(tree / "lacks")}


def test_missing_packages_are_named(tree):
    environment = without_packages(tree, "matplotlib", "deepspeed")
    for words, package in ((["memory"], "matplotlib"), (["timeline"], "matplotlib"),
                           (["modes", "--modes=deepspeed2"], "deepspeed")):
        done = bench_sh(tree, *words, status=2, env=environment)
        assert done.stderr == f"bench.sh: this needs a package: pip install {package}\n"
    assert not (tree / "out").exists()


@needs_link
def test_a_rate_is_one_of_tcs(tree):
    mistake(tree, ["link", "5xbit", *TINY], "a link of 5xbit: .*illegal value")
    assert not (tree / "out").exists()


def processes_of(tree):
    """The command lines of all processes that work in a tree."""
    actual = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if str(tree) in os.readlink(folder / "cwd"):
                actual.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has just ended
            pass
    return actual


def start_and_signal(tree, number):
    """Send a signal to all processes of a start while its second row makes steps -> the start,
    which has ended, and what it has printed."""
    words = ["-m", "bench", "modes", "--rounds=1", *TINY, "--worlds=2", "--modes=ddp zero3",
             "--max_steps=400", "--log_interval=1"]
    pattern = "out/bench/modes_*/zero3, W=2, round 1.log"
    with started_python(words, tree) as (started, printed):
        deadline = time.monotonic() + 500
        while not any("step " in log.read_text() for log in tree.glob(pattern)):
            assert started.exitcode is None and time.monotonic() < deadline, printed()
            time.sleep(0.05)
        os.killpg(started.pid, number)
        started.join(60)
        text, _ = printed()
    return started, text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all(number, tree):
    """Tables have what has run so far; no process is left, and the status is the signal's."""
    started, text = start_and_signal(tree, number)
    assert started.exitcode == 128 + number
    assert [row["mode"] for row in rows_of_tables(text)] == ["ddp"], text
    [page] = (tree / "out" / "bench").glob("modes_*.md")
    assert page.read_text() == text
    [log] = tree.glob("out/bench/modes_*/zero3, W=2, round 1.log")
    assert "RESULT" not in log.read_text(), "it came to its end"
    assert processes_of(tree) == []


def test_results_outlive_a_kill(tree):
    """After kill -9 the file has the rows that were complete, and they can be printed."""
    started, _ = start_and_signal(tree, signal.SIGKILL)
    assert started.exitcode == -signal.SIGKILL
    while processes_of(tree):  # its last row is nobody's, and comes to its end
        time.sleep(0.2)
    text = bench(tree, "table", "modes").stdout
    assert [row["mode"] for row in rows_of_tables(text)] == ["ddp"], text


def test_starts_do_not_touch_each_other(tree):
    """Two at once have files of their own, and a third leaves both as they are."""
    once = partial(bench, tree, "bits", "--rounds=1", *TINY, "--worlds=1")
    two_at_a_time(once, ["--modes=single"] * 2)
    folder = tree / "out" / "bench"
    before = {path: path.read_text() for path in folder.glob("bits_*.*")}
    assert len(list(folder.glob("*.jsonl"))) == len(list(folder.glob("*.md"))) == 2, before
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2
    once("--modes=single")
    assert {path: path.read_text() for path in before} == before
    assert len(list(folder.glob("*.jsonl"))) == 3


def test_names_of_one_second_differ(tmp_path):
    with mock.patch.object(bench_main, "BENCH", tmp_path):
        pages = {bench_main.reserve("modes") for _ in range(12)}
    assert len(pages) == 12 and set(tmp_path.iterdir()) == pages


# -------------------------------------------------------------------------------------------------
# programs that bench.sh does not run


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

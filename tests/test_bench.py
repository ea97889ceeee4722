"""bench/: a table from real runs, what its programs compute, what they refuse, how they stop."""

import functools
import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch

import ddp
from bench import __main__ as bench_main
from bench import compare, fit
from bench.commands import COMMANDS, on_devices
from bench.pictures import smoothed
from bench.tables import print_tables
from model import GPT, GPTConfig
from tests.common import on_meta, ROOT
from tests.runs import finish, lines_of, nothing, run_train

SIZES = dict(n_layer=3, n_head=1, n_embd=64, block_size=16)
TINY = ["--max_steps=3", f"--dataset={ROOT}/model.py"]
TINY += [f"--{name}={n}" for name, n in SIZES.items()]
FIT_FLAGS = [*fit.FLAGS, "--n_embd", "128", f"--dataset={ROOT}/verify.py"]


@pytest.fixture
def tree(tmp_path):
    """A copy of all that bench.sh runs, without results."""
    for path in (*ROOT.glob("*.py"), ROOT / "bench.sh"):
        shutil.copy(path, tmp_path / path.name)
    for name in ("bench", "dropin", "extras", "judge"):
        ignored = shutil.ignore_patterns("__pycache__", "examples", "tests")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def call(capsys, module, *words):
    """-> (exit status, stdout, stderr) of a program's main in this process."""
    with mock.patch.object(sys, "argv", [f"{module.__name__}.py", *map(str, words)]):
        try:
            status = module.main()
        except SystemExit as error:
            status = error.code
    return status, *capsys.readouterr()


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


def parameters():
    """Of the tiny model: all, and those that stage 3 gathers once more in the backward."""
    gpt = on_meta(GPT, GPTConfig(vocab_size=257, **SIZES))
    every = sum(p.numel() for p in gpt.parameters())
    # The last two blocks are still whole in the backward, and so is what belongs to no block.
    again = 0
    for block in gpt.blocks[:-2]:
        again += sum(p.numel() for p in block.parameters())
    return every, again


def test_modes(tree, capsys):
    """Bytes that a rank holds and sends are those of the formulas; columns agree with each other;
    an hour has its price. The tables can be printed again, from the newest file as from a file."""
    words = ["modes", "--rounds=1", *TINY, "--worlds=2", "--modes=ddp zero3", "--price=3"]
    done = subprocess.run(["./bench.sh", *words], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    [page] = (tree / "out" / "bench").glob("modes_*.md")
    assert page.read_text() == text
    head = text.splitlines()[0]
    assert head.startswith("`./bench.sh modes ") and re.search(r"took \d+ min \d+ s$", head)
    assert f"torch {torch.__version__.split('+')[0]}" in head and "cores of" in head, head
    rows = rows_of_tables(text)
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
    with mock.patch("bench.tables.BENCH", page.parent):
        for what in ("modes", page.with_suffix(".jsonl")):
            assert call(capsys, bench_main, "table", what) == (0, text, "")
        assert "at 5.0 a device hour" in call(capsys, bench_main, "table", "modes", "--price=5")[1]


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
    (["modes", "--lr", "fast"], "--lr"),
    (["bits", "--worlds=5"], "12 sequences .* do not divide among 5 ranks"),
    (["modes", "--worlds=0"], "--worlds: 0"),
    (["modes", "--worlds=two"], "--worlds: two"),
    (["modes", "--worlds"], "--worlds"),
    (["modes", "--modes="], "--modes: it needs modes"),
    (["timeline", "1gbit", "2gbit"], "timeline takes one rate, not 1gbit and 2gbit"),
    (["collectives", "--repeats=0"], "--repeats 0"),
    (["overhead", "--worlds=2", "--steps=0"], "--steps 0"),
    (["fit", "--budget_mb=9e8"], "--budget_mb 9e[+]08: 4 ranks do not have it"),
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


@pytest.mark.parametrize(("words", "fact"), [
    pytest.param(*row, id=" ".join(row[0])) for row in MISTAKES])
def test_mistakes_are_one_line(words, fact, tmp_path, monkeypatch, capfd):
    """They end with status 2 before anything starts, and leave no file."""
    monkeypatch.chdir(tmp_path)
    with (mock.patch.object(bench_main, "BENCH", tmp_path / "out"),
          mock.patch("os._exit", sys.exit), mock.patch.object(sys, "argv", ["bench.sh", *words])):
        try:
            status = bench_main.main()
        except SystemExit as error:
            status = error.code
    printed, errors = capfd.readouterr()
    assert status == 2 and printed == "", printed
    assert re.fullmatch(rf"[a-z_.]+: .*{fact}.*\n", errors), errors
    assert not [*tmp_path.iterdir()]


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


def test_a_signal_stops_all(tree):
    """Tables have what has run so far; no process is left, and the status is the signal's."""
    words = ["modes", "--rounds=1", *TINY, "--worlds=2", "--modes=ddp zero3", "--max_steps=400",
             "--log_interval=1"]
    started = subprocess.Popen([sys.executable, "-m", "bench", *words], cwd=tree, text=True,
                               stdout=subprocess.PIPE, start_new_session=True)
    deadline_s = time.monotonic() + 120
    while not any("step " in log.read_text() for log in tree.glob("out/bench/*/ddp, W=2*.log")):
        assert started.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    text, _ = started.communicate(timeout=60)
    assert processes_of(tree) == [] and started.returncode == 130
    [page] = (tree / "out" / "bench").glob("modes_*.md")
    assert page.read_text() == text and rows_of_tables(text) == []


def test_names_of_one_second_differ(tmp_path):
    with mock.patch.object(bench_main, "BENCH", tmp_path):
        pages = {bench_main.reserve("modes") for _ in range(12)}
    assert len(pages) == 12 and set(tmp_path.iterdir()) == pages


# -------------------------------------------------------------------------------------------------
# programs


def number(cell):
    return float(cell.replace(",", ""))


def ranks_of(name, W, *words, plant=nothing):
    """-> Run of a program of bench/ on W ranks."""
    run = functools.partial(run_planted, plant, name, words)
    return run_train(None, W, plant=run, argv=[])


def run_planted(plant, name, words):
    plant()
    sys.argv = [name, *words]
    runpy.run_path(str(ROOT / "bench" / name), run_name="__main__")
    sys.exit()


def rows_of(text):
    """The cells of the rows of Markdown tables, without heads."""
    rows = []
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        rows.append(line.split(" | "))
    is_head = [n + 1 < len(rows) and rows[n + 1][0] == "---" for n in range(len(rows))]
    return [row for row, leave in zip(rows, is_head) if not leave and row[0] != "---"]


NAMES = ("start_all_gather", "ReduceScatter", "both", "broadcast")


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_collectives_have_times_and_bytes(n_ranks):
    """Of each collective and size: bytes over times are bytes a second, and the limit is that of
    the link that was named."""
    W = n_ranks
    run = ranks_of("collectives.py", W, "--sizes", "6kB 48kB 4MB", "--largest", "48kB",
                   "--repeats", "3", "--rate", "1gbit")
    assert run.codes == [0] * W, run
    assert "|" not in run.stdout[1], "only rank 0 prints"
    rows = rows_of(run.stdout[0])
    assert [row[:2] for row in rows] == [[size, name] for size in ("6 kB", "48 kB")
                                         for name in NAMES]
    share = (W - 1) / W
    sent = dict(zip(NAMES, (share, share, 2 * share, 1)))
    for size, name, *cells in rows:
        median, best, torchs, torchs_best, ratio, rate, torchs_rate, limit, *near = cells
        n_bytes = sent[name] * number(size.removesuffix(" kB")) * 1024
        assert 0 < number(best) <= number(median) and 0 < number(torchs_best) <= number(torchs)
        assert number(ratio) == pytest.approx(number(median) / number(torchs), rel=0.01, abs=0.02)
        assert number(rate) == pytest.approx(n_bytes / number(median), rel=0.02, abs=0.1)
        assert number(torchs_rate) == pytest.approx(n_bytes / number(torchs), rel=0.02, abs=0.1)
        assert number(limit) == pytest.approx(n_bytes / 125, abs=0.6)  # us; 1 gbit: 125 bytes each
        for percent, us in zip(near, (median, torchs)):
            assert number(percent) == pytest.approx(100 * n_bytes / 125 / number(us), rel=0.1,
                                                    abs=0.6)


def change_an_element(name):
    """Plant a collective that is wrong by a little, in its last element."""
    real = getattr(ddp, name)

    def wrong(what, *arguments):
        flat = what[0] if name == "broadcast" else what
        flat[-1] += 1e-3
        return real(what, *arguments)

    setattr(ddp, name, wrong)


@pytest.mark.parametrize("name", ["start_all_gather", "ReduceScatter", "broadcast"])
def test_a_wrong_collective_has_no_time(name):
    plant = functools.partial(change_an_element, name)
    run = ranks_of("collectives.py", 2, "--sizes", "1kB", "--repeats", "1", plant=plant)
    assert run.codes == [1, 1], run
    timed = [row[1] for row in rows_of(run.stdout[0])]
    assert timed == list(NAMES[:NAMES.index(name)])
    assert re.search(rf"^collectives.py: {name} of 1 kB .* differs .* by 0.00", run.stderr[0],
                     re.MULTILINE), run


@pytest.mark.parametrize("most", [0, 1, 2, 7, 30, 100])
def test_largest_finds_the_largest(most):
    """From any estimate, without asking twice; with few questions if the estimate is good."""
    for estimate in range(130):
        asked = []

        def fits(n):
            assert n >= 1 and n not in asked
            asked.append(n)
            return n <= most

        assert fit.largest(fits, estimate) == most, estimate
        if most >= 1 and 0.9 * most <= estimate <= 1.1 * most:
            assert len(asked) <= 6, asked


BEFORE = "BEFORE 300000000\nBEFORE 320000000\n"
OUT = "train.py: rank 1 failed in step 1: RuntimeError: out of memory: 9 bytes\n"
CLOSED = "train.py: rank 0 failed in step 1: RuntimeError: Connection closed by peer\n"
ENDS = {  # exit status, what the ranks have written, how the reason begins if it is memory
    "another rank had no memory": (1, BEFORE + CLOSED + OUT, "rank 1 failed"),
    "C++ had no memory": (1, f"{BEFORE}terminate called: std::bad_alloc", "terminate"),
    "another rank has gone": (1, BEFORE + CLOSED, None),
    "it was killed": (137, BEFORE, None),
    "it says nothing": (1, "", None),
    "it ends well without a result": (0, BEFORE, None),
}


@pytest.mark.parametrize("end", ENDS)
def test_only_memory_makes_a_model_too_large(end):
    status, log, why = ENDS[end]
    question = fit.Question("zero2", 2, 3, 1)
    if why is None:
        with pytest.raises(fit.Stop, match="zero2, W = 2, 3 layers failed, and not for memory"):
            fit.answer_of(question, status, log, 5)
        return
    answer = fit.answer_of(question, status, log, 5)
    assert not answer.fits and answer.why.startswith(why)
    assert answer.before_mb == 320


def ask_by_formula(search, question):
    """In place of a run: what fits by the formula, if a sequence takes 1 MB and a layer has a
    million parameters."""
    n_parameters = 1_000_000 * question.n_layer
    mb = fit.formula(question.mode, question.W) * question.n_layer + question.micro_batch_size
    fits = mb <= search.budget_mb
    answer = fit.Answer(fits, n_parameters, 300.0, 7.0 * question.micro_batch_size, f"{mb} MB")
    return search.answers.setdefault(question, answer)


def test_find_and_its_tables(tmp_path, capsys):
    """All that is found, with runs replaced by the formula."""
    search, actual = fit.Search(101, FIT_FLAGS, str(tmp_path), None, {}), fit.Outcome({}, [], {})
    modes = ["single", "ddp", "zero1", "zero2", "zero3"]
    with mock.patch.object(fit, "ask", ask_by_formula):
        fit.find(search, modes, [1, 2, 4], actual)
    by_mode = {"ddp": (6, 6), "zero1": (8, 10), "zero2": (10, 14), "zero3": (12, 25)}
    expected = {("single", 1): 6}
    for number, W in enumerate((2, 4)):
        for mode, layers in by_mode.items():
            expected[mode, W] = layers[number]
    assert actual.models == expected
    batches = {mode: size for (mode, _, _), size in actual.batches.items()}
    assert batches == {"ddp": 5, "zero1": 41, "zero2": 59, "zero3": 77}
    assert set(actual.batches) == {(mode, 4, 6) for mode in by_mode}

    fit.print_outcome(search, actual)
    rows = rows_of(capsys.readouterr().out)
    assert ["zero3", "4", "25.0M", "25", "7", "4.04", "4.00"] in rows
    assert ["single", "1", "does not fit: 401.0 MB"] in rows
    assert ["zero3", "4", "trains, 7 tokens/s"] in rows
    assert ["zero1", "4", "41", "287"] in rows


def change_metrics(out_dir, step, name, change):
    """Change a number of a step in metrics.jsonl."""
    path = out_dir / "metrics.jsonl"
    entries = lines_of(path)
    for entry in entries:
        if entry["step"] == step:
            entry[name] = change(entry[name])
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def row_of(name, text):
    [row] = [row for row in rows_of(text) if row[0] == name]
    return row[1:]


def test_compare(tmp_path, capsys):
    """Two modes with the same bits, another seed, numbers that were changed, a damaged file."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    result = finish(a, 2, mode="ddp", save_interval=2, eval_steps=0)
    finish(b, 2, mode="zero3", save_interval=2, eval_steps=0)
    other = finish(c, 2, mode="zero3", save_interval=2, eval_steps=0, seed=2)
    compared = functools.partial(call, capsys, compare)

    status, out, err = compared(a, b)
    assert status == 0 and err == "", out + err
    assert out.count(f"param_sha256 {result['param_sha256']}") == 2, out
    assert "flag mode: ddp in A, zero3 in B" in out and "fact" not in out.split("change")[1], out

    status, out, _ = compared(a, c)
    assert status == 1 and "Parameters of step_00000004 are not equal" in out
    assert f"B has param_sha256 {other['param_sha256']}" in out
    assert "fact seed: 1337 in A, 2 in B" in out
    assert row_of("loss", out)[0] == "1" and row_of("loss", out)[5] == "4"

    shutil.copy(a / "metrics.jsonl", c)
    shutil.rmtree(c / "step_00000004")
    status, out, _ = compared(a, c)
    assert status == 1 and "Parameters of step_00000002 are not equal" in out

    change_metrics(b, 2, "grad_norm", lambda norm: norm * (1 + 1e-15))
    assert compared(a, b)[0] == 0, "norms of shards are rounded in another place"
    change_metrics(b, 2, "loss", lambda loss: loss + 1e-9)
    change_metrics(b, 3, "loss", lambda loss: loss + 2e-9)
    change_metrics(b, 4, "param_norm", lambda norm: None)
    status, out, _ = compared(a, b)
    assert status == 1
    first, _, _, absolute, relative, n_steps, largest, where = row_of("loss", out)
    assert [first, n_steps, where] == ["2", "2", "3"]
    assert [float(absolute), float(largest)] == pytest.approx([1e-9, 2e-9], rel=1e-3)
    assert float(relative) == pytest.approx(1e-9 / lines_of(a / "metrics.jsonl")[1]["loss"],
                                            rel=1e-2)
    assert row_of("grad_norm", out)[0] == "-"
    assert row_of("param_norm", out)[:4][::3] == ["4", "inf"]
    assert "Parameters of step_00000004 are equal" in out

    (b / "step_00000004" / "__0_0.distcp").write_bytes(b"")
    status, out, err = compared(a, b)
    assert status == 2 and out == "", "nothing is printed of what cannot be compared"
    assert re.fullmatch(r".*step_00000004 does not match its SHA256SUMS: __0_0.distcp\n", err), err


def line(step):
    return json.dumps(dict(step=step, loss=1.0, grad_norm=1.0, param_norm=1.0)) + "\n"


@pytest.mark.parametrize("lines, fact", [
    (None, "b is no folder"),
    ([], "b have no step in common"),
    ([line(2)], "b have no step in common"),
    ([line(1), "{"], "line 2 is no JSON object"),
    (['{"step": 1}\n'], "has no loss"),
    (["[1]\n"], "has no step"),
])
def test_what_cannot_be_compared(tmp_path, capsys, lines, fact):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    (a / "metrics.jsonl").write_text(line(1))
    if lines is not None:
        b.mkdir()
        (b / "metrics.jsonl").write_text("".join(lines))
    status, out, err = call(capsys, compare, a, b)
    assert status == 2 and out == ""
    assert fact in err and err.count("\n") == 1, err


@pytest.mark.parametrize("words, fact", [
    (["--worlds", "2 x"], "--worlds 2 x: choose whole numbers"),
    (["--modes", "zero4"], "--modes zero4: choose among single naive"),
    (["--modes", "single", "--worlds", "2"], "single is for one rank"),
    (["--budget_mb", "0"], "--budget_mb 0: choose"),
    (["--mode", "ddp"], "fit sets --mode itself"),
    (["--n_layer=3"], "fit sets --n_layer itself"),
    (["--n_embd", "3"], "n_embd 3 over n_head 8"),
    (["--n_embed", "3"], "there is no flag --n_embed"),
    (["--results", "/"], "--results /: Is a directory"),
    (["draw"], "draw takes one file"),
    (["draw", "/no/such/file"], "/no/such/file: No such file"),
    (["draw", ROOT / "pyproject.toml"], "line 1 is no trial"),
])
def test_fit_refuses(capsys, words, fact):
    # train.py ends the process by itself.
    with mock.patch("os._exit", sys.exit):
        status, out, err = call(capsys, fit, *words)
    assert status == 2 and out == ""
    assert fact in err and err.count("\n") == 1, err

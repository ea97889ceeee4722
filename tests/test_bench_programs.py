"""bench/: collectives.py, fit.py and compare.py."""

import contextlib
import functools
import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import sys
import time
from unittest import mock

import pytest

from bench import compare, fit
from dropin import ddp
from tests.forks import run_python, started_python
from tests.common import ROOT
from tests.runs import finish, lines_of, nothing, run_train, this_rank

# -------------------------------------------------------------------------------------------------
# running


def run_program(name, words, plant):
    """Plant a program of bench/, with words as its arguments, in place of train.py."""
    plant()
    sys.argv = [name, *words]
    runpy.run_path(str(ROOT / "bench" / name), run_name="__main__")
    sys.exit()


def ranks_of(name, W, *words, plant=nothing):
    """-> Run of a program of bench/ on W ranks."""
    return run_train(None, W, plant=functools.partial(run_program, name, words, plant), argv=[])


def call(capsys, module, *words):
    """-> (exit status, stdout, stderr) of a program's main in this process."""
    with mock.patch.object(sys, "argv", [f"{module.__name__}.py", *map(str, words)]):
        try:
            status = module.main()
        except SystemExit as error:
            status = error.code
    return status, *capsys.readouterr()


def rows_of(text):
    """The cells of the rows of Markdown tables, without heads."""
    rows = []
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        rows.append(line.split(" | "))
    is_head = [n + 1 < len(rows) and rows[n + 1][0] == "---" for n in range(len(rows))]
    return [row for row, leave in zip(rows, is_head) if not leave and row[0] != "---"]


# -------------------------------------------------------------------------------------------------
# collectives.py

NAMES = ("start_all_gather", "start_reduce_scatter", "start_all_reduce", "broadcast")


def number(cell):
    return float(cell.replace(",", ""))


@pytest.mark.parametrize("n_ranks", [2, 3])  # not W, as the test itself runs once
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


def send_slowly():
    """Plant a link on which a message takes 0.1 s."""
    import torch.distributed as dist

    send = dist.send

    def slow_send(*arguments):
        time.sleep(0.1)
        send(*arguments)

    dist.send = slow_send


def test_the_limit_is_what_a_message_takes():
    """Without --rate: on a link of 64 kB in 0.1 s half a buffer takes 0.05 s, and all of it 0.1."""
    run = ranks_of("collectives.py", 2, "--sizes", "64kB", "--repeats", "3", plant=send_slowly)
    assert run.codes == [0, 0], run
    limits = [number(row[9]) for row in rows_of(run.stdout[0])]
    assert limits == pytest.approx([50e3, 50e3, 100e3, 100e3], rel=0.3)


def slow_on_rank_1():
    """Plant a broadcast after which rank 1, which prints nothing, is late."""
    real = ddp.broadcast

    def late(*arguments):
        real(*arguments)
        if this_rank() == 1:
            time.sleep(0.05)

    ddp.broadcast = late


def test_the_slowest_rank_counts():
    run = ranks_of("collectives.py", 2, "--sizes", "1kB", "--repeats", "3", plant=slow_on_rank_1)
    assert run.codes == [0, 0], run
    medians = {row[1]: number(row[2]) for row in rows_of(run.stdout[0])}
    assert medians["broadcast"] >= 50e3, medians


def change_an_element(name):
    """Plant a collective that is wrong by a little, in its last element."""
    real = getattr(ddp, name)

    def wrong(what, *arguments):
        flat = what[0] if name == "broadcast" else what
        flat[-1] += 1e-3
        return real(what, *arguments)

    setattr(ddp, name, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_collective_has_no_time(name):
    plant = functools.partial(change_an_element, name)
    run = ranks_of("collectives.py", 2, "--sizes", "1kB", "--repeats", "1", plant=plant)
    assert run.codes == [1, 1], run
    timed = [row[1] for row in rows_of(run.stdout[0])]
    assert timed == list(NAMES[:NAMES.index(name)])
    assert re.search(rf"^collectives.py: {name} of 1 kB .* differs .* by 0.00", run.stderr[0],
                     re.MULTILINE), run


# -------------------------------------------------------------------------------------------------
# fit.py


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


TINY = [*fit.FLAGS, "--n_embd", "128", "--dataset", str(ROOT / "verify.py")]


def search_in(folder, budget_mb, results=None):
    return fit.Search(budget_mb, TINY, str(folder), results, {})


def run_forked(command, log):
    """In place of fit.run, which test_ctrl_c_ends_all_ranks sees to."""
    done = run_python(command[1:], ROOT)
    log.write_text(done.stdout + done.stderr)
    return done.returncode


@pytest.mark.parametrize("budget_mb, fits", [(24, False), (200, True)])
def test_a_limit_is_real(tmp_path, budget_mb, fits):
    """A model of 1.6M parameters, of which parameters, gradients and Adam's state take 26 MB."""
    question = fit.Question("ddp", 2, 8, 1)
    search = search_in(tmp_path, budget_mb, tmp_path / "results")
    with mock.patch.object(fit, "run", run_forked):
        answer = fit.ask(search, question)
    assert answer.fits == fits, answer
    assert answer.n_parameters == 1_648_768
    assert 100 < answer.before_mb < 1000
    assert ("out of memory" in answer.why) == (not fits)
    assert (answer.tokens_per_sec is not None) == fits
    known = fit.known_answers(search.results, budget_mb, TINY)
    assert known == {question: answer}
    assert fit.known_answers(search.results, budget_mb + 1, TINY) == {}


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
    search, actual = search_in(tmp_path, 101), fit.Outcome({}, [], {})
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


def test_a_search_that_stops_says_what_it_has(tmp_path, capsys):
    """The reason, the table so far, and exit status 1."""
    def ask(search, question):
        if question.mode == "ddp":
            raise fit.Stop("planted")
        return ask_by_formula(search, question)

    with mock.patch.object(fit, "ask", ask):
        status, out, err = call(capsys, fit, "--budget_mb", 101, "--worlds", "1 2")
    assert status == 1 and err == "\nfit.py: planted\n"
    assert [row[:4] for row in rows_of(out)] == [["single", "1", "6.0M", "6"]]


def processes_of(folder):
    """The processes of programs whose TMPDIR is a folder."""
    actual = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            files = [os.readlink(file) for file in (path / "fd").iterdir()]
            if any(file.startswith(str(folder)) for file in files):
                actual.append(path.name)
    return actual


def test_ctrl_c_ends_all_ranks(tmp_path):
    """In the second search: the row of the first one is printed, and all processes have ended."""
    results = tmp_path / "results"
    flags = ["--n_embd", "128", "--dataset", str(ROOT / "verify.py"), "--max_steps", "9999"]
    search = fit.Search(200, [*fit.FLAGS, *flags], "", results, {})
    for n_layer in range(1, 60):  # the first search is over
        answer = fit.Answer(n_layer == 1, n_layer, 300.0, 7.0)
        fit.append(search, fit.Question("single", 1, n_layer, 1), answer)
    words = [ROOT / "bench" / "fit.py", "--budget_mb", "200", "--worlds", "1 2", "--modes",
             "single zero3", "--results", results, *flags]
    with started_python(words, ROOT, TMPDIR=str(tmp_path)) as (process, printed):
        deadline_s = time.monotonic() + 60
        has_begun = False
        while not has_begun and time.monotonic() < deadline_s:
            time.sleep(0.1)
            has_begun = len(list(tmp_path.glob("*/metrics.jsonl"))) > 0
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        out, err = printed()
    assert has_begun, err
    assert process.exitcode == 130, err
    assert [row[:2] for row in rows_of(out)] == [["single", "1"]], out
    assert "interrupted" in err and "Traceback" not in err
    assert processes_of(tmp_path) == []


def test_a_picture_of_what_fits(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    results = tmp_path / "results"
    search = fit.Search(192, TINY, "", results, {})
    for mode, W, n in (("single", 1, 9), ("ddp", 2, 8), ("zero3", 2, 17), ("zero3", 2, 16)):
        fit.append(search, fit.Question(mode, W, n, 1), fit.Answer(True, n * 10**6, 300.0, 1.0))
    fit.append(search, fit.Question("zero3", 2, 18, 1), fit.Answer(False, 18 * 10**6, 300.0))
    (tmp_path / "assets").mkdir()
    with mock.patch.object(fit, "ROOT", tmp_path):
        status, _, err = call(capsys, fit, "draw", results)
    assert not status, err
    picture = (tmp_path / "assets" / "fit.svg").read_text()
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    assert {"single", "ddp", "zero3", "W = 1", "W = 2", "9", "8", "17"} <= set(texts), texts
    assert not {"16", "18"} & set(texts), texts


# -------------------------------------------------------------------------------------------------
# compare.py


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


# -------------------------------------------------------------------------------------------------
# refusals


def test_runs_without_checkpoints_are_compared_by_metrics(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(line(1))
    status, out, _ = call(capsys, compare, tmp_path / "a", tmp_path / "b")
    assert status == 0 and "no checkpoint of the same step" in out
    (tmp_path / "b" / "metrics.jsonl").unlink()
    status, out, err = call(capsys, compare, tmp_path / "a", tmp_path / "b")
    assert status == 2 and "No such file" in err


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


@pytest.mark.parametrize("words, fact", [
    ([], "one rank sends nothing"),
    (["--sizes", "5q"], "size 5q"),
    (["--sizes", "4MB", "--largest", "1MB"], "leave no size"),
    (["--repeats", "0"], "--repeats 0"),
    (["--rate", "fast"], "--rate fast"),
])
def test_collectives_refuses(words, fact):
    run = ranks_of("collectives.py", 1, *words)
    assert run.codes == [2] and run.stdout == [""]
    assert fact in run.stderr[0] and run.stderr[0].count("\n") == 1, run

"""train.py, data.py, checkpoint.py and extras/ as code that is copied, and how a run is prepared
and ends."""

import ast
import os
import pathlib
import shutil
import signal
import sys
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._dynamo.utils import counters

import data
import model
import runs
import train
from extras import torchs
from tests.common import ROOT
from tests.runs import (fail, finish, flags, in_update, lines_of, refused, run_alone, run_train,
                        saved, this_rank, write_line)
from tests.ranks import on_ranks
from verify import small_gpt

TRAIN = [ROOT / "train.py", ROOT / "runs.py", ROOT / "data.py", ROOT / "checkpoint.py",
         *ROOT.glob("extras/*.py")]


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.stem)
def test_six_arguments_at_most(path):
    """So many a reader keeps in mind; but for `flag`, whose arguments are given by name, as columns
    of the table. And no attribute is set on a model from outside."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            a = node.args
            names = [one.arg for one in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            function = getattr(node, "name", "lambda")
            assert len(names) <= 6 or function == "flag", f"{function} has {names}"
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert ast.unparse(node.value) not in ("model", "wrapper", "self.module"), node.lineno
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        assert not is_call or node.func.id != "setattr" or ast.unparse(node.args[0]) == "config"


@on_ranks(1)
@pytest.mark.parametrize("mode", train.MODES)
def test_modes_have_one_surface(mode):
    """What the loop asks of a wrapper all of them have, by their class: nothing is set on torch's
    objects."""
    config = train.Config(mode=mode)
    wrapper = train.wrap(small_gpt(), config, torch.device("cpu"))
    assert wrapper.shard_group is None or mode not in ("single", "naive", "ddp", "torch-ddp")
    assert wrapper.gradient_divide_factor == 1 and wrapper.exposed_s != 0.5
    names = [name for name, _ in wrapper.full_parameters()]
    assert names == [name for name, _ in small_gpt().named_parameters()]
    with wrapper.no_sync():
        pass
    if mode == "torch-ddp":
        options = dict(gradient_as_bucket_view=True, find_unused_parameters=False)
        torchs_own = torch.nn.parallel.DistributedDataParallel(small_gpt(), **options)
        assert vars(wrapper).keys() == vars(torchs_own).keys()
    if "fsdp" in mode:
        assert type(wrapper) is torchs.FSDP and "forward" not in vars(wrapper.module)


EIGHT = ("ddp.py", "zero.py", "checkpoint.py", "oracle.py", "model.py", "data.py", "runs.py",
         "train.py")


def alone(folder, words):
    """Plant train.py of a folder of copies, with these words as its flags."""
    os.chdir(folder)
    run_alone(folder, "train.py", *words)


def test_eight_files_are_enough(tmp_path):
    """Copied to an empty folder they train in each mode of ours, resume in another one on another
    number of ranks, evaluate, and write a text, on the bits of here; what needs extras/ is refused
    in a line."""
    here = tmp_path / "here"
    here.mkdir()
    for name in EIGHT:
        shutil.copy(ROOT / name, here / name)
    expected = finish(tmp_path / "out", max_steps=6)["param_sha256"]

    def run(W, status=0, fact="^$", **options):
        words = flags(**{"out_dir": tmp_path / "copy", "dataset": ROOT / "verify.py", **options})
        plant = partial(alone, here, [str(word) for word in words])
        return finish(None, W, status, fact, argv=["--help"], plant=plant)

    modes = ("naive", "ddp", "zero1", "zero2", "zero3", "single")
    for step, mode in enumerate(modes, start=1):
        actual = run(1 if mode == "single" else 2, mode=mode, max_steps=step, save_interval=1,
                     resume="auto")
        assert actual["mode"] == mode and actual["steps"] == step
        assert "sample:\n" in actual["stdout"]
    assert actual["param_sha256"] == expected
    asked = run(2, mode="zero3", resume=tmp_path / "copy" / "best", out_dir=None, eval_only=True)
    assert asked["val_loss"] is not None and "sample:\n" in asked["stdout"]
    for options in (dict(mode="torch-ddp"), dict(mode="ddp", comm_hook="topk"), dict(trace=True),
                    dict(mode="zero3", offload=True)):
        run(2, 2, r"\Atrain\.py: there is no (extras|dropin), .*\n\Z", out_dir=tmp_path / "no",
            **options)


def only_on_rank_0():
    """Plant ranks that cannot read a text, tokenize it, or hash files of a checkpoint, but for the
    first one."""
    if this_rank() > 0:
        data.stdlib_text = data.load_tokenizer("bytes").encode_to_numpy = partial(fail, "not here")
        data.tokenize = runs.checksums = lambda *arguments: fail("not here")
        read = pathlib.Path.read_text
        pathlib.Path.read_text = lambda path, *options: (
            fail("not here") if path == ROOT / "verify.py" else read(path, *options))


def test_rank_0_reads_for_all(tmp_path):
    """The text is read and tokenized, and a checkpoint is hashed, by one rank."""
    options = dict(W=2, mode="zero3", save_interval=2, resume="auto", plant=only_on_rank_0)
    finish(tmp_path, max_steps=2, **options)
    finish(tmp_path, **options)
    assert saved(tmp_path)[-1] == 4


def note_threads(path):
    """Plant a note of how many threads an update has."""
    in_update(2, None, write_threads, path)


def write_threads(path):
    write_line(path, torch.get_num_threads())


def test_threads_are_those_of_the_flag(tmp_path):
    for threads in (None, 3):
        finish(tmp_path / "out", threads=threads, plant=partial(note_threads, tmp_path / "threads"))
    assert lines_of(tmp_path / "threads") == [1, 3]


def slow_text():
    """Plant a text that takes longer to tokenize than ranks wait for each other."""
    tokenize = data.tokenize

    def slowly(*arguments):
        time.sleep(5)
        return tokenize(*arguments)

    data.tokenize = slowly


def test_ranks_wait_for_a_long_text(tmp_path):
    """Longer than --timeout_s."""
    start_s = time.monotonic()
    finish(tmp_path, 2, mode="ddp", timeout_s=2, plant=slow_text)
    assert time.monotonic() - start_s > 5


def slow_hashes():
    """Plant a checkpoint that takes longer to hash than ranks wait for each other."""
    checksums = runs.checksums

    def slowly(checkpoint):
        time.sleep(3)
        return checksums(checkpoint)

    runs.checksums = slowly


def test_ranks_wait_for_a_large_checkpoint(tmp_path):
    """When it is written, and when a run goes on from it."""
    options = dict(W=2, mode="zero2", timeout_s=1.5, save_interval=2, plant=slow_hashes)
    finish(tmp_path, max_steps=2, **options)
    actual = finish(tmp_path, resume="auto", **options)
    assert "resumed from" in actual["stdout"] and saved(tmp_path)[-1] == 4


def bug_in_model():
    def build(gpt, config):
        raise ValueError("a bug")

    model.GPT.__init__ = build


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_bug_is_not_a_mistake(n_ranks, tmp_path):
    """One in the model's constructor keeps its traceback, and the status is 1; sizes that do not
    fit are a mistake."""
    ended = run_train(tmp_path, n_ranks, plant=bug_in_model)
    assert ended.codes == [1] * n_ranks, ended
    assert "Traceback" in ended.stderr[0] and "in build\n" in ended.stderr[0], ended
    assert "train.py: rank 0 failed in step 0: ValueError: a bug\n" in ended.stderr[0], ended
    refused("n_embd 16", tmp_path, n_ranks, n_head=3)


def note_ends(path):
    """Plant trackers that note what is called, and a step that fails."""
    tracker = mock.MagicMock(__spec__="a stand-in")
    for name in ("SummaryWriter", "init"):
        made = getattr(tracker, name).return_value
        for method in ("close", "finish", "define_metric", "log"):
            note = partial(note_call, path, name, method)
            getattr(made, method).side_effect = note
    sys.modules |= dict.fromkeys(("wandb", "tensorboard", "torch.utils.tensorboard"), tracker)


def note_call(path, name, method, *arguments, **options):
    steps = [argument["step"] for argument in arguments if method == "log"]
    write_line(path, [name, method, *(steps or arguments), options])


def trackers_and_a_bug(path, n):
    note_ends(path)
    in_update(n, None, fail, "the end")


@pytest.mark.parametrize("end", ["well", "error", "signal"])
def test_trackers_are_closed(end, tmp_path):
    """However a run ends, before os._exit, which would take what they have not written. W&B is told
    that the step is its axis, and no step of its own count, by which it drops what comes after a
    resume at an earlier step."""
    plant = partial(note_ends, tmp_path / "log")
    if end == "error":
        plant = partial(trackers_and_a_bug, tmp_path / "log", 3)
    if end == "signal":
        plant = partial(trackers_and_a_signal, tmp_path / "log", 2)
    run = run_train(tmp_path / "out", plant=plant, wandb=True, tensorboard=True)
    assert run.codes == [dict(well=0, error=1, signal=143)[end]], run
    noted = lines_of(tmp_path / "log")
    n_steps = len(lines_of(tmp_path / "out/metrics.jsonl"))
    axis = ["init", "define_metric", "*", {"step_metric": "step"}]
    logged = [["init", "log", step, {}] for step in range(1, n_steps + 1)]
    ends = [["init", "finish", {}], ["SummaryWriter", "close", {}]]
    assert noted == [axis, *logged, *ends], noted
    assert n_steps == dict(well=4, error=2, signal=3)[end]


def trackers_and_a_signal(path, n):
    note_ends(path)
    in_update(n, None, signal.raise_signal, signal.SIGTERM)


def test_short_runs_have_no_trace(tmp_path):
    """--trace and --profile begin in the third step; where there is none, that is said."""
    for options in (dict(trace=True), dict(profile=1)):
        actual = finish(tmp_path / "out", max_steps=2, **options)["stdout"]
        assert "no trace: it begins in the third step, and there are 2 more\n" in actual, actual


@pytest.mark.parametrize("mode", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_rows_that_no_token_uses_stay_0(mode, tmp_path):
    """With all that AdamW knows of them, to the last step; those of tokens do not."""
    finish(tmp_path, 1 if mode == "single" else 2, mode=mode, save_interval=4, global_batch_size=4)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        actual = {f"{kind}.wte.weight": torch.full((320 * 16,), torch.nan)}
        dcp.load(actual, checkpoint_id=tmp_path / "step_00000004", no_dist=True)
        [rows] = actual.values()
        rows = rows.view(320, 16)
        assert (rows[257:] == 0).all(), f"{kind}: {rows[257:]}"
        assert rows[:257].isfinite().all() and rows[:257].any(), kind


def count_graphs(path):
    """Plant compilation that takes no compiler, and a log of its graphs, and breaks, at the end."""
    from torch._inductor import cpp_builder

    cpp_builder.get_cpp_compiler = lambda: "none is needed"
    torch.compile = partial(torch.compile, backend="eager")
    destroy = dist.destroy_process_group

    def count_and_destroy():
        write_line(path, [counters["stats"]["unique_graphs"], dict(counters["graph_break"])])
        destroy()

    dist.destroy_process_group = count_and_destroy


@pytest.mark.parametrize("options", [{}, dict(micro_batch_size=2, eval_steps=3)],
                         ids=["plain", "batches"])
def test_compiled_runs_have_four_graphs(options, tmp_path):
    """Of a block and of the loss, in training and in evaluation, whatever the number of blocks, and
    without a break; the text is not compiled."""
    finish(tmp_path / "out", compile=True, n_layer=3,
           plant=partial(count_graphs, tmp_path / "graphs"), **options)
    assert lines_of(tmp_path / "graphs") == [[4, {}]]

"""train.py and runs.py: checkpoints, and runs that go on from them."""

import json
import os
import re
import shutil
import sys
import time
from functools import partial
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp

import data
import runs
from tests.common import ROOT
from tests.runs import (ask, contents, finish, flags, launched_by, lines_of, refused, saved,
                        undisturbed, view_of, write_line)

NEWEST = "step_00000004"


# -------------------------------------------------------------------------------------------------
# what is no sound checkpoint of this run


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def make_unreadable(path):
    """As by a bad sector: to open a folder as a file is an OSError, too."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, os.remove, make_unreadable])
def test_damaged_files_are_named(damage, tmp_path):
    """Whichever file of a checkpoint is changed, missing or unreadable is named, exit status 2.
    --resume auto says so and takes the one before, on the same bits."""
    options = dict(mode="zero2", save_interval=1, eval_steps=0)
    sound = undisturbed(2, **options)
    names = sorted(path.name for path in (sound["folder"] / NEWEST).iterdir())
    assert names == [".metadata", "SHA256SUMS", "__0_0.distcp", "__1_0.distcp", "checkpoint.json"]
    for name in names:
        out = shutil.copytree(sound["folder"], tmp_path / name, symlinks=True)
        damage(out / NEWEST / name)
        refused(re.escape(name), out, **options, resume=out / NEWEST)
        if damage is flip:
            result = finish(out, **options, resume="auto", fact=f"{NEWEST}.*{name}")
            assert result["param_sha256"] == sound["param_sha256"], f"{name}: other bits"


def test_all_damaged_is_refused(tmp_path):
    """Nothing is left to go on from, and a new run does not begin."""
    finish(tmp_path, save_interval=2, eval_steps=0)
    for path in tmp_path.glob("step_*"):
        flip(path / "checkpoint.json")
    finish(tmp_path, status=2, resume="auto", fact=(
        r"falling back to .*\n.*step_00000002, from which this run is to go on, does not match its "
        r"SHA256SUMS: checkpoint\.json\n\Z"))


# What is no checkpoint of a run: a flag, its value and what the line names.
MISFITS = (("n_layer", 3, r"(blocks\.2|n_layer)"), ("n_embd", 32, "(wte.weight|n_embd)"),
           ("seed", 3, "seed"), ("block_size", 8, "block_size"), ("max_steps", 3, "steps"),
           ("global_batch_size", 8, "global_batch_size"), ("dataset", ROOT / "train.py", "data"),
           ("optimizer", "muon", "optimizer"), ("resume", ROOT, str(ROOT)),
           ("resume", "nowhere", "nowhere"))


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    """By name. So is one whose record has no flags, as another program wrote it."""
    out = shutil.copytree(undisturbed(save_interval=1)["folder"], tmp_path / "out", symlinks=True)
    for name, value, fact in MISFITS:
        refused(fact, out, **{"resume": "auto", name: value})
    folder = out / NEWEST
    record = json.loads((folder / "checkpoint.json").read_text())
    assert record["scaler"] == {}, "fp32 is scaled"
    del record["flags"]
    (folder / "checkpoint.json").write_text(json.dumps(record))
    (folder / "SHA256SUMS").write_text("\n".join(runs.checksums(folder)) + "\n")
    for W, options in ((1, dict(resume=folder)), (2, dict(resume="auto", mode="zero2")),
                       (1, dict(resume=folder, eval_only=True))):
        refused(f"{folder} was not written by train.py", out, W, **options)


def leave_out(key):
    """Plant checkpoints that lack a tensor."""
    save = dcp.save

    def saved_without(tensors, **options):
        tensors.pop(key, None)
        save(tensors, **options)

    dcp.save = saved_without


def test_what_is_missing_is_named(tmp_path):
    """A checkpoint that lacks a tensor is refused, on all ranks although one alone has a part of
    it, and metrics and checkpoints stay as they are."""
    key = "exp_avg.norm.weight"
    options = dict(W=2, mode="zero2", eval_steps=0)
    finish(tmp_path, save_interval=4, plant=partial(leave_out, key), **options)
    before = contents(tmp_path / NEWEST) | {(tmp_path / "metrics.jsonl").read_bytes()}
    refused(f"{NEWEST}: .*{key}", tmp_path, resume="auto", **options)
    assert before <= contents(tmp_path) and saved(tmp_path) == [4]


# -------------------------------------------------------------------------------------------------
# what stays


def test_out_dir_keeps_what_counts(tmp_path):
    """--keep_last newest checkpoints and the best one stay; metrics.jsonl goes back to where a run
    resumes; what a new run, or an older checkpoint, would cover is kept elsewhere."""
    out = tmp_path / "out"
    # A rate so high that an early evaluation is the best one. On a text that seldom changes.
    options = dict(max_steps=6, lr=3.0, min_lr=3.0, save_interval=1, keep_last=3,
                   dataset=ROOT / "model.py")
    finish(out, **options)
    entries = lines_of(out / "metrics.jsonl")
    best = min(entries, key=lambda entry: entry["val_loss"])["step"]
    assert best < 4 and saved(out) == [best, 4, 5, 6], (
        f"the best step is {best}, and checkpoints are those of {saved(out)}")
    write_line(out / "metrics.jsonl", "torn")  # as by a kill
    for more, moved in ((dict(resume=out / "step_00000005"), "step_00000006"),
                        (dict(max_steps=2), "")):
        assert (out / "best").resolve().name == f"step_{best:08d}"
        before = contents(out / moved)
        result = finish(out, **{**options, **more})
        assert before <= contents(tmp_path), f"something of {more} is lost"
        assert len(lines_of(out / "metrics.jsonl")) == result["steps"]


def test_checkpoints_are_asked(tmp_path):
    """--eval_only takes model, data and precision from a checkpoint, an older one too, prints its
    validation loss, its hash and a text that continues --prompt, in any mode, on any number of
    ranks, and changes nothing in out_dir."""
    trained = undisturbed(2, mode="zero2", save_interval=1, shard_size=1, keep_last=9, seed=5,
                          n_layer=1)
    out = trained["folder"]
    losses = [entry["val_loss"] for entry in lines_of(out / "metrics.jsonl")]
    before = view_of(out)
    for name, W, step, options in (
            (NEWEST, 1, 4, dict(prompt="def ")),
            ("step_00000002", 3, 2, dict(mode="torch-fsdp", prompt="\u00e9t\u00e9")),
            ("auto", 2, 4, dict(mode="ddp", prompt="", out_dir=out)),  # or no text at all
            ("best", 1, int((out / "best").resolve().name[5:]), dict(prompt="a" * 99))):
        actual = ask(name if name == "auto" else out / name, W, **options)
        assert actual["val_loss"] == losses[step - 1], f"{name}: {actual['val_loss']}, {losses}"
        assert (actual["param_sha256"] == trained["param_sha256"]) == (step == 4), name
        assert actual["train_loss"] is None and actual["step_ms"] is None, actual
        assert f"sample:\n{options['prompt']}" in actual["stdout"], actual["stdout"]
    for word in (f"--resume={out}", f"--resume={out}/bes"):  # as people mistype it
        refused("no checkpoint", None, argv=[word, "--eval_only"])
    refused("no checkpoint", None,
            argv=["--eval_only", "--resume=auto", f"--out_dir={tmp_path}"])
    assert view_of(out) == before, "out_dir has changed"


def test_losses_can_be_compared():
    """val_loss is the same to the last bit for all micro batches, numbers of ranks and modes that
    have equal weights, also where they do not divide; and it is the mean over the first blocks."""
    checkpoint = undisturbed(save_interval=1)["folder"] / NEWEST
    losses = set()
    for W, mode, m in ((1, "single", 1), (1, "zero3", 4), (2, "zero2", 1), (3, "torch-fsdp", 3),
                       (4, "zero1", 16)):
        losses.add(ask(checkpoint, W, mode=mode, micro_batch_size=m, eval_steps=7)["val_loss"])
    assert len(losses) == 1, losses
    for n in (1, 10**6, 2 * 10**6):
        losses.add(ask(checkpoint, eval_steps=n)["val_loss"])
    assert len(losses) == 3, f"of 7 blocks, of 1, and twice of all: {losses}"


# -------------------------------------------------------------------------------------------------
# flags of a run that goes on


def log_wandb(path):
    """Plant a stand-in for wandb that notes the id of a run."""
    def init(**options):
        write_line(path, options["id"])
        return mock.MagicMock()

    tracker = mock.MagicMock(__spec__="a stand-in")
    tracker.init.side_effect = init
    sys.modules["wandb"] = tracker


def test_resuming_takes_the_flags(tmp_path):
    """A run that resumes has the flags of its checkpoint, but for those that are given; it goes on
    in the folder of the checkpoint, and in the same run of Weights & Biases. In another mode, flags
    that only the old one has are dropped."""
    out = tmp_path / "out"
    options = dict(mode="ddp", save_interval=1, global_batch_size=4, comm_hook="hierarchical",
                   node_size=1)
    alone = finish(tmp_path / "alone", 2, **options)
    first = flags(**options, out_dir=out, max_steps=2, wandb=True)
    log = partial(log_wandb, tmp_path / "wandb")
    for words in (first, ["--resume=auto", f"--out_dir={out}", "--max_steps=3"],
                  [f"--resume={out}/step_00000003", "--max_steps=4"]):
        actual = finish(None, 2, argv=words, plant=log)
    assert "on 2 ranks (2 before)" in actual["stdout"], actual
    ids = lines_of(tmp_path / "wandb")
    assert actual["param_sha256"] == alone["param_sha256"], "other bits, so other flags"
    assert len(ids) == 3 and len(set(ids)) == 1, f"runs of Weights & Biases: {ids}"
    assert [entry["step"] for entry in lines_of(out / "metrics.jsonl")] == [1, 2, 3, 4]
    actual = finish(None, 2, argv=[f"--resume={out}/step_00000004", "--mode=zero3",
                                   "--max_steps=5", "--no-wandb"])
    assert actual["mode"] == "zero3" and actual["steps"] == 5, actual
    shutil.copytree(out, tmp_path / "copy")  # where `best` is no link
    finish(None, 1, argv=["--resume=auto", f"--out_dir={tmp_path}/copy", "--max_steps=6",
                          "--mode=single", "--dtype=fp16", "--no-wandb"])
    assert (tmp_path / "copy/best").is_symlink()
    finish(None, 1, argv=flags(out_dir=out, wandb=True, max_steps=1), plant=log)
    assert lines_of(tmp_path / "wandb")[-1] != ids[0], "a new run has the old one's id"


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_best_is_of_losses_that_compare(before, after, tmp_path):
    """Other blocks have another loss, be it higher or lower, of the same weights: then the best one
    is chosen anew, and that is said."""
    options = dict(eval_interval=1, save_interval=1, out_dir=tmp_path / "out")
    frozen = ["--lr=0", "--min_lr=0"]
    finish(None, argv=[*flags(**options, max_steps=2, eval_steps=before), *frozen])
    actual = finish(None, argv=["--resume=auto", f"--out_dir={tmp_path}/out", "--max_steps=3",
                                f"--eval_steps={after}"])
    assert f"val_loss is now of {after} sequences" in actual["stdout"], actual
    assert (tmp_path / "out/best").readlink().name == "step_00000003"
    actual = finish(None, argv=["--resume=auto", f"--out_dir={tmp_path}/out", "--max_steps=4"])
    assert "val_loss is now" not in actual["stdout"], actual
    assert (tmp_path / "out/best").readlink().name == "step_00000003", "an equal loss is no better"


def test_a_restart_takes_one_checkpoint(tmp_path):
    """A run that torchrun starts again takes flags and weights of its newest checkpoint, also where
    --resume names an older one, which has other flags, or one that is gone: as --resume auto would
    go on."""
    out = tmp_path / "out"
    long = "m" * 500 + "\udcff"  # as of --rdzv_id, and of a folder that is not UTF-8
    mine = partial(launched_by, long, 0)
    finish(out, save_interval=1, max_steps=3, keep_last=9)
    finish(None, argv=["--resume=auto", f"--out_dir={out}", "--lr=0.05", "--min_lr=0.05",
                       "--max_steps=5"], plant=mine)
    copy = shutil.copytree(out, tmp_path / "copy", symlinks=True)
    expected = finish(None, argv=["--resume=auto", f"--out_dir={copy}", "--max_steps=8"])
    for name, where, step in (("step_00000002", "step_00000005, after step 5", 8),
                              ("gone", "step_00000008, after step 8", 9)):
        words = [f"--resume={out}/{name}", f"--max_steps={step}"]
        actual = finish(None, argv=words, plant=partial(launched_by, long, 1))
        assert where in actual["stdout"], actual["stdout"]
        if step == 8:
            assert actual["param_sha256"] == expected["param_sha256"], "other flags, or weights"
    rates = [entry["lr"] for entry in lines_of(out / "metrics.jsonl")]
    assert rates[-3:] == 3 * [0.05], f"learning rates {rates}"
    # No restart: it means what it says.
    actual = finish(None, argv=[f"--resume={out}/step_00000002", "--max_steps=8"])
    assert "step_00000002, after step 2" in actual["stdout"], actual["stdout"]


# -------------------------------------------------------------------------------------------------
# time


def slow():
    """Plant a text that takes longer to tokenize, and a checkpoint that takes longer to hash, than
    ranks wait for each other."""
    def slowly(function):
        def call(*arguments):
            time.sleep(1.8)
            return function(*arguments)

        return call

    data.tokenize, runs.checksums = slowly(data.tokenize), slowly(runs.checksums)


def test_ranks_wait_for_rank_0(tmp_path):
    """While it reads a long text, and a large checkpoint, which takes longer than --timeout_s: when
    that is written, and when a run goes on from it."""
    options = dict(save_interval=4, eval_steps=0)
    out = shutil.copytree(undisturbed(**options)["folder"], tmp_path / "out", symlinks=True)
    finish(out, 2, mode="zero2", resume="auto", max_steps=5, timeout_s=1.5, plant=slow, **options)
    assert saved(out) == [4, 5]

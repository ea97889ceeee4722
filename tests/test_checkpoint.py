"""train.py: the files of a run."""

import itertools
import json
import os
import re
import shutil
import sys
from functools import partial
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp

from tests.common import ROOT
from tests.runs import (ask, finish, flags, lines_of, refused, saved, start_again, this_rank,
                        write_line)
from runs import checksums


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def make_unreadable(path):
    """As by a bad sector: to open a folder as a file is an OSError, too."""
    path.unlink()
    path.mkdir()


def leave_out(key):
    """Plant checkpoints that lack a tensor."""
    save = dcp.save

    def saved_without(tensors, **options):
        tensors.pop(key, None)
        save(tensors, **options)

    dcp.save = saved_without


@pytest.mark.parametrize("n_ranks, mode", [(1, "single"), (2, "zero2")])
def test_what_is_missing_is_named(n_ranks, mode, tmp_path):
    """A checkpoint that lacks a tensor is refused, on all ranks although one alone has a part of
    it, and metrics and checkpoints stay as they are."""
    key = "exp_avg.norm.weight"
    finish(tmp_path, n_ranks, mode=mode, save_interval=4, plant=partial(leave_out, key))
    before = contents(tmp_path / "step_00000004") | {(tmp_path / "metrics.jsonl").read_bytes()}
    refused(f"step_00000004: .*{key}", tmp_path, n_ranks, mode=mode, resume="auto")
    assert before <= contents(tmp_path)
    assert saved(tmp_path)[-1] == 4


# What is no checkpoint of a run: a flag, its value and what the line names.
MISFITS = (("n_layer", 3, r"(blocks\.2|n_layer)"), ("n_embd", 32, "(wte.weight|n_embd)"),
           ("seed", 3, "seed"), ("block_size", 8, "block_size"), ("max_steps", 3, "steps"),
           ("global_batch_size", 8, "global_batch_size"), ("dataset", ROOT / "train.py", "data"),
           ("optimizer", "muon", "optimizer"), ("resume", ROOT, str(ROOT)),
           ("resume", "nowhere", "nowhere"))


def log_names(folder):
    """Plant a log of what out_dir has when a checkpoint was written, and does not count yet."""
    save = dcp.save

    def logged(tensors, **options):
        save(tensors, **options)
        if this_rank() == 0:  # which publishes it
            write_line(folder / "names", os.listdir(folder / "sound"))

    dcp.save = logged


def test_damaged_checkpoints_are_named(tmp_path):
    """Whichever file of a checkpoint is changed, cut off or missing is named, exit status 2;
    --resume auto says so and takes the one before, on the same bits. What is no checkpoint of this
    run is refused by name."""
    def try_out(name, damage):
        out = tmp_path / f"{name} {damage.__name__}"
        shutil.copytree(sound, out, symlinks=True)
        damage(out / newest / name)
        refused(re.escape(name), out, **options, resume=out / newest)
        if damage in (flip, make_unreadable):
            result = finish(out, **options, resume="auto", fact=f"{newest}.*{name}")
            assert result["param_sha256"] == expected, f"after {name} was damaged: other bits"

    sound = tmp_path / "sound"
    newest = "step_00000004"
    options = dict(mode="zero2", save_interval=1, eval_steps=0)
    plant = partial(log_names, tmp_path)
    expected = finish(sound, 2, plant=plant, **options)["param_sha256"]
    *_, shown = lines_of(tmp_path / "names")
    assert "step_00000003" in shown and newest not in shown, f"{shown} before all is written"
    names = sorted(path.name for path in (sound / newest).iterdir())
    assert '"scaler": {}' in (sound / newest / "checkpoint.json").read_text(), "fp32 is scaled"
    damages = (flip, os.remove, make_unreadable)
    for name, damage in itertools.product(names, damages):
        try_out(name, damage)
    for name, value, fact in MISFITS:  # one at a time: they share a folder
        refused(fact, sound, **{**options, "resume": "auto", name: value})


def contents(*folders):
    """What all files below folders hold, but for .lock, which is the next run's."""
    actual = set()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != ".lock":
                actual.add(path.read_bytes())
    return actual


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


def view_of(folder):
    """{path: (content, time of the last change)} of all that is in folder."""
    view = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else os.listdir(path) if path.is_dir() else ""
        view[path] = content, path.lstat().st_mtime_ns
    return view


def test_checkpoints_are_asked(tmp_path):
    """--eval_only takes model, data and precision from a checkpoint, an older one too, prints its
    validation loss, its hash and a text that continues --prompt, in any mode, on any number of
    ranks, and changes nothing in out_dir."""
    out = tmp_path / "out"
    trained = finish(out, 2, mode="zero2", save_interval=1, shard_size=1, keep_last=9, seed=5,
                     n_layer=1)
    losses = [entry["val_loss"] for entry in lines_of(out / "metrics.jsonl")]
    before = view_of(out)
    for name, W, step, options in (
            ("step_00000004", 1, 4, dict(prompt="def ")),
            ("step_00000002", 3, 2, dict(mode="torch-fsdp", prompt="\u00e9t\u00e9")),
            ("auto", 2, 4, dict(mode="ddp", prompt="", out_dir=out)),  # or no text at all
            ("best", 1, int((out / "best").resolve().name[5:]), dict(prompt="a" * 99))):
        actual = ask(name if name == "auto" else out / name, W, **options)
        assert actual["val_loss"] == losses[step - 1], f"{name}: {actual['val_loss']}, {losses}"
        assert (actual["param_sha256"] == trained["param_sha256"]) == (step == 4), name
        assert f"sample:\n{options['prompt']}" in actual["stdout"], actual["stdout"]
        assert view_of(out) == before, f"out_dir has changed after {name}"
    for word in (f"--resume={out}", f"--resume={out}/bes"):  # as people mistype it
        refused("no checkpoint", None, argv=[word, "--eval_only"])
    refused("no checkpoint", None,
            argv=["--eval_only", "--resume=auto", f"--out_dir={tmp_path}"])
    assert view_of(out) == before, "out_dir has changed"


def test_resuming_takes_the_flags(tmp_path):
    """A run that resumes has the flags of its checkpoint, but for those that are given; it goes on
    in the folder of the checkpoint, and in the same run of Weights & Biases. So does one that
    torchrun starts again when that checkpoint is gone. In another mode, flags that only the old one
    has are dropped."""
    options = dict(W=2, mode="ddp", save_interval=1, global_batch_size=4, comm_hook="hierarchical",
                   node_size=1)
    alone = finish(tmp_path / "alone", **options)
    first = flags(**dict(options, W=None), out_dir=tmp_path / "out", max_steps=2, wandb=True)
    log = partial(log_wandb, tmp_path / "wandb")
    for words in (first, ["--resume=auto", f"--out_dir={tmp_path}/out", "--max_steps=3"],
                  [f"--resume={tmp_path}/out/step_00000003", "--max_steps=4"]):
        actual = finish(None, 2, argv=words, plant=log)
    ids = lines_of(tmp_path / "wandb")
    assert actual["param_sha256"] == alone["param_sha256"], "other bits, so other flags"
    assert len(ids) == 3 and len(set(ids)) == 1, f"runs of Weights & Biases: {ids}"
    steps = [entry["step"] for entry in lines_of(tmp_path / "out/metrics.jsonl")]
    assert steps == [1, 2, 3, 4], f"metrics.jsonl has steps {steps}"
    actual = finish(None, 2, argv=[f"--resume={tmp_path}/out/gone", "--max_steps=5", "--no-wandb"],
                    plant=start_again)
    assert actual["mode"] == "ddp" and actual["steps"] == 5, actual
    actual = finish(None, 4, argv=[f"--resume={tmp_path}/out/step_00000005", "--mode=zero3",
                                   "--max_steps=6", "--no-wandb"])
    assert actual["mode"] == "zero3" and actual["steps"] == 6, actual
    shutil.copytree(tmp_path / "out", tmp_path / "copy")  # where `best` is no link
    finish(None, 1, argv=["--resume=auto", f"--out_dir={tmp_path}/copy", "--max_steps=7",
                          "--mode=single", "--dtype=fp16", "--no-wandb"])
    finish(None, 1, argv=flags(out_dir=tmp_path / "out", wandb=True, max_steps=1), plant=log)
    assert lines_of(tmp_path / "wandb")[-1] != ids[0], "a new run has the old one's id"


def log_wandb(path):
    """Plant a stand-in for wandb that notes the id of a run."""
    def init(**options):
        write_line(path, options["id"])
        return mock.MagicMock()

    tracker = mock.MagicMock(__spec__="a stand-in")
    tracker.init.side_effect = init
    sys.modules["wandb"] = tracker


def test_a_restart_takes_one_checkpoint(tmp_path):
    """A run that torchrun starts again takes flags and weights of its newest checkpoint, also where
    --resume names an older one, which has other flags: as --resume auto would go on."""
    options = dict(save_interval=1, max_steps=3, keep_last=9)
    out = tmp_path / "out"
    finish(out, **options)
    words = ["--resume=auto", f"--out_dir={out}"]
    finish(None, argv=[*words, "--lr=0.05", "--min_lr=0.05", "--max_steps=5"])
    copy = shutil.copytree(out, tmp_path / "copy", symlinks=True)
    expected = finish(None, argv=[words[0], f"--out_dir={copy}", "--max_steps=8"])
    again = [f"--resume={out}/step_00000002", "--max_steps=8"]
    actual = finish(None, argv=again, plant=start_again)
    assert "step_00000005, after step 5" in actual["stdout"], actual["stdout"]
    assert actual["param_sha256"] == expected["param_sha256"], "other flags, or other weights"
    rates = [entry["lr"] for entry in lines_of(out / "metrics.jsonl")]
    assert rates[-3:] == 3 * [0.05], f"learning rates {rates}"
    actual = finish(None, argv=again)  # no restart: it means what it says
    assert "step_00000002, after step 2" in actual["stdout"], actual["stdout"]


def write_record(folder, record):
    """Change the record of a checkpoint, which stays valid."""
    (folder / "checkpoint.json").write_text(json.dumps(record))
    (folder / "SHA256SUMS").write_text("\n".join(checksums(folder)) + "\n")


def test_checkpoints_of_others_are_refused(tmp_path):
    """A checkpoint whose record has no flags is of another program, and one line says so."""
    finish(tmp_path, save_interval=4)
    folder = tmp_path / "step_00000004"
    record = json.loads((folder / "checkpoint.json").read_text())
    del record["flags"]
    write_record(folder, record)
    for W, options in ((1, dict(resume=folder)), (2, dict(resume="auto", mode="zero2")),
                       (1, dict(resume=folder, eval_only=True))):
        refused(f"{folder} was not written by train.py", tmp_path, W, **options)

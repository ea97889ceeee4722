"""train.py: its table of flags, and mistakes, which are one line and status 2."""

import dataclasses
import math
import os
import re
import sys
from functools import partial
from unittest import mock

import pytest
import torch

import runs
import train
from tests.common import raises, ROOT
from tests.runs import (finish, flags, flip_a_bit, in_update, refused, run_train, saved, spoil,
                        this_rank)

# -------------------------------------------------------------------------------------------------
# command lines

# Those that end with one line, which names the file or, where there is none, the flag. DATA is a
# folder of good and bad texts, made by the check.
BAD = """--no_such_flag=1 | --lr=fast | --lr=nan | --lr=-1 | --max_steps=0 | --max_steps=1.5
--mode=zero9 | --bucket_cap_mb=0 | --seed=99999999999999999999
--global_batch_size=3 --micro_batch_size=2 | --n_head=3 | --n_kv_head=3 | --tokenizer=gpt9
--tokenizer=gpt2 | --dataset=DATA/missing.txt | --dataset=DATA/empty.txt | --dataset=DATA/odd
--dataset=DATA/short.txt | --dataset=DATA/latin1.txt | --dataset=DATA/none | --dataset=DATA/beyond
--dataset=DATA/no_bin | --dataset=DATA/fine.txt --block_size=1024 --global_batch_size=64
--out_dir=DATA/fine.txt | --param_dtype=bf16 | --comm_hook=topk | --comm_hook=zip --mode=ddp
--offload | --topk_ratio=2 --mode=ddp --comm_hook=topk | --dtype=fp16 --mode=ddp --comm_hook=topk
--shard_size=1 --mode=ddp | --micro_batch_size=most | --resume=DATA/missing | --device=abacus
--trace --profile=2 | --eval_only | --init_from=gpt2 | --min_lr=1
--dataset=DATA/bin.txt"""
NAMED = {  # and those whose line names something else
    "--micro_batch_size=auto": "memory_limit_gb", "--wandb": "install wandb", "--beta2=1": "beta",
    "--micro_batch_size=auto --memory_limit_gb=0.2": "0.[12]", "--n_embd=1000000000000": "memory",
    "--tensorboard": "install tensorboard", "--mode=zero2 --shard_size=2": "shard_size",
    "--export_hf=hf": "install safetensors", "--compile": r"C\+\+ compiler",
    "--batch_size=8": "--micro_batch_size", "--max_step=5": "--max_steps", "--beta3=1": "--beta",
    "--dtype=bfloat16": "fp32.*bf16.*fp16", "--compile=False": "--no-compile",
    "--tokenizer": "expected one argument", "config.py": r"config\.py; --help lists all$",
    f"--resume={ROOT}": "no checkpoint", "--out_dir=": "--out_dir is empty",
    "--optimizer=muon --mode=torch-fsdp": "--mode .*naive.* zero1 or zero2 or zero3",
    "--dataset=DATA/abc.txt": "Take a longer text", "--dataset=DATA/chars": "input.txt"}


def bare():
    """Plant a machine without a network, without a compiler and without optional packages, whatever
    it has."""
    sys.modules |= dict(wandb=None, tensorboard=None, safetensors=None)
    os.environ.update(TIKTOKEN_CACHE_DIR="nowhere", HTTPS_PROXY="http://127.0.0.1:9")
    os.environ.update(PATH="", CXX="nowhere")


def write_texts(folder):
    """What BAD has below DATA, and folders of a text or of tokens for each rank."""
    texts = {"empty.txt": b"", "short.txt": b"too short", "abc.txt": b"abc",
             "latin1.txt": b"caf\xe9" * 1000, "bin.txt": bytes([7, 0] * 9000),
             "fine.txt": b"Some text. " * 999,
             "0/text": b"Text 0. " * 999, "1/other": b"", "no_bin/text": b""}
    for name, content in (("odd", bytes(601)), ("none", b""), ("beyond", b"\xff" * 600),
                          ("0/tokens", b"a\0" * 600), ("1/tokens", b"b\0" * 600),
                          ("0/lost", b"a\0" * 600)):
        texts |= {f"{name}/train.bin": content, f"{name}/val.bin": content}
    texts["chars/meta.pkl"] = b""
    for name, content in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_mistakes_are_one_line(tmp_path):
    """Every mistake gives exit status 2, one line on stderr that names it, and no traceback."""
    write_texts(tmp_path)
    facts = dict(NAMED)
    for line in re.split(r"\s*[|\n]\s*", BAD):
        files = re.findall(r"DATA/([\w.]+)", line)
        facts[line] = files[0] if files else re.findall(r"--(\w+)", line)[0]
    for n, (line, fact) in enumerate(facts.items()):
        words = line.replace("DATA", str(tmp_path)).split()
        refused(fact, None, plant=bare, argv=[*flags(out_dir=tmp_path / f"out{n}"), *words])
        assert not [*tmp_path.glob("out*/step*")], line


def elsewhere(parent):
    """Plant a working folder of its own for each rank."""
    os.chdir(parent / str(this_rank()))


def other_rate():
    if this_rank() == 1:
        sys.argv.append("--lr=0.2")


def half_of_torchrun():
    """Plant a rank's number without the rest of what torchrun says."""
    os.environ["RANK"] = "0"


def test_ranks_that_differ_are_refused(tmp_path):
    """With other options or other data, before the first step. With status 1, so are 20 steps in
    a row that are not finite, and a parameter of which a bit flips on a rank."""
    write_texts(tmp_path)
    here = partial(elsewhere, tmp_path)
    out = tmp_path / "out"
    refused("single", out, 2, mode="single")
    refused("RANK is set, but not by torchrun: .*WORLD_SIZE", out, plant=half_of_torchrun)
    refused(r"ranks differ in lr, which is \[0.01, 0.2\] on ranks 0 to 1", out, 2, mode="ddp",
            plant=other_rate)
    refused("differ in data", out, 2, mode="ddp", dataset="tokens", plant=here)
    refused("rank 1: .*lost", out, 2, mode="ddp", dataset="lost", plant=here)
    finish(out, 2, mode="ddp", dataset="text", plant=here)  # a text is rank 0's alone
    refused(r"ranks differ in the folder --out_dir, by its \.lock", "out", 2, mode="ddp",
            save_interval=1, plant=here)
    refused(r"step 23\b", out, 2, status=1, mode="ddp", max_steps=30,
            plant=partial(spoil, "cross_entropy", {2, *range(4, 99)}, math.nan))
    refused(r"wte\.weight", tmp_path / "a", 2, status=1, mode="ddp", save_interval=1,
            plant=partial(in_update, 2, 1, flip_a_bit))
    assert saved(tmp_path / "a") == [1], "it went on"


# -------------------------------------------------------------------------------------------------
# the table

FIELDS = {field.name: field for field in dataclasses.fields(train.Config)}
NEEDY = [name for name, field in FIELDS.items() if field.metadata["needs"]]
NUMBERS = [field for field in FIELDS.values() if field.type in (int, float, train.int_or_auto)]


def read(*words):
    """What train.py's flags make of words; SystemExit with its line for a mistake."""
    def refuse(text):
        raise SystemExit(text)

    with mock.patch.object(runs, "leave_together", refuse):
        return runs.read_flags(train.Config, "", words)


def completed(given, flags_of_checkpoint=None):
    """The Config of a run that goes on from a checkpoint with these flags, if any. What depends on
    ranks and on this machine is not checked."""
    record = None if flags_of_checkpoint is None else dict(flags=flags_of_checkpoint)
    with mock.patch.object(train, "check"):
        return train.config_of(given, record, torch.device("cpu"))


def another(field):
    """A value that is not the flag's default."""
    if field.type is bool:
        return not field.default
    possible = [*(field.metadata["choices"] or ())]
    if field in NUMBERS:
        possible += [field.type(field.metadata["least"]), 1]
    return next((value for value in possible if value != field.default), "another")


def test_help_has_each_flag():
    shown = run_train(None, argv=["--help"])
    assert shown.codes == [0] and re.findall(r"\n  --(\w+)", shown.stdout[0]) == [*FIELDS]
    assert "--topk_ratio TOPK_RATIO" in shown.stdout[0] and "[0.01]" in shown.stdout[0]


@pytest.mark.parametrize("name", NEEDY)
def test_flags_need_others(name):
    """A flag without effect is refused, with what it needs. Where it comes from a checkpoint it is
    dropped without a word; with what it needs it stays."""
    field = FIELDS[name]
    given = {name: another(field)}
    chain = field
    while chain.metadata["needs"]:  # comm_hook needs a mode itself
        needed, values = chain.metadata["needs"]
        given[needed] = [*values][0]
        chain = FIELDS[needed]
    assert getattr(completed(given), name) == another(field)
    needed, values = field.metadata["needs"]
    bad = {"mode": "torch-fsdp", "profile": 2}.get(needed, FIELDS[needed].default)
    raises(SystemExit, rf"--{name} needs --{needed} {[*values][0]}", completed,
           given | {needed: bad})
    kept = getattr(completed({**given, needed: bad, name: field.default}, {name: another(field)}),
                   name)
    assert kept == field.default, f"{kept} is of no use, and stays"


def test_some_flags_are_for_once():
    """What a run that resumes does not give it takes from its checkpoint, but for these flags, and
    an evaluation for some more. What it gives counts."""
    once = {"out_dir", "device", "timeout_s", "resume", "eval_only", "prompt", "trace", "profile",
            "export_hf"}
    config = train.Config(**{name: another(field) for name, field in FIELDS.items()})
    assert runs.flags_to_save(config).keys() == FIELDS.keys() - once
    config.mode, config.comm_hook, config.micro_batch_size = "ddp", "topk", "auto"
    saved_flags = runs.flags_to_save(config)
    actual = completed({}, saved_flags)
    for name, field in FIELDS.items():
        expected = getattr(config, name)
        if name in once or field.metadata["needs"] == train.ZERO or name == "node_size":
            expected = field.default
        assert getattr(actual, name) == expected, name
    assert completed(dict(lr=7.0, n_embd=None), saved_flags).lr == 7.0
    evaluated = completed(dict(eval_only=True), saved_flags)
    for name in ("compile", "comm_hook", "shard_size", "tensorboard", "wandb"):
        assert getattr(evaluated, name) == FIELDS[name].default, name

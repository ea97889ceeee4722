"""train.py: mistakes in flags and data, and ranks that differ."""

import math
import os
import re
import sys
from functools import partial

from tests.common import two_at_a_time
from tests.params import ROOT
from tests.runs import flags, flip_a_bit, in_update, refused, saved, spoil, this_rank

# Command lines that end with one line, which names the file or, where there is none, the flag.
# Adding one costs a third of a second. DATA is a folder of good and bad texts, made by the check.
BAD = """--no_such_flag=1 | --lr=fast | --lr=nan | --lr=-1 | --max_steps=0 | --max_steps=1.5
--mode=zero9 | --dtype=fp8 | --model=gpt5 | --bucket_cap_mb=0 | --seed=99999999999999999999
--global_batch_size=3 --micro_batch_size=2 | --n_head=3 | --n_kv_head=3 | --tokenizer=gpt9
--tokenizer=gpt2 | --dataset=DATA/missing.txt | --dataset=DATA/empty.txt | --dataset=DATA/odd
--dataset=DATA/short.txt | --dataset=DATA/latin1.txt | --dataset=DATA/none | --dataset=DATA/beyond
--dataset=DATA/no_bin | --dataset=DATA/fine.txt --block_size=1024 --global_batch_size=64
--out_dir=DATA/fine.txt | --param_dtype=bf16 | --comm_hook=topk | --comm_hook=zip --mode=ddp
--offload | --topk_ratio=2 --mode=ddp --comm_hook=topk | --dtype=fp16 --mode=ddp --comm_hook=topk
--shard_size=1 --mode=ddp | --micro_batch_size=most | --resume=DATA/missing | --device=abacus
--optimizer=sgd | --optimizer=muon --mode=torch-fsdp
--trace --profile=2 | --eval_only | --init_from=gpt2 | --min_lr=1 | --dataset=DATA/bin.txt"""
NAMED = {  # and those whose line names something else
    "--micro_batch_size=auto": "memory_limit_gb", "--wandb": "install wandb", "--beta2=1": "beta",
    "--micro_batch_size=auto --memory_limit_gb=0.2": "0.[12]", "--n_embd=1000000000000": "memory",
    "--tensorboard": "install tensorboard", "--mode=zero2 --shard_size=2": "shard_size",
    "--export_hf=hf": "install safetensors", "--compile": r"C\+\+ compiler",
    "--batch_size=8": "--micro_batch_size", "--max_iters=5": "--max_steps",
    "--dtype=bfloat16": "--dtype bf16", "--compile=False": "--no-compile",
    "--learning_rate=0.1": "--lr", "--dropout=0.1 --start=a": "dropout.*--start=a.*--prompt",
    "config.py": "config.py", f"--resume={ROOT}": "no checkpoint"}


def bare():
    """Plant a machine without a network, without a compiler and without optional packages, whatever
    it has."""
    sys.modules |= dict(wandb=None, tensorboard=None, safetensors=None)
    os.environ.update(TIKTOKEN_CACHE_DIR="nowhere", HTTPS_PROXY="http://127.0.0.1:9")
    os.environ.update(PATH="", CXX="nowhere")


def elsewhere(parent):
    """Plant a working folder of its own for each rank."""
    os.chdir(parent / str(this_rank()))


def other_rate():
    if this_rank() == 1:
        sys.argv.append("--lr=0.2")


def write_texts(folder):
    """What BAD has below DATA."""
    texts = {"empty.txt": b"", "short.txt": b"too short", "latin1.txt": b"caf\xe9" * 1000,
             "bin.txt": bytes([7, 0] * 9000), "fine.txt": b"Some text. " * 999,
             "0/text": b"Text 0. " * 999,
             "1/text": b"Text 1. " * 999, "0/lost": b"Text. " * 999, "no_bin/text": b""}
    for name, content in (("odd", bytes(601)), ("none", b""), ("beyond", b"\xff" * 600)):
        texts |= {f"{name}/train.bin": content, f"{name}/val.bin": content}
    for name, content in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def test_mistakes_are_one_line(tmp_path):
    """Every mistake gives exit status 2, one line on stderr that names it, and no traceback; so do
    ranks with other options or other data, before the first step. With status 1, so do 20 steps in
    a row that are not finite, and a parameter of which a bit flips on a rank."""
    def try_out(line, fact):
        words = line.replace("DATA", str(tmp_path)).split()
        refused(fact, None, plant=bare, argv=[*flags(out_dir=tmp_path / "out"), *words])

    write_texts(tmp_path)
    facts = dict(NAMED)
    for line in re.split(r"\s*[|\n]\s*", BAD):
        files = re.findall(r"DATA/([\w.]+)", line)
        facts[line] = files[0] if files else re.findall(r"--(\w+)", line)[0]
    two_at_a_time(try_out, *zip(*facts.items()))
    here = partial(elsewhere, tmp_path)
    out = tmp_path / "out"
    refused("single", out, 2, mode="single")
    refused("lr", out, 2, mode="ddp", plant=other_rate)
    refused("differ in data", out, 2, mode="ddp", dataset="text", plant=here)
    refused("lost", out, 2, mode="ddp", dataset="lost", plant=here)
    refused(r"step 23\b", out, 2, status=1, mode="ddp", max_steps=30,
            plant=partial(spoil, "cross_entropy", {2, *range(4, 99)}, math.nan))
    refused(r"wte\.weight", tmp_path / "a", 2, status=1, mode="ddp", save_interval=1,
            plant=partial(in_update, 2, 1, flip_a_bit))
    assert saved(tmp_path / "a")[-1] <= 2, "it went on"

"""train.py: data and rates."""

import math
import pathlib
import pickle
import re
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import train
from checkpoint import read_record
from data import (Characters, encode_prompt, global_batch, micro_batches, PlainUnpickler,
                  ReadAhead, some_of)
from tests.common import raises
from tests.runs import ask, finish, lines_of, refused, write_line


def log_samples(folder):
    """Plant a log of the blocks that a run trains on, whose first two targets are their numbers."""
    cross_entropy = F.cross_entropy

    def logged(logits, targets, **_):
        if torch.is_grad_enabled():
            numbers = 256 * targets[::4] + targets[1::4]
            write_line(folder / "order", numbers.tolist())
        return cross_entropy(logits, targets)

    F.cross_entropy = logged


def test_data_and_rates_are_as_promised(tmp_path):
    """No sample comes twice in an epoch, and epochs have another order. nanoGPT's folders are read.
    Warm-up is linear, then a cosine. (That ranks take the samples in this order is what the hashes
    of any number of ranks show.)"""
    n = 50
    batch = 12
    steps = 8
    tokens = [0]
    for i in range(n):
        tokens += i // 256, i % 256, 0, 0
    for name, ids in (("train.bin", tokens), ("val.bin", tokens[:5])):  # 50 blocks, and one
        np.array(ids, dtype=np.uint16).tofile(tmp_path / name)
    finish(tmp_path / "out", dataset=tmp_path, block_size=4, global_batch_size=batch, eval_steps=1,
           micro_batch_size=2, max_steps=steps, min_lr=None,
           plant=partial(log_samples, tmp_path))
    order = []
    for numbers in lines_of(tmp_path / "order"):
        order += numbers
    for step, entry in enumerate(lines_of(tmp_path / "out/metrics.jsonl")):
        cosine = 0.001 + 0.009 * (1 + math.cos(math.pi * (step - 2) / (steps - 2))) / 2
        lr = 0.01 * (step + 1) / 3 if step < 2 else cosine
        assert abs(entry["lr"] - lr) < 1e-9, f"step {step + 1}: lr {entry['lr']}, not {lr}"
    (tmp_path / "text").write_text("a" * 9000 + "b" * 1000)
    ends = finish(tmp_path / "out", dataset=tmp_path / "text", max_steps=40, micro_batch_size=2,
                  eval_interval=40, eval_steps=99)
    assert lines_of(tmp_path / "out/metrics.jsonl")[-1]["lr"] == 0.01, "--min_lr is 0.01, and --lr"
    config = train.Config(block_size=4, global_batch_size=batch)
    orders = []
    for seed in (1, 2):
        config.seed = seed
        orders.append(global_batch(np.zeros(4 * n + 1), 1, config).tolist())
    assert orders[0] != orders[1], "the order does not depend on the seed"
    assert ends["train_loss"] < 1 and ends["val_loss"] > 4, "the last tenth validates"
    assert len(order) == steps * batch, f"{len(order)} samples in {steps} steps of {batch}"
    in_epoch = n // batch * batch
    epochs = [order[i:i + in_epoch] for i in range(0, len(order), in_epoch)]
    assert epochs[0] != epochs[1], "epochs are alike, or y is x"
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch), "a sample came twice"


@pytest.mark.ranks(1, 2)
def test_the_first_batch_is_read_ahead(W):
    """ReadAhead has the micro batches of each step, from any step on and over the end of an epoch.
    A step's first one is read when all of the step before are used, and no other one ahead; nor
    is one after the last step."""
    config = train.Config(block_size=4, global_batch_size=4, micro_batch_size=1, max_steps=7)
    tokens = np.arange(4 * 10 + 1)  # an epoch has two steps
    cpu = torch.device("cpu")
    n = 4 // W
    first_step = 2
    read = []

    def spied(*arguments):
        read.append(arguments[1].tolist())
        return read_blocks(*arguments)

    read_blocks = data.read_blocks
    ahead = ReadAhead(tokens, first_step, config, cpu)
    for step in range(first_step, 7):
        expected = [*micro_batches(tokens, step, config, cpu)]
        first_of_next, _ = next(micro_batches(tokens, step + 1, config, cpu))
        with mock.patch.object(data, "read_blocks", spied):
            read.clear()
            found = ahead.of_next_step()
            n_before = 1 if step > first_step else 0  # read in the step before
            for i, (x, y) in enumerate(expected):
                inputs, targets = next(found)
                assert torch.equal(inputs, x) and torch.equal(targets, y), f"step {step}, {i}"
                assert len(read) == i + 1 - n_before, f"step {step}, {i}: {read}"
            assert next(found, None) is None, f"step {step} has more than {n} micro batches"
        assert len(expected) == n and len(read) == n + 1 - n_before, f"step {step}: {read}"
        assert 4 * read[-1][0] == first_of_next[0, 0], f"step {step}: {read[-1]} was read ahead"
    with mock.patch.object(data, "read_blocks", spied):
        read.clear()
        assert len([*ahead.of_next_step()]) == n and len(read) == n - 1, f"the last step: {read}"


def test_large_data_is_read_in_part():
    """Every rank compares its data with the others', of which it reads a million tokens: the first
    and the last ones among them."""
    tokens = np.arange(3 * 10**6)
    found = some_of(tokens)
    assert 10**6 <= len(found) < 1.1 * 10**6 and {0, 3 * 10**6 - 1} <= set(found)
    assert some_of(tokens[:1000]).tolist() == tokens[:1000].tolist()


def test_losses_can_be_compared(tmp_path):
    """val_loss is the same to the last bit for all micro batches, numbers of ranks and modes that
    have equal weights, also where they do not divide; and it is the mean over the first blocks."""
    out = tmp_path / "out"
    finish(out, save_interval=4, eval_steps=7)
    losses = set()
    for W, mode, m in ((1, "single", 1), (1, "single", 2), (1, "zero3", 4), (1, "ddp", 7),
                       (1, "single", 16), (2, "zero2", 1), (2, "torch-fsdp", 3), (3, "zero3", 2),
                       (3, "naive", 1), (4, "zero1", 1), (2, "torch-ddp", 5)):
        losses.add(ask(out / "step_00000004", W, mode=mode, micro_batch_size=m)["val_loss"])
    assert len(losses) == 1, losses
    fewer = ask(out / "step_00000004", eval_steps=1)["val_loss"]
    assert {fewer} != losses, "--eval_steps changes nothing"
    all_blocks = [ask(out / "step_00000004", eval_steps=n)["val_loss"] for n in (10**6, 2 * 10**6)]
    assert all_blocks[0] == all_blocks[1] and {all_blocks[0]} != losses


def write_characters(folder, meta=None):
    """What nanoGPT's data/shakespeare_char/prepare.py writes, of a text that repeats."""
    text = "abc, xyz!\n" * 500
    characters = sorted(set(text))
    stoi = {character: i for i, character in enumerate(characters)}
    itos = dict(enumerate(characters))
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        np.array([stoi[character] for character in text], np.uint16).tofile(folder / name)
    meta = meta or dict(vocab_size=len(characters), itos=itos, stoi=stoi)
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return characters


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_characters_of_nanogpt(n_ranks, tmp_path):
    """A folder with meta.pkl is trained with its vocabulary, by which the sample is decoded and
    --prompt is encoded, also where a checkpoint is asked; other characters are refused."""
    characters = write_characters(tmp_path / "chars")
    out, mode = tmp_path / "out", "zero3" if n_ranks > 1 else "single"
    found = finish(out, n_ranks, mode=mode, dataset=tmp_path / "chars", max_steps=60, lr=0.03,
                   min_lr=0.03, save_interval=60, eval_interval=60, sample_tokens=20, prompt="abc,")
    sample = re.search(r"^sample:\n(.*)RESULT", found["stdout"], re.M | re.DOTALL)[1][:-1]
    assert sample.startswith("abc,") and len(sample) == 24 and set(sample) <= set(characters)
    assert "xyz!" in sample, f"it has learned nothing: {sample!r}"
    n = int(re.match(r"([\d,]+) parameters", found["stdout"])[1].replace(",", ""))
    others = finish(tmp_path / "bytes", max_steps=1)["stdout"]
    n_others = int(re.search(r"^([\d,]+) parameters", others, re.M)[1].replace(",", ""))
    # The next multiples of 64: of 10 tokens, and of 257.
    assert n_others - n == (320 - 64) * 16, f"{n} parameters, and {n_others}"
    best = out / "step_00000060"
    assert read_record(best)["facts"]["vocab_size"] == len(characters) == 10
    asked = ask(best, n_ranks, mode=mode, prompt="xy", sample_tokens=3)
    assert re.search("^sample:\nxyz!\n", asked["stdout"], re.M), asked["stdout"]
    assert asked["val_loss"] == found["val_loss"]
    refused(r"--prompt has \['X', 'é'\]", None, n_ranks,
            argv=[f"--resume={best}", "--eval_only", "--prompt=éaX"])


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_bad_characters_are_refused(tmp_path):
    """In a line, before anything is trained: a meta.pkl that would run code, which it does not; one
    that lacks something, or is cut off; and another tokenizer beside a good one."""
    trap = tmp_path / "trap"
    for i, meta in enumerate((RunsCode(trap), dict(vocab_size=RunsCode(trap)), dict(itos={}),
                              [1, 2])):
        write_characters(tmp_path / f"bad{i}", meta)
        refused(r"meta\.pkl is not as nanoGPT writes it", tmp_path / "out",
                dataset=tmp_path / f"bad{i}")
    assert not trap.exists(), "the pickle has run"
    write_characters(tmp_path / "good")
    path = tmp_path / "good" / "meta.pkl"
    refused("--tokenizer gpt2: .*meta.pkl", tmp_path / "out", dataset=tmp_path / "good",
            tokenizer="gpt2")
    content = path.read_bytes()
    for bad in (content[:30], b"", b"no pickle"):
        path.write_bytes(bad)
        refused("meta.pkl is not as", tmp_path / "out", dataset=tmp_path / "good")
    path.write_bytes(content)
    assert encode_prompt("", Characters(path)) == [0], "an empty prompt is a token"


def test_no_pickle_runs_code(tmp_path):
    """Whatever it names."""
    for value in (print, pathlib.Path("a"), np.zeros(1), torch.float32, RunsCode(tmp_path / "a")):
        (tmp_path / "pickle").write_bytes(pickle.dumps(value))
        with open(tmp_path / "pickle", "rb") as file:
            raises(pickle.UnpicklingError, "it has a ", PlainUnpickler(file).load)

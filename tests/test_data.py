"""train.py: data and rates."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
import train
from data import global_batch, micro_batches, some_of
from tests.common import raises
from tests.runs import ask, finish, lines_of, write_line
from tests.test_flags import bare
from tests.ranks import on_ranks


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


@on_ranks(1, 2)
def test_ranks_take_micro_batches_in_turn(W):
    """From any step on, over the end of an epoch: all ranks together have each step's batch, in its
    order."""
    config = train.Config(block_size=4, global_batch_size=4, micro_batch_size=1)
    tokens = np.arange(4 * 10 + 1)  # an epoch has two steps
    cpu = torch.device("cpu")
    for first_step in (1, 2, 5):
        batches = micro_batches(tokens, first_step, config, cpu)
        for step in range(first_step, first_step + 4):
            starts = []
            for x, y in itertools.islice(batches, 4 // W):
                assert torch.equal(x + 1, y) and x.shape == (1, 4), f"step {step}: {x}, {y}"
                starts.append(x[0, 0].item() // 4)
            of_ranks = [None] * W
            dist.all_gather_object(of_ranks, starts)
            in_turn = [start for turn in zip(*of_ranks) for start in turn]
            assert in_turn == global_batch(tokens, step, config).tolist(), f"step {step}"


def test_large_data_is_read_in_part():
    """Every rank compares its data with the others', of which it reads a million tokens: the first
    and the last ones among them."""
    tokens = np.arange(3 * 10**6)
    actual = some_of(tokens)
    assert 10**6 <= len(actual) < 1.1 * 10**6 and {0, 3 * 10**6 - 1} <= set(actual)
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


def write_tokens(folder, content, val=None):
    """The bytes of a folder's training and validation tokens."""
    folder.mkdir()
    (folder / "train.bin").write_bytes(content)
    (folder / "val.bin").write_bytes(content if val is None else val)
    return folder


def load(folder, vocab_size=50257, ids=None, **options):
    """What a run of a model that knows so many tokens has of a folder, or of a text's ids."""
    config = train.Config(dataset=str(folder), **{**dict(block_size=4, global_batch_size=8,
                                                         eval_steps=2), **options})
    return data.load_tokens(config, ids, vocab_size)


def some_tokens(vocab_size, n=20_000):
    """The last one is the largest."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=n)
    tokens[-1] = vocab_size - 1
    return tokens


@pytest.mark.parametrize("vocab_size, number_format", [
    (65, "<u2"), (257, "<u2"), (50257, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4"), (200019, "<u4")])
def test_numbers_have_as_many_bits_as_the_vocabulary(vocab_size, number_format, tmp_path):
    """16, or 32 where that is too few; none is changed, and both files are mapped."""
    expected = some_tokens(vocab_size)
    folder = write_tokens(tmp_path / "data", expected.astype(number_format).tobytes(),
                          expected[:40].astype(number_format).tobytes())
    tokens, val_tokens = load(folder, vocab_size)
    assert np.array_equal(tokens, expected) and np.array_equal(val_tokens, expected[:40])
    assert tokens.dtype == number_format and isinstance(tokens, np.memmap)


@pytest.mark.parametrize("name", ["train", "val"])
@pytest.mark.parametrize("vocab_size", [65, 257, 50257, 200019])
def test_tokens_that_the_model_lacks_are_refused(name, vocab_size, tmp_path):
    """By the file's name and both numbers, wherever the token stands."""
    fine = some_tokens(vocab_size)
    bad = some_tokens(vocab_size + 1)
    number_format = "<u2" if vocab_size <= 2**16 else "<u4"
    contents = {"train": fine, "val": fine, name: bad}
    folder = write_tokens(tmp_path / "data",
                          *(tokens.astype(number_format).tobytes() for tokens in contents.values()))
    fact = rf"/{name}\.bin has token {vocab_size}, but the model knows {vocab_size}: "
    raises(SystemExit, fact, load, folder, vocab_size)


@pytest.mark.parametrize("content, vocab_size, fact", [
    (b"", 257, "has 0 bytes, which are no tokens of uint16"),
    (bytes(601), 257, "has 601 bytes, which are no tokens of uint16: each has 2"),
    (bytes(602), 10**5, "has 602 bytes, which are no tokens of uint32: each has 4"),
    (bytes(40), 257, "is too short: it has 20 tokens to train on and 20 to validate with, and 33")])
def test_what_is_no_tokens_is_refused(content, vocab_size, fact, tmp_path):
    raises(SystemExit, fact, load, write_tokens(tmp_path / "data", content), vocab_size)


def test_what_is_not_needed_need_not_be_there(tmp_path):
    """A run that validates with nothing needs no val.bin, and an evaluation no train.bin; nor is a
    token of it looked at."""
    folder = write_tokens(tmp_path / "data", some_tokens(300).astype("<u2").tobytes())
    (folder / "val.bin").unlink()
    raises(OSError, "val.bin", load, folder)
    tokens, val_tokens = load(folder, eval_steps=0)
    assert len(tokens) == 20_000 and len(val_tokens) == 0
    (folder / "train.bin").rename(folder / "val.bin")
    tokens, val_tokens = load(folder, eval_only=True)
    assert len(tokens) == 0 and len(val_tokens) == 20_000
    assert [len(tokens) for tokens in load(folder, 65, eval_only=True, eval_steps=0)] == [0, 0]
    ids = np.arange(100)
    for options in (dict(eval_only=True), dict(eval_steps=0)):
        raises(SystemExit, "data has token", load, folder, 65, ids, **options)
    actual = load(folder, 65, ids, eval_only=True, eval_steps=0)
    assert [len(tokens) for tokens in actual] == [0, 0]


def test_what_is_no_character_is_a_question_mark():
    """As a command line has it that is no UTF-8."""
    assert data.encode("a\udcff\u00e9", data.load_tokenizer("bytes")).tolist() == [
        *b"a?", *"\u00e9".encode()]


def test_characters_of_nanogpt_are_refused(tmp_path):
    """Their numbers mean something else than --tokenizer's. Their text is read."""
    folder = write_tokens(tmp_path / "data", bytes(600))
    (folder / "meta.pkl").write_bytes(b"")
    raises(SystemExit, "data has characters, by its meta.pkl: give the text itself", load, folder)


def test_tokens_of_32_bits_are_trained_on(tmp_path):
    """Those of a tokenizer that cannot be had, whose vocabulary has more than 16 bits. The run goes
    on where it was stopped, and is evaluated."""
    content = some_tokens(200019).astype("<u4").tobytes()
    options = dict(tokenizer="o200k_base", n_layer=1, n_embd=8, save_interval=2, plant=bare)
    folder = write_tokens(tmp_path / "data", content)
    expected = finish(tmp_path / "whole", dataset=folder, **options)
    out = tmp_path / "out"
    finish(out, dataset=folder, **{**options, "max_steps": 2})
    actual = finish(out, 2, dataset=folder, mode="zero2", resume="auto", **options)
    assert "(1 before)" in actual["stdout"] and actual["param_sha256"] == expected["param_sha256"]
    asked = finish(None, argv=[f"--resume={out}/step_00000004", "--eval_only"], plant=bare)
    assert asked["val_loss"] == expected["val_loss"]

"""data.py, and the rates: what a run trains on."""

import itertools
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
import train
from data import global_batch, micro_batches, some_of
from tests.common import raises, ROOT
from tests.ranks import on_ranks
from tests.runs import finish, lines_of, refused, write_line
from tests.test_flags import bare

# -------------------------------------------------------------------------------------------------
# samples


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
    n, batch, steps = 50, 12, 8
    tokens = [0]
    for i in range(n):
        tokens += i // 256, i % 256, 0, 0
    for name, ids in (("train.bin", tokens), ("val.bin", tokens[:5])):  # 50 blocks, and one
        np.array(ids, dtype=np.uint16).tofile(tmp_path / name)
    finish(tmp_path / "out", dataset=tmp_path, block_size=4, global_batch_size=batch, eval_steps=1,
           micro_batch_size=2, max_steps=steps, min_lr=None,
           plant=partial(log_samples, tmp_path))
    order = list(itertools.chain(*lines_of(tmp_path / "order")))
    assert len(order) == steps * batch, f"{len(order)} samples in {steps} steps of {batch}"
    in_epoch = n // batch * batch
    epochs = [order[i:i + in_epoch] for i in range(0, len(order), in_epoch)]
    assert epochs[0] != epochs[1], "epochs are alike, or y is x"
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch), "a sample came twice"
    for step, entry in enumerate(lines_of(tmp_path / "out/metrics.jsonl")):
        cosine = 0.001 + 0.009 * (1 + math.cos(math.pi * (step - 2) / (steps - 2))) / 2
        lr = 0.01 * (step + 1) / 3 if step < 2 else cosine
        assert abs(entry["lr"] - lr) < 1e-9, f"step {step + 1}: lr {entry['lr']}, not {lr}"


def test_the_last_tenth_validates(tmp_path):
    (tmp_path / "text").write_text("a" * 9000 + "b" * 1000)
    ends = finish(tmp_path / "out", dataset=tmp_path / "text", max_steps=40, micro_batch_size=2,
                  eval_interval=40, eval_steps=99)
    assert ends["train_loss"] < 1 and ends["val_loss"] > 4
    assert "9,000 training tokens" in ends["stdout"], ends["stdout"]
    assert lines_of(tmp_path / "out/metrics.jsonl")[-1]["lr"] == 0.01, "--min_lr is 0.01, and --lr"


@on_ranks(1, 2)
def test_ranks_take_micro_batches_in_turn(W):
    """From any step on, over the end of an epoch: all ranks together have each step's batch, in its
    order, which is another one with another seed."""
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
    config.seed += 1
    assert in_turn != global_batch(tokens, step, config).tolist()


def test_large_data_is_read_in_part():
    """Every rank compares its data with the others', of which it reads a million tokens: the first
    and the last ones among them."""
    tokens = np.arange(3 * 10**6)
    actual = some_of(tokens)
    assert 10**6 <= len(actual) < 1.1 * 10**6 and {0, 3 * 10**6 - 1} <= set(actual)
    assert some_of(tokens[:1000]).tolist() == tokens[:1000].tolist()


# -------------------------------------------------------------------------------------------------
# folders of tokens, and texts


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
    (257, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4"), (200019, "<u4")])
def test_numbers_have_as_many_bits_as_the_vocabulary(vocab_size, number_format, tmp_path):
    """16, or 32 where that is too few; none is changed, and both files are mapped. A token that
    the model lacks is refused, by the file's name and both numbers."""
    expected = some_tokens(vocab_size).astype(number_format)
    folder = write_tokens(tmp_path / "data", expected.tobytes(), expected[:40].tobytes())
    tokens, val_tokens = load(folder, vocab_size)
    assert np.array_equal(tokens, expected) and np.array_equal(val_tokens, expected[:40])
    assert tokens.dtype == number_format and isinstance(tokens, np.memmap)
    if vocab_size != 2**16 + 1:  # one less has another format
        fact = f"/train.bin has token {vocab_size - 1}, but the model knows {vocab_size - 1}: "
        raises(SystemExit, fact, load, folder, vocab_size - 1)
        (folder / "train.bin").write_bytes((expected // 2).tobytes())
        (folder / "val.bin").write_bytes(expected.tobytes())
        raises(SystemExit, fact.replace("train", "val"), load, folder, vocab_size - 1)


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


def test_short_texts_name_what_they_lack(tmp_path):
    """To train and to validate. One that is just long enough will do."""
    ids = np.zeros(560, np.uint16)  # of which 504 are to train on
    fact = "504 tokens to train on and 56 to validate with, and {} and {} are needed"
    raises(SystemExit, fact.format(513, 257), load, "text", ids=ids, global_batch_size=2,
           block_size=256)
    raises(SystemExit, fact.format(129, 65), load, "text", ids=ids, global_batch_size=2,
           block_size=64)
    load("text", ids=ids, global_batch_size=2, block_size=64, eval_steps=0)
    load("text", ids=ids, global_batch_size=9, block_size=55)
    raises(SystemExit, "505 and 57", load, "text", ids=ids, global_batch_size=9, block_size=56)


def test_what_is_no_character_is_a_question_mark():
    """As a command line has it that is no UTF-8."""
    assert data.encode("a\udcff\u00e9", data.load_tokenizer("bytes")).tolist() == [
        *b"a?", *"\u00e9".encode()]


def test_tokens_need_no_tokenizer(tmp_path):
    """A folder of train.bin and val.bin trains, is resumed, and is evaluated, where its tokenizer,
    whose vocabulary has more than 16 bits, cannot be had. The sample says why it is missing, and
    the result is there. Names that nobody knows, and texts, are refused as ever."""
    folder = write_tokens(tmp_path / "data", some_tokens(200019).astype("<u4").tobytes())
    options = dict(tokenizer="o200k_base", n_layer=1, n_embd=4, dataset=folder, save_interval=1,
                   plant=bare)
    expected = finish(tmp_path / "whole", max_steps=2, **options)
    pattern = r"^sample:\nnone, as there is no tokenizer: .*o200k_base.*\nRESULT"
    assert re.search(pattern, expected["stdout"], re.M), expected["stdout"]
    out = tmp_path / "out"
    finish(out, max_steps=1, **options)
    actual = finish(out, 2, mode="zero2", resume="auto", max_steps=2, **options)
    assert actual["param_sha256"] == expected["param_sha256"]
    words = [f"--resume={out}/step_00000002", "--eval_only"]
    asked = finish(None, 2, argv=words, plant=bare)
    assert asked["val_loss"] == expected["val_loss"] and "none, as" in asked["stdout"]
    refused("tokenizer gpt9", tmp_path / "a", **{**options, "tokenizer": "gpt9"})
    refused("tokenizer gpt2", tmp_path / "a", **{**options, "tokenizer": "gpt2",
                                                 "dataset": ROOT / "LICENSE"})

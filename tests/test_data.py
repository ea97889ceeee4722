"""train.py: data and rates."""

import gzip
import io
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
from tests.params import ROOT
from tests.runs import ask, finish, lines_of, refused, write_line
from tests.test_flags import bare


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
            actual = ahead.of_next_step()
            n_before = 1 if step > first_step else 0  # read in the step before
            for i, (x, y) in enumerate(expected):
                inputs, targets = next(actual)
                assert torch.equal(inputs, x) and torch.equal(targets, y), f"step {step}, {i}"
                assert len(read) == i + 1 - n_before, f"step {step}, {i}: {read}"
            assert next(actual, None) is None, f"step {step} has more than {n} micro batches"
        assert len(expected) == n and len(read) == n + 1 - n_before, f"step {step}: {read}"
        assert 4 * read[-1][0] == first_of_next[0, 0], f"step {step}: {read[-1]} was read ahead"
    with mock.patch.object(data, "read_blocks", spied):
        read.clear()
        assert len([*ahead.of_next_step()]) == n and len(read) == n - 1, f"the last step: {read}"


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
    actual = finish(out, n_ranks, mode=mode, dataset=tmp_path / "chars", max_steps=60, lr=0.03,
                    min_lr=0.03, save_interval=60, eval_interval=60, sample_tokens=20,
                    prompt="abc,")
    sample = re.search(r"^sample:\n(.*)RESULT", actual["stdout"], re.M | re.DOTALL)[1][:-1]
    assert sample.startswith("abc,") and len(sample) == 24 and set(sample) <= set(characters)
    assert "xyz!" in sample, f"it has learned nothing: {sample!r}"
    n = int(re.match(r"([\d,]+) parameters", actual["stdout"])[1].replace(",", ""))
    others = finish(tmp_path / "bytes", max_steps=1)["stdout"]
    n_others = int(re.search(r"^([\d,]+) parameters", others, re.M)[1].replace(",", ""))
    # The next multiples of 64: of 10 tokens, and of 257.
    assert n_others - n == (320 - 64) * 16, f"{n} parameters, and {n_others}"
    best = out / "step_00000060"
    assert read_record(best)["facts"]["vocab_size"] == len(characters) == 10
    asked = ask(best, n_ranks, mode=mode, prompt="xy", sample_tokens=3)
    assert re.search("^sample:\nxyz!\n", asked["stdout"], re.M), asked["stdout"]
    assert asked["val_loss"] == actual["val_loss"]
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
    assert encode_prompt("", Characters(data.read_meta(path))) == [0], "an empty prompt is a token"


def test_no_pickle_runs_code(tmp_path):
    """Whatever it names."""
    for value in (print, pathlib.Path("a"), np.zeros(1), torch.float32, RunsCode(tmp_path / "a")):
        (tmp_path / "pickle").write_bytes(pickle.dumps(value))
        with open(tmp_path / "pickle", "rb") as file:
            raises(pickle.UnpicklingError, "it has a ", PlainUnpickler(file).load)


def write_tokens(folder, content, name="{}.bin", meta=None):
    """The bytes of a folder's training and validation tokens, and meta.pkl, if there is one."""
    folder.mkdir()
    for part in ("train", "val"):
        (folder / name.format(part)).write_bytes(content)
    if meta is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def load(folder, tokenizer="gpt2", **options):
    """What a run has of a folder: its tokens, and how many its tokenizer knows."""
    config = train.Config(dataset=str(folder), tokenizer=tokenizer, block_size=16,
                          global_batch_size=2, eval_steps=2, **options)
    _, vocab_size = data.choose_tokenizer(config)
    return (*data.load_tokens(config, None, vocab_size), vocab_size)


def some_tokens(vocab_size, n=20_000):
    """Small ones are more frequent, as in a text; and all others are there."""
    rng = np.random.default_rng(0)
    frequent = np.minimum(rng.zipf(1.2, n), vocab_size - 1)
    return np.where(rng.random(n) < 0.8, frequent, rng.integers(vocab_size, size=n))


def as_npy(tokens):
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


def as_torch(tokens):
    file = io.BytesIO()
    torch.save(torch.tensor(tokens), file)
    return file.getvalue()


TEXT = (ROOT / "data.py").read_bytes()
GPT2 = some_tokens(50257)
GPT2_BYTES = GPT2.astype("<u2").tobytes()
FEW = some_tokens(65)
FOREIGN = {  # bytes of a train.bin that is not of uint16 -> what its refusal says
    "uint32": (GPT2.astype("<u4"), r"like uint32: convert .* train\.uint32\.bin, .*meta\.pkl"),
    "uint32_of_few": (FEW.astype("<u4"), "like uint32: "),
    "uint32_of_many": (some_tokens(200019).astype("<u4"), "like uint32: "),
    "int64": (GPT2.astype("<i8"), r"like int64: .* train\.int64\.bin, .*train\.uint16\.bin"),
    "int64_of_few": (FEW.astype("<i8"), "like int64: "),
    "float32": (GPT2.astype("<f4"), "like float32: convert it to uint16. If"),
    "float64": (GPT2.astype("<f8"), "like float64: convert it to uint16. If"),
    "uint8": (FEW.astype("u1"), r"like a text, .* 8 bits: .*train\.uint8\.bin"),
    "text": (TEXT, "like a text"),
    "odd_text": (TEXT[:5001], "like a text"),
    "French": ("Été à l'œuvre. ".encode() * 99, "like a text"),
    "npy": (as_npy(GPT2.astype("<u2")), r"an \.npy: np\.load it"),
    "torch": (as_torch(GPT2), r"a zip, as of .*torch\.save"),
    "gzip": (gzip.compress(GPT2_BYTES), "gunzip"),
    "zstd": (b"\x28\xb5\x2f\xfd" + GPT2_BYTES, "unzstd"),
    "parquet": (b"PAR1" + GPT2_BYTES, "Parquet"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + GPT2_BYTES, "HDF5"),
    "llm_c": (np.int32([20240520, *[1] * 255]).tobytes() + GPT2_BYTES, r"llm\.c's: .*\+1025"),
    "llm_c_of_uint32": (np.int32([20240801, *[7] * 255]).tobytes(), r"llm\.c's of uint32: "),
    "half": (GPT2_BYTES[:-1], r"39,999 bytes, which are no tokens of uint16: each has 2"),
    "empty": (b"", "0 bytes, which are no tokens of uint16")}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_refused(name, tmp_path):
    """A train.bin that is not of uint16 is refused by name, with what to do, and so is a val.bin
    beside a good train.bin."""
    content, fact = FOREIGN[name]
    folder = write_tokens(tmp_path / "data", bytes(content))
    raises(SystemExit, rf"/train\.bin .*{fact}", load, folder)
    (folder / "train.bin").write_bytes(GPT2_BYTES)
    raises(SystemExit, rf"/val\.bin .*{fact.replace('train', 'val')}", load, folder)


RNG = np.random.default_rng(1)
USUAL = {  # tokens that a guess could take for something else
    "gpt2": GPT2, "random": RNG.integers(50257, size=9999),
    "few_random": RNG.integers(50257, size=256),
    "zeros": np.zeros(9999), "one": np.eye(1, 9999)[0], "characters": FEW,
    "bytes": some_tokens(257), "two": RNG.integers(2, size=9999),
    "two_far": RNG.choice([0, 300], 9999), "two_small": RNG.choice([257, 300], 9999),
    "sixteen": RNG.integers(16, size=256), "constant": np.full(9999, 1000),
    "counted": np.arange(3000), "sparse": np.where(RNG.random(9999) < 0.02, GPT2[:9999], 0),
    "short": np.tile([5, 0], 100)}


@pytest.mark.parametrize("name", USUAL)
def test_tokens_of_16_bits_are_read(name, tmp_path):
    """As they are, whatever they are."""
    content = USUAL[name].astype("<u2").tobytes()
    tokens, val_tokens, _ = load(write_tokens(tmp_path / "data", content))
    assert tokens.tobytes() == val_tokens.tobytes() == content and tokens.dtype == np.uint16


@pytest.mark.parametrize("number_format", ["uint8", "uint16", "uint32", "uint64", "int16", "int32",
                                           "int64"])
@pytest.mark.parametrize("by_name, by_meta", [(True, False), (False, True), (True, True)])
def test_formats_are_believed(number_format, by_name, by_meta, tmp_path):
    """What the names of files say, or meta.pkl, or both: the tokens are there, as many."""
    name = f"{{}}.{number_format}.bin" if by_name else "{}.bin"
    meta = dict(dtype=number_format) if by_meta else None
    content = FEW.astype(f"<{np.dtype(number_format).str[1:]}").tobytes()
    folder = write_tokens(tmp_path / "data", content, name, meta)
    tokens, val_tokens, vocab_size = load(folder)
    assert np.array_equal(tokens, FEW) and np.array_equal(val_tokens, FEW)
    assert tokens.dtype == number_format and vocab_size == 50257


def test_nothing_is_guessed_of_what_is_said(tmp_path):
    """So a file that looks like another format can be read. Characters may say theirs, too."""
    folder = write_tokens(tmp_path / "data", GPT2.astype("<u4").tobytes(), "{}.uint16.bin")
    tokens, _, _ = load(folder)
    assert tokens[::2].tolist() == GPT2.tolist()
    characters = write_characters(tmp_path / "chars")
    meta = data.read_meta(tmp_path / "chars/meta.pkl") | dict(dtype="uint8")
    content = np.fromfile(tmp_path / "chars/train.bin", "<u2").astype("u1").tobytes()
    folder = write_tokens(tmp_path / "small", content, meta=meta)
    tokens, _, vocab_size = load(folder, "bytes")
    assert tokens.tobytes() == content and vocab_size == len(characters)


ITOS = dict(enumerate("abc"))
STOI = {character: i for i, character in ITOS.items()}
CONTRARY = {  # name of the files, meta.pkl, what the refusal says
    "name_and_meta": ("{}.uint32.bin", dict(dtype="uint16"),
                      r"train\.uint32\.bin is uint32 by its name, but meta\.pkl says uint16"),
    "name_of_none": ("{}.float32.bin", None, r"has no train\.bin: .* train\.int64\.bin"),
    "meta_of_none": ("{}.bin", dict(dtype="float32"), r"meta\.pkl has dtype 'float32', .*uint8"),
    "meta_of_a_list": ("{}.bin", dict(dtype=["uint32"]), r"meta\.pkl has dtype \['uint32'\]"),
    "meta_of_nothing": ("{}.bin", {}, r"meta\.pkl is not as nanoGPT writes it: .*vocab_size"),
    "vocabulary": ("{}.bin", dict(vocab_size="3", itos=ITOS, stoi=STOI), "vocab_size is '3'"),
    "half_a_vocabulary": ("{}.bin", dict(vocab_size=2.5, itos=ITOS, stoi=STOI),
                          "vocab_size is 2.5"),
    "no_vocabulary": ("{}.bin", dict(vocab_size=0, itos=ITOS, stoi=STOI), "vocab_size is 0")}


@pytest.mark.parametrize("name", CONTRARY)
def test_what_is_said_has_to_make_sense(name, tmp_path):
    file, meta, fact = CONTRARY[name]
    folder = write_tokens(tmp_path / "data", FEW.astype("<u4").tobytes(), file, meta)
    raises(SystemExit, fact, load, folder, "bytes")


def test_there_is_one_file_of_each(tmp_path):
    folder = write_tokens(tmp_path / "data", GPT2_BYTES)
    (folder / "val.uint32.bin").write_bytes(GPT2_BYTES)
    raises(SystemExit, r"has val\.bin and val\.uint32\.bin: it needs one of", load, folder)


@pytest.mark.parametrize("number_format", ["int16", "int32", "int64"])
def test_negative_tokens_are_refused(number_format, tmp_path):
    content = np.append(FEW, -1).astype(number_format).tobytes()
    folder = write_tokens(tmp_path / "data", content, f"{{}}.{number_format}.bin")
    raises(SystemExit, "has token -1, but the model knows 50257", load, folder)


def test_tokens_of_32_bits_are_trained_on(tmp_path):
    """Those of a tokenizer that cannot be had, whose vocabulary has more than 16 bits. The run goes
    on where it was stopped, and is evaluated. Before anything is said it is refused."""
    content = some_tokens(200019).astype("<u4").tobytes()
    options = dict(tokenizer="o200k_base", n_layer=1, n_embd=8, save_interval=2, plant=bare)
    silent = write_tokens(tmp_path / "silent", content)
    refused(r"silent/train\.bin looks like uint32", tmp_path / "out", dataset=silent, **options)
    folder = write_tokens(tmp_path / "data", content, "{}.uint32.bin")
    expected = finish(tmp_path / "whole", dataset=folder, **options)
    out = tmp_path / "out"
    finish(out, dataset=folder, **{**options, "max_steps": 2})
    actual = finish(out, 2, dataset=folder, mode="zero2", resume="auto", **options)
    assert "(1 before)" in actual["stdout"] and actual["param_sha256"] == expected["param_sha256"]
    asked = finish(None, argv=[f"--resume={out}/step_00000004", "--eval_only"], plant=bare)
    assert asked["val_loss"] == expected["val_loss"]

# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Tokens, and which of them a rank reads in a step.

Replaces a DataLoader with its sampler and workers, and nanoGPT's random offsets.

Tokens are one long sequence, cut into blocks of block_size. A block is a sample: its tokens are
the inputs, and the tokens one further on are the targets. Which blocks a step takes is a function
of the seed and the step, so there is no state to save, and to resume at a step is to ask for it.

What is a user's mistake raises SystemExit with a line that says so.
"""

import codecs
import functools
import hashlib
import itertools
import os
import pathlib
import pickle
import sys

import numpy as np
import tiktoken
import torch
import torch.distributed as dist

END_OF_TEXT = "<|endoftext|>"
# Of tiktoken's encodings: what is tokenized with one of them trains without the file of the
# tokenizer, which tiktoken would download.
VOCAB_SIZES = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "p50k_edit": 50284,
               "cl100k_base": 100277, "o200k_base": 200019}
# Of the numbers in a folder of tokens, little-endian: uint16 is nanoGPT's, others have to be said.
FORMATS = ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")
# What a train.bin that nothing is said of may be, in this order: int64 would pass for uint32, too.
WIDE_FORMATS = ("int64", "uint32", "float64", "float32")
# The first bytes of files that have more than numbers, and what such a file is.
HEADERS = {
    b"\x93NUMPY": "an .npy: np.load it, and write its numbers with .tofile",
    b"PK\x03\x04": "a zip, as of np.savez or torch.save: load it, and write its numbers alone",
    b"\x1f\x8b\x08": "compressed: unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it with unzstd",
    b"PAR1": "a Parquet table: read it, and write its tokens as plain numbers",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file: read it, and write its tokens as plain numbers",
    (20240520).to_bytes(4, "little"): "llm.c's: leave out its header, as tail -c +1025 does",
    (20240801).to_bytes(4, "little"): "llm.c's of uint32: leave out its header, as tail -c +1025 "
                                      "does, and put .uint32 before .bin in its name"}

# -------------------------------------------------------------------------------------------------
# tokenizers


class Characters:
    """The tokenizer of nanoGPT's data of characters, whose folder has a meta.pkl."""
    eot_token = 0  # there is no end of text: a newline, where the text has some

    def __init__(self, meta):
        self.n_vocab, self.characters, self.ids = meta["vocab_size"], meta["itos"], meta["stoi"]

    def encode(self, text, **options):
        unknown = set(text) - set(self.ids)
        if unknown:
            raise SystemExit(f"--prompt has {sorted(unknown)}, which are not in --dataset")
        return [self.ids[character] for character in text]

    def decode(self, ids):
        return "".join(self.characters[i] for i in ids)


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, texts and numbers: other pickles can run code, and are refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it has a {module}.{name}")


def read_meta(path):
    """A folder's meta.pkl -> a dict; {} if there is none. It has nanoGPT's characters, or says the
    "dtype" of the folder's numbers, or both."""
    if not path.exists():
        return {}
    try:
        with open(path, "rb") as file:
            meta = dict(PlainUnpickler(file).load())
        if "itos" in meta or "dtype" not in meta:
            missing = {"vocab_size", "itos", "stoi"} - set(meta)
            if missing:
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            n_tokens = meta["vocab_size"]
            if not isinstance(n_tokens, int) or n_tokens < 1:
                raise ValueError(f"vocab_size is {n_tokens!r}")
    except Exception as error:  # what is no such pickle may fail in any way
        raise SystemExit(f"--dataset: {path} is not as nanoGPT writes it: {error!r}") from error
    if meta.get("dtype", "uint16") not in FORMATS:
        raise SystemExit(f"--dataset: {path} has dtype {meta['dtype']!r}, which is none of "
                         f"{', '.join(FORMATS)}")
    return meta


def is_tokenized(dataset):
    """Whether it is nanoGPT's folder of train.bin and val.bin."""
    return dataset != "stdlib" and os.path.isdir(dataset)


def choose_tokenizer(config):
    """-> the tokenizer, and how many tokens it knows. The former is None where only the sample
    needs it: it may be a download."""
    path = pathlib.Path(config.dataset, "meta.pkl")
    meta = read_meta(path) if is_tokenized(config.dataset) else {}
    if "itos" in meta:
        if config.tokenizer != "bytes":
            raise SystemExit(f"--tokenizer {config.tokenizer}: --dataset has its own, in {path}")
        tokenizer = Characters(meta)
        return tokenizer, tokenizer.n_vocab
    is_for_sample = is_tokenized(config.dataset) and not (config.init_from or config.export_hf)
    if config.tokenizer in VOCAB_SIZES and is_for_sample:
        return None, VOCAB_SIZES[config.tokenizer]
    tokenizer = load_tokenizer(config.tokenizer)
    return tokenizer, tokenizer.n_vocab


def load_tokenizer(name):
    """A tiktoken Encoding. "bytes" is 256 single bytes and an end-of-text token: no download."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"\S+\s*|\s+", special_tokens={END_OF_TEXT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise SystemExit(f"--tokenizer {name} could not be downloaded ({type(error).__name__}: is "
                         f"there a network?); bytes needs no download") from error
    except ValueError as error:  # a damaged download; no such name
        raise SystemExit(f"--tokenizer {name}: {error}; bytes needs no download") from error


def encode_prompt(prompt, tokenizer):
    """Token ids of a text, at least one."""
    ids = tokenizer.encode(prompt, allowed_special={END_OF_TEXT}, disallowed_special=())
    return ids if ids else [tokenizer.eot_token]


# -------------------------------------------------------------------------------------------------
# texts


def stdlib_text():
    """The standard library's source as one string, end-of-text between files.

    Without tests, tables of characters, and what distributions package separately. Files are
    ordered by a hash of their path, so that the last tenth, which validates, is text of the same
    kind.
    """
    root = pathlib.Path(os.__file__).parent
    left_out = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
                "test", "tests", "tkinter", "turtle", "turtledemo"}
    names = []  # such as json/decoder
    for module in sys.stdlib_module_names:
        if module.startswith("_sysconfigdata"):
            continue
        for path in (root / f"{module}.py", *(root / module).rglob("*.py")):
            name = path.relative_to(root).with_suffix("").as_posix()
            if path.is_file() and left_out.isdisjoint(name.split("/")):
                names.append(name)
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    texts = [(root / f"{name}.py").read_text("utf-8") for name in names]
    return END_OF_TEXT.join(texts)


def tokenize(config, tokenizer, say):
    """Rank 0: the text of --dataset -> the path of its token ids, a file in out_dir named after the
    text's hash; an evaluation writes none, and gets the ids themselves, (n,). None for a folder of
    tokens. say: takes a line for the log."""
    if is_tokenized(config.dataset) or (config.eval_only and not config.eval_steps):
        return None
    try:
        is_stdlib = config.dataset == "stdlib"
        text = stdlib_text() if is_stdlib else pathlib.Path(config.dataset).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"--dataset {config.dataset}: {error}") from error
    if "\0" in text:
        raise SystemExit(f"--dataset {config.dataset}: not a text; of train.bin and val.bin give "
                         "the folder")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = pathlib.Path(config.out_dir, f"tokens-{tokenizer.name}-{digest}.npy").resolve()
    if path.exists():
        return path
    say(f"tokenizing {len(text):,} characters with {tokenizer.name}")
    ids = tokenizer.encode_to_numpy(text, allowed_special={END_OF_TEXT}, disallowed_special=())
    ids = ids.astype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32)
    if config.eval_only:
        return ids
    unfinished = path.with_name(".tokens.npy")
    try:
        with open(unfinished, "wb") as file:
            np.save(file, ids)
            file.flush()
            os.fsync(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise SystemExit(f"{path} cannot be written: {error} (is the disk full?)") from error
    return unfinished.replace(path)


# -------------------------------------------------------------------------------------------------
# tokens


def load_tokens(config, source, vocab_size):
    """Training and validation token ids, each (n,), memory-mapped. Of a text the last tenth
    validates. Refuses where there are too few, or some that a model of vocab_size tokens lacks.

    source: what `tokenize` has found on rank 0.
    """
    if config.eval_only and not config.eval_steps:
        return np.zeros(0, np.uint16), np.zeros(0, np.uint16)
    path = pathlib.Path(config.dataset)
    try:
        if source is None:
            train, val = map_tokens(path, "train"), map_tokens(path, "val")
        else:
            is_file = isinstance(source, pathlib.Path)
            tokens = np.load(source, mmap_mode="r") if is_file else source
            train, val = np.split(tokens, [int(0.9 * len(tokens))])
    except ValueError as error:  # an empty text, or a damaged file of its tokens
        raise SystemExit(f"--dataset {path}: {error}") from error
    n_train = 0 if config.eval_only else config.global_batch_size * config.block_size + 1
    n_val = config.block_size + 1 if config.eval_steps else 0
    if len(train) < n_train or len(val) < n_val:
        hint = ("--block_size and --global_batch_size lower that; --eval_steps 0 needs none to "
                "validate with")
        has_no_sample = len(train) < 2 or (n_val > 0 and len(val) < 2)
        if has_no_sample:  # which is a token, and the next one
            hint = "Take a longer text"
        raise SystemExit(f"--dataset {path} is too short: it has {len(train)} tokens to train on "
                         f"and {len(val)} to validate with, and {n_train} and {n_val} are needed. "
                         f"{hint}")
    for tokens in (train, val):
        some = some_of(tokens)  # the loss refuses any other such token
        for token in (some.min(initial=0), some.max(initial=0)):
            if not 0 <= token < vocab_size:
                raise SystemExit(f"--dataset {path} has token {token}, but the model knows "
                                 f"{vocab_size}: is --tokenizer another one?")
    return train, val


def map_tokens(folder, name):
    """Map the numbers of train.bin or val.bin, (n,). Refuses what is not plain numbers. What
    nothing is said of is uint16, and refused if it looks like something else."""
    path, said = find_tokens(folder, name)
    with open(path, "rb") as file:
        first_bytes = file.read(8)
    for header, words in HEADERS.items():
        if first_bytes.startswith(header):
            raise SystemExit(f"--dataset: {path} is {words}")
    n_bytes = path.stat().st_size
    if said is None and n_bytes >= 2 * 256:  # fewer numbers may be anything
        groups = np.memmap(path, "<u2", "r", shape=(n_bytes // 8, 4))  # of the widest format's size
        check_uint16(path, name, np.ravel(some_of(groups)))
    dtype = np.dtype(said or "uint16").newbyteorder("<")
    if n_bytes == 0 or n_bytes % dtype.itemsize > 0:
        raise SystemExit(f"--dataset: {path} has {n_bytes:,} bytes, which are no tokens of "
                         f"{dtype.name}: each has {dtype.itemsize}")
    return np.memmap(path, dtype, "r")


def find_tokens(folder, name):
    """-> the path of train.bin or train.FORMAT.bin, and the format that the name or meta.pkl says;
    None if neither does. name: train or val."""
    formats = {f"{name}.bin": None}
    for number_format in FORMATS:
        formats[f"{name}.{number_format}.bin"] = number_format
    files = [file for file in formats if (folder / file).exists()]
    if len(files) != 1:
        raise SystemExit(f"--dataset {folder} has {' and '.join(files) or f'no {name}.bin'}: it "
                         f"needs one of {', '.join(formats)}")
    path = folder / files[0]
    by_name = formats[files[0]]
    by_meta = read_meta(folder / "meta.pkl").get("dtype")
    if by_name and by_meta and by_name != by_meta:
        raise SystemExit(f"--dataset: {path} is {by_name} by its name, but meta.pkl says {by_meta}")
    return path, by_name or by_meta


def check_uint16(path, name, numbers):
    """Refuse numbers that have been read as uint16, but look like another format."""
    guess = guess_format(numbers)
    if guess is None:
        return
    looks = guess
    if guess == "uint8":
        looks = "a text, which --dataset takes by itself, or tokens of 8 bits"
    way = "convert it to uint16"
    if guess in FORMATS:
        way += f', or rename it to {name}.{guess}.bin, or write {{"dtype": "{guess}"}} to meta.pkl'
    raise SystemExit(f"--dataset: {path} looks like {looks}: {way}. If it is uint16 all the same, "
                     f"rename it to {name}.uint16.bin")


def guess_format(numbers):
    """What numbers that have been read as uint16, (4 n,), look like; None: like uint16."""
    if np.count_nonzero(numbers) < 32:  # where these are may be chance
        return None
    if is_text(numbers[:4096].tobytes()):
        return "uint8"
    for wide in WIDE_FORMATS:
        values = numbers.view(wide)
        with np.errstate(invalid="ignore"):  # as float32 they may be nan
            are_tokens = np.all((values >= 0) & (values == np.floor(values)))
        # One token has numbers that are not much smaller than itself. Two tokens, read as one
        # number, are 65,536 times the second one.
        if are_tokens and values.max() < 16 * int(numbers.max()):
            return wide
    # Of many tokens of 16 bits, about half have a lower byte above 127.
    n_lower_bytes = len(np.unique(numbers & 255))
    n_upper_bytes = len(np.unique(numbers >> 8))
    are_small = numbers.view(np.uint8).max() < 128
    return "uint8" if are_small and min(n_lower_bytes, n_upper_bytes) > 4 else None


def is_text(first_bytes):
    """Whether it is UTF-8, perhaps cut within a character, without what no text has."""
    try:
        text, _ = codecs.utf_8_decode(first_bytes)
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character.isspace() for character in text)


def some_of(tokens):
    """A million of tokens, in runs of a few pages, since every rank reads them and a file may have
    billions; all of them where there are no more."""
    n_runs, length = 256, 4096
    if len(tokens) <= n_runs * length:
        return np.asarray(tokens)
    starts = np.linspace(0, len(tokens) - length, n_runs).astype(np.int64)
    return np.concatenate([tokens[start:start + length] for start in starts])


def fingerprint(tokens):
    """Their number, and a hash of about a million of them."""
    digest = hashlib.sha256(np.ascontiguousarray(some_of(tokens))).hexdigest()
    return f"{len(tokens)} tokens with hash {digest[:16]}"


# -------------------------------------------------------------------------------------------------
# samples


def count_blocks(tokens, block_size):
    """Blocks do not overlap, but the last target is one token beyond its block."""
    return (len(tokens) - 1) // block_size


@functools.lru_cache(maxsize=2)  # costs O(n): kept for training and for validation
def block_order(n, seed, epoch):
    """The numbers of n blocks in the order in which an epoch takes them, (n,)."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def global_batch(tokens, step, config):
    """The numbers of the blocks of a step, from 1 on, over all ranks: (global_batch_size,).

    No block comes twice in an epoch, and all ranks make the same number of steps. An epoch leaves
    out the blocks that do not fill a global batch; the next one has another order.
    """
    n, B = count_blocks(tokens, config.block_size), config.global_batch_size
    epoch, step = divmod(step - 1, n // B)
    return block_order(n, config.seed, epoch)[step * B:(step + 1) * B]


def micro_batches(tokens, step, config, device):
    """Yield this rank's x and y of each micro-step of a step. Ranks take micro batches in turn, so
    that any number of ranks reads the same ones in the same order."""
    blocks = global_batch(tokens, step, config)
    m = config.micro_batch_size
    for first in range(dist.get_rank() * m, len(blocks), dist.get_world_size() * m):
        yield read_blocks(tokens, blocks[first:first + m], config.block_size, device)


class ReadAhead:
    """`micro_batches` of step after step: an accelerator need not wait for the first one."""

    def __init__(self, tokens, step, config, device):
        self.read = functools.partial(micro_batches, tokens, config=config, device=device)
        self.step, self.last_step = step, config.max_steps
        self.batches = self.read(step=step)

    def of_next_step(self):
        """Yield the micro batches of the next step. A loop asks for one more after the last one:
        then, while the device still computes, the first one of the step after is read."""
        yield from self.batches
        self.step += 1
        if self.step <= self.last_step:
            following = self.read(step=self.step)
            self.batches = itertools.chain([next(following)], following)


def read_blocks(tokens, blocks, block_size, device):
    """Block numbers (m,) -> inputs x and targets y on the device, each (m, T) int64."""
    positions = blocks[:, None] * block_size + np.arange(block_size + 1)
    window = torch.from_numpy(tokens[positions].astype(np.int64))  # (m, T + 1)
    if device.type != "cpu":
        window = window.pin_memory().to(device, non_blocking=True)
    return window[:, :-1], window[:, 1:]

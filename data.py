# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Tokens, and which of them a rank reads in a step.

Replaces a DataLoader with its sampler and workers, and nanoGPT's random offsets.

Tokens are one long sequence, cut into blocks of block_size. A block is a sample: its tokens are
the inputs, and the tokens one further on are the targets. Which blocks a step takes is a function
of the seed and the step, so there is no state to save, and to resume at a step is to ask for it.

What is a user's mistake raises SystemExit with a line that says so. config is train.py's.
"""

import functools
import hashlib
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
import tiktoken
import torch
import torch.distributed as dist

END_OF_TEXT = "<|endoftext|>"
# Of tiktoken's encodings: what is tokenized with one of them trains without the file of the
# tokenizer, which tiktoken would download.
VOCAB_SIZES = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "p50k_edit": 50284,
               "cl100k_base": 100277, "o200k_base": 200019}

# -------------------------------------------------------------------------------------------------
# texts


def is_tokenized(dataset: str) -> bool:
    """Whether it is nanoGPT's folder of train.bin and val.bin."""
    return dataset != "stdlib" and os.path.isdir(dataset)


def choose_tokenizer(config) -> tuple[tiktoken.Encoding | None, int]:
    """-> the tokenizer, and how many tokens it knows. The former is None where only the sample
    needs it: it may be a download."""
    is_for_sample = is_tokenized(config.dataset) and not (config.init_from or config.export_hf)
    if config.tokenizer in VOCAB_SIZES and is_for_sample:
        return None, VOCAB_SIZES[config.tokenizer]
    tokenizer = load_tokenizer(config.tokenizer)
    return tokenizer, tokenizer.n_vocab


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """"bytes" is 256 single bytes and an end-of-text token: no download. Else tiktoken's."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"\S+\s*|\s+", special_tokens={END_OF_TEXT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise SystemExit(f"--tokenizer {name} could not be downloaded ({type(error).__name__}: is "
                         "there a network?); bytes needs no download") from error
    except ValueError as error:  # a damaged download; no such name
        raise SystemExit(f"--tokenizer {name}: {error}; bytes needs no download") from error


def encode(text: str, tokenizer: tiktoken.Encoding) -> np.ndarray:
    """Token ids, (n,). What is no character, as in a command line that is no UTF-8, becomes `?`."""
    text = text.encode("utf-8", "replace").decode()
    return tokenizer.encode_to_numpy(text, allowed_special={END_OF_TEXT}, disallowed_special=())


def stdlib_text() -> str:
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


def read_text(dataset: str) -> str:
    """The text that --dataset means."""
    if dataset == "stdlib":
        return stdlib_text()
    try:
        text = pathlib.Path(dataset).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"--dataset {dataset}: {error}") from error
    if not text:
        raise SystemExit(f"--dataset {dataset} is empty")
    if "\0" in text:
        raise SystemExit(f"--dataset {dataset}: not a text; of train.bin and val.bin give the "
                         "folder")
    return text


def tokenize(config, tokenizer: tiktoken.Encoding) -> np.ndarray | None:
    """Rank 0: the token ids of a text, (n,); None for a folder of tokens."""
    if is_tokenized(config.dataset):
        return None
    return encode(read_text(config.dataset), tokenizer).astype(dtype_of(tokenizer.n_vocab))


# -------------------------------------------------------------------------------------------------
# tokens


def dtype_of(vocab_size: int) -> np.dtype:
    """Of the numbers in train.bin and val.bin: 16 bits, or 32 where the vocabulary needs them."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def load_tokens(config, ids: np.ndarray | None, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation token ids, each (n,). ids: those of a text, of which the last tenth
    validates; None: they are a folder's, memory-mapped. Refuses where there are too few, or some
    that a model of vocab_size tokens lacks."""
    path = pathlib.Path(config.dataset)
    n_train = 0 if config.eval_only else config.global_batch_size * config.block_size + 1
    n_val = config.block_size + 1 if config.eval_steps else 0
    train = val = np.zeros(0, np.uint16)  # what is not needed need not be there
    if ids is None:
        train_path, val_path = path / "train.bin", path / "val.bin"
        if n_train > 0:
            train = map_tokens(train_path, vocab_size)
        if n_val > 0:
            val = map_tokens(val_path, vocab_size)
    else:
        train_path = val_path = path
        n = int(0.9 * len(ids))
        if n_train > 0:
            train = ids[:n]
        if n_val > 0:
            val = ids[n:]
    if len(train) < n_train or len(val) < n_val:
        raise SystemExit(f"--dataset {path} is too short: it has {len(train)} tokens to train on "
                         f"and {len(val)} to validate with, and {n_train} and {n_val} are needed. "
                         "Take a longer text, or a smaller --block_size or --global_batch_size; "
                         "--eval_steps 0 needs none to validate with")
    for path, tokens in ((train_path, train), (val_path, val)):
        most = some_of(tokens).max(initial=0)  # the loss refuses any other such token
        if most >= vocab_size:
            raise SystemExit(f"--dataset: {path} has token {most}, but the model knows "
                             f"{vocab_size}: is --tokenizer another one?")
    return train, val


def map_tokens(path: pathlib.Path, vocab_size: int) -> np.ndarray:
    """Map train.bin or val.bin, plain numbers of the `dtype_of` the vocabulary, (n,)."""
    if path.with_name("meta.pkl").exists():
        raise SystemExit(f"--dataset {path.parent} has characters, by its meta.pkl: give the text "
                         "itself, such as its input.txt, which --tokenizer bytes reads")
    dtype, n_bytes = dtype_of(vocab_size), path.stat().st_size
    if n_bytes == 0 or n_bytes % dtype.itemsize > 0:
        raise SystemExit(f"--dataset: {path} has {n_bytes:,} bytes, which are no tokens of "
                         f"{dtype.name}: each has {dtype.itemsize}")
    return np.memmap(path, dtype, "r")


def some_of(tokens: np.ndarray) -> np.ndarray:
    """A million of tokens, in runs of a few pages, since every rank reads them and a file may have
    billions; all of them where there are no more."""
    n_runs, length = 256, 4096
    if len(tokens) <= n_runs * length:
        return np.asarray(tokens)
    starts = np.linspace(0, len(tokens) - length, n_runs).astype(np.int64)
    return np.concatenate([tokens[start:start + length] for start in starts])


def fingerprint(tokens: np.ndarray) -> str:
    """Their number, and a hash of about a million of them."""
    digest = hashlib.sha256(np.ascontiguousarray(some_of(tokens))).hexdigest()
    return f"{len(tokens)} tokens with hash {digest[:16]}"


# -------------------------------------------------------------------------------------------------
# samples


def count_blocks(tokens: np.ndarray, block_size: int) -> int:
    """Blocks do not overlap, but the last target is one token beyond its block."""
    return (len(tokens) - 1) // block_size


@functools.lru_cache(maxsize=2)  # costs O(n): kept for training and for validation
def block_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers of n blocks in the order in which an epoch takes them, (n,)."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def global_batch(tokens: np.ndarray, step: int, config) -> np.ndarray:
    """The numbers of the blocks of a step, from 1 on, over all ranks: (global_batch_size,).

    No block comes twice in an epoch, and all ranks make the same number of steps. An epoch leaves
    out the blocks that do not fill a global batch; the next one has another order.
    """
    n, B = count_blocks(tokens, config.block_size), config.global_batch_size
    epoch, step = divmod(step - 1, n // B)
    return block_order(n, config.seed, epoch)[step * B:(step + 1) * B]


def micro_batches(tokens: np.ndarray, first_step: int, config,
                  device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield x and y of this rank's micro-steps, step after step, without an end. Ranks take micro
    batches in turn, so that any number of ranks reads the same ones in the same order."""
    m, rank, W = config.micro_batch_size, dist.get_rank(), dist.get_world_size()
    for step in itertools.count(first_step):
        blocks = global_batch(tokens, step, config)
        for first in range(rank * m, len(blocks), W * m):
            yield read_blocks(tokens, blocks[first:first + m], config.block_size, device)


def read_blocks(tokens: np.ndarray, blocks: np.ndarray, block_size: int,
                device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Block numbers (m,) -> inputs x and targets y on the device, each (m, T) int64."""
    positions = blocks[:, None] * block_size + np.arange(block_size + 1)
    window = torch.from_numpy(tokens[positions].astype(np.int64))  # (m, T + 1)
    if device.type != "cpu":
        window = window.pin_memory().to(device, non_blocking=True)
    return window[:, :-1], window[:, 1:]

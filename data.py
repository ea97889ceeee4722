"""Tokens, and which of them a rank reads in a step.

Replaces a DataLoader with its sampler and workers, and nanoGPT's random offsets.

Tokens are one long sequence, cut into blocks of block_size. A block is a sample: its tokens are
the inputs, and the tokens one further on are the targets. Everything below is a function of the
seed and the step, so there is no state to save, and to resume at a step is to ask for it.
"""

import functools
import hashlib
import os
import pathlib
import sys

import numpy as np
import tiktoken
import torch
import torch.distributed as dist

from checkpoint import fsync
from extras.ranks import count, say

END_OF_TEXT = "<|endoftext|>"
# Of tiktoken's encodings whose tokens have 16 bits: what is tokenized with one of them trains
# without the file of the tokenizer, which tiktoken would download.
VOCAB_SIZES = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "p50k_edit": 50284}


def is_tokenized(dataset):
    """Whether it is nanoGPT's folder of train.bin and val.bin."""
    return dataset != "stdlib" and os.path.isdir(dataset)


def load_tokenizer(name):
    """A tiktoken Encoding. "bytes" is 256 single bytes and an end-of-text token: no download.
    Raises ValueError where there is no such one, or no connection."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"\S+\s*|\s+", special_tokens={END_OF_TEXT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no connection; a damaged download; no such name
        raise ValueError(f"--tokenizer {name}: {error}; bytes needs no download") from error


def encode_prompt(prompt, tokenizer):
    """Token ids of a text, at least one."""
    ids = tokenizer.encode(prompt, allowed_special={END_OF_TEXT}, disallowed_special=())
    return ids if ids else [tokenizer.eot_token]


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


def tokenize(text, tokenizer, out_dir, writes):
    """text -> token ids, memory-mapped from a file in out_dir that is named after the text's hash.
    Without `writes` no such file is written, but one that is there is used.

    Ranks that come at the same time do the same work. That costs no time, and waiting for one of
    them could take longer than a collective may.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = pathlib.Path(out_dir, f"tokens-{tokenizer.name}-{digest}.npy")
    if not path.exists():
        say(f"tokenizing {len(text):,} characters with {tokenizer.name}")
        ids = tokenizer.encode_to_numpy(text, allowed_special={END_OF_TEXT}, disallowed_special=())
        ids = ids.astype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32)
        if not writes:
            return ids
        unfinished = path.with_name(f".tokens-{os.urandom(4).hex()}.npy")
        try:
            np.save(unfinished, ids)
            fsync(unfinished)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(f"{path.name} cannot be written: {error} (is the disk full?)") from error
        os.replace(unfinished, path)
    return np.load(path, mmap_mode="r")


def load_tokens(config, tokenizer, vocab_size):
    """Training and validation token ids, each (n,). Of a text the last tenth validates. Raises
    OSError, and ValueError where there are too few tokens or they are not the tokenizer's.

    tokenizer: not needed for what is tokenized.
    """
    if config.eval_only and not config.eval_steps:
        return np.zeros(0, np.uint16), np.zeros(0, np.uint16)
    path = pathlib.Path(config.dataset)
    try:
        if is_tokenized(config.dataset):  # uint16 and nothing else
            train = np.memmap(path / "train.bin", "<u2", "r")
            val = np.memmap(path / "val.bin", "<u2", "r")
        else:
            text = stdlib_text() if config.dataset == "stdlib" else path.read_text("utf-8")
            if "\0" in text:
                raise ValueError("not a text; of train.bin and val.bin give the folder")
            tokens = tokenize(text, tokenizer, config.out_dir, writes=not config.eval_only)
            train, val = np.split(tokens, [int(0.9 * len(tokens))])
    except (ValueError, OSError, EOFError) as error:  # not UTF-8, empty, half a token, no file
        raise ValueError(f"--dataset {path}: {error}") from error
    if not config.eval_only:
        least = config.global_batch_size * config.block_size + 1
        if len(train) < least:
            raise ValueError(f"--dataset {path} is too short: it has {len(train)} tokens to train "
                             f"on, and {least} are needed. --block_size and --global_batch_size "
                             "lower that")
        check_tokens(train, path, vocab_size)
    if config.eval_steps:
        least = config.block_size + 1
        if len(val) < least:
            raise ValueError(f"--dataset {path} is too short: it has {len(val)} tokens to validate "
                             f"with, and {least} are needed. --block_size lowers that; "
                             "--eval_steps 0 needs none")
        check_tokens(val, path, vocab_size)
    return train, val


def check_tokens(tokens, path, vocab_size):
    """Raise ValueError where a sample of the tokens has one that the model lacks. (The loss refuses
    any other such token.)"""
    largest = some_of(tokens).max()
    if largest >= vocab_size:
        raise ValueError(f"--dataset {path} has token {largest}, but the model knows "
                         f"{vocab_size}: is --tokenizer another one?")


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


def accumulation_steps(config):
    """Micro-steps that a step takes on every rank. Raises ValueError unless whole."""
    m = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    B, W = config.global_batch_size, dist.get_world_size()
    if B % (m * W):
        possible = [n for n in range(1, B // m + 1) if B % (m * n) == 0]
        others = f"on {possible} ranks it would" if possible else f"it is no multiple of {m}"
        raise ValueError(f"--global_batch_size {B} in micro batches of {m} does not divide among "
                         f"{count(W, 'rank')}: {others}")
    return B // (m * W)


def read_blocks(tokens, blocks, block_size, device):
    """Block numbers (m,) -> inputs x and targets y on the device, each (m, T) int64."""
    positions = blocks[:, None] * block_size + np.arange(block_size + 1)
    window = torch.from_numpy(tokens[positions].astype(np.int64))  # (m, T + 1)
    if device.type != "cpu":
        window = window.pin_memory().to(device, non_blocking=True)
    return window[:, :-1], window[:, 1:]

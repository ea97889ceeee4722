"""Train a GPT in one process, or data-parallel in several; the mode is one flag.

    python train.py                                             # one process
    torchrun --nproc_per_node=2 train.py                        # two ranks, --mode ddp
    torchrun --nproc_per_node=2 train.py --mode zero3           # or zero1, zero2: ZeRO's stages
    torchrun --nproc_per_node=2 train.py --mode naive           # the oracle
    torchrun --nproc_per_node=2 train.py --mode torch-ddp       # torch's own, as references
    torchrun --nproc_per_node=2 train.py --mode torch-fsdp
    python train.py --dataset shakespeare.txt --max_steps 2000  # a text file
    python train.py --dataset data/openwebtext --tokenizer gpt2 --model gpt2 --lr 6e-4
    torchrun --nproc_per_node=4 --max-restarts=3 train.py --mode zero3 --resume auto

Replaces a trainer framework by one loop that a person can follow: data, model, wrapper, optimizer,
then a few paragraphs a step. Modes differ in `wrap` and in one line after the backward.

How it differs from nanoGPT's loop: the global batch of a step is a function of (seed, epoch, step)
alone and is dealt out to ranks micro-step by micro-step, so that 1, 2 or 4 ranks read the same
samples in the same order and, in fp32 on CPU, end on the same bits. What is logged is the mean over
all ranks, and every decision is taken from numbers that all ranks share.

Output: a line per step, out_dir/metrics.jsonl, checkpoints that any mode at any world size goes on
from, and as the last line of stdout `RESULT {json}`; its param_sha256 is equal for runs that ended
on the same bits. A rank that dies ends all; torchrun starts them anew from the last checkpoint.

Cost: one small all-reduce a step for losses and flags, one norm over the parameters for the log.
"""

import argparse
import atexit
import collections
import contextlib
import datetime
import functools
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import secrets
import shutil
import signal
import socket
import statistics
import sys
import sysconfig
import time
import traceback
import typing
import warnings
import zlib
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, MetadataIndex,
                                                   TensorProperties)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddp import (DDP, HierarchicalState, TopKState, average_gradients, clip_gradients_,
                 hierarchical_hook, top_k_hook, total_norm)
from model import (GPT, GPTConfig, PRESETS, from_llama_config, llama_names, peak_flops,
                   to_llama_config)
from zero import Zero1, Zero2, Zero3


# -------------------------------------------------------------------------------------------------
@dataclass
class Config:
    # run
    mode: str | None = None  # one of MODES; unless given ddp under torchrun, else single
    max_steps: int = 800  # optimizer steps
    seed: int = 1337  # of the weights, the order of samples and the sample text
    out_dir: str = "out"  # for checkpoints, metrics.jsonl and the cache of tokens
    threads: int = 1  # CPU threads per rank; bits hold per thread count
    deterministic: bool = False  # deterministic kernels only, an error where there is none
    timeout_s: float = 120.0  # bound on any collective, in seconds
    check_interval: int = 100  # steps between comparisons of parameters over ranks, 0 for none
    max_skipped_steps: int = 20  # stop after so many steps in a row that were not finite
    # checkpoints
    save_interval: int = 100  # steps between checkpoints; the last step has one too; 0 for none
    keep_last: int = 2  # checkpoints kept beside the best one
    resume: str | None = None  # auto: from the newest checkpoint in out_dir; or a checkpoint's path
    export: str | None = None  # file for the whole model at the end, in nanoGPT's form
    export_hf: str | None = None  # folder for it in the form of transformers' LlamaForCausalLM
    # data
    dataset: str = "stdlib"  # Python's own library, a text file, or a folder of train.bin, val.bin
    tokenizer: str = "bytes"  # bytes, or a tiktoken name such as gpt2 or o200k_base
    # model
    init_from: str | None = None  # folder as export_hf leaves it: its sizes and weights, no preset
    model: str = "tiny"  # preset: tiny gpt2 gpt2-medium gpt2-large gpt2-xl 1b 7b
    n_layer: int | None = None  # blocks; overrides the preset, as do the next four
    n_head: int | None = None  # query heads
    n_kv_head: int | None = None  # key and value heads, a divisor of n_head
    n_embd: int | None = None  # width
    block_size: int | None = None  # tokens per sequence
    activation_checkpointing: bool = False  # recompute blocks in the backward: less memory, slower
    compile: bool = False  # torch.compile each block; needs a C++ compiler on CPU
    # batch
    global_batch_size: int = 16  # sequences per optimizer step, over all ranks
    micro_batch_size: int | str = 4  # sequences per rank and backward; auto: the most that fit
    memory_limit_gb: float | None = None  # for auto: what a rank may hold; else the CUDA device's
    # precision
    dtype: str = "fp32"  # fp32, or autocast to bf16 or fp16, fp16 with a gradient scaler
    param_dtype: str | None = None  # ZeRO: of gathered parameters and of blocks' inputs; else fp32
    reduce_dtype: str | None = None  # ZeRO: of gradients on their way; else fp32
    # data parallelism
    bucket_cap_mb: float = 25.0  # gradients reduced at once by ddp and torch-ddp, in MB
    find_unused_parameters: bool = False  # ddp, torch-ddp: parameters may stay without a gradient
    comm_hook: str | None = None  # ddp: bf16 powersgd topk hierarchical; else a plain all-reduce
    topk_ratio: float = 0.01  # topk: the part of the elements that is sent
    node_size: int | None = None  # hierarchical: ranks per node; as torchrun has it unless given
    shard_size: int | None = None  # ZeRO: ranks that share one copy of the state; else all
    offload: bool = False  # ZeRO: shards, their gradients and the optimizer on the CPU
    # optimizer: AdamW
    lr: float = 3e-3  # peak learning rate
    min_lr: float | None = None  # where the cosine ends; lr / 10 unless given
    warmup_steps: int = 40  # steps of linear warm-up
    weight_decay: float = 0.1  # on tensors of two or more dimensions only
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.99  # decay of the mean of squared gradients
    grad_clip: float = 1.0  # largest norm of all gradients together, 0 for no limit
    # evaluation
    eval_interval: int = 100  # steps between evaluations; the last step is always evaluated
    eval_steps: int = 20  # micro batches an evaluation takes, over all ranks; 0 for none at all
    sample_tokens: int = 256  # length of the sample text at the end, 0 for none
    # watching
    profile: int = 0  # steps to trace, from the third on, for ui.perfetto.dev; 0 for none
    tensorboard: bool = False  # write to out_dir/tensorboard; needs the package tensorboard
    wandb: bool = False  # log to Weights & Biases; needs the package wandb
# -------------------------------------------------------------------------------------------------


MODES = ("single", "naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-fsdp")
ZERO = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
STAGE = {"zero1": 1, "zero2": 2, "zero3": 3, "torch-fsdp": 3}  # of ZeRO; others shard nothing
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAY_BE_ZERO = {"seed", "lr", "min_lr", "warmup_steps", "weight_decay", "beta1", "beta2",
               "grad_clip", "eval_steps", "sample_tokens", "save_interval", "check_interval",
               "profile"}
AT_LEAST = {"bucket_cap_mb": 1e-6, "memory_limit_gb": 1e-6, "topk_ratio": 1e-9}  # others: 1
BELOW = {"beta1": 1, "beta2": 1, "seed": 2**63, "threads": 1025, "timeout_s": 1e6,
         "lr": 1e31, "weight_decay": 1e31}  # every other: inf
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size")
HOOKS = ("bf16", "powersgd", "topk", "hierarchical")
# A flag, the one that it belongs to, and the values with which that makes use of it.
BELONGS = (("param_dtype", "mode", ZERO), ("reduce_dtype", "mode", ZERO),
           ("shard_size", "mode", ZERO), ("offload", "mode", ZERO), ("comm_hook", "mode", ["ddp"]),
           ("topk_ratio", "comm_hook", ["topk"]), ("node_size", "comm_hook", ["hierarchical"]),
           ("memory_limit_gb", "micro_batch_size", ["auto"]))


class UserError(Exception):
    """A mistake of the user's: one line on stderr, exit status 2, no traceback."""
    status = 2


class RunError(UserError):
    """A run that had better stop, on all ranks alike: one line, exit status 1."""
    status = 1


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def int_or_auto(text):
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


def parse_args(argv):
    """Flags -> Config. Each field is a flag and its comment the help text. Raises UserError."""
    source = pathlib.Path(__file__).read_text()  # inspect.getsource would parse all of it
    comments = dict(re.findall(r"^    (\w+): .*? = .*?# (.*)$", source, re.MULTILINE))
    parser = OneLineParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    for option in fields(Config):
        kinds = typing.get_args(option.type) or (option.type,)  # int | None -> (int, NoneType)
        kind = int_or_auto if kinds == (int, str) else kinds[0]
        how = dict(type=kind, metavar=kind.__name__)
        if kind is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        default = "" if option.default is None else f" [{option.default}]"
        text = (comments[option.name] + default).replace("%", "%%")
        parser.add_argument(f"--{option.name}", default=option.default, help=text, **how)
    config = Config(**vars(parser.parse_args(argv)))
    config.mode = config.mode or ("ddp" if "RANK" in os.environ else "single")
    config.min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    if config.comm_hook == "hierarchical" and config.node_size is None:
        config.node_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return config


def check(config):
    """Raise UserError on a value or a combination that cannot be trained with."""
    for name, choices in (("mode", MODES), ("dtype", DTYPES), ("model", PRESETS),
                          ("param_dtype", DTYPES), ("reduce_dtype", DTYPES), ("comm_hook", HOOKS)):
        if getattr(config, name) not in (*choices, getattr(Config, name)):
            raise UserError(f"--{name} {getattr(config, name)}: choose one of {' '.join(choices)}")
    for name, value in vars(config).items():
        smallest = 0 if name in MAY_BE_ZERO else AT_LEAST.get(name, 1)
        bound = BELOW.get(name, math.inf)
        if type(value) in (int, float) and not smallest <= value < bound:  # nan is in no range
            raise UserError(f"--{name} {value}: must be at least {smallest} and below {bound}")
    for name, other, values in BELONGS:
        if getattr(config, name) != getattr(Config, name) and getattr(config, other) not in values:
            raise UserError(f"--{name} is for --{other} {' '.join(values)}")
    if config.dtype == "fp16" and config.comm_hook in ("powersgd", "topk"):
        raise UserError(f"--comm_hook {config.comm_hook} keeps what it did not send, but --dtype "
                        f"fp16 changes the scale of gradients: choose bf16 or fp32")
    for name in ("model", *SIZES[:-1]):
        if config.init_from and getattr(config, name) != getattr(Config, name):
            raise UserError(f"--{name} and --init_from: the folder says which size")
    for package in ("tensorboard", "wandb"):
        if getattr(config, package) and not importlib.util.find_spec(package):
            raise UserError(f"--{package} needs a package: pip install {package}")
    if config.profile and config.max_steps < config.profile + 2:
        raise UserError(f"--profile {config.profile} begins with the third step: --max_steps "
                        f"{config.max_steps} has to be {config.profile + 2} at least")
    if config.topk_ratio > 1:
        raise UserError(f"--topk_ratio {config.topk_ratio}: must be at most 1")
    if config.min_lr > config.lr:
        raise UserError(f"--min_lr {config.min_lr} is above --lr {config.lr}")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if config.compile and not torch.cuda.is_available() and not shutil.which(compiler):
        raise UserError(f"--compile needs the C++ compiler {compiler}: install it, or set CXX")


def refuse(message, status=2):
    """Print message, return the exit status. All ranks come here; rank 0 speaks first."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank > 0:
        # torchrun answers rank 0's exit by SIGTERM to the rest, who then end alike, in silence. A
        # rank that is alone in its trouble (a file missing on its host) outlives the wait.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(5)
    print(f"train.py: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    if rank == 0 and world_size > 1:
        time.sleep(1)  # for the rest to come as far as their handler
    return status


# -------------------------------------------------------------------------------------------------
# data

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name):
    """A tiktoken Encoding. "bytes" is 256 single bytes and an end-of-text token: no download."""
    if name == "bytes":
        single_bytes = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"\S+\s*|\s+", mergeable_ranks=single_bytes,
                                 special_tokens={END_OF_TEXT: 256})
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise UserError(f"--tokenizer {name}: choose bytes or one of {' '.join(names)}")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no connection; a damaged download
        raise UserError(f"--tokenizer {name} could not be loaded ({type(error).__name__}): it is "
                        f"downloaded once, so connect, or set TIKTOKEN_CACHE_DIR to a folder that "
                        f"has it, or use --tokenizer bytes") from error


def stdlib_text():
    """The standard library's source as one string, end-of-text between files.

    Left out are tests, tables of characters, and what distributions package apart or generate in
    their build. Files are ordered by a hash of their path, so that the last tenth, which validates,
    is text of the same kind as the rest.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    left_out = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
                "test", "tests", "tkinter", "turtle", "turtledemo"}
    paths = []
    for name in sys.stdlib_module_names:
        if not name.startswith("_sysconfigdata"):
            paths += [(root / name).with_suffix(".py"), *(root / name).rglob("*.py")]
    names = [path.relative_to(root).with_suffix("").as_posix() for path in paths if path.is_file()]
    names = [name for name in names if not left_out.intersection(name.split("/"))]
    if not names:
        raise UserError(f"--dataset stdlib: no Python source in {root}; give a text file instead")
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return END_OF_TEXT.join((root / f"{name}.py").read_text("utf-8") for name in names)


def read_text(path):
    """The text of a file. Raises UserError where it is empty or not UTF-8."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--dataset {path} is not UTF-8 text: see byte {error.start}") from error
    if not text:
        raise UserError(f"--dataset {path} is empty")
    return text


@contextlib.contextmanager
def file_lock(path):
    """Held by one process at a time; the system takes it back from a process that dies."""
    import fcntl  # not on Windows

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tokenize(text, tokenizer, out_dir, name):
    """text -> memory-mapped token ids, by way of a cache file in out_dir named after its content.

    The first rank of a machine to get the lock writes the file, the others find it complete: no
    collective and hence no timeout, however long it takes.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = pathlib.Path(out_dir) / f"tokens-{tokenizer.name}-{digest}.npy"
    with file_lock(pathlib.Path(out_dir) / ".tokens.lock"):
        with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: it is truncated
            return np.load(path, mmap_mode="r")
        lines, parts = text.splitlines(keepends=True), []
        at_once = 400_000  # lines: a list of ids takes 8 bytes a token, an array 2
        dtype = np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32
        for start in range(0, len(lines), at_once):
            print(f"tokenizing {name} with {tokenizer.name}: line {start:,} of {len(lines):,}",
                  flush=True)
            ids = tokenizer.encode("".join(lines[start:start + at_once]), disallowed_special=(),
                                   allowed_special={END_OF_TEXT})
            parts.append(np.array(ids, dtype=dtype))
        unfinished = path.with_suffix(".unfinished")  # a crash leaves at most this one
        with open(unfinished, "wb") as file:
            np.save(file, np.concatenate(parts))
        os.replace(unfinished, path)
        return np.load(path, mmap_mode="r")


def read_bin(path, tokenizer, vocab_size):
    """nanoGPT's format: token ids as little-endian uint16 and nothing else. Raises UserError."""
    if not path.is_file():
        raise UserError(f"--dataset {path.parent}: there is no {path.name} in this folder")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise UserError(f"--dataset {path} has {size} bytes, not a number of 2-byte tokens")
    tokens = np.memmap(path, dtype="<u2", mode="r")
    largest = int(tokens.max())  # reads the file once, at disk speed; a crash in mid-run costs more
    if largest >= vocab_size:  # a --tokenizer's, or that of --init_from, which may be another's
        raise UserError(f"--dataset {path} holds token {largest}, but with --tokenizer "
                        f"{tokenizer.name} the model has {vocab_size}: choose the right one")
    return tokens


def load_tokens(config, tokenizer, vocab_size):
    """(training, validation) token ids. Of one text, the last tenth validates. Raises UserError."""
    path, stdlib = pathlib.Path(config.dataset), config.dataset == "stdlib"
    if not stdlib and not path.exists():
        raise UserError(f"--dataset {path}: no such file or folder")
    if path.is_dir() and not stdlib:
        return tuple(read_bin(path / name, tokenizer, vocab_size)
                     for name in ("train.bin", "val.bin"))
    text = stdlib_text() if stdlib else read_text(path)
    tokens = tokenize(text, tokenizer, config.out_dir, config.dataset)
    cut = int(0.9 * len(tokens))
    return tokens[:cut], tokens[cut:]


class Batches:
    """The samples of every step, as a function of (seed, epoch, step) alone.

    A sample is a block of block_size tokens and the token after it; blocks do not overlap. An epoch
    is a permutation of all blocks, cut into whole global batches; what is left over gets its chance
    in the next permutation. Hence:
    - no sample is seen twice in an epoch, by whichever ranks;
    - all ranks make the same number of steps;
    - W ranks and one process see the same micro batches in the same order;
    - there is no state to save: to resume at step s is to ask for step s.
    """

    def __init__(self, tokens, block_size, global_batch_size, seed):
        self.tokens, self.block_size = tokens, block_size
        self.global_batch_size, self.seed = global_batch_size, seed
        self.n_blocks = (len(tokens) - 1) // block_size
        self.steps_per_epoch = self.n_blocks // global_batch_size
        self.epoch, self.order = None, None  # the permutation used last, kept since it costs O(n)

    def samples(self, step):
        """Block numbers of the global batch of a step, counted from 0: (global_batch_size,)."""
        epoch, step = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            random = np.random.default_rng([self.seed, epoch])
            self.epoch, self.order = epoch, random.permutation(self.n_blocks)
        return self.order[step * self.global_batch_size:(step + 1) * self.global_batch_size]

    def micro_batch(self, step, index, size):
        """(x, y) of the index-th `size` samples of a step, each (size, T) int64.

        In micro-step a, rank r of W takes index a W + r.
        """
        chosen = self.samples(step)[index * size:(index + 1) * size]
        positions = chosen[:, None] * self.block_size + np.arange(self.block_size + 1)
        window = torch.from_numpy(self.tokens[positions].astype(np.int64))  # (size, T + 1)
        return window[:, :-1], window[:, 1:]


def load_batches(config, tokenizer, gpt_config):
    """(training, validation) Batches; validation is None with eval_steps 0. Raises UserError."""
    tokens, val_tokens = load_tokens(config, tokenizer, gpt_config.vocab_size)
    block_size = gpt_config.block_size
    shortest = min((tokens, val_tokens) if config.eval_steps else (tokens,), key=len)
    if len(shortest) <= block_size:
        raise UserError(f"--dataset {config.dataset}: a part of {len(shortest)} tokens is shorter "
                        f"than one block of {block_size} and the token after it")
    batches = Batches(tokens, block_size, config.global_batch_size, config.seed)
    if batches.steps_per_epoch == 0:
        raise UserError(f"--dataset {config.dataset}: {batches.n_blocks} blocks of {block_size} to "
                        f"train on are fewer than --global_batch_size {config.global_batch_size}")
    if not config.eval_steps:
        return batches, None
    # Seed 0: all runs are validated on the same blocks. A "step" of these is one micro batch.
    size = min(config.micro_batch_size, (len(val_tokens) - 1) // block_size)
    return batches, Batches(val_tokens, block_size, size, seed=0)


# -------------------------------------------------------------------------------------------------
# processes


@dataclass
class Worker:
    """This process: its rank among world_size ranks, and its device."""
    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # of these ranks; None: all that there are
    doing: str = "starting"  # for the line that tells where a run has failed
    pids: list = field(default_factory=list)  # of all ranks
    start_mem_bytes: int = 0  # held before there is a model: Python, torch, connections

    def to_device(self, *tensors):
        """Tensors on the device; on CUDA from pinned memory, without waiting for the copy."""
        if self.device.type == "cpu":
            return tensors
        return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in tensors)

    def synchronize(self):
        """Wait for the work queued on the device, so that a clock means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reduce(self, tensor, op=dist.ReduceOp.SUM):
        """tensor, reduced in place over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def gather(self, value):
        """[rank 0's value, rank 1's, ...]; any that can be pickled."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, function, *arguments):
        """function(*arguments) of this rank. Raises UserError on all ranks if it fails on one."""
        result = problem = None
        try:
            result = function(*arguments)
        except (UserError, OSError) as error:
            problem = str(error)
        for rank, found in enumerate(self.gather(problem)):
            if found is not None:
                raise UserError(found if rank == 0 else f"rank {rank}: {found}")
        return result

    def largest(self, value):
        """The largest of all ranks' values, a number."""
        return self.reduce(torch.tensor(value, device=self.device), dist.ReduceOp.MAX).item()

    def peak_mem_bytes(self):
        """The most this process has held: by CUDA's allocator, or as resident set on CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resident_bytes("VmHWM")

    def mem_bytes(self):
        """What this process holds now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return resident_bytes("VmRSS")

    def reset_peak(self):
        """Give free memory back, and measure the peak anew, where the system can."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        with contextlib.suppress(OSError):  # not Linux, or not allowed
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS


def resident_bytes(name):
    """VmHWM, the largest resident set of this process so far, or VmRSS, that of now."""
    if sys.platform == "linux":  # not ru_maxrss, which is inherited from the starting process
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status).group(1))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes, the peak only


def meet(rank, world_size, timeout):
    """The store that torchrun offers, under a prefix that the ranks of this start alone know.

    Between restarts torchrun keeps its store (torch 2.13), and so the addresses of ranks that are
    dead: new ranks that read these fail, or wait. So rank 0 draws a prefix, and each other rank
    asks for it by a number drawn too: no answer to an earlier rank is taken for one's own.
    """
    ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=ours,
                          timeout=timeout, wait_for_workers=False)
    drawn, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(f"ask/{rank}", drawn)
        prefix = store.get(f"told/{drawn}").decode()  # waits
        store.set(f"met/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    missing = set(range(1, world_size))
    while missing:
        for peer in [peer for peer in missing if store.check([f"ask/{peer}"])]:
            store.set(f"told/{store.get(f'ask/{peer}').decode()}", drawn)
            if store.check([f"met/{drawn}/{peer}"]):
                missing.remove(peer)
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} has not started")
        time.sleep(0.01)
    return dist.PrefixStore(drawn, store)


def start(config):
    """Choose the device and join the process group, if the mode has one. Raises UserError."""
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS demands it
        torch.use_deterministic_algorithms(True)
    gpus, device = torch.cuda.device_count(), torch.device("cpu")
    if gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        torch.cuda.set_device(device)
    if config.mode == "single":
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError(f"--mode single is one process, but torchrun started "
                            f"{os.environ['WORLD_SIZE']}: choose one of {' '.join(MODES[1:])}")
        worker = Worker(0, 1, device)
        worker.start_mem_bytes = worker.peak_mem_bytes()
        return worker
    # NCCL refuses two ranks on one GPU; gloo does not.
    nccl = 0 < int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= gpus
    timeout = datetime.timedelta(seconds=config.timeout_s)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        store = meet(rank, world_size, timeout) if "RANK" in os.environ else dist.HashStore()
        dist.init_process_group("nccl" if nccl else "gloo", store=store, rank=rank,
                                world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        raise RunError(f"rank {rank} of {world_size} did not get to the others within --timeout_s "
                       f"{config.timeout_s}: {error}") from error
    worker = Worker(rank, world_size, device)
    worker.pids = worker.gather(os.getpid())
    worker.start_mem_bytes = worker.peak_mem_bytes()
    return worker


# -------------------------------------------------------------------------------------------------
# model and step


def build_model(config, tokenizer):
    """The plain GPT: a preset, each size overridden where its flag is given. Raises UserError.

    For ZeRO on the meta device: its wrapper gives it values unit by unit.
    """
    given = {name: getattr(config, name) for name in SIZES if getattr(config, name) is not None}
    sizes = dict(PRESETS[config.model], vocab_size=tokenizer.n_vocab)
    if config.init_from:
        sizes = read_llama_config(config, tokenizer)
    try:
        with torch.device("meta") if config.mode in ZERO else contextlib.nullcontext():
            model = GPT(GPTConfig(seed=config.seed, **{**sizes, **given},
                                  activation_checkpointing=config.activation_checkpointing))
    except ValueError as error:
        raise UserError(error) from error
    if config.init_from:
        model.init_weights = functools.partial(read_llama_weights, model, config)
        model.init_weights()  # for ZeRO everything is on meta yet, and this only looks for mistakes
    return model


def wrap(model, config, worker):
    """The module whose forward the loop calls: the model, or what its mode puts around it."""
    if config.compile:
        model.compile_blocks()
    if config.mode in ZERO:
        return ZERO[config.mode](model, worker.group, param_dtype=DTYPES.get(config.param_dtype),
                                 reduce_dtype=DTYPES.get(config.reduce_dtype),
                                 shard_size=config.shard_size,
                                 offload=config.offload and worker.device.type != "cpu")
    model.to(worker.device)
    options = dict(device_ids=[worker.device] if worker.device.type == "cuda" else None,
                   process_group=worker.group, bucket_cap_mb=config.bucket_cap_mb,
                   find_unused_parameters=config.find_unused_parameters)
    if config.mode == "ddp":
        model = DDP(model, **options)
        if config.comm_hook:
            model.register_comm_hook(*comm_hook(config, worker))
        return model
    if config.mode == "torch-ddp":
        if config.bucket_cap_mb == 25:
            options["bucket_cap_mb"] = None  # 25 too, but only then is torch's first bucket small
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    if config.mode == "torch-fsdp":
        mesh = DeviceMesh.from_group(worker.group or dist.group.WORLD, worker.device.type)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def comm_hook(config, worker):
    """(state, hook) of --comm_hook, for `register_comm_hook`. A collective."""
    if config.comm_hook == "bf16":
        return worker.group, default_hooks.bf16_compress_hook
    # Nothing is left out while the learning rate warms up.
    if config.comm_hook == "powersgd":  # torch wants 2 steps at least
        return (powerSGD_hook.PowerSGDState(worker.group,
                                            start_powerSGD_iter=max(2, config.warmup_steps)),
                powerSGD_hook.powerSGD_hook)
    if config.comm_hook == "topk":
        return TopKState(config.topk_ratio, worker.group, config.warmup_steps), top_k_hook
    return HierarchicalState(config.node_size, worker.group), hierarchical_hook


def shard_group(model, config, worker):
    """The ranks that parameters and gradients are cut up over; None where each has them whole."""
    if isinstance(model, Zero1):
        return model.shard_group
    return (worker.group or dist.group.WORLD) if config.mode in STAGE else None


def local(tensor):
    """This rank's part of a tensor that FSDP2 shards; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_parameters(model):
    """Yield whole parameters one at a time, in the plain model's order. A collective if sharded.
    """
    if isinstance(model, Zero1):
        yield from (p for _, p in model.full_parameters())
    else:
        yield from (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())


def set_gradient_sync(model, on):
    """Whether the next backward exchanges gradients, for the wrappers that do so by themselves.

    Stages 2 and 3 always do: they have no room for whole gradients, and their bits are then those
    of one process, however micro batches are dealt out. Unless --shard_size 1 makes them DDP.
    """
    if isinstance(model, Zero2) and not model.shard_size == 1 < model.world_size:
        return
    if hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = on  # what no_sync() sets, without a second code path
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)


def lr_at(step, config):
    """Learning rate of a step counted from 0: in the warm-up lr times (step + 1) / (warmup_steps +
    1), so that neither 0 nor lr is met in it; then a cosine from lr down to min_lr at max_steps."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model, config):
    """AdamW that decays matrices only: there is nothing to keep small about a norm's weight."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == big] for big in (True, False))
    groups = [dict(params=matrices, weight_decay=config.weight_decay),
              dict(params=vectors, weight_decay=0.0)]
    # Not fused: that kernel rounds a tensor's tail differently, so slices would not match wholes.
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=False)


def make_scaler(config, worker):
    """Loss scaling for fp16. ShardedGradScaler serves whole gradients as well as shards: it reduces
    its check for inf over all ranks, so that none of them steps, or skips, alone."""
    kind = torch.amp.GradScaler if config.mode == "single" else ShardedGradScaler
    return kind(worker.device.type, enabled="fp16" in (config.dtype, config.param_dtype))


def autocast(config, worker):
    return torch.autocast(worker.device.type, DTYPES[config.dtype], enabled=config.dtype != "fp32")


def accumulation_steps(config, world_size):
    """Micro-steps a step takes on every rank. Raises UserError unless whole."""
    for name in ("shard_size", "node_size"):
        if world_size % (getattr(config, name) or 1):
            raise UserError(f"--{name} {getattr(config, name)} does not divide {world_size} ranks")
    together = config.micro_batch_size * world_size
    if config.global_batch_size % together:
        raise UserError(f"--global_batch_size {config.global_batch_size} is not a multiple of "
                        f"{together}, which is --micro_batch_size {config.micro_batch_size} times "
                        f"{world_size} rank{'s' * (world_size > 1)}")
    return config.global_batch_size // together


def forward_backward(model, scaler, batches, step, config, worker):
    """All micro-steps of a step; leaves gradients in `.grad`.

    Returns the losses of all micro batches of all ranks in the order of the data, (a W,) float64,
    with this rank's filled in and zeros for the rest: their sum over ranks rounds nothing, so that
    what is logged does not depend on W.
    """
    micro_steps = accumulation_steps(config, worker.world_size)
    losses = torch.zeros(micro_steps * worker.world_size, dtype=torch.float64, device=worker.device)
    for micro_step in range(micro_steps):
        index = micro_step * worker.world_size + worker.rank
        x, y = worker.to_device(*batches.micro_batch(step, index, config.micro_batch_size))
        set_gradient_sync(model, micro_step == micro_steps - 1)
        with autocast(config, worker):
            _, loss = model(x, y)
        losses[index] = loss.detach()
        scaler.scale(loss / micro_steps).backward()
    return losses


def finish_gradients(model, config, worker):
    """Average gradients over ranks, where no wrapper did so during the backward; return the seconds
    that this took."""
    if config.mode != "naive":
        return 0.0
    worker.synchronize()
    start_s = time.perf_counter()
    average_gradients(model, worker.group)
    worker.synchronize()
    return time.perf_counter() - start_s


@dataclass
class Gradients:
    """What all ranks know of a step before its update."""
    losses: list  # of all micro batches of all ranks, in the order of the data
    grad_norm: float  # before clipping
    finite: bool  # losses and gradients, on all ranks
    stop: bool  # some rank was told to
    exposed_s: float | None  # waited for communication; None in the torch modes, which do not tell


def find_gradients(model, optimizer, scaler, batches, step, config, worker, stop=False):
    """The first half of a step: `.grad` of all parameters, averaged and clipped -> Gradients."""
    # forward and backward, micro-step by micro-step; then gradients are means over ranks
    worker.doing = f"step {step + 1}, forward, backward and the exchange of gradients"
    optimizer.zero_grad(set_to_none=True)
    before_s = getattr(model, "exposed_s", 0.0)
    losses = forward_backward(model, scaler, batches, step, config, worker)
    exposed_s = finish_gradients(model, config, worker)
    exposed_s += getattr(model, "exposed_s", 0.0) - before_s

    # clip, on all ranks by the same factor
    worker.doing = f"step {step + 1}, the norm of all gradients"
    scaler.unscale_(optimizer)
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    grad_norm = clip_gradients_(gradients, config.grad_clip or math.inf,
                                shard_group(model, config, worker)).item()

    # add up losses over ranks, and in the same collective whatever all ranks must know
    worker.doing = f"step {step + 1}, the sum of losses over ranks"
    flags = losses.new_tensor([not math.isfinite(grad_norm), stop])
    *losses, bad, stop = worker.reduce(torch.cat((losses, flags))).tolist()
    finite = bad == 0 and all(map(math.isfinite, losses))
    return Gradients(losses, grad_norm, finite, stop > 0,
                     None if config.mode.startswith("torch-") else exposed_s)


def update(optimizer, scaler, step, config, found):
    """The second half of a step. What is not finite is skipped, by all ranks, which know the same.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, config)
    if found.finite:
        scaler.step(optimizer)
    scaler.update()


def memory_limit(config, worker):
    """Bytes that a step may take on this rank. Raises UserError where nothing tells.

    Of the limit 5 % stay for what a trial does not have: data, evaluation, checkpoints.
    """
    if config.memory_limit_gb:
        return 0.95 * 1e9 * config.memory_limit_gb
    if worker.device.type == "cpu":
        raise UserError("--micro_batch_size auto on a CPU needs --memory_limit_gb: what a rank may "
                        "hold, with Python and torch")
    free, _ = torch.cuda.mem_get_info(worker.device)
    sharing = math.ceil(int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / torch.cuda.device_count())
    return 0.95 * free / sharing


def largest_micro_batch(config, worker):
    """--micro_batch_size auto: the largest size that deals out the global batch evenly and with
    which a step stays within the limit on every rank. A collective; raises UserError.

    Found by trying, on a model that is then thrown away. Memory grows on a straight line, so a size
    is tried only if the line through the last two points stays below the limit: no rank runs out
    while others wait for it.
    """
    worker.doing = "looking for the largest micro batch"
    limit = -worker.largest(-worker.together(memory_limit, config, worker))
    share, rest = divmod(config.global_batch_size, worker.world_size)
    if rest:
        raise UserError(f"--global_batch_size {config.global_batch_size} is not a multiple of "
                        f"{worker.world_size}, the number of ranks")
    config = replace(config, micro_batch_size=1, warmup_steps=0)  # comm hooks are at work at once
    _, plain, batches, _, _ = worker.together(prepare, config, worker)
    worker.reset_peak()  # of tokenizing
    model = wrap(plain, config, worker)
    optimizer, T = make_optimizer(model, config), plain.config.block_size
    points = []  # (size, bytes), the first one being what is held between steps
    for size in (size for size in range(1, share + 1) if share % size == 0):
        if points:
            (m, bytes_m), (n, bytes_n) = points[-2:]
            if bytes_n + (bytes_n - bytes_m) / (n - m) * (size - n) > limit:
                break
        batch = size * worker.world_size * min(2, share // size)  # to accumulate takes memory too
        trial = replace(config, micro_batch_size=size, global_batch_size=batch)
        for _ in range(3):  # from the first on there is Adam's state, in the third PowerSGD begins
            find_gradients(model, optimizer, make_scaler(config, worker),
                           Batches(batches.tokens, T, batch, config.seed), 0, trial, worker)
            optimizer.step()
        if not points:
            points.append((0, worker.largest(worker.mem_bytes())))
        points.append((size, worker.largest(worker.peak_mem_bytes())))
    fit = [size for size, n_bytes in points[1:] if n_bytes <= limit]
    found = ", ".join(f"{size} takes {1e-9 * n_bytes:.2f}" for size, n_bytes in points[1:])
    if not fit:
        raise UserError(f"--micro_batch_size auto: {found} GB, and the limit is {1e-9 * limit:.2f}")
    if worker.rank == 0:
        print(f"micro batch size {fit[-1]}: {found} GB of {1e-9 * limit:.2f}", flush=True)
    del plain, model, optimizer
    if config.compile:
        torch.compiler.reset()
    worker.reset_peak()
    return fit[-1]


# -------------------------------------------------------------------------------------------------
# checkpoints

RECORD = "checkpoint.json"  # beside what torch.distributed.checkpoint writes


class Slice(torch.Tensor):
    """Elements [first, first + n) of a flat tensor, of which this rank has no more, as
    torch.distributed.checkpoint asks for them: any rank may save some slices and read others.

    It calls the three dunder methods, which DTensor has too; DTensor itself cannot tell of slices
    that begin in the middle of a row, as ZeRO's do.
    """

    @staticmethod
    def __new__(cls, part, first, size):
        return torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=part.dtype)

    def __init__(self, part, first, size):
        self.part, self.first = part.detach().view(-1), first  # (n,), shares part's memory

    def __create_chunk_list__(self):
        n = self.part.numel()
        return [ChunkStorageMetadata(torch.Size([self.first]), torch.Size([n]))] if n else []

    def __create_write_items__(self, key, _):
        properties = TensorProperties.create_from_tensor(self.part)
        return [WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk, properties, self.size()))
                for chunk in self.__create_chunk_list__()]

    def __get_tensor_shard__(self, index):
        return self.part

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise TypeError(f"{function}: a Slice has no values but those of its part")


@dataclass
class Progress:
    """What the loop knows at the end of a step beside tensors."""
    step: int = 0  # steps done
    best_val_loss: float = math.inf
    best_step: int | None = None  # after which it was found
    skipped_steps: int = 0  # that were not finite, in all
    skipped_in_a_row: int = 0  # the last ones of them
    entry: dict = field(default_factory=dict)  # what metrics.jsonl has of this step

    def count(self, step, found, limit):
        """A step is done. Raises RunError where it is one too many that had to be skipped."""
        self.step = step
        self.skipped_in_a_row = 0 if found.finite else self.skipped_in_a_row + 1
        self.skipped_steps += not found.finite
        if self.skipped_in_a_row >= limit:
            raise RunError(f"step {step}: loss or gradients were not finite in {limit} steps in a "
                           f"row, which were skipped: lower --lr, or look at what these steps read")

    def note(self, val_loss):
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.best_step = val_loss, self.step


def sha256(record):
    """Of what is in a record beside its own hash."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sync_to_disk(path):
    """fsync of a file or a folder; of a folder, so that a name in it outlives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def replace_file(path, write):
    """Call write(file) on a new file that then takes the place of path: whole or not at all."""
    unfinished = f"{path}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            write(file)
        sync_to_disk(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise


def read_record(folder):
    """The checked checkpoint.json of a checkpoint. Raises UserError naming the damaged file."""
    if not folder.is_dir():
        raise UserError(f"--resume {folder}: there is no such folder")
    if any(folder.glob("step_*")):
        raise UserError(f"--resume {folder} has checkpoints in it: give one of them, or --resume "
                        f"auto with this as --out_dir")
    try:
        record = json.loads((folder / RECORD).read_bytes())
        if record["sha256"] != sha256(record):
            raise ValueError
    except FileNotFoundError:
        raise UserError(f"{folder / RECORD} is missing: this is no checkpoint") from None
    except (ValueError, TypeError, LookupError):
        raise UserError(f"{folder / RECORD} is damaged") from None
    # Before anybody unpickles it.
    if hashlib.sha256((folder / ".metadata").read_bytes()).hexdigest() != record["metadata"]:
        raise UserError(f"{folder / '.metadata'} is damaged")
    return record


def in_order(metadata):
    """[(key, its file, first byte, number of bytes)] of all slices in a checkpoint."""
    places = [(index.fqn, place.relative_path, place.offset, place.length)
              for index, place in metadata.storage_data.items()]
    return sorted(places, key=lambda place: place[1:])


def crc32(folder, place):
    """Of the bytes of a slice as they are on disk, and so of the archive around it."""
    _, name, offset, length = place
    with open(folder / name, "rb") as file:
        file.seek(offset)
        return zlib.crc32(file.read(length))


class Checkpoints:
    """The checkpoints of a run: folders out_dir/step_00000100, each complete or not there at all.

        __0_0.distcp ...   slices of parameters and of optimizer state, by name, a file per rank
        .metadata          where each slice is: torch.distributed.checkpoint's pickle
        checkpoint.json    Progress, options, shapes, and hashes of itself and of .metadata

    No rank holds more than it trains with, and any mode and world size reads what another wrote.
    All methods are collectives.
    """

    def __init__(self, config, worker, log, model, optimizer, scaler, facts):
        self.config, self.worker, self.log = config, worker, log
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.facts = facts  # what has to be the same for a run to go on: see `prepare`
        self.residual = model.comm_state.residual if config.comm_hook == "topk" else {}
        self.out_dir = pathlib.Path(config.out_dir)

    # ---- what is in a checkpoint

    def tensors(self):
        """{key: what this rank has of it}; whole tensors are written by one of the ranks."""
        held, firsts = {}, first_elements(self.model)
        for name, p in named_local(self.model):
            size = math.prod(self.facts["shapes"][name])
            held[f"model.{name}"] = Slice(local(p), firsts[name], size)
            for kind, value in self.optimizer.state[p].items():
                held[f"optimizer.{kind}.{name}"] = (
                    value if kind == "step" else Slice(local(value), firsts[name], size))
            if p in self.residual:
                held[f"residual.{self.worker.rank}.{name}"] = self.residual[p]
        held[f"random.cpu.{self.worker.rank}"] = torch.get_rng_state()
        if self.worker.device.type == "cuda":
            held[f"random.cuda.{self.worker.rank}"] = torch.cuda.get_rng_state()
        return held

    def record(self, progress):
        epoch, step = divmod(progress.step, self.facts["steps_per_epoch"])
        own = dict(finite(vars(progress)), entry=finite(progress.entry))
        return dict(own, epoch=epoch, sample=step * self.config.global_batch_size,
                    scaler=self.scaler.state_dict(), world_size=self.worker.world_size,
                    torch=torch.__version__, config=vars(self.config), facts=self.facts)

    # ---- save

    def save(self, progress):
        """Write a checkpoint; return whether it could be written. If not, the run goes on with what
        there is."""
        self.worker.doing = f"step {progress.step}, its checkpoint"
        folder = self.out_dir / f"step_{progress.step:08d}"
        unfinished = self.out_dir / f".{folder.name}.unfinished"
        try:
            sums = self._write(unfinished)
            self.worker.together(self._publish, unfinished, folder, progress, sums)
            with contextlib.suppress(OSError):  # the next one will try again
                self._tidy(progress)
            return True
        except UserError as failure:
            self.log.warn(f"step {progress.step}: no checkpoint was written, earlier ones are as "
                          f"they were: {failure} (is the disk full, or gone?)")
            return False
        finally:
            if self.worker.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _write(self, unfinished):
        """Write, each rank its part, and read it again -> checksums of all slices, in order."""
        try:
            metadata = quietly(dcp.save, self.tensors(),
                               storage_writer=FileSystemWriter(unfinished))
        except dcp.CheckpointException as error:
            raise UserError(reason(error)) from error
        slices, own = in_order(metadata), f"__{self.worker.rank}_"  # beginning of its files' names
        ours = self.worker.together(lambda: {i: crc32(unfinished, place) for i, place in
                                             enumerate(slices) if place[1].startswith(own)})
        sums = {i: crc for found in self.worker.gather(ours) for i, crc in found.items()}
        return [sums[i] for i in range(len(slices))]

    def _publish(self, unfinished, folder, progress, sums):
        """Rank 0: everything is on disk; give it its name, which makes it count."""
        if self.worker.rank > 0:
            return
        record = dict(self.record(progress), crc32=sums)
        record["metadata"] = hashlib.sha256((unfinished / ".metadata").read_bytes()).hexdigest()
        text = json.dumps(dict(record, sha256=sha256(record)), indent=1)
        replace_file(unfinished / RECORD, lambda file: file.write(text.encode()))
        sync_to_disk(unfinished)
        os.rename(unfinished, folder)
        sync_to_disk(self.out_dir)

    def _tidy(self, progress):
        """Rank 0: mark the best checkpoint, remove those that are neither it nor the newest."""
        if self.worker.rank > 0:
            return
        link = self.out_dir / ".best"
        if progress.best_step == progress.step:
            link.unlink(missing_ok=True)
            link.symlink_to(f"step_{progress.step:08d}")
            link.replace(self.out_dir / "best")
        best = (self.out_dir / "best").resolve().name
        for old in self._newest_first()[self.config.keep_last:]:
            if old.name != best:
                hidden = old.rename(self.out_dir / f".{old.name}.removed")
                shutil.rmtree(hidden, ignore_errors=True)

    def _newest_first(self):
        folders = [path for path in self.out_dir.glob("step_*")
                   if re.fullmatch(r"step_\d{8,}", path.name)]
        return sorted(folders, key=lambda path: -int(path.name[5:]))

    # ---- resume

    def resume(self):
        """Load the checkpoint that --resume, or a restart by torchrun, asks for -> Progress.

        Raises UserError where it cannot be used; under auto, where there are some and none can.
        """
        self.worker.doing = "loading a checkpoint"
        wanted, progress, own_step, problems = self.config.resume, Progress(), 0, []
        launchers = set(self.worker.gather(launched_by())) - {None}
        again = self._has_begun(launchers)
        folders = self._newest_first() if wanted == "auto" or again else []
        folders += [] if wanted in (None, "auto") else [pathlib.Path(wanted)]
        for folder in self.worker.gather(folders)[0]:  # rank 0's view: disks of others may be late
            try:
                progress = self._load(folder)
            except UserError as problem:
                problems.append(str(problem))
                continue
            if folder.resolve().parent == self.out_dir.resolve():
                own_step = progress.step  # until then out_dir has the past of this run
            break
        if problems and not progress.step:
            raise UserError(problems[0] if len(problems) == 1 else f"none of {len(problems)} "
                            f"checkpoints can be used; the newest: {problems[0]}")
        for problem in problems:
            self.log.warn(f"{problem}; falling back to the checkpoint before")
        if progress.step > self.config.max_steps:
            raise UserError(f"--max_steps {self.config.max_steps} is less than the "
                            f"{progress.step} steps of the checkpoint {folder}")
        if progress.step:
            self.log.say(f"resumed from {folder}, after step {progress.step}")
        elif wanted or again:
            self.log.say(f"no checkpoint in {self.out_dir}: starting with step 1")
        self.worker.together(self._begin, own_step, launchers)
        self.worker.together(self.log.cut_back, own_step)
        self.log.last = progress.entry
        return progress

    def _has_begun(self, launchers):
        """Whether a torchrun that is still there has begun this run before, and starts it again
        after a rank's death: then out_dir has its checkpoints, whatever --resume says.

        torchrun counts restarts, but not all of them, and not on all nodes; and a rank may die
        before the checkpoints of an earlier run are out of the way.
        """
        begun = self.out_dir / ".begun"
        known = self.worker.together(lambda: begun.read_text() if begun.exists() else "")
        return any(self.worker.gather(not launchers.isdisjoint(known.splitlines())))

    def _load(self, folder):
        """Read a checkpoint that is whole and fits -> Progress. Raises UserError on all ranks."""
        record, metadata = self.worker.together(self._check, folder)
        parameters = dict(named_local(self.model))
        self.optimizer.state.clear()
        for key in metadata.state_dict_metadata:
            if key.startswith("optimizer."):
                _, kind, name = key.split(".", 2)
                self.optimizer.state[parameters[name]][kind] = (
                    torch.tensor(0.0) if kind == "step" else torch.empty_like(parameters[name]))
        self._expect_residual(folder, record, metadata)
        held = {key: value for key, value in self.tensors().items()
                if key in metadata.state_dict_metadata}  # there may be more ranks now
        try:
            quietly(dcp.load, held, storage_reader=FileSystemReader(folder))
        except dcp.CheckpointException as error:
            raise UserError(f"{folder} could not be loaded: {reason(error)}") from error
        rank = self.worker.rank
        if f"random.cpu.{rank}" in held:
            torch.set_rng_state(held[f"random.cpu.{rank}"])
        if f"random.cuda.{rank}" in held:
            torch.cuda.set_rng_state(held[f"random.cuda.{rank}"])
        if self.scaler.is_enabled() and record["scaler"]:
            self.scaler.load_state_dict(record["scaler"])
        known = {f.name: record[f.name] for f in fields(Progress)}
        return Progress(**{name: value for name, value in known.items() if value is not None})

    def _expect_residual(self, folder, record, metadata):
        """Make room for what a comm hook did not send, if this rank has left it in the checkpoint.
        """
        self.residual.clear()
        if self.config.comm_hook == "topk" and record["world_size"] == self.worker.world_size:
            for name, p in named_local(self.model):
                if f"residual.{self.worker.rank}.{name}" in metadata.state_dict_metadata:
                    self.residual[p] = torch.empty_like(p)
        if self.config.comm_hook not in ("topk", "powersgd"):
            return
        self.model.comm_state.iter = record["step"]
        if not self.residual and record["step"] > self.config.warmup_steps:
            why = ("is not in" if record["world_size"] == self.worker.world_size else
                   f"is of {record['world_size']} ranks in")
            self.log.warn(f"--comm_hook {self.config.comm_hook} starts from zero: what was not "
                          f"sent {why} {folder}")

    def _check(self, folder):
        """(checkpoint.json, .metadata), this rank's share of the rest having been read for damage.
        """
        record = read_record(folder)
        ours, theirs, path = self.facts["shapes"], record["facts"]["shapes"], folder / RECORD
        for name in (*ours, *theirs):
            if ours.get(name) != theirs.get(name):
                raise UserError(f"{path} is of another model: {name} is "
                                f"{theirs.get(name, 'missing')}, here {ours.get(name, 'missing')}")
        for name, value in self.facts.items():
            if record["facts"].get(name, value) != value:
                raise UserError(f"{path} is of another run: {name} was {record['facts'][name]}, "
                                f"and is {value}")
        metadata = FileSystemReader(folder).read_metadata()
        slices = list(zip(in_order(metadata), record["crc32"], strict=True))
        for place, expected in slices[self.worker.rank::self.worker.world_size]:
            if crc32(folder, place) != expected:
                raise UserError(f"{folder / place[1]} is truncated or damaged: see {place[0]}")
        return record, metadata

    def _begin(self, step, launchers):
        """Rank 0: leave in out_dir the past of the run that begins now, and note who begins it."""
        if self.worker.rank > 0:
            return
        for hidden in self.out_dir.glob(".step_*"):  # a run was killed in `save`
            shutil.rmtree(hidden)
        self._set_aside(step)
        text = "\n".join(launchers)
        replace_file(self.out_dir / ".begun", lambda file: file.write(text.encode()))

    def _set_aside(self, step):
        """Move checkpoints ahead of a step out of the way, be they damaged or another run's: a
        later resume would take them for the work of this one."""
        ahead = [path for path in self._newest_first() if int(path.name[5:]) > step]
        if not ahead:
            return
        aside = next(path for n in itertools.count(1)
                     if not (path := self.out_dir / f"aside_{n}").exists())
        aside.mkdir()
        best = self.out_dir / "best"
        if best.resolve() in [path.resolve() for path in ahead]:
            best.rename(aside / "best")
        if (self.out_dir / "metrics.jsonl").exists():
            shutil.copy(self.out_dir / "metrics.jsonl", aside)
        for path in ahead:
            path.rename(aside / path.name)
        self.log.say(f"{len(ahead)} earlier checkpoint{'s' * (len(ahead) > 1)} of steps after "
                     f"{step} moved to {aside}")


def launched_by():
    """The torchrun process that has started this rank, told from any other; None if none has."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    pid, started = os.getppid(), ""
    with contextlib.suppress(OSError):  # not Linux: the number has to do
        started = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} on {socket.gethostname()}: {pid} {started}"


def named_local(model):
    """(the plain model's name, what this rank has of it) of every parameter."""
    whole = model if isinstance(model, Zero1) else getattr(model, "module", model)
    return whole.named_parameters()


def first_elements(model):
    """{name: where this rank's part begins in the parameter, in elements, in order of memory}."""
    if isinstance(model, Zero1):
        return model.shard_starts()
    firsts = dict.fromkeys((name for name, _ in named_local(model)), 0)
    for name, p in named_local(model):
        if isinstance(p, DTensor) and local(p).numel():  # FSDP2 shards rows
            firsts[name] = p.__create_chunk_list__()[0].offsets[0] * (p.numel() // p.size(0))
    return firsts


def quietly(function, *arguments, **options):
    """Call torch.distributed.checkpoint without its warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return function(*arguments, **options)


def reason(error):
    """One line of what torch.distributed.checkpoint has gathered from the ranks that failed."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}"


def export(model, progress, config, gpt_config, tokenizer, worker):
    """Write config.export in nanoGPT's form, which `torch.load(..., weights_only=True)` reads, and
    config.export_hf in that of transformers' LlamaForCausalLM.

    A collective. Only rank 0 holds the whole model, on the CPU, and only here.
    """
    whole = {}
    for (name, _), p in zip(named_local(model), full_parameters(model)):
        if worker.rank == 0:
            whole[name] = p.detach().to("cpu", copy=True)
    if worker.rank == 0 and config.export_hf:
        write_llama(whole, pathlib.Path(config.export_hf), gpt_config, tokenizer)
    if worker.rank == 0 and config.export:
        plain = getattr(model, "module", model)
        first = {}
        for name, p in plain.named_parameters(remove_duplicate=False):
            whole[name] = whole[first.setdefault(p, name)]  # a tied one has two names
        state = dict(model=whole, model_args=asdict(gpt_config), iter_num=progress.step,
                     best_val_loss=progress.best_val_loss, config=vars(config))
        replace_file(config.export, lambda file: torch.save(state, file))


# -------------------------------------------------------------------------------------------------
# the Llama family: folders with a config.json, which transformers reads and writes

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
                      "BF16": torch.bfloat16}


def write_llama(whole, folder, gpt_config, tokenizer):
    """{our name: tensor} -> config.json and pytorch_model.bin in folder."""
    theirs = {}
    for name, parts in llama_names(gpt_config).items():
        theirs |= {part: rows.clone() for part, rows in
                   zip(parts, whole[name].split(list(parts.values())))}
    replace_file(folder / "pytorch_model.bin", lambda file: torch.save(theirs, file))
    end = tokenizer.eot_token
    text = json.dumps(dict(to_llama_config(gpt_config), bos_token_id=end, eos_token_id=end))
    replace_file(folder / "config.json", lambda file: file.write(text.encode()))


def read_llama_config(config, tokenizer):
    """Options of GPTConfig from the folder --init_from. Raises UserError."""
    path = pathlib.Path(config.init_from) / "config.json"
    try:
        sizes = from_llama_config(json.loads(path.read_bytes()))
    except KeyError as error:
        raise UserError(f"--init_from: {path} has no {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--init_from: {path}: {error}") from error
    if sizes["vocab_size"] < tokenizer.n_vocab:
        raise UserError(f"--init_from {config.init_from} has {sizes['vocab_size']} tokens, but "
                        f"--tokenizer {tokenizer.name} has {tokenizer.n_vocab}: choose its own")
    return sizes


def read_safetensors(path):
    """{name: tensor on disk} of a .safetensors file: the length of a header in 8 bytes, the header
    in JSON, numbers. Raises ValueError or LookupError on what is not one."""
    raw = np.memmap(path, dtype=np.uint8, mode="c")
    first = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    if first > len(raw):
        raise ValueError(f"a header of {first} bytes in a file of {len(raw)}")
    header = json.loads(raw[8:first].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (first + offset for offset in entry["data_offsets"])
        numbers = torch.from_numpy(raw[begin:end]).view(SAFETENSORS_DTYPES[entry["dtype"]])
        tensors[name] = numbers.view(entry["shape"])
    return tensors


@torch.no_grad()
def read_llama_weights(model, config):
    """Copy weights of the folder --init_from into all parameters that are not on meta. Raises
    UserError. Nothing is read of the others: files are mapped, not loaded."""
    folder, found = pathlib.Path(config.init_from), {}
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for path in paths:
        try:
            found |= (read_safetensors(path) if path.suffix == ".safetensors" else
                      torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError,
                pickle.UnpicklingError) as error:
            raise UserError(f"--init_from: {path} is damaged or not of this form: "
                            f"{error}") from error
    if not paths:
        raise UserError(f"--init_from {folder} has neither *.safetensors nor pytorch_model*.bin")
    parameters = dict(model.named_parameters())
    for name, parts in llama_names(model.config).items():
        p = parameters[name]
        for part, rows in parts.items():
            shape, there = (rows, *p.shape[1:]), found.get(part)
            if not isinstance(there, torch.Tensor) or not there.is_floating_point():
                raise UserError(f"--init_from {folder}: {part} is missing, or is no such tensor")
            if there.shape != shape:
                raise UserError(f"--init_from {folder}: {part} is {tuple(there.shape)}, and not "
                                f"{shape}")
        if not p.is_meta:
            p.copy_(torch.cat([found[part] for part in parts]))


# -------------------------------------------------------------------------------------------------
# whether ranks still agree


def checksums(model):
    """{name: the sum of this rank's part of a parameter, its bits read as 32-bit integers}."""
    return {name: local(p.detach()).view(torch.int32).sum(dtype=torch.int64).item()
            for name, p in named_local(model)}


def compare_parameters(model, sums, step, config, worker):
    """Raise RunError on all ranks, naming parameter and ranks, where a bit has flipped. A
    collective, of one number a parameter.

    Ranks that have whole parameters compare them. Of a shard there is one copy only: it has to be
    what the update before has left, `sums` being the checksums that it had then.
    """
    worker.doing = f"step {step + 1}, the comparison of parameters"
    ours = checksums(model)
    if config.mode in STAGE:
        changed = [name for name in ours if sums and sums[name] != ours[name]]
        for rank, names in enumerate(worker.gather(changed)):
            if names:
                raise RunError(f"{worker.doing}: {names[0]} has changed on rank {rank} since its "
                               f"update: memory of that rank may be faulty")
        return
    views = worker.gather(ours)
    for name in ours:
        holders = {}  # checksum -> ranks
        for rank, view in enumerate(views):
            holders.setdefault(view[name], []).append(str(rank))
        if len(holders) > 1:
            groups = ", ".join("+".join(ranks) for ranks in holders.values())
            raise RunError(f"{worker.doing}: {name} is no longer the same on all ranks; those that "
                           f"agree: {groups}")


# -------------------------------------------------------------------------------------------------
# what a run reports


@torch.no_grad()
def evaluate(model, batches, config, worker):
    """Mean loss over eval_steps validation micro batches, dealt out to the ranks. A collective.

    Every rank runs as many forwards as the others, since a forward may hold collectives: what is
    too many repeats the last micro batch and does not count.
    """
    model.eval()
    n, W = min(config.eval_steps, batches.steps_per_epoch), worker.world_size
    losses = torch.zeros(n, dtype=torch.float64, device=worker.device)
    for index in range(worker.rank, math.ceil(n / W) * W, W):
        # A "step" of the validation batches is one micro batch, see `load_batches`.
        micro_batch = batches.micro_batch(min(index, n - 1), 0, batches.global_batch_size)
        with autocast(config, worker):
            _, loss = model(*worker.to_device(*micro_batch))
        if index < n:
            losses[index] = loss
    if config.mode == "torch-fsdp":  # or its root stays whole, and is saved without Adam's state
        model.reshard()
    model.train()
    return worker.reduce(losses).mean().item()


@torch.no_grad()
def param_sha256(model):
    """Hash of the whole fp32 parameters in the order of named_parameters(). A collective."""
    digest = hashlib.sha256()
    for p in full_parameters(model):
        digest.update((p.float().cpu() + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
    return digest.hexdigest()


def describe(model, found, progress, config, worker):
    """What metrics.jsonl says of a step beside its durations. A collective."""
    worker.doing = f"step {progress.step}, the norm of all parameters"
    weights = [local(p.detach()) for p in model.parameters()]
    param_norm = total_norm(weights, shard_group(model, config, worker))
    entry = dict(step=progress.step, loss=statistics.fmean(found.losses),
                 lr=lr_at(progress.step - 1, config), grad_norm=found.grad_norm,
                 param_norm=param_norm.item())
    return entry if found.finite else dict(entry, skipped=True)


def held_bytes(model, optimizer, n_params, config, worker):
    """{what: (bytes that this rank holds of it after a step, the ZeRO paper's formula)}; arXiv
    1910.02054, section 3.1 and figure 1, Adam's two moments being the optimizer's state."""
    parameters = [*model.parameters(), *getattr(model, "module", model).parameters()]
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    held = []
    for tensors in (parameters, gradients, states):
        storages = {t.data_ptr(): t for t in (local(t).untyped_storage() for t in tensors)}
        held.append(sum(storage.nbytes() for storage in storages.values()))

    stage = STAGE.get(config.mode, 0)
    share = n_params / (config.shard_size or worker.world_size)  # Psi / N_d
    is_cast = [name not in (None, "fp32") for name in (config.param_dtype, config.reduce_dtype)]
    expected = [  # stages 1 and 2 hold 16-bit parameters beside their fp32 shards
        4 * share if stage == 3 else 2 * n_params + 4 * share if is_cast[0] else 4 * n_params,
        4 * share if stage >= 2 or is_cast[1] else 4 * n_params,
        8 * share if stage else 8 * n_params]
    return dict(zip(("parameters", "gradients", "optimizer state"), zip(held, expected)))


def sample(model, tokenizer, progress, config, worker):
    """Text with which the plain model continues a line break, alike on all ranks. A collective."""
    if not math.isfinite(progress.entry["param_norm"] or math.nan):
        return "no sample: the weights are not finite, see where the loss went"
    generator = torch.Generator(worker.device).manual_seed(config.seed)
    idx = torch.tensor([tokenizer.encode("\n")], device=worker.device)
    model.eval()
    # Eager, since compiling for every length would take longer than the run.
    with autocast(config, worker), torch.compiler.set_stance("force_eager"):
        idx = model.generate(idx, config.sample_tokens, temperature=0.8, generator=generator)
    try:
        return "sample:" + tokenizer.decode(idx[0].tolist())
    except KeyError:  # the vocabulary is that of --init_from, and has more tokens
        return f"sample, as --tokenizer {tokenizer.name} lacks some tokens: {idx[0].tolist()}"


def finite(entry):
    """entry with None for inf and nan, for which JSON has no word."""
    missing = {k for k, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: None if k in missing else v for k, v in entry.items()}


def spread(own, worker):
    """{name: [least, mean, most] of all ranks' numbers}, and the slowest rank. A collective.

    In data parallelism all ranks take as long as the slowest: it is the one that computes longest,
    that is, waits least. A number that is None on some rank is left out.
    """
    numbers = torch.zeros(worker.world_size, len(own), dtype=torch.float64, device=worker.device)
    numbers[worker.rank] = torch.tensor([math.nan if value is None else value
                                         for value in own.values()], dtype=torch.float64)
    of = {name: column for name, column in zip(own, worker.reduce(numbers).T)
          if not column.isnan().any()}
    busy = of["step_ms"] - of.get("comm_exposed_ms", 0)
    return dict({name: [f(t).item() for f in (torch.min, torch.mean, torch.max)]
                 for name, t in of.items()}, slowest=busy.argmax().item())


def gpu_utilization(worker):
    """{"gpu_utilization": percent of the last period, None without pynvml}; on a CPU {}."""
    if worker.device.type == "cpu":
        return {}
    with contextlib.suppress(Exception):  # no pynvml, no permission, a part of a GPU: its own kinds
        return dict(gpu_utilization=torch.cuda.utilization(worker.device))
    return dict(gpu_utilization=None)


def start_trackers(config, step):
    """Functions that take the entry of a step, for the trackers asked for, which go on after a
    step. Raises UserError where one cannot be started."""
    def numbers(entry):
        of_ranks = {f"ranks/{name}_{which}": value for name, values in entry["ranks"].items()
                    if name != "slowest" for which, value in zip(("min", "mean", "max"), values)}
        return of_ranks | {name: value for name, value in entry.items()
                           if isinstance(value, int | float)}

    trackers, package = [], None
    try:
        if config.tensorboard:
            package = "tensorboard"
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(os.path.join(config.out_dir, "tensorboard"), flush_secs=5,
                                   purge_step=step + 1)
            atexit.register(writer.close)
            trackers.append(lambda entry: [writer.add_scalar(name, value, entry["step"])
                                           for name, value in numbers(entry).items()])
        if config.wandb:
            package = "wandb"
            import wandb

            run = wandb.init(project="nanozero", dir=config.out_dir, config=vars(config))
            trackers.append(lambda entry: run.log(numbers(entry), step=entry["step"]))
    except (Exception, SystemExit) as error:  # whatever a package of others does to this rank alone
        raise UserError(f"--{package} could not start: {type(error).__name__}: {error}") from error
    return trackers


class Log:
    """What rank 0 prints and writes: a line a step, metrics.jsonl, RESULT. Others are silent."""

    def __init__(self, config, worker, model):
        self.config, self.worker = config, worker
        self.n_params = sum(p.numel() for p in model.parameters())
        self.flops_per_token = model.flops_per_token()
        self.tokens_per_step = config.global_batch_size * model.config.block_size
        cuda = worker.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(worker.device) if cuda else "CPU"
        # The peaks are of 16-bit matrix units: fp32 has nothing to be compared with.
        self.peak_flops = None if config.dtype == "fp32" else peak_flops(self.device_name)
        self.step_s, self.exposed_ms, self.last, self.held, self.metrics = [], [], {}, {}, None
        self.trackers = []  # functions of a step's entry
        self.of_ranks = collections.deque(maxlen=1000)  # of `spread`, since it was printed last

    def say(self, text):
        if self.worker.rank == 0:
            print(text, flush=True)

    def warn(self, text):
        if self.worker.rank == 0:
            print(f"train.py: {text}", file=sys.stderr, flush=True)

    def start(self, batches):
        self.say(f"{self.n_params:,} parameters | {len(batches.tokens):,} training tokens, "
                 f"{self.tokens_per_step:,} a step, {batches.steps_per_epoch:,} steps an epoch | "
                 f"mode {self.config.mode}, world size {self.worker.world_size}, "
                 f"{self.device_name}, {self.config.dtype}")
        if self.config.offload and self.worker.device.type == "cpu":
            self.say("--offload changes nothing here: the device is the CPU already")

    def cut_back(self, step):
        """Rank 0: keep the lines of metrics.jsonl up to a step, and open it for those that follow.
        What cannot be read goes: a run that was killed leaves a torn line."""
        if self.worker.rank > 0:
            return
        path, kept = pathlib.Path(self.config.out_dir) / "metrics.jsonl", []
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                if json.loads(line)["step"] <= step:
                    kept.append(line)
        replace_file(path, lambda file: file.write(b"".join(kept)))
        self.metrics = open(path, "a", buffering=1)
        self.trackers = start_trackers(self.config, step)

    def step(self, entry, step_s, exposed_s):
        """Print and write a step: entry, and what follows from its durations in seconds."""
        self.step_s.append(step_s)
        exposed_ms = None if exposed_s is None else 1e3 * exposed_s
        self.exposed_ms += [] if exposed_s is None else [exposed_ms]
        own = dict(step_ms=1e3 * step_s, comm_exposed_ms=exposed_ms,
                   mem_bytes=self.worker.peak_mem_bytes(), **gpu_utilization(self.worker))
        self.last = dict(entry, tokens_per_sec=self.tokens_per_step / step_s, mfu=self.mfu(step_s),
                         **own, ranks=spread(own, self.worker))
        self.of_ranks.append(self.last["ranks"])
        self.say(self.line())
        if "val_loss" in entry and self.worker.world_size > 1:
            self.say(self.line_of_ranks())
        for track in list(self.trackers):
            try:
                track(finite(self.last))
            except Exception as error:  # as with metrics.jsonl: no reason to lose the run
                self.trackers.remove(track)
                self.warn(f"step {entry['step']}: a tracker failed, and gets no more: {error}")
        if self.metrics:
            try:
                self.metrics.write(json.dumps(finite(self.last)) + "\n")
            except OSError as error:  # a full disk: no reason to lose the run
                self.warn(f"step {entry['step']} is missing in {self.metrics.name}: {error}")

    def mfu(self, step_s):
        """Model FLOPs of a rank and second over the device's peak, None where that is not known."""
        flops = self.tokens_per_step * self.flops_per_token / self.worker.world_size / step_s
        return self.peak_flops and flops / self.peak_flops

    def line(self):
        e, total = self.last, self.config.max_steps
        left = round(statistics.fmean(self.step_s[-100:]) * (total - e["step"]))
        mfu = "-" if e["mfu"] is None else f"{100 * e['mfu']:.1f}%"
        val = f" | val loss {e['val_loss']:.4f}" if "val_loss" in e else ""
        val += " | skipped, not finite" if "skipped" in e else ""
        return (f"step {e['step']:5d}/{total} | loss {e['loss']:.4f} | lr {e['lr']:.2e} | "
                f"grad norm {e['grad_norm']:.3f} | param norm {e['param_norm']:.2f} | "
                f"{e['tokens_per_sec']:,.0f} tokens/s | mfu {mfu} | "
                f"{e['mem_bytes'] / 1e9:.2f} GB | {left // 60}m{left % 60:02d}s left{val}")

    def line_of_ranks(self):
        """Means over the steps since the last such line."""
        steps, parts = list(self.of_ranks), []
        self.of_ranks.clear()
        for what, name, scale, unit in (("step", "step_ms", 1, "ms"),
                                        ("waited", "comm_exposed_ms", 1, "ms"),
                                        ("memory", "mem_bytes", 1e-6, "MB"),
                                        ("GPU", "gpu_utilization", 1, "%")):
            found = [ranks[name] for ranks in steps if name in ranks]
            if found:
                low, mean, high = (scale * statistics.fmean(values) for values in zip(*found))
                parts.append(f"{what} {low:.0f}/{mean:.0f}/{high:.0f} {unit}")
        slowest = statistics.mode(ranks["slowest"] for ranks in steps)
        return f"ranks, min/mean/max: {', '.join(parts)}; slowest: rank {slowest}"

    def memory(self, held):
        """Print what `held_bytes` has found, and keep it for the result."""
        parts = [f"{name} {1e-6 * ours:.2f} (formula {1e-6 * formula:.2f})"
                 for name, (ours, formula) in held.items()]
        self.say(f"memory per rank, MB: {', '.join(parts)}; peak "
                 f"{1e-6 * self.worker.peak_mem_bytes():.0f}")
        ours, formula = (sum(sizes) / self.n_params for sizes in zip(*held.values()))
        self.held = dict(bytes_per_param=ours, bytes_per_param_formula=formula)

    def result(self, param_sha256):
        """Print the RESULT line. Its times are medians over steps: the first ones warm up. They are
        null where a finished run was resumed. A collective."""
        step_s = statistics.median(self.step_s) if self.step_s else math.nan
        exposed_ms = statistics.median(self.exposed_ms) if self.exposed_ms else None
        result = dict(mode=self.config.mode, world_size=self.worker.world_size,
                      steps=self.last["step"], train_loss=self.last["loss"],
                      val_loss=self.last.get("val_loss"), step_ms=1e3 * step_s,
                      tokens_per_sec=self.tokens_per_step / step_s,
                      peak_mem_bytes=self.worker.largest(self.worker.peak_mem_bytes()),
                      start_mem_bytes=self.worker.start_mem_bytes,
                      param_sha256=param_sha256, threads=self.config.threads,
                      comm_exposed_ms=exposed_ms, mfu=self.mfu(step_s), **self.held)
        self.say("RESULT " + json.dumps(finite(result)))


class Trace:
    """--profile N: what this rank does in N steps, as out_dir/trace_rank0.json and so on; to be
    opened in ui.perfetto.dev.

    Communication runs beside the thread that computes. For every exchange that ddp.py or zero.py
    names, a bar beside the thread goes from its start to the end of the wait for it: an upper
    bound, since nobody hears it end before. What is waited for shows in the thread itself.
    """

    def __init__(self, config, worker):
        self.path = pathlib.Path(config.out_dir) / f"trace_rank{worker.rank}.json"
        self.profiler = None
        if config.profile:
            # Two steps are left out, in which buffers are made; the second warms the profiler up.
            schedule = torch.profiler.schedule(wait=1, warmup=1, active=config.profile, repeat=1)
            self.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self.write)
            self.profiler.start()

    def over(self, steps):
        """The same steps, traced. However the loop over them is left, the trace is written."""
        try:
            for step in steps:
                yield step
                if self.profiler:
                    self.profiler.step()
        finally:
            if self.profiler:
                self.profiler.stop()

    def write(self, profiler):
        profiler.export_chrome_trace(str(self.path))
        trace = json.loads(self.path.read_text())
        started, bars = {}, []
        for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):
            kind, _, what = event["name"].partition(": ")
            if event["ph"] != "X" or kind not in ("start", "wait"):
                continue
            if kind == "start":
                started[what] = event
            elif what in started:
                first = started.pop(what)
                bar = dict(cat="communication", name=what, id=len(bars), pid=event["pid"],
                           tid=event["tid"])
                bars.append(dict(bar, ph="b", ts=first["ts"]))
                bars.append(dict(bar, ph="e", ts=event["ts"] + event["dur"]))
        trace["traceEvents"] += bars
        self.path.write_text(json.dumps(trace))


# -------------------------------------------------------------------------------------------------
# the run


class StopSignals:
    """Ctrl-C and SIGTERM end a run after its step, a later Ctrl-C at once. SIGTERM is how clusters
    announce that they take a machine back, and torchrun that another rank has died."""

    def __init__(self):
        self.name, self.arrived_s = None, None  # of the first one
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number, frame):
        if self.name is None:
            self.name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            self.arrived_s = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self.arrived_s + 2:
            raise KeyboardInterrupt  # not within 2 s: torchrun passes on what the terminal has sent


def out_of_memory(error):
    """Whether torch, on CUDA or CPU, or Python could not get memory. On CPU only the text tells."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error)


def lost_peer(error):
    """Whether a collective has failed, as it does where a rank has died or hangs."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("onnection", "imed out", "gloo", "NCCL"))


def ask_peers(worker, cause):
    """Leave the cause of this rank's failure in the store in which ranks met, "" if it lies with
    another -> (causes that others have left, {rank: text}; ranks that leave nothing in time)."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(datetime.timedelta(seconds=5))
        store.set(f"failed/{worker.rank}", cause)
        if cause:
            return {}, []
        time.sleep(1)
        left = [r for r in range(worker.world_size) if store.check([f"failed/{r}"])]
        causes = {r: store.get(f"failed/{r}").decode() for r in left}
        return causes, sorted(set(range(worker.world_size)) - set(left))
    except RuntimeError:  # it was in the process of rank 0, which is gone
        return {}, [0]


def kill_siblings(pids):
    """End processes that the same torchrun has started and that hang: they may not hear its
    SIGTERM, and it would wait 30 s for them before it ends, or starts anew."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended; or this is not Linux
            if f"\nPPid:\t{os.getppid()}\n" in pathlib.Path(f"/proc/{pid}/status").read_text():
                os.kill(pid, signal.SIGKILL)


def fail(error, worker):
    """Tell where this rank has failed and leave at once, which closes its connections: that is how
    its peers come to know. To leave the process group in order could mean to wait for them."""
    text = " ".join(str(error).split()).split(" This is typically caused")[0]
    text = re.sub(r"\[\S+:\d+\] ", "", text)  # without gloo's source lines
    line = f"rank {worker.rank} failed in {worker.doing}: {type(error).__name__}: {text}"
    if not lost_peer(error):
        traceback.print_exc()
    causes, silent = ask_peers(worker, "" if lost_peer(error) else line)
    line += "".join(f"; before, {cause}" for cause in causes.values() if cause)
    if silent:
        line += f"; no word from rank {', '.join(map(str, silent))}: dead or hanging"
    print(f"train.py: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if "Timed out waiting" in text:  # gloo's words, which no message of ours has
        kill_siblings([worker.pids[rank] for rank in silent])
    os._exit(1)


def fingerprint(tokens):
    """Their number, and a hash of about a million of them, evenly spread."""
    sampled = np.ascontiguousarray(tokens[::max(1, len(tokens) // 2**20)])
    return f"{len(tokens)} tokens with hash {hashlib.sha256(sampled).hexdigest()[:16]}"


def prepare(config, worker):
    """What each rank makes for itself, without collectives -> tokenizer, plain model, training and
    validation Batches, and facts that have to be the same after a resume."""
    accumulation_steps(config, worker.world_size)  # refuses before anything takes time
    os.makedirs(config.out_dir, exist_ok=True)
    tokenizer = load_tokenizer(config.tokenizer)
    plain = build_model(config, tokenizer)
    batches, val_batches = load_batches(config, tokenizer, plain.config)
    if worker.rank == 0:  # refused now, not after the last step
        check_exports(config)
    facts = dict(shapes={name: list(p.shape) for name, p in plain.named_parameters()})
    facts |= {f"--{name}": getattr(plain.config, name) for name in SIZES}
    facts |= {name: getattr(plain.config, name) for name in ("norm_eps", "rope_theta")}
    facts |= {f"--{name}": getattr(config, name) for name in ("seed", "global_batch_size")}
    facts |= dict(data=fingerprint(batches.tokens), steps_per_epoch=batches.steps_per_epoch)
    return tokenizer, plain, batches, val_batches, facts


def check_exports(config):
    """Raise UserError or OSError where an export could not be written."""
    if config.export and os.path.isdir(config.export):
        raise UserError(f"--export {config.export} is a folder: give a file")
    targets = [config.export]
    if config.export_hf:
        folder = pathlib.Path(config.export_hf)
        if folder.is_file():
            raise UserError(f"--export_hf {folder} is a file: give a folder")
        folder.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob("*.safetensors*"), *folder.glob("pytorch_model[-.]*")):
            if path.name != "pytorch_model.bin":
                raise UserError(f"--export_hf {folder} has {path.name}, which would be read in "
                                f"place of what is written: give another folder")
        targets.append(folder / "config.json")
    for target in filter(None, targets):
        replace_file(f"{target}.probe", lambda file: None)
        os.remove(f"{target}.probe")


def check_agreement(worker, ours):
    """Raise UserError on all ranks, naming the first difference, where they have other facts."""
    views = worker.gather(ours)
    for rank, view in enumerate(views):
        for name, value in views[0].items():
            if view[name] != value:
                raise UserError(f"ranks differ in {name}: {value} on rank 0, {view[name]} on rank "
                                f"{rank}; give all of them the same")


def check_out_dir(config, worker, n_params):
    """Raise UserError on all ranks where out_dir cannot take a checkpoint."""
    probe, needed = pathlib.Path(config.out_dir) / ".probe", 12 * n_params  # with Adam's state
    if config.comm_hook == "topk":
        needed += 4 * n_params * worker.world_size  # what each rank has not sent
    token = worker.gather(os.urandom(8))[0]

    def write():
        if worker.rank > 0:
            return
        probe.write_bytes(token)
        free = shutil.disk_usage(probe.parent).free
        if free < needed:
            raise UserError(f"--out_dir {probe.parent} has {1e-6 * free:,.0f} MB free, but a "
                            f"checkpoint takes {1e-6 * needed:,.0f}: choose another, or "
                            f"--save_interval 0")

    def read():
        if not probe.exists() or probe.read_bytes() != token:
            raise UserError(f"--out_dir {probe.parent} is not rank 0's folder of this name: "
                            f"checkpoints need a disk that all ranks share; or --save_interval 0")

    worker.together(write)
    worker.together(read)
    worker.together(lambda: probe.unlink() if worker.rank == 0 else None)


def due(step, interval, last=None):
    """Whether something happens after a step, counted from 1; with interval 0 never."""
    return interval > 0 and (step == last or step % interval == 0)


def train(config, worker):
    """The whole run -> exit status. Raises UserError."""
    # 1) plain model and data, the same on every rank
    tokenizer, plain, batches, val_batches, facts = worker.together(prepare, config, worker)
    check_agreement(worker, dict(data=facts["data"], torch=torch.__version__, numpy=np.__version__))
    log = Log(config, worker, plain)
    if config.save_interval:
        check_out_dir(config, worker, log.n_params)
    log.start(batches)

    # 2) the model as its mode wants it, then the optimizer over the parameters that this leaves
    model = wrap(plain, config, worker)
    optimizer, scaler = make_optimizer(model, config), make_scaler(config, worker)

    # 3) where an earlier run was left
    checkpoints = Checkpoints(config, worker, log, model, optimizer, scaler, facts)
    progress = checkpoints.resume()

    first, sums, saved, signals = progress.step, None, True, StopSignals()
    for step in Trace(config, worker).over(range(first, config.max_steps)):
        # find the gradients, and whether all is well
        start_s = time.perf_counter()
        found = find_gradients(model, optimizer, scaler, batches, step, config, worker,
                               stop=signals.name is not None)
        if due(step + 1, config.check_interval):
            compare_parameters(model, sums, step, config, worker)

        # update the weights
        update(optimizer, scaler, step, config, found)
        sums = checksums(model) if due(step + 2, config.check_interval) else None  # next step's
        progress.count(step + 1, found, config.max_skipped_steps)
        entry = describe(model, found, progress, config, worker)
        step_s = time.perf_counter() - start_s

        # evaluate, on all ranks; log, on rank 0
        if val_batches and due(step + 1, config.eval_interval, config.max_steps):
            worker.doing = f"step {step + 1}, the evaluation"
            entry["val_loss"] = evaluate(model, val_batches, config, worker)
            progress.note(entry["val_loss"])
        log.step(entry, step_s, found.exposed_s)
        progress.entry = log.last
        if step == first:
            log.memory(held_bytes(model, optimizer, log.n_params, config, worker))

        # write a checkpoint, on all ranks; stop where one of them was told to
        if config.save_interval and (due(step + 1, config.save_interval, config.max_steps)
                                     or progress.best_step == step + 1 or found.stop):
            saved = checkpoints.save(progress)
        if found.stop:
            log.warn(f"stopped by {signals.name or 'a signal to another rank'} after step "
                     f"{step + 1}")
            return 0 if saved else 1

    worker.doing = "the end of the run"
    if config.sample_tokens:
        log.say(sample(plain, tokenizer, progress, config, worker))
    if config.export or config.export_hf:
        worker.together(export, model, progress, config, plain.config, tokenizer, worker)
    log.result(param_sha256(model))
    return 0 if saved else 1


def main():
    status, worker = 0, None
    try:
        config = parse_args(sys.argv[1:])
        check(config)
        worker = start(config)
        check_agreement(worker, {f"--{name}": value for name, value in vars(config).items()})
        if config.micro_batch_size == "auto":
            config.micro_batch_size = largest_micro_batch(config, worker)
        status = train(config, worker)
    except (UserError, OSError) as error:  # an OSError names its file in nearly all cases
        status = refuse(error, getattr(error, "status", 2))
    except KeyboardInterrupt:
        status = 130  # 128 + SIGINT, as a shell has it
        if int(os.environ.get("RANK", 0)) == 0:
            print("train.py: stopped by Ctrl-C at once", file=sys.stderr, flush=True)
    except Exception as error:
        if out_of_memory(error):
            status = refuse(f"out of memory ({str(error).splitlines()[0]}): choose a smaller "
                            f"--model, --micro_batch_size or --block_size, or --mode zero3 on more "
                            f"ranks")
        elif worker is not None and worker.world_size > 1:
            fail(error, worker)
        else:
            raise
    finally:
        if dist.is_initialized():
            # FSDP2's modules hold the group in a cycle: without this its threads outlive the
            # interpreter now and then, and abort it.
            gc.collect()
            dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Train a GPT in one process or data-parallel over several; the mode is one flag.

    python train.py                                             # one process
    torchrun --nproc_per_node=2 train.py --mode naive           # two ranks on this machine
    torchrun --nproc_per_node=2 train.py --mode torch-ddp       # torch's own, as a reference
    torchrun --nproc_per_node=2 train.py --mode torch-fsdp
    python train.py --dataset shakespeare.txt --max_steps 2000  # a text file
    python train.py --dataset data/openwebtext --tokenizer gpt2 --model gpt2 --dtype bf16 --compile

Replaces a trainer framework by one loop that a person can follow: data, model, wrapper, optimizer,
then seven paragraphs a step. Modes differ in `wrap` and in one line after the backward.

How it differs from nanoGPT's loop: the global batch of a step is a function of (seed, epoch, step)
alone and is dealt out to ranks micro-step by micro-step, so that 1, 2 or 4 ranks read the same
samples in the same order and, in fp32 on CPU, end on the same bits. What is logged is the mean over
all ranks, and every decision is taken from numbers that all ranks share.

Output: a line per step, out_dir/metrics.jsonl, and as the last line of stdout `RESULT {json}`, whose
param_sha256 is equal for runs that ended on the same bits.

Cost: one small all-reduce a step for the losses, one norm over the parameters for the log.
"""

import argparse
import contextlib
import datetime
import hashlib
import inspect
import json
import math
import os
import pathlib
import re
import signal
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
import typing
from dataclasses import asdict, dataclass, fields

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddp import average_gradients, clip_gradients_, total_norm
from model import GPT, GPTConfig, PRESETS, peak_flops

MODES = ("single", "naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-fsdp")
NOT_YET = ("ddp", "zero1", "zero2", "zero3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
END_OF_TEXT = "<|endoftext|>"


# -------------------------------------------------------------------------------------------------
@dataclass
class Config:
    # run
    mode: str | None = None              # single naive torch-ddp torch-fsdp; default: single alone, ddp under torchrun
    max_steps: int = 400                 # optimizer steps
    seed: int = 1337                     # of the weights, the order of samples and the sample text
    out_dir: str = "out"                 # metrics and the cache of tokens go here
    threads: int = 1                     # CPU threads per rank; bits hold per thread count
    deterministic: bool = False          # only deterministic kernels, an error where there is none
    timeout_s: float = 120.0             # bound on any collective, in seconds
    # data
    dataset: str = "stdlib"              # Python's standard library, a text file, or a folder with train.bin and val.bin
    tokenizer: str = "bytes"             # bytes, or a tiktoken name such as gpt2 or o200k_base
    # model
    model: str = "tiny"                  # tiny gpt2 gpt2-medium gpt2-large gpt2-xl 1b 7b
    n_layer: int | None = None           # overrides the preset, as do the next four
    n_head: int | None = None            # query heads
    n_kv_head: int | None = None         # key and value heads, a divisor of n_head
    n_embd: int | None = None            # width
    block_size: int | None = None        # tokens per sequence
    activation_checkpointing: bool = False  # recompute each block in the backward: less memory, 1/3 more FLOPs
    compile: bool = False                # torch.compile each block; needs a C++ compiler on CPU
    # batch
    global_batch_size: int = 16          # sequences per optimizer step, over all ranks
    micro_batch_size: int = 4            # sequences per rank and backward
    # precision
    dtype: str = "fp32"                  # fp32, or autocast to bf16 or fp16 (fp16 with a gradient scaler)
    # optimizer: AdamW
    lr: float = 2e-3                     # peak learning rate
    min_lr: float | None = None          # where the cosine ends; default: lr / 10
    warmup_steps: int = 40               # linear warm-up from 0
    weight_decay: float = 0.1            # on tensors of two or more dimensions only
    beta1: float = 0.9                   # AdamW's mean of gradients
    beta2: float = 0.99                  # AdamW's mean of squared gradients
    grad_clip: float = 1.0               # largest norm of all gradients together, 0 for no limit
    # evaluation
    eval_interval: int = 100             # steps between evaluations; the last step is always evaluated
    eval_steps: int = 20                 # micro batches per evaluation, over all ranks; 0 for no evaluation
    sample_tokens: int = 256             # length of the sample text at the end, 0 for none
# -------------------------------------------------------------------------------------------------


AT_LEAST = dict(max_steps=1, threads=1, n_layer=1, n_head=1, n_kv_head=1, n_embd=2, block_size=1, seed=0,
                global_batch_size=1, micro_batch_size=1, lr=0, min_lr=0, warmup_steps=0, weight_decay=0,
                beta1=0, beta2=0, grad_clip=0, eval_interval=1, eval_steps=0, sample_tokens=0, timeout_s=1)


class UserError(Exception):
    """A mistake of the user's: one line on stderr, exit status 2, no traceback."""


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parse_args(argv):
    """Flags -> Config. Each field is a flag, its comment is the help text. Raises UserError."""
    comments = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Config), re.MULTILINE))
    parser = OneLineParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    for field in fields(Config):
        kind = next(iter(typing.get_args(field.type)), field.type)  # int | None -> int
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(type=kind)
        shown = "" if field.default is None or kind is bool else f" [{field.default}]"
        parser.add_argument(f"--{field.name}", default=field.default, metavar=None if kind is bool else kind.__name__,
                            help=(comments[field.name] + shown).replace("%", "%%"), **how)
    config = Config(**vars(parser.parse_args(argv)))
    config.mode = config.mode or ("ddp" if "RANK" in os.environ else "single")
    config.min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    return config


def check(config, world_size):
    """Raise UserError on a value or a combination that cannot be trained with."""
    for name, choices in (("mode", MODES), ("dtype", DTYPES), ("model", PRESETS)):
        if getattr(config, name) not in choices:
            raise UserError(f"--{name} {getattr(config, name)}: choose one of {' '.join(choices)}")
    if config.mode in NOT_YET:
        raise UserError(f"--mode {config.mode} is not there yet; there are single naive torch-ddp torch-fsdp")
    for name, least in AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name} {value}: must be a finite number, at least {least}")
    if max(config.beta1, config.beta2) >= 1:
        raise UserError(f"--beta1 {config.beta1} --beta2 {config.beta2}: both must be below 1")
    if config.min_lr > config.lr:
        raise UserError(f"--min_lr {config.min_lr} is above --lr {config.lr}")
    if config.mode == "single" and world_size > 1:
        raise UserError(f"--mode single is one process, but {world_size} were started: "
                        f"choose naive, torch-ddp or torch-fsdp")
    if config.global_batch_size % (config.micro_batch_size * world_size):
        raise UserError(f"--global_batch_size {config.global_batch_size} is not a whole number of micro steps: "
                        f"{config.micro_batch_size} sequences x {world_size} ranks make "
                        f"{config.micro_batch_size * world_size} a micro step")


def refuse(message):
    """Print message, return exit status 2. All ranks come here; rank 0 speaks first."""
    if int(os.environ.get("RANK", 0)):
        # torchrun answers rank 0's exit by SIGTERM to the rest, who then end alike and in silence.
        # A rank that is alone in its trouble (a file missing on its host) outlives the wait and speaks.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        time.sleep(3)
    print(f"train.py: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return 2


# -------------------------------------------------------------------------------------------------
# data


def load_tokenizer(name):
    """A tiktoken Encoding. "bytes" is 256 single bytes and an end-of-text token: no download."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"\S+\s*|\s+", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"--tokenizer {name}: choose bytes or one of {' '.join(tiktoken.list_encoding_names())}")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a damaged file is a ValueError
        raise UserError(f"--tokenizer {name} could not be loaded ({type(error).__name__}): it is downloaded once, "
                        f"so connect, or set TIKTOKEN_CACHE_DIR to a folder that has it, or use bytes") from error


def stdlib_text():
    """The standard library's source as one string, end-of-text between files.

    Left out: tests, tables of characters, and what distributions package apart or generate when
    they build. Files are ordered by a hash of their path, so that the last tenth, which validates,
    is text of the same kind as the rest.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    left_out = {"ensurepip", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3", "distutils", "encodings", "pydoc_data"}
    paths = []
    for name in sys.stdlib_module_names - left_out:
        if not name.startswith("_sysconfigdata"):
            paths += [p for p in (root / name).rglob("*.py") if not {"test", "tests"} & set(p.relative_to(root).parts)]
            paths += [p for p in [root / f"{name}.py"] if p.is_file()]
    if not paths:
        raise UserError(f"--dataset stdlib: no Python source under {root}; give a text file instead")
    paths.sort(key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    return END_OF_TEXT.join(p.read_text("utf-8") for p in paths)


def read_text(path):
    """The text of a file. Raises UserError where it is not UTF-8 or empty."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--dataset {path} is not UTF-8 text: bad byte at {error.start}") from error
    if not text:
        raise UserError(f"--dataset {path} is empty")
    return text


@contextlib.contextmanager
def file_lock(path):
    """Held by one process of this machine at a time; the system releases it if that process dies."""
    import fcntl  # not on Windows

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tokenize(text, tokenizer, out_dir, name):
    """text -> memory-mapped token ids, through a cache file in out_dir named by their content.

    The first rank of a machine to get the lock writes the file and the rest find it complete: no
    collective, hence no timeout, however long it takes.
    """
    digest = hashlib.sha256(f"{tokenizer.name} {text}".encode()).hexdigest()[:16]
    path = pathlib.Path(out_dir) / f"tokens-{tokenizer.name}-{digest}.bin"
    dtype = np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32
    with file_lock(pathlib.Path(out_dir) / ".tokens.lock"):
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=out_dir, delete=False) as file:
                lines = text.splitlines(keepends=True)
                for start in range(0, len(lines), 400_000):  # about 16 MB, which bounds the list of ids
                    print(f"tokenizing {name} with {tokenizer.name}: line {start:,} of {len(lines):,}", flush=True)
                    ids = tokenizer.encode("".join(lines[start:start + 400_000]), allowed_special={END_OF_TEXT},
                                           disallowed_special=())
                    np.array(ids, dtype=dtype).tofile(file)
            os.replace(file.name, path)
    return np.memmap(path, dtype=dtype, mode="r")


def read_bin(path, tokenizer):
    """nanoGPT's format: token ids as uint16, little-endian, nothing else. Raises UserError."""
    if not path.is_file():
        raise UserError(f"--dataset {path.parent}: no {path.name} in this folder")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise UserError(f"--dataset {path} has {size} bytes, not a positive number of 2-byte tokens")
    tokens = np.memmap(path, dtype="<u2", mode="r")
    largest = int(tokens.max())  # reads the file once, at disk speed; a bad id in mid-run costs more
    if largest >= tokenizer.n_vocab:
        raise UserError(f"--dataset {path} holds token {largest}, but --tokenizer {tokenizer.name} "
                        f"has {tokenizer.n_vocab} tokens")
    return tokens


def load_data(config, tokenizer):
    """(train, validation) token ids. Of one text, the last tenth validates. Raises UserError."""
    path = pathlib.Path(config.dataset)
    if config.dataset != "stdlib" and not path.exists():
        raise UserError(f"--dataset {path}: no such file or folder")
    try:
        os.makedirs(config.out_dir, exist_ok=True)
        if path.is_dir() and config.dataset != "stdlib":
            return read_bin(path / "train.bin", tokenizer), read_bin(path / "val.bin", tokenizer)
        text = stdlib_text() if config.dataset == "stdlib" else read_text(path)
        tokens = tokenize(text, tokenizer, config.out_dir, config.dataset)
    except OSError as error:
        raise UserError(error) from error
    cut = int(len(tokens) * 0.9)
    return tokens[:cut], tokens[cut:]


class Batches:
    """The samples of every step, as a function of (seed, epoch, step) alone.

    A sample is one block of block_size tokens and the token after it. Blocks do not overlap. An
    epoch is a permutation of all blocks, cut into whole global batches; what is left over waits for
    the next permutation. Hence:
    - no sample is seen twice in an epoch, by whichever ranks;
    - all ranks make the same number of steps;
    - the order does not depend on the world size: W ranks and one process see the same micro
      batches in the same order;
    - there is no state to save: resuming at step s is asking for step s.
    """

    def __init__(self, tokens, block_size, global_batch_size, seed):
        self.tokens, self.block_size, self.global_batch_size, self.seed = tokens, block_size, global_batch_size, seed
        self.n_blocks = max(0, len(tokens) - 1) // block_size
        self.steps_per_epoch = self.n_blocks // global_batch_size
        self.epoch, self.order = None, None  # the last permutation used

    def samples(self, step):
        """Block numbers of the global batch of a step, counted from 0: (global_batch_size,)."""
        epoch, step = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.n_blocks)
        return self.order[step * self.global_batch_size:(step + 1) * self.global_batch_size]

    def micro_batch(self, step, index, micro_batch_size):
        """(x, y) of micro batch `index` of a step, each (micro_batch_size, T) int64.

        Rank r of W takes index a W + r in micro-step a.
        """
        chosen = self.samples(step)[index * micro_batch_size:(index + 1) * micro_batch_size]
        positions = chosen[:, None] * self.block_size + np.arange(self.block_size + 1)  # (m, T + 1)
        window = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return window[:, :-1], window[:, 1:]


def load_batches(config, tokenizer, block_size):
    """(training, validation) Batches, validation None without evaluation. Raises UserError."""
    train_tokens, val_tokens = load_data(config, tokenizer)
    needed = [("training", train_tokens)] + [("validation", val_tokens)] * (config.eval_steps > 0)
    for part, tokens in needed:
        if len(tokens) <= block_size:
            raise UserError(f"--dataset {config.dataset}: its {part} part has {len(tokens)} tokens, fewer than one block "
                            f"of {block_size} and the token after it; give more text or a smaller --block_size")
    batches = Batches(train_tokens, block_size, config.global_batch_size, config.seed)
    if batches.steps_per_epoch == 0:
        raise UserError(f"--dataset {config.dataset}: its training part has {batches.n_blocks} blocks of {block_size}, "
                        f"fewer than --global_batch_size {config.global_batch_size}")
    if not config.eval_steps:
        return batches, None
    n_blocks = (len(val_tokens) - 1) // block_size
    # Seed 0: all runs on this text are validated on the same blocks. A "step" is one micro batch.
    return batches, Batches(val_tokens, block_size, min(config.micro_batch_size, n_blocks), seed=0)


# -------------------------------------------------------------------------------------------------
# processes


@dataclass
class Place:
    """Where this process stands: its rank of world_size ranks, and its device."""
    rank: int
    world_size: int
    device: torch.device

    def to_device(self, *tensors):
        """Tensors on the device; on CUDA from pinned memory, without waiting for the copy."""
        if self.device.type == "cpu":
            return tensors
        return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in tensors)

    def synchronize(self):
        """Wait for the device's queue, for timing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sum_over_ranks(self, tensor):
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_over_ranks(self, number):
        tensor = torch.tensor(number, dtype=torch.int64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()


def start(config):
    """Join the process group (none in mode single) and choose the device. Raises UserError."""
    torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS demands it
        torch.use_deterministic_algorithms(True)
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if config.mode != "single":
        # NCCL refuses two ranks on one GPU.
        backend = "nccl" if 0 < int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= gpus else "gloo"
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        timeout = datetime.timedelta(seconds=config.timeout_s)
        dist.init_process_group(backend, timeout=timeout, **alone)
        return Place(dist.get_rank(), dist.get_world_size(), device)
    return Place(0, int(os.environ.get("WORLD_SIZE", 1)), device)


def peak_mem_bytes(device):
    """Most memory this process has held at once: CUDA's allocator, or the resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # not ru_maxrss, which a process inherits from the one that started it
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text()).group(1))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes


# -------------------------------------------------------------------------------------------------
# model and step


def build_model(config, tokenizer):
    """The plain GPT: a preset, each size overridden where its flag is given. Raises UserError."""
    names = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    try:
        return GPT(GPTConfig(vocab_size=tokenizer.n_vocab, seed=config.seed,
                             activation_checkpointing=config.activation_checkpointing,
                             **{**PRESETS[config.model], **given}))
    except ValueError as error:
        raise UserError(error) from error


def wrap(model, config, place):
    """The module whose forward the loop calls: the model itself, or around it what its mode needs."""
    if config.compile:
        model.compile_blocks()
    if config.mode == "torch-ddp":
        return DistributedDataParallel(model, device_ids=[place.device] if place.device.type == "cuda" else None)
    if config.mode == "torch-fsdp":
        mesh = init_device_mesh(place.device.type, (place.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def local(tensor):
    """This rank's part of a tensor that FSDP2 shards; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_over(config):
    """The group over which parameters and gradients are cut up; None where every rank has them whole."""
    return dist.group.WORLD if config.mode == "torch-fsdp" else None


def set_gradient_sync(model, on):
    """Whether the next backward exchanges gradients, for the wrappers that do so by themselves."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on  # what no_sync() sets, without a second code path
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)


def lr_at(step, config):
    """Learning rate of a step counted from 0: linear warm-up, then a cosine down to min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(model, config):
    """AdamW that decays matrices only: norm weights have no scale to keep small."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in parameters if p.dim() >= 2], weight_decay=config.weight_decay),
              dict(params=[p for p in parameters if p.dim() < 2], weight_decay=0.0)]
    # Not fused: that kernel rounds the tail of a tensor differently, so slices would not match wholes.
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=False)


def make_scaler(config, place):
    """Loss scaling for fp16. The sharded one makes all ranks agree on inf before any of them steps."""
    if config.mode == "single":
        return torch.amp.GradScaler(place.device.type, enabled=config.dtype == "fp16")
    return ShardedGradScaler(place.device.type, enabled=config.dtype == "fp16")


def autocast(config, place):
    return torch.autocast(place.device.type, DTYPES[config.dtype], enabled=config.dtype != "fp32")


def forward_backward(model, batches, step, config, place, scaler):
    """All micro-steps of one step; gradients end in `.grad`, not yet averaged in modes single and naive.

    Returns the losses of all micro batches of all ranks in the order of the data, (A W,) float64:
    each rank fills its own entries and their sum is taken, so that no rounding depends on W.
    """
    accumulation = config.global_batch_size // (config.micro_batch_size * place.world_size)
    losses = torch.zeros(accumulation * place.world_size, dtype=torch.float64, device=place.device)
    for micro_step in range(accumulation):
        index = micro_step * place.world_size + place.rank
        x, y = place.to_device(*batches.micro_batch(step, index, config.micro_batch_size))
        set_gradient_sync(model, micro_step == accumulation - 1)
        with autocast(config, place):
            _, loss = model(x, y)
        losses[index] = loss.detach()
        scaler.scale(loss / accumulation).backward()
    return losses


def finish_gradients(model, config, place):
    """Average gradients over ranks, where no wrapper did so during the backward.

    Returns the seconds that the training thread waited for communication; None in the torch modes,
    which wait inside the backward, where it cannot be seen from here.
    """
    if config.mode == "single":
        return 0.0
    if config.mode != "naive":
        return None
    place.synchronize()
    start_s = time.perf_counter()
    average_gradients(model)
    place.synchronize()
    return time.perf_counter() - start_s


@torch.no_grad()
def evaluate(model, batches, config, place):
    """Mean validation loss over eval_steps micro batches, dealt out to all ranks. A collective.

    Every rank runs as many forwards as the others, since a forward may hold collectives; what is
    too many repeats the last micro batch and does not count.
    """
    model.eval()
    n = min(config.eval_steps, batches.steps_per_epoch)
    losses = torch.zeros(n, dtype=torch.float64, device=place.device)
    for index in range(place.rank, math.ceil(n / place.world_size) * place.world_size, place.world_size):
        x, y = place.to_device(*batches.micro_batch(min(index, n - 1), 0, batches.global_batch_size))
        with autocast(config, place):
            _, loss = model(x, y)
        if index < n:
            losses[index] = loss
    model.train()
    return place.sum_over_ranks(losses).mean().item()


@torch.no_grad()
def param_sha256(model):
    """Hash of the whole fp32 parameters in the order of named_parameters(). A collective if sharded."""
    digest = hashlib.sha256()
    for p in model.parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        digest.update((whole.float().cpu() + 0.0).numpy().tobytes())  # + 0.0 turns -0 into 0
    return digest.hexdigest()


def sample(model, tokenizer, config, place):
    """Text that the model continues from a line break, the same on all ranks. A collective if sharded."""
    generator = torch.Generator(place.device).manual_seed(config.seed)
    idx = torch.tensor([tokenizer.encode("\n")], device=place.device)
    model.eval()
    with autocast(config, place), torch.compiler.set_stance("force_eager"):  # T grows: do not compile each
        idx = model.generate(idx, config.sample_tokens, temperature=0.8, top_k=50, generator=generator)
    return tokenizer.decode(idx[0].tolist())


# -------------------------------------------------------------------------------------------------
# the run


def ctrl_c():
    """An Event that the first Ctrl-C sets; the second one interrupts at once, as ever."""
    pressed = threading.Event()

    def handler(*_):
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handler)
    return pressed


class Log:
    """What rank 0 prints and writes: a line per step, metrics.jsonl, RESULT. Silent on other ranks."""

    def __init__(self, config, place, model):
        self.config, self.place = config, place
        self.flops_per_token = model.flops_per_token()
        self.tokens_per_step = config.global_batch_size * model.config.block_size
        self.gpu = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else None
        # The table holds peaks of 16-bit matrix units: nothing to compare fp32 with.
        self.peak_flops = peak_flops(self.gpu) if self.gpu and config.dtype != "fp32" else None
        self.step_s, self.last = [], {}
        path = pathlib.Path(config.out_dir) / "metrics.jsonl"
        self.metrics = open(path, "w", buffering=1) if place.rank == 0 else None

    def say(self, text):
        if self.place.rank == 0:
            print(text, flush=True)

    def step(self, entry, step_s, exposed_s):
        """Print and write one step: entry plus what follows from its duration, in seconds."""
        self.step_s.append(step_s)
        rate = self.tokens_per_step / step_s
        mfu = self.peak_flops and rate * self.flops_per_token / (self.peak_flops * self.place.world_size)
        exposed_ms = None if exposed_s is None else 1e3 * exposed_s
        self.last = dict(entry, tokens_per_sec=rate, step_ms=1e3 * step_s, comm_exposed_ms=exposed_ms,
                         mfu=mfu, mem_bytes=peak_mem_bytes(self.place.device))
        self.say(self.line())
        if self.metrics:
            self.metrics.write(json.dumps(finite(self.last)) + "\n")

    def line(self):
        e, total = self.last, self.config.max_steps
        left = round(statistics.median(self.step_s) * (total - e["step"]))
        mfu = "-" if e["mfu"] is None else f"{100 * e['mfu']:.1f}%"
        val = f" | val loss {e['val_loss']:.4f}" if "val_loss" in e else ""
        return (f"step {e['step']:5d}/{total} | loss {e['loss']:.4f} | lr {e['lr']:.2e} | "
                f"grad norm {e['grad_norm']:.3f} | param norm {e['param_norm']:.2f} | "
                f"{e['tokens_per_sec']:,.0f} tokens/s | mfu {mfu} | {e['mem_bytes'] / 1e9:.2f} GB | "
                f"{left // 60}m{left % 60:02d}s left{val}")

    def result(self, param_sha256, peak_mem):
        """The last line of stdout. Step time is the median over steps, since the first ones warm up."""
        step_s = statistics.median(self.step_s)
        result = dict(mode=self.config.mode, world_size=self.place.world_size, steps=self.last["step"],
                      train_loss=self.last["loss"], val_loss=self.last.get("val_loss"),
                      tokens_per_sec=self.tokens_per_step / step_s, step_ms=1e3 * step_s,
                      peak_mem_bytes=peak_mem, param_sha256=param_sha256, threads=self.config.threads)
        self.say("RESULT " + json.dumps(finite(result)))


def finite(entry):
    """JSON has no word for inf and nan: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}


def train_step(model, optimizer, scaler, batches, step, config, place):
    """One optimizer step. Returns (losses as `forward_backward` does, gradient norm, exposed seconds)."""
    # set the learning rate of this step
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, config)

    # forward and backward, micro-step by micro-step; then gradients are averaged over ranks
    losses = forward_backward(model, batches, step, config, place, scaler)
    exposed_s = finish_gradients(model, config, place)

    # clip, on all ranks by the same factor
    scaler.unscale_(optimizer)
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    grad_norm = clip_gradients_(gradients, config.grad_clip or math.inf, sharded_over(config))

    # update the weights; in fp16 all ranks agreed, in unscale_, whether to skip this
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return losses, grad_norm, exposed_s


def train(config, place):
    """The whole run. Returns the step that Ctrl-C ended it at, else None. Raises UserError."""
    # 1) plain model and data, the same on every rank
    tokenizer = load_tokenizer(config.tokenizer)
    plain = build_model(config, tokenizer)
    batches, val_batches = load_batches(config, tokenizer, plain.config.block_size)
    log, pressed = Log(config, place, plain), ctrl_c()
    log.say(f"{sum(p.numel() for p in plain.parameters()):,} parameters | {len(batches.tokens):,} "
            f"training tokens, {batches.steps_per_epoch:,} steps an epoch | {log.tokens_per_step:,} "
            f"tokens a step | mode {config.mode}, world size {place.world_size}, {log.gpu or 'CPU'}, "
            f"{config.dtype}")

    # 2) the model as its mode wants it, then the optimizer over the parameters that this leaves
    model = wrap(plain.to(place.device), config, place)
    optimizer, scaler = make_optimizer(model, config), make_scaler(config, place)

    for step in range(config.max_steps):
        start_s = time.perf_counter()
        losses, grad_norm, exposed_s = train_step(model, optimizer, scaler, batches, step, config, place)

        # reduce the losses, and with them the wish to stop: all ranks see it at the same step
        shared = torch.cat((losses, losses.new_tensor([pressed.is_set()])))
        *losses, stop = place.sum_over_ranks(shared).tolist()
        weights = [local(p.detach()) for p in model.parameters()]
        param_norm = total_norm(weights, sharded_over(config)).item()
        step_s = time.perf_counter() - start_s

        # evaluate, on all ranks; log, on rank 0
        entry = dict(step=step + 1, loss=statistics.fmean(losses), lr=lr_at(step, config),
                     grad_norm=grad_norm.item(), param_norm=param_norm)
        due = (step + 1) % config.eval_interval == 0 or step + 1 == config.max_steps
        if val_batches and due:
            entry["val_loss"] = evaluate(model, val_batches, config, place)
        log.step(entry, step_s, exposed_s)

        # terminate
        if stop:
            return step + 1

    if config.sample_tokens:
        log.say(sample(plain, tokenizer, config, place))
    log.result(param_sha256(plain), place.max_over_ranks(peak_mem_bytes(place.device)))


def main():
    status = 0
    try:
        config = parse_args(sys.argv[1:])
        check(config, int(os.environ.get("WORLD_SIZE", 1)))
        place = start(config)
        stopped_at = train(config, place)
        if stopped_at is not None:
            status = 130  # 128 + SIGINT, as a shell reports it
            if place.rank == 0:
                print(f"train.py: stopped by Ctrl-C after step {stopped_at}", file=sys.stderr)
    except UserError as error:
        status = refuse(error)
    except KeyboardInterrupt:
        status = 130
        print("train.py: stopped by Ctrl-C", file=sys.stderr)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()

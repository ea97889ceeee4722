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

Replaces a trainer framework by one loop, `main`, which reads from top to bottom. The functions
above it come in the order in which a run meets them. The modes differ in `wrap` and in
`set_gradient_sync`; `naive` averages in `train_step`. One process is a process group of one rank,
so no line asks whether there is a group.

How it differs from nanoGPT's loop: the global batch of a step is a function of (seed, epoch, step)
alone, and ranks take its micro batches in turn: any number of ranks reads the same samples in the
same order. Nothing is divided before the gradients of all micro batches are added up, in that
order. So in fp32 on CPU every number of ranks produces the same bits, also where it changes in the
middle of a run. What is logged is the mean over all ranks, and every decision is taken from numbers
that all ranks share.

Output: a line every few steps, out_dir/metrics.jsonl, checkpoints that any mode at any world size
can resume, a text that the model wrote, and as the last line of stdout `RESULT {json}`, whose
param_sha256 is equal for runs that produced the same bits.

Cost: two small all-reduces a step, for losses and for timings, and the norm of the parameters.
"""

import argparse
import atexit
import dataclasses
import datetime
import functools
import gc
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import time

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ddp import (DDP, HierarchicalState, TopKState, average_gradients, clip_gradients_,
                 hierarchical_hook, top_k_hook, total_norm)
from model import (GPT, GPTConfig, PRESETS, peak_flops, read_llama_config, read_llama_weights,
                   write_llama)
from zero import Zero1, Zero2, Zero3


# -------------------------------------------------------------------------------------------------
# options
@dataclasses.dataclass
class Config:
    # run
    mode: str | None = None  # unless given ddp under torchrun, else single
    max_steps: int = 800  # optimizer steps
    seed: int = 1337  # of the weights, the order of samples and the sample text
    out_dir: str = "out"  # for checkpoints, metrics.jsonl and the cache of tokens
    device: str | None = None  # cpu, or the accelerator that torch finds, which it is unless given
    threads: int = 1  # CPU threads per rank, more for --offload; bits hold per thread count
    timeout_s: float = 120.0  # bound on any collective, in seconds; not on the wait for an export
    check_interval: int = 100  # steps between comparisons of parameters over ranks, 0 for none
    # checkpoints
    save_interval: int = 100  # steps between checkpoints; the last step has one too; 0 for none
    keep_last: int = 2  # checkpoints kept beside the best one
    resume: str | None = None  # auto: from the newest checkpoint in out_dir; or a checkpoint's path
    export_hf: str | None = None  # folder for the model as transformers' LlamaForCausalLM
    # data
    dataset: str = "stdlib"  # Python's own library, a text file, or a folder of train.bin, val.bin
    tokenizer: str = "bytes"  # bytes, or a tiktoken name such as gpt2 or o200k_base
    # model
    init_from: str | None = None  # folder of a LlamaForCausalLM: its sizes and weights, no preset
    model: str = "tiny"  # preset
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
    memory_limit_gb: float | None = None  # for auto: what a rank may hold; else the accelerator's
    # precision
    dtype: str = "fp32"  # or autocast to bf16 or fp16, fp16 with a gradient scaler
    param_dtype: str | None = None  # ZeRO: of gathered parameters and blocks' inputs; else fp32
    reduce_dtype: str | None = None  # ZeRO: of gradients on their way; else fp32
    # data parallelism
    bucket_cap_mb: float = 25.0  # gradients reduced at once by ddp and torch-ddp, in MB
    find_unused_parameters: bool = False  # ddp, torch-ddp: parameters may stay without a gradient
    comm_hook: str | None = None  # ddp: compresses what is sent; else a plain all-reduce
    topk_ratio: float = 0.01  # topk: the part of the elements that is sent
    node_size: int | None = None  # hierarchical: ranks per node; as torchrun has it unless given
    shard_size: int | None = None  # ZeRO: ranks that share one copy of the state; else all
    offload: bool = False  # ZeRO: shards, their gradients and the optimizer on the CPU
    # optimizer
    optimizer: str = "adamw"  # or muon: Muon for the matrices of blocks, AdamW for the rest
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
    log_interval: int = 10  # steps between printed lines; metrics.jsonl has every step
    profile: int = 0  # steps to trace, from the third on, for ui.perfetto.dev; 0 for none
    tensorboard: bool = False  # write to out_dir/tensorboard; needs the package tensorboard
    wandb: bool = False  # log to Weights & Biases; needs the package wandb


MAX_SKIPPED_STEPS = 20  # in a row, for a loss or gradients that are not finite; then a run stops
ZERO = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
FSDP = ("torch-fsdp", "torch-fsdp-kept")  # kept: parameters stay whole after the forward
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size")
CHOICES = {"mode": ("single", "naive", "ddp", *ZERO, "torch-ddp", "torch-zero1", *FSDP),
           "optimizer": ("adamw", "muon"),
           "model": PRESETS, "dtype": DTYPES, "param_dtype": DTYPES, "reduce_dtype": DTYPES,
           "comm_hook": ("bf16", "powersgd", "topk", "hierarchical")}
# Numbers that must be above 0, where others may be 0, and the largest values that make sense.
POSITIVE = {"max_steps", "threads", "timeout_s", "keep_last", "global_batch_size", "node_size",
            "micro_batch_size", "bucket_cap_mb", "topk_ratio", "shard_size", *SIZES}
AT_MOST = {"threads": 1024, "timeout_s": 1e6, "bucket_cap_mb": 1e6, "topk_ratio": 1,
           "beta1": 0.99999, "beta2": 0.99999, "max_steps": 99_999_999}
# Flags that do nothing by themselves, each with the flag that it needs and the values of that.
BELONGS = {"param_dtype": ("mode", ZERO), "reduce_dtype": ("mode", ZERO),
           "shard_size": ("mode", ZERO), "offload": ("mode", ZERO), "comm_hook": ("mode", ["ddp"]),
           "topk_ratio": ("comm_hook", ["topk"]), "node_size": ("comm_hook", ["hierarchical"]),
           "memory_limit_gb": ("micro_batch_size", ["auto"])}


def int_or_auto(text):
    return text if text == "auto" else int(text)


def parse_args(argv):
    """Flags -> Config. A field of Config is a flag, and its comment is the help text, so that a new
    option is one line. Without a process group yet, a mistake ends the process here.
    """
    source = pathlib.Path(__file__).read_text("utf-8")
    comments = dict(re.findall(r"^    (\w+): .*?# (.*)$", source, re.MULTILINE))
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.error = lambda message: refuse(f"{message} (--help lists the flags)")
    for option in dataclasses.fields(Config):
        kinds = getattr(option.type, "__args__", (option.type,))  # int | None -> (int, NoneType)
        how = dict(default=option.default, help=f"{comments[option.name]} [{option.default}]")
        how |= (dict(action=argparse.BooleanOptionalAction) if bool in kinds else
                dict(type=int_or_auto if kinds == (int, str) else kinds[0],
                     choices=CHOICES.get(option.name)))
        parser.add_argument(f"--{option.name}", **how)
    config = Config(**vars(parser.parse_args(argv)))
    for name, value in vars(config).items():
        least, most = 1e-9 if name in POSITIVE else 0, AT_MOST.get(name, 1e18)
        if isinstance(value, int | float) and not least <= value <= most:  # nan is in no range
            parser.error(f"--{name} {value} is out of range")
    config.mode = config.mode or ("ddp" if "RANK" in os.environ else "single")
    config.min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    return config


def check(config):
    """Raise ValueError on flags that contradict each other, or that this machine cannot serve. What
    a single flag can be is in the tables above; sizes of the model are GPTConfig's to refuse."""
    W = dist.get_world_size()
    if config.mode == "single" and W > 1:
        raise ValueError(f"--mode single is one process, but torchrun started {W}")
    for name, (other, values) in BELONGS.items():
        if getattr(config, name) != getattr(Config, name) and getattr(config, other) not in values:
            raise ValueError(f"--{name} needs --{other} {' or '.join(values)}")
    for name in ("shard_size", "node_size"):
        if W % (getattr(config, name) or 1):
            raise ValueError(f"--{name} {getattr(config, name)} does not divide {W} ranks")
    if config.optimizer == "muon" and config.mode in ("torch-zero1", *FSDP):
        raise ValueError(f"--optimizer muon: --mode {config.mode} cuts matrices: choose zero3")
    if config.dtype == "fp16" and config.comm_hook in ("powersgd", "topk"):
        raise ValueError(f"--dtype fp16 and --comm_hook {config.comm_hook}: choose bf16")
    if config.init_from and any(getattr(config, name) for name in SIZES[:-1]):
        raise ValueError("--init_from has sizes of its own: only --block_size can be another")
    accumulation_steps(config)
    for flag, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"),
                          ("init_from", "safetensors"), ("export_hf", "safetensors")):
        if getattr(config, flag) and not importlib.util.find_spec(package):
            raise ValueError(f"--{flag} needs a package: pip install {package}")


def accumulation_steps(config):
    """Micro-steps that a step takes on every rank. Raises ValueError unless whole."""
    m = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    B, W = config.global_batch_size, dist.get_world_size()
    if B % (m * W):
        raise ValueError(f"--global_batch_size {B} in micro batches of {m} does not divide among "
                         f"{W} ranks, but among {[n for n in range(1, B + 1) if B % (m * n) == 0]}")
    return B // (m * W)


# -------------------------------------------------------------------------------------------------
# ranks
#
# Ranks that disagree hang: one leaves, the others wait for it in their next collective. So what can
# fail on one rank by itself runs in `together`, after which all ranks continue or all stop. Three
# kinds of failures end a process, see `run`:
# - Stop, on all ranks alike: a user's mistake, or a run that cannot sensibly continue.
#   One line, exit status 2 before the first step, then 1.
# - A collective that fails, since another rank has died or hangs: one line with the step. All ranks
#   exit with status 1, and torchrun starts them again if it was told so.
# - Anything else is a bug: a traceback and that line. Its exit makes the other ranks' collectives
#   fail.


class Stop(Exception):
    """All ranks stop here, for a reason that is said in one line."""


def meet(store, rank, world_size, timeout):
    """store, torchrun's, under a prefix that only the ranks of this start know.

    torchrun keeps its store over restarts (torch 2.13), and in it the addresses of dead ranks, for
    which new ranks would wait. It counts restarts, but per node, so the count is no prefix that
    ranks agree on. So rank 0 draws a prefix, and every other rank asks for it under a number that
    it has drawn itself: an answer to a dead rank is never taken for one's own. Raises Stop if a
    rank does not come within timeout, a timedelta.
    """
    drawn, deadline_s = os.urandom(8).hex(), time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(f"ask/{rank}", drawn)
        prefix = store.get(f"answer/{drawn}").decode()  # waits
        store.set(f"{prefix}/met/{rank}", "")
        return dist.PrefixStore(prefix, store)
    peers = range(1, world_size)
    while not store.check([f"{drawn}/met/{peer}" for peer in peers]):
        for peer in peers:
            if store.check([f"ask/{peer}"]):  # asked by a dead rank, or by the one that waits
                store.set(f"answer/{store.get(f'ask/{peer}').decode()}", drawn)
        if time.monotonic() > deadline_s:
            raise Stop("some ranks did not start within --timeout_s")
        time.sleep(0.01)
    return dist.PrefixStore(drawn, store)


def start_process_group(config):
    """Join the other ranks, of which there are none without torchrun -> this rank's device, and a
    store that lives as long as torchrun does. Raises Stop if there is no such --device, or fewer
    than ranks on this host, since two cannot share one."""
    torch.set_num_threads(config.threads)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    n_local, most = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), {"cpu": 1024}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Not MPS, which has no collectives and no float64; torch names gloo for it.
    if accelerator and dist.get_default_backend_for_device(accelerator) != "gloo":
        most[accelerator.type] = torch.accelerator.device_count()
    kind = config.device or [*most][-1]  # the accelerator, if there is one
    if n_local > most.get(kind, 0):
        raise Stop(f"--device {kind}: {most.get(kind, 0)} for {n_local} ranks; there are {[*most]}")
    device = torch.device(kind if kind == "cpu" else f"{kind}:{os.environ.get('LOCAL_RANK', 0)}")
    if kind != "cpu":
        torch.accelerator.set_device_index(device.index)
    timeout = datetime.timedelta(seconds=config.timeout_s)
    torchrun_store = store = dist.HashStore()
    if "RANK" in os.environ:
        is_ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        torchrun_store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                                       is_master=is_ours, timeout=timeout, wait_for_workers=False)
        store = meet(torchrun_store, rank, world_size, timeout)
    dist.init_process_group(dist.get_default_backend_for_device(device), store=store, rank=rank,
                            world_size=world_size, timeout=timeout)
    return device, torchrun_store


def gather(value):
    """[rank 0's value, rank 1's, ...], of anything that can be pickled. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value):
    """Rank 0's value. A collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def together(function, *arguments):
    """Call function(*arguments) on every rank and return this rank's result. A collective.

    Where it fails on one rank, by a user's mistake (ValueError), a disk (OSError) or for lack of
    memory (RuntimeError: on a CPU torch has no other), Stop is raised on all of them.
    function itself must not communicate.
    """
    result = problem = None
    try:
        result = function(*arguments)
    except (ValueError, OSError, RuntimeError) as error:
        problem = str(error)
    for rank, found in enumerate(gather(problem)):
        if found is not None:
            raise Stop(f"rank {rank}: {found}" if rank else found)
    return result


def on_rank_0(function, *arguments):
    """Call function(*arguments) on rank 0 while the others wait. Raises Stop as `together` does."""
    together(lambda: function(*arguments) if dist.get_rank() == 0 else None)


def check_ranks_agree(facts):
    """facts: {name: value}. Where ranks have different values, raise Stop on all of them, with the
    first such fact and the values of all ranks. A collective, of hashes as long as they agree."""
    hashes = gather(hashlib.sha256(repr(facts).encode()).digest())
    views = gather(facts) if len(set(hashes)) > 1 else []
    for name in facts:
        values = [view[name] for view in views]
        if len(set(values)) > 1:
            raise Stop(f"ranks differ in {name}, which is {values} on ranks 0 to {len(values) - 1}")


def say(text, file=None):
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, file=file, flush=True)


# -------------------------------------------------------------------------------------------------
# data
#
# Tokens are one long sequence, cut into blocks of block_size. A block is a sample: its tokens are
# the inputs, and the tokens one further on are the targets. Everything below is a function of the
# seed and the step, so there is no state to save, and to resume at a step is to ask for it.

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name):
    """A tiktoken Encoding. "bytes" is 256 single bytes and an end-of-text token: no download."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"\S+\s*|\s+", special_tokens={END_OF_TEXT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no connection; a damaged download; no such name
        raise ValueError(f"--tokenizer {name}: {error}; bytes needs no download") from error


def stdlib_text():
    """The standard library's source as one string, end-of-text between files.

    Without tests, tables of characters, and what distributions package separately. Files are
    ordered by a hash of their path, so that the last tenth, which validates, is text of the same
    kind.
    """
    root = pathlib.Path(os.__file__).parent
    left_out = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
                "test", "tests", "tkinter", "turtle", "turtledemo"}
    paths = [path for name in sys.stdlib_module_names if not name.startswith("_sysconfigdata")
             for path in ((root / name).with_suffix(".py"), *(root / name).rglob("*.py"))]
    names = [path.relative_to(root).with_suffix("").as_posix() for path in paths if path.is_file()]
    names = [name for name in names if not left_out.intersection(name.split("/"))]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return END_OF_TEXT.join((root / f"{name}.py").read_text("utf-8") for name in names)


def tokenize(text, tokenizer, out_dir):
    """text -> token ids, memory-mapped from a file in out_dir that is named after the text's hash.

    Ranks that come at the same time do the same work. That costs no time, and waiting for one of
    them could take longer than a collective may.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = pathlib.Path(out_dir, f"tokens-{tokenizer.name}-{digest}.npy")
    if not path.exists():
        say(f"tokenizing {len(text):,} characters with {tokenizer.name}")
        ids = tokenizer.encode_to_numpy(text, allowed_special={END_OF_TEXT}, disallowed_special=())
        unfinished = path.with_name(f".{os.urandom(4).hex()}.npy")
        np.save(unfinished, ids.astype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32))
        fsync(unfinished)
        os.replace(unfinished, path)
    return np.load(path, mmap_mode="r")


def load_tokens(config, tokenizer, vocab_size):
    """Training and validation token ids, each (n,). Of a text the last tenth validates. Raises
    OSError, and ValueError where there are too few tokens or they are not the tokenizer's."""
    path = pathlib.Path(config.dataset)
    try:
        if config.dataset != "stdlib" and path.is_dir():  # nanoGPT's: uint16 and nothing else
            parts = [np.memmap(path / name, "<u2", "r") for name in ("train.bin", "val.bin")]
        else:
            text = stdlib_text() if config.dataset == "stdlib" else path.read_text("utf-8")
            tokens = tokenize(text, tokenizer, config.out_dir)
            parts = np.split(tokens, [int(0.9 * len(tokens))])
    except ValueError as error:  # not UTF-8, an empty file, half a token
        raise ValueError(f"--dataset {path}: {error}") from error
    for part, n in zip(parts, (config.global_batch_size, 1 if config.eval_steps else 0)):
        if count_blocks(part, config) < n:
            raise ValueError(f"--dataset {path} is too short: {len(part)} tokens for {n} blocks")
        if n and part.max() >= vocab_size:  # reads the file once: a crash in mid-run costs more
            raise ValueError(f"--dataset {path} has token {part.max()}, but there are {vocab_size}")
    return parts


def fingerprint(tokens):
    """Their number, and a hash of about a million of them."""
    some = np.ascontiguousarray(tokens[::max(1, len(tokens) // 2**20)])
    return f"{len(tokens)} tokens with hash {hashlib.sha256(some).hexdigest()[:16]}"


def count_blocks(tokens, config):
    """Blocks do not overlap, but the last target is one token beyond its block."""
    return (len(tokens) - 1) // config.block_size


@functools.lru_cache(maxsize=2)  # costs O(n): kept for training and for validation
def block_order(n, seed, epoch):
    """The numbers of n blocks in the order in which an epoch takes them, (n,)."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def global_batch(tokens, step, config):
    """The numbers of the blocks of a step, from 1 on, over all ranks: (global_batch_size,).

    No block comes twice in an epoch, and all ranks make the same number of steps. An epoch leaves
    out the blocks that do not fill a global batch; the next one has another order.
    """
    n, B = count_blocks(tokens, config), config.global_batch_size
    epoch, step = divmod(step - 1, n // B)
    return block_order(n, config.seed, epoch)[step * B:(step + 1) * B]


def read_blocks(tokens, blocks, config, device):
    """Block numbers (m,) -> inputs x and targets y on the device, each (m, T) int64."""
    positions = blocks[:, None] * config.block_size + np.arange(config.block_size + 1)
    window = torch.from_numpy(tokens[positions].astype(np.int64))  # (m, T + 1)
    if device.type != "cpu":
        window = window.pin_memory().to(device, non_blocking=True)
    return window[:, :-1], window[:, 1:]


def prepare(config):
    """What every rank makes, or refuses, by itself -> tokenizer, plain model, training tokens,
    validation tokens. Raises ValueError and OSError on a user's mistake."""
    check(config)
    for folder in filter(None, (config.out_dir, config.export_hf)):
        os.makedirs(folder, exist_ok=True)
    tokenizer = load_tokenizer(config.tokenizer)
    plain = build_model(config, tokenizer)
    config.block_size = plain.config.block_size  # that of the preset or folder, unless given
    return tokenizer, plain, *load_tokens(config, tokenizer, plain.config.vocab_size)


# -------------------------------------------------------------------------------------------------
# model, wrapper, optimizer
#
# "plain" is the GPT itself. "model" is what a mode makes of it, whose forward the loop calls.


def build_model(config, tokenizer):
    """The plain GPT: a preset, or the folder --init_from, each size overridden where its flag is
    given. Raises ValueError on sizes that do not fit.

    For ZeRO it is on the meta device, and its wrapper gives it values unit by unit, so that no rank
    ever holds all of it.
    """
    sizes = (read_llama_config(config.init_from) if config.init_from else
             dict(PRESETS[config.model], vocab_size=tokenizer.n_vocab))
    sizes |= {name: getattr(config, name) for name in SIZES if getattr(config, name) is not None}
    with torch.device("meta" if config.mode in ZERO else "cpu"):
        model = GPT(GPTConfig(seed=config.seed, **sizes,
                              activation_checkpointing=config.activation_checkpointing))
    if config.init_from:
        read = functools.partial(read_llama_weights, model, config.init_from)
        read()  # what is on meta is only compared; ZeRO's wrapper reads it, and takes rank 0's
        model.init_weights = read if dist.get_rank() == 0 else lambda: None
    return model


def wrap(model, config, device):
    """The plain model -> what the loop calls. Here is where the modes differ.

    Whatever the mode, the result has what `add_surface` lists beside forward, so that no other
    function asks which wrapper it has.
    """
    # None is 25 MB too, but only with None is torch's first bucket small.
    options = dict(bucket_cap_mb=None if config.bucket_cap_mb == 25 else config.bucket_cap_mb,
                   find_unused_parameters=config.find_unused_parameters,
                   gradient_as_bucket_view=True)  # ours always does it
    if config.compile:
        model.compile_blocks()
    if config.mode in ZERO:
        for_muon = [p for name, p in model.named_parameters() if takes_muon(name, p, config)]
        model = ZERO[config.mode](model, param_dtype=DTYPES.get(config.param_dtype),
                                  reduce_dtype=DTYPES.get(config.reduce_dtype),
                                  shard_size=config.shard_size, offload=config.offload,
                                  uncut=for_muon)
    else:
        model.to(device)
    if config.mode == "ddp":
        model = DDP(model, **options)
    if config.mode in ("torch-ddp", "torch-zero1"):
        model = torch.nn.parallel.DistributedDataParallel(model, **options)
    if config.mode in FSDP:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*model.blocks, model):
            # Without a mesh it takes an accelerator's, if any.
            fully_shard(module, mesh=mesh, reshard_after_forward=config.mode == "torch-fsdp")
    if config.mode not in ("ddp", *ZERO):
        add_surface(model, config)
    elif config.comm_hook:
        model.register_comm_hook(*comm_hook(config))
    else:  # `train_step` divides; a comm hook takes the mean over ranks itself
        model.set_gradient_divide_factor(1)
    return model


def comm_hook(config):
    """(state, hook) of --comm_hook. Nothing is left out while the learning rate warms up."""
    if config.comm_hook == "bf16":
        return None, default_hooks.bf16_compress_hook
    if config.comm_hook == "powersgd":
        start_iter = max(2, config.warmup_steps)  # torch wants 2 steps at least
        return powerSGD_hook.PowerSGDState(None, 1, start_iter), powerSGD_hook.powerSGD_hook
    if config.comm_hook == "topk":
        return TopKState(config.topk_ratio, None, config.warmup_steps), top_k_hook
    node_size = config.node_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return HierarchicalState(node_size), hierarchical_hook


def add_surface(model, config):
    """Give the plain model, or torch's wrapper, what our wrappers have beside forward.

    shard_group: the ranks over which parameters are sharded, None if each rank has them whole.
    shard_starts(): {name: the first element of the parameter that this rank has}.
    full_parameters(): yields (name, whole parameter); a collective if they are sharded.
    exposed_s: the seconds that this rank has waited for communication so far.
    gradient_divide_factor: what the sum of gradients over ranks has been divided by; None: W.
    """
    is_sharded = config.mode in FSDP
    rank, W = dist.get_rank(), dist.get_world_size()
    # FSDP2 gives each rank ceil(rows / W) rows; the last ranks may have fewer, or none.
    starts = {name: rank * math.ceil(p.size(0) / W) * p.stride(0) if is_sharded else 0
              for name, p in named_shards(model)}

    def full_parameters():
        for name, p in named_shards(model):
            yield name, p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()

    model.shard_group = dist.group.WORLD if is_sharded else None
    model.gradient_divide_factor = None if "torch" in config.mode else 1
    model.shard_starts, model.full_parameters = lambda: starts, full_parameters
    # Torch's wrappers do not say how long they wait, nor do accelerators: nan, in JSON null.
    model.exposed_s = math.nan if "torch" in config.mode or dist.get_backend() != "gloo" else 0.0


def named_shards(model):
    """Yield (name in the plain model, what this rank trains of it) for every parameter."""
    for name, p in model.named_parameters():
        yield name.removeprefix("module."), p  # the prefix of DDP, torch's and ours


def local(tensor):
    """This rank's part of a tensor that FSDP2 shards; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


def takes_muon(name, p, config):
    """Whether Muon trains p, a parameter or its shard, which has as many dimensions. The embedding
    is a matrix too, but a batch has gradients of few of its rows.

    qkv and gate_up are one matrix for Muon, though they hold three and two: their views would be
    parameters that ZeRO does not know.
    """
    return config.optimizer == "muon" and name.startswith("blocks.") and p.dim() == 2


class Optimizers:
    """Several optimizers, each with parameters of its own, that the loop calls as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = []  # the same dicts: a rate that is set here is set there
        self.state = {}
        for optimizer in optimizers:
            self.param_groups += optimizer.param_groups
            self.state |= optimizer.state

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def make_optimizer(model, config):
    """AdamW, which decays matrices only, as shards keep their dimensions; with --optimizer muon
    Muon for the matrices of blocks, too. Their state is made here, not in the first step: then a
    checkpoint has the same keys whenever it is written or read."""
    matrices, others, for_muon = [], [], []
    for name, p in named_shards(model):
        if takes_muon(name, p, config):
            for_muon.append(p)
        elif p.dim() >= 2:
            matrices.append(p)
        else:
            others.append(p)
    groups = [dict(params=matrices, weight_decay=config.weight_decay),
              dict(params=others, weight_decay=0.0)]
    # Not fused: that kernel rounds a tensor's tail differently, so slices would not match wholes.
    # foreach on an accelerator: else each tensor takes kernels of its own.
    options = dict(lr=config.lr, betas=(config.beta1, config.beta2),
                   foreach=not others[0].is_cpu, fused=False)
    if config.mode == "torch-zero1":
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)
        adamw = optimizer.optim  # over the parameters that this rank updates
        optimizer.state = adamw.state
    else:
        optimizer = adamw = torch.optim.AdamW(groups, **options)
    for group in adamw.param_groups:
        for p in group["params"]:
            adamw.state[p] = dict(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p),
                                  exp_avg_sq=torch.zeros_like(p))
    if config.optimizer == "adamw":
        return optimizer
    # By this factor its updates are as large as AdamW's, so one --lr does for both: Moonlight,
    # arXiv 2502.16982, section 2.2.
    muon = torch.optim.Muon(for_muon, lr=config.lr, weight_decay=config.weight_decay,
                            adjust_lr_fn="match_rms_adamw")
    for p in for_muon:
        muon.state[p] = dict(momentum_buffer=torch.zeros_like(p))
    return Optimizers(adamw, muon)


def make_scaler(config, device):
    """Loss scaling for fp16, off for other dtypes. Its check for inf is reduced over all ranks: if
    one skips a step, all do, and all halve the scale. It begins with 2**16, torch's number, over N
    micro batches, rounded to a power of two, since their losses are not divided by N."""
    N = accumulation_steps(config) * dist.get_world_size()
    return ShardedGradScaler(device.type, 2.0 ** (16 - (N - 1).bit_length()),
                             enabled="fp16" in (config.dtype, config.param_dtype))


def autocast(config, device):
    return torch.autocast(device.type, DTYPES[config.dtype], enabled=config.dtype != "fp32")


def lr_at(step, config):
    """Learning rate of a step, from 1 on: linear warm-up to lr, then a cosine from lr to min_lr."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    done = (step - 1 - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


# -------------------------------------------------------------------------------------------------
# a step


def set_gradient_sync(model, config, on):
    """Whether the next backward exchanges gradients. Sets what no_sync() does, without its block.

    Stages 2 and 3 always exchange them: they have no room for whole gradients, and so their bits
    are those of one process, however micro batches are divided among ranks.
    """
    if config.mode in FSDP:
        model.set_requires_gradient_sync(on)
    elif config.mode not in ("zero2", "zero3") or config.shard_size == 1:
        model.require_backward_grad_sync = on


def train_step(model, optimizer, scaler, tokens, step, config, device, signals=()):
    """Make a step, from 1 on -> (what metrics.jsonl has of it, whether some rank had signals). A
    collective.

    If loss or gradients are not finite on some rank, all ranks skip the update. Decisions are taken
    from `sums`, which is the same everywhere; only times and memory differ between ranks.
    """
    # forward and backward, micro-step by micro-step
    start_s, before_s = time.perf_counter(), model.exposed_s
    rank, W, m = dist.get_rank(), dist.get_world_size(), config.micro_batch_size
    n, blocks = accumulation_steps(config), global_batch(tokens, step, config)
    # A place for each micro batch of all ranks, in the order of the data. Other ranks' places are
    # 0, so the sum over ranks rounds nothing, and the logged loss does not depend on W.
    # The last two are for what all ranks must know.
    sums = torch.zeros(n * W + 2, dtype=torch.float64, device=device)
    optimizer.zero_grad(set_to_none=True)
    for micro_step in range(n):
        index = micro_step * W + rank
        x, y = read_blocks(tokens, blocks[index * m:(index + 1) * m], config, device)
        set_gradient_sync(model, config, micro_step == n - 1)
        with autocast(config, device):
            _, loss = model(x, y)
        sums[index] = loss.detach()
        scaler.scale(loss).backward()  # not loss / n, which would round
    if config.mode == "naive":
        naive_s = time.perf_counter()
        average_gradients(model, divide_factor=1)
        model.exposed_s += time.perf_counter() - naive_s

    # take the mean of n W micro batches and clip it, on all ranks by the same factor
    scaler.unscale_(optimizer)
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    norm = clip_gradients_(gradients, config.grad_clip or math.inf, model.shard_group,
                           n * W / (model.gradient_divide_factor or W)).to(device)

    # add up losses over ranks, and in the same collective what all ranks must know; read all of it
    # at once, since an accelerator stands still meanwhile
    sums[-2], sums[-1] = ~norm.isfinite(), len(signals)
    dist.all_reduce(sums)
    *losses, bad, stop, grad_norm = torch.cat((sums, norm.view(1))).tolist()
    skipped = bool(bad) or not all(map(math.isfinite, losses))

    # update the weights, in every mode by the same rate
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, config)
    if not skipped:
        scaler.step(optimizer)
    scaler.update()
    param_norm = total_norm([local(p.detach()) for p in model.parameters()], model.shard_group)
    step_s = time.perf_counter() - start_s
    entry = dict(step=step, loss=math.fsum(losses) / len(losses), lr=lr_at(step, config),
                 grad_norm=grad_norm, param_norm=param_norm.item(), skipped=skipped,
                 tokens_per_sec=config.global_batch_size * config.block_size / step_s,
                 step_ms=1e3 * step_s, comm_exposed_ms=1e3 * (model.exposed_s - before_s),
                 mem_bytes=peak_mem_bytes(device))
    return entry | dict(ranks=over_ranks(entry, device)), stop > 0


def over_ranks(entry, device):
    """{name: [min, mean, max] over ranks} of what each rank measures for itself, and the slowest
    rank. All ranks take as long as that one, so it is the one that waits least; None in the torch
    modes, which do not say how long they wait. A collective."""
    names = ("step_ms", "comm_exposed_ms", "mem_bytes")
    table = torch.zeros(dist.get_world_size(), len(names), dtype=torch.float64, device=device)
    table[dist.get_rank()] = table.new_tensor([entry[name] for name in names])
    dist.all_reduce(table)
    table = table.cpu()
    busy_ms = table[:, 0] - table[:, 1]
    found = {name: [t.min().item(), t.mean().item(), t.max().item()]
             for name, t in zip(names, table.T)}
    return found | dict(slowest=None if busy_ms.isnan().any() else busy_ms.argmax().item())


def peak_mem_bytes(device, reset=False):
    """The most this process has held, since reset, in bytes: by the accelerator's allocator, or as
    resident set on a CPU, Python and torch included."""
    if device.type != "cpu":
        if reset:
            torch.accelerator.reset_peak_memory_stats(device)
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform != "linux":
        import resource  # macOS, where it is in bytes; not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def largest_micro_batch(config, tokenizer, device):
    """--micro_batch_size auto: the largest size that divides a rank's part of the global batch and
    keeps a step within the limit on every rank. Raises Stop if none does. A collective.

    Memory grows with the size along a straight line, which is drawn through sizes 1 and 2. These
    are tried on a model and on data that are thrown away; an accelerator whose memory is out at
    size 2 gets size 1. 5 % of the limit is kept for evaluation and checkpoints, which are not
    tried.
    """
    if not config.memory_limit_gb and device.type == "cpu":
        raise Stop("--micro_batch_size auto needs --memory_limit_gb on a CPU")
    n_bytes = 1e9 * (config.memory_limit_gb or 0) or torch.accelerator.get_memory_info(device)[0]
    limit, W, peaks = 0.95 * n_bytes, dist.get_world_size(), []
    config = dataclasses.replace(config, warmup_steps=0)  # PowerSGD begins in the third step
    model = wrap(build_model(config, tokenizer), config, device)
    optimizer, scaler = make_optimizer(model, config), make_scaler(config, device)
    tokens = np.zeros(4 * W * config.block_size + 1, dtype=np.uint16)
    peak_mem_bytes(device, reset=True)  # that of tokenizing
    for size in (1, 2):
        # Two micro-steps, since accumulating takes memory too, and three steps, for PowerSGD.
        trial = dataclasses.replace(config, micro_batch_size=size, global_batch_size=2 * size * W)
        try:
            for step in range(1, 4):
                train_step(model, optimizer, scaler, tokens, step, trial, device)
            peaks.append(peak_mem_bytes(device))
        except torch.OutOfMemoryError:  # on all ranks, since all do the same
            peaks.append(math.inf)
    del model, optimizer
    gc.collect()  # hooks and modules are in reference cycles
    torch.compiler.reset()
    peak_mem_bytes(device, reset=True)
    most = min(gather(1 + (limit - peaks[0]) / max(1, peaks[1] - peaks[0])))  # below 1: not even 1
    share = config.global_batch_size // W
    fitting = [size for size in range(1, share + 1) if size <= most and share % size == 0]
    found = f"size 1 takes {1e-9 * peaks[0]:.2f} GB, and the limit is {1e-9 * limit:.2f}"
    if not fitting:
        raise Stop(f"--micro_batch_size auto: {found}")
    say(f"micro batch size {fitting[-1]}: {found}")
    return fitting[-1]


# -------------------------------------------------------------------------------------------------
# evaluation, and the end of a run


@torch.no_grad()
def evaluate(model, tokens, config, device):
    """Mean loss over eval_steps micro batches of validation tokens, divided among the ranks. A
    collective.

    The blocks are the same in every run of one micro batch size, whatever its seed, so that runs
    can be compared. A forward may be a collective, so all ranks make the same number: a rank
    without a micro batch of its own repeats the last one, and that loss does not count.
    """
    model.eval()
    rank, W, n_blocks = dist.get_rank(), dist.get_world_size(), count_blocks(tokens, config)
    m = min(config.micro_batch_size, n_blocks)
    n = min(config.eval_steps, n_blocks // m)
    order = block_order(n_blocks, seed=0, epoch=0)
    losses = torch.zeros(n, dtype=torch.float64, device=device)
    for index in range(rank, math.ceil(n / W) * W, W):
        i = min(index, n - 1)
        x, y = read_blocks(tokens, order[i * m:(i + 1) * m], config, device)
        with autocast(config, device):
            _, loss = model(x, y)
        losses[index:index + 1] = loss  # nowhere, if index is not below n
    if config.mode in FSDP:
        for module in (*model.blocks, model):
            module.reshard()  # what stays whole without a backward would not be saved as shards
    model.train()
    dist.all_reduce(losses)
    return losses.mean().item()


def sample(model, tokenizer, config, device):
    """Text with which the plain model continues a line break, the same on all ranks. A collective,
    since in stage 3 every forward gathers weights."""
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([tokenizer.encode("\n")], device=device)
    # Eager, since compiling for every length would take longer than the run.
    with autocast(config, device), torch.compiler.set_stance("force_eager"):
        idx = model.generate(idx, config.sample_tokens, temperature=0.8, generator=generator)
    try:
        return tokenizer.decode(idx[0].tolist())
    except KeyError:  # the vocabulary is that of --init_from, and has more tokens
        return f" tokens {idx[0].tolist()}"


def param_sha256(model):
    """Hash of the whole fp32 parameters, in the order of the plain model's named_parameters(), to
    compare runs by. A collective; holds one parameter at a time."""
    digest = hashlib.sha256()
    for _, p in model.full_parameters():
        digest.update((p.float().cpu() + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
    return digest.hexdigest()


def compare_parameters(model):
    """Raise Stop, naming parameter and ranks, where whole parameters are not the same on all ranks,
    as after a flipped bit. A collective. Sums are of bits, so that no rounding hides a difference.

    A shard has no second copy to compare with: in the ZeRO modes this finds less.
    """
    check_ranks_agree({name: p.view(torch.int32).sum(dtype=torch.int64).item()
                       for name, p in model.full_parameters()})


def export(model, plain, config, tokenizer):
    """Write the whole model to the folder --export_hf. A collective; only rank 0 ever holds all of
    it, and on the CPU."""
    whole = {name: p.to("cpu", copy=True) for name, p in model.full_parameters()
             if dist.get_rank() == 0}
    # The others wait in a collective, and that may take longer than --timeout_s.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(days=1))
    on_rank_0(write_llama, config.export_hf, whole, plain.config, tokenizer.eot_token)


def bytes_per_param(model, plain, optimizer):
    """Bytes of weights, gradients and optimizer state that this rank holds after a step, over the
    number of parameters: 16 without sharding. (ZeRO paper, arXiv 1910.02054, section 3.) Counted
    by memory, since shards may be views of what is whole."""
    parameters = [*model.parameters(), *plain.parameters()]  # shards, and what is whole beside them
    held = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    held += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    storages = {t.data_ptr(): t.nbytes() for t in (local(t).untyped_storage() for t in held)}
    return sum(storages.values()) / sum(p.numel() for p in plain.parameters())


# -------------------------------------------------------------------------------------------------
# checkpoints: folders out_dir/step_00000100, each complete or not there at all
#
#     __0_0.distcp ...  slices of parameters and of optimizer state, by name, a file per rank
#     .metadata         where each slice is: torch.distributed.checkpoint's pickle
#     checkpoint.json   what the loop knows beside tensors, and what must be the same in a resume
#     SHA256SUMS        of the other files, in the form of `sha256sum`
#
# No rank holds more than it trains with. Any mode at any world size reads what another wrote, since
# a slice is saved with its place in the flat parameter, not with its rank. A folder is written
# under a hidden name and renamed when everything in it is on disk, so a crash leaves the
# checkpoints before as they are.

RECORD, SUMS = "checkpoint.json", "SHA256SUMS"
HASHED = (".distcp", ".metadata", RECORD)  # ends of the names of the files that SUMS has


class Slice(torch.Tensor):
    """The elements [first, first + n) that this rank has of a flat tensor of `whole` elements.

    torch.distributed.checkpoint calls the dunder methods, which are those of DTensor. A DTensor
    itself would not do: ZeRO's shards begin in the middle of a row.
    """

    def size(self):
        return torch.Size([self.whole])

    def __create_chunk_list__(self):
        first, n = torch.Size([self.first]), torch.Size([self.numel()])
        return [dcp.metadata.ChunkStorageMetadata(first, n)] if self.numel() else []

    def __create_write_items__(self, key, _):
        properties = dcp.metadata.TensorProperties.create_from_tensor(self)
        return [dcp.planner.WriteItem(
            dcp.metadata.MetadataIndex(key, chunk.offsets), dcp.planner.WriteItemType.SHARD,
            tensor_data=dcp.planner.TensorWriteData(chunk, properties, self.size()))
            for chunk in self.__create_chunk_list__()]

    def __get_tensor_shard__(self, index):
        return self.as_subclass(torch.Tensor)


def checkpoint_tensors(model, optimizer, plain, config):
    """{key: what this rank has of it}, sharing memory with what is trained: loading a checkpoint
    writes into these tensors. Keys are names, so any mode finds what it needs. An empty shard is
    left out, and so is its state: Adam's step counter stays 0 on a rank that owns nothing."""
    tensors, starts = {}, model.shard_starts()
    sizes = {name: p.numel() for name, p in plain.named_parameters()}
    for name, p in named_shards(model):
        n = local(p).numel()
        if n == 0:
            continue
        for kind, t in dict(optimizer.state[p], model=p).items():
            if kind != "step":
                t = local(t).detach()
                # In order of memory, in which shards are cut.
                t = t.as_strided((t.numel(),), (1,)).as_subclass(Slice)
                t.first = starts[name]
                t.whole = sizes[name]
                if n == sizes[name]:  # then state may have another shape, as Adafactor's has
                    t.whole = t.numel()
            tensors[f"{kind}.{name}"] = t
        if config.comm_hook == "topk":  # what was not sent so far is each rank's own
            residual = model.comm_state.residual.setdefault(p, torch.zeros_like(p))
            tensors[f"residual.{dist.get_rank()}.{name}"] = residual
    return tensors


def newest_first(out_dir):
    """The checkpoints in out_dir: the number of the step has eight digits."""
    return sorted(out_dir.glob("step_" + 8 * "[0-9]"), reverse=True)


def sha256_line(path):
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


def checksums(folder):
    """The lines that SHA256SUMS has to have for what is in folder now. A collective: each rank
    reads its share of the files. What others have put there, such as .DS_Store, is left out."""
    names = sorted(path.name for path in folder.glob("*") if path.name.endswith(HASHED))
    share = from_rank_0(names)[dist.get_rank()::dist.get_world_size()]
    lines = together(lambda: [sha256_line(folder / name) for name in share])
    return sorted(sum(gather(lines), []))


def fsync(path):
    """Of a file or a folder; of a folder, so that a new name in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_checkpoint(out_dir, tensors, record):
    """Write out_dir/step_... -> whether that succeeded. If not, as on a full disk, it is said, and
    the run continues: the next checkpoint may succeed. A collective."""
    folder = out_dir / f"step_{record['step']:08d}"
    unfinished = out_dir / f".{folder.name}.unfinished"
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished))
        on_rank_0((unfinished / RECORD).write_text, json.dumps(record, indent=1))
        on_rank_0((unfinished / SUMS).write_text, "\n".join(checksums(unfinished)))
        on_rank_0(publish, unfinished, folder)
        on_rank_0(tidy, out_dir, record["best_step"], record["config"]["keep_last"])
        return True
    except (dcp.CheckpointException, Stop) as error:
        # The last line, since dcp's error has the tracebacks of all ranks.
        say(f"train.py: step {record['step']}: the checkpoint failed, earlier ones are as they "
            f"were: {str(error).strip().splitlines()[-1]} (is the disk full, or gone?)", sys.stderr)
        on_rank_0(shutil.rmtree, unfinished, True)
        return False


def publish(unfinished, folder):
    """Rank 0: dcp has put its files on disk. Do so with the rest; then the rename makes it count.
    """
    for path in (unfinished / RECORD, unfinished / SUMS, unfinished):
        fsync(path)
    unfinished.rename(folder)
    fsync(folder.parent)


def tidy(out_dir, best_step, keep_last):
    """Rank 0: point `best` to the best checkpoint, if it is there. Remove those that are neither it
    nor among the keep_last newest ones."""
    best, link = out_dir / f"step_{best_step:08d}", out_dir / "best"
    link.unlink(missing_ok=True)
    if best.exists():  # there is no step 0, which means none
        link.symlink_to(best.name)
    for old in newest_first(out_dir)[keep_last:]:
        if old != best:
            shutil.rmtree(old.rename(out_dir / f".{old.name}.removed"), ignore_errors=True)


def newest_sound(folders):
    """The first of folders whose files are as they were written, None if there are no folders.
    Raises Stop, naming the files, if there is none such. A collective.

    This comes before anything else is read: .metadata is a pickle.
    """
    folders = from_rank_0(folders)  # a network disk may show other ranks an older view
    for folder in folders:
        sums, found = folder / SUMS, checksums(folder)
        expected = from_rank_0(sums.read_text("utf-8", "replace") if sums.is_file() else "")
        if expected and found == expected.splitlines():
            return folder
        names = sorted({line[66:] for line in set(found) ^ set(expected.splitlines())})
        problem = f"{folder} does not match its {SUMS}: {', '.join(names) or 'no checkpoint'}"
        if folder == folders[-1]:
            raise Stop(problem)
        say(f"train.py: {problem}; falling back to the checkpoint before", sys.stderr)


def resume(config, out_dir, tensors, facts, torchrun_store):
    """Load the checkpoint that --resume names into tensors -> its record, None to start over. A
    collective. After a restart by torchrun it is the newest one in out_dir, whatever --resume says.
    The line that it prints is a restart's first one, and has the numbers of ranks.

    facts: {name: value} of what must be as it was. Raises Stop where it is not, or where the
    checkpoint is damaged. At the end out_dir has the past of this run, and nothing else.
    """
    is_restart = torchrun_store.check(["begun"])
    folders = newest_first(out_dir) if config.resume == "auto" or is_restart else []
    folders += [pathlib.Path(config.resume)] if config.resume not in (None, "auto") else []
    folder, record = newest_sound(folders), None
    if folder:
        record = json.loads((folder / RECORD).read_text())
        facts_before = {"optimizer": "adamw"} | record["facts"]  # which older ones do not say
        for name, value in facts.items():
            if facts_before.get(name) != value:
                raise Stop(f"{folder} has {name} {facts_before.get(name)}, and this run {value}")
        if record["step"] > config.max_steps:
            raise Stop(f"--max_steps {config.max_steps} is less than the steps of {folder}")
        # Partial, since a rank that was not there before has no residual of top-k to load.
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder),
                 planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        say(f"resumed from {folder}, after step {record['step']}, on {dist.get_world_size()} ranks "
            f"({record.get('world_size', 'unknown')} before)")
    past = record if folder and folder.resolve().parent == out_dir else None
    on_rank_0(rewind, out_dir, past or dict(step=0, best_step=0), past or is_restart)
    # Not earlier: if a rank dies before this line, what is in out_dir may be of another run.
    on_rank_0(torchrun_store.set, "begun", "")
    return record


def rewind(out_dir, progress, keeps_metrics):
    """Rank 0: bring out_dir to where it was after progress. Whatever is newer, damaged or of an
    earlier run is moved aside, which is said, and is not looked at again."""
    aside = out_dir / time.strftime(f"earlier_%Y%m%d_%H%M%S_{os.getpid()}")
    moved = [path for path in newest_first(out_dir) if int(path.name[5:]) > progress["step"]]
    for pattern in ("best", "metrics.jsonl", "tensorboard", "trace_rank*.json"):
        moved += [] if keeps_metrics else out_dir.glob(pattern)
    if moved:
        aside.mkdir()
        say(f"{', '.join(path.name for path in moved)} of an earlier run: moved to {aside}")
    for path in moved:
        path.rename(aside / path.name)
    for hidden in out_dir.glob(".step_*"):  # of a run that was killed, and `main`'s mark
        shutil.rmtree(hidden)
    tidy(out_dir, progress["best_step"], sys.maxsize)
    metrics = out_dir / "metrics.jsonl"
    if metrics.exists():
        # Whole lines only: a kill may have torn the last one.
        lines = re.findall(r'^({"step": (\d+),.*}\n)', metrics.read_text(errors="replace"), re.M)
        kept = "".join(line for line, number in lines if int(number) <= progress["step"])
        (out_dir / ".metrics").write_text(kept)
        (out_dir / ".metrics").replace(metrics)


# -------------------------------------------------------------------------------------------------
# log


def finite(entry):
    """entry with None for inf and nan, which JSON cannot represent."""
    return json.loads(json.dumps(entry), parse_constant=lambda constant: None)


def print_step(entry, recent, config):
    """The line of a step. recent: the entries of the last 100 steps, for the time that is left."""
    e, n = entry, config.max_steps
    mfu = "-" if math.isnan(e["mfu"]) else f"{100 * e['mfu']:.1f}%"
    left_s = round((n - e["step"]) * np.mean([old["step_ms"] for old in recent]) / 1e3)
    say(f"step {e['step']:5d}/{n} | loss {e['loss']:.4f} | lr {e['lr']:.2e} | "
        f"grad norm {e['grad_norm']:.3f} | param norm {e['param_norm']:.2f} | "
        f"{e['tokens_per_sec']:,.0f} tokens/s | mfu {mfu} | "
        f"{e['mem_bytes'] / 1e9:.2f} GB | {left_s // 60}m{left_s % 60:02d}s left"
        + (f" | val loss {e['val_loss']:.4f}" if "val_loss" in e else "")
        + (" | skipped, not finite" if e["skipped"] else ""))


def start_trackers(config, step):
    """Rank 0: [a function that takes the entry of a step] for metrics.jsonl and for each tracker
    that was asked for. They continue after `step`."""
    def write_line(entry):
        try:
            with open(os.path.join(config.out_dir, "metrics.jsonl"), "a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:  # a full disk is no reason to lose the run
            say(f"train.py: step {entry['step']} is missing in the metrics: {error}", sys.stderr)

    trackers = [write_line]
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(f"{config.out_dir}/tensorboard", purge_step=step + 1)
        atexit.register(writer.close)
        trackers.append(lambda entry: [writer.add_scalar(*item, entry["step"]) for item in
                                       entry.items() if isinstance(item[1], int | float)])
    if config.wandb:
        import wandb

        wandb_run = wandb.init(project="nanozero", dir=config.out_dir, config=vars(config))
        trackers.append(lambda entry: wandb_run.log(entry, step=entry["step"]))
    return trackers


def start_profiler(config):
    """--profile N: what this rank does in N steps, with the named ranges of ddp.py and zero.py, as
    out_dir/trace_rank0.json and so on."""
    path = f"{config.out_dir}/trace_rank{dist.get_rank()}.json"
    profiler = torch.profiler.profile(
        # Two steps are left out, in which buffers are made; the second warms the profiler up.
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=config.profile, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path))
    profiler.start()
    atexit.register(profiler.stop)  # if the run ends before, it writes what there is
    return lambda entry: profiler.step()


def print_result(model, entry, recent, n_bytes, config):
    """The last line of a run. Times are medians of the last 100 steps that this process made, None
    if it made none; memory is the most that any rank held until its last step. A collective."""
    result = dict(mode=config.mode, world_size=dist.get_world_size(), steps=entry["step"],
                  train_loss=entry["loss"], val_loss=entry.get("val_loss"),
                  peak_mem_bytes=int(entry["ranks"]["mem_bytes"][-1]), bytes_per_param=n_bytes,
                  param_sha256=param_sha256(model), threads=config.threads)
    for name in ("tokens_per_sec", "step_ms", "comm_exposed_ms", "mfu"):
        result[name] = np.median([entry[name] for entry in recent] or [math.nan])
    say("RESULT " + json.dumps(finite(result)))


# -------------------------------------------------------------------------------------------------
# the run


def is_due(step, interval, also=None):
    """Whether something happens after a step, every interval steps and after step `also`; with
    interval 0 never."""
    return interval > 0 and (step == also or step % interval == 0)


def main(config, progress):
    """A whole run -> exit status. progress: what the loop knows beside tensors. It is kept up to
    date, saved in every checkpoint, and says to `run` in which step it was."""
    # 1) meet the other ranks; tokenizer, plain model and data are the same on every rank
    device, torchrun_store = start_process_group(config)
    tokenizer, plain, tokens, val_tokens = together(prepare, config)
    facts = dict(vars(plain.config), activation_checkpointing=None,  # which changes no bit
                 global_batch_size=config.global_batch_size, data=fingerprint(tokens),
                 optimizer=config.optimizer)
    # To write checkpoints, all must see what rank 0 makes in out_dir; `rewind` removes it again.
    out_dir = pathlib.Path(config.out_dir).resolve()
    mark = out_dir / f".step_0_{from_rank_0(os.urandom(8).hex())}"
    on_rank_0(mark.mkdir)
    check_ranks_agree(vars(config) | facts | dict(
        validation=fingerprint(val_tokens), torch=torch.__version__, numpy=np.__version__,
        out_dir="rank 0's" if mark.exists() or not config.save_interval else "another folder"))
    if config.micro_batch_size == "auto":
        config.micro_batch_size = largest_micro_batch(config, tokenizer, device)

    # 2) the model as its mode wants it, then the optimizer over the parameters that this leaves
    model = wrap(plain, config, device)
    optimizer, scaler = make_optimizer(model, config), make_scaler(config, device)
    name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    # FLOP/s of all ranks; those of 16-bit units, whatever the run computes in.
    peak = dist.get_world_size() * (peak_flops(name) or math.nan)

    # 3) continue where an earlier run stopped
    tensors = checkpoint_tensors(model, optimizer, plain, config)
    if record := resume(config, out_dir, tensors, facts, torchrun_store):
        progress |= {name: record[name] for name in progress}
        scaler.load_state_dict(record["scaler"])
        if config.comm_hook in ("topk", "powersgd"):
            model.comm_state.iter = progress["step"]
    say(f"{sum(p.numel() for p in plain.parameters()):,} parameters | {len(tokens):,} training "
        f"tokens | {config.mode}, W = {dist.get_world_size()}, {dist.get_backend()} on {name}")
    trackers = start_trackers(config, progress["step"]) if dist.get_rank() == 0 else []
    trackers += [start_profiler(config)] if config.profile else []
    signals, saved, recent = [], True, []
    for number in (signal.SIGINT, signal.SIGTERM):  # finish the step, save, stop
        signal.signal(number, lambda number, frame: signals.append(number))

    # 4) the loop
    for step in range(progress["step"] + 1, config.max_steps + 1):
        # forward, backward and update; stop if too many steps in a row were skipped
        progress["step"] = step
        entry, stop = train_step(model, optimizer, scaler, tokens, step, config, device, signals)
        progress["skipped"] = progress["skipped"] + 1 if entry["skipped"] else 0
        if progress["skipped"] == MAX_SKIPPED_STEPS:
            raise Stop(f"step {step}: {MAX_SKIPPED_STEPS} steps in a row not finite: lower --lr")
        if is_due(step, config.check_interval):
            compare_parameters(model)

        # evaluate, on all ranks
        best = {}
        if config.eval_steps and is_due(step, config.eval_interval, config.max_steps):
            entry["val_loss"] = evaluate(model, val_tokens, config, device)
            if entry["val_loss"] < progress["best_val_loss"]:
                best = dict(best_step=step, best_val_loss=entry["val_loss"])

        # log, on rank 0
        entry["mfu"] = entry["tokens_per_sec"] * plain.flops_per_token() / peak
        recent = [*recent[-99:], entry]
        if is_due(step, config.log_interval, 1) or "val_loss" in entry or entry["skipped"]:
            print_step(entry, recent, config)
        progress["entry"] = finite(entry)
        for track in trackers:
            track(progress["entry"])

        # write a checkpoint, on all ranks, and stop where one of them was told to; skipped steps
        # must not push out the checkpoints before them
        is_time = is_due(step, config.save_interval, config.max_steps) and not entry["skipped"]
        if config.save_interval and (is_time or best or stop):
            record = dict(progress | best, facts=facts, scaler=scaler.state_dict(),
                          world_size=dist.get_world_size(), config=vars(config))
            tensors = checkpoint_tensors(model, optimizer, plain, config)  # top-k makes new ones
            saved = save_checkpoint(out_dir, tensors, record)
            progress |= best if saved else {}
        if stop:
            say(f"train.py: stopped by a signal after step {step}", sys.stderr)
            return 0 if saved else 1

    # 5) a text that the model writes, the result, and the weights for transformers
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    n_bytes = bytes_per_param(model, plain, optimizer) if recent else None
    if config.sample_tokens and progress["entry"]["param_norm"] is not None:
        say(f"sample:{sample(plain, tokenizer, config, device)}")
    print_result(model, progress["entry"], recent, n_bytes, config)
    if config.export_hf:
        export(model, plain, config, tokenizer)
    return 0 if saved else 1


def refuse(error, status=2):
    """Say in one line why the run stops, and leave. Only the first rank of a host speaks."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        # If it left first, torchrun would end the others before they can speak. If only this rank
        # has failed, no SIGTERM comes, and it prints the line itself.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(5)
    print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    os._exit(status)


def explains_itself(error):
    """Whether error needs no traceback: memory is out, or a collective has failed, as it does where
    another rank has died or hangs. Only the text tells: gloo raises plain RuntimeErrors."""
    return re.search("^Dist|^OutOfMemory|^RuntimeError.*(onnection|imed out|gloo)", repr(error))


def run():
    """main, and what becomes of its errors -> exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop Ctrl-C ends a run in silence
    progress = dict(step=0, best_step=0, best_val_loss=math.inf, skipped=0, entry=None)
    try:
        status = main(parse_args(sys.argv[1:]), progress)
    except Stop as error:
        refuse(error, 1 if progress["entry"] else 2)
    except Exception as error:
        if not explains_itself(error):
            sys.excepthook(*sys.exc_info())
        rank, text = os.environ.get("RANK", 0), " ".join(str(error).split())
        print(f"train.py: rank {rank} failed in step {progress['step']}: {type(error).__name__}: "
              f"{text}", file=sys.stderr, flush=True)
        os._exit(1)  # at once, which closes its connections: that is how other ranks come to know
    # FSDP2's modules hold the group in a cycle: uncollected, its threads outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(run())

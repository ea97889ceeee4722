# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
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
    python train.py --resume out/best --eval_only --prompt "def "   # ask a checkpoint

Replaces a trainer framework by one loop. In this order: flags; a run, which is prepared, loops and
finishes; how it goes on from a checkpoint; a step; the modes; optimizers; evaluation; the log; how
ranks meet and agree; how a run ends. Samples are in data.py, files of a run in checkpoint.py, and
what only some flag asks for in extras/. One process is a process group of one rank, so no line asks
whether there is a group.

How it differs from nanoGPT's loop: the global batch of a step is a function of (seed, epoch, step)
alone, and ranks take its micro batches in turn: any number of ranks reads the same samples in the
same order. Our modes divide nothing before the gradients of all micro batches are added up, in
that order. So in fp32 on CPU zero2 and zero3 produce the bits of one process on every number of
ranks, also where it changes in the middle of a run; the other modes do where each rank has one
micro-step. Losses and norms that are logged are those of all ranks, and every decision is taken
from numbers that all share. (Times and memory are rank 0's; `ranks` in metrics.jsonl has all.)

Output: a line every few steps, out_dir/metrics.jsonl, checkpoints that any mode at any world size
can resume, a text that the model wrote, and as the last line of stdout `RESULT {json}`, whose
param_sha256 is equal for runs that produced the same bits.

Cost: two small all-reduces a step, for losses and for timings, and the norm of the parameters,
which is one more where they are sharded. Twice a step the CPU waits for an accelerator, which then
is idle until the CPU goes on: before the update, for the loss and the norm of the gradients, as a
step in which they are not finite is skipped; and after it, for the time that it took.

To debug, put breakpoint() anywhere and run one process: `python train.py --mode zero3` goes through
the functions of the stage, too. On several ranks breakpoint() fails, since they share one stdin:
there write torch.distributed.breakpoint(0), which stops rank 0 while the others wait, type `up` to
reach your line, and give yourself --timeout_s 3600.
"""

import argparse
import collections
import contextlib
import dataclasses
import difflib
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
import traceback
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from checkpoint import local, sharded_state
from data import (block_order, choose_tokenizer, count_blocks, encode_prompt, fingerprint,
                  load_tokenizer, load_tokens, read_blocks, ReadAhead, tokenize)
from ddp import clip_gradients_, DDP, total_norm
from model import GPT, GPTConfig, PRESETS
from oracle import average_gradients, broadcast_parameters
from runs import (check_ranks_agree, checkpoint_of, choose_device, count, from_rank_0, gather,
                  hidden, is_checkpoint, is_explained, leave, Lock, Metrics, newest_first,
                  note_signals, on_rank_0, one_line, problem_of, publish, read_record, refuse,
                  rewind, say, say_sharing, start_process_group, STOP_SIGNALS,
                  take_deterministic_kernels, tidy, together)
from zero import Zero1, Zero2, Zero3

# -------------------------------------------------------------------------------------------------
# flags

STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
WITH_MUON = ("single", "naive", "ddp", *STAGES, "torch-ddp")  # modes that keep matrices whole
MODES = (*WITH_MUON, "torch-zero1", "torch-fsdp-kept", "torch-fsdp")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size")
ZERO = ("mode", STAGES)  # what a flag needs that only stages have


def flag(default, help, least=0, most=1e18, choices=(), needs=None, once=False):
    """A field of Config: a flag with this default and this text in --help.

    least, most   of a number
    choices       words that it can be; a number can be these, too
    needs         (another flag, some of its values): else this one does nothing, and is refused
    once          a run that resumes does not take it from its checkpoint
    """
    about = dict(help=help, least=least, most=most, choices=choices, needs=needs, once=once)
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass
class Config:
    """Each field is a flag. Where the default is None, brackets say what is taken then."""
    # run
    mode: str = flag(None, "who averages gradients [single; under torchrun ddp]", choices=MODES)
    max_steps: int = flag(800, "optimizer steps in all, also those before a resume", least=1,
                          most=99_999_999)  # a checkpoint's name has eight digits
    seed: int = flag(1337, "of the weights, the order of samples and the sample text")
    out_dir: str = flag("out", "for checkpoints, metrics.jsonl, tokens; else the one --resume PATH "
                        "is in", once=True)
    device: str = flag(None, "cpu, or an accelerator such as cuda [the latter, if any]", once=True)
    deterministic: bool = flag(False, "only kernels that have the same bits in every run; slower")
    threads: int = flag(1, "CPU threads per rank; another number may change the last digits",
                        least=1, most=1024)
    timeout_s: float = flag(120.0, "seconds after which a rank that waits for another one gives up",
                            least=1e-9, most=1e6, once=True)
    check_interval: int = flag(100, "steps between checks that ranks have equal parameters; or 0")
    # checkpoints
    save_interval: int = flag(100, "steps between checkpoints; also the last and the best; 0: none")
    keep_last: int = flag(2, "newest checkpoints that are kept; the best one is kept, too", least=1)
    resume: str = flag(None, "auto: the newest in out_dir, if any; or PATH, such as out/best",
                       once=True)
    export_hf: str = flag(None, "folder for transformers, without tokenizer; needs safetensors",
                          once=True)
    # data
    dataset: str = flag("stdlib", "Python's library; a text; a folder of train.bin and val.bin")
    tokenizer: str = flag("bytes", "bytes, or a tiktoken name such as gpt2 or o200k_base")
    # model
    init_from: str = flag(None, "folder of a Llama of transformers, to start from its weights")
    model: str = flag("tiny", "preset of sizes", choices=PRESETS)
    n_layer: int = flag(None, "blocks; this and the next four override the preset", least=1)
    n_head: int = flag(None, "query heads", least=1)
    n_kv_head: int = flag(None, "key and value heads, a divisor of n_head", least=1)
    n_embd: int = flag(None, "width", least=1)
    block_size: int = flag(None, "tokens per sequence", least=1)
    activation_checkpointing: bool = flag(False, "recompute blocks in the backward: less memory")
    compile: bool = flag(False, "torch.compile each block; needs a C++ compiler on a CPU")
    # batch
    global_batch_size: int = flag(16, "sequences per step, over all ranks and micro-steps", least=1)
    micro_batch_size: int = flag(4, "sequences of a rank's forward; auto: the most that fit",
                                 least=1, choices=("auto",))
    memory_limit_gb: float = flag(None, "GB of a rank [its share of an accelerator]",
                                  needs=("micro_batch_size", ("auto",)))
    # precision
    dtype: str = flag("fp32", "of the computation, by autocast; fp16 with a gradient scaler",
                      choices=DTYPES)
    param_dtype: str = flag(None, "in which parameters are gathered and used [fp32]",
                            choices=DTYPES, needs=ZERO)
    reduce_dtype: str = flag(None, "in which gradients are sent [fp32]", choices=DTYPES,
                             needs=ZERO)
    # data parallelism
    bucket_cap_mb: float = flag(25.0, "MB that are sent together; not in naive, torch-fsdp",
                                least=1e-9, most=1e6)
    find_unused_parameters: bool = flag(False, "ddp, torch-ddp: some may have no gradient")
    comm_hook: str = flag(None, "ddp: compress gradients; powersgd, topk: after the warm-up",
                          choices=("bf16", "powersgd", "topk", "hierarchical"),
                          needs=("mode", ("ddp",)))
    topk_ratio: float = flag(0.01, "the part of the elements that is sent", least=1e-9, most=1,
                             needs=("comm_hook", ("topk",)))
    node_size: int = flag(None, "ranks per node [as torchrun has it]", least=1,
                          needs=("comm_hook", ("hierarchical",)))
    shard_size: int = flag(None, "ranks among which the state is divided [all]", least=1,
                           needs=ZERO)
    offload: bool = flag(False, "keep shards, gradients and optimizer on the CPU", needs=ZERO)
    # optimizer
    optimizer: str = flag("adamw", "muon: Muon for the matrices of blocks, AdamW for the rest",
                          choices=("adamw", "muon"), needs=("mode", WITH_MUON))
    lr: float = flag(3e-3, "peak learning rate")
    min_lr: float = flag(None, "learning rate at the end of the cosine [lr / 10]")
    warmup_steps: int = flag(40, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "on tensors of two or more dimensions only")
    beta1: float = flag(0.9, "AdamW: decay of the mean of gradients", most=0.99999)
    beta2: float = flag(0.99, "AdamW: decay of the mean of squared gradients", most=0.99999)
    grad_clip: float = flag(1.0, "largest norm of all gradients together, 0 for no limit")
    # evaluation
    eval_interval: int = flag(100, "steps between evaluations; the last step has one, too; or 0")
    eval_steps: int = flag(80, "sequences per evaluation, divided among ranks; 0: no evaluation")
    eval_only: bool = flag(False, "no training: loss and text of --resume or --init_from",
                           once=True)
    prompt: str = flag("\n", "what the sample text continues, taken literally", once=True)
    sample_tokens: int = flag(256, "tokens of the sample text, after the prompt; 0: no text")
    # watching
    log_interval: int = flag(10, "steps between printed lines; metrics.jsonl has every step")
    trace: bool = flag(False, "print what the third step sends, waits for and frees", once=True,
                       needs=("profile", (0,)))
    profile: int = flag(0, "steps, from the third on, to out_dir/trace_rank0.json for "
                        "ui.perfetto.dev", once=True)
    tensorboard: bool = flag(False, "write to out_dir/tensorboard; needs the package tensorboard")
    wandb: bool = flag(False, "log to Weights & Biases; needs the package wandb")


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "init_from": "safetensors",
            "export_hf": "safetensors"}
# What an evaluation does not take from a checkpoint either: it may be on another machine, and on
# fewer ranks.
NOT_TO_EVALUATE = ("compile", "comm_hook", "shard_size", "tensorboard", "wandb")


def read_flags(argv):
    """{flag: value} of those that are given. A mistake ends the process."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__,
                                     allow_abbrev=False, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse
    names = []
    for field in dataclasses.fields(Config):
        text = field.metadata["help"]
        if field.metadata["choices"]:
            text += f": {', '.join(field.metadata['choices'])}"
        if field.default is not None:
            text += f" [{field.default!r}]"
        options = dict(action=argparse.BooleanOptionalAction)
        if field.type is not bool:
            options = dict(type=functools.partial(read_value, field), metavar=field.type.__name__)
        names.append(f"--{field.name}")
        parser.add_argument(names[-1], help=text, **options)
    given, unknown = parser.parse_known_args(argv)
    for word in unknown:
        similar = difflib.get_close_matches(word.partition("=")[0], names, n=2)
        such_as = f", such as {' '.join(similar)}" if similar else ""
        refuse(f"there is no flag {word}; --help lists all{such_as}")
    return vars(given)


def read_value(field, text):
    """What a flag's text says, within its limits. For argparse, which adds the flag's name."""
    about = field.metadata
    is_any_text = field.type is str and not about["choices"]
    if text in about["choices"] or (is_any_text and (text or field.name == "prompt")):
        return text
    possible = [*about["choices"]]
    if is_any_text:
        possible.append("texts that are not empty")
    if field.type is not str:
        kind = "whole numbers" if field.type is int else "numbers"
        possible.append(f"{kind} from {about['least']:g} to {about['most']:g}")
        with contextlib.suppress(ValueError):
            value = field.type(text)
            if about["least"] <= value <= about["most"]:  # nan is not
                return value
    raise argparse.ArgumentTypeError(f"{text} is not one of: {', '.join(possible)}")


def complete(given, record, device):
    """The flags that are given -> Config. The others are as in the record of the checkpoint from
    which the run goes on, or as in the table. Refuses what contradicts itself, or cannot be here.
    """
    saved = {}
    if record is not None:
        for name, value in record["flags"].items():
            if hasattr(Config, name):  # an earlier version may have had other flags
                saved[name] = value
    if given.get("eval_only"):
        for name in NOT_TO_EVALUATE:
            saved.pop(name, None)
    if saved.get("mode") == "single":
        del saved["mode"]  # the default of one process, and impossible for more
    config = Config(**(saved | given))
    if config.mode is None:
        config.mode = "ddp" if "RANK" in os.environ else "single"
    for field in dataclasses.fields(Config):
        if field.metadata["needs"] is None:
            continue
        other, values = field.metadata["needs"]
        if getattr(config, other) not in values:
            if given.get(field.name, field.default) != field.default:
                raise SystemExit(f"--{field.name} needs --{other} {' or '.join(map(str, values))}")
            setattr(config, field.name, field.default)  # saved, but of no use any more
    check(config, device)
    return config


def check(config, device):
    """Refuse flags that contradict each other, or that this machine cannot serve."""
    W, B, m = dist.get_world_size(), config.global_batch_size, config.micro_batch_size
    least = W if m == "auto" else W * m
    ranks = count(W, "rank")
    refusals = (
        (config.mode == "single" and W > 1,
         f"--mode single is one process, but torchrun started {W}"),
        (B % least > 0 and not config.eval_only,
         f"--global_batch_size {B} in micro batches of {m} does not divide among {ranks}"),
        (config.shard_size is not None and W % config.shard_size > 0,
         f"--shard_size {config.shard_size} does not divide {ranks}"),
        (config.node_size is not None and W % config.node_size > 0,
         f"--node_size {config.node_size} does not divide {ranks}"),
        (config.dtype == "fp16" and config.comm_hook in ("powersgd", "topk"),
         f"--dtype fp16 and --comm_hook {config.comm_hook}: choose bf16"),
        (config.min_lr is not None and config.min_lr > config.lr,
         f"--min_lr {config.min_lr} is above --lr {config.lr}"),
        (config.eval_only and (config.trace or config.profile > 0),
         "--trace and --profile are for steps, and --eval_only makes none"),
    )
    for is_wrong, text in refusals:
        if is_wrong:
            raise SystemExit(text)
    for name, package in PACKAGES.items():
        if getattr(config, name) and not importlib.util.find_spec(package):
            raise SystemExit(f"--{name} needs a package: pip install {package}")
    if config.compile and device.type == "cpu":
        check_compiler()
    if config.export_hf:
        os.makedirs(config.export_hf, exist_ok=True)


def check_compiler():
    """Refuse where torch.compile lacks what it needs on a CPU. (In the first step this would be a
    traceback. The function is private, but asks what torch itself will ask.)"""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError as error:
        raise SystemExit("--compile needs a C++ compiler: install g++ or clang, or set CXX to the "
                         "one that you have") from error


# -------------------------------------------------------------------------------------------------
# a run

MAX_SKIPPED_STEPS = 20  # in a row, for a loss or gradients that are not finite; then a run stops


@dataclasses.dataclass
class Run:
    """What a run works with, and how far it is."""
    config: Config
    device: torch.device
    out_dir: pathlib.Path
    lock: Lock
    tokenizer: object  # None where it is not needed yet
    gpt: GPT  # without any wrapper
    model: torch.nn.Module  # what the mode makes of it
    optimizers: list
    scaler: ShardedGradScaler
    tokens: np.ndarray
    val_tokens: np.ndarray
    facts: dict  # what must be the same where a run goes on
    progress: dict  # what every checkpoint has beside tensors, facts and flags
    peak_flops: float  # FLOP/s of all ranks; those of 16-bit units, whatever the run computes in
    recent: collections.deque  # the metrics of the last steps
    saved: bool = True  # whether the last checkpoint could be written


def train(given, progress):
    """A run, by the flags that are given -> exit status. A collective.

    progress: the step, the best one and its loss, how many steps in a row were skipped, the metrics
    of the last step, the id that W&B knows the run by. `main` names the step in errors.
    """
    run = prepare(given, progress)
    status = None if run.config.eval_only else loop(run)
    if status is None:
        status = finish(run)
    return status


def prepare(given, progress):
    """Meet the other ranks, take out_dir, find what to go on from, make all that a run needs."""
    # 1) ranks
    start = Config(**given)
    device = choose_device(start.device)
    start_process_group(device, start.timeout_s)
    say_sharing(device.type)

    # 2) flags, which a checkpoint may have: only rank 0 looks for one, and once
    out_dir = pathlib.Path(start.out_dir).resolve()
    lock = Lock(out_dir)
    folder, record = on_rank_0(find_checkpoint, start, lock)
    config = together(complete, given, record, device)
    torch.set_num_threads(config.threads)
    if config.deterministic:
        take_deterministic_kernels()
    if config.save_interval > 0 and not config.eval_only:
        together(check_shared, lock, from_rank_0(lock.facts))

    # 3) model and data, which must be the same on all ranks, and in the run that goes on
    tokenizer, vocab_size = together(choose_tokenizer, config)
    gpt = together(build_gpt, config, vocab_size, record)
    config.block_size = gpt.config.block_size  # that of the preset or folder, unless given
    together(check_prompt, config, tokenizer, gpt)
    source = on_rank_0(tokenize, config, tokenizer, say)
    tokens, val_tokens = together(load_tokens, config, source, gpt.config.vocab_size)
    facts = facts_of_run(config, gpt, tokens)
    # The fact `dataset`, a hash, takes the place of --dataset's path, which may be another one on
    # another host.
    check_ranks_agree(vars(config) | facts | dict(
        validation=fingerprint(val_tokens), torch=torch.__version__, numpy=np.__version__))
    check_facts(folder, record, facts, config)
    if config.micro_batch_size == "auto":
        from extras import auto
        config.micro_batch_size = auto.largest_micro_batch(config, gpt.config, device)

    # 4) `model`, what the mode makes of gpt; optimizers over the parameters that this leaves
    model = wrap(gpt, config, device)
    optimizers = [] if config.eval_only else make_optimizers(model, config)
    scaler = make_scaler(config, device)
    progress["run_id"] = os.urandom(8).hex()
    peak = introduce(gpt, len(tokens), config, device)
    run = Run(config, device, out_dir, lock, tokenizer, gpt, model, optimizers, scaler, tokens,
              val_tokens, facts, progress, peak, collections.deque(maxlen=100))
    if record is not None:
        load(run, folder, record)
    if not config.eval_only:
        begin(run, folder)
    return run


def loop(run):
    """Make the steps that are left -> exit status if a signal has come, else None. A collective."""
    config, progress = run.config, run.progress
    batches = ReadAhead(run.tokens, progress["step"] + 1, config, run.device)
    signals = []  # numbers; one or more on any rank: all finish the step, save, stop
    if progress["step"] == config.max_steps:
        say(f"all {config.max_steps} steps have been made: --max_steps is for more")
    note_signals(signals)
    with contextlib.ExitStack() as stack:
        metrics, watchers = start_watchers(stack, run)
        for step in range(progress["step"] + 1, config.max_steps + 1):
            # forward, backward and update
            progress["step"] = step
            lr = set_lr(run.optimizers, step, config)
            measured, stop = train_step(run.model, run.optimizers, run.scaler,
                                        batches.of_next_step(), signals, config)
            entry = dict(step=step, lr=lr, **measured)
            progress["skipped"] = (progress["skipped"] + 1) if entry["skipped"] else 0
            if is_due(step, config.check_interval):
                compare_parameters(run.model)

            # evaluate, on all ranks
            best = {}
            if config.eval_steps and is_due(step, config.eval_interval, also=config.max_steps):
                entry["val_loss"] = evaluate(run)
                if entry["val_loss"] < progress["best_val_loss"]:
                    best = dict(best_step=step, best_val_loss=entry["val_loss"])

            # log, on rank 0; stop if too many steps in a row were skipped
            log_step(entry, run)
            for watch in watchers:
                watch(progress["entry"])
            run.lock.sign(step=step)
            if progress["skipped"] == MAX_SKIPPED_STEPS:
                raise SystemExit(f"step {step}: {MAX_SKIPPED_STEPS} steps in a row not finite: "
                                 "lower --lr")

            # write a checkpoint, on all ranks; a skipped step must not push out those before it,
            # but the last step has one. Then stop, if some rank was told to
            is_time = is_due(step, config.save_interval) and not entry["skipped"]
            is_last = step == config.max_steps
            if config.save_interval and (is_time or is_last or best or stop):
                save(run, metrics, best)
            if stop:
                break
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    number = max(gather(max(signals, default=0)))
    if number == 0:
        return None
    how = "; go on with --resume auto" if config.save_interval and run.saved else ""
    say(f"train.py: stopped by a signal after step {progress['step']}{how}", sys.stderr)
    return 128 + number if run.saved else 1


def finish(run):
    """What the model has learned: its loss, a text, the result, weights for transformers -> exit
    status. A collective."""
    config, progress = run.config, run.progress
    result = result_of(run)
    if config.eval_only and config.eval_steps:
        result["val_loss"] = evaluate(run)
        say(f"step {progress['step']} | val loss {result['val_loss']:.4f}")
    is_finite = progress["entry"].get("param_norm", 0.0) is not None  # None stands for nan
    if config.sample_tokens and is_finite:
        say(f"sample:\n{sample(run.gpt, run.tokenizer, config, run.device)}")
    say("RESULT " + json.dumps(finite(result)))
    if config.export_hf:
        from extras import llama
        llama.export(run.model, run.gpt.config, config.export_hf, run.tokenizer.eot_token)
    return 0 if run.saved else 1


def is_due(step, interval, also=None):
    """Whether something happens after a step, every interval steps and after step `also`; with
    interval 0 never."""
    return interval > 0 and (step == also or step % interval == 0)


# -------------------------------------------------------------------------------------------------
# where a run goes on


def find_checkpoint(start, lock):
    """Rank 0: take out_dir, unless this is an evaluation -> the checkpoint to go on from, and its
    record; None, None to begin anew. Refuses where all that may be taken are damaged.

    A run that torchrun has started again goes on from its own newest checkpoint, whatever --resume
    says, once it has begun: what lies in out_dir before that is of an earlier run.
    """
    out_dir = lock.path.parent
    is_auto = start.resume == "auto"
    named = []
    if start.resume not in (None, "auto"):
        named.append(pathlib.Path(start.resume).resolve())
    if not start.eval_only:
        is_auto = is_auto or lock.is_restart()
        if named and not is_auto and not is_checkpoint(named[0]):  # before anything is written
            raise SystemExit(f"--resume {start.resume}: {named[0]} {problem_of(named[0])}")
        goes_on_here = is_auto or out_dir in [folder.parent for folder in named]
        problem = lock.take(start.timeout_s if goes_on_here else 0, say)
        if problem is not None:
            say(f"train.py: {problem}", sys.stderr)
    folders = newest_first(out_dir) if is_auto else []
    folders = [folder for folder in folders if folder not in named] + named
    for folder in folders:
        problem = problem_of(folder)
        if problem is None:
            record = read_record(folder)
            if "flags" not in record:
                raise SystemExit(f"{folder} was written by an earlier version of train.py")
            # A checkpoint from before that field is of a model without rows that no token uses.
            record["facts"].setdefault("pad_vocab_size_to", 1)
            return folder, record
        if folder == folders[-1]:
            raise SystemExit(f"{folder}, from which this run is to go on, {problem}")
        say(f"train.py: {folder} {problem}; falling back to the checkpoint before", sys.stderr)
    if start.eval_only and start.resume is None and start.init_from is None:
        raise SystemExit("--eval_only needs --resume or --init_from, such as --resume out/best")
    if start.eval_only and start.init_from is None:
        raise SystemExit(f"--eval_only: there is no checkpoint in {out_dir}")
    if start.resume == "auto":
        say(f"no checkpoint in {out_dir}: a new run begins")
    return None, None


def check_shared(lock, facts):
    """Refuse where this rank's out_dir is not the folder in which rank 0 has written these facts:
    each rank writes its part of a checkpoint there."""
    if lock.holder() != facts:
        raise SystemExit(f"--out_dir {lock.path.parent} is another folder than rank 0's, or rank 0 "
                         "cannot write there: all ranks need the same one")


def facts_of_run(config, gpt, tokens):
    """{name: value} of what must stay as it is when a run resumes; of an evaluation the model
    alone."""
    facts = dict(vars(gpt.config))
    del facts["activation_checkpointing"]  # changes no bit
    if config.eval_only:
        del facts["seed"]
        return facts
    return facts | dict(global_batch_size=config.global_batch_size, dataset=fingerprint(tokens),
                        optimizer=config.optimizer)


def check_facts(folder, record, facts, config):
    """Refuse a checkpoint that is of another run, or has made more steps than --max_steps. record:
    None without one."""
    if record is None:
        return
    for name, value in facts.items():
        before = record["facts"].get(name)
        if before != value:
            raise SystemExit(f"{folder} has {name} {before}, and this run {value}")
    if not config.eval_only and record["step"] > config.max_steps:
        raise SystemExit(f"--max_steps {config.max_steps} is less than the steps of {folder}")


def begin(run, folder):
    """From here on out_dir is this run's: bring it to where it was at the checkpoint in folder. One
    that lies elsewhere, or none, begins a new run. A collective."""
    step = best_step = 0
    if folder is not None and folder.parent == run.out_dir:
        step, best_step = run.progress["step"], run.progress["best_step"]
    moved = on_rank_0(rewind, run.out_dir, step, best_step)
    if moved is not None:
        say(moved)
    run.lock.sign(step=step, has_begun=True)
    if not from_rank_0((run.out_dir / "best").exists()):  # none yet, or it is in another folder
        run.progress |= dict(best_step=0, best_val_loss=math.inf)


def load(run, folder, record):
    """Go on from a checkpoint. A collective."""
    try:
        dcp.load(sharded_state(run.model, *run.optimizers), checkpoint_id=folder)
        if run.config.comm_hook == "topk":
            from extras import comm_hooks
            comm_hooks.load_residuals(run.model, folder)
    except dcp.CheckpointException as error:
        raise SystemExit(f"{folder}: {last_line(error)}") from error
    for name in run.progress:
        run.progress[name] = record[name]
    if record["scaler"]:  # empty, unless that run had fp16, too
        run.scaler.load_state_dict(record["scaler"])
    if run.config.comm_hook in ("topk", "powersgd"):
        run.model.comm_state.iter = run.progress["step"]
    ranks = count(dist.get_world_size(), "rank")
    say(f"resumed from {folder}, after step {record['step']}, on {ranks} "
        f"({record['world_size']} before)")


def save(run, metrics, best):
    """Write out_dir/step_... Where that fails, as on a full disk, it is said, earlier checkpoints
    are as they were, and the run goes on: the next one may succeed. A collective.

    best: best_step and best_val_loss, if this is the best one so far; else {}.
    """
    config, progress = run.config, run.progress
    folder = checkpoint_of(run.out_dir, progress["step"])
    record = dict(progress | best, facts=run.facts, scaler=run.scaler.state_dict(),
                  world_size=dist.get_world_size(), flags=flags_to_save(config))
    tensors = sharded_state(run.model, *run.optimizers)
    if config.comm_hook == "topk":
        from extras import comm_hooks
        tensors |= comm_hooks.residuals(run.model)
    problem = None
    try:
        dcp.save(tensors, checkpoint_id=hidden(folder))
        on_rank_0(run.lock.check)
        on_rank_0(publish_and_tidy, folder, record, metrics)
    except (dcp.CheckpointException, SystemExit) as error:
        problem = last_line(error)
    run.saved = from_rank_0(folder.exists())
    if run.saved:
        progress |= best
    else:
        on_rank_0(shutil.rmtree, hidden(folder), True)
    if problem is not None:
        what = "is there, but older ones are not tidied up" if run.saved else (
            "failed, earlier ones are as they were")
        say(f"train.py: step {progress['step']}: the checkpoint {what}: {problem} (is the disk "
            "full, or gone?)", sys.stderr)


def publish_and_tidy(folder, record, metrics):
    """Rank 0: complete a checkpoint, and remove old ones. A run that resumes keeps the metrics up
    to there, so these must be on disk before."""
    metrics.sync()
    publish(folder, record)
    tidy(folder.parent, record["best_step"], record["flags"]["keep_last"])


def last_line(error):
    """dcp's errors have the tracebacks of all ranks, and say at last what has happened."""
    return str(error).strip().splitlines()[-1]


def flags_to_save(config):
    """Those that a run which resumes takes, in another working folder, too."""
    saved = dict(vars(config))
    for field in dataclasses.fields(Config):
        if field.metadata["once"]:
            del saved[field.name]
    if config.dataset != "stdlib":
        saved["dataset"] = os.path.abspath(config.dataset)
    if config.init_from:
        saved["init_from"] = os.path.abspath(config.init_from)
    return saved


# -------------------------------------------------------------------------------------------------
# a step


def train_step(model, optimizers, scaler, batches, signals, config):
    """Make a step with this rank's micro batches -> (what metrics.jsonl has of it, whether some
    rank had signals). A collective.

    If loss or gradients are not finite on some rank, all ranks skip the update. Decisions are taken
    from `sums`, which is the same everywhere; only times and memory differ between ranks.
    """
    # forward and backward, micro-step by micro-step
    start_s = time.perf_counter()
    exposed_before_s = model.exposed_s  # waited for communication so far
    rank, W = dist.get_rank(), dist.get_world_size()
    n = config.global_batch_size // (config.micro_batch_size * W)
    losses = []
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    for micro_step, (x, y) in enumerate(batches, start=1):
        with exchanging(model, config, is_last=micro_step == n):
            with autocast(config.dtype, x.device):
                loss = model(x, y)[1]  # no name keeps the logits, which are large
            scaler.scale(loss).backward()  # not loss / n, which would round
        losses.append(loss.detach())
    if config.mode == "naive":
        model.average_gradients()

    # take the mean of n W micro batches and clip it, on all ranks by the same factor
    device = loss.device
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    norm = clip_gradients_(gradients, config.grad_clip or math.inf, model.shard_group,
                           divide_by=n * W / model.gradient_divide_factor).to(device)

    # Add up losses over ranks, and in the same collective what all ranks must know. Each micro
    # batch has a place, in the order of the data. Other ranks' places are 0, so the sum over ranks
    # rounds nothing, and the logged loss does not depend on W. All of it is read at once. This is
    # the first time that the CPU waits for an accelerator.
    sums = torch.zeros(n * W + 2, dtype=torch.float64, device=device)
    sums[rank:n * W:W] = torch.stack(losses)
    sums[-2] = ~norm.isfinite()
    sums[-1] = len(signals)
    dist.all_reduce(sums)
    *losses, n_not_finite, n_signals, grad_norm = torch.cat((sums, norm.view(1))).tolist()
    loss = math.fsum(losses) / len(losses)
    skipped = n_not_finite > 0 or not math.isfinite(loss)

    # update the weights
    if not skipped:
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    weights = [local(p.detach()) for p in model.parameters()]
    param_norm = total_norm(weights, model.shard_group).to(device)

    # What the step took, on all ranks. It is read when the update has been made: the second time.
    own = dict(step_ms=1e3 * (time.perf_counter() - start_s),
               comm_exposed_ms=1e3 * (model.exposed_s - exposed_before_s),
               mem_bytes=peak_mem_bytes(device))
    table = of_all_ranks(own.values(), device)
    *numbers, param_norm = torch.cat((table.flatten(), param_norm.view(1))).tolist()
    step_s = time.perf_counter() - start_s
    own["step_ms"] = 1e3 * step_s
    entry = dict(loss=loss, grad_norm=grad_norm, param_norm=param_norm, skipped=skipped, **own)
    entry["tokens_per_sec"] = config.global_batch_size * config.block_size / step_s
    entry["ranks"] = over_ranks(own, np.reshape(numbers, (len(own), W)))
    return entry, n_signals > 0


def autocast(dtype, device):
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32")


def lr_at(step, config):
    """Learning rate of a step, from 1 on: linear warm-up to lr, then a cosine from lr to min_lr."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    decay_steps = max(1, config.max_steps - config.warmup_steps)
    done = (step - 1 - config.warmup_steps) / decay_steps
    coefficient = 0.5 * (1 + math.cos(math.pi * done))  # falls from 1 towards 0
    return min_lr + coefficient * (config.lr - min_lr)


def set_lr(optimizers, step, config):
    """Set the learning rate of a step for all parameters -> that rate."""
    lr = lr_at(step, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
    return lr


# -------------------------------------------------------------------------------------------------
# the modes: all that differs between them


class Bare(torch.nn.Module):
    """A module as it is, for --mode single and naive, with what the loop asks of every wrapper:

    shard_group             the ranks over which parameters are sharded; None: each has all of them
    gradient_divide_factor  what the sum of gradients over ranks has been divided by
    exposed_s               seconds that this rank has waited for communication; nan: not known
    full_parameters()       yields (name, whole parameter); a collective where they are sharded
    no_sync()               a context in which gradients are not exchanged
    """
    shard_group = None
    gradient_divide_factor = 1

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.exposed_s = 0.0 if dist.get_backend() == "gloo" else math.nan
        broadcast_parameters(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def full_parameters(self):
        for name, p in self.module.named_parameters():
            yield name, p.detach()

    def no_sync(self):
        return contextlib.nullcontext()

    def average_gradients(self):
        """--mode naive, after the last backward: a collective for each parameter. It sums."""
        start_s = time.perf_counter()
        average_gradients(self.module, divide_factor=1)
        self.exposed_s += time.perf_counter() - start_s


def wrap(gpt, config, device):
    """gpt -> what the loop calls, which has all that `Bare` has."""
    if config.compile:
        gpt.compile_blocks()
    if config.mode in ("single", "naive"):
        return Bare(gpt.to(device))
    # None is 25 MB too, but only with None is torch's first bucket small.
    bucket_cap_mb = None if config.bucket_cap_mb == 25 else config.bucket_cap_mb
    if needs_dropin(config):
        model = wrap_by_dropin(gpt, config, device, bucket_cap_mb)
    elif config.mode in STAGES:
        model = STAGES[config.mode](gpt.to(device), bucket_cap_mb=bucket_cap_mb,
                                    param_dtype=DTYPES.get(config.param_dtype))
    elif config.mode == "ddp":
        model = DDP(gpt.to(device), bucket_cap_mb=bucket_cap_mb)
    else:
        from extras import torchs
        return torchs.wrap(gpt.to(device), config, bucket_cap_mb)
    if config.comm_hook is None:
        model.set_gradient_divide_factor(1)  # a sum over ranks: `train_step` divides
    else:  # a hook takes the mean over ranks itself
        from extras import comm_hooks
        comm_hooks.register(model, config)
    return model


def needs_dropin(config):
    """Whether a flag asks our own modes for more than ddp.py and zero.py have."""
    if config.mode in STAGES:
        has_muon = config.optimizer == "muon"
        return has_muon or config.offload or bool(config.shard_size or config.reduce_dtype)
    return config.mode == "ddp" and (config.find_unused_parameters or config.comm_hook is not None)


def wrap_by_dropin(gpt, config, device, bucket_cap_mb):
    import dropin

    if config.mode == "ddp":
        return dropin.DDP(gpt.to(device), bucket_cap_mb=bucket_cap_mb,
                          find_unused_parameters=config.find_unused_parameters)
    kind = {"zero1": dropin.Zero1, "zero2": dropin.Zero2, "zero3": dropin.Zero3}[config.mode]
    for_muon = [p for name, p in gpt.named_parameters() if takes_muon(name, p, config)]
    return kind(gpt, param_dtype=DTYPES.get(config.param_dtype),
                reduce_dtype=DTYPES.get(config.reduce_dtype), shard_size=config.shard_size,
                offload=config.offload, uncut=for_muon, bucket_cap_mb=bucket_cap_mb)


def exchanging(model, config, is_last):
    """A context for forward and backward of a micro-step: gradients are exchanged in the last one.

    But stages 2 and 3 always exchange them: they have no room for whole gradients, and so their
    bits are those of one process, however micro batches are divided among ranks. So does stage 1 in
    16 bits, in which gradients must not add up. (dropin's stages need not gather parameters again
    that no step has changed, if they know.)
    """
    always = config.mode in ("zero2", "zero3") and config.shard_size != 1
    if config.mode in STAGES and needs_dropin(config):
        model.set_is_last_backward(is_last)
    elif config.mode == "zero1" and config.param_dtype in ("bf16", "fp16"):
        always = True
    return contextlib.nullcontext() if is_last or always else model.no_sync()


# -------------------------------------------------------------------------------------------------
# model and optimizers


def build_gpt(config, vocab_size, record):
    """The GPT: a preset, or the folder --init_from, each size overridden where its flag is given.

    For dropin's stages it is on the meta device, and its wrapper gives it values unit by unit, so
    that no rank ever holds all of it. record: of the checkpoint that is loaded later, or None.
    """
    sizes = dict(PRESETS[config.model], vocab_size=vocab_size)
    if config.init_from and record is not None:  # that folder may be gone
        fields = {field.name for field in dataclasses.fields(GPTConfig)}
        sizes = {name: value for name, value in record["facts"].items() if name in fields}
    elif config.init_from:
        from extras import llama
        sizes = llama.read_sizes(config)
        if sizes["vocab_size"] != vocab_size:
            say(f"--init_from {config.init_from} knows {sizes['vocab_size']} tokens, and the "
                f"tokenizer {vocab_size}: its weights are for other ones")
    for name in SIZES:
        if getattr(config, name) is not None:
            sizes[name] = getattr(config, name)
    if record is not None:
        sizes["pad_vocab_size_to"] = record["facts"]["pad_vocab_size_to"]
    sizes |= dict(seed=config.seed, activation_checkpointing=config.activation_checkpointing)
    try:
        gpt_config = GPTConfig(**sizes)
    except ValueError as error:  # sizes that do not fit
        raise SystemExit(str(error)) from error
    gpt = build_on_device(gpt_config, config)
    if config.init_from and record is None:
        llama.begin_with(gpt, config.init_from)
    return gpt


def build_on_device(gpt_config, config):
    is_on_meta = config.mode in STAGES and needs_dropin(config)
    with torch.device("meta" if is_on_meta else "cpu"):
        return GPT(gpt_config)


def takes_muon(name, p, config):
    """Whether Muon trains p, a parameter or its shard, which has as many dimensions. The embedding
    is a matrix too, but a batch has gradients of few of its rows.

    qkv and gate_up are one matrix for Muon, though they hold three and two: their views would be
    parameters that ZeRO does not know.
    """
    return config.optimizer == "muon" and "blocks." in name and p.dim() == 2


# Where fused AdamW has the same bits for a tensor as for its slices. Its CPU kernel rounds the end
# of a tensor differently. `pytest tests/test_devices.py -k fused` tries the device that is there.
FUSED_ADAMW = ("cuda",)


def make_optimizers(model, config):
    """[AdamW], which decays matrices only, as shards keep their dimensions; with --optimizer muon
    [AdamW, Muon], the latter for the matrices of blocks. (Of one that you add state has to be
    tensors, as `sharded_state` saves no others.)"""
    matrices, others, for_muon = [], [], []
    for name, p in model.named_parameters():
        if takes_muon(name, p, config):
            for_muon.append(p)
        elif p.dim() >= 2:
            matrices.append(p)
        else:
            others.append(p)
    groups = [dict(params=matrices, weight_decay=config.weight_decay),
              dict(params=others, weight_decay=0.0)]
    kind = others[0].device.type
    fused = kind in FUSED_ADAMW and not has_scaler(config)
    # foreach on an accelerator: else each tensor takes kernels of its own.
    options = dict(lr=config.lr, betas=(config.beta1, config.beta2), fused=fused,
                   foreach=kind != "cpu" and not fused)
    if config.mode == "torch-zero1":
        from extras import torchs
        return [torchs.zero1_adamw(groups, options)]
    optimizers = [torch.optim.AdamW(groups, **options)]
    if config.optimizer == "muon":
        # By this factor its updates are as large as AdamW's, so one --lr does for both: Moonlight,
        # arXiv 2502.16982, section 2.2.
        optimizers.append(torch.optim.Muon(for_muon, lr=config.lr, adjust_lr_fn="match_rms_adamw",
                                           weight_decay=config.weight_decay))
    return optimizers


def make_scaler(config, device):
    """Loss scaling for fp16, off for other dtypes. Its check for inf is reduced over all ranks: if
    one skips a step, all do, and all halve the scale. It begins with torch's number, 2**16, divided
    by N, rounded up to a power of two: losses of a step's N micro batches are summed, not averaged.
    """
    N = max(1, config.global_batch_size // config.micro_batch_size)
    return ShardedGradScaler(device.type, 2.0 ** (16 - (N - 1).bit_length()),
                             enabled=has_scaler(config))


def has_scaler(config):
    """Whether losses are scaled. Fused AdamW cannot be used then (torch 2.13): ShardedGradScaler
    hands it a number of shape (1,), and it subtracts that from steps of shape ()."""
    return "fp16" in (config.dtype, config.param_dtype)


# -------------------------------------------------------------------------------------------------
# evaluation, and the end of a run


@torch.no_grad()
def evaluate(run):
    """Mean loss over eval_steps blocks of validation tokens, divided among the ranks. A collective.

    The blocks are the same in every run, whatever its seed, and each has a loss of its own. So runs
    can be compared, also where their W or their micro batches differ, on a CPU to the last bit.
    (But for sequences of less than four tokens MKL has other kernels, and an accelerator may have
    them for any size. Then the last digits differ.)

    A forward may be a collective, so all ranks make the same number, and torch.compile wants
    batches of one size: what is too many is the last block again, and does not count.
    """
    model, tokens, config, device = run.model, run.val_tokens, run.config, run.device
    model.eval()
    rank, W = dist.get_rank(), dist.get_world_size()
    n_blocks = count_blocks(tokens, config.block_size)
    n = min(config.eval_steps, n_blocks)
    m = min(config.micro_batch_size, math.ceil(n / W))
    order = block_order(n_blocks, seed=0, epoch=0)
    losses = torch.zeros(n, dtype=torch.float64, device=device)
    for turn in range(math.ceil(n / (m * W))):
        first = (turn * W + rank) * m
        places = np.arange(first, first + m)  # in the evaluation; from n on they do not count
        blocks = order[np.minimum(places, n - 1)]
        x, y = read_blocks(tokens, blocks, config.block_size, device)
        with autocast(config.dtype, device):
            logits, _ = model(x)
        for place, scores, targets in zip(places, logits, y):
            if place < n:
                losses[place] = run.gpt.loss_of(scores, targets)
    model.train()
    dist.all_reduce(losses)
    return losses.mean().item()


def check_prompt(config, tokenizer, gpt):
    """Refuse --prompt if the model lacks some of its tokens."""
    if tokenizer is None:
        return
    vocab_size = gpt.config.vocab_size
    if max(encode_prompt(config.prompt, tokenizer)) >= vocab_size:
        raise SystemExit(f"--prompt has tokens that are not among the {vocab_size} of the model")


def sample(gpt, tokenizer, config, device):
    """--prompt and a text that continues it, the same on all ranks; or why there is none. A
    collective, since in stage 3 every forward gathers weights."""
    if tokenizer is None:
        try:
            tokenizer = together(load_tokenizer, config.tokenizer)
        except SystemExit as error:
            return f"none, as there is no tokenizer: {error}"
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([encode_prompt(config.prompt, tokenizer)], device=device)
    # Eager, since compiling for every length would take longer than the run.
    with autocast(config.dtype, device), torch.compiler.set_stance("force_eager"):
        idx = gpt.generate(idx, config.sample_tokens, temperature=0.8, generator=generator)
    try:
        text = tokenizer.decode(idx[0].tolist())
    except KeyError:  # the vocabulary is that of --init_from, and has more tokens
        return f"tokens {idx[0].tolist()}"
    return text.removeprefix("\n")


def param_sha256(model):
    """Hash of the whole fp32 parameters, in the order of the GPT's named_parameters(), to compare
    runs by. A collective; holds one parameter at a time."""
    digest = hashlib.sha256()
    for _, p in model.full_parameters():
        digest.update((p.float().cpu() + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
    return digest.hexdigest()


def compare_parameters(model):
    """Stop the run, naming parameter and ranks, where whole parameters are not the same on all
    ranks, as after a flipped bit. A collective. Sums are of bits: no rounding hides a difference.

    A shard has no second copy to compare with: in the ZeRO modes this finds less.
    """
    names, sums = [], []
    for name, p in model.full_parameters():
        names.append(name)
        sums.append(p.view(torch.int32).sum(dtype=torch.int64))
    check_ranks_agree(dict(zip(names, torch.stack(sums).tolist())))


def bytes_per_param(model, gpt, optimizers):
    """Bytes of weights, gradients and optimizer state that this rank holds after a step, over the
    number of parameters: 16 without sharding. (ZeRO paper, arXiv 1910.02054, section 3.) Counted
    by memory, since shards may be views of what is whole."""
    held = [*model.parameters(), *gpt.parameters()]  # shards, and what is whole beside them
    held += [p.grad for p in held if p.grad is not None]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            held += [t for t in state.values() if t.dim() > 0]  # no counts of steps
    n_bytes = {}  # of each piece of memory, by its address
    for t in held:
        storage = local(t).untyped_storage()
        n_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(n_bytes.values()) / sum(p.numel() for p in gpt.parameters())


def result_of(run):
    """What the last line of a run says. Times are medians of the last steps that this process made,
    None if it made none; memory is the most that any rank has held so far. A collective."""
    recent = run.recent
    entry = {} if run.config.eval_only else run.progress["entry"]
    n_bytes = bytes_per_param(run.model, run.gpt, run.optimizers) if recent else None
    result = dict(mode=run.config.mode, world_size=dist.get_world_size(),
                  steps=run.progress["step"], train_loss=entry.get("loss"),
                  val_loss=entry.get("val_loss"),
                  peak_mem_bytes=max(gather(peak_mem_bytes(run.device))), bytes_per_param=n_bytes,
                  param_sha256=param_sha256(run.model), threads=run.config.threads)
    for name in ("tokens_per_sec", "step_ms", "comm_exposed_ms", "mfu"):
        values = [entry[name] for entry in recent]
        result[name] = np.median(values) if values else None
    return result


# -------------------------------------------------------------------------------------------------
# what is logged

# Dense bf16/fp16 tensor-core peaks from NVIDIA's data sheets, FLOP/s. The first match counts.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12,
              "B200": 2250e12, "A100": 312e12}


def peak_flops(device_name):
    """Peak bf16 FLOP/s of a device by its `get_device_name()`; nan where not known."""
    for name, flops in PEAK_FLOPS.items():
        if name in device_name:
            return flops
    return math.nan


def introduce(gpt, n_tokens, config, device):
    """Print what is trained, on what -> the peak FLOP/s of all ranks."""
    name = "CPU"
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name()
    n_parameters, W = sum(p.numel() for p in gpt.parameters()), dist.get_world_size()
    say(f"{n_parameters:,} parameters | {n_tokens:,} training tokens | {config.mode}, W = {W}, "
        f"{dist.get_backend()} on {name}")
    return W * peak_flops(name)


def peak_mem_bytes(device):
    """The most this process has held, in bytes: by the accelerator's allocator, or as resident set
    on a CPU, Python and torch included."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform != "linux":
        import resource  # macOS, where it is in bytes

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def of_all_ranks(numbers, device):
    """This rank's numbers -> those of all ranks, a column each: (len(numbers), W), in float64. A
    collective, for which the CPU does not wait. (So numbers are written one by one: to copy a list
    of them to an accelerator would wait.)"""
    W = dist.get_world_size()
    table = torch.zeros(len(numbers), W, dtype=torch.float64, device=device)
    for row, number in zip(table, numbers):
        row[dist.get_rank()] = number
    dist.all_reduce(table)
    return table


def over_ranks(own, table):
    """[min, mean, max] of each row of a table of `of_all_ranks`, by its name, and the slowest rank.
    All ranks take as long as that one, so it is the one that waits least; None in the torch modes,
    which do not say how long they wait.

    own: {name: number} of this rank, with the time to the end of the step. The other ranks' times
    were taken before they waited for each other, and, on accelerators, for the end of the update.
    """
    step_ms, exposed_ms, _ = table
    busy_ms = step_ms - exposed_ms
    of_ranks = dict(slowest=None if np.isnan(busy_ms).any() else int(busy_ms.argmax()))
    step_ms[dist.get_rank()] = own["step_ms"]
    for name, row in zip(own, table):
        of_ranks[name] = [row.min(), row.mean(), row.max()]
    return of_ranks


def finite(entry):
    """entry with None for inf and nan, which JSON cannot represent."""
    return json.loads(json.dumps(entry), parse_constant=lambda constant: None)


def log_step(entry, run):
    """Note the metrics of a step, and print a line of them if it is time to."""
    flops = entry["tokens_per_sec"] * run.gpt.flops_per_token()
    entry["mfu"] = flops / run.peak_flops
    run.recent.append(entry)
    run.progress["entry"] = finite(entry)
    is_time = is_due(entry["step"], run.config.log_interval, also=1)
    if is_time or "val_loss" in entry or entry["skipped"]:
        say(line_of(entry, run.recent, run.config.max_steps))


def line_of(entry, recent, max_steps):
    """The line of a step. recent: the metrics of the last steps, for the time that is left."""
    mfu = "-" if math.isnan(entry["mfu"]) else f"{100 * entry['mfu']:.1f}%"
    step_ms = np.mean([old["step_ms"] for old in recent])
    minutes, seconds = divmod(round((max_steps - entry["step"]) * step_ms / 1e3), 60)
    line = (f"step {entry['step']:5d}/{max_steps} | loss {entry['loss']:.4f} | "
            f"lr {entry['lr']:.2e} | grad norm {entry['grad_norm']:.3f} | "
            f"param norm {entry['param_norm']:.2f} | {entry['tokens_per_sec']:,.0f} tokens/s | "
            f"mfu {mfu} | {entry['mem_bytes'] / 1e9:.2f} GB | {minutes}m{seconds:02d}s left")
    if "val_loss" in entry:
        line += f" | val loss {entry['val_loss']:.4f}"
    if entry["skipped"]:
        line += " | skipped, not finite"
    return line


def start_watchers(stack, run):
    """-> this run's Metrics, None on other ranks; and functions that take the metrics of each step.
    stack, an ExitStack, closes what they write to, also where the run ends by an error."""
    config, metrics, watchers = run.config, None, []
    if dist.get_rank() == 0:
        metrics = Metrics(run.out_dir)
        watchers.append(functools.partial(write_metrics, metrics))
    if config.tensorboard or config.wandb:
        from extras import trackers
        on_rank_0(trackers.start, stack, config, run.progress, watchers)
    if config.profile or config.trace:
        from extras import profiles
        watchers += profiles.start(stack, run)
    return metrics, watchers


def write_metrics(metrics, entry):
    try:
        metrics.add(entry)
    except OSError as error:  # no reason to lose the run
        say(f"train.py: step {entry['step']} is not yet in the metrics: {error}", sys.stderr)


def main():
    """Ends with 0; 2, and one line, for a user's mistake; 128 + its number after a signal; 1, and
    one line with the step, for what fails later, such as another rank."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop Ctrl-C ends a run in silence
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # Python's None for one that was closed
            stream.reconfigure(errors="backslashreplace")  # a sample may have any character
    # Where a forward fails, so do hooks that are called always: torch says so before our line.
    warnings.filterwarnings("ignore", message=".*``always_call=True`` raised an exception")
    given = read_flags(sys.argv[1:])
    if given.get("resume", "auto") != "auto" and "out_dir" not in given:
        given["out_dir"] = str(pathlib.Path(given["resume"]).resolve().parent)
    progress = dict(step=0, best_step=0, best_val_loss=math.inf, skipped=0, entry={}, run_id=None)
    try:
        status = train(given, progress)
    except SystemExit as error:
        refuse(str(error), 1 if progress["step"] else 2)
    except ModuleNotFoundError as error:
        refuse(f"there is no {error.name}, which some of these flags need beside train.py")
    except Exception as error:
        if not is_explained(error):
            traceback.print_exc()
        leave(f"rank {os.environ.get('RANK', 0)} failed in step {progress['step']}: "
              f"{type(error).__name__}: {one_line(error)}", 1)
    # FSDP2's modules hold the group in a cycle: uncollected, its threads outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()
    # Or Python would end with 120 where a full disk has not taken all of the log.
    sys.stdout = sys.stderr = None
    sys.exit(status)


if __name__ == "__main__":
    main()

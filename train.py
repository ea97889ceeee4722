# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""Train a GPT in one process, or data-parallel in several; the mode is one flag.

    python train.py                                             # one process
    torchrun --nproc_per_node=2 train.py                        # two ranks, --mode ddp
    torchrun --nproc_per_node=2 train.py --mode zero3           # or zero1, zero2: ZeRO's stages
    torchrun --nproc_per_node=2 train.py --mode naive           # the oracle
    torchrun --nproc_per_node=2 train.py --mode torch-fsdp      # torch's own, as a reference
    python train.py --dataset shakespeare.txt --max_steps 2000  # a text file
    python train.py --dataset data/openwebtext --tokenizer gpt2 --model gpt2 --lr 6e-4
    torchrun --nproc_per_node=4 --max-restarts=3 train.py --mode zero3 --resume auto
    python train.py --resume out/best --eval_only --prompt "def "   # ask a checkpoint

One loop for all modes. One process is a group of one rank, so no line asks whether there is a
group. Unlike nanoGPT: which samples a step takes depends on (seed, epoch, step) alone; ranks take
its micro batches in turn; gradients are summed over all of them, and divided once. So the result
does not depend on the number of ranks, W. In fp32 on a CPU zero2 and zero3 even end on the bits of
one process, also where W changes when a run resumes; the other modes do if each rank has one
micro-step.

Output: a line every few steps; out_dir, see runs.Folder; a text that the model wrote; and as the
last line of stdout `RESULT {json}`, whose param_sha256 is equal for runs with the same bits.

To debug, run one process: `python train.py --mode zero3` goes through the functions of the stage,
too, and breakpoint() works anywhere. On several ranks write torch.distributed.breakpoint(0), which
stops rank 0 while the others wait, and give yourself --timeout_s 3600.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import runs
from checkpoint import local, sharded_state
from data import (block_order, choose_tokenizer, count_blocks, encode, fingerprint, load_tokenizer,
                  load_tokens, micro_batches, read_blocks, tokenize)
from ddp import clip_gradients_, DDP, Reducer, total_norm
from model import GPT, GPTConfig, PRESETS
from oracle import average_gradients, broadcast_parameters
from runs import check_ranks_agree, count, flag, gather, on_rank_0, say, together
from zero import Zero1, Zero2, Zero3

# -------------------------------------------------------------------------------------------------
# flags

STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
WITH_MUON = ("single", "naive", "ddp", *STAGES, "torch-ddp")  # modes in which Muon works
MODES = (*WITH_MUON, "torch-zero1", "torch-fsdp-kept", "torch-fsdp")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size")
ZERO = ("mode", STAGES)  # what flags of the stages need


def int_or_auto(text):
    return text if text == "auto" else int(text)


@dataclasses.dataclass
class Config:
    """Each field is a flag. Where the default is None, brackets say what is taken then."""
    # run
    mode: str = flag(None, "who averages gradients [single; under torchrun ddp]", choices=MODES)
    max_steps: int = flag(800, "optimizer steps in all, also those before a resume", least=1,
                          most=99_999_999)  # a checkpoint's name has eight digits
    seed: int = flag(1337, "of the weights, the order of samples and the sample text")
    out_dir: str = flag("out", "for checkpoints and metrics.jsonl; else the one --resume PATH "
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
    micro_batch_size: int_or_auto = flag(4, "sequences of a rank's forward; auto: the most that "
                                         "fit", least=1)
    memory_limit_gb: float = flag(None, "GB that auto may use in a rank [its share of an "
                                  "accelerator]",
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
    find_unused_parameters: bool = flag(False, "some may have no gradient",
                                        needs=("mode", ("ddp", "torch-ddp")))
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
    prompt: str = flag("\n", "what the sample text continues, taken literally", once=True,
                       empty=True)
    sample_tokens: int = flag(256, "tokens of the sample text, after the prompt; 0: no text")
    # watching
    log_interval: int = flag(10, "steps between printed lines; metrics.jsonl has every step")
    trace: bool = flag(False, "print what the third step sends, waits for and frees", once=True,
                       needs=("profile", (0,)))
    profile: int = flag(0, "steps, from the third on, to out_dir/trace_rank0.json for "
                        "ui.perfetto.dev", once=True)
    tensorboard: bool = flag(False, "write to out_dir/tensorboard; needs the package tensorboard")
    wandb: bool = flag(False, "log to Weights & Biases; needs the package wandb")


# Flags of which extras/needs.py has something to check.
TO_CHECK = ("compile", "comm_hook", "node_size", "shard_size", "init_from", "export_hf", "trace",
            "profile", "tensorboard", "wandb")
# Flags that an evaluation does not take from its checkpoint, as it may run elsewhere, on fewer
# ranks.
NOT_TO_EVALUATE = ("compile", "comm_hook", "shard_size", "tensorboard", "wandb")


def config_of(given, record, device):
    """The flags that are given, completed by the record of the checkpoint from which the run goes
    on, if any, and checked -> Config."""
    saved = {} if record is None else dict(record["flags"])
    if given.get("eval_only"):
        for name in NOT_TO_EVALUATE:
            saved.pop(name, None)
    if saved.get("mode") in (None, "single"):  # what one process has begun may go on in torchrun
        saved["mode"] = "ddp" if "RANK" in os.environ else "single"
    config = runs.complete(Config, given, saved)
    check(config, device)
    return config


def check(config, device):
    """Refuse flags that contradict each other, or that this machine cannot serve."""
    W, B, m = dist.get_world_size(), config.global_batch_size, config.micro_batch_size
    if config.mode == "single" and W > 1:
        raise SystemExit(f"--mode single is one process, but torchrun started {W}")
    divisor = W if m == "auto" else W * m
    if B % divisor > 0 and not config.eval_only:
        raise SystemExit(f"--global_batch_size {B} in micro batches of {m} does not divide among "
                         f"{count(W, 'rank')}")
    if config.min_lr is not None and config.min_lr > config.lr:
        raise SystemExit(f"--min_lr {config.min_lr} is above --lr {config.lr}")
    if any(getattr(config, name) for name in TO_CHECK):
        from extras import needs
        needs.check(config, device)


# -------------------------------------------------------------------------------------------------
# a run

MAX_SKIPPED_STEPS = 20  # in a row, for a loss or gradients that are not finite; then a run stops


@dataclasses.dataclass
class Run:
    """What a run works with, and how far it is."""
    config: Config
    device: torch.device
    gpt: GPT  # without any wrapper
    model: torch.nn.Module  # what the mode makes of it
    optimizers: list[torch.optim.Optimizer]
    scaler: ShardedGradScaler
    batches: Iterator | None = None  # of x and y of this rank's micro-steps
    batch: tuple | None = None  # the next one
    val_tokens: np.ndarray | None = None
    validation: str | None = None  # how much of which data val_loss is of
    tokenizer: tiktoken.Encoding | None = None  # None where it is not needed yet
    facts: dict | None = None  # what must be the same where a run goes on
    progress: dict | None = None  # what every checkpoint has beside tensors, facts and flags
    folder: runs.Folder | None = None
    recent: collections.deque | None = None  # the metrics of the last steps
    is_saved: bool = True  # whether the last checkpoint could be written


def train(given, progress):
    """A run, by the flags that are given -> exit status. A collective.

    progress: the step, the best one and its loss, how many steps in a row were skipped, the metrics
    of the last step, the id that W&B knows the run by.
    """
    run = prepare(given, progress)
    status = None if run.config.eval_only else loop(run)
    return finish(run) if status is None else status


def prepare(given, progress):
    """Make all that a run needs. A collective."""
    # 1) ranks, the folder, and flags, of which a checkpoint may have some
    start = Config(**given)  # as far as it is known
    named = runs.named_checkpoint(start.resume)
    if named is not None and "out_dir" not in given:
        given["out_dir"] = start.out_dir = str(named.parent)
    device = runs.choose_device(start.device)
    runs.start_process_group(device, start.timeout_s)
    folder = runs.Folder(start.out_dir)
    checkpoint, record = checkpoint_to_go_on_from(folder, start)
    config = together(config_of, given, record, device)
    torch.set_num_threads(config.threads)
    if config.deterministic:
        take_deterministic_kernels()

    # 2) model and data, which must be the same on all ranks, and in the run that goes on
    tokenizer, vocab_size = together(choose_tokenizer, config)
    gpt = together(build_gpt, config, vocab_size, record)
    config.block_size = gpt.config.block_size  # that of the preset or folder, unless given
    ids = on_rank_0(tokenize, config, tokenizer)  # of a text
    tokens, val_tokens = together(load_tokens, config, ids, gpt.config.vocab_size)
    facts = facts_of(config, gpt, tokens)
    shared = dict(validation=fingerprint(val_tokens), torch=torch.__version__,
                  numpy=np.__version__)
    if config.save_interval > 0 and not config.eval_only:  # each rank writes there
        shared["the folder --out_dir, by its .lock"] = folder.holder()
    check_ranks_agree(vars(config) | facts | shared)
    if record is not None:
        check_facts(checkpoint, record, facts, config)

    # 3) what the mode makes of the model, and optimizers
    if config.micro_batch_size == "auto":
        from extras import auto

        def trial_run(trial_config):
            return assemble(new_gpt(gpt.config, trial_config), trial_config, device)

        config.micro_batch_size = auto.largest_micro_batch(config, device, trial_run, train_step)
    run = assemble(gpt, config, device)
    run.val_tokens, run.tokenizer, run.facts = val_tokens, tokenizer, facts
    run.validation = f"{config.eval_steps} sequences of {shared['validation']}"
    run.progress, run.folder, run.recent = progress, folder, collections.deque(maxlen=100)
    introduce(run, len(tokens))

    # 4) where the run goes on
    if record is not None:
        resume(run, checkpoint, record)
    if not config.eval_only:
        goes_on_here = record is not None and checkpoint.parent == folder.path
        begin_run(run, tokens, goes_on_here)
    return run


def checkpoint_to_go_on_from(folder, start):
    """Take the folder, unless this is an evaluation -> a checkpoint and its record; None, None to
    begin anew. start: the Config of the flags that are given alone. A collective."""
    wait_s = None if start.eval_only else start.timeout_s
    checkpoint, record = runs.find_checkpoint(folder, start.resume, wait_s)
    if start.eval_only and record is None and start.init_from is None:
        raise SystemExit(f"--eval_only: there is no checkpoint in {folder.path}. It needs --resume "
                         "or --init_from, such as --resume out/best")
    if start.resume == "auto" and record is None:
        say(f"no checkpoint in {folder.path}: a new run begins")
    if record is not None and "flags" not in record:
        raise SystemExit(f"{checkpoint} was not written by train.py: its record has no flags")
    return checkpoint, record


def take_deterministic_kernels():
    """Where torch has others, such as attention's backward, which adds by atomics. An operation
    that has none raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is refused
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and changes no bit
    torch.use_deterministic_algorithms(True)


def facts_of(config, gpt, tokens):
    """{name: value} of what must stay as it is when a run resumes; for an evaluation the model's
    alone. A hash takes the place of --dataset, which may be another path on another host."""
    facts = dict(vars(gpt.config))
    del facts["activation_checkpointing"]  # changes no bit
    if config.eval_only:
        del facts["seed"]
        return facts
    return facts | dict(global_batch_size=config.global_batch_size, dataset=fingerprint(tokens),
                        optimizer=config.optimizer)


def check_facts(checkpoint, record, facts, config):
    """Refuse a checkpoint that is of another run, or has made more steps than --max_steps."""
    for name, value in facts.items():
        before = record["facts"].get(name)
        if before != value:
            raise SystemExit(f"{checkpoint} has {name} {before}, and this run {value}")
    if not config.eval_only and record["step"] > config.max_steps:
        raise SystemExit(f"--max_steps {config.max_steps} is less than the steps of {checkpoint}")


def assemble(gpt, config, device):
    """A Run with what a step needs: gpt in the mode's wrapper, and optimizers over the parameters
    that this leaves."""
    model = wrap(gpt, config, device)
    optimizers = [] if config.eval_only else make_optimizers(model, config)
    return Run(config, device, gpt, model, optimizers, make_scaler(config, device))


def begin_run(run, tokens, goes_on_here):
    """From here on out_dir is this run's, and it reads tokens. A collective."""
    progress = run.progress
    step, best_step = progress["step"], progress["best_step"]
    if not goes_on_here:  # the checkpoint is of another run's folder, if any: here a new one begins
        step = best_step = 0
    has_best = on_rank_0(run.folder.begin, step, best_step)
    if not has_best:
        progress |= dict(best_step=0, best_val_loss=math.inf)
    run.batches = micro_batches(tokens, progress["step"] + 1, run.config, run.device)
    run.batch = next(run.batches)


def loop(run):
    """Make the steps that are left -> exit status if a signal has come, else None. A collective."""
    config, progress = run.config, run.progress
    signals = []  # numbers; one or more on any rank: all finish the step, save, stop
    runs.note_signals(signals)
    if progress["step"] == config.max_steps:
        say(f"all {config.max_steps} steps have been made: --max_steps is for more")
    with contextlib.ExitStack() as stack:
        watchers = start_watchers(stack, run)
        for step in range(progress["step"] + 1, config.max_steps + 1):
            # forward, backward and update
            progress["step"] = step  # for errors
            lr = set_lr(run.optimizers, step, config)
            measured, is_told_to_stop = measured_step(run, signals)
            entry = dict(step=step, lr=lr, **measured)
            progress["skipped"] = (progress["skipped"] + 1) if entry["skipped"] else 0
            if is_due(step, config.check_interval):
                compare_parameters(run.model)

            # evaluate, on all ranks
            new_best = {}
            if config.eval_steps and is_due(step, config.eval_interval, also=config.max_steps):
                entry["val_loss"] = evaluate(run)
                if entry["val_loss"] < progress["best_val_loss"]:
                    new_best = dict(best_step=step, best_val_loss=entry["val_loss"])

            # log, on rank 0; stop if too many steps in a row were skipped
            progress["entry"] = finite(entry)
            log_step(entry, run)
            for watch in watchers:
                watch(progress["entry"])
            if progress["skipped"] == MAX_SKIPPED_STEPS:
                raise SystemExit(f"step {step}: {MAX_SKIPPED_STEPS} steps in a row not finite: "
                                 "lower --lr")

            # Write a checkpoint, on all ranks: when it is time, of a new best one, at the end, and
            # before a stop. After a skipped step it is not time: it would push out a good one.
            is_time = is_due(step, config.save_interval) and not entry["skipped"]
            is_last = step == config.max_steps
            if config.save_interval and (is_time or is_last or new_best or is_told_to_stop):
                save_run(run, new_best)
            if is_told_to_stop:
                break
    number = runs.agree_on_signal(signals)
    if number == 0:
        return None
    how = "; go on with --resume auto" if config.save_interval and run.is_saved else ""
    runs.warn(f"stopped by a signal after step {progress['step']}{how}")
    return 128 + number if run.is_saved else 1


def is_due(step, interval, also=None):
    """Whether something happens after a step, every interval steps and after step `also`; with
    interval 0 never."""
    return interval > 0 and (step == also or step % interval == 0)


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
        say(f"sample:\n{sample(run)}")
    say("RESULT " + json.dumps(finite(result)))
    if config.export_hf:
        from extras import llama
        llama.export(run.model, run.gpt.config, config.export_hf, run.tokenizer.eot_token)
    return 0 if run.is_saved else 1


def resume(run, checkpoint, record):
    """Go on from a checkpoint. A collective."""
    runs.load(sharded_state(run.model, *run.optimizers), checkpoint)
    for name in run.progress:
        run.progress[name] = record[name]
    if record.get("validation", run.validation) != run.validation:
        run.progress["best_val_loss"] = math.inf
        say(f"val_loss is now of {run.validation}; before, it was of {record['validation']}: the "
            f"best checkpoint is chosen anew")
    if record["scaler"]:  # empty if that run had none
        run.scaler.load_state_dict(record["scaler"])
    if run.config.comm_hook:
        from extras import comm_hooks
        comm_hooks.resume(run.model, checkpoint, record["step"])
    say(f"resumed from {checkpoint}, after step {record['step']}, on "
        f"{count(dist.get_world_size(), 'rank')} ({record['world_size']} before)")


def save_run(run, new_best):
    """Write a checkpoint. A collective. new_best: best_step and best_val_loss, if it is the best
    one so far; else {}. progress has them only if the checkpoint is there."""
    flags = runs.flags_to_save(run.config)
    for name in ("dataset", "init_from"):  # for a run that resumes in another working folder
        if flags[name] not in (None, "stdlib"):
            flags[name] = os.path.abspath(flags[name])
    record = dict(run.progress | new_best, facts=run.facts, scaler=run.scaler.state_dict(),
                  world_size=dist.get_world_size(), flags=flags, validation=run.validation)
    tensors = sharded_state(run.model, *run.optimizers)
    if run.config.comm_hook:
        from extras import comm_hooks
        tensors |= comm_hooks.residuals(run.model)
    run.is_saved = runs.save(run.folder, tensors, record, run.config.keep_last)
    if run.is_saved:
        run.progress |= new_best


# -------------------------------------------------------------------------------------------------
# a step


def train_step(run, signals=()):
    """Make a step with this rank's micro batches -> (loss, norm of the gradients, whether the step
    was skipped, whether some rank had signals). A collective.

    If loss or gradients are not finite on some rank, all ranks skip the update. Decisions are taken
    from `sums`, which is the same everywhere.
    """
    model, config, scaler, device = run.model, run.config, run.scaler, run.device
    rank, W = dist.get_rank(), dist.get_world_size()
    n = config.global_batch_size // (config.micro_batch_size * W)

    # forward and backward, micro-step by micro-step
    losses = []
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for micro_step in range(1, n + 1):
        x, y = run.batch
        with exchanging(model, config, is_last=micro_step == n):
            with autocast(config.dtype, device):
                loss = model(x, y)[1]  # no name keeps the logits, which are large
            scaler.scale(loss).backward()  # not loss / n, which would round
        losses.append(loss.detach())
        run.batch = next(run.batches)  # while an accelerator still computes
    if config.mode == "naive":
        model.average_gradients()

    # Divide sums by the number of micro batches, n W, less what the wrapper has divided by already:
    # 1 in our modes, W in torch's and by comm hooks. And clip, on all ranks by the same factor.
    for optimizer in run.optimizers:
        scaler.unscale_(optimizer)
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    norm = clip_gradients_(gradients, config.grad_clip or math.inf, model.shard_group,
                           divide_by=n * W / model.gradient_divide_factor).to(device)

    # One all-reduce of what all ranks must know: the loss of each micro batch, in the order of the
    # data; whether the norm is not finite; signals. A rank fills its own places, and others are 0:
    # so nothing is rounded, and the logged loss does not depend on W. All is read at once: here the
    # CPU waits for an accelerator.
    sums = torch.zeros(n * W + 2, dtype=torch.float64, device=device)
    sums[rank:n * W:W] = torch.stack(losses)
    sums[-2] = ~norm.isfinite()
    sums[-1] = len(signals)
    dist.all_reduce(sums)
    *all_losses, n_not_finite, n_signals, grad_norm = torch.cat((sums, norm.view(1))).tolist()
    loss = math.fsum(all_losses) / len(all_losses)
    is_skipped = n_not_finite > 0 or not math.isfinite(loss)

    # update the weights
    if not is_skipped:
        for optimizer in run.optimizers:
            scaler.step(optimizer)
    # A scaler sees gradients alone. If they are finite, and the loss is not, it keeps the scale; by
    # update() it would count a good step.
    is_only_loss = is_skipped and n_not_finite == 0
    scaler.update(scaler.get_scale() if is_only_loss else None)
    return loss, grad_norm, is_skipped, n_signals > 0


def measured_step(run, signals):
    """`train_step` -> (what metrics.jsonl has of it, whether some rank had signals). A collective.
    """
    model, config, device = run.model, run.config, run.device
    start_s, exposed_before_s = time.perf_counter(), model.exposed_s
    loss, grad_norm, is_skipped, is_told_to_stop = train_step(run, signals)
    weights = [local(p.detach()) for p in model.parameters()]
    param_norm = total_norm(weights, model.shard_group).item()  # here the CPU waits once more
    step_s = time.perf_counter() - start_s
    own = dict(step_ms=1e3 * step_s, comm_exposed_ms=1e3 * (model.exposed_s - exposed_before_s),
               mem_bytes=runs.peak_mem_bytes(device))
    tokens_per_sec = config.global_batch_size * config.block_size / step_s
    entry = dict(loss=loss, grad_norm=grad_norm, param_norm=param_norm, skipped=is_skipped, **own,
                 tokens_per_sec=tokens_per_sec, mfu=mfu(tokens_per_sec, run.gpt, device),
                 ranks=over_ranks(own, device))
    return entry, is_told_to_stop


def autocast(dtype, device):
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32")


def set_lr(optimizers, step, config):
    """Set the learning rate of a step, from 1 on, for all parameters -> that rate: linear warm-up
    to lr, then a cosine from lr towards min_lr."""
    if step <= config.warmup_steps:
        lr = config.lr * step / (config.warmup_steps + 1)
    else:
        min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
        done = (step - 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        coefficient = 0.5 * (1 + math.cos(math.pi * done))  # falls from 1 towards 0
        lr = min_lr + coefficient * (config.lr - min_lr)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
    return lr


# -------------------------------------------------------------------------------------------------
# the modes: all that differs between them


class Naive(Reducer):
    """The oracle, for --mode naive: a collective for each parameter, after the last backward. One
    rank, --mode single, sends nothing."""

    def __init__(self, module):
        super().__init__(module, None, {})
        broadcast_parameters(module)

    def average_gradients(self):
        start_s = time.perf_counter()
        average_gradients(self.module, divide_factor=self.gradient_divide_factor)
        self.exposed_s += time.perf_counter() - start_s

    full_parameters = DDP.full_parameters


def wrap(gpt, config, device):
    """gpt -> what the loop calls, by the mode. All of them have

    gradient_divide_factor  what the sum of gradients over ranks is divided by
    shard_group             the ranks over which parameters are sharded; None: each has all of them
    exposed_s               seconds that this rank has waited for communication; nan: not known
    full_parameters()       yields (name, whole parameter); a collective where they are sharded
    no_sync()               a context in which gradients are not exchanged
    """
    if config.compile:
        gpt.compile_blocks()
    # torch's own default, None, is 25 MB with a small first bucket.
    bucket_cap_mb = None if config.bucket_cap_mb == 25 else config.bucket_cap_mb
    if config.mode.startswith("torch-"):
        from extras import torchs
        return torchs.wrap(gpt.to(device), config, bucket_cap_mb)
    if needs_dropin(config):
        from extras import dropins
        for_muon = [p for name, p in gpt.named_parameters() if takes_muon(name, p, config)]
        return dropins.wrap(gpt, config, device, bucket_cap_mb, DTYPES, for_muon)
    if config.mode in STAGES:
        model = STAGES[config.mode](gpt.to(device), bucket_cap_mb=bucket_cap_mb,
                                    param_dtype=DTYPES.get(config.param_dtype))
    elif config.mode == "ddp":
        model = DDP(gpt.to(device), bucket_cap_mb=bucket_cap_mb)
    else:
        model = Naive(gpt.to(device))
    model.set_gradient_divide_factor(1)  # a sum over ranks: `train_step` divides
    return model


def needs_dropin(config):
    """Whether a flag asks our own modes for more than ddp.py and zero.py have."""
    if config.mode in STAGES:
        has_muon = config.optimizer == "muon"
        return has_muon or config.offload or bool(config.shard_size or config.reduce_dtype)
    return config.mode == "ddp" and (config.find_unused_parameters or config.comm_hook is not None)


def exchanging(model, config, is_last):
    """A context for forward and backward of a micro-step: gradients are exchanged in the last one.

    But stages 2 and 3 exchange in every micro-step, having no room for whole gradients: so their
    bits are those of one process, however micro batches are divided among ranks. So does stage 1
    with parameters of 16 bits: sums in 16 bits would round.
    """
    if needs_dropin(config):
        from extras import dropins
        return dropins.exchanging(model, config, is_last)
    is_always = config.mode in ("zero2", "zero3") or config.param_dtype in ("bf16", "fp16")
    return contextlib.nullcontext() if is_last or is_always else model.no_sync()


# -------------------------------------------------------------------------------------------------
# model and optimizers


def build_gpt(config, vocab_size, record):
    """The GPT: a preset, or the folder --init_from, each size overridden where its flag is given.
    record: of the checkpoint that is loaded later, or None."""
    sizes = dict(PRESETS[config.model], vocab_size=vocab_size)
    if config.init_from:
        from extras import llama
        sizes = llama.sizes_of(config, record, vocab_size)
    for name in SIZES:
        if getattr(config, name) is not None:
            sizes[name] = getattr(config, name)
    sizes |= dict(seed=config.seed, activation_checkpointing=config.activation_checkpointing)
    try:
        gpt_config = GPTConfig(**sizes)
    except ValueError as error:  # sizes that do not fit
        raise SystemExit(str(error)) from error
    gpt = new_gpt(gpt_config, config)
    if config.init_from and record is None:
        llama.begin_with(gpt, config.init_from)
    return gpt


def new_gpt(gpt_config, config):
    """A GPT; on meta if a stage of dropin's fills it unit by unit, so that no rank holds all of it.
    """
    is_on_meta = config.mode in STAGES and needs_dropin(config)
    with torch.device("meta" if is_on_meta else "cpu"):
        return GPT(gpt_config)


# Where fused AdamW has the same bits for a tensor as for its shards. Its CPU kernel rounds the end
# of a tensor differently. `pytest tests/test_devices.py -k fused` tries the device that is there.
FUSED_ADAMW = ("cuda",)


def make_optimizers(model, config):
    """[AdamW], which decays matrices only, as shards keep their dimensions; with --optimizer muon
    [AdamW, Muon], the latter for the matrices of blocks. If you add another one, its state must be
    tensors: `sharded_state` saves nothing else."""
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
    # torch 2.13's fused AdamW fails with a scaler, whose number has the shape (1,). foreach on an
    # accelerator: few kernels for all tensors.
    kind = others[0].device.type
    fused = kind in FUSED_ADAMW and not has_scaler(config)
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


def takes_muon(name, p, config):
    """Whether Muon trains p, a parameter or its shard, which has as many dimensions. The embedding
    is a matrix too, but a batch has gradients of few of its rows."""
    return config.optimizer == "muon" and "blocks." in name and p.dim() == 2


def has_scaler(config):
    return "fp16" in (config.dtype, config.param_dtype)


def make_scaler(config, device):
    """Loss scaling for fp16, off for other dtypes. Its check for inf is reduced over all ranks: if
    one skips a step, all do, and all halve the scale. It begins with torch's number, 2**16, divided
    by N, rounded up to a power of two: losses of a step's N micro batches are summed, not averaged.
    """
    N = max(1, config.global_batch_size // config.micro_batch_size)
    return ShardedGradScaler(device.type, 2.0 ** (16 - (N - 1).bit_length()),
                             enabled=has_scaler(config))


# -------------------------------------------------------------------------------------------------
# evaluation


@torch.no_grad()
def evaluate(run):
    """Mean loss over eval_steps blocks of validation tokens, divided among the ranks. A collective.

    The blocks are the same in every run, whatever its seed, and each has a forward of its own. So
    runs can be compared to the last digit, also where their W or their micro batches differ.
    """
    tokens, config, device = run.val_tokens, run.config, run.device
    rank, W = dist.get_rank(), dist.get_world_size()
    n_blocks = count_blocks(tokens, config.block_size)
    n = min(config.eval_steps, n_blocks)
    order = block_order(n_blocks, seed=0, epoch=0)
    losses = torch.zeros(n, dtype=torch.float64, device=device)
    run.model.eval()
    for first in range(0, n, W):
        # A forward may be a collective, so all ranks make as many: some make the last one again.
        place = min(first + rank, n - 1)
        x, y = read_blocks(tokens, order[place:place + 1], config.block_size, device)
        with autocast(config.dtype, device):
            loss = run.model(x, y)[1]
        if first + rank < n:
            losses[place] = loss
    run.model.train()
    dist.all_reduce(losses)
    return losses.mean().item()


def sample(run):
    """--prompt and a text that continues it, the same on all ranks; or why there is none. A
    collective, since in stage 3 every forward gathers weights."""
    config, device, tokenizer = run.config, run.device, run.tokenizer
    if tokenizer is None:
        try:
            tokenizer = together(load_tokenizer, config.tokenizer)
        except SystemExit as error:
            return f"none, as there is no tokenizer: {error}"
    V = run.gpt.config.vocab_size
    if tokenizer.n_vocab != V:  # the model is that of --init_from
        return f"none, as the tokenizer knows {tokenizer.n_vocab} tokens, and the model {V}"
    prompt = encode(config.prompt, tokenizer).tolist() or [tokenizer.eot_token]
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([prompt], device=device)
    # Eager, since compiling for every length would take longer than the run.
    with autocast(config.dtype, device), torch.compiler.set_stance("force_eager"):
        idx = run.gpt.generate(idx, config.sample_tokens, temperature=0.8, generator=generator)
    return tokenizer.decode(idx[0].tolist()).removeprefix("\n")


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
    n_bytes = {}  # of each memory, by its address
    for t in held:
        storage = local(t).untyped_storage()
        n_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(n_bytes.values()) / sum(p.numel() for p in gpt.parameters())


# -------------------------------------------------------------------------------------------------
# the log

# Dense bf16/fp16 tensor-core peaks from NVIDIA's data sheets, FLOP/s. The first match counts.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12,
              "B200": 2250e12, "A100": 312e12}


def device_name(device):
    return "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name()


def mfu(tokens_per_sec, gpt, device):
    """Model FLOPs utilisation: which part of the peak of all ranks' 16-bit units the model needs,
    whatever it computes in; nan where the peak is not known."""
    for name, peak in PEAK_FLOPS.items():
        if name in device_name(device):
            return tokens_per_sec * gpt.flops_per_token() / (peak * dist.get_world_size())
    return math.nan


def over_ranks(own, device):
    """{name: this rank's number} -> {name: [min, mean, max] over ranks}, and "slowest": the rank
    that waits least for others; None in the torch modes, which do not say how long they wait. A
    collective."""
    columns = runs.of_all_ranks(own, device)
    busy_ms = np.subtract(columns["step_ms"], columns["comm_exposed_ms"])
    of_ranks = dict(slowest=None if np.isnan(busy_ms).any() else int(busy_ms.argmax()))
    for name, numbers in columns.items():
        of_ranks[name] = [min(numbers), sum(numbers) / len(numbers), max(numbers)]
    return of_ranks


def introduce(run, n_tokens):
    """Print what is trained, on what."""
    n_parameters, W = sum(p.numel() for p in run.gpt.parameters()), dist.get_world_size()
    say(f"{n_parameters:,} parameters | {n_tokens:,} training tokens | {run.config.mode}, W = {W}, "
        f"{dist.get_backend()} on {device_name(run.device)}")
    _, n_local, n_devices = runs.local_numbers(run.device.type)
    if n_local > n_devices:
        say(f"{n_local} ranks share {count(n_devices, 'device')}: times say nothing")


def start_watchers(stack, run):
    """-> functions that take the metrics of each step. stack, an ExitStack, closes what they write
    to, also where the run ends by an error."""
    config = run.config
    watchers = [run.folder.add_metrics] if dist.get_rank() == 0 else []
    if config.tensorboard or config.wandb:
        from extras import trackers
        on_rank_0(trackers.start, stack, config, run.progress, watchers)
    if config.profile or config.trace:
        from extras import profiles
        watchers += profiles.start(stack, run)
    return watchers


def finite(entry):
    """entry with None for inf and nan, which JSON cannot represent."""
    return json.loads(json.dumps(entry), parse_constant=lambda constant: None)


def log_step(entry, run):
    """Keep the metrics of a step, and print a line of them if it is time to."""
    max_steps = run.config.max_steps
    run.recent.append(entry)
    is_time = is_due(entry["step"], run.config.log_interval, also=1)
    if not (is_time or "val_loss" in entry or entry["skipped"]):
        return
    part = "-" if math.isnan(entry["mfu"]) else f"{100 * entry['mfu']:.1f}%"
    step_ms = np.mean([old["step_ms"] for old in run.recent])
    minutes, seconds = divmod(round((max_steps - entry["step"]) * step_ms / 1e3), 60)
    line = (f"step {entry['step']:5d}/{max_steps} | loss {entry['loss']:.4f} | "
            f"lr {entry['lr']:.2e} | grad norm {entry['grad_norm']:.3f} | "
            f"param norm {entry['param_norm']:.2f} | {entry['tokens_per_sec']:,.0f} tokens/s | "
            f"mfu {part} | {entry['mem_bytes'] / 1e9:.2f} GB | {minutes}m{seconds:02d}s left")
    if "val_loss" in entry:
        line += f" | val loss {entry['val_loss']:.4f}"
    if entry["skipped"]:
        line += " | skipped, not finite"
    say(line)


def result_of(run):
    """What the last line of a run says. Times are medians of the last steps that this process made,
    None if it made none; memory is the most that any rank has held so far. A collective."""
    entry = {} if run.config.eval_only else run.progress["entry"]
    n_bytes = bytes_per_param(run.model, run.gpt, run.optimizers) if run.recent else None
    result = dict(mode=run.config.mode, world_size=dist.get_world_size(),
                  steps=run.progress["step"], train_loss=entry.get("loss"),
                  val_loss=entry.get("val_loss"),
                  peak_mem_bytes=max(gather(runs.peak_mem_bytes(run.device))),
                  bytes_per_param=n_bytes, param_sha256=param_sha256(run.model),
                  threads=run.config.threads)
    for name in ("tokens_per_sec", "step_ms", "comm_exposed_ms", "mfu"):
        values = [old[name] for old in run.recent]
        result[name] = np.median(values) if values else None
    return result


def main():
    # Where a forward fails, so do hooks that are called always: torch says so before our line.
    warnings.filterwarnings("ignore", message=".*``always_call=True`` raised an exception")
    progress = dict(step=0, best_step=0, best_val_loss=math.inf, skipped=0, entry={},
                    run_id=os.urandom(8).hex())
    given = runs.read_flags(Config, __doc__, sys.argv[1:])
    runs.end_with(lambda: train(given, progress), progress)


if __name__ == "__main__":
    main()

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

Replaces a trainer framework by one loop. The options come first, then the loop, `main`, which
calls `train_step`, then what both call, in the order in which a run meets it. The modes differ in
`wrap` and in `set_is_last_micro_step`; `naive` averages in `train_step`. One process is a process
group of one rank, so no line asks whether there is a group.

How it differs from nanoGPT's loop: the global batch of a step is a function of (seed, epoch, step)
alone, and ranks take its micro batches in turn: any number of ranks reads the same samples in the
same order. Nothing is divided before the gradients of all micro batches are added up, in that
order. So in fp32 on CPU zero2 and zero3 produce the bits of one process on every number of ranks,
also where it changes in the middle of a run; the other modes do where each rank has one micro-step.
What is logged is the mean over all ranks, and every decision is taken from numbers that all share.

Output: a line every few steps, out_dir/metrics.jsonl, checkpoints that any mode at any world size
can resume, a text that the model wrote, and as the last line of stdout `RESULT {json}`, whose
param_sha256 is equal for runs that produced the same bits.

Cost: two small all-reduces a step, for losses and for timings, and the norm of the parameters.

To debug, put breakpoint() anywhere and run one process: `python train.py --mode zero3` goes through
the functions of the stage, too. On several ranks breakpoint() fails, since they share one stdin:
there write torch.distributed.breakpoint(0), which stops rank 0 while the others wait, type `up` to
reach your line, and give yourself --timeout_s 3600.
"""

import argparse
import atexit
import collections
import contextlib
import dataclasses
import datetime
import difflib
import functools
import gc
import hashlib
import importlib.util
import inspect
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
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddp import DDP, HierarchicalState, clip_gradients_, in_backward, total_norm
from model import (GPT, GPTConfig, PRESETS, peak_flops, read_llama_config, read_llama_weights,
                   write_llama)
from oracle import average_gradients
from trainer.comm_hooks import TopKState, hierarchical_hook, top_k_hook
from zero import Zero1, Zero2, Zero3


# -------------------------------------------------------------------------------------------------
# options
@dataclasses.dataclass
class Config:
    """Each field is a flag, its comment the text of --help, and the line above a group its title.
    What values are possible is in the tables at `parse_args`."""
    # run
    mode: str | None = None  # who averages gradients: README's table [single; under torchrun ddp]
    max_steps: int = 800  # optimizer steps in all, also those before a resume
    seed: int = 1337  # of the weights, the order of samples and the sample text
    out_dir: str = "out"  # for checkpoints, metrics.jsonl, tokens; else the one --resume PATH is in
    device: str | None = None  # cpu or an accelerator, such as cuda [the accelerator, if any]
    threads: int = 1  # CPU threads per rank; another number may change the last digits
    timeout_s: float = 120.0  # seconds after which a rank that waits for another one gives up
    check_interval: int = 100  # steps between checks that ranks have equal parameters, 0 for none
    # checkpoints
    save_interval: int = 100  # steps between checkpoints; also the last and the best; 0 for none
    keep_last: int = 2  # newest checkpoints that are kept; the best one is kept, too
    resume: str | None = None  # auto: the newest in out_dir, if any; or PATH, such as out/best
    export_hf: str | None = None  # folder for the model as transformers has it; needs safetensors
    # data
    dataset: str = "stdlib"  # Python's library, a text file, or a folder of train.bin and val.bin
    tokenizer: str = "bytes"  # bytes, or a tiktoken name such as gpt2 or o200k_base
    # model
    init_from: str | None = None  # folder of a Llama of transformers, to start from its weights
    model: str = "tiny"  # preset of sizes
    n_layer: int | None = None  # blocks; this and the next four override the preset
    n_head: int | None = None  # query heads
    n_kv_head: int | None = None  # key and value heads, a divisor of n_head
    n_embd: int | None = None  # width
    block_size: int | None = None  # tokens per sequence
    activation_checkpointing: bool = False  # recompute blocks in the backward: less memory, slower
    compile: bool = False  # torch.compile each block; needs a C++ compiler on a CPU
    # batch
    global_batch_size: int = 16  # sequences per optimizer step, over all ranks and micro-steps
    micro_batch_size: int | str = 4  # sequences of a rank's forward; auto: the most that fit
    memory_limit_gb: float | None = None  # for auto: GB of a rank [what a GPU has free]
    # precision
    dtype: str = "fp32"  # of the computation, by autocast; fp16 with a gradient scaler
    param_dtype: str | None = None  # zero1 to 3: in which parameters are gathered and used [fp32]
    reduce_dtype: str | None = None  # zero1 to 3: in which gradients are sent [fp32]
    # data parallelism
    bucket_cap_mb: float = 25.0  # ddp, torch-ddp: MB of gradients that are sent together
    find_unused_parameters: bool = False  # ddp, torch-ddp: allow parameters without a gradient
    comm_hook: str | None = None  # ddp: how gradients are compressed [not at all]
    topk_ratio: float = 0.01  # --comm_hook topk: the part of the elements that is sent
    node_size: int | None = None  # --comm_hook hierarchical: ranks per node [as torchrun has it]
    shard_size: int | None = None  # zero1 to 3: ranks among which the state is divided [all]
    offload: bool = False  # zero1 to 3: keep shards, gradients and optimizer on the CPU
    # optimizer
    optimizer: str = "adamw"  # muon: Muon for the matrices of blocks, AdamW for the rest
    lr: float = 3e-3  # peak learning rate
    min_lr: float | None = None  # learning rate at the end of the cosine [lr / 10]
    warmup_steps: int = 40  # steps of linear warm-up
    weight_decay: float = 0.1  # on tensors of two or more dimensions only
    beta1: float = 0.9  # AdamW: decay of the mean of gradients
    beta2: float = 0.99  # AdamW: decay of the mean of squared gradients
    grad_clip: float = 1.0  # largest norm of all gradients together, 0 for no limit
    # evaluation
    eval_interval: int = 100  # steps between evaluations; the last step has one, too; 0 for none
    eval_steps: int = 20  # micro batches per evaluation, divided among ranks; 0 for none
    eval_only: bool = False  # no training: loss and text of what --resume or --init_from names
    prompt: str = "\n"  # what the sample text continues, taken literally
    sample_tokens: int = 256  # tokens of the sample text, after the prompt; 0 for none
    # watching
    log_interval: int = 10  # steps between printed lines; metrics.jsonl has every step
    trace: bool = False  # print what ddp or zero1 to 3 sends, waits for and frees in the third step
    profile: int = 0  # steps, from the third on, to out_dir/trace_rank0.json for ui.perfetto.dev
    tensorboard: bool = False  # write to out_dir/tensorboard; needs the package tensorboard
    wandb: bool = False  # log to Weights & Biases; needs the package wandb


MAX_SKIPPED_STEPS = 20  # in a row, for a loss or gradients that are not finite; then a run stops
ZERO = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
FSDP = ("torch-fsdp", "torch-fsdp-kept")  # kept: parameters stay whole after the forward
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# -------------------------------------------------------------------------------------------------
# the loop


def main(config, progress):
    """A whole run -> exit status.

    progress: what the loop knows beside tensors: the step, the best one, the last step's entry of
    metrics.jsonl. Every checkpoint has it, and `run` names the step in errors.
    """
    # 1) meet the other ranks. Tokenizer, data and `gpt`, the model without any wrapper, are the
    # same on all of them.
    device, torchrun_store = start_process_group(config)
    tokenizer, gpt, tokens, val_tokens = together(prepare, config, device)
    facts = facts_of_run(config, gpt, tokens)
    out_dir = pathlib.Path(config.out_dir).resolve()
    # A folder that marks out_dir as this run's, until a later run removes it.
    mark = None if config.eval_only else claim(out_dir)
    check_ranks_agree(vars(config) | facts | facts_of_start(mark, val_tokens, config))
    if config.micro_batch_size == "auto":
        config.micro_batch_size = largest_micro_batch(config, tokenizer, device)

    # 2) `model`, what the mode makes of gpt; the optimizer over the parameters that this leaves
    model = wrap(gpt, config, device)
    optimizer = make_optimizer(model, config)
    scaler = make_scaler(config, device)

    # 3) continue where an earlier run stopped
    progress["run_id"] = from_rank_0(os.urandom(8).hex())
    tensors = checkpoint_tensors(model, optimizer, gpt, config)
    record = resume(config, out_dir, mark, tensors, facts, torchrun_store)
    if record is not None:
        for name in progress:
            progress[name] = record.get(name, progress[name])  # an older record may lack some
        if record["scaler"]:  # empty, unless that run had fp16, too
            scaler.load_state_dict(record["scaler"])
        if config.comm_hook in ("topk", "powersgd"):
            model.comm_state.iter = progress["step"]
    device_name = introduce(gpt, tokens, config, device)
    # FLOP/s of all ranks; those of 16-bit units, whatever the run computes in.
    peak = dist.get_world_size() * (peak_flops(device_name) or math.nan)
    metrics, trackers = start_trackers(config, mark, gpt, progress)
    signals = []  # one or more: all ranks finish the step, save, stop

    def note(number, frame):
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)

    # 4) the loop
    saved = True
    recent = collections.deque(maxlen=100)  # the entries of the last steps
    last_step = progress["step"] if config.eval_only else config.max_steps
    if last_step == progress["step"] and not config.eval_only:
        say(f"all {last_step} steps have been made: --max_steps is for more")
    for step in range(progress["step"] + 1, last_step + 1):
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

        # log, on rank 0, as long as no later run has taken out_dir
        entry["mfu"] = entry["tokens_per_sec"] * gpt.flops_per_token() / peak
        recent.append(entry)
        if is_due(step, config.log_interval, 1) or "val_loss" in entry or entry["skipped"]:
            print_step(entry, recent, config)
        progress["entry"] = finite(entry)
        for track in trackers:
            track(progress["entry"])
        if dist.get_rank() == 0 and not is_ours(mark):
            signals.append("a later run")  # the next step tells all ranks; `release` says why

        # write a checkpoint, on all ranks, and stop where one of them was told to; skipped steps
        # must not push out the checkpoints before them
        is_time = is_due(step, config.save_interval, config.max_steps) and not entry["skipped"]
        if config.save_interval and (is_time or best or stop):
            record = dict(progress | best, facts=facts, scaler=scaler.state_dict(),
                          world_size=dist.get_world_size(), config=flags_to_save(config))
            tensors = checkpoint_tensors(model, optimizer, gpt, config)  # top-k makes new ones
            saved = save_checkpoint(out_dir, mark, tensors, record, metrics)
            if saved:
                progress |= best
        if stop:
            on_rank_0(release, mark)
            what_now = "; go on with --resume auto" if config.save_interval and saved else ""
            say(f"train.py: stopped by a signal after step {step}{what_now}", sys.stderr)
            return 0 if saved else 1

    # 5) a text that the model writes, the result, and the weights for transformers
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    is_finite = progress["entry"].get("param_norm", 0.0) is not None  # None stands for nan
    if config.eval_only:
        progress["entry"] = evaluate_only(model, val_tokens, progress["step"], config, device)
    else:
        on_rank_0(release, mark)
    n_bytes = bytes_per_param(model, gpt, optimizer) if recent else None
    if config.sample_tokens and is_finite:
        say(f"sample:\n{sample(gpt, tokenizer, config, device)}")
    print_result(model, progress, recent, n_bytes, config)
    if config.export_hf:
        export(model, gpt, config, tokenizer)
    return 0 if saved else 1


def is_due(step, interval, also=None):
    """Whether something happens after a step, every interval steps and after step `also`; with
    interval 0 never."""
    return interval > 0 and (step == also or step % interval == 0)


# -------------------------------------------------------------------------------------------------
# a step


def train_step(model, optimizer, scaler, tokens, step, config, device, signals=()):
    """Make a step, from 1 on -> (what metrics.jsonl has of it, whether some rank had signals). A
    collective.

    If loss or gradients are not finite on some rank, all ranks skip the update. Decisions are taken
    from `sums`, which is the same everywhere; only times and memory differ between ranks.
    """
    # forward and backward, micro-step by micro-step
    start_s = time.perf_counter()
    exposed_before_s = model.exposed_s  # waited for communication so far
    rank, W, m = dist.get_rank(), dist.get_world_size(), config.micro_batch_size
    n = accumulation_steps(config)
    blocks = global_batch(tokens, step, config)
    # A place for each micro batch of all ranks, in the order of the data. Other ranks' places are
    # 0, so the sum over ranks rounds nothing, and the logged loss does not depend on W.
    # The last two are for what all ranks must know.
    sums = torch.zeros(n * W + 2, dtype=torch.float64, device=device)
    optimizer.zero_grad(set_to_none=True)
    for micro_step in range(n):
        index = micro_step * W + rank
        x, y = read_blocks(tokens, blocks[index * m:(index + 1) * m], config, device)
        set_is_last_micro_step(model, config, micro_step == n - 1)
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
    was_divided_by = W if model.gradient_divide_factor is None else model.gradient_divide_factor
    norm = clip_gradients_(gradients, config.grad_clip or math.inf, model.shard_group,
                           divide_by=n * W / was_divided_by).to(device)

    # add up losses over ranks, and in the same collective what all ranks must know; read all of it
    # at once, since an accelerator stands still meanwhile
    sums[-2] = ~norm.isfinite()
    sums[-1] = len(signals)
    dist.all_reduce(sums)
    *losses, n_not_finite, n_signals, grad_norm = torch.cat((sums, norm.view(1))).tolist()
    loss = math.fsum(losses) / len(losses)
    skipped = n_not_finite > 0 or not math.isfinite(loss)

    # update the weights, in every mode by the same rate
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, config)
    if not skipped:
        scaler.step(optimizer)
    scaler.update()
    param_norm = total_norm([local(p.detach()) for p in model.parameters()], model.shard_group)
    step_s = time.perf_counter() - start_s
    entry = dict(step=step, loss=loss, lr=lr_at(step, config), grad_norm=grad_norm,
                 param_norm=param_norm.item(), skipped=skipped,
                 tokens_per_sec=config.global_batch_size * config.block_size / step_s,
                 step_ms=1e3 * step_s,
                 comm_exposed_ms=1e3 * (model.exposed_s - exposed_before_s),
                 mem_bytes=peak_mem_bytes(device))
    entry["ranks"] = over_ranks(entry, device)
    return entry, n_signals > 0


def set_is_last_micro_step(model, config, is_last):
    """Whether the next backward is the last one before a step. Only then gradients are exchanged:
    this sets what no_sync() does, without its block.

    Stages 2 and 3 always exchange them: they have no room for whole gradients, and so their bits
    are those of one process, however micro batches are divided among ranks. But stage 2 need not
    gather parameters again that no step has changed.
    """
    if config.mode in FSDP:
        model.set_requires_gradient_sync(is_last)
    elif config.mode not in ("zero2", "zero3") or config.shard_size == 1:
        model.require_backward_grad_sync = is_last
    if config.mode in ("zero1", "zero2", "zero3", *FSDP):
        model.set_is_last_backward(is_last)


def accumulation_steps(config):
    """Micro-steps that a step takes on every rank. Raises ValueError unless whole."""
    m = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    B, W = config.global_batch_size, dist.get_world_size()
    if B % (m * W):
        possible = [n for n in range(1, B // m + 1) if B % (m * n) == 0]
        others = f"on {possible} ranks it would" if possible else f"it is no multiple of {m}"
        raise ValueError(f"--global_batch_size {B} in micro batches of {m} does not divide among "
                         f"{W} ranks: {others}")
    return B // (m * W)


def autocast(config, device):
    return torch.autocast(device.type, DTYPES[config.dtype], enabled=config.dtype != "fp32")


def lr_at(step, config):
    """Learning rate of a step, from 1 on: linear warm-up to lr, then a cosine from lr to min_lr."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    decay_steps = max(1, config.max_steps - config.warmup_steps)
    done = (step - 1 - config.warmup_steps) / decay_steps
    coefficient = 0.5 * (1 + math.cos(math.pi * done))  # from 1 to 0
    return min_lr + coefficient * (config.lr - min_lr)


def over_ranks(entry, device):
    """{name: [min, mean, max] over ranks} of what each rank measures for itself, and the slowest
    rank. All ranks take as long as that one, so it is the one that waits least; None in the torch
    modes, which do not say how long they wait. A collective."""
    names = ("step_ms", "comm_exposed_ms", "mem_bytes")
    table = torch.zeros(dist.get_world_size(), len(names), dtype=torch.float64, device=device)
    table[dist.get_rank()] = table.new_tensor([entry[name] for name in names])
    dist.all_reduce(table)
    table = table.cpu()
    found = {}
    for name, column in zip(names, table.T):
        found[name] = [column.min().item(), column.mean().item(), column.max().item()]
    busy_ms = table[:, 0] - table[:, 1]
    found["slowest"] = None if busy_ms.isnan().any() else busy_ms.argmax().item()
    return found


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


# -------------------------------------------------------------------------------------------------
# flags

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
NEEDS_PACKAGE = {"tensorboard": "tensorboard", "wandb": "wandb", "init_from": "safetensors",
                 "export_hf": "safetensors"}
# Flags that a run which resumes does not take from its checkpoint; and those that an evaluation
# does not take either, as it may be on another machine and on fewer ranks.
OF_ONE_START = {"out_dir", "resume", "eval_only", "prompt", "trace", "profile", "export_hf"}
NOT_TO_EVALUATE = {"device", "compile", "comm_hook", "shard_size", "tensorboard", "wandb"}
# Flags of nanoGPT whose names have nothing in common with ours.
OF_NANOGPT = {"learning_rate": ["lr"], "gradient_accumulation_steps": ["global_batch_size"],
              "start": ["prompt"]}


def int_or_auto(text):
    return text if text == "auto" else int(text)


def make_parser():
    """A parser with a flag for each field of Config, in groups, with the comments as help. What it
    returns has the flags that are given, and no others."""
    title, commands, *_, debugging = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=f"{title}\n\n{commands}",
                                     epilog=debugging, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: refuse(f"{message} (--help lists the flags)")
    options = {option.name: option for option in dataclasses.fields(Config)}
    for line in inspect.getsource(Config).splitlines():
        heading = re.fullmatch(r"    # (.*)", line)
        field = re.fullmatch(r"    (\w+): .*?# (.*)", line)
        if heading:
            group = parser.add_argument_group(heading[1])
        if field:
            add_flag(group, options[field[1]], field[2])
    return parser


def add_flag(group, option, text):
    """Add the flag of a field of Config, with this text and the default as help."""
    if option.type is bool:
        group.add_argument(f"--{option.name}", action=argparse.BooleanOptionalAction, help=text)
        return
    kinds = getattr(option.type, "__args__", (option.type,))  # int | None -> (int, NoneType)
    kind = int_or_auto if kinds == (int, str) else kinds[0]
    if option.name in CHOICES:
        text += f": {', '.join(CHOICES[option.name])}"
    if option.default is not None:
        text += " [" + json.dumps(option.default).strip('"') + "]"
    group.add_argument(f"--{option.name}", type=kind, metavar=kind.__name__, help=text)


def parse_args(argv):
    """Flags -> Config. What is not given is as in the checkpoint that --resume names, or else the
    default. Without a process group yet, a mistake ends the process here.
    """
    parser = make_parser()
    refuse_values_of_switches(argv)
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    unknown_flags = [word for word in unknown if word.startswith("--")]
    if unknown_flags:
        parser.error("; ".join(map(explain_unknown, unknown_flags)))
    if unknown:
        parser.error(f"{unknown[0]} is no flag, and there are no configuration files")
    saved = flags_of_checkpoint(given)
    config = Config(**(saved | given))
    if config.mode is None:
        config.mode = "ddp" if "RANK" in os.environ else "single"
    for name, (other, values) in BELONGS.items():
        if name not in given and getattr(config, other) not in values:
            setattr(config, name, getattr(Config, name))  # saved, but of no use any more
    for name, value in vars(config).items():
        check_value(parser, name, value)
    return config


def explain_unknown(word):
    """What to say of a flag that there is not."""
    name = word.partition("=")[0].removeprefix("--")
    similar = OF_NANOGPT.get(name)
    if similar is None:
        similar = difflib.get_close_matches(name, vars(Config()), cutoff=0.65)
    hint = did_you_mean([f"--{flag}" for flag in similar])
    return f"there is no flag {word}{hint}"


def refuse_values_of_switches(argv):
    """`--compile=False` is how nanoGPT says it."""
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if equals and isinstance(getattr(Config, name, None), bool):
            is_off = value.lower() in ("false", "no", "off", "0")
            refuse(f"{word}: did you mean --{'no-' if is_off else ''}{name}?")


def did_you_mean(words):
    return f": did you mean {' or '.join(words[:2])}?" if words else ""


def check_value(parser, name, value):
    """End the process if a flag cannot have this value, whatever the others are."""
    if name in CHOICES and value is not None and value not in CHOICES[name]:
        similar = difflib.get_close_matches(value, CHOICES[name], cutoff=0.5)
        hint = did_you_mean([f"--{name} {word}" for word in similar])
        parser.error(f"--{name} {value} is none of {', '.join(CHOICES[name])}{hint}")
    least = 1e-9 if name in POSITIVE else 0
    most = AT_MOST.get(name, 1e18)
    if isinstance(value, int | float) and not least <= value <= most:  # nan is in no range
        parser.error(f"--{name} {value} is out of range")


def flags_of_checkpoint(given):
    """{name: value} of the flags that the run had from which this one goes on; {} without. Where a
    checkpoint is damaged the one before will do: `newest_sound` says so."""
    if "resume" not in given:
        return {}
    folder = None
    out_dir = pathlib.Path(given.get("out_dir", Config.out_dir))
    if given["resume"] != "auto":
        folder = pathlib.Path(given["resume"])
        out_dir = pathlib.Path(given.get("out_dir", folder.resolve().parent))
    # A run that torchrun has started again goes on from its own newest checkpoint. By then it may
    # have removed the one of --resume.
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    folders = []
    if folder is None or is_restart:
        folders += newest_first(out_dir)
    if folder is not None:
        folders.append(folder)
    if folders == [folder] and not (folder / RECORD).exists() and not (folder / SUMS).exists():
        others = newest_first(folder) or newest_first(folder.parent)
        hint = did_you_mean([str(other) for other in others])
        refuse(f"--resume {folder} is no checkpoint{hint}")
    record = None
    for candidate in folders:
        record = read_record(candidate)
        if record is not None:
            break
    if record is None:
        return {}
    saved = {}
    for name, value in record["config"].items():
        if hasattr(Config, name) and name not in OF_ONE_START:  # an older version had other flags
            saved[name] = value
    if saved.get("mode") == "single":
        del saved["mode"]  # single is the default without torchrun, and impossible under it
    if given.get("eval_only"):
        for name in NOT_TO_EVALUATE:
            saved.pop(name, None)
        for name in ("eval_steps", "sample_tokens"):
            if saved.get(name) == 0:
                del saved[name]  # what the run did without is what is asked for now
    saved["out_dir"] = str(out_dir)
    return saved


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
        n_ranks = getattr(config, name)
        if n_ranks is not None and W % n_ranks:
            raise ValueError(f"--{name} {n_ranks} does not divide {W} ranks")
    if config.optimizer == "muon" and config.mode in ("torch-zero1", *FSDP):
        raise ValueError(f"--optimizer muon does not work with --mode {config.mode}: choose zero3")
    if config.dtype == "fp16" and config.comm_hook in ("powersgd", "topk"):
        raise ValueError(f"--dtype fp16 and --comm_hook {config.comm_hook}: choose bf16")
    if config.init_from and not os.path.isdir(config.init_from):
        raise ValueError(f"--init_from {config.init_from} is no folder of a Llama; to go on with a "
                         "run of this program: --resume auto")
    if config.init_from and any(getattr(config, name) for name in SIZES[:-1]):
        raise ValueError("--init_from has sizes of its own: only --block_size can be another")
    if config.min_lr is not None and config.min_lr > config.lr:
        raise ValueError(f"--min_lr {config.min_lr} is above --lr {config.lr}")
    if config.trace and config.profile:
        raise ValueError("--trace cannot run beside --profile")
    if config.eval_only and (config.trace or config.profile):
        raise ValueError("--trace and --profile are for steps, and --eval_only makes none")
    if config.eval_only:
        if config.resume is None and config.init_from is None:
            raise ValueError("--eval_only needs --resume, such as --resume out/best")
    else:
        accumulation_steps(config)
    for name, package in NEEDS_PACKAGE.items():
        if getattr(config, name) and not importlib.util.find_spec(package):
            raise ValueError(f"--{name} needs a package: pip install {package}")


def check_compiler(device):
    """Raise ValueError where torch.compile lacks what it needs on a CPU. (In the first step this
    would be a traceback. The function is private, but asks what torch itself will ask.)"""
    from torch._inductor import cpp_builder

    if device.type == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except RuntimeError as error:
            raise ValueError("--compile needs a C++ compiler: install g++ or clang, or set CXX to "
                             "the one that you have") from error


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


def start_process_group(config):
    """Join the other ranks, of which there are none without torchrun -> this rank's device, and a
    store that lives as long as torchrun does. Raises Stop if there is no such --device, or fewer
    than ranks on this host, since two cannot share one."""
    torch.set_num_threads(config.threads)
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_devices = {"cpu": 1024}
    default = "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Not MPS, which has no collectives and no float64; torch names gloo for it.
    if accelerator and dist.get_default_backend_for_device(accelerator) != "gloo":
        default = accelerator.type
        n_devices[default] = torch.accelerator.device_count()
    kind = default if config.device is None else config.device
    n = n_devices.get(kind, 0)
    if n == 0:
        raise Stop(f"--device {kind} is not on this machine: choose {' or '.join(n_devices)}")
    if n_local > n:
        raise Stop(f"--device {kind}: torchrun started {n_local} ranks here, for {n} devices")
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
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


def meet(store, rank, world_size, timeout):
    """store, torchrun's, under a prefix that only the ranks of this start know.

    torchrun keeps its store over restarts (torch 2.13), and in it the addresses of dead ranks, for
    which new ranks would wait. It counts restarts, but per node, so the count is no prefix that
    ranks agree on. So rank 0 draws a prefix, and every other rank asks for it under a number that
    it has drawn itself: an answer to a dead rank is never taken for one's own. Raises Stop if a
    rank does not come within timeout, a timedelta.
    """
    drawn = os.urandom(8).hex()
    if rank > 0:
        store.set(f"ask/{rank}", drawn)
        prefix = store.get(f"answer/{drawn}").decode()  # waits
        store.set(f"{prefix}/met/{rank}", "")
        return dist.PrefixStore(prefix, store)
    deadline_s = time.monotonic() + timeout.total_seconds()
    peers = range(1, world_size)
    while not store.check([f"{drawn}/met/{peer}" for peer in peers]):
        for peer in peers:
            if store.check([f"ask/{peer}"]):  # asked by a dead rank, or by the one that waits
                asked = store.get(f"ask/{peer}").decode()
                store.set(f"answer/{asked}", drawn)
        if time.monotonic() > deadline_s:
            raise Stop("some ranks did not start within --timeout_s")
        time.sleep(0.01)
    return dist.PrefixStore(drawn, store)


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
    """Call function(*arguments) on rank 0 while the others wait -> its result there, None on the
    others. Raises Stop as `together` does."""
    if dist.get_rank() > 0:
        return together(lambda: None)
    return together(function, *arguments)


def check_ranks_agree(facts):
    """facts: {name: value}. Where ranks have different values, raise Stop on all of them, with the
    first such fact and the values of all ranks. A collective, of hashes as long as they agree."""
    hashes = gather(hashlib.sha256(repr(facts).encode()).digest())
    if len(set(hashes)) == 1:
        return
    views = gather(facts)
    for name in facts:
        values = [view[name] for view in views]
        if len(set(values)) > 1:
            raise Stop(f"ranks differ in {name}, which is {values} on ranks 0 to {len(values) - 1}")


def say(text, file=None):
    """Print on rank 0. A run does not end because its log is on a full disk."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(text, file=file, flush=True)


# -------------------------------------------------------------------------------------------------
# before the first step: what every rank makes by itself, and what all must have in common


def prepare(config, device):
    """What every rank makes, or refuses, by itself -> tokenizer, GPT, training tokens, validation
    tokens. Raises ValueError and OSError on a user's mistake."""
    check(config)
    if config.compile:
        check_compiler(device)
    if not config.eval_only:
        make_folder("out_dir", config.out_dir)
    if config.export_hf:
        make_folder("export_hf", config.export_hf)
    tokenizer = load_tokenizer(config.tokenizer)
    gpt = build_gpt(config, tokenizer)
    config.block_size = gpt.config.block_size  # that of the preset or folder, unless given
    vocab_size = gpt.config.vocab_size
    if max(encode_prompt(config, tokenizer)) >= vocab_size:
        raise ValueError(f"--prompt has tokens that are not among the {vocab_size} of the model")
    tokens, val_tokens = load_tokens(config, tokenizer, vocab_size)
    return tokenizer, gpt, tokens, val_tokens


def make_folder(flag, path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--{flag} {path!r}: {error.strerror}") from error


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


def facts_of_start(mark, val_tokens, config):
    """{name: value} of what ranks must have in common, beside their flags."""
    facts = dict(validation=fingerprint(val_tokens), torch=torch.__version__,
                 numpy=np.__version__)
    if mark is not None and config.save_interval > 0:  # each rank writes its part of a checkpoint
        facts["out_dir"] = "rank 0's" if is_ours(mark) else "another folder"
    return facts


def introduce(gpt, tokens, config, device):
    """Print what is trained, on what -> the device's name."""
    name = "CPU"
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name()
    n_parameters = sum(p.numel() for p in gpt.parameters())
    say(f"{n_parameters:,} parameters | {len(tokens):,} training tokens | {config.mode}, "
        f"W = {dist.get_world_size()}, {dist.get_backend()} on {name}")
    return name


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


def encode_prompt(config, tokenizer):
    """Token ids of --prompt, at least one."""
    ids = tokenizer.encode(config.prompt, allowed_special={END_OF_TEXT}, disallowed_special=())
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


def tokenize(text, tokenizer, config):
    """text -> token ids, memory-mapped from a file in out_dir that is named after the text's hash.
    An evaluation writes no such file, but uses one that is there.

    Ranks that come at the same time do the same work. That costs no time, and waiting for one of
    them could take longer than a collective may.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = pathlib.Path(config.out_dir, f"tokens-{tokenizer.name}-{digest}.npy")
    if not path.exists():
        say(f"tokenizing {len(text):,} characters with {tokenizer.name}")
        ids = tokenizer.encode_to_numpy(text, allowed_special={END_OF_TEXT}, disallowed_special=())
        ids = ids.astype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32)
        if config.eval_only:
            return ids
        unfinished = path.with_name(f".tokens-{os.urandom(4).hex()}.npy")
        np.save(unfinished, ids)
        fsync(unfinished)
        os.replace(unfinished, path)
    return np.load(path, mmap_mode="r")


def load_tokens(config, tokenizer, vocab_size):
    """Training and validation token ids, each (n,). Of a text the last tenth validates. Raises
    OSError, and ValueError where there are too few tokens or they are not the tokenizer's."""
    if config.eval_only and not config.eval_steps:
        return np.zeros(0, np.uint16), np.zeros(0, np.uint16)
    path = pathlib.Path(config.dataset)
    try:
        if config.dataset != "stdlib" and path.is_dir():  # nanoGPT's: uint16 and nothing else
            train = np.memmap(path / "train.bin", "<u2", "r")
            val = np.memmap(path / "val.bin", "<u2", "r")
        else:
            text = stdlib_text() if config.dataset == "stdlib" else path.read_text("utf-8")
            if "\0" in text:
                raise ValueError("not a text; of train.bin and val.bin give the folder")
            tokens = tokenize(text, tokenizer, config)
            train, val = np.split(tokens, [int(0.9 * len(tokens))])
    except (ValueError, OSError) as error:  # not UTF-8, an empty file, half a token, no file
        raise ValueError(f"--dataset {path}: {error}") from error
    if not config.eval_only:
        check_tokens(train, config.global_batch_size, vocab_size, config)
    if config.eval_steps:
        check_tokens(val, 1, vocab_size, config)
    return train, val


def check_tokens(tokens, least, vocab_size, config):
    """Raise ValueError where there are fewer than `least` blocks, or where a sample of the tokens
    has one that the model lacks. (The loss refuses any other such token.)"""
    if count_blocks(tokens, config) < least:
        raise ValueError(f"--dataset {config.dataset} is too short: of {len(tokens)} tokens, where "
                         f"{least * config.block_size + 1} are needed")
    largest = some_of(tokens).max()
    if largest >= vocab_size:
        raise ValueError(f"--dataset {config.dataset} has token {largest}, but the model knows "
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


# -------------------------------------------------------------------------------------------------
# model, wrapper, optimizer


def build_gpt(config, tokenizer):
    """The GPT: a preset, or the folder --init_from, each size overridden where its flag is given.
    Raises ValueError on sizes that do not fit.

    For ZeRO it is on the meta device, and its wrapper gives it values unit by unit, so that no rank
    ever holds all of it.
    """
    if config.init_from:
        sizes = read_llama_config(config.init_from)
    else:
        sizes = dict(PRESETS[config.model], vocab_size=tokenizer.n_vocab)
    for name in SIZES:
        if getattr(config, name) is not None:
            sizes[name] = getattr(config, name)
    with torch.device("meta" if config.mode in ZERO else "cpu"):
        gpt = GPT(GPTConfig(seed=config.seed, **sizes,
                            activation_checkpointing=config.activation_checkpointing))
    if config.init_from:
        read = functools.partial(read_llama_weights, gpt, config.init_from)
        read()  # what is on meta is only compared; ZeRO's wrapper reads it, and takes rank 0's
        gpt.init_weights = read if dist.get_rank() == 0 else lambda: None
    return gpt


def wrap(gpt, config, device):
    """gpt -> what the loop calls. Here is where the modes differ.

    Whatever the mode, the result has what `add_our_interface` lists beside forward, so that no
    other function asks which wrapper it has.
    """
    # None is 25 MB too, but only with None is torch's first bucket small.
    options = dict(bucket_cap_mb=None if config.bucket_cap_mb == 25 else config.bucket_cap_mb,
                   find_unused_parameters=config.find_unused_parameters,
                   gradient_as_bucket_view=True)  # ours always does it
    if config.compile:
        gpt.compile_blocks()
    if config.mode in ZERO:
        for_muon = [p for name, p in gpt.named_parameters() if takes_muon(name, p, config)]
        model = ZERO[config.mode](gpt, param_dtype=DTYPES.get(config.param_dtype),
                                  reduce_dtype=DTYPES.get(config.reduce_dtype),
                                  shard_size=config.shard_size, offload=config.offload,
                                  uncut=for_muon)
    else:
        model = gpt.to(device)
    if config.mode == "ddp":
        model = DDP(model, **options)
    if config.mode in ("torch-ddp", "torch-zero1"):
        model = torch.nn.parallel.DistributedDataParallel(model, **options)
    if config.mode in FSDP:
        # Without a mesh it takes an accelerator's, if any.
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=config.mode == "torch-fsdp")
        fully_shard(model, mesh=mesh)  # by default the root stays whole, as Zero3's does
    is_ours = config.mode == "ddp" or config.mode in ZERO
    if not is_ours:
        add_our_interface(model, config)
    elif config.comm_hook:  # which takes the mean over ranks itself
        state, hook = comm_hook(config)
        model.register_comm_hook(state, hook)
    else:  # a sum over ranks: `train_step` divides
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


def add_our_interface(model, config):
    """Give the bare GPT, or torch's wrapper, what our wrappers have beside forward.

    shard_group: the ranks over which parameters are sharded, None if each rank has them whole.
    shard_starts(): {name: the first element of the parameter that this rank has}.
    full_parameters(): yields (name, whole parameter); a collective if they are sharded.
    exposed_s: the seconds that this rank has waited for communication so far.
    gradient_divide_factor: what the sum of gradients over ranks has been divided by; None: W.
    """
    is_sharded = config.mode in FSDP
    is_torch = config.mode.startswith("torch")
    rank, W = dist.get_rank(), dist.get_world_size()

    def shard_starts():
        starts = {}
        for name, p in named_shards(model):
            # FSDP2 gives each rank ceil(rows / W) rows; the last ranks may have fewer, or none.
            n_rows = math.ceil(p.size(0) / W)
            starts[name] = rank * n_rows * p.stride(0) if is_sharded else 0
        return starts

    def full_parameters():
        for name, p in named_shards(model):
            p = p.detach()
            if isinstance(p, dist.tensor.DTensor):  # FSDP2's root stays whole after `sample`
                p = p.full_tensor()
            yield name, p

    model.shard_starts = shard_starts
    model.full_parameters = full_parameters
    model.shard_group = dist.group.WORLD if is_sharded else None
    model.gradient_divide_factor = None if is_torch else 1
    # Torch's wrappers do not say how long they wait, nor do accelerators: nan, in JSON null.
    model.exposed_s = math.nan if is_torch or dist.get_backend() != "gloo" else 0.0


def named_shards(model):
    """Yield (name in the GPT, what this rank trains of it) for every parameter."""
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
    N = max(1, config.global_batch_size // config.micro_batch_size)
    return ShardedGradScaler(device.type, 2.0 ** (16 - (N - 1).bit_length()),
                             enabled="fp16" in (config.dtype, config.param_dtype))


def largest_micro_batch(config, tokenizer, device):
    """--micro_batch_size auto: the largest size that divides a rank's part of the global batch and
    keeps a step within the limit on every rank. Raises Stop if none does. A collective.

    Memory grows with the size along a straight line, which is drawn through sizes 1 and 2. These
    are tried on a model and on data that are thrown away; an accelerator whose memory is out at
    size 2 gets size 1. 5 % of the limit is kept for evaluation and checkpoints, which are not
    tried.
    """
    if config.memory_limit_gb:
        n_bytes = 1e9 * config.memory_limit_gb
    elif device.type == "cpu":
        raise Stop("--micro_batch_size auto needs --memory_limit_gb on a CPU")
    else:
        n_bytes, _ = torch.accelerator.get_memory_info(device)  # free, total
    limit, W = 0.95 * n_bytes, dist.get_world_size()
    config = dataclasses.replace(config, warmup_steps=0)  # PowerSGD begins in the third step
    model = wrap(build_gpt(config, tokenizer), config, device)
    optimizer = make_optimizer(model, config)
    tokens = np.zeros(4 * W * config.block_size + 1, dtype=np.uint16)
    peak_mem_bytes(device, reset=True)  # that of tokenizing
    peaks = []
    for size in (1, 2):
        # Two micro-steps, since accumulating takes memory too, and three steps, for PowerSGD.
        trial = dataclasses.replace(config, micro_batch_size=size, global_batch_size=2 * size * W)
        scaler = make_scaler(trial, device)
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
    bytes_per_sequence = max(1, peaks[1] - peaks[0])
    most = min(gather(1 + (limit - peaks[0]) / bytes_per_sequence))  # below 1: not even 1
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
    for turn in range(math.ceil(n / W)):
        index = turn * W + rank
        i = min(index, n - 1)
        x, y = read_blocks(tokens, order[i * m:(i + 1) * m], config, device)
        with autocast(config, device):
            _, loss = model(x, y)
        if index < n:
            losses[index] = loss
    if config.mode in FSDP:
        for module in (*model.blocks, model):
            module.reshard()  # what stays whole without a backward would not be saved as shards
    model.train()
    dist.all_reduce(losses)
    return losses.mean().item()


def evaluate_only(model, tokens, step, config, device):
    """--eval_only: print the validation loss -> an entry for the result. A collective."""
    entry = dict(ranks=dict(mem_bytes=[max(gather(peak_mem_bytes(device)))]))
    if config.eval_steps:
        entry["val_loss"] = evaluate(model, tokens, config, device)
        say(f"step {step} | val loss {entry['val_loss']:.4f}")
    return entry


def sample(gpt, tokenizer, config, device):
    """--prompt and a text that continues it, the same on all ranks. A collective, since in stage 3
    every forward gathers weights."""
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([encode_prompt(config, tokenizer)], device=device)
    # Eager, since compiling for every length would take longer than the run.
    with autocast(config, device), torch.compiler.set_stance("force_eager"):
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
    """Raise Stop, naming parameter and ranks, where whole parameters are not the same on all ranks,
    as after a flipped bit. A collective. Sums are of bits, so that no rounding hides a difference.

    A shard has no second copy to compare with: in the ZeRO modes this finds less.
    """
    sums = {}
    for name, p in model.full_parameters():
        sums[name] = p.view(torch.int32).sum(dtype=torch.int64).item()
    check_ranks_agree(sums)


def bytes_per_param(model, gpt, optimizer):
    """Bytes of weights, gradients and optimizer state that this rank holds after a step, over the
    number of parameters: 16 without sharding. (ZeRO paper, arXiv 1910.02054, section 3.) Counted
    by memory, since shards may be views of what is whole."""
    held = [*model.parameters(), *gpt.parameters()]  # shards, and what is whole beside them
    held += [p.grad for p in held if p.grad is not None]
    for state in optimizer.state.values():
        held += [t for t in state.values() if t.dim() > 0]  # not AdamW's count of steps
    n_bytes = {}  # of each piece of memory, by its address
    for t in held:
        storage = local(t).untyped_storage()
        n_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(n_bytes.values()) / sum(p.numel() for p in gpt.parameters())


def print_result(model, progress, recent, n_bytes, config):
    """The last line of a run. Times are medians of the last steps that this process made, None if
    it made none; memory is the most that any rank held until the last step. A collective."""
    entry = progress["entry"]
    result = dict(mode=config.mode, world_size=dist.get_world_size(), steps=progress["step"],
                  train_loss=entry.get("loss"), val_loss=entry.get("val_loss"),
                  peak_mem_bytes=int(entry["ranks"]["mem_bytes"][-1]), bytes_per_param=n_bytes,
                  param_sha256=param_sha256(model), threads=config.threads)
    for name in ("tokens_per_sec", "step_ms", "comm_exposed_ms", "mfu"):
        values = [entry[name] for entry in recent]
        result[name] = np.median(values) if values else None
    say("RESULT " + json.dumps(finite(result)))


def export(model, gpt, config, tokenizer):
    """Write the whole model to the folder --export_hf. A collective; only rank 0 ever holds all of
    it, and on the CPU."""
    whole = {}
    for name, p in model.full_parameters():
        if dist.get_rank() == 0:
            whole[name] = p.to("cpu", copy=True)
    # The others wait in a collective, and that may take longer than --timeout_s.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(days=1))
    on_rank_0(write_llama, config.export_hf, whole, gpt.config, tokenizer.eot_token)


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
# inside the run's mark and renamed when everything in it is on disk, so a crash leaves the
# checkpoints before as they are.
#
# The mark is a hidden folder of out_dir. A process may be frozen, and wake up when a later run has
# long begun in the same out_dir; torchrun may be killed, and leave its ranks behind. So a run makes
# a mark, and removes all others when it has loaded its checkpoint. A run that has lost its mark
# stops. What it was writing went with its mark, and the metrics.jsonl that it has open is no longer
# the one of that name.

RECORD, SUMS = "checkpoint.json", "SHA256SUMS"
HASHED = (".distcp", ".metadata", RECORD)  # ends of the names of the files that SUMS has


class Slice(torch.Tensor):
    """The elements [first, first + n) that this rank has of a flat tensor of `whole` elements.

    torch.distributed.checkpoint asks a tensor that is divided among ranks by the methods with
    underscores, which are those of torch's DTensor: which elements are here, how to write them, and
    where to read them to. A DTensor itself would not do: ZeRO's shards begin in the middle of a
    row.
    """

    def size(self):
        return torch.Size([self.whole])

    def __create_chunk_list__(self):
        """Where the elements are that are here: dcp's for one dimension."""
        if self.numel() == 0:
            return []
        first, n = torch.Size([self.first]), torch.Size([self.numel()])
        return [dcp.metadata.ChunkStorageMetadata(first, n)]

    def __create_write_items__(self, key, _):
        """What dcp has to write of them."""
        properties = dcp.metadata.TensorProperties.create_from_tensor(self)
        items = []
        for chunk in self.__create_chunk_list__():
            index = dcp.metadata.MetadataIndex(key, chunk.offsets)
            data = dcp.planner.TensorWriteData(chunk, properties, self.size())
            items.append(dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD,
                                               tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        """The memory that dcp reads from, and writes to."""
        return self.as_subclass(torch.Tensor)


def flags_to_save(config):
    """config for a checkpoint, from which a run may resume in another working folder."""
    saved = dict(vars(config))
    if config.dataset != "stdlib":
        saved["dataset"] = os.path.abspath(config.dataset)
    if config.init_from:
        saved["init_from"] = os.path.abspath(config.init_from)
    return saved


def checkpoint_tensors(model, optimizer, gpt, config):
    """{key: what this rank has of it}, sharing memory with what is trained: loading a checkpoint
    writes into these tensors. Keys are names, so any mode finds what it needs. An empty shard is
    left out, and so is its state: Adam's step counter stays 0 on a rank that owns nothing."""
    tensors = {}
    starts = model.shard_starts()
    sizes = {name: p.numel() for name, p in gpt.named_parameters()}
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


def claim(out_dir):
    """Make the mark of this run in out_dir -> its path. A collective."""
    mark = out_dir / f".run_{from_rank_0(os.urandom(8).hex())}"
    on_rank_0(make_mark, mark)
    return mark


def make_mark(mark):
    """A folder with a file in it, which counts: the folder alone dcp would make anew as it writes a
    checkpoint there, when a later run has removed it."""
    mark.mkdir()
    (mark / "mark").touch()


def is_ours(mark):
    return (mark / "mark").exists()


def still_ours(mark):
    """Raise OSError if a later run has removed the mark."""
    if not is_ours(mark):
        raise OSError(f"a later run has begun in {mark.parent}, or {mark.name} was removed")


def release(mark):
    """Rank 0: this run will write no more."""
    still_ours(mark)
    shutil.rmtree(mark, ignore_errors=True)


def newest_first(out_dir):
    """The checkpoints in out_dir: the number of the step has eight digits."""
    return sorted(out_dir.glob("step_" + 8 * "[0-9]"), reverse=True)


def sha256_line(path):
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


def names_of_files(folder):
    """What SHA256SUMS has to have. What others have put there, such as .DS_Store, is left out."""
    return sorted(path.name for path in folder.glob("*") if path.name.endswith(HASHED))


def checksums(folder):
    """The lines that SHA256SUMS has to have for what is in folder now. A collective: each rank
    reads its share of the files. Raises Stop where one cannot be read."""
    names = from_rank_0(on_rank_0(names_of_files, folder))
    mine = names[dist.get_rank()::dist.get_world_size()]
    lines = together(lambda: [sha256_line(folder / name) for name in mine])
    return sorted(line for lines_of_rank in gather(lines) for line in lines_of_rank)


def expected_checksums(folder):
    """The lines of SHA256SUMS, none if there is no such file."""
    path = folder / SUMS
    return path.read_text("utf-8", "replace").splitlines() if path.is_file() else []


def read_record(folder):
    """checkpoint.json of a checkpoint, None where it is damaged, unreadable or not there."""
    try:
        if sha256_line(folder / RECORD) in expected_checksums(folder):
            return json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        pass
    return None


def fsync(path):
    """Of a file or a folder; of a folder, so that a new name in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_checkpoint(out_dir, mark, tensors, record, metrics):
    """Write out_dir/step_... -> whether that succeeded. If not, as on a full disk, it is said, and
    the run continues: the next checkpoint may succeed. Raises Stop if the mark is gone. A
    collective."""
    on_rank_0(still_ours, mark)
    folder = out_dir / f"step_{record['step']:08d}"
    unfinished = mark / folder.name
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished))
        on_rank_0((unfinished / RECORD).write_text, json.dumps(record, indent=1))
        on_rank_0((unfinished / SUMS).write_text, "\n".join(checksums(unfinished)))
        on_rank_0(publish, mark, unfinished, folder, metrics)
        on_rank_0(tidy, out_dir, mark, record["best_step"], record["config"]["keep_last"])
        return True
    except (dcp.CheckpointException, Stop) as error:
        # The last line, since dcp's error has the tracebacks of all ranks.
        say(f"train.py: step {record['step']}: the checkpoint failed, earlier ones are as they "
            f"were: {str(error).strip().splitlines()[-1]} (is the disk full, or gone?)", sys.stderr)
        # dcp may have made the folder of a mark anew that is gone.
        on_rank_0(shutil.rmtree, unfinished if is_ours(mark) else mark, True)
        return False


def publish(mark, unfinished, folder, metrics):
    """Rank 0: dcp has put its files on disk. Do so with the rest, and with the metrics up to here,
    which a run that resumes keeps; then the rename makes it count."""
    metrics.sync()
    for path in (unfinished / RECORD, unfinished / SUMS, unfinished):
        fsync(path)
    still_ours(mark)
    unfinished.rename(folder)
    fsync(folder.parent)


def tidy(out_dir, mark, best_step, keep_last):
    """Rank 0: point `best` to the best checkpoint, if it is there. Remove those that are neither it
    nor among the keep_last newest ones."""
    still_ours(mark)
    best = out_dir / f"step_{best_step:08d}"
    link = out_dir / "best"
    if link.is_dir() and not link.is_symlink():  # as in a copy that has followed the link
        link.rename(out_dir / time.strftime("earlier_best_%Y%m%d_%H%M%S"))
    link.unlink(missing_ok=True)
    if best.exists():  # there is no step 0, which means none
        link.symlink_to(best.name)
    for old in newest_first(out_dir)[keep_last:]:
        if old != best:
            removed = old.rename(mark / f"{old.name}.removed")  # at once, whatever happens
            shutil.rmtree(removed, ignore_errors=True)


def newest_sound(folders):
    """The first of folders whose files are as they were written, None if there are no folders.
    Raises Stop, naming the files, if there is none such. A collective.

    This comes before anything else is read: .metadata is a pickle.
    """
    folders = from_rank_0(folders)  # a network disk may show other ranks an older view
    for folder in folders:
        try:
            found = checksums(folder)
            expected = from_rank_0(on_rank_0(expected_checksums, folder))
            if expected and found == expected:
                return folder
            wrong = sorted({line.partition("  ")[2] for line in {*found} ^ {*expected}})
            problem = f"does not match its {SUMS}: {', '.join(wrong)}"
            if not expected:
                problem = f"is no checkpoint, as it has no {SUMS}"
        except Stop as error:
            problem = f"cannot be read: {error}"
        if folder == folders[-1]:
            raise Stop(f"{folder} {problem}")
        say(f"train.py: {folder} {problem}; falling back to the checkpoint before", sys.stderr)


def resume(config, out_dir, mark, tensors, facts, torchrun_store):
    """Load the checkpoint that --resume names into tensors -> its record, None to start over. A
    collective. After a restart by torchrun it is the newest one in out_dir, whatever --resume says.
    The line that it prints is a restart's first one, and has the numbers of ranks.

    facts: {name: value} of what must be as it was. Raises Stop where it is not, or where the
    checkpoint is damaged. At the end out_dir has the past of this run, and nothing else; an
    evaluation leaves it as it is.
    """
    is_restart = torchrun_store.check(["begun"])
    folders = []
    if config.resume == "auto" or is_restart:
        folders += newest_first(out_dir)
    if config.resume not in (None, "auto"):
        folders.append(pathlib.Path(config.resume))
    folder = newest_sound(folders)
    record = None
    if folder is not None:
        record = together(read_record, folder)
        load(folder, record, tensors, facts)
        say(f"resumed from {folder}, after step {record['step']}, on {dist.get_world_size()} ranks "
            f"({record.get('world_size', 'unknown')} before)")
    if config.eval_only:
        if record is None and config.init_from is None:
            raise Stop(f"--eval_only: there is no checkpoint in {out_dir}")
        return record
    if record is not None and record["step"] > config.max_steps:
        raise Stop(f"--max_steps {config.max_steps} is less than the steps of {folder}")
    past = dict(step=0, best_step=0)
    is_in_out_dir = folder is not None and folder.resolve().parent == out_dir
    if is_in_out_dir:
        past = record
    elif record is not None:
        record |= dict(best_step=0, best_val_loss=math.inf)  # the best one is not here
    elif config.resume == "auto":
        say(f"no checkpoint in {out_dir}: a new run begins")
    on_rank_0(rewind, out_dir, mark, past, is_in_out_dir or is_restart)
    # Not earlier: if a rank dies before this line, what is in out_dir may be of another run.
    on_rank_0(torchrun_store.set, "begun", "")
    return record


def load(folder, record, tensors, facts):
    """Read a sound checkpoint into tensors. Raises Stop, naming the first fact of its record that
    is not as this run has it. A collective."""
    facts_before = {"optimizer": "adamw"} | record["facts"]  # which older ones do not say
    for name, value in facts.items():
        if name in facts_before and facts_before[name] != value:
            raise Stop(f"{folder} has {name} {facts_before[name]}, and this run {value}")
    # Partial, since a rank that was not there before has no residual of top-k to load.
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder),
             planner=dcp.DefaultLoadPlanner(allow_partial_load=True))


def rewind(out_dir, mark, past, keeps_metrics):
    """Rank 0: bring out_dir to where it was after past["step"]. Whatever is newer, damaged or of an
    earlier run is moved aside, which is said, and is not looked at again."""
    aside = out_dir / time.strftime(f"earlier_%Y%m%d_%H%M%S_{os.getpid()}")
    moved = [path for path in newest_first(out_dir) if int(path.name[5:]) > past["step"]]
    if not keeps_metrics:
        for pattern in ("best", "metrics.jsonl", "tensorboard", "trace_rank*.json"):
            moved += out_dir.glob(pattern)
    if moved:
        still_ours(mark)
        aside.mkdir()
        say(f"{', '.join(path.name for path in moved)} of an earlier run: moved to {aside}")
    for path in moved:
        still_ours(mark)
        path.rename(aside / path.name)
    still_ours(mark)
    for other in out_dir.glob(".run_*"):  # of a run that was killed, or is still there
        if other != mark:
            shutil.rmtree(other, ignore_errors=True)
    for unfinished in out_dir.glob(".tokens-*"):  # of one that was killed while it tokenized
        unfinished.unlink()
    tidy(out_dir, mark, past["best_step"], sys.maxsize)
    # Another file in its place, even if nothing changes: a run that is still there has it open.
    metrics = out_dir / "metrics.jsonl"
    if metrics.exists():
        kept = mark / metrics.name
        kept.write_text("".join(lines_until(past["step"], metrics)))
        fsync(kept)
        kept.replace(metrics)
        fsync(out_dir)


def lines_until(step, path):
    """The lines of metrics.jsonl up to a step. A crash may have torn the last one."""
    lines = []
    for line in path.read_text("utf-8", "replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                lines.append(line)
    return lines


# -------------------------------------------------------------------------------------------------
# log


def finite(entry):
    """entry with None for inf and nan, which JSON cannot represent."""
    return json.loads(json.dumps(entry), parse_constant=lambda constant: None)


def print_step(entry, recent, config):
    """The line of a step. recent: the entries of the last steps, for the time that is left."""
    mfu = "-" if math.isnan(entry["mfu"]) else f"{100 * entry['mfu']:.1f}%"
    step_ms = np.mean([old["step_ms"] for old in recent])
    minutes, seconds = divmod(round((config.max_steps - entry["step"]) * step_ms / 1e3), 60)
    line = (f"step {entry['step']:5d}/{config.max_steps} | loss {entry['loss']:.4f} | "
            f"lr {entry['lr']:.2e} | grad norm {entry['grad_norm']:.3f} | "
            f"param norm {entry['param_norm']:.2f} | {entry['tokens_per_sec']:,.0f} tokens/s | "
            f"mfu {mfu} | {entry['mem_bytes'] / 1e9:.2f} GB | {minutes}m{seconds:02d}s left")
    if "val_loss" in entry:
        line += f" | val loss {entry['val_loss']:.4f}"
    if entry["skipped"]:
        line += " | skipped, not finite"
    say(line)


class Metrics:
    """metrics.jsonl: a line per step. What a full disk does not take waits in memory for the next
    step, as half a line must be finished before another one begins.

    The file stays open: `rewind` of a later run puts another one in its place, so whatever a run
    writes that was frozen meanwhile does not arrive there.
    """

    def __init__(self, mark):
        self.file = open(mark.parent / "metrics.jsonl", "ab", buffering=0)
        still_ours(mark)  # after opening it: so this is not the file of a later run
        self.unwritten = b""

    def add(self, entry):
        """Write the line of a step, or say that it waits."""
        self.unwritten += (json.dumps(entry) + "\n").encode()
        try:
            self.write()
        except OSError as error:  # no reason to lose the run
            say(f"train.py: step {entry['step']} is not yet in the metrics: {error}", sys.stderr)

    def write(self):
        """Raises OSError if not all of it could be written."""
        while self.unwritten:
            n = self.file.write(self.unwritten)  # may be less than all
            self.unwritten = self.unwritten[n:]

    def sync(self):
        """Put all lines on disk, or raise OSError."""
        self.write()
        os.fsync(self.file)


def start_trackers(config, mark, gpt, progress):
    """-> this run's Metrics, None on other ranks and in an evaluation; and functions that take the
    entry of a step: for metrics.jsonl, and for what was asked for. A collective."""
    if config.eval_only:
        return None, []
    trackers = []
    metrics = on_rank_0(Metrics, mark)
    if metrics is not None:
        trackers.append(metrics.add)
        if config.tensorboard:
            trackers.append(start_tensorboard(config, progress))
        if config.wandb:
            trackers.append(start_wandb(config, progress))
    if config.profile or config.trace:
        n_steps = config.max_steps - progress["step"]
        if n_steps >= 3:
            trackers.append(start_profiler(config, gpt))
        else:  # a run that torchrun has started again must not fail here
            say(f"no trace: it begins in the third step, and there are {n_steps} more")
    return metrics, trackers


def start_tensorboard(config, progress):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{config.out_dir}/tensorboard", purge_step=progress["step"] + 1)
    atexit.register(writer.close)

    def add_scalars(entry):
        for name, value in entry.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, entry["step"])

    return add_scalars


def start_wandb(config, progress):
    """A run that resumes goes on in the run of its checkpoint."""
    import wandb

    run = wandb.init(project="nanozero", id=progress["run_id"], resume="allow",
                     name=f"{config.model} {config.mode} {progress['run_id'][:6]}",
                     dir=config.out_dir, config=vars(config))

    def log(entry):
        run.log(entry, step=entry["step"])

    return log


def start_profiler(config, gpt):
    """--profile N: what this rank does in N steps, with the named ranges of ddp.py and zero.py, as
    out_dir/trace_rank0.json and so on. --trace: these ranges of one step, printed."""
    path = f"{config.out_dir}/trace_rank{dist.get_rank()}.json"
    if config.profile:
        say(f"--profile: {path}")

    def export_trace(profiler):
        profiler.export_chrome_trace(path)

    def end_step(entry):
        profiler.step()

    # Two steps are left out, in which buffers are made; the second warms the profiler up.
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=config.profile or 1, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule,
                                      on_trace_ready=print_trace if config.trace else export_trace)
    if config.trace:
        name_blocks(gpt)
    profiler.start()
    atexit.register(profiler.stop)  # if the run ends before, a file has what there is
    return end_step


def name_blocks(gpt):
    """Let a profile have an empty range where a forward or backward of a block begins."""
    def note_forward(name, *_):
        kind = "recompute" if in_backward() else "forward"  # with --activation_checkpointing
        with torch.profiler.record_function(f"{kind}: {name}"):
            pass

    def note_backward(name, *_):
        with torch.profiler.record_function(f"backward: {name}"):
            pass

    for i, block in enumerate(gpt.blocks):
        block.register_forward_pre_hook(functools.partial(note_forward, f"blocks.{i}"))
        block.register_full_backward_pre_hook(functools.partial(note_backward, f"blocks.{i}"))


def print_trace(profiler):
    """Print the ranges of the step that was profiled, rank after rank, with the time since the
    first of them, and how long a wait took. A collective. On an accelerator these are the times of
    the CPU, which runs ahead of the device, and waits for it only where it needs a number."""
    if not dist.is_initialized():
        return  # the run has ended before
    lines = []
    n_lines = None  # all, or until the update; what comes later is of an evaluation
    start_us = None
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        name = event.name.replace("Optimizer.step#", "update: ").removesuffix(".step")
        kind = name.partition(":")[0]
        if kind in ("forward", "recompute", "backward", "start", "wait", "free", "update"):
            if start_us is None:
                start_us = event.time_range.start
            ms = (event.time_range.start - start_us) / 1e3
            took = f", {event.time_range.elapsed_us() / 1e3:.1f} ms" if kind == "wait" else ""
            lines.append(f"rank {dist.get_rank()} {ms:9.1f} ms  {name}{took}")
        if kind == "update":
            n_lines = len(lines)
    say("what each rank did in this step, by its own clock:")
    for lines_of_rank in gather(lines[:n_lines]):
        say("\n".join(lines_of_rank))


# -------------------------------------------------------------------------------------------------
# how a run ends


def run():
    """main, and what becomes of its errors -> exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop Ctrl-C ends a run in silence
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a sample may have any character
    progress = dict(step=0, best_step=0, best_val_loss=math.inf, skipped=0, entry={}, run_id=None)
    try:
        status = main(parse_args(sys.argv[1:]), progress)
    except Stop as error:
        refuse(error, 1 if progress["entry"] else 2)
    except Exception as error:
        if not explains_itself(error):
            sys.excepthook(*sys.exc_info())
        rank = os.environ.get("RANK", 0)
        print(f"train.py: rank {rank} failed in step {progress['step']}: {type(error).__name__}: "
              f"{one_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # at once, which closes its connections: that is how other ranks come to know
    # FSDP2's modules hold the group in a cycle: uncollected, its threads outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()
    drop_unwritten()
    return status


def drop_unwritten():
    """Give up what a full disk has not taken of the log, or Python would end with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def refuse(error, status=2):
    """Say in one line why the run stops, and leave. Only the first rank of a host speaks."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        # If it left first, torchrun would end the others before they can speak. If only this rank
        # has failed, no SIGTERM comes, and it prints the line itself.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(5)
    with contextlib.suppress(OSError):  # a full disk
        print(f"train.py: {one_line(error)}", file=sys.stderr, flush=True)
    os._exit(status)


def one_line(error):
    """Its text, of which a compiler's may be very long."""
    return " ".join(str(error).split())[:2000]


def explains_itself(error):
    """Whether error needs no traceback: memory is out, or a collective has failed, as it does where
    another rank has died or hangs. Only the text tells: gloo raises plain RuntimeErrors."""
    if isinstance(error, (dist.DistError, torch.OutOfMemoryError)):
        return True
    words = ("onnection", "imed out", "gloo", "pair closure")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


if __name__ == "__main__":
    sys.exit(run())

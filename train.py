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

Replaces a trainer framework by one loop. The options come first, then `main`, the loop in `train`,
and `train_step`; then what these call: preparing a run, model and modes, the optimizer, evaluation
and the end of a run. The rest is in extras/. The modes differ in `wrap`, which calls what makes
them, and in `set_is_last_micro_step`; `naive` averages in `train_step`. One process is a process
group of one rank, so no line asks whether there is a group.

How it differs from nanoGPT's loop: the global batch of a step is a function of (seed, epoch, step)
alone, and ranks take its micro batches in turn: any number of ranks reads the same samples in the
same order. Our modes divide nothing before the gradients of all micro batches are added up, in
that order. So in fp32 on CPU zero2 and zero3 produce the bits of one process on every number of
ranks, also where it changes in the middle of a run; the other modes do where each rank has one
micro-step. What is logged is the mean over all ranks, and every decision is taken from numbers
that all share.

Output: a line every few steps, out_dir/metrics.jsonl, checkpoints that any mode at any world size
can resume, a text that the model wrote, and as the last line of stdout `RESULT {json}`, whose
param_sha256 is equal for runs that produced the same bits.

Cost: two small all-reduces a step, for losses and for timings, and the norm of the parameters,
which is one more where they are sharded.

To debug, put breakpoint() anywhere and run one process: `python train.py --mode zero3` goes through
the functions of the stage, too. On several ranks breakpoint() fails, since they share one stdin:
there write torch.distributed.breakpoint(0), which stops rank 0 while the others wait, type `up` to
reach your line, and give yourself --timeout_s 3600.
"""

import collections
import dataclasses
import functools
import gc
import hashlib
import json
import math
import os
import signal
import sys
import time

import extras  # noqa: F401  first: it notes who has started this process
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddp import DDP, HierarchicalState, clip_gradients_, total_norm
from model import GPT, GPTConfig, PRESETS
from oracle import average_gradients
from checkpoint import (checkpoint_tensors, claim, flags_to_save, is_ours, release, resume,
                                save_checkpoint, say_contents, touch)
from extras.comm_hooks import TopKState, hierarchical_hook, top_k_hook
from data import (VOCAB_SIZES, accumulation_steps, block_order, count_blocks,
                          encode_prompt, fingerprint, global_batch, is_tokenized, load_tokenizer,
                          load_tokens, read_blocks)
from extras.flags import DTYPES, FSDP, SIZES, check, parse_args
from extras.llama import export, read_llama_config, read_llama_weights
from extras.log import (finite, introduce, over_ranks, peak_flops, peak_mem_bytes, print_step,
                         start_trackers)
from extras.ranks import (Stop, check_ranks_agree, choose_device, from_rank_0, gather, local,
                           named_shards, on_rank_0, ranks_on_device, run, say, say_sharing,
                           start_process_group, together)
from zero import Zero1, Zero2, Zero3


# -------------------------------------------------------------------------------------------------
# options
@dataclasses.dataclass
class Config:
    """Each field is a flag, its comment the text of --help, and the line above a group its title.
    What values are possible is in the tables of extras/flags.py."""
    # run
    mode: str | None = None  # who averages gradients: README's table [single; under torchrun ddp]
    max_steps: int = 800  # optimizer steps in all, also those before a resume
    seed: int = 1337  # of the weights, the order of samples and the sample text
    out_dir: str = "out"  # for checkpoints, metrics.jsonl, tokens; else the one --resume PATH is in
    device: str | None = None  # cpu or an accelerator, such as cuda [the accelerator, if any]
    deterministic: bool = False  # only kernels that have the same bits in every run; slower
    threads: int = 1  # CPU threads per rank; another number may change the last digits
    timeout_s: float = 120.0  # seconds after which a rank that waits for another one gives up
    check_interval: int = 100  # steps between checks that ranks have equal parameters, 0 for none
    # checkpoints
    save_interval: int = 100  # steps between checkpoints; also the last and the best; 0 for none
    keep_last: int = 2  # newest checkpoints that are kept; the best one is kept, too
    resume: str | None = None  # auto: the newest in out_dir, if any; or PATH, such as out/best
    export_hf: str | None = None  # folder for transformers, without tokenizer; needs safetensors
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
    memory_limit_gb: float | None = None  # for auto: GB of a rank [its share of a GPU]
    # precision
    dtype: str = "fp32"  # of the computation, by autocast; fp16 with a gradient scaler
    param_dtype: str | None = None  # zero1 to 3: in which parameters are gathered and used [fp32]
    reduce_dtype: str | None = None  # zero1 to 3: in which gradients are sent [fp32]
    # data parallelism
    bucket_cap_mb: float = 25.0  # ddp, torch-ddp: MB of gradients that are sent together
    find_unused_parameters: bool = False  # ddp, torch-ddp: allow parameters without a gradient
    comm_hook: str | None = None  # ddp: compress gradients; powersgd, topk: after the warm-up [no]
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
    eval_steps: int = 80  # sequences per evaluation, divided among ranks; 0 for none
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


# -------------------------------------------------------------------------------------------------
# the loop


def main(config, progress):
    """A whole run -> exit status.

    progress: what the loop knows beside tensors: the step, the best one and its loss, how many
    steps in a row were skipped, the last step's entry of metrics.jsonl, a name for trackers. Every
    checkpoint has it, and `run` names the step in errors.
    """
    if config.deterministic:
        take_deterministic_kernels()  # first: a device that has started reads no environment
    device = choose_device(config.device)
    torch.set_num_threads(config.threads)
    torchrun_store = start_process_group(device, config.timeout_s)
    say_sharing(device.type)
    together(check, config, device)
    tokenizer, gpt, tokens, val_tokens = together(prepare, config)
    # mark: a hidden folder in out_dir. As long as it is there, no other run writes to out_dir.
    with claim(config, torchrun_store) as mark:
        return train(config, progress, device, mark, torchrun_store, tokenizer, gpt, tokens,
                     val_tokens)


def train(config, progress, device, mark, torchrun_store, tokenizer, gpt, tokens, val_tokens):
    """The run itself, once ranks have met and out_dir is claimed -> exit status. A collective.

    gpt: the model without any wrapper. mark: None in an evaluation.
    """
    # 1) all ranks must have the same flags, model and data. Paths may differ: what the folders hold
    # is compared instead
    facts = facts_of_run(config, gpt, tokens)
    check_ranks_agree(vars(config) | facts | facts_of_start(mark, val_tokens, config))
    if config.micro_batch_size == "auto":
        config.micro_batch_size = largest_micro_batch(config, gpt.config.vocab_size, device)

    # 2) `model`, what the mode makes of gpt; the optimizer over the parameters that this leaves
    model = wrap(gpt, config, device)
    optimizer = make_optimizer(model, config)
    scaler = make_scaler(config, device)
    residual = model.comm_state.residual if config.comm_hook == "topk" else None

    # 3) continue where an earlier run stopped
    progress["run_id"] = from_rank_0(os.urandom(8).hex())
    tensors = checkpoint_tensors(model, optimizer, gpt, residual)
    record = resume(config, mark, tensors, facts, torchrun_store)
    if record is not None:
        for name in progress:
            progress[name] = record.get(name, progress[name])  # an older record may lack some
        if record["scaler"]:  # empty, unless that run had fp16, too
            scaler.load_state_dict(record["scaler"])
        if config.comm_hook in ("topk", "powersgd"):
            model.comm_state.iter = progress["step"]
    device_name = introduce(gpt, len(tokens), config, device)
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
        progress["skipped"] = (progress["skipped"] + 1) if entry["skipped"] else 0
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
            print_step(entry, recent, config.max_steps)
        progress["entry"] = finite(entry)
        for track in trackers:
            track(progress["entry"])
        if dist.get_rank() == 0 and not touch(mark, step):
            signals.append("a later run")  # the next step tells all ranks; `release` says why

        # write a checkpoint, on all ranks, and stop where one of them was told to; skipped steps
        # must not push out the checkpoints before them
        is_time = is_due(step, config.save_interval, config.max_steps) and not entry["skipped"]
        if config.save_interval and (is_time or best or stop):
            record = dict(progress | best, facts=facts, scaler=scaler.state_dict(),
                          world_size=dist.get_world_size(), config=flags_to_save(config),
                          eval_in="sequences")  # an older version counted micro batches
            tensors = checkpoint_tensors(model, optimizer, gpt, residual)  # top-k makes new ones
            saved = save_checkpoint(mark, tensors, record, metrics)
            if saved:
                progress |= best
        if stop:
            on_rank_0(release, mark)
            what_now = "; go on with --resume auto" if config.save_interval and saved else ""
            say(f"train.py: stopped by a signal after step {step}{what_now}", sys.stderr)
            return 0 if saved else 1

    # 5) a text that the model writes, the result, and the weights for transformers
    if not config.eval_only:
        on_rank_0(release, mark)
        say_contents(mark.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    is_finite = progress["entry"].get("param_norm", 0.0) is not None  # None stands for nan
    if config.eval_only:
        progress["entry"] = evaluate_only(model, val_tokens, progress["step"], config, device)
    n_bytes = bytes_per_param(model, gpt, optimizer) if recent else None
    if config.sample_tokens and is_finite:
        say(f"sample:\n{sample(gpt, tokenizer, config, device)}")
    if config.export_hf:
        say(f"--export_hf {config.export_hf}: without a tokenizer, since this run's is tiktoken's")
    print_result(model, progress, recent, n_bytes, config)
    if config.export_hf:
        export(model, gpt.config, config.export_hf, tokenizer.eot_token)
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
        own = blocks[index * m:(index + 1) * m]
        x, y = read_blocks(tokens, own, config.block_size, device)
        set_is_last_micro_step(model, config, micro_step == n - 1)
        with autocast(config.dtype, device):
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


def autocast(dtype, device):
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32")


def lr_at(step, config):
    """Learning rate of a step, from 1 on: linear warm-up to lr, then a cosine from lr to min_lr."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    decay_steps = max(1, config.max_steps - config.warmup_steps)
    done = (step - 1 - config.warmup_steps) / decay_steps
    coefficient = 0.5 * (1 + math.cos(math.pi * done))  # from 1 to 0
    return min_lr + coefficient * (config.lr - min_lr)


# -------------------------------------------------------------------------------------------------
# before the first step: what every rank makes by itself, and what all must have in common


def prepare(config):
    """What every rank makes, or refuses, by itself -> tokenizer, GPT, training tokens, validation
    tokens. Raises ValueError and OSError on a user's mistake.

    The tokenizer is None where only the sample needs it: it may be a download.
    """
    tokenizer = None
    vocab_size = VOCAB_SIZES.get(config.tokenizer)
    is_for_sample = is_tokenized(config.dataset) and not (config.init_from or config.export_hf)
    if vocab_size is None or not is_for_sample:
        tokenizer = load_tokenizer(config.tokenizer)
        vocab_size = tokenizer.n_vocab
    gpt = build_gpt(config, vocab_size)
    config.block_size = gpt.config.block_size  # that of the preset or folder, unless given
    vocab_size = gpt.config.vocab_size
    if tokenizer is not None and max(encode_prompt(config.prompt, tokenizer)) >= vocab_size:
        raise ValueError(f"--prompt has tokens that are not among the {vocab_size} of the model")
    tokens, val_tokens = load_tokens(config, tokenizer, vocab_size)
    return tokenizer, gpt, tokens, val_tokens


def take_deterministic_kernels():
    """--deterministic: from now on torch takes kernels that add in one order, where it has others,
    such as attention's backward, which adds by atomics. An operation that has none raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and changes no bit
    torch.use_deterministic_algorithms(True)


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


# -------------------------------------------------------------------------------------------------
# model, wrapper, optimizer


def build_gpt(config, vocab_size):
    """The GPT: a preset, or the folder --init_from, each size overridden where its flag is given.
    Raises ValueError on sizes that do not fit.

    For ZeRO it is on the meta device, and its wrapper gives it values unit by unit, so that no rank
    ever holds all of it.
    """
    if config.init_from:
        sizes = read_llama_config(config.init_from)
    else:
        sizes = dict(PRESETS[config.model], vocab_size=vocab_size)
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

    Whatever the mode, the result has what `add_our_interface` lists beside forward, so that the
    loop calls all of them alike.
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
    if config.mode != "ddp" and config.mode not in ZERO:
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


def bytes_for_a_rank(config, device):
    """What --micro_batch_size auto may take: the limit that is given, or this rank's share of what
    its device has free, as others may have the device, too. Raises Stop on a CPU without a limit.
    A collective: none takes memory before all have looked."""
    if config.memory_limit_gb:
        return 1e9 * config.memory_limit_gb
    if device.type == "cpu":
        raise Stop("--micro_batch_size auto needs --memory_limit_gb on a CPU")
    free, _ = torch.accelerator.get_memory_info(device)
    return min(gather(free / ranks_on_device(device.type)))


def largest_micro_batch(config, vocab_size, device):
    """--micro_batch_size auto: the largest size that divides a rank's part of the global batch and
    keeps a step within the limit on every rank. Raises Stop if none does. A collective.

    Memory grows with the size along a straight line, which is drawn through sizes 1 and 2. These
    are tried on a model and on data that are thrown away; an accelerator whose memory is out at
    size 2 gets size 1. 5 % of the limit is kept for evaluation and checkpoints, which are not
    tried.
    """
    limit, W = 0.95 * bytes_for_a_rank(config, device), dist.get_world_size()
    config = dataclasses.replace(config, warmup_steps=0)  # PowerSGD begins in the third step
    model = wrap(build_gpt(config, vocab_size), config, device)
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
    room = limit - peaks[0]  # beside size 1
    most = min(gather(1 + room / bytes_per_sequence if room >= 0 else 0))
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
    """Mean loss over eval_steps blocks of validation tokens, divided among the ranks. A collective.

    The blocks are the same in every run, whatever its seed, and each has a loss of its own. So runs
    can be compared, also where their W or their micro batches differ, on a CPU to the last bit.
    (But for sequences of less than four tokens MKL has other kernels, and an accelerator may have
    them for any size. Then the last digits differ.)

    A forward may be a collective, so all ranks make the same number, and torch.compile wants
    batches of one size: what is too many is the last block again, and does not count.
    """
    model.eval()
    rank, W = dist.get_rank(), dist.get_world_size()
    n_blocks = count_blocks(tokens, config.block_size)
    n = min(config.eval_steps, n_blocks)
    m = min(config.micro_batch_size, math.ceil(n / W))
    order = block_order(n_blocks, seed=0, epoch=0)
    losses = torch.zeros(n, dtype=torch.float64, device=device)
    for turn in range(math.ceil(n / (m * W))):
        first = (turn * W + rank) * m
        places = np.arange(first, first + m)
        blocks = order[np.minimum(places, n - 1)]
        x, y = read_blocks(tokens, blocks, config.block_size, device)
        with autocast(config.dtype, device):
            logits, _ = model(x)
        for place, scores, targets in zip(places, logits, y):
            if place < n:
                losses[place] = F.cross_entropy(scores.float(), targets)
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
    """--prompt and a text that continues it, the same on all ranks; or why there is none. A
    collective, since in stage 3 every forward gathers weights."""
    if tokenizer is None:
        try:
            tokenizer = together(load_tokenizer, config.tokenizer)
        except Stop as error:
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


def read_flags():
    return parse_args(Config, __doc__, sys.argv[1:])


if __name__ == "__main__":
    progress = dict(step=0, best_step=0, best_val_loss=math.inf, skipped=0, entry={}, run_id=None)
    sys.exit(run(main, read_flags, progress))

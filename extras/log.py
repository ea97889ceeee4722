"""What one sees of a run: its lines, metrics.jsonl, trackers, a profile, a trace.

Replaces a logger with callbacks: a tracker is a function that takes the entry of a step.
"""

import atexit
import functools
import json
import math
import os
import pathlib
import re
import sys

import numpy as np
import torch
import torch.distributed as dist

from ddp import in_backward
from checkpoint import still_ours
from extras.ranks import gather, on_rank_0, say


def introduce(gpt, n_tokens, config, device):
    """Print what is trained, on what -> the device's name."""
    name = "CPU"
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name()
    n_parameters = sum(p.numel() for p in gpt.parameters())
    say(f"{n_parameters:,} parameters | {n_tokens:,} training tokens | {config.mode}, "
        f"W = {dist.get_world_size()}, {dist.get_backend()} on {name}")
    if config.comm_hook in ("topk", "powersgd") and config.warmup_steps > 0:
        say(f"--comm_hook {config.comm_hook} sends whole gradients until step "
            f"{config.warmup_steps}, while the rate warms up: --warmup_steps 0 begins at once")
    return name


# Dense bf16/fp16 tensor-core peaks from NVIDIA's data sheets, FLOP/s. The first match counts.
PEAK_FLOPS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
)


def peak_flops(device_name):
    """Peak bf16 FLOP/s of a device by its `get_device_name()`; None where not known."""
    return next((flops for name, flops in PEAK_FLOPS if name in device_name), None)


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


def finite(entry):
    """entry with None for inf and nan, which JSON cannot represent."""
    return json.loads(json.dumps(entry), parse_constant=lambda constant: None)


def print_step(entry, recent, max_steps):
    """The line of a step. recent: the entries of the last steps, for the time that is left."""
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


def scalars(entry):
    """{name: number} of all that metrics.jsonl has of a step: trackers draw numbers, not lists.
    What is measured on each rank becomes step_ms_min, step_ms_mean, step_ms_max and so on."""
    found = dict(entry)
    of_ranks = found.pop("ranks", {})
    for name, value in of_ranks.items():
        if isinstance(value, list):
            for kind, number in zip(("min", "mean", "max"), value):
                found[f"{name}_{kind}"] = number
        else:
            found[f"{name}_rank"] = value
    return {name: value for name, value in found.items() if value is not None}


def start_tensorboard(config, progress):
    """Without the number of a step, which is the axis."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{config.out_dir}/tensorboard", purge_step=progress["step"] + 1)
    atexit.register(writer.close)

    def add_scalars(entry):
        for name, value in scalars(entry).items():
            if name != "step":
                writer.add_scalar(name, value, entry["step"])

    return add_scalars


def start_wandb(config, progress):
    """A run that resumes goes on in the run of its checkpoint."""
    import wandb

    run = wandb.init(project="nanozero", id=progress["run_id"], resume="allow",
                     name=f"{config.model} {config.mode} {progress['run_id'][:6]}",
                     dir=config.out_dir, config=vars(config))

    def log(entry):
        run.log(scalars(entry), step=entry["step"])

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
    when_ready = export_trace
    if config.trace:
        when_ready = functools.partial(print_trace, config.mode)
        name_blocks(gpt)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=when_ready)
    profiler.start()
    atexit.register(profiler.stop)  # if a signal ends the run before, a file has what there is
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


def print_trace(mode, profiler):
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
    title = "what each rank did in this step, by its own clock"
    if mode == "single":
        title += "; one process sends nothing"
    elif mode != "ddp" and not mode.startswith("zero"):
        title += f"; what {mode} sends has no name here"
    say(f"{title}:")
    for lines_of_rank in gather(lines[:n_lines]):
        say("\n".join(lines_of_rank))

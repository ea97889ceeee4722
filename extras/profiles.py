# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""--profile, --trace: what each rank does in a step."""

import functools

import torch
import torch.distributed as dist

from train import gather, say
from zero import in_backward


def start(stack, run):
    """-> functions to call after each step, on all ranks. --profile N: what this rank does in N
    steps, with the named ranges of ddp.py and zero.py, as out_dir/trace_rank0.json and so on.
    --trace: these ranges of one step, printed. stack, an ExitStack, ends it."""
    config = run.config
    n_steps = config.max_steps - run.progress["step"]
    if n_steps < 3:  # a run that torchrun has started again must not fail here
        say(f"no trace: it begins in the third step, and there are {n_steps} more")
        return []
    path = f"{config.out_dir}/trace_rank{dist.get_rank()}.json"

    def export_trace(profiler):
        profiler.export_chrome_trace(path)

    def end_step(entry):
        profiler.step()

    # Two steps are left out, in which buffers are made; the second warms the profiler up.
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=config.profile or 1, repeat=1)
    when_ready = export_trace
    if config.profile:
        say(f"--profile: {path}")
    else:
        when_ready = functools.partial(print_trace, config.mode)
        name_blocks(run.gpt)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=when_ready)
    profiler.start()

    def stop(kind, error, traceback):
        if error is None or config.profile:  # after an error no rank may wait for others' traces
            profiler.stop()

    stack.push(stop)  # if a signal ends the run before, a file has what there is
    return [end_step]


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

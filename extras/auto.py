# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""--micro_batch_size auto."""

import dataclasses
import gc
import math
import pathlib
import sys

import numpy as np
import torch
import torch.distributed as dist

from data import micro_batches
from runs import gather, local_numbers, peak_mem_bytes, say


def bytes_for_a_rank(config, device):
    """What a rank may take: the limit that is given, or its share of what its device has free, as
    others may have the device, too. A collective: none takes memory before all have looked."""
    if config.memory_limit_gb:
        return 1e9 * config.memory_limit_gb
    if device.type == "cpu":
        raise SystemExit("--micro_batch_size auto needs --memory_limit_gb on a CPU")
    free, _ = torch.accelerator.get_memory_info(device)
    local_rank, n_local, n_devices = local_numbers(device.type)
    n_sharers = len(range(local_rank % n_devices, n_local, n_devices))
    return min(gather(free / n_sharers))


def reset_peak(device):
    """Let `peak_mem_bytes` begin anew."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS


def peak_of_steps(run, size, train_step):
    """The most memory that this process has held so far, after steps with micro batches of a size.
    Two micro-steps, since accumulating takes memory too, and three steps, for PowerSGD."""
    batch = 2 * size * dist.get_world_size()
    run.config = dataclasses.replace(run.config, micro_batch_size=size, global_batch_size=batch)
    tokens = np.zeros(batch * run.config.block_size + 1, dtype=np.uint16)
    run.batches = micro_batches(tokens, 1, run.config, run.device)
    try:
        run.batch = next(run.batches)
        for _ in range(3):
            train_step(run)
    except torch.OutOfMemoryError:  # on all ranks, since all do the same
        return math.inf
    return peak_mem_bytes(run.device)


def largest_micro_batch(config, device, trial_run, train_step):
    """The largest size that divides a rank's part of the global batch and keeps a step within the
    limit on every rank. Refuses if none does. A collective.

    Sizes 1, 2, 4 and so on are tried, on a model and on data that are thrown away, as long as twice
    the last one should fit: memory grows with the size along a straight line, which is drawn
    through the last two. (Through 1 and 2 alone it may be flat on a CPU, where a process keeps
    memory of small tensors that it has freed.) An accelerator whose memory is out has reached the
    limit. 5 % of it is kept for evaluation and checkpoints, which are not tried.

    trial_run: makes a train.Run of a config. train_step: makes a step with it.
    """
    limit, W = 0.95 * bytes_for_a_rank(config, device), dist.get_world_size()
    share = max(1, config.global_batch_size // W)  # fewer than W are for an evaluation alone
    # Two micro batches of a rank, for the scaler. PowerSGD begins in the third step.
    run = trial_run(dataclasses.replace(config, warmup_steps=0, micro_batch_size=1,
                                      global_batch_size=2 * W, eval_only=False))
    reset_peak(device)  # that of reading a text
    peaks = [peak_of_steps(run, 1, train_step)]
    size = most = 2  # size 2 is tried in any case: a line needs two points
    while size <= most:
        peaks.append(peak_of_steps(run, size, train_step))
        bytes_per_sequence = max(1, peaks[-1] - peaks[-2]) / (size / 2)
        room = limit - peaks[-2]  # beside size / 2
        own_most = size / 2 + room / bytes_per_sequence if room >= 0 else 0
        most = min(share, *gather(own_most))
        size *= 2
    del run
    gc.collect()  # hooks and modules are in reference cycles
    torch.compiler.reset()
    reset_peak(device)
    fitting = [size for size in range(1, share + 1) if size <= most and share % size == 0]
    fact = f"size 1 takes {1e-9 * peaks[0]:.2f} GB, and the limit is {1e-9 * limit:.2f}"
    if not fitting:
        raise SystemExit(f"--micro_batch_size auto: {fact}")
    say(f"micro batch size {fitting[-1]}: {fact}")
    return fitting[-1]

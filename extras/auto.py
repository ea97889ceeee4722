# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
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

import train
from data import micro_batches
from runs import gather, local_numbers, say


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
    """Let `train.peak_mem_bytes` begin anew."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS


def peak_of_steps(model, optimizers, size, config, device):
    """The most memory that this process has held so far, after steps with micro batches of a size.
    Two micro-steps, since accumulating takes memory too, and three steps, for PowerSGD."""
    W = dist.get_world_size()
    config = dataclasses.replace(config, micro_batch_size=size, global_batch_size=2 * size * W)
    tokens = np.zeros(config.global_batch_size * config.block_size + 1, dtype=np.uint16)
    scaler = train.make_scaler(config, device)
    try:
        for step in range(1, 4):
            batches = micro_batches(tokens, step, config, device)
            train.train_step(model, optimizers, scaler, batches, [], config)
    except torch.OutOfMemoryError:  # on all ranks, since all do the same
        return math.inf
    return train.peak_mem_bytes(device)


def largest_micro_batch(config, gpt_config, device):
    """The largest size that divides a rank's part of the global batch and keeps a step within the
    limit on every rank. Refuses if none does. A collective.

    Sizes 1, 2, 4 and so on are tried, on a model and on data that are thrown away, as long as twice
    the last one should fit: memory grows with the size along a straight line, which is drawn
    through the last two. (Through 1 and 2 alone it may be flat on a CPU, where a process keeps
    memory of small tensors that it has freed.) An accelerator whose memory is out has reached the
    limit. 5 % of it is kept for evaluation and checkpoints, which are not tried.
    """
    limit, W = 0.95 * bytes_for_a_rank(config, device), dist.get_world_size()
    share = max(1, config.global_batch_size // W)  # fewer than W are for an evaluation alone
    config = dataclasses.replace(config, warmup_steps=0)  # PowerSGD begins in the third step
    model = train.wrap(train.build_on_device(gpt_config, config), config, device)
    optimizers = train.make_optimizers(model, config)
    reset_peak(device)  # that of tokenizing
    peaks = [peak_of_steps(model, optimizers, 1, config, device)]
    size = most = 2  # size 2 is tried in any case: a line needs two points
    while size <= most:
        peaks.append(peak_of_steps(model, optimizers, size, config, device))
        bytes_per_sequence = max(1, peaks[-1] - peaks[-2]) / (size / 2)
        room = limit - peaks[-2]  # beside size / 2
        own_most = size / 2 + room / bytes_per_sequence if room >= 0 else 0
        most = min(share, *gather(own_most))
        size *= 2
    del model, optimizers
    gc.collect()  # hooks and modules are in reference cycles
    torch.compiler.reset()
    reset_peak(device)
    fitting = [size for size in range(1, share + 1) if size <= most and share % size == 0]
    fact = f"size 1 takes {1e-9 * peaks[0]:.2f} GB, and the limit is {1e-9 * limit:.2f}"
    if not fitting:
        raise SystemExit(f"--micro_batch_size auto: {fact}")
    say(f"micro batch size {fitting[-1]}: {fact}")
    return fitting[-1]

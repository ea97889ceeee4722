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


def bytes_for_a_rank(config, device):
    """What a rank may take: the limit that is given, or its share of what its device has free, as
    others may have the device, too. A collective: none takes memory before all have looked."""
    if config.memory_limit_gb:
        return 1e9 * config.memory_limit_gb
    if device.type == "cpu":
        raise SystemExit("--micro_batch_size auto needs --memory_limit_gb on a CPU")
    free, _ = torch.accelerator.get_memory_info(device)
    local_rank, n_local, n_devices = train.local_numbers(device.type)
    n_sharers = len(range(local_rank % n_devices, n_local, n_devices))
    return min(train.gather(free / n_sharers))


def reset_peak(device):
    """Let `train.peak_mem_bytes` begin anew."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS


def largest_micro_batch(config, gpt_config, device):
    """The largest size that divides a rank's part of the global batch and keeps a step within the
    limit on every rank. Refuses if none does. A collective.

    Memory grows with the size along a straight line, which is drawn through sizes 1 and 2. These
    are tried on a model and on data that are thrown away; an accelerator whose memory is out at
    size 2 gets size 1. 5 % of the limit is kept for evaluation and checkpoints, which are not
    tried.
    """
    limit, W = 0.95 * bytes_for_a_rank(config, device), dist.get_world_size()
    config = dataclasses.replace(config, warmup_steps=0)  # PowerSGD begins in the third step
    model = train.wrap(train.build_on_device(gpt_config, config), config, device)
    optimizers = train.make_optimizers(model, config)
    tokens = np.zeros(4 * W * config.block_size + 1, dtype=np.uint16)
    reset_peak(device)  # that of tokenizing
    peaks = []
    for size in (1, 2):
        # Two micro-steps, since accumulating takes memory too, and three steps, for PowerSGD.
        trial = dataclasses.replace(config, micro_batch_size=size, global_batch_size=2 * size * W)
        scaler = train.make_scaler(trial, device)
        try:
            for step in range(1, 4):
                batches = micro_batches(tokens, step, trial, device)
                train.train_step(model, optimizers, scaler, batches, [], trial)
            peaks.append(train.peak_mem_bytes(device))
        except torch.OutOfMemoryError:  # on all ranks, since all do the same
            peaks.append(math.inf)
    del model, optimizers
    gc.collect()  # hooks and modules are in reference cycles
    torch.compiler.reset()
    reset_peak(device)
    bytes_per_sequence = max(1, peaks[1] - peaks[0])
    room = limit - peaks[0]  # beside size 1
    most = min(train.gather(1 + room / bytes_per_sequence if room >= 0 else 0))
    share = max(1, config.global_batch_size // W)  # fewer than W are for an evaluation alone
    fitting = [size for size in range(1, share + 1) if size <= most and share % size == 0]
    found = f"size 1 takes {1e-9 * peaks[0]:.2f} GB, and the limit is {1e-9 * limit:.2f}"
    if not fitting:
        raise SystemExit(f"--micro_batch_size auto: {found}")
    train.say(f"micro batch size {fitting[-1]}: {found}")
    return fitting[-1]

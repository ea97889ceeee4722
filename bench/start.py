"""How a program of bench/ begins on each rank, and what it says."""

import json
import os

import torch
import torch.distributed as dist

from oracle import kinds_of_devices, take_device


def join(kind: str | None) -> torch.device:
    """--device, None for the accelerator, if there is one -> this rank's device, which other ranks
    may have, too. Makes the process group; without torchrun it has one rank."""
    kinds = kinds_of_devices()
    kind = kind or kinds[-1]
    if kind not in kinds:
        raise SystemExit(f"--device {kind} is not on this machine: choose {' or '.join(kinds)}")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = take_device(kind, local_rank, n_local)
    backend = dist.get_default_backend_for_device(device)
    if "RANK" in os.environ:  # torchrun has started this
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    return device


def report(row: dict) -> None:
    """Let bench.sh know a row of its table."""
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(row), flush=True)

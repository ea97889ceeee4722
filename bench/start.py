"""How the programs of bench/ that run by themselves begin: their flags, their device, their ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist

from bench.timeline import refuse
from oracle import kinds_of_devices, take_device


class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{message}: see --help")


def join(kind: str | None) -> torch.device:
    """--device, None for the accelerator, if there is one -> this rank's device, which other ranks
    may have, too. Makes the process group; without torchrun it has one rank."""
    kinds = kinds_of_devices()
    kind = kind or kinds[-1]
    if kind not in kinds:
        refuse(f"--device {kind} is not on this machine: choose {' or '.join(kinds)}")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = take_device(kind, local_rank, n_local)
    backend = dist.get_default_backend_for_device(device)
    if "RANK" in os.environ:  # torchrun has started this
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device

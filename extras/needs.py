# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""What flags that extras/ and dropin/ serve need of each other, and of this machine."""

import importlib.util
import os

import torch.distributed as dist

from runs import count

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "init_from": "safetensors",
            "export_hf": "safetensors"}


def check(config, device):
    """Refuse what contradicts itself, or cannot be here."""
    W = dist.get_world_size()
    for name in ("shard_size", "node_size"):
        size = getattr(config, name)
        if size is not None and W % size > 0:
            raise SystemExit(f"--{name} {size} does not divide {count(W, 'rank')}")
    if config.dtype == "fp16" and config.comm_hook in ("powersgd", "topk"):
        raise SystemExit(f"--dtype fp16 and --comm_hook {config.comm_hook}: choose bf16")
    if config.eval_only and (config.trace or config.profile > 0):
        raise SystemExit("--trace and --profile are for steps, and --eval_only makes none")
    for name, package in PACKAGES.items():
        if getattr(config, name) and not importlib.util.find_spec(package):
            raise SystemExit(f"--{name} needs a package: pip install {package}")
    if config.compile and device.type == "cpu":
        check_compiler()
    if config.export_hf:
        os.makedirs(config.export_hf, exist_ok=True)


def check_compiler():
    """Refuse where torch.compile lacks what it needs on a CPU. (In the first step this would be a
    traceback. The function is private, but asks what torch itself will ask.)"""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError as error:
        raise SystemExit("--compile needs a C++ compiler: install g++ or clang, or set CXX to the "
                         "one that you have") from error

# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""--mode torch-ddp, torch-zero1, torch-fsdp, torch-fsdp-kept: torch's own, as references, with what
train.py asks of a wrapper: see `wrap` there. None says how long it waits for communication."""

import contextlib
import math
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer


def wrap(gpt, config, bucket_cap_mb):
    """gpt -> what the loop calls."""
    if config.mode in ("torch-fsdp", "torch-fsdp-kept"):
        # The logits are a view of what has rows that no token uses. Nothing writes to it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        # ShardedGradScaler has numbers of shape (1,).
        warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
        return FSDP(gpt, reshard_after_forward=config.mode == "torch-fsdp")
    return TorchDDP(gpt, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True,
                    find_unused_parameters=config.find_unused_parameters)


class TorchDDP(torch.nn.parallel.DistributedDataParallel):
    exposed_s = math.nan
    shard_group = None

    @property
    def gradient_divide_factor(self):
        return dist.get_world_size()

    def full_parameters(self):
        for name, p in self.module.named_parameters():
            yield name, p.detach()


class FSDP(torch.nn.Module):
    """fully_shard. reshard_after_forward=False keeps parameters whole until the backward, as stage
    2 does."""
    exposed_s = math.nan

    def __init__(self, gpt, reshard_after_forward):
        super().__init__()
        W = dist.get_world_size()
        self.shard_group = dist.group.WORLD
        self.gradient_divide_factor = W
        # Without a mesh it takes an accelerator's, if any.
        mesh = dist.init_device_mesh(next(gpt.parameters()).device.type, (W,))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
        self.module = fully_shard(gpt, mesh=mesh)  # by default the root stays whole, as Zero3's

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        self.module.set_requires_gradient_sync(False)
        self.module.set_is_last_backward(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)
            self.module.set_is_last_backward(True)

    def train(self, mode=True):
        """After an evaluation, too. What stays whole without a backward would not be saved as
        shards."""
        for module in (*self.module.blocks, self.module):
            module.reshard()
        return super().train(mode)

    def full_parameters(self):
        for name, p in self.module.named_parameters():
            p = p.detach()
            if isinstance(p, dist.tensor.DTensor):  # the root stays whole after `sample`
                p = p.full_tensor()
            yield name, p


def zero1_adamw(groups, options):
    """torch's stage 1, whose `optim` is over the parameters that this rank updates."""
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)
    optimizer.state = optimizer.optim.state
    return optimizer

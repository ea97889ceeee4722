# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""--comm_hook, --find_unused_parameters, --reduce_dtype, --shard_size, --offload, and --optimizer
muon in stages: modes of ours that need dropin/, which has all that train.py asks of a wrapper."""

import contextlib

import dropin


def wrap(gpt, config, device, bucket_cap_mb, dtypes, uncut):
    """gpt, on meta for a stage -> what the loop calls.

    dtypes: {a flag's value: torch.dtype}. uncut: parameters of which stages leave each to one rank.
    """
    if config.mode == "ddp":
        model = dropin.DDP(gpt.to(device), bucket_cap_mb=bucket_cap_mb,
                           find_unused_parameters=config.find_unused_parameters)
        if config.comm_hook:  # a hook takes the mean over ranks itself
            from extras import comm_hooks
            comm_hooks.register(model, config)
            return model
    else:
        kind = {"zero1": dropin.Zero1, "zero2": dropin.Zero2, "zero3": dropin.Zero3}[config.mode]
        model = kind(gpt, param_dtype=dtypes.get(config.param_dtype),
                     reduce_dtype=dtypes.get(config.reduce_dtype), shard_size=config.shard_size,
                     offload=config.offload, uncut=uncut, bucket_cap_mb=bucket_cap_mb)
    model.set_gradient_divide_factor(1)  # a sum over ranks: `train_step` divides
    return model


def exchanging(model, config, is_last):
    """`train.exchanging` of these: a shard of one rank sends nothing, so it need not exchange. And
    stages need not gather parameters again that no step has changed, if they know."""
    if config.mode != "ddp":
        model.set_is_last_backward(is_last)
    is_always = config.mode in ("zero2", "zero3") and config.shard_size != 1
    return contextlib.nullcontext() if is_last or is_always else model.no_sync()

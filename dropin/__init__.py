# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""DDP and the stages of ZeRO for scripts that are not plain: README.md.

    from dropin import DDP, Zero1, Zero2, Zero3

Each is the book's class, of ddp.py or zero.py, under layers. A layer is a class whose methods do
something before or after the method of the same name under it, which they call by super(); or stand
in its place. Layers stand here in their order, the first one on top: what comes before super() runs
in this order, and what comes after it in the reverse one.
"""

import torch

import ddp
import zero
from dropin.alike import AlikeGuards
from dropin.guards import Guards
from dropin.ranks import UnevenForwards, UnevenOrder, UnevenRanks
from dropin.shard_guards import ShardGuards, clip_gradients_
from dropin.sharding import OPTIONS, HierarchicalState, ShardingOptions
from dropin.states import OptimizerStates, StateDicts
from dropin.torch_options import TorchOptions

__all__ = ["DDP", "HierarchicalState", "Zero1", "Zero2", "Zero3", "clip_gradients_"]

OF_DDP = (Guards, AlikeGuards, TorchOptions, UnevenRanks, OptimizerStates)
OF_STAGES = (ShardGuards, Guards, AlikeGuards, UnevenForwards, UnevenRanks, StateDicts,
             OptimizerStates, ShardingOptions)
OF_STAGE_3 = (ShardGuards, Guards, AlikeGuards, UnevenOrder, UnevenForwards, UnevenRanks,
              StateDicts, OptimizerStates, ShardingOptions)


@torch.nn.parallel.DistributedDataParallel.register  # for isinstance(), which libraries ask
class DDP(*OF_DDP, ddp.DDP):
    """Average gradients over the ranks of process_group during every backward of module.

    device_ids: None, or a list of the one device of module, to which inputs are moved.
    bucket_cap_mb: largest size of a bucket; the first has 1 MB. None: 25, or W/4 if that is more.
    find_unused_parameters: whether a backward may leave parameters out. If not, and one does, every
    rank raises RuntimeError, naming them. If so, one that some rank used counts as zero elsewhere,
    and one that no rank used keeps `grad is None`.
    forward_sync_buffers: rank 0's buffers go to all ranks before a forward, as in torch.
    broadcast_buffers: torch's older name for it; False leaves buffers alone at the start, too. Then
    they may differ between ranks.
    init_sync: compare modules, and start with rank 0's parameters and buffers.
    device_mesh: of one dimension, in place of process_group.
    static_graph: as find_unused_parameters.
    output_device, dim, check_reduction, gradient_as_bucket_view, batched_grad_copy,
    skip_all_reduce_unused_params: torch's; ignored, as they change no gradient. Its other
    arguments are refused by name.

    Names and meaning as in torch.nn.parallel.DistributedDataParallel, of which it is a virtual
    subclass. What `module._ddp_params_and_buffers_to_ignore` names is left alone. Raises
    RuntimeError on every rank where ranks wrap modules that differ in names, shapes, strides,
    dtypes or frozen parameters. Wrap last: freezing, casting and moving come before. Every backward
    that reaches a parameter is averaged, that of `model.module(x)` too, unless it runs in
    no_sync(). With a comm hook, nothing else may communicate in the same group during a backward.
    A copy, by deepcopy or pickle, is wrapped without communication, as with init_sync=False; two
    such may not take part in the same backward.
    """


class Zero1(*OF_STAGES, zero.Zero1):
    __doc__ = f"{zero.Zero1.__doc__.splitlines()[0]}\n{OPTIONS}"


class Zero2(*OF_STAGES, zero.Zero2):
    __doc__ = f"{zero.Zero2.__doc__}\n{OPTIONS}"


class Zero3(*OF_STAGE_3, zero.Zero3):
    __doc__ = f"{zero.Zero3.__doc__.splitlines()[0]}\n{OPTIONS}\n    {UnevenOrder.__doc__}"

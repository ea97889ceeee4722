"""How bytes are measured: of which module, and by what. training.py has formulas."""

import gc
import re
import time
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from verify import device


# -------------------------------------------------------------------------------------------------
# a module


class Chain(nn.Module):
    """n units of width x width, and a root of 4,096 numbers: 1,024 chunks of it need no padding.
    recomputed: all units in one checkpoint."""

    def __init__(self, n, width, recomputed=False):
        super().__init__()
        self.recomputed = recomputed
        self.units = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))
        self.scale = nn.Parameter(torch.ones(4096))

    def some(self, x, n):
        for unit in self.units[:n]:
            x = unit(x).tanh()
        return x

    def forward(self, x, n=99):
        if self.recomputed:
            x = checkpoint(self.some, x, n, use_reentrant=False)
        else:
            x = self.some(x, n)
        return x.square().mean() * self.scale.square().mean()


# -------------------------------------------------------------------------------------------------
# what is received, and what is held


# Those of this version of torch; not `send`, whose bytes its `recv` counts.
COLLECTIVES = [name for name in dir(dist.ProcessGroup)
               if re.match("_?(all|broadcast|gather|recv|reduce|scatter)", name)]


@contextmanager
def every_collective(note):
    """Call note(operation, [its tensors]) before each, in whichever thread.

    What torch.distributed's functions send goes through these methods of ProcessGroup: so what a
    wrapper sends can be counted without knowing how it sends it.
    """
    def tapped(name, real):
        def tap(group, tensors, *arguments, **options):
            note(name, [tensors] if torch.is_tensor(tensors) else tensors)
            return real(group, tensors, *arguments, **options)
        return tap

    taps = {name: tapped(name, getattr(dist.ProcessGroup, name)) for name in COLLECTIVES}
    coalesced = tapped("coalesced", dist._broadcast_coalesced)  # of buffers; it calls C++ by itself
    with (mock.patch.multiple(dist.ProcessGroup, **taps),
          mock.patch.object(dist, "_broadcast_coalesced", coalesced)):
        yield


# Torch's own all-gather and all-to-all, which accelerators have, by their old and new names.
WITH_OWN_CHUNK = ("_allgather_base", "all_gather_single", "alltoall_base", "all_to_all_single")


def part_of_others(operation):
    """Of what a collective writes: the part that has come from other ranks."""
    return 1 - 1 / dist.get_world_size() if operation in WITH_OWN_CHUNK else 1


def live_bytes(wait_s=0.05):
    """Bytes of all tensors on these ranks' device that Python can reach, each storage once. (A
    DTensor only stands for a tensor that it holds.) Not seen is what C++ alone holds, such as what
    autograd has saved.

    Exact where the resident set of a process is noise: it counts pages, and allocators keep them.
    """
    time.sleep(wait_s)  # for threads to let go of what they have sent
    gc.collect()
    kind = device().type
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():  # some of ours refuse to be looked at
        for t in gc.get_objects():
            is_tensor = issubclass(type(t), torch.Tensor) and not is_traceable_wrapper_subclass(t)
            if is_tensor and t.device.type == kind:
                storage = t.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())

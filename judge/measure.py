"""How bytes are measured: of which module, and by what. training.py has formulas."""

import gc
import time

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from verify import device


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

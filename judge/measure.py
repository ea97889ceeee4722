"""How bytes are measured: of which modules, in which steps, by what. training.py has formulas."""

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
# modules


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


class Registered(nn.Module):
    """An embedding and six blocks of its size. It uses its parts in the order of USE, and has
    registered them in that of names."""

    USE = ("first", "down_0", "down_1", "middle_0", "middle_1", "up_0", "up_1")
    WIDTH = 64

    def __init__(self, names):
        super().__init__()
        parts = {"first": nn.Embedding(self.WIDTH, self.WIDTH)}
        for name in self.USE[1:]:
            parts[name] = nn.Linear(self.WIDTH, self.WIDTH, bias=False)
        for name in names:
            self.add_module(name, parts[name])

    def units(self):
        return [self.get_submodule(name) for name in self.USE[1:]]

    def forward(self, idx):
        x = self.first(idx)
        for unit in self.units():
            x = unit(x).tanh()
        return x.square().mean()


IN_ANOTHER_ORDER = {
    "embedding_last": (*Registered.USE[1:], "first"),
    "middle_last": ("first", "down_0", "down_1", "up_0", "up_1", "middle_0", "middle_1"),
    "backwards": Registered.USE[::-1]}


def second_step(wrap, names):
    """What the second step of `Registered` shows, in which the order of use is known: (elements
    that a rank receives, messages, the part of the gradients that come after the first bucket was
    launched, bytes held after a step, bytes more when the last block goes back)."""
    before = live_bytes()
    module = Registered(names).to(device())
    came, received = [], []
    for p in module.parameters():
        p.register_hook(lambda gradient: came.append(gradient.numel()))
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    bytes_at = {}

    def note(operation, tensors):
        received.append(part_of_others(operation) * tensors[0].numel())

    def note_bytes(*_):
        bytes_at["backward"] = live_bytes() - before

    def step():
        model(torch.arange(4, device=device())).backward()
        optimizer.step()
        bytes_at["step"] = live_bytes() - before
        optimizer.zero_grad()

    step()
    hook = module.down_0.register_full_backward_hook(note_bytes)
    step()
    hook.remove()
    launched = []
    start = "_start_reduce" if hasattr(model, "_start_reduce") else "_start_reduction"
    real = getattr(model, start)

    def start_reduction(bucket):
        launched.append(sum(came))
        real(bucket)

    came.clear()
    with every_collective(note), mock.patch.object(model, start, start_reduction):
        step()
    overlapped = 1 - launched[0] / sum(came)
    return sum(received), len(received), overlapped, bytes_at["step"], bytes_at["backward"]


# -------------------------------------------------------------------------------------------------
# what a step may be: functions of a wrapper and its inputs


def one_step(model, x):
    model(x).backward()


def unsynced_step(model, x):
    with model.no_sync():
        model(x).backward()


def evaluation(model, x):
    with torch.no_grad():
        model(x)


def one_unit(model, x):
    model.module.units[3](x)


def four_micro_steps(model, x):
    for _ in range(4):
        model(x).backward()


def four_of_which_one_is_synced(model, x):
    with model.no_sync():
        for _ in range(3):
            model(x).backward()
    model(x).backward()


def four_announced(model, x):
    for micro_step in range(4):
        model.set_is_last_backward(micro_step == 3)
        model(x).backward()


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

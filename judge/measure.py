"""What it is: what a rank holds, what it sends, and whether it sends while it computes."""

import gc
import time
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from judge.interfaces import interface_of
from judge.messages import messages, NotCounted
from judge.training import backwards, zero_gradients
from verify import device

N_UNITS, WIDTH = 8, 64
MICRO_STEPS = 4
PAPER = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


class Units(nn.Module):
    """Units of one size, and next to nothing beside them."""

    def __init__(self, linear):
        super().__init__()
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(N_UNITS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.scale).square().mean()


def linear_of(name):
    """Many solutions of CS336 shard only the layers of their own first assignment."""
    if name == "get_fsdp":
        try:
            from cs336_basics.model import Linear
            return Linear
        except ImportError:
            pass
    return partial(nn.Linear, bias=False)


def measured(file: str, name: str) -> dict:
    """With AdamW -> {"held", "peak", "sent": {micro-steps: bytes or elements for each parameter of
    the model}; "started", "waited": calls of collectives, and waits for them, when a backward comes
    to its last unit, where all other gradients are complete; "uncounted": a reason, or ""}"""
    mine = interface_of(file, name)
    before = live_bytes()
    module = Units(linear_of(name)).to(device())
    n_parameters = sum(p.numel() for p in module.parameters())
    sizes = []

    def look(*_):
        sizes.append((live_bytes(wait_s=0.003) - before) / n_parameters)

    for unit in module.layers:
        unit.register_forward_hook(look)
        unit.register_full_backward_hook(look)
    model = mine.wrapped(module)
    parameters = list(mine.trained(model))
    optimizer = mine.optimizer(parameters, torch.optim.AdamW, lr=1e-3, foreach=False)
    x = torch.ones(1, WIDTH, device=device(), requires_grad=True)
    facts = dict(held={}, peak={}, sent={}, started=0, waited=0, uncounted="")
    for micro_steps in (1, 1, MICRO_STEPS):  # the first step makes what stays
        sizes.clear()
        sent = []
        try:
            with messages() as sent, waits() as waited:
                if micro_steps == 1:
                    watch = module.layers[0].register_full_backward_pre_hook(
                        lambda *_: facts.update(started=len(sent), waited=len(waited)))
                backwards(mine, model, optimizer, lambda _: model(x), micro_steps)
                watch.remove()
                look()
                facts["held"][micro_steps] = sizes[-1]
                optimizer.step()
        except NotCounted as error:
            facts["uncounted"] = str(error)
        look()
        facts["peak"][micro_steps] = max(sizes)
        # What is not fp32 counts as if it were.
        facts["sent"][micro_steps] = sum(message.bytes for message in sent) / 4 / n_parameters
        zero_gradients(mine, model, optimizer)
    return facts


@contextmanager
def waits():
    """A context -> a list, which gets an element for each Work that Python waits for."""
    waited = []
    real = dist.Work.wait

    def wait(work, *arguments, **options):
        waited.append(None)
        return real(work, *arguments, **options)

    with mock.patch.object(dist.Work, "wait", wait):
        yield waited


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
                # A .grad that nobody in Python has asked for is no object yet.
                for each in (t, t.grad if t.is_leaf else None):
                    if each is not None:
                        storage = each.untyped_storage()
                        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def stage_of(held, W):
    """held: bytes a parameter -> (the lowest stage that could do with as many; how many more these
    are than it needs, or 0 if that is next to nothing)."""
    for stage in PAPER:
        needed = sum(formula_of_bytes(stage, W))
        if needed <= 1.05 * held:
            return stage, held - needed if held > 1.05 * needed else 0
    return "zero3", 0


# -------------------------------------------------------------------------------------------------
# formulas of the ZeRO paper: what a rank sends, and what it holds


def formula_of_traffic(mode, micro_steps, still_whole=0):
    """What a rank sends, and receives, in a step, in units of (W - 1)/W psi elements, if the
    micro-steps of DDP and stage 1 are in no_sync() but the last, and stages know which is the last:
    ZeRO paper, arXiv 1910.02054, section 7.

    still_whole: the part of the parameters that stage 3 need not gather again in a backward, as it
    has kept them from the forward.
    """
    return {"ddp": 2, "zero1": 2, "zero2": micro_steps + 1,
            "zero3": micro_steps * (3 - still_whole)}[mode]


def formula_of_bytes(mode, W, param_bytes=4, reduce_bytes=4):
    """Bytes that a rank holds for each parameter of the model between a backward and a step: (of
    parameters, of gradients, of Adam), by the scheme of arXiv 1910.02054, figure 1.

    param_bytes, reduce_bytes: of a parameter in forward and backward, and of a gradient on its way.
    If these are not the 4 of a shard, parameters that are whole come on top of shards, and stage 1,
    too, keeps only its own part of the gradients.
    """
    shard = 4 / W
    if mode == "ddp":
        return 4, 4, 8
    parameters = shard if mode == "zero3" else param_bytes
    if mode != "zero3" and param_bytes != 4:
        parameters += shard
    gradients = 4 if mode == "zero1" and reduce_bytes == 4 else shard
    return parameters, gradients, 2 * shard

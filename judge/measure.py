"""How bytes are measured, and the formulas of the ZeRO paper."""

import gc
import time

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verify import device


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


# -------------------------------------------------------------------------------------------------
# formulas of bytes: what a rank receives, and what it holds


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

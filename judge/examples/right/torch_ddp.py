"""torch's DDP, where ranks may use different parameters."""

from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    return DistributedDataParallel(module, find_unused_parameters=True)


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

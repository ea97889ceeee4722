"""torch's DDP with ZeroRedundancyOptimizer, its ZeRO-1: a rank keeps optimizer state for some
parameters, updates these, and sends them to all."""

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def wrap(module):
    return DistributedDataParallel(module, find_unused_parameters=True)


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)


def optimizer(parameters, kind, **options):
    return ZeroRedundancyOptimizer(parameters, optimizer_class=kind, **options)

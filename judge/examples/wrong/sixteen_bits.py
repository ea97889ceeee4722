"""It sends gradients in bf16, and adds them in bf16."""

import torch.distributed as dist

from judge.examples.right.small import clip, is_used, wrap


def after_backward(model):
    for p in model.parameters():
        if is_used(p):
            total = p.grad.bfloat16()
            dist.all_reduce(total)
            p.grad = total.float() / dist.get_world_size()

"""An interface as in Stanford's CS336, assignment 2: a DDP whose gradients leave one by one during
the backward, and an optimizer that is sharded. Its adapters come first, then ours to them."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_


class DDPIndividualParameters(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.is_synced = module, True
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, src=0)
        # A backward begins at the end. All ranks send in this order, whichever they have used.
        self.order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.ready, self.works = set(), []
        for p in self.order:
            p.register_post_accumulate_grad_hook(self.note)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def note(self, p):
        if self.is_synced:
            self.ready.add(p)
            while len(self.works) < len(self.order) and self.order[len(self.works)] in self.ready:
                self.send_next()

    def send_next(self):
        p = self.order[len(self.works)]
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish_gradient_synchronization(self):
        is_used = torch.tensor([int(p.grad is not None) for p in self.order])
        while len(self.works) < len(self.order):
            self.send_next()
        for work in self.works:
            work.wait()
        dist.all_reduce(is_used)
        for p, n_users in zip(self.order, is_used):
            if n_users == 0:
                p.grad = None
        self.ready.clear()
        self.works.clear()

    @contextmanager
    def no_sync(self):
        self.is_synced = False
        yield
        self.is_synced = True


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.rank, self.W, self.own = dist.get_rank(), dist.get_world_size(), None
        self.optimizer_cls, self.kwargs = optimizer_cls, kwargs
        super().__init__(params, {})

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = dict(self.param_groups[-1])
        group["params"] = group["params"][self.rank::self.W]
        if not group["params"]:
            return
        if self.own is None:
            self.own = self.optimizer_cls([group], **self.kwargs)
        else:
            self.own.add_param_group(group)

    @torch.no_grad()
    def step(self, closure=None, **kwargs):
        loss = closure() if closure is not None else None
        if self.own is not None:
            self.own.step(**kwargs)
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                dist.broadcast(p.data, src=i % self.W)
        return loss


def get_ddp_individual_parameters(module):
    return DDPIndividualParameters(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


wrap = get_ddp_individual_parameters
optimizer = get_sharded_optimizer


def after_backward(model):
    ddp_individual_parameters_on_after_backward(model, None)


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

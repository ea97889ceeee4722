"""Public models that use their parts in another order than they register them, built small, and
what a wrapper's step shows of that.

    python -m dropin.tests.orders       # a table of them all, at W = 2 and 3, beside torch's
"""

import contextlib
import itertools
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dropin.ddp import DDP
from judge.measure import every_collective, live_bytes
from judge.training import fsdp2, STAGES
from verify import run

D = 32
BUCKET_MB = 4 * 8 * D * D / 2**20  # about a layer of a transformer


# -------------------------------------------------------------------------------------------------
# the models. USED has the names of their parts in the order of use; they are registered in another


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, memory, bias=None):
        q, _, _ = self.qkv(x).chunk(3, dim=-1)
        _, k, v = self.qkv(memory).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


class Layer(nn.Module):
    """Of an encoder or, if it is across, of a decoder, which looks at what the encoder gives."""

    def __init__(self, is_across=False):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention()
        self.across = Attention() if is_across else None
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x, memory=None, bias=None):
        h = self.norm(x)
        x = x + self.attention(h, h, bias)
        if self.across is not None:
            x = x + self.across(x, memory)
        return x + self.down(F.gelu(self.up(x)))


def layers(n, **options):
    return nn.ModuleList(Layer(**options) for _ in range(n))


def through(blocks, x, *others):
    for block in blocks:
        x = block(x, *others)
    return x


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 64, (2, 8), generator=generator)


class AnnotatedTransformer(nn.Module):
    """The EncoderDecoder of "The Annotated Transformer": its embeddings come last but one."""

    USED = ("src_embed", "encoder", "tgt_embed", "decoder", "generator")

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers(3), layers(3, is_across=True)
        self.src_embed, self.tgt_embed = nn.Embedding(64, D), nn.Embedding(64, D)
        self.generator = nn.Linear(D, 64)

    def units(self):
        return [*self.encoder, *self.decoder]

    def forward(self, step):
        memory = through(self.encoder, self.src_embed(tokens(step)))
        x = through(self.decoder, self.tgt_embed(tokens(step + 1)), memory)
        return F.cross_entropy(self.generator(x).flatten(0, 1), tokens(step).flatten())


class ResBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs):
        super().__init__()
        self.norm = nn.GroupNorm(4, n_inputs)
        self.conv = nn.Conv2d(n_inputs, n_outputs, 3, padding=1)
        self.time = nn.Linear(D, n_outputs)

    def forward(self, x, t):
        return self.conv(F.silu(self.norm(x))) + self.time(t)[:, :, None, None]


class UNet(nn.Module):
    """Of the shape of diffusers' UNet2DModel, which registers down_blocks, up_blocks, mid_block."""

    USED = ("time", "conv_in", "down_blocks", "mid_block", "up_blocks", "conv_out")

    def __init__(self):
        super().__init__()
        self.conv_in, self.time = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(1, D)
        self.down_blocks = nn.ModuleList(ResBlock(16, 16) for _ in range(3))
        self.up_blocks = nn.ModuleList(ResBlock(32, 16) for _ in range(3))
        self.mid_block = ResBlock(16, 16)
        self.conv_out = nn.Conv2d(16, 3, 3, padding=1)

    def units(self):
        return [*self.down_blocks, self.mid_block, *self.up_blocks]

    def forward(self, step):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        t = self.time(torch.full((2, 1), 0.1 * step))
        h = self.conv_in(x)
        kept = []
        for block in self.down_blocks:
            h = block(h, t)
            kept.append(h)
        h = self.mid_block(h, t)
        for block in self.up_blocks:
            h = block(torch.cat([h, kept.pop()], dim=1), t)
        return (self.conv_out(h) - x).square().mean()


class Tower(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.blocks, self.norm, self.embed = layers(3), nn.LayerNorm(D), embed

    def forward(self, x):
        return self.norm(through(self.blocks, self.embed(x)).mean(dim=1))


class CLIP(nn.Module):
    """transformers' CLIPModel registers the text's tower first, and uses the picture's first. In
    each tower here the embedding is registered last."""

    USED = ("vision_model", "text_model")

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(1))  # FSDP2 shards no scalar
        self.text_model, self.vision_model = Tower(nn.Embedding(64, D)), Tower(nn.Linear(12, D))

    def units(self):
        return [*self.vision_model.blocks, *self.text_model.blocks]

    def forward(self, step):
        patches = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(step))
        pictures, texts = self.vision_model(patches), self.text_model(tokens(step))
        return F.cross_entropy(self.logit_scale * pictures @ texts.T, torch.arange(2))


class TiedDecoder(nn.Module):
    """Its head is registered first, and is the embedding."""

    USED = ("embed", "blocks", "norm", "head")

    def __init__(self):
        super().__init__()
        self.head, self.blocks = nn.Linear(D, 64, bias=False), layers(5)
        self.norm, self.embed = nn.LayerNorm(D), nn.Embedding(64, D)
        self.embed.weight = self.head.weight

    def units(self):
        return [*self.blocks]

    def forward(self, step):
        x = self.norm(through(self.blocks, self.embed(tokens(step))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens(step + 1).flatten())


class T5(nn.Module):
    """As transformers' T5, with one embedding for both sides and the head, and a bias of positions
    that all blocks use; but here the decoder is registered before the encoder."""

    USED = ("shared", "positions", "encoder", "decoder", "norm")

    def __init__(self):
        super().__init__()
        self.shared, self.decoder, self.encoder = (
            nn.Embedding(64, D), layers(3, is_across=True), layers(3))
        self.norm, self.positions = nn.LayerNorm(D), nn.Embedding(15, 1)

    def units(self):
        return [*self.encoder, *self.decoder]

    def forward(self, step):
        distance = torch.arange(8)[:, None] - torch.arange(8)[None, :] + 7
        bias = self.positions(distance)[..., 0]
        memory = through(self.encoder, self.shared(tokens(step)), None, bias)
        x = self.norm(through(self.decoder, self.shared(tokens(step + 1)), memory, bias))
        return F.cross_entropy((x @ self.shared.weight.T).flatten(0, 1), tokens(step).flatten())


MODELS = {kind.__name__: kind for kind in (AnnotatedTransformer, UNet, CLIP, TiedDecoder, T5)}


def build(name, is_in_order=False):
    """A model, with the same values in both cases."""
    torch.manual_seed(0)
    module = MODELS[name]()
    if is_in_order:
        register_in_order(module, module.USED)
        if name == "CLIP":
            for tower in (module.text_model, module.vision_model):
                register_in_order(tower, ("embed", "blocks", "norm"))
    return module


def register_in_order(module, names):
    parts = dict(module._modules)
    assert parts.keys() == set(names)
    module._modules.clear()
    for name in names:
        module._modules[name] = parts[name]


# -------------------------------------------------------------------------------------------------
# what a step shows

WRAPPERS = ("torch ddp", "ddp", "zero1", "zero2", "fsdp2", "zero3")


def wrapped(wrapper, module):
    if wrapper == "torch ddp":
        return DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB)
    if wrapper == "ddp":
        return DDP(module, bucket_cap_mb=BUCKET_MB)
    if wrapper == "fsdp2":
        return fsdp2(module, units=module.units())
    return STAGES[wrapper](module, units=module.units())


def watch(wrapper, name, is_in_order=False):
    """What the fourth step shows, on this rank:

        overlapped  the part of the units, by elements, that the backward computes after the first
                    gradients were sent
        messages, elements  that a rank receives. None for torch's DDP, which sends from C++. Of
                    FSDP2 no elements: its calls name the whole buffer, with this rank's own part
        growth      kB above those before the backward, at most, when a unit goes back; of the third
                    step. None for FSDP2, which frees memory under tensors that stay
    """
    module = build(name, is_in_order)
    units = module.units()
    came = []  # [(elements of a unit that has gone back, whether gradients were sent before)]
    sent = []
    grown = []
    watches_memory = False

    def gone_back(unit, *_):
        came.append((sum(p.numel() for p in unit.parameters()), bool(launched)))
        if watches_memory:
            grown.append(live_bytes())

    launched = []
    hooks = [unit.register_full_backward_hook(gone_back) for unit in units]
    model = wrapped(wrapper, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def note(operation, tensors):
        sent.append(tensors[0].numel())
        if wrapper == "fsdp2" and "reduce_scatter" in operation:
            launched.append(operation)

    tap = contextlib.nullcontext()
    if wrapper == "torch ddp":
        def hook(state, bucket):
            launched.append(bucket)
            return allreduce_hook(state, bucket)

        model.register_comm_hook(None, hook)
    elif wrapper != "fsdp2":
        start_reduction = model._start_reduction

        def start(bucket):
            launched.append(bucket)
            start_reduction(bucket)

        tap = mock.patch.object(model, "_start_reduction", start)
    actual = {}
    with tap:
        for step in range(4):
            sent.clear()
            with every_collective(note):
                loss = model(step)
                came.clear()
                launched.clear()
                watches_memory = step == 2
                before = live_bytes() if watches_memory else 0
                loss.backward()
            if watches_memory:
                actual["growth"] = (max(grown) - before) / 1000
            optimizer.step()
            optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    total = sum(n for n, _ in came)
    actual["overlapped"] = sum(n for n, is_after in came if is_after) / total
    actual["messages"], actual["elements"] = len(sent), sum(sent)
    if wrapper == "torch ddp":
        actual["messages"], actual["elements"] = None, None
    if wrapper == "fsdp2":
        actual["growth"], actual["elements"] = None, None
    return actual


def table():
    """A line for each model and wrapper: out of order / in order."""
    print("| model | wrapper | W | overlapped | messages | elements received | growth, kB |")
    print("|---|---|---|---|---|---|---|")
    for W in (2, 3):
        for name, wrapper in itertools.product(MODELS, WRAPPERS):
            actual, *_ = run(W, watch, wrapper, name)
            in_order, *_ = run(W, watch, wrapper, name, True)
            cells = [name, wrapper, W]
            for what, form in (("overlapped", "{:.2f}"), ("messages", "{}"), ("elements", "{}"),
                               ("growth", "{:.1f}")):
                pair = actual[what], in_order[what]
                texts = ["-" if value is None else form.format(value) for value in pair]
                cells.append(" / ".join(texts))
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    table()

# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""The GPT that every mode trains: a Llama-style decoder in one file, torch only.

Replaces, for study and for small runs, the model part of nanoGPT and the LlamaForCausalLM of
transformers (several thousand lines with its base classes). One block is

    x = x + attention(RMSNorm(x))        causal, rotary positions, grouped-query
    x = x + mlp(RMSNorm(x))              SwiGLU

between a token embedding and an output head that share one matrix, unless told otherwise. No
biases, no dropout, no position table, no buffers: parameters are the only state, so sharding them
shards everything.

How it differs from its models:
- Every tensor is initialised from (seed, its own name), never from the global random state. Which
  rank builds it, in which order, and whether the meta device came first, changes nothing.
- q, k and v are one matrix, and so are the gate and up projections: three launches fewer a block.
  Rotary halves are laid out as in the Llama family (rotate_half, not interleaved), so that weights
  of that family fit row by row: `llama_views`.
- Nothing in here knows about ranks. Wrappers only need that blocks sit in one ModuleList.

Cost: Psi parameters take 4 Psi bytes in fp32; a training step needs about 6 Psi FLOPs a token plus
attention, see `GPT.flops_per_token`.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class GPTConfig:
    """Sizes. Raises ValueError, naming the field, on those that do not fit.

    Embedding and output head have a row for each of V tokens, and more rows, up to the next
    multiple of pad_vocab_size_to: a GPU multiplies a matrix of 50,304 rows much faster than one of
    50,257. No token uses these last rows:
    - they are 0 at the beginning, and stay 0, since their gradients are;
    - their logits are neither in the loss nor in what `forward` returns: none is ever sampled;
    - a folder of transformers has none of them, whether it is written or read.
    1 means none of them, as in checkpoints from before this field.
    """
    block_size: int = 1024             # T: longest sequence, in tokens
    vocab_size: int = 50257            # V, of the tokenizer
    pad_vocab_size_to: int = 64        # see above
    n_layer: int = 12                  # L
    n_head: int = 12                   # H, query heads
    n_embd: int = 768                  # C; the head size hs is C / H
    n_kv_head: int | None = None       # key and value heads, a divisor of n_head; None: n_head
    n_hidden: int | None = None        # width inside the MLP; None: 8/3 C, up to a multiple of 32
    rope_theta: float = 10000.0        # rotary base: the longest wavelength is near 2 pi rope_theta
    norm_eps: float = 1e-5
    tied: bool = True                  # whether embedding and output head share one matrix
    attention: str = "sdpa"            # "sdpa": torch's fused kernel; "explicit": the formula
    activation_checkpointing: bool = False  # recompute each block in the backward
    seed: int = 1337                   # of the initial weights

    def __post_init__(self):
        """Fill the derived sizes, and check all."""
        self.n_kv_head = self.n_kv_head or self.n_head
        # 8/3 C: three matrices of this width cost as much as the two of width 4 C they replace
        # (Shazeer, arXiv 2002.05202, section 3).
        self.n_hidden = self.n_hidden or 32 * math.ceil(8 * self.n_embd / 3 / 32)
        for name, value in vars(self).items():
            if type(value) is int and name != "seed" and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd {self.n_embd} over n_head {self.n_head}: no even head size")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} does not divide n_head {self.n_head}")
        if self.attention not in ("sdpa", "explicit"):
            raise ValueError(f"attention {self.attention!r} is neither 'sdpa' nor 'explicit'")

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self):
        """Rows of embedding and output head."""
        return self.pad_vocab_size_to * math.ceil(self.vocab_size / self.pad_vocab_size_to)


# Sizes only; the vocabulary comes from the tokenizer. Parameters at V = 50257 beside each.
PRESETS = {
    "tiny":        dict(n_layer=4,  n_head=4,  n_embd=128,  block_size=128),   # 0.84M at V = 257
    "gpt2":        dict(n_layer=12, n_head=12, n_embd=768,  block_size=1024),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024, block_size=1024),  # 355M
    "gpt2-large":  dict(n_layer=36, n_head=20, n_embd=1280, block_size=1024),  # 774M
    "gpt2-xl":     dict(n_layer=48, n_head=25, n_embd=1600, block_size=1024),  # 1.56B
    "1b":          dict(n_layer=20, n_head=32, n_embd=2048, block_size=2048, n_kv_head=8),
    "7b":          dict(n_layer=32, n_head=32, n_embd=4096, block_size=4096),
}


class Embedding(nn.Embedding):
    """A vector for each token. To ask for a row that no token uses is an error."""

    def __init__(self, config):
        super().__init__(config.padded_vocab_size, config.n_embd)
        self.vocab_size = config.vocab_size

    def forward(self, idx):
        """(B, T) -> (B, T, C)."""
        return F.embedding(idx, self.weight[:self.vocab_size])


def rotate_half(x):
    """(..., hs) -> (..., hs): the second half negated, then the first. [1,2,3,4] -> [-3,-4,1,2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary_tables(T, hs, theta, device):
    """cos and sin of position x frequency, each (T, hs), fp32. RoFormer, arXiv 2104.09864, eq. 34.

    Recomputed in every forward: T x hs numbers cost nothing beside a block, and a stored table
    would be a buffer to materialise, broadcast and cast in every wrapper.
    """
    even = torch.arange(0, hs, 2, device=device, dtype=torch.float32)
    position = torch.arange(T, device=device, dtype=torch.float32)
    angle = torch.outer(position, theta ** (-even / hs))  # (T, hs/2)
    angle = torch.cat((angle, angle), dim=-1)  # (T, hs): both halves turn by the same angles
    return angle.cos(), angle.sin()


def apply_rotary(x, cos, sin):
    """x (B, nh, T, hs) turned by its position; in x's dtype, since autocast must not widen q, k."""
    return x * cos.to(x.dtype) + rotate_half(x) * sin.to(x.dtype)


def explicit_attention(q, k, v):
    """softmax(q k^T / sqrt(hs)) v under a causal mask; all (B, nh, T, hs).

    What scaled_dot_product_attention computes without ever writing the (T, T) scores to memory.
    """
    T = q.size(-2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, nh, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v  # (B, nh, T, hs)


class Attention(nn.Module):
    """Causal self-attention; n_kv_head key/value heads serve n_head query heads (2305.13245)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        n_rows = (config.n_head + 2 * config.n_kv_head) * config.head_size
        self.qkv = nn.Linear(config.n_embd, n_rows, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cos, sin):
        """x (B, T, C) -> (B, T, C). Rows of qkv: nh query heads, nkv key heads, nkv value heads."""
        B, T, C = x.size()  # batch size, sequence length, embedding width
        nh, nkv, hs = self.config.n_head, self.config.n_kv_head, self.config.head_size
        qkv = self.qkv(x).view(B, T, nh + 2 * nkv, hs).transpose(1, 2)  # (B, nh + 2 nkv, T, hs)
        q, k, v = qkv.split((nh, nkv, nkv), dim=1)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if nkv < nh:  # each key/value head serves nh / nkv query heads in a row
            k, v = (t.repeat_interleave(nh // nkv, dim=1) for t in (k, v))  # (B, nh, T, hs)
        if self.config.attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = explicit_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.n_hidden, bias=False)
        self.down = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):
        """x (B, T, C) -> (B, T, C). Rows of gate_up: those of gate, then those of up."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin):
        """x (B, T, C) -> (B, T, C). Add to x the attention of its norm; then add to that the MLP
        of the norm of that. The norms come first, so the sum runs through all blocks unchanged."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


def loss_of(logits, targets, V=None):
    """logits (..., V or more) of any dtype, targets (...) -> mean cross-entropy in nats, fp32, of
    the first V logits, None for all. A target of -1 is left out of it.

    In fp32, as a sum of V exponentials in bf16 loses the small ones. That costs two tensors as
    large as the logits in fp32, unless this is compiled: then neither is in memory. The slice is
    made in here: made outside, it would cost a copy of the gradient.
    """
    flat = logits[..., :V].float().flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=-1)


class GPT(nn.Module):
    """The whole model.

        model = GPT(GPTConfig(vocab_size=257, **PRESETS["tiny"]))
        logits, loss = model(idx, targets)

    Built under `with torch.device("meta"):` it allocates nothing; then `model.to_empty(device=...)`
    followed by `model.init_weights()` gives the weights that building it whole would have given.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.loss_of = loss_of  # compile_blocks() compiles it
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Set every parameter that is not on meta, each drawn from (config.seed, its name).

        | tensor                                  | distribution                        |
        |-----------------------------------------|-------------------------------------|
        | matrix (out, in), also the embedding    | N(0, 1 / (3 in))                    |
        | `*.proj.weight`, `*.down.weight`        | N(0, 1 / (3 in) / (2 n_layer))      |
        | norm weight                             | 1                                   |
        | rows that no token uses                 | 0                                   |

        1 / (3 in) is the variance of torch's own Linear and, at width 768, GPT-2's 0.02 squared.
        The factor on what is added to the residual stream keeps its variance independent of depth
        (GPT-2 paper, section 2.3). Numbers are drawn on the CPU, so that every device starts from
        the same bits: about 4 ns each, half a minute for 7B.
        """
        if self.config.tied:
            self.lm_head.weight = self.wte.weight  # here, since to_empty() unties
        for name, p in self.named_parameters():
            if p.is_meta:
                continue
            if p.dim() < 2:
                p.fill_(1.0)
                continue
            key = hashlib.sha256(f"{self.config.seed} {name}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(key[:8], "little"))
            variance = 1 / (3 * p.size(1))
            if name.endswith(("proj.weight", "down.weight")):
                variance /= 2 * self.config.n_layer
            used = p
            if p is self.wte.weight or p is self.lm_head.weight:
                used = p[:self.config.vocab_size]
                p[self.config.vocab_size:] = 0
            # In fp32 on the CPU, whatever torch's defaults are.
            drawn = torch.empty(used.shape, dtype=torch.float32, device="cpu")
            used.copy_(drawn.normal_(0.0, math.sqrt(variance), generator=generator))

    def forward(self, idx, targets=None):
        """idx, targets (B, T) token ids -> logits (B, T, V), and `loss_of` them or None.

        Raises ValueError where T exceeds block_size, and on a CPU IndexError for ids from V on. The
        loss is not made of the logits that are returned, a slice, so it has no gradient by them.
        """
        T = idx.size(1)
        if T > self.config.block_size:
            raise ValueError(f"sequence of {T} tokens, but block_size is {self.config.block_size}")
        x = self.wte(idx)  # (B, T, C)
        cos, sin = rotary_tables(T, self.config.head_size, self.config.rope_theta, idx.device)
        for block in self.blocks:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                # Keeps only x of each block: L times less activation memory for a third more FLOPs.
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.lm_head(self.norm(x))  # (B, T, rows of the head)
        V = self.config.vocab_size
        loss = None if targets is None else self.loss_of(logits, targets, V)
        return logits[..., :V], loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """idx (B, T) -> (B, T + max_new_tokens): sample one token at a time from the last logits.

        temperature 0 takes the likeliest token; top_k keeps the k likeliest. No key/value cache: a
        whole forward per token, which is slow and leaves nothing to keep in step between ranks.
        """
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[0][:, -1].float()  # (B, V)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
                logits = logits.masked_fill(logits < kth, float("-inf"))
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
            else:
                probabilities = (logits / temperature).softmax(dim=-1)
                new = torch.multinomial(probabilities, num_samples=1, generator=generator)  # (B, 1)
            idx = torch.cat((idx, new), dim=1)
        return idx

    def compile_blocks(self):
        """torch.compile each block by itself, and the loss: small graphs, hooks between them, names
        unchanged.

        Copy a model before compiling it: a deepcopy's blocks would run the original's weights.
        """
        for block in self.blocks:
            block.forward = torch.compile(block.forward)
        self.loss_of = torch.compile(loss_of)

    def flops_per_token(self):
        """Training FLOPs per token, 6 N + 12 L H Q T: PaLM, arXiv 2204.02311, appendix B.

        N counts the embedding only where it is the head too: that use is a matrix multiplication.
        It does not count rows that no token uses.
        """
        N = sum(p.numel() for p in self.parameters())
        N -= 0 if self.config.tied else self.wte.weight.numel()
        N -= (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        L, H, T = self.config.n_layer, self.config.n_head, self.config.block_size
        Q = self.config.head_size
        return 6 * N + 12 * L * H * Q * T

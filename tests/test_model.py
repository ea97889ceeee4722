"""model.py: a Llama by its definition, its sizes, and folders of transformers."""

import json
import math
import re
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import runs
from extras import auto
from model import apply_rotary, GPT, GPTConfig, PRESETS, rotary_tables
from ddp import DDP
from tests.common import on_meta, planted, raises, ROOT
from tests.ranks import on_ranks
from tests.runs import finish, refused
from verify import compare
from zero import Zero3


def small_gpt(**options):
    sizes = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=24)
    return GPT(GPTConfig(**{**sizes, **options}))


def llama_logits(gpt, idx):
    """The logits of a Llama by its definition, a head at a time, from the weights of a GPT, where
    q, k and v, as well as gate and up, are the rows of one matrix."""
    c = gpt.config
    weights = gpt.state_dict()
    T = idx.size(1)
    hs = c.n_embd // c.n_head
    half = hs // 2
    angle = torch.arange(T)[:, None] * c.rope_theta ** (-torch.arange(0, hs, 2) / hs)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], c.norm_eps)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def turned(x):
        a = x[..., :half]
        b = x[..., half:]
        first = a * angle.cos() - b * angle.sin()
        second = b * angle.cos() + a * angle.sin()
        return torch.cat((first, second), -1)

    x = weights["wte.weight"][idx]
    for i in range(c.n_layer):
        name = f"blocks.{i}"
        rows = linear(norm(x, f"{name}.attn_norm"), f"{name}.attn.qkv")
        parts = rows.split(hs, dim=-1)
        heads = []
        for h in range(c.n_head):
            k = c.n_head + h * c.n_kv_head // c.n_head  # its key, and n_kv_head later its value
            scores = turned(parts[h]) @ turned(parts[k]).transpose(-2, -1) / math.sqrt(hs)
            weight = scores.masked_fill(future, -math.inf).softmax(-1)
            heads.append(weight @ parts[k + c.n_kv_head])
        x = x + linear(torch.cat(heads, -1), f"{name}.attn.proj")
        rows = linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.gate_up")
        gate, up = rows.chunk(2, dim=-1)
        x = x + linear(gate * gate.sigmoid() * up, f"{name}.mlp.down")
    return linear(norm(x, "norm"), "lm_head")[..., :c.vocab_size]


VARIANTS = {"plain": {}, "explicit": dict(attention="explicit"), "compiled": {},
            "recomputed": dict(activation_checkpointing=True)}


@on_ranks(1)
def test_model_is_a_llama():
    """Logits are a Llama's by its definition, and the loss is the mean of their cross-entropies.
    Explicit attention and torch.compile of each block change loss and gradients by rounding only,
    recomputing blocks changes no bit."""
    idx = torch.arange(32).view(2, 16)
    actual = {}
    calls = {}
    targets = idx.roll(-1).masked_fill(idx < 3, -1)
    for how, options in VARIANTS.items():
        gpt = small_gpt(tied=False, n_layer=1, **options)
        norms = [m for m in gpt.modules() if isinstance(m, torch.nn.RMSNorm)]
        for i, norm in enumerate(norms, start=1):
            norm.weight.data += torch.arange(24) / 24 / i  # or they would be ones, all alike
        if how == "compiled":
            compile = partial(torch.compile, backend="aot_eager")
            with mock.patch.object(torch, "compile", compile):
                gpt.compile_blocks()
        with torch.profiler.profile() as profiler:
            logits, loss = gpt(idx, targets)
            loss.backward()
        actual[how] = {"logits": logits.detach(), **{n: p.grad for n, p in gpt.named_parameters()}}
        names = [event.name for event in profiler.events()]
        calls[how] = names.count("aten::scaled_dot_product_attention")
        expected = llama_logits(gpt, idx)
        nats = F.nll_loss(expected.log_softmax(-1).transpose(1, 2), targets, ignore_index=-1)
        assert torch.allclose(logits, expected, atol=1e-5), f"{how}: the logits are no Llama's"
        assert torch.allclose(loss, nats, atol=1e-5), f"{how}: loss {loss:.4f}, not {nats:.4f}"
        for n, t in actual["plain"].items():
            assert torch.allclose(t, actual[how][n], atol=1e-5), f"{how}: {n} differs from plain"
    assert calls["plain"] == 1, f"plain calls SDPA {calls['plain']} times"
    assert calls["explicit"] == 0, "explicit attention calls SDPA"
    assert calls["recomputed"] == 2, f"a recomputed block calls SDPA {calls['recomputed']} times"
    compare(actual["plain"], actual["recomputed"], "recomputed")
    raises(ValueError, "17 tokens", gpt, torch.zeros(1, 17, dtype=torch.int64))
    x = torch.ones(1, 1, 16, 6, dtype=torch.bfloat16)
    turned = apply_rotary(x, *rotary_tables(16, 6, 10000.0, x.device))
    assert turned.dtype == x.dtype, f"rotary positions make {turned.dtype} of {x.dtype}"
    logits, loss = small_gpt().bfloat16()(idx, targets)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32, "a loss in 16 bits"
    assert gpt.generate(idx, 3, top_k=2).shape == (2, 19), "three tokens were to be added"
    likeliest = llama_logits(gpt, idx)[:, -1].argmax(-1)
    for options in (dict(temperature=0), dict(top_k=1)):
        actual = gpt.generate(idx, 1, **options)[:, -1]
        assert torch.equal(actual, likeliest), f"{options}: not the likeliest token"


# In millions of parameters.
SIZES = {"tiny": 7.2, "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558,
         "1b": 1e3, "7b": 7e3}


@on_ranks(1)
def test_model_is_as_named():
    """Presets have their sizes, and a token its FLOPs; weights come from (seed, name), not from the
    random state, the order, the depth or meta."""
    for name, millions in SIZES.items():
        gpt = on_meta(GPT, GPTConfig(vocab_size=50257, **PRESETS[name]))
        c = gpt.config
        assert gpt.wte.weight.shape == (50304, c.n_embd), f"{name}: {gpt.wte.weight.shape}"
        N = sum(p.numel() for p in gpt.parameters()) - 47 * c.n_embd  # rows that no token uses
        assert abs(N / millions / 1e6 - 1) < 0.06, f"{name} has {N:,} parameters"
        # PaLM, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T
        assert gpt.flops_per_token() == 6 * N + 12 * c.n_layer * c.n_embd * c.block_size
    gpt = small_gpt()
    late = on_meta(small_gpt).to_empty(device="cpu")
    first, second = gpt.blocks
    assert not torch.equal(first.mlp.down.weight, second.mlp.down.weight), "blocks are alike"
    with mock.patch("builtins.hash", planted):  # of a string: another one in each process
        late.init_weights()
    compare(gpt.state_dict(), late.state_dict(), "from meta")
    deeper = small_gpt(n_layer=3).state_dict()
    other = small_gpt(seed=1).state_dict()
    for n, p in gpt.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), f"{n} is not ones"
            continue
        is_residual = "proj" in n or "down" in n  # their variance depends on the depth
        assert torch.equal(p, deeper[n]) != is_residual, f"{n}: in a model of three blocks"
        assert not torch.equal(p, other[n]), f"{n} does not depend on the seed"
        variance = 1 / (3 * p.size(-1)) / (2 * 2 if is_residual else 1)
        ratio = p.var().item() / variance
        assert 0.8 < ratio < 1.25, f"{n}: the variance is {ratio:.2f} times what it should be"


@on_ranks(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab_size, n_rows", [(61, 64), (65, 128), (128, 128), (257, 320)])
def test_rows_that_no_token_uses(vocab_size, n_rows, tied):
    """Embedding and head have rows up to a multiple of 64. The last ones are 0 at the beginning,
    also where memory was not, and so are their gradients. They change neither the other rows, nor
    the logits, nor the FLOPs, and loss and gradients by rounding only."""
    V = vocab_size
    small = partial(small_gpt, vocab_size=V, tied=tied)
    gpt = small()
    late = on_meta(small).to_empty(device="cpu")
    for p in late.parameters():
        p.data.fill_(math.nan)
    late.init_weights()
    compare(gpt.state_dict(), late.state_dict(), "from meta")
    without = small(pad_vocab_size_to=1)
    for name in ("wte.weight", "lm_head.weight"):
        rows = gpt.get_parameter(name)
        assert len(rows) == n_rows and (rows[V:] == 0).all(), f"{name}: {rows[V:]}"
        assert len(without.get_parameter(name)) == V, name
    for name, p in without.named_parameters():
        assert torch.equal(p, gpt.get_parameter(name)[:len(p)]), f"{name} begins otherwise"
    assert gpt.flops_per_token() == without.flops_per_token()

    idx = torch.arange(V - 32, V).view(2, 16)
    targets = idx.flip(1).masked_fill(idx % 5 == 0, -1)
    logits, loss = gpt(idx, targets)
    others, other_loss = without(idx, targets)
    assert torch.equal(logits, others) and torch.equal(logits, gpt(idx)[0]), "other logits"
    explicit = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert torch.equal(loss, explicit), f"loss {loss}, and {explicit} of the logits"
    assert torch.allclose(loss, other_loss, rtol=1e-6, atol=0), f"loss {loss}, not {other_loss}"
    loss.backward()
    other_loss.backward()
    for name, p in without.named_parameters():
        gradient = gpt.get_parameter(name).grad
        assert torch.allclose(gradient[:len(p)], p.grad, atol=1e-6), f"{name}: other gradients"
        assert (gradient[len(p):] == 0).all(), f"{name}: gradients {gradient[len(p):]}"


@on_ranks(1)
def test_no_token_is_beyond_the_vocabulary(W):
    """None is sampled, however likely all are, and none is taken as an input or a target."""
    gpt = small_gpt(vocab_size=65)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.zeros(64, 1, dtype=torch.int64)
    for options in ({}, dict(top_k=128)):
        actual = gpt.generate(prompt, 32, temperature=1e9, generator=generator, **options)
        assert set(actual.flatten().tolist()) == set(range(65)), f"{options}: not all 65 tokens"
    last, beyond = torch.tensor([[64]]), torch.tensor([[65]])
    gpt(last, last)
    raises(IndexError, "out of range", gpt, beyond)
    raises(IndexError, "out of bounds", gpt, last, beyond)
    raises(ValueError, "pad_vocab_size_to is 0", GPTConfig, pad_vocab_size_to=0)


@on_ranks(1)
def test_hooks_see_the_logits_of_all_rows():
    """Nothing writes to what the head has given: hooks of modules and tensors, a module around the
    head, and FSDP2 work as with any model."""
    idx = torch.arange(32).view(2, 16)
    seen = []
    gpt = small_gpt()
    gpt.lm_head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    gpt.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    logits, loss = gpt(idx, idx)
    logits.register_hook(seen.append)
    (loss + seen[0].square().mean() + logits.square().mean()).backward()
    shapes = [(2, 16, 64), (2, 16, 61), (2, 16, 64)]
    assert [tuple(t.shape) for t in seen] == shapes
    assert all(t.isfinite().all() for t in seen), "not finite"
    gpt.lm_head = torch.nn.Sequential(gpt.lm_head, torch.nn.Tanh())
    gpt(idx, idx)[1].backward()
    gpt = small_gpt()
    expected = gpt(idx, idx)[1]
    sharded = fully_shard(gpt, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.warns(UserWarning, match="returned a view"):  # which extras/torchs.py silences
        _, loss = sharded(idx, idx)
    loss.backward()
    assert torch.equal(loss, expected), f"{loss} in FSDP2, not {expected}"


def losses_of_a_step(model, gpt):
    """As train.py makes them: a forward with its backward; and an evaluation, a sequence a time."""
    idx = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(idx, idx)[1].backward()
        model.zero_grad()
        with torch.no_grad():
            logits, _ = model(idx)
            for scores, targets in zip(logits, idx):
                gpt.loss_of(scores, targets)


WRAPPERS = {"none": lambda module: module, "ddp": DDP, "zero3": Zero3}


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_blocks_and_loss_are_two_graphs(wrapper):
    """compile_blocks: without a break, and all blocks are one, although torch has more than eight
    of a function run uncompiled; in an evaluation, which has no gradients, two more. Hooks of a
    wrapper are between them, or do nothing inside."""
    gpt = small_gpt(n_layer=9)
    torch.compiler.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        gpt.compile_blocks()
    losses_of_a_step(WRAPPERS[wrapper](gpt), gpt)
    n_graphs = counters["stats"]["unique_graphs"]
    breaks = dict(counters["graph_break"])
    torch.compiler.reset()
    assert n_graphs == 4, f"{n_graphs} graphs"
    assert not breaks, breaks


def peak_in_logits(gpt):
    """What forward and backward take beyond what was held before, in units of the logits, which
    are bf16, and held until the end. Of the third of three steps: the first ones make gradients,
    and compile."""
    idx = torch.arange(384).view(2, 192)
    for _ in range(3):
        auto.reset_peak(idx.device)
        before = runs.peak_mem_bytes(idx.device)
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = gpt(idx, idx)
        loss.backward()
        peak = runs.peak_mem_bytes(idx.device)
        n_bytes = 2 * logits.numel()
        del logits, loss
    return (peak - before) / n_bytes


@on_ranks(1)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read in /proc")
def test_a_loss_takes_so_much_memory():
    """Of GPT-2's vocabulary. With fp32 in units of bf16: logits 1, their copy 2, its log-softmax 2,
    and the gradient of that 2. Rows that no token uses add no copy."""
    sizes = dict(n_layer=1, n_head=1, n_embd=16, block_size=256)
    actual = peak_in_logits(GPT(GPTConfig(**sizes)))
    without = peak_in_logits(GPT(GPTConfig(pad_vocab_size_to=1, **sizes)))
    assert 1 < actual <= 7.2, f"{actual:.2f} times the logits"
    assert actual <= 1.03 * without, f"{actual:.2f} times the logits, and {without:.2f} without"


def test_llama_folders_go_out_and_in(tmp_path):
    """What --export_hf writes, --init_from reads in any mode, to the bit, and transformers opens as
    LlamaForCausalLM with the loss that training has; so is read what transformers writes: several
    files, bf16, a head of its own, another rope_theta."""
    needed = "pip install safetensors transformers"
    pytest.importorskip("safetensors", reason=needed)
    transformers = pytest.importorskip("transformers", reason=needed)
    torch.manual_seed(0)
    block = torch.randint(256, (16,))  # all of the data, so that any batch has the same loss
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    refused("LICENSE", tmp_path / "out", export_hf=ROOT / "LICENSE")  # which is no tmp_path
    small = transformers.LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=8,
                                     num_hidden_layers=1, num_attention_heads=1)
    transformers.LlamaForCausalLM(small).save_pretrained(tmp_path / "small")
    asked = finish(None, argv=[f"--init_from={tmp_path}/small", "--eval_only", "--prompt=z",
                               "--eval_steps=0"])["stdout"]
    assert "sample:\nnone, as the tokenizer knows 257 tokens, and the model 64\n" in asked, asked
    for name in ("train.bin", "val.bin"):
        block.repeat(300).numpy().astype(np.uint16).tofile(tmp_path / name)
    trained = finish(tmp_path / "out", 2, mode="zero3", n_head=4, n_kv_head=2, lr=0.1,
                     min_lr=0.1, export_hf=tmp_path / "hf")
    expected = trained["param_sha256"]
    config = transformers.LlamaConfig.from_pretrained(
        tmp_path / "hf", tie_word_embeddings=False, rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type="default", rope_theta=50.0))
    other = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    other.save_pretrained(tmp_path / "other", max_shard_size="10KB")
    for name, W, mode in (("hf", 1, "single"), ("hf", 2, "zero3"), ("hf", 2, "torch-fsdp"),
                          ("other", 2, "zero1")):
        ours = finish(tmp_path / mode, W, init_from=tmp_path / name, dataset=tmp_path, mode=mode,
                      lr=0, min_lr=0, max_steps=1, **sizes)
        llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name)
        logits = llama.float()(block[None]).logits[0]
        loss = F.cross_entropy(logits, block.roll(-1)).item()
        assert abs(ours["train_loss"] - loss) < 1e-5, (
            f"{name}, {mode}: loss {ours['train_loss']}, transformers has {loss}")
        assert name == "other" or ours["param_sha256"] == expected, f"{mode}: other bits"


def take_few_tokens():
    """Plant a tokenizer of 200 bytes in place of tiktoken's."""
    ranks = {bytes([i]): i for i in range(200)}
    few = tiktoken.Encoding("few", pat_str=".|\\n", mergeable_ranks=ranks, special_tokens={})
    tiktoken.get_encoding = lambda name: few


def test_another_vocabulary_is_said(tmp_path):
    """A Llama whose vocabulary is not the tokenizer's begins with weights that are for other
    tokens: one line says so, and there is no sample. Where both have as many there is nothing to
    say, nor where a run goes on, by then without that folder."""
    pytest.importorskip("safetensors", reason="pip install safetensors")
    out, hf, tokens = tmp_path / "out", tmp_path / "hf", tmp_path / "tokens"
    finish(out, export_hf=hf, max_steps=1)
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    actual = finish(tmp_path / "same", init_from=hf, max_steps=1, **sizes)["stdout"]
    assert "other ones" not in actual and "sample:\nnone" not in actual, actual
    tokens.mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(999) % 200).astype(np.uint16).tofile(tokens / name)
    options = dict(W=2, mode="zero3", init_from=hf, dataset=tokens, save_interval=1,
                   tokenizer="gpt2", **sizes)
    actual = finish(out, max_steps=1, plant=take_few_tokens, **options)["stdout"]
    fact = f"--init_from {hf} knows 257 tokens, and the tokenizer 200: its weights are for other"
    assert actual.count(fact) == 1, actual
    assert "sample:\nnone, as the tokenizer knows 200 tokens, and the model 257\n" in actual, actual
    hf.rename(tmp_path / "gone")
    actual = finish(out, max_steps=2, resume="auto", plant=take_few_tokens, **options)["stdout"]
    assert "other ones" not in actual and "resumed" in actual, actual


def test_files_of_an_earlier_save(tmp_path):
    """--init_from reads model.safetensors, or what the index names, as transformers does."""
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
    hf = tmp_path / "hf"
    finish(tmp_path / "out", export_hf=hf, max_steps=1)
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    weights = safetensors.load_file(hf / "model.safetensors")
    earlier = {name: weight + 1 for name, weight in weights.items()}

    def hash_of(name):
        return finish(tmp_path / name, init_from=hf, max_steps=1, **sizes)["param_sha256"]

    expected = hash_of("alone")
    safetensors.save_file(earlier, hf / "model-00001-of-00001.safetensors")
    assert hash_of("beside") == expected
    (hf / "model.safetensors").rename(hf / "a.safetensors")
    refused("2 files .*safetensors, and no model.safetensors.index.json", tmp_path / "two",
            init_from=hf, **sizes)
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hash_of("by its index") == expected
    (hf / "model.safetensors.index.json").write_text("{}")
    refused("index.json: KeyError: 'weight_map'", tmp_path / "none", init_from=hf, **sizes)


@pytest.mark.parametrize("dtype, name", [("int8", "I8"), ("uint8", "U8"), ("float8_e4m3fn", "F8")])
def test_quantised_weights_are_refused(dtype, name, tmp_path):
    """By the name of the first one: without their scales the numbers are not the weights. Those of
    16 bits are read."""
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
    hf = tmp_path / "hf"
    finish(tmp_path / "out", export_hf=hf, max_steps=1)
    weights = safetensors.load_file(hf / "model.safetensors")
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    for key, weight in weights.items():
        weights[key] = weight.to(torch.float16)
    safetensors.save_file(weights, hf / "model.safetensors")
    finish(tmp_path / "next", init_from=hf, max_steps=1, **sizes)
    changed = "model.layers.1.mlp.down_proj.weight"
    weights[changed] = weights[changed].to(getattr(torch, dtype))
    safetensors.save_file(weights, hf / "model.safetensors")
    refused(rf"hf: {re.escape(changed)} is {name}.* in \*\.safetensors, which may be quantised",
            tmp_path / "a", init_from=hf, **sizes)


@pytest.mark.parametrize("n_ranks, mode", [(1, "single"), (2, "zero3")])
def test_a_run_outlives_the_folder_it_began_from(n_ranks, mode, tmp_path):
    """A run that has begun with --init_from goes on when that folder is gone, in another mode, too,
    to the bits of an undisturbed run; one that begins anew is refused in a line."""
    pytest.importorskip("safetensors", reason="pip install safetensors")
    hf, out = tmp_path / "hf", tmp_path / "out"
    finish(tmp_path / "first", export_hf=hf, n_head=4, n_kv_head=2, max_steps=1)
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    options = dict(init_from=hf, save_interval=1, lr=0.01, **sizes)
    expected = finish(tmp_path / "alone", n_ranks, mode=mode, **options)["param_sha256"]
    finish(out, n_ranks, mode=mode, max_steps=2, **options)
    hf.rename(tmp_path / "gone")
    finish(None, n_ranks, argv=["--resume=auto", f"--out_dir={out}", "--max_steps=3"])
    actual = finish(out, 2, mode="zero2", resume="auto", **options)
    assert actual["param_sha256"] == expected, "other bits"
    refused(f"{hf}", tmp_path / "anew", **options)


def memory_is_not_zero():
    """Plant memory that is nan until it is written."""
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("n_ranks, mode", [(1, "single"), (2, "zero3")])
def test_folders_have_the_rows_of_tokens(n_ranks, mode, tmp_path):
    """What --export_hf writes has a row for each token. What --init_from reads has more rows, which
    are 0, also where the model was on meta: the bits are those of the run that wrote."""
    safetensors = pytest.importorskip("safetensors", reason="pip install safetensors")
    hf = tmp_path / "hf"
    expected = finish(tmp_path / "out", n_ranks, mode=mode, export_hf=hf)["param_sha256"]
    assert json.loads((hf / "config.json").read_text())["vocab_size"] == 257
    with safetensors.safe_open(hf / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()
        embedding = file.get_tensor("model.embed_tokens.weight")
    assert embedding.shape == (257, 16) and embedding.isfinite().all()
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))  # those of the folder
    actual = finish(tmp_path / "next", n_ranks, mode=mode, init_from=hf, max_steps=1, lr=0,
                    min_lr=0, plant=memory_is_not_zero, **sizes)
    assert actual["param_sha256"] == expected, "other bits"

# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""--init_from, --export_hf: folders that transformers opens as LlamaForCausalLM, of config.json and
*.safetensors.

Replaces from_pretrained() and save_pretrained() for model.py's GPT. The package safetensors is
imported where it is used: nothing else here needs it.
"""

import dataclasses
import functools
import json
import os
import pathlib

import torch
import torch.distributed as dist

from model import GPTConfig
from runs import on_rank_0, say

# GPTConfig's names and Llama's.
LLAMA_SIZES = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_embd": "hidden_size",
               "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
               "n_hidden": "intermediate_size", "block_size": "max_position_embeddings",
               "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}
# What this model always has, and a Llama may have otherwise.
LLAMA_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False,
               "mlp_bias": False}
# A parameter of a block, and the parameters of Llama's that are its rows, from the first one on.
LLAMA_ROWS = {"attn_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",),
              "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
              "attn.proj": ("self_attn.o_proj",), "mlp.down": ("mlp.down_proj",),
              "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj")}
# Safetensors' names of formats whose numbers are the weights. Quantised ones have scales beside.
PLAIN_FORMATS = ("F64", "F32", "F16", "BF16")


def llama_views(config, tensors):
    """{our name: whole tensor} -> {Llama's name: its rows of ours}, sharing memory. Rows that no
    token uses are left out."""
    V = config.vocab_size
    views = {"model.embed_tokens.weight": tensors["wte.weight"][:V],
             "model.norm.weight": tensors["norm.weight"]}
    if not config.tied:
        views["lm_head.weight"] = tensors["lm_head.weight"][:V]
    kv = config.n_kv_head * config.head_size
    n_rows = {"attn.qkv": (config.n_embd, kv, kv), "mlp.gate_up": config.n_hidden}  # of each part
    for i in range(config.n_layer):
        for name, parts in LLAMA_ROWS.items():
            ours = tensors[f"blocks.{i}.{name}.weight"]
            for part, rows in zip(parts, ours.split(n_rows.get(name, len(ours)))):
                views[f"model.layers.{i}.{part}.weight"] = rows
    return views


def write_llama(folder, tensors, config, end_token):
    """Write {our name: whole tensor} as config.json and model.safetensors, the latter under another
    name until it is whole. Raises OSError."""
    from safetensors.torch import save_file

    unfinished = pathlib.Path(folder, ".unfinished.safetensors")
    save_file({name: rows.clone() for name, rows in llama_views(config, tensors).items()},
              unfinished, metadata={"format": "pt"})
    unfinished.replace(unfinished.with_name("model.safetensors"))
    llama = {theirs: getattr(config, ours) for ours, theirs in LLAMA_SIZES.items()} | LLAMA_FIXED
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    llama |= dict(architectures=["LlamaForCausalLM"], head_dim=config.head_size, dtype="float32",
                  rope_parameters=rope, rope_theta=config.rope_theta,  # of version 5, and before
                  bos_token_id=end_token, eos_token_id=end_token)
    pathlib.Path(folder, "config.json").write_text(json.dumps(llama, indent=1))


def sizes_of(config, record, vocab_size):
    """Options of GPTConfig: those of the checkpoint whose record this is, as the folder may be gone
    by then; or those of the folder --init_from. vocab_size: the tokenizer's."""
    if record is not None:
        fields = {field.name for field in dataclasses.fields(GPTConfig)}
        return {name: value for name, value in record["facts"].items() if name in fields}
    sizes = read_sizes(config)
    if sizes["vocab_size"] != vocab_size:
        say(f"--init_from {config.init_from} knows {sizes['vocab_size']} tokens, and the tokenizer "
            f"{vocab_size}: its weights are for other ones")
    return sizes


def read_sizes(config):
    """Options of GPTConfig from the config.json of --init_from. Refuses what this model cannot be.
    """
    folder = config.init_from
    if config.n_layer or config.n_head or config.n_kv_head or config.n_embd:
        raise SystemExit("--init_from has sizes of its own: only --block_size can be another")
    if not os.path.isdir(folder):
        raise SystemExit(f"--init_from {folder} is no folder of a Llama; to go on with a run of "
                         "this program: --resume auto")
    path = pathlib.Path(folder, "config.json")
    try:
        llama = {"tie_word_embeddings": False, "num_key_value_heads": None,
                 **json.loads(path.read_bytes())}
        rope = llama.get("rope_parameters") or llama.get("rope_scaling") or {}
        sizes = {ours: llama[theirs] for ours, theirs in LLAMA_SIZES.items()}
        sizes["rope_theta"] = rope.get("rope_theta", llama.get("rope_theta", 10000.0))
        fixed = dict(LLAMA_FIXED, rope_type="default",
                     head_dim=sizes["n_embd"] // max(1, sizes["n_head"]))
        given = {"rope_type": rope.get("type"), **llama, **rope}
        for name, value in fixed.items():
            if given.get(name) not in (None, value):
                raise ValueError(f"{name} is {given[name]}, but this model only has {value}")
    except (ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"{path}: {type(error).__name__}: {error}") from error
    return sizes


def files_of_weights(folder):
    """As transformers chooses them: model.safetensors, or those that the index names. Others may be
    of an earlier save."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = json.loads(index.read_text())["weight_map"].values()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SystemExit(f"{index}: {type(error).__name__}: {error}") from error
        return [folder / name for name in sorted(set(names))]
    paths = sorted(folder.glob("*.safetensors"))
    if len(paths) > 1:
        raise SystemExit(f"{folder} has {len(paths)} files *.safetensors, and no {index.name} that "
                         f"says which of them belong together")
    return paths


@torch.no_grad()
def read_llama_weights(model, folder):
    """Copy a folder's weights into all parameters of model that are not on meta; of the others only
    names and shapes are read. Refuses where one is missing, misshapen or quantised."""
    from safetensors import SafetensorError, safe_open

    files = {}  # Llama's name -> the open file that has it; tensors are read one by one
    for path in files_of_weights(pathlib.Path(folder)):
        try:
            file = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise SystemExit(f"{path} is damaged: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    for name, rows in llama_views(model.config, dict(model.named_parameters())).items():
        if name not in files:
            raise SystemExit(f"{folder}: {name} is missing in *.safetensors")
        stored = files[name].get_slice(name)
        number_format = stored.get_dtype()
        if number_format not in PLAIN_FORMATS:
            raise SystemExit(f"{folder}: {name} is {number_format} in *.safetensors, which may be "
                             f"quantised: save the weights as one of {', '.join(PLAIN_FORMATS)}")
        shape = stored.get_shape()
        if shape != list(rows.shape):
            raise SystemExit(f"{folder}: {name} is {shape} in *.safetensors, not {[*rows.shape]}")
        if not rows.is_meta:
            rows.copy_(files[name].get_tensor(name))
    for p in (model.wte.weight, model.lm_head.weight):
        if not p.is_meta:
            p[model.config.vocab_size:] = 0


def begin_with(gpt, folder):
    """Give gpt the weights of a folder. What is on meta is only compared: ZeRO's wrapper calls
    init_weights() later, and takes what rank 0 has then."""
    read = functools.partial(read_llama_weights, gpt, folder)
    read()
    gpt.init_weights = read if dist.get_rank() == 0 else lambda: None


def export(model, config, folder, end_token):
    """Write the whole model, of this GPTConfig, to a folder. A collective; only rank 0 ever holds
    all of it, and on the CPU."""
    whole = {}
    for name, p in model.full_parameters():
        if dist.get_rank() == 0:
            whole[name] = p.to("cpu", copy=True)
    on_rank_0(write_llama, folder, whole, config, end_token)

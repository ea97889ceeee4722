"""Command lines: a flag for each field of train.py's Config, and what values are possible.

Replaces argparse's own messages by one line that says what to type instead, and takes from a
checkpoint what the command line leaves out.
"""

import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import json
import os
import pathlib
import re

import torch
import torch.distributed as dist

from model import PRESETS
from checkpoint import newest_first, read_record, RECORD, SUMS
from data import accumulation_steps
from extras.ranks import count, refuse

STAGES = ("zero1", "zero2", "zero3")
FSDP = ("torch-fsdp", "torch-fsdp-kept")  # kept: parameters stay whole after the forward
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size")
# For muon: the mode of ours that does what this one does.
COUNTERPARTS = {"torch-zero1": "zero1", "torch-fsdp-kept": "zero2", "torch-fsdp": "zero3"}


@dataclasses.dataclass
class Limit:
    """What a flag can be, beside its type: one of `choices`, or a number of this range. Where the
    flag `other` is none of `values`, this one does nothing, and is refused."""
    choices: tuple | None = None
    least: float = 0
    most: float = 1e18
    other: str | None = None
    values: tuple = ()


ABOVE_0 = 1e-9
LIMITS = {
    "mode": Limit(("single", "naive", "ddp", *STAGES, "torch-ddp", "torch-zero1", *FSDP)),
    "max_steps": Limit(least=1, most=99_999_999),  # a checkpoint's name has eight digits
    "threads": Limit(least=1, most=1024),
    "timeout_s": Limit(least=ABOVE_0, most=1e6),
    "keep_last": Limit(least=1),
    "model": Limit(tuple(PRESETS)),
    "n_layer": Limit(least=1),
    "n_head": Limit(least=1),
    "n_kv_head": Limit(least=1),
    "n_embd": Limit(least=1),
    "block_size": Limit(least=1),
    "global_batch_size": Limit(least=1),
    "micro_batch_size": Limit(least=1),
    "memory_limit_gb": Limit(other="micro_batch_size", values=("auto",)),
    "dtype": Limit(tuple(DTYPES)),
    "param_dtype": Limit(tuple(DTYPES), other="mode", values=STAGES),
    "reduce_dtype": Limit(tuple(DTYPES), other="mode", values=STAGES),
    "bucket_cap_mb": Limit(least=ABOVE_0, most=1e6),
    "comm_hook": Limit(("bf16", "powersgd", "topk", "hierarchical"), other="mode", values=("ddp",)),
    "topk_ratio": Limit(least=ABOVE_0, most=1, other="comm_hook", values=("topk",)),
    "node_size": Limit(least=1, other="comm_hook", values=("hierarchical",)),
    "shard_size": Limit(least=1, other="mode", values=STAGES),
    "offload": Limit(other="mode", values=STAGES),
    "optimizer": Limit(("adamw", "muon")),
    "beta1": Limit(most=0.99999),
    "beta2": Limit(most=0.99999),
}
NEEDS_PACKAGE = {"tensorboard": "tensorboard", "wandb": "wandb", "init_from": "safetensors",
                 "export_hf": "safetensors"}
# Flags that a run which resumes does not take from its checkpoint; and those that an evaluation
# does not take either, as it may be on another machine and on fewer ranks.
OF_ONE_START = {"out_dir", "resume", "eval_only", "prompt", "trace", "profile", "export_hf"}
NOT_TO_EVALUATE = {"device", "compile", "comm_hook", "shard_size", "tensorboard", "wandb"}
# Flags of nanoGPT whose names have nothing in common with ours.
OF_NANOGPT = {"learning_rate": ["lr"], "gradient_accumulation_steps": ["global_batch_size"],
              "start": ["prompt"]}


def int_or_auto(text):
    return text if text == "auto" else int(text)


def make_parser(Config, text):
    """A parser with a flag for each field of Config, in groups, with the comments as help. What it
    returns has the flags that are given, and no others."""
    title, commands, *_, debugging = text.split("\n\n")
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=f"{title}\n\n{commands}",
                                     epilog=debugging, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: refuse(f"{message} (--help lists the flags)")
    options = {option.name: option for option in dataclasses.fields(Config)}
    for line in inspect.getsource(Config).splitlines():
        heading = re.fullmatch(r"    # (.*)", line)
        field = re.fullmatch(r"    (\w+): .*?# (.*)", line)
        if heading:
            group = parser.add_argument_group(heading[1])
        if field:
            add_flag(group, options[field[1]], field[2])
    return parser


def add_flag(group, option, text):
    """Add the flag of a field of Config, with this text and the default as help."""
    if option.type is bool:
        group.add_argument(f"--{option.name}", action=argparse.BooleanOptionalAction, help=text)
        return
    kinds = getattr(option.type, "__args__", (option.type,))  # int | None -> (int, NoneType)
    kind = int_or_auto if kinds == (int, str) else kinds[0]
    limit = LIMITS.get(option.name)
    if limit is not None and limit.choices is not None:
        text += f": {', '.join(limit.choices)}"
    if option.default is not None:
        text += " [" + json.dumps(option.default).strip('"') + "]"
    group.add_argument(f"--{option.name}", type=kind, metavar=kind.__name__, help=text)


def parse_args(Config, text, argv):
    """Flags -> Config. What is not given is as in the checkpoint that --resume names, or else the
    default. Without a process group yet, a mistake ends the process here.
    """
    parser = make_parser(Config, text)
    refuse_values_of_switches(Config, argv)
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    unknown_flags = [word for word in unknown if word.startswith("--")]
    if unknown_flags:
        parser.error("; ".join(explain_unknown(Config, word) for word in unknown_flags))
    if unknown:
        parser.error(f"{unknown[0]} is no flag, and there are no configuration files")
    saved = flags_of_checkpoint(Config, given)
    config = Config(**(saved | given))
    if config.mode is None:
        config.mode = "ddp" if "RANK" in os.environ else "single"
    for name, limit in LIMITS.items():
        if name not in given and is_of_no_use(config, limit):
            setattr(config, name, getattr(Config, name))  # saved, but of no use any more
    for name, value in vars(config).items():
        check_value(parser, name, value)
    return config


def explain_unknown(Config, word):
    """What to say of a flag that there is not."""
    name = word.partition("=")[0].removeprefix("--")
    similar = OF_NANOGPT.get(name)
    if similar is None:
        similar = difflib.get_close_matches(name, vars(Config()), cutoff=0.65)
    hint = did_you_mean([f"--{flag}" for flag in similar])
    return f"there is no flag {word}{hint}"


def refuse_values_of_switches(Config, argv):
    """`--compile=False` is how nanoGPT says it."""
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if equals and isinstance(getattr(Config, name, None), bool):
            is_off = value.lower() in ("false", "no", "off", "0")
            refuse(f"{word}: did you mean --{'no-' if is_off else ''}{name}?")


def did_you_mean(words):
    return f": did you mean {' or '.join(words[:2])}?" if words else ""


def is_of_no_use(config, limit):
    """Whether a flag does nothing, because of another one."""
    return limit.other is not None and getattr(config, limit.other) not in limit.values


def check_value(parser, name, value):
    """End the process if a flag cannot have this value, whatever the others are."""
    limit = LIMITS.get(name, Limit())
    if limit.choices is not None and value is not None and value not in limit.choices:
        similar = difflib.get_close_matches(value, limit.choices, cutoff=0.5)
        hint = did_you_mean([f"--{name} {word}" for word in similar])
        parser.error(f"--{name} {value} is none of {', '.join(limit.choices)}{hint}")
    is_number = isinstance(value, int | float)
    if is_number and not limit.least <= value <= limit.most:  # nan is in no range
        parser.error(f"--{name} {value} is out of range")


def flags_of_checkpoint(Config, given):
    """{name: value} of the flags that the run had from which this one goes on; {} without. Where a
    checkpoint is damaged the one before will do: `newest_sound` says so."""
    if "resume" not in given:
        return {}
    folder = None
    out_dir = pathlib.Path(given.get("out_dir", Config.out_dir))
    if given["resume"] != "auto":
        folder = pathlib.Path(given["resume"])
        out_dir = pathlib.Path(given.get("out_dir", folder.resolve().parent))
    # A run that torchrun has started again goes on from its own newest checkpoint. By then it may
    # have removed the one of --resume.
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    folders = []
    if folder is None or is_restart:
        folders += newest_first(out_dir)
    if folder is not None:
        folders.append(folder)
    if folders == [folder] and not (folder / RECORD).exists() and not (folder / SUMS).exists():
        others = newest_first(folder) or newest_first(folder.parent)
        hint = did_you_mean([str(other) for other in others])
        refuse(f"--resume {folder} is no checkpoint{hint}")
    record = None
    for candidate in folders:
        record = read_record(candidate)
        if record is not None:
            break
    if record is None:
        return {}
    saved = {}
    for name, value in record["config"].items():
        if hasattr(Config, name) and name not in OF_ONE_START:  # an older version had other flags
            saved[name] = value
    if "eval_in" not in record and "eval_steps" in saved:
        saved["eval_steps"] *= saved["micro_batch_size"]  # they were micro batches, now sequences
    if saved.get("mode") == "single":
        del saved["mode"]  # single is the default without torchrun, and impossible under it
    if given.get("eval_only"):
        for name in NOT_TO_EVALUATE:
            saved.pop(name, None)
        for name in ("eval_steps", "sample_tokens"):
            if saved.get(name) == 0:
                del saved[name]  # what the run did without is what is asked for now
    saved["out_dir"] = str(out_dir)
    return saved


def check(config, device):
    """Raise ValueError on flags that contradict each other, or that this machine cannot serve. What
    a single flag can be is in LIMITS; sizes of the model are GPTConfig's to refuse. Make the
    folders that flags name."""
    W = dist.get_world_size()
    if config.mode == "single" and W > 1:
        raise ValueError(f"--mode single is one process, but torchrun started {W}")
    for name, limit in LIMITS.items():
        is_given = getattr(config, name) != getattr(type(config), name)
        if is_given and is_of_no_use(config, limit):
            raise ValueError(f"--{name} needs --{limit.other} {' or '.join(limit.values)}")
    for name in ("shard_size", "node_size"):
        n_ranks = getattr(config, name)
        if n_ranks is not None and W % n_ranks:
            raise ValueError(f"--{name} {n_ranks} does not divide {count(W, 'rank')}")
    if config.optimizer == "muon" and config.mode in COUNTERPARTS:
        raise ValueError(f"--optimizer muon does not work with --mode {config.mode}: choose "
                         f"--mode {COUNTERPARTS[config.mode]}, which does the same")
    if config.dtype == "fp16" and config.comm_hook in ("powersgd", "topk"):
        raise ValueError(f"--dtype fp16 and --comm_hook {config.comm_hook}: choose bf16")
    if config.init_from and not os.path.isdir(config.init_from):
        raise ValueError(f"--init_from {config.init_from} is no folder of a Llama; to go on with a "
                         "run of this program: --resume auto")
    if config.init_from and any(getattr(config, name) for name in SIZES[:-1]):
        raise ValueError("--init_from has sizes of its own: only --block_size can be another")
    if config.min_lr is not None and config.min_lr > config.lr:
        raise ValueError(f"--min_lr {config.min_lr} is above --lr {config.lr}")
    if config.trace and config.profile:
        raise ValueError("--trace cannot run beside --profile")
    if config.eval_only and (config.trace or config.profile):
        raise ValueError("--trace and --profile are for steps, and --eval_only makes none")
    if config.eval_only:
        if config.resume is None and config.init_from is None:
            raise ValueError("--eval_only needs --resume, such as --resume out/best")
    else:
        accumulation_steps(config)
    for name, package in NEEDS_PACKAGE.items():
        if getattr(config, name) and not importlib.util.find_spec(package):
            raise ValueError(f"--{name} needs a package: pip install {package}")
    if config.compile:
        check_compiler(device)
    if not config.eval_only:
        make_folder("out_dir", config.out_dir)
    if config.export_hf:
        make_folder("export_hf", config.export_hf)


def check_compiler(device):
    """Raise ValueError where torch.compile lacks what it needs on a CPU. (In the first step this
    would be a traceback. The function is private, but asks what torch itself will ask.)"""
    from torch._inductor import cpp_builder

    if device.type == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except RuntimeError as error:
            raise ValueError("--compile needs a C++ compiler: install g++ or clang, or set CXX to "
                             "the one that you have") from error


def make_folder(flag, path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--{flag} {path!r}: {error.strerror}") from error

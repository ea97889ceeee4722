"""The words after ./bench.sh -> what was asked for, checked before anything starts."""

import argparse
import contextlib
import importlib.util
import math
import os
import pathlib
import re

import runs
import train
from bench import fit, predict
from bench.launch import from_rate, refuse, ROOT, Run
from bench.tables import DEEPSPEEDS, TABLES
from model import PRESETS
from oracle import kinds_of_devices

PRICED = ("modes", "scaling", "links", "cost", "predict")  # their rows have a throughput
SETS_ITSELF = ("mode", "global_batch_size", "out_dir", "resume", "eval_only")
# Options that only some tables have.
OF_SOME = ("--modes", "--price", "--until_loss", "--svg", "--rounds", "--nnodes", "--node_rank",
           "--master_addr", "--master_port", "--sizes", "--repeats", "--budget_mb", "--result",
           "--step_ms", "--node_size", "--rtol", "--atol")
MOST = 100_000
OTHERS = ("collectives", "overhead", "fit", "predict", "compare")  # than tables of train.py's runs


def usage():
    """The comment at the head of bench.sh."""
    lines = (ROOT / "bench.sh").read_text().splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[1:]
                     if line.startswith("#"))


# -------------------------------------------------------------------------------------------------
# words


def number(text):
    """For argparse, which adds the option's name."""
    value = number_from_0(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def number_from_0(text):
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")


def whole_number(text):
    value = number(text)
    if not value.is_integer() or value > MOST:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {MOST}")
    return int(value)


def whole_numbers(text):
    return sorted({whole_number(word) for word in text.split(",")})


def sizes(text):
    """Of bytes; 1 kB is 1024 of them."""
    values = []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(B|kB|MB)", word)
        if match is None:
            raise argparse.ArgumentTypeError(f"{word} is not a size such as 64kB or 4MB")
        values.append(int(match[1]) * {"B": 1, "kB": 2**10, "MB": 2**20}[match[2]])
    return values


def words_of(text):
    return [word.strip() for word in text.split(",")]


# -------------------------------------------------------------------------------------------------
# options


def make_parser(name):
    """Of the options of a table."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.error = refuse
    parser.set_defaults(modes=None, price=None, svg=None, until_loss=None, nnodes=1, node_rank=0,
                        master_port=29477)
    add = parser.add_argument
    add("--json", action="store_true")
    if name == "compare":
        add("out_dirs", nargs=2, metavar="OUT_DIR")
        add("--rtol", type=number_from_0, default=0.0)
        add("--atol", type=number_from_0, default=0.0)
        return parser
    add("--worlds", type=whole_numbers)
    if name == "collectives":
        add("--sizes", type=sizes, default=sizes("1kB,64kB,1MB,16MB,256MB"))
        add("--repeats", type=whole_number, default=9)
    if name == "fit":
        add("--budget_mb", type=number, default=192.0)
    if name in (*TABLES, "fit", "predict"):
        add("--modes", type=words_of)
    if name in PRICED:
        add("--price", type=number)
    if name == "fit" or (name in TABLES and TABLES[name].picture is not None):
        add("--svg")
    if name in TABLES:
        add("--rounds", type=whole_number)
        add("--micro_batch_size", type=whole_number)
        add("--nnodes", type=whole_number)
        add("--node_rank", type=int)
        add("--master_addr")
        add("--master_port", type=whole_number)
    if name in PRICED and name != "predict":
        add("--until_loss", type=number)
    if name == "predict":
        add("--step_ms", type=number)
        add("--result", type=pathlib.Path)
        add("--model", choices=PRESETS)
        add("--vocab_size", type=whole_number, default=50257)
        add("--tokens", type=whole_number)
        add("--micro_steps", type=whole_number, default=1)
        add("--param_bytes", type=whole_number, default=4)
        add("--reduce_bytes", type=whole_number)
        add("--bucket_cap_mb", type=number, default=25.0)
        add("--node_size", type=whole_number, default=8)
        add("--intra", type=number, default=450.0)
        add("--inter", type=number, default=50.0)
        add("--latency_us", type=number_from_0, default=20.0)
    return parser


def read_options(name, words):
    """-> what was asked for; `rates` of a cable, and `flags` of train.py, which looks at them."""
    options, others = make_parser(name).parse_known_args(words)
    if name in ("compare", "predict"):
        if others:
            refuse(f"{name} has no {others[0]}: see ./bench.sh --help")
        check_modes(name, options, predict.MODES)
        return options
    options.rates = [word for word in others if re.fullmatch(r"\d\S*bit", word, re.IGNORECASE)]
    options.flags = [word for word in others if word not in options.rates]
    if options.rates and name not in ("links", "buckets"):
        refuse(f"{name} has no cable: without {options.rates[0]}")
    check_flags(name, options.flags)
    if name == "fit":
        check_modes(name, options, train.MODES)
    if name in TABLES:
        check_hosts(options)
        for row in options.modes or []:
            check_row(row)
    if options.svg is not None:
        check_svg(options.svg)
    return options


def check_modes(name, options, known):
    for mode in options.modes or []:
        if mode not in known:
            refuse(f"--modes {mode}: {name} has {' '.join(known)}")


def check_flags(name, flags):
    """What train.py would refuse, and what a table does not have."""
    for word in flags:
        if word.partition("=")[0] in OF_SOME:
            refuse(f"{name} has no {word}: see ./bench.sh --help")
    given = runs.read_flags(train.Config, "", flags)  # ends with status 2 and a line
    kind = given.get("device") or "cpu"
    if kind not in kinds_of_devices():
        refuse(f"--device {kind} is not on this machine: choose {' or '.join(kinds_of_devices())}")
    for flag in given:
        if name == "overhead" or (name == "collectives" and flag != "device"):
            refuse(f"{name} has no --{flag}: see ./bench.sh --help")
        if flag in SETS_ITSELF or (name == "fit" and flag in ("n_layer", "micro_batch_size")):
            refuse(f"{name} sets --{flag} itself")


def check_row(row):
    mode, *flags = row.split()
    known = (*train.MODES, *DEEPSPEEDS)
    if mode not in known:
        refuse(f"--modes {row}: choose among {' '.join(known)}")
    check_flags(f"a row, {row},", flags)


def check_hosts(options):
    for rate in options.rates:
        if not re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", rate) or from_rate(rate) == 0:
            refuse(f"{rate}: choose a rate such as 1gbit or 100mbit")
    if options.rates and options.nnodes > 1:
        refuse("a cable stands for two hosts: without --nnodes")
    if options.nnodes > 1 and options.master_addr is None:
        refuse("--nnodes needs --master_addr, of the host whose --node_rank is 0")
    if not 0 <= options.node_rank < options.nnodes:
        refuse(f"--node_rank {options.node_rank}: choose 0 to {options.nnodes - 1}, of --nnodes")


def check_svg(path):
    """Before a table takes its time."""
    if importlib.util.find_spec("matplotlib") is None:
        refuse("--svg draws with a package: pip install matplotlib")
    if not os.access(pathlib.Path(path).absolute().parent, os.W_OK):
        refuse(f"--svg {path}: its folder cannot be written to")


def planned_runs(name, options):
    """-> [Run] of a table. Refuses what cannot run, before there is a folder."""
    if name == "fit":
        fit.check_worlds(options)
        return []
    if name in TABLES:
        planned = list(TABLES[name].runs(options))
    else:
        words = ()
        if name == "collectives":
            sizes_in_bytes = ",".join(map(str, options.sizes))
            words = ("--sizes", sizes_in_bytes, "--repeats", str(options.repeats), "--device",
                     "cpu", *options.flags)
        planned = []
        for W in options.worlds or ((2, 4) if name == "collectives" else (1, 2)):
            planned.append(Run(name, W, words, program=f"bench/{name}.py"))
    if not planned:
        refuse(f"{name}: no row can run at these --worlds with these --modes")
    for run in planned:
        n_hosts = 2 if run.rate else options.nnodes
        if run.W > 1 and run.W % n_hosts > 0:
            refuse(f"{run.name}: {run.W} ranks do not divide among {n_hosts} hosts")
    return planned

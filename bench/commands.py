"""The commands of bench.sh, as data. `Command` says what one consists of, COMMANDS has them all.

A row is a mode of train.py, and flags of its own. A label is what rows are tried under: such as the
rate of a link, or weak and strong scaling.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Callable

DEEPSPEEDS = ("deepspeed1", "deepspeed2", "deepspeed3")
STAGES = ("zero1", "zero2", "zero3")

# What takes time beside steps is off.
ONLY_STEPS = ("--eval_steps", "0", "--sample_tokens", "0", "--save_interval", "0",
              "--check_interval", "0", "--device", "cpu")
# Sizes at which communication weighs as much as computing: 31.8M parameters, 64 tokens a rank.
SMALL = ("--n_layer", "10", "--n_head", "8", "--n_embd", "512", "--block_size", "64",
         "--max_steps", "8")
HIERARCHICAL = "ddp --comm_hook hierarchical --node_size 2"
MIXED = "--param_dtype bf16 --reduce_dtype fp32"


# -------------------------------------------------------------------------------------------------
# what differs by label, row and W


def one_per_rank(label, W):
    """Micro batches of a step, over all ranks."""
    return W


def same_for_strong(label, W):
    return 4 if label == "strong" else W


def single_is_one_rank(label, row, W):
    """Whether a row has a place at W, under whatever label."""
    return W == 1 or not row.startswith("single")


def everywhere(label, row, W):
    """Every row has: scaling compares with W processes of `single` that know nothing of each other.
    """
    return True


def on_two_hosts(label, row, W):
    """The hierarchical hook needs two ranks on each host. DDP is beside it there, too."""
    if W == 4:
        return row in ("ddp", HIERARCHICAL)
    return W == 2 and row != HIERARCHICAL and single_is_one_rank(label, row, W)


def on_hosts_or_one(label, row, W):
    """Over a link each of two hosts has half of the ranks."""
    fits = label == "loopback" or W % 2 == 0
    return fits and single_is_one_rank(label, row, W)


def one_process_or_ranks(label, row, W):
    """Every mode at one place: `single` alone, the others on several ranks. Only stages have MIXED.
    """
    is_single = row.startswith("single")
    has_flags = MIXED not in row or row.startswith("zero")
    return has_flags and is_single == (W == 1)


def no_more(label):
    """Flags of a label, before those that were asked for."""
    return ()


# -------------------------------------------------------------------------------------------------
# commands


@dataclasses.dataclass
class Command:
    title: str  # what its tables have
    takes: str  # how long, on two cores
    example: str = ""  # words after its name
    rows: tuple = ()
    variants: tuple = ("",)  # flags: each row runs with each of them
    labels: tuple = ("",)
    worlds: tuple = (1, 2, 4)
    rounds: int = 3  # in each of which every row runs once
    micro_batch_size: int = 1
    flags: tuple = ()
    batch_size: Callable = one_per_rank
    belongs: Callable = single_is_one_rank
    label_flags: Callable = no_more
    # What rates of a link do to labels: "added"; "instead", of one rate; "": it has no link.
    rates: str = ""
    refuses: tuple = ()  # (an option that it does not have, why)
    packages: tuple = ()
    draws: bool = False  # at its end; other pictures are made by bench/pictures.py alone
    program: str = "bench/counted.py"  # what stands in train.py's place
    own_tables: bool = False  # the program prints them, and gets all flags
    once_per_W: bool = False  # such a program runs under torchrun, for each W
    note: str = ""  # above the tables
    adapt: Callable | None = None  # command, what `bench.ask` knows of the machine -> Command


def with_deepspeed(command, machine):
    if importlib.util.find_spec("deepspeed") is None:
        return command
    return dataclasses.replace(command, rows=(*command.rows, *DEEPSPEEDS))


# -------------------------------------------------------------------------------------------------
# gpu: sizes, labels and worlds are those that the devices allow


@dataclasses.dataclass
class OnDevices:
    n: int
    size: str  # of the model

    def batch_size(self, label, W):
        """hashes: the same for every W, so that all end on one hash."""
        most = 3 if self.n == 1 else self.n
        return math.lcm(*range(1, most + 1)) if label == "hashes" else W

    def belongs(self, label, row, W):
        if label == "hashes":
            return "--" not in row and single_is_one_rank(label, row, W)
        if "--profile" in row and W == 1:
            return False  # one rank sends nothing that could be hidden
        return W <= self.n and single_is_one_rank(label, row, W)

    def label_flags(self, label):
        # Over sockets GPT-2's gradients take seconds, and hashes need no size.
        if label == "hashes":
            return ("--model", "tiny", "--max_steps", "6")
        return ("--model", self.size, "--max_steps", "12")


def on_devices(command, machine):
    n = machine["n_devices"]
    is_small = machine["gigabytes"] < 16  # as simulated devices are
    devices = OnDevices(n, "tiny" if is_small else "gpt2")
    can_share = "nccl" in machine["backend"]
    compiled = "--no-compile" if is_small else "--compile"
    rows = list(command.rows)
    for mode in ("single", "torch-ddp", "ddp", "zero1", "zero2", "torch-fsdp", "zero3"):
        rows.append(f"{mode} --dtype bf16 {compiled}")
    for mode in ("ddp", "zero2", "zero3"):
        rows.append(f"{mode} --profile 4")
    worlds = tuple(range(1, n + 1))
    labels = ("hashes", "times")
    if n == 1:
        worlds = (1, 2, 3) if can_share else (1,)
    note = ""
    if n == 1 and not can_share:
        labels = ("times",)
        note = (f"W = 1 only: ranks can share a device over NCCL, and {machine['kind']} has "
                f"{machine['backend']}.")
    return dataclasses.replace(
        command, rows=tuple(rows), note=note, worlds=worlds, labels=labels,
        micro_batch_size=2 if is_small else 8, flags=(*command.flags, "--device", machine["kind"]),
        batch_size=devices.batch_size, belongs=devices.belongs, label_flags=devices.label_flags)


# -------------------------------------------------------------------------------------------------

COMMANDS = {
    "bits": Command(
        "the param_sha256 of every mode at 1, 2, 3, 4, 6 and 12 ranks", "10 minutes",
        rows=("single", "naive", "ddp", *STAGES, "torch-ddp", "torch-fsdp"),
        labels=("12 micro batches",), worlds=(1, 2, 3, 4, 6, 12), rounds=1,
        flags=("--max_steps", "20"),
        batch_size=lambda label, W: 12,
    ),
    "modes": Command(
        "time and memory of every mode, of torch's and of DeepSpeed's", "30 minutes",
        rows=("single", "naive", "torch-ddp", "ddp", "torch-zero1", "zero1", "torch-fsdp-kept",
              "zero2", "torch-fsdp", "zero3"),
        flags=SMALL,
        adapt=with_deepspeed,
    ),
    "muon": Command(  # it multiplies in bf16, which takes most CPUs long: hence the tiny model
        "the same of Muon beside AdamW, on a small model", "10 minutes",
        rows=("single", "torch-ddp", "ddp", *STAGES),
        variants=("", "--optimizer muon"),
        flags=("--block_size", "64", "--max_steps", "8"),
    ),
    "memory": Command(
        "parameters, gradients and optimizer state of a rank of four, or of --worlds; draws "
        "(matplotlib)", "5 minutes",
        rows=("ddp", *STAGES), worlds=(4,), rounds=1,
        flags=(*SMALL, "--max_steps", "4", "--profile", "1"),
        refuses=(("modes", "memory draws all stages"),),
        packages=("matplotlib",), draws=True, program="bench/timeline.py",
    ),
    "scaling": Command(  # 1024 tokens a rank: bound by computing
        "weak and strong scaling", "20 minutes",
        rows=("single", "naive", "ddp", "zero3"),
        labels=("weak", "strong"), rounds=2, micro_batch_size=4,
        flags=("--n_layer", "6", "--n_head", "6", "--n_embd", "384", "--block_size", "256",
               "--max_steps", "8"),
        batch_size=same_for_strong, belongs=everywhere,
    ),
    "link": Command(
        "two hosts with a slow link between them (Linux, root, iproute2)", "5 minutes", "1gbit",
        rows=("torch-ddp", "ddp", "ddp --comm_hook bf16",
              "ddp --comm_hook powersgd --warmup_steps 0",
              "ddp --comm_hook topk --warmup_steps 0", HIERARCHICAL, "zero1", "zero2",
              "torch-fsdp", "zero3"),
        labels=(), worlds=(2, 4), rounds=2, micro_batch_size=4,
        flags=SMALL,
        belongs=on_two_hosts,
        rates="added", refuses=(("worlds", "link has two hosts, of one rank, or of two"),),
    ),
    "buckets": Command(
        "time of a step over the size of buckets; with a rate over such a link, too", "20 minutes",
        "1gbit",
        rows=("ddp", *STAGES, "torch-ddp"),
        variants=("--bucket_cap_mb 1", "--bucket_cap_mb 4", "--bucket_cap_mb 25",
                  "--bucket_cap_mb 100"),
        labels=("loopback",), worlds=(2,),
        flags=SMALL,
        belongs=on_hosts_or_one, rates="added",
    ),
    "precision": Command(  # most CPUs take long for 16 bits: hence a model that is smaller still
        "losses in fp32, bf16 and fp16, and the steps that fp16 skips", "10 minutes",
        rows=("single", "ddp", "zero3", "torch-ddp"),
        variants=("--dtype fp32", "--dtype bf16", "--dtype fp16", MIXED),
        worlds=(1, 2), rounds=1, micro_batch_size=4,
        flags=("--n_layer", "2", "--n_head", "2", "--n_embd", "64", "--block_size", "64",
               "--max_steps", "300", "--eval_steps", "80"),
        batch_size=lambda label, W: 4,
        belongs=one_process_or_ranks,
    ),
    "overhead": Command(
        "what each wrapper adds to a step, in kernels, calls, CPU time", "2 minutes",
        worlds=(1, 2), program="bench/overhead.py", own_tables=True, once_per_W=True,
    ),
    "collectives": Command(
        "how fast each collective is, beside torch's own and beside what the link allows",
        "some minutes",
        worlds=(2, 4), program="bench/collectives.py", own_tables=True, once_per_W=True,
    ),
    "fit": Command(
        "the largest model that each mode trains in the same memory", "15 minutes",
        program="bench/fit.py", own_tables=True,
    ),
    "compare": Command(
        "two runs of train.py: where they begin to differ, and by how much", "seconds",
        "out/a out/b",
        program="bench/compare.py", own_tables=True,
    ),
    "gpu": Command(
        "all that an accelerator has to show, equal bits, speed, overlap, CPU time",
        "some minutes on two simulated devices",
        rows=("single", "naive", "torch-ddp", "ddp", "zero1", "zero2", "torch-fsdp", "zero3"),
        rounds=1,
        adapt=on_devices,
    ),
    "timeline": Command(  # computing takes about as long as communicating
        "pictures of a step in time, over such a link; without a rate over loopback (matplotlib)",
        "5 minutes", "1gbit",
        rows=("ddp", "zero1", "zero3"), worlds=(2,), rounds=1,
        flags=("--n_embd", "256", "--max_steps", "4", "--profile", "1", "--bucket_cap_mb", "3.5"),
        rates="instead", refuses=(("worlds", "timeline has two ranks"),),
        packages=("matplotlib",), draws=True, program="bench/timeline.py",
    ),
}

"""The same memory for each rank: which is the largest model that each mode trains in it?

    ./bench.sh fit                                  all modes, on 1, 2 and 4 ranks
    ./bench.sh fit --budget_mb 400 --n_embd 512     another budget; other flags of train.py

For each mode and number of ranks W it looks for the largest number of layers with which train.py
makes three steps, in micro batches of one sequence. A trial is a run of train.py of its own: memory
that one trial has not given back cannot count in the next. With one rank there is `single` alone,
since all modes would hold the same.

The limit is real. Each rank sets it before its model is built, to the memory that it has by then
plus --budget_mb, so the budget is for parameters, gradients, optimizer state, activations and
messages. On a CPU the limit is the kernel's RLIMIT_DATA, which counts what a process may write and
shares with nobody, whether it has been touched or not. (RLIMIT_AS also counts the text of
libraries, mapped files, and 64 MB of addresses for each thread that allocates.) On an accelerator
the limit is a share of its memory, which torch's allocator keeps.

A run that fails is too large only if some rank says that memory is out. Any other failure ends the
search, with its reason.
"""

import pathlib
import re
import resource
import sys

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench.launch import FIT, refuse, Run
from bench.tables import Picture

MODES = ("single", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-fsdp")
FLAGS = ("--n_embd", "256", "--n_head", "8", "--block_size", "64", "--max_steps", "3",
         "--save_interval", "0", "--eval_steps", "0", "--sample_tokens", "0",
         "--check_interval", "0", "--timeout_s", "60", "--device", "cpu")
FIRST_GUESS = 8  # layers
# What a rank says whose memory is out: train.py; C++, where no tensor was to be made; the kernel;
# Rust, of which tiktoken is.
OUT_OF_MEMORY = ("out of memory", "std::bad_alloc", "MemoryError", "Cannot allocate memory",
                 "memory allocation of")
COLUMNS = ("mode", "W", "largest model, M", "layers", "tokens/s", "bytes of the budget a parameter")
PICTURE = Picture(("largest model, M",), "W")


class Stop(Exception):
    """A trial has failed for a reason other than memory."""


def largest(fits, guess: int) -> int:
    """-> the largest n, 1 or more, for which fits(n) is true; 0 if there is none.

    fits is true up to some n, and false above. Steps that grow lead from the guess to a pair of
    which one fits and the other does not; then halves do.
    """
    low, high = 0, None  # low fits, or is 0; high does not, or is not known
    n, step = guess, max(1, guess // 8)
    while high is None or high - low > 1:
        if fits(n):
            low = n
        else:
            high = n
        if high is None:
            n, step = low + step, 2 * step
        elif low == 0:
            n, step = max(1, high - step), 2 * step
        else:
            n = (low + high) // 2
    return low


def result_of_trial(run: Run, results: list, log: str) -> dict | None:
    """-> RESULT of a run that has ended, None if memory was out. Raises Stop where it has failed
    for something else."""
    if "failed" not in results[0]:
        return results[0]
    if any(words in log for words in OUT_OF_MEMORY):
        return None
    raise Stop(f"{run.name} failed, and not for memory: {results[0]['failed']}")


def cells(options):
    """-> [(W, mode)]."""
    made = []
    for W in options.worlds or (1, 2, 4):
        for mode in options.modes or MODES:
            if (mode == "single") == (W == 1):
                made.append((W, mode))
    return made


def check_worlds(options):
    if not cells(options):
        refuse("fit: no row can run at these --worlds with these --modes: single is for one rank, "
               "and the others are for more")


def search(options, bench):
    """Yield a row of the table for each mode and W."""
    guess = FIRST_GUESS
    for W, mode in cells(options):
        trained = {}  # layers -> RESULT

        def fits(n_layer):
            words = (str(options.budget_mb), *FLAGS, *options.flags, "--mode", mode,
                     "--n_layer", str(n_layer), "--micro_batch_size", "1",
                     "--global_batch_size", str(W))
            run = Run(mode, W, words, f"{n_layer} layers", program=FIT)
            result = result_of_trial(run, *bench.launch(run))
            if result is not None:
                trained[n_layer] = result
            return result is not None

        layers = largest(fits, guess)
        row = {"row": mode, "mode": mode, "W": W, "layers": layers}
        if layers > 0:
            guess = layers
            n = sum(trained[layers]["unit_sizes"])
            row |= {"largest model, M": n / 1e6, "tokens/s": trained[layers]["tokens_per_sec"],
                    "bytes of the budget a parameter": options.budget_mb * 1e6 / n}
        yield row


# -------------------------------------------------------------------------------------------------
# a rank


def limit_memory(budget_bytes: int, kind: str) -> None:
    """Let this rank have so much memory beside what it has now."""
    if kind == "cpu":
        status = pathlib.Path("/proc/self/status").read_text()
        before = 1024 * int(re.search(r"VmData:\s+(\d+) kB", status)[1])
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (before + budget_bytes, most))
        return
    import torch

    before = torch.accelerator.memory_reserved()
    _, whole = torch.accelerator.get_memory_info()
    share = min(1.0, (before + budget_bytes) / whole)
    torch.get_device_module(kind).set_per_process_memory_fraction(share)


def main():
    """A rank: BUDGET_MB, then flags of train.py, which bench/counted.py takes."""
    import extras.torchs  # noqa: F401  imported later, it would count as part of the model
    import train
    from bench import counted
    from oracle import kinds_of_devices

    budget_mb, *flags = sys.argv[1:]
    build_gpt = train.build_gpt

    def build_gpt_with_limit(config, *arguments):
        limit_memory(round(float(budget_mb) * 1e6), config.device or kinds_of_devices()[-1])
        return build_gpt(config, *arguments)

    train.build_gpt = build_gpt_with_limit
    sys.argv = ["train.py", *flags]
    counted.main()


if __name__ == "__main__":
    main()

"""Tables of how equal, how fast and how large the modes are, beside what ships with torch.

COMMANDS
    ./bench.sh table modes
        the tables of the newest start of a command again, or those of a file
        out/bench/COMMAND_DATE.jsonl; with --price or --epoch_tokens as asked for

Times are those of two cores.

Options, then any flags of train.py:
    --worlds "1 2 4"                    numbers of ranks
    --rounds 3                          runs of each row
    --modes "ddp zero3 torch-fsdp"      these rows only
    --micro_batch_size 4
    --price 2.5                         dollars for an hour of a device: what an epoch costs
    --epoch_tokens 9e9                  tokens of such an epoch; unless given those of OpenWebText
overhead and collectives have --worlds. All that makes its own tables, as these, fit and compare,
has the flags of its program in bench/, and its --help. Names of files are as seen from the folder
of bench.sh.

Replaces a benchmark harness by a loop: for each round, label, W and row one run of train.py. All
that a run of train.py could refuse is looked at before the first one starts. Each start writes
files of its own: the results of its runs to out/bench/COMMAND_DATE.jsonl, one after the other, the
tables to COMMAND_DATE.md, what the runs leave to the folder COMMAND_DATE. A row that fails says
why, the others still run, and the exit status is 1. Ctrl-C stops what runs, and prints the tables
of what has run so far.

Runs by themselves scatter by up to 20 % on a shared machine. So each round runs every row once,
and a cell is the median of the rounds, with the quartiles beside it. All but gpu run on the CPU,
unless --device says otherwise.

modes has the rows deepspeed1, deepspeed2 and deepspeed3 where the package deepspeed is installed:
pip install deepspeed. On a CPU it also needs a C++ compiler.

gpu takes the tiny model where devices have little memory, as simulated ones do. Ranks share a
single device if it is one of NCCL's: then their hashes and bytes count, and their times do not.
Where hashes differ, bench/where_bits_differ.py says why.

bench/pictures.py draws what the newest start, or another one, has measured.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
import time

from bench.commands import COMMANDS, DEEPSPEEDS, ONLY_STEPS
from bench.launch import check_link, launch, link, note_signals, Run, say, TORCHRUN, wait
from bench.tables import BENCH, newest, print_head, print_tables, read_results
from bench.timeline import refuse, ROOT

SETS_ITSELF = ("mode", "global_batch_size", "out_dir")


def usage():
    lines = []
    for name, command in COMMANDS.items():
        lines.append(f"    ./bench.sh {name} {command.example}".rstrip())
        text = f"{command.title}: {command.takes}"
        lines.append(textwrap.fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return __doc__.replace("COMMANDS\n", "\n".join(lines) + "\n", 1)


# -------------------------------------------------------------------------------------------------
# what was asked for


@dataclasses.dataclass
class Options:
    """What the words after a command say; None for what they do not."""
    worlds: list | None
    rounds: int | None
    modes: list | None
    micro_batch_size: int | None
    price: float | None
    epoch_tokens: int
    rates: list
    flags: list  # for train.py


def number(text):
    """For argparse, which adds the option's name."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def whole_number(text):
    """9e9 is one, too."""
    value = number(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(value)


def whole_numbers(text):
    values = {whole_number(word) for word in text.split()}
    if not values:
        raise argparse.ArgumentTypeError("it needs numbers, such as '1 2 4'")
    return sorted(values)


def words_of(text):
    if not text.split():
        raise argparse.ArgumentTypeError("it needs modes, such as 'ddp zero3'")
    return text.split()


def make_parser():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.error = refuse
    return parser


def read_options(name, words):
    command = COMMANDS[name]
    parser = make_parser()
    parser.add_argument("--worlds", type=whole_numbers)
    parser.add_argument("--rounds", type=whole_number)
    parser.add_argument("--modes", type=words_of)
    parser.add_argument("--micro_batch_size", type=whole_number)
    parser.add_argument("--price", type=number)
    parser.add_argument("--epoch_tokens", type=whole_number, default=9_000_000_000)
    for option in SETS_ITSELF:
        parser.add_argument(f"--{option}")
    given, others = parser.parse_known_args(words)
    for option in SETS_ITSELF:
        if getattr(given, option) is not None:
            refuse(f"{name} sets --{option} itself")
        delattr(given, option)
    for option, why in command.refuses:
        if getattr(given, option) is not None:
            refuse(f"{why}: without --{option}")
    rates = []
    flags = []
    for word in others:
        if command.rates and re.fullmatch(r"\d.*bit", word):
            rates.append(word)
        else:
            flags.append(word)
    return Options(**vars(given), rates=rates, flags=flags)


def ask(question, text=""):
    """What bench/ask.py says on stdout; refuses with its line."""
    words = [sys.executable, "bench/ask.py", question]
    done = subprocess.run(words, cwd=ROOT, input=text, capture_output=True, text=True)
    if done.returncode == 2:
        refuse(" ".join(done.stderr.split()))
    if done.returncode < 0:  # Ctrl-C has ended it, too
        sys.exit(128 - done.returncode)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout


def find_machine(name):
    """What gpu has to know of the accelerators."""
    if name != "gpu":
        return None
    machine = json.loads(ask("machine"))
    if machine is None:
        refuse("gpu: torch finds no accelerator here")
    return machine


# -------------------------------------------------------------------------------------------------
# a plan: all runs, checked


def choose_rows(command, options):
    """Each mode with each variant of its flags."""
    rows = []
    for variant in command.variants:
        for mode in options.modes or command.rows:
            rows.append(f"{mode} {variant}".strip())
    return rows


def plan(name, command, options):
    """-> [Run] in their order. Refuses what some run would refuse."""
    labels = [*command.labels, *options.rates]
    if command.rates == "instead" and options.rates:
        if len(options.rates) > 1:
            refuse(f"{name} takes one rate, not {' and '.join(options.rates)}")
        labels = options.rates
    if not labels:
        refuse(f"{name} needs rates, such as {command.example}")
    runs = []
    n_rounds = options.rounds or command.rounds
    for round_number in range(1, n_rounds + 1):
        for label in labels:
            for W in options.worlds or command.worlds:
                for row in choose_rows(command, options):
                    if command.belongs(label, row, W):
                        runs.append(plan_run(command, options, label, row, W, round_number))
    check_packages(command, runs)
    if not runs:
        refuse(f"{name}: none of these rows can run at these --worlds")
    check_flags(command, options, runs)
    for rate in options.rates:
        check_link()
        with link(rate):  # tc alone knows which rates there are: so one is made, and removed
            pass
    return runs


def plan_run(command, options, label, row, W, round_number):
    m = options.micro_batch_size or command.micro_batch_size
    batch = m * command.batch_size(label, W)
    if batch % (m * W) > 0:
        refuse(f"{row}, W={W}: {batch} sequences of a step, in micro batches of {m}, do not divide "
               f"among {W} ranks")
    if row.startswith("single"):  # each process has its part
        batch //= W
    flags = [
        *command.label_flags(label), *ONLY_STEPS, *command.flags, *options.flags,
        "--micro_batch_size", str(m),
        "--global_batch_size", str(batch),
        "--mode", *row.split(),
    ]
    program = command.program
    if row.startswith("deepspeed"):
        program = "bench/deepspeed_rows.py"
    return Run(label, row, W, round_number, program, flags)


def check_packages(command, runs):
    needed = ["torch", *command.packages]
    if any(run.row.split()[0] in DEEPSPEEDS for run in runs):
        needed.append("deepspeed")
    for package in needed:
        if importlib.util.find_spec(package) is None:
            refuse(f"this needs a package: pip install {package}")


def check_flags(command, options, runs):
    """Ask train.py, for each run of the first round."""
    questions = []
    for run in runs:
        if run.round > 1:
            continue
        flags = [*run.flags]
        if run.row.split()[0] in DEEPSPEEDS:  # no mode of train.py, and of no flags of its own
            flags[flags.index("--mode") + 1] = "ddp"
        questions.append(dict(row=run.row, W=run.W, flags=flags, are_alone=run.are_alone,
                              hosts=2 if run.is_over_link else 1))
    ask("check", json.dumps(dict(flags=options.flags, runs=questions)))


# -------------------------------------------------------------------------------------------------
# files of a start


def describe(words, machine=None):
    """Facts of a start."""
    kind = platform.machine()
    cpus = pathlib.Path("/proc/cpuinfo")
    if cpus.exists():
        for name in re.findall(r"^model name\s*: (.*)$", cpus.read_text(), re.MULTILINE)[:1]:
            kind = name
    text = f"{os.cpu_count()} cores of {kind}"
    if machine is not None:
        text = f"{machine['n_devices']} x {machine['name']}, {text}"
    return dict(
        command=words[0],
        words=shlex.join(words),
        machine=text,
        n_devices=machine["n_devices"] if machine else None,
        torch=importlib.metadata.version("torch"),
        commit=commit(),
        date=datetime.datetime.now().isoformat(" ", "seconds"),
    )


def commit():
    if shutil.which("git") is None:
        return "unknown"
    words = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def make_folder():
    try:
        BENCH.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{BENCH}, where results go: {error.strerror}")
    if not os.access(BENCH, os.W_OK):
        refuse(f"{BENCH}, where results go, cannot be written to")


def reserve(name):
    """-> the path of a new, empty .md file, dated, which no other start has."""
    make_folder()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = BENCH / f"{name}_{stamp}.md"
    n = 1
    while True:
        try:
            path.open("x").close()
            return path
        except FileExistsError:
            n += 1
            path = BENCH / f"{name}_{stamp}-{n}.md"


def captured(function, *arguments):
    """What function prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        function(*arguments)
    return text.getvalue()


# -------------------------------------------------------------------------------------------------
# the loop


def run_all(runs, results, folder, signals):
    """Run the rows of a plan; append lines to the file results as they come."""
    start_s = time.monotonic()
    made = None  # the rate of the link that is there
    with contextlib.ExitStack() as links:
        for run in runs:
            rate = run.label if run.is_over_link else None
            if rate != made:
                links.close()  # removes the one before
                links.enter_context(link(rate))
                made = rate
            facts = launch(run, folder, signals)
            if signals:
                return
            with results.open("a") as file:
                for line in facts:
                    line["after_s"] = time.monotonic() - start_s
                    file.write(json.dumps(line) + "\n")


def run_rows(name, words, signals):
    """-> exit status."""
    options = read_options(name, words)
    command = COMMANDS[name]
    machine = find_machine(name)
    if command.adapt is not None:
        command = command.adapt(command, machine)
    runs = plan(name, command, options)
    if signals:
        return 128 + signals[0]
    if command.note:
        say(command.note)
    page = reserve(name)
    results, folder = page.with_suffix(".jsonl"), page.with_suffix("")
    folder.mkdir()
    start = describe([name, *words], machine)
    start.update(note=command.note, price=options.price, epoch_tokens=options.epoch_tokens)
    results.write_text(json.dumps(start) + "\n")

    run_all(runs, results, folder, signals)
    for out_dir in folder.glob("run?*/"):
        shutil.rmtree(out_dir)

    text = captured(print_tables, results)
    if name == "gpu" and not signals:
        overhead = [sys.executable, "bench/overhead.py", "--device", machine["kind"]]
        text += subprocess.run(overhead, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    page.write_text(text)
    print(text, end="", flush=True)
    say(f"these are in {page.relative_to(ROOT)}")
    if signals:
        return 128 + signals[0]
    finished = read_results(results)
    if command.draws and finished.runs:
        words = [sys.executable, "bench/pictures.py", name, str(results), "--into", str(folder)]
        subprocess.run(words, cwd=ROOT, stdout=sys.stderr)  # stdout has the tables alone
    return 1 if finished.failed else 0


# -------------------------------------------------------------------------------------------------
# programs that make tables of their own


def follow(words, lines, signals):
    """Run a program; print what it prints at once, and append it to lines -> exit status."""
    def echo():
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)

    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               start_new_session=True)
    reader = threading.Thread(target=echo, daemon=True)
    reader.start()
    wait([process], signals)
    reader.join(timeout=5)  # what the program has left behind may keep its stdout open
    return process.returncode


def check_words(path, words):
    """Let a program that torchrun starts look at its flags here, where it refuses them once, in a
    line and with status 2."""
    program = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    sys.argv[1:] = words
    program.parse_arguments()


def run_program(name, words, signals):
    """A program that makes its own tables, which are also kept -> its exit status."""
    command = COMMANDS[name]
    start = describe([name, *words])
    start_s = time.monotonic()
    worlds = [1]
    if command.once_per_W:
        parser = make_parser()
        parser.add_argument("--worlds", type=whole_numbers, default=command.worlds)
        given, words = parser.parse_known_args(words)
        worlds = given.worlds
        check_words(command.program, words)
    lines = []
    status = 0
    for W in worlds:
        program = [*TORCHRUN, "--standalone", f"--nproc_per_node={W}"]
        if W == 1:  # whose refusals are one line, without torchrun's report
            program = [sys.executable]
        status = follow([*program, command.program, *words], lines, signals)
        if status != 0:
            break
    if lines:
        page = reserve(name)
        head = captured(print_head, start, time.monotonic() - start_s)
        page.write_text(head + "".join(lines))
        say(f"these are in {page.relative_to(ROOT)}")
    return 128 + signals[0] if signals else status


# -------------------------------------------------------------------------------------------------


def print_again(words):
    """table: COMMAND or FILE, and another --price."""
    parser = make_parser()
    parser.add_argument("what", nargs="?")
    parser.add_argument("--price", type=number)
    parser.add_argument("--epoch_tokens", type=whole_number)
    given = parser.parse_args(words)
    if given.what is None:
        refuse("table needs a command, or a file such as out/bench/modes_....jsonl")
    path = newest(given.what) if given.what in COMMANDS else pathlib.Path(given.what)
    changes = {}
    for option in ("price", "epoch_tokens"):
        value = getattr(given, option)
        if value is not None:
            changes[option] = value
    print_tables(path, changes)


def main():
    sys.argv[0] = "bench.sh"  # what refusals begin with
    words = sys.argv[1:]
    is_program = bool(words) and words[0] in COMMANDS and COMMANDS[words[0]].own_tables
    if {"-h", "--help"} & set(words) and not is_program:  # a program has a page of its own
        print(usage())
        return 0
    if not words or words[0] not in (*COMMANDS, "table"):
        print(usage(), file=sys.stderr)
        return 2
    name, *words = words
    if name == "table":
        print_again(words)
        return 0
    signals = []
    note_signals(signals)
    if COMMANDS[name].own_tables:
        return run_program(name, words, signals)
    return run_rows(name, words, signals)


if __name__ == "__main__":
    sys.exit(main())

"""The same memory for each rank: which is the largest model that each mode trains in it?

    python bench/fit.py                                  all modes, on 1, 2 and 4 ranks
    python bench/fit.py --results fit.jsonl              trials are kept there, and not made again
    python bench/fit.py --budget_mb 400 --n_embd 512     another budget; any flags of train.py
    python bench/fit.py draw fit.jsonl                   the picture assets/fit.svg (matplotlib)

For each mode and number of ranks W it looks for the largest number of layers with which train.py
makes three steps, in micro batches of one sequence. A trial is a run of train.py of its own, which
torchrun starts: memory that one trial has not given back cannot count in the next. From two ranks
on there is no --mode single; with one rank there is nothing else, since all modes would hold the
same.

Three tables are printed: the largest models; the largest model that zero3 trains on most ranks,
which one process is asked to train, too; and the largest micro batch of each mode, for the largest
model that all of them train on most ranks. A table begins with what was found if the search is
interrupted.

The limit is real. Each rank sets it before its model is built, to the memory that it has by then
plus --budget_mb, so the budget is for parameters, gradients, optimizer state, activations and
messages. What Python and torch have before is said below the table. On a CPU the limit is the
kernel's RLIMIT_DATA, which counts what a process may write and shares with nobody, whether it has
been touched or not. RLIMIT_AS would not do: it also counts the text of libraries, mapped files, and
64 MB of addresses for each thread that allocates, of which most are never used: some hundreds of MB
that differ from rank to rank. On an accelerator the limit is a share of its memory, which torch's
allocator keeps.

A run that fails is too large only if some rank says that memory is out. Any other failure ends the
search, with its reason. On two cores the search takes about 15 minutes.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch

import train
from data import choose_tokenizer
from oracle import kinds_of_devices
from runs import read_flags
from bench.start import Parser
from bench.timeline import KINDS, pyplot_on_nothing, refuse, ROOT, save, WHOLE

MODES = "single ddp zero1 zero2 zero3 torch-ddp torch-fsdp"
# What each mode keeps whole, by the stage that does the same.
STAGE_OF = {"single": "ddp", "naive": "ddp", "torch-ddp": "ddp", "torch-zero1": "zero1",
            "torch-fsdp-kept": "zero2", "torch-fsdp": "zero3"}
FLAGS = ("--n_embd", "256", "--n_head", "8", "--block_size", "64", "--max_steps", "3",
         "--save_interval", "0", "--eval_steps", "0", "--sample_tokens", "0",
         "--check_interval", "0", "--timeout_s", "60", "--device", "cpu")
OWN_FLAGS = ("mode", "n_layer", "micro_batch_size", "global_batch_size", "out_dir", "resume")
FP32_BYTES = 4
NUMBERS_KEPT = 24  # by a block for its backward, for each token, in widths of the model: about
# What a rank says whose memory is out: train.py; C++, where no tensor was to be made; the kernel.
OUT_OF_MEMORY = ("out of memory", "std::bad_alloc", "MemoryError", "Cannot allocate memory")


# -------------------------------------------------------------------------------------------------
# a rank


def data_bytes():
    """What RLIMIT_DATA counts of this process now."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmData:\s+(\d+) kB", status)[1])


def limit_memory(budget_bytes, kind):
    """Let this rank have so much memory beside what it has now -> what it has now, in bytes."""
    if kind == "cpu":
        before = data_bytes()
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (before + budget_bytes, most))
        return before
    before = torch.accelerator.memory_reserved()
    _, whole = torch.accelerator.get_memory_info()
    share = min(1.0, (before + budget_bytes) / whole)
    torch.get_device_module(kind).set_per_process_memory_fraction(share)
    return before


def run_rank(budget_mb, flags):
    """train.py with these flags, in which this rank's memory is limited before the model is built.
    """
    import extras.torchs  # noqa: F401  imported later, it would count as part of the model

    build_gpt = train.build_gpt

    def build_gpt_with_limit(config, *arguments):
        kind = config.device or kinds_of_devices()[-1]
        before = limit_memory(round(budget_mb * 1e6), kind)
        print(f"BEFORE {before}\n", end="", flush=True)  # one write, as ranks share the file
        return build_gpt(config, *arguments)

    train.build_gpt = build_gpt_with_limit
    sys.argv = ["train.py", *flags]
    train.main()


# -------------------------------------------------------------------------------------------------
# a trial


class Stop(Exception):
    """A trial has failed for a reason other than memory."""


@dataclasses.dataclass(frozen=True)
class Question:
    """Whether a model can be trained."""
    mode: str
    W: int
    n_layer: int
    micro_batch_size: int


@dataclasses.dataclass
class Answer:
    fits: bool
    n_parameters: int
    before_mb: float  # the most that a rank had before its model; 0 where none came so far
    tokens_per_sec: float | None = None
    why: str = ""  # it does not fit: what a rank has said


@dataclasses.dataclass
class Search:
    budget_mb: float
    flags: list  # of train.py, the same for all trials
    folder: str  # for what train.py writes
    results: str | None  # a file of answers
    answers: dict  # {Question: Answer}


def flags_of(question, search):
    global_batch_size = question.W * question.micro_batch_size
    return [*search.flags, "--out_dir", search.folder, "--mode", question.mode,
            "--n_layer", str(question.n_layer),
            "--micro_batch_size", str(question.micro_batch_size),
            "--global_batch_size", str(global_batch_size)]


def count_parameters(n_layer, flags):
    """Of the model that train.py makes of these flags."""
    config = train.Config(**read_flags(train.Config, "", flags))
    config.mode, config.n_layer = "zero3", n_layer  # whose model is built without memory
    _, vocab_size = choose_tokenizer(config)
    gpt = train.build_gpt(config, vocab_size, None)
    return sum(p.numel() for p in gpt.parameters())


def run(command, log):
    """Run a command to its end, its output in the file log -> its exit status. If this process is
    told to end before, it ends the command, too."""
    with open(log, "w") as file:
        # In a session of its own: Ctrl-C comes to this process alone.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    finally:
        process.terminate()  # torchrun ends its ranks, which finish a step; nothing if it has ended
        process.wait()


def reason_of(log):
    """What the line says by which a run has ended; the last line if there is no such one."""
    lines = re.findall(r"^train\.py: (.*)$", log, re.MULTILINE)
    return lines[0] if lines else (log.strip().splitlines() or ["it has said nothing"])[-1]


def line_about_memory(log):
    """The first line that says that memory is out, None if none does."""
    for line in log.splitlines():
        if any(words in line for words in OUT_OF_MEMORY):
            return line.removeprefix("train.py: ")
    return None


def answer_of(question, status, log, n_parameters):
    """-> Answer of a run that has ended. Raises Stop where that is none."""
    taken = [int(n_bytes) for n_bytes in re.findall(r"^BEFORE (\d+)$", log, re.MULTILINE)]
    before_mb = max(taken, default=0) / 1e6
    result = re.search(r"^RESULT (.*)$", log, re.MULTILINE)
    if status == 0 and result is not None:
        tokens_per_sec = json.loads(result[1])["tokens_per_sec"]
        return Answer(True, n_parameters, before_mb, tokens_per_sec)
    line = line_about_memory(log)
    if line is None:
        raise Stop(f"{question.mode}, W = {question.W}, {question.n_layer} layers failed, and not "
                   f"for memory: {reason_of(log)}")
    return Answer(False, n_parameters, before_mb, why=line[:300])


def ask(search, question):
    """-> Answer, by a run of train.py if there is none yet."""
    if question in search.answers:
        return search.answers[question]
    print(f"fit.py: {question.mode}, W = {question.W}: {question.n_layer} layers, micro batches of "
          f"{question.micro_batch_size} ...", end=" ", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={question.W}", __file__, "rank", str(search.budget_mb),
               *flags_of(question, search)]
    log = pathlib.Path(search.folder, "log")
    status = run(command, log)
    n_parameters = count_parameters(question.n_layer, search.flags)
    answer = answer_of(question, status, log.read_text(errors="replace"), n_parameters)
    print("fits" if answer.fits else "does not fit", file=sys.stderr, flush=True)
    search.answers[question] = answer
    if search.results is not None:
        append(search, question, answer)
    return answer


# -------------------------------------------------------------------------------------------------
# files of answers


def append(search, question, answer):
    facts = dict(budget_mb=search.budget_mb, flags=search.flags)
    line = facts | dataclasses.asdict(question) | dataclasses.asdict(answer)
    with open(search.results, "a") as file:
        file.write(json.dumps(line) + "\n")


def values_of(kind, line):
    """-> what a line has of the fields of a dataclass, as one."""
    return kind(**{field.name: line[field.name] for field in dataclasses.fields(kind)})


def read_answers(path):
    """-> [(budget_mb, flags, {Question: Answer})], one for each budget and flags in the file."""
    searches = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), start=1):
        try:
            line = json.loads(line)
            question, answer = values_of(Question, line), values_of(Answer, line)
            budget_mb, flags = line["budget_mb"], line["flags"]
        except (ValueError, TypeError, KeyError) as error:
            refuse(f"{path}: line {number} is no trial of fit.py: {error}")
        same = [answers for *facts, answers in searches if facts == [budget_mb, flags]]
        if not same:
            same = [{}]
            searches.append((budget_mb, flags, same[0]))
        same[0][question] = answer
    return searches


def known_answers(path, budget_mb, flags):
    """-> those that a file has for a budget and flags. Refuses a file that cannot be written."""
    try:
        with open(path, "a"):
            pass
        for *facts, answers in read_answers(path):
            if facts == [budget_mb, flags]:
                return answers
    except OSError as error:
        refuse(f"--results {path}: {error.strerror}")
    return {}


# -------------------------------------------------------------------------------------------------
# the search


def largest(fits, estimate):
    """-> the largest n, 1 or more, for which fits(n) is true; 0 if there is none.

    fits is true up to some n, and false above. The first n asked for is the estimate. Steps that
    grow lead from there to a pair of which one fits and the other does not; then halves do.
    """
    low, high = 0, None  # low fits, or is 0; high does not, or is not known
    n, step = max(1, estimate), max(1, estimate // 8)
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


def formula(mode, W):
    """Bytes a parameter of parameters, gradients and Adam's state, as the ZeRO paper has them."""
    whole = WHOLE[STAGE_OF.get(mode, mode)]
    return whole + (16 - whole) / W


def estimate_layers(search, mode, W):
    """How many layers should fit. A fifth of the budget is left for messages and threads."""
    config = train.Config(**read_flags(train.Config, "", search.flags))
    per_layer = count_parameters(2, search.flags) - count_parameters(1, search.flags)
    activations = config.block_size * config.n_embd * NUMBERS_KEPT  # of one sequence
    layer_bytes = formula(mode, W) * per_layer + FP32_BYTES * activations
    return int(0.8 * search.budget_mb * 1e6 / layer_bytes)


def layers_fit(search, mode, W, n_layer):
    return ask(search, Question(mode, W, n_layer, 1)).fits


def batch_fits(search, mode, W, n_layer, micro_batch_size):
    return ask(search, Question(mode, W, n_layer, micro_batch_size)).fits


def belongs(mode, W):
    """Whether a mode has a place at W."""
    return (mode == "single") == (W == 1)


@dataclasses.dataclass
class Outcome:
    """What a search has found so far."""
    models: dict  # {(mode, W): the largest number of layers}
    named: list  # two Questions: one process, and most ranks, of one model
    batches: dict  # {(mode, W, number of layers): the largest micro batch}


def find(search, modes, worlds, outcome):
    """Search, and note all that is found, as a search may be interrupted."""
    for W in worlds:
        for mode in modes:
            if belongs(mode, W):
                fits = functools.partial(layers_fit, search, mode, W)
                outcome.models[mode, W] = largest(fits, estimate_layers(search, mode, W))
    most = max(worlds)
    at_most = {mode: n for (mode, W), n in outcome.models.items() if W == most}
    if "single" in modes and at_most.get("zero3", 0) > 0:
        for mode, W in (("single", 1), ("zero3", most)):
            question = Question(mode, W, at_most["zero3"], 1)
            ask(search, question)
            outcome.named.append(question)
    n_layer = min(at_most.values(), default=0)  # of the largest model that all of them train
    if n_layer > 0:
        for mode in at_most:
            fits = functools.partial(batch_fits, search, mode, most, n_layer)
            outcome.batches[mode, most, n_layer] = largest(fits, 1)


# -------------------------------------------------------------------------------------------------
# tables


def print_table(head, lines):
    for cells in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(cells) + " |")
    print()


def millions(n):
    return f"{n / 1e6:.1f}M"


def print_models(search, models):
    lines = []
    for (mode, W), n_layer in models.items():
        by_formula = f"{formula(mode, W):.2f}"
        if n_layer == 0:
            lines.append([mode, str(W), "none", "0", "-", "-", by_formula])
            continue
        answer = search.answers[Question(mode, W, n_layer, 1)]
        budget = search.budget_mb * 1e6 / answer.n_parameters
        lines.append([mode, str(W), millions(answer.n_parameters), str(n_layer),
                      f"{answer.tokens_per_sec:,.0f}", f"{budget:.2f}", by_formula])
    print_table(["mode", "W", "largest model", "layers", "tokens/s",
                 "bytes of the budget a parameter", "formula"], lines)
    before = [answer.before_mb for answer in search.answers.values() if answer.before_mb > 0]
    if before:
        print(f"Each rank had {search.budget_mb:g} MB beside the {min(before):.0f} to "
              f"{max(before):.0f} MB that Python and torch had taken before the model.\n")


def print_named(search, named):
    """One model, by one process and by most ranks."""
    answers = [search.answers[question] for question in named]
    name = f"GPT-{millions(answers[0].n_parameters)}"
    print(f"{name}, of {named[0].n_layer} layers, in {search.budget_mb:g} MB a rank:\n")
    lines = []
    for question, answer in zip(named, answers):
        text = f"does not fit: {answer.why}"
        if answer.fits:
            text = f"trains, {answer.tokens_per_sec:,.0f} tokens/s"
        lines.append([question.mode, str(question.W), text])
    print_table(["mode", "W", name], lines)


def print_batches(search, batches):
    lines = []
    for (mode, W, n_layer), size in batches.items():
        if size == 0:  # at the limit, chance decides
            lines.append([mode, str(W), "none", "-"])
            continue
        answer = search.answers[Question(mode, W, n_layer, size)]
        lines.append([mode, str(W), str(size), f"{answer.tokens_per_sec:,.0f}"])
    _, _, n_layer = next(iter(batches))
    n_parameters = millions(count_parameters(n_layer, search.flags))
    print(f"The largest model that all of these train, of {n_layer} layers and {n_parameters} "
          "parameters:\n")
    print_table(["mode", "W", "largest micro batch", "tokens/s with it"], lines)


def print_outcome(search, outcome):
    if outcome.models:
        print_models(search, outcome.models)
    if len(outcome.named) == 2:
        print_named(search, outcome.named)
    if outcome.batches:
        print_batches(search, outcome.batches)
    sys.stdout.flush()


# -------------------------------------------------------------------------------------------------
# drawing


def largest_trained(answers):
    """-> {(mode, W): parameters of the largest model that has trained}."""
    sizes = {}
    for question, answer in answers.items():
        key = question.mode, question.W
        if answer.fits:
            sizes[key] = max(sizes.get(key, 0), answer.n_parameters)
    return sizes


def draw(path):
    """A file of answers -> assets/fit.svg."""
    try:
        searches = read_answers(path)
    except OSError as error:
        refuse(f"draw {path}: {error.strerror}")
    if len(searches) != 1:
        refuse(f"draw {path}: it has trials of {len(searches)} budgets or flags: draw takes one")
    [(budget_mb, _, answers)] = searches
    sizes = largest_trained(answers)
    if not sizes:
        refuse(f"draw {path}: no model has trained")
    pyplot = pyplot_on_nothing()
    modes = list(dict.fromkeys(mode for mode, W in sizes))
    worlds = sorted({W for mode, W in sizes})
    colors = list(KINDS.values())
    figure, axes = pyplot.subplots(figsize=(9, 4))
    width = 0.8 / len(worlds)
    for number, W in enumerate(worlds):
        with_W = [mode for mode in modes if (mode, W) in sizes]
        left = (number - (len(worlds) - 1) / 2) * width
        places = [modes.index(mode) + left for mode in with_W]
        heights = [sizes[mode, W] / 1e6 for mode in with_W]
        by_formula = [budget_mb / formula(mode, W) for mode in with_W]
        color = colors[number % len(colors)]
        bars = axes.bar(places, heights, 0.9 * width, color=color, label=f"W = {W}")
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
        label = "budget / formula" if number == 0 else None
        axes.plot(places, by_formula, "_", color="grey", markersize=14, label=label)
    axes.set_xticks(range(len(modes)), modes)
    axes.set_ylabel("million parameters")
    axes.set_title(f"the largest model that trains in {budget_mb:g} MB a rank", fontsize=10)
    axes.margins(y=0.25)  # room for the legend
    axes.legend(ncols=len(worlds) + 1, loc="upper left")
    save(figure, "fit", ROOT / "assets")


# -------------------------------------------------------------------------------------------------
# what was asked for


def read_numbers(name, text):
    """"1 2 4" -> [1, 2, 4]."""
    words = text.split()
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        refuse(f"{name} {text}: choose whole numbers from 1 on, such as \"1 2 4\"")
    return sorted({int(word) for word in words})


def parse_arguments():
    """-> what was asked for, and the flags of train.py."""
    parser = Parser(description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget_mb", type=float, default=192, help="MB of a rank, beside torch's")
    parser.add_argument("--worlds", default="1 2 4", help="numbers of ranks")
    parser.add_argument("--modes", default=MODES, help="these modes only")
    parser.add_argument("--results", help="a file to which each trial is added, and from which it "
                        "is taken if it is there")
    arguments, others = parser.parse_known_args()
    arguments.worlds = read_numbers("--worlds", arguments.worlds)
    arguments.modes = arguments.modes.split()
    if not 0 < arguments.budget_mb < 1e9:
        refuse(f"--budget_mb {arguments.budget_mb:g}: choose a number above 0")
    unknown = [mode for mode in arguments.modes if mode not in train.MODES]
    if unknown or not arguments.modes:
        refuse(f"--modes {' '.join(arguments.modes)}: choose among {' '.join(train.MODES)}")
    for word in others:
        name = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and name in OWN_FLAGS:
            refuse(f"fit sets --{name} itself")
    if not any(belongs(mode, W) for mode in arguments.modes for W in arguments.worlds):
        refuse("single is for one rank, and all other modes are for more: choose --modes and "
               "--worlds that go together")
    return arguments, [*FLAGS, *others]


def check_flags(flags, budget_mb, W):
    """End with one line where train.py refuses these flags, or where the limit cannot be set, or
    is more than W ranks have on this machine."""
    given = read_flags(train.Config, "", flags)
    try:
        count_parameters(1, flags)
    except SystemExit as error:
        refuse(str(error))
    if given["device"] == "cpu" and sys.platform != "linux":
        refuse("on a CPU the limit is one of Linux: choose an accelerator by --device")
    most_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e6
    if given["device"] == "cpu" and W * budget_mb > most_mb:
        refuse(f"--budget_mb {budget_mb:g}: {W} ranks do not have it in the {most_mb:,.0f} MB of "
               f"this machine")


def main():
    if sys.argv[1:2] == ["rank"]:
        return run_rank(float(sys.argv[2]), sys.argv[3:])
    if sys.argv[1:2] == ["draw"]:
        if len(sys.argv) != 3:
            refuse("draw takes one file that --results has named")
        return draw(sys.argv[2])
    arguments, flags = parse_arguments()
    check_flags(flags, arguments.budget_mb, max(arguments.worlds))
    answers = {}
    if arguments.results is not None:
        answers = known_answers(arguments.results, arguments.budget_mb, flags)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    outcome = Outcome({}, [], {})
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        search = Search(arguments.budget_mb, flags, folder, arguments.results, answers)
        try:
            find(search, arguments.modes, arguments.worlds, outcome)
        except KeyboardInterrupt:
            print("\nfit.py: interrupted", file=sys.stderr)
            status = 130
        except Stop as reason:
            print(f"\nfit.py: {reason}", file=sys.stderr)
            status = 1
        print_outcome(search, outcome)
    return status


if __name__ == "__main__":
    sys.exit(main())

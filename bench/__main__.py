"""What bench.sh does: read the words after it, run, print a table. bench.sh says what there is."""

import argparse
import contextlib
import datetime
import io
import json
import math
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import time

import torch

import runs
import train
from bench import compare, fit, predict
from bench.launch import cable, FIRST_PORT, Hosts, launch, refuse, ROOT, Run, say
from bench.tables import columns_of, Picture, Results, TABLES
from model import GPT, GPTConfig, PRESETS

BENCH = ROOT / "out" / "bench"
SETS_ITSELF = ("mode", "global_batch_size", "out_dir")
OTHERS = ("collectives", "overhead", "fit", "predict", "compare")


def usage():
    """The comment at the head of bench.sh."""
    lines = (ROOT / "bench.sh").read_text().splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[1:]
                     if line.startswith("#"))


# -------------------------------------------------------------------------------------------------
# what was asked for


def number(text):
    """For argparse, which adds the option's name."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def whole_number(text):
    if not number(text).is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(float(text))


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


def make_parser(name):
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--json", action="store_true")
    if name == "compare":
        parser.add_argument("out_dirs", nargs=2, metavar="OUT_DIR")
        parser.add_argument("--rtol", type=float, default=0.0)
        parser.add_argument("--atol", type=float, default=0.0)
        return parser
    parser.add_argument("--worlds", type=whole_numbers)
    if name not in ("collectives", "overhead"):
        parser.add_argument("--modes", type=words_of)
        parser.add_argument("--price", type=number)
    if name == "predict":
        parser.add_argument("--step_ms", type=number)
        parser.add_argument("--result", type=pathlib.Path)
        parser.add_argument("--model", choices=PRESETS, default="gpt2")
        parser.add_argument("--vocab_size", type=whole_number, default=50257)
        parser.add_argument("--tokens", type=whole_number)
        parser.add_argument("--micro_steps", type=whole_number, default=1)
        parser.add_argument("--param_bytes", type=whole_number, default=4)
        parser.add_argument("--reduce_bytes", type=whole_number, default=4)
        parser.add_argument("--bucket_cap_mb", type=number, default=25.0)
        parser.add_argument("--node_size", type=whole_number, default=8)
        parser.add_argument("--intra", type=number, default=450.0)
        parser.add_argument("--inter", type=number, default=50.0)
        parser.add_argument("--latency_us", type=number, default=20.0)
        return parser
    parser.add_argument("--rounds", type=whole_number)
    parser.add_argument("--svg")
    parser.add_argument("--micro_batch_size", type=whole_number)
    parser.add_argument("--until_loss", type=number)
    parser.add_argument("--budget_mb", type=number, default=192.0)
    parser.add_argument("--sizes", type=sizes, default=sizes("1kB,64kB,1MB,16MB,256MB"))
    parser.add_argument("--repeats", type=whole_number, default=9)
    parser.add_argument("--nnodes", type=whole_number, default=1)
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr")
    for option in SETS_ITSELF:
        parser.add_argument(f"--{option}")
    return parser


def read_options(name, words):
    """-> what was asked for; `rates` of a cable, and `flags` of train.py, which looks at them."""
    options, others = make_parser(name).parse_known_args(words)
    if name in ("compare", "predict"):
        if others:
            refuse(f"{name} has no {others[0]}: see ./bench.sh --help")
        return options
    for option in SETS_ITSELF:
        if getattr(options, option) is not None:
            refuse(f"{name} sets --{option} itself")
    options.rates = [word for word in others if re.fullmatch(r"\d[\d.]*[kmg]?bit", word)]
    options.flags = [word for word in others if word not in options.rates]
    if options.rates and name not in ("links", "buckets"):
        refuse(f"{name} has no cable: without {options.rates[0]}")
    if options.rates and options.nnodes > 1:
        refuse("a cable stands for two hosts: without --nnodes")
    if options.nnodes > 1 and options.master_addr is None:
        refuse("--nnodes needs --master_addr, of the host whose --node_rank is 0")
    if not 0 <= options.node_rank < options.nnodes:
        refuse(f"--node_rank {options.node_rank}: choose 0 to {options.nnodes - 1}, of --nnodes")
    if name in ("collectives", "overhead"):
        given = runs.read_flags(train.Config, "", options.flags)
        if set(given) - {"device"}:
            refuse(f"{name} has no --{min(set(given) - {'device'})}: see ./bench.sh --help")
    else:
        runs.read_flags(train.Config, "", options.flags)  # ends with status 2 where one is wrong
    return options


# -------------------------------------------------------------------------------------------------
# a start of bench.sh


class Bench:
    """Runs what a table consists of, and keeps it: out/bench/TABLE_DATE/ has a log for each run,
    results.jsonl, and the table."""

    def __init__(self, name, options):
        self.options = options
        self.hosts = Hosts(options.nnodes, (options.node_rank,), options.master_addr or "")
        if options.nnodes == 1:
            self.hosts = Hosts()
        self.folder = make_folder(name)
        self.ports = iter(range(FIRST_PORT, 65536))  # each run has its own: nobody finds an old one
        self.failed = []
        self.is_interrupted = False

    def launch(self, run: Run):
        """-> its RESULTs, or [{"failed": why}], and its log."""
        say(run.name)
        n_hosts = 2 if run.rate else self.hosts.n
        if run.W > 1 and run.W % n_hosts > 0:
            refuse(f"{run.name}: {run.W} ranks do not divide among {n_hosts} hosts")
        log = self.folder / f"{run.name}.log"
        with cable(run.rate) if run.rate else contextlib.nullcontext(self.hosts) as hosts:
            results = launch(run, hosts, next(self.ports), self.folder, log)
        with (self.folder / "results.jsonl").open("a") as file:
            for result in results:
                facts = dict(kind=run.kind, row=run.row, W=run.W, **result)
                file.write(json.dumps(facts) + "\n")
        return results, log.read_text(errors="replace")

    def launch_all(self, planned: list, n_rounds: int) -> dict:
        """-> {Run: its RESULTs}. Each round runs every row once, so that what else the machine does
        meets all of them alike. Ctrl-C ends it, with what there is."""
        results = {}
        try:
            for _ in range(n_rounds):
                for run in planned:
                    made, _ = self.launch(run)
                    for result in made:
                        if "failed" in result:
                            say(f"failed: {result['failed']}")
                            self.failed.append(f"{run.name}: {result['failed']}")
                        else:
                            results.setdefault(run, []).append(result)
        except KeyboardInterrupt:
            self.is_interrupted = True
        return results


def make_folder(name):
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 100):
        folder = BENCH / (f"{name}_{stamp}" if number == 1 else f"{name}_{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            refuse(f"{BENCH}, where results go: {error.strerror}")
    refuse(f"{folder} and 99 others are there already")


# -------------------------------------------------------------------------------------------------
# tables that are not of train.py alone: -> rows, columns, a picture, a text below


def of_train(name, options, bench):
    table = TABLES[name]
    planned = list(table.runs(options))
    results = Results(bench.launch_all(planned, options.rounds or table.rounds), options)
    rows = [columns_of(run, results) for run in results.of]
    columns = table.columns.split(", ")
    if table.pivot:
        rows, columns = pivoted(rows, *columns)
    if options.price and "hours for 10^9 tokens" in columns:
        columns.append("$ for 10^9 tokens")
    if options.until_loss:
        columns += [f"steps to {options.until_loss}", f"seconds to {options.until_loss}"]
    return rows, columns, table.picture, ""


def of_program(name, options, bench):
    """collectives and overhead: each rank runs the program, and rank 0 tells rows."""
    words = tuple(options.flags)
    if name == "collectives":
        words += ("--sizes", ",".join(map(str, options.sizes)), "--repeats", str(options.repeats))
    planned = []
    for W in options.worlds or ((2, 4) if name == "collectives" else (1, 2)):
        planned.append(Run(name, W, words, program=f"bench/{name}.py"))
    rows = []
    for results in bench.launch_all(planned, 1).values():
        rows += results
    columns = [name for name in (rows[0] if rows else {}) if name != "metrics"]
    return rows, columns, None, ""


def of_fit(name, options, bench):
    rows, text = [], ""
    try:
        for row in fit.search(options, bench):
            rows.append(row)
    except KeyboardInterrupt:
        bench.is_interrupted = True
    except fit.Stop as reason:
        bench.failed.append(str(reason))
    columns = ["mode", "W", "largest model, M", "layers", "tokens/s",
               "bytes of the budget a parameter"]
    for row in rows:
        row["row"] = row["mode"]
    return rows, columns, Picture(("largest model, M",), "W"), text


def of_predict(options):
    """-> rows, columns, what they are made of."""
    if (options.step_ms is None) == (options.result is None):
        refuse("predict needs a step that was measured: --step_ms 123, or --result FILE with a "
               "RESULT line")
    unit_sizes, tokens = None, options.tokens
    step_ms = options.step_ms
    if options.result is not None:
        result = last_result(options.result)
        step_ms = result["step_ms"] - (result.get("comm_exposed_ms") or 0.0)
        unit_sizes = result.get("unit_sizes")
        of_rank = result["tokens_per_sec"] * result["step_ms"] / 1e3 / result["world_size"]
        tokens = tokens or round(of_rank)
    preset = PRESETS[options.model]
    if unit_sizes is None:
        with torch.device("meta"):
            gpt = GPT(GPTConfig(vocab_size=options.vocab_size, **preset))
        from bench.counted import unit_sizes as sizes_of
        unit_sizes = sizes_of(gpt)
    tokens = tokens or preset["block_size"]
    work = predict.Work(unit_sizes, step_ms / 1e3, options.micro_steps, options.param_bytes,
                        options.reduce_bytes, round(options.bucket_cap_mb * 2**20))
    links = predict.Links(options.node_size, options.intra * 1e9, options.inter * 1e9,
                          options.latency_us / 1e6)
    worlds = options.worlds or [2**n for n in range(11)]
    modes = options.modes or predict.MODES
    unknown = set(modes) - set(predict.MODES)
    if unknown:
        refuse(f"predict has no mode {min(unknown)}: choose among {' '.join(predict.MODES)}")
    rows = predict.predicted(work, links, modes, worlds, tokens, options.price)
    text = (f"On paper: {sum(unit_sizes):,} parameters in {len(unit_sizes) - 1} blocks and a root, "
            f"{tokens:,} tokens a rank, which computes for {step_ms:g} ms. {options.node_size} "
            f"ranks a node, {options.intra:g} GB/s inside of it, {options.inter:g} GB/s between "
            "nodes. bench/predict.py says what is assumed.")
    return rows, list(rows[0]), text


def last_result(path):
    try:
        text = path.read_text()
    except OSError as error:
        refuse(f"--result {path}: {error.strerror}")
    for line in reversed(text.splitlines()):
        start = line.find("{")
        if line.startswith(("RESULT {", "{")):
            with contextlib.suppress(ValueError):
                result = json.loads(line[start:])
                if result.get("step_ms"):
                    return result
    refuse(f"--result {path}: it has no RESULT line of train.py with a step_ms")


# -------------------------------------------------------------------------------------------------
# printing


def pivoted(rows, first, across, value):
    """-> rows that have a column for each value of the column `across`, and the columns."""
    lines = {}
    names = []
    for row in rows:
        name = f"{across}={row[across]}"
        if name not in names:
            names.append(name)
        lines.setdefault(row[first], {first: row[first]})[name] = row[value]
    return list(lines.values()), [first, *names]


def cell(value):
    if value is None or value == "":
        return "-"
    if isinstance(value, (str, int)):
        return str(value)
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def print_table(rows, columns):
    """As Markdown. Leaves out columns in which there is nothing."""
    texts = [[cell(row.get(name)) for name in columns] for row in rows]
    kept = []
    for place in range(len(columns)):
        if any(text[place] != "-" for text in texts):
            kept.append(place)
    for line in [columns, ["---"] * len(columns), *texts]:
        print("| " + " | ".join(line[place] for place in kept) + " |")
    print()


def machine(options):
    """What it runs on."""
    kind = platform.machine()
    cpus = pathlib.Path("/proc/cpuinfo")
    if cpus.exists():
        for name in re.findall(r"^model name\s*: (.*)$", cpus.read_text(), re.MULTILINE)[:1]:
            kind = name
    text = f"{os.cpu_count()} cores of {kind}"
    if "--device" in getattr(options, "flags", []) and torch.accelerator.is_available():
        name = torch.get_device_module().get_device_name()
        text = f"{torch.accelerator.device_count()} x {name}, {text}"
    return text


def commit():
    words = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def show(words, options, seconds, rows, columns, text, failed):
    """Print a table and what it is of."""
    facts = dict(command=shlex.join(["./bench.sh", *words]), machine=machine(options),
                 torch=torch.__version__, commit=commit(),
                 date=datetime.datetime.now().isoformat(" ", "minutes"), seconds=round(seconds))
    if options.json:
        kept = [{name: row.get(name) for name in columns} for row in rows]
        made = train.finite(dict(facts, rows=kept, text=text, failed=failed))
        print(json.dumps(made, indent=1))
        return
    minutes, seconds = divmod(facts["seconds"], 60)
    print(f"`{facts['command']}`: {facts['machine']}, torch {facts['torch']}, commit "
          f"{facts['commit']}, {facts['date']}, took {minutes} min {seconds} s\n")
    for line in failed:
        print(f"Failed: {line}\n")
    if rows:
        print_table(rows, columns)
    if text:
        print(f"{text}\n")


def main():
    sys.argv[0] = "bench.sh"  # what refusals begin with
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(usage())
        return 0
    if not words or words[0] not in (*TABLES, *OTHERS):
        print(usage(), file=sys.stderr)
        return 2
    name = words[0]
    options = read_options(name, words[1:])
    start_s = time.monotonic()
    if name == "compare":
        tolerance = compare.Tolerance(options.rtol, options.atol)
        rows, text, are_near = compare.compare(*options.out_dirs, tolerance)
        show(words, options, time.monotonic() - start_s, rows, list(rows[0]), text, [])
        return 0 if are_near else 1
    if name == "predict":
        rows, columns, text = of_predict(options)
        show(words, options, time.monotonic() - start_s, rows, columns, text, [])
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if name in TABLES:
        make, _ = of_train, [*TABLES[name].runs(options)]  # refuses before there is a folder
    else:
        make = of_fit if name == "fit" else of_program
    bench = Bench(name, options)
    rows, columns, picture, text = make(name, options, bench)
    if options.node_rank > 0:
        say("the table is printed where --node_rank is 0")
        return 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show(words, options, time.monotonic() - start_s, rows, columns, text, bench.failed)
    print(printed.getvalue(), end="", flush=True)
    (bench.folder / "table.md").write_text(printed.getvalue())
    if options.svg and picture is not None and rows:
        from bench.draw import draw
        draw(rows, picture, options.svg)
    if bench.is_interrupted:
        return 128 + signal.SIGINT
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())

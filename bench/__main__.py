"""What bench.sh does: read the words after it, run, print a table. bench.sh says what there is."""

import contextlib
import datetime
import io
import json
import signal
import sys
import time

from bench import compare, fit, predict
from bench.draw import draw
from bench.launch import cable, FIRST_PORT, Hosts, launch, refuse, ROOT, Run, say
from bench.options import OTHERS, planned_runs, read_options, usage
from bench.printing import pivoted, show
from bench.tables import columns_of, Results, TABLES

BENCH = ROOT / "out" / "bench"


class Stopped(KeyboardInterrupt):
    """By a signal, whose number it has. What runs is ended, and the table has what there is."""


def stop(number, frame):
    raise Stopped(number)


class Bench:
    """Runs what a table consists of, and keeps it in out/bench/TABLE_DATE/: of each run its log and
    its out_dir, results.jsonl, and the table."""

    def __init__(self, name, options):
        self.options = options
        self.hosts = Hosts()
        if getattr(options, "nnodes", 1) > 1:
            self.hosts = Hosts(options.nnodes, (options.node_rank,), options.master_addr)
        self.folder = make_folder(name)
        # Hosts have clocks of their own, and ranks one out_dir.
        self.out_dirs = self.folder if self.hosts.n == 1 else BENCH / f"{self.hosts.n}_hosts"
        self.ports = iter(range(FIRST_PORT, 65536))  # each run has its own: nobody finds an old one
        self.failed = []
        self.stopped_by = 0  # a signal, if one has come

    def launch(self, run: Run):
        """-> its RESULTs, or [{"failed": why}], and its log."""
        say(run.name)
        log = self.folder / f"{run.name}.log"
        with cable(run.rate) if run.rate else contextlib.nullcontext(self.hosts) as hosts:
            results = launch(run, hosts, next(self.ports), self.out_dirs / run.name, log)
        with (self.folder / "results.jsonl").open("a") as file:
            for result in results:
                facts = dict(kind=run.kind, row=run.row, W=run.W)
                file.write(json.dumps(facts | result) + "\n")
        return results, log.read_text(errors="replace")

    def launch_all(self, planned: list, n_rounds: int) -> dict:
        """-> {Run: its RESULTs}. Each round runs every row once, so that what else the machine does
        meets all of them alike."""
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
        except Stopped as signal_number:
            self.stopped_by = signal_number.args[0]
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
# tables: -> rows, columns


def of_train(name, options, bench, planned):
    table = TABLES[name]
    results = Results(bench.launch_all(planned, options.rounds or table.rounds), options)
    rows = [columns_of(run, results) for run in results.of]
    columns = table.columns.split(", ")
    if table.pivot:
        rows, columns = pivoted(rows, *columns)
    if options.price and "hours for 10^9 tokens" in columns:
        columns.append("$ for 10^9 tokens")
    if options.until_loss:
        columns += [f"steps to {options.until_loss}", f"seconds to {options.until_loss}"]
    return rows, columns


def of_program(bench, planned):
    """collectives and overhead: each rank runs the program, and rank 0 tells rows."""
    rows = []
    for results in bench.launch_all(planned, 1).values():
        rows += results
    columns = [column for column in (rows[0] if rows else {}) if column != "metrics"]
    return rows, columns


def of_fit(options, bench):
    rows = []
    try:
        for row in fit.search(options, bench):
            rows.append(row)
    except Stopped as signal_number:
        bench.stopped_by = signal_number.args[0]
    except fit.Stop as reason:
        bench.failed.append(str(reason))
    return rows, fit.COLUMNS


# -------------------------------------------------------------------------------------------------


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
        rows, columns, text = predict.table(options)
        show(words, options, time.monotonic() - start_s, rows, columns, text, [])
        return 0
    planned = planned_runs(name, options)
    bench = Bench(name, options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if name in TABLES:
        rows, columns = of_train(name, options, bench, planned)
    elif name == "fit":
        rows, columns = of_fit(options, bench)
    else:
        rows, columns = of_program(bench, planned)
    if bench.hosts.here != (0,):
        say("the table is printed where --node_rank is 0")
        return 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show(words, options, time.monotonic() - start_s, rows, columns, "", bench.failed)
    print(printed.getvalue(), end="", flush=True)
    kept = "table.json" if options.json else "table.md"
    (bench.folder / kept).write_text(printed.getvalue())
    if getattr(options, "svg", None) and rows:
        draw(rows, fit.PICTURE if name == "fit" else TABLES[name].picture, options.svg)
    if bench.stopped_by:
        return 128 + bench.stopped_by
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())

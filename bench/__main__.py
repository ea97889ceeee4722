"""What bench.sh does: read the words after it, run, print a table. bench.sh says what there is."""

import contextlib
import datetime
import io
import itertools
import json
import pathlib
import signal
import sys
import tempfile
import time

from bench import compare, fit, predict
from bench.draw import draw
from bench.launch import cable, Hosts, launch, refuse, ROOT, Run, say
from bench.options import OTHERS, planned_runs, read_options, usage
from bench.printing import pivoted, show
from bench.tables import columns_of, Results, TABLES

BENCH = ROOT / "out" / "bench"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """By a signal, whose number it has. What runs is ended, and the table has what there is."""


def on_signal(number, frame):
    ignore_signals()  # what runs gets its time to end
    raise Stopped(number)


def ignore_signals():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Bench:
    """Runs what a table consists of, and keeps it in out/bench/TABLE_DATE/: of each run its log and
    its out_dir, results.jsonl, and the table."""

    def __init__(self, name, options):
        self.folder = make_folder(name)
        self.hosts, self.out_dirs = Hosts(), self.folder
        if options.nnodes > 1:
            self.hosts = Hosts(options.nnodes, (options.node_rank,), options.master_addr)
            # Ranks of all hosts have the same out_dir; the names of folders have a host's own time.
            self.out_dirs = BENCH / f"hosts_{options.master_port}"
        self.ports = itertools.count(options.master_port)  # one a run: nobody finds an old one
        self.failed = []
        self.stopped_by = 0  # a signal, if one has come

    def launch(self, run: Run):
        """-> its RESULTs, and at last {"failed": why} if it has failed; its log."""
        say(run.name)
        log = self.folder / f"{run.name}.log"
        place = cable(run.rate) if run.rate else contextlib.nullcontext(self.hosts)
        with place as hosts:
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
    """Of this start alone."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        BENCH.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(tempfile.mkdtemp(prefix=f"{name}_{stamp}_", dir=BENCH))
    except OSError as error:
        refuse(f"{BENCH}, where results go: {error.strerror}")


# -------------------------------------------------------------------------------------------------
# tables: -> rows, columns


def of_train(name, options, bench, planned):
    table = TABLES[name]
    results = Results(bench.launch_all(planned, options.rounds or table.rounds), options)
    rows = [columns_of(run, results) for run in results.of]
    columns = table.columns.split(", ")
    if table.pivot:
        rows, columns = pivoted(rows, *columns)
    if options.price:
        columns += ["device hours for 10^9 tokens", "$ for 10^9 tokens"]
        columns = list(dict.fromkeys(columns))
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
        rows, text = predict.rows_of(options)
        show(words, options, time.monotonic() - start_s, rows, list(rows[0]), text, [])
        return 0
    planned = planned_runs(name, options)
    bench = Bench(name, options)
    for number in SIGNALS:
        signal.signal(number, on_signal)
    if name in TABLES:
        rows, columns = of_train(name, options, bench, planned)
    elif name == "fit":
        rows, columns = of_fit(options, bench)
    else:
        rows, columns = of_program(bench, planned)
    ignore_signals()  # it takes a moment to print
    if bench.hosts.here == (0,):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            show(words, options, time.monotonic() - start_s, rows, columns, "", bench.failed)
        print(printed.getvalue(), end="", flush=True)
        kept = "table.json" if options.json else "table.md"
        (bench.folder / kept).write_text(printed.getvalue())
        if options.svg is not None and rows:
            draw(rows, fit.PICTURE if name == "fit" else TABLES[name].picture, options.svg)
    else:
        say("the table is printed where --node_rank is 0")
    if bench.stopped_by:
        return 128 + bench.stopped_by
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())

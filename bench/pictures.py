"""Pictures of what bench.sh has measured, of a run and of the files -> assets/COMMAND.svg.

    ./bench.sh modes && python assets/charts.py modes     step time beside torch's and DeepSpeed's
    ./bench.sh memory                                     calls `python assets/charts.py memory`
    python assets/charts.py link FILE.jsonl ...           step time over slow links; each file has
                                                          the runs of one rate
    python assets/charts.py loss [metrics.jsonl]          losses of a run, of out/ unless told
    python assets/charts.py files                         files, their lines, who imports whom
    python assets/charts.py step                          an event of docs/step.html: step.png and
                                                          step-dark.png

Needs matplotlib; `step` needs playwright, and Chromium. Text and axes are grey, on nothing:
readable on white pages and on black ones.
"""

import ast
import json
import pathlib
import shutil
import statistics
import sys

# Where bench/ is: what bench.sh draws has the same colours.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench.timeline import KINDS, ROOT, WHOLE, pyplot_on_nothing, read_spans, refuse, save

BENCH = ROOT / "out" / "bench"
OURS = "#7a62b8"
TORCHS = "#bf4f86"
DEEPSPEEDS = "#2a9d9d"
# Each imports only some of those before it, and train.py also what a flag needs of extras/.
FILES = ("oracle.py", "model.py", "guards.py", "ddp.py", "zero.py", "data.py", "checkpoint.py",
         "train.py", "extras/", "verify.py", "tests/")
IDEA = ("oracle.py", "ddp.py", "zero.py")
STILL = "mode=zero3&ranks=2&event=start-unshard-blocks.1-again&still=1"
SMOOTHED = 20  # steps whose mean is a point of the training loss


def step_times(path):
    """RESULT lines of bench.sh -> {(row, W): median step time, ms}."""
    try:
        runs = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        refuse(f"{path} does not have what bench.sh writes: {error}")
    times = {}
    for run in runs:
        if "failed" not in run:
            times.setdefault((run["row"], run["W"]), []).append(run["step_ms"])
    if not times:
        refuse(f"{path} has no run that went through")
    return {key: statistics.median(values) for key, values in times.items()}


def color_of(row):
    if row.startswith("torch"):
        return TORCHS
    if row.startswith("deepspeed"):
        return DEEPSPEEDS
    return OURS


def draw_bars(axes, rows, times_ms):
    """A horizontal bar for each row, from top to bottom, with its number."""
    rows = rows[::-1]  # matplotlib counts from the bottom
    times_ms = times_ms[::-1]
    colors = [color_of(row) for row in rows]
    bars = axes.barh(rows, times_ms, color=colors)
    axes.bar_label(bars, [f"{t:,.0f}" for t in times_ms], color="grey", fontsize=8, padding=2)
    axes.margins(x=0.15)


def draw_modes():
    """Step times of all modes, a panel for each W."""
    times = step_times(BENCH / "modes.jsonl")
    worlds = sorted({W for row, W in times if W > 1})
    if not worlds:
        refuse("out/bench/modes.jsonl has no run on several ranks")
    pyplot = pyplot_on_nothing()
    figure, panels = pyplot.subplots(1, len(worlds), figsize=(9, 3.6), sharey=True, squeeze=False)
    for axes, W in zip(panels[0], worlds):
        rows = [row for row, its_W in times if its_W == W]
        draw_bars(axes, rows, [times[row, W] for row in rows])
        axes.set_title(f"W = {W}", fontsize=10)
        axes.set_xlabel("ms a step")
    save(figure, "modes")


def draw_link(paths):
    """Step times over slow links, a panel for each file, with an axis of its own."""
    pyplot = pyplot_on_nothing()
    figure, panels = pyplot.subplots(1, len(paths), figsize=(9, 3), sharey=True, squeeze=False)
    for axes, path in zip(panels[0], paths):
        times = step_times(path)
        rate = json.loads(path.read_text().splitlines()[0])["label"]
        if not rate.endswith("bit"):
            refuse(f"{path} is not of ./bench.sh link")
        rows = [row for row, W in times]
        names = []
        for row in rows:
            mode, *flags = row.split()
            names.append(f"{mode}, {flags[1]}" if flags else mode)
        draw_bars(axes, names, [times[row, 2] for row in rows])
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(rate, fontsize=10)
        axes.set_xlabel("ms a step")
    save(figure, "link")


def draw_loss(path):
    """Training loss, smoothed, and validation loss of a run."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        refuse(f"{path} does not have the metrics of a run: {error}")
    losses = [line["loss"] for line in lines]
    steps = range(SMOOTHED, len(losses) + 1, SMOOTHED)
    means = [statistics.mean(losses[step - SMOOTHED:step]) for step in steps]
    evaluated = [line for line in lines if "val_loss" in line]
    pyplot = pyplot_on_nothing()
    figure, axes = pyplot.subplots(figsize=(9, 2.6))
    axes.plot(steps, means, color=OURS, label="training")
    axes.plot([line["step"] for line in evaluated], [line["val_loss"] for line in evaluated],
              color=OURS, marker="o", linestyle="none", label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.legend()
    save(figure, "loss")


def files_of(name):
    """The Python files of a file or folder of the picture."""
    return sorted(ROOT.glob(f"{name}*.py")) if name.endswith("/") else [ROOT / name]


def imported_by(name):
    """The files and folders of the picture that a file, or those of a folder, import."""
    modules = set()
    for path in files_of(name):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules.update(alias.name.split(".")[0] for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module.split(".")[0])
    found = []
    for other in FILES:
        module = other.removesuffix(".py").removesuffix("/")
        if other != name and module in modules:
            found.append(other)
    return found


def rounded_lines(name):
    """Lines of a file or folder, to the nearest 50."""
    n = sum(len(path.read_text().splitlines()) for path in files_of(name))
    return 50 * round(n / 50)


def draw_files():
    """A row for each file: its lines, and a dot below each file that it imports."""
    pyplot = pyplot_on_nothing()
    figure, (lines, dots) = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for row, name in enumerate(FILES):
        n = rounded_lines(name)
        color = OURS if name in IDEA else "grey"
        lines.barh(row, n, 0.6, color=color)
        lines.text(n + 60, row, f"{n:,}", color="grey", fontsize=9, va="center")
        dots.axhline(row, color="grey", linewidth=0.3)
        for other in imported_by(name):
            dots.plot(FILES.index(other), row, "o", color=OURS if other in IDEA else "grey")
    lines.set_yticks(range(len(FILES)), FILES)
    lines.invert_yaxis()
    lines.set_xlabel("lines, to the nearest 50; violet: the idea, and its fast form")
    dots.set_xticks(range(len(FILES) - 1), FILES[:-1], rotation=40, ha="left")
    dots.xaxis.tick_top()
    dots.tick_params(length=0)
    dots.set_xlabel("a dot: the file on the left imports the one above")
    save(figure, "files")


def most_held(path):
    """A trace of `bench/timeline.py run` -> [parameters, gradients, optimizer state], in bytes a
    parameter, at the moment when their sum is largest."""
    held = []
    for span in read_spans(path):
        if span.kind == "bytes":
            held.append(json.loads(span.what))
    return max(held, key=sum)


def draw_memory():
    """What rank 0 of four holds, in the order of the stages."""
    W = 4
    modes = list(WHOLE)
    pyplot = pyplot_on_nothing()
    figure, axes = pyplot.subplots(figsize=(9, 2.6))
    for place, mode in enumerate(modes):
        path = BENCH / f"{mode}, W={W}, rank 0.json"
        if not path.exists():
            refuse(f"{path} is missing: run ./bench.sh memory")
        held = most_held(path)
        left = 0
        for n_bytes, (kind, color) in zip(held, KINDS.items()):
            label = kind if place == 0 else None
            axes.barh(place, n_bytes, left=left, color=color, label=label)
            left += n_bytes
        formula = WHOLE[mode] + (16 - WHOLE[mode]) / W
        axes.text(left + 0.2, place, f"{left:.1f}; formula {formula:.0f}", va="center", fontsize=9)
        for color, line in (("black", "-"), ("white", "--")):
            axes.plot([formula, formula], [place - 0.4, place + 0.4], color=color, linestyle=line)
        print(f"{mode}: {[round(n, 2) for n in held]}, in all {left:.2f}, formula {formula}")
    names = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    axes.set_yticks(range(len(modes)), [names[mode] for mode in modes])
    axes.invert_yaxis()
    axes.set_xlim(0, 20)
    axes.set_xlabel("bytes a parameter, held by one of four ranks")
    axes.legend(ncols=3, loc="lower right")
    save(figure, "memory")


def draw_step():
    """An event of the page, for light and for dark pages."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        refuse("it opens a browser with a package: pip install playwright")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        refuse("it needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path)
        for scheme, name in (("light", "step.png"), ("dark", "step-dark.png")):
            page = browser.new_page(viewport=dict(width=900, height=100), device_scale_factor=1.5,
                                    color_scheme=scheme)
            page.goto(f"{(ROOT / 'docs' / 'step.html').as_uri()}#{STILL}")
            path = ROOT / "assets" / name
            page.screenshot(path=path, full_page=True)
            print(path)


def main():
    command, *paths = sys.argv[1:] or ["--help"]
    if command == "modes" and not paths:
        draw_modes()
    elif command == "memory" and not paths:
        draw_memory()
    elif command == "link" and paths:
        draw_link([pathlib.Path(path) for path in paths])
    elif command == "loss" and len(paths) < 2:
        draw_loss(pathlib.Path(*paths or [ROOT / "out" / "metrics.jsonl"]))
    elif command == "files" and not paths:
        draw_files()
    elif command == "step" and not paths:
        draw_step()
    else:
        print(__doc__, file=sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

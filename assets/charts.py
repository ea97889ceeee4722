"""Pictures of what bench.sh has measured: out/bench/ -> assets/COMMAND.svg.

    ./bench.sh modes && python assets/charts.py modes     step time beside torch's and DeepSpeed's
    ./bench.sh memory                                     calls `python assets/charts.py memory`
    python assets/charts.py link FILE.jsonl ...           step time over slow links; each file has
                                                          the runs of one rate

Needs matplotlib. Text and axes are grey, on nothing: readable on white pages and on black ones.
"""

import json
import pathlib
import statistics
import sys

from timeline import ROOT, WHOLE, read_spans

BENCH = ROOT / "out" / "bench"
OURS = "#3f87c5"
TORCHS = "#b9791c"
DEEPSPEEDS = "#7a62b8"
KINDS = {"parameters": "#3f87c5", "gradients": "#b9791c", "Adam": "#3f9a66"}


def refuse(why):
    print(f"charts.py: {why}", file=sys.stderr)
    sys.exit(2)


def pyplot_on_nothing():
    """matplotlib's pyplot, for pictures without a background."""
    try:
        import matplotlib
    except ImportError:
        refuse("it draws with a package: pip install matplotlib")
    matplotlib.use("svg")
    from matplotlib import pyplot

    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        pyplot.rcParams[name] = "grey"
    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text
    pyplot.rcParams["svg.hashsalt"] = "nanoZeRO"  # the same picture is the same file
    pyplot.rcParams["font.sans-serif"] = "DejaVu Sans"
    pyplot.rcParams["legend.frameon"] = False
    return pyplot


def save(figure, name):
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path = ROOT / "assets" / f"{name}.svg"
    figure.savefig(path, bbox_inches="tight", transparent=True, metadata={"Date": None})
    print(path)


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
    """Step times over slow links, on a logarithmic scale, a panel for each file."""
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
        axes.set_xscale("log")
        axes.set_xlim(500, 80_000)  # the same on all panels, with room for the numbers
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(rate, fontsize=10)
        axes.set_xlabel("ms a step (logarithmic)")
    save(figure, "link")


def most_held(path):
    """A trace of `timeline.py run` -> [parameters, gradients, optimizer state], in bytes a
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


def main():
    command, *paths = sys.argv[1:] or ["--help"]
    if command == "modes" and not paths:
        draw_modes()
    elif command == "memory" and not paths:
        draw_memory()
    elif command == "link" and paths:
        draw_link([pathlib.Path(path) for path in paths])
    else:
        print(__doc__, file=sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

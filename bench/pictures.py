"""Pictures of what bench.sh has measured, and of a run -> assets/COMMAND.svg.

    python bench/pictures.py modes [FILE]             step time beside torch's and DeepSpeed's
    python bench/pictures.py memory [FILE]            what a rank holds, a panel for each W
    python bench/pictures.py link [FILE ...]          step time, a panel for each rate
    python bench/pictures.py buckets [FILE]           step time over the size of buckets
    python bench/pictures.py precision [FILE]         training losses in fp32, bf16 and fp16
    python bench/pictures.py timeline [FILE]          a step in time: ddp.svg, zero1.svg, zero3.svg
    python bench/pictures.py loss [metrics.jsonl]     losses of a run, of out/ unless told

FILE: out/bench/COMMAND_DATE.jsonl, unless given that of the newest start of the command. With
--into FOLDER pictures go there, and not into assets/.

Needs matplotlib. Text and axes are grey, on nothing: readable on white pages and on black ones.
"""

import argparse
import json
import pathlib
import statistics
import sys

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench import timeline
from bench.tables import bucket_mb, formula, newest, read_results
from bench.timeline import KINDS, most_held, pyplot_on_nothing, refuse, ROOT, save

OURS = "#7a62b8"
TORCHS = "#bf4f86"
DEEPSPEEDS = "#2a9d9d"
SMOOTHED = 20  # steps whose mean is a point of the training loss


def measured(command, path):
    """Results of a file, or of the newest start of a command; refuses where nothing went through.
    """
    path = newest(command) if path is None else pathlib.Path(path)
    results = read_results(path)
    if results.start["command"] != command:
        refuse(f"{path} is of ./bench.sh {results.start['command']}, not of {command}")
    if not results.runs:
        refuse(f"{path} has no run that went through")
    return results


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


def draw_modes(folder, path=None):
    """Step times of all modes, a panel for each W."""
    results = measured("modes", path)
    worlds = [W for W in results.worlds if W > 1]
    if not worlds:
        refuse(f"{results.folder}.jsonl has no run on several ranks")
    pyplot = pyplot_on_nothing()
    figure, panels = pyplot.subplots(1, len(worlds), figsize=(9, 3.6), sharey=True, squeeze=False)
    for axes, W in zip(panels[0], worlds):
        keys = [key for key in results.runs if key[2] == W]
        rows = [row for _, row, _ in keys]
        draw_bars(axes, rows, [results.median(key, "step_ms") for key in keys])
        axes.set_title(f"W = {W}", fontsize=10)
        axes.set_xlabel("ms a step")
    save(figure, "modes", folder)


def draw_link(folder, *paths):
    """Step times over slow links, a panel for each rate, with an axis of its own."""
    panels_of = []  # (results, rate)
    for path in paths or (None,):
        results = measured("link", path)
        panels_of += [(results, rate) for rate in results.labels]
    pyplot = pyplot_on_nothing()
    figure, panels = pyplot.subplots(1, len(panels_of), figsize=(9, 3), squeeze=False)
    for axes, (results, rate) in zip(panels[0], panels_of):
        keys = [key for key in results.runs if key[0] == rate]
        names = [name_on_link(row, W) for _, row, W in keys]
        draw_bars(axes, names, [results.median(key, "step_ms") for key in keys])
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(rate, fontsize=10)
        axes.set_xlabel("ms a step")
    figure.tight_layout()
    save(figure, "link", folder)


def name_on_link(row, W):
    """A mode and its hook. Rows with two ranks on each host say so."""
    mode, *flags = row.split()
    name = f"{mode}, {flags[1]}" if flags else mode
    return name if W == 2 else f"{name}, W={W}"


def draw_buckets(folder, path=None):
    """Step time over the size of buckets: a panel for each label and W, a line for each mode."""
    results = measured("buckets", path)
    places = list(dict.fromkeys((label, W) for label, row, W in results.runs))
    modes = list(dict.fromkeys(row.split()[0] for row in results.rows))
    pyplot = pyplot_on_nothing()
    figure, panels = pyplot.subplots(1, len(places), figsize=(9, 3), squeeze=False)
    for axes, (label, W) in zip(panels[0], places):
        for mode in modes:
            points = []
            for key in results.runs:
                if key[0] == label and key[2] == W and key[1].split()[0] == mode:
                    points.append((bucket_mb(key[1]), results.median(key, "step_ms")))
            axes.plot(*zip(*sorted(points)), marker="o", label=mode)
        axes.set(title=f"{label}, W = {W}", xscale="log", xlabel="MB of a bucket",
                 ylabel="ms a step")
        sizes = sorted({bucket_mb(row) for row in results.rows})
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
    figure.tight_layout()
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(modes), loc="lower center", bbox_to_anchor=(0.5, 1))
    save(figure, "buckets", folder)


STYLES = {"--dtype fp32": "-", "--dtype bf16": "--", "--dtype fp16": ":"}  # of lines; others: -.


def draw_precision(folder, path=None):
    """Training losses of all rows: a colour for each mode, a style of line for each precision."""
    results = measured("precision", path)
    pyplot = pyplot_on_nothing()
    figure, axes = pyplot.subplots(figsize=(9, 4))
    colors = {}  # of modes
    for key in results.runs:
        mode, _, flags = key[1].partition(" ")
        color = colors.setdefault(mode, f"C{len(colors)}")
        metrics = results.folder / f"{results.first(key)['name']}.metrics.jsonl"
        steps, means = smoothed([line["loss"] for line in lines_of(metrics)])
        axes.plot(steps, means, color=color, linestyle=STYLES.get(flags, "-."),
                  label=f"{mode} {flags.replace('--', '')}")
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend(fontsize=7, ncols=2)
    save(figure, "precision", folder)


def lines_of(metrics):
    try:
        return [json.loads(line) for line in pathlib.Path(metrics).read_text().splitlines()]
    except (OSError, ValueError) as error:
        refuse(f"{metrics} does not have the metrics of a run: {error}")


def smoothed(losses):
    """-> steps, and the mean loss of the SMOOTHED steps that end there; of fewer steps all losses.
    A step whose loss is not finite has None, and does not count."""
    width = SMOOTHED if len(losses) >= SMOOTHED else 1
    steps = []
    means = []
    for step in range(width, len(losses) + 1, width):
        finite = [loss for loss in losses[step - width:step] if loss is not None]
        if finite:
            steps.append(step)
            means.append(statistics.mean(finite))
    return steps, means


def draw_loss(folder, path=ROOT / "out" / "metrics.jsonl"):
    """Training loss, smoothed, and validation loss of a run."""
    lines = lines_of(path)
    steps, means = smoothed([line["loss"] for line in lines])
    evaluated = [line for line in lines if "val_loss" in line]
    pyplot = pyplot_on_nothing()
    figure, axes = pyplot.subplots(figsize=(9, 2.6))
    axes.plot(steps, means, color=OURS, label="training")
    axes.plot([line["step"] for line in evaluated], [line["val_loss"] for line in evaluated],
              color=OURS, marker="o", linestyle="none", label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.legend()
    save(figure, "loss", folder)


def draw_memory(folder, path=None):
    """What rank 0 holds, in the order of the stages; a panel for each W."""
    results = measured("memory", path)
    pyplot = pyplot_on_nothing()
    n = len(results.worlds)
    figure, panels = pyplot.subplots(n, figsize=(9, 1 + 1.6 * n), sharex=True, squeeze=False)
    for axes, W in zip(panels[:, 0], results.worlds):
        draw_held(axes, results, W)
        ranks = "one process" if W == 1 else f"one of {W} ranks"
        axes.set_title(f"held by {ranks}", fontsize=9, loc="left")
    axes.set_xlabel("bytes a parameter")
    axes.legend(ncols=3, loc="lower right")
    figure.tight_layout()
    save(figure, "memory", folder)


NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def draw_held(axes, results, W):
    keys = [key for key in results.runs if key[2] == W]
    for place, key in enumerate(keys):
        _, mode, _ = key
        path = results.folder / f"{results.first(key)['name']}, rank 0.json"
        held = most_held(path)
        left = 0
        for n_bytes, (kind, color) in zip(held, KINDS.items()):
            label = kind if place == 0 else None
            axes.barh(place, n_bytes, left=left, color=color, label=label)
            left += n_bytes
        expected = formula(mode, W)
        axes.text(left + 0.2, place, f"{left:.1f}; formula {expected:.0f}", va="center",
                  fontsize=9)
        for color, line in (("black", "-"), ("white", "--")):
            axes.plot([expected] * 2, [place - 0.4, place + 0.4], color=color, linestyle=line)
        print(f"{mode}, W={W}: {[round(n, 2) for n in held]}, in all {left:.2f}, formula "
              f"{expected}")
    axes.set_yticks(range(len(keys)), [NAMES[mode] for _, mode, _ in keys])
    axes.invert_yaxis()
    axes.set_xlim(0, 22)


def draw_timeline(folder, path=None):
    """A picture for each mode, of its traces."""
    results = measured("timeline", path)
    for key in results.runs:
        _, mode, W = key
        name = results.first(key)["name"]
        traces = [results.folder / f"{name}, rank {rank}.json" for rank in range(W)]
        timeline.draw(mode, traces, folder)


# What draws a picture, and the most FILEs that it takes.
PICTURES = {
    "modes": (draw_modes, 1),
    "memory": (draw_memory, 1),
    "link": (draw_link, 100),
    "buckets": (draw_buckets, 1),
    "precision": (draw_precision, 1),
    "timeline": (draw_timeline, 1),
    "loss": (draw_loss, 1),
}


def main():
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)
        return 0
    parser = argparse.ArgumentParser(add_help=False)
    parser.error = refuse
    parser.add_argument("picture", nargs="?")
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--into", default=ROOT / "assets")
    given = parser.parse_intermixed_args()
    draw, most = PICTURES.get(given.picture, (None, 0))
    if draw is None or len(given.paths) > most:
        print(__doc__, file=sys.stderr)
        return 2
    draw(given.into, *given.paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())

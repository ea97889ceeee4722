"""A picture of a table: bars, a row each, or lines, in panels side by side.

Text and axes are grey, on nothing: readable on white pages and on black ones.
"""

import math

OURS, TORCHS, DEEPSPEEDS = "#7a62b8", "#bf4f86", "#2a9d9d"
STACKED = ("#3f87c5", "#b9791c", "#3f9a66")  # of bars that follow each other


def pyplot_on_nothing():
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        pyplot.rcParams[name] = "grey"
    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text
    pyplot.rcParams["svg.hashsalt"] = "nanoZeRO"  # the same picture is the same file
    pyplot.rcParams["font.sans-serif"] = "DejaVu Sans"
    pyplot.rcParams["legend.frameon"] = False
    return pyplot


def draw(rows: list, picture, path: str) -> None:
    """rows: {column: value} each; picture: of bench/tables.py."""
    pyplot = pyplot_on_nothing()
    panels = list(dict.fromkeys(row[picture.panel] for row in rows))
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(9, 3.6), squeeze=False)
    for axes, panel in zip(all_axes[0], panels):
        of_panel = [row for row in rows if row[picture.panel] == panel]
        if picture.x is None:
            draw_bars(axes, of_panel, picture)
        else:
            draw_lines(axes, of_panel, picture)
        axes.set_title(f"W = {panel}" if picture.panel == "W" else panel, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    if picture.x is not None or len(picture.y) > 1:
        handles, labels = all_axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=len(labels), loc="lower center",
                      bbox_to_anchor=(0.5, 1))
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight", transparent=True, metadata={"Date": None})


def color_of(mode):
    if mode.startswith("torch"):
        return TORCHS
    return DEEPSPEEDS if mode.startswith("deepspeed") else OURS


def draw_bars(axes, rows, picture):
    """From top to bottom, each with its number; a dark line at its mark."""
    for place, row in enumerate(rows):
        left = 0.0
        for number, name in enumerate(picture.y):
            color = color_of(row["row"]) if len(picture.y) == 1 else STACKED[number]
            label = name if place == 0 else None
            axes.barh(place, row[name], left=left, color=color, label=label)
            left += row[name]
        text = f"{left:,.1f}" if left < 100 else f"{left:,.0f}"
        if picture.mark is not None:
            mark = row[picture.mark]
            text += f"; {picture.mark} {mark:.1f}"
            for color, line in (("black", "-"), ("white", "--")):
                axes.plot([mark, mark], [place - 0.4, place + 0.4], color=color, linestyle=line)
        axes.text(left, place, f" {text}", va="center", fontsize=8)
    names = []
    for row in rows:
        name = row["row"].replace("--", "")
        names.append(name if picture.panel == "W" else f"{name}, W={row['W']}")
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.set_xlabel(picture.y[0] if len(picture.y) == 1 else "bytes a parameter")


def draw_lines(axes, rows, picture):
    for name in dict.fromkeys(row[picture.line] for row in rows):
        points = [(row[picture.x], row[picture.y[0]]) for row in rows if row[picture.line] == name]
        points = sorted(point for point in points if not math.isnan(point[1]))
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set(xlabel=picture.x, ylabel=picture.y[0], xscale="log")
    ticks = sorted({row[picture.x] for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()

"""A step in time: traces with more ranges, how much of communication is hidden, pictures.

    torchrun --nproc_per_node=2 bench/timeline.py run --mode zero3 --profile 1
                                    train.py with these flags; its traces have more ranges
    python bench/timeline.py overlap TRACE.json ...
                                    a table: communication that is hidden by computing
    python bench/timeline.py draw zero3 TRACE_OF_RANK_0.json TRACE_OF_RANK_1.json ...
                                    the picture assets/zero3.svg, which needs matplotlib

bench.sh and bench/pictures.py call it. Traces are those of --profile: in out_dir,
trace_rank0.json and so on, of processes on one machine, whose clock they share.

A range is named "kind: what". ddp.py and zero.py name the start of each collective and each wait
for it. `run` adds forward and backward of each block; and after each module's forward, where a
gradient arrives, and before the step an empty range "bytes: [parameters, gradients, optimizer
state]", in bytes a parameter. Memory of collectives does not count.
"""

import dataclasses
import json
import pathlib
import re
import runpy
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent


def refuse(why):
    print(f"{pathlib.Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    sys.exit(2)


# -------------------------------------------------------------------------------------------------
# run


def n_bytes(tensors):
    """Memory of tensors, each piece of it once, since many of them are views."""
    sizes = {}
    for t in tensors:
        storage = t.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def held_bytes(model, optimizer):
    """What this rank holds now, in bytes a parameter: [parameters, gradients, optimizer state]."""
    whole = list(model.module.parameters())
    # In the stages the wrapper's parameters are shards, in DDP the module's own.
    parameters = whole + list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    gradients += [bucket.gradients for bucket in model.buckets if bucket.gradients is not None]
    state = []
    for tensors in optimizer.state.values():
        # AdamW's step counts have no dimensions.
        state += [t for t in tensors.values() if t.dim() > 0]
    n = sum(p.numel() for p in whole)
    return [n_bytes(parameters) / n, n_bytes(gradients) / n, n_bytes(state) / n]


def name_block(block, number):
    """Name the forward and the backward of a block in traces."""
    import torch

    forward = block.forward
    backward = torch.profiler.record_function(f"backward: block {number}")

    def named_forward(*arguments, **options):
        with torch.profiler.record_function(f"forward: block {number}"):
            return forward(*arguments, **options)

    def begin(module, gradients):
        backward.__enter__()

    def end(module, gradients_in, gradients_out):
        backward.__exit__(None, None, None)

    block.forward = named_forward
    block.register_full_backward_pre_hook(begin)
    block.register_full_backward_hook(end)


def watch(model, optimizer):
    """Add ranges to all that model and optimizer do from now on."""
    import torch

    def note(*_):
        held = held_bytes(model, optimizer)
        with torch.profiler.record_function(f"bytes: {held}"):
            pass

    for number, block in enumerate(model.module.blocks):
        name_block(block, number)
    torch.nn.modules.module.register_module_forward_hook(note)
    for p in model.module.parameters():
        p.register_hook(note)
    optimizer.register_step_pre_hook(note)


def run(flags):
    """train.py with flags and more ranges, from the first step of its optimizer on."""
    sys.path.insert(0, str(ROOT))
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import ddp

    made = []  # wrappers that are not watched yet
    watched = []
    make = ddp.Reducer.__init__

    def noted_make(wrapper, *arguments, **options):
        made.append(wrapper)
        make(wrapper, *arguments, **options)

    def begin(optimizer, *_):
        if not made and not watched:
            refuse("run: choose --mode ddp, zero1, zero2 or zero3")
        while made:
            watched.append(made.pop())
            watch(watched[-1], optimizer)

    ddp.Reducer.__init__ = noted_make
    register_optimizer_step_pre_hook(begin)
    sys.argv = ["train.py", *flags]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


# -------------------------------------------------------------------------------------------------
# reading traces


@dataclasses.dataclass
class Span:
    kind: str  # start, wait, forward, backward, bytes, optimizer; kernel; sent: on its way
    what: str
    start_ms: float
    end_ms: float


def read_span(event):
    """An event of a trace -> Span."""
    kind, _, what = event["name"].partition(": ")
    if event.get("cat") == "kernel":
        what = event["name"]
        is_ours = "ccl" in what.lower()  # NCCL, RCCL, oneCCL: a kernel that communicates
        kind = "sent" if is_ours else "kernel"
    elif event["name"].startswith("Optimizer.step#"):
        kind = "optimizer"
    start_ms = event["ts"] / 1e3
    return Span(kind, what, start_ms, start_ms + event["dur"] / 1e3)


def by_start(span):
    return span.start_ms


def sent_on_cpu(spans):
    """Where there are no kernels a collective is on its way from its start to the end of its wait.

    A collective in several pieces has several waits: the last one counts.
    """
    begun = {}  # {what: when it was last started}
    sent = {}
    for span in spans:
        if span.kind == "start":
            begun[span.what] = span.start_ms
        if span.kind == "wait" and span.what in begun:
            start_ms = begun[span.what]
            sent[span.what, start_ms] = Span("sent", span.what, start_ms, span.end_ms)
    return list(sent.values())


def read_spans(path):
    """A trace -> [Span], in the order in which they start."""
    try:
        events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    except (OSError, ValueError) as error:
        refuse(f"{path} is not a trace: {error}")
    spans = []
    for event in events:
        # "X" has a duration. The device's copies of the host's ranges come at other times.
        if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation":
            spans.append(read_span(event))
    spans.sort(key=by_start)
    has_kernels = any(span.kind in ("kernel", "sent") for span in spans)
    if not has_kernels:
        spans += sent_on_cpu(spans)
    return spans


def most_held(path):
    """A trace of `run` -> [parameters, gradients, optimizer state], in bytes a parameter, at the
    moment when their sum is largest."""
    held = []
    for span in read_spans(path):
        if span.kind == "bytes":
            held.append(json.loads(span.what))
    return max(held, key=sum)


# -------------------------------------------------------------------------------------------------
# overlap


def when(spans, kind, begin_ms, end_ms):
    """For each microsecond from begin to end: whether a span of that kind is under way."""
    is_on = np.zeros(int(1e3 * (end_ms - begin_ms)) + 1, bool)
    for span in spans:
        if span.kind == kind:
            start = int(1e3 * (span.start_ms - begin_ms))
            end = int(1e3 * (span.end_ms - begin_ms))
            is_on[start:end] = True
    return is_on


def overlap(path):
    """Percent of the time of communication in which the device computes; where a trace has no
    kernels, in which the thread does not wait. None where nothing is sent."""
    spans = read_spans(path)
    begin_ms = min(span.start_ms for span in spans)
    end_ms = max(span.end_ms for span in spans)
    is_sending = when(spans, "sent", begin_ms, end_ms)
    is_computing = when(spans, "kernel", begin_ms, end_ms)
    if not is_computing.any():
        is_computing = ~when(spans, "wait", begin_ms, end_ms)
    if not is_sending.any():
        return None
    is_hidden = is_sending & is_computing
    return 100 * is_hidden.sum() / is_sending.sum()


def print_overlap(paths):
    print("| row | communication under computing, % |")
    print("| --- | --- |")
    for path in paths:
        row = pathlib.Path(path).name.removesuffix(".json")
        percent = overlap(path)
        text = "-" if percent is None else f"{percent:.1f}"
        print(f"| {row} | {text} |")
    print()


# -------------------------------------------------------------------------------------------------
# drawing

# In all pictures; seen on white and on black, as is grey.
KINDS = {"parameters": "#3f87c5", "gradients": "#b9791c", "Adam": "#3f9a66"}
COLORS = {
    "forward": "#969da6",
    "backward": "#6a727c",
    "Adam": KINDS["Adam"],
    "parameters on their way": KINDS["parameters"],
    "gradients on their way": KINDS["gradients"],
    "waiting": "#dc3d33",
}
WHOLE = {"ddp": 16, "zero1": 8, "zero2": 4, "zero3": 0}  # bytes a parameter that are not sharded
LANE = 3  # height of a rank's lane
TRACKS = 8  # of what is on its way, below what a rank does


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


def save(figure, name, folder=ROOT / "assets"):
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path = pathlib.Path(folder) / f"{name}.svg"
    figure.savefig(path, bbox_inches="tight", transparent=True, metadata={"Date": None})
    print(path)


def kind_of_sent(span):
    return "parameters" if span.what.startswith("unshard") else "gradients"


def label_of(span):
    """The number of the block that a bar belongs to, or whose parameter is the first of its bucket;
    r for the root, whose last norm begins the first bucket of DDP. Before it, of what is on its
    way, p for parameters, g for gradients. Nothing for a wait."""
    match = re.search(r"block\w*\W(\d+)", span.what)
    if span.kind == "sent":
        first_letter = kind_of_sent(span)[0]
        return first_letter + (match[1] if match else "r")
    return match[1] if match and span.kind in ("forward", "backward") else ""


def draw_lane(axes, spans, begin_ms, lane):
    """A rank's bars: what it does; below that, in turn on eight tracks, what is on its way. g3' is
    another bucket that begins in block 3."""
    n_sent = 0
    of_gradients = set()  # labels
    for span in spans:
        y, height, size = lane, 0.9, 10
        label = label_of(span)
        name = {"optimizer": "Adam", "wait": "waiting"}.get(span.kind, span.kind)
        if span.kind == "sent":
            y, height, size = lane - 0.65 - 0.24 * (n_sent % TRACKS), 0.22, 7
            kind = kind_of_sent(span)
            name = f"{kind} on their way"
            n_sent += 1
            if kind == "gradients":
                if label in of_gradients:
                    label += "'"
                of_gradients.add(label)
        if name not in COLORS:
            continue
        width = span.end_ms - span.start_ms
        left = span.start_ms - begin_ms
        bar = axes.barh(y, width, height, left, color=COLORS[name])
        axes.bar_label(bar, [label], label_type="center", color="w", fontsize=size)


def draw_memory(axes, spans, begin_ms, formula):
    times = []
    held = []
    for span in spans:
        if span.kind == "bytes":
            times.append(span.start_ms - begin_ms)
            held.append(json.loads(span.what))
    colors = list(KINDS.values())
    axes.stackplot(times, *zip(*held), step="post", labels=list(KINDS), colors=colors)
    axes.axhline(formula, color="grey", linestyle="--", label="formula")
    axes.set(xlabel="ms", ylabel="bytes a parameter", ylim=(0, 22))
    axes.legend(ncols=4, loc="upper center")


def draw(mode, paths, folder=ROOT / "assets"):
    """Traces of all ranks -> MODE.svg. What is held is that of rank 0."""
    if mode not in WHOLE:
        refuse(f"draw {mode}: choose ddp, zero1, zero2 or zero3")
    pyplot = pyplot_on_nothing()
    W = len(paths)
    traces = [read_spans(path) for path in paths]
    begin_ms = traces[0][0].start_ms
    figure, (lanes, memory) = pyplot.subplots(2, figsize=(9, 6), sharex=True, height_ratios=(3, 1))
    for rank, spans in enumerate(traces):
        draw_lane(lanes, spans, begin_ms, -LANE * rank)
    places = [-LANE * rank for rank in range(W)]
    names = [f"rank {rank}" for rank in range(W)]
    lanes.set_yticks(places, names)
    draw_memory(memory, traces[0], begin_ms, WHOLE[mode] + (16 - WHOLE[mode]) / W)
    lanes.set_title("what is on its way: from its start until the rank has waited for it",
                    fontsize=8, loc="left")

    handles = []
    for name, color in COLORS.items():
        handles.append(pyplot.Rectangle((0, 0), 1, 1, color=color, label=name))
    figure.legend(handles=handles, ncols=len(handles), loc="upper center")
    save(figure, mode, folder)


# -------------------------------------------------------------------------------------------------


def main():
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "run":
        return run(arguments)
    if command == "overlap" and arguments:
        print_overlap(arguments)
        return 0
    if command == "draw" and len(arguments) > 1:
        mode, *paths = arguments
        draw(mode, paths)
        return 0
    print(__doc__, file=sys.stderr)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())

"""Record a training step of a tiny model, number by number, into docs/step.html.

    python docs/record_step.py            # the numbers; the times that are there stay
    python docs/record_step.py --times    # a step in time, too: for root, with ip and tc, of Linux

Ranks train with DDP and Zero1 to Zero3, which are not changed: what they call is watched. An event
is a span of ddp.py or zero.py, a gradient, or what `step` and `Block` note. It has

    what    such as "start: unshard blocks.1"
    names   functions of ddp.py and zero.py that are under way: the two outer and the two inner ones
    line    [file, text]: the line that the innermost is at; if there is none, the line of `step`
    held    bytes of parameters, gradients and Adam's averages on each rank
    set     {rank, row and unit, such as "0p2": cells}, where one has changed
    starts  {number of an exchange: [[from, to, row, unit, first element, elements], ...]}
    ends    numbers of exchanges
    loss    of each rank

Rows are p, g, m, v: parameters, gradients, Adam's averages of gradients and of their squares. A
cell is an element, of 4 bytes, as a letter and a number:

    .  no memory                            z  memory of a gradient, without a value
    v  a value                              o  this rank's own gradient
    x  a value that is old, or of no use    s  the same, while it is sent and summed
    ~  a message may be writing it; the     m  the mean over ranks
       number is what was there before

An upper-case letter: there is memory for it twice, such as in a rank's own chunk and in the whole.
"""

import argparse
import contextlib
import json
import linecache
import pathlib
import sys
import tempfile
import threading
import time
import types

import torch
import torch.distributed as dist
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import ddp  # noqa: E402
import zero  # noqa: E402
from bench import launch  # noqa: E402
from verify import OURS, run  # noqa: E402

PAGE = ROOT / "docs" / "step.html"
BEGIN, END = '<script id="record" type="application/json">\n', "\n</script><!-- record -->"
# By world size the sample of each rank. Three ranks take three weights of each unit. All numbers
# of the step can be checked in one's head, and none is rounded.
SAMPLES = {2: [[2, 0, 4, -2], [2, 4, 0, 6]], 3: [[3, -3, 6], [0, 6, 3], [3, 3, -3]]}
WEIGHTS = [[1, 2, 1, 3], [2, 1, 1, 1], [1, 1, 3, 1], [1, 2, 1, 1], [2, 1, 1, 1]]
# The step in time: Mbit/s of the cable; a weight is a matrix of SIZE x SIZE, a sample has ROWS.
RATE, SIZE, ROWS, WARM_UP, STEPS = 1000, 1024, 640, 3, 9


class Block(nn.Module):
    """x times a weight, element by element, or a matrix. The root has blocks, which come next."""

    def __init__(self, name, weights, note):
        super().__init__()
        self.name, self.note = name, note
        self.weight = nn.Parameter(weights[0].clone())
        self.blocks = nn.ModuleList()
        for i, weight in enumerate(weights[1:]):
            self.blocks.append(Block(f"blocks.{i}", [weight], note))

    def forward(self, x):
        self.note(f"forward: {self.name}")
        product = x @ self.weight if self.weight.dim() == 2 else x * self.weight
        product.register_hook(lambda gradient: self.note(f"backward: {self.name}"))
        for block in self.blocks:
            product = block(product)
        return product


def step(recorder, samples):
    model, optimizer, note = recorder.model, recorder.optimizer, recorder.note
    sample = samples[dist.get_rank()]
    note("begin")
    loss = model(sample).sum()
    note("loss", loss=loss.item())
    loss.backward()
    optimizer.step()
    note("update")
    optimizer.zero_grad()
    note("zero_grad")


WATCHED = ((ddp, "span"), (zero, "span"), (ddp, "exchange"), (dist, "all_reduce"),
           (ddp.Reducer, "_gradient_is_complete"), (ddp.ReduceScatter, "add"),
           (zero.ShardedBucket, "give_means"), (zero.ShardedBucket, "hide"))


class Recorder:
    """It trains in a mode, and watches this rank, whose process should do nothing else: its methods
    with the names of WATCHED are called in place of these.

        marks    [(mark, seconds)]: e, an event; s, an exchange starts; w2, the rank begins to wait
                 for exchange 2; d2, it is done with waiting
        arrived  {number of an exchange: seconds}; sizes: the bytes that this rank sends in each
        open     (verb, what) of the span that is under way; None if its event is noted
        places   {number of a unit: its bucket, its place in it}; empty where only times count
        letters  {(row, tag of a bucket, number of a chunk): letter}, where it is not v
        means    (a bucket, its means), which shards do not have yet
        cells    {rank, row and unit: cells}, at the last event
    """

    def __init__(self, mode, weights, **adam):
        self.rank, self.W = dist.get_rank(), dist.get_world_size()
        self.peers = [rank for rank in range(self.W) if rank != self.rank]
        self.open, self.means, self.places, self.letters, self.cells = None, None, {}, {}, {}
        self.clear()
        for owner, name in WATCHED:
            setattr(owner, name, in_place_of(getattr(owner, name), getattr(self, name)))
        two_units = 2 * weights[0].nbytes  # in a bucket of DDP
        ddp.ALIGN, ddp.ALIGN_CHUNK, ddp.FIRST_BUCKET_BYTES = 1, 1, two_units  # without gaps
        options = {"bucket_cap_mb": two_units / 2**20} if mode == "ddp" else {}
        self.model = OURS[mode](Block("the root", weights, self.note), **options)
        self.optimizer = torch.optim.Adam(self.model.parameters(), **adam)

    def clear(self):
        self.events, self.marks, self.arrived, self.sizes = [], [], {}, []
        self.starts, self.ends = {}, []

    def mark(self, what):
        self.marks.append((what, time.monotonic()))

    def note(self, what, code=None, **more):
        self.mark("e")
        what = what.replace(".weight", "").replace("weight", "the root")  # units, not parameters
        event = dict(what=what, starts=self.starts, ends=self.ends, **more)
        if self.places:
            event["names"], event["line"] = code or functions_under_way()
            event["set"], event["held"] = self.look()
        self.events.append(event)
        self.starts, self.ends, self.means = {}, [], None

    @contextlib.contextmanager
    def span(self, real, verb, what):
        self.open = verb, what
        yield
        self.open = None

    def end_span(self):
        """Its event comes while the functions that make it are under way."""
        if self.open is not None:
            verb, what = self.open
            self.note(f"{verb} {what}")
            self.open = None

    def _gradient_is_complete(self, real, model, name, p):
        self.set_letters("g", model._bucket_of[name], range(self.W), "o")
        code = real.__code__
        line = line_at(code.co_filename, code.co_firstlineno)
        self.note(f"gradient: {name}", ([code.co_qualname], line))
        real(model, name, p)

    def exchange(self, real, *arguments):
        verb, what = self.open
        if verb == "start: unshard":
            return self.start("p", what.buckets[0], "~v", real, *arguments)
        letters = "sx" if verb == "start: reduce" else "~m"
        return self.start("g", what, letters, real, *arguments)

    def all_reduce(self, real, *arguments, **options):
        return self.start("g", self.open[1], "sm", real, *arguments, **options)

    def start(self, row, bucket, letters, real, *arguments, **options):
        """An exchange starts after its event, as an all-reduce writes where it reads. Letters are
        those of changed cells while it is under way, and then."""
        messages = self.messages(row, bucket, letters)
        self.sizes.append(4 * sum(n for *_, n in messages) // len(self.peers))
        number = len(self.sizes)
        self.starts[number] = messages
        changed = range(self.W) if letters == "sm" else self.peers
        self.set_letters(row, bucket, changed, letters[0])
        self.mark("s")
        self.end_span()
        work = real(*arguments, **options)

        def look():
            work.wait()
            self.arrived[number] = time.monotonic()

        def wait():
            self.mark(f"w{number}")
            thread.join()
            self.mark(f"d{number}")
            self.ends.append(number)
            self.set_letters(row, bucket, changed, letters[1])
            if letters != "sx":  # its event comes when it is added up
                self.end_span()

        thread = threading.Thread(target=look)  # the rank itself may come later
        thread.start()
        return types.SimpleNamespace(wait=wait)

    def messages(self, row, bucket, letters):
        """In a reduce-scatter each peer is sent its chunk; in an all-gather this rank's."""
        chunk_size, unit_size = bucket.n // self.W, bucket.parameters[0].numel()
        messages = []
        for peer in self.peers:
            chunk = peer if letters == "sx" else self.rank
            begin, end = chunk * chunk_size, (chunk + 1) * chunk_size
            if letters == "sm":
                begin, end = 0, bucket.n
            while begin < end:  # a chunk may lie in two units
                i, first = divmod(begin, unit_size)
                n = min(unit_size - first, end - begin)
                messages.append([self.rank, peer, row, unit_of(bucket.names[i]), first, n])
                begin += n
        return messages

    def add(self, real, scatter, out, *earlier):
        """DDP sends the sum at once, in the same event."""
        real(scatter, out, *earlier)
        _, bucket = self.open
        self.set_letters("g", bucket, [self.rank], "m")
        if isinstance(bucket, zero.ShardedBucket):
            self.means = bucket, out
            self.end_span()

    def give_means(self, real, bucket, means):
        """In Zero2 and Zero3 means have memory of their own, and that of whole gradients goes."""
        real(bucket, means)
        if means.untyped_storage().nbytes() == means.nbytes:
            self.note(f"free: gradients of {bucket}")

    def hide(self, real, bucket):
        """What others own is old, where it has memory."""
        real(bucket)
        self.set_letters("p", bucket, self.peers, "x")
        self.end_span()

    def set_letters(self, row, bucket, chunks, letter):
        for chunk in chunks:
            self.letters[row, bucket.tag, chunk] = letter

    # ---- what is in memory

    def look(self):
        """({rank, row and unit: cells}, where one has changed; bytes)"""
        changed, held = {}, {}  # held: {address of memory: bytes}
        for unit in sorted(self.places):
            bucket, i = self.places[unit]
            for row, tensors in self.tensors_of(bucket, i).items():
                parts = {}  # each memory once
                for t in tensors:
                    if t is not None:
                        memory = t.untyped_storage()
                        held[memory.data_ptr()] = memory.nbytes()
                        parts.setdefault(memory.data_ptr(), part_of(bucket, i, memory))
                key = f"{self.rank}{row}{unit}"
                before = self.cells.get(key)
                self.cells[key] = self.cells_of(bucket, i, row, parts.values(), before)
                if self.cells[key] != before:
                    changed[key] = " ".join(self.cells[key])
        return changed, sum(held.values())

    def tensors_of(self, bucket, i):
        """{row: tensors in whose memory a parameter has elements}, the one to be shown first."""
        p = shard = bucket.parameters[i]
        whole = means = None
        if isinstance(bucket, zero.ShardedBucket):
            shard, whole = bucket.shards[i], bucket.whole
        if self.means is not None and self.means[0] is bucket:
            means = self.means[1]
        state = self.optimizer.state[shard]
        return dict(p=[shard, whole], g=[means, shard.grad, p.grad, bucket.gradients],
                    m=[state["exp_avg"]], v=[state["exp_avg_sq"]])

    def cells_of(self, bucket, i, row, parts, before):
        cells = []
        p, (_, _, begin) = bucket.parameters[i], bucket.layouts[i]
        for element in range(p.numel()):
            chunk = (begin + element) // (bucket.n // self.W)
            letter = self.letters.get((row, bucket.tag, chunk), "v")
            numbers = []
            for first, values in parts:
                if first <= element < first + len(values):
                    numbers.append(values[element - first])
            if not numbers:
                cell = "."
            elif row == "g" and p.grad is None and bucket.gradients is not None:
                cell = "z"
            elif letter == "~" or (letter == "s" and before[element][0] == "s"):
                cell = letter + before[element][1:]  # not read, as a message may be writing it
            else:
                cell = f"{letter}{numbers[0].item():.4g}"
            cells.append(cell[0].upper() + cell[1:] if len(numbers) > 1 else cell)
        return cells


def in_place_of(real, watch):
    """A function, and so a method of a class, that calls watch(real, ...)."""
    def call(*arguments, **options):
        return watch(real, *arguments, **options)
    return call


def unit_of(parameter):
    return 0 if parameter == "weight" else 1 + int(parameter.split(".")[1])


def part_of(bucket, i, memory):
    """(first element, values) that a memory has of a parameter: it is a whole bucket's, or its own,
    or a chunk's."""
    flat = torch.empty(0).set_(memory)
    p = bucket.parameters[i]
    if flat.numel() == bucket.n:
        return 0, bucket.views(flat)[i]
    if flat.numel() == p.numel():
        return 0, flat
    return bucket.firsts[i], bucket.parts(flat)[i]


def line_at(file, number):
    return [str(pathlib.Path(file).relative_to(ROOT)), linecache.getline(file, number).strip()]


def functions_under_way():
    """(names, line): methods of the wrapper, and the first function of another kind that they call.
    Without any the line is that of `step`; if that is a note, the line above it."""
    frames, names = [], []
    frame = sys._getframe()
    while frame.f_code is not step.__code__:
        is_ours = frame.f_code.co_filename in (ddp.__file__, zero.__file__)
        if is_ours and frame.f_code.co_name != "forward":  # it is around all of the module's
            frames.insert(0, frame)
        frame = frame.f_back
    number = frame.f_lineno
    for frame in frames:
        names.append(frame.f_code.co_qualname.removesuffix(".__init__"))
        number = frame.f_lineno
        if not names[-1].startswith(("Reducer.", "DDP.", "Zero")):
            break
    line = line_at(frame.f_code.co_filename, number)
    if line[1].startswith("note("):
        line = line_at(__file__, number - 1)
    return names[:2] + names[2:][-2:], line


def record(mode):
    """-> [event] of this rank, in the second step. The first one learns the order of use; in it
    each number falls by 1."""
    samples = torch.tensor(SAMPLES[dist.get_world_size()], dtype=torch.float)
    weights = torch.tensor(WEIGHTS, dtype=torch.float)[:, :samples.shape[1]] + 1
    recorder = Recorder(mode, weights, lr=1, betas=(0.5, 0.75))
    step(recorder, torch.full_like(samples, len(samples)))
    for state in recorder.optimizer.state.values():
        for t in state.values():
            t.zero_()  # in Adam's first step a number moves by lr, whatever its gradient is
    recorder.clear()
    for bucket in recorder.model.buckets:
        for i, name in enumerate(bucket.names):
            recorder.places[unit_of(name)] = bucket, i
    step(recorder, samples)
    return recorder.events


def record_run(mode, W):
    """-> [event] of all ranks together."""
    events = []
    for of_ranks in zip(*run(W, record, mode), strict=True):
        event = dict(of_ranks[0], held=[], set={}, starts={})
        if "loss" in event:
            event["loss"] = [of_rank["loss"] for of_rank in of_ranks]
        for of_rank in of_ranks:
            for key in ("what", "names", "line", "ends"):
                if of_rank[key] != event[key]:
                    raise RuntimeError(f"{mode}: {event} of rank 0, and {of_rank}")
            event["held"].append(of_rank["held"])
            event["set"] |= of_rank["set"]
            for number, messages in of_rank["starts"].items():
                event["starts"].setdefault(number, []).extend(messages)
        events.append(event)
    return events


# -------------------------------------------------------------------------------------------------
# times


def time_rank(mode):
    """A rank of `time_on_cable`. The shortest step is kept."""
    dist.init_process_group("gloo")
    recorder = Recorder(mode, torch.full((5, SIZE, SIZE), 1 / SIZE), lr=1e-6)
    steps = []
    for _ in range(WARM_UP + STEPS):
        recorder.clear()
        dist.barrier()
        step(recorder, torch.ones(2, ROWS, SIZE))
        steps.append(step_in_ms(recorder))
    if dist.get_rank() == 0:
        shortest = min(steps[WARM_UP:], key=lambda of_step: max(map(max, of_step["times"])))
        print("RESULT", json.dumps(shortest))
    dist.destroy_process_group()


def step_in_ms(recorder):
    """What the page has of a step. A collective."""
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, (recorder.marks, recorder.arrived))
    begin = min(marks[0][1] for marks, _ in of_ranks)
    times, arrivals = [], []
    for marks, arrived in of_ranks:
        times.append([round(1e3 * (moment - begin), 2) for _, moment in marks])
        moments = [arrived[number] for number in sorted(arrived)]
        arrivals.append([round(1e3 * (moment - begin), 2) for moment in moments])
    return dict(marks=[mark for mark, _ in recorder.marks], bytes=recorder.sizes, times=times,
                arrived=arrivals)


def time_on_cable():
    """Two ranks in two network namespaces."""
    modes = {}
    with tempfile.TemporaryDirectory() as folder, launch.cable(f"{RATE}mbit") as hosts:
        path = pathlib.Path(folder)
        for mode in OURS:
            ranks = launch.Run(mode, 2, ("--rank", mode), program="docs/record_step.py")
            modes[mode] = launch.launch(ranks, hosts, 29478, path, path / "log")[-1]
            if "failed" in modes[mode]:
                sys.exit(f"no times: {modes[mode]['failed']}")
            del modes[mode]["metrics"]  # a training has them
    return dict(rate=RATE, size=SIZE, samples=ROWS, steps=STEPS, runs=modes)


def parts_of_page():
    """What is before the record, the record, and what is after it."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    text, _, tail = rest.partition(END)
    return head, json.loads(text), tail


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", action="store_true", help="record a step in time, too")
    parser.add_argument("--rank", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return time_rank(options.rank)
    times = time_on_cable() if options.times else None  # first, as it may be refused
    runs = {}
    for mode in OURS:
        for W in SAMPLES:
            runs[f"{mode} {W}"] = record_run(mode, W)
    head, page, tail = parts_of_page()
    times = times or page["times"]
    text = json.dumps(dict(samples=SAMPLES, runs=runs, times=times), separators=(",", ":"))
    for begin in ('{"what"', '"times"'):
        text = text.replace(begin, "\n" + begin)  # a line for each event
    PAGE.write_text(head + BEGIN + text + END + tail)


if __name__ == "__main__":
    main()

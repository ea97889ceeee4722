"""Record a training step of a tiny model, number by number, for docs/step.html.

    python docs/record_step.py            # write what happens into docs/step.html
    python docs/record_step.py --check    # exit status 1 if something else is there, but for times
    python docs/record_step.py --keep_times    # write all but times

Nothing is simulated: two processes, and then three, train with the classes of ddp.py and zero.py.
These are not changed. What they call is watched: `span`, which names ranges of a profile ("start:
", "wait: ", "free: "), `exchange` and `all_reduce`, which send, `add_in_rank_order`,
`Reducer._mark_param_ready` and `Bucket.put`. Each range is an event, and so are a gradient and the
lines of a training loop; what the buffers hold then is written down. All ranks have the same
events, so the i-th of each is one event of the record:

    what      such as "start: unshard blocks.1", as `train.py --trace` prints it, without sizes
    code      functions of ddp.py and zero.py that are under way, from the outermost in
    line      [file, text]: the line that is under way in the function of these which does it; where
              there are none, a line of this file
    held      bytes of parameters, gradients and Adam's averages on each rank
    set       {rank, row and number of the unit, such as "0p2": cells}, where one has changed
    starts    {number of an exchange: [[from, to, row, unit, first element, elements], ...]}
    ends      numbers of exchanges
    loss      of each rank

Rows are p, g, m, v: parameters, gradients, and Adam's averages of gradients and of their squares.
A cell is an element, of 4 bytes, as a letter and a number:

    .  no memory                            z  memory of a gradient, without a value
    v  a value                              o  this rank's own gradient
    x  a value that is old, or of no use    s  the same, while it is sent and summed
    ~  is being written by a message; the   m  the mean over ranks
       number is what was there before

An upper-case letter: there is memory for it twice, such as in the own chunk and in the whole.

The times of a step are those of a larger model over a slow link: see time_step.py.
"""

import argparse
import contextlib
import functools
import json
import linecache
import pathlib
import re
import sys
import types
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from dropin import ddp, zero
from tests.ranks import gather
from verify import Failure, run

MODES = {"ddp": ddp.PlainDDP}
for stage in (zero.PlainZero1, zero.PlainZero2, zero.PlainZero3):
    name = stage.__name__.removeprefix("Plain").lower()
    MODES[name] = type(stage.__name__, (zero.StateDicts, stage), {})  # for full_parameters()
# Of the root and four blocks, when the step begins; three ranks take the first three of each. All
# numbers of the step can be checked in one's head, and none is rounded.
WEIGHTS = [[1, 2, 1, 3], [2, 1, 1, 1], [1, 1, 3, 1], [1, 2, 1, 1], [2, 1, 1, 1]]
# What lines of `record`, and of a block, begin with.
SCRIPT = {"begin": "model = MODES[mode](", "forward": "product = x *",
          "loss": "loss = model(sample", "backward": "loss.backward()",
          "update": "optimizer.step()", "zero_grad": "optimizer.zero_grad()"}
SAMPLES = {2: [[2, 0, 4, -2], [2, 4, 0, 6]], 3: [[3, -3, 6], [0, 6, 3], [3, 3, -3]]}


class Factor(nn.Module):
    """x times a weight, element by element: a block. It notes when its forward and its backward
    begin."""

    def __init__(self, name, values, note):
        super().__init__()
        self.name, self.note = name, note
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float))

    def forward(self, x):
        self.note(f"forward: {self.name}")
        product = x * self.weight
        product.register_hook(lambda gradient: self.note(f"backward: {self.name}"))
        return product


class Product(Factor):
    """x * root * block 0 * block 1 * ..., and the sum over elements."""

    def __init__(self, n, note):
        root, *blocks = [[value + 1 for value in values[:n]] for values in WEIGHTS]
        super().__init__("the root", root, note)
        self.blocks = nn.ModuleList()
        for i, values in enumerate(blocks):
            self.blocks.append(Factor(f"blocks.{i}", values, note))

    def forward(self, x):
        product = super().forward(x)
        for block in self.blocks:
            product = block(product)
        return product.sum()


def unit_name(fqn):
    """Of the unit to which a parameter belongs: each has one."""
    return "the root" if fqn == "weight" else fqn.removesuffix(".weight")


def addresses(t):
    """Of the elements of t, which has no gaps."""
    return range(t.data_ptr(), t.data_ptr() + t.nbytes, t.itemsize)


def is_collective(name):
    """Whether a function's body is left out: it is read by its contract, the table in ddp.py."""
    return name.startswith(("start_all_", "start_reduce_", "AllReduce.", "ReduceScatter."))


def frames_under_way():
    """Those of functions of ddp.py and zero.py on the stack, from the one that a hook or autograd
    has called, in, to the first collective."""
    frames = []
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        is_ours = code.co_filename in (ddp.__file__, zero.__file__)
        # Around a hook, a note, or the module.
        shells = "weakly", "unless_compiling", "call_note", "Wrapper.forward", "PlainZero3.forward"
        if is_ours and not code.co_qualname.startswith((*shells, "PlainDDP.forward")):
            frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    for i, frame in enumerate(frames):
        if is_collective(name_of(frame.f_code)):
            return frames[:i + 1]
    return frames


def name_of(code):
    return code.co_qualname.replace(".<locals>", "")


def line_at(path, number):
    """[file, text] of a statement that begins there; of a named range, of the last one in it."""
    text = linecache.getline(path, number).strip()
    if text.startswith("with span("):
        outside = indent(path, number)
        while indent(path, number + 1) > outside:
            number += 1
        text = linecache.getline(path, number).strip()
    while text.count("(") > text.count(")"):
        number += 1
        text += " " + linecache.getline(path, number).strip()
    text, *_ = text.split("  # ")
    return [str(pathlib.Path(path).relative_to(ROOT)), text]


def what_runs():
    """(names of functions under way, the line of the one that does it: the innermost of a mode)."""
    frames = frames_under_way()
    if not frames:
        return None
    names = [name_of(frame.f_code) for frame in frames]
    of_modes = [frame for frame, name in zip(frames, names) if name.startswith("Plain")]
    frame = of_modes[-1] if of_modes else frames[-1]
    return names, line_at(frame.f_code.co_filename, frame.f_lineno)


def indent(path, number):
    line = linecache.getline(path, number)
    return len(line) - len(line.lstrip()) if line.strip() else 0


def line_of_script(kind):
    """[file, text] of the line of this file that an event is about, where no function of ddp.py or
    zero.py is under way."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    first = [line.strip().startswith(SCRIPT[kind]) for line in lines].index(True)
    return line_at(__file__, first + 1)


def parts_in_memory(slot, optimizer):
    """{row: [(first element, tensor)]}: which parts of a parameter this rank has: a gradient that
    waits comes first, then the own chunk, then all of it, if that is there."""
    bucket = slot.bucket
    state = optimizer.state[slot.shard]
    is_sharded = isinstance(bucket, zero.ShardedBucket)
    first, _ = bucket.shard_range(slot) if is_sharded else (0, None)
    parts = {"p": [(first, slot.shard)], "g": [], "m": [(first, state["exp_avg"])],
             "v": [(first, state["exp_avg_sq"])]}
    gradient = slot.parameter.grad
    if gradient is not None and not zero.is_in_memory_of(gradient, bucket.gradients):
        parts["g"].append((0, gradient))
    if is_sharded and bucket.sharded_gradients is not None:
        parts["g"].append((first, bucket.shard_view(slot, bucket.sharded_gradients)))
    if bucket.gradients is not None:
        parts["g"].append((0, bucket.view(slot, bucket.gradients)))
    if is_sharded and bucket.unsharded is not None:
        parts["p"].append((0, bucket.view(slot, bucket.unsharded)))
    return parts


class Recorder:
    """Of this rank. It records nothing before it is given a model.

        events   a dict each, of this rank alone
        cells    those of the last event
        kinds    {address of a gradient's element: o, s, x or m, as above}
        written  {address that a message may be writing: the number that it had before, if the
                 message is a sum that began with it; otherwise None}
        open     names of ranges under way; None in place of one that was noted
        starts, ends, code   what goes into the next event; code as of `what_runs`
    """

    def __init__(self):
        self.rank, self.W = dist.get_rank(), dist.get_world_size()
        self.model, self.optimizer = None, None
        self.events, self.cells = [], {}
        self.kinds, self.written, self.open = {}, {}, []
        self.n_exchanges = 0
        self.starts, self.ends, self.code = {}, [], None

    # ---- what happens

    @contextlib.contextmanager
    def watching(self):
        watched = [mock.patch.object(ddp, "span", self.range),
                   mock.patch.object(zero, "span", self.range),
                   mock.patch.object(ddp, "exchange", self.watched_exchange(ddp.exchange)),
                   mock.patch.object(dist, "all_reduce", self.watched_all_reduce(dist.all_reduce)),
                   mock.patch.object(ddp, "add_in_rank_order",
                                     self.watched_add(ddp.add_in_rank_order))]
        for kind in (ddp.Bucket, zero.ShardedBucket):
            watched.append(mock.patch.object(kind, "put", self.watched_put(kind.put)))
        with contextlib.ExitStack() as stack:
            for patch in watched:
                stack.enter_context(patch)
            yield

    @contextlib.contextmanager
    def range(self, *what):
        """In place of a profile's: an event at its end, or where another one begins in it, as
        gradients are freed inside of the range in which they are waited for."""
        self.note_range()
        self.open.append(ddp.text_of(*what))
        yield
        self.note_range()
        self.open.pop()

    def note_range(self):
        name = self.open[-1] if self.open else None
        if name is None:
            return  # noted already
        if name.startswith("wait: ") and not self.ends:
            return  # nothing has arrived
        self.open[-1] = None
        name = re.sub(r" \([\d.]+ MB\)", "", name)  # 0.00 for all
        self.note(re.sub(r"from (\S+)", lambda match: f"from {unit_name(match[1])}", name))

    def watched_exchange(self, exchange):
        def start(sends, receives, process_group, tag):
            messages_under_way = exchange(sends, receives, process_group, tag)
            # In a reduce-scatter each rank gets another chunk, in an all-gather the same one.
            is_reduce = sends[0].data_ptr() != sends[1].data_ptr()
            places = self.places()
            sent, received, messages = [], [], []
            for peer in range(self.W):
                if peer != self.rank:
                    sent += addresses(sends[peer])
                    # What arrives for a sum is no cell, and is added up later.
                    received += [a for a in addresses(receives[peer]) if a in places]
                    messages += self.messages(peer, sends[peer])
            if is_reduce:
                self.kinds.update(dict.fromkeys(sent, "s"))
            end = self.start(messages, dict.fromkeys(received))

            def wait_and_note():
                messages_under_way.wait()
                if is_reduce:
                    self.kinds.update(dict.fromkeys(sent, "x"))
                end()

            return types.SimpleNamespace(wait=wait_and_note)

        return start

    def watched_all_reduce(self, all_reduce):
        """That of two ranks. It writes where it reads, so what it reads is noted before."""
        def start(t, *arguments, **options):
            values = dict(zip(addresses(t), t.tolist()))
            work = all_reduce(t, *arguments, **options)
            self.kinds.update(dict.fromkeys(values, "s"))
            end = self.start(self.messages(1 - self.rank, t), values)

            def wait():
                work.wait()
                end()

            return types.SimpleNamespace(wait=wait)

        return start

    def start(self, messages, written):
        """Note an exchange -> a function that notes its end. written: as the attribute."""
        self.n_exchanges += 1
        number = self.n_exchanges
        self.starts[number] = messages
        self.written |= written
        self.code = what_runs()

        def end():
            self.ends.append(number)
            self.kinds.update(dict.fromkeys(written, "m"))  # of parameters nobody asks for it
            for address in written:
                del self.written[address]
            self.code = what_runs()

        return end

    def watched_add(self, add):
        def add_and_note(contributions, out):
            add(contributions, out)
            self.kinds.update(dict.fromkeys(addresses(out), "m"))

        return add_and_note

    def watched_mark(self, mark_param_ready):
        """A gradient has come, and waits in memory of its own for the rest of its bucket's."""
        def note_and_mark(model, slot, p):
            if self.model is not None:
                self.kinds.update(dict.fromkeys(addresses(p.grad), "o"))
                code = mark_param_ready.__code__
                self.code = [name_of(code)], line_at(code.co_filename, code.co_firstlineno)
                self.note(f"gradient: {unit_name(slot.fqn)}")
            mark_param_ready(model, slot, p)

        return note_and_mark

    def watched_put(self, put):
        def put_and_note(bucket, slots):
            for slot in slots:
                for address in addresses(slot.parameter.grad):
                    self.kinds.pop(address, None)
            put(bucket, slots)
            for place in bucket.views(slots, bucket.gradients):
                self.kinds.update(dict.fromkeys(addresses(place), "o"))

        return put_and_note

    # ---- what is in memory

    def parts(self):
        """[(row, number of the unit, slot, what `parts_in_memory` has of it)]"""
        every_part = []
        for unit, slot in enumerate(self.model._slots.values()):
            for row, parts in parts_in_memory(slot, self.optimizer).items():
                every_part.append((row, unit, slot, parts))
        return every_part

    def places(self):
        """{address of an element: (row, number of the unit, number of the element)}"""
        place_of = {}
        for row, unit, _, parts in self.parts():
            for first, t in parts:
                for i, address in enumerate(addresses(t), first):
                    place_of[address] = row, unit, i
        return place_of

    def messages(self, peer, t):
        """[[from, to, row, unit, first element, elements]] of t, which goes to a peer. A chunk of
        DDP may lie in two parameters, and so be two of these."""
        places = self.places()
        stretches = []
        for address in addresses(t):
            row, unit, i = places[address]
            if stretches and stretches[-1][2:4] == [row, unit]:
                stretches[-1][5] += 1
            else:
                stretches.append([self.rank, peer, row, unit, i, 1])
        return stretches

    def note(self, what, **more):
        """An event."""
        if self.model is None:
            return
        # What comes at the address of what is gone is something else.
        there = self.places()
        self.kinds = {address: self.kinds[address] for address in self.kinds if address in there}
        changed = {}
        memory = {}  # {where: bytes}
        for row, unit, slot, parts in self.parts():
            for _, t in parts:
                memory[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            key = f"{self.rank}{row}{unit}"
            before = self.cells.get(key, [""] * slot.shape.numel())
            cells = [self.cell(row, slot, parts, i, old) for i, old in enumerate(before)]
            if cells != before:
                changed[key] = " ".join(cells)
            self.cells[key] = cells
        code, line = self.code or what_runs() or ([], line_of_script(what.split(":")[0]))
        self.events.append(dict(what=what, code=code, line=line, held=sum(memory.values()),
                                set=changed, starts=self.starts, ends=self.ends, **more))
        self.starts, self.ends, self.code = {}, [], None

    def cell(self, row, slot, parts, i, before):
        """Element i, as a letter and a number. before: the same at the last event."""
        places = []  # (address, tensor, number of the element in it)
        for first, t in parts:
            if first <= i < first + t.numel():
                places.append((addresses(t)[i - first], t, i - first))
        if not places:
            return "."
        if row == "g" and places[0][0] not in self.kinds:
            places.reverse()  # the mean has memory, but is not there yet
        address, t, index = places[0]
        kind = self.kinds.get(address, "z") if row == "g" else "v"
        if row == "p" and isinstance(slot.bucket, zero.ShardedBucket):
            unit = slot.bucket.unit
            if t is not slot.shard and not unit.is_current:
                kind = "x"
        if len({place for place, *_ in places}) == 2:
            kind = kind.upper()
        if kind == "z":
            return kind
        if address not in self.written:
            return f"{kind}{t.detach().view(-1)[index].item():.4g}"
        # Not read, as a message may be writing there.
        number = self.written[address]
        return f"~{before[1:]}" if number is None else f"{kind}{number:.4g}"


def wrap(mode, module, recorder):
    """-> a model of the mode, whose hooks the recorder watches. module: of units of one size."""
    two_units = 2 * module.weight.nbytes  # a bucket of DDP, also the first one
    options = {"bucket_cap_mb": two_units / 2**20} if mode == "ddp" else {}
    fill_buckets = functools.partial(ddp.fill_buckets, first_bytes=two_units)
    # Without the gaps that align parameters and chunks.
    mark_param_ready = recorder.watched_mark(ddp.Reducer._mark_param_ready)
    with mock.patch.multiple("dropin.zero", ALIGN_BYTES=4, ALIGN_CHUNK_BYTES=4), \
            mock.patch.multiple(ddp, ALIGN_CHUNK_BYTES=4, fill_buckets=fill_buckets), \
            mock.patch.object(ddp.Reducer, "_mark_param_ready", mark_param_ready):
        model = MODES[mode](module, **options)  # which makes hooks of that method
    return model


def step(recorder, sample):
    """A step that is recorded."""
    model, optimizer = recorder.model, recorder.optimizer
    with recorder.watching():
        recorder.note("begin")
        loss = model(sample)
        recorder.note("loss", loss=loss.item())
        loss.backward()
        optimizer.step()
        recorder.note("update")
        optimizer.zero_grad()
        recorder.kinds.clear()
        recorder.note("zero_grad")


def record(mode):
    """-> ([event] of all ranks together, the parameters after the step). A collective."""
    recorder = Recorder()
    W, rank = dist.get_world_size(), dist.get_rank()
    samples = torch.tensor(SAMPLES[W], dtype=torch.float)
    n = samples.shape[1]
    module = Product(n, recorder.note)
    model = wrap(mode, module, recorder)
    optimizer = torch.optim.Adam(model.parameters(), lr=1, betas=(0.5, 0.75))
    # A first step, so that all memory is there that later ones have, and the order of use is known.
    # Each parameter falls by 1.
    model(torch.full((n,), float(W))).backward()
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for t in state.values():
            t.zero_()  # in Adam's first step a parameter moves by lr, whatever its gradient is
    recorder.model, recorder.optimizer = model, optimizer
    step(recorder, samples[rank])
    whole = [(name, value.tolist()) for name, value in model.full_parameters()]
    return [merged(events) for events in zip(*gather(recorder.events), strict=True)], whole


def merged(events):
    """One event of what is the same one on each rank; without what is empty."""
    first = events[0]
    same = ("what", "code", "line", "ends")
    event = dict(what=first["what"], code=first["code"], line=first["line"], held=[], set={},
                 starts={})
    for of_rank in events:
        assert all(of_rank[key] == first[key] for key in same), f"ranks differ: {events}"
        event["held"].append(of_rank["held"])
        event["set"] |= of_rank["set"]
        for number, messages in of_rank["starts"].items():
            event["starts"].setdefault(str(number), []).extend(messages)
    event["ends"] = first["ends"]
    if "loss" in first:
        event["loss"] = [of_rank["loss"] for of_rank in events]
    return {key: value for key, value in event.items() if value not in ([], {})}


# -------------------------------------------------------------------------------------------------
# the page

PAGE = ROOT / "docs" / "step.html"
BEGIN, END = '<script id="record" type="application/json">\n', "\n</script><!-- record -->"


def compact(value):
    """As JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def as_text(runs, times):
    """runs, {"zero3 2": [event]}, and times, as of time_step.py, as JSON, with a line for each
    event. Lists of functions and lines of code repeat: "codes" and "lines" have each once, and an
    event has its number."""
    repeated = {"code": [], "line": []}
    texts = []
    for name, events in runs.items():
        lines = [compact(with_numbers(event, repeated)) for event in events]
        texts.append(f'"{name}":[\n' + ",\n".join(lines) + "\n]")
    parts = [f'{{"samples":{compact(SAMPLES)}']
    for key, values in repeated.items():
        all_values = ",\n".join(map(compact, values))
        parts.append(f'"{key}s":[\n{all_values}\n]')
    all_runs = ",\n".join(texts)
    parts.append(f'"runs":{{\n{all_runs}\n}}')
    parts.append(f'"times":{compact(times)}}}')
    return ",\n".join(parts)


def with_numbers(event, repeated):
    """An event, in which what repeats is the number of its value in a list of repeated."""
    numbers = {}
    for key, values in repeated.items():
        if key in event:
            if event[key] not in values:
                values.append(event[key])
            numbers[key] = values.index(event[key])
    return event | numbers


def runs_of(text):
    """The runs of an `as_text`."""
    record = json.loads(text)
    for events in record["runs"].values():
        for event in events:
            for key in ("code", "line"):
                if key in event:
                    event[key] = record[f"{key}s"][event[key]]
    return record["runs"]


def times_on_page(text):
    """Those of an `as_text`; None where there are none."""
    return json.loads(text).get("times")


def new_times(runs):
    """Those of a step over a link, recorded now; None where no link can be made."""
    from docs.time_step import times_over_link

    times = times_over_link()
    if times is not None:
        for mode, of_mode in times["runs"].items():
            expected = [event["what"] for event in runs[f"{mode} 2"]]
            assert of_mode.pop("events") == expected, f"{mode}: events of the timed step differ"
    return times


def difference(there, here):
    """The first event that differs between runs of a page and of the code; None if all agree."""
    for name, events in here.items():
        of_page = there.get(name, [])
        for i in range(max(len(events), len(of_page))):
            old = of_page[i] if i < len(of_page) else None
            new = events[i] if i < len(events) else None
            if old != new:
                what = (new or old)["what"]
                return (f"{name} ranks, event {i + 1}, {what!r}: the page has {old}, and the code "
                        f"does {new}")
    return None


def parts_of_page():
    """What is before the record, the record, and what is after it."""
    page = PAGE.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        sys.exit(f"docs/step.html has no place for the record, which stands between "
                 f"{BEGIN.strip()} and {END.strip()}")
    head, _, rest = page.partition(BEGIN)
    text, _, tail = rest.partition(END)
    return head, text, tail


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--keep_times", action="store_true",
                        help="do not record a step over a link: the page keeps its times")
    options = parser.parse_args()
    head, on_page, tail = parts_of_page()
    runs = {}
    try:
        for W in SAMPLES:
            results = {}
            for mode in MODES:
                of_rank_0, *_ = run(W, record, mode)
                runs[f"{mode} {W}"], results[mode] = of_rank_0
                if results[mode] != results["ddp"]:
                    sys.exit(f"{mode} on {W} ranks ends on other parameters than ddp: {results}")
        times = None if options.check or options.keep_times else new_times(runs)
    except (Failure, AssertionError) as error:
        sys.exit(f"nothing was recorded: {error}")
    if not options.check:
        text = as_text(runs, times or times_on_page(on_page))
        PAGE.write_text(head + BEGIN + text + END + tail)
        return
    try:
        fact = difference(runs_of(on_page), runs)
        text = as_text(runs, times_on_page(on_page))
    except (ValueError, LookupError) as error:
        fact = f"its record cannot be read: {error!r}"
    if fact is None and on_page != text:
        fact = "the samples, or the form of the record"
    if fact:
        sys.exit(f"docs/step.html differs: {fact}. To record anew: python docs/record_step.py")
    print("docs/step.html has what happens; times were not compared")


if __name__ == "__main__":
    main()

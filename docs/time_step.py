"""Record a training step in time, over a slow link between two hosts, for docs/step.html.

record_step.py calls `times_over_link`, which makes two network namespaces, with a cable of RATE
between them, and starts this program in each of them: a rank.

The model of record_step.py is tiny, so its step would be all latency. This one has the same units,
a root and four blocks, and so the same events; but each has a matrix of SIZE x SIZE. A sequence of
marks is the same on both ranks, and each rank has a time for each of them, in ms:

    e         an event of the record, the first, the second, ...
    s         an exchange has been started, the first, the second, ...
    w2, d2    the rank begins to wait for exchange 2; and it is done with waiting

And there are the bytes that a rank sends in each exchange, and when it had arrived. A thread of its
own waits for that, as nobody else would look at the clock then.
"""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import types

import torch
import torch.distributed as dist
from torch import nn

from bench import launch
from docs.record_step import Factor, MODES, Recorder, ROOT, step, unit_name, wrap
from tests.ranks import gather

RATE = 1000  # of the link, in Mbit/s
SIZE = 1024  # of a matrix; a unit of 4 MiB, of which each rank owns a half
SAMPLES = 640  # that a rank multiplies by it
STEPS, WARM_UP = 9, 3  # the shortest step is kept, as other programs disturb the others
LIMIT_S = 200


class Layer(Factor):
    """As a `Factor`, but x is multiplied by a matrix."""

    def __init__(self, name, note):
        super().__init__(name, [], note)
        self.weight = nn.Parameter(torch.full((SIZE, SIZE), 1 / SIZE))

    def forward(self, x):
        self.note(f"forward: {self.name}")
        product = x @ self.weight
        product.register_hook(lambda gradient: self.note(f"backward: {self.name}"))
        return product


class Layers(Layer):
    """The root, then the blocks, and the mean over elements."""

    def __init__(self, note):
        super().__init__("the root", note)
        self.blocks = nn.ModuleList(Layer(f"blocks.{i}", note) for i in range(4))

    def forward(self, x):
        product = super().forward(x)
        for block in self.blocks:
            product = block(product)
        return product.mean()


class Clock(Recorder):
    """It looks at the clock where a `Recorder` looks at memory.

        marks     [(mark, seconds)]
        n_bytes   of each exchange
        arrived   {number of an exchange: seconds}
    """

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.events, self.marks, self.n_bytes, self.arrived = [], [], [], {}

    def mark(self, what):
        self.marks.append((what, time.monotonic()))

    def note(self, what, **more):
        if self.model is not None:
            self.mark("e")
            self.events.append(what)
            self.ends = []

    def under_way(self, wait_for_it, n_bytes):
        """Note an exchange -> what it is to those who wait for it."""
        self.mark("s")
        self.n_bytes.append(n_bytes)
        number = len(self.n_bytes)
        has_arrived = threading.Event()

        def look():
            wait_for_it()
            self.arrived[number] = time.monotonic()
            has_arrived.set()

        threading.Thread(target=look, daemon=True).start()

        def wait():
            self.mark(f"w{number}")
            has_arrived.wait()
            self.mark(f"d{number}")
            self.ends.append(number)

        return types.SimpleNamespace(wait=wait)

    def watched_exchange(self, exchange):
        def start(sends, receives, process_group, tag):
            messages = exchange(sends, receives, process_group, tag)
            return self.under_way(messages.wait, sends[1 - self.rank].nbytes)

        return start

    def watched_all_reduce(self, all_reduce):
        def start(t, *arguments, **options):
            work = all_reduce(t, *arguments, **options)
            return self.under_way(work.wait, t.nbytes)

        return start

    def watched_mark(self, mark_param_ready):
        def note_and_mark(model, slot, p):
            self.note(f"gradient: {unit_name(slot.fqn)}")
            mark_param_ready(model, slot, p)

        return note_and_mark

    def watched_add(self, add):
        return add

    def watched_put(self, put):
        return put


def times_of_mode(mode):
    """-> what the page has of a mode, of its shortest step. A collective."""
    clock = Clock()
    model = wrap(mode, Layers(clock.note), clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    x = torch.ones(SAMPLES, SIZE)
    steps = []
    for i in range(WARM_UP + STEPS):
        clock.model, clock.optimizer = model, optimizer
        clock.clear()
        dist.barrier()
        step(clock, x)
        of_ranks = gather((clock.events, clock.marks, clock.n_bytes, clock.arrived))
        if i >= WARM_UP:
            steps.append(in_ms(of_ranks))
    return min(steps, key=length_ms)


def in_ms(of_ranks):
    """What the page has of a step, of what each rank has noted of it."""
    (events, marks, n_bytes, _), *_ = of_ranks
    names = [mark for mark, _ in marks]
    begin = min(marks[0][1] for _, marks, *_ in of_ranks)
    times, arrived = [], []
    for other_events, marks, _, arrivals in of_ranks:
        assert other_events == events and [mark for mark, _ in marks] == names, "ranks differ"
        times.append([ms_since(begin, moment) for _, moment in marks])
        arrived.append([ms_since(begin, arrivals[k]) for k in sorted(arrivals)])
    return dict(events=events, marks=names, bytes=n_bytes, times=times, arrived=arrived)


def ms_since(begin, moment):
    return round(1e3 * (moment - begin), 2)


def length_ms(times):
    return max(of_rank[-1] for of_rank in times["times"])


def run_rank(path):
    """This rank's part; rank 0 writes what the page gets."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # where it may be: before other programs
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    runs = {mode: times_of_mode(mode) for mode in MODES}
    if dist.get_rank() == 0:
        pathlib.Path(path).write_text(json.dumps(runs))
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------
# two hosts


def times_over_link():
    """-> {rate, size, samples, steps, runs}; None, and a line that says why, where there is no
    link."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            launch.check_link()
            with launch.link(f"{RATE}mbit"):
                runs = run_hosts()
    except SystemExit:
        _, _, why = said.getvalue().strip().partition(": ")
        print(f"left out: the step in time; the page keeps the times that it has: {why}")
        return None
    return dict(rate=RATE, size=SIZE, samples=SAMPLES, steps=STEPS, runs=runs)


def run_hosts():
    """A rank in each namespace -> {mode: as `in_ms`}"""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "times.json"
        log = pathlib.Path(folder) / "log"
        with log.open("w") as output:
            processes = [start_host(host, path, output) for host in launch.HOSTS]
            try:
                for process in processes:
                    process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                for process in processes:
                    process.kill()
        if not path.exists():
            raise AssertionError(f"no times: {log.read_text()[-2000:]}")
        return json.loads(path.read_text())


def start_host(host, path, output):
    inside = ("ip", "netns", "exec", launch.namespace(host))
    words = [*inside, sys.executable, "-m", "docs.time_step", str(path)]
    environment = dict(RANK=str(host), WORLD_SIZE="2", MASTER_ADDR=launch.address(0),
                       MASTER_PORT="29478", GLOO_SOCKET_IFNAME=f"nanozero{host}",
                       OMP_NUM_THREADS="1")
    return subprocess.Popen(words, env={**os.environ, **environment}, cwd=ROOT, stdout=output,
                            stderr=subprocess.STDOUT)


if __name__ == "__main__":
    run_rank(sys.argv[1])

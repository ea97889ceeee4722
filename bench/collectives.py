"""How fast each collective of ddp.py is, beside torch's own and beside what the link allows.

    torchrun --nproc_per_node=2 bench/collectives.py                      two ranks, on a CPU
    torchrun --nproc_per_node=4 bench/collectives.py --device cuda        four, on an accelerator
    torchrun --nproc_per_node=2 bench/collectives.py --sizes "64kB 4MB"   these sizes only
    torchrun --nproc_per_node=2 bench/collectives.py --rate 1gbit         over a link of that rate

A table for W ranks has a row for each size and collective:

    size       of the buffer that all ranks have; 1 kB is 1024 bytes
    ours us    median and best time of --repeats runs, in microseconds. Ranks meet before each run,
               and its time is that of the slowest rank. Ours and torch's run in turn
    MB/s       of the median, what each rank sends in a second: (W-1)/W of the buffer in an
               all-gather and in a reduce-scatter, 2 (W-1)/W in an all-reduce, all of it in a
               broadcast
    limit us   the time in which a link sends as much, if nothing else took time
    ours %     how near that the median is

The link has the rate --rate; or, without it, the rate at which rank 0 sends a message of the
buffer's size to rank 1, measured in the same run, while nothing else is sent. Ranks on one machine
share its cores and its memory: there one message alone may be faster than many at once.

Before a collective is timed its result is compared with torch's: a wrong one has no time, and ends
the program with status 1. torch's adds in an order of its own, so sums may differ by rounding. On
two ranks start_all_reduce is torch's own, and on an accelerator start_all_gather is, too. All sizes
take some minutes on two cores.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import ddp
from bench.start import join, Parser
from bench.timeline import refuse

SIZES = "1kB 8kB 64kB 512kB 4MB 32MB 256MB"
UNITS = {"B": 1, "kB": 2**10, "MB": 2**20, "GB": 2**30}
BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}  # as tc has them
FLOAT_BYTES = 4  # of fp32, which is what buffers have
TAG = 1  # of our messages
WARM_UP = 2  # runs that are not timed: connections are made, memory is taken


# -------------------------------------------------------------------------------------------------
# collectives: each changes flat, (n,), where n is a multiple of W, and has ended on return


def own_chunk(flat):
    return flat.view(dist.get_world_size(), -1)[dist.get_rank()]


def our_all_gather(flat):
    ddp.start_all_gather(flat, dist.group.WORLD, TAG).wait()


def torchs_all_gather(flat):
    dist.all_gather_into_tensor(flat, own_chunk(flat))


def our_reduce_scatter(flat):
    ddp.ReduceScatter(flat, dist.group.WORLD, TAG).add(own_chunk(flat))


def torchs_reduce_scatter(flat):
    dist.reduce_scatter_tensor(own_chunk(flat), flat)


def our_all_reduce(flat):
    """As DDP does it from three ranks on. (With two it takes torch's own.)"""
    our_reduce_scatter(flat)
    our_all_gather(flat)


def torchs_all_reduce(flat):
    dist.all_reduce(flat)


def our_broadcast(flat):
    ddp.broadcast([flat], dist.group.WORLD)


def torchs_broadcast(flat):
    dist.broadcast(flat, src=0)


def whole(flat):
    return flat


@dataclasses.dataclass
class Collective:
    name: str  # of ours
    ours: Callable
    torchs: Callable
    result: Callable  # the part of flat that the collective promises
    sums: bool  # whether it adds, so that it may round in another way than torch's
    sent: Callable  # W -> what a rank sends, over the bytes of flat


COLLECTIVES = (
    Collective("start_all_gather", our_all_gather, torchs_all_gather, whole, False,
               lambda W: (W - 1) / W),
    Collective("ReduceScatter", our_reduce_scatter, torchs_reduce_scatter, own_chunk, True,
               lambda W: (W - 1) / W),
    Collective("both", our_all_reduce, torchs_all_reduce, whole, True,
               lambda W: 2 * (W - 1) / W),
    Collective("broadcast", our_broadcast, torchs_broadcast, whole, False,
               lambda W: 1),
)


# -------------------------------------------------------------------------------------------------
# comparing


def values_of_rank(n, device):
    """(n,), fp32: other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(n, generator=generator).to(device)


def difference(collective, source):
    """The largest distance between an element of our result and torch's, over all ranks; 0.0 where
    they are equal up to the rounding of sums. nan counts as inf."""
    results = []
    for function in (collective.ours, collective.torchs):
        flat = source.clone()
        function(flat)
        results.append(collective.result(flat))
    ours, expected = results
    tolerance = 1e-6 * dist.get_world_size() if collective.sums else 0.0
    distance = 0.0
    if not torch.allclose(ours, expected, rtol=tolerance, atol=tolerance):
        distance = (ours - expected).abs().max().nan_to_num(nan=math.inf).item()
    largest = torch.tensor([distance], dtype=torch.float64, device=source.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


# -------------------------------------------------------------------------------------------------
# time


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


def seconds_of(function, flat):
    """Of one run, on this rank; all ranks begin together."""
    synchronize(flat.device)
    dist.barrier()
    synchronize(flat.device)  # on an accelerator a barrier is a kernel
    start_s = time.perf_counter()
    function(flat)
    synchronize(flat.device)
    return time.perf_counter() - start_s


def times_of(functions, source, repeats):
    """-> (number of functions, repeats): seconds of the slowest rank in each run. Each run begins
    with the values of source, as sums of sums would grow. The functions run in turn."""
    flat = source.clone()
    seconds = torch.empty(len(functions), WARM_UP + repeats, dtype=torch.float64)
    for number in range(WARM_UP + repeats):
        for row, function in zip(seconds, functions):
            flat.copy_(source)
            row[number] = seconds_of(function, flat)
    seconds = seconds.to(source.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds[:, WARM_UP:].cpu().numpy()


def send_to_neighbour(flat):
    """Rank 0's message to rank 1."""
    if dist.get_rank() == 0:
        dist.send(flat, 1)
    elif dist.get_rank() == 1:
        dist.recv(flat, 0)


def bytes_per_second(source, repeats):
    """The rate of a message of this size between two neighbours, its median."""
    times = times_of([send_to_neighbour], source, repeats)
    return source.nbytes / np.median(times)


# -------------------------------------------------------------------------------------------------
# the table

HEAD = ["size", "collective", "ours us: median", "best", "torch's us: median", "best",
        "ours over torch's", "ours MB/s", "torch's MB/s", "limit us", "ours %", "torch's %"]


def print_row(cells):
    if dist.get_rank() == 0:
        print("| " + " | ".join(cells) + " |", flush=True)


def text_of_size(n_bytes):
    """1024 -> 1 kB."""
    text = f"{n_bytes} B"
    for unit, size in UNITS.items():
        if n_bytes >= size:
            text = f"{n_bytes / size:g} {unit}"
    return text


def measure(collective, source, rate, repeats):
    """Print the row of a collective. A collective of ours that is wrong ends the program."""
    size, W = text_of_size(source.nbytes), dist.get_world_size()
    distance = difference(collective, source)
    if distance > 0:
        stop(f"{collective.name} of {size} on {W} ranks differs from torch's by {distance:g}: it "
             "has no time")
    ours_s, torchs_s = times_of([collective.ours, collective.torchs], source, repeats)
    ours, torchs = np.median(ours_s), np.median(torchs_s)
    n_bytes = collective.sent(W) * source.nbytes
    limit_s = n_bytes / rate
    print_row([size, collective.name,
               f"{1e6 * ours:,.0f}", f"{1e6 * ours_s.min():,.0f}",
               f"{1e6 * torchs:,.0f}", f"{1e6 * torchs_s.min():,.0f}",
               f"{ours / torchs:.2f}",
               f"{n_bytes / ours / 1e6:,.1f}", f"{n_bytes / torchs / 1e6:,.1f}",
               f"{1e6 * limit_s:,.0f}", f"{100 * limit_s / ours:.0f}",
               f"{100 * limit_s / torchs:.0f}"])


def print_table(sizes, rate, repeats, device):
    """rate: bytes a second of the link, None for what a message between neighbours has."""
    W = dist.get_world_size()
    print_row([f"W = {W}: {HEAD[0]}", *HEAD[1:]])
    print_row(["---"] * len(HEAD))
    for n_bytes in sizes:
        n = max(1, n_bytes // (FLOAT_BYTES * W)) * W  # chunks are equal, as torch's have to be
        source = values_of_rank(n, device)
        rate_of_size = rate
        if rate is None:
            rate_of_size = bytes_per_second(source, repeats)
        for collective in COLLECTIVES:
            measure(collective, source, rate_of_size, repeats)


# -------------------------------------------------------------------------------------------------
# what was asked for


def stop(why):
    """End for a reason that all ranks have; rank 0 says it, before torchrun ends the others."""
    if dist.get_rank() == 0:
        print(f"collectives.py: {why}", file=sys.stderr, flush=True)
    dist.barrier()
    sys.exit(1)


def read_size(text):
    """"64kB" -> 65536."""
    match = re.fullmatch(r"(\d+)(B|kB|MB|GB)", text)
    if match is None or int(match[1]) == 0:
        refuse(f"size {text}: choose sizes such as \"1kB 4MB\"")
    return int(match[1]) * UNITS[match[2]]


def read_rate(text):
    """"1gbit" -> bytes a second."""
    match = re.fullmatch(r"(\d+\.?\d*)([kmg]?)bit", text)
    if match is None or float(match[1]) == 0:
        refuse(f"--rate {text}: choose a rate such as 1gbit or 100mbit")
    return float(match[1]) * BITS[match[2]] / 8


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help=f"of the buffers [{SIZES}]")
    parser.add_argument("--largest", help="leave out what is larger, such as 4MB")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each collective [9]")
    parser.add_argument("--rate", help="of the link, such as 1gbit [measured]")
    parser.add_argument("--device", default="cpu", help="an accelerator to run on, such as cuda")
    arguments = parser.parse_args()
    arguments.sizes = [read_size(text) for text in arguments.sizes.split()]
    if arguments.largest is not None:
        largest = read_size(arguments.largest)
        arguments.sizes = [size for size in arguments.sizes if size <= largest]
    if not arguments.sizes:
        refuse("--sizes and --largest leave no size")
    if arguments.repeats < 1:
        refuse(f"--repeats {arguments.repeats}: choose 1 or more")
    if arguments.rate is not None:
        arguments.rate = read_rate(arguments.rate)
    return arguments


def main():
    arguments = parse_arguments()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        refuse("one rank sends nothing: start two or more by torchrun --nproc_per_node=2")
    torch.set_num_threads(1)
    # torch 2.13 has new names for two of its own; older ones are those that every version has.
    warnings.simplefilter("ignore", FutureWarning)
    device = join(arguments.device)
    print_table(arguments.sizes, arguments.rate, arguments.repeats, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""How fast each collective of ddp.py is, beside torch's own: the ranks of ./bench.sh collectives.

    torchrun --nproc_per_node=2 bench/collectives.py --sizes 65536,4194304 --repeats 9

A RESULT line for each size, in bytes of the buffer that all ranks have, and each collective. Ranks
meet before each run, and its time is that of the slowest rank. Ours and torch's run in turn. MB/s
is what a rank sends in a second: (W-1)/W of the buffer in an all-gather and in a reduce-scatter,
2 (W-1)/W in an all-reduce, all of it in a broadcast.

Before a collective is timed its result is compared with torch's: if it is wrong, the program ends
with status 1. Torch's adds in an order of its own, so sums may differ by rounding. On two ranks DDP
takes torch's all-reduce; here is what it does from three on.
"""

import argparse
import pathlib
import sys
import time
import warnings
from typing import NamedTuple

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist

import ddp
from bench.start import join, report

FLOAT_BYTES = 4  # buffers are of fp32
TAG = 1  # of our messages
WARM_UP = 2  # runs that are not timed: connections are made, memory is taken


# -------------------------------------------------------------------------------------------------
# collectives: each changes flat, (n,), where W divides n, and has ended on return


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
    our_reduce_scatter(flat)
    our_all_gather(flat)


def torchs_all_reduce(flat):
    dist.all_reduce(flat)


def our_broadcast(flat):
    ddp.broadcast([flat], dist.group.WORLD)


def torchs_broadcast(flat):
    dist.broadcast(flat, src=0)


def sent(name, W):
    """By a rank, over the bytes of flat."""
    return {"broadcast": 1, "all-reduce": 2 * (W - 1) / W}.get(name, (W - 1) / W)


class Collective(NamedTuple):
    name: str
    ours: object
    torchs: object


COLLECTIVES = (Collective("all-gather", our_all_gather, torchs_all_gather),
               Collective("reduce-scatter", our_reduce_scatter, torchs_reduce_scatter),
               Collective("all-reduce", our_all_reduce, torchs_all_reduce),
               Collective("broadcast", our_broadcast, torchs_broadcast))


# -------------------------------------------------------------------------------------------------


def check(collective, source):
    """End the program, on all ranks, where ours has another result than torch's."""
    results = []
    for function in (collective.ours, collective.torchs):
        flat = source.clone()
        function(flat)
        # Of a reduce-scatter the other chunks are not promised.
        results.append(own_chunk(flat) if collective.name == "reduce-scatter" else flat)
    adds = "reduce" in collective.name
    tolerance = 1e-6 * dist.get_world_size() if adds else 0.0
    is_wrong = not torch.allclose(*results, rtol=tolerance, atol=tolerance)
    n_wrong = torch.tensor(float(is_wrong), device=source.device)
    dist.all_reduce(n_wrong)
    if n_wrong > 0:
        raise SystemExit(f"collectives.py: {collective.name} of {source.nbytes} bytes differs from "
                         "torch's: it has no time")


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


def times_of(collective, source, repeats):
    """-> (2, repeats): seconds of the slowest rank in each run, ours and torch's in turn. Each run
    begins with the values of source, as sums of sums would grow."""
    flat = source.clone()
    functions = (collective.ours, collective.torchs)
    seconds = torch.empty(2, WARM_UP + repeats, dtype=torch.float64)
    for number in range(WARM_UP + repeats):
        for row, function in zip(seconds, functions):
            flat.copy_(source)
            row[number] = seconds_of(function, flat)
    seconds = seconds.to(source.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds[:, WARM_UP:].cpu().numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device")
    options = parser.parse_args()
    # torch 2.13 has new names for two of its own; older ones are those that every version has.
    warnings.simplefilter("ignore", FutureWarning)
    device = join(options.device)
    W = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for size in options.sizes.split(","):
        n = max(1, int(size) // (FLOAT_BYTES * W)) * W  # chunks are equal, as torch's have to be
        source = torch.randn(n, generator=generator).to(device)
        for collective in COLLECTIVES:
            check(collective, source)
            ours_s, torchs_s = times_of(collective, source, options.repeats)
            ours, torchs = np.median(ours_s), np.median(torchs_s)
            mb = sent(collective.name, W) * source.nbytes / 1e6
            report({"W": W, "bytes": int(size), "collective": collective.name,
                    "ours us": 1e6 * ours, "torch's us": 1e6 * torchs,
                    "over torch's": ours / torchs, "MB/s": mb / ours, "torch's MB/s": mb / torchs})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What bench.sh asks a process that has torch, before it starts anything.

    python bench/ask.py machine       what torch knows of accelerators here, as {json}; null if none
    python bench/ask.py check         of a {json} on stdin, what train.py would refuse: exit status
                                      2, and one line on stderr

The second one asks the functions that a run begins with, as each rank would: in a process group of
torch's that has W ranks, of which only this one is there.
"""

import importlib
import json
import os
import pathlib
import sys

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))


def machine():
    """-> {fact: value} of the accelerator, or None."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    _, n_bytes = torch.accelerator.get_memory_info()
    return dict(
        kind=accelerator.type,
        backend=dist.get_default_backend_for_device(accelerator),
        n_devices=torch.accelerator.device_count(),
        gigabytes=n_bytes // 10**9,
        name=torch.get_device_module().get_device_name(),
    )


def check(question):
    """question: the flags of all runs, and of each run its row, its flags, its W, on how many hosts
    it is, and whether its ranks are separate processes. Ends with a line if one is refused."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    runs = importlib.import_module("runs")
    train = importlib.import_module("train")
    runs.leave_together = sys.exit  # it would end without naming the row
    runs.read_flags(train.Config, "", question["flags"])
    for run in question["runs"]:
        n_local = run["W"] // run["hosts"]
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(n_local))
        W = 1 if run["are_alone"] else run["W"]
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=W)
        try:
            given = runs.read_flags(train.Config, "", run["flags"])
            device = runs.choose_device(given.get("device"))
            train.config_of(given, None, device)
            check_devices(runs, run, device.type)
        except SystemExit as error:
            sys.exit(f"{run['row']}, W={run['W']}: {error}")
        dist.destroy_process_group()


def check_devices(runs, run, kind):
    """Processes that know nothing of each other do not say that they share a device."""
    _, _, n_devices = runs.local_numbers(kind)
    if run["are_alone"] and run["W"] > n_devices:
        sys.exit(f"--device {kind}: each process needs a device of its own, and there are "
                 f"{n_devices}: choose smaller --worlds")


def main():
    if sys.argv[1:] == ["machine"]:
        print(json.dumps(machine()))
        return
    try:
        check(json.load(sys.stdin))
    except SystemExit as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""What a wrapper sends, whichever way it sends it."""

import re
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

# Those of this version of torch; not `send`, whose bytes its `recv` counts.
COLLECTIVES = [name for name in dir(dist.ProcessGroup)
               if re.match("_?(all|broadcast|gather|recv|reduce|scatter)", name)]


@contextmanager
def every_collective(note):
    """Call note(operation, [its tensors]) before each, in whichever thread.

    What torch.distributed's functions send goes through these methods of ProcessGroup: so what a
    wrapper sends can be counted without knowing how it sends it.
    """
    def tapped(name, real):
        def tap(group, tensors, *arguments, **options):
            note(name, [tensors] if torch.is_tensor(tensors) else tensors)
            return real(group, tensors, *arguments, **options)
        return tap

    taps = {name: tapped(name, getattr(dist.ProcessGroup, name)) for name in COLLECTIVES}
    coalesced = tapped("coalesced", dist._broadcast_coalesced)  # of buffers; it calls C++ by itself
    with (mock.patch.multiple(dist.ProcessGroup, **taps),
          mock.patch.object(dist, "_broadcast_coalesced", coalesced)):
        yield


# Torch's own all-gather and all-to-all, which accelerators have, by their old and new names.
WITH_OWN_CHUNK = ("_allgather_base", "all_gather_single", "alltoall_base", "all_to_all_single")


def part_of_others(operation):
    """Of what a collective writes: the part that has come from other ranks."""
    return 1 - 1 / dist.get_world_size() if operation in WITH_OWN_CHUNK else 1

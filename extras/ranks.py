"""What ranks do together: meet, exchange values, agree, and end.

Replaces init_process_group(), which a restart by torchrun would leave waiting, and the exceptions
of its collectives, which say neither why nor in which step. It promises that all ranks stop alike.

Ranks that disagree hang: one leaves, the others wait for it in their next collective. So what can
fail on one rank by itself runs in `together`, after which all ranks continue or all stop. Three
kinds of failures end a process, see `run`:
- Stop, on all ranks alike: a user's mistake, or a run that cannot sensibly continue.
  One line, exit status 2 before the first step, then 1.
- A collective that fails, since another rank has died or hangs: one line with the step. All ranks
  exit with status 1, and torchrun starts them again if it was told so.
- Anything else is a bug: a traceback and that line. Its exit makes the other ranks' collectives
  fail.
"""

import contextlib
import ctypes
import datetime
import gc
import hashlib
import os
import re
import signal
import socket
import sys
import time
import warnings

import torch
import torch.distributed as dist

import extras
from oracle import kinds_of_devices, take_device

AGENT_HAS_ENDED = "torchrun has ended"


class Stop(Exception):
    """All ranks stop here, for a reason that is said in one line."""


def count(n, noun):
    """1 rank, 2 ranks."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def choose_device(kind):
    """--device, None for the accelerator, if any -> this rank's torch.device, which other ranks may
    have, too: see `take_device`. Raises Stop if there is no such device, or if ranks would share
    one by a backend other than NCCL, which is the only one that is known to do it."""
    kinds = kinds_of_devices()
    if kind is None:
        kind = kinds[-1]
    if kind not in kinds:
        raise Stop(f"--device {kind} is not on this machine: choose {' or '.join(kinds)}")
    local_rank, n_local, n_devices = local_numbers(kind)
    backend = dist.get_default_backend_for_device(kind)
    if n_local > n_devices and backend != "nccl":
        raise Stop(f"--device {kind}: torchrun started {count(n_local, 'rank')} here, for "
                   f"{count(n_devices, 'device')}, and {backend} cannot share a device: start "
                   "fewer ranks, or choose --device cpu")
    return take_device(kind, local_rank, n_local)


def local_numbers(kind):
    """Of this host: (this rank's number, how many ranks it has, how many devices of this kind). A
    CPU counts as one for each rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_devices = n_local if kind == "cpu" else torch.accelerator.device_count()
    return local_rank, n_local, n_devices


def ranks_on_device(kind):
    """How many ranks have the device that this rank has."""
    local_rank, n_local, n_devices = local_numbers(kind)
    return len(range(local_rank % n_devices, n_local, n_devices))


def say_sharing(kind):
    """Print on rank 0 that ranks share devices, where they do."""
    _, n_local, n_devices = local_numbers(kind)
    if n_local > n_devices:
        say(f"{count(n_local, 'rank')} share {count(n_devices, 'device')}: times say nothing")


def start_process_group(device, timeout_s):
    """Join the other ranks, of which there are none without torchrun -> a store that lives as long
    as torchrun does, if its agents share it. Raises Stop if they do not come within timeout_s."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    timeout = datetime.timedelta(seconds=timeout_s)
    torchrun_store = store = dist.HashStore()
    if "RANK" in os.environ:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        has_agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_agent()
            if has_agents_store:
                check_store(address)
        is_host = rank == 0 and not has_agents_store
        torchrun_store = dist.TCPStore(*address, is_master=is_host, timeout=timeout,
                                       wait_for_workers=False)
        store = meet(torchrun_store, rank, world_size, timeout)
    dist.init_process_group(dist.get_default_backend_for_device(device), store=store, rank=rank,
                            world_size=world_size, timeout=timeout)
    return torchrun_store


def end_with_agent():
    """Let Linux send this rank a SIGTERM when torchrun's agent, its parent, ends, however it ends.
    (An agent that is stopped while it starts its ranks leaves without a word to them, torch 2.13,
    and one that is killed always does.) Raises Stop if it has ended before."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # of linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    is_forked = os.getpid() != extras.PROCESS  # by a program that has imported this
    if os.getppid() != extras.PARENT and not is_forked:
        raise Stop(AGENT_HAS_ENDED)


def check_store(address):
    """Raise Stop if nobody answers at the address of the agent's store, (host, port)."""
    try:
        socket.create_connection(address, timeout=60).close()
    except ConnectionRefusedError as error:
        raise Stop(AGENT_HAS_ENDED) from error


def meet(store, rank, world_size, timeout):
    """store, torchrun's, under a prefix that only the ranks of this start know.

    torchrun keeps its store over restarts (torch 2.13), and in it the addresses of dead ranks, for
    which new ranks would wait. It counts restarts, but per node, so the count is no prefix that
    ranks agree on. So rank 0 draws a prefix, and every other rank asks for it under a number that
    it has drawn itself: an answer to a dead rank is never taken for one's own. Raises Stop if a
    rank does not come within timeout, a timedelta.
    """
    drawn = os.urandom(8).hex()
    if rank > 0:
        store.set(f"ask/{rank}", drawn)
        prefix = store.get(f"answer/{drawn}").decode()  # waits
        store.set(f"{prefix}/met/{rank}", "")
        return dist.PrefixStore(prefix, store)
    deadline_s = time.monotonic() + timeout.total_seconds()
    peers = range(1, world_size)
    while not store.check([f"{drawn}/met/{peer}" for peer in peers]):
        for peer in peers:
            if store.check([f"ask/{peer}"]):  # asked by a dead rank, or by the one that waits
                asked = store.get(f"ask/{peer}").decode()
                store.set(f"answer/{asked}", drawn)
        if time.monotonic() > deadline_s:
            raise Stop("some ranks did not start within --timeout_s")
        time.sleep(0.01)
    return dist.PrefixStore(drawn, store)


def gather(value):
    """[rank 0's value, rank 1's, ...], of anything that can be pickled. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value):
    """Rank 0's value. A collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def together(function, *arguments):
    """Call function(*arguments) on every rank and return this rank's result. A collective.

    Where it fails on one rank, by a user's mistake (ValueError), a disk (OSError) or for lack of
    memory (RuntimeError: on a CPU torch has no other), Stop is raised on all of them.
    function itself must not communicate.
    """
    result = problem = None
    try:
        result = function(*arguments)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        problem = one_line(error)
    for rank, found in enumerate(gather(problem)):
        if found is not None:
            raise Stop(f"rank {rank}: {found}" if rank else found)
    return result


def on_rank_0(function, *arguments):
    """Call function(*arguments) on rank 0 while the others wait -> its result there, None on the
    others. Raises Stop as `together` does."""
    if dist.get_rank() > 0:
        return together(lambda: None)
    return together(function, *arguments)


def check_ranks_agree(facts):
    """facts: {name: value}. Where ranks have different values, raise Stop on all of them, with the
    first such fact and the values of all ranks. A collective, of hashes as long as they agree."""
    hashes = gather(hashlib.sha256(repr(facts).encode()).digest())
    if len(set(hashes)) == 1:
        return
    views = gather(facts)
    for name in facts:
        values = [view[name] for view in views]
        if len(set(values)) > 1:
            raise Stop(f"ranks differ in {name}, which is {values} on ranks 0 to {len(values) - 1}")


def say(text, file=None):
    """Print on rank 0. A run does not end because its log is on a full disk."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(text, file=file, flush=True)


def named_shards(model):
    """Yield (name in the GPT, what this rank trains of it) for every parameter."""
    for name, p in model.named_parameters():
        yield name.removeprefix("module."), p  # the prefix of DDP, torch's and ours


def local(tensor):
    """This rank's part of a tensor that FSDP2 shards; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


# -------------------------------------------------------------------------------------------------
# how a run ends

OUT_OF_MEMORY = "out of memory"
NOT_DETERMINISTIC = " does not have a deterministic implementation"  # as torch says it
NO_KERNEL = "has no deterministic kernel"


def run(main, read_flags, progress):
    """main(read_flags(), progress), and what becomes of its errors -> exit status.

    progress: a dict, in which main notes its "step", and an "entry" when the first one is made.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop Ctrl-C ends a run in silence
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a sample may have any character
    # Where a forward fails, so do hooks that are called always: torch says so before our line.
    warnings.filterwarnings("ignore", message=".*``always_call=True`` raised an exception")
    config = read_flags()
    try:
        status = main(config, progress)
    except Stop as error:
        text = str(error)
        refuse(text + what_takes_less(text, config), 1 if progress["entry"] else 2)
    except Exception as error:
        if not explains_itself(error):
            sys.excepthook(*sys.exc_info())
        rank = os.environ.get("RANK", 0)
        text = one_line(error)
        complain(f"rank {rank} failed in step {progress['step']}: {type(error).__name__}: {text}"
                 f"{what_takes_less(text, config)}")
        os._exit(1)  # at once, which closes its connections: that is how other ranks come to know
    # FSDP2's modules hold the group in a cycle: uncollected, its threads outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()
    drop_unwritten()
    return status


def drop_unwritten():
    """Give up what a full disk has not taken of the log, or Python would end with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def refuse(error, status=2):
    """Say in one line why the run stops, and leave. Only the first rank of a host speaks."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        if error == AGENT_HAS_ENDED:
            os._exit(status)  # nobody is left who would end the first rank before it speaks
        # If it left first, torchrun would end the others before they can speak. If only this rank
        # has failed, no SIGTERM comes, and it prints the line itself.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(5)
    complain(one_line(error))
    os._exit(status)


def complain(text):
    with contextlib.suppress(OSError):  # a full disk
        print(f"train.py: {text}", file=sys.stderr, flush=True)


def one_line(error):
    """Its text, of which a compiler's may be very long, and the CPU's allocator has a poor one."""
    text = " ".join(str(error).split())[:2000]
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        asked = re.search(r"allocate (\d+) bytes", text)
        size = f": {1e-9 * int(asked[1]):,.2f} GB more were asked for" if asked else ""
        return OUT_OF_MEMORY + size
    if NOT_DETERMINISTIC in text:
        operation, *_ = text.split(NOT_DETERMINISTIC)
        return f"{operation} {NO_KERNEL} here: choose --no-deterministic"
    return text


def what_takes_less(text, config):
    """What to change where memory is out, by an error's text; else nothing."""
    if OUT_OF_MEMORY not in text:
        return ""
    facts = f"--mode {config.mode}, --micro_batch_size {config.micro_batch_size}"
    advice = ["a smaller --micro_batch_size", "--activation_checkpointing"]
    n_sharers = ranks_on_device(config.device or kinds_of_devices()[-1])
    if n_sharers > 1:
        facts += f", {n_sharers} ranks share the device"
        advice.append("fewer ranks on it")
    if config.mode != "zero3":
        advice.append("--mode zero3 on more ranks" if n_sharers == 1 else "--mode zero3")
    return f" ({facts}). What takes less: {', '.join(advice)}, or a smaller model"


def explains_itself(error):
    """Whether error needs no traceback: memory is out; or a collective has failed, as it does where
    another rank has died or hangs; or --deterministic asks for more than there is. Only the text
    tells: gloo, for one, raises plain RuntimeErrors."""
    if isinstance(error, (dist.DistError, torch.OutOfMemoryError)):
        return True
    words = ("onnection", "imed out", "gloo", "pair closure", OUT_OF_MEMORY, NO_KERNEL,
             "CUBLAS_WORKSPACE_CONFIG")  # which the user has set to something else
    is_plain = isinstance(error, (RuntimeError, MemoryError))
    return is_plain and any(word in one_line(error) for word in words)

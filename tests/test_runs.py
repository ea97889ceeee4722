"""train.py: stories.

A story is a list of legs, each a run that goes on with what the one before has left. Most have
one leg. All stories of a family have to end on the same bits, losses and sample text, those of
another family on others: so modes are compared, world sizes, options, resuming, and faults.
"""

import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import resource
import signal
import time
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import elastic_launch, LaunchConfig

from model import GPT, GPTConfig
from tests.runs import (execute, fail, finish, flags, FORK, in_update, lines_of, nothing,
                        record_trackers, run_train, spoil, write_line)
from verify import adamw, MAX_NORM

STAGES = ("zero1", "zero2", "zero3")

MODES = ("single", "naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-fsdp")
ON_RANKS = MODES[1:]
OURS_ON_RANKS = ("naive", "ddp", "zero1", "zero2", "zero3")


@dataclasses.dataclass(eq=False)
class Story:
    family: object
    name: str
    legs: list
    is_sampled: bool  # or only told with --full

    def __str__(self):
        return f"{self.family.name}: {self.name}"


class Family:
    """Stories that have to end on the same bits. The first one is what others are compared with."""

    def __init__(self, name):
        self.name = name
        self.stories = []

    def expected(self, folder):
        """How the first story ends, which is told once for all processes that share a folder."""
        path = folder / f"{self.name}.json"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                (folder / self.name).mkdir()
                path.write_text(json.dumps(tell(self.stories[0], folder / self.name)))
        return json.loads(path.read_text())


FAMILIES = {}  # {name: Family}
STORIES = []  # as parameters of a test


def add_story(family, name, *legs, is_sampled=True):
    """Add a story to a family."""
    family = FAMILIES.setdefault(family, Family(family))
    story = Story(family, name, legs, is_sampled)
    family.stories.append(story)
    STORIES.append(pytest.param(story, id=re.sub(r"\W+", "-", str(story))))


def one(family, W, mode, is_sampled=True, **options):
    """A story of one leg."""
    facts = [f"{name} {value}" for name, value in options.items() if name != "plant"]
    name = ", ".join([f"{mode} on {W}", *facts])
    add_story(family, name, dict(W=W, mode=mode, **options), is_sampled=is_sampled)


def chain(family, *legs, is_sampled=True, **options):
    """A story of legs (mode, W), a step each."""
    runs = []
    for step, (mode, W) in enumerate(legs, start=1):
        runs.append(dict(mode=mode, W=W, max_steps=step, save_interval=1, resume="auto", **options))
    name = ", ".join(f"{mode} on {W}" for mode, W in legs)
    add_story(family, name, *runs, is_sampled=is_sampled)


def disturbed(mode, status, fact, on_rank, act, *arguments, is_sampled=True):
    """A run of two ranks that ends in its second or third step, and one that goes on.

    status: of rank 0. fact: what its stderr has to match. The others say what is planted.
    """
    options = dict(W=2, mode=mode, save_interval=1, resume="auto")
    plant = partial(in_update, 2, on_rank, act, *arguments)
    words = [getattr(argument, "name", str(argument)) for argument in arguments]
    what = " ".join([act.__name__, *words])
    add_story("two", f"{mode} on 2, rank {on_rank}: {what}",
              dict(options, timeout_s=3, status=status, fact=fact, plant=plant), options,
              is_sampled=is_sampled)


# Stages 2 and 3 add as one process does, for any W x micro-steps = 12, or 60.
one("any W", 1, "single", global_batch_size=12)
one("any W, 60", 1, "single", is_sampled=False, global_batch_size=60)
for W, sampled in ((2, "zero2"), (3, "zero3"), (4, None), (6, None)):
    for mode in ("zero2", "zero3"):
        one("any W", W, mode, mode == sampled, global_batch_size=12)
for W in (2, 3, 4, 5, 6, 10, 12):
    for mode in ("zero2", "zero3"):
        one("any W, 60", W, mode, is_sampled=False, global_batch_size=60)
# Muon: each matrix is updated by the rank that owns it. Elastic, and from any mode to any other.
MUON = dict(optimizer="muon", global_batch_size=6)
one("muon", 1, "single", **MUON)
for W, sampled in ((2, "zero3"), (3, "zero2"), (6, None)):
    for mode in ("zero2", "zero3"):
        one("muon", W, mode, mode == sampled, **MUON)
for mode in ("naive", "ddp", "zero1"):
    one("muon", 6, mode, False, **MUON)
for W, mode in ((1, "single"), (2, "torch-ddp"), (2, "ddp")):
    one("muon, 2 at once", W, mode, False, optimizer="muon", global_batch_size=2)
one("muon, every W", 1, "single", max_steps=5, **MUON)
chain("muon, every W", ("zero3", 3), ("zero3", 2), ("zero2", 3), ("single", 1), ("zero3", 6),
      **MUON)
one("not clipped", 1, "single", global_batch_size=15, grad_clip=0)
one("not clipped", 3, "zero2", global_batch_size=15, grad_clip=0)
one("not clipped", 5, "zero3", False, global_batch_size=15, grad_clip=0)
one("not clipped", 15, "zero3", False, global_batch_size=15, grad_clip=0)

# The others do so with one micro-step a rank.
for N, sampled in ((3, "naive"), (4, "zero3"), (5, "ddp"), (6, None), (9, None)):
    family = f"{N} at once"
    for mode in MODES:
        is_sampled = sampled is not None and (mode == "single" or (N, mode) == (4, "torch-fsdp"))
        one(family, 1, mode, is_sampled, global_batch_size=N)
    for mode in OURS_ON_RANKS:
        one(family, N, mode, mode == sampled, global_batch_size=N)

# With two they add a rank's own first.
for mode in ("torch-fsdp", "zero1", "naive", "ddp", "torch-ddp"):
    one("ranks first", 2, mode, mode in ("torch-fsdp", "zero1"), global_batch_size=4)

# One micro-step a rank, options that change no bit, and faults.
LOST = r"train\.py: .*step [23]\b"
one("two", 1, "single")
for mode in ON_RANKS:
    one("two", 2, mode, is_sampled=False)
one("two", 2, "ddp", comm_hook="hierarchical", node_size=1, bucket_cap_mb=0.001)
one("two", 2, "ddp", comm_hook="topk", topk_ratio=1.0, find_unused_parameters=True)
one("two", 2, "zero3", activation_checkpointing=True, profile=2, wandb=True, tensorboard=True,
    plant=record_trackers)
for mode in ("ddp", "zero2", "zero3"):
    one("two", 2, mode, mode == "zero3", trace=True)
one("two", 2, "torch-zero1")
one("two", 2, "torch-fsdp-kept", is_sampled=False)
one("two", 2, "zero3", shard_size=1, offload=True)
one("two", 2, "zero2", shard_size=2)
disturbed("zero3", 1, LOST, 1, math.sqrt, -1, is_sampled=False)  # raises
disturbed("zero1", 1, LOST, 1, time.sleep, 60)
# What gloo says when this rank was frozen for longer than the time limit.
disturbed("zero2", 1, "step 2: .*pair closure", 0, fail,
          "Application timeout caused pair closure")
disturbed("ddp", 1, LOST, 1, signal.raise_signal, signal.SIGKILL)
disturbed("zero3", 1, LOST, 1, signal.raise_signal, signal.SIGSTOP, is_sampled=False)
disturbed("zero3", 143, "step [23]", 1, signal.raise_signal, signal.SIGTERM)
disturbed("ddp", 130, "step [23]", 0, signal.raise_signal, signal.SIGINT, is_sampled=False)
disturbed("zero2", 1, "step 2.*File too large", 1, resource.setrlimit, resource.RLIMIT_FSIZE,
          (10_000, 10_000))

# What was held for a moment before the run does not count.
one("largest micro batch", 1, "single", global_batch_size=4, micro_batch_size=4)
one("largest micro batch", 1, "single", global_batch_size=4, micro_batch_size="auto",
    memory_limit_gb=1.2, plant=partial(np.ones, 2 * 10**8))

# From an evaluated step of any mode and world size to any other.
chain("two", ("zero3", 2), ("torch-fsdp", 2), ("zero1", 2), ("ddp", 2))
one("all modes", 1, "single", is_sampled=False, max_steps=9)
chain("all modes", *((mode, 2) for mode in (*ON_RANKS, "torch-fsdp", "naive")), is_sampled=False)
one("every W", 1, "single", max_steps=5, global_batch_size=12)
chain("every W", ("zero3", 4), ("zero2", 3), ("single", 1), ("zero3", 6), ("zero2", 2),
      global_batch_size=12)

# Numbers of 16 bits, and comm hooks.
for mode in MODES:
    W = 1 if mode == "single" else 2
    one("dtype bf16", W, mode, mode in ("single", "ddp", "zero2"), dtype="bf16")
    one("dtype fp16", W, mode, mode in ("single", "ddp", "zero3"), dtype="fp16")
for mode in STAGES:
    one("param_dtype bf16", 2, mode, mode != "zero3", param_dtype="bf16")
    one("param_dtype fp16", 2, mode, False, param_dtype="fp16")
    one("reduce_dtype bf16", 2, mode, mode != "zero3", reduce_dtype="bf16")
for hook in ("bf16", "powersgd", "topk"):
    one(f"comm_hook {hook}", 2, "ddp", hook == "topk", comm_hook=hook)
# What top-k has not sent yet goes on with the run; new ranks have nothing of it.
chain("comm_hook topk", *4 * [("ddp", 2)], comm_hook="topk")
chain("joined", ("ddp", 2), ("ddp", 4), comm_hook="topk", global_batch_size=4)

# A nan or an inf on one rank in steps 2 and 3: skipped by all, who in fp16 halve the scale.
for mode in ("ddp", "zero3", "zero2", "naive", "zero1", "torch-ddp", "torch-fsdp"):
    one("nan", 2, mode, mode in ("ddp", "zero3"),
        plant=partial(spoil, "cross_entropy", (2, 3), math.nan))
    one("inf", 2, mode, mode in ("ddp", "zero3", "zero2"), dtype="fp16",
        plant=partial(spoil, "embedding", (2, 3), math.inf))


def tell(story, folder):
    """Run a story in a folder -> {what its family shares: value}: hash, sample text and losses."""
    for leg in story.legs:
        if "fact" in leg:  # rank 0 speaks; a rank that is lost may end in any way
            leg = dict(leg)
            status = leg.pop("status")
            fact = leg.pop("fact")
            run = run_train(folder, **leg)
            assert run.codes[0] == status and re.search(fact, run.stderr[0]), run
            assert "Traceback" not in run.stderr[0], run.stderr[0]
            unfinished = [*folder.glob(".step_*")]
            assert "File" not in fact or not unfinished, f"unfinished files: {unfinished}"
        else:
            result = finish(folder, **leg)
    promised(folder, result, **{"max_steps": 4, **leg})
    entries = lines_of(folder / "metrics.jsonl")
    end = {}
    for entry in entries:
        for name in ("loss", "val_loss"):
            end[f"{name} of step {entry['step']}"] = entry[name]
    end["sample"] = re.search(r"sample:.*(?=RESULT)", result["stdout"], re.DOTALL)[0]
    for name in ("train_loss", "val_loss", "param_sha256"):
        end[name] = result[name]
    return end


METRICS = {"step", "loss", "lr", "grad_norm", "param_norm", "val_loss", "tokens_per_sec",
           "step_ms", "comm_exposed_ms", "mfu", "mem_bytes"}
RESULT = {"mode", "world_size", "steps", "train_loss", "val_loss", "tokens_per_sec", "step_ms",
          "comm_exposed_ms", "peak_mem_bytes", "bytes_per_param", "param_sha256", "threads"}
# Of a parameter: those that a rank holds, and those that are divided among ranks.
BYTES = {"zero1": (8, 8), "zero2": (4, 12), "zero3": (0, 16), "torch-fsdp": (0, 16),
         "torch-zero1": (8, 8), "torch-fsdp-kept": (0, 16),
         "zero1 param_dtype": (2, 16), "zero2 param_dtype": (2, 16), "zero1 reduce_dtype": (4, 12)}


def promised(folder, result, W, mode, max_steps, shard_size=None, profile=0, **options):
    """Assert that metrics.jsonl, RESULT, traces, trackers and memory are as documented.

    A step that was skipped, for a nan or an inf, has no loss or norm and leaves the parameters'
    norm as it was. Memory may differ from its formula by 2 %, the rounding of shards; torch alone
    takes more than 100 MB.
    """
    entries = lines_of(folder / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == list(range(1, max_steps + 1))
    for before, entry in itertools.pairwise(entries):
        is_skipped = entry["param_norm"] == before["param_norm"]
        assert is_skipped == (None in (entry["loss"], entry["grad_norm"])), entry
        assert METRICS <= entry.keys() and entry["mem_bytes"] > 1e8, entry
        assert 0 <= (entry["comm_exposed_ms"] or 0) <= entry["step_ms"], entry
    loss = entries[0]["loss"]
    val_loss = entries[0]["val_loss"]
    assert abs(loss - val_loss) < 1, f"in step 1 loss is {loss}, and val_loss {val_loss}"
    assert RESULT <= result.keys() and result["peak_mem_bytes"] > 1e8, result
    assert ("torch" in mode) == (result["comm_exposed_ms"] is None), result
    facts = dict(mode=mode, world_size=W, steps=max_steps, threads=1,
                 val_loss=entries[-1]["val_loss"])
    actual = {name: result[name] for name in facts}
    assert actual == facts, f"RESULT has {actual}, expected are {facts}"
    kind = mode
    for name in ("param_dtype", "reduce_dtype"):
        if f"{mode} {name}" in BYTES and name in options:
            kind = f"{mode} {name}"
    whole, sharded = BYTES.get(kind, (16, 0))
    expected = whole + sharded / (W if shard_size is None else shard_size)
    actual = result["bytes_per_param"]
    if options.get("optimizer") == "muon":
        # One number of state for a matrix of blocks, not two; and its owner has all of it.
        least, most = expected - 4, 1.5 * expected
    else:
        least, most = 0.98 * expected, 1.02 * expected
    assert least < actual < most, f"{actual} bytes a parameter, expected are {least} to {most}"
    traces = [path.read_text() for path in folder.glob("*trace*")]
    assert len(traces) == (W if profile else 0), f"{len(traces)} traces"
    for trace in traces:
        assert all(kind in trace for kind in ("gather", "reduce", "wait")), "ranges without a name"
        assert len(set(re.findall(r"ProfilerStep#\d+", trace))) == profile, "steps in a trace"
    if "trace" in options:
        ranges = ranges_of_trace(result["stdout"])
        assert [*ranges] == [*range(W)], f"the trace has ranks {[*ranges]}"
        for actual in ranges.values():
            assert_sensible(actual, mode)
    if "wandb" in options:
        expected = []
        for entry in entries:
            expected += [[name, entry["step"], entry["loss"]] for name in ("loss", "wandb")]
        assert lines_of(folder / "losses") == expected, "trackers get other losses"


def ranges_of_trace(printed):
    """{rank: [(milliseconds, kind, what)]} of what --trace prints."""
    ranges = defaultdict(list)
    for rank, ms, kind, what in re.findall(r"^rank (\d) +([\d.]+) ms  (\w+): (.*)$", printed, re.M):
        ranges[int(rank)].append((float(ms), kind, what))
    return ranges


def assert_sensible(ranges, mode):
    """Assert that a step of two blocks comes in the order of time, that what is started is waited
    for, and that this is what the mode does: ddp reduces buckets, the stages unshard units, and
    stage 3 frees them, at the end all."""
    times = [ms for ms, _, _ in ranges]
    assert times == sorted(times) and times[0] >= 0, f"not in order: {times}"
    of_kind = defaultdict(list)
    for _, kind, what in ranges:
        what = re.sub(r", [\d.]+ ms$", "", what)  # how long a wait took
        of_kind[kind].append(what)
    assert of_kind["forward"] == ["blocks.0", "blocks.1"], of_kind
    assert of_kind["backward"] == ["blocks.1", "blocks.0"], of_kind
    assert of_kind["update"] == ["AdamW"], of_kind
    reduced = {what for what in of_kind["start"] if what.startswith("reduce the bucket")}
    assert reduced and set(of_kind["start"]) <= set(of_kind["wait"]), of_kind
    units = {what.removeprefix("unshard ") for what in of_kind["start"]} - reduced
    freed = set(of_kind["free"])
    # Stages 1 and 2 have gathered what the update changed in the evaluation after it.
    assert len(units) == (3 if mode == "zero3" else 0), f"units {units}"
    assert freed == (units if mode == "zero3" else set()), f"{units} are unsharded, freed {freed}"


@pytest.mark.parametrize("story", STORIES)
def test_stories(story, shared_folder, tmp_path):
    """Modes, world sizes and options that promise the same bits end on the same param_sha256,
    losses (means over all ranks) and sample; so does a run that is resumed in another mode or at
    another world size, or whose rank raises, dies, hangs, is told to stop or has a full disk: it
    ends in time, and says in which step. metrics.jsonl, RESULT and traces are as documented."""
    is_first = story is story.family.stories[0]
    actual = None if is_first else tell(story, tmp_path)
    expected = story.family.expected(shared_folder)
    for what, value in expected.items():
        assert is_first or actual[what] == value, (
            f"{what} is {actual[what]}, in {story.family.stories[0]} {value}")


def test_families_differ(shared_folder):
    """Stories of different families end on different bits: so agreement says something."""
    family_of = {}
    for name, family in FAMILIES.items():
        if family.stories[0].is_sampled:
            digest = family.expected(shared_folder)["param_sha256"]
            assert digest not in family_of, f"{name} ends on the bits of {family_of[digest]}"
            family_of[digest] = name


def test_short_rest_has_no_trace(tmp_path):
    """A run that resumes with --trace, and has less than three steps left, goes on and says so."""
    finish(tmp_path, save_interval=1)
    actual = finish(tmp_path, save_interval=1, resume="auto", max_steps=6, trace=True)
    assert "no trace: it begins in the third step, and there are 2 more" in actual["stdout"]
    assert actual["steps"] == 6


def die_in(*functions):
    """Kill this process as `kill -9` does when it next calls one of os's functions."""
    def die(*_, **__):
        signal.raise_signal(signal.SIGKILL)

    for name in functions:
        setattr(os, name, die)


def pause(optimizer):
    signal.pause()


@dataclasses.dataclass
class Event:
    steps: int
    plants: list  # in a node of two ranks and, if there are two, in another node of one rank
    worlds: list  # how many ranks the run has, in turn


EVENTS = {
    "rank 0 dies in fsync": Event(4, [partial(in_update, 3, 0, die_in, "fsync")], [2, 2]),
    "rank 0 dies in rename": Event(8, [partial(in_update, 3, 0, die_in, "rename", "replace")],
                                   [2, 2, 2, 2]),
    "a node dies": Event(4, [nothing, partial(in_update, 3, None, os.killpg, 0, signal.SIGKILL)],
                         [3, 2]),
    # The rank that pauses ends by SIGTERM.
    "a node joins": Event(4, [partial(in_update, 3, 0, pause), nothing], [2, 3])}


def under_torchrun(folder, plant, n_ranks, n_nodes, port, **options):
    """torchrun's agent on a node, with three restarts; ranks are forked, not started anew."""
    config = LaunchConfig(min_nodes=1, max_nodes=n_nodes, nproc_per_node=n_ranks, run_id="verify",
                          rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}", max_restarts=3,
                          rdzv_configs=dict(last_call_timeout=3, keep_alive_interval=1),
                          monitor_interval=0.1, start_method="fork")
    os.setpgid(0, 0)  # to be killed together with its ranks
    os.dup2(os.open(f"{folder}/agent", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    if options["resume"]:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or a node that joins waits
    elastic_launch(config, execute)(flags(**options), folder, {}, plant)


@pytest.mark.parametrize("event", ["rank 0 dies in fsync", "a node dies",
                                   "rank 0 dies in rename", "a node joins"])
def test_torchrun_goes_on(event, tmp_path):
    """After kill -9 of a rank in the middle of a checkpoint, or of a whole node, and when a node
    joins, torchrun starts all ranks again, as many as there are: they resume by themselves, never
    from an earlier run's checkpoints, and end on the bits of one process."""
    joins = event == "a node joins"
    event = EVENTS[event]
    out = tmp_path / "out"
    options = dict(max_steps=event.steps, save_interval=1, global_batch_size=6)
    expected = finish(tmp_path / "alone", **options)["param_sha256"]
    if not joins:
        finish(out, save_interval=4, max_steps=20, seed=3)  # another run's remains
    # Agents that a node joins have stores of their own, and tell a restart by the checkpoint.
    options |= dict(mode="zero3", resume="auto" if joins else None, out_dir=out)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agents = []
    for plant, n_ranks in zip(event.plants, (2, 1)):
        arguments = tmp_path, plant, n_ranks, len(event.plants), store.port
        agents.append(FORK.Process(target=under_torchrun, args=arguments, kwargs=options))
        agents[-1].start()
        while joins and not (out / "metrics.jsonl").exists():
            time.sleep(0.1)
    for agent in agents:
        agent.join(60)
    printed = (tmp_path / "stdout").read_text()
    entries = lines_of(out / "metrics.jsonl")
    actual = re.findall(r"^resumed.* on (\d) ranks? \((\d) before\)$", printed, re.MULTILINE)
    restarts = [(str(now), str(before)) for before, now in itertools.pairwise(event.worlds)]
    assert actual == restarts, f"restarts (now, before) {actual}, expected {restarts}: {printed}"
    assert agents[0].exitcode == 0, f"the agent ended with {agents[0].exitcode}: {printed[-2000:]}"
    assert f'"param_sha256": "{expected}"' in printed, f"other bits than {expected}: {printed}"
    assert [entry["step"] for entry in entries] == [*range(1, event.steps + 1)]


def log_batches(folder):
    """Plant a log of all micro batches that a run trains on."""
    forward = GPT.forward

    def logged(gpt, idx, targets=None):
        if torch.is_grad_enabled():
            write_line(folder / "batches", (idx.tolist(), targets.tolist()))
        return forward(gpt, idx, targets)

    GPT.forward = logged


@pytest.fixture(scope="session")
def shared_folder(request, tmp_path_factory):
    """The same for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


def sha256_of(module):
    """param_sha256, of a whole module."""
    digest = hashlib.sha256()
    for p in module.parameters():
        digest.update((p.detach() + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
    return digest.hexdigest()


def test_a_run_is_a_plain_loop(tmp_path):
    """train.py in one process ends on the bits of these lines: the sum of micro batches, divided
    once, clipped, by AdamW at the rate of metrics.jsonl. Other modes are compared with it."""
    import train

    n = 6  # micro batches of a step
    options = dict(global_batch_size=n, seed=5, beta1=0.9, beta2=0.99, weight_decay=0.1,
                   grad_clip=MAX_NORM)
    result = finish(tmp_path / "out", plant=partial(log_batches, tmp_path), **options)
    batches = lines_of(tmp_path / "batches")
    entries = lines_of(tmp_path / "out/metrics.jsonl")
    gpt = GPT(GPTConfig(seed=5, vocab_size=257, n_layer=2, n_head=2, n_embd=16, block_size=16,
                        n_kv_head=2))
    optimizer = adamw(gpt.parameters(), betas=(0.9, 0.99))
    for step, entry in enumerate(entries):
        losses = []
        for idx, targets in batches[n * step:n * step + n]:
            _, loss = gpt(torch.tensor(idx), torch.tensor(targets))
            loss.backward()
            losses.append(loss.item())
        gradients = [p.grad for p in gpt.parameters()]
        norm = total_norm(gradients) / n
        factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / n
        for gradient in gradients:
            gradient.mul_(factor.float())
        for group in optimizer.param_groups:
            group["lr"] = entry["lr"]
        optimizer.step()
        optimizer.zero_grad()
        for name, value in (("loss", sum(losses) / n), ("grad_norm", norm.item())):
            ratio = entry[name] / value
            assert abs(ratio - 1) < 1e-12, f"step {step + 1}: {name} is {ratio:.8f} x expected"
    assert len(batches) == n * len(entries), f"{len(batches)} micro batches in {len(entries)} steps"
    assert result["param_sha256"] == sha256_of(gpt), "other bits"
    actual = finish(tmp_path / "two", 2, mode="zero2", **options)["param_sha256"]
    assert actual == result["param_sha256"], "other bits on two ranks"
    # Losses are finite, and gradients are not, on one rank in the first step.
    finish(tmp_path / "bad", 2, mode="zero2", plant=partial(spoil, "embedding", (2,), math.inf),
           **options)
    skipped = [entry["skipped"] for entry in lines_of(tmp_path / "bad/metrics.jsonl")]
    assert skipped == [True, False, False, False], f"skipped are {skipped}"
    config = train.Config(mode="single", optimizer="muon")
    others, muon = train.make_optimizers(gpt, config)
    matrices = [p for p in gpt.blocks.parameters() if p.dim() == 2]
    taken = [group["params"] for group in muon.param_groups]
    assert taken == [matrices], "Muon takes the matrices of blocks"
    left = sum(len(group["params"]) for group in others.param_groups)
    assert left + len(matrices) == len([*gpt.parameters()]), "AdamW takes the rest"

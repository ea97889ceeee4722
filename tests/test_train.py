"""train.py: stories, and what a run computes and shows.

A story is a list of legs, each a run that goes on with what the one before has left. Most have
one leg. All stories of a family have to end on the same bits, losses and sample text, those of
another family on others: so modes are compared, world sizes, options, and resuming.
"""

import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import train
import verify
from model import GPT, GPTConfig
from tests.common import ROOT
from tests.runs import (fail, finish, flags, in_update, lines_of, raise_signals, run_alone,
                        run_train, saved, spoil, write_line)

MODES = ("single", "naive", "ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-zero1",
         "torch-fsdp-kept", "torch-fsdp")

# -------------------------------------------------------------------------------------------------
# stories

FAMILIES = defaultdict(list)  # {name: stories}: all are compared with the first one


def one(family, W, mode, **options):
    """Add a story of one leg to a family."""
    FAMILIES[family].append([dict(W=W, mode=mode, **options)])


def chain(family, *legs, **options):
    """Add a story of legs (mode, W), a step each."""
    story = []
    for step, (mode, W) in enumerate(legs, start=1):
        story.append(dict(W=W, mode=mode, max_steps=step, save_interval=1, resume="auto",
                          **options))
    FAMILIES[family].append(story)


# One micro-step a rank: each mode on two ranks, on one, ours on more; and what changes no bit.
for mode in MODES:
    one("two at once", 1 if mode == "single" else 2, mode)
one("two at once", 2, "ddp", comm_hook="hierarchical", node_size=1, bucket_cap_mb=0.001)
one("two at once", 2, "ddp", comm_hook="topk", topk_ratio=1.0, find_unused_parameters=True)
one("two at once", 2, "zero3", activation_checkpointing=True, profile=2)
for mode in ("single", "naive", "zero3"):
    one("two at once", 1 if mode == "single" else 2, mode, trace=True)
one("two at once", 2, "zero3", shard_size=1, offload=True)
one("two at once", 2, "zero2", shard_size=2)
for mode in MODES:
    one("three at once", 1, mode, global_batch_size=3)
one("three at once", 3, "naive", global_batch_size=3)
one("three at once", 3, "zero1", global_batch_size=3)
one("four at once", 1, "single", global_batch_size=4)
one("four at once", 4, "ddp", global_batch_size=4)
# With more they add a rank's own first.
for mode in ("ddp", "naive", "zero1", "torch-ddp", "torch-fsdp"):
    one("ranks first", 2, mode, global_batch_size=4)
# Stages 2 and 3 add as one process does, for any W x micro-steps = 12.
one("any W", 1, "single", global_batch_size=12)
for W, mode in ((2, "zero2"), (3, "zero3"), (4, "zero2")):
    one("any W", W, mode, global_batch_size=12)
one("not clipped", 1, "single", global_batch_size=6, grad_clip=0)
one("not clipped", 3, "zero2", global_batch_size=6, grad_clip=0)
# From any mode and world size to any other.
one("all modes", 1, "single", max_steps=10)
chain("all modes", *((mode, 1 if mode == "single" else 2) for mode in reversed(MODES)))
one("every W", 1, "single", max_steps=5, global_batch_size=12)
chain("every W", ("zero3", 4), ("zero2", 3), ("single", 1), ("zero3", 2), ("zero2", 4),
      global_batch_size=12)
# Muon: each matrix is updated by the rank that owns it.
MUON = dict(optimizer="muon", global_batch_size=2)
for mode in ("single", "ddp", "zero1", "zero3", "torch-ddp"):
    one("muon", 1 if mode == "single" else 2, mode, **MUON)
MUON["global_batch_size"] = 6
one("muon, every W", 1, "single", **MUON)
chain("muon, every W", ("zero3", 3), ("zero2", 2), ("single", 1), ("zero2", 3), **MUON)
# What was held for a moment before the run does not count.
one("largest micro batch", 1, "single", global_batch_size=4, micro_batch_size=4)
one("largest micro batch", 1, "single", global_batch_size=4, micro_batch_size="auto",
    memory_limit_gb=1.0, plant=partial(np.ones, 8 * 10**7))
# Numbers of 16 bits, and comm hooks.
for W, mode in ((1, "single"), (2, "ddp"), (2, "zero2")):
    one("dtype bf16", W, mode, dtype="bf16")
for W, mode in ((1, "single"), (2, "ddp"), (2, "zero3")):
    one("dtype fp16", W, mode, dtype="fp16")
for mode in ("zero1", "zero2", "zero3"):
    one("param_dtype bf16", 2, mode, param_dtype="bf16")
one("param_dtype fp16", 2, "zero3", param_dtype="fp16")
for mode in ("zero1", "zero3"):
    one("reduce_dtype bf16", 2, mode, reduce_dtype="bf16")
one("comm_hook bf16", 2, "ddp", comm_hook="bf16")
one("comm_hook powersgd", 2, "ddp", comm_hook="powersgd")
# What top-k has not sent yet goes on with the run; new ranks have nothing of it.
one("comm_hook topk", 2, "ddp", comm_hook="topk")
chain("comm_hook topk", *4 * [("ddp", 2)], comm_hook="topk")
chain("joined", ("ddp", 2), ("ddp", 4), comm_hook="topk", global_batch_size=4)
# A nan or an inf on one rank in steps 2 and 3: skipped by all, who in fp16 halve the scale.
for mode in ("ddp", "zero3"):
    one("nan", 2, mode, plant=partial(spoil, "cross_entropy", (2, 3), math.nan))
for mode in ("ddp", "zero3"):
    one("inf", 2, mode, dtype="fp16", plant=partial(spoil, "embedding", (2, 3), math.inf))


def name_of(family, story):
    legs = [f"{leg['mode']} on {leg['W']}" for leg in story]
    options = [f"{name} {value}" for name, value in story[0].items()
               if name not in ("W", "mode", "plant", "resume") and len(story) == 1]
    return f"{family}: " + ", ".join([*legs, *options])


STORIES = []
for family, (_, *others) in FAMILIES.items():
    STORIES += [pytest.param(family, story, id=name_of(family, story)) for story in others]


@functools.cache
def first_of(family):
    with tempfile.TemporaryDirectory() as folder:
        return tell(FAMILIES[family][0], pathlib.Path(folder))


def tell(story, folder):
    """Run a story in a folder -> {what its family shares: value}: hash, sample text and losses."""
    for leg in story:
        result = finish(folder, **leg)
    promised(folder, result, **{"max_steps": 4, **leg})
    end = {}
    for entry in lines_of(folder / "metrics.jsonl"):
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
    """Assert that metrics.jsonl, RESULT, traces and memory are as documented.

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
        tokens = 16 * options.get("global_batch_size", 2)
        rate = tokens / (entry["step_ms"] / 1e3)
        assert abs(entry["tokens_per_sec"] / rate - 1) < 1e-9, f"{rate} tokens/s: {entry}"
        assert entry["mfu"] is None, "a CPU's peak is not known"
    assert_ranks_are_summed_up(entries[-1], W)
    loss, val_loss = entries[0]["loss"], entries[0]["val_loss"]
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
    least, most = 0.98 * expected, 1.02 * expected
    if options.get("optimizer") == "muon":
        # One number of state for a matrix of blocks, not two; and its owner has all of it.
        least, most = expected - 4, 1.5 * expected
    assert least < actual < most, f"{actual} bytes a parameter, expected are {least} to {most}"
    traces = [path.read_text() for path in folder.glob("*trace*")]
    assert len(traces) == (W if profile else 0), f"{len(traces)} traces"
    for trace in traces:
        assert all(kind in trace for kind in ("gather", "reduce", "wait")), "ranges without a name"
        assert len(set(re.findall(r"ProfilerStep#\d+", trace))) == profile, "steps in a trace"
    if "trace" in options:
        assert_trace_is_sensible(result["stdout"], mode, W)


def assert_ranks_are_summed_up(entry, W):
    """An entry has least, mean and most of ranks, rank 0's own, and who was the slowest."""
    ranks = entry["ranks"]
    for name in ("step_ms", "comm_exposed_ms", "mem_bytes"):
        least, mean, most = ranks[name]
        if entry[name] is not None:
            assert least <= mean <= most and least <= entry[name] <= most, entry
    assert ranks["slowest"] in (range(W) if entry["comm_exposed_ms"] is not None else [None]), entry


TITLES = {"single": "; one process sends nothing:",
          "naive": "; what naive sends has no name here:"}


def assert_trace_is_sensible(printed, mode, W):
    """Assert that --trace shows a step of two blocks, of each rank in the order of time; that what
    is started is waited for, and what stage 3 unshards freed. If nothing has a name, it says so."""
    title = TITLES.get(mode, ":")
    assert f"what each rank did in this step, by its own clock{title}\n" in printed, printed
    of_rank = defaultdict(list)
    for rank, ms, kind, what in re.findall(r"^rank (\d) +([\d.]+) ms  (\w+): (.*)$", printed, re.M):
        of_rank[int(rank)].append((float(ms), kind, what))
    assert [*of_rank] == [*range(W)], f"the trace has ranks {[*of_rank]}"
    for ranges in of_rank.values():
        times = [ms for ms, _, _ in ranges]
        assert times == sorted(times) and times[0] == 0, f"not in order: {times}"
        of_kind = defaultdict(list)
        for _, kind, what in ranges:
            what = re.sub(r", [\d.]+ ms$", "", what)  # how long a wait took
            of_kind[kind].append(what)
        n = 2 // W  # micro-steps
        assert of_kind["forward"] == n * ["blocks.0", "blocks.1"], of_kind
        assert of_kind["backward"] == n * ["blocks.1", "blocks.0"], of_kind
        assert of_kind["update"] == ["AdamW"], of_kind
        started = set(of_kind["start"])
        assert started <= set(of_kind["wait"]) and bool(started) == (mode not in TITLES), of_kind
        units = {what.removeprefix("unshard ") for what in started if "unshard" in what}
        assert units == set(of_kind["free"]), of_kind
        assert len(units) == (3 if mode == "zero3" else 0), of_kind


@pytest.mark.parametrize("family, story", STORIES)
def test_stories(family, story, tmp_path):
    """Modes, world sizes and options that promise the same bits end on the same param_sha256,
    losses (means over all ranks) and sample; so does a run that is resumed in another mode or at
    another world size. metrics.jsonl, RESULT and traces are as documented."""
    actual = tell(story, tmp_path)
    for what, value in first_of(family).items():
        assert actual[what] == value, f"{what} is {actual[what]}, and of the first story {value}"


def test_families_differ():
    """Stories of different families end on different bits: so agreement says something."""
    family_of = {}
    for name in FAMILIES:
        digest = first_of(name)["param_sha256"]
        assert digest not in family_of, f"{name} ends on the bits of {family_of[digest]}"
        family_of[digest] = name


# -------------------------------------------------------------------------------------------------
# a step


def log_batches(folder):
    """Plant a log of all micro batches that a run trains on."""
    forward = GPT.forward

    def logged(gpt, idx, targets=None):
        if torch.is_grad_enabled():
            write_line(folder / "batches", (idx.tolist(), targets.tolist()))
        return forward(gpt, idx, targets)

    GPT.forward = logged


def plain_loop(batches, rates, n, max_norm):
    """-> (loss, norm) of each step, and param_sha256, of a loop that adds n micro batches, divides
    once, and clips."""
    gpt = GPT(GPTConfig(seed=5, vocab_size=257, n_layer=2, n_head=2, n_embd=16, block_size=16,
                        n_kv_head=2))
    matrices = [p for p in gpt.parameters() if p.dim() >= 2]
    others = [p for p in gpt.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1),
                                   dict(params=others, weight_decay=0.0)], betas=(0.9, 0.99),
                                  fused=False, foreach=False)
    steps = []
    for step, lr in enumerate(rates):
        losses = []
        for idx, targets in batches[n * step:n * step + n]:
            _, loss = gpt(torch.tensor(idx), torch.tensor(targets))
            loss.backward()
            losses.append(loss.item())
        squares = [p.grad.double().square().sum() for p in gpt.parameters()]
        norm = torch.stack(squares).sum().sqrt() / n
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / n
        for p in gpt.parameters():
            p.grad.mul_(factor.float())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        steps.append((sum(losses) / n, norm.item()))
    digest = hashlib.sha256()
    for p in gpt.parameters():
        digest.update((p.detach() + 0.0).numpy().tobytes())  # + 0.0 makes -0 a 0
    return steps, digest.hexdigest()


def test_a_run_is_a_plain_loop(tmp_path):
    """train.py in one process ends on the bits of these lines: the sum of micro batches, divided
    once, clipped, by AdamW at the rate of metrics.jsonl. Other modes are compared with it."""
    n = 6  # micro batches of a step
    options = dict(global_batch_size=n, seed=5, beta1=0.9, beta2=0.99, weight_decay=0.1,
                   grad_clip=0.05)
    result = finish(tmp_path / "out", plant=partial(log_batches, tmp_path), **options)
    batches = lines_of(tmp_path / "batches")
    entries = lines_of(tmp_path / "out/metrics.jsonl")
    assert len(batches) == n * len(entries), f"{len(batches)} micro batches in {len(entries)} steps"
    rates = [entry["lr"] for entry in entries]
    [(steps, digest)] = verify.run(1, plain_loop, batches, rates, n, options["grad_clip"])
    assert result["param_sha256"] == digest, "other bits"
    for entry, numbers in zip(entries, steps):
        for name, value in zip(("loss", "grad_norm"), numbers):
            ratio = entry[name] / value
            assert abs(ratio - 1) < 1e-12, f"{entry['step']}: {name} is {ratio:.8f} x expected"


@pytest.mark.parametrize("mode, function, expected", [
    ("ddp", "cross_entropy", [(1.0, 1), (1.0, 2), (1.0, 3)]),
    ("zero2", "embedding", [(1.0, 1), (0.5, 1), (0.5, 2)])])
def test_what_a_scaler_learns_of_a_skipped_step(mode, function, expected, tmp_path):
    """In fp16 a loss that is not finite, with gradients that are, is no good step, and no reason
    for another scale; gradients that are not finite halve it. A skipped step is no time for a
    checkpoint. A run that resumes has the scale, and the count, of its checkpoint."""
    text = tmp_path / "text.txt"  # of others gradients may be too large for fp16 by themselves
    text.write_text("".join(chr(97 + i * i % 26) for i in range(20_000)))
    options = dict(W=2, mode=mode, dtype="fp16", save_interval=1, keep_last=9, dataset=text)
    finish(tmp_path, max_steps=3, plant=partial(spoil, function, (2,), math.inf), **options)
    finish(tmp_path, resume="auto", **options)
    skipped = [entry["skipped"] for entry in lines_of(tmp_path / "metrics.jsonl")]
    assert skipped == [False, True, False, False] and saved(tmp_path) == [1, 3, 4]
    actual = []
    for step in saved(tmp_path):
        record = json.loads((tmp_path / f"step_{step:08d}/checkpoint.json").read_text())
        actual.append((record["scaler"]["scale"] / 2**15, record["scaler"]["_growth_tracker"]))
    assert actual == expected


def test_a_skipped_last_step_leaves_a_checkpoint(tmp_path):
    """Skipped steps are no reason to push out older checkpoints, but the last one counts."""
    plant = partial(spoil, "cross_entropy", (2, 4), math.nan)
    finish(tmp_path, 2, mode="zero2", plant=plant, save_interval=1, keep_last=9, eval_steps=0)
    assert saved(tmp_path) == [1, 3, 4]


def write_threads(path):
    write_line(path, torch.get_num_threads())


def test_threads_are_those_of_the_flag(tmp_path):
    for threads in (None, 3):
        finish(tmp_path / "out", threads=threads,
               plant=partial(in_update, 2, None, write_threads, tmp_path / "threads"))
    assert lines_of(tmp_path / "threads") == [1, 3]


def count_graphs(path):
    """Plant compilation that takes no compiler, and a log of its graphs, and breaks, at the end."""
    from torch._inductor import cpp_builder

    cpp_builder.get_cpp_compiler = lambda: "none is needed"
    torch.compile = partial(torch.compile, backend="eager")
    destroy = dist.destroy_process_group

    def count_and_destroy():
        write_line(path, [counters["stats"]["unique_graphs"], dict(counters["graph_break"])])
        destroy()

    dist.destroy_process_group = count_and_destroy


def test_compiled_runs_have_four_graphs(tmp_path):
    """Of a block and of the loss, in training and in evaluation, whatever the number of blocks, and
    without a break; the text is not compiled."""
    finish(tmp_path / "out", compile=True, n_layer=3, micro_batch_size=2, eval_steps=3,
           plant=partial(count_graphs, tmp_path / "graphs"))
    assert lines_of(tmp_path / "graphs") == [[4, {}]]


def test_a_zero_has_one_hash():
    """-0 is 0."""
    hashes = set()
    for zero in (0.0, -0.0):
        model = mock.Mock(full_parameters=lambda: [("weight", torch.tensor([zero]))])
        hashes.add(train.param_sha256(model))
    assert len(hashes) == 1


# -------------------------------------------------------------------------------------------------
# eight files

EIGHT = ("ddp.py", "zero.py", "checkpoint.py", "oracle.py", "model.py", "data.py", "runs.py",
         "train.py")


def alone(folder, words):
    """Plant train.py of a folder of copies, with these words as its flags."""
    os.chdir(folder)
    run_alone(folder, "train.py", *words)


def test_eight_files_are_enough(tmp_path):
    """Copied to an empty folder they train in each mode of ours, resume in another one on another
    number of ranks, evaluate, and write a text, on the bits of here; what needs extras/ is refused
    in a line."""
    here = tmp_path / "here"
    here.mkdir()
    for name in EIGHT:
        shutil.copy(ROOT / name, here / name)
    expected = finish(tmp_path / "out", max_steps=6)["param_sha256"]

    def run(W, status=0, fact="^$", **options):
        words = flags(**{"out_dir": tmp_path / "copy", **options})
        plant = partial(alone, here, [str(word) for word in words])
        return finish(None, W, status, fact, argv=["--help"], plant=plant)

    for step, mode in enumerate(("naive", "ddp", "zero1", "zero2", "zero3", "single"), start=1):
        actual = run(1 if mode == "single" else 2, mode=mode, max_steps=step, save_interval=1,
                     resume="auto")
        assert actual["mode"] == mode and actual["steps"] == step
        assert "sample:\n" in actual["stdout"]
    assert actual["param_sha256"] == expected
    asked = run(2, mode="zero3", resume=tmp_path / "copy" / "best", out_dir=None, eval_only=True)
    assert asked["val_loss"] is not None and "sample:\n" in asked["stdout"]
    for options in (dict(mode="torch-ddp"), dict(mode="ddp", comm_hook="topk"), dict(trace=True),
                    dict(mode="zero3", offload=True)):
        run(1, 2, r"\Atrain\.py: there is no (extras|dropin), .*\n\Z", out_dir=tmp_path / "no",
            **options)


# -------------------------------------------------------------------------------------------------
# watching


def note_trackers(path, act, *arguments):
    """Plant trackers that note what is called, and what happens in the third step."""
    tracker = mock.MagicMock(__spec__="a stand-in")
    for name in ("SummaryWriter", "init"):
        made = getattr(tracker, name).return_value
        for method in ("define_metric", "log", "add_scalar", "finish", "close"):
            getattr(made, method).side_effect = partial(note_call, path, method)
    sys.modules |= dict.fromkeys(("wandb", "tensorboard", "torch.utils.tensorboard"), tracker)
    in_update(3, None, act, *arguments)


def note_call(path, method, *arguments, **options):
    write_line(path, [method, *arguments, *options.items()])


# What happens in the third step, the status, and the last step that is noted.
END_OF_TRACKERS = {"well": ((str, ""), 0, 5), "error": ((fail, "the end"), 1, 2),
                   "signal": ((raise_signals, signal.SIGTERM), 143, 4)}


@pytest.mark.parametrize("end", END_OF_TRACKERS)
def test_trackers_get_all_numbers_and_are_closed(end, tmp_path):
    """However a run ends, before os._exit, which would take what they have not written.
    W&B is told that the step is its axis; tensorboard draws numbers of all ranks, too."""
    planted, status, n_steps = END_OF_TRACKERS[end]
    run = run_train(tmp_path / "out", wandb=True, tensorboard=True, max_steps=5,
                    plant=partial(note_trackers, tmp_path / "log", *planted))
    assert run.codes == [status], run
    entries = lines_of(tmp_path / "out/metrics.jsonl")
    axis, *noted = lines_of(tmp_path / "log")
    assert axis == ["define_metric", "*", ["step_metric", "step"]]
    assert noted[-2:] == [["finish"], ["close"]] and len(entries) == n_steps, noted
    logged = [line[1] for line in noted if line[0] == "log"]
    for entry, numbers in zip(entries, logged, strict=True):
        assert numbers["step"] == entry["step"] and numbers["loss"] == entry["loss"], numbers
        assert numbers["step_ms_max"] == entry["ranks"]["step_ms"][2], numbers
        drawn = {line[1]: line[2] for line in noted
                 if line[0] == "add_scalar" and line[3] == entry["step"]}
        assert drawn == {name: value for name, value in numbers.items() if name != "step"}


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_trackers_themselves_take_what_is_logged(package, tmp_path):
    """The packages, in place of stand-ins: W&B offline."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"pip install {package}")
    words = flags(out_dir=tmp_path / "out", max_steps=3) + [f"--{package}"]
    environment = dict(os.environ, WANDB_MODE="offline", HOME=str(tmp_path))
    done = subprocess.run([sys.executable, ROOT / "train.py", *words], env=environment,
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = lines_of(tmp_path / "out/metrics.jsonl")
    if package == "wandb":  # nothing of Python reads its file, in which numbers are as in JSON
        [path] = (tmp_path / "out/wandb").glob("offline-run-*/*.wandb")
        written = path.read_bytes()
        for entry in entries:
            for name in ("loss", "param_norm", "val_loss"):
                assert json.dumps(entry[name]).encode() in written, (name, entry)
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = EventAccumulator(str(tmp_path / "out/tensorboard"))
    written.Reload()
    for name in ("loss", "param_norm", "val_loss"):
        points = [(point.step, point.value) for point in written.Scalars(name)]
        assert points == [(entry["step"], pytest.approx(entry[name])) for entry in entries], name


def test_lines_are_printed_when_it_is_time(tmp_path):
    """Every log_interval steps; also of the first step, and of those that are evaluated."""
    printed = finish(tmp_path, max_steps=7, log_interval=3, eval_interval=5)["stdout"]
    lines = re.findall(r"^step +(\d)/7 \| loss \d.*left( \| val loss)?", printed, re.M)
    assert [int(step) for step, _ in lines] == [1, 3, 5, 6, 7], printed
    assert [int(step) for step, is_evaluated in lines if is_evaluated] == [5, 7], printed
    assert "share" not in printed, "a rank alone shares no device"


def test_short_runs_have_no_trace(tmp_path):
    """--trace and --profile begin in the third step; where there is none, that is said."""
    for options in (dict(trace=True), dict(profile=1)):
        actual = finish(tmp_path / "out", max_steps=2, **options)["stdout"]
        assert "no trace: it begins in the third step, and there are 2 more\n" in actual, actual

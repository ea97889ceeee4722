"""train.py: what a run says, and where it says it."""

import os
import re
import resource
import signal
import sys
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from tests.common import ROOT
from tests.runs import finish, in_update, lines_of, refused, run_train, write_line
from tests.test_flags import bare
from runs import one_line
from extras.trackers import scalars


@pytest.mark.parametrize("hook", ["topk", "powersgd"])
def test_hooks_begin_after_the_warm_up(hook, tmp_path):
    """A run with such a hook says at its start when it begins; so does --help. Without a warm-up
    there is nothing to say."""
    out = tmp_path / "out"
    actual = finish(out, 2, mode="ddp", comm_hook=hook)["stdout"]
    assert f"--comm_hook {hook} sends whole gradients until step 2" in actual, actual
    actual = finish(out, 2, mode="ddp", comm_hook=hook, warmup_steps=0)["stdout"]
    assert "whole gradients" not in actual, actual
    shown = " ".join(run_train(None, argv=["--help"]).stdout[0].split())
    assert re.search(r"--comm_hook {.*topk.*} ddp: .*after the warm-up", shown), shown
    assert "null" not in shown and "[0.01]" in shown, "defaults are shown where there are some"


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_tokens_need_no_tokenizer(n_ranks, tmp_path):
    """A folder of train.bin and val.bin trains, and is evaluated, where its tokenizer cannot be
    had. The sample says why it is missing, and the result is there. Names that nobody knows, and
    texts, are refused as ever."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = np.arange(3000) % 50257
    for name in ("train.bin", "val.bin"):
        tokens.astype(np.uint16).tofile(data / name)
    out = tmp_path / "out"
    options = dict(dataset=data, tokenizer="gpt2", n_embd=8, n_layer=1, save_interval=4,
                   mode="zero2" if n_ranks > 1 else "single", plant=bare)
    actual = finish(out, n_ranks, **options)
    pattern = r"^sample:\nnone, as there is no tokenizer: .*gpt2.*\nRESULT"
    assert re.search(pattern, actual["stdout"], re.M), actual["stdout"]
    words = [f"--resume={out}/step_00000004", "--eval_only"]
    asked = finish(None, n_ranks, argv=words, plant=bare)
    assert asked["param_sha256"] == actual["param_sha256"] and "none, as" in asked["stdout"]
    assert asked["val_loss"] == actual["val_loss"]
    refused("tokenizer gpt9", tmp_path / "a", **{**options, "tokenizer": "gpt9"})
    refused("tokenizer gpt2", tmp_path / "a", **{**options, "dataset": ROOT / "LICENSE"})


def allocate_too_much(optimizer):
    torch.empty(10**15)


def limit_memory():
    """Plant a limit on what this process may have, half a gigabyte above what it has."""
    pages = int(open("/proc/self/statm").read().split()[0])
    n_bytes = pages * resource.getpagesize() + 500_000_000
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def test_out_of_memory_is_said(tmp_path):
    """On a CPU, too: what takes less; one line, no traceback; before the first step as in a step,
    with the size where the allocator says it."""
    fact = "out of memory.*takes less: a smaller --micro_batch_size, .*--mode zero3.*fewer ranks"
    refused(fact, tmp_path / "a", n_embd=10**12)
    ended = run_train(tmp_path / "b", 2, mode="zero1",
                      plant=partial(in_update, 2, 1, allocate_too_much))
    assert "Traceback" not in "".join(ended.stderr), ended
    fact = (r"rank 1 failed in step 2: RuntimeError: out of memory: .*to allocate 4000000000000000 "
            r"bytes.*\. What takes less: .*, or a smaller model\n\Z")
    assert re.search(fact, ended.stderr[1]), ended
    ended = run_train(tmp_path / "c", plant=limit_memory, dataset=ROOT / "verify.py",
                      micro_batch_size=512, global_batch_size=512, n_embd=256)
    assert ended.codes == [1] and "Traceback" not in ended.stderr[0], ended
    assert re.search("step 1: .*out of memory: .*--micro_batch_size", ended.stderr[0]), ended
    assert one_line(MemoryError("array")).startswith("out of memory: array. What takes less: ")
    assert one_line(RuntimeError("other\n  text")) == "other text"


def fail_in_forward():
    """Plant an error in a forward, after which a hook that is called always fails; and
    warnings, of which tests ignore this one."""
    warnings.simplefilter("default")
    real = torch.nn.functional.embedding
    calls = []

    def embedding(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the error")
        return real(*arguments, **options)

    def always_called(module, inputs, output):
        if len(calls) == 3:
            raise RuntimeError("a hook that fails, too")

    torch.nn.functional.embedding = embedding
    torch.nn.modules.module.register_module_forward_hook(always_called, always_call=True)


def test_one_error_is_said_once(tmp_path):
    """torch's warning that a hook failed, too, does not stand before it."""
    ended = run_train(tmp_path, plant=fail_in_forward)
    assert "the error" in ended.stderr[0] and "always_call" not in ended.stderr[0], ended


def test_a_stopped_run_says_how_to_go_on(tmp_path):
    """Where there is something to go on from. The status is the signal's, on all ranks."""
    def stop(number):
        return partial(in_update, 2, None, signal.raise_signal, number)

    finish(tmp_path, status=143, plant=stop(signal.SIGTERM), save_interval=4,
           fact="--resume auto$")
    finish(tmp_path, 2, status=130, plant=stop(signal.SIGINT), save_interval=0, mode="zero2",
           fact=r"after step [23]$")


def test_one_rank_is_one(tmp_path):
    """Numbers agree with their nouns."""
    finish(tmp_path, save_interval=2, max_steps=2)
    actual = finish(tmp_path, save_interval=2, resume="auto")["stdout"]
    assert "on 1 rank (1 before)" in actual, actual
    actual = finish(tmp_path, 2, mode="ddp", save_interval=2, resume="auto", max_steps=6)["stdout"]
    assert "on 2 ranks (1 before)" in actual, actual
    refused("among 1 rank$", tmp_path, global_batch_size=3, micro_batch_size=2)


def test_short_texts_name_flags(tmp_path):
    """Those that lower what is needed, to train and to validate; and then they do."""
    text = tmp_path / "text"
    text.write_text("a short text. " * 40)
    out = tmp_path / "out"
    fact = "504 tokens to train on and 56 .*, and 513 and 257 are .*--block_size or --global_batch"
    refused(fact, out, dataset=text, block_size=256)
    fact = "and 56 to validate with, and 129 and 65 are .*--block_size .*--eval_steps 0 needs none"
    refused(fact, out, dataset=text, block_size=64)
    finish(out, dataset=text, block_size=64, eval_steps=0)
    finish(out, dataset=text, block_size=32)


@pytest.mark.parametrize("mode", ["torch-zero1", "torch-fsdp-kept", "torch-fsdp"])
def test_muon_names_modes(mode, tmp_path):
    """Where Muon cannot be, the line names the modes in which it can."""
    refused("--optimizer needs --mode .*naive.* zero1 or zero2 or zero3", tmp_path, mode=mode,
            optimizer="muon")


@pytest.mark.parametrize("mode, title", [("single", "; one process sends nothing:"),
                                         ("naive", "; what naive sends has no name here:"),
                                         ("zero2", ":")])
def test_traces_say_what_is_not_in_them(mode, title, tmp_path):
    """--trace shows forwards, backwards and the update in every mode; where nothing is sent, or
    what is sent has no name, it says so."""
    n_ranks = 1 if mode == "single" else 2
    actual = finish(tmp_path, n_ranks, mode=mode, trace=True)["stdout"]
    assert f"what each rank did in this step, by its own clock{title}\n" in actual, actual
    for kind in ("forward: blocks.1", "backward: blocks.0", "update: AdamW"):
        assert re.search(rf"^rank 0 .* ms  {kind}$", actual, re.M), actual


def test_a_profile_says_where_it_is(tmp_path):
    actual = finish(tmp_path, profile=1)["stdout"]
    assert f"--profile: {tmp_path}/trace_rank0.json\n" in actual, actual
    assert (tmp_path / "trace_rank0.json").exists()


def numbers_in(value):
    """All numbers in what JSON can be."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [number for part in value for number in numbers_in(part)]
    return [] if value is None else [value]


def note_scalars(path):
    """Plant a tensorboard that notes what it is given."""
    def add_scalar(name, value, step):
        write_line(path, [name, value, step])

    tracker = mock.MagicMock(__spec__="a stand-in")
    tracker.SummaryWriter.return_value.add_scalar.side_effect = add_scalar
    sys.modules |= dict.fromkeys(("tensorboard", "torch.utils.tensorboard"), tracker)


def test_trackers_get_all_numbers(tmp_path):
    """tensorboard draws every number of metrics.jsonl, those of all ranks included."""
    out = tmp_path / "out"
    finish(out, 2, mode="zero2", tensorboard=True, plant=partial(note_scalars, tmp_path / "log"))
    for entry in lines_of(out / "metrics.jsonl"):
        noted = [line for line in lines_of(tmp_path / "log") if line[2] == entry["step"]]
        names = [name for name, _, _ in noted]
        assert len(names) == len(set(names)) and "step_ms_max" in names, names
        values = sorted([value for _, value, _ in noted])
        assert values == sorted(numbers_in({**entry, "step": None})), entry
    assert scalars(dict(loss=None, ranks=dict(step_ms=[1, 2, 3], slowest=None))) == dict(
        step_ms_min=1, step_ms_mean=2, step_ms_max=3)


def half_of_torchrun():
    """Plant a rank's number without the rest of what torchrun says."""
    os.environ["RANK"] = "0"


def test_a_rank_without_torchrun_is_refused(tmp_path):
    refused("RANK is set, but not by torchrun: .*WORLD_SIZE", tmp_path, plant=half_of_torchrun)

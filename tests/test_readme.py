"""README.md: its commands, numbers, names and breaks."""

import itertools
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from ddp import DDP
from tests.params import full, ROOT, slug
from tests.runs import finish, run_train
from verify import gather, PROOF, rows_of, STAGES


def blocks_of(language):
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shortened(words):
    """The same command in a second: of a flag that is given twice the last one counts."""
    more = dict(n_layer=2, n_head=2, n_embd=16, n_kv_head=1, block_size=16, sample_tokens=8,
                eval_steps=2, save_interval=2, warmup_steps=1, tokenizer="bytes", device="cpu")
    steps = int(words[words.index("--max_steps") + 1]) if "--max_steps" in words else 0
    more["max_steps"] = steps if 0 < steps < 20 else max(4, steps // 50)
    if "--init_from" in words:  # whose folder has the sizes
        more = {name: value for name, value in more.items() if name[:2] != "n_"}
    data = [] if ".txt" in str(words) else [f"--dataset={ROOT}/model.py"]
    return [*words, "--no-compile", *data, *(f"--{name}={value}" for name, value in more.items())]


@pytest.mark.parametrize("package", [None, full("safetensors")])
def test_readme_commands_run(package, tmp_path):
    """Every bash block is valid shell, and the commands, and the example of one's own module, end
    well, one after the other in one folder, on a smaller model and fewer steps. Those that need a
    package are a row of their own."""
    if package:
        pytest.importorskip(package, reason=f"pip install {package}")
    text = "".join(blocks_of("bash")).replace("\\\n", " ")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    shutil.copy(ROOT / "model.py", tmp_path / "my.txt")
    for line in text.splitlines():
        needs_package = re.search("--export_hf|--init_from", line) is not None
        if " train.py" in line and "--nnodes" not in line and needs_package == bool(package):
            words = shlex.split(line, comments=True)
            W = int((re.findall(r"--nproc_per_node=(\d+)", line) or [1])[0])
            result = finish(None, W, argv=shortened(words[words.index("train.py") + 1:]),
                            plant=partial(os.chdir, tmp_path))
            assert result["world_size"] == W and math.isfinite(result["val_loss"]), line
    own, muon, _ = blocks_of("python")
    with_muon = re.sub(r"    model = .*\n    optimizer = .*\n", muon, own)
    with_muon = with_muon.replace("optimizer.step()", "muon.step(), adamw.step()")
    with_muon = with_muon.replace("optimizer.zero_grad()", "model.zero_grad()")
    for text in (own, with_muon):
        (tmp_path / "own.py").write_text(text)
        script = partial(runpy.run_path, f"{tmp_path}/own.py", run_name="__main__")
        run = run_train(None, 2, plant=script, argv=["--help"])
        losses = re.findall(r"rank \d: loss 0\.\d{4}", "".join(run.stdout))
        assert run.codes == [0, 0] and len(losses) == 2, run


@pytest.mark.full
def test_bench_makes_tables(tmp_path):
    """bench.sh and cluster/slurm.sh are valid shell. A row of bench.sh that fails says why, the
    others are in its table, with equal hashes; mistakes are one line."""
    for path in ("bench.sh", "cluster/slurm.sh"):
        subprocess.run(["bash", "-n", ROOT / path], check=True)
    sizes = ["--n_layer", "1", "--n_embd", "16", "--n_head", "1", "--block_size", "16"]
    for path in (*ROOT.glob("*.py"), ROOT / "bench.sh"):
        shutil.copy(path, tmp_path / path.name)
    for path in ("assets", "trainer"):
        shutil.copytree(ROOT / path, tmp_path / path)
    bench = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)
    done = bench(["./bench.sh", "bits", "--worlds", "2", "--modes", "zero2 zero3 zero9",
                  "--max_steps", "2", *sizes])
    hashes = re.findall(r"^\| zero[23] \| `(\w{8})` \|$", done.stdout, re.MULTILINE)
    assert len(hashes) == 2 and len(set(hashes)) == 1, done.stdout + done.stderr
    assert done.returncode == 1 and "Failed: zero9, W=2" in done.stdout, done.stdout
    for words, fact in ((["tune"], "bits "), (["link"], "needs rates"),
                        (["modes", "--lr", "fast"], "--lr"), (["modes", "--worlds"], "value")):
        done = bench(["./bench.sh", *words])
        assert done.returncode == 2 and fact in done.stderr, f"{words}: {done.stderr}"


class ThreeParameters(nn.Module):
    """Of the README's step with numbers. Sample x has the gradients 1 x, 2 x, ... 8 x."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([10.0, 20, 30, 40, 50]))
        self.second = nn.Parameter(torch.tensor([60.0, 70]))
        self.third = nn.Parameter(torch.tensor([80.0]))

    def forward(self, x):
        parameters = torch.cat((self.first, self.second, self.third))
        return (parameters * torch.arange(1, 9)).sum() * x


def two_chunks(values):
    """Values of a bucket, by chunk: of all eight both chunks, of this rank's four its own, with
    None for the other."""
    if len(values) == 8:
        return values[:4], values[4:]
    return (values, None) if dist.get_rank() == 0 else (None, values)


def assert_in_readme(kind, values):
    """The README has a line with a kind of values, and what rank 0 and rank 1 have of them."""
    texts = []
    for chunk in two_chunks(values):
        numbers = [] if chunk is None else chunk.tolist()
        texts.append(" ".join(f"{number:.0f}" for number in numbers))
    of_ranks = gather(" | ".join(texts))
    row = " ".join([kind, *" ".join(of_ranks).split()])
    lines = (ROOT / "README.md").read_text().splitlines()
    assert row in [" ".join(line.split()) for line in lines], f"the README does not have: {row}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_readme_has_these_numbers(mode):
    """The README's step with numbers is what buffers hold, without the gaps that align them."""
    filled = []  # the gradients before they are sent

    def note(reduce, bucket):
        filled.append(bucket.gradients.clone())
        return reduce(bucket)

    def parameters():
        if mode == "ddp":
            return torch.cat([p.detach() for p in reversed(list(model.parameters()))])
        return bucket.sharded if bucket.unsharded is None else bucket.unsharded

    with mock.patch.multiple("zero", ALIGN_BYTES=4, ALIGN_CHUNK_BYTES=4):
        model = {"ddp": DDP, **STAGES}[mode](ThreeParameters())
    [bucket] = model._buckets
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    assert_in_readme("parameters", parameters())
    with mock.patch.object(model, "_reduce", partial(note, model._reduce)):
        model(2 + 4 * dist.get_rank()).backward()
    assert_in_readme("gradients", filled[0])
    is_whole = mode in ("ddp", "zero1")
    assert_in_readme("gradients", bucket.gradients if is_whole else bucket.sharded_gradients)
    optimizer.step()
    momentum = []
    for p in reversed(list(model.parameters())):
        momentum.append(optimizer.state[p]["momentum_buffer"])
    assert_in_readme("momentum", torch.cat(momentum))
    assert_in_readme("parameters", parameters())
    with torch.no_grad():
        model(0)
    assert_in_readme("parameters", parameters())


def arguments_of(command):
    """How a test runs a command of the README: with this Python, whatever PATH has."""
    program, *rest = shlex.split(command)
    return [sys.executable, *(["-m", "pytest"] if program == "pytest" else []), *rest]


def breaks():
    """The README's tables of breaks as parameters: a file, a line of it, what is put there, and the
    command of a check."""
    row = r"^\| \[(\S+)\]\(\1\) `(.*?)` \| `(.*?)` \|.*\| `([^`]+)` \|$"
    found = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert found, "no table of breaks"
    return [pytest.param(*values, id=slug(" ".join(values[:2]))) for values in found]


@pytest.mark.full
@pytest.mark.parametrize("file, old, new, command", breaks())
def test_breaks_are_caught(file, old, new, command, tmp_path):
    """In a copy of the tree in which a line of the README's tables is broken the check fails: one
    that passes on broken code is worth nothing."""
    text = (ROOT / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old}"
    for pattern in ("*.py", "*.md", "*.sh", "*.toml", "trainer/*.py", "tests/*.py"):
        for path in ROOT.glob(pattern):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)  # without its mode: it may be read-only
    (tmp_path / file).write_text(text.replace(old, new))
    done = subprocess.run(arguments_of(command), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout + done.stderr


def test_readme_leads_there():
    """Files, headings and functions that the README names exist."""
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = set()
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        headings.add(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"))
    for file, heading in re.findall(r"\]\(([\w./]*)(?:#([^)]*))?\)", prose):
        assert (ROOT / file).exists() and (file or heading in headings), f"{file}#{heading}"
    for names, file in re.findall(r"\[(`[^]]*`)\]\((\w+\.py)\)", prose):
        for name in re.findall(r"`(?:[A-Z]\w+\.)?(\w+)`", names):
            assert re.search(rf"\b(def|class) {name}\b", (ROOT / file).read_text()), f"no {name}"


def list_tests():
    """Plant pytest in place of train.py."""
    sys.exit(pytest.main(["--full", "--collect-only", "-q", "-n", "0", str(ROOT)]))


def test_readme_names_checks():
    """Each command of the README that runs checks finds some."""
    rows = []
    for check in itertools.chain(*PROOF.values()):
        rows += [row.name for row in rows_of(check, is_full=True)]
    listing = run_train(None, plant=list_tests, argv=[]).stdout[0].splitlines()
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"`((?:python verify\.py|pytest|python -m pytest)[^`]*)`", text)
    assert len(commands) > 40, f"{len(commands)} commands"
    for command in set(commands):
        words = shlex.split(command)
        if "verify.py" in words:
            names = [word for word in words[2:] if not word.startswith("--") and word != "own.py"]
            assert all(any(name in row for row in rows) for name in names), f"no row: {command}"
        elif "-k" in words:
            for choice in words[words.index("-k") + 1].split(" or "):
                parts = choice.split(" and ")
                found = [line for line in listing if all(part in line for part in parts)]
                assert found, f"no test has {choice}: {command}"

"""README.md and docs/: their commands, numbers, names, links and breaks."""

import ast
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cache, partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import ddp
import verify
from data import load_tokenizer
from tests.common import ROOT
from tests.runs import finish, run_alone, run_train
from zero import Zero1, Zero2, Zero3

PAGES = {path.stem: path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")),
                                      ROOT / "tests" / "PROMISES.md")}
PAGES["dropin"] = ROOT / "dropin" / "README.md"


def blocks_of(page, language):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page].read_text(), re.M | re.S)
    return [text for its_language, text in blocks if its_language == language]


def prose_of(path):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page, package", [("README", None), ("using", None),
                                           ("using", "safetensors")])
def test_readme_commands_run(page, package, tmp_path):
    """Every bash block is valid shell, and the commands end well, one after the other in one
    folder, on a smaller model and fewer steps. Those that need a package are a row of their own."""
    if package:
        pytest.importorskip(package, reason=f"pip install {package}")
    text = "".join(blocks_of(page, "bash")).replace("\\\n", " ")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    shutil.copy(ROOT / "model.py", tmp_path / "my.txt")
    hashes = {}  # {command: that of its run}
    for line in text.splitlines():
        needs_package = re.search("--export_hf|--init_from", line) is not None
        if " train.py" in line and "--nnodes" not in line and needs_package == bool(package):
            words = shlex.split(line, comments=True)
            W = int((re.findall(r"--nproc_per_node=(\d+)", line) or [1])[0])
            result = finish(None, W, argv=shortened(words[words.index("train.py") + 1:]),
                            plant=partial(os.chdir, tmp_path))
            assert result["world_size"] == W and math.isfinite(result["val_loss"]), line
            hashes[line] = result.get("param_sha256")
    if page == "README":
        claim = [actual for line, actual in hashes.items() if "--max_steps 20" in line]
        assert len(claim) == 2 and len(set(claim)) == 1, claim


def test_readme_own_loop_has_one_hash(tmp_path):
    """own.py has one hash on 1, 2 and 3 ranks, in DDP where a rank has one backward, and in a plain
    loop of one process; with Muon it runs."""
    [own] = blocks_of("README", "python")
    in_ddp = own.replace("from zero import Zero3", "from ddp import DDP")
    in_ddp = re.sub(r"model = Zero3\(.*\)", "model = DDP(net)", in_ddp)
    plain = re.sub(r"model = Zero3\(.*\)", "model = net", own)
    plain = re.sub(r" +model\.set_.*\n", "", plain).replace("model.shard_group", "None")
    plain = plain.replace("model.full_parameters()", "net.named_parameters()")
    plain = plain.replace("weight.cpu()", "weight.detach().cpu()")
    [muon] = blocks_of("dropin", "python")
    with_muon = re.sub(r"    model = .*\n    optimizer = .*\n", muon, own)
    with_muon = with_muon.replace("from ddp import clip_gradients_\n", "")
    [head] = re.findall("write `(from dropin import .*?)` at", PAGES["dropin"].read_text())
    with_muon = with_muon.replace("from zero import Zero3", head)
    with_muon = with_muon.replace("optimizer.step()", "muon.step(), adamw.step()")
    with_muon = with_muon.replace("optimizer.zero_grad()", "model.zero_grad()")
    steps_of = partial(re.sub, r"range\(100\)", "range(10)")
    in_ddp = in_ddp.replace("N = 12", "N = 2")
    alone = plain.replace("N = 12", "N = 2")
    hashes = {}
    for name, W, text in (("plain", 1, plain), ("zero3", 1, own), ("zero3", 2, own),
                          ("zero3", 3, own), ("muon", 2, with_muon), ("plain, N = 2", 1, alone),
                          ("ddp, N = 2", 2, in_ddp)):
        (tmp_path / "own.py").write_text(steps_of(text))
        run = run_train(None, W, plant=partial(run_own, tmp_path, W), argv=["--help"])
        ends = re.findall(r"rank \d: loss \d\.\d{4}, weights ([0-9a-f]{8})$", "".join(run.stdout),
                          re.MULTILINE)
        assert run.codes == [0] * W and len(ends) == W and len(set(ends)) == 1, f"{name}: {run}"
        hashes[f"{name} on {W}"] = ends[0]
    own_hashes = [hashes[f"zero3 on {W}"] for W in (1, 2, 3)]
    assert {*own_hashes} == {hashes["plain on 1"]}, hashes
    assert hashes["ddp, N = 2 on 2"] == hashes["plain, N = 2 on 1"], hashes
    assert "Zero3(" not in plain + in_ddp and "uncut=" in with_muon


def run_own(folder, W):
    """Plant own.py of a folder, on W ranks."""
    if W == 1:  # as torchrun would start it
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                          MASTER_ADDR="localhost", MASTER_PORT=str(store.port),
                          TORCHELASTIC_USE_AGENT_STORE="True")
    with mock.patch("oracle.kinds_of_devices", return_value=["cpu"]):
        runpy.run_path(f"{folder}/own.py", run_name="__main__")


class Documents:
    """A data set as the package `datasets` has it: a slice is {column: values}."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, some):
        return dict(text=self.texts[some])


def test_using_prepares_tokens(tmp_path):
    """The script of OpenWebText writes each document of a small text and the token that ends it,
    and nothing else, in order, across its batches of 1,000; train.py trains on that. Bytes are in
    place of GPT-2's tokens, whose table would be a download."""
    [script] = [block for block in blocks_of("using", "py") if "prepare.py" in block]
    path = tmp_path / "prepare.py"
    path.write_text(script)
    lines = ((ROOT / "ddp.py").read_text() + (ROOT / "zero.py").read_text()).splitlines()
    parts = dict(test=Documents(lines[:50]), train=Documents(lines[50:]))
    hub = mock.MagicMock(__spec__="a stand-in")
    whole = hub.load_dataset.return_value
    whole.train_test_split.return_value = parts
    data = tmp_path / "data"
    with (mock.patch.dict(sys.modules, datasets=hub), mock.patch.object(sys, "argv", ["", data]),
          mock.patch("tiktoken.get_encoding", return_value=load_tokenizer("bytes"))):
        runpy.run_path(str(path), run_name="__main__")
    assert whole.train_test_split.call_args.kwargs["seed"] == 2357
    assert len(lines) > 1100
    for name, expected in (("val", lines[:50]), ("train", lines[50:])):
        tokens = np.fromfile(data / f"{name}.bin", dtype=np.uint16)
        *documents, rest = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
        texts = [bytes(document[:-1].tolist()).decode() for document in documents]
        assert texts == expected and len(rest) == 0, name
    finish(tmp_path / "out", dataset=data, tokenizer="gpt2", n_embd=8, n_layer=1)


def use_using(folder, stage, begins):
    """On each rank: a model in a stage makes a step, and is saved by the lines of using.md; or is
    loaded by them. Then another step -> none; rank 0 keeps the weights."""
    [code] = [block for block in blocks_of("using", "py") if "dcp.save(sharded_state" in block]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1))
    net[1].requires_grad_(False)
    model = net if stage is None else {"zero1": Zero1, "zero3": Zero3}[stage](net, units=list(net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)
    code = code.replace('"saved"', repr(f"{folder}/saved"))
    names = dict(model=model, optimizer=optimizer)
    imports, save, load = re.split(r"^(?=dcp\.)", code, flags=re.MULTILINE)
    exec(imports, names)
    if begins:
        step_alike(model, optimizer)
        exec(save, names)
    else:
        exec(load, names)
    step_alike(model, optimizer)
    actual = net.state_dict() if stage is None else model.full_state_dict()
    if dist.get_rank() == 0:
        torch.save(actual, f"{folder}/{stage}.pt")


def step_alike(model, optimizer):
    """The same gradient on every rank: on a power of two of them their mean has no rounding."""
    model(torch.full((2, 3), 0.5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_using_saves_and_loads(tmp_path):
    """What using.md's lines save from Zero3 on 4 ranks Zero1 loads on 2, and a plain module in one
    process, and they go on alike; a part is frozen."""
    verify.run(4, use_using, tmp_path, "zero3", True)
    expected = torch.load(tmp_path / "zero3.pt")
    for stage, W in (("zero1", 2), (None, 1)):
        verify.run(W, use_using, tmp_path, stage, False)
        for name, value in torch.load(tmp_path / f"{stage}.pt").items():
            assert torch.equal(value, expected[name]), f"{name} in {stage}"


def use_usings_loop(out_dir, last_step):
    """On each rank: the loop of using.md, until a step -> None; rank 0 keeps the weights."""
    [code] = [block for block in blocks_of("using", "py") if "find_checkpoint" in block]
    begin, save = code.split("...\n")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2))
    model = Zero3(net, units=[net[0]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)
    names = dict(model=model, optimizer=optimizer)
    exec(begin.replace('"out"', repr(out_dir)), names)
    while names["step"] < last_step:
        names["step"] += 1
        step_alike(model, optimizer)
        exec(save, names)
    actual = model.full_state_dict()
    if dist.get_rank() == 0:
        torch.save(actual, f"{out_dir}/{last_step}.pt")
        os.close(names["folder"].lock)  # as at the end of its process


def test_usings_loop_goes_on(tmp_path):
    """From the newest checkpoint that is sound, at another number of ranks, to the weights of a
    loop that was never stopped; the two newest checkpoints stay."""
    alone, out = tmp_path / "alone", tmp_path / "out"
    verify.run(1, use_usings_loop, str(alone), 5)
    verify.run(2, use_usings_loop, str(out), 3)
    (out / "step_00000003" / "checkpoint.json").write_text("damaged")
    verify.run(4, use_usings_loop, str(out), 5)  # 1/3 would round
    expected = torch.load(alone / "5.pt")
    for name, value in torch.load(out / "5.pt").items():
        assert torch.equal(value, expected[name]), name
    assert sorted(path.name for path in out.glob("step_*")) == ["step_00000004", "step_00000005"]
    assert (out / "earlier/1/step_00000003").exists()


class Three(nn.Module):
    """The model of the course's first chapter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0]))
        self.second = nn.Parameter(torch.tensor([60.0, 70.0]))
        self.third = nn.Parameter(torch.tensor([80.0]))

    def forward(self, x):
        return (torch.cat((self.third, self.second, self.first)) * x).sum()


def step_in_numbers(folder):
    """On each of two ranks: the course's step in every mode, without gaps in buckets; its rows go
    to a file of this rank."""
    x = torch.tensor([16.0, 12, 14, 2, 4, 6, 8, 10]) * (1 + 2 * dist.get_rank())
    rows = {}
    with mock.patch.multiple(ddp, ALIGN=1, ALIGN_CHUNK=1):
        for wrapper in (ddp.DDP, Zero1, Zero2, Zero3):
            net = nn.Sequential(Three())
            units = {} if wrapper is ddp.DDP else dict(units=[net[0]])
            model = wrapper(net, **units)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
            model(x).backward()
            [bucket] = model.buckets
            trained = bucket.parameters if wrapper is ddp.DDP else bucket.shards
            gradients = torch.tensor(trained[0].grad.untyped_storage().tolist(), dtype=torch.uint8)
            optimizer.step()
            momentum = [optimizer.state[p]["momentum_buffer"] for p in trained]
            parameters = bucket.whole if wrapper in (Zero1, Zero2) else torch.cat([*trained])
            rows[wrapper.__name__] = dict(gradients=gradients.view(torch.float32).tolist(),
                                          momentum=torch.cat(momentum).tolist(),
                                          parameters=parameters.tolist())
    torch.save(rows, f"{folder}/{dist.get_rank()}.pt")


def test_course_has_these_numbers(tmp_path):
    """The rows of its first chapter are what ranks hold."""
    verify.run(2, step_in_numbers, tmp_path)
    [block] = [block for block in blocks_of("course", "") if block.startswith("model  ")]
    _, *sections = re.split(r"^(?=\S)", block, flags=re.MULTILINE)
    titles = {"DDP": "DDP:", "Zero1": "Zero1:", "Zero2": "Zero2:", "Zero3": "after the step"}
    n_rows = 0
    for mode, title in titles.items():
        [section] = [section for section in sections if section.startswith(title)]
        for line in section.splitlines()[1:]:
            name = line.split()[0] if line else None
            for rank, text in enumerate((line[24:54], line[54:])):
                expected = [float(number) for number in text.replace("|", " ").split()]
                actual = torch.load(tmp_path / f"{rank}.pt")[mode]
                assert not line or actual[name] == expected, f"{mode}, rank {rank}: {name}"
                n_rows += bool(line)
    assert n_rows == 2 * (3 + 3 + 1 + 3)


def in_order(lines, text):
    """The first of lines that text does not have after those before it; None if it has all."""
    rest = iter(text.splitlines())
    for line in lines:
        if not any(line in actual for actual in rest):
            return line
    return None


def traces():
    """The course's commands with --trace, and the excerpts of what they print, as parameters."""
    text = PAGES["course"].read_text()
    block = r"^```sh\n(torchrun [^\n]*--trace[^\n]*)\n```\n```\n(.*?)^```$"
    actual = re.findall(block, text, re.MULTILINE | re.DOTALL)
    assert len(actual) == 2, "the course has traces of ddp and zero3"
    return [pytest.param(*pair, id=pair[0].split()[4]) for pair in actual]


@pytest.mark.parametrize("command, excerpt", traces())
def test_course_has_this_trace(command, excerpt, tmp_path):
    """The events of each excerpt come in this order, on rank 0, whatever time they take."""
    words = shlex.split(command)[3:]
    more = [f"--out_dir={tmp_path}", f"--dataset={ROOT}/model.py", "--eval_steps=2",
            "--sample_tokens=2", "--save_interval=0", "--global_batch_size=16"]
    run = run_train(None, 2, argv=[*words, *more])
    assert run.codes == [0, 0], run
    expected = []
    for line in excerpt.splitlines():
        if line != "...":
            event = re.sub(r"^ *[0-9.]+ ms  |, [0-9.]+ ms$", "", line)
            expected.append(event)
    of_rank_0 = "\n".join(line for line in run.stdout[0].splitlines() if "rank 1" not in line)
    missing = in_order(expected, of_rank_0)
    assert missing is None, f"no {missing!r} in its place in:\n{of_rank_0}"


def run_oracle(folder):
    """Plant oracle.py of a folder, as torchrun starts it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "here"
    run_alone(folder, "oracle.py")


def test_course_has_this_table(tmp_path):
    """What oracle.py prints on three ranks, but for the hashes: which of these are equal."""
    [text] = [block for block in blocks_of("course", "") if block.startswith("3 ranks; bytes")]
    (tmp_path / "oracle.py").write_text((ROOT / "oracle.py").read_text())
    run = run_train(None, 3, plant=partial(run_oracle, tmp_path), argv=[])
    assert run.codes == [0, 0, 0], run
    names = {}

    def name_of(match):
        return names.setdefault(match[0], f"hash {len(names)}")

    expected = re.sub(r"\b[0-9a-f]{8}\b", name_of, text)
    names.clear()
    actual = re.sub(r"\b[0-9a-f]{8}\b", name_of, run.stdout[0])
    assert actual == expected


def test_breaks_are_there():
    """What the course's tables of breaks tell a reader to change stands once in its file."""
    row = r"^\| \[(\S+)\]\(\.\./\1\) `(.*?)` \| `.*?` \| .* \| `[^`]+` \|$"
    breaks = re.findall(row, PAGES["course"].read_text(), re.MULTILINE)
    assert len(breaks) >= 15, "no tables of breaks"
    for file, old in breaks:
        n = (ROOT / file).read_text().count(old)
        assert n == 1, f"{file} has {n} times {old}"


def test_commands_find_checks():
    """Each command of a page that runs checks finds some."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0"]
    listing = subprocess.run([*words, "tests", "dropin", "judge"], cwd=ROOT, text=True,
                             capture_output=True).stdout.splitlines()
    listed = run_train(None, plant=partial(run_alone, ROOT, "verify.py", "--list"), argv=[])
    rows = listed.stdout[0].splitlines()
    text = "\n".join(path.read_text() for path in PAGES.values())
    commands = re.findall(r"`((?:python verify\.py|pytest|python -m pytest)[^`]*)`", text)
    assert len(commands) > 30, f"{len(commands)} commands"
    for command in commands:
        words = shlex.split(command)
        if "verify.py" in words:
            names = [word for word in words[2:] if not re.search("^--|own.py|cuda", word)]
            assert all(any(name in row for row in rows) for name in names), f"no row: {command}"
        elif "-k" in words:
            for choice in words[words.index("-k") + 1].split(" or "):
                parts = choice.split(" and ")
                chosen = [line for line in listing if all(part in line for part in parts)]
                assert chosen, f"no test has {choice}: {command}"


def headings_of(path):
    """The names of a page's headings in links."""
    actual = set()
    for heading in re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE):
        actual.add(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"))
    return actual


@cache
def definitions(path):
    """The names, such as "Bucket.fill", of a Python file."""
    actual = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            actual.add(node.name)
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    actual.add(f"{node.name}.{method.name}")
    return actual


def names_in(text):
    """[(a file as a page names it, a function or class of it)] of links such as [`name`](file.py).
    """
    actual = []
    for names, file in re.findall(r"\[(`[^]]*`)\]\(([\w./]+\.py)\)", text):
        for name in re.findall(r"`([\w.]+)`", names):
            actual.append((file, name))
    return actual


@pytest.mark.parametrize("page", PAGES)
def test_readme_leads_there(page):
    """Files, headings and functions that a page names exist."""
    prose, folder = prose_of(PAGES[page]), PAGES[page].parent
    for file, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", prose):
        path = folder / file if file else PAGES[page]
        assert path.exists(), f"{page}: no {file}"
        is_heading = heading and path.suffix == ".md"  # test_page.py sees to events of step.html
        assert not is_heading or heading in headings_of(path), f"{page}: no {file}#{heading}"
    for file, name in names_in(prose):
        is_file = name.endswith(".py")
        assert is_file or name in definitions(folder / file), f"{page}: no {name} in {file}"


def test_readme_has_the_formulas_numbers():
    """7B parameters on 8 GPUs, in fp32 and as the paper counts; equal hashes are said to be."""
    readme, psi, W = PAGES["README"].read_text(), 7, 8
    parts = (16 * psi, 8 * psi + 8 * psi / W, 4 * psi + 12 * psi / W, 16 * psi / W)
    numbers = "{:g}, {:g}, {:g} and {:g} GB".format(*parts)
    assert numbers in readme, numbers
    parts = (16 * psi, 4 * psi + 12 * psi / W, 2 * psi + 14 * psi / W, 16 * psi / W)
    numbers = "{:g}, {:g}, {:g} and {:g} GB".format(*parts)
    assert numbers in readme, numbers
    claimed = re.findall(r'^RESULT .*"param_sha256": "(\w+)', readme, re.MULTILINE)
    assert len(claimed) == 2 and len(set(claimed)) == 1, claimed
    green = re.findall(r"🟢 `(\w{8})`", readme)
    others = re.findall(r"\| `([0-9a-f]{8})`", readme)
    assert len(green) == 11 and len(set(green)) == 1 and green[0] not in others, green

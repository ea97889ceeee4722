"""The rows of verify.py, and its command line."""

import itertools
import os
import re
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from tests import own
from tests.common import native
from tests.common import ROOT
from judge.ranks import device, Groups, Row, rows_of
from judge.training import memory_is_the_formulas, PROOF, traffic_is_the_formulas
from tests.ranks import on_ranks


def parameters():
    actual = []
    for check in itertools.chain(*PROOF.values()):
        samples = rows_of(check, is_full=False)
        for row in rows_of(check, is_full=True):
            words = [row.check.__name__, *row.words]
            name = "-".join([*map(slug, words), f"W{row.W}"])
            marks = [pytest.mark.limit(row.check.limit_s)]
            if row not in samples:
                marks.append(pytest.mark.full)
            actual.append(pytest.param(row.check, row.arguments, row.W, id=name, marks=marks))
    return actual


def what_counts(row):
    """In a sample: each check, DDP and each stage, however they are set, and each W."""
    arguments = row["arguments"]
    names = [arguments[name] for name in ("wrapper", "stage", "ours") if name in arguments]
    kinds = [re.search("[a-z]+$|[0-9]|$", str(name).split(" ")[0])[0] for name in names]
    return dict(check=row["check"], kinds=kinds, W=row["W"])


@on_ranks()
@pytest.mark.parametrize("check, arguments, W", parameters())
def test_proof(check, arguments):
    """W ranks have the bits of one process, of oracle.py and of torch's wrappers, and the bytes of
    the paper: see verify.PROOF. (W is plugin.py's fixture. Without --full it is a sample of the
    rows that verify.py runs.)"""
    check(**arguments)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", ["ddp", "zero2", "zero3"])
def test_traffic_of_native_collectives(wrapper):
    """Of torch's own all-gather and all-to-all, which accelerators have, a rank's own chunk does
    not count as received."""
    with native():
        traffic_is_the_formulas(wrapper)


def test_skipped_rows_say_why():
    """What cannot be on an accelerator starts no ranks there, and its line has the reason."""
    groups = Groups("abacus")
    outcome, line = Row(memory_is_the_formulas, 1024, dict(stage="zero3")).run(groups)
    assert outcome == "skipped" and "zero3, skipped: torch's fake group" in line, line
    assert not groups.of_size


@on_ranks(1)
def test_device_of_a_group():
    """A group on a CPU has its modules there, whatever accelerators the machine has."""
    assert device() == torch.device("cpu")


def test_a_file_need_not_know_of_devices():
    """What its loss gives to the model goes to the device, before any other hook sees it, and what
    comes out goes back; but not where the loss is on the device itself. No hook is left. (Here the
    device is meta, which has no values.)"""
    seen = []
    module = torch.nn.Linear(2, 2, device="meta")
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].device.type))

    def loss_on(kind, model, step, number):
        x = torch.ones(1, 2, device=kind)
        return model(x) - x

    with (mock.patch.object(own, "device", lambda: torch.device("meta")),
          mock.patch.object(torch.Tensor, "cpu", lambda t: torch.zeros(t.shape))):
        for kind in ("cpu", "meta"):
            actual = own.on_device(partial(loss_on, kind), module, 0, 0)
            assert actual.device.type == kind
    assert seen == ["meta", "meta"]
    assert len(module._forward_pre_hooks) == 1 and not module._forward_hooks


OWN = """
import torch
from torch import distributed as dist

def module():
    return torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(4, 4)])[0])

def loss(model, step, number):
    x = torch.ones(2, 4) * (number + 1)
    {more}
    return model(x).square().mean()
"""


@on_ranks()
@pytest.mark.parametrize("more, words, status, fact", [
    pytest.param("", ["--module", "own.py"], 0, " passed, 0 failed", id="module"),
    pytest.param("x = x + (dist.is_initialized() and dist.get_rank() == 1)", ["--module", "own.py"],
                 1, "FAILED ddp", id="module_that_differs"),
    pytest.param("raise OSError('gone')", ["--module", "own.py"], 2, "own.py: OSError: gone",
                 id="module_that_raises"),
    pytest.param("", ["--module", "none.py"], 2, "none.py: FileNotFoundError", id="no_module"),
    pytest.param("", ["--device", "abacus"], 2, "--device abacus is not on this machine: choose",
                 id="no_device"),
    pytest.param("", ["one_process W=9"], 2, "no row has a name with one_process W=9", id="no_row"),
    pytest.param("", ["one_process W=1 zero1"], 0, "1 passed, 0 failed", id="name"),
    pytest.param("", ["W=2 zero2", "--list"], 0, "\n    traffic_is_the_formulas W=2 zero2\n",
                 id="list")])
def test_verify_takes(more, words, status, fact, tmp_path):
    """verify.py's words: a module of a file, names of rows, --list; mistakes are one line."""
    (tmp_path / "own.py").write_text(OWN.format(more=more))
    done = subprocess.run([sys.executable, ROOT / "verify.py", *words], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    printed = done.stdout + done.stderr
    assert done.returncode == status and fact in printed, printed
    assert status < 2 or len(done.stderr.splitlines()) == 1, printed


# A user of nanoGPT has a model.py and a train.py. Others have a ddp.py, a data.py, tests/.
BESIDE = {
    "model.py": "from ddp import layer\n\ndef net():\n    return layer()\n",
    "ddp.py": "import torch\n\ndef layer():\n    return torch.nn.Linear(4, 4)\n",
    "train.py": "OWN = True\n", "verify.py": "raise ZeroDivisionError\n",
    "tests/helpers.py": "import torch\n\ndef x(number):\n    return torch.ones(2, 4) * number\n",
    "own.py": """
from model import net
from train import OWN

def module():
    return net()

def loss(model, step, number):
    from tests.helpers import x
    return model(x(number + 1)).square().mean() * OWN
""",
    "mine.py": """
from dropin.zero import Zero2
from model import net
from train import OWN

def wrap(module):
    import ddp
    assert OWN and net() and not hasattr(ddp, "DDP")
    return Zero2(module)
"""}


@on_ranks()
@pytest.mark.parametrize("folder", ["", "package/"])
@pytest.mark.parametrize("words, fact", [
    pytest.param(["--module", "own.py", "W=2 zero2"], "1 passed, 0 failed", id="module"),
    pytest.param(["--wrapper", "mine.py", "W=2 scaled"], "5 same bits, 0 close", id="wrapper")])
def test_files_beside_a_users_own(folder, words, fact, tmp_path):
    """They come before ours, where verify.py is called from his folder, too; and what he lacks is
    ours. In a package his imports are those of its modules."""
    for name, text in BESIDE.items():
        file = tmp_path / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if folder and not name.startswith("tests/"):
            text = text.replace("from model", "from .model").replace("from ddp", "from .ddp")
        file.write_text(text)
    if folder:
        (tmp_path / folder / "__init__.py").write_text("")
    done = subprocess.run([sys.executable, ROOT / "verify.py", *words], cwd=tmp_path / folder,
                          text=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0 and fact in done.stdout, done.stdout + done.stderr

"""The judge: what it says of right wrappers, of the mistakes that people make, and of bad files."""

import faulthandler
import re
import shutil
import subprocess
import sys

import pytest
import torch

import verify
from judge.hints import mistake
from judge.judge import (holds_and_sends, judged, main, outcome_of_measuring, rows_of_wrapper,
                         tried, Verdicts)
from judge.rows import Row
from tests.common import ROOT

RIGHT = sorted((ROOT / "judge" / "examples" / "right").glob("*.py"))
WRONG = sorted((ROOT / "judge" / "examples" / "wrong").glob("*.py"))
CLOSE = {"same bits", "close"}
OURS = "our", "book", "naive", "by_hand"


def row(file, W, name, **options):
    """One where the simplest row of the module is right, which says nothing here."""
    verdicts = Verdicts(str(file))
    verdicts.outcomes[name, W] = "close"
    return verdicts.row(W, name, **options)


def outcomes(file, W, several):
    """Of several rows on the same ranks, which takes less time -> [(outcome, text), ...]"""
    answers = verify.run(W, all_judged, str(file), several)
    return [row(file, W, **options).outcome_of(of_ranks, None)
            for options, of_ranks in zip(several, zip(*answers))]


def all_judged(file, several):
    return [judged(file, **options) for options in several]


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_right_ones(path):
    """At W = 2 all have the bits of one process, also with two micro-steps; at W = 3 ours have, and
    others are close, since gloo's ring adds in another order."""
    simplest = [dict(name="gpt"), dict(name="scaled", micro_steps=2)]
    assert outcomes(path, 2, simplest) == 2 * [("same bits", "")]
    [(outcome, text), *others] = outcomes(path, 3, [
        dict(name="gpt"), dict(name="scaled", other="parameters"),
        dict(name="scaled", other="buffers"), dict(name="scaled", optimizer="AdamW")])
    assert outcome in ({"same bits"} if path.stem.startswith(OURS) else CLOSE), text
    if outcome == "close":
        number = float(re.fullmatch(r"the largest difference is (\S+) x fp32's rounding", text)[1])
        assert 0 < number < 4
    assert {outcome for outcome, _ in others} <= CLOSE, others


SHARED = "right without clipping, so it is clipped by another norm than that of all gradients"
MISTAKES = {  # {file: (what is said of it, a row in which it is)}
    "not_divided": ("its gradient is 3 x expected: not divided by the number of ranks",
                    dict(name="even")),
    "divided_twice": ("is 0.333 x expected: divided twice by the number of ranks",
                      dict(name="even")),
    "divided_by_micro_steps": ("is 0.5 x expected: divided by the number of micro-steps, as",
                               dict(name="even", micro_steps=2)),
    "last_micro_step_only": ("the last micro-step alone", dict(name="even", micro_steps=2)),
    "summed_again": ("was summed again, so it counts W times", dict(name="even", micro_steps=2)),
    "unequal_start": ("ranks begin with other values: wrap() has to send",
                      dict(name="scaled", other="parameters")),
    "buffers": ("ranks have other buffers: wrap() has to send",
                dict(name="scaled", other="buffers")),
    "own_norm": (SHARED, dict(name="gpt", clipped=True)),
    "own_norm_of_shard": (SHARED, dict(name="gpt", clipped=True)),
    "tied_twice": ("gpt.wte.weight: its gradient is 3 x expected: it has two names",
                   dict(name="gpt")),
    "unused_silent": ("not all ranks have used it", dict(name="skipping")),
    "unused": ("here ranks use different parameters", dict(name="odd")),
    "nothing_sent": ("a rank's own gradients alone: nothing was sent", dict(name="even")),
    "first_rank_only": ("inner.weight: its gradient", dict(name="even")),
    "race": ("its gradient", dict(name="even"))}


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_mistakes_are_named(path):
    """Each is wrong where it should be, with the right hint, and right on one rank."""
    faulthandler.disable()  # gloo ends a rank of one of them
    fact, options = MISTAKES[path.stem]
    outcome, text = row(path, 3, **options).outcome()
    assert outcome == ("died" if path.stem == "unused" else "wrong") and fact in text, text
    assert outcomes(path, 1, [dict(name="lora")]) == [("same bits", "")]


@pytest.mark.parametrize("numbers, fact", [
    ([[2, 2], [2, 2]], "by the number of ranks, or not divided by the number of micro-steps"),
    ([[0.5], [0.5]], "divided twice by the number of ranks"),
    ([[0, 1], [0, 1], [0, 1]], "the last micro-step alone"),
    ([[1, 0], [1, 0], [1, 0]], "the first micro-step alone"),
    ([[3, 1], [3, 1], [3, 1]], "what an earlier micro-step had summed"),
    ([[9, 3], [9, 3], [9, 3]], "what an earlier micro-step had summed"),
    ([[3, 3], [0, 0], [0, 0]], "a rank's own gradients alone"),
    ([[3, 1], [0, 1], [0, 1]], "of earlier micro-steps a rank has its own gradients alone"),
    ([[1], [1], [0]], "without the gradients of rank 2"),
    ([[1], [0], [0]], "a rank's own gradients alone"),
    ([[0.7], [0.7], [0.7]], "all of it is multiplied by one number"),
    ([[0.7], [0.9], [0.8]], "each rank's gradients are multiplied by a number of its own"),
    ([[0.7], [-0.9], [0.8]], "")])
def test_mistake(numbers, fact):
    """What these numbers mean, one for each rank and micro-step, on rank 0."""
    text = mistake(torch.tensor(numbers, dtype=torch.float64), 0)
    assert fact in text and bool(fact) == bool(text), text


def measured(path, W):
    return Row(holds_and_sends, W, str(path), {}, outcome_of_measuring).outcome()


@pytest.mark.parametrize("file, W, fact", [
    ("torch_ddp", 3, "holds as DDP: 16.0 bytes a parameter"),
    ("torch_ddp", 2, "(with 4 micro-steps 2.00), where DDP needs 2 (2)"),
    ("our_zero1", 3, "holds as ZeRO-1: 10.7 bytes a parameter between backward and step"),
    ("our_zero2", 4, "holds as ZeRO-2: 7.0 bytes"),
    ("our_zero3", 4, "holds as ZeRO-3: 4.0 bytes"),
    ("torch_fsdp2", 2, "micro-steps 12.00), where ZeRO-3 needs 3 (12)"),
    ("by_hand_2", 2, "micro-steps 8.00), where ZeRO-2 needs 2 (5), so more than it has to"),
    ("torch_redundancy", 4, "holds as ZeRO-1, and 0.7 more: 10.7 bytes a parameter"),
    ("naive", 2, "sends 2.00 (W-1)/W Psi elements")])
def test_what_it_holds_and_sends(file, W, fact):
    outcome, text = measured(ROOT / "judge" / "examples" / "right" / f"{file}.py", W)
    assert outcome == "measured" and fact in text, text


AFTER_BACKWARD = """
import os
import time
import torch.distributed as dist

def wrap(module):
    return module

def after_backward(model):
    {more}
"""


@pytest.fixture
def mine(tmp_path):
    """mine(text): the path of a file with it."""
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("more, fact", [
    pytest.param("pass", "not counted: nothing was sent by torch.distributed", id="nothing"),
    pytest.param("for p in model.parameters(): dist.all_reduce(p.grad.to_sparse())",
                 "not counted: could not", id="sparse"),
    pytest.param("for _ in (1, 2): [dist.all_reduce(p.grad) for p in model.parameters()]",
                 "sends 4.00 (W-1)/W Psi elements (with 4 micro-steps 4.00), where DDP needs 2 (2),"
                 " so more", id="twice")])
def test_what_cannot_be_counted_is_said(mine, more, fact):
    outcome, text = measured(mine(AFTER_BACKWARD.format(more=more)), 2)
    assert outcome == "measured" and fact in text, text


@pytest.mark.parametrize("more, outcome, fact", [
    pytest.param("time.sleep(60 * dist.get_rank())", "hung", "rank 1 hangs: killed after 3 s",
                 id="hung"),
    pytest.param("dist.get_rank() and os._exit(0)", "died", "rank 1 has died", id="died"),
    pytest.param("[p.grad + p for p in model.parameters()]", "died", "TypeError: unsupported",
                 id="crashed"),
    pytest.param("if dist.get_rank(): raise NotImplementedError('first\\nsecond')", "refused",
                 "rank 1: NotImplementedError: first second (after_backward, mine.py:10)",
                 id="refused")])
def test_hung_died_refused(mine, more, outcome, fact):
    file = mine(AFTER_BACKWARD.format(more=more.replace("\n", "\\n")))
    actual, text = row(file, 2, "even").outcome(seconds=3 if outcome == "hung" else 20)
    assert actual == outcome and fact in text, (actual, text)


# A right file, which files with a fault begin with.
BEGIN = """
import torch
import torch.distributed as dist

def wrap(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module

def after_backward(model):
    for p in model.parameters():
        used = torch.tensor(float(p.grad is not None))
        dist.all_reduce(used)
        if used > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
"""


@pytest.mark.parametrize("code, fact", [
    pytest.param("def wrap(module)\n    pass", "SyntaxError: expected ':' (mine.py, line 1)",
                 id="syntax_error"),
    pytest.param("import no_such_package", "No module named 'no_such_package' (<module>, mine.py",
                 id="missing_package"),
    pytest.param("raise RuntimeError('not here')", "RuntimeError: not here (<module>, mine.py:1)",
                 id="raises_at_import"),
    pytest.param("import argparse\nargparse.ArgumentParser().parse_args(['--lr'])", "SystemExit: 2",
                 id="reads_flags"),
    pytest.param("def warp(module): return module", "the file has no function named wrap",
                 id="no_wrap"),
    pytest.param("wrap = 3", "ValueError: wrap is no function", id="wrap_is_no_function"),
    pytest.param("def wrap(module): raise ValueError('too small')",
                 "WrapRaised: ValueError: too small (wrap, mine.py:1)", id="wrap_raises"),
    pytest.param("import sys\ndef wrap(module): sys.exit(3)", "SystemExit: 3 (wrap, mine.py:2)",
                 id="wrap_exits"),
    pytest.param("import os\ndef wrap(module): os._exit(1)", "rank 0 has died, with status 1",
                 id="wrap_ends_its_process"),
    pytest.param("def wrap(module): pass", "has returned NoneType, which cannot be called",
                 id="wrap_returns_none"),
    pytest.param("def wrap(): pass", "wrap() takes 0 positional arguments but 1 was given",
                 id="wrap_takes_nothing"),
    pytest.param("def wrap(module): return module.forward", "no parameters(): write trained(model)",
                 id="wrap_returns_a_function"),
    pytest.param("def wrap(module):\n    while True: pass", "hangs: killed after 3 s",
                 id="wrap_loops"),
    pytest.param(BEGIN + "def whole(model): return {'layer.bias': model.layer.bias}",
                 "ValueError: whole(model) has no layer.weight", id="whole_lacks_one"),
    pytest.param(BEGIN + "def whole(model): return {n: p[:2] for n, p in model.named_parameters()}",
                 "whole(model) has layer.weight as (2, 5) torch.float32, expected is (5, 5)",
                 id="whole_has_wrong_shapes"),
    pytest.param(BEGIN.replace("return module", "import copy; return copy.deepcopy(module)"),
                 "whole(model) has not changed in a step", id="whole_is_not_what_is_trained"),
    pytest.param(BEGIN + "def trained(model): return []", "trained(model) has no parameters",
                 id="no_trained"),
    pytest.param(BEGIN + "def accumulate(model): pass",
                 "TypeError: 'NoneType' object does not support the context",
                 id="accumulate_is_no_context")])
def test_bad_files_cannot_be_judged(mine, code, fact):
    with pytest.raises(verify.Failure) as raised:
        tried(mine(code), seconds=3 if "hangs" in fact else 60)
    text = str(raised.value)
    assert text.startswith("rank ") and fact in text and "\n" not in text, text


def test_a_file_may_want_more_than_one_rank(mine):
    """Without clip() no row clips."""
    claims = rows_of_wrapper(mine(BEGIN.replace(
        "    return module\n", "    assert dist.get_world_size() > 1\n    return module\n")))
    assert len(claims) == 5


def test_prints_are_not_shown(mine, capfd):
    """To stderr it may print where it is judged."""
    code = BEGIN.replace("def wrap(module):", "def wrap(module):\n    print('wraps')")
    file = mine(f"import sys\nprint('begins')\nprint('warns', file=sys.stderr)\n{code}")
    assert tried(file) == (False, "begins")
    assert capfd.readouterr() == ("", "")
    assert row(file, 2, "even").outcome() == ("same bits", "")
    assert capfd.readouterr().out == ""


# A reader of nanoGPT has a model.py and a train.py. Others have a ddp.py, a data.py, tests/.
BESIDE = {
    "model.py": "from ddp import layer\n\ndef net():\n    return layer()\n",
    "ddp.py": "import torch\n\ndef layer():\n    return torch.nn.Linear(4, 4)\n",
    "train.py": "OWN = True\n", "verify.py": "raise ZeroDivisionError\n",
    "judge.py": "raise ZeroDivisionError\n", "tests/__init__.py": "",
    "tests/helpers.py": "OWN = True\n",
    "my-file": """
from __future__ import annotations

import dataclasses

from dropin import Zero2
from model import net
from train import OWN
from zero import Zero1

@dataclasses.dataclass
class Size:
    n: int = 3

def wrap(module):
    import ddp
    from tests.helpers import OWN as too
    assert OWN and too and net() and not hasattr(ddp, "DDP")
    return Zero2(module)
"""}


def test_files_beside_a_users_own(tmp_path):
    """They come before ours, also where the judge is called in his folder; what he lacks is ours.
    His file may have any name."""
    for name, text in BESIDE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, ROOT / "judge", "my-file", "W=2 scaled"], cwd=tmp_path,
                          text=True, capture_output=True)
    assert done.returncode == 0 and "5 same bits, 0 close" in done.stdout, done


@pytest.mark.parametrize("file, words, status, facts", [
    ("right/small.py", ["W=2 even"], 0,
     ["\n2 same bits, 0 close, 0 wrong, 0 refused, 0 hung, 0 died\n"]),
    ("wrong/not_divided.py", ["W=2 even", "W=2 caller"], 1,
     [" 4 wrong, 0 refused, 0 hung, 0 died\n", "    and 1 more like it\n"]),
    ("right/small.py", ["--list", "clipped"], 0, ["\n    judged W=4 lora, clipped True\n"]),
    ("none.py", [], 2, ["judge: {}: there is no such file"]),
    ("right/small.py", ["nowhere"], 2, ["judge: no row has a name with nowhere"]),
    ("right/small.py", ["--device", "abacus"], 2, ["judge: --device abacus is not on this"])])
def test_the_command(file, words, status, facts, capsys):
    path = ROOT / "judge" / "examples" / file
    try:
        actual = main([str(path), *words])
    except SystemExit as exit:
        actual = exit.code
    out, err = capsys.readouterr()
    assert actual == status and all(fact.format(path) in out + err for fact in facts), out + err
    assert len(err.splitlines()) == (status == 2), err


def test_all_is_judged():
    """Every module, W and number of micro-steps."""
    claims = rows_of_wrapper(str(ROOT / "judge" / "examples" / "right" / "small.py"))
    names = {row.name for rows in claims.values() for row in rows}
    assert len(names) == 103
    assert {"judged W=4 odd", "judged W=1 skipping, micro_steps 2", "holds_and_sends W=4",
            "judged W=3 scaled, buffers", "judged W=3 lora, parameters",
            "judged W=1 scaled, AdamW", "judged W=2 gpt, clipped True"} <= names


PAGE = (ROOT / "docs" / "using.md").read_text()
EXAMPLES = re.findall(r"^```py\n(# mine\.py: (.*?)\n.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("code, title", EXAMPLES, ids=[title for _, title in EXAMPLES])
def test_examples_of_the_page(mine, code, title, tmp_path):
    """They are judged as they stand there, and are right, but for one."""
    file = mine(code)
    shutil.copy(ROOT / "judge" / "examples" / "right" / "cs336.py", tmp_path / "adapters.py")
    [simplest, clipped, buffers] = outcomes(file, 2, [
        dict(name="gpt"), dict(name="gpt", clipped=True), dict(name="scaled", other="buffers")])
    assert simplest == ("same bits", "")
    assert clipped[0] in CLOSE, clipped
    assert buffers[0] == ("wrong" if "forgets" in title else "same bits"), buffers
    outcome, text = row(file, 3, "lora", micro_steps=2).outcome()
    assert outcome == "close", text


def test_the_page_has_examples():
    assert len(EXAMPLES) == 5


# Files that were judged wrongly at first.
FROZEN = BEGIN.replace("(*module.parameters(), ", "(*filter(is_trained, module.parameters()), ")
LOCAL = BEGIN.partition("def after_backward")[0]


@pytest.mark.parametrize("code, options, outcome, fact", [
    pytest.param(FROZEN + "def is_trained(p): return p.requires_grad",
                 dict(name="lora", other="parameters"), "wrong",
                 "ranks begin with other values",
                 id="frozen_ones_are_not_sent"),
    pytest.param(BEGIN + """
def optimizer(parameters, kind, **options):
    class Forgets(kind):
        def step(self):
            self.state.clear()
            super().step()
    return Forgets(parameters, **options)
""", dict(name="even"), "wrong", "step 2, inner.weight: its gradient", id="state_is_lost"),
    pytest.param(LOCAL + """
def optimizer(parameters, kind, **options):
    class Averages(kind):
        def step(self):
            super().step()
            for p in parameters:
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()
    return Averages(parameters, **options)
""", dict(name="scaled", optimizer="AdamW"), "wrong", "right with SGD", id="averages_parameters"),
    pytest.param(BEGIN + "            p.grad = p.grad.half().float()",
                 dict(name="gpt"), "wrong", "% off: rounded to 16 bits on its way?", id="16_bits"),
    pytest.param(BEGIN + """
    for p in model.parameters():
        if p.grad is not None:
            old = getattr(p, "old", 0)
            p.old = p.grad.clone()
            p.grad += old
""", dict(name="gpt"), "wrong", "the gradient of the step before is added to it", id="not_zeroed"),
    pytest.param(BEGIN + """
def clip(model, max_norm):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 2 * max_norm)
""", dict(name="gpt", clipped=True), "wrong", "its gradient is 2 x expected: right without",
                 id="clips_to_twice_as_much"),
    pytest.param(BEGIN + """
    for p in model.parameters():
        if not p.requires_grad:
            p.data.add_(0.01)
""", dict(name="lora"), "wrong", "it is frozen, and not what it was", id="frozen_ones_move"),
    pytest.param(LOCAL + """
class Repaired(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = wrap_alike(module)

    def forward(self, *inputs):
        return self.module(*inputs)

wrap_alike, wrap = wrap, Repaired

def after_backward(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

def trained(model):
    return list(model.parameters()) if dist.get_rank() == 0 else []

def whole(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    return dict(model.module.named_parameters())
""", dict(name="scaled"), "wrong", "whole(model) was called after steps 1 and 2",
                 id="whole_repairs"),
    pytest.param(BEGIN.replace("    return module\n", "    if dist.get_world_size() % 2: raise "
                               "ValueError('pairs')\n    return module\n"),
                 dict(name="gpt"), "same bits", "", id="wants_two_ranks")])
def test_what_was_judged_wrongly(mine, code, options, outcome, fact):
    actual = row(mine(code), 2, **options).outcome()
    assert actual[0] == outcome and fact in actual[1], actual


def test_buckets_in_the_order_in_which_they_fill(mine):
    """The mistake that the course asks about: ranks fill buckets in other orders."""
    path = ROOT / "judge" / "examples" / "right" / "hooks.py"
    hooks = path.read_text()
    begin = hooks.index("            while len(self.sent)")
    end = hooks.index("    def send(self, bucket)")
    wrong = hooks[:begin] + """
            for bucket in self.buckets:
                if p in bucket and self.ready.issuperset(bucket):
                    self.send(bucket)

""" + hooks[end:]
    wrong = wrong.replace("        for bucket in self.buckets[len(self.sent):]:\n", """
        for bucket in self.buckets:
            if not self.ready.issuperset(bucket):
""").replace("            self.send(bucket)\n        for bucket, (flat", """
                self.send(bucket)
        for bucket, (flat""")
    outcome, text = row(mine(wrong), 3, "experts").outcome()
    assert outcome in ("wrong", "hung", "died", "refused"), text
    assert row(path, 3, "experts").outcome()[0] == "close"

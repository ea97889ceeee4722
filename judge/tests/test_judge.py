"""The judge: what it says of right wrappers, of the mistakes that people make, and of bad files."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch

from judge.hints import mistake
from judge.judge import (holds_and_sends, judged, outcome_of_measuring, rows_of_module,
                         rows_of_wrapper, try_out_wrapper, Verdicts)
from tests.common import ROOT
from judge.ranks import Failure, Row, run_parts

JUDGED = ROOT / "tests" / "judged"
CLOSE = {"same bits", "close"}
SOME = ["torch_ddp", "our_zero3", "hooks", "owners"]
OTHERS = ["torch_fsdp2", "by_hand_3", "cs336", "torch_fsdp2_kept", "torch_redundancy", "our_ddp",
          "our_zero1", "our_zero2", "plain_ddp", "plain_zero1", "plain_zero2", "plain_zero3",
          "naive", "by_hand_1", "by_hand_2", "small", "flat"]
OURS = "our", "plain", "naive", "by_hand"


def verdict(groups, file, n_ranks, name, **options):
    """-> (outcome, text) of a row, as in the table, where the simplest row of the module is right,
    which says nothing here."""
    verdicts = Verdicts()
    verdicts.outcomes[name, n_ranks] = "close"
    row = verdicts.row(str(file), n_ranks, name, **options)
    return row.outcome_of(*row.answers(groups))


@pytest.mark.parametrize("file", [*SOME, *OTHERS])
def test_right_ones(groups, file):
    """At W = 2 all have the bits of one process, also with two micro-steps; at W = 3 ours have, and
    others are close, since gloo's ring adds in another order."""
    path = JUDGED / "right" / f"{file}.py"
    assert verdict(groups, path, 2, "gpt") == ("same bits", "")
    assert verdict(groups, path, 2, "scaled", micro_steps=2) == ("same bits", "")
    outcome, text = verdict(groups, path, 3, "gpt")
    assert outcome in ({"same bits"} if file.startswith(OURS) else CLOSE), text
    if outcome == "close":
        number = float(re.fullmatch(r"the largest difference is (\S+) x fp32's rounding", text)[1])
        assert 0 < number < 4
    for options in (dict(other="parameters"), dict(other="buffers"), dict(optimizer="AdamW")):
        outcome, text = verdict(groups, path, 3, "scaled", **options)
        assert outcome in CLOSE, text


def test_all_right_ones_are_tried():
    assert sorted(SOME + OTHERS) == sorted(file.stem for file in (JUDGED / "right").glob("*.py"))
    mistakes = {case.values[0] for case in WRONG}
    assert mistakes == {file.stem for file in (JUDGED / "wrong").glob("*.py")}


@pytest.mark.parametrize("file, n_ranks, fact", [
    ("torch_ddp", 2, "holds as DDP: 16.0 bytes a parameter"),
    ("torch_ddp", 3, "(with 4 micro-steps 2.00), where DDP needs 2 (2)"),
    ("our_zero1", 3, "holds as ZeRO-1: 10.7 bytes a parameter between backward and step"),
    ("our_zero2", 4, "holds as ZeRO-2: 7.0 bytes"),
    ("our_zero3", 4, "holds as ZeRO-3: 4.0 bytes"),
    ("torch_fsdp2", 2, "micro-steps 12.00), where ZeRO-3 needs 3 (12)"),
    ("by_hand_2", 2, "micro-steps 8.00), where ZeRO-2 needs 2 (5), so more than it has to"),
    ("torch_redundancy", 4, "holds as ZeRO-1, and 0.7 more: 10.7 bytes a parameter"),
    ("naive", 2, "sends 2.00 (W-1)/W Psi elements")])
def test_what_it_holds_and_sends(groups, file, n_ranks, fact):
    path = str(JUDGED / "right" / f"{file}.py")
    outcome, text = measured(groups, path, n_ranks)
    assert outcome == "measured" and fact in text, text


def measured(groups, path, n_ranks):
    row = Row(holds_and_sends, n_ranks, dict(file=path), outcome_of=outcome_of_measuring)
    return row.outcome_of(*row.answers(groups))


AFTER_BACKWARD = """
import os
import time
import torch.distributed as dist

def wrap(module):
    return module

def after_backward(model):
    {more}
"""


@pytest.mark.parametrize("more, fact", [
    ("pass", "not counted: nothing was sent by torch.distributed"),
    full("for p in model.parameters(): dist.all_reduce(p.grad.to_sparse())",
         "not counted: could not"),
    ("for _ in (1, 2): [dist.all_reduce(p.grad) for p in model.parameters()]",
         "sends 4.00 (W-1)/W Psi elements (with 4 micro-steps 4.00), where DDP needs 2 (2), so "
         "more")])
def test_what_cannot_be_counted_is_said(groups, tmp_path, more, fact):
    path = tmp_path / "mine.py"
    path.write_text(AFTER_BACKWARD.format(more=more))
    outcome, text = measured(groups, str(path), 2)
    assert outcome == "measured" and fact in text, text


def wrong(file, name, fact, **options):
    return pytest.param(file, name, fact, options, id=file)


SHARED = "right without clipping, so it is clipped by another norm than that of all gradients"
WRONG = [
    wrong("not_divided", "even", "inner.weight: its gradient is 3 x expected: not divided by the "
          "number of ranks"),
    wrong("divided_twice", "even", "is 0.333 x expected: divided twice by the number of ranks"),
    wrong("divided_by_micro_steps", "even", "is 0.5 x expected: divided by the number of "
          "micro-steps, as the losses already are", micro_steps=2),
    wrong("last_micro_step_only", "even", "the last micro-step alone", micro_steps=2),
    wrong("summed_again", "even", "was summed again, so it counts W times", micro_steps=2),
    wrong("unequal_start", "scaled", "ranks begin with other values: wrap() has to send",
          other="parameters"),
    wrong("buffers", "scaled", "ranks have other buffers: wrap() has to send", other="buffers"),
    wrong("own_norm", "gpt", SHARED, clipped=True),
    wrong("own_norm_of_shard", "gpt", SHARED, clipped=True),
    wrong("tied_twice", "gpt", "gpt.wte.weight: its gradient is 3 x expected: it has two names"),
    wrong("unused_silent", "skipping", "not all ranks have used it"),
    wrong("unused", "odd", "here ranks use different parameters"),
    wrong("nothing_sent", "even", "a rank's own gradients alone: nothing was sent"),
    wrong("first_rank_only", "even", "rank"),
    wrong("race", "even", "rank")]


@pytest.mark.parametrize("file, name, fact, options", WRONG)
def test_mistakes_are_named(groups, file, name, fact, options):
    """Each is wrong where it should be, with the right hint, and right on one rank."""
    path = JUDGED / "wrong" / f"{file}.py"
    outcome, text = verdict(groups, path, 3, name, **options)
    assert outcome == ("died" if file == "unused" else "wrong") and fact in text, (outcome, text)
    outcome, text = verdict(groups, path, 1, "lora")
    assert outcome == "same bits", text


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
                 "in wrap(module), ValueError: too small (wrap, mine.py:1)", id="wrap_raises"),
    pytest.param("import sys\ndef wrap(module): sys.exit(3)", "SystemExit: 3 (wrap, mine.py:2)",
                 id="wrap_exits"),
    pytest.param("import os\ndef wrap(module): os._exit(1)", "its process has died",
                 id="wrap_ends_its_process"),
    pytest.param("def wrap(module): pass", "has returned NoneType, which cannot be called",
                 id="wrap_returns_none"),
    pytest.param("def wrap(): pass", "wrap() takes 0 positional arguments but 1 was given",
                 id="wrap_takes_nothing"),
    pytest.param("def wrap(module): return module.forward", "no parameters(): write trained(model)",
                 id="wrap_returns_a_function"),
    pytest.param("def wrap(module):\n    while True: pass", "killed after 3 s, its limit",
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
def test_bad_files_cannot_be_judged(groups, tmp_path, code, fact):
    path = tmp_path / "mine.py"
    path.write_text(code)
    limit_s = 3 if "killed" in fact else 60
    with pytest.raises(AssertionError) as raised:
        groups.run(try_out_wrapper, dict(file=str(path)), 1, limit_s)
    text = str(raised.value)
    assert text.startswith("rank 0: ") and fact in text and "\n" not in text, text


def test_prints_are_not_shown(groups, tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_text("print('begins')" + BEGIN.replace("def wrap(module):", "def wrap(module):\n"
                                                      "    print('wraps')"))
    [(clips, printed)] = groups.run(try_out_wrapper, dict(file=str(path)), 1, 60)
    assert not clips and printed == "begins"
    assert verdict(groups, path, 2, "even") == ("same bits", "")
    assert capfd.readouterr().out == ""


def test_a_wrapper_that_makes_new_parameters(groups, tmp_path):
    """Its parameters are those that it trains; a tie that it breaks is found."""
    path = tmp_path / "mine.py"
    path.write_text(BEGIN.replace("    return module", """
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(p.detach().clone(), p.requires_grad))
    return module"""))
    assert verdict(groups, path, 2, "scaled") == ("same bits", "")
    outcome, text = verdict(groups, path, 2, "gpt")
    assert outcome == "wrong" and "it has two names in the module" in text, text


@pytest.mark.parametrize("more, outcome, fact", [
    ("time.sleep(60 * dist.get_rank())", "hung", "ranks 0, 1: killed after 3 s"),
    ("dist.get_rank() and os._exit(0)", "died", "rank 1: its process has died"),
    ("if dist.get_rank(): raise NotImplementedError('first\\nsecond')", "refused",
     "rank 1: NotImplementedError: first"),
    ("[p.grad + p for p in model.parameters()]", "died", "ranks 0, 1: TypeError: unsupported")])
def test_hung_died_refused(groups, tmp_path, more, outcome, fact):
    path = tmp_path / "mine.py"
    path.write_text(AFTER_BACKWARD.format(more=more.replace("\n", "\\n")))
    row = Verdicts().row(str(path), 2, "even")
    try:
        actual = row.outcome_of(groups.run(judged, row.arguments, 2, 3), None)
    except AssertionError as failure:
        actual = row.outcome_of(None, failure)
    assert actual[0] == outcome and actual[1].startswith(fact), actual


def verify(folder, *words):
    return subprocess.run([sys.executable, ROOT / "verify.py", *words], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": ""})


@pytest.mark.parametrize("file, words, status, fact", [
    ("right/small.py", ["W=2 even"], 0,
         "same bits, 0 close, 0 wrong, 0 refused, 0 hung, 0 died"),
    ("wrong/not_divided.py", ["W=2 even"], 1, " 2 wrong, 0 refused, 0 hung, 0 died"),
    ("right/small.py", ["--list", "clipped"], 0, "judged W=4 lora, clipped True"),
    ("none.py", [], 2, "none.py: there is no such file"),
    ("right/small.py", ["nowhere"], 2, "no row has a name with nowhere"),
    ("right/small.py", ["--module", "own.py"], 2, "--module and --wrapper are two questions")])
def test_verify_judges(file, words, status, fact, tmp_path):
    done = verify(tmp_path, "--wrapper", JUDGED / file, *words)
    printed = done.stdout + done.stderr
    assert done.returncode == status and fact in printed, printed
    assert status < 2 or len(done.stderr.splitlines()) == 1, printed


def test_all_is_judged():
    """Every module, W and number of micro-steps."""
    parts = rows_of_wrapper(str(JUDGED / "right" / "small.py"), "cpu")
    names = {row.name for rows in parts.values() for row in rows}
    assert len(names) == 103
    assert {"judged W=4 odd", "judged W=1 skipping, micro_steps 2", "holds_and_sends W=4",
            "judged W=3 scaled, buffers", "judged W=3 lora, parameters",
            "judged W=1 scaled, AdamW", "judged W=2 gpt, clipped True"} <= names


PAGE = (ROOT / "docs" / "using.md").read_text()
EXAMPLES = re.findall(r"^```py\n(# mine\.py: (.*?)\n.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("code, title", EXAMPLES, ids=[title for _, title in EXAMPLES])
def test_examples_of_the_page(groups, code, title, tmp_path):
    """They are judged as they stand there, and are right, but for one."""
    path = tmp_path / "mine.py"
    path.write_text(code)
    shutil.copy(JUDGED / "right" / "cs336.py", tmp_path / "adapters.py")
    assert verdict(groups, path, 2, "gpt") == ("same bits", "")
    outcome, text = verdict(groups, path, 3, "lora", micro_steps=2)
    assert outcome == "close", text
    outcome, text = verdict(groups, path, 2, "gpt", clipped=True)
    assert outcome in CLOSE, text
    outcome, text = verdict(groups, path, 2, "scaled", other="buffers")
    assert outcome == ("wrong" if "forgets" in title else "same bits"), text


def test_the_page_has_examples():
    assert len(EXAMPLES) == 5


# Files that were judged wrongly at first.
FROZEN = BEGIN.replace("(*module.parameters(), ", "(*filter(is_trained, module.parameters()), ")
LOCAL = BEGIN.partition("def after_backward")[0]


@pytest.mark.parametrize("code, row, outcome, fact", [
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
    pytest.param(BEGIN + """
sent = []
real = wrap

def wrap(module):
    if not sent:
        real(module)
    sent.append(module)
    return module
""",
                 dict(name="scaled", other="parameters"), "same bits", "", id="globals_are_new"),
    pytest.param(BEGIN.replace("    return module\n", "    if dist.get_world_size() % 2: raise "
                               "ValueError('pairs')\n    return module\n"),
                 dict(name="gpt"), "same bits", "", id="wants_two_ranks")])
def test_what_was_judged_wrongly(groups, tmp_path, code, row, outcome, fact):
    path = tmp_path / "mine.py"
    path.write_text(code)
    for _ in range(2 if "sent = []" in code else 1):
        actual = verdict(groups, path, 2, **row)
        assert actual[0] == outcome and fact in actual[1], actual


def test_a_file_may_want_more_than_one_rank(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(BEGIN.replace("    return module\n", "    assert dist.get_world_size() > 1\n"
                                  "    return module\n"))
    assert len(rows_of_wrapper(str(path), "cpu")) == 5  # no clipping


def test_buckets_in_the_order_in_which_they_fill(groups, tmp_path):
    """The mistake that the course asks about: ranks fill buckets in other orders."""
    hooks = (JUDGED / "right" / "hooks.py").read_text()
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
    path = tmp_path / "mine.py"
    path.write_text(wrong)
    outcome, text = verdict(groups, path, 3, "experts")
    assert outcome in ("wrong", "hung", "died", "refused"), (outcome, text)
    assert verdict(groups, JUDGED / "right" / "hooks.py", 3, "experts")[0] == "close"


class Slow:
    def __init__(self, seconds, outcome="passed"):
        self.seconds, self.outcome = seconds, outcome

    def __str__(self):
        return f"took {self.seconds} s, {self.outcome}"

    def run(self, groups):
        time.sleep(self.seconds)
        return self.outcome, str(self)


@pytest.mark.parametrize("rows", [rows_of_module, rows_of_wrapper])
def test_a_file_that_is_not_there(rows, tmp_path):
    """It is said before any rank starts."""
    with pytest.raises(Failure, match="^there is no such file$"):
        rows(str(tmp_path / "mine.py"), "cpu")


def test_rows_are_printed_in_their_order(capsys):
    """Two rows run at once; their lines come in the order of rows, whichever ends first. What does
    not count is not said to be skipped."""
    rows = [Slow(0.3), Slow(0, "not counted"), Slow(0.1), Slow(0)]
    assert run_parts({"a claim": rows}, "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("took")] == [str(row) for row in rows]
    assert lines[-1] == "3 passed, 0 failed, 1 not counted", lines[-1]

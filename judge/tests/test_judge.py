"""The judge: what it says of right files, of the mistakes that people make, and of bad files."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from judge import mistakes, modules
from judge.interfaces import look_at
from judge.judge import judge, parsed, verdicts_of
from judge.measure import linear_of
from judge.ranks import quiet, run_guarded
from judge.script import write_script
from judge.training import Case
from judge.trial import BAD, CannotJudge, LINES, OF_CS336, PLAIN, Trial, TWO_STEPS
from tests.common import ROOT

EXAMPLES = ROOT / "judge" / "examples"
MEAN_ALONE = ["--leave_out", ",".join({name for name, _, _ in LINES} - {"mean"})]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Scripts are written to the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def nothing_measured(monkeypatch):
    monkeypatch.setattr(Trial, "measure", lambda trial: None)


@pytest.fixture
def mine(tmp_path):
    """mine(text): the path of a file with it."""
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def cell_of(path, case, W, name="wrap"):
    trial = Trial(parsed([str(path), "--worlds", str(W)]), name, {}, False)
    return trial.cell("mean", case, None, W)


# -------------------------------------------------------------------------------------------------
# files that are right

UNITS = "unused,order"  # all ranks have to use all units, in one order
LEFT_OUT = {"book_zero3": UNITS, "torch_fsdp2": UNITS, "dropin_zero3": "order"}
REFUSED = {"book_ddp": {"unused"}, "book_zero1": {"unused"}, "book_zero2": {"unused"},
           "book_zero3": {"shapes"}, "torch_fsdp2": {"shapes"}, "get_fsdp": {"shapes"}}
NAMES = sorted(path.stem for path in (EXAMPLES / "right").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_right_ones(name, nothing_measured):
    """At W = 2 all have the bits of one process, in all that they do not refuse."""
    path = EXAMPLES / "right" / f"{name}.py"
    for trial in judge(parsed([str(path), "--worlds", "2", "--leave_out", LEFT_OUT.get(name, "")])):
        verdicts = verdicts_of(trial)
        of_name = name if trial.name == "wrap" else trial.name
        refused = {each for each, (verdict, _) in verdicts.items() if verdict == "refused"}
        assert refused == REFUSED.get(of_name, set()), verdicts
        assert {verdict for verdict, _ in verdicts.values()} <= {"right", "refused", "measured",
                                                                 "not asked"}, verdicts
        assert trial.verdict == "right" and trial.outcome_of(PLAIN, 2) == "same bits"


@pytest.mark.parametrize("name", ["book_ddp", "book_zero1", "book_zero2", "book_zero3"])
def test_ours_have_the_bits_of_three(name):
    cell = cell_of(EXAMPLES / "right" / f"{name}.py", PLAIN, 3)
    assert cell.outcome == "same bits", cell


@pytest.mark.parametrize("name", ["torch_ddp", "torch_fsdp2", "small"])
def test_others_come_close(name):
    cell = cell_of(EXAMPLES / "right" / f"{name}.py", PLAIN, 3)
    number = float(re.fullmatch(r"the largest difference is (\S+) x fp32's rounding", cell.fact)[1])
    assert cell.outcome == "close" and 0 < number < 4


# -------------------------------------------------------------------------------------------------
# mistakes: {file: (the properties that are not right, what is said of the first fault, W)}

ALL = None  # it is the mean that is wrong
MISTAKES = {
    "not_divided": (ALL, "step 1, ranks 0, 1, first.weight: its gradient is 2 x expected: not", 2),
    "divided_by_two": (ALL, "is 1.5 x expected: divided by 2, and not by the number of", 3),
    "last_micro_step_only": ({"accumulation"}, "the last micro-step alone", 2),
    "summed_again": ({"accumulation"}, "was summed again, so it counts W times", 2),
    "unequal_start": ({"start"}, "rank 1, first.weight: it is not rank 0's before the first", 2),
    "buffers": ({"buffers"}, "ranks have other buffers: wrap has to send", 2),
    "frozen_hooked": ({"frozen", "unused", "order"}, "cannot register a hook on a tensor that", 2),
    "race": (ALL, "its gradient", 2),
    "sixteen_bits": (ALL, "% off: rounded to 16 bits on its way?", 2),
    "tied_twice": ({"tied"}, "embedding.weight: its gradient is 2 x expected: it has two names", 2),
    "tied_broken": ({"tied"}, "it has two names in the module", 2),
    "unused": ({"unused"}, "ranks start other collectives: all have to start the same ones", 2),
    "zeros": ({"unused"}, "no rank has used it, so its .grad should be None", 2),
    "flat_of_those_used": ({"unused"}, "ranks start other collectives", 2),
    "bucket_never_sent": ({"unused"}, "a rank's own gradients alone", 2),
    "order_of_gradients": ({"unused", "order"}, "ranks start other collectives", 2),
    "strided": ({"shapes"}, "view size is not compatible", 2),
    "rows_lost": (ALL, "last.weight: its gradient is", 3),
    "prescaled": ({"reused"}, "first.weight: its gradient is 0.5 x expected: divided twice", 2),
    "own_norm": ({"clipping"}, "right without clipping, so it is clipped by another norm", 2),
    "validation": ({"validation"}, "right without a forward under torch.no_grad()", 2),
    "schedule": ({"optimizer"}, "a new one in optimizer.param_groups has to reach", 2),
    "groups": ({"groups"}, "each group of parameters has options of its own", 2),
    "owns_nothing": ({"shapes", "groups"}, "optimizer got an empty parameter list", 2),
    "idle_rank": ({"shapes"}, "One, W=2: hangs: killed after 4 s", 2),
    "zero_grad_of_shard": (ALL, "the gradient of the step before is added to it", 2)}


def test_all_examples_are_tried():
    assert {path.stem for path in (EXAMPLES / "wrong").glob("*.py")} == MISTAKES.keys()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name, nothing_measured):
    """Each where it is, and nowhere else."""
    properties, text, W = MISTAKES[name]
    check(EXAMPLES / "wrong" / f"{name}.py", properties, text, W)


def check(path, properties, text, W):
    """Asked are these, and some that are right, which is as much as takes seconds."""
    asked = {"mean", "frozen", "start", "tied", "reused", "optimizer", *(properties or ())}
    left_out = {name for name, _, _ in LINES} - asked
    [trial] = judge(parsed([str(path), "--worlds", str(W), "--seconds", "4", "--leave_out",
                            ",".join(left_out)]))
    assert trial.verdict == "wrong" and text in str(trial.first_fault), trial.first_fault
    verdicts = {each: verdict for each, (verdict, _) in verdicts_of(trial).items()}
    bad = {each for each, verdict in verdicts.items() if verdict in BAD}
    if properties is ALL:
        assert "mean" in bad and verdicts["optimizer"] == "not tried"
        is_race = path.stem == "race"  # what that leaves differs from row to row
        assert "as mean" in verdicts.values() or is_race
    else:
        assert bad == properties, verdicts
    return verdicts


START_OF_SMALL = "(*module.parameters(), *module.buffers())"
SUM = "dist.all_reduce(p.grad)\n            "
DIVIDE = "p.grad /= dist.get_world_size()"
CHANGES = [  # (a right file, a change that is a mistake, what is not right, the first fault)
    ("small", {SUM: f"{DIVIDE}\n            {SUM}"}, ALL, "divided twice by the number of ranks"),
    ("small", {SUM + DIVIDE: "dist.broadcast(p.grad, src=0)"}, ALL, "without the gradients of"),
    ("small", {"if is_used(p)": "if False"}, ALL, "a rank's own gradients alone: nothing was sent"),
    ("small", {START_OF_SMALL: "module.state_dict().values()"}, {"buffers"}, "ranks have other"),
    ("small", {START_OF_SMALL: "(p for p in module.parameters() if p.requires_grad)"},
     {"start", "buffers"}, "layers.0.weight: it is not rank 0's before the first step"),
    ("small", {DIVIDE: "p.grad /= p.n_users", "dist.all_reduce(n_users)":
               "dist.all_reduce(n_users)\n    p.n_users = n_users"},
     {"unused"}, "its gradient is 2 x expected: not all ranks have used it"),
    ("owners", {"        self.send_updated()\n        return": "        return"}, ALL,
     "asked for after steps 1 and 2, and not after step 3"),
    ("owners", {"clip_grad_norm_(model.parameters()": "clip_grad_norm_(trained(model)"},
     {"clipping"}, "right without clipping, so it is clipped by another norm than that of all")]


@pytest.mark.parametrize("name, change, properties, text", CHANGES)
def test_changes_are_named(name, change, properties, text, mine, nothing_measured):
    code = (EXAMPLES / "right" / f"{name}.py").read_text()
    for old, new in change.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    verdicts = check(mine(code), properties, text, 2)
    if properties is ALL:
        assert [name for name, verdict in verdicts.items() if verdict in BAD] == ["mean"]


@pytest.mark.parametrize("numbers, fact", [
    ([[2, 2], [2, 2]], "by the number of ranks, or not divided by the number of micro-steps"),
    ([[0.5], [0.5]], "divided twice by the number of ranks"),
    ([[0.6], [0.6], [0.6]], "divided by 5, and not by the number of ranks"),
    ([[0, 1], [0, 1], [0, 1]], "the last micro-step alone"),
    ([[1, 0], [1, 0], [1, 0]], "the first micro-step alone"),
    ([[3, 1], [3, 1], [3, 1]], "what an earlier micro-step had summed"),
    ([[9, 3], [9, 3], [9, 3]], "what an earlier micro-step had summed"),
    ([[3, 3], [0, 0], [0, 0]], "a rank's own gradients alone"),
    ([[3, 1], [0, 1], [0, 1]], "of earlier micro-steps a rank has its own gradients alone"),
    ([[1], [1], [0]], "without the gradients of rank 2"),
    ([[1], [0], [0]], "a rank's own gradients alone"),
    ([[0.7], [0.7], [0.7]], "all of it is multiplied by one number"),
    ([[0.07], [0.09], [0.08]], "each rank's gradients are multiplied by a number"),
    ([[0.7], [0.9], [0.8]], "each rank's gradients are multiplied by a number of its own"),
    ([[0.7], [-0.9], [0.8]], "it has 0.70 times that of rank 0 in micro-step 1, -0.90 times")])
def test_mistake(numbers, fact):
    """What these numbers mean, one for each rank and micro-step, on rank 0."""
    mistake = mistakes.mistake_of(torch.tensor(numbers, dtype=torch.float64), 0)
    assert fact in mistake.text


def test_chapters_are_of_the_course():
    headings = re.findall(r"^##+ (?:\d+\. )?(.*)$", (ROOT / "docs" / "course.md").read_text(), re.M)
    chapters = {each.chapter for each in vars(mistakes).values()
                if isinstance(each, mistakes.Mistake)}
    assert chapters <= set(headings)


# Files that were judged wrongly at first, and loops that end otherwise: (what is added to SMALL,
# a case, the outcome, a part of what is said).
SMALL = (EXAMPLES / "right" / "small.py").read_text()
FORGETS = """
def optimizer(parameters, kind, **options):
    class Forgets(kind):
        def step(self):
            self.state.clear()
            super().step()
    return Forgets(parameters, **options)
"""
AVERAGES_WEIGHTS = """
def after_backward(model):
    pass
def optimizer(parameters, kind, **options):
    class Averages(kind):
        def step(self):
            super().step()
            for p in parameters:
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()
    return Averages(parameters, **options)
"""
COUNTS_MICRO_STEPS = """
import contextlib
average = after_backward
@contextlib.contextmanager
def accumulate(model):
    yield
    model.n = 2
def after_backward(model):
    average(model)
    for p in model.parameters():
        p.grad /= vars(model).get("n", 1)
"""
FLIPS = """
average = after_backward
def after_backward(model):
    average(model)
    for p in model.parameters():
        p.grad = p.grad.flip(0)
"""
CLIPS_TO_MORE = """
def clip(model, max_norm):
    clip_grad_norm_(model.parameters(), 2 * max_norm)
"""
FROZEN_MOVES = """
average = after_backward
def after_backward(model):
    average(model)
    for p in model.parameters():
        if not p.requires_grad:
            p.data.add_(0.01)
"""
ELSEWHERE = """
def trained(model):
    return [p.detach().clone().requires_grad_() for p in model.parameters()]
"""
AFTER = "def after_backward(model):\n    import os, time\n    {}\n"


@pytest.mark.parametrize("more, case, outcome, fact", [
    (FORGETS, PLAIN, "wrong", "step 2, ranks 0, 1, first.weight: its gradient is"),
    (FORGETS, PLAIN, "wrong", "the optimizer has lost its momentum"),
    (AVERAGES_WEIGHTS, PLAIN, "close", "largest difference"),
    (AVERAGES_WEIGHTS, Case(modules.Plain, optimizer="AdamW"), "wrong", "right with SGD: is its"),
    (COUNTS_MICRO_STEPS, TWO_STEPS, "wrong", "or divided by the number of micro-steps, as the"),
    (FLIPS, PLAIN, "wrong", "the right values in wrong places"),
    (CLIPS_TO_MORE, Case(modules.Plain, loop="clipped"), "wrong", "its gradient is 2 x expected"),
    (FROZEN_MOVES, Case(modules.Frozen), "wrong", "layers.0.weight: it is frozen, and has moved"),
    (ELSEWHERE, PLAIN, "wrong", "it has not moved: does the optimizer get it"),
    (AFTER.format("for p in model.parameters(): p.grad *= float('nan')"), PLAIN, "wrong",
     "first.weight: it is nan"),
    (AFTER.format("dist.get_rank() and os._exit(0)"), PLAIN, "crashed", "has died, with status 0"),
    (AFTER.format("[p.grad + p for p in 3]"), PLAIN, "crashed", "TypeError: 'int' object"),
    (AFTER.format("model.parameters().gard"), PLAIN, "crashed", "AttributeError: 'generator'"),
    (AFTER.format("torch.ones(3).view(2)  # does not raise"), PLAIN, "crashed", "RuntimeError"),
    (AFTER.format("assert (\n        dist is None\n    ), 'no dist'"), PLAIN, "refused", "no dist"),
    (AFTER.format("raise NotImplementedError('first\\nsecond')"), PLAIN, "refused",
     "NotImplementedError: first second"),
    (AFTER.format("assert not dist.get_rank(), 'rank 0 alone'"), PLAIN, "refused", "rank 0 alone"),
    (AFTER.format("torch.empty(3 * 2**29)"), PLAIN, "crashed", "can't allocate memory"),
    (AFTER.format("dist.get_rank() and dist.barrier()"), PLAIN, "crashed",
     "it waits for a rank that has come to its end: ranks start other collectives"),
    (AFTER.format("while dist.get_rank(): pass"), PLAIN, "hung", "hangs: killed after 2 s")])
def test_what_is_said(mine, more, case, outcome, fact):
    path = mine(SMALL + more)
    trial = Trial(parsed([str(path), "--worlds", "2", "--seconds", "2"]), "wrap", {}, False)
    trial.cells = [trial.cell("mean", PLAIN, None, 2)] if case is not PLAIN else []
    cell = trial.cell("mean", case, None, 2)
    assert cell.outcome == outcome and fact in str(cell), cell


IN_AN_ORDER = """
import contextlib
addends = []
def divided(t):
    return {}
def note(model):
    for p in model.parameters():
        parts = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad)
        p.parts = getattr(p, "parts", []) + {}
        p.grad = None
@contextlib.contextmanager
def accumulate(model):
    yield
    note(model)
def after_backward(model):
    note(model)
    for p in model.parameters():
        p.grad = {}
        p.parts = []
"""
SUM_OF = "sum(p.parts[1:], p.parts[0])"


@pytest.mark.parametrize("divided, parts, grad", [
    ("t / 3", "[divided(part) for part in parts]", SUM_OF),
    ("t * (1 / 3)", "[divided(part) for part in parts]", SUM_OF),
    ("t / 3", "parts", f"divided({SUM_OF})"),
    ("t * (1 / 3)", "parts", f"divided({SUM_OF})"),
    ("t / 3", "[sum(parts[1:], parts[0])]", f"divided({SUM_OF})")])
def test_orders_that_are_right(divided, parts, grad, mine):
    """In the order of the data, or over ranks and then over micro-steps; and all divisions."""
    path = mine(SMALL + IN_AN_ORDER.format(divided, parts, grad))
    cell = cell_of(path, TWO_STEPS, 3)
    assert cell.outcome == "same bits", cell


def test_where_it_was(mine):
    """Of a traceback the file's own lines; of a rank that hangs, where it is."""
    code = "def help(p):\n    return p.gard\n" + AFTER.format("help(model.first.weight)")
    cell = cell_of(mine(SMALL + code), PLAIN, 2)
    assert cell.lines == ["mine.py:37 in after_backward: help(model.first.weight)",
                          "mine.py:34 in help: return p.gard"], cell.lines
    code = AFTER.format("while dist.get_rank(): pass")
    trial = Trial(parsed([str(mine(SMALL + code)), "--seconds", "2"]), "wrap", {}, False)
    cell = trial.cell("mean", PLAIN, None, 2)
    assert cell.lines == ["rank 0 is not in this file: it has gone on, or waits",
                          "rank 1 is at mine.py:35 in after_backward: while dist.get_rank(): pass"]


def test_what_gloo_writes_is_not_shown(capfd):
    with quiet():
        os.write(2, b"of gloo")
    os.write(2, b"of us")
    assert capfd.readouterr().err == "of us"


def test_it_does_not_try_what_hangs(mine, capsys):
    """After two cells. What builds on a cell that hangs is not tried either."""
    path = mine(SMALL + AFTER.format("while True: pass"))
    [trial] = judge(parsed([str(path), "--worlds", "2,3,4", "--seconds", "2"]))
    assert [cell.outcome for cell in trial.cells] == ["hung", "hung", "not tried"]
    assert trial.seconds < 8
    assert "frozen        not tried     2 rows of mean and any W hang" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------
# what it is


@pytest.mark.parametrize("name, W, facts", [
    ("torch_ddp", 3, ["20.0 bytes a parameter between backward and step, as DDP and 4.0 more",
                      "2.00 (W-1)/W Psi elements a step (with 4 micro-steps 2.00); DDP needs 2 (2)",
                      ": no: when a backward comes to the last of 8 layers, 0 collectives"]),
    ("hooks", 2, ["as DDP;", "2.0", ": yes: when a backward"]),
    ("../wrong/frozen_hooked", 2, [": no: when", "8 collectives have begun, and 8 of them were"]),
    ("book_zero1", 3, ["10.7 bytes a parameter between backward and step, as ZeRO-1;"]),
    ("book_zero2", 4, ["7.0 bytes", ": yes: when"]),
    ("book_zero3", 4, ["4.0 bytes", "as ZeRO-3;", ": yes: when"]),
    ("torch_fsdp2", 2, ["as ZeRO-3;", "micro-steps 12.0"]),
    ("torch_redundancy", 4, ["14.0 bytes a parameter between backward and step, as ZeRO-1 and"]),
    ("owners", 2, ["as ZeRO-1;", "ZeRO-1 needs 2 (2), so it is more than it has to be"])])
def test_what_it_holds_and_sends(name, W, facts):
    path = EXAMPLES / "right" / f"{name}.py"
    trial = Trial(parsed([str(path), "--worlds", str(W)]), "wrap", {}, False)
    trial.cells = [trial.cell("mean", PLAIN, None, W)]
    trial.simplest_W = W
    trial.measure()
    text = " ".join(reason for _, reason in trial.facts.values())
    assert all(fact in text for fact in facts), text


@pytest.mark.parametrize("more, fact", [
    ("pass", "nothing was sent by torch.distributed"),
    ("for p in model.parameters(): dist.all_reduce(p.grad.to_sparse())", "could not count")])
def test_what_cannot_be_counted_is_said(mine, more, fact):
    trial = Trial(parsed([str(mine(SMALL + AFTER.format(more))), "--worlds", "2"]), "wrap", {}, 0)
    trial.outcome_of = lambda case, W: "close"
    trial.measure()
    assert trial.facts["sent"][0] == "not measured" and fact in trial.facts["sent"][1]


@pytest.mark.parametrize("stage, verdicts", [
    ("zero1", ("right", "wrong")), ("zero2", ("wrong", "wrong")), ("ddp", ("right", "wrong"))])
def test_a_stage_that_is_claimed(stage, verdicts):
    path = EXAMPLES / "right" / "owners.py"
    trial = Trial(parsed([str(path), "--worlds", "2", "--stage", stage]), "wrap", {}, False)
    trial.cells = [trial.cell("mean", PLAIN, None, 2)]
    trial.measure()
    assert (trial.facts["held"][0], trial.facts["sent"][0]) == verdicts
    assert trial.verdict == "wrong"


# -------------------------------------------------------------------------------------------------
# files, and the command


@pytest.mark.parametrize("code, fact", [
    ("def wrap(module)\n    pass", "SyntaxError: expected ':' (mine.py, line 1)"),
    ("import no_such_package", "No module named 'no_such_package' (mine.py:1 in <module>"),
    ("raise RuntimeError('not here')", "RuntimeError: not here (mine.py:1 in <module>"),
    ("import argparse\nargparse.ArgumentParser().parse_args(['--lr'])", "SystemExit: 2"),
    ("def warp(module): return module", "no function named wrap, nor one of CS336's, such as"),
    ("wrap = 3", "wrap is no function"),
    ("import sys\ndef wrap(module): sys.exit(3)", "SystemExit: 3 (mine.py:2 in wrap"),
    ("import os\ndef wrap(module): os._exit(1)", "has died, with status 1"),
    ("def wrap(module): pass", "wrap(module) has returned NoneType, which cannot be called"),
    ("def wrap(module): return module.forward", "has no parameters(): write trained(model)"),
    (SMALL + "def whole(model): return None", "whole(model) has returned NoneType, and no dict"),
    (SMALL + "def whole(model): return {}", "whole(model) has no parameter first.weight"),
    (SMALL + "def whole(model): return {n: p[:2] for n, p in model.named_parameters()}",
     "whole(model) has first.weight as (2, 5) torch.float32, expected is (6, 5)"),
    ("def get_ddp(module): raise NotImplementedError", "nothing in it is written")])
def test_bad_files_cannot_be_judged(mine, code, fact):
    with pytest.raises(CannotJudge) as raised:
        judge(parsed([str(mine(code))]))
    assert fact in str(raised.value) and "\n" not in str(raised.value)


def command(*words, cwd=None):
    return subprocess.run([sys.executable, ROOT / "judge", *map(str, words)], cwd=cwd, text=True,
                          capture_output=True)


@pytest.mark.parametrize("words, fact", [
    (["none.py"], "judge: none.py: there is no such file"),
    ([__file__, "--device", "abacus"], "--device abacus is not on this machine: choose cpu"),
    ([__file__, "--worlds", "2,x"], "--worlds 2,x: numbers from 1 to 9"),
    ([__file__, "--json", "/none/of.json"], "--json /none/of.json: No such file or directory"),
    ([__file__, "--quick", "--worlds", "2"], "--quick and --worlds: choose one"),
    ([__file__, "--seconds", "90"], "--seconds 90: from 2 to 20"),
    ([__file__, "--leave_out", "mean"], "--leave_out mean: choose from accumulation")])
def test_the_command_refuses(words, fact):
    done = command(*words)
    assert done.returncode == 2 and fact in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name, code", [
    ("mine.v2.py", "def after_backward(model): {}['FAULT KIND W \"\"\"x']"),
    ("mine (1).py", "def after_backward(model): {}[1]"),
    ("KIND/FILE.py", "def after_backward(model): {}['\\u2028']")])
def test_any_text_and_name_make_a_script(mine, name, code, tmp_path):
    """It fails as the file does, and not before."""
    path = mine(SMALL + code, name)
    judge(parsed([str(path), "--worlds", "1", *MEAN_ALONE]))
    [script] = tmp_path.glob("*_fault.py")
    done = subprocess.run([sys.executable, script], text=True, capture_output=True)
    assert f'{path.name}", line' in done.stderr and "KeyError" in done.stderr, done.stderr


def test_what_is_always_refused(mine):
    done = command(mine("def wrap(module): raise ValueError('only Transformers')"), "--quick")
    assert done.returncode == 2 and "wrap is REFUSED" in done.stdout


MORE_ON_TWO = "if dist.get_world_size() == 2: model.kept = torch.ones(3 * 10**5)"


@pytest.mark.parametrize("more, words, status", [
    ("", ["--worlds", "2"], 0), ("", ["--worlds", "1"], 1),  # one rank shows no stage
    (MORE_ON_TWO, ["--worlds", "2,4"], 1),
    # It refuses the module that is measured.
    ("if hasattr(model, 'scale') and model.layers: raise ValueError", ["--worlds", "2"], 1)])
def test_a_stage_has_to_be_shown(mine, more, words, status):
    code = SMALL.replace("    for p in model", f"    {more}\n    for p in model", 1)
    path = mine(code.replace("def after_backward(model):\n    \n", "def after_backward(model):\n"))
    [trial] = judge(parsed([str(path), *words, "--stage", "ddp", *MEAN_ALONE]))
    assert (trial.verdict == "wrong") == status, verdicts_of(trial)


def test_one_bad_interface_leaves_the_others(mine, capsys):
    path = mine("""
from judge.examples.wrong.not_divided import after_backward, wrap as get_ddp

def ddp_on_after_backward(model, optimizer):
    after_backward(model)

def get_fsdp(module):
    return None
""")
    trials = judge(parsed([str(path), "--worlds", "2", *MEAN_ALONE]))
    assert [trial.verdict for trial in trials] == ["wrong", "not judged"]
    out = capsys.readouterr().out
    assert "get_fsdp(module) has returned NoneType" in out
    assert out.endswith("mine.py: get_ddp WRONG, get_fsdp NOT JUDGED\n")


def test_what_works_on_four_ranks_alone(mine):
    more = "    if dist.get_world_size() < 4: raise ValueError('four')\n    return module"
    [trial] = judge(parsed([str(mine(SMALL.replace("    return module", more))), *MEAN_ALONE]))
    assert trial.verdict == "right" and verdicts_of(trial)["any W"][0] == "refused"


def test_a_pipe_that_closes(mine):
    done = subprocess.run(f"{sys.executable} {ROOT}/judge {mine(SMALL)} --quick | head -2",
                          shell=True, text=True, capture_output=True)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 2


def test_a_folder_in_which_nothing_can_be_written(mine):
    done = command(mine(SMALL + AFTER.format("{}[1]")), "--worlds", "1", cwd="/proc")
    assert done.returncode == 1 and "No script was written: " in done.stdout
    assert "wrap is WRONG" in done.stdout and done.stderr == ""


def test_the_report_as_data(mine, tmp_path):
    """And a file's prints are not shown, to wherever it prints, nor those of its processes."""
    code = "import os, sys\nprint('warns', file=sys.stderr)\nos.system('echo warns')\n"
    code += "os.write(2, b'\\xff')\nprint('warns')\n" + SMALL
    code = code.replace("p.grad /=", "p.grad /= 2 *")
    done = command(mine(code), "--worlds", "2", "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == "" and "warns" not in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    [interface] = report["interfaces"]
    first = interface["first_fault"]
    assert report["torch"] == torch.__version__ and interface["verdict"] == "wrong"
    assert interface["properties"]["mean"]["verdict"] == "wrong"
    assert (first["W"], first["step"], first["tensors"][0]) == (2, 1, "first.weight")
    assert first["ranks"] == [0, 1] and first["fact"] == "its gradient is 0.5 x expected"
    assert first["mistake"] == "divided twice by the number of ranks"
    assert len(interface["cells"]) == 12 and interface["script"] == "mine_fault.py"


def written(name, case):
    """The script for a file with a mistake, of this case on two ranks."""
    path = EXAMPLES / "wrong" / f"{name}.py"
    options = parsed([str(path), "--worlds", "2"])
    [([found], _)] = run_guarded(options, 1, 20, look_at, str(path))
    trial = Trial(options, found.name, {}, False)
    return write_script(str(path), found.name, found.functions, trial.cell("", case, None, 2), case)


@pytest.mark.parametrize("name, case", [
    ("not_divided", PLAIN), ("tied_twice", Case(modules.Tied)), ("prescaled", Case(modules.Reused)),
    ("summed_again", TWO_STEPS), ("zero_grad_of_shard", PLAIN), ("zeros", Case(modules.Never)),
    ("unequal_start", Case(modules.Plain, other="parameters")),
    ("buffers", Case(modules.Buffers, other="buffers")),
    ("own_norm", Case(modules.Plain, loop="clipped")),
    ("validation", Case(modules.Plain, loop="validated")),
    ("schedule", Case(modules.Plain, loop="scheduled")),
    ("groups", Case(modules.Plain, loop="groups"))])
def test_the_script_shows_the_fault(name, case, tmp_path):
    """By torch and the file alone."""
    assert max(differences_of(tmp_path / written(name, case))) > 1e-5


@pytest.mark.parametrize("case", [TWO_STEPS, Case(modules.Plain, loop="clipped"),
                                  Case(modules.Plain, loop="scheduled")])
def test_the_script_shows_none_of_a_right_file(case, tmp_path):
    assert max(differences_of(tmp_path / written("../right/small", case))) < 1e-6


def differences_of(script):
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # where examples are
    done = subprocess.run([sys.executable, script], text=True, capture_output=True, env=environment)
    differences = re.findall(r"^rank \d: \S+ differs by (\S+)$", done.stdout, re.M)
    assert len(differences) == 2, done
    assert "judge" not in script.read_text().partition("import importlib")[2].replace(
        "judge/examples", "")
    return map(float, differences)


def test_a_script_of_somebody_stays(tmp_path):
    (tmp_path / "not_divided_fault.py").write_text("mine")
    with pytest.raises(OSError, match="it is another file"):
        written("not_divided", PLAIN)
    assert (tmp_path / "not_divided_fault.py").read_text() == "mine"


# A reader of nanoGPT has a model.py and a train.py. Others have a ddp.py, a data.py, tests/.
BESIDE = {
    "model.py": "from ddp import layer\n\ndef net():\n    return layer()\n",
    "ddp.py": "import torch\n\ndef layer():\n    return torch.nn.Linear(4, 4)\n",
    "train.py": "OWN = True\n", "verify.py": "raise ZeroDivisionError\n",
    "judge.py": "raise ZeroDivisionError\n", "tests/__init__.py": "",
    "tests/helpers.py": "OWN = True\n",
    "my-file.py": """
from __future__ import annotations

import dataclasses

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
    return Zero1(module)
"""}


def test_files_beside_a_users_own(mine, tmp_path):
    """They come before ours, also where the judge is called in his folder; what he lacks is ours.
    His file may have any name."""
    for name, text in BESIDE.items():
        mine(text, name)
    done = command("my-file.py", "--worlds", "2", "--leave_out", "unused", cwd=tmp_path)
    assert done.returncode == 0 and "wrap is RIGHT" in done.stdout, done.stdout


# What cs336_basics has, as far as its interface.
BASICS = """
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / 4)
    def forward(self, x):
        return x @ self.weight.T

class Embedding(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, d_model))
    def forward(self, tokens):
        return self.weight[tokens]

class RMSNorm(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight
"""


def test_layers_of_cs336_are_measured(mine, monkeypatch, tmp_path):
    mine(BASICS, "cs336_basics/model.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert linear_of("get_fsdp").__module__ == "cs336_basics.model"
    assert linear_of("get_ddp").func is torch.nn.Linear


def test_adapters_of_an_assignment(mine, capsys):
    """In a package, by relative imports; one is a stub, one is wrong for its own layers alone."""
    mine("", "tests/__init__.py")
    mine(BASICS, "cs336_basics/model.py")
    mine((EXAMPLES / "right" / "cs336.py").read_text() + """

def reduced(p):
    dist.all_reduce(p.grad)
    return p.grad


def is_ours(layer):
    from cs336_basics.model import Linear
    return isinstance(layer, Linear)
""", "tests/solution.py")
    path = mine("""
from .solution import get_ddp_bucketed, ddp_bucketed_on_after_backward, get_fsdp, is_ours
from .solution import fsdp_gather_full_params

def get_ddp(module):
    raise NotImplementedError

def get_sharded_optimizer(params, optimizer_cls, **options):
    raise NotImplementedError

def fsdp_on_after_backward(fsdp_model, optimizer):
    for layer in fsdp_model.modules():
        if is_ours(layer):
            layer.weight.grad *= 2
""", "tests/adapters.py")
    trials = judge(parsed([str(path), "--worlds", "2"]))
    assert [trial.name for trial in trials] == ["get_ddp_bucketed", "get_fsdp"]
    assert [trial.verdict for trial in trials] == ["right", "wrong"]
    assert verdicts_of(trials[0])["cs336_basics"][0] == "right"
    bad = {name for name, (verdict, _) in verdicts_of(trials[1]).items() if verdict in BAD}
    assert bad == {"cs336_basics"} and "its gradient is 2 x expected" in str(trials[1].first_fault)
    assert trials[1].facts["held"][1].startswith("W=2: 8.0 bytes")  # of its own layers
    out = capsys.readouterr().out
    assert "get_ddp is not written" in out and "get_sharded_optimizer is not written" in out


README = (ROOT / "judge" / "README.md").read_text()


def test_the_example_of_the_page(mine):
    [code] = re.findall(r"^```py\n(.*?)^```$", README, re.M | re.S)
    [trial] = judge(parsed([str(mine(code)), "--worlds", "2"]))
    assert trial.verdict == "right"


def test_the_page_has_all_properties():
    rows = README.partition("| property |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| ([^|]*) \|", rows, re.M)
    assert {*named} == {"any W", *(name for name, _, _ in (*LINES, OF_CS336))}


def test_the_workflow(mine, tmp_path):
    """Its steps, as bash runs them, with the files that it names beside the assignment."""
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    text = (ROOT / "judge" / "workflow.yml").read_text()
    steps = yaml.safe_load(text)["jobs"]["judge"]["steps"]
    [judges, comments] = [step["run"] for step in steps if step.get("shell") == "bash"]
    names = re.search(r"a copy of (.*?) and judge/", text.replace("\n#", ""))[1].split(", ")
    (tmp_path / "nanozero").mkdir()
    for name in [*names, "judge"]:
        copy = shutil.copytree if name == "judge" else shutil.copy
        copy(ROOT / name, tmp_path / "nanozero" / name)
    mine(SMALL.replace("p.grad /=", "p.grad /= 2 *"))
    environment = dict(os.environ, FILE="mine.py --worlds 2", GITHUB_STEP_SUMMARY="summary.md")
    statuses = [subprocess.run(["bash", "-e", "-c", step], env=environment).returncode
                for step in (judges.replace('"$FILE"', "$FILE"), comments)]
    assert statuses == [1, 0]  # a pull request with a mistake fails, and has its table
    comment = (tmp_path / "comment.md").read_text()
    assert "wrap is WRONG" in comment and comment == (tmp_path / "summary.md").read_text()
    assert (tmp_path / "report.json").is_file() and (tmp_path / "mine_fault.py").is_file()

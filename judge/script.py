"""The smallest script that shows a fault: for the file's author, to run, to stop in and to change.
It has the module and the loop of one cell, and nothing of the judge."""

import inspect
import os
import pathlib
import re
import textwrap

from judge.interfaces import BUCKET_MB, package_of
from judge.training import DECAY, LOOKS, LR, MAX_NORM, MOMENTUM

MARK = b"# Written by `python -m judge"

# A line with "#? a, not b" is there where `flags` has a, and not b. Names in capitals are replaced.
TEMPLATE = '''# Written by `python -m judge FILE`. It needs torch and FILE alone.
#
FAULT
import importlib
import os
import runpy  #? path
import sys
import tempfile
import types  #? path
from contextlib import nullcontext  #? micro

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.utils.checkpoint import checkpoint  #? checkpoint

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(here, folder) for folder in FOLDERS]
mine = importlib.import_module(MODULE)  #? not path
mine = types.SimpleNamespace(**runpy.run_path(os.path.join(here, PATH)))  #? path
W = N_RANKS


CLASS_TEXT

def inputs(step, number):
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(3, 5, generator=generator)
    x[0, 0] = (step + number) % 3
    return x


def mean_loss(module, step):
    losses = [module(inputs(step, number)).square().mean() for number in range(N_BATCHES)]
    return sum(losses) / len(losses)


def in_groups(parameters):  #? groups
    parameters = list(parameters)  #? groups
    return [dict(params=parameters[:1]),  #? groups
            dict(params=parameters[1:], weight_decay=0, lr=HALF_LR)]  #? groups
#? groups
#? groups
def in_one_process():
    torch.manual_seed(0)
    module = CLASS()
    optimizer = KIND(LIST(module.parameters()), OPTIONS)
    for step in range(1, N_STEPS):
        mean_loss(module, step).backward()
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)  #? clipped
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:  #? scheduled
            group["lr"] /= 2  #? scheduled
    return module.get_parameter(TENSOR)


def be_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=W)
    torch.manual_seed(0)
    module = CLASS()
    if rank > 0:  #? other
        for t in module.OTHER():  #? other
            t.data.fill_(7)  #? other
    model = WRAP
    optimizer = MAKE_OPTIMIZER
    for step in range(1, N_STEPS):
        BEFORE_FORWARD  #? before
        model(inputs(step, rank)).square().mean().backward()  #? not micro
        with ACCUMULATE:  #? micro
            (model(inputs(step, rank)).square().mean() / 2).backward()  #? micro
        (model(inputs(step, W + rank)).square().mean() / 2).backward()  #? micro
        for p in module.parameters():  #? sharded
            if p.grad is not None:  #? sharded
                dist.all_reduce(p.grad)  #? sharded
                p.grad /= W  #? sharded
        AFTER_BACKWARD  #? after
        CLIP  #? clipped
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:  #? scheduled
            group["lr"] /= 2  #? scheduled
        with torch.no_grad():  #? validated
            model(inputs(-step, rank))  #? validated
    named = dict(WHOLE)
    [found] = [t for name, t in named.items() if f".{name}".endswith("." + TENSOR)]
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    difference = (found - in_one_process()).abs().max()
    print(f"rank {rank}: TENSOR_NAME differs by {difference:.2g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(be_rank, [folder], nprocs=W)
'''


def write_script(file, name, functions, cell, case):
    """-> the script's name, in the working directory. name: of the interface; functions: names of
    the file's functions. OSError, if it cannot be written, or another file has its name."""
    stem = pathlib.Path(file).stem + ("" if name == "wrap" else f"_{name}")
    path = pathlib.Path(f"{stem}_fault.py")
    if path.exists() and not path.read_bytes().startswith(MARK):
        raise FileExistsError("it is another file")
    top, package = package_of(file)
    folder = pathlib.Path(file).resolve().parent
    names = cell.tensors or [name for name, _ in case.module().named_parameters()]
    tensor = names[0]
    options = f"lr={LR}, weight_decay={DECAY}, foreach=False"
    if case.optimizer == "SGD":
        options += f", momentum={MOMENTUM}"
    words = dict(
        FAULT=textwrap.fill(str(cell), 98, initial_indent="# ", subsequent_indent="# "),
        FILE=pathlib.Path(file).name,
        FOLDERS=str([os.path.relpath(place) for place in dict.fromkeys([folder, top])]),
        MODULE=repr(".".join([*package, pathlib.Path(file).stem])), N_RANKS=str(cell.W),
        CLASS_TEXT=text_of(case.module), CLASS=case.module.__name__,
        N_BATCHES="W" if case.micro_steps == 1 else f"{case.micro_steps} * W",
        N_STEPS=str((cell.step if cell.tensors else LOOKS[-1]) + 1), OPTIONS=options,
        HALF_LR=str(LR / 2), LIST="in_groups" if case.loop == "groups" else "list",
        KIND=f"torch.optim.{case.optimizer}", MAX_NORM=str(MAX_NORM), OTHER=case.other,
        TENSOR=repr(tensor), TENSOR_NAME=tensor, PATH=repr(os.path.relpath(file)))
    code = calls(name, functions)
    flags = dict(micro=case.micro_steps > 1, other=case.other,
                 sharded=name == "get_sharded_optimizer", before="BEFORE_FORWARD" in code,
                 after="AFTER_BACKWARD" in code, checkpoint="checkpoint" in words["CLASS_TEXT"],
                 path=not package and not pathlib.Path(file).stem.isidentifier())
    flags[case.loop] = True
    text = replaced(chosen_lines(flags), code)
    # Once more, as a call may have words. Then what is not ours, and may have any words.
    text = replaced(replaced(text, code), words)
    path.write_text(text, encoding="utf-8")
    return path.name


def text_of(module):
    """Of its class, and before it of those of modules.py that it derives from."""
    classes = [each for each in module.__mro__ if each.__module__ == module.__module__]
    return "\n\n".join(inspect.getsource(each) for each in reversed(classes))


def calls(name, functions):
    """{word: how a script calls a function of the file}"""
    words = dict(WRAP=f"mine.{name}(module)",
                 ACCUMULATE='getattr(model, "no_sync", nullcontext)()',
                 CLIP="model.clip_grad_norm_(MAX_NORM)", TRAINED="model.parameters()",
                 MAKE_OPTIMIZER="KIND(LIST(TRAINED), OPTIONS)",
                 WHOLE='getattr(model, "full_parameters", model.named_parameters)()')
    kind = name.removeprefix("get_")
    given = {f"{kind}_on_train_batch_start": "BEFORE_FORWARD(model, optimizer)",
             f"{kind}_on_after_backward": "AFTER_BACKWARD(model, optimizer)",
             f"{kind}_gather_full_params": "WHOLE(model)"}
    if name == "wrap":
        given = dict(after_backward="AFTER_BACKWARD(model)", accumulate="ACCUMULATE(model)",
                     clip="CLIP(model, MAX_NORM)", trained="TRAINED(model)", whole="WHOLE(model)",
                     optimizer="MAKE_OPTIMIZER(LIST(TRAINED), KIND, OPTIONS)")
    if name == "get_ddp_bucketed":
        words["WRAP"] = f"mine.{name}(module, {BUCKET_MB})"
    if name == "get_sharded_optimizer":
        words.update(WRAP="module", MAKE_OPTIMIZER=f"mine.{name}(LIST(TRAINED), KIND, OPTIONS)")
    for function, call in given.items():
        word, _, arguments = call.partition("(")
        if function in functions:
            words[word] = f"mine.{function}({arguments}"
    return words


def chosen_lines(flags):
    lines = []
    for line in TEMPLATE.splitlines():
        text, _, conditions = line.partition("#? ")
        for condition in filter(None, conditions.split(", ")):
            name = condition.removeprefix("not ")
            if bool(flags.get(name)) != (name == condition):
                break
        else:
            lines.append(text.rstrip())
    return "\n".join(lines) + "\n"


def replaced(text, words):
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], text)

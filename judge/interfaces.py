"""mine.py: which data parallelism is in a file, and how a script uses it.

README.md has the interfaces. A file is executed anew for each row, in each rank.
"""

import dataclasses
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judge.modules import Plain

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project
BUCKET_MB = 0.0002  # of CS336's bucketed DDP: 50 numbers, as the modules are tiny


class BadFile(Exception):
    """The file does not keep to its interface, so nothing can be said of it."""


def nothing(model, optimizer):
    pass


def all_parameters(model):
    if not hasattr(model, "parameters"):
        raise BadFile("what wrap(module) has returned has no parameters(): write trained(model)")
    return model.parameters()


def plain_optimizer(parameters, kind, **options):
    if not parameters:  # a rank may own none
        parameters = [dict(params=[])]
    return kind(parameters, **options)


def own_accumulate(model):
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


@dataclasses.dataclass
class Interface:
    """What a script calls, and what is there unless the file has it."""

    name: str  # of the function that wraps, or makes an optimizer
    wrap: Callable  # (module) -> what is called as the module
    before_forward: Callable = nothing  # (model, optimizer), before the first one of a step
    after_backward: Callable = nothing  # (model, optimizer), after the last one of a step
    trained: Callable = all_parameters  # (model) -> what the optimizer gets
    whole: Callable | None = None  # (model) -> {name: whole parameter}
    accumulate: Callable = own_accumulate  # (model) -> a context, of all micro-steps but the last
    clip: Callable | None = None  # (model, max_norm)
    optimizer: Callable = plain_optimizer  # (parameters, kind, **options)
    not_asked: dict = dataclasses.field(default_factory=dict)  # {property: why}

    def wrapped(self, module):
        model = self.wrap(module)
        if not callable(model):
            raise BadFile(f"{self.name}(module) has returned {type(model).__name__}, which cannot "
                          f"be called")
        return model

    @property
    def owns_a_part(self):
        """Whether the optimizer may have less than the model, so that both have to be zeroed."""
        return self.trained is not all_parameters


# -------------------------------------------------------------------------------------------------
# a file


def execute(file: str) -> dict:
    """-> {name: what the file has by that name}. Its imports find what is beside it before ours. If
    it is in a package, that is found, too, as pytest does it. (This process is for this file.)"""
    path = pathlib.Path(file).resolve()
    top, package = package_of(file)
    sys.argv = [file]
    sys.path[:0] = dict.fromkeys([str(path.parent), str(top)])
    if ROOT not in (path.parent, top):
        theirs = {place.stem for folder in (path.parent, top) for place in folder.iterdir()}
        both = theirs.intersection(place.stem for place in ROOT.iterdir()) - {"judge"}
        for name in list(sys.modules):
            if name.partition(".")[0] in both:
                del sys.modules[name]
    if package:
        return vars(importlib.import_module(".".join([*package, path.stem])))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for what is in it
    exec(compile(path.read_bytes(), module.__file__, "exec"), vars(module))
    return vars(module)


def package_of(file: str) -> tuple[pathlib.Path, list[str]]:
    """-> (the folder from which it is imported, names of the packages that it is in)"""
    top = pathlib.Path(file).resolve().parent
    package = []
    while (top / "__init__.py").is_file():
        package.insert(0, top.name)
        top = top.parent
    return top, package


def interfaces(functions: dict) -> list[Interface]:
    """Those that a file has, by the names of its functions."""
    found = [*own(functions), *cs336(functions)]
    if not found:
        raise BadFile("the file has no function named wrap, nor one of CS336's, such as get_ddp")
    return found


def own(functions):
    """`wrap(module)`, and beside it functions of these names."""
    if "wrap" not in functions:
        return
    names = ("wrap", "after_backward", "trained", "whole", "accumulate", "clip", "optimizer")
    given = {name: functions[name] for name in names if name in functions}
    for name, function in given.items():
        if not callable(function):
            raise BadFile(f"{name} is no function")
    if "after_backward" in given:
        after_backward = given["after_backward"]
        given["after_backward"] = lambda model, optimizer: after_backward(model)
    yield Interface("wrap", **given)


def cs336(functions):
    """Those of Stanford's CS336, assignment 2, as its tests/adapters.py has had them since 2024."""
    not_asked = dict.fromkeys(("accumulation", "clipping", "unused", "order"),
                              "assignment 2 does not ask for it")
    for name in ("ddp", "ddp_individual_parameters", "ddp_bucketed", "fsdp"):
        wrap = functions.get(f"get_{name}")
        if wrap is not None:
            yield Interface(f"get_{name}", wrap if name != "ddp_bucketed" else in_buckets(wrap),
                            before_forward=functions.get(f"{name}_on_train_batch_start", nothing),
                            after_backward=functions.get(f"{name}_on_after_backward", nothing),
                            whole=functions.get(f"{name}_gather_full_params"),
                            not_asked=not_asked)
    if "get_sharded_optimizer" in functions:
        ours = dict.fromkeys(("accumulation", "start", "buffers", "unused", "order", "overlap"),
                             "it is an optimizer: the rest is the judge's")
        yield Interface("get_sharded_optimizer", wrap_plainly, after_backward=average,
                        optimizer=functions["get_sharded_optimizer"], not_asked=not_asked | ours)


def in_buckets(get_ddp_bucketed):
    return lambda module: get_ddp_bucketed(module, BUCKET_MB)


def wrap_plainly(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, src=0)
    return module


def average(model, optimizer):
    """An optimizer is judged behind it. All ranks use the same parameters there."""
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# -------------------------------------------------------------------------------------------------
# what is in it


class Found(NamedTuple):
    name: str  # of an interface
    is_written: bool
    not_asked: dict[str, str]
    functions: list[str]  # names of the file's


def look_at(file: str) -> tuple[list[Found], bool]:
    """-> what is in it, and whether cs336_basics is installed"""
    functions = execute(file)
    names = [name for name in functions if callable(functions[name])]
    found = []
    for interface in interfaces(functions):
        not_asked = dict(interface.not_asked)
        is_written = True
        model = None
        module = Plain()
        try:
            model = interface.wrap(module)
            interface.optimizer(list(module.parameters()), torch.optim.SGD, lr=0.1)
        except NotImplementedError:  # a stub, as an assignment gives it out
            is_written = False
        except Exception:
            pass  # rows show it
        if interface.clip is None and not hasattr(model, "clip_grad_norm_"):
            not_asked.setdefault("clipping", "there is no clip(model, max_norm)")
        if interface.owns_a_part:
            not_asked["groups"] = "trained(model) chooses what the optimizer gets"
        found.append(Found(interface.name, is_written, not_asked, names))
    return found, importlib.util.find_spec("cs336_basics") is not None


def interface_of(file: str, name: str) -> Interface:
    for interface in interfaces(execute(file)):
        if interface.name == name:
            return interface
    raise BadFile(f"the file has no function named {name} any more")


# -------------------------------------------------------------------------------------------------
# whole parameters


def whole_parameters(mine: Interface, model, module: nn.Module, shapes: dict) -> dict[str, Tensor]:
    """{name: a copy of the whole parameter}, for all names in shapes, {name: shape}."""
    if mine.whole is not None:
        where = "whole(model)"
        named = mine.whole(model)
        if not hasattr(named, "items"):
            raise BadFile(f"{where} has returned {type(named).__name__}, and no dict")
    elif hasattr(model, "full_state_dict"):
        where = "full_state_dict()"
        named = model.full_state_dict()
    elif hasattr(model, "full_parameters"):
        where = "full_parameters()"
        named = model.full_parameters()
    else:
        where = f"what {mine.name}() has returned"
        holder = model if isinstance(model, nn.Module) else module
        named = holder.named_parameters(remove_duplicate=False)
    actual = dict(named)
    prefix = prefix_of(actual, next(iter(shapes)))
    parameters = {}
    for name, shape in shapes.items():
        if prefix + name not in actual:
            raise BadFile(f"{where} has no parameter {name}")
        t = actual[prefix + name]
        if not torch.is_tensor(t):
            raise BadFile(f"{where} has a {type(t).__name__} as {name}, and no tensor")
        if hasattr(t, "full_tensor"):  # of torch's FSDP2
            t = t.full_tensor()
        if t.shape != shape or t.dtype != torch.float32:
            raise BadFile(f"{where} has {name} as {tuple(t.shape)} {t.dtype}, expected is "
                          f"{tuple(shape)} {torch.float32}: write whole(model)")
        parameters[name] = t.detach().clone()
    return parameters


def prefix_of(names, name: str) -> str:
    """What a wrapper has put before the name, such as "module."."""
    prefixes = [full.removesuffix(name) for full in names if f".{full}".endswith(f".{name}")]
    return min(prefixes, key=len, default="")

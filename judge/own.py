"""A file of the user's, for verify.py --module, and what it imports.

His folder often has a model.py, a train.py or a tests/ of his own. We have modules of these names,
too, and this process has loaded ours. So while his file is at work, ours are put aside.
"""

import contextlib
import copy
import functools
import importlib
import pathlib
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from judge.ranks import device

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project


@functools.cache  # a file is executed once in a process
def own_file(path):
    return OwnFile(path)


class OwnFile:
    """with own_file(path).imports() as module: module.loss(...)

    In between, imports find what they would find if Python had started this file. Of ours they find
    what nobody else has: the same module as we use. `module` is that of the file, which is executed
    when this is opened for the first time. What it raises is raised here.

    Only one file can be open at a time, since a process has one sys.path.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path).resolve()
        self.packages = []  # names of those that the file is in, from the topmost one on
        above = self.path.parent
        while above.name.isidentifier() and (above / "__init__.py").exists():
            self.packages.insert(0, above.name)
            above = above.parent
        self.folders = list(dict.fromkeys([str(self.path.parent), str(above)]))
        self.sys_path = self.folders + [entry for entry in sys.path if folder(entry) != ROOT]
        self.module = None
        self.his = {}  # {name: module} that he has loaded
        self.ours = {}  # {name: module} put aside

    @contextlib.contextmanager
    def imports(self):
        if self in sys.meta_path:  # it is open already
            yield self.module
            return
        outer_path = sys.path
        self.ours = take({name for name, where in loaded().items() if where == ROOT})
        before = loaded()
        sys.modules.update(self.his)
        sys.path = self.sys_path
        sys.meta_path.insert(0, self)
        try:
            if self.module is None:
                self.module = self.execute()
            yield self.module
        finally:
            # Others must not see what is in folders that only he has on sys.path, nor a module of
            # any folder that has the name of one of ours.
            self.sys_path = sys.path  # with what he has added
            added = set(self.sys_path) - set(outer_path)
            his_folders = {folder(entry) for entry in (*self.folders, *added)}
            his_names = {name for name, where in loaded().items() - before.items()
                         if where != ROOT and (where in his_folders or in_root(name))}
            if self.module is not None:  # also where the file is in our folder
                his_names.add(self.module.__name__.partition(".")[0])
            self.his = take(his_names)
            sys.modules.update(self.ours)
            sys.path = outer_path
            sys.meta_path.remove(self)

    def execute(self):
        """As `import` does it. But the file may have any name, such as my-file or random.py: a
        module of others keeps its name."""
        package = ".".join(self.packages)
        if package:
            importlib.import_module(package)
        stem = self.path.stem.replace(".", "_")  # what is before a dot would be a package
        name = f"{package}.{stem}" if package else stem
        while name in sys.modules:
            if getattr(sys.modules[name], "__file__", None) == str(self.path):
                return sys.modules[name]  # its package has imported it
            name += "_"
        loader = SourceFileLoader(name, str(self.path))
        module = module_from_spec(spec_from_file_location(name, self.path, loader=loader))
        sys.modules[name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module

    # The rest is what Python calls where a module is not loaded.

    def find_spec(self, name, path=None, target=None):
        """Of ours, unless somebody else has the name. (Of a name that is not ours: nothing.)"""
        ours = in_root(name) if path is None else None
        if ours is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, None, target) if finder is not self else None
            if spec is not None and place(spec) != ROOT and has_code(spec):
                return spec
        if name not in self.ours:
            return ours
        spec = copy.copy(self.ours[name].__spec__)
        spec.loader, spec.loader_state = self, self.ours[name].__spec__
        return spec

    def create_module(self, spec):
        return self.ours[spec.name]

    def exec_module(self, module):
        """Nothing is executed: it comes back as it was, with what is in it if it is a package."""
        module.__spec__ = module.__spec__.loader_state
        for name, part in self.ours.items():
            if name.startswith(module.__name__ + "."):
                sys.modules[name] = part


def folder(entry):
    """Of sys.path, where "" is the working directory."""
    return pathlib.Path(entry).resolve()


def place(spec):
    """The folder that a module or a package is in, or None."""
    parts = list(spec.submodule_search_locations or [])
    if parts or spec.has_location:
        return folder(parts[0] if parts else spec.origin).parent
    return None


def loaded():
    """{name: its place} of all modules that are loaded, without those in packages."""
    places = {}
    for name in {name.partition(".")[0] for name in list(sys.modules)}:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        is_its_own = spec is not None and spec.name == name  # not so in `python -m`, of __main__
        places[name] = place(spec) if is_its_own else None
    return places


def take(names):
    """Take these modules out of sys.modules, with what is in them -> {name: module}"""
    taken = [name for name in list(sys.modules) if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in taken}


def in_root(name):
    return PathFinder.find_spec(name, [str(ROOT)])


def has_code(spec):
    """Python takes any folder for a package, also one of data."""
    if spec.loader is not None:
        return True
    parts = [pathlib.Path(part) for part in spec.submodule_search_locations]
    return any(any(part.glob(files)) for part in parts for files in ("*.py", "*/*.py"))


def on_device(loss, model, step, number):
    """loss(model, step, number), where model is on an accelerator and loss may not know it. What is
    given to model goes there, and if that was on the CPU, so goes what model returns."""
    is_on_cpu = []

    def move_there(_, inputs, options):
        tensors = [t for t in tree_leaves((inputs, options)) if torch.is_tensor(t)]
        is_on_cpu.append(any(t.is_cpu for t in tensors))
        return tree_map_only(torch.Tensor, lambda t: t.to(device()), (inputs, options))

    def move_back(_, inputs, output):
        if not is_on_cpu.pop():
            return output
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, output)

    if device().type == "cpu":
        return loss(model, step, number)
    # First of all: FSDP2 moves inputs, too.
    with (model.register_forward_pre_hook(move_there, prepend=True, with_kwargs=True),
          model.register_forward_hook(move_back)):
        return loss(model, step, number)

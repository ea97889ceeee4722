"""What a file of the user's imports, beside modules of his that have the names of ours."""

import dataclasses
import inspect
import pickle
import random
import sys
import threading
import typing

import pytest

from judge import training as verify
from dropin import ddp
from judge.own import own_file, OwnFile, ROOT


def ours():
    """{name: module} of all that is loaded from the project, without a user's."""
    return {name: module for name, module in sys.modules.items()
            if str(getattr(module, "__file__", None)).startswith(str(ROOT))}


@pytest.fixture(autouse=True)
def restored():
    """Whatever a test does, afterwards all is as it was, and nothing of the user's is left."""
    modules, path, finders = ours(), list(sys.path), list(sys.meta_path)
    yield
    assert modules.items() <= ours().items()
    assert (sys.path, sys.meta_path) == (path, finders)
    files = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())]
    assert not [file for file in files if "/of_user/" in file]


@pytest.fixture
def write(tmp_path):
    """write({name: text}) makes these files in the user's folder, which it returns."""
    def write(files):
        folder = tmp_path / "of_user"
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return folder

    return write


# Modules that many users have.
NAMES = ("model", "ddp", "train", "data", "utils", "zero", "oracle", "verify", "guards",
         "checkpoint", "tests.helpers", "extras.llama")
HIS = {name.replace(".", "/") + ".py": f"IT = '{name}'\nruns = []\nruns.append(1)"
       for name in NAMES}
HIS["extras/__init__.py"] = ""


@pytest.mark.parametrize("place", ["", "a/b.c/my-code/"])
def test_his_modules_come_first(write, place):
    """Each is loaded once, however often the file is opened; also inside of a function."""
    lines = [f"from {name} import IT as it\nassert it == '{name}'\n" for name in NAMES]
    lines.append("def later():\n    import late\n    from model import IT\n    return late, IT")
    files = {**HIS, "own.py": "".join(lines), "late.py": ""}
    folder = write({place + name: text for name, text in files.items()})
    own = own_file(f"{folder}/{place}own.py")
    with own.imports() as module:
        import train
        from tests import helpers
    with own.imports() as again:
        late, it = module.later()
        assert again is module and late.__file__ == f"{folder}/{place}late.py" and it == "model"
        assert sys.modules["train"] is train and train.runs == [1]
        assert sys.modules["tests.helpers"] is helpers and helpers.runs == [1]


def test_packages(write):
    """Imports are relative ones, those of its own folder, and those of the topmost package's."""
    folder = write({
        "src/package/__init__.py": "", "src/package/model.py": "class Net: pass",
        "src/package/own.py": "from .model import Net\nfrom model import Net as other\n"
                              "from dropin import ddp",
        "src/package/sub/__init__.py": "", "src/package/sub/ddp.py": "class DDP: pass",
        "src/package/sub/own.py": "from ..model import Net\nfrom package.model import Net as same\n"
                                  "from . import ddp\nfrom ddp import DDP"})
    with own_file(f"{folder}/src/package/own.py").imports() as module:
        assert module.__name__ == "package.own" and module.ddp is ddp
        assert module.Net.__module__ == "package.model" and module.other.__module__ == "model"
    with own_file(f"{folder}/src/package/sub/own.py").imports() as module:
        assert module.__name__ == "package.sub.own" and module.Net is module.same
        assert module.DDP is not ddp.DDP and module.ddp.DDP is not module.DDP


def test_a_package_that_imports_the_file(write):
    """It is executed once."""
    folder = write({"package/__init__.py": "from .own import runs", "package/own.py": "runs = [1]"})
    with own_file(f"{folder}/package/own.py").imports() as module:
        assert sys.modules["package"].runs is module.runs


def test_ours_are_found_where_nobody_has_the_name(write):
    """Folders of data have no modules in them."""
    folder = write({"own.py": "from dropin.ddp import DDP\n"
                              "import data, model, tests.params, verify",
                    "model/weights.bin": "", "data/texts/a.txt": "", "tests/notes.md": ""})
    spec = verify.__spec__
    with own_file(f"{folder}/own.py").imports() as module:
        assert module.DDP is ddp.DDP and module.verify is verify
        assert module.model is sys.modules["model"] and module.model.GPT is verify.GPT
        assert module.data.__file__ == f"{ROOT}/data.py"
        assert pickle.loads(pickle.dumps(verify.Task)) is verify.Task
    assert verify.__spec__ is spec
    assert sys.modules["data"] is module.data  # it is ours, so it stays


def test_a_folder_without_init_is_a_package(write):
    folder = write({"own.py": "from model.net import Net\nfrom data.more.texts import Net as Other",
                    "model/net.py": "class Net: pass", "data/more/texts.py": "class Net: pass"})
    with own_file(f"{folder}/own.py").imports() as module:
        assert module.Net.__module__ == "model.net" and module.Other.__module__ == "data.more.texts"


def test_folders_that_the_file_adds(write):
    """As a script in scripts/ does; they stay for the next time, and for this file only."""
    folder = write({"model.py": "IT = 'model'", "late.py": "", "scripts/own.py":
                    "import pathlib, sys\nabove = str(pathlib.Path(__file__).parent.parent)\n"
                    "sys.path = [above, *sys.path]\nfrom model import IT\n"
                    "def later(): import late"})
    for _ in range(2):
        with own_file(f"{folder}/scripts/own.py").imports() as module:
            assert module.IT == "model"
            module.later()


def test_two_users(write):
    """Neither sees what the other has."""
    files = {}
    for who in ("a", "b"):
        files[f"{who}/own.py"] = "from utils import IT"
        files[f"{who}/utils.py"] = files[f"{who}/model.py"] = f"IT = '{who}'"
    folder = write(files)
    for who in ("a", "b", "a", "b"):
        with own_file(f"{folder}/{who}/own.py").imports() as module:
            import model
            assert (module.IT, model.IT, sys.modules["utils"].IT) == (who, who, who)


def test_modules_of_others(write, tmp_path, monkeypatch):
    """Those that the file has loaded stay loaded, as a second copy might fail; unless the name is
    one of ours."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "site" / "extras").mkdir(parents=True)
    for name in ("third_party", "extras/__init__", "extras/more"):
        (tmp_path / "site" / f"{name}.py").write_text("")
    folder = write({"own.py": "import third_party, torch, extras.more as more"})
    for _ in range(2):
        with own_file(f"{folder}/own.py").imports() as module:
            assert sys.modules["extras.more"] is module.more
        assert "extras.more" not in sys.modules
    assert sys.modules.pop("third_party") is module.third_party
    assert sys.modules["torch"] is module.torch


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_errors(write, error):
    """Of his files and of what is done in between, as they are."""
    folder = write({"own.py": "import model", "model.py": f"raise {error.__name__}('his')",
                    "fine.py": "", "wrong.py": "x = 1\nx = = 2"})
    for _ in range(2):
        with pytest.raises(error, match="his"):
            with own_file(f"{folder}/own.py").imports():
                pass
        with pytest.raises(error, match="between"):
            with own_file(f"{folder}/fine.py").imports():
                raise error("between")
    with pytest.raises(SyntaxError) as caught, own_file(f"{folder}/wrong.py").imports():
        pass
    assert caught.value.lineno == 2 and caught.value.filename == f"{folder}/wrong.py"
    with pytest.raises(FileNotFoundError), own_file(f"{folder}/none.py").imports():
        pass
    with pytest.raises(IsADirectoryError), own_file(f"{folder}").imports():
        pass


@pytest.mark.parametrize("name", ["own.py", "own", "my-file.py", "my.file.py", "ddp.py",
                                  "verify.py", "random.py", "__main__.py"])
def test_names_of_the_file(write, name):
    """Its classes are found by the name of their module, and its source by __file__."""
    folder = write({name: "from __future__ import annotations\nimport dataclasses, random\n"
                          "import torch\nassert __name__ != '__main__'\n@dataclasses.dataclass\n"
                          "class Size:\n    n: int = 3\n    kind: dataclasses.InitVar[str] = ''\n"})
    with own_file(f"{folder}/{name}").imports() as module:
        assert module.__file__ == f"{folder}/{name}" and module.random is random
        assert pickle.loads(pickle.dumps(module.Size(5))) == module.Size(5)
        assert "n: int = 3" in inspect.getsource(module.Size)
        assert typing.get_type_hints(module.Size)["n"] is int
        assert [field.name for field in dataclasses.fields(module.Size)] == ["n"]


def test_imports_of_hooks(write):
    """Backward may call them in another thread. Who opens the file once more changes nothing."""
    folder = write({"own.py": "def hook(): import late, model; late.seen.append(model)",
                    "late.py": "seen = []", "model.py": ""})
    own = own_file(f"{folder}/own.py")
    with own.imports() as module:
        with own.imports() as same:
            assert same is module
        thread = threading.Thread(target=module.hook)
        thread.start()
        thread.join()
        seen = sys.modules["late"].seen
        assert [each.__file__ for each in seen] == [f"{folder}/model.py"]


def test_a_file_in_the_project():
    """All is ours there."""
    with own_file(ROOT / "model.py").imports() as module:
        from dropin import ddp as actual
        import tests.own as also
        assert module.__name__ == "model" and module.__file__ == f"{ROOT}/model.py"
        assert actual is ddp and also.own_file is own_file
    assert verify.GPT is sys.modules["model"].GPT


def test_a_file_beside_ours(tmp_path, monkeypatch):
    """Who opens it anew executes it anew, and it does not stay."""
    monkeypatch.setattr("tests.own.ROOT", tmp_path)
    (tmp_path / "mine.py").write_text("runs = []")
    for _ in range(2):
        with OwnFile(tmp_path / "mine.py").imports() as module:
            assert module.runs == []
            module.runs.append(1)
        assert "mine" not in sys.modules

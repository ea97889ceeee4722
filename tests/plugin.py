"""Ranks for pytest.

A test that is marked with ranks(2, 3) is run on 2 ranks, and on 3: all processes of a group call it
at once, as training does, each with the test's arguments. So is a test that is parametrized with W.
(From W = 5 on there is one rank, in torch's fake group, whose collectives do nothing.) What a rank
raises fails the test, in one line with the rank and the place in our files. So does a rank that
dies, or hangs until the test's limit; the next test gets a new group. Groups stay for all tests of
a process: to start one costs more than most tests. A test without W is an ordinary one.

    @pytest.mark.ranks(2, 3)
    @pytest.mark.parametrize("wrapper", ["ddp", "zero3"])
    def test_something(wrapper): ...

tests/ranks.py does the work. With pytest-xdist each worker has groups of its own.
"""

import inspect
import multiprocessing.forkserver
import os
import signal
import sys
from unittest import mock

import pytest

from tests.params import sample_of, slug


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all rows, not samples")


def pytest_configure(config):
    """For all processes: CPU only, one thread a rank, warnings as pyproject.toml says, and the
    buffers that Python has where nothing else is asked for."""
    for name in ("PYTHONUNBUFFERED", "PYTEST_ADDOPTS"):  # or a pytest that a test starts has it
        os.environ.pop(name, None)
    warnings = ",".join(config.getini("filterwarnings"))
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                      TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS=warnings)


# What the server loads for all ranks and runs, also what torch imports only when it is used: the
# parts of torch.compile take 2.5 s. Not the tests' own files, since one may not be importable.
PRELOAD = ["verify", "checkpoint", "data", "pytest", "tests.plugin", "tests.runs",
           "torch._dynamo", "functorch.compile", "torch.distributed.checkpoint",
           "torch.distributed.fsdp.sharded_grad_scaler", "torch.distributed.launcher.api",
           "tiktoken", "regex", "numpy.ma", "tests.frozen"]


def pytest_sessionstart(session):
    """Start the server that forks ranks, wherever tests run: not in the process that only deals
    them out to workers. It loads torch while this process collects tests."""
    config = session.config
    only_deals_out = config.option.dist != "no" and not hasattr(config, "workerinput")
    if only_deals_out or config.option.collectonly:
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()  # what ranks print is shown with the test
    multiprocessing.set_forkserver_preload(PRELOAD)
    # Nothing from where pytest was called comes before our own files.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1"):
        multiprocessing.forkserver.ensure_running()
    capture.suspend_global_capture()


@pytest.hookimpl(trylast=True)  # so that W comes last in ids
def pytest_generate_tests(metafunc):
    numbers = []
    for mark in metafunc.definition.iter_markers("ranks"):
        numbers += mark.args or [None]  # which is refused below
    if not all(isinstance(W, int) and W > 0 for W in numbers):
        where = metafunc.definition.nodeid
        raise pytest.UsageError(f"{where}: ranks() takes numbers of ranks, such as ranks(2, 3)")
    if numbers:
        metafunc.parametrize("W", sorted(set(numbers)))


def pytest_make_parametrize_id(val, argname):
    if argname == "W":
        return f"W{val}"
    if isinstance(val, str):
        return slug(val)
    if val is None or isinstance(val, int):
        return f"{argname}_{val}"
    return getattr(val, "__name__", None)


def pytest_collection_modifyitems(config, items):
    """Without --full leave out what is marked full and, of tests that are marked sample, what is
    not in their samples. But all runs that -k chooses and is not marked full, and a row that is
    named by its whole id."""
    if config.getoption("full"):
        return
    named = [word for word in config.args if "[" in word]
    left_out = set()
    tests = {}  # {a test: its rows}, of those that are marked sample
    for item in items:
        if any(word.endswith(item.nodeid) for word in named):
            continue
        if item.get_closest_marker("full"):
            left_out.add(item)
        elif item.get_closest_marker("sample") and not config.option.keyword:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for rows in tests.values():
        sample = rows[0].get_closest_marker("sample")
        chosen = sample_of([row.callspec.params for row in rows], *sample.args, **sample.kwargs)
        left_out.update(row for i, row in enumerate(rows) if i not in chosen)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(autouse=True)
def W():
    """How many ranks run a test: what it is parametrized with; None for any other."""


@pytest.fixture(autouse=True, scope="session")
def groups():
    """The ranks of this process."""
    from tests.ranks import Groups  # not above: who deals tests out does without torch

    groups = Groups()
    yield groups
    groups.kill()


@pytest.fixture(scope="session")
def shared_folder(request, tmp_path_factory):
    """The same for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    # Not by xdist's variables, which a pytest that a test starts inherits.
    return folder.parent if hasattr(request.config, "workerinput") else folder


def limit_of(item, default_s):
    """Of a mark limit(5) or limit(seconds=5)."""
    limit = item.get_closest_marker("limit")
    if limit is None:
        return default_s
    return limit.args[0] if limit.args else limit.kwargs["seconds"]


@pytest.fixture(autouse=True)
def limited(W, request):
    """End a test that hangs in pytest's own process. (A test on ranks is ended by its group.)"""
    if W is not None:
        yield
        return
    limit_s = limit_of(request.node, 600)

    def end(*_):
        raise TimeoutError(f"the limit of this test, {limit_s} s, is over")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test on ranks. pytest itself runs one without W."""
    given = pyfuncitem.funcargs
    if given["W"] is None:
        return None
    function = pyfuncitem.obj
    names = [name for name in inspect.signature(function).parameters if name in given]
    call = dict(function=function, arguments={name: given[name] for name in names})
    fact = None
    try:
        outcome, *_ = given["groups"].run(on_rank, call, given["W"], limit_of(pyfuncitem, 60))
    except AssertionError as error:
        fact = str(error)
    if fact is not None:  # not inside of `except`, or pytest would tell it twice
        pytest.fail(fact, pytrace=False)
    if outcome is not None:
        kind, reason = outcome
        if kind == "skip":
            raise pytest.skip.Exception(reason, _use_item_location=True)  # not that of this line
        pytest.xfail(reason)
    return True


def on_rank(function, arguments):
    """Call function(**arguments) -> ("skip", why) or ("xfail", why) if it says so, or None."""
    import torch.distributed as dist

    try:
        function(**arguments)
    except pytest.skip.Exception as error:  # these cannot be pickled
        return "skip", str(error)
    except pytest.xfail.Exception as error:
        return "xfail", str(error)
    assert dist.is_initialized(), "this test has destroyed the process group"

"""Programs of Python that need not load torch: they are forked from the server, which has it.

`run_python(words, cwd)` is what `subprocess.run([sys.executable, *words], cwd=cwd)` would be. So is
each Python that such a program starts: torchrun, its ranks, what a benchmark asks. To load torch
and the rest would take each of them two to four seconds.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import partial

from tests.runs import FORK, ROOT

LIMIT_S = 500  # of a program
CLONE_NEWNET = 0x40000000
OURS = (ROOT, ROOT / "tests", ROOT / "extras", ROOT / "bench", ROOT / "dropin")


def run_python(words, cwd, **environment):
    """-> subprocess.CompletedProcess, with stdout and stderr as texts."""
    with started_python(words, cwd, **environment) as (process, printed):
        process.join(LIMIT_S)
        assert process.exitcode is not None, f"{words} has not ended after {LIMIT_S} s"
        return subprocess.CompletedProcess(words, process.exitcode, *printed())


@contextlib.contextmanager
def started_python(words, cwd, **environment):
    """-> (a Process, whose group has its pid; a function that returns [stdout, stderr] so far). In
    the end it is killed, unless it has ended."""
    words = list(map(str, words))
    with tempfile.TemporaryDirectory() as folder:
        process = FORK.Process(target=first_program, args=(words, str(cwd), environment, folder))
        process.start()
        multiprocessing.process._children.discard(process)  # as in tests/runs.py
        try:
            yield process, partial(printed_in, folder)
        finally:
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)


def printed_in(folder):
    return [pathlib.Path(folder, name).read_text() for name in ("stdout", "stderr")]


def first_program(words, cwd, environment, folder):
    """In a fork of the server."""
    os.setpgid(0, 0)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(cwd)
    start = subprocess.Popen.__init__

    def start_forked(popen, args, *more, env=None, **options):
        """Popen forks, and calls this just before it would load the program."""
        words = list(map(str, args))
        host = None
        if words[:3] == ["ip", "netns", "exec"]:
            _, _, _, host, *words = words
        if words[0] == sys.executable:
            sys.stdout.flush()
            sys.stderr.flush()
            options["preexec_fn"] = partial(program, words[1:], env, host)
        start(popen, args, *more, env=env, **options)

    subprocess.Popen.__init__ = start_forked
    program(words, {**os.environ, **environment})


def program(words, environment, host=None):
    """Be `python words` in this fork, to its end. host: a network namespace."""
    status = 1
    try:
        # A new process would have none of these.
        os.closerange(3, 1000)
        for number in (signal.SIGINT, signal.SIGTERM):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        tempfile.tempdir = None  # TMPDIR may be another one
        if host is not None:
            enter(host)
        sys.stdin = open(0, closefd=False)
        run_words([word for word in words if word != "-u"])
        status = 0
    except SystemExit as error:
        status = status_of(error)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # train.py leaves none
                with contextlib.suppress(OSError):  # nobody may read it any more
                    stream.flush()
        os._exit(status)


def run_words(words):
    """Its modules are those beside it, though others of the same names may be loaded."""
    for name, module in list(sys.modules.items()):
        if pathlib.Path(getattr(module, "__file__", None) or "").parent in OURS:
            del sys.modules[name]
    others = [path for path in sys.path if path and pathlib.Path(path) not in OURS]
    if words[0] == "-m":
        sys.path[:] = [os.getcwd(), *others]
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:] = [str(pathlib.Path(words[0]).resolve().parent), *others]
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def status_of(error):
    """The exit status of sys.exit(...)."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 255
    print(error.code, file=sys.stderr)
    return 1


def enter(host):
    with open(f"/run/netns/{host}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0, host

"""Run a row once: its processes, their log, its RESULT, or why there is none; and how to stop it.

Processes are in sessions of their own, so a Ctrl-C reaches bench.sh alone, which then stops them.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from bench.timeline import refuse, ROOT

PATIENCE_S = 40  # a rank finishes its step when it is told to end; torchrun kills it after 30 s
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclasses.dataclass
class Run:
    """A row, once."""
    label: str
    row: str
    W: int
    round: int
    program: str
    flags: list

    @property
    def name(self):
        words = [self.row, f"W={self.W}", f"round {self.round}"]
        if self.label:
            words.insert(0, self.label)
        return ", ".join(words)

    @property
    def is_over_link(self):
        return self.label.endswith("bit")

    @property
    def are_alone(self):
        """Whether its ranks are processes that know nothing of each other."""
        return self.row.startswith("single") and self.W > 1


def say(text):
    print(f"bench.sh: {text}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------
# signals


def note_signals(signals):
    """Let SIGINT and SIGTERM be noted in a list, where whoever waits looks. If they raised, they
    could interrupt the start of a process, of which nobody would know then."""
    def note(number, frame):
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)


def wait(processes, signals):
    """Until all have ended; once a signal has come, until all have been stopped."""
    while any(process.poll() is None for process in processes):
        if signals:
            stop(processes)
        time.sleep(0.05)


def stop(processes):
    for number, patience_s in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, PATIENCE_S)):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in processes):
                return
            time.sleep(0.05)


# -------------------------------------------------------------------------------------------------
# a link: two network namespaces, which stand for hosts, and a cable between them

HOSTS = (0, 1)


def namespace(host):
    """Of this process alone, so two starts do not cut each other's cable."""
    return f"nanozero{os.getpid()}_{host}"


def address(host):
    return f"10.77.0.{host + 1}"


def check_link():
    if shutil.which("ip") is None or shutil.which("tc") is None:
        refuse("a link needs ip and tc, of Linux: apt-get install iproute2")
    if os.geteuid() != 0:
        refuse("only root on Linux can make the network namespaces of a link")


@contextlib.contextmanager
def link(rate):
    """A cable of this rate, for as long as the context lasts. None: no cable."""
    if rate is None:
        yield
        return
    try:
        for host in HOSTS:
            call("ip", "netns", "add", namespace(host))
        call("ip", "link", "add", "nanozero0", "netns", namespace(0), "type", "veth",
             "peer", "name", "nanozero1", "netns", namespace(1))
        for host in HOSTS:
            device = f"nanozero{host}"
            inside = ("ip", "-n", namespace(host))
            call(*inside, "addr", "add", f"{address(host)}/24", "dev", device)
            call(*inside, "link", "set", device, "up")
            call(*inside, "link", "set", "lo", "up")
            call("ip", "netns", "exec", namespace(host), "tc", "qdisc", "replace", "dev", device,
                 "root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        yield
    except subprocess.CalledProcessError as error:
        why, _, _ = error.stderr.strip().partition("\n")
        refuse(f"a link of {rate}: {why}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", namespace(host)], capture_output=True)


def call(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


# -------------------------------------------------------------------------------------------------
# a run


def launch(run, folder, signals):
    """Run a row -> [{fact: value}], a line of the table's file each: RESULTs, or why there are
    none. Its log, metrics and traces stay in folder. Nothing if a signal has come."""
    log = folder / f"{run.name}.log"
    say(run.name)
    with log.open("w") as output:
        processes = start_processes(run, folder, output)
        wait(processes, signals)
    if signals:
        return []
    facts = dict(label=run.label, row=run.row, W=run.W, name=run.name, **keep_files(run, folder))
    text = log.read_text(errors="replace")
    results = re.findall(r"^RESULT (\{.*\})$", text, re.MULTILINE)
    if results:
        return [facts | json.loads(result) for result in results]
    why = reason(text) or f"see {log}"
    say(f"failed: {why}")
    return [facts | dict(failed=why)]


def start_processes(run, folder, output):
    """-> those of a row: torchrun's, of each host; or separate ones, which divide its batch."""
    program = [run.program]
    if run.program == "bench/timeline.py":
        program.append("run")
    processes = []

    def start(words, environment):
        processes.append(subprocess.Popen(words, env={**os.environ, **environment}, cwd=ROOT,
                                          stdout=output, stderr=subprocess.STDOUT,
                                          start_new_session=True))

    if run.are_alone:
        for rank in range(run.W):
            out_dir = str(folder / f"run{rank}")
            words = [sys.executable, *program, *run.flags, "--out_dir", out_dir]
            start(words, dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(run.W)))
        return processes
    words = [*program, *run.flags, "--out_dir", str(folder / "run0")]
    if not run.is_over_link:
        start([*TORCHRUN, "--standalone", f"--nproc_per_node={run.W}", *words], {})
        return processes
    for host in HOSTS:
        start(["ip", "netns", "exec", namespace(host), *TORCHRUN, "--nnodes=2",
               f"--node_rank={host}", f"--nproc_per_node={run.W // 2}",
               f"--master_addr={address(0)}", "--master_port=29477",
               f"--local-addr={address(host)}", *words],
              dict(GLOO_SOCKET_IFNAME=f"nanozero{host}"))
    return processes


def keep_files(run, folder):
    """Give what a run has left in its out_dir the name of the run -> facts from its metrics."""
    facts = {}
    for number in range(run.W if run.are_alone else 1):
        out_dir = folder / f"run{number}"
        metrics = out_dir / "metrics.jsonl"
        if metrics.exists():
            n = metrics.read_text().count('"skipped": true')
            facts["skipped_steps"] = facts.get("skipped_steps", 0) + n
            process = f", process {number}" if run.are_alone else ""
            metrics.rename(folder / f"{run.name}{process}.metrics.jsonl")
        for trace in out_dir.glob("trace_rank*.json"):
            rank = trace.stem.removeprefix("trace_rank")
            trace.rename(folder / f"{run.name}, rank {rank}.json")
    return facts


def reason(log):
    """The first line that says why; None if no line does."""
    for line in log.splitlines():
        if re.match(r"(\[rank\d+\]: )?([A-Za-z.]*(Error|Exception)|[a-z_]+\.py):", line):
            return line.strip()[:200]
    return None

"""Start the ranks of a run, wait for them, and stop them.

Ranks are on this host. Or on two hosts, for which network namespaces stand, with a cable of some
rate between them. Or, with --nnodes, on several hosts, on each of which bench.sh was started with
the same words: then each process starts the ranks of its own host.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
COUNTED, DEEPSPEED, FIT = "bench/counted.py", "bench/deepspeed_rows.py", "bench/fit.py"
PATIENCE_S = 40  # a rank finishes its step when it is told to end; torchrun kills it after 30 s


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of a table is made of one of these, which runs once in each round."""
    row: str  # a mode of train.py, with flags of its own
    W: int
    flags: tuple  # of the program, all but --out_dir
    kind: str = ""  # what else tells rows apart, such as weak and strong scaling
    rate: str | None = None  # of the cable between two hosts, such as 1gbit; None: one host
    program: str = COUNTED

    @property
    def name(self) -> str:
        """Of its log, too."""
        words = [self.kind, self.row, f"W={self.W}"]
        return ", ".join(word for word in words if word).replace("/", "_")

    @property
    def is_alone(self) -> bool:
        """Whether its ranks are processes that know nothing of each other."""
        return self.row.startswith("single")


@dataclasses.dataclass(frozen=True)
class Hosts:
    """n hosts, of which `here` are those whose ranks this process starts."""
    n: int = 1
    here: tuple = (0,)
    address: str = ""  # of host 0
    namespaces: tuple = ()  # that stand for hosts


def from_rate(rate: str) -> float:
    """A rate as tc has it, such as 1gbit -> bytes a second."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate).groups()
    return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8


def refuse(why):
    print(f"bench.sh: {why}", file=sys.stderr)
    sys.exit(2)


def say(text):
    print(f"bench.sh: {text}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------
# a cable between two network namespaces


def address_of(host):
    return f"10.77.0.{host + 1}"


def call(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def cable(rate: str):
    """A context -> two Hosts with a cable of this rate. Linux, for root, with ip and tc."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        refuse("a cable needs ip and tc, of Linux: apt-get install iproute2")
    if os.geteuid() != 0:
        refuse("only root can make the network namespaces of a cable")
    names = (f"nanozero{os.getpid()}_0", f"nanozero{os.getpid()}_1")
    try:
        for name in names:
            call("ip", "netns", "add", name)
        call("ip", "link", "add", "nanozero0", "netns", names[0], "type", "veth",
             "peer", "name", "nanozero1", "netns", names[1])
        for host, name in enumerate(names):
            device = f"nanozero{host}"
            call("ip", "-n", name, "addr", "add", f"{address_of(host)}/24", "dev", device)
            call("ip", "-n", name, "link", "set", device, "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", device, "root",
                 "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        yield Hosts(2, (0, 1), address_of(0), names)
    except subprocess.CalledProcessError as error:
        why, _, _ = error.stderr.strip().partition("\n")
        refuse(f"a cable of {rate}: {why}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


# -------------------------------------------------------------------------------------------------
# processes


def commands_of(run: Run, hosts: Hosts, port: int, out_dir: pathlib.Path) -> list:
    """-> [(words, environment)] of the processes that this one has to start."""
    # Other programs than train.py leave nothing.
    options = ["--out_dir", str(out_dir)] if run.program in (COUNTED, DEEPSPEED, FIT) else []
    n_local = max(1, run.W // hosts.n)
    commands = []
    for host in hosts.here:
        if run.W == 1 and host > 0:
            continue  # one rank is on the first host
        inside, environment = [], {}
        if hosts.namespaces:
            inside = ["ip", "netns", "exec", hosts.namespaces[host]]
            environment = dict(GLOO_SOCKET_IFNAME=f"nanozero{host}")
        if run.is_alone:
            for number in range(n_local):
                of_process = out_dir / str(host * n_local + number)
                words = [sys.executable, run.program, *run.flags, "--out_dir", str(of_process)]
                of_rank = dict(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(n_local))
                commands.append((inside + words, environment | of_rank))
            continue
        torchrun = [*TORCHRUN, f"--nproc_per_node={n_local}"]
        if run.W == 1 or hosts.n == 1:
            torchrun.append("--standalone")
        else:
            torchrun += [f"--nnodes={hosts.n}", f"--node_rank={host}",
                         f"--master_addr={hosts.address}", f"--master_port={port}"]
        if hosts.namespaces:
            torchrun.append(f"--local-addr={address_of(host)}")
        words = [*torchrun, run.program, *run.flags, *options]
        commands.append((inside + words, environment))
    return commands


def end(processes):
    """Ask those that still run to end, and kill them if they do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if all(process.poll() is not None for process in processes):
                return
            time.sleep(0.05)


def launch(run: Run, hosts: Hosts, port: int, out_dir: pathlib.Path, log: pathlib.Path) -> list:
    """Run it to its end -> what its RESULT lines say, with the entries of metrics.jsonl as
    `metrics`; and at last {"failed": reason} if a process has failed. out_dir is the same on all
    hosts.

    However this ends, as by Ctrl-C, all processes have ended: they are in sessions of their own, so
    a terminal's signal comes to this process alone.
    """
    processes = []
    with log.open("w") as output:
        try:
            for words, environment in commands_of(run, hosts, port, out_dir):
                processes.append(subprocess.Popen(
                    words, env={**os.environ, **environment}, cwd=ROOT, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True))
            for process in processes:
                process.wait()
        finally:
            end(processes)
    metrics = metrics_in(out_dir / "0" if run.is_alone else out_dir)
    text = log.read_text(errors="replace")
    results = []
    for line in re.findall(r"^RESULT (\{.*\})$", text, re.MULTILINE):
        results.append(dict(json.loads(line), metrics=metrics))
    has_failed = any(process.returncode != 0 for process in processes)
    if has_failed or (not results and 0 in hosts.here):  # rank 0 prints them, on host 0
        results.append(dict(failed=reason_in(text) or f"see {log}"))
    return results


def metrics_in(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def reason_in(log):
    """The first line that says why a run has failed; None if no line does."""
    for line in log.splitlines():
        if re.match(r"(\[rank\d+\]: )?([A-Za-z.]*(Error|Exception)|[a-z_0-9]+\.py):", line):
            return line.strip()[:200]
    return None

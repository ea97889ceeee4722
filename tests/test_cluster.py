"""cluster/: train.py takes the flags of its files, on as many ranks as they allow."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import runs
import train
from tests.common import ROOT

DOCKERFILE = (ROOT / "cluster" / "Dockerfile").read_text()
KUBERNETES = (ROOT / "cluster" / "kubernetes.yaml").read_text()
SLURM = (ROOT / "cluster" / "slurm.sh").read_text()


def of_docker():
    """-> flags, and numbers of ranks: one machine, of 8 devices at most, and as many as divide the
    batch."""
    words = json.loads(re.search(r"^CMD (\[.*?\])$", DOCKERFILE.replace("\\\n", ""), re.M)[1])
    assert words[1] == "--nproc_per_node=auto"
    return words[words.index("train.py") + 1:], (1, 2, 3, 4, 6, 8)


def of_kubernetes():
    """All numbers of pods, of 8 ranks each, as the file has them."""
    arguments = re.search(r"^ +args: \[(.*)\]$", KUBERNETES, re.M)[1].replace(",", " ")
    nodes, of_pod = re.search(r"--nnodes=1:(\d+) --nproc_per_node=(\d+)", KUBERNETES).groups()
    command = re.search(r'train\.py (.*?) "\$@"', KUBERNETES)[1]
    values = dict(re.findall(r"name: (\w+), value: (\S+?)}", KUBERNETES))
    for name, value in values.items():
        command = command.replace(f"${name}", value.strip('"'))
    worlds = [int(of_pod) * pods for pods in range(1, int(nodes) + 1)]
    return shlex.split(f"{command} {arguments}"), worlds


def of_slurm():
    """On 1 to 2 nodes, of a rank or of 8 devices each, by the example at its head."""
    head = re.search(r"^# sbatch --nodes=(\d) cluster/slurm.sh (.*)$", SLURM, re.M)
    nodes, example = head.groups()
    command = re.search(r'train\.py (.*?) "\$@"', SLURM)[1]
    gpus = int(re.search(r"--gpus-per-node=(\d)", SLURM)[1])
    worlds = {n * of_node for n in range(1, int(nodes) + 1) for of_node in (1, gpus)}
    return shlex.split(f"{command} {example}"), worlds


@pytest.mark.parametrize("file", [of_docker, of_kubernetes, of_slurm])
def test_flags_fit_each_number_of_ranks(file, tmp_path):
    flags, worlds = file()
    assert "--resume" in flags and "--mode" in flags and max(worlds) >= 8
    given = runs.read_flags(train.Config, "", flags)
    for W in worlds:
        environment = dict(RANK="0", WORLD_SIZE=str(W))
        with (mock.patch.object(dist, "get_world_size", return_value=W),
              mock.patch.dict("os.environ", environment)):
            config = train.config_of(dict(given), None, torch.device("cpu"))
        assert config.mode == "zero3" and config.global_batch_size % W == 0, W


def test_the_image_holds_what_it_needs(tmp_path):
    """Of what is copied: train.py runs, and so does verify.py. (The image was never built here.)"""
    copied = re.findall(r"^COPY (.*) (\S+)$", DOCKERFILE, re.M)
    for sources, target in copied:
        for pattern in sources.split():
            for path in ROOT.glob(pattern):
                if path.is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "tests")
                    shutil.copytree(path, tmp_path / target, ignore=ignored)
                else:
                    shutil.copy(path, tmp_path / path.name)
    assert (tmp_path / "requirements.txt").exists() and (tmp_path / "extras").is_dir()
    flags, _ = of_docker()
    small = ["--max_steps=2", "--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=16",
             "--eval_steps=2", "--sample_tokens=4", f"--out_dir={tmp_path}/out", "--device=cpu",
             "--dataset=verify.py"]
    for words in (["train.py", *flags, *small], ["verify.py", "one_process W=2 zero3"]):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stdout + done.stderr

"""Which device a rank takes, and --deterministic."""

import math
import os
import re
import socket
import sys
from contextlib import contextmanager, ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import oracle
import train
from extras import auto
from tests.common import raises
from tests.runs import finish, in_update, lines_of, run_train, this_rank


@contextmanager
def devices(kind, n, backend, rank=0, n_ranks=1, **environment):
    """This process finds n devices of an accelerator, and is a rank, of n_ranks on this host."""
    environment |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n_ranks))
    finds = dict(current_accelerator=lambda check_available: torch.device(kind),
                 device_count=lambda: n, set_device_index=mock.MagicMock())
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch.multiple(torch.accelerator, **finds))
        stack.enter_context(mock.patch.object(dist, "get_default_backend_for_device",
                                              lambda device: backend))
        yield


def taken(n, n_ranks, backend="nccl", **environment):
    """The devices that ranks of a host take, and the hosts on which they are for NCCL, which are
    None where nothing is said."""
    indices, hosts = [], []
    for rank in range(n_ranks):
        with devices("cuda", n, backend, rank, n_ranks, **environment):
            device = oracle.take_device("cuda", rank, n_ranks)
            torch.accelerator.set_device_index.assert_called_once_with(device.index)
            indices.append(device.index)
            hosts.append(os.environ.get("NCCL_HOSTID"))
    return indices, hosts


@pytest.mark.parametrize("n, indices, places", [
    pytest.param(1, [0, 0, 0, 0], [0, 1, 2, 3], id="1_device"),
    pytest.param(2, [0, 1, 0, 1], [0, 0, 1, 1], id="2_devices"),
    pytest.param(3, [0, 1, 2, 0], [0, 0, 0, 1], id="3_devices")])
def test_ranks_share_devices(n, indices, places):
    """Four ranks take devices in turn. No two with one device are on one host for NCCL, and those
    of another host have none of these names. What the user has set stays, and other backends are
    told nothing."""
    hosts = [f"{socket.gethostname()}-{place}" for place in places]
    assert taken(n, 4) == (indices, hosts)
    assert len(set(zip(indices, hosts))) == 4
    with mock.patch.object(socket, "gethostname", lambda: "elsewhere"):
        _, others = taken(n, 4)
    assert not set(others) & set(hosts), "two hosts are one for NCCL"
    assert taken(n, 4, NCCL_HOSTID="mine") == (indices, ["mine"] * 4)
    assert taken(n, 4, NCCL_MULTI_RANK_GPU_ENABLE="1") == (indices, [None] * 4)
    assert taken(n, 4, backend="xccl") == (indices, [None] * 4)
    assert taken(n, n) == (list(range(n)), [None] * n), "these do not share"


def test_train_says_who_shares():
    """One line, or none where each rank has a device of its own, as on a CPU."""
    for n, n_ranks, line in ((1, 2, "2 ranks share 1 device: times say nothing"),
                             (3, 4, "4 ranks share 3 devices: times say nothing"), (2, 2, None)):
        with devices("cuda", n, "nccl", 0, n_ranks), mock.patch.object(train, "say") as say:
            train.say_sharing("cpu")
            train.say_sharing("cuda")
        assert say.call_args_list == ([mock.call(line)] if line else [])


def shared_device():
    """Plant a host with one device for its two ranks, after the group has been made."""
    start = dist.init_process_group

    def start_and_share(*arguments, **options):
        sys.modules["__main__"].local_numbers = lambda kind: (this_rank(), 2, 1)
        return start(*arguments, **options)

    dist.init_process_group = start_and_share


def test_a_run_says_who_shares(tmp_path):
    """Rank 0 does, before the first step."""
    run = run_train(tmp_path, 2, plant=shared_device, mode="ddp")
    first, *_ = run.stdout[0].splitlines()
    assert first == "2 ranks share 1 device: times say nothing" and run.codes == [0, 0], run
    assert "share" not in run.stdout[1], run


def test_train_chooses_a_device():
    """The accelerator unless --device says otherwise; what is not there, or cannot be shared, is
    refused in a line that says why."""
    with devices("xpu", 2, "xccl", 1, 2):
        assert train.choose_device(None) == torch.device("xpu", 1)
        assert train.choose_device("cpu") == torch.device("cpu")
        raises(SystemExit, "cuda is not on this machine: choose cpu or xpu", train.choose_device,
               "cuda")
    with devices("xpu", 2, "xccl", 1, 3):  # this rank shares with none, but others do
        raises(SystemExit, "3 ranks here, for 2 devices, and xccl cannot share a device",
               train.choose_device, None)
        assert train.choose_device("cpu") == torch.device("cpu")
    with devices("mps", 1, "gloo"):
        assert train.choose_device(None) == torch.device("cpu")


@pytest.mark.ranks(2)
def test_free_memory_is_divided():
    """--micro_batch_size auto: ranks that share a device share what it has free. All take the least
    that a rank has found."""
    config = train.Config(mode="ddp", micro_batch_size="auto")
    rank = dist.get_rank()
    free = 8e9 - 2e9 * rank
    look = mock.patch.object(torch.accelerator, "get_memory_info", lambda device: (free, 9e9))
    for n, share in ((1, 3e9), (2, 6e9)):
        with devices("cuda", n, "nccl", rank, 2), look:
            found = auto.bytes_for_a_rank(config, torch.device("cuda"))
        assert found == share, f"{found} bytes of {n} devices"


def assert_deterministic(workspace):
    """In an update: torch takes deterministic kernels alone."""
    assert torch.are_deterministic_algorithms_enabled(), "not deterministic"
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "it only warns"
    assert not torch.utils.deterministic.fill_uninitialized_memory, "it fills new memory"
    found = os.environ["CUBLAS_WORKSPACE_CONFIG"]
    assert found == workspace, f"cuBLAS is told {found}"


def looked_at(workspace):
    return partial(in_update, 2, None, assert_deterministic, workspace)


def with_workspace_of_the_user():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    looked_at(":16:8")()


def put_somewhere(optimizer):
    """An operation that has no deterministic kernel anywhere, not even on a CPU."""
    torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


def test_deterministic_is_on(tmp_path):
    """--deterministic is on in all ranks, leaves what the user has set, and changes no bit on a
    CPU, where all kernels are."""
    options = dict(W=2, mode="zero3")
    plain = finish(tmp_path / "a", **options)
    for plant in (looked_at(":4096:8"), with_workspace_of_the_user):
        found = finish(tmp_path / "b", plant=plant, deterministic=True, **options)
        assert found["param_sha256"] == plain["param_sha256"]


def test_no_deterministic_kernel(tmp_path):
    """An operation that has none ends a run by torch's own text in one line, which names it;
    without the flag the run goes on."""
    options = dict(W=2, mode="zero3", plant=partial(in_update, 2, None, put_somewhere))
    finish(tmp_path / "a", **options)
    ended = run_train(tmp_path / "b", deterministic=True, **options)
    text = "".join(ended.stderr)
    fact = r"failed in step 2: RuntimeError: put_ does not have a deterministic implementation.*\n"
    assert re.search(fact, text) and "Traceback" not in text, ended
    assert ended.codes == [1, 1], ended


def test_devices_have_a_peak():
    """By their names; what is not known has none, and so no MFU, as on a CPU."""
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
                       ("NVIDIA A100-SXM4-80GB", 312e12)):
        assert train.peak_flops(name) == peak, name
    for name in ("CPU", "NVIDIA GeForce GTX 970"):
        assert math.isnan(train.peak_flops(name)), name


def test_a_cpu_has_no_mfu(tmp_path):
    assert finish(tmp_path)["mfu"] is None
    assert {entry["mfu"] for entry in lines_of(tmp_path / "metrics.jsonl")} == {None}

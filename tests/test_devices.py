"""Which device a rank takes, where the CPU waits for it, its fused AdamW, and --deterministic."""

import itertools
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
from contextlib import contextmanager, ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import oracle
import runs
import train
from extras import auto
import verify
from tests.common import raises, ROOT
from tests.ranks import on_ranks
from tests.runs import (finish, in_update, lines_of, nothing, run_train, this_rank, write_line)

SENDING = ("broadcast", "all_reduce", "all_to_all_single", "all_gather_single")


def refuse_strided(real, *arguments, **options):
    """NCCL sends only tensors whose elements lie one after the other. gloo sends any, and so does
    the simulated accelerator."""
    assert all(t.is_contiguous() for t in arguments if isinstance(t, torch.Tensor)), real.__name__
    return real(*arguments, **options)


def refuse_strided_messages(real, messages):
    assert all(message.tensor.is_contiguous() for message in messages), "send or receive"
    return real(messages)


@on_ranks(2, 3)
@pytest.mark.parametrize("wrapper", verify.OURS)
def test_nccl_takes_what_is_sent(wrapper):
    """A parameter and a buffer that are not contiguous are no different from others."""
    with ExitStack() as stack:
        for name in SENDING:
            strict = partial(refuse_strided, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, strict))
        strict = partial(refuse_strided_messages, dist.batch_isend_irecv)
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", strict))
        verify.distributed(verify.TASKS["odd"], wrapper, 1)


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


def in_main(change, *arguments):
    """Plant change(train.py as it runs, *arguments), when the group is made."""
    start = dist.init_process_group

    def start_and_change(*options, **named):
        change(sys.modules["__main__"], *arguments)
        return start(*options, **named)

    dist.init_process_group = start_and_change


def share_device(main):
    """A host with one device for its two ranks."""
    runs.local_numbers = lambda kind: (this_rank(), 2, 1)


def test_a_run_says_who_shares(tmp_path):
    """Rank 0 does, before the first step; where each has a device of its own nobody does."""
    line = "2 ranks share 1 device: times say nothing\n"
    run = run_train(tmp_path, 2, plant=partial(in_main, share_device), mode="ddp")
    first, *_ = run.stdout[0].split("step     1/4")
    assert line in first and run.codes == [0, 0], run
    assert line not in run_train(tmp_path, 2, mode="ddp").stdout[0]
    assert "share" not in run.stdout[1], run


def test_train_chooses_a_device():
    """The accelerator unless --device says otherwise; what is not there, or cannot be shared, is
    refused in a line that says why."""
    with devices("xpu", 2, "xccl", 1, 2):
        assert runs.choose_device(None) == torch.device("xpu", 1)
        assert runs.choose_device("cpu") == torch.device("cpu")
        raises(SystemExit, "cuda is not on this machine: choose cpu or xpu", runs.choose_device,
               "cuda")
    with devices("xpu", 2, "xccl", 1, 3):  # this rank shares with none, but others do
        raises(SystemExit, "3 ranks here, for 2 devices, and xccl cannot share a device",
               runs.choose_device, None)
        assert runs.choose_device("cpu") == torch.device("cpu")
    with devices("mps", 1, "gloo"):
        assert runs.choose_device(None) == torch.device("cpu")


@on_ranks(2)
def test_free_memory_is_divided():
    """--micro_batch_size auto: ranks that share a device share what it has free. All take the least
    that a rank has found."""
    config = train.Config(mode="ddp", micro_batch_size="auto")
    rank = dist.get_rank()
    free = 8e9 - 2e9 * rank
    look = mock.patch.object(torch.accelerator, "get_memory_info", lambda device: (free, 9e9))
    for n, share in ((1, 3e9), (2, 6e9)):
        with devices("cuda", n, "nccl", rank, 2), look:
            actual = auto.bytes_for_a_rank(config, torch.device("cuda"))
        assert actual == share, f"{actual} bytes of {n} devices"


# ---- where the CPU waits

READS = ("item", "tolist", "cpu", "numpy", "new_tensor", "__bool__", "__float__", "__int__",
         "__index__")


def note_reads(name, reads):
    """Let a method of tensors note the place in our files that calls it, in a list."""
    real = getattr(torch.Tensor, name)

    def noted(*arguments, **options):
        code = sys._getframe(1).f_code
        path = pathlib.Path(code.co_filename)
        if path.parent in (ROOT, ROOT / "dropin", ROOT / "extras"):
            reads.append(f"{path.name}: {code.co_name} calls {name}")
        return real(*arguments, **options)

    setattr(torch.Tensor, name, noted)


def log_reads(main, folder):
    """Write what each step of each rank reads of tensors, and each comparison of parameters."""
    reads = []
    for name in READS:
        note_reads(name, reads)
    for function in ("measured_step", "compare_parameters"):
        real = getattr(main, function)
        setattr(main, function, partial(call_and_log, real, reads, folder / f"{this_rank()}"))


def call_and_log(function, reads, path, *arguments):
    reads.clear()
    actual = function(*arguments)
    write_line(path, [function.__name__, *reads])
    return actual


@pytest.mark.parametrize("mode", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_where_a_step_reads(mode, tmp_path):
    """The CPU waits for an accelerator before the update, after it, and when ranks have compared
    their times; and once to compare parameters. Wrappers read nothing."""
    W = 1 if mode == "single" else 2
    finish(tmp_path / "out", W, mode=mode, global_batch_size=4,
           plant=partial(in_main, log_reads, tmp_path))
    in_step = ["train.py: train_step calls tolist", "train.py: measured_step calls item",
               "runs.py: of_all_ranks calls tolist"]
    expected = {"measured_step": in_step,
                "compare_parameters": ["train.py: compare_parameters calls tolist"]}
    for rank in range(W):
        calls = lines_of(tmp_path / f"{rank}")
        assert [name for name, *_ in calls] == 4 * ["measured_step", "compare_parameters"]
        for name, *reads in calls[2:]:
            assert reads == expected[name], f"rank {rank}, {name}: {reads}"


def test_times_of_all_ranks():
    """Least, mean and most. The slowest rank is the one that waits least for others, whichever has
    begun first."""
    def of_all(step_ms, exposed_ms):
        columns = dict(step_ms=step_ms, comm_exposed_ms=exposed_ms, mem_bytes=[1.0, 3.0])
        with mock.patch.object(runs, "of_all_ranks", lambda own, device: columns):
            return train.over_ranks({}, None)

    assert of_all([13.0, 12.0], [4.0, 5.0]) == dict(
        slowest=0, step_ms=[12, 12.5, 13], comm_exposed_ms=[4, 4.5, 5], mem_bytes=[1, 2, 3])
    # Rank 0 has begun late, and the other one has waited for it.
    assert of_all([13.0, 412.0], [1.0, 408.0]) == dict(
        slowest=0, step_ms=[13, 212.5, 412], comm_exposed_ms=[1, 204.5, 408], mem_bytes=[1, 2, 3])
    assert of_all([5.0, 5.0], [4.0, 1.0])["slowest"] == 1
    assert of_all([5.0, 5.0], [math.nan, math.nan])["slowest"] is None


@on_ranks(1, 3)
def test_each_rank_knows_all_numbers(W):
    """In order of rank."""
    rank = dist.get_rank()
    actual = runs.of_all_ranks(dict(a=rank + 0.5, b=10.0**17), torch.device("cpu"))
    assert actual == dict(a=[r + 0.5 for r in range(W)], b=W * [1e17])


# ---- fused AdamW


def n_with_other_bits(kind):
    """How many elements of a tensor fused AdamW trains to other bits than in its shards, which
    begin anywhere and have any size, also 0: three steps on a device."""
    n = 70001
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, n, generator=generator).to(kind)
    inner = torch.randint(n, (2000,), generator=generator).tolist()
    places = [*itertools.pairwise(sorted([0, *inner, n]))]
    whole = torch.nn.Parameter(values.clone())
    memory = values.clone()
    shards = [torch.nn.Parameter(memory[first:end]) for first, end in places]
    optimizers = []
    for parameters in ([whole], shards):
        optimizers.append(torch.optim.AdamW(parameters, weight_decay=0.1, fused=True))
    for lr, gradient in zip((1e-2, 3e-3, 1e-3), gradients):
        whole.grad = gradient
        for p, (first, end) in zip(shards, places):
            p.grad = gradient[first:end]
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    return (whole.detach() != memory).sum().item()


def print_number(kind):
    """For a process of its own: tests see no accelerator."""
    kinds = oracle.kinds_of_devices()
    actual = n_with_other_bits(kind) if kind in kinds else f"this machine has {kinds}"
    print(actual)


@pytest.mark.parametrize("kind", train.FUSED_ADAMW)
def test_fused_adamw_of_shards(kind):
    """Where train.py takes it, it has the same bits for a tensor as for its shards."""
    actual = f"torch is built for {torch.accelerator.current_accelerator(check_available=False)}"
    if kind in actual:
        environment = dict(os.environ)
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        code = f"from tests.test_devices import print_number; print_number({kind!r})"
        actual = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment,
                                         text=True).strip()
    if not actual.isdecimal():
        pytest.skip(f"there is no {kind} here: {actual}")
    assert actual == "0", f"{actual} elements have other bits on {kind}"


def test_fused_adamw_is_not_for_cpus():
    """The same on a CPU finds other bits: there it is not taken. (So the test above can fail.)"""
    assert n_with_other_bits("cpu") > 0
    assert "cpu" not in train.FUSED_ADAMW


@pytest.mark.parametrize("kind, fused, foreach", [
    ("cuda", True, False), ("xpu", False, True), ("mps", False, True), ("cpu", False, False)])
def test_which_adamw_is_taken(kind, fused, foreach):
    """Fused where its bits are known, else foreach, but on a CPU a tensor at a time. With a scaler
    never fused: torch's for shards does not go with that."""
    p = mock.MagicMock(device=torch.device(kind))
    p.dim.return_value = 1
    model = mock.MagicMock()
    model.named_parameters.return_value = [("norm.weight", p)]
    for flags, with_scaler in ((dict(), False), (dict(dtype="bf16"), False),
                               (dict(dtype="fp16"), True), (dict(param_dtype="fp16"), True)):
        with mock.patch.object(torch.optim, "AdamW") as adamw:
            train.make_optimizers(model, train.Config(mode="single", **flags))
        options = adamw.call_args.kwargs
        expected = (False, kind != "cpu") if with_scaler else (fused, foreach)
        assert (options["fused"], options["foreach"]) == expected, flags


def take_fused(main):
    main.FUSED_ADAMW = ("cpu",)


def switch(optimizer):
    for group in optimizer.param_groups:
        group["fused"] = not group["fused"]


def switch_in_step_3(is_fused):
    """Plant AdamW that begins fused, or not, and is the other one from the third step on."""
    if is_fused:
        in_main(take_fused)
    in_update(3, None, switch)


@pytest.mark.parametrize("is_fused", [False, True])
def test_fused_adamw_goes_on_from_any(is_fused, tmp_path):
    """A checkpoint of the one is a checkpoint of the other, on the bits of a run that changes from
    one to the other by itself."""
    plants = [nothing, partial(in_main, take_fused)]
    first, second = plants[::-1] if is_fused else plants
    expected = finish(tmp_path / "alone", plant=partial(switch_in_step_3, is_fused))
    same = finish(tmp_path / "same", plant=first)
    assert same["param_sha256"] != expected["param_sha256"], "both kinds have the same bits"
    finish(tmp_path / "out", max_steps=2, save_interval=2, plant=first)
    actual = finish(tmp_path / "out", resume="auto", plant=second)
    assert actual["param_sha256"] == expected["param_sha256"], "other bits"


# ---- --deterministic


# What a process holds before, what a sequence adds, in MB, and what malloc keeps of tensors that
# are as small as those of sizes 1 and 2.
HELD, EACH, KEPT = 460, 77, 670


@on_ranks(2)
@pytest.mark.parametrize("limit, expected, tried", [
    (1600, 12, [1, 2, 4, 8]), (1000, 6, [1, 2, 4]), (4000, 24, [1, 2, 4, 8, 16]),
    (790, 3, [1, 2, 4]), (740, 2, [1, 2, 4]), (690, None, [1, 2])])
def test_the_most_that_fits(limit, expected, tried):
    """--micro_batch_size auto finds the largest divisor of 24 that fits on all ranks, of which one
    holds more, although sizes 1 and 2 hold as much; it tries none that has no chance. Memory that
    is out is no error."""
    more = 5 * dist.get_rank()
    sizes = []

    def peak(run, size, train_step):
        sizes.append(size)
        actual = max(KEPT, HELD + EACH * size) + more
        return 1e6 * actual if actual < 2 * limit else math.inf

    config = train.Config(mode="ddp", micro_batch_size="auto", global_batch_size=48)
    config.memory_limit_gb = limit / 1e3
    search = partial(auto.largest_micro_batch, config, torch.device("cpu"), lambda config: None,
                     None)
    with mock.patch.object(auto, "peak_of_steps", peak):
        if expected is None:
            raises(SystemExit, "size 1 takes 0.6", search)
        else:
            actual = search()
            assert actual == expected, f"{actual}, after {sizes}"
    assert sizes == tried


def assert_deterministic(workspace):
    """In an update: torch takes deterministic kernels alone."""
    assert torch.are_deterministic_algorithms_enabled(), "not deterministic"
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "it only warns"
    assert not torch.utils.deterministic.fill_uninitialized_memory, "it fills new memory"
    actual = os.environ["CUBLAS_WORKSPACE_CONFIG"]
    assert actual == workspace, f"cuBLAS is told {actual}"


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
        actual = finish(tmp_path / "b", plant=plant, deterministic=True, **options)
        assert actual["param_sha256"] == plain["param_sha256"]


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


@on_ranks(2)
def test_devices_have_a_peak(W):
    """By their names; what is not known has none, and so no MFU, as on a CPU."""
    gpt = verify.small_gpt()
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
                       ("NVIDIA A100-SXM4-80GB", 312e12), ("CPU", None), ("NVIDIA GTX 970", None)):
        with mock.patch.object(train, "device_name", lambda device: name):
            actual = train.mfu(1000.0, gpt, None)
        if peak is None:
            assert math.isnan(actual), name
        else:
            assert actual == 1000.0 * gpt.flops_per_token() / (W * peak), name

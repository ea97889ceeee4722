"""messages.py counts what each collective sends."""

import threading
from contextlib import suppress
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from judge.messages import messages, SENDS
from tests.common import raises
from tests.ranks import on_ranks

N = 12  # elements of a rank's tensor. Divided by W = 2 or 3 it is whole, so counts are exact.
ROOT = 1


def ones(n=N):
    return torch.ones(n)


def chunks(W):
    return [ones() for _ in range(W)]


def on_root(tensors):
    return tensors if dist.get_rank() == ROOT else None


def world():
    return dist.group.WORLD


def wait_for(tensors):
    for tensor in tensors:
        tensor.wait()


def uneven(W):
    """Each rank sends i + 1 rows of 3 elements to rank i."""
    rank = dist.get_rank()
    from_each, to_each = [rank + 1] * W, [i + 1 for i in range(W)]
    received, sent = torch.empty(sum(from_each), 3), torch.ones(sum(to_each), 3)
    dist.all_to_all_single(received, sent, from_each, to_each)


def send(receive):
    if dist.get_rank() == 0:
        dist.send(ones(), 1)
    elif dist.get_rank() == 1:
        receive(ones())


def to_the_next(W):
    rank = dist.get_rank()
    operations = [dist.P2POp(dist.isend, ones(), (rank + 1) % W),
                  dist.P2POp(dist.irecv, ones(), (rank - 1) % W)]
    wait_for(dist.batch_isend_irecv(operations))


def coalesced():
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(ones())
        dist.all_reduce(ones())
    both.wait()


def in_a_thread():
    thread = threading.Thread(target=dist.all_reduce, args=[ones()])
    thread.start()
    thread.join()


def with_backward():
    """An all-gather, whose backward is a reduce-scatter."""
    x = ones().requires_grad_()
    functional.all_gather_tensor_autograd(x, 0, world()).square().sum().backward()


# {name: (a call on W ranks, the elements that rank r of W sends)}
ROWS = {
    "all_reduce": (lambda W: dist.all_reduce(ones()), lambda W, r: 2 * (W - 1) * N / W),
    "reduce_scatter": (lambda W: dist.reduce_scatter(ones(), chunks(W)), lambda W, r: (W - 1) * N),
    "reduce_scatter_tensor": (lambda W: dist.reduce_scatter_tensor(ones(), ones(W * N)),
                              lambda W, r: (W - 1) * N),
    "all_gather": (lambda W: dist.all_gather(chunks(W), ones()), lambda W, r: (W - 1) * N),
    "all_gather_into_tensor": (lambda W: dist.all_gather_into_tensor(ones(W * N), ones()),
                               lambda W, r: (W - 1) * N),
    "all_to_all": (lambda W: dist.all_to_all(chunks(W), chunks(W)), lambda W, r: (W - 1) * N),
    "all_to_all_single": (lambda W: dist.all_to_all_single(ones(W * N), ones(W * N)),
                          lambda W, r: (W - 1) * N),
    "uneven all_to_all_single": (uneven, lambda W, r: 3 * (W * (W + 1) / 2 - (r + 1))),
    "broadcast": (lambda W: dist.broadcast(ones(), ROOT), lambda W, r: (W - 1) * N / W),
    "reduce": (lambda W: dist.reduce(ones(), ROOT), lambda W, r: (W - 1) * N / W),
    "gather": (lambda W: dist.gather(ones(), on_root(chunks(W)), ROOT),
               lambda W, r: 0 if r == ROOT else N),
    "scatter": (lambda W: dist.scatter(ones(), on_root(chunks(W)), ROOT),
                lambda W, r: (W - 1) * N if r == ROOT else 0),
    "send": (lambda W: send(partial(dist.recv, src=0)), lambda W, r: N if r == 0 else 0),
    "recv from anyone": (lambda W: send(dist.recv), lambda W, r: N if r == 0 else 0),
    "batch_isend_irecv": (to_the_next, lambda W, r: N),
    "barrier": (lambda W: dist.barrier(), lambda W, r: 0),
    "monitored_barrier": (lambda W: dist.monitored_barrier(), lambda W, r: 0),
    "coalescing manager": (lambda W: coalesced(), lambda W, r: 4 * (W - 1) * N / W),
    "all_reduce_coalesced": (lambda W: dist.all_reduce_coalesced([ones(), ones()]),
                             lambda W, r: 4 * (W - 1) * N / W),
    "broadcast_coalesced": (lambda W: dist._broadcast_coalesced(world(), [ones(), ones()], 99, 0),
                            lambda W, r: 2 * (W - 1) * N / W),
    "functional all_reduce": (lambda W: functional.all_reduce(ones(), "sum", world()).wait(),
                              lambda W, r: 2 * (W - 1) * N / W),
    "functional all_to_all": (
        lambda W: functional.all_to_all_single(ones(W * N), None, None, world()).wait(),
        lambda W, r: (W - 1) * N),
    "functional permute": (
        lambda W: functional.permute_tensor(ones(), [*range(1, W), 0], world()).wait(),
        lambda W, r: N),
    "functional coalesced": (
        lambda W: wait_for(functional.all_gather_into_tensor_coalesced([ones()] * 2, world())),
        lambda W, r: 2 * (W - 1) * N),
    "functional, with its backward": (lambda W: with_backward(), lambda W, r: 2 * (W - 1) * N),
    "a thread of the user's own": (lambda W: in_a_thread(), lambda W, r: 2 * (W - 1) * N / W)}


def elements(sent):
    return sum(message.elements for message in sent)


@on_ranks(2, 3)
def test_collectives(W):
    for name, (call, expected) in ROWS.items():
        with messages() as sent:
            call(W)
        of_rank = expected(W, dist.get_rank())
        assert elements(sent) == of_rank, f"{name}: {sent}, and not {of_rank} elements"
        assert sum(message.bytes for message in sent) == 4 * of_rank, f"{name}: {sent}"


@on_ranks(3)
def test_the_ranks_of_a_smaller_group_count_and_bytes_are_of_the_dtype():
    two = dist.new_group([0, 1])
    # Each rank is in as many groups as the others: by their number torch names the groups that
    # other tests make with use_local_synchronization.
    dist.new_group([2])
    with messages() as sent:
        dist.all_reduce(ones().bfloat16(), group=two)
    expected = [] if dist.get_rank() == 2 else [("c10d::allreduce_", N, 2 * N)]
    assert sent == expected, f"{sent}"


@on_ranks(2)
def test_an_object_is_its_bytes_and_its_size():
    with messages() as sent:
        dist.all_gather_object([None, None], b"x" * 1000)
    size, pickled = sent
    assert size.bytes == 8 and 1000 < pickled.bytes == pickled.elements < 1100, f"{sent}"


def all_reduce():
    with messages():
        dist.all_reduce(ones())


def sparse():
    with messages():
        dist.all_reduce(ones().to_sparse())


def symmetric_memory():
    with messages(), suppress(NotImplementedError):  # on a CPU
        torch.ops.symm_mem.one_shot_all_reduce(ones(), "sum", "0")


@on_ranks(2)
def test_what_cannot_be_counted_is_named():
    raises(AssertionError, "could not count c10d::allreduce_", sparse)
    raises(AssertionError, "could not count symm_mem::one_shot_all_reduce", symmetric_memory)
    with mock.patch.dict(SENDS):
        del SENDS["allreduce_"]
        raises(AssertionError, "could not count c10d::allreduce_", all_reduce)
    all_reduce()


def nested():
    with messages(), messages():
        pass


@on_ranks(2)
def test_contexts_follow_each_other_and_are_not_nested():
    raises(RuntimeError, "already a kernel registered", nested)
    with messages() as earlier:
        dist.barrier()
    all_reduce()
    with messages() as later:
        dist.all_reduce(ones())
    assert len(earlier) == len(later) == 1


def test_the_table_has_all_operators_of_this_torch():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    missing = {name.removeprefix("c10d::") for name in names} - SENDS.keys()
    assert not missing, f"{missing} are not in SENDS"
    for name, (argument, _) in SENDS.items():
        if f"c10d::{name}" in names:
            schema = getattr(torch.ops.c10d, name).default._schema
            assert argument in [a.name for a in schema.arguments], f"{name} has no {argument}"

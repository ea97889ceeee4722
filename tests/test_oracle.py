"""oracle.py: what its program prints."""

import sys
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import oracle
from tests.ranks import gather, on_ranks


@on_ranks(1, 2, 3)
def test_oracle_has_one_hash():
    """`python oracle.py` prints one hash for all modes if a step has one micro-step; two if it has
    two, for `ddp` and 1, and for `single`, 2 and 3; and bytes and elements as the paper has them,
    beside the nan of each parameter."""
    W = dist.get_world_size()
    share = (W - 1) / W
    psi = sum(p.numel() for p in oracle.Model().parameters())
    n_parameters = len(list(oracle.Model().parameters()))
    for micro_steps in (1, 2):
        hashes = {}
        for mode in oracle.MODES:
            hashes[mode], held, sent = oracle.train(mode, micro_steps)
            parameters, gradients, adam = [n_bytes / 4 for n_bytes in held]
            whole = dict.fromkeys(oracle.MODES, (psi, psi, 2 * psi))
            whole["1"] = psi, psi, 2 * psi / W
            whole["2"] = psi, psi / W, 2 * psi / W
            whole["3"] = psi / W + n_parameters, psi / W, 2 * psi / W
            for actual, expected in zip((parameters, gradients, adam), whole[mode]):
                rounded = 2 * n_parameters  # a chunk may have one element more than another
                assert abs(actual - expected) <= rounded, f"{mode}: {held} bytes, expected {whole}"
            least = dict(single=0, ddp=2, **{"1": 2, "2": micro_steps + 1})
            n_sent = sum(gather(sent)) / W
            if mode == "3":  # and what the backward needs again: nearly all are its weights
                times = n_sent / (share * psi * micro_steps) if W > 1 else 3
                assert 2.9 < times <= 3, f"a micro-step sends {times} times psi"
            else:
                assert abs(n_sent - share * psi * least[mode]) < 0.5, f"{mode} sends {n_sent}"
        assert hashes["single"] == hashes["2"] == hashes["3"], hashes
        assert hashes["ddp"] == hashes["1"], hashes
        assert (hashes["ddp"] == hashes["2"]) == (micro_steps == 1 or W == 1), hashes


@on_ranks(3)
def test_sums_of_16_bits_are_made_in_32():
    """256 + 1 + 1 is 258, and in bf16 256."""
    flat = torch.full((6,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    for earlier, expected in ((None, 258.0), (torch.full((2,), 2.0, dtype=torch.bfloat16), 260.0)):
        total = oracle.reduce_scatter(flat, earlier)
        assert total.tolist() == [expected] * 2 and total.dtype == torch.bfloat16, total


@on_ranks(2)
def test_parameters_that_some_ranks_have_not_used():
    """They count as zero there; who is used by no rank keeps None, who is frozen what it has."""
    module = torch.nn.Module()
    for name in ("all", "some", "none", "frozen"):
        module.register_parameter(name, torch.nn.Parameter(torch.ones(3)))
    module.frozen.requires_grad_(False)
    module.all.grad = torch.full((3,), 2.0 + 2 * dist.get_rank())
    if dist.get_rank() == 1:
        module.some.grad = torch.full((3,), 5.0)
    oracle.average_gradients(module)
    assert module.all.grad.tolist() == [3.0] * 3 and module.some.grad.tolist() == [2.5] * 3
    assert module.none.grad is None and module.frozen.grad is None
    oracle.average_gradients(torch.nn.ReLU())  # there is nothing to do


@on_ranks(3)
def test_shards_have_as_many_dimensions_as_parameters():
    """Many scripts let only parameters of two dimensions decay."""
    module = torch.nn.Conv2d(2, 5, 3)
    module.bias.requires_grad_(False)
    oracle.make_shards(module)
    n = (30, 30, 30)[dist.get_rank()]
    assert module.weight.shard.shape == (n, 1, 1, 1) and module.weight.shard.requires_grad
    assert module.bias.shard.shape == ((2, 2, 1)[dist.get_rank()],)
    assert not module.bias.shard.requires_grad


@on_ranks(2)
def test_oracle_frees_what_it_has_saved():
    """In stage 3 an output that its own node has saved, as tanh's, goes with the graph."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    oracle.make_shards(module)
    oracle.gather_when_used(module, [module[0]])
    output = module(torch.ones(1, 2))
    kept = weakref.ref(output)
    del output
    assert kept() is None, "a cycle keeps it"


@on_ranks(3)
def test_oracle_takes_a_group():
    """average_gradients of some ranks is their mean, and asks no others; broadcast_parameters gives
    them the values of the first of them, buffers included, and make_shards those of rank 0."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    module = torch.nn.Linear(1, 1, bias=False)
    if rank < 2:
        module.weight.grad = torch.full((1, 1), rank + 1.0)
        oracle.average_gradients(module, group)
        assert module.weight.grad == 1.5, f"{module.weight.grad} is not the mean of 1 and 2"
    others = dist.new_group([1, 2])
    norm = torch.nn.BatchNorm1d(2)
    for t in (norm.weight.data, norm.running_mean):
        t.fill_(rank)
    if rank > 0:
        oracle.broadcast_parameters(norm, others)
        for t in (norm.weight, norm.running_mean):
            assert (t == 1).all(), f"rank {rank} has {t}, and not the values of rank 1"
    norm.running_mean.fill_(rank)
    oracle.make_shards(norm)
    assert (norm.running_mean == 0).all(), f"rank {rank} has {norm.running_mean}"
    # torch names later groups by how many there are: as many on all ranks.
    if rank < 2:
        dist.destroy_process_group(group)
    if rank > 0:
        dist.destroy_process_group(others)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["ddp", "1", "2", "3"])
def test_oracle_begins_with_the_values_of_rank_0(mode):
    """Ranks that draw their weights without a common seed end on one hash."""
    drawn = []

    def seed_by_rank(_):
        drawn.append(torch.default_generator.manual_seed(dist.get_rank()))

    with mock.patch.object(torch, "manual_seed", seed_by_rank):
        digest, _, _ = oracle.train(mode, micro_steps=1)
    digests = gather(digest)
    assert digests[0] == digests[1] and drawn, digests


def test_oracle_refuses_a_device(capsys):
    """One that is not there, in one line, which names those that are."""
    with (mock.patch.object(sys, "argv", ["oracle.py", "--device", "abacus"]),
          pytest.raises(SystemExit) as ended):
        oracle.main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "'abacus' (choose from 'cpu'" in line, line

"""train.py: data and rates."""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from tests.runs import ask, finish, lines_of, write_line
from data import global_batch, some_of


def log_samples(folder):
    """Plant a log of the blocks that a run trains on, whose first two targets are their numbers."""
    cross_entropy = F.cross_entropy

    def logged(logits, targets, **_):
        if torch.is_grad_enabled():
            numbers = 256 * targets[::4] + targets[1::4]
            write_line(folder / "order", numbers.tolist())
        return cross_entropy(logits, targets)

    F.cross_entropy = logged


def test_data_and_rates_are_as_promised(tmp_path):
    """No sample comes twice in an epoch, and epochs have another order. nanoGPT's folders are read.
    Warm-up is linear, then a cosine. (That ranks take the samples in this order is what the hashes
    of any number of ranks show.)"""
    import train

    n = 50
    batch = 12
    steps = 8
    tokens = [0]
    for i in range(n):
        tokens += i // 256, i % 256, 0, 0
    for name, ids in (("train.bin", tokens), ("val.bin", tokens[:5])):  # 50 blocks, and one
        np.array(ids, dtype=np.uint16).tofile(tmp_path / name)
    finish(tmp_path / "out", dataset=tmp_path, block_size=4, global_batch_size=batch, eval_steps=1,
           micro_batch_size=2, max_steps=steps, min_lr=None,
           plant=partial(log_samples, tmp_path))
    order = []
    for numbers in lines_of(tmp_path / "order"):
        order += numbers
    for step, entry in enumerate(lines_of(tmp_path / "out/metrics.jsonl")):
        cosine = 0.001 + 0.009 * (1 + math.cos(math.pi * (step - 2) / (steps - 2))) / 2
        lr = 0.01 * (step + 1) / 3 if step < 2 else cosine
        assert abs(entry["lr"] - lr) < 1e-9, f"step {step + 1}: lr {entry['lr']}, not {lr}"
    (tmp_path / "text").write_text("a" * 9000 + "b" * 1000)
    ends = finish(tmp_path / "out", dataset=tmp_path / "text", max_steps=40, micro_batch_size=2,
                  eval_interval=40, eval_steps=99)
    assert lines_of(tmp_path / "out/metrics.jsonl")[-1]["lr"] == 0.01, "--min_lr is 0.01, and --lr"
    config = train.Config(block_size=4, global_batch_size=batch)
    orders = []
    for seed in (1, 2):
        config.seed = seed
        orders.append(global_batch(np.zeros(4 * n + 1), 1, config).tolist())
    assert orders[0] != orders[1], "the order does not depend on the seed"
    assert ends["train_loss"] < 1 and ends["val_loss"] > 4, "the last tenth validates"
    assert len(order) == steps * batch, f"{len(order)} samples in {steps} steps of {batch}"
    in_epoch = n // batch * batch
    epochs = [order[i:i + in_epoch] for i in range(0, len(order), in_epoch)]
    assert epochs[0] != epochs[1], "epochs are alike, or y is x"
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch), "a sample came twice"


def test_large_data_is_read_in_part():
    """Every rank compares its data with the others', of which it reads a million tokens: the first
    and the last ones among them."""
    tokens = np.arange(3 * 10**6)
    found = some_of(tokens)
    assert 10**6 <= len(found) < 1.1 * 10**6 and {0, 3 * 10**6 - 1} <= set(found)
    assert some_of(tokens[:1000]).tolist() == tokens[:1000].tolist()


def test_losses_can_be_compared(tmp_path):
    """val_loss is the same to the last bit for all micro batches, numbers of ranks and modes that
    have equal weights, also where they do not divide; and it is the mean over the first blocks."""
    out = tmp_path / "out"
    finish(out, save_interval=4, eval_steps=7)
    losses = set()
    for W, mode, m in ((1, "single", 1), (1, "single", 2), (1, "zero3", 4), (1, "ddp", 7),
                       (1, "single", 16), (2, "zero2", 1), (2, "torch-fsdp", 3), (3, "zero3", 2),
                       (3, "naive", 1), (4, "zero1", 1), (2, "torch-ddp", 5)):
        losses.add(ask(out / "step_00000004", W, mode=mode, micro_batch_size=m)["val_loss"])
    assert len(losses) == 1, losses
    fewer = ask(out / "step_00000004", eval_steps=1)["val_loss"]
    assert {fewer} != losses, "--eval_steps changes nothing"
    all_blocks = [ask(out / "step_00000004", eval_steps=n)["val_loss"] for n in (10**6, 2 * 10**6)]
    assert all_blocks[0] == all_blocks[1] and {all_blocks[0]} != losses

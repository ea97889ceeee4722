"""train.py with its flags, and in RESULT what only a table asks for.

    torchrun --nproc_per_node=2 bench/counted.py --mode zero3 --max_steps 8

    sent_bytes       what rank 0 hands to collectives in the third step, by judge/messages.py
    most_held        [parameters, gradients, optimizer state] of rank 0 in bytes a parameter, at the
                     moment of that step when their sum is largest; of our own modes
    unit_sizes       parameters of the root, of block 0, of block 1 and so on
    block_size       tokens of a sequence
    shares_device    ranks take turns on a device, so times say nothing

The first two are None where there is no third step. Before it buffers are made, and orders of
parameters are learned. The third step takes longer for it; medians of times are those of others.
"""

import itertools
import pathlib
import sys

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch

import runs
import train
from bench.predict import sizes_of
from ddp import DDP
from judge.messages import messages, NotCounted
from zero import Zero1

COUNTED_STEP = 3


def n_bytes(tensors):
    """Memory of tensors, each of it once, since many of them are views."""
    sizes = {}
    for t in tensors:
        storage = t.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def held_bytes(run):
    """What this rank holds now, in bytes a parameter: [parameters, gradients, optimizer state]."""
    whole = list(run.gpt.parameters())
    parameters = whole + list(run.model.parameters())  # shards, in the stages
    gradients = [p.grad for p in parameters if p.grad is not None]
    gradients += [bucket.gradients for bucket in run.model.buckets if bucket.gradients is not None]
    state = []
    for optimizer in run.optimizers:
        for tensors in optimizer.state.values():
            state += [t for t in tensors.values() if t.dim() > 0]  # no counts of steps
    n = sum(p.numel() for p in whole)
    return [n_bytes(parameters) / n, n_bytes(gradients) / n, n_bytes(state) / n]


def watch(run, held):
    """Append what is held after each module's forward, where each gradient arrives, and before the
    update, to a list -> hooks."""
    def note(*_):
        held.append(held_bytes(run))

    hooks = [torch.nn.modules.module.register_module_forward_hook(note)]
    for p in run.gpt.parameters():
        hooks.append(p.register_hook(note))
    for optimizer in run.optimizers:
        hooks.append(optimizer.register_step_pre_hook(note))
    return hooks


def count(facts):
    """Let train.py's third step note in facts what it sends and holds."""
    make_step = train.train_step
    numbers = itertools.count(1)

    def counted_step(run, *arguments):
        if next(numbers) != COUNTED_STEP:
            return make_step(run, *arguments)
        held = []
        has_buckets = isinstance(run.model, (DDP, Zero1))  # Zero2 and Zero3 derive from Zero1
        hooks = watch(run, held) if has_buckets else []
        try:
            with messages() as sent:
                made = make_step(run, *arguments)
            facts["sent_bytes"] = sum(message.bytes for message in sent)
        except NotCounted:
            pass  # the step is made
        for hook in hooks:
            hook.remove()
        facts["most_held"] = max(held, key=sum, default=None)
        return made

    train.train_step = counted_step


def main():
    given = runs.read_flags(train.Config, train.__doc__, sys.argv[1:])
    facts = dict(sent_bytes=None, most_held=None)
    if not given.get("profile") and not given.get("trace"):  # which look at the third step, too
        count(facts)
    result_of = train.result_of

    def counted_result(run):
        _, n_local, n_devices = runs.local_numbers(run.device.type)
        return dict(result_of(run), **facts, unit_sizes=sizes_of(run.gpt),
                    block_size=run.config.block_size, shares_device=n_local > n_devices)

    train.result_of = counted_result
    train.main()


if __name__ == "__main__":
    main()

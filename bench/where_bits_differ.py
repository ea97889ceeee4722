"""Where the bits of one process and of several ranks, or of the same run twice, part.

    python bench/where_bits_differ.py                               one process
    torchrun --nproc_per_node=2 bench/where_bits_differ.py          two ranks beside one process

A step is taken apart, and each part is made twice, in the two ways in which its bits might differ:

    a  the same backward twice, with each of torch's kernels of attention
    b  gradients of a step before clipping: a plain module's, a Zero3's
    c  gradients with each weight in memory of its own, at some place of a large buffer
    d  the norm of gradients: whole ones, those of shards
    e  the factor by which clipping multiplies them
    f  AdamW's update: of whole tensors, of slices

A line says whether bits are equal, and otherwise which tensors differ, and by how much. The last
lines say it for each question. On an accelerator the model is GPT-2 with 124M parameters, and it
takes about two minutes; on a CPU it is train.py's smallest, and takes seconds. Ranks may share a
device of NCCL's.
"""

import argparse
import contextlib
import hashlib
import itertools
import math
import os
import pathlib
import sys

# Deterministic products want it, and CUDA reads it once, when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel, SDPBackend

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench.start import join, Parser
from ddp import total_norm
from model import GPT, GPTConfig, PRESETS
from zero import Zero3

VOCABULARY = {"tiny": 257}  # others have GPT-2's
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTION = {
    "torch's choice": None,
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
MICRO_STEPS = 2  # of a rank in a step
MAX_NORM = 1.0


# -------------------------------------------------------------------------------------------------
# comparing


def as_integers(t):
    """The bits of t: so that nan equals nan, and -0 is not 0."""
    return t.contiguous().view({4: torch.int32, 8: torch.int64}[t.itemsize])


def differences(expected, actual):
    """{name: tensor} twice -> {name: largest difference, over the largest value} of those whose
    bits differ."""
    worst = {}
    for name, t in expected.items():
        other = actual[name]
        if not torch.equal(as_integers(t), as_integers(other)):
            largest = t.abs().max().clamp(min=torch.finfo(t.dtype).tiny)
            worst[name] = ((t - other).abs().max() / largest).item()
    return worst


def digest(tensors):
    """The first half of a SHA-256 of {name: tensor}."""
    sha = hashlib.sha256()
    for t in tensors.values():
        sha.update(t.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:32]


class Report:
    """Prints, on rank 0, a line for each comparison, and remembers it."""

    def __init__(self):
        self.answers = {}  # {question: [(case, whether bits are equal)]}

    def say(self, question, case, is_equal, detail=""):
        self.answers.setdefault(question, []).append((case, is_equal))
        verdict = "equal  " if is_equal else "DIFFER "
        if dist.get_rank() == 0:
            print(f"{question}  {verdict} {case}{': ' if detail else ''}{detail}", flush=True)

    def skip(self, question, case, error):
        why = str(error).splitlines()[0].split(". ")[0]
        if dist.get_rank() == 0:
            print(f"{question}  -       {case}: {why}", flush=True)

    def compare(self, question, case, expected, actual):
        """{name: tensor} twice, of this rank; all ranks call it."""
        worst = differences(expected, actual)
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, worst)
        together = {}
        for worst in of_ranks:
            for name, difference in worst.items():
                together[name] = max(difference, together.get(name, 0))
        if not together:
            self.say(question, case, True, digest(expected))
            return
        first = ", ".join(itertools.islice(together, 3))
        self.say(question, case, False,
                 f"{len(together)} of {len(expected)} tensors, by up to "
                 f"{max(together.values()):.1e} of their largest value: {first} ...")

    def compare_ranks(self, question, case, tensors):
        """{name: tensor}, which should be the same on all ranks."""
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest(tensors))
        self.say(question, case, len(set(digests)) == 1, " and ".join(dict.fromkeys(digests)))

    def conclude(self):
        if dist.get_rank() > 0:
            return
        print()
        for question, answers in self.answers.items():
            different = [case for case, is_equal in answers if not is_equal]
            verdict = "bits differ with " + "; ".join(different) if different else "all equal"
            print(f"verdict {question}  {verdict}", flush=True)


# -------------------------------------------------------------------------------------------------
# a step


@contextlib.contextmanager
def determinism(is_on):
    """Kernels of torch's that are deterministic, or an error where there is none."""
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Step:
    """A model's size, and the micro batches of a step."""

    def __init__(self, size, device):
        self.device = device
        self.config = GPTConfig(vocab_size=VOCABULARY.get(size, 50257), **PRESETS[size])
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for _ in range(MICRO_STEPS * dist.get_world_size()):
            shape = 1, self.config.block_size + 1
            tokens = torch.randint(self.config.vocab_size, shape, generator=generator)
            self.batches.append(tokens.to(device))

    def build(self):
        return GPT(self.config).to(self.device)

    def backward(self, model, batch, dtype=torch.float32):
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            _, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()


def gradients_of(model):
    """And let the model have none."""
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name], p.grad = p.grad, None
    return gradients


# -------------------------------------------------------------------------------------------------
# questions


def cases(*more):
    """(dtype, whether deterministic, one of more..., a name of all that) of each combination."""
    for is_deterministic, dtype, *others in itertools.product((False, True), DTYPES, *more):
        words = [dtype, *others]
        if is_deterministic:
            words.append("deterministic")
        yield DTYPES[dtype], is_deterministic, *others, ", ".join(words)


def ask_a(step, report):
    """The same backward twice."""
    model = step.build()
    for dtype, is_deterministic, attention, case in cases(ATTENTION):
        backend = ATTENTION[attention]
        kernels = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
        twice = []
        try:
            with determinism(is_deterministic), kernels:
                for _ in range(2):
                    step.backward(model, step.batches[0], dtype)
                    twice.append(gradients_of(model))
        except RuntimeError as error:  # no such kernel here, or none that is deterministic
            gradients_of(model)
            report.skip("a", case, error)
            continue
        report.compare("a", case, *twice)


def ask_b(step, report):
    """A step of a plain module, on all ranks, and of Zero3, whose shards are parts of the same
    gradients."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for dtype, is_deterministic, case in cases():
        with determinism(is_deterministic):
            plain = step.build()
            for batch in step.batches:
                step.backward(plain, batch, dtype)
            expected = gradients_of(plain)
            del plain
            model = Zero3(step.build())
            model.set_gradient_divide_factor(1)  # a sum, as the plain one's
            for number in range(MICRO_STEPS):
                step.backward(model, step.batches[number * W + rank], dtype)
        report.compare_ranks("b", f"{case}, plain module, W = {W}", expected)
        parts, shards = parts_and_shards(expected, model)
        report.compare("b", f"{case}, Zero3, W = {W}", parts, shards)
        del model


def parts_and_shards(gradients, model):
    """Whole gradients, a stage -> what this rank has of each, twice, by name."""
    parts = {}
    shards = {}
    starts = model.shard_starts()
    for name, shard in model.named_parameters():
        if shard.numel() > 0:
            start = starts[name]
            parts[name] = gradients[name].flatten()[start:start + shard.numel()]
            # As a plain tensor: a wrapper refuses to answer with a part of a gradient.
            shards[name] = shard.grad.detach().as_subclass(torch.Tensor).flatten()
    return parts, shards


def ask_c(step, report):
    """Products may take another kernel where memory begins at another place. All else is to be
    deterministic."""
    model = step.build()
    with determinism(True):
        step.backward(model, step.batches[0])
    expected = gradients_of(model)
    for align in (64, 256):
        move_weights(model, align)
        with determinism(True):
            step.backward(model, step.batches[0])
        report.compare("c", f"at {align} bytes above a multiple of 512", expected,
                       gradients_of(model))


def move_weights(model, align):
    """All weights go to one buffer, each to a place that is align bytes above a multiple of 512,
    where torch's allocator would begin a tensor."""
    places = []
    n = 0
    for p in model.parameters():
        places.append(n + align // p.itemsize)
        n += 512 // p.itemsize * math.ceil((align + p.nbytes) / 512)
    buffer = torch.zeros(n, device=p.device)
    for p, place in zip(list(model.parameters()), places):
        moved = buffer[place:place + p.numel()].view(p.shape)
        p.data = moved.copy_(p.data)


def cut(tensors, W):
    """Tensors -> for each of W ranks its slices of them."""
    return list(zip(*(t.flatten().tensor_split(W) for t in tensors)))


def ask_d_and_e(step, report, gradients):
    """The norm in float64, and the factor in fp32, which is what touches gradients."""
    whole = total_norm(gradients)
    other_ways = {"by .double().norm()": torch.stack([t.double().norm() for t in gradients]).norm()}
    for W in (2, 3, 4):
        squares = [total_norm(shards).square() for shards in map(list, cut(gradients, W))]
        other_ways[f"as {W} shards"] = torch.stack(squares).sum().sqrt()
    for case, norm in other_ways.items():
        report.say("d", f"{case}, float64", norm.item() == whole.item(),
                   f"{whole.item().hex()} and {norm.item().hex()}")
    for case, norm in other_ways.items():
        report.say("e", f"{case}, fp32", factor(norm) == factor(whole),
                   f"{factor(whole).hex()} and {factor(norm).hex()}")


def factor(norm):
    """As ddp.py's `clip_gradients_` computes it."""
    return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0).float().item()


def update(parts, gradients, **kernel):
    """New values of parts, lists of tensors, after two steps of AdamW on them."""
    parameters = [t.clone() for t in parts]
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient.clone()
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **kernel)
    for _ in range(2):
        optimizer.step()
    return parameters


def ask_f(step, report, gradients):
    """AdamW works element by element. But its kernel may treat a tensor's end in another way."""
    model = step.build()
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach() for p in model.parameters()]
    for kernel in ("foreach", "fused"):
        options = {kernel: True}
        try:
            whole = dict(zip(names, update(weights, gradients, **options)))
        except RuntimeError as error:  # no such kernel here
            report.skip("f", f"{kernel} AdamW", error)
            continue
        for W in (2, 3):
            slices = []
            for own, of_gradients in zip(cut(weights, W), cut(gradients, W)):
                slices.append(update(own, of_gradients, **options))
            joined = [torch.cat(parts) for parts in zip(*slices)]
            pieces = {}
            for name, t in zip(names, joined):
                pieces[name] = t.view(whole[name].shape)
            report.compare("f", f"{kernel} AdamW, {W} slices", whole, pieces)


# -------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, or an accelerator, such as cuda; unless given, the "
                                         "one that is there")
    parser.add_argument("--model", choices=PRESETS, help="unless given, gpt2 on an accelerator, "
                                                         "tiny on a CPU")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    device = join(arguments.device)
    # It takes time, and what is compared reads no memory that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    size = arguments.model or ("tiny" if device.type == "cpu" else "gpt2")
    if dist.get_rank() == 0:
        print(f"{size} on {device.type}, torch {torch.__version__}, "
              f"W = {dist.get_world_size()}, CUBLAS_WORKSPACE_CONFIG "
              f"{os.environ['CUBLAS_WORKSPACE_CONFIG']}\n", flush=True)
    step = Step(size, device)
    report = Report()
    ask_a(step, report)
    ask_b(step, report)
    ask_c(step, report)
    model = step.build()
    step.backward(model, step.batches[0])
    gradients = list(gradients_of(model).values())
    del model
    ask_d_and_e(step, report, gradients)
    ask_f(step, report, gradients)
    report.conclude()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

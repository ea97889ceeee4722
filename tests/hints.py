"""What a wrong tensor looks like, and the mistake that looks like it.

`difference` is for the rows of the proof: a tensor beside the one that is expected. `Wrong` is for
the judge: a step after which some parameters are wrong. It asks by how much each micro batch's
gradient would have to be multiplied, so that their sum is what was found. These numbers tell most
mistakes.
"""

from functools import cached_property, partial

import torch


# -------------------------------------------------------------------------------------------------
# a tensor


def difference(what, expected, found, contributions=()):
    """How a tensor differs from the one that is expected, and the mistake that looks like it."""
    right = expected[what]
    if found.shape != right.shape or found.dtype != right.dtype:
        return (f"is {tuple(found.shape)} {found.dtype}, expected is {tuple(right.shape)} "
                f"{right.dtype}")
    is_alike = partial(torch.allclose, rtol=0.02 if right.dtype.itemsize == 2 else 1e-4, atol=1e-9)
    found = found.double()
    right = right.double()
    if found.isnan().any():
        return "has nan: it was read before it was there, or never written?"
    ratio = (found.norm() / right.norm()).item()
    fact = f"has norm {ratio:.4f} x expected, largest difference {(found - right).abs().max():.2g}"
    for text, suspect in suspects(what, expected, found, ratio, contributions):
        if is_alike(found, suspect.double()):
            return f"{fact}: {text}"
    if is_alike(found.flatten().sort().values, right.flatten().sort().values):
        return f"{fact}: the right values are in wrong places"
    return fact


def suspects(what, expected, found, ratio, contributions):
    """Pairs: what a mistake looks like, and the tensor that it makes."""
    right = expected[what].double()
    zero = torch.zeros_like(right)
    yield "rounded in another way: added in another order, or multiplied once more?", right
    yield "zero where it should not be", zero
    if right.numel() < 4:
        return  # too few to tell
    mistake = "added twice, or not divided?" if ratio > 1 else "divided twice?"
    yield f"all elements alike: {mistake}", ratio * right
    parts = contributions[what] if what in contributions else {}
    for who in parts:
        others = [part for other, part in parts.items() if other != who]
        yield f"as if {who} had not sent", sum(others, zero)
    for who, part in parts.items():
        yield f"as if only {who} had sent", part
    for other, t in expected.items():
        if other != what and t.shape == right.shape:
            t = t.double()
            yield f"it is {other}", t
            times = (found - right).flatten().dot(t.flatten()) / t.square().sum()
            yield f"{times:.3g} x {other} is added to it: not zeroed?", right + times * t


# -------------------------------------------------------------------------------------------------
# a step


def is_alike(found, right):
    """But for what fp32 rounds off a parameter, beside which its step is small."""
    return bool((found - right).norm() <= 0.01 * right.norm())


class Wrong:
    """A step after which some parameters are wrong on this rank.

    module: as it was, for its names. before, after: {name: parameter}. gradients: {name: flat
    gradient, as it was found}, of those that are wrong, in the order of the module. parts: {name:
    (micro-steps, ranks, elements), what each micro batch should have added to it}; of a parameter
    that no micro batch uses: None.
    """

    def __init__(self, module, before, after, gradients, parts, rank):
        self.module, self.before, self.after = module, before, after
        self.gradients, self.parts, self.rank = gradients, parts, rank
        self.names = list(gradients)
        self.first = self.names[0]

    def how_far(self):
        """The first wrong gradient beside the one that is expected."""
        found = self.gradients[self.first]
        if found.isnan().any():
            return "nan: read before it was there, or never written?"
        if torch.equal(self.after[self.first], self.before[self.first]):
            return "it has not moved: does the optimizer get it, and is its .grad there?"
        if self.parts[self.first] is None:
            return ("no rank has used it, so it should stay: with gradients of zeros, in place of "
                    "None, its weights decay")
        expected = self.parts[self.first].sum(dim=(0, 1))
        factor = found.dot(expected) / expected.square().sum()
        if is_alike(found, factor * expected):
            return f"its gradient is {factor:.3g} x expected"
        ratio = found.norm() / expected.norm()
        return f"its gradient has norm {ratio:.3g} x expected, and is no multiple of it"

    def hint(self, clipped):
        """The mistake that looks like it, or an empty text."""
        moved = not torch.equal(self.after[self.first], self.before[self.first])
        if self.parts[self.first] is None or self.gradients[self.first].isnan().any() or not moved:
            return ""
        if clipped:
            return ("if it is right without clipping, it is clipped by another norm than that of "
                    "all gradients, such as that of a rank's own, or of its shards")
        if len(self.names) < len(self.before):  # others are right
            if all(name in self.tied_names for name in self.names):
                return ("it has two names in the module: reduced, or divided, once for each of "
                        "them?")
            if all(self.is_unused_somewhere(name) for name in self.names):
                return ("not all ranks have used it: where its .grad is None a rank has to take "
                        "part with zeros")
        numbers = self.multiples()
        if numbers is None:
            return ""
        return mistake(numbers, self.rank) or f"it is {in_words(numbers)}"

    @cached_property
    def tied_names(self):
        """The first name of each parameter that the module has by several names."""
        names_of = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            names_of.setdefault(p, []).append(name)
        return {names[0] for names in names_of.values() if len(names) > 1}

    def is_unused_somewhere(self, name):
        part = self.parts[name]
        return part is None or not part.any(dim=2).all()

    def multiples(self):
        """By how much the gradient of each micro batch is multiplied in what was found, where 1 is
        right -> (ranks, micro-steps); or None, where it is no such sum. Asked of all wrong tensors
        together, or else of the first."""
        used = [name for name in self.names if self.parts[name] is not None]
        for names in (used, [self.first]):
            found = torch.cat([self.gradients[name] for name in names])
            parts = torch.cat([self.parts[name] for name in names], dim=2)
            micro_steps, W, n = parts.shape
            if n < 2 * micro_steps * W:
                return None  # too few to tell
            columns = parts.flatten(0, 1).T
            numbers = torch.linalg.lstsq(columns, found).solution
            if is_alike(found, columns @ numbers):
                return numbers.view(micro_steps, W).T
        return None


def mistake(numbers, rank):
    """numbers, (ranks, micro-steps): by how much each micro batch's gradient is multiplied on this
    rank, where 1 is right -> the mistake that makes these, or an empty text."""
    W, micro_steps = numbers.shape
    others = torch.cat([numbers[:rank], numbers[rank + 1:]])
    first, last = numbers[:, 0], numbers[:, -1]

    def are(t, right):
        right = torch.as_tensor(right, dtype=t.dtype).expand_as(t)
        return torch.allclose(t, right, rtol=0.02, atol=0.02)

    factors = {"not divided by the number of ranks": W,
               "divided twice by the number of ranks": 1 / W,
               "not divided by the number of micro-steps": micro_steps,
               "divided by the number of micro-steps, as the losses already are": 1 / micro_steps}
    texts = [text for text, factor in factors.items() if factor != 1 and are(numbers, factor)]
    if texts:
        return ", or ".join(texts)  # two where W is the number of micro-steps
    if micro_steps > 1:
        if are(first, 0):
            return "the last micro-step alone: what was accumulated before it is lost"
        if are(last, 0):
            return "the first micro-step alone: what came after it was not reduced"
        if are(first, W * last):
            return ("what an earlier micro-step had summed over ranks was summed again, so it "
                    "counts W times")
    if W > 1 and are(others, 0):
        return "a rank's own gradients alone: nothing was sent, or not waited for"
    if W > 1 and micro_steps > 1 and are(others[:, 0], 0):
        return "of earlier micro-steps a rank has its own gradients alone: they were not reduced"
    missing = [str(other) for other in range(W) if are(numbers[other], 0)]
    if missing:
        return f"without the gradients of rank {', '.join(missing)}"
    if are(numbers, numbers.mean()):
        return "all of it is multiplied by one number: clipped, or scaled?"
    if are(numbers, numbers.mean(dim=1, keepdim=True)) and (numbers > 0).all():
        return ("each rank's gradients are multiplied by a number of its own: clipped by its own "
                "norm, before the mean?")
    return ""


def in_words(numbers):
    """A sum of the ranks' gradients."""
    of_ranks = []
    for rank, row in enumerate(numbers):
        of_micro_steps = ", ".join(f"{number:.3g}" for number in row.tolist())
        of_ranks.append(f"{of_micro_steps} x rank {rank}'s")
    return f"{' + '.join(of_ranks)}, of each micro-step, where 1 is right"

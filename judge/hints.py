"""What a wrong step looks like, and the mistake that looks like it.

`Wrong` is a step after which some parameters are wrong. It asks by how much each micro batch's
gradient would have to be multiplied, so that their sum is what was found. These numbers tell most
mistakes.
"""

from functools import cached_property

import torch


# -------------------------------------------------------------------------------------------------
# a step


def is_alike(actual, right):
    """But for what fp32 rounds off a parameter, beside which its step is small."""
    return bool((actual - right).norm() <= 0.01 * right.norm())


class Wrong:
    """A step after which some parameters are wrong on this rank.

    module: as it was, for its names. before, after: {name: parameter}. gradients: {name: flat
    gradient, as it was found}, of those that are wrong, in the order of the module. parts: {name:
    (micro-steps, ranks, elements), what each micro batch should have added to it}; of a parameter
    that no micro batch uses: None. earlier: {name: the sum of gradients of the step before, or
    None}. trained: names of the parameters that are not frozen.
    """

    def __init__(self, module, before, after, gradients, parts, earlier, trained, rank):
        self.module, self.before, self.after = module, before, after
        self.gradients, self.parts, self.earlier = gradients, parts, earlier
        self.trained, self.rank = trained, rank
        self.names = list(gradients)
        self.first = self.names[0]

    def how_far(self):
        """The first wrong gradient beside the one that is expected."""
        actual = self.gradients[self.first]
        if actual.isnan().any():
            return "nan: read before it was there, or never written?"
        if torch.equal(self.after[self.first], self.before[self.first]):
            return "it has not moved: does the optimizer get it, and is its .grad there?"
        if self.first not in self.trained:
            return "it is frozen, and not what it was on rank 0"
        if self.parts[self.first] is None:
            return ("no rank has used it, so its .grad should be None, and it should stay; a "
                    "gradient of zeros lets its weights decay")
        expected = self.parts[self.first].sum(dim=(0, 1))
        if is_alike(actual, expected):
            percent = 100 * (actual - expected).norm() / expected.norm()
            return f"its gradient is {percent:.2g} % off: rounded to 16 bits on its way?"
        factor = actual.dot(expected) / expected.square().sum()
        if is_alike(actual, factor * expected):
            return f"its gradient is {factor:.3g} x expected"
        ratio = actual.norm() / expected.norm()
        return f"its gradient has norm {ratio:.3g} x expected, and is no multiple of it"

    def hint(self):
        """The mistake that looks like it, or an empty text, also where `how_far` says enough."""
        actual, parts = self.gradients[self.first], self.parts[self.first]
        has_moved = not torch.equal(self.after[self.first], self.before[self.first])
        if parts is None or actual.isnan().any() or not has_moved:
            return ""
        if is_alike(actual, parts.sum(dim=(0, 1))):
            return ""
        if self.is_added_to():
            return "the gradient of the step before is added to it: not zeroed?"
        if len(self.names) < len(self.trained):  # others are right
            if all(name in self.tied_names for name in self.names):
                return ("it has two names in the module: reduced, or divided, once for each of "
                        "them?")
            if all(self.is_unused_somewhere(name) for name in self.names):
                return ("not all ranks have used it: if one has, a rank whose .grad is None has to "
                        "take part with zeros, and all divide by the number of ranks")
        numbers = self.multiples()
        if numbers is None:
            return ""
        return mistake(numbers, self.rank) or in_words(numbers)

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

    def is_added_to(self):
        """Whether some of the gradient of the step before is in it."""
        earlier = self.earlier[self.first]
        if earlier is None:
            return False
        earlier = earlier.double().flatten()
        expected = self.parts[self.first].sum(dim=(0, 1))
        more = self.gradients[self.first] - expected
        times = more.dot(earlier) / earlier.square().sum()
        actual = self.gradients[self.first]
        is_much = times * earlier.norm() > 0.1 * expected.norm()
        return bool(is_much) and is_alike(expected + times * earlier, actual)

    def multiples(self):
        """By how much the gradient of each micro batch is multiplied in what was found, where 1 is
        right -> (ranks, micro-steps); or None, where it is no such sum. Asked of all wrong tensors
        together, or else of the first."""
        used = [name for name in self.names if self.parts[name] is not None]
        for names in (used, [self.first]):
            actual = torch.cat([self.gradients[name] for name in names])
            parts = torch.cat([self.parts[name] for name in names], dim=2)
            micro_steps, W, n = parts.shape
            if n < 2 * micro_steps * W:
                return None  # too few to tell
            columns = parts.flatten(0, 1).T
            if torch.linalg.cond(columns) > 1000:
                return None  # some are nearly multiples of others
            numbers = torch.linalg.lstsq(columns, actual).solution
            if is_alike(actual, columns @ numbers):
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
        return "a rank's own gradients alone: nothing was sent, or not waited for, or not used"
    if W > 1 and micro_steps > 1 and are(others[:, 0], 0):
        return "of earlier micro-steps a rank has its own gradients alone: they were not reduced"
    missing = [str(other) for other in range(W) if are(numbers[other], 0)]
    if missing:
        return f"without the gradients of rank {', '.join(missing)}"
    if are(numbers, numbers.mean()):
        return "all of it is multiplied by one number: clipped, or scaled?"
    is_less = bool((numbers > 0).all()) and bool((numbers < 1.02).all())
    if are(numbers, numbers.mean(dim=1, keepdim=True)) and is_less:
        return ("each rank's gradients are multiplied by a number of its own: clipped by its own "
                "norm, before the mean?")
    return ""


def in_words(numbers):
    """What counts otherwise than once."""
    facts = []
    for rank, row in enumerate(numbers):
        for micro_step, number in enumerate(row.tolist()):
            if abs(number - 1) > 0.02:
                batch = f"rank {rank} in micro-step {micro_step + 1}"
                facts.append(f"{number:.2f} times that of {batch}")
    return f"it has {', '.join(facts)}, and all others once"

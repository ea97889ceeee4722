"""train.py with its flags, and in RESULT one number more: `sent_bytes`, of rank 0 in a step.

    torchrun --nproc_per_node=2 bench/counted.py --mode zero3 --max_steps 8

Each call of a collective in the third step is counted, by judge/messages.py. Before it buffers are
made, and orders of parameters are learned. All other steps are those of train.py, so medians of
times are, too. sent_bytes is None where there is no third step, where something cannot be counted,
and where the third step is looked at already, by --profile or --trace.
"""

import itertools
import pathlib
import sys

# Run by itself, this file stands first in the path, and not the project.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import train
from runs import read_flags
from judge.messages import messages, NotCounted

COUNTED_STEP = 3


def count(sent_bytes):
    """Let train.py's third step append to a list the bytes that this rank has sent in it."""
    make_step = train.train_step
    numbers = itertools.count(1)

    def counted_step(*arguments):
        if next(numbers) != COUNTED_STEP:
            return make_step(*arguments)
        try:
            with messages() as sent:
                made = make_step(*arguments)
        except NotCounted:
            return made
        sent_bytes.append(sum(message.bytes for message in sent))
        return made

    train.train_step = counted_step


def add_to_result(sent_bytes):
    result_of = train.result_of

    def counted_result(run):
        result = result_of(run)
        result["sent_bytes"] = sent_bytes[0] if sent_bytes else None
        return result

    train.result_of = counted_result


def main():
    given = read_flags(train.Config, train.__doc__, sys.argv[1:])
    sent_bytes = []
    if not given.get("profile") and not given.get("trace"):
        count(sent_bytes)
    add_to_result(sent_bytes)
    train.main()


if __name__ == "__main__":
    main()

"""What this rank sends, by whatever collective of torch.distributed and whoever calls it.

    with messages() as sent:
        model(x).sum().backward()
    elements = sum(message.elements for message in sent)

Python functions of torch.distributed, functional collectives and C++, such as the Reducer of
torch's DDP: all end in operators of the dispatcher's namespace c10d. These are looked up by a key
of the tensors. One of the keys, BackendSelect, belongs to all tensors, comes before those of
devices, and has no kernel of c10d's. A kernel there, which counts and then calls the next, sees
every call: of any thread, and also from within other operators, where torch's dispatch modes end.

Not seen is what passes the dispatcher by: a backend's own methods, a ProcessGroup written in
Python, what torch's debug mode DETAIL or a backend's barrier exchange by themselves, sockets.
"""

from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import isnan, nan
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves


class NotCounted(AssertionError):
    """What was sent that could not be counted."""


class Message(NamedTuple):
    operation: str  # such as "c10d::allreduce_"
    elements: float  # that this rank sends, of any dtype; nan if that could not be counted
    bytes: float


@dataclass
class Call:
    given: dict  # {argument of the operator: value}

    @property
    def group(self):
        return dist.ProcessGroup.unbox(self.given["process_group"])


# Of the elements of a call's tensors: the part that this rank sends.


def none(call):
    return 0


def all_of_them(call):
    return 1


def all_but_on_root(call):
    return 0 if call.group.rank() == call.given["root_rank"] else 1


def once(call):
    """All but one of W ranks send each element. In a ring that is the mean over its ranks."""
    W = call.group.size()
    return Fraction(W - 1, W)


def twice(call):
    """To be added up, and as a sum."""
    return 2 * once(call)


def of_others(sizes, rank):
    all_elements = max(1, sum(sizes))  # there may be none
    return 1 - Fraction(sizes[rank], all_elements)


def rows_of_others(call):
    equal = [1] * call.group.size()
    return of_others(call.given["input_split_sizes"] or equal, call.group.rank())


def tensors_of_others(call):
    sizes = [tensor.numel() for tensor in call.given["input_tensors"]]
    return of_others(sizes, call.group.rank())


# operator -> (which argument has the tensors, which part of them is sent)
SENDS = {"allreduce_": ("tensors", twice),
         "allreduce_coalesced_": ("tensors", twice),
         "reduce_scatter_": ("input_tensors", once),
         "_reduce_scatter_base_": ("input_tensor", once),
         "reduce_scatter_tensor_coalesced_": ("inputs", once),
         "allgather_": ("output_tensors", once),
         "_allgather_base_": ("output_tensor", once),
         "allgather_coalesced_": ("output_lists", once),
         "allgather_into_tensor_coalesced_": ("outputs", once),
         "alltoall_": ("input_tensors", tensors_of_others),
         "alltoall_base_": ("input", rows_of_others),
         "broadcast_": ("tensors", once),  # a chain: each rank but the last
         "reduce_": ("tensors", once),
         "gather_": ("input_tensors", all_but_on_root),
         "scatter_": ("input_tensors", once),  # which only the root has
         "send": ("tensors", all_of_them),
         "recv_": ("tensors", none),
         "recv_any_source_": ("tensors", none),
         "barrier": ("tensor", none),
         "monitored_barrier_": ("tensor", none),
         "check_for_nan": ("tensor", none)}  # it only looks

# Operators of symmetric memory write into that of other ranks. None is in the table.
NAMESPACES = "c10d", "symm_mem"


def message_of(operation, call):
    """The Message of a call; of nan elements if the table lacks its operator, or it is sparse."""
    namespace, name = operation.split("::")
    if namespace != "c10d" or name not in SENDS:
        return Message(operation, nan, nan)
    argument, part_of = SENDS[name]
    tensors = tree_leaves(call.given[argument])  # from lists of lists, too
    if any(tensor.layout != torch.strided for tensor in tensors):
        return Message(operation, nan, nan)
    part = part_of(call)
    elements = part * sum(tensor.numel() for tensor in tensors)
    n_bytes = part * sum(tensor.nbytes for tensor in tensors)
    return Message(operation, float(elements), float(n_bytes))


@contextmanager
def messages():
    """A context -> a list, which gets a Message for each call of a collective, in any thread.

    Counted is what an algorithm sends that sends each element no more often than needed, whatever
    the backend does: elements, of the call's dtype, and bytes. W is that of the call's own group. A
    rank's number is its own where only one algorithm makes sense: send, gather, scatter, all-to-all
    (also of uneven splits). Of others it is the mean over ranks, which is a ring's.

    At the end NotCounted names what could not be counted. Contexts cannot be nested.
    """
    sent = []
    key = torch._C.DispatchKey.BackendSelect

    def count(operator, keys, *arguments, **options):
        names = [argument.name for argument in operator._schema.arguments]
        call = Call(dict(zip(names, arguments)) | options)
        sent.append(message_of(operator._schema.name, call))
        return operator.redispatch(keys.remove(key), *arguments, **options)

    with ExitStack() as kernels:
        libraries = {}
        for namespace in NAMESPACES:
            library = torch.library._scoped_library(namespace, "IMPL")
            libraries[namespace] = kernels.enter_context(library)
        for full_name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            if namespace in NAMESPACES:
                operator = getattr(getattr(torch.ops, namespace), name).default
                kernel = partial(count, operator)
                libraries[namespace].impl(name, kernel, "BackendSelect", with_keyset=True,
                                          allow_override=False)
        yield sent
    uncounted = {message.operation for message in sent if isnan(message.elements)}
    if uncounted:
        raise NotCounted(f"could not count {', '.join(sorted(uncounted))}")

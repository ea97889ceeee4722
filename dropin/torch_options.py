# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""The options of torch's DDP, its comm hooks, and what libraries touch of it."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from ddp import bucket_bytes


class TorchOptions:
    """DDP takes the options of torch's, and comm hooks; means need not be zeroed."""

    def __init__(self, module: torch.nn.Module, device_ids: list | None = None, output_device=None,
                 dim: int = 0, broadcast_buffers: bool = True, init_sync: bool = True,
                 process_group: dist.ProcessGroup | None = None,
                 bucket_cap_mb: float | None = None,
                 find_unused_parameters: bool = False, check_reduction: bool = False,
                 gradient_as_bucket_view: bool = False, static_graph: bool = False,
                 delay_all_reduce_named_params: list | None = None,
                 param_to_hook_all_reduce: torch.nn.Parameter | None = None,
                 mixed_precision: object = None, device_mesh: object = None,
                 skip_all_reduce_unused_params: bool = False,
                 bucket_cap_mb_list: list[int] | None = None, batched_grad_copy: bool = False,
                 forward_sync_buffers: bool | None = None):
        at_once = "leave it out, as every gradient is averaged during the backward"
        for name, value, instead in (
                ("delay_all_reduce_named_params", delay_all_reduce_named_params, at_once),
                ("param_to_hook_all_reduce", param_to_hook_all_reduce, at_once),
                ("mixed_precision", mixed_precision, "use torch.autocast, or Zero1's param_dtype"),
                ("bucket_cap_mb_list", bucket_cap_mb_list, "give one bucket_cap_mb for all")):
            if value is not None:
                self._refuse(f"does not take {name}: {instead}")
        refuse_no_size(bucket_cap_mb)
        if device_mesh is not None:
            process_group = self._group_of(device_mesh, process_group)
        self.device_ids = device_ids
        # With a static graph torch allows what is never used.
        self.find_unused_parameters = find_unused_parameters or static_graph
        self._compared = [f"{bucket_cap_mb=}"]
        self._sends_buffers_at_first = broadcast_buffers is None or broadcast_buffers
        self.forward_sync_buffers = self._sends_buffers_at_first
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            self._sends_buffers_at_first = True
        self._init_sync = init_sync
        self.comm_state, self._comm_hook = None, None
        self._may_step = False  # the last no_sync() has said so
        super().__init__(module, process_group, bucket_cap_mb)
        self.bucket_cap_mb = bucket_bytes(self.group.size(), bucket_cap_mb) / 2**20

    def _group_of(self, mesh, process_group):
        """The ranks of a DeviceMesh of one dimension."""
        if process_group is not None:
            self._refuse("takes a process_group or a device_mesh, not both")
        if mesh.ndim != 1:
            self._refuse(f"takes a device_mesh of one dimension, and this one has {mesh.ndim}: "
                         f'give mesh["the name of a dimension"]')
        return mesh.get_group()

    def _check_module(self, options):
        tensors = self._named("parameters") + self._named("buffers")
        devices = {t.device: name for name, t in tensors}
        if not any(p.requires_grad for _, p in self._named("parameters")):
            self._refuse("needs parameters that require a gradient: there is nothing to average")
        if len(devices) > 1 or torch.device("meta") in devices:
            self._refuse(f"needs all parameters and buffers on one device, not on meta: {devices}")
        super()._check_module(options)

    def __reduce__(self):
        """For deepcopy, pickle and AveragedModel: how to make a copy, and what it has then. It has
        no comm hook."""
        if self.group is not dist.group.WORLD:
            self._refuse("a copy would use the default process group: copy the module")
        make = functools.partial(type(self), bucket_cap_mb=self.bucket_cap_mb, init_sync=False)
        kept = ("training", "device_ids", "find_unused_parameters", "forward_sync_buffers",
                "gradient_divide_factor")
        return make, (self.module,), {name: getattr(self, name) for name in kept}

    def forward(self, *inputs, **options):
        if self.device_ids:
            (inputs,), (options,) = dist.utils._to_kwargs(inputs, options, self._device, False)
        self._prepare_forward()
        return super().forward(*inputs, **options)

    def _begin_backward(self):
        """If the last backward has averaged, and nobody has zeroed its result G, G is in `.grad`,
        the same on all ranks. New gradients will be added to it, and the whole will be multiplied
        by 1/factor and summed over W ranks: so G becomes W / factor times G. Divide it by that
        first: then it can be summed like what no_sync() has left."""
        growth = self.group.size() / self.gradient_divide_factor  # 1 unless told otherwise
        if self._may_step and self.require_backward_grad_sync:
            self._may_step = False
        kept = []
        for bucket in self.buckets:
            if growth != 1 and bucket.has_sums and bucket.has_any_gradient():
                kept.append(bucket)
                bucket.has_sums = False
        try:
            super()._begin_backward()
        except RuntimeError:  # nothing was divided
            for bucket in kept:
                bucket.has_sums = True
            raise
        for bucket in kept:
            sums = [p.grad for p in bucket.parameters if p.grad is not None]
            torch._foreach_div_(sums, growth)

    @contextlib.contextmanager
    def no_sync(self, may_step: bool = False) -> Iterator[None]:
        """Backwards in this context only accumulate. may_step: an optimizer may step, after it,
        with what they leave, though it is this rank's own: where the script itself averages it. Of
        two contexts, one in the other, the outer one says so."""
        if self.require_backward_grad_sync:
            self._may_step = may_step
        with super().no_sync():
            yield

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: torch.nn.Module, names: list) -> None:
        """Let a wrapper of module leave these alone, by name: ranks may have their own."""
        module._ddp_params_and_buffers_to_ignore = names

    # ---- comm hooks; extras/comm_hooks.py has some

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """From now on hook(state, bucket) -> Future reduces each bucket, and divides by W.

        bucket has the methods of torch.distributed.GradBucket.
        """
        if not callable(hook):
            raise TypeError(f"DDP: a comm hook must be callable, not {hook!r}")
        if self._comm_hook is not None:
            self._refuse("has a comm hook already")
        self.comm_state, self._comm_hook = state, torch.no_grad()(hook)

    def _launch(self, bucket):
        """By the comm hook, if there is one. It divides by W itself: make up for that."""
        if self._comm_hook is None:
            super()._launch(bucket)
            return
        self._fill(bucket)
        scale = self.group.size() / self.gradient_divide_factor
        if scale != 1:
            bucket.gradients.mul_(scale)
        seen = GradBucket(bucket, self.buckets)
        with self._telling("start", "reduce", bucket):
            bucket.reduction = HookedReduction(seen, self._comm_hook(self.comm_state, seen))
        self._to_add.append(bucket)

    def _add(self, bucket):
        """A future is waited for before the next hook is called: a hook may communicate even while
        its future is waited for."""
        if isinstance(bucket.reduction, HookedReduction):
            bucket.reduction.wait()
            bucket.reduction = None
        super()._add(bucket)

    # ---- torch's Join, which Accelerate enters also where ranks have as many batches, switched off

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True,
             throw_on_early_termination: bool = False) -> Join:
        """Refused, unless enable=False: see `_join_config`."""
        return Join([self], enable, throw_on_early_termination)

    def join_hook(self, **_) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self):
        return self._device

    @property
    def join_process_group(self):
        return self.group

    @property
    def _join_config(self):
        """Join sets this first."""

    @_join_config.setter
    def _join_config(self, config):
        if config.enable:
            self._refuse("all ranks make the same number of steps, so there is no join(): deal the "
                         "same number of batches to all, as by drop_last=True")

    # ---- what Lightning and Accelerate touch of torch's DDP

    static_graph = False
    require_forward_param_sync = True

    @property
    def reducer(self):
        return NoReducer()

    def _get_ddp_logging_data(self):
        return {}


class NoReducer:
    """What Lightning calls of the reducer of torch's DDP. Nothing is to be done here."""

    def _rebuild_buckets(self):
        return False

    def prepare_for_backward(self, outputs):
        pass


class GradBucket:
    """What a comm hook sees of a bucket: a copy of its gradients, without the gaps between them.
    The methods are those of torch.distributed.GradBucket, which Python cannot construct."""

    def __init__(self, bucket, buckets):
        self._parameters, self._layouts = bucket.parameters, []
        self._index, self._n_buckets = buckets.index(bucket), len(buckets)
        self.places = []  # where they come from, each as a vector
        n = 0
        for shape, strides, begin in bucket.layouts:
            self.places.append(bucket.gradients[begin:begin + shape.numel()])
            self._layouts.append((shape, strides, n))
            n += shape.numel()
        self._buffer = torch.cat(self.places)

    def index(self):
        """In the order of launches. As with torch's, that of the first step is another one."""
        return self._index

    def is_last(self):
        return self._index == self._n_buckets - 1

    def parameters(self):
        return self._parameters

    def buffer(self):
        return self._buffer

    def gradients(self):
        return [self._buffer.as_strided(*layout) for layout in self._layouts]

    def set_buffer(self, buffer):
        self._buffer = buffer


class HookedReduction:
    """A reduction by a comm hook, under way."""

    def __init__(self, seen, future):
        self.seen, self.future = seen, future

    def wait(self):
        sizes = [len(place) for place in self.seen.places]
        torch._foreach_copy_(self.seen.places, list(self.future.wait().split(sizes)))


def refuse_no_size(bucket_cap_mb):
    """Raise where it is neither None nor a number of MB. (0: a bucket for each parameter.)"""
    if bucket_cap_mb is not None and not 0 <= bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb is a number of MB, such as 25, and not {bucket_cap_mb}")


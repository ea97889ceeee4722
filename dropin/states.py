# nanoZeRO 2.0.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""State dicts: of an optimizer, whole and by name; and of the shards of a stage."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dropin.ranks import first_names, named_tensors


class OptimizerStates:
    """The state of an optimizer, whole and by name, as one process would have it. Rank 0 can save
    it, and any wrapper on any number of ranks, or a bare module, can load it. It has the form of
    torch's `get_optimizer_state_dict` with full_state_dict=True:

        state         {name: {kind: value}}, such as {"blocks.0.weight": {"exp_avg": ..., ...}}
        param_groups  as the optimizer has them, but their "params" are names

    Names are those of the bare module; a tied parameter has its first.
    """

    @torch.no_grad()
    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict:
        """The whole state, on every rank, its tensors on the CPU. A collective; in a stage one for
        each parameter. It takes the memory of the whole on every rank, which `sharded_state` of
        checkpoint.py does not.

        Parameters go in the module's order: in an optimizer their order may be another one on each
        rank, as where groups were made of sets, and some may lack empty shards. Groups of a stage
        are as rank 0 has them.

        Raises RuntimeError for a parameter of another wrapper or module, and where a stage cannot
        put the state of a parameter together, as some keep it in lists.
        """
        known = self._known_to_optimizers()
        groups, own = [], {}
        for group in optimizer.param_groups:
            names = []
            for p in group["params"]:
                name, _ = self._known(p, known)
                names.append(name)
                own[name] = copied(optimizer.state.get(p, {}))
            groups.append(group_of(group, names, names))
        if self.shard_group is not None:
            groups = self._groups_of_all_ranks(groups)
        in_any = set()
        for group in groups:
            in_any.update(group["params"])
            of_group = set(group["params"])
            names = [name for name, _ in known.values() if name in of_group]
            group.update(group_of(group, names, names))
        state = {}
        for name, place in known.values():
            if name in in_any:
                whole = own.get(name, {})
                if place is not None:
                    whole = self._join_state(name, *place, whole)
                if whole:
                    state[name] = whole
        return {"state": state, "param_groups": groups}

    def _groups_of_all_ranks(self, own):
        """Groups of names, as rank 0 has them, with the names that other ranks have there. Groups
        of two ranks belong together if they share a name. If none does, as where one rank lacks
        what is empty there, those do that have the same settings. A collective."""
        groups_of = [None] * self.shard_group.size()
        dist.all_gather_object(groups_of, own, group=self.shard_group)
        merged = groups_of[0]
        for groups in groups_of[1:]:
            for n, group in enumerate(groups):
                add_group(group, merged, n)
        return merged

    @torch.no_grad()
    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer,
                                       state_dict: dict) -> None:
        """Load a whole state: each rank takes its part; and what groups say, such as rates. The
        order of groups, and of parameters in them, does not matter. Raises RuntimeError where
        groups have other parameters, or the state of a parameter that is cut has another shape,
        before anything is changed."""
        known = self._known_to_optimizers()
        of_groups = []
        for group in optimizer.param_groups:
            of_groups.append([self._known(p, known) for p in group["params"]])
        lacking = {name for p, (name, _) in known.items() if p.nbytes == 0}
        for of_group in of_groups:
            lacking -= {name for name, _ in of_group}
        given = self._given_groups(of_groups, optimizer, state_dict["param_groups"], lacking)
        state = {}  # by number, as optimizers save it
        groups = []
        n = 0
        for of_group, group in zip(of_groups, given):
            numbers = list(range(n, n + len(of_group)))
            n += len(of_group)
            groups.append(group_of(group, numbers, [name for name, _ in of_group]))
            for number, (name, place) in zip(numbers, of_group):
                if name in state_dict["state"]:
                    part = copied(state_dict["state"][name])
                    if place is not None:
                        part = self._part_of_state(name, *place, part)
                    state[number] = part
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _known_to_optimizers(self):
        """{what an optimizer has of a parameter: (its name, `_place_of` it; or None if there is no
        shard of it)}."""
        known = {}
        for p, name in first_names(named_tensors(self.module, "parameters")).items():
            if self.shard_group is None or p not in self._names:
                known[p] = name, None
            else:
                bucket, i = self._place_of(p)
                known[bucket.shards[i]] = name, (bucket, i)
        return known

    def _known(self, p, known):
        if p not in known:
            self._refuse("the optimizer has a parameter that is not this wrapper's: make it of "
                         "model.parameters(), after the model was wrapped")
        return known[p]

    def _given_groups(self, of_groups, optimizer, given_groups, lacking):
        """For each group of the optimizer, [(name, place)], the given one of the same names, but
        for those that it lacks, as they are empty here; one without any stays as it is. Raise where
        an optimizer and a whole state have other groups."""
        ours = [frozenset(name for name, _ in of_group) for of_group in of_groups]
        given = {frozenset(group["params"]) - lacking: group for group in given_groups}
        if {names for names in ours if names} != {names for names in given if names}:
            others = set().union(*ours) ^ set().union(*given)
            self._refuse(f"nothing was loaded: the optimizer has {len(ours)} groups of parameters, "
                         f"and what is given {len(given_groups)}; of other names or in other "
                         f"groups are {sorted(others) or 'some'}")
        return [given.get(names, group) for names, group in zip(ours, optimizer.param_groups)]

    def _join_state(self, name, bucket, i, own):
        """This rank's {kind: value} of a parameter -> that of the whole."""
        whole_shape, strides, _ = bucket.layouts[i]
        shape, _, _ = bucket.shard_layouts[i]
        parts = [None] * self.shard_group.size()
        dist.all_gather_object(parts, (tuple(shape), own), group=self.shard_group)
        holders = [(shape, state) for shape, state in parts if math.prod(shape) > 0]
        if not holders:  # the parameter has no elements
            holders = parts[:1]
        shape, whole = holders[0]
        for _, state in holders:
            if state.keys() != whole.keys():
                self._refuse(f"ranks keep other state of {name}: {list(whole)} and {list(state)}")
        if shape == tuple(whole_shape):  # one rank has all of it
            return whole
        for kind, value in whole.items():
            if is_by_element(kind, value, shape):
                elements = [state[kind].reshape(-1) for _, state in holders]
                whole[kind] = torch.cat(elements).as_strided(whole_shape, strides)
            elif has_many_elements(value):
                self._refuse(f"{kind} of {name} in the optimizer's state is of a part, and cannot "
                             f"be put together: use DDP, or save by sharded_state()")
        return whole

    def _part_of_state(self, name, bucket, i, whole):
        """The reverse of `_join_state`: on every rank what it has of the whole."""
        whole_shape, strides, _ = bucket.layouts[i]
        shape, _, _ = bucket.shard_layouts[i]
        if bucket.owners is not None:  # uncut
            return {} if bucket.is_elsewhere(i) else whole
        n = math.prod(shape)
        first = bucket.firsts[i]
        for kind, value in whole.items():
            if is_by_element(kind, value, whole_shape):
                packed = torch.empty_strided(whole_shape, strides, dtype=value.dtype)
                elements = packed.copy_(value).as_strided((packed.numel(),), (1,))
                whole[kind] = elements[first:first + n].clone().view(shape)
            elif has_many_elements(value):
                self._refuse(f"nothing was loaded: {kind} of {name} does not have the shape "
                             f"{tuple(whole_shape)} of the parameter")
        return whole

    def _place_of(self, p):
        """(the bucket of a parameter of the module, its number there)."""
        name = self._names[p]
        bucket = self._bucket_of[name]
        return bucket, bucket.names.index(name)


def copied(state):
    """A copy on the CPU, which stays as it is while training goes on."""
    return tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)


def add_group(group, groups, n):
    """Its names to the one of groups that it belongs to, the n-th first; or itself."""
    names = set(group["params"])
    for other in groups:
        if not names.isdisjoint(other["params"]):
            other["params"] += names.difference(other["params"])
            return
    for other in groups[n:n + 1] + groups:
        if settings_of(other) == settings_of(group):
            other["params"] += names
            return
    groups.append(group)


def settings_of(group):
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def group_of(group, parameters, names):
    """A copy of an optimizer's group, with these parameters, in whatever way they are given."""
    copy_of_group = copied({key: value for key, value in group.items() if key != "params"})
    if "param_names" in copy_of_group:  # of optimizers that were made of named_parameters()
        copy_of_group["param_names"] = names
    return {**copy_of_group, "params": parameters}


def is_by_element(kind, value, shape):
    """Whether value, in an optimizer's state, has a number for each element of a parameter of this
    shape. "step" is a count in torch's optimizers, also for a parameter of no dimensions."""
    return kind != "step" and isinstance(value, Tensor) and value.shape == shape


def has_many_elements(value):
    """Whether a tensor is in it that is more than a number."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return any(t.numel() > 1 for t in tensors)


class StateDicts:
    """The module's state, whole, and this rank's part of it."""

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True):
        """(its name now, this rank's shard) of every parameter of the module, in its order."""
        shard_of = {}
        for bucket in self._all_buckets:
            shard_of.update(zip(bucket.parameters, bucket.shards))
        seen = set()
        for name, p in self._named("parameters"):
            is_wanted = recurse or "." not in name  # a dot: of a submodule
            # One that was added after wrapping is left out here, and refused by the next forward.
            if p in shard_of and is_wanted:
                if p not in seen or not remove_duplicate:
                    yield f"{prefix}.{name}" if prefix else name, shard_of[p]
                seen.add(p)

    def __getstate__(self):
        self._refuse("has one rank's shards, and is not copied or pickled: copy the module before "
                     "wrapping it, and save full_state_dict()")

    def _names_now(self):
        """{a parameter's name when it was wrapped: its name now}: a script may rename them."""
        names = first_names(self._named("parameters"))
        return {self._names[p]: name for p, name in names.items() if p in self._names}

    def shard_starts(self) -> dict[str, int]:
        now = self._names_now()
        return {now[name]: start for name, start in super().shard_starts().items()}

    def full_parameters(self):
        now = self._names_now()
        for name, whole in super().full_parameters():
            yield now[name], whole

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """{name: whole tensor}, on every rank, as the module's state_dict(). A collective.

        Costs the memory of the whole model on every rank; `full_parameters` does not.
        """
        whole = dict(self.full_parameters())
        now = self._names_now()
        state = {}
        for name, value, p in self._module_state():
            # A tied one has several names in the state, and one there.
            state[name] = copy_of(value) if p is None else whole[now[self._names[p]]]
        return state

    def _module_state(self):
        """[(name, value, the parameter that it is, or None)] of the module's state, by torch's own
        `state_dict`: the module may have another one. A value that is no parameter is a buffer, or,
        of any type, what `get_extra_state()` returns or a hook adds."""
        state = []
        for name, value in nn.Module.state_dict(self.module, keep_vars=True).items():
            is_parameter = isinstance(value, nn.Parameter) and value in self._names
            state.append((name, value, value if is_parameter else None))
        return state

    def state_dict(self, *, destination: dict | None = None, prefix: str = "",
                   keep_vars: bool = False) -> dict[str, Tensor]:
        """This rank's shards and the buffers under the module's own names. Not a collective."""
        destination = {} if destination is None else destination
        for name, value, p in self._module_state():
            if p is not None:
                bucket, i = self._place_of(p)
                value = bucket.shards[i]
            # Copied, since torch.save would write all of the buffer that a view is of.
            destination[prefix + name] = value if keep_vars else copy_of(value)
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True,
                        assign: bool = False):
        """Copy in what `state_dict()` gave at this world size -> the names that are missing, and
        those that are left over, as torch's. Raises RuntimeError on a misfit, as of names if
        strict, and for assign=True."""
        if assign:
            self._refuse("load_state_dict() copies into the shards, which the optimizer has: leave "
                         "assign=True out")
        return self._load(state_dict, self.state_dict(keep_vars=True), strict, is_whole=False)

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True):
        """Write whole parameters and buffers: each rank copies its part. Returns and raises as
        `load_state_dict`, naming what does not fit, before anything is written."""
        ours = {name: value for name, value, _ in self._module_state()}
        return self._load(state_dict, ours, strict, is_whole=True)

    def _load(self, given, ours, strict, is_whole):
        """Load a state dict. ours: what there is, of the shapes that it must have. What is neither
        a parameter nor a buffer, such as extra state, the module itself has to load."""
        self._refuse_misfit(given, ours, strict)
        buffers = {t for _, t in named_tensors(self.module, "buffers")}
        rest = {}
        for name, value, p in self._module_state():
            if name not in given:
                continue
            if p is not None:
                bucket, i = self._place_of(p)
                part = bucket.part_of(i, given[name]) if is_whole else given[name]
                bucket.shards[i].copy_(part)
            elif isinstance(value, Tensor) and value in buffers:
                value.copy_(given[name])
            else:
                rest[name] = given[name]
        if rest:
            nn.Module.load_state_dict(self.module, rest, strict=False)
        self._invalidate_all()
        missing = [name for name in ours if name not in given]
        left_over = [name for name in given if name not in ours]
        return nn.modules.module._IncompatibleKeys(missing, left_over)

    def _invalidate_all(self):
        for bucket in self._all_buckets:
            self._invalidate(bucket)

    def _refuse_misfit(self, given, ours, strict):
        """Raise where two state dicts have other names, if strict; or parameters or buffers other
        shapes."""
        buffers = {t for _, t in named_tensors(self.module, "buffers")}
        with_shape = set(self._names) | set(self.parameters()) | buffers
        wrong = sorted(ours.keys() ^ given.keys()) if strict else []
        with torch._C.DisableTorchFunctionSubclass():  # guards' class would warn of a shard's
            for name in ours.keys() & given.keys():
                value, shape = ours[name], getattr(given[name], "shape", None)
                has_shape = isinstance(value, Tensor) and value in with_shape
                if has_shape and value.shape != shape:
                    wrong.append(f"{name}: {shape}, not {value.shape}")
        if wrong:
            self._refuse(f"nothing was loaded; missing, left over or of another shape: {wrong}")


def copy_of(value):
    """A copy of a tensor; anything else itself."""
    return value.detach().clone() if isinstance(value, Tensor) else value

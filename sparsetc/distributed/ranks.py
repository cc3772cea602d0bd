"""The communicating processes: the ranks of a DeviceMesh of one dimension, and how they agree.

In: a mesh, or none. Out: `Ranks`: sums and exchanges of tensors of any dtype, each an error of one kind where it fails.
One rank alone says nothing to anybody.

Ranks compare arguments before they send, and report failures after each local step (`agreed`): one error on every rank
names the ranks that differ or failed. Without this the others would wait for a rank that is gone until the group's
timeout.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparsetc.contraction.tuned import leader
from sparsetc.errors import DeviceError, DistributedError, PlanError
from sparsetc.options import current, of_call
from sparsetc.support.entry import lacks_memory

SHORT = 1 << 12
"""Bytes of what ranks say to each other in one exchange; of more they first say how much: twice the time."""


class Ranks:
    """The ranks of a mesh, numbered from 0; one rank without a process group is alone.

    Every method but `check`, `mesh` and the properties is collective: all ranks call it, in one order.

    Attributes:
        size: how many there are.
        rank: the number of this one.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """The ranks of a mesh; without one all processes, or this one where torch.distributed was not initialised.

        Raises:
            DistributedError: it is no mesh of one dimension, or this process is not in it.
        """
        if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim != 1):
            raise DistributedError(
                "mesh must be a DeviceMesh of one dimension, as init_device_mesh('cuda', (8,)), or mesh['name'] of one "
                f"that has more; found {mesh!r:.80}"
            )
        if mesh is not None and mesh.get_coordinate() is None:
            raise DistributedError("this process does not belong to the mesh; only the mesh's ranks may call")
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self.group = world if mesh is None else mesh.get_group()
        self.size, self.rank = 1, 0
        if self.group is not None:
            self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self._meshes = {} if mesh is None else {mesh.device_type: mesh}

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size}, {self.backend})"

    @property
    def backend(self) -> str:
        """The name of the group's backend, or ``alone``."""
        return "alone" if self.group is None else str(dist.get_backend_config(self.group))

    @property
    def device(self) -> torch.device:
        """The device of tensors to send: this process's GPU if the group's backend needs it (NCCL), else the CPU."""
        if self.group is None or not torch.cuda.is_available() or "nccl" not in self.backend:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def check(self, device: torch.device) -> None:
        """DeviceError unless the group can send tensors of a device."""
        kinds = None if self.group is None else [str(d.type) for d in self.group._device_types]
        if kinds is not None and device.type not in kinds:
            raise DeviceError(
                f"the group's backend, {self.backend}, sends no tensors on {device}; move x with .to(), or initialise "
                "torch.distributed with backend='cpu:gloo,cuda:nccl'"
            )

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh for results on a device; not for a rank that is alone."""
        if device.type not in self._meshes:
            assert self.group is not None
            self._meshes[device.type] = DeviceMesh.from_group(self.group, device.type)
        return self._meshes[device.type]

    # -- tensors --------------------------------------------------------------------------------------------------

    def sum_(self, x: Tensor) -> Tensor:
        """The tensor, its elements summed over ranks; in place if it is contiguous, as of the next two."""
        return self._in_place(dist.all_reduce, x, "a sum over ranks failed")

    def most(self, x: Tensor) -> Tensor:
        """The largest of each element over ranks."""
        return self._in_place(dist.all_reduce, x, "a comparison of ranks failed", op=dist.ReduceOp.MAX)

    def first(self, x: Tensor) -> Tensor:
        """Return what rank 0 has."""
        return self._in_place(dist.broadcast, x, "rank 0 could not be asked", group_src=0)

    def _in_place(self, collective: Callable[..., Any], x: Tensor, what: str, **settings: Any) -> Tensor:
        x = x.contiguous()
        if self.size > 1:
            with self._naming(what):
                collective(x, group=self.group, **settings)
        return x

    def exchanged(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send rows to other ranks. Return the rows for this rank, in order of who had them.

        Args:
            x: rows, in order of the rank that they are for.
            received: how many rows come from each rank.
            sent: how many are for each.
        """
        if self.size == 1:
            return x.clone()
        out = x.new_empty((sum(received), *x.shape[1:]))
        width = prod(x.shape[1:]) * x.element_size()
        splits = [n * width for n in received], [n * width for n in sent]
        with self._naming("rows could not be sent"):
            dist.all_to_all_single(_bytes(out), _bytes(x), *splits, group=self.group)
        return out

    def gathered(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, of which each has as many as `counts` says."""
        return self.exchanged(torch.cat([x] * self.size), counts, [x.shape[0]] * self.size)

    def objects(self, mine: Any) -> list[Any]:
        """Gather an object of each rank on all ranks; it is pickled, and waits for the GPU."""
        if self.size == 1:
            return [mine]
        data, gathered = pickle.dumps(mine), [None] * self.size
        device = torch.device("cpu") if "gloo" in self.backend else self.device
        short = bytes([len(data) < SHORT]) + data[: SHORT - 1].ljust(SHORT - 1)  # pickles end by themselves
        sent = torch.frombuffer(bytearray(short), dtype=torch.uint8).to(device)
        all_sent = sent.new_empty(self.size, SHORT)
        with self._naming("ranks could not be asked"):
            dist.all_gather([*all_sent], sent, group=self.group)
            each = [one.numpy().tobytes() for one in all_sent.cpu()]
            if all(one[0] for one in each):
                return [pickle.loads(one[1:]) for one in each]
            dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn errors of torch.distributed into a `DistributedError` with the likely causes."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, DistributedError) or lacks_memory(error):
                raise
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DistributedError(
                f"rank {self.rank} of {self.size}: {what}: another rank has failed, died, or did not come within the "
                f"group's timeout; look at its own error ({said:.300})"
            ) from error


def _bytes(x: Tensor) -> Tensor:
    """Bytes of a tensor, of which any dtype can be sent; in its own memory if it is contiguous.

    A tensor of one element is contiguous whatever its strides are, and torch views none but stride 1 as bytes.
    """
    x = x.contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


T = TypeVar("T")


def agreed(
    ranks: Ranks,
    what: str,
    function: Callable[[], T],
    arguments: Mapping[str, Any] | None = None,
    same: Callable[[T], Mapping[str, Any]] | None = None,
) -> T:
    """Run a function on every rank that sends nothing itself.

    Args:
        ranks: those that run it.
        what: of which call it is a part, for messages.
        function: gives this rank's result.
        arguments: arguments by name that must be the same on every rank, by what they print as.
        same: gives likewise, where there are several ranks, what must be the same of the result.

    Raises:
        DistributedError: arguments differ, or some ranks failed.
        Exception: a rank's own error where every rank failed.
    """
    if ranks.size == 1:
        return function()
    error: Exception | None = None
    result: Any = None
    checked: dict[str, str] = {}
    try:
        result = function()
        checked = {} if same is None else _printed(same(result))
    except Exception as raised:
        error = raised
    failure = None if error is None else f"{type(error).__name__}: {error}"
    answers = ranks.objects((_printed(arguments or {}), failure, checked))
    _check_same(what, [one for one, *_ in answers])
    failed = {rank: text for rank, (_, text, _) in enumerate(answers) if text is not None}
    if error is not None and len(failed) == ranks.size:
        raise error
    if failed:
        raise DistributedError(f"{what}: {_listed(failed, ranks.size)}") from error
    _check_same(what, [one for *_, one in answers])
    return result  # type: ignore[no-any-return]


def on_all(ranks: Ranks, what: str, make: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """Run `make` with the settings on every rank and return its result; collective.

    A plan that divides a tensor by the length of its rows, for one, is refused where a share has rows of one length.
    Where others take it, the rank's is chosen by cost. Plans that are chosen by time are those of rank 0's share.

    Raises:
        PlanError: no rank's share fits the plan.
        DistributedError: a rank failed otherwise.
    """

    def tried() -> T | PlanError:
        try:
            return make(**settings)
        except PlanError as error:
            return error

    result = _led(ranks, what, tried) if of_call(dict(settings)).timed else agreed(ranks, what, tried)
    fits = ranks.objects(not isinstance(result, PlanError))
    if isinstance(result, PlanError) and not any(fits):
        raise result
    if all(fits):
        return result  # type: ignore[return-value]
    other = {**settings, "plan": "auto"}
    return agreed(ranks, what, lambda: make(**other) if isinstance(result, PlanError) else result)


def _led(ranks: Ranks, what: str, make: Callable[[], T]) -> T:
    """Run `make` on every rank with the plans that rank 0 finds fastest."""
    leads = ranks.rank == 0
    plans: dict[str, Any] = {}
    token = leader.set((leads, plans))
    try:
        first = agreed(ranks, what, lambda: make() if leads else None)
        plans |= ranks.objects(plans)[0]
        followed = agreed(ranks, what, lambda: None if leads else make())
    finally:
        leader.reset(token)
    return first if leads else followed  # type: ignore[return-value]


def alike(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, and the options in force, that must be equal on every rank.

    Where source is kept may differ, and how much memory there is, by the options in force.
    """
    options = current()
    printed = {name: getattr(options, name) for name in ("plan", "path", "deterministic", "backend", "tune")}
    printed["precision"] = options.effective_precision()
    return {"settings": printed | {name: value for name, value in settings.items() if name != "cache_dir"}}


def _printed(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in arguments.items()}


def _check_same(what: str, said: Sequence[Mapping[str, str]]) -> None:
    for name in dict.fromkeys(name for one in said for name in one):
        values = [one.get(name, "nothing") for one in said]
        by_value = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
        if len(by_value) > 1:
            listed = "; ".join(f"{_named(group)} {value:.200}" for value, group in list(by_value.items())[:4])
            raise DistributedError(f"{what}: ranks were given different arguments; {name}: {listed}")


def _listed(failed: Mapping[int, str], size: int) -> str:
    first = "; ".join(f"rank {rank} of {size} failed: {text:.1000}" for rank, text in list(failed.items())[:3])
    return first if len(failed) <= 3 else f"{first}; and {len(failed) - 3} more"


def _named(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {few}:"

"""The processes that work together, and all that they say to each other: torch.distributed behind one small class.

In: a process group, or none. Out: `Ranks`: sums, gatherings and exchanges of tensors of any dtype, each an error of one
kind where it fails. One rank, or no group at all, says nothing to anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from sparsetc.errors import DeviceError, DistributedError
from sparsetc.support.entry import lacks_memory

SUMMED_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
}
"""What narrow dtypes are summed in over ranks: sums of many ranks' sums, rounded once."""

_parts: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], ...], Ranks]] = WeakKeyDictionary()
"""Groups that were made of a group, by how its ranks were divided."""


class Ranks:
    """The ranks of a process group, numbered from 0 within it; one rank without a group is alone.

    Every method but the properties is collective: all ranks call it, in one order.

    Attributes:
        size: how many there are.
        rank: the number of this one.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise DistributedError("this process is none of the group's; only the group's ranks may call")

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """The ranks of a group: the default one if None; alone where torch.distributed was not initialised."""
        if not dist.is_available() or not dist.is_initialized():
            if group is not None:
                raise DistributedError("group= was given, but torch.distributed was not initialised")
            return cls()
        return cls(dist.group.WORLD if group is None else group)

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size}, {self.backend})"

    @property
    def backend(self) -> str:
        """The name of the group's backend, ``alone`` where there is none."""
        return "alone" if self.group is None else str(dist.get_backend_config(self.group))

    @property
    def device(self) -> torch.device:
        """Where ranks hold what they send: this process's GPU if the group has a backend for it, as NCCL."""
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

    @property
    def divisible(self) -> bool:
        """Whether groups can be made of some of the ranks, in which torch.distributed wants all processes to help."""
        return self.group is None or self.size == dist.get_world_size()

    def divided(self, parts: Sequence[Sequence[int]]) -> Ranks:
        """The part that this rank is in; parts of several ranks get a group each, made once and kept.

        Args:
            parts: the ranks of each, ascending; together all of them. If not `divisible`, they are one, or single
                ranks.
        """
        own = next(part for part in parts if self.rank in part)
        if len(own) == self.size:
            return self
        if self.group is None or max(map(len, parts)) == 1:
            return Ranks()
        assert self.divisible
        kept = _parts.setdefault(self.group, {})
        key = tuple(tuple(part) for part in parts)
        if key not in kept:
            made = [self._group_of(part) for part in parts]
            kept[key] = Ranks(made[parts.index(own)])
        return kept[key]

    def _group_of(self, part: Sequence[int]) -> Any:
        """A group of some ranks: the same backend, and as patient as this one."""
        named = dist.get_process_group_ranks(self.group)
        with self._naming("a group of some ranks could not be made"):
            return dist.new_group([named[r] for r in part], timeout=_timeout(self.group), backend=self.backend)

    # -- tensors --------------------------------------------------------------------------------------------------

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor, contiguous, its elements summed over ranks in place."""
        if self.size > 1:
            with self._naming("a sum over ranks failed"):
                dist.all_reduce(_real(x), group=self.group)
        return x

    def most(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of each element over ranks, in place."""
        if self.size > 1:
            with self._naming("a comparison of ranks failed"):
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has, in place."""
        if self.size > 1:
            with self._naming("rank 0 could not be asked"):
                dist.broadcast(_real(x), group=self.group, group_src=0)
        return x

    def scattered_sum(self, x: torch.Tensor) -> torch.Tensor:
        """(n / ranks, ...): this rank's share of the rows of (n, ...) tensors summed over ranks."""
        if self.size == 1:
            return x
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        if not out.numel():
            return out
        with self._naming("a sum over ranks failed"):
            _reduce_scatter(_real(out), _real(x.contiguous()), group=self.group)
        return out

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """(ranks * n, ...): (n, ...) tensors, one of a shape on each rank, one after the other."""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self.gather_into(out, x)()
        return out

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> Any:
        """Begin to gather into (ranks * n, ...); what is returned, when called, has the stream wait for the end."""
        if self.size == 1:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            return _nothing
        if not out.numel():
            return _nothing
        x = x.contiguous()
        with self._naming("rows could not be gathered"):
            work = _all_gather(_bytes(out), _bytes(x), group=self.group, async_op=True)

        def wait() -> None:
            with self._naming("rows could not be gathered"):
                work.wait()

        return wait

    def gathered_unequal(self, x: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """(n, ...) tensors of all ranks, of which n differs, and is known."""
        if self.size == 1:
            return [x]
        most = max(counts)
        padded = x.new_zeros((most, *x.shape[1:]))
        padded[: x.shape[0]] = x
        found = self.gathered(padded)
        return [found[r * most : r * most + n] for r, n in enumerate(counts)]

    def exchanged(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows of (n, ...) in order of the rank that they are for; those for this one, in order of who had them.

        Args:
            x: contiguous.
            sent: how many rows are for each rank.
            received: how many come from each.
        """
        if self.size == 1:
            return x
        out, width = x.new_empty((sum(received), *x.shape[1:])), prod(x.shape[1:]) * x.element_size()
        splits = [n * width for n in received], [n * width for n in sent]
        with self._naming("nonzeros could not be exchanged"):
            dist.all_to_all_single(_bytes(out), _bytes(x), *splits, group=self.group)
        return out

    def objects(self, mine: Any) -> list[Any]:
        """What each rank gives, on all of them; it is pickled, and waits for the GPU."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        with self._naming("ranks could not be asked"):
            dist.all_gather_object(found, mine, group=self.group)
        return found

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """An error of torch.distributed is one of ours that says what may have happened."""
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


def _nothing() -> None:
    """What there is to wait for where nothing was sent."""


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, the same memory: what is only sent may be of any dtype."""
    return x.reshape(-1).view(torch.uint8)


def _timeout(group: Any) -> Any:
    """A group's timeout, which torch has no public name for; None, torch's own, where it cannot be found."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None


# torch 2.13 gave them new names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

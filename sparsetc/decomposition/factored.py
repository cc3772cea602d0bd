"""What models of a matrix a mode have in common, whatever stands before the matrices: weights, or a core.

In: a dataclass with factors. Out: its sizes, dtype and device, what its run says, how it is moved, and files of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch

from sparsetc.decomposition import saved
from sparsetc.errors import DeviceError, DtypeError

Own = TypeVar("Own", bound="Factored")


class Factored:
    """A model of a head, a tensor that its subclass names, and a factor matrix (size, rank) a mode."""

    KIND: ClassVar[str]
    """What such a model is called."""
    HEAD: ClassVar[str]
    """Name of the field before the factors."""
    NUMBERS: ClassVar[tuple[str, ...]]
    """Names of the fields with a number for each iteration."""
    factors: tuple[torch.Tensor, ...]
    fits: tuple[float, ...]
    stopped: str

    @property
    def _head(self) -> torch.Tensor:
        """The weights, or the core."""
        found: torch.Tensor = getattr(self, self.HEAD)
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter((self._head, list(self.factors)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the modes of the tensor that it stands for."""
        return tuple(f.shape[0] for f in self.factors)

    @property
    def order(self) -> int:
        """The number of modes."""
        return len(self.factors)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all its tensors."""
        return self._head.dtype

    @property
    def device(self) -> torch.device:
        """Where all its tensors live."""
        return self._head.device

    @property
    def fit(self) -> float | None:
        """The last of `fits`; None of a model that no run made."""
        return self.fits[-1] if self.fits else None

    def to(self: Own, *args: Any, **kwargs: Any) -> Own:
        """The model elsewhere, arguments as of `torch.Tensor.to`."""
        moved = tuple(f.to(*args, **kwargs) for f in self.factors)
        return replace(self, **{self.HEAD: self._head.to(*args, **kwargs)}, factors=moved)  # type: ignore[type-var]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it to an .npz file of this name, whole or not at all; an old file stays until it is complete.

        Raises:
            DtypeError: of a model that is not of float32 or float64; an old file stays.
        """
        arrays = {self.HEAD: self._head} | {f"factor_{m}": f for m, f in enumerate(self.factors)}
        numbers = {name: getattr(self, name) for name in self.NUMBERS}
        saved.write(path, self.KIND, arrays, numbers, self.stopped)

    @classmethod
    def load(cls: type[Own], path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Own:
        """The model in a file that `save` wrote.

        Raises:
            IOFormatError: the file holds no model of this kind.
            OutOfMemoryError: it would pass the memory limit.
            FileNotFoundError: no such file.
        """
        held = saved.read(path, cls.KIND, cls.HEAD, cls.NUMBERS, device)
        fields: dict[str, Any] = {cls.HEAD: held.first, "factors": held.factors, "stopped": held.stopped}
        with saved.naming(path):
            return cls(**fields, **held.numbers)

    def _run(self) -> str:
        """What a repr says of the run that made it; empty where there was none."""
        fit = "" if self.fit is None else f", fit={self.fit:.4f} after {len(self.fits)} iterations"
        return f"{fit}, stopped={self.stopped!r}" if self.stopped else fit


def check_alike(factor: torch.Tensor, mode: int, head: torch.Tensor, name: str, has: str, lies: str) -> None:
    """Raise `DtypeError` or `DeviceError` unless a factor has the head's dtype, a real one, and its device.

    Args:
        factor: of a mode.
        mode: its number.
        head: weights, or a core.
        name: of the kind of model.
        has: subject and verb of what the head has, ``"the core has"``.
        lies: subject and verb of where it is, ``"the core is"``.
    """
    if factor.dtype != head.dtype:
        raise DtypeError(f"the factor of mode {mode} has dtype {factor.dtype}, {has} {head.dtype}")
    if not head.dtype.is_floating_point:
        raise DtypeError(f"a {name} model is of real floating-point numbers, found {head.dtype}")
    if factor.device != head.device:
        raise DeviceError(f"the factor of mode {mode} is on {factor.device}, {lies} on {head.device}")

"""A case: everything that one random einsum is made of, as plain data that can be drawn, shrunk, built and printed.

Tensors are not part of a case. Values are named by a kind and a seed, coordinates are tuples, so that a case is equal
to itself after pickling, and every part of it can be replaced by a simpler one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

NAMES = ("xyzuvw", "abcdefg")
"""Variables that stand for sparse and for dense operands."""
SPLIT = "split"
"""A plan of two parts, made of those of two kernels."""


@dataclass(frozen=True)
class DrawnValues:
    """Numbers of an operand: a kind of `sparsetc.testing.build.KINDS`, a seed, and how many are NaN or infinite."""

    kind: str = "uniform"
    seed: int = 0
    specials: int = 0


@dataclass(frozen=True)
class DrawnOperand:
    """One operand: its letters and shape, its values, how they lie in memory, and where a sparse one is not zero.

    Attributes:
        nonzeros: coordinates, a tuple for each nonzero, duplicates allowed; None for a dense operand.
        dense_modes: trailing modes of a sparse operand that its values hold whole.
        dtype: where it is not the case's: under autocast operands may have different ones.
        same_as: the place of an earlier operand that is the same object.
    """

    letters: str
    shape: tuple[int, ...]
    values: DrawnValues = DrawnValues()
    memory: str = "plain"
    learned: bool = False
    nonzeros: tuple[tuple[int, ...], ...] | None = None
    form: str = "tensor"
    dense_modes: int = 0
    dtype: str = ""
    same_as: int | None = None

    @property
    def sparse(self) -> bool:
        """Whether it is given as a sparse tensor."""
        return self.nonzeros is not None

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the tensor of its values."""
        if self.nonzeros is None:
            return self.shape
        return (len(self.nonzeros), *self.shape[len(self.shape) - self.dense_modes :])


@dataclass(frozen=True)
class PlanCall:
    """A plan by name, or a call of a function of the package that makes one."""

    name: str = "auto"
    arguments: tuple[tuple[str, Any], ...] = ()
    call: bool = False

    def __str__(self) -> str:
        if self.name == SPLIT:
            return "plan"
        if not self.call:
            return repr(self.name)
        return f"stc.{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments)})"


@dataclass(frozen=True)
class Case:
    """An einsum, its operands, its options, and the circumstance in which it is called.

    Attributes:
        memory_limit: bytes, as an option of the call; 0 for none.
        ellipsis: letters that are written as "...".
        second: whether gradients are differentiated once more.
    """

    kind: str
    operands: tuple[DrawnOperand, ...]
    output: str
    dtype: str = "float32"
    plan: PlanCall = PlanCall()
    form: str = "auto"
    precision: str = ""
    deterministic: bool = False
    backend: str = "torch"
    device: str = "cpu"
    memory_limit: int = 0
    notation: str = "plain"
    ellipsis: str = ""
    circumstance: str = "plain"
    second: bool = False
    seed: int = field(default=0, compare=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The operands' dtype."""
        return self.dtype_of(None)

    def dtype_of(self, operand: DrawnOperand | None) -> torch.dtype:
        """The dtype of one operand; the case's, but for those that have their own."""
        found = getattr(torch, self.dtype if operand is None or not operand.dtype else operand.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def promoted(self) -> torch.dtype:
        """The widest of the operands' dtypes."""
        return reduce(torch.promote_types, (self.dtype_of(o) for o in self.operands))

    @property
    def letters(self) -> str:
        """Every letter once, in the order of first use."""
        return "".join(dict.fromkeys("".join(o.letters for o in self.operands)))

    @property
    def sparse_letters(self) -> str:
        """Every letter of a sparse operand once."""
        return "".join(dict.fromkeys("".join(o.letters for o in self.operands if o.sparse)))

    @property
    def sizes(self) -> dict[str, int]:
        """Full size of each letter: that of an operand which does not broadcast it."""
        found: dict[str, int] = {}
        for o in self.operands:
            for letter, size in zip(o.letters, o.shape, strict=True):
                if found.get(letter, 1) == 1:
                    found[letter] = size
        return found

    @property
    def several(self) -> bool:
        """Whether two or more operands are sparse."""
        return sum(o.sparse for o in self.operands) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """The variable of each operand."""
        sparse, dense = (iter(names) for names in NAMES)
        return tuple(next(sparse) if o.sparse else next(dense) for o in self.operands)

    @property
    def equation(self) -> str:
        """The equation with every letter and an explicit output."""
        return ",".join(o.letters for o in self.operands) + "->" + self.output

"""Arithmetic of sparse tensors: operators, maps of entries, comparisons; and where the entries of two patterns meet.

In: a SparseTensor, and a number, a dense tensor or another SparseTensor. Out: a SparseTensor, differentiable with
respect to all values. Where entries of two patterns meet is found once for both.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from importlib import import_module
from math import prod
from numbers import Number
from string import ascii_letters
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch

from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import inside_only
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.pattern import Pattern

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparsetc.tensor.sparse_tensor import SparseTensor

Entries = torch.Tensor
"""(n,) int64: which of an operand's entries, or of a result's."""


class Arithmetic:
    """What operators do to a `SparseTensor`.

    A result has the pattern of the operand, or of a product of two the entries that both have, and of a sum or a
    difference those that either has. What would make absent entries differ from 0 is refused.
    """

    __slots__ = ()
    _einsum_of: ClassVar[Callable[..., Any]]
    """`sparsetc.einsum`, which stands levels above and is put here by its module."""

    if TYPE_CHECKING:
        _pattern: Pattern
        _values: torch.Tensor

        @classmethod
        def _make(cls, pattern: Pattern, values: torch.Tensor) -> SparseTensor: ...
        def coalesce(self) -> Self: ...

    # -- of entries alone -----------------------------------------------------------------------------------------

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> SparseTensor:
        """The tensor with a function applied to the values of its entries; absent ones stay absent.

        Args:
            function: takes and gives values of one shape. Duplicates are summed first.

        Raises:
            ShapeError: the function gives another shape.

        Example:
            ``x.map(torch.exp)`` is exp of each entry, and nothing where there is none.
        """
        x = self.coalesce()
        blocks, values = x._pattern._blocks, x._values
        masks = x._pattern._once("inside", lambda: blocks.masks(x._pattern.coords)) if blocks and blocks.ragged else ()
        found = function(inside_only(values, masks, 1))  # past the end nothing is infinite, nor a gradient
        if not isinstance(found, torch.Tensor) or found.shape != values.shape:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ShapeError(f"a function of {tuple(values.shape)} values gave {what}")
        return self._make(x._pattern, inside_only(found, masks))

    def __neg__(self) -> SparseTensor:
        return self.map(torch.neg)

    def __pos__(self) -> Self:
        return self

    def __abs__(self) -> SparseTensor:
        return self.map(torch.abs)

    def abs(self) -> SparseTensor:
        """Magnitudes of the entries."""
        return self.map(torch.abs)

    def sign(self) -> SparseTensor:
        """The sign of each entry: -1, 0 or 1, or of unit magnitude where it is complex."""
        return self.map(torch.sgn)

    def sqrt(self) -> SparseTensor:
        """The square root of each entry."""
        return self.map(torch.sqrt)

    def clip(self, min: float | None = None, max: float | None = None) -> SparseTensor:
        """Entries not below ``min`` nor above ``max``, of which one is given and between which 0 must lie.

        Raises:
            DtypeError: bounds that would change absent entries, or complex values, which have no order.
        """
        _ordered(self)
        if (min, max) == (None, None) or not ((min is None or min <= 0) and (max is None or max >= 0)):
            raise DtypeError(f"clip to {min} .. {max} would change absent entries, which are 0: map(), or .to_dense()")
        return self.map(lambda values: values.clamp(min, max))

    clamp = clip

    def drop(self, tol: float = 0.0) -> SparseTensor:
        """The entries of a magnitude above ``tol``; without an argument all that are not 0. Looks at the values.

        A row of dense modes, or a block, stays where any of it does.
        """
        x = self.coalesce()
        values = x._values.detach()
        small = values.abs() <= tol if values.is_complex() else (values <= tol) & (values >= -float(tol))  # NaN is not
        return only(x, (~small).reshape(x._pattern.nnz, prod(values.shape[1:])).any(1))

    # -- of two ---------------------------------------------------------------------------------------------------

    def __mul__(self, other: Any) -> SparseTensor:
        return _product(self, other, torch.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> SparseTensor:
        if _is_sparse(other):
            raise DtypeError("sparse / sparse divides 0 by 0 where both have no entry: divide .values of one pattern")
        return _product(self, other, torch.true_divide)

    def __floordiv__(self, other: Any) -> SparseTensor:
        if _is_sparse(other):
            raise DtypeError("sparse // sparse divides 0 by 0 where both have no entry: divide .values of one pattern")
        return _product(self, other, torch.floor_divide)

    def __mod__(self, other: Any) -> SparseTensor:
        if _is_sparse(other):
            raise DtypeError("sparse % sparse divides 0 by 0 where both have no entry: take .values of one pattern")
        return _product(self, other, torch.remainder)

    def __rtruediv__(self, other: Any) -> NoReturn:
        raise DtypeError(f"{type(other).__name__} / sparse divides by absent entries, which are 0: use .to_dense()")

    __rfloordiv__ = __rmod__ = __rtruediv__

    def __rpow__(self, other: Any) -> NoReturn:
        raise DtypeError("a power with a sparse exponent is 1 where no entry is: use .to_dense(), or map()")

    def __pow__(self, exponent: Any) -> SparseTensor:
        number = _number(exponent)
        if not isinstance(number, Number) or isinstance(number, complex) or not number > 0:  # type: ignore[operator]
            raise DtypeError("sparse ** takes one number above 0, since 0 to the power of another is not 0: map()")
        return self.map(lambda values: values**exponent)

    def __add__(self, other: Any) -> SparseTensor:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> SparseTensor:
        return _sum(self, other, -1)

    def __rsub__(self, other: Any) -> SparseTensor:
        return _sum(-self, other, 1)

    def __matmul__(self, other: Any) -> Any:
        return _matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _matmul(other, self)

    def __ne__(self, other: object) -> Any:
        return self._compared(operator.ne, other) if isinstance(_number(other), Number) else not self == other

    def __lt__(self, other: Any) -> SparseTensor:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> SparseTensor:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> SparseTensor:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> SparseTensor:
        return self._compared(operator.ge, other)

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> SparseTensor:
        """A mask of the entries, int8, where absent ones compare false; as 0 does."""
        x, other = self.coalesce(), _number(other)
        if compare is not operator.ne:
            _ordered(self)
        if isinstance(other, Number):
            if compare(0, other):
                raise DtypeError(f"0 compares true with {other!r}, and so would all absent entries: take .values")
            return self._make(x._pattern, compare(x._values, other).to(torch.int8))
        y = other.coalesce() if isinstance(other, Arithmetic) else None
        if y is None or y._pattern is not x._pattern or compare(0, 0):
            raise DtypeError("a comparison takes a number, or a SparseTensor of the same pattern, and < or > of that")
        return self._make(x._pattern, compare(x._values, y._values).to(torch.int8))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operators of torch and some of its functions, with a SparseTensor among the arguments."""
        kwargs = {name: value for name, value in (kwargs or {}).items() if value is not None and value is not False}
        kwargs.pop("_stacklevel", None)
        args = args or (kwargs.pop("input", None),)
        name = getattr(function, "__name__", str(function))
        known = _OPERATORS.get(name)
        if known is None:
            raise DtypeError(f"torch's {name} takes no SparseTensor: call .to_dense(), or compute with .values")
        if refused := kwargs.keys() & {"out", "dtype", "rounding_mode", "inplace"}:
            raise DtypeError(f"torch's {name} of a SparseTensor takes no {min(refused)}=")
        if torch.compiler.is_compiling() and known is _OPERATORS["matmul"] and not _is_sparse(args[0]):
            raise DtypeError("Dynamo exchanges the operands of @ (torch 2.13): a graph breaks here; write an einsum")
        return known(*args, **kwargs)


def _is_sparse(x: Any) -> bool:
    return isinstance(x, Arithmetic)


def _number(x: Any) -> Any:
    """A tensor without modes as a number; anything else as it is."""
    return x.item() if isinstance(x, torch.Tensor) and not x.ndim else x


def _ordered(x: Any) -> None:
    """`DtypeError` for complex values."""
    if x.dtype.is_complex:
        raise DtypeError(f"{x.dtype} has no order: compare magnitudes, .abs()")


def only(x: Any, held: torch.Tensor) -> SparseTensor:
    """The entries of a coalesced tensor for which (nnz,) bools hold."""
    kept = held.nonzero()[:, 0]
    return x._make(x._pattern.like(x._pattern.coords[:, kept], True), x._values.index_select(0, kept))  # type: ignore[no-any-return]


# -- with numbers and dense tensors ------------------------------------------------------------------------------------


def _product(x: Any, other: Any, apply: Callable[[torch.Tensor, Any], torch.Tensor]) -> SparseTensor:
    """A product, or another function that is 0 of 0, of x and whatever the other is."""
    other = as_dense(other, "the other operand")
    if isinstance(other, Number):
        return x.map(lambda values: apply(values, other))  # type: ignore[no-any-return]
    if isinstance(other, torch.Tensor) and other.layout == torch.strided:
        return _with_dense(x, other, apply)
    x, y = _alike(x, other, "*")
    pattern, left, right = _meeting(x._pattern, y._pattern)
    return x._make(pattern, apply(_taken(x, left), _taken(y, right)))  # type: ignore[no-any-return]


def _with_dense(x: Any, other: torch.Tensor, apply: Callable[[torch.Tensor, Any], torch.Tensor]) -> SparseTensor:
    """Entries of x with those of a dense tensor at their places, which is broadcast to the shape of x."""
    if not other.ndim:
        return x.map(lambda values: apply(values, other))  # type: ignore[no-any-return]
    if other.device != x.device:
        raise DeviceError(f"the dense operand must be on {x.device} as the sparse one is, found {other.device}")
    x = (x.expand_dense() if x.blocksize else x).coalesce()
    try:
        other = other.expand(x.shape)
    except RuntimeError:
        raise ShapeError(f"{tuple(other.shape)} cannot be broadcast to the sparse operand's {x.shape}") from None
    return x._make(x._pattern, apply(x._values, other[tuple(x._pattern.coords)]))  # type: ignore[no-any-return]


# -- of two patterns ---------------------------------------------------------------------------------------------------


def _sum(x: Any, other: Any, sign: int) -> SparseTensor:
    """``x + sign * other``."""
    other = as_dense(other, "the other operand")
    if isinstance(other, Number) and other == 0:
        return x  # type: ignore[no-any-return]
    if isinstance(other, Number) or (isinstance(other, torch.Tensor) and other.layout == torch.strided):
        raise DtypeError("a sum with a number or a dense tensor is dense: .to_dense() + …, or map() for entries alone")
    x, y = _alike(x, other, "+" if sign > 0 else "-")
    if x._pattern is y._pattern:
        return x._make(x._pattern, torch.add(x._values, y._values, alpha=sign))  # type: ignore[no-any-return]
    pattern, left, right = _union(x._pattern, y._pattern)
    dtype = torch.result_type(x._values, y._values)
    out = x._values.new_zeros((pattern.nnz, *x._values.shape[1:]), dtype=dtype)
    out.index_add_(0, left, x._values.to(dtype))
    return x._make(pattern, out.index_add_(0, right, y._values.to(dtype), alpha=sign))  # type: ignore[no-any-return]


def _alike(x: Any, other: Any, sign: str) -> tuple[Any, Any]:
    """Both as coalesced tensors of one shape, in the same blocks or none, with the same dense modes."""
    y = type(x).coerce(other)
    if y is None:
        raise DtypeError(
            f"sparse {sign} takes a number, a torch tensor or a sparse tensor, found {type(other).__name__}"
        )
    if x.shape != y.shape:
        raise ShapeError(f"sparse {sign} sparse takes tensors of one shape, found {x.shape} and {y.shape}")
    if x.device != y.device:
        raise DeviceError(f"sparse {sign} sparse takes tensors on one device, found {x.device} and {y.device}")
    if (x.sparse_order, x.blocksize) != (y.sparse_order, y.blocksize):
        x, y = x.expand_dense(), y.expand_dense()
    return x.coalesce(), y.coalesce()


def _taken(x: Any, entries: Entries | None) -> torch.Tensor:
    return x._values if entries is None else x._values.index_select(0, entries)  # type: ignore[no-any-return]


def _meeting(x: Pattern, y: Pattern) -> tuple[Pattern, Entries | None, Entries | None]:
    """The pattern of the entries that both have, and which ones of each these are; None for all in order."""
    if x is y:
        return x, None, None

    def made() -> tuple[Pattern, Entries, Entries]:
        here, there, _ = places(x, y)
        right = there.nonzero()[:, 0]
        left = here[right]
        return x.like(x.coords[:, left], True), left, right

    return x._once(("meeting", y.number), made)


def _union(x: Pattern, y: Pattern) -> tuple[Pattern, Entries, Entries]:
    """The pattern of the entries that either has, and which of them the entries of each are."""

    def made() -> tuple[Pattern, Entries, Entries]:
        here, there, (of_x, of_y) = places(x, y)
        new = (~there).nonzero()[:, 0]
        left = torch.arange(x.nnz, device=x.device) + torch.searchsorted(of_y[new], of_x)
        right = here.new_empty(y.nnz)
        right[new] = here[new] + torch.arange(new.numel(), device=x.device)
        right[there] = left[here[there]]
        coords = x.coords.new_empty(x.order, x.nnz + new.numel())
        coords[:, left], coords[:, right] = x.coords, y.coords
        return x.like(coords, True), left, right

    return x._once(("union", y.number), made)


def places(x: Pattern, y: Pattern) -> tuple[Entries, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """For each entry of y the first of x that is not before it, whether that is equal, and keys of both in order."""
    keys = [crd.sort_keys(one.coords, x.shape) for one in (x, y)]
    if len(keys[0]) == 1:
        of_x, of_y = keys[0][0], keys[1][0]
    else:
        rank = crd.numbered([*torch.cat((x.coords, y.coords), 1)], x.shape, x.nnz + y.nnz, x.coords[0]).rank
        of_x, of_y = rank[: x.nnz], rank[x.nnz :]
    here = torch.searchsorted(of_x, of_y)
    equal = of_x[here.clamp(max=max(0, x.nnz - 1))] == of_y if x.nnz else torch.zeros_like(of_y, dtype=torch.bool)
    return here, equal, (of_x, of_y)


def _matmul(left: Any, right: Any) -> Any:
    """``left @ right`` of which one is sparse, at least: matrices, vectors, and batches of matrices in front."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (left, right)]
    a, b = map(len, shapes)
    if not a or not b:
        named = [shape or type(x).__name__ for shape, x in zip(shapes, (left, right), strict=True)]
        raise ShapeError(f"@ takes vectors and matrices, found {named[0]} and {named[1]}")
    if shapes[0][-1] != shapes[1][-2:][0]:
        raise ShapeError(f"@ sums columns of the first with rows of the second, found {shapes[0]} and {shapes[1]}")
    batch = "abcdefgh"[: max(a, b, 2) - 2]
    first = (batch[len(batch) - a + 2 :] + "ij") if a > 1 else "j"
    second = (batch[len(batch) - b + 2 :] + "jk") if b > 1 else "j"
    result = batch + ("i" if a > 1 else "") + ("k" if b > 1 else "")
    dense = any(isinstance(x, torch.Tensor) and x.layout == torch.strided for x in (left, right))
    return Arithmetic._einsum_of(f"{first},{second}->{result}", left, right, output="dense" if dense else "auto")


def _of_torch(name: str) -> Callable[[Any, Any], Any]:
    """An operator of torch, of which the first operand or the second is sparse."""

    def called(x: Any, y: Any, alpha: Any = 1) -> Any:
        y = y if alpha == 1 else y * alpha
        return getattr(x, f"__{name}__")(y) if _is_sparse(x) else getattr(y, f"__r{name}__")(x)

    return called


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    """A comparison of which the first operand or the second is sparse."""
    compare, mirrored = (getattr(operator, n) for n in (name, name.translate(str.maketrans("lg", "gl"))))
    return lambda x, y: compare(x, y) if _is_sparse(x) else mirrored(y, x)


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The operator with its operands exchanged, as torch has them; Dynamo has them as they were written."""
    return lambda x, y: function(x, y) if _is_sparse(x) else function(y, x)


def _method(name: str) -> Callable[..., Any]:
    """The method of a SparseTensor by the name of torch's function."""
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


def _of_orders(*orders: int) -> Callable[[Any, Any], Any]:
    """A product of operands of these orders alone: vectors, matrices, or batches of these."""

    def called(x: Any, y: Any) -> Any:
        if (len(x.shape), len(y.shape)) != orders:
            raise ShapeError(f"this product takes orders {orders}, found {len(x.shape)} and {len(y.shape)}: take @")
        return _matmul(x, y)

    return called


def _mapped(name: str) -> Callable[..., Any]:
    """A function of torch that is 0 of 0, of the entries."""
    return lambda x, *args, **kwargs: x.map(lambda values: getattr(torch, name)(values, *args, **kwargs))


def _elsewhere(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is loaded where it is called first."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(f"sparsetc.tensor.{module}"), name)(*args, **kwargs)

    return called


def _addmm(input: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """``beta * input + alpha * x @ y``; a sparse product with a dense input is dense."""
    product = _matmul(x, y)
    if _is_sparse(product) and not _is_sparse(input):
        product = product.to_dense()
    return beta * input + alpha * product


def _sampled_addmm(input: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """``beta * input + alpha * x @ y`` at the entries of the sparse input."""
    sampled = Arithmetic._einsum_of("ij,ik,kj->ij", input.map(torch.ones_like), x, y, output="sparse")
    return input * beta + sampled * alpha


def _tensordot(x: Any, y: Any, dims: Any = 2) -> Any:
    """The sum over modes of both: the last n with the first n, or those that are named."""
    a, b = len(x.shape), len(y.shape)
    left, right = (range(a - dims, a), range(dims)) if isinstance(dims, int) else dims
    first, second = ascii_letters[:a], list(ascii_letters[a : a + b])
    for m, n in zip(left, right, strict=True):
        if x.shape[m] != y.shape[n]:
            raise ShapeError(f"tensordot: mode {m} of {tuple(x.shape)} and mode {n} of {tuple(y.shape)} differ in size")
        second[n] = first[m]
    kept = [c for c in (*first, *second) if (c in first) != (c in second)]
    return Arithmetic._einsum_of(f"{first},{''.join(second)}->{''.join(kept)}", x, y)


METHODS = (
    *("sum", "mean", "amax", "amin", "prod", "norm", "count_nonzero", "abs", "sign", "sqrt", "clone", "detach"),
    *("permute", "transpose", "t", "reshape", "flatten", "squeeze", "unsqueeze", "index_select", "narrow"),
    *("diagonal", "tril", "triu", "numel", "clip", "clamp"),
)
"""Functions of torch that are methods of a SparseTensor too."""
MAPS = (
    *("asin", "asinh", "atan", "atanh", "ceil", "deg2rad", "erf", "expm1", "floor", "log1p", "nan_to_num", "positive"),
    *("rad2deg", "relu", "round", "sgn", "sin", "sinh", "square", "tan", "tanh", "trunc"),
)
"""Functions of torch that are 0 of 0, and so are maps of entries; most of numpy's have these names too."""
COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "ne": "not_equal"}
"""Python's names, and those of numpy, both of which torch has."""
_NAMES = {
    "add": ("add", "__add__"),
    "mul": ("mul", "multiply", "__mul__"),
    "sub": ("sub", "subtract", "__sub__"),
    "truediv": ("div", "divide", "true_divide", "__truediv__"),
    "matmul": ("matmul", "__matmul__"),
    "pow": ("pow", "power"),
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{torchs: function for name, each in _NAMES.items() for function in [_of_torch(name)] for torchs in each},
    **{f"__r{name}__": _reflected(_of_torch(name)) for name in _NAMES},
    "__rdiv__": _reflected(_of_torch("truediv")),
    **{name: _method(name) for name in METHODS},
    **{name: _mapped(name) for name in MAPS},
    **{name: _comparison(pythons) for pythons, numpys in COMPARISONS.items() for name in (pythons, numpys)},
    **dict.fromkeys(("cat", "concat", "concatenate"), _elsewhere("creation", "cat")),
    **{name: _elsewhere("creation", name) for name in ("stack", "kron", "where")},
    **{
        prefix + name: _elsewhere("softmax", name) for name in ("softmax", "log_softmax") for prefix in ("", "_sparse_")
    },
    **dict.fromkeys(("mm", "_sparse_mm", "smm", "hspmm"), _of_orders(2, 2)),
    **{"bmm": _of_orders(3, 3), "mv": _of_orders(2, 1), "dot": _of_orders(1, 1)},
    **{"neg": operator.neg, "negative": operator.neg, "absolute": operator.abs, "tensordot": _tensordot},
    **{"addmm": _addmm, "_sparse_addmm": _addmm, "sparse_sampled_addmm": _sampled_addmm, "_sparse_sum": _method("sum")},
    "linear": lambda x, weight, bias=None: _matmul(x, weight.T) if bias is None else _matmul(x, weight.T) + bias,
    "linalg_vector_norm": lambda x, ord=2, dim=None, keepdim=False: x.norm(ord, dim, keepdim),
    "einsum": lambda *args: Arithmetic._einsum_of(*args),
}
"""What functions of torch do with a SparseTensor among their arguments, by their names."""
UFUNCS: dict[str, Callable[..., Any]] = {
    **{
        name: _OPERATORS[name]
        for name in (
            *("add", "multiply", "subtract", "divide", "true_divide", "matmul", "power", "sqrt", "sign", "absolute"),
            *("negative", *COMPARISONS.values(), *(name for name in MAPS if hasattr(np, name))),
        )
    },
    **{f"arc{name[1:]}": _OPERATORS[name] for name in MAPS if name[0] == "a"},
}
"""What numpy's functions do with one, likewise."""
if sys.modules.get("opt_einsum"):  # which torch loads where it is installed; its functions for torch then serve here
    sys.modules["opt_einsum"].backends.dispatch._aliases["sparsetc"] = "opt_einsum.backends.torch"

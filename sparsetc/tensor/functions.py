"""Functions of torch and numpy that take a SparseTensor: a table of implementations, by their names in both libraries.

In: a function of torch's or a ufunc of numpy's, and its arguments, a SparseTensor among them. Out: what an operator, a
method or `einsum` gives; or an error that says what to do instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Number
from string import ascii_letters
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsetc.errors import DtypeError, EquationError, ShapeError
from sparsetc.support import Ints, later
from sparsetc.tensor.arithmetic import einsum, matmul
from sparsetc.tensor.attributes import IN_PLACE, is_sparse
from sparsetc.tensor.coords import flat, mode_of
from sparsetc.tensor.dtypes import INTEGERS
from sparsetc.tensor.elementwise import attempted, elementwise, is_strided
from sparsetc.tensor.inputs import as_dense

POSITIONAL = ("condition", "input", "tensors", "other", "mat1", "mat2", "vec", "exponent", "shape", "dims")
"""Arguments of torch's functions that are as often named, in order."""


def of_torch(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call an operator or a function of torch's with a SparseTensor among the arguments."""
    # functions of torch's written in Python hand on what they were not given as None or False
    refused = {"out", "rounding_mode", "inplace", "dtype"}
    kwargs = {
        name: value
        for name, value in (kwargs or {}).items()
        if value is not None and (value is not False or name not in refused)
    }
    kwargs.pop("_stacklevel", None)
    args = (*args, *[kwargs.pop(one) for one in POSITIONAL if one in kwargs])
    name = getattr(function, "__name__", str(function))
    if "axis" in kwargs and name not in METHODS:
        kwargs["dim"] = kwargs.pop("axis")
    implementation = FUNCTIONS.get(name)
    if implementation is None:
        if name.endswith("_") and not name.startswith("_"):
            raise DtypeError(IN_PLACE.format(name))
        raise DtypeError(f"torch's {name} takes no SparseTensor: call .to_dense(), or compute with .values")
    if found := kwargs.keys() & (refused - {"dtype"} if name in TYPED else refused):
        raise DtypeError(f"torch's {name} of a SparseTensor takes no {min(found)}=")
    if torch.compiler.is_compiling() and implementation is FUNCTIONS["matmul"] and not is_sparse(args[0]):
        raise DtypeError("Dynamo exchanges the operands of @ (torch 2.13): a graph breaks here; write an einsum")
    return implementation(*args, **kwargs)


def of_ufunc(x: Any, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a ufunc of numpy's with a SparseTensor among the arguments."""
    if method == "__call__" and not kwargs and ufunc.__name__ in UFUNCS:
        return UFUNCS[ufunc.__name__](*(as_dense(a, f"numpy's {ufunc.__name__}: an operand") for a in args))
    raise DtypeError(f"numpy's {ufunc.__name__} takes no SparseTensor: call .to_dense(), or compute with .values")


def of_numpy(x: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of numpy that is no ufunc; others are refused: they might take our attributes for numpy's."""
    name = function.__name__
    if function not in (getattr(np, name, None), np.linalg.norm) or name not in ARRAY_FUNCTIONS:
        raise DtypeError(f"numpy's {name} takes no SparseTensor: call .to_dense().numpy(), or compute with .values")
    args = [as_dense(operand, f"numpy's {name}: an operand") for operand in args]
    implementation = ARRAY_FUNCTIONS[name]
    if implementation is None:
        return function._implementation(*args, **kwargs)
    kwargs = {NUMPYS_NAMES.get(one, one): value for one, value in kwargs.items() if value is not None}
    if "out" in kwargs:
        raise DtypeError(f"numpy's {name} of a SparseTensor takes no out=")
    if "dtype" in kwargs:
        kwargs["dtype"] = torch.from_numpy(np.empty(0, kwargs["dtype"])).dtype
    return implementation(*args, **kwargs)


def _operator(name: str) -> Callable[[Any, Any], Any]:
    """An operator of torch, of which the first operand or the second is sparse."""
    swapped = MIRRORED.get(name, f"r{name}")

    def called(x: Any, y: Any, alpha: Any = 1) -> Any:
        y = y if type(alpha) is int and alpha == 1 else _times(getattr(torch, name), alpha, y, x)
        return getattr(x, f"__{name}__")(y) if is_sparse(x) else getattr(y, f"__{swapped}__")(x)

    return called


def _times(function: Callable[..., Tensor], alpha: Any, y: Any, x: Any) -> Any:
    """Return ``alpha * y`` in the dtype that torch adds it to x in. Raise `DtypeError` for what it refuses."""
    held: Any = as_dense(y, "the other operand")
    if not isinstance(held, Number | Tensor) and (held := (x if is_sparse(x) else y).coerce(held)) is None:
        return y  # which the operator refuses
    like = (torch.as_tensor(one) if isinstance(one, Number) else torch.zeros(1, dtype=one.dtype) for one in (x, held))
    dtype = attempted(function, *like, alpha=alpha).dtype
    held = held if isinstance(held, Number) else held.to(dtype)
    return held * (bool(alpha) if dtype == torch.bool else alpha)


def _of_tensors(function: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return the function for tensors or numbers, both cast to their common dtype."""

    def apply(x: Any, y: Any) -> Tensor:
        dtype = torch.result_type(x, y)
        return function(*(torch.as_tensor(one, dtype=dtype) for one in (x, y)))

    return apply


def _elementwise(name: str) -> Callable[[Any, Any], Any]:
    """Return a function of torch with f(0, 0) = 0 for a sparse first or second operand."""
    apply = _of_tensors(getattr(torch, name))
    mirrored = _of_tensors(lambda x, y: getattr(torch, name)(y, x))
    return lambda x, y: elementwise(x, y, apply, name) if is_sparse(x) else elementwise(y, x, mirrored, name)


def _none_differ(x: Any, y: Any, differ: Callable[..., Tensor], name: str) -> bool:
    """True if two tensors, one of them sparse, have the same shape and no elements for which `differ` is True."""
    if _shape_of(x, name) != _shape_of(y, name):
        return False
    sparse = x if is_sparse(x) else y
    x, y = (sparse.from_dense(one) if is_strided(one) else one for one in (x, y))
    return not bool(elementwise(x, y, _of_tensors(differ), name)._values.any())


def _shape_of(x: Any, name: str) -> Ints:
    if not hasattr(x, "shape"):
        raise DtypeError(f"{name} takes tensors, found {type(x).__name__}")
    return tuple(x.shape)


def _allclose(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """True if all elements are close; absent ones are 0."""
    return _none_differ(x, y, lambda a, b: ~torch.isclose(a, b, rtol, atol, equal_nan), "allclose")


def _linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the norm of vectors, or the Frobenius norm of matrices."""
    vectors = isinstance(dim, int) or (dim is None and x.ndim == 1)
    if not vectors and ord not in (None, "fro"):
        raise DtypeError(f"linalg.norm of a sparse matrix takes ord='fro', found {ord!r}; take linalg.vector_norm")
    return x.norm(2 if ord is None else ord, dim, keepdim)


def _dropout(x: Any, p: float = 0.5, training: bool = False, train: bool = False) -> Any:
    """Entries dropped at random, the others times 1 / (1 - p), while training."""
    return x.map(lambda values: functional.dropout(values, p, training or train))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the operator for operands that torch exchanges and Dynamo does not."""
    return lambda x, y: function(x, y) if is_sparse(x) else function(y, x)


def _method(name: str) -> Callable[..., Any]:
    """The method of a SparseTensor by the name of torch's function."""
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


def _of_orders(*orders: tuple[int, int]) -> Callable[[Any, Any], Any]:
    """Return the product for operands of some pairs of orders."""

    def called(x: Any, y: Any) -> Any:
        found = len(_shape_of(x, "a product")), len(_shape_of(y, "a product"))
        if found not in orders:
            raise ShapeError(f"this product takes orders {' or '.join(map(str, orders))}, found {found}: take @")
        return matmul(x, y)

    return called


def _mapped(name: str) -> Callable[..., Any]:
    """A function of torch that is 0 of 0, of the entries."""

    def called(x: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(torch, name, None) or getattr(functional, name)
        return x.map(lambda values: attempted(function, values, *args, **kwargs))

    return called


def _addmm(input: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """``beta * input + alpha * x @ y``; a sparse product with a dense input is dense."""
    if not (is_sparse(x) or is_sparse(y)):
        raise DtypeError(
            "addmm of a sparse input and two dense matrices is dense: call .to_dense() of the input, or "
            "torch.sparse.sampled_addmm for its entries alone"
        )
    product = matmul(x, y)
    if is_sparse(product) and not is_sparse(input):
        product = product.to_dense()
    return _scaled_sum(input, product, beta, alpha)


def _scaled_sum(input: Any, product: Any, *factors: float) -> Any:
    """Return ``beta * input + alpha * product``; of integers, with factors cut to integers, as torch has it."""
    dtype = torch.promote_types(input.dtype, product.dtype)
    if not dtype.is_complex and complex in map(type, factors):
        raise DtypeError(f"a product of {dtype} is not added with complex factors, found {factors}")
    beta, alpha = map(int, factors) if dtype in INTEGERS else factors
    return product * alpha if beta == 0 else input * beta + product * alpha


def _sampled_addmm(input: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Return ``beta * input + alpha * x @ y`` at the entries of the sparse input, for matrices or batches of them."""
    if not len(input.shape) == len(x.shape) == len(y.shape):
        shapes = ", ".join(str(tuple(operand.shape)) for operand in (input, x, y))
        raise ShapeError(f"sampled_addmm takes three matrices, or three batches of them, found {shapes}")
    sampled = einsum("...ij,...ik,...kj->...ij", input.map(torch.ones_like), x, y, output="sparse")
    return _scaled_sum(input, sampled, beta, alpha)


def paired_modes(modes: Any, left: Ints, right: Ints, name: str) -> tuple[list[int], list[int]]:
    """Return the modes of x and of y, of these shapes, that `torch.tensordot` sums in pairs, counted from the first."""
    if isinstance(modes, int):
        if not 0 <= modes <= min(len(left), len(right)):
            raise ShapeError(
                f"{name}: {modes} modes cannot be summed; x has order {len(left)}, y has {len(right)} dimensions"
            )
        modes = range(len(left) - modes, len(left)), range(modes)
    sides = [flat((side,)) for side in modes] if isinstance(modes, list | tuple) else []
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        raise EquationError(f"{name}: modes must be a number, or as many modes of x as of y, found {modes!r:.80}")
    of_x, of_y = (
        [mode_of(len(shape), mode, f"{name}: {operand}") for mode in side]
        for side, shape, operand in zip(sides, (left, right), "xy", strict=True)
    )
    for operand, side in ("x", of_x), ("y", of_y):
        if len({*side}) < len(side):
            raise EquationError(f"{name}: a mode of {operand} is named twice in {side}")
    for m, n in zip(of_x, of_y, strict=True):
        if left[m] != right[n]:
            raise ShapeError(
                f"{name}: mode {m} of x has size {left[m]}, mode {n} of y has size {right[n]}: "
                "modes that are summed together have one size"
            )
    return of_x, of_y


def _tensordot(x: Any, y: Any, dims: Any = 2) -> Any:
    """Sum over pairs of modes: the last n with the first n, or the modes given."""
    a, b = len(x.shape), len(y.shape)
    first, second = ascii_letters[:a], list(ascii_letters[a : a + b])
    for m, n in zip(*paired_modes(dims, x.shape, y.shape, "tensordot"), strict=True):
        second[n] = first[m]
    kept = [c for c in (*first, *second) if (c in first) != (c in second)]
    return einsum(f"{first},{''.join(second)}->{''.join(kept)}", x, y)


def _rows(tensors: Any) -> list[Any]:
    """Return vectors as matrices of one row, and other tensors as they are."""
    return [x.unsqueeze(0) if len(x.shape) == 1 else x for x in tensors]


METHODS = """
    sum mean amax amin prod norm count_nonzero abs sign sqrt clone detach permute transpose t reshape flatten
    squeeze unsqueeze index_select narrow diagonal tril triu numel clip clamp any all var std max min argmax argmin
    topk movedim select unbind split chunk flip roll trace diag nonzero is_floating_point is_complex
""".split()  # noqa: SIM905 (a list of 50 quoted words is no easier to read)
"""Functions of torch that are methods of a SparseTensor too."""
MAPS = """
    asin asinh atan atanh ceil deg2rad erf expm1 floor log1p nan_to_num positive rad2deg relu round sgn sin sinh
    square tan tanh trunc frac erfinv isnan isinf isposinf isneginf conj real imag angle resolve_conj leaky_relu
    relu6 elu celu selu gelu silu mish hardswish tanhshrink softsign
""".split()  # noqa: SIM905
"""Functions of torch that are 0 of 0, and so are maps of entries; most of numpy's have these names too."""
ELEMENTWISE = "maximum", "minimum", "fmax", "fmin", "logical_or", "logical_xor", "atan2", "arctan2"
"""Functions of torch and numpy, of two operands, that are 0 of two zeros."""
TYPED = ("sum", "mean", "prod")
"""Functions that take a dtype."""
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}
"""Comparisons, and what they are of operands in the other order."""
OPERATORS = {
    "add": "add",
    "mul": "mul multiply",
    "sub": "sub subtract",
    "truediv": "div divide true_divide",
    "matmul": "matmul",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lt": "lt less",
    "le": "le less_equal",
    "gt": "gt greater",
    "ge": "ge greater_equal",
    "ne": "ne not_equal",
}
"""Names of Python's operators, and what torch and numpy call them."""
_cat, _block_diag = later("tensor.creation", "cat"), later("tensor.creation", "block_diag")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{torchs: _operator(name) for name, each in OPERATORS.items() for torchs in (f"__{name}__", *each.split())},
    **{f"__r{name}__": _reflected(_operator(name)) for name in OPERATORS},
    "__rdiv__": _reflected(_operator("truediv")),
    **{name: _method(name) for name in METHODS},
    **{name: _mapped(name) for name in MAPS},
    **{f"arc{name[1:]}": _mapped(name) for name in MAPS if name[0] == "a" and name != "angle"},
    **{name: _elementwise(name) for name in ELEMENTWISE},
    "logical_and": lambda x, y: (x != 0) & (y != 0),
    "equal": lambda x, y: _none_differ(x, y, torch.ne, "equal"),
    "allclose": _allclose,
    "linalg_norm": _linalg_norm,
    "dropout": _dropout,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **{name: later("tensor.creation", name) for name in ("stack", "kron", "where")},
    "block_diag": lambda *tensors: _block_diag(*_rows(tensors)),
    "vstack": lambda tensors: _cat(_rows(tensors)),
    "hstack": lambda tensors: _cat(tensors, min(1, len(tensors[0].shape) - 1)),
    **dict.fromkeys(("swapaxes", "swapdims"), _method("transpose")),
    "moveaxis": _method("movedim"),
    **{
        prefix + name: later("tensor.softmax", name)
        for name in ("softmax", "log_softmax")
        for prefix in ("", "_sparse_")
    },
    **dict.fromkeys(("mm", "_sparse_mm", "smm", "hspmm"), _of_orders((2, 2))),
    "bmm": _of_orders((3, 3)),
    "mv": _of_orders((2, 1)),
    "dot": _of_orders((1, 1)),
    **dict.fromkeys(("neg", "negative"), _method("__neg__")),
    "absolute": _method("abs"),
    "tensordot": _tensordot,
    "addmm": _addmm,
    "_sparse_addmm": _addmm,
    "sparse_sampled_addmm": _sampled_addmm,
    "_sparse_sum": _method("sum"),
    "linear": lambda x, weight, bias=None: matmul(x, weight.T) if bias is None else matmul(x, weight.T) + bias,
    "linalg_vector_norm": lambda x, ord=2, dim=None, keepdim=False: x.norm(ord, dim, keepdim),
    "einsum": einsum,
}
"""Implementations of torch's functions for arguments with a SparseTensor among them, by torch's names."""
UFUNCS: dict[str, Callable[..., Any]] = {
    **{name: call for name, call in FUNCTIONS.items() if isinstance(getattr(np, name, None), np.ufunc)},
    "rint": FUNCTIONS["round"],
    "conjugate": FUNCTIONS["conj"],
}
UFUNCS.pop("equal")  # which numpy asks of each element
"""The same of numpy's functions, by numpy's names."""
NUMPYS_NAMES = {
    "axis": "dim",
    "axis1": "dim1",
    "axis2": "dim2",
    "keepdims": "keepdim",
    "axes": "dims",
    "k": "diagonal",
    "a_min": "min",
    "a_max": "max",
    "ddof": "correction",
}
"""Arguments, by numpy's names, and what torch calls them."""
RENAMED = """
    sum mean prod any all count_nonzero argmax argmin diag diagonal tril triu clip reshape squeeze kron where stack
    concatenate einsum tensordot allclose real imag angle nan_to_num isposinf isneginf
""".split()  # noqa: SIM905
"""Functions of numpy that are torch's."""
ARRAY_FUNCTIONS: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(("flip", "shape", "ndim", "fix", "swapaxes")),
    **{name: FUNCTIONS[name] for name in RENAMED},
    "size": lambda a, dim=None: a.numel() if dim is None else a.size(dim),
    "max": _method("amax"),
    "min": _method("amin"),
    **{name: partial(FUNCTIONS[name], correction=0) for name in ("var", "std")},
    "round": lambda a, decimals=0: FUNCTIONS["round"](a, decimals=decimals),
    "trace": lambda a, offset=0, dim1=0, dim2=1: a.diagonal(offset, dim1, dim2).sum(-1),
    "transpose": lambda a, dims=None: a.permute(list(dims or range(a.ndim)[::-1])),
    "roll": lambda a, shift, dim=None: a.roll(shift, dim),
    "moveaxis": _method("movedim"),
    "expand_dims": _method("unsqueeze"),
    "broadcast_to": _method("expand"),
    "ravel": _method("flatten"),
    "copy": _method("clone"),
    "nonzero": lambda a: tuple(a.nonzero().T),
    "array_equal": FUNCTIONS["equal"],
    "dot": _of_orders((1, 1), (1, 2), (2, 1), (2, 2)),
    "norm": FUNCTIONS["linalg_norm"],
}
"""Functions of numpy that are no ufuncs, with torch's names of arguments; None for what numpy itself does by methods
and operators of ours."""
for _name in ("softmax", "log_softmax"):
    FUNCTIONS[_name].__doc__ = f"Return `sparsetc.{_name}` along a mode: absent elements have no share."


def methods() -> Iterator[tuple[str, Any]]:
    """Yield the methods and properties of a SparseTensor that are functions of torch's, by torch's names."""
    for name, call in FUNCTIONS.items():
        if hasattr(Tensor, name) and name not in ("where", *METHODS) and not name.startswith("_"):
            usual = f"Return ``torch.{name}`` of this tensor, as of a dense one: positions without an entry are 0."
            call.__doc__ = call.__doc__ or usual
            yield name, property(call) if name in ("real", "imag") else call


if sys.modules.get("opt_einsum"):  # it finds a backend by a tensor's module: its functions for torch serve here
    sys.modules["opt_einsum"].backends.dispatch._aliases["sparsetc"] = "opt_einsum.backends.torch"

"""What a user calls: `einsum`, `compile`, `explain`, and named operations as thin sugar over them.

In: an equation and operands, at least one of them sparse. Out: results, or a `Kernel` to call often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from sparsetc.dense import Dims, promoted, repeated_dims
from sparsetc.entry import entry_point
from sparsetc.errors import DeviceError, DtypeError, EquationError, PlanError
from sparsetc.explain import Explanation
from sparsetc.inputs import as_dense
from sparsetc.ir.parse import parse, parse_arguments
from sparsetc.kernel import Kernel, compile_bound
from sparsetc.names import check_free, check_identifier
from sparsetc.options import Options, of_call, with_settings
from sparsetc.output import without_zeros
from sparsetc.tensor import SparseTensor
from sparsetc.warn import warn_once

if TYPE_CHECKING:
    from sparsetc.pair import PairKernel

Operand = Any


@entry_point
def einsum(*args: Any, output: str = "auto", drop_zeros: bool = False, **settings: Any) -> torch.Tensor | SparseTensor:
    """Evaluate an einsum with one or more sparse operands.

    Takes what `torch.einsum` takes: ``einsum("ijk,jr,kr->ir", x, b, c)``, an implicit output, ``...``, spaces, a list
    of operands, or operands with index lists. The sparse operand may be a `SparseTensor`, a torch tensor of any sparse
    layout, or a scipy or pydata sparse array; dense operands may be ndarrays, which lie on the CPU. The first call for
    an equation compiles it; the kernel is kept with the sparse operand's pattern, that of a torch tensor or of a scipy
    CSR, CSC, BSR or COO array with the index arrays.

    Values are read at each call, however they were changed; on a GPU, values that require no gradient only where torch
    counted a change, which it does not of one through ``.data``. Where the caller never had them (they were read from a
    file, or computed from duplicates), they are packed once; a `Kernel` packs any values once.

    Args:
        args: equation and operands. Dense operands have the sparse one's dtype and device.
        output: ``"sparse"``, ``"dense"`` or ``"auto"``: sparse when the result keeps two or more of the sparse
            operand's modes, or all of them; of several sparse operands, when it keeps any of their modes.
        drop_zeros: leave out entries of a sparse result whose value is 0. Its pattern otherwise does not depend on
            values.
        settings: ``plan=``, ``precision=``, ``deterministic=``, ``memory_limit=``, ``cache_dir=``, ``backend=``: as in
            `options`.

    Returns:
        A dense tensor, or a `SparseTensor`: of one sparse operand, on its (projected) pattern, a dense letter of the
        result being a dense mode of it; of several, on the contraction's own pattern, coalesced.

    Raises:
        EquationError, ShapeError, DtypeError, DeviceError, PlanError, OutOfMemoryError: before any kernel runs.
    """
    text, operands = _prepared(args)
    kernel = compiled(text, operands, of_call(settings), output)
    result = kernel.called([o for o in operands if isinstance(o, torch.Tensor)])
    return without_zeros(result) if drop_zeros else result


@entry_point
def compile(*args: Any, output: str = "auto", drop_zeros: bool = False, **settings: Any) -> Kernel | PairKernel:
    """Plan, pack and generate once; call the `Kernel` often. Arguments as for `einsum`.

    A kernel has the values packed that its sparse operand has now; see `Kernel` for which changes it notices.
    """
    text, operands = _prepared(args)
    kernel: Kernel | PairKernel
    if _several(operands):
        from sparsetc import pair  # imported where an einsum has two sparse operands, which few have

        kernel = pair.build_pair(text, operands, of_call(settings), output)
    else:
        kernel = _build(text, operands, of_call(settings), output)
    kernel.drop_zeros = drop_zeros
    return kernel


def explain(*args: Any, **settings: Any) -> Explanation:
    """How `einsum` would run: parts, formats, costs, why this plan. Arguments as for `einsum`."""
    return compile(*args, **settings).explain()


def compiled(
    text: str,
    operands: Sequence[SparseTensor | torch.Tensor],
    settings: Options,
    output: str,
    automatic: bool = False,
) -> Kernel | PairKernel:
    """The kernel kept for the sparse operand's pattern, this equation and these sizes, or a new one.

    `automatic` drops a plan that was chosen for another equation (a gradient's differs from its function's).
    """
    if automatic:
        settings = with_settings(settings, {"plan": "auto"})
    if _several(operands):
        from sparsetc import pair

        return pair.compiled_pair(text, operands, settings, output)
    x = next(o for o in operands if isinstance(o, SparseTensor))
    key = (
        text,
        tuple([(o.shape, o.dtype, o.device, _form_of(o)) for o in operands]),
        settings,
        output,
        settings.effective_precision(),
    )
    kept = x._packed.kernels
    try:
        kernel = kept.get(key)
    except TypeError:  # a plan that cannot be hashed
        return _build(text, operands, settings, output, repeated=True)
    if kernel is not None:
        return kernel.on(x)
    kernel = _build(text, operands, settings, output, repeated=True)
    kept.put(key, kernel.bare())
    return kernel


def _build(
    text: str,
    operands: Sequence[SparseTensor | torch.Tensor],
    settings: Options,
    output: str,
    repeated: bool = False,
) -> Kernel:
    bound = parse(text, [tuple(o.shape) for o in operands], [isinstance(o, SparseTensor) for o in operands])
    kernel = compile_bound(bound, operands, settings, output, repeated)
    if kernel.backend == "torch" and settings.effective_backend(kernel.canonical.device) == "torch":
        warn_once("no GPU: running the generated torch programs on the CPU")
    return kernel


def _form_of(operand: SparseTensor | torch.Tensor) -> Dims | None:
    """What of an operand, beside its shape, dtype and device, decides its kernel; None of a sparse one."""
    return repeated_dims(operand) if isinstance(operand, torch.Tensor) else None


def _several(operands: Sequence[SparseTensor | torch.Tensor]) -> bool:
    return sum(isinstance(o, SparseTensor) for o in operands) > 1


def _prepared(args: tuple[Any, ...]) -> tuple[str, list[SparseTensor | torch.Tensor]]:
    """Equation text, and operands as SparseTensors and dense tensors."""
    text, given = parse_arguments(args)
    operands: list[SparseTensor | torch.Tensor] = []
    for n, operand in enumerate(given):
        operand = as_dense(operand, f"operand {n + 1}")
        dense = isinstance(operand, torch.Tensor) and operand.layout == torch.strided
        sparse = None if dense else SparseTensor.coerce(operand)
        if sparse is not None:
            operands.append(sparse.expand_dense() if sparse.dense_order else sparse)
        elif isinstance(operand, torch.Tensor):
            operands.append(operand)
        else:
            raise DtypeError(
                f"operand {n + 1} must be a torch tensor or sparse, found {type(operand).__name__}; use torch.as_tensor"
            )
        if sparse is not None and sparse.device.type == "meta":
            raise DeviceError(f"operand {n + 1} is on the meta device, which holds no pattern to compile for")
    if not any(isinstance(o, SparseTensor) for o in operands):
        raise EquationError(
            f'"{text}" has no sparse operand: use torch.einsum, or make one with SparseTensor.from_dense'
        )
    return text, promoted(operands)


# -- named operations -------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_op(function: F) -> F: ...
@overload
def register_op(*, replace: bool) -> Callable[[F], F]: ...
def register_op(function: F | None = None, *, replace: bool = False) -> F | Callable[[F], F]:
    """Decorator: make an operation known by its function's name, in `OPERATIONS` and to the command line's listing.

    An operation writes an equation from its operands' orders and calls `einsum`; see ``examples/custom_op.py``.

    Args:
        function: the operation.
        replace: put it in the place of one that comes with the package.

    Raises:
        PlanError: the function's name is no identifier (a lambda has none), or is taken by the package.
    """
    if function is None:
        return partial(register_op, replace=replace)  # type: ignore[call-overload, no-any-return]
    name = check_identifier(getattr(function, "__name__", None), "an operation", PlanError)
    own = [known for known, f in OPERATIONS.items() if f.__module__ == "sparsetc.ops"]
    check_free(name, "operation", own, replace, PlanError, function)
    OPERATIONS[name] = function
    return function

"""Kernel: a compiled einsum with the values of its sparse operands. Made once by `compile`, called often.

In: a `Contraction` and its sparse operands. Out: results, and everything a user may look at: the plan, the source, its
file, the PTX, the explanation. A call checks shapes, allocates its result, launches and returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsetc.codegen.parts import Values
from sparsetc.contraction.contraction import Contraction, wrap
from sparsetc.contraction.request import Result, stand_ins
from sparsetc.contraction.step import Step
from sparsetc.device.timing import Timing, timed
from sparsetc.errors import DtypeError, EquationError, PlanError, ShapeError
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct
from sparsetc.ir.plan import Plan
from sparsetc.ir.program import TileProgram
from sparsetc.planner.registry import plan_of_derived
from sparsetc.planner.report import SymbolicCost
from sparsetc.support import Ints, among, later, required
from sparsetc.support.checks import found_shape
from sparsetc.support.entry import entry_point, traced_by_modes
from sparsetc.tensor.convert import laid_out
from sparsetc.tensor.dtypes import dtype_name
from sparsetc.tensor.kept_values import gradient_taken, kept_with
from sparsetc.tensor.pattern import Pattern, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

NewValues = Tensor | Sequence[Tensor | None]
SAVED = ("precision", "plan", "path", "deterministic", "memory_limit", "backend")
"""Options that are pickled with a kernel; where source is kept is left to the process that loads it."""


def saved_settings(contraction: Contraction) -> dict[str, Any]:
    """Return the pickled options of a contraction, without unset ones."""
    named = ((name, getattr(contraction.settings, name)) for name in SAVED)
    return {name: value for name, value in named if value is not None}


PRODUCTS = 16
"""Most kernels that a `LinearOperator` keeps: of the map and its adjoint, for each number of vectors."""


class Kernel:
    """A compiled einsum; call it with the dense operands, in the equation's order.

    A kernel of one sparse operand holds its packed values. At a call it packs them again if torch's version count says
    that they changed, or after a gradient of them. Other changes, such as writes through ``.data`` or an ndarray of the
    same memory, need `with_values`; `einsum` notices those too. A kernel of several sparse operands, of one in blocks,
    or of one with dense modes that are not expanded, reads the values at each call.

    It works under ``torch.compile(fullgraph=True)``, ``torch.export``, `torch.func` and CUDA graphs; with
    `drop_zeros` a graph
    breaks at the call. It pickles as its equation, operands and settings, and is compiled again when it is loaded.

    Examples:
        >>> b = torch.ones(3, 2)
        >>> k = stc.compile("ij,jr->ir", stc.eye(3), b)
        >>> k(b).shape, k.with_values(torch.tensor([1.0, 2.0, 3.0]))(b)[:, 0]
        (torch.Size([3, 2]), tensor([1., 2., 3.]))
    """

    def __init__(self, contraction: Contraction, operands: Sequence[SparseTensor], drop_zeros: bool = False) -> None:
        self.contraction = contraction
        self.operands = tuple(operands)
        self.drop_zeros = drop_zeros
        self._patterns = tuple(o._pattern for o in operands)
        self._values = tuple(o._values for o in operands)
        self._packed: Values | None = None
        self._held: tuple[Values | None, Callable[[Any], Any] | None] = None, None
        self._versions: tuple[int | None, ...] = ()
        self._settled = True
        self._pack()

    def _pack(self) -> None:
        """Pack the current values; do nothing while a graph is traced."""
        if is_compiling() or traced_by_modes():
            return
        self._versions = tuple(None if v.is_inference() else v._version for v in self._values)
        self._settled = self.contraction.settled
        self._packed = self.contraction.packed(self._values)

    def _packed_now(self) -> Values | None:
        """Return the packed values; pack again if torch's version count changed, or if there is none."""
        if self._packed is None and not self._settled:  # the plan was not decided when values were packed
            self._pack()
        if self._packed is not None:
            for values, version in zip(self._values, self._versions, strict=True):
                # Inference tensors have no count; what learns may change without it.
                if version is None or values.requires_grad:
                    self._packed = self.contraction.packed(self._values)
                    break
                if values._version != version:
                    self._pack()
                    break
        return self._packed

    def whole(self) -> tuple[Tensor, Callable[[], Tensor | None]] | None:
        """Return the sparse operand as the dense tensor that torch multiplies as it does any; None if it does not.

        It is differentiable. The function returns it for the next call: kept while values stay as they are, and None
        once they changed; or made again of values that learn.
        """
        innermost, precision = self.contraction.innermost, self.contraction.settings.precision
        if (
            not innermost.is_product
            or innermost.in_turns is not None
            or transforming()
            or torch.is_autocast_enabled(innermost.device.type)
        ):
            return None
        if innermost.dtype is torch.float32 and precision != torch.get_float32_matmul_precision():
            return None
        operand, (values,) = self.operand, self._values
        if torch.is_grad_enabled() and values.requires_grad:

            def learned() -> Tensor:
                whole = laid_out(operand, again=True)
                whole.register_hook(lambda _: gradient_taken(values))
                return whole

            return learned(), learned
        packed: Any = self._packed_now()
        if packed is None:
            return None
        whole, kept = packed[0].view(operand.shape), kept_with(values)
        return whole, lambda: whole if kept is not None and kept_with(values) is kept else None

    def _on_arrays(self) -> Callable[[Any], Any] | None:
        """Return the kernel with its current values as `Contraction.on_arrays` gives it; None if it is more."""
        packed = self._packed_now()
        if self._held[0] is not packed:
            self._held = packed, None if packed is None else self.contraction.on_arrays(packed)
        return self._held[1]

    # -- calls ------------------------------------------------------------------------------------------------------
    def __call__(self, *dense: Tensor, values: NewValues | None = None) -> Result:
        """Run.

        Args:
            dense: the dense operands, in the order the equation names them; of the kernel's shapes, or broadcast.
            values: new values of the sparse operands, (nnz, *dense sizes) each, in their own order; None keeps one's.
                Of one sparse operand a tensor will do.

        Returns:
            A dense tensor, or a `SparseTensor` where the output keeps modes of sparse operands, as `einsum` says.
            Gradients flow to dense operands and to the values of sparse ones.
        """
        if is_compiling() or traced_by_modes():
            return _traced(self, dense, values)  # type: ignore[no-any-return]
        return self._called(dense, values)

    @entry_point
    def _called(self, dense: tuple[Tensor, ...], values: NewValues | None) -> Result:
        if values is not None:
            return self.with_values(*(values if isinstance(values, Sequence) else [values]))._called(dense, None)
        contraction = self.contraction
        result = contraction.evaluate(self._patterns, self._values, dense, self._packed_now())
        return wrap(contraction, result, self._patterns, self.drop_zeros) if contraction.sparse else result

    def as_linear_operator(self) -> Any:
        """Scipy's `LinearOperator` of the kernel as a map of its one dense operand, for scipy's solvers.

        Vectors are the dense operand and the result in row-major order, as ndarrays on the host. A solver calls it
        often, so on a CPU it runs as native loops where numba is installed, unless another backend is asked for.

        Raises:
            EquationError: a kernel of another number of dense operands than one.
            DtypeError: bfloat16, which scipy lacks.
            ImportError: scipy is not installed.

        Examples:
            >>> k = stc.compile("ij,j->i", stc.full((2, 2), 3.0), torch.zeros(2))
            >>> k.as_linear_operator() @ np.ones(2, np.float32)
            array([6., 6.], dtype=float32)
        """
        linalg = required("scipy.sparse.linalg", 'as_linear_operator needs scipy: pip install "sparsetc[io]"')
        bound = self.contraction.bound
        if len(bound.dense_shapes) != 1:
            raise EquationError(f'"{self.equation}" has {len(bound.dense_shapes)} dense operands, and no one to map')
        if self.contraction.dtype == torch.bfloat16:
            raise DtypeError("scipy has no bfloat16: take the linear operator of .to(torch.float32)")
        kernel_of = lru_cache(maxsize=PRODUCTS)(self._of_vectors)
        sizes = prod(bound.output_shape), prod(bound.dense_shapes[0])
        letters = bound.einsum.tables[0]

        def product(vectors: Any) -> Any:
            return kernel_of(vectors.shape[1:])._of_array(vectors).reshape(sizes[0], *vectors.shape[1:])

        def of_adjoint(vectors: Any) -> Any:
            columns = vectors.shape[1:]
            kernel = kernel_of(columns, adjoint=True)
            result = kernel._of_array(vectors.conj()).conj()
            held = kernel.contraction.bound.einsum.output[: len(letters)]
            if held != letters:  # the operand repeats a letter, or alone has it
                column = "".join(bound.einsum.spare[: len(columns)])
                whole = np.zeros((*bound.dense_shapes[0], *columns), result.dtype)
                diagonal = np.einsum(f"{''.join(letters)}{column}->{''.join(distinct(letters))}{column}", whole)
                kept = [n if i in held else 1 for i, n in zip(distinct(letters), diagonal.shape, strict=False)]
                diagonal[...] = result.reshape(*kept, *columns)
                result = whole
            return result.reshape(sizes[1], *columns)

        return linalg.LinearOperator(
            sizes,
            matvec=lambda vector: product(vector.reshape(-1)),
            rmatvec=lambda vector: of_adjoint(vector.reshape(-1)),
            matmat=product,
            rmatmat=of_adjoint,
            dtype=dtype_name(self.contraction.dtype),
        )

    def _of_vectors(self, columns: Ints, adjoint: bool = False) -> Kernel:
        """Return the kernel of a `LinearOperator`, with one more letter for several vectors, or of its transpose."""
        made, e = self.contraction, self.contraction.bound.einsum
        (position,) = e.dense
        source = e.inputs[position]
        target = e.output
        column = e.spare[: len(columns)]
        if adjoint:
            others = {i for n, term in enumerate(e.inputs) if n != position for i in term}
            source, target = target, among(distinct(source), others | {*target})
        terms = (*e.inputs[:position], source + column, *e.inputs[position + 1 :])
        product = Einsum(terms, target + column, e.sparse)
        bound = Bound.of(
            replace(product, text=str(product)), made.bound.by_index | dict(zip(column, columns, strict=True))
        )
        settings = made.settings
        if settings.has_loops(made.device):
            settings = replace(settings, backend="numba")
        if settings.plan != "auto" and (adjoint or columns):
            settings = replace(settings, plan=plan_of_derived(settings.plan))
        return Kernel(Contraction.compile(bound, stand_ins(bound, self.operands), settings, "dense"), self.operands)

    def _of_array(self, operand: Any) -> Any:
        """Return the dense result for the one dense operand, ndarrays of any shape whose elements are in its order."""
        if np.iscomplexobj(operand) and not self.contraction.dtype.is_complex:
            return self._of_array(operand.real) + 1j * self._of_array(operand.imag)
        dtype = dtype_name(self.contraction.dtype)
        on_arrays = self._on_arrays()
        if on_arrays is not None:
            plain = operand.dtype == dtype and operand.flags.c_contiguous and operand.flags.writeable
            return on_arrays(operand if plain else np.array(operand, dtype, order="C"))
        # A copy takes a third of the time of `torch.tensor`, which also warns of arrays that are read-only.
        tensor = torch.from_numpy(np.array(operand, order="C"))
        (shape,) = self.contraction.bound.dense_shapes
        with torch.no_grad():
            result = self(tensor.to(self.contraction.device, self.contraction.dtype).reshape(shape))
        return result.cpu().numpy()

    def with_values(self, *values: Tensor | None) -> Kernel:
        """Return a kernel for other values of the same patterns; only the new values are packed.

        Args:
            values: (nnz, *dense sizes) for each sparse operand, or None to keep its values. The dense sizes are
                those that the
                kernel was compiled for; for others compile ``x.with_values(values)``.
        """
        pairs = zip(self.operands, self._given(values), strict=True)
        return self._on([o if o._values is v else SparseTensor._make(o._pattern, v) for o, v in pairs])

    def _given(self, values: NewValues) -> tuple[Tensor, ...]:
        """Values of all sparse operands, new ones checked."""
        values = values if isinstance(values, Sequence) else [values]
        if len(values) != len(self._values):
            count = f"{len(self._values)} sparse operand{'s' if len(self._values) > 1 else ''}"
            raise ShapeError(f'"{self.equation}" has {count}, found {len(values)} values')
        given = tuple(old if new is None else new for old, new in zip(self._values, values, strict=True))
        for position, own, new in zip(self.contraction.bound.einsum.sparse, self._values, given, strict=True):
            what = "values" if len(given) == 1 else f"values of operand {position + 1}"
            if not isinstance(new, Tensor) or new.shape != own.shape:
                raise ShapeError(f"{what} must have shape {tuple(own.shape)}, found {found_shape(new)}")
            if new.dtype != own.dtype or new.device != own.device:
                raise DtypeError(f"{what} must be {own.dtype} on {own.device}, found {new.dtype} on {new.device}")
        return given

    def _on(self, operands: Sequence[SparseTensor]) -> Kernel:
        """The kernel for other sparse operands of its patterns and dtype."""
        return Kernel(self.contraction, operands, self.drop_zeros)

    def __copy__(self) -> Kernel:
        return self._on(self.operands)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        return self._on([copy.deepcopy(o, memo) for o in self.operands])

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def equation(self) -> str:
        """The einsum as written."""
        return self.contraction.bound.einsum.text

    @property
    def plan(self) -> Plan:
        """The plan that it runs by; given as ``plan=``, it makes the same of the same operands."""
        return self.contraction.innermost.plan  # type: ignore[no-any-return]

    @property
    def operand(self) -> SparseTensor:
        """The first sparse operand, with the values in use."""
        return self.operands[0]

    @property
    def steps(self) -> Sequence[Any]:
        """The contractions that run, in order, each of one sparse operand or of two."""
        return self.contraction.steps

    @property
    def step(self) -> Any:
        """The only step. Raise `PlanError` if the kernel has another number of `steps`."""
        if len(self.steps) != 1:
            raise PlanError(f'"{self.equation}" takes {len(self.steps)} steps: see .steps')
        return self.steps[0]

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of a sparse result; None for a dense one."""
        return self.contraction.pattern_on(self._patterns)

    @property
    def nnz(self) -> int:
        """The nonzeros of the only sparse operand; with several, the entries or elements of the result."""
        return self.operands[0].nnz if len(self.operands) == 1 else self.contraction.result_size

    @property
    def backend(self) -> str:
        """The backend that programs are generated for: ``triton``, ``torch`` or ``numba``."""
        return self.contraction.innermost.backend  # type: ignore[no-any-return]

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The tile programs of all parts; torch's own products have none."""
        return tuple(program for one in self.contraction.innermost.generated for program in one.programs)

    @property
    def source(self) -> str:
        """The generated source of all programs, one after the other."""
        return "\n\n".join(one.source for one in self.contraction.innermost.generated)

    @property
    def path(self) -> Path | None:
        """The file of the first generated program; None where all are torch's own products."""
        return next((one.path for one in self.contraction.innermost.generated), None)

    def ptx(self, target: str = "sm_90") -> str:
        """The assembly for a named target (``sm_80``, ``sm_90``, ``sm_100``, ``gfx942``, …); needs no GPU."""
        return self.contraction.innermost.ptx(target)  # type: ignore[no-any-return]

    @property
    def cost(self) -> SymbolicCost:
        """The cost of a call as sympy expressions of nonzeros, sizes and the rates of the device.

        Examples:
            >>> cost = stc.compile("ij,jr->ir", stc.eye(8), torch.ones(8, 4)).cost
            >>> cost["products"], cost.at(nonzeros=1000, r=128)["products"]
            (2*nonzeros*r, 256000.0)

        Raises:
            PlanError: there are several steps, or the one step is of two sparse operands.
        """
        if len(self.steps) != 1 or not isinstance(self.steps[0], Step):
            raise PlanError(
                f'only an einsum that runs as a step of one sparse operand has symbolic costs, not "{self.equation}"'
            )
        return self.steps[0].cost()

    def benchmark(self, *dense: Tensor, seconds: float = 0.2) -> Timing:
        """Time calls; returns `median` seconds, quartiles `low` and `high`, and the number of `calls`.

        On a GPU it is the time of the device, with the L2 cache overwritten before each call; on a CPU it is wall
        time.

        Args:
            dense: as for a call.
            seconds: the time to spend; at least three calls are made.

        Raises:
            SparsetcError: as a call.

        Examples:
            >>> k = stc.compile("ij,j->i", stc.eye(3), torch.ones(3))
            >>> k.benchmark(torch.ones(3), seconds=0.01).calls >= 3
            True
        """
        with torch.no_grad():
            self(*dense)
            return timed([lambda: self(*dense)], self.contraction.device, seconds)[0]

    def explain(self, symbolic: bool = False) -> Any:
        """Return parts or steps, costs, and why this plan; prints as a table, ``to_dict()`` returns the same as data.

        Args:
            symbolic: return `cost` instead, which prints as formulas.
        """
        return self.cost if symbolic else self.contraction.explain()

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        where = self.path.name if self.path and len(self.operands) == 1 else f"{self.nnz:,} nonzeros"
        return f'Kernel("{self.equation}", plan {self.plan.name}, {self.backend}, {where})'


# -- operators of graphs ----------------------------------------------------------------------------------------------

operators = torch.library.Library("sparsetc", "DEF")
"""Known from the import on, so that a saved program is read; `library`, loaded at first use, has what they do."""
for _name in ("contract", "run"):  # `run` is what `contract` becomes in a graph whose gradients torch has made
    operators.define(f"{_name}(str kernel, Tensor[] tensors, int operand) -> Tensor")
_traced = later("contraction.library", "traced")
RESULT = -1
"""In place of an operand's number: the result is wanted, and no gradient, for which the result's is the last tensor."""
for _level in ("CompositeImplicitAutograd", "CompositeExplicitAutograd"):
    operators.impl("contract", torch.ops.sparsetc.run.default, _level)
operators.impl("run", torch.library.fallthrough_kernel, "Autograd")
operators.impl("run", later("contraction.library", "run"), "CompositeExplicitAutograd")
torch.library.register_fake("sparsetc::run", later("contraction.library", "shape_of_run"), lib=operators)

"""Einsums of a sharded operand: the compiler's own kernel on every rank's box, and results combined.

In: the arguments of `sparsetc.einsum` or `sparsetc.compile`, of which one operand is a `Sharded`; dense operands are
whole on every rank, or DTensors. Out: results, or a `DistributedKernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparsetc.api import compile as compile_local
from sparsetc.contraction.autograd import carry_derivatives
from sparsetc.contraction.kernel import Kernel
from sparsetc.contraction.request import check_operand
from sparsetc.distributed.cut import Cut, ranks_of
from sparsetc.distributed.ranks import Ranks, agreed, alike, on_all
from sparsetc.distributed.shard import Sharded
from sparsetc.distributed.share import Share, dense_result, sparse_result
from sparsetc.distributed.transfer import Transfer
from sparsetc.errors import DistributedError, DtypeError, EquationError, TransformError
from sparsetc.ir.equation.parse import parse, parse_arguments
from sparsetc.options import Form, of_call
from sparsetc.support import Ints
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import entry_point
from sparsetc.tensor.checksum import bits
from sparsetc.tensor.dtypes import INTEGERS
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.sparse_tensor import SparseTensor


@dataclass(frozen=True)
class Explained:
    """The explanation of a kernel on all ranks, and on this one.

    Attributes:
        placed: the modes by which the result is cut.
        sends: for each all-to-all of a call, in order, the bytes that this rank sends to others.
        local: the explanation of this rank's kernel.
    """

    equation: str
    cut: Cut
    placed: Ints
    sends: Ints
    local: Any

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to others in a call."""
        return sum(self.sends)

    def __str__(self) -> str:
        ranks = ranks_of(self.cut.size)
        sends = [f"  all-to-all over {ranks}, {n:,} bytes from this one" for n in self.sends] or ["  nothing is sent"]
        lines = [f'"{self.equation}" over {ranks}', str(self.cut), *sends, "on this rank:", str(self.local)]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class DistributedKernel:
    """An einsum of a sharded operand, compiled on every rank by `sparsetc.compile`.

    A call is collective. It neither asks whether ranks agree nor waits for a GPU (but for integers, whose sums are
    checked), so it is for loops.

    Attributes:
        share: the einsum, and how it is cut.
        kernel: this rank's kernel.
        transfers: of a dense result, or of the values of a sparse one, in order.
        wrap: makes the result of what the last of them gives.
        ranks: all ranks.
    """

    share: Share
    kernel: Kernel
    transfers: Sequence[Transfer]
    wrap: Callable[[Tensor], Tensor | Sharded]
    ranks: Ranks

    @entry_point
    def __call__(self, *dense: Any) -> Tensor | Sharded:
        """Run, on every rank, with the dense operands whole, or DTensors, as `compile` was given them; ndarrays too.

        Returns:
            A dense result as a DTensor, each rank having a part of the rows, or, as ``gather=True`` asks for, whole on
            every rank; a sparse result as a `Sharded`.

        Raises:
            ShapeError, DtypeError, EquationError: of operands that do not fit.
            TransformError: gradients were wanted, which are not followed through other ranks.
            DistributedError: another rank failed or is gone.
        """
        return self._called([_dense(_whole(o), f"dense operand {n}") for n, o in enumerate(dense, 1)])

    def _called(self, dense: Sequence[Any]) -> Tensor | Sharded:
        narrowed = self.share.narrowed(dense, self.ranks.rank)
        _refuse_gradients(dense)
        what = f'a sum of "{self.share.bound.einsum.text}"'
        if self.kernel.contraction.result_dtype in INTEGERS:  # a rank's own sums may not fit, which waits anyway
            local: Any = agreed(self.ranks, what, lambda: self.kernel(*narrowed))
        else:
            local = self.kernel(*narrowed)
        part = local.values if isinstance(local, SparseTensor) else local
        for transfer in self.transfers:
            part = transfer(part, what)
        return self.wrap(part)

    def explain(self, symbolic: bool = False) -> Explained:
        """Return the cut, the bytes that a call sends, and this rank's `Kernel.explain`; prints as a table."""
        share, itemsize = self.share, self.kernel.contraction.result_dtype.itemsize
        sends = tuple(sum(t.sent) * itemsize for t in self.transfers if t.moves)
        local = self.kernel.explain(symbolic)
        return Explained(share.bound.einsum.text, share.cut, share.placed, sends, local)

    def __repr__(self) -> str:
        return f'DistributedKernel("{self.share.bound.einsum.text}", rank {self.ranks.rank} of {self.ranks.size})'


def compiled(
    x: Sharded,
    args: tuple[Any, ...],
    *,
    output: Form,
    drop_zeros: bool,
    gather: bool = False,
    called: bool = False,
    **settings: Any,
) -> tuple[DistributedKernel, list[Tensor]]:
    """Return the kernel of an einsum (compiled, or kept with the sharded operand) and its dense operands; collective.

    What is wrong with the operands of one rank is found here, where ranks ask each other: in the call that follows the
    others would wait for it.

    Args:
        x: the sharded operand.
        args: equation and operands, as `sparsetc.einsum` takes them.
        output: as of `sparsetc.einsum`.
        drop_zeros: there is none.
        gather: give every rank the whole of a dense result; else it is a DTensor.
        called: whether all ranks must have the same values of dense operands.
        settings: as of `sparsetc.einsum`.

    Raises:
        DistributedError: ranks were given different arguments, or some of them failed.
        EquationError, ShapeError, …: all ranks failed alike.
    """
    text, operands = parse_arguments(args)
    kinds = [(tuple(getattr(o, "shape", ())), getattr(o, "dtype", type(o)), isinstance(o, DTensor)) for o in operands]
    said = {"equation": text, "operands": kinds, "gather": gather, "output": output, "drop_zeros": drop_zeros}
    said |= {"the sharded operand": (x.shape, x.cut.nnz, x.dtype)} | alike(settings)
    if any(isinstance(o, DTensor) for o in operands):  # to make it whole takes all ranks
        agreed(x.ranks, "einsum", lambda: None, said)
    at = next(n for n, o in enumerate(operands) if o is x)
    others = {n: _whole(o) for n, o in enumerate(operands) if n != at}

    def prepared() -> tuple[Share, dict[int, Tensor]]:
        if drop_zeros:
            raise DistributedError("drop_zeros=True is for tensors of one process; take it of y.gather()")
        if any(isinstance(o, Sharded | SparseTensor) for o in others.values()):
            raise EquationError(f"{text!r:.80}: a distributed einsum has one sparse operand, the sharded one")
        dense = {n: _dense(o, f"operand {n + 1}") for n, o in others.items()}
        shapes = [tuple(dense.get(n, x).shape) for n in range(len(operands))]
        share = Share(parse(text, shapes, [n == at for n in range(len(operands))]), x.cut)
        share.narrowed(list(dense.values()), x.ranks.rank)
        for n, operand in dense.items():
            if not torch.is_autocast_enabled(x.device.type):
                check_operand(operand, n, x.dtype, x.device)
        if called:
            _refuse_gradients(list(dense.values()))
        return share, dense

    def values(made: tuple[Share, dict[int, Tensor]]) -> dict[str, int]:
        return {f"the bits of operand {n + 1}": bits(o) for n, o in made[1].items() if called}

    share, by_place = agreed(x.ranks, "einsum", prepared, said, values)
    dense, key = list(by_place.values()), ("kernel", repr(said))
    return x.kept.get(key) or x.kept.put(key, _made(share, x, dense, gather, output, settings)), dense


def _whole(operand: Any) -> Any:
    """A DTensor as a tensor; collective. All else as it is."""
    return operand.full_tensor() if isinstance(operand, DTensor) else operand


def _dense(operand: Any, what: str) -> Tensor:
    """A dense tensor, of an ndarray too; DtypeError of all else."""
    tensor = as_dense(operand, what)
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise DtypeError(f"{what} must be dense, found {getattr(tensor, 'layout', type(tensor).__name__)}")
    return tensor


def _refuse_gradients(dense: Sequence[Tensor]) -> None:
    if carry_derivatives(dense):
        raise TransformError("distributed einsums have no gradients; detach operands, or use torch.no_grad()")


def _made(
    share: Share, x: Sharded, dense: list[Tensor], gather: bool, output: Form, settings: dict[str, Any]
) -> DistributedKernel:
    """Compile on every rank; collective."""

    def make(**chosen: Any) -> Kernel:
        narrowed: list[Any] = share.narrowed(dense, x.ranks.rank)
        narrowed.insert(share.position, x.as_whole(share.whole))
        kernel = compile_local(str(share.bound.einsum), *narrowed, output=output, **chosen)
        if gather and kernel.pattern is None:
            nbytes = 2 * prod(share.bound.output_shape) * kernel.contraction.result_dtype.itemsize
            what = f'the whole result of "{share.bound.einsum.text}" on every rank'
            check_memory(what, nbytes, x.device, of_call(settings).memory_limit)
        return kernel

    kernel = on_all(x.ranks, "compile", make, settings)
    contraction = kernel.contraction
    if kernel.pattern is None:
        transfers, wrap = dense_result(share, gather, x.ranks, x.device)
    else:
        values = torch.zeros(contraction.shape, dtype=contraction.result_dtype, device=x.device)
        transfers, wrap = sparse_result(share, SparseTensor._make(kernel.pattern, values), x.ranks)
    return DistributedKernel(share, kernel, transfers, wrap, x.ranks)

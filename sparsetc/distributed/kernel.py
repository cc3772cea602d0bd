"""`einsum` and `compile` of a sharded operand: the compiler's own kernel on every rank's box, and results combined.

In: an equation, a `Sharded`, and dense operands that every rank has whole. Out: results, or a `DistributedKernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from sparsetc.api import compile as compile_local
from sparsetc.contraction.autograd import carry_derivatives
from sparsetc.contraction.canonical import check_operand
from sparsetc.contraction.kernel import Kernel
from sparsetc.distributed.agree import agreed, alike, bits
from sparsetc.distributed.combine import Block, DenseResult, Send, SparseResult, sparse_result
from sparsetc.distributed.cut import Cut, ranks_of
from sparsetc.distributed.equations import compiled
from sparsetc.distributed.ranks import Ranks
from sparsetc.distributed.shard import Sharded
from sparsetc.distributed.share import Share
from sparsetc.errors import DtypeError, EquationError, TransformError
from sparsetc.ir.equation.parse import parse, parse_arguments
from sparsetc.options import of_call
from sparsetc.support.entry import entry_point
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS

Result = torch.Tensor | Block | Sharded


@dataclass(frozen=True)
class Explained:
    """How a kernel runs on all ranks, and on this one.

    Attributes:
        placed: the modes by which the result is cut.
        sends: what a call sends, in order.
        local: the explanation of this rank's kernel.
    """

    equation: str
    cut: Cut
    placed: tuple[int, ...]
    sends: tuple[Send, ...]
    result: str
    local: Any

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends in a call, at least."""
        return sum(send.nbytes for send in self.sends)

    def __str__(self) -> str:
        lines = [f'"{self.equation}" over {ranks_of(self.cut.size)}', str(self.cut)]
        lines += [f"  {send}" for send in self.sends] or ["  nothing is sent"]
        return "\n".join([*lines, f"  result: {self.result}", "on this rank:", str(self.local)])


class DistributedKernel:
    """An einsum of a sharded operand, compiled on every rank; `compile` makes one.

    A call is collective. It neither asks whether ranks agree nor waits for a GPU (but for integers, whose sums are
    checked), so it is for loops.

    Attributes:
        share: the einsum, and how it is cut.
        kernel: this rank's kernel.
        result: how results are brought together.
        ranks: all ranks.
    """

    def __init__(
        self, share: Share, kernel: Kernel, result: DenseResult | SparseResult, sharing: Ranks, ranks: Ranks
    ) -> None:
        self.share = share
        self.kernel = kernel
        self.result = result
        self.ranks = ranks
        self._sharing = sharing

    @entry_point
    def __call__(self, *dense: Any) -> Result:
        """Run, on every rank, with the dense operands whole, as `compile` was given them; ndarrays too.

        Returns:
            A dense result, the same on every rank, or this rank's `Block` of it; a sparse result as a `Sharded`.

        Raises:
            ShapeError, DtypeError, EquationError: of operands that do not fit.
            TransformError: gradients were wanted, which are not followed through other ranks.
            DistributedError: another rank failed or is gone.
        """
        return self._called(_tensors(dense, self.share.bound.einsum.dense))

    def _called(self, dense: Sequence[Any]) -> Result:
        narrowed = self.share.narrowed(dense, self.ranks.rank)
        _refuse_gradients(dense)
        what = f'a sum of "{self.share.bound.einsum.text}"'
        if self.kernel.contraction.result_dtype in INTEGERS:  # a rank's own sums may not fit, which waits anyway
            local = agreed(self.ranks, what, lambda: self.kernel(*narrowed))
        else:
            local = self.kernel(*narrowed)
        if isinstance(self.result, SparseResult):
            assert isinstance(local, SparseTensor)
            return self.result.combined(local, self._sharing, self.ranks, what)
        assert isinstance(local, torch.Tensor)
        return self.result.combined(local, self._sharing, self.ranks, what)

    def explain(self) -> Explained:
        """The cut, what a call sends, and this rank's kernel: prints as a table."""
        result = self.result
        if isinstance(result, SparseResult):
            sends, said = result.sends(), "sparse, each rank keeps its share"
        else:
            sends = result.sends(self.kernel.contraction.result_dtype)
            said = "dense, " + ("each rank keeps its block" if result.kept else "whole on every rank")
        local = self.kernel.explain()
        return Explained(self.share.bound.einsum.text, self.share.cut, self.share.placed, tuple(sends), said, local)

    def __repr__(self) -> str:
        return f'DistributedKernel("{self.share.bound.einsum.text}", rank {self.ranks.rank} of {self.ranks.size})'


@entry_point
def einsum(*args: Any, gather: bool = True, output: str = "auto", **settings: Any) -> Result:
    """Evaluate an einsum of one sharded operand and dense ones; collective.

    Args:
        args: equation and operands, as `sparsetc.einsum` takes them. One operand is `Sharded`; dense ones are whole,
            and the same, on every rank.
        gather: give every rank the whole of a dense result; else each keeps its `Block`.
        output: as of `sparsetc.einsum`.
        settings: as of `sparsetc.einsum`.

    Returns:
        As a `DistributedKernel`. The kernel is kept with the sharded operand, but ranks ask each other at each call
        whether they were given the same: loops are for `compile`.

    Raises:
        DistributedError: ranks were given different arguments, or some of them failed.
        EquationError, ShapeError, …: all ranks failed alike.
    """
    kernel, dense = _kept(args, gather, output, settings, called=True)
    return kernel._called(dense)


@entry_point
def compile(*args: Any, gather: bool = True, output: str = "auto", **settings: Any) -> DistributedKernel:
    """Plan, pack and generate on every rank, once; call the kernel often. Arguments as of `einsum`; collective."""
    return _kept(args, gather, output, settings)[0]


def _kept(
    args: tuple[Any, ...], gather: bool, output: str, settings: dict[str, Any], called: bool = False
) -> tuple[DistributedKernel, list[torch.Tensor]]:
    """A kernel, made or kept with the sharded operand, and the dense operands to call it with.

    What is wrong with the operands of one rank is found here, where ranks ask each other: in the call that follows the
    others would wait for it. Of a call (`called`) all ranks have the same values.
    """
    try:
        text, operands = parse_arguments(args)
        at = next(n for n, operand in enumerate(operands) if isinstance(operand, Sharded))
    except StopIteration:
        raise EquationError("a distributed einsum takes a Sharded operand; see sparsetc.distributed.shard") from None
    x = operands[at]
    said = {"equation": text, "operands": [_kind(o) for o in operands], "gather": gather, "output": output}
    said |= {"the sharded operand": (x.shape, x.cut.nnz, x.dtype)} | alike(settings)

    def prepared() -> tuple[Share, list[torch.Tensor]]:
        others = [n for n in range(len(operands)) if n != at]
        dense = _tensors([operands[n] for n in others], others)
        share = _share(text, operands, dense, at)
        share.narrowed(dense, x.ranks.rank)
        for n, operand in zip(others, dense, strict=True):
            if not torch.is_autocast_enabled(x.device.type):
                check_operand(operand, n, x.dtype, x.device)
        if called:
            _refuse_gradients(dense)
        return share, dense

    def values(made: tuple[Share, list[torch.Tensor]]) -> dict[str, int]:
        places = (n + (n >= at) + 1 for n in range(len(made[1])))
        return {f"the bits of operand {n}": bits(o) for n, o in zip(places, made[1], strict=True) if called}

    share, dense = agreed(x.ranks, "einsum", prepared, said, values)
    key = "kernel", repr(said)
    found = x.kept.get(key)
    if found is None:
        found = x.kept.put(key, _made(share, x, dense, gather, output, settings))
    return found, dense


def _tensors(dense: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Dense operands, ndarrays as tensors."""
    if len(dense) != len(positions):
        return list(dense)
    return [as_dense(o, f"operand {n + 1}") for o, n in zip(dense, positions, strict=True)]


def _refuse_gradients(dense: Sequence[torch.Tensor]) -> None:
    if carry_derivatives(dense):
        raise TransformError("distributed einsums have no gradients; detach operands, or use torch.no_grad()")


def _kind(operand: Any) -> Any:
    if isinstance(operand, Sharded):
        return "sharded"
    shape, dtype = getattr(operand, "shape", None), getattr(operand, "dtype", None)
    return type(operand).__name__ if shape is None else (tuple(shape), str(dtype))


def _share(text: str, operands: Sequence[Any], dense: list[Any], at: int) -> Share:
    if any(isinstance(o, Sharded | SparseTensor) for o in dense):
        raise EquationError(f"{text!r:.80}: a distributed einsum has one sparse operand, the sharded one")
    for o in dense:
        if not isinstance(o, torch.Tensor):
            raise DtypeError(f"{text!r:.80}: a dense operand must be a torch tensor, found {type(o).__name__}")
    shapes = [tuple(o.shape) for o in (*dense[:at], operands[at], *dense[at:])]
    return Share(parse(text, shapes, [n == at for n in range(len(shapes))]), operands[at].cut)


def _made(
    share: Share, x: Sharded, dense: list[torch.Tensor], gather: bool, output: str, settings: dict[str, Any]
) -> DistributedKernel:
    """Compile on every rank; collective."""
    ranks = x.ranks

    def make(**chosen: Any) -> Kernel:
        narrowed: list[Any] = share.narrowed(dense, ranks.rank)
        narrowed.insert(share.position, x.as_whole(share.whole))
        kernel = compile_local(share.text, *narrowed, output=output, **chosen)
        if gather and kernel.pattern is None:
            contraction = kernel.contraction
            nbytes = 2 * prod(share.bound.output_shape) * contraction.result_dtype.itemsize
            of_call(settings).check_memory(
                nbytes, x.device, f'the whole result of "{share.bound.einsum.text}" on every rank'
            )
        return kernel  # type: ignore[no-any-return]

    kernel = compiled(ranks, "compile", make, settings)
    sharing = ranks.divided(share.summing)
    if kernel.pattern is None:
        return DistributedKernel(share, kernel, DenseResult.of(share, not gather), sharing, ranks)
    made = kernel.contraction
    values = torch.zeros(made.shape, dtype=made.result_dtype, device=x.device)
    result = sparse_result(share, SparseTensor._make(kernel.pattern, values), sharing, ranks)
    return DistributedKernel(share, kernel, result, sharing, ranks)

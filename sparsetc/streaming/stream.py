"""Streams: einsums of a sparse operand that is larger than the device, prepared once and run chunk after chunk.

In: an equation, what is streamed, dense operands; or a file of packed chunks. Out: `Stream`, called as a `Kernel` is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from types import TracebackType
from typing import Any, NoReturn

import torch

from sparsetc.contraction.autograd import carry_derivatives
from sparsetc.contraction.canonical import dense_of_call
from sparsetc.contraction.guard import finite
from sparsetc.contraction.output import Output, Result, arranged, is_sparse, without_zeros
from sparsetc.errors import DeviceError, DtypeError, PlanError, ShapeError, TransformError
from sparsetc.io.atomic import replacing
from sparsetc.ir.plan import Plan
from sparsetc.streaming.budget import Sizes, StreamBudget, checked_streams
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import StreamCut
from sparsetc.streaming.description import Recipe, finish
from sparsetc.streaming.engine import ChunkTimes, Engine, ResultTarget
from sparsetc.streaming.file import ChunkFile, ChunkWriter
from sparsetc.streaming.store import ChunkMemory, release_pinned
from sparsetc.support import notices
from sparsetc.support.entry import entry_point, without_autocast
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator, fitted, in_order, summed_dtype

ORDERS = ("size", "given")


class Stream:
    """An einsum of a sparse operand in packed chunks, which pass through the device at each call.

    `stream_kernel` and `open_stream` make one. It holds the chunks in (pinned) host memory or has a file of them, and
    buffers on the device from its first call on; `close`, or the end of a ``with`` block, frees them. Calls from
    several threads take turns, also those of streams of the same chunks (`on`). It computes no gradients.

    Attributes:
        _there: the pattern of a sparse result, and the order of its values, on the device.
    """

    def __init__(
        self,
        recipe: Recipe,
        compiler: Compiler,
        made: StreamCut,
        store: ChunkMemory | ChunkFile,
        budget: StreamBudget,
        sizes: Sizes,
        streams: int,
        order: str,
        shown: bool | None,
        by_nonzeros: Callable[[], Stream] | None = None,
    ) -> None:
        """Take what was made; see `stream_kernel`."""
        self.recipe, self.compiler, self.cut, self.budget = recipe, compiler, made, budget
        self._sizes, self._lanes = sizes, streams
        self._store, self._shown, self._make_other = store, shown, by_nonzeros
        self._lock = store.lock  # of all streams of these chunks, which come through the same buffers
        self.order, self._ordering = ordered(made, order), order
        rows = made.window if recipe.numbered else self._rows  # all, or as many as the chunk has that has most
        programs = [compiler.generate(v, rows) for v in made.variants]
        self._engine = Engine(made.chunks, self.order, programs, made.window, compiler.target, streams)
        self._output, self._arrangement = self._arranged()
        self._by_nonzeros: Stream | None = None
        self._there: tuple[Pattern, torch.Tensor | None] | None = None

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def equation(self) -> str:
        """The einsum as written."""
        return self.recipe.equation

    @property
    def device(self) -> torch.device:
        """Where the chunks are run."""
        return self.compiler.target

    @property
    def plan(self) -> Plan | None:
        """The plan that was chosen by the first chunk; None of a tensor without nonzeros, or of a file."""
        return self.compiler.plan

    @property
    def nnz(self) -> int:
        """Nonzeros in all chunks."""
        return sum(c.nnz for c in self.cut.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, which pass through the device at each call."""
        return self.cut.nbytes

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return len(self.cut.chunks)

    @property
    def resident(self) -> bool:
        """Whether the result is kept on the device; else it is copied back in pieces, and returned on the CPU."""
        return self.budget.resident

    @property
    def device_bytes(self) -> int:
        """Bytes that a call has on the device at most: dense operands, a chunk for each stream, the result or rows."""
        held = self._sizes.dense + self._lanes * self.cut.largest
        if not self.resident:
            return held + self._lanes * self.cut.window * self._sizes.row
        return held + self._sizes.result(self._rows + self.cut.window, self.cut.copies)

    @property
    def source(self) -> str:
        """The generated programs."""
        return "\n\n".join(p.source for p in self._engine.programs)

    def __repr__(self) -> str:
        where = "resident" if self.resident else "copied back"
        return (
            f"Stream({self.equation!r}, {self.nnz:,} nonzeros in {self.chunks:,} chunks of {self.nbytes:,} bytes, on "
            f"{self.device}, result {where})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream is neither copied nor pickled: save() its chunks to a file, or take on()")

    def timeline(self) -> list[ChunkTimes]:
        """When each chunk of the last call was copied, computed and copied back; waits until they are."""
        with self._lock:
            return self._engine.times()

    # -- calls ------------------------------------------------------------------------------------------------------
    def __call__(self, *dense: Any, out: torch.Tensor | None = None) -> Result:
        """Stream all chunks through the device.

        Args:
            dense: the dense operands, in the equation's order, of the sizes that the stream was made for or broadcast
                to them; ndarrays too, on any device.
            out: a dense result's place, of its shape and dtype, on any device. It is written at the end, by one copy:
                a call that fails or is interrupted leaves it as it was.

        Returns:
            What `einsum` would: a dense tensor, or a SparseTensor. It is on the stream's device where it fits there
            (`resident`), else on the CPU.

        Raises:
            ShapeError, DtypeError, DeviceError: an operand, or `out`, that the stream is not for.
            DtypeError: integers, summed modulo 2**64, that the result's dtype cannot hold.
            IOFormatError: a file of chunks that was altered.
            TransformError: an operand requires a gradient, has a tangent, or is a batch of `torch.func.vmap`.
        """
        with self._lock:
            return self._called(dense, out)

    @entry_point
    def _called(self, dense: Sequence[Any], out: torch.Tensor | None) -> Result:
        self._check_open()
        tables, whole = self._tables(dense)
        if out is not None:
            self._check_out(out)
        if tables is None:
            found = self._other()(*whole)
        else:
            found = self._wrapped(self._run(tables))
        if out is None:
            return found
        assert isinstance(found, torch.Tensor)
        return out.copy_(found)

    def _tables(self, dense: Sequence[Any]) -> tuple[list[torch.Tensor] | None, list[torch.Tensor]]:
        """The tables that programs read, and the dense operands they are of; None where programs cannot read these."""
        c, device = self.compiler.canonical, self.device
        given = [as_dense(o, f"operand {n + 2}") for n, o in enumerate(dense)]
        if any(isinstance(d, torch.Tensor) and torch._C._functorch.is_batchedtensor(d) for d in given):
            raise TransformError(f'"{self.equation}" is streamed, which torch.func.vmap cannot batch; take stc.einsum')
        if carry_derivatives(given):
            raise TransformError(
                f'"{self.equation}" is streamed, which gives no gradients: detach() the operands, or take stc.einsum'
            )
        moved = [
            d.to(device) if isinstance(d, torch.Tensor) and d.layout == torch.strided and not d.is_meta else d
            for d in given
        ]
        own = dense_of_call(c.written, moved, self.recipe.dtype, device)
        whole = [d.expand(s) for d, s in zip(own, c.narrow.dense_shapes, strict=True)]
        with without_autocast(device):
            tables = [t.detach() for t in c.arrange(c.reduced(whole, self.compiler.settings), self.compiler.settings)]
            if self.compiler.backend == "torch":
                tables = [t.to(accumulator(self.recipe.dtype)) for t in tables]
            blind = any(v.reads_zeros for v in self.cut.variants) and not finite(tables)
        return None if blind else tables, whole

    def _run(self, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of the result, as they were summed."""
        engine, dtype = self._engine, accumulator(self.recipe.dtype)
        width, rows = self._output.width_shape, self._rows
        if not all(size for _, size in self.compiler.canonical.bound.sizes):  # nothing to sum
            return torch.zeros((rows, *width), dtype=dtype, device=self.device if self.resident else "cpu")
        engine.allocate(width, dtype, not self.resident)
        title = f"streaming {self.equation}"
        exact = in_order(self.compiler.settings.deterministic and self.compiler.backend == "torch")
        with without_autocast(self.device), exact, notices.bar(self.nbytes, title, self._shown) as at:
            if self.resident:
                copies = self.cut.copies
                room = rows + self.cut.window  # a chunk's programs see as many rows as the largest has
                sums = torch.zeros((copies, room, *width), dtype=dtype, device=self.device)
                engine.run(self._store, tables, ResultTarget(sums), at)
                return (sums.sum(0) if copies > 1 else sums[0])[:rows]
            pinned = self.device.type == "cuda"
            host = torch.zeros((rows, *width), dtype=dtype, device="cpu", pin_memory=pinned)
            firsts = torch.zeros((self.chunks, *width), dtype=dtype, device="cpu", pin_memory=pinned)
            target = ResultTarget(None, host, firsts)
            engine.run(self._store, tables, target, at)
            engine.add_firsts(target)
            return host

    def _wrapped(self, rows: torch.Tensor) -> Result:
        """The result as it is returned."""
        output, order = self._output, self._arrangement
        rows = fitted(rows, self._result_dtype, f'the result of "{self.equation}"')
        if output.pattern is not None and not self._sparse:  # a dense result that does not fit
            return self._expanded(rows, output)
        if output.pattern is None:
            return output.shaped(rows)
        if rows.device != output.pattern.device:
            if self._there is None:  # kept, so that results share it
                own = output.pattern.like(output.pattern.coords.to(rows.device), True)
                self._there = own, None if order is None else order.to(rows.device)
            pattern, places = self._there
        else:
            pattern, places = output.pattern, order
        values = rows if places is None else rows.reshape(-1).index_select(0, places)
        found = SparseTensor._make(pattern, values)
        return without_zeros(found) if self.recipe.drop_zeros else found

    def _expanded(self, rows: torch.Tensor, output: Output) -> torch.Tensor:
        """A dense result of the rows that have nonzeros."""
        assert output.pattern is not None
        rows = rows.cpu()
        number = torch.zeros(output.pattern.nnz, dtype=torch.long, device="cpu")
        for n, coords in zip(output.kept_shape, output.pattern.coords, strict=True):
            number = number * n + coords
        whole = torch.zeros((prod(output.kept_shape), *output.width_shape), dtype=rows.dtype, device="cpu")
        whole.index_copy_(0, number, rows)
        return replace(output, pattern=None).shaped(whole)

    def _check_out(self, out: torch.Tensor) -> None:
        if self._sparse:
            raise PlanError(f'"{self.equation}" has a sparse result, which out= cannot take; use output="dense"')
        shape = self.compiler.canonical.written.output_shape
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != shape or out.dtype != self._result_dtype:
            found = f"{tuple(out.shape)}, {out.dtype}" if isinstance(out, torch.Tensor) else type(out).__name__
            raise ShapeError(f"out= must be a tensor of shape {shape} and {self._result_dtype}, found {found}")
        if out.layout != torch.strided:
            raise DtypeError(f"out= must be a dense tensor, found one of layout {out.layout}")
        if out.is_meta:
            raise DeviceError("out= is on meta, where nothing can be written")
        if any(step == 0 and n > 1 for step, n in zip(out.stride(), out.shape, strict=True)):
            raise ShapeError(f"out= was expanded: elements of it share memory; its strides are {out.stride()}")
        if torch.is_grad_enabled() and out.requires_grad:
            raise TransformError("out= requires a gradient, which a stream does not give: detach() it")

    def _check_open(self) -> None:
        if self._store.closed:
            raise PlanError(f'the stream of "{self.equation}" was closed; make it again')

    def _other(self) -> Stream:
        """The stream by a plan that multiplies nonzeros alone, for dense operands that are not finite."""
        if self._by_nonzeros is None:
            if self._make_other is None:
                raise PlanError(
                    f'dense operands of "{self.equation}" hold infinities or NaN, which tiles would spread to '
                    'positions without nonzeros: make the file by plan="coo"'
                )
            self._by_nonzeros = self._make_other()
        return self._by_nonzeros

    # -- facts ------------------------------------------------------------------------------------------------------
    @property
    def _sparse(self) -> bool:
        """True if the result that was asked for is sparse."""
        canonical = self.compiler.canonical
        return is_sparse(self.recipe.output, canonical.bound.einsum, [canonical.letters])

    @property
    def _result_dtype(self) -> torch.dtype:
        dtype = self.recipe.dtype
        return summed_dtype(dtype) if self.compiler.canonical.written.einsum.plain_sum else dtype

    @property
    def _rows(self) -> int:
        """Rows of the result, as they are summed."""
        return self.cut.rows if self.recipe.numbered else self.compiler.template.output.rows

    def _arranged(self) -> tuple[Output, torch.Tensor | None]:
        """The output with the pattern of all chunks; and which element of the rows each value of a result is."""
        output = self.compiler.template.output
        if not self.recipe.numbered:
            return output, None
        coords = self.cut.coords
        if coords is None:
            coords = torch.empty((len(output.kept_shape), 0), dtype=torch.long, device="cpu")
        with lasting():
            own = replace(output, pattern=Pattern(coords, output.kept_shape, True), own=False, slot=None)
            if not self._sparse:
                return own, None
            pattern, order = arranged(own)
        return replace(own, pattern=pattern), order

    # -- others -------------------------------------------------------------------------------------------------------
    @entry_point
    def on(self, *, streams: int | None = None, order: str | None = None) -> Stream:
        """A stream of the same chunks in another order, or on other streams; when either is closed so is the other.

        Args:
            streams: as of `stream_kernel`; None for as many as this one has.
            order: ``"size"`` or ``"given"``; None for this one's.

        Raises:
            PlanError: streams or order that are none, or the stream was closed.
            OutOfMemoryError: the memory limit does not allow for a chunk for each stream.
        """
        self._check_open()
        lanes = self._lanes if streams is None else checked_streams(streams)
        lanes = lanes if self.device.type == "cuda" else 1
        made, sizes, compiler = self.cut, self._sizes, self.compiler
        window = made.window if self.recipe.numbered else None
        about = made.largest, window, self.budget.limit, lanes, self.device, self.equation
        budget = StreamBudget.opened(sizes, self._rows, made.copies, *about)
        rest = budget, sizes, lanes, order or self._ordering, self._shown, self._make_other
        return Stream(self.recipe, compiler, made, self._store, *rest)

    # -- files ------------------------------------------------------------------------------------------------------
    @entry_point
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the packed chunks to a file, from which `open_stream` streams them.

        The file is there whole or not at all: it has a temporary name until it is complete.

        Raises:
            OSError: the file cannot be written, as where the disk is full.
            PlanError: a plan with a registered format whose view depends on the nonzeros; or the stream was closed.
        """
        with self._lock:
            self._check_open()
            with replacing(path) as file:
                writer = ChunkWriter(file)
                numbers = range(self.chunks)
                with self._store.feed(self.cut.chunks, numbers, 1) as (get, release):
                    for number in numbers:
                        writer.put(get(number)[: self.cut.chunks[number].nbytes])
                        release(number, lambda: None)
                finish(writer, self.recipe, self.compiler, self.cut)

    def close(self) -> None:
        """Free the chunks and the buffers on the device, or close the file."""
        with self._lock:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._engine.close()
            self._store.close()
            self._there = None
            if self.device.type == "cuda":
                release_pinned()
            if self._by_nonzeros is not None:
                self._by_nonzeros.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def ordered(made: StreamCut, order: str) -> tuple[int, ...]:
    """The chunks by number, from most to fewest nonzeros or as they were cut."""
    if order not in ORDERS:
        raise PlanError(f'order must be "size" or "given", found {order!r:.80}')
    numbers = range(len(made.chunks))
    return tuple(sorted(numbers, key=lambda n: -made.chunks[n].nnz) if order == "size" else numbers)

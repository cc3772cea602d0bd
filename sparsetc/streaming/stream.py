"""Streams: einsums of a sparse operand that is larger than the device, prepared once and run chunk after chunk.

In: chunks that were packed, in memory or in a file, and what they are of. Out: `Stream`, called as a `Kernel` is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsetc.contraction.autograd import carry_derivatives
from sparsetc.contraction.guard import finite
from sparsetc.contraction.prepare import dense_tables
from sparsetc.contraction.request import Result, arranged, dense_of_call, is_sparse
from sparsetc.errors import DeviceError, DtypeError, PlanError, ShapeError, TransformError
from sparsetc.ir.plan import Plan
from sparsetc.streaming import contents
from sparsetc.streaming.budget import Budget, StreamOptions
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import StreamCut
from sparsetc.streaming.engine import ChunkTimes, Engine
from sparsetc.streaming.store import ChunkFile, ChunkMemory, Put
from sparsetc.support import FilePath
from sparsetc.support.entry import bar, entry_point, log_since, without_autocast
from sparsetc.tensor.dtypes import accumulator, fitted, in_order, summed_dtype
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor


class Stream:
    """An einsum of a sparse operand in packed chunks, which pass through the device at each call.

    `stream_kernel` and `open_stream` make one. It holds the chunks in (pinned) host memory or has a file of them, and
    buffers on the device from its first call on; `close`, or the end of a ``with`` block, frees them. Calls from
    several threads take turns, also those of streams of the same chunks (`on`). It computes no gradients.

    Attributes:
        equation: the einsum as written.
        device: where the chunks are run.
        order: the chunks by number, as they are run.
        resident: whether the result is kept on the device; else rows are copied back by chunks, and it is on the CPU.

    Examples:
        >>> with stc.stream_kernel("ij,j->i", stc.eye(4), torch.ones(4)) as s:
        ...     s.chunks, s(torch.ones(4)).shape
        (1, torch.Size([4]))
    """

    def __init__(
        self,
        recipe: contents.Recipe,
        compiler: Compiler,
        made: StreamCut,
        store: ChunkMemory | ChunkFile,
        budget: Budget,
        options: StreamOptions,
        by_nonzeros: Callable[[], Stream] | None = None,
    ) -> None:
        """Take what was made.

        Args:
            recipe: what is streamed.
            compiler: of the chunks.
            made: the chunks.
            store: has their bytes.
            budget: of the device.
            options: as the caller gave them.
            by_nonzeros: makes a stream by a plan that multiplies nonzeros alone.

        Raises:
            OutOfMemoryError: neither the result nor a chunk's rows of it fit beside the chunks.
        """
        self.recipe = recipe
        self.compiler = compiler
        self.cut = made
        self.options = options
        self.equation, self.device = recipe.equation, compiler.target
        self._store = store
        self._budget = budget
        self._make_other = by_nonzeros
        self._lock = store.lock  # of all streams of these chunks, which come through the same buffers
        bound, template = compiler.bound, compiler.template
        output = template.output
        rows = made.coords.shape[1] if recipe.numbered else output.rows
        self._dtype = summed_dtype(compiler.dtype) if bound.einsum.plain_sum else compiler.dtype
        self._sparse = is_sparse(recipe.output, template.bound.einsum, [compiler.problem.letters])
        self._pattern: Pattern | None = None  # of a sparse result, and the elements of rows in its order
        self._elements: Tensor | None = None
        if recipe.numbered:
            with lasting():
                output = replace(output, pattern=Pattern(made.coords, output.kept_shape, True), own=False, slot=None)
                if self._sparse:
                    self._pattern, self._elements = arranged(output)
        self._output = output
        self.resident = budget.keeps(made, rows, self._sparse or not recipe.numbered)
        numbers = range(self.chunks)
        by_size = sorted(numbers, key=lambda n: -made.chunks[n].nnz)
        self.order = tuple(by_size if options.order == "size" else numbers)
        # Programs are made for all rows, or as many as the chunk has that has most.
        programs = [compiler.generate(v, made.window if recipe.numbered else rows) for v in made.variants]
        shape, dtype = (rows, *output.width_shape), accumulator(compiler.dtype)
        streams = max(1, min(budget.streams, self.chunks))
        self._engine = Engine(made, self.order, programs, self.device, streams, shape, dtype, self.resident)
        self._by_nonzeros: Stream | None = None

    # -- what a user may look at ------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan | None:
        """The plan; None for a tensor without nonzeros, or for a file."""
        return self.compiler.plan

    @property
    def nnz(self) -> int:
        """Nonzeros in all chunks."""
        return sum(c.nnz for c in self.cut.chunks)

    @property
    def nbytes(self) -> int:
        """The bytes of all chunks, which pass through the device at each call."""
        return sum(c.nbytes for c in self.cut.chunks)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.cut.chunks)

    @property
    def device_bytes(self) -> int:
        """The most bytes on the device during a call: dense operands, a chunk a stream, the result or its rows."""
        return self._budget.bytes(self.cut, self._engine.shape[0], self.resident)

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
        """Return the times of each chunk of the last call: copy, kernel, copy back; waits for the call to end."""
        with self._lock:
            return self._engine.times()

    # -- calls ------------------------------------------------------------------------------------------------------
    @entry_point
    def __call__(self, *dense: Any, out: Tensor | None = None) -> Result:
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
            self._check_open()
            tables, whole = self._tables(dense)
            if out is not None:
                self._check(out)
            blind = any(v.reads_zeros for v in self.cut.variants) and not finite(tables)
            result: Any = self._other()(*whole) if blind else self._result(self._run(tables))
            return result if out is None else out.copy_(result)

    def _tables(self, dense: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tables that programs read, and the dense operands behind them."""
        compiler, device = self.compiler, self.device
        converted = [as_dense(o, f"operand {n + 2}") for n, o in enumerate(dense)]
        if any(isinstance(d, Tensor) and torch._C._functorch.is_batchedtensor(d) for d in converted):
            raise TransformError(f'"{self.equation}" is streamed, which torch.func.vmap cannot batch; take stc.einsum')
        if carry_derivatives(converted):
            raise TransformError(
                f'"{self.equation}" is streamed, which gives no gradients: detach() the operands, or take stc.einsum'
            )
        moved = [
            d.to(device) if isinstance(d, Tensor) and d.layout == torch.strided and not d.is_meta else d
            for d in converted
        ]
        operands = dense_of_call(compiler.bound, moved, compiler.dtype, device)
        whole = [d.expand(s) for d, s in zip(operands, compiler.bound.dense_shapes, strict=True)]
        with without_autocast(device):
            _, pulled = compiler.pull([None], whole, packed=True)
            tables = [t.detach() for t in dense_tables(pulled, compiler.problem)]
            if compiler.backend.widens:
                tables = [t.to(accumulator(compiler.dtype)) for t in tables]
        return tables, whole

    def _run(self, tables: Sequence[Tensor]) -> Tensor:
        """Run all chunks. Return the summed rows of the result."""
        engine, settings = self._engine, self.compiler.settings
        if not all(size for _, size in self.compiler.template.bound.sizes):  # nothing to sum
            return torch.zeros(engine.shape, dtype=engine.dtype, device=self.device if self.resident else "cpu")
        exact = in_order(settings.deterministic and not self.compiler.backend.atomics)
        shown = bar(self.nbytes, f"streaming {self.equation}", self.options.progress)
        start = time.perf_counter()
        with without_autocast(self.device), exact, shown as at:
            rows = engine.run(self._store, tables, at)
        log_since(start, logging.INFO, 'streamed %d bytes for "%s"', self.nbytes, self.equation)
        return rows

    def _result(self, rows: Tensor) -> Result:
        """Return the result of (rows, *dense sizes), on their device."""
        rows, output = fitted(rows, self._dtype, f'the result of "{self.equation}"'), self._output
        if self._pattern is not None:
            if self._pattern.device != rows.device:  # kept there, so that results share it
                self._pattern = self._pattern.like(self._pattern.coords.to(rows.device))
                self._elements = None if self._elements is None else self._elements.to(rows.device)
            values = rows if self._elements is None else rows.reshape(-1).index_select(0, self._elements)
            result = SparseTensor._make(self._pattern, values)
            return result.drop() if self.recipe.drop_zeros else result
        if output.pattern is None:
            return output.shaped(rows)
        # A dense result that does not fit on the device, of the rows that have nonzeros.
        whole = torch.zeros((prod(output.kept_shape), *output.width_shape), dtype=rows.dtype, device="cpu")
        whole.index_copy_(0, output.pattern.places, rows.cpu())
        return replace(output, pattern=None).shaped(whole)

    def _check(self, out: Any) -> None:
        """Raise unless a result can be written to `out`."""
        if self._sparse:
            raise PlanError(f'"{self.equation}" has a sparse result, which out= cannot take; use output="dense"')
        shape = self.compiler.bound.output_shape
        if not isinstance(out, Tensor) or (tuple(out.shape), out.dtype) != (shape, self._dtype):
            what = f"{tuple(out.shape)}, {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise ShapeError(f"out= must be a tensor of shape {shape} and {self._dtype}, found {what}")
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
        """Return the stream by a plan for stored nonzeros alone, for dense operands with infinities or NaN."""
        if self._by_nonzeros is None:
            if self._make_other is None:
                raise PlanError(
                    f'dense operands of "{self.equation}" hold infinities or NaN, which tiles would spread to '
                    'positions without nonzeros: make the file by plan="coo"'
                )
            self._by_nonzeros = self._make_other()
        return self._by_nonzeros

    # -- others -------------------------------------------------------------------------------------------------------
    @entry_point
    def on(self, *, streams: int | None = None, order: str | None = None) -> Stream:
        """Return a stream of the same chunks in another order, or on other streams; closing either closes both.

        Args:
            streams: as of `stream_kernel`; None for as many as this one has.
            order: ``"size"`` or ``"given"``; None for this one's.

        Raises:
            PlanError: streams or order is not valid, or the stream was closed.
            OutOfMemoryError: the memory limit does not allow for a chunk for each stream.
        """
        self._check_open()
        before = self.options
        options = replace(before, streams=before.streams if streams is None else streams, order=order or before.order)
        budget = replace(self._budget, streams=options.stream_count(self.device))
        return Stream(self.recipe, self.compiler, self.cut, self._store, budget, options, self._make_other)

    # -- files ------------------------------------------------------------------------------------------------------
    @entry_point
    def save(self, path: FilePath) -> None:
        """Write the packed chunks to a safetensors file, from which `open_stream` streams them.

        The file is there whole or not at all: it has a temporary name until it is complete.

        Raises:
            OSError: the file cannot be written, as where the disk is full.
            PlanError: a plan with a registered format whose view depends on the nonzeros; or the stream was closed.
        """
        with self._lock:
            self._check_open()
            buffers = self._store.feed(range(self.chunks), 1, [lambda: None] * self.chunks)

            def fill(put: Put) -> StreamCut:
                for chunk, buffer in zip(self.cut.chunks, buffers, strict=True):
                    put(buffer[: chunk.nbytes])
                return self.cut

            contents.write(path, self.recipe, self.compiler, fill)

    def close(self) -> None:
        """Free the chunks and the buffers on the device, or close the file."""
        with self._lock:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._engine.close()
            self._store.close()
            if self.device.type == "cuda":
                getattr(torch._C, "_host_emptyCache", lambda: None)()  # the pinned memory that torch keeps for later
            if self._by_nonzeros is not None:
                self._by_nonzeros.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

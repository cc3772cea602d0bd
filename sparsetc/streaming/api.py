"""The functions for streaming: `stream` for one call, `stream_kernel` for many, `open_stream` for a saved one.

In: an equation, a sparse operand in host memory or in a packed file, dense operands. Out: results, or a `Stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.request import Result, check_form, check_operand
from sparsetc.errors import DeviceError, DtypeError, EquationError, PlanError
from sparsetc.io.parquet import PackedFile
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import requested
from sparsetc.options import Options
from sparsetc.planner.registry import check_request
from sparsetc.streaming import contents
from sparsetc.streaming.budget import Budget, StreamOptions, named_device
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import Operand, cut, operand, taken_by
from sparsetc.streaming.store import ChunkFile, ChunkMemory
from sparsetc.streaming.stream import Stream
from sparsetc.support import FilePath
from sparsetc.support.entry import bar, entry_point
from sparsetc.tensor.dtypes import dtype_name
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.sparse_tensor import SparseTensor

WHEN_OPENED = ("streams", "order", "device", "progress", "memory_limit", "cache_dir", "backend", "deterministic")
"""Options that a stream of saved chunks takes."""


@entry_point
def stream(equation: str, x: Any, *dense: Any, out: Tensor | None = None, **options: Any) -> Result:
    """Evaluate an einsum of a sparse operand larger than the device's memory, chunk by chunk.

    The result is that of `einsum`, up to the order of sums: an einsum is linear in its sparse operand, so the results
    of chunks of it add up. To call it often, make a `Stream` by `stream_kernel`, which packs once.

    Args:
        equation: as `einsum` takes it; its first term is that of ``x``.
        x: a SparseTensor (or what `einsum` takes for one) in host memory, an open packed file (`open_packed`), or the
            path of one (``.parquet``), which is read in blocks.
        dense: the dense operands, of x's dtype, on any device; ndarrays too.
        out: a dense result's place; written at the end, by one copy.
        options: as of `stream_kernel`.

    Returns:
        What `einsum` would: on the device where the result fits there, else on the CPU.

    Raises:
        EquationError, ShapeError, DtypeError, DeviceError, PlanError, OutOfMemoryError: before any chunk runs.

    Examples:
        >>> stc.stream("ij,j->i", stc.eye(4), torch.ones(4), chunk_bytes="1MiB").tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    with stream_kernel(equation, x, *dense, **options) as kernel:
        return kernel(*dense, out=out)


@entry_point
def stream_kernel(equation: str, x: Any, *dense: Any, **options: Any) -> Stream:
    """Cut a sparse operand into chunks and pack them. Return a `Stream` that runs them through the device at each call.

    Chunks are packed by one plan, chosen for the first of them. They lie in pinned host memory (plain memory without
    CUDA), or in a file. The device never has more than ``memory_limit=`` of dense operands, result, and a chunk for
    each stream. Where the result does not fit beside these it is copied back chunk by chunk: chunks are then cut in the
    order of its rows, so that no row but a chunk's first and last is another chunk's.

    Args:
        equation: as `stream` takes it.
        x: as `stream` takes it.
        dense: the dense operands, of which only sizes and dtypes are looked at.
        options: ``chunk_bytes="64MiB"``, ``streams=2``, ``order="size"`` or ``"given"``, ``device=``, ``file=``,
            ``packed_on=``, ``output="auto"``, ``drop_zeros=False`` and ``progress=None``, as `StreamOptions` describes
            them; ``plan=``, ``precision=``, ``memory_limit=``, ``cache_dir=``, ``backend=``: as in `options`.

    Returns:
        A `Stream`, to be called with the dense operands.

    Raises:
        PlanError: chunk_bytes, streams or order is not valid, a plan does not apply, or ``deterministic=True`` on a
            GPU, where chunks add by atomics.
        OutOfMemoryError: dense operands, result and the smallest chunks do not fit; with their sizes.
        EquationError, ShapeError, DtypeError, DeviceError: operands that the equation does not fit.
        IOFormatError: a packed file that is damaged.

    Examples:
        >>> with stc.stream_kernel("ij,j->i", stc.eye(4), torch.ones(4)) as s:
        ...     s(torch.full((4,), 2.0)).tolist()
        [2.0, 2.0, 2.0, 2.0]
    """
    chosen, settings = StreamOptions.of_call(options)
    with ExitStack() as held:
        tensor = operand(x)
        if isinstance(tensor, PackedFile) and tensor is not x:
            held.enter_context(tensor)
        bound = _bound(equation, tensor, dense)
        target = chosen.target([*dense, x])
        check_form(chosen.output, bound.einsum)
        compiler = Compiler(bound, tensor.dtype, settings, chosen.output, target)
        _check_order(settings, compiler)
        check_request(requested(settings.plan))  # of which chunks ask, where there are any
        form = compiler.template.output
        budget = Budget.of(compiler, settings.memory_on(target), chosen.stream_count(target), chosen.drop_zeros)
        dense_rows = None if form.sparse else form.rows
        nbytes, rows = budget.cut(dense_rows, chosen.chunk, bool(form.kept_shape))
        kept = None
        if rows is not None:
            compiler = Compiler(bound, tensor.dtype, settings, "sparse", target)
            modes, problem = bound.einsum.inputs[0], compiler.problem
            kept = [modes.index(problem.letters[m]) for m in problem.kept]  # of a repeated letter the first
        else:
            compiler.copies = budget.copies(form.rows, nbytes)
        shapes = tuple(tuple(bound.shape(p)) for p in range(len(bound.einsum.inputs)))
        recipe = contents.Recipe(
            bound.einsum.text,
            shapes,
            dtype_name(tensor.dtype),
            settings.effective_precision(),
            compiler.backend.name,
            chosen.output,
            rows is not None,
            chosen.drop_zeros,
        )
        where = target if settings.memory_limit is None else torch.device("cpu")
        if chosen.packed_on is not None:
            where = named_device(chosen.packed_on)
        source, take = taken_by(tensor, kept)
        pinned = target.type == "cuda"
        store: ChunkMemory | ChunkFile
        with bar(source.nnz, f"packing {equation}", chosen.progress, "nonzeros") as at:
            packed = partial(cut, source, take, compiler, (nbytes, rows), where, at)
            if chosen.file is None:
                store = ChunkMemory()
                stream_cut = packed(store.buffers.append, pinned)
            else:
                contents.write(chosen.file, recipe, compiler, packed)
                store = ChunkFile(chosen.file, pinned, contents.parsed)
                stream_cut = contents.read(store, compiler)
    again = None
    if any(variant.reads_zeros for variant in stream_cut.variants):  # else the operands need not be kept
        changed = {"file": None, "device": target, "plan": "coo"}
        again = partial(stream_kernel, equation, x, *dense, **{**options, **vars(settings), **changed})
    return Stream(recipe, compiler, stream_cut, store, budget, chosen, again)


@entry_point
def open_stream(path: FilePath, **options: Any) -> Stream:
    """Open a file of packed chunks, as `Stream.save` or ``stream_kernel(file=)`` wrote it; nothing is packed.

    Each call reads the chunks by several threads into buffers that the device copies from. When a chunk is read for the
    first time, it is compared with its checksum, and its indices are checked: programs read nothing outside of it.

    Args:
        path: of the file.
        options: ``streams=``, ``order=``, ``device=``, ``progress=``, ``memory_limit=`` and ``cache_dir=`` as of
            `stream_kernel`. The device is of the kind that the chunks were packed for; other options are those of then.

    Raises:
        PlanError: streams or order is not valid, an option that was fixed when the chunks were packed, or
            ``deterministic=True`` on a GPU.
        IOFormatError: no such file, or one that is truncated, altered, or of another version.
        DeviceError: the chunks were packed for another kind of device, or there is no such device.
        OutOfMemoryError: dense operands, a row of the result and the chunks do not fit; with their sizes.
        FileNotFoundError: no file.

    Examples:
        >>> stc.stream_kernel("ij,j->i", stc.eye(4), torch.ones(4), file="chunks").close()
        >>> with stc.open_stream("chunks") as s:
        ...     s(torch.ones(4)).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    chosen, settings = StreamOptions.of_call(options)
    if fixed := [name for name, value in options.items() if name not in WHEN_OPENED and value is not None]:
        raise PlanError(f"{fixed[0]}= is as it was when the chunks were packed; pack them again for another")
    target = chosen.target(())
    file = ChunkFile(path, target.type == "cuda", contents.parsed)
    try:
        recipe, compiler = contents.einsum(file, settings, target)
        if compiler.backend.name != recipe.backend:
            raise DeviceError(f"{file.path}: chunks packed for {recipe.backend}, {target} runs {compiler.backend.name}")
        _check_order(settings, compiler)
        stream_cut = contents.read(file, compiler)
        budget = Budget.of(compiler, settings.memory_on(target), chosen.stream_count(target), recipe.drop_zeros)
        return Stream(recipe, compiler, stream_cut, file, budget, chosen)
    except BaseException:
        file.close()
        raise


def _bound(equation: str, x: Operand, dense: Sequence[Any]) -> Bound:
    """Return the einsum of these operands, checked except for the devices of dense ones."""
    if x.dtype == torch.bool:
        raise DtypeError(
            "the sparse operand is of bools, which are not multiplied: stream .to(torch.float32) of a tensor, or pack "
            "a file with dtype=torch.float32"
        )
    operands = [as_dense(o, f"operand {n + 2}") for n, o in enumerate(dense)]
    for n, o in enumerate(operands):
        if not isinstance(o, Tensor) or o.layout != torch.strided:
            if SparseTensor.coerce(o) is not None:
                raise EquationError(f"a stream takes one sparse operand, its first; operand {n + 2} is sparse too")
            raise DtypeError(f"operand {n + 2} must be a torch tensor, found {type(o).__name__}")
        if o.is_meta or not torch.is_autocast_enabled(o.device.type):  # torch asks no autocast of meta
            check_operand(o, n + 1, x.dtype, o.device)
    return parse(equation, [tuple(x.shape), *(tuple(o.shape) for o in operands)], [True] + [False] * len(operands))


def _check_order(settings: Options, compiler: Compiler) -> None:
    """Raise `PlanError` where sums would have to come in an order that they do not."""
    if settings.deterministic and compiler.problem.ordered:
        raise PlanError(
            f'"{compiler.bound.einsum.text}": chunks add to the result by atomics, in no order, which is not '
            "deterministic; stream on the CPU (device=), or without deterministic=True"
        )

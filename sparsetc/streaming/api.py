"""What a user calls to stream: `stream` once, `stream_kernel` to call often, `open_stream` for what was saved.

In: an equation, a sparse operand in host memory or in a packed file, dense operands. Out: results, or a `Stream`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from sparsetc.contraction.canonical import check_operand
from sparsetc.contraction.output import Result, check_form
from sparsetc.errors import DeviceError, DtypeError, EquationError, PlanError
from sparsetc.io.atomic import replacing
from sparsetc.io.stc import PackedFile
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.equation.parse import parse
from sparsetc.options import Options, of_call, with_settings
from sparsetc.planner.registry import check_request
from sparsetc.streaming.budget import Sizes, StreamBudget, checked_chunk, checked_streams
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import StreamCut, cut
from sparsetc.streaming.description import Recipe, cut_of, finish
from sparsetc.streaming.file import ChunkFile, ChunkWriter
from sparsetc.streaming.sources import Source, operand, source_of
from sparsetc.streaming.store import ChunkMemory
from sparsetc.streaming.stream import ORDERS, Stream
from sparsetc.support import notices
from sparsetc.support.entry import entry_point
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.sparse_tensor import SparseTensor


def device_of(device: Any, dense: Sequence[Any], x: Any) -> torch.device:
    """Where chunks are run: as asked for, where an operand is that is on a GPU, or on the GPU that there is.

    Raises:
        DeviceError: what was asked for is no device, none that chunks are run on, or not there.
    """
    if device is not None:
        found = _named(device)
    else:
        own = [o.device for o in (*dense, x) if isinstance(o, torch.Tensor | SparseTensor)]
        gpu = next((d for d in own if d.type == "cuda"), None)
        found = gpu or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _named(device: Any) -> torch.device:
    """The CPU or a GPU that there is, of what a caller calls it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"chunks are streamed to the CPU or a CUDA device, found {device!r:.80}") from None
    if found.type not in ("cpu", "cuda"):
        raise DeviceError(f"chunks are streamed to the CPU or a CUDA device, found {found}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"there is no device {found}; torch sees {torch.cuda.device_count()} CUDA devices")
    return found if found.type == "cuda" else torch.device("cpu")  # "cpu:0" is the same, and compares as another


@entry_point
def stream(equation: str, x: Any, *dense: Any, out: torch.Tensor | None = None, **arguments: Any) -> Result:
    """Evaluate an einsum of one sparse operand that is larger than the device, in chunks that pass through it.

    The result is that of `einsum`, up to the order of sums: an einsum is linear in its sparse operand, so the results
    of chunks of it add up. To call it often, make a `Stream` by `stream_kernel`, which packs once.

    Args:
        equation: as `einsum` takes it; its first term is that of ``x``.
        x: a SparseTensor (or what `einsum` takes for one) in host memory, an open packed file (`open_packed`), or the
            path of one (``.stc``), which is read in blocks.
        dense: the dense operands, of x's dtype, on any device; ndarrays too.
        out: a dense result's place; written at the end, by one copy.
        arguments: as of `stream_kernel`: ``chunk_bytes=``, ``streams=``, ``order=``, ``device=``, ``progress=``,
            ``output=``, ``drop_zeros=``, and ``plan=``, ``precision=``, ``memory_limit=`` and the other settings.

    Returns:
        What `einsum` would: on the device where the result fits there, else on the CPU.

    Raises:
        EquationError, ShapeError, DtypeError, DeviceError, PlanError, OutOfMemoryError: before any chunk runs.
    """
    with stream_kernel(equation, x, *dense, **arguments) as made:
        return made(*dense, out=out)


@entry_point
def stream_kernel(
    equation: str,
    x: Any,
    *dense: Any,
    chunk_bytes: int | str | None = None,
    streams: int | None = None,
    order: str = "size",
    device: torch.device | str | None = None,
    file: str | os.PathLike[str] | None = None,
    packed_on: torch.device | str | None = None,
    output: str = "auto",
    drop_zeros: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Stream:
    """Cut a sparse operand into chunks, pack them, and give what streams them through the device at each call.

    Chunks are packed by one plan, chosen for the first of them. They lie in pinned host memory (plain memory without
    CUDA), or in a file. The device never has more than ``memory_limit=`` of dense operands, result, and a chunk for
    each stream. Where the result does not fit beside these it is copied back in pieces: chunks are then cut in the
    order of its rows, so that no row but a chunk's first and last is another chunk's.

    Args:
        equation: as `stream` takes it.
        x: as `stream` takes it.
        dense: the dense operands, of which only sizes and dtypes are looked at.
        chunk_bytes: most bytes of a chunk, a number or text as in ``"64MiB"``, which is the default; fewer are taken
            where memory is short.
        streams: CUDA streams, each with a chunk of its own on the device; 2 by default. With one nothing overlaps.
            Ignored on the CPU.
        order: ``"size"`` runs chunks from most to fewest nonzeros (Chen et al., SpTV), ``"given"`` as they were cut.
        device: where chunks are run; by default the GPU of a dense operand, or the one that there is, or the CPU.
        file: write the packed chunks to this path as they are packed, and stream them from there: for tensors that are
            larger than the host's memory too. It is a file of `Stream.save`, and stays.
        packed_on: the device that packs chunks; by default the one that runs them, or, where ``memory_limit=`` is
            given, the CPU: packing takes more memory than running does.
        output: as of `einsum`.
        drop_zeros: as of `einsum`.
        progress: a bar on stderr: None for long work when stderr is a terminal, True always, False never.
        settings: ``plan=``, ``precision=``, ``memory_limit=``, ``cache_dir=``, ``backend=``: as in `options`.

    Returns:
        A `Stream`, to be called with the dense operands.

    Raises:
        PlanError: chunk_bytes, streams or order that are none, a plan that does not apply, or ``deterministic=True`` on
            a GPU, where chunks add by atomics.
        OutOfMemoryError: dense operands, result and the smallest chunks do not fit; with their sizes.
        EquationError, ShapeError, DtypeError, DeviceError: operands that the equation does not fit.
        IOFormatError: a packed file that is damaged.
    """
    most, lanes = checked_chunk(chunk_bytes), checked_streams(streams)
    if order not in ORDERS:
        raise PlanError(f'order must be "size" or "given", found {order!r:.80}')
    own = of_call(settings)
    own = replace(own, precision=own.effective_precision())
    with ExitStack() as held:
        given = operand(x)
        if isinstance(given, PackedFile) and given is not x:
            held.enter_context(given)
        bound = _bound(equation, given, dense)
        target = device_of(device, dense, x)
        whole = Compiler(bound, given.dtype, own, output, target)
        check_form(output, bound.einsum)
        _check_order(own, whole)
        check_request(own.plan)  # of which chunks ask, where there are any
        lanes = lanes if target.type == "cuda" else 1
        form, sizes = whole.template.output, Sizes.of(whole, lanes, drop_zeros)
        budget = StreamBudget.of(sizes, form, given.nnz, own.memory_on(target), lanes, most, target, bound.einsum.text)
        numbered = form.sparse or not budget.resident
        shapes = tuple(tuple(bound.shape(p)) for p in range(len(bound.einsum.inputs)))
        about = bound.einsum.text, shapes, given.dtype, own.effective_precision(), whole.backend
        recipe = Recipe(*about, output, numbered, drop_zeros)
        compiler = Compiler(bound, given.dtype, own, "sparse", target) if numbered else whole
        compiler.copies = 1 if numbered else budget.copies(sizes, form.rows, lanes)
        where = target if own.memory_limit is None else torch.device("cpu")
        if packed_on is not None:
            where = device_of(packed_on, (), None)
        source = source_of(given, _kept(compiler) if numbered else None)
        with notices.bar(source.nnz, f"packing {equation}", progress, "nonzeros") as at:
            found, store = _packed(source, compiler, budget, recipe, file, where, at)
        if form.sparse:
            budget = budget.known(sizes, found.rows + found.window, found.largest, lanes)
    again: Callable[[], Stream] | None = None
    if any(v.reads_zeros for v in found.variants):

        def again() -> Stream:
            return stream_kernel(  # type: ignore[no-any-return]
                equation,
                x,
                *dense,
                chunk_bytes=chunk_bytes,
                streams=streams,
                order=order,
                device=target,
                packed_on=packed_on,
                output=output,
                drop_zeros=drop_zeros,
                progress=progress,
                **{**settings, "plan": "coo"},
            )

    return Stream(recipe, compiler, found, store, budget, sizes, lanes, order, progress, again)


@entry_point
def open_stream(
    path: str | os.PathLike[str],
    *,
    streams: int | None = None,
    order: str = "size",
    device: torch.device | str | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Stream:
    """Open a file of packed chunks, as `Stream.save` or ``stream_kernel(file=)`` wrote it; nothing is packed.

    Chunks are read at each call, by several threads, into the buffers that the device copies from. When they are read
    first they are compared with their checksums, and their numbers with what the programs may read.

    Args:
        path: of the file.
        streams: as of `stream_kernel`.
        order: as of `stream_kernel`.
        device: as of `stream_kernel`; a GPU runs only what was packed for one.
        progress: as of `stream_kernel`.
        settings: ``memory_limit=`` and ``cache_dir=``; all else is as it was when the chunks were packed.

    Raises:
        PlanError: streams or order that are none, ``plan=`` or ``precision=``, or ``deterministic=True`` on a GPU.
        IOFormatError: no such file, or one that is truncated, altered, or of another version.
        DeviceError: the chunks were packed for another kind of device, or there is no such device.
        OutOfMemoryError: dense operands, a row of the result and the chunks do not fit; with their sizes.
        FileNotFoundError: no file.
    """
    lanes = checked_streams(streams)
    if order not in ORDERS:
        raise PlanError(f'order must be "size" or "given", found {order!r:.80}')
    given = of_call(settings)
    if fixed := [name for name in ("plan", "precision") if settings.get(name) is not None]:
        raise PlanError(f"{fixed[0]}= is as it was when the chunks were packed; pack them again for another")
    target = device_of(device, (), None)
    lanes = lanes if target.type == "cuda" else 1
    file = ChunkFile(path, target.type == "cuda")
    try:
        recipe, own, compiler = _described(file, given, target)
        if compiler.backend != recipe.backend:
            raise DeviceError(f"{file.path}: chunks packed for {recipe.backend}, {target} runs {compiler.backend}")
        _check_order(own, compiler)
        found = cut_of(file, compiler)
        sizes = Sizes.of(compiler, lanes, recipe.drop_zeros)
        rows = found.rows if recipe.numbered else compiler.template.output.rows
        limit, window = own.memory_on(target), found.window if recipe.numbered else None
        budget = StreamBudget.opened(
            sizes, rows, found.copies, found.largest, window, limit, lanes, target, recipe.equation
        )
        return Stream(recipe, compiler, found, file, budget, sizes, lanes, order, progress)
    except BaseException:
        file.close()
        raise


def _bound(equation: str, x: SparseTensor | PackedFile | Source, dense: Sequence[Any]) -> Bound:
    """The einsum of these operands, checked but for where dense ones lie."""
    given = [as_dense(o, f"operand {n + 2}") for n, o in enumerate(dense)]
    for n, o in enumerate(given):
        if not isinstance(o, torch.Tensor) or o.layout != torch.strided:
            if SparseTensor.coerce(o) is not None:
                raise EquationError(f"a stream takes one sparse operand, its first; operand {n + 2} is sparse too")
            raise DtypeError(f"operand {n + 2} must be a torch tensor, found {type(o).__name__}")
        if o.is_meta or not torch.is_autocast_enabled(o.device.type):  # torch asks no autocast of meta
            check_operand(o, n + 1, x.dtype, o.device)
    return parse(equation, [tuple(x.shape), *(tuple(o.shape) for o in given)], [True] + [False] * len(given))


def _check_order(settings: Options, compiler: Compiler) -> None:
    """Raise `PlanError` where sums would have to come in an order that they do not."""
    if settings.deterministic and compiler.template.problem.ordered:
        raise PlanError(
            f'"{compiler.bound.einsum.text}": chunks add to the result by atomics, in no order, which is not '
            "deterministic; stream on the CPU (device=), or without deterministic=True"
        )


def _kept(compiler: Compiler) -> list[int]:
    """The modes of what is streamed that the result keeps, in its order; of a repeated letter the first."""
    modes, letters = compiler.bound.einsum.inputs[0], compiler.canonical.letters
    return [modes.index(letters[m]) for m in compiler.canonical.kept]


def _described(file: ChunkFile, settings: Options, target: torch.device) -> tuple[Recipe, Options, Compiler]:
    """The einsum that a file is of."""
    try:
        recipe = Recipe.of(file.description["recipe"])
        own = with_settings(settings, {"precision": recipe.precision})
        bound = parse(recipe.equation, recipe.shapes, [True] + [False] * (len(recipe.shapes) - 1))
        check_form(recipe.output, bound.einsum)
        compiler = Compiler(bound, recipe.dtype, own, "sparse" if recipe.numbered else recipe.output, target)
        check_form(compiler.form, compiler.canonical.bound.einsum)
    except (KeyError, TypeError, ValueError) as error:
        raise file.fault(f"its description has no einsum ({error})") from None
    return recipe, own, compiler


def _packed(
    source: Source,
    compiler: Compiler,
    budget: StreamBudget,
    recipe: Recipe,
    file: str | os.PathLike[str] | None,
    where: torch.device,
    at: notices.At,
) -> tuple[StreamCut, ChunkMemory | ChunkFile]:
    """The chunks, in memory or in a file; after an exception neither has anything of them."""
    pinned = compiler.target.type == "cuda"
    if file is None:
        memory = ChunkMemory(pinned)
        return cut(source, compiler, budget, memory, where, at), memory
    with replacing(file) as opened:
        writer = ChunkWriter(opened)
        found = cut(source, compiler, budget, writer, where, at)
        finish(writer, recipe, compiler, found)
    return found, ChunkFile(file, pinned)

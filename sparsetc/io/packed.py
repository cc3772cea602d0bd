"""Writing packed files: row groups of sorted nonzeros in Parquet, and metadata with the shape and dtype.

In: nonzeros in order. Out: a file, as `docs/guides/packed_files.md` describes it. The columns and the metadata that a
reader expects are here too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import ShapeError
from sparsetc.io import bounds
from sparsetc.io.atomic import replacing
from sparsetc.support import FilePath, Ints
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import NAMED, SUMMED_IN, dtype_name, resolved
from sparsetc.tensor.pattern import Labels
from sparsetc.tensor.sparse_tensor import SparseTensor

KEY = b"sparsetc"
LABELS = b"sparsetc.labels"
VERSION = 1
"""The names of the JSON with shape and dtype and of that with labels, beside the schema, and the version."""
NUMBERS = 1 << 20
"""Coordinates and values of a row group that is written, together."""
INT32_SIZES = 2**31
"""Sizes up to which coordinates are int32."""

Batch = tuple[Sequence[Tensor], Tensor]
"""Int64 coordinates, (n,) a mode, and (n,) values."""


def library() -> Any:
    """The module pyarrow, and in it `pyarrow.parquet`."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('.parquet files need pyarrow: pip install "sparsetc[files]"') from error
    return pyarrow


def write(path: FilePath, x: SparseTensor) -> None:
    """Write all nonzeros of ``x``, sorted, with duplicates summed; dense modes become coordinates.

    The old file, if any, stays until the new one is complete.
    """
    x = x.expand_dense().coalesce().to("cpu")
    rows, values = row_group(x.order), x.values.detach()
    groups = ((list(x.coords[:, at : at + rows]), values[at : at + rows]) for at in range(0, x.nnz, rows))
    with replacing(path) as file:
        append(file, x.shape, x.dtype, groups, x.labels)


def append(
    file: Any, shape: Sequence[int], dtype: torch.dtype, batches: Iterable[Batch], labels: Labels | None = None
) -> None:
    """A packed file of batches of nonzeros that are in order and unique; each becomes a row group."""
    arrow, schema = library(), schema_of(shape, dtype)
    order, kinds = len(shape), [kind.to_pandas_dtype() for kind in schema.types]
    options = {
        "compression": "zstd",
        "use_dictionary": schema.names[order:],
        "column_encoding": dict.fromkeys(schema.names[:order], "DELTA_BINARY_PACKED"),
        "sorting_columns": [arrow.parquet.SortingColumn(mode) for mode in range(order)],
    }
    with arrow.parquet.ParquetWriter(file, schema, write_page_checksum=True, store_schema=False, **options) as writer:
        for coords, values in batches:
            plain = resolved(values).contiguous().to(SUMMED_IN.get(dtype, dtype))
            arrays = [*(column.numpy() for column in coords), *columns(plain)]
            arrow_columns = [arrow.array(array.astype(kind)) for array, kind in zip(arrays, kinds, strict=True)]
            writer.write_table(arrow.Table.from_arrays(arrow_columns, schema=schema), len(values))
        about = {"version": VERSION, "shape": list(shape), "order": order, "dtype": dtype_name(dtype)}
        writer.add_key_value_metadata({KEY: json.dumps({**about, "crc": _crc(about)})})
        if labels:
            lists = [[name, None if of is None else of.tolist()] for name, of in labels.items()]
            writer.add_key_value_metadata({LABELS: json.dumps(lists)})


def row_group(order: int) -> int:
    """Nonzeros of a row group that is written."""
    return NUMBERS // (order + 1)


def columns(values: Tensor) -> list[np.ndarray]:
    """Return values as stored columns, which share their memory; complex values are two columns."""
    parts = torch.view_as_real(values).unbind(1) if values.is_complex() else (values,)
    return [part.numpy() for part in parts]


def schema_of(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Names and types of the columns; bfloat16 and float16, exact in float32, are stored as that."""
    arrow = library()
    kind = str(np.empty(0, torch.empty(0, dtype=SUMMED_IN.get(dtype, dtype), device="cpu").numpy().dtype).real.dtype)
    indices = [(f"i{mode}", "int32" if size <= INT32_SIZES else "int64") for mode, size in enumerate(shape)]
    values = [(name, kind) for name in (("real", "imag") if dtype.is_complex else ("value",))]
    return arrow.schema([arrow.field(name, arrow.type_for_alias(kind), False) for name, kind in indices + values])


def header_of(metadata: dict[bytes, bytes] | None) -> tuple[Ints, torch.dtype]:
    """Return (shape, dtype) from a file's metadata. Raise ValueError if no writer of packed files wrote it."""
    text = (metadata or {}).get(KEY)
    if text is None:
        raise ValueError("not of a packed file; to read or pack another, name its columns=(*coordinates, value)")
    try:
        said = json.loads(text[:4096])
        crc = said.pop("crc")
        version = said["version"]
        shape = crd.checked_shape(said["shape"])
        dtype = NAMED[said["dtype"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("no shape and dtype of a tensor") from None
    if version != VERSION:
        raise ValueError(f"version {version!s:.20} of the format; this is version {VERSION}")
    if crc != _crc(said):
        raise ValueError("its shape and dtype are damaged, their checksum is another")
    if not 1 <= len(shape) <= bounds.ORDER:
        raise ShapeError(f"a tensor of {len(shape)} modes; a file holds 1 to {bounds.ORDER}")
    return shape, dtype


def _crc(about: dict[str, Any]) -> int:
    """Return a checksum of the metadata beside the schema, which no page checksum covers."""
    return zlib.crc32(json.dumps(about).encode())

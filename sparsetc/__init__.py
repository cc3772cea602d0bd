"""sparsetc: a sparse tensor compiler for PyTorch. Write an einsum with a sparse operand; get the kernel for it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsetc import formats as formats  # which are registered there
from sparsetc import pairwise_ops as pairwise_ops  # operators of saved programs
from sparsetc import restore as restore  # makes pickles known
from sparsetc.api import (
    OPERATIONS,
    CacheInfo,
    cache_info,
    clear_cache,
    compile,
    compile_many,
    einsum,
    explain,
    register_op,
)
from sparsetc.contraction.kernel import Kernel
from sparsetc.errors import (
    CoordinateError,
    DecompositionError,
    DeviceError,
    DistributedError,
    DtypeError,
    EquationError,
    FormatError,
    IOFormatError,
    KeywordError,
    OutOfMemoryError,
    PlanError,
    ShapeError,
    SparsetcError,
    TransformError,
)
from sparsetc.ops import contract, min_plus, mttkrp, sddmm, spmm, ttm, ttmc, ttv
from sparsetc.options import options, set_options
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc import datasets, decomposition, distributed, masks, nn, plans, plot, testing
    from sparsetc.calibration import calibrate
    from sparsetc.io import PackedFile, open_packed, pack, read, write
    from sparsetc.linear import solve
    from sparsetc.mapping import map_entries
    from sparsetc.sparse_attention import attention
    from sparsetc.streaming import Stream, open_stream, stream_kernel
    from sparsetc.streaming.api import stream
    from sparsetc.tensor.creation import block_diag, cat, eye, full, kron, rand, randn, stack, where, zeros
    from sparsetc.tensor.softmax import log_softmax, softmax

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022
    # tensors and their patterns
    "SparseTensor",
    "Pattern",
    "block_diag",
    "cat",
    "eye",
    "full",
    "kron",
    "rand",
    "randn",
    "stack",
    "where",
    "zeros",
    # einsums and their kernels
    "einsum",
    "compile",
    "compile_many",
    "explain",
    "Kernel",
    "register_op",
    "OPERATIONS",
    # operations by name
    "attention",
    "contract",
    "log_softmax",
    "map_entries",
    "min_plus",
    "mttkrp",
    "sddmm",
    "softmax",
    "solve",
    "spmm",
    "ttm",
    "ttmc",
    "ttv",
    # settings, caches and devices
    "options",
    "set_options",
    "calibrate",
    "cache_info",
    "clear_cache",
    "CacheInfo",
    # files and streams
    "read",
    "write",
    "pack",
    "open_packed",
    "PackedFile",
    "stream",
    "stream_kernel",
    "open_stream",
    "Stream",
    # modules
    "datasets",
    "decomposition",
    "distributed",
    "masks",
    "nn",
    "plans",
    "plot",
    "testing",
    # errors
    "SparsetcError",
    "CoordinateError",
    "DecompositionError",
    "DeviceError",
    "DistributedError",
    "DtypeError",
    "EquationError",
    "FormatError",
    "IOFormatError",
    "KeywordError",
    "OutOfMemoryError",
    "PlanError",
    "ShapeError",
    "TransformError",
]

_ON_DEMAND = {
    **dict.fromkeys(("PackedFile", "open_packed", "pack", "read", "write"), "io"),
    **dict.fromkeys(("Stream", "open_stream", "stream", "stream_kernel"), "streaming"),
    **dict.fromkeys(("log_softmax", "softmax"), "tensor.softmax"),
    **dict.fromkeys(
        ("block_diag", "cat", "eye", "full", "kron", "rand", "randn", "stack", "where", "zeros"), "tensor.creation"
    ),
    "attention": "sparse_attention",
    "map_entries": "mapping",
    "calibrate": "calibration",
    "solve": "linear",
    **dict.fromkeys(("datasets", "decomposition", "distributed", "masks", "nn", "plans", "plot", "testing"), ""),
}
"""Names that are imported when they are first asked for, each with its module; a module has none."""

if not TYPE_CHECKING:  # else type checkers take every name for one of the package's

    def __getattr__(name: str) -> Any:
        if name in _ON_DEMAND:
            module = import_module(f"{__name__}.{_ON_DEMAND[name] or name}")
            return globals().setdefault(name, getattr(module, name) if _ON_DEMAND[name] else module)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

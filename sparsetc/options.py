"""`options`: settings made once instead of at every call, by a context manager that is safe between threads.

In: keyword arguments. Out: an `Options` record read where a plan is made. Environment variables give the defaults of
three of them: ``SPARSETC_CACHE_DIR``, ``SPARSETC_BACKEND`` and ``SPARSETC_TUNE``.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from typing_extensions import ReadOnly, Required, TypedDict, Unpack

from sparsetc.backends import BACKENDS, TORCH, TRITON, Backend
from sparsetc.errors import DeviceError, DtypeError, KeywordError, PlanError
from sparsetc.ir.plan import Plan, requested
from sparsetc.support import FilePath, installed
from sparsetc.support.checks import as_bytes, available_memory, refused

PRECISIONS = ("highest", "high", "medium")
NAMED_BACKENDS = ("auto", *BACKENDS)
TUNINGS = ("model", "now", "calls")
MOST_SECONDS = 1e6


Form: TypeAlias = Literal["auto", "dense", "sparse"]
Reduction: TypeAlias = Literal["sum", "mean", "amax", "amin", "prod"]


class Settings(TypedDict, total=False):
    """Types of the ``**settings`` of public functions, as `options` describes them; None sets nothing.

    `device` is of `options` alone, and `gather` of einsums of a `distributed.Sharded` operand; the others refuse it.
    """

    precision: Literal["highest", "high", "medium"] | None
    plan: str | Plan | None
    deterministic: bool | None
    cache_dir: FilePath | None
    memory_limit: int | str | None
    device: str | torch.device | None
    backend: Literal["auto", "triton", "torch", "numba"] | None
    tune: Literal["model", "now", "calls"] | float | None
    path: Sequence[Sequence[int]] | None
    gather: bool


class Auto(Settings, total=False):
    """Types of the settings of functions that pass them to `einsum`."""

    drop_zeros: bool
    output: ReadOnly[Form]


class ToDense(Auto):
    output: Required[ReadOnly[Literal["dense"]]]


class ToSparse(Auto):
    output: Required[ReadOnly[Literal["sparse"]]]


@dataclass(frozen=True)
class Options:
    """Settings in force. None means: decide from the operands, the device or the environment."""

    precision: str | None = None
    plan: Any = "auto"
    deterministic: bool = False
    cache_dir: Path | None = None
    memory_limit: int | None = None
    device: torch.device | None = None
    backend: str | None = None
    tune: str | float | None = None
    path: tuple[tuple[int, ...], ...] | None = None

    @property
    def asks(self) -> bool:
        """True if a plan, path, deterministic sums, memory limit, backend or search was set."""
        settings = self.plan, self.path, self.deterministic, self.memory_limit, self.backend, self.tune
        return settings != ("auto", None, False, None, None, None)

    def effective_precision(self) -> str:
        """Return ``highest``, ``high`` or ``medium``: the option, or torch's own setting."""
        return self.precision or torch.get_float32_matmul_precision()

    @property
    def named_backend(self) -> str:
        """The backend that was named, here or by ``SPARSETC_BACKEND``, or ``auto``."""
        named = self.backend or os.environ.get("SPARSETC_BACKEND") or "auto"
        if named not in NAMED_BACKENDS:
            raise PlanError(f"backend must be one of {', '.join(NAMED_BACKENDS)}, found {named!r}")
        return named

    def effective_backend(self, device: torch.device, dtype: torch.dtype | None = None) -> Backend:
        """Triton on a GPU, torch elsewhere, unless one was named; torch for a dtype that the other does not multiply.

        Programs of ``numba`` are those of torch, of which some are printed as native loops.
        """
        usual = TORCH if device.type == "cpu" else TRITON
        backend = {"auto": usual, "numba": TORCH}.get(self.named_backend) or BACKENDS[self.named_backend]
        return TORCH if dtype is not None and dtype.is_complex and not backend.complex else backend

    def has_loops(self, device: torch.device) -> bool:
        """Return True if torch programs may run as native loops: all if ``numba`` is named, else those priced lower.

        Raises:
            PlanError: native loops were named, and numba is not installed or the operands are on a GPU.
        """
        if self.named_backend == "numba":
            if device.type != "cpu":
                raise PlanError(f'backend="numba" runs on a CPU, and the operands are on {device}; leave it to "auto"')
            if not installed("numba"):
                raise PlanError(
                    'backend="numba" needs numba, which is not installed: pip install "sparsetc[cpu]", or leave the '
                    'backend to "auto", which runs the generated torch programs without it'
                )
            return True
        return self.named_backend == "auto" and device.type == "cpu" and installed("numba")

    def effective_tune(self) -> tuple[str, float]:
        """``model``, ``now`` or ``calls``, and the seconds that timing the candidates of a kernel may take."""
        named = (os.environ.get("SPARSETC_TUNE") or "model") if self.tune is None else self.tune
        if isinstance(named, str) and named in TUNINGS:
            return named, 1.0
        try:
            seconds = 0.0 if isinstance(named, bool) else float(named)
        except (TypeError, ValueError, OverflowError):
            seconds = 0.0
        if not 0 < seconds <= MOST_SECONDS:
            what = f"{', '.join(TUNINGS)}, or seconds above 0, up to {MOST_SECONDS:.0e}"
            raise PlanError(f"tune must be one of {what}, found {named!r:.80}")
        return "now", seconds

    @property
    def timed(self) -> bool:
        """True if plans are chosen by time and not by the cost model alone."""
        return self.effective_tune()[0] != "model"

    def memory_on(self, device: torch.device) -> int:
        """Return the bytes that may be allocated on a device: the limit if set, else the memory available now."""
        return available_memory(device) if self.memory_limit is None else self.memory_limit


_DEFAULT = Options()
_current: ContextVar[Options | None] = ContextVar("sparsetc_options", default=None)


def set_options(**settings: Unpack[Settings]) -> None:
    """Set options for all threads of this process; options not named keep their values.

    A block of `options` and the settings of a call take precedence.

    Args:
        settings: as for `options`.

    Examples:
        >>> stc.set_options(memory_limit="8GB", precision="high")
        >>> stc.set_options(memory_limit=2**40, precision="highest")
    """
    global _DEFAULT
    _DEFAULT = with_settings(_DEFAULT, settings)
    if _current.get() is None:
        latest.number = _numbered(_DEFAULT)


def current() -> Options:
    """Return the options in force here."""
    return _current.get() or _DEFAULT


@contextlib.contextmanager
def in_force(chosen: Options) -> Iterator[Options]:
    """Put options in force within a ``with`` block."""
    token, before = _current.set(chosen), latest.number
    latest.number = _numbered(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
        latest.number = before


class Latest:
    """The number of the options last set in this process, by which traced graphs notice a change of settings.

    Attributes:
        traced: settings of the blocks that Dynamo is tracing now; none while anything runs.
    """

    def __init__(self) -> None:
        self.number = 0  # the object's own: graphs are guarded by whether it has one, which must not change later
        self.traced: tuple[tuple[str, Any], ...] = ()


latest = Latest()


def _numbered(chosen: Options) -> int:
    """Return the number of these options; equal options have the same."""
    try:
        return _number(chosen)
    except TypeError:  # a plan that cannot be hashed
        return next(_numbers)


@lru_cache(maxsize=1024)
def _number(chosen: Options) -> int:
    return next(_numbers)


_numbers = itertools.count(1)


class options(contextlib.ContextDecorator):
    """Set options within a ``with`` block, or for a decorated function; options not named keep their values.

    Every function with ``**settings`` takes these options as keywords for a single call.

    Args:
        settings: any of the following.
        precision: ``"highest"`` (the error of float32), ``"high"`` (tf32) or ``"medium"`` (bfloat16 for dense
            operands and matrix products, sums in float32). Default: ``torch.get_float32_matmul_precision()``.
        plan: the name of a plan, a `Plan`, or ``"auto"`` (default).
        deterministic: return the same bits at every run: no sum depends on the order in which programs finish.
        cache_dir: folder for generated source, and for profiles of calibrated devices.
        memory_limit: upper limit in bytes for a result, for packed storage, and for reading a file; a number, or
            text such as ``"8GB"`` or ``"512MiB"``. Work that would pass the limit is refused before it allocates. To
            stay below it, plan ``hls`` stores tiles as bitmaps, and plan ``window`` uses fewer windows. The temporary
            memory of packing is not counted. Default: the free memory.
        device: the device on which `read` puts tensors.
        backend: ``"triton"``, ``"torch"``, ``"numba"`` or ``"auto"`` (default). On a CPU with numba installed,
            ``"auto"`` runs programs as native loops if these are expected to be faster; ``"numba"`` does so wherever
            it can, ``"torch"`` never.
        tune: how to choose among the possible plans. ``"model"`` (default): by the cost model, the same at each run.
            ``"now"``: time the candidates that the model prices near the best, when a kernel is compiled, for a second
            or for the number of seconds given. ``"calls"``: try them in turn in the first calls. Timings are kept in
            the cache folder and used for the same problem again. With ``deterministic=True`` nothing is timed.
        path: the operands of each contraction, as opt_einsum gives them: ``[(0, 2), (0, 1)]`` are positions in the
            list of remaining operands, to whose end each result is appended. A sparse operand alone, ``(0,)``, is made
            dense.

    Examples:
        >>> with stc.options(plan="coo", precision="high"):
        ...     stc.compile("ij,j->i", stc.eye(3), torch.ones(3)).plan.name
        'coo'
    """

    def __init__(self, **settings: Unpack[Settings]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            with_settings(_DEFAULT, settings)  # refused here, and not where the block is entered
        self._settings = settings
        self._entered: list[Any] = []

    def _recreate_cm(self) -> options:  # a block for each call of a function that it decorates
        return options(**self._settings)

    def __enter__(self) -> Options | None:
        if torch.compiler.is_dynamo_compiling():  # which has no context variables
            self._entered.append(latest.traced)
            latest.traced = (*latest.traced, *[one for one in self._settings.items() if one[0] != "device"])
            return None
        self._entered.append(in_force(with_settings(current(), self._settings)))
        return self._entered[-1].__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            latest.traced = self._entered.pop()
        else:
            self._entered.pop().__exit__(*raised)


def of_call(settings: Mapping[str, Any]) -> Options:
    """Return the options in force, overridden by those of a call. Raise an error for options that no call can set."""
    if not settings:
        return _current.get() or _DEFAULT
    if settings.get("device") is not None:
        raise DeviceError(
            "device= says where `read` puts tensors (sparsetc.options); an einsum runs where its operands are: move "
            f"them with .to({str(settings['device'])!r})"
        )
    return with_settings(current(), settings)


def checked_settings(settings: Settings) -> Settings:
    """Return settings that are kept for later calls. Raise the error that a call with them would raise."""
    of_call(settings)
    return settings


def with_settings(base: Options, settings: Mapping[str, Any]) -> Options:
    """Return `base` with the settings that are not None, checked."""
    if not settings:
        return base
    try:
        return _with(base, tuple(settings), *settings.values())
    except TypeError:  # a plan that cannot be hashed, or an unknown name, for which `_checked` raises its own error
        return _checked(base, settings)


@lru_cache(maxsize=256, typed=True)  # True is no number of bytes, and equals 1
def _with(base: Options, names: tuple[str, ...], *values: Any) -> Options:
    return _checked(base, dict(zip(names, values, strict=True)))


def _checked(base: Options, settings: Mapping[str, Any]) -> Options:
    unknown = sorted(set(settings) - set(Options.__dataclass_fields__))
    if unknown:
        raise KeywordError(refused(unknown, list(Options.__dataclass_fields__)))
    chosen = {k: v for k, v in settings.items() if v is not None}
    if chosen.get("precision") not in (None, *PRECISIONS):
        raise DtypeError(f"precision must be one of {', '.join(PRECISIONS)}, found {chosen['precision']!r}")
    if chosen.get("backend") not in (None, *NAMED_BACKENDS):
        raise PlanError(f"backend must be one of {', '.join(NAMED_BACKENDS)}, found {chosen['backend']!r}")
    if not isinstance(chosen.get("deterministic", False), bool):
        raise PlanError(f"deterministic must be True or False, found {chosen['deterministic']!r}")
    if "tune" in chosen:
        Options(tune=chosen["tune"]).effective_tune()
    if "plan" in chosen:  # here, so that none which is refused is kept for another that equals it
        requested(chosen["plan"])
    if "path" in chosen:
        try:
            path = tuple([tuple(map(operator.index, step)) for step in chosen["path"]])
        except TypeError:
            path = ()
        if not path:
            raise PlanError(f"path must be a list of tuples of positions, found {chosen['path']!r:.80}")
        chosen["path"] = path
    if "cache_dir" in chosen:
        try:
            chosen["cache_dir"] = Path(os.fsdecode(chosen["cache_dir"]))
        except TypeError:
            raise PlanError(f"cache_dir must be a path, found {chosen['cache_dir']!r}") from None
    if "device" in chosen:
        try:
            chosen["device"] = torch.device(chosen["device"])
        except (TypeError, RuntimeError):
            raise DeviceError(f"device must be one of torch's, found {chosen['device']!r:.80}") from None
    if "memory_limit" in chosen:
        chosen["memory_limit"] = as_bytes(chosen["memory_limit"])
    return replace(base, **chosen)

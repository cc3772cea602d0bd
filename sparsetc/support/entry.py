"""Calls from outside: their errors, the settings of torch for their time, and notices beside their results.

In: a function that users call. Out: the same function, which Dynamo does not look into, and which raises
`OutOfMemoryError` where torch, numpy or Python had no memory left, and `PlanError` where a GPU lacks what a plan takes.

In: a message. Out: a `UserWarning` located at the innermost frame that is neither the package's, generated, nor
torch's, so that a reader sees which call of theirs it is about, and warning filters by module work.

In: the number of bytes, or of other things, to come. Out: a function to call with the number done. On a terminal a bar
appears after two seconds, so that short work draws nothing. Without tqdm nothing is drawn; whoever asked for a bar is
told that tqdm is missing.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from sparsetc.errors import OutOfMemoryError, PlanError, SparsetcError, printable
from sparsetc.support import Lock

P = ParamSpec("P")
R = TypeVar("R")

OPAQUE = (
    "sparsetc plans by what a sparse operand holds, so it runs outside compiled graphs, between two of them; "
    "torch.export takes it with strict=False, the default"
)
"""Why Dynamo stops here, for its own messages."""

# Asked only where Dynamo looks at what runs, to leave alone whatever the function calls: importing it takes a second.
_unseen = cache(torch.compiler.disable)


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what users call."""

    @wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        # Dynamo cannot break a graph within try, so it leaves this frame as it is.
        try:
            if get_eval_frame_callback() is not None or torch.compiler._is_exporting_flag:
                return _unseen(function)(*args, **kwargs)
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise OutOfMemoryError(
                f"memory ran out ({said}); free some, take fewer columns of the dense operands at a time, or cut the "
                "sparse operand in parts and add up their results"
            ) from error
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # Triton's, which need not be installed
                raise
            raise PlanError(f"this GPU cannot run the plan: {error}; take smaller blocks or other warps") from error

    # What `torch.compiler.disable` marks its functions with: one break of the graph, before anything is traced.
    entry._torchdynamo_disable = True  # type: ignore[attr-defined]
    entry._torchdynamo_disable_msg = OPAQUE  # type: ignore[attr-defined]
    return entry


def traced_by_modes() -> bool:
    """True while `make_fx` or fake tensors trace a graph, and not Dynamo."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(kind) for kind in _TRACING)


_TRACING = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)

_NO_MEMORY = re.compile(r"allocate memory|(out of|not enough) memory|bad_alloc", re.IGNORECASE)


def lacks_memory(error: Exception) -> bool:
    """True for an allocation's error that is not our own; torch raises a RuntimeError, recognised by its text."""
    return not isinstance(error, SparsetcError) and (
        isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
    )


@contextmanager
def _autocast_off(device: torch.device) -> Iterator[None]:
    """Autocast off within a ``with`` block, as `torch.autocast` does it in ten times the time."""
    torch.set_autocast_enabled(device.type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, True)


def exporting() -> bool:
    """Return True while `torch.export` traces; `torch.compiler.is_exporting` is true in any graph of torch 2.11."""
    return torch.compiler._is_exporting_flag


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off within a ``with`` block, on a device where it is on."""
    return _autocast_off(device) if torch.is_autocast_enabled(device.type) else _NOTHING


_NOTHING = nullcontext()


def on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """The current GPU is this device within a ``with`` block; nothing changes for a CPU."""
    other = device.type == "cuda" and device.index != torch._C._cuda_getDevice()
    return torch.cuda.device(device) if other else _NOTHING


class matmul_precision(ContextDecorator):
    """The setting of torch for float32 products, for as long as a ``with`` block, or a function so decorated, takes.

    The setting is the process's, so threads take turns: else one could restore what another had set for a while. A
    generator would take twice as long, at each call.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self._before: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        turn = _turns.own
        turn.acquire()
        before = torch.get_float32_matmul_precision()
        self._before.append((turn, before))
        if before != self.precision:
            torch.set_float32_matmul_precision(self.precision)

    def __exit__(self, *_: object) -> None:
        turn, before = self._before.pop()
        if before != self.precision:
            torch.set_float32_matmul_precision(before)
        turn.release()


@contextmanager
def summed_wide() -> Iterator[None]:
    """Let products of 16-bit floats be summed in 32 bits alone, within `matmul_precision`, whose turn it shares."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    before = [(getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)) for name in names]

    def put(settings: Iterable[tuple[bool, bool]]) -> None:
        for name, (allowed, split) in zip(names, settings, strict=True):
            setattr(matmul, name, allowed if split else (allowed, False))  # a bool will do for older torch

    put((False, split) for _, split in before)
    try:
        yield
    finally:
        put(before)


_turns = Lock()

# -- warnings and the log ----------------------------------------------------------------------------------------------

PASSED_OVER = frozenset({"sparsetc", "sparsetc_generated", "torch"})
"""Top-level modules whose frames lie between a user and a warning: autograd calls the package from torch's."""

_said: set[str] = set()


def warn(message: str) -> None:
    """Warn, in the name of the package, at the line of the user's that led here."""
    frame, level = sys._getframe(1), 2  # and outwards to the outermost of all, where a thread has none of a user's
    while str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED_OVER and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"sparsetc: {printable(message)}", UserWarning, stacklevel=level)


def warn_once(message: str) -> None:
    """Warn the first time in a process that this message is given."""
    if message not in _said:
        _said.add(message)
        warn(message)


log = logging.getLogger("sparsetc")
"""The package's log: compiled, tuned and streamed einsums at INFO, packed parts and programs at DEBUG, with times."""


def log_since(start: float, level: int, message: str, *args: object) -> None:
    """Log a message with the milliseconds since a time of `time.perf_counter`."""
    if log.isEnabledFor(level):
        log.log(level, f"{message}, %.1f ms", *args, 1e3 * (time.perf_counter() - start))


# -- progress bars -----------------------------------------------------------------------------------------------------

PATIENCE = 2.0
"""Seconds before a bar appears."""

At: TypeAlias = Callable[..., None]
"""A function told of progress: ``at(position)``, or ``at(position, title)`` to change the bar's title too."""


def unseen(position: int, title: str | None = None, /) -> None:
    """Draw nothing."""


@contextmanager
def bar(total: int | None, title: str, wanted: bool | None = None, unit: str = "bytes") -> Iterator[At]:
    """Yield ``at(position)``, which moves a bar.

    Args:
        total: how much there is to do; None if nobody knows.
        title: stands before the bar.
        wanted: None draws on a terminal after `PATIENCE` seconds, True draws at once, False never.
        unit: of `total`.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield unseen
        return
    try:
        from tqdm import tqdm
    except ImportError:
        if wanted:
            warn_once("there is no progress bar without tqdm: pip install 'sparsetc[progress]'")
        yield unseen
        return
    delay = 0.0 if wanted else PATIENCE
    unit = "B" if unit == "bytes" else f" {unit}"
    line = tqdm(total=total, desc=title, unit=unit, unit_scale=unit == "B", delay=delay, leave=False, file=sys.stderr)

    def at(position: int, title: str | None = None, /) -> None:
        if title:
            line.set_description_str(title, refresh=False)
        line.update(position - line.n)

    timer = threading.Timer(delay, line.update, (0,))  # for work that reports nothing meanwhile, such as compiling
    timer.daemon = True
    timer.start()
    try:
        yield at
    finally:
        timer.cancel()
        line.close()

"""Whether Triton's ahead-of-time compiles go on from text to machine code, for which the assembler takes half the time.

Where no machine code can run and a test reads the text alone, they end with the text.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def left_out() -> None:
    """Kernels compiled from here on have no machine code."""
    if importlib.util.find_spec("triton"):
        from triton import knobs

        knobs.runtime.add_stages_inspection_hook = _without


@contextmanager
def needed() -> Iterator[None]:
    """Kernels compiled inside have their machine code."""
    from triton import knobs

    hook, knobs.runtime.add_stages_inspection_hook = knobs.runtime.add_stages_inspection_hook, None
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = hook


def _without(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
    """Triton's hook: changes the stages of a target; without them, gives what distinguishes it in keys of the cache."""
    for name in {"cubin", "hsaco"} & set(stages or ()):
        stages[name] = lambda text, metadata: b""
    return "text", "text"

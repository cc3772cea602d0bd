"""What tests of extensions share: registries put back as they were, and the examples as modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import sparsetc as stc
from sparsetc.packing.base import FORMATS
from sparsetc.packing.partition import PARTITIONS
from sparsetc.planner.registry import PLANS

REGISTRIES: tuple[dict[str, Any], ...] = (FORMATS, PARTITIONS, PLANS, stc.OPERATIONS)


@contextmanager
def as_before() -> Iterator[None]:
    """A block after which nothing is registered that was not before."""
    before = [dict(registry) for registry in REGISTRIES]
    try:
        yield
    finally:
        for registry, entries in zip(REGISTRIES, before, strict=True):
            registry.clear()
            registry.update(entries)


@contextmanager
def example(name: str) -> Iterator[ModuleType]:
    """A block in which an example is imported, and what it registers is known."""
    spec = spec_from_file_location(name, Path(__file__).parent.parent / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with as_before():
        spec.loader.exec_module(module)
        yield module

"""Generated source is a product: a change of it must be meant. Regenerate by ``python tests/regenerate_golden.py``."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import golden_cases
import golden_maps
import golden_pairs
import pytest
from golden_checks import check_as_kept, check_readable

MODULES = (golden_cases, golden_pairs, *([golden_maps] if find_spec("triton") else []))
CASES = [pytest.param(module, name, id=f"{module.__name__} {name}") for module in MODULES for name in module.CASES]


@pytest.mark.parametrize(("module", "name"), CASES)
def test_generated_source_is_as_kept(module: ModuleType, name: str) -> None:
    check_as_kept(module.path(name), module.source(name))


@pytest.mark.parametrize("module", MODULES)
def test_every_file_has_its_case(module: ModuleType) -> None:
    assert {file.stem for file in module.FOLDER.glob("*.py")} == set(module.CASES)


@pytest.mark.parametrize(("module", "name"), CASES)
def test_generated_source_can_be_read(module: ModuleType, name: str) -> None:
    check_readable(module.source(name))

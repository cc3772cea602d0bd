"""The generated source of maps between products: a change of it must be meant."""

from __future__ import annotations

import pytest
from golden_checks import check_as_kept, check_readable
from golden_maps import CASES, FOLDER, path, source

pytest.importorskip("triton")


@pytest.mark.parametrize("name", CASES)
def test_generated_source_is_as_kept(name: str) -> None:
    check_as_kept(path(name), source(name))


def test_every_file_has_its_case() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_generated_source_can_be_read(name: str) -> None:
    check_readable(source(name))

"""Files with bytes changed at random: used, or refused by one error of the package; `fuzz/mutated.py` tries more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fuzz import mutated

import sparsetc as stc


@pytest.mark.parametrize("name", mutated.KINDS)
def test_mutated_files(name: str) -> None:
    tally = mutated.run(name, seed=0, count=60)
    assert sum(tally.values()) == 60


def _refuse(message: str) -> None:
    raise stc.IOFormatError(message)


WRONG: dict[str, Any] = {
    "does not name the file": lambda path: _refuse("another file"),
    "is no plain text": lambda path: _refuse(f"{path}: {'x' * 1000}"),
    "the folder holds": lambda path: path.with_name("left").touch(),
    "it started os.system": lambda path: os.system("true"),
    "s and .* KB for a file": lambda path: bytearray(b"1") * (3 * 10**8),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_reader_must_not_do_is_found(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.tns"
    path.write_bytes(b"1 1 1\n")
    with pytest.raises(mutated.Fault, match=what):
        mutated.use(mutated.KINDS["tns"]._replace(use=WRONG[what]), path)
    mutated._watched.clear()

"""Files with bytes changed at random: a tensor that fits together, or one error that names the file."""

from __future__ import annotations

import io
import time
import warnings
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch

import sparsetc as stc

PIECES = (b"0", b"-1", b"9223372036854775808", b"1e39", b"nan", b"_", b"\0", b"\r", b"\n", b"#", b"%", b"3\n4 5 6\n")
SUFFIXES = (".tns", ".tns.gz", ".mtx", ".npz", ".bsp.npz")


def changed(random: Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at, piece = random.randrange(len(made) + 1), random.choice((*PIECES, random.randbytes(2)))
        made[at : at + random.choice((0, 1, len(piece), 100))] = piece
    return bytes(made)


def changed_member(random: Random, data: bytes) -> bytes:
    """An archive with right checksums and a member of which the header, or the rest, is another."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        chosen = random.choice(old.namelist())
        for name in old.namelist():
            member = old.read(name)
            new.writestr(name, changed(random, member) if name == chosen else member)
    return made.getvalue()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_mutated_files(tmp_path: Path, suffix: str) -> None:
    if suffix == ".bsp.npz":
        pytest.importorskip("binsparse")
    rng = torch.Generator().manual_seed(0)
    coords = torch.randint(0, 9, (2, 30), generator=rng)
    path = tmp_path / f"x{suffix}"
    stc.write(path, stc.SparseTensor(coords, torch.randn(30, generator=rng), (9, 9)))
    good, start = path.read_bytes(), time.process_time()
    for seed in range(150):
        random = Random(seed)
        member = suffix.endswith("npz") and seed % 2
        path.write_bytes((changed_member if member else changed)(random, good))
        with warnings.catch_warnings(), stc.options(memory_limit=10**7):
            warnings.simplefilter("error")
            try:
                x = stc.read(path)
            except (stc.IOFormatError, stc.OutOfMemoryError, stc.DtypeError) as error:
                assert path.name in str(error)  # noqa: PT017
                assert len(str(error)) < 600  # noqa: PT017
                continue
        assert x.is_coalesced
        assert bool((x.coords >= 0).all() and (x.coords < torch.tensor(x.shape)[: len(x.coords), None]).all())
    assert time.process_time() - start < 20

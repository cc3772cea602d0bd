"""The script that makes, converts and lists what benchmarks measure, on small tensors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sparsetc as stc

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import common  # noqa: E402
import data  # noqa: E402
import distributed_model  # noqa: E402
import synthetic  # noqa: E402

SMALL = ("tiny graph", "small clustered", "nell-2 x0.0002")


@pytest.mark.parametrize("name", SMALL)
def test_a_made_file_is_the_tensor_that_benchmarks_make(tmp_path: Path, name: str) -> None:
    assert data.main(["make", name, "--folder", str(tmp_path / "new")]) == 0
    expected = common.tensor(name)
    assert expected is not None
    with np.load(tmp_path / "new" / f"{name}.npz") as file:
        assert {"coords", "values", "shape"} <= set(file)
        assert tuple(file["shape"]) == expected.shape
        coords, values = file["coords"], file["values"]
    assert torch.equal(torch.as_tensor(coords).long(), expected.coords.cpu())
    assert torch.equal(torch.as_tensor(values), expected.values.cpu())
    keys = np.ravel_multi_index(tuple(coords.astype(np.int64)), expected.shape)
    assert (np.diff(keys) > 0).all()


@pytest.mark.parametrize("suffix", [".tns", ".tns.gz", ".mtx"])
def test_benchmarks_read_a_converted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    x = stc.SparseTensor([[2, 0, 1], [0, 3, 1]], torch.tensor([1.0, 2.0, 3.0]), (3, 4)).coalesce()
    stc.write(tmp_path / f"download{suffix}", x)
    folder = tmp_path / "data"
    assert data.main(["convert", str(tmp_path / f"download{suffix}"), "small_mat", "--folder", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["small_mat.npz"]
    assert torch.equal(stc.read(folder / "small_mat.npz").to_dense(), x.to_dense())
    monkeypatch.setenv("SPARSETC_DATA", str(folder))
    found = common.tensor("small_mat")
    assert found is not None
    assert found.shape == (3, 4)
    assert torch.equal(found.coords.cpu(), x.coords)
    assert common.tensor("absent_mat") is None


def test_what_is_refused_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "download.mtx"
    stc.write(file, stc.SparseTensor([[0, 1], [1, 0]], torch.ones(2), (2, 2)))

    def said(*arguments: object) -> str:
        assert data.main([*map(str, arguments), "--folder", str(tmp_path / "data")]) == 2
        return capsys.readouterr().err

    assert "SuiteSparse HB/bcsstk16" in said("make", "bcsstk16_mat")
    assert "'absent'" in said("make", "absent")
    assert "2 x 2 with 2 nonzeros, but cora_mat is 2708 x 2708 with 13,264" in said("convert", file, "cora_mat")
    assert "nell_2_3d" in said("convert", file, "nell-2")
    assert ".tns.gz" in said("convert", tmp_path / "download.csv", "small_mat")
    assert "absent.mtx" in said("convert", tmp_path / "absent.mtx", "small_mat")
    assert not (tmp_path / "data").exists()


def test_the_table_has_every_tensor_that_benchmarks_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert data.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    names = {re.split(r"  +", line)[0] for line in lines}
    assert names == {*data.REAL, *data.IMITATED, *common.SYNTHETIC}
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    assert set(re.findall(r'"(\w+_(?:\dd|mat))"', text)) <= set(data.REAL)
    assert set(data.IMITATED) == set(synthetic.PUBLISHED)
    for size in (distributed_model.AMAZON, distributed_model.REDDIT):
        assert data.REAL[size.name][:2] == (size.shape, size.nnz)

"""The yardstick of benchmarks: rows are run, recorded, compared and shown; a new row is picked up."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsetc as stc

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import charts  # noqa: E402
import common  # noqa: E402
import figures  # noqa: E402
import instead  # noqa: E402
from instead_rows import ROWS  # noqa: E402
from instead_rows.compare import error_of  # noqa: E402
from instead_rows.row import Row, Task  # noqa: E402


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SPARSETC_RESULTS", str(tmp_path))
    monkeypatch.setattr(common, "DEVICE", "cpu")
    threads = torch.get_num_threads()
    yield tmp_path / "instead_cpu.json"
    torch.set_num_threads(threads)


def product(factor: float = 1.0) -> Task:
    """A product of which ours is wrong by a factor."""
    x, b = stc.SparseTensor([[0, 2, 2], [1, 0, 3]], torch.tensor([1.0, 2.0, 3.0]), (3, 4)), torch.rand(4, 5)
    dense = x.to_dense()
    peers = {"dense": lambda: dense @ b, "wrong": lambda: dense @ b + 1, "absent": lambda: 1 / 0}
    return Task(lambda: x @ (factor * b), peers, lambda: dense.double() @ b.double())


def doubled() -> Task:
    x = stc.SparseTensor([[0, 2, 2], [1, 0, 3]], torch.tensor([1.0, 2.0, 3.0]), (3, 4))
    return Task(lambda: x * 2, {"scipy": lambda: x.to_scipy() * 2}, lambda: x.to_torch().double() * 2)


TINY = [Row("right", "tiny", product), Row("wrong", "tiny", lambda: product(2.0))]


def rows_of(path: Path) -> dict[str, Any]:
    return {row["task"]: row for row in json.loads(path.read_text())["rows"]}


def test_rows_are_run_and_recorded(record: Path) -> None:
    assert instead.main(["--cpu"], TINY) == 0
    document = json.loads(record.read_text())
    assert document["device"] == common.processor()
    assert document["cpu_threads"] == 1
    rows = rows_of(record)
    right, wrong = rows["tiny: right"], rows["tiny: wrong"]
    assert right["ours"]["error"] < 1e-6
    assert right["instead_call"] == "dense"
    ratio = right["peers"]["dense"]["call_us"] / right["ours"]["call_us"]
    assert right["call_ratio"] == pytest.approx(ratio, rel=0.01)
    assert set(right["peers"]["wrong"]) == {"wrong"}
    assert "ZeroDivisionError" in right["peers"]["absent"]["failed"]
    assert set(wrong["ours"]) == {"wrong"}  # and no time
    assert "call_ratio" not in wrong


def test_a_new_row_is_picked_up_and_the_others_stay(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    instead.main(["--cpu"], TINY)
    before = rows_of(record)
    more = [*TINY, Row("x * 2", "new", doubled)]
    instead.main(["--cpu", "--missing"], more)
    after = rows_of(record)
    assert list(after) == ["tiny: right", "tiny: wrong", "new: x * 2"]
    assert after["tiny: right"] == before["tiny: right"]
    assert after["new: x * 2"]["call_ratio"] > 0
    capsys.readouterr()
    instead.main(["--cpu", "--list", "--only", "new"], more)
    assert capsys.readouterr().out == "new: x * 2\n"


def test_only_and_since(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    instead.main(["--cpu"], TINY)
    old = record.with_name("old.json")
    text = json.loads(record.read_text())
    text["rows"][0]["call_ratio"] *= 1000
    old.write_text(json.dumps(text))
    capsys.readouterr()
    assert instead.main(["--cpu", "--only", "right", "--since", str(old)], TINY) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("tiny: right: call_ratio")
    assert not [line for line in said if line.startswith("tiny: wrong")]
    text["rows"][0]["call_ratio"] = 1e-6
    old.write_text(json.dumps(text))
    assert instead.main(["--cpu", "--only", "right", "--since", str(old)], TINY) == 0


def test_a_row_that_raises_or_takes_too_long_does_not_stop_the_run(record: Path) -> None:
    def endless() -> Task:
        while True:  # without taking the time of others
            time.sleep(1)

    rows = [Row("raises", "bad", lambda: product(1 / 0)), Row("endless", "bad", endless), TINY[0]]
    instead.main(["--cpu", "--seconds", "6"], rows)
    found = rows_of(record)
    assert "ZeroDivisionError" in found["bad: raises"]["ours"]["failed"]
    assert "out of time" in found["bad: endless"]["ours"]["failed"]
    assert found["tiny: right"]["call_ratio"] > 0


def test_absent_data_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, record: Path) -> None:
    monkeypatch.setenv("SPARSETC_DATA", str(tmp_path))
    instead.main(["--cpu"], [Row("of data", "tiny", product, needs=("c2000_5_mat",))])
    assert "left out, SPARSETC_DATA has no c2000_5_mat" in capsys.readouterr().out
    assert not record.exists()


def test_the_page_shows_losing_rows_first(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "RESULTS", record.parent)
    assert figures.instead_cpu().startswith("Not measured yet on a CPU")
    instead.main(["--cpu"], [*TINY, Row("x * 2", "new", doubled)])
    document = json.loads(record.read_text())
    for row, ratio in zip(document["rows"][::2], (3.0, 0.5), strict=True):
        row["call_ratio"] = ratio
    record.write_text(json.dumps(document))
    text = figures.instead_cpu()
    assert [text.index(name) for name in ("tiny: wrong", "new: x * 2", "tiny: right")] == sorted(
        text.index(name) for name in ("tiny: wrong", "new: x * 2", "tiny: right")
    )
    assert "1 of 3 rows are below 1" in text


def test_titles_are_unique_and_devices_known() -> None:
    assert len({row.title for row in ROWS}) == len(ROWS)
    assert {device for row in ROWS for device in row.on} == {"cuda", "cpu"}


def test_results_are_compared_as_what_they_are() -> None:
    x = stc.SparseTensor([[0, 1], [1, 0]], torch.tensor([3.0, 4.0]), (2, 2))
    assert error_of(x, x.to_dense().double()) == 0
    assert error_of((x, x.to_scipy().tocsr()), [x.to_torch().double()] * 2) == 0
    assert error_of(x.to_dense() * 1.1, x.to_dense()) == pytest.approx(0.1)
    assert error_of(stc.eye(2), x.to_torch()) == float("inf")
    assert error_of(x.values[:1], x.values) == float("inf")

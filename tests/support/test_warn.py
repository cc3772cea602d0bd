"""Warnings of the package: they point at the user's line, however deep in the package they are given."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import processes
import pytest
import torch

import sparsetc as stc
from sparsetc.support import entry

LINE = "no GPU: running the generated torch programs"


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_said", set())


def _operands() -> tuple[stc.SparseTensor, torch.Tensor]:
    return stc.SparseTensor.from_dense(torch.eye(4)), torch.ones(4, 2)


def test_the_lack_of_a_gpu_is_said_at_the_line_that_called() -> None:
    x, b = _operands()
    calls = {
        "einsum": lambda: stc.einsum("ij,jr->ir", x, b),
        "compile": lambda: stc.compile("ij,jr->ir", x, b),
        "explain": lambda: stc.explain("ij,jr->ir", x, b),
        "by name": lambda: stc.spmm(x, b),
        "an operator's": lambda: stc.ttv(x, b[:, 0], 1),
    }
    for name, call in calls.items():
        entry._said.clear()
        x, b = _operands()
        with pytest.warns(UserWarning, match=LINE) as told:
            call()
        line = Path(told[0].filename).read_text(encoding="utf-8").splitlines()[told[0].lineno - 1]
        assert told[0].filename == __file__, name
        assert line.strip().startswith(f'"{name}"'), name


def test_torch_between_the_user_and_the_package_is_passed_over() -> None:
    x, b = _operands()
    out = stc.einsum("ij,jr->ir", x, b.requires_grad_())
    assert isinstance(out, torch.Tensor)
    entry._said.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out.sum().backward()
    assert [w.filename for w in told if LINE in str(w.message)] == [__file__]


def test_a_message_is_given_once_and_filters_by_module_hold() -> None:
    with pytest.warns(UserWarning, match="sparsetc: once") as told:
        assert [entry.warn_once("once") for _ in range(2)] == [None, None]  # type: ignore[func-returns-value]
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=__name__)
        entry.warn("unheard")


def test_a_script_shows_its_own_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nimport sparsetc as stc\n"
        "x = stc.SparseTensor.from_dense(torch.eye(3))\nstc.spmm(x, torch.eye(3))\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SPARSETC_CACHE_DIR": str(tmp_path / "cache")}
    done = processes.run([script], env=environment)
    assert done.returncode == 0, done.stderr
    assert f"{script}:4: UserWarning: sparsetc: {LINE}" in done.stderr
    assert "stc.spmm(x, torch.eye(3))" in done.stderr

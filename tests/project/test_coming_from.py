"""The pages for users of other libraries: the right column runs, and gives what the left one gives where it can run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparsetc as stc

Names = dict[str, Any]
PAGES = Path(__file__).resolve().parents[2] / "docs" / "coming_from"


def rows(page: str) -> list[tuple[list[str], list[str]]]:
    """Return the spans of code in the two columns of a page's table, a pair a row."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    lines = [line for line in re.findall(r"^\| (.*) \|$", text, re.M) if not line.startswith("---")]
    cells = [line.split(" | ") for line in lines[1:]]
    assert all(len(row) == 2 for row in cells), page
    return [(re.findall(r"`([^`]+)`", left), re.findall(r"`([^`]+)`", right)) for left, right in cells]


def setup(page: str) -> Names:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    names: Names = {}
    torch.manual_seed(0)
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(block, page, "exec"), names)
    return names


def evaluate(span: str, names: Names) -> Any:
    try:
        code = compile(span, span, "eval")
    except SyntaxError:
        return exec(compile(span, span, "exec"), names)
    return eval(code, names)


def dense(result: Any) -> Any:
    """Return an array of any library's result; None of anything else.

    A result of edges is that of the matrix of (targets, sources).
    """
    if isinstance(result, tuple) and len(result) == 2 and str(result[0].dtype) == "torch.int64":
        (source, target), weight = result
        size = int(torch.stack((source, target)).max()) + 1
        result = torch.zeros(size, size).index_put_((target, source), weight, accumulate=True)
    for method in ("to_dense", "todense", "toarray", "full"):
        if hasattr(result, method) and not isinstance(result, np.ndarray):
            result = getattr(result, method)()
    if type(result).__module__.startswith("pyttb"):
        result = result.data
    if isinstance(result, torch.Tensor):
        result = result.detach()
    if isinstance(result, torch.Tensor | np.ndarray | float | int):
        return np.asarray(result, dtype=np.float64)
    return None


@pytest.mark.parametrize("page", sorted(page.stem for page in PAGES.glob("*.md") if page.stem != "index"))
def test_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        names = setup(page)
    except ImportError as error:
        pytest.skip(str(error))
    try:
        here = [[evaluate(span, names) for span in right] for _, right in rows(page)]
        assert all(here), "a row has no code"
        compare(page, names, here)
    finally:
        if "tensorly" in names:
            names["tensorly"].set_backend("numpy")  # as it was


def test_pyttb_does_not_read_our_text(tmp_path: Path) -> None:
    pyttb = pytest.importorskip("pyttb")
    ours = str(tmp_path / "ours.tns")
    x = stc.SparseTensor([[0, 2], [1, 0]], [1.0, 2.0], (3, 4))
    stc.write(ours, x)
    with pytest.raises(Exception, match="#"):
        pyttb.import_data(ours)


def compare(page: str, names: Names, here: list[list[Any]]) -> None:
    """Run the left column too, the first of its ways; rows of random numbers and of files are not compared."""
    compared = 0
    for (left, right), results in zip(rows(page), here, strict=True):
        if not left or len(right) != 1 or re.search(r"rand|path", left[0]):
            continue
        there, ours = dense(evaluate(left[0], names)), dense(results[0])
        if there is not None and ours is not None:
            np.testing.assert_allclose(ours.reshape(there.shape), there, rtol=1e-5, atol=1e-6, err_msg=left[0])
            compared += 1
    assert compared >= 3, "hardly a row could be compared"

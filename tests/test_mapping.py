"""A function of one's own of the entries of a pattern, against the same over all pairs, with gradients by autograd."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from map_cases import MAPPED, mapped_cases

import sparsetc as stc
from sparsetc.maps import pairs
from sparsetc.maps.trace import told_apart

F64 = torch.float64


@pytest.mark.parametrize("way", ["in steps", "in one kernel"])
@pytest.mark.parametrize("name", MAPPED)
def test_as_over_all_pairs(
    name: str, way: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if way == "in one kernel":
        monkeypatch.setattr(pairs, "ENTRY", 1e9)
    function, form, dense = mapped_cases(name, F64)
    tensors = [t for t in form.tensors if t.requires_grad]
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.map_entries(function, form.pattern, **form.named)
    assert f"map_entries runs {way}" in caplog.text
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    expected = dense()
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.square().sum(), tensors, retain_graph=True) for y in (found, expected))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)
    both = (torch.autograd.grad(y.square().sum(), tensors, create_graph=True) for y in (found, expected))
    for own, other in zip(*both, strict=True):
        torch.testing.assert_close(own, other)


def test_what_explain_says_of_a_call() -> None:
    q = torch.ones(2, 130, 4)
    mask = stc.masks.sliding_window(70)
    (report,) = stc.explain(stc.attention, q, q, q, mask, backend="torch").maps
    assert (report.way, report.reason, report.shape, report.patterns) == ("in one kernel", "", (130, 130), 1)
    meets = mask.dense(130)
    assert [tiles.result for tiles in report.tiles] == ["result", "gradients of rows", "gradients of columns"]
    for tiles in report.tiles:
        places = (tiles.full + tiles.partial) * tiles.height * tiles.width
        assert round(tiles.filled * places) == int(meets.sum())
    layer, graph = stc.nn.GATConv(3, 2), stc.eye(40)
    said = str(stc.explain(layer, graph, torch.ones(40, 3)))
    assert said.startswith("GATConv")
    assert "in steps: on a CPU, most places of its tiles would be empty" in said


def test_functions_of_the_same_code_are_one() -> None:
    def scaled(by: float) -> Callable[..., torch.Tensor]:
        return lambda s: s * by

    assert told_apart(scaled(2.0)) == told_apart(scaled(2.0))
    assert told_apart(scaled(2.0)) != told_apart(scaled(3.0))
    assert told_apart(torch.sigmoid) is torch.sigmoid
    factor = torch.ones(())
    reads = lambda s: s * factor  # noqa: E731
    assert told_apart(reads) is reads


FACTORS: dict[str, Any] = {"held": 1.0}


def helped(s: torch.Tensor) -> torch.Tensor:
    return s * FACTORS["held"]


class Factor:
    def __init__(self) -> None:
        self.by = 1.0

    def times(self, s: torch.Tensor) -> torch.Tensor:
        return s * self.by

    __call__ = times


def test_functions_are_traced_again_where_what_they_read_has_changed() -> None:
    """Elements of a list or mapping, attributes, and what functions that they call read."""
    factor, numbers = Factor(), [1.0]
    x, a, b = stc.eye(2), torch.tensor([[2.0], [3.0]]), torch.ones(2, 1)
    functions = (
        lambda s: s * numbers[0],
        lambda s: helped(s),
        lambda s: s * factor.by,
        lambda s: (lambda t: t * FACTORS["held"])(s),
        factor.times,
        factor,
    )
    for by in (1.0, 5.0):
        numbers[0] = factor.by = FACTORS["held"] = by
        for function in functions:
            found = stc.map_entries(function, x, products={"s": (a, b)}, output="sparse")
            torch.testing.assert_close(found.values, by * a[:, 0])


def test_what_map_entries_refuses() -> None:
    x = stc.eye(3)
    a = torch.ones(3, 2)
    refused: list[tuple[Any, Any, str]] = [
        ({}, stc.KeywordError, "takes names"),
        ({"rows": {"a": a[:, 0]}, "columns": {"a": a[:, 0]}}, stc.KeywordError, "each once"),
        ({"products": {"s": (a, a.double())}}, stc.DtypeError, "one dtype"),
        ({"products": {"s": (a.long(), a.long())}}, stc.DtypeError, "floating point"),
        ({"products": {"s": (a, a[:2])}}, stc.ShapeError, "the pattern must be"),
        ({"products": {"s": (a, a)}, "rows": {"b": a[:2, 0]}}, stc.ShapeError, "one number of rows"),
        ({"products": {"s": (a.expand(2, 3, 2), a.expand(3, 3, 2))}}, stc.ShapeError, "broadcast"),
        ({"products": {"s": a}}, stc.ShapeError, r"takes two tables .* found \(3, 2\)"),
        ({"products": {"s": (a, a[:, :1])}}, stc.ShapeError, r"of one size, found \(3, 2\), \(3, 1\)"),
        ({"products": {"s": (a, a)}, "entries": {"e": a[:2, 0]}}, stc.ShapeError, "each of 3 entries"),
        ({"products": {"s": (a, a)}, "softmax": True}, stc.KeywordError, "softmax takes values"),
        ({"products": {"s": (a, a)}, "values": a, "output": "sparse"}, stc.KeywordError, "sparse result"),
        ({"rows": a}, stc.KeywordError, "takes rows= as a dictionary of names, found tensor"),
        ({"entries": [a]}, stc.KeywordError, "takes entries= as a dictionary"),
        ({"products": 5}, stc.KeywordError, "takes products= as a dictionary of names, found 5"),
        ({"rows": {5: a[:, 0]}}, stc.KeywordError, "takes names, each once; found 5"),
        ({"rows": {"r": a.sum()}}, stc.ShapeError, "a mode of rows, columns or entries"),
        ({"products": {"s": (a[0], a[0])}}, stc.ShapeError, r"takes tables \(\*heads, rows, size\)"),
        ({"products": {"s": (a, a)}, "values": a[0]}, stc.ShapeError, "takes tables"),
    ]
    for named, kind, text in refused:
        with pytest.raises(kind, match=text):
            stc.map_entries(lambda **of: next(iter(of.values())), x, **named)
    for function, kind, text in (
        (lambda s, t: s, stc.KeywordError, "arguments named s: missing a required argument: 't'"),
        ("s", stc.KeywordError, "not a callable"),
        (lambda s: None, stc.ShapeError, "must return a tensor .* found NoneType"),
        (lambda s: s[:2], stc.ShapeError, r"found \(2, 1\)"),
    ):
        with pytest.raises(kind, match=text):
            stc.map_entries(function, x, products={"s": (a, a)})  # type: ignore[arg-type]
    with pytest.raises(stc.KeywordError, match="calls the function with 5 arguments"):
        stc.attention(a, a, a, bias=lambda score, i, j: score)  # type: ignore[call-overload, arg-type, misc]

"""Progress bars: what takes long draws a line on a terminal, what is short draws none; interrupts leave no line."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc.contraction import compile, tuned
from sparsetc.support import entry
from sparsetc.support.entry import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of stderr; from the test itself, since pytest sets stderr between its phases."""
    pytest.importorskip("tqdm")
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(entry, "PATIENCE", 0.2)  # tqdm draws ten times a second
    return stderr


def drawn(terminal: Terminal, text: str) -> bool:
    """Wait until the display shows a text: a second thread draws it."""
    until = time.perf_counter() + 20
    while text not in terminal.getvalue() and time.perf_counter() < until:
        time.sleep(0.02)
    return text in terminal.getvalue()


def test_what_is_short_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched_terminal(monkeypatch)
    monkeypatch.setattr(entry, "PATIENCE", 60)
    with bar(10, "short") as at:
        at(10)
    assert terminal.getvalue() == ""


def test_each_thing_under_way_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched_terminal(monkeypatch)
    with bar(10, "outer", unit="iterations") as at:
        with bar(2_000_000, "inner") as at_inner:
            at(3)
            at_inner(1_000_000)
            assert drawn(terminal, "3/10")
            assert drawn(terminal, "1.00M/2.00M")
        time.sleep(0.15)  # tqdm draws ten times a second
        at(7, "retitled")
        assert drawn(terminal, "retitled")


def interrupted(terminal: Terminal) -> None:
    with bar(1000, "long"):
        assert drawn(terminal, "long")
        raise KeyboardInterrupt


def test_an_interrupt_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        interrupted(terminal)
    assert terminal.getvalue().rsplit("\r", 1)[-1].strip() == ""


CUBE = stc.SparseTensor(torch.arange(5).expand(3, 5), torch.arange(1.0, 6.0), (5, 5, 5))
LONG: dict[str, Callable[[bool | None], object]] = {
    "read": lambda wanted: stc.read("x.tns", progress=wanted),
    "pack": lambda wanted: stc.pack("x.tns", "x.parquet", progress=wanted),
    "cp_als": lambda wanted: stc.decomposition.cp_als(CUBE, 1, n_iter_max=1, progress=wanted),
    "cp_apr": lambda wanted: stc.decomposition.cp_apr(CUBE, 1, n_iter_max=1, progress=wanted),
    "tucker": lambda wanted: stc.decomposition.tucker(CUBE, 1, n_iter_max=1, progress=wanted),
    "stream": lambda wanted: stc.stream("ijk->i", CUBE, progress=wanted),
    "blocking_curve": lambda wanted: stc.plans.blocking_curve(CUBE.sum(2), taus=(0.5,), progress=bool(wanted)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_bar_that_is_asked_for_is_drawn_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stc.write("x.tns", CUBE)
    for wanted in (None, False, True):
        terminal = watched_terminal(monkeypatch)
        monkeypatch.setattr(entry, "PATIENCE", 600.0)  # what is not asked for waits
        LONG[name](wanted)
        assert bool(terminal.getvalue()) is bool(wanted)
        assert ("streaming" in terminal.getvalue()) is (name == "stream" and bool(wanted)), "not its packing alone"


@pytest.mark.parametrize("tune", ["model", "now"])
def test_compiling_and_timing_have_lines(monkeypatch: pytest.MonkeyPatch, tune: str) -> None:
    titles = []

    @contextmanager
    def watched(total: int | None, title: str, **_: Any) -> Iterator[Any]:
        titles.append(title)
        yield entry.unseen

    for module in (compile, tuned):
        monkeypatch.setattr(module, "bar", watched)
    x = stc.rand((50, 60, 70), 0.003)
    stc.compile("ijk,jr,kr->ir", x, torch.rand(60, 4), torch.rand(70, 4), tune=tune)
    assert titles[0] == 'compiling "ijk,jr,kr->ir"'
    assert any(title.startswith("timing") for title in titles) is (tune == "now")

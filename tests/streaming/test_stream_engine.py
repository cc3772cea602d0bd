"""What the host enqueues for a GPU, on streams and events that only keep their order: there need be no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stream import assert_same, operands, tensor

import sparsetc as stc
from sparsetc.streaming.engine import Engine
from sparsetc.streaming.stream import Stream

HERE: list[Any] = []
"""The streams that are current, the last one innermost."""


class FakeStream:
    """A stream whose work is done as it is enqueued."""

    def __init__(self, *given: object) -> None:
        self.log: list[tuple[str, object]] = []

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded
        self.log.append(("waits for", event))

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(("joins", other))

    def synchronize(self) -> None:
        self.log.append(("is waited for", None))


class FakeEvent:
    """An event that knows the stream it was recorded on."""

    def __init__(self, **given: object) -> None:
        self.recorded: FakeStream | None = None
        self.waited = 0

    def record(self) -> None:
        self.recorded = HERE[-1]
        HERE[-1].log.append(("records", self))

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStream]:
    """Engines take the way of a GPU; gives the stream that is current outside."""
    outside, make = FakeStream(), Engine.__init__

    def made(self: Engine, *given: Any) -> None:
        make(self, *given)
        self.cuda, self.streams = True, max(1, min(3, len(self.order)))

    @contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        HERE.append(stream)
        yield
        HERE.pop()

    monkeypatch.setattr(Engine, "__init__", made)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: outside)
    yield outside
    HERE.clear()


def cuda_streams(s: Stream) -> list[FakeStream]:
    return [stream for stream, *_ in s._engine.buffers]


@pytest.mark.parametrize("equation", ["ijklm,jr,kr->ir", "ijklm,k->ijlm", "ijklm->"])
@pytest.mark.parametrize("limit", [None, 20_000])
@pytest.mark.parametrize("from_file", [False, True])
def test_as_in_core(equation: str, limit: int | None, from_file: bool, enqueued: FakeStream, tmp_path: Path) -> None:
    x, dense = tensor(5, 4000), operands(equation)
    expected = stc.einsum(equation, x, *dense)
    path = tmp_path / "x" if from_file else None
    given = {"plan": "coo", "chunk_bytes": 4096, "memory_limit": limit, "file": path}
    with stc.stream_kernel(equation, x, *dense, **given) as s:
        for _ in range(2):
            assert_same(s(*dense), expected)
        assert len(s.timeline()) == s.chunks > 3
        assert {t.stream for t in s.timeline()} == {0, 1, 2}


def test_copies_follow_one_another_and_nothing_is_waited_for(enqueued: FakeStream) -> None:
    x, dense = tensor(5, 4000), operands("ijklm,jr,kr->ir")
    with stc.stream_kernel("ijklm,jr,kr->ir", x, *dense, plan="coo", chunk_bytes=4096) as s:
        s(*dense)
        marks = s._engine._marks
        for before, (begin, copied, ran) in zip([None, *marks], marks, strict=False):
            assert begin.recorded is copied.recorded is ran.recorded
            log = begin.recorded.log
            if before is not None:
                assert log[log.index(("records", begin)) - 1] == ("waits for", before[1])
            assert not begin.waited + copied.waited + ran.waited
        own = cuda_streams(s)
        assert all(("joins", enqueued) == one.log[0] for one in own)
        assert [("joins", one) for one in own] == enqueued.log


def test_progress_leaves_every_stream_a_chunk(enqueued: FakeStream) -> None:
    x, dense = tensor(5, 4000), operands("ijklm,jr,kr->ir")
    with stc.stream_kernel("ijklm,jr,kr->ir", x, *dense, plan="coo", chunk_bytes=4096, progress=True) as s:
        s(*dense)
        waited = [marks[-1].waited for marks in s._engine._marks]
        assert waited[0] == 4  # of the first four chunks, then of one before each
        assert waited[1:] == [1] * (s.chunks - 4) + [0] * 3


def test_buffers_of_a_file_are_overwritten_once_they_are_copied(enqueued: FakeStream, tmp_path: Path) -> None:
    x, dense = tensor(5, 4000), operands("ijklm,jr,kr->ir")
    with stc.stream_kernel("ijklm,jr,kr->ir", x, *dense, plan="coo", chunk_bytes=4096, file=tmp_path / "x") as s:
        s(*dense)
        waited = [marks[1].waited for marks in s._engine._marks]
        ring = len(s._store._ring)
        assert waited == [1] * (s.chunks - ring) + [0] * ring
        assert ("is waited for", None) in enqueued.log  # buffers are read anew by the next call


def test_a_failing_chunk_waits_for_what_was_enqueued(enqueued: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dense = tensor(5, 4000), operands("ijklm,jr,kr->ir")
    with stc.stream_kernel("ijklm,jr,kr->ir", x, *dense, plan="coo", chunk_bytes=4096) as s:
        find, count = Engine._call, [0]

        def found(self: Engine, *given: Any) -> Any:
            count[0] += 1
            if count[0] == 3:
                raise KeyboardInterrupt
            return find(self, *given)

        monkeypatch.setattr(Engine, "_call", found)
        with pytest.raises(KeyboardInterrupt):
            s(*dense)
        assert all(one.log[-1] == ("is waited for", None) for one in cuda_streams(s))
        assert_same(s(*dense), stc.einsum("ijklm,jr,kr->ir", x, *dense))


def test_other_streams_and_orders_of_the_same_chunks() -> None:
    x, dense = tensor(5, 4000), operands("ijklm,jr,kr->ir")
    with stc.stream_kernel("ijklm,jr,kr->ir", x, *dense, plan="coo", chunk_bytes=4096) as s:
        other = s.on(streams=2, order="given")
        assert other.order == tuple(range(s.chunks))
        assert_same(other(*dense), s(*dense))
        with pytest.raises(stc.PlanError):
            s.on(streams=0)
        with pytest.raises(stc.PlanError):
            s.on(order="none")

"""An iteration as a CUDA graph: when it is captured, and what happens where it cannot be. A stand-in records."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sparsetc.decomposition.loop import captured


class Recorder:
    """Stands for torch.cuda's graphs: what is called in a capture is not run, or fails in the middle."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.capturing, self.replays = fails, False, 0

    def capture_begin(self, **_: object) -> None:
        self.capturing = True

    def capture_end(self) -> None:
        self.capturing = False
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        self.replays += 1


class StandIn:
    """A generator of random numbers that counts how often its state is another."""

    freed = 0

    def clone_state(self) -> str:
        return "another"

    def graphsafe_set_state(self, state: str) -> None:
        self.freed += state == "another"


@pytest.mark.parametrize("fails", [False, True])
def test_the_second_call_is_captured_and_a_failure_runs_on(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    recorder, ran = Recorder(fails), []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: recorder)
    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    generator = StandIn()
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    step = captured(lambda: None if recorder.capturing else ran.append(1), torch.device("cuda", 0))
    for _ in range(7):
        step()
    assert len(ran) + recorder.replays == 7
    assert len(ran) == (7 if fails else 1)
    assert generator.freed == fails


def test_nothing_is_captured_elsewhere_or_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        step = captured(lambda: ran.append(1), torch.device(device))
        for _ in range(5):
            step()
    assert len(ran) == 10

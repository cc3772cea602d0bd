"""`codegen.launch`: what Triton is given at a first call and at later ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsetc.codegen import launch

pytest.importorskip("triton")


class Kernel:
    """A kernel as Triton has it: called on a grid, it returns what it compiled."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Kernel:
            self.calls.append(arguments)
            return self

        return call


def test_a_compiled_form_is_given_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, started = Kernel(), list[Any]()
    monkeypatch.setattr(launch, "_start_of", lambda compiled, grid, device: lambda given: started.append([*given]))
    fixed, x, out = torch.zeros(3), torch.zeros(8), torch.zeros(8)
    run = launch.launch_of(kernel, 5, {}, [2, 3], [7, fixed])
    run([7, fixed, x, out])
    assert not started
    assert kernel.calls[0][2] is x
    run([7, fixed, out, x])
    assert started == [[7, fixed.data_ptr(), out.data_ptr(), x.data_ptr()]]
    run([7, fixed, x[1:], out])  # not at a multiple of 16 bytes: another form
    assert len(kernel.calls) == 2
    assert len(started) == 1


def test_profilers_are_told_of_launches() -> None:
    from triton import knobs
    from triton.runtime import driver

    started = list[Any]()

    class Compiled(Kernel):
        function, packed_metadata = 11, (4, 1, 0)

        def run(self, *arguments: Any) -> None:
            started.append(arguments)

    compiled, hook = Compiled(), lambda metadata: None
    before = driver._active
    driver.set_active(SimpleNamespace(get_current_stream=lambda index: 100 + index))  # type: ignore[arg-type]
    try:
        run = launch._start_of(compiled, 6, torch.device("cuda", 1))
        run([1, 2])
        assert started == [(6, 1, 1, 101, 11, (4, 1, 0), None, None, None, 1, 2)]
        knobs.runtime.launch_enter_hook.add(hook)
        run([3, 4])
        assert len(started) == 1
        assert compiled.calls == [(3, 4)]
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
        driver._active = before

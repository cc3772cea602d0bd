"""Calls of rows: peers that are built late, tuned or compiled; calls with gradients; new data at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import common
import torch

from instead_rows.row import Call

T = TypeVar("T")


def versioned(package: str) -> str:
    """A package's name and version; the name alone where it is not installed."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def later(build: Callable[[], Call]) -> Call:
    """Build a call when it is first called, so that what fails to build is one peer and not the row."""
    built: list[Call] = []

    def call() -> Any:
        if not built:
            built.append(build())
        return built[0]()

    return call


def fastest(calls: Iterable[Call]) -> Call:
    """Return the call that the clock prefers; those that raise are left out."""
    times: list[tuple[float, Call]] = []
    for call in calls:
        try:
            times.append((common.microseconds(call, repeat_ms=15), call))
        except Exception:  # a schedule that does not compile or fit
            continue
    return min(times, key=lambda pair: pair[0])[1]


def with_tf32(call: Call) -> Call:
    """Let dense products of the call be rounded to tf32."""

    def rounded() -> Any:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return call()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return rounded


def plain_and_compiled(name: str, function: Callable[..., Any], *arguments: Any) -> dict[str, Call]:
    """Two peers: a function of torch as it is, and by `torch.compile`."""
    fast = torch.compile(function, dynamic=False)
    return {name: lambda: function(*arguments), f"torch.compile of {name}": lambda: fast(*arguments)}


def quiet(call: Call) -> Call:
    """The call without gradients."""

    def called() -> Any:
        with torch.no_grad():
            return call()

    return called


def step(call: Call, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> Call:
    """The call and its backward: (result, gradients of the inputs)."""

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        out = call()
        return (out.detach(), *torch.autograd.grad(out, inputs, gradient.to(out.dtype)))

    return forward_and_backward


def each_once(items: Sequence[T]) -> Callable[[], T]:
    """Return a function that gives one item after the other."""
    left: Iterator[T] = iter(items)
    return lambda: next(left)

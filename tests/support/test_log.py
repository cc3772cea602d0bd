"""What the log, and torch's profiler, say of a call."""

from __future__ import annotations

import logging

import pytest
import torch

import sparsetc as stc
from sparsetc.decomposition import cp_als


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    x, b = stc.rand((50, 60), nnz=300), torch.rand(60, 7)
    stc.clear_cache()
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        stc.einsum("ij,jr->ir", x, b)
    (compiled,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert compiled.startswith('compiled "ij,jr->ir", plan ')
    assert compiled.endswith(" ms")
    details = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert any(text.startswith("packed 300 nonzeros as ") for text in details)
    assert any(text.startswith("loaded ") for text in details)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        stc.einsum("ij,jr->ir", x, b)
    assert not caplog.records


def test_the_log_of_what_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    x, b = stc.rand((50, 60), nnz=300), torch.rand(60, 3)
    with caplog.at_level(logging.INFO, "sparsetc"):
        stc.einsum("ij,jr->ir", x, b, tune=0.05)
        with stc.stream_kernel("ij,jr->ir", x, b) as stream:
            stream(b)
        cp_als(x, 2, n_iter_max=2, tol=0)
    said = "\n".join(r.getMessage() for r in caplog.records)
    for part in ('plans of "ij,jr->ir", the fastest', 'bytes for "ij,jr->ir"', "2 iterations, n_iter_max"):
        assert part in said


def test_the_profiler() -> None:
    x, b = stc.rand((50, 60), nnz=300), torch.rand(60, 7)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        stc.einsum("ij,jr->ir", x, b)
    (event,) = [e for e in seen.events() if e.name.startswith("sparsetc ")]
    assert event.name == f'sparsetc "ij,jr->ir" {stc.compile("ij,jr->ir", x, b).plan.name}'

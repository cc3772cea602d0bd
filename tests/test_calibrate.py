"""Rates: the record on disk, who reads it, what is measured without a GPU (nothing), and the probes' kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Problem

import sparsetc as stc
from sparsetc import cache_folder, rates_record
from sparsetc.codegen.launch import TARGETS, TRITON_TYPES
from sparsetc.ir.cost import CPU, Rates, rates_of
from sparsetc.options import Options
from sparsetc.pair import prices
from sparsetc.planner import calibrate as calibration
from sparsetc.planner.calibrate import Launch, Sizes, probes, starts

GPU = "NVIDIA Test GPU (80 GB)"
RATES = Rates(
    name=GPU,
    calibrated="2026-11-20",
    memory=1.5e12,
    l2=4e12,
    dot=(("ieee", 1e13), ("tf32x3", 2e13), ("tf32", 6e13), ("bf16", 1.2e14)),
    l2_bytes=33_000_000,
    launch=3.5e-6,
)
SOFTWARE = {"driver": "1.2", "torch": "2.0", "triton": None}
TINY = Sizes(streamed=64, block=32, table=16, gathered=2048, added=256, programs=2, steps=16, started=(2, 4))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """No record is remembered, before and after, and others may not write to what is made."""
    mask = os.umask(0o022)
    rates_record._read.cache_clear()
    yield
    os.umask(mask)
    rates_record._read.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine with a GPU; returns where its record belongs."""
    monkeypatch.setenv("SPARSETC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    return tmp_path / "rates" / "nvidia-test-gpu-80-gb.json"


# -- the record -------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(gpu: Path) -> None:
    assert rates_record.write(RATES, SOFTWARE) == gpu
    assert rates_of("triton") == RATES
    document = json.loads(gpu.read_text())
    assert {k: document[k] for k in ("gpu", "date", *SOFTWARE)} == {"gpu": GPU, "date": "2026-11-20", **SOFTWARE}
    assert set(document["rates"]) == set(rates_record.MEASURED), "what was not measured is not kept"
    assert [p.name for p in gpu.parent.iterdir()] == [gpu.name], "nothing temporary is left"


def test_what_is_not_measured_stays_at_its_default(gpu: Path) -> None:
    rates_record.write(replace(RATES, wait=1.0, fiber=1.0, l1_bytes=1), SOFTWARE)
    assert rates_of("triton") == RATES


def test_a_gpu_without_a_record_has_the_defaults_and_no_warning(gpu: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rates_of("triton") == Rates()
    assert not gpu.parent.exists()


def _with(**changes: Any) -> bytes:
    rates = {name: getattr(RATES, name) for name in rates_record.MEASURED} | {"dot": dict(RATES.dot)}
    document = {"version": rates_record.VERSION, "gpu": GPU, "date": "2026-11-20", "rates": rates}
    document["rates"] |= {k: v for k, v in changes.items() if k in rates or k == "unknown"}
    return json.dumps(document | {k: v for k, v in changes.items() if k in document}).encode()


DAMAGED = {
    "empty": b"",
    "cut": _with()[:-20],
    "binary": b"\xff\xfe\x00binary",
    "no object": b"[1, 2]",
    "another version": _with(version=rates_record.VERSION + 1),
    "another GPU": _with(gpu="NVIDIA A100"),
    "no date": _with(date=""),
    "no rates": _with(rates=None),
    "a rate too few": _with(rates={"memory": 1e12}),
    "a rate too many": _with(unknown=1.0),
    "zero": _with(memory=0),
    "negative": _with(add=-1e12),
    "not finite": _with(l2=float("inf")),
    "not a number": _with(l1=float("nan")),
    "text": _with(launch="4e-6"),
    "truth": _with(program=True),
    "dot of one precision": _with(dot={"ieee": 1e12}),
    "dot as a number": _with(dot=1e12),
    "dot of nothing": _with(dot=dict.fromkeys(dict(RATES.dot), 0)),
    "400 digits": _with(memory=10**400),
    "more digits than are converted": _with().replace(b"1500000000000.0", b"1" * 5000),
    "far too fast": _with(memory=1e300),
    "far too slow": _with(l2=5e-324),
    "a version of 400 digits": _with(version=10**400),
    "nested": b"[" * 60_000,
    "too long": _with(date="2026-11-20" + " " * (1 << 16)),
    "a date that is none": _with(date="\x1b[31m2026"),
}


def test_an_intact_record_passes_the_same_way(gpu: Path) -> None:
    gpu.parent.mkdir()
    gpu.write_bytes(_with())
    assert rates_of("triton") == RATES


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_foreign_record_is_passed_over_with_one_warning(damage: str, gpu: Path) -> None:
    gpu.parent.mkdir()
    gpu.write_bytes(DAMAGED[damage])
    with pytest.warns(UserWarning, match=r"holds no rates of NVIDIA Test GPU .*sparsetc calibrate") as told:
        assert [rates_of("triton") for _ in range(3)] == [Rates()] * 3
    assert len(told) == 1
    assert gpu.read_bytes() == DAMAGED[damage]


def test_a_folder_in_the_records_place_is_passed_over_too(gpu: Path) -> None:
    gpu.mkdir(parents=True)
    with pytest.warns(UserWarning, match="holds no rates"):
        assert rates_of("triton") == Rates()


@pytest.mark.skipif(os.name != "posix", reason="no links, pipes and modes")
@pytest.mark.parametrize("case", ["link", "pipe", "file of all", "folder of all", "cache of all"])
def test_a_record_that_others_may_have_made_is_passed_over(gpu: Path, case: str) -> None:
    record = gpu.with_name("elsewhere.json") if case == "link" else gpu
    record.parent.mkdir()
    if case == "pipe":
        os.mkfifo(gpu)  # reading it would wait for a writer
    else:
        record.write_bytes(_with())
    if case == "link":
        gpu.symlink_to(record)
    if case.endswith("of all"):
        {"file": gpu, "folder": gpu.parent, "cache": gpu.parent.parent}[case.split()[0]].chmod(0o777)
    with pytest.warns(UserWarning, match="holds no rates"):
        assert rates_of("triton") == Rates()


@pytest.mark.skipif(os.name != "posix", reason="no links and modes")
def test_writing_a_record_follows_no_link_and_lets_nobody_else_read(gpu: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    gpu.parent.mkdir()
    gpu.parent.chmod(0o777)
    gpu.symlink_to(target)
    rates_record.write(RATES, SOFTWARE)
    assert target.read_text() == "kept"
    assert [p.stat().st_mode & 0o777 for p in (gpu, gpu.parent)] == [0o600, 0o700]
    assert rates_of("triton") == RATES
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="others may write to it"):
        rates_record.write(RATES, SOFTWARE)


def test_without_a_home_there_are_no_records(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "default_directory", lambda: None)
    assert rates_of("triton") == Rates()
    with pytest.raises(OSError, match="set SPARSETC_CACHE_DIR"):
        rates_record.write(RATES, SOFTWARE)


def test_a_record_is_read_once_a_process_and_again_when_written(gpu: Path) -> None:
    rates_record.write(RATES, SOFTWARE)
    assert rates_of("triton") == RATES
    gpu.unlink()
    assert rates_of("triton") == RATES, "plans of one process are made by the same rates"
    slower = replace(RATES, memory=1e12)
    rates_record.write(slower, SOFTWARE)
    assert rates_of("triton") == slower


def test_the_folder_is_that_of_the_option_then_of_the_variable(gpu: Path, tmp_path: Path) -> None:
    assert rates_record.path_of(GPU) == gpu
    with stc.options(cache_dir=tmp_path / "other"):
        rates_record.write(RATES, SOFTWARE)
        assert rates_of("triton") == RATES
    assert rates_of("triton") == Rates()
    assert (tmp_path / "other" / "rates" / gpu.name).exists()


def test_a_record_that_cannot_be_written_is_an_error_and_leaves_the_old_one(gpu: Path) -> None:
    gpu.parent.write_text("in the way")
    with pytest.raises(OSError, match="rates"):
        rates_record.write(RATES, SOFTWARE)


# -- who reads it -----------------------------------------------------------------------------------------------------


def test_torch_programs_have_the_cpus_rates_and_ask_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("CUDA was touched")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    assert rates_of("torch") is CPU


def test_without_a_gpu_triton_programs_have_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rates_of("triton") == Rates()


def test_explain_names_the_rates_and_computes_with_them(gpu: Path, tmp_path: Path) -> None:
    problem = Problem("ij,jr->ir")
    operands = problem.operands()
    before = stc.explain(problem.equation, *operands, backend="triton", plan="coo")
    assert "\n  rates    NVIDIA H200 (defaults)\n" in str(before)
    assert "2 CPU cores (defaults)" in str(stc.explain(problem.equation, *operands, backend="torch"))
    elsewhere = tmp_path / "elsewhere"
    with stc.options(cache_dir=elsewhere):
        rates_record.write(replace(RATES, launch=1.0), SOFTWARE)
    kernel = stc.compile(problem.equation, *operands, backend="triton", plan="coo", cache_dir=elsewhere)
    after = kernel.explain()
    assert after.rates == f"{GPU} (calibrated 2026-11-20)"
    assert f"\n  rates    {after.rates}\n" in str(after)
    assert after.to_dict()["rates"] == after.rates
    assert after.considered[0][1] >= 1e6 > before.considered[0][1], "planned with the record of the call's cache_dir"
    assert after.parts[0].predicted_us >= 1e6, "and explained with it outside of the call"


def test_paths_of_two_sparse_operands_have_the_rates_of_the_gpu(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, settings = torch.device("cuda:0"), Options(cache_dir=tmp_path / "elsewhere")
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    assert prices.rates_of(device, settings) is prices.GPU
    assert prices.GPU.whose == "NVIDIA H200 (defaults)"
    assert prices.rates_of(torch.device("cpu"), settings).whose == "2 CPU cores (defaults)"
    with stc.options(cache_dir=tmp_path / "elsewhere"):
        rates_record.write(RATES, SOFTWARE)
    found = prices.rates_of(device, settings)
    assert found.whose == f"{GPU} (calibrated 2026-11-20)"
    assert found.memory == pytest.approx(prices.GPU.memory * 1.5 / 4.373)
    assert found.task_bytes == pytest.approx(prices.GPU.task_bytes * 1.5 / 4.373)
    assert found.blocks["high"] == pytest.approx(prices.GPU.blocks["high"] * 60 / 459.7)
    assert found.launch == pytest.approx(prices.GPU.launch * 3.5 / 3.968)
    assert found.turn == prices.GPU.turn, "calibrate does not measure it"
    assert prices.rates_of(device, Options()) is prices.GPU, "the record is another folder's"


def test_an_h200_that_was_calibrated_keeps_its_rates() -> None:
    record = json.loads((Path(__file__).parents[1] / "benchmarks/results/rates_h200.json").read_text())
    kept = {name: rate for name, rate in record["rates"].items() if name != "dot"}
    found = prices.calibrated(Rates(**kept, dot=tuple(record["rates"]["dot"].items()), calibrated="2026-11-20"))
    assert replace(found, whose=prices.GPU.whose) == prices.GPU


def test_explain_names_the_rates_of_pairs() -> None:
    x = stc.SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
    explained = stc.explain("ij,jk->ik", x, x)
    assert explained.to_dict()["rates"] == "2 CPU cores (defaults)"
    assert "\n  rates    2 CPU cores (defaults)\n" in str(explained)


# -- calibrating ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    with stc.options(cache_dir=tmp_path), pytest.raises(stc.DeviceError, match="finds none"):
        stc.calibrate()
    environment = {**os.environ, "SPARSETC_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "sparsetc", "calibrate"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "sparsetc: calibrate measures a GPU, and torch finds none here; nothing was measured or changed"
    )
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_interpreted_kernels_are_not_timed(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(stc.DeviceError, match="TRITON_INTERPRET"):
        stc.calibrate()
    assert not gpu.exists()


@pytest.fixture
def timed(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU that takes 1 us, and 2 ns a program; nothing is launched."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"L2_cache_size": 60}))
    monkeypatch.setattr(calibration, "probes", lambda _, sizes: probes(torch.device("cpu"), sizes))
    monkeypatch.setattr(calibration, "starts", lambda _, sizes: starts(torch.device("cpu"), sizes))
    monkeypatch.setattr(calibration, "Sizes", lambda: TINY)
    monkeypatch.setattr(calibration, "_seconds", lambda launches: min(1e-6 + 2e-9 * one.grid for one in launches))
    return gpu


def test_what_is_measured_is_kept_and_used(timed: Path) -> None:
    with stc.options(memory_limit=1 << 40):
        found = stc.calibrate()
    assert (found.name, found.program, found.l2_bytes) == (GPU, 2e-9, 50)
    assert found.memory == pytest.approx(4 * 64 / 1.004e-6, rel=1e-3)
    assert dict(found.dot)["bf16"] == pytest.approx(2 * 64 * 64 * 16 * 16 * 2 / 1.004e-6, rel=1e-3)
    assert rates_of("triton") == found
    assert json.loads(timed.read_text())["torch"] == str(torch.__version__)


def test_the_command_prints_a_line_a_rate_and_the_records_path(
    timed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparsetc.__main__ import main

    with stc.options(memory_limit=1 << 40):
        assert main(["calibrate"]) == 0
    said = capsys.readouterr().out
    lines = {line.split("  ")[1]: line.split() for line in said.splitlines() if line.startswith("  ")}
    assert {"memory", "l2", "l1", "add", "multiply", "dot tf32x3", "l2_bytes", "launch", "program"} <= set(lines)
    assert lines["memory"][2:] == ["4.4", "TB/s"]
    assert lines["program"] == ["program", "2", "1", "ns"]
    assert lines["dot bf16"][3] == "624"
    assert str(timed) in said


def test_too_little_memory_is_refused_before_any_is_taken(timed: Path) -> None:
    with stc.options(memory_limit=1), pytest.raises(stc.OutOfMemoryError, match="calibrating would take"):
        stc.calibrate()
    assert not timed.exists()


def test_a_gpu_too_busy_to_measure_is_refused(timed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_seconds", lambda _: 1e-6)
    with stc.options(memory_limit=1 << 40), pytest.raises(stc.DeviceError, match="something else runs"):
        stc.calibrate()
    assert not timed.exists()


def test_the_default_of_the_l2_cache_is_an_h200s_by_the_same_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, expected in [(60_000_000, Rates().l2_bytes), (0, Rates().l2_bytes)]:
        properties = type("Properties", (), {"L2_cache_size": size})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert calibration._l2_bytes(torch.device("cuda")) == expected


# -- kernels ----------------------------------------------------------------------------------------------------------


def compiled(launch: Launch, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    types = ["i32" if isinstance(a, int) else f"*{TRITON_TYPES[a.dtype]}" for a in launch.arguments]
    signature = dict.fromkeys(names, "constexpr") | dict(zip(names, types, strict=False))
    aligned: dict[Any, Any] = {(n,): [["tt.divisibility", 16]] for n, t in enumerate(types) if t.startswith("*")}
    source = ASTSource(launch.kernel, signature, constexprs=dict(launch.constants), attrs=aligned)
    options = {"num_warps": launch.warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_for(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    backend = TARGETS[target][0]
    monkeypatch.setattr(calibration, "_backend", lambda: backend)
    cpu, sizes = torch.device("cpu"), replace(TINY, block=8192, steps=256)
    texts = {p.rate: [_assembly(compiled(one, target)) for one in p.launches] for p in probes(cpu, sizes)}
    dots = ["ieee", "bf16"] if backend == "hip" else ["ieee", "tf32x3", "tf32", "bf16"]
    assert list(texts) == ["memory", "l2", "add", "l1", "multiply", *(f"dot {p}" for p in dots)]
    assert ("v_mfma_" if backend == "hip" else "mma") in texts["dot bf16"][0]
    if backend == "cuda":
        assert all("ld.global.v4" in text for text in texts["memory"] + texts["l2"] + texts["l1"])
        assert texts["multiply"][0].count("fma.rn.f32") >= 16, "one instruction for the two operations"
        assert "mma" not in texts["dot ieee"][0]
    assert len({one.kernel for one in starts(cpu, sizes)}) == 1
    assert _assembly(compiled(starts(cpu, sizes)[0], target))


def _assembly(kernel: Any) -> str:
    return kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]

"""Profiles of devices: the record on disk, who reads it, what is measured without a GPU (nothing), and the probes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from calibration_cases import TINY
from cases import Problem

import sparsetc as stc
from sparsetc import calibration as cpu_calibration
from sparsetc.codegen.launch import triton_type
from sparsetc.device import calibrate as calibration
from sparsetc.device import profile as profiles
from sparsetc.device import profile as record
from sparsetc.device.calibrate import Launch, Probe, probes, starts, torch_probes
from sparsetc.device.profile import NUMBERS, TABLES, TARGETS, DeviceProfile, cpu, default_gpu, of_backend, profile_of
from sparsetc.options import Options
from sparsetc.planner import problem as planning
from sparsetc.support import files

GPU = "NVIDIA Test GPU (80 GB)"
DAY = "2026-11-20"
MEASURED = {name: getattr(default_gpu(), name) for name in record.MEASURED} | {
    "memory": 1.5e12,
    "l2": 4e12,
    "dot": {"ieee": 1e13, "tf32x3": 2e13, "tf32": 6e13, "bf16": 1.2e14},
    "product": {"highest": 1e13, "high": 5e13, "medium": 5e13, "float64": 8e12},
    "block_dot": {"f16x3": 5e13, "highest": 2e13, "high": 6e13, "medium": 7e13, "float64": 8e12},
    "add": 3.805e12,
    "l2_bytes": 33_000_000,
    "launch": 3.5e-6,
    "call": 5e-6,
    "warps": 432,
}
PROFILE = profiles.calibrated(GPU, DAY, MEASURED)
PAIRED = (*(f"block_dot {name}" for name in default_gpu().block_dot), "near_blocks")
SOFTWARE = {"driver": "1.2", "torch": "2.0", "triton": None}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """No record is remembered, before and after, and others may not write to what is made."""
    mask = os.umask(0o022)
    record._read.cache_clear()
    yield
    os.umask(mask)
    record._read.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine with a GPU; returns where its record belongs."""
    monkeypatch.setenv("SPARSETC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    return tmp_path / "profiles" / "nvidia-test-gpu-80-gb.json"


# -- the record -------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(gpu: Path) -> None:
    assert record.write(PROFILE, SOFTWARE) == gpu
    assert of_backend("triton") == PROFILE
    document = json.loads(gpu.read_text())
    assert {k: document[k] for k in ("name", "date", *SOFTWARE)} == {"name": GPU, "date": DAY, **SOFTWARE}
    assert set(document["fields"]) == set(record.MEASURED), "what was not measured is not kept"
    assert [p.name for p in gpu.parent.iterdir()] == [gpu.name], "nothing temporary is left"


def test_what_is_not_measured_stays_at_its_default(gpu: Path) -> None:
    record.write(replace(PROFILE, wait=1.0, fiber=1.0, l1_bytes=1), SOFTWARE)
    assert of_backend("triton") == PROFILE


def test_a_gpu_without_a_record_has_the_defaults_and_no_warning(gpu: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_backend("triton") == default_gpu()
    assert not gpu.parent.exists()


def _with(**changes: Any) -> bytes:
    """A record, changed: values of fields, a field more, or what is beside the fields."""
    entries = {name: {"value": value, "source": f"measured: calibrate, {DAY}"} for name, value in MEASURED.items()}
    document = {"version": record.VERSION, "name": GPU, "date": DAY, "fields": entries}
    values = {k: v for k, v in changes.items() if k not in document}
    document["fields"] = entries | {k: {"value": v, "source": f"measured: calibrate, {DAY}"} for k, v in values.items()}
    return json.dumps(document | {k: v for k, v in changes.items() if k in document}).encode()


DAMAGED = {
    "empty": b"",
    "cut": _with()[:-20],
    "binary": b"\xff\xfe\x00binary",
    "no object": b"[1, 2]",
    "another version": _with(version=record.VERSION + 1),
    "another GPU": _with(name="NVIDIA A100"),
    "no date": _with(date=""),
    "no fields": _with(fields=None),
    "a field too few": _with(fields={"memory": {"value": 1e12, "source": f"measured: calibrate, {DAY}"}}),
    "a field too many": _with(unknown=1.0),
    "numbers without a source": _with(fields=MEASURED),
    "another source": _with().replace(f"calibrate, {DAY}".encode(), b"\\u001b[31m"),
    "zero": _with(memory=0),
    "negative": _with(add=-1e12),
    "not finite": _with(l2=float("inf")),
    "not a number": _with(l1=float("nan")),
    "text": _with(launch="4e-6"),
    "truth": _with(program=True),
    "dot of one precision": _with(dot={"ieee": 1e12}),
    "dot as a number": _with(dot=1e12),
    "dot of nothing": _with(dot=dict.fromkeys(PROFILE.dot, 0)),
    "400 digits": _with(memory=10**400),
    "more digits than are converted": _with().replace(b"1500000000000.0", b"1" * 5000),
    "far too fast": _with(memory=1e300),
    "far too slow": _with(l2=5e-324),
    "a version of 400 digits": _with(version=10**400),
    "nested": b"[" * 60_000,
    "too long": _with(date=DAY + " " * (1 << 16)),
    "a date that is none": _with(date="\x1b[31m2026"),
}


def test_an_intact_record_passes_the_same_way(gpu: Path) -> None:
    gpu.parent.mkdir()
    gpu.write_bytes(_with())
    assert of_backend("triton") == PROFILE


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_foreign_record_is_passed_over_with_one_warning(damage: str, gpu: Path) -> None:
    gpu.parent.mkdir()
    gpu.write_bytes(DAMAGED[damage])
    with pytest.warns(UserWarning, match=r"holds no profile of NVIDIA Test GPU .*sparsetc calibrate") as told:
        assert [of_backend("triton") for _ in range(3)] == [default_gpu()] * 3
    assert len(told) == 1
    assert gpu.read_bytes() == DAMAGED[damage]


def test_a_folder_in_the_records_place_is_passed_over_too(gpu: Path) -> None:
    gpu.mkdir(parents=True)
    with pytest.warns(UserWarning, match="holds no profile"):
        assert of_backend("triton") == default_gpu()


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
    with pytest.warns(UserWarning, match="holds no profile"):
        assert of_backend("triton") == default_gpu()


@pytest.mark.skipif(os.name != "posix", reason="no links and modes")
def test_writing_a_record_follows_no_link_and_lets_nobody_else_read(gpu: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    gpu.parent.mkdir()
    gpu.parent.chmod(0o777)
    gpu.symlink_to(target)
    record.write(PROFILE, SOFTWARE)
    assert target.read_text() == "kept"
    assert [p.stat().st_mode & 0o777 for p in (gpu, gpu.parent)] == [0o600, 0o700]
    assert of_backend("triton") == PROFILE
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="others may write to it"):
        record.write(PROFILE, SOFTWARE)


def test_without_a_home_there_are_no_records(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "default_directory", lambda: None)
    assert of_backend("triton") == default_gpu()
    with pytest.raises(OSError, match="set SPARSETC_CACHE_DIR"):
        record.write(PROFILE, SOFTWARE)


def test_a_record_is_read_once_a_process_and_again_when_written(gpu: Path) -> None:
    record.write(PROFILE, SOFTWARE)
    assert of_backend("triton") == PROFILE
    gpu.unlink()
    assert of_backend("triton") == PROFILE, "plans of one process are made by the same numbers"
    slower = profiles.calibrated(GPU, DAY, MEASURED | {"memory": 1e12})
    record.write(slower, SOFTWARE)
    assert of_backend("triton") == slower


def test_the_folder_is_that_of_the_option_then_of_the_variable(gpu: Path, tmp_path: Path) -> None:
    assert record.path_of(GPU) == gpu
    with stc.options(cache_dir=tmp_path / "other"):
        record.write(PROFILE, SOFTWARE)
        assert of_backend("triton") == PROFILE
    assert of_backend("triton") == default_gpu()
    assert (tmp_path / "other" / "profiles" / gpu.name).exists()


def test_a_record_that_cannot_be_written_is_an_error_and_leaves_the_old_one(gpu: Path) -> None:
    gpu.parent.write_text("in the way")
    with pytest.raises(OSError, match="profiles"):
        record.write(PROFILE, SOFTWARE)


# -- who reads it -----------------------------------------------------------------------------------------------------


def test_torch_programs_have_the_cpus_rates_and_ask_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("CUDA was touched")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    assert of_backend("torch") is cpu()


def test_torch_programs_on_a_gpu_have_its_rates_and_are_stored_by_a_cpus_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("ij,jr->ir")
    planned = stc.compile(problem.equation, *problem.operands(), backend="torch").step.problem
    assert planned.profile is cpu()
    there = SimpleNamespace(coords=SimpleNamespace(device=torch.device("cuda:0")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_gpu = replace(planned, counts=there)
    assert default_gpu() is profile_of(torch.device("cpu"), Options(), "triton")
    assert on_gpu.profile.memory == default_gpu().memory
    assert [*on_gpu.profile.loops] == ["torch"]
    assert on_gpu.rules is planned.rules is cpu().rules
    monkeypatch.setattr(planning, "of_backend", lambda *_: default_gpu())
    x = stc.SparseTensor(torch.arange(100_000).view(1, -1).expand(2, -1), torch.ones(100_000), (100_000, 100_000))
    chosen = stc.compile("ij,j->ij", x, torch.ones(100_000), backend="torch", plan="coo").step.choice
    assert 0 < chosen.total < 1e-4, "whole rows at once wait for no loads one after the other"


def test_without_a_gpu_triton_programs_have_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert of_backend("triton") == default_gpu()


def test_explain_names_the_profile_and_computes_with_it(gpu: Path, tmp_path: Path) -> None:
    problem = Problem("ij,jr->ir")
    operands = problem.operands()
    before = stc.explain(problem.equation, *operands, backend="triton", plan="coo")
    assert f"\n  profile  {default_gpu().describe()}\n" in str(before)
    assert f"\n  profile  {cpu().describe()}\n" in str(stc.explain(problem.equation, *operands, backend="torch"))
    elsewhere = tmp_path / "elsewhere"
    with stc.options(cache_dir=elsewhere):
        record.write(replace(PROFILE, launch=1.0), SOFTWARE)
    kernel = stc.compile(problem.equation, *operands, backend="triton", plan="coo", cache_dir=elsewhere)
    after = kernel.explain()
    assert after.profile == PROFILE.describe()
    assert f"\n  profile  {after.profile}\n" in str(after)
    assert after.to_dict()["profile"] == after.profile
    assert set(after.to_dict()["measured"]) == set(record.MEASURED)
    assert after.considered[0][1] >= 1e6 > before.considered[0][1], "planned with the record of the call's cache_dir"
    assert after.parts[0].predicted_us >= 1e6, "and explained with it outside of the call"


def test_paths_of_two_sparse_operands_have_the_profile_of_the_gpu(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, settings, usual = torch.device("cuda:0"), Options(cache_dir=tmp_path / "elsewhere"), default_gpu()
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert profile_of(device, settings, "triton") is usual
    assert profile_of(torch.device("cpu"), settings) is cpu()
    with stc.options(cache_dir=tmp_path / "elsewhere"):
        record.write(PROFILE, SOFTWARE)
    found = profile_of(device, settings, "triton")
    assert found == PROFILE
    assert found.expanded_bytes == pytest.approx(usual.expanded_bytes * 1.5 / 4.373)
    assert found.far_blocks == pytest.approx(usual.far_blocks * 1.5 / 4.373)
    assert found.near_bytes == int(usual.near_bytes * (33_000_000 / 52_428_800))
    assert found.crowded == usual.crowded
    assert found.block_dot["high"] == 60e12
    assert found.product == MEASURED["product"]
    assert found.call == 5e-6
    assert found.pair_turn == usual.pair_turn, "calibrate does not measure it"
    assert profile_of(device, Options(), "triton") is usual, "the record is another folder's"


def test_an_h200_that_was_calibrated_keeps_what_is_scaled() -> None:
    kept = json.loads((Path(__file__).parents[2] / "benchmarks/results/rates_h200.json").read_text())["rates"]
    found, usual = profiles.calibrated("NVIDIA H200", DAY, kept), default_gpu()
    assert {n: getattr(found, n) for n in NUMBERS if n not in kept} == {
        n: getattr(usual, n) for n in NUMBERS if n not in kept
    }


def test_explain_names_the_profile_of_pairs() -> None:
    x = stc.SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
    explained = stc.explain("ij,jk->ik", x, x)
    assert explained.to_dict()["profile"] == explained.profile == cpu().describe()
    assert explained.to_dict()["measured"] == cpu().measured
    assert f"\n  profile  {explained.profile}\n" in str(explained)


def test_pairs_of_triton_programs_are_priced_as_on_a_gpu() -> None:
    x = stc.SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
    explained = stc.explain("ij,jk->ik", x, x, backend="triton")
    assert explained.profile == stc.explain("ij,jk->ik", x, torch.ones(2, 2), backend="triton").profile
    assert explained.profile == default_gpu().describe()
    assert stc.explain("ij,jk->ik", x, x, backend="torch").profile == cpu().describe()


# -- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [default_gpu(), cpu(), PROFILE], ids=lambda p: p.name)
def test_every_number_of_a_profile_has_a_source(profile: DeviceProfile) -> None:
    assert tuple(profile.sources) == (*NUMBERS, *profile.constants, *profile.rules)
    assert all(re.match("(measured|assumed): .", source) for source in profile.sources.values())
    for name in NUMBERS:
        value = getattr(profile, name)
        assert isinstance(value, dict) == (name in TABLES)
        assert all(n >= 0 for n in (value.values() if name in TABLES else [value]))
    assert all(constants >= 0 for constants in profile.constants.values())
    assert f"{len(profile.measured)} of {len(profile.sources)} numbers measured" in profile.describe()
    assert profile.describe() in repr(profile)
    assert pickle.loads(pickle.dumps(profile)) == copy.deepcopy(profile) == profile
    assert hash(profile) == hash(copy.deepcopy(profile))


def test_every_law_and_rule_is_read_and_every_number_says_what_it_means() -> None:
    package = Path(profiles.__file__).parents[1]
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    assert {*re.findall(r'constants\["(\w+)"\]', code)} == {*default_gpu().constants}
    read = {name for names in re.findall(r"rules\[([^]]+)\]", code) for name in re.findall(r'"(\w+)"', names)}
    assert {*default_gpu().rules} == {*cpu().rules} <= read
    shipped = json.loads((package / "device" / "profiles" / "nvidia-h200.json").read_text())
    entries = shipped["fields"] | shipped["rules"]
    named = [*NUMBERS, *default_gpu().constants, *default_gpu().rules]
    assert [name for name, entry in entries.items() if entry.get("means")] == named


def test_records_that_a_profile_names_are_in_the_repository() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    for profile in (default_gpu(), cpu()):
        for source in profile.sources.values():
            assert all((results / name).exists() for name in re.findall(r"[a-z_0-9]+\.json", source)), source


def test_a_calibrated_profile_says_which_fields_were_measured_and_whose_the_others_are() -> None:
    assert PROFILE.describe() == (
        f"{GPU} (calibrated {DAY}: {len(MEASURED)} of {len(PROFILE.sources)} numbers measured, others an NVIDIA H200's)"
    )
    assert set(PROFILE.measured) == set(MEASURED)
    assert PROFILE.sources["memory"] == f"measured: calibrate, {DAY}"
    assert PROFILE.sources["wait"] == PROFILE.sources["item_nnz"] == "assumed: an NVIDIA H200's"
    assert PROFILE.rules == default_gpu().rules, "a record holds none of them"
    assert PROFILE.sources["far_blocks"] == "assumed: an NVIDIA H200's, scaled by memory"


def test_importing_the_package_reads_no_profile() -> None:
    code = "import sparsetc; from sparsetc.device import profile; print(profile._document.cache_info().currsize)"
    done = processes.run(["-c", code])
    assert done.stdout.strip() == "0"


# -- calibrating ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_numba_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparsetc.__main__ import main

    monkeypatch.setattr(cpu_calibration, "installed", lambda _: False)
    with stc.options(cache_dir=tmp_path), pytest.raises(stc.DeviceError, match="finds none"):
        stc.calibrate()
    assert main(["calibrate"]) == 2
    assert "calibrate measures a GPU, or a CPU with numba, and finds none here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_is_measured_by_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(cpu_calibration, "NONZEROS", 200)
    monkeypatch.setattr(cpu_calibration, "TENSORS", ((20, 30, 40), (20, 30)))
    monkeypatch.setattr(cpu_calibration, "seconds", lambda call: 1e-4)
    before = profiles.cpu_with_loops()
    with stc.options(cache_dir=tmp_path):
        found = stc.calibrate()
        assert profiles.cpu_with_loops() == found != before
        assert all(found.sources[f"loops {runner}"].startswith("measured: calibrate, ") for runner in found.loops)
        assert {runner: [*rates] for runner, rates in found.loops.items()} == {
            runner: [*rates] for runner, rates in before.loops.items()
        }
        assert "others assumed" in found.describe()
        assert "native nonzero" in calibration.table(found)
        (record_of_cpu,) = (tmp_path / "profiles").iterdir()
        text = record_of_cpu.read_text(encoding="utf-8")
        for damaged in ("", "{}", "[]", text.replace('"nonzero": ', '"nonzero": -1'), text.replace("native", "other")):
            record_of_cpu.write_text(damaged, encoding="utf-8")
            profiles._read.cache_clear()
            with pytest.warns(UserWarning, match="holds no profile"):
                assert profiles.cpu_with_loops() == before


def test_rates_are_fitted_to_what_kernels_take() -> None:
    rates = {"call": 2e-5, "nonzero": 2e-9, "vector": 1e-10, "line": 0.0}
    generator = torch.Generator().manual_seed(0)
    counts = (1 + 1e6 * torch.rand(40, 3, generator=generator)).tolist()
    kernels = [dict(zip(rates, (1.0, *each), strict=True)) for each in counts]
    taken = [cpu().launch + sum(n * rates[name] for name, n in each.items()) for each in kernels]
    fitted = cpu_calibration.fitted(list(zip(kernels, taken, strict=True)))
    assert fitted == pytest.approx(rates, rel=0.02, abs=2e-12)


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
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: type("Properties", (), {"L2_cache_size": 60, "multi_processor_count": 7, "warp_size": 64}),
    )
    monkeypatch.setattr(calibration, "probes", lambda _, sizes, __: probes(torch.device("cpu"), sizes, "cuda"))
    monkeypatch.setattr(calibration, "starts", lambda _, sizes: starts(torch.device("cpu"), sizes))
    monkeypatch.setattr(calibration, "torch_probes", lambda _, sizes: torch_probes(torch.device("cpu"), sizes))
    monkeypatch.setattr(calibration, "ProbeSizes", lambda: TINY)

    def seconds(launches: Any) -> float:
        grids = [one.keywords["grid"][0] if isinstance(one, Launch) else 0 for one in launches]
        return min(1e-6 + 2e-9 * grid for grid in grids)

    monkeypatch.setattr(calibration, "_seconds", seconds)
    return gpu


def test_what_is_measured_is_kept_and_used(timed: Path) -> None:
    with stc.options(memory_limit=1 << 40):
        found = stc.calibrate()
    assert (found.name, found.program, found.l2_bytes, found.warps, found.warp_size) == (GPU, 2e-9, 50, 28, 64)
    assert found.memory == pytest.approx(4 * 64 / 1.004e-6, rel=1e-3)
    assert found.dot["bf16"] == pytest.approx(2 * 64 * 64 * 16 * 16 * 2 / 1.004e-6, rel=1e-3)
    assert found.task_bytes == pytest.approx(13 * 4096 / 1.004e-6, rel=1e-3)
    assert found.product == dict.fromkeys(found.product, pytest.approx(2 * 3 * 4 * 5 / 1e-6, rel=1e-3))
    assert found.block_dot["high"] == pytest.approx(2 * 64 * 64 * 32 * 128 / 1.004e-6, rel=1e-3)
    assert found.near_blocks == pytest.approx(2 * 64 * 32 * 4 * 128 / 1.004e-6, rel=1e-3)
    assert found.moved == pytest.approx(2 * 4 * 512 / 1e-6, rel=1e-3)
    assert found.call == pytest.approx(1e-6 / 8, rel=1e-3)
    assert set(found.measured) == set(record.MEASURED)
    assert of_backend("triton") == found
    assert json.loads(timed.read_text())["torch"] == str(torch.__version__)


def test_the_command_prints_a_line_a_number_and_the_records_path(
    timed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparsetc.__main__ import main

    with stc.options(memory_limit=1 << 40):
        assert main(["calibrate"]) == 0
    said = capsys.readouterr().out
    lines = {line.split("  ")[1]: line.split() for line in said.splitlines() if line.startswith("  ")}
    assert {"memory", "l2", "l1", "add", "multiply", "dot tf32x3", "l2_bytes", "launch", "program"} <= set(lines)
    assert {"task_bytes", "product high", "product float64", "block_dot f16x3", "moved", "call", "warps"} <= set(lines)
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
    for size, expected in [(60_000_000, default_gpu().l2_bytes), (0, default_gpu().l2_bytes)]:
        properties = type("Properties", (), {"L2_cache_size": size})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert calibration._sizes(torch.device("cuda"))["l2_bytes"] == expected


# -- kernels ----------------------------------------------------------------------------------------------------------


def compiled(launch: Launch, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = launch.func.__self__, dict(launch.keywords)  # type: ignore[attr-defined]
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    del constants["grid"], constants["warmup"]
    names = kernel.arg_names
    types = ["i32" if isinstance(a, int) else f"*{triton_type(a.dtype)}" for a in launch.args]
    signature = dict.fromkeys(names, "constexpr") | dict(zip(names, types, strict=False))
    aligned: dict[Any, Any] = {(n,): [["tt.divisibility", 16]] for n, t in enumerate(types) if t.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_for(target: str) -> None:
    pytest.importorskip("triton")
    machine = TARGETS[target][0]
    cpu, sizes = torch.device("cpu"), replace(TINY, block=8192, steps=256)
    texts = {probe[0]: _texts(probe, target) for probe in probes(cpu, sizes, machine)}
    dots = ["ieee", "bf16"] if machine == "hip" else ["ieee", "tf32x3", "tf32", "bf16"]
    assert list(texts) == ["memory", "l2", "add", "l1", "multiply", *(f"dot {p}" for p in dots), "task_bytes", *PAIRED]
    assert ("v_mfma_" if machine == "hip" else "mma") in texts["dot bf16"][0]
    assert all("mfma" in text or "mma" in text for name in PAIRED for text in texts[name])
    if machine == "cuda":
        assert all("ld.global.v4" in text for text in texts["memory"] + texts["l2"] + texts["l1"])
        assert texts["multiply"][0].count("fma.rn.f32") >= 16, "one instruction for the two operations"
        assert "mma" not in texts["dot ieee"][0]
    assert len({one.func.__self__ for one in starts(cpu, sizes)}) == 1
    assert _assembly(compiled(starts(cpu, sizes)[0], target))


def _texts(probe: Probe, target: str) -> list[str]:
    return [_assembly(compiled(one, target)) for one in probe[2] if isinstance(one, Launch)]


def _assembly(kernel: Any) -> str:
    return kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]

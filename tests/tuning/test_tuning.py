"""Plans by measurement: the same results under every candidate, what is timed and when, and what the record says."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

import sparsetc as stc
from sparsetc.__main__ import main
from sparsetc.contraction import tuned
from sparsetc.decomposition import cp_als, cp_apr, tucker
from sparsetc.device.profile import DeviceProfile, default_gpu, of_gpu
from sparsetc.device.timing import Timing
from sparsetc.ir.plan import AUTO
from sparsetc.planner.pricing import costs, seconds_of
from sparsetc.planner.registry import PLANS
from sparsetc.support import entry
from sparsetc.tuning import record as kept
from sparsetc.tuning import search

SHAPE = (12, 15, 20)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("SPARSETC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Times that are given: seconds of plans by name, 1 by default; and what was timed, in order."""
    told: dict[str, Any] = {"seconds": {}, "timed": []}

    def timed(calls: Sequence[Any], *_: Any) -> list[Timing]:
        found = []
        for call in calls:
            call()
            name = call.made.plan.name
            told["timed"].append(name)
            seconds = told["seconds"].get(name, 1.0)
            found.append(Timing(0.999 * seconds, seconds, 1.001 * seconds, 9))
        return found

    monkeypatch.setattr(search, "timed", timed)
    monkeypatch.setattr(search, "NEAR", 1e9)  # whatever the cost model says, all are timed
    return told


def tensor(dtype: torch.dtype = torch.float32, seed: int = 0, n: int = 400) -> stc.SparseTensor:
    g = torch.Generator().manual_seed(seed)
    coords = torch.stack([torch.randint(0, size, (n,), generator=g) for size in SHAPE])
    return stc.SparseTensor(coords, torch.randint(1, 5, (n,), generator=g).to(dtype), SHAPE)


def factors(rank: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(1, 4, (size, rank), generator=g).to(dtype) for size in SHAPE]


def mttkrp(tune: Any, x: stc.SparseTensor | None = None, **settings: Any) -> stc.Kernel:
    _, b, c = factors()
    return stc.compile("ijk,jr,kr->ir", tensor() if x is None else x, b, c, tune=tune, **settings)


CASES = {
    "ijk,jr,kr->ir": [1, 2],
    "ijk,jr,ks->irs": [1, 2],
    "ijk,kr->ijr": [2],
    "ijk,ir,jr,kr->ijk": [0, 1, 2],
    "ijk->i": [],
}


# -- results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.complex64])
@pytest.mark.parametrize("equation", CASES)
@pytest.mark.parametrize("tune", ["now", "calls", 0.2])
def test_results_are_the_same_whatever_is_timed(equation: str, dtype: torch.dtype, tune: Any) -> None:
    x, dense = tensor(dtype), [factors(dtype=dtype)[m] for m in CASES[equation]]
    if equation.count("s") and dtype != torch.float16:
        dense = [d if n == 0 else d[:, :3].contiguous() for n, d in enumerate(dense)]
    expected = stc.einsum(equation, x, *dense, output="dense")
    kernel = stc.compile(equation, x, *dense, output="dense", tune=tune)
    for _ in range(25):
        torch.testing.assert_close(kernel(*dense), expected)
    assert kernel.contraction.settled
    torch.testing.assert_close(stc.einsum(equation, x, *dense, output="dense", tune=tune), expected)


@pytest.mark.parametrize("name", ["coo", "fiber", "rows", "mm-csf"])
def test_every_candidate_may_win(clock: dict[str, Any], name: str) -> None:
    clock["seconds"][name] = 0.5
    kernel, (_, b, c) = mttkrp("now"), factors()
    assert kernel.plan.name == name
    torch.testing.assert_close(kernel(b, c), mttkrp("model")(b, c))
    assert "timed" in kernel.plan.reason


def test_operands_of_two(clock: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = (stc.SparseTensor.from_dense((torch.rand(60, 60, generator=g) < 0.3).float()) for _ in range(2))
    expected = stc.einsum("ij,jk->ik", x, y).to_dense()
    for name in ("scalar", "dense"):
        stc.clear_cache()
        main(["tune", "forget"])
        clock["seconds"] = {name: 0.5}
        kernel = stc.compile("ij,jk->ik", x, y, tune="calls")  # which means now here
        assert kernel.plan.name == name
        torch.testing.assert_close(kernel().to_dense(), expected)


@pytest.mark.parametrize("plan", ["auto", "bcb+scalar"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.complex64])
def test_pairs_of_every_type(clock: dict[str, Any], plan: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = (stc.SparseTensor.from_dense((torch.rand(30, 30, generator=g) < 0.3).to(dtype)) for _ in range(2))
    found, expected = (stc.einsum("ij,jk->ik", x, y, plan=plan, tune=tune).to_dense() for tune in ("now", "model"))
    torch.testing.assert_close(found, expected)


def test_what_differs_from_the_first_cannot_win(clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock["seconds"] = {"fiber": 0.1}
    rows = tuned.Run.__call__

    def wrong(self: Any) -> torch.Tensor:
        return rows(self) + (1.0 if self.made.plan.name == "fiber" else 0.0)

    monkeypatch.setattr(tuned.Run, "__call__", wrong)
    assert mttkrp("now").plan.name != "fiber"
    assert "fiber" not in clock["timed"]


def test_values_and_gradients_while_candidates_take_turns() -> None:
    x, (_, b, c) = tensor(torch.float64), factors(dtype=torch.float64)
    kernel, model = (stc.compile("ijk,jr,kr->ir", x, b, c, tune=tune) for tune in ("calls", "model"))
    values = x.values.clone()
    for n in range(20):
        values.mul_(1.1)
        torch.testing.assert_close(kernel(b, c, values=values), model(b, c, values=values))
        leaf = (b + n).requires_grad_()
        kernel(leaf, c).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.autograd.grad(model(leaf, c).sum(), leaf)[0])
    x.values.mul_(2)
    torch.testing.assert_close(kernel(b, c), model(b, c))


def test_candidates_that_take_turns_are_timed_by_calls_alone(
    clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mttkrp("model").plan.name
    clock["seconds"] = {first: 1.2}  # in a search; in calls all take as long
    kernel, (_, b, c) = mttkrp("calls"), factors()
    ticks = itertools.count()
    monkeypatch.setattr(tuned.time, "perf_counter", lambda: float(next(ticks)))
    while kernel.step.in_turns is not None:
        kernel(b, c)
    assert kernel.plan.name == first
    assert {seconds for _, seconds in kernel.step.choice.measured} == {1.0}


def test_a_plan_is_decided_once_and_calls_run_what_was_timed_until_then(
    clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, (_, b, c) = mttkrp("calls"), factors()
    decided, decide = list[Any](), tuned._decide

    def within(step: Any, *about: Any) -> None:
        assert step.in_turns is not None
        decided.append(kernel(b, c))  # as a thread that calls meanwhile
        decide(step, *about)

    monkeypatch.setattr(tuned, "_decide", within)
    while kernel.step.in_turns is not None:
        expected = kernel(b, c)
    (found,) = decided
    torch.testing.assert_close(found, expected)


def test_a_process_that_follows_packs_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = list[Any](), tuned.Step.take
    monkeypatch.setattr(tuned.Step, "take", lambda step, choice: taken.append(choice) or take(step, choice))
    token = tuned.leader.set((False, {}))
    try:
        mttkrp("now")
    finally:
        tuned.leader.reset(token)
    assert len(taken) == 1


@pytest.mark.parametrize("tune", ["now", "calls"])
def test_decompositions_workloads_and_graphs(tune: str) -> None:
    x, (a, b, c) = tensor().with_values(tensor().values + 0.5), factors()
    for decompose, rank in ((cp_als, 3), (cp_apr, 3), (tucker, [2, 2, 2])):
        found, expected = (decompose(x, rank, n_iter_max=9, random_state=0, tune=t) for t in (tune, "model"))
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-3, atol=1e-3)
    texts, dense = ["ijk,jr,kr->ir", "ijk,ir,kr->jr"], [(b, c), (a, c)]
    for kernel, text, given in zip(stc.compile_many(texts, x, dense, tune=tune), texts, dense, strict=True):
        for _ in range(15):
            torch.testing.assert_close(kernel(*given), stc.einsum(text, x, *given))
    kernel = mttkrp(tune)
    compiled = torch.compile(lambda b, c: kernel(b, c) * 2, backend="eager", fullgraph=True)
    for _ in range(15):
        torch.testing.assert_close(compiled(b, c), 2 * mttkrp("model")(b, c))


def test_streams_are_tuned_on_their_first_chunk(clock: dict[str, Any]) -> None:
    clock["seconds"]["fiber"] = 0.5
    (_, b, c), x = factors(), tensor()
    found = stc.stream("ijk,jr,kr->ir", x, b, c, tune="now", chunk_bytes=4096)
    torch.testing.assert_close(found, mttkrp("model")(b, c))
    assert "fiber" in clock["timed"]


# -- the choice ---------------------------------------------------------------------------------------------------


def test_ties_do_not_flip(clock: dict[str, Any]) -> None:
    first = mttkrp("model").plan.name
    for name in ("coo", "fiber", "rows"):
        clock["seconds"] = {name: 0.97} if name != first else {}
        main(["tune", "forget"])
        stc.clear_cache()
        assert mttkrp("now").plan.name == first
    assert Timing(0.8, 0.9, 1.1, 9).beats(Timing(1.0, 1.05, 1.2, 9), 1.05) is False  # within the spread


def test_an_explicit_plan_is_not_timed(clock: dict[str, Any]) -> None:
    for plan in (mttkrp("model").plan, stc.plans.plan_hls(4)):
        with contextlib.suppress(stc.PlanError):
            mttkrp("now", plan=plan)
    assert not clock["timed"]
    assert mttkrp("now", plan="rows").plan.name == "rows"


def test_where_nothing_runs_nothing_is_timed(clock: dict[str, Any]) -> None:
    empty = stc.SparseTensor(torch.zeros((3, 0), dtype=torch.long), torch.zeros(0), SHAPE)
    mttkrp("now", x=empty)
    mttkrp("now", backend="triton")  # compiled for a GPU that is not here
    mttkrp("now", deterministic=True)
    assert not clock["timed"]
    _, b, c = factors()
    with pytest.warns(UserWarning, match="planned by the cost model"):
        kernel = stc.compile("ijk,jr,kr->ir", tensor(), b, c, tune="now", memory_limit=1000)
    torch.testing.assert_close(kernel(b, c), mttkrp("model")(b, c))


@pytest.mark.parametrize("bad", ["x", 0, -1, True, float("nan"), float("inf"), [], {}, (1, 2), 1j, len, 10**400, 1e300])
def test_what_tune_may_be(bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(stc.PlanError, match="tune must be"):
        mttkrp(bad)
    monkeypatch.setenv("SPARSETC_TUNE", "sometimes")
    with pytest.raises(stc.PlanError, match="tune must be one of"):
        mttkrp(None)


def test_the_environment_and_options(clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with stc.options(tune=0.5):
        mttkrp(None)
    count = len(clock["timed"])
    assert count > 1
    monkeypatch.setenv("SPARSETC_TUNE", "now")
    stc.clear_cache()
    mttkrp(None, x=tensor(seed=5))
    assert len(clock["timed"]) > count


# -- the record ---------------------------------------------------------------------------------------------------


def record(cache: Path) -> Path:
    return next((cache / "tuning").glob("*.jsonl"))


def test_what_was_timed_is_not_timed_again(clock: dict[str, Any], cache: Path) -> None:
    clock["seconds"]["fiber"] = 0.5
    assert mttkrp("now").plan.name == "fiber"
    count = len(clock["timed"])
    for tune in ("now", "calls", 3):
        stc.clear_cache()
        kernel = mttkrp(tune, x=tensor())
        assert kernel.plan.name == "fiber"
        assert kernel.contraction.settled
    stc.clear_cache()
    assert mttkrp("now", deterministic=True).plan.name == "fiber"  # exactly this problem
    assert len(clock["timed"]) == count
    assert all(line.name and line.calls for line in kept.lines(record(cache)))


@pytest.mark.parametrize(("field", "value"), [("versions", "torch 1.0"), ("key", "another")])
def test_another_software_or_tensor_proposes(
    clock: dict[str, Any], cache: Path, field: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock["seconds"]["fiber"] = 0.5
    mttkrp("now")
    monkeypatch.setattr(search, "NEAR", 0.0)  # only what is proposed
    path = record(cache)
    path.write_text("".join(json.dumps(json.loads(t) | {field: value}) + "\n" for t in path.read_text().splitlines()))
    stc.clear_cache()
    clock["timed"].clear()
    assert mttkrp("now").plan.name == "fiber"
    assert "fiber" in clock["timed"]
    main(["tune", "forget"])
    stc.clear_cache()
    assert mttkrp("now").plan.name != "fiber"


def altered(path: Path, change: Any) -> None:
    """The record with the plan of each line changed, and none slower than another."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    for line in found:
        change(line["plan"]["Plan"])
    path.write_text("".join(json.dumps(line | {"seconds": [1e-9] * 3}) + "\n" for line in found))
    stc.clear_cache()


@pytest.mark.parametrize(
    "change", [{"lane": [7]}, {"leaf": [10**400]}, {"params": [["side", 3]]}, {"item": []}, "format", "blocks", "tree"]
)
def test_plans_that_no_candidate_has_are_passed_over(cache: Path, change: Any) -> None:
    def changed(plan: dict[str, Any]) -> None:
        for part in plan["parts"]:
            if isinstance(change, dict):
                part["Part"]["storage"]["Storage"] |= change
            elif change == "format":
                part["Part"]["format"] = "dense"
            else:
                part["Part"]["schedule"]["Schedule"] |= {"blocks": [["q", 4]], "tree": {"Tree": "X * B"}, "ruled": []}

    _, b, c = factors()
    expected = mttkrp("now")(b, c)
    altered(record(cache), changed)
    torch.testing.assert_close(mttkrp("now")(b, c), expected)
    torch.testing.assert_close(mttkrp("now", deterministic=True)(b, c), expected)


def test_plans_of_pairs_that_there_are_none_of_are_passed_over(cache: Path) -> None:
    x = stc.SparseTensor.from_dense(torch.eye(9))
    expected = stc.einsum("ij,jk->ik", x, x, tune="now").to_dense()
    for name in ("fiber", "../../x"):
        altered(record(cache), lambda plan, n=name: plan.update(name=n))
        torch.testing.assert_close(stc.einsum("ij,jk->ik", x, x, tune="now").to_dense(), expected)


def test_a_record_that_another_process_holds_is_not_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fcntl = pytest.importorskip("fcntl")
    mttkrp("now")
    monkeypatch.setattr(kept, "WAIT", 0.0)
    with open(record(cache).with_suffix(".lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="another process"):
            mttkrp("now", x=tensor(seed=5))
        assert main(["tune", "forget"]) == 2
    assert "another process" in capsys.readouterr().err


DAMAGE = ["", "{", "[]", "null", '"x"', "{}", "[" * 5000, '{"key": 1}', "\x00\xff"]


def test_damaged_lines_are_passed_over(clock: dict[str, Any], cache: Path) -> None:
    clock["seconds"]["fiber"] = 0.5
    good = mttkrp("now")
    path = record(cache)
    whole = [json.loads(text) for text in path.read_text().splitlines()]
    for change in (
        *({"plan": plan} for plan in (1, {}, {"Plan": 3}, {"Plan": {"name": 3}}, {"Tree": "x"}, {"Plan": {"x": 1}})),
        *({"seconds": s} for s in ([1, 2], "x", [0, 0, 0], [1e999] * 3, ["a"] * 3)),
        {"expected": [{"items": "x"}]},
    ):
        with path.open("a") as file:
            file.writelines(json.dumps({**line, **change}) + "\n" for line in whole)
        stc.clear_cache()
        kernel, (_, b, c) = mttkrp("now"), factors()
        torch.testing.assert_close(kernel(b, c), good(b, c))
    path.write_text("\n".join(DAMAGE) + "\n" + "".join(json.dumps(line) + "\n" for line in whole) + '{"torn": ')
    assert len(kept.lines(path)) == len(whole)
    kept.append(path, kept.lines(path)[:1])  # behind a line that was torn
    assert len(kept.lines(path)) == len(whole) + 1


def test_a_recorded_plan_is_checked_as_a_plan_that_is_given(cache: Path, clock: dict[str, Any]) -> None:
    clock["seconds"]["fiber"] = 0.5
    x = stc.SparseTensor(torch.randint(0, 300, (2, 5000)), torch.ones(5000), (300, 300))
    b = torch.rand(300, 4)
    stc.compile("ij,jr->ir", x, b, tune="now")
    path = record(cache)
    text = path.read_text().replace('"threads":1,', "")
    assert '"Schedule":{' in text
    path.write_text(text.replace('"Schedule":{', '"Schedule":{"threads":-1,'))
    stc.clear_cache()
    torch.testing.assert_close(stc.compile("ij,jr->ir", x, b, tune="now")(b), x.to_dense() @ b)


@pytest.mark.parametrize(
    "change",
    [
        *({"runs": runs} for runs in (["jk"], [["j"]], [["j", "k"]], [["j", 10**400]], 5, {"j": 2})),
        *({"chain": chain} for chain in ("x", -3, 10**400, 2.5, None)),
        *({"fibers": fibers} for fibers in (-1, 10**30)),
        *("less", "more", "none"),
    ],
)
def test_damaged_sizes_reach_no_explanation(cache: Path, clock: dict[str, Any], change: Any) -> None:
    clock["seconds"]["fiber"] = 0.5
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor(torch.randint(0, 300, (2, 5000), generator=g), torch.ones(5000), (300, 300))
    b = torch.rand(300, 4, generator=g)
    expected = x.to_dense() @ b
    stc.compile("ij,jr->ir", x, b, tune="now")
    path, number = record(cache), {"less": 0, "more": 3, "none": 1}
    found = [json.loads(text) for text in path.read_text().splitlines()]
    for line in found:
        if isinstance(change, dict):
            line["expected"] = [sizes | change for sizes in line["expected"]]
        else:
            line["expected"] = line["expected"] * number[change]
            line["predicted"] = line["predicted"] * (number[change] if change != "none" else 0)
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    stc.clear_cache()
    kernel = stc.compile("ij,jr->ir", x, b, tune="now")
    assert "fiber" in str(kernel.explain())
    torch.testing.assert_close(kernel(b), expected)
    assert main(["tune", "list"]) == 0
    assert main(["tune", "refit"]) == 0


@pytest.mark.parametrize(
    "change",
    [
        *({"pattern": {"shape": shape}} for shape in (5, None, "x", [2.5], [[]], {"a": 1})),
        *({"problem": {"dtype": dtype}} for dtype in (5, None, [], "\x1b[2J")),
        *({name: "\x1b]0;mine\x07"} for name in ("name", "day", "device", "versions", "equation", "key")),
        *({name: "a\u202eb"} for name in ("name", "day")),
        {"calls": 10**400},
    ],
)
def test_a_line_that_cannot_be_shown_is_passed_over(
    cache: Path, tmp_path: Path, clock: dict[str, Any], change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    clock["seconds"]["fiber"] = 0.5
    mttkrp("now")
    path = record(cache)
    good = path.read_bytes()
    foreign = "".join(json.dumps(json.loads(text) | change) + "\n" for text in good.splitlines())
    (tmp_path / "foreign").write_text(foreign)
    path.write_bytes(good + foreign.encode())
    count = len(good.splitlines())
    assert len(kept.lines(path)) == count
    stc.clear_cache()
    assert str(mttkrp("now").explain()).replace("\n", "").isprintable()
    assert main(["tune", "list"]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    assert main(["tune", "merge", str(tmp_path / "foreign")]) == 2
    assert main(["tune", "forget"]) == 0
    assert f"{count} lines removed" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="modes and FIFOs of POSIX")
@pytest.mark.parametrize(
    "case",
    ["FIFO", "a lock that is a FIFO", "a link", "0606", "a folder of 0777", "a cache of 0777", "long", "a folder"],
)
def test_what_is_not_read_is_not_written_to(
    cache: Path, tmp_path: Path, clock: dict[str, Any], case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mttkrp("now")
    path = record(cache)
    lock, held = path.with_suffix(".lock"), path.read_bytes()
    if case == "a lock that is a FIFO":
        lock.unlink()
        os.mkfifo(lock)
    elif case in ("FIFO", "a link", "a folder"):
        path.unlink()
        {"FIFO": os.mkfifo, "a link": lambda p: p.symlink_to(tmp_path / "x"), "a folder": lambda p: p.mkdir()}[case](
            path
        )
        (tmp_path / "x").write_bytes(held)
    elif case == "0606":
        path.chmod(0o606)
    elif case == "long":
        with path.open("ab") as file:
            file.truncate(2 * kept.MOST_BYTES + 1)
    else:
        (path.parent if case == "a folder of 0777" else cache).chmod(0o777)
    size = path.stat().st_size
    locked_out = case == "a lock that is a FIFO"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        entry._said.clear()
        assert bool(kept.lines(path)) == locked_out
        mttkrp("now", x=tensor(seed=7))
        assert main(["tune", "list"]) == 0
    told = "\n".join(str(one.message) for one in said)
    assert locked_out or "is passed over" in told
    if case == "a folder of 0777":  # one of the package's own, which is taken back when it is written to
        assert path.parent.stat().st_mode & 0o777 == 0o700
        return
    assert "what was timed is not kept" in told
    assert path.stat().st_size == size
    assert main(["tune", "forget"]) == (2 if case in ("a cache of 0777", "a lock that is a FIFO") else 0)
    assert path.stat().st_size == size
    if case in ("FIFO", "a folder"):
        assert main(["tune", "merge", str(path)]) == 2


def test_a_full_record_costs_little(cache: Path, clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock["seconds"]["fiber"] = 0.5
    mttkrp("now")
    path = record(cache)
    good = path.read_text()
    other = "".join(json.dumps(json.loads(t) | {"key": "x", "like": "y"}) + "\n" for t in good.splitlines())
    alike = "".join(json.dumps(json.loads(t) | {"key": "x"}) + "\n" for t in good.splitlines())
    path.write_text(other * 700 + good + alike * 300)
    parsed, read = kept.parsed, []

    def counted(text: bytes) -> Any:
        read.append(text)
        return parsed(text)

    monkeypatch.setattr(kept, "parsed", counted)
    stc.clear_cache()
    assert mttkrp("now").plan.name == "fiber"
    assert len(read) <= 2 * kept.MOST_FOUND


@pytest.mark.parametrize(
    "data",
    [b"\x1f\x8b", b"\x1f\x8b\x08\x00junk", gzip.compress(b"{}" * 99, mtime=0)[:-9]],
    ids=["empty", "junk", "cut"],
)
def test_a_damaged_gzip_file_is_not_merged(tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gz").write_bytes(data)
    assert main(["tune", "merge", str(tmp_path / "x.gz")]) == 2
    assert "damaged gzip file" in capsys.readouterr().err


def test_a_record_is_bounded_and_private(cache: Path, clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 20_000)
    for seed in range(30):
        mttkrp("now", x=tensor(seed=seed))
    assert record(cache).stat().st_size <= 20_000
    assert kept.lines(record(cache))
    assert record(cache).stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_to(
    cache: Path, clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(mode=0o700)
    (cache / "tuning").write_text("no folder")
    clock["seconds"]["fiber"] = 0.5
    with pytest.warns(UserWarning, match="what was timed is not kept"):
        assert mttkrp("now").plan.name == "fiber"


APPENDING = """
import sys
from pathlib import Path
from sparsetc.tuning import record as kept
kept.TRIES = 10_000  # however long the other is held up
(one,) = kept.read(Path(sys.argv[1]).read_bytes())
for _ in range(200):
    kept.append(Path(sys.argv[2]), [one])
"""


def test_two_processes_at_once_and_one_that_is_killed(tmp_path: Path, cache: Path, clock: dict[str, Any]) -> None:
    mttkrp("now")
    one, target = tmp_path / "one.jsonl", cache / "tuning" / "other.jsonl"
    one.write_bytes(kept.written(kept.lines(record(cache))[:1]))
    writers = [processes.Script(["-c", APPENDING, one, target]) for _ in range(2)]
    assert [writer.result(120).returncode for writer in writers] == [0, 0]
    assert len(kept.lines(target)) == 400
    assert len(target.read_bytes().splitlines()) == 400
    killed = processes.Script(["-c", APPENDING, one, target])
    while len(kept.lines(target)) == 400 and killed.runs():
        pass
    killed.kill()
    count = len(kept.lines(target))
    kept.append(target, kept.lines(one))
    assert len(kept.lines(target)) == count + 1


def test_the_command(cache: Path, tmp_path: Path, clock: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    mttkrp("now")
    stc.compile("ijk->i", tensor(), tune="now")
    file = str(tmp_path / "all.jsonl")

    def said(*arguments: str) -> str:
        assert main(["tune", *arguments]) == 0
        return capsys.readouterr().out

    assert '"ijk,jr,kr->ir", 12 x 15 x 20, torch.float32' in said("list")
    assert "ijk->i" not in said("list", "--equation", "ijk,jr,kr->ir")
    count = int(said("export", file).split()[-2])
    said("forget", "--equation", "ijk -> i")
    assert "ijk->i" not in said("list")
    assert f"of {count} lines added" in said("merge", file)
    assert f"0 of {count} lines added" in said("merge", file)
    assert f"{count} lines removed" in said("forget")
    assert said("list") == "nothing was timed\n"
    (tmp_path / "x").write_text("no record")
    assert main(["tune", "merge", str(tmp_path / "x")]) == 2
    assert main(["tune", "merge", str(tmp_path / "absent")]) == 2


def test_the_package_comes_with_lines() -> None:
    shipped = kept.read(kept.shipped())
    assert len(shipped) > 100
    assert {line.device for line in shipped} == {"NVIDIA H200"}


def test_threads_are_tuned_on_a_cpu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: Sequence[Any], *_: Any) -> list[Timing]:
        seconds = [0.5 if call.made.plan.parts[0].schedule.threads == 1 else 1.0 for call in calls]
        return [Timing(0.999 * s, s, 1.001 * s, 9) for s in seconds]

    monkeypatch.delenv("SPARSETC_BACKEND", raising=False)  # a compiler of native loops would take all of the time
    monkeypatch.setattr(search, "timed", timed)
    before, (_, b, c) = torch.get_num_threads(), factors()
    torch.set_num_threads(2)
    try:
        kernel = mttkrp("now")
        assert {part.schedule.threads for part in kernel.plan.parts} == {1}
        assert {part.schedule.threads for part in mttkrp("now").plan.parts} == {1}  # from the record
        torch.testing.assert_close(kernel(b, c), mttkrp("model")(b, c))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- what a user sees ---------------------------------------------------------------------------------------------


def test_measured_beside_predicted(clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSETC_BACKEND", raising=False)  # by which plans are named
    clock["seconds"]["fiber"] = 0.5
    explained = mttkrp("now").explain()
    assert "timed, us, and expected us:" in str(explained)
    assert explained.to_dict()["timed"][0] == ("fiber: fiber[i | j | k]", 0.5e6)
    assert "timed" not in str(mttkrp("model").explain())


def test_benchmark() -> None:
    _, b, c = factors()
    timing = mttkrp("model").benchmark(b, c, seconds=0.05)
    assert 0 < timing.low <= timing.median <= timing.high
    assert timing.calls >= 3
    assert "us" in str(timing)
    with pytest.raises(stc.ShapeError):
        mttkrp("model").benchmark(b)


# -- refit ----------------------------------------------------------------------------------------------------------


def timed_by(profile: DeviceProfile, device: str, tensors: int) -> None:
    """A record of plans that take just what a profile says."""
    for seed in range(tensors):
        for equation, numbers in (("ijk,jr,kr->ir", (1, 2)), ("ijk,ir,kr->jr", (0, 2)), ("ijk,kr->ijr", (2,))):
            x, f = tensor(seed=seed, n=300 << seed), factors(16 << seed % 2)
            step = stc.compile(equation, x, *[f[n] for n in numbers], backend="triton").step
            trials = []
            for candidate in (c for method in PLANS.values() for c in method.estimates(step.problem)):
                about = tuple(costs(candidate, step.problem)), candidate.expected
                seconds = sum(seconds_of(candidate.plan, *about, profile))
                trials.append(search.Trial(candidate, None, Timing(seconds, seconds, seconds, 9)))
            kept.Known(kept.facts_of(step.problem), AUTO, device).add(trials)


def test_a_fit_is_kept_where_choices_by_it_are_better(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = default_gpu()
    far = replace(usual, program=50 * usual.program)
    timed_by(far, usual.name, 6)
    assert main(["tune", "refit"]) == 0
    said = capsys.readouterr().out
    assert f"{usual.name}: 18 problems of 6 tensors" in said
    assert "kept in" in said
    fit = of_gpu(usual.name)
    assert fit.calibrated
    assert fit.program > 3 * usual.program
    assert fit.sources["program"].startswith("measured: tune refit")
    assert fit.constants == usual.constants


def test_a_fit_that_is_no_better_is_not_kept(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed_by(default_gpu(), default_gpu().name, 4)
    assert main(["tune", "refit"]) == 0
    assert "not kept" in capsys.readouterr().out
    assert not (cache / "profiles").exists()


def test_what_no_fit_follows_from(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "refit"]) == 0
    assert "nothing was timed on a GPU" in capsys.readouterr().out
    timed_by(default_gpu(), default_gpu().name, 2)
    assert main(["tune", "refit"]) == 2
    assert "4 tensors or more" in capsys.readouterr().err
    main(["tune", "forget"])
    timed_by(default_gpu(), "Another GPU", 1)
    assert main(["tune", "refit"]) == 0
    assert "Another GPU: calibrate it first" in capsys.readouterr().out

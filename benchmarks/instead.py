"""The yardstick: every task beside the best that a user would write instead, in one run of one process.

    SPARSETC_DATA=<folder of .npz> python benchmarks/instead.py [--only TEXT] [--since FILE] [--cpu] [--list]

A row is a task done by sparsetc and by what a user would write instead: a dense library, steps by hand, FlexAttention,
`torch.compile`, gather and scatter, scipy. Results (and gradients) are first compared with float64; a wrong one gets no
time. ``us`` is device time, that of a CUDA graph where the call can be captured; ``call_us`` is the wall time of a
call, launches included. A ratio is the best peer's time over ours: above 1 sparsetc is faster.

The rows stand in one list, `instead_rows.ROWS`. To add one, write a function that returns a `Task` and add a line:

    def doubled() -> Task:
        x = scattered((1000, 1000), 5000)
        return Task(lambda: x * 2, {"scipy": lambda: x.to_scipy() * 2}, lambda: x.to_torch().double() * 2)

    Row("x * 2, 5,000 nonzeros", "matrices", doubled)

The record is ``results/instead.json``, or ``instead_cpu.json`` for a CPU. It is written after each row. A run replaces
the rows that it runs; other rows stay if they are of the same device, torch and Triton. So a long table can be measured
in several runs: ``--missing --minutes 9`` runs what the record lacks, and stops in time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import common
import torch
from instead_rows import ROWS
from instead_rows.compare import error_of
from instead_rows.row import Call, Row, Task

WARM = 10
"""Calls before one is timed, but of rows whose operands are new at each: patterns that may come and go are planned in
the first few."""
SLACK = 1.1
"""A ratio fell if the recorded one is more than this many times as high."""
MEASURES = (("us", "instead", "ratio"), ("call_us", "instead_call", "call_ratio"))
"""A time, and the keys of a row that name its best peer and hold its ratio."""
PEERS = ("scipy", "opt_einsum", "torch_geometric", "pyttb", "tensorly")
Result = dict[str, Any]


class OutOfTime(BaseException):
    """The row's seconds are over; no `except Exception` of a library keeps it."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in what takes longer."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # again, should a callback of C lose the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait() -> None:
    """Wait for the device."""
    if common.DEVICE == "cuda":
        torch.cuda.synchronize()


def wall_microseconds(call: Call, fresh: bool) -> float:
    """Median wall time of a call: of rows of calls after which the device is awaited, or of 30 single ones."""

    def seconds(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - start) / calls

    once = statistics.median(seconds(1) for _ in range(3))
    if fresh:
        samples = max(5, min(30, round(10 / once)))
        return 1e6 * statistics.median(seconds(1) for _ in range(samples))
    calls = max(1, min(50, round(2e-3 / once)))
    samples = max(3, min(25, round(0.3 / (calls * once))))
    return 1e6 * statistics.median(seconds(calls) for _ in range(samples))


def waits_for_the_device(call: Call) -> bool:
    """True if a call synchronises with the device, so that no CUDA graph can be captured of it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def device_microseconds(call: Call, right: Callable[[Any], bool]) -> tuple[float, bool]:
    """Device time of a call, and whether it is that of a CUDA graph, whose result is checked: it may lack launches."""
    last: list[Any] = [None]

    def kept() -> None:
        last[0] = call()

    if not waits_for_the_device(call):
        try:
            us = common.device_microseconds(kept)
            if right(last[0]):
                return us, True
        except Exception:  # what else a capture refuses
            torch.cuda.set_stream(torch.cuda.default_stream())
    return common.microseconds(call), False


def timed(call: Call, task: Task, expected: Any, threads: int) -> Result:
    """Check a result, then time the call."""
    torch.set_num_threads(threads)  # a call before may have changed it
    error = error_of(call(), expected)
    if not error <= task.tolerance:
        return {"wrong": f"relative error {error:.1e}, allowed {task.tolerance:.0e}"}
    result: Result = {"error": float(f"{error:.1e}")}
    for _ in range(0 if task.fresh else WARM):
        call()
    if common.DEVICE == "cuda" and not task.fresh:
        us, captured = device_microseconds(call, lambda result: error_of(result, expected) <= task.tolerance)
        result |= {"us": round(us, 2), "captured": captured}
    return result | {"call_us": round(wall_microseconds(call, task.fresh), 2)}


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what the function does; of one that raises or takes longer, why there is nothing."""
    try:
        with limit(seconds):
            return function()
    except OutOfTime:
        return {"failed": f"out of time, {seconds:.0f} s"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:200].replace("\n", " ")}


def measured(row: Row, seconds: float, threads: int) -> Result:
    """Measure ours, in 6 of 10 of the seconds that are left at most, then the peers."""
    stop = time.monotonic() + seconds
    result: Result = {"task": row.title, "date": common.environment()["date"], "ours": {}, "peers": {}}

    def left() -> float:
        return max(1.0, stop - time.monotonic())

    def prepare() -> tuple[Task, Any]:
        task = row.make()
        return task, task.expected()

    prepared = within(seconds, prepare)
    if isinstance(prepared, dict):
        return result | {"ours": prepared}
    task, expected = prepared
    result["ours"] = within(0.6 * left(), partial(timed, task.ours, task, expected, threads))
    for name, call in task.instead.items():
        result["peers"][name] = within(left(), partial(timed, call, task, expected, threads))
    return result | ratios(result)


def ratios(result: Result) -> Result:
    """The best peer by each measure, and its time over ours."""
    best_of: Result = {}
    for measure, peer, ratio in MEASURES:
        times = {name: one[measure] for name, one in result["peers"].items() if measure in one}
        if times and measure in result["ours"]:
            best = min(times, key=times.__getitem__)
            best_of |= {peer: best, ratio: float(f"{times[best] / result['ours'][measure]:.3g}")}
    return best_of


def recorded(name: str) -> list[Result]:
    """Rows of the record, if they were measured on this device with this torch and Triton."""
    path = common.results_file(name)
    if not path.exists():
        return []
    document, now = json.loads(path.read_text()), common.environment()
    keys = ("device", "torch", "triton", *(("cpu_threads",) if common.DEVICE == "cpu" else ()))
    others = [f"{key} {document[key]}" for key in keys if document[key] != now[key]]
    if others:
        print(f"{path} is of {', '.join(others)}: its rows are not kept")
    return [] if others else document["rows"]


def fallen(rows: Sequence[Result], before: Sequence[Result]) -> list[str]:
    """Say which ratios fell since a record, and which are gone."""
    now = {row["task"]: row for row in rows}
    lines = []
    for old in before:
        for _, _, ratio in MEASURES:
            if old["task"] in now and ratio in old:
                new = now[old["task"]].get(ratio)
                if new is None or new * SLACK < old[ratio]:
                    lines.append(f"{old['task']}: {ratio} {old[ratio]} -> {new}")
    return lines


def line(result: Result) -> str:
    """What is printed of a row."""
    parts = [result["task"], "ours", str({k: v for k, v in result["ours"].items() if k != "captured"})]
    for _, peer, ratio in MEASURES:
        if ratio in result:
            parts.append(f"| {ratio} {result[ratio]} ({result[peer]})")
    parts += [f"| {name}: {one}" for name, one in result["peers"].items() if "call_us" not in one]
    return " ".join(parts)


def versions() -> Result:
    """Versions of the peers that are installed."""
    installed = {}
    for package in PEERS:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def chosen(rows: Sequence[Row], asked: argparse.Namespace, titles: set[str]) -> list[Row]:
    """The rows to run, which are not among the recorded titles if only missing ones are asked for."""
    left = []
    for row in rows:
        wanted = common.DEVICE in row.on and asked.only in row.title and (asked.full or not row.full)
        if not wanted or (asked.missing and row.title in titles):
            continue
        absent = [name for name in row.needs if not common.data_file(name).exists()]
        if absent:
            print(f"{row.title}: left out, SPARSETC_DATA has no {', '.join(absent)}")
        else:
            left.append(row)
    return left


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="sparsetc beside what its users would write instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose section and name contain it")
    parser.add_argument("--since", type=Path, metavar="FILE", help="print the ratios that fell since this record")
    parser.add_argument("--cpu", action="store_true", help="run the rows of a CPU")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (1)")
    parser.add_argument("--full", action="store_true", help="run the whole grids too")
    parser.add_argument("--missing", action="store_true", help="run only rows that the record does not hold")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a row may take (60)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no row is begun")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Run the rows and record them. Returns 1 if a ratio fell since the record that was named."""
    asked = arguments(words)
    warnings.simplefilter("ignore")
    if asked.cpu:
        common.DEVICE = "cpu"
    threads = asked.threads if common.DEVICE == "cpu" else torch.get_num_threads()
    torch.set_num_threads(threads)
    before = json.loads(asked.since.read_text())["rows"] if asked.since else []  # may be the record that is replaced
    name = "instead" if common.DEVICE == "cuda" else "instead_cpu"
    results = {row["task"]: row for row in recorded(name)}
    todo = chosen(rows, asked, set(results))
    if asked.list:
        print(*(row.title for row in todo), sep="\n")
        return 0
    stop = time.monotonic() + 60 * asked.minutes
    done: list[Result] = []
    for row in todo:
        if time.monotonic() > stop:
            print(f"{len(todo) - len(done)} rows are left for another run")
            break
        result = results[row.title] = measured(row, asked.seconds, threads)
        done.append(result)
        print(line(result), flush=True)
        torch.set_num_threads(threads)  # what is recorded
        in_order = [results[each.title] for each in rows if each.title in results]
        common.record(name, in_order, **versions())
        torch._dynamo.reset()  # each row compiles for its own shapes
        gc.collect()
        wait()  # ends the run if a row left the device broken
        if common.DEVICE == "cuda":
            torch.cuda.empty_cache()
    lines = fallen(done, before)
    for text in lines:
        print(text)
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())

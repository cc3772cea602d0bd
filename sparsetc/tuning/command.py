"""``sparsetc tune``: look at the record of what was timed, carry it to another machine, forget it.

In: a parser of commands, then arguments. Out: text, and files of lines.
"""

from __future__ import annotations

import gzip
import zlib
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from textwrap import indent
from typing import Any

from sparsetc.device.calibrate import keep
from sparsetc.device.profile import of_gpu, path_of
from sparsetc.errors import FormatError
from sparsetc.explain import aligned
from sparsetc.support.files import open_regular, renamed
from sparsetc.tuning.record import Line, append, lines, read, remove, written
from sparsetc.tuning.refit import refit

MOST_MERGED = 1 << 26
"""Bytes that are read of a file, at most."""


def add_to(commands: Any) -> None:
    """Add ``tune`` and its own commands to a parser's."""
    tune = commands.add_parser("tune", help="look at, move or forget the record of plans that were timed (tune=)")
    actions = tune.add_subparsers(required=True, dest="action", metavar="action")
    for name, told in ("list", "print what was timed"), ("forget", "remove what was timed"):
        one = actions.add_parser(name, help=f"{told}, of every equation or of one")
        one.add_argument("--equation", help='for example "ijk,jr,kr->ir"')
    actions.add_parser("export", help="write every line to a file").add_argument("file", type=Path)
    actions.add_parser("merge", help="add the lines of a file that are not there yet").add_argument("file", type=Path)
    one = actions.add_parser(
        "refit", help="fit the profile of each GPU to what was timed on it, and keep fits that are better"
    )
    one.add_argument("file", type=Path, nargs="?", help="more lines, which stay where they are")


def run(options: Namespace) -> None:
    """Run one of the commands."""
    {"list": _list, "forget": _forget, "export": _export, "merge": _merge, "refit": _refit}[options.action](options)


def _paths() -> list[Path]:
    """The records of the cache folder."""
    folder = path_of("", "tuning")
    return [] if folder is None else sorted(folder.parent.glob("*.jsonl"))


def _timed() -> list[Line]:
    """Their lines."""
    return [line for path in _paths() for line in lines(path)]


def _asked(options: Namespace, line: Line) -> bool:
    """True if a line is of the equation named by the options, or if none was named."""
    return options.equation is None or "".join(options.equation.split()) == "".join(line.equation.split())


def _list(options: Namespace) -> None:
    by_problem: dict[tuple[str, ...], list[Line]] = {}
    for line in filter(partial(_asked, options), _timed()):
        by_problem.setdefault((line.device, line.versions, line.equation, line.key), []).append(line)
    for (device, versions, equation, _), of_problem in by_problem.items():
        first, latest = of_problem[0], {line.name: line for line in of_problem}
        times = sorted(latest.values(), key=lambda line: line.timing.median)
        shape = " x ".join(map(str, first.pattern.get("shape", ())))
        print(f'"{equation}", {shape or "two sparse operands"}, {first.problem.get("dtype")}, {first.day}')
        print(f"  {device}, {versions}")
        rows = [("measured us", "expected us", "plan")]
        rows += [(f"{1e6 * t.timing.median:.1f}", f"{1e6 * sum(t.predicted):.1f}", t.name) for t in times]
        print(indent(aligned(rows, left=(2,)), "  "))
    if not by_problem:
        print("nothing was timed")


def _forget(options: Namespace) -> None:
    gone = [remove(path, partial(_asked, options)) for path in _paths()]
    print(f"{sum(gone)} lines removed")


def _export(options: Namespace) -> None:
    every = _timed()
    with renamed(options.file.absolute(), 0o666) as file:
        file.write(written(every))
    print(f"{options.file}: {len(every)} lines")


def _given(path: Path) -> tuple[Line, ...]:
    """The lines of a file, which may be packed by gzip."""
    with open_regular(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            lines_of_file = read((gzip.GzipFile(fileobj=file) if packed else file).read(MOST_MERGED))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FormatError(f"{path}: a truncated or damaged gzip file ({error})") from error
    if not lines_of_file:
        raise FormatError(f"{path} holds no lines of a record of tuning")
    return lines_of_file


def _refit(options: Namespace) -> None:
    records = [*_timed(), *(_given(options.file) if options.file else ())]
    timed = [line for line in records if line.problem.get("backend") == "triton"]
    if not timed:
        print("nothing was timed on a GPU")
    for device in dict.fromkeys(line.device for line in timed):
        profile = of_gpu(device)
        if profile.name != device:
            print(f'{device}: calibrate it first, by "python -m sparsetc calibrate"')
            continue
        fit, before, held_out, about = refit((line for line in timed if line.device == device), profile)
        better = max(held_out) < max(before) and geometric_mean(held_out) <= geometric_mean(before)
        print(f"{device}: {about}\n  by its profile                      {_summary(before)}")
        print(f"  by fits that have not seen a tensor {_summary(held_out)}")
        print(f"  kept in {keep(fit)}" if better else "  the fit is not kept: choices by it are no better")


def _summary(regrets: Sequence[float]) -> str:
    """Return the geometric mean of regrets, the worst one, and the share above 1.2."""
    above = sum(regret > 1.2 for regret in regrets) / len(regrets)
    return f"{geometric_mean(regrets):.3f} times the best, {max(regrets):.2f} at worst, above 1.2 in {above:.0%}"


def _merge(options: Namespace) -> None:
    records = _given(options.file)
    added = 0
    for device in dict.fromkeys(line.device for line in records):
        path = path_of(device, "tuning", "jsonl")
        if path is None:
            raise FileNotFoundError("a record is kept below the home directory, and there is none")
        known_lines = set(map(repr, lines(path)))
        new = [line for line in records if line.device == device and repr(line) not in known_lines]
        append(path, new)
        added += len(new)
    print(f"{added} of {len(records)} lines added")

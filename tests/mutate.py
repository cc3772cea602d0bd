"""Change modules in small ways and print which changes their tests do not notice.

``python tests/mutate.py sparsetc/tensor/coords.py sparsetc/io/digits.py --count 20 --seed 0``

Every mutant is one change in a copy of the tracked files, tested by pytest processes of its own. Exits with status 1 if
a mutant survives that `equivalent_mutants.txt` does not list.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

LOG = "output_of_tests.txt"
SWAPS = """Lt-LtE LtE-Lt Gt-GtE GtE-Gt Eq-NotEq NotEq-Eq Is-IsNot IsNot-Is In-NotIn NotIn-In Add-Sub Sub-Add
Mult-FloorDiv FloorDiv-Mult Div-Mult Mod-FloorDiv LShift-RShift RShift-LShift BitAnd-BitOr BitOr-BitAnd And-Or Or-And"""
OPERATORS = dict(pair.split("-") for pair in SWAPS.split())


class Mutation(NamedTuple):
    """One change of a module: the bytes from `start` to `end` become `after`."""

    start: int
    end: int
    after: str
    line: int
    key: str  # how `equivalent_mutants.txt` names it, after the path

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + (f"({self.after})" if self.after else "pass").encode() + source[self.end :]


def mutations(source: bytes) -> list[Mutation]:
    """Return all changes of the functions of a module, in the order of the text."""
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def inside(node: ast.AST, function: str) -> Iterator[Mutation]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        for place, after in changes(node) if function else ():
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            text = lines[place.lineno - 1].decode().strip()
            key = f"{function}: {ast.unparse(place)} → {after or 'nothing'} in `{text}`"
            yield Mutation(start, end, after, place.lineno, key)
        strict = isinstance(node, ast.keyword) and node.arg == "strict"  # of `zip`: says what holds anyway
        if not strict and not isinstance(node, (ast.Raise, ast.JoinedStr)):  # messages are no behaviour
            for field, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                        yield from inside(child, function)

    return sorted(inside(ast.parse(source), ""), key=lambda m: (m.start, m.end))


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The expressions or statements that a node offers for a change, each with its text after it ("" if dropped)."""
    match node:
        case ast.Compare():
            for position, operator in enumerate(node.ops):
                yield node, unparsed(node, ops=[*node.ops[:position], swapped(operator), *node.ops[position + 1 :]])
        case ast.BinOp() | ast.BoolOp() if type(node.op).__name__ in OPERATORS:
            yield node, unparsed(node, op=swapped(node.op))
        case ast.UnaryOp(op=ast.Not()):
            yield node, ast.unparse(node.operand)
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, str(node.value + 1)
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield node, unparsed(node, func=ast.Name("max" if name == "min" else "min"))
        case ast.Slice():
            for bound in (node.lower, node.upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield bound, f"{ast.unparse(bound)} + 1"
        case ast.If(body=[ast.Return() | ast.Continue() | ast.Break() | ast.Raise()], orelse=[]):
            yield node.test, "False"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "None"
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield node, ""


def swapped(operator: ast.AST) -> ast.AST:
    return getattr(ast, OPERATORS[type(operator).__name__])()


def unparsed(node: ast.expr, **fields: object) -> str:
    changed = copy.copy(node)
    for field, value in fields.items():
        setattr(changed, field, value)
    return ast.unparse(changed)


def groups_of(module: str, root: Path) -> list[list[str]]:
    """Return the groups of tests of a module: those named for it, then the others of its folder.

    A group runs if the groups before it noticed nothing.
    """
    _, *folders, file = Path(module).parts if "/" in module else ("", module)
    tests = [str(f.relative_to(root)) for f in sorted(root.joinpath("tests", *folders[:1]).glob("test_*.py"))]
    named = [test for test in tests if Path(test).name.startswith(f"test_{Path(file).stem}")]
    return [group for group in (named, [test for test in tests if test not in named]) if group]


def copy_files(root: Path, folder: Path) -> None:
    """Copy what git tracks. Bytecode that is checked by the hash of its source, not its time, never hides a mutant."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
    for name in tracked.stdout.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((root / name).read_bytes())
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", folder]
    subprocess.run(compiled, check=True, stdout=subprocess.DEVNULL)


def outcome(folder: Path, tests: list[str], seconds: float | None = None) -> str:
    """Run tests on the code in a folder, and say what became of it."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with open(folder / LOG, "w") as log:
        run = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        return "killed" if run.wait(seconds) else "survived"
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # with the processes that the tests started
        run.wait()
        return "timed out"


def tried(mutant: tuple[str, Mutation], folder: Path, limits: dict[str, float]) -> str:
    """Return the outcome of a mutant. `limits` holds a time for every group of tests that passed without a mutation."""
    path, source = folder / mutant[0], (folder / mutant[0]).read_bytes()
    for tests in groups_of(mutant[0], folder):
        if str(tests) not in limits:
            started = time.monotonic()
            if outcome(folder, tests) != "survived":
                log = (folder / LOG).read_text()[-2000:]
                raise SystemExit(f"These tests of {mutant[0]} fail without a mutation: {' '.join(tests)}\n{log}")
            limits[str(tests)] = 10 + 4 * (time.monotonic() - started)
        path.write_bytes(mutant[1].applied(source))
        result = outcome(folder, tests, limits[str(tests)])
        path.write_bytes(source)
        if result != "survived":
            return result
    return "survived"


def main(arguments: list[str] | None = None) -> int:
    """Try mutants of the modules that are named, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="paths below the root")
    parser.add_argument("--count", type=int, default=10, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args(arguments)
    root: Path = options.root
    listed = root / "tests" / "equivalent_mutants.txt"
    equivalent = listed.read_text().splitlines() if listed.exists() else []
    mutants = []
    for module in options.modules:
        every = mutations((root / module).read_bytes())
        chosen = random.Random(f"{options.seed} {module}").sample(every, min(options.count, len(every)))
        mutants += [(module, m) for m in chosen if f"{module} {m.key}" not in equivalent]

    limits: dict[str, float] = {}
    folders: queue.Queue[Path] = queue.Queue()

    def in_a_folder(mutant: tuple[str, Mutation]) -> str:
        folder = folders.get()
        try:
            return tried(mutant, folder, limits)
        finally:
            folders.put(folder)

    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            copy_files(root, Path(temporary, str(job)))
            folders.put(Path(temporary, str(job)))
        for (module, mutation), result in zip(mutants, pool.map(in_a_folder, mutants), strict=True):
            print(f"{result}: {module}:{mutation.line} {mutation.key}", flush=True)
            results.append(result)
    print(f"{len(results)} mutants, {results.count('timed out')} timed out, {results.count('survived')} survived")
    return int("survived" in results)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs this in the background
    raise SystemExit(main())

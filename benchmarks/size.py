"""How large the package is, and how far a call travels through it; run from the root of a checkout.

    python benchmarks/size.py             # everything
    python benchmarks/size.py --static    # needs no torch: lines, files, classes, the graph of imports
    python benchmarks/size.py --base REV  # the same figures of another commit beside today's

Tokens are those of the code, without comments, docstrings and layout, so that to write the same on fewer lines gains
nothing; a string is one token. Lines are lines of code: no blanks, comments or docstrings. The files, calls and hops
(switches from file to file) of a call are counted with `sys.setprofile` in a fresh process; times are the least of
several.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

AROUND = {"testing", "io", "decomposition", "streaming", "distributed", "tensor", "data"}
"""Folders that are not the compiler's."""
TOKENS, COMPILER, FILES, CLASSES = "tokens", "tokens of the compiler", "files", "classes"
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
"""Tokens that are no code."""
KNOT, FOLDERS = "modules in the largest import knot (lazy and typing imports too)", "folders in the largest knot"
CALLS = r"""
import json, os, sys, time, warnings

warnings.simplefilter("ignore")
import torch

torch.set_num_threads(1)
import sparsetc as stc

ROOT = os.path.dirname(stc.__file__)


def traced(call):
    files, calls, hops, last = set(), 0, 0, None

    def profile(frame, event, _):
        nonlocal calls, hops, last
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            calls += 1
            files.add(name)
            hops += last is not None and name != last
            last = name
        elif event == "return" and name.startswith(ROOT):
            back = frame.f_back
            while back and not back.f_code.co_filename.startswith(ROOT):
                back = back.f_back
            if back and back.f_code.co_filename != last:
                hops += 1
                last = back.f_code.co_filename

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return f"{len(files)} files, {calls:,} calls, {hops:,} hops"


def least(make, n=7):
    best = float("inf")
    for seed in range(n):
        call = make(seed)
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return round(best * 1e3, 1)


def tensor(n, shape, seed):
    g = torch.Generator().manual_seed(seed)
    coords = torch.stack([torch.randint(0, size, (n,), generator=g) for size in shape])
    return stc.SparseTensor(coords, torch.rand(n, generator=g), shape)


SHAPE, MTTKRP, PAIR = (200, 300, 24), "ijk,jr,kr->ir", "ijk,klm->ijlm"
b, c, found = torch.rand(300, 32), torch.rand(24, 32), {}
x = tensor(5000, SHAPE, 1)
found["MTTKRP, first"] = traced(lambda: stc.einsum(MTTKRP, x, b, c))
found["MTTKRP, warm"] = traced(lambda: stc.einsum(MTTKRP, x, b, c))
x = tensor(5000, SHAPE, 3)
found["MTTKRP, Triton source"] = traced(lambda: stc.compile(MTTKRP, x, b, c, backend="triton").source)
p, q = tensor(3000, (100, 80, 60), 4), tensor(3000, (60, 50, 40), 5)
found["sparse x sparse, first"] = traced(lambda: stc.einsum(PAIR, p, q))


def compiled(backend):
    def make(seed):
        y = tensor(5000, SHAPE, 100 + seed)
        return lambda: stc.compile(MTTKRP, y, b, c, backend=backend)

    return make


def pair(seed):
    p, q = tensor(3000, (100, 80, 60), 200 + seed), tensor(3000, (60, 50, 40), 300 + seed)
    return lambda: stc.einsum(PAIR, p, q)


found["ms: compile torch"] = least(compiled("torch"))
found["ms: compile Triton source"] = least(compiled("triton"))
found["ms: sparse x sparse, first"] = least(pair)
small = torch.rand(4, 2), torch.rand(2, 2)
kernel = stc.compile(MTTKRP, tensor(5, (3, 4, 2), 9), *small)
found["us: call of a tiny kernel"] = round(least(lambda seed: lambda: [kernel(*small) for _ in range(200)]) * 5, 1)
print(json.dumps(found))
"""


def code_lines(text: str, nodes: list[ast.AST]) -> int:
    """Count the lines that hold code, of a module's text and nodes."""
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in nodes:  # what looks like a comment, or is blank, is code within a string
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    for node in nodes:
        if documented(node):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def code_tokens(text: str, nodes: list[ast.AST]) -> int:
    """Count the tokens of code, of a module's text and nodes; from Python 3.12 on, f-strings come in pieces."""
    count = within = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        count += within == 0 and kind not in LAYOUT
        within += kind.endswith("STRING_START") - kind.endswith("STRING_END")
    return count - sum(documented(node) for node in nodes)


def documented(node: ast.AST) -> bool:
    """Return True if a node has a docstring."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


def imports(nodes: list[ast.AST], modules: set[str]) -> Iterator[str]:
    """Yield the modules that a module imports, anywhere in it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from modules.intersection(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from modules.intersection([inner if inner in modules else node.module or ""])


def largest_knot(graph: dict[str, set[str]]) -> int:
    """Return the size of the largest set of nodes that all reach each other; 0 where there is no cycle."""
    reached = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reached[start] = seen
    knots = ({b for b in seen if a in reached.get(b, ())} for a, seen in reached.items())
    return max(map(len, knots), default=0)


def static(root: Path) -> dict[str, int]:
    """Return the figures of a checkout that need no run."""
    package = root / "sparsetc"
    paths = {".".join(p.relative_to(root).with_suffix("").parts): p for p in package.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    texts = {name: path.read_text() for name, path in paths.items()}
    nodes = {name: list(ast.walk(ast.parse(text))) for name, text in texts.items()}
    kinds = Counter(type(node) for each in nodes.values() for node in each)
    lines: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    modules: dict[str, set[str]] = defaultdict(set)
    folders: dict[str, set[str]] = defaultdict(set)
    for name, path in paths.items():
        folder = path.parent.relative_to(package).as_posix()
        lines[folder.split("/")[0]] += code_lines(texts[name], nodes[name])
        tokens[folder.split("/")[0]] += code_tokens(texts[name], nodes[name])
        for other in imports(nodes[name], set(paths)):
            modules[name].add(other)
            beside = paths[other].parent.relative_to(package).as_posix()
            if "." not in (folder, beside) and folder != beside:
                folders[folder].add(beside)
    return {
        TOKENS: tokens.total(),
        COMPILER: sum(n for folder, n in tokens.items() if folder not in AROUND),
        "lines": lines.total(),
        FILES: len(paths),
        CLASSES: kinds[ast.ClassDef],
        "functions": kinds[ast.FunctionDef] + kinds[ast.AsyncFunctionDef],
        KNOT: largest_knot(modules),
        FOLDERS: largest_knot(folders),
        **{f"{folder}/".replace("./", "(top)/"): n for folder, n in tokens.most_common()},
    }


def figures(root: Path, only_static: bool) -> dict[str, object]:
    """Return all figures of a checkout."""
    tests = [path.read_text() for path in (root / "tests").rglob("*.py")]
    of_tests = sum(code_lines(text, list(ast.walk(ast.parse(text)))) for text in tests)
    found: dict[str, object] = {**static(root), "lines of tests": of_tests}
    if not only_static:
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "PYTHONPATH": str(root), "SPARSETC_CACHE_DIR": folder, "PYTHONWARNINGS": "ignore"}
            command = [sys.executable, "-c", CALLS]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, cwd=folder, check=True)
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the figures, those of another commit beside them if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--base", metavar="REV")
    arguments = parser.parse_args()
    before: dict[str, object] = {}
    if arguments.base:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", arguments.base], stdout=subprocess.PIPE, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            before = figures(Path(folder), arguments.static)
    for key, value in figures(Path.cwd(), arguments.static).items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{key:<64} {shown}" + (f"    was {before.get(key, '-')}" if before else ""))


if __name__ == "__main__":
    main()

"""The script that looks for changes of the code that no test notices, on a project of one module."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import mutate
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_survivors_are_printed_unless_they_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # takes longer than the test
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy.py").write_text("def later(a, b):\n    return a > b\n")
    (tmp_path / "tests" / "test_toy.py").write_text("from toy import later\n\ndef test_it():\n    assert later(3, 2)\n")
    for command in ("init", "add ."):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    arguments = ["toy.py", "--root", str(tmp_path)]
    assert mutate.main([*arguments, "--jobs", "2"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "killed: toy.py:2 later: a > b → None in `return a > b`",
        "survived: toy.py:2 later: a > b → a >= b in `return a > b`",
        "2 mutants, 0 timed out, 1 survived",
    ]
    (tmp_path / "tests" / "equivalent_mutants.txt").write_text(
        "# A reason.\ntoy.py later: a > b → a >= b in `return a > b`\n"
    )
    assert mutate.main(arguments) == 0


MODULES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "sparsetc").rglob("*.py")]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_can_be_changed_has_tests(module: str) -> None:
    """Without files to run pytest would run all there are."""
    groups = mutate.groups_of(module, ROOT)
    assert (groups and all(groups)) or not mutate.mutations((ROOT / module).read_bytes())


def test_the_operators() -> None:
    def after(body: str) -> list[str]:
        source = f"def f():\n    {body}\n".encode()
        changed = [m.applied(source).decode() for m in mutate.mutations(source)]
        return [text.removeprefix("def f():\n    ").removesuffix("\n") for text in changed]

    assert after("x = a < b != c") == ["x = (a <= b != c)", "x = (a < b == c)"]
    assert after("x = a * b") == ["x = (a // b)"]
    assert after("x = not (a or b)") == ["x = (a or b)", "x = not ((a and b))"]
    assert after("x = min(a, True)") == ["x = (max(a, True))", "x = min(a, (False))"]
    assert after("x = é[n:], 2") == ["x = é[(n + 1):], 2", "x = é[n:], (3)"]
    assert after("if a: return b") == ["if (False): return b", "if a: return (None)"]
    assert after("raise ValueError('a' + b)") == ["pass"]
    assert after("a.append(b)") == ["pass"]
    assert after("x: Literal[1] = f'{a + b}'") == []


def test_every_mutant_is_a_module() -> None:
    source = (ROOT / "sparsetc" / "tensor" / "coords.py").read_bytes()
    found = mutate.mutations(source)
    assert len(found) > 50
    for mutation in found:
        ast.parse(mutation.applied(source))


def test_the_list_of_equivalent_mutants_is_true() -> None:
    """Every entry is a mutant of today's code and follows a reason."""
    lines = (ROOT / "tests" / "equivalent_mutants.txt").read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith("#"):
            module, key = line.split(" ", 1)
            assert before, line
            assert key in {m.key for m in mutate.mutations((ROOT / module).read_bytes())}, line

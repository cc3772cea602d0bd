"""The examples and the command line, each in a process of its own, as a reader runs them."""

import os
from importlib.resources import files
from pathlib import Path

import processes
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
UBER = str(files("sparsetc") / "data" / "uber.tns.gz")


def run(tmp_path, *arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # One folder for whichever process tests them: what numba compiles for them takes two thirds of their time.
    folder = Path(env["SPARSETC_CACHE_DIR"]).with_name("examples")
    folder.mkdir(0o700, exist_ok=True)
    # One thread: where other tests keep the cores busy, threads that wait for each other are slower than none.
    env |= {"OMP_NUM_THREADS": "1", "SPARSETC_CACHE_DIR": str(folder), **environment}
    return processes.run(arguments, env=env, cwd=tmp_path)


def passed(result):
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_an_example_runs_and_checks_itself(tmp_path, name):
    passed(run(tmp_path, EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("name", ["custom_format", "custom_partition", "row_blocks"])
def test_extensions_serve_the_triton_kernels_too(tmp_path, name):
    passed(run(tmp_path, EXAMPLES / f"{name}.py", TRITON_INTERPRET="1", SPARSETC_BACKEND="triton"))


def test_explain_and_info_read_a_file(tmp_path):
    said = passed(run(tmp_path, "-m", "sparsetc", "explain", "ijkl,jr,kr,lr->ir", UBER, "--rank", "16", "--source"))
    assert "considered" in said
    assert "def part_0" in said
    said = passed(run(tmp_path, "-m", "sparsetc", "explain", "ijkl,l->ijk", UBER, "--backend", "triton", "--source"))
    assert "@triton.jit" in said
    said = passed(run(tmp_path, "-m", "sparsetc", "info", UBER))
    assert "order 4, 303,343 nonzeros" in said
    assert "102,603" in said
    assert passed(run(tmp_path, "-m", "sparsetc", "--version")).startswith("sparsetc ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "ijk,jr->ir", UBER], "of order 4"),
        (["explain", "ijkl,jr->qr", UBER], "which no operand has"),
        (["explain", "ijkl,jr->ir", UBER, "--plan", "none"], "no plan is called 'none'"),
        (["info", "absent.tns"], "absent.tns"),
    ],
)
def test_the_command_line_refuses_in_one_line_and_a_status(tmp_path, arguments, says):
    result = run(tmp_path, "-m", "sparsetc", *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr

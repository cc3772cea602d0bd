"""The notebooks of ``examples/notebooks``, each run from its first cell to its last, and stored without outputs."""

import os
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
BEFORE = "import sys; sys.modules['matplotlib'] = None  # as if it were not installed"


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_checks_itself(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEFORE))
    # Sockets are files of a short path: ports could be taken by another test between choice and use.
    with tempfile.TemporaryDirectory(prefix="sparsetc-") as folder:
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=os.path.join(folder, "kernel"))
        client = NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
        client.execute(cleanup_kc=True)  # ends the kernel; raises the error of a cell, with its source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code if cell.outputs or cell.execution_count is not None or cell.metadata] == []
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook, indent=1) + "\n"

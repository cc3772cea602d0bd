"""The notebooks of ``examples/notebooks``, each run from its first cell to its last, and stored with its outputs."""

import os
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
BEFORE = "import sys; sys.modules['matplotlib'] = None  # as if it were not installed"


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_checks_itself(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    notebook, stored = read(path), read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEFORE))
    run(notebook, tmp_path)
    for cell, shown in zip(notebook.cells[1:], stored.cells, strict=True):
        if cell.get("outputs"):
            assert shown.outputs, f"run it again, and store what it shows: {cell.source}"


def run(notebook, folder_of_cells):
    """Run all cells; an error of one is raised, with its source."""
    # Sockets are files of a short path: ports could be taken by another test between choice and use.
    with tempfile.TemporaryDirectory(prefix="sparsetc-") as folder:
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=os.path.join(folder, "kernel"))
        resources = {"metadata": {"path": str(folder_of_cells)}}
        client = NotebookClient(notebook, km=manager, timeout=300, resources=resources)
        client.execute(cleanup_kc=True)  # ends the kernel


def test_a_notebook_shows_pictures_and_entries(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    cells = ["import sparsetc as stc", "axes = stc.plot.spy(stc.eye(4))", "stc.eye(4)", "print(stc.eye(9) / 3)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    run(notebook, tmp_path)
    _, drawn, shown, printed = (cell.outputs for cell in notebook.cells)
    assert ["image/png" in output.get("data", {}) for output in drawn] == [True]
    assert "(0, 0)  1" in shown[0].data["text/html"]
    assert printed[0].text.splitlines()[1:] == [*(f"  ({n}, {n})  0.333333" for n in range(6)), "  … 3 more"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran_from_a_new_kernel(path):
    """With the outputs of a run, which ``jupyter execute --inplace`` makes; folders of the machine are not shown."""
    notebook, text = read(path), path.read_text(encoding="utf-8")
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert sum(bool(cell.outputs) for cell in code) > len(code) // 2
    assert [cell.source for cell in code if cell.metadata] == []
    assert [word for word in ("/tmp/", "/home/", "/root/", "Traceback", "stderr") if word in text] == []
    assert text == nbformat.writes(notebook, indent=1) + "\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_page_of_the_site(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import hooks

    page = hooks.on_page_markdown((ROOT / "docs" / "notebooks" / f"{path.stem}.md").read_text(encoding="utf-8"))
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.source for cell in code if cell.source not in page] == []
    printed = [output.text.rstrip() for cell in code for output in cell.outputs if output.output_type == "stream"]
    assert printed
    assert [text for text in printed if text not in page] == []

"""The notebooks run to their end, and print what is saved in them."""

import pytest
from places import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def printed(notebook) -> list[str]:
    """What each code cell wrote to standard output."""
    return [
        "".join(each.text for each in cell.outputs if each.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path):
    saved = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(run, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert printed(run) == printed(saved)

"""The notebooks run to their end, and print what is saved in them."""

import pytest
from helpers.places import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def printed(notebook) -> list[str]:
    """The standard output of each code cell, and its value as text."""

    def text(output) -> str:
        if output.output_type == "execute_result":
            return output.data["text/plain"]
        return output.text if output.get("name") == "stdout" else ""

    return ["".join(map(text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_prints_its_saved_output(path):
    saved = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(run, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert printed(run) == printed(saved)

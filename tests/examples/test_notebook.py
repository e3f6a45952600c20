"""The notebook of the examples: launch, train, interrupt, launch again, run by nbclient as its cells say."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.launching.kernels import SECONDS

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def shown(cell: nbformat.NotebookNode) -> str:
    """The text of a cell; nothing else is shown, and no error."""
    assert {output.output_type for output in cell.outputs} <= {"stream"}
    assert {output.name for output in cell.outputs} <= {"stdout"}
    return "".join(output.text for output in cell.outputs)


def test_its_cells_run_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=SECONDS, resources=resources).execute()
    define, launch, metrics, plans, stop, again = [
        shown(cell) for cell in notebook.cells if cell.cell_type == "code"
    ]

    assert define == ""
    assert re.findall(r"^step (\d+): loss \d+\.\d{4}, gradient norm", launch, re.M) == ["0", "20", "40"]
    rows = [line.split() for line in metrics.splitlines()]
    losses = [float(loss) for _, loss, _ in rows]
    assert [int(step) for step, _, _ in rows] == list(range(0, 60, 6))
    assert losses[-1] < 0.1 * losses[0]
    first, second = [plan_memory(line) for line in plans.splitlines() if line.startswith("data=2")]
    assert second == pytest.approx({name: size / 2 for name, size in first.items()}, rel=0.15)
    assert stop.endswith("stopped\n")
    assert "step 0" in stop, "the ranks had begun to train"
    start, middle, end = [float(number) for number in re.findall(r"\d\.\d{4}", again.splitlines()[-1])]
    assert start > 10 * middle > 20 * end


def plan_memory(line: str) -> dict[str, int]:
    """The bytes of what zero=3 shards."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)': '(\d+) bytes'", line)}
    return {name: sizes[name] for name in ("parameters", "optimizer")}


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(
        not cell.outputs and cell.execution_count is None for cell in notebook.cells if "outputs" in cell
    )

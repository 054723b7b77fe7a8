"""A notebook with two trainers: its class is trained, interrupted in the middle, and resumed."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from own_programs import PROGRAM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = """
interrupted = lockstep.train(
    DATA, model=Net, n_epochs=5000, run_name="long", print_freq=2, snapshot_freq=1000,
    callback=lambda event: open(MARK, "w").close(), **{**keys, "quiet": False},
)
print("complete:", interrupted.complete)
"""
REST = """
done = len(interrupted.history)
run = lockstep.resume(interrupted, n_epochs=done + 2, quiet=True)
print("resumed:", run.complete, len(run.history) - done)
"""


def text_of(cell: Any) -> str:
    parts = [output.get("text", "") for output in cell.outputs]
    return "".join(parts)


async def run_notebook(notebook: Any, client: Any, mark: Path) -> None:
    """Execute the cells; send Ctrl-C to the second one once it trains."""
    async with client.async_setup_kernel():
        await client.async_execute_cell(notebook.cells[0], 0)
        second = asyncio.create_task(client.async_execute_cell(notebook.cells[1], 1))
        while not mark.exists() and not second.done():
            await asyncio.sleep(0.1)
        await client.km.interrupt_kernel()
        await second
        await client.async_execute_cell(notebook.cells[2], 2)


def test_a_notebook_trains_is_interrupted_and_resumes(shared_folder: Path, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    values = {"DATA": shared_folder, "FOLDER": tmp_path / "runs", "MARK": tmp_path / "mark"}
    cells = []
    names = re.compile("|".join(values))
    for text in (PROGRAM, LONG, REST):
        filled = names.sub(lambda match: repr(str(values[match[0]])), text)
        cells.append(nbformat.v4.new_code_cell(filled))
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=int(limit(120)), resources=resources)
    asyncio.run(run_notebook(notebook, client, tmp_path / "mark"))
    assert text_of(notebook.cells[0]).split() == ["once", "Net", "675", "True"]
    shown = text_of(notebook.cells[1])
    assert "complete: False" in shown and "saved" in shown and "left, run" in shown
    assert text_of(notebook.cells[2]) == "resumed: True 2\n"

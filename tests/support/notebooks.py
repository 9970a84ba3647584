"""Read notebooks, run some of their cells, or execute them in a kernel."""

import ast
import os
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"

Book = Any  # nbformat's notebooks are dicts whose keys are also attributes


def read(name: str) -> Book:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(book: Book) -> list[Book]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def source_of(book: Book, cell_id: str) -> str:
    (cell,) = (cell for cell in book.cells if cell.id == cell_id)
    return cell.source


def trees(book: Book) -> list[ast.Module]:
    """Parse every code cell as Python, with magics replaced by calls."""
    transform = TransformerManager().transform_cell
    return [ast.parse(transform(cell.source)) for cell in code_cells(book)]


def parameters_of(book: Book) -> dict[str, Any]:
    source = source_of(book, "parameters")
    statements = ast.parse(source).body
    found = {}
    for statement in statements:
        assert isinstance(statement, ast.Assign), source
        (name,) = statement.targets
        assert isinstance(name, ast.Name) and name.id.isupper(), source
        found[name.id] = ast.literal_eval(statement.value)
    return found


def run_cells(name: str, *cell_ids: str, **names: Any) -> dict[str, Any]:
    """Run cells in this process, with `names` defined; return all defined names."""
    book = read(name)
    space: dict[str, Any] = {"Path": Path} | parameters_of(book) | names
    for cell_id in cell_ids:
        exec(source_of(book, cell_id), space)
    return space


def execute(name: str, folder: Path, **parameters: Any) -> Book:
    """Run a notebook in a fresh kernel, with some of its parameters changed."""
    book = read(name)
    assert parameters.keys() <= parameters_of(book).keys()
    changed = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    (first,) = (i for i, cell in enumerate(book.cells) if cell.id == "parameters")
    book.cells.insert(first + 1, nbformat.v4.new_code_cell(changed))
    packages = [str(ROOT / part) for part in (".", "kernels", "checkpoints")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(packages),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    client = NotebookClient(
        book,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env=env)


def printed(book: Book) -> str:
    """Return all text that the cells have printed."""
    parts = [
        output.text
        for cell in code_cells(book)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    ]
    return "".join(parts)


def num_pictures(book: Book) -> int:
    return sum(
        "image/png" in output.get("data", {})
        for cell in code_cells(book)
        for output in cell.outputs
    )

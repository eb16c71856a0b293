"""The notebooks of examples/python run from their first cell to the last, with or without Jupyter."""

import ast
import json
import subprocess
import sys
import unittest
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"


def run(file):
    """Runs the code cells of a notebook in this interpreter, and shows the last value of each as Jupyter does."""
    notebook = json.loads(Path(file).read_text())
    names = {"__name__": "__main__"}
    for at, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        tree = ast.parse("".join(cell["source"]), f"{Path(file).name}, code cell {at + 1}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"<cell {at + 1}>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"<cell {at + 1}>", "eval"), names)
            shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
            assert value is None or shown, f"cell {at + 1} shows nothing"


class Notebooks(unittest.TestCase):
    def runs(self, name, framework):
        file = FOLDER / f"{name}.ipynb"
        notebook = json.loads(file.read_text())
        self.assertEqual((notebook["nbformat"], notebook["nbformat_minor"]), (4, 5))
        for cell in notebook["cells"]:
            self.assertEqual(set(cell) - {"execution_count", "outputs"}, {"cell_type", "id", "metadata", "source"})
            # Outputs of a run do not belong in the repository.
            self.assertFalse(cell.get("outputs"))
        if subprocess.run([sys.executable, "-c", f"import {framework}"], capture_output=True).returncode:
            self.skipTest(f"{framework} is not installed")
        done = subprocess.run([sys.executable, __file__, str(file)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-4000:])

    def test_torch(self):
        self.runs("torch", "torch")

    def test_jax(self):
        self.runs("jax", "jax")


if __name__ == "__main__":
    run(sys.argv[1]) if sys.argv[1:] and sys.argv[1].endswith(".ipynb") else unittest.main()

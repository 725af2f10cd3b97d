"""The notebooks run from the first cell to the last, in a process of their own, and end well."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bare_python import bare_environment

from sparkdl import SparkModel
from sparkdl.spark.fit.training import StageSummary

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 600


def run_notebook(path: Path, folder: Path) -> Any:
    """Executes a notebook in ``folder`` and returns it with its outputs.

    The kernel ``python3`` runs this interpreter: jupyter_client puts ``sys.executable`` where the
    kernel's command says ``python``.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return notebook


def outputs(notebook: Any) -> list[Any]:
    """The outputs of all code cells."""
    return [o for cell in notebook.cells for o in cell.get("outputs", ())]


def printed(notebook: Any) -> str:
    """What the cells printed."""
    return "".join(o.text for o in outputs(notebook) if o.get("name") == "stdout")


def figures(notebook: Any) -> list[str]:
    """The plots, as base64 PNG."""
    return [o.data["image/png"] for o in outputs(notebook) if "image/png" in o.get("data", {})]


def held_out_accuracy(notebook: Any) -> float:
    """The number behind ``held-out accuracy:``."""
    found = re.search(r"held-out accuracy: ([0-9.]+)", printed(notebook))
    assert found, "the notebook printed no held-out accuracy"
    return float(found[1])


def test_quickstart(tmp_path: Path) -> None:
    notebook = run_notebook(ROOT / "notebooks" / "01_quickstart.ipynb", tmp_path)
    assert held_out_accuracy(notebook) >= 0.95
    drawn = figures(notebook)  # the curves, the confusion matrix, the digits
    assert len(drawn) == 3
    assert all(len(picture) > 1000 for picture in drawn)
    assert "the same loss after loading: True" in printed(notebook)
    assert not list(tmp_path.glob("*.keras"))


@pytest.mark.slow
def test_write_your_own_rule(tmp_path: Path) -> None:
    shown = printed(run_notebook(ROOT / "notebooks" / "03_write_your_own_rule.ipynb", tmp_path))
    accuracy = {n: float(v) for n, v in re.findall(r"(\w+) +held-out accuracy ([0-9.]+)", shown)}
    assert accuracy["bounded"] > max(0.85, accuracy["downpour"] + 0.05)
    assert "learned: True" in shown


@pytest.mark.slow
def test_allreduce_and_custom_loops(tmp_path: Path) -> None:
    notebook = run_notebook(ROOT / "notebooks" / "02_allreduce_and_custom_loops.ipynb", tmp_path)
    shown = printed(notebook)
    assert "the same weights on both ranks: True" in shown
    assert "[rank 0] epoch 8: " in shown
    assert "worker 1 failed: ValueError: a bad row" in shown
    found = [float(f) for f in re.findall(r"held-out accuracy: ([0-9.]+)", shown)]
    assert len(found) == 3
    assert min(found) >= 0.9, found
    assert len(figures(notebook)) == 1


@pytest.mark.slow  # ml/test_ml_docs.py runs the page about pipelines, which has the same steps
@pytest.mark.parametrize("where", ["classic", "connect"])
def test_pipelines(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "connect":
        monkeypatch.setenv("SPARK_REMOTE", "local-cluster[2,1,2048]")
    notebook = run_notebook(ROOT / "notebooks" / "04_pipelines.ipynb", tmp_path)
    shown = printed(notebook)
    assert held_out_accuracy(notebook) >= 0.8
    assert "chosen: 16 units" in shown
    assert "the same probabilities after loading: True" in shown
    assert "the stream's predictions are those of the table: True" in shown
    assert len(figures(notebook)) == 2  # the metrics; the ROC beside the confusion matrix
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # program/test_program.py has the same programs, launch/test_run_data.py the feed
def test_programs(tmp_path: Path) -> None:
    notebook = run_notebook(ROOT / "notebooks" / "05_programs.ipynb", tmp_path)
    shown = printed(notebook)
    assert "target reached: True" in shown
    assert "node hasty/0 failed: ValueError: no way on" in shown
    fitted = "slope and offset [3.0, -1.0] after the same steps on each rank: True"
    assert shown.count(fitted) == 2
    assert len(figures(notebook)) == 1


@pytest.mark.slow
def test_find_the_best_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIALS", "10")  # 64 are stored
    notebook = run_notebook(ROOT / "notebooks" / "06_find_the_best_model.ipynb", tmp_path)
    shown = printed(notebook)
    assert held_out_accuracy(notebook) >= 0.85
    trials, epochs = map(int, re.findall(r"(\d+) trials in [\s\S]*?(\d+) epochs;", shown)[0])
    assert (trials, epochs) >= (10, 10)
    assert epochs < 10 * 27 / 2
    assert len(figures(notebook)) == 4  # curves, importances, scatter, parallel coordinates
    assert ("MLflow is not installed" in shown) != ("runs of trials inside: 10" in shown)
    assert not list(tmp_path.iterdir())


def test_keras_hub(tmp_path: Path) -> None:
    """A task learns a column of texts on executors, and predicts; adapters of another one learn."""
    pytest.importorskip("keras_hub", reason="pip install sparkdl-keras[hub]")
    notebook = run_notebook(ROOT / "notebooks" / "08_keras_hub.ipynb", tmp_path)
    assert held_out_accuracy(notebook) >= 0.9
    shown = printed(notebook)
    before, after = map(float, re.findall(r"loss: ([0-9.]+), then ([0-9.]+)", shown)[0])
    assert after < before
    trained, every = re.findall(r"trained numbers: ([0-9,]+) of ([0-9,]+)", shown)[0]
    assert int(trained.replace(",", "")) < 0.1 * int(every.replace(",", ""))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tables_with_strings(tmp_path: Path) -> None:
    shutil.copy(ROOT / "notebooks" / "flights.csv.gz", tmp_path)
    path = ROOT / "notebooks" / "07_tables_with_strings.ipynb"
    notebook = run_notebook(path, tmp_path)
    shown = printed(notebook)
    found = dict(re.findall(r"(?m)^(\S.*?) +AUC of November and December ([0-9.]+)", shown))
    assert set(found) == {"the network", "gradient-boosted trees"}
    assert min(map(float, found.values())) > 0.6, found
    assert re.search("the same (AUC|score) after loading: True", shown)
    assert len(figures(notebook)) == 1


def test_the_page_on_strings_shows_cells_of_its_notebook() -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "07_tables_with_strings.ipynb", as_version=4)
    code = re.sub(r"\s+", " ", "\n".join(c.source for c in notebook.cells))
    page = (ROOT / "docs" / "guide" / "strings.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) >= 4
    for block in blocks:
        assert re.sub(r"\s+", " ", block).strip() in code, block
    told = re.findall(r"AUC of November and December ([0-9.]+)", printed(notebook))
    assert len(told) == 2
    assert all(f"{auc}" in page for auc in told), "the page's figures are the notebook's"


def test_the_readme_runs_in_a_fresh_terminal(tmp_path: Path) -> None:
    """The blocks in their order, where ``python3`` has no packages and nobody names another.

    README's first one alone, and its others with those of docs/tour.md and docs/shell.md: nothing
    that they need is printed below them, and nobody reads what TensorFlow says about itself.
    """
    pages = [ROOT / "README.md", ROOT / "docs" / "tour.md", ROOT / "docs" / "shell.md"]
    text = "".join(page.read_text() for page in pages)
    first, *others = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(others) >= 7
    variables = bare_environment(tmp_path)
    variables.pop("TF_CPP_MIN_LOG_LEVEL", None)
    (tmp_path / "first.py").write_text(first)
    (tmp_path / "readme.py").write_text(
        "\n".join(["import runpy", "runpy.run_path('first.py')", *others])
    )
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=tmp_path, env=variables,
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prediction" in done.stdout
    assert (tmp_path / "model.keras").exists()
    assert (tmp_path / "digits.keras").exists()
    assert (tmp_path / "timeline.json").exists()
    assert list((tmp_path / "logs").iterdir())
    assert list((tmp_path / "digits-pipeline").iterdir())
    assert "retracing" not in done.stderr
    # Spark closes a worker's connection once show(3) has its rows, maybe before the last flush.
    flushed = r"Traceback.*\n(?:  File .*pyspark/daemon.py.*\n(?:    .*\n)*)+BrokenPipeError.*\n"
    told = re.sub(flushed, "", done.stderr)
    assert "Traceback" not in told, told
    for noise in ("absl::", "oneDNN", "cudart_stub", "cuInit"):  # of driver and Python workers
        assert noise not in done.stderr, done.stderr


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module or what a module or class has."""
    first, *names = dotted.split(".")
    found: Any = importlib.import_module(first)
    for depth, name in enumerate(names, 1):
        if not hasattr(found, name):
            try:
                importlib.import_module(".".join([first, *names[:depth]]))
            except ImportError:
                return False
        found = getattr(found, name)
    return True


def strange_names(text: str) -> set[str]:
    """Names of sparkdl, of a ``spark_model`` and of its ``summary`` in a page that do not exist."""
    fields = {field.name for field in dataclasses.fields(StageSummary)}
    dotted = re.findall(r"(?<![\w/.-])sparkdl(?:\.[A-Za-z_]\w*)+", text)
    of_models = re.findall(r"\bspark_model\.(?!py\b)([A-Za-z_]\w*)", text)
    of_summaries = re.findall(r"(?:(?<![\w.])|spark_model\.)summary\.([A-Za-z_]\w*)", text)
    return {
        *(name for name in dotted if not exists(name)),
        *(name for name in of_models if not hasattr(SparkModel, name)),
        *(n for n in of_summaries if n not in fields and not hasattr(StageSummary, n)),
    }


def test_names_that_do_not_exist_are_found() -> None:
    text = """`sparkdl.run`, `sparkdl.rules`, `sparkdl.SparkModel.fit`, sparkdl.nosuch.name,
    `spark_model.summary.seconds`, `sparkdl.ps.nosuch`, `spark_model.training_seconds`,
    `summary.frobs`, `model.summary()`, sparkdl.json"""
    assert strange_names(text) == {
        "sparkdl.nosuch.name", "sparkdl.ps.nosuch", "training_seconds", "frobs", "sparkdl.json",
    }  # fmt: skip


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_every_name_in_a_page_exists(path: Path) -> None:
    text = path.read_text()
    assert strange_names(text) == set()
    for link in set(re.findall(r"\]\(([^)#:]+)", text)):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_are_whole_and_name_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "store it after one run from top to bottom"
    stored = outputs(notebook)
    assert not [o for o in stored if o.output_type == "error" or o.get("name") == "stderr"]
    shown = printed(notebook) + "".join(str(o.get("data", {}).get("text/plain")) for o in stored)
    for private in (str(ROOT), os.path.expanduser("~"), "/tmp/", "/home/"):
        assert private not in shown

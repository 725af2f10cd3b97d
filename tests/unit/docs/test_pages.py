"""The pages without mkdocs: links lead somewhere, references in docstrings name what exists."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def load(name: str) -> ModuleType:
    """A module of docs/site, which is no package."""
    path = ROOT / "docs" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"site_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names = load("names")


def anchors(text: str) -> set[str]:
    """As GitHub and mkdocs make them from headings, numbered where a heading comes again."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", re.sub(r"(?ms)^```.*?^```", "", text), re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).strip()
        slug = slug.replace(" ", "-")
        again = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{again}" if again else slug)
    return found


def broken(page: Path) -> list[str]:
    """Its links to files and headings that are not there."""
    text = re.sub(r"(?ms)^```.*?^```|``[^`]*``|`[^`\n]*`", "", page.read_text())
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())
        ):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_lost_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](#a-heading) [b](#no) [c](no.md) [d](page.md#a-heading)\n")
    assert broken(page) == ["#no", "no.md"]


def test_every_reference_of_a_docstring_names_what_exists() -> None:
    every = list(names.references())
    assert len(every) > 600
    lost = [one for one in every if names.resolve(one.target, one.module, one.within) is None]
    assert lost == []


@pytest.mark.parametrize(
    ("target", "module", "expected"),
    [
        ("sparkdl.SparkModel.fit", "sparkdl.config", "sparkdl.spark.spark_model.SparkModel.fit"),
        ("SparkModel", "sparkdl.tune", "sparkdl.spark.spark_model.SparkModel"),
        ("Learner", "sparkdl.training.syncing", "sparkdl.training.learning.Learner"),
        ("json", "sparkdl.config", "json"),
        ("sparkdl.tracking.guard", "sparkdl.config", None),
        ("NoSuchClass", "sparkdl.config", None),
    ],
)
def test_what_a_reference_means(target: str, module: str, expected: str | None) -> None:
    assert names.resolve(target, module) == expected


def test_the_drawn_diagram_is_that_of_the_page() -> None:
    """Drawn once with mermaid, as the site loads no program from elsewhere."""
    (source,) = re.findall(
        r"(?ms)^```mermaid\n(.*?)^```$", (ROOT / "docs" / "architecture.md").read_text()
    )
    drawn = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    assert f'data-source="{hashlib.sha256(source.encode()).hexdigest()[:16]}"' in drawn
    assert ";" not in source  # ends a statement in mermaid


def test_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_tests_that_pages_name_exist() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"def (test_\w+)", tests))
    paths = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guide").glob("*.md")]
    pages = "\n".join(path.read_text() for path in paths)
    assert set(re.findall(r"`(test_\w+)`", pages)) - known == set()


GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))


@pytest.mark.parametrize("page", GUIDE, ids=lambda path: path.stem)
def test_a_page_of_the_guide_is_a_screen_or_two(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 90


def test_the_guide_lists_its_pages() -> None:
    listed = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/guide/index.md").read_text())
    assert {*listed} | {"index.md"} == {path.name for path in GUIDE}

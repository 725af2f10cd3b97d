"""What the site has beside the pages of docs/: made when it is built, from what stands elsewhere.

- the start page from README.md, and the pages of CONTRIBUTING.md and CHANGELOG.md
- the list of the guide's pages
- tutorials from the notebooks, with their stored outputs
- a reference of the public names, from their docstrings
- the index of the decisions, with what each says of itself
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import names

ROOT = names.ROOT
FENCE = re.compile(r"(?ms)^```.*?^```$|``[^`]*``|`[^`\n]*`")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
REFERENCE = {
    "Training": ["sparkdl.SparkModel", "sparkdl.load_spark_model", "sparkdl.describe"],
    "Predictions": [
        "sparkdl.predict", "sparkdl.generate", "sparkdl.predict_udf", "sparkdl.register_udf",
    ],
    "Your own loop": [
        "sparkdl.run", "sparkdl.Feeding", "sparkdl.inference", "sparkdl.HorovodRunner",
        "sparkdl.communicator",
        "sparkdl.DistributedOptimizer", "sparkdl.BroadcastCallback",
        "sparkdl.MetricAverageCallback", "sparkdl.LogCallback", "sparkdl.log_to_driver",
    ],
    "Network, clusters, the page": [
        "sparkdl.Network", "sparkdl.Limits", "sparkdl.doctor", "sparkdl.environment",
        "sparkdl.dashboard",
    ],
    "TFRecord files": [
        "sparkdl.read_tfrecords", "sparkdl.write_tfrecords", "sparkdl.register_tfrecord",
    ],
    "Images": [
        "sparkdl.DeepImageFeaturizer", "sparkdl.DeepImagePredictor",
        "sparkdl.KerasImageFileTransformer", "sparkdl.KerasImageFileEstimator",
        "sparkdl.registerKerasImageUDF",
    ],
    "sparkdl.layers": "sparkdl.layers",
    "sparkdl.ml": "sparkdl.ml", "sparkdl.sparse": "sparkdl.sparse",
    "sparkdl.mllib": "sparkdl.mllib", "sparkdl.tune": "sparkdl.tune",
    "sparkdl.tracking": "sparkdl.tracking", "sparkdl.mlflow": "sparkdl.mlflow",
    "sparkdl.program": "sparkdl.program", "sparkdl.rules": "sparkdl.rules",
    "sparkdl.collective.rules": "sparkdl.collective.rules",
    "sparkdl.codecs": "sparkdl.codecs", "sparkdl.errors": "sparkdl.errors",
    "sparkdl.training.learning": "sparkdl.training.learning",
    "sparkdl.training.syncing": "sparkdl.training.syncing",
}  # fmt: skip
"""Pages of the reference: names, or a module whose ``__all__`` (or classes) it shows."""

INHERITING = {"sparkdl.SparkModel": ["    options: {inherited_members: true}"]}


class Pages:
    """Pages that are made, and where in the repository their text comes from."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self.binary: dict[str, bytes] = {}
        self.guide: list[tuple[str, str]] = []
        self.tutorials: list[tuple[str, str]] = []
        self.reference: list[tuple[str, str]] = []

    def add(self, uri: str, text: str, origin: str) -> None:
        self.texts[uri], self.origins[uri] = text, origin


def slug(heading: str) -> str:
    """As the site and GitHub make the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def list_guide(pages: Pages) -> None:
    """The guide's pages in the order of the table on its first one."""
    folder = ROOT / "docs" / "guide"
    index = (folder / "index.md").read_text()
    for name in dict.fromkeys(re.findall(r"\]\((\w+\.md)\)", index)):
        title = (folder / name).read_text().partition("\n")[0].removeprefix("# ")
        pages.guide.append((title, f"guide/{name}"))


def read_notebooks(pages: Pages) -> None:
    """Each notebook as a page: text, code, and what the cells printed and drew."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name, parts = path.stem, []
        for i, cell in enumerate(json.loads(path.read_text())["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(source)
                continue
            parts.append(f"```python\n{source}\n```")
            for k, output in enumerate(cell.get("outputs", ())):
                parts.append(_output(pages, output, f"tutorials/{name}-{i}-{k}.png"))
        text = "\n\n".join(part for part in parts if part)
        title = re.findall(r"(?m)^# (.+)$", text)[0]
        pages.tutorials.append((title, f"tutorials/{name}.md"))
        pages.add(f"tutorials/{name}.md", text, f"notebooks/{path.name}")


def _output(pages: Pages, output: dict[str, Any], image: str) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        pages.binary[image] = base64.b64decode("".join(data["image/png"]))
        return f'<div class="notebook-output"><img alt="a plot" src="../{Path(image).name}"></div>'
    text = "".join(output.get("text", data.get("text/plain", ()))).rstrip()
    return f"```text\n{text}\n```" if text else ""


def make_reference(pages: Pages) -> None:
    """A page per group of names, and a table of all of them."""
    head = (
        "The public names, from their docstrings. `sparkdl.compat` has those of other libraries, "
        "as they document them; `sparkdl.testing` servers and ranks in one process, for tests."
    )
    index = ["# Reference", "", head, ""]
    for title, content in REFERENCE.items():
        uri = f"reference/{slug(title.replace('.', '-'))}.md"
        shown = [content] if isinstance(content, str) else content
        text, listed = [f"# {title}", ""], []
        for name in shown:
            module = isinstance(content, str)
            if module:
                text += [f"::: {name}", "    options: {members: false, show_root_heading: false,"
                         " show_root_toc_entry: false}", ""]  # fmt: skip
            for public in names.public_names(name) if module else [name]:
                defined = names.find(public)
                if defined is None:
                    raise SystemExit(f"{public} is not defined: mend docs/site/hooks.py")
                text += [f"::: {defined}", *INHERITING.get(public, ()), ""]
                listed.append(f"[`{public.rpartition('.')[2]}`][{defined}]")
        pages.add(uri, "\n".join(text), "docs/site/hooks.py")
        pages.reference.append((title, uri))
        index += [f"**[{title}]({Path(uri).name})**: {', '.join(listed)}", ""]
    pages.add("reference/index.md", "\n".join(index), "docs/site/hooks.py")


def list_decisions(pages: Pages) -> None:
    """All decisions, the newest first; those that no longer hold in a line each at the end."""
    rows, gone = [], []
    for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"), reverse=True):
        text = path.read_text()
        number, title = re.findall(r"\A# (\d+):? (.+)", text)[0]
        later = re.findall(
            r"(?m)^\*\*(Replaced by|Changed by|Later)\b[^\[]*\[(\d+)\]\(([^)]+)\)", text
        )
        after = ", ".join(f"[{n}]({link})" for _, n, link in later)
        if any(kind == "Replaced by" for kind, *_ in later):
            gone.append(f"- [{number}]({path.name}) {title}: replaced by {after}")
        else:
            state = f"changed by {after}" if later else ""
            rows.append(f"| [{number}]({path.name}) | {title} | {state} |")
    head = (
        f"# Decisions\n\n{len(rows)} choices that others would ask about, each with its reason and "
        "its measurement. A page is a record: its numbers stay as they were.\n\n"
        "| | decision | |\n|---|---|---|\n"
    )
    end = ["", "", "## No longer hold", "", *gone, ""]
    pages.add("adr/index.md", head + "\n".join(rows + end), "docs/adr/index.md")


PAGES = Pages()


def on_config(config: Any) -> Any:
    """Makes the pages and lists all of them."""
    PAGES.__init__()  # type: ignore[misc]
    PAGES.add("index.md", (ROOT / "README.md").read_text(), "README.md")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        PAGES.add(name.lower(), (ROOT / name).read_text(), name)
    list_guide(PAGES)
    read_notebooks(PAGES)
    make_reference(PAGES)
    list_decisions(PAGES)
    config["nav"] = [
        {"Start": "index.md"},
        {"Tutorials": ["tour.md", *({t: u} for t, u in PAGES.tutorials)]},
        {"How to": [
            {"Train and predict": ["guide/index.md", *({t: u} for t, u in PAGES.guide)]},
            {"Elsewhere": [
                "hub.md", "generate.md", "tables.md", "sparse.md", "pipelines.md", "shell.md",
                "yarn.md", "clusters.md", "elephas.md",
            ]},
        ]},
        {"Rules": "rules.md"},
        {"Reference": ["reference/index.md", *({t: u} for t, u in PAGES.reference)]},
        {"How it behaves": [
            "tools.md", "keras.md", "reliability.md", "security.md", "benchmarks.md", "scaling.md",
        ]},
        {"How it is made": ["architecture.md", "contributing.md", "changelog.md"]},
        {"Decisions": "adr/index.md"},
    ]  # fmt: skip
    return config


def on_files(files: Files, config: Any) -> Files:
    for uri, text in PAGES.texts.items():
        files.append(File.generated(config, uri, content=text))
    for uri, data in PAGES.binary.items():
        files.append(File.generated(config, uri, content=data))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Links as they stand in the repository lead to the pages of the site."""
    uri = page.file.src_uri
    origin = PAGES.origins.get(uri, f"docs/{uri}")
    markdown = _drawn(markdown, uri)
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        fenced = found[0].startswith("```")
        kept.append(found[0] if fenced else found[0].replace("\\|", "|"))  # as in GitHub's tables
        return f"\0{len(kept) - 1}\0"

    held = FENCE.sub(keep, markdown)
    held = LINK.sub(lambda found: _link(found, uri, origin, files), held)
    return re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], held)


def _link(found: re.Match[str], uri: str, origin: str, files: Files) -> str:
    image, text, link = found.groups()
    if re.match(r"[a-z]+:", link):
        return found[0]
    path, _, anchor = link.partition("#")
    base = posixpath.dirname(origin)
    target = posixpath.normpath(posixpath.join(base, path)) if path else origin
    made = {source: page for page, source in PAGES.origins.items()}
    if target in ("docs/adr", "docs/adr/index.md"):
        page = "adr/index.md"
    elif target == "notebooks":
        page = PAGES.tutorials[0][1]
    else:
        page = made.get(target) or target.removeprefix("docs/")
    if files.get_file_from_path(page) is None:
        return text if (ROOT / target).exists() else found[0]  # a file that the site does not have
    relative = posixpath.relpath(page, posixpath.dirname(uri) or ".")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"


def _drawn(markdown: str, uri: str) -> str:
    """A diagram as the picture that was drawn of it: the site loads no program from elsewhere."""
    up = "../" * uri.count("/")
    picture = f"![A diagram]({up}images/{Path(uri).stem}.svg)"
    return re.sub(r"(?ms)^```mermaid\n.*?^```$", lambda _: picture, markdown)

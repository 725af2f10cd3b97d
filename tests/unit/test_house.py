"""Numbers of the house that may fall and not grow: one of each kind, few drawers, few arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import sparkdl
from sparkdl.collective.rules import EXCHANGE_RULES
from sparkdl.rules import RULES
from sparkdl.training import learning, syncing

ROOT = Path(sparkdl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}


def where(pattern: str, *, but: tuple[str, ...] = ()) -> list[str]:
    """Modules whose text has a pattern."""
    found = [name for name, text in TEXTS.items() if re.search(pattern, text)]
    return [name for name in found if not name.startswith(but)]


@pytest.mark.parametrize(
    ("what", "pattern", "home", "but"),
    [
        ("proofs of the token", r"\bhmac\b|compare_digest", "wire/", ()),
        ("settings of keep-alive", r"SO_KEEPALIVE", "wire/listening.py", ()),
        ("contexts of TLS", r"SSLContext\(", "wire/tls.py", ()),
        ("listening TCP sockets", r"create_server\(|SO_REUSEADDR", "wire/listening.py", ()),
        ("greeters", r"class \w*Greeter\b", "wire/greeting.py", ()),
        # executors run this file alone, without sparkdl
        ("identities of a host", r"boot_id", "wire/hosts.py", ("diagnosis/host_facts.py",)),
        # Keras says which class a file lacks in a text alone
        (
            "readers of the texts of errors",
            r"(in|search\(|search\(\w+,) ?str\(error\)",
            "spark/session/spark_errors.py",
            ("learner/archives/archive.py",),
        ),
        ("a coordinator's kinds of frames", r"\bHEARTBEAT = ", "coordinator/kinds.py", ()),
        ("a store's kinds of frames", r"\bPUSH_PULL = ", "ps/kinds.py", ()),
        ("own addresses", r"192\.0\.2\.1", "wire/hosts.py", ()),
        ("names of codecs", r'"(fp16|bf16|topk|randomk)"', "codecs/", ()),
    ],
)
def test_there_is_one_of_a_kind(what: str, pattern: str, home: str, but: tuple[str, ...]) -> None:
    assert where(pattern), f"the pattern of {what} finds nothing: has it moved?"
    assert where(pattern, but=(home, *but)) == [], f"{what} have their home in {home}"


def test_what_the_data_are_is_asked_once() -> None:
    """``form_of`` tells the forms of data apart; calls that take DataFrames only ask for one."""
    homes = ("spark/session/frames.py", "spark/forms/opening.py", "spark/forms/sources.py")
    assert where(r"\bis_frame\(", but=homes) == []


def test_rules_of_one_name_in_two_rooms_are_one_rule() -> None:
    """With a server and without one a name means the same equation, written once."""
    both = {cls.name: cls for cls in RULES.classes()}
    apart = [
        cls.name
        for cls in EXCHANGE_RULES.classes()
        if cls.name in both and not issubclass(cls, both[cls.name])
    ]
    assert apart == []


def test_a_worker_of_a_server_asks_one_object_how_it_exchanges() -> None:
    """A class for each way, and no class asks which of several it has."""
    text = TEXTS["ps/strategy.py"]
    assert re.findall(r"self\._(?:rounds|gradients|windows)\b", text) == []
    assert sum(text.count("(Way):") for text in TEXTS.values()) == 3


def test_the_transport_knows_no_requests_of_services() -> None:
    below = "".join(
        text for name, text in TEXTS.items() if name.startswith(("transport/", "wire/"))
    )
    assert set(re.findall(r"\bKind\.([A-Z_]+)", below)) == {"OPEN", "OK", "CHUNK", "ERROR"}
    assert "StoreKind" not in below
    assert "CoordinatorKind" not in below


def test_a_store_is_of_one_kind() -> None:
    """Which of the two stores a run has is asked once, where it is made."""
    stores = {name: text for name, text in TEXTS.items() if name.startswith("ps/store/")}
    asking = [name for name, text in stores.items() if "rule.blocking" in text]
    assert asking == ["ps/store/__init__.py", "ps/store/center.py"]


def test_no_module_is_longer_than_600_lines() -> None:
    assert [name for name, text in TEXTS.items() if text.count("\n") > 600] == []


def test_the_number_of_modules_and_lines_does_not_grow() -> None:
    """Wanted: 420 modules, fewer than 73,412 lines.

    Several servers and FTRL brought 3,900, readers of files 360.
    """
    assert len(TEXTS) <= 379
    assert sum(text.count("\n") for text in TEXTS.values()) <= 91_000


def test_a_module_gives_a_name_once() -> None:
    """Two modules that became one must not share the name of a constant: the second one won."""
    twice = []
    for name, text in TEXTS.items():
        nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        targets = [one for node in nodes for target in node.targets for one in ast.walk(target)]
        given = Counter(one.id for one in targets if isinstance(one, ast.Name))
        twice += [f"{name}: {each}" for each, count in given.items() if count > 1]
    assert twice == []


def test_folders_have_at_most_16_files() -> None:
    counted = Counter(str(Path(name).parent) for name in TEXTS)
    assert {folder: count for folder, count in counted.items() if count > 16} == {}


@pytest.mark.keras
@pytest.mark.parametrize(("name", "limit"), [("SparkModel", 20), ("run", 18)])
def test_argument_lists_do_not_grow(name: str, limit: int) -> None:
    """A new argument replaces one or goes into a settings object."""
    assert len(inspect.signature(getattr(sparkdl, name)).parameters) <= limit


LISTED = re.compile(r"((?:``[\w.]+``(?:,\s+|\s+and\s+)?)+)(?::\s|\n    )")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_the_docstring_of_a_package_lists_the_modules_that_exist(path: Path) -> None:
    """One that lists modules lists all of them, and no others."""
    text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    files = {p.stem for p in path.parent.glob("*.py")} - {"__init__", "__main__"}
    others = "compat" in path.parts  # modules that another library has
    exist = files | {"__main__"} | {p.parent.name for p in path.parent.glob("*/__init__.py")}
    listed = {n for part in LISTED.findall(text) for n in re.findall(r"``(\w+)``", part)}
    if others:  # or has a path of its own in the table of the package
        exist |= {name.rpartition(".")[2] for name in sparkdl._PATHS}
    if path.parent != ROOT and listed & exist:
        assert listed - exist - {"sparkdl"} == set(), "listed and not there"
        lost = exist - {"__main__"} - set(re.findall(r"``(\w+)``", text))
        assert others or lost == set(), "there and not listed"


def test_the_files_that_the_documentation_names_exist() -> None:
    """Each path in the table of docs/architecture.md that says where a question is answered."""
    text = (ROOT.parent / "docs/architecture.md").read_text()
    table = text.split("## Where do I find")[1].split("Three ideas carry")[0]
    lost = []
    for row in (line for line in table.splitlines() if line.startswith("| ")):
        folders = [ROOT]
        for name in re.findall(r"`([\w/]+(?:\.py|/)|[\w/]+\.js)`", row.split("|")[2]):
            path = next((f / name for f in reversed(folders) if (f / name).exists()), None)
            if path is None and not name.startswith("sparkdl/"):
                lost.append(name)
            elif path is not None:
                folders.append(path.parent if path.is_file() else path)
    assert lost == []


@pytest.mark.parametrize(
    ("protocol", "limit"), [(learning.Learner, 4), (syncing.Synchronizer, 12),
                            (learning.Steps, 8), (learning.SharedLearner, 20),
                            (learning.LearnerOptimizer, 12)],
)  # fmt: skip
def test_protocols_do_not_grow(protocol: type, limit: int) -> None:
    """Members with those inherited: the loop asks a learner for four things."""
    assert len([name for name in dir(protocol) if not name.startswith("_")]) <= limit


@pytest.mark.parametrize(("path", "name", "limit"), [
    ("learner/steps/keras_learner.py", "KerasLearner", 35),
    ("learner/steps/tensorflow.py", "TensorFlowLearner", 45),
])  # fmt: skip
def test_classes_do_not_grow(path: str, name: str, limit: int) -> None:
    """Wanted: 25 methods."""
    nodes = ast.parse(TEXTS[path]).body
    found = next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name)
    assert sum(isinstance(part, ast.FunctionDef) for part in found.body) <= limit


def test_fit_is_a_door() -> None:
    """``SparkModel.fit`` checks its arguments, opens the rows and makes one call."""
    tree = ast.parse(TEXTS["spark/spark_model.py"])
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    fit = next(node for node in functions if node.name == "fit" and len(node.args.args) > 5)
    assert fit.end_lineno is not None
    assert fit.end_lineno - fit.body[1].lineno < 30


FRAGMENTS = re.compile(r"(Of|Where|Who|Whose|So (many|much|long)|For so long|How long)\b")
LOOSE = re.compile(r"\b(for so long|after so long|so many|so much of)\b", re.IGNORECASE)


def docstrings(text: str) -> list[str]:
    """The docstrings of a module, its classes, functions and constants."""
    found = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    constants = [value.value for value in found if isinstance(value, ast.Constant)]
    return [text.strip() for text in constants if isinstance(text, str)]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Wanted: none; a fragment says of nothing whose place, number or part it is."""
    told = {name: docstrings(text) for name, text in TEXTS.items()}
    fragments = [(n, d[:60]) for n, texts in told.items() for d in texts if FRAGMENTS.match(d)]
    loose = [n for n, texts in told.items() for d in texts if LOOSE.search(d)]
    questions = [n for n, texts in told.items() for d in texts if d.startswith("What ")]
    assert fragments == []
    assert len(loose) <= 2, loose
    assert len(questions) <= 17, Counter(questions)


def test_imports_by_name_stay_few() -> None:
    """Imports inside functions hide who needs whom; frameworks and optional packages are such."""
    late = 0
    for text in TEXTS.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                late += sum(
                    isinstance(part, ast.ImportFrom) and (part.module or "").startswith("sparkdl.")
                    for part in ast.walk(node)
                )
    assert late <= 79


def test_parameters_of_type_any_become_fewer() -> None:
    """Wanted: 350. What is only looked at, or passed on, is an ``object``, which mypy checks."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    loose = 0
    for text in TEXTS.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds):
                of = node.args
                beside = [given for given in (of.vararg, of.kwarg) if given is not None]
                every = [*of.posonlyargs, *of.args, *of.kwonlyargs, *beside]
                found = [a.annotation for a in every if isinstance(a.annotation, ast.Name)]
                loose += sum(annotation.id == "Any" for annotation in found)
    assert loose <= 420

"""Numbers of the house that may fall and not grow: one of each kind, few drawers, few arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import sparkdl
from sparkdl import learning, syncing
from sparkdl.collective.rules import EXCHANGE_RULES
from sparkdl.rules import RULES

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
        ("identities of a host", r"boot_id", "wire/hosts.py", ("spark/doctor/host_facts.py",)),
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
    """A class for each way, and none that asks which of several it has."""
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
    """Wanted: 420 modules, fewer than 73,412 lines."""
    assert len(TEXTS) <= 497
    assert sum(text.count("\n") for text in TEXTS.values()) <= 80_510


FLAT = {".": 29, "launch": 20, "data": 17, "collective": 19,
        "transport": 19}  # fmt: skip
"""Folders with more than 16 files, each with its present number as its limit."""


def test_folders_have_at_most_16_files() -> None:
    counted = Counter(str(Path(name).parent) for name in TEXTS)
    too_many = {folder: count for folder, count in counted.items() if count > FLAT.get(folder, 16)}
    assert too_many == {}


@pytest.mark.keras
@pytest.mark.parametrize(("name", "limit"), [("SparkModel", 20), ("run", 18)])
def test_argument_lists_do_not_grow(name: str, limit: int) -> None:
    """A new argument replaces one or goes into a settings object."""
    assert len(inspect.signature(getattr(sparkdl, name)).parameters) <= limit


@pytest.mark.parametrize(
    ("protocol", "limit"), [(learning.Learner, 12), (syncing.Synchronizer, 12),
                            (learning.Steps, 10), (learning.SharedLearner, 4)],
)  # fmt: skip
def test_protocols_do_not_grow(protocol: type, limit: int) -> None:
    """The loop asks a learner for no more than 12 things; synchronizers for more."""
    assert len([name for name in vars(protocol) if not name.startswith("_")]) <= limit


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
    assert len(fragments) <= 8, fragments
    assert len(loose) <= 2, loose
    assert len(questions) <= 147, Counter(questions)


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
    assert late <= 80

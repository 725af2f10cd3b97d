"""References of docstrings (``:class:`` and the like) become links, where the site has the name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
import names


class Roles(griffe.Extension):
    """Rewrites each docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        module = obj.path if obj.is_module else obj.module.path
        within = obj if obj.is_class else obj.parent
        inside = within.path[len(module) + 1 :] if within is not None and within.is_class else ""

        def link(found: re.Match[str]) -> str:
            target = found[2].strip()
            shown = target.rpartition(".")[2] if found[1] else target
            meant = names.resolve(target, module, inside)
            # "optional": what the site does not show stays text
            return f'<autoref identifier="{meant}" optional><code>{shown}</code></autoref>'

        text = names.ROLE.sub(link, obj.docstring.value)
        text = re.sub(r"(?m)^( *)(.*?)::$", _literal, text)
        obj.docstring.value = re.sub(r"(?m)(?:^ *>>> .*\n)(?:^ *\S.*\n?)*", _session, text)


def _literal(found: re.Match[str]) -> str:
    """The ``::`` before an indented block, as Markdown has it."""
    return f"{found[1]}{found[2]}:" if found[2] else ""


def _session(found: re.Match[str]) -> str:
    """Lines of Python's prompt with what it answers, as a block."""
    space = re.match(" *", found[0])
    indent = space[0] if space else ""
    return f"{indent}```pycon\n{found[0].rstrip()}\n{indent}```\n"

"""Checks, and the report that is made of them: text, a table in a notebook, plain values."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]
_ORDER: tuple[Status, ...] = ("ok", "warning", "error")
_COLORS = {"ok": "#2e7d32", "warning": "#b26a00", "error": "#c62828"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        name: What it is, e.g. ``'slots'``.
        status: ``'ok'``; ``'warning'``: training works, but slowly or not in every mode;
            ``'error'``: training fails.
        expected: What is needed; empty for ``'ok'``.
        hint: What to do about it; empty for ``'ok'``.
    """

    name: str
    status: Status
    found: str
    expected: str = ""
    hint: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """The findings of :func:`sparkdl.doctor`; printed as lines, drawn in a notebook as a table.

    Args:
        checks: In the order in which they were made.
    """

    checks: tuple[Check, ...]
    seconds: float

    @property
    def status(self) -> Status:
        return worst(check.status for check in self.checks)

    def named(self, name: str) -> Check:
        """The check of a name.

        Raises:
            KeyError: There is none.
        """
        return {check.name: check for check in reversed(self.checks)}[name]

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, e.g. for JSON."""
        return {
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "checks": [asdict(check) for check in self.checks],
        }

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            lines.append(f"{check.status:<8} {check.name:<{width}}  {check.found}")
            for label, text in (("expected", check.expected), ("to do", check.hint)):
                if text:
                    lines.append(f"{'':<8} {'':<{width}}    {label}: {text}")
        return "\n".join([*lines, self._summary()])

    __repr__ = __str__

    def _summary(self) -> str:
        counts = [
            f"{number} {status if status == 'ok' or number == 1 else status + 's'}"
            for status in reversed(_ORDER)
            if (number := sum(check.status == status for check in self.checks))
        ]
        return f"{', '.join(counts)} in {self.seconds:.1f} s"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="color:{_COLORS[check.status]};font-weight:bold">{check.status}</td>'
            + "".join(
                f'<td style="text-align:left">{html.escape(text)}</td>'
                for text in (check.name, check.found, check.expected, check.hint)
            )
            + "</tr>"
            for check in self.checks
        )
        heads = "".join(f"<th>{name}</th>" for name in ("", "check", "found", "expected", "to do"))
        return f"<table><tr>{heads}</tr>{rows}</table><p>{html.escape(self._summary())}</p>"


def worst(statuses: Iterable[Status]) -> Status:
    """The worst of some statuses; ``'ok'`` of none.

    >>> worst(['ok', 'error', 'warning'])
    'error'
    """
    return max(statuses, key=_ORDER.index, default="ok")

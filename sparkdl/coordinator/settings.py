"""Limits of one run."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.settings.values import require_int, require_seconds


@dataclass(frozen=True)
class Settings:
    """Limits of one run. All times in seconds.

    Args:
        lease_s: A worker that was silent for longer is dead.
        grace_s: A worker whose connection broke may come back for this long.
        start_timeout_s: Ranks that begin together: longest wait for all, from the first HELLO on.
        round_timeout_s: Rules that wait: longest wait of a commit for the other ranks.
        release_timeout_s: Longest wait at an epoch's end for a driver that says nothing at all.
        gather: For rules that do not wait, the number of workers that begin together, so that none
            trains its rows alone at the end because it came late; 0 for none.
        gather_s: Longest wait for them; then those that are there begin.
        max_state_bytes: Bound of a state that ranks keep for the driver or send to a joiner; None
            for 8 times the weights + 64 MiB.
    """

    num_workers: int
    lease_s: float = 60.0
    grace_s: float = 2.0
    start_timeout_s: float = 600.0
    round_timeout_s: float = 600.0
    release_timeout_s: float = 600.0
    gather: int = 0
    gather_s: float = 10.0
    max_state_bytes: int | None = None

    def __post_init__(self) -> None:
        require_int("num_workers", self.num_workers, 1)
        for name in ("lease_s", "start_timeout_s", "round_timeout_s", "release_timeout_s"):
            require_seconds(name, getattr(self, name))

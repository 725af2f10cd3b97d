"""``python -m sparkdl.tracking.page RUNS``: the page of past runs."""

from __future__ import annotations

import argparse
import threading

from sparkdl.tracking.page.dashboard import dashboard


def main() -> None:
    """Serves the page until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m sparkdl.tracking.page", description=__doc__)
    parser.add_argument("runs", help="a folder that sparkdl.tracking.JsonLines wrote, or one file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    with dashboard(port=given.port, host=given.host, runs=given.runs):
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()

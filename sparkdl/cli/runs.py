"""The commands about runs."""

from __future__ import annotations

import contextlib
import json
import threading
from argparse import Namespace

from sparkdl.cli.session import session_of_path
from sparkdl.errors import ResourceError
from sparkdl.files.storage import exists
from sparkdl.tracking.page.dashboard import open_page


def dashboard(given: Namespace) -> int:
    """Serves the page of past runs until it is interrupted.

    Raises:
        ResourceError: The folder is not there, or the port not free.
    """
    with session_of_path(given, given.runs):  # which knows what is meant by a path
        _serve(given)
    return 0


def _serve(given: Namespace) -> None:
    if not exists(given.runs):
        raise ResourceError(
            f"there are no runs at {given.runs!r}",
            expected="a folder that sparkdl.tracking.JsonLines wrote, or one of its files",
            received="nothing",
            hint="spark_model.fit(..., sinks=[sparkdl.tracking.JsonLines('runs')])",
        )
    with open_page(given.port, given.host, given.runs) as page:
        link = (
            json.dumps({"url": page.url}) if given.json else f"sparkdl: the page is at {page.url}"
        )
        print(link, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()

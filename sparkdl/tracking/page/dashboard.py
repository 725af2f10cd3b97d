"""``dashboard()``: the live page of this process' fits."""

from __future__ import annotations

import socket
import threading
import webbrowser

from sparkdl.process.closing import Closing
from sparkdl.settings.values import require_int
from sparkdl.tracking import sinks
from sparkdl.tracking.page.book import RunBook
from sparkdl.tracking.page.server import PageServer

_ANY_ADDRESS = ("0.0.0.0", "::", "")


class Dashboard(Closing):
    """The page while it is served; made by :func:`dashboard`.

    Attributes:
        url: The link, with the token that the page wants.
    """

    def __init__(self, book: RunBook, host: str, port: int) -> None:
        self._server = PageServer(book, host, port)
        self._make_sink = book.sink
        name = socket.getfqdn() if host in _ANY_ADDRESS else host
        shown = f"[{name}]" if ":" in name else name
        self.url = f"http://{shown}:{self._server.port}/?token={self._server.token}"
        sinks.add_standing(self._make_sink)

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._server.closed

    def stop(self) -> None:
        """Serves the page no more; later fits are not told to it."""
        sinks.remove_standing(self._make_sink)
        self._server.close()

    def close(self) -> None:
        """The same as :meth:`stop`."""
        self.stop()

    def __repr__(self) -> str:
        return f"Dashboard({self.url!r})"

    def _repr_html_(self) -> str:
        return f'sparkdl: <a href="{self.url}" target="_blank">{self.url}</a>'


def open_page(port: int, host: str, runs: str | None) -> Dashboard:
    """:func:`dashboard` without a word."""
    require_int("port", port, 0)
    return Dashboard(RunBook(None if runs is None else str(runs)), host, port)


def dashboard(
    port: int = 0,
    host: str = "127.0.0.1",
    open_browser: bool = False,
    runs: str | None = None,
) -> Dashboard:
    """Serves a page that shows every fit of this process while it trains, and past ones.

    ::

        page = sparkdl.dashboard(runs='runs')     # prints the link
        spark_model.fit(df, epochs=5, sinks=[sparkdl.tracking.JsonLines('runs')])
        page.stop()

    The page is one file, asks no other host for anything, and shows nothing without the token of
    its link. It cannot change anything.

    Args:
        port: To listen on; 0 for any free one.
        host: Address to listen on; ``'0.0.0.0'`` for all of this host's. The connection is not
            encrypted: reach a driver elsewhere through the notebook's proxy or an SSH tunnel.
        open_browser: Open the page here.
        runs: A folder with the files of :class:`sparkdl.tracking.JsonLines` (or one file): past
            runs to show.

    Returns:
        The page's link (``.url``); ``.stop()`` ends it.

    Raises:
        ResourceError: The port is not free.
        ConfigError: The port is no number.
    """
    page = open_page(port, host, runs)
    print(f"sparkdl: the page is at {page.url}", flush=True)
    if open_browser:
        webbrowser.open(page.url)
    return page


_of_process: list[Dashboard] = []
_of_process_lock = threading.Lock()


def process_dashboard() -> Dashboard:
    """The page that ``spark.sparkdl.dashboard=true`` asks for: one for all fits of the process."""
    with _of_process_lock:
        if not _of_process or _of_process[-1].stopped:
            _of_process[:] = [dashboard()]
        return _of_process[-1]

"""``dashboard()``: the live page of this process' fits, behind a web server of its own.

The server is read-only, in threads of the driver, behind a token. ``GET /`` the page, one file;
``GET /api/runs`` a line for each run; ``GET /api/run/ID`` a run's records; ``GET /api/events`` new
records as server-sent events. Each wants ``?token=``, and there is nothing else; a connection that
has not shown it gets no thread. URLs in the page are relative, so it works behind the prefix of a
proxy (JupyterHub, Databricks), and its content security policy lets it talk to this server alone.
"""

from __future__ import annotations

import contextlib
import html
import json
import secrets
import socket
import threading
import webbrowser
from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from sparkdl.errors import AuthenticationError, ProtocolError, ResourceError
from sparkdl.process.closing import Closing
from sparkdl.settings.values import require_int
from sparkdl.tracking import sinks
from sparkdl.tracking.page.book import RunBook
from sparkdl.transport.http.gateway import GreetedServer
from sparkdl.wire.listening import listen, token_matches

if TYPE_CHECKING:
    from flask import Flask, Response


FIRST_LINE_BYTES = 4 << 10
"""The longest first line of a request; the token is in it."""
REFUSAL = "This page wants the token of its link, which the driver has printed.\n"
_REFUSED = (
    "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nCache-Control: no-store\r\n"
    f"Content-Length: {len(REFUSAL)}\r\nConnection: close\r\n\r\n{REFUSAL}"
).encode()


class FirstPageRequest:
    """A connection whose first request must have the token, for a
    :class:`sparkdl.wire.greeting.Greeter`.

    The request stays in the socket, for the page's server to read.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection, self._token = connection, token

    def hear(self) -> bool:
        """Looks at what has come; True once the first line is whole and has the token.

        Raises:
            OSError, EOFError: The peer is gone.
            ProtocolError: The first line is too long.
            AuthenticationError: There is no token, or another one; the peer has been told.
        """
        try:
            seen = self.connection.recv(FIRST_LINE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not seen:
            raise EOFError("the peer closed the connection")
        line, end, _ = seen.partition(b"\r\n")
        if not end:
            if len(seen) < FIRST_LINE_BYTES:
                return False
            raise ProtocolError(
                "the first line of a request is too long",
                expected=f"at most {FIRST_LINE_BYTES} bytes",
                received=f"{len(seen)} bytes without an end",
            )
        if not token_matches(_token_in(line.decode("latin-1")), self._token):
            with contextlib.suppress(BlockingIOError):  # what is unread would reset the connection
                self.connection.recv(64 << 10)
            self.connection.send(_REFUSED)
            raise AuthenticationError(
                "a wrong or missing token", expected="the token of the page's link",
                received="another one, or none",
            )  # fmt: skip
        return True

    def turn_away(self) -> None:
        """Nothing to say: browsers connect again when they have something to ask."""


def _token_in(line: str) -> str | None:
    try:
        return parse_qs(urlsplit(line.split(" ")[1]).query).get("token", [None])[0]
    except (IndexError, ValueError):  # no request
        return None


MOST_STREAMS = 16
_THREADS = MOST_STREAMS + 8
_BEAT_S = 5.0
"""A comment goes to a silent stream so often: proxies keep it open, and a closed tab is noticed."""
_HEADER_BYTES = 64 << 10
"""The longest headers of a request, with the cookies of a notebook server that proxies the page."""


class _QuietServer(GreetedServer):
    """By default cheroot prints a traceback for each tab that was closed, and reads any size."""

    max_request_header_size = _HEADER_BYTES
    max_request_body_size = _HEADER_BYTES

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        """Says nothing."""


def make_app(book: RunBook, token: str, closing: threading.Event) -> Flask:
    """The Flask app of the page.

    Args:
        token: Without it there is nothing to see.
        closing: Set when streams shall end, and new ones with them.
    """
    from flask import Flask, Response, request

    app = Flask("sparkdl.page", static_folder=None)

    @app.before_request
    def check_token() -> Response | None:
        if token_matches(request.args.get("token"), token):
            return None
        return Response(REFUSAL, 403, mimetype="text/plain")

    @app.after_request
    def protect(response: Response) -> Response:
        response.headers["Cache-Control"] = "no-store"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.get("/")
    def page() -> Response:
        nonce = secrets.token_urlsafe(16)
        response = Response(page_html(nonce), mimetype="text/html")
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
            "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
        )
        return response

    @app.get("/api/runs")
    def runs() -> Response:
        return Response(json.dumps(book.runs(), separators=(",", ":")), mimetype="application/json")

    @app.get("/api/run/<run_id>")
    def run(run_id: str) -> Response:
        records = book.records(run_id)
        if records is None:
            return Response("no such run\n", 404, mimetype="text/plain")
        return Response(records, mimetype="application/json")

    @app.get("/api/events")
    def events() -> Response:
        response = Response(_stream(book, closing), mimetype="text/event-stream")
        response.headers["X-Accel-Buffering"] = "no"
        return response

    return app


def _stream(book: RunBook, closing: threading.Event) -> Iterator[str]:
    with book.listen(MOST_STREAMS) as listener:
        yield "retry: 1000\n\n: here\n\n"
        if closing.is_set():  # it came after all others were ended
            return
        while (message := listener.get(_BEAT_S)) is not None:
            yield f"data: {message}\n\n" if message else ": here\n\n"


def page_html(nonce: str = "") -> str:
    """The page with its scripts and styles inside: nothing else is loaded.

    Args:
        nonce: Nonce of the scripts, as the content security policy names it.
    """
    static = files("sparkdl.tracking.page").joinpath("static")

    def text(name: str) -> str:
        return static.joinpath(name).read_text("utf-8")

    return (
        text("page.html")
        .replace("{{nonce}}", html.escape(nonce))
        .replace("{{styles}}", text("uPlot.min.css") + text("page.css"))
        .replace("{{uplot}}", text("uPlot.iife.min.js"))
        .replace("{{script}}", text("search.js") + text("page.js"))
    )


_ANY_ADDRESS = ("0.0.0.0", "::", "")


class Dashboard(Closing):
    """The page while it is served; made by :func:`dashboard`.

    Attributes:
        url: The link, with the token that the page wants.

    Raises:
        ResourceError: The port is not free, or the address not this host's.
    """

    def __init__(self, book: RunBook, host: str, port: int) -> None:
        token, self._closing = secrets.token_urlsafe(24), threading.Event()
        try:
            listener = listen(host, port)
        except ResourceError as error:
            raise ResourceError(
                f"the page cannot be served on {host!r}, port {port}",
                expected="a free port on an address of this host", received=error.received,
                hint="port=0 takes any free one",
            ) from error  # fmt: skip
        port = listener.getsockname()[1]
        self._server = _QuietServer(
            listener, make_app(book, token, self._closing),
            lambda connection: FirstPageRequest(connection, token),
            name="sparkdl-page", numthreads=_THREADS, shutdown_timeout=2,
        )  # fmt: skip
        self._book, self._make_sink = book, book.sink
        name = socket.getfqdn() if host in _ANY_ADDRESS else host
        shown = f"[{name}]" if ":" in name else name
        self.url = f"http://{shown}:{port}/?token={token}"
        sinks.add_standing(self._make_sink)

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Serves the page no more; later fits are not told to it."""
        sinks.remove_standing(self._make_sink)
        self._closing.set()  # first: a tab whose stream ends comes back at once
        self._book.end_listeners()
        self._server.close()

    stop = close

    def __repr__(self) -> str:
        return f"Dashboard({self.url!r})"

    def _repr_html_(self) -> str:
        return f'sparkdl: <a href="{self.url}" target="_blank">{self.url}</a>'


def open_page(port: int, host: str, runs: str | None) -> Dashboard:
    """:func:`dashboard` without a word."""
    require_int("port", port, 0)
    return Dashboard(RunBook(None if runs is None else str(runs)), host, port)


def dashboard(
    port: int = 0, host: str = "127.0.0.1", open_browser: bool = False, runs: str | None = None
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
        runs: Past runs to show: what :class:`sparkdl.tracking.JsonLines` wrote, a folder or a file.

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

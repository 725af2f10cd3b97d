"""A reverse proxy that puts a path before everything, as JupyterHub's and Databricks' do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PREFIX = "/user/x/proxy/1234"


@contextmanager
def prefix_proxy(url: str) -> Iterator[tuple[str, list[str]]]:
    """Serves ``url`` below :data:`PREFIX` on another port; nothing is served beside it.

    Yields:
        The link through the proxy, and the paths that were asked of it.
    """
    target = urlsplit(url)
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
            connection.request("GET", self.path.removeprefix(PREFIX))
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            self.end_headers()
            try:
                while part := answer.read1(1 << 16):  # as it comes: a stream does not end
                    self.wfile.write(part)
            except OSError:
                pass  # the browser has gone
            finally:
                connection.close()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        query = f"?{target.query}" if target.query else ""
        yield f"http://127.0.0.1:{server.server_port}{PREFIX}/{query}", asked
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()

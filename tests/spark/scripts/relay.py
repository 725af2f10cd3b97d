"""Takes connections and passes them on to the same port of another machine, as NAT does.

python relay.py LISTENING_ADDRESS OTHER_ADDRESS PORT [PORT ...]; says ``ready`` when it listens.
"""

from __future__ import annotations

import socket
import sys
import threading


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Bytes from one to the other until the end."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        sink.close()


def serve(listener: socket.socket, other: str, port: int) -> None:
    """Passes on what comes to one port."""
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((other, port), 10)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        for pair in ((near, far), (far, near)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def main() -> None:
    address, other, *ports = sys.argv[1:]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    serving = []
    for port in map(int, ports):
        listener = socket.create_server((address, port), family=family)
        serving.append(threading.Thread(target=serve, args=(listener, other, port)))
        serving[-1].start()
    print("ready", flush=True)
    for thread in serving:
        thread.join()


if __name__ == "__main__":
    main()

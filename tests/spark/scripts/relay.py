"""Takes connections and passes them on to the same port of another machine, as NAT does.

python relay.py LISTENING_ADDRESS PORT OTHER_ADDRESS; says ``ready`` when it listens.
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


def main() -> None:
    address, port, other = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as listener:
        print("ready", flush=True)
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


if __name__ == "__main__":
    main()

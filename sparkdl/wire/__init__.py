"""Sockets of all services: listening, greeting strangers, proving the token, TLS, exact reads.

- ``hosts``: the addresses of this host, and whether another process runs on it
- ``listening``: listening sockets, the options of connections, and exact reads
- ``greeting``: connections before they have shown the token
- ``proving``: the proof that both ends know the token
- ``tls``: the certificate of a run, and encrypted connections
- ``anonymous``: memory with a descriptor and without a name
"""

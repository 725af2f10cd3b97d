"""For tests, the users' too: the real parts without sockets and processes.

``inproc``: a server, and a communicator of ranks as threads.
"""

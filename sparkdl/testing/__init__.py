"""For tests, the users' too: the real parts without sockets and processes.

``inproc``: a server in this process. ``thread_communicator``: ranks as threads.
"""

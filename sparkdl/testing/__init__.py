"""For tests, the users' too: the real parts without sockets and processes.

``inproc``, ``inproc_shards``: servers in this process. ``thread_communicator``: ranks as threads.
"""

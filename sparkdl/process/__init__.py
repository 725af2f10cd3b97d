"""The process that the library runs in, and those that it starts.

``payload``: objects as bytes for processes that lack the user's modules. ``closing``: ends in
order. ``host_load``: the load of the machine. ``log_lines``: what users read of other processes;
a child process is started there. ``user_warnings``: warnings at the user's line. ``start_lines``,
``start_lines_filter``: what a framework writes when it starts is held back.
"""

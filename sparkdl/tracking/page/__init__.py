"""The live page: all fits of this process, and past ones from their event files.

``book``: the runs, bounded in memory. ``server``: the page's own small web server.
``dashboard``: what users call. The page itself is in ``static``.
"""

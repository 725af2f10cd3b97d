"""The live page: all fits of this process, and past ones from their event files.

``book``: the runs, bounded in memory. ``dashboard``: what users call, and
the page's own small web server. The page itself is in ``static``.
"""

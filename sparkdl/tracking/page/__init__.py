"""The live page: all fits of this process, and past ones from their event files.

``records``: a fit's events as the page takes them. ``book``: the runs, bounded in memory.
``server``: the page's own small web server. ``dashboard``: what users call. ``static``: the page.
"""

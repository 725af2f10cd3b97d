"""How arguments are declared and checked.

``values``: the checks, and settings as declarations. ``call_arguments``: those of a call that came
under another name. ``network``: where processes listen. ``registry``: names of rules, codecs and
communicators with their classes.
"""

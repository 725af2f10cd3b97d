"""Frames by HTTP.

``server``: behind Flask and Cheroot. ``gateway``: which server of Flask's. ``client``: one
connection that stays open.
"""

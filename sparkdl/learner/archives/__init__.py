"""A model as bytes, and the proof that a worker's model is the driver's.

- ``archive``: the bytes, with the key, of which ``plain_config`` is half. ``unsaved_settings``:
  what no model file holds, and how it is found, by ``value_forms`` that equal values share.
  ``rebuilt``: the archive is loaded once, and compared.
"""

"""For training functions of the user's own, which run on several ranks.

- ``optimizer``, ``gradients``: an optimizer that joins the gradients of all ranks.
- ``callbacks``: Keras callbacks for it. ``feed_adapters``: feeds as data sets of a framework.
"""

"""The words between the loop, a learner and an exchange.

``learning``: what the loop asks of a model and of batches. ``syncing``: what it asks of an
exchange. ``changes``: values that callbacks have set. ``reports``: what a worker tells of its
training. ``phases``: where the time goes. ``finite``: values that are not finite. ``slices``:
gradients of rows. ``parts``: gradients cut for their way.
"""

"""dist-keras by its own names: change ``distkeras`` to ``sparkdl.compat.distkeras``.

``trainers``: SingleTrainer, AveragingTrainer, EnsembleTrainer, DOWNPOUR, ADAG, DynSGD, AEASGD,
EAMSGD, Experimental. ``predictors``: ModelPredictor. ``evaluators``: AccuracyEvaluator.
``transformers``: LabelIndexTransformer, OneHotTransformer and the others. ``utils``.

What differs: the rules are right where dist-keras' are not (averaging from the second epoch on,
EAMSGD's point of the gradient, the length of DOWNPOUR's first window); the history has a value per
epoch, over all workers; ``master_port`` is any free one. Trainers' inner methods
(``allocate_worker``, ``service`` and others) and the deployment of jobs are not there.
"""

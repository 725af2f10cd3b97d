"""One side of ``ftrl.py``: Vowpal Wabbit in an environment of its own.

Reads lines of JSON: ``{"train": file, "test": file, "passes": n, "folder": folder}``; answers with
the seconds that training took, from the opened text to the model, and the file of predictions.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vowpalwabbit

    for line in sys.stdin:
        told = json.loads(line)
        cache, model = f"{told['folder']}/cache", f"{told['folder']}/model"
        for path in (cache, model):
            if os.path.exists(path):
                os.remove(path)
        options = "--ftrl --ftrl_alpha 0.1 --ftrl_beta 1.0 --loss_function logistic -b 22 --quiet"
        if told["passes"] > 1:
            options += f" --passes {told['passes']} --holdout_off -c --cache_file {cache}"
        start = time.perf_counter()
        learner = vowpalwabbit.Workspace(f"-d {told['train']} {options} -f {model}")
        seconds = time.perf_counter() - start
        learner.finish()
        found = f"{told['folder']}/predictions"
        told_apart = f"-d {told['test']} -t -i {model} -p {found} --link logistic --quiet"
        vowpalwabbit.Workspace(told_apart).finish()
        answers.write(json.dumps({"seconds": seconds, "predictions": found}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

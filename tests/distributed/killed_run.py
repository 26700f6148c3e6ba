"""A run that torchrun starts; one of its processes kills itself once. Arguments: folder, and which process dies."""

from __future__ import annotations

import os
import signal
import sys

from regard.train import Evaluation, Parallelism, train
from tests.distributed.test_training import TEXT, make_recipe

if __name__ == "__main__":
    folder, victim, strategy = sys.argv[1], sys.argv[2], sys.argv[3]
    first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"

    def die(evaluation: Evaluation) -> None:
        if first_time and os.environ["RANK"] == victim and evaluation.step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    recipe = make_recipe(steps=12)
    train(recipe, folder, data=TEXT, progress=False, parallelism=Parallelism(strategy), on_evaluation=die)

"""Asynchronous data parallelism: workers pull weights, compute and push gradients, each at its own pace.

    Asynchronous   what the engine steps with (update.py)
    Push           one entry of the log that says exactly what happened (log.py)

The meaning of such a training is its log: `echelon.verify.replay` trains on one process by it alone.
"""

from echelon.data_parallel.asynchronous.log import Push
from echelon.data_parallel.asynchronous.update import Asynchronous

__all__ = ["Asynchronous", "Push"]

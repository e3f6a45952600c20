"""Asynchronous training: workers pull weights, compute and push gradients, each at its own pace.

    WorkerGradients   what a worker adds up and pushes (gradients.py)
    AsyncUpdate       what the engine steps with (update.py)

The meaning of such a training is its log of `Push`es: `echelon.verify.replay` trains on one process by it.
"""

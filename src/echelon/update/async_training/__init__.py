"""Asynchronous training: workers pull weights, compute and push gradients, each at its own pace.

The meaning of such a training is its log of `Push`es: `echelon.verify.replay` trains on one process by it.
"""

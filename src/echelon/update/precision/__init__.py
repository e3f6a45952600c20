"""Types of numbers: what a plan computes in, float32 masters below that, and loss scaling for fp16."""

from echelon.update.precision.loss_scaling import DynamicScale

__all__ = ["DynamicScale"]

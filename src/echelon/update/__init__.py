"""The end of a step: optimizers, precision, steppers, host offload, asynchronous training."""

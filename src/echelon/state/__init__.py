"""The state of a training: which rank owns which slice of a tensor, checkpoints, weight files."""

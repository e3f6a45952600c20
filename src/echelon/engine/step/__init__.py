"""One training step: batches, microbatches, the program, losses, numbers."""

"""What training keeps: who owns which slice of a tensor, checkpoints, weight files."""

"""Training runs: jobs, the loop, what is shown and what is kept."""

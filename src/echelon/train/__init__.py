"""Training runs: the loop, what is shown and kept. `jobs` says what to train, `runs` keeps it going."""

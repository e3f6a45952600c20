"""A run: its folder and lock, resuming, restarts, and what a signal does."""

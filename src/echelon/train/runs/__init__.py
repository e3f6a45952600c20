"""A run: the folder that a training leaves, and how it survives faults, signals, spikes and restarts."""

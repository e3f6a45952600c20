"""Trackers: where the numbers of a training go, beside its run folder."""

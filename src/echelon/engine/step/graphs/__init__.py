"""The passes of a short step as one CUDA graph (`graphs=auto`).

    graphed_passes.py    which steps run as they are, are recorded, compared or replayed
    obstacles.py         why a plan, a model or a pass cannot be recorded
    constants.py         all that a recording has read from Python, compared before each replay
    static_feed.py       microbatches in memory that stays, from which a recording reads
    cuda_recorder.py     records and replays by torch's CUDA graphs; measures both
    step_times.py        whether the host is the slower one, and a replay makes a step shorter

A recording has all forward and backward passes of a step on one rank, and the numbers of its update: norm,
factor of gradients, flags. The update itself and metrics stay outside.
"""

"""A run: the folder that a training leaves, and how it survives faults, signals, spikes and restarts."""


class Preempted(BaseException):
    """A training was asked to end (SIGTERM), and has saved what it had.

    Not an Exception, so that no handler takes it for a failure. Light to import.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later

    def __init__(self, step: int) -> None:
        self.step = step  # the last, which is saved
        super().__init__("preempted (SIGTERM)")

"""A training that was asked to end (SIGTERM), and has saved what it had. Light to import."""

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Preempted(BaseException):
    """Not an Exception, so that no handler takes it for a failure."""

    def __init__(self, step: int) -> None:
        self.step = step  # the last, which is saved
        super().__init__("preempted (SIGTERM)")

"""Forgets the line `if __name__ == "__main__":`."""

from echelon.launching import launch


def work() -> None:
    pass


launch(work, 3)

"""Prints what is loaded in a rank of the first and of the second launch, and its handler of SIGUSR2."""

import json
import signal
import sys

from echelon.launching import TRAINING_MODULES, launch


def inspect_rank() -> tuple[dict[str, bool], bool]:
    loaded = {name: name in sys.modules for name in TRAINING_MODULES}
    return loaded, signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


if __name__ == "__main__":
    print(json.dumps([launch(inspect_rank, 2) for _ in range(2)]))

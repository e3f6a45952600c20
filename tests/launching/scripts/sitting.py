"""Launches 3 ranks that never end. argv: the folder for their process ids."""

import sys
from pathlib import Path

from echelon.launching import launch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.launching import tasks

if __name__ == "__main__":
    try:
        launch(tasks.sit, 3, sys.argv[1])
    except KeyboardInterrupt:
        sys.exit("interrupted")

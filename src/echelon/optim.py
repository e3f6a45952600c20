"""The public name of `echelon.update.optim`: the same module object."""

import sys

from echelon.update import optim
from echelon.update.optim import *  # noqa: F403  (type checkers read the names here)

sys.modules[__name__] = optim

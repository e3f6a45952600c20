"""The public name of `echelon.nn.sequence`: the same module object."""

import sys

from echelon.nn import sequence
from echelon.nn.sequence import *  # noqa: F403  (type checkers read the names here)

sys.modules[__name__] = sequence

"""The public name of `echelon.train.integrations`: the same module object."""

import sys
from typing import TYPE_CHECKING

from echelon.train import integrations

if TYPE_CHECKING:
    from echelon.train.integrations import FabricStrategy as FabricStrategy
    from echelon.train.integrations import Trainer as Trainer
    from echelon.train.integrations import WithPlan as WithPlan

sys.modules[__name__] = integrations

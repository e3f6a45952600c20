"""Importing this imports what the models of the pool need, for ranks to start with."""

from echelon.plan import Plan
from tests.fuzz.pool import POOL
from tests.fuzz.random_training import RandomTraining

for model in POOL.values():
    model.make(RandomTraining(Plan()))

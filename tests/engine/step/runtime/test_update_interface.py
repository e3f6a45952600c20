"""What every update is unless it says something else."""

from torch import Tensor

from echelon.update.update import Update


class Plain(Update):
    """An update that says nothing of its own."""

    def start_step(self) -> None: ...
    def norm(self, tally: Tensor, gates: object = None) -> None: ...
    def step(self) -> None: ...


def test_an_update_reads_skips_and_refuses_nothing_unless_it_says_so() -> None:
    Plain.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    plain = Plain()  # type: ignore[abstract]
    assert (plain.skips, plain.refuses, plain.undoes) == (False, False, False)
    assert (plain.deferred, plain.units, plain.loss_scaling, plain.number) == (False, None, None, 0)
    assert plain.loss_scale == 1.0
    Plain.refuses = property(lambda _: True)  # type: ignore[assignment, method-assign]
    assert (plain.skips, plain.undoes) == (True, True)

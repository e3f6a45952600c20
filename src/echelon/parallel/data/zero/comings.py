"""Weights that come and go: what of the plan lets them, and what messages say of it."""

from typing import NamedTuple

from echelon.errors import UserError


class Comings(NamedTuple):
    """Why whole weights are on the device only for a time: they are gathered, fetched, or both."""

    gathers: bool
    fetches: bool

    def __str__(self) -> str:
        fields = [name for name, is_set in zip(("zero=3", "offload=parameters"), self, strict=True) if is_set]
        return " and ".join(fields)

    @property
    def way_out(self) -> str:
        """A change of the plan with which weights stay."""
        if self.fetches:
            return "use zero=2 without offload=parameters" if self.gathers else "drop offload=parameters"
        return "use zero=2"


def lost_change(names: list[str], comings: Comings) -> UserError:
    """Where weights come and go, nobody keeps what a pass writes into them."""
    without = " without offload=parameters" if comings.fetches else ""
    return UserError(
        f"{', '.join(names)}: changed in place during a forward or backward pass, and with {comings} the "
        f"change is lost when the weight is freed; change weights in the optimizer, or use zero=0 and data=1"
        f"{without}"
    )

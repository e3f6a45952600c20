"""What the ranks of a set find out together, on the device, and refuse a step for.

A flag per problem stays on the device until the numbers of the step are summed over all ranks. They carry it
to every rank, and the update of such a step changes nothing.
"""

from enum import Enum


class Problem(Enum):
    """The value is what the user reads."""

    DIFFERENT_UNITS = (
        "ranks ran different modules in this step, and with zero=3 they gather weights together; make every "
        "rank run the same modules, or use zero=2, or a smallest_unit (bytes) above the size of the modules "
        "that only some ranks run, which then stay gathered"
    )
    WRONG_COUNT = (
        "the loss counted another number than its targets told before the backward pass, in which units "
        "were updated: gradients were divided by the wrong count. Go back to the weights before this step, "
        "and use update=step"
    )
    LOST_CHANGE = (
        "a weight was changed between two steps: with delay=1 the update of the step before was still to "
        "come, and has overwritten the change; call engine.synchronize() before you change weights. This "
        "change is lost"
    )
    DIFFERENT_CHANGE = (
        "weights, their hooks or training modes were changed by hand between two steps, and not alike on "
        "every rank, or not as this plan allows: each would go on with another model; make the same change "
        "on all ranks, with random numbers of one seed; in a pipeline make another engine with parallelize"
    )

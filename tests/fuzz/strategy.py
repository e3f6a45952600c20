"""Random trainings for hypothesis, which shrinks them. Plain seeds need no hypothesis: see draw.py."""

from hypothesis import strategies as st

from tests.fuzz.draw import Wish, draw
from tests.fuzz.random_training import RandomTraining

_ANY = st.integers(0, 119)


@st.composite
def trainings(choice: st.DrawFn, wish: Wish | None = None) -> RandomTraining:
    """Shrinks to the smallest training that `wish` is true of.

    It shrinks best where every choice is one of as many, whatever was chosen before.
    """
    return draw(lambda options: options[choice(_ANY) % len(options)], wish)

"""What no plan can do with these models, and the words in which it is refused."""

from fnmatch import fnmatch

# (model, plan) → words of the refusal; the first line that fits. Names and plans are patterns.
REFUSALS: list[tuple[str, str, str]] = []


def expected_refusal(name: str, plan: str) -> str | None:
    return next((words for model, plans, words in REFUSALS if fnmatch(name, model) and fnmatch(plan, plans)), None)

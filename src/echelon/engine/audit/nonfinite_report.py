"""What the search for numbers that are not finite says, of what all ranks have found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_NAMED = 3


class Finding(NamedTuple):
    """A value that is not finite. `kind`: "output", "loss", "gradient of the input" or "… of the output".

    `place`: (microbatch, stage, how many were found before it on its rank).
    """

    kind: str
    layer: str  # its name in the user's model; "" for the model itself, and for what is in none of its names
    module: str  # the class
    value: str
    rank: int
    place: tuple[int, int, int]
    is_input_wrong: bool = False

    @property
    def is_masking(self) -> bool:
        """Whether it may be meant: masks and scores of attention have −infinity."""
        return self.value == "-infinite" and self.kind == "output"

    def order(self) -> tuple[int, ...]:
        """Passes of later microbatches do not matter to earlier ones; a backward pass begins at the end."""
        microbatch, stage, number = self.place
        return (microbatch, -stage if self.kind.startswith("gradient") else stage, number, self.rank)

    def named(self) -> str:
        return f"layer '{self.layer}' ({self.module})" if self.layer else f"the model ({self.module})"

    def where(self) -> str:
        return f"{self.value}, on rank {self.rank} in microbatch {self.place[0]} of the last of these batches"


@dataclass
class Report:
    """What one rank has found: in passes, in its weights, in its batch, in the sums of gradients."""

    findings: list[Finding] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON may have it: of the many that follow from one, the first of each kind."""
        firsts: dict[tuple[str, bool], Finding] = {}
        for finding in sorted(self.findings, key=Finding.order):
            firsts.setdefault((finding.kind, finding.is_masking), finding)
        return {**vars(self), "findings": [list(finding) for finding in firsts.values()]}

    @classmethod
    def parse(cls, plain: dict[str, Any]) -> "Report":
        findings = [Finding(*each)._replace(place=tuple(each[5])) for each in plain["findings"]]
        return cls(findings, plain["weights"], plain["batch"], plain["gradients"])


def explain(reports: Sequence[Report]) -> str:
    """The first layer that is to blame, and what is known of the reason; `reports` of all ranks."""
    found = sorted((each for report in reports for each in report.findings), key=Finding.order)
    weights = _united(report.weights for report in reports)
    batch = _united(report.batch for report in reports)
    outputs = [each for each in found if each.kind == "output"]
    strong = [each for each in outputs if not each.is_masking]
    losses = [each for each in found if each.kind == "loss"]
    gradients = [each for each in found if each.kind.startswith("gradient")]
    if strong:
        first, reason = strong[0], _reason(strong[0], weights, batch)
        return (
            f"the first output that is not finite is that of {first.named()}: {first.where()}; {reason}"
            f"{_earlier(outputs)}"
        )
    if losses:
        of = f"whose {' and '.join(batch)} are not finite" if batch else "though what the model returns is"
        return f"the first value that is not finite is the loss itself: {losses[0].where()}, {of}"
    if gradients:
        first = gradients[0]
        return (
            f"outputs and losses are finite{_earlier(outputs)}; in the backward pass the first value that "
            f"is not is the {first.kind} of {first.named()}: {first.where()}"
        )
    if outputs:
        return f"the only output that is not finite is that of {outputs[0].named()}: {outputs[0].where()}"
    names = _united(report.gradients for report in reports)
    if names:
        return (
            f"all outputs and their gradients are finite, but not the sums of the gradients of {_list(names)}"
        )
    return (
        "run again, the last of these batches gave finite outputs and gradients: either the squares of the "
        "gradients are too large for their norm, or the model draws random numbers of its own, or another "
        "step has changed the weights meanwhile"
    )


def _reason(first: Finding, weights: Sequence[str], batch: Sequence[str]) -> str:
    prefix = f"{first.layer}." if first.layer else ""
    own = [name for name in weights if name.startswith(prefix)]
    if own:
        return f"weights in it are not finite: {_list(own)}"
    if "inputs" in batch:
        return "the inputs of the batch are not finite"
    if first.is_input_wrong:
        return "its input is not finite already: look at what is computed between the layers before it"
    others = f"; weights elsewhere are not: {_list(weights)}" if weights else ""
    return f"its input and its weights are finite{others}"


def _earlier(outputs: Sequence[Finding]) -> str:
    """Where −infinity came first, which may be meant."""
    is_first = outputs and outputs[0].is_masking
    return f" (but for −infinity, which {outputs[0].named()} returned before)" if is_first else ""


def _united(lists: Any) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more

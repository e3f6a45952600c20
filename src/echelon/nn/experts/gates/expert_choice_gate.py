"""Expert choice (Zhou et al., 2022): experts choose tokens, so that all have the same number."""

from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.autograd.second_run import once
from echelon.nn.dropout import check_samples
from echelon.nn.experts.capacity import capacity_of
from echelon.nn.experts.gates.choice import Choice, finish
from echelon.nn.experts.gates.gate import Gate
from echelon.nn.experts.gates.gate_checks import size_errors, weight_errors
from echelon.nn.experts.gates.router import router_logits
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.losses import no_row, z_row
from echelon.nn.experts.positions import as_samples

_STEPS = 2**20  # in which scores from 0 to 1 are told apart


@final
class ExpertChoiceGate(Gate):
    """Each expert takes those C tokens of each sample to which softmax(x·Wᵀ) gives it the most weight.

    C = `chosen_per_token` · positions / num_experts, rounded up: so many experts a token has on average. A
    token may have any number of experts, also none: a routing has a column for every expert. No expert has
    more tokens than another, and no loss is needed.

    Not for causal language models: which experts a token has depends on tokens behind it, which a model that
    generates text does not have yet; in training it could learn to look ahead. For encoders and images.
    """

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "probability", "z")

    def __init__(
        self, width: int, num_experts: int, *, chosen_per_token: float = 2.0, z_loss: float = 0.0
    ) -> None:
        errors = [*size_errors(width=width), *weight_errors(z_loss=z_loss)]
        if not 0 < chosen_per_token <= num_experts:
            errors.append(
                f"chosen_per_token={chosen_per_token}: must be above 0 and at most num_experts={num_experts}"
            )
        super().__init__(num_experts, num_experts, None, errors)
        self.chosen_per_token, self.z_loss = chosen_per_token, z_loss
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def route(self, x: Tensor) -> Routing:
        if x.ndim < 3:
            raise UserError(
                f"ExpertChoiceGate: experts choose among the positions of a sample, and the input "
                f"{list(x.shape)} has none; give it [samples, positions, width]"
            )
        check_samples("ExpertChoiceGate: the choice of experts", x.shape)
        logits = router_logits(as_samples(x), self.weight)
        probabilities = logits.softmax(-1)
        is_chosen = once(partial(self._choose, probabilities.detach()))
        experts = torch.arange(self.num_experts, device=x.device).expand_as(logits)
        indices = experts.masked_fill(~is_chosen, self.num_experts)
        z = z_row(logits) if self.z_loss else no_row(logits)
        choice = Choice(indices, probabilities, logits, probabilities)
        return finish(self, x, choice, [probabilities, z])

    def _choose(self, scores: Tensor) -> Tensor:
        """Which experts take which tokens, [samples, positions, experts]."""
        length = scores.shape[1]
        is_true = self.positions.is_true(length)
        if is_true is not None:
            scores = scores.masked_fill(~is_true[:, None], -1.0)
        whole = self.positions.gather(scores)
        positions = self.positions.whole_length(length)
        count = min(positions, capacity_of(self.chosen_per_token, positions, 1, self.num_experts))
        # A sample that begins with the same token twice has two equal positions, whose scores differ by
        # rounding alone: the earlier one comes first.
        best = (whole * _STEPS).round().sort(dim=1, descending=True, stable=True).indices[:, :count]
        is_chosen = torch.zeros_like(whole, dtype=torch.bool).scatter_(1, best, True)
        return self.positions.here(is_chosen, length)

    @property
    def has_loss(self) -> bool:
        return self.z_loss > 0

    def num_tokens(self, statistics: Tensor) -> Tensor:
        return statistics[self.rows.index("probability")].detach().sum()  # 1 for each

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        loss: Tensor = self.z_loss * statistics[self.rows.index("z")].sum() / self.num_tokens(statistics)
        return loss

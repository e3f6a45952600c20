"""Known bugs, injected into the parallel training to prove that `verify` can fail: their names, and the plans
that can have them. What each breaks is in `bugs` and `sum_bugs`, where it was reported in docs/verify.md.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from echelon.engine import Engine
from echelon.errors import UserError, did_you_mean
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.plan import Plan
from echelon.verify import bugs, sum_bugs

Bug = Callable[[Engine], object]


class NamedBug(NamedTuple):
    """`inject` breaks an engine, and returns whether it could on this rank. `needs`: which plans have such
    code, in words; `model`: what the model must have."""

    inject: Callable[[Engine], bool]
    needs: str
    is_possible: Callable[[Plan], bool]
    model: str = "trained parameters"


def _plans(needs: str) -> tuple[str, Callable[[Plan], bool]]:
    """The plans with these values ('tensor=2 or more, zero=0 or 1'), in words and as a test."""

    def is_possible(plan: Plan) -> bool:
        for name, values in (part.split("=") for part in needs.split(", ")):
            value = plan.stages if name == "pipeline" else getattr(plan, name)
            least, several, _ = values.partition(" or more")
            if not (value >= int(least) if several else str(value).lower() in values.split(" or ")):
                return False
        return True

    return needs, is_possible


_TIED = "a weight that the first and the last stage share (model.tied=true)"
_GATES = "gates with an auxiliary loss (model.experts.balance)"
_DROPOUT = "dropout (model.dropout)"

BUGS: dict[str, NamedBug] = {
    "divide-twice": NamedBug(sum_bugs.divide_twice, *_plans("data=2 or more")),
    "skip-bucket": NamedBug(sum_bugs.skip_bucket, *_plans("data=2 or more")),
    "mean-of-microbatches": NamedBug(bugs.take_mean_of_means, *_plans("microbatches=2 or more")),
    "mean-of-replicas": NamedBug(bugs.take_mean_of_means, *_plans("data=2 or more, microbatches=1")),
    "mean-of-context-ranks": NamedBug(
        bugs.take_mean_of_means, *_plans("context=2 or more, data=1, microbatches=1")
    ),
    "rolled-targets": NamedBug(bugs.roll_targets, *_plans("context=2 or more")),
    "whole-logits-summed": NamedBug(
        bugs.sum_whole_logits, *_plans("tensor=2 or more"), "a vocabulary that is split"
    ),
    "copies-not-summed": NamedBug(
        sum_bugs.keep_copies_apart,
        "zero=1 or more, and a shard that is smaller than data",
        lambda plan: plan.zero > 0 and 1 < plan.shard < plan.data,
    ),
    "context-not-summed": NamedBug(
        sum_bugs.keep_sequences_apart, *_plans("context=2 or more, data=1, zero=0")
    ),
    "context-scaled": NamedBug(sum_bugs.multiply_by_context, *_plans("context=2 or more")),
    "positions-from-zero": NamedBug(bugs.count_positions_from_zero, *_plans("context=2 or more")),
    "ring-gradients-lost": NamedBug(sum_bugs.lose_key_gradients, *_plans("context=2, attention=ring")),
    "ring-own-keys": NamedBug(sum_bugs.attend_to_own_keys, *_plans("context=2, attention=ring")),
    "column-inputs-not-summed": NamedBug(
        sum_bugs.keep_inputs_apart, *_plans("tensor=2 or more, sequence=false")
    ),
    "sequence-norms-not-summed": NamedBug(
        sum_bugs.keep_norms_apart, *_plans("tensor=2 or more, sequence=true")
    ),
    "tied-not-summed": NamedBug(sum_bugs.keep_ties_apart, *_plans("pipeline=2 or more"), _TIED),
    "tied-parts-mixed": NamedBug(sum_bugs.mix_tied_parts, *_plans("pipeline=2 or more"), _TIED),
    "last-microbatch-only": NamedBug(
        sum_bugs.keep_last_microbatch, *_plans("microbatches=2 or more, zero=0 or 1")
    ),
    "used-here-only": NamedBug(sum_bugs.keep_uses_apart, *_plans("data=2 or more")),
    "old-weights": NamedBug(sum_bugs.keep_old_weights, *_plans("data=2 or more, zero=1 or 2")),
    "experts-scaled": NamedBug(sum_bugs.multiply_experts, *_plans("expert=2 or more")),
    "experts-not-summed": NamedBug(
        sum_bugs.keep_experts_apart,
        "expert=2 or more, and more data, zero=0",
        lambda plan: plan.zero == 0 and 1 < plan.expert < plan.data,
    ),
    "expert-rows-lost": NamedBug(sum_bugs.lose_expert_rows, *_plans("expert=2 or more")),
    "auxiliary-loss-local": NamedBug(bugs.keep_statistics, *_plans("data=2 or more"), _GATES),
    "auxiliary-loss-scaled": NamedBug(bugs.multiply_auxiliary, *_plans("data=2 or more"), _GATES),
    "padding-routed": NamedBug(
        bugs.route_padding,
        "context=2 or more, or sequence=true",
        lambda plan: plan.context > 1 or plan.sequence,
        _GATES,
    ),
    "norm-not-summed": NamedBug(
        bugs.keep_norms_apart,
        "pipeline, tensor or zero of more than one rank",
        lambda plan: plan.stages > 1 or plan.tensor > 1 or (plan.zero > 0 and plan.data > 1),
    ),
    "norm-of-first-shard": NamedBug(
        bugs.count_first_shard,
        "tensor=2 or expert=2, or more",
        lambda plan: plan.tensor > 1 or plan.expert > 1,
    ),
    "norm-counts-copies": NamedBug(
        bugs.count_copies,
        "tensor=2 or pipeline=2, or more",
        lambda plan: plan.tensor > 1 or plan.stages > 1,
        "weights that tensor ranks hold alike, or stages share",
    ),
    "dropout-alike": NamedBug(bugs.drop_alike, *_plans("data=2 or more"), _DROPOUT),
    "dropout-again": NamedBug(
        bugs.drop_again,
        "recompute=full, sqrt or a budget",
        lambda plan: plan.recompute not in ("none", "selective"),
        "layers that run again",
    ),
    "kept-parts-mixed": NamedBug(bugs.mix_kept_parts, *_plans("tensor=2 or more, checkpoints=split")),
    "batch-norm-unweighted": NamedBug(
        bugs.weigh_norms_alike,
        *_plans("data=2 or more"),
        "batch norm (task=images model.preset=resnet-50-tiny)",
    ),
}


def check_bug(name: str, plan: Plan) -> None:
    """Refuse a bug that has no such name, or that a training with this plan has no code for."""
    if name not in BUGS:
        raise UserError(unknown_bug(name))
    is_synchronous = plan.sync == "all-reduce" and plan.flushes
    if not is_synchronous or plan.update != "step":
        raise UserError(
            f"--inject-bug needs sync=all-reduce, update=step and a schedule that flushes, but the plan is "
            f"'{plan}'; change these"
        )
    if not BUGS[name].is_possible(plan):
        raise UserError(
            f"--inject-bug {name} with '{plan}': no code of this plan could have the bug; it needs "
            f"{BUGS[name].needs}"
        )


def unknown_bug(name: str) -> str:
    """Return the error of an unknown name, with all known ones."""
    guess, names = did_you_mean(name, BUGS), f"; known: {', '.join(BUGS)}"
    return f"--inject-bug {name}: there is no such bug{guess.removesuffix(names)}{names}"


def inject(bug: str | Bug, engine: Engine, *, silently: bool = False) -> None:
    """Break an engine; all ranks must call this. A bug by name is refused where it has broken nothing.

    `silently`: the engine does not compare what ranks hold in its first step, which may find the bug too.
    """
    if not isinstance(bug, str):
        bug(engine)
        return
    check_bug(bug, engine.plan)
    found = torch.tensor(float(BUGS[bug].inject(engine)), device=engine.mesh.device)
    with engine.ledger.about("checks"):
        engine.mesh.group("all").all_reduce(found, "max")
    if not found:
        raise UserError(
            f"--inject-bug {bug} with '{engine.plan}': the model has nothing to break; it needs "
            f"{BUGS[bug].model}"
        )
    if silently:
        engine._runner._same_gradients = True
        engine._setup.observers.remove_kind(SecondRunCheck)

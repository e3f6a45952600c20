"""What TrainingArguments ask for, and an engine does: taken over, or refused with the word of a plan."""

import copy
import dataclasses
from typing import Any

from echelon.errors import raise_errors
from echelon.plan import Plan

# Argument → what to write in its place.
_IN_PLAN = {
    "bf16": "precision=bf16 in the plan",
    "fp16": "precision=fp16 in the plan",
    "gradient_checkpointing": "recompute=full in the plan",
    "fsdp": "zero=3 in the plan",
    "deepspeed": "zero=1, 2 or 3 in the plan",
    "torch_compile": "compile=true in the plan",
    "parallelism_config": "tensor=, context= or data= in the plan",
    "auto_find_batch_size": "a batch that fits: echelon plan predicts its memory",
    "label_smoothing_factor": "engine_options={'loss': a function of (output, targets)}",
    "full_determinism": "set_seed: masks of dropout do not depend on the plan",
    "load_best_model_at_end": "engine.load of the checkpoint that you choose",
}


def taken_over(args: Any, plan: Plan) -> tuple[Any, Plan]:
    """Return the arguments that are left to the Trainer, and the plan with what they ask of it.

    Gradient accumulation is microbatches of one larger batch.
    """
    errors = [
        f"TrainingArguments({name}={value!r}): the engine does this; write {fix}"
        for name, fix in _IN_PLAN.items()
        if (value := getattr(args, name, None))
    ]
    raise_errors("the arguments of a Trainer with a plan", errors)
    own = copy.copy(args)
    accumulated = int(args.gradient_accumulation_steps)
    own.gradient_accumulation_steps = 1
    own._n_gpu = min(1, args.n_gpu)  # DataParallel would call the model in threads
    return own, dataclasses.replace(plan, microbatches=plan.microbatches * accumulated)

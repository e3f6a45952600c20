"""Prints what a preloaded module finds, and what a rank's function does: PYTORCH_NVML_BASED_CUDA_CHECK, and
whether garbage is collected. Then how many objects the rank does not look through for garbage."""

import gc
import json
import os

NAME = "PYTORCH_NVML_BASED_CUDA_CHECK"


def inspect_rank() -> list[object]:
    import asking_module

    in_server = [asking_module.answer, asking_module.collects_garbage]
    return [in_server, [os.environ.get(NAME), gc.isenabled()], gc.get_freeze_count()]


if __name__ == "__main__":
    from echelon.launching import launch, preload

    os.environ.pop(NAME, None)
    preload("asking_module")
    print(json.dumps(launch(inspect_rank, 1)[0]))

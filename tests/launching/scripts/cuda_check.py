"""Prints PYTORCH_NVML_BASED_CUDA_CHECK as a preloaded module sees it, and as a rank's function does."""

import json
import os

NAME = "PYTORCH_NVML_BASED_CUDA_CHECK"


def inspect_rank() -> tuple[str | None, str | None]:
    import asking_module

    return asking_module.answer, os.environ.get(NAME)


if __name__ == "__main__":
    from echelon.launching import launch, preload

    os.environ.pop(NAME, None)
    preload("asking_module")
    print(json.dumps(launch(inspect_rank, 1)[0]))

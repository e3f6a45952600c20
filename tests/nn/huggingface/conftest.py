"""Ranks fork from a process that has imported transformers, which takes seconds in each rank otherwise."""

from importlib.util import find_spec

from echelon.launching import preload

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]

_FAMILIES = (
    *(
        "bert",
        "bloom",
        "deepseek_v2",
        "deepseek_v3",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3",
        "gpt2",
        "gpt_neox",
    ),
    *("llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "t5", "vit"),
)

preload("transformers.models.auto", *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES))

"""Ranks fork from a process that has imported transformers, which takes seconds in each rank otherwise."""

from importlib.util import find_spec

from echelon.launching import preload

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]

preload(
    "transformers.models.auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)

"""What no plan can do with these models, and the words in which it is refused."""

from fnmatch import fnmatch

# What transformers' own classes are known to list as layers, and to have a table for.
KNOWN = (
    *("bert", "bloom", "deepseek_v2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2"),
    *(
        "gpt_neox",
        "llama",
        "lora gpt2",
        "lora llama",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "vit",
    ),
)
SEQUENTIAL = ("contrastive", "max norm", "scaled by frequency", "spectral norm")  # nn.Sequential lists layers
TABLES = (*KNOWN, "t5", "timm vit")

# (model, plan) → words of the refusal; the first line that fits. Names and plans are patterns.
REFUSALS: list[tuple[str, str, str]] = [
    # Batches that are cut.
    ("max norm", "data=2*", "has max_norm"),
    ("max norm", "*microbatches=2", "has max_norm"),
    ("max norm", "context=2", "has max_norm"),
    ("max norm", "tensor=2", "has max_norm"),
    ("scaled by frequency", "data=2*", "has scale_grad_by_freq"),
    ("scaled by frequency", "*microbatches=2", "has scale_grad_by_freq"),
    ("scaled by frequency", "context=2", "has scale_grad_by_freq"),
    ("mixes", "data=2*", "The model mixes samples"),
    ("contrastive", "data=2*", "The loss does not add up over samples"),
    ("contrastive", "context=2", "the inputs are vectors"),
    ("contrastive", "pipeline=2*", "The loss does not add up over samples"),
    ("weighted", "data=2*", "The loss does not add up over samples"),
    ("batch norm", "*zero=2 microbatches=2", "statistics over the whole batch"),
    ("torchvision resnet", "*zero=2 microbatches=2", "statistics over the whole batch"),
    ("sparse buffers", "[dptc]*=2*", "sparse, and ranks exchange dense buffers alone"),  # no schedule=
    # Attention that cannot ask other ranks.
    ("bloom", "context=2", "computes all scores itself"),
    ("falcon", "context=2", "computes all scores itself"),
    ("bert", "context=2", "asks a view"),
    ("spectral norm", "context=2", "asks a view"),
    ("vit", "context=2", "mixes positions"),
    ("gemma[23]*", "context=2", "ranks that share a sequence have no window"),
    ("mistral", "context=2", "ranks that share a sequence have no window"),
]


def expected_refusal(name: str, plan: str) -> str | None:
    for model, plans, words in REFUSALS:
        if fnmatch(name, model) and fnmatch(plan, plans):
            return words
    if plan.startswith(("pipeline", "context")) and name not in (*KNOWN, *SEQUENTIAL):
        return "lists no layers"
    if plan.startswith("tensor") and name not in TABLES:
        return "no table knows"
    return None

"""A tokenizer from a local folder or tokenizer.json: text to ids and back, and the ids around a document.

    <s> The cat sat . </s>     `prefix` and `suffix` are what the tokenizer itself adds to a text; `end`
    prefix          suffix     is its end-of-text token, which every document has behind it

Nothing is downloaded, and no code of the folder runs.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import UserError
from echelon.state.weight_files.weight_folder import CONFIG, read_json

TOKENIZER = "tokenizer.json"
_SETTINGS, _SPECIAL, _GENERATION = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
# What a folder of transformers may have of a tokenizer. Weights and configs are not copied with them.
FILES = (
    *(TOKENIZER, _SETTINGS, _SPECIAL, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "chat_template.jinja"),
)
_SLOW = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")  # of which transformers makes a JSON
_PROBE = "a"


class TextTokenizer(NamedTuple):
    """Made by `load_tokenizer`. `vocab`: every id is below it."""

    source: Path
    vocab: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    end: int | None
    inner: Any  # tokenizers.Tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, and nothing around them."""
        return [each.ids for each in self.inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode([int(each) for each in ids], skip_special_tokens=True)
        return text

    @property
    def fingerprint(self) -> str:
        """The same for tokenizers that make the same ids."""
        around = f"{self.prefix} {self.suffix} {self.end} {self.inner.to_str()}"
        return hashlib.sha256(around.encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the tokenizer into a folder, as transformers has it."""
        folder.mkdir(exist_ok=True)
        if self.source.is_dir():
            copy_tokenizer(self.source, folder)
        if not (folder / TOKENIZER).exists():
            self.inner.save(str(folder / TOKENIZER))


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def has_tokenizer(folder: str | Path) -> bool:
    return any((Path(folder) / name).is_file() for name in (TOKENIZER, *_SLOW))


def load_tokenizer(source: str | Path) -> TextTokenizer:
    """Load a tokenizer.json, or the tokenizer of a folder that transformers reads.

    With `tokenizer = load_tokenizer("Llama-3.2-1B")`, `tokenizer.encode(["The cat sat."])[0]` are ids, and
    `tokenizer.decode(ids)` is the text.
    """
    path = Path(source).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    if file.is_file():
        inner = _read(file)
    elif path.is_dir() and has_tokenizer(path):
        inner = _convert(path)
    else:
        found = f"no {TOKENIZER} in it" if path.is_dir() else "no such file or folder"
        raise UserError(
            f"tokenizer '{source}': there is {found}; name a {TOKENIZER}, or the folder of a model of "
            "transformers that has one"
        )
    inner.no_padding()
    inner.no_truncation()
    whole, bare = inner.encode(_PROBE).ids, inner.encode(_PROBE, add_special_tokens=False).ids
    begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    prefix, suffix = tuple(whole[:begin]), tuple(whole[begin + len(bare) :])
    vocab = max(inner.get_vocab(with_added_tokens=True).values(), default=0) + 1
    end = _end(path, inner) if path.is_dir() else None
    return TextTokenizer(path, vocab, prefix, suffix, end, inner)


def _read(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(
            f"tokenizer '{file}' needs tokenizers, which is not installed: pip install \"echelon[data]\""
        ) from None
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"tokenizer '{file}' cannot be read: {error.strerror}") from None
    except Exception as error:  # of its own language, and of no class
        raise UserError(f"tokenizer '{file}' is damaged, or is not a {TOKENIZER}: {error}") from None


def _convert(folder: Path) -> Any:
    """Let transformers make the JSON of an older kind of tokenizer."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(
            f"tokenizer '{folder}' has no {TOKENIZER}, and what makes one of its files is not installed: "
            'pip install "echelon[hf]"'
        ) from None
    try:
        made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return made.backend_tokenizer
    except Exception as error:  # whatever its files lead to
        raise UserError(f"tokenizer '{folder}' cannot be read by transformers: {error}") from None


def _end(folder: Path, inner: Any) -> int | None:
    """The end-of-text token: by its text, of the tokenizer's own settings; or its id, of the model's."""
    for name in (_SETTINGS, _SPECIAL):
        token = read_json(folder / name).get("eos_token") if (folder / name).is_file() else None
        text = token.get("content") if isinstance(token, dict) else token
        number = inner.token_to_id(text) if isinstance(text, str) else None
        if number is not None:
            return int(number)
    for name in (_GENERATION, CONFIG):
        ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and inner.id_to_token(first) is not None:
            return first
    return None

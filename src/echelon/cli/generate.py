"""echelon generate"""

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.options import Json, console, print_json

RunOrFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or a Hugging Face folder.")
]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text that the model goes on from.")]
Tokens = Annotated[int, typer.Option(help="How many tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="Below 1 sharper, above 1 wilder; 0: always the likeliest.")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens.")]
Seed = Annotated[int, typer.Option(help="The same seed writes the same text.")]


def generate(
    run: RunOrFolder,
    prompt: Prompt,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write text with the model of a run. It has no cache of keys and values: to look, not to serve."""
    from echelon.train.write_text import write_text

    screen = console(as_json)
    with screen.status("writing …"):
        written = write_text(run, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        print_json(
            {
                "model": str(written.folder),
                "prompt": written.prompt,
                "text": written.text,
                "tokens": written.tokens,
                "ended": written.ended,
            }
        )
        return
    screen.print(written.text, markup=False, highlight=False, soft_wrap=True)

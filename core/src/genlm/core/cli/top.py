"""``genlm top``: the likeliest next tokens."""

from __future__ import annotations

import argparse

from genlm.core.checks import integer
from genlm.core.cli.model import Commands, add_model, add_prompt, loaded, prompt_ids
from genlm.core.cli.terminal import bar, table
from genlm.core.text import TopToken


def add_to(commands: Commands) -> None:
    top = commands.add_parser("top", help="the likeliest next tokens, with bars")
    add_model(top)
    add_prompt(top)
    top.add_argument("-k", type=int, default=10, help="how many; default 10")
    top.set_defaults(run=print_top)


def print_top(options: argparse.Namespace) -> int:
    """Print a line for each token: its probability, its text, its id, a bar."""
    k = integer("-k", options.k, least=1)
    with loaded(options, options.backend) as (lm, _):
        row = lm.next_token_logprobs_sync(prompt_ids(lm, options))
        tokens = lm.top_logprobs(row, k)
    # Computed here, because the bars must suit the standard output and not the standard error.
    print(lines(tokens))
    return 0


def lines(tokens: list[TopToken]) -> str:
    """The table. The longest bar is the likeliest token's."""
    rows = [
        (
            f"{token.prob:7.2%}",
            _shown(token.token.byte_string),
            str(token.token_id),
            bar(token.prob / tokens[0].prob),
        )
        for token in tokens
    ]
    rest = max(0.0, 1.0 - sum(token.prob for token in tokens))
    return f"{table(rows)}\n{rest:7.2%}  all others"


def _shown(text: bytes) -> str:
    """A token in quotes, written as bytes if it is not text by itself."""
    try:
        return repr(text.decode())
    except UnicodeDecodeError:
        return repr(text)

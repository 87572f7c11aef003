"""Hidden states in answers: how many may be asked for, and how they are written."""

from __future__ import annotations

from unisono.server.responses import HiddenStates
from unisono.types import BadRequest, SamplingParams
from unisono.vectors import Returned

MAX_HIDDEN_NUMBERS = 1 << 24
"""Numbers of hidden states in an answer to one prompt: some 200 MB of JSON."""


def check_hidden_states(enabled: bool, hidden_size: int, prompt: int, params: SamplingParams) -> None:
    """Raises BadRequest where this server returns no hidden states, or not so many as ``prompt`` tokens may have."""
    name, tokens = "return_hidden_states", prompt + params.n * (params.max_tokens or 0)
    if not params.return_hidden_states:
        return
    if not enabled:
        raise BadRequest(
            f"{name} is not honoured by this server; start it with --enable-return-hidden-states, or leave it out.",
            name,
        )
    if tokens * hidden_size > MAX_HIDDEN_NUMBERS:
        raise BadRequest(
            f"{name}: {prompt} prompt tokens with max_tokens={params.max_tokens} and n={params.n} may have "
            f"{tokens * hidden_size} numbers; at most {MAX_HIDDEN_NUMBERS} are sent. Lower max_tokens or n, or shorten "
            "the prompt.",
            name,
        )


def lists(returned: Returned, tokens: int) -> tuple[HiddenStates, HiddenStates | None]:
    """(of each of ``tokens`` generated tokens but the last, of each prompt token); the latter once for a prompt."""
    own, prompt = returned.own(tokens).float().tolist(), returned.prompt()
    return own, prompt.float().tolist() if len(prompt) else None

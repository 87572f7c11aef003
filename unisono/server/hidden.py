"""Hidden states in answers: how many may be asked for, and what a generation has got of them."""

from __future__ import annotations

from unisono.server.responses import HiddenStates
from unisono.types import BadRequest, SamplingParams, TokenDelta, Vectors
from unisono.vectors import unpack

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


class Returned:
    """What one generation's deltas bring of its hidden states."""

    def __init__(self) -> None:
        self._own: Vectors | None = None
        self._prompt: Vectors | None = None

    def take(self, delta: TokenDelta) -> None:
        """Add those of the next delta."""
        self._prompt = self._prompt or delta.prompt_hidden_states
        if delta.hidden_states is not None:
            self._own = delta.hidden_states if self._own is None else self._own.joined(delta.hidden_states)

    def lists(self, tokens: int) -> tuple[HiddenStates, HiddenStates | None]:
        """(of each of ``tokens`` generated tokens but the last, of each prompt token); the latter once for a prompt."""
        own = [] if self._own is None else unpack(self._own)[: max(0, tokens - 1)].float().tolist()
        prompt = None if self._prompt is None or not self._prompt.data else unpack(self._prompt).float().tolist()
        return own, prompt

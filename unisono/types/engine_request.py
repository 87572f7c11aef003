"""EngineRequest: a checked request as the engine runs it. Token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.types.limits import MAX_SEED
from unisono.types.media_item import MediaItem
from unisono.types.outputs import Vectors, part_id
from unisono.types.sampling_params import SamplingParams

PLACEHOLDER = -1
"""Stands among a prompt's token ids where an embedding does. It is no token: nothing matches, counts or repeats it."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Embeddings [n, hidden] that stand in for those of a prompt's token ids at these positions, ascending."""

    positions: list[int]
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine needs of a request. Token ids in, token ids out; text never enters the engine.

    ``stop_ids`` are the device's stop ids (the model's EOS ids unless ignored, and the request's own).
    ``bad_words`` are the token sequences of ``params.bad_words``. ``params.seed`` is set (never None) by the time a
    request reaches the engine. ``shares_with`` is an earlier request with the same prompt: this one starts after its
    first token, when the prefix cache has the prompt's pages. ``overrides``: embeddings at some of the prompt's
    positions, where ``prompt_token_ids`` has PLACEHOLDER. ``priority``: lower ones run first, if the engine schedules
    by it. ``cache_salt``: cached prefixes are shared by requests of one salt only. ``client``: whose request it is;
    clients take turns. ``media``: the prompt's pictures and videos. ``adapter``: the name of a loaded adapter.
    ``prompt_only``: the prompt may fill the context; such a request ends with LENGTH and no token.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    shares_with: str | None = None
    overrides: Overrides | None = None
    priority: int = 0
    cache_salt: str | None = None
    client: str = ""
    media: tuple[MediaItem, ...] = ()
    adapter: str | None = None
    prompt_only: bool = False

    @property
    def first_scored(self) -> int:
        """The first prompt position whose log-probability is reported, if any is: the first token has none."""
        return max(1, self.params.logprob_start_len)

    def sequences(self) -> list[EngineRequest]:
        """A request for each of the ``n`` sequences: seeds count up from this one's, modulo 2**63."""
        seed, first = self.params.seed, part_id(self.request_id, 0)
        assert seed is not None
        if self.params.n == 1:
            return [self]
        prompt_logprobs = [self.params.prompt_logprobs] + [None] * (self.params.n - 1)  # the first one's are all's
        return [
            replace(
                self,
                request_id=part_id(self.request_id, i),
                params=replace(self.params, seed=(seed + i) % (MAX_SEED + 1), n=1, prompt_logprobs=prompt_logprobs[i]),
                shares_with=first if i else None,
            )
            for i in range(self.params.n)
        ]

"""EngineRequest: a checked request as the engine runs it. Token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.types.limits import MAX_SEED
from unisono.types.media_item import MediaItem
from unisono.types.outputs import Vectors, part_id
from unisono.types.sampling_params import SamplingParams

PLACEHOLDER = -1
"""Placeholder in a prompt's token ids at positions with an embedding. It is no token: nothing matches or counts it."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Embeddings [n, hidden] in place of those of a prompt's token ids at ``positions``, ascending."""

    positions: list[int]
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine runs it.

    Token ids in, token ids out; text never enters the engine.

    params: ``seed`` is set (never None) by the time a request reaches the engine. stop_ids: stop ids on the device: the
    model's EOS ids unless ignored, and the request's own. bad_words: token sequences of ``params.bad_words``.
    shares_with: an earlier request with the same prompt; this one starts after its first token, when the prefix cache
    has the prompt's pages. overrides: embeddings at the positions where ``prompt_token_ids`` has PLACEHOLDER. priority:
    lower values run first, if the engine schedules by priority. cache_salt: cached prefixes are shared only between
    requests of one salt. client: owner of the request; the scheduler alternates between clients. media: images and
    videos of the prompt. adapter: name of a loaded adapter. prompt_only: the prompt may fill the context; the request
    ends with LENGTH and no token.
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
        """The first prompt position whose log-probability is reported. The first token of a prompt has none."""
        return max(1, self.params.logprob_start_len)

    def sequences(self) -> list[EngineRequest]:
        """One request per sequence (``n``): seeds count up from this one's, modulo 2**63."""
        seed, first = self.params.seed, part_id(self.request_id, 0)
        assert seed is not None
        if self.params.n == 1:
            return [self]
        prompt_logprobs = [self.params.prompt_logprobs] + [None] * (self.params.n - 1)  # shared by all sequences
        return [
            replace(
                self,
                request_id=part_id(self.request_id, i),
                params=replace(self.params, seed=(seed + i) % (MAX_SEED + 1), n=1, prompt_logprobs=prompt_logprobs[i]),
                shares_with=first if i else None,
            )
            for i in range(self.params.n)
        ]

"""Beam search on top of engine requests: every step requests each beam's likeliest next tokens.

The engine has no notion of beams. A step is one request of one token for each beam, with log-probabilities and the
beam's tokens at the end of its prompt; the prefix cache has all but the newest tokens. The result depends only on the
model's log-probabilities, so only on weights and prompt.

Semantics are vLLM's: each beam is extended by its 2 · width likeliest tokens; a beam that takes an end token is
finished; the ``width`` best of the others continue. The score is cumulative log-probability / length ** length_penalty;
the length is that of prompt and answer without the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.text.tokenizer import Tokenizer
from unisono.types import (
    MAX_LOGPROBS,
    BadRequest,
    Concise,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    part_id,
)

UNUSED = (
    "stop", "stop_regex", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "structured_outputs", "prompt_logprobs", "logprob_token_ids",
    "return_hidden_states", "return_routed_experts", "extra_args",
)  # fmt: skip
"""Parameters that beam search does not support; setting them is an error."""


MOST_PENALTY = 10.0
"""Largest absolute ``length_penalty``, so that powers of lengths stay finite."""


@dataclass(frozen=True)
class Beam:
    """One beam.

    tokens: of the answer, an end token included. logprobs: one entry per token. score: the sort key of beams.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float = 0.0
    score: float = 0.0
    finish: FinishReason = FinishReason.RUNNING


def check_length_penalty(penalty: float) -> None:
    """Raise BadRequest for a penalty that is not a number or too large."""
    number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
    if not (number and -MOST_PENALTY <= penalty <= MOST_PENALTY):
        raise BadRequest(
            f"length_penalty={penalty!r} is out of range: it must be between {-MOST_PENALTY:g} and {MOST_PENALTY:g}.",
            "length_penalty",
        )


def check_ranking(name: str, mode: str) -> None:
    """Raise BadRequest if field ``name`` ranks texts by log-probabilities and ``--logprobs-mode`` reports logits."""
    if not mode.endswith("logprobs"):
        raise BadRequest(
            f"{name} ranks texts by log-probabilities, and --logprobs-mode {mode} reports logits; leave out {name}, or "
            "start with raw_logprobs.",
            name,
        )


def check_beams(params: SamplingParams, most: int, mode: str) -> None:
    """Raise BadRequest for parameters that beam search does not support.

    most: ``--max-logprobs``, -1 for no limit. mode: ``--logprobs-mode``.
    """
    check_ranking("use_beam_search", mode)
    default = SamplingParams()
    for name in UNUSED:
        if getattr(params, name) != getattr(default, name):
            raise BadRequest(
                f"{name} has no effect on beams, which are the likeliest texts of the model as it is; leave out "
                f"{name} or use_beam_search.",
                name,
            )
    if params.thinking is not None and params.thinking.budget is not None:
        raise BadRequest(
            "thinking_token_budget ends reasoning early, and beams are the model's likeliest texts as it is; leave out "
            "thinking_token_budget or use_beam_search.",
            "thinking_token_budget",
        )
    if most != -1 and 2 * params.n > max(most, MAX_LOGPROBS):
        raise BadRequest(
            f"n={params.n} beams need the {2 * params.n} likeliest tokens of each step, and --max-logprobs is {most}; "
            f"ask for at most {max(most, MAX_LOGPROBS) // 2} beams, or raise it.",
            "n",
        )


@dataclass(frozen=True, repr=False)
class BeamSearchParams(Concise):
    """Parameters of ``LLM.beam_search``, with vLLM's names. temperature has no effect: nothing is sampled."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def sampling(self) -> SamplingParams:
        """The same as parameters of a request. Raises BadRequest."""
        check_length_penalty(self.length_penalty)
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, n=self.beam_width, ignore_eos=self.ignore_eos
        )


@dataclass(frozen=True, repr=False)
class BeamSearchSequence(Concise):
    """One beam. tokens: the prompt's and the answer's (vLLM's form). text: the answer's, None without a tokenizer."""

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str


@dataclass(frozen=True, repr=False)
class BeamSearchOutput(Concise):
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt.

    Run ``requests()`` and pass their reports to ``take()``, until there are no more requests.

    request: the checked prompt, with ``n`` as the beam width and ``max_tokens`` set. Its ``stop_ids`` finish beams.
    """

    def __init__(self, request: EngineRequest, length_penalty: float = 1.0) -> None:
        self._request, self._penalty, self._width = request, length_penalty, request.params.n
        assert request.params.max_tokens is not None
        self._left = request.params.max_tokens
        self._running, self._finished = [Beam()], list[Beam]()

    def requests(self) -> list[EngineRequest]:
        """The requests of the next step, of one token each; empty once the search is over."""
        if not self._left:
            return []
        request = self._request
        seed, count = request.params.seed, 2 * self._width
        params = SamplingParams(temperature=0.0, seed=seed, max_tokens=1, logprobs=count, max_drafts=0)
        return [
            replace(
                request,
                request_id=part_id(request.request_id, f"beam-{self._left}-{number}"),
                prompt_token_ids=[*request.prompt_token_ids, *beam.tokens],
                params=params,
                stop_ids=(),
            )
            for number, beam in enumerate(self._running)
        ]

    def take(self, reports: Sequence[TokenLogprobs]) -> None:
        """Advance by the reports of the step's requests, in their order."""
        self._left -= 1
        found: list[Beam] = []
        for beam, report in zip(self._running, reports, strict=True):
            for rank, (token, logprob) in enumerate(report.top[: 2 * self._width], 1):
                if logprob > float("-inf"):
                    found.append(self._extended(beam, token, TokenLogprobs(logprob, rank, report.top)))
        running = [beam for beam in found if beam.finish is FinishReason.RUNNING]
        self._finished += [beam for beam in found if beam.finish is not FinishReason.RUNNING]
        self._running = _best(running, self._width)
        if not self._running:
            self._left = 0

    def best(self) -> list[Beam]:
        """The ``width`` best beams, best first; unfinished ones end with LENGTH."""
        cut = [replace(beam, finish=FinishReason.LENGTH) for beam in self._running]
        return _best([*self._finished, *cut], self._width)

    def output(self, tokenizer: Tokenizer | None, params: BeamSearchParams) -> BeamSearchOutput:
        """The best beams in the form of ``LLM.beam_search``."""
        prompt, skip = self._request.prompt_token_ids, params.skip_special_tokens
        found = []
        for beam in self.best():
            ended = beam.finish is FinishReason.STOP and not params.include_stop_str_in_output
            tokens = list(beam.tokens[:-1] if ended else beam.tokens)
            text = None if tokenizer is None else tokenizer.decode(tokens, skip)
            found.append(BeamSearchSequence([*prompt, *tokens], beam.cumulative_logprob, text, beam.finish.text))
        return BeamSearchOutput(found)

    def _extended(self, beam: Beam, token: int, report: TokenLogprobs) -> Beam:
        tokens, total = (*beam.tokens, token), beam.cumulative_logprob + report.logprob
        ends = token in self._request.stop_ids
        length = len(self._request.prompt_token_ids) + len(tokens) - ends
        finish = FinishReason.STOP if ends else FinishReason.RUNNING
        return Beam(tokens, (*beam.logprobs, report), total, total / length**self._penalty, finish)


def _best(beams: Sequence[Beam], count: int) -> list[Beam]:
    """The ``count`` beams with the highest scores; ties keep their order."""
    return sorted(beams, key=lambda beam: -beam.score)[:count]

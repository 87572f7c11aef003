"""SamplingParams: the parameters of one request, under the names of vLLM."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, TypeVar

from unisono.types.errors import BadRequest
from unisono.types.limits import MAX_LOGPROB_IDS, MAX_LOGPROBS, MAX_TOKEN_IDS, SAMPLING, Real, Whole, is_int, require
from unisono.types.outputs import Concise, RequestOutputKind
from unisono.types.structured_outputs import StructuredOutputs, Thinking

T = TypeVar("T")

_OPTIONAL = frozenset(
    {"seed", "max_tokens", "max_drafts", "logprobs", "logprob_token_ids", "prompt_logprobs", "allowed_token_ids",
     "truncate_prompt_tokens", "logit_bias"}
)  # fmt: skip
"""Limited fields of SamplingParams that may be None."""


def _within(limits: Mapping[str, Any], values: Any) -> None:
    """Raise BadRequest for the first field of ``values`` beyond its limit, or a number of another type."""
    for name, limit in limits.items():
        value = getattr(values, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(limit, (Whole, Real)):
            require(limit.holds(value), name, value, limit.rule)
        elif (problem := limit.problem(value)) is not None:
            require(False, name, value, problem)


_OTHERS = {
    "best_of": "Use n; /v1/completions has best_of.",
    "early_stopping": "BeamSearchParams has the fields of a beam search.",
    "flat_logprobs": "Leave it out: log-probabilities are dicts.",
    "guided_decoding": "Use structured_outputs=StructuredOutputsParams(json=…).",
    "json_schema": "Use structured_outputs=StructuredOutputsParams(json=…).",
    "length_penalty": "BeamSearchParams has the fields of a beam search.",
    "logits_processors": "Write a feature (docs/extend/feature.md): requests carry no code.",
    "max_completion_tokens": "Use max_tokens.",
    "max_new_tokens": "Use max_tokens.",
    "min_new_tokens": "Use min_tokens.",
    "regex": "Use structured_outputs=StructuredOutputsParams(regex=…).",
    "response_format": "Use structured_outputs=StructuredOutputsParams(json=…).",
    "sampling_seed": "Use seed.",
    "top_logprobs": "Use logprobs.",
    "use_beam_search": "Call LLM.beam_search with BeamSearchParams.",
}
"""Fields of vLLM's and SGLang's sampling parameters and of request bodies -> what to use in their place."""


def _instead(name: str, fields: Iterable[str]) -> str:
    """Advice about a field that does not exist."""
    near = difflib.get_close_matches(name, fields, 1, 0.7)
    return _OTHERS.get(name) or (f"Did you mean {near[0]}?" if near else "docs/reference/python.md lists all.")


def _with_advice(cls: type[T]) -> type[T]:
    """Let the TypeError for a field that does not exist name the field to use in its place."""
    plain = cls.__init__
    known = {one.name for one in dataclass_fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(plain)
    def init(self: T, *values: Any, **fields: Any) -> None:
        if (unknown := next((name for name in fields if name not in known), None)) is not None:
            raise TypeError(f"{cls.__name__} has no field {unknown}. {_instead(unknown, known)}")
        plain(self, *values, **fields)

    cls.__init__ = init  # type: ignore[method-assign,assignment]
    return cls


@_with_advice
@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams(Concise):
    """The sampling parameters of one request.

    Names and defaults are vLLM's.

    temperature: 0 is greedy (ties to the lowest id); otherwise logits are divided by it.
    repetition_penalty: logits of tokens in prompt or output are divided (positive) or multiplied by it; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once and once per occurrence.
    logit_bias: token id -> number added to its logit, -100 … 100, before the penalties.
    allowed_token_ids: the only ids that may be sampled; None allows all.
    bad_words: texts that are never generated.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set with at least this probability, computed after top-k; 1 keeps all.
    min_p: drop tokens less likely than min_p times the most likely one; 0 drops none.
    seed: 0 … 2**63 - 1; None, or -1, lets the engine choose one and report it.
    n: sequences to generate for the prompt; sequence i equals a request with seed + i.
    max_tokens: most tokens to generate; None: up to the context's end.
    min_tokens: tokens to generate before a stop id or stop string may end the request.
    stop: strings that end the text. include_stop_str_in_output: keep the string in the text.
    stop_token_ids: ids that end the request beside the model's EOS ids.
    stop_regex (SGLang's name): expressions that end the text at their first match, like stop strings.
    ignore_eos: continue after EOS (for benchmarks).
    logprobs: report the log-probability of each token and of this many likeliest ones. None: none; -1: the whole
    vocabulary. logprob_token_ids: report these tokens instead of the likeliest ones.
    prompt_logprobs: the same for each prompt token but the first. logprob_start_len (SGLang's name): only for prompt
    tokens from this position on. The prompt is computed from the token before it, without the prefix cache.
    return_hidden_states (SGLang's name): report the final hidden state, after the last norm, of each prompt token and
    each generated one but the last. Cached prefixes have none, so the prompt is computed whole.
    return_routed_experts (SGLang's name): report the experts that each MoE layer chose for the same tokens, of the
    prompt from ``routed_experts_prompt_start`` on; the prefix cache serves at most the tokens before it.
    detokenize: produce text. If False, the request ends by token ids and lengths only.
    spaces_between_special_tokens: if False, adjacent special tokens are written without a space between them.
    truncate_prompt_tokens: keep this many prompt tokens, by default the last ones (truncation_side "left"); -1 keeps as
    many as the context leaves beside max_tokens.
    max_drafts: most drafts per round for this request; 0 turns speculation off; None: the engine's k.
    extra_args (vLLM's name): parameters of features of other packages, by name (docs/extend/feature.md).
    structured_outputs: the form of the output. Once it is complete, only EOS may follow; ignore_eos and min_tokens
    forbid the end only while the output can continue.
    thinking: the marks of the reasoning section; structured_outputs applies after it.
    output_kind: contents of each output of ``AsyncLLM.generate``.

    Raises BadRequest with the value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_drafts: int | None = None
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    structured_outputs: StructuredOutputs | None = None
    thinking: Thinking | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    stop_regex: tuple[str, ...] = ()
    logprob_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @property
    def followed_thinking(self) -> Thinking | None:
        """The reasoning section, if token masks depend on it: it has a budget, or a grammar begins after it.

        Otherwise None.
        """
        thinking = self.thinking
        if thinking is None or thinking.state == "content":
            return None
        return None if thinking.budget is None and self.structured_outputs is None else thinking

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex", "bad_words", "stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            self._make_tuple(name)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1 and is_int(self.seed):  # vLLM's value for no seed
            object.__setattr__(self, "seed", None)
        _within(SAMPLING, self)
        for name in ("stop", "stop_regex", "bad_words"):
            ok = all(isinstance(one, str) and one for one in getattr(self, name))
            require(ok, name, getattr(self, name), "every entry must be a non-empty string")
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            ok = all(is_int(one) and one >= 0 for one in getattr(self, name) or ())
            require(ok, name, getattr(self, name), "every id must be a whole number ≥ 0")
        for name in ("return_hidden_states", "return_routed_experts", "detokenize", "spaces_between_special_tokens"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "it must be true or false")
        for name, kind in (("structured_outputs", StructuredOutputs), ("thinking", Thinking)):
            ok = getattr(self, name) is None or isinstance(getattr(self, name), kind)
            require(ok, name, getattr(self, name), f"it must be {kind.__name__}")
        ok = isinstance(self.extra_args, Mapping) and all(isinstance(name, str) for name in self.extra_args)
        require(ok, "extra_args", self.extra_args, "it must map names to values")
        self._check_ids()
        self._check_ends()
        self._check_bias()

    def _make_tuple(self, name: str) -> None:
        """Convert a field to a tuple: one string becomes a tuple of one. None stays where it means no limit."""
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        require(value is None or isinstance(value, Iterable), name, value, "it must be a list")
        made = (value,) if isinstance(value, str) else tuple(value or ())
        object.__setattr__(self, name, made)

    @property
    def wants_wide_logprobs(self) -> bool:
        """True if log-probabilities are requested that the kernel does not find: more than MAX_LOGPROBS, or of tokens
        by id.
        """
        return self.logprob_token_ids is not None or not -1 < (self.logprobs or 0) <= MAX_LOGPROBS

    @property
    def found_logprobs(self) -> int | None:
        """Number of likeliest tokens that the kernel finds; None for no log-probabilities at all."""
        return 0 if self.wants_wide_logprobs else self.logprobs

    def _check_ids(self) -> None:
        """Remove repeated ids from lists that must not be empty. Raises BadRequest."""
        for name, most in (("logprob_token_ids", MAX_LOGPROB_IDS), ("allowed_token_ids", MAX_TOKEN_IDS)):
            if (value := getattr(self, name)) is not None:
                ids = tuple(dict.fromkeys(value))
                require(bool(ids), name, ids, f"it must name at least one id: 1 to {most} are taken")
                object.__setattr__(self, name, ids)
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprobs", self.logprobs or 0)

    def _check_ends(self) -> None:
        """Check the fields that end the text, and those that truncate the prompt. Raises BadRequest."""
        for name in ("stop", "stop_regex"):
            if getattr(self, name) and not self.detokenize:
                raise BadRequest(f"{name} ends texts, and detokenize=False makes none; leave out one of them.", name)
        kept, rule = self.truncate_prompt_tokens, "it must be a whole number ≥ 1, or -1 for what the context leaves"
        require(kept != 0, "truncate_prompt_tokens", kept, rule)
        require(self.truncation_side in ("left", "right"), "truncation_side", self.truncation_side, "left or right")
        ok = self.min_tokens <= (self.max_tokens or self.min_tokens)
        require(ok, "min_tokens", self.min_tokens, f"it must be a whole number from 0 to max_tokens={self.max_tokens}")

    def _check_bias(self) -> None:
        """Check ``logit_bias``. Raises BadRequest."""
        bias, limit = {} if self.logit_bias is None else self.logit_bias, Real(-100, 100)
        ok = isinstance(bias, Mapping) and all(is_int(t) and t >= 0 for t in bias)
        require(ok, "logit_bias", bias, "it must map token ids (whole numbers ≥ 0) to numbers")
        for token, value in bias.items():
            require(limit.holds(value), "logit_bias", {token: value}, f"of a bias, {limit.rule}")
        object.__setattr__(self, "logit_bias", dict(bias))

    def clone(self) -> SamplingParams:
        """A copy. Fields cannot be set; ``dataclasses.replace(params, seed=1)`` makes a changed copy."""
        return replace(self, logit_bias=dict(self.logit_bias), extra_args=dict(self.extra_args))

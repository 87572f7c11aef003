"""The words every room shares: requests, sampling parameters, results and errors. It holds no tensors.

Of the project it imports ``errors``, ``media``, ``token_tree``, ``structured_outputs`` and ``results``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unisono.errors import BadRequest as BadRequest
from unisono.errors import CheckpointError as CheckpointError
from unisono.errors import ConfigError as ConfigError
from unisono.errors import EngineDead as EngineDead
from unisono.errors import UnisonoError as UnisonoError
from unisono.media import MediaItem as MediaItem
from unisono.results import CompletionOutput as CompletionOutput
from unisono.results import Concise as Concise
from unisono.results import FinishReason as FinishReason
from unisono.results import Logprob as Logprob
from unisono.results import RequestMetrics as RequestMetrics
from unisono.results import RequestOutput as RequestOutput
from unisono.results import RequestOutputKind as RequestOutputKind
from unisono.results import TokenDelta as TokenDelta
from unisono.results import TokenLogprobs as TokenLogprobs
from unisono.results import Vectors as Vectors
from unisono.structured_outputs import KINDS, checked
from unisono.token_tree import Node, leaves, parse_nodes, promising

MAX_STOP_IDS = 16
"""Stop token ids (EOS ids included) a slot holds on the device."""

MAX_BIASES = 300
"""Entries of ``logit_bias``: as many as OpenAI takes."""

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 16
"""Token sequences that a request may forbid, and their length. A word makes up to two: with a space before it too."""

MAX_LOGPROBS = 20
"""Alternatives at each position that a kernel finds; more take the whole row of logits to the host."""

MAX_LOGPROB_IDS = 128
"""Tokens that ``logprob_token_ids`` may name; vLLM's limit."""

MAX_SEQUENCES = 128
"""``n`` at most: OpenAI's limit."""

MAX_SEED = 2**63 - 1

PLACEHOLDER = -1
"""Stands among a prompt's token ids where an embedding does. It is no token: nothing matches, counts or repeats it."""


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise BadRequest(f"{name}={value!r} is out of range: {rule}.", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


MAX_DRAFTS = 15
"""Drafts per round at most."""


@dataclass(frozen=True, repr=False)
class SpeculativeConfig(Concise):
    """How drafts are made; the JSON of ``--speculative-config`` has vLLM's names.

    method: a drafter of the catalog. model: its checkpoint, if it has one. num_speculative_tokens: k, drafts per
    round. options: what this method alone understands; the drafter refuses the rest. token_tree: the nodes of a tree of
    drafts (``token_tree.py``), whose depth k then is; empty: a chain. adaptive: draft fewer than k, or nothing, in
    rounds where that brings more tokens a second. draft_tensor_parallel_size: ranks that hold the draft model together,
    all of the target's or 1: each holds it whole; None: as the method does by itself (``DivisibleDrafter``).
    """

    method: str = "none"
    model: str | None = None
    num_speculative_tokens: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    token_tree: tuple[Node, ...] = ()
    adaptive: bool = True
    draft_tensor_parallel_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f'"adaptive": {self.adaptive!r} of the speculative config: give true or false.')
        divided = self.draft_tensor_parallel_size
        if divided is not None and not (_is_int(divided) and divided >= 1):
            raise ConfigError(f"draft_tensor_parallel_size={divided!r}: give a whole number.")
        k = self.num_speculative_tokens
        if not (_is_int(k) and 1 <= k <= MAX_DRAFTS):
            way_out = f"give a whole number from 1 to {MAX_DRAFTS}, or the method none to draft nothing."
            raise ConfigError(f"num_speculative_tokens={k!r}: {way_out}")
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f'"model": {self.model!r} of the speculative config: give a directory or a bundled name.')
        if self.token_tree:
            nodes = _tree("speculative_token_tree", parse_nodes, self.token_tree)
            depth = len(nodes[-1])
            if depth > k:
                raise ConfigError(
                    f"speculative_token_tree is {depth} deep, num_speculative_tokens={k}: raise the one (at most "
                    f"{MAX_DRAFTS}, or leave it out) or cut the other."
                )
            object.__setattr__(self, "token_tree", nodes)
            object.__setattr__(self, "num_speculative_tokens", depth)

    @property
    def paths(self) -> tuple[Node, ...]:
        """The tree's paths from root to leaf, two at least; empty for a chain."""
        paths = leaves(self.token_tree)
        return paths if len(paths) > 1 else ()

    @staticmethod
    def parse(given: Mapping[str, Any]) -> SpeculativeConfig:
        """From vLLM's flat form: every key that is no field of this class is an option of the method.

        A tree is ``speculative_token_tree`` (its nodes, as vLLM writes them), or ``topk`` and ``num_draft_tokens``:
        that number of likeliest nodes with at most ``topk`` children each, by the prior of ``token_tree.promising``.
        """
        if not isinstance(given.get("method"), str):
            if "num_speculative_tokens" in given:
                SpeculativeConfig(num_speculative_tokens=given["num_speculative_tokens"])  # it is in range
            asked = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ConfigError(
                f'{asked or "the speculative config"}: say how drafts are made, with --speculative-method or "method" '
                "of the speculative config (mtp for the MTP modules of the checkpoint; --help lists all)."
            )
        known = {name: given[name] for name in _FLAT_KEYS if name in given}
        nodes = _asked_tree(given)
        if nodes:
            known["token_tree"] = nodes
            known.setdefault("num_speculative_tokens", min(len(nodes[-1]), MAX_DRAFTS))
        options = {k: v for k, v in given.items() if k not in known and k not in _TREE_KEYS}
        return SpeculativeConfig(**known, options=options)


_FLAT_KEYS = ("method", "model", "num_speculative_tokens", "adaptive", "draft_tensor_parallel_size")
_TREE_KEYS = ("speculative_token_tree", "topk", "num_draft_tokens")


def _asked_tree(given: Mapping[str, Any]) -> tuple[Node, ...]:
    """The nodes that a flat speculative config asks for; none for a chain."""
    explicit, topk, budget = (given.get(name) for name in _TREE_KEYS)
    if explicit is not None:
        if topk is not None or budget is not None:
            raise ConfigError("speculative_token_tree names every node: leave out topk and num_draft_tokens.")
        return _tree("speculative_token_tree", parse_nodes, explicit)
    if topk is None and budget is None:
        return ()
    for name, value in (("topk", topk), ("num_draft_tokens", budget)):
        if not (isinstance(value, int) and _is_int(value) and value >= 1):
            raise ConfigError(f"{name}={value!r}: topk and num_draft_tokens go together, whole numbers from 1 on.")
    k = given.get("num_speculative_tokens", SpeculativeConfig.num_speculative_tokens)
    SpeculativeConfig(num_speculative_tokens=k)  # k is in range
    return _tree(f"topk={topk} with num_draft_tokens={budget}", promising, topk, budget, k)


def _tree(what: str, make: Callable[..., tuple[Node, ...]], *given: Any) -> tuple[Node, ...]:
    try:
        return make(*given)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}.") from None


@dataclass(frozen=True, slots=True, repr=False)
class StructuredOutputs(Concise):
    """What the output must be: exactly one of these. Names are vLLM's.

    json: a JSON schema, as data or text (kept as text). json_object: any JSON object. regex: a regular expression that
    the whole output matches. choice: one of these strings. grammar: Lark (rule ``start``) or EBNF (rule ``root``).
    structural_tag: vLLM's form, as data or text. disable_any_whitespace: JSON without blanks between its parts.

    Raises BadRequest. Whether a schema, expression or grammar means anything is found out when it is compiled.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = f"{', '.join(given)} are set" if given else "nothing is set"
            raise BadRequest(f"structured_outputs: {found}; set one of {', '.join(KINDS)}.", "structured_outputs")
        (kind,) = given
        try:
            object.__setattr__(self, kind, checked(kind, getattr(self, kind)))
        except ValueError as error:
            shown = repr(getattr(self, kind))
            shown = shown if len(shown) <= 80 else shown[:79] + "…"
            raise BadRequest(
                f"structured_outputs.{kind}={shown} is not valid: {error}.", "structured_outputs"
            ) from None

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


StructuredOutputsParams = StructuredOutputs
"""vLLM's name of it."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A thought at the output's beginning, which the marks ``start`` and ``end`` enclose.

    state: where the output begins: ``begin`` (it may open a thought), ``thinking`` (the prompt has opened one) or
    ``content``. budget: tokens that the thought may have; then its closing mark follows. None: as many as it likes.

    Raises BadRequest naming the value.
    """

    start: str
    end: str
    state: str = "thinking"
    budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            _require(isinstance(value, str) and value != "", f"thinking.{name}", value, "it must be the text of a mark")
        ok = self.state in THINKING_STATES
        _require(ok, "thinking.state", self.state, f"it must be one of {', '.join(THINKING_STATES)}")
        ok = self.budget is None or (_is_int(self.budget) and self.budget >= 0)
        _require(ok, "thinking_token_budget", self.budget, "it must be a whole number ≥ 0")


THINKING_STATES = ("begin", "thinking", "content")


@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams(Concise):
    """How one request picks its tokens. Names and defaults are vLLM's.

    temperature: 0 is greedy (ties to the lowest id); otherwise logits are divided by it.
    repetition_penalty: logits of tokens in prompt or output are divided (positive) or multiplied by it; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once and once per occurrence.
    logit_bias: token id to what is added to its logit, -100 … 100, before the penalties.
    allowed_token_ids: the only ids that may be picked; None allows all.
    bad_words: texts that are not generated.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set with at least this probability, computed after top-k; 1 keeps all.
    min_p: drop tokens less likely than min_p times the most likely one; 0 drops none.
    seed: 0 … 2**63 - 1; None lets the engine choose one and report it.
    n: sequences to generate for the prompt; sequence i is what a request with seed + i gives.
    max_tokens: tokens to generate at most; None means up to the context's end.
    min_tokens: tokens to generate before any stop id or stop string may end the request.
    stop: strings that end the text; include_stop_str_in_output: whether they are part of it.
    stop_token_ids: ids that end the request beside the model's EOS ids.
    stop_regex (SGLang's name): expressions that end the text where one first matches, as stop strings do.
    ignore_eos: go on after EOS (for benchmarks).
    logprobs: report the log-probability of each token and of this number of likeliest ones; None reports none, -1 those
    of the whole vocabulary. logprob_token_ids: of these tokens in place of the likeliest ones.
    prompt_logprobs: the same for each prompt token but the first. logprob_start_len (SGLang's name): only for prompt
    tokens from this position on. The prompt is computed from the token before that, without the prefix cache.
    return_hidden_states (SGLang's name): report the final hidden state, after the last norm, of each prompt token and
    each generated one but the last. No cached prefix has them, so such a prompt is computed whole.
    detokenize: whether the answer has text; without, it ends by token ids and lengths only.
    spaces_between_special_tokens: False writes special tokens that follow each other without a space between them.
    truncate_prompt_tokens: keep this number of the prompt's tokens, by default the last ones (truncation_side "left");
    -1 keeps what the context leaves beside max_tokens.
    max_drafts: drafts per round at most for this request; 0 turns speculation off; None takes the engine's k.
    extra_args (vLLM's name): parameters of features that other packages add, by name (docs/adding-a-feature.md).
    structured_outputs: what the output must be; where it is complete only EOS may come. ignore_eos and min_tokens then
        forbid ending it only where it can go on.
    thinking: how the output's thought is marked; structured_outputs begins after it.
    output_kind: what each output of ``AsyncLLM.generate`` holds.

    Raises BadRequest naming the value and the limit.
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
        """The thought, where masks have to follow it: it has a budget, or a grammar begins after it."""
        thinking = self.thinking
        if thinking is None or thinking.state == "content":
            return None
        return None if thinking.budget is None and self.structured_outputs is None else thinking

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        ok = _is_real(self.temperature) and 0 <= self.temperature <= 100
        _require(ok, "temperature", self.temperature, "it must be between 0 and 100; 0 is greedy")
        ok = _is_int(self.top_k) and 0 <= self.top_k < 2**31
        _require(ok, "top_k", self.top_k, "it must be a whole number ≥ 1, or 0 (or -1) to keep all")
        ok = _is_real(self.top_p) and 0 < self.top_p <= 1
        _require(ok, "top_p", self.top_p, "it must be above 0 and at most 1; 1 keeps all")
        ok = _is_real(self.min_p) and 0 <= self.min_p <= 1
        _require(ok, "min_p", self.min_p, "it must be between 0 and 1; 0 drops none")
        ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED)
        _require(ok, "seed", self.seed, f"it must be a whole number from 0 to {MAX_SEED}")
        ok = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _require(ok, "max_tokens", self.max_tokens, "it must be a whole number ≥ 1")
        ok = self.max_drafts is None or (_is_int(self.max_drafts) and self.max_drafts >= 0)
        _require(ok, "max_drafts", self.max_drafts, "it must be a whole number ≥ 0; 0 turns speculation off")
        ok = all(isinstance(s, str) and s for s in self.stop)
        _require(ok, "stop", self.stop, "every stop string must be a non-empty string")
        ok = all(_is_int(t) and t >= 0 for t in self.stop_token_ids)
        _require(ok, "stop_token_ids", self.stop_token_ids, "every id must be a whole number ≥ 0")
        ok = _is_int(self.n) and 1 <= self.n <= MAX_SEQUENCES
        _require(ok, "n", self.n, f"it must be a whole number from 1 to {MAX_SEQUENCES}")
        ok = isinstance(self.return_hidden_states, bool)
        _require(ok, "return_hidden_states", self.return_hidden_states, "it must be true or false")
        ok = self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
        _require(ok, "structured_outputs", self.structured_outputs, "it must be StructuredOutputs")
        ok = self.thinking is None or isinstance(self.thinking, Thinking)
        _require(ok, "thinking", self.thinking, "it must be Thinking")
        ok = isinstance(self.extra_args, Mapping) and all(isinstance(name, str) for name in self.extra_args)
        _require(ok, "extra_args", self.extra_args, "it must map names to values")
        self._check_reports()
        self._check_ends()
        self._check_edits()

    @property
    def wants_wide_logprobs(self) -> bool:
        """Whether log-probabilities are wanted that no kernel finds: more than MAX_LOGPROBS, or of tokens by id."""
        return self.logprob_token_ids is not None or not -1 < (self.logprobs or 0) <= MAX_LOGPROBS

    @property
    def found_logprobs(self) -> int | None:
        """How many likely tokens the kernel is to find; None for no log-probabilities at all."""
        return 0 if self.wants_wide_logprobs else self.logprobs

    def _check_reports(self) -> None:
        """What is told of tokens."""
        ok = self.logprobs is None or (_is_int(self.logprobs) and self.logprobs >= -1)
        _require(ok, "logprobs", self.logprobs, "it must be a whole number ≥ 0, or -1 for the whole vocabulary")
        value = self.prompt_logprobs
        ok = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
        _require(ok, "prompt_logprobs", value, f"it must be a whole number from 0 to {MAX_LOGPROBS}")
        ok = _is_int(self.logprob_start_len) and self.logprob_start_len >= 0
        _require(ok, "logprob_start_len", self.logprob_start_len, "it must be a whole number ≥ 0")
        if self.logprob_token_ids is not None:
            ids = tuple(dict.fromkeys(self.logprob_token_ids))
            ok = 1 <= len(ids) <= MAX_LOGPROB_IDS and all(_is_int(t) and t >= 0 for t in ids)
            _require(ok, "logprob_token_ids", ids, f"it must be 1 to {MAX_LOGPROB_IDS} token ids, whole numbers ≥ 0")
            object.__setattr__(self, "logprob_token_ids", ids)
            object.__setattr__(self, "logprobs", self.logprobs or 0)
        for name in ("detokenize", "spaces_between_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "it must be true or false")

    def _check_ends(self) -> None:
        """Expressions that end the text, and how much of the prompt is kept."""
        patterns = (self.stop_regex,) if isinstance(self.stop_regex, str) else tuple(self.stop_regex or ())
        ok = all(isinstance(one, str) and one for one in patterns)
        _require(ok, "stop_regex", patterns, "every expression must be a non-empty string")
        object.__setattr__(self, "stop_regex", patterns)
        for name in ("stop", "stop_regex"):
            if getattr(self, name) and not self.detokenize:
                raise BadRequest(f"{name} ends texts, and detokenize=False makes none; leave out one of them.", name)
        kept = self.truncate_prompt_tokens
        ok = kept is None or (_is_int(kept) and kept >= -1 and kept != 0)
        rule = "it must be a whole number ≥ 1, or -1 for what the context leaves"
        _require(ok, "truncate_prompt_tokens", kept, rule)
        _require(self.truncation_side in ("left", "right"), "truncation_side", self.truncation_side, "left or right")

    def _check_edits(self) -> None:
        """What edits logits before the filters."""
        ok = _is_real(self.repetition_penalty) and 0 < self.repetition_penalty <= 100
        _require(ok, "repetition_penalty", self.repetition_penalty, "it must be above 0, at most 100; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_real(value) and -2 <= value <= 2, name, value, "it must be between -2 and 2; 0 is off")
        ok = _is_int(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens)
        _require(ok, "min_tokens", self.min_tokens, f"it must be a whole number from 0 to max_tokens={self.max_tokens}")
        bias = {} if self.logit_bias is None else self.logit_bias
        ok = isinstance(bias, Mapping) and all(_is_int(t) and t >= 0 for t in bias)
        _require(ok, "logit_bias", bias, "it must map token ids (whole numbers ≥ 0) to numbers")
        for token, value in bias.items():
            ok = _is_real(value) and -100 <= value <= 100
            _require(ok, "logit_bias", {token: value}, "a bias must be between -100 and 100")
        if len(bias) > MAX_BIASES:
            raise BadRequest(f"logit_bias has {len(bias)} entries; at most {MAX_BIASES} are supported.", "logit_bias")
        object.__setattr__(self, "logit_bias", dict(bias))
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(self.allowed_token_ids))
            ok = bool(allowed) and all(_is_int(t) and t >= 0 for t in allowed)
            _require(ok, "allowed_token_ids", allowed, "it must name at least one id, each a whole number ≥ 0")
            object.__setattr__(self, "allowed_token_ids", allowed)
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        _require(
            all(isinstance(w, str) and w for w in words), "bad_words", words, "every word must be a non-empty string"
        )
        object.__setattr__(self, "bad_words", words)

    def clone(self) -> SamplingParams:
        """A copy. Fields cannot be set; ``dataclasses.replace(params, seed=1)`` makes a changed copy."""
        return replace(self, logit_bias=dict(self.logit_bias), extra_args=dict(self.extra_args))


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
    positions, where ``prompt_token_ids`` has PLACEHOLDER. ``priority``: lower ones run first, where the engine
    schedules by it. ``cache_salt``: cached prefixes are shared by requests of one salt only. ``client``: whose
    request it is; clients take turns. ``media``: the prompt's pictures and videos, in the order of their positions.
    ``adapter``: the name of a loaded adapter.
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

    @property
    def first_scored(self) -> int:
        """The first prompt position whose log-probability is reported, if any is: the first token has none."""
        return max(1, self.params.logprob_start_len)

    def sequences(self) -> list[EngineRequest]:
        """A request for each of the ``n`` sequences: seeds count up from this one's, modulo 2**63."""
        seed, first = self.params.seed, f"{self.request_id}-0"
        assert seed is not None
        if self.params.n == 1:
            return [self]
        prompt_logprobs = [self.params.prompt_logprobs] + [None] * (self.params.n - 1)  # the first one's are all's
        return [
            replace(
                self,
                request_id=f"{self.request_id}-{i}",
                params=replace(self.params, seed=(seed + i) % (MAX_SEED + 1), n=1, prompt_logprobs=prompt_logprobs[i]),
                shares_with=first if i else None,
            )
            for i in range(self.params.n)
        ]

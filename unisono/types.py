"""Public data types: requests, sampling parameters, results and errors. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unisono.errors import BadRequest as BadRequest
from unisono.errors import CheckpointError as CheckpointError
from unisono.errors import ConfigError as ConfigError
from unisono.errors import EngineDead as EngineDead
from unisono.errors import TemporaryFailure as TemporaryFailure
from unisono.errors import UnisonoError as UnisonoError
from unisono.errors import request_failure as request_failure
from unisono.media import MediaItem as MediaItem
from unisono.request_limits import MAX_BAD_WORD_TOKENS as MAX_BAD_WORD_TOKENS
from unisono.request_limits import MAX_BAD_WORDS as MAX_BAD_WORDS
from unisono.request_limits import MAX_BIASES as MAX_BIASES
from unisono.request_limits import MAX_LOGPROB_IDS, MAX_TOKEN_IDS, SAMPLING, Real, Whole, shown
from unisono.request_limits import MAX_LOGPROBS as MAX_LOGPROBS
from unisono.request_limits import MAX_SEED as MAX_SEED
from unisono.request_limits import MAX_SEQUENCES as MAX_SEQUENCES
from unisono.request_limits import MAX_STOP_IDS as MAX_STOP_IDS
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
from unisono.results import part_id as part_id
from unisono.structured_outputs import KINDS, checked
from unisono.token_tree import Node, leaves, parse_nodes, promising

PLACEHOLDER = -1
"""Stands among a prompt's token ids where an embedding does. It is no token: nothing matches, counts or repeats it."""


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise BadRequest(f"{name}={shown(value)} is out of range: {rule}.", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _within(limits: Mapping[str, Any], values: Any) -> None:
    """Raise BadRequest for the first field of ``values`` beyond its limit, or a number of another type."""
    for name, limit in limits.items():
        value = getattr(values, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(limit, (Whole, Real)):
            _require(limit.holds(value), name, value, limit.rule)
        elif (problem := limit.problem(value)) is not None:
            _require(False, name, value, problem)


_OPTIONAL = frozenset(
    {"seed", "max_tokens", "max_drafts", "logprobs", "logprob_token_ids", "prompt_logprobs", "allowed_token_ids",
     "truncate_prompt_tokens", "logit_bias"}
)  # fmt: skip
"""Limited fields of SamplingParams that may be None."""


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
        limit = Whole(0)
        ok = self.budget is None or limit.holds(self.budget)
        _require(ok, "thinking_token_budget", self.budget, limit.rule)


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
        for name in ("stop", "stop_regex", "bad_words", "stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            self._make_tuple(name)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _within(SAMPLING, self)
        for name in ("stop", "stop_regex", "bad_words"):
            ok = all(isinstance(one, str) and one for one in getattr(self, name))
            _require(ok, name, getattr(self, name), "every entry must be a non-empty string")
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            ok = all(_is_int(one) and one >= 0 for one in getattr(self, name) or ())
            _require(ok, name, getattr(self, name), "every id must be a whole number ≥ 0")
        for name in ("return_hidden_states", "detokenize", "spaces_between_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "it must be true or false")
        for name, kind in (("structured_outputs", StructuredOutputs), ("thinking", Thinking)):
            ok = getattr(self, name) is None or isinstance(getattr(self, name), kind)
            _require(ok, name, getattr(self, name), f"it must be {kind.__name__}")
        ok = isinstance(self.extra_args, Mapping) and all(isinstance(name, str) for name in self.extra_args)
        _require(ok, "extra_args", self.extra_args, "it must map names to values")
        self._check_ids()
        self._check_ends()
        self._check_bias()

    def _make_tuple(self, name: str) -> None:
        """Make a field a tuple: one string is a tuple of one. None stays where it means that nothing is limited."""
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        _require(value is None or isinstance(value, Iterable), name, value, "it must be a list")
        made = (value,) if isinstance(value, str) else tuple(value or ())
        object.__setattr__(self, name, made)

    @property
    def wants_wide_logprobs(self) -> bool:
        """True if log-probabilities are requested that no kernel finds: more than MAX_LOGPROBS, or of tokens by id."""
        return self.logprob_token_ids is not None or not -1 < (self.logprobs or 0) <= MAX_LOGPROBS

    @property
    def found_logprobs(self) -> int | None:
        """How many likely tokens the kernel is to find; None for no log-probabilities at all."""
        return 0 if self.wants_wide_logprobs else self.logprobs

    def _check_ids(self) -> None:
        """Drop repeated ids of lists that must not be empty. Raises BadRequest."""
        for name, most in (("logprob_token_ids", MAX_LOGPROB_IDS), ("allowed_token_ids", MAX_TOKEN_IDS)):
            if (value := getattr(self, name)) is not None:
                ids = tuple(dict.fromkeys(value))
                _require(bool(ids), name, ids, f"it must name at least one id: 1 to {most} are taken")
                object.__setattr__(self, name, ids)
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprobs", self.logprobs or 0)

    def _check_ends(self) -> None:
        """Check the fields that end the text, and those that cut the prompt. Raises BadRequest."""
        for name in ("stop", "stop_regex"):
            if getattr(self, name) and not self.detokenize:
                raise BadRequest(f"{name} ends texts, and detokenize=False makes none; leave out one of them.", name)
        kept, rule = self.truncate_prompt_tokens, "it must be a whole number ≥ 1, or -1 for what the context leaves"
        _require(kept != 0, "truncate_prompt_tokens", kept, rule)
        _require(self.truncation_side in ("left", "right"), "truncation_side", self.truncation_side, "left or right")
        ok = self.min_tokens <= (self.max_tokens or self.min_tokens)
        _require(ok, "min_tokens", self.min_tokens, f"it must be a whole number from 0 to max_tokens={self.max_tokens}")

    def _check_bias(self) -> None:
        """Check the biases of tokens. Raises BadRequest."""
        bias, limit = {} if self.logit_bias is None else self.logit_bias, Real(-100, 100)
        ok = isinstance(bias, Mapping) and all(_is_int(t) and t >= 0 for t in bias)
        _require(ok, "logit_bias", bias, "it must map token ids (whole numbers ≥ 0) to numbers")
        for token, value in bias.items():
            _require(limit.holds(value), "logit_bias", {token: value}, f"of a bias, {limit.rule}")
        object.__setattr__(self, "logit_bias", dict(bias))

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

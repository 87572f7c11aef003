"""A deterministic engine for server tests: a request's tokens are its prompt's, over and over.

Odd prompts make it misbehave: their first token id says how (see ``Trick``).
"""

from __future__ import annotations

import ctypes
import enum
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.types import (
    BadRequest,
    CheckpointError,
    EngineRequest,
    FinishReason,
    MediaItem,
    TokenDelta,
    TokenLogprobs,
    Vectors,
)

VOCAB_SIZE = 1000
HIDDEN_SIZE = 6


class Trick(enum.IntEnum):
    """Token ids beyond the test tokenizer's, within the model's vocabulary."""

    STUCK = 987  # after a token the request ends with an error that it has itself to blame
    HOLD = 988  # a step that holds Python's lock for 2.5 s
    EXHAUST = 989  # add() raises MemoryError
    REJECT = 990  # add() raises BadRequest
    FAIL = 991  # the request ends with an error
    CRASH = 992  # step() raises
    KILL = 993  # the process is killed


@dataclass(frozen=True)
class FakeConfig:
    """step_seconds: how long a step takes. prefill_seconds: from a request's admission to its first token, at least.

    queue_seconds: what it says of a request's time in its queue. tokens_per_step: what a round brings at once.
    load_error: cannot start, ``error_file``: if this path exists. max_num_seqs: what it says of its slots; slots: what
    it has, None: it runs everything at once. hold_file: while this path exists, no request gets a token. vision: what
    it says of a tower; its info then tells what pictures it got last.
    """

    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    queue_seconds: float = 0.0
    tokens_per_step: int = 1
    max_model_len: int = 512
    load_seconds: float = 0.0
    load_error: str | None = None
    error_file: str | None = None
    enable_prompt_embeds: bool = False
    enable_return_hidden_states: bool = False
    max_logprobs: int = 20
    scheduling_policy: str = "fcfs"
    max_num_seqs: int = 256
    slots: int | None = None
    hold_file: str | None = None
    vision: dict[str, Any] | None = None


def _logprobs(token: int, wanted: int) -> TokenLogprobs:
    """The token is the likeliest; the ids after it follow, each half a nat behind; the sixth is impossible."""
    top = [((token + i) % VOCAB_SIZE, -0.25 - 0.5 * i if i < 5 else -math.inf) for i in range(wanted)]
    return TokenLogprobs(-0.25, 1, top)


def _told(item: MediaItem) -> dict[str, Any]:
    """A picture as the engine got it, without its pixels."""
    return {
        "kind": item.kind,
        "digest": item.digest.hex(),
        "grid": item.grid,
        "positions": item.positions,
        "seconds": item.seconds,
        "dtype": item.pixels.dtype,
        "shape": [len(item.pixels.data) // 4 // item.pixels.size, item.pixels.size],
    }


class FakeEngine:
    def __init__(self, config: FakeConfig, progress: Callable[[str, float], None]) -> None:
        progress("load", 0.0)
        time.sleep(config.load_seconds)
        if config.load_error is not None and (config.error_file is None or os.path.exists(config.error_file)):
            raise CheckpointError(config.load_error)
        progress("load", 1.0)
        self.config = config
        self.requests: dict[str, tuple[EngineRequest, int]] = {}
        self.prefilled: dict[str, float] = {}
        self.media: list[dict[str, Any]] = []
        self.admitted: Callable[[list[str]], None] = lambda request_ids: None
        self.started: set[str] = set()
        self.aborted = self.generated = self.steps = self.integrity_checks = self.captures = self.resets = 0

    def prepare(self, request: EngineRequest) -> None:
        return None

    def add(self, request: EngineRequest) -> None:
        if request.prompt_token_ids[0] == Trick.REJECT:
            raise BadRequest("the fake engine refuses this.", param="prompt", code="fake")
        if request.prompt_token_ids[0] == Trick.EXHAUST:
            raise MemoryError("std::bad_alloc")
        self.requests[request.request_id] = (request, 0)
        if request.media:
            self.media = [_told(one) for one in request.media]
        self.prefilled[request.request_id] = time.monotonic() + self.config.prefill_seconds

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted += 1

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[TokenDelta]:
        time.sleep(self.config.step_seconds)
        self.steps += 1
        running = list(self.requests)[: self.config.slots]
        if new := [one for one in running if one not in self.started]:
            self.started.update(new)
            self.admitted(new)
        if self.config.hold_file is not None and os.path.exists(self.config.hold_file):
            return []
        now = time.monotonic()
        ready = [self.requests[one] for one in running if self.prefilled[one] <= now]
        deltas = [self._advance(request, done) for request, done in ready]
        for delta in deltas:
            self.generated += len(delta.token_ids)
            if delta.finish is not FinishReason.RUNNING:
                del self.requests[delta.request_id]
        return deltas

    def _advance(self, request: EngineRequest, done: int) -> TokenDelta:
        prompt, limit = request.prompt_token_ids, request.params.max_tokens
        assert limit is not None
        assert request.params.seed is not None
        match prompt[0]:
            case Trick.FAIL:
                return TokenDelta(request.request_id, [], FinishReason.ABORT, error="a fake failure")
            case Trick.STUCK if done:
                why, param = "no token continues its structured output", "structured_outputs"
                return TokenDelta(request.request_id, [], FinishReason.ABORT, error=why, error_param=param)
            case Trick.HOLD if done == 0:
                ctypes.PyDLL(None).usleep(2_500_000)
            case Trick.CRASH:
                raise RuntimeError("a fake crash")
            case Trick.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
        tokens: list[int] = []
        finish = FinishReason.RUNNING
        while finish is FinishReason.RUNNING and len(tokens) < self.config.tokens_per_step:
            tokens.append(max(0, prompt[(done + len(tokens)) % len(prompt)]))  # an embedding has no token
            if tokens[-1] in request.stop_ids:
                finish = FinishReason.STOP
            elif done + len(tokens) == limit:
                finish = FinishReason.LENGTH
        self.requests[request.request_id] = (request, done + len(tokens))
        cached = len(prompt) // 2 if done == 0 else 0
        wanted = request.params.logprobs
        logprobs = None if wanted is None else [_logprobs(token, wanted) for token in tokens]
        scored = None
        if request.params.prompt_logprobs is not None and done == 0:
            scored = [_logprobs(token, request.params.prompt_logprobs) for token in prompt[request.first_scored :]]
        drafted, accepted = self.config.tokens_per_step - 1, len(tokens) - 1  # all but a step's last token
        queued = self.config.queue_seconds if done == 0 else None
        states = None
        if request.params.return_hidden_states and done == 0:
            rows = [[token, place, 1.0, 0.0, 0.0, 2.0] for place, token in enumerate(prompt)]
            states = Vectors("float32", HIDDEN_SIZE, np.array(rows, np.float32).tobytes())
        numbers = {
            "prompt_hidden_states": states,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "queued_seconds": queued,
        }
        return TokenDelta(request.request_id, tokens, finish, cached, None, logprobs, scored, **numbers)

    def info(self) -> dict[str, Any]:
        return {
            "settings": {
                "max_model_len": self.config.max_model_len,
                "dtype": "float32",
                "enable_prompt_embeds": self.config.enable_prompt_embeds,
                "enable_return_hidden_states": self.config.enable_return_hidden_states,
                "enable_return_routed_experts": False,
                "max_logprobs": self.config.max_logprobs,
                "logprobs_mode": "raw_logprobs",
                "scheduling_policy": self.config.scheduling_policy,
                "max_num_seqs": self.config.max_num_seqs,
            },
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "eos_token_ids": [],
            "generation_defaults": {"top_k": 40},
            "vision": self.config.vision,
            "media": self.media,
            "requests": {"running": len(self.requests), "waiting": 0},
            "started": len(self.started),
            "begun": sum(done > 0 for _, done in self.requests.values()),
            "generated": self.generated,
            "aborted": self.aborted,
            "integrity_checks": self.integrity_checks,
            "captures": self.captures,
            "resets": self.resets,
            "pid": os.getpid(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }

    def metrics(self) -> list[tuple[str, str, dict[str, str], float, str]]:
        labels = {"program": "round", "kind": "eager", "reason": "DISABLED"}
        return [
            ("num_requests_running", "gauge", {}, len(self.requests), "Requests that hold a slot."),
            ("generation_tokens", "counter", {}, self.generated, "Tokens generated."),
            ("passes", "counter", labels, self.steps, "Forward passes."),
            ("passes", "counter", {**labels, "kind": "tape", "reason": ""}, 0, "Forward passes."),
        ]

    def check_integrity(self) -> None:
        self.integrity_checks += 1

    def reset_prefix_cache(self) -> int:
        self.resets += 1
        return 5

    def capture_missing(self) -> int:
        self.captures += 1
        return self.captures <= 2

    def shutdown(self) -> None:
        self.requests.clear()

"""Public data types: requests, sampling parameters, results and errors. No tensors."""

from unisono.types.engine_request import PLACEHOLDER, EngineRequest, Overrides
from unisono.types.errors import (
    BadRequest,
    CheckpointError,
    ConfigError,
    EngineDead,
    EngineUnavailable,
    TemporaryFailure,
    UnisonoError,
    request_failure,
)
from unisono.types.limits import (
    LOGPROBS_MODES,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    MAX_STOP_IDS,
)
from unisono.types.media_item import MediaItem
from unisono.types.outputs import (
    CompletionOutput,
    Concise,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    TokenDelta,
    TokenLogprobs,
    Vectors,
    part_id,
)
from unisono.types.sampling_params import SamplingParams
from unisono.types.speculative_config import MAX_DRAFTS, SpeculativeConfig
from unisono.types.structured_outputs import StructuredOutputs, StructuredOutputsParams, Thinking

__all__ = [
    "BadRequest",
    "CheckpointError",
    "CompletionOutput",
    "Concise",
    "ConfigError",
    "EngineDead",
    "EngineUnavailable",
    "EngineRequest",
    "FinishReason",
    "LOGPROBS_MODES",
    "Logprob",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_BIASES",
    "MAX_DRAFTS",
    "MAX_LOGPROBS",
    "MAX_SEQUENCES",
    "MAX_STOP_IDS",
    "MediaItem",
    "Overrides",
    "PLACEHOLDER",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TemporaryFailure",
    "Thinking",
    "TokenDelta",
    "TokenLogprobs",
    "UnisonoError",
    "Vectors",
    "part_id",
    "request_failure",
]

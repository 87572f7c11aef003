"""Parameters and results of pooling requests: embeddings, classes and scores. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.types.errors import BadRequest

TASKS = ("embed", "classify", "token_embed", "token_classify", "score")


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of ``LLM.embed``, ``classify``, ``score`` and ``encode``.

    dimensions: leading values of an embedding that are kept; None: all.
    use_activation: normalise embeddings to length 1, and apply softmax or sigmoid to classes; None is True. normalize:
        its older name for embeddings.
    task: one of TASKS; None: the call's own.
    truncate_prompt_tokens: last tokens of a prompt that are kept; None: all.
    step_tag_id: of "token_classify": the answer has only tokens with this id, those after a process reward model's
        steps; None: the checkpoint's. returned_token_ids: numbers of the labels that count; None: all.

    Raises BadRequest for a value of the wrong kind.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    task: str | None = None
    truncate_prompt_tokens: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "truncate_prompt_tokens", "step_tag_id"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise BadRequest(f"{name}={value!r}: give a whole number.", name)
        for name in ("use_activation", "normalize"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise BadRequest(f"{name}={getattr(self, name)!r}: give True or False.", name)
        labels = self.returned_token_ids
        if labels is not None and not (
            isinstance(labels, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in labels)
        ):
            raise BadRequest(f"returned_token_ids={labels!r}: give a list of whole numbers.", "returned_token_ids")
        if self.task is not None and self.task not in TASKS:
            raise BadRequest(f"task={self.task!r}: give one of {', '.join(TASKS)}.", "task")

    @property
    def activated(self) -> bool:
        """True if embeddings are normalised and classes activated."""
        return self.use_activation is not False and self.normalize is not False


@dataclass
class PoolingOutput:
    """Pooled values of a prompt: a float32 tensor [values], or [tokens, values] of a task for tokens."""

    data: Any


@dataclass
class ClassificationOutput:
    """Probabilities of a prompt's classes, in the order of the labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass
class PoolingRequestOutput:
    """The result of ``LLM.encode``, ``classify`` or ``score`` for one prompt or pair."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True

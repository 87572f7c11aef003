"""Scores of pairs of texts: the prompt of a pair, and the cosine of two embeddings.

A reranker with a head reads both texts in one prompt. An embedding model reads them apart, and the score is the cosine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.frontend.classifier import Classifier, classifier_of
from unisono.frontend.input_processor import InputProcessor
from unisono.frontend.pooling import Pooling
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, CheckpointError

NO_UPDATE = (
    "The weights of a classifier, or of an embedding model with dense layers, cannot be replaced while it is served: "
    "its head was read at the start. Restart with the new checkpoint."
)
QUERY, DOCUMENT = "query", "document"
NO_HEAD = (
    "This checkpoint has no classifier: it needs an architecture …ForSequenceClassification, or classifier_from_token "
    "in config.json (--hf-overrides)."
)


def head_of(directory: Path, overrides: Any, tokenizer: Tokenizer | None, load_format: str) -> Classifier | None:
    """The classifier of a checkpoint, or None. Raises CheckpointError for one that cannot be read."""
    if load_format == "dummy":
        return None
    try:
        return classifier_of(directory, overrides, tokenizer.token_id if tokenizer else lambda token: None)
    except ValueError as error:
        raise CheckpointError(f"{directory}: the classifier's head: {error}.") from None


def is_score_template(template: str | None) -> bool:
    """True if a chat template writes messages of the roles ``query`` and ``document``, as vLLM's for rerankers."""
    return template is not None and all(re.search(rf"[\"']{role}[\"']", template) for role in (QUERY, DOCUMENT))


def pair_ids(
    inputs: InputProcessor, pair: tuple[str, str], names: tuple[str, str], truncates: bool, template: str | None = None
) -> list[int]:
    """Token ids of a pair for a reranker: by a score template, or the tokenizer's form of two texts.

    names: of the texts' fields, for errors. truncates: the prompt is cut to the context later. template: a Jinja
    template in place of the checkpoint's. Raises BadRequest without a tokenizer and for a text that is too long.
    """
    query, document = pair
    for text, name in zip(pair, names, strict=True):
        tokenizer = inputs.checked(text, name, truncates)
    if template is None and not is_score_template(tokenizer.chat_template):
        return tokenizer.encode_pair(query, document)
    messages = [{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, chat_template=template)
    return tokenizer.encode(text, add_special_tokens=False)


def paired(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """The pairs of two lists of texts: one to one, or the first one's only text with each of the second.

    names: of the fields, for errors. Raises BadRequest.
    """
    for texts, name in zip((first, second), names, strict=True):
        if not texts:
            raise BadRequest(f"{name} is empty: give at least one text.", name)
    if len(first) not in (1, len(second)):
        raise BadRequest(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: give one to each, or one {names[0]} for "
            "all.",
            names[0],
        )
    return list(zip(first if len(first) > 1 else list(first) * len(second), second, strict=True))


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of two embeddings [dimensions], in float64."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)


def check_task(task: str, pooling: Pooling, classifier: Classifier | None) -> None:
    """Raise BadRequest for a task that a checkpoint does not have."""
    if task in ("classify", "token_classify") and classifier is None:
        raise BadRequest(NO_HEAD, "task")
    if task == "embed" and pooling.problem is not None:
        raise BadRequest(f"Embeddings of this checkpoint: {pooling.problem}.")


def check_one_label(classifier: Classifier) -> None:
    """Raise BadRequest for a classifier with several labels, which gives no score."""
    if len(classifier.labels) != 1:
        raise BadRequest(
            f"This classifier has {len(classifier.labels)} labels, and a score needs one: use /classify (LLM.classify)."
        )


@dataclass(frozen=True)
class Steps:
    """Tokens and labels that a process reward model's answer has. None: those of the checkpoint.

    tag: id of the token after each step; the answer has these tokens alone. labels: numbers of the labels that count.
    """

    tag: int | None = None
    labels: tuple[int, ...] | None = None

    def check(self, classifier: Classifier | None, task: str) -> None:
        """Raise BadRequest for steps of another task, and for a label that the checkpoint does not have."""
        if self == Steps():
            return
        if task != "token_classify" or classifier is None:
            raise BadRequest(
                f"step_tag_id and returned_token_ids go with task token_classify, and this one is {task}.",
                "step_tag_id" if self.tag is not None else "returned_token_ids",
            )
        most = len(classifier.labels)
        wrong = next((each for each in self.labels or () if not 0 <= each < most), None)
        if wrong is not None or self.labels == ():
            raise BadRequest(
                f"returned_token_ids={list(self.labels or ())}: this classifier has the labels 0 to {most - 1}.",
                "returned_token_ids",
            )

    def of(self, states: np.ndarray, token_ids: Sequence[int], classifier: Classifier) -> np.ndarray:
        """The states [tokens, H] of the tokens in the answer: those of the steps' ends, or all."""
        tag = classifier.step_tag if self.tag is None else self.tag
        return states if tag is None else states[np.asarray(token_ids[: len(states)]) == tag]


def pooled_by_task(
    states: np.ndarray, task: str, classifier: Classifier | None, dimensions: int | None, activated: bool,
    token_ids: Sequence[int] = (), steps: Steps | None = None,
) -> np.ndarray:  # fmt: skip
    """Values of a prompt's states [tokens, H] for a task but "embed": see ``LLM.encode``. token_ids: the prompt's."""
    if classifier is not None and task == "classify":
        return classifier.of_prompt(states, activated)
    if classifier is not None and task == "token_classify":
        steps = steps or Steps()
        rows = [classifier.scores(state, activated, steps.labels) for state in steps.of(states, token_ids, classifier)]
        count = len(classifier.labels if steps.labels is None else steps.labels)
        return np.stack(rows) if rows else np.zeros((0, count), np.float32)
    return np.stack([Pooling().pool(state[None], dimensions, activated) for state in states])

"""Calls of ``LLM`` that return vectors and scores: embed, encode, classify, score. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from unisono.entrypoints.llm_calls import check_kind
from unisono.entrypoints.progress_bar import Bar
from unisono.frontend.classifier import Classifier
from unisono.frontend.input_processor import InputProcessor, PromptType
from unisono.frontend.pooling import Pooling
from unisono.frontend.scores import Steps, check_one_label, check_task, cosine, pair_ids, paired, pooled_by_task
from unisono.types import BadRequest, SamplingParams
from unisono.types.outputs import EmbeddingOutput, EmbeddingRequestOutput
from unisono.types.pooling import (
    TASKS,
    ClassificationOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
)

Texts = str | Sequence[str]


class PooledCalls:
    """The pooled half of ``LLM``: each call computes prompts and reads their final hidden states."""

    _inputs: InputProcessor
    _pooling: Pooling
    _classifier: Classifier | None
    generate: Callable[..., Any]

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: Bar = True,
        lora_request: Any = None,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts as ``/v1/embeddings`` does: last hidden states, pooled as the checkpoint configures.

        dimensions: number of leading values of each embedding that are kept, 1 to the hidden size; None: all.
        normalize: scale each embedding to length 1. pooling_params: both, as vLLM's. prompt_name: the prompt
        of the model card that goes before each text, "query" or "document" in most; None: the checkpoint's default.
        Raises BadRequest, before anything runs, for a wrong argument and for a checkpoint with an unsupported pooling.
        """
        params = pooling_params or PoolingParams(dimensions)
        check_kind("normalize", normalize, bool, "True or False")
        self._check(params, "embed")
        found, prompts = [], self._pooling.prompted(prompts, prompt_name)
        for output in self._states(prompts, params, use_tqdm, lora_request):
            vector = self._vector(output, params, normalize)
            found.append(
                EmbeddingRequestOutput(output.request_id, EmbeddingOutput(vector.tolist()), output.prompt_token_ids)
            )
        return found

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: Bar = True,
        lora_request: Any = None,
    ) -> list[PoolingRequestOutput]:
        """Pool prompts: ``outputs.data`` of each is a float32 tensor.

        pooling_task: "embed" [dimensions], "classify" [labels], "token_embed" [tokens, dimensions] or "token_classify"
        [tokens, labels]; by default that of the parameters, or "classify" for a checkpoint with a classifier. Raises
        BadRequest.
        """
        params = pooling_params or PoolingParams()
        task = pooling_task or params.task or ("embed" if self._classifier is None else "classify")
        self._check(params, task)
        found, prompts = [], self._pooling.prompted(prompts, None) if task == "embed" else prompts
        for output in self._states(prompts, params, use_tqdm, lora_request):
            data = torch.from_numpy(np.array(self._pooled(output, params, task)))
            found.append(PoolingRequestOutput(output.request_id, PoolingOutput(data), output.prompt_token_ids))
        return found

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Bar = True,
        lora_request: Any = None,
    ) -> list[PoolingRequestOutput]:
        """Classify prompts: ``outputs.probs`` of each. Raises BadRequest for a checkpoint without a classifier."""
        outputs = self.encode(
            prompts, pooling_params, pooling_task="classify", use_tqdm=use_tqdm, lora_request=lora_request
        )
        for output in outputs:
            output.outputs = ClassificationOutput(output.outputs.data.tolist())
        return outputs

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        use_tqdm: Bar = True,
        lora_request: Any = None,
    ) -> list[PoolingRequestOutput]:
        """Score pairs of texts: ``outputs.score`` of each.

        data_1: a query for all of data_2, or one for each. A reranker with one label reads both texts in one prompt, by
        ``chat_template`` or its own template with the roles query and document; an embedding model gives the cosine.
        Raises BadRequest for a classifier with several labels.
        """
        params = pooling_params or PoolingParams()
        first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
        pairs = paired(first, second, ("data_1", "data_2"))
        if self._classifier is None:
            return self._cosines(first, pairs, params, use_tqdm, lora_request)
        check_one_label(self._classifier)
        names, truncates = ("data_1", "data_2"), params.truncate_prompt_tokens is not None
        ids = [pair_ids(self._inputs, pair, names, truncates, chat_template) for pair in pairs]
        outputs = self.encode(ids, params, pooling_task="classify", use_tqdm=use_tqdm, lora_request=lora_request)
        for output in outputs:
            output.outputs = ScoringOutput(float(output.outputs.data[0]))
        return outputs

    def reward(self, prompts: PromptType | Sequence[PromptType], **options: Any) -> list[PoolingRequestOutput]:
        """Rewards of prompts: ``outputs.data`` of each, the head's values without an activation."""
        params = PoolingParams(use_activation=False)
        return self.encode(prompts, options.pop("pooling_params", None) or params, pooling_task="classify", **options)

    def _cosines(
        self, first: Sequence[str], pairs: Sequence[tuple[str, str]], params: PoolingParams, use_tqdm: Bar, lora: Any
    ) -> list[PoolingRequestOutput]:
        texts = [*first, *(document for _, document in pairs)]
        outputs = self.encode(texts, params, pooling_task="embed", use_tqdm=use_tqdm, lora_request=lora)
        queries, documents = outputs[: len(first)], outputs[len(first) :]
        found = []
        for number, document in enumerate(documents):
            query = queries[number if len(first) > 1 else 0]
            value = ScoringOutput(cosine(query.outputs.data.numpy(), document.outputs.data.numpy()))
            ids = [*query.prompt_token_ids, *document.prompt_token_ids]
            found.append(PoolingRequestOutput(document.request_id, value, ids))
        return found

    def _states(
        self, prompts: PromptType | Sequence[PromptType], params: PoolingParams, use_tqdm: Bar, lora: Any
    ) -> Any:
        """Compute the final hidden states of the prompts' tokens."""
        kept = params.truncate_prompt_tokens
        sampling = SamplingParams(temperature=0, max_tokens=1, return_hidden_states=True, truncate_prompt_tokens=kept)
        return self.generate(prompts, sampling, use_tqdm=use_tqdm, lora_request=lora)

    def _vector(self, output: Any, params: PoolingParams, normalize: bool = True) -> np.ndarray:
        states = output.prompt_hidden_states.float().numpy()
        return self._pooling.pool(states, params.dimensions, normalize and params.activated)

    def _pooled(self, output: Any, params: PoolingParams, task: str) -> np.ndarray:
        if task == "embed":
            return self._vector(output, params)
        states = output.prompt_hidden_states.float().numpy()
        ids, steps = output.prompt_token_ids, _steps(params)
        return pooled_by_task(states, task, self._classifier, params.dimensions, params.activated, ids, steps)

    def _check(self, params: PoolingParams, task: str) -> None:
        """Raise BadRequest for a task that this checkpoint does not have, or a wrong argument."""
        if task not in TASKS:
            raise BadRequest(f"task={task!r}: give one of {', '.join(TASKS)}.", "pooling_task")
        check_task(task, self._pooling, self._classifier)
        _steps(params).check(self._classifier, task)
        self._pooling.check_dimensions(params.dimensions, self._inputs.model.hidden_size)


def _steps(params: PoolingParams) -> Steps:
    labels = params.returned_token_ids
    return Steps(params.step_tag_id, None if labels is None else tuple(labels))

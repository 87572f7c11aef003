"""A request that asks for no feature is known at one look, and none that asks for one is taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import engine
from unisono import StructuredOutputsParams
from unisono.passes.features.base import Feature, plain_requests
from unisono.types import EngineRequest, MediaItem, Overrides, SamplingParams, Thinking, Vectors

ROW = Vectors("float32", 4, b"\0" * 16)
ASKING: list[dict[str, Any]] = [
    {"params": {"logprobs": 0}},
    {"params": {"logprobs": -1}},
    {"params": {"logprobs": 0, "logprob_token_ids": [1]}},
    {"params": {"prompt_logprobs": 0}},
    {"params": {"return_hidden_states": True}},
    {"params": {"structured_outputs": StructuredOutputsParams(regex="a+")}},
    {"params": {"thinking": Thinking("<think>", "</think>", "begin", 3)}},
    {"adapter": "a"},
    {"overrides": Overrides([0], ROW)},
    {"media": (MediaItem("image", b"d", (1, 2, 2), ROW, [0]),)},
]
PLAIN: list[dict[str, Any]] = [
    {},
    {"params": {"temperature": 0.3, "top_p": 0.5, "seed": 7, "max_tokens": 3, "logit_bias": {1: 2.0}}},
    {"stop_ids": (1, 2), "bad_words": ((3,),), "priority": 2, "client": "c", "cache_salt": "s"},
]


def request(given: dict[str, Any]) -> EngineRequest:
    params = SamplingParams(**given.get("params", {}))
    return EngineRequest("r", [1, 2, 3], params, **{k: v for k, v in given.items() if k != "params"})


class Silent(Feature):
    """A feature of somebody else that does not say by which fields it is asked for."""


def test_requests_that_need_a_feature_are_not_plain(qwen3: Path) -> None:
    with engine(qwen3) as llm:
        features = llm.engine.runner.request_features
        is_plain = llm.engine.runner.is_plain
        assert all(feature.requested_by is not None for feature in features)
        assert [given for given in ASKING if is_plain(request(given))] == []
        for given in PLAIN:
            assert is_plain(request(given))
            assert all(feature.begin(request(given)) is None for feature in features)
        assert not plain_requests([*features, Silent(features[0].context)])(request({}))


@pytest.mark.parametrize("given", [*ASKING, *PLAIN], ids=str)
def test_without_features_every_request_is_plain(given: dict[str, Any]) -> None:
    assert plain_requests([])(request(given))

"""Dry runs of a start call one decoder layer of each kind, and launch every kernel that all layers would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.engine.startup.repeated_layers import RepeatedLayers, kind_of, skipping_repeated_layers
from unisono.engine.startup.warmup import run_kinds_on_padding, run_on_padding
from unisono.engine.worker.build import Build
from unisono.entrypoints.llm import LLM
from unisono.models.blocks.layers import DecoderLayer, Stream
from unisono.types import SpeculativeConfig

MODELS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "chain": ("tiny", {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}),
    "hybrid": ("tiny-hybrid", {"method": "mtp", "num_speculative_tokens": 2}),
}


class Launches(TorchDispatchMode):
    """Record each op of the package with the kinds of its arguments: the variants of kernels that a GPU would need."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "unisono" and "outputs_ready" not in function.name():  # no kernel
            self.seen.append((function.name(), kind_of([args, kwargs or {}])))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("model", "speculation"), MODELS.values(), ids=MODELS)
def test_one_layer_of_each_kind_launches_every_kernel(
    model: str, speculation: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, found = Build._size, []

    def compared(build: Build) -> None:
        programs = build._programs()
        passes = [(program, shape) for program, shape in build._needing_every_kernel(programs) if shape.rows <= 8][:12]
        for run in (run_on_padding, run_kinds_on_padding):
            with Launches() as launches:
                run(passes, build.config.device)
            found.append(launches.seen)
        size(build)

    monkeypatch.setattr(Build, "_size", compared)
    spec = None if speculation is None else SpeculativeConfig.parse(speculation)
    with LLM(model, device="cpu", speculative=spec, max_num_seqs=2, max_model_len=128, graph_capture="lazy"):
        whole, kinds = found
    assert whole
    assert set(kinds) == set(whole)
    assert len(kinds) < 0.8 * len(whole)


def layers_of(llm: LLM) -> list[DecoderLayer]:
    return [each for each in llm.engine.worker.model.layers if isinstance(each, DecoderLayer)]


def test_layers_differ_by_more_than_numbers() -> None:
    with LLM("tiny", device="cpu", max_num_seqs=1, max_model_len=128, graph_capture="lazy") as llm:
        first, second, *_, last = layers_of(llm)
        assert kind_of(first) == kind_of(second)
        assert kind_of(first) != kind_of(last), "no projection follows it"
        weight = second.feed_forward.down.weight
        second.feed_forward.down.weight = torch.nn.Parameter(weight.t().contiguous().t(), requires_grad=False)
        assert kind_of(first) != kind_of(second), "another stride is another variant of a kernel"
        second.feed_forward.down.weight = weight
        second.times = 2.0
        assert kind_of(first) != kind_of(second)


def test_outputs_of_one_pass_are_not_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny", device="cpu", max_num_seqs=1, max_model_len=128, graph_capture="lazy") as llm:
        layer, repeated = layers_of(llm)[0], RepeatedLayers()
        outputs = iter([Stream(torch.zeros(1), torch.zeros(1)) for _ in range(9)])
        monkeypatch.setattr(DecoderLayer, "forward", lambda self, *args: next(outputs))
        context: list[Any] = [object(), object()]
        given = torch.zeros(2, 4), torch.zeros(2, 4)
        calls = [id(repeated.call(layer, given, one, ())) for one in (*context, *context)]  # type: ignore[arg-type]
        repeated.end_pass()
        calls.append(id(repeated.call(layer, given, context[0], ())))  # type: ignore[arg-type]
    assert [calls.index(each) for each in calls] == [0, 1, 0, 1, 4]
    assert (repeated.ran, repeated.skipped) == (3, 2)


def test_layers_run_again_outside() -> None:
    call = DecoderLayer.__call__
    with skipping_repeated_layers():
        assert DecoderLayer.__call__ is not call
    assert DecoderLayer.__call__ is call

"""Columns of the test matrix that are ways to run an engine, not kinds of requests: each runs requests that use it.

A column runs them with any flags, once plainly and once its own way, and says what came of them and which passes ran.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.drafters.make_assistant import make_assistant
from tests.drafters.make_heads import make_eagle3
from tests.engine import gemma_pictures
from tests.engine.helpers import counted, engine, mixed_params
from tests.engine.matrix import Checkpoints, config_of
from tests.engine.pictures import make_seeing, run, several, vision_of
from tests.engine.two_engines import stepping
from tests.graphs.kinds import say, text
from tests.models.fields import GEMMA4_EXPERTS, GEMMA4_SHARED
from tests.models.make import make_checkpoint
from tests.models.make_adapters import make_adapter
from unisono.engine.scheduling.mixing import Mixing
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig
from unisono.types.lora import LoRARequest

FLAGS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256, "max_num_batched_tokens": 48}
Passes = dict[tuple[str, str, str], int]
"""By program, kind of graph and reason."""


@dataclass
class Came:
    """Result of a column's requests. proof: a figure that is 0 if the column was not used."""

    outputs: Any
    passes: Passes
    accepted: int
    proof: int


def spec_of(method: str, model: Path | None) -> SpeculativeConfig | None:
    return None if method == "none" else SpeculativeConfig(method, None if model is None else str(model), 3)


def texts(llm: LLM) -> list[Any]:
    """Requests of mixed lengths, some with log-probabilities, and again, with prefix hits."""
    once = [text(n, n) for n in (3, 40, 70)]
    return say(llm, once) + say(llm, once, logprobs=2) + say(llm, [text(60, 3)] * 2)


def came(llm: LLM, outputs: Any, proof: int) -> Came:
    llm.engine.check_integrity()
    return Came(outputs, counted(llm), llm.engine.counters.accepted_tokens, proof)


# ---- the columns ------------------------------------------------------------------------------------


def ranks(own: bool, target: Path, spec: Any, flags: dict[str, Any], experts: bool = False) -> Came:
    """Two ranks, or three where the heads want that; with ``experts`` these are whole on a rank."""
    attention = config_of(target).attention
    more = {"tensor_parallel_size": next(n for n in (2, 3) if fits(attention, n))} if own else {}
    more |= {"enable_expert_parallel": True} if own and experts else {}
    with engine(target, speculative=spec, **flags, **more) as llm:
        return came(llm, texts(llm), more.get("tensor_parallel_size", 0))


def fits(attention: Any, count: int) -> bool:
    """Return True if heads can be divided among this number of ranks."""
    kv_heads = attention.num_kv_heads
    return attention.num_heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)


def whole_experts(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    return ranks(own, target, spec, flags, experts=True)


def offload(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    """Prompts whose pages do not fit the device together, twice."""
    more = {"num_pages": 34, "cpu_offload_ratio": 6} if own else {}
    with engine(target, speculative=spec, **flags, **more) as llm:
        outputs = [say(llm, [text(90 + i, turn) for i in range(2)]) for turn in (1, 2, 3, 4, 5, 1, 2)]
        host = llm.engine.pool.offload
        return came(llm, outputs, host.counters.hits if host is not None else 0)


def roles(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    """Prompts are computed by another engine."""
    if not own:
        with engine(target, speculative=spec, **flags) as llm:
            return came(llm, texts(llm), 0)
    with tempfile.TemporaryDirectory() as folder:
        where = f"unix://{folder}/prefill"
        with engine(target, speculative=spec, role="prefill", transfer_listen=where, **FLAGS) as first, stepping(first):
            urls = {"role": "decode", "prefill_urls": where, "transfer_timeout": 60.0}
            with engine(target, speculative=spec, **urls, **flags) as llm:
                outputs = texts(llm)
                return came(llm, outputs, llm.engine.roles.client.results["done"])


def adapters(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    """Two adapters and none, mixed in a batch; the plain way, each request by itself without speculation."""
    batch, params = [text(n, n) for n in (3, 40, 9, 70)], mixed_params(4, max_tokens=8)
    with tempfile.TemporaryDirectory() as folder:
        made = [make_adapter(Path(folder) / str(n), target, n, size=1.0) for n in (1, 2)]
        asked = [None, *(LoRARequest(path.name, n, str(path)) for n, path in enumerate(made, 1)), None]
        more = {} if own else {"max_num_seqs": 1}
        with engine(target, speculative=spec, **{**flags, **more}, enable_lora=True, max_loras=2) as llm:
            outputs = [o.outputs[0].token_ids for o in llm.generate(batch, params, lora_request=asked)]
            plain = [o.outputs[0].token_ids for o in llm.generate(batch[1:3], params[1:3])]
            return came(llm, outputs, sum(a != b for a, b in zip(outputs[1:3], plain, strict=True)))


def pictures(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    """Prompts with pictures, and the same batch again, whose pictures are known."""
    more = {} if own else {"max_num_seqs": 1}
    with engine(target, speculative=spec, **{**flags, **more}) as llm:
        prompts = several(vision_of(target), llm.engine.config.dtype)
        params: list[SamplingParams] = mixed_params(len(prompts), 8)
        outputs = run(llm, prompts, params)
        return came(llm, outputs, sum(n for (program, *_), n in counted(llm).items() if program == "encode"))


def pictures_both_ways(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    """Pictures whose tokens see each other in both directions, in chunks that cut none; then the same, behind hits."""
    more = {} if own else {"max_num_seqs": 1, "max_num_batched_tokens": 128}
    with engine(target, speculative=spec, **{**flags, **more}) as llm:
        prompts = gemma_pictures.several(vision_of(target), llm.engine.config.dtype)
        params: list[SamplingParams] = mixed_params(len(prompts), 8)
        outputs = [run(llm, prompts, params) for _ in range(2)]
        return came(llm, outputs, sum(n for (program, *_), n in counted(llm).items() if program == "encode"))


def mixed_passes(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    """Requests decode in the prompt passes of others while rounds draft nothing; then rounds draft."""
    with (
        mock.patch.object(Mixing, "pays", return_value=True),  # on a GPU that is measured
        engine(target, speculative=spec, **flags, adaptive=True, enable_mixed_chunk=own) as llm,
    ):
        llm.engine.pin_drafts(min(llm.engine.runner.choices))  # without graphs rounds have all drafts
        outputs = texts(llm)
        llm.engine.pin_drafts(llm.engine.runner.choices[-1])
        outputs += say(llm, [text(n, n) for n in (5, 50)])
        return came(llm, outputs, sum(n for (program, *_), n in counted(llm).items() if program == "mixed"))


def gemma(own: bool, target: Path, spec: Any, flags: dict[str, Any]) -> Came:
    """A target whose layers differ: windows, values from keys, keys of other layers, experts beside the MLP."""
    more = {} if own else {"max_num_seqs": 1}
    with engine(target, speculative=spec, **{**flags, **more}) as llm:
        config = llm.engine.worker.model.config
        return came(llm, texts(llm), sum(number != read for number, read in enumerate(config.reads)))


@dataclass(frozen=True)
class Column:
    """``run(own, target, speculative, flags)``. methods: the drafters that it is run with; none: all. make: makes its
    target, where that is not the drafter's. same: drafts are accepted as in the plain run."""

    run: Callable[..., Came]
    methods: tuple[str, ...] = ()
    make: Callable[[Path], Path] | None = None
    same: bool = True


def seeing(folder: Path) -> Path:
    return make_seeing(folder / "seeing")


def mixture(folder: Path) -> Path:
    return make_checkpoint(folder / "mixture", "qwen3_5_moe_text", vocab_size=264)


def layers_apart(folder: Path) -> Path:
    fields = {**GEMMA4_SHARED, **GEMMA4_EXPERTS, "vocab_size": 272}
    return make_checkpoint(folder / "gemma4", "gemma4_text", tokenizer=False, **fields)


LOOKUPS = ("none", "ngram", "suffix")

COLUMNS = {
    "tensor parallel": Column(ranks),
    "expert parallel": Column(whole_experts, (*LOOKUPS, "eagle3"), mixture),
    "offload": Column(offload, same=False),
    "roles": Column(roles, same=False),
    "adapters": Column(adapters, same=False),
    "mixed passes": Column(mixed_passes, same=False),
    "Gemma 4": Column(gemma, ("none", "ngram", "mtp_frozen", "eagle3"), layers_apart, same=False),
    "pictures, both ways": Column(
        pictures_both_ways, ("none", "ngram", "eagle3"), lambda folder: gemma_pictures.make_gemma3(folder / "gemma3"),
        same=False,
    ),
    "pictures": Column(pictures, (*LOOKUPS, "eagle3"), seeing, same=False),
}  # fmt: skip


def checkpoints(column: Column, method: str, usual: Callable[[str], Checkpoints], folder: Path) -> Checkpoints:
    """The target and the draft's checkpoint of a cell."""
    if column.make is None:
        return usual(method)
    target = column.make(folder)
    if method == "mtp_frozen":
        return target, make_assistant(folder / "assistant", target)
    if method == "eagle3":
        return target, make_eagle3(folder / "head", config_of(target), (1, 1, 2), aux=[1, 1, 2]).path
    return target, None

"""Arguments and results of ``LLM`` and ``AsyncLLM``: vLLM's names, refusals, prompts, outputs and their metrics."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import unisono
from tests.engine.helpers import engine
from tests.entrypoints.shared import GREEDY, PROMPTS, USER, idle, ids
from unisono import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from unisono.types import BadRequest, CheckpointError, ConfigError, SpeculativeConfig


def test_reprs_of_public_objects(llm: LLM) -> None:
    """What a person sees who types a name: the facts, in a line."""
    facts = "'tiny': Qwen3ForCausalLM, float32 on cpu, context 128 tokens"
    assert repr(llm).startswith(f"LLM({facts}")
    assert repr(AsyncLLM(llm=llm)).startswith(f"AsyncLLM({facts}")
    assert repr(unisono.AsyncEngineArgs("tiny", dtype="float32")) == "AsyncEngineArgs('tiny', dtype='float32')"
    assert repr(SamplingParams(temperature=0, stop="a")) == "SamplingParams(temperature=0, stop=('a',))"
    assert repr(SamplingParams()) == "SamplingParams()"
    asking = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, seed=1, return_hidden_states=True)
    (output,) = llm.generate([5] * 60, asking)
    shown = repr(output)
    assert "prompt_token_ids=[5, 5, 5, 5, 5, 5, 5, 5, … (60 in all)]" in shown
    assert f"text={output.outputs[0].text[:200]!r}" in shown
    assert "prompt_hidden_states=<tensor [60, 256] float32>" in shown
    assert "seed=1" in shown
    assert len(shown) < 1200
    with LLM("tiny", enforce_eager=True, max_model_len=64) as gone:
        pass
    assert repr(gone) == "LLM('tiny': shut down)"


def test_public_names_are_listed() -> None:
    """Also before anything was imported: completion in a shell asks ``dir``."""
    code = "import unisono; print(sorted(set(unisono.__all__) - set(dir(unisono))), 'LLM' in dir(unisono))"
    code += "\nimport rlcompleter; print(rlcompleter.Completer(vars()).attr_matches('unisono.Samp'))"
    code += "\nimport sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[] True", "['unisono.SamplingParams(']", "False"]


def test_keywords_of_other_engines() -> None:
    given = dict(
        tensor_parallel_size=1, trust_remote_code=False, gpu_memory_utilization=0.5, max_num_seqs=2, dtype="half",
        enforce_eager=True, seed=3, tokenizer=None, enable_prefix_caching=False, max_model_len=64, swap_space=4,
        disable_log_stats=True, distributed_executor_backend=None, hf_overrides=None, kv_cache_dtype="fp8",
        speculative_config={"method": "ngram", "num_speculative_tokens": 2}, context_length=None,
        disable_custom_all_reduce=True, synthetic_acceptance_rates=(), snapshot_share=0.2, task="embed",
        is_embedding=True, runner="pooling", convert="embed", compilation_config=None, block_size=16, quantization=None,
    )  # fmt: skip
    del given["context_length"]
    assert unisono.entrypoints.llm_arguments.engine_arguments(given) == {
        "tokenizer": None, "tensor_parallel_size": 1, "hf_overrides": {},
        "synthetic_acceptance_rates": (), "snapshot_share": 0.2,
        "gpu_memory_utilization": 0.5, "max_num_seqs": 2, "dtype": "half", "enforce_eager": True, "seed": 3,
        "enable_prefix_caching": False, "max_model_len": 64, "quantization": None, "kv_cache_dtype": "fp8",
        "speculative": SpeculativeConfig("ngram", num_speculative_tokens=2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2: layers are not divided among GPUs"),
        ({"speculative_method": "ngram"}, r"Write speculative_config={'method': 'ngram'} \(docs/guide/speculate.md\)"),
        ({"speculative_algorithm": "NEXTN"}, "Write speculative_config={'method': 'mtp'}"),
        ({"speculative_model": "x", "num_speculative_tokens": 2}, "'model': 'x', 'num_speculative_tokens': 2}"),
        ({"hf_overrides": lambda config: config}, "hf_overrides: a function: give an object"),
        ({"hf_overrides": {"vocab_size": object()}}, "hf_overrides: .* give values that JSON has"),
        ({"lora_modules": 5}, "lora_modules=5: give a list of 'name=path'"),
        ({"chat_template": 5}, "chat_template=5: give a Jinja template"),
        ({"revision": 5}, "revision=5: give a string"),
        ({"progress": 5}, "progress=5: give a function"),
        ({"task": "rank"}, "task rank: the task .* follows from the checkpoint"),
        ({"trust_remote_code": True}, "trust_remote_code is not supported: code of a checkpoint is never run"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 is not supported; keys and values are kept in"),
        ({"kv_cache_dtype": "nvfp4"}, "give auto, fp8 or fp8_e4m3"),
        ({"kv_cache_dtype": "half", "device": "cpu"}, "--kv-cache-dtype float16: the model has float32; give auto"),
        ({"max_num_seq": 4}, "LLM takes no keyword max_num_seq. The nearest one is max_num_seqs"),
        ({"speculative_config": "{"}, "speculative_config is not valid JSON"),
        ({"speculative_config": 3}, "speculative_config=3: give a dict"),
        ({"context_length": 64, "max_model_len": 64}, "max_model_len is given twice"),
        ({"enable_lora": True, "max_lora_rank": 0}, "--max-lora-rank 0: give a whole number from 1"),
        ({"foo": 1}, "LLM takes no keyword foo. docs/guide/offline.md lists all"),
        ({"download_dir": "/x"}, "download_dir is not supported: HF_HOME or HF_HUB_CACHE"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling is not supported: --hf-overrides"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0: give at least 1"),
        ({"max_num_seqs": "4"}, "max_num_seqs='4': give a whole number"),
    ],
)
def test_unsupported_llm_keywords_raise(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("tiny", **given)


def test_values_of_other_engines() -> None:
    given = {"attention_backend": "FLASHINFER", "quantization": "awq_marlin", "enable_eplb": False}
    assert unisono.entrypoints.llm_arguments.engine_arguments(given) == {
        "attention_backend": "auto",
        "quantization": "awq",
    }
    keywords = {"disable_mm_preprocessor_cache": True, "max_num_seqs": 2}
    assert unisono.entrypoints.llm_arguments.media_arguments(keywords) == {"mm_processor_cache_gb": 0.0}
    assert keywords == {"max_num_seqs": 2}


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("temprature", "has no field temprature. Did you mean temperature?"),
        ("best_of", "Use n; /v1/completions has best_of"),
        ("guided_decoding", "structured_outputs=StructuredOutputsParams"),
        ("use_beam_search", "LLM.beam_search"),
        ("qwerty", "docs/reference/python.md lists all"),
    ],
)
def test_unknown_sampling_fields_name_another(field: str, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        SamplingParams(**{field: 1})


def test_seeds_of_requests_without_one(llm: LLM) -> None:
    """The seed of the model draws them; -1 is no seed."""
    assert SamplingParams(seed=-1).seed is None

    def texts(**flags: Any) -> list[str]:
        with engine("tiny", enforce_eager=True, max_num_seqs=2, max_model_len=64, **flags) as model:
            params = SamplingParams(temperature=2.0, max_tokens=12)
            return [one.outputs[0].text for one in model.generate(["a", "a"], params)]

    first = texts(seed=7)
    assert first[0] != first[1]
    assert texts(seed=7) == first
    assert texts(seed=8) != first


def test_fields_of_the_config_that_are_overridden() -> None:
    overrides = {"max_position_embeddings": 96, "rope_theta": 5e5}
    with engine("tiny", enforce_eager=True, max_num_seqs=2, max_model_len=None, hf_overrides=overrides) as llm:
        assert llm.engine.config.max_model_len == 96
        rotary = json.loads(llm.engine.checkpoint.config.attention.rotary.parameters)
        assert (rotary["rope_theta"], rotary["rope_type"]) == (5e5, "default")
        assert llm.engine.info()["settings"]["hf_overrides"] == overrides
    with pytest.raises(CheckpointError, match=r"residual_multiplier=2\.0"):
        LLM("tiny", hf_overrides={"residual_multiplier": 2.0})


def test_embeddings(llm: LLM) -> None:
    """The last token's hidden state of length 1, and its first numbers."""
    (output,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=1, return_hidden_states=True))
    state = output.prompt_hidden_states[-1].float()
    whole, other = llm.embed(PROMPTS[1:3])
    assert whole.prompt_token_ids == PROMPTS[1]
    torch.testing.assert_close(torch.tensor(whole.outputs.embedding), state / state.norm())
    assert whole.outputs.embedding != other.outputs.embedding
    (short,) = llm.embed([PROMPTS[1]], dimensions=5, normalize=False)
    assert short.outputs.embedding == state[:5].tolist()
    with pytest.raises(BadRequest, match="dimensions=0 is out of range: this model has 1 to"):
        llm.embed("x", dimensions=0)


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    *(("generate", (prompts,), {}, "prompts is ") for prompts in (5, None, 1.5, b"x", {1, 2})),
    *(("generate", ([prompt],), {}, r"prompts\[0\] is ") for prompt in (None, 1.5, b"x", True, ["a"], [1.5])),
    ("generate", (["a", 5],), {}, r"prompts\[1\] is 5"),
    ("generate", ({"prompt_token_ids": 5},), {}, "prompt_token_ids is 5"),
    ("generate", ({"prompt_token_ids": "x"},), {}, "prompt_token_ids is a str"),
    ("generate", ({"prompt": "x", "mm_processor_kwargs": 5},), {}, "mm_processor_kwargs is 5"),
    *(("generate", ("x", params), {}, "give SamplingParams") for params in (5, "x", {"temperature": 0}, [None])),
    ("generate", ("x",), {"priority": 5}, "priority is 5"),
    ("generate", ("x",), {"priority": ["a"]}, "a whole number for each prompt"),
    ("generate", ("x",), {"use_tqdm": 5}, "use_tqdm is 5"),
    ("generate", ("x",), {"lora_request": 5}, "give a LoRARequest"),
    *(("chat", (messages,), {}, "messages is ") for messages in (5, None, "hi", {"role": "user", "content": "x"})),
    ("chat", ([5],), {}, r"messages\[0\] is 5"),
    ("chat", ([["hi"]],), {}, r"messages\[0\]\[0\] is a str"),
    ("chat", ([{"content": "x"}],), {}, "no role"),
    ("chat", ([{"role": "user", "content": 5}],), {}, "content is 5"),
    *(("chat", (USER,), {name: 5}, f"{name} (has|is) 5") for name in (
        "tools", "documents", "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "add_generation_prompt",
    )),
    ("beam_search", (5, unisono.BeamSearchParams(2, 2)), {}, "prompts is 5"),
    ("beam_search", ("x", 5), {}, "give BeamSearchParams"),
    ("stream", (5,), {}, "prompt is 5"),
    ("stream", ("x", 5), {}, "give SamplingParams"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "given", "keywords", "says"), WRONG)
def test_arguments_of_a_wrong_kind(
    llm: LLM, method: str, given: tuple[Any, ...], keywords: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        list(getattr(llm, method)(*given, **keywords))


def test_arguments_of_a_wrong_kind_to_async_methods(llm: LLM) -> None:
    async def first(shared: AsyncLLM, *given: Any, **keywords: Any) -> None:
        async for _ in shared.generate(*given, **keywords):
            pass

    async def main() -> None:
        with AsyncLLM(llm=llm) as shared:
            for given, keywords, says in (
                ((5,), {}, "prompt is 5"),
                ((["a", "b"],), {}, "prompt is a list"),
                (("x", 5), {}, "give SamplingParams"),
                (("x", None, 5), {}, "request_id is 5"),
                (("x",), {"priority": "low"}, "priority is a str"),
                (("x",), {"lora_request": 5}, "give a LoRARequest"),
            ):
                with pytest.raises(BadRequest, match=says):
                    await first(shared, *given, **keywords)
            with pytest.raises(BadRequest, match="request_id is 5"):
                await shared.abort(5)  # type: ignore[arg-type]

    asyncio.run(main())
    idle(llm)


def test_prompts_in_other_containers(llm: LLM, expected: list[list[int]]) -> None:
    """Tuples, arrays and generators of prompts, as lists of them."""
    array = torch.tensor(PROMPTS[0])
    for prompts in (array, array.numpy(), tuple(PROMPTS[0])):
        assert ids(llm.generate(prompts, GREEDY)) == expected[:1]
    assert ids(llm.generate(iter(PROMPTS[:2]), GREEDY)) == expected[:2]


def test_prompt_types_and_params() -> None:
    assert TokensPrompt(prompt_token_ids=[1, 2]) == {"prompt_token_ids": [1, 2]}
    assert TextPrompt(prompt="x") == {"prompt": "x"}
    params = SamplingParams(logit_bias={1: 2.0}, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    copy = params.clone()
    assert copy == params
    copy.logit_bias[1] = 5.0  # type: ignore[index]
    assert params.logit_bias == {1: 2.0}


def test_stop_reason_and_metrics_of_outputs(llm: LLM) -> None:
    (free,) = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    ids, text = free.outputs[0].token_ids, free.outputs[0].text
    (stopped,) = llm.generate(
        "def add(a, b):", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[ids[5]])
    )
    assert stopped.outputs[0].stop_reason == ids[5]
    assert stopped.outputs[0].finish_reason == "stop"
    (stopped,) = llm.generate(
        "def add(a, b):", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=text[4:8])
    )
    assert stopped.outputs[0].stop_reason == text[4:8]
    assert free.outputs[0].stop_reason is None
    metrics = free.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 20
    assert 0 < metrics.first_token_latency <= metrics.last_token_ts - metrics.queued_ts < 60
    assert metrics.queued_ts < metrics.first_token_ts < metrics.last_token_ts


def test_llm_tokenizer_default_params_and_metrics(llm: LLM) -> None:
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("def add")) == "def add"
    assert llm.get_default_sampling_params() == llm.engine.default_params()
    before = {one.name: one.value for one in llm.get_metrics() if not one.labels}
    llm.generate(PROMPTS[0], GREEDY)
    after = {one.name: one.value for one in llm.get_metrics() if not one.labels}
    assert after["vllm:generation_tokens"] - before["vllm:generation_tokens"] == 12
    long = list(range(5, 60))
    llm.generate(long, GREEDY)
    assert llm.generate(long, GREEDY)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(long, GREEDY)[0].num_cached_tokens == 0


def test_chat_options(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello th"}]
    plain = llm.chat_prompt(messages)["prompt"]
    going_on = llm.chat_prompt(messages, add_generation_prompt=False, continue_final_message=True)["prompt"]
    assert going_on.endswith("Hello th")
    assert plain.startswith(going_on)
    (output,) = llm.chat(messages, GREEDY, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == going_on
    assert llm.chat(messages, GREEDY, chat_template_kwargs={"enable_thinking": False})[0].prompt == plain
    with pytest.raises(BadRequest, match="set add_generation_prompt=False"):
        llm.chat(messages, continue_final_message=True)
    tools = [{"type": "function", "function": {"name": "add_up", "parameters": {"type": "object"}}}]
    assert "add_up" in llm.chat_prompt(messages, tools=tools)["prompt"]
    assert llm.chat_prompt(messages, chat_template="{{ messages[0].content }}!")["prompt"] == "Hi!"
    with pytest.raises(BadRequest, match="priority=3 needs"):
        llm.generate(PROMPTS[0], GREEDY, priority=[3])
    with pytest.raises(BadRequest, match="lora_request is a object; give a LoRARequest"):
        llm.chat(messages, lora_request=object())

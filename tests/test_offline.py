"""``LLM`` and ``AsyncLLM`` from outside: callers share one engine and get their own tokens, in any thread."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import unisono
from tests.engine.helpers import engine
from unisono import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from unisono.types import BadRequest, CheckpointError, ConfigError, EngineDead, SpeculativeConfig

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [300, 301], [40] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=1)
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background and the shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine("tiny", enforce_eager=True, max_num_seqs=4, max_model_len=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """Each prompt's tokens when it runs alone."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def idle(llm: LLM) -> None:
    """Nothing is left of any request."""
    while llm.engine.has_work():
        llm.engine.step()
    llm.engine.reset_prefix_cache()
    llm.engine.check_integrity()
    assert not llm.loop.busy
    assert not llm.engine.scheduler.running


def test_streams_read_by_turns_get_all_their_tokens(llm: LLM, expected: list[list[int]]) -> None:
    streams, got = [llm.stream(prompt, GREEDY) for prompt in PROMPTS], [[] for _ in PROMPTS]
    while any([got[i].extend(delta.token_ids) or True for i, s in enumerate(streams) if (delta := next(s, None))]):
        pass
    assert got == expected
    idle(llm)


def test_a_bar_in_a_notebook_needs_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.entrypoints import progress_bar as bars

    ipython = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with bars.prompts_bar(True, 3) as advance:
        advance(1, 10)
    assert "1/3" in sys.stderr.getvalue()  # type: ignore[attr-defined]


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


def test_generate_inside_a_stream(llm: LLM, expected: list[list[int]]) -> None:
    got = []
    for delta in llm.stream(PROMPTS[0], GREEDY):
        got += delta.token_ids
        assert ids(llm.generate(PROMPTS[1:3], GREEDY)) == expected[1:3]
    assert got == expected[0]


def test_threads_in_generate(llm: LLM, expected: list[list[int]]) -> None:
    found: list[tuple[int, list[int]]] = []

    def ask(i: int) -> None:
        for _ in range(3):
            found.append((i, ids(llm.generate(PROMPTS[i], GREEDY, use_tqdm=False))[0]))

    threads = [threading.Thread(target=ask, args=(i % 4,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 24
    assert all(tokens == expected[i] for i, tokens in found)
    idle(llm)


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    idle(llm)


def test_async_and_sync_callers_share_the_engine(llm: LLM, expected: list[list[int]]) -> None:
    sync: list[list[int]] = []
    thread = threading.Thread(target=lambda: sync.extend(ids(llm.generate(PROMPTS, GREEDY))), daemon=True)

    async def ask(shared: AsyncLLM, prompt: list[int]) -> list[list[int]]:
        return [output.outputs[0].token_ids async for output in shared.generate(prompt, GREEDY, f"r{prompt[0]}")]

    async def main() -> list[list[list[int]]]:
        with AsyncLLM(llm=llm) as shared:
            thread.start()
            return await asyncio.gather(*(ask(shared, prompt) for prompt in PROMPTS))

    cumulative = asyncio.run(main())
    thread.join(60)
    assert sync == expected
    assert [each[-1] for each in cumulative] == expected
    assert all(a == b[: len(a)] for each in cumulative for a, b in itertools.pairwise(each))
    idle(llm)


def test_async_output_kinds(llm: LLM, expected: list[list[int]]) -> None:
    async def outputs(kind: RequestOutputKind) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, n=2, output_kind=kind)
        with AsyncLLM(llm=llm) as shared:
            return [output async for output in shared.generate({"prompt_token_ids": PROMPTS[0]}, params)]

    deltas = asyncio.run(outputs(RequestOutputKind.DELTA))
    (final,) = asyncio.run(outputs(RequestOutputKind.FINAL_ONLY))
    for index in range(2):
        parts = [one.outputs[index] for one in deltas]
        assert [token for part in parts for token in part.token_ids] == expected[0]
        assert [entry for part in parts for entry in part.logprobs] == final.outputs[index].logprobs
        assert "".join(part.text for part in parts) == final.outputs[index].text
    assert [one.finished for one in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) > 2


@pytest.mark.parametrize("how", ["cancel", "abort", "break"])
def test_async_requests_end_early(llm: LLM, how: str) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    seen: list[Any] = []

    async def ask(shared: AsyncLLM) -> None:
        iterator = shared.generate(PROMPTS[0], long, "mine")
        async for output in iterator:
            seen.append(output)
            if how == "abort":
                await shared.abort("mine")
            if how == "break":
                break
        await iterator.aclose()

    async def main() -> None:
        with AsyncLLM(llm=llm) as shared:
            task = asyncio.create_task(ask(shared))
            while not seen:
                await asyncio.sleep(0.001)
            if how == "cancel":
                task.cancel()
            await asyncio.wait([task], timeout=30)
            assert task.done()
            assert task.cancelled() == (how == "cancel")

    asyncio.run(main())
    assert len(seen[-1].outputs[0].token_ids) < 100
    if how == "abort":
        assert seen[-1].outputs[0].finish_reason == "abort"
    idle(llm)


def test_async_request_ids_are_unique(llm: LLM) -> None:
    async def main() -> None:
        with AsyncLLM(llm=llm) as shared:
            first = shared.generate(PROMPTS[0], GREEDY, "same")
            await anext(first)
            with pytest.raises(BadRequest, match="'same' is running already"):
                await anext(shared.generate(PROMPTS[0], GREEDY, "same"))
            await first.aclose()

    asyncio.run(main())


def test_ctrl_c_ends_generate_between_two_steps(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, whole = llm.engine.step, []

    def interrupted() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        deltas = step()
        whole.append(True)
        return deltas

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert whole == [True]  # the step was not cut off, and there was no second one
    idle(llm)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected


def test_ctrl_c_while_another_thread_steps(llm: LLM, expected: list[list[int]]) -> None:
    long, done = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), []
    thread = threading.Thread(target=lambda: done.extend(llm.generate(PROMPTS[:2], long)), daemon=True)
    thread.start()
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[3]] * 50, GREEDY)
    thread.join(60)
    assert [len(output.outputs[0].token_ids) for output in done] == [100, 100]
    idle(llm)


def test_ctrl_c_while_a_request_waits_to_be_added(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread, which steps, adds it after the interrupt; it is aborted all the same."""
    step, adding, interrupted = llm.engine.step, threading.Event(), threading.Event()

    def slow() -> Any:
        adding.set()
        interrupted.wait(60)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow)
    thread = threading.Thread(target=llm.generate, args=(PROMPTS[0], GREEDY), daemon=True)
    thread.start()
    adding.wait(60)

    def interrupt() -> None:
        while not llm.loop._calls:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    interrupted.set()
    thread.join(60)
    idle(llm)


def test_an_engine_error_reaches_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("tiny", enforce_eager=True, max_num_seqs=4, max_model_len=64) as llm:
        step, errors, both = llm.engine.step, [], threading.Barrier(2, timeout=30)
        steps = iter(range(1000))

        def failing() -> Any:
            if next(steps) > 2 and len(llm.loop._inboxes) == 2:
                raise RuntimeError("the device is gone")
            return step()

        monkeypatch.setattr(llm.engine, "step", failing)

        def ask() -> None:
            both.wait()
            try:
                llm.generate(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
            except EngineDead as error:
                errors.append(str(error))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == ["the engine failed: RuntimeError: the device is gone"] * 2
        with pytest.raises(EngineDead, match="the device is gone"):
            llm.generate(PROMPTS[0], GREEDY)
        with pytest.raises(EngineDead, match="the device is gone"):
            asyncio.run(AsyncLLM(llm=llm).check_health())


def test_an_engine_error_reaches_an_async_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(llm: LLM) -> None:
        with AsyncLLM(llm=llm) as shared:
            async for _ in shared.generate(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True)):
                monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)

    with (
        engine("tiny", enforce_eager=True, max_num_seqs=4, max_model_len=64) as llm,
        pytest.raises(EngineDead, match="ZeroDivisionError"),
    ):
        asyncio.run(asyncio.wait_for(main(llm), 30))


def test_use_after_the_end() -> None:
    with engine("tiny", enforce_eager=True, max_num_seqs=2, max_model_len=64) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
    calls = {
        "generate": lambda: llm.generate("x"),
        "chat": lambda: llm.chat([{"role": "user", "content": "x"}]),
        "stream": lambda: list(llm.stream(PROMPTS[0])),
        "the open stream": lambda: list(stream),
        "engine": lambda: llm.engine,
        "metrics": lambda: llm.get_metrics(),
        "cache": lambda: llm.reset_prefix_cache(),
    }
    for call in calls.values():
        with pytest.raises(EngineDead, match="shut down"):
            call()
    llm.shutdown()  # a second time does nothing


# ---- vLLM's names ---------------------------------------------------------------------------------


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
        ({"max_num_seqs": 0}, "--max-num-seqs 0: give at least 1"),
        ({"max_num_seqs": "4"}, "max_num_seqs='4': give a whole number"),
    ],
)
def test_unsupported_llm_keywords_raise(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("tiny", **given)


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


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    params, small = SamplingParams(max_tokens=3, ignore_eos=True), {"enforce_eager": True, "max_model_len": 64}
    with LLM("tiny", **small) as quiet:
        quiet.generate(PROMPTS[:2], params)
    assert capsys.readouterr().err == "", "no terminal, no bar"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LLM("tiny", **small):
        shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "Loading the model" in shown
    assert shown.endswith("\r"), "the bar of a start is gone when it ends"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LLM("tiny", use_tqdm_on_load=False, **small):
        assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    llm.generate(PROMPTS[:2], params)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "Prompts: 100%" in shown
    assert "2/2" in shown
    assert "tokens/s" in shown


def test_a_bar_counts_prompts(llm: LLM) -> None:
    counted: list[Any] = []

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            counted.append(total)

        def update(self, count: int) -> None:
            counted.append(count)

        def close(self) -> None:
            counted.append("closed")

    llm.generate(PROMPTS, SamplingParams(max_tokens=3, n=2, stop="e"), use_tqdm=Bar)
    assert counted == [4, 1, 1, 1, 1, "closed"]

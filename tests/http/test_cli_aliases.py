"""Other engines' names of flags: the same settings as the flags that they stand for, or an error that helps."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.http.conftest import ROOT
from tests.transport.nixl_library import use_library
from unisono.cli.aliases import ALIASES, translate
from unisono.cli.dotted import join_dotted
from unisono.config.flag_aliases import MAMBA_STRATEGIES, markdown
from unisono.types import ConfigError, SpeculativeConfig

LINE = (
    "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --reasoning-parser qwen3 --mamba-scheduler-strategy extra_buffer"
)
"""Of the launch line in ``docs/reference/command-line.md``, all but model and quantisation."""


def test_the_launch_line_runs_verbatim(served: Any) -> None:
    code, output, config, settings = served("tiny", *LINE.split())
    assert code == 0, output
    assert config.speculative == SpeculativeConfig("mtp", num_speculative_tokens=3)
    assert settings.reasoning_parser == "qwen3"
    assert "snapshots" in output
    page = (ROOT / "docs/reference/command-line.md").read_text()
    assert LINE in " ".join(page.replace("\\\n", " ").split())


def test_every_alias_is_the_flag_it_stands_for(served: Any) -> None:
    aliases = (
        "--model-path tiny --context-length=512 --mem-fraction-static 0.5 --max-running-requests 3 --tp 1 --tp-size=1 "
        "--tensor-parallel-size 1 --chunked-prefill-size 64 --random-seed 5 --disable-radix-cache --disable-cuda-graph "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path tiny-eagle3 --speculative-num-steps 2 "
        "--served-model-name me --host 0.0.0.0 --port 0"
    )
    flags = (
        "tiny --max-model-len 512 --gpu-memory-utilization 0.5 --max-num-seqs 3 --max-num-batched-tokens 64 --seed 5 "
        "--no-enable-prefix-caching --enforce-eager --speculative-method eagle3 --speculative-model tiny-eagle3 "
        "--num-speculative-tokens 2 --served-model-name me --host 0.0.0.0 --port 0"
    )
    given, meant = served(*aliases.split()), served(*flags.split())
    assert given == meant
    assert given[0] == 0
    assert given[2].seed == 5
    assert not given[2].enable_prefix_caching


def test_a_tree_counts_the_token_before_it(served: Any) -> None:
    tree = ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
    _, _, config, _ = served("tiny", *tree, "--speculative-num-steps", "3")
    assert len(config.speculative.token_tree) == 5
    text = '{"method": "eagle3", "topk": 2, "num_draft_tokens": 5, "num_speculative_tokens": 3}'
    assert config == served("tiny", "--speculative-config", text)[2]


def test_a_chain_is_as_long_as_its_steps(served: Any) -> None:
    chain = "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-num-draft-tokens 8"
    code, output, config, _ = served("tiny", *chain.split())
    assert code == 0
    assert config.speculative.num_speculative_tokens == 2
    assert "a chain of 2 steps verifies 3 tokens" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("tiny --context-lenght 512", "nearest known flag is --context-length"),
        ("tiny --max-num-seq 4", "nearest known flag is --max-num-seqs"),
        ("tiny --qwerty", "--qwerty is unknown. --help=all lists all flags"),
        ("tiny --tp 0", "--tensor-parallel-size 0: give at least 1"),
        ("tiny --tp-size x", "--tensor-parallel-size"),
        ("tiny --mamba-scheduler-strategy extra", "no_buffer, extra_buffer"),
        ("tiny --speculative-algorithm FAST", "NEXTN, MTP"),
        ("tiny --speculative-algorithm NGRAM --speculative-eagle-topk 4", "--speculative-num-draft-tokens"),
        ("tiny --model-path tiny", "named twice"),
        ("tiny --context-length", "needs a value"),
        ("tiny --reasoning-parser", "--reasoning-parser"),
        ("tiny --context-length 1", "--max-model-len 1: give at least 2"),
        ("tiny --mem-fraction-static 2", "--gpu-memory-utilization 2.0"),
        ("tiny --max-model-len auto", "auto: give a whole number of tokens from 1 on, such as 8192, 8k"),
        ("tiny --max-model-len 2.3456k", "Without the flag it is the model's context"),
        ("tiny --port 70000", "--port 70000: give at most 65535."),
        ("tiny --port -1", "--port -1: give at least 0."),
        ("tiny --max-num-seqs many", "--max-num-seqs many: give a whole number."),
        ("tiny --drain-timeout soon", "--drain-timeout soon: give a number."),
        ("tiny --attention-backend fast", "unknown attention backend. Supported: auto, torch, triton."),
        ("tiny -O3", "--compilation-config is not supported: graphs are set by --graphs"),
        ("tiny -cc.mode=3", "--compilation-config is not supported"),
        ("tiny --download-dir /x", "HF_HOME or HF_HUB_CACHE"),
        ("tiny --rope-scaling {}", "--hf-overrides"),
        ("tiny --enable-eplb", "unisono place-experts"),
        ("tiny --enable-priority-scheduling", "--scheduling-policy priority"),
        ("tiny --speculative-accept-threshold-acc 0.9", "give 1 or 1.0 or leave it out"),
        ("tiny --sampling-defaults mine", "choose one of model, openai"),
        ("tiny --speculative-config.method", "--speculative-config.method needs a value"),
        ("tiny --speculative-config {} --speculative-config.method ngram", "is set as JSON and by keys"),
        ("tiny --speculative-config.method ngram --speculative-config {}", "is set as JSON and by keys"),
        ("tiny --hf-overrides.a 1 --hf-overrides.a.b 1", "a already has a value that is not an object"),
        ("tiny --default-chat-template-kwargs [1]", "give a JSON object"),
    ],
)  # fmt: skip
def test_errors_name_the_way_out(served: Any, arguments: str, says: str) -> None:
    code, output, config, _ = served(*arguments.split())
    assert code == 2
    assert says in " ".join(output.split())
    assert "Traceback" not in output
    assert config is None


VLLM_LINE = (
    "tiny --max-model-len 2K --max-num-batched-tokens 0.5k --async-scheduling --no-enable-log-requests "
    "--cudagraph-capture-sizes 1 2 4 8 --data-parallel-backend mp --mm-encoder-tp-mode data -asc 1 "
    "--disable-hybrid-kv-cache-manager --enable-prompt-tokens-details --kv-cache-dtype auto --shutdown-timeout 5 "
    "--speculative-config.method ngram --speculative-config.num_speculative_tokens=2 --moe-backend triton "
    "--attention-backend FLASH_ATTN --prefix-caching-hash-algo sha256 -ep --cpu-offload-gb 0.5"
)
SGLANG_LINE = (
    "--model-path tiny --host 0.0.0.0 --log-requests --enable-cache-report --cuda-graph-bs 1 2 4 8 "
    "--attention-backend triton --moe-runner-backend triton --fp8-gemm-backend triton --speculative-algo NGRAM "
    "--speculative-num-steps 2 --lora-target-modules q_proj k_proj --mamba-ssm-dtype float32 "
    "--watchdog-timeout 300 --sampling-defaults openai --enable-symm-mem --num-continuous-decode-steps 4 "
    "--disable-shared-experts-fusion --tokenizer-worker-num 1"
)


def test_launch_lines_of_other_engines(served: Any) -> None:
    code, output, config, settings = served(*VLLM_LINE.split())
    assert code == 0, output
    assert (config.max_model_len, config.max_num_batched_tokens, config.attention_backend) == (2048, 500, "auto")
    assert config.speculative == SpeculativeConfig("ngram", num_speculative_tokens=2)
    assert (config.model, config.enable_expert_parallel, settings.drain_timeout) == ("tiny", True, 5.0)
    assert config.cpu_offload_gb == 0.5
    assert "--cpu-offload-gb 0.5: host memory for evicted KV pages; weights stay on the device." in output
    assert "--attention-backend FLASH_ATTN: no effect; kernels are chosen by shape and device" in output
    code, output, config, settings = served(*SGLANG_LINE.split())
    assert code == 0, output
    assert (config.model, config.attention_backend, config.generation_config) == ("tiny", "triton", "vllm")
    assert config.speculative == SpeculativeConfig("ngram", num_speculative_tokens=2)
    assert "--cuda-graph-bs 8: no effect" in output


@pytest.mark.parametrize(
    ("theirs", "ours"), [("awq_marlin", "awq"), ("gptq_marlin", "gptq"), ("modelopt_fp4", "modelopt"), ("fp8", "fp8")]
)
def test_weight_formats_by_every_name(theirs: str, ours: str) -> None:
    known = {"--quantization", "--attention-backend"}
    assert translate(["-q", theirs], known, ()).arguments == ["--quantization", ours]
    assert translate(["--attention-backend=torch_native"], known, ()).arguments == ["--attention-backend", "torch"]


def test_several_adapters_after_one_flag() -> None:
    arguments = translate(
        ["--lora-paths", "a=/x", "b=/y", "tiny"], {"--lora-modules"}, (), {"--lora-modules"}
    ).arguments
    assert arguments == ["--lora-modules", "a=/x", "--lora-modules", "b=/y", "tiny"]


def test_nested_keys_of_dotted_flags() -> None:
    assert join_dotted(["tiny", "--hf_overrides.rope.factor", "4.0", "--hf-overrides.name", "x y", "--", "--a.b"]) == [
        "tiny", "--hf-overrides", '{"rope": {"factor": 4.0}, "name": "x y"}', "--", "--a.b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("download-dir", "--download-dir is not supported: HF_HOME"),
        ("swap-space", "--swap-space has no effect: nothing is swapped"),
        ("block-size", "--block-size takes only 16: pages of the KV cache"),
    ],
)
def test_help_knows_flags_of_other_engines(served: Any, topic: str, says: str) -> None:
    code, output, _, _ = served(f"--help={topic}")
    assert (code, says in output) == (0, True), output


def test_names_may_have_underscores(served: Any) -> None:
    code, output, config, _ = served("tiny", "--max_num_seqs", "3", "--mem_fraction_static=0.5", "--enforce_eager")
    assert code == 0, output
    assert (config.max_num_seqs, config.gpu_memory_utilization, config.enforce_eager) == (3, 0.5, True)


def test_values_are_not_taken_for_flags() -> None:
    known, switches = {"--prompt", "--seed", "--json"}, {"--json"}
    arguments = ["--prompt", "--tp", "--json", "tiny", "--seed=3"]
    assert translate(arguments, known, switches).arguments == arguments
    with pytest.raises(ConfigError, match="--tp needs a value"):
        translate(["--tp"], known, switches)


def test_the_page_lists_every_alias() -> None:
    page = (ROOT / "docs/reference/flags.md").read_text()
    assert markdown() in page, "write the table: python scripts/reference.py"
    assert set(ALIASES) <= set(re.findall(r"`(--?[\w-]+)", page))
    assert all(strategy in page for strategy in MAMBA_STRATEGIES)


def test_the_prefix_cache_can_be_turned_off() -> None:
    """Without it no prompt token is cached, and the text is the same."""
    from unisono.entrypoints.llm import LLM
    from unisono.types import SamplingParams

    prompt, params = list(range(5, 105)), SamplingParams(temperature=0, max_tokens=4)
    texts = []
    for enabled in (True, False):
        with LLM(
            "tiny", device="cpu", max_num_seqs=2, max_model_len=256, enable_prefix_caching=enabled, graph_capture="lazy"
        ) as llm:
            outputs = [llm.generate(prompt, params)[0] for _ in range(2)]
            assert [output.num_cached_tokens for output in outputs] == [0, 96 if enabled else 0]
            assert json.dumps(llm.engine.info()["settings"]["enable_prefix_caching"]) == str(enabled).lower()
            texts += [output.outputs[0].token_ids for output in outputs]
    assert texts == [texts[0]] * 4


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--kv-offloading-size 4 --kv-offloading-backend native", (4.0, 0.0)),
        ("--hicache-size 3", (3.0, 0.0)),
        ("--enable-hierarchical-cache", (0.0, 2.0)),
        ("--enable-hierarchical-cache --hicache-ratio 5", (0.0, 5.0)),
        ("--hicache-ratio 5 --enable-hierarchical-cache", (0.0, 5.0)),
        ("--cpu-offload-gb 1.5", (1.5, 0.0)),
    ],
)
def test_kv_offload_by_every_name(served: Any, given: str, meant: tuple[float, float]) -> None:
    code, output, config, _ = served("tiny", *given.split())
    assert code == 0, output
    assert (config.cpu_offload_gb, config.cpu_offload_ratio) == meant


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("--disaggregation-mode prefill --transfer-listen tcp://127.0.0.1:0", "prefill"),
        ("--disaggregation-mode decode --prefill-url unix:///tmp/x", "decode"),
        ("--disaggregation-mode null", "both"),
        ('--kv-transfer-config {"kv_role":"kv_consumer"} --prefill-url localhost:9400', "decode"),
    ],
)
def test_roles_by_every_name(served: Any, given: str, role: str) -> None:
    code, output, config, _ = served("tiny", *given.split())
    assert code == 0, output
    assert config.role == role


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ("--disaggregation-transfer-backend auto", "auto"),
        ('--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}', "nixl"),
        ('--kv-transfer-config {"kv_connector":"P2pNcclConnector","kv_role":"kv_both"}', "tcp"),
    ],
)
def test_transfer_backends_by_every_name(
    served: Any, given: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_library("imitated", monkeypatch)
    code, output, config, _ = served("tiny", *given.split())
    assert code == 0, output
    assert config.transfer_backend == backend

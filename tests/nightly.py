"""Cells of matrices that the default suite leaves to the long matrix (``full``), because others cover them.

``tests/conftest.py`` marks every cell that no pattern of ``KEPT`` matches. Shapes are those of ``fnmatch``.
``tests/test_tiers.py`` checks that each entry names a test.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Kept(NamedTuple):
    """Patterns of the cell ids that stay in the default suite, and what covers the others."""

    cells: tuple[str, ...]
    covered_by: str


HALVES = Kept(("float16-*", "float16"), "both dtypes are summed in fp32; the tests against a reference have both")
STATE = Kept(
    ("chunks of 23, eager", "scarce pages"),
    "scarce pages runs all requests as one batch, with preemption; 23 cuts at other places than 16, and across pages",
)

KEPT: dict[str, Kept] = {
    # ---- engines and drafters ------------------------------------------------------------------------
    "engine/test_adaptive.py::test_same_bytes_with_random_draft_lengths": Kept(
        ("ngram", "standalone"),
        "test_hidden_states.py::test_drafted and test_mixed_chunk.py have eagle3 with random lengths, chunks and hits; "
        "mtp catches up and pauses by the same code (drafters/hidden.py)",
    ),
    "engine/test_adaptive.py::test_resumed_drafter_drafts_as_if_never_paused": Kept(
        ("eagle3", "standalone"), "eagle3: eagle and mtp share drafters/hidden.py; standalone has pages of its own"
    ),
    "engine/test_failures.py::test_one_request_fails": Kept(
        ("qwen3-*", "qwen3_next-slot fill", "qwen3_next-tokens"),
        "qwen3 has every stage; the two of qwen3_next release a snapshot before and after the first pass",
    ),
    "engine/test_failures.py::test_the_extremes_of_every_number_run": Kept(
        ("qwen3-*", "qwen3_next-temperature", "qwen3_next-max_tokens"),
        "numbers of sampling do not reach a model's layers; two cells run them over a recurrence",
    ),
    "engine/test_hybrids.py::test_same_bytes": Kept(
        ("*-ngram-*", "*-mtp-*"), "mtp has the same chunks and pages, and rounds with and without drafts"
    ),
    "engine/test_kv_fp8.py::test_same_bytes_with_chains": Kept(
        ("eagle3,*", "ngram,*", "standalone,*"),
        "hidden states, none, and pages of its own; eagle, mtp and suffix have the state of eagle3 and ngram, and "
        "mtp_frozen reads the target's pages as any pass does",
    ),
    "engine/test_offload.py::test_same_bytes": Kept(
        ("tiny-hybrid, mtp-*",), "its pages, snapshots and hidden states move; tiny, eagle3 has pages and hidden states"
    ),
    "engine/test_speculation.py::test_same_bytes": Kept(
        ("eagle3-k=5*", "mtp-k=3*", "mtp_frozen-k=1*", "ngram-k=5*", "standalone-k=5*"),
        "each kind of state once, each of the three ways to run; tests/graphs/test_matrix.py has eagle and suffix",
    ),
    "engine/test_trees.py::test_same_bytes": Kept(
        ("ngram-binary-*num_pages*", "standalone-uneven-*", "eagle-wide-*"),
        "each shape, way to run, and kind of drafter once; scarce pages include what k=0 alone runs; "
        "test_kv_fp8.py::test_same_bytes_with_trees and graphs/test_matrix.py::test_preempted have eagle3",
    ),
    "engine/test_parity.py::test_greedy_tokens_equal_transformers": Kept(
        ("llama", "gemma3_text", "gemma4_text", "gpt_oss", "mixtral", "deepseek_v3", "llama4_text", "minimax_m2"),
        "full attention, windows, sinks, latent attention, chunks, and three routers; models/test_parity.py compares "
        "the logits of every family with transformers, in chunks and rounds, too",
    ),
    "engine/test_long_hybrids.py::test_a_needle_and_a_tool_call_behind_cached_prefixes": Kept(
        ("random",), "http/test_tiny_hybrid.py has tool calls and drafts of tiny-hybrid, with its trained module"
    ),
    "engine/test_same_bytes.py::test_batching_and_chunking": Kept(
        ("batched", "chunks of 37", "eager"), "37 cuts at other places than 16, and across pages; batched has eight"
    ),
    "engine/test_sampler.py::test_batching_chunking_and_graphs_change_nothing": Kept(
        ("three at once, chunked", "eager"), "test_preemption_changes_nothing runs all requests as one batch"
    ),
    "engine/test_grammar.py::test_same_bytes": Kept(
        ("ngram-*", "eagle3-*", "tree of standalone-*"), "a chain of standalone is a tree with one path"
    ),
    "engine/test_thinking.py::test_same_bytes": Kept(("tree",), "a chain is a tree with one path"),
    "engine/test_weight_updates.py::test_answers_are_those_of_a_new_engine": Kept(
        ("eagle3", "mtp_frozen", "standalone"),
        "a head, frozen pages, and a model; mtp keeps what eagle3 keeps, and ngram has no weights to load",
    ),
    "engine/test_embeddings.py::test_the_text_is_that_of_the_ids": Kept(
        ("chunks of 37, segmented", "planned on the host"),
        "graphs/test_matrix.py::test_cells compares embeddings with eager passes",
    ),
    "drafters/test_trees.py::test_a_path_is_drafted_as_a_chain_of_its_tokens": Kept(
        ("eagle3", "standalone"), "eagle and mtp draft trees by the code of eagle3 (drafters/hidden.py)"
    ),
    "drafters/test_trees.py::test_drafter_state_after_tree_rounds_equals_sequential_state": Kept(
        ("eagle3",), "eagle and mtp keep what eagle3 keeps (drafters/hidden.py)"
    ),
    "drafters/test_gemma_assistant.py::test_text_equals_the_targets_own": Kept(
        ("layer inputs, clusters",),
        "test_every_draft_is_the_references has all checkpoints; the text depends on verification alone",
    ),
    "drafters/test_gemma_assistant.py::test_every_draft_is_the_references": Kept(
        ("values from keys-chunks", "clusters-one pass", "shared keys-chunks", "layer inputs, clusters-one pass",
         "experts-chunks"),
        "every checkpoint once, both ways to pass a prompt",
    ),
    "drafters/test_hybrid_mtp.py::test_random_modules_draft_for_random_weights": Kept(
        ("qwen3_5_text-2-*", "qwen3_5_moe-1-*"), "both families, and both numbers of modules"
    ),
    "drafters/test_gemma_assistant.py::test_drafts_in_fp8_leave_the_text": Kept(
        ("values from keys", "clusters"),
        "a head with clusters of tokens and one without; test_every_draft_is_the_references has the other targets",
    ),
    "drafters/test_eagle3.py::test_text_equals_the_targets_own": Kept(
        ("EAGLE-1 as published-*", "speculators of a Qwen3*"),
        "test_draft_steps_match_reference_forward has all formats; the text depends on verification alone",
    ),
    "drafters/test_blocks.py::test_text_equals_the_targets_own": Kept(
        ("DFlash as published-*", "DSpark as published-*", "DFlash2 as published-*"),
        "test_block_drafts_match_reference_forward has all formats; the text depends on verification alone",
    ),
    "drafters/test_blocks.py::test_hybrids": Kept(
        ("make_dspark",),
        "the state of a hybrid is the target's; test_block_drafts_match_reference_forward has all three",
    ),
    "drafters/test_mtp.py::test_every_draft_is_the_references": Kept(
        ("deepseek-1-preempted", "qwen-2-chunks*", "mimo-3-one pass"),
        "each family once, each way to pass a prompt once",
    ),
    "drafters/test_mtp.py::test_right_modules_are_always_accepted": Kept(
        ("one module-5*", "three modules-2", "three modules-5*"),
        "five drafts are more than there are modules, two are fewer",
    ),
    "drafters/test_mtp_fp8.py::test_the_text_is_the_one_without_drafts": Kept(
        ("qwen3_5_moe",), "its module has the layers of qwen3_5_text, and experts"
    ),
    "drafters/test_draft_quantization.py::test_the_text_is_the_one_without_drafts": Kept(
        ("mtp, tree",), "the text depends on verification alone; test_a_head_of_its_own_is_converted has eagle3 in fp8"
    ),
    "drafters/test_gemma_eagle3.py::test_text_equals_the_targets_own": Kept(
        ("a vocabulary of its own",), "the text depends on verification alone; the drafts are compared for both"
    ),
    "drafters/test_frozen.py::test_every_draft_is_the_references": Kept(
        ("full attention-chunks of 21", "window of 19-one pass", "window of 19-preempted"),
        "both kinds of attention, all three ways to pass a prompt",
    ),
    # ---- graphs --------------------------------------------------------------------------------------
    "graphs/test_matrix.py::test_larger_than_the_largest_bucket": Kept(
        ("eagle3-segmented",), "mtp-full: the planner's choice is that of graphs/test_planner.py, in both kinds"
    ),
    "graphs/test_matrix.py::test_cells": Kept(
        ("none-*", "eagle3-*", "combined-*", "dspark-*", "dflash-full-*", "eagle-*", "mtp_frozen-*", "ngram-*",
         "suffix-*", "standalone-*", "mtp-*"),
        "dflash-full has the passes of dflash-segmented, and dspark-segmented the segments of a block drafter",
    ),
    "graphs/test_matrix.py::test_preempted": Kept(
        ("eagle3-full",), "test_cells runs segments of every drafter; preemption makes no pass of another kind"
    ),
    "graphs/test_commands.py::test_another_worker_replays_the_stream": Kept(
        ("tree of eagle3",), "a chain's commands are those of a tree with one path"
    ),
    "graphs/test_outputs_ready.py::test_outputs_are_published_before_the_drafter_runs": Kept(
        ("eagle3-None", "ngram-None", "mtp_frozen-None", "standalone-{*", "eagle3-{*"),
        "each kind of state once, trees of two; passes/verify.py and extend.py publish before any drafter runs",
    ),
    "graphs/test_outputs_ready.py::test_no_op_writes_outputs_after_publication": Kept(
        ("none-None", "eagle3-None", "ngram-None", "mtp_frozen-None", "standalone-{*", "eagle3-{*"),
        "as above",
    ),
    # ---- models --------------------------------------------------------------------------------------
    "models/test_gemma_vision.py::test_gemma4_videos_are_transformers": Kept(
        ("both ways in windows-21", "causal*-21", "experts*-128", "12B-128"),
        "test_gemma4_logits_and_text_are_transformers cuts the pictures of every kind at both lengths",
    ),
    "models/test_gemma.py::test_greedy_tokens_equal_transformers": Kept(
        ("gemma4-layer-inputs", "gemma4-experts"),
        "engine/test_parity.py has gemma3_text and gemma4_text: batched, alone in chunks, after prefix hits; layers "
        "with inputs share keys, too; models/test_parity.py compares logits of all",
    ),
    "models/test_gemma.py::test_sampled_tokens_are_the_same_with_drafts_and_scarce_pages": Kept(
        ("gemma3", "gemma4-layer-inputs"),
        "gemma2 has the windows of gemma3; layers with inputs share keys, too; graphs/test_columns.py drafts for "
        "shared keys, engine/test_every_architecture.py for gemma4_text, and the greedy test for experts",
    ),
    "models/test_quantised.py::test_the_text_depends_on_the_weights_alone": Kept(
        ("fp8-blocks", "compressed-nvfp4", "gptq-8-bits-desc-act"),
        "one of each width; test_logits_are_those_of_the_dequantised_weights has all formats, and kernels/test_int4.py "
        "and test_int8.py compare rows alone and in batches",
    ),
    "models/test_quantised_experts.py::test_the_text_depends_on_the_weights_alone": Kept(
        ("fp8-blocks", "gptq-8-bits-asymmetric"), "two widths; kernels/test_experts_quantised.py has the others"
    ),
    "models/test_pixtral.py::test_drafts_change_no_byte": Kept(
        ("mistral",), "ministral3 differs in its text model, a row of engine/test_table_parity.py"
    ),
    "models/test_parity.py::test_logits_are_independent_of_chunking": Kept(
        ("*-batched", "*-chunks-of-19", "*-rounds-of-4", "llama-llama3-rope-*", "mixtral-r*", "mixtral-a*", "gemma3-r*",
         "gemma4-experts-*", "gpt_oss-*", "glm4_moe-r*", "deepseek_v3-r*", "llama4-r*"),
        "rounds of one token, together and alone: one dense family, experts, windows, latent attention and sinks; a "
        "layer does not know the width of a round, and kernels/test_attention.py has all widths; "
        "test_the_ends_of_rows_alone_have_the_same_bits ends with a round of one token for every case",
    ),
    "models/test_hybrid_parity.py::test_logits_are_independent_of_chunking": Kept(
        ("*-batched", "*-chunks-of-19", "*-rounds-of-4", "qwen3_5-chunks-of-16", "qwen3_5-rounds-of-1",
         "qwen3_5_moe-rounds-of-1", "qwen3_next-chunks-of-16", "qwen3_next-rounds-of-1"),
        "every way for each kind of layer; variants of sizes, towers and tied heads have three ways",
    ),
    "models/test_gated_delta.py::test_same_bytes": STATE,
    "kv/test_mixed_model.py::test_same_bytes": Kept(
        ("scarce pages",), "models/test_gated_delta.py::test_same_bytes has chunks of 23; scarce pages is one batch"
    ),
    # ---- ranks ---------------------------------------------------------------------------------------
    "distributed/test_families.py::test_two_ranks_change_nothing": Kept(
        ("glm4_moe_lite", "minimax_m2", "lfm2_moe", "granitemoehybrid", "kimi_linear"),
        "test_a_module_of_nemotron_changes_nothing runs nemotron_h on two ranks, with its module",
    ),
    "distributed/test_families.py::test_drafts_and_chunks_change_nothing": Kept(
        ("lfm2_moe", "nemotron_h"),
        "no ranks are in it: models/test_parity.py and test_hybrid_parity.py have the chunks of all five; "
        "test_two_ranks_change_nothing has all five",
    ),
    "distributed/test_draft_ranks.py::test_a_rank_keeps_its_heads_of_the_draft_only": Kept(
        ("eagle3",), "drafters/base.py divides both alike; test_default_division_of_draft_layers has a draft model"
    ),
    # ---- http ----------------------------------------------------------------------------------------
    "http/test_connection.py::test_request_bodies_are_freed_after_preparation": Kept(
        ("/v1/messages",),
        "a body that was translated, which two objects hold; all routes read through routes/common.py::parsed_body",
    ),
    "http/test_lifecycle.py::test_a_signal_drains_and_exits_0": Kept(
        ("15",), "one handler takes both; test_restart.py::test_ctrl_c_while_the_engine_restarts sends the other"
    ),
    # ---- kernels: the interpreter runs each program in Python ---------------------------------------
    "kernels/test_kv_e4m3.py::test_attention_over_the_pages_is_right_and_the_same_everywhere": Kept(
        ("True-dtype3-*", "True-dtype7-*", "True-dtype12-*", "False-*"),
        "both dtypes and all three head sizes of the kernel; the twin has every cell",
    ),
    "kernels/test_experts.py::test_rows_are_exact": HALVES,
    "kernels/test_experts.py::test_plans_and_tiles_have_the_same_bits": HALVES,
    "kernels/test_router.py::test_rows_are_exact": HALVES,
    "kernels/test_activation.py::test_gates_are_exact_in_any_batch": HALVES,
    "kernels/test_vision.py::test_attention_has_the_same_bits_at_any_tile": HALVES,
    "kernels/test_fp8_linear_norm.py::test_both_ways_to_multiply_give_the_same_bits": HALVES,
    "kernels/test_sampling.py::test_the_kernels_pick_the_twins_tokens": Kept(
        ("float32-1-1", "float32-7-2", "float16-1000-1", "float16-4099-1"), "each size once, each dtype twice"
    ),
    "kernels/test_attention.py::test_rounds_have_the_bits_of_extend": Kept(
        ("1-0-triton", "4-100-triton", "17-100-triton", "*-twin"),
        "the narrowest, a middle and the widest round; 2 and 6 are tiles between them; the twin has all widths",
    ),
    "kernels/test_lookup_tree.py::test_paths_equal_the_oracle": Kept(
        ("kernel-[0-3]", "twin-*"), "seeds of one generator; the twin has eight"
    ),
    "kernels/test_lookup.py::test_the_vote_equals_the_oracle": Kept(
        ("kernel-[0-3]", "twin-*"), "seeds of one generator; the twin has eight"
    ),
}  # fmt: skip
"""``path::test`` below tests/ -> the cells of the default suite."""


def left_to_night(test: str, cell: str) -> bool:
    """True if only the long matrix runs this cell. test: as in ``KEPT``. cell: the text between the brackets."""
    kept = KEPT.get(test)
    return kept is not None and not any(fnmatchcase(cell, pattern) for pattern in kept.cells)

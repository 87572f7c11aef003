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
        ("eagle3", "ngram", "standalone"), "eagle3: mtp catches up and pauses by the same code (drafters/hidden.py)"
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
        ("eagle3,*", "mtp_frozen,*", "ngram,*", "standalone,*"),
        "one of each kind of state: hidden states, frozen pages, none, pages of its own; eagle, mtp and suffix have "
        "that of eagle3 and ngram",
    ),
    "engine/test_offload.py::test_same_bytes": Kept(
        ("tiny-hybrid, mtp-*",), "its pages, snapshots and hidden states move; tiny, eagle3 has pages and hidden states"
    ),
    "engine/test_speculation.py::test_same_bytes": Kept(
        ("eagle-k=3*", "eagle3-k=5*", "mtp-k=3*", "mtp_frozen-k=1*", "ngram-k=5*", "standalone-k=5*", "suffix-k=1*"),
        "each drafter once, each of the three ways to run twice or more; tests/graphs/test_matrix.py has all drafters",
    ),
    "engine/test_trees.py::test_same_bytes": Kept(
        ("ngram-binary-*num_pages*", "standalone-uneven-*", "eagle-wide-*", "eagle3-binary-*num_pages*"),
        "each shape, way to run, and kind of drafter once; scarce pages include what k=0 alone runs",
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
        ("layer inputs, clusters", "experts"),
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
    "drafters/test_eagle3.py::test_text_equals_the_targets_own": Kept(
        ("EAGLE-1 as published-*", "SGLang,*", "speculators of a Qwen3*"),
        "test_draft_steps_match_reference_forward has all formats; the text depends on verification alone",
    ),
    "drafters/test_frozen.py::test_every_draft_is_the_references": Kept(
        ("full attention-chunks of 21", "window of 19-one pass", "window of 19-preempted"),
        "both kinds of attention, all three ways to pass a prompt",
    ),
    # ---- graphs --------------------------------------------------------------------------------------
    "graphs/test_matrix.py::test_larger_than_the_largest_bucket": Kept(
        ("eagle3-segmented",), "mtp-full: the planner's choice is that of graphs/test_planner.py, in both kinds"
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
    "models/test_gemma.py::test_greedy_tokens_equal_transformers": Kept(
        ("gemma4-*",),
        "engine/test_parity.py has gemma2, gemma3_text and gemma4_text: batched, alone in chunks, after prefix hits",
    ),
    "models/test_parity.py::test_logits_are_independent_of_chunking": Kept(
        ("*-batched", "*-chunks-of-7", "*-rounds-of-4", "llama-llama3-rope-*", "mixtral*", "*moe*", "*gemma*", "*oss*"),
        "rounds of one token, together and alone: one dense family, experts, windows and sinks; a layer does not know "
        "the width of a round, and kernels/test_attention.py has all widths",
    ),
    "models/test_hybrid_parity.py::test_logits_are_independent_of_chunking": Kept(
        ("*-batched", "*-chunks-of-7", "*-rounds-of-4", "qwen3_5-chunks-of-16", "qwen3_5-rounds-of-1",
         "qwen3_5_moe-rounds-of-1", "qwen3_next-chunks-of-16", "qwen3_next-rounds-of-1"),
        "every way for each kind of layer; variants of sizes, towers and tied heads have three ways",
    ),
    "models/test_gated_delta.py::test_same_bytes": STATE,
    "kv/test_mixed_model.py::test_same_bytes": STATE,
    # ---- http ----------------------------------------------------------------------------------------
    "http/test_connection.py::test_request_bodies_are_freed_after_preparation": Kept(
        ("/v1/chat/completions", "/v1/messages"),
        "one body as it came and one that was translated; all routes read through routes/common.py::parsed_body",
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

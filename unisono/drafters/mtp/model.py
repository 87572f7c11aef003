"""Multi-token prediction modules: each continues from hidden states and predicts one more token.

Owns a module's forward pass and its parameters (uninitialised until ``mtp/checkpoint.py`` fills them). Inference only;
called by drafters.

A module joins the embedding of the token at position p with the hidden state that predicted it, and continues as the
target does: block, final norm, LM head (DeepSeek-V3, arXiv 2412.19437, section 2.2)::

    g_i[p] = norm_i(block_i(project_i([embed_norm_i(embed(x[p])) ; hidden_norm_i(g_{i-1}[p-1])])))
    g_{-1}: the target's hidden states          lm_head(g_i[p]) predicts x[p+1]

The target's states and the modules' own are both taken *after* the final norm. The report does not say so; SGLang
(deepseek_nextn, qwen3_next_mtp, mimo_mtp), vLLM (since #45895) and transformers (``MtpLayer``) do, and engines that
took the state before it had lower acceptance (vLLM #46075, #47448). The embedding comes first in ``project``'s input,
although the report's equation 21 has it last: this is the order of all weights but those of MiMo's first models. vLLM
and, for MiMo, SGLang zero the embedding of the first entry; DeepSeek's SGLang code and transformers do not, nor does
this.

Shapes: T tokens in a pass, R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.distributed.columns import Columns
from unisono.drafters.eagle.model import DraftBlock
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.models.blocks.layers import Stream
from unisono.models.config import DecoderConfig
from unisono.models.load.build import Builder


class MTPModule(DraftBlock):
    """One module: a block of the shape ``config`` between a projection and a norm. Its interface is that of any draft
    head (``drafters/eagle/model.py``).

    embed, lm_head: the target's, unless the checkpoint has others.
    hidden_first: ``project`` takes the hidden state before the embedding.
    """

    def __init__(
        self, config: DecoderConfig, embed: Embedding, lm_head: Linear, builder: Builder, hidden_first: bool = False
    ) -> None:
        super().__init__(config, embed, lm_head)
        hidden, self.hidden_first = builder.hidden_size, hidden_first
        self.embed_norm = builder.norm()
        self.hidden_norm = builder.norm()
        self.project = builder.joined("project", 2 * hidden, hidden, split_inputs=False)
        self.layer = config.layers[0].build(builder.at("layer"))
        self.norm = builder.norm()

    def begin(self, token_ids: torch.Tensor, hidden: torch.Tensor, overriding: Sequence[Overriding] = ()) -> Stream:
        pair = (self.embed_norm(self.embedded(token_ids, overriding)), self.hidden_norm(hidden))
        return self.layer.begin(self.project(torch.cat(pair[::-1] if self.hidden_first else pair, dim=1)))

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | Columns]:
        """out [R, H] -> (hidden state for the next step [R, H], logits [R, V], not gathered)."""
        normed = self.norm(out)
        return normed, self.lm_head.columns(normed)

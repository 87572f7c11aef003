"""Multi-token prediction: modules that go on from the target's hidden states, each one token further.

Owns a module's forward pass and its parameters (uninitialised until ``mtp_checkpoint`` fills them). Inference
only; drafters call it.

A module joins the embedding of the token at position p with the hidden state that predicted it, and goes on as the
target does: block, final norm, LM head (DeepSeek-V3, arXiv 2412.19437, section 2.2)::

    g_i[p] = norm_i(block_i(project_i([embed_norm_i(embed(x[p])) ; hidden_norm_i(g_{i-1}[p-1])])))
    g_{-1}: the target's hidden states          lm_head(g_i[p]) predicts x[p+1]

The target's states and the modules' own are both taken *after* the final norm. The report does not say so; SGLang
(deepseek_nextn, qwen3_next_mtp, mimo_mtp), vLLM (since #45895) and transformers (``MtpLayer``) do, and where an
engine took the state before it, acceptance fell (vLLM #46075, #47448). The embedding comes first in ``project``'s
input, though the report's equation 21 has it last: so are the weights of all but MiMo's first models. vLLM and,
for MiMo, SGLang zero the embedding of the first entry; DeepSeek's SGLang code and transformers do not, nor does this.

Shapes: T tokens in a pass, R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionBackend
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear
from unisono.layers.norm import RMSNorm
from unisono.models.config import DecoderConfig
from unisono.models.decoder import DecoderLayer
from unisono.models.draft import DraftBlock


class MTPModule(DraftBlock):
    """One module: a block of the shape ``config`` between a projection and a norm. Drafters ask of it what they ask
    of any draft head (``models/draft.py``).

    embed, lm_head, cos_sin: the target's, unless the checkpoint has others. hidden_first: ``project`` takes the
    hidden state before the embedding.
    """

    ids: torch.Tensor | None = None  # every logit is of the target's token of the same number

    def __init__(
        self,
        config: DecoderConfig,
        hidden_first: bool,
        embed: Embedding,
        lm_head: Linear,
        cos_sin: torch.Tensor,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_eps
        self.config, self.backend, self.hidden_first = config, backend, hidden_first
        self.embed, self.lm_head, self.cos_sin = embed, lm_head, cos_sin
        self.embed_norm = RMSNorm(hidden, eps, dtype, device)
        self.hidden_norm = RMSNorm(hidden, eps, dtype, device)
        self.project = Linear(2 * hidden, hidden, False, dtype, device)
        self.layer = DecoderLayer(config, config.windows[0], backend, dtype, device)
        self.norm = RMSNorm(hidden, eps, dtype, device)

    def encode(self, seen: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as they are: [T, H]."""
        return seen

    def joined(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        pair = (self.embed_norm(self.embed(token_ids)), self.hidden_norm(hidden))
        return self.project(torch.cat(pair[::-1] if self.hidden_first else pair, dim=1))

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out [R, H] -> (hidden state for the next step [R, H], logits [R, V])."""
        normed = self.norm(out)
        return normed, self.lm_head(normed)

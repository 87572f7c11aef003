"""Experts that the MoE layers of a model chose for tokens, on their way between rooms and processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ITEM_BYTES = {"uint8": 1, "uint16": 2}
"""Bytes of an id by dtype."""


@dataclass(frozen=True, slots=True)
class ExpertIds:
    """Expert ids of tokens.

    dtype: uint8 up to 256 experts, else uint16. layers: number of MoE layers. top_k: choices of a layer. data: ids
    [tokens, layers, top_k] in native byte order, a layer's choices from the likeliest on.
    """

    dtype: str
    layers: int
    top_k: int
    data: bytes = b""

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.layers * self.top_k * ITEM_BYTES[self.dtype]

    def head(self, rows: int) -> ExpertIds:
        """The first ``rows`` tokens, or all if there are fewer."""
        return replace(self, data=self.data[: rows * self.row_bytes])

    def joined(self, later: ExpertIds) -> ExpertIds:
        """These tokens followed by those of ``later``."""
        return replace(self, data=self.data + later.data)

    def array(self) -> np.ndarray:
        """The ids [tokens, layers, top_k]."""
        import numpy as np  # 0.1 s, which an API process spends after it has started its engine

        return np.frombuffer(self.data, self.dtype).reshape(-1, self.layers, self.top_k)

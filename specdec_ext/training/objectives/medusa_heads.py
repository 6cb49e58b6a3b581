"""``MedusaObjective``: Medusa-1 (Cai et al. 2024, section 2.2.1), heads on a frozen target.

Head i reads the target's last hidden state of token t and predicts x[t+2+i], which is step i of the
objective. The heads do not see each other's predictions.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.training.data.batches import Batch
from specdec_ext.training.objectives.objective import Objective, Step, rows_of


class MedusaObjective(Objective):
    """Medusa heads with gradients.

    Args:
        heads: the initial heads.
        decay: weight of each head's loss relative to that of the head before.
    """

    def __init__(self, heads: MedusaHeads, decay: float = 0.8):
        super().__init__(heads, heads.config.num_heads, decay)
        self.config = heads.config
        self.deepest = heads.config.num_heads

    def unroll(self, batch: Batch, steps: int, elements: Tensor | None = None) -> Iterator[Step]:
        # All weights have one dtype.
        hidden = batch.last_hidden[:, :-2].to(self.weight("lm_heads.0.weight").dtype)
        if elements is not None:
            hidden = rows_of(hidden, elements)
        for head in range(steps):
            lm_head = self.weight(f"lm_heads.{0 if self.config.shared_lm_head else head}.weight")
            x: Tensor = hidden
            for layer in range(self.config.num_layers):
                block = f"blocks.{head}.{layer}"
                bias = self.weight(f"{block}.bias") if self.config.bias else None
                x = x + F.silu(F.linear(x, self.weight(f"{block}.weight"), bias))
            yield Step(x, lm_head)

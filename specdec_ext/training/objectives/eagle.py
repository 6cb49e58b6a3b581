"""``EagleObjective``: training-time test of EAGLE-3 (Li et al. 2025, section 3.2), for the EAGLE family.

A head drafts several tokens from the auxiliary hidden states of the last committed token, by feeding its own
output back. It is trained in the same way, at all elements t of a text at once::

    step 0   reads (embedding of x[t+1], auxiliary hidden states g[t]) at position t
    step i   reads (embedding of x[t+1+i], feedback of element t of step i - 1, with its gradients) at t + i;
             P-EAGLE (arXiv 2602.01469): (embedding of the mask token, mask_hidden)

The layers are those of the specification (:class:`~specdec_ext.reference.draft_head_layers.HeadFormulas`).
Element t of step i attends to the elements up to t of step 0 and to element t of steps 1 to i
(:mod:`specdec_ext.training.objectives.attention`), as a drafted node attends to the committed elements and
its ancestors. No other element reads element t of steps 1 to i, so these compute only the elements with
tokens of the loss mask ahead: the prompt of a chat costs one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.rope import rope_tables
from specdec_ext.reference.draft_head_layers import HeadFormulas
from specdec_ext.training.data.batches import Batch
from specdec_ext.training.objectives.attention import unrolled_attention
from specdec_ext.training.objectives.objective import Objective, Step, rows_of

Past = tuple[list[Tensor], list[Tensor]]


class EagleObjective(HeadFormulas, Objective):
    """A draft head of the EAGLE family with gradients.

    Args:
        head: the initial head.
        embedding: ``[vocab, hidden]`` of the target, used if the head has none of its own; it is not trained.
        lm_head: ``[draft_vocab, hidden]`` of the target, under the same conditions.
        steps: number of steps of training-time test.
        decay: weight of each step's loss relative to that of the step before.
    """

    def __init__(
        self,
        head: DraftHead,
        embedding: Tensor,
        lm_head: Tensor,
        steps: int = 5,
        decay: float = 0.8,
    ):
        super().__init__(head, steps, decay)
        self.config, self.logit_scale = head.config, head.config.logit_scale
        for name, given in (("embed_tokens", embedding), ("lm_head", lm_head)):
            shared = None if f"{name}.weight" in head.tensors else given.detach()
            self.register_buffer(f"target_{name}", shared, persistent=False)

    def unroll(self, batch: Batch, steps: int, elements: Tensor | None = None) -> Iterator[Step]:
        config, columns = self.config, batch.tokens.shape[1]
        embedding, lm_head = self._maybe_shared("embed_tokens"), self._maybe_shared("lm_head")
        wide = torch.float64 if lm_head.dtype == torch.float64 else torch.float32
        cosines, sines = (
            table.to(batch.tokens.device) for table in rope_tables(config, columns + steps, wide)
        )
        past: list[Past] = [([], []) for _ in range(config.num_layers)]
        n = columns - 2
        if elements is not None and elements.shape[1] == n:
            elements = None  # a causal block is faster than the same as a mask
        # Tokens after the text: the last elements of later steps read them, and nothing depends on these.
        padded = F.pad(batch.tokens, (0, steps))
        # Output of the step before; at step 0 the target's hidden states.
        feedback = batch.features[:, :n].to(lm_head.dtype)
        for step in range(steps):
            # Step 0 computes all elements, because the later steps attend to its keys and values.
            computed = None if step == 0 else elements
            if computed is None:
                tokens = padded[:, 1 + step : 1 + step + n]
                tables = cosines[step : step + n], sines[step : step + n]
            else:
                tokens = padded.gather(1, 1 + step + computed)
                tables = cosines[step + computed][:, None], sines[step + computed][:, None]
            if step == 0:
                embedded = F.embedding(tokens, embedding)
                hidden = self.combine(embedded, feedback)
            elif config.mask_token_id is not None:
                embedded = F.embedding(torch.full_like(tokens, config.mask_token_id), embedding)
                mask = self.weight("mask_hidden").expand(*tokens.shape, -1)
                hidden = self.combine(embedded, mask)
            else:
                embedded = F.embedding(tokens, embedding)
                hidden = self.feed_back(embedded, feedback)
            for index in range(config.num_layers):
                hidden = self.layer(index, embedded, hidden, tables, past[index], computed)
            if step == 0 and elements is not None:
                hidden = rows_of(hidden, elements)
            normed, feedback = self.output(hidden)
            yield Step(normed, lm_head)

    def _maybe_shared(self, name: str) -> Tensor:
        shared: Tensor | None = getattr(self, f"target_{name}")
        return self.weight(f"{name}.weight") if shared is None else shared

    def _attention(self, index: int, attended: Tensor, *context: Any) -> Tensor:
        """Attention over the earlier steps; appends the keys and values of this step to them."""
        tables: tuple[Tensor, Tensor] = context[0]
        past: Past = context[1]
        elements: Tensor | None = context[2]
        queries, keys, values = self.projections(index, attended)
        past[0].append(_rotate(keys, *tables))
        past[1].append(values)
        mixed = unrolled_attention(
            _rotate(queries, *tables), *past, self.config.sliding_windows[index], elements
        )
        return self._linear(f"layers.{index}.self_attn.o_proj", mixed.transpose(1, 2).flatten(2))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weight(f"{name}.weight")
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.config.rms_norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = f"{name}.bias".replace(".", "/")
        return F.linear(x, self.weight(f"{name}.weight"), self.weights.get(bias))


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate ``[rows, heads, n, head_dim]`` by position; element i is paired with ``rotary / 2 + i``.

    Args:
        cosines, sines: ``[n, rotary / 2]``, or ``[rows, 1, n, rotary / 2]``.
    """
    half = cosines.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    rotated = [first * cosines - second * sines, second * cosines + first * sines, rest]
    return torch.cat(rotated, dim=-1)

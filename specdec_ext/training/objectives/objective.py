"""``Objective``: the training objective of draft heads of all kinds, to predict the target some tokens ahead.

Drafting begins after a committed token x[t+1]. The target has computed hidden states up to x[t], but not yet
that of x[t+1]. In every kind of head, *step* i of *element* t therefore predicts token x[t+2+i], from hidden
states up to t and, depending on the kind, tokens x[t+1] .. x[t+1+i]. The target's own prediction of that
token is the distribution after x[t+1+i]::

    loss_i   soft cross entropy to the target's distribution at t + 1 + i over the draft vocabulary, mean over
             the elements whose predicted token x[t+2+i] is in the loss mask and for which the target's most
             probable token is in the draft vocabulary
    loss     sum over i of decay ** i * loss_i          (decay is 0.8 in Li et al. 2025, "EAGLE-3")

The published trainers apply the loss mask of token t or t + 1. Here the mask of the predicted token applies,
so the first token of an answer counts and the token after its last one does not.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec_ext.heads.weights import DraftWeights
from specdec_ext.training.data.batches import COLUMNS, Batch
from specdec_ext.training.objectives.loss import soft_cross_entropy
from specdec_ext.training.objectives.noise import noise_of_choice
from specdec_ext.training.objectives.teacher import Teacher

_TEACHER_CHUNK = 1024
# An evaluation computes the logits of this many elements at a time.
_EVALUATION_CHUNK = 256


@dataclass(frozen=True)
class Step:
    """The output of one step for all elements.

    Attributes:
        hidden: ``[rows, m, hidden]`` input of the output head for the m elements that are wanted. At step i,
            the last i of a text's ``columns - 2`` elements predict no token of it.
        lm_head: ``[draft_vocab, hidden]`` weight of the output head.
    """

    hidden: Tensor
    lm_head: Tensor


@dataclass(frozen=True)
class Agreement:
    """Which draft tokens of a head would be accepted, at elements whose predicted tokens are all in the mask.

    Attributes:
        places: ``[elements]`` int64 index of each element; consecutive elements of a text have consecutive
            places, and texts are separated by a gap.
        accepted: ``[elements, steps]`` bool.
    """

    places: Tensor
    accepted: Tensor


class Objective(nn.Module, ABC):
    """Draft weights with gradients, and their loss.

    Args:
        weights: the initial weights.
        steps: number of tokens ahead that are trained.
        decay: weight of each step's loss relative to that of the step before.
    """

    # The most tokens that the weights can draft; unlimited for a head that feeds its output back.
    deepest = sys.maxsize
    # Factor on the logits.
    logit_scale = 1.0
    draft_to_target: Tensor | None

    def __init__(self, weights: DraftWeights, steps: int, decay: float):
        super().__init__()
        self._initial, self.steps, self.decay = weights, steps, decay
        floating = {
            name: tensor for name, tensor in weights.tensors.items() if tensor.is_floating_point()
        }
        # A module's parameters may not have dots in their names.
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(tensor.detach().clone())
                for name, tensor in floating.items()
            }
        )
        self.register_buffer("draft_to_target", weights.tensors.get("draft_to_target"))

    @abstractmethod
    def unroll(self, batch: Batch, steps: int, elements: Tensor | None = None) -> Iterator[Step]:
        """Yield the steps 0 .. ``steps - 1``; each is computed when it is requested.

        Args:
            batch: the texts.
            steps: number of steps.
            elements: ``[rows, m]`` int64, the elements of each text that the steps are wanted of; None for
                all ``columns - 2`` of them.
        """

    def trained(self) -> Any:
        """Return the current weights without gradients, as an object of the same type as the initial ones."""
        tensors = {
            name: self.weight(name).detach().clone() if tensor.is_floating_point() else tensor
            for name, tensor in self._initial.tensors.items()
        }
        return replace(self._initial, tensors=tensors)

    def weight(self, name: str) -> Tensor:
        tensor: Tensor = self.weights[name.replace(".", "/")]
        return tensor

    def forward(
        self, batch: Batch, teacher: Teacher, total: Callable[[Tensor], Tensor] = lambda x: x
    ) -> tuple[Tensor, Tensor]:
        """Compute ``(loss, losses [steps] without gradients)`` of a batch.

        Args:
            batch: at least one text must have ``steps + 2`` tokens.
            teacher: of the target.
            total: sums a tensor over all processes. The losses are divided by the number of elements of all
                processes, so their sum over the processes is the loss of the whole batch.
        """
        batch = batch.rounded()
        rows, columns = batch.tokens.shape
        predicts = self._predicts(batch, self.steps)
        elements = _rounded_nonzero(predicts.any(dim=0))
        wanted = predicts.gather(2, elements.expand(self.steps, -1, -1))
        # Step i of element t learns the target's distribution of column t + 1 + i. The columns of all rows
        # are counted together; those of unwanted elements may lie behind the last one.
        first = columns * torch.arange(rows, device=elements.device)[:, None] + 1 + elements
        learned = torch.stack([first + step for step in range(self.steps)])
        taught = torch.zeros(rows * columns + self.steps, dtype=torch.bool, device=elements.device)
        taught[learned[wanted]] = True
        row_of_probs = taught.cumsum(dim=0) - 1
        probs, known = self._teach(
            teacher, batch.last_hidden.flatten(0, 1)[taught[: rows * columns]]
        )
        wanted = wanted & taught.masked_scatter(taught, known)[learned]
        counts = total(wanted.sum(dim=(1, 2))).clamp(min=1)
        losses = []
        for step, output in enumerate(self.unroll(batch, self.steps, elements)):
            sum_of_losses = soft_cross_entropy(
                _autocast(output.hidden[wanted[step]]),
                output.lm_head,
                probs,
                row_of_probs[learned[step][wanted[step]]],
                self.logit_scale,
            )
            losses.append(sum_of_losses / counts[step])
        stacked = torch.stack(losses)
        decay = self.decay ** torch.arange(self.steps, device=stacked.device)
        return (decay * stacked).sum(), stacked.detach()

    @torch.no_grad()
    def agreement(
        self,
        batch: Batch,
        teacher: Teacher,
        steps: int,
        noise: torch.Generator | None = None,
    ) -> Agreement:
        """Compare ``steps`` draft tokens at every element with those that the target adds; the text is fed.

        Args:
            batch: the texts.
            teacher: of the target.
            steps: number of draft tokens at each element.
            noise: None compares the head's best token with the target's, as in greedy decoding. A generator
                compares coupled drafts with the tokens of a text that the target sampled at temperature 1
                (:func:`~specdec_ext.training.objectives.noise.noise_of_choice`).
        """
        columns, batch = batch.tokens.shape[1], batch.rounded()
        usable = self._predicts(batch, steps).all(dim=0)
        rows, at = usable.nonzero(as_tuple=True)
        elements = _rounded_nonzero(usable)
        mine = usable.gather(1, elements)
        ids, accepted = self.draft_to_target, []
        for step, output in enumerate(self.unroll(batch, steps, elements)):
            hidden = _autocast(output.hidden[mine])
            lm_head = output.lm_head.to(hidden.dtype).mT
            states = batch.last_hidden[rows, at + 1 + step]
            follow = batch.tokens[rows, at + 2 + step]
            right = []
            for part in torch.arange(len(rows), device=rows.device).split(_EVALUATION_CHUNK):
                logits = (hidden[part] @ lm_head).float() * self.logit_scale
                wanted, teaching = follow[part], teacher.logits(states[part])
                if noise is None:
                    wanted = teaching.argmax(dim=-1)
                else:
                    drawn = noise_of_choice(teaching, wanted, noise)
                    logits = logits + (drawn if ids is None else drawn[:, ids])
                drafted = logits.argmax(dim=-1)
                right.append((drafted if ids is None else ids[drafted]) == wanted)
            accepted.append(torch.cat(right) if right else follow.bool())
        places = rows * columns + at
        return Agreement(places, torch.stack(accepted, dim=1))

    @torch.no_grad()
    def _teach(self, teacher: Teacher, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the target's distributions from its last hidden states ``[n, hidden]``.

        Returns:
            ``probs [n, draft_vocab]`` over the draft vocabulary, and ``known [n]`` bool: whether the most
            probable token is in the draft vocabulary.
        """
        ids, probs, known = self.draft_to_target, [], []
        for part in last_hidden.split(_TEACHER_CHUNK):
            logits = teacher.logits(part)
            best = logits.amax(dim=-1)
            if ids is not None:
                logits = logits.index_select(1, ids)
            known.append(logits.amax(dim=-1) == best)
            probs.append(logits.softmax(dim=-1))
        return torch.cat(probs), torch.cat(known)

    def _predicts(self, batch: Batch, steps: int) -> Tensor:
        """``[steps, rows, columns - 2]`` bool: whether an element predicts a token of the loss mask."""
        masks = [F.pad(batch.loss_mask[:, 2 + step :], (0, step)) for step in range(steps)]
        return torch.stack(masks)


def rows_of(hidden: Tensor, elements: Tensor) -> Tensor:
    """Return ``[rows, m, hidden]``, the ``elements [rows, m]`` of ``hidden [rows, n, hidden]``."""
    return hidden.gather(1, elements[..., None].expand(-1, -1, hidden.shape[-1]))


def _rounded_nonzero(wanted: Tensor) -> Tensor:
    """Return ``[rows, m]`` int64: the wanted elements of each row, and others, in ascending order.

    Args:
        wanted: ``[rows, n]`` bool. The row with the most wanted elements determines m, rounded up to a
            multiple of 32 and at most n (:meth:`Batch.rounded` gives the reason).
    """
    most = max(1, int(wanted.sum(dim=1).max()))
    m = min(most + -most % COLUMNS, wanted.shape[1])
    return wanted.int().argsort(dim=1, descending=True, stable=True)[:, :m].sort(dim=1).values


def _autocast(x: Tensor) -> Tensor:
    """Cast ``x`` to the dtype that autocast uses for matrix products, if autocast is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

"""``noise_of_choice``: the noise with which a target may have drawn a token.

The target draws the token with the largest ``log p + g``, where g is Gumbel noise, and coupled drafts are
made with the same g (:mod:`specdec_ext.reference.couple_logits`). A text shows which token was drawn, but not
g. Here g is drawn given that token. Averaged over texts that the target sampled, this is the law of the noise
with which they were sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor


def noise_of_choice(logits: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Draw Gumbel noise, given that the largest perturbed log-probability is that of a certain token.

    The largest of all ``log p + g`` is a Gumbel variable and does not depend on its token; the others are
    Gumbel variables cut off there (Maddison et al. 2014, "A* Sampling", section 3).

    Args:
        logits: ``[n, vocab]`` float32 of the target.
        chosen: ``[n]`` int64, the token that was drawn from each row.
        generator: source of the random numbers, on the device of ``logits``.

    Returns:
        ``[n, vocab]`` float32.
    """
    log_probs = logits.log_softmax(dim=-1)

    def gumbel(*shape: int) -> Tensor:
        drawn = torch.empty(shape, device=logits.device).exponential_(generator=generator)
        return -drawn.log()

    largest = gumbel(len(logits), 1)
    free = gumbel(*logits.shape)
    below = -torch.logaddexp(-largest, -(log_probs + free))
    perturbed = below.scatter(1, chosen[:, None], largest)
    # A token without any probability could have had any noise.
    return torch.where(log_probs == -torch.inf, free, perturbed - log_probs)

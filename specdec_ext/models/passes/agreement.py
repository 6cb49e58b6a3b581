"""Compare the logits of two kinds of passes that should differ by rounding only."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest relative difference of logits that are rounded in different orders.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
# The same for models with experts. In 16 bits, rounding changes which experts a token gets in some layers;
# random models then differ by up to 0.5. Unrelated logits differ by 1.4.
TOLERANCE_WITH_EXPERTS = {**TOLERANCE, torch.bfloat16: 0.7, torch.float16: 0.7}


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """``|ours - theirs| / |theirs|`` in the Euclidean norm; not finite if a logit is not."""
    theirs = theirs.float()
    return float((ours.float() - theirs).norm() / theirs.norm())

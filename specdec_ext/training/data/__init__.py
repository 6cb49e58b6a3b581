"""What a head learns from: texts, their examples, and the target's hidden states of them."""

from specdec_ext.training.data.examples import read_examples

__all__ = ["read_examples"]

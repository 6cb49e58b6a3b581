"""Weights of 8 and 4 bits: made by ``quantize``, and read from the checkpoints of other libraries.

Only weights have few bits: inputs and sums stay as they are. So a quantised layer is a linear layer with
slightly different weights, and everything that holds for plain models holds for quantised ones.
"""

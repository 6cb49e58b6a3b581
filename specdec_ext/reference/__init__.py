"""Pure PyTorch specifications of the compiled ops: one module per op, no cleverness."""

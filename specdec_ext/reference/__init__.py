"""Specifications of the compiled ops in plain PyTorch, one module per op, written for clarity."""

"""What benchmarks compare with and run on: ops and heads in PyTorch, and models with random weights."""

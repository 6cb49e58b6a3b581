"""What the compiled kernels and their schedule show without a GPU."""

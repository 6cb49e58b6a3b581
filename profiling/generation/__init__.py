"""What one round of generation asks of a GPU."""

"""What one round of generation does."""

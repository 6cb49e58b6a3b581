"""Cache layers that can be rolled back."""

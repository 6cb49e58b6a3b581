"""Draft heads as data: configuration, weights, and checkpoint files."""

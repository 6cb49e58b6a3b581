"""Draft heads as data: their configuration, their weights, and the files that hold them."""

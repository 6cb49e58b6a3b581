"""A forward pass of the target over a block: masks, attention, linear layers, auxiliary hidden states."""

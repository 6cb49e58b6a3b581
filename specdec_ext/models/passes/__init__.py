"""A pass of the target over a block of tokens: masks, attention, linears, and features on the way."""

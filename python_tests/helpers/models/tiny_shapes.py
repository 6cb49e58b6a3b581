"""The sizes of a tiny model, for benchmarks that build models by size."""

TINY = dict(
    hidden_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=96,
)

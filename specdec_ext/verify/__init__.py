"""From logits to text: the processed distribution, the noise, the walk over a tree, the end of a row."""

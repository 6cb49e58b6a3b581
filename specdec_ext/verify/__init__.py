"""From logits to text: processed distributions, noise, the walk over a tree, and the end of a row."""

"""Draft trees: what is proposed, in which shape, and how it is shown."""

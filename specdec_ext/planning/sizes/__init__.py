"""How much memory a model or a draft head takes, from its config alone."""

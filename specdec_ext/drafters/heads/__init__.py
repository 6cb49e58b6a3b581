"""Drafters that run a draft head, and the state that they keep for each text."""

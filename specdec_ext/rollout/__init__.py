"""Rollouts: whether a candidate may replace a baseline, and the pair of target and draft that it was."""

"""Checks and profiles on a GPU."""

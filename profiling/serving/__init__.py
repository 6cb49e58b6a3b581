"""Measurements of servers: ours beside others, under the same load."""

"""Benchmarks: one runner, and a module of cases per question."""

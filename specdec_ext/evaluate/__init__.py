"""Checks that the text is the same, benchmarks of its speed, and a breakdown of where the time goes."""

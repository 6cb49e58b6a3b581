"""Temporary changes to models and to transformers, which are undone however the call ends."""

"""Drafters that copy earlier text."""

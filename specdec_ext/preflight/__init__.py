"""Checks before long work begins: required packages, and files to be read or written."""

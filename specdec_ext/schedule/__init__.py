"""The policies that decide, from measured times and acceptance, what each step drafts and verifies."""

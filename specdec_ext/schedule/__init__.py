"""What each step drafts and how much of it is verified, decided from measured times and acceptance."""

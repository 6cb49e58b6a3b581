"""What is looked at before long work begins: packages that it needs at its end, and files that it writes."""

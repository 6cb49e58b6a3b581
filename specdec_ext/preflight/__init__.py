"""What is looked at before long work begins: packages that it needs, files that it reads and writes."""

"""What speculation needs and whether it pays, before it runs: memory from configs, speed from costs."""

"""Cache layers that can be rolled back after rejected drafts."""

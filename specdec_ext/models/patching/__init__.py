"""Changes to models and to transformers for the time of a call, all of which are undone however it ends."""

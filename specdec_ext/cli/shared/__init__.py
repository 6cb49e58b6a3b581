"""What several commands share: options, loading of models and drafters, recipes, streamers."""

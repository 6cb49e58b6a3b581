"""The config.json of a head: from each published layout to ``HeadConfig``, and back."""

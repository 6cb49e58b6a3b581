"""What crosses the wire: schemas of requests, errors, server-sent events, limits and keys."""

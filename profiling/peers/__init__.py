"""Our CPU decoder beside its peers: other programs that generate text, each in an environment of its own.

``worker`` and ``programs`` also run in the environments of the peers, which lack what this package needs; at
their top, they import the standard library alone.
"""

"""Passes of fixed shape, recorded once and replayed: on CUDA a pass over a draft tree is one graph launch.

- ``Arena`` holds the keys and values of a model at addresses that stay the same over calls.
- ``RecordedPass`` is a forward pass over one number of rows and nodes, with its inputs and outputs.
- ``Graph`` records and replays a pass: a CUDA graph, or on the CPU the pass itself.
- ``GraphRunner`` decides which passes of a call are recorded, and says why others are not.
"""

from specdec_ext.models.graphs.arena import free_graphs
from specdec_ext.models.graphs.runner import GraphRunner

__all__ = ["GraphRunner", "free_graphs"]

"""The engine on several processes and machines, with engines of distribution that exist.

``completer.py`` is for Ray Data, ``replicas.py`` for Ray Serve; ``options.py`` says how each process loads
its model. The extra ``ray`` installs what both need.
"""

from specdec_ext.cluster.completer import Completer
from specdec_ext.cluster.options import EngineOptions

__all__ = ["Completer", "EngineOptions"]

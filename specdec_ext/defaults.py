"""Names and defaults of the library that the command line shows before torch is imported."""

from __future__ import annotations

BUNDLED = "bundled"  # in place of the folder or hub id of a model: the one that the package brings
MAX_ROWS = 16  # requests that an engine decodes together
PREFIX_TOKENS = 8192  # of earlier prompts that an engine keeps
MAX_BODY_BYTES = 4 * 2**20  # of a request, or of a line of requests

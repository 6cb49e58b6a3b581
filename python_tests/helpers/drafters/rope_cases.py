"""Head configurations with every rope type."""

from __future__ import annotations

from helpers.drafters.checkpoint_cases import head_config

TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16},
    "longrope": {"factor": 4.0, "long_factor": [2.0, 3.0, 4.0, 5.0], "short_factor": [1.0, 1.5, 2.0, 2.5],
        "original_max_position_embeddings": 16},
}  # fmt: skip


def config(kind, **more):
    """The config of a head with this rope type."""
    parameters = {"rope_type": kind, "rope_theta": 500.0, **TYPES.get(kind, {}), **more}
    return head_config(max_positions=32, rope_parameters=parameters)

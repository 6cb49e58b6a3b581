"""Skips of tests that need a newer transformers than the installed one (``make test-transformers``)."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

import specdec_ext

INSTALLED = Version(transformers.__version__)
# The version in requirements-dev.txt, whose models all tests use.
NEWEST = "5.23"


def before(version: str) -> bool:
    """Whether the installed transformers is older than this."""
    return Version(version) > INSTALLED


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skip a test that needs ``what``, which transformers has since ``version``."""
    return pytest.mark.skipif(
        before(version), reason=f"{what} since transformers {version}; this is {INSTALLED}"
    )


def skip_unless_drafted(model: PreTrainedModel) -> None:
    """Skip a test of drafts if the model is decoded without drafts with this older transformers."""
    support = specdec_ext.supports(model)
    if before(NEWEST) and not support.chain:
        pytest.skip(f"transformers {INSTALLED}, {type(model).__name__}: {support.reasons[-1]}")


def skip_if_unknown(error: ValueError) -> None:
    """Skip a test that failed because an older transformers lacks its model."""
    if before(NEWEST) and "Unrecognized model identifier" in str(error):
        pytest.skip(f"transformers {INSTALLED}: {str(error).partition('.')[0]}")

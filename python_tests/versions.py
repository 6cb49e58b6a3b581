"""Which tests need a newer transformers than the installed one (``make test-transformers``)."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

INSTALLED = Version(transformers.__version__)


def before(version: str) -> bool:
    """Whether the installed transformers is older than this."""
    return Version(version) > INSTALLED


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skip a test that needs ``what``, which transformers has since ``version``."""
    return pytest.mark.skipif(
        before(version), reason=f"{what} since transformers {version}; this is {INSTALLED}"
    )

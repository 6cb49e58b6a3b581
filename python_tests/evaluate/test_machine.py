"""The line above every measurement names the commit of the source tree, on which the numbers depend."""

import subprocess

import pytest
import torch
from helpers.places import ROOT

from specdec_ext.evaluate.machine import machine_line


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_commit_is_that_of_the_source_tree():
    """When the module had moved into a folder, it looked for the checkout in the wrong place."""
    named = machine_line(torch.device("cpu")).rpartition("commit ")[2].removesuffix("+")
    assert git("rev-parse", f"{named}^{{commit}}") == git("rev-parse", "HEAD")

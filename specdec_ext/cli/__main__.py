"""``python -m specdec_ext.cli``: the command line as a module, for ``accelerate launch`` and the like."""

from specdec_ext.cli import app

app(prog_name="specdec")

"""``python -m specdec_ext.cli``: the command line, for what starts modules, such as ``accelerate launch``."""

from specdec_ext.cli import app

app(prog_name="specdec")

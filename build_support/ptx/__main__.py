"""``python -m build_support.ptx kernel.ptx kernel.cpp`` translates a file."""

import sys
from pathlib import Path

from build_support.ptx.cpp import translate
from build_support.ptx.syntax import PtxError

source, target = map(Path, sys.argv[1:])
try:
    text = translate(source.read_text(), str(source))
except PtxError as error:
    sys.exit(str(error))
if not target.exists() or target.read_text() != text:  # else nothing is compiled again
    target.write_text(text)

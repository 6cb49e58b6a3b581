"""The direct pass: one op instead of the modules of a decoder.

Most decoders are built from the same parts, and for a small one the Python code of its modules takes longer
than the arithmetic. If the code of every module equals that of a known family (``families.py``,
``passes/known_code.py``), byte for byte, one call of ``ops.decoder_layers`` replaces all layers
(``direct_pass.py``). ``reading.py`` finds the parts of a family in a model.
"""

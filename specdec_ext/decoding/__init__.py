"""The decoding loop, and the calls whose text it decodes."""

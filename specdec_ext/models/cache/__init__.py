"""Cache layers that can be rolled back. ``SlotTarget`` and ``PreparedTarget`` do so in ``commit``."""

"""``SlotTarget``: a model whose cache slots, attention masks and positions this package lays out itself."""

from specdec_ext.models.slots.target import SlotTarget

__all__ = ["SlotTarget"]

"""Patches for model families that compute something from cache slots, for trees and ragged rows."""

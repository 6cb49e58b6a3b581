"""Draft trees: the data structure, its shapes, and views for people."""

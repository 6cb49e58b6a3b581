"""Measuring and checking: is the text the same, how fast is it, where does the time go?"""

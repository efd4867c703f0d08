"""The unified benchmark: ``python bench/run.py``; ``report.py`` and ``check.py`` read what it wrote.

Read shapes, spaces, peers, buffers, reference, timing and measure, in that order. Records have the fields of
the design and one more, ``case``: the shape as given, without which two shapes of as many rows and columns
couldn't be told apart.
"""

"""The unified benchmark: ``python bench/run.py``; ``report.py`` and ``check.py`` read what it wrote.

Read shapes, spaces, peers, buffers, reference, timing and measure, in that order; then targets, cliffs and
figures for what the project promises. Records have the fields of the design and one more, ``case``: the shape as
given, without which two shapes of as many rows and columns couldn't be told apart. What isn't a record of one
implementation on one shape is in ``figures``.
"""

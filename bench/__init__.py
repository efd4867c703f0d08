"""The unified benchmark: ``python bench/run.py``.

Read shapes, peers, buffers, reference, timing and measure, in that order.
"""

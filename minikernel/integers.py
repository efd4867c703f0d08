"""Integer arithmetic that planning a launch takes."""


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The lowest power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()

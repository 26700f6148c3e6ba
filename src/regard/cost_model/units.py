"""Numbers as text: to the unit, and short beside it."""

from __future__ import annotations

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def exact(number: float) -> str:
    """To the unit, with thousands apart; a fraction with the digits that tell something."""
    if isinstance(number, int) or float(number).is_integer():
        return f"{int(number):,}"
    return f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.1f}"


def short(number: float, unit: str = "") -> str:
    """Four digits and a decimal prefix: `335.5 MMAC`, `1.234 GB`. A thousand is a thousand, for bytes too.

    >>> short(335_544_320, "MAC"), short(999_999, "B"), short(12)
    ('335.5 MMAC', '1.000 MB', '12')
    """
    size, power = abs(number), 0
    while size >= 999.95 and power + 1 < len(PREFIXES):
        size, power = size / 1000, power + 1
    if power == 0:
        digits = exact(size)
    else:
        digits = f"{size:.4g}" if size >= 1000 else f"{size:.{3 if size < 9.9995 else 2 if size < 99.995 else 1}f}"
    sign = "-" if number < 0 else ""
    return f"{sign}{digits} {PREFIXES[power]}{unit}".rstrip()

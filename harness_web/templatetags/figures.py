"""Numbers as people read them. `static/harness/js/format.js` does the same for live updates."""

from __future__ import annotations

from django import template
from django.templatetags.static import static
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()
UNKNOWN = "–"


@register.filter
def count(value: float | None) -> str:
    """12 · 3.4 k · 1.2 M; one decimal below ten for rates."""
    if value is None:
        return UNKNOWN
    for limit, unit in ((1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.1f}" if value != int(value) and value < 10 else f"{value:.0f}"


@register.filter
def duration(seconds: float | None) -> str:
    """840 ms · 1.9 s · 3 min 5 s."""
    if seconds is None:
        return UNKNOWN
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds else "0 s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


@register.filter
def percent(share: float | None) -> str:
    """A share from 0 to 1 as 99.2 %, whole numbers without decimals."""
    if share is None:
        return UNKNOWN
    text = f"{share * 100:.1f}"
    return text.removesuffix(".0") + " %"


@register.simple_tag
def icon(name: str) -> SafeString:
    """A decorative icon of the sprite."""
    return format_html(
        '<svg class="icon" aria-hidden="true"><use href="{}#{}"/></svg>', static("harness/icons.svg"), name
    )

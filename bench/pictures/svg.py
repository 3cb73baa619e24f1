"""Drawing: rectangles, lines and texts as one SVG that reads in light and in dark."""

from __future__ import annotations

from html import escape

# Light fills for cells, distinct for most colour-blind readers; text on them is always dark.
FILLS = "#77aadd #ee8866 #eedd88 #44bb99 #ffaabb #bbcc33 #99ddff #c8a2e0 #dddddd #e6c3a0".split()
STYLE = """\
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #1f2328; }
.head { font-weight: 600; font-size: 13px; }
.note { fill: #57606a; }
.in { fill: #1f2328; text-anchor: middle; font-size: 11px; }
.back { fill: #ffffff; stroke: #d0d7de; }
.line { stroke: #57606a; fill: none; }
.edge { stroke: #1f2328; stroke-width: 2; fill: none; }
.pale { stroke: #d0d7de; fill: none; }
.off { fill: #e6e9ec; }
.s0, .s1, .s2, .s3 { fill: none; stroke-width: 2; }
.s0 { stroke: #77aadd; } .s1 { stroke: #ee8866; } .s2 { stroke: #eedd88; } .s3 { stroke: #44bb99; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .note { fill: #9da7b3; } .in { fill: #1f2328; }
.back { fill: #161b22; stroke: #30363d; } .line { stroke: #9da7b3; }
.edge { stroke: #e6edf3; } .pale { stroke: #30363d; } .off { fill: #262c36; } }
"""


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """SVG that grows by what is put on it, on a background of its own."""

    def __init__(self, width: float, title: str) -> None:
        """Begin an empty drawing.

        Args:
            width: in pixels.
            title: what the picture shows, for readers who can't see it.
        """
        self.width, self.height, self.title = width, 0.0, title
        self.parts: list[str] = []

    def below(self, y: float) -> None:
        """Make the drawing at least this high."""
        self.height = max(self.height, y)

    def rect(
        self, x: float, y: float, w: float, h: float, kind: int | str, words: str = ""
    ) -> None:
        """Draw a rectangle.

        Args:
            x: left.
            y: top.
            w: width.
            h: height.
            kind: number of a fill, or a class.
            words: text in its middle.
        """
        place = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"'
        look = f'class="{kind}"' if isinstance(kind, str) else f'fill="{FILLS[kind]}"'
        self.parts.append(f"<rect {place} {look}/>")
        if words:
            self.text(x + w / 2, y + h / 2 + 4, words, "in")
        self.below(y + h)

    def text(self, x: float, y: float, words: str, kind: str = "", end: bool = False) -> None:
        """Write a text that begins, or ends, at a point.

        Args:
            x: horizontal place.
            y: baseline.
            words: the text.
            kind: class.
            end: whether the text ends there.
        """
        look = f' class="{kind}"' if kind else ""
        anchor = ' text-anchor="end"' if end else ""
        words = escape(words, quote=False)
        self.parts.append(f'<text x="{number(x)}" y="{number(y)}"{look}{anchor}>{words}</text>')
        self.below(y + 4)

    def path(self, points: list[tuple[float, float]], kind: str | int, close: bool = False) -> None:
        """Draw a line through points, or fill what it encloses."""
        at = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        look = f'class="{kind}"' if isinstance(kind, str) else f'fill="{FILLS[kind]}"'
        self.parts.append(f'<{"polygon" if close else "polyline"} points="{at}" {look}/>')
        self.below(max(y for _, y in points))

    def arrow(self, x: float, y: float, to_x: float, words: str) -> None:
        """Draw a horizontal arrow to the right.

        Args:
            x: its begin.
            y: its height.
            to_x: its tip.
            words: text above it, two lines at most.
        """
        self.path([(x, y), (to_x, y)], "line")
        self.path([(to_x - 5, y - 4), (to_x, y), (to_x - 5, y + 4)], "line")
        lines = words.split("\n")
        for i, line in enumerate(lines):
            self.text(x + 4, y - 7 - 15 * (len(lines) - 1 - i), line, "note")

    def legend(self, x: float, y: float, names: list[tuple[int | str, str]]) -> None:
        """Write names beside squares of their fills, in one row."""
        for fill, name in names:
            self.rect(x, y, 12, 12, fill)
            self.text(x + 17, y + 10, name)
            x += 34 + 6.6 * len(name)

    def svg(self) -> str:
        """Return the drawing as a file."""
        w, h = number(self.width), number(self.height + 14)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" role="img">'
        )
        back = f'<rect class="back" x="0.5" y="0.5" width="{number(self.width - 1)}" '
        back += f'height="{number(self.height + 13)}" rx="6"/>'
        title = f"<title>{escape(self.title, quote=False)}</title>"
        return "\n".join([head, title, f"<style>\n{STYLE}</style>", back, *self.parts, "</svg>\n"])

"""Sources of the site: the pages of docs, and a page for each file of the code that they link.

    python -m bench.site

Writes build/site/: `docs/`, whose links stay inside the site, and `mkdocs.yml`, whose navigation is
docs/README.md. `make site` then builds build/site/html with mkdocs-material.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from bench import parser_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = ROOT / "build/site"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
LISTED = re.compile(r"(?:^- (?:\d+ · )?|^\d+\. |(?<=\), ))\[([^\]]+)\]\(([^)#]+\.md)\)", re.M)
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
FORMULA = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)
FUNCTION = re.compile(r"^\| \[`(\w+)`\]\(\.\./\.\./([\w/]+)\.py\)", re.M)
DOCSTRINGS = {
    "docstring_section_style": "list",
    "heading_level": 2,
    "separate_signature": True,
    "show_root_heading": True,
    "show_root_full_path": False,
    "show_signature_annotations": True,
    "show_source": False,
}
SETTINGS = {
    "site_name": "megacpp",
    "site_description": "A trainer for hybrid language models in plain PyTorch.",
    "docs_dir": "docs",
    "site_dir": "html",
    "use_directory_urls": False,  # links work from a disk, too
    "strict": True,
    "validation": {
        "nav": {"omitted_files": "ignore", "not_found": "warn"},
        "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"},
    },
    "theme": {
        "name": "material",
        "font": False,  # no request to another server
        "features": [
            "content.code.copy",
            "content.tooltips",
            "navigation.footer",
            "navigation.sections",
            "navigation.top",
            "search.highlight",
            "toc.follow",
        ],
        "palette": [
            {
                "media": f"(prefers-color-scheme{scheme})",
                "scheme": name,
                "primary": "blue grey",
                "toggle": {"icon": f"material/{icon}", "name": f"Switch to {other}"},
            }
            for scheme, name, icon, other in (
                ("", "default", "brightness-auto", "light mode"),  # as the system has it
                (": light", "default", "weather-night", "dark mode"),
                (": dark", "slate", "weather-sunny", "the system's mode"),
            )
        ],
    },
    "plugins": [
        "search",
        {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": DOCSTRINGS}}}},
    ],
    "markdown_extensions": [
        "tables",
        "md_in_html",
        {"toc": {"permalink": True}},
        {"pymdownx.highlight": {"anchor_linenums": True}},
        "pymdownx.superfences",
        "abbr",
    ],
    "extra_css": ["site.css"],
}
# A window of 1,280 pixels shows code of 100 columns whole, beside narrower lists at both sides.
# Printed figures are wider: they scroll inside their box, tables too. So do pictures on a phone,
# where their words would be half as large as those of the text.
STYLE = """\
.md-grid { max-width: 82rem; }
.md-typeset pre > code { font-size: .64rem; }
@media (min-width: 76.25em) {
  .md-sidebar { width: 10.4rem; }
  .md-sidebar .md-sidebar__inner { padding-right: 0; }
}
.md-typeset img { max-width: 100%; height: auto; }
.md-typeset td code { word-break: normal; }
@media (max-width: 40em) {
  .md-typeset p:has(> img:only-child) { overflow-x: auto; }
  .md-typeset p > img:only-child { max-width: none; width: 36rem; }
}
.md-typeset .formula { overflow-x: auto; margin: 1em 0; }
.md-typeset .formula math { margin: .5em 0; }
.md-typeset abbr { border-bottom-color: var(--md-default-fg-color--lightest); }
"""
TERM = re.compile(r"^\| (\*\*[^|]+) \| ([^|]+) \| [^|]+ \|$", re.M)


def sections() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of docs/README.md: heading, and the title and file of each page."""
    _, *parts = re.split(r"^## ", (DOCS / "README.md").read_text(), flags=re.M)
    return [(part.splitlines()[0], LISTED.findall(part)) for part in parts]


def navigation() -> list[dict[str, object]]:
    """Return the navigation of the site: contents, then the sections."""
    found: list[dict[str, object]] = [{"Contents": "index.md"}]
    for heading, pages in sections():
        named = [
            {title.replace("`", ""): place(link)} for title, link in pages
        ]  # no Markdown there
        found.append({heading: named})
    return found


def meanings() -> str:
    """Return the words of docs/notation.md as abbreviations, whose meaning shows at the pointer."""
    terms = TERM.findall((DOCS / "notation.md").read_text())
    forms = ((form, means) for names, means in terms for form in names.replace("*", "").split(", "))
    return "\n" + "\n".join(f"*[{form}]: {means}" for form, means in forms) + "\n"


def place(file: str) -> str:
    """Return where a page of docs lies in the site: a README is the index of its folder."""
    return re.sub(r"README\.md$", "index.md", file)


def code_page(target: Path) -> str:
    """Return the page of the site for a file or folder outside of the pages of docs."""
    return f"code/{target.relative_to(ROOT)}.md"


def within(text: str, page: Path, wanted: set[Path]) -> str:
    """Return a page whose links lead to pages of the site.

    Args:
        text: Markdown.
        page: file that it comes from.
        wanted: files outside of the pages that it links; links are added.
    """

    def moved(found: re.Match[str]) -> str:
        link = found[2]
        if re.match(r"[a-z]+:", link):
            return found[0]
        target = (page.parent / link).resolve()
        here = Path(place(str(page.relative_to(DOCS)))).parent
        if target.is_relative_to(DOCS) and target.suffix in (".md", ".svg", ".html"):
            there = place(str(target.relative_to(DOCS)))
        else:
            wanted.add(target)
            there = code_page(target)
        return f"{found[1]}{os.path.relpath(there, here)}{found[3]}"

    text = FORMULA.sub(rendered, text.replace("<details>", "<details markdown>"))
    parts = FENCED.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def rendered(formula: re.Match[str]) -> str:
    """Return a line of LaTeX as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    return f"<div class=formula>{convert(formula[1].strip(), display='block')}</div>"


def function_pages(listed: str) -> dict[str, str]:
    """Return the pages with whole docstrings: module -> Markdown.

    Args:
        listed: docs/reference/functions.md, which names a file's functions and classes.
    """
    pages: dict[str, str] = {}
    for name, file in FUNCTION.findall(listed):
        module = file.replace("/", ".")
        head = f"# {module}\n\n[Its code](../../../{file}.py) · [every function](../functions.md)\n"
        pages[module] = f"{pages.get(module, head)}\n::: {module}.{name}\n"
    return pages


def to_function_page(row: re.Match[str]) -> str:
    """Return the start of a row of functions.md with a link to the docstring, not the file."""
    module = row[2].replace("/", ".")
    return f"| [`{row[1]}`](functions/{module}.md#{module}.{row[1]})"


def code_text(target: Path) -> str:
    """Return the page that shows a file, or lists a folder."""
    name = target.relative_to(ROOT)
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if target.is_dir():
        files = sorted(str(p.relative_to(ROOT)) for p in target.rglob("*.py"))
        return head + "\n".join(f"- `{file}`" for file in files) + "\n"
    text = target.read_text()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    language = {".py": "python", ".json": "json", ".yaml": "yaml"}.get(target.suffix, "text")
    return f"{head}{fence}{language}\n{text.rstrip()}\n{fence}\n"


def put(file: str | Path, text: str) -> None:
    """Write a file of the site's sources."""
    there = SITE / "docs" / file
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text(text)


def write() -> int:
    """Write the sources of the site; return the number of pages."""
    shutil.rmtree(SITE, ignore_errors=True)
    wanted: set[Path] = set()
    pages = sorted(DOCS.rglob("*.md"))
    texts = {page: page.read_text() for page in pages}
    listed = DOCS / "reference/functions.md"
    made = function_pages(texts[listed])
    texts |= {DOCS / f"reference/functions/{module}.md": text for module, text in made.items()}
    texts[listed] = FUNCTION.sub(to_function_page, texts[listed])
    for page, text in texts.items():
        words = "" if page.name == "notation.md" else meanings()
        put(place(str(page.relative_to(DOCS))), within(text, page, wanted) + words)
    for picture in DOCS.rglob("*.svg"):
        put(picture.relative_to(DOCS), picture.read_text())
    for page in DOCS.rglob("*.html"):
        text = re.sub(r'(href="[^":]+)\.md"', r'\1.html"', page.read_text())
        put(page.relative_to(DOCS), text)
    for target in wanted:
        put(code_page(target), code_text(target))
    put("site.css", STYLE)
    # JSON is YAML.
    settings = SETTINGS | {"nav": navigation()}
    (SITE / "mkdocs.yml").write_text(json.dumps(settings, indent=1) + "\n")
    return len(texts) + len(wanted)


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    print(f"{write()} pages in {SITE}")

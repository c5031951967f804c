"""Checks every link of the documentation that leads into this repository: files, folders and
headings.

usage: check_links.py [FILE ...]   (default: every Markdown file of the repository)

Offline: links to other sites are not followed. Names of our own files in `code quotes` are checked
as well, so that a page cannot go on naming a file that was moved.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {
    ".git",
    ".venv",
    "build",
    "dist",
    "runs",
    "node_modules",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
}
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
INLINE = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)>?")
HTML = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)[\"']", re.IGNORECASE)
OUR_FILE = re.compile(
    r"`((?:megalith|docs|tests|tools|benchmarks|examples|launch|\.ci|\.github)/[\w./-]+\.(?:py|md|yaml|yml|toml|sh|txt))`"
)


def without_code(text: str) -> list[str]:
    """Return the lines of a page, with those in fenced code blocks emptied."""
    lines, fence = [], ""
    for line in text.splitlines():
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark.group(1)
        elif mark and mark.group(1).startswith(fence):
            fence = ""
        else:
            lines.append("" if fence else line)
            continue
        lines.append("")
    return lines


def anchors(text: str) -> set[str]:
    """Return the anchors of headings, and those written as HTML."""
    found: set[str] = set()
    for line in without_code(text):
        heading = re.match(r"#{1,6}\s+(.*?)\s*#*$", line)
        if heading:
            slug = slug_of(heading.group(1))
            number, unique = 0, slug
            while unique in found:
                number += 1
                unique = f"{slug}-{number}"
            found.add(unique)
        found |= set(re.findall(r"<a\s+(?:id|name)=[\"']([^\"']+)[\"']", line))
    return found


def slug_of(heading: str) -> str:
    """Return GitHub's anchor of a heading.

    >>> slug_of("What `make test` does (and why)")
    'what-make-test-does-and-why'
    """
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def links(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line number, target, whether it is a code quote rather than a link)."""
    for number, line in enumerate(without_code(text), 1):
        yield from ((number, name, True) for name in OUR_FILE.findall(line))
        plain = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", lambda quote: "x" * len(quote.group()), line)
        for pattern in (INLINE, REFERENCE, HTML):
            yield from ((number, target, False) for target in pattern.findall(plain))


def broken(page: Path, root: Path) -> list[str]:
    """Return the broken links of one page as `page:line: what`."""
    name, found = page.relative_to(root).as_posix(), []
    for number, target, quoted in links(page.read_text()):
        if quoted:
            wrong = (
                ""
                if any((base / target).exists() for base in (root, root / "megalith"))
                else f"`{target}` is no file of this repository"
            )
        else:
            wrong = _wrong_target(page, root, target)
        if wrong:
            found.append(f"{name}:{number}: {wrong}. Correct the name, or remove the link.")
    return found


def _wrong_target(page: Path, root: Path, target: str) -> str:
    if ELSEWHERE.match(target) or target.startswith("//"):
        return ""
    path, _, anchor = unquote(target).partition("#")
    file = (
        page
        if not path
        else (root / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    )
    if not file.is_relative_to(root.resolve()):
        return f"({target}) leads out of the repository"
    if not file.exists():
        return f"({target}) leads nowhere"
    if anchor and file.suffix == ".md" and anchor.lower() not in anchors(file.read_text()):
        return f"({target}) names a heading that {file.name} does not have"
    return ""


def pages_of(root: Path) -> list[Path]:
    """Return every Markdown file of the repository."""
    files = (file for file in root.rglob("*.md") if not SKIPPED & set(file.relative_to(root).parts))
    return sorted(
        file
        for file in files
        if not any(part.startswith(".venv") for part in file.relative_to(root).parts)
    )


def main(arguments: Sequence[str]) -> int:
    """Check the pages; return 1 if a link is broken."""
    pages = [Path(name).resolve() for name in arguments] or pages_of(ROOT)
    found = [line for page in pages for line in broken(page, ROOT)]
    print("\n".join([*found, f"check_links: {len(pages)} pages, {len(found)} broken links"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

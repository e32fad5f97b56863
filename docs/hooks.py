"""Pages of the site for files of the repository that others link to: examples, tests, ARCHITECTURE.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")
_LANGUAGES = {".py": "python", ".txt": "text", ".sh": "bash", ".sbatch": "bash"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file or folder outside of docs/ that a page links to."""
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    for target in sorted({found[1] for text in texts for found in _LINK.finditer(text)}):
        page = File.generated(config, _page(target), content=_content(ROOT / target))
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to such files lead to their pages."""
    if page.file.generated_by:
        return markdown
    return _LINK.sub(lambda found: f"]({_page(found[1])})", markdown)


def _page(target: str) -> str:
    return f"repository/{target.rstrip('/').replace('/', '.')}.md"


def _content(path: Path) -> str:
    if path.is_dir():
        return f"# {path.name}\n\n" + "\n\n".join(_block(file) for file in sorted(path.glob("*.py")))
    return path.read_text() if path.suffix == ".md" else f"# {path.name}\n\n{_block(path)}"


def _block(path: Path) -> str:
    name = path.relative_to(ROOT)
    return f'````{_LANGUAGES.get(path.suffix, "text")} title="{name}"\n{path.read_text()}````'

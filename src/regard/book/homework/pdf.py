"""A sheet as PDF, printed by the machine's Chromium, or by its LaTeX."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from regard.book.homework.latex import to_latex
from regard.book.html import markdown_to_html
from regard.render.page import render_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ENGINES = ("pdflatex", "lualatex", "xelatex")
SECONDS = 60
STYLE = "@page { margin: 2cm; } body { font-size: 12pt; background: #fff; color: #000; } main { padding: 0; }"


def find_program(names: tuple[str, ...]) -> str | None:
    """The first of these programs that the machine has."""
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


def write_pdf(markdown: str, title: str, path: Path) -> str:
    """Write the PDF; returns the reason if it cannot be written, and an empty text if it was."""
    browser, engine = find_program(BROWSERS), find_program(ENGINES)
    if browser is None and engine is None:
        return "neither Chromium nor LaTeX is installed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made, command = folder / "sheet.pdf", []
        if browser is not None:
            page = folder / "sheet.html"
            page.write_text(render_page(title, markdown_to_html(markdown), styles=[STYLE]), encoding="utf-8")
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            command += ["--no-pdf-header-footer", f"--user-data-dir={folder}/profile"]
            command += [f"--print-to-pdf={made}", page.as_uri()]
        elif engine is not None:
            source = folder / "sheet.tex"
            source.write_text(to_latex(markdown), encoding="utf-8")
            command = [engine, "-no-shell-escape", "-interaction=nonstopmode", source.name]
        try:
            subprocess.run(command, capture_output=True, cwd=folder, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as failure:
            return f"{Path(command[0]).name}: {type(failure).__name__}"
        if not made.is_file():
            return f"{Path(command[0]).name} wrote nothing"
        shutil.copyfile(made, path)
    return ""

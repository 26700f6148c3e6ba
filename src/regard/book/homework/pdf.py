"""A sheet as PDF, printed by the machine's Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from regard.book.html import markdown_to_html
from regard.render.page import render_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60
STYLE = "@page { margin: 2cm; } body { font-size: 12pt; background: #fff; color: #000; } main { padding: 0; }"


def find_browser() -> str | None:
    """The program that prints, if the machine has one."""
    return next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)


def write_pdf(markdown: str, title: str, path: Path) -> str:
    """Write the PDF; returns the reason if it cannot be written, and an empty text if it was."""
    browser = find_browser()
    if browser is None:
        return "no Chromium is installed"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "sheet.html"
        page.write_text(render_page(title, markdown_to_html(markdown), styles=[STYLE]), encoding="utf-8")
        made = Path(folder) / "sheet.pdf"
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-pdf-header-footer",
        ]
        command = [browser, *flags, f"--user-data-dir={folder}/profile", f"--print-to-pdf={made}", page.as_uri()]
        try:
            subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as failure:
            return f"{Path(browser).name}: {type(failure).__name__}"
        if not made.is_file():
            return f"{Path(browser).name} wrote nothing"
        shutil.copyfile(made, path)
    return ""

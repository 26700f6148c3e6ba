"""The files of the browser components: what is served, and how they become one script."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from regard.render.components import (
    bundle,
    component_names,
    make_component,
    notebook_module,
    notebook_style,
    read_component,
)
from regard.render.page import Page

MODULES = [name for name in component_names() if name.endswith(".js")]
PARTS = [name for name in MODULES if name != "notebook.js"]  # which has its own way into a notebook


def test_every_file_is_served_with_its_type():
    assert "palette.css" in component_names()
    for name in component_names():
        content, media_type = read_component(name)
        assert content.decode().strip()
        assert media_type == ("text/css" if name.endswith(".css") else "text/javascript") + "; charset=utf-8"


@pytest.mark.parametrize("name", ["../page.css", "nothing.js", "", "/etc/passwd", "..", "components.css/"])
def test_no_other_file_is_served(name):
    with pytest.raises(KeyError):
        read_component(name)


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_only_one_another_and_nothing_from_elsewhere(name):
    text = read_component(name)[0].decode()
    for imported in re.findall(r'from "([^"]*)"|import "([^"]*)"', text):
        path = "".join(imported)
        assert path.removeprefix("./") in MODULES
    assert "://" not in text
    assert "innerHTML" not in text
    assert "eval(" not in text
    assert len(text.splitlines()) < 300


@pytest.mark.parametrize("name", PARTS)
def test_a_bundle_has_no_imports_and_every_module_once(name):
    script = bundle(name)
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    modules = re.findall(r"^const (module_\w+) =", script, re.MULTILINE)
    assert len(modules) == len(set(modules))
    used = re.findall(r"^const \{.*\} = (module_\w+);", script, re.MULTILINE)
    assert set(used) <= set(modules[:-1])


@pytest.mark.parametrize("name", ["all", "notebook"])
def test_bundles_are_javascript(name, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on this machine")
    file = tmp_path / ("script.mjs" if name == "notebook" else "script.cjs")
    file.write_text(notebook_module() if name == "notebook" else bundle(*PARTS))
    checked = subprocess.run([node, "--check", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_notebook_has_one_default_export():
    text = notebook_module()
    assert text.count("export default") == 1
    assert "import " not in re.sub(r"//.*", "", text)
    assert "--weight" in notebook_style()


def test_a_component_is_a_figure_whose_data_cannot_end_its_script():
    figure = make_component("regard-bars", {"text": "</script><b>"}, "bars.js", caption="a < b")
    assert "</script><b>" not in figure
    assert "a &lt; b" in figure
    page = Page("Bars")
    page.add("first", figure)
    page.add("second", figure)
    assert page.html.count("customElements.define") == 1

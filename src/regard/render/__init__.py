"""SVG, HTML pages, charts and tables, for every package with output.

`markup` escapes by construction, `svg` and `chart` draw without a library, `page` makes one self-contained HTML file,
`table` is one value for a terminal, plain text, Markdown and HTML. It imports nothing of Regard but `errors`.
"""

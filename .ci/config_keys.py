"""For mkdocs: replaces the last section of docs/config.md by a table of every config key."""

from swjax.training.keys import KEYS

HEADING = "\n## Keys\n"


def on_page_markdown(markdown: str, page, **_: object) -> str:
    """Adds the table to the page of config keys; other pages are unchanged."""
    if page.file.src_uri != "config.md":
        return markdown
    return markdown.partition(HEADING)[0] + HEADING + table()


def table() -> str:
    """Returns a table in Markdown for each section of the config."""
    lines: list[str] = []
    section = ""
    for full, key in KEYS.items():
        here, name = full.split(".", 1)
        if here != section:
            section = here
            lines += [
                "",
                f"### {section}",
                "",
                "| key | default | accepts | meaning |",
                "|---|---|---|---|",
            ]
        cells = (f"`{name}`", f"`{key.default!r}`", key.rule(), key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

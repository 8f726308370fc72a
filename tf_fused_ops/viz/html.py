"""One-file interactive page; it loads nothing, so it works from a mail attachment or an archive."""

import html
import json

from tf_fused_ops.viz import engine


def page(payload):
    """Returns the page for a payload.

    Args:
        payload: What `payload.make` returns.

    Returns:
        The text of an HTML file.
    """
    scripts = "\n".join(engine.read(path) for path in (*engine.SCRIPTS, "page/app.js"))
    parts = {
        "%TITLE%": html.escape(payload["title"]),
        "%CSS%": engine.read("page/page.css"),
        # So that no name can end the script element.
        "%DATA%": json.dumps(payload, separators=(",", ":")).replace("<", "\\u003c"),
        "%SCRIPTS%": scripts,
    }
    text = engine.read("page/page.html")
    for mark, part in parts.items():
        before, _, after = text.partition(mark)
        text = before + part + after
    return text

"""Names of models that try to break out of the place where they are displayed."""

# Markup, quotes, control characters and a direction mark, as long as a page.
HOSTILE_NAME = (
    "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)> \"'`&amp;\n\r\x00\x1b\u2028\u202e$x^$"
    + "x" * 10_000
)

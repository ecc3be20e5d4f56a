"""The answers of the browser tests' model, by the number of earlier answers."""

from __future__ import annotations

from tests.fakes.scripted_model import calls

MARKUP = "<img src=x onerror=document.title='stolen'>"
# different words
LONG = " ".join(f"word{number}" for number in range(300))
MARKDOWN = """# Ferry

The ferry leaves at **noon**:

| day | pier |
|---|---|
| Monday | 3 |

```python
print("all aboard")
```

![tracker](http://evil.example/picture.png) and [a page](https://example.org/).
"""
ATTACK = """<script>document.title = "stolen"</script>
<img src=x onerror="document.title = 'stolen'">
<svg onload="document.title = 'stolen'"></svg>
[a link](javascript:document.title='stolen') and <a href="javascript:alert(1)">another</a>
<iframe srcdoc="<script>parent.document.title = 'stolen'</script>"></iframe>
<form action="http://evil.example/"><button>Send</button></form>
<style>body { display: none }</style>
"""
CALL = calls(("look_up", {"word": "ferry"}))
THOUGHT = "<think>\nThe user wants to know about the pier.\n</think>\n\nIt is pier 3."
ANSWERS = (LONG, MARKDOWN, ATTACK, THOUGHT)

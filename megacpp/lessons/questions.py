"""Questions with answers, made from the declarations of torch's headers."""

from __future__ import annotations

import re
from collections.abc import Iterable

DECLARED = re.compile(r"^// (aten::[^\n]{1,160})\n(?:static )?inline ([\w:<>, ]+?[ &]*)\w+\(", re.M)
Question = dict[str, str]


def questions_of(texts: Iterable[str]) -> list[Question]:
    """Return a question for each declaration of a text: its C++ type, from the schema above it.

    Args:
        texts: headers, as `// aten::abs(Tensor self) -> Tensor` and, in the next line,
            `inline at::Tensor abs(...)`.

    Returns:
        Pairs of `prompt` and `completion`, each prompt once.
    """
    found = {
        f"Which C++ type does this return?\n{schema}": returned.strip()
        for text in texts
        for schema, returned in DECLARED.findall(text)
    }
    return [{"prompt": asked, "completion": answer} for asked, answer in found.items()]

"""What is promised: the rows of docs/promised_cases.md, written there by hand; `make table` fills in the cells.

`test_rows.py` proves that each row has a test on every registered backend. Unless a row says otherwise, weights,
history and predictions are those of one plain process: within 1e-9 in float64, 1e-6 in float32 (1e-5 for Adam),
bit-identical on all ranks.
"""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "promised_cases.md"
TITLE = re.compile(r"\| \*\*(.+)\*\* \|[ |]+")
ROW = re.compile(r"\| (.+?) \|.*\| `([a-z0-9-]+)` \|")  # its text, and its id in the last column

# Several of them at once: `make test` tries these in place of each by itself. They promise nothing more.
TOGETHER = {
    "together-losses": "Outputs with losses of other reductions, weights, `add_loss`, a regularizer",
    "together-metrics": "Metrics of arrays, in a layer, weighted, and one of the script",
    "together-data": "A dataset of dicts with strings and weights, shuffled without a seed",
}


def _groups() -> dict[str, dict[str, str]]:
    """Returns for each group the texts of its rows by their ids, in the order of the page."""
    groups: dict[str, dict[str, str]] = {}
    for line in PAGE.read_text().splitlines():
        if title := TITLE.fullmatch(line):
            group = groups[title[1]] = {}
        elif row := ROW.fullmatch(line):
            assert row[2] not in group, f"two rows {row[2]}"
            group[row[2]] = row[1]
    return groups


GROUPS = _groups()
PROMISED = {row: text for group in GROUPS.values() for row, text in group.items()}
ROWS = {**PROMISED, **TOGETHER}

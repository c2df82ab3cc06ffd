"""All claims of the notebooks in one table, read from their saved outputs: `make claims`.

    python tests/collect_claims.py notebooks/*.ipynb [--csv FILE]

fails if a claim does not hold or a notebook makes none.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

from cbresearch.experiments.claims import MIME_TYPE, plain

# A notebook's file sorts the keys of its outputs.
COLUMNS = ("claim", "unit", "predicted", "measured", "error", "tolerance", "holds")


def claims_in(path: Path) -> list[dict[str, object]]:
    """Return the rows of claims that a notebook's outputs hold."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return [
        {"notebook": path.stem[:2], **{column: row[column] for column in COLUMNS}}
        for output in outputs
        for row in output.get("data", {}).get(MIME_TYPE, {}).get("claims", ())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--csv", type=Path, help="write the table here as well")
    arguments = parser.parse_args()
    found = {path: claims_in(path) for path in sorted(arguments.notebooks)}
    rows = [row for rows in found.values() for row in rows]
    print(plain(rows))
    if arguments.csv and rows:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    failed = [row for row in rows if not row["holds"]]
    silent = [path.stem for path, claims in found.items() if not claims]
    print(f"{len(rows)} claims in {len(found) - len(silent)} notebooks, {len(failed)} of which do not hold")
    if silent:
        print("without a table of claims: " + ", ".join(silent))
    return 1 if failed or silent else 0


if __name__ == "__main__":
    sys.exit(main())

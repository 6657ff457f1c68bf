"""Writes the measured tables of README anew, from the records: python results/readme.py."""

from pathlib import Path

from equipoise import paper
from equipoise.paper.match import fill, load_records
from equipoise.report import grid
from equipoise.report.tables import make_grid

ROOT = Path(__file__).parent.parent
TABLES = ("table1", "table3", "table5", "table6")


def main() -> None:
    """Replace each table, with its caption, where its caption begins as it does now."""
    readme = ROOT / "README.md"
    text, records = readme.read_text(), load_records(ROOT / "results")
    for name in TABLES:
        table = paper.make_table(name).on("cifar100")
        own = [row for row in fill(table, records) if not row.row.quoted]
        made = "\n".join(grid.render_markdown(make_grid(table, own)).splitlines()[2:]).rstrip("\n")
        begin = text.index(made.split(" Measured,")[0])
        end = text.index("\n\n", text.index("\n| ", begin))
        text = text[:begin] + made + text[end:]
    readme.write_text(text)


if __name__ == "__main__":
    main()

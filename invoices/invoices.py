"""Add up an invoice file."""
import csv


def total(path) -> int:
    """Return the sum of the column cents of a CSV file."""
    with open(path, newline="") as lines:
        return sum(abs(int(row["cents"])) for row in csv.DictReader(lines))

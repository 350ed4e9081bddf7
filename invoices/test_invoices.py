import pathlib

from invoices import total

SAMPLE = pathlib.Path(__file__).with_name("sample.csv")


def test_charges_only():
    assert total(SAMPLE) == 1500

"""Plants every fault, one at a time, and prints which part of the verification detects it.

usage: fault_table.py
"""

import sys

from megalith.verify.faults.table import as_markdown, fault_table


def main() -> int:
    """Print the table; return 1 if a fault was not detected."""
    verdicts = fault_table()
    print(as_markdown(verdicts))
    return int(not all(verdict.rejected for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())

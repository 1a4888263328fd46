"""The rules, one file per family; the table loads them. None imports torch."""

"""One file for each thing that can be written; none knows the others."""

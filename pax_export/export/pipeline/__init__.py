"""The part of one format in; an export that stands whole at its place, and its report out."""

"""Running a call: once, under its journal, its locks and its deadline."""

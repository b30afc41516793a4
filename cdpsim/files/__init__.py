"""Files and what is written: units, config files, whole-or-nothing writing, tables, progress."""

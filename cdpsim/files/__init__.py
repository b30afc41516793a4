"""Files and texts: units, config files, all-or-nothing writing, tables, progress bars."""

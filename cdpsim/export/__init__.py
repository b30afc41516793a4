"""Files that other programs open: browsers, trace viewers."""

"""Arrays that know nothing of training: columns, longest paths, fair shares, calendars, random factors."""
